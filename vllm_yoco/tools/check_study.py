"""The runs of ``vllm-yoco check`` and what they are compared for: every engine, in every chunk size, on all prompts.

Runs are kept by ``(mode, K, step tokens)``; K is 0 for ``off``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_yoco.config import Mode, Truncation
from vllm_yoco.tools.check_inputs import Prompt
from vllm_yoco.tools.check_rows import RequestTrace, Tally, against_plan, mask_against_compact
from vllm_yoco.tools.check_values import LIMITS, REASONS, Difference
from vllm_yoco.tools.engine_generate import Answer, engine_facts, generate
from vllm_yoco.tools.engine_process import EngineHost, Engines, EngineSpec
from vllm_yoco.tools.report import progress
from vllm_yoco.topology import LayerTopology

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig


@dataclass(frozen=True)
class Study:
    """What is to be run: ``specs`` x ``chunk_tokens``, all prompts together each time."""

    name: str
    config: YocoModelConfig
    prompts: list[Prompt]
    truncations: list[Truncation]
    chunk_tokens: list[int]
    max_tokens: int
    spec: EngineSpec
    reference: bool

    @property
    def topology(self) -> LayerTopology:
        return self.config.topology()

    @property
    def exact(self) -> int:
        return self.truncations[0].exact_keep_tokens

    @property
    def keeps(self) -> list[int]:
        return [truncation.keep_tokens for truncation in self.truncations]

    def specs(self) -> list[tuple[Mode, int, EngineSpec]]:
        """Mode, K (0: off) and engine; ``off`` first."""
        modes: list[tuple[Mode, int]] = [("off", 0)]
        for keep in self.keeps:
            modes += [("mask", keep), ("compact", keep)]
        return [
            (mode, keep, replace(self.spec, truncation=mode, keep_tokens=keep or self.keeps[0]))
            for mode, keep in modes
        ]


@dataclass(frozen=True)
class Run:
    """One engine in one chunk size; traces are those of rank 0."""

    answers: list[Answer]
    traces: list[RequestTrace]
    problems: list[str]


def record(engines: Engines, spec: EngineSpec, *request: Any) -> Run:
    """Job: generate with the recorder on; ``request`` as for ``generate``."""
    from vllm_yoco.tools import check_trace

    llm = engines.get(spec)
    llm.collective_rpc(check_trace.install)
    answers = generate(engines, spec, *request)
    return Run(answers, *llm.collective_rpc(check_trace.take)[0])


@dataclass
class Report:
    """What was compared, and what came of it."""

    engine: dict[str, Any] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    effect: float | None = None
    recomputed_rows: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def verdicts(self) -> Iterator[tuple[str, bool]]:
        """Every check by name, and whether it holds."""
        yield from ((tally.check, not tally.mismatches) for tally in self.tallies.values())
        yield from ((difference.check, difference.ok) for difference in self.differences.values())

    @property
    def ok(self) -> bool:
        return all(right for _, right in self.verdicts()) and not self.problems


def run_study(host: EngineHost, study: Study) -> Report:
    """Run every engine in every chunk size and compare. Raises EngineError if one fails."""
    runs, report = _run_all(host, study)
    _compare_metadata(study, runs, report)
    dtype = report.engine["dtype"] if report.engine["dtype"] in LIMITS else "bfloat16"
    limit = LIMITS[dtype]
    report.notes.append(f"limit of {dtype}: {REASONS[dtype]}.")
    for check, label, one, other in _same_values(study, runs, report):
        difference = report.differences.setdefault(check, Difference(check, limit))
        difference.add(one, other, lambda j: f"{label}, token {j}")  # noqa: B023
    _note_effect(study, runs, report, limit)
    return report


Runs = dict[tuple[Mode, int, int], Run]


def _run_all(host: EngineHost, study: Study) -> tuple[Runs, Report]:
    report, runs = Report(), Runs()
    prompts = [prompt.tokens for prompt in study.prompts]
    forced: list[list[int]] | None = None
    if all(prompt.continuation for prompt in study.prompts):
        forced = [list(prompt.continuation or ())[: study.max_tokens] for prompt in study.prompts]
    plan = [(mode, keep, spec, chunk) for mode, keep, spec in study.specs() for chunk in study.chunk_tokens]
    for mode, keep, spec, chunk in progress(plan, "engines"):
        if not report.engine:
            report.engine = host.run(spec, engine_facts)
        run = runs[mode, keep, chunk] = host.run(spec, record, prompts, study.max_tokens, forced, chunk)
        report.problems += [f"{spec.name}, steps of {chunk}: {problem}" for problem in run.problems]
        forced = forced or [answer.tokens for answer in run.answers]
    return runs, report


def _compare_metadata(study: Study, runs: Runs, report: Report) -> None:
    topology, block_size = study.topology, report.engine["window_block_size"]
    for (mode, keep, chunk), run in runs.items():
        report.recomputed_rows += sum(trace.recomputed_rows for trace in run.traces)
        against_plan(
            f"{_name(mode, keep)}, steps of {chunk}",
            run.traces,
            report.tallies,
            mode=mode,
            keep_tokens=keep,
            topology=topology,
            block_size=block_size,
        )
    for (mode, keep, chunk), run in runs.items():
        if mode == "mask":
            label = f"K={keep}, steps of {chunk}"
            mask_against_compact(label, run.traces, runs["compact", keep, chunk].traces, report.tallies, topology)


def _name(mode: Mode, keep: int) -> str:
    return f"{mode} K={keep}" if keep else mode


def _same_values(study: Study, runs: Runs, report: Report) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """(check, where, table, table) of everything that must agree."""
    first = study.chunk_tokens[0]
    for (mode, keep, chunk), run in runs.items():
        for index, answer in enumerate(run.answers):
            length = len(study.prompts[index].tokens)
            where = f"{_name(mode, keep)}, steps of {chunk}, prompt {index} (L={length})"
            if mode == "mask":
                yield "mask = compact", where, answer.logprobs, runs["compact", keep, chunk].answers[index].logprobs
            if chunk != first:
                yield f"{mode}: chunk sizes", where, runs[mode, keep, first].answers[index].logprobs, answer.logprobs
            off = runs["off", 0, chunk].answers[index].logprobs
            if mode != "off" and length <= keep:
                yield "L <= K = off", where, off, answer.logprobs
            elif mode != "off" and keep >= study.exact:
                yield "K >= exact = off", where, off, answer.logprobs
    if not any(len(p.tokens) > t.keep_tokens >= study.exact for p in study.prompts for t in study.truncations):
        report.notes.append(
            f"no prompt is longer than a lossless K (exact {study.exact}), so K >= exact = off was not tried;"
            " raise --max-prompt-tokens or give longer prompts."
        )
    yield from _reference_values(study, runs, report)


def _reference_values(study: Study, runs: Runs, report: Report) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    if not study.reference or report.engine["dtype"] != "float32":
        dtype = report.engine["dtype"]
        why = f"engines compute in {dtype}" if study.reference else "--no-reference, or a large model"
        report.notes.append(f"not compared with the dense float32 reference ({why}).")
        return
    import torch

    from vllm_yoco.models.reference import DenseYoco

    model = DenseYoco.from_pretrained(study.spec.model)
    keeps = sorted({keep for _, keep, _ in runs})
    for index, prompt in enumerate(progress(study.prompts, "dense reference")):
        length = len(prompt.tokens)
        tokens = torch.tensor([*prompt.tokens, *runs["off", 0, study.chunk_tokens[0]].answers[index].tokens])
        for keep in keeps:
            with torch.inference_mode():
                rows = model.logprobs(tokens, num_prompt_tokens=length, keep_tokens=keep or None)[length - 1 : -1]
            for (mode, other_keep, chunk), run in runs.items():
                if other_keep == keep:
                    where = f"{_name(mode, keep)}, steps of {chunk}, prompt {index} (L={length})"
                    yield f"{mode} = dense reference", where, rows.numpy(), run.answers[index].logprobs


def _note_effect(study: Study, runs: Runs, report: Report, limit: float) -> None:
    """How much the values can tell: what the smallest K changes against off."""
    keep, chunk = study.truncations[0].keep_tokens, study.chunk_tokens[0]
    if keep >= study.exact:
        return
    pairs = zip(runs["compact", keep, chunk].answers, runs["off", 0, chunk].answers, study.prompts, strict=True)
    effects = [float(np.abs(a.logprobs - b.logprobs).max()) for a, b, p in pairs if len(p.tokens) > keep]
    if not effects:
        report.notes.append(f"no prompt is longer than K={keep}: no row was dropped.")
        return
    report.effect = max(effects)
    seen = "which the limit tells apart" if report.effect > 2 * limit else "too little for the limit to tell apart"
    report.notes.append(f"narrowing to K={keep} moves log-probabilities by up to {report.effect:.2g}, {seen}.")

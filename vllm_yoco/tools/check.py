"""``vllm-yoco check``: prove on this machine, with real engines, that truncation does what it says.

Level 1, metadata. In every step of every engine: the rows that the consumer layers run on, the window keys that each
row sees, the cells it writes and the global KV, decoded from what the attention kernels get (``check_trace``), equal
the plan (``vllm_yoco.plan``); and those of ``mask`` and ``compact`` equal each other.

Level 2, values. Along one continuation, forced on every engine, log-probabilities over the whole vocabulary agree:

    mask = compact                at every K, chunk size, prompt and position
    chunk sizes                   off, mask and compact, each against itself in other chunks
    K = exact  = off              at the smallest lossless K
    L <= K     = off              prompts that lose no row
    dense float32 reference       off, mask and compact (models of up to REFERENCE_PARAMETERS, float32 engines)

JSON (``--json``): command, version, ok, model, engine {runner, device, dtype, backends, block_size}, window, exact,
keep_tokens [K], chunk_tokens, prompt_tokens [L], continuation_tokens, metadata [{check, values, mismatches, where}],
values [{check, ok, tables, positions, values, largest, mean, limit, where, top_changed}], effect (largest
|delta log-probability| of the smallest K against off; null if nothing was dropped), problems, notes.

Exit code: 0 if everything agrees; 1 if not, or if an engine failed; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm_yoco.config import Truncation
from vllm_yoco.tools.check_inputs import (
    MODEL_HELP,
    PROMPTS_HELP,
    Prompt,
    open_model,
    random_prompts,
    read_prompts,
    resolve_keeps,
)
from vllm_yoco.tools.check_rows import RequestTrace, Tally, against_plan, mask_against_compact
from vllm_yoco.tools.check_values import LIMITS, Difference
from vllm_yoco.tools.engine_process import (
    RUNNERS,
    Answer,
    EngineError,
    EngineHost,
    Engines,
    EngineSpec,
    engine_facts,
    generate,
)
from vllm_yoco.tools.report import add_json_argument, emit, progress, table
from vllm_yoco.topology import LayerTopology

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig

HELP = "prove with real engines that mask and compact do what the plan says and compute the same"

REFERENCE_PARAMETERS = 50_000_000
MEANING = (
    "Equality of mask and compact proves that dropping the rows changes nothing beyond the narrowed visibility; what"
    " the narrowing itself costs in quality it does not say: vllm-yoco error measures that."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--runner", choices=RUNNERS, default="auto", help="vLLM's model runner (default: its choice)")
    parser.add_argument("--prompts", metavar="FILE", help=f"instead of random tokens: {PROMPTS_HELP}")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of random prompts and weights (default: 0)")
    parser.add_argument("--keep-tokens", metavar="K,K...", help="numbers, min, exact (default: min, between, exact)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=6, help="continuation (default: 6)")
    parser.add_argument(
        "--max-prompt-tokens", metavar="N", type=int, default=1024, help="no longer prompts (default: 1024)"
    )
    parser.add_argument("--dtype", help="auto or a dtype (default: float32 on a CPU, auto on a GPU)")
    parser.add_argument(
        "--reference", action=argparse.BooleanOptionalAction, help="compare with the dense float32 model as well"
    )
    parser.add_argument("--quick", action="store_true", help="fewer lengths, K and chunk sizes")
    add_json_argument(parser)
    parser.add_argument("engine_flags", metavar="-- FLAG", nargs="*", help="further engine flags of vLLM")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the module docstring.

    Raises:
        ValueError: for arguments that do not fit each other or the model.
        OSError: for a file that cannot be read or written.
    """
    with open_model(args.model, args.seed) as (directory, config), EngineHost(args.runner) as host:
        study = plan_study(args, directory, config, host)
        try:
            report = run_study(host, study)
        except EngineError as error:
            print(f"{error.details}\nvllm-yoco check: {error}. Details are above.", file=sys.stderr)
            return 1
    emit("check", report.text(study), report.document(study), args.json)
    return 0 if report.ok else 1


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

    def specs(self) -> list[tuple[Literal["off", "mask", "compact"], int, EngineSpec]]:
        keeps = [t.keep_tokens for t in self.truncations]
        modes = [("off", 0), *((mode, keep) for keep in keeps for mode in ("mask", "compact"))]
        return [(m, k, _with(self.spec, truncation=m, keep_tokens=k or keeps[0])) for m, k in modes]  # type: ignore[misc]


def _with(spec: EngineSpec, **changes: Any) -> EngineSpec:
    return EngineSpec(**{**vars(spec), **changes})


def plan_study(args: argparse.Namespace, directory: str, config: YocoModelConfig, host: EngineHost) -> Study:
    """Prompts, K and chunk sizes for a model. Raises ValueError for arguments that do not fit it."""
    if args.max_tokens < 1 or args.max_prompt_tokens < 1:
        raise ValueError("--max-tokens and --max-prompt-tokens must be 1 or more.")
    topology = config.topology()
    least, exact = resolve_keeps("min", topology)[0], resolve_keeps("exact", topology)[0]
    window, exact_keep = topology.consumer_window, exact.keep_tokens
    between = (least.keep_tokens + exact_keep) // 2 | 1
    default = "min,exact" if args.quick or not least.keep_tokens < between < exact_keep else f"min,{between},exact"
    truncations = resolve_keeps(args.keep_tokens or default, topology)
    longest = min(args.max_prompt_tokens, config.max_position_embeddings - args.max_tokens)
    if longest < 1:
        raise ValueError(f"--max-tokens {args.max_tokens}: the model has room for {config.max_position_embeddings}.")
    odd_chunk = window + window // 2 + 1 | 1
    if args.prompts:
        prompts = read_prompts(args.prompts, directory, config.vocab_size, longest)
    else:
        keeps = [t.keep_tokens for t in truncations]
        lengths = _lengths(window, keeps, exact_keep, odd_chunk, longest, args.quick)
        prompts = random_prompts(lengths, config.vocab_size, args.seed)
    max_prompt = max(len(prompt.tokens) for prompt in prompts)
    chunks = [max(max_prompt, 16), odd_chunk] if args.quick else [max(max_prompt, 16), odd_chunk, window // 2 + 13]
    small = parameters_of(config) <= REFERENCE_PARAMETERS
    dtype = args.dtype or ("auto" if host.on_gpu else "float32")
    return Study(
        name=args.model,
        config=config,
        prompts=prompts,
        truncations=truncations,
        chunk_tokens=chunks,
        max_tokens=args.max_tokens,
        reference=small if args.reference is None else args.reference,
        spec=EngineSpec(
            model=directory,
            truncation="off",
            keep_tokens=0,
            dtype=dtype,
            max_model_len=max_prompt + args.max_tokens + 1,
            chunk_tokens=max(chunks),
            flags=tuple(args.engine_flags),
        ),
    )


def parameters_of(config: YocoModelConfig) -> int:
    from vllm_yoco.models.checkpoint import parameter_count

    return parameter_count(config)


def _lengths(
    window: int, keeps: Sequence[int], exact: int, chunk: int, longest: int, quick: bool
) -> list[int]:
    """Prompt lengths around every place where a rule changes, and one past the lossless K."""
    lengths = {1, window, window + 1, keeps[0] + 1, exact + window + 1, min(longest, 3 * chunk + 2)}
    if not quick:
        lengths |= {2, window - 1, chunk, chunk + 1, 2 * chunk + 1, longest // 2 | 1, exact, exact + 2 * window + 7}
        lengths |= {keep + step for keep in keeps for step in (-1, 0, 1)}
    return sorted(length for length in lengths if 1 <= length <= longest)


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
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        right = all(not tally.mismatches for tally in self.tallies.values())
        return right and all(d.ok for d in self.differences.values()) and not self.problems

    def document(self, study: Study) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "model": study.name,
            "engine": self.engine,
            "window": study.topology.consumer_window,
            "exact": study.exact,
            "keep_tokens": [t.keep_tokens for t in study.truncations],
            "chunk_tokens": study.chunk_tokens,
            "prompt_tokens": [len(prompt.tokens) for prompt in study.prompts],
            "continuation_tokens": study.max_tokens,
            "metadata": [asdict(tally) for tally in self.tallies.values()],
            "values": [
                {k: v for k, v in asdict(d).items() if k != "_sum"} | {"mean": d.mean, "ok": d.ok}
                for d in self.differences.values()
            ],
            "effect": self.effect,
            "problems": self.problems,
            "notes": self.notes,
        }

    def text(self, study: Study) -> str:
        engine, dtype = self.engine, self.engine["dtype"]
        lengths = ", ".join(str(len(prompt.tokens)) for prompt in study.prompts)
        head = [
            f"{study.name}: runner {engine['runner'].upper()}, {engine['device']}, {dtype},"
            f" {', '.join(engine['backends'])}, blocks of {engine['block_size']} tokens",
            f"W {study.topology.consumer_window}; K {', '.join(str(t.keep_tokens) for t in study.truncations)}"
            f" (exact: {study.exact}); steps of up to {', '.join(map(str, study.chunk_tokens))} tokens",
            f"L {lengths}; {study.max_tokens} more tokens, forced on every engine",
        ]
        metadata = table(
            ("metadata", "values", "wrong", "first one wrong"),
            [(t.check, t.values, t.mismatches, t.where or "") for t in self.tallies.values()],
        )
        values = table(
            ("log-probabilities", "prompts", "values", "largest", "mean", "limit", "top changed", "largest at"),
            [
                (d.check, d.tables, d.values, f"{d.largest:.1e}", f"{d.mean:.1e}", f"{d.limit:g}", d.top_changed, d.where)
                for d in self.differences.values()
            ],
        )
        wrong = [t.check for t in self.tallies.values() if t.mismatches]
        wrong += [d.check for d in self.differences.values() if not d.ok]
        compared = sum(t.values for t in self.tallies.values()), sum(d.values for d in self.differences.values())
        verdict = (
            f"ok: {compared[0]:,} rows, keys and cells as planned, {compared[1]:,} log-probabilities within the limit"
            if self.ok
            else f"FAILED: {'; '.join([*wrong, *self.problems])}"
        )
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*head, "", metadata, "", values, "", *notes, MEANING, verdict])


def run_study(host: EngineHost, study: Study) -> Report:
    """Run every engine in every chunk size and compare. Raises EngineError if one fails."""
    runs, report = _run_all(host, study)
    _compare_metadata(study, runs, report)
    limit = LIMITS.get(report.engine["dtype"], LIMITS["bfloat16"])
    for check, label, one, other in _same_values(study, runs, report):
        difference = report.differences.setdefault(check, Difference(check, limit))
        difference.add(one, other, lambda j: f"{label}, token {j}")  # noqa: B023
    _note_effect(study, runs, report, limit)
    return report


Runs = dict[tuple[str, int, int], Run]


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
        against_plan(
            f"{mode} K={keep}, steps of {chunk}" if keep else f"off, steps of {chunk}",
            run.traces,
            report.tallies,
            mode=mode,  # type: ignore[arg-type]
            keep_tokens=keep,
            topology=topology,
            block_size=block_size,
        )
    for (mode, keep, chunk), run in runs.items():
        if mode == "mask":
            label = f"K={keep}, steps of {chunk}"
            mask_against_compact(label, run.traces, runs["compact", keep, chunk].traces, report.tallies, topology)


def _same_values(
    study: Study, runs: Runs, report: Report
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """(check, where, table, table) of everything that must agree."""
    first = study.chunk_tokens[0]
    for (mode, keep, chunk), run in runs.items():
        name = f"{mode} K={keep}" if keep else "off"
        for index, answer in enumerate(run.answers):
            length = len(study.prompts[index].tokens)
            where = f"prompt {index} (L={length}), {name}, steps of {chunk}"
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


def _reference_values(
    study: Study, runs: Runs, report: Report
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    if not study.reference or report.engine["dtype"] != "float32":
        why = "--no-reference, or a large model" if not study.reference else f"engines compute in {report.engine['dtype']}"
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
                    where = f"prompt {index} (L={length}), {mode} K={keep}, steps of {chunk}"
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
    report.notes.append(
        f"narrowing to K={keep} moves log-probabilities by up to {report.effect:.2g},"
        + (" which the limit tells apart." if report.effect > 10 * limit else " too little for the limit to tell apart.")
    )

"""Serving step by step, and random traffic against the dense reference.

``serve`` runs requests that arrive and are aborted at chosen steps and records what each step scheduled.
``random_round`` draws such requests for one engine: lengths at every edge, prefixes that earlier requests share,
aborts, repetitive prompts for n-gram drafts, more than a small pool holds. Every consumer SWA block is full of NaN
when it is handed out. A round is a function of its seed and number, except for what earlier rounds have left in the
prefix cache.

    python -m tests.engine.traffic --minutes 20 --seed 0 --runner v1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.conftest import CONFIGS, MAX_LOGPROB_DIFFERENCE, Reference
from tests.engine.harness import (
    EngineConfig,
    Engines,
    Request,
    Result,
    RunnerProcess,
    consumer_swa_groups,
    sampling_params,
    scheduler_of,
    to_result,
)
from tests.engine.poison import model_worker
from vllm_yoco import integrity
from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint
from vllm_yoco.testing.runner_v2_cpu import ENV_ASYNC


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before engine step ``at`` and, perhaps, is aborted before step ``abort_at``."""

    request: Request
    at: int = 0
    abort_at: int | None = None


@dataclass
class Step:
    """One scheduled step. Requests are named by their index among the arrivals.

    Attributes:
        rows: request -> rows of its chunk, drafts included.
        start: request -> position of the chunk's first row.
        drafts: request -> draft tokens among its rows.
        resumed: requests that come back from preemption.
    """

    rows: dict[int, int]
    start: dict[int, int]
    drafts: dict[int, int]
    resumed: set[int]


@dataclass
class Served:
    """``results`` has None for a request that was aborted in time; ``preemptions`` counts per request."""

    results: list[Result | None]
    steps: list[Step] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)


def serve(engines: Engines, config: EngineConfig, arrivals: Sequence[Arrival]) -> Served:
    """Run the arrivals through the engine until it is idle."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine = engines.get(config).llm_engine
    served = Served([None] * len(arrivals), preemptions=[0] * len(arrivals))
    index_of: dict[str, int] = {}
    with _recording(scheduler_of(engines, config), index_of, served):
        step = 0
        while step <= max(arrival.at for arrival in arrivals) or engine.has_unfinished_requests():
            for index, arrival in enumerate(arrivals):
                if arrival.at == step:
                    params = sampling_params(arrival.request)
                    params.output_kind = RequestOutputKind.FINAL_ONLY
                    prompt = TokensPrompt(prompt_token_ids=list(arrival.request.prompt))
                    index_of[engine.add_request(str(index), prompt, params)] = index
            engine.abort_request([str(index) for index, arrival in enumerate(arrivals) if arrival.abort_at == step])
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    served.results[int(output.request_id)] = to_result(output)
            step += 1
    return served


@contextmanager
def _recording(scheduler: Any, index_of: dict[str, int], served: Served) -> Iterator[None]:
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def recorded_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        start = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        start |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = {name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()}
        resumed = {index_of[name] for name in start if scheduler.requests[name].num_preemptions > seen.get(name, 0)}
        seen.update({name: scheduler.requests[name].num_preemptions for name in start})
        if start:
            tables = (output.num_scheduled_tokens, start, drafts)
            served.steps.append(Step(*({index_of[name]: n for name, n in table.items()} for table in tables), resumed))
        return output

    def recorded_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        served.preemptions[index_of[request.request_id]] += 1
        return preempt(request, *args, **kwargs)

    seen: dict[str, int] = {}
    scheduler.schedule, scheduler._preempt_request = recorded_schedule, recorded_preempt
    try:
        yield
    finally:
        scheduler.schedule, scheduler._preempt_request = schedule, preempt


WINDOW = 24
MAX_LEN = 512
MODELS = ("configs/models/ced-tiny.json", "tests/data/models/sliding-producers.json")
RUNNERS = {"v1": ("v1", {}), "v2": ("v2", {}), "v2-async": ("v2", {ENV_ASYNC: "1"})}


def engine_configs(models: Sequence[str]) -> list[EngineConfig]:
    """Engines that differ in everything that moves a block, a chunk or a row; the longest request just fits."""
    tiny, sliding = models

    def config(model: str, mode: str, keep: int, chunk: int, blocks: int, caching: bool, **more: Any) -> EngineConfig:
        more = {"max_model_len": MAX_LEN} | more
        return EngineConfig(model, mode, keep, chunk, prefix_caching=caching, num_blocks=blocks, **more)

    return [
        config(tiny, "compact", WINDOW + 1, 96, 26, True),
        config(tiny, "compact", WINDOW + 4, 77, 30, True, ngram_tokens=3),
        config(tiny, "mask", 71, 64, 28, True),
        config(sliding, "compact", 45, 128, 40, True),
        config(tiny, "compact", 71, 33, 26, False, max_num_seqs=16),
        config(tiny, "compact", 140, 512, 22, True, block_size=64, options=(("long_prefill_token_threshold", 100),)),
        config(sliding, "mask", WINDOW + 4, 96, 36, True, ngram_tokens=3),
    ]


def random_round(rng: np.random.Generator, config: EngineConfig) -> list[Arrival]:
    """3 to 10 requests. Prefixes come from a few stems that every round of an engine shares."""
    edges = [1, 2, WINDOW, WINDOW + 1, config.keep_tokens, config.keep_tokens + 1, config.chunk_tokens + 1]
    stems = [np.random.default_rng(stem).integers(0, 256, MAX_LEN) for stem in range(3)]
    arrivals: list[Arrival] = []
    for _ in range(rng.integers(3, 11)):
        max_tokens = int(rng.choice([1, 2, 20, 60, 100]))
        longest = MAX_LEN - max_tokens
        # Several of middling length share the pool, and outgrow it; a long one has it to itself.
        length = int(rng.integers(1, 1 + rng.choice([220, longest])))
        kind = rng.random()
        if kind < 0.2:
            length = min(longest, int(rng.choice(edges)))
        elif kind < 0.35:
            length = min(longest, int(rng.integers(1, 8)) * config.block_size + int(rng.integers(-1, 2)))
        prompt = rng.integers(0, 256, length)
        kind = rng.random()
        if kind < 0.4:
            shared = length - int(rng.integers(0, min(length, 90)))
            prompt[:shared] = stems[rng.integers(len(stems))][:shared]
        elif kind < 0.6:
            prompt = np.resize(prompt[: rng.integers(1, 8)], length)
        elif kind < 0.7 and arrivals:
            prompt = np.array(arrivals[rng.integers(len(arrivals))].request.prompt)[:longest]
        at = int(rng.integers(0, 30)) * int(rng.random() < 0.7)
        abort_at = at + int(rng.integers(1, 15)) if rng.random() < 0.15 else None
        arrivals.append(Arrival(Request(tuple(prompt.tolist()), max_tokens), at, abort_at))
    return arrivals


def poison_allocations(engines: Engines, config: EngineConfig) -> None:
    """From now on every consumer SWA block is full of NaN when a request gets it, every other new block zero.

    At allocation, unlike ``poison.poison_new_swa_blocks``: blocks of a prefix hit are not new and stay as they are.
    """
    scheduler = scheduler_of(engines, config)
    context = model_worker(engines, config).model_runner.vllm_config.compilation_config.static_forward_context
    swa_groups = consumer_swa_groups(scheduler)
    scheduler.num_poisoned_blocks = 0

    def poisoning(manager: Any, layers: Sequence[str], value: float) -> Any:
        allocate = manager.allocate_new_blocks

        def allocate_new_blocks(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            ids = [block.block_id for block in blocks]
            for name in layers:
                context[name].kv_cache[ids] = value
            scheduler.num_poisoned_blocks += len(ids) * (value != 0)
            return blocks

        return allocate_new_blocks

    for index, manager in enumerate(scheduler.kv_cache_manager.coordinator.single_type_managers):
        layers = scheduler.kv_cache_config.kv_cache_groups[index].layer_names
        manager.allocate_new_blocks = poisoning(manager, layers, float("nan") if index in swa_groups else 0.0)


def serve_poisoned(engines: Engines, config: EngineConfig, arrivals: Sequence[Arrival]) -> tuple[Served, int]:
    """``serve``, and the number of blocks poisoned meanwhile."""
    if config not in engines.llms:
        engines.get(config)
        poison_allocations(engines, config)
    scheduler = scheduler_of(engines, config)
    before = scheduler.num_poisoned_blocks
    return serve(engines, config, arrivals), scheduler.num_poisoned_blocks - before


def mismatch(reference: Reference, model: str, request: Request, result: Result, keep: int) -> str | None:
    """What tells a result from the reference; a near tie may go either way."""
    length = len(request.prompt)
    if len(result.tokens) != request.max_tokens:
        return f"{len(result.tokens)} tokens instead of {request.max_tokens}"
    rows = reference.logprobs(model, [*request.prompt, *result.tokens], length, keep)[length - 1 : -1]
    difference = np.abs(result.logprobs - rows).max()
    if not difference <= MAX_LOGPROB_DIFFERENCE:  # NaN is a mismatch too
        return f"log-probabilities differ by {difference:.2g}"
    lost = (rows.max(-1) - rows[np.arange(len(rows)), result.tokens]).max()
    return None if lost <= 2 * MAX_LOGPROB_DIFFERENCE else f"a token is {lost:.2g} nats below the best"


def run_round(
    process: RunnerProcess, reference: Reference, configs: Sequence[EngineConfig], seed: int, number: int
) -> tuple[Counter[str], list[str], list[tuple[Request, Result]]]:
    """Counts, mismatches in words, and what was served in full; the configurations take turns."""
    config = configs[number % len(configs)]
    arrivals = random_round(np.random.default_rng([seed, number]), config)
    served, poisoned = process.call(serve_poisoned, config, arrivals)
    pairs = [(a.request, result) for a, result in zip(arrivals, served.results, strict=True) if result is not None]
    problems = []
    for index, (arrival, result) in enumerate(zip(arrivals, served.results, strict=True)):
        if result is None:
            found = None if arrival.abort_at is not None else "no result"
        else:
            found = mismatch(reference, config.model, arrival.request, result, config.keep_tokens)
        if found:
            problems.append(f"seed {seed} round {number} request {index} L={len(arrival.request.prompt)}: {found}")
    counts = Counter(
        requests=len(arrivals),
        aborted=len(arrivals) - len(pairs),
        steps=len(served.steps),
        preemptions=sum(served.preemptions),
        hits=sum(result.num_cached_tokens > 0 for _, result in pairs),
        drafts=sum(sum(step.drafts.values()) for step in served.steps),
        poisoned=poisoned,
        mismatches=len(problems),
    )
    return counts, problems, pairs


def save_models(directory: Path) -> list[str]:
    paths = []
    for path in MODELS:
        config = read_model_config(CONFIGS / path)
        target = directory / Path(path).stem
        save_checkpoint(target, config, random_state_dict(config, seed=0))
        paths.append(str(target))
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", choices=list(RUNNERS), default="v1")
    parser.add_argument("--first-round", type=int, default=0, help="start here, to see a failure again")
    args = parser.parse_args()
    runner, environment = RUNNERS[args.runner]
    process = RunnerProcess(runner, environment | {integrity.ENV: "1"})
    reference, total, number = Reference(), Counter[str](), args.first_round
    try:
        with tempfile.TemporaryDirectory() as directory:
            configs = engine_configs(save_models(Path(directory)))
            end = time.monotonic() + 60 * args.minutes
            while time.monotonic() < end:
                counts, problems, _ = run_round(process, reference, configs, args.seed, number)
                total.update(counts)
                print("\n".join(problems), end="\n" if problems else "")
                number += 1
                if number % 50 == 0:
                    reference = Reference()  # it keeps all it has computed
                    print(f"seed {args.seed}, {number} rounds: {_in_words(total)}", flush=True)
    except AssertionError:
        print(f"seed {args.seed} round {number} broke the engine", flush=True)
        raise
    finally:
        process.close()
    print(f"{args.runner}, seed {args.seed}, rounds {args.first_round} to {number - 1}: {_in_words(total)}")
    return 1 if total["mismatches"] else 0


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())

"""What truncation loses by chunks, measured on one engine: a prompt in one chunk and in several, with K and without.

Rounds of ``chunks`` let engines take turns step by step. Of steps of unequal number and length the shorter ones pay
more for that: each begins with caches that another engine has filled. And engines of equal code differ, by where their
memory lies, by more than what is sought. So one engine serves whole prompts, with its own K and with a K that keeps
every row, which is ``off`` (L <= K; tests/engine/test_equivalence.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from vllm_yoco.tools.bench_engine import BenchEngine, get, runner_of, serve
from vllm_yoco.tools.bench_serve import Workload
from vllm_yoco.tools.engine_process import Engines

KEPT, ALL = "kept_ms", "all_ms"


def chunk_loss(
    engines: Engines, spec: BenchEngine, workload: Workload, chunk_tokens: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Serve a prompt by chunks of each size, keeping K rows and all of them; in rotating order.

    Args:
        workload: one request of one token.

    Returns:
        ``rounds``: for each, ``kept_ms`` and ``all_ms``, the TTFT for each of ``chunk_tokens``.
    """
    llm = get(engines, spec)
    cells = [(key, index) for index in range(len(chunk_tokens)) for key in (KEPT, ALL)]

    def ttft_ms(key: str, index: int) -> float:
        sized = replace(workload, chunk_tokens=chunk_tokens[index])
        with keeping_every_row(llm) if key == ALL else nullcontext():
            return float(serve(engines, spec, sized)["median_ttft_ms"])

    for cell in cells:  # unmeasured
        ttft_ms(*cell)
    rounds = []
    for repeat in range(repeats):
        first = repeat % len(cells)
        times = {cell: ttft_ms(*cell) for cell in cells[first:] + cells[:first]}
        rounds.append({key: [times[key, index] for index in range(len(chunk_tokens))] for key in (KEPT, ALL)})
    return {"rounds": rounds}


@contextmanager
def keeping_every_row(llm: Any) -> Iterator[None]:
    """For this time K is longer than any prompt, in the model and in the scheduler; the engine serves nothing else."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    truncations = scheduler._yoco_truncation, runner_of(llm).get_model().truncation
    keep_tokens = [truncation.keep_tokens for truncation in truncations]
    for truncation in truncations:
        object.__setattr__(truncation, "keep_tokens", llm.model_config.max_model_len)  # frozen for everybody else
    try:
        yield
    finally:
        for truncation, keep in zip(truncations, keep_tokens, strict=True):
            object.__setattr__(truncation, "keep_tokens", keep)


def gains(times: Mapping[str, Sequence[float]]) -> list[float]:
    """Speed-up at each chunk size."""
    return [every / kept for every, kept in zip(times[ALL], times[KEPT], strict=True)]


def best(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The least of each time."""
    return {key: [min(times) for times in zip(*(r[key] for r in rounds), strict=True)] for key in (KEPT, ALL)}

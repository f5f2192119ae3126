"""The engine invariants on a GPU, in float32 and bfloat16, eager and with CUDA graphs for decode.

Everything is compared with the dense float32 reference on the CPU. Each test records the differences that it saw, so
that a report shows how far from its bound a result was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_kit.settings import is_rehearsal
from tests.engine.conftest import Reference, random_prompt
from tests.engine.harness import (
    EngineConfig,
    Engines,
    Request,
    Result,
    RunnerProcess,
    computed_rows,
    generate,
    scheduler_of,
)
from tests.engine.poison import model_worker, poison_new_swa_blocks, stop_poisoning

pytestmark = pytest.mark.gpu

WINDOW, BLOCK = 24, 32
MIN_KEEP = WINDOW + 1
MAX_ROWS = 1024
"""Rows that a step has room for; ``chunk_tokens`` below restricts the scheduler further, without another engine."""

KEEP = MIN_KEEP + 1
"""So small that truncation changes log-probabilities by tenths of a nat: a GPU's float32, and bfloat16, can tell."""

if is_rehearsal():
    # As small as still drops rows in one chunk and in several: an interpreted step takes seconds.
    LENGTHS, NUM_TOKENS, CHUNKS, CACHED_LENGTHS = (1, 26, 60), 2, (33, MAX_ROWS), (KEEP, 70)
else:
    LENGTHS, NUM_TOKENS = (1, 24, 25, 26, 27, 72, 97, 193, 300, 411, 500), 8
    CHUNKS, CACHED_LENGTHS = (37, 96, MAX_ROWS), (KEEP, 58, 59, 167, 300, 417)

MAX_DIFFERENCE = {"float32": 2e-3, "bfloat16": 0.25}
"""In nats, over all tokens of the vocabulary. float32 with TF32 off: kernels sum in another order than the reference.
bfloat16: the rounding of six layers of random weights; the reference's weights are rounded alike."""

DTYPES = ("float32", "bfloat16")
SETTINGS = {
    "off": ("off", "min", None),
    "compact": ("compact", KEEP, KEEP),
    "compact-exact": ("compact", "exact", None),
    "mask": ("mask", KEEP, KEEP),
    "compact-min": ("compact", "min", MIN_KEEP),
}
"""Name to (mode, K as given, K that the reference drops by; None drops nothing)."""


@pytest.fixture(params=[pytest.param(False, id="eager"), pytest.param(True, id="graphs", marks=pytest.mark.graphs)])
def graphs(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    def write(**values: Any) -> None:
        for name, value in values.items():
            record_property(name, value)

    return write


def engine_config(model: str, dtype: str, graphs: bool, name: str = "compact", **options: Any) -> EngineConfig:
    mode, keep_tokens, _ = SETTINGS[name]
    engine_options = (("enforce_eager", not graphs), ("dtype", dtype), ("gpu_memory_utilization", 0.1))
    return EngineConfig(model, mode, keep_tokens, MAX_ROWS, BLOCK, options=engine_options, **options)


def requests(lengths: tuple[int, ...] = LENGTHS, max_tokens: int = NUM_TOKENS) -> list[Request]:
    return [Request(random_prompt(length, seed=length), max_tokens) for length in lengths]


def generate_in_chunks(engines: Engines, config: EngineConfig, batch: list[Request], chunk_tokens: int) -> list[Result]:
    engines.get(config)
    scheduler = scheduler_of(engines, config)
    before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, chunk_tokens
    try:
        return generate(engines, config, batch)
    finally:
        scheduler.max_num_scheduled_tokens = before


def difference(
    reference: Reference, config: EngineConfig, batch: list[Request], results: list[Result], keep: int | None
) -> float:
    """Largest |delta logprob| to the reference. NaN where any is NaN."""
    return float(np.max([reference.difference(config.model, *pair, keep) for pair in zip(batch, results, strict=True)]))


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_reference(engine: RunnerProcess, reference, model, record, name, dtype, graphs):
    """Prompts of 1 to 500 tokens, more than fit at once, so that decodes mix with chunks of other prompts."""
    config = engine_config(model, dtype, graphs, name)
    for chunk_tokens in CHUNKS if name == "compact" else CHUNKS[:1]:
        results = engine.call(generate_in_chunks, config, requests(), chunk_tokens)
        worst = difference(reference, config, requests(), results, SETTINGS[name][2])
        record(**{f"max_difference_chunk_{chunk_tokens}": worst})
        assert worst <= MAX_DIFFERENCE[dtype]


def test_wrong_keep_is_seen(engine: RunnerProcess, reference, model, record, dtype, graphs):
    """Negative control: the comparison tells K from off; in float32, whose bound is fine enough, from K + 1 too."""
    config = engine_config(model, dtype, graphs)
    batch = requests(tuple(length for length in LENGTHS if length > KEEP + WINDOW))
    results = engine.call(generate_in_chunks, config, batch, CHUNKS[0])
    from_off = difference(reference, config, batch, results, None)
    from_next = difference(reference, config, batch, results, KEEP + 1)
    from_own = difference(reference, config, batch, results, KEEP)
    record(difference_from_off=from_off, difference_from_next_keep=from_next, difference_from_own=from_own)
    assert from_off > max(MAX_DIFFERENCE[dtype], 2 * from_own)
    if dtype == "float32":
        assert from_next > 2 * MAX_DIFFERENCE[dtype]


def test_independent_of_chunks_and_batch_mates(engine: RunnerProcess, model, record, dtype, graphs):
    """One prompt alone in one chunk, alone in odd chunks, among others in odd chunks."""
    config = engine_config(model, dtype, graphs)
    length = LENGTHS[-1] - 7
    probe = Request(random_prompt(length, seed=length), NUM_TOKENS)
    crowd = [Request(random_prompt(n, seed=1000 + n), NUM_TOKENS + 3) for n in (LENGTHS[-2], 7, 61, 33)]
    alone = engine.call(generate_in_chunks, config, [probe], MAX_ROWS)[0]
    chunked = engine.call(generate_in_chunks, config, [probe], CHUNKS[0])[0]
    crowded = engine.call(generate_in_chunks, config, [*crowd, probe], CHUNKS[0])[-1]
    for name, other in (("chunked", chunked), ("crowded", crowded)):
        # Rows compare as long as both continued with the same tokens; the first is always comparable.
        same = next(
            (i for i, pair in enumerate(zip(other.tokens, alone.tokens, strict=True)) if pair[0] != pair[1]), NUM_TOKENS
        )
        rows = min(same + 1, NUM_TOKENS)
        worst = float(np.abs(other.logprobs[:rows] - alone.logprobs[:rows]).max())
        record(**{f"{name}_max_difference": worst, f"{name}_equal_tokens": same})
        assert worst <= MAX_DIFFERENCE[dtype]
        assert dtype != "float32" or same == NUM_TOKENS


def test_rows_are_not_computed(engine: RunnerProcess, model, record, dtype, graphs):
    """What makes compact faster: each consumer layer runs on K rows, in one chunk or in several, and on no other."""
    config = engine_config(model, dtype, graphs)
    length = LENGTHS[-1]
    for chunk_tokens in (MAX_ROWS, KEEP + 8):
        before = engine.call(computed_rows, config)
        engine.call(generate_in_chunks, config, requests((length,), max_tokens=1), chunk_tokens)
        rows = {b - a for a, b in zip(before, engine.call(computed_rows, config), strict=True)}
        record(**{f"rows_chunk_{chunk_tokens}": sorted(rows)})
        assert rows == {KEEP}


def test_prefix_hits(engine: RunnerProcess, reference, model, record, dtype, graphs):
    """Cold, then warm: hits end at L - K or below, block aligned, and change nothing. A second prompt shares a stem."""
    config = engine_config(model, dtype, graphs, prefix_caching=True)
    batch = requests(CACHED_LENGTHS)
    for name, expected in (
        ("cold", [0] * len(batch)),
        ("warm", [max(0, length - KEEP) // BLOCK * BLOCK for length in CACHED_LENGTHS]),
    ):
        results = engine.generate(config, batch)
        worst = difference(reference, config, batch, results, KEEP)
        record(**{f"{name}_hits": [r.num_cached_tokens for r in results], f"{name}_max_difference": worst})
        assert [result.num_cached_tokens for result in results] == expected
        assert worst <= MAX_DIFFERENCE[dtype]


def remove_cap(engines: Engines, config: EngineConfig) -> None:
    """Give this engine vLLM's own look-up of prefix hits back."""
    manager = scheduler_of(engines, config).kv_cache_manager
    del manager.get_computed_blocks, manager.coordinator.find_longest_cache_hit


def test_without_the_cap_hits_are_wrong(engine: RunnerProcess, reference, model, record, graphs):
    """Negative control: a hit among the last K rows leaves them without SWA, and the comparison sees it.

    Blocks are poisoned when handed out, or a request might get its own old ones back and be right by luck.
    """
    if graphs:
        pytest.skip("the scheduler's part; shown eager")
    config = engine_config(model, "float32", graphs, prefix_caching=True, max_num_seqs=5)
    batch = requests(CACHED_LENGTHS[-1:])
    engine.generate(config, batch)
    engine.call(remove_cap, config)
    engine.call(poison_new_swa_blocks, config)
    results = engine.generate(config, batch)
    worst = difference(reference, config, batch, results, KEEP)
    record(hits=[result.num_cached_tokens for result in results], max_difference=worst)
    assert results[0].num_cached_tokens > CACHED_LENGTHS[-1] - KEEP
    assert not worst <= 10 * MAX_DIFFERENCE["float32"]


@pytest.mark.parametrize("name", ["compact", "mask"])
def test_nan_in_unwritten_cells(engine: RunnerProcess, reference, model, record, name, dtype, graphs):
    """Every consumer SWA block is full of NaN when it is handed out: what reaches the logits was written."""
    config = engine_config(model, dtype, graphs, name)
    engine.generate(config, requests((1,)))
    engine.call(poison_new_swa_blocks, config)
    try:
        for chunk_tokens in (CHUNKS[0], MAX_ROWS):
            results = engine.call(generate_in_chunks, config, requests(), chunk_tokens)
            worst = difference(reference, config, requests(), results, KEEP)
            record(**{f"max_difference_chunk_{chunk_tokens}": worst})
            assert worst <= MAX_DIFFERENCE[dtype]
    finally:
        poisoned = engine.call(stop_poisoning, config)
    record(poisoned_blocks=poisoned)
    assert poisoned >= 2 * len(LENGTHS)


def poison_written_blocks(engines: Engines, config: EngineConfig, request: Request) -> Result:
    """Serve alone; between the prompt and its first decode step, all of the consumers' SWA cells become NaN."""
    runner = model_worker(engines, config).model_runner
    execute = runner.execute_model
    context = runner.vllm_config.compilation_config.static_forward_context

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.scheduled_new_reqs and scheduler_output.total_num_scheduled_tokens:
            for name in (n for n in context if n.endswith(".swa_attn")):
                context[name].kv_cache[:] = float("nan")
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    try:
        return generate(engines, config, [request])[0]
    finally:
        del runner.execute_model
        for name in (n for n in context if n.endswith(".swa_attn")):
            context[name].kv_cache[:] = 0.0


def test_poison_in_written_cells_is_seen(engine: RunnerProcess, model, dtype, graphs):
    """Negative control: the same NaN in cells that have been written does reach the logits."""
    config = engine_config(model, dtype, graphs)
    engine.generate(config, requests((1,)))
    result = engine.call(poison_written_blocks, config, Request(random_prompt(40, seed=40), 2))
    assert np.isfinite(result.logprobs[0]).all() and np.isnan(result.logprobs[1:]).any()


def count_replays(engines: Engines, config: EngineConfig, batch: list[Request]) -> tuple[int, list[Result]]:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    engines.get(config)
    replay, count = CudaGraphManager.run_fullgraph, 0

    def counted(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return replay(self, *args)

    CudaGraphManager.run_fullgraph = counted
    try:
        results = generate(engines, config, batch)
        return count, results
    finally:
        CudaGraphManager.run_fullgraph = replay


@pytest.mark.parametrize("name", ["off", "compact", "mask"])
def test_decode_runs_in_graphs(engine: RunnerProcess, model, record, name, dtype, graphs):
    """With graphs on every decode step replays one, in every mode; eager replays none."""
    config = engine_config(model, dtype, graphs, name)
    replays, _ = engine.call(count_replays, config, requests((LENGTHS[-1], 30)))
    record(full_graph_replays=replays)
    assert replays >= NUM_TOKENS - 2 if graphs else replays == 0

"""What the scheduler may do to a request: preempt, resume, abort, cut into chunks, run with few or many others."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import MAX_LOGPROB_DIFFERENCE, Reference, random_prompt
from tests.engine.harness import (
    EngineConfig,
    Engines,
    RemoteError,
    Request,
    RunnerProcess,
    consumer_swa_groups,
    scheduler_of,
)
from tests.engine.poison import model_worker
from tests.engine.test_equivalence import MODES, ODD_KEEP, WINDOW, check, requests
from tests.engine.traffic import Arrival, Served, serve
from vllm_yoco import counters, integrity
from vllm_yoco.testing.runner_v2_cpu import ENV_ASYNC

# The longest request (512 tokens) needs 16 blocks of global KV and 6 of consumer SWA.
SMALL = {"num_blocks": 26, "max_model_len": 512}
CROSSING = tuple(
    Arrival(Request(random_prompt(length, seed=length), max_tokens), at)
    for length, max_tokens, at in ((150, 80, 0), (130, 70, 0), (190, 90, 2), (60, 100, 3), (95, 40, 9))
)

# The second request is preempted by the first and finds room again only when it is alone.
ALONE = tuple(
    Arrival(Request(random_prompt(length, seed=length), max_tokens)) for length, max_tokens in ((250, 100), (215, 80))
)


def check_served(
    engine: RunnerProcess, reference: Reference, config: EngineConfig, arrivals: tuple[Arrival, ...]
) -> Served:
    """Serve, compare every request that was not aborted with the reference, and hand back the record."""
    served = engine.call(serve, config, arrivals)
    keep = None if config.truncation == "off" else config.keep_tokens
    for arrival, result in zip(arrivals, served.results, strict=True):
        if arrival.abort_at is None:
            reference.check(config.model, arrival.request, result, keep)
    return served


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("truncation", MODES)
def test_preempted_and_resumed(engine, reference, model_dir, truncation, prefix_caching):
    """A pool just large enough: outputs outgrow it, requests are preempted and recompute prompt and output.

    L stays the prompt's length, so s_keep does not move and the reference of the undisturbed run holds.
    """
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, prefix_caching=prefix_caching, **SMALL)
    served = check_served(engine, reference, config, CROSSING)
    assert sum(served.preemptions) >= 2
    # Some step holds resumed requests next to others.
    assert any(step.resumed and step.resumed < set(step.rows) for step in served.steps)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("truncation", MODES)
def test_resumed_alone(engine, reference, model_dir, truncation, prefix_caching):
    """A step of resumed requests only: none is new to the worker, none was in the step before.

    With caching the request finds its own blocks again, no further than the limit of its prompt.
    """
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, prefix_caching=prefix_caching, **SMALL)
    served = check_served(engine, reference, config, ALONE)
    assert served.preemptions == [0, 1]
    [step] = [step for step in served.steps if step.resumed]
    assert set(step.rows) == step.resumed == {1}
    assert step.start[1] == ((215 - ODD_KEEP) // 32 * 32 if prefix_caching else 0)


def serve_and_count(
    engines: Engines, config: EngineConfig, arrivals: tuple[Arrival, ...]
) -> tuple[Served, dict[str, int]]:
    """Job: serve; what the plugin's counters have grown by."""
    instance = engines.get(config).llm_engine.vllm_config.instance_id
    before = counters.read(instance)
    served = serve(engines, config, arrivals)
    return served, {name: value - before[name] for name, value in counters.read(instance).items()}


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("truncation", MODES)
def test_counters_follow_preemption(engine, model_dir, truncation, abort):
    """Prompt rows that a resumed request computes again count again; rows of its output never do."""
    statistics = (("disable_log_stats", False),)
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, options=statistics, **SMALL)
    arrivals = CROSSING if not abort else (replace(CROSSING[0], abort_at=12), *CROSSING[1:])
    served, counted = engine.call(serve_and_count, config, arrivals)
    lengths = [len(arrival.request.prompt) for arrival in arrivals]
    expected = dict.fromkeys(counters.NAMES, 0)
    for step in served.steps:
        chunks = [
            (step.start[i], rows, lengths[i], ODD_KEEP) for i, rows in step.rows.items() if step.start[i] < lengths[i]
        ]
        if chunks:
            found = counters.step_rows(chunks, truncation, may_idle=len(chunks) == len(step.rows))
            expected = {name: value + found[name] for name, value in expected.items()}
    assert counted == expected
    assert sum(served.preemptions) >= 1 and counted["scheduled"] > sum(lengths)


def test_preempted_off(engine, reference, model_dir):
    config = EngineConfig(model_dir("ced-tiny"), **SMALL)
    assert sum(check_served(engine, reference, config, CROSSING).preemptions) >= 2


def test_growing_prompt_would_be_seen(engine, reference, model_dir):
    """Negative control: were L to grow with the output on resumption, the comparison above would fail."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, **SMALL)
    served = engine.call(serve, config, CROSSING)
    grown = 10
    seen = 0
    for arrival, result, preemptions in zip(CROSSING, served.results, served.preemptions, strict=True):
        length = len(arrival.request.prompt)
        if not preemptions or length <= ODD_KEEP:
            continue
        tokens = [*arrival.request.prompt, *result.tokens]
        other = reference.logprobs(config.model, tokens, length + grown, ODD_KEEP)[length + grown - 1 : -1]
        assert np.abs(result.logprobs[grown:] - other).max() > 10 * MAX_LOGPROB_DIFFERENCE
        seen += 1
    assert seen


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_abort_in_mid_prefill(engine, reference, model_dir, prefix_caching):
    """The aborted prompt's blocks go to requests that could not be admitted before."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, prefix_caching=prefix_caching, **SMALL)
    arrivals = (
        Arrival(Request(random_prompt(500, seed=51)), abort_at=4),
        Arrival(Request(random_prompt(300, seed=52), max_tokens=40), at=1),
        Arrival(Request(random_prompt(250, seed=53), max_tokens=40), at=1),
    )
    served = check_served(engine, reference, config, arrivals)
    steps_of = [[i for i, step in enumerate(served.steps) if request in step.rows] for request in range(3)]
    assert steps_of[0] == [0, 1, 2, 3], "aborted after 4 of its 6 chunks"
    assert min(steps_of[1]) == 4


@pytest.mark.parametrize("truncation", MODES)
def test_long_prefill_threshold(engine, reference, model_dir, truncation):
    """Chunks of several prompts share a step, each of its own length."""
    options = (("long_prefill_token_threshold", 40),)
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, options=options)
    arrivals = tuple(
        Arrival(Request(random_prompt(length, seed=length), max_tokens), at)
        for length, max_tokens, at in ((300, 12, 0), (211, 30, 0), (130, 6, 1), (97, 20, 2), (400, 6, 3))
    )
    served = check_served(engine, reference, config, arrivals)
    prompts = [len(arrival.request.prompt) for arrival in arrivals]
    prefills = [[n for i, n in step.rows.items() if step.start[i] < prompts[i]] for step in served.steps]
    assert any(chunks.count(40) == 2 and len(chunks) == 3 for chunks in prefills)


@pytest.mark.parametrize("truncation", MODES)
@pytest.mark.parametrize("keep_tokens", [WINDOW + 1, ODD_KEEP])
def test_one_block_a_step(engine, reference, model_dir, truncation, keep_tokens):
    config = EngineConfig(model_dir("ced-tiny"), truncation, keep_tokens, chunk_tokens=32)
    lengths = (1, 31, 32, 33, 64, 65, 170, 256, 257)
    served = check_served(engine, reference, config, tuple(Arrival(request) for request in requests(lengths)))
    assert max(sum(step.rows.values()) for step in served.steps) == 32


@pytest.mark.parametrize("truncation", MODES)
def test_few_requests_in_many_slots(engine, reference, model_dir, truncation):
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, chunk_tokens=1024, max_num_seqs=64)
    check_served(engine, reference, config, tuple(Arrival(r) for r in requests((300, 72, 20), max_tokens=30)))


@pytest.mark.parametrize("truncation", MODES)
def test_batch_shrinks_from_eight_to_one(engine, reference, model_dir, truncation):
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, chunk_tokens=1024)
    lengths = (300, 20, 72, 150, 71, 201, 96, 40)
    arrivals = tuple(
        Arrival(Request(random_prompt(length, seed=length), 3 + 5 * i)) for i, length in enumerate(lengths)
    )
    served = check_served(engine, reference, config, arrivals)
    decodes = [len(step.rows) for step in served.steps if max(step.rows.values()) == 1]
    assert sorted(set(decodes)) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("truncation", MODES)
def test_lengths_at_the_edges_alone(engine, reference, model_dir, truncation):
    """Nobody else in the batch; 97 and 193 leave a last chunk of one token."""
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP)
    lengths = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, ODD_KEEP - 1, ODD_KEEP, ODD_KEEP + 1, 96, 97, 192, 193)
    for request in requests(lengths, max_tokens=3):
        served = check_served(engine, reference, config, (Arrival(request),))
        length = len(request.prompt)
        chunks = [96] * (length // 96) + [length % 96] * (length % 96 > 0)
        assert [step.rows[0] for step in served.steps] == chunks + [1, 1]


@pytest.mark.parametrize("keep_tokens", [WINDOW + 1, ODD_KEEP])
@pytest.mark.parametrize("truncation", MODES)
def test_long_outputs(engine, reference, model_dir, truncation, keep_tokens):
    """Decoding leaves the prompt's window behind and crosses three blocks, at different offsets to s_keep."""
    config = EngineConfig(model_dir("ced-tiny"), truncation, keep_tokens, chunk_tokens=1024)
    batch = requests((keep_tokens + 1, 160, 171, 300), max_tokens=100)
    check(engine, reference, config, batch)


def serve_checked(
    engines: Engines, config: EngineConfig, arrivals: tuple[Arrival, ...], tables: str, *, margin: bool = True
) -> tuple[Served, list[int]]:
    """Serve with every step checked against the worker's block tables or the scheduler's.

    Args:
        tables: ``worker`` is what VLLM_YOCO_DEBUG=1 does; in the scheduler's tables freed blocks are null.
        margin: False frees consumer SWA blocks as early as vLLM's own layout would.

    Returns:
        the record, and the rows of each step checked.
    """
    checked = []
    with pytest.MonkeyPatch.context() as patch:
        if tables == "worker":
            assert config not in engines.llms, "the runner chooses when it is made"
            check_step = integrity.check_step

            def counted(step: Any, *args: Any) -> None:
                check_step(step, *args)
                checked.append(int(step.query_start_loc[-1]))

            patch.setenv(integrity.ENV, "1")
            patch.setattr(integrity, "check_step", counted)
        runner = model_worker(engines, config).model_runner
        scheduler = scheduler_of(engines, config)
        [group] = consumer_swa_groups(scheduler)
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[group]
        if not margin:
            patch.setattr(manager, "extra_retained_tokens", 0)
        if tables == "scheduler":
            execute = runner.execute_model

            def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
                if output.num_scheduled_tokens:
                    check_ownership(output, scheduler.requests, manager.req_to_blocks, config.keep_tokens)
                    checked.append(output.total_num_scheduled_tokens)
                return execute(output, *args, **kwargs)

            patch.setattr(runner, "execute_model", execute_model)
        return serve(engines, config, arrivals), checked


def check_ownership(output: Any, requests: dict[str, Any], blocks: dict[str, list[Any]], keep_tokens: int) -> None:
    cached = output.scheduled_cached_reqs
    start = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    start |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    lengths = [output.num_scheduled_tokens[name] for name in start]
    table = np.zeros((len(start), max(len(blocks[name]) for name in start)), dtype=np.int64)
    for row, name in zip(table, start, strict=True):
        row[: len(blocks[name])] = [block.block_id for block in blocks[name]]
    integrity.check_cells(
        request=np.repeat(np.arange(len(start)), lengths),
        position=np.concatenate([start[name] + np.arange(output.num_scheduled_tokens[name]) for name in start]),
        keep_start=np.array([max(0, requests[name].num_prompt_tokens - keep_tokens) for name in start]),
        block_table=table,
        window=WINDOW,
        block_size=32,
    )


@pytest.mark.parametrize("tables", ["worker", "scheduler"])
@pytest.mark.parametrize("truncation", MODES)
def test_every_step_owns_its_cells(engine, reference, model_dir, truncation, tables):
    """Preemption, resumption and prefix hits in a small pool, all cells of all steps checked."""
    slots = 6 if tables == "worker" else 8
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, prefix_caching=True, max_num_seqs=slots, **SMALL)
    arrivals = CROSSING + tuple(Arrival(arrival.request, at=40) for arrival in ALONE)
    served, checked = engine.call(serve_checked, config, arrivals, tables)
    assert sum(served.preemptions) >= 2
    assert checked == [sum(step.rows.values()) for step in served.steps]


@pytest.mark.parametrize(
    ("tables", "found"), [("worker", "another (request|KV cache group) uses too"), ("scheduler", "in no block of its")]
)
def test_check_finds_blocks_freed_too_early(engine, model_dir, tables, found):
    """Negative control: without the spec's margin, on a real engine."""
    slots = {"worker": 5, "scheduler": 4}[tables]
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, max_num_seqs=slots, num_blocks=46)
    arrivals = tuple(Arrival(request) for request in requests((193, 300, 97, 411, 500, 170, 266), max_tokens=40))
    with pytest.raises(RemoteError, match=f"IntegrityError.*{found}"):
        engine.call(functools.partial(serve_checked, margin=False), config, arrivals, tables)


class TestPlantedFaults:
    """Two requests of a step, in blocks of 4 with W = 3. Their blocks from 0: [., 7, 8] and [5, 6].

    request 0: s_keep = 6, so r = 2 and its cells start with block 1: rows 5 to 9, of which 5 is dropped
    request 1: s_keep = 0, the stock layout: row 6 alone
    """

    REQUEST = np.array([0, 0, 0, 0, 0, 1])
    POSITION = np.array([5, 6, 7, 8, 9, 6])
    KEEP_START = np.array([6, 0])
    TABLE = np.array([[0, 7, 8], [5, 6, 0]])
    SLOTS = np.array([-1, 28, 29, 30, 31, 26])

    def cells(self, table: np.ndarray = TABLE, foreign: tuple[int, ...] = (1, 2)) -> integrity.Cells:
        return integrity.check_cells(
            self.REQUEST,
            self.POSITION,
            self.KEEP_START,
            table,
            window=3,
            block_size=4,
            foreign_blocks=np.array(foreign),
        )

    def test_healthy(self):
        cells = self.cells()
        integrity.check_writes(cells, self.SLOTS)
        assert cells.slot.tolist() == [
            *([-1, -1, -1], [28, -1, -1], [29, 28, -1], [30, 29, 28], [31, 30, 29]),
            [26, 25, 24],
        ]

    @pytest.mark.parametrize(
        ("place", "block", "found"),
        [
            ((0, 1), 0, "key at 6 of request 0 lies in no block"),
            ((1, 1), 0, "key at 6 of request 1 lies in no block"),
            ((1, 1), 7, "key at 6 of request 0 lies in a block that another request"),
            ((0, 1), 2, "key at 6 of request 0 lies in a block that another KV cache group"),
        ],
    )
    def test_block(self, place, block, found):
        table = self.TABLE.copy()
        table[place] = block
        with pytest.raises(integrity.IntegrityError, match=found):
            self.cells(table)

    def test_blocks_outside_every_window_do_not_matter(self):
        """A block that the window has left may be freed and shared: request 1 does not see block 0 of its own."""
        table = self.TABLE.copy()
        table[1, 0] = 7
        self.cells(table)

    @pytest.mark.parametrize("row", range(6))
    def test_slot(self, row):
        slots = self.SLOTS.copy()
        slots[row] += 1
        with pytest.raises(integrity.IntegrityError, match=f"key at {self.POSITION[row]} .*another slot"):
            integrity.check_writes(self.cells(), slots)

    @pytest.mark.parametrize(
        ("seq_lens", "table", "found"),
        [
            ([4, 7], [[7, 8], [5, 6]], None),  # cut at s_keep
            ([8, 7], [[0, 7], [5, 6]], "request 0"),  # r taken off, nothing cut: row 6 would see what is below s_keep
            ([10, 7], [[0, 7, 8], [5, 6, 0]], "request 0"),  # the stock view
            ([4, 7], [[8, 7], [5, 6]], "request 0"),  # one block too many cut
            ([4, 6], [[7, 8], [5, 6]], "request 1"),
        ],
    )
    def test_view(self, seq_lens, table, found):
        rows = np.arange(1, 6)  # compact: the dropped row is not in the batch
        call = functools.partial(integrity.check_view, self.cells(), rows, window=3, block_size=4)
        if found is None:
            call(np.array(seq_lens), np.array(table))
            return
        with pytest.raises(integrity.IntegrityError, match=f"{found} is not where"):
            call(np.array(seq_lens), np.array(table))


@pytest.fixture(scope="module")
def asynchronous() -> Iterator[RunnerProcess]:
    """V2 with steps scheduled ahead of results, its default on a GPU. V1 cannot do so on a CPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Model Runner V2 on a CPU needs Triton's interpreter")
    process = RunnerProcess("v2", {ENV_ASYNC: "1"})
    yield process
    process.close()


def scheduler_name(engines: Engines, config: EngineConfig) -> str:
    return type(scheduler_of(engines, config)).__name__


@pytest.mark.parametrize("truncation", MODES)
def test_asynchronous_scheduling(asynchronous, reference, model_dir, truncation):
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP)
    assert asynchronous.call(scheduler_name, config) == "AsyncScheduler"
    check(asynchronous, reference, config, requests())


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_asynchronous_preemption(asynchronous, reference, model_dir, prefix_caching):
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, prefix_caching=prefix_caching, **SMALL)
    assert sum(check_served(asynchronous, reference, config, CROSSING).preemptions) >= 2


def test_asynchronous_drafts(asynchronous, reference, model_dir):
    """The host's count of computed tokens is an upper bound here until the device has verified the drafts."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", WINDOW + 4, ngram_tokens=3)
    arrivals = tuple(
        Arrival(Request((random_prompt(period, seed=period) * 300)[:length], max_tokens=40), at)
        for length, period, at in ((300, 7, 0), (130, 3, 0), (171, 1, 2), (60, 11, 3), (100, 2, 9))
    )
    served = check_served(asynchronous, reference, config, arrivals)
    assert asynchronous.call(scheduler_name, config) == "AsyncScheduler"
    assert len(served.steps) < 60 and any(step.drafts for step in served.steps)

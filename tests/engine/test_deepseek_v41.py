"""DeepSeek-V4.1's adapter on vLLM's own state, builders and index kernels (see deepseek_v41_step.py)."""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine import deepseek_v41_step as v41
from tests.engine.deepseek_v41_step import BOUNDARY, CONSUMER, PRODUCER, Chunk, Rule, Step
from tests.engine.harness import RunnerProcess
from tests.unit.test_plan_vectors import ACCEPTED, Case, case_id
from vllm_yoco import plan as row_plan

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="V4.1's metadata needs Triton's interpreter"
)

ALL_CASES_ENV = "VLLM_YOCO_ALL_RECORDED_CASES"
"""``1`` runs every recorded case through the interpreter (about 12,000 rows); by default one in a few."""

ROW_BUDGET = 40
"""Rows of a recorded case that runs by default."""


@pytest.fixture(scope="module")
def process(runner_processes: Callable[[str], RunnerProcess]) -> RunnerProcess:
    return runner_processes("v2")


def steps(process: RunnerProcess, *work: tuple[Rule, list[Chunk], int]) -> list[Step]:
    return process.call(v41.steps, list(work))


# --- Recorded cases ---------------------------------------------------------------------------------------------


def selected(case: Case) -> bool:
    if os.environ.get(ALL_CASES_ENV) == "1":
        return True
    return case["out"]["total_q"] <= ROW_BUDGET and zlib.crc32(case["id"].encode()) % 5 == 0


RECORDED = [case for case in ACCEPTED if selected(case)]


def recorded_work(case: Case, builder: str = "flashmla") -> tuple[Rule, list[Chunk], int]:
    given = case["in"]
    chunks = [Chunk(s["data_len"], s["q_start"], s["q_len"], s["valid_start"]) for s in given["seqs"]]
    rule = Rule(
        given["mode"],
        given["keep"],
        given["window"],
        builder=builder,
        max_backtracking=given["max_backtracking"],
        # A step of which no row drops, and that has no placeholder, has no sub-batch.
        sub_batch_only=given["mode"] == "compact"
        and any(c.start < c.prompt - given["keep"] for c in chunks),
    )
    return rule, chunks, int(case["id"][-4:])


@pytest.mark.parametrize("builder", ["flashmla", "flashinfer", "base"])
def test_recorded_cases(process: RunnerProcess, builder: str) -> None:
    """Rows, positions, slots and visible intervals are those that were recorded, on every index path."""
    cases = RECORDED if builder == "flashmla" or os.environ.get(ALL_CASES_ENV) == "1" else RECORDED[::4]
    assert {case["in"]["mode"] for case in cases} == {"off", "mask", "compact"}
    for case in cases:
        rule, chunks, seed = recorded_work(case, builder)
        (step,) = process.call(v41.recorded_steps, [(rule, chunks, seed)])
        compare(case, step)


def compare(case: Case, step: Step) -> None:
    given, out, where = case["in"], case["out"], case_id(case)
    seqs = given["seqs"]
    owner = np.repeat(np.arange(len(seqs)), np.diff(step.cu_rows))
    end = np.array([s["q_start"] + s["q_len"] for s in seqs])[owner]
    state, ring = np.array([s["state_id"] for s in seqs])[owner], given["swa_block_size"]
    written = step.swa_cells[:, 0] >= 0
    # A written row's cell is its own; the ring of the recording keeps the last rows of a chunk only.
    assert (step.swa_cells[written, 0] == owner[written]).all(), where
    assert (step.swa_cells[written, 1] == step.positions[written]).all(), where
    slots = np.where(
        written & (step.positions >= end - ring), state * ring + step.positions % ring, -1
    )
    check_compressed(step, owner, np.array([s["valid_start"] for s in seqs]), given["window"], where)
    columns = {"query_indices": step.rows, "positions": step.positions, "slot_mapping": slots}
    layer = step.layers[CONSUMER]
    for path in (layer.paged, layer.mixed):
        check_columns(out, columns | {"visible": path}, where)
    assert layer.gathered.tolist() == layer.paged[layer.num_decode_rows :].tolist(), where
    assert layer.min_len >= 0, where


def check_compressed(step: Step, owner: np.ndarray, replay_start: np.ndarray, window: int, where: str) -> None:
    """Global KV has its cells whatever drops, but for the W rows that vLLM replays: theirs are cached already."""
    start = replay_start[owner]
    replayed = (start > 0) & (step.positions < start + window)
    cells = np.where(replayed[:, None], -1, np.stack([owner, step.positions], axis=1))
    assert step.compressed_cells.tolist() == cells.tolist(), where


def check_columns(out: dict[str, Any], columns: dict[str, np.ndarray], where: str) -> None:
    for name, values in columns.items():
        shown = values[out["rows"]] if "rows" in out else values
        assert shown.tolist() == out[name], f"{where} {name}"
        if "crc32" in out:
            assert zlib.crc32(values.astype("<i4").tobytes()) == out["crc32"][name], f"{where} {name}"


# --- Batches ----------------------------------------------------------------------------------------------------


WINDOW, KEEP = 8, 12
MIXED = [
    Chunk(prompt=30, start=33, length=1, prefill=False),  # decode
    Chunk(prompt=20, start=25, length=1, prefill=False),
    Chunk(prompt=40, start=10, length=9),  # wholly below s_keep = 28
    Chunk(prompt=40, start=20, length=20),  # crosses it
    Chunk(prompt=10, start=0, length=10),  # L <= K
    Chunk(prompt=60, start=40, length=20, replay_start=40),  # a prefix hit below s_keep = 48
    Chunk(prompt=60, start=52, length=8, replay_start=52),  # a hit above it
    Chunk(prompt=30, start=12, length=20),  # recomputed after a preemption: two generated tokens
    Chunk(prompt=50, start=30, length=20, asks_for="prompt_logprobs"),
    Chunk(prompt=50, start=30, length=20, asks_for="prompt_logprob_token_ids"),
]


def expected(rule: Rule, chunks: list[Chunk]) -> row_plan.RowPlan:
    """The plan, which knows no vLLM. Decodes and requests that keep every row have s_keep = 0."""
    mode = "mask" if rule.mode == "mask" else "compact" if rule.mode == "compact" else "off"
    planned = [
        row_plan.Chunk(
            rule.keep if c.asks_for or not c.prefill else c.prompt, c.start, c.length, c.replay_start
        )
        for c in chunks
    ]
    return row_plan.plan_rows(planned, mode=mode, keep_tokens=rule.keep, window=rule.window)


@pytest.mark.parametrize(
    ("mode", "builder"),
    [("off", "flashmla"), ("mask", "flashmla"), ("compact", "flashmla"), ("compact", "flashinfer"), ("mask", "base")],
)
def test_mixed_batch(process: RunnerProcess, mode: str, builder: str) -> None:
    rule = Rule(mode, KEEP, WINDOW, builder=builder)
    (step,) = steps(process, (rule, MIXED, 3))
    plan = expected(rule, MIXED)
    assert step.rows.tolist() == plan.rows.tolist()
    assert step.positions.tolist() == plan.positions.tolist()
    assert step.cu_rows.tolist() == plan.cu_seqlens.tolist()
    visible = np.stack([plan.visible_lo, plan.visible_hi], axis=1).tolist()
    for name in (BOUNDARY, CONSUMER):
        assert step.layers[name].paged.tolist() == visible
        assert step.layers[name].mixed.tolist() == visible
        assert step.layers[name].gathered.tolist() == visible[step.layers[name].num_decode_rows :]
    # Producers keep vLLM's visibility: the whole window above the replay start.
    stock = expected(Rule("off", KEEP, WINDOW), MIXED)
    assert step.layers[PRODUCER].paged.tolist() == np.stack([stock.visible_lo, stock.visible_hi], axis=1).tolist()
    silent = np.flatnonzero(step.swa_cells[:, 0] < 0)
    assert silent.tolist() == np.flatnonzero(~plan.writes_swa).tolist()
    check_compressed(step, plan.chunk_of_row, np.array([c.replay_start for c in MIXED]), WINDOW, mode)


def test_open_boundary(process: RunnerProcess) -> None:
    """``--yoco-boundary-swa open``: the boundary layer sees its whole window, the layers above do not."""
    rule = Rule("compact", KEEP, WINDOW, boundary_swa="open")
    (step,) = steps(process, (rule, MIXED, 4))
    plan = expected(rule, MIXED)
    clipped = np.stack([plan.visible_lo, plan.visible_hi], axis=1)
    start = np.array([c.replay_start for c in MIXED])[plan.chunk_of_row]
    whole = np.maximum(np.maximum(plan.positions - WINDOW + 1, 0), start)
    # A placeholder has no cell, so the paged paths show it nothing at all.
    whole = np.where(step.swa_cells[:, 0] < 0, plan.positions + 1, whole)
    assert step.layers[CONSUMER].paged.tolist() == clipped.tolist()
    assert step.layers[BOUNDARY].paged[:, 0].tolist() == whole.tolist()
    assert (whole < clipped[:, 0]).any()


def test_tiny_steps_and_graphs_skip_trimming_and_show_the_same(process: RunnerProcess) -> None:
    chunks = [Chunk(prompt=40, start=24, length=12)]
    whole, trimmed = steps(
        process,
        (Rule("compact", KEEP, WINDOW, trim_any=False), chunks, 5),
        (Rule("compact", KEEP, WINDOW), chunks, 5),
    )
    assert not whole.trimmed and trimmed.trimmed
    graph = process.call(v41.graph_step, Rule("compact", KEEP, WINDOW), chunks, "FULL")
    assert not graph.trimmed
    padding = graph.layers[CONSUMER].paged[len(whole.rows) :]
    assert (padding[:, 0] > padding[:, 1]).all() and len(padding) == 5
    visible = dict(zip(trimmed.positions.tolist(), trimmed.layers[CONSUMER].paged.tolist(), strict=True))
    for step in (whole, graph):
        rows = slice(0, len(whole.rows))
        seen = dict(zip(step.positions[rows].tolist(), step.layers[CONSUMER].paged[rows].tolist(), strict=True))
        assert {position: seen[position] for position in visible} == visible


# --- Invariance, and vLLM's own rule as the control -----------------------------------------------------------


def chunks_of(prompt: int, cuts: list[int]) -> list[Chunk]:
    ends = [*cuts, prompt]
    return [Chunk(prompt, start, end - start) for start, end in zip([0, *cuts], ends, strict=True)]


def kept_and_seen(process: RunnerProcess, rule: Rule, chunks: list[Chunk], mates: list[Chunk]) -> dict[int, Any]:
    """Position -> visible range, of the rows of one prompt that may write window KV, over all of its steps."""
    seen: dict[int, Any] = {}
    for step in steps(process, *((rule, [*mates, chunk], 6) for chunk in chunks)):
        rows = slice(step.cu_rows[len(mates)], step.cu_rows[len(mates) + 1])
        for position, visible, cell in zip(
            step.positions[rows].tolist(),
            step.layers[CONSUMER].paged[rows].tolist(),
            step.swa_cells[rows, 0].tolist(),
            strict=True,
        ):
            if cell >= 0:
                seen[position] = visible
    return seen


PROMPT = 44
CUTS: list[list[int]] = [[], [20], [16, 33], [36, 40]]


@pytest.mark.parametrize("mode", ["compact", "stock"])
def test_chunks_do_not_matter_but_to_stock(process: RunnerProcess, mode: str) -> None:
    rule = Rule(mode, KEEP, WINDOW)
    whole, *others = [kept_and_seen(process, rule, chunks_of(PROMPT, cuts), []) for cuts in CUTS]
    if mode == "compact":
        assert sorted(whole) == list(range(PROMPT - KEEP, PROMPT))
        assert all(other == whole for other in others)
    else:
        assert sorted(whole) == list(range(PROMPT - WINDOW, PROMPT))
        assert [other == whole for other in others] == [False] * len(others)


def test_batch_mates_do_not_matter(process: RunnerProcess) -> None:
    rule, chunk = Rule("compact", KEEP, WINDOW), Chunk(PROMPT, 0, PROMPT)
    alone = kept_and_seen(process, rule, [chunk], [])
    assert kept_and_seen(process, rule, [chunk], MIXED[:3]) == alone
    assert kept_and_seen(process, rule, [chunk], [Chunk(50, 0, 50)]) == alone


def test_state_forgets_the_previous_step(process: RunnerProcess) -> None:
    """One state, three steps: bounds of an earlier batch reach neither later requests nor dummy batches."""
    first, second, third = process.call(
        v41.consecutive_steps,
        Rule("mask", KEEP, WINDOW),
        [[Chunk(60, 20, 20), Chunk(60, 30, 8)], [Chunk(10, 0, 6), Chunk(9, 12, 1, prefill=False)], [Chunk(60, 20, 20)]],
    )
    assert first.layers[CONSUMER].paged[:20].tolist() == third.layers[CONSUMER].paged.tolist()
    assert second.layers[CONSUMER].paged.tolist() == second.layers[PRODUCER].paged.tolist()


def test_gathered_values(process: RunnerProcess) -> None:
    """The gather kernel itself, on a cache whose keys say which position they are."""
    for name, values in process.call(v41.gathered_values, Rule("mask", KEEP, 8), MIXED[2:6]).items():
        assert values["found"].tolist() == values["expected"].tolist(), name

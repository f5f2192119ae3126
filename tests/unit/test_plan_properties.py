"""Properties of the row plan on generated batches, against an oracle that loops over rows and keys."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_yoco.context_parallel import context_parallel_tables
from vllm_yoco.plan import (
    Chunk,
    Mode,
    RowPlan,
    exact_keep_tokens,
    keep_start,
    minimum_keep_tokens,
    plan_rows,
    ring_slots,
)
from vllm_yoco.ring_metadata import decode_ring, key_range, pivots, swa_history

MODES: tuple[Mode, ...] = ("off", "mask", "compact")
fast = settings(max_examples=100, deadline=None)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    """Any legal chunk, also one that runs past the prompt (recomputed output)."""
    start = draw(st.integers(0, 40))
    return Chunk(draw(st.integers(1, 50)), start, draw(st.integers(1, 20)), draw(st.integers(0, start)))


@st.composite
def settings_of_k(draw: st.DrawFn, min_window: int = 0) -> dict[str, int]:
    window, backtracking = draw(st.integers(min_window, 9)), draw(st.integers(0, 4))
    keep = minimum_keep_tokens(window, backtracking) + draw(st.integers(0, 30))
    return {"window": window, "max_backtracking": backtracking, "keep_tokens": keep}


@st.composite
def cut_prompts(draw: st.DrawFn) -> list[Chunk]:
    """Consecutive chunks of one request, from a prefix hit up to its end, which may lie past the prompt."""
    length = draw(st.integers(1, 60))
    hit = draw(st.integers(0, length - 1))
    end = length + draw(st.integers(0, 12))
    valid_start = draw(st.sampled_from((0, hit)))
    cuts = sorted(draw(st.sets(st.integers(hit + 1, end), max_size=5)) | {hit, end})
    return [Chunk(length, a, b - a, valid_start) for a, b in itertools.pairwise(cuts)]


batches = st.lists(chunks(), min_size=1, max_size=5)
modes = st.sampled_from(MODES)


class Row(NamedTuple):
    row: int
    position: int
    keys: list[int]
    writes: bool


def oracle(batch: list[Chunk], mode: str, keep: int, window: int) -> list[list[Row]]:
    """Rows of each chunk, by trying every row and every key."""
    result, row = [], 0
    for chunk in batch:
        kept = []
        for position in range(chunk.start, chunk.start + chunk.length):

            def retained(p: int, chunk: Chunk = chunk) -> bool:
                return mode == "off" or p >= chunk.num_prompt_tokens - keep

            is_last = position == chunk.start + chunk.length - 1
            if mode != "compact" or retained(position) or is_last:
                seen = range(chunk.valid_start, position + 1)
                keys = [k for k in seen if position - k < window and retained(k)]
                kept.append(Row(row, position, keys, window > 0 and (mode == "mask" or retained(position))))
            row += 1
        result.append(kept)
    return result


def visible(plan: RowPlan) -> list[list[int]]:
    return [list(range(lo, hi + 1)) for lo, hi in zip(plan.visible_lo, plan.visible_hi, strict=True)]


@fast
@given(batches, modes, settings_of_k())
def test_matches_oracle(batch: list[Chunk], mode: Mode, k: dict[str, int]) -> None:
    plan = plan_rows(batch, mode=mode, **k)
    plan.check_integrity()
    expected = oracle(batch, mode, k["keep_tokens"], k["window"])
    flat = [row for rows in expected for row in rows]

    assert plan.rows.tolist() == [r.row for r in flat]
    assert plan.positions.tolist() == [r.position for r in flat]
    assert visible(plan) == [r.keys for r in flat]
    assert plan.writes_swa.tolist() == [r.writes for r in flat]
    assert np.diff(plan.cu_seqlens).tolist() == [len(rows) for rows in expected]
    assert plan.clip.tolist() == [c.length - len(rows) for c, rows in zip(batch, expected, strict=True)]
    assert (np.diff(plan.cu_seqlens) >= 1).all()


@fast
@given(batches, settings_of_k())
def test_mask_equals_compact_on_kept_rows(batch: list[Chunk], k: dict[str, int]) -> None:
    mask, compact = (plan_rows(batch, mode=m, **k) for m in ("mask", "compact"))
    for name in ("rows", "positions", "visible_lo", "visible_hi"):
        assert np.array_equal(getattr(mask, name)[compact.rows], getattr(compact, name)), name
    for ratio in (1, 2, 4):
        for of_mask, of_compact in zip(key_range(mask, ratio), key_range(compact, ratio), strict=True):
            assert np.array_equal(of_mask[compact.rows], of_compact)


@fast
@given(cut_prompts(), modes, settings_of_k())
def test_independent_of_chunking(cut: list[Chunk], mode: Mode, k: dict[str, int]) -> None:
    first, last = cut[0], cut[-1]
    whole = plan_rows([dataclasses.replace(first, length=last.end - first.start)], mode=mode, **k)
    s_keep = keep_start(first.num_prompt_tokens, k["keep_tokens"])
    retained: dict[int, list[int]] = {}
    for chunk in cut:
        plan = plan_rows([chunk], mode=mode, **k)
        rows = dict(zip(plan.positions.tolist(), visible(plan), strict=True))
        if mode == "compact":
            placeholders = [p for p in rows if p < s_keep]
            assert all(rows.pop(p) == [] for p in placeholders)
        retained |= rows
    expected = dict(zip(whole.positions.tolist(), visible(whole), strict=True))
    if mode == "compact":
        expected = {p: keys for p, keys in expected.items() if p >= s_keep}
    assert retained == expected


@fast
@given(batches, modes, settings_of_k())
def test_independent_of_batch(batch: list[Chunk], mode: Mode, k: dict[str, int]) -> None:
    together = plan_rows(batch, mode=mode, **k)
    alone = [plan_rows([chunk], mode=mode, **k) for chunk in batch]
    for name in ("clip", "positions", "visible_lo", "visible_hi", "writes_swa"):
        assert np.array_equal(getattr(together, name), np.concatenate([getattr(p, name) for p in alone])), (
            name
        )


@fast
@given(batches, st.sampled_from(("mask", "compact")), settings_of_k())
def test_short_prompt_equals_off(batch: list[Chunk], mode: Mode, k: dict[str, int]) -> None:
    k["keep_tokens"] = max(k["keep_tokens"], *(c.num_prompt_tokens for c in batch), 0)
    on, off = plan_rows(batch, mode=mode, **k), plan_rows(batch, mode="off", **k)
    for name in ("clip", "cu_seqlens", "rows", "positions", "visible_lo", "visible_hi", "writes_swa"):
        assert np.array_equal(getattr(on, name), getattr(off, name)), name


@fast
@given(settings_of_k(min_window=1), st.integers(1, 30))
def test_one_more_kept_token_is_noticed(k: dict[str, int], dropped: int) -> None:
    """Negative control: the comparisons above can tell K from K + 1 on every prompt longer than K."""
    length = k["keep_tokens"] + dropped
    more = k | {"keep_tokens": k["keep_tokens"] + 1}
    batch = [Chunk(length, 0, length)]
    assert visible(plan_rows(batch, mode="mask", **k)) != visible(plan_rows(batch, mode="mask", **more))
    compact, compact_more = (plan_rows(batch, mode="compact", **x) for x in (k, more))
    assert (len(compact.rows), len(compact_more.rows)) == (k["keep_tokens"], k["keep_tokens"] + 1)


@fast
@given(cut_prompts(), modes, settings_of_k(min_window=1), st.integers(0, 8))
def test_ring_serves_every_visible_key(cut: list[Chunk], mode: Mode, k: dict[str, int], spare: int) -> None:
    """Replays the ring: history copies and current rows, expanded by the pivots, are the visible keys."""
    window, ring_size, state = k["window"], k["window"] + spare, 3
    ring = {state * ring_size + p % ring_size: p for p in range(cut[0].valid_start, cut[0].start)}
    for chunk in cut:
        plan = plan_rows([chunk], mode=mode, **k)
        buffer = [-1] * window + plan.positions.tolist()
        copied: list[int] = []
        for source, begin, end, destination in swa_history(
            plan, ring_size=ring_size, state_ids=[state]
        ).tolist():
            copied += range(destination, destination + end - begin)
            if source >= 0:
                cells = range(source * ring_size + begin, source * ring_size + end)
                buffer[destination : destination + end - begin] = [ring.get(cell, -1) for cell in cells]
        assert copied == list(range(window))
        for (h, h_len, c, c_len), keys in zip(pivots(plan).tolist(), visible(plan), strict=True):
            assert buffer[h : h + h_len] + buffer[c : c + c_len] == keys
        slots = ring_slots(plan, ring_size=ring_size, state_ids=[state])
        written = slots[slots >= 0]
        assert len(set(written.tolist())) == len(written)
        assert plan.writes_swa[slots >= 0].all()
        ring |= dict(zip(written.tolist(), plan.positions[slots >= 0].tolist(), strict=True))


@fast
@given(batches, modes, settings_of_k(), st.integers(2, 8))
def test_context_parallel_round_trip(batch: list[Chunk], mode: Mode, k: dict[str, int], cp_size: int) -> None:
    """Moving row numbers through the tables delivers every kept row to its compact slot."""
    plan = plan_rows(batch, mode=mode, **k)
    tables = context_parallel_tables(plan, cp_size, [1, 2])
    full, contrib = tables.full_mirror_index, tables.contrib_index
    assert sorted(full[full >= 0].tolist()) == list(range(sum(c.length for c in batch)))
    sent = np.where(contrib >= 0, np.take_along_axis(full, contrib.clip(0), axis=1), -1)
    assert np.array_equal(sent.ravel()[tables.gathered_reverse_index], plan.rows)
    assert (contrib >= 0).sum() == len(plan.rows)
    compact = tables.compact_mirror_index
    assert np.array_equal(compact.ravel()[tables.compact_reverse_index], np.arange(len(plan.rows)))
    for i, ratio in enumerate((1, 2)):
        for ours, column in zip((tables.compact_ks, tables.compact_ke), key_range(plan, ratio), strict=True):
            assert np.array_equal(ours[:, i][compact >= 0], column[compact[compact >= 0]])
        assert (tables.compact_ks[:, i] == tables.compact_ke[:, i])[compact < 0].all()


@fast
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 40), st.integers(0, 9))
def test_decode_ring_reads_what_was_written(window: int, q_len: int, before: int, spare: int) -> None:
    ring_size, state, total = window + q_len - 1 + spare, 2, before + q_len
    ring = decode_ring([total], [q_len], window=window, ring_size=ring_size, state_ids=[state])
    content = {state * ring_size + p % ring_size: p for p in range(total)}
    assert [content[s] for s in ring.slots.tolist()] == ring.positions.tolist() == list(range(before, total))
    for position, offset, length in zip(ring.positions, ring.offset, ring.length, strict=True):
        base = state * ring_size
        cells = [base + (offset - base + i) % ring_size for i in range(length)]
        assert [content[c] for c in cells] == [p for p in range(position + 1) if position - p < window]


def lossless(length: int, keep: int, window: int, depth: int, shared: bool) -> bool:
    """Whether the last prompt row and every key that decode reads are exact, tracked layer by layer."""
    exact = {p: p >= length - keep for p in range(length)}
    for _ in range(depth):
        # A shared hidden is exact on every row, but keys below s_keep are still invisible.
        keys = {p: p >= length - keep and (shared or exact[p]) for p in range(length)}
        if not all(keys[p] for p in range(max(0, length - window + 1), length)):
            return False
        exact = {
            p: exact[p] and all(keys[j] for j in range(max(0, p - window + 1), p + 1)) for p in range(length)
        }
    return exact[length - 1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize("backtracking", [0, 1, 6])
def test_exact_keep_is_smallest_lossless(window: int, backtracking: int, depth: int, shared: bool) -> None:
    layers = depth if window else 0
    minimum = minimum_keep_tokens(window if layers else 0, backtracking)
    searched = next(k for k in range(minimum, 60) if lossless(60, k, window, layers, shared))
    assert exact_keep_tokens(window, backtracking, depth, shared) == searched


def test_window_zero_sees_and_writes_nothing() -> None:
    plan = plan_rows([Chunk(20, 0, 20)], mode="compact", keep_tokens=1, window=0)
    plan.check_integrity()
    assert plan.positions.tolist() == [19]
    assert visible(plan) == [[]]
    assert ring_slots(plan, ring_size=0, state_ids=[0]).tolist() == [-1]
    assert swa_history(plan, ring_size=0, state_ids=[0]).shape == (0, 4)
    assert pivots(plan)[:, [1, 3]].tolist() == [[0, 0]]


def test_preemption_does_not_move_the_retained_region() -> None:
    first = plan_rows([Chunk(20, 0, 20)], mode="compact", keep_tokens=5, window=3)
    resumed = plan_rows([Chunk(20, 0, 26)], mode="compact", keep_tokens=5, window=3)
    assert resumed.positions.tolist() == list(range(15, 26))
    assert visible(resumed)[: len(first.rows)] == visible(first)


def test_empty_batch() -> None:
    plan = plan_rows([], mode="compact", keep_tokens=4, window=3)
    plan.check_integrity()
    assert plan.cu_seqlens.tolist() == [0]
    assert plan.rows.size == pivots(plan).size == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "field", ["clip", "cu_seqlens", "rows", "positions", "visible_lo", "visible_hi", "writes_swa"]
)
@pytest.mark.parametrize("index", [0, -1])
def test_integrity_notices_any_corruption(mode: Mode, field: str, index: int) -> None:
    plan = plan_rows([Chunk(30, 0, 8), Chunk(12, 4, 8), Chunk(2, 0, 2)], mode=mode, keep_tokens=5, window=4)
    for change in (1, -1):
        values = getattr(plan, field).copy()
        values[index] = ~values[index] if field == "writes_swa" else values[index] + change
        with pytest.raises(AssertionError, match="RowPlan: "):
            dataclasses.replace(plan, **{field: values}).check_integrity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "on"}, "mode='on' must be one of off, mask, compact"),
        ({"window": -1}, "window=-1 must be >= 0"),
        ({"max_backtracking": -1}, "max_backtracking=-1 must be >= 0"),
        ({"keep_tokens": 4}, r"keep_tokens=4 must be >= window \+ max_backtracking = 3 \+ 2"),
        ({"keep_tokens": 0, "window": 0}, "keep_tokens=0 must be >= 1"),
    ],
)
def test_plan_rejects(change: dict[str, Any], message: str) -> None:
    legal: dict[str, Any] = {"mode": "mask", "keep_tokens": 5, "window": 3, "max_backtracking": 2}
    with pytest.raises(ValueError, match=message):
        plan_rows([Chunk(8, 0, 8)], **legal | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1), "num_prompt_tokens=0"),
        ((8, -1, 1), "start=-1"),
        ((8, 0, 0), "length=0"),
        ((8, 2, 1, 3), r"valid_start=3 must lie in \[0, start=2\]"),
        ((8, 2, 1, -1), "valid_start=-1"),
    ],
)
def test_chunk_rejects(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chunk(*arguments)


def test_ring_and_tables_reject() -> None:
    plan = plan_rows([Chunk(8, 0, 8)], mode="off", keep_tokens=-7, window=3)  # off ignores K
    with pytest.raises(ValueError, match="state_ids has 2 entries"):
        ring_slots(plan, ring_size=4, state_ids=[0, 1])
    with pytest.raises(ValueError, match="ring_size=2 must be >= window=3"):
        swa_history(plan, ring_size=2, state_ids=[0])
    with pytest.raises(ValueError, match="ratio=0 must be >= 1"):
        key_range(plan, 0)
    with pytest.raises(ValueError, match="cp_size=1 must be >= 2"):
        context_parallel_tables(plan, 1, [1])
    with pytest.raises(ValueError, match="num_swa_layers=-1"):
        exact_keep_tokens(3, 1, -1, False)
    with pytest.raises(ValueError, match=r"ring_size=4 must be >= .* = 5"):
        decode_ring([9], [3], window=3, ring_size=4, state_ids=[0])
    with pytest.raises(ValueError, match=r"q_lens=\[3\] must lie in"):
        decode_ring([2], [3], window=3, ring_size=9, state_ids=[0])
    with pytest.raises(ValueError, match="window=0 must be >= 1"):
        decode_ring([2], [1], window=0, ring_size=9, state_ids=[0])
    with pytest.raises(ValueError, match="must have the same number"):
        decode_ring([2], [1], window=3, ring_size=9, state_ids=[])

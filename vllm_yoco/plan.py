"""Which prefill rows the consumer layers compute, which SWA keys each row sees, and where it may write.

A step schedules *chunks*: rows ``[start, start + length)`` of one request each. Concatenated they form the
full row order, the layout of the producer layers. With truncation on, the consumer layers' sliding-window
attention (SWA) is confined to the retained region of each request:

    position    0 ...... s_keep - 1 | s_keep ........... L - 1 | L ..................
                dropped             | retained (last K of L)   | retained (recomputed output)
    SWA key     never visible       | visible in the window    | visible in the window

``mask`` keeps every row and only narrows what it sees. ``compact`` also removes the dropped rows, except that
a chunk always keeps its last row: a chunk wholly below ``s_keep`` is represented by one *placeholder* row,
which sees nothing and writes nothing. ``s_keep = max(0, L - K)`` depends on the request alone, never on the
chunk, so the outcome does not depend on how the prompt is cut. L is the prompt length, fixed for the life of
the request; rows at or past L (generated tokens recomputed after preemption) are ordinary retained rows.

The rules are those of DeepInfer 0.1.0 (recorded cases: tests/data/reference), except that there L grows with
the output.
All arrays are int64 unless stated otherwise, and every position is absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Mode: TypeAlias = Literal["off", "mask", "compact"]


def window_start(query: IntArray, window: int) -> IntArray:
    """First position inside the window of ``query``: the last ``window`` positions, itself included.

    This is the only definition of the window convention. ``window = 0`` starts past the query: no keys.
    """
    return query - window + 1


def swa_visible(query: IntArray, key: IntArray, window: int, first_key: IntArray) -> BoolArray:
    """Whether SWA query ``query`` may read ``key``; nothing below ``first_key`` or below 0 exists."""
    return (key >= window_start(query, window)) & (key >= first_key) & (key >= 0) & (key <= query)


def first_visible(query: IntArray, window: int, first_key: IntArray) -> IntArray:
    """Lowest key of the (contiguous) visible range of ``query``; ``query + 1`` when it is empty."""
    return np.clip(np.maximum(window_start(query, window), first_key), 0, query + 1)


def keep_start(num_prompt_tokens: int, keep_tokens: int) -> int:
    """Position of the first retained row, ``s_keep``. Generated tokens do not move it."""
    return max(0, num_prompt_tokens - keep_tokens)


def minimum_keep_tokens(window: int, max_backtracking: int) -> int:
    """Smallest legal K, in tokens: no decode row looks below ``s_keep``, even after the deepest rollback.

    ``window = 0`` means that no consumer layer has SWA: one retained row suffices. ValueError on negatives.
    """
    if window < 0:
        raise ValueError(f"window={window} must be >= 0 (0: no consumer layer has SWA)")
    if max_backtracking < 0:
        raise ValueError(f"max_backtracking={max_backtracking} must be >= 0")
    return window + max_backtracking if window else 1


def exact_keep_tokens(window: int, max_backtracking: int, num_swa_layers: int, swa_share_hidden: bool) -> int:
    """Smallest lossless K, in tokens.

    The last of ``num_swa_layers`` consumer layers with SWA needs exact input on ``window`` rows. When SWA
    keys come from each layer's own input, every layer below it needs ``window - 1`` rows more. Keys projected
    from the shared hidden are exact by construction, so depth adds nothing. ValueError on negatives.
    """
    if num_swa_layers < 0:
        raise ValueError(f"num_swa_layers={num_swa_layers} must be >= 0")
    window = window if num_swa_layers else 0
    minimum = minimum_keep_tokens(window, max_backtracking)
    if window == 0 or swa_share_hidden:
        return minimum
    return max(minimum, window + (num_swa_layers - 1) * (window - 1))


@dataclass(frozen=True)
class Chunk:
    """Rows ``[start, start + length)`` of one request, scheduled in one step. All fields are in tokens.

    SWA keys below ``valid_start`` do not exist (a prefix hit). ValueError when a field is out of range.
    """

    num_prompt_tokens: int
    start: int
    length: int
    valid_start: int = 0

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1:
            raise ValueError(f"num_prompt_tokens={self.num_prompt_tokens} must be >= 1")
        if self.start < 0:
            raise ValueError(f"start={self.start} must be >= 0")
        if self.length < 1:
            raise ValueError(f"length={self.length} must be >= 1: an empty chunk has no row to keep")
        if not 0 <= self.valid_start <= self.start:
            raise ValueError(f"valid_start={self.valid_start} must lie in [0, start={self.start}]")

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Rows of the layout in force (compact rows, or every row for off and mask), C chunks and T rows.

    ==============  =====  ============================================================================
    clip            [C]    rows removed from the front of each chunk
    cu_seqlens      [C+1]  cumulative kept rows; chunk c owns rows ``cu_seqlens[c]:cu_seqlens[c + 1]``
    rows            [T]    index of each row in the full row order, strictly increasing
    positions       [T]    absolute position
    visible_lo/_hi  [T]    visible SWA keys, inclusive; ``lo = position + 1``, ``hi = position`` if none
    writes_swa      [T]    bool: the row may store its SWA key and value
    ==============  =====  ============================================================================
    """

    chunks: tuple[Chunk, ...]
    mode: Mode
    keep_tokens: int
    window: int
    clip: IntArray
    cu_seqlens: IntArray
    rows: IntArray
    positions: IntArray
    visible_lo: IntArray
    visible_hi: IntArray
    writes_swa: BoolArray

    @property
    def chunk_of_row(self) -> IntArray:
        """[T] index of the chunk that owns each row."""
        return np.repeat(np.arange(len(self.chunks)), np.diff(self.cu_seqlens))

    def check_integrity(self) -> None:
        """Recompute every invariant from its definition: mark rows and test keys instead of clamping.

        Costs O(full rows); for tests and debug mode. AssertionError names the first broken invariant.
        """
        length = _column([c.length for c in self.chunks])
        owner = np.repeat(np.arange(len(self.chunks)), length)
        position = np.concatenate([np.arange(c.start, c.end) for c in self.chunks] or [owner])
        last = position == _column([c.end - 1 for c in self.chunks])[owner]
        s_keep = _column([_first_retained(c, self.mode, self.keep_tokens) for c in self.chunks])[owner]
        kept = (position >= s_keep) | last | (self.mode != "compact")

        _check(np.array_equal(self.rows, np.flatnonzero(kept)), "rows are not the retained and last rows")
        _check(np.array_equal(self.positions, position[kept]), "positions are not absolute")
        counts = np.bincount(owner[kept], minlength=len(self.chunks))
        _check(np.array_equal(self.cu_seqlens, _cumulative(counts)), "cu_seqlens does not count the rows")
        _check(np.array_equal(self.clip + counts, length), "clip and kept rows do not add up")

        query, lo, hi = self.positions, self.visible_lo, self.visible_hi
        first_key = np.maximum(s_keep, _column([c.valid_start for c in self.chunks])[owner])[kept]
        nothing = lo > hi
        for key, expected in ((lo, ~nothing), (lo - 1, False), (hi, ~nothing), (hi + 1, False)):
            # The visible set is an interval, so its two ends and their outer neighbours determine it.
            seen = swa_visible(query, key, self.window, first_key)
            _check(bool((seen == expected).all()), "the visible range is wrong")
        _check(bool(((lo == query + 1) & (hi == query))[nothing].all()), "an empty range is not normalised")
        _check(bool(nothing[query < s_keep[kept]].all()), "a dropped row sees a key")
        writers = ~nothing if self.mode == "compact" else np.full_like(nothing, self.window > 0)
        _check(np.array_equal(self.writes_swa, writers), "the rows that write SWA are wrong")


def plan_rows(
    chunks: Sequence[Chunk], *, mode: Mode, keep_tokens: int, window: int, max_backtracking: int = 1
) -> RowPlan:
    """Plan the consumer rows of one step; chunks of different requests do not affect each other.

    ``keep_tokens`` is K and ``window`` is W (0: no consumer SWA, nothing is seen or written), both in tokens;
    ``max_backtracking`` is the number of speculative tokens plus one. ``keep_tokens`` is ignored when mode is
    off. ValueError when the mode is unknown, a size is negative or K is below ``minimum_keep_tokens``.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")
    minimum = minimum_keep_tokens(window, max_backtracking)
    if mode != "off" and keep_tokens < minimum:
        rule = f"window + max_backtracking = {window} + {max_backtracking}" if window else "1"
        raise ValueError(f"keep_tokens={keep_tokens} must be >= {rule} when mode is {mode}")

    start = _column([c.start for c in chunks])
    length = _column([c.length for c in chunks])
    s_keep = _column([_first_retained(c, mode, keep_tokens) for c in chunks])
    first_key = np.maximum(s_keep, _column([c.valid_start for c in chunks]))

    clip = clipped_rows(start, length, s_keep) if mode == "compact" else np.zeros_like(start)
    kept = _tails(length, clip)
    owner = np.repeat(np.arange(len(chunks)), kept.num_rows)
    positions = kept.rows + np.repeat(start - (np.cumsum(length) - length), kept.num_rows)
    # Mask also writes below s_keep: no prefill row sees those entries, and decode does not look so far back.
    writes = (positions >= s_keep[owner]) | (mode != "compact")
    return RowPlan(
        chunks=tuple(chunks),
        mode=mode,
        keep_tokens=keep_tokens,
        window=window,
        clip=clip,
        cu_seqlens=kept.cu_seqlens,
        rows=kept.rows,
        positions=positions,
        visible_lo=first_visible(positions, window, first_key[owner]),
        visible_hi=positions.copy(),
        writes_swa=writes & (window > 0),
    )


@dataclass(frozen=True, eq=False)
class KeptRows:
    """What ``compact`` keeps of a step, without what each row sees: the part of a ``RowPlan`` that every step needs.

    ==============  =====  ============================================================================
    num_rows        [C]    kept rows of each chunk
    cu_seqlens      [C+1]  cumulative kept rows; chunk c owns rows ``cu_seqlens[c]:cu_seqlens[c + 1]``
    rows            [T]    index of each row in the full row order, strictly increasing
    ==============  =====  ============================================================================
    """

    num_rows: IntArray
    cu_seqlens: IntArray
    rows: IntArray


def kept_rows(start: IntArray, length: IntArray, s_keep: IntArray) -> KeptRows:
    """Kept rows of C chunks, as arrays in and out: the cost grows with C and the kept rows, not with the chunks.

    Args:
        start, length: [C] position of each chunk's first row, and its rows, in tokens.
        s_keep: [C] first retained position of each chunk's request, in tokens.
    """
    return _tails(length, clipped_rows(start, length, s_keep))


def clipped_rows(start: IntArray, length: IntArray, s_keep: IntArray) -> IntArray:
    """[C] rows removed from the front of each chunk; at least one stays."""
    below: IntArray = np.maximum(s_keep - start, 0)
    return np.minimum(below, length - 1)


def _tails(length: IntArray, clip: IntArray) -> KeptRows:
    """The rows of chunks without their first ``clip`` rows."""
    kept = length - clip
    cu_seqlens = _cumulative(kept)
    return KeptRows(kept, cu_seqlens, np.arange(cu_seqlens[-1]) + clip.cumsum().repeat(kept))


def ring_slots(plan: RowPlan, *, ring_size: int, state_ids: Sequence[int]) -> IntArray:
    """[T] ring slot of each row, ``state id * ring_size + position mod ring_size``; -1 if it must not write.

    Within one chunk only the last ``ring_size`` rows write: earlier rows would share their slots. ValueError
    when the ring is smaller than the window or there is not one state id per chunk.
    """
    check_ring(plan, ring_size, state_ids)
    if plan.window == 0:
        return np.full_like(plan.positions, -1)
    owner = plan.chunk_of_row
    end = _column([c.end for c in plan.chunks])[owner]
    slots = _column(state_ids)[owner] * ring_size + plan.positions % ring_size
    return np.where(plan.writes_swa & (plan.positions >= end - ring_size), slots, -1)


def check_ring(plan: RowPlan, ring_size: int, state_ids: Sequence[int]) -> None:
    """ValueError unless the ring holds a whole window and every chunk has a state id."""
    if ring_size < plan.window:
        raise ValueError(f"ring_size={ring_size} must be >= window={plan.window}")
    if len(state_ids) != len(plan.chunks):
        raise ValueError(
            f"state_ids has {len(state_ids)} entries, must have one per chunk: {len(plan.chunks)}"
        )


def _first_retained(chunk: Chunk, mode: Mode, keep_tokens: int) -> int:
    return 0 if mode == "off" else keep_start(chunk.num_prompt_tokens, keep_tokens)


def _column(values: Sequence[int]) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _cumulative(lengths: IntArray) -> IntArray:
    return np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))


def _check(holds: bool, invariant: str) -> None:
    if not holds:
        raise AssertionError(f"RowPlan: {invariant}")

"""Key addressing of a backend with consumer SWA in per-request rings and global KV in compressed blocks.

vLLM's paged kernels need none of this; it serves ring backends and ties the plan to recorded DeepInfer
metadata.

During prefill a row reads SWA keys from one gathered buffer: ``window`` history slots per chunk (slot t holds
position ``start - window + t``, copied from the ring), all chunks first, then the rows of the current layout.
During decode it reads the ring itself. Position p of state s lives at ``s * ring_size + p mod ring_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_yoco.plan import IntArray, RowPlan, check_ring, first_visible


def pivots(plan: RowPlan) -> IntArray:
    """[T, 4] history offset, history length, current offset, current length into the gathered buffer.

    The visible keys of a row are the history range followed by the current range. Both lengths are 0 for a
    row that sees nothing; its offsets then point one past its history block and one past itself.
    """
    owner = plan.chunk_of_row
    start = np.array([c.start for c in plan.chunks], np.int64)[owner]
    lo, end = plan.visible_lo, plan.visible_hi + 1
    split = np.maximum(lo, start)
    history_offset = (owner + 1) * plan.window + np.minimum(lo - start, 0)
    history_length = np.maximum(start - lo, 0)
    # Row t of chunk c holds position start + clip + t, so clipped rows shift the current part.
    current = len(plan.chunks) * plan.window + plan.cu_seqlens[owner] + split - start - plan.clip[owner]
    return np.stack((history_offset, history_length, current, end - split), axis=1)


def swa_history(plan: RowPlan, *, ring_size: int, state_ids: Sequence[int]) -> IntArray:
    """[S, 4] copies that fill the history blocks: state id, ring begin, ring end (exclusive), destination.

    State id -1 fills with zeros: slots before position 0 or before ``valid_start``. A block needs up to three
    copies: zeros, then the ring range, cut in two where it wraps. Truncation does not change what is loaded,
    only what ``pivots`` shows of it. ValueError as for ``ring_slots``.
    """
    check_ring(plan, ring_size, state_ids)
    window, count = plan.window, len(plan.chunks)
    if window == 0:
        return np.zeros((0, 4), np.int64)
    start = np.array([c.start for c in plan.chunks], np.int64)
    valid_start = np.array([c.valid_start for c in plan.chunks], np.int64)
    state = np.asarray(state_ids, np.int64)
    block = np.arange(count) * window

    zeros = np.clip(valid_start - (start - window), 0, window)
    begin = (start - window + zeros) % ring_size
    total = window - zeros
    head = np.minimum(total, ring_size - begin)
    none = np.zeros_like(start)
    copies = np.stack(
        (
            np.stack((none - 1, none, zeros, block), axis=1),
            np.stack((state, begin, begin + head, block + zeros), axis=1),
            np.stack((state, none, total - head, block + zeros + head), axis=1),
        ),
        axis=1,
    ).reshape(3 * count, 4)
    return copies[copies[:, 2] > copies[:, 1]]


def compressed_base(plan: RowPlan, ratio: int) -> IntArray:
    """[C + 1] first compressed key of each chunk's request, and the total, at ``ratio`` positions per key.

    A request holds ``floor(end / ratio)`` keys after its chunk, at least one slot. ValueError if ratio < 1.
    """
    if ratio < 1:
        raise ValueError(f"ratio={ratio} must be >= 1")
    end = np.array([c.end for c in plan.chunks], np.int64)
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(np.maximum(end // ratio, 1))))


def key_range(plan: RowPlan, ratio: int) -> tuple[IntArray, IntArray]:
    """``ks`` and ``ke``, [T] each: compressed keys ``[ks, ke)`` of a sparse layer with this ratio.

    Global KV is never truncated, so kept rows have the range they have in the full layout.
    """
    ks = compressed_base(plan, ratio)[plan.chunk_of_row]
    return ks, ks + (plan.positions + 1) // ratio


def kv_ca(plan: RowPlan, ratio: int) -> IntArray:
    """[T, 2] offset and length of the compressed keys of a dense layer; the same range as ``key_range``."""
    ks, ke = key_range(plan, ratio)
    return np.stack((ks, ke - ks), axis=1)


@dataclass(frozen=True, eq=False)
class DecodeRing:
    """Ring addressing of T decode rows, [T] each; reads start at ``offset`` and wrap within one ring.

    ``length`` keys are visible, positions ``visible_lo`` to ``visible_hi``; the row itself goes to ``slots``.
    """

    positions: IntArray
    offset: IntArray
    length: IntArray
    visible_lo: IntArray
    visible_hi: IntArray
    slots: IntArray


def decode_ring(
    seqlens: Sequence[int], q_lens: Sequence[int], *, window: int, ring_size: int, state_ids: Sequence[int]
) -> DecodeRing:
    """Address the last ``q_lens[i]`` rows of each request, whose length is then ``seqlens[i]`` tokens.

    Decode is never truncated: K >= W + B keeps its window above ``s_keep``. ValueError when the arguments
    disagree, or when the ring cannot hold the windows of all rows of a request at once: every row is stored
    before the first one reads.
    """
    if not len(seqlens) == len(q_lens) == len(state_ids):
        given = f"{len(seqlens)}, {len(q_lens)} and {len(state_ids)}"
        raise ValueError(f"seqlens, q_lens and state_ids have {given} entries, must have the same number")
    if window < 1:
        raise ValueError(f"window={window} must be >= 1: without SWA there is no ring")
    total, count = np.asarray(seqlens, np.int64), np.asarray(q_lens, np.int64)
    if ((count < 1) | (count > total)).any():
        raise ValueError(f"q_lens={list(q_lens)} must lie in [1, seqlens={list(seqlens)}]")
    needed = window - 1 + int(count.max(initial=1))
    if ring_size < needed:
        raise ValueError(f"ring_size={ring_size} must be >= window - 1 + longest q_len = {needed}")

    owner = np.repeat(np.arange(len(count)), count)
    position = np.arange(len(owner)) - np.cumsum(count)[owner] + total[owner]
    lo = first_visible(position, window, np.zeros_like(position))
    ring = np.asarray(state_ids, np.int64)[owner] * ring_size
    return DecodeRing(
        positions=position,
        offset=ring + lo % ring_size,
        length=position - lo + 1,
        visible_lo=lo,
        visible_hi=position.copy(),
        slots=ring + position % ring_size,
    )

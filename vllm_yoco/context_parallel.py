"""Index tables that move consumer rows between context-parallel (CP) ranks when prefill is truncated.

Causal attention costs more for late rows, so each chunk is cut into ``2 * cp_size`` equal blocks and rank r
owns the blocks r and ``2 * cp_size - 1 - r``: the *mirror* layout. Producer layers use the mirror of the full
rows. Dropping rows in place would leave almost all kept rows on few ranks, so the kept rows are mirrored
again, with their own block size:

    full mirror --contrib_index--> padded send buffer --all-gather--> rank-major buffer
    rank-major buffer --gathered_reverse_index--> kept rows in order --compact_mirror_index--> compact mirror

-1 marks padding everywhere. Source: recorded DeepInfer tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_yoco.plan import BoolArray, IntArray, RowPlan
from vllm_yoco.ring_metadata import compressed_base, key_range


@dataclass(frozen=True, eq=False)
class ContextParallelTables:
    """P ranks, F and M slots per rank in the full and compact mirror, T kept rows, G sent rows, R ratios.

    ======================  =========  ==================================================================
    full_mirror_index       [P, F]     full row held in each slot of a rank
    compact_mirror_index    [P, M]     kept row held in each slot of a rank
    compact_reverse_index   [T]        slot of each kept row in the rank-major compact mirror
    contrib_index           [P, G]     slots of its full mirror that a rank sends, in slot order
    gathered_reverse_index  [T]        slot of each kept row in the rank-major gathered buffer
    compact_ks, compact_ke  [P, R, M]  compressed keys ``[ks, ke)`` per ratio, empty in padding slots
    ======================  =========  ==================================================================
    """

    full_mirror_index: IntArray
    compact_mirror_index: IntArray
    compact_reverse_index: IntArray
    contrib_index: IntArray
    gathered_reverse_index: IntArray
    compact_ks: IntArray
    compact_ke: IntArray

    @property
    def mirror_len(self) -> int:
        """Rows per rank in the compact mirror, padding included."""
        return int(self.compact_mirror_index.shape[1])

    @property
    def contrib_pad_len(self) -> int:
        """Rows every rank sends, padding included: the most kept rows that any rank holds."""
        return int(self.contrib_index.shape[1])


def mirror_index(lengths: IntArray, cp_size: int) -> IntArray:
    """[P, F] row held in each slot of each rank, or -1; chunk i has ``lengths[i]`` consecutive rows."""
    owner, half, offset, block = _mirror_slots(lengths, cp_size)
    rank = np.arange(cp_size)[:, None]
    row = np.where(half == 0, rank, 2 * cp_size - 1 - rank) * block + offset
    first = np.cumsum(lengths) - lengths
    return np.where(row < lengths[owner], first[owner] + row, -1)


def reverse_index(index: IntArray) -> IntArray:
    """[rows] position of each row in the flattened ``index``, which must hold every row exactly once."""
    flat = index.ravel()
    filled = np.flatnonzero(flat >= 0)
    reverse = np.empty(len(filled), np.int64)
    reverse[flat[filled]] = filled
    return reverse


def context_parallel_tables(plan: RowPlan, cp_size: int, ratios: Sequence[int]) -> ContextParallelTables:
    """Tables for ``plan`` on ``cp_size`` ranks, with key ranges for each compression ratio in order.

    ValueError when cp_size < 2 (one rank has no mirror and must get no padding rows) or a ratio is < 1.
    """
    if cp_size < 2:
        raise ValueError(f"cp_size={cp_size} must be >= 2: a single rank has no mirror layout")
    kept = np.diff(plan.cu_seqlens)
    full = mirror_index(np.array([c.length for c in plan.chunks], np.int64), cp_size)
    compact = mirror_index(kept, cp_size)

    # Kept row held in each full mirror slot; the extra -1 serves padding, which indexes the last element.
    kept_row = np.full(int(sum(c.length for c in plan.chunks)) + 1, -1, np.int64)
    kept_row[plan.rows] = np.arange(len(plan.rows))
    held = kept_row[full]
    contrib = _pack(held >= 0)
    sent = np.where(contrib >= 0, np.take_along_axis(held, np.maximum(contrib, 0), axis=1), -1)

    owner = _mirror_slots(kept, cp_size)[0]
    base = [compressed_base(plan, ratio)[owner] for ratio in ratios]
    end = [np.append(key_range(plan, ratio)[1], -1)[compact] for ratio in ratios]
    shape = (cp_size, len(ratios), compact.shape[1])
    ks = np.broadcast_to(np.array(base, np.int64).reshape(1, *shape[1:]), shape).copy()
    ke = np.array(end, np.int64).reshape(len(ratios), cp_size, shape[2]).swapaxes(0, 1)
    return ContextParallelTables(
        full_mirror_index=full,
        compact_mirror_index=compact,
        compact_reverse_index=reverse_index(compact),
        contrib_index=contrib,
        gathered_reverse_index=reverse_index(sent),
        compact_ks=ks,
        compact_ke=np.where(compact[:, None, :] >= 0, ke, ks),
    )


def _mirror_slots(lengths: IntArray, cp_size: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """[F] each, the same on every rank: chunk of a slot, which of its two blocks, offset there, size."""
    size = -(-lengths // (2 * cp_size))
    owner = np.repeat(np.arange(len(lengths)), 2 * size)
    block = size[owner]
    slot = np.arange(len(owner)) - 2 * (np.cumsum(size) - size)[owner]
    # block >= 1 wherever a slot exists.
    return owner, slot // block, slot % block, block


def _pack(chosen: BoolArray) -> IntArray:
    """[P, G] columns chosen in each row, left-aligned and padded with -1 to the longest row."""
    rank, column = np.nonzero(chosen)
    place = np.cumsum(chosen, axis=1)[rank, column] - 1
    packed = np.full((len(chosen), int(chosen.sum(axis=1).max(initial=0))), -1, np.int64)
    packed[rank, place] = column
    return packed

"""Debug check of every step's consumer SWA cells: who owns what a row reads and writes.

``VLLM_YOCO_DEBUG=1`` turns it on in every process that sees it. Each step is then recomputed key by key, without
the clamps, cuts and shifts that ``batch`` and ``attention`` use:

    a row reads        the keys of its window at or above s_keep and nothing else
    the key at p       is cell p - r of its request, r = s_keep mod block size; cells fill the blocks in order
    a cell that is     lies in a block that its request owns (not the null block), that no other request of the
    read or written    step reads or writes, and that no other KV cache group uses
    a row at p         writes the cell of p, or none below s_keep
    the kernel         finds these very cells under the view of the batch that it is given

A block that has been freed too early is seen here once somebody else in the batch has got it. With block tables of
the scheduler, in which freed blocks are null, ``check_cells`` sees it at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_yoco.plan import BoolArray, IntArray, swa_visible

if TYPE_CHECKING:
    from vllm.v1.worker.utils import AttentionGroup

    from vllm_yoco.step import PreparedStep, StepInputs

ENV = "VLLM_YOCO_DEBUG"

NULL_BLOCK = 0
NO_SLOT = -1


class IntegrityError(AssertionError):
    """A step reads or writes a cell that is not its request's own."""


def enabled() -> bool:
    return os.environ.get(ENV) == "1"


@dataclass(frozen=True)
class Cells:
    """The rows of one step and the consumer SWA cells they see: T rows, W window keys each.

    Attributes:
        request: [T] request of each row.
        position: [T] absolute.
        visible: [T, W] bool, which of the keys ``position, position - 1, ...`` the row sees.
        slot: [T, W] the slot of each key, -1 where it is not visible.
        own_slot: [T] the slot that the row writes; -1 below s_keep.
    """

    request: IntArray
    position: IntArray
    visible: BoolArray
    slot: IntArray
    own_slot: IntArray


def check_cells(
    request: IntArray,
    position: IntArray,
    keep_start: IntArray,
    block_table: IntArray,
    *,
    window: int,
    block_size: int,
    foreign_blocks: IntArray | None = None,
) -> Cells:
    """Derive the cells of a step's rows and check that each has one owner.

    Args:
        request: [T] request of each row, an index below R.
        position: [T] absolute position.
        keep_start: [R] s_keep.
        block_table: [R, columns] blocks of the consumer SWA group.
        window: W in keys.
        block_size: in tokens.
        foreign_blocks: blocks that other KV cache groups use in this step.

    Raises:
        IntegrityError: the first cell that breaks a rule.
    """
    first_key = keep_start[request][:, None]
    key = position[:, None] - np.arange(window)
    visible = swa_visible(position[:, None], key, window, first_key)
    cell = key - first_key % block_size
    column = np.where(visible, cell // block_size, 0)
    _check(column < block_table.shape[1], "lies past the end of its block table", request, key)
    block = np.where(visible, block_table[request[:, None], column], NULL_BLOCK)
    _check(~visible | (block != NULL_BLOCK), "lies in no block of its request", request, key)

    users = np.unique(np.stack([block[visible], np.broadcast_to(request[:, None], key.shape)[visible]]), axis=1)
    blocks, num_users = np.unique(users[0], return_counts=True)
    _check(~np.isin(block, blocks[num_users > 1]), "lies in a block that another request uses too", request, key)
    if foreign_blocks is not None:
        taken = visible & np.isin(block, foreign_blocks)
        _check(~taken, "lies in a block that another KV cache group uses too", request, key)

    slot = np.where(visible, block * block_size + cell % block_size, NO_SLOT)
    return Cells(request, position, visible, slot, own_slot=slot[:, 0])


def check_writes(cells: Cells, slot_mapping: IntArray) -> None:
    """The slot mapping [T] of the step writes each retained row's own cell and nothing else."""
    right = slot_mapping[:, None] == cells.own_slot[:, None]
    _check(right, "is written to another slot than its own", cells.request, cells.position[:, None])


def check_view(
    cells: Cells, rows: IntArray, seq_lens: IntArray, block_table: IntArray, *, window: int, block_size: int
) -> None:
    """What a paged kernel reads, which knows no bound but the window and position 0, is what the rows see.

    Args:
        rows: the rows that the kernel gets, ascending; those of one request are the last of its sequence.
        seq_lens: [R] as the kernel is told.
        block_table: [R, columns] as the kernel is told.
    """
    request = cells.request[rows]
    end = np.cumsum(np.bincount(request))[request]
    rows_after = end - 1 - np.arange(len(rows))
    seen = (seq_lens[request] - 1 - rows_after)[:, None] - np.arange(window)
    column = np.clip(seen // block_size, 0, block_table.shape[1] - 1)
    slot = np.where(seen >= 0, block_table[request[:, None], column] * block_size + seen % block_size, NO_SLOT)
    # A row that sees nothing is given one key all the same; the layer discards what comes of it.
    sees_nothing = ~cells.visible[rows].any(axis=1, keepdims=True)
    right = sees_nothing | (slot == cells.slot[rows])
    key = cells.position[rows][:, None] - np.arange(window)
    _check(right, "is not where the kernel looks for it", request, key)


def check_step(
    step: StepInputs,
    keep_start: IntArray,
    real: BoolArray,
    groups: Sequence[AttentionGroup],
    swa_groups: Sequence[AttentionGroup],
    window: int,
    prepared: PreparedStep | None,
) -> None:
    """Check one step as the model runner holds it, after its slots have been rewritten.

    Args:
        keep_start: [R] s_keep, 0 for requests that keep every row.
        real: [R] bool; the rows of dummy requests have no cells.
        groups: all attention groups of the runner; ``swa_groups`` those of consumer SWA.
        prepared: None where the stock layout and the stock view are in force.

    Raises:
        IntegrityError: see ``check_cells``, ``check_writes`` and ``check_view``.
    """
    num_reqs, num_rows = len(step.start), int(step.query_start_loc[-1])
    if not num_rows:
        return
    request = np.repeat(np.arange(num_reqs), np.diff(step.query_start_loc))
    position = step.positions[:num_rows].cpu().numpy().astype(np.int64)
    tables = {
        group_id: step.block_table(group_id)[:num_reqs].cpu().numpy().astype(np.int64)
        for group_id in {group.kv_cache_group_id for group in groups}
    }
    for group_id in {group.kv_cache_group_id for group in swa_groups}:
        block_size = swa_groups[0].kv_cache_spec.block_size
        foreign = [
            _used_blocks(tables[other.kv_cache_group_id], request, position, other.kv_cache_spec)
            for other in groups
            if other.kv_cache_group_id != group_id
        ]
        is_real = real[request]
        cells = check_cells(
            request[is_real],
            position[is_real],
            keep_start,
            tables[group_id],
            window=window,
            block_size=block_size,
            foreign_blocks=np.unique(np.concatenate(foreign)) if foreign else None,
        )
        if prepared is None or prepared.plan is None:
            slots = step.slot_mappings[group_id][:num_rows].cpu().numpy().astype(np.int64)
        else:
            slots = np.full(num_rows, NO_SLOT)
            slots[prepared.plan.rows] = prepared.kept_slots[group_id].cpu().numpy()
        check_writes(cells, slots[is_real])
        if step.in_graph or not is_real.all():
            continue  # the view of a graph is written into the runner's own table, once
        seq_lens, table = step.seq_lens[:num_reqs], step.block_table(group_id)[:num_reqs]
        rows = np.arange(num_rows)
        if prepared is not None and prepared.view is not None:
            seq_lens, table = prepared.view.seq_lens(seq_lens), prepared.view.block_table(table, block_size)
            rows = rows if prepared.plan is None else prepared.plan.rows
        check_view(
            cells,
            rows,
            seq_lens.cpu().numpy().astype(np.int64),
            table.cpu().numpy().astype(np.int64),
            window=window,
            block_size=block_size,
        )


def _used_blocks(table: IntArray, request: IntArray, position: IntArray, spec: Any) -> IntArray:
    """Blocks of one KV cache group that the step reads or writes: full attention from 0, else from the window."""
    window = getattr(spec, "sliding_window", None)
    blocks = []
    for index in np.unique(request).tolist():
        rows = position[request == index]
        first = 0 if window is None else max(0, int(rows.min()) - window + 1)
        blocks.append(table[index, first // spec.block_size : int(rows.max()) // spec.block_size + 1])
    return np.setdiff1d(np.concatenate(blocks), [NULL_BLOCK])


def _check(holds: BoolArray, broken: str, request: IntArray, key: IntArray) -> None:
    if not holds.all():
        row, column = np.argwhere(~holds)[0]
        raise IntegrityError(f"consumer SWA: the key at {key[row, column]} of request {request[row]} {broken}")

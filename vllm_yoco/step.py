"""One scheduled step: what the model runner knows of it, and what consumer SWA needs for it.

``StepInputs`` is filled by either model runner. ``PreparedStep`` derives, before any metadata is built, the window
view, the rebased slots and, if rows drop, the row plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_yoco.attention import WindowView
from vllm_yoco.config import Truncation
from vllm_yoco.plan import KeptRows, kept_rows
from vllm_yoco.staging import StepBuffers


@dataclass(slots=True, eq=False)  # not frozen, which takes five times as long to make
class StepInputs:
    """One scheduled step of R requests and T rows, as the model runner knows it before the forward.

    Attributes:
        num_prompt_tokens: [R] host, L of each request.
        start: [R] host, position of each chunk's first row.
        query_start_loc: [R + 1] host, cumulative rows.
        keep_all: [R] host bool, requests that keep every row.
        num_shown: R or, padded to a CUDA graph, more: requests that kernels are shown.
        seq_lens: [R or more] device int32.
        seq_lens_cpu: [R or more] the same on the host, an upper bound.
        positions: [T or more] device, absolute.
        block_table: of a KV cache group, [R or more, blocks] device. A call, because most steps need one of them.
        slot_mappings: by KV cache group, [T or more] device int64; in a step that drops no row, those of consumer SWA
            are rewritten in place.
        is_prefilling: [R or more] host bool.
        in_graph: the forward is a CUDA graph replay, which cannot drop rows.
    """

    num_prompt_tokens: np.ndarray
    start: np.ndarray
    query_start_loc: np.ndarray
    keep_all: np.ndarray
    num_shown: int
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    positions: torch.Tensor
    block_table: Callable[[int], torch.Tensor]
    slot_mappings: Mapping[int, torch.Tensor] | torch.Tensor
    is_prefilling: np.ndarray
    in_graph: bool = False


class PreparedStep:
    """What one step with at least one truncated request needs: its view and, if rows drop, its kept rows.

    Decode steps of one batch differ in positions and blocks only, so ``step`` may be replaced by the next one.
    Everything is derived on the host from arrays of R requests and of the kept rows; nothing grows with the prompt
    and nothing is read back from the device.

    Attributes (those of [T'] only with a plan):
        keep_start: [R] s_keep.
        wholly_below: [R] bool, requests whose chunk ends at or below s_keep: all that remains is a placeholder.
        has_placeholders: whether there is one.
        view: how consumer SWA kernels see the batch; None without consumer SWA.
        begins_no_block: no row is the first of a block of consumer SWA; False if that is not known on the host.
        plan: the kept rows; None where no row drops.
        rows: [T'] device int64, index of each kept row in the full batch.
        positions: [T'] device int64, absolute position of each.
        kept_slots: per consumer SWA group, [T'] device int64.
        placeholders: [T'] device bool, the kept rows that see no key; None where each sees one.
    """

    def __init__(
        self,
        step: StepInputs,
        keep_start: np.ndarray,
        block_size: int,
        truncation: Truncation,
        buffers: StepBuffers,
        max_reqs: int,
        max_rows: int,
    ) -> None:
        self.step = step
        self.keep_start = keep_start
        self._rebase = keep_start % block_size
        self._block_size = block_size
        self._buffers, self._max_reqs, self._max_rows = buffers, max_reqs, max_rows
        query_lens = step.query_start_loc[1:] - step.query_start_loc[:-1]
        self._end = step.start + query_lens
        self.wholly_below = self._end <= keep_start
        self.has_placeholders = _any(self.wholly_below)
        self.plan: KeptRows | None = None
        self.placeholders: torch.Tensor | None = None
        self._below: torch.Tensor | None = None
        self.begins_no_block = False
        self._shifts: dict[int, np.ndarray] = {}
        window = truncation.topology.consumer_window
        if _any(step.start < keep_start):
            if step.in_graph:
                first_kept = step.query_start_loc[:-1] + keep_start - step.start
                below = np.arange(step.query_start_loc[-1]) < first_kept.repeat(query_lens)
                self._below = buffers.put("below", below, max_rows)
            else:
                self.plan = kept_rows(step.start, query_lens, keep_start)
                self.rows = buffers.put("rows", self.plan.rows, max_rows)
                # Not the plan's: with asynchronous scheduling the host may be ahead of the accepted draft tokens.
                self.positions = buffers.gather("positions", step.positions, self.rows, max_rows)
                self.placeholders = self._below = self._find_placeholders()
                self.kept_slots: dict[int, torch.Tensor] = {}
        self.view = self._make_view(window) if window else None

    def _make_view(self, window: int) -> WindowView:
        step, keep_start, rebase = self.step, self.keep_start, self._rebase
        reaches_below = step.start - (window - 1) < keep_start
        cut = (keep_start - rebase) * reaches_below
        if not (self.has_placeholders or _any(cut)):
            # The common step of decodes past their window: lengths shift, block tables stand.
            return WindowView(*self._shift(rebase))
        shift, empty = cut + rebase, None
        if self.has_placeholders:
            seeing = ~self.wholly_below
            cut, shift = cut * seeing, shift * seeing
            empty = self._put("empty", self._padded(self.wholly_below))
        # Of a request that sees nothing the lengths are not read, and its shift of 0 would make it the longest.
        lengths = self._end - shift if empty is None else np.where(self.wholly_below, 1, self._end - shift)
        return WindowView(
            *self._shift(shift),
            cut_tokens=self._put("cut", self._padded(cut)),
            empty=empty,
            table_tokens=int(lengths.max()),
            in_place=step.in_graph,
        )

    def _shift(self, shift: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The shift on the device and on the host."""
        on_host = self._padded(shift).astype(np.int32)
        return self._put("shift", on_host), torch.from_numpy(on_host)

    def _padded(self, values: np.ndarray) -> np.ndarray:
        """Zeros for the requests that only pad the batch to its CUDA graph."""
        missing = self.step.num_shown - len(values)
        return np.pad(values, (0, missing)) if missing else values

    def _put(self, name: str, values: np.ndarray) -> torch.Tensor:
        return self._buffers.put(name, values, self._max_reqs)

    def _find_placeholders(self) -> torch.Tensor | None:
        """See the class; a kept row lies below s_keep only where its whole chunk does."""
        assert self.plan is not None
        if not self.has_placeholders:
            return None
        placeholder = np.zeros(len(self.plan.rows), dtype=bool)
        placeholder[self.plan.cu_seqlens[1:][self.wholly_below] - 1] = True
        return self._buffers.put("placeholder", placeholder, self._max_rows)

    def rewrite_slots(self, group_id: int) -> None:
        """Move the rows of one consumer SWA group to their rebased cells.

        Without a plan, in the runner's own mapping. With one nobody reads that mapping, which has a row for every
        token of the step: the kept rows' cells go to ``kept_slots``. Rows below s_keep get none, and a row that vLLM
        gave none (padding, profiling batches) keeps none.
        """
        step = self.step
        slots: Any = step.slot_mappings[group_id]
        table: Any = step.block_table(group_id)
        below: Any = self._below
        shift: Any = self._table_shift(table.shape[1])
        if self.plan is None:
            num_rows = int(step.query_start_loc[-1])
            positions: Any = step.positions
            if num_rows != len(shift):
                shift = shift.repeat(step.query_start_loc[1:] - step.query_start_loc[:-1])
        else:
            num_rows, shift = len(self.plan.rows), shift.repeat(self.plan.num_rows)
            positions, slots = self.positions, slots.index_select(0, self.rows)
        if self._buffers.on_host:
            # The arithmetic reads the same for both; on the host, NumPy's calls cost a third of torch's.
            slots, positions, table = slots.numpy(), positions.numpy(), table.numpy()
            below = None if below is None else below.numpy()
        else:
            shift = self._buffers.put("row_shift", shift, self._max_rows)
        slots = slots[:num_rows]
        cells = positions[:num_rows] + shift
        block = cells // self._block_size
        # Cells of rows below s_keep may be another request's or negative; what they get is overruled in the end.
        moved = (table.reshape(-1).take(block) - block) * self._block_size + cells
        no_cell = slots < 0
        if below is not None:
            no_cell |= below
        moved[no_cell] = PAD_SLOT_ID
        if self.plan is None:
            slots[:] = moved
            self.begins_no_block = self._buffers.on_host and bool((cells % self._block_size).all())
        else:
            self.kept_slots[group_id] = torch.from_numpy(moved) if self._buffers.on_host else moved

    def _table_shift(self, num_columns: int) -> np.ndarray:
        """[R] what turns a position into its cell, counted through the block tables of all requests end to end."""
        found = self._shifts.get(num_columns)
        if found is None:
            first = np.arange(len(self._rebase)) * (num_columns * self._block_size)
            found = self._shifts[num_columns] = first - self._rebase
        return found


def _any(values: np.ndarray) -> bool:
    """In a fourth of the time of ``values.any()``."""
    return bool(np.count_nonzero(values))

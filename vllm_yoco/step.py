"""One scheduled step: what the model runner knows of it, and what consumer SWA needs for it.

``StepInputs`` is filled by either model runner. ``PreparedStep`` derives, before any metadata is built, the window
view, the rebased slots and, if rows drop, the row plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_yoco.attention import WindowView
from vllm_yoco.config import Truncation
from vllm_yoco.plan import KeptRows, kept_rows
from vllm_yoco.staging import StepBuffers


@dataclass(frozen=True)
class StepInputs:
    """One scheduled step of R requests and T rows, as the model runner knows it before the forward.

    Attributes:
        num_prompt_tokens: [R] host, L of each request.
        start: [R] host, position of each chunk's first row.
        query_start_loc: [R + 1] host, cumulative rows.
        keep_all: [R] host bool, requests that keep every row.
        seq_lens: [R or, padded to a CUDA graph, more] device int32.
        seq_lens_cpu: the same on the host, an upper bound.
        positions: [T or more] device, absolute.
        block_tables: per KV cache group, [R or more, blocks] device.
        slot_mappings: per KV cache group, [T or more] device int64; consumer SWA rows are rewritten in place.
        is_prefilling: [R or more] host bool.
        max_seq_len: upper bound of ``seq_lens``, in tokens.
        in_graph: the forward is a CUDA graph replay, which cannot drop rows.
    """

    num_prompt_tokens: np.ndarray
    start: np.ndarray
    query_start_loc: np.ndarray
    keep_all: np.ndarray
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    positions: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    slot_mappings: Sequence[torch.Tensor]
    is_prefilling: torch.Tensor
    max_seq_len: int
    in_graph: bool = False


class PreparedStep:
    """What one step with at least one truncated request needs: its view and, if rows drop, its kept rows.

    Everything is derived on the host from arrays of R requests and of the kept rows; nothing grows with the prompt
    and nothing is read back from the device.
    """

    def __init__(
        self,
        step: StepInputs,
        query_lens: np.ndarray,
        keep_start: np.ndarray,
        block_size: int,
        truncation: Truncation,
        buffers: StepBuffers,
        max_reqs: int,
        max_rows: int,
    ) -> None:
        self.step = step
        self._query_lens = query_lens
        self.keep_start = keep_start
        self._block_size = block_size
        self._buffers, self._max_reqs, self._max_rows = buffers, max_reqs, max_rows
        self.plan: KeptRows | None = None
        window = truncation.topology.consumer_window
        if not step.in_graph and (step.start < keep_start).any():
            self.plan = kept_rows(step.start, query_lens, keep_start)
            self.rows = buffers.put("rows", self.plan.rows, max_rows)
        self.view = self._make_view(window) if window else None

    def _make_view(self, window: int) -> WindowView:
        step, keep_start = self.step, self.keep_start
        rebase = keep_start % self._block_size
        reaches_below = (step.start - window + 1 < keep_start) & (keep_start > 0)
        if not reaches_below.any():
            # The common step of decodes past their window: lengths shift, block tables stand.
            return WindowView(*self._shift(rebase))
        end = step.start + self._query_lens
        empty = end <= keep_start
        clipped = reaches_below & ~empty
        cut = np.where(clipped, keep_start - rebase, 0)
        shift = np.where(clipped, keep_start, np.where(empty, 0, rebase))
        return WindowView(
            *self._shift(shift),
            cut_tokens=self._put("cut", self._padded(cut)),
            empty=self._put("empty", self._padded(empty)) if empty.any() else None,
            table_tokens=int(np.where(empty, 1, end - shift).max()),
            in_place=step.in_graph,
        )

    def _shift(self, shift: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The shift on the device and on the host."""
        on_host = self._padded(shift).astype(np.int32)
        return self._put("shift", on_host), torch.from_numpy(on_host)

    def _padded(self, values: np.ndarray) -> np.ndarray:
        """Zeros for the requests that only pad the batch to its CUDA graph."""
        missing = len(self.step.seq_lens) - len(values)
        return np.pad(values, (0, missing)) if missing else values

    def _put(self, name: str, values: np.ndarray) -> torch.Tensor:
        return self._buffers.put(name, values, self._max_reqs)

    def rewrite_slots(self, slot_mapping: torch.Tensor, block_table: torch.Tensor) -> None:
        """Move the rows of one consumer SWA group to their rebased cells.

        Rows below s_keep get none, and a row that vLLM gave none (padding, profiling batches) keeps none.
        """
        num_rows = int(self.step.query_start_loc[-1])
        slots, positions = slot_mapping[:num_rows], self.step.positions[:num_rows]
        if self.plan is None:
            request = np.repeat(np.arange(len(self.keep_start)), self._query_lens)
            self._rewrite(slots, positions, request, block_table)
            return
        # A removed row gets no cell, so only the kept ones are looked at.
        kept = slots[self.rows]
        self._rewrite(kept, positions[self.rows], self.plan.owner, block_table)
        slots.fill_(PAD_SLOT_ID).index_copy_(0, self.rows, kept)

    def _rewrite(
        self, slots: torch.Tensor, positions: torch.Tensor, owner: np.ndarray, block_table: torch.Tensor
    ) -> None:
        """Rewrite the slots [T] of rows that belong to request ``owner`` [T]."""
        request: Any = owner
        keep_start: Any = self.keep_start[owner]
        rebase: Any = (self.keep_start % self._block_size)[owner]
        tensors: tuple[Any, ...] = (slots, positions, block_table)
        if self._buffers.on_host:
            # The arithmetic below reads the same for both; on the host, NumPy's calls cost a third of torch's.
            tensors = tuple(tensor.numpy() for tensor in tensors)
        else:
            request = self._buffers.put("row_request", request, self._max_rows)
            keep_start = self._buffers.put("row_keep_start", keep_start, self._max_rows)
            rebase = self._buffers.put("row_rebase", rebase, self._max_rows)
        slot, position, table = tensors
        where: Any = np.where if self._buffers.on_host else torch.where
        no_cell = (position < keep_start) | (slot < 0)
        cell = position - rebase
        block = cell // self._block_size
        # Rows below s_keep may have a cell of -1 or less; it picks a block that is overruled in the last line.
        slot[:] = table[request, block]
        slot -= block
        slot *= self._block_size
        slot += cell  # the block's first slot, and the offset in it
        slot[:] = where(no_cell, PAD_SLOT_ID, slot)

"""What an engine's attention kernels were told to read and write, decoded from the running engine.

Hooks on the model look at the metadata of every step where the kernels take it: inside the forward context that is in
force when an attention layer runs. No formula of the plugin enters. Which request and which position a cell holds is
remembered from the slots that were written; what a row sees is read off in the kernels' own terms:

    keys of a request      k = 0 .. seq_len - 1, in cell  block_table[k // block] * block + k % block
    row j of its q rows    is key  c = seq_len - q + j  and sees keys  max(0, c - W + 1) .. c
    what it sees           the positions last written to these cells, which must be consecutive and its own request's
    sees nothing           exactly the rows whose window branch enters the output projection as zeros

Requests are told apart by the blocks that the scheduler gave them, prompt lengths and chunks come from the scheduler.
Runs in the worker; needs eager execution and no prefix caching.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.v1.worker.utils import AttentionGroup

from vllm_yoco.tools.check_cells import Cells, KernelView, kernel_window
from vllm_yoco.tools.check_rows import BAD, NOTHING, RequestTrace

MAX_PROBLEMS = 20


@dataclass
class _Request:
    number: int
    trace: RequestTrace
    blocks: list[list[int]] = field(default_factory=list)


class Recorder:
    """Hooks of one worker's model runner; ``take`` hands over what was recorded since the last time."""

    def __init__(self, runner: Any) -> None:
        model = runner.get_model()
        self._consumers = model.model.consumers
        groups = [group for groups in runner.attn_groups for group in groups]
        self._group_of = {name: group for group in groups for name in group.layer_names}
        self._num_blocks = runner.kv_cache_config.num_blocks
        self._cells: dict[int, Cells] = {}
        self._requests: dict[str, _Request] = {}
        self._problems: list[str] = []
        self._seen: set[tuple[str, int]] = set()
        self._order: list[_Request] = []
        self._num_steps = 0
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model
        model.register_forward_pre_hook(self._on_model, with_kwargs=True)
        for index, layer in enumerate(self._consumers):
            attention = layer.self_attn
            attention.register_forward_pre_hook(lambda m, args, i=index: self._on_consumer(m, args, i))
            attention.o_proj.register_forward_pre_hook(lambda m, args, a=attention: self._on_output(a, args[0]))
            if attention.has_swa:
                self._mark_null_block(attention.swa_attn.kv_cache)
                attention.swa_attn.register_forward_pre_hook(lambda m, args: self._on_window(m))

    def _mark_null_block(self, cache: torch.Tensor) -> None:
        """Ones where no request has a cell: a row that reads them does not look like a row that sees nothing."""
        if cache.shape[0] == self._num_blocks:
            cache[0].fill_(1)

    def take(self) -> tuple[list[RequestTrace], list[str]]:
        """Traces in the order of admission, and what was wrong at once."""
        traces = [request.trace for request in self._requests.values()]
        problems, self._requests, self._problems = self._problems, {}, []
        self._cells.clear()  # request numbers start again
        return traces, problems

    def _execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            if new.req_id not in self._requests:  # V2 counts a request that resumes as new
                may_idle = not has_kv_transfer_group()  # see vllm_yoco.batch
                trace = RequestTrace.empty(len(new.prompt_token_ids), len(self._consumers), may_idle=may_idle)
                self._requests[new.req_id] = _Request(len(self._requests), trace)
            self._requests[new.req_id].blocks = [list(ids) for ids in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for req_id, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self._requests[req_id]
            starts[req_id] = start
            if blocks is not None and req_id in cached.resumed_req_ids:
                request.blocks = [list(ids) for ids in blocks]
            elif blocks is not None:
                for owned, ids in zip(request.blocks, blocks, strict=True):
                    owned += ids
        self._num_steps += 1
        for req_id, start in starts.items():
            self._requests[req_id].trace.add_chunk(start, scheduled.num_scheduled_tokens[req_id], self._num_steps)
        self._num_scheduled = {r: scheduled.num_scheduled_tokens[r] for r in starts}
        return self._execute(scheduled, *args, **kwargs)

    def _on_model(self, module: Any, args: Any, kwargs: Any) -> None:
        context = get_forward_context()
        if not isinstance(context.attn_metadata, dict):
            return
        self._seen.clear()
        first = self._consumers[0].self_attn.attn.layer_name
        view = KernelView.of(context.attn_metadata[first])
        slots = context.slot_mapping[first].cpu().numpy()
        self._order = [self._owner(first, int(slots[row])) for row in view.query_start_loc[:-1]]
        positions = kwargs["positions"].cpu().numpy()
        sources = dict.fromkeys(
            layer.self_attn.attn.kv_sharing_target_layer_name or layer.self_attn.attn.layer_name
            for layer in self._consumers
        )
        for name in sources:
            self._write(name, view, positions, context.slot_mapping[name].cpu().numpy(), window=False)

    def _owner(self, layer: str, slot: int) -> _Request:
        """The request that the scheduler gave a cell to."""
        group = self._group_of[layer]
        block = slot // group.kv_cache_spec.block_size
        for req_id in self._num_scheduled:
            if block in self._requests[req_id].blocks[group.kv_cache_group_id]:
                return self._requests[req_id]
        raise RuntimeError(f"{layer}: slot {slot} lies in no block of a scheduled request")

    def _cells_of(self, layer: str) -> tuple[Cells, AttentionGroup]:
        group = self._group_of[layer]
        if group.kv_cache_group_id not in self._cells:
            self._cells[group.kv_cache_group_id] = Cells(self._num_blocks, group)
        return self._cells[group.kv_cache_group_id], group

    def _write(
        self, layer: str, view: KernelView, positions: np.ndarray, slots: np.ndarray, *, window: bool
    ) -> None:
        """Take note of one group's writes in this step."""
        cells, group = self._cells_of(layer)
        written = slots[: view.query_start_loc[-1]]
        written = written[written >= 0]
        if len(np.unique(written)) < len(written):
            self._problem(f"{layer}: two rows of a step write the same cell")
        for index, request in enumerate(self._order):
            rows = view.rows_of(index)
            position, slot = positions[rows], slots[rows]
            writes = slot >= 0
            owned = request.blocks[group.kv_cache_group_id]
            block = slot // cells.manager_block_size
            foreign = writes & ~np.isin(block, [b for b in owned if b])
            if foreign.any():
                where = f"position {position[foreign][0]} of prompt {request.number}"
                self._problem(f"{layer}: {where} writes a block that is not its request's")
            cells.write(slot[writes], request.number, position[writes])
            if window:
                order = {b: i for i, b in enumerate(owned) if b}
                logical = np.array([order.get(int(b), -1) for b in block]) * cells.manager_block_size
                cell = np.where(writes & ~foreign, logical + slot % cells.manager_block_size, NOTHING)
                request.trace.note("cell", position, np.where(foreign, BAD, cell))
            else:
                request.trace.add("global_writes", position, writes)

    def _on_consumer(self, attention: Any, args: Any, index: int) -> None:
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            self._layout = None
            return
        positions, _, _, step = args
        name = attention.attn.layer_name
        self._positions = positions.cpu().numpy()
        self._step = step
        self._layout = view = KernelView.of(metadata[name])
        cells, _ = self._cells_of(name)
        first_time = self._first_time("global", metadata[name])
        for number, request in enumerate(self._order):
            position = self._positions[view.rows_of(number)]
            request.trace.add("layers", position, np.ones_like(position))
            if first_time:
                key, own = _keys(cells, view, number, request, len(position))
                # All keys below and the row's own: the kernel's causal mask goes by these two counts.
                complete = np.cumsum(key != np.arange(len(key))) == 0
                request.trace.note("global_seen", position, np.where(complete[own], key[own], BAD))

    def _on_window(self, module: Any) -> None:
        context = get_forward_context()
        if not isinstance(context.attn_metadata, dict):
            return
        metadata = context.attn_metadata[module.layer_name]
        if not self._first_time("window", metadata):
            return
        view = KernelView.of(metadata)
        positions = self._positions
        if self._step is not None and not self._step.compact:
            positions = positions[self._step.rows.cpu().numpy()]
        self._write(
            module.layer_name, view, positions, context.slot_mapping[module.layer_name].cpu().numpy(), window=True
        )
        cells, _ = self._cells_of(module.layer_name)
        for number, request in enumerate(self._order):
            position = positions[view.rows_of(number)]
            key, own = _keys(cells, view, number, request, len(position))
            lowest = np.maximum(own - kernel_window(module) + 1, 0)
            # breaks[k] counts keys 1 .. k that do not hold the position after that of the key before them.
            breaks = np.concatenate(([0], np.cumsum(np.diff(key) != 1)))
            good = (breaks[own] == breaks[lowest]) & (key[lowest] >= 0) & (key[own] == position)
            request.trace.note("first_key", position, np.where(good, key[lowest], BAD))

    def _on_output(self, attention: Any, joined: torch.Tensor) -> None:
        """``joined`` [T', heads * head_dim * branches] is the input of the output projection."""
        if self._layout is None or not attention.has_swa:
            return
        branch = joined[:, attention.q_size :]
        if not bool(torch.isfinite(branch).all()):
            self._problem(f"{attention.swa_attn.layer_name}: a row of the window branch is not finite")
        zero = (branch == 0).all(dim=1).cpu().numpy()
        for number, request in enumerate(self._order):
            rows = self._layout.rows_of(number)
            request.trace.add("zero_layers", self._positions[rows], zero[rows])

    def _first_time(self, branch: str, metadata: Any) -> bool:
        """Layers of a group share one metadata object, which needs to be looked at once a step."""
        key = (branch, id(metadata))
        first = key not in self._seen
        self._seen.add(key)
        return first

    def _problem(self, text: str) -> None:
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(text)


def _keys(
    cells: Cells, view: KernelView, number: int, request: _Request, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions behind a request's keys, and which of the keys are its rows' own; -1 in front for too few keys."""
    key = cells.read(view, number, request.number)
    key = np.concatenate((np.full(max(0, num_rows - len(key)), -1), key))
    return key, len(key) - num_rows + np.arange(num_rows)


def install(worker: Any) -> None:
    """Job for ``collective_rpc``: start recording, once per worker."""
    runner = worker.model_runner
    if not hasattr(runner, "yoco_recorder"):
        runner.yoco_recorder = Recorder(runner)


def take(worker: Any) -> tuple[list[RequestTrace], list[str]]:
    """Job for ``collective_rpc``: what was recorded."""
    taken: tuple[list[RequestTrace], list[str]] = worker.model_runner.yoco_recorder.take()
    return taken

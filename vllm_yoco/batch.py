"""From the row plan to what vLLM's attention layers read: the sub-batch of kept rows.

A step with rows below ``s_keep`` runs the consumer layers on a sub-batch of its own, the way vLLM runs a
microbatch: own row order, own attention metadata, own forward context.

    full batch     req 0: 0 1 2 3 4 5 6 7 | req 1: 0 1 2 | req 2: 9        producers, global KV writes
    kept rows             . . . . . 5 6 7 |        . . 2 |        9        consumers

A chunk wholly below ``s_keep`` (req 1) leaves a placeholder, whose token the runner throws away. A step of nothing
but placeholders is idle: no consumer layer runs.

Global attention of the sub-batch needs new query boundaries only: the kept rows are the tail of each chunk, so
sequence lengths and block tables stand. Sliding-window attention also gets the clipped view of
``vllm_yoco.attention``. ``mask`` builds the same sub-batch and uses it for the sliding-window branch alone.

Both model runners feed ``SubBatchBuilder`` through ``StepInputs``. The result travels in the step's
attention-metadata dict under ``STEP_KEY``; dummy batches carry none. Only whether the step is idle stays on the model,
until the next step: logits are computed outside of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.forward_context import ForwardContext, create_forward_context, get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.utils import AttentionGroup

from vllm_yoco import integrity
from vllm_yoco.attention import ClippedBuilderMixin, first
from vllm_yoco.config import Truncation
from vllm_yoco.staging import StepBuffers
from vllm_yoco.step import PreparedStep, StepInputs

STEP_KEY = "vllm_yoco.step"
T = TypeVar("T")


@dataclass(frozen=True)
class ConsumerStep:
    """The kept rows of one forward.

    Attributes:
        rows: [T'] device int64, index of each kept row in the full batch, ascending; empty in an idle step.
        positions: [T'] device int64, absolute position of each.
        empty: [T', 1] device bool, rows that see no SWA key; None where every row sees at least one.
        compact: run the consumer layers on ``rows`` only, not just their sliding-window branch.
        forward_context: context of the sub-batch; None in an idle step.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    empty: torch.Tensor | None
    compact: bool
    forward_context: ForwardContext | None

    @property
    def idle(self) -> bool:
        """All rows are placeholders: no consumer layer runs, and every token sampled is thrown away."""
        return self.forward_context is None


def hand_over(step: ConsumerStep | None, attn_metadata: dict[str, Any], model: Any) -> None:
    """Give the step's sub-batch to the model: call for every step, before its forward."""
    model.step_is_idle = step is not None and step.idle
    if step is not None:
        attn_metadata[STEP_KEY] = step


def current_step() -> ConsumerStep | None:
    """The step that the running forward belongs to; None where every row is kept."""
    metadata = get_forward_context().attn_metadata
    return metadata.get(STEP_KEY) if isinstance(metadata, dict) else None


class SubBatchBuilder:
    """Builds the views and the sub-batch of each step. One per model runner.

    Args:
        global_layers: names of the consumers' global attention layers.
        swa_layers: names of the consumers' sliding-window attention layers.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        truncation: Truncation,
        global_layers: set[str],
        swa_layers: set[str],
        device: torch.device,
    ) -> None:
        self._vllm_config = vllm_config
        self._truncation = truncation
        self._global_layers = global_layers
        self._swa_layers = swa_layers
        self._device = device
        scheduler_config = vllm_config.scheduler_config
        self._max_reqs = scheduler_config.max_num_seqs
        self._max_rows = scheduler_config.max_num_batched_tokens
        self._buffers = StepBuffers(device)
        self._checks = integrity.enabled() and bool(swa_layers)
        self._runner_groups: Any = None
        self._decoding: Any = None
        """What identifies the batch of the last step, if all of it was past its prompts."""

    def around(
        self, attn_groups: list[list[AttentionGroup]], step: StepInputs, full_batch: Callable[[], T]
    ) -> tuple[T, ConsumerStep | None]:
        """What ``full_batch`` builds, and the sub-batch of the step; None when every row is kept.

        Args:
            attn_groups: the runner's.
            full_batch: builds the runner's own metadata of the step.
        """
        if self._runner_groups is not attn_groups:
            self._bind(attn_groups)
        prepared = self.prepare(step)
        self._show(prepared)
        try:
            built = full_batch()
        finally:
            self._show(None)
        return built, self.build(prepared)

    def _bind(self, attn_groups: list[list[AttentionGroup]]) -> None:
        """Take over the runner's attention groups."""
        self._runner_groups, self._decoding = attn_groups, None
        flat = [group for groups in attn_groups for group in groups]
        self._swa_groups = [group for group in flat if not self._swa_layers.isdisjoint(group.layer_names)]
        self._swa_group_ids = sorted({group.kv_cache_group_id for group in self._swa_groups})
        # Builders keep what they built, so the sub-batch has its own, like a microbatch.
        self._own_groups = [
            self._copy(group, names)
            for group in flat
            if (names := [n for n in group.layer_names if n in self._global_layers or n in self._swa_layers])
        ]
        block_sizes = {group.kv_cache_spec.block_size for group in self._swa_groups}
        assert len(block_sizes) <= 1, f"consumer SWA groups disagree on the block size: {block_sizes}"
        self._block_size = block_sizes.pop() if block_sizes else 1

    def _copy(self, group: AttentionGroup, layer_names: list[str]) -> AttentionGroup:
        copy = replace(group, layer_names=layer_names, metadata_builders=[])
        copy.create_metadata_builders(self._vllm_config, self._device, group.kernel_block_size)
        return copy

    def prepare(self, step: StepInputs) -> PreparedStep | None:
        """Decide what this step needs; None when every request is as short as K (the stock path).

        In a step that drops no row, rewrites the slot mapping of the consumer SWA groups in place. Call before the
        runner builds the step's metadata.
        """
        past_prompt = step.start >= step.num_prompt_tokens
        batch = None
        if past_prompt.all():
            batch = step.num_prompt_tokens.tobytes(), step.keep_all.tobytes(), step.num_shown, step.in_graph
        if batch is None or batch != self._decoding:
            self._derive(step, past_prompt)
            self._decoding = batch
        prepared = self._prepared
        if prepared is not None:
            prepared.step = step
            for group_id in self._swa_group_ids:
                prepared.rewrite_slots(group_id)
        if self._checks:
            groups = [group for groups in self._runner_groups for group in groups]
            window = self._truncation.topology.consumer_window
            integrity.check_step(step, self._keep_start, self._real, groups, self._swa_groups, window, prepared)
        return prepared

    def _derive(self, step: StepInputs, past_prompt: np.ndarray) -> None:
        """All that consecutive decode steps of one batch have in common."""
        # A row that is neither prefill nor past its prompt belongs to a dummy batch and has no cells.
        self._real = step.is_prefilling[: len(step.start)] | past_prompt
        keep_start = np.maximum(step.num_prompt_tokens - self._truncation.keep_tokens, 0)
        self._keep_start = keep_start * (self._real & ~step.keep_all)
        self._prepared = None
        if np.count_nonzero(self._keep_start):
            sizes = self._buffers, self._max_reqs, self._max_rows
            self._prepared = PreparedStep(step, self._keep_start, self._block_size, self._truncation, *sizes)

    def _show(self, prepared: PreparedStep | None) -> None:
        """Make the runner's consumer SWA builders see the step's view, until the next call; without it, the batch."""
        view, fresh = None, True
        if prepared is not None:
            unread = prepared.plan is not None
            view, fresh = None if unread else prepared.view, not (unread or prepared.begins_no_block)
        for group in self._swa_groups:
            for builder in group.metadata_builders:
                assert isinstance(builder, ClippedBuilderMixin)
                builder.view, builder.fresh = view, fresh

    def build(self, prepared: PreparedStep | None) -> ConsumerStep | None:
        """The sub-batch of a prepared step; None when every row is kept."""
        if prepared is None or prepared.plan is None:
            return None
        step, plan, rows = prepared.step, prepared.plan, prepared.rows
        compact = self._truncation.mode == "compact"
        # Connectors that save layer by layer are called from attention layers.
        if compact and prepared.has_placeholders and prepared.wholly_below.all() and not has_kv_transfer_group():
            return ConsumerStep(rows[:0], prepared.positions[:0], empty=None, compact=True, forward_context=None)
        num_reqs, num_rows = len(step.start), len(plan.rows)
        cu_seqlens, seq_lens_cpu = plan.cu_seqlens.astype(np.int32), first(num_reqs, step.seq_lens_cpu)
        common = {
            "query_start_loc": self._buffers.put("cu_seqlens", cu_seqlens, self._max_reqs + 1),
            "query_start_loc_cpu": torch.from_numpy(cu_seqlens),
            "seq_lens": first(num_reqs, step.seq_lens),
            "seq_lens_cpu_upper_bound": seq_lens_cpu,
            "num_reqs": num_reqs,
            "num_actual_tokens": num_rows,
            "max_query_len": int(plan.num_rows.max()),
            "max_seq_len": int(seq_lens_cpu.max()),
            "positions": prepared.positions,
            "is_prefilling": torch.from_numpy(step.is_prefilling[:num_reqs]),
        }
        # Global KV of every row has been written at the boundary.
        nowhere = self._buffers.full("nowhere", PAD_SLOT_ID, num_rows, self._max_rows)
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for group in self._own_groups:
            group_id = group.kv_cache_group_id
            slot_mapping = prepared.kept_slots.get(group_id, nowhere)
            builder = group.get_metadata_builder()
            if isinstance(builder, ClippedBuilderMixin):
                builder.view = prepared.view
            block_table = first(num_reqs, step.block_table(group_id))
            built = group.build_metadata(
                CommonAttentionMetadata(block_table_tensor=block_table, slot_mapping=slot_mapping, **common)
            )
            for name in group.layer_names:
                metadata[name], slots[name] = built, slot_mapping
        placeholders = prepared.placeholders
        return ConsumerStep(
            rows=rows,
            positions=prepared.positions,
            empty=None if placeholders is None else placeholders[:, None],
            compact=compact,
            forward_context=create_forward_context(metadata, self._vllm_config, slot_mapping=slots),
        )

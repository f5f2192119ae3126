"""Model state: each prompt's length, the step's lower bounds, and under ``compact`` the rows to run.

vLLM's state for this model prepares the layers past the cut as a sub-batch with metadata and a forward context of its
own (vllm/models/deepseek_v41/nvidia/model_state.py). What changes here is which rows that sub-batch holds: the last K
of a *prompt*, not the last W of a *chunk*. The gather kernel, the graphs and the agreement across data-parallel ranks
are vLLM's.

    step                  rows of the layers above the boundary      what they see
    eager, PIECEWISE      the kept rows, if any row drops and the     keys at or above the bound,
      above the           step is not tiny                            from metadata of the sub-batch
      trim threshold
    everything else       all rows                                    the same, from the step's metadata

The state class is made by a factory, because vLLM 0.33 has more than one to derive from.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, DPMetadata, create_forward_context
from vllm.models.deepseek_v41.decoder_replay_layers import DecoderReplayLayers, ReplayBatch
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState, ReplayAttnMetadata
from vllm.models.deepseek_v41.nvidia.ops.mhc import MHC_OVERLAP_MAX_TOKENS
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup

from vllm_yoco.deepseek_v41 import rows
from vllm_yoco.deepseek_v41.model_hooks import TruncatedParts
from vllm_yoco.deepseek_v41.swa import ConsumerBound, blank_rows
from vllm_yoco.requests import asks_for_prompt_logprobs


class TruncatingStateMixin:
    """In front of ``DeepseekV41ModelState`` or a class derived from it. ``model.yoco`` says what to truncate."""

    decoder_replay_layers: DecoderReplayLayers | None

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        parts: TruncatedParts = model.yoco
        self._keep_tokens = parts.truncation.keep_tokens
        self._clipped_prefixes = parts.clipped_prefixes
        self._bound: ConsumerBound = parts.bound
        size = self._bound.values.shape[0]
        self._bound_staging = UvaBufferPool(size, torch.int32)
        # Per request state index, as vLLM keeps replay_start.
        self._num_prompt_tokens = np.zeros(size, dtype=np.int64)
        self._keeps_every_row = np.zeros(size, dtype=np.bool_)
        # KV cache groups with a clipped layer, once the groups are known.
        self._clipped_groups: torch.Tensor | None = None

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        # prefill_len grows when a preempted request resumes; the prompt does not.
        self._num_prompt_tokens[req_index] = new_req_data.prompt_len
        # The front end has taken these wishes out of the requests that are to be truncated (requests.py). Whoever still
        # has them gets real values, under every policy: the rows that are scored must all have been computed.
        self._keeps_every_row[req_index] = asks_for_prompt_logprobs(new_req_data.sampling_params)

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        self._set_bound(input_batch)
        metadata: dict[str, Any] = super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)  # type: ignore[misc]
        return metadata

    def _set_bound(self, input_batch: InputBatch) -> None:
        bounds = self._bounds(input_batch)
        # The whole buffer: an earlier step's bounds must not reach requests that pad a graph.
        padded = np.zeros(self._bound.values.shape[0], dtype=np.int32)
        padded[: len(bounds)] = bounds
        self._bound_staging.copy_to_gpu(padded, out=self._bound.values)

    def _bounds(self, input_batch: InputBatch) -> np.ndarray:
        """[R] lower bounds. Dummy batches (captures, an idle rank's) prefill nothing and have none."""
        num_reqs = input_batch.num_reqs
        requests = input_batch.idx_mapping_np[:num_reqs]
        return rows.lower_bounds(
            self._num_prompt_tokens[requests],
            input_batch.is_prefilling_np[:num_reqs],
            self._keeps_every_row[requests],
            self._keep_tokens,
        )

    def _prepare_replay_batch(
        self: Any,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        replay_start: torch.Tensor,
        capture_desc: BatchExecutionDescriptor | None = None,
    ) -> None:
        """In place of vLLM's: set the kept rows as the layers' sub-batch for this forward, or none.

        When a sub-batch is used at all (captures, graph sizes, data-parallel agreement) is vLLM's choice; the rows in
        it, their metadata and their slots are the rule of this package.
        """
        layers = self.decoder_replay_layers
        layers.replay_batch = None
        forced = capture_desc is not None or (
            cudagraph_mode == CUDAGraphMode.PIECEWISE
            and layers.graph_uses_replay_batch(input_batch.num_tokens_after_padding)
        )
        if cudagraph_mode != CUDAGraphMode.NONE and not forced:
            return
        if capture_desc is not None:
            self._set_bound(input_batch)  # captures come here without prepare_attn

        num_reqs = input_batch.num_reqs
        query_lens = np.diff(input_batch.query_start_loc_np[: num_reqs + 1])
        start = input_batch.num_computed_tokens_np[:num_reqs]
        bounds = self._bounds(input_batch)
        kept_lens = rows.kept_lens(query_lens, start, bounds)
        placeholders = rows.placeholders(query_lens, start, bounds)
        if capture_desc is None and _is_dummy(input_batch, query_lens):
            # An idle data-parallel rank's batch: nothing reads it, one row takes part in the collectives.
            kept_lens = np.zeros_like(kept_lens)
            kept_lens[0] = 1
            needed = False
        else:
            # A chunk of one row may be a placeholder without any row dropping: then only its slot differs.
            needed = (bool((kept_lens < query_lens).any()) or len(placeholders) > 0) and rows.boundary_may_trim(
                input_batch.num_tokens_after_padding, layers.window, MHC_OVERLAP_MAX_TOKENS
            )
        needed |= forced
        num_kept = int(kept_lens.sum())
        dp_tokens = None
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            needed, dp_tokens = self._agree_across_dp(needed, num_kept)
        if not needed:
            return

        num_padded, mode, run_graph = num_kept, CUDAGraphMode.NONE, None
        graphs = self.replay_cudagraphs
        if graphs is not None:
            # Every rank runs the graph that fits the largest rank's batch.
            largest = num_kept if dp_tokens is None else int(dp_tokens.max())
            desc = capture_desc or graphs.dispatch(num_reqs, largest, None, 0)
            if desc.cg_mode == CUDAGraphMode.PIECEWISE:
                num_padded, mode, run_graph = desc.num_tokens, desc.cg_mode, graphs.run
                if dp_tokens is not None:
                    dp_tokens.fill_(num_padded)
        dp_metadata = None
        if dp_tokens is not None:
            dp_metadata = DPMetadata.make(self.vllm_config.parallel_config, num_padded, dp_tokens)

        kept_batch, kept_slots = self._kept_input_batch(input_batch, slot_mappings, replay_start, kept_lens, num_padded)
        self._blank_placeholders(kept_batch, kept_slots, placeholders, kv_cache_config)
        if self._replay_attn_groups is None:
            # vLLM drops this when captures are profiled with groups of their own.
            self._replay_attn_groups = (self._copy_attn_groups(attn_groups, layers.metadata_prefixes), [])
        # One build for all layers: the bounded builder clips those that are clipped, an open boundary layer has vLLM's.
        # Not super(): that would prepare the sub-batch's sub-batch.
        attn_metadata = DefaultModelState.prepare_attn(
            self,
            kept_batch,
            CUDAGraphMode.NONE,
            block_tables,
            kept_slots,
            self._replay_attn_groups[0],
            kv_cache_config,
            model_specific_attn_metadata=ReplayAttnMetadata(replay_start),
        )
        layers.replay_batch = ReplayBatch(
            self._kept_rows[:num_kept],
            create_forward_context(
                attn_metadata,
                self.vllm_config,
                dp_metadata=dp_metadata,
                cudagraph_runtime_mode=mode,
                batch_descriptor=BatchDescriptor(num_tokens=num_padded),
                slot_mapping=build_slot_mappings_by_layer(kept_slots, kv_cache_config),
            ),
            run_graph,
        )

    def _blank_placeholders(
        self, kept_batch: InputBatch, slot_mappings: torch.Tensor, requests: np.ndarray, config: KVCacheConfig
    ) -> None:
        """A chunk that lies wholly below the bound keeps its last row, which may not write window KV."""
        if not len(requests):
            return
        if self._clipped_groups is None:
            groups = [
                index
                for index, group in enumerate(config.kv_cache_groups)
                if not self._clipped_prefixes.isdisjoint(group.layer_names)
            ]
            self._clipped_groups = torch.tensor(groups, dtype=torch.int64, device=slot_mappings.device)
        ends = torch.from_numpy(requests + 1).to(slot_mappings.device, non_blocking=True)
        # Offsets on the device: verification may have resized the decodes there alone.
        blank_rows(slot_mappings, self._clipped_groups, kept_batch.query_start_loc[ends] - 1)


def _is_dummy(input_batch: InputBatch, query_lens: np.ndarray) -> bool:
    """vLLM's test for a batch that no request stands behind: rows without context that prefill nothing."""
    num_reqs = input_batch.num_reqs
    seq_lens = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
    return not input_batch.is_prefilling_np[:num_reqs].any() and bool((seq_lens == query_lens).all())


@functools.cache
def truncating_state(base: type[DeepseekV41ModelState]) -> type[DeepseekV41ModelState]:
    """``base`` with the rule of this package."""
    return type(f"Yoco{base.__name__}", (TruncatingStateMixin, base), {})

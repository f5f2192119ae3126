"""Model Runner V2: the model's state builds the consumer sub-batch in ``prepare_attn``."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_yoco.batch import SubBatchBuilder, hand_over
from vllm_yoco.requests import keeps_every_row
from vllm_yoco.step import StepInputs


class YocoModelState(DefaultModelState):
    """Per-request prompt lengths (fixed for a request's life) and the step's sub-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_prompt_tokens = np.zeros(self.max_num_reqs, dtype=np.int64)
        self._keep_all = np.zeros(self.max_num_reqs, dtype=bool)
        truncation = self.model.truncation
        self._policy = truncation.prompt_logprobs
        self._builder = SubBatchBuilder(self.vllm_config, truncation, *self.model.consumer_layer_names(), self.device)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        # prefill_len grows when a preempted request resumes; the prompt does not.
        self._num_prompt_tokens[req_index] = new_req_data.prompt_len
        self._keep_all[req_index] = keeps_every_row(new_req_data.sampling_params, self._policy)

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        step = input_batch, cudagraph_mode, block_tables, slot_mappings
        full_batch = partial(super().prepare_attn, *step, attn_groups, *args, **kwargs)
        attn_metadata, consumer_step = self._builder.around(attn_groups, self._step_inputs(*step), full_batch)
        hand_over(consumer_step, attn_metadata, self.model)
        return attn_metadata

    def _step_inputs(
        self,
        batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
    ) -> StepInputs:
        in_graph = cudagraph_mode == CUDAGraphMode.FULL
        requests = batch.idx_mapping_np[: batch.num_reqs]
        return StepInputs(
            num_prompt_tokens=self._num_prompt_tokens[requests],
            start=batch.num_computed_tokens_np[: batch.num_reqs].astype(np.int64),
            query_start_loc=batch.query_start_loc_np[: batch.num_reqs + 1],
            keep_all=self._keep_all[requests],
            num_shown=batch.num_reqs_after_padding if in_graph else batch.num_reqs,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu_upper_bound,
            positions=batch.positions,
            block_table=block_tables.__getitem__,
            slot_mappings=slot_mappings,
            is_prefilling=batch.is_prefilling_np,
            in_graph=in_graph,
        )

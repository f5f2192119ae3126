"""Model Runner V1: build the consumer sub-batch with each step's attention metadata.

Target: ``vllm.v1.worker.gpu_model_runner.GPUModelRunner._build_attention_metadata`` (the CPU runner inherits it).
Reason: V1 has no model state; this method is the one place that knows the step's requests, block tables and slot
    mappings before the forward. It runs unchanged for any model without an active truncation and for dummy runs.
Tested with: vLLM 0.32.0.
Retired by: vLLM removing Model Runner V1 (V2 asks the model for its state: ``vllm_yoco/models/state.py``).
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._build_attention_metadata
    if getattr(original, "_yoco", False):
        return

    @functools.wraps(original)
    def _build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        truncation = getattr(getattr(self, "model", None), "truncation", None)
        # Dummy and capture runs name no scheduled tokens: they show the batch as it is.
        if truncation is None or not truncation.active or kwargs.get("num_scheduled_tokens") is None:
            return original(self, *args, **kwargs)
        from vllm_yoco.batch import STEP_KEY, SubBatchBuilder

        builder = getattr(self, "_yoco_sub_batch", None)
        if builder is None:
            builder = self._yoco_sub_batch = SubBatchBuilder(
                self.vllm_config, truncation, *self.model.consumer_layer_names(), self.device
            )
        builder.bind(self.attn_groups)
        prepared = builder.prepare(_step_inputs(self, truncation, kwargs))
        with builder.viewing(prepared):
            attn_metadata, draft_metadata = original(self, *args, **kwargs)
        step = builder.build(prepared)
        if step is not None:
            attn_metadata[STEP_KEY] = step
        return attn_metadata, draft_metadata

    _build_attention_metadata._yoco = True  # type: ignore[attr-defined]
    GPUModelRunner._build_attention_metadata = _build_attention_metadata


def _step_inputs(runner: Any, truncation: Any, call: dict[str, Any]) -> Any:
    """The step as V1 holds it; ``call`` are the wrapped method's keyword arguments."""
    import numpy as np

    from vllm_yoco.requests import keeps_every_row
    from vllm_yoco.step import StepInputs

    num_reqs = call["num_reqs"]
    # Padded counts are passed for FULL CUDA graphs only.
    in_graph = call.get("num_reqs_padded") is not None
    num_shown = call["num_reqs_padded"] if in_graph else num_reqs
    batch = runner.input_batch
    num_prompt_tokens = batch.num_prompt_tokens[:num_reqs].astype(np.int64)
    start = batch.num_computed_tokens_cpu[:num_reqs].astype(np.int64)
    keep_all = np.zeros(num_reqs, dtype=bool)
    if truncation.prompt_logprobs == "full":
        requests = (runner.requests[req_id] for req_id in batch.req_ids[:num_reqs])
        keep_all[:] = [keeps_every_row(request.sampling_params, "full") for request in requests]
    return StepInputs(
        num_prompt_tokens=num_prompt_tokens,
        start=start,
        query_start_loc=runner.query_start_loc.np[: num_reqs + 1],
        keep_all=keep_all,
        num_shown=num_shown,
        seq_lens=runner.seq_lens,
        seq_lens_cpu=runner.optimistic_seq_lens_cpu,
        positions=runner.positions,
        block_table=lambda group: batch.block_table[group].get_device_tensor(num_shown),
        slot_mappings=call["slot_mappings"],
        is_prefilling=start < num_prompt_tokens,
        in_graph=in_graph,
    )

"""Model Runner V1: the step as the runner holds it, and its attention metadata with the consumer sub-batch.

Called by ``patches/gpu_model_runner.py``; what ``state`` is for Model Runner V2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from vllm_yoco.batch import SubBatchBuilder, hand_over
from vllm_yoco.config import Truncation
from vllm_yoco.requests import keeps_every_row
from vllm_yoco.step import StepInputs


def build_attention_metadata(
    original: Callable[..., Any], runner: Any, truncation: Truncation, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """What ``original``, the runner's own method, builds, with the step's sub-batch if rows drop."""
    builder = getattr(runner, "_yoco_sub_batch", None)
    if builder is None:
        builder = runner._yoco_sub_batch = SubBatchBuilder(
            runner.vllm_config, truncation, *runner.model.consumer_layer_names(), runner.device
        )
    inputs = step_inputs(runner, truncation, kwargs)
    built, step = builder.around(runner.attn_groups, inputs, partial(original, runner, *args, **kwargs))
    attn_metadata, _ = built
    hand_over(step, attn_metadata, runner.get_model())
    return built


def step_inputs(runner: Any, truncation: Truncation, call: Mapping[str, Any]) -> StepInputs:
    """The step as V1 holds it; ``call`` are the keyword arguments of ``_build_attention_metadata``."""
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

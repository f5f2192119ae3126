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
        return _plugin()(original, self, truncation, args, kwargs)

    _build_attention_metadata._yoco = True  # type: ignore[attr-defined]
    GPUModelRunner._build_attention_metadata = _build_attention_metadata


@functools.cache
def _plugin() -> Any:
    """Imported with the first step, not with vLLM's runner, which it imports; and not by every step."""
    from vllm_yoco.models.runner_v1 import build_attention_metadata

    return build_attention_metadata

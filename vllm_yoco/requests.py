"""Which requests keep every row."""

from __future__ import annotations

from typing import Any

from vllm_yoco.config import PromptLogprobsPolicy


def keeps_every_row(sampling_params: Any, policy: PromptLogprobsPolicy) -> bool:
    """Whether a request is served untruncated: it asks for prompt log-probabilities under policy ``full``."""
    return policy == "full" and getattr(sampling_params, "prompt_logprobs", None) is not None

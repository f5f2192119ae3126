"""Teacher forcing on Model Runner V1: a logits processor that leaves one token to choose from.

Named as ``vllm_yoco.tools.engine_forced:ForcedTokens`` in vLLM's ``logits_processors``. V2 has no use for it: its trace
replay does the same, and its processors have another interface.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

EXTRA_ARGUMENT = "vllm_yoco_forced_tokens"
"""Key in ``SamplingParams.extra_args``: the tokens to generate, in order."""


class ForcedTokens(AdapterLogitsProcessor):
    """vLLM reports log-probabilities of the logits before this (``logprobs_mode="raw_logprobs"``, its default)."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        forced = (params.extra_args or {}).get(EXTRA_ARGUMENT)
        if forced is None:
            return None

        def force(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            # A chunk of a prompt samples too, and its sample is thrown away.
            token = forced[min(len(output_token_ids), len(forced) - 1)]
            return torch.full_like(logits, float("-inf")).index_fill_(0, torch.tensor([token], device=logits.device), 0)

        return force

"""What a request may not be, and what becomes of prompt log-probabilities, which dropped rows do not have.

A prompt that arrives in parts (vLLM's streaming input) is refused: L, and with it s_keep and the place of the
consumers' window cells, would move while the request runs.

With prompt log-probabilities, a prompt of at most K tokens drops nothing and is served as usual. For a longer one
the policy decides:

    drop    served without them; one warning per process names the flag
    reject  refused at admission (ValueError, HTTP 400)
    full    the request keeps every row, its batch mates stay truncated
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_yoco.config import PromptLogprobsPolicy, Truncation

FLAG = "--yoco-prompt-logprobs"


def asks_for_prompt_logprobs(sampling_params: Any) -> bool:
    """Whether every prompt row's log-probabilities are wanted (also 0: the prompt's own tokens)."""
    wanted = ("prompt_logprobs", "prompt_logprob_token_ids")
    return any(getattr(sampling_params, name, None) is not None for name in wanted)


def keeps_every_row(sampling_params: Any, policy: PromptLogprobsPolicy) -> bool:
    """Whether a request is served untruncated."""
    return policy == "full" and asks_for_prompt_logprobs(sampling_params)


def check_whole_prompt(resumable: bool, truncation: Truncation) -> None:
    """ValueError for one part of a prompt that arrives in several; ``resumable`` is vLLM's name for such requests."""
    if resumable:
        raise ValueError(
            "streaming input: a prompt that arrives in parts cannot be served with --yoco-truncation"
            f" {truncation.mode}, which keeps the last {truncation.keep_tokens} rows of the whole prompt. Send the"
            " prompt in one piece, or start the engine with --yoco-truncation off."
        )


def apply_policy(
    sampling_params: Any, num_prompt_tokens: int, truncation: Truncation, *, on_drop: Callable[[str], None]
) -> None:
    """Bring one admitted request in line with the policy; changes its own ``sampling_params``.

    Args:
        on_drop: called with the reason when log-probabilities are taken out of the request.

    Raises:
        ValueError: under ``reject``.
    """
    if num_prompt_tokens <= truncation.keep_tokens or not asks_for_prompt_logprobs(sampling_params):
        return
    reason = (
        f"prompt log-probabilities are asked for, but --yoco-truncation {truncation.mode} keeps only the last"
        f" {truncation.keep_tokens} of a prompt's rows"
    )
    if truncation.prompt_logprobs == "reject":
        raise ValueError(
            f"{reason}, and {FLAG} is reject: leave prompt_logprobs (or echo with logprobs) out of the request,"
            f" keep the prompt within {truncation.keep_tokens} tokens, or start the server with {FLAG} full."
        )
    if truncation.prompt_logprobs == "full":
        # A hit would leave rows without consumer SWA in front of rows that look back on them.
        sampling_params.skip_reading_prefix_cache = True
        return
    sampling_params.prompt_logprobs = None
    sampling_params.prompt_logprob_token_ids = None
    on_drop(
        f"{reason}: such requests are served without them ({FLAG} drop). Use {FLAG} full to compute every row of"
        f" these requests, or {FLAG} reject to refuse them."
    )

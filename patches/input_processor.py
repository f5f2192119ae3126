"""Refuse prompts that arrive in parts and apply the prompt_logprobs policy when a request is admitted.

Target: ``vllm.v1.engine.input_processor.InputProcessor.process_inputs`` (on its result, a request of its own).
Reason: this is the one place that every front end passes (``LLM``, the OpenAI server, ``AsyncLLM``) with the prompt's
    length known and the sampling parameters already cloned; a platform hook for it belongs to the platform.
Tested with: vLLM 0.32.0.
Retired by: a per-model request validator, or vLLM treating ``prompt_logprobs`` as unavailable for rows that a model
    declares as not computed.
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    from vllm.logger import init_logger
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_yoco.requests import apply_policy, check_whole_prompt

    original = InputProcessor.process_inputs
    if getattr(original, "_yoco", False):
        return
    logger = init_logger(f"vllm.{__name__}")

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        truncation = _truncation(self)
        if truncation is not None and request.sampling_params is not None:
            from vllm.exceptions import VLLMValidationError

            def on_drop(reason: str) -> None:
                logger.warning_once("%s", reason)
                self._yoco_counters.add(prompt_logprobs_dropped=1)

            try:
                check_whole_prompt(request.resumable, truncation)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="prompt") from None
            try:
                apply_policy(
                    request.sampling_params, len(request.prompt_token_ids or ()), truncation, on_drop=on_drop
                )
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="prompt_logprobs") from None
        return request

    process_inputs._yoco = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def _truncation(processor: Any) -> Any:
    """The active truncation of this processor's engine, or None; looked up once."""
    if not hasattr(processor, "_yoco_truncation"):
        from vllm_yoco.counters import CounterFile
        from vllm_yoco.engine_config import truncation_of

        truncation = truncation_of(processor.vllm_config)
        processor._yoco_truncation = truncation if truncation is not None and truncation.active else None
        if processor._yoco_truncation is not None:
            processor._yoco_counters = CounterFile(processor.vllm_config.instance_id)
    return processor._yoco_truncation

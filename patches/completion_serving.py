"""Answer ``echo`` with ``logprobs`` when a prompt's log-probabilities are unavailable.

Target: ``vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion.request_output_to_completion_response``
    and ``.completion_stream_generator`` (on their input).
Reason: with ``echo`` vLLM lines up one entry per prompt token with one per output token. Without prompt entries it
    fails an assertion (HTTP 500), or, when streaming, pairs prompt tokens with the output's values. It already knows
    an entry without a value: that of the first prompt token. Every prompt token gets one.
Tested with: vLLM 0.32.0.
Retired by: vLLM filling unavailable prompt positions itself.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any


def install() -> None:
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as Serving

    respond, stream = Serving.request_output_to_completion_response, Serving.completion_stream_generator
    if getattr(respond, "_yoco", False):
        return

    @functools.wraps(respond)
    def request_output_to_completion_response(
        self: Any, final_res_batch: list[Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for output in final_res_batch:
            _fill(output, request)
        return respond(self, final_res_batch, request, *args, **kwargs)

    @functools.wraps(stream)
    def completion_stream_generator(
        self: Any, request: Any, engine_inputs: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        async def filled() -> AsyncIterator[Any]:
            async for index, output in result_generator:
                _fill(output, request)
                yield index, output

        return stream(self, request, engine_inputs, filled(), *args, **kwargs)

    request_output_to_completion_response._yoco = True  # type: ignore[attr-defined]
    Serving.request_output_to_completion_response = request_output_to_completion_response
    Serving.completion_stream_generator = completion_stream_generator


def _fill(output: Any, request: Any) -> None:
    """Give an echoed prompt one empty entry per token where it has none."""
    if request.echo and request.logprobs is not None and output.prompt_logprobs is None and output.prompt_token_ids:
        output.prompt_logprobs = [None] * len(output.prompt_token_ids)

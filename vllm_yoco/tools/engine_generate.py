"""Jobs for ``EngineHost``: continue prompts freely or along given tokens, with log-probabilities of every token.

Teacher forcing. Scoring a continuation as prompt log-probabilities would make it part of the prompt, and L with it. So
the request keeps its prompt, and what it samples is replaced: by vLLM's trace replay on runner V2
(``SamplingParams.trace_decode_token_ids``), by a logits processor on V1 (``engine_forced``). In both cases the
log-probabilities are those of the unmodified logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_yoco.tools.engine_process import Engines, EngineSpec


@dataclass(frozen=True)
class Answer:
    """One continuation; ``logprobs`` is [generated tokens, vocabulary] float32."""

    tokens: list[int]
    logprobs: np.ndarray


def generate(
    engines: Engines,
    spec: EngineSpec,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    forced: Sequence[Sequence[int]] | None = None,
    chunk_tokens: int | None = None,
) -> list[Answer]:
    """Continue all prompts together, by the likeliest tokens.

    Args:
        forced: tokens to continue with instead, per prompt.
        chunk_tokens: tokens that a step may take, at most ``spec.chunk_tokens``.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    llm = engines.get(spec)
    # A step takes no more, whatever buffers the engine has: another chunking without another engine.
    engines.scheduler(spec).max_num_scheduled_tokens = chunk_tokens or spec.chunk_tokens
    parameters = []
    for index in range(len(prompts)):
        options: dict[str, Any] = {}
        if forced is not None and engines.runner == "v2":
            options["trace_decode_token_ids"] = list(forced[index])
        elif forced is not None:
            from vllm_yoco.tools.engine_forced import EXTRA_ARGUMENT

            options["extra_args"] = {EXTRA_ARGUMENT: list(forced[index])}
        parameters.append(
            SamplingParams(
                temperature=0,
                max_tokens=max_tokens if forced is None else len(forced[index]),
                logprobs=-1,
                flat_logprobs=True,
                detokenize=False,
                ignore_eos=True,
                **options,
            )
        )
    requests = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    outputs = llm.generate(requests, parameters, use_tqdm=False)
    vocabulary = llm.model_config.get_vocab_size()
    answers = []
    for index, output in enumerate(outputs):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        if forced is not None and tokens != list(forced[index]):
            raise RuntimeError(f"teacher forcing failed: {tokens} for {list(forced[index])}")
        answers.append(Answer(tokens, _table(completion.logprobs, vocabulary)))
    return answers


def _table(flat: Any, vocabulary: int) -> np.ndarray:
    """[positions, vocabulary] float32 of vLLM's flat log-probabilities, NaN where there is none."""
    table = np.full((len(flat.start_indices), vocabulary), np.nan, np.float32)
    for row, start, end in zip(table, flat.start_indices, flat.end_indices, strict=True):
        row[flat.token_ids[start:end]] = flat.logprobs[start:end]
    return table


def engine_facts(engines: Engines, spec: EngineSpec) -> dict[str, Any]:
    """Runner, device, dtype, attention backends and block sizes (in tokens) as the engine has them."""
    facts: dict[str, Any] = engines.get(spec).collective_rpc(_facts)[0]
    return facts


def _facts(worker: Any) -> dict[str, Any]:
    runner = worker.model_runner
    classes = type(runner).__mro__
    config = runner.vllm_config
    groups = [group for groups in runner.attn_groups for group in groups]
    windows = {g.kv_cache_spec.block_size for g in groups if any(n.endswith(".swa_attn") for n in g.layer_names)}
    return {
        "runner": "v2" if any(c.__module__ == "vllm.v1.worker.gpu.model_runner" for c in classes) else "v1",
        "backends": sorted({group.backend.get_name() for group in groups}),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "block_size": config.cache_config.block_size,
        "window_block_size": max(windows, default=1),
        "device": str(runner.device.type),
    }

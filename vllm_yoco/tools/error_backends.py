"""Where ``vllm-yoco error`` gets its numbers: the dense float32 model, or real engines.

L stays the prompt's length throughout: a continuation that is scored as part of the prompt would move s_keep. The
reference takes L apart from the tokens; engines are forced along the continuation (``engine_generate``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_yoco.tools.engine_generate import generate
from vllm_yoco.tools.engine_process import EngineHost, EngineSpec
from vllm_yoco.tools.error_metrics import LayerRows, Tokens

if TYPE_CHECKING:
    from vllm_yoco.models.deepseek_v41_reference import DenseV41
    from vllm_yoco.models.deepseek_v41_reference import Trace as V41Trace
    from vllm_yoco.models.reference import DenseYoco, Trace


@dataclass(frozen=True)
class Scored:
    """``logprobs`` [J, vocabulary] of one continuation; ``layers`` if the backend can see them."""

    logprobs: np.ndarray
    layers: LayerRows | None = None


class Backend(Protocol):
    """``keep`` is K in rows, None for off. Results are in the order of the prompts."""

    def describe(self) -> dict[str, str]:
        """What computes, with the keys backend and dtype."""

    def score(self, keep: int | None, prompts: Sequence[Tokens], continuations: Sequence[Tokens]) -> list[Scored]:
        """Log-probabilities along given continuations."""

    def continue_freely(self, keep: int | None, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        """Greedy continuations."""


class ReferenceBackend:
    """The dense float32 model, which shows its layers.

    Args:
        max_keep: largest K of the study; so many rows of every layer are kept for comparison.
    """

    def __init__(self, model: DenseYoco | DenseV41, max_keep: int) -> None:
        self._model = model
        self._max_keep = max_keep

    def describe(self) -> dict[str, str]:
        return {"backend": "reference", "dtype": "float32", "device": self._model.inv_freq.device.type}

    def score(self, keep: int | None, prompts: Sequence[Tokens], continuations: Sequence[Tokens]) -> list[Scored]:
        return [self._score(keep, *pair) for pair in zip(prompts, continuations, strict=True)]

    def _score(self, keep: int | None, prompt: Tokens, continuation: Tokens) -> Scored:
        import torch

        from vllm_yoco.models.deepseek_v41_reference import DenseV41
        from vllm_yoco.models.deepseek_v41_reference import Trace as V41Trace
        from vllm_yoco.models.reference import Trace

        length = len(prompt)
        trace = V41Trace() if isinstance(self._model, DenseV41) else Trace()
        tokens = torch.tensor([*prompt, *continuation], device=self._model.inv_freq.device)
        with torch.inference_mode():
            rows = self._model.logprobs(tokens, num_prompt_tokens=length, keep_tokens=keep, trace=trace)
        return Scored(rows[length - 1 : -1].cpu().numpy(), self._layers(trace, length))

    def _layers(self, trace: Trace | V41Trace, length: int) -> LayerRows:
        rows = slice(max(0, length - self._max_keep), length)
        return LayerRows(
            rows.start,
            {
                layer: np.concatenate([x[0, rows].flatten(1).cpu().numpy() for x in kv], axis=1)
                for layer, kv in trace.swa_kv.items()
            },
            {
                layer: x[0, rows].cpu().numpy()
                for layer, x in trace.hidden.items()
                if self._model.topology.is_consumer(layer)
            },
        )

    def continue_freely(self, keep: int | None, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        return [self._model.greedy(prompt, max_tokens, keep)[0] for prompt in prompts]


class EngineBackend:
    """Real engines in their own dtype and kernels, one per K; ``spec`` is that of ``off``."""

    def __init__(self, host: EngineHost, spec: EngineSpec, dtype: str) -> None:
        self._host, self._spec, self._dtype = host, spec, dtype

    def describe(self) -> dict[str, str]:
        return {"backend": "engine", "dtype": self._dtype, "runner": self._host.runner}

    def score(self, keep: int | None, prompts: Sequence[Tokens], continuations: Sequence[Tokens]) -> list[Scored]:
        answers = self._host.run(self._of(keep), generate, prompts, 0, continuations)
        return [Scored(answer.logprobs) for answer in answers]

    def continue_freely(self, keep: int | None, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        return [answer.tokens for answer in self._host.run(self._of(keep), generate, prompts, max_tokens)]

    def _of(self, keep: int | None) -> EngineSpec:
        return self._spec if keep is None else replace(self._spec, truncation="compact", keep_tokens=keep)

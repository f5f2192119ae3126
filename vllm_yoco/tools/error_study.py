"""How far truncated prefill moves a model: metrics of two runs along the same tokens, and where the runs come from.

Inputs and continuation are held fixed, only K changes. Position j is the j-th token after the prompt; it is predicted
by row L - 1 + j, so position 0 comes out of the prefill alone. L stays the prompt's length throughout: a continuation
that is scored as part of the prompt would move s_keep.

``ReferenceBackend`` computes in the dense float32 model and can look into layers. ``EngineBackend`` asks real engines
(``off`` and ``compact``) in their own dtype and kernels, by teacher forcing (``vllm_yoco.tools.engine_process``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_yoco.plan import keep_start
from vllm_yoco.tools.engine_process import EngineHost, EngineSpec, generate

if TYPE_CHECKING:
    from vllm_yoco.models.reference import DenseYoco, Trace

CHANGED = 1e-4
"""Relative error from which a row counts as changed. float32 rounding stays below 1e-5."""

Tokens = Sequence[int]


@dataclass(frozen=True)
class TokenErrors:
    """One continuation of J tokens under truncation against ``off``; all arrays are [J], in nats where not bool.

    Attributes:
        kl: KL(off || truncated) over the vocabulary.
        largest: largest |delta log-probability| over the vocabulary.
        mean: mean of it, every token of the vocabulary counting the same.
        top1: the likeliest token is the same.
        nll_off, nll: negative log-likelihood of the token that was continued with.
    """

    kl: np.ndarray
    largest: np.ndarray
    mean: np.ndarray
    top1: np.ndarray
    nll_off: np.ndarray
    nll: np.ndarray


def token_errors(off: np.ndarray, truncated: np.ndarray, tokens: Tokens) -> TokenErrors:
    """Metrics of two tables of log-probabilities [J, vocabulary] along ``tokens`` [J]."""
    off, truncated = off.astype(np.float64), truncated.astype(np.float64)
    with np.errstate(invalid="ignore"):
        delta = np.where(off == truncated, 0.0, truncated - off)  # equal infinities are equal
        kl = -np.where(off == -np.inf, 0.0, np.exp(off) * delta).sum(axis=1)
    row = np.arange(len(tokens))
    return TokenErrors(
        kl=np.maximum(kl, 0.0),  # below zero by rounding only
        largest=np.abs(delta).max(axis=1),
        mean=np.abs(delta).mean(axis=1),
        top1=off.argmax(axis=1) == truncated.argmax(axis=1),
        nll_off=-off[row, list(tokens)],
        nll=-truncated[row, list(tokens)],
    )


def divergence(off: Tokens, truncated: Tokens) -> int | None:
    """First step at which two free-running greedy continuations differ; None if they do not."""
    return next((step for step, (a, b) in enumerate(zip(off, truncated, strict=False)) if a != b), None)


def perplexity(nll: np.ndarray) -> float:
    return math.exp(nll.mean())


@dataclass(frozen=True)
class LayerRows:
    """What the consumer layers made of the last prompt rows, from position ``start`` on; R rows.

    Attributes:
        swa_kv: layer -> K (after rotation) and V of its window side by side, [R, elements].
        hidden: layer -> residual stream after it, [R, hidden].
    """

    start: int
    swa_kv: dict[int, np.ndarray]
    hidden: dict[int, np.ndarray]


@dataclass(frozen=True)
class LayerError:
    """Relative errors |truncated - off| / |off| (Euclidean) of one consumer layer; None without a window.

    Attributes:
        swa_kv, hidden: over the retained rows, [s_keep, L).
        swa_kv_window: over the last W rows, which are what decode reads.
        hidden_last: of the last prompt row, which position 0 comes from.
        first_changed: first of the last W rows whose K/V changed; None if none did.
    """

    layer: int
    swa_kv: float | None
    swa_kv_window: float | None
    hidden: float
    hidden_last: float
    first_changed: int | None


def layer_errors(
    off: LayerRows, truncated: LayerRows, *, num_prompt_tokens: int, keep_tokens: int, window: int
) -> list[LayerError]:
    """Errors of every consumer layer after the prompt, layers ascending; ``window`` is W in keys."""
    retained = keep_start(num_prompt_tokens, keep_tokens) - off.start
    last = max(num_prompt_tokens - window - off.start, 0)
    errors = []
    for layer in sorted(off.hidden):
        hidden = off.hidden[layer], truncated.hidden[layer]
        kv = (off.swa_kv[layer], truncated.swa_kv[layer]) if layer in off.swa_kv else None
        changed = np.flatnonzero(_row_errors(*kv)[last:] > CHANGED) if kv else []
        errors.append(
            LayerError(
                layer=layer,
                swa_kv=relative_error(*(rows[retained:] for rows in kv)) if kv else None,
                swa_kv_window=relative_error(*(rows[last:] for rows in kv)) if kv else None,
                hidden=relative_error(*(rows[retained:] for rows in hidden)),
                hidden_last=relative_error(*(rows[-1:] for rows in hidden)),
                first_changed=off.start + last + int(changed[0]) if len(changed) else None,
            )
        )
    return errors


def relative_error(off: np.ndarray, truncated: np.ndarray) -> float:
    """|truncated - off| / |off| over all rows; 0 for equal arrays."""
    difference = float(np.linalg.norm(truncated - off))
    return difference / float(np.linalg.norm(off)) if difference else 0.0


def _row_errors(off: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    difference = np.linalg.norm(truncated - off, axis=1)
    return difference / np.maximum(np.linalg.norm(off, axis=1), np.finfo(np.float32).tiny)


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
    """The dense float32 model.

    Args:
        max_keep: largest K of the study; so many rows of every layer are kept for comparison.
    """

    def __init__(self, model: DenseYoco, max_keep: int) -> None:
        self._model = model
        self._max_keep = max_keep

    def describe(self) -> dict[str, str]:
        return {"backend": "reference", "dtype": "float32", "device": self._model.inv_freq.device.type}

    def score(self, keep: int | None, prompts: Sequence[Tokens], continuations: Sequence[Tokens]) -> list[Scored]:
        return [self._score(keep, *pair) for pair in zip(prompts, continuations, strict=True)]

    def _score(self, keep: int | None, prompt: Tokens, continuation: Tokens) -> Scored:
        import torch

        from vllm_yoco.models.reference import Trace

        trace, length = Trace(), len(prompt)
        tokens = torch.tensor([*prompt, *continuation], device=self._model.inv_freq.device)
        with torch.inference_mode():
            rows = self._model.logprobs(tokens, num_prompt_tokens=length, keep_tokens=keep, trace=trace)
        return Scored(rows[length - 1 : -1].cpu().numpy(), self._layers(trace, length))

    def _layers(self, trace: Trace, length: int) -> LayerRows:
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
    """Real engines, one per K; ``spec`` has everything but mode and K."""

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
        changes = {"truncation": "off"} if keep is None else {"truncation": "compact", "keep_tokens": keep}
        return EngineSpec(**vars(self._spec) | changes)

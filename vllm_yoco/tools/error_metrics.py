"""How far truncated prefill moves a model: metrics of a run against ``off``, along the same tokens.

Position j is the j-th token after the prompt; it is predicted by row L - 1 + j, so position 0 comes out of the
prefill alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_yoco.plan import keep_start

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
    delta = _difference(off, truncated)
    # Sums of float32 probabilities miss 1 by 1e-7 or so, which would drown a small divergence.
    p, q = (table - np.log(np.exp(table).sum(axis=1, keepdims=True)) for table in (off, truncated))
    kl = np.where(p == -np.inf, 0.0, np.exp(p) * -_difference(p, q)).sum(axis=1)
    row = np.arange(len(tokens))
    return TokenErrors(
        kl=np.maximum(kl, 0.0),
        largest=np.abs(delta).max(axis=1),
        mean=np.abs(delta).mean(axis=1),
        top1=off.argmax(axis=1) == truncated.argmax(axis=1),
        nll_off=-off[row, list(tokens)],
        nll=-truncated[row, list(tokens)],
    )


def _difference(off: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """truncated - off, and 0 for equal infinities."""
    with np.errstate(invalid="ignore"):
        return np.where(off == truncated, 0.0, truncated - off)


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
        first_changed: first of the last W rows whose K/V changed, relative to L (-1: the last row); None: none did.
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
        changed = np.flatnonzero(_row_errors(*kv)[last:] > CHANGED) if kv else np.zeros(0, np.int64)
        errors.append(
            LayerError(
                layer=layer,
                swa_kv=relative_error(*(rows[retained:] for rows in kv)) if kv else None,
                swa_kv_window=relative_error(*(rows[last:] for rows in kv)) if kv else None,
                hidden=relative_error(*(rows[retained:] for rows in hidden)),
                hidden_last=relative_error(*(rows[-1:] for rows in hidden)),
                first_changed=off.start + last + int(changed[0]) - num_prompt_tokens if len(changed) else None,
            )
        )
    return errors


def relative_error(off: np.ndarray, truncated: np.ndarray) -> float:
    """|truncated - off| / |off| over all rows; 0 for equal arrays."""
    difference = float(np.linalg.norm(truncated - off))
    return difference / float(np.linalg.norm(off)) if difference else 0.0


def _row_errors(off: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    difference: np.ndarray = np.linalg.norm(truncated - off, axis=1)
    return difference / np.maximum(np.linalg.norm(off, axis=1), np.finfo(np.float32).tiny)

"""Run ``off`` and every K of a sweep; their differences become the JSON document of ``vllm-yoco error``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from vllm_yoco.config import Truncation
from vllm_yoco.tools.check_inputs import Prompt
from vllm_yoco.tools.check_values import LIMITS
from vllm_yoco.tools.error_backends import Backend, Scored
from vllm_yoco.tools.error_metrics import LayerError, divergence, layer_errors, perplexity, token_errors
from vllm_yoco.tools.report import progress

LAYER_ERRORS = ("swa_kv", "swa_kv_window", "hidden", "hidden_last")


def measure(
    backend: Backend, prompts: Sequence[Prompt], truncations: Sequence[Truncation], max_tokens: int
) -> dict[str, Any]:
    """Run ``off`` and every K; returns the JSON document's parts from ``prompt_tokens`` on, and ``ok``."""
    tokens = [prompt.tokens for prompt in prompts]
    given = all(prompt.continuation for prompt in prompts)
    free = backend.continue_freely(None, tokens, max_tokens)
    continuations = [list(p.continuation or ())[:max_tokens] for p in prompts] if given else free
    off = backend.score(None, tokens, continuations)
    made = backend.describe()
    limit = LIMITS.get(made["dtype"], LIMITS["bfloat16"])
    points = []
    for truncation in progress(truncations, "K"):
        keep = truncation.keep_tokens
        scored = backend.score(keep, tokens, continuations)
        freely = backend.continue_freely(keep, tokens, max_tokens)
        steps = [divergence(*pair) for pair in zip(free, freely, strict=True)]
        points.append(_point(truncation, prompts, continuations, off, scored, steps))
    notes = []
    if not given and any(prompt.continuation for prompt in prompts):
        notes.append("some prompts have a continuation and some have none: the greedy ones of off were used for all.")
    if not any(point["cut"] for point in points):
        notes.append("no prompt is longer than a K of the sweep: nothing was dropped and nothing measured.")
    if all(point["unchanged_max"] is None for point in points):
        notes.append("no K of the sweep is lossless for any prompt, so the zero end was not checked.")
    return {
        "ok": all((point["unchanged_max"] or 0.0) <= limit for point in points),
        "prompt_tokens": [len(prompt) for prompt in tokens],
        "continuation": "given" if given else "off",
        "continuation_tokens": [len(continuation) for continuation in continuations],
        "computed_by": made,
        "window": truncations[0].topology.consumer_window,
        "exact": truncations[0].exact_keep_tokens,
        "limit": limit,
        "notes": notes,
        "points": points,
    }


def _point(
    truncation: Truncation,
    prompts: Sequence[Prompt],
    continuations: Sequence[Sequence[int]],
    off: Sequence[Scored],
    scored: Sequence[Scored],
    steps: Sequence[int | None],
) -> dict[str, Any]:
    keep, exact = truncation.keep_tokens, truncation.exact_keep_tokens
    errors = [token_errors(a.logprobs, b.logprobs, c) for a, b, c in zip(off, scored, continuations, strict=True)]
    lengths = [len(prompt.tokens) for prompt in prompts]
    unchanged = [float(e.largest.max()) for e, n in zip(errors, lengths, strict=True) if n <= keep or keep >= exact]
    layers = _layers(truncation, lengths, off, scored)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(error, name) for error in errors])

    def by_position(name: str, statistic: Callable[..., Any]) -> list[float]:
        columns = [getattr(error, name) for error in errors]
        return [float(statistic([c[j] for c in columns if j < len(c)])) for j in range(max(map(len, columns)))]

    return {
        "keep_tokens": keep,
        "rule": "exact" if keep == exact else "min" if keep == truncation.minimum_keep_tokens else None,
        "cut": sum(length > keep for length in lengths),
        "kl_mean": float(joined("kl").mean()),
        "kl_max": float(joined("kl").max()),
        "delta_mean": float(joined("mean").mean()),
        "delta_max": float(joined("largest").max()),
        "top1": float(joined("top1").mean()),
        "perplexity_off": perplexity(joined("nll_off")),
        "perplexity": perplexity(joined("nll")),
        "diverged": sum(step is not None for step in steps),
        "divergence": list(steps),
        "unchanged_max": max(unchanged) if unchanged else None,
        "kl_at": by_position("kl", np.mean),
        "delta_mean_at": by_position("mean", np.mean),
        "delta_max_at": by_position("largest", np.max),
        "top1_at": by_position("top1", np.mean),
        "layers": layers,
        "first_changed": next(
            ({"layer": e["layer"], "row": e["first_changed"]} for e in layers or () if e["first_changed"] is not None),
            None,
        ),
    }


def _layers(
    truncation: Truncation, lengths: Sequence[int], off: Sequence[Scored], scored: Sequence[Scored]
) -> list[dict[str, Any]] | None:
    """Errors by layer, means over the prompts that lose rows; ``first_changed`` is the earliest of them all."""
    keep, window = truncation.keep_tokens, truncation.topology.consumer_window
    prompts: list[list[LayerError]] = [
        layer_errors(a.layers, b.layers, num_prompt_tokens=length, keep_tokens=keep, window=window)
        for length, a, b in zip(lengths, off, scored, strict=True)
        if length > keep and a.layers is not None and b.layers is not None
    ]
    layers = []
    for same in zip(*prompts, strict=True):
        entry: dict[str, Any] = {"layer": same[0].layer}
        for name in LAYER_ERRORS:
            values = [getattr(error, name) for error in same]
            entry[name] = None if None in values else fmean(values)
        entry["first_changed"] = min((e.first_changed for e in same if e.first_changed is not None), default=None)
        layers.append(entry)
    return layers or None

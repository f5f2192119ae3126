"""Plots of ``vllm-yoco error``: error over K, over decode position and over layers. Loads matplotlib when called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_yoco.tools.report import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLOOR = 1e-8
"""Where a logarithmic axis turns linear, so that an error of 0 has a place on it."""

LINES = 5
"""Most K drawn in one panel of lines."""


def draw(results: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Path]:
    """Write the plots that the results have data for; returns title -> file."""
    points = results["points"]
    drawn = {"Error over K": _over_k, "Error over position": _over_position, "Error over layer": _over_layer}
    files = {}
    for (title, plot), path in zip(drawn.items(), (paths["k"], paths["position"], paths["layer"]), strict=True):
        panels = plot(points, results)
        if panels is None:
            continue
        panels.suptitle(f"{results['model']}: {_cases(results)}", fontsize=10)
        panels.savefig(path)
        files[title] = path
    return files


def _cases(results: Mapping[str, Any]) -> str:
    lengths, after = results["prompt_tokens"], results["continuation_tokens"]
    prompts = "1 prompt" if len(lengths) == 1 else f"{len(lengths)} prompts"
    return f"{prompts} of {span(lengths)} tokens, continued by {span(after)}"


def span(values: Sequence[int]) -> str:
    """``7``, or ``7 to 1,024``."""
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _logarithmic(axes: Axes, label: str, values: Sequence[float]) -> None:
    axes.set_yscale("symlog", linthresh=FLOOR, linscale=0.5)
    axes.set_ylim(-FLOOR / 4, max([*values, FLOOR]) * 4)
    axes.set_ylabel(label)
    axes.grid(True, which="major", alpha=0.3)


def _over_k(points: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> Any:
    figure = new_figure(2)
    errors, shares = figure.subplots(1, 2)
    keeps = [point["keep_tokens"] for point in points]
    series = {"KL mean": "kl_mean", "KL max": "kl_max", "|Δ log p| mean": "delta_mean", "|Δ log p| max": "delta_max"}
    for label, name in series.items():
        errors.plot(keeps, [point[name] for point in points], marker="o", markersize=4, label=label)
    _logarithmic(errors, "nats against off", [point[name] for point in points for name in series.values()])
    diverged = [point["diverged"] / len(point["divergence"]) for point in points]
    shares.plot(keeps, [1 - point["top1"] for point in points], marker="o", markersize=4, label="top-1 changed")
    shares.plot(keeps, diverged, marker="s", markersize=4, label="greedy output diverged")
    shares.set_ylim(-0.03, 1.03)
    shares.set_ylabel("share of positions or prompts")
    shares.grid(True, alpha=0.3)
    for axes in (errors, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(keeps, [f"{keep}" for keep in keeps], rotation=45)
        axes.minorticks_off()
        axes.axvline(results["exact"], color="grey", linestyle=":", label=f"exact K {results['exact']}")
        axes.set_xlabel("kept rows K")
        axes.legend(fontsize=8)
    return figure


def _over_position(points: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> Any:
    figure = new_figure(2)
    divergence, largest = figure.subplots(1, 2)
    for axes, name, label in (
        (divergence, "kl_at", "KL(off || truncated), nats, mean over prompts"),
        (largest, "delta_max_at", "largest |Δ log p|, nats"),
    ):
        for point in _some(points):
            axes.plot(point[name], marker=".", markersize=3, linewidth=1, label=f"K {point['keep_tokens']}")
        _logarithmic(axes, label, [value for point in points for value in point[name]])
        if name == "delta_max_at":
            axes.axhline(results["limit"], color="grey", linestyle=":", label="limit of what counts as equal")
        axes.set_xlabel("token after the prompt")
        axes.legend(fontsize=8)
    return figure


def _over_layer(points: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> Any:
    points = [point for point in points if point["layers"]]
    if not points:
        return None
    panels = {
        "swa_kv": "window KV, retained rows",
        "swa_kv_window": f"window KV, last W = {results['window']} rows",
        "hidden_last": "hidden of the last prompt row",
    }
    panels = {name: title for name, title in panels.items() if any(e[name] is not None for e in points[0]["layers"])}
    figure = new_figure(len(panels))
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    values = [e[name] or 0.0 for point in points for e in point["layers"] for name in panels]
    for axes, (name, title) in zip(all_axes, panels.items(), strict=True):
        for point in _some(points):
            shown = [(e["layer"], e[name]) for e in point["layers"] if e[name] is not None]
            label = f"K {point['keep_tokens']}"
            axes.plot(*zip(*shown, strict=True), marker="o", markersize=3, linewidth=1, label=label)
        _logarithmic(axes, "", values)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("consumer layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8)
    all_axes[0].set_ylabel("relative error")
    return figure


def _some(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most ``LINES`` of them, the ends included."""
    count = min(LINES, len(points))
    return [points[round(i * (len(points) - 1) / max(1, count - 1))] for i in range(count)]

"""Tables and files of ``vllm-yoco error``, from its JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from vllm_yoco.tools import error_plots
from vllm_yoco.tools.error_metrics import CHANGED
from vllm_yoco.tools.error_plots import span
from vllm_yoco.tools.error_study import LAYER_ERRORS
from vllm_yoco.tools.report import Number, json_document, percent, table

PLOTS = {"k": "error_over_k.png", "position": "error_over_position.png", "layer": "error_over_layer.png"}


def summary(results: dict[str, Any]) -> str:
    """Tables for people."""
    points, lengths = results["points"], results["prompt_tokens"]
    source = "given" if results["continuation"] == "given" else "greedy of off"
    head = (
        f"{results['model']}: {', '.join(results['computed_by'].values())}; W {results['window']}, exact K"
        f" {results['exact']}\n{len(lengths)} prompts of {span(lengths)} tokens, continued by"
        f" {span(results['continuation_tokens'])} ({source})"
    )
    parts = [head, _k_table(points, len(lengths)), _position_table(points)]
    parts += [_layer_table(point) for point in points if point["layers"]][:1]
    return "\n\n".join([*parts, "\n".join([*(f"note: {note}" for note in results["notes"]), _verdict(results)])])


def _k_table(points: Sequence[dict[str, Any]], num_prompts: int) -> str:
    headers = ("K", "", "cut", "KL mean", "KL max", "|delta| mean", "|delta| max", "top-1", "perplexity", "diverged")
    rows = [
        (
            p["keep_tokens"],
            p["rule"] or "",
            f"{p['cut']}/{num_prompts}",
            *(small(p[name]) for name in ("kl_mean", "kl_max", "delta_mean", "delta_max")),
            percent(p["top1"]),
            p["perplexity"],
            _diverged(p["divergence"]),
            _first_changed(p),
        )
        for p in points
    ]
    legend = (
        f"perplexity of off {points[0]['perplexity_off']:.3f}; cut: prompts longer than K; diverged: prompts, and their"
        " median step;\nfirst changed: lowest layer, and its first row counted from L, where the window KV that decode"
        f" reads changed by more than {CHANGED:g}"
    )
    return f"{table((*headers, 'first changed'), rows)}\n{legend}"


def _diverged(steps: Sequence[int | None]) -> str:
    found = [step for step in steps if step is not None]
    return f"{len(found)}/{len(steps)}" + (f" at {median(found):g}" if found else "")


def _first_changed(point: dict[str, Any]) -> str:
    first = point["first_changed"]
    if first is None:
        return "none" if point["layers"] else "-"
    return f"layer {first['layer']}, L{first['row']}"


def _position_table(points: Sequence[dict[str, Any]]) -> str:
    last = len(points[0]["kl_at"]) - 1
    shown = sorted({0, last} | {1 << bit for bit in range(20) if 1 << bit <= last})
    rows = [(p["keep_tokens"], *(small(p["kl_at"][j]) for j in shown)) for p in points]
    return table(("K", *(f"token {j}" for j in shown)), rows, "KL by position after the prompt, mean over prompts")


def _layer_table(point: dict[str, Any]) -> str:
    headers = ("layer", "window KV", "its last W rows", "hidden", "last hidden", "first changed")
    rows = [
        (
            e["layer"],
            *(None if e[name] is None else small(e[name]) for name in LAYER_ERRORS),
            None if e["first_changed"] is None else Number(f"L{e['first_changed']}"),
        )
        for e in point["layers"]
    ]
    return table(headers, rows, f"K {point['keep_tokens']}: relative errors after the prompt, retained rows by layer")


def _verdict(results: dict[str, Any]) -> str:
    limit = results["limit"]
    unchanged = {p["keep_tokens"]: p["unchanged_max"] for p in results["points"] if p["unchanged_max"] is not None}
    wrong = [str(keep) for keep, delta in unchanged.items() if delta > limit]
    if wrong:
        return (
            f"FAILED: K {', '.join(wrong)} must change nothing (K is lossless, or a prompt has no more tokens), but"
            f" log-probabilities moved by up to {max(unchanged.values()):.1e}, limit {limit:g}"
        )
    if not unchanged:
        return "ok: measured"
    return f"ok: measured; where nothing may change, |delta| is at most {max(unchanged.values()):.1e} (limit {limit:g})"


def small(value: float) -> Number:
    """Two significant digits: ``3.5e-05``, and ``0`` for none at all."""
    return Number("0" if value == 0 else f"{value:.1e}")


def write_report(folder: Path, text: str, results: dict[str, Any]) -> None:
    """report.json, report.md and the plots. Raises OSError for a file that cannot be written."""
    (folder / "report.json").write_text(json_document("error", results) + "\n", encoding="utf-8")
    images = error_plots.draw(results, {name: folder / file for name, file in PLOTS.items()})
    pictures = "\n".join(f"![{title}]({path.name})\n" for title, path in images.items())
    (folder / "report.md").write_text(
        f"# Error of truncated prefill: {results['model']}\n\n```\n{text}\n```\n\n{pictures}", encoding="utf-8"
    )

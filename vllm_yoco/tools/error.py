"""``vllm-yoco error``: what truncated prefill changes in a model's output, over K, position and layer.

Prompts and continuation are the same for ``off`` and every K: the continuation is the greedy one of ``off``, or the
one that the prompt file gives. No labels are needed. Errors are those of truncation against ``off``:

    KL           KL(off || truncated) over the vocabulary, nats
    |delta|      difference of log-probabilities over the vocabulary, nats; largest, and mean over all tokens
    top-1        share of positions with the same likeliest token
    perplexity   of the continuation; on greedy ones of ``off``, small by construction
    divergence   step at which free-running greedy decoding first differs

and, with ``--backend reference``, per consumer layer the relative error of its window KV and of its hidden rows
after the prompt. Where nothing may change (K >= exact, prompts of up to K tokens), it is checked that nothing does.

JSON (``--json``, or report.json in ``--out``):

    command, version, ok, model, prompt_tokens [L], continuation (off | given), continuation_tokens [J per prompt],
    computed_by {backend, dtype, device or runner}, window, exact, limit (nats, for what must not change), notes
    points     [{keep_tokens, rule, cut (prompts longer than K), kl_mean, kl_max, delta_mean, delta_max, top1,
               perplexity_off, perplexity, diverged, divergence [step or null per prompt], unchanged_max (largest
               |delta| where nothing may change, null if nowhere), kl, delta_mean_at, delta_max_at, top1_at
               [by position, over prompts], layers}]
    layers     [{layer, swa_kv, swa_kv_window, hidden, hidden_last (relative, mean over the prompts that are cut),
               first_changed (lowest position of the last W, as distance from L: -1 is the last row; null: none)}]
               in order of layers; null without --backend reference, or where no prompt is cut

Exit code: 0; 1 if something changed that must not, or an engine failed; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_yoco import __version__
from vllm_yoco.config import Truncation
from vllm_yoco.tools.check_inputs import (
    MODEL_HELP,
    PROMPTS_HELP,
    Prompt,
    open_model,
    random_prompts,
    read_prompts,
    resolve_keeps,
)
from vllm_yoco.tools.check_values import LIMITS
from vllm_yoco.tools.engine_process import RUNNERS, EngineError, EngineHost, EngineSpec, engine_facts
from vllm_yoco.tools.error_study import (
    Backend,
    EngineBackend,
    LayerError,
    ReferenceBackend,
    Scored,
    divergence,
    layer_errors,
    perplexity,
    token_errors,
)
from vllm_yoco.tools.report import add_json_argument, emit, percent, progress, table

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig

HELP = "measure what truncation changes in a model's output, over K, position and layer"

REFERENCE_PARAMETERS = 200_000_000
"""Up to here the dense float32 model is the default backend."""

SWEEP_POINTS = 6
RANDOM_PROMPTS = 4
PLOTS = {"k": "error_over_k.png", "position": "error_over_position.png", "layer": "error_over_layer.png"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--prompts", metavar="FILE", help=f"{PROMPTS_HELP} (default: {RANDOM_PROMPTS} of random tokens)")
    parser.add_argument("--keep-tokens", metavar="K,K...", help="numbers, min, exact (default: from min to exact)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=32, help="continuation (default: 32)")
    parser.add_argument("--max-prompt-tokens", metavar="N", type=int, help="use the end of longer prompts")
    parser.add_argument("--backend", choices=("auto", "reference", "engine"), default="auto", help="default: by size")
    parser.add_argument("--runner", choices=RUNNERS, default="auto", help="engine: vLLM's model runner")
    parser.add_argument("--dtype", help="engine: auto or a dtype (default: float32 on a CPU, auto on a GPU)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of random prompts and weights (default: 0)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write report.json, report.md and plots there")
    add_json_argument(parser)
    parser.add_argument("engine_flags", metavar="-- FLAG", nargs="*", help="engine: further flags of vLLM")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the module docstring.

    Raises:
        ValueError: for arguments that do not fit each other or the model, or --out without matplotlib.
        OSError: for a file that cannot be read or written.
    """
    if args.max_tokens < 1 or (args.max_prompt_tokens is not None and args.max_prompt_tokens < 1):
        raise ValueError("--max-tokens and --max-prompt-tokens must be 1 or more.")
    if args.out is not None:
        if find_spec("matplotlib") is None:
            raise ValueError("--out: its plots need matplotlib. Run pip install 'vllm-yoco[plot]'.")
        args.out.mkdir(parents=True, exist_ok=True)
    with open_model(args.model, args.seed) as (directory, config):
        truncations = _sweep(args.keep_tokens, config)
        prompts = _prompts(args, directory, config, truncations)
        try:
            with _backend(args, directory, config, truncations, prompts) as backend:
                results = measure(backend, prompts, truncations, args.max_tokens)
        except EngineError as error:
            print(f"{error.details}\nvllm-yoco error: {error}. Details are above.", file=sys.stderr)
            return 1
    results = {"ok": results.pop("ok"), "model": args.model, **results}
    text = summary(results)
    emit("error", text, results, args.json)
    if args.out is not None:
        write_report(args.out, text, results)
    return 0 if results["ok"] else 1


def _sweep(keeps: str | None, config: YocoModelConfig) -> list[Truncation]:
    """The K to try: those given, or some from min to exact, evenly spaced on a logarithmic scale."""
    topology = config.topology()
    if keeps is None:
        ends = resolve_keeps("min,exact", topology)
        spaced = np.geomspace(ends[0].keep_tokens, ends[-1].keep_tokens, SWEEP_POINTS).round().astype(int)
        keeps = ",".join(["min", "exact", *map(str, spaced)])
    return resolve_keeps(keeps, topology)


def _prompts(
    args: argparse.Namespace, directory: str, config: YocoModelConfig, truncations: Sequence[Truncation]
) -> list[Prompt]:
    room = config.max_position_embeddings - args.max_tokens
    longest = min(args.max_prompt_tokens or room, room)
    if longest < 1:
        raise ValueError(f"--max-tokens {args.max_tokens}: the model has room for {config.max_position_embeddings}.")
    if args.prompts:
        return read_prompts(args.prompts, directory, config.vocab_size, longest)
    keep, window = truncations[-1].keep_tokens, config.topology().consumer_window
    lengths = [min(longest, keep + window * step + 1 + step) for step in range(1, RANDOM_PROMPTS + 1)]
    return random_prompts(sorted(set(lengths)), config.vocab_size, args.seed)


@contextmanager
def _backend(
    args: argparse.Namespace,
    directory: str,
    config: YocoModelConfig,
    truncations: Sequence[Truncation],
    prompts: Sequence[Prompt],
) -> Iterator[Backend]:
    from vllm_yoco.models.checkpoint import parameter_count

    small = parameter_count(config) <= REFERENCE_PARAMETERS
    if args.backend == "reference" or (args.backend == "auto" and small):
        import torch

        from vllm_yoco.models.reference import DenseYoco

        model = DenseYoco.from_pretrained(directory).to("cuda" if torch.cuda.is_available() else "cpu")
        yield ReferenceBackend(model, max_keep=truncations[-1].keep_tokens)
        return
    longest = max(len(prompt.tokens) for prompt in prompts)
    with ExitStack() as stack:
        host = stack.enter_context(EngineHost(args.runner))
        spec = EngineSpec(
            model=directory,
            truncation="off",
            keep_tokens=truncations[0].keep_tokens,
            dtype=args.dtype or ("auto" if host.on_gpu else "float32"),
            max_model_len=longest + args.max_tokens + 1,
            chunk_tokens=max(2048, longest),
            flags=tuple(args.engine_flags),
        )
        yield EngineBackend(host, spec, host.run(spec, engine_facts)["dtype"])


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
        steps = [divergence(*pair) for pair in zip(free, backend.continue_freely(keep, tokens, max_tokens), strict=True)]
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

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(error, name) for error in errors])

    def by_position(name: str, statistic: Any) -> list[float]:
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
        "kl": by_position("kl", np.mean),
        "delta_mean_at": by_position("mean", np.mean),
        "delta_max_at": by_position("largest", np.max),
        "top1_at": by_position("top1", np.mean),
        "layers": _layers(truncation, lengths, off, scored),
    }


def _layers(
    truncation: Truncation, lengths: Sequence[int], off: Sequence[Scored], scored: Sequence[Scored]
) -> list[dict[str, Any]] | None:
    keep, window = truncation.keep_tokens, truncation.topology.consumer_window
    per_prompt: list[tuple[int, list[LayerError]]] = [
        (length, layer_errors(a.layers, b.layers, num_prompt_tokens=length, keep_tokens=keep, window=window))
        for length, a, b in zip(lengths, off, scored, strict=True)
        if length > keep and a.layers is not None and b.layers is not None
    ]
    if not per_prompt:
        return None
    layers = []
    for same in zip(*(errors for _, errors in per_prompt), strict=True):
        changed = [e.first_changed - n for e, (n, _) in zip(same, per_prompt, strict=True) if e.first_changed is not None]
        names = ("swa_kv", "swa_kv_window", "hidden", "hidden_last")
        means = {n: None if getattr(same[0], n) is None else fmean(getattr(e, n) for e in same) for n in names}
        layers.append({"layer": same[0].layer, **means, "first_changed": min(changed, default=None)})
    return layers


def summary(results: dict[str, Any]) -> str:
    """Tables for people."""
    made, points = results["computed_by"], results["points"]
    lengths, counts = results["prompt_tokens"], results["continuation_tokens"]
    source = "given" if results["continuation"] == "given" else "greedy of off"
    head = [
        f"{results['model']}: {', '.join(made.values())}; W {results['window']}, exact K {results['exact']}",
        f"{len(lengths)} prompts of {_span(lengths)} tokens, continued by {_span(counts)} ({source})",
    ]
    rows = [
        (
            p["keep_tokens"],
            p["rule"] or "",
            f"{p['cut']}/{len(lengths)}",
            *(_small(p[name]) for name in ("kl_mean", "kl_max", "delta_mean", "delta_max")),
            percent(p["top1"]),
            p["perplexity"],
            _diverged(p["divergence"]),
        )
        for p in points
    ]
    headers = ("K", "", "cut", "KL mean", "KL max", "|delta| mean", "|delta| max", "top-1", "perplexity", "diverged")
    off = f"perplexity of off {points[0]['perplexity_off']:.3f}; cut: prompts longer than K; diverged: prompts, median step"
    parts = ["\n".join(head), table(headers, rows), off, _position_table(points)]
    parts += [_layer_table(point) for point in points if point["layers"]][:1]
    unchanged = [p["unchanged_max"] for p in points if p["unchanged_max"] is not None]
    verdict = f"nothing changed where nothing may (largest |delta| {max(unchanged, default=0.0):.1e}"
    verdict = f"ok: {verdict}, limit {results['limit']:g})" if unchanged else "ok: measured"
    if not results["ok"]:
        wrong = [p["keep_tokens"] for p in points if (p["unchanged_max"] or 0.0) > results["limit"]]
        verdict = (
            f"FAILED: at K {', '.join(map(str, wrong))} log-probabilities changed although K is lossless or the prompt"
            f" no longer than K: by up to {max(unchanged):.1e}, limit {results['limit']:g}"
        )
    return "\n\n".join([*parts, "\n".join([*(f"note: {note}" for note in results["notes"]), verdict])])


def _span(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _diverged(steps: Sequence[int | None]) -> str:
    found = [step for step in steps if step is not None]
    return f"{len(found)}/{len(steps)}" + (f", {median(found):g}" if found else "")


def _position_table(points: Sequence[dict[str, Any]]) -> str:
    last = len(points[0]["kl"]) - 1
    shown = sorted({0, last} | {1 << bit for bit in range(20) if 1 << bit <= last})
    rows = [(p["keep_tokens"], *(_small(p["kl"][j]) for j in shown)) for p in points]
    return table(("K", *(f"token {j}" for j in shown)), rows, "KL by position after the prompt, mean over prompts")


def _layer_table(point: dict[str, Any]) -> str:
    names = ("swa_kv", "swa_kv_window", "hidden", "hidden_last")
    rows = [
        (e["layer"], *("-" if e[name] is None else _small(e[name]) for name in names), e["first_changed"])
        for e in point["layers"]
    ]
    changed = [(e["layer"], e["first_changed"]) for e in point["layers"] if e["first_changed"] is not None]
    first = f"first changed: layer {changed[0][0]}, position L{changed[0][1]}" if changed else "no window KV changed"
    headers = ("layer", "window KV", "its last W rows", "hidden", "last hidden", "first changed row")
    return table(headers, rows, f"K {point['keep_tokens']}: relative errors after the prompt; {first}")


def write_report(folder: Path, text: str, results: dict[str, Any]) -> None:
    """report.json, report.md and the plots."""
    from vllm_yoco.tools import error_plots

    emit_to = {"command": "error", "version": __version__, **results}
    (folder / "report.json").write_text(json.dumps(emit_to, indent=1) + "\n", encoding="utf-8")
    images = error_plots.draw(results, {name: folder / file for name, file in PLOTS.items()})
    pictures = "\n".join(f"![{title}]({path.name})\n" for title, path in images.items())
    (folder / "report.md").write_text(
        f"# Error of truncated prefill: {results['model']}\n\n```\n{text}\n```\n\n{pictures}", encoding="utf-8"
    )

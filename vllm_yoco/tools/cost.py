"""``vllm-yoco cost``: what truncation saves, in query rows, visible keys and FLOPs.

Without MODEL it prints small cases that can be checked by hand and the equal-cost model of 20 + 20 layers,
and compares the closed form behind them with an enumeration of every row and key. With MODEL it tabulates
that model over prompt lengths L, kept rows K and chunk sizes C; ``--plot`` draws the speed-up by FLOPs, an
estimate: `vllm-yoco bench` measures the parts that it is made of.

JSON (``--json``); rows and pairs are those of one consumer layer, sizes are in tokens:

    command, version
    without MODEL
      situations   {window, keep_tokens, cases [{name, q, k, full_len, swa_valid_start, off, mask, compact}]}
                   with {rows, pairs} per mode: rows [k - q, k) of a prompt of full_len
      chunks       {prompt_tokens, window, keep_tokens, cases [{chunk_tokens, off, mask, compact}]}
                   with {rows, pairs} per mode: one number per chunk
      equal_cost   {producers, consumers, keep_tokens, cases [{prompt_tokens, off, compact, ratio}]}
                   layer rows, and compact / off
      enumeration  {cases, mismatches}
    with MODEL
      model (file), family (yoco | deepseek_v41), flops_unit, plot (file or null)
      points       [{prompt_tokens, keep_tokens, chunk_tokens (null: one chunk), speedup_ceiling, off, mask,
                   compact}] with {num_chunks, producer_rows, consumer_rows, layer_rows, global_pairs,
                   swa_pairs, producer_flops, global_kv_flops, consumer_flops, lm_head_flops, total_flops}
                   per mode, see `vllm_yoco.model_cost.PrefillCost`

Exit code: 0; 1 if closed form and enumeration differ; 2 for a broken config, a K that the model does not
allow, or a plot that cannot be drawn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, get_args

from vllm_yoco.cost import query_rows_and_pairs
from vllm_yoco.model_cost import ModelCost, Prefill, layer_rows
from vllm_yoco.plan import Mode, keep_start
from vllm_yoco.presets import model_presets
from vllm_yoco.tools import arguments, inspect
from vllm_yoco.tools.report import add_json_argument, emit, new_figure, progress, si, table
from vllm_yoco.topology import LayerTopology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELP = "show what truncation saves: rows, visible keys, FLOPs and the speed-up by FLOPs, an estimate"

MODES: tuple[str, ...] = get_args(Mode)


# --- Small cases ---


@dataclass(frozen=True)
class Rows:
    """Rows [k - q, k) of a prompt of ``full_len`` tokens; SWA KV below ``swa_valid_start`` does not exist."""

    q: int
    k: int
    full_len: int
    swa_valid_start: int = 0

    def count(self, mode: str, window: int, keep: int) -> tuple[int, int]:
        """Rows and SWA pairs of one consumer layer, by the closed form."""
        return query_rows_and_pairs(**vars(self), is_prompt=True, window=window, mode=mode, keep_tokens=keep)

    def enumerate(self, mode: str, window: int, keep: int) -> tuple[int, int]:
        """The same, asking about every row and key."""
        first = 0 if mode == "off" else keep_start(self.full_len, keep)
        rows = [
            i for i in range(self.k - self.q, self.k) if mode != "compact" or i >= first or i == self.k - 1
        ]
        lowest = max(first, self.swa_valid_start)
        return len(rows), sum(lowest <= j and i - window < j for i in rows for j in range(i + 1))


SITUATIONS = {
    "short": Rows(2, 2, 2),
    "long": Rows(12, 12, 12),
    "clipped": Rows(4, 4, 12),
    "crossing": Rows(4, 10, 12),
    "valid-start": Rows(2, 12, 12, 10),
}
SITUATION_WINDOW, SITUATION_KEEP = 3, 4

CHUNKED_PROMPT, CHUNK_SIZES = 1024, (256, 1024)
LARGE_WINDOW, LARGE_KEEP = 128, 140

EQUAL_COST = LayerTopology(num_layers=40, boundary=20, kv_source_layers=(20,), swa_layers=(), window=0)
EQUAL_COST_PROMPTS = (64, 1024, 16384)

SMALLEST_PLOTTED_CHUNK, MAX_PLOTTED_LENGTHS = 64, 4

GRID_LENGTH, GRID_WINDOWS, GRID_KEEPS = 8, (1, 3, 5), (1, 4, 9)


def situations() -> dict[str, Any]:
    """The part situations of the JSON document."""

    def counts(rows: Rows) -> dict[str, Any]:
        return {mode: _pair(rows.count(mode, SITUATION_WINDOW, SITUATION_KEEP)) for mode in MODES}

    cases = [{"name": name, **vars(rows), **counts(rows)} for name, rows in SITUATIONS.items()]
    return {"window": SITUATION_WINDOW, "keep_tokens": SITUATION_KEEP, "cases": cases}


def chunked() -> dict[str, Any]:
    """The part chunks of the JSON document."""
    cases = []
    for size in CHUNK_SIZES:
        chunks = list(Prefill(CHUNKED_PROMPT, chunk_tokens=size).chunks())
        case: dict[str, Any] = {"chunk_tokens": size}
        for mode in MODES:
            counts = [
                Rows(end - start, end, CHUNKED_PROMPT).count(mode, LARGE_WINDOW, LARGE_KEEP)
                for start, end in chunks
            ]
            case[mode] = _pair([list(column) for column in zip(*counts, strict=True)])
        cases.append(case)
    return {
        "prompt_tokens": CHUNKED_PROMPT,
        "window": LARGE_WINDOW,
        "keep_tokens": LARGE_KEEP,
        "cases": cases,
    }


def equal_cost() -> dict[str, Any]:
    """The part equal_cost of the JSON document: every row of every layer costs the same."""
    cases = []
    for length in EQUAL_COST_PROMPTS:
        off = layer_rows(EQUAL_COST, Prefill(length))
        compact = layer_rows(EQUAL_COST, Prefill(length, "compact", LARGE_KEEP))
        cases.append({"prompt_tokens": length, "off": off, "compact": compact, "ratio": compact / off})
    return {
        "producers": EQUAL_COST.boundary,
        "consumers": EQUAL_COST.num_consumers,
        "keep_tokens": LARGE_KEEP,
        "cases": cases,
    }


def enumeration() -> dict[str, int]:
    """Closed form against enumeration for every chunk and valid start of prompts up to GRID_LENGTH tokens."""
    cases = mismatches = 0
    for rows in progress(list(_grid()), "enumerating"):
        for case in product(MODES, GRID_WINDOWS, GRID_KEEPS):
            cases += 1
            mismatches += rows.count(*case) != rows.enumerate(*case)
    return {"cases": cases, "mismatches": mismatches}


def _grid() -> Iterator[Rows]:
    for full_len in range(1, GRID_LENGTH + 1):
        for k in range(1, full_len + 1):
            for start in range(k):
                for valid_start in range(start + 1):
                    yield Rows(k - start, k, full_len, valid_start)


def _pair(counts: Sequence[Any]) -> dict[str, Any]:
    rows, pairs = counts
    return {"rows": rows, "pairs": pairs}


def render_small_cases(results: Mapping[str, Any]) -> str:
    """Tables of `situations`, `chunked`, `equal_cost` and `enumeration`."""

    def text(count: Mapping[str, int]) -> str:
        return f"{count['rows']}/{count['pairs']}"

    def sums(count: Mapping[str, Sequence[int]]) -> str:
        return f"{sum(count['rows']):,}/{sum(count['pairs']):,}"

    small, chunks, equal = results["situations"], results["chunks"], results["equal_cost"]
    checked = results["enumeration"]
    tables = [
        table(
            ("chunk", "rows", "of prompt", "SWA from", *MODES),
            [
                (
                    case["name"],
                    f"[{case['k'] - case['q']}, {case['k']})",
                    case["full_len"],
                    case["swa_valid_start"],
                    *(text(case[mode]) for mode in MODES),
                )
                for case in small["cases"]
            ],
            f"Rows/SWA pairs of one consumer layer, W = {small['window']}, K = {small['keep_tokens']}",
        ),
        table(
            ("chunks of", *MODES, "rows in compact"),
            [
                (
                    case["chunk_tokens"],
                    *(sums(case[mode]) for mode in MODES),
                    " + ".join(map(str, case["compact"]["rows"])),
                )
                for case in chunks["cases"]
            ],
            f"Rows/SWA pairs of a prompt of {chunks['prompt_tokens']:,}, W = {chunks['window']},"
            f" K = {chunks['keep_tokens']}",
        ),
        table(
            ("prompt tokens", "off", "compact", "ratio"),
            [
                (case["prompt_tokens"], case["off"], case["compact"], f"{case['ratio']:.4f}")
                for case in equal["cases"]
            ],
            f"Layer rows of {equal['producers']} producers and {equal['consumers']} consumers,"
            f" K = {equal['keep_tokens']}",
        ),
        f"closed form and enumeration: {checked['cases']:,} cases, {checked['mismatches']:,} mismatches",
    ]
    return "\n\n".join(tables)


# --- A model ---


@dataclass(frozen=True)
class Point:
    """One row of the table: a prompt in all three modes."""

    prompt_tokens: int
    keep_tokens: int
    chunk_tokens: int | None
    costs: Mapping[str, Mapping[str, int]]

    @property
    def speedup_ceiling(self) -> float:
        return self.costs["off"]["total_flops"] / self.costs["compact"]["total_flops"]

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "keep_tokens": self.keep_tokens,
            "chunk_tokens": self.chunk_tokens,
            "speedup_ceiling": self.speedup_ceiling,
            **self.costs,
        }


def point(cost: ModelCost, length: int, keep: int, chunk: int | None) -> Point:
    costs = {}
    for mode in MODES:
        prefill = cost.of(Prefill(length, mode, keep, chunk))
        costs[mode] = asdict(prefill) | {"total_flops": prefill.total_flops}
    return Point(length, keep, chunk, costs)


def render_points(points: Sequence[Point], title: str) -> str:
    def pairs(p: Point, mode: str) -> str:
        return si(p.costs[mode]["swa_pairs"] + p.costs[mode]["global_pairs"])

    headers = ["L", "K", "chunk", "layer rows, off", "compact"]
    headers += [f"pairs, {MODES[0]}", *MODES[1:], f"FLOPs, {MODES[0]}", *MODES[1:], "speed-up"]
    rows = [
        (
            p.prompt_tokens,
            p.keep_tokens,
            _chunk_text(p.chunk_tokens),
            p.costs["off"]["layer_rows"],
            p.costs["compact"]["layer_rows"],
            *(pairs(p, mode) for mode in MODES),
            *(si(p.costs[mode]["total_flops"]) for mode in MODES),
            p.speedup_ceiling,
        )
        for p in points
    ]
    return table(headers, rows, title)


@dataclass(frozen=True)
class Curve:
    """Ceilings over ``x`` in one panel of the plot; curves of one colour differ in their chunk size."""

    panel: int
    colour: int
    label: str
    chunk: int | None
    x: Sequence[int]
    prefills: Sequence[Prefill]


def plot_curves(points: Sequence[Point]) -> list[Curve]:
    """Curves over L (panel 0), K (1) and C (2), through the values that ``points`` has of the others."""
    lengths, keeps = (sorted({getattr(p, name) for p in points}) for name in ("prompt_tokens", "keep_tokens"))
    chunks = list(dict.fromkeys(p.chunk_tokens for p in points))
    longest, least = lengths[-1], keeps[0]
    over_length = _steps(min(least, lengths[0]), longest)
    over_keep = _steps(least, max(longest, keeps[-1]))
    over_chunk = _steps(min(SMALLEST_PLOTTED_CHUNK, longest), longest, per_octave=2)
    # Prompts within the smallest K have nothing to show.
    shown = [n for n in lengths if n > least] or [longest]
    shown = shown[:: -math.ceil(len(shown) / MAX_PLOTTED_LENGTHS)][::-1]

    def chunked(text: str, chunk: int | None) -> str:
        return text if len(chunks) == 1 and chunk is None else f"{text}, C = {_chunk_text(chunk)}"

    curves = []
    for chunk in chunks:
        for i, keep in enumerate(keeps):
            prefills = [Prefill(n, "compact", keep, chunk) for n in over_length]
            curves.append(Curve(0, i, chunked(f"K = {keep:,}", chunk), chunk, over_length, prefills))
        for i, length in enumerate(shown):
            prefills = [Prefill(length, "compact", keep, chunk) for keep in over_keep]
            curves.append(Curve(1, i, chunked(f"L = {length:,}", chunk), chunk, over_keep, prefills))
    for i, keep in enumerate(keeps):
        prefills = [Prefill(longest, "compact", keep, chunk) for chunk in over_chunk]
        curves.append(Curve(2, i, f"K = {keep:,}, L = {longest:,}", chunks[0], over_chunk, prefills))
    return curves


def plot(figure: Figure, cost: ModelCost, points: Sequence[Point], title: str) -> None:
    """Draw `plot_curves`."""
    curves = plot_curves(points)
    styles = dict(zip({curve.chunk: None for curve in curves}, cycle(("-", "--", ":", "-.")), strict=False))
    axes: Sequence[Axes] = figure.subplots(1, 3, sharey=True)
    for curve in progress(curves, "plotting"):
        ceilings = [cost.speedup_ceiling(prefill) for prefill in curve.prefills]
        axes[curve.panel].plot(
            curve.x,
            ceilings,
            label=curve.label,
            color=f"C{curve.colour}",
            linestyle=styles[curve.chunk],
            marker=".",
            markersize=4,
        )
    for panel, name in zip(axes, ("prompt tokens L", "kept rows K", "chunk tokens C"), strict=True):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        panel.tick_params(axis="x", labelsize=8)
        panel.set_xlabel(name)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    axes[0].set_ylabel("speed-up by FLOPs\noff / compact")
    figure.suptitle(title, fontsize=11)


def _chunk_text(chunk: int | None) -> str:
    return "all" if chunk is None else f"{chunk:,}"


def _steps(first: int, last: int, per_octave: int = 4) -> list[int]:
    """Sizes from ``first`` to ``last``, evenly on a logarithmic axis."""
    count = max(1, math.ceil(per_octave * math.log2(last / first)))
    return sorted({round(first * (last / first) ** (i / count)) for i in range(count + 1)})


# --- The command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="directory or JSON file of a config, or one of " + ", ".join(model_presets()),
    )
    inspect.add_shared_arguments(parser)
    parser.add_argument(
        "--keep-tokens",
        metavar="{N,min,exact}",
        action=arguments.List,
        item=arguments.keep_tokens,
        help="values of K to tabulate (default: min exact)",
    )
    parser.add_argument(
        "--chunk-tokens",
        metavar="{N,all}",
        action=arguments.List,
        item=arguments.chunk_tokens,
        help="chunk sizes C to tabulate (default: all, the whole prompt in one chunk)",
    )
    parser.add_argument("--plot", metavar="FILE.png", type=arguments.plot_file, help="draw the speed-up over L, K, C")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables. Exit code: see the module docstring."""
    return _run_small_cases(args) if args.model is None else _run_model(args)


def _run_small_cases(args: argparse.Namespace) -> int:
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("prompt_tokens", "num_speculative_tokens", "keep_tokens", "chunk_tokens", "plot")
        if getattr(args, name) is not None
    ]
    if given:
        raise ValueError(f"{', '.join(given)}: only with MODEL; put it first")
    results = {
        "situations": situations(),
        "chunks": chunked(),
        "equal_cost": equal_cost(),
        "enumeration": enumeration(),
    }
    emit("cost", render_small_cases(results), results, args.json)
    return 1 if results["enumeration"]["mismatches"] else 0


def _run_model(args: argparse.Namespace) -> int:
    figure = new_figure(3) if args.plot else None  # before any work, as it needs an optional dependency
    model = inspect.load_model(args.model)
    cost = model.cost()
    keeps = [
        inspect.truncation_of(model, "compact", keep, args.num_speculative_tokens).keep_tokens
        for keep in args.keep_tokens or ("min", "exact")
    ]
    lengths = inspect.prompt_lengths(model, args.prompt_tokens)
    grid = list(
        product(dict.fromkeys(args.chunk_tokens or [None]), dict.fromkeys(keeps), dict.fromkeys(lengths))
    )
    points = [point(cost, length, keep, chunk) for chunk, keep, length in progress(grid, "counting")]
    title = f"{model.path}, {model.family}; {cost.flops_unit}"
    if figure:
        plot(figure, cost, points, f"{args.model}, {model.family}")
        figure.savefig(args.plot)
    results = {
        "model": str(model.path),
        "family": model.family,
        "flops_unit": cost.flops_unit,
        "plot": args.plot,
        "points": [p.as_json() for p in points],
    }
    emit("cost", render_points(points, title), results, args.json)
    return 0

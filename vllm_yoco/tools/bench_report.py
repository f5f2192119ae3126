"""What ``vllm-yoco bench`` makes of its runs: ratios and ceilings, tables, Markdown, a plot."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm_yoco.model_cost import Prefill, YocoCost, layer_rows
from vllm_yoco.tools import bench_chunk_loss
from vllm_yoco.tools.bench_overhead import added
from vllm_yoco.tools.report import Number, json_document, new_figure, percent, table

if TYPE_CHECKING:
    from vllm_yoco.tools.bench_engine import BenchEngine

REFERENCE, AGAIN = "off", "off again"
ALTERNATIVE, ALTERNATIVE_OFF = "Gemma 4, fast prefill", "Gemma 4"

DECODE_STEPS = "decode_step_ms"
TIMES = {"decode": DECODE_STEPS, "traffic": "duration"}
"""The figure that a measurement compares; TTFT in all others."""
TTFT = "median_ttft_ms"  # of one request, so there is but one

TRAFFIC_LATENCIES = "median_ttft_ms", "p99_itl_ms", "median_tpot_ms"

PARTS = ("producers", "global_kv", "consumers", "logits", "sampling", "runner", "engine")


def reference_of(name: str) -> str:
    return ALTERNATIVE_OFF if name in (ALTERNATIVE, ALTERNATIVE_OFF) else REFERENCE


def point(
    head: dict[str, Any],
    runs: Mapping[str, list[dict[str, Any]]],
    parts: Mapping[str, dict[str, float]],
    engines: Mapping[str, BenchEngine],
    cost: YocoCost,
) -> dict[str, Any]:
    """Runs of one point with what follows from them.

    ``speedup``: best time of the reference over best time of the series. ``ratios``: the same within each round,
    of decode the median over its steps; ``paired``: their median, which drift of the machine disturbs less;
    ``interval``: its 95 % confidence interval, None of fewer than six rounds. ``spread``: worst over best, less 1.
    ``noise``: what ``paired`` and ``speedup`` of the reference against itself differ from 1 by, the larger.
    """
    figure = TIMES.get(head["measure"], TTFT)
    times = {name: [_time(run, figure) for run in found] for name, found in runs.items()}
    series = {}
    for name, found in times.items():
        base = times[reference_of(name)]
        if figure == DECODE_STEPS:
            rounds = zip(runs[reference_of(name)], runs[name], strict=True)
            ratios = [_median_ratio(base_run[figure], run[figure]) for base_run, run in rounds]
        else:
            ratios = [b / f for b, f in zip(base, found, strict=True)]
        series[name] = {
            "best": min(found),
            "median": median(found),
            "spread": max(found) / min(found) - 1,
            "speedup": min(base) / min(found),
            "ratios": ratios,
            "paired": median(ratios),
            "interval": median_interval(ratios),
            "runs": runs[name],
        }
    again = series[AGAIN]
    noise = max(abs(again["speedup"] - 1), abs(again["paired"] - 1))
    return {
        **head,
        "figure": figure,
        "series": series,
        "noise": noise,
        "parts": dict(parts),
        "ceilings": {
            name: found
            for name, spec in engines.items()
            if (found := _ceilings(head, name, spec, parts, cost)) is not None
        },
    }


def _time(run: Mapping[str, Any], figure: str) -> float:
    found = run[figure]
    return float(median(found) if figure == DECODE_STEPS else found)


def _median_ratio(base: Sequence[float], other: Sequence[float]) -> float:
    return median(b / o for b, o in zip(base, other, strict=True))


def least(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each part of equal runs the least, in seconds, and their sum as ``total``: what no disturbance made longer."""
    parts = {name: min(run[name] for run in runs) for name in runs[0] if name != "total"}
    return {**parts, "total": sum(parts.values())}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Confidence interval of the median that assumes nothing of the distribution (sign test); None of too few values.

    The k-th smallest and largest value enclose the median unless fewer than k values lie on one side of it.
    """
    ordered, outside, rank = sorted(values), 0.0, 0
    while True:
        outside += 2 * comb(len(ordered), rank) / 2 ** len(ordered)
        if outside > 1 - confidence:
            break
        rank += 1
    return (ordered[rank - 1], ordered[-rank]) if rank else None


def _ceilings(
    head: Mapping[str, Any], name: str, spec: BenchEngine, parts: Mapping[str, dict[str, float]], cost: YocoCost
) -> dict[str, float | None] | None:
    """Speed-ups that truncation can reach; None where nothing is truncated.

    ``measured``: consumer layers take the share of their time that kept rows have of their FLOPs. ``flops``: as if
    every FLOP took the same time. ``rows``: layer rows of ``off`` over its own, decode rows included.
    """
    mode, keep = ("compact", 1) if name == ALTERNATIVE else (spec.truncation, spec.keep_tokens)
    if mode != "compact" or name == ALTERNATIVE_OFF or head["measure"] == "decode":
        return None
    chunk = head["chunk_tokens"]
    # A step that holds several prompts cuts them elsewhere; the placeholders of these cuts are few.
    kept = [Prefill(length, "compact", keep, chunk) for length in head["prompt_tokens"]]
    full = [Prefill(length, chunk_tokens=chunk) for length in head["prompt_tokens"]]
    decode = cost.topology.num_layers * (head["output_tokens"] - 1) * len(full)
    rows = [sum(layer_rows(cost.topology, p) for p in prompts) + decode for prompts in (full, kept)]
    flops = [[cost.of(p) for p in prompts] for prompts in (full, kept)]
    totals = [sum(c.total_flops for c in costs) for costs in flops]
    consumers = [sum(c.consumer_flops for c in costs) for costs in flops]
    measured = None
    if reference_of(name) in parts and head["measure"] != "traffic":
        off = parts[reference_of(name)]
        measured = off["total"] / (off["total"] - off["consumers"] * (1 - consumers[1] / consumers[0]))
    if head["hit_tokens"]:
        return None
    return {"measured": measured, "flops": totals[0] / totals[1], "rows": rows[0] / rows[1]}


def machine() -> dict[str, Any]:
    """The machine, in words that say what it can do and not where it is."""
    import torch

    found: dict[str, Any] = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    if tunables := os.environ.get("GLIBC_TUNABLES"):
        found["glibc_tunables"] = tunables
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


# -- text ----------------------------------------------------------------------------------------------------------


def summary(results: Mapping[str, Any]) -> str:
    heading, *others = sections(results)
    return "\n\n".join([heading[1], *(f"{title}\n{text}" for title, text in others)])


def sections(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Title and table of each measurement that was taken."""
    points = results["points"]
    found = [("Machine and engines", _heading(results))]
    for measure, (title, render) in _TABLES.items():
        chosen = [p for p in points if p["measure"] == measure]
        if chosen:
            found.append((title, render(chosen)))
            timed = [p for p in chosen if p["parts"] and measure != "traffic"]
            if timed:
                found.append((f"{title}: time by part, all steps", _parts_table(timed)))
    if results["memory"]:
        found.append(("Memory", _memory_table(results["memory"])))
    if results["steps"]:
        found.append(("Preparation of a step", _steps_table(results["steps"])))
    if results.get("chunk_loss"):
        found.append(("Chunked prefill, on one engine", _chunk_loss_table(results["chunk_loss"])))
    if results.get("overhead"):
        found.append(("A step with and without the plugin, on one engine", _overhead_table(results["overhead"])))
    return found


def _heading(results: Mapping[str, Any]) -> str:
    m, engines = results["machine"], results["engines"]
    device = m.get("gpu") or f"{m['cores']}-core {m['architecture']} CPU ({m['isa']}), {m['threads']} thread(s)"
    facts = next(iter(engines.values()))
    return (
        f"{results['model']} on a {device}; {facts['dtype']}, model runner {facts['runner']},"
        f" {', '.join(facts['backends'])}; torch {m['torch']};"
        f" times are {'CPU time of the engine' if results['clock'] == 'cpu' else 'wall-clock time'}"
    )


def _spread(series: Mapping[str, Any]) -> Number:
    return Number(f"+{series['spread']:.0%}")


def _gain(value: float | None) -> Number | None:
    return None if value is None else Number(f"{value:.2f}x")


def _gains(interval: Sequence[float] | None) -> Number | None:
    return None if interval is None else Number(f"{interval[0]:.2f} to {interval[1]:.2f}")


def _reached(p: Mapping[str, Any], name: str) -> Number | None:
    ceiling = p["ceilings"].get(name, {}).get("measured")
    return percent(p["series"][name]["speedup"] / ceiling) if ceiling else None


def _series(points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    """Point, engine and what it measured there: the lines of a table."""
    for p in points:
        for name, series in p["series"].items():
            yield p, name, series


def _against_first(points: Sequence[Mapping[str, Any]], p: Mapping[str, Any], name: str) -> tuple[Any, Any, Any]:
    """What the speed-up at this chunk size is to that at the first, less 1: by rounds, its 95 % interval; by parts."""
    if p["measure"] != "chunks" or p is points[0] or name == REFERENCE:
        return None, None, None
    here, first = (q["series"][name]["ratios"] for q in (p, points[0]))
    changes = [a / b - 1 for a, b in zip(here, first, strict=True)]
    interval = median_interval(changes)
    by_parts = None
    if name in p["parts"]:
        totals = [q["parts"][REFERENCE]["total"] / q["parts"][name]["total"] for q in (p, points[0])]
        by_parts = Number(f"{totals[0] / totals[1] - 1:+.1%}")
    return Number(f"{median(changes):+.1%}"), interval and Number(f"{interval[0]:+.1%} to {interval[1]:+.1%}"), by_parts


def _ttft_table(points: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for p, name, s in _series(points):
        ceilings = p["ceilings"].get(name, {})
        rows.append(
            (
                max(p["prompt_tokens"]),
                p["chunk_tokens"] or "all",
                p["hit_tokens"],
                _cached(s),
                name,
                Number(f"{s['best']:,.0f}"),
                Number(f"{s['median']:,.0f}"),
                _spread(s),
                _gain(s["speedup"]),
                _gain(s["paired"]),
                None if name == reference_of(name) else _gains(s.get("interval")),
                *_against_first(points, p, name),
                _gain(ceilings.get("measured")),
                _gain(ceilings.get("flops")),
                _reached(p, name),
            )
        )
    headers = (
        *("L", "chunk", "hit", "cached", "engine", "TTFT best, ms", "median, ms", "spread", "speed-up"),
        *("paired", "95 %", "vs first chunk", "95 % of it", "by parts", "ceiling", "by FLOPs", "reached"),
    )
    return _render(headers, rows)


def _render(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table without the columns that say nothing: empty ones, and chunk and hit where none is used."""
    kept = [
        i
        for i, header in enumerate(headers)
        if any(row[i] is not None for row in rows)
        and not (header in ("hit", "cached") and not any(row[i] for row in rows))
        and not (header == "chunk" and all(row[i] == "all" for row in rows))
    ]
    return table([headers[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _cached(series: Mapping[str, Any]) -> int | None:
    """Tokens that the engine found in its prefix cache: whole blocks, and of a truncated prompt none past s_keep."""
    found = [run.get("cached_tokens") for run in series["runs"]]
    return None if None in found else int(median(found))


def _lengths(p: Mapping[str, Any]) -> Number:
    least, most = min(p["prompt_tokens"]), max(p["prompt_tokens"])
    return Number(f"{most:,}" if least == most else f"{least:,} to {most:,}")


def _changes(interval: Sequence[float] | None) -> Number | None:
    return None if interval is None else Number(f"{1 / interval[1] - 1:+.1%} to {1 / interval[0] - 1:+.1%}")


def _decode_table(points: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for p, name, s in _series(points):
        runs = s["runs"]
        rows.append(
            (
                _lengths(p),
                p["concurrency"],
                name,
                s["best"],
                s["median"],
                median(r["median_tpot_ms"] for r in runs),
                _spread(s),
                Number(f"{1 / s['paired'] - 1:+.1%}"),
                _changes(None if name == REFERENCE else s.get("interval")),
                Number(f"{1 / s['speedup'] - 1:+.1%}"),
            )
        )
    headers = (
        *("L", "batch", "engine", "step best, ms", "step median, ms", "TPOT median, ms", "spread"),
        *("vs off, paired", "95 %"),
        "vs off, best",
    )
    return _render(headers, rows)


def _traffic_table(points: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for p, name, s in _series(points):
        best = min(s["runs"], key=lambda run: run["duration"])
        ceiling = p["ceilings"].get(name, {}).get("rows")
        prefills, reference = (_prefill_seconds(p["series"][n]["runs"]) for n in (name, reference_of(name)))
        rows.append(
            (
                _lengths(p),
                p["concurrency"],
                name,
                Number(f"{best['duration']:.1f}"),
                Number(f"{sum(best[DECODE_STEPS]) / 1000:.1f}"),
                Number(f"{best['total_token_throughput']:,.0f}"),
                Number(f"{best['output_throughput']:,.0f}"),
                *(Number(f"{median(r[key] for r in s['runs']):,.0f}") for key in TRAFFIC_LATENCIES),
                _spread(s),
                _gain(s["speedup"]),
                _gain(ceiling),
                percent(s["speedup"] / ceiling) if ceiling else None,
                _gain(reference / prefills),
            )
        )
    headers = (
        *("L", "requests", "engine", "duration, s", "of it decode", "tokens/s, all", "of output", "TTFT median, ms"),
        *("ITL p99, ms", "TPOT median, ms", "spread", "gain", "by layer rows", "reached", "gain, prefill"),
    )
    return _render(headers, rows)


def _prefill_seconds(runs: Sequence[Mapping[str, Any]]) -> float:
    """The least time of the steps that compute a row of a prompt, in seconds."""
    return min(run["duration"] - sum(run[DECODE_STEPS]) / 1000 for run in runs)


def _parts_table(points: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for p in points:
        for name, seconds in p["parts"].items():
            shown = [Number(f"{seconds[part] * 1000:,.1f}") if part in seconds else None for part in PARTS]
            rows.append(
                (
                    max(p["prompt_tokens"]),
                    p["chunk_tokens"] or "all",
                    p["concurrency"],
                    name,
                    *shown,
                    Number(f"{seconds['total'] * 1000:,.0f}"),
                )
            )
    parts = [f"{name.replace('_', ' ')}, ms" for name in (*PARTS, "total")]
    return _render(("L", "chunk", "requests", "engine", *parts), rows)


def _memory_table(memory: Mapping[str, Any]) -> str:
    rows, pools = [], []
    for name, found in memory["engines"].items():
        peak = found["peak"]
        rows.append((name, _mb(peak["before"]), _mb(peak["peak"]), _mb(peak["peak"] - peak["before"])))
        for chunk, a in found["admission"].items():
            pools.append(
                (
                    int(chunk),
                    name,
                    a["pool_blocks"],
                    a["admitted"],
                    a["peak_blocks"],
                    a["held_blocks"],
                    _mb(a["peak_bytes"]),
                    _mb(a["held_bytes"]),
                )
            )
    length = memory["prompt_tokens"]
    first = table(
        ("engine", "before, MB", "peak, MB", "grown by, MB"),
        rows,
        f"Resident memory of one engine's process during a prefill of {length:,} tokens in one chunk",
    )
    second = table(
        ("chunk", "engine", "pool blocks", "admitted", "peak blocks", "held blocks", "peak, MB", "held, MB"),
        sorted(pools, key=lambda row: -row[0]),
        f"Prompts of {length:,} tokens that one KV pool serves at once; blocks that one of them holds",
    )
    return f"{first}\n\n{second}"


def _steps_table(steps: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            *(s[key] for key in ("engine", "kind", "requests", "prompt_tokens")),
            *(s[key] * 1e3 for key in ("plugin_best", "plugin", "builders")),
        )
        for s in steps
    ]
    return table(("engine", "step", "requests", "L", "plugin best, ms", "median, ms", "builders, ms"), rows)


def _overhead_table(overhead: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for o in overhead:
        shares = added(o["rounds"])
        interval = median_interval(shares)
        with_ms, without_ms = (median(ms for r in o["rounds"] for ms in r[key]) for key in ("with_ms", "without_ms"))
        rows.append(
            (
                *(o[key] for key in ("engine", "kind", "prompt_tokens", "batch")),
                sum(len(r["with_ms"]) for r in o["rounds"]),
                without_ms,
                with_ms,
                Number(f"{median(shares):+.2%}"),
                interval and Number(f"{interval[0]:+.2%} to {interval[1]:+.2%}"),
            )
        )
    return table(
        ("engine", "step", "L", "batch", "steps of each", "without, ms", "with, ms", "added, paired", "95 %"),
        rows,
    )


def _chunk_loss_table(measured: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for m in measured:
        best, by_round = bench_chunk_loss.best(m["rounds"]), [bench_chunk_loss.gains(r) for r in m["rounds"]]
        speedups = bench_chunk_loss.gains(best)
        for index, chunk in enumerate(m["chunk_tokens"]):
            changes = [gains[index] / gains[0] - 1 for gains in by_round] if index else []
            interval = median_interval(changes)
            rows.append(
                (
                    m["prompt_tokens"],
                    chunk,
                    m["engine"],
                    Number(f"{best[bench_chunk_loss.ALL][index]:,.0f}"),
                    Number(f"{best[bench_chunk_loss.KEPT][index]:,.0f}"),
                    _gain(speedups[index]),
                    Number(f"{speedups[index] / speedups[0] - 1:+.1%}") if index else None,
                    Number(f"{median(changes):+.1%}") if index else None,
                    interval and Number(f"{interval[0]:+.1%} to {interval[1]:+.1%}"),
                )
            )
    headers = (
        *("L", "chunk", "engine", "all rows best, ms", "K rows best, ms", "speed-up", "vs first chunk, best"),
        *("paired", "95 %"),
    )
    return table(headers, rows)


def _mb(size: int) -> Number:
    return Number(f"{size / 1e6:,.1f}")


_TABLES = {
    "prefill": ("Prefill, one request, one chunk", _ttft_table),
    "chunks": ("Chunked prefill", _ttft_table),
    "hits": ("Prefix-cache hits", _ttft_table),
    "alternative": ("KV-sharing fast prefill, the closest in stock vLLM", _ttft_table),
    "decode": ("Decode", _decode_table),
    "traffic": ("Concurrent requests of mixed lengths", _traffic_table),
}


# -- files ---------------------------------------------------------------------------------------------------------


def write_report(folder: Path, results: Mapping[str, Any]) -> None:
    """report.json, report.md and report.png. Raises OSError for a file that cannot be written."""
    (folder / "report.json").write_text(json_document("bench", results) + "\n", encoding="utf-8")
    drawn = _plot(results, folder / "report.png")
    text = "\n\n".join(f"## {title}\n\n```text\n{body}\n```" for title, body in sections(results))
    picture = "\n\n![Speed-up over prompt length](report.png)" if drawn else ""
    (folder / "report.md").write_text(f"# vllm-yoco bench: {results['model']}\n\n{text}{picture}\n", encoding="utf-8")


def _plot(results: Mapping[str, Any], path: Path) -> bool:
    """Speed-up over L beside its ceiling, and time by part; False without a prefill measurement."""
    points = [p for p in results["points"] if p["measure"] == "prefill"]
    if not points:
        return False
    figure = new_figure(2)
    gains, shares = figure.subplots(1, 2)
    lengths = [max(p["prompt_tokens"]) for p in points]
    for name in points[0]["series"]:
        if name == REFERENCE:
            continue
        style = "--" if name == AGAIN else "-"
        gains.plot(lengths, [p["series"][name]["speedup"] for p in points], style, marker="o", markersize=4, label=name)
    for name in points[0]["ceilings"]:
        gains.plot(lengths, [p["ceilings"][name]["measured"] for p in points], ":", label=f"ceiling, {name}")
    gains.set_xscale("log", base=2)
    gains.set_xlabel("prompt tokens")
    gains.set_ylabel("speed-up of TTFT over off")
    gains.grid(True, alpha=0.3)
    gains.legend(fontsize=8)
    last = points[-1]["parts"]
    bottom = [0.0] * len(last)
    for part in PARTS:
        heights = [seconds.get(part, 0.0) for seconds in last.values()]
        shares.bar(list(last), heights, bottom=bottom, label=part.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    shares.set_ylabel(f"seconds, L = {lengths[-1]:,}")
    shares.legend(fontsize=8)
    figure.suptitle(str(results["model"]), fontsize=10)
    figure.savefig(path)
    return True

"""``vllm-yoco bench``: what truncation saves and what it costs, measured side by side.

All engines are alive at once, one process each, and take turns step by step, in rotating order: what disturbs the
machine for longer than a step meets all of them. Only an engine's own steps count in its times. Every round serves
every point once. Of ``off`` there are two engines; what they differ by is the noise that any other difference has to
exceed.

    stock      vLLM with the model class registered and no plugin (VLLM_PLUGINS="")
    off        the plugin, no truncation: what the others are compared with
    off again  the same once more
    mask, compact    one engine for each K

With ``--one-process`` the engines share a process, all but ``stock``. Two processes that do the same may differ by some
percent for as long as they live, by where their memory lies; that is more than the cost of a decode step's preparation.

Measurements (``--measure``)

    prefill    one request, one chunk, over L: TTFT, and the ceiling of it
    chunks     the longest L, over the chunk size
    chunk_loss  the longest L, in one chunk and in several, on one engine: what chunks take from the speed-up
    decode     batches of 1 and more past their prompts: ITL and TPOT
    traffic    mixed lengths, over concurrency: throughput, ITL
    hits       the longest L, over the length of a prefix-cache hit
    memory     peak memory of the longest prefill, KV blocks of a request, prompts that one pool admits
    steps      what the plugin takes to prepare a step, over requests and L
    overhead   what the plugin adds to a decode step, and ``off`` to a prefill: one engine, every other step as without
               the plugin
    alternative    vLLM's KV-sharing fast prefill on a Gemma 4 of equal shape, for models without consumer windows

The ceiling of a point is the speed-up of ``off`` if its consumer layers took only the share of their time that the
kept rows have in their FLOPs (``vllm_yoco.model_cost``), and everything else took what it takes in ``off``, as
measured by part. Nothing but consumer layers is expected to become faster, and logits where a step keeps no row.

JSON (``--json``, or report.json in ``--out``):

    command, version, vllm, date, arguments {name: value}, model, machine, clock
    engines    {name: {truncation, keep_tokens (null: K means nothing), runner, dtype, device, backends}}
    points     [{measure, prompt_tokens [L], output_tokens, chunk_tokens (null: all), concurrency, hit_tokens,
               series {name: {runs [fields of vLLM's BenchmarkMetrics, decode_step_ms, cached_tokens], ratios,
               spread, speedup, ...}}, noise,
               parts {engine: {part: seconds, the least of --part-runs}}, ceilings {engine: {measured, flops, rows}}}]
    memory     {prompt_tokens, engines {name: {peak {before, peak: bytes}, admission {chunk: {...}}}}} or null
    steps      [{engine, requests, prompt_tokens, kind (prefill | decode), plugin, plugin_best, builders: seconds}]
               or null
    chunk_loss  [{engine, prompt_tokens, chunk_tokens [C], rounds [{kept_ms [of each C], all_ms}]}] or null
    overhead   [{engine, kind (prefill | decode), prompt_tokens, batch, rounds [{with_ms, without_ms: of each step}]}]
               or null

Exit code: 0; 1 if an engine failed; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_yoco.config import Truncation
from vllm_yoco.tools import bench_chunk_loss, bench_engine, bench_overhead, bench_report
from vllm_yoco.tools.arguments import numbers, positive, positives, two_or_more
from vllm_yoco.tools.bench_engine import BenchEngine
from vllm_yoco.tools.bench_overhead import aligned_prompt_tokens
from vllm_yoco.tools.bench_report import AGAIN, REFERENCE
from vllm_yoco.tools.bench_serve import CLOCKS, Workload
from vllm_yoco.tools.check_inputs import MODEL_HELP, open_model, resolve_keeps
from vllm_yoco.tools.engine_process import RUNNERS, EngineError, EngineHost, add_engine_flags, engine_options
from vllm_yoco.tools.report import add_json_argument, emit, make_report_folder, progress

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig

HELP = "measure TTFT, TPOT, throughput and memory with and without truncation, side by side"

ONE_ENGINE = ("memory", "steps", "overhead", "chunk_loss")
MEASURES = ("prefill", "chunks", "decode", "traffic", "hits", *ONE_ENGINE, "alternative")
MODES = ("stock", "off", "mask", "compact")

PROMPT_TOKENS = (512, 1024, 2048, 4096, 8192)
NUM_CHUNKS = (1, 2, 4, 8, 16)
DECODE_BATCHES = (1, 8)
DECODE_PROMPT_TOKENS = 256
CONCURRENCY = (8, 32)
MIXED_SHARES = (1 / 8, 1 / 2, 1 / 4, 1, 1 / 16, 3 / 4, 3 / 8, 3 / 16)
"""Lengths of concurrent requests, as shares of the longest; short and long ones alternate."""
HIT_SHARES = (0.0, 0.25, 0.5, 0.75)
SPECIAL: dict[str, tuple[tuple[str, ...], Any]] = {
    "chunk_tokens": (("chunks", "chunk_loss"), None),
    "batches": (("decode", "overhead"), DECODE_BATCHES),
    "concurrency": (("traffic", "steps"), CONCURRENCY),
    "step_tokens": (("traffic", "memory"), 2048),
    "hit_tokens": (("hits",), None),
    "output_tokens": (("decode", "overhead", "traffic", "memory"), 64),
}
"""Flags that only some measurements read: which, and the default if one of them is taken."""
NO_OUTPUT = 2
"""Output tokens that engines have room for where no measurement reads the flag."""
ADMISSION_PROMPTS, ADMISSION_REQUESTS = 6, 48
"""Prompts that the small pool of ``memory`` is made for, and requests that compete for it."""


@dataclass(frozen=True)
class Point:
    measure: str
    workload: Workload


@dataclass
class Bench:
    """Engines by name, and the process that each lives in."""

    engines: dict[str, BenchEngine]
    hosts: dict[str, EngineHost]
    facts: dict[str, Any] = field(default_factory=dict)

    def call(self, name: str, job: Callable[..., Any], *args: Any, spec: BenchEngine | None = None) -> Any:
        return self.hosts[name].call(job, spec or self.engines[name], *args)

    def start(self, longest: int) -> None:
        """Start all engines, two at a time, and serve unmeasured requests."""
        shared = len(set(self.hosts.values())) < len(self.hosts)
        with ThreadPoolExecutor(1 if shared else 2) as pool:
            facts = pool.map(lambda name: self.call(name, bench_engine.warm_up, longest), self.engines)
            try:
                self.facts = dict(zip(self.engines, facts, strict=True))
            except KeyboardInterrupt:
                for host in self.hosts.values():
                    host.interrupt()
                raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--measure", metavar="NAME,...", default="prefill,decode", help=", ".join(MEASURES))
    parser.add_argument("--modes", metavar="NAME,...", default="off,compact", help=f"of {', '.join(MODES)}")
    parser.add_argument("--keep-tokens", metavar="K,...", default="min", help="numbers, min, exact (default: min)")
    parser.add_argument(
        "--prompt-tokens",
        metavar="L,...",
        type=positives,
        help="lengths (default: 512 to 8192, as far as the model goes). prefill, alternative and steps take all of"
        f" them, the others the longest, but for decode ({DECODE_PROMPT_TOKENS}) and overhead (about as many, K and"
        " whole blocks)",
    )
    parser.add_argument(
        "--chunk-tokens", metavar="C,...", type=positives, help="chunks, chunk_loss: sizes (default: L/1 to L/16)"
    )
    parser.add_argument("--batches", metavar="N,...", type=positives, help="decode, overhead: sizes (default: 1,8)")
    parser.add_argument(
        "--concurrency",
        metavar="N,...",
        type=positives,
        help="traffic: requests; steps: requests of a step, 1 and the most of these (default: 8,32)",
    )
    parser.add_argument(
        "--step-tokens", metavar="C", type=positive, help="traffic, memory: rows a step may take (default: 2048)"
    )
    parser.add_argument("--hit-tokens", metavar="H,...", type=numbers, help="hits: lengths (default: 0 to 3/4 L)")
    parser.add_argument("--output-tokens", metavar="N", type=two_or_more, help="but for prefills (default: 64)")
    parser.add_argument("--repeats", metavar="N", type=positive, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--part-runs", metavar="N", type=positive, default=1, help="runs with timers; of each part the least counts"
    )
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: time computed, for shared machines"
    )
    parser.add_argument("--runner", choices=RUNNERS, default="auto", help="vLLM's model runner")
    parser.add_argument("--one-process", action="store_true", help="engines share one, all but stock; not for memory")
    parser.add_argument("--dtype", help="auto or a dtype (default: float32 on a CPU, auto on a GPU)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of random prompts and weights (default: 0)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder for report.json, .md and, of prefill, .png")
    add_json_argument(parser)
    add_engine_flags(parser)


def _names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{flag} {unknown[0]}: must be of {', '.join(known)}.")
    return names


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the module docstring.

    Raises:
        ValueError: for arguments that do not fit each other or the model, or --out without matplotlib.
        OSError: for a file that cannot be written.
    """
    measures = _names("--measure", args.measure, MEASURES)
    modes = list(dict.fromkeys(["off", *_names("--modes", args.modes, MODES)]))
    given = {name: value for name, value in vars(args).items() if name not in ("run", "json", "out")}
    take_defaults(args, measures)
    if args.one_process and not {"memory", "alternative"}.isdisjoint(measures):
        raise ValueError("--one-process: --measure memory and alternative need a process for each engine.")
    if args.out is not None:
        make_report_folder(args.out)
    with open_model(args.model, args.seed) as (directory, config):
        room = config.max_position_embeddings - args.output_tokens
        args.prompt_tokens = args.prompt_tokens or tuple(n for n in PROMPT_TOKENS if n <= room)
        if max(args.prompt_tokens, default=room + 1) > room:
            raise ValueError(
                f"--prompt-tokens {max(args.prompt_tokens, default='')}: must be at most {room}: the"
                f" model has {config.max_position_embeddings} positions, {args.output_tokens} of them for output."
            )
        if max(args.hit_tokens or [0]) >= max(args.prompt_tokens):
            raise ValueError(
                f"--hit-tokens {max(args.hit_tokens)}: must be less than the longest of --prompt-tokens,"
                f" {max(args.prompt_tokens)}: a prompt's last token is always computed."
            )
        truncations = resolve_keeps(args.keep_tokens, config.topology())
        truncates = not {"mask", "compact"}.isdisjoint(modes)
        if "chunk_loss" in measures and not truncates:
            raise ValueError("--measure chunk_loss: nothing is saved without a mode. Add compact to --modes.")
        if "overhead" in measures:
            _check_overhead(args, truncations if truncates else truncations[:1], config)
        if "alternative" in measures and config.topology().swa_layers:
            raise ValueError(
                "--measure alternative: consumer layers of this model have a sliding window, which layers that share"
                " another's KV have not. Take a model without, as bench-8-8-no-window."
            )
        try:
            results = _head(given) | _measure(args, measures, modes, directory, config, truncations)
        except EngineError as error:
            print(f"{error.details}\nvllm-yoco bench: {error}. Details are above.", file=sys.stderr)
            return 1
    text = bench_report.summary(results)
    emit("bench", text, results, args.json)
    if args.out is not None:
        bench_report.write_report(args.out, results)
    return 0


def take_defaults(args: argparse.Namespace, measures: Sequence[str]) -> None:
    """Defaults of the flags that not every measurement reads. ValueError for one that none reads."""
    for name, (readers, default) in SPECIAL.items():
        value, is_read = getattr(args, name), not set(readers).isdisjoint(measures)
        if value is None:
            setattr(args, name, default if is_read or name != "output_tokens" else NO_OUTPUT)
        elif not is_read:
            typed = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(
                f"--{name.replace('_', '-')} {typed}: read by --measure {' and '.join(readers)} only. Leave it out, or"
                " add one of these."
            )


def _head(arguments: dict[str, Any]) -> dict[str, Any]:
    """What identifies the measurement: when, with what, and how it was asked for."""
    from vllm import __version__ as vllm_version

    return {
        "vllm": vllm_version,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "arguments": {name: value for name, value in arguments.items() if value is not None},
    }


def _measure(
    args: argparse.Namespace,
    measures: Sequence[str],
    modes: Sequence[str],
    directory: str,
    config: YocoModelConfig,
    truncations: Sequence[Truncation],
) -> dict[str, Any]:
    from vllm_yoco.model_cost import YocoCost

    cost = YocoCost(config)
    plain = engines_of(args, modes, directory, config, truncations)
    results: dict[str, Any] = {
        "model": args.model,
        "machine": bench_report.machine(),
        "clock": args.clock,
        "engines": {},
        "points": [],
        "memory": None,
        "steps": None,
        "overhead": None,
        "chunk_loss": None,
    }
    groups = {
        ("prefill", "chunks", "decode", "traffic"): plain,
        ("hits",): {name: replace(spec, prefix_caching=True) for name, spec in plain.items() if name != "stock"},
        ONE_ENGINE: {name: spec for name, spec in plain.items() if name not in ("stock", AGAIN)},
    }
    wanted_groups = {
        tuple(measure for measure in group if measure in measures): engines for group, engines in groups.items()
    }
    with _hosts(args.runner, plain, args.one_process) as hosts:
        for wanted, engines in wanted_groups.items():
            if not wanted:
                continue
            bench = Bench(engines, hosts)
            points = [point for measure in wanted for point in points_of(args, measure, config)]
            _serve_points(bench, points, args, cost, results)
            if "memory" in wanted:
                results["memory"] = _memory(bench, args, config)
            if "steps" in wanted:
                results["steps"] = _steps(bench, args)
            if "overhead" in wanted:
                results["overhead"] = _overhead(bench, args)
            if "chunk_loss" in wanted:
                results["chunk_loss"] = _chunk_loss(bench, args)
    if "alternative" in measures:
        from vllm_yoco.tools import bench_gemma

        with ExitStack() as stack:
            other = stack.enter_context(bench_gemma.model_of_shape(config))
            engines = plain | bench_gemma.engines(plain[REFERENCE], other)
            bench = Bench(engines, stack.enter_context(_hosts(args.runner, engines)))
            _serve_points(bench, points_of(args, "alternative", config), args, cost, results)
    return results


def _serve_points(
    bench: Bench, points: Sequence[Point], args: argparse.Namespace, cost: Any, results: dict[str, Any]
) -> None:
    """Start the engines, serve the points, add what comes of it to ``results``."""
    longest = max(args.prompt_tokens)
    bench.start(min(longest + 1, max([p.workload.longest for p in points], default=longest)))
    results["engines"] |= _describe(bench)
    # Rounds outside, points inside: what drifts in minutes meets every point.
    runs: list[dict[str, list[dict[str, Any]]]] = [{name: [] for name in bench.engines} for _ in points]
    turns = [(repeat, index) for repeat in range(args.repeats) for index in range(len(points))]
    for repeat, index in progress(turns, "measuring"):
        _round(bench, points[index], repeat, runs[index])
    served = list(zip(points, runs, strict=True))
    results["points"] += [
        _point(bench, point, found, cost, args.part_runs) for point, found in progress(served, "timing parts")
    ]


def _describe(bench: Bench) -> dict[str, Any]:
    return {
        name: {
            "truncation": spec.truncation,
            "keep_tokens": None if spec.truncation in (None, "off") else spec.keep_tokens,
            **bench.facts[name],
        }
        for name, spec in bench.engines.items()
    }


def engines_of(
    args: argparse.Namespace,
    modes: Sequence[str],
    directory: str,
    config: YocoModelConfig,
    truncations: Sequence[Truncation],
) -> dict[str, BenchEngine]:
    """The engines to compare, by name; the first is the reference."""
    import torch

    longest = max(*args.prompt_tokens, DECODE_PROMPT_TOKENS)
    sequences = max(*args.batches, *args.concurrency)
    topology = config.topology()
    layers = topology.boundary + len(topology.kv_source_layers) + len(topology.swa_layers)
    token_bytes = layers * 2 * config.num_key_value_heads * config.head_dim * 4
    # A whole batch of mixed lengths, or one of the longest; two blocks of slack for each request and group.
    mixed = sum(_mixed(longest, sequences)) if "traffic" in args.measure else 0
    tokens = max(mixed, 2 * longest) + sequences * (args.output_tokens + 128)
    decode = max(args.batches) * (DECODE_PROMPT_TOKENS + args.output_tokens + 128)
    common = BenchEngine(
        name=REFERENCE,
        model=directory,
        truncation="off",
        keep_tokens=truncations[0].keep_tokens,
        dtype=args.dtype or ("auto" if torch.cuda.is_available() else "float32"),
        max_model_len=_max_model_len(args, config),
        max_num_seqs=sequences,
        kv_cache_bytes=max(tokens, decode) * token_bytes,
        options=tuple(engine_options(args.engine_flags).items()),
    )
    engines = {REFERENCE: common, AGAIN: replace(common, name=AGAIN)}
    if "stock" in modes:
        engines["stock"] = replace(common, name="stock", truncation=None)
    for mode in ("mask", "compact"):
        for truncation in truncations if mode in modes else ():
            name = f"{mode} K={truncation.keep_tokens}"
            engines[name] = replace(common, name=name, truncation=mode, keep_tokens=truncation.keep_tokens)
    # Engines stay alive, and these measurements make further ones.
    with_plugin, once = engines.keys() - {"stock"}, engines.keys() - {"stock", AGAIN}
    gemma = {bench_report.ALTERNATIVE, bench_report.ALTERNATIVE_OFF}
    further = {"hits": with_plugin, "memory": once, "overhead": once, "alternative": gemma}
    share = 0.85 / (len(engines) + sum(len(names) for measure, names in further.items() if measure in args.measure))
    return {name: replace(spec, gpu_share=share) for name, spec in engines.items()}


def _max_model_len(args: argparse.Namespace, config: YocoModelConfig) -> int:
    """Also the most rows of a step."""
    longest = max(*args.prompt_tokens, DECODE_PROMPT_TOKENS)
    return min(longest + args.output_tokens + 8, config.max_position_embeddings)


def points_of(args: argparse.Namespace, measure: str, config: YocoModelConfig) -> list[Point]:
    """What one measurement serves."""
    longest, seed = max(args.prompt_tokens), args.seed
    lengths = sorted(set(args.prompt_tokens))
    if measure in ("prefill", "alternative"):
        return [Point(measure, Workload((length,), 1, 1, seed=seed, clock=args.clock)) for length in lengths]
    if measure == "chunks":
        sizes = _chunk_sizes(args)
        return [Point(measure, Workload((longest,), 1, 1, size, seed=seed, clock=args.clock)) for size in sizes]
    if measure == "decode":
        prompt = min(DECODE_PROMPT_TOKENS, config.max_position_embeddings - args.output_tokens)
        return [
            Point(measure, Workload((prompt,) * n, args.output_tokens, n, seed=seed, clock=args.clock))
            for n in args.batches
        ]
    if measure == "traffic":
        rows = min(args.step_tokens, _max_model_len(args, config))
        return [
            Point(measure, Workload(_mixed(longest, n), args.output_tokens, n, rows, seed=seed, clock=args.clock))
            for n in args.concurrency
        ]
    if measure == "hits":
        hits = args.hit_tokens or [int(longest * share) for share in HIT_SHARES]
        return [Point(measure, Workload((longest,), 1, 1, hit_tokens=hit, seed=seed, clock=args.clock)) for hit in hits]
    return []


def _chunk_sizes(args: argparse.Namespace) -> list[int]:
    """Each once: a chunk larger than the prompt is the whole of it."""
    longest = max(args.prompt_tokens)
    sizes = args.chunk_tokens or [-(-longest // count) for count in NUM_CHUNKS]
    return list(dict.fromkeys(min(size, longest) for size in sizes))


def _mixed(longest: int, count: int) -> tuple[int, ...]:
    return tuple(max(1, int(longest * MIXED_SHARES[n % len(MIXED_SHARES)])) for n in range(count))


@contextmanager
def _hosts(
    runner: str, engines: dict[str, BenchEngine], one_process: bool = False
) -> Iterator[dict[str, EngineHost]]:
    """A process for each engine, or one for all that have the plugin; none has started yet."""
    with ExitStack() as stack:
        hosts: dict[str, EngineHost] = {}
        for name, spec in engines.items():
            bare = spec.truncation is None
            if one_process and not bare and REFERENCE in hosts:
                hosts[name] = hosts[REFERENCE]
                continue
            hosts[name] = stack.enter_context(
                EngineHost(
                    runner,
                    environment={"VLLM_PLUGINS": ""} if bare else {},
                    initializer=register_model_class_only if bare else None,
                )
            )
        yield hosts


def register_model_class_only() -> None:
    """What a user of the model would write who does not have the plugin."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from vllm_yoco.models.config import YocoModelConfig

    AutoConfig.register(YocoModelConfig.model_type, YocoModelConfig, exist_ok=True)
    ModelRegistry.register_model("YocoForCausalLM", "vllm_yoco.models.yoco:YocoForCausalLM")


def _round(bench: Bench, point: Point, repeat: int, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Serve one point once with every engine, step by step in turn, and add what it took to ``runs``."""
    workload = point.workload
    if point.measure == "hits":
        # What an earlier round or point left in the cache must not be hit.
        workload = replace(workload, seed=(workload.seed, repeat, workload.hit_tokens))
    serving, turn = list(runs), repeat
    for name in serving:
        bench.call(name, bench_engine.begin, workload)
    while serving:
        first = turn % len(serving)
        outcomes = {name: bench.call(name, bench_engine.step) for name in serving[first:] + serving[:first]}
        for name, outcome in outcomes.items():
            if outcome is not None:
                runs[name].append(outcome)
                serving.remove(name)
        turn += 1


def _point(
    bench: Bench, point: Point, runs: dict[str, list[dict[str, Any]]], cost: Any, part_runs: int
) -> dict[str, Any]:
    """What the runs of one point say; serves it again with timers."""
    timed = {}
    if point.measure != "hits":
        names = [n for n, s in bench.engines.items() if s.truncation != "mask" and n not in ("stock", AGAIN)]
        turns = [{n: bench.call(n, bench_engine.parts, point.workload) for n in names} for _ in range(part_runs)]
        timed = {name: bench_report.least([turn[name] for turn in turns]) for name in names}
    workload = point.workload
    return bench_report.point(
        {
            "measure": point.measure,
            **{key: value for key, value in asdict(workload).items() if key not in ("seed", "clock")},
        },
        runs,
        timed,
        bench.engines,
        cost,
    )


def _memory(bench: Bench, args: argparse.Namespace, config: YocoModelConfig) -> dict[str, Any]:
    longest = max(args.prompt_tokens)
    prefill = Workload((longest,), 1, 1, seed=args.seed)
    found: dict[str, Any] = {}
    for name, spec in bench.engines.items():
        found[name] = {"peak": bench.call(name, bench_engine.peak_memory, prefill)}
        topology = config.topology()
        layers = topology.boundary + len(topology.kv_source_layers)
        layer_bytes = 2 * config.num_key_value_heads * config.head_dim * (4 if spec.dtype == "float32" else 2)
        # What they hold once they decode: all their rows, and windows that begin and end inside a block.
        window = topology.consumer_window + 3 * spec.block_size
        prompt_bytes = layer_bytes * (layers * (longest + spec.block_size) + len(topology.swa_layers) * window)
        small = replace(
            spec,
            name=f"{name}, small pool",
            kv_cache_bytes=ADMISSION_PROMPTS * prompt_bytes,
            max_num_seqs=ADMISSION_REQUESTS,
        )
        found[name]["admission"] = {
            str(chunk): bench.call(name, bench_engine.admission, longest, chunk, ADMISSION_REQUESTS, spec=small)
            for chunk in sorted({longest, min(longest, args.step_tokens)}, reverse=True)
        }
    return {"prompt_tokens": longest, "engines": found}


def _steps(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {
            "engine": name,
            "requests": requests,
            "prompt_tokens": length,
            "kind": kind,
            **bench.call(name, bench_engine.step_preparation, requests, length, kind == "decode", args.clock),
        }
        for name, spec in bench.engines.items()
        if spec.truncation in ("mask", "compact")
        for kind in ("prefill", "decode")
        for requests in sorted({1, max(args.concurrency)})
        for length in sorted(set(args.prompt_tokens))
    ]


def _overhead_prompt_tokens(args: argparse.Namespace, keep_tokens: int) -> int:
    """L of ``overhead`` for one K: near that of decode, and s_keep a multiple of the engine's block size."""
    block_size = engine_options(args.engine_flags).get("block_size", BenchEngine.block_size)
    return aligned_prompt_tokens(keep_tokens, DECODE_PROMPT_TOKENS - block_size + 1, block_size)


def _check_overhead(args: argparse.Namespace, truncations: Sequence[Truncation], config: YocoModelConfig) -> None:
    """ValueError, before any work is done, for what ``overhead`` cannot measure."""
    if args.output_tokens < 3:
        raise ValueError(f"--output-tokens {args.output_tokens}: --measure overhead compares two decode steps; take 3.")
    for truncation in truncations:
        length = _overhead_prompt_tokens(args, truncation.keep_tokens)
        if length + args.output_tokens > _max_model_len(args, config):
            raise ValueError(
                f"--measure overhead: K={truncation.keep_tokens} takes prompts of {length} tokens, which need engines"
                " for longer sequences. Give a larger one of --prompt-tokens, as far as the model goes, or a smaller"
                " --keep-tokens."
            )


def _overhead(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name, spec in bench.engines.items():
        length = _overhead_prompt_tokens(args, spec.keep_tokens)
        jobs = [("decode", batch, args.output_tokens, bench_overhead.decode_overhead) for batch in args.batches]
        if spec.truncation == "off":
            jobs.insert(0, ("prefill", 1, 1, bench_overhead.prefill_overhead))
        for kind, batch, output_tokens, job in jobs:
            workload = Workload((length,) * batch, output_tokens, batch, seed=args.seed, clock=args.clock)
            measured = bench.call(name, job, workload, args.repeats)
            found.append({"engine": name, "kind": kind, "prompt_tokens": length, "batch": batch, **measured})
    return found


def _chunk_loss(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    sizes, longest = _chunk_sizes(args), max(args.prompt_tokens)
    workload = Workload((longest,), 1, 1, seed=args.seed, clock=args.clock)
    return [
        {
            "engine": name,
            "prompt_tokens": longest,
            "chunk_tokens": sizes,
            **bench.call(name, bench_chunk_loss.chunk_loss, workload, sizes, args.repeats),
        }
        for name, spec in bench.engines.items()
        if spec.truncation in ("mask", "compact")
    ]

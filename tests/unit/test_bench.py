"""``vllm-yoco bench`` without engines: its points, ratios, ceilings, tables and errors."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from vllm_yoco.model_cost import Prefill, YocoCost
from vllm_yoco.models.checkpoint import read_model_config
from vllm_yoco.presets import model_presets
from vllm_yoco.tools import bench, bench_report
from vllm_yoco.tools.bench_engine import BenchEngine
from vllm_yoco.tools.bench_overhead import added, aligned_prompt_tokens
from vllm_yoco.tools.bench_report import AGAIN, REFERENCE
from vllm_yoco.tools.bench_serve import Workload
from vllm_yoco.tools.check_inputs import resolve_keeps
from vllm_yoco.tools.cli import main

KEEP = 129
COMPACT = f"compact K={KEEP}"


@pytest.fixture(scope="module")
def cost() -> YocoCost:
    return YocoCost(read_model_config(model_presets()["bench-8-8"]))


def _engines() -> dict[str, BenchEngine]:
    common = {"model": "m", "keep_tokens": KEEP, "dtype": "float32", "max_model_len": 8200}
    common |= {"max_num_seqs": 8, "kv_cache_bytes": 1 << 20}
    return {
        name: BenchEngine(name=name, truncation=mode, **common)
        for name, mode in ((REFERENCE, "off"), (AGAIN, "off"), ("stock", None), (COMPACT, "compact"))
    }


def _runs(times: dict[str, list[float]], figure: str = "median_ttft_ms") -> dict[str, list[dict[str, float]]]:
    zeros = dict.fromkeys(("median_tpot_ms", "p99_itl_ms", "median_ttft_ms", "total_token_throughput", "duration"), 1.0)
    return {name: [{**zeros, figure: time} for time in found] for name, found in times.items()}


TIMES = {REFERENCE: [100.0, 110.0, 130.0], AGAIN: [104.0, 108.0, 120.0], "stock": [100.0, 99.0, 140.0]}
TIMES |= {COMPACT: [50.0, 60.0, 52.0]}


def _prefill(cost: YocoCost, length: int = 4096, **changes):
    head = {
        "measure": "prefill",
        "prompt_tokens": (length,),
        "output_tokens": 1,
        "concurrency": 1,
        "chunk_tokens": None,
        "hit_tokens": 0,
    }
    parts = {REFERENCE: {"producers": 4.0, "consumers": 5.0, "global_kv": 0.5, "total": 10.0}}
    return bench_report.point({**head, **changes}, _runs(TIMES), parts, _engines(), cost)


def test_ratios(cost):
    series = _prefill(cost)["series"]
    assert series[COMPACT]["best"] == 50 and series[COMPACT]["median"] == 52
    assert series[COMPACT]["speedup"] == pytest.approx(100 / 50)
    assert series[COMPACT]["paired"] == pytest.approx(100 / 50)  # of 2.0, 1.83 and 2.5
    assert series[COMPACT]["spread"] == pytest.approx(0.2)
    assert series[REFERENCE]["speedup"] == series[REFERENCE]["paired"] == 1


def test_decode_compares_steps_of_the_same_turn(cost):
    """A machine twice as slow in one step, and in one round, moves no ratio."""
    steps = {REFERENCE: [[10, 20, 10], [40, 40, 40]], AGAIN: [[10, 20, 10], [40, 40, 40]]}
    steps |= {"stock": [[11, 22, 11], [44, 44, 44]], COMPACT: [[10, 20, 30], [20, 40, 40]]}
    runs = {name: [{"decode_step_ms": found} for found in rounds] for name, rounds in steps.items()}
    head = {"measure": "decode", "prompt_tokens": (256,), "output_tokens": 4, "chunk_tokens": None, "hit_tokens": 0}
    series = bench_report.point(head, runs, {}, _engines(), cost)["series"]
    assert series["stock"]["ratios"] == pytest.approx([1 / 1.1] * 2) and series["stock"]["best"] == 11
    assert series[COMPACT]["ratios"] == [1, 1] and series[COMPACT]["median"] == 30


def test_chunks_are_compared_with_the_first_size(cost):
    first, many = (_prefill(cost, measure="chunks", chunk_tokens=size) for size in (4096, 256))
    many["series"][COMPACT]["ratios"] = [0.9 * ratio for ratio in first["series"][COMPACT]["ratios"]]
    # Off takes a tenth longer, compact a fifth: 1.1 / 1.2.
    first["parts"] = {REFERENCE: {"total": 2.0}, COMPACT: {"total": 1.0}}
    many["parts"] = {REFERENCE: {"total": 2.2}, COMPACT: {"total": 1.2}}
    change, interval, by_parts = bench_report._against_first([first, many], many, COMPACT)
    assert (str(change), interval) == ("-10.0%", None), "three rounds are too few for an interval"
    assert str(by_parts) == "-8.3%"
    assert bench_report._against_first([first, many], first, COMPACT) == (None, None, None)


def test_noise_is_that_of_equal_runs(cost):
    # best 100 / 104; in rounds 0.96, 1.02, 1.08
    assert _prefill(cost)["noise"] == pytest.approx(1 - 100 / 104)


def test_ceiling_scales_consumers_by_their_flops(cost):
    found = _prefill(cost)["ceilings"]
    assert found.keys() == {COMPACT}, "nothing else can become faster"
    share = cost.of(Prefill(4096, "compact", KEEP)).consumer_flops / cost.of(Prefill(4096)).consumer_flops
    assert 0 < share < 0.1
    assert found[COMPACT]["measured"] == pytest.approx(10 / (5 + 5 * share))
    assert found[COMPACT]["flops"] == pytest.approx(cost.speedup_ceiling(Prefill(4096, "compact", KEEP)))
    assert found[COMPACT]["rows"] == pytest.approx(16 * 4096 / (8 * 4096 + 8 * KEEP))


def test_ceiling_is_one_where_nothing_is_dropped(cost):
    found = _prefill(cost, length=KEEP)["ceilings"][COMPACT]
    assert found == {"measured": pytest.approx(1), "flops": pytest.approx(1), "rows": pytest.approx(1)}


def test_row_work_counts_decode_rows(cost):
    one = _prefill(cost, measure="traffic", output_tokens=1)["ceilings"][COMPACT]["rows"]
    many = _prefill(cost, measure="traffic", output_tokens=1001)["ceilings"][COMPACT]["rows"]
    assert many == pytest.approx((16 * 4096 + 16 * 1000) / (8 * 4096 + 8 * KEEP + 16 * 1000)) and many < one


def test_tables_name_what_was_reached(cost):
    point = _prefill(cost)
    results = {
        "model": "bench-8-8",
        "machine": {"architecture": "x", "cores": 2, "isa": "AVX2", "threads": 1, "torch": "2"},
        "engines": {REFERENCE: {"dtype": "float32", "runner": "v1", "backends": ["CPU_ATTN"]}},
        "clock": "cpu",
        "points": [point],
        "memory": None,
        "steps": None,
    }
    text = bench_report.summary(results)
    reached = 2 / point["ceilings"][COMPACT]["measured"]
    assert "2-core x CPU (AVX2), 1 thread(s); float32" in text.replace("bench-8-8 on a ", "")
    assert f"{reached:.1%}" in text and "2.00x" in text
    assert "hit" not in text.split("TTFT")[0], "columns that say nothing are left out"


def test_report_files(cost, tmp_path):
    pytest.importorskip("matplotlib")
    results = {
        "model": "bench-8-8",
        "machine": {"architecture": "x", "cores": 2, "isa": "AVX2", "threads": 1, "torch": "2"},
        "engines": {REFERENCE: {"dtype": "float32", "runner": "v1", "backends": ["CPU_ATTN"]}},
        "clock": "cpu",
        "points": [_prefill(cost)],
        "memory": None,
        "steps": None,
    }
    bench_report.write_report(tmp_path, results)
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["command"] == "bench" and document["points"][0]["series"][COMPACT]["best"] == 50
    assert "report.png" in (tmp_path / "report.md").read_text() and (tmp_path / "report.png").stat().st_size > 5000


def test_prompts_share_the_hit_and_nothing_else():
    prompts = Workload((30, 50), 1, 2, hit_tokens=20).prompts(1000)
    assert [len(p) for p in prompts] == [30, 50]
    assert prompts[0][:20] == prompts[1][:20] and prompts[0][20:30] != prompts[1][20:30]
    assert prompts == Workload((30, 50), 1, 2, hit_tokens=20).prompts(1000)
    for seed in (1, (0, 1)):
        assert prompts != Workload((30, 50), 1, 2, hit_tokens=20, seed=seed).prompts(1000)


def _arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["MODEL", *argv])


def test_points(cost):
    args = _arguments("--prompt-tokens", "4096,512", "--concurrency", "3")
    bench.take_defaults(args, bench.MEASURES)
    points = {m: [p.workload for p in bench.points_of(args, m, cost.config)] for m in bench.MEASURES}
    assert [w.prompt_tokens for w in points["prefill"]] == [(512,), (4096,)]
    assert [w.chunk_tokens for w in points["chunks"]] == [4096, 2048, 1024, 512, 256]
    assert [w.concurrency for w in points["decode"]] == [1, 8]
    assert points["traffic"][0].prompt_tokens == (512, 2048, 1024)
    assert [w.hit_tokens for w in points["hits"]] == [0, 1024, 2048, 3072]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--measure", "speed"], "--measure speed: must be of prefill, chunks"),
        (["--modes", "fast"], "--modes fast: must be of stock, off, mask, compact"),
        (["--prompt-tokens", "99999999"], "--prompt-tokens 99999999: must be at most 4032"),
        (["--measure", "hits", "--prompt-tokens", "64", "--hit-tokens", "9,64"], "--hit-tokens 64: must be less than"),
        (["--keep-tokens", "3"], "must be at least W + B"),
        (["--measure", "overhead", "--output-tokens", "2"], "--output-tokens 2: --measure overhead compares two"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: cannot be made"),
        (["--prompt-tokens", "9999"], "--prompt-tokens 9999: must be at most"),
        (["--measure", "chunk_loss", "--modes", "stock"], "--measure chunk_loss: nothing is saved without a mode"),
        (["--measure", "overhead", "--keep-tokens", "600", "--prompt-tokens", "512"], "K=600 takes prompts of 632"),
        (["--one-process", "--measure", "memory"], "--one-process: --measure memory and alternative need a process"),
        (["--measure", "alternative"], "--measure alternative: consumer layers of this model have a sliding window"),
    ],
)
def test_errors(arguments, message, capsys):
    assert main(["bench", "ced-tiny", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("flag", ["prompt", "chunk", "step", "output"])
def test_numbers_of_tokens(flag, capsys):
    _refused_by_the_parser(f"--{flag}-tokens", "0", capsys)


@pytest.mark.parametrize("flag", ["--repeats", "--batches", "--concurrency"])
def test_counts(flag, capsys):
    _refused_by_the_parser(flag, "0", capsys)


def _refused_by_the_parser(flag: str, value: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "ced-tiny", flag, value])
    assert stopped.value.code == 2
    assert f"error: argument {flag}: '{value}' must be a number of at least" in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.SPECIAL)
def test_flags_that_nothing_reads_are_refused(name, capsys):
    readers, _ = bench.SPECIAL[name]
    flag = f"--{name.replace('_', '-')}"
    assert main(["bench", "ced-tiny", "--measure", "prefill", flag, "7"]) == 2
    assert f"{flag} 7: read by --measure {readers[0]}" in capsys.readouterr().err
    for reader in readers:
        bench.take_defaults(_arguments(flag, "7"), ["prefill", reader])


@pytest.mark.parametrize("keep", [1, 24, 129, 225, 509])
def test_prompts_of_overhead_begin_a_block_at_s_keep(keep):
    length = aligned_prompt_tokens(keep, 225, 32)
    assert (length - keep) % 32 == 0 and length - keep >= 32
    assert length >= 225 and (length < 225 + 32 or length == keep + 32)


def test_chunks_of_a_short_prompt_are_measured_once():
    args = _arguments("--prompt-tokens", "5")
    assert bench._chunk_sizes(args) == [5, 3, 2, 1]
    args = _arguments("--prompt-tokens", "333", "--chunk-tokens", "1000,333,32")
    assert bench._chunk_sizes(args) == [333, 32]


def test_least_of_each_part():
    runs = [{"producers": 3.0, "consumers": 2.0, "total": 5.0}, {"producers": 2.5, "consumers": 4.0, "total": 6.5}]
    assert bench_report.least(runs) == {"producers": 2.5, "consumers": 2.0, "total": 4.5}


def test_room_where_nothing_is_generated():
    """The flag that would make room for a longer prompt is not read, so it takes none."""
    args = _arguments("--measure", "prefill", "--prompt-tokens", "4090")
    bench.take_defaults(args, ["prefill"])
    assert args.output_tokens == bench.NO_OUTPUT
    bench.take_defaults(other := _arguments(), ["prefill", "traffic"])
    assert other.output_tokens == 64


def test_overhead_follows_the_block_size_of_the_engine(monkeypatch):
    monkeypatch.setattr(bench, "engine_options", lambda flags: {"block_size": 64} if flags else {})
    lengths = [bench._overhead_prompt_tokens(_arguments(*flags), 129) for flags in ((), ("--engine-flags=x",))]
    assert [(n - 129) % 64 for n in lengths] == [32, 0]


@pytest.mark.parametrize(
    ("measures", "modes", "engines"),
    [
        ("prefill", ("off", "compact"), 3),
        ("prefill,memory", ("off", "compact"), 3 + 2),
        ("memory,overhead", ("off", "compact"), 3 + 2 + 2),
        ("prefill,hits", ("off", "stock", "mask"), 4 + 3),
        ("alternative", ("off", "compact"), 3 + 2),
    ],
)
def test_engines_share_a_gpu(measures, modes, engines):
    """What they take together stays below what vLLM would give to one; engines that are made later count."""
    args = _arguments("--measure", measures, "--prompt-tokens", "512")
    bench.take_defaults(args, measures.split(","))
    config = read_model_config(model_presets()["ced-tiny"])
    found = bench.engines_of(args, modes, "", config, resolve_keeps("min", config.topology()))
    assert {spec.gpu_share for spec in found.values()} == {0.85 / engines}


def test_overhead_is_that_of_pairs():
    """By hand: a drift of 10 % a pair and 1 % added."""
    without = [100 * 1.1**n for n in range(5)]
    rounds = [{"with_ms": [1.01 * ms for ms in without[:4]], "without_ms": without}]
    assert added(rounds) == [pytest.approx(0.01)]


def test_gain_of_traffic_without_its_decode_steps():
    """By hand: 10 s with 4 s of decode against 7 s with 4.4 s of it."""

    def series(duration: float, decode_ms: float) -> dict[str, object]:
        run = {"duration": duration, "decode_step_ms": [decode_ms / 2, decode_ms / 2], "output_throughput": 1.0}
        run |= {name: 1.0 for name in ("total_token_throughput", *bench_report.TRAFFIC_LATENCIES)}
        return {"runs": [run], "spread": 0.0, "speedup": 10 / duration}

    named = {"off": series(10, 4000), COMPACT: series(7, 4400)}
    head = {"prompt_tokens": [512], "concurrency": 8, "ceilings": {COMPACT: {"rows": 1.6}}, "series": named}
    heading, _, _, line = bench_report._traffic_table([head]).splitlines()
    assert heading.endswith("gain, prefill")
    assert line.split()[-4:] == ["1.43x", "1.60x", "89.3%", "2.31x"]


def test_chunk_loss_is_that_of_the_speedup():
    """By hand: 2x in one chunk; in four 1.9x, 5 % less, by the best times and in every round."""
    rounds = [{"all_ms": [200 * n, 209 * n], "kept_ms": [100 * n, 110 * n]} for n in (1.0, 1.5, 1.2, 1.1, 1.3, 1.4)]
    measured = {"engine": COMPACT, "prompt_tokens": 512, "chunk_tokens": [512, 128], "rounds": rounds}
    *_, whole, quarters = bench_report._chunk_loss_table([measured]).splitlines()
    assert whole.split() == ["512", "512", *COMPACT.split(), "200", "100", "2.00x", "-", "-", "-"]
    assert quarters.split()[-6:] == ["1.90x", "-5.0%", "-5.0%", "-5.0%", "to", "-5.0%"]


def test_interval_of_a_median() -> None:
    """By hand: of six values the extremes miss the median with probability 2 / 64; five are too few."""
    assert bench_report.median_interval([5, 1, 3, 2, 4]) is None
    assert bench_report.median_interval([5, 1, 3, 2, 4, 6]) == (1, 6)
    # 2 (1 + 9) / 512 = 3.9 %, and with the next pair 2 (1 + 9 + 36) / 512 = 18 %.
    assert bench_report.median_interval(range(9)) == (1, 7)
    draws = np.random.default_rng(0).exponential(size=(2000, 25))
    inside = [low <= np.log(2) <= high for low, high in map(bench_report.median_interval, draws.tolist())]
    assert 0.94 < np.mean(inside) < 0.98

"""``vllm-yoco bench`` end to end on a tiny model: every engine is served, and what it counts is right. No times."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from vllm_yoco.tools import bench_serve
from vllm_yoco.tools.bench import MIXED_SHARES
from vllm_yoco.tools.bench_serve import Serving, Workload
from vllm_yoco.tools.cli import main

KEEP = 25  # W + B of ced-tiny
COMPACT = f"compact K={KEEP}"

UNKNOWN = "--engine-flags='--bogus 3': vLLM does not take them: unrecognized arguments: --bogus 3"
CACHING = "--engine-flags='--enable-prefix-caching': equal prompts"


@pytest.mark.slow
def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    code = main(
        [
            "bench",
            "ced-tiny",
            *("--measure", "prefill,decode,traffic,memory,steps,overhead,chunk_loss", "--modes", "stock,off,compact"),
            *("--prompt-tokens", "64,640", "--concurrency", "32", "--batches", "1", "--output-tokens", "4"),
            *("--step-tokens", "160", "--repeats", "1", "--runner", "v1", "--json", str(tmp_path / "bench.json")),
        ]
    )
    assert code == 0, capsys.readouterr().err
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["engines"].keys() == {"off", "off again", "stock", COMPACT}
    prefills, (decode, traffic) = document["points"][:2], document["points"][2:]
    for point, length in zip(prefills, (64, 640), strict=True):
        assert point["series"].keys() == {"off", "off again", "stock", COMPACT}
        for series in point["series"].values():
            (run,) = series["runs"]
            assert (run["total_input"], run["total_output"], run["num_steps"]) == (length, 1, 1)
            assert run["median_ttft_ms"] > 0
        for seconds in point["parts"].values():
            assert min(seconds.values()) >= 0
            assert sum(seconds.values()) == pytest.approx(2 * seconds["total"])
        assert point["ceilings"][COMPACT]["rows"] > 1
    for series in traffic["series"].values():
        (run,) = series["runs"]
        assert (run["total_input"], run["total_output"]) == (640 * sum(MIXED_SHARES) * 4, 32 * 4)
        assert run["p99_itl_ms"] >= run["median_itl_ms"] > 0

    for series in decode["series"].values():
        (run,) = series["runs"]
        assert len(run["decode_step_ms"]) == 3 and min(run["decode_step_ms"]) > 0
        assert run["median_itl_ms"] == pytest.approx(series["median"], rel=0.01)

    # The largest has 32 K rows, more than the 640 of the engine's own steps.
    steps = document["steps"]
    assert {(s["requests"], s["prompt_tokens"], s["kind"]) for s in steps} == set(
        itertools.product((1, 32), (64, 640), ("prefill", "decode"))
    )
    assert all(s["plugin"] >= s["plugin_best"] > 0 for s in steps)

    overhead = document["overhead"]
    kinds = [("off", "prefill"), ("off", "decode"), (COMPACT, "decode")]
    assert [(o["engine"], o["kind"], o["prompt_tokens"], o["batch"]) for o in overhead] == [
        (*kind, 249, 1) for kind in kinds
    ]
    for found in overhead:
        (round_,) = found["rounds"]
        counts = (4, 4) if found["kind"] == "prefill" else (2, 1)  # three decode steps, the first one with
        assert (len(round_["with_ms"]), len(round_["without_ms"])) == counts

    (loss,) = document["chunk_loss"]
    assert (loss["engine"], loss["chunk_tokens"]) == (COMPACT, [640, 320, 160, 80, 40])
    assert all(len(loss["rounds"][0][key]) == 5 for key in ("kept_ms", "all_ms"))

    engines = document["memory"]["engines"]
    off, compact = (engines[name]["admission"] for name in ("off", COMPACT))
    for chunk in ("640", "160"):
        assert compact[chunk]["pool_blocks"] == off[chunk]["pool_blocks"]
        assert compact[chunk]["peak_blocks"] < off[chunk]["peak_blocks"]
        assert compact[chunk]["admitted"] >= off[chunk]["admitted"] > 1
    assert all(found["peak"]["peak"] >= found["peak"]["before"] > 0 for found in engines.values())


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("bench", "--bogus 3", UNKNOWN),
        ("bench", "--block-size x", "--engine-flags='--block-size x': vLLM does not take them: argument --block-size"),
        ("bench", "--seed 1 --enable-prefix-caching", CACHING),
        ("check", "--enable-prefix-caching", CACHING),
        ("error", "--bogus 3", UNKNOWN),
    ],
)
def test_engine_flags_are_checked_before_an_engine_starts(command, flags, message, capsys):
    assert main([command, "ced-tiny", f"--engine-flags={flags}"]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


class Machine:
    """A clock that moves only when somebody computes, and an engine that takes a step of one second per request."""

    def __init__(self) -> None:
        self.now = 0.0

    def engine(self) -> SimpleNamespace:
        requests: dict[str, int] = {}

        def add_request(name, prompt, params):
            self.now += 0.25
            requests[name] = 0

        def step():
            self.now += len(requests)
            requests.update({name: count + 1 for name, count in requests.items()})
            answers = [
                SimpleNamespace(
                    request_id=n,
                    outputs=[SimpleNamespace(token_ids=[0] * c)],
                    finished=c == 3,
                    num_cached_tokens=2 if c > 1 else None,
                )
                for n, c in requests.items()
            ]
            for answer in answers:
                if answer.finished:
                    del requests[answer.request_id]
            return answers

        return SimpleNamespace(add_request=add_request, step=step)


def test_only_an_engine_s_own_steps_count(monkeypatch):
    machine = Machine()
    monkeypatch.setitem(bench_serve.CLOCKS, "fake", lambda: machine.now)
    loads = [Workload((4,) * n, 3, n, clock="fake") for n in (1, 2)]
    serving = [Serving(machine.engine(), load.prompts(9), load) for load in loads]
    for step in range(3):
        assert {s.step() for s in serving} == {step < 2}
        machine.now += 100
    for found, size in zip([s.metrics() for s in serving], (1, 2), strict=True):
        assert found["num_steps"] == 3 and found["total_output"] == 3 * size
        assert found["duration"] == size * 3.25
        assert found["cached_tokens"] == size * 2
        assert found["mean_ttft_ms"] == size * 1250
        assert found["decode_step_ms"] == [size * 1000] * 2
        assert found["median_itl_ms"] == size * 1000

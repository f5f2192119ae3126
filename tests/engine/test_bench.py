"""``vllm-yoco bench`` end to end on a tiny model: every engine is served, and what it counts is right. No times."""

from __future__ import annotations

import json

import pytest

from vllm_yoco.tools.cli import main

KEEP = 25  # W + B of ced-tiny
COMPACT = f"compact K={KEEP}"


@pytest.mark.slow
def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    code = main(
        [
            "bench",
            "ced-tiny",
            *("--measure", "prefill,traffic,memory", "--modes", "stock,off,compact"),
            *("--prompt-tokens", "64,640", "--concurrency", "3", "--batches", "1", "--output-tokens", "4"),
            *("--step-tokens", "160", "--repeats", "1", "--runner", "v1", "--json", str(tmp_path / "bench.json")),
        ]
    )
    assert code == 0, capsys.readouterr().err
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["engines"].keys() == {"off", "stock", COMPACT}
    prefills, traffic = document["points"][:2], document["points"][2]
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
        assert (run["total_input"], run["total_output"]) == (80 + 320 + 160, 12)
        assert run["p99_itl_ms"] >= run["median_itl_ms"] > 0

    engines = document["memory"]["engines"]
    off, compact = (engines[name]["admission"] for name in ("off", COMPACT))
    for chunk in ("640", "160"):
        assert compact[chunk]["pool_blocks"] == off[chunk]["pool_blocks"]
        assert compact[chunk]["peak_blocks"] < off[chunk]["peak_blocks"]
        assert compact[chunk]["admitted"] >= off[chunk]["admitted"] > 1
    assert all(found["peak"]["peak"] >= found["peak"]["before"] > 0 for found in engines.values())

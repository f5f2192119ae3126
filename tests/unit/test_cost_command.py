"""``vllm-yoco cost``: the recorded tables, tables and plot of a model, exit codes; and the shared output."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_inspect import FLASH, FLASH_SIZES
from vllm_yoco.model_cost import Prefill, YocoCost
from vllm_yoco.models.checkpoint import read_model_config
from vllm_yoco.presets import model_presets
from vllm_yoco.tools import cli, cost, report

DATA = Path(__file__).parents[1] / "data" / "reference"
LAB: dict[str, Any] = json.loads((DATA / "labs.json").read_text())["lab20"]
MODES = ("off", "mask", "compact")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document."""
    code = cli.main(["cost", *argv, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["cost", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


# --- without a model ---


def test_recorded_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, results = run(capsys)
    assert code == 0
    situations = results["situations"]
    assert (situations["window"], situations["keep_tokens"]) == (LAB["window"], LAB["keep"])
    table = {
        case["name"]: {key: value for key, value in case.items() if key != "name"}
        | {mode: "{rows}/{pairs}".format(**case[mode]) for mode in MODES}
        for case in situations["cases"]
    }
    assert table == LAB["table"]

    recorded = LAB["four_chunks_L1024_K140_W128"]
    four, one = results["chunks"]["cases"]
    assert (four["chunk_tokens"], one["chunk_tokens"]) == (256, 1024)
    assert four["compact"]["rows"] == recorded["compact_rows"]
    for mode in MODES:
        assert four[mode]["pairs"] == recorded[f"{mode}_pairs"]
        assert one[mode]["pairs"] == [recorded["one_chunk_pairs"][mode]]
    assert one["compact"]["rows"] == [recorded["one_chunk_rows"]]

    equal = results["equal_cost"]
    assert (equal["producers"], equal["consumers"], equal["keep_tokens"]) == (20, 20, 140)
    rows = {
        str(case["prompt_tokens"]): {
            "full": case["off"],
            "compact": case["compact"],
            "ratio": f"{case['ratio']:.4f}",
        }
        for case in equal["cases"]
    }
    assert rows == LAB["equal_cost_20_plus_20_keep_140"]
    assert results["enumeration"] == {"cases": LAB["brute_force_cases"], "mismatches": 0}


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cost"]) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert lines["long"][-3:] == ["12/33", "12/9", "4/9"]
    assert lines["clipped"][-3:] == ["4/9", "4/0", "1/0"]
    assert lines["crossing"][-3:] == ["4/12", "4/3", "2/3"]
    assert lines["256"][1:4] == ["1,024/122,944", "1,024/9,792", "143/9,792"]
    assert lines["16,384"] == ["16,384", "655,360", "330,480", "0.5043"]
    assert "1,024   40,960   23,280  0.5684" in text
    assert "8,910 cases, 0 mismatches" in text


def test_a_mismatch_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = cost.query_rows_and_pairs
    monkeypatch.setattr(
        cost, "query_rows_and_pairs", lambda *, window, **rest: original(window=window + 1, **rest)
    )
    code, results = run(capsys)
    assert code == 1 and results["enumeration"]["mismatches"] > 0


def test_options_of_a_model_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--keep-tokens", "140", "--plot", "x.png")
    assert "--keep-tokens, --plot: only with MODEL" in error


# --- with a model ---


def test_points_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--prompt-tokens",
        "64",
        "4096",
        "--keep-tokens",
        "min",
        "40",
        "exact",
        "--chunk-tokens",
        "all",
        "32",
    )
    code, results = run(capsys, "ced-tiny", *argv)
    assert code == 0
    model = YocoCost(read_model_config(model_presets()["ced-tiny"]))
    points = results["points"]
    keys = [(p["chunk_tokens"], p["keep_tokens"], p["prompt_tokens"]) for p in points]
    assert keys == [(c, k, n) for c in (None, 32) for k in (25, 40, 93) for n in (64, 4096)]
    for p in points:
        prefill = Prefill(p["prompt_tokens"], "compact", p["keep_tokens"], p["chunk_tokens"])
        assert p["speedup_ceiling"] == model.speedup_ceiling(prefill)
        assert p["compact"]["total_flops"] == model.of(prefill).total_flops
        assert p["compact"] == vars(model.of(prefill)) | {"total_flops": p["compact"]["total_flops"]}
        assert p["off"]["consumer_rows"] == p["mask"]["consumer_rows"] == p["prompt_tokens"]
    assert results["flops_unit"] == "FLOPs (a multiply-add is 2)"


def test_text_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["cost", "v41-flash-shape", "--keep-tokens", "140", "--prompt-tokens", "1024", "16384"]) == 0
    )
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows[0][:5] == ["1,024", "140", "all", "40,960", "23,280"]
    assert rows[1][:5] == ["16,384", "140", "all", "655,360", "330,480"]


def test_equal_values_of_k_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    _, results = run(capsys, "yoco", "--prompt-tokens", "64")
    assert [p["keep_tokens"] for p in results["points"]] == [1]


def test_deepseek_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**FLASH, **FLASH_SIZES, "quantization_config": {"quant_method": "fp8"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, results = run(capsys, str(tmp_path), "--keep-tokens", "140", "--prompt-tokens", "1024")
    (point,) = results["points"]
    assert code == 0 and results["family"] == "deepseek_v41"
    assert point["compact"]["total_flops"] == 20924486115328
    assert point["compact"]["layer_rows"] == 23_280
    assert "FP8-equivalent" in results["flops_unit"]
    path.write_text(json.dumps(FLASH))
    assert "FLOPs need sizes that the config lacks" in refused(capsys, str(path))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("ced", "--keep-tokens", "140", "128"), "must be at least W + B = 128 + 1 = 129"),
        (("nothing-here",), "neither a file nor a preset"),
    ],
)
def test_refusals(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *argv)


# --- plot ---


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ceiling.png"
    argv = ("--prompt-tokens", "64", "4096", "--chunk-tokens", "all", "128", "--plot", str(file))
    code, results = run(capsys, "ced-tiny", *argv)
    assert code == 0 and results["plot"] == str(file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_curves() -> None:
    model = YocoCost(read_model_config(model_presets()["ced-tiny"]))
    points = [
        cost.point(model, n, keep, chunk) for chunk in (None, 32) for keep in (25, 93) for n in (20, 64, 512)
    ]
    curves = cost.plot_curves(points)
    labels = [[curve.label for curve in curves if curve.panel == panel] for panel in range(3)]
    assert labels == [
        ["K = 25, C = all", "K = 93, C = all", "K = 25, C = 32", "K = 93, C = 32"],
        ["L = 64, C = all", "L = 512, C = all", "L = 64, C = 32", "L = 512, C = 32"],
        ["K = 25, L = 512", "K = 93, L = 512"],
    ]
    for curve in curves:
        assert curve.x == sorted(set(curve.x)) and len(curve.x) == len(curve.prefills)
        varied = ("num_prompt_tokens", "keep_tokens", "chunk_tokens")[curve.panel]
        assert [getattr(prefill, varied) for prefill in curve.prefills] == curve.x
        assert curve.panel == 2 or {prefill.chunk_tokens for prefill in curve.prefills} == {curve.chunk}
    assert curves[0].x[0] == 20 and curves[0].x[-1] == 512


def test_one_prompt_shorter_than_k_can_be_drawn(tmp_path: Path) -> None:
    assert cli.main(["cost", "ced-tiny", "--prompt-tokens", "3", "--plot", str(tmp_path / "x.png")]) == 0


def test_plot_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refused(capsys, "ced-tiny", "--plot", str(tmp_path / "x.png"))
    assert "--plot needs matplotlib" in error and "vllm-yoco[plot]" in error


# --- shared output ---


def test_table_aligns_and_formats() -> None:
    text = report.table(
        ("name", "n", "share"), [("a", 12345, report.percent(0.5)), ("long", None, None)], "T"
    )
    assert text.split("\n") == [
        "T",
        "name       n  share",
        "----  ------  -----",
        "a     12,345  50.0%",
        "long       -      -",
    ]
    assert report.table(("a", "b"), [(True, 1.5), (False, 2)]).split("\n")[2:] == ["yes  1.500", " no      2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12.5, "12.5"), (999, "999"), (1000, "1.000 k"), (999_960, "1.000 M"), (36.81e12, "36.81 T")],
)
def test_si(value: float, text: str) -> None:
    assert report.si(value) == text


def test_ranges() -> None:
    assert report.ranges([0, 1, 2, 3, 6]) == "0-3,6"
    assert report.ranges(iter(())) == "none"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        items = []
        for item in report.progress([1, 2, 3], "counting"):
            items.append(item)
            time.sleep(0.55)
        assert items == [1, 2, 3]
        assert ("counting" in stream.getvalue()) is shown


def test_progress_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(report.progress([1, 2], "counting")) == [1, 2]

"""``vllm-yoco inspect``: what it says of presets and of DeepSeek-V4.1, its JSON, exit codes and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_yoco.models.checkpoint import read_model_config
from vllm_yoco.presets import model_presets
from vllm_yoco.tools import cli

DATA = Path(__file__).parents[1] / "data"
MODELS = DATA / "models"
PARTITIONS: dict[str, Any] = json.loads((DATA / "reference" / "cache_partition.json").read_text())
FLASH: dict[str, Any] = {
    **PARTITIONS["models"]["v41_flash"],
    "engram_layer_ids": [1, 14],
    "dspark_target_layer_ids": [37, 38, 39],
}
FLASH_SIZES: dict[str, Any] = {
    **{"hidden_size": 5120, "vocab_size": 129280, "moe_intermediate_size": 2304, "num_experts_per_tok": 6},
    **{"n_shared_experts": 1, "n_routed_experts": 384, "num_attention_heads": 64, "q_lora_rank": 1280},
    **{"o_lora_rank": 1024, "o_groups": 8, "hc_mult": 4, "engram_n_heads": 8, "engram_head_dim": 256},
    "engram_max_ngram_size": 4,
}


def inspect(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document."""
    code = cli.main(["inspect", *argv, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that ends with 2 and prints nothing else."""
    assert cli.main(["inspect", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def write(tmp_path: Path, **changes: Any) -> str:
    """A V4.1-Flash config.json with the given text fields replaced, or left out if they are None."""
    text = {key: value for key, value in {**FLASH, **changes}.items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v41", "text_config": text}))
    return str(path)


# --- DeepSeek-V4.1 ---


def test_v41_flash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, **FLASH_SIZES)
    code, report = inspect(capsys, str(tmp_path), "--keep-tokens", "140", "--prompt-tokens", "1024", "16384")
    assert code == 0 and report["notes"] == []
    topology = report["topology"]
    assert (topology["boundary"], topology["num_layers"], topology["window"]) == (20, 40, 128)
    assert topology["kv_sources"] == [
        {"source": 2, "layers": [2, 3, 4, 5, 6, 7]},
        {"source": 8, "layers": [8, 9, 10, 11, 12, 13]},
        {"source": 14, "layers": [14, 15, 16, 17, 18, 19]},
        {"source": 20, "layers": list(range(20, 40))},
    ]
    assert [entry["source"] for entry in topology["index_sources"]] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert topology["index_key_sources"] == topology["kv_sources"]
    assert (topology["candidate_source"], topology["draft_layers"]) == (20, [40, 41, 42])
    assert report["placement"] == {
        "draft_targets": {"layers": [37, 38, 39], "ok": True, "reason": None},
        "engram_layers": {"layers": [1, 14], "ok": True, "reason": None},
    }
    assert report["truncation"] == {
        "mode": "compact",
        "keep_tokens": 140,
        "keep_tokens_rule": "given",
        "lossless": False,
        "min": 134,
        "exact": 2541,
        "num_speculative_tokens": 5,
        "max_backtracking": 6,
    }
    assert report["state"] == {
        "ring_tokens": 134,
        "ring_bytes": 70752,
        "stored_rings": 20,
        "dropped_rings": 23,
        "persisted_bytes": 1_415_040,
        "total_bytes": 3_128_928,
    }
    work = {entry["prompt_tokens"]: entry for entry in report["work"]}
    assert (work[1024]["layer_rows_off"], work[1024]["layer_rows"]) == (40_960, 23_280)
    assert (work[16384]["layer_rows_off"], work[16384]["layer_rows"]) == (655_360, 330_480)
    assert work[1024]["layer_rows_removed"] == 1 - 23_280 / 40_960


def test_v41_flash_bytes_add_up_to_the_recorded_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = inspect(capsys, write(tmp_path), "--prompt-tokens", "1000")
    kv = report["kv"]
    groups = {group.pop("group"): group for group in kv["groups"]}
    assert groups["producer sliding"]["bytes_per_request"] == 1_415_040
    dropped = groups["consumer SWA"], groups["draft SWA"]
    recorded = PARTITIONS["results"]["v41_flash | compact/extra_0"]
    assert (
        sum(group["bytes_per_request"] for group in dropped) == recorded["swa_drop_total_bytes_inference_pad"]
    )
    assert [group["persisted"] for group in dropped] == [False, False]
    assert (groups["producer compressed"]["layers"], groups["global KV"]["layers"]) == ([2, 8, 14], [20])
    assert kv["persisted_bytes_per_token"] == 3 * 22784 // 128 + 45568 // 128
    # 1,000 tokens take 8 blocks.
    assert kv["persisted_bytes_per_request"] == 8 * recorded["kv_block_bytes"] + 1_415_040
    assert kv["dropped_bytes_per_request"] == 3_128_928 - 1_415_040


def test_text_of_v41_flash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", write(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in (
        "boundary at 20",
        "20 read by 20-39",
        "0 x2, 2 x18, 1 x20, 0 x3",
        "min 134, exact 2,541",
        "1,415,040 of 3,128,928 bytes persisted; 20 rings stored, 23 dropped",
        "FLOPs need sizes that the config lacks: hidden_size",
    ):
        assert part in text


def test_without_sizes_only_the_flops_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = inspect(capsys, write(tmp_path))
    assert code == 0
    assert report["flops_unit"] is None and {entry["flops"] for entry in report["work"]} == {None}
    assert report["work"][-1]["layer_rows_removed"] > 0.49
    assert report["notes"] == [
        "FLOPs need sizes that the config lacks: hidden_size, vocab_size, moe_intermediate_size,"
        " num_experts_per_tok, n_shared_experts, n_routed_experts, num_attention_heads, q_lora_rank,"
        " o_lora_rank, o_groups, engram_n_heads, engram_head_dim, engram_max_ngram_size"
    ]


def test_unknown_cache_entries_are_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = inspect(capsys, write(tmp_path, head_dim=256))
    assert code == 0 and report["kv"] is None and report["state"] is None
    assert any("known for head_dim 512" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        (
            {"dspark_target_layer_ids": [19, 20]},
            "draft_targets",
            "[19] lie below the boundary 20 and [20] at",
        ),
        (
            {"engram_layer_ids": [1, 20]},
            "engram_layers",
            "Engram layers [20] lie at or above the boundary 20",
        ),
    ],
)
def test_placement_is_refused_in_compact_only(
    changes: dict[str, Any], check: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, **changes)
    code, report = inspect(capsys, path)
    assert code == 1
    verdicts = {name: verdict["ok"] for name, verdict in report["placement"].items()}
    assert verdicts == {"draft_targets": True, "engram_layers": True} | {check: False}
    assert message in report["placement"][check]["reason"]
    assert cli.main(["inspect", path]) == 1
    assert f"refused: {report['placement'][check]['reason']}" in capsys.readouterr().out
    for mode in ("mask", "off"):
        assert inspect(capsys, path, "--truncation", mode)[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": None}, "compress_ratios missing"),
        ({"compress_ratios": [0, 0] + [2] * 38 + [0] * 3}, "no consumer boundary"),
        ({"compress_ratios": [0, 0] + [4] * 18 + [1] * 20 + [0] * 3}, "layer 2: compression ratio 4"),
        ({"num_nextn_predict_layers": 2}, "43 entries, expected 40 layers + 2 draft"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "a share-KV segment may not cross the boundary"),
        ({"kv_source_layer_ids": [2, 8, 14, 40]}, "ascending layers in 0..39"),
        ({"index_source_layer_ids": [2, 14, 20]}, "layer 8 starts a new index_k_source segment"),
        ({"index_k_source_layer_ids": [2, 14, 20]}, "layer 8 starts a new kv_source segment"),
        ({"candidate_source_layer_id": -1}, "null switches the filter off"),
        ({"candidate_source_layer_id": 22}, "its own candidate source and an index source"),
        ({"candidate_topk_blocks": 8}, "too few candidates"),
        ({"dspark_target_layer_ids": [40]}, "dspark_target_layer_ids [40] must be layers in 0..39"),
        ({"engram_layer_ids": [-1]}, "engram_layer_ids [-1] must be layers in 0..39"),
        ({"compress_ratios": 3}, "int"),
        (PARTITIONS["models"]["all_ratio_1"] | {"engram_layer_ids": []}, "at least one is needed"),
    ],
)
def test_broken_v41_topology_is_one_error(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, **changes)
    error = refused(capsys, path)
    assert error.startswith(f"vllm-yoco: error: {path}: ") and message in error


def test_v41_fixes_its_cache_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fixes its cache formats" in refused(capsys, write(tmp_path), "--kv-cache-dtype", "fp8")


# --- The yoco family ---


@pytest.mark.parametrize("name", ["yoco", "ced", "ced-tiny", "v41-flash-shape"])
def test_presets(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = inspect(capsys, name)
    config = read_model_config(model_presets()[name])
    topology = config.topology()
    assert code == 0 and report["model"] == str(model_presets()[name])
    assert report["topology"]["boundary"] == topology.boundary
    assert report["topology"]["consumers"] == list(range(topology.boundary, topology.num_layers))
    assert [e["source"] for e in report["topology"]["kv_sources"]] == list(topology.kv_source_layers)
    readers = [layer for e in report["topology"]["kv_sources"] for layer in e["layers"]]
    assert readers == report["topology"]["consumers"]
    assert report["placement"]["draft_targets"] == {"layers": [], "ok": True, "reason": None}


@pytest.mark.parametrize(
    ("argv", "truncation"),
    [
        ((), (129, 129, 2541, "min", False)),
        (("--num-speculative-tokens", "5"), (134, 134, 2541, "min", False)),
        (("--keep-tokens", "exact"), (2541, 129, 2541, "exact", True)),
        (("--keep-tokens", "140", "--truncation", "mask"), (140, 129, 2541, "given", False)),
        (("--truncation", "off"), (129, 129, 2541, "min", True)),
    ],
)
def test_keep_tokens(argv: tuple[str, ...], truncation: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = inspect(capsys, "v41-flash-shape", *argv)
    names = ("keep_tokens", "min", "exact", "keep_tokens_rule", "lossless")
    assert tuple(report["truncation"][name] for name in names) == truncation


def test_equal_cost_rows_of_the_flash_shape(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = inspect(
        capsys, "v41-flash-shape", "--keep-tokens", "140", "--prompt-tokens", "64", "1024", "16384"
    )
    rows = [(entry["layer_rows_off"], entry["layer_rows"]) for entry in report["work"]]
    assert rows == [(2_560, 2_560), (40_960, 23_280), (655_360, 330_480)]
    assert report["work"][0]["flops_removed"] == 0 < report["work"][1]["flops_removed"] < 0.5


def test_kv_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """float32, 2 KV heads of 32: 512 bytes per token and layer; a window of 24 and B = 3."""
    path = str(MODELS / "sliding-producers.json")
    argv = (path, "--prompt-tokens", "100", "--num-speculative-tokens", "2")
    _, report = inspect(capsys, *argv)
    assert report["kv"] == {
        "dtype": "float32",
        "prompt_tokens": 100,
        "groups": [
            group("producer full", [1], 512, None, 51_200, True),
            group("producer sliding", [0, 2], 1024, 27, 27_648, True),
            group("global KV", [3], 512, None, 51_200, True),
            group("consumer SWA", [3, 5], 1024, 27, 27_648, False),
        ],
        "persisted_bytes_per_token": 1024,
        "persisted_bytes_per_request": 130_048,
        "dropped_bytes_per_request": 27_648,
    }
    assert report["topology"]["sliding_producers"] == [0, 2]
    _, short = inspect(
        capsys, path, "--prompt-tokens", "10", "--kv-cache-dtype", "fp8", "--truncation", "off"
    )
    assert short["kv"]["dropped_bytes_per_request"] == 0, "mode off persists consumer SWA as well"
    assert short["kv"]["persisted_bytes_per_request"] == 10 * (1 + 2 + 1 + 2) * 128


def group(name: str, layers: list[int], *sizes: Any) -> dict[str, Any]:
    names = ("bytes_per_token", "held_tokens", "bytes_per_request", "persisted")
    return {"group": name, "layers": layers, **dict(zip(names, sizes, strict=True))}


def test_a_saved_checkpoint_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read_model_config(MODELS / "no-swa.json").save_pretrained(tmp_path)
    code, report = inspect(capsys, str(tmp_path))
    assert code == 0 and report["truncation"]["keep_tokens"] == 1 and report["truncation"]["lossless"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("ced", "--keep-tokens", "128"), "must be at least W + B = 128 + 1 = 129"),
        (("ced", "--keep-tokens", "130", "--num-speculative-tokens", "2"), "= 128 + 3 = 131"),
        (("nothing-here",), "neither a file nor a preset; presets are"),
        ((str(DATA),), "the directory has no config.json"),
        ((str(DATA / "reference" / "README.md"),), "not a readable JSON file"),
    ],
)
def test_wrong_settings(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1], "must hold a JSON object, not list"),
        ({"model_type": "llama"}, "model_type 'llama' has no known consumer layers"),
        ({"model_type": "deepseek_v4", "num_hidden_layers": 43}, "not a DeepSeek-V4.1 text config"),
        ({"n_prefill_layer": 4, "kv_source_layers": [5]}, "a share-KV segment may not cross the boundary"),
        ({"n_prefill_layer": 0}, "at least one is needed"),
        ({"n_prefill_layer": 8}, "the model has no consumer layers"),
        ({"consumer_swa": [4]}, "unknown keys ['consumer_swa']"),
    ],
)
def test_other_configs(config: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    assert message in refused(capsys, str(path))


def test_a_model_without_consumers_can_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"n_prefill_layer": 8}))
    code, report = inspect(capsys, str(path), "--truncation", "off")
    assert code == 0 and report["topology"]["consumers"] == [] == report["topology"]["kv_sources"]
    assert {entry["layer_rows_removed"] for entry in report["work"]} == {0}


@pytest.mark.parametrize("value", ["0", "-1", "some"])
def test_malformed_numbers(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--keep-tokens", "--prompt-tokens"):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["inspect", "ced", f"{option}={value}"])
        assert exit_info.value.code == 2 and option in capsys.readouterr().err


# --- Output ---

SCHEMA = {
    "command": str,
    "version": str,
    "model": str,
    "family": str,
    "notes": list,
    "topology": dict,
    "placement": dict,
    "truncation": dict,
    "kv": dict,
    "state": type(None),
    "flops_unit": str,
    "work": list,
}


def test_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = inspect(capsys, "ced-tiny")
    assert {key: type(value) for key, value in report.items()} == SCHEMA
    assert list(report["topology"]) == [
        "num_layers",
        "boundary",
        "producers",
        "consumers",
        "sliding_producers",
        "consumer_swa_layers",
        "window",
        "swa_share_hidden",
        "kv_sources",
    ]
    assert list(report["work"][0]) == [
        "prompt_tokens",
        "layer_rows_off",
        "layer_rows",
        "layer_rows_removed",
        "flops_off",
        "flops",
        "flops_removed",
    ]
    assert [entry["prompt_tokens"] for entry in report["work"]] == [128, 512, 1024, 4096]


def test_json_goes_beside_the_tables_or_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert cli.main(["inspect", "ced", "--json", str(file)]) == 0
    assert "KV sources" in capsys.readouterr().out
    assert json.loads(file.read_text()) == inspect(capsys, "ced")[1]


def test_needs_no_vllm() -> None:
    code = (
        "import sys; from vllm_yoco.tools.cli import main; code = main(['inspect', 'ced-tiny']);"
        "sys.exit(code or 'vllm' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

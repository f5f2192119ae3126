"""The two lab examples compute exactly the recorded numbers; see tests/data/reference/README.md."""

from __future__ import annotations

import importlib.util
import json
import sys
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_yoco.plan import Chunk, exact_keep_tokens

ROOT = Path(__file__).parents[2]
LABS: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "reference" / "labs.json").read_text())


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


replay = example("lab_replay")
cost = example("lab_replay_cost")

LAB19, LAB20 = LABS["lab19"], LABS["lab20"]
INPUTS, NEXT = LAB19["inputs"], LAB19["next_input"]


def text(value: Any) -> Any:
    """Fractions as the recording spells them."""
    if isinstance(value, list):
        return [text(item) for item in value]
    return str(value)


@pytest.mark.parametrize("name", LAB19["table"])
def test_shared_and_per_layer_table(name: str) -> None:
    model = replay.Model(LAB19["window"], LAB19["depth"], shared=name == "shared")
    full = replay.prefill(model, INPUTS)
    suffix = replay.prefill(model, [INPUTS[position] for position in LAB19["suffix_positions"]])
    assert {
        "last_full": text(full.last),
        "last_suffix": text(suffix.last),
        "next_full": text(replay.decode(model, full.stores, NEXT)),
        "next_suffix": text(replay.decode(model, suffix.stores, NEXT)),
        "stores_full": text(full.stores),
        "stores_suffix": text(suffix.stores),
        "layer_outputs_full": text(full.outputs),
        "layer_outputs_suffix": text(suffix.outputs),
    } == LAB19["table"][name]


def test_headline_numbers() -> None:
    """22/22 and 25/25 with shared KV; 28 against 57/2 and 32 against 193/6 with per-layer KV."""
    for shared, full_numbers, replayed in (
        (True, (22, 25), (22, 25)),
        (False, (28, 32), (Fraction(57, 2), Fraction(193, 6))),
    ):
        model = replay.Model(3, 2, shared)
        full = replay.prefill(model, INPUTS)
        assert (full.last, replay.decode(model, full.stores, NEXT)) == full_numbers
        got = replay.compare(model, INPUTS, 3, NEXT)
        assert (got["last"], got["next"]) == replayed


@pytest.mark.parametrize("rows", LAB19["per_layer_replay_by_length"])
def test_replay_by_length(rows: str) -> None:
    got = replay.compare(replay.Model(LAB19["window"], LAB19["depth"]), INPUTS, int(rows), NEXT)
    first = got["first_diff"]
    assert {
        "last": text(got["last"]),
        "next": text(got["next"]),
        "last_exact": got["last_exact"],
        "next_exact": got["next_exact"],
        "kv_exact": got["kv_exact"],
        "first_diff_layer_position": None if first is None else list(first),
        "layer2_kv": text(got["last_layer_kv"]),
    } == LAB19["per_layer_replay_by_length"][rows]


def test_span_is_enough_and_one_row_less_is_not() -> None:
    span = LAB19["span"]
    assert list(replay.DECODE_INPUTS) == span["decode_inputs_checked"]
    total = 0
    for window, depth in product((2, 3, 4), (1, 2, 3)):
        check = replay.check_span(window, depth)
        recorded = span["per_case"][f"W{window}_D{depth}"]
        assert recorded == {
            "R": check.span,
            "inputs": check.inputs,
            "inputs_broken_by_R_minus_1": check.broken_by_one_row_less,
        }
        assert check.broken_by_one_row_less > 0
        total += check.inputs
    assert len(span["per_case"]) == 9
    assert total == span["cases"] == 5456


def test_span_of_large_models() -> None:
    assert replay.replay_span(128, 20) == LAB19["span"]["R_20_layers_W128"] == 2541
    for window, depth in product((2, 16, 128), (2, 5, 20)):
        assert replay.replay_span(window, depth) == exact_keep_tokens(
            window, 1, depth, swa_share_hidden=False
        )


def test_span_per_layer() -> None:
    recorded = LABS["exercise1_W5_D4"]
    intervals = replay.kv_intervals(5, 4)
    assert replay.replay_span(5, 4) == recorded["R"]
    assert [list(interval) for interval in intervals] == recorded["kv_input_interval_per_layer_1_to_4"]
    rows = [last - first + 1 for first, last in intervals]
    assert rows == recorded["kv_rows_per_layer"]
    assert sum(rows) == recorded["sum_of_layer_rows"]


def test_a_shorter_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: W rows, which suffice for shared KV, fail the exhaustive check for per-layer KV."""
    monkeypatch.setattr(replay, "replay_span", lambda window, depth: window)
    with pytest.raises(AssertionError):
        replay.check_span.__wrapped__(3, 2)


def test_situation_table() -> None:
    table = cost.situation_table(LAB20["window"], LAB20["keep"])
    assert set(table) == set(LAB20["table"])
    for name, recorded in LAB20["table"].items():
        prompt = cost.SITUATIONS[name]
        assert prompt == cost.Prompt(
            recorded["q"], recorded["k"], recorded["full_len"], recorded["swa_valid_start"]
        )
        assert table[name] == {mode: recorded[mode] for mode in cost.MODES}


def test_grid_is_complete() -> None:
    assert cost.verify_grid() == LAB20["brute_force_cases"] == 8910


def test_grid_catches_a_wrong_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a window that is one key too wide does not pass the enumeration."""

    def too_wide(*, window: int, **rest: Any) -> tuple[int, int]:
        return original(window=window + 1, **rest)

    original = cost.query_rows_and_pairs
    monkeypatch.setattr(cost, "query_rows_and_pairs", too_wide)
    with pytest.raises(AssertionError):
        cost.verify_grid(4)


def test_chunks_of_a_prompt() -> None:
    recorded = LAB20["four_chunks_L1024_K140_W128"]
    chunked = {mode: cost.chunked_cost(mode, 1024, 256) for mode in cost.MODES}
    assert [rows for rows, _ in chunked["compact"]] == recorded["compact_rows"]
    assert sum(rows for rows, _ in chunked["compact"]) == recorded["compact_rows_total"]
    for mode in cost.MODES:
        assert [pairs for _, pairs in chunked[mode]] == recorded[f"{mode}_pairs"]
        ((rows, pairs),) = cost.chunked_cost(mode, 1024, 1024)
        assert pairs == recorded["one_chunk_pairs"][mode]
        assert rows == (recorded["one_chunk_rows"] if mode == "compact" else 1024)


@pytest.mark.parametrize("length", LAB20["equal_cost_20_plus_20_keep_140"])
def test_equal_cost_table(length: str) -> None:
    work = cost.equal_cost(int(length))
    assert {
        "full": work.full,
        "compact": work.compact,
        "ratio": f"{work.compact / work.full:.4f}",
    } == LAB20["equal_cost_20_plus_20_keep_140"][length]


def test_placeholder_row() -> None:
    recorded = LABS["exercise3_L12_K4_W3_chunk_4_7"]
    view = cost.first_row(Chunk(12, 4, 4), window=3, keep=4)
    assert (view.position, view.visible_keys, view.write_slot) == (
        recorded["compact_query_position"],
        recorded["visible_keys"],
        recorded["write_slot"],
    )


def test_first_row_after_a_hit_past_s_keep() -> None:
    recorded = LABS["exercise5_L1024_hit_890"]
    view = cost.first_row(Chunk(1024, 890, 134), window=128, keep=140)
    assert view.position == recorded["first_query"]
    assert view.lower_bound == recorded["lower_bound"]
    assert view.keys_before_chunk == recorded["history_keys_before_hit"] == recorded["rows_of_140_before_hit"]
    assert view.first_history_slot == recorded["first_history_slot"]


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        (
            replay,
            [
                "22 / 22",
                "25 / 25",
                "28 / 57/2",
                "32 / 193/6",
                "(1, 5)",
                "(2, 5)",
                "5456 inputs",
                "2541",
                "44",
            ],
        ),
        (
            cost,
            [
                "12/33",
                "12/9",
                "4/3",
                "1/0",
                "8,910",
                "23,280",
                "40,960",
                "330,480",
                "655,360",
                "143",
                "884",
                "122",
            ],
        ),
    ],
    ids=["replay", "cost"],
)
def test_examples_print_the_numbers(
    module: ModuleType, numbers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    module.main()
    printed = capsys.readouterr().out
    assert [number for number in numbers if number not in printed] == []

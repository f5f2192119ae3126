"""The integer rules of the DeepSeek-V4.1 adapter against every recorded DeepInfer case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.test_plan_vectors import ACCEPTED, REJECTED, Case, case_id, plan_of
from vllm_yoco.config import YocoConfig, resolve_truncation
from vllm_yoco.deepseek_v41 import rows
from vllm_yoco.topology import LayerTopology


def column(given: Case, name: str) -> np.ndarray:
    return np.array([seq[name] for seq in given["seqs"]], np.int64)


def bounds_of(given: Case) -> np.ndarray:
    count = len(given["seqs"])
    keep_all = np.full(count, given["mode"] == "off")
    return rows.lower_bounds(column(given, "data_len"), np.ones(count, bool), keep_all, given["keep"])


@pytest.mark.parametrize("case", ACCEPTED, ids=case_id)
def test_recorded_rows_and_visibility(case: Case) -> None:
    """``plan_of`` equals the recorded columns (test_plan_vectors); the adapter's integers say the same."""
    given = case["in"]
    plan = plan_of(given)
    start, query, bounds = column(given, "q_start"), column(given, "q_len"), bounds_of(given)
    kept = rows.kept_lens(query, start, bounds) if given["mode"] == "compact" else query
    assert (query - kept).tolist() == case["out"]["clip_prefix"]
    assert np.concatenate([[0], np.cumsum(kept)]).tolist() == plan.cu_seqlens.tolist()

    # A combining kernel shows of the gathered range what lies in the window.
    window, owner = given["window"], plan.chunk_of_row
    lowest = np.maximum(bounds, column(given, "valid_start"))
    first_gathered = start + query - rows.gather_lens(kept, start + query, lowest, window)
    lo = np.maximum(np.maximum(plan.positions - window + 1, 0), first_gathered[owner])
    assert np.minimum(lo, plan.positions + 1).tolist() == plan.visible_lo.tolist()

    if given["mode"] == "compact":
        silent = np.flatnonzero(np.bincount(owner, plan.writes_swa, len(query)) == 0)
        assert rows.placeholders(query, start, bounds).tolist() == silent.tolist()
    elif given["mode"] == "off":
        assert not bounds.any()


def test_stock_gather_length_fails_on_recorded_cases() -> None:
    """What vLLM gathers with the same bound: shows rows of a chunk what lies below a bound inside it."""
    wrong = 0
    for case in ACCEPTED:
        given, plan = case["in"], plan_of(case["in"])
        if given["mode"] != "mask":
            continue
        start, query = column(given, "q_start"), column(given, "q_len")
        lowest = np.maximum(bounds_of(given), column(given, "valid_start"))
        gathered = query + np.minimum(np.maximum(start - lowest, 0), given["window"] - 1)
        lo = np.maximum(plan.positions - given["window"] + 1, (start + query - gathered)[plan.chunk_of_row])
        wrong += np.maximum(lo, 0).tolist() != plan.visible_lo.tolist()
    assert wrong > 40


# The others name a prefix hit or a ring size that vLLM makes impossible.
REFUSED_K = [case for case in REJECTED if "keep" in case["name"]]


@pytest.mark.parametrize("case", REFUSED_K, ids=case_id)
def test_recorded_refusals_of_k(case: Case) -> None:
    given = case["in"]
    topology = LayerTopology(4, 2, (2,), (2, 3), given["window"])
    section: dict[str, Any] = {"truncation": given["mode"], "keep_tokens": given["keep"]}
    with pytest.raises(ValueError, match="--yoco-keep-tokens"):
        config = YocoConfig.from_additional_config({"yoco": section})
        resolve_truncation(config, topology, max_backtracking=given["max_backtracking"])


def test_bounds_depend_on_the_prompt_alone() -> None:
    prompts = np.array([300, 300, 300, 100, 300])
    prefilling = np.array([True, True, False, True, True])
    keeps = np.array([False, False, False, False, True])
    assert rows.lower_bounds(prompts, prefilling, keeps, 134).tolist() == [166, 166, 0, 0, 0]


def test_tiny_steps_are_left_whole() -> None:
    assert not rows.boundary_may_trim(128, 128, 16)
    assert rows.boundary_may_trim(129, 128, 16)
    assert not rows.boundary_may_trim(16, 4, 16)

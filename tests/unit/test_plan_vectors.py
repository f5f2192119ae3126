"""Every recorded DeepInfer case is reproduced exactly; formats in tests/data/reference/README.md."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_yoco.context_parallel import context_parallel_tables
from vllm_yoco.plan import Chunk, RowPlan, plan_rows, ring_slots
from vllm_yoco.ring_metadata import decode_ring, key_range, kv_ca, pivots, swa_history

REFERENCE = Path(__file__).parents[1] / "data" / "reference"

Case = dict[str, Any]


def load(name: str) -> list[Case]:
    return [json.loads(line) for line in (REFERENCE / name).read_text().splitlines()]


METADATA = load("metadata_public.jsonl")
ACCEPTED = [case for case in METADATA if "rejected" not in case["out"]]
REJECTED = [case for case in METADATA if "rejected" in case["out"]]
CP_TABLES = load("cp_tables_public.jsonl")
DECODE = load("decode_ring_public.jsonl")

# The rule that each refused case must be refused for.
REASON = {
    "keep_below_window_plus_backtracking": "keep_tokens=.* must be >= window",
    "keep_zero": "keep_tokens=0 must be >= window",
    "keep_negative": "keep_tokens=-1 must be >= window",
    "valid_start_after_chunk_start": "valid_start=.* must lie in",
    "valid_start_negative": "valid_start=-1 must lie in",
    "ring_smaller_than_window": "ring_size=2 must be >= window=3",
}


def case_id(case: Case) -> str:
    return f"{case['id']}-{case['name']}" if case.get("name") else str(case["id"])


def state_ids(given: Case) -> list[int]:
    return [seq["state_id"] for seq in given["seqs"]]


def plan_of(given: Case) -> RowPlan:
    return plan_rows(
        [Chunk(s["data_len"], s["q_start"], s["q_len"], s["valid_start"]) for s in given["seqs"]],
        mode=given["mode"],
        keep_tokens=given["keep"],
        window=given["window"],
        max_backtracking=given["max_backtracking"],
    )


def columns_of(given: Case, plan: RowPlan) -> dict[str, np.ndarray]:
    """The row columns under their recorded names."""
    ring = {"ring_size": given["swa_block_size"], "state_ids": state_ids(given)}
    columns = {
        "query_indices": plan.rows,
        "positions": plan.positions,
        "visible": np.stack((plan.visible_lo, plan.visible_hi), axis=1),
        "slot_mapping": ring_slots(plan, **ring),
        "pivots": pivots(plan),
    }
    for ratio in given["sparse_ratios"]:
        columns[f"ks.{ratio}"], columns[f"ke.{ratio}"] = key_range(plan, ratio)
    for ratio in given["dense_ratios"]:
        columns[f"kv_ca.{ratio}"] = kv_ca(plan, ratio)
    return columns


def test_counts() -> None:
    assert (len(METADATA), len(REJECTED), len(CP_TABLES), len(DECODE)) == (310, 10, 40, 60)


@pytest.mark.parametrize("case", ACCEPTED, ids=case_id)
def test_metadata(case: Case) -> None:
    given, out = case["in"], case["out"]
    plan = plan_of(given)
    plan.check_integrity()
    columns = columns_of(given, plan)

    assert plan.clip.tolist() == out["clip_prefix"]
    assert plan.cu_seqlens.tolist() == out["cu_seqlens_q"]
    assert len(plan.rows) == out["total_q"]
    history = swa_history(plan, ring_size=given["swa_block_size"], state_ids=state_ids(given))
    assert history.tolist() == out["swa_history"]["segments"]
    assert given["window"] * len(given["seqs"]) == out["swa_history"]["total_k"]

    unread = set(out) - set(columns) - {"clip_prefix", "cu_seqlens_q", "total_q", "swa_history"}
    assert unread <= {"rows", "crc32", "cp"}
    assert set(columns) <= set(out)
    for name, column in columns.items():
        assert len(column) == out["total_q"], name
        assert column[out.get("rows", slice(None))].tolist() == out[name], name
    assert out.get("crc32", {}).keys() <= columns.keys()
    for name, crc in out.get("crc32", {}).items():
        assert zlib.crc32(columns[name].astype("<i4").tobytes()) == crc, name

    assert ("cp" in out) == (given["cp_size"] > 1 and given["mode"] == "compact")
    if "cp" in out:
        tables = context_parallel_tables(plan, given["cp_size"], given["sparse_ratios"])
        assert {"mirror_len": tables.mirror_len, "contrib_pad_len": tables.contrib_pad_len} == out["cp"]


@pytest.mark.parametrize("case", REJECTED, ids=case_id)
def test_metadata_rejected(case: Case) -> None:
    with pytest.raises(ValueError, match=REASON[case["name"]]):
        columns_of(case["in"], plan_of(case["in"]))


@pytest.mark.parametrize("case", CP_TABLES, ids=case_id)
def test_context_parallel(case: Case) -> None:
    given, out = case["in"], dict(case["out"])
    chunks = [Chunk(s["data_len"], s["q_start"], s["q_len"]) for s in given["seqs"]]
    # The window plays no part in these tables.
    plan = plan_rows(chunks, mode="compact", keep_tokens=given["keep"], window=0)
    tables = context_parallel_tables(plan, given["cp_size"], given["ratios"])

    assert np.diff(plan.cu_seqlens).tolist() == out.pop("keep_lens")
    assert tables.contrib_pad_len == out.pop("contrib_pad_len")
    assert tables.mirror_len == out.pop("compact_mirror_len")
    assert tables.full_mirror_index.shape[1] == out.pop("full_mirror_len")
    for name, expected in out.items():
        assert getattr(tables, name).tolist() == expected, name


@pytest.mark.parametrize("case", DECODE, ids=case_id)
def test_decode_ring(case: Case) -> None:
    given, out = case["in"], case["out"]
    ring = decode_ring(
        [s["seqlen_k"] for s in given["seqs"]],
        [s["q_len"] for s in given["seqs"]],
        window=given["window"],
        ring_size=given["swa_block_size"],
        state_ids=state_ids(given),
    )
    assert np.stack((ring.offset, ring.length), axis=1).tolist() == out["offset_len"]
    assert np.stack((ring.visible_lo, ring.visible_hi), axis=1).tolist() == out["visible"]
    assert ring.slots.tolist() == out["slot_mapping"]
    assert set(out) == {"offset_len", "visible", "slot_mapping"}

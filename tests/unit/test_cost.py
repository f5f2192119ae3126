"""Cost accounting: recorded DeepInfer vectors, an oracle over every row and key, and negative controls."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_yoco.cost import FlopsEstimator, query_rows_and_pairs

DATA = json.loads((Path(__file__).parents[1] / "data" / "reference" / "cost_public.json").read_text())
CONFIGS: dict[str, dict[str, Any]] = DATA["configs"]
CASES = [dict(zip(DATA["case_columns"], row, strict=True)) for row in DATA["worked"] + DATA["cases"]]
MODES = ("off", "mask", "compact")


def chunk_of(case: dict[str, Any]) -> dict[str, Any]:
    return {key: case[key] for key in ("q", "k", "is_prompt", "full_len", "swa_valid_start")}


def recorded(case: dict[str, Any]) -> tuple[int, int]:
    return case["attention"], case["total"]


# --- recorded vectors ---


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_flops(name: str) -> None:
    cases = [case for case in CASES if case["config"] == name]
    assert len(cases) >= 180
    for case in cases:
        estimator = FlopsEstimator(CONFIGS[name], mode=case["mode"], keep_tokens=case["keep"])
        assert estimator.flops(**chunk_of(case)) == recorded(case), case


def test_all_recorded_cases_are_used() -> None:
    assert (len(CONFIGS), len(DATA["worked"]), len(DATA["cases"]), len(DATA["counts"])) == (
        14,
        51,
        2700,
        2000,
    )
    assert {case["config"] for case in CASES} == set(CONFIGS)


def test_recorded_counts() -> None:
    for row in DATA["counts"]:
        case = dict(zip(DATA["count_columns"], row, strict=True))
        for mode in MODES:
            got = query_rows_and_pairs(
                **{key: case[key] for key in ("q", "k", "full_len", "swa_valid_start", "window")},
                is_prompt=True,
                mode=mode,
                keep_tokens=case["keep"],
            )
            assert got == (case[f"rows_{mode}"], case[f"pairs_{mode}"]), (case, mode)


REASON = {
    "q_not_positive": "q must be positive",
    "k_below_q": "k 4 is below q 5",
    "prompt_full_len_below_k": "full_len 7 is below k 8",
    "valid_start_negative": r"swa_valid_start -1 must lie in \[0, k - q = 4\]",
    "valid_start_after_chunk_start": r"swa_valid_start 5 must lie in \[0, k - q = 4\]",
    "local_index_without_key_projection": "without key projection",
}


@pytest.mark.parametrize("case", DATA["rejected"], ids=lambda case: case["why"])
def test_recorded_refusals(case: dict[str, Any]) -> None:
    reason = REASON[case["why"]]
    if case.get("at") == "construction":
        config = copy.deepcopy(CONFIGS["sparse_index_candidates"])
        config["indexer_use_kproj_list"] = [False] * config["n_layer"]
        with pytest.raises(ValueError, match=reason):
            FlopsEstimator(config, mode="off", keep_tokens=0)
        return
    with pytest.raises(ValueError, match=reason):
        FlopsEstimator(CONFIGS["plain_dense_c1"], mode="compact", keep_tokens=4).flops(**chunk_of(case))
    with pytest.raises(ValueError, match=reason):
        query_rows_and_pairs(**chunk_of(case), window=4, mode="compact", keep_tokens=4)


# --- oracle ---


def oracle_counts(case: dict[str, Any], window: int, mode: str, keep: int) -> tuple[int, int]:
    rows = oracle_rows(case, mode, keep)
    return len(rows), sum(oracle_swa_keys(case, i, window, mode, keep) for i in rows)


def oracle_s_keep(case: dict[str, Any], mode: str, keep: int) -> int:
    full_len = case["k"] if case["full_len"] == -1 else case["full_len"]
    return full_len - keep if mode != "off" and case["is_prompt"] else 0


def oracle_rows(case: dict[str, Any], mode: str, keep: int) -> list[int]:
    rows = list(range(case["k"] - case["q"], case["k"]))
    if mode != "compact":
        return rows
    return [i for i in rows if i >= oracle_s_keep(case, mode, keep)] or rows[-1:]


def oracle_swa_keys(case: dict[str, Any], i: int, window: int, mode: str, keep: int) -> int:
    lowest = max(case["swa_valid_start"], oracle_s_keep(case, mode, keep))
    return sum(j >= lowest and i - j < window for j in range(i + 1))


def oracle_flops(config: dict[str, Any], case: dict[str, Any], mode: str, keep: int) -> tuple[int, int]:
    """Every matrix product, row by row and key by key; written from the description of the estimator."""
    c, shared, engram = config, config["shared_layer_metadata"], config["engram_cfg"]
    q, width, heads, dim = case["q"], c["n_embed"], c["n_head"], c["q_head_dim"]
    attn, mlp = (2 if c["fp8_attn"] else 4), (2 if c["fp8_mlp"] else 4)
    streams = c["hc_mult"] if c["hc_enabled"] else 0

    def product(unit: int, *shape: int) -> int:
        for size in shape:
            unit *= size
        return unit

    pre_mix = product(8, streams * width, streams * (streams + 2))
    collapse = product(8, streams, width)
    attention = other = 0
    for layer in range(c["n_layer"]):
        consumer = layer >= c["n_prefill_layer"]
        layer_mode = mode if consumer else "off"
        rows = oracle_rows(case, layer_mode, keep)
        packed, ratio = c["has_packed_kv_list"][layer], c["kv_compress_ratio_list"][layer]
        index_heads, index_dim = c["index_attn_num_heads"][layer], c["index_attn_head_dim"][layer]
        for i in rows:
            attention += product(attn, width, c["q_lora_rank"]) + product(attn, c["q_lora_rank"], heads * dim)
            attention += product(2, heads * dim, c["o_head_dim"])
            attention += product(attn, c["n_wv_group"] * c["o_head_dim"], width)
            if c["use_swa_list"][layer]:
                attention += product(attn, width, dim)
                keys = oracle_swa_keys(case, i, c["window_size"], layer_mode, keep)
                attention += product(4, 2, heads, dim, keys)
            if packed:
                keys = (i + 1) // ratio
                top_k = c["topk_tokens"][layer]
                attention += product(4, 2, heads, dim, min(keys, top_k) if top_k else keys)
                if index_heads and shared["is_index_source_list"][layer]:
                    attention += product(attn, c["q_lora_rank"], index_heads, index_dim)
                    attention += product(4, width, index_heads)
                    size, blocks = (
                        shared[f"index_candidate_{what}"][layer] for what in ("block_size", "blocks")
                    )
                    if blocks:
                        keys = min(blocks, -(-keys // size)) * size
                    attention += product(1 if c["indexer_use_fp4"] else 2, index_heads, index_dim, keys)
            experts = c["moe_top_k"] + c["n_shared_experts"]
            other += product(mlp, 3, width, c["moe_intermediate_size"], experts)
            other += product(4, width, c["n_routed_experts"])
            for sub_layer in range(2):
                skipped = c["hc_shifted"] and layer == sub_layer == 0
                other += pre_mix + (0 if skipped else collapse)
                other += product(8, streams, width) + product(8, streams, streams, width)
            if layer == c["n_layer"] - 1:
                other += collapse if c["hc_shifted"] else collapse + product(8, streams * width, streams)
            if layer in engram.get("engram_layer_ids", []):
                unit = 2 if c["engram_fp8_proj"] else 4
                other += product(unit, sum(engram["n_embed_per_ngram"]), (streams + 1) * width)
                other += product(8, streams, width)
        if packed and shared["is_kv_source_list"][layer]:
            attention += q * product(4, width, dim, 1 if ratio == 1 else 2)
        if packed and index_heads and shared["is_index_k_source_list"][layer]:
            completed = [i for i in range(case["k"] - q, case["k"]) if (i + 1) % ratio == 0]
            attention += product(4, dim, index_dim) * (max(1, len(completed)) if case["is_prompt"] else q)
    if c["n_prefill_layer"] < c["n_layer"]:
        other += (q - len(oracle_rows(case, mode, keep))) * (pre_mix + collapse)
    other += product(4, width, c["vocab_size"]) * (1 if case["is_prompt"] else q)
    return attention, attention + other


@st.composite
def chunks(draw: st.DrawFn, max_rows: int = 40) -> dict[str, Any]:
    start = draw(st.integers(0, 60))
    q = draw(st.integers(1, max_rows))
    is_prompt = draw(st.booleans())
    beyond = draw(st.integers(0, 40))
    return {
        "q": q,
        "k": start + q,
        "is_prompt": is_prompt,
        "full_len": draw(st.sampled_from((-1, start + q + beyond))) if is_prompt else start,
        "swa_valid_start": draw(st.integers(0, start)),
    }


@settings(max_examples=400, deadline=None)
@given(chunks(), st.integers(-1, 12), st.sampled_from(MODES), st.integers(1, 60))
def test_counts_match_oracle(case: dict[str, Any], window: int, mode: str, keep: int) -> None:
    got = query_rows_and_pairs(**case, window=window, mode=mode, keep_tokens=keep)
    assert got == oracle_counts(case, window, mode, keep)


def random_config(rng: random.Random) -> dict[str, Any]:
    """Sizes, precisions, sharing and candidate filters beyond the recorded 14 configurations."""
    config = copy.deepcopy(CONFIGS["sparse_index_candidates"])
    layers = config["n_layer"]
    sizes = (
        "n_embed",
        "vocab_size",
        "moe_intermediate_size",
        "n_head",
        "q_lora_rank",
        "q_head_dim",
        "o_head_dim",
    )
    config.update(
        {name: rng.randint(1, 9) for name in (*sizes, "n_wv_group", "n_routed_experts", "moe_top_k")}
    )
    for name in ("fp8_mlp", "fp8_attn", "hc_shifted", "engram_fp8_proj"):
        config[name] = rng.random() < 0.5
    config.update(
        n_prefill_layer=rng.randint(0, layers),
        hc_mult=rng.randint(1, 4),
        window_size=rng.choice((-1, 1, 3, 7)),
        kv_compress_ratio_list=[rng.choice((1, 2, 3)) for _ in range(layers)],
        topk_tokens=[rng.choice((0, 2, 5)) for _ in range(layers)],
        has_packed_kv_list=[rng.random() < 0.8 for _ in range(layers)],
        use_swa_list=[rng.random() < 0.7 for _ in range(layers)],
        indexer_use_kproj_list=[True] * layers,
        engram_cfg={"n_embed_per_ngram": [3, 4], "engram_layer_ids": rng.sample(range(layers), 2)},
        shared_layer_metadata={
            **{
                f"is_{name}_source_list": [rng.random() < 0.5 for _ in range(layers)]
                for name in ("kv", "index")
            },
            "is_index_k_source_list": [rng.random() < 0.5 for _ in range(layers)],
            "index_candidate_blocks": [rng.choice((0, 2, 5)) for _ in range(layers)],
            "index_candidate_block_size": [rng.choice((1, 2, 3)) for _ in range(layers)],
        },
    )
    return config


@settings(max_examples=120, deadline=None)
@given(chunks(max_rows=15), st.sampled_from(MODES), st.integers(1, 40), st.integers(0, 2**32))
def test_flops_match_oracle(case: dict[str, Any], mode: str, keep: int, seed: int) -> None:
    config = random_config(random.Random(seed))
    got = FlopsEstimator(config, mode=mode, keep_tokens=keep).flops(**case)
    assert got == oracle_flops(config, case, mode, keep)


def test_oracle_matches_recorded_flops() -> None:
    """The oracle itself is right: small recorded cases of every configuration but the largest."""
    cases = [case for case in CASES if case["q"] <= 16 and case["k"] <= 128]
    assert len({case["config"] for case in cases}) == len(CONFIGS)
    for case in cases:
        assert oracle_flops(CONFIGS[case["config"]], case, case["mode"], case["keep"]) == recorded(case)


# --- properties ---


def flops(name: str, mode: str, keep: int, **chunk: Any) -> tuple[int, int]:
    return FlopsEstimator(CONFIGS[name], mode=mode, keep_tokens=keep).flops(**chunk)


@pytest.mark.parametrize("name", CONFIGS)
def test_decode_is_never_truncated(name: str) -> None:
    decode = {"q": 6, "k": 1030, "is_prompt": False, "full_len": 1024}
    assert len({flops(name, mode, 140, **decode) for mode in MODES}) == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_prompt_within_keep_equals_off(name: str) -> None:
    prompt = {"q": 64, "k": 64, "is_prompt": True, "full_len": 64}
    assert len({flops(name, mode, 64, **prompt) for mode in MODES}) == 1


def test_without_consumer_swa_mask_equals_off() -> None:
    prompt = {"q": 500, "k": 500, "is_prompt": True, "full_len": 500}
    name = "dense_no_swa_consumers"
    assert flops(name, "mask", 5, **prompt) == flops(name, "off", 5, **prompt)
    assert flops(name, "compact", 5, **prompt)[1] < flops(name, "off", 5, **prompt)[1]


def test_cost_of_a_long_chunk_needs_no_loop() -> None:
    """A chunk of 2**40 rows is answered at once, and consistently with its two halves."""
    half, full = 2**39, 2**40

    def cost(q: int, k: int) -> tuple[int, int]:
        return query_rows_and_pairs(
            q=q,
            k=k,
            is_prompt=True,
            full_len=full,
            swa_valid_start=0,
            window=128,
            mode="mask",
            keep_tokens=140,
        )

    whole = cost(full, full)
    assert whole == tuple(a + b for a, b in zip(cost(half, half), cost(half, full), strict=True))


# --- negative controls: each of these mistakes changes recorded numbers ---


def mismatches(**changes: Any) -> int:
    """Recorded V4.1-Flash prompt cases that a changed input no longer reproduces."""
    wrong = 0
    for case in CASES:
        if case["config"] == "v41_flash" and case["is_prompt"]:
            config = {**CONFIGS["v41_flash"], **changes.get("config", {})}
            mode = changes.get("mode", {}).get(case["mode"], case["mode"])
            keep = case["keep"] + changes.get("keep", 0) * (case["mode"] != "off")
            chunk = {**chunk_of(case), **changes.get("chunk", {})}
            wrong += FlopsEstimator(config, mode=mode, keep_tokens=keep).flops(**chunk) != recorded(case)
    return wrong


@pytest.mark.parametrize(
    "changes",
    [
        {"keep": 1},
        {"config": {"window_size": 127}},
        {"config": {"n_prefill_layer": 21}},
        {"config": {"hc_shifted": False}},
        {"config": {"indexer_use_fp4": False}},
        {"mode": {"mask": "compact"}},
        {"mode": {"compact": "mask"}},
        {"chunk": {"full_len": -1}},
        {"chunk": {"is_prompt": False}},
    ],
    ids=str,
)
def test_recorded_cases_tell_mistakes_apart(changes: dict[str, Any]) -> None:
    assert mismatches() == 0
    assert mismatches(**changes) > 0


# --- config and argument errors ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_prefill_layer": 5}, r"n_prefill_layer 5 must lie in \[0, n_layer = 4\]"),
        ({"n_layer": 0}, "n_layer must be positive"),
        ({"use_swa_list": [True] * 3}, "use_swa_list has 3 entries for 4 layers"),
        ({"kv_compress_ratio_list": [0, 0, 1, 1]}, "layer 1 has packed KV"),
        ({"n_embed": None}, "lacks the key 'n_embed'"),
        ({"shared_layer_metadata": {}}, "lacks the key 'is_kv_source_list'"),
    ],
)
def test_broken_config_is_refused(changes: dict[str, Any], message: str) -> None:
    config = {**CONFIGS["plain_dense_c1"], **changes}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        FlopsEstimator(config, mode="off", keep_tokens=0)


@pytest.mark.parametrize(
    ("mode", "keep", "message"),
    [
        ("on", 4, "mode must be one of off, mask, compact"),
        ("mask", 0, "at least 1"),
        ("compact", -1, "at least 1"),
    ],
)
def test_broken_settings_are_refused(mode: str, keep: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlopsEstimator(CONFIGS["plain_dense_c1"], mode=mode, keep_tokens=keep)
    with pytest.raises(ValueError, match=message):
        query_rows_and_pairs(
            q=1, k=1, is_prompt=True, full_len=1, swa_valid_start=0, window=3, mode=mode, keep_tokens=keep
        )

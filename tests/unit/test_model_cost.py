"""Cost of a model: closed forms against enumeration over its tensors, and the recorded DeepSeek numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_inspect import FLASH, FLASH_SIZES, PARTITIONS
from vllm_yoco.cost import FlopsEstimator, query_rows_and_pairs
from vllm_yoco.model_cost import DeepseekCost, Prefill, PrefillCost, YocoCost, deepseek_cost_config
from vllm_yoco.models.checkpoint import parameter_shapes, read_model_config
from vllm_yoco.models.config import YocoModelConfig
from vllm_yoco.presets import model_presets

DATA = Path(__file__).parents[1] / "data"
MODES = ("off", "mask", "compact")
CONFIGS = {path.stem: read_model_config(path) for path in sorted((DATA / "models").glob("*.json"))}
CONFIGS |= {
    "ced-tiny": read_model_config(model_presets()["ced-tiny"]),
    "tied": YocoModelConfig(tie_word_embeddings=True, sliding_window=7),
    "producers-only": YocoModelConfig(num_hidden_layers=2, n_prefill_layer=2),
    "wide-heads": YocoModelConfig(
        head_dim=48, num_attention_heads=6, num_key_value_heads=3, sliding_window=1
    ),
}
REFERENCE: dict[str, Any] = json.loads((DATA / "reference" / "cost_public.json").read_text())
V41_COST: dict[str, Any] = REFERENCE["configs"]["v41_flash"]
SIX_LAYERS: dict[str, Any] = PARTITIONS["models"]["six_layers"]
V41: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "quantization_config": {"quant_method": "fp8"},
    "text_config": {**FLASH, **FLASH_SIZES},
}
TOY: dict[str, Any] = {
    **V41["text_config"],
    **SIX_LAYERS,
    **{"hidden_size": 7, "vocab_size": 11, "moe_intermediate_size": 5, "num_attention_heads": 3},
    **{"sliding_window": 5, "index_topk": 4, "engram_layer_ids": [1]},
}


# --- the yoco family against enumeration ---


def oracle(config: YocoModelConfig, prefill: Prefill) -> PrefillCost:
    """Every tensor times the rows that pass through it, and every query-key pair, one by one."""
    topology, length = config.topology(), prefill.num_prompt_tokens
    first = 0 if prefill.mode == "off" else max(0, length - prefill.keep_tokens)
    size = prefill.chunk_tokens or length
    chunks = [range(start, min(start + size, length)) for start in range(0, length, size)]
    kept = [i for chunk in chunks for i in chunk if prefill.mode != "compact" or i >= first or i == chunk[-1]]

    flops = dict.fromkeys(("producer", "global_kv", "consumer", "lm_head"), 0)
    shapes = parameter_shapes(config)
    if config.tie_word_embeddings:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for name, shape in shapes.items():
        if len(shape) == 1 or name == "model.embed_tokens.weight":
            continue
        if name == "lm_head.weight":
            part, rows = "lm_head", len(chunks)
        elif (layer := int(name.split(".")[2])) < topology.boundary:
            part, rows = "producer", length
        elif ".k_proj" in name or ".v_proj" in name:
            assert layer in topology.kv_source_layers
            part, rows = "global_kv", length
        else:
            part, rows = "consumer", len(kept)
        flops[part] += 2 * math.prod(shape) * rows

    pair = config.num_attention_heads * (2 * config.head_dim + 2 * config.head_dim)  # scores, weighted sum
    producer_pairs = global_pairs = swa_pairs = 0
    for layer in range(topology.num_layers):
        if layer < topology.boundary:
            window = config.producer_window(layer) or length
            producer_pairs += sum(i - window < j for i in range(length) for j in range(i + 1))
            continue
        global_pairs += sum(i + 1 for i in kept)
        if topology.has_swa(layer):
            swa_pairs += sum(first <= j and i - topology.window < j for i in kept for j in range(i + 1))
    return PrefillCost(
        num_chunks=len(chunks),
        producer_rows=length,
        consumer_rows=len(kept),
        layer_rows=topology.boundary * length + topology.num_consumers * len(kept),
        global_pairs=global_pairs,
        swa_pairs=swa_pairs,
        producer_flops=flops["producer"] + pair * producer_pairs,
        global_kv_flops=flops["global_kv"],
        consumer_flops=flops["consumer"] + pair * (global_pairs + swa_pairs),
        lm_head_flops=flops["lm_head"],
    )


@st.composite
def prefills(draw: st.DrawFn, longest: int = 60) -> Prefill:
    return Prefill(
        draw(st.integers(1, longest)),
        draw(st.sampled_from(MODES)),
        draw(st.integers(1, longest + 5)),
        draw(st.none() | st.integers(1, longest + 5)),
    )


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=40, deadline=None)
@given(prefill=prefills())
def test_closed_forms_match_enumeration(name: str, prefill: Prefill) -> None:
    assert YocoCost(CONFIGS[name]).of(prefill) == oracle(CONFIGS[name], prefill)


@pytest.mark.parametrize("wrong", ["num_placeholders", "num_dropped", "first_kept"])
def test_enumeration_tells_mistakes_apart(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a rule left out of the closed form shows."""
    prefill = Prefill(40, "compact", 6, 8)
    assert YocoCost(CONFIGS["ced-tiny"]).of(prefill) == oracle(CONFIGS["ced-tiny"], prefill)
    monkeypatch.setattr(Prefill, wrong, property(lambda self: 0))
    assert YocoCost(CONFIGS["ced-tiny"]).of(prefill) != oracle(CONFIGS["ced-tiny"], prefill)


def test_one_small_case_by_hand() -> None:
    """h = 4, f = 3, one head of 2, 5 words; L = 3, K = 2, C = 1: row 0 is a placeholder."""
    config = YocoModelConfig(
        vocab_size=5,
        hidden_size=4,
        intermediate_size=3,
        num_hidden_layers=2,
        n_prefill_layer=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        sliding_window=2,
    )
    cost = YocoCost(config).of(Prefill(3, "compact", 2, 1))
    assert cost == PrefillCost(
        num_chunks=3,
        producer_rows=3,
        consumer_rows=3,
        layer_rows=6,
        global_pairs=1 + 2 + 3,
        swa_pairs=0 + 1 + 2,
        producer_flops=3 * 2 * (4 * 6 + 2 * 4 + 3 * 4 * 3) + 6 * 8,
        global_kv_flops=3 * 2 * (4 * 4),
        consumer_flops=3 * 2 * (4 * 8 + 4 * 4 + 3 * 4 * 3) + (6 + 3) * 8,
        lm_head_flops=3 * 2 * 4 * 5,
    )
    assert cost.total_flops == 456 + 96 + 576 + 120


# --- properties ---

CED = CONFIGS["ced-tiny"]


def test_prompt_within_keep_costs_what_off_costs() -> None:
    for mode, chunk in product(MODES, (None, 16)):
        assert YocoCost(CED).of(Prefill(100, mode, 100, chunk)) == YocoCost(CED).of(
            Prefill(100, "off", 0, chunk)
        )
    assert YocoCost(CED).speedup_ceiling(Prefill(100, "compact", 100, 16)) == 1


def test_without_consumer_swa_mask_equals_off() -> None:
    cost = YocoCost(CONFIGS["no-swa"])
    assert cost.of(Prefill(500, "mask", 1)) == cost.of(Prefill(500))


@given(prefills(longest=5000))
@settings(max_examples=100, deadline=None)
def test_the_ceiling_falls_with_keep_and_with_shorter_chunks(prefill: Prefill) -> None:
    prefill = replace(prefill, mode="compact")
    ceiling = YocoCost(CED).speedup_ceiling
    assert 1 <= ceiling(replace(prefill, keep_tokens=prefill.keep_tokens + 1)) <= ceiling(prefill)
    assert ceiling(replace(prefill, chunk_tokens=None)) >= ceiling(prefill)


def test_a_long_prompt_needs_no_loop() -> None:
    cost = YocoCost(CED).of(Prefill(2**40, "compact", 140, 512))
    assert cost.consumer_rows == 140 + (2**40 - 140) // 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_prompt_tokens": 0}, "num_prompt_tokens must be at least 1"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
        ({"mode": "on"}, "mode must be one of off, mask, compact"),
        ({"mode": "compact", "keep_tokens": 0}, "keep_tokens must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Prefill(**{"num_prompt_tokens": 10, **arguments})


def test_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from vllm_yoco.model_cost import DeepseekCost, Prefill, YocoCost;"
        "print([name for name in ('vllm', 'torch', 'matplotlib', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- DeepSeek-V4.1 ---


def test_v41_flash_config_is_that_of_the_recording() -> None:
    assert deepseek_cost_config(V41) == V41_COST


def test_recorded_prompts_in_one_chunk() -> None:
    columns = REFERENCE["case_columns"]
    cost, compared = DeepseekCost(V41), 0
    for values in (*REFERENCE["worked"], *REFERENCE["cases"]):
        case = dict(zip(columns, values, strict=True))
        whole = case["q"] == case["k"] and case["full_len"] in (-1, case["k"]) and not case["swa_valid_start"]
        if case["config"] == "v41_flash" and case["is_prompt"] and whole:
            total = cost.of(Prefill(case["k"], case["mode"], case["keep"])).total_flops
            assert total == case["total"], case
            compared += 1
    assert compared >= 10
    assert cost.of(Prefill(1024, "compact", 140)).total_flops == 20924486115328


@settings(max_examples=60, deadline=None)
@given(prefills())
def test_chunks_and_parts_add_up(prefill: Prefill) -> None:
    """Parts against the estimator's own total, rows and pairs against the count of one layer."""
    estimator = FlopsEstimator(deepseek_cost_config(TOY), mode=prefill.mode, keep_tokens=prefill.keep_tokens)
    total = rows = swa_pairs = global_pairs = 0
    for start, end in prefill.chunks():
        chunk = {"q": end - start, "k": end, "is_prompt": True, "full_len": prefill.num_prompt_tokens}
        total += estimator.flops(**chunk)[1]
        counts = query_rows_and_pairs(
            **chunk, swa_valid_start=0, window=5, mode=prefill.mode, keep_tokens=prefill.keep_tokens
        )
        rows, swa_pairs = rows + counts[0], swa_pairs + counts[1]
        global_pairs += sum(min(4, i + 1) for i in range(end - counts[0], end))
    cost = DeepseekCost(TOY).of(prefill)
    assert cost.total_flops == total
    assert (cost.consumer_rows, cost.layer_rows) == (rows, 3 * rows + 3 * prefill.num_prompt_tokens)
    assert (cost.swa_pairs, cost.global_pairs) == (3 * swa_pairs, 3 * global_pairs)


def test_each_part_holds_what_its_name_says() -> None:
    off, compact = (DeepseekCost(V41).of(Prefill(4096, mode, 140, 512)) for mode in ("off", "compact"))
    assert compact.producer_flops == off.producer_flops
    assert compact.lm_head_flops == off.lm_head_flops == 8 * 4 * 5120 * 129280
    # The boundary norm of removed rows: hyper-connection coefficients and the collapse of the streams.
    norm = 8 * 4 * 5120 * (2 * 4 + 4 * 4) + 8 * 4 * 5120
    assert off.global_kv_flops == 4096 * 4 * 512 * 5120 + 4096 * 4 * 512 * 128
    assert compact.global_kv_flops - off.global_kv_flops == norm * (4096 - compact.consumer_rows)
    assert compact.consumer_flops < off.consumer_flops / 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None, "o_groups": None}, "lacks: hidden_size, o_groups"),
        ({"engram_n_heads": None}, "lacks: engram_n_heads"),
        ({"kv_source_layer_ids": [1]}, "a share-KV segment may not cross the boundary"),
    ],
)
def test_broken_deepseek_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepseekCost({**TOY, **changes})


def test_bf16_and_plain_residuals_where_the_config_says_so() -> None:
    metadata = deepseek_cost_config({**TOY, "hc_mult": None, "engram_layer_ids": []})
    assert (metadata["fp8_mlp"], metadata["hc_enabled"], metadata["engram_cfg"]) == (False, False, {})

"""State slots, load rule and layer sharing: recorded DeepInfer sizes, and every broken topology refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_yoco.cache_partition import CachePartition, StateSettings, num_state_slots
from vllm_yoco.cost import FlopsEstimator
from vllm_yoco.deepseek_topology import Candidates, read_deepseek_topology
from vllm_yoco.topology import check_draft_targets, check_engram_layers

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
DATA: dict[str, Any] = json.loads((REFERENCE / "cache_partition.json").read_text())
V41_COST: dict[str, Any] = json.loads((REFERENCE / "cost_public.json").read_text())["configs"]["v41_flash"]
MODELS: dict[str, dict[str, Any]] = DATA["models"]
FIELDS = {
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mode",
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "keep_tokens",
    "DEEPINFER_PREFILL_STORE_EXTRA_STATE": "store_extra",
    "DEEPINFER_PREFILL_STORE_EXTRA_SIZE": "extra_tokens",
    "DEEPINFER_MAX_BACKTRACKING_TOKENS": "max_backtracking",
}


def settings_of(name: str) -> dict[str, Any]:
    if name == "mask/keep_0":
        return {"mode": "mask", "keep_tokens": 0}
    return {FIELDS[key]: value for key, value in DATA["env"][name].items()}


def partition(case: str) -> CachePartition:
    model, _, setting = case.partition(" | ")
    return CachePartition(read_deepseek_topology(MODELS[model]), StateSettings(**settings_of(setting)))


def load_allowed(layout: CachePartition) -> bool:
    try:
        layout.check_load()
    except ValueError:
        return False
    return True


def measured(layout: CachePartition) -> dict[str, Any]:
    """The partition under the names of the recording."""
    inference, prefill = layout.inference, layout.prefill
    return {
        "swa_num_layer": len(layout.stored_layers) + len(layout.dropped_layers),
        "swa_store_num_layer": len(layout.stored_layers),
        "swa_drop_num_layer": len(layout.dropped_layers),
        "swa_block_size_inference": inference.ring_tokens,
        "swa_block_size_kvstore": prefill.ring_tokens,
        "swa_bytes_per_layer_kvstore": prefill.ring_tokens * DATA["fixed"]["swa_bytes_per_token"],
        "swa_bytes_per_layer_kvstore_pad": prefill.ring_bytes,
        "swa_bytes_per_layer_inference": inference.ring_tokens * DATA["fixed"]["swa_bytes_per_token"],
        "swa_bytes_per_layer_inference_pad": inference.ring_bytes,
        "swa_store_total_bytes_kvstore_pad": prefill.stored_bytes,
        "swa_store_total_bytes_inference_pad": inference.stored_bytes,
        "swa_drop_total_bytes_kvstore_pad": prefill.dropped_bytes,
        "swa_drop_total_bytes_inference_pad": inference.dropped_bytes,
        "all_compress_block_size": {str(ratio): size for ratio, size in layout.compressor_tokens.items()},
        "compress_total_bytes_kvstore": prefill.compressor_bytes,
        "dropped_bytes_inference": inference.dropped_bytes + inference.compressor_bytes,
        "total_bytes_kvstore": prefill.total_bytes,
        "total_bytes_inference": inference.total_bytes,
        "state_size_to_disk": layout.disk_bytes,
        "n_prefill_layer": layout.topology.boundary,
        "dropped_layers": list(layout.dropped_layers),
        "kv_layout_layer_offset_bytes": [list(entry) for entry in layout.kv_layout()],
        "kv_block_bytes": layout.kv_block_bytes,
        "state_shape_max_num_seqs_8": [num_state_slots(8), prefill.total_bytes],
        "load_allowed": load_allowed(layout),
    }


# --- recorded sizes ---


@pytest.mark.parametrize("case", DATA["results"])
def test_recorded_partition(case: str) -> None:
    recorded = DATA["results"][case]
    if recorded == {"rejected_at_metadata": True}:
        with pytest.raises(ValueError, match=r"layers on both sides of the boundary|keep_tokens must be"):
            partition(case)
    else:
        assert measured(partition(case)) == recorded


def test_v41_flash_in_numbers() -> None:
    layout = partition("v41_flash | compact/extra_0")
    assert layout.topology.boundary == 20
    assert (len(layout.stored_layers), len(layout.dropped_layers)) == (20, 23)
    assert (layout.disk_bytes, layout.inference.total_bytes) == (1_415_040, 3_128_928)


def test_load_rule_names_the_layers() -> None:
    with pytest.raises(ValueError, match=r"layers 20\.\.42 do not persist .* mode off"):
        partition("v41_flash | off/extra_0").check_load()
    partition("v41_flash | mask/extra_0").check_load()


def test_persisted_states_end_at_a_block() -> None:
    layout = partition("v41_flash | compact/extra_0")
    layout.check_persist(1024)
    layout.check_persist(1000, to_decode=True)
    with pytest.raises(ValueError, match="multiple of 128 tokens, not at 1000"):
        layout.check_persist(1000)


def test_without_window_there_are_no_rings() -> None:
    topology = read_deepseek_topology({**MODELS["v41_flash"], "sliding_window": 0})
    layout = CachePartition(topology, StateSettings())
    assert (layout.stored_layers, layout.dropped_layers, layout.disk_bytes) == ((), (), 0)
    layout.check_load()
    with pytest.raises(ValueError, match="store_extra needs a model with sliding-window rings"):
        CachePartition(topology, StateSettings(store_extra=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "on"}, "mode must be one of"),
        ({"mode": "compact"}, "keep_tokens must be at least 1"),
        ({"max_backtracking": 0}, "max_backtracking 0"),
        ({"extra_tokens": -1}, "extra_tokens -1"),
    ],
)
def test_broken_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StateSettings(**settings)


def test_unknown_cache_entries_are_refused() -> None:
    topology = read_deepseek_topology({**MODELS["v41_flash"], "head_dim": 256})
    with pytest.raises(ValueError, match="known for head_dim 512"):
        CachePartition(topology, StateSettings())


# --- topology ---


def v41(**changes: Any) -> dict[str, Any]:
    config = {**copy.deepcopy(MODELS["v41_flash"]), **changes}
    return {key: value for key, value in config.items() if value != "absent"}


def test_v41_flash_layers() -> None:
    topology = read_deepseek_topology(v41(dspark_target_layer_ids=[37, 38, 39], engram_layer_ids=[1, 14]))
    assert topology.kv_owners() == (2, 8, 14, 20)
    assert topology.kv_source[:10] == (0, 1, 2, 2, 2, 2, 2, 2, 8, 8)
    assert topology.index_source[20:30] == (20, 20, 20, 20, 24, 24, 24, 24, 28, 28)
    assert topology.kv_source[39:] == (20, 40, 41, 42)
    assert topology.candidate_source[19:22] == (None, 20, 20)
    layers = topology.layer_topology()
    assert (layers.boundary, layers.num_consumers, layers.kv_source_layers) == (20, 20, (20,))
    assert (layers.num_own_swa_layers, layers.consumer_window) == (20, 128)
    check_draft_targets(layers, topology.draft_targets, mode="compact")
    check_engram_layers(layers, topology.engram_layers, mode="compact")


def test_v41_flash_layers_are_those_of_the_cost_config() -> None:
    layers = read_deepseek_topology(v41()).cost_layers()
    assert layers == {key: V41_COST[key] for key in layers}
    estimator = FlopsEstimator({**V41_COST, **layers}, mode="compact", keep_tokens=140)
    assert estimator.flops(q=1024, k=1024, is_prompt=True, full_len=1024) == (8327722426368, 20924486115328)


def test_nested_text_config_is_read() -> None:
    assert read_deepseek_topology({"text_config": v41()}) == read_deepseek_topology(v41())


@pytest.mark.parametrize("name", MODELS)
def test_layer_topology_needs_producers(name: str) -> None:
    topology = read_deepseek_topology(MODELS[name])
    if name == "all_ratio_1":
        with pytest.raises(ValueError, match="at least one is needed"):
            topology.layer_topology()
    else:
        assert topology.layer_topology().boundary == topology.boundary


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (v41(compress_ratios="absent"), "compress_ratios missing"),
        (v41(kv_source_layer_ids=None), "kv_source_layer_ids missing"),
        (v41(num_nextn_predict_layers=2), r"43 entries, expected 40 layers \+ 2 draft"),
        (v41(compress_ratios=[0, 0] + [2] * 38 + [0] * 3), "no consumer boundary"),
        (v41(compress_ratios=[0, 0] + [4] * 18 + [1] * 20 + [0] * 3), "layer 2: compression ratio 4"),
        (v41(kv_source_layer_ids=[]), "at least one"),
        (v41(kv_source_layer_ids=[2, 8, 14, 40]), r"ascending layers in 0\.\.39"),
        (v41(kv_source_layer_ids=[8, 2, 14, 20]), "ascending"),
        (v41(kv_source_layer_ids=[2, 8, 14]), "layer 20 is the first consumer but uses the KV of layer 14"),
        (v41(index_source_layer_ids=[2, 8, 14, 24]), "index_source: layer 20 .* cannot share"),
        (v41(index_source_layer_ids=[2, 14, 20]), "layer 8 starts a new index_k_source segment"),
        (v41(index_k_source_layer_ids=[2, 14, 20]), "layer 8 starts a new kv_source segment"),
        (v41(candidate_source_layer_id=-1), "null switches the filter off"),
        (v41(candidate_source_layer_id=22), "layer 22 must be its own candidate source and an index source"),
        (v41(candidate_source_layer_id=14), "layers 20 and 14 differ in compression ratio"),
        (v41(candidate_topk_blocks=2044), "positive multiple of 8"),
        (v41(candidate_block_size=17), r"block_size lie in 1\.\.16"),
        (v41(candidate_block_size=4), "blocks of 8 or 16 keys"),
        (v41(candidate_topk_blocks=4104), "at most 4096 blocks"),
        (v41(candidate_topk_blocks=8), "too few candidates"),
        (v41(index_n_heads=64), "at most 32 index heads"),
        (v41(index_head_dim=64), "index_head_dim 128"),
        (v41(index_topk=0), "layer 20 must be compressed and select a top-k"),
    ],
)
def test_broken_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_deepseek_topology(config)


def changed(**layers: tuple[int, Any]) -> dict[str, Any]:
    """One entry of each named per-layer tuple of V4.1-Flash replaced: name=(layer, value)."""
    topology = read_deepseek_topology(v41())
    result = {}
    for name, (layer, value) in layers.items():
        values = list(getattr(topology, name))
        values[layer] = value
        result[name] = tuple(values)
    return result


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (changed(kv_source=(16, 8)), "kv_source: layer 16 uses layer 8, which is not the nearest source"),
        (changed(kv_source=(5, 3)), "kv_source: layer 5 uses layer 3, which is not the nearest source"),
        (changed(kv_source=(3, 40)), r"layer 3 uses layer 40, which is not in 0\.\.39"),
        (changed(kv_source=(41, 20)), "draft layer 41 must be its own source"),
        (changed(index_source=(40, 36)), "draft layer 40 must be its own source"),
        (changed(top_k=(5, 256)), r"layer 5 \(top-k 256\) cannot share with layer 2 \(top-k 512\)"),
        (changed(uses_swa=(5, False)), "layers 5 and 2 share KV, but only one of them uses SWA"),
        (changed(kv_source=(20, 14)), "a share-KV segment may not cross the boundary"),
        (changed(ratios=(5, 0)), r"layer 5 \(compression ratio 0\) cannot share with layer 2 \(.* 2\)"),
        (changed(candidate_source=(30, 24)), "layer 24 must be its own candidate source"),
        (changed(candidate_source=(24, 24)), "not lie below the source of an earlier layer"),
        (changed(candidate_source=(24, 28)), r"a source must be in 0\.\.24"),
        ({"candidates": None}, "positive multiple of 8"),
        ({"candidates": Candidates(0, 8)}, "positive multiple of 8"),
        ({"kv_source": (0, 1)}, "kv_source has 2 entries"),
    ],
)
def test_broken_maps_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(read_deepseek_topology(v41()), **changes)

"""The Hugging Face config: defaults, what it derives, what it refuses, and the model files of the repository."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from vllm_yoco.models.checkpoint import ARCHITECTURE, PAD, parameter_count, read_model_config
from vllm_yoco.models.config import FULL_ATTENTION, SLIDING_ATTENTION, YocoModelConfig
from vllm_yoco.presets import model_presets

FILES = [*model_presets().values(), *sorted((Path(__file__).parents[1] / "data" / "models").glob("*.json"))]


def test_defaults_follow_the_paper_with_swa() -> None:
    config = YocoModelConfig()
    assert config.kv_source_layers == [4] and config.consumer_swa_layers == [4, 5, 6, 7]
    assert config.layer_types == [FULL_ATTENTION] * 8 and config.head_dim == 32
    t = config.topology()
    assert (t.num_layers, t.boundary, t.kv_source_layers, t.swa_layers) == (8, 4, (4,), (4, 5, 6, 7))
    assert (t.window, t.swa_share_hidden) == (128, False)


def test_layer_types_per_producer_or_per_layer() -> None:
    producers = [SLIDING_ATTENTION, FULL_ATTENTION]
    short = YocoModelConfig(num_hidden_layers=4, n_prefill_layer=2, layer_types=producers)
    full = YocoModelConfig(num_hidden_layers=4, n_prefill_layer=2, layer_types=producers + [FULL_ATTENTION] * 2)
    assert short.layer_types == full.layer_types == producers + [FULL_ATTENTION] * 2
    assert [short.producer_window(i) for i in (0, 1)] == [128, None]


def test_the_arguments_are_not_kept_by_reference() -> None:
    sources = [4]
    config = YocoModelConfig(kv_source_layers=sources)
    sources.append(6)
    assert config.kv_source_layers == [4]


def test_window_may_be_absent_without_swa() -> None:
    config = YocoModelConfig(consumer_swa_layers=[], sliding_window=None)
    assert config.topology().window == 0


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"layer_types": [FULL_ATTENTION] * 5}, ["layer_types has 5 entries", "n_prefill_layer=4", "layers=8"]),
        ({"layer_types": ["linear"] * 4}, ["layer_types: ['linear']", SLIDING_ATTENTION]),
        ({"layer_types": [SLIDING_ATTENTION] * 8}, ["consumers attend", "consumer_swa_layers"]),
        (
            {"layer_types": [SLIDING_ATTENTION] * 4, "consumer_swa_layers": [], "sliding_window": None},
            ["sliding_window=None", SLIDING_ATTENTION],
        ),
        ({"num_key_value_heads": 3}, ["num_attention_heads=8", "multiple", "num_key_value_heads=3"]),
        ({"head_dim": 33}, ["head_dim=33", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"n_prefill_layer": 0}, ["n_prefill_layer=0"]),
        ({"kv_source_layers": [5]}, ["kv_source_layers=[5]", "boundary layer 4"]),
        ({"consumer_swa_layers": [3]}, ["consumer_swa_layers=[3]", "not consumer layers"]),
        ({"sliding_window": None}, ["sliding_window=0", "at least 1"]),
    ],
)
def test_refused_models(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        YocoModelConfig(**changes)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_model_files(path: Path) -> None:
    config = read_model_config(path)
    topology = config.topology()
    assert config.architectures == [ARCHITECTURE]
    assert config.vocab_size > PAD
    # What vLLM's CPU attention kernels take.
    assert config.head_dim in (32, 64, 80, 96, 128)
    assert parameter_count(config) < 100e6
    # vLLM splits layers into KV groups of one size: without a common divisor there would be one per layer.
    swa = len(topology.swa_layers)
    sliding = config.layer_types.count(SLIDING_ATTENTION)
    full = topology.boundary - sliding + len(topology.kv_source_layers)
    smallest = min(count for count in (full, sliding, swa) if count)
    largest = max(full, sliding, swa)
    size = largest if largest < 1.5 * smallest else smallest
    assert sum(math.ceil(count / size) for count in (full, sliding, swa)) <= 6


def test_presets_have_the_shapes_they_are_named_after() -> None:
    models = {path.stem: read_model_config(path) for path in FILES}
    yoco = models["yoco"].topology()
    assert len(yoco.kv_source_layers) == 1 and not yoco.swa_layers and yoco.boundary * 2 == yoco.num_layers
    assert set(models["yoco"].layer_types[: yoco.boundary]) == {SLIDING_ATTENTION}
    ced = models["ced"].topology()
    assert ced.window == 128 and len(ced.swa_layers) == ced.num_consumers and len(ced.kv_source_layers) > 1
    flash = models["v41-flash-shape"].topology()
    assert (flash.num_layers, flash.boundary, flash.kv_source_layers, flash.window) == (40, 20, (20,), 128)
    assert models["ced-tiny"].sliding_window % 16 and models["ced-tiny"].sliding_window > 16
    assert models["shared-hidden"].swa_share_hidden
    assert not models["no-swa"].consumer_swa_layers
    shared = models["kv-shared"].topology()
    assert len(shared.kv_source_layers) > 1 and 0 < len(shared.swa_layers) < shared.num_consumers

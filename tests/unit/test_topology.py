"""Roles of layers, and the messages for placements that truncation cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_yoco.topology import LayerTopology, check_draft_targets, check_engram_layers

GOOD: dict[str, Any] = dict(
    num_layers=8, boundary=3, kv_source_layers=(3, 6), swa_layers=(3, 4, 7), window=24, swa_share_hidden=False
)


def topology(**changes: Any) -> LayerTopology:
    return LayerTopology(**GOOD | changes)


def test_roles() -> None:
    t = topology()
    assert t.num_consumers == 5
    assert [layer for layer in range(-1, 9) if t.is_consumer(layer)] == [3, 4, 5, 6, 7]
    assert [layer for layer in range(8) if t.has_swa(layer)] == [3, 4, 7]
    assert [t.kv_source_of(layer) for layer in range(3, 8)] == [3, 3, 3, 6, 6]
    assert (t.consumer_window, t.num_own_swa_layers) == (24, 3)


def test_shared_hidden_adds_nothing_to_the_exactness_span() -> None:
    assert topology(swa_share_hidden=True).num_own_swa_layers == 0
    assert topology(swa_share_hidden=True).consumer_window == 24


def test_without_swa_no_window_matters() -> None:
    t = topology(swa_layers=())
    assert (t.window, t.consumer_window, t.num_own_swa_layers) == (24, 0, 0)
    assert topology(swa_layers=(), window=0).consumer_window == 0


def test_a_model_without_consumers_is_a_topology() -> None:
    t = topology(boundary=8, kv_source_layers=(), swa_layers=())
    assert t.num_consumers == 0 and not t.is_consumer(7)


@pytest.mark.parametrize("layer", [-1, 0, 2, 8])
def test_only_consumers_have_a_source(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"layer {layer} is no consumer; consumers are \[3, 8\)"):
        topology().kv_source_of(layer)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"boundary": 0}, ["n_prefill_layer=0", "1..num_hidden_layers=8", "Set n_prefill_layer"]),
        ({"boundary": 9}, ["n_prefill_layer=9", "1..num_hidden_layers=8"]),
        ({"kv_source_layers": (6, 3)}, ["kv_source_layers=[6, 3]", "ascend"]),
        ({"kv_source_layers": (3, 3)}, ["kv_source_layers=[3, 3]", "without repeats"]),
        ({"kv_source_layers": (2, 3)}, ["kv_source_layers=[2, 3]", "[2]", "[3, 8)", "may not cross the boundary"]),
        ({"kv_source_layers": (4,)}, ["kv_source_layers=[4]", "boundary layer 3 must be a KV source", "Add it"]),
        ({"kv_source_layers": ()}, ["kv_source_layers=[]", "boundary layer 3 must be a KV source"]),
        ({"swa_layers": (1, 3)}, ["consumer_swa_layers=[1, 3]", "[1] are not consumer layers", "[3, 8)"]),
        ({"swa_layers": (3, 8)}, ["consumer_swa_layers=[3, 8]", "[8] are not consumer layers"]),
        ({"swa_layers": (7, 3)}, ["consumer_swa_layers=[7, 3]", "ascend"]),
        ({"window": 0}, ["sliding_window=0", "at least 1", "--disable-sliding-window"]),
    ],
)
def test_refused_topologies(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        topology(**changes)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("targets", [(0, 1, 2), (3, 5, 7), ()])
def test_draft_targets_on_one_side(targets: tuple[int, ...]) -> None:
    check_draft_targets(topology(), targets, mode="compact")


def test_draft_targets_on_both_sides() -> None:
    for mode in ("off", "mask"):
        check_draft_targets(topology(), (1, 5), mode=mode)
    with pytest.raises(ValueError) as error:
        check_draft_targets(topology(), (5, 1), mode="compact")
    for part in ("[1, 5]", "[1] lie below the boundary 3", "[5] at or above", "--yoco-truncation mask"):
        assert part in str(error.value)


def test_engram_layers() -> None:
    check_engram_layers(topology(), (0, 2), mode="compact")
    check_engram_layers(topology(), (0, 5), mode="mask")
    with pytest.raises(ValueError) as error:
        check_engram_layers(topology(), (0, 3, 5), mode="compact")
    for part in ("[3, 5]", "boundary 3", "--yoco-truncation compact", "use --yoco-truncation mask or off"):
        assert part in str(error.value)

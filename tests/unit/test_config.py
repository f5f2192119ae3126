"""Settings and the K they mean: values, and messages that name the flag, the value, the rule and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_yoco.config import Truncation, YocoConfig, flag_name, resolve_truncation
from vllm_yoco.topology import LayerTopology

W = 24
OWN = LayerTopology(8, 4, (4, 6), (4, 5, 6, 7), W)
SHARED = LayerTopology(8, 4, (4,), (4, 5, 6, 7), W, swa_share_hidden=True)
NO_SWA = LayerTopology(8, 4, (4,), (), 0)
ONE_SWA = LayerTopology(8, 4, (4,), (5,), W)
NO_CONSUMERS = LayerTopology(8, 8, (), (), 0)


def resolve(topology: LayerTopology, backtracking: int = 1, **settings: Any) -> Truncation:
    config = YocoConfig.from_additional_config({"yoco": {"truncation": "compact"} | settings})
    return resolve_truncation(config, topology, max_backtracking=backtracking)


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, {"yoco": {}}])
def test_absent_settings_are_off(additional: object) -> None:
    config = YocoConfig.from_additional_config(additional)
    assert config == YocoConfig()
    assert (config.truncation, config.keep_tokens, config.prompt_logprobs) == ("off", "min", "drop")
    assert not resolve_truncation(config, OWN).active


@pytest.mark.parametrize(
    ("given_value", "value"),
    [
        *((140, 140), ("140", 140), (" 140 ", 140), ("min", "min"), ("exact", "exact"), (1, 1)),
        (2**31 - 1, 2**31 - 1),
    ],
)
def test_keep_tokens_spellings(given_value: object, value: object) -> None:
    section = {"truncation": "mask", "keep_tokens": given_value}
    assert YocoConfig.from_additional_config({"yoco": section}).keep_tokens == value


def test_round_trip_and_frozen() -> None:
    config = YocoConfig(truncation="compact", keep_tokens=140, prompt_logprobs="full", plugins=("a", "b"))
    assert YocoConfig.from_additional_config({"yoco": config.model_dump(mode="json")}) == config
    with pytest.raises(ValidationError):
        config.truncation = "off"


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"truncation": "fast"}, ["--yoco-truncation", "'fast'", "must be one of off, mask, compact"]),
        ({"truncation": True}, ["--yoco-truncation", "True", "must be one of off, mask, compact"]),
        ({"keep_tokens": "most"}, ["--yoco-keep-tokens", "'most'", "positive number of tokens, min or exact"]),
        ({"keep_tokens": 0}, ["--yoco-keep-tokens", "=0:", "positive number"]),
        ({"keep_tokens": "0"}, ["--yoco-keep-tokens", "'0'", "positive number"]),
        ({"keep_tokens": -3}, ["--yoco-keep-tokens", "=-3:", "positive number"]),
        ({"keep_tokens": "-3"}, ["--yoco-keep-tokens", "'-3'", "positive number"]),
        ({"keep_tokens": 2**31}, ["--yoco-keep-tokens", "=2147483648:", "at most 2147483647"]),
        ({"keep_tokens": "9" * 20}, ["--yoco-keep-tokens", "'99999999999999999999'", "at most 2147483647"]),
        ({"keep_tokens": 2.5}, ["--yoco-keep-tokens", "2.5", "positive number"]),
        ({"keep_tokens": True}, ["--yoco-keep-tokens", "True", "positive number"]),
        ({"keep_tokens": None}, ["--yoco-keep-tokens", "None", "positive number"]),
        ({"keep_tokens": [140]}, ["--yoco-keep-tokens", "[140]", "positive number"]),
        ({"prompt_logprobs": "no"}, ["--yoco-prompt-logprobs", "'no'", "must be one of drop, reject, full"]),
        ({"plugins": 7}, ["--plugin", "7", "must be a list of plugin names"]),
        ({"keep_token": 5}, ["unknown key 'keep_token'", "known keys are truncation, keep_tokens"]),
    ],
)
def test_wrong_settings_name_flag_value_and_rule(section: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        YocoConfig.from_additional_config({"yoco": section})
    (field,) = section
    for part in (*parts, 'additional_config["yoco"]'):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    if field in YocoConfig.model_fields:
        assert str(error.value).startswith(flag_name(field))


def test_every_wrong_setting_is_named() -> None:
    with pytest.raises(ValueError) as error:
        YocoConfig.from_additional_config({"yoco": {"truncation": "fast", "keep_tokens": "most", "k": 1}})
    for part in ("--yoco-truncation", "--yoco-keep-tokens", "'k'"):
        assert part in str(error.value)


@pytest.mark.parametrize("section", ["compact", 5, ["compact"]])
def test_section_must_be_a_mapping(section: object) -> None:
    with pytest.raises(ValueError, match="must be a mapping such as") as error:
        YocoConfig.from_additional_config({"yoco": section})
    assert repr(section) in str(error.value)


@pytest.mark.parametrize(
    ("topology", "backtracking", "least", "exact"),
    [
        (OWN, 1, W + 1, W + 3 * (W - 1)),
        (OWN, 4, W + 4, W + 3 * (W - 1)),
        (ONE_SWA, 4, W + 4, W + 4),
        (SHARED, 1, W + 1, W + 1),
        (NO_SWA, 1, 1, 1),
        (NO_SWA, 4, 1, 1),
    ],
)
def test_min_and_exact(topology: LayerTopology, backtracking: int, least: int, exact: int) -> None:
    for rule, keep in (("min", least), ("exact", exact)):
        t = resolve(topology, backtracking, keep_tokens=rule)
        assert (t.keep_tokens, t.keep_tokens_rule) == (keep, rule)
        assert (t.minimum_keep_tokens, t.exact_keep_tokens, t.max_backtracking) == (least, exact, backtracking)
        assert t.lossless == (keep >= exact) and t.active
    assert resolve(topology, backtracking).keep_tokens == least, "min is the default"
    given_k = resolve(topology, backtracking, keep_tokens=exact + 1)
    assert (given_k.keep_tokens, given_k.keep_tokens_rule, given_k.lossless) == (exact + 1, "given", True)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_k_below_its_minimum(mode: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve(OWN, 4, truncation=mode, keep_tokens=W + 3)
    for part in (
        'additional_config["yoco"]["keep_tokens"]',
        "--yoco-keep-tokens (additional_config",
        f"={W + 3}:",
        f"at least W + B = {W} + 4 = {W + 4}",
        f"Use {W + 4} or more, min or exact (here {W + 3 * (W - 1)})",
    ):
        assert part in str(error.value)
    assert resolve(OWN, 4, truncation="off", keep_tokens=1).keep_tokens == 1, "K does not matter when off"


def test_model_without_consumers() -> None:
    with pytest.raises(ValueError) as error:
        resolve(NO_CONSUMERS)
    for part in ("--yoco-truncation", "=compact:", "n_prefill_layer=8 of 8 layers", "Use --yoco-truncation off"):
        assert part in str(error.value)
    assert not resolve(NO_CONSUMERS, truncation="off").active


@given(st.integers(1, 10_000), st.integers(W + 1, 500))
def test_removed_share_counts_rows(num_prompt_tokens: int, keep: int) -> None:
    rows = num_prompt_tokens * OWN.num_layers
    run = num_prompt_tokens * OWN.boundary + min(num_prompt_tokens, keep) * OWN.num_consumers
    assert resolve(OWN, keep_tokens=keep).removed_share(num_prompt_tokens) == pytest.approx(1 - run / rows)
    assert resolve(OWN, keep_tokens=keep, truncation="mask").removed_share(num_prompt_tokens) == 0


def test_off_is_lossless_whatever_k() -> None:
    t = resolve(OWN, truncation="off", keep_tokens=1)
    assert t.lossless and not t.active and t.removed_share(1000) == 0


def test_an_open_boundary_is_one_clipped_layer_less() -> None:
    """Its own window is whole, so that exact needs W - 1 rows fewer; the minimum is that of the layers above."""
    boundary_too = LayerTopology(8, 4, (4,), (4, 5, 6, 7), W)
    clipped, opened = (resolve(boundary_too, keep_tokens="exact", boundary_swa=s) for s in ("clipped", "open"))
    assert clipped.keep_tokens - opened.keep_tokens == W - 1
    assert clipped.minimum_keep_tokens == opened.minimum_keep_tokens == W + 1
    # No layer is clipped at all: nothing changes from the minimum on.
    assert resolve(LayerTopology(8, 4, (4,), (4,), W), keep_tokens="exact", boundary_swa="open").keep_tokens == W + 1
    # The boundary has no window to open.
    assert resolve(ONE_SWA, keep_tokens="exact", boundary_swa="open").keep_tokens == W + 1


def test_a_mode_is_given_or_not() -> None:
    given = {"truncation": "off"}
    assert YocoConfig.from_additional_config({"yoco": given}).is_given
    for absent in ({}, {"keep_tokens": 140}, {"plugins": ["a"]}):
        assert not YocoConfig.from_additional_config({"yoco": absent}).is_given

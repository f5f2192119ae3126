"""Flags, their messages and the start-up line, without vLLM."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_yoco import cli, plugins, startup
from vllm_yoco.config import YocoConfig, resolve_truncation
from vllm_yoco.topology import LayerTopology

KEEP = '--yoco-keep-tokens (additional_config["yoco"]["keep_tokens"])'


def parse(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="vllm serve")
    cli.add_arguments(parser)
    return cli.settings_of(parser.parse_args(argv))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    points = [
        EntryPoint("vllm_yoco", "vllm_yoco.plugin:register", plugins.GROUP),
        EntryPoint("json_plugin", "json:loads", plugins.GROUP),
        EntryPoint("broken", "no_such_module:register", plugins.GROUP),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    monkeypatch.delenv(plugins.ALLOWED_ENV, raising=False)
    return monkeypatch


def test_flags_that_are_not_given_leave_no_trace() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert vars(parser.parse_args([])) == {}
    assert parse() == {}


def test_flags_become_settings(installed: pytest.MonkeyPatch) -> None:
    assert parse("--yoco-truncation", "compact", "--yoco-keep-tokens", "140") == {
        "truncation": "compact",
        "keep_tokens": 140,
    }
    assert parse("--yoco-keep-tokens", "exact", "--yoco-prompt-logprobs=full") == {
        "keep_tokens": "exact",
        "prompt_logprobs": "full",
    }
    assert parse("--plugin", "vllm-yoco", "--plugin", "json_plugin") == {"plugins": ["vllm-yoco", "json_plugin"]}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--yoco-truncation", "on"], "--yoco-truncation='on': must be one of off, mask, compact."),
        (["--yoco-trunc=1"], "--yoco-truncation='1': must be one of off, mask, compact."),
        (
            ["--yoco-keep-tokens", "many"],
            "--yoco-keep-tokens='many': must be a positive number of tokens, min or exact.",
        ),
        (
            ["--yoco-keep-tokens=-3"],
            "--yoco-keep-tokens='-3': must be a positive number of tokens, min or exact.",
        ),
        (["--yoco-keep-tokens", "0"], "--yoco-keep-tokens='0': must be a positive number of tokens, min or exact."),
        (
            ["--yoco-prompt-logprobs", ""],
            "--yoco-prompt-logprobs='': must be one of drop, reject, full.",
        ),
        (
            ["--plugin", "nosuch"],
            "--plugin='nosuch': no such plugin is installed. Install it in this environment, or correct the name."
            " Loaded: vllm_yoco, json_plugin.",
        ),
        (
            ["--plugin", "broken"],
            "--plugin='broken': it fails to import (ModuleNotFoundError: No module named 'no_such_module')."
            " Loaded: vllm_yoco, json_plugin.",
        ),
    ],
)
def test_a_bad_value_ends_with_one_line(
    installed: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"vllm serve: error: {message}\n"


def test_plugin_that_the_environment_excludes(installed: pytest.MonkeyPatch) -> None:
    installed.setenv(plugins.ALLOWED_ENV, "json_plugin, vllm_yoco")  # vLLM does not strip the space
    with pytest.raises(ValueError, match=r"VLLM_PLUGINS=json_plugin, vllm_yoco excludes it.*Loaded: json_plugin\."):
        plugins.check_plugins(["vllm_yoco"])
    installed.setenv(plugins.ALLOWED_ENV, "json_plugin,vllm_yoco")
    plugins.check_plugins(["vllm_yoco", "vllm-yoco"])


def test_merge_keeps_the_rest_and_the_original() -> None:
    original = {"other": 1, "yoco": {"keep_tokens": "exact"}}
    merged = cli.merge_settings({"truncation": "mask", "plugins": ["a"]}, original)
    assert merged == {"other": 1, "yoco": {"keep_tokens": "exact", "truncation": "mask", "plugins": ["a"]}}
    assert original == {"other": 1, "yoco": {"keep_tokens": "exact"}}
    json.dumps(merged)  # vLLM hashes it so
    assert cli.merge_settings({"plugins": ["b", "a"]}, merged)["yoco"]["plugins"] == ["a", "b"]
    assert cli.merge_settings({"truncation": "off"}, None) == {"yoco": {"truncation": "off"}}


def test_a_setting_given_twice_must_agree() -> None:
    assert cli.merge_settings({"keep_tokens": 140}, {"yoco": {"keep_tokens": "140"}})["yoco"] == {"keep_tokens": 140}
    with pytest.raises(ValueError) as error:
        cli.merge_settings({"keep_tokens": 140}, {"yoco": {"keep_tokens": "min"}})
    assert str(error.value) == f"{KEEP} is given twice, as 140 and as min: leave one out."
    with pytest.raises(ValueError, match="must be a mapping"):
        cli.merge_settings({"keep_tokens": 140}, {"yoco": "compact"})


def test_every_setting_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    dests = {action.dest for action in parser._actions} - {"help"}
    assert dests == {f"yoco_{field}" for field in YocoConfig.model_fields}


@pytest.fixture(autouse=True)
def two_byte_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a cached value is vLLM's to say, which unit tests do not import."""
    monkeypatch.setattr(startup, "_kv_itemsize", lambda vllm_config: 2)


def describe(max_model_len: int = 32768, **settings: Any) -> str:
    topology = LayerTopology(8, 4, (4,), (4, 5, 6, 7), 128)
    truncation = resolve_truncation(YocoConfig(**settings), topology)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len, hf_config=SimpleNamespace(num_key_value_heads=2, head_dim=32)
        ),
        additional_config={"yoco": settings},
    )
    return startup.describe(truncation, config)  # type: ignore[arg-type]


def test_start_up_line() -> None:
    assert describe(truncation="compact") == (
        "YOCO truncation compact: K=129 (rule min), W=128, B=1, approximate (lossless from K=509);"
        " 4 producer + 4 consumer layers (boundary 4, 4 consumers with SWA);"
        " prefill layer rows removed: 48% at L=4096, 50% at L=32768;"
        " KV bytes per token persisted: 1280 (producers 1024, global KV 256), not persisted: 1024 (consumer SWA);"
        " prompt_logprobs: drop"
    )
    assert "K=509 (rule exact), W=128, B=1, lossless;" in describe(truncation="compact", keep_tokens="exact")
    assert "K=600 (given), W=128, B=1, lossless;" in describe(truncation="mask", keep_tokens=600)
    assert "nothing is saved" in describe(truncation="mask")
    assert "removed: 44% at L=1024;" in describe(1024, truncation="compact")
    assert describe() == "YOCO truncation off: 4 producer + 4 consumer layers (boundary 4, 4 consumers with SWA)"
    idle = describe(truncation="off", keep_tokens=5, prompt_logprobs="full")
    assert idle == f"{describe()}; without effect: --yoco-keep-tokens, --yoco-prompt-logprobs"

"""From a command line or keyword arguments to a validated ``VllmConfig``, with vLLM's own parser; no engine starts."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.benchmarks import latency, throughput
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli import serve
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.harness import UNIPROC
from vllm_yoco import compat, startup
from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint
from vllm_yoco.models.config import YocoModelConfig

ON = {"yoco": {"truncation": "compact"}}


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_general_plugins()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("yoco"))


def save(path: Path, **fields: Any) -> str:
    YocoModelConfig(architectures=["YocoForCausalLM"], dtype="float32", **fields).save_pretrained(path)
    return str(path)


def vllm_serve(*argv: str) -> AsyncEngineArgs:
    """What ``vllm serve ARGV`` makes of its arguments (vllm/entrypoints/cli/main.py and serve.py)."""
    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(subparsers)
    args = parser.parse_args(["serve", *argv])
    if getattr(args, "model_tag", None) is not None:
        args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args)


def vllm_bench(add_cli_args: Callable[..., Any], *argv: str) -> EngineArgs:
    parser = FlexibleArgumentParser(prog="vllm bench")
    add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(list(argv)))


def engine_config(model: str, **kwargs: Any) -> VllmConfig:
    kwargs.setdefault("additional_config", ON)
    return EngineArgs(model=model, skip_tokenizer_init=True, **kwargs).create_engine_config()


# ---- command lines


def test_the_plugin_is_active_here() -> None:
    assert compat.is_active()
    assert compat.broken_symbols(load=True) == []


def test_without_flags_nothing_is_added(model: str) -> None:
    assert vllm_serve(model).additional_config == {}
    assert vllm_serve(model, "--additional-config", '{"a": 1}').additional_config == {"a": 1}
    assert EngineArgs(model=model).additional_config == {}
    assert engine_config(model, additional_config={}).additional_config == {}


@pytest.mark.parametrize(
    "place",
    [
        lambda model, flags: [model, *flags],
        lambda model, flags: ["--model", model, *flags],
        lambda model, flags: [*flags, f"--model={model}"],
        lambda model, flags: [model, *(flag.replace("_", "-") for flag in flags)],
        lambda model, flags: [model, "--yoco_truncation=compact", "--yoco_keep_tokens=140", *flags[4:]],
    ],
)
def test_vllm_serve(model: str, place: Callable[[str, list[str]], list[str]]) -> None:
    flags = ["--yoco-truncation", "compact", "--yoco-keep-tokens", "140", "--plugin", "vllm_yoco"]
    engine_args = vllm_serve(*place(model, flags))
    assert engine_args.model == model
    section = engine_args.additional_config["yoco"]
    assert section["plugins"] in (["vllm_yoco"], ["vllm-yoco"])
    assert (section["truncation"], section["keep_tokens"]) == ("compact", 140)


def test_config_file(model: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {model}\nyoco-truncation: compact\nyoco-keep-tokens: 140\nplugin: vllm_yoco\n")
    expected = {"truncation": "compact", "keep_tokens": 140, "plugins": ["vllm_yoco"]}
    assert vllm_serve("--config", str(file)).additional_config == {"yoco": expected}
    # The command line comes after the file.
    changed = vllm_serve("--config", str(file), "--yoco-truncation", "off")
    assert changed.additional_config == {"yoco": {**expected, "truncation": "off"}}
    # YAML reads an unquoted off as false, and vLLM drops a false flag: the default, which is off.
    file.write_text(f"model: {model}\nyoco-truncation: off\n")
    assert vllm_serve("--config", str(file)).additional_config == {}


@pytest.mark.parametrize("module", [latency, throughput])
def test_vllm_bench(model: str, module: Any) -> None:
    engine_args = vllm_bench(module.add_cli_args, "--model", model, "--yoco-truncation", "mask")
    assert engine_args.additional_config == {"yoco": {"truncation": "mask"}}


@pytest.mark.parametrize("module", [latency, throughput])
def test_vllm_bench_makes_an_engine_of_its_arguments(
    model: str, module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """These commands make the LLM from ``vars()`` of the arguments, so nothing else may be attached to those."""

    def stop(engine_args: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        raise InterruptedError(engine_args.create_engine_config().additional_config)

    monkeypatch.setattr(LLMEngine, "from_engine_args", stop)
    flags = ["--model", model, "--skip-tokenizer-init"]
    for given, expected in (([], {}), (["--yoco-truncation=mask"], {"yoco": {"truncation": "mask"}})):
        with pytest.raises(InterruptedError) as arrived:
            LLM.from_engine_args(vllm_bench(module.add_cli_args, *flags, *given))
        assert arrived.value.args == (expected,)
    wrong = vllm_bench(module.add_cli_args, *flags, "--yoco-truncation=mask", "--yoco-keep-tokens=9")
    with pytest.raises(SystemExit) as exit_:
        LLM.from_engine_args(wrong)
    assert exit_.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm: error: --yoco-keep-tokens=9: must be at least")


@pytest.mark.slow
def test_vllm_bench_latency_runs(tmp_path: Path) -> None:
    """The command itself, which does more with its arguments than the tests above."""
    config = read_model_config("configs/models/ced-tiny.json")
    config.vocab_size = 10000  # the command draws its tokens below that
    save_checkpoint(tmp_path, config, random_state_dict(config, seed=0))
    sizes = ("--input-len", "64", "--output-len", "2", "--batch-size", "1")
    rounds = ("--num-iters", "1", "--num-iters-warmup", "1")
    engine = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "64M")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "latency", "--model", str(tmp_path)]
    done = subprocess.run(
        [*command, *sizes, *rounds, *engine, "--plugin", "vllm_yoco", "--yoco-truncation", "compact"],
        env=os.environ | UNIPROC | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "YOCO truncation compact: K=25" in done.stdout + done.stderr
    assert "Avg latency" in done.stdout


def test_flags_join_the_json(model: str) -> None:
    json_flag = ["--additional-config", '{"a": 1, "yoco": {"keep_tokens": "exact"}}']
    assert vllm_serve(model, *json_flag, "--yoco-truncation", "mask").additional_config == {
        "a": 1,
        "yoco": {"keep_tokens": "exact", "truncation": "mask"},
    }
    dotted = vllm_serve(model, "--additional-config.yoco.keep_tokens", "140", "--yoco-truncation", "mask")
    assert dotted.additional_config == {"yoco": {"keep_tokens": 140, "truncation": "mask"}}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--yoco-truncation", "fast"], "--yoco-truncation='fast': must be one of off, mask, compact."),
        (["--plugin", "nosuch"], "--plugin='nosuch': no such plugin is installed."),
        (
            ["--yoco-truncation", "mask", "--additional-config", '{"yoco": {"truncation": "compact"}}'],
            '--yoco-truncation (additional_config["yoco"]["truncation"]) is given twice, as mask and as compact',
        ),
    ],
)
def test_a_bad_command_line_ends_with_one_line(
    model: str, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        vllm_serve(model, *flags)
    assert exit_.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm") and f": error: {message}" in error


def test_a_refused_command_line_ends_with_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine_args = vllm_serve(model, "--skip-tokenizer-init", "--yoco-truncation=compact", "--yoco-keep-tokens=9")
    with pytest.raises(SystemExit) as exit_:
        engine_args.create_engine_config()
    assert exit_.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm: error: --yoco-keep-tokens=9: must be at least W + B = 128 + 1 = 129")
    # What came as JSON is named by both of its names.
    json_flag = ["--additional-config", '{"yoco": {"truncation": "compact", "keep_tokens": 9}}']
    with pytest.raises(SystemExit):
        vllm_serve(model, "--skip-tokenizer-init", *json_flag).create_engine_config()
    assert '--yoco-keep-tokens (additional_config["yoco"]["keep_tokens"])=9:' in capsys.readouterr().err


# ---- keyword arguments


def test_keyword_arguments(model: str) -> None:
    for cls in (EngineArgs, AsyncEngineArgs):
        engine_args = cls(model=model, yoco_truncation="compact", yoco_keep_tokens=140)
        assert engine_args.additional_config == {"yoco": {"truncation": "compact", "keep_tokens": 140}}
    with pytest.raises(TypeError, match="yoco_mode: is no setting of vllm-yoco; the settings are yoco_truncation, "):
        EngineArgs(model=model, yoco_mode="compact")
    with pytest.raises(ValueError, match="must be one of off, mask, compact"):
        EngineArgs(model=model, yoco_truncation="fast")


def test_config_classes_keep_their_interface(model: str) -> None:
    import dataclasses
    import inspect
    import pickle

    engine_args = EngineArgs(model=model, yoco_truncation="compact")
    assert dataclasses.replace(engine_args).additional_config == ON
    assert dataclasses.asdict(engine_args)["additional_config"] == ON
    assert pickle.loads(pickle.dumps(engine_args)).additional_config == ON
    assert "model" in inspect.signature(EngineArgs.__init__).parameters


# ---- start-up check


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm")
    return caplog


def test_start_up_line_is_logged_once(model: str, logged: pytest.LogCaptureFixture) -> None:
    engine_config(model)
    lines = [record.getMessage() for record in logged.records if "YOCO truncation" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("YOCO truncation compact: K=129 (rule min), W=128, B=1, approximate")


def test_speculative_tokens_raise_the_minimum(model: str) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = engine_config(model, speculative_config=ngram)
    assert startup.truncation_of(config).keep_tokens == 128 + 4  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"128 \+ 4 = 132"):
        engine_config(
            model,
            speculative_config=ngram,
            additional_config={"yoco": {"truncation": "mask", "keep_tokens": 131}},
        )


REFUSED_ARGUMENTS = [
    ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager=True: "),
    (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
        "--decode-context-parallel-size=2: must be 1",
    ),
    ({"tensor_parallel_size": 4}, "--tensor-parallel-size=4: must divide the model's num_key_value_heads=2"),
    ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill=True: "),
    (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "--kv-transfer-config (connector ExampleConnector): ",
    ),
    (
        {"speculative_config": {"method": "draft_model", "model": "MODEL", "num_speculative_tokens": 2}},
        "--speculative-config method=draft_model: must be one of ngram",
    ),
    ({"enable_lora": True}, "--enable-lora=True: "),
    ({"enable_prompt_embeds": True}, "--enable-prompt-embeds=True: "),
    ({"runner": "pooling"}, "--runner=pooling: must be generate"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_ARGUMENTS)
def test_refused_while_a_mode_is_on(model: str, arguments: dict[str, Any], message: str) -> None:
    arguments = {
        key: {k: model if v == "MODEL" else v for k, v in value.items()} if isinstance(value, dict) else value
        for key, value in arguments.items()
    }
    with pytest.raises(ValueError) as error:
        engine_config(model, **arguments)
    assert str(error.value).startswith(message)
    assert str(error.value).endswith("(--yoco-truncation is compact.)")
    engine_config(model, additional_config={"yoco": {"truncation": "off"}}, **arguments)
    engine_config(model, additional_config={}, **arguments)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        # vLLM refuses these by itself on a CPU, or turns them off.
        ("parallel_config", "prefill_context_parallel_size", 2, "--prefill-context-parallel-size=2: "),
        ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size=2: "),
        ("parallel_config", "enable_dbo", True, "--enable-dbo=True: "),
        ("parallel_config", "ubatch_size", 2, "--ubatch-size=2: "),
    ],
)
def test_refused_on_other_devices(model: str, section: str, field: str, value: Any, message: str) -> None:
    config = engine_config(model)
    setattr(getattr(config, section), field, value)
    with pytest.raises(ValueError) as error:
        startup.validate(config, "worker")
    assert str(error.value).startswith(message)


def test_pipeline_parallel_is_refused_by_vllm(model: str) -> None:
    with pytest.raises(NotImplementedError, match="Pipeline parallelism is not supported for this model"):
        engine_config(model, pipeline_parallel_size=2)


def test_allowed_while_a_mode_is_on(model: str) -> None:
    engine_config(model, tensor_parallel_size=2)
    engine_config(model, kv_cache_dtype="fp8")
    engine_config(model, enable_prefix_caching=False, enable_chunked_prefill=False, max_num_batched_tokens=8192)


def test_models(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    llama = tmp_path / "llama"
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
    ).save_pretrained(llama)
    with pytest.raises(ValueError, match=r"does not serve the model .*llama, whose model_type is llama: it must be"):
        engine_config(str(llama))
    engine_config(str(llama), additional_config={"yoco": {"truncation": "off", "keep_tokens": 1}})

    producers = save(tmp_path / "producers", n_prefill_layer=8)
    with pytest.raises(ValueError, match="has no consumer layers"):
        engine_config(producers)
    engine_config(producers, additional_config={})

    no_window = save(tmp_path / "no_window", consumer_swa_layers=[])
    config = engine_config(no_window, additional_config={"yoco": {"truncation": "compact", "keep_tokens": 1}})
    assert startup.truncation_of(config).lossless  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"truncation": "off", "keep_token": 3}, "unknown key 'keep_token'"),
        ({"keep_tokens": 0}, "must be a positive number of tokens"),
        ("compact", "must be a mapping"),
        ({"plugins": ["nosuch"]}, "no such plugin is installed"),
    ],
)
def test_malformed_settings_are_refused_with_off_too(model: str, section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(model, additional_config={"yoco": section})


def test_flags_join_a_group_of_their_own() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    groups = [group for group in parser._action_groups if group.title == "yoco"]
    assert len(groups) == 1
    options = [option for action in groups[0]._group_actions for option in action.option_strings]
    assert options == [
        "--yoco-truncation",
        "--yoco-keep-tokens",
        "--yoco-prompt-logprobs",
        "--yoco-boundary-swa",
        "--plugin",
    ]
    assert all(action.default is argparse.SUPPRESS for action in groups[0]._group_actions)

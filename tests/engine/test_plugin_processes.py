"""The plugin as processes see it: discovery, exclusion, messages and exit codes of real commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_yoco.models.config import YocoModelConfig

ON = '{"yoco": {"truncation": "compact"}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("yoco")
    YocoModelConfig(architectures=["YocoForCausalLM"], dtype="float32").save_pretrained(path)
    return str(path)


def python(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=500, env={**inherited, **env}
    )


def vllm(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "vllm.entrypoints.cli.main", *argv, **env)


def script(tmp_path: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A file and not ``-c``, because spawned processes import it again."""
    file = tmp_path / "script.py"
    file.write_text(text)
    return python(str(file), **env)


def assert_one_line(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The program ended with our message and no stack."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert ": error: " in last
    for part in parts:
        assert part in last


def test_help() -> None:
    result = vllm("serve", "--help=yoco")
    assert result.returncode == 0
    for flag in (
        "--yoco-truncation {off,mask,compact}",
        "--yoco-keep-tokens {N,min,exact}",
        "--yoco-prompt-logprobs {drop,reject,full}",
        "--plugin NAME",
    ):
        assert flag in result.stdout
    assert "yoco" not in result.stderr.lower()  # registering says nothing


def test_vllm_serve_ends_with_one_line(model: str) -> None:
    result = vllm("serve", model, "--skip-tokenizer-init", "--yoco-truncation=compact", "--yoco-keep-tokens=9")
    assert_one_line(result, "--yoco-keep-tokens", "=9: must be at least W + B = 128 + 1 = 129")


def test_vllm_bench_ends_with_one_line(model: str) -> None:
    assert_one_line(vllm("bench", "latency", "--model", model, "--yoco-keep-tokens=x"), "--yoco-keep-tokens='x'")


def test_plugin_excluded_by_the_environment(model: str) -> None:
    result = vllm("serve", model, "--yoco-truncation", "compact", VLLM_PLUGINS="other")
    assert result.returncode == 2
    assert "unrecognized arguments: --yoco-truncation compact" in result.stderr


def test_named_plugin_excluded_by_the_environment(model: str) -> None:
    result = vllm("serve", model, "--plugin", "lora_hf_hub_resolver", VLLM_PLUGINS="vllm_yoco")
    assert_one_line(
        result,
        "--plugin='lora_hf_hub_resolver': VLLM_PLUGINS=vllm_yoco excludes it. Add lora_hf_hub_resolver to",
        "Loaded: vllm_yoco.",
    )


def test_only_the_early_entry_point(model: str, tmp_path: Path) -> None:
    """The keyword arguments exist then, and truncation does not."""
    text = f"""
from vllm import LLM
try:
    LLM({model!r}, skip_tokenizer_init=True, yoco_truncation="compact")
except RuntimeError as error:
    print("refused:", error)
"""
    result = script(tmp_path, text, VLLM_PLUGINS="vllm_yoco_args")
    assert "refused: --yoco-truncation: the plugin vllm_yoco is not loaded in the front end" in result.stdout


UNTESTED = """
import sys
import vllm.version
vllm.version.__version__ = "0.99.0"
from vllm.entrypoints.cli.main import main
sys.argv = ["vllm", *{argv!r}]
main()
"""


def test_untested_version(model: str, tmp_path: Path) -> None:
    rule = "vllm-yoco is tested with vLLM 0.32.x, and this is 0.99.0."
    inert = script(tmp_path, UNTESTED.format(argv=["serve", "--help=yoco"]))
    assert inert.returncode == 0
    assert inert.stderr.count(rule) + inert.stdout.count(rule) == 1

    argv = ["serve", model, "--skip-tokenizer-init", "--yoco-truncation", "compact", "--yoco-keep-tokens", "9"]
    assert_one_line(
        script(tmp_path, UNTESTED.format(argv=argv)), rule, "Install vLLM 0.32.x, or set VLLM_YOCO_ALLOW_UNTESTED=1"
    )
    # Allowed: it gets as far as the next check.
    allowed = script(tmp_path, UNTESTED.format(argv=argv), VLLM_YOCO_ALLOW_UNTESTED="1")
    assert_one_line(allowed, "--yoco-keep-tokens", "must be at least")


@pytest.mark.parametrize("first_import", ["", "from vllm.engine.arg_utils import EngineArgs"])
def test_keyword_arguments_of_llm(model: str, tmp_path: Path, first_import: str) -> None:
    text = f"""
{first_import}
from vllm import LLM
try:
    LLM({model!r}, skip_tokenizer_init=True, yoco_truncation="compact", yoco_keep_tokens=9)
except ValueError as error:
    print("refused:", error)
"""
    result = script(tmp_path, text)
    assert "refused: --yoco-keep-tokens" in result.stdout, result.stderr


def test_a_patch_that_fails_stops_a_mode_and_nothing_else(tmp_path: Path) -> None:
    text = """
import sys
from types import SimpleNamespace

def install():
    raise AttributeError("gone")

sys.modules["vllm_yoco.patches.scheduler"] = SimpleNamespace(install=install)
from vllm_yoco import compat, plugin
plugin.register()
plugin.register()
assert "vllm.v1.worker.gpu_model_runner" not in sys.modules  # registering imports no runner
compat.require_active("worker")
import vllm.v1.core.sched.scheduler
try:
    compat.require_active("engine core")
except RuntimeError as error:
    print("refused:", error)
"""
    result = script(tmp_path, text)
    assert "patch scheduler failed (AttributeError: gone)" in result.stdout, result.stderr


@pytest.mark.slow
def test_a_child_process_without_the_plugin_stops_the_start(model: str, tmp_path: Path) -> None:
    text = f"""
import os

if __name__ == "__main__":
    from vllm import LLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    os.environ["VLLM_PLUGINS"] = "other"  # for the processes to come
    LLM({model!r}, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, max_model_len=512,
        gpu_memory_utilization=0.1, additional_config={ON})
    print("the engine runs")
"""
    result = script(tmp_path, text, VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert result.returncode != 0
    assert "the engine runs" not in result.stdout
    output = result.stdout + result.stderr
    assert "YocoForCausalLM" in output and "not supported" in output

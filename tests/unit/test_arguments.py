"""What the commands accept, and the one line that they print otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_yoco.tools import cost
from vllm_yoco.tools.cli import build_parser, main

MODEL = "configs/models/ced-tiny.json"


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr of a command line that is refused before any work is done."""
    try:
        code = main(argv)
    except SystemExit as exit_:
        assert isinstance(exit_.code, int)
        code = exit_.code
    assert code == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.strip().splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interruption_is_one_line(number, monkeypatch, capsys):
    """It unwinds, so that engine processes and temporary files of a command go."""
    unwound = []

    def run(args):
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            unwound.append(args)

    # A process that a script starts in the background ignores SIGINT.
    monkeypatch.setattr(cost, "run", run)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert main(["cost", MODEL]) == 130
        assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    finally:
        signal.signal(signal.SIGINT, previous)
    assert unwound and capsys.readouterr().err == "vllm-yoco: interrupted\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect", MODEL, "--num-speculative-tokens", "-1"], "'-1' must be a number of at least 0"),
        (["inspect", MODEL, "--keep-tokens", "abc"], "'abc' must be a number of at least 1, min or exact"),
        (["cost", MODEL, "--keep-tokens", "min,abc"], "'abc' must be a number of at least 1, min or exact"),
        (["cost", MODEL, "--prompt-tokens", "4096,0"], "'0' must be a number of at least 1"),
        (["cost", MODEL, "--chunk-tokens", "some"], "'some' must be a number of at least 1, or all"),
        (["cost", MODEL, "--plot", "x.txt"], "--plot: 'x.txt' must end with one of .pdf, .png, .svg"),
        (["cost", MODEL, "--plot", "nofolder/x.png"], "there is no folder 'nofolder'"),
        (["inspect", MODEL, "--json", "nofolder/x.json"], "--json: 'nofolder/x.json': there is no folder 'nofolder'"),
        (["inspect", MODEL, "--json", "configs"], "'configs' is a folder"),
        (["error", MODEL, "--prompts", "nofile.txt"], "--prompts: 'nofile.txt': there is no such file"),
        (["check", MODEL, "--prompts", "nofile.txt"], "--prompts: 'nofile.txt': there is no such file"),
        (["demo", "--model", "nofolder"], "--model: 'nofolder' must be a folder with a config.json"),
        (["demo", "--prompt-file", "nofile.txt"], "--prompt-file: 'nofile.txt': there is no such file"),
    ],
)
def test_refused_before_any_work(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(argv, capsys)
    assert line.startswith("vllm-yoco") and message in line


@pytest.mark.parametrize("command", ["inspect", "cost", "check", "error", "demo"])
def test_a_k_that_is_too_small_is_named_as_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal([command, *(["--config", MODEL] if command == "demo" else [MODEL]), "--keep-tokens", "5"], capsys)
    assert "error: --keep-tokens=5: must be at least W + B = 24 + 1 = 25" in line
    assert "additional_config" not in line


@pytest.mark.parametrize("values", [["min,exact"], ["min", "exact"], ["min,", "exact"], ["min, exact"]])
def test_lists_take_commas_and_spaces(values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["cost", MODEL, "--keep-tokens", *values]
    if "min," in values:
        assert "'' must be a number" in refusal(argv, capsys)
    else:
        assert build_parser(["cost"]).parse_args(argv).keep_tokens == ["min", "exact"]


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "inspect" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    command = f"{sys.executable} -m vllm_yoco.tools.cli inspect {MODEL} --json - | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("{")
    assert not done.stderr

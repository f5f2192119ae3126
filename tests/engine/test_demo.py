"""``vllm-yoco demo`` as a user runs it: a full run, a server that cannot start, signals. And the offline example."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.harness import UNIPROC
from vllm_yoco.tools.server import ServerError, running_server

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "vllm_yoco.tools.cli", "demo", "--prompt-tokens", "600"]
RANDOM = ("--config", "ced-tiny")

pytestmark = pytest.mark.slow


def environment(**extra: str) -> dict[str, str]:
    """Without what other tests set, and without a core of one's own: engines in parallel would share one."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_"))}
    return inherited | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | extra


def start(logs: Path, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "--log-dir", str(logs), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )


def left_over(folder: Path) -> list[str]:
    """Processes whose working directory is ``folder``: those of a server that logs there, whatever their names."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder.resolve():
                found.append((process / "comm").read_text().strip())
        except OSError:
            continue
    return found


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in {log}"
        time.sleep(0.2)


def test_full_run(tmp_path: Path) -> None:
    process = start(tmp_path, **UNIPROC)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, out + err
    # ced-byte-plain: W = 128, four consumer layers
    assert re.search(r"rows in each of 4 consumer layers +129 of 600 +600 of 600\n", out)
    assert re.search(r"time to first token, best of 5 +\d+\.\d{3} s +\d+\.\d{3} s\n", out)
    assert re.search(r"  the worst of them +\d+\.\d{3} s +\d+\.\d{3} s\n", out)
    assert re.search(r"speed-up +\d+\.\d\dx; by FLOPs \d\.\d\dx, with consumer layers for free \d\.\d\dx\n", out)
    assert re.search(r"kept rows K +129 \(min\), approximate; lossless from 509\n", out)
    assert re.search(r"continuation +the first \d+ of 32 greedy tokens agree\n", out)
    assert re.search(
        r"first token +log-probabilities differ by at most [\d.e-]+ nat \(\d+ tokens in both top 20\)", out
    )
    assert out.count("usage 600 prompt + 32 completion tokens") == 2
    # Trained weights: what truncation changes is small, and records outside the kept rows are still found.
    assert float(re.search(r"differ by at most ([\d.e-]+) nat", out)[1]) < 0.5
    compact, off, alike = map(
        int, re.search(r"questions +(\d+) of 20 answered right, (\d+) by off; (\d+) alike", out).groups()
    )
    assert min(compact, off) >= 15 and alike >= 18
    assert out.splitlines()[-1].startswith("ok: rows as planned in every layer, all log-probabilities finite")
    assert left_over(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compact.log", "off.log"]


def test_server_that_cannot_start(tmp_path: Path) -> None:
    process = start(tmp_path, *RANDOM, "--", "--max-model-len", "600", "--num-gpu-blocks-override", "2", **UNIPROC)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    *tail, last = err.rstrip().splitlines()
    assert last.startswith("vllm-yoco demo: the server ended with exit code 1 before it was healthy.")
    assert tail == (tmp_path / "compact.log").read_text().rstrip().splitlines()[-len(tail) :]
    assert len(tail) > 10
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "code", "when"),
    [
        (signal.SIGINT, 130, "YOCO truncation compact"),  # one process
        (signal.SIGTERM, 143, "Application startup complete"),  # all of them
    ],
)
def test_a_signal_leaves_no_process(tmp_path: Path, number: signal.Signals, code: int, when: str) -> None:
    process = start(tmp_path, *RANDOM)
    wait_for(when, tmp_path / "compact.log")
    assert left_over(tmp_path)
    process.send_signal(number)
    process.send_signal(number)  # an impatient user
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.strip().endswith(f"stopped by {number.name}, and its server with it.")
    assert left_over(tmp_path) == []


def test_server_that_is_too_slow(tmp_path: Path) -> None:
    server = running_server(["no-such-model"], log=tmp_path / "log", timeout_seconds=1)
    with pytest.raises(ServerError, match="not healthy within 1 s"), server:
        pytest.fail("it cannot be healthy")
    assert left_over(tmp_path) == []


def test_offline_example() -> None:
    env = environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    command = [sys.executable, str(ROOT / "examples" / "offline_compare.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
    assert result.returncode == 0, result.stderr
    off, least, exact = result.stdout.splitlines()[-3:]
    # <bos> and 900, 700 and 20 bytes; W = 24, four layers with a window of their own
    assert off.split()[1] == f"{901 + 701 + 21:,}"
    assert least.split()[3] == str(25 + 25 + 21)
    assert exact.split()[3] == str(93 + 93 + 21)
    assert "3 of 3" in exact and float(exact.split()[-1]) < 1e-4 < float(least.split()[-1])

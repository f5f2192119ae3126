"""Counters of several processes, published by several front ends: each count appears once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_yoco import counters
from vllm_yoco.plan import Mode

NOTHING = dict.fromkeys(counters.NAMES, 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(counters.ENV, "")
    yield


def test_rows_of_a_step() -> None:
    """L = 400, K = 70: s_keep = 330. A placeholder is computed only beside rows that somebody needs."""
    below, crossing, short, decode = (0, 128, 400, 70), (256, 128, 400, 70), (0, 50, 50, 70), (500, 1, 400, 70)

    def rows(*chunks: tuple[int, int, int, int], mode: Mode = "compact", may_idle: bool = True) -> list[int]:
        counts = counters.step_rows(chunks, mode, may_idle=may_idle)
        assert counts["scheduled"] == counts["consumer_computed"] + counts["consumer_dropped"]
        return [counts[name] for name in ("scheduled", "consumer_computed", "placeholder", "prompts_truncated")]

    assert rows(below) == rows((128, 128, 400, 70)) == [128, 0, 0, 0]
    assert rows(below, below) == [256, 0, 0, 0]
    assert rows(below, may_idle=False) == rows(below, decode) == [128, 1, 1, 0]
    assert rows(below, crossing) == [256, 1 + 54, 1, 0]
    assert rows(below, short) == [178, 51, 1, 0]
    assert rows((384, 16, 400, 70)) == [16, 16, 0, 1]
    assert rows(below, mode="mask") == [128, 128, 0, 0]
    assert rows(decode) == [0, 0, 0, 0]


def as_api_server(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)


def test_each_count_is_taken_once() -> None:
    assert counters.take("engine") == NOTHING  # before anybody has counted
    counts = counters.CounterFile("engine")
    counts.add(scheduled=300, prompts_truncated=1)
    assert counters.take("engine") == NOTHING | {"scheduled": 300, "prompts_truncated": 1}
    assert counters.take("engine") == NOTHING
    counts.add(scheduled=7)
    assert counters.take("engine") == NOTHING | {"scheduled": 7}
    assert counters.read("engine")["scheduled"] == 307
    counters.CounterFile("another").add(scheduled=1)
    assert counters.take("engine") == NOTHING


def test_api_servers_share_the_engine_of_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    counters.announce("engine")
    counters.CounterFile("engine").add(scheduled=300)
    as_api_server(monkeypatch, "ApiServer_1")
    assert counters.take("own id of server 1")["scheduled"] == 300
    counters.CounterFile("own id of server 1").add(prompt_logprobs_dropped=1)
    as_api_server(monkeypatch, "ApiServer_0")
    assert counters.take("own id of server 0") == NOTHING | {"prompt_logprobs_dropped": 1}
    as_api_server(monkeypatch, "MainProcess")
    assert counters.take("own id of server 0") == NOTHING  # elsewhere an id is what it says


COUNT = "import sys; from vllm_yoco import counters as c; x = c.CounterFile(sys.argv[1]); x.add(scheduled=1); "


def test_what_a_killed_engine_left_is_removed_by_the_next() -> None:
    """Folders of live engines, of other users' names and of those that just start stay."""
    environment = os.environ | {"TMPDIR": tempfile.gettempdir()}

    def engine(name: str, then: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", COUNT + then, name], env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.read(1) == b"."
        return process

    wait = "print('.', end='', flush=True); sys.stdin.read()"
    killed, alive, new = engine("killed", wait), engine("alive", wait), engine("new", wait)
    for process in (killed, new):
        process.kill()
        process.communicate()
    other = Path(tempfile.gettempdir()) / f"vllm-yoco-{os.getuid() + 1}-other"
    other.mkdir()
    long_ago = time.time() - 2 * counters.GRACE_S
    for folder in (counters.directory("killed"), counters.directory("alive"), other):
        os.utime(folder, (long_ago, long_ago))
    counters.CounterFile("another")
    assert not counters.directory("killed").exists()
    assert counters.directory("new").exists() and other.exists()
    assert counters.read("alive")["scheduled"] == 1
    alive.communicate()

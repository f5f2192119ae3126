"""Counters of several processes, published by several front ends: each count appears once."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_yoco import counters

NOTHING = dict.fromkeys(counters.NAMES, 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(counters.ENV, "")
    yield


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

"""Fixtures of the GPU tests: one child process with engines on the GPU, made again if a test takes it down.

Where vLLM has no compiled extensions (the kit), settings.py has the options that every engine needs. In a rehearsal
the same tests run on a CPU through Triton's interpreter, on shorter prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_kit.checkpoint import small_checkpoint
from gpu_kit.settings import is_rehearsal
from tests.engine.conftest import Reference
from tests.engine.harness import RunnerProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or is_rehearsal():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_checkpoint(tmp_path_factory.mktemp("models") / "ced-tiny"))


class Revivable:
    """A runner's process. One that died (an illegal memory access does that) is replaced for the next test."""

    def __init__(self) -> None:
        self.process: RunnerProcess | None = None

    def get(self) -> RunnerProcess:
        if self.process is None or not self.process.is_alive():
            self.close()
            self.process = RunnerProcess("v2" if is_rehearsal() else "native")
        return self.process

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


@pytest.fixture(scope="session")
def runner() -> Iterator[Revivable]:
    revivable = Revivable()
    yield revivable
    revivable.close()


@pytest.fixture
def engine(runner: Revivable) -> RunnerProcess:
    return runner.get()


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()

"""Fixtures of the engine tests: model directories, one process per model runner, the dense reference."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.harness import RUNNERS, Request, Result, RunnerProcess
from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint
from vllm_yoco.models.reference import DenseYoco

CONFIGS = Path(__file__).parents[2]
MODEL_CONFIGS = {
    "ced-tiny": CONFIGS / "configs/models/ced-tiny.json",
    "kv-shared": CONFIGS / "tests/data/models/kv-shared.json",
    "no-swa": CONFIGS / "tests/data/models/no-swa.json",
    "shared-hidden": CONFIGS / "tests/data/models/shared-hidden.json",
}

MAX_LOGPROB_DIFFERENCE = 1e-4
"""Tolerance of float32 engines against the float32 reference, in nats."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Directory of a random checkpoint by name, made on first use."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(name: str) -> str:
        config = read_model_config(MODEL_CONFIGS[name])
        save_checkpoint(root / name, config, random_state_dict(config, seed=0))
        return str(root / name)

    return make


@pytest.fixture(scope="session")
def runner_processes() -> Iterator[Callable[[str], RunnerProcess]]:
    processes: dict[str, RunnerProcess] = {}

    def get(runner: str) -> RunnerProcess:
        if runner not in processes:
            processes[runner] = RunnerProcess(runner)
        return processes[runner]

    yield get
    for process in processes.values():
        process.close()


@pytest.fixture(scope="session", params=RUNNERS)
def engine(request: pytest.FixtureRequest, runner_processes: Callable[[str], RunnerProcess]) -> RunnerProcess:
    """The process of one model runner; tests that use it run on both."""
    if request.param == "v2" and importlib.util.find_spec("triton") is None:
        pytest.skip("Model Runner V2 on a CPU needs Triton's interpreter")
    return runner_processes(request.param)


class Reference:
    """Dense float32 log-probabilities, computed once per (model, sequence, K)."""

    def __init__(self) -> None:
        self._models: dict[str, DenseYoco] = {}
        self._rows: dict[tuple, np.ndarray] = {}

    def logprobs(self, model: str, tokens: Sequence[int], num_prompt_tokens: int, keep: int | None) -> np.ndarray:
        """[tokens, vocabulary]; ``keep`` None is ``off``."""
        if keep is not None and keep >= num_prompt_tokens:
            keep = None
        key = (model, tuple(tokens), num_prompt_tokens, keep)
        if key not in self._rows:
            if model not in self._models:
                self._models[model] = DenseYoco.from_pretrained(model)
            with torch.no_grad():
                rows = self._models[model].logprobs(
                    torch.tensor(tokens), num_prompt_tokens=num_prompt_tokens, keep_tokens=keep
                )
            self._rows[key] = rows.double().numpy()
        return self._rows[key]

    def difference(self, model: str, request: Request, result: Result, keep: int | None) -> float:
        """Largest |delta logprob| over all generated positions and the vocabulary, along the engine's tokens."""
        length = len(request.prompt)
        expected = self.logprobs(model, [*request.prompt, *result.tokens], length, keep)
        rows = expected[length - 1 : length - 1 + len(result.tokens)]
        assert result.logprobs.shape == rows.shape
        return float(np.abs(result.logprobs - rows).max())

    def check(self, model: str, request: Request, result: Result, keep: int | None) -> None:
        """The engine's greedy tokens and log-probabilities are the reference's."""
        length = len(request.prompt)
        expected = self.logprobs(model, [*request.prompt, *result.tokens], length, keep)
        rows = expected[length - 1 : length - 1 + len(result.tokens)]
        assert len(result.tokens) == request.max_tokens
        where = f"L={length} K={keep}"
        assert self.difference(model, request, result, keep) <= MAX_LOGPROB_DIFFERENCE, where
        assert result.tokens == rows.argmax(-1).tolist(), where


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Byte tokens; equal seeds share a prefix."""
    rng = np.random.default_rng(seed)
    return tuple(int(token) for token in rng.integers(0, 256, length))

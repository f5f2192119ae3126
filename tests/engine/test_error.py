"""``vllm-yoco error`` on real engines: the same numbers as the dense model, zero where nothing may change."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.harness import RUNNERS
from vllm_yoco.config import Truncation, YocoConfig, resolve_truncation
from vllm_yoco.models.checkpoint import load_checkpoint
from vllm_yoco.models.reference import DenseYoco
from vllm_yoco.tools.check_inputs import random_prompts
from vllm_yoco.tools.cli import main
from vllm_yoco.tools.engine_process import EngineError, EngineHost, EngineSpec
from vllm_yoco.tools.error_backends import EngineBackend, ReferenceBackend
from vllm_yoco.tools.error_study import measure

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
MAX_TOKENS = 6
LENGTHS = (20, 130, 200)


@pytest.fixture(scope="module", params=RUNNERS)
def host(request: pytest.FixtureRequest) -> Iterator[EngineHost]:
    with EngineHost(request.param, environment=ENVIRONMENT) as host:
        yield host


def test_engine_equals_reference(host, model_dir):
    """Same prompts, same continuation: the engine's errors are the dense model's, at every K and position."""
    directory = model_dir("ced-tiny")
    config, weights = load_checkpoint(directory)
    prompts = random_prompts(LENGTHS, config.vocab_size, seed=0)
    truncations: list[Truncation] = [
        resolve_truncation(YocoConfig(truncation="compact", keep_tokens=keep), config.topology())
        for keep in ("min", 50, "exact")
    ]
    spec = EngineSpec(directory, "off", 25, "float32", max_model_len=256, chunk_tokens=96, kv_cache_bytes=64 << 20)
    engine = measure(EngineBackend(host, spec, "float32"), prompts, truncations, MAX_TOKENS)
    dense = measure(ReferenceBackend(DenseYoco(config, weights), 93), prompts, truncations, MAX_TOKENS)
    assert engine["ok"] and dense["ok"]
    assert engine["computed_by"] == {"backend": "engine", "dtype": "float32", "runner": host.runner}
    for a, b in zip(engine["points"], dense["points"], strict=True):
        assert a["layers"] is None and b["layers"] is not None
        assert [a[n] for n in ("keep_tokens", "cut", "top1", "divergence")] == [
            b[n] for n in ("keep_tokens", "cut", "top1", "divergence")
        ]
        for name in ("kl_at", "delta_mean_at", "delta_max_at"):
            np.testing.assert_allclose(a[name], b[name], atol=3e-5)
        assert a["perplexity"] == pytest.approx(b["perplexity"], rel=1e-4)
    largest = [point["delta_max"] for point in engine["points"]]
    assert largest[0] > largest[1] > 100 * largest[2]
    assert largest[2] == engine["points"][2]["unchanged_max"] < 1e-5


def test_command(model_dir, tmp_path):
    """Text with a given continuation, scored by a real engine."""
    prompts = tmp_path / "prompts.jsonl"
    text = "The quick brown fox jumps over the lazy dog. " * 3
    prompts.write_text(json.dumps({"prompt": text, "continuation": "And again."}))
    process = subprocess.run(
        [sys.executable, "-m", "vllm_yoco.tools.cli", "error", model_dir("ced-tiny"), "--prompts", str(prompts)]
        + ["--backend", "engine", "--runner", "v1", "--keep-tokens", "min,exact", "--json", "-"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["prompt_tokens"] == [136] and report["continuation_tokens"] == [10]
    assert report["continuation"] == "given"
    assert report["computed_by"]["runner"] == "v1"
    assert report["points"][0]["delta_max"] > 0.01 > 1e-5 > report["points"][1]["delta_max"]


def test_engine_that_fails(model_dir, monkeypatch, capsys):
    """As test_check's that cannot start, which takes a real one."""

    def fail(*args):
        raise EngineError("the engine process ended with exit code 3", "its last words")

    monkeypatch.setattr(EngineHost, "call", fail)
    assert main(["error", model_dir("ced-tiny"), "--backend", "engine", "--keep-tokens", "min"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "its last words",
        "vllm-yoco error: the engine process ended with exit code 3. Details are above.",
    ]
    assert Path(model_dir("ced-tiny")).is_dir()

"""The engine invariants on a CUDA device, with the attention backend that the platform selects."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.conftest import CONFIGS, random_prompt
from tests.engine.harness import EngineConfig, Request, RunnerProcess
from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint
from vllm_yoco.models.reference import DenseYoco

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEEP = 71
LENGTHS = (1, 24, 25, 70, 71, 72, 193, 300, 500)
MAX_DIFFERENCE = 2e-3
"""In nats, float32 with TF32 off: GPU kernels sum in another order than the reference."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = read_model_config(CONFIGS / "configs/models/ced-tiny.json")
    directory = tmp_path_factory.mktemp("models") / "ced-tiny"
    save_checkpoint(directory, config, random_state_dict(config, seed=0))
    return str(directory)


@pytest.fixture(scope="module")
def process():
    running = RunnerProcess("native")
    yield running
    running.close()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("chunk_tokens", [77, 1024])
@pytest.mark.parametrize("truncation", ["off", "mask", "compact"])
def test_equals_reference(process, model, truncation, chunk_tokens, graphs):
    config = EngineConfig(
        model,
        truncation,
        KEEP,
        chunk_tokens,
        block_size=32,
        options=(("enforce_eager", not graphs), ("gpu_memory_utilization", 0.05)),
    )
    reference = DenseYoco.from_pretrained(model)
    requests = [Request(random_prompt(length, seed=length), 8) for length in LENGTHS]
    for request, result in zip(requests, process.generate(config, requests), strict=True):
        length = len(request.prompt)
        with torch.no_grad():
            rows = reference.logprobs(
                torch.tensor([*request.prompt, *result.tokens]),
                num_prompt_tokens=length,
                keep_tokens=None if truncation == "off" else KEEP,
            )[length - 1 : -1]
        assert np.abs(result.logprobs - rows.double().numpy()).max() <= MAX_DIFFERENCE, f"L={length}"

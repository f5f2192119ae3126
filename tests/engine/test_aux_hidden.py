"""Auxiliary hidden states (vLLM's EAGLE-3 interface): what a draft head would read, under each mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import random_prompt
from tests.engine.harness import EngineConfig, Engines, Request, generate
from vllm_yoco.models.reference import DenseYoco, Trace

LENGTH, KEEP, BOUNDARY = 193, 71, 2
LAYERS = (0, 1, BOUNDARY, BOUNDARY + 1, 5, 6)
"""Layer inputs; 6 is the output of the last layer. Layer 2 is the boundary: its input exists for every row."""


def captured_aux(engines: Engines, config: EngineConfig, prompt: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Auxiliary hidden states of one prefill in one chunk, by layer, [L, hidden]."""
    captured: dict[int, np.ndarray] = {}

    def start(model: Any) -> None:
        forward = model.model.forward

        def spying(*args: Any, **kwargs: Any) -> Any:
            out, aux = forward(*args, **kwargs)
            if len(out) >= len(prompt):
                captured.update({i: a[: len(prompt)].float().numpy().copy() for i, a in zip(LAYERS, aux, strict=True)})
            return out  # the runner expects plain hidden rows: no draft head is configured

        model.set_aux_hidden_state_layers(LAYERS)
        model.model.forward = spying

    def stop(model: Any) -> None:
        del model.model.forward
        model.set_aux_hidden_state_layers(())

    llm = engines.get(config)
    llm.apply_model(start)
    try:
        generate(engines, config, [Request(prompt, 1)])
    finally:
        llm.apply_model(stop)
    return captured


@pytest.mark.parametrize("truncation", ["off", "mask", "compact"])
def test_aux_hidden_states(engine, model_dir, truncation):
    model, prompt = model_dir("ced-tiny"), random_prompt(LENGTH, seed=LENGTH)
    config = EngineConfig(model, truncation, KEEP, chunk_tokens=256)
    aux = engine.call(captured_aux, config, prompt)
    assert tuple(aux) == LAYERS
    trace = Trace()
    with torch.no_grad():
        reference = DenseYoco.from_pretrained(model)
        reference.forward(
            torch.tensor(prompt),
            num_prompt_tokens=LENGTH,
            keep_tokens=None if truncation == "off" else KEEP,
            trace=trace,
        )
    first_kept = LENGTH - KEEP
    for layer in LAYERS:
        inputs = trace.hidden[layer - 1] if layer else reference.model.embed_tokens(torch.tensor(prompt)).detach()
        expected = inputs.reshape(LENGTH, -1).numpy()
        rows = slice(first_kept if layer > BOUNDARY and truncation == "compact" else 0, None)
        np.testing.assert_allclose(aux[layer][rows], expected[rows], atol=2e-4)
        if truncation == "compact" and layer > BOUNDARY:
            assert not aux[layer][:first_kept].any(), "dropped rows are zeros"
            assert np.abs(expected[:first_kept]).min() > 0, "negative control: the full rows are not"

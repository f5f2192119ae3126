"""``off`` is vLLM without the plugin: bit-identical to a process that only knows the config and model class."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.conftest import random_prompt
from tests.engine.harness import RUNNERS, EngineConfig, Engines, Request, RunnerProcess
from tests.engine.test_equivalence import requests


def register_model_class_only(engines: Engines) -> None:
    """What a user of the model without the plugin would write."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from vllm_yoco.models.config import YocoModelConfig

    AutoConfig.register("yoco", YocoModelConfig)
    ModelRegistry.register_model("YocoForCausalLM", "vllm_yoco.models.yoco:YocoForCausalLM")


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_off_is_bit_identical_to_no_plugin(runner, model_dir):
    """In two fresh processes: an engine that was compiled earlier in a process changes the last bits of later ones."""
    batch = [*requests(), Request(random_prompt(64, seed=5), 20)]
    config = EngineConfig(model_dir("ced-tiny"), "off", chunk_tokens=77)
    bare_config = EngineConfig(model_dir("ced-tiny"), "absent", chunk_tokens=77)
    bare = RunnerProcess(runner, {"VLLM_PLUGINS": ""})
    try:
        bare.call(register_model_class_only)
        assert bare.call(_installed) is False
        expected = bare.generate(bare_config, batch)
    finally:
        bare.close()
    process = RunnerProcess(runner)
    try:
        outputs = [process.generate(config, batch), process.generate(bare_config, batch)]
        assert process.call(_installed) is True
    finally:
        process.close()
    for with_plugin in outputs:
        for result, plain in zip(with_plugin, expected, strict=True):
            assert result.tokens == plain.tokens
            np.testing.assert_array_equal(result.logprobs, plain.logprobs)


def _installed(engines: Engines) -> bool:
    from vllm_yoco import compat

    return compat.is_active()

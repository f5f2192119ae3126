"""Features of vLLM that read what truncation changes, or that a user would turn on without thinking of it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.conftest import MAX_LOGPROB_DIFFERENCE, random_prompt
from tests.engine.harness import EngineConfig, Engines, Request
from tests.engine.test_equivalence import ODD_KEEP, check, requests
from vllm_yoco.models import weights
from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint


def test_default_compilation_settings(runner_processes, reference, model_dir):
    """Without --enforce-eager. V1 only: Inductor does not know the stand-in that V2 needs on a CPU."""
    engine = runner_processes("v1")
    config = EngineConfig(
        model_dir("ced-tiny"), "compact", ODD_KEEP, chunk_tokens=77, options=(("enforce_eager", False),)
    )
    check(engine, reference, config, requests())


def test_tied_embeddings(engine, reference, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tied")
    config = read_model_config("configs/models/ced-tiny.json")
    config.tie_word_embeddings = True
    save_checkpoint(directory / "model", config, random_state_dict(config, seed=3))
    check(engine, reference, EngineConfig(str(directory / "model"), "compact", ODD_KEEP), requests((70, 193, 300)))


def test_sliding_producers(engine, reference, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sliding")
    config = read_model_config("tests/data/models/sliding-producers.json")
    save_checkpoint(directory / "model", config, random_state_dict(config, seed=3))
    for truncation in ("off", "mask", "compact"):
        check(engine, reference, EngineConfig(str(directory / "model"), truncation, ODD_KEEP), requests())


def test_prefix_hits_with_sliding_producers(engine, reference, tmp_path_factory):
    """A hit needs the producers' window below the cap as well, which vLLM does not retain by itself."""
    directory = tmp_path_factory.mktemp("sliding")
    config = read_model_config("tests/data/models/sliding-producers.json")
    save_checkpoint(directory / "model", config, random_state_dict(config, seed=3))
    engine_config = EngineConfig(str(directory / "model"), "compact", ODD_KEEP, prefix_caching=True)
    batch = requests((97, 300, 411))
    check(engine, reference, engine_config, batch)
    results = engine.generate(engine_config, batch)
    for request, result in zip(batch, results, strict=True):
        assert result.num_cached_tokens == (len(request.prompt) - ODD_KEEP) // 32 * 32
        reference.check(engine_config.model, request, result, ODD_KEEP)


def several_samples(engines: Engines, config: EngineConfig, prompt: tuple[int, ...]) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(n=4, temperature=0.8, max_tokens=12, ignore_eos=True)
    outputs = engines.get(config).generate([TokensPrompt(prompt_token_ids=list(prompt))], params, use_tqdm=False)
    return [list(completion.token_ids) for completion in outputs[0].outputs]


def test_parallel_sampling_then_greedy(engine, reference, model_dir):
    """n > 1 shares a prompt between four requests; what follows is undisturbed."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, prefix_caching=True)
    samples = engine.call(several_samples, config, random_prompt(300, seed=300))
    assert len({tuple(sample) for sample in samples}) > 1
    assert all(len(sample) == 12 for sample in samples)
    check(engine, reference, config, requests((97, 300)))


def structured(engines: Engines, config: EngineConfig, prompt: tuple[int, ...]) -> Any:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    from tests.engine.harness import to_result

    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        logprobs=-1,
        structured_outputs=StructuredOutputsParams(regex=r"(yes|no): [0-9]{3,6}"),
    )
    outputs = engines.get(config).generate([TokensPrompt(prompt_token_ids=list(prompt))], params, use_tqdm=False)
    return to_result(outputs[0])


def test_structured_output(engine, reference, model_dir):
    """The grammar holds, and over the allowed tokens the values are those of the truncated reference."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, chunk_tokens=77)
    prompt = random_prompt(300, seed=300)
    result = engine.call(structured, config, prompt)
    text = bytes(token for token in result.tokens if token < 256).decode()
    assert re.fullmatch(r"(yes|no): [0-9]{3,6}", text)
    rows = reference.logprobs(config.model, [*prompt, *result.tokens], len(prompt), ODD_KEEP)[len(prompt) - 1 : -1]
    for row, masked in zip(rows, result.logprobs, strict=True):
        allowed = np.isfinite(masked)
        assert 0 < allowed.sum() < len(row)
        expected = row[allowed] - np.logaddexp.reduce(row[allowed])
        assert np.abs(masked[allowed] - expected).max() <= MAX_LOGPROB_DIFFERENCE


def test_long_decode_after_truncation(engine, reference, model_dir):
    """The window leaves the prompt and crosses several blocks of rebased cells."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", "min", chunk_tokens=77)
    check(engine, reference, config, [Request(random_prompt(n, seed=n), 90) for n in (190, 200, 223)])


@pytest.mark.parametrize("truncation", ["mask", "compact"])
def test_bfloat16(engine, model_dir, truncation):
    """Half precision runs and stays near float32; how near is no statement about truncation."""
    batch = requests((70, 193, 300), max_tokens=1)
    exact = engine.generate(EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP), batch)
    half = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, options=(("dtype", "bfloat16"),))
    for result, expected in zip(engine.generate(half, batch), exact, strict=True):
        assert np.abs(result.logprobs - expected.logprobs).max() < 0.5


def admit_part(engines: Engines, config: EngineConfig) -> str:
    """Offer the engine one part of a prompt that arrives in several: ``accepted``, or the refusal in words."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    processor = engines.get(config).llm_engine.input_processor
    prompt = TokensPrompt(prompt_token_ids=[1, 2, 3])
    try:
        request = processor.process_inputs("part", prompt, SamplingParams(), ("generate",), resumable=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted" if request.resumable else "lost"


@pytest.mark.parametrize("truncation", ["mask", "compact"])
def test_streaming_input_is_refused(engine, reference, model_dir, truncation):
    """L would grow within the request, and the cells of its window would be looked for in another place."""
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP)
    refusal = engine.call(admit_part, config)
    assert refusal.startswith("VLLMValidationError: streaming input: ")
    assert f"--yoco-truncation {truncation}" in refusal
    check(engine, reference, config, requests((70, 193)))
    assert engine.call(admit_part, EngineConfig(model_dir("ced-tiny"))) == "accepted"


@pytest.mark.parametrize("suffix", ["weight_packed", "qweight", "weight_scale"])
def test_quantised_columns_are_not_shared_out_wrongly(monkeypatch, suffix):
    """Ranks cut the columns of an output projection; [global heads | window heads] has to be reordered for that."""
    config = read_model_config("configs/models/ced-tiny.json")
    name = f"model.layers.3.self_attn.o_proj.{suffix}"
    parameter = nn.Parameter(torch.zeros(1), requires_grad=False)
    monkeypatch.setattr(nn.Module, "named_parameters", lambda self: {name: parameter}.items())

    def load(tp_size: int) -> None:
        monkeypatch.setattr(weights, "get_tensor_model_parallel_world_size", lambda: tp_size)
        weights.load_weights(nn.Module(), config, config.topology(), [(name, torch.ones(1))])

    # A value of the whole tensor or of a row is the same on every rank: loading goes on, and misses the other weights.
    for tp_size in (1, 2):
        with pytest.raises(ValueError, match="the checkpoint lacks"):
            load(tp_size)
    parameter.input_dim = 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the checkpoint lacks"):
        load(1)
    with pytest.raises(ValueError, match=rf"^--tensor-parallel-size=2: must be 1 .*{suffix} is quantised"):
        load(2)

"""Requests that ask for prompt log-probabilities, under each policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import MAX_LOGPROB_DIFFERENCE, random_prompt
from tests.engine.harness import EngineConfig, RemoteError, Request
from tests.engine.test_equivalence import MODES, ODD_KEEP

LONG, SHORT = random_prompt(300, seed=300), random_prompt(60, seed=60)


def asking(prompt: tuple[int, ...], count: int, **sampling: Any) -> Request:
    return Request(prompt, 4, (("prompt_logprobs", count), *sampling.items()))


def prompt_table(result: Any, prompt: tuple[int, ...]) -> np.ndarray:
    """Log-probability of each prompt token but the first, [L - 1]."""
    return np.array([rows[token].logprob for rows, token in zip(result.prompt_logprobs[1:], prompt[1:], strict=True)])


@pytest.mark.parametrize("truncation", MODES)
@pytest.mark.parametrize("count", [0, 1, -1])
def test_drop_serves_without(engine, reference, model_dir, truncation, count):
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP)
    plain, asked = Request(LONG, 4), asking(LONG, count)
    for result in engine.generate(config, [plain, asked]):
        assert result.prompt_logprobs is None
        reference.check(config.model, plain, result, ODD_KEEP)


@pytest.mark.parametrize("truncation", MODES)
def test_short_prompt_is_served_as_usual(engine, model_dir, truncation):
    """Nothing is dropped from a prompt of at most K tokens, so nothing is unavailable, whatever the policy."""
    model = model_dir("ced-tiny")
    expected = engine.generate(EngineConfig(model), [asking(SHORT, 1)])[0]
    for policy in ("drop", "reject"):
        config = EngineConfig(model, truncation, ODD_KEEP, prompt_logprobs=policy)
        result = engine.generate(config, [asking(SHORT, 1)])[0]
        difference = np.abs(prompt_table(result, SHORT) - prompt_table(expected, SHORT)).max()
        assert difference <= MAX_LOGPROB_DIFFERENCE


@pytest.mark.parametrize("truncation", MODES)
@pytest.mark.parametrize("count", [0, 1, -1])
def test_reject_names_the_flag(engine, reference, model_dir, truncation, count):
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, prompt_logprobs="reject")
    with pytest.raises(RemoteError, match="--yoco-prompt-logprobs is reject"):
        engine.generate(config, [asking(LONG, count)])
    # The refusal harms nobody: the next request is served.
    plain = Request(LONG, 4)
    reference.check(config.model, plain, engine.generate(config, [plain])[0], ODD_KEEP)


@pytest.mark.parametrize("truncation", MODES)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_full_equals_off_and_mates_stay_truncated(engine, reference, model_dir, truncation, prefix_caching):
    model = model_dir("ced-tiny")
    expected = engine.generate(EngineConfig(model), [asking(LONG, 1)])[0]
    config = EngineConfig(model, truncation, ODD_KEEP, prompt_logprobs="full", prefix_caching=prefix_caching)
    mate = Request(random_prompt(211, seed=211), 6)
    for _ in range(2):  # the second time with whatever the first left in the prefix cache
        full, truncated, plain = engine.generate(config, [asking(LONG, 1), mate, Request(LONG, 4)])
        difference = np.abs(prompt_table(full, LONG) - prompt_table(expected, LONG)).max()
        assert difference <= MAX_LOGPROB_DIFFERENCE
        reference.check(model, Request(LONG, 4), full, None)
        reference.check(model, mate, truncated, ODD_KEEP)
        reference.check(model, Request(LONG, 4), plain, ODD_KEEP)
    # Negative control: the same comparison tells full rows from truncated ones.
    assert reference.difference(model, Request(LONG, 4), plain, None) > MAX_LOGPROB_DIFFERENCE


def test_full_with_cache_reading_forced_on(engine, reference, model_dir):
    """A client may ask vLLM to read the prefix cache all the same; a hit would leave rows without SWA."""
    model = model_dir("ced-tiny")
    config = EngineConfig(model, "compact", ODD_KEEP, prompt_logprobs="full", prefix_caching=True)
    request = asking(LONG, 1, skip_reading_prefix_cache=False)
    engine.generate(config, [Request(LONG, 4)])
    result = engine.generate(config, [request])[0]
    assert result.num_cached_tokens == 0
    reference.check(model, Request(LONG, 4), result, None)

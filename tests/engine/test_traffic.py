"""A short, seeded run of the random traffic of ``tests.engine.traffic``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.traffic import engine_configs, mismatch, run_round, save_models

ROUNDS = 21


@pytest.mark.slow
def test_random_traffic(engine, reference, tmp_path_factory):
    configs = engine_configs(save_models(tmp_path_factory.mktemp("traffic")))
    total, problems, other_keep = Counter(), [], 0
    for number in range(ROUNDS):
        counts, found, pairs = run_round(engine, reference, configs, 0, number)
        total.update(counts)
        problems += found
        config = configs[number % len(configs)]
        # Negative control: the same traffic does not pass for that of another K.
        other_keep += sum(
            mismatch(reference, config.model, request, result, config.keep_tokens + 1) is not None
            for request, result in pairs
            if len(request.prompt) > config.keep_tokens
        )
    assert not problems
    assert other_keep > ROUNDS
    # The traffic holds what it is meant to hold.
    assert min(total[name] for name in ("preemptions", "hits", "aborted")) >= 10, total
    assert min(total["drafts"], total["poisoned"]) > 100, total

"""N-gram drafts with truncation on: rows that are verified, kept or taken back, at every edge of a layout."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tests.engine.conftest import MAX_LOGPROB_DIFFERENCE, random_prompt
from tests.engine.harness import EngineConfig, RemoteError, Request
from tests.engine.test_equivalence import MODES, ODD_KEEP, WINDOW
from tests.engine.test_scheduling import SMALL, check_served
from tests.engine.traffic import Arrival, Served
from vllm_yoco.plan import keep_start

DRAFTS = 3
MIN_KEEP = WINDOW + DRAFTS + 1
BLOCK = 32


def repetitive(length: int, period: int) -> tuple[int, ...]:
    """A prompt that makes the n-gram drafter bold; the model follows it now and then."""
    return (random_prompt(period, seed=period) * (length // period + 1))[:length]


# Every offset of prompt end and output to the blocks, 8 at a time.
ARRIVALS = tuple(
    Arrival(Request(repetitive(length, period), max_tokens=45), at)
    for length, period, at in (
        *((300, 7, 0), (130, 3, 0), (171, 1, 2), (60, 11, 3), (95, 5, 9), (100, 2, 0), (333, 24, 0)),
        *((201, 1, 20), (206, 2, 20), (211, 3, 20), (217, 4, 20), (222, 5, 20), (228, 6, 20), (233, 1, 20)),
    )
)


def edges(served: Served, arrivals: tuple[Arrival, ...], keep: int) -> Counter[str]:
    """How often accepted and rejected drafts lie across an edge of the consumer SWA layout of their request."""
    counts: Counter[str] = Counter()
    for index, arrival in enumerate(arrivals):
        length = len(arrival.request.prompt)
        shift = keep_start(length, keep) % BLOCK
        decodes = [step for step in served.steps if index in step.rows and step.start[index] >= length]
        for step, following in pairwise(decodes):
            first, drafts = step.start[index], step.drafts.get(index, 0)
            accepted = following.start[index] - first - 1
            if index in following.resumed or not 0 <= accepted <= drafts:
                continue
            for name, offset in (("block", shift), ("window", shift + WINDOW - 1)):
                block = [(row - offset) // BLOCK for row in (first, first + accepted, first + drafts)]
                counts[f"accepted over a {name} edge"] += block[0] != block[1]
                counts[f"rejected over a {name} edge"] += block[1] != block[2]
    return counts


@pytest.mark.parametrize("keep_tokens", [MIN_KEEP, ODD_KEEP])
@pytest.mark.parametrize("truncation", MODES)
def test_equals_reference(engine, reference, model_dir, truncation, keep_tokens):
    """Greedy tokens and log-probabilities are those of plain decoding, whatever was drafted."""
    config = EngineConfig(model_dir("ced-tiny"), truncation, keep_tokens, ngram_tokens=DRAFTS)
    served = check_served(engine, reference, config, ARRIVALS)
    counts = edges(served, ARRIVALS, keep_tokens)
    assert len(+counts) == 4, f"the drafts miss an edge: {counts}"
    # Negative control: another K is told apart under drafts too.
    differences = [
        reference.difference(config.model, arrival.request, result, keep_tokens + 1)
        for arrival, result in zip(ARRIVALS, served.results, strict=True)
    ]
    assert max(differences) > 10 * MAX_LOGPROB_DIFFERENCE


def test_equals_plain_engine(engine, model_dir):
    """Tokens of an engine without drafts, request for request."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", MIN_KEEP, ngram_tokens=DRAFTS)
    plain = EngineConfig(model_dir("ced-tiny"), "compact", MIN_KEEP)
    batch = [arrival.request for arrival in ARRIVALS]
    drafted = engine.generate(config, batch)
    assert [r.tokens for r in drafted] == [r.tokens for r in engine.generate(plain, batch)]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_with_drafts(engine, reference, model_dir, prefix_caching):
    config = EngineConfig(
        model_dir("ced-tiny"), "compact", MIN_KEEP, ngram_tokens=DRAFTS, prefix_caching=prefix_caching, **SMALL
    )
    arrivals = tuple(
        Arrival(Request(repetitive(length, period), max_tokens), at)
        for length, period, max_tokens, at in ((250, 1, 100, 0), (215, 2, 80, 0), (215, 2, 60, 5), (70, 3, 90, 9))
    )
    served = check_served(engine, reference, config, arrivals)
    assert sum(served.preemptions) >= 1


@pytest.mark.parametrize("truncation", MODES)
def test_keep_must_cover_backtracking(engine, model_dir, truncation):
    """K >= W + B with B = drafts + 1: what is enough without drafts is refused with them."""
    for keep in (WINDOW + 1, MIN_KEEP - 1):
        config = EngineConfig(model_dir("ced-tiny"), truncation, keep, ngram_tokens=DRAFTS)
        with pytest.raises(RemoteError, match=rf"keep-tokens.*={keep}.* W \+ B = 24 \+ 4 = 28"):
            engine.generate(config, [])


@pytest.mark.parametrize("keep_tokens", ["min", MIN_KEEP])
def test_smallest_keep_follows_the_drafts(engine, reference, model_dir, keep_tokens):
    config = EngineConfig(model_dir("ced-tiny"), "compact", keep_tokens, ngram_tokens=DRAFTS)
    request = Request(repetitive(150, 4), max_tokens=5)
    [result] = engine.generate(config, [request])
    reference.check(config.model, request, result, MIN_KEEP)

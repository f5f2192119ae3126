"""Verification of drafts that carry no distribution, such as those of n-grams.

Replaces kernels of ``rejection_sampler.py`` and ``rejection_sampler_utils.py`` in
``vllm/v1/worker/gpu/spec_decode/``. Launches with draft logits, block verification, synthetic acceptance rates or
watermarks go on to the interpreted kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from torch import Tensor

from vllm_yoco.testing.v2_kernels.sampling import block_argmax, gumbel_noise

_MODULE = "vllm.v1.worker.gpu.spec_decode."
_ELSEWHERE = ("HAS_DRAFT_LOGITS", "SYNTHETIC_MODE", "USE_BLOCK_VERIFICATION", "WATERMARK")


def _plain_drafts_only(kernel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(replacement: Callable[..., None]) -> Callable[..., None]:
        @wraps(replacement)
        def launch(*args: Any, grid: tuple[int, ...], **constants: Any) -> None:
            if any(constants.get(name) for name in _ELSEWHERE):
                from vllm.triton_utils.dispatcher import _registry

                original, _ = _registry[_MODULE + kernel]
                original[grid](*args, **constants)
            else:
                replacement(*args, **constants)

        del launch.__wrapped__  # the signature that counts is the one with the grid
        return launch

    return decorate


def gather_draft_sampled(
    draft_sampled: Tensor,
    pos: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    prefill_len: Tensor,
    num_logits: int,
    **launch: Any,
) -> None:
    """``_gather_draft_sampled_kernel``: token and position of each logits row; -1 for a draft that is none."""
    at = positions[logits_indices]
    placeholder = (expanded_local_pos > 0) & (at - expanded_local_pos < prefill_len[expanded_idx_mapping])
    draft_sampled.copy_(input_ids[logits_indices].masked_fill(placeholder, -1))
    pos.copy_(at)


def flatten_sampled(
    flat_sampled: Tensor,
    sampled: Tensor,
    sampled_stride: int,
    num_sampled: Tensor,
    cu_num_logits: Tensor,
    **launch: Any,
) -> None:
    """``_flatten_sampled_kernel``: from one row a request to one entry a logits row."""
    flat, tokens = flat_sampled.numpy(), sampled.numpy()
    for i, (count, start) in enumerate(zip(num_sampled.tolist(), cu_num_logits.tolist(), strict=False)):
        flat[start : start + count] = tokens[i, :count]


@_plain_drafts_only("rejection_sampler_utils._compute_local_logits_stats_kernel")
def local_logits_stats(
    target_local_argmax: Tensor,
    target_local_argmax_stride: int,
    target_local_max: Tensor,
    target_local_max_stride: int,
    target_local_sumexp: Tensor,
    target_local_sumexp_stride: int,
    draft_local_max: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: Tensor,
    draft_local_sumexp_stride: int,
    target_logits: Tensor,
    target_logits_stride: int,
    draft_logits: None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    *,
    BLOCK_SIZE: int,
    **launch: Any,
) -> None:
    """``_compute_local_logits_stats_kernel``: maximum, arg max and sum of exponentials of each vocabulary block.

    The kernel stores the arg max of greedy rows and the sum of other rows; here both are stored for all.
    """
    scores = target_logits.float().numpy()[:, :vocab_size]
    index, value = block_argmax(scores, BLOCK_SIZE)
    target_local_argmax.numpy()[:] = index
    target_local_max.numpy()[:] = value
    sums = target_local_sumexp.numpy()
    for block in range(sums.shape[1]):
        highest = value[:, block, None]
        part = scores[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
        sums[:, block] = np.exp(part - np.where(np.isfinite(highest), highest, 0)).sum(axis=1)


def _uniform(seed: int, offset: int) -> np.float32:
    """``tl.rand(seed, offset)``: ten rounds of Philox 4x32, the first word as a float in (0, 1)."""
    c0, c1, c2, c3 = offset & 0xFFFFFFFF, (offset >> 32) & 0xFFFFFFFF, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    magnitude = c0 ^ 0xFFFFFFFF if c0 >> 31 else c0  # as int32: ~x where negative
    return max(np.float32(magnitude) * np.float32(4.6566127342e-10), np.float32(4.6566127342e-10))


@_plain_drafts_only("rejection_sampler_utils._rejection_kernel")
def rejection(
    sampled: Tensor,
    sampled_stride: int,
    rejected_steps: Tensor,
    target_rejected_logsumexp: Tensor,
    draft_rejected_logsumexp: Tensor,
    target_logits: Tensor,
    target_logits_stride: int,
    target_local_argmax: Tensor,
    target_local_argmax_stride: int,
    target_local_max: Tensor,
    target_local_max_stride: int,
    target_local_sumexp: Tensor,
    target_local_sumexp_stride: int,
    draft_sampled: Tensor,
    draft_logits: None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    *unused: Any,
    **launch: Any,
) -> None:
    """``_rejection_kernel``: accept drafts while they are the arg max, or with the target's probability."""
    drafts, out = draft_sampled.tolist(), sampled.numpy()
    maxima, sums = target_local_max.numpy(), target_local_sumexp.numpy()
    cu = cu_num_logits.tolist()
    for i, req in enumerate(idx_mapping.tolist()):
        greedy = float(temp[req]) == 0.0
        accepted, lse = 0, np.float32(0)
        for step, row in enumerate(range(cu[i], cu[i + 1] - 1)):
            draft = drafts[row + 1]  # -1 where there is none
            highest = int(maxima[row].argmax())
            if greedy:
                out[i, step] = target_local_argmax.numpy()[row, highest]
                if out[i, step] != draft:
                    break
            elif draft < 0:
                break
            else:
                top = maxima[row, highest]
                lse = top + np.log((sums[row] * np.exp(maxima[row] - top)).sum())
                out[i, step] = draft
                u = _uniform(int(seed[req]), int(pos[row]))
                if not float(target_logits[row, draft]) - lse > np.log(u):
                    break
            accepted += 1
        rejected_steps[i] = accepted
        target_rejected_logsumexp[i], draft_rejected_logsumexp[i] = float(lse), 0.0


@_plain_drafts_only("rejection_sampler_utils._resample_kernel")
def resample(
    resampled_local_argmax: Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max: Tensor,
    resampled_local_max_stride: int,
    target_logits: Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp: Tensor,
    draft_logits: None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp: Tensor,
    rejected_step: Tensor,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    draft_sampled: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    *unused: Any,
    BLOCK_SIZE: int,
    USE_FP64: bool,
    **launch: Any,
) -> None:
    """``_resample_kernel``: draw the bonus token, or a token other than the rejected draft."""
    vocab_size = unused[-1]
    dtype = np.float64 if USE_FP64 else np.float32
    cu = cu_num_logits.tolist()
    for i, step in enumerate(rejected_step.tolist()):
        row, last = cu[i] + step, cu[i + 1] - 1
        req = int(expanded_idx_mapping[row])
        greedy = float(temp[req]) == 0.0
        if greedy and row != last:
            continue  # the arg max is already in place
        scores = target_logits[row, :vocab_size].float().numpy().astype(dtype)
        if row != last and (draft := int(draft_sampled[row + 1])) >= 0:
            scores[draft] = -np.inf
        if not greedy:
            at = np.array([[int(seed[req])]]), np.array([[int(pos[row])]])
            scores = scores + gumbel_noise(*at, vocab_size, USE_FP64)[0]
        index, value = block_argmax(scores[None], BLOCK_SIZE)
        resampled_local_argmax.numpy()[i], resampled_local_max.numpy()[i] = index[0], value[0]


def insert_resampled(
    sampled: Tensor,
    sampled_stride: int,
    num_sampled: Tensor,
    resampled_local_argmax: Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max: Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    temp: Tensor,
    **launch: Any,
) -> None:
    """``_insert_resampled_kernel``: put the drawn token after the accepted ones and count it."""
    cu, accepted = cu_num_logits.tolist(), num_sampled.tolist()
    for i, step in enumerate(accepted):
        row, last = cu[i] + step, cu[i + 1] - 1
        if float(temp[int(expanded_idx_mapping[row])]) != 0.0 or row == last:
            best = np.nan_to_num(resampled_local_max.numpy()[i], nan=-np.inf, posinf=np.inf, neginf=-np.inf).argmax()
            sampled[i, step] = resampled_local_argmax[i, best]
    num_sampled += 1


KERNELS = {
    _MODULE + "rejection_sampler._gather_draft_sampled_kernel": gather_draft_sampled,
    _MODULE + "rejection_sampler._flatten_sampled_kernel": flatten_sampled,
    _MODULE + "rejection_sampler_utils._compute_local_logits_stats_kernel": local_logits_stats,
    _MODULE + "rejection_sampler_utils._rejection_kernel": rejection,
    _MODULE + "rejection_sampler_utils._resample_kernel": resample,
    _MODULE + "rejection_sampler_utils._insert_resampled_kernel": insert_resampled,
}

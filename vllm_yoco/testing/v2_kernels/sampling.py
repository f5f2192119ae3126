"""Drawing tokens: temperature, min-p, top-k/top-p and the Gumbel arg max.

Replaces kernels of ``gumbel.py`` and ``min_p.py`` in ``vllm/v1/worker/gpu/sample/``, and the whole function
``apply_top_k_top_p_triton`` of ``vllm/v1/sample/ops/topk_topp_triton.py``, whose kernel the interpreter cannot run (it
calls ``.to`` on a loop variable, which is a Python integer there).

The Gumbel noise is the kernel's own, bit for bit: a seeded request draws the same tokens with either.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_DRAFT_NOISE_SALT = 1 << 30


def _rotate(x: np.ndarray, shift: int) -> np.ndarray:
    return (x << np.uint32(shift)) | (x >> np.uint32(32 - shift))


def _mix(h: np.ndarray, key: np.ndarray) -> np.ndarray:
    key = _rotate(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _murmur3(seed: np.ndarray, pos: np.ndarray, token: np.ndarray, domain: int = 0) -> np.ndarray:
    """MurmurHash3 (32 bit) of (seed, low half of pos, token); ``seed`` and ``pos`` are int64 columns."""
    low, high = (seed & 0xFFFFFFFF).astype(np.uint32), ((seed >> 32) & 0xFFFFFFFF).astype(np.uint32)
    h = np.full(seed.shape, domain, dtype=np.uint32)
    for key in (low, high, (pos & 0xFFFFFFFF).astype(np.uint32), token):
        h = _mix(h, key)
    h ^= np.uint32(16)  # bytes hashed
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _log1p_neg(x: np.ndarray) -> np.ndarray:
    """log(1 - x) as the kernel computes it: a series below 0.25, where 1 - x would lose the tail that decides."""
    polynomial = np.full_like(x, 1 / 8)
    for n in range(7, 0, -1):
        polynomial = np.float32(1 / n) + x * polynomial
    direct = np.log(np.maximum(np.float32(1) - x, np.float32(5.960464477539063e-08)))
    return np.where(x < np.float32(0.25), -x * polynomial, direct)


def gumbel_noise(seed: np.ndarray, pos: np.ndarray, vocab_size: int, fp64: bool) -> np.ndarray:
    """Noise ``[rows, vocab_size]`` for int64 columns ``seed`` and ``pos`` of shape ``[rows, 1]``."""
    token = np.arange(vocab_size, dtype=np.uint32)[None, :]
    bits = _murmur3(seed, pos, token)
    if fp64:
        high = _murmur3(seed, pos, token, domain=0x9E3779B9).astype(np.uint64)
        random53 = ((high << np.uint64(32)) | bits.astype(np.uint64)) >> np.uint64(11)
        u = (random53.astype(np.float64) + 0.5) * 2.0**-53
        return -np.log(-np.log(np.where(u == 1.0, u - 2.0**-53, u)))
    high, low = (bits >> np.uint32(16)).astype(np.float32), (bits & np.uint32(0xFFFF)).astype(np.float32)
    u = high * np.float32(2.0**-16) + (low + np.float32(0.5)) * np.float32(2.0**-32)
    return -np.log(-_log1p_neg(u))


def block_argmax(scores: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Per row and block of ``block`` columns: the first index of the maximum, and the maximum."""
    rows, columns = scores.shape
    blocks = -(-columns // block)
    padded = np.full((rows, blocks * block), -np.inf, dtype=scores.dtype)
    padded[:, :columns] = scores
    padded = padded.reshape(rows, blocks, block)
    index = padded.argmax(axis=2)
    return index + np.arange(blocks) * block, np.take_along_axis(padded, index[:, :, None], axis=2)[:, :, 0]


def gumbel_sample(
    local_argmax: Tensor,
    local_argmax_stride: int,
    local_max: Tensor,
    local_max_stride: int,
    logits_cache: Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col: Tensor | None,
    logits_cache_source: Tensor | None,
    logits_cache_source_stride: int,
    logits: Tensor,
    logits_stride: int,
    expanded_idx_mapping: Tensor,
    seeds: Tensor,
    pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
    **launch: Any,
) -> None:
    """``_gumbel_sample_kernel``: per vocabulary block the arg max of logits + noise; no noise at temperature 0."""
    reqs = expanded_idx_mapping.numpy()
    real = reqs >= 0
    if logits_cache is not None:
        at = torch.from_numpy(np.flatnonzero(real))
        column = logits_cache_col[at].long() if PER_TOKEN_COL else logits_cache_col.long().expand(len(at))
        logits_cache[expanded_idx_mapping[at].long(), column, :vocab_size] = logits_cache_source[at]

    scores = logits.float().numpy()
    if USE_FP64:
        scores = scores.astype(np.float64)
    temperature = np.where(real, temp.numpy()[reqs], np.float32(0))
    random = np.flatnonzero(temperature != 0)
    if len(random):
        chosen = scores[random]
        if APPLY_TEMPERATURE:
            chosen = (chosen.astype(np.float32) / temperature[random, None]).astype(chosen.dtype)
        at = pos.numpy().astype(np.int64)[random, None]
        noise = gumbel_noise(
            seeds.numpy()[reqs[random], None], at + _DRAFT_NOISE_SALT * IS_DRAFTING, vocab_size, USE_FP64
        )
        scores = scores.copy()
        scores[random] = chosen + noise
    index, value = block_argmax(scores, BLOCK_SIZE)
    local_argmax.numpy()[:] = index
    local_max.numpy()[:] = value


def apply_temperature(
    logits: Tensor,
    logits_stride: int,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    vocab_size: int,
    **launch: Any,
) -> None:
    """``_temperature_kernel``: greedy rows (temperature 0) stay as they are."""
    divisor = temperature[expanded_idx_mapping]
    logits.div_(divisor.masked_fill_(divisor == 0, 1).unsqueeze(1))


def apply_min_p(
    logits: Tensor,
    logits_stride: int,
    expanded_idx_mapping: Tensor,
    min_p: Tensor,
    vocab_size: int,
    **launch: Any,
) -> None:
    """``_min_p_kernel``: mask tokens less probable than min_p times the most probable one."""
    threshold = logits.amax(dim=1, keepdim=True) + min_p[expanded_idx_mapping].log().unsqueeze(1)
    logits.masked_fill_(logits < threshold, float("-inf"))


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float = float("-inf")) -> Tensor:
    """``apply_top_k_top_p_triton``: keep the k largest logits, and of these the smallest set of probability p.

    Exactly k stay even where the k-th is tied, as in the Triton kernel and unlike vLLM's PyTorch function.
    """
    if logits.shape[0] == 0 or (k is None and p is None):
        return logits
    ordered, index = logits.sort(dim=1, descending=True, stable=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if k is not None:
        drop |= torch.arange(logits.shape[1]) >= k.unsqueeze(1)
    if p is not None:
        probability = ordered.masked_fill(drop, float("-inf")).softmax(dim=1)
        # A token goes when those before it already reach p; the first one always stays.
        drop |= (probability.cumsum(dim=1) - probability >= p.unsqueeze(1)) & (p < 1).unsqueeze(1)
        drop[:, 0] = False
    return logits.masked_fill_(torch.zeros_like(drop).scatter_(1, index, drop), mask_value)


KERNELS = {
    "vllm.v1.worker.gpu.sample.gumbel._gumbel_sample_kernel": gumbel_sample,
    "vllm.v1.worker.gpu.sample.gumbel._temperature_kernel": apply_temperature,
    "vllm.v1.worker.gpu.sample.min_p._min_p_kernel": apply_min_p,
    "vllm.v1.sample.ops.topk_topp_triton.apply_top_k_top_p_triton": apply_top_k_top_p,
}

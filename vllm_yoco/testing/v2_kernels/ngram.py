"""N-gram drafts: the tokens that followed the last earlier occurrence of the suffix.

Replaces the kernels of ``vllm/v1/worker/gpu/spec_decode/ngram/speculator.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def ngram_scan(
    token_ids: Tensor,
    token_ids_stride: int,
    idx_mapping: Tensor,
    total_len: Tensor,
    num_sampled: Tensor,
    scratch: Tensor,
    scratch_stride: int,
    L: int,
    MIN_N: int,
    MAX_N: int,
    MAX_N_PO2: int,
    BLOCK_L: int,
    **launch: Any,
) -> None:
    """``_ngram_scan_kernel``: per block of positions, the best earlier match of the suffix.

    A match of n tokens at a position scores n * (L + 1) + position + 1: the longest wins, then the rightmost.
    """
    scores = scratch.numpy()
    for i, req in enumerate(idx_mapping.tolist()):
        scores[i] = 0
        length = int(total_len[req])
        if int(num_sampled[i]) <= 0 or length < MIN_N:
            continue
        tokens = token_ids.numpy()[req, :length]
        best = np.zeros(scores.shape[1] * BLOCK_L, dtype=np.int64)
        for n in range(MIN_N, min(MAX_N, length - 1) + 1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
            found = np.flatnonzero((windows == tokens[-n:]).all(axis=1))
            best[found] = n * (L + 1) + found + 1
        scores[i] = best.reshape(-1, BLOCK_L).max(axis=1)


def ngram_finalize(
    token_ids: Tensor,
    token_ids_stride: int,
    idx_mapping: Tensor,
    total_len: Tensor,
    num_sampled: Tensor,
    last_sampled: Tensor,
    scratch: Tensor,
    scratch_stride: int,
    drafts: Tensor,
    L: int,
    N_BLOCKS: int,
    K: int,
    K_PO2: int,
    N_BLOCKS_PO2: int,
    **launch: Any,
) -> None:
    """``_ngram_finalize_kernel``: the K tokens after the best match, filled up with the last sampled token."""
    out = drafts.numpy()
    for i, req in enumerate(idx_mapping.tolist()):
        out[i] = int(last_sampled[req])
        score = int(scratch[i, :N_BLOCKS].max())
        if score > 0 and int(num_sampled[i]) > 0:
            n, position = divmod(score - 1, L + 1)
            found = token_ids.numpy()[req, position + n : min(position + n + K, int(total_len[req]))]
            out[i, : len(found)] = found


_MODULE = "vllm.v1.worker.gpu.spec_decode.ngram.speculator."
KERNELS = {
    _MODULE + "_ngram_scan_kernel": ngram_scan,
    _MODULE + "_ngram_finalize_kernel": ngram_finalize,
}

"""Log-probabilities of chosen tokens, their ranks, and which tokens to report.

Replaces the kernels of ``vllm/v1/worker/gpu/sample/logprob.py`` and ``prompt_logprob.py``.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def topk_log_softmax(
    output: Tensor,
    logits: Tensor,
    logits_stride: int,
    topk_ids: Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    **launch: Any,
) -> None:
    """``_topk_log_softmax_kernel``, in float32 whatever the dtype of the logits."""
    logits = logits.float()
    torch.sub(logits.gather(1, topk_ids), torch.logsumexp(logits, dim=1, keepdim=True), out=output)


def ranks(
    output: Tensor, logits: Tensor, logits_stride: int, token_ids: Tensor, vocab_size: int, **launch: Any
) -> None:
    """``_ranks_kernel``: how many logits are at least that of the token (1 for the arg max)."""
    chosen = logits.gather(1, token_ids.long().unsqueeze(1))
    torch.sum(logits >= chosen, dim=1, out=output)


def fill_logprob_token_ids(
    out_token_ids: Tensor,
    out_token_ids_stride: int,
    out_valid_mask: Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids: Tensor,
    topk_indices: Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping: Tensor,
    num_per_req_token_ids: Tensor,
    per_req_token_ids: Tensor,
    per_req_token_ids_stride: int,
    *,
    NUM_TOPK: int,
    **launch: Any,
) -> None:
    """``_fill_logprob_token_ids_kernel``: the sampled token, then the request's own list, or the top k."""
    ids, valid = out_token_ids.numpy(), out_valid_mask.numpy()
    ids[:, 0], valid[:, 0] = sampled_token_ids.numpy(), True
    reqs = expanded_idx_mapping.numpy()
    custom = num_per_req_token_ids.numpy()[reqs]
    for i, (req, n) in enumerate(zip(reqs, custom, strict=True)):
        source = per_req_token_ids.numpy()[req, :n] if n > 0 else topk_indices.numpy()[i, :NUM_TOPK] if NUM_TOPK else ()
        ids[i, 1 : 1 + len(source)] = source
        valid[i, 1 : 1 + len(source)] = True


def prompt_logprobs_token_ids(
    token_ids: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    **launch: Any,
) -> None:
    """``_prompt_logprobs_token_ids_kernel``: for each row of a chunk, the token that follows it."""
    reqs = idx_mapping.numpy()
    starts = query_start_loc.numpy()[: len(reqs) + 1]
    query_lens = np.diff(starts)
    history = all_token_ids.numpy()
    column = np.arange(starts[-1]) + np.repeat(num_computed_tokens.numpy()[reqs] + 1 - starts[:-1], query_lens)
    # The row after the last one a request can hold has no next token; nothing reads what is stored there.
    np.minimum(column, history.shape[1] - 1, out=column)
    token_ids.numpy()[: starts[-1]] = history[np.repeat(reqs, query_lens), column]


_MODULE = "vllm.v1.worker.gpu.sample."
KERNELS = {
    _MODULE + "logprob._topk_log_softmax_kernel": topk_log_softmax,
    _MODULE + "logprob._ranks_kernel": ranks,
    _MODULE + "logprob._fill_logprob_token_ids_kernel": fill_logprob_token_ids,
    _MODULE + "prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids,
}

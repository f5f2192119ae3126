"""What a step reads and writes of the request states: input ids, positions, sequence lengths, sampled tokens.

Replaces the kernels of ``vllm/v1/worker/gpu/input_batch.py``. ``idx_mapping`` maps a row of the batch to a row of the
request states.
"""

from typing import Any

import numpy as np
from torch import Tensor


def prepare_prefill_inputs(
    input_ids: Tensor,
    next_prefill_tokens: Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    prefill_lens: Tensor,
    num_computed_tokens: Tensor,
    **launch: Any,
) -> None:
    """``_prepare_prefill_inputs_kernel``: the ids of each chunk and the ``num_lookahead`` ids after it."""
    ids, following, tokens = input_ids.numpy(), next_prefill_tokens.numpy(), all_token_ids.numpy()
    reqs, starts = idx_mapping.numpy(), query_start_loc.numpy()
    prefill, computed = prefill_lens.numpy()[reqs], num_computed_tokens.numpy()[reqs]
    for i in np.flatnonzero(computed < prefill):
        req, first, last = reqs[i], starts[i], starts[i + 1]
        begin = computed[i]
        end = begin + last - first
        ids[first:last] = tokens[req, begin:end]
        ahead = tokens[req, end : min(end + num_lookahead, prefill[i])]
        following[: len(ahead), req] = ahead
        following[len(ahead) : num_lookahead, req] = 0


def prepare_pos_seq_lens(
    pos: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    max_num_reqs: int,
    **launch: Any,
) -> None:
    """``_prepare_pos_seq_lens_kernel``: positions and lengths, with zero lengths after the last request."""
    reqs = idx_mapping.numpy()
    starts = query_start_loc.numpy()[: len(reqs) + 1]
    query_lens = np.diff(starts)
    computed = num_computed_tokens.numpy()[reqs]
    lens = seq_lens.numpy()
    lens[: len(reqs)] = computed + query_lens
    lens[len(reqs) : max_num_reqs] = 0
    pos.numpy()[: starts[-1]] = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], query_lens)


def combine_sampled_and_draft_tokens(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    draft_tokens_stride: int,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    *,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **launch: Any,
) -> None:
    """``_combine_sampled_and_draft_tokens_kernel``: the rows that yield logits, and generated ids as input."""
    reqs = idx_mapping.numpy()
    n = len(reqs)
    ids, ends = input_ids.numpy(), query_start_loc.numpy()[1 : n + 1]
    cu = cu_num_logits.numpy()[: n + 1]
    num_logits = np.diff(cu)
    logits_indices.numpy()[: cu[-1]] = np.arange(cu[-1]) + np.repeat(ends - cu[1:], num_logits)

    lens, prefill = seq_lens.numpy()[:n], prefill_len.numpy()[reqs]
    generating = lens > prefill
    if NUM_NEW_SAMPLED_TOKENS > 0:
        # The slot of the first logit belongs to the prompt's tail until it lies beyond the prefill.
        sampled = generating & (lens - num_logits >= prefill)
        ids[(ends - num_logits)[sampled]] = last_sampled_tokens.numpy().reshape(-1)[reqs[sampled]]
    num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
    for i in np.flatnonzero(generating & (num_drafts > 0)):
        ids[ends[i] - num_drafts[i] : ends[i]] = draft_tokens.numpy()[reqs[i], : num_drafts[i]]


def get_num_sampled_and_rejected(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
    **launch: Any,
) -> None:
    """``_get_num_sampled_and_rejected_kernel``: none of either for a chunk that does not end its prefill."""
    reqs = idx_mapping.numpy()
    n = len(reqs)
    generating = seq_lens.numpy()[:n] >= prefill_len.numpy()[reqs]
    sampled = num_sampled.numpy()
    sampled[:n] *= generating
    num_rejected.numpy()[:n] = (np.diff(cu_num_logits.numpy()[: n + 1]) - sampled[:n]) * generating


def post_update(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: Tensor,
    sampled_tokens_stride: int,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    total_len: Tensor,
    **launch: Any,
) -> None:
    """``_post_update_kernel``: append sampled tokens, count computed ones. Rows with index -1 are skipped."""
    reqs = idx_mapping.numpy()
    n = len(reqs)
    sampled, total = num_sampled.numpy(), total_len.numpy()
    tokens, history, last = (
        sampled_tokens.numpy(),
        all_token_ids.numpy(),
        last_sampled_tokens.numpy().reshape(-1),
    )
    counts = None if output_bin_counts is None else output_bin_counts.numpy()
    for i in np.flatnonzero((reqs >= 0) & (sampled[:n] > 0)):
        req, count = reqs[i], sampled[i]
        new = tokens[i, :count]
        last[req] = new[-1]
        history[req, total[req] : total[req] + count] = new
        total[req] += count
        if counts is not None:
            np.add.at(counts[req], new, 1)
    query_lens = 0 if query_start_loc is None else np.diff(query_start_loc.numpy()[: n + 1])
    real = reqs >= 0
    num_computed_tokens.numpy()[reqs[real]] += (query_lens - num_rejected.numpy()[:n])[real]


def post_update_num_computed_tokens(
    idx_mapping: Tensor, num_computed_tokens: Tensor, query_start_loc: Tensor, **launch: Any
) -> None:
    """``_post_update_num_computed_tokens_kernel``."""
    reqs = idx_mapping.numpy()
    num_computed_tokens.numpy()[reqs] += np.diff(query_start_loc.numpy()[: len(reqs) + 1])


def expand_idx_mapping(
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    cu_num_logits: Tensor,
    **launch: Any,
) -> None:
    """``_expand_idx_mapping_kernel``: per logit, its request and its place among that request's logits."""
    reqs = idx_mapping.numpy()
    cu = cu_num_logits.numpy()[: len(reqs) + 1]
    num_logits = np.diff(cu)
    expanded_idx_mapping.numpy()[: cu[-1]] = np.repeat(reqs, num_logits)
    expanded_local_pos.numpy()[: cu[-1]] = np.arange(cu[-1]) - np.repeat(cu[:-1], num_logits)


_MODULE = "vllm.v1.worker.gpu.input_batch."
KERNELS = {
    _MODULE + "_prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    _MODULE + "_prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
    _MODULE + "_combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
    _MODULE + "_get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
    _MODULE + "_post_update_kernel": post_update,
    _MODULE + "_post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
    _MODULE + "_expand_idx_mapping_kernel": expand_idx_mapping,
}

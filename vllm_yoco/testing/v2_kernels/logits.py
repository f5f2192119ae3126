"""Edits of the logits before sampling: bias and min-tokens, penalties, bad words, grammar bitmask, NaN count.

Replaces kernels of ``vllm/v1/worker/gpu/``: ``sample/logit_bias.py``, ``sample/penalties.py``,
``sample/bad_words.py``, ``structured_outputs.py`` and ``metrics/logits.py``.

Where drafts are verified a request has several logits rows. Row j sees the output so far and the first j drafts; the
token of a row is the draft that it was fed, or for row 0 the last token of the output.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASKED = -np.inf


def bias(
    logits: Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping: Tensor,
    num_allowed_token_ids: Tensor,
    allowed_token_ids: Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias: Tensor,
    bias_token_ids: Tensor,
    bias_token_ids_stride: int,
    bias_values: Tensor,
    bias_stride: int,
    pos: Tensor,
    min_lens: Tensor,
    num_stop_token_ids: Tensor,
    restore_when_all_masked: Tensor,
    stop_token_ids: Tensor,
    stop_token_ids_stride: int,
    *,
    CHECK_ALL_MASKED_ROWS: bool,
    **launch: Any,
) -> None:
    """``_bias_kernel``: allowed tokens, then logit bias, then no stop token before the minimum length."""
    scores, positions = logits.numpy(), pos.numpy()
    for i, req in enumerate(expanded_idx_mapping.tolist()):
        row = scores[i]
        if (n := int(num_allowed_token_ids[req])) > 0:
            allowed = allowed_token_ids.numpy()[req, :n]
            kept = row[allowed]
            row[:] = _MASKED
            row[allowed] = kept
        if (n := int(num_logit_bias[req])) > 0:
            row[bias_token_ids.numpy()[req, :n]] += bias_values.numpy()[req, :n]
        if (n := int(num_stop_token_ids[req])) > 0 and positions[i] + 1 < int(min_lens[req]):
            stops = stop_token_ids.numpy()[req, :n]
            before = row[stops]
            row[stops] = _MASKED
            if CHECK_ALL_MASKED_ROWS and int(restore_when_all_masked[req]) and row.max() == _MASKED:
                finite = np.isfinite(before)
                row[stops[finite]] = before[finite]


def penalties(
    logits: Tensor,
    logits_stride: int,
    expanded_idx_mapping: Tensor,
    token_ids: Tensor,
    expanded_local_pos: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
    prompt_bin_mask: Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts: Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    **launch: Any,
) -> None:
    """``_penalties_kernel``."""
    scores, tokens, local_pos = logits.numpy(), token_ids.numpy(), expanded_local_pos.numpy()
    reqs = expanded_idx_mapping.numpy()
    repetition, frequency, presence = (
        t.numpy()[reqs] for t in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    for i in np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0)):
        req, row = reqs[i], scores[i]
        counts = output_bin_counts.numpy()[req, :vocab_size].copy()
        first = i - local_pos[i]
        np.add.at(counts, tokens[first + 1 : i + 1], 1)
        seen = counts > 0
        if repetition[i] != 1:
            words = prompt_bin_mask.numpy()[req]
            in_prompt = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].view(bool)
            scale = np.where(in_prompt | seen, repetition[i], np.float32(1))
            row *= np.where(row > 0, np.float32(1) / scale, scale)
        row -= frequency[i] * counts.astype(np.float32)
        row -= presence[i] * seen.astype(np.float32)


def bincount(
    expanded_idx_mapping: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    prompt_len: Tensor,
    prefill_len: Tensor,
    prompt_bin_mask: Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts: Tensor,
    output_bin_counts_stride: int,
    **launch: Any,
) -> None:
    """``_bincount_kernel``: a bit per token of the prompt; counts of the output tokens in a resumed prefill."""
    words = prompt_bin_mask.numpy().view(np.uint32)  # unsigned: bit 31 is a token like any other
    for req in expanded_idx_mapping.tolist():
        prompt, prefill = int(prompt_len[req]), int(prefill_len[req])
        tokens = all_token_ids.numpy()[req]
        ids = tokens[:prompt].astype(np.uint32)
        np.bitwise_or.at(words[req], ids // 32, np.uint32(1) << ids % np.uint32(32))
        np.add.at(output_bin_counts.numpy()[req], tokens[prompt:prefill], 1)


def bad_words(
    logits: Tensor,
    logits_stride: int,
    expanded_idx_mapping: Tensor,
    bad_word_token_ids: Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets: Tensor,
    bad_word_offsets_stride: int,
    num_bad_words: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    prompt_len: Tensor,
    total_len: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    **launch: Any,
) -> None:
    """``_bad_words_kernel``: mask the last token of a bad word whose other tokens end the output."""
    scores, drafts = logits.numpy(), input_ids.numpy()
    for i, (req, pos) in enumerate(zip(expanded_idx_mapping.tolist(), expanded_local_pos.tolist(), strict=True)):
        if (n := int(num_bad_words[req])) == 0:
            continue
        committed = all_token_ids.numpy()[req, int(prompt_len[req]) : int(total_len[req])]
        output = np.concatenate([committed, drafts[i - pos + 1 : i + 1]])
        offsets = bad_word_offsets[req, : n + 1].tolist()
        for start, end in pairwise(offsets):
            *prefix, last = bad_word_token_ids[req, start:end].tolist()
            if len(prefix) <= len(output) and output[len(output) - len(prefix) :].tolist() == prefix:
                scores[i, last] = _MASKED


def apply_grammar_bitmask(
    logits: Tensor,
    logits_stride: int,
    logits_indices: Tensor,
    cu_num_logits: Tensor,
    bitmask: Tensor,
    bitmask_stride: int,
    vocab_size: int,
    *,
    MASK_STRIDE: int,
    **launch: Any,
) -> None:
    """``_apply_grammar_bitmask_kernel``: bitmask i belongs to row p of request r, ``r * MASK_STRIDE + p`` being its
    entry in ``logits_indices``."""
    scores, cu = logits.numpy(), cu_num_logits.numpy()
    req, position = np.divmod(logits_indices.numpy(), MASK_STRIDE)
    allowed = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].view(bool)
    for i in np.flatnonzero(position < cu[req + 1] - cu[req]):
        scores[cu[req[i]] + position[i], :vocab_size][~allowed[i]] = _MASKED


def num_nans(logits: Tensor, logits_stride: int, output: Tensor, vocab_size: int, **launch: Any) -> None:
    """``_num_nans_kernel``."""
    output.copy_(torch.isnan(logits).sum(dim=1))


_MODULE = "vllm.v1.worker.gpu."
KERNELS = {
    _MODULE + "sample.logit_bias._bias_kernel": bias,
    _MODULE + "sample.penalties._penalties_kernel": penalties,
    _MODULE + "sample.penalties._bincount_kernel": bincount,
    _MODULE + "sample.bad_words._bad_words_kernel": bad_words,
    _MODULE + "structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask,
    _MODULE + "metrics.logits._num_nans_kernel": num_nans,
}

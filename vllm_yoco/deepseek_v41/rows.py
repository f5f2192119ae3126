"""Which rows the consumer layers keep and what each may see, per request of one step. Integers only, no vLLM.

Notation as in ``vllm_yoco.plan``: L prompt tokens, K keep tokens, W window in keys, ``s_keep = max(0, L - K)``. A
request schedules rows ``[start, start + query_len)``; its sequence length after the step is ``start + query_len``.
All arrays are [R], one entry a request.
"""

from __future__ import annotations

import numpy as np

from vllm_yoco.plan import BoolArray, IntArray, clipped_rows


def lower_bounds(
    num_prompt_tokens: IntArray, is_prefilling: BoolArray, keeps_every_row: BoolArray, keep_tokens: int
) -> IntArray:
    """[R] position below which no consumer SWA key is visible: ``s_keep``, or 0 where nothing is truncated.

    Decode rows need no bound, because K >= W + B keeps their window above ``s_keep``. A request that is prefilled again
    after a preemption has the bound of its prompt, whatever it has generated since.
    """
    truncated = is_prefilling & ~keeps_every_row
    return np.where(truncated, np.maximum(num_prompt_tokens - keep_tokens, 0), 0)


def kept_lens(query_lens: IntArray, start: IntArray, bounds: IntArray) -> IntArray:
    """[R] rows that the consumer layers run on: the last ones of each chunk, at least one."""
    return query_lens - clipped_rows(start, query_lens, bounds)


def placeholders(query_lens: IntArray, start: IntArray, bounds: IntArray) -> IntArray:
    """Requests whose chunk lies wholly below their bound: the row that they keep sees and writes nothing."""
    return np.flatnonzero(start + query_lens <= bounds)


def gather_lens(query_lens: IntArray, seq_lens: IntArray, bounds: IntArray, window: int) -> IntArray:
    """[R] window keys that a gathering kernel has to fetch: the last ones of each sequence, possibly none.

    vLLM gathers ``query_len + min(max(prefix - bound, 0), W - 1)`` keys, which always include the chunk's own. With a
    bound inside the chunk its rows would see keys below it. Starting the gathered range at the bound says the same
    where the bound lies in front of the chunk, and the combining kernel hides everything in front of that range.
    """
    lengths: IntArray = np.clip(np.minimum(query_lens + window - 1, seq_lens - bounds), 0, None)
    return lengths


def boundary_may_trim(num_rows: int, window: int, unfinished_rows: int) -> bool:
    """Whether a step of ``num_rows`` rows may drop any.

    ``unfinished_rows`` is the largest batch whose hidden rows may reach the boundary layer before vLLM has finalised
    them (fused all-reduce of tiny batches), which cannot be gathered. Up to a window of rows nothing is worth it.
    """
    return num_rows > max(window, unfinished_rows)

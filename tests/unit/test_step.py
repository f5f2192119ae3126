"""The arrays of a step: what is kept, where they lie, and what deriving them costs, in calls and not in seconds."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_yoco.plan import Chunk, kept_rows, plan_rows
from vllm_yoco.staging import StepBuffers

WINDOW, KEEP = 4, 6

chunks = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 40), st.integers(1, 30)).map(lambda c: Chunk(*c)),
    min_size=1,
    max_size=6,
)


@given(chunks)
def test_kept_rows_are_those_of_the_plan(batch):
    plan = plan_rows(batch, mode="compact", keep_tokens=KEEP, window=WINDOW)
    column = [np.array([getattr(c, name) for c in batch]) for name in ("start", "length", "num_prompt_tokens")]
    kept = kept_rows(column[0], column[1], np.maximum(column[2] - KEEP, 0))
    for name in ("cu_seqlens", "rows"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(plan, name))


def _python_calls(function) -> int:
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def _step(lengths: list[int], keep: int = KEEP):
    lengths_ = np.array(lengths)
    return np.zeros_like(lengths_), lengths_, lengths_ - keep


def test_calls_depend_neither_on_length_nor_on_requests():
    counts = {_python_calls(lambda lengths=lengths: kept_rows(*_step(lengths))) for lengths in ([50], [5000] * 32)}
    assert len(counts) == 1
    # Control: the plan that is made of one object per chunk does depend on their number.
    plans = [
        _python_calls(lambda n=n: plan_rows([Chunk(50, 0, 50)] * n, mode="compact", keep_tokens=KEEP, window=WINDOW))
        for n in (1, 32)
    ]
    assert plans[0] < plans[1]


def test_rows_are_as_many_as_are_kept():
    """Nothing of the size of a chunk is made: 32 prompts of 100,000 tokens need arrays of 32 K rows."""
    kept = kept_rows(*_step([100_000] * 32))
    assert max(array.size for array in vars(kept).values()) == 32 * KEEP


class TestStepBuffers:
    def test_address_stays_and_values_arrive(self):
        buffers = StepBuffers(torch.device("cpu"))
        seen = set()
        for values in ([1, 2, 3], [4], [5, 6, 7, 8]):
            view = buffers.put("rows", np.array(values), 8)
            assert view.tolist() == values
            seen.add(view.data_ptr())
        assert len(seen) == 1
        assert buffers.put("other", np.array([1]), 8).data_ptr() not in seen

    def test_equal_values_are_not_copied_again(self):
        buffers = StepBuffers(torch.device("cpu"))
        for values, copies in (([1, 2], 1), ([1, 2], 1), ([1, 3], 2), ([1], 3), ([1], 3)):
            assert buffers.put("shift", np.array(values), 4).tolist() == values
            assert buffers.num_copies == copies

    def test_caller_may_change_its_array(self):
        buffers = StepBuffers(torch.device("cpu"))
        values = np.array([1, 2])
        buffers.put("shift", values, 4)
        values[:] = 7
        assert buffers.put("shift", values, 4).tolist() == [7, 7]

    def test_full_is_one_buffer(self):
        buffers = StepBuffers(torch.device("cpu"))
        short, long = (buffers.full("nowhere", -1, size, 8) for size in (2, 8))
        assert short.tolist() == [-1] * 2 and long.tolist() == [-1] * 8
        assert short.data_ptr() == long.data_ptr() and buffers.num_copies == 0
        with pytest.raises(ValueError, match="nowhere: 9 values, but a step has at most 8"):
            buffers.full("nowhere", -1, 9, 8)

    def test_too_many_values(self):
        with pytest.raises(ValueError, match="shift: 5 values, but a step has at most 4"):
            StepBuffers(torch.device("cpu")).put("shift", np.zeros(5), 4)

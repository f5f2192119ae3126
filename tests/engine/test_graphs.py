"""Decisions about CUDA graphs, which need no GPU: which batches may be captured, and what a replay reads from where."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport

from vllm_yoco.attention import _cut, clipped_backend
from vllm_yoco.staging import StepBuffers
from vllm_yoco.step import PreparedStep, StepInputs

BLOCK, WINDOW, KEEP = 4, 3, 4


def _backend(support: AttentionCGSupport) -> type[AttentionBackend]:
    class Builder:
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return support

    class Backend(AttentionBackend):
        forward_includes_kv_cache_update = False

        @staticmethod
        def get_name():
            return "FAKE"

        @staticmethod
        def get_builder_cls():
            return Builder

    Backend.__abstractmethods__ = frozenset()
    return Backend


@pytest.mark.parametrize("support", list(AttentionCGSupport))
def test_only_decode_batches_are_captured(support):
    """A mixed batch may drop rows, which no graph can: never ALWAYS, and never more than the backend offers."""
    builder = clipped_backend(_backend(support)).get_builder_cls()
    offered = builder.get_cudagraph_support(None, None)
    assert offered.value == min(support.value, AttentionCGSupport.UNIFORM_BATCH.value)


def _prepare(start: list[int], length: list[int], prompt: list[int], *, padding: int = 0, in_graph: bool):
    """One step; request i has the blocks 10 (i + 1), 10 (i + 1) + 1, ..."""
    starts, lengths, prompts = (np.array(values, dtype=np.int64) for values in (start, length, prompt))
    shown = len(start) + padding
    ends = torch.tensor([*(starts + lengths), *[0] * padding], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32) + 10 * torch.arange(1, shown + 1, dtype=torch.int32)[:, None]
    positions = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
    step = StepInputs(
        num_prompt_tokens=prompts,
        start=starts,
        query_start_loc=np.concatenate([[0], np.cumsum(lengths)]),
        keep_all=np.zeros(len(start), dtype=bool),
        num_shown=shown,
        seq_lens=ends,
        seq_lens_cpu=ends.clone(),
        positions=torch.from_numpy(positions),
        block_table=[table].__getitem__,
        slot_mappings=torch.zeros(1, len(positions) + padding, dtype=torch.int64),
        is_prefilling=starts < prompts,
        in_graph=in_graph,
    )
    truncation = SimpleNamespace(topology=SimpleNamespace(consumer_window=WINDOW))
    keep_start = np.maximum(prompts - KEEP, 0)
    buffers = StepBuffers(torch.device("cpu"))
    return PreparedStep(step, keep_start, BLOCK, truncation, buffers, 8, 64), step


def test_decode_needs_no_sub_batch_and_leaves_tables_alone():
    prepared, step = _prepare([10, 17], [1, 1], [10, 17], padding=2, in_graph=True)
    assert prepared.plan is None
    table = step.block_table(0)
    assert prepared.view.block_table(table, BLOCK) is table
    # s_keep is 6 and 13, which lie 2 and 1 into a block; requests that pad the graph are not shifted.
    assert prepared.view.seq_lens(step.seq_lens).tolist() == [11 - 2, 18 - 1, 0, 0]


def test_graph_replay_drops_no_rows_and_cuts_in_place():
    """A captured graph has the runner's own table, so the cut is written there; eagerly it is a table of its own."""
    (graph, step), (eager, other) = (_prepare([7], [1], [10], in_graph=g) for g in (True, False))
    table = step.block_table(0)
    expected = table.clone()
    cut = graph.view.block_table(table, BLOCK)
    assert graph.plan is None and cut.data_ptr() == table.data_ptr()
    # s_keep = 6 lies in block 1: that block comes first, and the kernel is told of 8 - 6 keys.
    assert cut[0, 0] == expected[0, 1] and graph.view.seq_lens(step.seq_lens).tolist() == [2]
    apart = eager.view.block_table(other.block_table(0), BLOCK)
    assert apart.data_ptr() != other.block_table(0).data_ptr() and apart[0, 0] == expected[0, 1]


def test_cut_on_a_device_is_that_on_the_host():
    """Both ways, on the host; cuts that begin past the end of a table included."""
    stream = np.random.default_rng(0)
    for _ in range(200):
        num_reqs, width, block_size = stream.integers(1, 9), stream.integers(1, 12), stream.integers(1, 5)
        table = torch.from_numpy(stream.integers(0, 99, (num_reqs, width)).astype(np.int32))
        cut = torch.from_numpy(stream.integers(0, (width + 2) * block_size, num_reqs + 2))
        for count in (1, width):
            device, host = (_cut(table, cut, block_size, count, on_host=on_host) for on_host in (False, True))
            assert torch.equal(device, host) and device.dtype == host.dtype
            for row, first in enumerate((cut[:num_reqs] // block_size).tolist()):
                assert host[row].tolist() == [table[row, min(first + n, width - 1)] for n in range(count)]


def test_prefill_outside_a_graph_drops_rows():
    assert len(_prepare([0], [10], [10], in_graph=False)[0].plan.rows) == KEEP
    assert _prepare([0], [10], [10], in_graph=True)[0].plan is None


@pytest.mark.parametrize("in_graph", [True, False])
def test_steps_that_drop_nothing_are_rewritten_in_place(in_graph):
    """A graph replay reads the runner's mapping: its rows below s_keep get no cell there."""
    starts, lengths = ([0, 20], [10, 1]) if in_graph else ([6, 20], [4, 1])
    prepared, step = _prepare(starts, lengths, [10, 20], in_graph=in_graph)
    assert prepared.plan is None
    slots = step.slot_mappings[0]
    address = slots.data_ptr()
    prepared.rewrite_slots(0)
    assert slots.data_ptr() == address
    # Request 0: rows 6 to 9, whose cells start with block 1. Request 1: s_keep = 16, so position 20 is cell 20.
    dropped = [-1] * (6 if in_graph else 0)
    assert slots.tolist() == [*dropped, *(11 * BLOCK + n for n in range(4)), 25 * BLOCK]


@pytest.mark.parametrize(("start", "none"), [([11, 18], True), ([10, 18], False), ([11, 17], False), ([10, 17], False)])
def test_steps_that_begin_no_block_are_known(start, none):
    """s_keep is 6 and 13: blocks begin at 10 and 17. What the device alone knows is not waited for."""
    for on_host in (True, False):
        prepared, _ = _prepare(start, [1, 1], [10, 17], in_graph=False)
        prepared._buffers.on_host = on_host
        prepared.rewrite_slots(0)
        assert prepared.begins_no_block == (none and on_host)


@pytest.mark.parametrize("on_host", [True, False])
def test_both_paths_write_the_same_slots(on_host):
    prepared, step = _prepare([0, 20, 3], [10, 1, 9], [10, 20, 15], in_graph=False)
    prepared._buffers.on_host = on_host
    before = step.slot_mappings[0]
    before[9] = -1  # a row that vLLM gave no cell keeps none
    given = before.clone()
    prepared.rewrite_slots(0)
    assert before.equal(given)  # nobody reads it, so nothing of the prompt's size is written
    # Request 2: s_keep = 11 and r = 3, so position 11 is cell 8, in block 2.
    assert prepared.kept_slots[0].tolist() == [44, 45, 46, -1, 25 * BLOCK, 32 * BLOCK]

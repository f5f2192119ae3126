"""Block tables and slot mappings.

Replaces the kernels of ``vllm/v1/worker/gpu/block_table.py``.
"""

from typing import Any

import numpy as np
from torch import Tensor

from vllm_yoco.testing.v2_kernels.staged_writes import view_at


def gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks: Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    *,
    grid: tuple[int, int],
    **launch: Any,
) -> None:
    """``_gather_block_tables_kernel``: rows of the requests in the batch, as far as in use; zeros in padding rows."""
    num_reqs_padded = grid[1]
    reqs = batch_idx_to_req_idx.numpy()[:num_reqs]
    used_blocks = num_blocks.numpy()
    max_num_reqs = used_blocks.shape[1]
    tables = zip(
        src_block_table_ptrs.tolist(),
        dst_block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        strict=True,
    )
    for group, (src_ptr, dst_ptr, stride) in enumerate(tables):
        dst = view_at(dst_ptr, num_reqs_padded, stride)
        dst[num_reqs:] = 0
        if num_reqs:
            used = used_blocks[group, reqs]
            width = int(used.max())
            src = view_at(src_ptr, max_num_reqs, stride)[reqs, :width]
            np.copyto(dst[:num_reqs, :width], src, where=np.arange(width) < used[:, None])


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings: Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    *,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    **launch: Any,
) -> None:
    """``_compute_slot_mappings_kernel``: the slot of each token in each KV cache group; PAD_ID where it has none."""
    reqs = idx_mapping.numpy()
    starts = query_start_loc.numpy()[: len(reqs) + 1]
    slots = slot_mappings.numpy()
    num_tokens = int(starts[-1])
    slots[:, num_tokens:max_num_tokens] = PAD_ID
    req = np.repeat(reqs, np.diff(starts))
    real = req >= 0  # -1 marks a dummy request, which owns no blocks
    row = np.where(real, req, 0)
    positions = pos.numpy()[:num_tokens]
    rows = int(reqs.max(initial=0)) + 1

    assert CP_SIZE == 1, "context parallelism needs more than one device"
    groups = zip(
        block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        block_sizes.tolist(),
        slot_mapping_enabled.tolist(),
        strict=True,
    )
    for group, (ptr, stride, block_size, enabled) in enumerate(groups):
        if enabled:
            block, offset = np.divmod(positions, block_size)
            table = view_at(ptr, rows, stride)
            slot = table[row, np.where(real, block, 0)].astype(np.int64) * block_size + offset
            slots[group, :num_tokens] = np.where(real, slot, PAD_ID)
        else:
            slots[group, :num_tokens] = PAD_ID


_MODULE = "vllm.v1.worker.gpu.block_table."
KERNELS = {
    _MODULE + "_gather_block_tables_kernel": gather_block_tables,
    _MODULE + "_compute_slot_mappings_kernel": compute_slot_mappings,
}

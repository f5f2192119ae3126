"""Staged writes: host data copied into rows of persistent tensors; tensors known only by their address.

Replaces ``_apply_write_kernel`` of ``vllm/v1/worker/gpu/buffer_utils.py``.
"""

import ctypes
from typing import Any

import numpy as np
from torch import Tensor


def view_at(address: int, rows: int, columns: int) -> np.ndarray:
    """The int32 matrix ``[rows, columns]`` at an address, without a copy. Its owner must outlive the view."""
    buffer = (ctypes.c_int32 * (rows * columns)).from_address(int(address))
    return np.frombuffer(buffer, dtype=np.int32).reshape(rows, columns)


def apply_write(
    output: Tensor,
    output_stride: int | Tensor,
    write_indices: Tensor,
    write_starts: Tensor,
    write_contents: Tensor,
    write_cu_lens: Tensor,
    write_group_ids: Tensor | None,
    *,
    MULTI_GROUP: bool,
    **launch: Any,
) -> None:
    """Write i puts ``contents[cu_lens[i-1]:cu_lens[i]]`` at column ``starts[i]`` of row ``indices[i]``.

    With MULTI_GROUP, ``output`` and ``output_stride`` hold one address and one row stride a group.
    """
    size = write_contents.element_size()
    source = write_contents.data_ptr()
    rows, columns = write_indices.tolist(), write_starts.tolist()
    groups = write_group_ids.tolist() if MULTI_GROUP else [0] * len(rows)
    addresses = output.tolist() if MULTI_GROUP else [output.data_ptr()]
    strides = output_stride.tolist() if MULTI_GROUP else [output_stride]
    begin = 0
    for group, row, column, end in zip(groups, rows, columns, write_cu_lens.tolist(), strict=True):
        target = addresses[group] + (row * strides[group] + column) * size
        ctypes.memmove(target, source + begin * size, (end - begin) * size)
        begin = end


KERNELS = {"vllm.v1.worker.gpu.buffer_utils._apply_write_kernel": apply_write}

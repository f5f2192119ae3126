"""The paged KV cache as an attention kernel addresses it, and who wrote each cell last. No vLLM import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class KernelView:
    """Attention metadata of one group of layers: R requests, T rows.

    Attributes:
        query_start_loc: [R + 1]; row boundaries.
        seq_lens: [R] in keys.
        block_table: [R, blocks].
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray

    @classmethod
    def of(cls, metadata: Any) -> KernelView:
        fields = ("query_start_loc", "seq_lens", "block_table")
        missing = [name for name in fields if not hasattr(metadata, name)]
        if missing:
            raise ValueError(
                f"check cannot read {type(metadata).__name__}, which has no {', '.join(missing)}: choose another"
                " backend with -- --attention-backend, for example TRITON_ATTN or FLASH_ATTN."
            )
        return cls(*(getattr(metadata, name).cpu().numpy().astype(np.int64) for name in fields))

    def rows_of(self, request: int) -> slice:
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))


class Cells:
    """Who was written last to each cell of one KV cache group: request number and position, -1 for nobody."""

    def __init__(self, num_blocks: int, group: Any) -> None:
        self.block_size = group.kernel_block_size or group.kv_cache_spec.block_size
        self.manager_block_size = group.kv_cache_spec.block_size
        cells = num_blocks * self.manager_block_size
        self.owner, self.position = np.full(cells, -1), np.full(cells, -1)

    def write(self, slots: np.ndarray, owner: int, positions: np.ndarray) -> None:
        self.owner[slots], self.position[slots] = owner, positions

    def read(self, view: KernelView, request: int, owner: int) -> np.ndarray:
        """[seq_len] position behind each key of a request of the batch; -1 where it is none of ``owner``'s."""
        key = np.arange(view.seq_lens[request])
        column = np.minimum(key // self.block_size, view.block_table.shape[1] - 1)
        cell = view.block_table[request, column] * self.block_size + key % self.block_size
        return np.where((self.owner[cell] == owner) & (column == key // self.block_size), self.position[cell], -1)


def kernel_window(attention: Any) -> int:
    """W as the kernel gets it, in keys; backends spell it as a number or as (keys to the left, to the right)."""
    window: int | tuple[int, int] = attention.impl.sliding_window
    return window[0] + 1 if isinstance(window, tuple) else window

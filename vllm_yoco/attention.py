"""Clipped sliding-window attention on unmodified kernels.

A paged kernel masks by two things only: the window W and the start of the sequence. Truncation needs a third
bound, ``s_keep``, at token precision. It is obtained by choosing where consumer SWA cells lie, which is ours to
choose because the KV cache group is ours alone. With ``r = s_keep mod block_size`` the cell of position p is

    block  (p - r) // block_size        offset  (p - r) % block_size

so that a block starts exactly at ``s_keep``. Two views of one request then give the kernel what it needs:

    rows whose window reaches below s_keep:  cut the blocks before s_keep from the block table, seq_len - s_keep;
                                             the kernel's own start of sequence is the clip
    rows whose window does not (decode):     leave the block table alone, seq_len - r

Rows below ``s_keep`` have no cell (slot -1). A request whose rows all lie below it sees nothing: the kernel gets
one key in the null block and the layer puts zeros over whatever it returns. A request with ``s_keep = 0`` has
the stock layout and the stock view.

The view is applied by the metadata builder of a backend class that subclasses the platform's own one
(CPU_ATTN, FLASH_ATTN, TRITON_ATTN, FLEX_ATTENTION, ...). vLLM keys attention groups by backend class, so these
layers get builders of their own (vllm/v1/worker/gpu/attn_utils.py, ``init_attn_backend``).
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import subclass_attention_backend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec, replace_as

from vllm_yoco.kv_cache import ConsumerSlidingWindowSpec


@dataclass(frozen=True)
class WindowView:
    """How the kernel shall see the consumer SWA cells of one batch of R requests.

    Attributes:
        shift: [R] int32, tokens taken off each sequence length (R counts requests that pad a CUDA graph too).
        shift_cpu: [R] int32, the same on the host.
        cut_tokens: [R] int64, tokens (whole blocks) cut from the front of each block table row; None for none.
        empty: [R] bool, requests none of whose rows sees a key; None for none.
        table_tokens: longest sequence after the cut, in tokens; later block table columns are not read.
        in_place: write the cut into the runner's own table, whose address a CUDA graph has captured.
    """

    shift: torch.Tensor
    shift_cpu: torch.Tensor
    cut_tokens: torch.Tensor | None = None
    empty: torch.Tensor | None = None
    table_tokens: int = 0
    in_place: bool = False

    def seq_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        shifted = seq_lens - first(seq_lens.shape[0], self.shift)
        return shifted if self.empty is None else shifted.masked_fill_(first(seq_lens.shape[0], self.empty), 1)

    def seq_lens_cpu(self, seq_lens: torch.Tensor) -> torch.Tensor:
        shifted = seq_lens - first(seq_lens.shape[0], self.shift_cpu)
        # An upper bound; an empty request shows one key of the null block.
        return shifted if self.empty is None else shifted.clamp_(min=1)

    def block_table(self, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
        if self.cut_tokens is None:
            return block_table
        num_reqs, width = block_table.shape
        columns = width if self.in_place else min(width, -(-self.table_tokens // block_size))
        cut = _cut(block_table, self.cut_tokens, block_size, columns)
        if self.empty is not None:
            cut.masked_fill_(self.empty[:num_reqs, None], 0)
        return block_table.copy_(cut) if self.in_place else cut


def _cut(
    table: torch.Tensor, cut_tokens: torch.Tensor, block_size: int, count: int, on_host: bool | None = None
) -> torch.Tensor:
    """[R, count] columns of ``table`` [R, columns] behind the blocks of ``cut_tokens``; past its end, its last one.

    Args:
        on_host: use NumPy, whose calls cost a third of torch's; None: where the table is on the host.
    """
    num_reqs, width = table.shape
    if table.device.type == "cpu" if on_host is None else on_host:
        start = cut_tokens.numpy()[:num_reqs, None] // block_size
        source = np.minimum(start + np.arange(count), width - 1)
        return torch.from_numpy(table.numpy()[np.arange(num_reqs)[:, None], source])
    source = cut_tokens[:num_reqs, None] // block_size + torch.arange(count, device=table.device)
    return table.gather(1, source.clamp_(max=width - 1))


def first(count: int, values: torch.Tensor) -> torch.Tensor:
    """The first ``count`` of ``values``; a slice of all of them costs as much as the sum that it is for."""
    return values if values.shape[0] == count else values[:count]


class ClippedBuilderMixin:
    """Applies the step's ``WindowView`` before the platform's builder sees the batch.

    ``view`` is set by whoever builds the step's metadata and lives only for that call; without one (``off``,
    profile and dummy batches, steps of short prompts) the batch passes through unchanged. ``fresh`` is cleared likewise
    where nobody needs to look for fresh blocks: no layer will read the metadata, because the step has a sub-batch, or
    it is known that there are none.
    """

    supports_update_block_table = False
    view: WindowView | None = None
    fresh = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> Any:
        view = self.view
        if view is not None:
            common_attn_metadata = self._clipped(common_attn_metadata, view)
        if self._stable_seq_lens is not None:
            # CUDA graphs read the address seen at capture, so every step writes the same buffer.
            stable = self._stable_seq_lens[: common_attn_metadata.num_reqs]
            common_attn_metadata = common_attn_metadata.replace(seq_lens=stable.copy_(common_attn_metadata.seq_lens))
        built = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)  # type: ignore[misc]
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            built.fresh_blocks = self._fresh_blocks(common_attn_metadata) if self.fresh else None
        return built

    def _fresh_blocks(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Blocks that this step writes for the first time and not to their end, [F] int64, or None.

        Cells are filled in order and a block starts at ``s_keep``, so that is the block of a request's last row, if it
        has cells left and none from before this step. CPU_ATTN multiplies the unwritten cells of the last block by
        zero weights, which a NaN that an earlier owner left there survives; ``ConsumerSlidingAttention`` clears such
        blocks first.
        """
        block_size = self.kv_cache_spec.block_size  # type: ignore[attr-defined]
        last, num_rows = common.slot_mapping.numpy(), 1
        if common.max_query_len > 1:
            boundaries = common.query_start_loc_cpu.numpy()
            last, num_rows = last[boundaries[1:] - 1], boundaries[1:] - boundaries[:-1]
        # A row without a cell, -1, counts as the last of a full block.
        fresh = last[last % block_size < np.minimum(num_rows, block_size - 1)]
        return torch.from_numpy(fresh // block_size) if len(fresh) else None

    def _clipped(self, common: CommonAttentionMetadata, view: WindowView) -> CommonAttentionMetadata:
        upper_bound = common.seq_lens_cpu_upper_bound
        # What ``common.replace`` does, in a tenth of its time: this is part of every decode step.
        clipped = copy.copy(common)
        clipped.seq_lens = view.seq_lens(common.seq_lens)
        if upper_bound is not None:
            clipped.seq_lens_cpu_upper_bound = view.seq_lens_cpu(upper_bound)
        clipped.block_table_tensor = view.block_table(common.block_table_tensor, self.kv_cache_spec.block_size)  # type: ignore[attr-defined]
        # Filled lazily by other groups' builders from the unshifted lengths.
        clipped._num_computed_tokens_cache = None
        return clipped

    @functools.cached_property
    def _stable_seq_lens(self) -> torch.Tensor | None:
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            return None
        scheduler_config = self.vllm_config.scheduler_config  # type: ignore[attr-defined]
        return torch.zeros(scheduler_config.max_num_seqs, dtype=torch.int32, device=self.device)  # type: ignore[attr-defined]

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs for decode batches only: a prefill step may drop rows, which no captured graph can."""
        inherited: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        return min(inherited, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)


@functools.cache
def clipped_backend(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """``base`` with a builder that applies the window view; same kernels, same KV layout, same name.

    Raises:
        ValueError: for a backend whose forward writes the KV cache, because rows of the layout in force and rows
            that write are then forced to be the same.
    """
    if base.forward_includes_kv_cache_update:
        raise ValueError(
            f"attention backend {base.get_name()} writes the KV cache inside its forward, which --yoco-truncation"
            " cannot serve: global KV is written for every row, queries run on the kept rows. Choose another one"
            " with --attention-backend, for example TRITON_ATTN, FLASH_ATTN or FLEX_ATTENTION, or use"
            " --yoco-truncation off."
        )
    builder = type(f"YocoClipped{base.get_builder_cls().__name__}", (ClippedBuilderMixin, base.get_builder_cls()), {})
    return subclass_attention_backend("YocoClipped", base, builder)


class ConsumerSlidingAttention(Attention):
    """Sliding-window attention of a consumer layer while a mode is on: clipped view, KV outside persistence."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *, window: int, **kwargs: Any) -> None:
        cache_config = kwargs["cache_config"]
        base = get_attn_backend(
            head_size, torch.get_default_dtype(), cache_config.cache_dtype, has_sliding_window=True
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            per_layer_sliding_window=window,
            attn_backend=clipped_backend(base),
            **kwargs,
        )

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            fresh = getattr(metadata[self.layer_name], "fresh_blocks", None)
            if fresh is not None:
                # As integers: not every KV dtype has a fill of its own. As large ones: it is element by element.
                wide = self.kv_cache.shape[-1] * self.kv_cache.itemsize % 8 == 0
                self.kv_cache.view(torch.int64 if wide else torch.uint8).index_fill_(0, fresh, 0)
        return super().forward(query, key, value, *args)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = super().get_kv_cache_spec(vllm_config)
        assert isinstance(spec, SlidingWindowSpec)
        return replace_as(spec, ConsumerSlidingWindowSpec)

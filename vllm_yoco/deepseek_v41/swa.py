"""SWA metadata of consumer layers: no row sees a key below its request's lower bound.

Every backend that vLLM has for this model takes explicit key indices, so the clip at ``s_keep`` is a number in the
metadata and needs no kernel. vLLM already has such a number, ``replay_start``; handed ``max(replay_start, s_keep)``
its builder is right but for two corners, which ``build`` mends:

    row below the bound    the index kernel stores the length ``position + 1 - bound``, 0 or negative   clamped at 0
    bound inside a chunk   the gathered range always includes the whole chunk             starts at the bound instead

The consumer layers' SWA caches name a backend class of their own, and vLLM keys attention groups by backend class
(vllm/v1/worker/gpu/attn_utils.py, ``init_attn_backend``). They stay in their KV cache group, with the same spec and
pages, but have their own builder with its own persistent buffers. Both facts hold inside CUDA graphs too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.sparse_swa import (
    DeepseekSparseSWAMetadata,
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV4SWACache,
)
from vllm.v1.attention.backends.utils import PAD_SLOT_ID, subclass_attention_backend


class ConsumerBound:
    """The step's lower bounds, shared by the model state, which sets them, and the builders, which read them.

    Attributes:
        values: [max_num_seqs + 1] int32 on the device, in batch order; 0 where there is no bound. Its address never
            changes, so that a CUDA graph may have recorded a build.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.values = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)


class BoundedBuilderMixin:
    """Raises the lower bound of one platform's SWA builder. Device operations on persistent buffers only."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        context = vllm_config.compilation_config.static_forward_context
        self.bound: ConsumerBound = context[layer_names[0]].yoco_bound
        # As long as the bound's: for the requests that pad a graph the kernels read past the slice they are given.
        self._lowest = torch.zeros_like(self.bound.values)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        replay_start: torch.Tensor | None = None,
    ) -> DeepseekSparseSWAMetadata:
        assert common_attn_metadata.causal, "a non-causal batch is a drafter's, whose layers are no consumers"
        bounds = self.bound.values
        if replay_start is None:
            # Graph captures, whose dummy requests replay nothing.
            lowest = self._lowest.copy_(bounds)
        else:
            # FULL graphs pass the starts of the real requests only, in a longer buffer; padding has no bound.
            num_given = replay_start.shape[0]
            self._lowest[num_given:].zero_()
            torch.maximum(replay_start, bounds[:num_given], out=self._lowest[:num_given])
            lowest = self._lowest
        metadata: DeepseekSparseSWAMetadata = super().build(  # type: ignore[misc]
            common_prefix_len, common_attn_metadata, fast_build, lowest[: common_attn_metadata.num_reqs]
        )
        _clip(metadata, lowest, self.window_size)  # type: ignore[attr-defined]
        return metadata


def _clip(metadata: DeepseekSparseSWAMetadata, lowest: torch.Tensor, window: int) -> None:
    """Mend the two corners of the module docstring, in place. Decode rows come first, then prefills."""
    for lens in (metadata.decode_swa_lens, metadata.prefill_swa_lens):
        if lens is not None:
            lens.clamp_(min=0)
    gathered = metadata.prefill_gather_lens
    if gathered is None:
        return
    first, end = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
    assert metadata.query_start_loc is not None and metadata.seq_lens is not None
    query_lens = metadata.query_start_loc[first + 1 : end + 1] - metadata.query_start_loc[first:end]
    above = metadata.seq_lens[first:end] - lowest[first:end]
    # The rule of rows.gather_lens.
    torch.minimum(query_lens + (window - 1), above, out=gathered).clamp_(min=0)


@functools.cache
def consumer_backend(base: type[AttentionBackend]) -> type[AttentionBackend]:
    """``base`` with a builder that raises the lower bound; same kernels, same KV layout, same name.

    Raises:
        ValueError: for a backend whose SWA builder is not vLLM's, as on ROCm.
    """
    builder = base.get_builder_cls()
    if not issubclass(builder, DeepseekSparseSWAMetadataBuilder):
        raise ValueError(
            f"attention backend {base.get_name()} builds its window metadata with {builder.__name__}, which"
            " --yoco-truncation does not know. Use --yoco-truncation off."
        )
    bounded = type(f"YocoBounded{builder.__name__}", (BoundedBuilderMixin, builder), {})
    return subclass_attention_backend("YocoBounded", base, bounded)


def bound_consumers(caches: list[DeepseekV4SWACache], bound: ConsumerBound) -> None:
    """Give these layers' SWA caches the bounded backend. Before vLLM collects attention groups."""
    for cache in caches:
        cache.backend_cls = consumer_backend(cache.backend_cls)
        cache.yoco_bound = bound


def blank_rows(slot_mappings: torch.Tensor, groups: torch.Tensor, rows: torch.Tensor) -> None:
    """Take the cells away from some rows: they write no KV in these groups, and their SWA part is empty.

    Args:
        slot_mappings: [groups, rows] int64, changed in place.
        groups: [G] int64 KV cache groups.
        rows: [N] int64 or int32 rows of the batch.
    """
    slot_mappings[groups[:, None], rows[None, :].long()] = PAD_SLOT_ID

"""FLOP coefficients of a YOCO-split model with compressed sparse attention.

Everything here depends on the model alone; `cost.py` multiplies it with counts of rows and keys, which depend
on the request alone.

Unit: FP8-equivalent FLOPs. One multiply-add counts 1 in FP4, 2 in FP8, 4 in BF16 and 8 in TF32 or FP32, so
parts of different precision add up, and a total divides by the FP8 peak of the device.

The precisions are those of the recorded DeepInfer estimator. Three are fixed whatever the config says: the
grouped output down-projection is FP8, core attention BF16, hyper-connection (HC) arithmetic FP32. Two choices
rest on no recording: indexer scores that are not FP4 count as FP8, and the indexer's query projection follows
`fp8_attn`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FP4, FP8, BF16, FP32 = 1, 2, 4, 8


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of one layer per unit of work; 0 where the layer lacks that part.

    Attributes:
        is_consumer: whether truncation applies to the layer's rows.
        attention_row, other_row: per computed query row.
        source_row: per row of the whole chunk, dropped rows included (global KV compression).
        index_key: per compressed index key written.
        swa_pair, block_pair, index_pair: per key of one query (window, global KV, indexer score).
        ratio: rows per global key.
        top_k: global keys a query attends to; 0 for all.
        candidate_blocks, candidate_block_size: blocks the indexer scores, keys per block; 0 blocks for all.
    """

    is_consumer: bool
    attention_row: int
    other_row: int
    source_row: int = 0
    index_key: int = 0
    swa_pair: int = 0
    block_pair: int = 0
    index_pair: int = 0
    ratio: int = 1
    top_k: int = 0
    candidate_blocks: int = 0
    candidate_block_size: int = 1


@dataclass(frozen=True)
class ModelFlops:
    """Coefficients of a whole model.

    Attributes:
        layers: each distinct layer with its multiplicity.
        window: W in keys; <= 0 without SWA.
        lm_head_row: per row that logits are computed for.
        dropped_row: per row removed from the consumer layers; the boundary norm still reads it.
        has_consumers: whether the boundary lies below the last layer.
    """

    layers: tuple[tuple[LayerFlops, int], ...]
    window: int
    lm_head_row: int
    dropped_row: int
    has_consumers: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelFlops:
        """Read a metadata mapping with the keys of `cost_public.json`, per-layer lists one entry a layer.

        Raises:
            ValueError: for a missing key, a list of another length, a boundary outside [0, n_layer], a
                compressed layer with a ratio below 1, or a local indexer without a key projection.
        """
        try:
            return cls._read(config)
        except KeyError as error:
            raise ValueError(f"cost config lacks the key {error.args[0]!r}") from None

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> ModelFlops:
        n_layer, boundary = int(config["n_layer"]), int(config["n_prefill_layer"])
        if n_layer < 1:
            raise ValueError(f"n_layer must be positive, got {n_layer}")
        if not 0 <= boundary <= n_layer:
            raise ValueError(f"n_prefill_layer {boundary} must lie in [0, n_layer = {n_layer}]")
        hyper = _HyperConnection.read(config)
        layers = [_layer(config, hyper, layer, layer >= boundary) for layer in range(n_layer)]
        return cls(
            layers=tuple(Counter(layers).items()),
            window=int(config["window_size"]),
            lm_head_row=BF16 * config["n_embed"] * config["vocab_size"],
            dropped_row=hyper.mix + hyper.collapse,
            has_consumers=boundary < n_layer,
        )


@dataclass(frozen=True)
class _HyperConnection:
    """HC FLOPs per row: `mix` makes the coefficients, `collapse` merges the streams, `expand` feeds them."""

    streams: int
    mix: int
    collapse: int
    expand: int
    head: int
    shifted: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _HyperConnection:
        if not config["hc_enabled"]:
            return cls(streams=1, mix=0, collapse=0, expand=0, head=0, shifted=False)
        streams = int(config["hc_mult"])
        width = streams * config["n_embed"]
        collapse = FP32 * width
        return cls(
            streams=streams,
            mix=FP32 * width * (2 * streams + streams * streams),
            collapse=collapse,
            expand=collapse * (1 + streams),
            head=collapse * (streams + 1),
            shifted=bool(config["hc_shifted"]),
        )

    def row(self, layer: int, n_layer: int) -> int:
        """Per row of one layer: two sub-layers, plus what the first and the last layer do differently.

        A shifted model collapses with the coefficients of the sub-layer before: layer 0 has none, and one
        more collapse follows the last layer. An unshifted model ends in a head with its own coefficients.
        """
        flops = 2 * (self.mix + self.collapse + self.expand)
        if self.shifted and layer == 0:
            flops -= self.collapse
        if layer == n_layer - 1:
            flops += self.collapse if self.shifted else self.head
        return flops


def _layer(config: Mapping[str, Any], hyper: _HyperConnection, layer: int, is_consumer: bool) -> LayerFlops:
    return LayerFlops(
        is_consumer=is_consumer, other_row=_other_row(config, hyper, layer), **_attention(config, layer)
    )


def _attention(config: Mapping[str, Any], layer: int) -> dict[str, int]:
    """The attention fields of `LayerFlops` that are not their default."""

    def entry(name: str, source: Mapping[str, Any] = config) -> Any:
        values: Sequence[Any] = source[name]
        if len(values) != config["n_layer"]:
            raise ValueError(f"{name} has {len(values)} entries for {config['n_layer']} layers")
        return values[layer]

    width, heads, head_dim = config["n_embed"], config["n_head"], config["q_head_dim"]
    query_rank, output_rank = config["q_lora_rank"], config["o_head_dim"]
    format_cost = FP8 if config["fp8_attn"] else BF16
    core_pair = BF16 * 2 * heads * head_dim  # scores and weighted sum

    row = format_cost * query_rank * (width + heads * head_dim)
    row += FP8 * heads * head_dim * output_rank + format_cost * config["n_wv_group"] * output_rank * width
    flops = {"attention_row": row}
    if entry("use_swa_list"):
        flops["attention_row"] += format_cost * width * head_dim
        flops["swa_pair"] = core_pair
    if not entry("has_packed_kv_list"):
        return flops

    shared: Mapping[str, Any] = config["shared_layer_metadata"]
    ratio = int(entry("kv_compress_ratio_list"))
    if ratio < 1:
        raise ValueError(f"layer {layer} has packed KV, so its ratio must be at least 1, not {ratio}")
    flops.update(ratio=ratio, top_k=int(entry("topk_tokens")), block_pair=core_pair)
    if entry("is_kv_source_list", shared):
        # Pooling several rows needs a gate beside the values; one row per group does not.
        flops["source_row"] = BF16 * width * head_dim * (1 if ratio == 1 else 2)

    index_heads, index_dim = entry("index_attn_num_heads"), entry("index_attn_head_dim")
    scores, owns_keys = entry("is_index_source_list", shared), entry("is_index_k_source_list", shared)
    if not index_heads or not (scores or owns_keys):
        return flops
    if not entry("indexer_use_kproj_list"):
        raise ValueError(f"layer {layer}: a local indexer without key projection is not supported")
    if owns_keys:
        flops["index_key"] = BF16 * head_dim * index_dim
    if scores:
        flops["attention_row"] += index_heads * (format_cost * query_rank * index_dim + BF16 * width)
        flops["index_pair"] = (FP4 if config["indexer_use_fp4"] else FP8) * index_heads * index_dim
        flops["candidate_blocks"] = int(entry("index_candidate_blocks", shared))
        flops["candidate_block_size"] = int(entry("index_candidate_block_size", shared)) or 1
    return flops


def _other_row(config: Mapping[str, Any], hyper: _HyperConnection, layer: int) -> int:
    """Experts and router, HC, Engram."""
    width = config["n_embed"]
    experts = config["moe_top_k"] + config["n_shared_experts"]
    row = (FP8 if config["fp8_mlp"] else BF16) * 3 * width * config["moe_intermediate_size"] * experts
    row += BF16 * width * config["n_routed_experts"] + hyper.row(layer, config["n_layer"])
    engram: Mapping[str, Any] = config["engram_cfg"]
    if layer in engram.get("engram_layer_ids", ()):
        projection = FP8 if config["engram_fp8_proj"] else BF16
        # One key per stream, one value, and a gate that dots every stream with its key.
        row += projection * sum(engram["n_embed_per_ngram"]) * width * (hyper.streams + 1)
        row += FP32 * hyper.streams * width
    return int(row)

"""Layer topology of DeepSeek-V4.1, read from the text part of a Hugging Face config and checked.

Every compressed layer needs global KV, index keys, a top-k selection and, above a candidate source, a list of
candidate blocks. Each is produced by *source* layers and reused by the layers up to the next source. Sharing
nests: a new KV segment forces new index keys, and new index keys force a new selection.

    V4.1-Flash     layer  0  1 | 2 ..... 7 | 8 .... 13 | 14 ... 19 | 20 ................................ 39
    ratio                 0  0 | 2         | 2         | 2         | 1
    global KV             -  - | 2         | 8         | 14        | 20
    index keys            -  - | 2         | 8         | 14        | 20
    top-k                 -  - | 2         | 8         | 14        | 20 .. 23 | 24 .. | 28 .. | 32 .. | 36 ..
    candidates            -  - | -         | -         | -         | published by 20, used by 21 .. 39
                             producers                         P = 20, consumers

In one forward pass each of these values has a single slot that the latest source overwrites. A segment with a
hole, or one that reaches back over a newer source, would therefore read another segment's data: the checks
below refuse it. Source: rules of DeepInfer 0.1.0 as described in the reference notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_yoco.topology import LayerTopology

RATIOS = (0, 1, 2)


@dataclass(frozen=True)
class Candidates:
    """Candidate filter of the indexers: `blocks` blocks of `block_size` index keys each."""

    blocks: int
    block_size: int


@dataclass(frozen=True)
class DeepseekTopology:
    """Per-layer tuples cover the N main layers, then the draft layers.

    Attributes:
        num_layers: N. num_draft_layers: DFlash layers, numbered from N on.
        window: W in keys, <= 0 without SWA.
        ratios: rows per global key; 0 for a layer with SWA only.
        kv_source, index_k_source, index_source: layer whose KV, index keys and top-k selection a layer uses;
            itself for a source and for a layer without global KV.
        candidate_source: layer whose candidate blocks a layer uses, None for no filter; itself for a source.
        candidates: size of the filter, None when no layer has a candidate source.
        top_k: global keys per query, 0 for dense. uses_swa: whether the layer has a sliding-window branch.
        index_heads, index_head_dim, head_dim: sizes of the indexer and of the KV latent, in elements.
        draft_targets, engram_layers: layers that feed the draft model, layers with n-gram memory.

    Raises:
        ValueError: for a topology that breaks a sharing rule; the message names the layer and the rule.
    """

    num_layers: int
    num_draft_layers: int
    window: int
    ratios: tuple[int, ...]
    kv_source: tuple[int, ...]
    index_k_source: tuple[int, ...]
    index_source: tuple[int, ...]
    candidate_source: tuple[int | None, ...]
    candidates: Candidates | None
    top_k: tuple[int, ...]
    uses_swa: tuple[bool, ...]
    index_heads: int = 32
    index_head_dim: int = 128
    head_dim: int = 512
    draft_targets: tuple[int, ...] = ()
    engram_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = (
            "ratios",
            "kv_source",
            "index_k_source",
            "index_source",
            "candidate_source",
            "top_k",
            "uses_swa",
        )
        for name in names:
            if len(getattr(self, name)) != self.total_layers:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries, expected {self.num_layers} layers"
                    f" + {self.num_draft_layers} draft layers"
                )
        for layer, ratio in enumerate(self.ratios):
            if ratio not in RATIOS:
                raise ValueError(f"layer {layer}: compression ratio {ratio} is not one of {RATIOS}")
        boundary = self.boundary
        if boundary < self.num_layers and self.kv_source[boundary] != boundary:
            raise ValueError(
                f"layer {boundary} is the first consumer but uses the KV of layer"
                f" {self.kv_source[boundary]}: a share-KV segment may not cross the boundary"
            )
        for name in ("kv_source", "index_k_source", "index_source"):
            self._check_segments(name, getattr(self, name))
        self._check_nesting("kv_source", "index_k_source")
        self._check_nesting("index_k_source", "index_source")
        self._check_candidates()

    @property
    def total_layers(self) -> int:
        """Main and draft layers."""
        return self.num_layers + self.num_draft_layers

    @property
    def boundary(self) -> int:
        """P, the first layer that keeps one global key per row; N when only draft layers do.

        ValueError when no entry has ratio 1: such a model has no consumers to truncate.
        """
        if 1 not in self.ratios:
            raise ValueError("no layer has compression ratio 1, so the model has no consumer boundary")
        return min(self.ratios.index(1), self.num_layers)

    def kv_owners(self) -> tuple[int, ...]:
        """Layers that store global KV, ascending."""
        return tuple(n for n, source in enumerate(self.kv_source) if source == n and self.ratios[n] > 0)

    def layer_topology(self) -> LayerTopology:
        """What truncation needs to know; ValueError where truncation has no meaning (no producers)."""
        consumers = range(self.boundary, self.num_layers)
        return LayerTopology(
            num_layers=self.num_layers,
            boundary=self.boundary,
            kv_source_layers=tuple(n for n in self.kv_owners() if n in consumers),
            swa_layers=tuple(n for n in consumers if self.uses_swa[n]),
            window=max(0, self.window),
        )

    def cost_layers(self) -> dict[str, Any]:
        """The layer part of the mapping that `cost.FlopsEstimator` takes; main layers only."""
        main = range(self.num_layers)
        packed = [self.ratios[n] > 0 for n in main]
        filtered = [self.candidate_source[n] not in (None, n) for n in main]
        blocks = self.candidates or Candidates(0, 0)
        return {
            "n_layer": self.num_layers,
            "n_prefill_layer": self.boundary,
            "window_size": self.window,
            "kv_compress_ratio_list": list(self.ratios[: self.num_layers]),
            "topk_tokens": list(self.top_k[: self.num_layers]),
            "index_attn_num_heads": [self.index_heads * sparse for sparse in packed],
            "index_attn_head_dim": [self.index_head_dim * sparse for sparse in packed],
            "has_packed_kv_list": packed,
            "use_swa_list": list(self.uses_swa[: self.num_layers]),
            "indexer_use_kproj_list": packed,
            "shared_layer_metadata": {
                "is_kv_source_list": [self.kv_source[n] == n for n in main],
                "is_index_source_list": [self.index_source[n] == n for n in main],
                "is_index_k_source_list": [self.index_k_source[n] == n for n in main],
                "index_candidate_blocks": [blocks.blocks * used for used in filtered],
                "index_candidate_block_size": [blocks.block_size * used for used in filtered],
            },
        }

    def _check_segments(self, name: str, sources: Sequence[int]) -> None:
        for layer, source in enumerate(sources):
            if source == layer:
                continue
            if layer >= self.num_layers:
                raise ValueError(
                    f"{name}: draft layer {layer} must be its own source, not use layer {source}"
                )
            if not 0 <= source < self.num_layers:
                raise ValueError(
                    f"{name}: layer {layer} uses layer {source}, which is not in 0..{self.num_layers - 1}"
                )
            if layer == 0 or source != sources[layer - 1]:
                raise ValueError(
                    f"{name}: layer {layer} uses layer {source}, which is not the nearest source before it;"
                    " sharing layers must form contiguous segments"
                )
            for what, values in (("compression ratio", self.ratios), ("top-k", self.top_k)):
                if values[layer] != values[source]:
                    raise ValueError(
                        f"{name}: layer {layer} ({what} {values[layer]}) cannot share with layer {source}"
                        f" ({what} {values[source]})"
                    )
            if name == "kv_source" and self.uses_swa[layer] != self.uses_swa[source]:
                raise ValueError(
                    f"{name}: layers {layer} and {source} share KV, but only one of them uses SWA"
                )

    def _check_nesting(self, outer: str, inner: str) -> None:
        for layer in range(self.num_layers):
            if getattr(self, outer)[layer] == layer != getattr(self, inner)[layer]:
                raise ValueError(
                    f"layer {layer} starts a new {outer} segment but shares {inner} with layer"
                    f" {getattr(self, inner)[layer]}: {inner} segments must lie inside {outer} segments"
                )

    def _check_candidates(self) -> None:
        users = [(layer, source) for layer, source in enumerate(self.candidate_source) if source is not None]
        if not users:
            return
        size = self.candidates
        if size is None or size.blocks <= 0 or size.blocks % 8 or not 1 <= size.block_size <= 16:
            raise ValueError(f"{size}: blocks must be a positive multiple of 8 and block_size lie in 1..16")
        previous = 0
        for layer, source in users:
            if not 0 <= source <= layer or source < previous:
                raise ValueError(
                    f"candidate_source: layer {layer} uses layer {source}; a source must be in 0..{layer} and"
                    " not lie below the source of an earlier layer"
                )
            previous = source
            if self.candidate_source[source] != source or self.index_source[source] != source:
                raise ValueError(
                    f"candidate_source: layer {source} must be its own candidate source and an index source"
                )
            if self.top_k[source] <= 0 or self.ratios[source] <= 0:
                raise ValueError(f"candidate_source: layer {source} must be compressed and select a top-k")
            if layer != source:
                self._check_candidate_user(layer, source, size)

    def _check_candidate_user(self, layer: int, source: int, size: Candidates) -> None:
        if self.ratios[layer] != self.ratios[source]:
            raise ValueError(f"candidate_source: layers {layer} and {source} differ in compression ratio")
        if size.blocks * size.block_size < self.top_k[layer]:
            raise ValueError(
                f"layer {layer} selects top-k {self.top_k[layer]} out of too few candidates: {size}"
            )
        # Limits of the filtered index kernel.
        heads, dim = self.index_heads, self.index_head_dim
        if size.block_size not in (8, 16) or size.blocks > 4096 or heads > 32 or dim != 128:
            raise ValueError(
                f"layer {layer}: the candidate filter takes blocks of 8 or 16 keys, at most 4096 blocks, at"
                f" most 32 index heads and index_head_dim 128; got {size}, {heads} heads of {dim}"
            )


def read_deepseek_topology(config: Mapping[str, Any]) -> DeepseekTopology:
    """Topology of a DeepSeek-V4.1 config, given as the mapping in config.json or its `text_config`.

    Required keys: num_hidden_layers, compress_ratios (main and draft layers), sliding_window,
    kv_source_layer_ids, index_source_layer_ids. The others default to V4.1-Flash values; index keys follow
    the KV sources unless index_k_source_layer_ids says otherwise. Every compressed layer selects index_topk
    keys. Only a null candidate_source_layer_id switches the candidate filter off.

    Raises:
        ValueError: for a missing key or a topology that breaks a rule of `DeepseekTopology`.
    """
    config = config.get("text_config") or config
    required = (
        "num_hidden_layers",
        "compress_ratios",
        "sliding_window",
        "kv_source_layer_ids",
        "index_source_layer_ids",
    )
    missing = [key for key in required if config.get(key) is None]
    if missing:
        raise ValueError(f"not a DeepSeek-V4.1 text config: {', '.join(missing)} missing")
    layers, drafts = int(config["num_hidden_layers"]), int(config.get("num_nextn_predict_layers") or 0)
    total, window = layers + drafts, int(config["sliding_window"])
    ratios = tuple(config["compress_ratios"])
    kv_sources = config["kv_source_layer_ids"]
    candidate = config.get("candidate_source_layer_id")
    if candidate is not None and not 0 <= candidate < layers:
        raise ValueError(
            f"candidate_source_layer_id {candidate} is not a layer; null switches the filter off"
        )
    return DeepseekTopology(
        num_layers=layers,
        num_draft_layers=drafts,
        window=window,
        ratios=ratios,
        kv_source=_nearest_source("kv_source_layer_ids", kv_sources, layers, total),
        index_k_source=_nearest_source(
            "index_k_source_layer_ids", config.get("index_k_source_layer_ids") or kv_sources, layers, total
        ),
        index_source=_nearest_source(
            "index_source_layer_ids", config["index_source_layer_ids"], layers, total
        ),
        candidate_source=tuple(
            candidate if candidate is not None and candidate <= layer < layers else None
            for layer in range(total)
        ),
        candidates=None
        if candidate is None
        else Candidates(config.get("candidate_topk_blocks", 2048), config.get("candidate_block_size", 8)),
        top_k=tuple(config.get("index_topk", 512) if ratio else 0 for ratio in ratios),
        uses_swa=(window > 0,) * total,
        index_heads=config.get("index_n_heads", 32),
        index_head_dim=config.get("index_head_dim", 128),
        head_dim=config.get("head_dim", 512),
        draft_targets=tuple(config.get("dspark_target_layer_ids") or ()),
        engram_layers=tuple(config.get("engram_layer_ids") or ()),
    )


def _nearest_source(name: str, sources: Sequence[int], layers: int, total: int) -> tuple[int, ...]:
    """[total] nearest listed source at or before each main layer; draft and earlier layers use themselves."""
    if (
        not sources
        or any(not 0 <= source < layers for source in sources)
        or list(sources) != sorted(set(sources))
    ):
        raise ValueError(f"{name} {list(sources)} must be ascending layers in 0..{layers - 1}, at least one")
    return tuple(
        max((source for source in sources if source <= layer < layers), default=layer)
        for layer in range(total)
    )

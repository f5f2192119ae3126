"""What one request keeps besides its block KV, and which part of it outlives the request.

A *state slot* holds one sliding-window (SWA) ring per layer and the state of the KV compressors:

    | rings of layers 0 .. P-1 | rings of layers P .. and draft layers | compressor state | padding |
    |<- stored: go to disk  -->|<- dropped: live as long as the slot ----------------------------- >|

Block KV is a function of every row and complete in every mode, so it is persisted as usual. Consumer rings
are not: under truncation they hold the last K rows only, which are recomputed after every prefix hit. Hence a
hit may be loaded in mask and compact, but not in off, which would continue from rings that nobody filled.

Ring lengths, in tokens: *inference* W + B, enough for decode with B - 1 tokens of rollback; *prefill* the
same, or more when a state may be stored for a position that the ring has moved past (`store_extra`).

Sizes and rules reproduce DeepInfer 0.1.0. V4.1-Flash with defaults: 43 rings, 20 stored and 23 dropped, and
1,415,040 of a slot's 3,128,928 bytes go to disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from vllm_yoco.cost import check_mode
from vllm_yoco.deepseek_topology import DeepseekTopology
from vllm_yoco.plan import Mode

HEAD_DIM, INDEX_HEAD_DIM = 512, 128  # values per KV latent and index key, fixed by the cache kernels
SWA_ENTRY_BYTES = HEAD_DIM + 16  # FP8 values, scales
KV_ENTRY_BYTES = HEAD_DIM // 2 + 32  # FP4 values, scales
INDEX_ENTRY_BYTES = INDEX_HEAD_DIM // 2 + 4  # FP4 values, scales
KV_BLOCK_TOKENS = 128
RING_ALIGN_BYTES = 32
SLOT_ALIGN_BYTES = lcm(RING_ALIGN_BYTES, SWA_ENTRY_BYTES)
KV_BLOCK_ALIGN_BYTES = lcm(128, KV_ENTRY_BYTES)  # the 128 is inferred from recorded block sizes
FP32_BYTES = 4


@dataclass(frozen=True)
class StateSettings:
    """Engine settings that size a state slot.

    Attributes:
        mode: off, mask or compact.
        keep_tokens: K; ignored in mode off.
        max_backtracking: B, speculative tokens + 1.
        store_extra: rings keep more than inference needs.
        extra_tokens: how much more; K comes on top in mask and compact.

    Raises:
        ValueError: for an unknown mode, K < 1 in mask or compact, B < 1 or negative extra_tokens.
    """

    mode: Mode = "off"
    keep_tokens: int = 0
    max_backtracking: int = 6
    store_extra: bool = False
    extra_tokens: int = 128

    def __post_init__(self) -> None:
        check_mode(self.mode, self.keep_tokens)
        if self.max_backtracking < 1 or self.extra_tokens < 0:
            raise ValueError(
                f"max_backtracking {self.max_backtracking} must be positive and extra_tokens"
                f" {self.extra_tokens} not negative"
            )


@dataclass(frozen=True)
class SlotSize:
    """Bytes of one state slot for one ring length (`ring_tokens`)."""

    ring_tokens: int
    stored_layers: int
    dropped_layers: int
    compressor_bytes: int

    @property
    def ring_bytes(self) -> int:
        """One ring, padded."""
        return _round_up(self.ring_tokens * SWA_ENTRY_BYTES, RING_ALIGN_BYTES)

    @property
    def stored_bytes(self) -> int:
        return self.stored_layers * self.ring_bytes

    @property
    def dropped_bytes(self) -> int:
        """Rings only; the compressor state is dropped as well."""
        return self.dropped_layers * self.ring_bytes

    @property
    def total_bytes(self) -> int:
        return _round_up(self.stored_bytes + self.dropped_bytes + self.compressor_bytes, SLOT_ALIGN_BYTES)


class CachePartition:
    """Stored and dropped state of one model under one set of settings.

    Attributes:
        stored_layers, dropped_layers: layers with a ring, ascending; draft layers are dropped wherever there
            are consumers, and the mode does not matter.
        inference, prefill: slot sizes for the two ring lengths; equal while `store_extra` is off.
        compressor_tokens: ring length of the compressor state per ratio above 1.
    """

    def __init__(self, topology: DeepseekTopology, settings: StateSettings) -> None:
        """Lay out the slot.

        Raises:
            ValueError: in mask or compact without consumers or without producers, for `store_extra` in a
                model without rings, and for head sizes whose cache entries are unknown.
        """
        boundary, mode = topology.boundary, settings.mode
        if mode != "off" and not 0 < boundary < topology.num_layers:
            raise ValueError(
                f"mode {mode} needs layers on both sides of the boundary, which is {boundary} of"
                f" {topology.num_layers}"
            )
        if (topology.head_dim, topology.index_head_dim) != (HEAD_DIM, INDEX_HEAD_DIM):
            raise ValueError(
                f"cache entries are known for head_dim {HEAD_DIM} and index_head_dim {INDEX_HEAD_DIM}, not"
                f" {topology.head_dim} and {topology.index_head_dim}"
            )
        self.topology, self.settings = topology, settings
        has_rings, has_consumers = topology.window > 0, boundary < topology.num_layers
        if settings.store_extra and not has_rings:
            raise ValueError("store_extra needs a model with sliding-window rings")
        rings = range(topology.total_layers if has_rings else 0)
        self.stored_layers = tuple(n for n in rings if not has_consumers or n < boundary)
        self.dropped_layers = tuple(n for n in rings if has_consumers and n >= boundary)

        rollback = settings.max_backtracking - 1
        pooling = [ratio for n in topology.kv_owners() if (ratio := topology.ratios[n]) > 1]
        self.compressor_tokens = {ratio: ratio + rollback for ratio in sorted(set(pooling))}
        # Per token and pooling layer: values and gate, in FP32. Index keys are projected from the result.
        compressor_bytes = sum(self.compressor_tokens[r] * 2 * HEAD_DIM * FP32_BYTES for r in pooling)

        ring = topology.window + settings.max_backtracking if has_rings else 0
        extra = settings.extra_tokens + (settings.keep_tokens if mode != "off" else 0)
        self.inference, self.prefill = (
            SlotSize(tokens, len(self.stored_layers), len(self.dropped_layers), compressor_bytes)
            for tokens in (ring, ring + extra * settings.store_extra)
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes per persisted state; stored rings are cut to the inference window first."""
        return self.inference.stored_bytes

    def kv_layout(self) -> list[tuple[int, int, int]]:
        """(layer, byte offset, bytes) of each owner of KV or index keys inside one block of 128 tokens."""
        topology, layout, offset = self.topology, [], 0
        for layer, ratio in enumerate(topology.ratios):
            entry = KV_ENTRY_BYTES * (topology.kv_source[layer] == layer)
            entry += INDEX_ENTRY_BYTES * (topology.index_k_source[layer] == layer)
            if ratio and entry:
                size = KV_BLOCK_TOKENS // ratio * entry
                layout.append((layer, offset, size))
                offset += size
        return layout

    @property
    def kv_block_bytes(self) -> int:
        """One block of 128 tokens over all layers, padded."""
        return _round_up(sum(size for _, _, size in self.kv_layout()), KV_BLOCK_ALIGN_BYTES)

    def check_load(self) -> None:
        """ValueError unless a persisted state may be loaded, even when it holds no ring at all.

        Loading writes the stored rings only and leaves the dropped ones as they were.
        """
        if self.dropped_layers and self.settings.mode == "off":
            first, last = self.dropped_layers[0], self.dropped_layers[-1]
            raise ValueError(
                f"layers {first}..{last} do not persist their SWA, so a prefix hit in mode off would continue"
                " from stale rings; use mask or compact, or no prefix cache"
            )

    def check_persist(self, end: int, *, to_decode: bool = False) -> None:
        """ValueError unless a state that ends at position `end` may be stored.

        Blocks are stored whole, so `end` must be block aligned; a transfer to a decode engine copies the
        whole slot, dropped part included, and may end anywhere.
        """
        if not to_decode and end % KV_BLOCK_TOKENS:
            raise ValueError(
                f"a persisted state must end at a multiple of {KV_BLOCK_TOKENS} tokens, not at {end}"
            )


def num_state_slots(max_num_seqs: int, ratio: float = 1.2) -> int:
    """Slots to allocate: some spare for forked and draining requests, and slot 0 for padding rows."""
    return int(max_num_seqs * ratio) + 1


def _round_up(size: int, align: int) -> int:
    return -(-size // align) * align

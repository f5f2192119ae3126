"""Which layer does what in a producer/consumer model, and what may not cross the boundary.

    layer      0 ........ P-1 | P ............................ N-1
    role       producers      | consumers
    reads      own KV         | global KV of its source + own sliding window (SWA)
    rows       every row      | under truncation: the last K prompt rows

Producers run on every prompt row. The boundary layer ``P`` is the first consumer: it normalises
every row, and from that *boundary-normalised hidden* every KV source among the consumers projects
its global KV. A consumer that is no source shares the KV of the nearest source before it, so a
segment of sharing layers may not start below ``P``: its KV would be built from another hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTopology:
    """Roles of the ``num_layers`` decoder layers of one model.

    Attributes:
        num_layers: N, decoder layers without draft layers.
        boundary: P, index of the first consumer; ``P == num_layers`` means no consumers.
        kv_source_layers: consumers that own global KV, ascending; the first one is ``P``.
        swa_layers: consumers with a sliding-window branch, ascending.
        window: W in keys, the query itself included; 0 where no layer has SWA.
        swa_share_hidden: SWA K/V come from the shared boundary hidden instead of the layer's own input.

    Raises:
        ValueError: for a topology on which truncation has no meaning.
    """

    num_layers: int
    boundary: int
    kv_source_layers: tuple[int, ...]
    swa_layers: tuple[int, ...]
    window: int
    swa_share_hidden: bool = False

    def __post_init__(self) -> None:
        n, p = self.num_layers, self.boundary
        if not 0 < p <= n:
            raise ValueError(
                f"n_prefill_layer={p}: the boundary must lie in 1..num_hidden_layers={n}, because producers are"
                " the layers below it and at least one is needed. Set n_prefill_layer to the index of the first"
                " consumer layer."
            )
        for name, layers in (("kv_source_layers", self.kv_source_layers), ("consumer_swa_layers", self.swa_layers)):
            if list(layers) != sorted(set(layers)):
                raise ValueError(f"{name}={list(layers)}: layer indices must ascend without repeats.")
            outside = [layer for layer in layers if not p <= layer < n]
            if outside:
                raise ValueError(
                    f"{name}={list(layers)}: {outside} are not consumer layers, which are [{p}, {n})."
                    + (" A share-KV segment may not cross the boundary." if name == "kv_source_layers" else "")
                )
        if p < n and (not self.kv_source_layers or self.kv_source_layers[0] != p):
            raise ValueError(
                f"kv_source_layers={list(self.kv_source_layers)}: the boundary layer {p} must be a KV source,"
                " because a share-KV segment may not cross the boundary. Add it to kv_source_layers."
            )
        if self.swa_layers and self.window < 1:
            raise ValueError(
                f"sliding_window={self.window}: consumer layers {list(self.swa_layers)} have a sliding-window"
                " branch, so the window must be at least 1 (the query itself). Set sliding_window, or"
                " consumer_swa_layers to []. (vLLM's --disable-sliding-window clears it: leave that flag out.)"
            )

    @property
    def num_consumers(self) -> int:
        return self.num_layers - self.boundary

    @property
    def consumer_window(self) -> int:
        """W that truncation has to respect, in keys: 0 when no consumer has SWA."""
        return self.window if self.swa_layers else 0

    @property
    def num_own_swa_layers(self) -> int:
        """D of the exactness span: consumer layers whose SWA K/V come from their own input."""
        return 0 if self.swa_share_hidden else len(self.swa_layers)

    def is_consumer(self, layer: int) -> bool:
        return self.boundary <= layer < self.num_layers

    def has_swa(self, layer: int) -> bool:
        return layer in self.swa_layers

    def kv_source_of(self, layer: int) -> int:
        """The consumer whose global KV ``layer`` reads: itself or the nearest source before it."""
        if not self.is_consumer(layer):
            raise ValueError(f"layer {layer} is no consumer; consumers are [{self.boundary}, {self.num_layers})")
        return max(source for source in self.kv_source_layers if source <= layer)


def check_draft_targets(topology: LayerTopology, target_layers: Sequence[int], *, mode: str) -> None:
    """Draft heads that read target hidden rows need all their targets on one side of the boundary.

    Below it every row exists, at or above it (compact) only the kept rows: a mixed feature would pair rows
    of different positions.

    Raises:
        ValueError: in compact mode with targets on both sides.
    """
    below = [layer for layer in target_layers if layer < topology.boundary]
    above = [layer for layer in target_layers if layer >= topology.boundary]
    if mode == "compact" and below and above:
        raise ValueError(
            f"draft target layers {sorted(target_layers)}: {below} lie below the boundary {topology.boundary} and"
            f" {above} at or above it. With --yoco-truncation compact all of them must lie on one side; choose"
            " other target layers, or use --yoco-truncation mask."
        )


def check_engram_layers(topology: LayerTopology, engram_layers: Sequence[int], *, mode: str) -> None:
    """Engram layers mix neighbouring rows, so under compact every one must see every row.

    Raises:
        ValueError: in compact mode with an Engram layer at or above the boundary.
    """
    above = [layer for layer in engram_layers if layer >= topology.boundary]
    if mode == "compact" and above:
        raise ValueError(
            f"Engram layers {above} lie at or above the boundary {topology.boundary}. With --yoco-truncation compact"
            " all Engram layers must lie below it; use --yoco-truncation mask or off."
        )

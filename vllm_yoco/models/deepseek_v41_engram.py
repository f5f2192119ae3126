"""Engram of DeepSeek-V4.1 in float32: n-gram memory that some layers add to their streams, for the dense oracle.

    ids      token ids in a smaller space where tokens that read alike are one (``token_map``)
    hash     the xor of (id at position - j) * m_j over j < n, m_j odd and one set per layer; for each n-gram length n
             and head a prime modulus of its own, and a range of the layer's table of its own
    gate     sigmoid of the signed square root of <norm(stream) q, norm(key) k> / sqrt(E), one for each stream
    out      stream + gate * value; keys of all streams and the value are one projection of the looked-up rows

An n-gram reaches below the row it ends at, so Engram layers lie below the boundary under ``compact``. Counterpart in
vLLM: vllm/models/deepseek_v41/common/engram.py. Multipliers and primes follow from the config; they have to be vLLM's,
since the checkpoint's tables are filled by them.

Shapes: T rows, S streams of E elements, C hash columns ((longest n-gram - 1) * heads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MINIMUM_DOT = 1e-6
"""vLLM's clamp under the square root."""


@dataclass(frozen=True)
class EngramLayout:
    """Tables and hashes of all Engram layers; names are the config's without ``engram_``.

    Attributes:
        layer_ids: ascending.
        num_embeddings: rows of each layer's table.
        max_ngram_size: longest n-gram; the shortest has two tokens.
        head_dim: elements of a table row.
        vocab_size: no bucket range is smaller.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    head_dim: int
    vocab_size: int
    compressed_vocab_size: int
    pad_token_id: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> EngramLayout | None:
        """None for a model without Engram layers. ValueError for missing fields or tables that are too small."""
        layers = tuple(config.get("engram_layer_ids") or ())
        if not layers:
            return None
        if 0 in layers:
            raise ValueError(
                "engram_layer_ids has layer 0, whose streams are still the embedding: vLLM runs no Engram there."
            )
        names = [name for name in cls.__dataclass_fields__ if name != "layer_ids"]
        missing = [f"engram_{name}" for name in names if config.get(f"engram_{name}") is None]
        if missing:
            raise ValueError(f"Engram layers need config fields that are missing: {', '.join(missing)}")
        fields = {name: config[f"engram_{name}"] for name in names}
        layout = cls(layers, **fields | {"num_embeddings": tuple(fields["num_embeddings"])})
        for layer, size, moduli in zip(layers, layout.num_embeddings, layout.moduli(), strict=True):
            if size < moduli.sum():
                raise ValueError(
                    f"engram_num_embeddings={size} of layer {layer} must be at least {moduli.sum()}: the sum of the"
                    f" {moduli.size} bucket ranges, each the next prime from engram_vocab_size={layout.vocab_size} on"
                )
        return layout

    @property
    def num_columns(self) -> int:
        return (self.max_ngram_size - 1) * self.n_heads

    def moduli(self) -> np.ndarray:
        """int64 [layers, C]: consecutive primes from ``vocab_size`` on, no one used twice by equal or later layers.

        Every n-gram length starts again from ``vocab_size`` and skips what is taken, so all are consecutive.
        """
        wanted, found, candidate = len(self.layer_ids) * self.num_columns, list[int](), self.vocab_size
        while len(found) < wanted:
            if candidate > 1 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
                found.append(candidate)
            candidate += 1
        return np.array(found).reshape(len(self.layer_ids), self.num_columns)

    def multipliers(self) -> np.ndarray:
        """int64 [layers, longest n-gram], odd; so small that a product with an id does not overflow."""
        bound = max(1, np.iinfo(np.int64).max // self.compressed_vocab_size // 2)
        drawn = [np.random.default_rng(10007 * n).integers(0, bound, self.max_ngram_size) for n in self.layer_ids]
        return 2 * np.stack(drawn) + 1

    def hashes(self, ids: np.ndarray, pad_id: int) -> np.ndarray:
        """int64 [layers, T, C]: rows of each layer's table that the n-grams ending at each position select.

        Args:
            ids: [T] compressed ids of one sequence from its start.
            pad_id: compressed id that stands for what is before the start.
        """
        moduli, multipliers = self.moduli(), self.multipliers()
        padded = np.concatenate((np.full(self.max_ngram_size - 1, pad_id), ids)).astype(np.int64)
        # Column j: the id j positions back.
        back = np.lib.stride_tricks.sliding_window_view(padded, self.max_ngram_size)[:, ::-1]
        mixed = np.bitwise_xor.accumulate(back * multipliers[:, None], axis=2)[:, :, 1:]
        first_row = np.cumsum(moduli, axis=1) - moduli
        return np.repeat(mixed, self.n_heads, axis=2) % moduli[:, None] + first_row[:, None]

    def parameter_shapes(self, layer: int, hidden: int, streams: int) -> dict[str, tuple[int, ...]]:
        """Tensors of an Engram layer, by the checkpoint's names within the layer; nothing for other layers."""
        if layer not in self.layer_ids:
            return {}
        return {
            "engram.embed.weight": (self.num_embeddings[self.layer_ids.index(layer)], self.head_dim),
            "engram.wkv.weight": ((streams + 1) * hidden, self.num_columns * self.head_dim),
            "engram.q_weight": (streams, hidden),
            "engram.k_weight": (streams, hidden),
        }


def token_ids_to_compressed(token_ids: Tensor, token_map: Sequence[int] | None, size: int) -> np.ndarray:
    """[T] compressed ids. Without a map (no tokenizer) ids are taken modulo ``size``, which keeps small ones."""
    ids = token_ids.cpu().numpy()
    return np.asarray(token_map)[ids] if token_map is not None else ids % size


def inject(streams: Tensor, rows: Tensor, w: Mapping[str, Tensor], eps: float) -> Tensor:
    """[T, S, E] streams with the looked-up table rows [T, C, D] written into them.

    Args:
        w: the layer's tensors, names as in ``parameter_shapes``.
        eps: of the norms.
    """
    count, size = streams.shape[1:]
    keys, value = (rows.flatten(1) @ w["engram.wkv.weight"].T).split([count * size, size], dim=1)
    keys = keys.unflatten(1, (count, size))
    norms = (torch.rsqrt(x.square().mean(-1) + eps) for x in (streams, keys))
    dot = (streams * w["engram.q_weight"] * w["engram.k_weight"] * keys).sum(-1) * size**-0.5
    for norm in norms:
        dot = dot * norm
    root = dot.abs().clamp(min=MINIMUM_DOT).sqrt()
    gate = torch.sigmoid(torch.where(dot < 0, -root, root))
    return streams + gate[..., None] * value[:, None]

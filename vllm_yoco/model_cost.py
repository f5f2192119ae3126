"""FLOPs of the prefill of one prompt over a whole model, from its config: what truncation saves at most.

    cost = YocoCost(config)                     # or DeepseekCost(mapping in config.json)
    compact = Prefill(16384, "compact", keep_tokens=140, chunk_tokens=2048)
    cost.of(compact).total_flops
    cost.speedup_ceiling(compact)               # FLOPs of off over those of compact

The ratio is a ceiling, for prefill that is bound by this arithmetic. Memory traffic and launches are not
counted, nor are norms, rotary embeddings, softmax and activations of the ``yoco`` family.

Formulas of the ``yoco`` family
-------------------------------
One multiply-add is 2 FLOPs. L: prompt tokens, C: tokens a chunk, K: kept rows, W: window. h: hidden size, f:
intermediate size, Q: query heads x head size, G: KV heads x head size, V: vocabulary; d is 1 in a consumer
with a sliding-window (SWA) branch, else 0.

    part         FLOPs per row                          rows in each layer
    producer     2h(Q + 2G) + 2Qh + 6hf                 L
    global KV    4hG, KV sources only                   L, in every mode
    consumer     2hQ + 2Qh + 6hf                        off, mask: L    compact: L - s + m
                 + d(2hQ + 4hG + 2Qh)
    LM head      2hV                                    1 per chunk: its last row is sampled

    part         FLOPs per query-key pair               pairs in each layer
    producer     4Q: scores and weighted sum            full: T(L)      sliding: R(L)
    consumer     4Q in the global branch                off, mask: T(L) compact: T(L) - T(s) + C T(m)
                 4Q in the SWA branch                   off: R(L)       mask, compact: R(L - s)

    s = max(0, L - K)      first kept row
    m = floor(s / C)       placeholders: a chunk wholly below s keeps its last row. The j-th one is row
                           jC - 1, which sees jC global keys and no SWA key.
    T(n) = n(n + 1)/2      R(n) = sum of min(W, i) for i = 1 .. n

DeepSeek-V4.1 follows the estimator of ``cost.py``, in the FP8-equivalent FLOPs of ``flops.py``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_yoco.cost import FlopsEstimator, check_mode, query_rows_and_pairs
from vllm_yoco.deepseek_topology import read_deepseek_topology
from vllm_yoco.flops import LayerFlops, ModelFlops
from vllm_yoco.plan import keep_start
from vllm_yoco.topology import LayerTopology

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig


@dataclass(frozen=True)
class Prefill:
    """How one prompt is computed, from its first token on (no prefix hit).

    Attributes:
        num_prompt_tokens: L.
        mode: off, mask or compact.
        keep_tokens: K in rows; ignored in mode off. The cost of a K below W + B is answered as well.
        chunk_tokens: C, prompt rows in one step; None takes the whole prompt in one step.

    Raises:
        ValueError: for an unknown mode, K < 1 in mask or compact, or L or C below 1.
    """

    num_prompt_tokens: int
    mode: str = "off"
    keep_tokens: int = 0
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode, self.keep_tokens)
        if self.num_prompt_tokens < 1:
            raise ValueError(f"num_prompt_tokens must be at least 1, got {self.num_prompt_tokens}")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")

    @property
    def chunk(self) -> int:
        """C, at most L."""
        return min(self.num_prompt_tokens, self.chunk_tokens or self.num_prompt_tokens)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_prompt_tokens // self.chunk)

    @property
    def first_kept(self) -> int:
        """s: SWA keys below it are hidden, and compact drops their rows; 0 in mode off."""
        return 0 if self.mode == "off" else keep_start(self.num_prompt_tokens, self.keep_tokens)

    @property
    def num_dropped(self) -> int:
        """Rows below s that consumer layers skip in compact, placeholders included; 0 otherwise."""
        return self.first_kept if self.mode == "compact" else 0

    @property
    def num_placeholders(self) -> int:
        """m: rows below s that compact computes all the same."""
        return self.num_dropped // self.chunk

    @property
    def consumer_rows(self) -> int:
        """Rows that each consumer layer computes."""
        return self.num_prompt_tokens - self.num_dropped + self.num_placeholders

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Each chunk as [start, end)."""
        for start in range(0, self.num_prompt_tokens, self.chunk):
            yield start, min(start + self.chunk, self.num_prompt_tokens)


@dataclass(frozen=True)
class PrefillCost:
    """Cost of the prefill of one prompt.

    Attributes:
        num_chunks: steps that the prompt is cut into.
        producer_rows, consumer_rows: rows that each producer, and each consumer layer computes.
        layer_rows: rows summed over all layers.
        global_pairs, swa_pairs: query-key pairs of the two branches, summed over the consumer layers.
        producer_flops, consumer_flops: all of the layers' work but the projection of global KV in consumers.
        global_kv_flops: projection of global KV in consumer layers; every row, in every mode.
        lm_head_flops: logits of the last row of each chunk; a step in which no request keeps a row computes none.
    """

    num_chunks: int
    producer_rows: int
    consumer_rows: int
    layer_rows: int
    global_pairs: int
    swa_pairs: int
    producer_flops: int
    global_kv_flops: int
    consumer_flops: int
    lm_head_flops: int

    @property
    def total_flops(self) -> int:
        return self.producer_flops + self.global_kv_flops + self.consumer_flops + self.lm_head_flops


class ModelCost(ABC):
    """Cost of prefill for one model.

    Attributes:
        topology: roles of the layers.
        flops_unit: what one FLOP of the results stands for.
    """

    topology: LayerTopology
    flops_unit: str

    @abstractmethod
    def of(self, prefill: Prefill) -> PrefillCost:
        """Rows, pairs and FLOPs of one prompt."""

    def speedup_ceiling(self, prefill: Prefill) -> float:
        """FLOPs of the same prompt and chunks in mode off, over its own; 1 where nothing is truncated."""
        return self.of(replace(prefill, mode="off")).total_flops / self.of(prefill).total_flops

    def layer_rows(self, prefill: Prefill) -> int:
        return layer_rows(self.topology, prefill)


def layer_rows(topology: LayerTopology, prefill: Prefill) -> int:
    """Rows computed, summed over the layers."""
    return topology.boundary * prefill.num_prompt_tokens + topology.num_consumers * prefill.consumer_rows


class YocoCost(ModelCost):
    """The ``yoco`` family, by the formulas of the module docstring; constant time for any length."""

    flops_unit = "FLOPs (a multiply-add is 2)"

    def __init__(self, config: YocoModelConfig) -> None:
        self.config, self.topology = config, config.topology()

    def of(self, prefill: Prefill) -> PrefillCost:
        config, topology, length = self.config, self.topology, prefill.num_prompt_tokens
        hidden = config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        query_and_output, key_and_value = 2 * hidden * queries + 2 * queries * hidden, 4 * hidden * keys
        mlp, pair = 6 * hidden * config.intermediate_size, 4 * queries

        producers = topology.boundary
        windows = [config.producer_window(layer) for layer in range(producers)]
        producer_pairs = sum(_window_pairs(length, w) if w else _triangle(length) for w in windows)
        producer_row = query_and_output + key_and_value + mlp

        consumers, with_swa, rows = topology.num_consumers, len(topology.swa_layers), prefill.consumer_rows
        global_pairs = consumers * (
            _triangle(length)
            - _triangle(prefill.num_dropped)
            + prefill.chunk * _triangle(prefill.num_placeholders)
        )
        swa_pairs = with_swa * _window_pairs(length - prefill.first_kept, topology.window)
        swa_row = query_and_output + key_and_value
        consumers_row = consumers * (query_and_output + mlp) + with_swa * swa_row  # of all layers together
        return PrefillCost(
            num_chunks=prefill.num_chunks,
            producer_rows=length,
            consumer_rows=rows,
            layer_rows=self.layer_rows(prefill),
            global_pairs=global_pairs,
            swa_pairs=swa_pairs,
            producer_flops=producers * producer_row * length + pair * producer_pairs,
            global_kv_flops=len(topology.kv_source_layers) * key_and_value * length,
            consumer_flops=consumers_row * rows + pair * (global_pairs + swa_pairs),
            lm_head_flops=2 * hidden * config.vocab_size * prefill.num_chunks,
        )


class DeepseekCost(ModelCost):
    """Cost of DeepSeek-V4.1 by `FlopsEstimator`, summed over the chunks of a prompt, draft layers left out.

    ``global_kv_flops`` also holds the boundary norm of the rows that compact removes.
    """

    flops_unit = "FP8-equivalent FLOPs (a multiply-add is 1 in FP4, 2 in FP8, 4 in BF16, 8 in FP32)"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config``: the mapping in config.json. ValueError as in `deepseek_cost_config`."""
        self._metadata = deepseek_cost_config(config)
        self.topology: LayerTopology = read_deepseek_topology(config).layer_topology()
        model = FlopsEstimator(self._metadata, mode="off", keep_tokens=0).model
        # The estimator is linear in its coefficients: with the others at 0 it returns one part alone.
        producers = tuple((layer, n) for layer, n in model.layers if not layer.is_consumer)
        consumers = tuple((layer, n) for layer, n in model.layers if layer.is_consumer)
        bare = replace(model, layers=(), lm_head_row=0, dropped_row=0)
        self._parts = {
            "producer_flops": replace(bare, layers=producers),
            "global_kv_flops": replace(
                bare,
                dropped_row=model.dropped_row,
                layers=tuple(
                    (LayerFlops(True, 0, 0, layer.source_row, layer.index_key, ratio=layer.ratio), n)
                    for layer, n in consumers
                ),
            ),
            "consumer_flops": replace(
                bare, layers=tuple((replace(layer, source_row=0, index_key=0), n) for layer, n in consumers)
            ),
            "lm_head_flops": replace(bare, lm_head_row=model.lm_head_row),
            "swa_pairs": replace(
                bare,
                layers=tuple((LayerFlops(True, 0, 0, swa_pair=bool(c.swa_pair)), n) for c, n in consumers),
            ),
            "global_pairs": replace(
                bare,
                layers=tuple(
                    (LayerFlops(True, 0, 0, block_pair=bool(c.block_pair), ratio=c.ratio, top_k=c.top_k), n)
                    for c, n in consumers
                ),
            ),
        }

    def of(self, prefill: Prefill) -> PrefillCost:
        estimator = FlopsEstimator(self._metadata, mode=prefill.mode, keep_tokens=prefill.keep_tokens)
        return PrefillCost(
            num_chunks=prefill.num_chunks,
            producer_rows=prefill.num_prompt_tokens,
            consumer_rows=prefill.consumer_rows,
            layer_rows=self.layer_rows(prefill),
            **{name: _total(estimator, part, prefill) for name, part in self._parts.items()},
        )


def deepseek_cost_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that `FlopsEstimator` takes, from the one in DeepSeek-V4.1's config.json.

    Weights and projections are FP8 if ``quantization_config`` says so, else BF16; indexer scores are FP4 and
    hyper-connections shifted, as V4.1 is built.

    Raises:
        ValueError: for missing sizes, or a broken topology.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    sizes = {
        "n_embed": "hidden_size",
        "vocab_size": "vocab_size",
        "moe_intermediate_size": "moe_intermediate_size",
        "moe_top_k": "num_experts_per_tok",
        "n_shared_experts": "n_shared_experts",
        "n_routed_experts": "n_routed_experts",
        "n_head": "num_attention_heads",
        "q_lora_rank": "q_lora_rank",
        "q_head_dim": "head_dim",
        "o_head_dim": "o_lora_rank",
        "n_wv_group": "o_groups",
    }
    engram = text.get("engram_layer_ids") or []
    engram_sizes = ("engram_n_heads", "engram_head_dim", "engram_max_ngram_size") if engram else ()
    missing = [key for key in (*sizes.values(), *engram_sizes) if text.get(key) is None]
    if missing:
        raise ValueError(f"FLOPs need sizes that the config lacks: {', '.join(missing)}")
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    fp8 = quantization.get("quant_method") == "fp8"
    metadata = {
        **{name: int(text[key]) for name, key in sizes.items()},
        **read_deepseek_topology(config).cost_layers(),
        "fp8_mlp": fp8,
        "fp8_attn": fp8,
        "engram_fp8_proj": fp8,
        "indexer_use_fp4": True,
        "hc_enabled": bool(text.get("hc_mult")),
        "hc_mult": int(text.get("hc_mult") or 1),
        "hc_shifted": True,
        "engram_cfg": {},
    }
    if engram:
        heads, dim, longest = (int(text[key]) for key in engram_sizes)
        # One hashed embedding for each n-gram of 2 .. longest tokens.
        metadata["engram_cfg"] = {
            "n_embed_per_ngram": [heads * dim] * (longest - 1),
            "engram_layer_ids": list(engram),
        }
    return metadata


def _total(estimator: FlopsEstimator, part: ModelFlops, prefill: Prefill) -> int:
    """The estimator's total over all chunks, with the coefficients of one part."""
    estimator = copy.copy(estimator)
    estimator.model = part
    full_len = prefill.num_prompt_tokens
    return sum(
        estimator.flops(q=end - start, k=end, is_prompt=True, full_len=full_len)[1]
        for start, end in prefill.chunks()
    )


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _window_pairs(n: int, window: int) -> int:
    """R(n), n >= 1; 0 without a window."""
    return query_rows_and_pairs(
        q=n, k=n, is_prompt=True, full_len=n, swa_valid_start=0, window=window, mode="off", keep_tokens=0
    )[1]

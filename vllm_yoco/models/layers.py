"""The decoder layers of ``YocoForCausalLM``: producers over their own KV, consumers over global KV and a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.utils.torch_utils import _encode_layer_name

from vllm_yoco.attention import ConsumerSlidingAttention
from vllm_yoco.batch import ConsumerStep
from vllm_yoco.config import Truncation
from vllm_yoco.models.config import YocoModelConfig


def rank_heads(config: YocoModelConfig) -> tuple[int, int]:
    """Query and KV heads of one tensor-parallel rank."""
    tp_size = get_tensor_model_parallel_world_size()
    if config.num_key_value_heads % tp_size:
        raise ValueError(
            f"--tensor-parallel-size {tp_size}: must divide num_key_value_heads={config.num_key_value_heads} of this"
            " model, because KV heads are sharded and not replicated. Use a divisor."
        )
    return config.num_attention_heads // tp_size, config.num_key_value_heads // tp_size


def write_kv(attn: Attention, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write K/V rows through the slot mapping of the running forward context, without attending.

    The write half of vLLM's ``Attention.forward`` (vllm/model_executor/layers/attention/attention.py).

    Args:
        key, value: [T, kv_heads * head_dim], one row per row of the full batch.
    """
    key = key.view(-1, attn.num_kv_heads, attn.head_size)
    value = value.view(-1, attn.num_kv_heads, attn.head_size_v)
    torch.ops.vllm.unified_kv_cache_update(key, value, _encode_layer_name(attn.layer_name))


class YocoMLP(nn.Module):
    def __init__(self, config: YocoModelConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden)
        out, _ = self.down_proj(self.act_fn(gate_up))
        return out


class ProducerAttention(nn.Module):
    """Full or sliding-window self-attention over the layer's own KV."""

    def __init__(
        self,
        config: YocoModelConfig,
        layer: int,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        rope: nn.Module,
        prefix: str,
    ) -> None:
        super().__init__()
        heads, kv_heads = rank_heads(config)
        self.sizes = [heads * config.head_dim, kv_heads * config.head_dim, kv_heads * config.head_dim]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = rope
        self.attn = Attention(
            heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=config.producer_window(layer),
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return out


class ConsumerAttention(nn.Module):
    """Global branch over the source's KV, optional sliding-window branch, joined by the output projection."""

    def __init__(
        self,
        config: YocoModelConfig,
        layer: int,
        truncation: Truncation,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        rope: nn.Module,
        prefix: str,
        layers_prefix: str,
    ) -> None:
        super().__init__()
        topology = truncation.topology
        heads, kv_heads = rank_heads(config)
        all_q, all_kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_size, self.kv_size = heads * config.head_dim, kv_heads * config.head_dim
        self.has_swa = topology.has_swa(layer)
        self.shares_hidden = self.has_swa and topology.swa_share_hidden
        # One projection of the layer's input: global q, then q (and, from own input, k and v) of the window.
        outputs, self.in_sizes = [all_q], [self.q_size]
        if self.has_swa:
            outputs, self.in_sizes = [*outputs, all_q], [*self.in_sizes, self.q_size]
        if self.has_swa and not self.shares_hidden:
            outputs, self.in_sizes = [*outputs, all_kv, all_kv], [*self.in_sizes, self.kv_size, self.kv_size]
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size, outputs, bias=False, quant_config=quant_config, prefix=f"{prefix}.in_proj"
        )
        if self.shares_hidden:
            self.swa_kv_proj = MergedColumnParallelLinear(
                config.hidden_size,
                [all_kv, all_kv],
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.swa_kv_proj",
            )
        self.o_proj = RowParallelLinear(
            all_q * (2 if self.has_swa else 1),
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = rope
        common: dict[str, Any] = {
            "num_kv_heads": kv_heads,
            "cache_config": cache_config,
            "quant_config": quant_config,
        }
        shape = (heads, config.head_dim, config.head_dim**-0.5)
        source = topology.kv_source_of(layer)
        self.attn = Attention(
            *shape,
            **common,
            prefix=f"{prefix}.attn",
            kv_sharing_target_layer_name=None if source == layer else f"{layers_prefix}.{source}.self_attn.attn",
        )
        if self.has_swa and truncation.active:
            self.swa_attn: Attention = ConsumerSlidingAttention(
                *shape, **common, window=topology.window, prefix=f"{prefix}.swa_attn"
            )
        elif self.has_swa:
            self.swa_attn = Attention(
                *shape, **common, per_layer_sliding_window=topology.window, prefix=f"{prefix}.swa_attn"
            )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, shared: torch.Tensor, step: ConsumerStep | None
    ) -> torch.Tensor:
        """Attend on the rows of ``hidden`` [T', hidden]; ``shared`` holds the same rows of the shared hidden."""
        projected, _ = self.in_proj(hidden)
        q, *swa = projected.split(self.in_sizes, dim=-1)
        # K/V of every row are in the cache already: attend without writing.
        q, _ = self.rotary_emb(positions, q, None)
        out = self.attn(q, None, None)
        if self.has_swa:
            if self.shares_hidden:
                kv, _ = self.swa_kv_proj(shared)
                swa += kv.split([self.kv_size, self.kv_size], dim=-1)
            swa_q, swa_k, swa_v = swa
            swa_q, swa_k = self.rotary_emb(positions, swa_q, swa_k)
            out = torch.cat([out, self._window(swa_q, swa_k, swa_v, step)], dim=-1)
        out, _ = self.o_proj(out)
        return out

    def _window(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: ConsumerStep | None
    ) -> torch.Tensor:
        if step is None:
            return self.swa_attn(q, k, v)
        if step.compact:
            return _zero_rows(self.swa_attn(q, k, v), step.empty)
        # mask: the other branches run on every row, this one on the rows that see something.
        with override_forward_context(step.forward_context):
            kept = self.swa_attn(*(rows.index_select(0, step.rows) for rows in (q, k, v)))
        return torch.zeros_like(q).index_copy_(0, step.rows, _zero_rows(kept, step.empty))


def _zero_rows(rows: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
    """Zeros where ``empty``: a select, since a product would keep the NaN of an uninitialised cell."""
    return rows if empty is None else torch.where(empty, torch.zeros_like(rows), rows)


class ProducerLayer(nn.Module):
    def __init__(self, config: YocoModelConfig, attention: ProducerAttention, mlp: YocoMLP) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class ConsumerLayer(nn.Module):
    """A decoder layer over the kept rows. Takes its normed input, as the boundary norm serves layer P."""

    def __init__(self, config: YocoModelConfig, attention: ConsumerAttention, mlp: YocoMLP) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.num_computed_rows = 0
        """Rows this layer has run on since the engine started: measured here, not derived from any plan."""

    def forward(
        self,
        positions: torch.Tensor,
        normed: torch.Tensor,
        residual: torch.Tensor,
        shared: torch.Tensor,
        step: ConsumerStep | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_computed_rows += normed.shape[0]
        hidden = self.self_attn(positions, normed, shared, step)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual

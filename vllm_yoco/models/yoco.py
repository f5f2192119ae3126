"""``YocoForCausalLM``: a producer/consumer decoder for vLLM, with prefill truncation.

    tokens -> embedding -> producers [0, P), every row
                               |
            boundary norm (layer P's input norm), every row = shared hidden
               |                                  |
        global KV of every source            kept rows only
        (one batched projection)                  |
               '--------> consumers [P, N) <------'   -> final norm -> logits

Global KV is complete at the boundary, so the consumer layers never touch a dropped row. What a step keeps comes
from ``vllm_yoco.batch``; without a step (``off``, decode, short prompts, profile runs) the consumers run on the
whole batch and this is an ordinary vLLM model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import _encode_layer_name

from vllm_yoco.attention import ConsumerSlidingAttention
from vllm_yoco.batch import ConsumerStep, current_step
from vllm_yoco.config import Truncation
from vllm_yoco.engine_config import truncation_of
from vllm_yoco.models.config import YocoModelConfig


def _rank_heads(config: YocoModelConfig) -> tuple[int, int]:
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
        heads, kv_heads = _rank_heads(config)
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
        heads, kv_heads = _rank_heads(config)
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


class YocoModel(nn.Module, EagleModelMixin):
    def __init__(self, *, vllm_config: VllmConfig, truncation: Truncation, prefix: str = "") -> None:
        super().__init__()
        config: YocoModelConfig = vllm_config.model_config.hf_config
        cache_config, quant_config = vllm_config.cache_config, vllm_config.quant_config
        self.config = config
        self.topology = truncation.topology
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.embed_tokens"
        )
        rope = get_rope(
            config.head_dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.layers = nn.ModuleList()
        for layer in range(config.num_hidden_layers):
            name = f"{prefix}.layers.{layer}"
            mlp = YocoMLP(config, quant_config, f"{name}.mlp")
            attn_args = (cache_config, quant_config, rope, f"{name}.self_attn")
            if self.topology.is_consumer(layer):
                attention = ConsumerAttention(config, layer, truncation, *attn_args, f"{prefix}.layers")
                self.layers.append(ConsumerLayer(config, attention, mlp))
            else:
                self.layers.append(ProducerLayer(config, ProducerAttention(config, layer, *attn_args), mlp))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = rope
        sources = self.topology.kv_source_layers
        self.kv_size = _rank_heads(config)[1] * config.head_dim
        if sources:
            # Every source projects the same shared hidden, so one matrix product serves all of them.
            self.global_kv_proj = MergedColumnParallelLinear(
                config.hidden_size,
                [config.num_key_value_heads * config.head_dim] * (2 * len(sources)),
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.global_kv_proj",
            )

    @property
    def consumers(self) -> list[ConsumerLayer]:
        return list(self.layers[self.topology.boundary :])  # type: ignore[arg-type]

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Final hidden rows [T, hidden]; with auxiliary layers set, also their inputs, [T, hidden] each.

        Auxiliary index i is the input of layer i (vLLM's EAGLE-3 convention, ``EagleModelMixin``). Up to the boundary
        all rows are there, above it under compact only the kept rows, at their places among zeros.
        """
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        # The embedding becomes the residual, which the fused norms add to in place.
        aux = [hidden.clone()] if 0 in self.aux_hidden_state_layers else []
        for index, layer in enumerate(self.layers[: self.topology.boundary]):
            hidden, residual = layer(positions, hidden, residual)
            self._maybe_add_hidden_state(aux, index + 1, hidden, residual)
        if not self.topology.num_consumers:
            out = self.norm(hidden, residual)[0]
            return (out, aux) if aux else out
        shared, residual = self.consumers[0].input_layernorm(hidden, residual)
        self._write_global_kv(positions, shared)
        step = current_step()
        if step is None or not step.compact:
            out, consumer_aux = self._run_consumers(positions, shared, residual, step)
        else:
            rows = step.rows
            with override_forward_context(step.forward_context):
                kept, kept_aux = self._run_consumers(positions[rows], shared[rows], residual[rows], step)
            # Nothing reads the dropped rows' outputs; zeros keep the layout that the runner samples from.
            out, *consumer_aux = (
                values.new_zeros((shared.shape[0], values.shape[1])).index_copy_(0, rows, values)
                for values in (kept, *kept_aux)
            )
        aux += consumer_aux
        return (out, aux) if aux else out

    def _write_global_kv(self, positions: torch.Tensor, shared: torch.Tensor) -> None:
        """Project and store the global KV of every row for every source; ``shared`` is [T, hidden]."""
        projected, _ = self.global_kv_proj(shared)
        kv = projected.split(self.kv_size, dim=-1)
        for source, key, value in zip(self.topology.kv_source_layers, kv[::2], kv[1::2], strict=True):
            # The rotary kernel wants a query; the key takes its place.
            key, _ = self.rotary_emb(positions, key.contiguous(), None)
            write_kv(self.layers[source].self_attn.attn, key, value)

    def _run_consumers(
        self, positions: torch.Tensor, shared: torch.Tensor, residual: torch.Tensor, step: ConsumerStep | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Layers [P, N) and the final norm on one layout's rows; ``shared`` is layer P's normed input."""
        first, *others = self.consumers
        above = self.topology.boundary + 1
        hidden, residual = first(positions, shared, residual, shared, step)
        aux = self._maybe_add_hidden_state([], above, hidden, residual)
        for index, layer in enumerate(others, start=above + 1):
            normed, residual = layer.input_layernorm(hidden, residual)
            hidden, residual = layer(positions, normed, residual, shared, step)
            self._maybe_add_hidden_state(aux, index, hidden, residual)
        return self.norm(hidden, residual)[0], aux


class YocoForCausalLM(nn.Module, SupportsEagle3):
    """Entry point for vLLM; loads Hugging Face style weights (see ``vllm_yoco.models.checkpoint``)."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: YocoModelConfig = vllm_config.model_config.hf_config
        truncation = truncation_of(vllm_config)
        assert truncation is not None
        if truncation.active:
            from vllm_yoco import startup

            startup.validate(vllm_config, "worker")
        self.config, self.truncation = config, truncation
        self.model = YocoModel(vllm_config=vllm_config, truncation=truncation, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def get_model_state_cls(self) -> type:
        """Model Runner V2 asks the model for its state (vllm/v1/worker/gpu/model_states/__init__.py)."""
        if self.truncation.active:
            from vllm_yoco.models.state import YocoModelState

            return YocoModelState
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        return DefaultModelState

    def consumer_layer_names(self) -> tuple[set[str], set[str]]:
        """Names of the consumers' global and sliding-window attention layers."""
        attention = [layer.self_attn for layer in self.model.consumers]
        return (
            {module.attn.layer_name for module in attention},
            {module.swa_attn.layer_name for module in attention if module.has_swa},
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Map checkpoint names onto the fused projections.

        Raises:
            ValueError: for a weight that this config has no place for, or one that is missing.
        """
        parameters = dict(self.named_parameters())
        loaded: set[str] = set()
        seen: set[str] = set()
        for name, weight in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            target, shard = self._placement(name)
            if target not in parameters:
                raise ValueError(f"checkpoint weight {name} has no place in this config (wanted {target})")
            parameter = parameters[target]
            if self._joins_two_branches(target):
                weight = _interleave_branches(weight, get_tensor_model_parallel_world_size())
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, weight) if shard is None else loader(parameter, weight, shard)
            loaded.add(target)
            seen.add(name)
        missing = self.expected_weight_names() - seen
        if missing:
            raise ValueError(f"the checkpoint lacks {sorted(missing)}, which this config needs")
        return loaded

    def expected_weight_names(self) -> set[str]:
        """Checkpoint names that this config must find."""
        topology = self.truncation.topology
        names = {"model.embed_tokens.weight", "model.norm.weight"}
        if not self.config.tie_word_embeddings:
            names.add("lm_head.weight")
        for layer in range(topology.num_layers):
            parts = ["input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.o_proj"]
            parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
            if not topology.is_consumer(layer) or layer in topology.kv_source_layers:
                parts += ["self_attn.k_proj", "self_attn.v_proj"]
            if topology.has_swa(layer):
                parts += [f"self_attn.swa_{part}_proj" for part in "qkv"]
            names |= {f"model.layers.{layer}.{part}.weight" for part in parts}
        return names

    def _placement(self, name: str) -> tuple[str, int | str | None]:
        """The parameter and shard that a checkpoint weight goes to."""
        *path, module, suffix = name.split(".")
        base = ".".join(path)
        if module in ("gate_proj", "up_proj"):
            return f"{base}.gate_up_proj.{suffix}", ("gate_proj", "up_proj").index(module)
        if "self_attn" not in path or module == "o_proj":
            return name, None
        topology, layer = self.truncation.topology, int(path[path.index("layers") + 1])
        if not topology.is_consumer(layer):
            return f"{base}.qkv_proj.{suffix}", module[0]
        if module in ("k_proj", "v_proj"):
            if layer not in topology.kv_source_layers:
                return name, None
            source = topology.kv_source_layers.index(layer)
            return f"model.global_kv_proj.{suffix}", 2 * source + (module == "v_proj")
        if module in ("swa_k_proj", "swa_v_proj") and topology.swa_share_hidden:
            return f"{base}.swa_kv_proj.{suffix}", ("swa_k_proj", "swa_v_proj").index(module)
        shards = ("q_proj", "swa_q_proj", "swa_k_proj", "swa_v_proj")
        return f"{base}.in_proj.{suffix}", shards.index(module)

    def _joins_two_branches(self, parameter: str) -> bool:
        parts = parameter.split(".")
        return parts[-2:] == ["o_proj", "weight"] and self.truncation.topology.has_swa(int(parts[2]))


def _interleave_branches(weight: torch.Tensor, tp_size: int) -> torch.Tensor:
    """Reorder output-projection columns [global heads | window heads] so that an equal cut of the columns gives
    every rank its heads of both branches. ``weight`` is [hidden, 2 * heads * head_dim]."""
    rows, columns = weight.shape
    return weight.view(rows, 2, tp_size, columns // (2 * tp_size)).transpose(1, 2).reshape(rows, columns)

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

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_yoco.batch import ConsumerStep, current_step
from vllm_yoco.config import Truncation
from vllm_yoco.engine_config import truncation_of
from vllm_yoco.models.config import YocoModelConfig
from vllm_yoco.models.layers import (
    ConsumerAttention,
    ConsumerLayer,
    ProducerAttention,
    ProducerLayer,
    YocoMLP,
    rank_heads,
    write_kv,
)
from vllm_yoco.models.weights import load_weights


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
        self.kv_size = rank_heads(config)[1] * config.head_dim
        if sources:
            # Every source projects the same shared hidden, so one matrix product serves all of them: first the
            # keys of all sources, then the values, so that one rotation serves all keys.
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
            if step.idle:
                kept = shared[rows]
                kept_aux = [kept for index in self.aux_hidden_state_layers if index > self.topology.boundary]
            else:
                with override_forward_context(step.forward_context):
                    kept, kept_aux = self._run_consumers(step.positions, shared[rows], residual[rows], step)
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
        keys, values = projected.tensor_split(2, dim=-1)
        # One rotation for the heads of all sources. The kernel wants a query; the keys take its place.
        keys, _ = self.rotary_emb(positions, keys.contiguous(), None)
        split = zip(keys.split(self.kv_size, dim=-1), values.split(self.kv_size, dim=-1), strict=True)
        for source, (key, value) in zip(self.topology.kv_source_layers, split, strict=True):
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
        self.step_is_idle = False
        """Set by ``hand_over`` before each step's forward, also where a CUDA graph replays it."""

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
        if self.step_is_idle:
            # What the matrix product would be, for hidden rows are zeros in such a step.
            dtype = self.logits_processor.head_dtype or hidden_states.dtype
            return hidden_states.new_zeros((hidden_states.shape[0], self.config.vocab_size), dtype=dtype)
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_weights(self, self.config, self.truncation.topology, weights)

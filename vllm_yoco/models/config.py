"""Hugging Face config of the ``yoco`` model family. Imports transformers, not vLLM."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from vllm_yoco.topology import LayerTopology

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


class YocoModelConfig(PretrainedConfig):
    """A decoder whose layers ``[0, n_prefill_layer)`` are producers and whose other layers are consumers.

    Producers are ordinary pre-norm decoder layers with full or sliding attention. A consumer layer attends to
    the global KV of its source, and, where it is listed in ``consumer_swa_layers``, also to a sliding window of
    its own; the two results enter the output projection side by side.

    Args:
        n_prefill_layer: P, index of the first consumer (boundary) layer.
        layer_types: ``full_attention`` or ``sliding_attention`` per producer (P entries), or per layer
            (N entries, the consumers' being ``full_attention``: their global branch). Default: all full.
        kv_source_layers: consumers that own global KV; the others read the nearest source before them. The
            boundary layer must be one. Default: the boundary layer alone, as in the YOCO paper.
        consumer_swa_layers: consumers with a sliding-window branch. Default: all of them; ``[]`` for none.
        sliding_window: W in keys, the query itself included, of sliding producers and consumer branches.
        swa_share_hidden: consumer sliding-window K/V come from the shared boundary hidden instead of the
            layer's own input.
        rope_parameters: as in transformers, for example ``{"rope_type": "default", "rope_theta": 10000.0}``.

    Raises:
        ValueError: for an inconsistent topology or list of layer types.
    """

    model_type = "yoco"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 384,
        hidden_size: int = 256,
        intermediate_size: int = 704,
        num_hidden_layers: int = 8,
        n_prefill_layer: int = 4,
        num_attention_heads: int = 8,
        num_key_value_heads: int = 2,
        head_dim: int | None = None,
        layer_types: list[str] | None = None,
        kv_source_layers: list[int] | None = None,
        consumer_swa_layers: list[int] | None = None,
        sliding_window: int | None = 128,
        swa_share_hidden: bool = False,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int = 8192,
        rms_norm_eps: float = 1e-6,
        hidden_act: str = "silu",
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = 256,
        eos_token_id: int | None = 257,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.n_prefill_layer = n_prefill_layer
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        consumers = list(range(n_prefill_layer, num_hidden_layers))
        self.kv_source_layers = consumers[:1] if kv_source_layers is None else list(kv_source_layers)
        self.consumer_swa_layers = consumers if consumer_swa_layers is None else list(consumer_swa_layers)
        # vLLM reads layer_types; without full entries it would apply the window to every layer that has none.
        types = [FULL_ATTENTION] * num_hidden_layers if layer_types is None else list(layer_types)
        if len(types) == n_prefill_layer:
            types += [FULL_ATTENTION] * len(consumers)
        self.layer_types = types
        self.sliding_window = sliding_window
        self.swa_share_hidden = swa_share_hidden
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.hidden_act = hidden_act
        self.initializer_range = initializer_range
        self._check()
        super().__init__(
            tie_word_embeddings=tie_word_embeddings, bos_token_id=bos_token_id, eos_token_id=eos_token_id, **kwargs
        )

    def _check(self) -> None:
        types, p = self.layer_types, self.n_prefill_layer
        self.topology()
        if len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(types)} entries: it needs one per producer (n_prefill_layer={p}) or one per"
                f" layer (num_hidden_layers={self.num_hidden_layers})."
            )
        unknown = sorted(set(types) - {FULL_ATTENTION, SLIDING_ATTENTION})
        if unknown:
            raise ValueError(f"layer_types: {unknown} must be {FULL_ATTENTION} or {SLIDING_ATTENTION}.")
        if SLIDING_ATTENTION in types[p:]:
            raise ValueError(
                "layer_types: consumers attend to the global KV in full, so their entries must be"
                f" {FULL_ATTENTION}; give them a window with consumer_swa_layers."
            )
        if SLIDING_ATTENTION in types and not self.sliding_window:
            raise ValueError(f"sliding_window={self.sliding_window}: layer_types asks for {SLIDING_ATTENTION}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings.")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r}: only silu is supported.")

    def topology(self) -> LayerTopology:
        """Roles of the layers; see ``LayerTopology`` for what is refused."""
        return LayerTopology(
            num_layers=self.num_hidden_layers,
            boundary=self.n_prefill_layer,
            kv_source_layers=tuple(self.kv_source_layers),
            swa_layers=tuple(self.consumer_swa_layers),
            window=self.sliding_window or 0,
            swa_share_hidden=self.swa_share_hidden,
        )

    def producer_window(self, layer: int) -> int | None:
        """Window of a producer layer in keys, or None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING_ATTENTION else None

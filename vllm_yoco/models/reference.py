"""The YOCO decoder as a plain dense PyTorch model in float32: the oracle of the tests, and trainable.

Every row is computed and every attention is a softmax under a boolean mask, so what truncation means is one
comparison (``swa_visible``) and nothing else. ``mask`` and ``compact`` agree with it on every row >= s_keep.

    x = embedding
    producers i < P      x += o(attn(norm1 x));  x += mlp(norm2 x)
    boundary             shared = norm1 of layer P (x), on every row
    consumers i >= P     a = norm1 x
                         global   q(a)      on K, V of layer kv_source_of(i), projected from shared; causal
                         window   swa_q(a)  on swa_k, swa_v of a (or of shared); keys as in swa_visible
                         x += o([global, window]);  x += mlp(norm2 x)
    logits = lm_head(norm x)

Shapes: B sequences, T rows, S keys (S = T without a cache), H query heads and G KV heads of D elements. Rotary
positions are absolute everywhere. Sequences of a batch are padded on the right: causal rows never see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_yoco.models.checkpoint import check_state_dict, load_checkpoint
from vllm_yoco.models.config import YocoModelConfig

# The rotary types whose frequencies do not depend on the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

QUERY_BLOCK = 256


def swa_visible(query: Tensor, key: Tensor, window: int, s_keep: Tensor) -> Tensor:
    """Bool [B, T, S]: which keys of the sliding window a consumer row sees; this is the truncation rule.

    Args:
        query: [T] absolute positions.
        key: [S] absolute positions.
        window: W in keys, the query itself included.
        s_keep: [B, T] (broadcastable) lowest position that exists for the row; 0 for no truncation.
    """
    query = query[None, :]
    lowest = torch.maximum(query - window + 1, s_keep)
    lowest = torch.minimum(lowest.clamp(min=0), query + 1)  # query + 1: nothing is visible
    return (key >= lowest[..., None]) & (key <= query[..., None])


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention, scale D ** -0.5; a row that sees no key gives exactly zero.

    Args:
        q: [B, T, H, D].
        k, v: [B, S, G, D].
        visible: bool [B or 1, T, S].

    Returns:
        [B, T, H * D].
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    blocks = []
    # Only for speed: a block of rows is computed on the span of keys that any of its rows sees.
    for first in range(0, q.shape[2], QUERY_BLOCK):
        last = first + QUERY_BLOCK
        seen = visible[:, first:last].any(dim=(0, 1)).nonzero()
        low, high = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
        mask = visible[:, first:last, low:high]
        empty = ~mask.any(dim=-1, keepdim=True)
        # A softmax over nothing is NaN, forward or backward: let an empty row see everything, then discard it.
        out = F.scaled_dot_product_attention(
            q[:, :, first:last],
            k[:, :, low:high],
            v[:, :, low:high],
            attn_mask=(mask | empty)[:, None],
            enable_gqa=True,
        )
        blocks.append(out.transpose(1, 2).flatten(2).masked_fill(empty, 0.0))
    return torch.cat(blocks, dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, T, heads, D], halves paired (neox style); ``cos``, ``sin``: [T, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@dataclass
class KeyValueCache:
    """Keys and values of the rows seen so far: pass the same object to consecutive ``forward`` calls.

    Attributes:
        length: rows cached, hence the position of the next row.
        entries: (layer, ``global`` or ``swa``) -> K after rotation and V, each [B, length, G, D].
    """

    length: int = 0
    entries: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer: int, kind: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if (layer, kind) in self.entries:
            old_k, old_v = self.entries[layer, kind]
            k, v = torch.cat((old_k, k), dim=1), torch.cat((old_v, v), dim=1)
        self.entries[layer, kind] = k, v
        return k, v


@dataclass
class Trace:
    """What ``forward`` computed on the way, for error studies; filled when passed in.

    Attributes:
        hidden: layer -> residual stream after it, [B, T, hidden].
        shared: boundary-normalised hidden, [B, T, hidden]; None without consumers.
        swa_kv: consumer layer -> K after rotation and V of its sliding window, each [B, T, G, D].
    """

    hidden: dict[int, Tensor] = field(default_factory=dict)
    shared: Tensor | None = None
    swa_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Attention(nn.Module):
    """Projections of one layer; which of them exist depends on its role."""

    def __init__(self, config: YocoModelConfig, layer: int) -> None:
        super().__init__()
        topology = config.topology()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        swa = topology.has_swa(layer)
        self.q_proj = nn.Linear(hidden, q_size, bias=False)
        if layer < topology.boundary or layer in topology.kv_source_layers:
            self.k_proj = nn.Linear(hidden, kv_size, bias=False)
            self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        if swa:
            self.swa_q_proj = nn.Linear(hidden, q_size, bias=False)
            self.swa_k_proj = nn.Linear(hidden, kv_size, bias=False)
            self.swa_v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size * (2 if swa else 1), hidden, bias=False)

    def heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, heads, D]."""
        out: Tensor = projection(x)
        return out.reshape(*x.shape[:-1], -1, self.head_dim)


class Mlp(nn.Module):
    def __init__(self, config: YocoModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: YocoModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)


class Decoder(nn.Module):
    def __init__(self, config: YocoModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class DenseYoco(nn.Module):
    """The model as one dense forward. ``state_dict()`` has the names of a checkpoint.

    Args:
        state_dict: tensors under the names of ``checkpoint.parameter_shapes``; copied, as float32.

    Raises:
        ValueError: for a missing, unknown or misshapen tensor, or a rotary type outside ``ROPE_TYPES``.
    """

    inv_freq: Tensor

    def __init__(self, config: YocoModelConfig, state_dict: Mapping[str, Tensor]) -> None:
        super().__init__()
        check_state_dict(config, state_dict)
        inv_freq, self.rope_scale = rope_frequencies(config)
        self.config, self.topology = config, config.topology()
        with torch.device("meta"):
            self.model = Decoder(config)
            self.lm_head = (
                None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            )
        self.load_state_dict({k: v.to(torch.float32, copy=True) for k, v in state_dict.items()}, assign=True)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @classmethod
    def from_pretrained(cls, directory: str | PathLike[str]) -> DenseYoco:
        """Load ``config.json`` and the safetensors of a checkpoint directory. ValueError as in the class."""
        return cls(*load_checkpoint(directory))

    def forward(
        self,
        token_ids: Tensor,
        *,
        num_prompt_tokens: int | Tensor | None = None,
        keep_tokens: int | Tensor | None = None,
        s_keep: int | Tensor | None = None,
        cache: KeyValueCache | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Logits of every row.

        Args:
            token_ids: int [T] or [B, T].
            num_prompt_tokens: L, fixed for a request however many tokens follow; one number, or one per
                sequence [B]. Default: all tokens so far.
            keep_tokens: K, one number or one per sequence [B]; None computes without truncation.
            s_keep: instead of K, the lowest visible SWA position: a number, [B], or one per row [B, T] ([T]
                for unbatched ids).
            cache: the rows before these; extended in place.
            trace: filled with the layers' outputs, always batched.

        Returns:
            float32 [T, vocab] or [B, T, vocab].

        Raises:
            ValueError: if both ``keep_tokens`` and ``s_keep`` are given.
        """
        if token_ids.dim() == 1:
            if isinstance(s_keep, Tensor) and s_keep.dim() == 1:
                s_keep = s_keep[None]
            row = self.forward(
                token_ids[None],
                num_prompt_tokens=num_prompt_tokens,
                keep_tokens=keep_tokens,
                s_keep=s_keep,
                cache=cache,
                trace=trace,
            )
            return row[0]

        cache, trace = cache or KeyValueCache(), trace or Trace()
        topology = self.topology
        end = cache.length + token_ids.shape[1]
        key = torch.arange(end, device=token_ids.device)
        query = key[cache.length :]
        lowest = self._s_keep(query, end, num_prompt_tokens, keep_tokens, s_keep)
        angle = query[:, None] * self.inv_freq
        rope = angle.cos() * self.rope_scale, angle.sin() * self.rope_scale

        causal = (key <= query[:, None])[None]
        no_limit = torch.zeros_like(query)[None]
        if topology.window:
            window = swa_visible(query, key, topology.window, no_limit)
            truncated = swa_visible(query, key, topology.window, lowest)

        x = self.model.embed_tokens(token_ids)
        shared = x  # replaced at the boundary, before any consumer reads it
        for i, layer in enumerate(cast("list[Layer]", self.model.layers)):
            a = layer.input_layernorm(x)
            if i == topology.boundary:
                shared = trace.shared = a
            attn = layer.self_attn
            q = rotate(attn.heads(attn.q_proj, a), *rope)
            if i < topology.boundary or i in topology.kv_source_layers:
                source = a if i < topology.boundary else shared
                k = rotate(attn.heads(attn.k_proj, source), *rope)
                k, v = cache.extend(i, "global", k, attn.heads(attn.v_proj, source))
            else:
                k, v = cache.entries[topology.kv_source_of(i), "global"]
            sliding = i < topology.boundary and self.config.producer_window(i) is not None
            branches = [attend(q, k, v, window if sliding else causal)]
            if topology.has_swa(i):
                source = shared if topology.swa_share_hidden else a
                swa_q = rotate(attn.heads(attn.swa_q_proj, a), *rope)
                swa_k = rotate(attn.heads(attn.swa_k_proj, source), *rope)
                swa_v = attn.heads(attn.swa_v_proj, source)
                trace.swa_kv[i] = swa_k, swa_v
                branches.append(attend(swa_q, *cache.extend(i, "swa", swa_k, swa_v), truncated))
            x = x + attn.o_proj(torch.cat(branches, dim=-1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            trace.hidden[i] = x
        cache.length = end
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.model.norm(x), head.weight)

    def logprobs(self, token_ids: Tensor, **options: object) -> Tensor:
        """``log_softmax`` of ``forward``, same arguments: row i is the distribution of token i + 1.

        With the prompt's length as ``num_prompt_tokens``, one call over prompt and output scores a whole
        generation under truncation, because generated tokens do not move s_keep.
        """
        return F.log_softmax(self(token_ids, **options), dim=-1)

    @torch.inference_mode()
    def greedy(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        keep_tokens: int | None = None,
        *,
        eos_token_id: int | None = None,
    ) -> tuple[list[int], Tensor]:
        """Continue one prompt with the likeliest tokens; stops after ``eos_token_id`` if that is given.

        Returns:
            the new tokens, and the distribution each was taken from: [new tokens, vocab] log-probabilities.
        """
        cache, tokens, rows = KeyValueCache(), list[int](), list[Tensor]()
        step = torch.tensor(prompt, device=self.inv_freq.device)
        while len(tokens) < max_tokens and (not tokens or tokens[-1] != eos_token_id):
            options = {"num_prompt_tokens": len(prompt), "keep_tokens": keep_tokens, "cache": cache}
            rows.append(self.logprobs(step, **options)[-1])
            step = rows[-1].argmax()[None]
            tokens.append(int(step))
        return tokens, torch.stack(rows) if rows else torch.empty(0, self.config.vocab_size)

    @staticmethod
    def _s_keep(
        query: Tensor,
        end: int,
        num_prompt_tokens: int | Tensor | None,
        keep_tokens: int | Tensor | None,
        s_keep: int | Tensor | None,
    ) -> Tensor:
        """[1 or B, 1 or T] lowest visible SWA position of each row."""
        if keep_tokens is not None:
            if s_keep is not None:
                raise ValueError("give keep_tokens or s_keep, not both")
            length = torch.as_tensor(end if num_prompt_tokens is None else num_prompt_tokens)
            s_keep = (length - torch.as_tensor(keep_tokens)).clamp(min=0)
        lowest = torch.as_tensor(0 if s_keep is None else s_keep, device=query.device)
        return lowest.reshape(-1, 1) if lowest.dim() < 2 else lowest


def rope_frequencies(config: YocoModelConfig) -> tuple[Tensor, float]:
    """[D / 2] inverse frequencies in radians per token, and the factor on cosine and sine.

    Raises:
        ValueError: for a rotary type outside ``ROPE_TYPES`` or one that rotates a part of the head only.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_parameters: rope_type={kind!r} must be one of {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise ValueError("rope_parameters: partial_rotary_factor must be 1, every element of a head rotates")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return parameters["rope_theta"] ** -exponent, 1.0

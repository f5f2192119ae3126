"""The text model of DeepSeek-V4.1 as one dense float32 forward: what truncation means on the real topology.

No cache, no quantisation, no kernels, free dimensions; with random weights of a tiny config it is the oracle of the
tests and of ``vllm-yoco error``. Parameters have the names of the checkpoint. Not covered: the vision tower and draft
layers (ignored).

    streams       h copies of the hidden row, mixed by hyper-connections around every sub-layer; a sub-layer's input is
                  collapsed with the *previous* sub-layer's pre-mix, layer 0 takes copy 0
    attention     q = wq_b(norm(wq_a x)),  one latent per row is key and value of all heads
                  keys: the window (SWA) of the layer's own input, the top-k of the compressed KV of the layer's KV
                  source, and a sink that takes probability and gives nothing
    compressed    ratio 1: norm(wkv x);  ratio 2: two rows pooled with a softmax gate, then norm
    index         scores sum_h w_h relu(q_h . k);  k = norm(wk latent); the candidate source publishes blocks of keys,
                  later indexers choose among them only
    Engram        n-gram memory that some producers add to their streams first (``deepseek_v41_engram``)
    MoE           sqrt(softplus) scores, top-k by score + bias, weights by score; clamped SwiGLU; one shared expert

Truncation: consumer rows see no SWA key below ``s_keep`` (``plan.swa_visible``). ``mask`` computes every row,
``compact`` runs the consumers on rows >= ``s_keep`` only, with compressed KV and index keys of every row.

Shapes: T rows, H heads of D elements (the last R rotate), M compressed keys, S streams of E elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_yoco.deepseek_topology import DeepseekTopology, read_deepseek_topology
from vllm_yoco.models.deepseek_v41_engram import EngramLayout, inject, token_ids_to_compressed
from vllm_yoco.topology import LayerTopology

POST_MULTIPLIER = 2.0
"""vLLM's ``hc_post_alpha``."""


@dataclass(frozen=True)
class V41Config:
    """Sizes of the text model, from a Hugging Face config; names are the config's.

    Raises:
        ValueError: for a broken topology or broken Engram fields.
    """

    fields: Mapping[str, Any]
    layers: DeepseekTopology
    engram: EngramLayout | None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> V41Config:
        text = config.get("text_config") or config
        layers = read_deepseek_topology(text)
        return cls(text, layers, EngramLayout.read(text))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"the config has no {name}") from None

    def get(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def topology(self) -> LayerTopology:
        return self.layers.layer_topology()


def parameter_shapes(config: V41Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor."""
    c, hidden, head = config, config.hidden_size, config.head_dim
    heads, groups = c.num_attention_heads, c.o_groups
    mixes, width = (2 + c.hc_mult) * c.hc_mult, c.hc_mult * hidden
    shared = c.moe_intermediate_size * c.get("n_shared_experts", 0)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (c.vocab_size, hidden)}
    for n in range(c.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        for part in ("attn", "ffn"):
            layer |= {f"hc_{part}_fn": (mixes, width), f"hc_{part}_base": (mixes,), f"hc_{part}_scale": (3,)}
        layer |= {
            "attn.wq_a.weight": (c.q_lora_rank, hidden),
            "attn.q_norm.weight": (c.q_lora_rank,),
            "attn.wq_b.weight": (heads * head, c.q_lora_rank),
            "attn.wkv.weight": (head, hidden),
            "attn.kv_norm.weight": (head,),
            "attn.attn_sink": (heads,),
            "attn.wo_a.weight": (groups * c.o_lora_rank, heads * head // groups),
            "attn.wo_b.weight": (hidden, groups * c.o_lora_rank),
            "ffn.gate.weight": (c.n_routed_experts, hidden),
            "ffn.gate.bias": (c.n_routed_experts,),
        }
        topology = config.layers
        if topology.ratios[n] and topology.kv_source[n] == n:
            layer |= {"attn.compressor.wkv.weight": (head, hidden), "attn.compressor.norm.weight": (head,)}
            if topology.ratios[n] > 1:
                layer["attn.compressor.wgate.weight"] = (head, hidden)
            layer |= {
                "attn.indexer.wk.weight": (c.index_head_dim, head),
                "attn.indexer.k_norm.weight": (c.index_head_dim,),
            }
        if topology.ratios[n] and topology.index_source[n] == n:
            layer |= {
                "attn.indexer.wq_b.weight": (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
                "attn.indexer.weights_proj.weight": (c.index_n_heads, hidden),
            }
        if config.engram is not None:
            layer |= config.engram.parameter_shapes(n, hidden, c.hc_mult)
        experts = [(f"ffn.experts.{e}", c.moe_intermediate_size) for e in range(c.n_routed_experts)]
        for name, size in [*experts, *([("ffn.shared_experts", shared)] if shared else [])]:
            layer |= {f"{name}.w1.weight": (size, hidden), f"{name}.w3.weight": (size, hidden)}
            layer[f"{name}.w2.weight"] = (hidden, size)
        shapes |= {f"layers.{n}.{name}": shape for name, shape in layer.items()}
    return shapes | {"norm.weight": (hidden,), "head.weight": (c.vocab_size, hidden)}


def parameter_count(config: V41Config) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def random_state_dict(config: V41Config, seed: int = 0) -> dict[str, Tensor]:
    """Weights under which rows differ and every part contributes; not those of any trained model."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in parameter_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "engram.q_weight", "engram.k_weight")):
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith(("_base", "gate.bias", "attn_sink")):
            weights[name] = 0.3 * noise
        elif name.endswith("_scale"):
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith("embed.weight"):
            weights[name] = noise
        else:
            weights[name] = noise * 1.5 / math.sqrt(shape[-1])
    return weights


# --- Pieces, each checked against vLLM's own ------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary_frequencies(config: V41Config, ratio: int) -> Tensor:
    """[R / 2] inverse frequencies, in radians per position: plain for SWA-only layers, else the compressed layers'.

    YaRN applies to compressed layers where the config has it, without a factor on cosine and sine.
    """
    size = config.qk_rope_head_dim
    scaling = config.get("rope_scaling", None) or config.get("rope_parameters", None) or {}
    scaling = scaling.get("compress", scaling) if ratio else {}
    theta = config.compress_rope_theta if ratio else config.rope_theta
    exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequency = theta**-exponent
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return frequency
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        """Index of the pair that turns this often within the trained length."""
        return size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair(scaling.get("beta_slow", 1))), size - 1)
    ramp = ((torch.arange(size // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency / factor * ramp + frequency * (1 - ramp)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the last 2A elements of [T, ..., D] in adjacent pairs by ``angle`` [T, A]."""
    size = 2 * angle.shape[-1]
    plain, turned = x[..., :-size], x[..., -size:].unflatten(-1, (-1, 2))
    angle = angle.view(len(angle), *[1] * (x.dim() - 2), -1)
    cos, sin = angle.cos(), angle.sin()
    even, odd = turned.unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((plain, pairs.flatten(-2)), dim=-1)


def hyper_mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of one sub-layer from its streams [T, S, E].

    Returns:
        pre [T, S], which collapses the *next* sub-layer's input, post [T, S] and residual mix [T, S, S], doubly
        stochastic up to ``eps`` after ``iterations`` Sinkhorn steps.
    """
    count = streams.shape[1]
    flat = streams.flatten(1)
    mixes = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    pre = torch.sigmoid(mixes[:, :count] * scale[0] + base[:count]) + eps
    post = POST_MULTIPLIER * torch.sigmoid(mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    mix = (mixes[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count)).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return pre, post, mix


def collapse(streams: Tensor, pre: Tensor | None) -> Tensor:
    """[T, E] input of a sub-layer; without a pre-mix copy 0."""
    return streams[:, 0] if pre is None else (pre[..., None] * streams).sum(1)


def expand(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Streams after a sub-layer whose output is ``out`` [T, E]."""
    return torch.einsum("tij,tie->tje", mix, streams) + post[..., None] * out[:, None]


def compress(kv: Tensor, gate: Tensor | None, weight: Tensor, eps: float, ratio: int) -> Tensor:
    """[T // ratio, D] normalised latents of [T, D] rows; ratio > 1 pools with a softmax over the group's gate."""
    if gate is not None:
        groups = len(kv) // ratio
        kv = kv[: groups * ratio].unflatten(0, (groups, ratio))
        kv = (kv * gate[: groups * ratio].unflatten(0, (groups, ratio)).softmax(1)).sum(1)
    return rms_norm(kv, weight, eps)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[T, M] scores of queries [T, I, A] with head weights [T, I] over keys [M, A]."""
    heads, size = q.shape[1:]
    scores = torch.einsum("tia,ma->tim", q, keys).relu()
    return torch.einsum("tim,ti->tm", scores, weights) * size**-0.5 * heads**-0.5


def candidate_mask(scores: Tensor, num_keys: Tensor, blocks: int, block_size: int) -> Tensor:
    """Bool [T, M]: keys in a row's best ``blocks`` blocks by their largest score; the newest block is always in.

    Args:
        num_keys: [T] keys that exist for each row.
    """
    width = scores.shape[1]
    count = -(-width // block_size)
    padded = F.pad(scores, (0, count * block_size - width), value=-math.inf)
    hidden = torch.arange(count * block_size) >= num_keys[:, None]
    best = padded.masked_fill(hidden, -math.inf).unflatten(1, (count, block_size)).amax(-1)
    newest = (num_keys - 1).div(block_size, rounding_mode="floor")
    best = best.masked_fill((torch.arange(count) == newest[:, None]) & (num_keys > 0)[:, None], math.inf)
    chosen = _best(best, blocks)
    return chosen.repeat_interleave(block_size, 1)[:, :width] & ~hidden[:, :width]


def select(scores: Tensor, allowed: Tensor, top_k: int) -> Tensor:
    """Bool [T, M]: the ``top_k`` best allowed keys of each row."""
    return _best(scores.masked_fill(~allowed, -math.inf), top_k)


def _best(scores: Tensor, count: int) -> Tensor:
    """Bool: the ``count`` largest of each row above -inf; of equal ones (0 after ReLU is common) the first.

    Which of equals are taken is nobody's rule, but here it must not depend on how many keys follow.
    """
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    chosen = values[:, :count] > -math.inf
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order[:, :count], chosen)


def attend(q: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """Attention of [T, H, D] over latents [M, D] that are keys and values; rows that see none give zero.

    Args:
        visible: bool [T, M]. sink: [H] logits of the share that goes nowhere.
    """
    scores = torch.einsum("thd,md->thm", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    sinks = sink[None, :, None].expand(len(q), -1, 1)
    shares = torch.cat((scores, sinks), dim=-1).softmax(-1).nan_to_num(0.0)
    return torch.einsum("thm,md->thd", shares[..., :-1], keys)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float | None) -> Tensor:
    gate, up = x @ w1.T, x @ w3.T
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up @ w2.T


def route(logits: Tensor, bias: Tensor, top_k: int, *, normalise: bool, factor: float) -> tuple[Tensor, Tensor]:
    """[T, k] expert weights and ids: chosen by score + bias, weighted by score."""
    scores = F.softplus(logits).sqrt()
    ids = (scores + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * factor, ids


# --- The model ------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What ``forward`` computed on the way, each with a leading batch dimension of 1 (as ``reference.Trace``).

    Attributes:
        hidden: consumer layer -> its streams, [1, T, S * E]; zeros for rows that were not computed.
        swa_kv: consumer layer -> one-tuple of its window latents after rotation, [1, T, D]; likewise.
    """

    hidden: dict[int, Tensor] = field(default_factory=dict)
    swa_kv: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass
class _Shared:
    """What source layers publish to the layers above them; one slot each, as in the engine."""

    latents: Tensor | None = None
    index_keys: Tensor | None = None
    selected: Tensor | None = None
    candidates: Tensor | None = None


class DenseV41:
    """The model. ``weights`` have the names and shapes of ``parameter_shapes``; ValueError if they have not.

    Args:
        token_map: [vocab] Engram's compressed id of each token; see ``token_ids_to_compressed`` without it.
    """

    def __init__(
        self, config: V41Config, weights: Mapping[str, Tensor], token_map: Sequence[int] | None = None
    ) -> None:
        shapes = parameter_shapes(config)
        wrong = sorted(name for name in shapes.keys() | weights if _shape(weights, name) != shapes.get(name))
        if wrong:
            raise ValueError(f"weights that are missing, unknown or misshapen: {', '.join(wrong[:5])}")
        self.config, self.topology, self._token_map = config, config.topology(), token_map
        self.weights = {name: tensor.float() for name, tensor in weights.items()}
        self.inv_freq = rotary_frequencies(config, 0)
        self._inv_freq = [rotary_frequencies(config, ratio) for ratio in (0, 1, 2)]

    @classmethod
    def random(cls, config: V41Config, seed: int = 0) -> DenseV41:
        return cls(config, random_state_dict(config, seed))

    def __call__(
        self,
        token_ids: Tensor,
        *,
        num_prompt_tokens: int | None = None,
        keep_tokens: int | None = None,
        compact: bool = False,
        boundary_swa: str = "clipped",
        trace: Trace | None = None,
    ) -> Tensor:
        """float32 [T, vocab] logits of one sequence; under ``compact`` those of dropped rows are NaN.

        Args:
            token_ids: [T].
            num_prompt_tokens: L; rows at or past it are generated tokens. Default: T.
            keep_tokens: K, None for ``off``.
            compact: do not run the consumers on rows below ``s_keep``, instead of hiding keys only.
            boundary_swa: ``open`` shows the boundary layer its whole window.
        """
        config, weights, topology = self.config, self.weights, self.topology
        length = len(token_ids)
        s_keep = max(0, (num_prompt_tokens or length) - keep_tokens) if keep_tokens is not None else 0
        embedded = weights["embed.weight"][token_ids]
        streams = embedded[:, None].expand(-1, config.hc_mult, -1)
        rows, pre, shared = torch.arange(length), None, _Shared()
        trace = trace or Trace()
        hashes = self._engram_hashes(token_ids)
        for n in range(topology.num_layers):
            if n in hashes:
                streams = self._inject(n, streams, hashes[n][rows])
            lowest = s_keep if topology.is_consumer(n) else 0
            if n == topology.boundary and boundary_swa == "open":
                lowest = 0
            keep = rows
            if n == topology.boundary and compact:
                keep = torch.arange(s_keep, length)
            streams, pre = self._layer(n, streams, pre, rows, keep, lowest, shared, trace)
            rows = keep
        out = rms_norm(collapse(streams, pre), weights["norm.weight"], config.rms_norm_eps)
        logits = torch.full((length, config.vocab_size), math.nan)
        logits[rows] = out @ weights["head.weight"].T
        return logits

    def logprobs(self, token_ids: Tensor, **options: Any) -> Tensor:
        """``log_softmax`` of the logits, same arguments: row i is the distribution of token i + 1."""
        return F.log_softmax(self(token_ids, **options), dim=-1)

    def greedy(
        self, prompt: Sequence[int], max_tokens: int, keep_tokens: int | None = None
    ) -> tuple[list[int], Tensor]:
        """The likeliest continuation and the [new tokens, vocab] log-probabilities it was taken from."""
        tokens, found = list(prompt), list[Tensor]()
        for _ in range(max_tokens):
            options = {"num_prompt_tokens": len(prompt), "keep_tokens": keep_tokens}
            found.append(self.logprobs(torch.tensor(tokens), **options)[-1])
            tokens.append(int(found[-1].argmax()))
        return tokens[len(prompt) :], torch.stack(found) if found else torch.empty(0, self.config.vocab_size)

    def _engram_hashes(self, token_ids: Tensor) -> dict[int, Tensor]:
        """Layer -> [T, C] rows of its table; every layer hashes the whole sequence."""
        layout = self.config.engram
        if layout is None:
            return {}
        size = layout.compressed_vocab_size
        ids, pad = (
            token_ids_to_compressed(tokens, self._token_map, size)
            for tokens in (token_ids, torch.tensor([layout.pad_token_id]))
        )
        return dict(zip(layout.layer_ids, torch.from_numpy(layout.hashes(ids, int(pad[0]))), strict=True))

    def _inject(self, n: int, streams: Tensor, table_rows: Tensor) -> Tensor:
        prefix = f"layers.{n}."
        w = {name.removeprefix(prefix): t for name, t in self.weights.items() if name.startswith(f"{prefix}engram.")}
        return inject(streams, w["engram.embed.weight"][table_rows], w, self.config.rms_norm_eps)

    def _layer(
        self,
        n: int,
        streams: Tensor,
        pre: Tensor | None,
        rows: Tensor,
        keep: Tensor,
        lowest: int,
        shared: _Shared,
        trace: Trace,
    ) -> tuple[Tensor, Tensor]:
        """Layer ``n`` on positions ``rows``, of which it computes ``keep`` after publishing the KV of all."""
        config = self.config
        prefix = f"layers.{n}."
        w = {name.removeprefix(prefix): t for name, t in self.weights.items() if name.startswith(prefix)}
        mix = {"rms_eps": config.rms_norm_eps, "eps": config.hc_eps, "iterations": config.hc_sinkhorn_iters}

        attn_in = rms_norm(collapse(streams, pre), w["attn_norm.weight"], config.rms_norm_eps)
        self._publish(n, w, attn_in, rows, shared)
        latents = rms_norm(attn_in @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"], config.rms_norm_eps)
        window = rotate(latents, self._angle(n, rows))
        if len(keep) < len(rows):
            kept = slice(len(rows) - len(keep), None)
            streams, attn_in = streams[kept], attn_in[kept]
        attn_pre, post, residual = hyper_mix(streams, w["hc_attn_fn"], w["hc_attn_scale"], w["hc_attn_base"], **mix)
        out = self._attention(n, w, attn_in, keep, window, rows, lowest, shared)
        streams = expand(streams, out, post, residual)
        ffn_pre, post, residual = hyper_mix(streams, w["hc_ffn_fn"], w["hc_ffn_scale"], w["hc_ffn_base"], **mix)
        ffn_in = rms_norm(collapse(streams, attn_pre), w["ffn_norm.weight"], config.rms_norm_eps)
        streams = expand(streams, self._moe(w, ffn_in), post, residual)
        if self.topology.is_consumer(n):
            total = int(rows[-1]) + 1
            trace.swa_kv[n] = (_full(window, rows, total),)
            trace.hidden[n] = _full(streams.flatten(1), keep, total)
        return streams, ffn_pre

    def _angle(self, n: int, positions: Tensor) -> Tensor:
        return positions[:, None] * self._inv_freq[self.config.layers.ratios[n]]

    def _publish(self, n: int, w: Mapping[str, Tensor], x: Tensor, rows: Tensor, shared: _Shared) -> None:
        """Compressed KV and index keys, if this layer owns them: from every row, in every mode."""
        layers, eps = self.config.layers, self.config.rms_norm_eps
        ratio = layers.ratios[n]
        if not ratio or layers.kv_source[n] != n:
            return
        gate = x @ w["attn.compressor.wgate.weight"].T if ratio > 1 else None
        latents = compress(x @ w["attn.compressor.wkv.weight"].T, gate, w["attn.compressor.norm.weight"], eps, ratio)
        # A latent stands at the first row of its group.
        angle = self._angle(n, torch.arange(len(latents)) * ratio)
        keys = rms_norm(latents @ w["attn.indexer.wk.weight"].T, w["attn.indexer.k_norm.weight"], eps)
        shared.latents, shared.index_keys = rotate(latents, angle), rotate(keys, angle)

    def _attention(
        self,
        n: int,
        w: Mapping[str, Tensor],
        x: Tensor,
        positions: Tensor,
        window: Tensor,
        window_rows: Tensor,
        lowest: int,
        shared: _Shared,
    ) -> Tensor:
        config, layers = self.config, self.config.layers
        angle = self._angle(n, positions)
        low_rank = rms_norm(x @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"], config.rms_norm_eps)
        q = (low_rank @ w["attn.wq_b.weight"].T).unflatten(1, (config.num_attention_heads, config.head_dim))
        query, key = positions[:, None], window_rows[None]
        # plan.swa_visible: the window, nothing below the bound.
        visible = (key <= query) & (key >= query - config.sliding_window + 1) & (key >= lowest)
        keys = window
        if layers.ratios[n]:
            self._index(n, w, x, low_rank, positions, angle, shared)
            assert shared.latents is not None and shared.selected is not None
            # A layer above the source runs on the source's rows or on the last of them.
            visible = torch.cat((visible, shared.selected[-len(positions) :]), dim=1)
            keys = torch.cat((keys, shared.latents))
        out = attend(rotate(q, angle), keys, visible, w["attn.attn_sink"])
        out = rotate(out, -angle).flatten(1).unflatten(1, (config.o_groups, -1))
        grouped = torch.einsum("tgx,gox->tgo", out, w["attn.wo_a.weight"].unflatten(0, (config.o_groups, -1)))
        return grouped.flatten(1) @ w["attn.wo_b.weight"].T

    def _index(
        self,
        n: int,
        w: Mapping[str, Tensor],
        x: Tensor,
        low_rank: Tensor,
        positions: Tensor,
        angle: Tensor,
        shared: _Shared,
    ) -> None:
        """Top-k of an index source, and the candidate blocks of the candidate source."""
        config, layers = self.config, self.config.layers
        if layers.index_source[n] != n:
            return
        assert shared.index_keys is not None
        q = (low_rank @ w["attn.indexer.wq_b.weight"].T).unflatten(1, (config.index_n_heads, config.index_head_dim))
        scores = index_scores(rotate(q, angle), x @ w["attn.indexer.weights_proj.weight"].T, shared.index_keys)
        num_keys = (positions + 1).div(layers.ratios[n], rounding_mode="floor")
        allowed = torch.arange(scores.shape[1]) < num_keys[:, None]
        source = layers.candidate_source[n]
        if source == n:
            size = layers.candidates
            assert size is not None
            shared.candidates = candidate_mask(scores, num_keys, size.blocks, size.block_size)
        elif source is not None:
            assert shared.candidates is not None
            allowed = allowed & shared.candidates[-len(positions) :]
        shared.selected = select(scores, allowed, layers.top_k[n])

    def _moe(self, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        config = self.config
        limit = config.get("swiglu_limit", None)
        weights, ids = route(
            x @ w["ffn.gate.weight"].T,
            w["ffn.gate.bias"],
            config.num_experts_per_tok,
            normalise=config.get("norm_topk_prob", True),
            factor=config.get("routed_scaling_factor", 1.0),
        )

        def expert(name: str, rows: Tensor) -> Tensor:
            return swiglu(rows, *(w[f"ffn.{name}.w{i}.weight"] for i in (1, 2, 3)), limit)

        out = expert("shared_experts", x) if config.get("n_shared_experts", 0) else torch.zeros_like(x)
        for e in range(config.n_routed_experts):
            row, slot = (ids == e).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, weights[row, slot, None] * expert(f"experts.{e}", x[row]))
        return out


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


def _full(values: Tensor, rows: Tensor, total: int) -> Tensor:
    """[1, total, ...] with zeros for the rows that are not there."""
    out = values.new_zeros(total, *values.shape[1:])
    out[rows] = values
    return out[None]

"""The float32 DeepSeek-V4.1 piece by piece against vLLM's kernels and references, and transformers' DeepSeek-V4.

vLLM's kernels fix the sizes (latent 512, rotary 64, index 128) and round to bf16 or fp8, hence the tolerances.
Each job runs in the process with Triton's interpreter and returns (name, ours, theirs, tolerance) rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.deepseek_v41_step import prepare_process
from tests.engine.harness import RunnerProcess

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="V4.1's kernels need Triton's interpreter"
)

Rows = list[tuple[str, np.ndarray, np.ndarray, float]]
EPS = 1e-6
BF16 = 2**-7
"""Relative rounding step, with room for two roundings."""


@pytest.fixture(scope="module")
def process(runner_processes: Callable[[str], RunnerProcess]) -> RunnerProcess:
    return runner_processes("v2")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng(seed))


def row(name: str, ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> tuple[str, np.ndarray, np.ndarray, float]:
    return name, ours.float().numpy(), theirs.float().numpy(), tolerance


# --- vLLM ---------------------------------------------------------------------------------------------------------


def hyper_connections(engines: Any) -> Rows:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_delayed_torch

    from vllm_yoco.models import deepseek_v41_reference as ours

    streams, out, carried = normal(7, 4, 16), normal(7, 16, seed=1), normal(7, 4, seed=2).sigmoid()
    fn, scale, base = normal(24, 64, seed=3), normal(3, seed=4), normal(24, seed=5)
    post, mix, collapsed, pre = mhc_pre_delayed_torch(
        streams, fn, scale, base, EPS, 1e-5, 1e-5, ours.POST_MULTIPLIER, 20, pre_mix=carried
    )
    first = mhc_pre_delayed_torch(streams, fn, scale, base, EPS, 1e-5, 1e-5, ours.POST_MULTIPLIER, 20)[2]
    mine = ours.hyper_mix(streams, fn, scale, base, rms_eps=EPS, eps=1e-5, iterations=20)
    return [
        row("pre", mine[0], pre),
        row("post", mine[1], post[..., 0]),
        row("residual mix", mine[2], mix),
        row("collapse", ours.collapse(streams, carried), collapsed),
        row("first layer", ours.collapse(streams, None), first),
        row("expand", ours.expand(streams, out, mine[1], mine[2]), mhc_post_torch(out, streams, post, mix)),
    ]


def compressor(engines: Any) -> Rows:
    """Both ratios; ratio 2 in two chunks, so that a group closes over the state ring."""
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import fused_save_compress_norm

    from vllm_yoco.models import deepseek_v41_reference as ours

    prepare_process()
    rows, weight = 9, 1 + 0.1 * normal(512, seed=1)
    found: Rows = []
    for ratio in (1, 2):
        raw = normal(rows, 512 * ratio)
        latent = torch.zeros(rows, 512, dtype=torch.bfloat16)
        ring = torch.zeros(2, 8, 1024) if ratio == 2 else None
        for first, last in ((0, 5), (5, rows)):
            positions = torch.arange(first, last)
            fused_save_compress_norm(
                raw[first:last],
                positions,
                ring,
                positions % 8 + (8 if ratio == 2 else 0),
                torch.tensor([0, last - first], dtype=torch.int32),
                torch.zeros(last - first, dtype=torch.int32),
                weight.bfloat16(),
                EPS,
                ratio,
                latent[first:last],
            )
        gate = raw[:, 512:] if ratio == 2 else None
        expected = ours.compress(raw[:, :512], gate, weight.bfloat16().float(), EPS, ratio)
        found.append(row(f"ratio {ratio}", expected, latent[ratio - 1 :: ratio], BF16))
    return found


def rotary(engines: Any) -> Rows:
    """Frequencies of both layer kinds from vLLM's own rotary class; rotation and group position from its insert."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import rope_quant_insert
    from vllm.models.deepseek_v41.common.rope import build_deepseek_v4_rope

    from vllm_yoco.models import deepseek_v41_reference as ours

    prepare_process()
    yarn = {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    found: Rows = []
    for name, scaling in (("plain", {"rope_type": "default"}), ("yarn", yarn)):
        fields = {"qk_rope_head_dim": 64, "rope_theta": 1e4, "compress_rope_theta": 4e4, "rope_parameters": scaling}
        config = SimpleNamespace(**fields, get=lambda key, default, fields=fields: fields.get(key, default))
        hf = SimpleNamespace(**(fields | {"rope_parameters": dict(scaling)}))
        for ratio in (0, 2):
            with set_current_vllm_config(VllmConfig()):
                theirs = build_deepseek_v4_rope(
                    hf, head_dim=512, rope_head_dim=64, max_position_embeddings=256, compress_ratio=ratio
                )
            frequency = ours.rotary_frequencies(config, ratio)  # type: ignore[arg-type]
            angle = torch.arange(64)[:, None] * frequency
            cache = theirs.cos_sin_cache[:64].float()
            found.append(row(f"{name}, ratio {ratio}", torch.cat((angle.cos(), angle.sin()), -1), cache, 1e-4))
            if ratio:
                latent = normal(40, 512).bfloat16()
                paged = torch.zeros(2, 32, 512, dtype=torch.bfloat16)
                positions = torch.arange(40)
                slots = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
                rope_quant_insert(latent, positions, theirs.cos_sin_cache.float(), paged, slots, ratio)
                rotated = ours.rotate(latent[ratio - 1 :: ratio].float(), angle[: 40 // ratio * ratio : ratio])
                found.append(row(f"{name}, inserted", rotated, paged.flatten(0, 1)[: 40 // ratio], BF16))
    return found


def index_keys(engines: Any) -> Rows:
    from vllm.models.deepseek_v41.common.ops.indexer_k_store import indexer_k_norm_rope_store

    from vllm_yoco.models import deepseek_v41_reference as ours

    prepare_process()
    keys, weight, positions = normal(12, 128).bfloat16(), 1 + 0.1 * normal(128, seed=1), torch.arange(12)
    frequency = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    angle = positions[:, None] * frequency
    table = torch.cat((angle.cos(), angle.sin()), -1)
    found: Rows = []
    for ratio in (1, 2):
        cache = torch.zeros(1, 16, 132, dtype=torch.uint8)
        slots = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
        indexer_k_norm_rope_store(keys, positions, table, weight.bfloat16(), EPS, cache, slots, ratio, False)
        page, count = cache[0].flatten(), 12 // ratio
        values = page[: 16 * 128].view(torch.float8_e4m3fn).view(16, 128)[:count].float()
        scales = page[16 * 128 :].view(torch.float32)[:count]
        mine = ours.rms_norm(keys[ratio - 1 :: ratio].float(), weight.bfloat16().float(), EPS)
        # By direction: the interpreter's conversion to fp8 loses the carry of a rounding now and then.
        like = torch.cosine_similarity(ours.rotate(mine, angle[::ratio]), values * scales[:, None])
        unlike = torch.cosine_similarity(mine, values * scales[:, None])[1:]
        found.append(row(f"ratio {ratio}", torch.ones(count), like, 0.01))
        found.append(row(f"ratio {ratio}, not rotated", torch.ones(()), unlike.min() < 0.95, 0.0))
    return found


def norms(engines: Any) -> Rows:
    from vllm.models.common.ops import fused_q_kv_rmsnorm

    from vllm_yoco.models import deepseek_v41_reference as ours

    prepare_process()
    q, kv = normal(5, 128).bfloat16(), normal(5, 512, seed=1).bfloat16()
    q_weight, kv_weight = (1 + 0.1 * normal(128, seed=2)).bfloat16(), (1 + 0.1 * normal(512, seed=3)).bfloat16()
    theirs = fused_q_kv_rmsnorm(q, kv, q_weight, kv_weight, EPS)
    return [
        row("q", ours.rms_norm(q.float(), q_weight.float(), EPS), theirs[0], BF16),
        row("kv", ours.rms_norm(kv.float(), kv_weight.float(), EPS), theirs[1], BF16),
    ]


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, which some wrappers insist on before they launch a kernel."""

    is_cuda = True  # type: ignore[assignment]


def candidates(engines: Any) -> Rows:
    """The two halves of the candidate filter."""
    from vllm.model_executor.kernels.attention.dsa import candidate_blocks as theirs

    from vllm_yoco.models import deepseek_v41_reference as ours

    prepare_process()
    rows, width, blocks, size = 6, 50, 3, 8
    scores, ends = normal(rows, width), torch.tensor([0, 1, 8, 9, 33, 50], dtype=torch.int32)
    chosen = torch.empty(rows, blocks, dtype=torch.int32)
    theirs.select_candidate_blocks(scores.as_subclass(OnGpu), None, ends, blocks, size, chosen)
    masked = scores.clone()
    theirs.apply_candidate_mask(masked.as_subclass(OnGpu), None, ends, chosen, size)
    allowed = ours.candidate_mask(scores, ends.long(), blocks, size)
    return [row("allowed keys", allowed, masked > -torch.inf, 0.0)]


def index_scores(engines: Any) -> Rows:
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import fp8_mqa_logits_torch

    from vllm_yoco.models import deepseek_v41_reference as ours

    q, keys, weights = normal(6, 4, 128), normal(20, 128, seed=1), normal(6, 4, seed=2)
    q8, k8 = q.to(torch.float8_e4m3fn), keys.to(torch.float8_e4m3fn)
    ends = torch.tensor([1, 5, 9, 13, 17, 20], dtype=torch.int32)
    theirs = fp8_mqa_logits_torch(
        q8, (k8, torch.ones(20)), weights * 128**-0.5 * 4**-0.5, torch.zeros(6, dtype=torch.int32), ends
    )
    mine = ours.index_scores(q8.float(), weights, k8.float())
    seen = torch.arange(20) < ends[:, None]
    return [row("scores", mine.masked_fill(~seen, 0), theirs.masked_fill(~seen, 0), BF16)]


def activation(engines: Any) -> Rows:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    from vllm_yoco.models import deepseek_v41_reference as ours

    x, w1, w2, w3 = (normal(*shape, seed=i) for i, shape in enumerate([(5, 8), (6, 8), (8, 6), (6, 8)]))
    with set_current_vllm_config(VllmConfig()):
        act = SiluAndMulWithClamp(1.5)
    theirs = act.forward_native(torch.cat((x @ w1.T, x @ w3.T), -1)) @ w2.T
    return [row("swiglu", ours.swiglu(x, w1, w2, w3, 1.5), theirs)]


def engram(engines: Any) -> Rows:
    """Layout and multipliers, n-gram hashes of two sequences in chunks, and the gate, from vLLM's kernels."""
    from vllm.models.deepseek_v41.common import engram as theirs

    from vllm_yoco.models import deepseek_v41_engram as ours

    prepare_process()
    fields = {
        "engram_layer_ids": [1, 3], "engram_num_embeddings": [600, 900], "engram_max_ngram_size": 4,
        "engram_n_heads": 2, "engram_head_dim": 8, "engram_vocab_size": 70, "engram_compressed_vocab_size": 150,
        "engram_pad_token_id": 7,
    }  # fmt: skip
    mine = ours.EngramLayout.read(fields)
    assert mine is not None
    layout = theirs.EngramLayout(SimpleNamespace(**fields))
    multipliers = theirs.compute_hash_multipliers((1, 3), 4, 150)
    primes, offsets = torch.tensor(layout.primes), layout.offsets
    found = [
        row("primes", torch.from_numpy(mine.moduli()), primes.flatten(1), 0.0),
        row("multipliers", torch.from_numpy(mine.multipliers() % 2**20), multipliers % 2**20, 0.0),
    ]

    token_map = torch.randint(0, 150, (256,), generator=rng(), dtype=torch.int32)
    tokens = [torch.randint(0, 256, (n,), generator=rng(n)) for n in (40, 9)]
    state = SimpleNamespace(
        use_slot_cache=False, multipliers=multipliers, primes=primes, offsets=offsets, token_map=token_map,
        pad_id=int(token_map[7]), block_size=32,
    )  # fmt: skip
    # One step with rows 35.. of the first sequence and the whole of the second.
    begin, first = 35, tokens[0]
    ids = torch.cat((first[begin:], tokens[1]))
    positions = torch.cat((torch.arange(begin, 40), torch.arange(9)))
    lookback = torch.stack((first[begin - 3 : begin].flip(0), torch.full((3,), -1)))
    hashed = theirs.NgramHashState.forward(
        state, ids, positions, torch.tensor([0, 5, 14]), torch.zeros(14, dtype=torch.bool),
        lookback, torch.zeros(2, 3, dtype=torch.bool), None, None,
    )  # fmt: skip
    map_, pad = token_map.numpy(), int(token_map[7])
    expected = [mine.hashes(map_[t.numpy()], pad) for t in tokens]
    joined = np.concatenate((expected[0][:, begin:], expected[1]), axis=1)
    found.append(row("hashes", torch.from_numpy(joined), hashed.transpose(0, 1), 0.0))

    streams, rows, weights = normal(7, 3, 16), normal(7, 12, 8, seed=1), 1 + 0.1 * normal(2, 3, 16, seed=2)
    wkv = normal(4 * 16, 96, seed=3) / 10
    layer = SimpleNamespace(
        _batch=None, wkv=lambda x: x @ wkv.T, embed=lambda _: rows, use_sequence_parallel=False, hc_mult=3, dim=16,
        q_weight=weights[0], k_weight=weights[1], eps=EPS, clamp_value=ours.MINIMUM_DOT,
    )  # fmt: skip
    out = theirs.Engram.forward(layer, streams, torch.zeros(7, 12))
    w = {"engram.wkv.weight": wkv, "engram.q_weight": weights[0], "engram.k_weight": weights[1]}
    found.append(row("gate", ours.inject(streams, rows, w, EPS), out))
    return found


# --- transformers ---------------------------------------------------------------------------------------------------


def transformers_v4(engines: Any) -> Rows:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    from vllm_yoco.models import deepseek_v41_reference as ours

    found: Rows = []
    q, keys, sink = normal(6, 4, 16), normal(10, 16, seed=1), normal(4, seed=2)
    visible = torch.arange(10) <= torch.arange(6)[:, None] + 3
    module = SimpleNamespace(sinks=sink, num_key_value_groups=4, training=False)
    out, _ = theirs.eager_attention_forward(
        module, q.transpose(0, 1)[None], keys[None, None], keys[None, None],
        torch.zeros(6, 10).masked_fill(~visible, -torch.inf)[None, None], 16**-0.5,
    )  # fmt: skip
    found.append(row("attention with sinks", ours.attend(q, keys, visible, sink), out[0]))

    angle = torch.arange(6)[:, None] * torch.tensor([1.0, 0.1])
    turned = theirs.apply_rotary_pos_emb(q.transpose(0, 1)[None], angle.cos()[None], angle.sin()[None])
    found.append(row("rotary", ours.rotate(q, angle), turned[0].transpose(0, 1)))

    grouped = theirs.DeepseekV4GroupedLinear(32, 10, 2)
    mine = torch.einsum("tgx,gox->tgo", q.flatten(1).unflatten(1, (2, -1)), grouped.weight.unflatten(0, (2, -1)))
    found.append(row("grouped projection", mine.detach(), grouped(q.flatten(1).unflatten(1, (2, -1))).detach()))

    config = DeepseekV4Config(
        hidden_size=8, num_experts_per_tok=2, n_routed_experts=5, moe_intermediate_size=6, swiglu_limit=1.5,
        routed_scaling_factor=1.5, scoring_func="sqrtsoftplus", index_head_dim=16, index_n_heads=4,
    )  # fmt: skip
    x = normal(6, 8, seed=3)
    router = theirs.DeepseekV4TopKRouter(config)
    router.weight.data = normal(5, 8, seed=4)
    router.e_score_correction_bias.copy_(normal(5, seed=5))
    _, weights, ids = router(x)
    my_weights, my_ids = ours.route(x @ router.weight.T, router.e_score_correction_bias, 2, normalise=True, factor=1.5)
    dense = [torch.zeros(6, 5).scatter(1, i, w.detach()) for w, i in ((my_weights, my_ids), (weights, ids))]
    found.append(row("router", *dense))

    scorer = theirs.DeepseekV4IndexerScorer(config)
    theirs_scores = scorer(q[None], keys[None], x[None])[0].detach()
    mine = ours.index_scores(q, x @ scorer.weights_proj.weight.detach().T, keys)
    found.append(row("index scores", mine, theirs_scores))
    return found


JOBS = [
    hyper_connections, compressor, rotary, index_keys, norms, candidates, index_scores, activation, engram,
    transformers_v4,
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=[job.__name__ for job in JOBS])
def test_piece(process: RunnerProcess, job: Callable[[Any], Rows]) -> None:
    found = process.call(job)
    assert found
    for name, ours, theirs, tolerance in found:
        assert ours.shape == theirs.shape and np.abs(theirs).max() > 0, name
        scale = np.abs(theirs).max() if tolerance else 1
        assert np.abs(ours - theirs).max() <= tolerance * scale, name

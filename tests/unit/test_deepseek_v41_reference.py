"""The dense float32 DeepSeek-V4.1: truncation on the real kind of topology, and its pieces against other code.

Pieces that vLLM has are compared with vLLM in tests/engine/test_deepseek_v41_reference.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_yoco.config import YocoConfig, resolve_truncation
from vllm_yoco.models import deepseek_v41_reference as v41
from vllm_yoco.models.deepseek_v41_reference import DenseV41, Trace, V41Config
from vllm_yoco.tools.cli import main

PATH = Path(__file__).parents[1] / "data" / "deepseek_v41" / "tiny.json"
CONFIG: dict[str, Any] = json.loads(PATH.read_text())
W, P, N, L = 8, 3, 9, 100
MINIMUM, EXACT = W + 1, W + 5 * (W - 1)
TOLERANCE = 2e-5
"""In nats, float32: mask and compact sum in another order."""


@pytest.fixture(scope="module")
def model() -> DenseV41:
    return DenseV41.random(V41Config.read(CONFIG))


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 256, (L,), generator=torch.Generator().manual_seed(1))


def changed(**fields: Any) -> V41Config:
    return V41Config.read(CONFIG | {"text_config": CONFIG["text_config"] | fields})


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# ---- truncation


@pytest.mark.parametrize("boundary_swa", ["clipped", "open"])
@pytest.mark.parametrize("keep", [MINIMUM, 20, EXACT, L - 1, L, L + 50])
def test_mask_equals_compact(model: DenseV41, tokens: Tensor, keep: int, boundary_swa: str) -> None:
    options = {"keep_tokens": keep, "boundary_swa": boundary_swa}
    mask, compact = model.logprobs(tokens, **options), model.logprobs(tokens, compact=True, **options)
    kept = max(0, L - keep)
    assert difference(mask[kept:], compact[kept:]) <= TOLERANCE
    assert bool(compact[:kept].isnan().all()) and bool(mask.isfinite().all())


@pytest.mark.parametrize("boundary_swa", ["clipped", "open"])
def test_exact_is_off_and_one_less_is_not(tokens: Tensor, boundary_swa: str) -> None:
    """From K = exact on, the last layer's last window, which decode reads, is that of off; a row less shows.

    With three consumers: what a single key changes fades from layer to layer.
    """
    layers = {"num_hidden_layers": 6, "compress_ratios": [0, 2, 2, 1, 1, 1], "index_source_layer_ids": [1, 3]}
    model = DenseV41.random(changed(**layers))
    settings = YocoConfig(truncation="compact", keep_tokens="exact", boundary_swa=boundary_swa)
    exact = resolve_truncation(settings, model.topology).keep_tokens
    assert exact == W + (1 if boundary_swa == "open" else 2) * (W - 1)

    def window(keep: int | None) -> Tensor:
        trace = Trace()
        model(tokens, keep_tokens=keep, boundary_swa=boundary_swa, trace=trace)
        return trace.swa_kv[5][0][0, -W:]

    off = window(None)
    same, less = ((window(keep) - off).norm(dim=-1) / off.norm(dim=-1) for keep in (exact, exact - 1))
    # Experts run on the rows they get, so that equal rows may differ in their last bits.
    assert bool((same < 1e-6).all())
    assert float(less[0]) > 1e-4 and bool((less[1:] < 1e-6).all())


def test_error_falls_with_k(model: DenseV41, tokens: Tensor) -> None:
    off = model.logprobs(tokens)[-1]
    errors = [difference(model.logprobs(tokens, keep_tokens=keep)[-1], off) for keep in (MINIMUM, 14, 20, EXACT)]
    assert errors[0] > errors[1] > errors[2] > 100 * errors[3]


def test_first_changed_layer_and_position(model: DenseV41, tokens: Tensor) -> None:
    """Layer P + j's window KV is changed up to position s_keep + j (W - 1) - 1, not beyond, and layer P's nowhere."""
    keep = 30
    off, truncated = Trace(), Trace()
    model(tokens, trace=off)
    model(tokens, keep_tokens=keep, trace=truncated)
    for layer in range(P, N):
        error = (off.swa_kv[layer][0][0] - truncated.swa_kv[layer][0][0]).norm(dim=-1)
        different = (error > 1e-5).nonzero().flatten().tolist()
        last = L - keep + (layer - P) * (W - 1) - 1
        if layer == P:
            assert different == []
        else:
            # What a single key changes fades on the way up, so that the last rows may be below the threshold.
            assert L - keep - 1 <= max(different) <= min(last, L - 1) and (layer > P + 1 or max(different) == last)


def test_producers_and_global_kv_are_untouched(model: DenseV41, tokens: Tensor) -> None:
    """The boundary layer reads what off reads: its window KV comes from exact rows in every mode."""
    off, truncated = Trace(), Trace()
    model(tokens, trace=off)
    model(tokens, keep_tokens=MINIMUM, compact=True, trace=truncated)
    assert torch.equal(off.swa_kv[P][0], truncated.swa_kv[P][0])


def test_generated_tokens_do_not_move_the_bound(model: DenseV41, tokens: Tensor) -> None:
    """Scoring prompt and output in one pass equals decoding: L stays the prompt's."""
    prompt = tokens[:60].tolist()
    generated, rows = model.greedy(prompt, 4, keep_tokens=MINIMUM)
    scored = model.logprobs(torch.tensor(prompt + generated), num_prompt_tokens=60, keep_tokens=MINIMUM)
    assert difference(scored[59:-1], rows) <= TOLERANCE
    moved = model.logprobs(torch.tensor(prompt + generated), keep_tokens=MINIMUM)
    assert difference(moved[59:-1], rows) > 1e-3


# ---- the whole model


def test_rows_do_not_see_the_future(model: DenseV41, tokens: Tensor) -> None:
    assert difference(model.logprobs(tokens)[:50], model.logprobs(tokens[:50])) <= TOLERANCE


@pytest.mark.parametrize(
    "fields",
    [
        {"candidate_topk_blocks": 16, "index_topk": 128},  # every key in every selection
        {"candidate_source_layer_id": None},
        {"num_hidden_layers": 4, "compress_ratios": [0, 1, 1, 1], "kv_source_layer_ids": [1],
         "index_source_layer_ids": [1, 2], "candidate_source_layer_id": None, "hc_mult": 3, "swiglu_limit": None},
        {"n_shared_experts": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
    ],
)
def test_free_dimensions(tokens: Tensor, fields: dict[str, Any]) -> None:
    assert bool(DenseV41.random(changed(**fields)).logprobs(tokens).isfinite().all())


def test_candidates_limit_later_selections(tokens: Tensor) -> None:
    few = DenseV41.random(changed(candidate_topk_blocks=8))
    none = DenseV41(changed(candidate_source_layer_id=None), few.weights)
    late = L - 1  # earlier rows have no more keys than candidates
    assert difference(few.logprobs(tokens)[late], none.logprobs(tokens)[late]) > 1e-4
    assert difference(few.logprobs(tokens)[:60], none.logprobs(tokens)[:60]) <= TOLERANCE


ENGRAM: dict[str, Any] = {
    "engram_layer_ids": [1, 2], "engram_num_embeddings": [200, 300], "engram_max_ngram_size": 3, "engram_n_heads": 2,
    "engram_head_dim": 8, "engram_vocab_size": 30, "engram_compressed_vocab_size": 200, "engram_pad_token_id": 2,
}  # fmt: skip


def test_engram_below_the_boundary_leaves_truncation_as_it_is(tokens: Tensor) -> None:
    model = DenseV41.random(changed(**ENGRAM))
    mask, compact = (model.logprobs(tokens, keep_tokens=MINIMUM, compact=c) for c in (False, True))
    assert difference(mask[-MINIMUM:], compact[-MINIMUM:]) <= TOLERANCE
    off = model.logprobs(tokens)
    assert difference(model.logprobs(tokens, keep_tokens=L), off) == 0
    assert difference(off[-1], mask[-1]) > 1e-3
    without = {name: t for name, t in model.weights.items() if ".engram." not in name}
    assert difference(off, DenseV41(V41Config.read(CONFIG), without).logprobs(tokens)) > 1e-2
    assert difference(off[:50], model.logprobs(tokens[:50])) <= TOLERANCE


def test_engram_sees_the_last_tokens_and_their_order(tokens: Tensor) -> None:
    """The hashes of a row are those of its n-grams: of two tokens and of three, padded before the start."""
    layout = changed(**ENGRAM).engram
    assert layout is not None
    ids = tokens.numpy() % 200
    one = layout.hashes(ids, 2)
    assert one.shape == (2, L, 4)
    edited = ids.copy()
    edited[50] = (edited[50] + 1) % 200
    different = (layout.hashes(edited, 2) != one).any(axis=0)
    assert different[:, :2].any(1).nonzero()[0].tolist() == [50, 51]
    assert different[:, 2:].any(1).nonzero()[0].tolist() == [50, 51, 52]
    assert (layout.hashes(ids[::-1].copy(), 2)[:, ::-1] != one)[:, 5:-5].any(axis=(0, 2)).all()
    # Each column has a range of the table of its own, as long as its prime.
    first_row, primes = np.array([0, 31, 68, 109]), np.array([31, 37, 41, 43])
    assert ((one[0] >= first_row) & (one[0] < first_row + primes)).all()
    assert layout.moduli().tolist() == [[31, 37, 41, 43], [47, 53, 59, 61]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engram_layer_ids": [0, 1]}, "layer 0"),
        ({"engram_n_heads": None, "engram_vocab_size": None}, "engram_n_heads, engram_vocab_size"),
        ({"engram_num_embeddings": [151, 300]}, "engram_num_embeddings=151 of layer 1 must be at least 152"),
    ],
)
def test_broken_engram_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(**ENGRAM | changes)


def test_wrong_weights_are_refused(model: DenseV41) -> None:
    weights = dict(model.weights)
    weights["layers.0.attn.attn_sink"] = torch.zeros(5)
    del weights["norm.weight"]
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.attn_sink, norm\.weight"):
        DenseV41(model.config, weights)


# ---- pieces


def test_attention_by_hand() -> None:
    """Two keys, one head: shares of a softmax over both and the sink, applied to the keys themselves."""
    q, keys = torch.tensor([[[1.0, 0.0]]] * 2), torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    visible, sink = torch.tensor([[True, True], [False, False]]), torch.tensor([0.5])
    scale = 2**-0.5
    share = torch.tensor([2 * scale, 0.0, 0.5]).softmax(0)
    out = v41.attend(q, keys, visible, sink)
    assert torch.allclose(out[0, 0], share[0] * keys[0] + share[1] * keys[1])
    assert out[1].tolist() == [[0.0, 0.0]]
    assert v41.attend(q, keys, visible, torch.tensor([-math.inf]))[1].tolist() == [[0.0, 0.0]]  # nothing at all


def test_candidates_by_hand() -> None:
    scores = torch.tensor([[9.0, 0.0, 1.0, 0.0, 5.0, 0.0, 0.0]])
    # Seven keys in blocks of two: the newest (key 6) is in, then the best of the others.
    assert v41.candidate_mask(scores, torch.tensor([7]), 2, 2).tolist() == [[True, True] + [False] * 4 + [True]]
    # Five keys exist: the newest block is that of key 4, and key 5 does not exist.
    five = v41.candidate_mask(scores, torch.tensor([5]), 2, 2)
    assert five.nonzero()[:, 1].tolist() == [0, 1, 4]
    assert not v41.candidate_mask(scores, torch.tensor([0]), 2, 2).any()


def test_sinkhorn_is_doubly_stochastic() -> None:
    generator = torch.Generator().manual_seed(0)
    streams, fn = torch.randn(5, 3, 8, generator=generator), torch.randn(15, 24, generator=generator)
    _, _, mix = v41.hyper_mix(
        streams, 0.1 * fn, torch.ones(3), torch.zeros(15), rms_eps=1e-6, eps=1e-6, iterations=50
    )
    assert torch.allclose(mix.sum(-1), torch.ones(5, 3), atol=1e-3)
    assert torch.allclose(mix.sum(-2), torch.ones(5, 3), atol=1e-3)


# ---- vllm-yoco error


def test_error_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["error", str(PATH), "--max-tokens", "3", "--keep-tokens", "min,exact", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and (report["window"], report["exact"]) == (W, EXACT)
    least, exact = report["points"]
    assert least["delta_max"] > 1e-2 and exact["delta_max"] == exact["unchanged_max"] < 1e-5
    assert [entry["layer"] for entry in least["layers"]] == list(range(P, N))
    assert least["layers"][0]["swa_kv"] == 0 and least["first_changed"]["layer"] == P + 1
    assert exact["layers"][-1]["swa_kv_window"] < 1e-6 and exact["first_changed"] is None


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ["--backend", "engine"], "--backend engine"),
        ({"hidden_size": 65536}, [], "too many for the dense float32 reference"),
        ({"engram_layer_ids": [1]}, [], "engram_num_embeddings"),
        ({"compress_ratios": [2] * 9}, [], "no consumer boundary"),
    ],
)
def test_error_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], arguments: list[str], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"text_config": CONFIG["text_config"] | changes}))
    assert main(["error", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err

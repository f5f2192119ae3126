"""The dense reference against an independent loop over rows, heads and keys, and the truncation rules on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_yoco.models.checkpoint import (
    load_checkpoint,
    random_state_dict,
    read_model_config,
    save_checkpoint,
)
from vllm_yoco.models.config import YocoModelConfig
from vllm_yoco.models.reference import DenseYoco, KeyValueCache, Trace, attend, swa_visible
from vllm_yoco.plan import exact_keep_tokens
from vllm_yoco.presets import find_model_config

MODELS = Path(__file__).parents[1] / "data" / "models"
W, L = 4, 26
SMALL: dict[str, Any] = dict(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    n_prefill_layer=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=W,
    initializer_range=0.25,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "two-sources": {"kv_source_layers": [2, 4]},
    "one-source": {"num_key_value_heads": 4},
    "shared-hidden": {"kv_source_layers": [2, 5], "swa_share_hidden": True},
    "some-swa": {"consumer_swa_layers": [3, 5], "num_key_value_heads": 1},
    "no-swa": {"consumer_swa_layers": []},
    "sliding-producers": {"layer_types": ["sliding_attention", "full_attention"]},
    "tied": {"tie_word_embeddings": True, "kv_source_layers": [2, 3, 4, 5]},
    "no-consumers": {"n_prefill_layer": 6, "consumer_swa_layers": []},
}


def small(name: str = "two-sources") -> DenseYoco:
    """A small model in float64, so that "identical" and "differs" are far apart."""
    config = YocoModelConfig(**SMALL | VARIANTS[name])
    return DenseYoco(config, random_state_dict(config, seed=3)).double()


def prompt(length: int = L, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, length))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


# -- the oracle's oracle ---------------------------------------------------------------------------------------


def loop_logits(model: DenseYoco, ids: list[int], s_keep: int) -> np.ndarray:
    """[T, vocab] by loops: one row, one head, one key at a time."""
    c = model.config
    w = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    d, group = c.head_dim, c.num_attention_heads // c.num_key_value_heads

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / math.sqrt(float(x @ x) / len(x) + c.rms_norm_eps) * w[name]

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for start in range(0, len(x), d):
            for j in range(d // 2):
                angle = position * c.rope_parameters["rope_theta"] ** (-2 * j / d)
                a, b = x[start + j], x[start + j + d // 2]
                out[start + j] = a * math.cos(angle) - b * math.sin(angle)
                out[start + j + d // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def attention(q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray], seen: list[int]) -> np.ndarray:
        out = np.zeros_like(q)
        for head in range(c.num_attention_heads if seen else 0):
            mine, theirs = slice(head * d, head * d + d), slice(head // group * d, head // group * d + d)
            weights = np.exp([q[mine] @ keys[j][theirs] / math.sqrt(d) for j in seen])
            for weight, j in zip(weights / weights.sum(), seen, strict=True):
                out[mine] += weight * values[j][theirs]
        return out

    rows = [w["model.embed_tokens.weight"][i] for i in ids]
    shared: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}."
        inputs = [norm(x, at + "input_layernorm.weight") for x in rows]
        if i == c.n_prefill_layer:
            shared = inputs
        if i < c.n_prefill_layer or i in c.kv_source_layers:
            source = inputs if i < c.n_prefill_layer else shared
            keys = [rope(w[at + "self_attn.k_proj.weight"] @ s, p) for p, s in enumerate(source)]
            values = [w[at + "self_attn.v_proj.weight"] @ s for s in source]
        if i in c.consumer_swa_layers:
            source = shared if c.swa_share_hidden else inputs
            swa_keys = [rope(w[at + "self_attn.swa_k_proj.weight"] @ s, p) for p, s in enumerate(source)]
            swa_values = [w[at + "self_attn.swa_v_proj.weight"] @ s for s in source]
        narrow = c.layer_types[i] == "sliding_attention"
        updated = []
        for p, (x, a) in enumerate(zip(rows, inputs, strict=True)):
            in_window = [j for j in range(p + 1) if p - j < (c.sliding_window or 0)]
            q = rope(w[at + "self_attn.q_proj.weight"] @ a, p)
            branches = [attention(q, keys, values, in_window if narrow else list(range(p + 1)))]
            if i in c.consumer_swa_layers:
                q = rope(w[at + "self_attn.swa_q_proj.weight"] @ a, p)
                branches.append(attention(q, swa_keys, swa_values, [j for j in in_window if j >= s_keep]))
            x = x + w[at + "self_attn.o_proj.weight"] @ np.concatenate(branches)
            m = norm(x, at + "post_attention_layernorm.weight")
            gate = w[at + "mlp.gate_proj.weight"] @ m
            gate = gate / (1 + np.exp(-gate))
            updated.append(x + w[at + "mlp.down_proj.weight"] @ (gate * (w[at + "mlp.up_proj.weight"] @ m)))
        rows = updated
    head = w["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
    return np.stack([head @ norm(x, "model.norm.weight") for x in rows])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("keep", [None, 1, W + 1, 13, L + 5])
def test_agrees_with_the_loop(variant: str, keep: int | None) -> None:
    model, ids = small(variant), prompt()
    s_keep = 0 if keep is None else max(0, L - keep)
    expected = loop_logits(model, ids.tolist(), s_keep)
    # The reference keeps rotary frequencies in float32, hence 1e-5 and not less.
    assert difference(model(ids, keep_tokens=keep), torch.from_numpy(expected)) < 1e-5


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 12), st.integers(0, 60))
def test_visibility_is_the_rule_for_one_pair(query: int, key: int, window: int, s_keep: int) -> None:
    seen = swa_visible(torch.tensor([query]), torch.tensor([key]), window, torch.tensor([[s_keep]]))
    assert seen.shape == (1, 1, 1)
    assert bool(seen) == (key <= query and query - key < window and key >= s_keep)


def test_attention_over_no_key_is_exactly_zero_with_finite_gradients() -> None:
    rows = 700  # more than one block of rows, the first block wholly empty
    q = torch.randn(1, rows, 2, 8, requires_grad=True)
    k = torch.randn(1, rows, 1, 8, requires_grad=True)
    position = torch.arange(rows)
    visible = swa_visible(position, position, W, torch.tensor([[600]]))
    out = attend(q, k, k, visible)
    assert torch.equal(out[:, :600], torch.zeros(1, 600, 16))
    assert bool((out[:, 600:] != 0).all())
    out.sum().backward()
    assert q.grad is not None and k.grad is not None
    assert bool(q.grad.isfinite().all()) and bool(k.grad.isfinite().all())


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small(), prompt()
    whole = model(ids, keep_tokens=W + 2)
    monkeypatch.setattr("vllm_yoco.models.reference.QUERY_BLOCK", 5)
    assert difference(model(ids, keep_tokens=W + 2), whole) < 1e-12


# -- what truncation means -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["two-sources", "one-source", "some-swa", "sliding-producers"])
def test_exact_k_is_lossless_and_one_less_is_not(variant: str) -> None:
    model, ids = small(variant), prompt()
    exact = exact_keep_tokens(W, 1, len(model.topology.swa_layers), False)
    assert exact < L
    off = model(ids)[-1]
    assert difference(model(ids, keep_tokens=exact)[-1], off) < 1e-12
    assert difference(model(ids, keep_tokens=exact - 1)[-1], off) > 1e-7


@pytest.mark.parametrize("keep", [L, L + 1, 10 * L])
def test_short_prompts_are_not_truncated(keep: int) -> None:
    model, ids = small(), prompt()
    assert torch.equal(model(ids, keep_tokens=keep), model(ids))


def test_shared_hidden_needs_the_window_only() -> None:
    model, ids = small("shared-hidden"), prompt()
    off = model(ids)[-1]
    assert difference(model(ids, keep_tokens=W + 1)[-1], off) < 1e-12
    assert difference(model(ids, keep_tokens=W)[-1], off) < 1e-12
    assert difference(model(ids, keep_tokens=W - 1)[-1], off) > 1e-4


def test_without_swa_one_row_is_enough() -> None:
    model, ids = small("no-swa"), prompt()
    assert torch.equal(model(ids, keep_tokens=1), model(ids))


@pytest.mark.parametrize("keep", [W + 1, W + 2, W + 5])
def test_one_kept_row_more_changes_the_result(keep: int) -> None:
    model, ids = small(), prompt()
    a, b = (model.logprobs(ids, keep_tokens=k)[-1] for k in (keep, keep + 1))
    assert difference(a, b) > 1e-3


@pytest.mark.parametrize("path", ["ced-tiny", MODELS / "kv-shared.json", MODELS / "sliding-producers.json"])
def test_models_of_the_engine_tests_tell_k_from_k_plus_one(path: str | Path) -> None:
    config = read_model_config(find_model_config(str(path)))
    model = DenseYoco(config, random_state_dict(config, seed=0))
    keep = model.topology.window + 1
    for seed in range(3):
        ids = prompt(180, seed)
        with torch.no_grad():
            a, b = (model.logprobs(ids, keep_tokens=k)[-1] for k in (keep, keep + 1))
        assert difference(a, b) > 1e-2


def test_rows_below_s_keep_have_no_swa() -> None:
    model, ids, keep = small(), prompt(), 10
    truncated, without = Trace(), Trace()
    model(ids, keep_tokens=keep, trace=truncated)
    half = model.config.num_attention_heads * model.config.head_dim
    with torch.no_grad():
        for i in model.topology.swa_layers:
            model.model.layers[i].self_attn.o_proj.weight[:, half:] = 0
    model(ids, trace=without)
    for i in range(model.config.num_hidden_layers):
        dropped = difference(truncated.hidden[i][:, : L - keep], without.hidden[i][:, : L - keep])
        assert dropped < 1e-12
        kept = difference(truncated.hidden[i][:, L - keep :], without.hidden[i][:, L - keep :])
        assert (kept > 1e-3) == model.topology.is_consumer(i)


def test_trace_holds_every_layer() -> None:
    model, ids, trace = small("some-swa"), prompt(), Trace()
    model(ids, trace=trace)
    assert sorted(trace.hidden) == list(range(6))
    assert all(rows.shape == (1, L, 32) for rows in trace.hidden.values())
    assert trace.shared is not None and trace.shared.shape == (1, L, 32)
    assert {i: tuple(k.shape) for i, (k, _) in trace.swa_kv.items()} == {3: (1, L, 1, 8), 5: (1, L, 1, 8)}


# -- generation, chunks, batches, training ---------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, W + 1])
def test_greedy_is_one_forward_over_prompt_and_output(keep: int | None) -> None:
    model, ids = small(), prompt()
    tokens, rows = model.greedy(ids.tolist(), 12, keep)
    assert rows.shape == (12, 260) and tokens == rows.argmax(dim=-1).tolist()
    everything = torch.cat((ids, torch.tensor(tokens)))
    scored = model.logprobs(everything, num_prompt_tokens=L, keep_tokens=keep)
    assert difference(scored[L - 1 : -1], rows) < 1e-12
    if keep is not None:
        # Had s_keep moved with the generated tokens, the last rows would have lost keys.
        assert difference(model.logprobs(everything, keep_tokens=keep)[L - 1 : -1], rows) > 1e-3


def test_greedy_stops_after_the_end_token() -> None:
    model, ids = small(), prompt().tolist()
    tokens, _ = model.greedy(ids, 6)
    stopped, rows = model.greedy(ids, 6, eos_token_id=tokens[2])
    assert stopped == tokens[: tokens.index(tokens[2]) + 1] and len(rows) == len(stopped)
    assert model.greedy(ids, 0)[0] == []


@settings(max_examples=6, deadline=None)
@given(st.sets(st.integers(1, L - 1), max_size=5), st.sampled_from([None, W + 1, 12]))
def test_chunks_do_not_show(cuts: set[int], keep: int | None) -> None:
    model, ids, cache = small(), prompt(), KeyValueCache()
    ends = sorted(cuts | {L})
    parts = [
        model(ids[a:b], num_prompt_tokens=L, keep_tokens=keep, cache=cache)
        for a, b in zip([0, *ends], ends, strict=False)
    ]
    assert cache.length == L
    assert difference(torch.cat(parts), model(ids, keep_tokens=keep)) < 1e-12


def test_batch_of_padded_sequences() -> None:
    model = small()
    lengths, keeps = torch.tensor([L, 17, 9]), torch.tensor([W + 1, 12, W + 1])
    batch = torch.zeros(3, L, dtype=torch.long)
    for row, length in enumerate(lengths):
        batch[row, :length] = prompt(int(length), row)
    together = model(batch, num_prompt_tokens=lengths, keep_tokens=keeps)
    assert together.shape == (3, L, 260)
    for row, (length, keep) in enumerate(zip(lengths.tolist(), keeps.tolist(), strict=True)):
        alone = model(batch[row, :length], keep_tokens=keep)
        assert difference(together[row, :length], alone) < 1e-12


def test_explicit_s_keep() -> None:
    model, ids = small(), prompt()
    expected = model(ids, keep_tokens=10)
    for s_keep in (L - 10, torch.tensor(L - 10), torch.full((L,), L - 10)):
        assert torch.equal(model(ids, s_keep=s_keep), expected)
    for per_sequence in (torch.tensor([L - 10, 0]), torch.tensor([L - 10, 0])[:, None].expand(2, L)):
        rows = model(ids.expand(2, L), s_keep=per_sequence)
        assert difference(rows[0], expected) < 1e-12
        assert difference(rows[1], model(ids)) < 1e-12
    with pytest.raises(ValueError, match="not both"):
        model(ids, keep_tokens=10, s_keep=3)


@pytest.mark.parametrize("variant", ["two-sources", "shared-hidden", "tied"])
def test_trains_and_saves_under_checkpoint_names(variant: str, tmp_path: Path) -> None:
    config = YocoModelConfig(**SMALL | VARIANTS[variant])
    start = random_state_dict(config, seed=3)
    model = DenseYoco(config, start)
    ids = torch.stack([prompt(L, seed) for seed in range(4)])
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(8):
        logits = model(ids, keep_tokens=torch.tensor([1, W + 1, 12, L]))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert torch.equal(start["model.norm.weight"], torch.ones(32)), "training changed the caller's tensors"

    save_checkpoint(tmp_path / "trained", config, model.state_dict())
    loaded_config, weights = load_checkpoint(tmp_path / "trained")
    assert loaded_config.topology() == config.topology()
    assert weights.keys() == dict(model.named_parameters()).keys()
    again = DenseYoco.from_pretrained(tmp_path / "trained")
    assert torch.equal(again(ids[0], keep_tokens=7), model(ids[0], keep_tokens=7))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_other_rotary_types_are_used(rope: dict[str, Any]) -> None:
    config = YocoModelConfig(**SMALL, rope_parameters=rope, max_position_embeddings=64)
    model = DenseYoco(config, random_state_dict(config, seed=3))
    plain = DenseYoco(YocoModelConfig(**SMALL), model.state_dict())
    assert difference(model(prompt()), plain(prompt())) > 1e-3
    assert bool(model(prompt()).isfinite().all())


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "rope_type='dynamic' must be one of default",
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1",
        ),
    ],
)
def test_unsupported_rotary_types_are_refused(rope: dict[str, Any], message: str) -> None:
    config = YocoModelConfig(**SMALL, rope_parameters=rope)
    with pytest.raises(ValueError, match=message):
        DenseYoco(config, random_state_dict(config, seed=0))


def test_weights_of_another_model_are_refused() -> None:
    config = YocoModelConfig(**SMALL)
    weights = random_state_dict(config, seed=0)
    del weights["model.norm.weight"]
    weights["lm_head.bias"] = torch.zeros(260)
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 32)
    with pytest.raises(ValueError) as error:
        DenseYoco(config, weights)
    for part in ("missing model.norm.weight", "unknown lm_head.bias", "has shape [3, 32], must be [32, 32]"):
        assert part in str(error.value)

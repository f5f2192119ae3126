"""The example model's training: data, the truncation that it simulates, and resumption."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vllm_yoco.models.checkpoint import BOS, load_checkpoint, read_model_config
from vllm_yoco.models.config import YocoModelConfig

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ced = example("train_ced")
TEXT, HELD_OUT = ced.load_text()
STARTS = ced.line_starts(TEXT)
WINDOW = 8
PLAN = ced.Plan(variant="replay", steps=8, batch_tokens=256, lengths=((0.5, 64), (1.0, 128)), replay_from=0.5, warmup=2)


def tiny_config() -> YocoModelConfig:
    return YocoModelConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        n_prefill_layer=2,
        layer_types=["sliding_attention"] * 2,
        kv_source_layers=[2, 3],
        sliding_window=WINDOW,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )


def trainer(plan: Any = PLAN) -> Any:
    return ced.Trainer(tiny_config(), plan, TEXT)


def test_text_has_no_paragraph_twice_and_a_held_out_tenth() -> None:
    paragraphs = (TEXT.tobytes() + HELD_OUT.tobytes()).decode().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)
    assert len(TEXT) > 200_000
    assert len(HELD_OUT) == pytest.approx(len(TEXT) / 9, abs=1)


def test_training_samples_are_deterministic_and_every_answer_has_its_record_before_it() -> None:
    questions = 0
    for seed in range(20):
        sample = ced.make_training_sample(np.random.default_rng(seed), 300, TEXT, STARTS)
        assert sample == ced.make_training_sample(np.random.default_rng(seed), 300, TEXT, STARTS)
        assert len(sample.tokens) == len(sample.weights) == 300
        assert sample.tokens[0] == BOS
        content = bytes(sample.tokens[1:])
        answers = [i for i, weight in enumerate(sample.weights) if weight == ced.ANSWER_WEIGHT]
        for first in answers[:: ced.ANSWER_BYTES]:
            question = content[first - 5 : first + 2]
            assert question.startswith(b"?")
            assert content.find(b"@" + question[1:]) in range(first - 5)
            questions += 1
    assert questions > 50


@pytest.mark.parametrize("length, gap", [(64, 9), (64, 59), (300, 150), (2048, 1900), (512, None)])
def test_recall_example_has_its_length_gap_and_answer(length: int, gap: int | None) -> None:
    example = ced.make_recall_example(np.random.default_rng(3), length, text=HELD_OUT, gap=gap)
    content = bytes(example.prompt[1:])
    assert len(example.prompt) == length and example.prompt[0] == BOS
    assert example.gap == gap or gap is None
    assert content[-4:-3] == b"?"
    record = content.find(b"@" + content[-3:] + bytes(example.answer) + b";\n")
    assert record == len(content) - 4 - example.gap
    assert content.count(b"@" + content[-3:]) == 1


@pytest.mark.parametrize("gap", [8, 60])
def test_recall_example_refuses_a_gap_that_does_not_fit(gap: int) -> None:
    with pytest.raises(ValueError, match=r"must lie in 9\.\.59"):
        ced.make_recall_example(np.random.default_rng(0), 64, text=HELD_OUT, gap=gap)


def test_truncation_is_simulated_after_the_variants_part_and_in_replay_only() -> None:
    rng = np.random.default_rng(0)
    s_keep = ced.draw_s_keep(rng, 2000, 128, WINDOW)
    assert s_keep.min() == 0 and s_keep.max() <= 128 - WINDOW - 1
    assert 0.3 < (s_keep > 0).float().mean() < 0.5

    run, plain, truncated = trainer(), trainer(replace(PLAN, variant="plain")), 0
    for step in range(PLAN.steps):
        tokens, weights, lowest = run.batch(step)
        same_tokens, all_weights, none = plain.batch(step)
        assert torch.equal(tokens, same_tokens) and not none.any()
        assert step >= 4 or not lowest.any()
        truncated += int(lowest.count_nonzero())
        rows = torch.arange(weights.shape[1])
        assert torch.equal(weights, torch.where(rows >= lowest[:, None], all_weights, 0.0))
    assert truncated


def test_rows_below_s_keep_exist_for_producers_and_global_kv_alone() -> None:
    """What the consumer layers make of these rows is overwritten: the loss must not notice."""
    run = trainer()
    step = next(i for i in range(4, PLAN.steps) if run.batch(i)[2].max() > WINDOW)
    tokens, weights, s_keep = run.batch(step)
    dropped = torch.arange(weights.shape[1]) < s_keep[:, None]

    def loss() -> torch.Tensor:
        logits = run.model(tokens[:, :-1], s_keep=s_keep)
        entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (entropy * weights.flatten()).sum()

    expected = loss()
    for layer in run.model.model.layers[2:]:
        layer.mlp.register_forward_hook(lambda module, args, out: out.masked_fill(dropped[..., None], 1e3))
    assert torch.equal(loss(), expected)
    assert not weights[dropped].any()


def test_training_lowers_the_loss() -> None:
    run = trainer(replace(PLAN, variant="plain", steps=20, matrix_rate=1e-2, vector_rate=1e-2))
    losses = [run.step()["loss"] for _ in range(20)]
    assert sum(losses[-3:]) / 3 < losses[0] - 1


def test_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    straight, first, second = trainer(), trainer(), trainer()
    for _ in range(6):
        straight.step()
    for _ in range(3):
        first.step()
    first.save_state(tmp_path / "state.pt")
    second.load_state(tmp_path / "state.pt")
    assert (second.done, second.tokens) == (3, first.tokens)
    for _ in range(3):
        second.step()
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_state_of_another_plan_is_refused_but_replay_may_start_from_plain(tmp_path: Path) -> None:
    plain = trainer(replace(PLAN, variant="plain"))
    for _ in range(4):
        plain.step()
    plain.save_state(tmp_path / "shared.pt")
    run = trainer()
    run.load_state(tmp_path / "shared.pt")
    assert run.done == 4
    with pytest.raises(ValueError, match="with another seed"):
        trainer(replace(PLAN, seed=1)).load_state(tmp_path / "shared.pt")
    plain.step()
    plain.save_state(tmp_path / "late.pt")
    with pytest.raises(ValueError, match="with another variant"):
        run.load_state(tmp_path / "late.pt")


def test_evaluation_counts_exact_answers_under_the_asked_truncation() -> None:
    """A stand-in that looks the answer up; it must be asked about the whole prompt, with K."""
    calls, length = [], 100

    def lookup(tokens: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(options)
        logits = torch.zeros(*tokens.shape, 260)
        for row, content in zip(logits, tokens.tolist(), strict=True):
            text = bytes(content[1:])
            answer = text.find(b"@" + text[length - 4 : length - 1]) + 4
            for i in range(ced.ANSWER_BYTES):
                row[length - 1 + i, text[answer + i]] = 1.0
        return logits

    options = {"text": HELD_OUT, "length": length, "gap": 50, "examples": 5}
    assert ced.evaluate_recall(lookup, keep_tokens=9, **options) == 1.0
    assert calls == [{"num_prompt_tokens": length, "keep_tokens": 9}]
    model = trainer().model
    assert ced.evaluate_recall(model, **options) < 0.5
    assert 6 < ced.evaluate_text(model, text=HELD_OUT[:512], length=128, prompt=64, keep_tokens=9) < 12
    (cut, _), (_, exact) = ced.evaluate_divergence(
        model, text=HELD_OUT, keep_tokens=(1, 2 * WINDOW - 1), prompt=64, pieces=4
    )
    assert cut > 1e-4 and 0 <= exact < 1e-9


def test_command_writes_both_checkpoints_with_their_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ced, "GAPS", ((64, 40),))
    monkeypatch.setattr(ced, "evaluate_divergence", lambda *_, keep_tokens, **__: [(0.0, 0.0)] * len(keep_tokens))
    monkeypatch.setattr(ced, "load_text", lambda: (TEXT, HELD_OUT[:2048]))
    tiny_config().save_pretrained(tmp_path)
    common = ["--config", str(tmp_path / "config.json"), "--steps", "3", "--shared", str(tmp_path / "shared.pt")]
    for variant in ced.VARIANTS:
        ced.main(["--variant", variant, "--output", str(tmp_path / variant), *common])
        assert "| 64 | 40 |" in (tmp_path / variant / "README.md").read_text(encoding="utf-8")
    assert f"continuing from {tmp_path / 'shared.pt'} at step 3" in capsys.readouterr().out
    plain, replay = (load_checkpoint(tmp_path / variant)[1] for variant in ced.VARIANTS)
    assert all(torch.equal(plain[name], replay[name]) for name in plain)  # with 3 steps they do not part


@pytest.mark.parametrize("variant", ced.VARIANTS)
def test_committed_checkpoint_loads_and_has_a_card(variant: str) -> None:
    directory = ROOT / "models" / f"ced-byte-{variant}"
    config, weights = load_checkpoint(directory)
    assert config.topology() == read_model_config(ced.CONFIG).topology()
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert f"--variant {variant}" in (directory / "README.md").read_text(encoding="utf-8")

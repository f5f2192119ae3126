"""examples/error_study.py: its short cut through the dense model, its prompts, resumption, statistics and document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_train_ced import example, tiny_config
from vllm_yoco.models.checkpoint import BOS, random_state_dict, save_checkpoint
from vllm_yoco.models.reference import DenseYoco

study = example("error_study")
_, TEXT = study.load_text()
RESULTS = json.loads((study.DOCUMENT.with_suffix("") / "results.json").read_text())
SERVED = study.read_served(study.DOCUMENT.with_suffix(""))
PAIR = [RESULTS["models"][f"ced-byte-{variant}"] for variant in ("plain", "replay")]


def tiny_model() -> DenseYoco:
    return DenseYoco(tiny_config(), random_state_dict(tiny_config(), 0))


@torch.inference_mode()
def test_short_cut_equals_the_whole_forward_for_every_k() -> None:
    """L = 40, W = 8: K below, at and above W, lossless, and above L."""
    model, length = tiny_model(), 40
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 250, (2, length + 5)))
    keeps = (1, 4, 9, 12, 15, 30, 64)
    rows = list(study.continuation_logits(model, tokens[:, :length], tokens[:, length:], keeps))
    for keep, ours in zip((None, *keeps), rows, strict=True):
        whole = model(tokens[:, :-1], num_prompt_tokens=length, keep_tokens=keep)[:, length - 1 :]
        torch.testing.assert_close(ours, whole, atol=1e-5, rtol=0)
    differences = [float((ours - rows[0]).abs().max()) for ours in rows[1:]]
    # Lossless from W + (D - 1)(W - 1) = 15 on: what is compared above is not off seven times.
    assert min(differences[:4]) > 1e-4 and max(differences[4:]) < 1e-5


def test_text_is_continued_by_the_same_disjoint_bytes_whatever_the_length() -> None:
    (_, expected), *_ = pairs = [study.text_prompts(TEXT, length) for length in study.LENGTHS]
    held_out = TEXT.tobytes()
    for length, (prompts, continuations) in zip(study.LENGTHS, pairs, strict=True):
        assert prompts.shape == (study.TEXT_PROMPTS, length) and (prompts[:, 0] == BOS).all()
        assert torch.equal(continuations, expected)
        for prompt, continuation in zip(prompts.tolist(), continuations.tolist(), strict=True):
            assert bytes(prompt[1:] + continuation) in held_out
    first = np.linspace(max(study.LENGTHS) - 1, len(TEXT) - study.TEXT_BYTES, study.TEXT_PROMPTS).astype(int)
    assert np.diff(first).min() >= study.TEXT_BYTES


@pytest.mark.parametrize("length", study.LENGTHS)
def test_recall_asks_for_a_record_in_rows_that_are_dropped(length: int) -> None:
    prompts, answers = study.recall_prompts(TEXT, length)
    assert prompts.shape == (study.RECALL_PROMPTS, length)
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        content = bytes(prompt[1:])
        record = 1 + content.index(b"@" + content[-3:] + bytes(answer))  # position; row 0 is <bos>
        assert record + len(b"@kfw482;") <= length - max(study.SERVED)


def small_study(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A study of seconds; returns the list of (what, L) that it measures."""
    done: list[tuple[str, int]] = []
    for name, value in (("LENGTHS", (300, 320)), ("TEXT_PROMPTS", 3), ("TEXT_BYTES", 4), ("RECALL_PROMPTS", 3)):
        monkeypatch.setattr(study, name, value)
    for name in ("measure_text", "measure_recall"):
        measure = getattr(study, name)

        def counted(model: Any, text: Any, length: int, keeps: Any, measure: Any = measure, name: str = name) -> Any:
            done.append((name, length))
            return measure(model, text, length, keeps)

        monkeypatch.setattr(study, name, counted)
    return done


def test_interrupted_study_measures_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, file = small_study(monkeypatch), tmp_path / "results.json"
    folders = [tmp_path / "x-plain", tmp_path / "x-replay"]
    for seed, folder in enumerate(folders):
        save_checkpoint(folder, tiny_config(), random_state_dict(tiny_config(), seed))
    first = study.study(folders[:1], file)
    assert done == [("measure_text", 300), ("measure_recall", 300), ("measure_text", 320), ("measure_recall", 320)]
    stored = json.loads(file.read_text())
    assert stored == first
    del stored["models"]["x-plain"]["lengths"]["320"]  # as if stopped there
    file.write_text(json.dumps(stored))
    done.clear()
    both = study.study(folders, file)
    assert done[:2] == [("measure_text", 320), ("measure_recall", 320)] and len(done) == 6
    assert both["models"]["x-plain"] == first["models"]["x-plain"] != both["models"]["x-replay"]

    done.clear()
    study.study(folders, file)
    assert done == []
    study.study(folders, file, fresh=True)
    assert len(done) == 8
    save_checkpoint(folders[0], tiny_config(), random_state_dict(tiny_config(), 7))  # other weights
    done.clear()
    study.study(folders, file)
    assert len(done) == 4
    monkeypatch.setattr(study, "SEED", 1)  # other prompts: nothing of the file holds
    done.clear()
    study.study(folders, file)
    assert len(done) == 8


def test_wilson_interval() -> None:
    """Values of Wilson's formula worked out by hand: at 0 of n it ends at z² / (n + z²), and it is symmetric."""
    z2 = 1.959964**2
    assert study.wilson(0, 100) == pytest.approx((0.0, 0.0, z2 / (100 + z2)))
    assert study.wilson(100, 100) == pytest.approx((1.0, 100 / (100 + z2), 1.0))
    share, low, high = study.wilson(50, 100)
    assert (share, low + high) == pytest.approx((0.5, 1.0)) and high - low == pytest.approx(0.1923, abs=1e-3)


def test_bootstrap_interval_is_that_of_a_mean_and_resamples_pairs_together() -> None:
    values = np.random.default_rng(1).normal(3, 2, (1, 400))
    mean, low, high = study.bootstrap(values, lambda m: m[0])
    assert mean == pytest.approx(values.mean())
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    ratio = study.bootstrap(np.concatenate([values, 2 * values]), lambda m: m[1] / m[0])
    assert ratio == pytest.approx((2.0, 2.0, 2.0))


def test_lost_and_gained_answers_are_counted_by_prompt() -> None:
    figures = study.recall_figures({"off": "110010", "129": "011010"}, 129)
    assert (figures["lost"], figures["gained"]) == (1, 1)
    assert figures["share"][0] == 0.5 and figures["changed"][0] == pytest.approx(2 / 6)


def test_document_needs_every_block_once() -> None:
    assert study.fill_in("a\n<!-- begin x -->\nold\n<!-- end x -->\nb", {"x": "new"}).count("new") == 1
    with pytest.raises(ValueError, match="'x' 0 times"):
        study.fill_in("nothing", {"x": "new"})


# The committed results


def test_document_has_the_tables_of_the_committed_results() -> None:
    document = study.DOCUMENT.read_text(encoding="utf-8")
    assert study.fill_in(document, study.tables(RESULTS, SERVED)) == document
    for name in ("kl", "perplexity", "recall"):
        assert f"](error_study/{name}.png)" in document
        assert (study.DOCUMENT.with_suffix("") / f"{name}.png").stat().st_size > 10_000


def test_committed_results_are_of_the_committed_weights() -> None:
    import hashlib

    for folder in study.MODELS:
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert RESULTS["models"][folder.name]["weights_sha256"] == digest


@pytest.mark.parametrize("length", [str(length) for length in study.LENGTHS])
@pytest.mark.parametrize("entry", PAIR, ids=["plain", "replay"])
def test_error_shrinks_with_k_and_is_gone_at_exact(entry: dict[str, Any], length: str) -> None:
    cell, keeps = entry["lengths"][length], entry["keeps"]
    kl = [np.mean(cell["text"][str(keep)]["kl"]) for keep in keeps]
    assert kl == sorted(kl, reverse=True)
    assert kl[0] > 1e-2 and kl[-1] < 1e-10
    assert cell["recall"]["off"] == cell["recall"][str(keeps[-1])]
    assert min(cell["text"][str(keeps[-1])]["top1"]) == 1.0


def test_served_answers_are_those_of_the_dense_model() -> None:
    """The document says so."""
    served, dense = (results["models"]["ced-byte-plain"] for results in (SERVED, RESULTS))
    for mode, keep in (("off", "off"), ("compact", "129")):
        assert served[mode]["recall, L=1024"] == dense["lengths"]["1024"]["recall"][keep]

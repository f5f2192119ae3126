"""Metrics of ``vllm-yoco error``: hand-made numbers, the dense model against the rules, the report's files."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_yoco.config import Truncation, YocoConfig, resolve_truncation
from vllm_yoco.models.checkpoint import random_state_dict
from vllm_yoco.models.config import YocoModelConfig
from vllm_yoco.models.reference import DenseYoco
from vllm_yoco.plan import exact_keep_tokens
from vllm_yoco.tools.check_inputs import Prompt, random_prompts, read_prompts
from vllm_yoco.tools.check_values import Difference
from vllm_yoco.tools.cli import main
from vllm_yoco.tools.error_backends import ReferenceBackend
from vllm_yoco.tools.error_metrics import (
    LayerRows,
    divergence,
    layer_errors,
    perplexity,
    relative_error,
    token_errors,
)
from vllm_yoco.tools.error_study import measure

W, D = 4, 3
CONFIG: dict[str, Any] = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=5,
    n_prefill_layer=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=W,
    initializer_range=0.25,
    bos_token_id=1,
    eos_token_id=2,
)
EXACT = exact_keep_tokens(W, 1, D, False)


def logs(*rows: list[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, dtype=np.float32))


def test_token_errors_by_hand() -> None:
    off = logs([0.5, 0.25, 0.25], [0.5, 0.5, 0.0])
    cut = logs([0.25, 0.5, 0.25], [0.5, 0.5, 0.0])
    errors = token_errors(off, cut, [2, 1])
    # 0.5 ln 2 - 0.25 ln 2, and nothing in the second row, impossible token or not
    np.testing.assert_allclose(errors.kl, [0.25 * math.log(2), 0], atol=1e-7)
    np.testing.assert_allclose(errors.largest, [math.log(2), 0], rtol=1e-6)
    np.testing.assert_allclose(errors.mean, [2 * math.log(2) / 3, 0], rtol=1e-6)
    assert errors.top1.tolist() == [False, True]
    np.testing.assert_allclose(errors.nll_off, [math.log(4), math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(errors.nll, [math.log(4), math.log(2)], rtol=1e-6)
    assert perplexity(errors.nll) == pytest.approx(math.sqrt(8), rel=1e-6)


def test_tiny_divergence_survives_unnormalised_sums() -> None:
    """Both tables sum to 1 + 1e-6; the divergence of 1e-10 is a second-order difference beside that."""
    p = np.array([0.5, 0.5])
    q = np.array([0.5 + 1e-5, 0.5 - 1e-5])
    exact = float((p * np.log(p / q)).sum())
    errors = token_errors(np.log(p)[None] + 1e-6, np.log(q)[None] - 1e-6, [0])
    assert errors.kl[0] == pytest.approx(exact, rel=1e-3)


def test_divergence() -> None:
    assert divergence([1, 2, 3], [1, 2, 3]) is None
    assert divergence([1, 2, 3], [1, 5, 3]) == 1
    assert divergence([1], [2, 3]) == 0


def test_relative_error() -> None:
    a = np.array([[3.0, 4.0]])
    assert relative_error(a, a) == 0
    assert relative_error(a, a + [[0.5, 0]]) == pytest.approx(0.1)
    assert relative_error(np.zeros((0, 2)), np.zeros((0, 2))) == 0


def rows(start: int, changed: int | None, length: int = 10) -> LayerRows:
    values = np.ones((length - start, 2))
    if changed is not None:
        values[changed - start] = 2
    return LayerRows(start, {7: values}, {6: np.ones((length - start, 3)), 7: values})


def test_layer_errors_by_hand() -> None:
    """L = 10, K = 6, W = 3: retained 4..9, decode reads 7..9."""
    before, inside = rows(2, changed=5), rows(2, changed=8)
    options = {"num_prompt_tokens": 10, "keep_tokens": 6, "window": 3}
    without, error = layer_errors(rows(2, None), before, **options)
    assert (without.layer, without.swa_kv, without.swa_kv_window, without.first_changed) == (6, None, None, None)
    assert without.hidden == without.hidden_last == 0
    assert error.swa_kv == error.hidden == pytest.approx(math.sqrt(2 / 12))
    assert error.swa_kv_window == error.hidden_last == 0 and error.first_changed is None
    error = layer_errors(rows(2, None), inside, **options)[1]
    assert error.swa_kv_window == pytest.approx(math.sqrt(2 / 6)) and error.first_changed == -2
    # A row below s_keep is no error: nobody will read it.
    assert layer_errors(rows(2, None), rows(2, changed=3), **options)[1].swa_kv == 0


def truncations(*keeps: int | str, config: YocoModelConfig) -> list[Truncation]:
    return [resolve_truncation(YocoConfig(truncation="compact", keep_tokens=keep), config.topology()) for keep in keeps]


def study(keeps: list[int | str], prompts: list[Prompt], max_tokens: int = 5, **changes: Any) -> dict[str, Any]:
    config = YocoModelConfig(**CONFIG | changes)
    model = DenseYoco(config, random_state_dict(config, seed=1))
    chosen = truncations(*keeps, config=config)
    return measure(ReferenceBackend(model, max(t.keep_tokens for t in chosen)), prompts, chosen, max_tokens)


def test_error_is_zero_at_exact_and_grows_as_k_shrinks() -> None:
    prompts = random_prompts([30, 41, 52], 48, seed=0)
    results = study(["min", 7, EXACT - 1, EXACT, 60], prompts)
    points = results["points"]
    assert results["ok"] and results["exact"] == EXACT == 10
    assert [p["rule"] for p in points] == ["min", None, None, "exact", None]
    assert [p["cut"] for p in points] == [3, 3, 3, 3, 0]
    for name in ("kl_mean", "delta_mean", "delta_max"):
        values = [p[name] for p in points]
        assert values[0] > values[1] > values[2] > 100 * values[3]
        assert values[3] < 1e-5 and values[4] < 1e-5
    assert [p["unchanged_max"] is None for p in points] == [True, True, True, False, False]
    # With the lossless K decode's window is right in all layers; with one row less not, in the last layer.
    assert points[3]["first_changed"] is None
    assert points[2]["first_changed"] == {"layer": 4, "row": -W}
    assert points[4]["layers"] is None
    by_layer = {e["layer"]: e for e in points[0]["layers"]}
    assert sorted(by_layer) == [2, 3, 4]
    # The first consumer's KV comes from the boundary hidden, which truncation does not touch.
    assert by_layer[2]["swa_kv"] < 1e-6
    assert 0.01 < by_layer[3]["swa_kv_window"] < by_layer[4]["swa_kv_window"]


def test_short_prompts_change_nothing_and_positions_are_counted() -> None:
    prompts = random_prompts([3, 5], 48, seed=0)
    results = study(["min"], prompts, max_tokens=4)
    (point,) = results["points"]
    assert point["cut"] == 0 and point["unchanged_max"] < 1e-5 and results["ok"]
    assert [len(point[name]) for name in ("kl_at", "delta_max_at", "top1_at")] == [4, 4, 4]
    assert any("nothing was dropped" in note for note in results["notes"])


def test_given_continuations_of_different_length() -> None:
    prompts = [Prompt(p.tokens, (5, 6, 7)[: 3 - i]) for i, p in enumerate(random_prompts([30, 31], 48, seed=0))]
    results = study(["min"], prompts)
    assert results["continuation"] == "given" and results["continuation_tokens"] == [3, 2]
    assert len(results["points"][0]["kl_at"]) == 3
    assert results["points"][0]["perplexity"] > 5


def test_shared_hidden_is_exact_at_min() -> None:
    (point,) = study(["min"], random_prompts([30], 48, seed=0), swa_share_hidden=True)["points"]
    assert point["rule"] == "exact" and point["delta_max"] < 1e-5
    assert all(e["swa_kv"] < 1e-6 for e in point["layers"])


def test_model_that_is_not_exact_where_it_must_be_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DenseYoco.forward

    def forward(self: DenseYoco, *args: Any, **options: Any) -> Any:
        if options.get("keep_tokens") is not None:
            options["keep_tokens"] -= 1
        return original(self, *args, **options)

    monkeypatch.setattr(DenseYoco, "forward", forward)
    assert not study(["exact"], random_prompts([30], 48, seed=0))["ok"]


def test_difference_keeps_the_worst_place() -> None:
    difference = Difference("name", limit=0.1)
    one = logs([0.5, 0.5], [0.9, 0.1])
    difference.add(one, one, lambda j: f"first {j}")
    assert (difference.largest, difference.where, difference.ok) == (0, None, True)
    difference.add(one, logs([0.5, 0.5], [0.1, 0.9]), lambda j: f"second {j}")
    assert difference.where == "second 1" and difference.top_changed == 1 and not difference.ok
    assert difference.largest == pytest.approx(math.log(9), rel=1e-6)
    assert (difference.tables, difference.positions, difference.values) == (2, 4, 8)
    broken = Difference("name", limit=0.1)
    broken.add(one, np.full_like(one, np.nan), lambda j: "nan")
    assert broken.largest == math.inf and not broken.ok


# --- Prompts ---


def test_text_is_encoded_without_a_warning_about_the_model_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers does not know ``yoco`` outside vLLM, and says so if it has to find the config itself."""
    model = Path(__file__).parents[2] / "models" / "ced-byte-plain"
    file = tmp_path / "prompts.txt"
    file.write_text("abc\n")
    logging.getLogger("transformers").addHandler(caplog.handler)  # it does not propagate
    try:
        assert read_prompts(file, str(model), 260, None) == [Prompt((256, *b"abc"))]
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "model of type" not in caplog.text


def test_read_prompts(tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [1, 2, 3], "continuation_token_ids": [4]}, {"prompt_token_ids": [5, 6, 7, 8]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, [*lines, lines[0]])) + "\n\n")
    assert read_prompts(file, "unused", 10, 3) == [Prompt((1, 2, 3), (4,)), Prompt((6, 7, 8))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("{", "is not JSON"),
        ("[1]", "must be a string or an object"),
        ("{}", 'has no "prompt"'),
        ('{"prompt": 5}', "must be a string"),
        ('{"prompt_token_ids": [1, 99]}', "token 99 is not in the vocabulary of 10"),
        ('{"prompt_token_ids": ["a"]}', "must be a list of integers"),
    ],
)
def test_broken_prompts(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(file, "unused", 10, None)


# --- The command, without an engine ---


def test_command_writes_report_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = ["--backend", "reference", "--keep-tokens", "min,40,exact", "--max-tokens", "4", "--out", str(out)]
    assert main(["error", "ced-tiny", *flags]) == 0
    printed = capsys.readouterr().out
    assert "ok: measured; where nothing may change" in printed
    assert sorted(path.name for path in out.iterdir()) == [
        "error_over_k.png",
        "error_over_layer.png",
        "error_over_position.png",
        "report.json",
        "report.md",
    ]
    assert all((out / f"error_over_{x}.png").read_bytes().startswith(b"\x89PNG") for x in ("k", "layer", "position"))
    report = json.loads((out / "report.json").read_text())
    assert [p["keep_tokens"] for p in report["points"]] == [25, 40, 93]
    assert report["command"] == "error" and report["ok"] is True
    markdown = (out / "report.md").read_text()
    assert printed.strip() in markdown and markdown.count("](error_over_") == 3


def test_model_without_windows(capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).parents[1] / "data" / "models" / "no-swa.json"
    assert main(["error", str(model), "--max-tokens", "2", "--max-prompt-tokens", "20", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [p["keep_tokens"] for p in report["points"]] == [1]
    assert report["points"][0]["cut"] > 0 and report["points"][0]["delta_max"] < 1e-5


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["error", "ced-tiny", "--keep-tokens", "3"]) == 2
    assert "must be at least W + B" in capsys.readouterr().err
    assert main(["error", "ced-tiny", "--max-tokens", "0"]) == 2
    assert "must be 1 or more" in capsys.readouterr().err

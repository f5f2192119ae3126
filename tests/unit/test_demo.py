"""What ``vllm-yoco demo`` reads and prints, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_yoco.config import YocoConfig, resolve_truncation
from vllm_yoco.models.checkpoint import read_model_config
from vllm_yoco.tools import demo
from vllm_yoco.tools.cli import main


def test_a_checkout_has_the_trained_model_and_its_questions() -> None:
    questions = demo._read_questions(demo.QUESTIONS)
    assert len(questions) == demo.NUM_QUESTIONS
    assert all(len(prompt) > 1000 and answer.isdigit() for prompt, answer in questions)
    assert read_model_config(demo.TRAINED / "config.json").topology().num_consumers == 4
    assert demo._read_questions(None) == []


@pytest.mark.parametrize("line", ["{", '"text"', "{}", '{"prompt": "a"}', '{"prompt": "a", "answer": 3}'])
def test_a_line_that_is_no_question_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"prompt": "a", "answer": "b"}) + f"\n{line}\n")
    assert main(["demo", "--questions", str(file)]) == 2
    assert (
        f"--questions {file}: line 2 must be a JSON object with the texts prompt and answer" in capsys.readouterr().err
    )


def test_model_and_config_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--model", str(demo.TRAINED), "--config", "ced"])
    assert "--config: not allowed with argument --model" in capsys.readouterr().err


def test_summary_counts_answers_and_notes_scattered_times() -> None:
    config = read_model_config(demo.TRAINED / "config.json")
    truncation = resolve_truncation(YocoConfig(truncation="compact"), config.topology())
    off = demo.Answers(4096, [4096] * 4, [4.0, 4.1], ["token_id:1"], {"token_id:1": -1.5}, True, [True, True, False])
    compact = replace(off, rows=[129] * 4, first_token_seconds=[2.0, 2.1], right=[True, False, False])
    text = demo.summary(compact, off, config, truncation)
    assert "questions     1 of 3 answered right, 2 by off; 2 alike" in text and "2.00x; by FLOPs 3.69x" in text
    assert "note" not in text
    assert "note" in demo.summary(replace(compact, first_token_seconds=[2.0, 2.6]), off, config, truncation)
    assert "questions" not in demo.summary(replace(compact, right=[]), replace(off, right=[]), config, truncation)

"""examples/served_eval.py against a stand-in for the server that looks answers up, and the data of lm-eval's task."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.unit.test_train_ced import example

example("error_study")
served_eval = example("served_eval")
_, TEXT = served_eval.load_text()
TASK = served_eval.TASKS / served_eval.TASK
WRONG_EVERY = 5


class Oracle(BaseHTTPRequestHandler):
    """Answers a question with the digits of its record, every fifth one wrongly; choices come in reverse order."""

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choices = []
        for index, tokens in enumerate(request["prompt"]):
            content = bytes(tokens[1:])
            answer = content[content.index(b"@" + content[-3:]) + 4 :][: request["max_tokens"]].decode()
            text = "xyz" if index % WRONG_EVERY == 0 else answer
            choices.append({"index": index, "text": text, "finish_reason": "length", "logprobs": None})
        self.reply({"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": choices[::-1]})

    def reply(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Oracle)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{httpd.server_port}", command="vllm serve ...")
    httpd.shutdown()
    httpd.server_close()


def test_recall_counts_exact_answers_prompt_by_prompt(server: Any) -> None:
    verdicts = served_eval.ask_recall(server, 512, TEXT)
    assert len(verdicts) == 128 and served_eval.BATCH % WRONG_EVERY == 0
    assert verdicts == ("01111" * 26)[:128]


def test_command_serves_each_model_off_and_compact(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    @contextlib.contextmanager
    def running(arguments: list[str], **_: Any) -> Iterator[Any]:
        started.append(arguments)
        yield server

    monkeypatch.setattr(served_eval, "running_server", running)
    monkeypatch.setattr(served_eval, "LENGTHS", (512,))
    code = served_eval.main(["--keep-tokens", "140", "--json", str(tmp_path / "out.json")])
    assert code == 0
    modes = [arguments[arguments.index("--yoco-truncation") + 1] for arguments in started]
    assert modes == ["off", "compact"] * 2
    assert all(arguments[arguments.index("--yoco-keep-tokens") + 1] == "140" for arguments in started)
    results = json.loads((tmp_path / "out.json").read_text())
    assert list(results["models"]) == ["ced-byte-plain", "ced-byte-replay"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| ced-byte-plain"))
    assert "| recall, L=512 | 128 | 79.7% [" in line and line.endswith("| 0 / 0 |")


def test_table_counts_lost_and_gained_answers_of_both_kinds_of_task() -> None:
    tasks = {
        "off": {"recall, L=1": "1100", "lm-eval x": {"acc": 0.5, "verdicts": "10"}},
        "compact": {"recall, L=1": "1010", "lm-eval x": {"acc": 0.0, "verdicts": "00"}},
    }
    rows = served_eval.served_table({"keep_tokens": "min", "models": {"m": tasks}}).splitlines()
    assert rows[-2].endswith("| 1 / 1 |") and rows[-1].endswith("| 1 / 0 |")


def test_missing_lm_eval_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served_eval.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        served_eval.main(["--lm-eval"])
    assert stopped.value.code == 2
    assert "--lm-eval needs lm-eval, which is not installed: run pip install" in capsys.readouterr().err


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TASK.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]


def test_task_file_names_its_data() -> None:
    task = yaml.safe_load(TASK.with_suffix(".yaml").read_text(encoding="utf-8"))
    assert (task["task"], task["dataset_kwargs"]["data_files"]) == ("ced_recall", {"test": "ced_recall.jsonl"})


def test_recall_task_has_its_record_once_and_far_from_the_question() -> None:
    assert len(lines()) == served_eval.TASK_RECALL
    for line in lines():
        content = line["prompt"].encode()
        assert len(content) + 1 == served_eval.TASK_LENGTH
        assert content[-4:-3] == b"?" and content.count(b"@" + content[-3:]) == 1
        record = content.index(b"@" + content[-3:] + line["answer"].encode() + b";")
        assert len(content) - 4 - record == line["gap"] >= 264


def test_data_are_made_anew_the_same_from_the_same_text() -> None:
    import hashlib

    recorded = json.loads((served_eval.TASKS.parents[1] / "docs/error_study/results.json").read_text())["settings"]
    if hashlib.sha256(TEXT.tobytes()).hexdigest() != recorded["held_out_sha256"]:
        pytest.skip("this Python's pydoc_data.topics is another text than that of the committed data")
    assert served_eval.task_prompts(TEXT) == lines()

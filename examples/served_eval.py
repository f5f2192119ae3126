"""Task accuracy of a served model, ``off`` against ``compact``: recall over the completions API, and through lm-eval.

    python examples/served_eval.py                        # both models, recall only
    python examples/served_eval.py --lm-eval --json docs/error_study/served.json

The second also runs lm-eval, which ``pip install 'lm-eval[api]'`` brings, and leaves its results where
``error_study.py`` puts them into docs/error_study.md.

For every model and mode it starts ``vllm serve`` on a free loopback port and asks ``RECALL_PROMPTS`` questions of
each length through the OpenAI client, as token ids. They are the prompts of ``error_study.py``, which asks the dense
model: the shares must agree with what it found. With ``--lm-eval``, lm-eval's ``local-completions`` interface asks the
same server the task ``ced_recall`` in ``examples/lm_eval``, whose data lie there too: more such questions, answered by
generating. Its tasks of log-likelihoods cannot be compared: they need prompt log-probabilities, which a truncated
prefill does not have.

``--write-task`` makes these data anew. They come from ``pydoc_data.topics`` (PSF licence) of the Python that runs it.

Exit code: 0 if every answer arrived; 1 if a server failed; 128 + n after signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from error_study import MODELS, SERVED_MODES, recall_prompts, served_table  # the neighbouring examples
from train_ced import ANSWER_BYTES, Bytes, load_text, make_recall_example

from vllm_yoco.tools.report import progress
from vllm_yoco.tools.server import Interrupted, Server, ServerError, openai_client, running_server

LENGTHS = (1024,)
MAX_MODEL_LEN = 1280
BATCH = 20  # prompts in one request

TASKS = Path(__file__).parent / "lm_eval"
TASK = "ced_recall"
TASK_LENGTH, TASK_RECALL = 1024, 64

ENV = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


# The data of the tasks


def task_prompts(text: Bytes) -> list[dict[str, Any]]:
    """Lines of ced_recall.jsonl. A prompt has ``TASK_LENGTH`` tokens with the ``<bos>`` that the server adds."""
    rng = np.random.default_rng(0)
    recall: list[dict[str, Any]] = []
    while len(recall) < TASK_RECALL:
        example = make_recall_example(rng, TASK_LENGTH, text=text, gap=int(rng.integers(264, TASK_LENGTH - 4)))
        with contextlib.suppress(UnicodeDecodeError):  # the cut went through a character
            prompt = bytes(example.prompt[1:]).decode()
            recall.append({"prompt": prompt, "answer": bytes(example.answer).decode(), "gap": example.gap})
    return recall


def write_task(file: Path) -> None:
    lines = task_prompts(load_text()[1])
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


# Asking


@contextlib.contextmanager
def served(model: Path, mode: str, flags: Sequence[str], log: Path) -> Iterator[Server]:
    sizes = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--kv-cache-memory-bytes", "256M"]
    settings = ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--plugin", "vllm_yoco"]
    arguments = [str(model.resolve()), *sizes, *settings, "--yoco-truncation", mode, *flags]
    print(f"{model.name}, {mode}: starting the server, which takes half a minute or more on a CPU", flush=True)
    with running_server(arguments, log=log, env=ENV) as server:
        print(f"{model.name}, {mode}: {server.command}", flush=True)
        yield server


def ask_recall(server: Server, length: int, text: Bytes) -> str:
    """``1`` for each prompt answered exactly, ``0`` for the others."""
    client = openai_client(server.url)
    model = client.models.list().data[0].id
    prompts, answers = (tensor.tolist() for tensor in recall_prompts(text, length))
    verdicts = ""
    for first in progress(range(0, len(prompts), BATCH), f"recall, L={length}"):
        group = prompts[first : first + BATCH]
        answer = client.completions.create(model=model, prompt=group, max_tokens=ANSWER_BYTES, temperature=0)
        texts = [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]
        expected = [bytes(tokens).decode() for tokens in answers[first : first + BATCH]]
        verdicts += "".join("01"[ours == right] for ours, right in zip(texts, expected, strict=True))
    return verdicts


def ask_lm_eval(server: Server, model: Path) -> dict[str, Any]:
    """lm-eval's metric, its standard error, and the verdict on every prompt."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    arguments = {
        "base_url": f"{server.url}/v1/completions",
        "model": str(model.resolve()),
        "tokenizer_backend": "huggingface",
        "tokenizer": str(model.resolve()),
        "add_bos_token": True,
        "tokenized_requests": True,
        "max_length": MAX_MODEL_LEN,
        "num_concurrent": 4,
    }
    with contextlib.chdir(TASKS):  # the task file names its data relative to itself
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=[TASK],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            log_samples=True,
        )
    samples = sorted(found["samples"][TASK], key=lambda sample: int(sample["doc_id"]))
    return {
        "exact_match": float(found["results"][TASK]["exact_match,none"]),
        "stderr": float(found["results"][TASK]["exact_match_stderr,none"]),
        "verdicts": "".join(str(int(sample["exact_match"])) for sample in samples),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Recall and lm-eval tasks on a served model, off and compact.")
    parser.add_argument("--models", nargs="+", type=Path, default=MODELS, metavar="DIR", help="default: models/*")
    parser.add_argument("--keep-tokens", default="min", metavar="K", help="of compact (default: min)")
    parser.add_argument("--lm-eval", action="store_true", help="also ask through lm-eval")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the servers' logs here")
    parser.add_argument("--write-task", action="store_true", help="only make the data of lm-eval's task anew")
    options = parser.parse_args(arguments)
    if options.write_task:
        write_task(TASKS / f"{TASK}.jsonl")
        return 0
    if options.lm_eval and importlib.util.find_spec("lm_eval") is None:
        parser.error("--lm-eval needs lm-eval, which is not installed: run pip install 'lm-eval[api]', or leave it out")
    _, text = load_text()
    results: dict[str, Any] = {"keep_tokens": options.keep_tokens, "models": {}}
    try:
        with tempfile.TemporaryDirectory(prefix="served-eval-") as folder:
            # lm-eval's data set library caches there, and looks nothing up.
            os.environ.update({"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
            logs: Path = (options.log_dir or Path(folder)).resolve()
            logs.mkdir(parents=True, exist_ok=True)
            for model in options.models:
                entry: dict[str, Any] = {}
                for mode in SERVED_MODES:
                    flags = ["--yoco-keep-tokens", options.keep_tokens]
                    with served(model, mode, flags, logs / f"{model.name}-{mode}.log") as server:
                        found: dict[str, Any] = {f"recall, L={n}": ask_recall(server, n, text) for n in LENGTHS}
                        if options.lm_eval:
                            found[f"lm-eval {TASK}"] = ask_lm_eval(server, model)
                    entry[mode] = found
                results["models"][model.name] = entry
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except ServerError as error:
        print(f"{error.log_tail}\n{error}. Its last lines are above.", file=sys.stderr)
        return 1
    except Interrupted as error:
        return error.exit_code
    print(served_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

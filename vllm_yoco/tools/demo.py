"""``vllm-yoco demo``: one model, one long prompt, served with and without prefill truncation.

For ``compact`` and then ``off`` it starts ``vllm serve``, sends the prompt through the OpenAI client, and reads

    rows     from the consumer layers, which count what they run on (``vllm_yoco.worker_extension``)
    TTFT     the client's time from the request to the first streamed token, best of ``REPEATS``
    answers  how many questions with a known answer are answered right, if there are any

In a checkout the model is the trained one in ``models/ced-byte-plain``, the prompt is text that it was not trained on,
and the questions ask for records that lie in rows no consumer layer ran on under ``compact``. Elsewhere, or with
``--config``, weights are random and nothing is asked.

Prefix caching is off (``configs/serve/demo.yaml``), so every repetition computes the whole prompt. Requests that
are not measured come first, so that none of the measured ones pays for first use.

Exit code: 0 if each mode computed the rows that the plan says and every log-probability is finite; 1 if not, or
if a server failed (the end of its log is printed); 2 for wrong arguments; 128 + n after signal n.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics  # the Python Language Reference, part of Python; PSF licence
from typing import TYPE_CHECKING, Any

from vllm_yoco.config import CONFIG_KEY, Truncation, YocoConfig, resolve_truncation
from vllm_yoco.model_cost import Prefill, YocoCost
from vllm_yoco.presets import find_model_config, model_presets
from vllm_yoco.tools.arguments import input_file, model_dir
from vllm_yoco.tools.report import table
from vllm_yoco.tools.server import (
    Interrupted,
    Server,
    ServerError,
    interruptible,
    log_tail,
    openai_client,
    running_server,
)
from vllm_yoco.worker_extension import COMPUTED_ROWS, QUALNAME

if TYPE_CHECKING:
    from openai import OpenAI

    from vllm_yoco.models.config import YocoModelConfig

HELP = "serve a YOCO model with and without prefill truncation; compare rows, time and output"

MODES = ("compact", "off")
MAX_MODEL_LEN = 8192
REPEATS = 5
SCATTER = 1.25  # longest over shortest time of a mode, above which other work disturbed it
TOP = 20  # log-probabilities per token, as many as a server returns by default (--max-logprobs)

CHECKOUT = Path(__file__).parents[2]
TRAINED = CHECKOUT / "models" / "ced-byte-plain"
RANDOM = "ced"
QUESTIONS, NUM_QUESTIONS = CHECKOUT / "examples" / "lm_eval" / "ced_recall.jsonl", 20

PROMPT, WARM_UP = topics["typesseq"], topics["compound"]  # the former was held out when the model was trained
ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""The first offers ``collective_rpc`` over HTTP, without authentication; the server listens on loopback only."""

_LOG_PREFIX = re.compile(r"^(\(.*?pid=\d+\) )?([A-Z]+ \S+ \S+ )?(\[\S+\] )?\s*")


@dataclass(frozen=True)
class Answers:
    """What the server of one mode gave.

    Attributes:
        prompt_tokens: L as the server counted it.
        rows: rows that one consumer layer ran on for one prefill; an entry per layer, worker and repetition.
        first_token_seconds: TTFT of each repetition.
        tokens: the completion as ``token_id:N``, which no two tokens share, unlike their text.
        top_logprobs: of the first token, by token.
        finite: all log-probabilities returned were.
        right: for each question, whether it was answered right.
    """

    prompt_tokens: int
    rows: list[int]
    first_token_seconds: list[float]
    tokens: list[str]
    top_logprobs: dict[str, float]
    finite: bool
    right: list[bool] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group()
    default = f"{TRAINED.parent.name}/{TRAINED.name} of the checkout; random weights elsewhere"
    model.add_argument("--model", metavar="DIR", type=model_dir, help=f"checkpoint to serve (default: {default})")
    model.add_argument(
        "--config", help=f"random weights instead: a file or one of {', '.join(model_presets())} (default: {RANDOM})"
    )
    parser.add_argument("--keep-tokens", default="min", metavar="K", help="a number, min or exact (default: min)")
    parser.add_argument(
        "--prompt-file", metavar="FILE", type=input_file, help="text to send (default: Python's reference)"
    )
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=4096, help="cut it there (default: 4096)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=32, help="completion (default: 32)")
    parser.add_argument(
        "--questions",
        metavar="FILE",
        type=input_file,
        help="JSON lines with prompt and answer, which a greedy completion must start with (default: those of the"
        " trained model, none for another)",
    )
    parser.add_argument("--log-dir", metavar="DIR", type=Path, help="keep the servers' logs here")
    parser.add_argument("serve_flags", metavar="-- FLAG", nargs="*", help="further flags for vllm serve")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the module docstring.

    Raises:
        ValueError: for arguments that do not fit each other or the model.
    """
    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix="vllm-yoco-demo-") as folder:
            return _demo(args, Path(folder))
    except ServerError as error:
        print(f"{error.log_tail}\nvllm-yoco demo: {error}. Its last lines are above.", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"\nvllm-yoco demo: stopped by {error}, and its server with it.", file=sys.stderr)
        return error.exit_code


def _demo(args: argparse.Namespace, folder: Path) -> int:
    from vllm_yoco.models import checkpoint  # loads torch

    started = time.monotonic()
    given: Path | None = args.model or (TRAINED if args.config is None and TRAINED.is_dir() else None)
    shape: str = args.config or RANDOM
    model = given or folder / "model"
    config = checkpoint.read_model_config(given / "config.json" if given else find_model_config(shape))
    settings = {"truncation": "compact", "keep_tokens": args.keep_tokens}
    truncation = resolve_truncation(YocoConfig.from_additional_config({CONFIG_KEY: settings}), config.topology())
    max_model_len = min(MAX_MODEL_LEN, config.max_position_embeddings)
    if args.prompt_tokens < 1 or args.max_tokens < 1 or args.prompt_tokens + args.max_tokens > max_model_len:
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens} and --max-tokens {args.max_tokens}: must be positive, and together"
            f" at most the {max_model_len} tokens that the model is served for."
        )
    text = PROMPT if args.prompt_file is None else Path(args.prompt_file).read_text(encoding="utf-8")
    prompts = [_cut(words, args.prompt_tokens) for words in (WARM_UP, text)]
    questions = _read_questions(args.questions or (QUESTIONS if given == TRAINED and QUESTIONS.exists() else None))
    if given:
        _say(f"{given.name}, {checkpoint.parameter_count(config):,} parameters")
    else:
        _say(f"making {shape}, {checkpoint.parameter_count(config):,} random weights (its text will be noise)")
        checkpoint.save_checkpoint(model, config, checkpoint.random_state_dict(config, seed=0))
    logs: Path = (args.log_dir or folder).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    flags = [*_serve_flags(model, max_model_len), "--yoco-keep-tokens", str(args.keep_tokens), *args.serve_flags]
    answers = {
        mode: _serve_and_ask(
            mode, [*flags, "--yoco-truncation", mode], prompts, args.max_tokens, questions, logs / f"{mode}.log"
        )
        for mode in MODES
    }
    print("", summary(answers["compact"], answers["off"], config, truncation), sep="\n")
    problems = find_problems(answers, truncation)
    verdict = "; ".join(problems) or "rows as planned in every layer, all log-probabilities finite"
    print(f"{'FAILED' if problems else 'ok'}: {verdict} ({time.monotonic() - started:.0f} s)")
    return 1 if problems else 0


def _read_questions(file: str | Path | None) -> list[tuple[str, str]]:
    """At most ``NUM_QUESTIONS`` pairs of prompt and answer. ValueError for a line that is none."""
    if file is None:
        return []
    questions = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS], 1):
        try:
            question = json.loads(line)
            prompt, answer = question["prompt"], question["answer"]
        except (ValueError, KeyError, TypeError):
            prompt = answer = None
        if not (isinstance(prompt, str) and isinstance(answer, str) and prompt and answer):
            raise ValueError(
                f"--questions {file}: line {number} must be a JSON object with the texts prompt and answer."
            )
        questions.append((prompt, answer))
    return questions


def _serve_flags(model: Path, max_model_len: int) -> list[str]:
    import torch

    dtype = "auto" if torch.cuda.is_available() else "float32"  # many CPUs emulate bfloat16
    settings = files("vllm_yoco.configs") / "serve" / "demo.yaml"
    flags = [str(model.resolve()), "--config", str(settings), "--max-model-len", str(max_model_len)]
    return [*flags, "--dtype", dtype, "--worker-extension-cls", QUALNAME, "--plugin", "vllm_yoco"]


def _cut(text: str, num_tokens: int) -> str:
    """The first ``num_tokens``: each is a byte but ``<bos>``. (With another tokenizer they are fewer.)"""
    return text.encode()[: num_tokens - 1].decode(errors="ignore")


def _serve_and_ask(
    mode: str, flags: list[str], prompts: list[str], max_tokens: int, questions: list[tuple[str, str]], log: Path
) -> Answers:
    import openai

    def progress(seconds: float, line: str) -> None:
        _say(f"{mode}: starting, {seconds:.0f} s: {_LOG_PREFIX.sub('', line)[:80]}")

    _say(f"{mode}: starting the server, which takes half a minute or more on a CPU")
    with running_server(flags, log=log, env=ENV, progress=progress) as server:
        _say(f"{mode}: healthy after {server.start_seconds:.0f} s: {server.command}")
        try:
            return _ask(mode, server, openai_client(server.url), prompts, max_tokens, questions)
        except (openai.OpenAIError, OSError) as error:
            raise ServerError(f"{mode}: a request failed ({error})", log_tail(log)) from error


def _ask(
    mode: str,
    server: Server,
    client: OpenAI,
    prompts: list[str],
    max_tokens: int,
    questions: list[tuple[str, str]],
) -> Answers:
    warm_up, prompt = prompts
    body: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "temperature": 0.0,
        "logprobs": TOP,
        "extra_body": {"return_tokens_as_token_ids": True, "ignore_eos": True},
    }
    client.completions.create(prompt=warm_up, max_tokens=2, **body)
    answer = client.completions.create(prompt=prompt, max_tokens=max_tokens, **body)
    choice, usage = answer.choices[0], answer.usage
    _say(f"{mode}: completion {choice.text!r}")
    _say(f"{mode}: usage {usage.prompt_tokens:,} prompt + {usage.completion_tokens} completion tokens")
    seconds, rows = [], []
    for repeat in range(REPEATS):
        before, start = _computed_rows(server), time.perf_counter()
        # One token: what the consumer layers then count is the prefill and no decode step.
        stream = client.completions.create(prompt=prompt, max_tokens=1, stream=True, **body)
        arrivals = [time.perf_counter() for _ in stream]
        seconds.append(arrivals[0] - start)
        rows += [count - earlier for count, earlier in zip(_computed_rows(server), before, strict=True)]
        _say(f"{mode}: first token {repeat + 1} of {REPEATS} after {seconds[-1]:.2f} s")
    right = []
    for question, expected in questions:
        # A token is a byte at least, so that so many tokens hold the answer.
        reply = client.completions.create(
            model=body["model"], prompt=question, max_tokens=len(expected.encode()), temperature=0.0
        )
        right.append(reply.choices[0].text.startswith(expected))
    if questions:
        _say(f"{mode}: {sum(right)} of {len(right)} questions answered right")
    logprobs = choice.logprobs
    scores = [logprobs.token_logprobs, *(top.values() for top in logprobs.top_logprobs)]
    finite = all(score is not None and math.isfinite(score) for row in scores for score in row)
    return Answers(usage.prompt_tokens, rows, seconds, logprobs.tokens, logprobs.top_logprobs[0], finite, right)


def _computed_rows(server: Server) -> list[int]:
    answer = server.post("/collective_rpc", {"method": COMPUTED_ROWS})
    return [rows for worker in answer["results"] for rows in worker]


def find_problems(answers: dict[str, Answers], truncation: Truncation) -> list[str]:
    problems = []
    for mode, answer in answers.items():
        planned = Prefill(answer.prompt_tokens, mode, truncation.keep_tokens).consumer_rows
        if set(answer.rows) != {planned}:
            problems.append(f"{mode} computed {sorted(set(answer.rows))} rows in a consumer layer, not {planned}")
        if not answer.finite:
            problems.append(f"{mode} returned log-probabilities that are not finite")
    return problems


def summary(compact: Answers, off: Answers, config: YocoModelConfig, truncation: Truncation) -> str:
    length, pair = off.prompt_tokens, (compact, off)
    rows = [f"{'/'.join(f'{n:,}' for n in sorted(set(a.rows)))} of {length:,}" for a in pair]
    best, worst = ([pick(a.first_token_seconds) for a in pair] for pick in (min, max))
    prefill, cost = Prefill(length, "compact", truncation.keep_tokens), YocoCost(config)
    kept = cost.of(prefill)
    most = cost.of(Prefill(length)).total_flops / (kept.total_flops - kept.consumer_flops)
    equal = [ours == theirs for ours, theirs in zip(compact.tokens, off.tokens, strict=True)]
    agreeing = [*equal, False].index(False)
    both = compact.top_logprobs.keys() & off.top_logprobs.keys()
    furthest = max((abs(compact.top_logprobs[token] - off.top_logprobs[token]) for token in both), default=math.nan)
    lossless = "lossless" if truncation.lossless else f"approximate; lossless from {truncation.exact_keep_tokens}"
    lines = {
        "speed-up": f"{best[1] / best[0]:.2f}x; by FLOPs {cost.speedup_ceiling(prefill):.2f}x,"
        f" with consumer layers for free {most:.2f}x",
        "kept rows K": f"{truncation.keep_tokens} ({truncation.keep_tokens_rule}), {lossless}",
        "continuation": f"the first {agreeing} of {len(off.tokens)} greedy tokens agree",
        "first token": f"log-probabilities differ by at most {furthest:.2g} nat ({len(both)} tokens in both top {TOP})",
    }
    if compact.right:
        same = sum(ours == theirs for ours, theirs in zip(compact.right, off.right, strict=True))
        lines["questions"] = (
            f"{sum(compact.right)} of {len(compact.right)} answered right, {sum(off.right)} by off; {same} alike"
        )
    measured = [
        (f"rows in each of {truncation.topology.num_consumers} consumer layers", *rows),
        (f"time to first token, best of {REPEATS}", *(f"{seconds:.3f} s" for seconds in best)),
        ("  the worst of them", *(f"{seconds:.3f} s" for seconds in worst)),
    ]
    if any(slow > SCATTER * fast for slow, fast in zip(worst, best, strict=True)):
        lines["note"] = "times scatter: the machine was busy, so that their ratio means little"
    return "\n".join([table(("", *MODES), measured), "", *(f"{name:14}{text}" for name, text in lines.items())])


def _say(line: str) -> None:
    print(f"demo: {line}", flush=True)

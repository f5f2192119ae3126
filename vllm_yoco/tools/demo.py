"""``vllm-yoco demo``: one model, one long prompt, served with and without prefill truncation.

For ``compact`` and then ``off`` it starts ``vllm serve``, sends the prompt through the OpenAI client, and reads

    rows     from the consumer layers themselves, which count what they run on (``vllm_yoco.worker_extension``)
    TTFT     the client's time from the request to the first streamed token, best of ``REPEATS``

Prefix caching is off (``configs/serve/demo.yaml``): every repetition computes the whole prompt. A request with
another prompt comes first, so that none of the measured ones pays for first use.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics  # the Python Language Reference, in every Python; PSF licence
from typing import TYPE_CHECKING, Any

from vllm_yoco.config import Truncation, YocoConfig, resolve_truncation
from vllm_yoco.cost import query_rows_and_pairs
from vllm_yoco.presets import find_model_config, model_presets
from vllm_yoco.tools.server import Interrupted, Server, ServerError, interruptible, log_tail, running_server
from vllm_yoco.worker_extension import COMPUTED_ROWS, QUALNAME

if TYPE_CHECKING:
    from openai import OpenAI

    from vllm_yoco.models.config import YocoModelConfig

HELP = "serve a YOCO model with and without prefill truncation and compare rows, time and output"

MODES = ("compact", "off")
MAX_MODEL_LEN = 8192
REPEATS = 3
TOP = 20
"""Log-probabilities that a server returns per token, unless it is started with another --max-logprobs."""

PROMPT, WARM_UP = topics["specialnames"], topics["compound"]
ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""The first offers ``collective_rpc`` over HTTP, without authentication; the server listens on loopback only."""


@dataclass(frozen=True)
class Result:
    """What one mode gave.

    Attributes:
        prompt_tokens: L as the server counted it.
        rows: rows that a consumer layer ran on for one prefill; an entry per layer, worker and repetition.
        first_token_seconds: TTFT of each repetition.
        tokens: the completion as ``token_id:N``, which no two tokens share, unlike their text.
        top_logprobs: of the first token, by token.
    """

    prompt_tokens: int
    rows: list[int]
    first_token_seconds: list[float]
    tokens: list[str]
    top_logprobs: dict[str, float]
    finite: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", type=Path, help="checkpoint to serve (default: random weights)")
    parser.add_argument(
        "--config", default="ced", metavar="NAME", help=f"shape of the random model: {', '.join(model_presets())}"
    )
    parser.add_argument("--keep-tokens", default="min", metavar="K", help="a number, min or exact (default: min)")
    parser.add_argument("--prompt-file", metavar="FILE", type=Path, help="text to send (default: Python's reference)")
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=4096, help="its length (default: 4096)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=32, help="completion (default: 32)")
    parser.add_argument("--log-dir", metavar="DIR", type=Path, help="keep the servers' logs here")
    parser.add_argument("serve_flags", metavar="-- FLAG", nargs="*", help="further flags for both vllm serve")


def run(args: argparse.Namespace) -> int:
    """0 if the rows were those of the plan and every log-probability finite; 1 if not, or without a server.

    Raises:
        ValueError: for arguments that do not fit each other or the model.
    """
    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix="vllm-yoco-demo-") as folder:
            return _demo(args, Path(folder))
    except ServerError as error:
        print(f"{error.log_tail}\nvllm-yoco demo: {error}; above are its last lines.", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"\nvllm-yoco demo: stopped by {error}, and the server with it.", file=sys.stderr)
        return error.exit_code


def _demo(args: argparse.Namespace, folder: Path) -> int:
    from vllm_yoco.models import checkpoint  # loads torch

    started = time.monotonic()
    if args.model is None:
        config = checkpoint.read_model_config(find_model_config(args.config))
        _say(f"creating {args.config}: {checkpoint.parameter_count(config):,} random weights (the text will be noise)")
        args.model = folder / "model"
        checkpoint.save_checkpoint(args.model, config, checkpoint.random_state_dict(config, seed=0))
    else:
        config = checkpoint.YocoModelConfig.from_pretrained(args.model)
    settings = YocoConfig.from_additional_config({"yoco": {"truncation": "compact", "keep_tokens": args.keep_tokens}})
    truncation = resolve_truncation(settings, config.topology())
    max_model_len = min(MAX_MODEL_LEN, config.max_position_embeddings)
    if not 0 < args.prompt_tokens <= max_model_len - args.max_tokens or args.max_tokens < 1:
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens} + --max-tokens {args.max_tokens}: must be positive and at most"
            f" {max_model_len} together, for which this model is served."
        )
    text = PROMPT if args.prompt_file is None else args.prompt_file.read_text(encoding="utf-8")
    logs = args.log_dir or folder
    logs.mkdir(parents=True, exist_ok=True)
    results = {}
    for mode in MODES:
        flags = ["--plugin", "vllm_yoco", "--yoco-truncation", mode, "--yoco-keep-tokens", str(args.keep_tokens)]
        results[mode] = _measure(
            mode,
            [*_serve_arguments(args.model, max_model_len), *flags, *args.serve_flags],
            [_cut(WARM_UP, args.prompt_tokens), _cut(text, args.prompt_tokens)],
            args.max_tokens,
            logs.resolve() / f"{mode}.log",
        )
    print("\n" + table(results["compact"], results["off"], config, truncation))
    problems = find_problems(results, truncation)
    verdict = "; ".join(problems) or "rows as planned, every log-probability finite"
    print(f"{'FAILED: ' if problems else 'ok: '}{verdict} ({time.monotonic() - started:.0f} s)")
    return 1 if problems else 0


def _serve_arguments(model: Path, max_model_len: int) -> list[str]:
    import torch

    dtype = "auto" if torch.cuda.is_available() else "float32"  # bfloat16 is emulated on many CPUs
    settings = files("vllm_yoco.configs") / "serve" / "demo.yaml"
    arguments = [str(model.resolve()), "--config", str(settings), "--max-model-len", str(max_model_len)]
    return [*arguments, "--dtype", dtype, "--worker-extension-cls", QUALNAME]


def _cut(text: str, num_tokens: int) -> str:
    """``num_tokens`` of text: a token is a byte, and ``<bos>`` is one too. (Other tokenizers make it shorter.)"""
    return text.encode()[: num_tokens - 1].decode(errors="ignore")


def _measure(mode: str, arguments: list[str], prompts: list[str], max_tokens: int, log: Path) -> Result:
    import openai

    warm_up, prompt = prompts
    _say(f"{mode}: starting the server")
    with running_server(arguments, log=log, env=ENV, progress=lambda line: _say(f"{mode}: {line}")) as server:
        _say(f"{mode}: healthy after {server.start_seconds:.0f} s: {server.command}")
        client = openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=600,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy to loopback
        )
        try:
            return _ask(mode, server, client, warm_up, prompt, max_tokens)
        except (openai.OpenAIError, OSError) as error:
            raise ServerError(f"{mode}: the request failed ({error})", log_tail(log)) from error


def _ask(mode: str, server: Server, client: OpenAI, warm_up: str, prompt: str, max_tokens: int) -> Result:
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
    _say(f"{mode}: usage: {usage.prompt_tokens:,} prompt + {usage.completion_tokens} completion tokens")
    seconds, rows = [], []
    for repeat in range(REPEATS):
        before, start = _computed_rows(server), time.perf_counter()
        # One token: what the consumer layers count is then the prefill and no decode step.
        stream = client.completions.create(prompt=prompt, max_tokens=1, stream=True, **body)
        chunks = [(time.perf_counter() - start, chunk) for chunk in stream]
        seconds.append(chunks[0][0])
        rows += [after - counted for after, counted in zip(_computed_rows(server), before, strict=True)]
        _say(f"{mode}: first token {repeat + 1} of {REPEATS} after {seconds[-1]:.2f} s")
    top = choice.logprobs.top_logprobs[0]
    scores = [*choice.logprobs.token_logprobs, *top.values()]
    return Result(
        prompt_tokens=usage.prompt_tokens,
        rows=rows,
        first_token_seconds=seconds,
        tokens=choice.logprobs.tokens,
        top_logprobs=top,
        finite=all(score is not None and math.isfinite(score) for score in scores),
    )


def _computed_rows(server: Server) -> list[int]:
    answer = server.post("/collective_rpc", {"method": COMPUTED_ROWS})
    return [rows for worker in answer["results"] for rows in worker]


def planned_rows(prompt_tokens: int, truncation: Truncation, mode: str) -> tuple[int, int]:
    """Rows and visible window pairs of one consumer layer for a prompt in one chunk."""
    return query_rows_and_pairs(
        q=prompt_tokens,
        k=prompt_tokens,
        is_prompt=True,
        full_len=prompt_tokens,
        swa_valid_start=0,
        window=truncation.topology.consumer_window,
        mode=mode,
        keep_tokens=truncation.keep_tokens,
    )


def find_problems(results: dict[str, Result], truncation: Truncation) -> list[str]:
    problems = []
    for mode, result in results.items():
        planned, _ = planned_rows(result.prompt_tokens, truncation, mode)
        if set(result.rows) != {planned}:
            problems.append(f"{mode} computed {result.rows} rows, planned are {planned} in each layer")
        if not result.finite:
            problems.append(f"{mode} returned log-probabilities that are not finite")
    return problems


def prefill_flops(config: YocoModelConfig, prompt_tokens: int, rows: int, window_pairs: int) -> int:
    """FLOPs of one prefill when each consumer layer runs on the last ``rows`` rows: matrix products and attention.

    Embedding, norms and the one row of ``lm_head`` are left out.
    """
    from vllm_yoco.models.checkpoint import parameter_shapes

    topology, length = config.topology(), prompt_tokens
    flops = 0
    for name, shape in parameter_shapes(config).items():
        if name.startswith("model.layers.") and len(shape) == 2:
            # Producers run on every row, and so does the projection of global KV.
            every_row = not topology.is_consumer(int(name.split(".")[2])) or ".self_attn.k_" in name
            every_row |= ".self_attn.v_" in name
            flops += 2 * math.prod(shape) * (length if every_row else rows)
    pairs = 0
    for layer in range(topology.num_layers):
        if topology.is_consumer(layer):
            pairs += rows * (2 * length - rows + 1) // 2 + window_pairs * topology.has_swa(layer)
        else:
            reach = min(length, config.producer_window(layer) or length)
            pairs += reach * (2 * length - reach + 1) // 2
    return flops + 4 * config.num_attention_heads * config.head_dim * pairs


def table(compact: Result, off: Result, config: YocoModelConfig, truncation: Truncation) -> str:
    length, layers = off.prompt_tokens, truncation.topology.num_consumers
    most = prefill_flops(config, length, *planned_rows(length, truncation, "off"))
    ceiling = most / prefill_flops(config, length, 0, 0)
    expected = most / prefill_flops(config, length, *planned_rows(length, truncation, "compact"))
    fastest = [min(result.first_token_seconds) for result in (compact, off)]
    same = next((i for i, (a, b) in enumerate(zip(compact.tokens, off.tokens)) if a != b), len(off.tokens))
    common = compact.top_logprobs.keys() & off.top_logprobs.keys()
    furthest = max((abs(compact.top_logprobs[t] - off.top_logprobs[t]) for t in common), default=math.nan)
    rows = [("", *MODES)]
    rows += [("rows per consumer layer", *(f"{max(r.rows):,} of {length:,}" for r in (compact, off)))]
    rows += [(f"rows of {layers} consumer layers", *(f"{max(r.rows) * layers:,}" for r in (compact, off)))]
    rows += [(f"first token, best of {REPEATS}", *(f"{seconds:.2f} s" for seconds in fastest))]
    kept = f"K={truncation.keep_tokens} ({truncation.keep_tokens_rule})"
    lossless = "lossless" if truncation.lossless else f"approximate, lossless from K={truncation.exact_keep_tokens}"
    return "\n".join(
        [
            *(f"{name:28}{left:>18}{right:>18}" for name, left, right in rows),
            "",
            f"speed-up      {fastest[1] / fastest[0]:.2f}x; by FLOPs {expected:.2f}x at {kept}, at most {ceiling:.2f}x"
            f" (consumer layers free) at L={length:,}",
            f"continuation  {same} of {len(off.tokens)} greedy tokens agree before the first difference"
            if same < len(off.tokens)
            else f"continuation  all {same} greedy tokens agree",
            f"first token   log-probabilities differ by at most {furthest:.2g} ({len(common)} tokens in both top {TOP})",
            f"expected      {lossless}",
        ]
    )


def _say(line: str) -> None:
    print(f"demo: {line}", flush=True)

"""``vllm-yoco error``: what truncated prefill changes in a model's output, over K, position and layer.

Prompts and continuation are the same for ``off`` and every K: the continuation is the greedy one of ``off``, or the
one that the prompt file gives. No labels are needed. Errors are those of truncation against ``off``:

    KL           KL(off || truncated) over the vocabulary, nats
    |delta|      difference of log-probabilities over the vocabulary, nats; largest, and mean over all tokens
    top-1        share of positions with the same likeliest token
    perplexity   of the continuation; on greedy ones of ``off``, small by construction
    divergence   step at which free-running greedy decoding first differs

and, with ``--backend reference``, per consumer layer the relative error of its window KV and of its hidden rows
after the prompt. Where nothing may change (K >= exact, prompts of up to K tokens), it is checked that nothing does.

MODEL may be the config of a small DeepSeek-V4.1 model: random weights in the dense float32 model of its layers.

JSON (``--json``, or report.json in ``--out``):

    command, version, ok, model, prompt_tokens [L], continuation (off | given), continuation_tokens [J per prompt],
    computed_by {backend, dtype, device or runner}, window, exact, limit (nats, for what must not change), notes
    points     [{keep_tokens, rule, cut (prompts longer than K), kl_mean, kl_max, delta_mean, delta_max, top1,
               perplexity_off, perplexity, diverged, divergence [step or null per prompt], unchanged_max (largest
               |delta| where nothing may change, null if nowhere), kl_at, delta_mean_at, delta_max_at, top1_at
               [by position, over prompts], layers, first_changed (first layer with one: {layer, row}, or null)}]
    layers     [{layer, swa_kv, swa_kv_window (the last W rows, which decode reads), hidden, hidden_last (the last
               row): relative errors, mean over the prompts that are cut; first_changed (lowest of the last W rows
               whose KV changed, counted from L: -1 is the last; null: none)}] in order of layers; null without
               --backend reference, or where no prompt is cut

Exit code: 0; 1 if something changed that must not, or an engine failed; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_yoco.config import Truncation
from vllm_yoco.tools import arguments
from vllm_yoco.tools.check_inputs import (
    MODEL_HELP,
    PROMPTS_HELP,
    SHARED_PARAMETERS,
    Prompt,
    kv_cache_bytes,
    open_model,
    random_prompts,
    read_deepseek_v41,
    read_prompts,
    resolve_keeps,
)
from vllm_yoco.tools.engine_generate import engine_facts
from vllm_yoco.tools.engine_process import (
    RUNNERS,
    EngineError,
    EngineHost,
    EngineSpec,
    add_engine_flags,
    engine_options,
)
from vllm_yoco.tools.error_backends import Backend, EngineBackend, ReferenceBackend
from vllm_yoco.tools.error_report import summary, write_report
from vllm_yoco.tools.error_study import measure
from vllm_yoco.tools.report import add_json_argument, emit, make_report_folder

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig
    from vllm_yoco.models.deepseek_v41_reference import V41Config

HELP = "measure what truncation changes in a model's output, over K, position and layer"

SWEEP_POINTS = 6
RANDOM_PROMPTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--prompts", metavar="FILE", type=arguments.input_file, help=f"instead of random tokens: {PROMPTS_HELP}"
    )
    parser.add_argument("--keep-tokens", metavar="K,K...", help="numbers, min, exact (default: from min to exact)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=32, help="continuation (default: 32)")
    parser.add_argument("--max-prompt-tokens", metavar="N", type=int, help="use the end of longer prompts")
    parser.add_argument("--backend", choices=("auto", "reference", "engine"), default="auto", help="default: by size")
    parser.add_argument("--runner", choices=RUNNERS, default="auto", help="engine: vLLM's model runner")
    parser.add_argument("--dtype", help="engine: auto or a dtype (default: float32 on a CPU, auto on a GPU)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of random prompts and weights (default: 0)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write report.json, report.md and plots there")
    add_json_argument(parser)
    add_engine_flags(parser, "engine: ")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the module docstring.

    Raises:
        ValueError: for arguments that do not fit each other or the model, or --out without matplotlib.
        OSError: for a file that cannot be read or written.
    """
    if args.max_tokens < 1 or (args.max_prompt_tokens is not None and args.max_prompt_tokens < 1):
        raise ValueError("--max-tokens and --max-prompt-tokens must be 1 or more.")
    engine_options(args.engine_flags)  # before minutes of work
    if args.out is not None:
        make_report_folder(args.out)
    with _open(args) as (directory, config):
        truncations = _sweep(args.keep_tokens, config)
        prompts = _prompts(args, directory, config, truncations)
        try:
            with _backend(args, directory, config, truncations, prompts) as backend:
                results = measure(backend, prompts, truncations, args.max_tokens)
        except EngineError as error:
            print(f"{error.details}\nvllm-yoco error: {error}. Details are above.", file=sys.stderr)
            return 1
    results = {"ok": results.pop("ok"), "model": args.model, **results}
    text = summary(results)
    emit("error", text, results, args.json)
    if args.out is not None:
        write_report(args.out, text, results)
    return 0 if results["ok"] else 1


@contextmanager
def _open(args: argparse.Namespace) -> Iterator[tuple[str, YocoModelConfig | V41Config]]:
    """The model; of DeepSeek-V4.1 a config, which gets random weights when the backend is made."""
    config = read_deepseek_v41(args.model)
    if config is None:
        with open_model(args.model, args.seed) as opened:
            yield opened
        return
    if args.backend == "engine":
        raise ValueError("--backend engine: a DeepSeek-V4.1 config has no weights to serve. Use --backend reference.")
    yield args.model, config


def _sweep(keeps: str | None, config: YocoModelConfig | V41Config) -> list[Truncation]:
    """The K to try: those given, or some from min to exact, evenly spaced on a logarithmic scale."""
    topology = config.topology()
    if keeps is None:
        ends = resolve_keeps("min,exact", topology)
        spaced = np.geomspace(ends[0].keep_tokens, ends[-1].keep_tokens, SWEEP_POINTS).round().astype(int)
        keeps = ",".join(["min", "exact", *map(str, spaced)])
    return resolve_keeps(keeps, topology)


def _prompts(
    args: argparse.Namespace, directory: str, config: YocoModelConfig | V41Config, truncations: Sequence[Truncation]
) -> list[Prompt]:
    room = config.max_position_embeddings - args.max_tokens
    longest = min(args.max_prompt_tokens or room, room)
    if longest < 1:
        raise ValueError(f"--max-tokens {args.max_tokens}: the model has room for {config.max_position_embeddings}.")
    if args.prompts:
        return read_prompts(args.prompts, directory, config.vocab_size, longest)
    keep, window = truncations[-1].keep_tokens, config.topology().consumer_window
    lengths = [min(longest, keep + window * step + 1 + step) for step in range(1, RANDOM_PROMPTS + 1)]
    return random_prompts(sorted(set(lengths)), config.vocab_size, args.seed)


@contextmanager
def _backend(
    args: argparse.Namespace,
    directory: str,
    config: YocoModelConfig | V41Config,
    truncations: Sequence[Truncation],
    prompts: Sequence[Prompt],
) -> Iterator[Backend]:
    from vllm_yoco.models.checkpoint import parameter_count
    from vllm_yoco.models.deepseek_v41_reference import DenseV41, V41Config

    if isinstance(config, V41Config):
        yield ReferenceBackend(DenseV41.random(config, args.seed), max_keep=truncations[-1].keep_tokens)
        return

    small = parameter_count(config) <= SHARED_PARAMETERS
    if args.backend == "reference" or (args.backend == "auto" and small):
        import torch

        from vllm_yoco.models.reference import DenseYoco

        model = DenseYoco.from_pretrained(directory).to("cuda" if torch.cuda.is_available() else "cpu")
        yield ReferenceBackend(model, max_keep=truncations[-1].keep_tokens)
        return
    longest = max(len(prompt.tokens) for prompt in prompts)
    with EngineHost(args.runner, share=small) as host:
        spec = EngineSpec(
            model=directory,
            truncation="off",
            keep_tokens=truncations[0].keep_tokens,
            dtype=args.dtype or ("auto" if host.on_gpu else "float32"),
            max_model_len=longest + args.max_tokens + 1,
            chunk_tokens=max(2048, longest),
            kv_cache_bytes=kv_cache_bytes(config, longest + args.max_tokens + 1),
            flags=tuple(args.engine_flags),
        )
        yield EngineBackend(host, spec, host.run(spec, engine_facts)["dtype"])

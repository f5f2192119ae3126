"""``vllm-yoco check``: prove on this machine, with real engines, that truncation does what it says.

Level 1, metadata. In every step of every engine: the rows that the consumer layers run on, the window keys that each
row sees, the cells it writes and the global KV, decoded from what the attention kernels get (``check_trace``), equal
the plan (``vllm_yoco.plan``); and those of ``mask`` and ``compact`` equal each other.

Level 2, values. Along one continuation, forced on every engine, log-probabilities over the whole vocabulary agree:

    mask = compact                at every K, chunk size, prompt and position
    chunk sizes                   off, mask and compact, each against itself in other chunks
    K = exact  = off              at the smallest lossless K
    L <= K     = off              prompts that lose no row
    dense float32 reference       off, mask and compact (models of up to REFERENCE_PARAMETERS, float32 engines)

JSON (``--json``): command, version, ok, model, engine {runner, device, dtype, backends, block_size}, window, exact,
keep_tokens [K], chunk_tokens, prompt_tokens [L], continuation_tokens, metadata [{check, values, mismatches, where}],
values [{check, ok, tables, positions, values, largest, mean, limit, where, top_changed}], effect (largest
|delta log-probability| of the smallest K against off; null if nothing was dropped), recomputed_rows (after
preemptions, all runs), problems, notes.

Engines run eagerly, so that hooks see every step: what CUDA graphs replay is not looked at.

Exit code: 0 if everything agrees; 1 if not, or if an engine failed; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_yoco.tools import arguments
from vllm_yoco.tools.check_inputs import (
    MODEL_HELP,
    PROMPTS_HELP,
    SHARED_PARAMETERS,
    kv_cache_bytes,
    open_model,
    random_prompts,
    read_prompts,
    resolve_keeps,
)
from vllm_yoco.tools.check_study import Report, Study, run_study
from vllm_yoco.tools.engine_process import (
    RUNNERS,
    EngineError,
    EngineHost,
    EngineSpec,
    add_engine_flags,
    engine_options,
)
from vllm_yoco.tools.report import Number, add_json_argument, emit, table

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig

HELP = "prove with real engines that mask and compact do what the plan says and compute the same"

REFERENCE_PARAMETERS = 50_000_000
MEANING = (
    "Equality of mask and compact proves that dropping the rows changes nothing beyond the narrowed visibility; what"
    " the narrowing itself costs in quality it does not say: vllm-yoco error measures that."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--runner", choices=RUNNERS, default="auto", help="vLLM's model runner (default: its choice)")
    parser.add_argument(
        "--prompts", metavar="FILE", type=arguments.input_file, help=f"instead of random tokens: {PROMPTS_HELP}"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of random prompts and weights (default: 0)")
    parser.add_argument("--keep-tokens", metavar="K,K...", help="numbers, min, exact (default: min, between, exact)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=6, help="continuation (default: 6)")
    parser.add_argument(
        "--max-prompt-tokens", metavar="N", type=int, default=1024, help="no longer prompts (default: 1024)"
    )
    parser.add_argument("--dtype", help="auto or a dtype (default: float32 on a CPU, auto on a GPU)")
    parser.add_argument(
        "--reference", action=argparse.BooleanOptionalAction, help="compare with the dense float32 model as well"
    )
    parser.add_argument("--quick", action="store_true", help="fewer lengths, K and chunk sizes")
    add_json_argument(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the module docstring.

    Raises:
        ValueError: for arguments that do not fit each other or the model.
        OSError: for a file that cannot be read or written.
    """
    with open_model(args.model, args.seed) as (directory, config), _host(args, config) as host:
        study = plan_study(args, directory, config, host)
        try:
            report = run_study(host, study)
        except EngineError as error:
            print(f"{error.details}\nvllm-yoco check: {error}. Details are above.", file=sys.stderr)
            return 1
    emit("check", text(study, report), document(study, report), args.json)
    return 0 if report.ok else 1


def _host(args: argparse.Namespace, config: YocoModelConfig) -> EngineHost:
    from vllm_yoco.models.checkpoint import parameter_count

    return EngineHost(args.runner, share=parameter_count(config) <= SHARED_PARAMETERS)


def plan_study(args: argparse.Namespace, directory: str, config: YocoModelConfig, host: EngineHost) -> Study:
    """Prompts, K and chunk sizes for a model. Raises ValueError for arguments that do not fit it."""
    from vllm_yoco.models.checkpoint import parameter_count

    if args.max_tokens < 1 or args.max_prompt_tokens < 1:
        raise ValueError("--max-tokens and --max-prompt-tokens must be 1 or more.")
    engine_options(args.engine_flags)  # before minutes of work
    topology = config.topology()
    least, exact = resolve_keeps("min", topology)[0], resolve_keeps("exact", topology)[0]
    window, exact_keep = topology.consumer_window, exact.keep_tokens
    between = (least.keep_tokens + exact_keep) // 2 | 1
    default = "min,exact" if args.quick or not least.keep_tokens < between < exact_keep else f"min,{between},exact"
    truncations = resolve_keeps(args.keep_tokens or default, topology)
    longest = min(args.max_prompt_tokens, config.max_position_embeddings - args.max_tokens)
    if longest < 1:
        raise ValueError(f"--max-tokens {args.max_tokens}: the model has room for {config.max_position_embeddings}.")
    span = window or 24  # any, where there is no window
    odd_chunk = span + span // 2 + 1 | 1
    if args.prompts:
        prompts = read_prompts(args.prompts, directory, config.vocab_size, longest)
    else:
        keeps = [t.keep_tokens for t in truncations]
        lengths = _lengths(span, keeps, exact_keep, odd_chunk, longest, args.quick)
        prompts = random_prompts(lengths, config.vocab_size, args.seed)
    max_prompt = max(len(prompt.tokens) for prompt in prompts)
    chunks = [max(max_prompt, 16), odd_chunk] if args.quick else [max(max_prompt, 16), odd_chunk, span // 2 + 13]
    small = parameter_count(config) <= REFERENCE_PARAMETERS
    dtype = args.dtype or ("auto" if host.on_gpu else "float32")
    return Study(
        name=args.model,
        config=config,
        prompts=prompts,
        truncations=truncations,
        chunk_tokens=chunks,
        max_tokens=args.max_tokens,
        reference=small if args.reference is None else args.reference,
        spec=EngineSpec(
            model=directory,
            truncation="off",
            keep_tokens=least.keep_tokens,
            dtype=dtype,
            max_model_len=max_prompt + args.max_tokens + 1,
            chunk_tokens=max(chunks),
            kv_cache_bytes=kv_cache_bytes(config, max_prompt + args.max_tokens + 1),
            flags=tuple(args.engine_flags),
        ),
    )


def _lengths(span: int, keeps: Sequence[int], exact: int, chunk: int, longest: int, quick: bool) -> list[int]:
    """Prompt lengths around every place where a rule changes, and one past the lossless K."""
    lengths = {1, span, span + 1, keeps[0] + 1, exact + span + 1, min(longest, 3 * chunk + 2)}
    if not quick:
        lengths |= {2, span - 1, chunk, chunk + 1, 2 * chunk + 1, longest // 2 | 1, exact, exact + 2 * span + 7}
        lengths |= {keep + step for keep in keeps for step in (-1, 0, 1)}
    return sorted(length for length in lengths if 1 <= length <= longest)


def document(study: Study, report: Report) -> dict[str, Any]:
    """The JSON document of the module docstring, without its head."""
    return {
        "ok": report.ok,
        "model": study.name,
        "engine": report.engine,
        "window": study.topology.consumer_window,
        "exact": study.exact,
        "keep_tokens": study.keeps,
        "chunk_tokens": study.chunk_tokens,
        "prompt_tokens": [len(prompt.tokens) for prompt in study.prompts],
        "continuation_tokens": study.max_tokens,
        "metadata": [asdict(tally) for tally in report.tallies.values()],
        "values": [d.describe() for d in report.differences.values()],
        "effect": report.effect,
        "recomputed_rows": report.recomputed_rows,
        "problems": report.problems,
        "notes": report.notes,
    }


def text(study: Study, report: Report) -> str:
    """Tables for people."""
    engine = report.engine
    lengths = ", ".join(str(len(prompt.tokens)) for prompt in study.prompts)
    head = [
        f"{study.name}: runner {engine['runner'].upper()}, {engine['device']}, {engine['dtype']},"
        f" {', '.join(engine['backends'])}, blocks of {engine['block_size']} tokens",
        f"W {study.topology.consumer_window}; K {', '.join(map(str, study.keeps))} (exact: {study.exact});"
        f" steps of up to {', '.join(map(str, study.chunk_tokens))} tokens",
        f"L {lengths}; {study.max_tokens} more tokens, forced on every engine"
        + (f"; {report.recomputed_rows:,} rows again after preemptions" if report.recomputed_rows else ""),
    ]
    metadata = table(
        ("metadata", "values", "wrong", "first one wrong"),
        [(t.check, t.values, t.mismatches, t.where or "") for t in report.tallies.values()],
    )
    values = table(
        ("log-probabilities", "tables", "values", "largest", "mean", "limit", "top changed", "largest at"),
        [
            (d.check, d.tables, d.values, small(d.largest), small(d.mean), small(d.limit), d.top_changed, d.where or "")
            for d in report.differences.values()
        ],
    )
    wrong = [check for check, right in report.verdicts() if not right]
    verdict = (
        f"ok: {sum(t.values for t in report.tallies.values()):,} rows, keys and cells as planned,"
        f" {sum(d.values for d in report.differences.values()):,} log-probabilities within the limit"
        if report.ok
        else f"FAILED: {'; '.join([*wrong, *report.problems])}"
    )
    notes = [textwrap.fill(f"note: {note}", 120) for note in report.notes]
    return "\n".join([*head, "", metadata, "", values, "", *notes, textwrap.fill(MEANING, 120), verdict])


def small(value: float) -> Number:
    """Two significant digits: ``3.5e-05``, and ``0`` for none at all."""
    return Number("0" if value == 0 else f"{value:.1e}")

"""Stage 4: what truncation saves on this GPU. off against compact in one process, in turns, bfloat16, random weights.

TTFT is the wall time of one request with one output token, from submission to its result, in an idle engine; the best
of the repeats and the worst are recorded. The ceiling is the ratio of FLOPs (vllm_yoco/model_cost.py), for the same
chunks. TPOT is the time between the first and the last of ``DECODE_TOKENS`` tokens, over their number less one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_kit.results import StageResult
from gpu_kit.settings import is_rehearsal, llm_options
from gpu_kit.stages import output_file

# About 7 G parameters, 14 GiB in bfloat16: matrix products of a prefill chunk fill an H200.
MODEL: dict[str, Any] = {
    "model_type": "yoco",
    "architectures": ["YocoForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "n_prefill_layer": 16,
    "kv_source_layers": [16, 24],
    "consumer_swa_layers": list(range(16, 32)),
    "sliding_window": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LENGTHS, CHUNK_TOKENS, REPEATS, DECODE_TOKENS, DECODE_LENGTH = (4096, 8192, 16384, 32768, 65536), 8192, 2, 129, 4096
KV_CACHE_BYTES = 12 * 2**30
if is_rehearsal():
    # Of the program only: nothing about speed can be read off these.
    MODEL |= {"dtype": "float32", "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "sliding_window": 24}
    MODEL |= {"num_hidden_layers": 4, "n_prefill_layer": 2, "kv_source_layers": [2], "consumer_swa_layers": [2, 3]}
    MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024}
    LENGTHS, CHUNK_TOKENS, REPEATS, DECODE_TOKENS, DECODE_LENGTH = (40,), 64, 1, 3, 16
    KV_CACHE_BYTES = 2**26
MODES = ("off", "compact")


def start_engine(model: Path, mode: str, *, graphs: bool) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {
        "dtype": MODEL["dtype"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": not graphs,
        "max_model_len": max(LENGTHS) + DECODE_TOKENS,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        # A part of the memory each: four engines share the GPU.
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "disable_log_stats": True,
        "additional_config": {"yoco": {"truncation": mode, "keep_tokens": "min"}},
    }
    return LLM(str(model), **(options | llm_options()))


def seconds(llm: Any, length: int, num_tokens: int) -> float:
    """Wall time of one request in an idle engine."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[(7 * i + length) % 256 for i in range(length)])
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    elapsed = time.perf_counter() - start
    if len(output.outputs[0].token_ids) != num_tokens:
        raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens instead of {num_tokens}")
    return elapsed


def time_prefill(engines: dict[str, Any], length: int, cost: Any, keep_tokens: int) -> dict[str, Any]:
    from vllm_yoco.model_cost import Prefill

    for llm in engines.values():
        seconds(llm, length, 1)  # kernels are compiled for this length
    taken: dict[str, list[float]] = {mode: [] for mode in engines}
    for _ in range(REPEATS):
        for mode, llm in engines.items():
            taken[mode].append(seconds(llm, length, 1))
    prefill = Prefill(length, "compact", keep_tokens, CHUNK_TOKENS)
    ratio, ceiling = min(taken["off"]) / min(taken["compact"]), cost.speedup_ceiling(prefill)
    flops = cost.of(Prefill(length, chunk_tokens=CHUNK_TOKENS)).total_flops
    return {
        "prompt_tokens": length,
        "chunk_tokens": CHUNK_TOKENS,
        "batch": 1,
        "ttft_s": {mode: [min(values), max(values)] for mode, values in taken.items()},
        "ratio": ratio,
        "ceiling_by_flops": ceiling,
        "ratio_over_ceiling": ratio / ceiling,
        "off_tflop_per_s": flops / min(taken["off"]) / 1e12,
    }


def time_decode(engines: dict[str, Any]) -> dict[str, Any]:
    tpot = {}
    for mode, llm in engines.items():
        seconds(llm, DECODE_LENGTH, 4)
        runs = [
            seconds(llm, DECODE_LENGTH, DECODE_TOKENS) - seconds(llm, DECODE_LENGTH, 1) for _ in range(max(REPEATS, 1))
        ]
        tpot[mode] = min(runs) / (DECODE_TOKENS - 1)
    return {"prompt_tokens": DECODE_LENGTH, "decode_tokens": DECODE_TOKENS, "batch": 1, "tpot_s": tpot}


def main(out: Path) -> int:
    result = StageResult(out, "speed")
    if is_rehearsal():
        result.fact(figures="none: a rehearsal, of the program only")
        from vllm_yoco.testing import runner_v2_cpu

        runner_v2_cpu.enable()
    with tempfile.TemporaryDirectory(prefix="yoco-gpu-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        measure(result, Path(folder))
    return 0 if result.finish() == "ok" else 1


def measure(result: StageResult, model: Path) -> None:
    from vllm_yoco.model_cost import YocoCost
    from vllm_yoco.models.checkpoint import parameter_count, read_model_config

    config = read_model_config(model / "config.json")
    keep_tokens = config.sliding_window + 1
    result.fact(model=MODEL, parameters=parameter_count(config), keep_tokens=keep_tokens)
    for graphs in (False,) if is_rehearsal() else (True, False):
        name = "graphs" if graphs else "eager"
        engines: dict[str, Any] = {}
        for mode in MODES:
            with result.check(f"engine start, {mode}, {name}"):
                engines[mode] = start_engine(model, mode, graphs=graphs)
        if len(engines) < len(MODES):
            continue
        with result.check(f"TPOT, {name}") as values:
            values.update(time_decode(engines))
        if graphs or is_rehearsal():
            # Prefill runs outside the graphs either way.
            for length in LENGTHS:
                with result.check(f"TTFT, L={length}") as values:
                    values.update(time_prefill(engines, length, YocoCost(config), keep_tokens))


if __name__ == "__main__":
    sys.exit(main(output_file()))

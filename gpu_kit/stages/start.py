"""Stage 1: what the machine is, whether everything imports, and whether an engine starts and answers."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_kit import bridges
from gpu_kit.results import StageResult
from gpu_kit.settings import is_rehearsal, llm_options, without_extensions
from gpu_kit.stages import output_file

MODULES = (
    "vllm",
    "vllm.platforms",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm._custom_ops",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.warmup",
    "vllm_yoco.plugin",
    "vllm_yoco.models.yoco",
    "vllm_yoco.models.state",
    "vllm_yoco.startup",
    "tests.engine.harness",
)
DISTRIBUTIONS = ("vllm", "vllm-yoco", "torch", "triton", "transformers", "numpy", "pydantic", "pytest")
PROMPT_TOKENS, KEEP, NUM_TOKENS = (60, 41, 3) if is_rehearsal() else (700, 71, 16)
PINNED_TYPES = ("int32", "int64", "float32", "uint8", "bool", "bfloat16")


def machine() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "cuda_of_torch": torch.version.cuda,
        "bridges": {b.name: b.reason for b in bridges.in_force()} if without_extensions() else {},
        "llm_options": llm_options(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["multiprocessors"] = properties.multi_processor_count
        facts["nvidia_smi"] = _nvidia_smi()
    return facts


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def check_pinned_views() -> None:
    """The device sees what the host writes into a pinned buffer, and the other way round.

    Raises:
        RuntimeError: it does not.
    """
    import torch
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    for name in PINNED_TYPES:
        dtype = getattr(torch, name)
        host = torch.zeros((3, 5), dtype=dtype, pin_memory=True)
        view = get_accelerator_view_from_cpu_tensor(host)
        if (view.shape, view.dtype, view.device.type) != (host.shape, dtype, "cuda"):
            raise RuntimeError(f"{name}: the view is {view.shape} {view.dtype} on {view.device}")
        host[1, 2] = 1
        if view.clone().cpu()[1, 2] != 1:
            raise RuntimeError(f"{name}: the device does not see what the host wrote")
        view[2, 4] = 1
        torch.cuda.synchronize()
        if host[2, 4] != 1 or view[0, 0] != 0:
            raise RuntimeError(f"{name}: the host does not see what the device wrote")


def bundled_modules() -> list[str]:
    """Top-level modules that this process has loaded from the bundle's folder."""
    site = str(Path(str(importlib.import_module("vllm").__file__)).parents[1])
    files = {name.split(".")[0]: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return sorted(name for name, file in files.items() if file.startswith(site + os.sep))


def cuda_dry_run(checkpoint: str) -> None:
    """What the CUDA platform looks up where there is none (cuda_dry_run.py).

    Raises:
        RuntimeError: it failed; has its output.
    """
    from vllm_yoco.testing import runner_v2_cpu

    interpreted = ("TRITON_INTERPRET", runner_v2_cpu.ENV)
    env = {name: value for name, value in os.environ.items() if name not in interpreted}
    command = [sys.executable, "-m", "gpu_kit.cuda_dry_run", checkpoint]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])


def start_engine(model: str, truncation: str) -> tuple[Any, float]:
    from vllm import LLM

    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1100,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 200,
        "block_size": 32,
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": True,
        "max_logprobs": -1,
        "additional_config": {"yoco": {"truncation": truncation, "keep_tokens": KEEP}},
    }
    start = time.perf_counter()
    llm = LLM(model, **(options | llm_options()))
    return llm, time.perf_counter() - start


def engine_facts(llm: Any) -> dict[str, Any]:
    """Runner, backends and device, as the engine has them."""
    from vllm_yoco.tools.engine_generate import _facts

    return dict(llm.collective_rpc(_facts)[0])


def answer(llm: Any) -> list[int]:
    """Greedy tokens of one prompt.

    Raises:
        RuntimeError: fewer tokens than asked for, or a log-probability that is not finite.
    """
    import math

    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[(7 * i) % 256 for i in range(PROMPT_TOKENS)])
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5, ignore_eos=True, detokenize=False)
    completion = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
    scores = [entry.logprob for row in completion.logprobs for entry in row.values()]
    if len(completion.token_ids) != NUM_TOKENS or not all(math.isfinite(score) for score in scores):
        raise RuntimeError(f"tokens {list(completion.token_ids)}, log-probabilities {scores}")
    return list(completion.token_ids)


def main(out: Path) -> int:
    result = StageResult(out, "start")
    if is_rehearsal():
        from vllm_yoco.testing import runner_v2_cpu

        runner_v2_cpu.enable()
    with result.check("machine"):
        result.fact(**machine())
    for module in MODULES:
        with result.check(f"import {module}"):
            importlib.import_module(module)
    if not is_rehearsal():
        with result.check("pinned host memory as a CUDA tensor"):
            check_pinned_views()
    model = tempfile.TemporaryDirectory(prefix="yoco-gpu-")
    checkpoint = ""
    with result.check("checkpoint"):
        from gpu_kit.checkpoint import small_checkpoint

        checkpoint = str(small_checkpoint(Path(model.name) / "ced-tiny"))
    if is_rehearsal() and without_extensions():
        with result.check("CUDA platform without a GPU: imports, configuration, model"):
            cuda_dry_run(checkpoint)
    for truncation in ("off", "compact"):
        llm = None
        with result.check(f"engine start, {truncation}") as values:
            llm, values["seconds_to_start"] = start_engine(checkpoint, truncation)
            values["engine"] = engine_facts(llm)
            if values["engine"]["runner"] != "v2":
                raise RuntimeError("expected Model Runner V2")
        if llm is not None:
            with result.check(f"generate, {truncation}") as values:
                values["tokens"] = answer(llm)
                start = time.perf_counter()
                answer(llm)
                values["seconds_second_time"] = time.perf_counter() - start
    if without_extensions():
        result.fact(modules_from_the_bundle=bundled_modules())
    model.cleanup()
    status = result.finish()
    return 0 if status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(output_file()))

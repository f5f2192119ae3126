"""One pass over DeepSeek-V4.1 steps, with kernels interpreted or compiled: ``python -m gpu_kit.v41_steps HOW FILE``.

The steps are those of tests/engine/deepseek_v41_step.py: vLLM's model state with this plugin's bound, its metadata
builders and its index and gather kernels. Both passes take vLLM's CPU platform, so that builders run the same code;
``compiled`` then runs every launch on the GPU (device_launch.py). Values are pickled, one entry a step.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from gpu_kit.settings import is_rehearsal

HOW = ("interpreted", "compiled")
KINDS = (
    ("off", "flashmla"),
    ("mask", "flashmla"),
    ("compact", "flashmla"),
    ("compact", "flashinfer"),
    ("mask", "base"),
)
"""Mode and builder."""

WINDOW, KEEP = 8, 12


def work() -> list[tuple[str, Any, list[Any]]]:
    """(name, rule, chunks): decodes, chunks below, across and above s_keep, prefix hits."""
    from tests.engine.deepseek_v41_step import Chunk, Rule

    mixed = [
        Chunk(prompt=30, start=33, length=1, prefill=False),
        Chunk(prompt=40, start=10, length=9),
        Chunk(prompt=40, start=20, length=20),
        Chunk(prompt=10, start=0, length=10),
        Chunk(prompt=60, start=40, length=20, replay_start=40),
        Chunk(prompt=60, start=52, length=8, replay_start=52),
    ]
    if is_rehearsal():
        return [("compact flashmla", Rule("compact", KEEP, WINDOW), mixed[:3])]
    return [(f"{mode} {builder}", Rule(mode, KEEP, WINDOW, builder=builder), mixed) for mode, builder in KINDS]


def take_cpu_platform() -> None:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()


def prepare(how: str) -> tuple[str, type]:
    """Set this process up; returns the device of the launches and the class of kernels."""
    if how == "interpreted" or is_rehearsal():
        os.environ["TRITON_INTERPRET"] = "1"
    if is_rehearsal():
        from vllm_yoco.testing import runner_v2_cpu

        runner_v2_cpu.enable(kernels=False)
    take_cpu_platform()
    from gpu_kit import bridges
    from gpu_kit.settings import without_extensions

    if without_extensions():
        bridges.apply()  # nothing imports the CUDA extension here
    from tests.engine import deepseek_v41_step

    if how == "interpreted" or is_rehearsal():
        from triton.runtime.interpreter import InterpretedFunction

        deepseek_v41_step.prepare_process()
        return "cpu", InterpretedFunction
    from triton.runtime import JITFunction
    from vllm.v1.worker.gpu import buffer_utils

    buffer_utils.is_uva_available = lambda: False
    # The interpreter's shortcuts stay out: they are patches of Triton itself.
    deepseek_v41_step.prepare_process = lambda: None
    return "cuda", JITFunction


def main(how: str, out: Path) -> int:
    device, function_class = prepare(how)
    from gpu_kit.device_launch import launches_on
    from tests.engine.deepseek_v41_step import Chunk, Rule, gathered_values, run_step

    found: dict[str, Any] = {}
    for name, rule, chunks in work():
        if how == "interpreted":
            found[name] = {"step": run_step(rule, chunks, 3)}
        else:
            with launches_on(device, function_class) as kernels:
                found[name] = {"step": run_step(rule, chunks, 3)}
            found[name]["kernels"] = sorted(set(kernels))
        out.write_bytes(pickle.dumps(found))
    rule, chunks = Rule("compact", KEEP, WINDOW), [Chunk(40, 20, 20), Chunk(60, 52, 8, 52)]
    if how == "interpreted":
        found["gather"] = {"values": gathered_values(None, rule, chunks)}
    else:
        with launches_on(device, function_class) as kernels:
            found["gather"] = {"values": gathered_values(None, rule, chunks)}
        found["gather"]["kernels"] = sorted(set(kernels))
    out.write_bytes(pickle.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))

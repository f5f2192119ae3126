"""Stage 5: DeepSeek-V4.1's builders and gather kernels compiled by Triton, against the interpreter's results.

Both run over the same steps in processes of their own (gpu_kit/v41_steps.py), and everything that they give must be
equal: these are integers, and copies of bfloat16 values.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpu_kit.results import ABSENT, StageResult
from gpu_kit.settings import is_rehearsal
from gpu_kit.stages import output_file
from gpu_kit.v41_steps import HOW

SECONDS = 50
"""For both together, a little less than the stage has."""

NEEDS = ("vllm_yoco.deepseek_v41", "tests.engine.deepseek_v41_step")


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Where two results differ, as paths; empty when they are equal."""
    if dataclasses.is_dataclass(left):
        left, right = vars(left), vars(right)
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{where}: keys {sorted(left)} and {sorted(right)}"]
        return [found for key in left for found in differences(left[key], right[key], f"{where}.{key}")]
    if np.shape(left) != np.shape(right):
        return [f"{where}: shapes {np.shape(left)} and {np.shape(right)}"]
    unequal = np.asarray(left) != np.asarray(right)
    return [f"{where}: {int(unequal.sum())} of {unequal.size} values"] if unequal.any() else []


def main(out: Path) -> int:
    result = StageResult(out, "deepseek_v41")
    if is_rehearsal():
        result.fact(compiled="nothing: a rehearsal interprets both, the second through copies of all tensors")
    missing = [module for module in NEEDS if not exists(module)]
    if missing:
        result.add("DeepSeek-V4.1 adapter", ABSENT, 0.0, error=f"not in this project: {', '.join(missing)}")
        result.finish()
        return 0
    with tempfile.TemporaryDirectory(prefix="yoco-gpu-") as folder:
        compare(result, Path(folder))
    return 0 if result.finish() == "ok" else 1


def compare(result: StageResult, folder: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    running = {
        how: subprocess.Popen(
            [sys.executable, "-m", "gpu_kit.v41_steps", how, str(folder / how)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for how in HOW
    }
    deadline = time.monotonic() + (SECONDS if not is_rehearsal() else 20 * SECONDS)
    for how, process in running.items():
        with result.check(f"{how}, all steps"):
            try:
                output, _ = process.communicate(timeout=max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                raise RuntimeError(f"not done after {SECONDS} s; what it had done is compared") from None
            finally:
                # Written after every step, so that there is something to compare whatever happens to the rest.
                if (folder / how).exists():
                    found[how] = pickle.loads((folder / how).read_bytes())
            print(output)
            if process.returncode:
                raise RuntimeError(f"exit code {process.returncode}: ...{output[-3000:]}")
    interpreted, compiled = (found.get(how, {}) for how in HOW)
    for name in interpreted.keys() & compiled.keys():
        with result.check(f"equal, {name}") as values:
            kernels = compiled[name].pop("kernels")
            values["kernels"] = kernels
            if not kernels:
                raise RuntimeError("no kernel was launched")
            wrong = differences(interpreted[name], compiled[name])
            if wrong:
                raise RuntimeError("; ".join(wrong))


if __name__ == "__main__":
    sys.exit(main(output_file()))

"""Run vLLM's Model Runner V2 on a CPU.

V2 (``vllm/v1/worker/gpu/``) launches Triton kernels for its bookkeeping, and vLLM turns Triton off on a CPU
without a Triton CPU backend. Three things bring it up:

1. ``TRITON_INTERPRET=1``: every ``@triton.jit`` function becomes an interpreted Python function.
2. A stand-in entry ``triton.backends.backends["cpu"]`` with an active driver, so that vLLM believes in Triton. It
   must be there before ``vllm.triton_utils`` is imported. Nothing is ever compiled through it.
3. NumPy/PyTorch replacements for the kernels of ordinary steps (``v2_kernels``), registered through vLLM's own
   dispatcher. The interpreter stays on for kernels that have no replacement.

2 and 3 wait until the modules they change are imported, and cost nothing in a process that imports none of them.
Child processes get the same from ``site/sitecustomize.py`` through ``PYTHONPATH``.

In a program or test, before vLLM is imported::

    from vllm_yoco.testing import runner_v2_cpu
    runner_v2_cpu.enable()

From a shell::

    python -m vllm_yoco.testing.runner_v2_cpu serve MODEL ...     # any `vllm` sub-command
    VLLM_YOCO_V2_CPU=1 PYTHONPATH=.../vllm_yoco/testing/site vllm serve MODEL ...
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_yoco.post_import import after_import

ENV = "VLLM_YOCO_V2_CPU"
"""``1`` turns V2 on the CPU on in every process that sees it, ``interpret`` does so without replacements."""

ENV_ASYNC = "VLLM_YOCO_V2_CPU_ASYNC"
"""``1`` keeps asynchronous scheduling, which is the default on a GPU and which vLLM switches off on a CPU."""

SITE = Path(__file__).resolve().parent / "site"

_active = False


def environment(
    base: Mapping[str, str] | None = None, *, kernels: bool = True, async_scheduling: bool = False
) -> dict[str, str]:
    """``base`` (default: this process's environment) with what makes a child process run V2 on the CPU."""
    env = dict(os.environ if base is None else base)
    path = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(SITE)]
    env[ENV] = "1" if kernels else "interpret"
    env[ENV_ASYNC] = "1" if async_scheduling else "0"
    env["TRITON_INTERPRET"] = "1"
    env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([str(SITE), *path])
    # A second thread makes a tiny model slower, and on cores shared with other processes a hundred times so.
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


def enable(*, kernels: bool = True, async_scheduling: bool = False) -> None:
    """Make this process, and those it starts, run Model Runner V2 on the CPU. Call before importing vLLM.

    For this process the first call decides; later ones only change what child processes inherit.

    Args:
        kernels: False leaves every kernel to the interpreter, the slow reference that replacements must equal.
        async_scheduling: let vLLM schedule a step ahead of the results, as it does by default on a GPU.

    Raises:
        RuntimeError: Triton is missing, or vLLM or Triton is imported already.
    """
    if not _active:
        if "vllm" in sys.modules:
            raise RuntimeError("enable() comes too late: vllm is imported, and it settles for Triton or not on import")
        if find_spec("triton") is None:
            raise RuntimeError("Model Runner V2 needs the interpreter of 'triton', which is not installed")
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("enable() comes too late: triton is imported, without TRITON_INTERPRET=1")
    os.environ.update(environment(kernels=kernels, async_scheduling=async_scheduling))
    activate()


def enabled() -> bool:
    return os.environ.get(ENV, "0") not in ("", "0")


def activate() -> None:
    """Set this process up if the environment asks for it. Cheap and idempotent."""
    global _active
    if _active or not enabled():
        return
    _active = True
    kernels, async_scheduling = os.environ[ENV] != "interpret", os.environ.get(ENV_ASYNC) == "1"
    os.environ.update(environment(kernels=kernels, async_scheduling=async_scheduling))
    after_import("triton.backends", _add_stand_in_backend)
    after_import("triton.runtime.interpreter", _accept_integer_masks)
    after_import("triton.language.extra.libdevice", _give_libdevice_a_body)
    if async_scheduling:
        after_import("vllm.platforms.cpu", _keep_async_scheduling)
    if kernels:
        # Once the CPU runner's module is complete, so are all modules that own or borrow a kernel.
        after_import("vllm.v1.worker.cpu.model_runner", install_kernels)


def install_kernels() -> None:
    """Register the replacement kernels with vLLM's dispatcher. Idempotent."""
    from vllm_yoco.testing import v2_kernels

    v2_kernels.install()


class _StandInDriver:
    """What vLLM and Triton ask of a driver when no kernel is ever compiled."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)


def _add_stand_in_backend() -> None:
    from triton import backends

    backends.backends.setdefault("cpu", backends.Backend(compiler=None, driver=_StandInDriver))


def _accept_integer_masks() -> None:
    """The interpreter refuses a mask like ``block & scalar``, which it has computed as int32."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(InterpreterBuilder, name)

        def with_bool_mask(self: Any, *args: Any, original: Any = original, position: int = position) -> Any:
            mask = args[position]
            if mask.data.dtype != bool:
                mask.data = mask.data.astype(bool)
            return original(self, *args)

        setattr(InterpreterBuilder, name, with_bool_mask)


def _give_libdevice_a_body() -> None:
    """Interpreted, these functions return None. The two are all that vLLM's runner uses."""
    from triton import language as tl
    from triton.language.extra import libdevice

    libdevice.isnan = lambda x: x != x
    libdevice.log1p = lambda x: tl.log(1.0 + x)


def _keep_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def keeping(cls: type, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(keeping)


@dataclass
class Launches:
    """The launches of one interpreted kernel."""

    count: int = 0
    seconds: float = 0.0


@contextmanager
def interpreted_launches() -> Iterator[dict[str, Launches]]:
    """Collect, by kernel name, the launches that reach Triton's interpreter in this process."""
    from triton.runtime.interpreter import GridExecutor

    launches: dict[str, Launches] = {}
    original = GridExecutor.__call__

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            launch = launches.setdefault(self.fn.__name__, Launches())
            launch.count += 1
            launch.seconds += time.perf_counter() - start

    GridExecutor.__call__ = timed
    try:
        yield launches
    finally:
        GridExecutor.__call__ = original


def main(arguments: list[str]) -> None:
    """Become ``vllm ARGUMENTS`` with V2 on the CPU, under this process id."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]
    os.execve(sys.executable, command, environment())


if __name__ == "__main__":
    main(sys.argv[1:])

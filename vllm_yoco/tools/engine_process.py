"""vLLM engines of one model runner in a child process, for commands that compare engines.

The runner is chosen by the environment before vLLM is imported, and an engine gives its memory back for certain only
when its process ends. So engines live in a child: small ones on a CPU together, because importing vLLM is the slow
part there; others one at a time, because the next one needs the memory. Inside the child they run in-process, where
the scheduler and the model can be reached. A job is a module-level function that takes the child's ``Engines`` first.

    with EngineHost("v1") as host:
        answers = host.run(spec, generate, prompts, 8)  # see engine_generate
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shlex
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_yoco.tools.server import log_tail

RUNNERS = ("auto", "v1", "v2")

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions as collective_rpc methods, to workers of this child only
    "VLLM_NO_USAGE_STATS": "1",
}
DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

MAX_NUM_SEQS = 8
JOIN_SECONDS = 20


@dataclass(frozen=True)
class EngineSpec:
    """What distinguishes one engine from another.

    Attributes:
        keep_tokens: K in rows.
        max_model_len: prompt and continuation, in tokens.
        chunk_tokens: largest step, in tokens; ``generate`` may use less.
        kv_cache_bytes: on a CPU; a GPU gives the engine what it has.
        flags: further engine flags of vLLM, as on its command line. They win over what is chosen here.
    """

    model: str
    truncation: str
    keep_tokens: int
    dtype: str
    max_model_len: int
    chunk_tokens: int
    kv_cache_bytes: int
    max_num_seqs: int = MAX_NUM_SEQS
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "off" if self.truncation == "off" else f"{self.truncation} K={self.keep_tokens}"


def llm_options(spec: Any) -> dict[str, Any]:
    """``LLM`` arguments that every engine of these tools has.

    Args:
        spec: ``EngineSpec``, or another with its model, sizes and truncation; None as truncation gives vLLM no
            setting of the plugin at all.
    """
    from vllm.platforms import current_platform

    options: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "enforce_eager": True,  # hooks in the model see every step
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "block_size": 32,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    if spec.truncation is not None:
        options["additional_config"] = {"yoco": {"truncation": spec.truncation, "keep_tokens": spec.keep_tokens}}
    if current_platform.is_cpu():
        options["kv_cache_memory_bytes"] = spec.kv_cache_bytes
    return options


@dataclass
class Engines:
    """The child's engines by specification."""

    runner: str
    llms: dict[EngineSpec, Any] = field(default_factory=dict)
    serving: dict[Any, Any] = field(default_factory=dict)
    """What one job leaves for the next, by specification."""

    def get(self, spec: EngineSpec) -> Any:
        if spec not in self.llms:
            from vllm import LLM

            options = llm_options(spec) | {
                "max_num_batched_tokens": max(spec.chunk_tokens, spec.max_num_seqs),
                "max_logprobs": -1,
            }
            if "kv_cache_memory_bytes" in options:
                # The pool hands out every block before it reuses one, and engines stay alive: each gets what its
                # batch needs and no more.
                options["num_gpu_blocks_override"] = 3 * spec.max_num_seqs * (spec.max_model_len // 32 + 2)
            # Teacher forcing, see engine_generate.
            if self.runner == "v2":
                options["enable_trace_replay"] = True
            else:
                options["logits_processors"] = ["vllm_yoco.tools.engine_forced:ForcedTokens"]
            self.llms[spec] = LLM(**options | engine_options(spec.flags))
        return self.llms[spec]

    def scheduler(self, spec: EngineSpec) -> Any:
        return self.get(spec).llm_engine.engine_core.engine_core.scheduler

    def shut_down(self) -> None:
        """End worker processes (tensor parallelism); everything else ends with this process, and faster."""
        for llm in self.llms.values():
            if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
                with contextlib.suppress(Exception):
                    llm.llm_engine.engine_core.engine_core.model_executor.shutdown()


class EngineError(RuntimeError):
    """An engine failed. Carries what the child said last, its traceback or the end of its output."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class EngineHost:
    """Runs jobs on engines of one model runner.

    Args:
        runner: ``v1``, ``v2``, or ``auto`` for vLLM's usual choice: V2 on a GPU, V1 on a CPU.
        share: keep all engines in one child; on a GPU this is never done.
        environment: extra variables, in place before vLLM is imported.
        initializer: called in each child before its first job.
    """

    def __init__(
        self,
        runner: str = "auto",
        *,
        share: bool = True,
        environment: dict[str, str] | None = None,
        initializer: Callable[[], None] | None = None,
    ) -> None:
        import torch

        self.on_gpu = torch.cuda.is_available()
        usual = {"1": "v2", "0": "v1"}.get(os.environ.get("VLLM_USE_V2_MODEL_RUNNER", ""))
        self.runner = (usual or ("v2" if self.on_gpu else "v1")) if runner == "auto" else runner
        self._share = share and not self.on_gpu
        self._settings = (self.runner, self.on_gpu, environment or {}, initializer)
        self._log = Path(tempfile.mkstemp(prefix="vllm-yoco-engine-", suffix=".log")[1])
        self._process: Any = None
        self._interrupted = False
        self._spec: EngineSpec | None = None

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(self, *exception: object) -> None:
        if isinstance(exception[1], KeyboardInterrupt):
            self.interrupt()
        self.close()
        self._log.unlink(missing_ok=True)

    def run(self, spec: EngineSpec, job: Callable[..., Any], *args: Any) -> Any:
        """``job(engines, spec, *args)`` in the child.

        Raises:
            EngineError: the job raised, or the child died.
        """
        if spec != self._spec and not self._share:
            self.close()
        self._spec = spec
        return self.call(job, spec, *args)

    def call(self, job: Callable[..., Any], *args: Any) -> Any:
        """``job(engines, *args)`` in the child, started if there is none. Raises as ``run`` does."""
        if self._process is None:
            if sys.stderr.isatty():
                print("starting vLLM, which takes half a minute on a CPU ...", end="\r", file=sys.stderr)
            context = multiprocessing.get_context("spawn")
            self._connection, child = context.Pipe()
            process = context.Process(target=_serve, args=(child, str(self._log), *self._settings))
            process.start()
            self._process = process
            child.close()
            if self._interrupted:
                process.terminate()
        try:
            self._connection.send((job, args))
            ok, value = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            process, self._process = self._process, None
            process.join(JOIN_SECONDS)
            code = process.exitcode
            raise EngineError(f"the engine process ended with exit code {code}", log_tail(self._log)) from None
        if not ok:
            raise EngineError(*value)
        return value

    def interrupt(self) -> None:
        """End the child in the middle of its job, whose caller gets an ``EngineError``; for good."""
        self._interrupted = True  # for one that is being started by another thread
        process = self._process
        if process is not None:
            process.terminate()

    def close(self) -> None:
        """End the child and its engines, after its job if that does not take long."""
        process, self._process = self._process, None
        if process is None:
            return
        self._connection.close()
        process.join(JOIN_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(
    connection: Any,
    log: str,
    runner: str,
    on_gpu: bool,
    environment: dict[str, str],
    initializer: Callable[[], None] | None,
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    from tqdm import tqdm  # comes with vLLM

    os.environ.update({**DEFAULTS, **os.environ, **ENVIRONMENT, **environment})
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    # tqdm's default lock is a semaphore that a process which ends by _exit leaves behind.
    tqdm.set_lock(threading.RLock())
    engines = Engines(runner)
    try:
        if runner == "v2" and not on_gpu:
            from vllm_yoco.testing import runner_v2_cpu

            runner_v2_cpu.enable()
        if initializer is not None:
            initializer()
        failure = None
    except BaseException as error:
        failure = _describe(error)
    while True:
        try:
            job, args = connection.recv()
        except (EOFError, KeyboardInterrupt):
            break
        try:
            connection.send((False, failure) if failure else (True, job(engines, *args)))
        except KeyboardInterrupt:
            break
        except BaseException as error:
            connection.send((False, _describe(error)))
    engines.shut_down()
    # vLLM would now tear down engine after engine, some seconds each, for a process that is about to end.
    os._exit(0)


def _describe(error: BaseException) -> tuple[str, str]:
    return f"{type(error).__name__}: {error}", traceback.format_exc()


def add_engine_flags(parser: argparse.ArgumentParser, where: str = "") -> None:
    parser.add_argument(
        "--engine-flags",
        metavar="FLAGS",
        type=shlex.split,
        default=[],
        help=f"{where}of vLLM, as in --engine-flags='--block-size 64'",
    )


def engine_options(flags: Sequence[str]) -> dict[str, Any]:
    """``LLM`` arguments for engine flags. ValueError for flags that vLLM does not know, or that spoil a comparison."""
    if not flags:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given, defaults = vars(parser.parse_args(list(flags))), vars(parser.parse_args([]))
    except (SystemExit, argparse.ArgumentError) as error:
        why = said.getvalue().strip().rpartition("error: ")[2] if isinstance(error, SystemExit) else error
        raise ValueError(f"--engine-flags='{' '.join(flags)}': vLLM does not take them: {why}") from None
    options = {name: value for name, value in given.items() if value != defaults[name]}
    if options.get("enable_prefix_caching"):
        raise ValueError(
            "--engine-flags='--enable-prefix-caching': equal prompts would be answered from the cache, and what is"
            " compared would not be computed. Leave it out; `vllm-yoco bench --measure hits` measures hits."
        )
    return options

"""Real engines for tests: one child process per model runner, one engine per configuration in it.

The runner is chosen by the environment before vLLM is imported, so each has a process of its own. Inside, engines
run in-process and stay alive for the whole test session, because starting them is the slow part. A job is a
module-level function that takes the child's ``Engines`` first.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gpu_kit.settings import llm_options

RUNNERS = ("v1", "v2")

UNIPROC = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""For commands in a process of their own: the engine runs in it, or under a server in one child and not in two, each of
which has to import vLLM (on a CPU it always spawns). Where no test is about processes; test_server, test_parallel and
the example of test_transfer run as vLLM does by default."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # The n-gram drafter's numba would raise torch's number of threads, which spin on cores they share.
    "NUMBA_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class EngineConfig:
    """What distinguishes one engine from another.

    ``chunk_tokens`` is vLLM's ``max_num_batched_tokens``; ``truncation="absent"`` gives no setting at all;
    ``ngram_tokens`` is the number of speculative tokens, drafted from n-grams, if any.
    """

    model: str
    truncation: str = "off"
    keep_tokens: int | str = "min"
    chunk_tokens: int = 96
    block_size: int = 32
    prefix_caching: bool = False
    num_blocks: int = 400
    max_num_seqs: int = 8
    prompt_logprobs: str = "drop"
    max_model_len: int = 1100
    ngram_tokens: int = 0
    kv_events: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int = 6
    sampling: tuple[tuple[str, Any], ...] = ()


@dataclass
class Result:
    """``logprobs`` is [generated tokens, vocabulary] float64."""

    tokens: list[int]
    logprobs: np.ndarray
    num_cached_tokens: int = 0
    prompt_logprobs: Any = None
    finish_reason: str | None = None


@dataclass
class Engines:
    """The child's engines by configuration."""

    runner: str
    llms: dict[EngineConfig, Any] = field(default_factory=dict)

    def get(self, config: EngineConfig) -> Any:
        if config not in self.llms:
            from vllm import LLM

            if self.llms and self.runner != "native":
                from vllm.platforms.cpu import CpuPlatform

                # Done by the first engine. Again, the scan of all modules breaks on those of numba's llvmlite.
                CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
            yoco = {
                "truncation": config.truncation,
                "keep_tokens": config.keep_tokens,
                "prompt_logprobs": config.prompt_logprobs,
            }
            options: dict[str, Any] = {
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": config.max_model_len,
                "max_num_batched_tokens": config.chunk_tokens,
                "max_num_seqs": config.max_num_seqs,
                "enable_prefix_caching": config.prefix_caching,
                "num_gpu_blocks_override": config.num_blocks,
                "block_size": config.block_size,
                "max_logprobs": -1,
                "disable_log_stats": True,
                "gpu_memory_utilization": 0.2,
                "additional_config": {} if config.truncation == "absent" else {"yoco": yoco},
            }
            if config.ngram_tokens:
                # Asynchronous scheduling accepts the same drafter under its other name only.
                asynchronous = os.environ.get("VLLM_YOCO_V2_CPU_ASYNC") == "1"
                options["speculative_config"] = {
                    "method": "ngram_gpu" if asynchronous else "ngram",
                    "num_speculative_tokens": config.ngram_tokens,
                    "prompt_lookup_min": 2,
                    "prompt_lookup_max": 4,
                }
            if config.kv_events:
                from vllm.config import KVEventsConfig

                options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
            self.llms[config] = LLM(config.model, **(options | llm_options() | dict(config.options)))
        return self.llms[config]


class RemoteError(AssertionError):
    """A job failed in the child; carries the child's traceback."""


class RunnerProcess:
    """A child process with engines of one model runner.

    Args:
        runner: ``v1`` or ``v2`` (its CPU form), or ``native`` for what vLLM chooses.
        environment: extra variables, in place before vLLM is imported.
    """

    def __init__(self, runner: str, environment: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._conn, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, runner, environment or {}))
        self._process.start()
        child.close()

    def call(self, job: Callable[..., Any], *args: Any) -> Any:
        """Run ``job(engines, *args)`` in the child."""
        self._conn.send((job, args))
        ok, value = self._conn.recv()
        if not ok:
            raise RemoteError(value)
        return value

    def generate(self, config: EngineConfig, requests: Sequence[Request]) -> list[Result]:
        return self.call(generate, config, list(requests))

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        self._conn.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


def _serve(conn: Connection, runner: str, environment: dict[str, str]) -> None:
    from vllm_yoco import counters

    os.environ.update(ENVIRONMENT | environment)
    if runner == "v2":
        from vllm_yoco.testing import runner_v2_cpu

        runner_v2_cpu.enable(async_scheduling=environment.get(runner_v2_cpu.ENV_ASYNC) == "1")
    engines = Engines(runner)
    while True:
        try:
            job, args = conn.recv()
        except EOFError:
            break
        try:
            conn.send((True, job(engines, *args)))
        except BaseException as error:
            conn.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    for llm in engines.llms.values():
        counters.remove(llm.llm_engine.vllm_config.instance_id)
    # Engines die with the process; an orderly teardown of many in one process is not what is tested.
    os._exit(0)


def sampling_params(request: Request) -> Any:
    from vllm import SamplingParams

    options: dict[str, Any] = {"temperature": 0, "max_tokens": request.max_tokens, "logprobs": -1, "ignore_eos": True}
    options["detokenize"] = False  # otherwise the text of the whole vocabulary is made for every token
    return SamplingParams(**(options | dict(request.sampling)))


def generate(engines: Engines, config: EngineConfig, requests: list[Request]) -> list[Result]:
    """Serve all requests together; results in the order of the requests."""
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=list(request.prompt)) for request in requests]
    outputs = engines.get(config).generate(prompts, [sampling_params(r) for r in requests], use_tqdm=False)
    return [to_result(output) for output in outputs]


def to_result(output: Any) -> Result:
    completion = output.outputs[0]
    return Result(
        tokens=list(completion.token_ids),
        logprobs=logprob_rows(completion.logprobs or []),
        num_cached_tokens=output.num_cached_tokens or 0,
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=completion.finish_reason,
    )


def logprob_rows(rows: Sequence[Any]) -> np.ndarray:
    table = np.full((len(rows), max((max(row) for row in rows), default=-1) + 1), np.nan)
    for row, entries in zip(table, rows, strict=True):
        for token, entry in entries.items():
            row[token] = entry.logprob
    return table


def scheduler_of(engines: Engines, config: EngineConfig) -> Any:
    """The scheduler of an in-process engine."""
    return engines.get(config).llm_engine.engine_core.engine_core.scheduler


def consumer_swa_groups(scheduler: Any) -> list[int]:
    """KV cache groups of the consumers' sliding windows, by layer name and not by what the plugin makes of them."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return [i for i, group in enumerate(groups) if any(name.endswith(".swa_attn") for name in group.layer_names)]


def computed_rows(engines: Engines, config: EngineConfig) -> list[int]:
    """Rows that each consumer layer has run on so far, counted inside the forward."""
    return engines.get(config).apply_model(_computed_rows)[0]


def _computed_rows(model: Any) -> list[int]:
    return [layer.num_computed_rows for layer in model.model.consumers]

"""A workload on its way through one engine, in the engine's child process; see ``vllm_yoco.tools.bench``.

Requests are driven through ``LLMEngine.step``, so a token's time is that of the step that returned it. The engine's
time stands still between its steps: engines that take turns step by step do not count each other's.
The figures come from vLLM's own ``calculate_metrics`` (vllm/benchmarks/serve.py), under its names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

PERCENTILES = (50.0, 99.0)
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""``cpu``: time that the engine's process has computed. With one thread on an idle machine it equals ``wall``; where
other work shares the cores it leaves out the waiting."""


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together, at most ``concurrency`` of them in flight.

    Attributes:
        prompt_tokens: L of each request.
        output_tokens: of each request; nothing ends one earlier.
        chunk_tokens: rows a step may take; None takes a prompt in one step.
        hit_tokens: leading tokens that an earlier request left in the prefix cache.
        seed: of the tokens, a number or several.
        clock: one of ``CLOCKS``.
    """

    prompt_tokens: tuple[int, ...]
    output_tokens: int
    concurrency: int
    chunk_tokens: int | None = None
    hit_tokens: int = 0
    seed: int | tuple[int, ...] = 0
    clock: str = "wall"

    @property
    def longest(self) -> int:
        return max(self.prompt_tokens) + self.output_tokens

    def step_tokens(self) -> int:
        return self.chunk_tokens or max(self.prompt_tokens)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random tokens, equal for equal seeds; all share their first ``hit_tokens``."""
        stream = np.random.default_rng(self.seed)
        prefix = stream.integers(0, vocab_size, self.hit_tokens).tolist()
        return [prefix + stream.integers(0, vocab_size, length - len(prefix)).tolist() for length in self.prompt_tokens]


class Serving:
    """One workload being served. The engine has nothing else to do meanwhile.

    Args:
        engine: vLLM's ``LLMEngine``, in this process.
        prompts: token ids.
    """

    def __init__(self, engine: Any, prompts: list[list[int]], workload: Workload) -> None:
        from vllm import SamplingParams

        self._engine, self._workload = engine, workload
        self._params = SamplingParams(
            temperature=0, max_tokens=workload.output_tokens, ignore_eos=True, detokenize=False
        )
        self._waiting = list(enumerate(prompts))[::-1]
        self._name = f"{time.monotonic()}"
        self._clock = CLOCKS[workload.clock]
        self._seconds = 0.0
        self._in_flight = self._num_steps = self._cached_tokens = 0
        self._outcomes: dict[str, Any] = {}
        self._last: dict[str, float] = {}
        self._decode_ms: list[float] = []

    @property
    def decodes(self) -> bool:
        """The next step computes no row of a prompt."""
        joins = self._waiting and self._in_flight < self._workload.concurrency
        return bool(self._outcomes) and not joins and len(self._last) == len(self._outcomes)

    def step(self) -> bool:
        """One step of the engine; False when no request is left."""
        decodes, begin = self.decodes, self._clock()
        self._add_requests(self._seconds)
        answers = self._engine.step()
        took = self._clock() - begin
        self._seconds += took
        self._num_steps += 1
        if decodes:
            self._decode_ms.append(took * 1000)
        for answer in answers:
            self._record(answer)
        return bool(self._waiting or self._in_flight)

    def _add_requests(self, now: float) -> None:
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
        from vllm.inputs import TokensPrompt

        while self._waiting and self._in_flight < self._workload.concurrency:
            index, prompt = self._waiting.pop()
            name = f"{self._name}-{index}"
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), self._params)
            # vLLM appends a suffix of its own to the names it works with, not to those it reports.
            self._outcomes[name] = RequestFuncOutput(prompt_len=len(prompt), start_time=now)
            self._in_flight += 1

    def _record(self, answer: Any) -> None:
        now, name = self._seconds, answer.request_id
        outcome, num_tokens = self._outcomes[name], len(answer.outputs[0].token_ids)
        if num_tokens > outcome.output_tokens:
            if outcome.output_tokens:
                outcome.itl.append(now - self._last[name])
            else:
                outcome.ttft = now - outcome.start_time
            self._last[name], outcome.output_tokens = now, num_tokens
        if answer.finished:
            outcome.success, outcome.latency = True, now - outcome.start_time
            self._cached_tokens += answer.num_cached_tokens or 0
            self._in_flight -= 1

    def run(self) -> dict[str, Any]:
        """All steps that are left; then as ``metrics``."""
        while self.step():
            pass
        return self.metrics()

    def metrics(self) -> dict[str, Any]:
        """What the finished workload took.

        Returns:
            The fields of vLLM's ``BenchmarkMetrics`` without None, percentiles flattened as ``vllm bench`` does
            (``p99_itl_ms``), with ``duration`` in seconds, ``num_steps``, ``cached_tokens``: of the prompts, not
            computed because of prefix hits, and ``decode_step_ms``: the time of each step in which every request was
            past its prompt.
        """
        from vllm.benchmarks.serve import calculate_metrics

        outcomes = list(self._outcomes.values())
        metrics, _ = calculate_metrics([], outcomes, self._seconds, None, list(PERCENTILES), {})
        found: dict[str, Any] = {
            "duration": self._seconds,
            "num_steps": self._num_steps,
            "cached_tokens": self._cached_tokens,
        }
        for name, value in asdict(metrics).items():
            if name.startswith("percentiles_"):
                for percentile, number in value:
                    found[f"p{percentile:g}_{name.removeprefix('percentiles_')}"] = float(number)
            elif value is not None:
                found[name] = float(value)
        return found | {"decode_step_ms": [round(ms, 4) for ms in self._decode_ms]}

"""What the plugin adds to a step, measured on one engine: every other one runs as vLLM alone would run it.

Two engines with the same code differ by a percent or more for as long as they live, by where their weights lie in
memory, which is more than decode costs here. One engine is compared with itself instead. If s_keep is a multiple of the
block size, the cells of the consumers' windows lie where they lie without the plugin, so past the prompt a step may run
either way, with equal outcome. In ``off`` any step may, and prefills are compared, too. ``PluginSwitch`` takes out
everything that the plugin has put into such a step, and puts it back.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from vllm_yoco.tools.bench_engine import BenchEngine, get, runner_of
from vllm_yoco.tools.bench_serve import Serving, Workload
from vllm_yoco.tools.engine_process import Engines


def aligned_prompt_tokens(keep_tokens: int, at_least: int, block_size: int) -> int:
    """The shortest L from ``at_least`` on whose s_keep = L - K is a multiple of the block size above 0, in tokens."""
    return keep_tokens + max(1, -(-(at_least - keep_tokens) // block_size)) * block_size


PREFILLS_PER_ROUND = 4
"""With the plugin and as many without."""


class PluginSwitch:
    """Takes the plugin's part in a step out of one engine of this process, and puts it back.

    That is, of an engine with a mode on, the sub-batch builder's hook in the model runner, the window view of the
    metadata builders, the clearing of new blocks in the layers, and what wraps the scheduler and its KV cache managers.
    Of any engine, the patches that look whether a mode is on.
    """

    def __init__(self, llm: Any) -> None:
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        from vllm_yoco.attention import ClippedBuilderMixin, ConsumerSlidingAttention
        from vllm_yoco.models.state import YocoModelState

        core = llm.llm_engine.engine_core.engine_core
        runner = runner_of(llm)
        plain: list[tuple[Any, str, type]] = []
        """Objects, a method that the plugin's class of theirs overrides, and the class whose method vLLM would run."""
        state = getattr(runner, "model_state", None)
        if isinstance(state, YocoModelState):
            plain.append((state, "prepare_attn", DefaultModelState))
        for group in [group for groups in runner.attn_groups for group in groups]:
            plain += [
                (builder, "build", type(builder).__bases__[1])
                for builder in group.metadata_builders
                if isinstance(builder, ClippedBuilderMixin)
            ]
        plain += [
            (layer, "forward", Attention)
            for layer in runner.model.modules()
            if isinstance(layer, ConsumerSlidingAttention)
        ]
        self._plain = [(owner, name, getattr(base, name).__get__(owner)) for owner, name, base in plain]
        patched = (runner, "_build_attention_metadata"), (llm.llm_engine.input_processor, "process_inputs")
        for owner, name in patched:
            method = getattr(type(owner), name, None)
            if getattr(method, "_yoco", False):
                self._plain.append((owner, name, method.__wrapped__.__get__(owner)))
        manager = core.scheduler.kv_cache_manager
        self._wrapped = [
            (owner, name, value)
            for owner in (core.scheduler, manager, manager.coordinator, *manager.coordinator.single_type_managers)
            for name, value in vars(owner).items()
            if callable(value) and getattr(value, "__module__", "").startswith("vllm_yoco.")
        ]
        """What the plugin put over methods of one object."""

    def take_out(self) -> None:
        """Until ``put_back``, with a mode on, steps may decode only, and only requests whose s_keep begins a block."""
        for owner, name, method in self._plain:
            setattr(owner, name, method)
        for owner, name, _ in self._wrapped:
            delattr(owner, name)

    def put_back(self) -> None:
        for owner, name, _ in self._plain:
            delattr(owner, name)
        for owner, name, value in self._wrapped:
            setattr(owner, name, value)


def decode_overhead(engines: Engines, spec: BenchEngine, workload: Workload, repeats: int) -> dict[str, Any]:
    """Serve the requests ``repeats`` times, every other decode step without the plugin.

    Args:
        workload: prompts of ``aligned_prompt_tokens``, all in flight at once.

    Returns:
        ``rounds``: for each, ``with_ms`` and ``without_ms``, the time of each decode step. The first step of a round
        is one with the plugin in even rounds.
    """
    llm = _counting(engines, spec)
    prompts = workload.prompts(llm.model_config.get_vocab_size())
    Serving(llm.llm_engine, prompts, workload).run()  # unmeasured
    switch = PluginSwitch(llm)
    rounds = []
    for repeat in range(repeats):
        serving, plain = Serving(llm.llm_engine, prompts, workload), repeat % 2 == 1
        first, alive = plain, True
        while alive:
            without = serving.decodes and plain
            plain ^= serving.decodes
            if without:
                switch.take_out()
            try:
                alive = serving.step()
            finally:
                if without:
                    switch.put_back()
        times = serving.metrics()["decode_step_ms"]
        rounds.append({"with_ms": times[first::2], "without_ms": times[not first :: 2]})
    return {"rounds": rounds}


def prefill_overhead(engines: Engines, spec: BenchEngine, workload: Workload, repeats: int) -> dict[str, Any]:
    """Serve a prompt again and again, every other time without the plugin; for engines of ``off``.

    Args:
        workload: one request, of which one token is generated.

    Returns:
        ``rounds``: for each, ``with_ms`` and ``without_ms``, the TTFT of each of ``PREFILLS_PER_ROUND``.
    """
    llm = _counting(engines, spec)
    prompts = workload.prompts(llm.model_config.get_vocab_size())
    switch = PluginSwitch(llm)

    def ttft_ms(plain: bool) -> float:
        if plain:
            switch.take_out()
        try:
            return float(Serving(llm.llm_engine, prompts, workload).run()["median_ttft_ms"])
        finally:
            if plain:
                switch.put_back()

    ttft_ms(plain=False)  # unmeasured
    rounds = []
    for repeat in range(repeats):
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * PREFILLS_PER_ROUND):
            plain = (repeat + turn) % 2 == 1
            times[plain].append(ttft_ms(plain))
        rounds.append({"with_ms": times[False], "without_ms": times[True]})
    return {"rounds": rounds}


def _counting(engines: Engines, spec: BenchEngine) -> Any:
    """An engine with vLLM's statistics, and with them the plugin's counters, in its steps, as a server has it.

    A server's stat loggers are not: ``LLM`` loads none.
    """
    counting = replace(spec, name=f"{spec.name}, counting", options=(*spec.options, ("disable_log_stats", False)))
    llm = get(engines, counting)
    llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = counting.max_model_len
    return llm


def added(rounds: list[dict[str, list[float]]]) -> list[float]:
    """Of each round the share that the plugin adds to a step: the median over pairs of consecutive steps."""
    # Of an odd number of steps one is left over.
    return [median(w / o - 1 for w, o in zip(r["with_ms"], r["without_ms"], strict=False)) for r in rounds]

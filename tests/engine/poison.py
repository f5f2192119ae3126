"""Jobs that fill consumer sliding-window blocks with NaN at the moment they are handed out.

All KV cache groups share one pool of blocks, and vLLM's CPU kernel lets a NaN in an unwritten cell through in any
group, with or without the plugin. So only blocks newly assigned to a consumer SWA group are filled, and those newly
assigned to another group are cleared of what an earlier owner left.
"""

from __future__ import annotations

import types
from typing import Any

from tests.engine.harness import EngineConfig, Engines


def poison_new_swa_blocks(engines: Engines, config: EngineConfig) -> None:
    """From now on each step of this engine first poisons the SWA blocks that it assigns."""
    worker = model_worker(engines, config)
    runner = worker.model_runner
    execute = runner.execute_model
    context = runner.vllm_config.compilation_config.static_forward_context
    runner.num_poisoned_blocks = 0

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        assigned = [request.block_ids for request in scheduler_output.scheduled_new_reqs]
        assigned += [ids for ids in scheduler_output.scheduled_cached_reqs.new_block_ids if ids is not None]
        for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            is_swa = any(name.endswith(".swa_attn") for name in group.layer_names)
            blocks = sorted({block for ids in assigned for block in ids[index]} - {0})
            for name in group.layer_names:
                context[name].kv_cache[blocks] = float("nan") if is_swa else 0.0
            runner.num_poisoned_blocks += len(blocks) * is_swa
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model


def stop_poisoning(engines: Engines, config: EngineConfig) -> int:
    """Give the engine its own step back; returns the number of blocks poisoned since ``poison_new_swa_blocks``."""
    runner = model_worker(engines, config).model_runner
    del runner.execute_model
    return runner.num_poisoned_blocks


def num_poisoned_blocks(engines: Engines, config: EngineConfig) -> int:
    return model_worker(engines, config).model_runner.num_poisoned_blocks


def stop_clearing_blocks(engines: Engines, config: EngineConfig) -> None:
    """Take away what protects this engine from the poison: back to vLLM's own forward."""
    from vllm.model_executor.layers.attention import Attention

    for layer in model_worker(engines, config).model_runner.get_model().model.consumers:
        attention = layer.self_attn.swa_attn
        attention.forward = types.MethodType(Attention.forward, attention)


def model_worker(engines: Engines, config: EngineConfig) -> Any:
    """The worker of an in-process engine."""
    core = engines.get(config).llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker

"""Which vLLM the plugin works with: tested versions, and every private vLLM symbol that it leans on."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

TESTED_SERIES = ("0.32",)
"""Minor series of vLLM that the tests run on. The only place that names them."""

OVERRIDE_ENV = "VLLM_YOCO_ALLOW_UNTESTED"
"""``1`` lets the plugin work on any other version; the symbols below are checked all the same."""


@dataclass(frozen=True)
class Symbol:
    """Something in vLLM that no interface promises.

    Attributes:
        module: dotted module name.
        name: attribute path inside it, such as ``EngineArgs.add_cli_args``.
        why: what the plugin does with it.
        parameters: names of parameters that the plugin overrides or passes; a subset of the signature.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()

    def defect(self) -> str | None:
        """What is wrong with it in the installed vLLM, or None. Imports the module."""
        where = f"{self.module}:{self.name}"
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"{where} is missing ({error}); used to {self.why}"
        if self.parameters:
            known = inspect.signature(found).parameters
            lost = [name for name in self.parameters if name not in known]
            if lost:
                return f"{where} takes no {', '.join(lost)}; used to {self.why}"
        return None


SYMBOLS: tuple[Symbol, ...] = (
    # Flags and start-up check (patches/engine_args.py)
    Symbol("vllm.engine.arg_utils", "EngineArgs.add_cli_args", "add the --yoco-* flags", ("parser",)),
    Symbol("vllm.engine.arg_utils", "EngineArgs.from_cli_args", "read the flags", ("args",)),
    Symbol("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "validate the configuration"),
    # Steps of placeholders alone (batch.py)
    Symbol("vllm.distributed.kv_transfer", "has_kv_transfer_group", "call connectors that work layer by layer"),
    # Prefix hits end before the kept rows (patches/scheduler.py, kv_cache.py)
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.__init__", "cap prefix hits", ("vllm_config",)),
    Symbol(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_computed_blocks",
        "cap prefix hits by prompt length",
        ("request",),
    ),
    Symbol(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.find_longest_cache_hit",
        "cap prefix hits",
        ("block_hashes", "max_cache_hit_length"),
    ),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.schedule", "count prefill rows"),
    # Consumer SWA holds no blocks below s_keep (patches/scheduler.py, kv_cache.py)
    Symbol(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        "hold no blocks for dropped rows",
        ("request_id", "num_tokens"),
    ),
    Symbol(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.allocate_new_blocks",
        "hold no blocks for dropped rows",
        ("request_id", "num_tokens"),
    ),
    Symbol(
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.allocate_external_computed_blocks",
        "hold no blocks for dropped rows",
        ("request_id", "num_local_computed_tokens", "num_external_computed_tokens"),
    ),
    # Requests for prompt log-probabilities (patches/input_processor.py, completion_serving.py)
    Symbol("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", "apply the prompt_logprobs policy"),
    Symbol(
        "vllm.entrypoints.openai.completion.serving",
        "OpenAIServingCompletion.request_output_to_completion_response",
        "answer echo without prompt logprobs",
        ("final_res_batch", "request"),
    ),
    Symbol(
        "vllm.entrypoints.openai.completion.serving",
        "OpenAIServingCompletion.completion_stream_generator",
        "answer echo without prompt logprobs",
        ("request", "engine_inputs", "result_generator"),
    ),
    # Consumer SWA has a KV cache group and a backend of its own (kv_cache.py, attention.py)
    Symbol("vllm.v1.kv_cache_interface", "SlidingWindowSpec.prefix_cacheable", "keep SWA out of prefix caching"),
    Symbol("vllm.v1.kv_cache_interface", "SlidingWindowSpec.extra_retained_tokens", "retain rebased cells"),
    Symbol("vllm.v1.kv_cache_interface", "replace_as", "give consumer SWA its spec"),
    Symbol("vllm.v1.attention.backends.utils", "subclass_attention_backend", "clip the window at s_keep"),
    Symbol(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build",
        "clip the window at s_keep",
        ("common_prefix_len", "common_attn_metadata"),
    ),
    # The kept rows are a sub-batch (batch.py, models/, patches/gpu_model_runner.py)
    Symbol("vllm.v1.worker.utils", "AttentionGroup.create_metadata_builders", "build the sub-batch's metadata"),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.build_metadata", "build the sub-batch's metadata"),
    Symbol(
        "vllm.forward_context",
        "create_forward_context",
        "run consumers on the sub-batch",
        ("attn_metadata", "vllm_config", "slot_mapping"),
    ),
    Symbol("vllm.forward_context", "override_forward_context", "run consumers on the sub-batch"),
    Symbol("vllm.utils.torch_utils", "_encode_layer_name", "write the KV of every row"),
    Symbol(
        "vllm.v1.worker.gpu.model_states.default",
        "DefaultModelState.prepare_attn",
        "build the sub-batch (Model Runner V2)",
        ("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"),
    ),
    Symbol(
        "vllm.v1.worker.gpu.model_states.default",
        "DefaultModelState.add_request",
        "learn prompt lengths (Model Runner V2)",
        ("req_index", "new_req_data"),
    ),
    Symbol(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._build_attention_metadata",
        "build the sub-batch (Model Runner V1)",
        ("num_reqs", "num_reqs_padded", "slot_mappings", "num_scheduled_tokens"),
    ),
)
"""Add a line for every private symbol that is wrapped, overridden or called with its own parameter names."""


def broken_symbols(symbols: Iterable[Symbol] = SYMBOLS, *, load: bool = False) -> list[str]:
    """What the installed vLLM lacks, one line each; empty when all is well.

    Args:
        load: look at every symbol. By default only at modules that this process has imported anyway, which is
            free; a process that does not import a module does not use its symbols either.
    """
    checked = (symbol for symbol in symbols if load or symbol.module in sys.modules)
    return [defect for symbol in checked if (defect := symbol.defect()) is not None]


_defects: list[str] = []
_active = False


def record_defect(text: str) -> None:
    """Remember something that went wrong while no mode was known to be on; ``require_active`` reports it."""
    _defects.append(text)


def mark_active() -> None:
    global _active
    _active = True


def is_active() -> bool:
    """Whether ``plugin.register`` has run in this process and accepted this vLLM."""
    return _active


def require_active(process: str) -> None:
    """What has to hold in a process that works with a mode on. Cheap enough to ask repeatedly.

    Args:
        process: what to call it in the message: ``front end``, ``engine core``, ``worker``.

    Raises:
        RuntimeError: an untested vLLM, a plugin not registered here, or a private symbol that is gone.
    """
    if not is_accepted():
        raise RuntimeError(untested_message())
    if not _active:
        raise RuntimeError(
            f"--yoco-truncation: the plugin vllm_yoco is not loaded in the {process}. Install vllm-yoco in"
            " every process's environment, and let VLLM_PLUGINS (if set) include vllm_yoco."
        )
    broken = _defects + broken_symbols()
    if broken:
        raise RuntimeError(
            f"--yoco-truncation: vLLM {vllm_version()} lacks what vllm-yoco builds on (in the {process}):"
            f" {'; '.join(broken)}. Install vLLM {_tested()}, or use --yoco-truncation off."
        )


def is_accepted() -> bool:
    """Whether the plugin works on this vLLM: a tested version, or the user said to go ahead."""
    return is_tested(vllm_version()) or os.environ.get(OVERRIDE_ENV, "0") not in ("", "0")


def untested_message() -> str:
    return (
        f"vllm-yoco is tested with vLLM {_tested()}, and this is {vllm_version()}."
        f" Install vLLM {_tested()}, or set {OVERRIDE_ENV}=1 to run on this one untested."
    )


def vllm_version() -> str:
    """Version of the imported vLLM. Not from metadata: the CPU build is a distribution of another name."""
    return str(importlib.import_module("vllm.version").__version__)


def is_tested(version: str) -> bool:
    """Whether ``version`` belongs to a tested series: any patch release, local build or pre-release of it."""
    match = re.match(r"(\d+\.\d+)(?![\d])", version)
    return match is not None and match[1] in TESTED_SERIES


def _tested() -> str:
    return " or ".join(f"{series}.x" for series in TESTED_SERIES)

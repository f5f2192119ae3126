"""What an engine for DeepSeek-V4.1 may not be started with while a mode is on: one message each.

Checked from the configuration, where it is made and again in every worker; ``model_hooks.check_replay`` asks the built
model the same. vLLM's own reaction to most of these is a warning and no trimming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_yoco.config import Truncation, flag_name
from vllm_yoco.engine_config import deepseek_topology_of
from vllm_yoco.topology import check_draft_targets, check_engram_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Refusal = Callable[["VllmConfig", Truncation], str | None]
"""Says what is wrong, starting with the flag, or None."""


def check_platform(truncation: Truncation) -> None:
    """Raises ValueError where the adapter does not exist, for any mode that is given, ``off`` included."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        raise ValueError(
            f"{flag_name('truncation')}={truncation.mode}: DeepSeek-V4.1 runs on ROCm with model and window classes of"
            " its own, which vllm-yoco does not know. Leave the flag out."
        )


def check_placement(vllm_config: VllmConfig, truncation: Truncation) -> None:
    """Layers that read rows of other positions lie where truncation leaves them what they need.

    Raises:
        ValueError: Engram layers at or above the boundary, draft targets on both sides of it (compact).
    """
    layers = deepseek_topology_of(vllm_config.model_config.hf_config)
    check_engram_layers(truncation.topology, layers.engram_layers, mode=truncation.mode)
    if vllm_config.speculative_config is not None:
        check_draft_targets(truncation.topology, draft_targets_of(vllm_config), mode=truncation.mode)


def draft_targets_of(vllm_config: VllmConfig) -> Sequence[int]:
    """Layers whose input a drafter reads, in vLLM's numbering; empty where it reads none."""
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    return get_eagle3_aux_layers_from_config(vllm_config.speculative_config) or ()


def _runner_v1(vllm_config: VllmConfig, truncation: Truncation) -> str | None:
    if vllm_config.use_v2_model_runner:
        return None
    return (
        "VLLM_USE_V2_MODEL_RUNNER: DeepSeek-V4.1 runs on Model Runner V1 here, which has no place for the lower bound"
        " of each request. Set it to 1 (V2 needs Triton, and none of the features that vLLM's log names)."
    )


def _bounded_replay(vllm_config: VllmConfig, truncation: Truncation) -> str | None:
    if vllm_config.cache_config.swa_bounded_replay:
        return None
    return (
        "--swa-bounded-replay=False: window KV would be shared between prompts, and with a mode on it depends on where"
        " the prompt ended. Leave the flag out; the decoder's own trimming is governed by --yoco-truncation."
    )


def _boundary(vllm_config: VllmConfig, truncation: Truncation) -> str | None:
    topology = truncation.topology
    if topology.kv_source_layers != (topology.boundary,):
        return (
            f"config.json: kv_source_layer_ids has {list(topology.kv_source_layers)} at or above the boundary"
            f" {topology.boundary} (the first layer with compression ratio 1), and vLLM splits the model at its last KV"
            f" source. Only {topology.boundary} may be one."
        )
    if truncation.mode == "compact" and topology.num_consumers < 2:
        return (
            f"config.json: layer {topology.boundary} is the boundary and the last layer, and no layer above it could"
            " drop rows. Use --yoco-truncation mask."
        )
    return None


def _pipeline_split(vllm_config: VllmConfig, truncation: Truncation) -> str | None:
    size, topology = vllm_config.parallel_config.pipeline_parallel_size, truncation.topology
    if size == 1:
        return None
    from vllm.distributed.utils import get_pp_indices

    stages = [get_pp_indices(topology.num_layers, rank, size) for rank in range(size)]
    if any(start <= topology.boundary and end == topology.num_layers for start, end in stages):
        return None
    return (
        f"--pipeline-parallel-size={size}: splits the layers into {stages}, and the stage with the boundary"
        f" {topology.boundary} must hold every layer after it. Set it to 1, or VLLM_PP_LAYER_PARTITION so that the last"
        " stage starts at the boundary or before it."
    )


def _sequence_parallel(vllm_config: VllmConfig, truncation: Truncation) -> str | None:
    if truncation.mode != "compact" or not uses_sequence_parallel(vllm_config):
        return None
    parallel = vllm_config.parallel_config
    return (
        f"--enable-expert-parallel=True with --tensor-parallel-size={parallel.tensor_parallel_size}: vLLM then spreads"
        " a step's rows over ranks (sequence parallelism), and the kept rows are all at the end. Leave expert"
        " parallelism out, choose a --moe-backend without it, or use --yoco-truncation mask."
    )


def uses_sequence_parallel(vllm_config: VllmConfig) -> bool:
    """vLLM's condition (``_use_sequence_parallel`` in nvidia/model.py), without importing the model."""
    from vllm.config.kernel import MEGA_MOE_BACKENDS

    parallel = vllm_config.parallel_config
    return bool(
        parallel.pipeline_parallel_size == 1
        and parallel.enable_expert_parallel
        and parallel.tensor_parallel_size > 1
        and (vllm_config.kernel_config.moe_backend in MEGA_MOE_BACKENDS or parallel.data_parallel_size > 1)
    )


TOKEN_DRAFT_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that read token ids only."""

HIDDEN_DRAFT_METHODS = ("dspark", "dflash")
"""Those that read hidden rows of the target inside a window, which is what the kept rows can promise."""


def _drafter(vllm_config: VllmConfig, truncation: Truncation) -> str | None:
    speculative = vllm_config.speculative_config
    if truncation.mode != "compact" or speculative is None or speculative.method in TOKEN_DRAFT_METHODS:
        return None
    flag = f"--speculative-config method={speculative.method}"
    if speculative.method not in HIDDEN_DRAFT_METHODS:
        known = ", ".join(TOKEN_DRAFT_METHODS + HIDDEN_DRAFT_METHODS)
        return f"{flag}: must be one of {known}; others may read hidden rows that are not computed. Use dspark."
    draft = getattr(speculative.draft_model_config, "hf_config", None)
    window = getattr(draft, "sliding_window", None)
    kinds = set(getattr(draft, "layer_types", None) or ())
    keep, backtracking = truncation.keep_tokens, truncation.max_backtracking
    if window is None or kinds - {"sliding_attention"}:
        return f"{flag}: the drafter has layers without a sliding window, which read dropped rows. Use dspark."
    if window + backtracking > keep:
        return (
            f"{flag}: the drafter's window of {window} plus B = {backtracking} reaches below the kept rows,"
            f" K = {keep}. Use --yoco-keep-tokens {window + backtracking} or more."
        )
    return None


def _routed_experts(vllm_config: VllmConfig, truncation: Truncation) -> str | None:
    if not getattr(getattr(vllm_config, "aux_output_config", None), "enable_return_routed_experts", False):
        return None
    return (
        "--enable-return-routed-experts=True: rows that are not computed have no experts, and those of rows without"
        " their window are not the model's. Leave the flag out."
    )


def _lora(vllm_config: VllmConfig, truncation: Truncation) -> str | None:
    if truncation.mode != "compact" or vllm_config.lora_config is None:
        return None
    return (
        "--enable-lora=True: LoRA kernels look adapters up by row of the whole step, and consumers run on a subset."
        " Leave the flag out, or merge the adapter into the weights."
    )


REFUSALS: tuple[Refusal, ...] = (
    _runner_v1,
    _bounded_replay,
    _boundary,
    _pipeline_split,
    _sequence_parallel,
    _drafter,
    _routed_experts,
    _lora,
)
"""What only concerns this model; ``startup`` has those that concern every model (PCP, DCP, microbatches, ...)."""


def describe_kv(hf_config: Any) -> str:
    """The part of the start-up line on KV: what prefix caching keeps, per layer group."""
    layers = deepseek_topology_of(hf_config)
    consumers = sum(1 for n in range(layers.boundary, layers.num_layers) if layers.uses_swa[n])
    producers = sum(1 for n in range(layers.boundary) if layers.uses_swa[n])
    return (
        f"persisted: compressed KV and index keys of layers {', '.join(map(str, layers.kv_owners()))}; not persisted:"
        f" window KV ({producers} producers, {consumers} consumers), rebuilt by recomputing the last"
        f" {layers.window} rows of a prefix hit"
    )

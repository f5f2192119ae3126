"""What an engine may not be started with, and the line that says what it was started with.

``validate`` runs where the configuration is made and again in every worker. With mode ``off`` it refuses
nothing but settings that mean nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_yoco import compat, counters
from vllm_yoco.config import Truncation, YocoConfig, flag_name, flag_of
from vllm_yoco.engine_config import DEEPSEEK_V41, YOCO, model_type_of, truncation_of, yoco_config_of
from vllm_yoco.plugins import check_plugins
from vllm_yoco.topology import check_draft_targets, check_engram_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_yoco.models.config import YocoModelConfig

TOKEN_DRAFT_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that read token ids only, never hidden rows that truncation does not compute."""


def check_settings(additional_config: object, process: str = "front end") -> None:
    """What can be refused before there is a model. Raises as ``validate`` does."""
    config = YocoConfig.from_additional_config(additional_config)
    check_plugins(config.plugins)
    if config.truncation != "off":
        compat.require_active(process)


def validate(vllm_config: VllmConfig, process: str = "front end") -> None:
    """Refuse what truncation does not work with. Cheap.

    Args:
        process: where this is: ``front end`` or ``worker``.

    Raises:
        ValueError: one message with the flag, the value, the rule and the fix.
        RuntimeError: this vLLM is not one that the plugin works with.
    """
    check_settings(vllm_config.additional_config, process)
    config, is_v41 = yoco_config_of(vllm_config), model_type_of(vllm_config) == DEEPSEEK_V41
    # On DeepSeek-V4.1 off is no absence: it takes vLLM's own trimming away.
    if config.truncation == "off" and not (is_v41 and config.is_given):
        return
    truncation = truncation_of(vllm_config)
    if truncation is None:
        model = vllm_config.model_config
        raise ValueError(
            f"{flag_name('truncation')}={config.truncation}: vllm-yoco does not serve the model {model.model},"
            f" whose model_type is {model.hf_config.model_type}: it must be {YOCO} or {DEEPSEEK_V41}."
            " Use --yoco-truncation off."
        )
    refusals: tuple[Callable[[VllmConfig], str | None], ...] = _REFUSALS_OF_YOCO
    if is_v41:
        from vllm_yoco.deepseek_v41 import validation

        compat.require_active(process)
        validation.check_platform(truncation)
        if not truncation.active:
            return
        validation.check_placement(vllm_config, truncation)
        refusals = tuple(functools.partial(_with, refusal, truncation) for refusal in validation.REFUSALS)
    else:
        check_placement(truncation, vllm_config.model_config.hf_config)
    for refusal in (*_REFUSALS, *refusals):
        problem = refusal(vllm_config)
        if problem:
            raise ValueError(f"{problem} (--yoco-truncation is {config.truncation}.)")


def _with(
    refusal: Callable[[VllmConfig, Truncation], str | None], truncation: Truncation, vllm_config: VllmConfig
) -> str | None:
    return refusal(vllm_config, truncation)


def check_placement(truncation: Truncation, hf_config: object) -> None:
    """Layers that a model declares as draft targets or Engram layers (config keys ``draft_target_layers``,
    ``engram_layers``) must lie where truncation leaves them what they need. Raises ValueError."""
    topology, mode = truncation.topology, truncation.mode
    check_draft_targets(topology, getattr(hf_config, "draft_target_layers", None) or (), mode=mode)
    check_engram_layers(topology, getattr(hf_config, "engram_layers", None) or (), mode=mode)


def report(vllm_config: VllmConfig) -> None:
    """Log ``describe`` once per engine, in the process that starts it."""
    # API servers build the configuration of an engine that another process has started and reported.
    if counters.in_api_server():
        return
    truncation = truncation_of(vllm_config)
    if truncation is not None and truncation.active:
        counters.announce(vllm_config.instance_id)
    if truncation is not None:
        from vllm.logger import init_logger

        init_logger(f"vllm.{__name__}").info("%s", describe(truncation, vllm_config))


def describe(truncation: Truncation, vllm_config: VllmConfig) -> str:
    """The start-up line: what is in force, why, and what it saves."""
    topology = truncation.topology
    layers = (
        f"{topology.boundary} producer + {topology.num_consumers} consumer layers"
        f" (boundary {topology.boundary}, {len(topology.swa_layers)} consumers with SWA)"
    )
    if not truncation.active:
        idle = yoco_config_of(vllm_config).model_fields_set - {"truncation", "plugins"}
        without_effect = f"; without effect: {', '.join(sorted(map(flag_of, idle)))}" if idle else ""
        rows = "; every row is computed (vLLM's trimming of the decoder is off)"
        untrimmed = rows if model_type_of(vllm_config) == DEEPSEEK_V41 else ""
        return f"YOCO truncation off: {layers}{untrimmed}{without_effect}"
    chosen = "given" if truncation.keep_tokens_rule == "given" else f"rule {truncation.keep_tokens_rule}"
    lossless = "lossless" if truncation.lossless else f"approximate (lossless from K={truncation.exact_keep_tokens})"
    parts = [
        f"YOCO truncation {truncation.mode}: K={truncation.keep_tokens} ({chosen}),"
        f" W={topology.consumer_window}, B={truncation.max_backtracking}, {lossless}",
        layers,
    ]
    longest = vllm_config.model_config.max_model_len
    lengths = sorted({min(4096, longest), longest})
    shares = [f"{truncation.removed_share(length):.0%} at L={length}" for length in lengths]
    if truncation.mode == "compact":
        parts.append(f"prefill layer rows removed: {', '.join(shares)}")
    else:
        parts.append("every row is computed, nothing is saved")
    if model_type_of(vllm_config) == DEEPSEEK_V41:
        from vllm_yoco.deepseek_v41.validation import describe_kv

        parts.append(describe_kv(vllm_config.model_config.hf_config))
        parts.append(f"boundary SWA {truncation.boundary_swa}")
    else:
        parts.append(_kv_bytes(truncation, vllm_config.model_config.hf_config, _kv_itemsize(vllm_config)))
    parts.append(f"prompt_logprobs: {truncation.prompt_logprobs}")
    return "; ".join(parts)


def _kv_itemsize(vllm_config: VllmConfig) -> int:
    """Bytes of one cached value."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    return kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, vllm_config.model_config).itemsize


def _kv_bytes(truncation: Truncation, hf_config: YocoModelConfig, itemsize: int) -> str:
    """What prefix caching and stores keep of a token, and what they do not, summed over ranks."""
    topology = truncation.topology
    layer = 2 * hf_config.num_key_value_heads * hf_config.head_dim * itemsize
    producers, global_kv = topology.boundary * layer, len(topology.kv_source_layers) * layer
    return (
        f"KV bytes per token persisted: {producers + global_kv} (producers {producers}, global KV {global_kv}),"
        f" not persisted: {len(topology.swa_layers) * layer} (consumer SWA)"
    )


def _hybrid_kv_cache(vllm_config: VllmConfig) -> str | None:
    if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return None
    return (
        "--disable-hybrid-kv-cache-manager=True: consumer SWA needs a KV cache group of its own, which only"
        " the hybrid manager has. Leave the flag out."
    )


def _decode_context_parallel(vllm_config: VllmConfig) -> str | None:
    size = vllm_config.parallel_config.decode_context_parallel_size
    if size == 1:
        return None
    return (
        f"--decode-context-parallel-size={size}: must be 1, because it spreads a sequence's KV over ranks and"
        " the kept rows are then not one interval of it. Set it to 1, or shard by --tensor-parallel-size."
    )


def _prefill_context_parallel(vllm_config: VllmConfig) -> str | None:
    size = vllm_config.parallel_config.prefill_context_parallel_size
    if size == 1:
        return None
    return (
        f"--prefill-context-parallel-size={size}: must be 1, because it spreads a prompt's rows over ranks,"
        " and the kept rows are all at the end. Set it to 1, or shard by --tensor-parallel-size."
    )


def _pipeline_parallel(vllm_config: VllmConfig) -> str | None:
    size = vllm_config.parallel_config.pipeline_parallel_size
    if size == 1:
        return None
    return (
        f"--pipeline-parallel-size={size}: must be 1, because every consumer stage needs the boundary layer's"
        " hidden rows. Set it to 1, or shard by --tensor-parallel-size."
    )


def _tensor_parallel(vllm_config: VllmConfig) -> str | None:
    size = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.hf_config.num_key_value_heads
    if heads % size == 0:
        return None
    return (
        f"--tensor-parallel-size={size}: must divide the model's num_key_value_heads={heads}, because KV"
        " heads are sharded and not replicated. Use a divisor."
    )


def _microbatching(vllm_config: VllmConfig) -> str | None:
    parallel = vllm_config.parallel_config
    if not parallel.use_ubatching:
        return None
    flag = "--enable-dbo=True" if parallel.enable_dbo else f"--ubatch-size={parallel.ubatch_size}"
    return (
        f"{flag}: microbatches split a step's rows between threads, and the kept rows are already a batch"
        " of their own inside the step. Leave the flag out."
    )


def _kv_sharing_fast_prefill(vllm_config: VllmConfig) -> str | None:
    if not vllm_config.cache_config.kv_sharing_fast_prefill:
        return None
    return (
        "--kv-sharing-fast-prefill=True: vLLM would cut the same layers' prefill a second time, to other"
        " rows. Leave the flag out."
    )


def _kv_connector(vllm_config: VllmConfig) -> str | None:
    from vllm_yoco import connectors

    return connectors.refusal(vllm_config)


def _drafts(vllm_config: VllmConfig) -> str | None:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in TOKEN_DRAFT_METHODS:
        return None
    return (
        f"--speculative-config method={speculative.method}: must be one of {', '.join(TOKEN_DRAFT_METHODS)},"
        " because a draft model's own KV and the hidden rows it may read are not supported yet. Use ngram."
    )


def _lora(vllm_config: VllmConfig) -> str | None:
    if vllm_config.lora_config is None:
        return None
    return (
        "--enable-lora=True: LoRA kernels look adapters up by row of the whole step, and consumers run on a"
        " subset. Leave the flag out, or merge the adapter into the weights."
    )


def _prompt_embeds(vllm_config: VllmConfig) -> str | None:
    if not vllm_config.model_config.enable_prompt_embeds:
        return None
    return "--enable-prompt-embeds=True: prompts must be token ids. Leave the flag out."


def _runner(vllm_config: VllmConfig) -> str | None:
    runner = vllm_config.model_config.runner_type
    if runner == "generate":
        return None
    return (
        f"--runner={runner}: must be generate, because pooling reads the last hidden state of every row, also"
        " of those that are not computed. Use --runner generate."
    )


# KV connectors come first: vLLM may disable the hybrid manager on their account.
_REFUSALS: tuple[Callable[[VllmConfig], str | None], ...] = (
    _kv_connector,
    _hybrid_kv_cache,
    _decode_context_parallel,
    _prefill_context_parallel,
    _microbatching,
    _kv_sharing_fast_prefill,
    _prompt_embeds,
    _runner,
)
_REFUSALS_OF_YOCO: tuple[Callable[[VllmConfig], str | None], ...] = (
    _pipeline_parallel,
    _tensor_parallel,
    _drafts,
    _lora,
)
"""What the ``yoco`` family adds; DeepSeek-V4.1 has its own (``deepseek_v41/validation.py``)."""

"""From a ``VllmConfig`` to the truncation in force. Pure, so that every process reaches the same K."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_yoco.config import Truncation, YocoConfig, flag_name, resolve_truncation
from vllm_yoco.deepseek_topology import DeepseekTopology, read_deepseek_topology

if TYPE_CHECKING:
    from vllm.config import VllmConfig

YOCO, DEEPSEEK_V41 = "yoco", "deepseek_v41"
"""``model_type`` of the models that the plugin serves: its own family, and vLLM's DeepSeek-V4.1."""


def yoco_config_of(vllm_config: VllmConfig) -> YocoConfig:
    """The user's settings.

    Raises:
        ValueError: for unknown keys or values.
    """
    return YocoConfig.from_additional_config(vllm_config.additional_config)


def max_backtracking_of(vllm_config: VllmConfig) -> int:
    """B: rows a decode step may have to run again, in tokens."""
    speculative = vllm_config.speculative_config
    return 1 + (speculative.num_speculative_tokens or 0 if speculative is not None else 0)


def model_type_of(vllm_config: VllmConfig) -> str | None:
    return getattr(vllm_config.model_config.hf_config, "model_type", None)


def truncation_of(vllm_config: VllmConfig) -> Truncation | None:
    """The truncation for this engine's model; None where the plugin has nothing to do with it.

    That is another model, or DeepSeek-V4.1 without a mode: vLLM trims that one by a rule of its own, so ``off`` has to
    be asked for.

    Raises:
        ValueError: for settings that the model does not allow.
    """
    config, kind = yoco_config_of(vllm_config), model_type_of(vllm_config)
    hf_config = vllm_config.model_config.hf_config
    if kind == YOCO:
        if config.boundary_swa != "clipped":
            raise ValueError(
                f"{flag_name('boundary_swa')}={config.boundary_swa}: is for DeepSeek-V4.1; in a model of type {YOCO}"
                " the boundary layer is clipped as all consumers are. Leave the flag out."
            )
        topology = hf_config.topology()
    elif kind == DEEPSEEK_V41 and config.is_given:
        topology = deepseek_topology_of(hf_config).layer_topology()
    else:
        return None
    return resolve_truncation(config, topology, max_backtracking=max_backtracking_of(vllm_config))


def deepseek_topology_of(hf_config: Any) -> DeepseekTopology:
    """Layer topology of vLLM's flattened ``DeepseekV41Config``.

    Raises:
        ValueError: for a topology without a boundary, or one that breaks a sharing rule.
    """
    fields = {key: value for key, value in vars(hf_config).items() if value is not None}
    if fields.get("candidate_source_layer_id") == -1:  # vLLM's spelling of "no filter"
        del fields["candidate_source_layer_id"]
    fields.pop("text_config", None)
    try:
        return read_deepseek_topology(fields)
    except ValueError as error:
        raise ValueError(f"config.json of a DeepSeek-V4.1 model: {error}. Use --yoco-truncation off.") from None

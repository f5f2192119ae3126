"""From a ``VllmConfig`` to the truncation in force. Pure, so that every process reaches the same K."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_yoco.config import Truncation, YocoConfig, resolve_truncation

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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


def truncation_of(vllm_config: VllmConfig) -> Truncation | None:
    """The truncation for this engine's model; None where the model is none that the plugin serves.

    Raises:
        ValueError: for settings that the model does not allow.
    """
    hf_config = vllm_config.model_config.hf_config
    if getattr(hf_config, "model_type", None) != "yoco":
        return None
    return resolve_truncation(
        yoco_config_of(vllm_config), hf_config.topology(), max_backtracking=max_backtracking_of(vllm_config)
    )

"""The text model of DeepSeek-V4.1 while a mode is given (``off`` included)."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.models.deepseek_v41.nvidia.model import DeepseekV4Model, DeepseekV41LLMForCausalLM

from vllm_yoco.compat import broken_symbols
from vllm_yoco.config import Truncation
from vllm_yoco.deepseek_v41.model_hooks import TruncatedParts, check_replay, install_bound
from vllm_yoco.deepseek_v41.symbols import SYMBOLS
from vllm_yoco.engine_config import truncation_of
from vllm_yoco.topology import check_draft_targets


class TruncatedModel(DeepseekV4Model):
    """vLLM's decoder layers; decides whether they may be run on a sub-batch, and bounds the consumers' SWA.

    Attributes:
        yoco: what the state needs; None in mode ``off`` and on a pipeline stage without consumers.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        truncation = _truncation(vllm_config)
        self.yoco: TruncatedParts | None = None
        if not truncation.active or self.end_layer <= truncation.topology.boundary:
            return
        self.yoco = install_bound(
            truncation,
            self.layers,
            range(self.start_layer, self.end_layer),
            vllm_config.scheduler_config.max_num_seqs,
            self.topk_indices_buffer.device,
        )
        if truncation.mode == "compact" and self.decoder_replay_layers is None:
            raise ValueError(
                f"--yoco-truncation=compact: vLLM does not split this model at layer {truncation.topology.boundary}, so"
                " no row can be dropped. Use --yoco-truncation mask or off."
            )

    def _decoder_replay_supported(self, vllm_config: VllmConfig, cut: int) -> bool:
        truncation = _truncation(vllm_config)
        if truncation.mode != "compact":
            return False
        check_replay(truncation, self, vllm_config, cut)
        return True

    def _set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        # The ids name the layers whose input a drafter reads.
        if self.yoco is not None:
            truncation = self.yoco.truncation
            check_draft_targets(truncation.topology, layers, mode=truncation.mode)
        super()._set_aux_hidden_state_layers(layers)


class TruncatedLanguageModel(DeepseekV41LLMForCausalLM):
    """vLLM's language model around ``TruncatedModel``.

    Raises:
        RuntimeError: this vLLM lacks something that the adapter builds on.
    """

    model_cls = TruncatedModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        broken = broken_symbols(SYMBOLS, load=True)
        if broken:
            raise RuntimeError(
                "--yoco-truncation: this vLLM lacks what vllm-yoco builds on for DeepSeek-V4.1:"
                f" {'; '.join(broken)}. Leave --yoco-truncation out, or install a tested vLLM."
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @property
    def yoco(self) -> TruncatedParts | None:
        return self.model.yoco

    def yoco_state_cls(self) -> Any:
        base = super().get_model_state_cls()  # static in vLLM 0.32, an instance method in 0.33
        if self.yoco is None:
            return base
        from vllm_yoco.deepseek_v41.state import truncating_state

        return truncating_state(base)

    # 0.33's wrapper asks the language model.
    def get_model_state_cls(self) -> Any:
        return self.yoco_state_cls()


def _truncation(vllm_config: VllmConfig) -> Truncation:
    truncation = truncation_of(vllm_config)
    assert truncation is not None, "this class is only built where a mode is given"
    return truncation


"""DeepSeek-V4.1 under the plugin's flags: vLLM's own class, subclassed, registered under its own name.

The name has to stay, because vLLM decides by it in several places (config/vllm.py, config/engram.py). Without a mode
this class builds and behaves as vLLM's does: nothing of this package is imported.

    mode given    decoder replay        consumer SWA    model state
    none          vLLM's                vLLM's          vLLM's
    off           none: all rows        vLLM's          vLLM's
    mask          none: all rows        bounded         ours
    compact       with our rows         bounded         ours

The encoder side of bounded replay (layers below the boundary, after a prefix hit) is vLLM's in every mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM as _Stock

from vllm_yoco.engine_config import truncation_of

LANGUAGE_MODEL = "DeepseekV41LLMForCausalLM"
"""Global of vLLM's wrapper module under which it looks up the language model's class."""


class DeepseekV41ForCausalLM(_Stock):  # type: ignore[misc]
    """The multimodal wrapper, which every checkpoint of this model names."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        truncation = truncation_of(vllm_config)
        if truncation is None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        from vllm_yoco import startup

        startup.validate(vllm_config, process="worker")
        from vllm_yoco.deepseek_v41.language_model import TruncatedLanguageModel

        with _language_model(TruncatedLanguageModel):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    @property
    def yoco(self) -> Any:
        """What the state truncates (``TruncatedParts``), or None where there is nothing to do."""
        return getattr(self.language_model, "yoco", None)

    # An instance method, as in vLLM 0.33; in 0.32 vLLM's is static, and both are called on the instance.
    def get_model_state_cls(self) -> Any:
        from_language_model = getattr(self.language_model, "yoco_state_cls", None)
        return super().get_model_state_cls() if from_language_model is None else from_language_model()


@contextmanager
def _language_model(cls: type) -> Iterator[None]:
    """vLLM's wrapper names its language model's class by a module global: lend it ours while it builds one."""
    module = sys.modules[_Stock.__module__]
    stock = getattr(module, LANGUAGE_MODEL)
    setattr(module, LANGUAGE_MODEL, cls)
    try:
        yield
    finally:
        setattr(module, LANGUAGE_MODEL, stock)

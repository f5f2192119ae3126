"""Entry point of the plugin (group ``vllm.general_plugins``).

vLLM calls ``register`` in the front end, the engine core, every worker, and for every ``vllm`` command,
sometimes more than once. An exception here would end all of them and an import error would make the flags
vanish, so nothing heavy is imported above and what concerns one module of vLLM waits until that module is
imported.
"""

from __future__ import annotations

import importlib
import multiprocessing
from typing import TYPE_CHECKING

from vllm_yoco import compat
from vllm_yoco.post_import import after_import

if TYPE_CHECKING:
    from logging import Logger

ARCHITECTURE = "YocoForCausalLM"
MODEL_CLASS = "vllm_yoco.models.yoco:YocoForCausalLM"

DEEPSEEK_V41_ARCHITECTURE = "DeepseekV41ForCausalLM"
DEEPSEEK_V41_MODEL_CLASS = "vllm_yoco.deepseek_v41.model:DeepseekV41ForCausalLM"
"""In place of vLLM's class of this name, which it derives from and equals unless a mode is given."""

PATCHES = {
    "completion_serving": "vllm.entrypoints.openai.completion.serving",
    "engine_args": "vllm.engine.arg_utils",
    "gpu_model_runner": "vllm.v1.worker.gpu_model_runner",
    "input_processor": "vllm.v1.engine.input_processor",
    "scheduler": "vllm.v1.core.sched.scheduler",
}
"""Patch in ``vllm_yoco.patches`` -> the vLLM module whose import it follows: the outermost it changes."""


def register() -> None:
    """Register config, model and patches with vLLM. Idempotent.

    On a vLLM that is not accepted only the flags are added: they are what refuses a mode.
    """
    if compat.is_active():
        return
    if not compat.is_accepted():
        _when_imported("engine_args")
        if multiprocessing.parent_process() is None:
            _logger().warning("%s Until then it changes nothing.", compat.untested_message())
        return
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from vllm_yoco.models.config import YocoModelConfig

    AutoConfig.register(YocoModelConfig.model_type, YocoModelConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
    ModelRegistry.register_model(DEEPSEEK_V41_ARCHITECTURE, DEEPSEEK_V41_MODEL_CLASS)
    for patch in PATCHES:
        _when_imported(patch)
    compat.mark_active()


def _when_imported(patch: str) -> None:
    try:
        after_import(PATCHES[patch], lambda: install(patch))
    except RuntimeError as error:
        compat.record_defect(f"patch {patch} came too late: {error}")


def install(patch: str) -> None:
    """Install one patch. A failure does not stop vLLM; it stops the start of an engine with a mode on."""
    try:
        importlib.import_module(f"vllm_yoco.patches.{patch}").install()
    except Exception as error:
        compat.record_defect(f"patch {patch} failed ({type(error).__name__}: {error})")


def _logger() -> Logger:
    from vllm.logger import init_logger

    return init_logger(f"vllm.{__name__}")

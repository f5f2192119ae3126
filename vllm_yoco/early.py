"""Keyword arguments of ``LLM``: ``LLM(model, yoco_truncation="compact", yoco_keep_tokens="exact")``.

``LLM`` passes unknown keyword arguments on to ``EngineArgs``, whose constructor rejects them before it
loads general plugins. Platform plugins are asked earlier, while vLLM is being imported, so this entry
point of that group answers "not my platform" and has ``EngineArgs`` extended.

vLLM skips it when ``VLLM_PLUGINS`` leaves out ``vllm_yoco_args`` or ``VLLM_TARGET_DEVICE`` is ``cpu``,
and it comes too late for a program whose first import is ``vllm.engine.arg_utils`` and that never imports
``LLM``. Then the keyword arguments are unknown, which is an error and not a silent difference;
``additional_config={"yoco": {...}}`` always works.
"""

from __future__ import annotations

from vllm_yoco.post_import import after_import

_TARGETS = ("vllm.engine.arg_utils", "vllm.entrypoints.llm")
"""The module to extend, and the one whose import follows where the first is half imported by now."""


def platform_hook() -> None:
    """Entry point of group ``vllm.platform_plugins``. Never a platform."""
    for target in _TARGETS:
        try:
            after_import(target, _extend_engine_args)
        except RuntimeError:
            continue
        return


def _extend_engine_args() -> None:
    from vllm_yoco.plugin import install

    install("engine_args")

"""Which vLLM plugins this process has: the check behind ``--plugin``. No vLLM import.

vLLM skips a plugin that fails to import and one that ``VLLM_PLUGINS`` leaves out, and starts without it.
Whoever needs one names it, and gets an error instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from vllm_yoco.config import flag_name

GROUP = "vllm.general_plugins"
ALLOWED_ENV = "VLLM_PLUGINS"


def check_plugins(names: Sequence[str]) -> None:
    """Names are those of entry points; ``-`` and ``_`` are the same.

    Raises:
        ValueError: a plugin is not loaded, and why.
    """
    if not names:
        return
    installed = {_normal(point.name): point for point in entry_points(group=GROUP)}
    for name in names:
        problem = _problem(installed.get(_normal(name)))
        if problem:
            loaded = ", ".join(point.name for point in installed.values() if _problem(point) is None)
            raise ValueError(f"{flag_name('plugins')}={name!r}: {problem} Loaded: {loaded or 'none'}.")


def _problem(point: EntryPoint | None) -> str | None:
    if point is None:
        return "no such plugin is installed. Install it in this environment, or correct the name."
    allowed = os.environ.get(ALLOWED_ENV)
    # As vLLM reads it: exact names between commas, spaces included.
    if allowed is not None and point.name not in allowed.split(","):
        return f"{ALLOWED_ENV}={allowed} excludes it. Add {point.name} to {ALLOWED_ENV}, or unset that."
    try:
        point.load()
    except Exception as error:
        return f"it fails to import ({type(error).__name__}: {error})."
    return None


def _normal(name: str) -> str:
    return name.strip().replace("-", "_")

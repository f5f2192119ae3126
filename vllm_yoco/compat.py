"""Which vLLM the plugin works with: tested versions, and every private vLLM symbol that it leans on."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

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
            found = importlib.import_module(self.module)
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


_ENGINE_ARGS = "vllm.engine.arg_utils"

SYMBOLS: tuple[Symbol, ...] = (
    Symbol(_ENGINE_ARGS, "EngineArgs.add_cli_args", "add the --yoco-* flags", ("parser",)),
    Symbol(_ENGINE_ARGS, "EngineArgs.from_cli_args", "fold the flags into additional_config", ("args",)),
    Symbol(_ENGINE_ARGS, "EngineArgs.create_engine_config", "validate the finished configuration"),
)


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
    from vllm.version import __version__

    return str(__version__)


def is_tested(version: str) -> bool:
    """Whether ``version`` belongs to a tested series: any patch release, local build or pre-release of it."""
    match = re.match(r"(\d+\.\d+)(?![\d])", version)
    return match is not None and match[1] in TESTED_SERIES


def _tested() -> str:
    return " or ".join(f"{series}.x" for series in TESTED_SERIES)

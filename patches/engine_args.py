"""The plugin's flags, keyword arguments and start-up check.

Target: ``vllm.engine.arg_utils.EngineArgs``: ``add_cli_args``, ``from_cli_args``, ``__init__`` (of
    ``AsyncEngineArgs`` too) and ``create_engine_config``. Each calls the original and adds to it; without
    a yoco setting the results are the original ones.
Reason: vLLM has no hook for a plugin's own flags, none for keyword arguments of ``LLM``, and none that
    sees the finished configuration before processes are started with it.
Tested with: vLLM 0.32.0.
Retired by: a plugin group that may add an argument group with its own section of ``VllmConfig``,
    validated there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm_yoco import cli
from vllm_yoco.config import flag_name, flag_of

_typed: list[tuple[Any, set[str]]] = []
"""The ``additional_config`` of every parsed command line, by identity, and the settings given as flags. Not an
attribute of the arguments: ``vllm bench latency`` makes new ones from ``vars()`` of them, known names only."""

_KEYWORDS = tuple(f"yoco_{field}" for field in cli.SETTINGS)


def install() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    if getattr(EngineArgs.add_cli_args, "_yoco", False):
        return
    EngineArgs.add_cli_args = staticmethod(_add_cli_args(EngineArgs.add_cli_args))
    EngineArgs.from_cli_args = classmethod(_from_cli_args(EngineArgs.from_cli_args.__func__))
    EngineArgs.create_engine_config = _create_engine_config(EngineArgs.create_engine_config)
    for cls in (EngineArgs, AsyncEngineArgs):
        cls.__init__ = _init(cls.__init__)


def _add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: argparse.ArgumentParser) -> Any:
        parser = original(parser)
        cli.add_arguments(parser)
        return parser

    add_cli_args._yoco = True  # type: ignore[attr-defined]
    return add_cli_args


def _from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        engine_args = original(cls, args)
        settings = cli.settings_of(args)
        _typed.append((engine_args.additional_config, set()))
        if settings:
            with _refusals(engine_args):
                engine_args.additional_config = cli.merge_settings(settings, engine_args.additional_config)
            _typed.append((engine_args.additional_config, set(settings)))
        return engine_args

    return from_cli_args


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_yoco import startup

        with _refusals(self):
            startup.check_settings(self.additional_config)  # before a model is looked for
        vllm_config = original(self, *args, **kwargs)
        with _refusals(self):
            startup.validate(vllm_config)
            startup.report(vllm_config)
        return vllm_config

    return create_engine_config


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {key.removeprefix("yoco_"): kwargs.pop(key) for key in _KEYWORDS if key in kwargs}
        unknown = sorted(key for key in kwargs if key.startswith("yoco_"))
        if unknown:
            raise TypeError(f"{unknown[0]}: is no setting of vllm-yoco; the settings are {', '.join(_KEYWORDS)}.")
        original(self, *args, **kwargs)
        if given:
            self.additional_config = cli.merge_settings(given, self.additional_config)

    return __init__


@contextlib.contextmanager
def _refusals(engine_args: Any) -> Iterator[None]:
    """Whoever typed a wrong value needs the message and not the stack; a program gets the exception."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        flags = [flags for config, flags in _typed if config is engine_args.additional_config]
        if not flags:
            raise
        message = str(error)
        for field in flags[-1]:
            message = message.replace(flag_name(field), flag_of(field))
        print(f"vllm: error: {message}", file=sys.stderr)
        sys.exit(2)

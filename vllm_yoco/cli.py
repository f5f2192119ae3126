"""The command-line flags: what they are called, what they accept, how they become settings. No vLLM import.

A flag that was given ends up in ``additional_config["yoco"]``, which vLLM carries to every process. One
that was not given leaves no trace. Settings may come from a flag or from ``--additional-config``; giving
both is an error unless they agree, because neither the reader of a command nor of a configuration file
could tell which one holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from vllm_yoco.config import CONFIG_KEY, BoundarySwa, Mode, PromptLogprobsPolicy, YocoConfig, flag_name
from vllm_yoco.plugins import check_plugins

GROUP = "yoco"
"""Title of the argument group, as in ``vllm serve --help=yoco``."""

SETTINGS = tuple(YocoConfig.model_fields)
_DEST = "yoco_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group; a value that breaks a rule ends the program with one line that says so."""
    group = parser.add_argument_group(
        GROUP, "YOCO prefill truncation: consumer layers run on the last K prompt rows only."
    )
    group.add_argument(
        "--yoco-truncation",
        action=_Setting,
        field="truncation",
        metavar=_choice(get_args(Mode)),
        help="off: stock behaviour. compact: consumer layers do not compute prompt rows before the last K."
        " mask: the same visibility, but every row is computed (to compare with). Default: off.",
    )
    group.add_argument(
        "--yoco-keep-tokens",
        action=_Setting,
        field="keep_tokens",
        metavar="{N,min,exact}",
        help="K, the prompt rows that consumer layers run on. min: sliding window + speculative tokens + 1,"
        " the smallest allowed. exact: the smallest that changes no output. Default: min.",
    )
    group.add_argument(
        "--yoco-prompt-logprobs",
        action=_Setting,
        field="prompt_logprobs",
        metavar=_choice(get_args(PromptLogprobsPolicy)),
        help="What to do with a request for prompt_logprobs, which rows that are not computed do not have."
        " drop: serve it without them. reject: refuse it. full: keep every row of this request."
        " Default: drop.",
    )
    group.add_argument(
        "--yoco-boundary-swa",
        action=_Setting,
        field="boundary_swa",
        metavar=_choice(get_args(BoundarySwa)),
        help="DeepSeek-V4.1 only: the sliding window of the boundary layer, which has the window KV of every row."
        " clipped: it ends at the kept rows, as in the layers above. open: it does not. Default: clipped.",
    )
    group.add_argument(
        "--plugin",
        action=_Plugin,
        field="plugins",
        metavar="NAME",
        help="Refuse to start unless the vLLM plugin NAME is loaded, such as vllm_yoco. May be repeated.",
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags; empty if none was."""
    return {field: getattr(args, _DEST + field) for field in SETTINGS if hasattr(args, _DEST + field)}


def merge_settings(settings: Mapping[str, Any], additional_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of ``additional_config`` that also holds ``settings``.

    Raises:
        ValueError: a setting is malformed, or given twice with different values.
    """
    merged = dict(additional_config or {})
    given = YocoConfig.from_additional_config(merged)
    added = YocoConfig.from_additional_config({CONFIG_KEY: settings})
    for field in given.model_fields_set & added.model_fields_set - {"plugins"}:
        old, new = getattr(given, field), getattr(added, field)
        if old != new:
            raise ValueError(f"{flag_name(field)} is given twice, as {new} and as {old}: leave one out.")
    section = {**dict(merged.get(CONFIG_KEY, {})), **added.model_dump(exclude_unset=True)}
    plugins = dict.fromkeys((*given.plugins, *added.plugins))
    if plugins:
        section["plugins"] = list(plugins)  # vLLM hashes additional_config as JSON
    return {**merged, CONFIG_KEY: section}


class _Setting(argparse.Action):
    """Stores one checked setting. Checks here, so that the message is not buried in a traceback later."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, field: str, metavar: str, help: str) -> None:
        self.field = field
        # SUPPRESS: a flag that is not given leaves no trace.
        super().__init__(option_strings, _DEST + field, default=argparse.SUPPRESS, metavar=metavar, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        option = option_string or self.option_strings[0]
        try:
            setattr(namespace, self.dest, self.parse(values, namespace))
        except ValueError as error:
            message = str(error).replace(flag_name(self.field), option)
            # Not parser.error(): vLLM's usage text is two screens long and would hide the message.
            parser.exit(2, f"{parser.prog}: error: {message}\n")

    def parse(self, value: str, namespace: argparse.Namespace) -> Any:
        return getattr(YocoConfig.from_additional_config({CONFIG_KEY: {self.field: value}}), self.field)


class _Plugin(_Setting):
    """Collects names of plugins that are loaded."""

    def parse(self, value: str, namespace: argparse.Namespace) -> list[str]:
        names = [*getattr(namespace, self.dest, []), value]
        check_plugins(names)
        return names


def _choice(values: tuple[str, ...]) -> str:
    return f"{{{','.join(values)}}}"

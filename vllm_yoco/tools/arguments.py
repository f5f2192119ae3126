"""Argument types that the commands share: numbers, lists, and files that are looked at before any work is done."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_yoco.config import KeepTokens

PLOT_SUFFIXES = (".pdf", ".png", ".svg")


def positive(text: str) -> int:
    return _number(text, 1)


def non_negative(text: str) -> int:
    return _number(text, 0)


def two_or_more(text: str) -> int:
    return _number(text, 2)


def keep_tokens(text: str) -> KeepTokens:
    if text in ("min", "exact"):
        return "min" if text == "min" else "exact"
    return _number(text, 1, ", min or exact")


def chunk_tokens(text: str) -> int | None:
    """None is the whole prompt in one chunk."""
    return None if text == "all" else _number(text, 1, ", or all")


def _number(text: str, least: int, or_else: str = "") -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least {least}{or_else}")
    return int(text)


def split(text: str, item: Callable[[str], Any]) -> tuple[Any, ...]:
    """The values of a list that is separated by commas."""
    return tuple(item(part.strip()) for part in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    return split(text, non_negative)


def positives(text: str) -> tuple[int, ...]:
    return split(text, positive)


class List(argparse.Action):
    """Values separated by commas, by spaces, or both: ``--keep-tokens min,exact`` and ``--keep-tokens min exact``."""

    def __init__(self, *args: Any, item: Callable[[str], Any], **kwargs: Any) -> None:
        self.item = item
        super().__init__(*args, nargs="+", **kwargs)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given: Sequence[str] = values
        try:
            items = [value for text in given for value in split(text, self.item)]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, items)


def output_file(text: str) -> str:
    """A file that can be written; ``-`` is standard output."""
    if text == "-":
        return text
    path, folder = Path(text), Path(text).parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder. Name a file in it")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(folder)!r}. Make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no permission")
    return text


def plot_file(text: str) -> str:
    """A file that can be written, in one of the formats of a plot."""
    if Path(text).suffix not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} must end with one of {', '.join(PLOT_SUFFIXES)}")
    return output_file(text)


def input_file(text: str) -> str:
    """A file that can be read."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such file")
    if not os.access(text, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: no permission")
    return text


def model_dir(text: str) -> Path:
    """A folder with a config.json."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be a folder with a config.json")
    return Path(text)

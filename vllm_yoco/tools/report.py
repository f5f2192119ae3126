"""Output of the commands: tables and lists for people, JSON for programs, progress bars, plots."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_yoco import __version__
from vllm_yoco.tools.arguments import output_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


class Number(str):
    """Text that a table aligns like a number."""


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=output_file,
        help="also write the results as JSON; - prints them instead of the tables",
    )


def json_document(command: str, results: Mapping[str, Any]) -> str:
    """The results as JSON, headed by command and version."""
    return json.dumps({"command": command, "version": __version__, **results}, indent=1)


def make_report_folder(folder: Path) -> None:
    """The folder of ``--out``. Raises ValueError, before any work is done, for one that is of no use."""
    if find_spec("matplotlib") is None:
        raise ValueError("--out: its plots need matplotlib. Run pip install 'vllm-yoco[plot]'.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be made ({error.strerror}). Name a folder that can.") from None


def emit(command: str, text: str, results: Mapping[str, Any], json_to: str | None) -> None:
    """Print ``text``, or ``results`` if ``json_to`` is -; write them to the file that it names otherwise.

    Raises:
        OSError: if the file cannot be written.
    """
    document = json_document(command, results)
    print(document if json_to == "-" else text)
    if json_to not in (None, "-"):
        Path(json_to).write_text(document + "\n", encoding="utf-8")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> str:
    """Columns two spaces apart. Integers get thousands separators, floats three decimals, None is ``-``.

    Columns with a number in them are aligned to the right.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    right = [any(isinstance(row[i], int | float | Number) for row in rows) for i in range(len(headers))]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in (headers, ["-" * width for width in widths], *cells)
    ]
    return "\n".join([title, *lines] if title else lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def ranges(layers: Iterable[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3, 6; ``none`` for nothing."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def si(value: float) -> Number:
    """Four significant digits and a decimal prefix: ``36.81 T``."""
    for exponent, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 0.99995 * 10**exponent:
            return Number(f"{value / 10**exponent:#.4g} {prefix}")
    return Number(f"{value:.4g}")


def percent(share: float | None) -> Number | None:
    """``12.5%`` for 0.125."""
    return None if share is None else Number(f"{share:.1%}")


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """``items`` under a progress bar on stderr, if that is a terminal and it takes longer than a second."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield from items
    else:
        yield from tqdm(items, desc=label, delay=1, leave=False, disable=None)


def new_figure(columns: int) -> Figure:
    """A figure with room for ``columns`` panels, independent of any display.

    Raises:
        ValueError: without matplotlib, an optional dependency.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed. Run pip install 'vllm-yoco[plot]', or leave the"
            " option out."
        ) from None
    return Figure(figsize=(4.8 * columns, 4.8), dpi=120, layout="constrained")

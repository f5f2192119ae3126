"""How many suffix rows make a sliding-window cache exact? Two tiny models in exact fractions.

Each layer adds to its input the mean of the window of its KV; KV is a number per position:

    out[i] = h[i] + mean(kv[i-W+1 .. i])        h = input of the layer

    shared       kv = the model's input, for every layer    ->  W rows are enough
    per-layer    kv = h, the layer's own input              ->  every layer adds W - 1 rows

Replay runs the stack on the last n inputs alone, as truncated prefill does; decode then continues from the
stores it left, the last W entries of KV per layer. Background: docs/theory.md.

    python examples/lab_replay.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from math import lcm

Numbers = list[Fraction]

DECODE_INPUTS = (0, 1)
"""Rows tried after every input of the span check."""


@dataclass(frozen=True)
class Model:
    """`depth` layers; a query sees `window` keys, itself included; KV shared or from each layer's input."""

    window: int
    depth: int
    shared: bool = False


@dataclass(frozen=True)
class Prefill:
    """Result of running a list of inputs: per layer its KV and outputs, one entry per row that was run."""

    kv: list[Numbers]
    outputs: list[Numbers]
    window: int

    @property
    def last(self) -> Fraction:
        """Output of the last row."""
        return self.outputs[-1][-1]

    @property
    def stores(self) -> list[Numbers]:
        """Per layer the last W entries of KV, oldest first; fewer if fewer rows were run."""
        return [kv[-self.window :] for kv in self.kv]


def prefill(model: Model, inputs: Sequence[Fraction | int]) -> Prefill:
    """Run all rows from nothing: keys before `inputs` do not exist."""
    base = [Fraction(value) for value in inputs]
    hidden, all_kv, outputs = base, [], []
    for _ in range(model.depth):
        kv = base if model.shared else hidden
        hidden = [h + _mean(kv[max(0, i - model.window + 1) : i + 1]) for i, h in enumerate(hidden)]
        all_kv.append(kv)
        outputs.append(hidden)
    return Prefill(all_kv, outputs, model.window)


def decode(model: Model, stores: list[Numbers], value: Fraction | int) -> Fraction:
    """Output of one more row, which sees the last W - 1 stored entries and itself."""
    base = hidden = Fraction(value)
    for store in stores:
        kv = base if model.shared else hidden
        hidden += _mean([*store, kv][-model.window :])
    return hidden


def replay_span(window: int, depth: int) -> int:
    """Rows to replay so that W entries of every layer's own KV are exact: R = W + (D - 1)(W - 1)."""
    return window + (depth - 1) * (window - 1)


def compare(model: Model, inputs: Sequence[int], rows: int, next_input: int) -> dict[str, object]:
    """Full prefill against replay of the last `rows` inputs.

    first_diff: (layer from 1, position) of the first store entry that is wrong or missing, or None.
    """
    full, suffix = prefill(model, inputs), prefill(model, inputs[-rows:])
    last, following = suffix.last, decode(model, suffix.stores, next_input)
    first_diff = _first_difference(full, suffix, len(inputs))
    return {
        "last": last,
        "next": following,
        "last_exact": last == full.last,
        "next_exact": following == decode(model, full.stores, next_input),
        "kv_exact": first_diff is None,
        "first_diff": first_diff,
        "last_layer_kv": suffix.stores[-1],
    }


@dataclass(frozen=True)
class SpanCheck:
    """Exhaustive check of one (W, D): inputs tried, and how many of them R - 1 rows get wrong."""

    span: int
    inputs: int
    broken_by_one_row_less: int


@cache
def check_span(window: int, depth: int) -> SpanCheck:
    """Try every 0/1 input of R + 2 positions: R rows must be exact, output, decode and stores alike.

    AssertionError with the first input for which R rows are not enough.
    """
    model, span = Model(window, depth), replay_span(window, depth)
    tried = broken = 0
    for inputs in product((0, 1), repeat=span + 2):
        full = prefill(model, inputs)
        enough, short = (prefill(model, inputs[-rows:]) for rows in (span, span - 1))
        expected = _observed(model, full)
        assert (enough.stores, _observed(model, enough)) == (full.stores, expected), inputs
        tried += 1
        broken += _observed(model, short) != expected
    return SpanCheck(span, tried, broken)


def kv_intervals(window: int, depth: int) -> list[tuple[int, int]]:
    """Per layer, first to last: positions whose KV input must be exact, relative to the last row (0)."""
    return [(1 - replay_span(window, depth - layer), 0) for layer in range(depth)]


def _observed(model: Model, run: Prefill) -> tuple[Fraction, ...]:
    return run.last, *(decode(model, run.stores, value) for value in DECODE_INPUTS)


def _first_difference(full: Prefill, suffix: Prefill, length: int) -> tuple[int, int] | None:
    for layer, (want, got) in enumerate(zip(full.stores, suffix.stores, strict=True), start=1):
        padded = [None] * (len(want) - len(got)) + list(got)
        for offset, (right, value) in enumerate(zip(want, padded, strict=True)):
            if right != value:
                return layer, length - len(want) + offset
    return None


def _mean(values: Sequence[Fraction]) -> Fraction:
    # Over one denominator: a reduction per mean instead of one per addition.
    scale = lcm(*(value.denominator for value in values))
    total = sum(value.numerator * (scale // value.denominator) for value in values)
    return Fraction(total, scale * len(values))


def main() -> None:
    """Print the shared/per-layer table, replay by length, the span check and two spans worth knowing."""
    inputs, following, window, depth = range(1, 9), 9, 3, 2
    print(f"inputs 1..8, W = {window}, D = {depth}, then {following}; replay of the last {window} rows\n")
    print("KV         last full/replay   next full/replay")
    for name, shared in (("shared", True), ("per-layer", False)):
        model = Model(window, depth, shared)
        full = prefill(model, inputs)
        got = compare(model, inputs, window, following)
        following_full = decode(model, full.stores, following)
        print(f"{name:9}  {full.last!s:>6} / {got['last']!s:<9}  {following_full!s:>6} / {got['next']}")

    print("\nper-layer KV\nrows   last    next    first wrong store entry (layer, position)")
    for rows in range(1, 9):
        got = compare(Model(window, depth), inputs, rows, following)
        print(f"{rows:4}   {got['last']!s:7} {got['next']!s:7} {got['first_diff'] or 'none: exact'}")

    print("\nR = W + (D - 1)(W - 1), every 0/1 input of R + 2 positions")
    print(" W  D   R  inputs  wrong with R - 1 rows")
    total = 0
    for window, depth in product((2, 3, 4), (1, 2, 3)):
        check = check_span(window, depth)
        total += check.inputs
        print(f"{window:2} {depth:2} {check.span:3}  {check.inputs:6}  {check.broken_by_one_row_less:6}")
    print(f"{total} inputs, all exact with R rows")

    per_layer = [1 - first for first, _ in kv_intervals(5, 4)]
    print(f"\nW = 5, D = 4: R = {replay_span(5, 4)}; KV rows per layer {per_layer}, {sum(per_layer)} in all")
    print(f"20 layers, W = 128: R = {replay_span(128, 20)}, not 20 x 128 = {20 * 128}")


if __name__ == "__main__":
    main()

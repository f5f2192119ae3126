"""Rows, visible keys and cells of a running engine against the plan, and of ``mask`` against ``compact``.

``check_trace`` fills one ``RequestTrace`` per request from what the engine built. Here the traces meet
``vllm_yoco.plan``, chunk by chunk as the scheduler cut the prompt. No vLLM import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_yoco.plan import Chunk, Mode, keep_start, plan_rows
from vllm_yoco.topology import LayerTopology

NOTHING, BAD, UNSEEN = -1, -2, -3
"""No cell; a value that makes no sense, such as a key of another request; the row was not there."""

COUNTS = ("layers", "zero_layers", "global_writes")
VALUES = ("first_key", "cell", "global_seen")

ROWS, KEYS, CELLS = "rows computed", "visible window keys", "window cells written"
GLOBAL_WRITES, GLOBAL_KEYS = "global KV written", "visible global keys"


@dataclass
class RequestTrace:
    """What one request's consumer rows did; every array is indexed by position, prompt and output alike.

    ==============  ================================================================================
    layers          consumer layers that ran on the row
    zero_layers     consumer layers whose window branch gave exactly zero there
    first_key       lowest window key the row sees; BAD if its keys are not consecutive and its own
    cell            block of the request * block size + offset that its window K/V went to
    global_writes   KV sources that wrote the row's global K/V
    global_seen     last global key the row sees, if all before it are there too
    ==============  ================================================================================
    """

    num_prompt_tokens: int
    num_consumers: int
    chunks: list[tuple[int, int]] = field(default_factory=list)
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_prompt_tokens: int, num_consumers: int) -> RequestTrace:
        columns = {name: np.zeros(0, np.int64) for name in COUNTS + VALUES}
        return cls(num_prompt_tokens, num_consumers, [], columns)

    def add_chunk(self, start: int, length: int) -> None:
        """Rows ``[start, start + length)`` were scheduled in one step."""
        self.chunks.append((start, length))
        more = max(0, start + length - len(self.columns["layers"]))
        for name, column in self.columns.items():
            self.columns[name] = np.pad(column, (0, more), constant_values=0 if name in COUNTS else UNSEEN)

    def add(self, name: str, positions: np.ndarray, counts: np.ndarray) -> None:
        self.columns[name][positions] += counts

    def note(self, name: str, positions: np.ndarray, values: np.ndarray) -> None:
        """Groups of layers have to agree: a second, different value is BAD."""
        column = self.columns[name]
        before = column[positions]
        column[positions] = np.where((before == UNSEEN) | (before == values), values, BAD)

    def lowest_visible(self, num_swa_layers: int) -> np.ndarray:
        """``first_key``, and position + 1 where the window branch is zero in every layer that ran."""
        times = self.columns["layers"] // self.num_consumers
        zero = self.columns["zero_layers"]
        nothing = np.arange(len(zero)) + 1
        some = np.where(zero == 0, self.columns["first_key"], BAD)
        return np.where(zero == times * num_swa_layers, nothing, some)

    def cells(self) -> np.ndarray:
        """``cell``; a row that the window branch did not run on wrote nothing."""
        cell = self.columns["cell"]
        return np.where(cell == UNSEEN, NOTHING, cell)


@dataclass
class Tally:
    """Values compared under one name, and where they first differed."""

    check: str
    values: int = 0
    mismatches: int = 0
    where: str | None = None

    def add(self, seen: np.ndarray, expected: np.ndarray, where: Callable[[int], str]) -> None:
        """``where(i)`` says where value i comes from."""
        wrong = np.flatnonzero(seen != expected)
        self.values += len(seen)
        self.mismatches += len(wrong)
        if len(wrong) and self.where is None:
            i = int(wrong[0])
            self.where = f"{where(i)}: {_say(seen[i])}, must be {_say(expected[i])}"


def _say(value: int) -> str:
    return {NOTHING: "none", BAD: "not consistent", UNSEEN: "not there"}.get(int(value), str(int(value)))


def against_plan(
    label: str,
    traces: Sequence[RequestTrace],
    tallies: dict[str, Tally],
    *,
    mode: Mode,
    keep_tokens: int,
    topology: LayerTopology,
    block_size: int,
) -> None:
    """Compare one run of an engine with the plan of the chunks that its scheduler made.

    Args:
        label: names the run where values differ.
        tallies: extended by check.
        block_size: of the window's KV cache group, in tokens.
    """
    for number, trace in enumerate(traces):
        length, end = trace.num_prompt_tokens, len(trace.columns["layers"])
        position = np.arange(end)
        s_keep = 0 if mode == "off" else keep_start(length, keep_tokens)
        times, scheduled, lowest, writes = (np.zeros(end, np.int64) for _ in range(4))
        for start, rows in trace.chunks:
            plan = plan_rows(
                [Chunk(length, start, rows)], mode=mode, keep_tokens=keep_tokens, window=topology.consumer_window
            )
            scheduled[start : start + rows] += 1
            times[plan.positions] += 1
            lowest[plan.positions] = plan.visible_lo
            # The engine's mask writes no more than compact: what lies below s_keep has no cell.
            writes[plan.positions] = plan.writes_swa & (plan.positions >= s_keep)
        ran = times > 0

        def where(i: int, number: int = number, length: int = length) -> str:
            return f"{label}, prompt {number} (L={length}), position {i}"

        def compare(check: str, seen: np.ndarray, expected: np.ndarray, chosen: np.ndarray | None = None) -> None:
            index = position if chosen is None else position[chosen]
            tally = tallies.setdefault(check, Tally(check))
            tally.add(seen[index], expected[index], lambda i: where(index[i]))  # noqa: B023

        sources = len(topology.kv_source_layers)
        compare(ROWS, trace.columns["layers"], times * topology.num_consumers)
        if topology.swa_layers:
            compare(KEYS, trace.lowest_visible(len(topology.swa_layers)), lowest, ran)
            compare(CELLS, trace.cells(), np.where(writes, position - s_keep % block_size, NOTHING))
        compare(GLOBAL_WRITES, trace.columns["global_writes"], scheduled * sources)
        compare(GLOBAL_KEYS, trace.columns["global_seen"], position, ran)


def mask_against_compact(
    label: str,
    mask: Sequence[RequestTrace],
    compact: Sequence[RequestTrace],
    tallies: dict[str, Tally],
    topology: LayerTopology,
) -> None:
    """Compare every row that both modes ran: keys, cells and global keys."""
    for number, (one, other) in enumerate(zip(mask, compact, strict=True)):
        end = min(len(t.columns["layers"]) for t in (one, other))
        index = np.flatnonzero((one.columns["layers"][:end] > 0) & (other.columns["layers"][:end] > 0))
        for check, a, b in _pairs(one, other, topology):
            name = f"{check}, mask = compact"
            tally = tallies.setdefault(name, Tally(name))
            tally.add(
                b[index],
                a[index],
                lambda i: f"{label}, prompt {number} (L={one.num_prompt_tokens}), position {index[i]}",  # noqa: B023
            )


def _pairs(
    one: RequestTrace, other: RequestTrace, topology: LayerTopology
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    if topology.swa_layers:
        yield KEYS, *(trace.lowest_visible(len(topology.swa_layers)) for trace in (one, other))
        yield CELLS, one.cells(), other.cells()
    yield GLOBAL_KEYS, one.columns["global_seen"], other.columns["global_seen"]

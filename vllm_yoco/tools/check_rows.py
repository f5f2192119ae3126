"""Rows, visible keys and cells of a running engine against the plan, and of ``mask`` against ``compact``.

``check_trace`` fills one ``RequestTrace`` per request from what the engine built. Here the traces meet
``vllm_yoco.plan``, chunk by chunk as the scheduler cut the prompt. No vLLM import.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
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
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """First row, rows, number of the engine's step."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    may_idle: bool = True
    """The engine skips consumer layers in steps of nothing but placeholders."""

    @classmethod
    def empty(cls, num_prompt_tokens: int, num_consumers: int, *, may_idle: bool = True) -> RequestTrace:
        columns = {name: np.zeros(0, np.int64) for name in COUNTS + VALUES}
        return cls(num_prompt_tokens, num_consumers, [], columns, may_idle)

    def add_chunk(self, start: int, length: int, step: int) -> None:
        """Rows ``[start, start + length)`` were scheduled in one step."""
        self.chunks.append((start, length, step))
        more = max(0, start + length - len(self.columns["layers"]))
        for name, column in self.columns.items():
            self.columns[name] = np.pad(column, (0, more), constant_values=0 if name in COUNTS else UNSEEN)

    @property
    def recomputed_rows(self) -> int:
        """Rows scheduled once more, after a preemption."""
        return sum(length for _, length, _ in self.chunks) - len(self.columns["layers"])

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

    def add(self, where: str, positions: np.ndarray, seen: np.ndarray, expected: np.ndarray) -> None:
        """``where`` names the request; all arrays have one entry per position."""
        wrong = np.flatnonzero(seen != expected)
        self.values += len(seen)
        self.mismatches += len(wrong)
        if len(wrong) and self.where is None:
            i = int(wrong[0])
            self.where = f"{where}, position {positions[i]}: {_say(seen[i])}, must be {_say(expected[i])}"


def _say(value: int) -> str:
    return {NOTHING: "none", BAD: "not consistent", UNSEEN: "not there"}.get(int(value), str(int(value)))


@dataclass(frozen=True)
class Expected:
    """What one request's rows have to do, by position (as ``RequestTrace``)."""

    scheduled: np.ndarray
    times: np.ndarray
    lowest: np.ndarray
    cells: np.ndarray

    @classmethod
    def of(
        cls, trace: RequestTrace, mode: Mode, keep_tokens: int, window: int, block_size: int, idle: Set[int]
    ) -> Expected:
        """From the plan of each chunk that the scheduler made. Cells are those of ``vllm_yoco.attention``.

        In ``idle`` steps no consumer layer runs.
        """
        length, end = trace.num_prompt_tokens, len(trace.columns["layers"])
        s_keep = 0 if mode == "off" else keep_start(length, keep_tokens)
        scheduled, times, lowest = (np.zeros(end, np.int64) for _ in range(3))
        cells = np.full(end, NOTHING)
        for start, rows, step in trace.chunks:
            scheduled[start : start + rows] += 1
            if step in idle:
                continue
            plan = plan_rows([Chunk(length, start, rows)], mode=mode, keep_tokens=keep_tokens, window=window)
            times[plan.positions] += 1
            lowest[plan.positions] = plan.visible_lo
            # The engine's mask writes no more than compact: what lies below s_keep has no cell.
            writers = plan.positions[plan.writes_swa & (plan.positions >= s_keep)]
            cells[writers] = writers - s_keep % block_size
        return cls(scheduled, times, lowest, cells)


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
    idle = _idle_steps(traces, keep_tokens) if mode == "compact" else frozenset()
    for number, trace in enumerate(traces):
        expected = Expected.of(trace, mode, keep_tokens, topology.consumer_window, block_size, idle)
        position = np.arange(len(expected.times))
        ran = expected.times > 0
        layers, sources = expected.times * topology.num_consumers, len(topology.kv_source_layers)
        where = f"{label}, prompt {number} (L={trace.num_prompt_tokens})"
        _add(tallies, ROWS, where, trace.columns["layers"], layers)
        if topology.swa_layers:
            lowest = trace.lowest_visible(len(topology.swa_layers))
            _add(tallies, KEYS, where, lowest, expected.lowest, ran)
            _add(tallies, CELLS, where, trace.cells(), expected.cells)
        _add(tallies, GLOBAL_WRITES, where, trace.columns["global_writes"], expected.scheduled * sources)
        _add(tallies, GLOBAL_KEYS, where, trace.columns["global_seen"], position, ran)


def _idle_steps(traces: Sequence[RequestTrace], keep_tokens: int) -> Set[int]:
    """Steps whose chunks all end at or below s_keep."""
    steps: dict[int, list[bool]] = {}
    for trace in traces:
        for start, rows, step in trace.chunks:
            below = start + rows <= keep_start(trace.num_prompt_tokens, keep_tokens)
            steps.setdefault(step, []).append(below and trace.may_idle)
    return frozenset(step for step, below in steps.items() if all(below))


def mask_against_compact(
    label: str,
    mask: Sequence[RequestTrace],
    compact: Sequence[RequestTrace],
    tallies: dict[str, Tally],
    topology: LayerTopology,
) -> None:
    """Compare every row that both modes ran: keys, cells and global keys."""
    for number, traces in enumerate(zip(mask, compact, strict=True)):
        both = np.logical_and(*(trace.columns["layers"] > 0 for trace in traces))
        where = f"{label}, prompt {number} (L={traces[0].num_prompt_tokens})"
        seen = {GLOBAL_KEYS: [trace.columns["global_seen"] for trace in traces]}
        if topology.swa_layers:
            seen[KEYS] = [trace.lowest_visible(len(topology.swa_layers)) for trace in traces]
            seen[CELLS] = [trace.cells() for trace in traces]
        for check, (expected, got) in seen.items():
            _add(tallies, f"{check}, mask = compact", where, got, expected, both)


def _add(
    tallies: dict[str, Tally],
    check: str,
    where: str,
    seen: np.ndarray,
    expected: np.ndarray,
    chosen: np.ndarray | None = None,
) -> None:
    """Compare two arrays by position, at the ``chosen`` ones."""
    positions = np.arange(len(seen)) if chosen is None else np.flatnonzero(chosen)
    tallies.setdefault(check, Tally(check)).add(where, positions, seen[positions], expected[positions])

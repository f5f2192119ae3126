"""What truncation saves in the consumer layers: query rows and sliding-window (SWA) pairs, counted exactly.

`rows/pairs` below are the query rows a consumer layer computes and the SWA keys those rows see. `off` is the
stock model; `mask` computes as many rows but hides keys below s_keep = L - K; `compact` drops rows as well.
Global KV is not counted: in each mode every row is projected, and every computed row sees all of it.
Background: docs/theory.md.

    python examples/lab_replay_cost.py
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from vllm_yoco.cost import query_rows_and_pairs
from vllm_yoco.plan import Chunk, Mode, keep_start, plan_rows, ring_slots

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Prompt:
    """Rows [k - q, k) of a prompt of `full_len` tokens; SWA KV below `valid_start` does not exist."""

    q: int
    k: int
    full_len: int
    valid_start: int = 0

    def cost(self, mode: Mode, window: int, keep: int) -> tuple[int, int]:
        """Rows and pairs by the closed form of the package."""
        return query_rows_and_pairs(
            q=self.q,
            k=self.k,
            is_prompt=True,
            full_len=self.full_len,
            swa_valid_start=self.valid_start,
            window=window,
            mode=mode,
            keep_tokens=keep,
        )

    def brute_force(self, mode: Mode, window: int, keep: int) -> tuple[int, int]:
        """The same by asking about every row and every key."""
        s_keep = 0 if mode == "off" else max(0, self.full_len - keep)
        rows = [
            i for i in range(self.k - self.q, self.k) if mode != "compact" or i >= s_keep or i == self.k - 1
        ]
        lowest = max(s_keep, self.valid_start)
        return len(rows), sum(lowest <= j and i - window < j for i in rows for j in range(i + 1))


SITUATIONS = {
    "short": Prompt(2, 2, 2),
    "long": Prompt(12, 12, 12),
    "clipped": Prompt(4, 4, 12),
    "crossing": Prompt(4, 10, 12),
    "valid-start": Prompt(2, 12, 12, 10),
}


def situation_table(window: int = 3, keep: int = 4) -> dict[str, dict[str, str]]:
    """`rows/pairs` of each situation and mode."""
    return {
        name: {mode: "{}/{}".format(*prompt.cost(mode, window, keep)) for mode in MODES}
        for name, prompt in SITUATIONS.items()
    }


def verify_grid(max_length: int = 8) -> int:
    """Compare closed form and brute force on every chunk and valid start up to `max_length`; cases compared.

    AssertionError with the first case that differs.
    """
    cases = 0
    for full_len in range(1, max_length + 1):
        for k in range(1, full_len + 1):
            for start in range(k):
                for valid_start in range(start + 1):
                    prompt = Prompt(k - start, k, full_len, valid_start)
                    for window, keep, mode in product((1, 3, 5), (1, 4, 9), MODES):
                        case = (mode, window, keep)
                        assert prompt.cost(*case) == prompt.brute_force(*case), (prompt, case)
                        cases += 1
    return cases


def chunked_cost(
    mode: Mode, length: int, chunk: int, *, window: int = 128, keep: int = 140
) -> list[tuple[int, int]]:
    """Rows and pairs of each chunk of a prompt of `length`."""
    ends = [*range(chunk, length, chunk), length]
    starts = [0, *ends[:-1]]
    return [
        Prompt(end - start, end, length).cost(mode, window, keep)
        for start, end in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True)
class LayerRows:
    """Rows summed over layers: the work, if every row of every layer cost the same."""

    full: int
    compact: int


def equal_cost(length: int, *, producers: int = 20, consumers: int = 20, keep: int = 140) -> LayerRows:
    """Work of a prompt in one chunk; the ratio falls towards producers / (producers + consumers)."""
    layers = producers + consumers
    kept, _ = Prompt(length, length, length).cost("compact", 0, keep)
    return LayerRows(full=layers * length, compact=producers * length + consumers * kept)


@dataclass(frozen=True)
class RowView:
    """What the first computed row of a chunk sees and where it writes."""

    position: int
    lower_bound: int
    visible_keys: int
    keys_before_chunk: int
    first_history_slot: int
    write_slot: int


def first_row(
    chunk: Chunk, *, window: int, keep: int, mode: Literal["mask", "compact"] = "compact"
) -> RowView:
    """First row of the plan of one chunk.

    Keys before the chunk are read from a history block of W slots, in which slot t holds start - W + t.
    """
    plan = plan_rows([chunk], mode=mode, keep_tokens=keep, window=window)
    low = int(plan.visible_lo[0])
    before = max(0, chunk.start - low)
    return RowView(
        position=int(plan.positions[0]),
        lower_bound=low,
        visible_keys=int(plan.visible_hi[0]) - low + 1,
        keys_before_chunk=before,
        first_history_slot=window - before,
        write_slot=int(ring_slots(plan, ring_size=window + 1, state_ids=[0])[0]),
    )


def main() -> None:
    """Print the tables."""
    print("rows/pairs, W = 3, K = 4".ljust(46) + "".join(f"{mode:>9}" for mode in MODES))
    for name, row in situation_table().items():
        p = SITUATIONS[name]
        where = f"rows [{p.k - p.q}, {p.k}) of {p.full_len}, SWA from {p.valid_start}"
        print(f"{name:12}{where:34}" + "".join(f"{row[mode]:>9}" for mode in MODES))
    print(f"closed form = enumeration in {verify_grid():,} cases")

    print("\nL = 1024, W = 128, K = 140: rows/pairs")
    for mode, chunk in product(MODES, (256, 1024)):
        cost = chunked_cost(mode, 1024, chunk)
        cells = " ".join(f"{rows}/{pairs}" for rows, pairs in cost)
        print(f"{mode:8} chunks of {chunk:4}: {cells}  = {sum(rows for rows, _ in cost)} rows")

    print("\n20 + 20 layers, K = 140, every row of every layer at equal cost")
    print("     L       full    compact   ratio")
    for length in (64, 1024, 16384):
        work = equal_cost(length)
        print(f"{length:6} {work.full:10,} {work.compact:10,}  {work.compact / work.full:.4f}")

    view = first_row(Chunk(12, 4, 4), window=3, keep=4)
    print("\nL = 12, K = 4, W = 3, chunk 4..7 lies below s_keep = 8:")
    print(
        f"  compact keeps row {view.position}, sees {view.visible_keys} keys, writes slot {view.write_slot}"
    )
    view = first_row(Chunk(1024, 890, 134), window=128, keep=140)
    below = view.keys_before_chunk
    print(f"L = 1024, K = 140, W = 128, a prefix hit of 890 tokens, s_keep = {keep_start(1024, 140)}:")
    print(f"  row {view.position} sees keys from {view.lower_bound} on, {below} of them below the hit")
    print(
        f"  (history slots from {view.first_history_slot}): nobody computed them, so hits must end at s_keep"
    )


if __name__ == "__main__":
    main()

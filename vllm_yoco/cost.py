"""Cost of YOCO prefill truncation: query rows, visible keys and FLOPs of one chunk.

A chunk is the rows [k - q, k) of one request scheduled in one step. Truncation changes two numbers in a
consumer layer:

    rows    compact computes [max(k - q, s_keep), k), at least one row; off and mask compute all q rows
    keys    mask and compact hide sliding-window (SWA) keys below s_keep; global keys are never hidden

Hence mask saves SWA pairs only, compact saves rows as well, and both pay for the global KV of every row.
Decode steps and producer layers are never truncated.

A sum over rows is a difference of two prefix sums with a closed form, so a call costs the same for any q:

    visible keys |      _______ cap     sum over [a, b) = F(b) - F(a),  F(n) = sum over the first n rows
    of a row     |   __/
                 |__/___________ row

Results are exact Python integers. Units of FLOPs: see `flops.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from vllm_yoco.flops import LayerFlops, ModelFlops
from vllm_yoco.plan import Mode, keep_start

__all__ = ["FlopsEstimator", "check_mode", "query_rows_and_pairs"]


def query_rows_and_pairs(
    *,
    q: int,
    k: int,
    is_prompt: bool,
    full_len: int,
    swa_valid_start: int,
    window: int,
    mode: str,
    keep_tokens: int,
) -> tuple[int, int]:
    """Rows computed and SWA query-key pairs visible in one consumer layer.

    Args:
        q: rows of the chunk.
        k: tokens of the request once the chunk is done, so the chunk is [k - q, k).
        is_prompt: false for a decode step.
        full_len: L, prompt length in tokens; -1 means k. Ignored in decode.
        swa_valid_start: lowest position whose SWA KV exists.
        window: W in keys, the query itself included; <= 0 means that no layer has SWA.
        mode: off, mask or compact.
        keep_tokens: K; ignored in mode off.

    Raises:
        ValueError: unless 0 < q <= k, 0 <= swa_valid_start <= k - q, full_len >= k (prompts), the mode is
            known and K >= 1 (mask, compact).
    """
    check_mode(mode, keep_tokens)
    rows = _Chunk(q, k, bool(is_prompt), full_len, swa_valid_start).consumer_rows(mode, keep_tokens)
    return rows.count, rows.swa_pairs(window)


class FlopsEstimator:
    """FLOPs of one chunk over the whole model."""

    def __init__(self, config: Mapping[str, Any], *, mode: str, keep_tokens: int) -> None:
        """Derive the coefficients of the model once.

        Args:
            config: model metadata, see `ModelFlops.from_config`.
            mode: off, mask or compact.
            keep_tokens: K; ignored in mode off. K >= W + B is a rule of serving: the cost of a smaller K is
                well defined, so it is answered.

        Raises:
            ValueError: for an unknown mode, K < 1 in mask or compact, or an inconsistent config.
        """
        check_mode(mode, keep_tokens)
        self.mode = mode
        self.keep_tokens = keep_tokens
        self.model = ModelFlops.from_config(config)

    def flops(
        self, *, q: int, k: int, is_prompt: bool, full_len: int, swa_valid_start: int = 0
    ) -> tuple[int, int]:
        """(attention, total) in FP8-equivalent FLOPs; attention includes its projections and the indexer.

        Arguments and errors are those of `query_rows_and_pairs`.
        """
        chunk = _Chunk(q, k, bool(is_prompt), full_len, swa_valid_start)
        views = (chunk.rows, chunk.consumer_rows(self.mode, self.keep_tokens))
        attention = other = 0
        for layer, count in self.model.layers:
            rows = views[layer.is_consumer]
            attention += count * self._attention(layer, chunk, rows)
            other += count * layer.other_row * rows.count
        if self.model.has_consumers:
            other += self.model.dropped_row * (q - views[True].count)
        # A prompt chunk samples at most its last row; a decode step scores every draft token.
        other += self.model.lm_head_row * (1 if is_prompt else q)
        return attention, attention + other

    def _attention(self, layer: LayerFlops, chunk: _Chunk, rows: _Rows) -> int:
        flops = layer.attention_row * rows.count + layer.source_row * chunk.q
        if layer.swa_pair:
            flops += layer.swa_pair * rows.swa_pairs(self.model.window)
        if layer.block_pair:
            flops += layer.block_pair * rows.block_pairs(layer.ratio, layer.top_k)
        if layer.index_pair:
            flops += layer.index_pair * rows.index_pairs(
                layer.ratio, layer.candidate_blocks, layer.candidate_block_size
            )
        if layer.index_key:
            flops += layer.index_key * chunk.index_keys(layer.ratio)
        return flops


@dataclass(frozen=True)
class _Chunk:
    """Rows [k - q, k) of one request; the fields and errors are those of `query_rows_and_pairs`."""

    q: int
    k: int
    is_prompt: bool
    full_len: int
    valid_start: int

    def __post_init__(self) -> None:
        if self.full_len == -1:
            object.__setattr__(self, "full_len", self.k)
        if self.q <= 0:
            raise ValueError(f"q must be positive, got {self.q}")
        if self.k < self.q:
            raise ValueError(f"k counts the chunk's own rows: k {self.k} is below q {self.q}")
        if self.is_prompt and self.full_len < self.k:
            raise ValueError(f"the prompt's full_len {self.full_len} is below k {self.k}")
        if not 0 <= self.valid_start <= self.k - self.q:
            raise ValueError(f"swa_valid_start {self.valid_start} must lie in [0, k - q = {self.k - self.q}]")

    @property
    def rows(self) -> _Rows:
        """What a producer layer computes, and every layer while truncation is off."""
        return _Rows(self.k - self.q, self.k, self.valid_start)

    def consumer_rows(self, mode: str, keep_tokens: int) -> _Rows:
        """What a consumer layer computes.

        Under compact a chunk wholly below s_keep leaves its last row, a placeholder that sees no SWA key.
        """
        if mode == "off" or not self.is_prompt:
            return self.rows
        s_keep = keep_start(self.full_len, keep_tokens)
        begin = self.k - self.q
        if mode == "compact":
            begin = min(max(begin, s_keep), self.k - 1)
        return _Rows(begin, self.k, max(self.valid_start, s_keep))

    def index_keys(self, ratio: int) -> int:
        """Index keys projected: groups completed by a prompt chunk, at least one; in decode one per row."""
        return max(1, self.k // ratio - (self.k - self.q) // ratio) if self.is_prompt else self.q


@dataclass(frozen=True)
class _Rows:
    """Query rows [begin, end) whose SWA keys below `visible_from` are hidden."""

    begin: int
    end: int
    visible_from: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    def swa_pairs(self, window: int) -> int:
        """Row i sees min(window, i - visible_from + 1) keys, none below visible_from."""
        if window <= 0:
            return 0
        end, begin = (_ramp(max(0, edge - self.visible_from), 1, window) for edge in (self.end, self.begin))
        return end - begin

    def block_pairs(self, ratio: int, top_k: int) -> int:
        """Row i attends to floor((i + 1) / ratio) global keys, or to top_k of them (0: no limit)."""
        return _ramp(self.end, ratio, top_k) - _ramp(self.begin, ratio, top_k)

    def index_pairs(self, ratio: int, blocks: int, block_size: int) -> int:
        """Keys the indexer scores: all, or at most `blocks` blocks, a partial block counted in full."""
        if not blocks:
            return self.block_pairs(ratio, 0)
        # ceil(floor(n / ratio) / size) = floor((n + ratio * (size - 1)) / (ratio * size)): a shifted ramp.
        shift, step = ratio * (block_size - 1), ratio * block_size
        return block_size * (_ramp(self.end + shift, step, blocks) - _ramp(self.begin + shift, step, blocks))


def _ramp(n: int, step: int, cap: int) -> int:
    """Sum of min(cap, i // step) for i = 1..n; cap 0 means no cap."""
    rising = min(n, cap * step - 1) if cap else n
    whole = rising // step
    area = step * (whole * (whole - 1) // 2) + whole * (rising - step * whole + 1)
    return area + cap * (n - rising)


def check_mode(mode: str, keep_tokens: int) -> None:
    """ValueError for an unknown mode, or K < 1 where the mode uses it."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if mode != "off" and keep_tokens < 1:
        raise ValueError(f"keep_tokens must be at least 1 in mode {mode}, got {keep_tokens}")

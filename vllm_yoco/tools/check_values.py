"""Log-probabilities of two runs along the same tokens: largest difference, where it is, and the likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

LIMITS = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
"""Largest |delta log-probability| of equal computations, in nats.

Two runs do the same arithmetic on the same rows, but a kernel may add in another order where the batch has another
shape. float32 (24 bits) turns that into 1e-6 to 4e-5 after some dozen layers; one key seen too many or too few
moves a random model by 1e-3 to 1, so 1e-4 separates the two. Half precision rounds every activation, and the logits
themselves in the end: next to a logit of 16 to 32 bfloat16 (8 bits) is spaced by 0.125, float16 (11 bits) by 0.016, and
two such steps are allowed. That still catches a wrong layout, but hides small errors: the proof is the one in float32.
"""

REASONS = {
    "float32": "sums in another order differ by 1e-6 to 4e-5, one key too many or too few by 1e-3 to 1",
    "float16": "two steps of float16 beside a logit of 16 to 32; small errors hide below it, so check in float32 too",
    "bfloat16": "two steps of bfloat16 beside a logit of 16 to 32; small errors hide below it, so check in float32 too",
}


@dataclass
class Difference:
    """Tables of log-probabilities compared under one name.

    Attributes:
        tables: pairs of prompts compared, ``positions`` rows in all, ``values`` entries.
        largest, where: over all entries, in nats.
        top_changed: rows whose likeliest token differs although it leads by more than twice the limit.
    """

    check: str
    limit: float
    tables: int = 0
    positions: int = 0
    values: int = 0
    largest: float = 0.0
    where: str | None = None
    top_changed: int = 0
    _sum: float = field(default=0.0, repr=False)

    @property
    def mean(self) -> float:
        return self._sum / self.values if self.values else 0.0

    @property
    def ok(self) -> bool:
        return self.largest <= self.limit and not self.top_changed

    def add(self, one: np.ndarray, other: np.ndarray, where: Callable[[int], str]) -> None:
        """Both [positions, vocabulary]; ``where(j)`` names row j."""
        delta = np.where(one == other, 0.0, np.abs(one - other))  # equal infinities too
        delta = np.nan_to_num(delta, nan=np.inf, posinf=np.inf)
        per_row = delta.max(axis=1)
        worst = int(per_row.argmax())
        if per_row[worst] > self.largest:
            self.largest, self.where = float(per_row[worst]), where(worst)
        rows = np.arange(len(one))
        lead = one.max(axis=1) - one[rows, other.argmax(axis=1)]
        self.top_changed += int((~(lead <= 2 * self.limit)).sum())
        self.tables += 1
        self.positions += len(one)
        self.values += one.size
        self._sum += float(delta.sum())

    def describe(self) -> dict[str, Any]:
        """For the JSON document."""
        fields = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return {**fields, "mean": self.mean, "ok": self.ok}

"""Prometheus counters and a periodic log line, through vLLM's own ``vllm.stat_logger_plugins``.

    vllm_yoco:prefill_rows_total{kind="scheduled|consumer_computed|consumer_dropped|placeholder"}
    vllm_yoco:prompts_truncated_total
    vllm_yoco:prefix_hits_shortened_total      prefix hits that the cap at L - K shortened
    vllm_yoco:prefix_hit_rows_lost_total       rows computed again on that account
    vllm_yoco:prompt_logprobs_dropped_total    requests served without the prompt log-probabilities they asked for

Rows are those of one consumer layer, ``scheduled = consumer_computed + consumer_dropped``. A placeholder (the one row
that represents a chunk wholly below ``s_keep``) is computed beside other requests' rows; a step of placeholders alone
runs no consumer layer. The numbers come from the engine core's schedule (``vllm_yoco.counters``); a row that is
scheduled again after a preemption counts again.
"""

from __future__ import annotations

import atexit
import time
from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_yoco import counters
from vllm_yoco.engine_config import truncation_of

logger = init_logger(f"vllm.{__name__}")

ROW_KINDS = ("scheduled", "consumer_computed", "consumer_dropped", "placeholder")
SCALARS = {
    "prompts_truncated": ("vllm_yoco:prompts_truncated", "Requests with dropped rows; n samples are n requests."),
    "hits_shortened": ("vllm_yoco:prefix_hits_shortened", "Prefix cache hits shortened to L - K."),
    "hit_rows_lost": ("vllm_yoco:prefix_hit_rows_lost", "Cached rows computed again because of the cap."),
    "prompt_logprobs_dropped": ("vllm_yoco:prompt_logprobs_dropped", "Requests served without prompt logprobs."),
}

MAX_STALENESS_S = 0.5
"""Reading costs a tenth of a millisecond, which decode steps of a small model would feel."""

_published: dict[str, Any] = {}


def _counters() -> dict[str, Any]:
    """The process's Prometheus counters; a registry takes each name once."""
    if not _published:
        rows = Counter("vllm_yoco:prefill_rows", "Prefill rows of a consumer layer, by what became of them.", ["kind"])
        _published.update({kind: rows.labels(kind) for kind in ROW_KINDS})
        _published.update({name: Counter(*definition) for name, definition in SCALARS.items()})
    return _published


class YocoStatLogger(StatLoggerBase):
    """Publishes one engine's counters. Idle, and without metrics of its own, unless a mode is on."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        truncation = truncation_of(vllm_config)
        self._active = truncation is not None and truncation.active
        self._instance_id = vllm_config.instance_id
        self._seen = dict.fromkeys(counters.NAMES, 0)
        self._logged = dict(self._seen)
        self._next_publication = 0.0
        if self._active:
            _counters()
            if not counters.in_api_server():  # others may still be counting there
                atexit.register(counters.remove, self._instance_id)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Called after every step; reads the counters when a request has ended, otherwise once in a while."""
        if not self._active:
            return
        if getattr(iteration_stats, "finished_requests", None) or time.monotonic() >= self._next_publication:
            self._publish()

    def _publish(self) -> None:
        self._next_publication = time.monotonic() + MAX_STALENESS_S
        published = _counters()
        # Data-parallel ranks have a logger each and API servers a set of them: whoever comes first publishes.
        for name, amount in counters.take(self._instance_id).items():
            if amount > 0:
                published[name].inc(amount)
                self._seen[name] += amount

    def log(self) -> None:
        if self._active:
            self._publish()
        new = {name: value - self._logged[name] for name, value in self._seen.items()}
        self._logged = dict(self._seen)
        if not new["scheduled"]:
            return
        logger.info(
            "YOCO: %d prompts truncated, consumer rows computed: %d of %d prefill rows (%d placeholders), prefix hits"
            " shortened: %d (%d rows), prompt_logprobs dropped: %d",
            *(new[name] for name in ("prompts_truncated", "consumer_computed", "scheduled", "placeholder")),
            *(new[name] for name in ("hits_shortened", "hit_rows_lost", "prompt_logprobs_dropped")),
        )

    def log_engine_initialized(self) -> None:
        return None

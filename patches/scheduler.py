"""Cap prefix-cache hits and KV connector hits at L - K, hold no blocks for dropped rows, count what truncation does.

Target: ``vllm.v1.core.sched.scheduler.Scheduler.__init__`` (after it; wraps ``schedule``, the KV cache manager's
    look-up and the KV connector's, and the allocation of consumer SWA groups, each on the instance).
Reason: the last K prompt rows must be recomputed to rebuild consumer SWA; vLLM has no per-model limit on the length of
    a prefix hit. A manager of KV blocks is not told a request's prompt length, which decides the blocks that consumer
    SWA needs. Counting has no hook in the engine core. Nothing is touched unless a mode is on for the model served.
Tested with: vLLM 0.32.0.
Retired by: a ``max_cache_hit_length`` (or ``prefix_replay_tokens`` for any spec, today DeepSeek-V4.1 only) that a KV
    cache spec can set; the prompt's length among a manager's arguments; scheduler statistics that a plugin can add
    to.
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    if getattr(original, "_yoco", False):
        return

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        from vllm_yoco.engine_config import truncation_of

        truncation = truncation_of(vllm_config)
        if truncation is not None and truncation.active:
            from vllm_yoco.connectors import ExternalHitCap
            from vllm_yoco.kv_cache import NoBlocksForDroppedRows, PrefixHitCap

            self._yoco_truncation = truncation
            # On DeepSeek-V4.1 vLLM recomputes the last W rows of a hit, so that a hit may reach W further.
            keep = truncation.keep_tokens - self.prefix_replay_tokens
            cap = PrefixHitCap(self.kv_cache_manager, keep, counts=self.log_stats)
            NoBlocksForDroppedRows(self.kv_cache_manager, functools.partial(_first_kept, self))
            if self.connector is not None:
                ExternalHitCap(self.connector, keep, self.block_size, cap)
            if self.log_stats:
                _count_steps(self, truncation, cap)

    __init__._yoco = True  # type: ignore[attr-defined]
    Scheduler.__init__ = __init__


def _first_kept(scheduler: Any, request_id: str) -> int:
    """s_keep of a request; 0 for one that the scheduler does not know."""
    from vllm_yoco.plan import keep_start
    from vllm_yoco.requests import keeps_every_row

    truncation, request = scheduler._yoco_truncation, scheduler.requests.get(request_id)
    if request is None or keeps_every_row(request.sampling_params, truncation.prompt_logprobs):
        return 0
    return keep_start(request.num_prompt_tokens, truncation.keep_tokens)


def _count_steps(scheduler: Any, truncation: Any, cap: Any) -> None:
    from vllm_yoco.counters import CounterFile, step_rows
    from vllm_yoco.requests import keeps_every_row

    counters = CounterFile(scheduler.vllm_config.instance_id)
    schedule = scheduler.schedule

    in_prompt: set[str] = set()
    """Requests that have rows of their prompts to compute, and some that no longer have."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        in_prompt.difference_update(output.finished_req_ids)  # first: an id may be used again at once
        in_prompt.update(request.req_id for request in output.scheduled_new_reqs)
        in_prompt.update(cached.resumed_req_ids)
        if not in_prompt:  # the common step, whose time counts
            return output
        starts = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # Connectors keep placeholders computed, and so do decodes beside them; see SubBatchBuilder.build.
        chunks, may_idle = [], scheduler.connector is None
        for req_id, start in starts.items():
            request = scheduler.requests[req_id]
            if start >= request.num_prompt_tokens:
                may_idle = False
                in_prompt.discard(req_id)
                continue
            full = keeps_every_row(request.sampling_params, truncation.prompt_logprobs)
            keep = request.num_prompt_tokens if full else truncation.keep_tokens
            chunks.append((start, output.num_scheduled_tokens[req_id], request.num_prompt_tokens, keep))
            lost = cap.take_lost_rows(req_id)
            if lost:
                counters.add(hits_shortened=1, hit_rows_lost=lost)
        if chunks:
            counters.add(**step_rows(chunks, truncation.mode, may_idle=may_idle))
        return output

    scheduler.schedule = counted

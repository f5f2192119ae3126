"""Cap prefix-cache hits at L - K.

Target: ``vllm.v1.core.sched.scheduler.Scheduler.__init__`` (after it, on its KV cache manager only).
Reason: the last K prompt rows must be recomputed to rebuild consumer SWA; vLLM has no per-model limit on the
    length of a prefix hit. Nothing is touched unless a mode is on for the model being served.
Tested with: vLLM 0.32.0.
Retired by: a ``max_cache_hit_length`` (or ``prefix_replay_tokens`` for any spec, today DeepSeek-V4.1 only) that
    a KV cache spec can set.
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
            from vllm_yoco.kv_cache import cap_prefix_hits

            cap_prefix_hits(self.kv_cache_manager, truncation.keep_tokens)

    __init__._yoco = True  # type: ignore[attr-defined]
    Scheduler.__init__ = __init__

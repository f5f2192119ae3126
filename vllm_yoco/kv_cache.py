"""KV cache spec of consumer sliding-window layers, and the cap on prefix-cache hits.

While a mode is on, consumer SWA of dropped rows does not exist, and that of kept rows depends on where the
prompt ended. It is therefore rebuilt by every prefill and never shared between requests:

    prompt       0 ............... H ............ s_keep ............ L-1
    producers    from the cache    | computed     | computed
    global KV    from the cache    | computed     | computed
    consumer SWA nothing           | nothing      | rebuilt

so a hit H may not pass ``s_keep = max(0, L - K)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_yoco.compat import require_active
from vllm_yoco.plan import keep_start


@dataclass(frozen=True, kw_only=True)
class ConsumerSlidingWindowSpec(SlidingWindowSpec):
    """A sliding-window group outside prefix caching, offloading and external stores.

    Its cells are rebased on ``s_keep`` (see ``vllm_yoco.attention``): the cell of a position may lie one block
    before the block that vLLM counts it to, so one more block than the window needs has to be retained.
    vLLM's KV planner rewrites ``extra_retained_tokens`` with ``dataclasses.replace``
    (vllm/v1/core/kv_cache_utils.py), hence the margin is restored on every construction.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "extra_retained_tokens", max(self.extra_retained_tokens, self.block_size))

    @property
    def prefix_cacheable(self) -> bool:
        return False

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        # The engine core sizes its pool with this before it serves anything: the place to notice that the
        # plugin, and with it the cap on prefix hits, is missing there.
        require_active("engine core")
        return super().max_memory_usage_bytes(vllm_config)


def cap_prefix_hits(kv_cache_manager: Any, keep_tokens: int) -> None:
    """Limit every prefix hit of this manager to ``max(0, L - K)`` tokens.

    ``KVCacheManager.get_computed_blocks`` fixes its limit at ``num_tokens - 1`` and hands it to the
    coordinator, which rounds down to blocks. Both are wrapped on the instance: the first knows the request, the
    second takes the limit. A hit is shortened by whole blocks, never refused as a whole.
    """
    coordinator = kv_cache_manager.coordinator
    find_hit: Callable[..., Any] = coordinator.find_longest_cache_hit
    get_blocks: Callable[..., Any] = kv_cache_manager.get_computed_blocks
    limit: int | None = None

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        if limit is not None:
            max_cache_hit_length = min(max_cache_hit_length, limit)
        return find_hit(block_hashes, max_cache_hit_length, *args, **kwargs)

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal limit
        limit = keep_start(request.num_prompt_tokens, keep_tokens)
        try:
            return get_blocks(request, *args, **kwargs)
        finally:
            limit = None

    coordinator.find_longest_cache_hit = find_longest_cache_hit
    kv_cache_manager.get_computed_blocks = get_computed_blocks

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


class NoBlocksForDroppedRows:
    """Gives consumer SWA groups no blocks below ``s_keep``; wraps their managers on the instance.

    A cell of position p >= s_keep lies in block ``(p - s_keep mod block_size) // block_size``, so with
    ``f = s_keep // block_size`` the blocks below f stay unused for the life of the request:

        table   0 ......... f - 1 | f ...........
                the null block    | real blocks

    vLLM's manager takes a block for every row of a step and frees those that left the window one step later; here
    a prompt takes those of its last K rows only, whatever the chunk. The count that admits a request to the pool
    follows the same rule, so it reserves what will be taken and no more.

    Args:
        first_kept: request id -> s_keep.
    """

    def __init__(self, kv_cache_manager: Any, first_kept: Callable[[str], int]) -> None:
        for manager in kv_cache_manager.coordinator.single_type_managers:
            if isinstance(manager.kv_cache_spec, ConsumerSlidingWindowSpec):
                self._wrap(manager, first_kept)

    @staticmethod
    def _wrap(manager: Any, first_kept: Callable[[str], int]) -> None:
        count, allocate = manager.get_num_blocks_to_allocate, manager.allocate_new_blocks
        allocate_external = manager.allocate_external_computed_blocks
        size, null = manager.block_size, manager.block_pool.null_block

        def get_num_blocks_to_allocate(request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
            counted = count(request_id, num_tokens, *args, **kwargs)
            if not counted:  # most decode steps
                return 0
            held = len(manager.req_to_blocks.get(request_id, ()))
            lowest = max(held, first_kept(request_id) // size)
            return min(counted, max(0, -(-num_tokens // size) - lowest))

        def skip(request_id: str, num_tokens: int) -> list[Any]:
            """Null blocks up to f, as far as ``num_tokens`` reach."""
            blocks, wanted = manager.req_to_blocks[request_id], -(-num_tokens // size)
            if len(blocks) >= wanted:
                return []
            nulls = [null] * (min(first_kept(request_id) // size, wanted) - len(blocks))
            blocks.extend(nulls)
            return nulls

        def allocate_new_blocks(request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[Any]:
            nulls = skip(request_id, num_tokens)
            return [*nulls, *allocate(request_id, num_tokens, *args, **kwargs)]

        def allocate_external_computed_blocks(
            request_id: str, num_local: int, num_external: int, *args: Any, **kwargs: Any
        ) -> None:
            skip(request_id, num_local + num_external)
            allocate_external(request_id, num_local, num_external, *args, **kwargs)

        manager.get_num_blocks_to_allocate = get_num_blocks_to_allocate
        manager.allocate_new_blocks = allocate_new_blocks
        manager.allocate_external_computed_blocks = allocate_external_computed_blocks


class PrefixHitCap:
    """Limits every prefix hit of one ``KVCacheManager`` to ``max(0, L - K)`` tokens.

    ``KVCacheManager.get_computed_blocks`` fixes its limit at ``num_tokens - 1`` and hands it to the coordinator,
    which rounds down to blocks. Both are wrapped on the instance: the first knows the request, the second takes the
    limit. A hit is shortened by whole blocks, never refused as a whole.
    """

    def __init__(self, kv_cache_manager: Any, keep_tokens: int, *, counts: bool = True) -> None:
        self._keep_tokens = keep_tokens
        self._counts = counts
        self._find_hit: Callable[..., Any] = kv_cache_manager.coordinator.find_longest_cache_hit
        self._get_blocks: Callable[..., Any] = kv_cache_manager.get_computed_blocks
        self._limit: int | None = None
        self._lost: dict[str, int] = {}
        self._last_lost = 0
        for manager in kv_cache_manager.coordinator.single_type_managers:
            manager.cache_blocks = self._retaining(manager.cache_blocks)
        kv_cache_manager.coordinator.find_longest_cache_hit = self._find_longest_cache_hit
        kv_cache_manager.get_computed_blocks = self._get_computed_blocks

    def _retaining(self, cache_blocks: Callable[..., Any]) -> Callable[..., Any]:
        """Keep a sliding producer's KV below ``s_keep`` too, where a repeated prompt resumes.

        vLLM's sparse retention keeps a window's worth of blocks below ``L - 1`` only, where it would resume without
        the cap (``replay_boundaries`` in vllm/v1/core/kv_cache_coordinator.py); every hit would be refused as a whole.
        """

        def retaining(request: Any, *args: Any, replay_boundaries: Any = (), **kwargs: Any) -> Any:
            resume = keep_start(request.num_prompt_tokens, self._keep_tokens)
            return cache_blocks(request, *args, replay_boundaries=(*replay_boundaries, resume), **kwargs)

        return retaining

    def lose(self, request_id: str, rows: int) -> None:
        """Note that a hit could have been ``rows`` longer."""
        if self._counts:  # otherwise nobody takes them out again
            # Local and external hits end at the same limit, so rows found in both places are the same rows.
            self._lost[request_id] = max(rows, self._lost.get(request_id, 0))

    def take_lost_rows(self, request_id: str) -> int:
        """Cached rows that the cap made this request compute again, once per look-up."""
        return self._lost.pop(request_id, 0)

    def _find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        limit = self._limit
        if limit is None or limit >= max_cache_hit_length:
            return self._find_hit(block_hashes, max_cache_hit_length, *args, **kwargs)
        hit = self._find_hit(block_hashes, limit, *args, **kwargs)
        # A look-up reads the hash table only; the second one tells what the cap cost.
        self._last_lost = self._find_hit(block_hashes, max_cache_hit_length, *args, **kwargs)[1] - hit[1]
        return hit

    def _get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._limit, self._last_lost = keep_start(request.num_prompt_tokens, self._keep_tokens), 0
        try:
            found = self._get_blocks(request, *args, **kwargs)
        finally:
            self._limit = None
        if self._last_lost > 0:
            self.lose(request.request_id, self._last_lost)
        return found

"""KV connectors: which ones truncation works with, and the cap on the hits they report.

A connector keeps KV outside the engine: in host memory, in files, in another engine. While a mode is on it gets the
KV of producers and the global KV, never consumer SWA (``ConsumerSlidingWindowSpec.prefix_cacheable`` is False), so
whatever it finds may be used up to ``s_keep = max(0, L - K)`` and no further:

    prompt       0 ........ local ........ local + external .... s_keep ............ L-1
    producers    local cache | connector                 | computed | computed
    global KV    local cache | connector                 | computed | computed
    consumer SWA nothing     | nothing                   | nothing  | rebuilt

An engine that decodes what another one prefilled therefore computes the last rows itself, at least K of them. It needs
no consumer SWA from there, and the two need not agree on K.

A hit is cut to whole blocks. Connectors differ in what they make of that, hence the list of those that are let in:
one that pairs blocks from the end of a prompt would fill the kept blocks with the wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_yoco.compat import Symbol, broken_symbols
from vllm_yoco.plan import keep_start

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_yoco.kv_cache import PrefixHitCap

TESTED = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""vLLM's own connectors that the tests run with a mode on."""

DECLARATION = "accepts_shorter_hits"
"""Class attribute by which a connector outside vLLM says that it keeps the rules of ``docs/transfer.md``."""

_NO_HYBRID = "it does not work with vLLM's hybrid KV cache manager, which gives consumer SWA a group of its own"
_LAST_BLOCKS = (
    "it pairs the blocks of two engines from the end of the prompt, so a hit that is cut at L - K would be filled with"
    " the wrong blocks, and what it sends of consumer SWA can be one block short for taking the hit whole"
)

REFUSED: dict[str, str] = {
    "DecodeBenchConnector": "it fills the KV cache with made-up values",
    "ExampleConnector": _NO_HYBRID,
    "ExampleHiddenStatesConnector": "it writes the hidden state of every prompt row, which dropped rows do not have",
    "FlexKVConnectorV1": _NO_HYBRID,
    "HF3FSKVConnector": _NO_HYBRID,
    "HiSparseConnector": "it serves models with sparse attention, which this is not",
    "LMCacheConnectorV1": _NO_HYBRID,
    "LMCacheMPConnector": "it is not tested: it needs an LMCache server",
    "MoRIIOConnector": _LAST_BLOCKS,
    "MooncakeConnector": _LAST_BLOCKS,
    "MooncakeStoreConnector": "it asserts that the scheduler loads every token that it found, and a hit may be cut",
    "MultiConnector": "no combination of connectors is tested",
    "NixlConnector": _LAST_BLOCKS,
    "NixlPullConnector": _LAST_BLOCKS,
    "NixlPushConnector": _LAST_BLOCKS,
}
"""vLLM's other connectors, each with the reason."""

SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.get_num_new_matched_tokens",
        "cap external hits",
        ("request", "num_computed_tokens"),
    ),
    Symbol(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
        "OffloadingConnector._max_loadable_tokens",
        "cap external hits inside the look-up",
        ("request", "num_computed_tokens"),
    ),
)
"""Private vLLM symbols of this module. Checked only where a connector is configured."""


def refusal(vllm_config: VllmConfig) -> str | None:
    """Why this engine's connector may not be used with a mode on, or None. Starts with the flag."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    name = transfer.kv_connector
    offloads = vllm_config.cache_config.kv_offloading_size is not None
    flag = "--kv-offloading-size" if offloads else "--kv-transfer-config"
    reason = _unknown(transfer) if transfer.kv_connector_module_path else REFUSED.get(name)
    if reason is None and not transfer.kv_connector_module_path and name not in TESTED:
        reason = "it is not tested"
    if reason is not None:
        return (
            f"{flag} (connector {name}): {reason}. Use {' or '.join(TESTED)}, or leave the flag out;"
            " docs/transfer.md says what a connector has to do."
        )
    broken = broken_symbols(SYMBOLS, load=True)
    return f"{flag} (connector {name}): this vLLM lacks {'; '.join(broken)}. Leave the flag out." if broken else None


def _unknown(transfer: Any) -> str | None:
    """What speaks against a connector that is not vLLM's own."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

    connector = KVConnectorFactory.get_connector_class(transfer)
    if not getattr(connector, DECLARATION, False):
        return f"it is not tested, and its class does not declare {DECLARATION} = True"
    return None if supports_hma(connector) else _NO_HYBRID


class ExternalHitCap:
    """Limits local and external hits of one scheduler together to ``max(0, L - K)`` tokens, in whole blocks.

    ``get_num_new_matched_tokens`` is wrapped on the connector's instance and its answer shortened: the leading blocks
    of what was found are then loaded. That is not enough where a producer has a sliding window: of such a group a
    connector looks only for the blocks in front of the end of its hit. vLLM's connectors are therefore given the limit
    before they look.
    """

    def __init__(self, connector: Any, keep_tokens: int, block_size: int, prefix_cap: PrefixHitCap) -> None:
        self._keep_tokens = keep_tokens
        self._block_size = block_size
        self._prefix_cap = prefix_cap
        self._room = 0
        self._match: Callable[..., Any] = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = self._get_num_new_matched_tokens
        kinds = {kind.__name__ for kind in type(connector).__mro__}
        self._looks_within_room = not kinds.isdisjoint(TESTED)
        if "OffloadingConnector" in kinds:
            self._max_loadable: Callable[..., Any] = connector._max_loadable_tokens
            connector._max_loadable_tokens = self._max_loadable_tokens
        elif "SimpleCPUOffloadConnector" in kinds and connector.scheduler_manager is not None:
            coordinator = connector.scheduler_manager.cpu_coordinator
            self._find_hit: Callable[..., Any] = coordinator.find_longest_cache_hit
            coordinator.find_longest_cache_hit = self._find_longest_cache_hit

    def _get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        limit = keep_start(request.num_prompt_tokens, self._keep_tokens)
        self._room = max(0, limit // self._block_size * self._block_size - num_computed_tokens)
        # Asked even where there is no room: connectors prepare their record of the request here.
        found, is_async = self._match(request, num_computed_tokens)
        if found is None or found <= self._room:
            return found, is_async
        if not self._looks_within_room:
            self._prefix_cap.lose(request.request_id, found - self._room)
        return self._room, is_async and self._room > 0

    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """OffloadingConnector: how far past ``num_computed_tokens`` its look-up may reach."""
        bound = self._max_loadable(request, num_computed_tokens)
        # With a sliding producer it takes one token off, for the row that is always computed.
        room = self._room + 1
        return room if bound is None else min(bound, room)

    def _find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        """SimpleCPUOffloadConnector: the look-up in its own pool, behind the local hit."""
        return self._find_hit(block_hashes, min(max_cache_hit_length, self._room), *args, **kwargs)

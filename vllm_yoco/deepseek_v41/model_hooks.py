"""What the model classes do beyond vLLM's, apart from building the model: checks on the built layers, and the bound.

Functions of plain arguments, so that they are tested without weights or a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_yoco.config import Truncation
from vllm_yoco.deepseek_v41.swa import ConsumerBound, bound_consumers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class TruncatedParts:
    """What a model with a mode on hands to its state.

    Attributes:
        truncation: the settings in force.
        clipped_prefixes: names of the SWA caches whose visibility ends at the bound.
        bound: the lower bounds, shared with those caches' metadata builders.
    """

    truncation: Truncation
    clipped_prefixes: frozenset[str]
    bound: ConsumerBound


def clipped_layers(truncation: Truncation) -> range:
    """Layers whose SWA ends at the bound: all consumers, or all above the boundary if that one is open."""
    topology = truncation.topology
    return range(topology.boundary + (truncation.boundary_swa == "open"), topology.num_layers)


def install_bound(
    truncation: Truncation, layers: Sequence[Any], local_layers: range, max_num_seqs: int, device: torch.device
) -> TruncatedParts:
    """Give the local consumer layers their bounded backend; after construction, before attention groups are made.

    Args:
        layers: all decoder layers; those of other pipeline stages are not looked at.
        local_layers: layers of this pipeline stage.

    Raises:
        ValueError: a layer's window KV takes part in prefix caching.
    """
    consumers = [n for n in local_layers if n >= truncation.topology.boundary]
    for n in consumers:
        if not layers[n].attn.swa_cache_layer.bounded_replay:
            raise ValueError(
                f"--yoco-truncation={truncation.mode}: the window KV of layer {n} takes part in prefix caching, because"
                " vLLM has switched its bounded replay off (see the warning above). With a mode on it depends on where"
                " a prompt ended and may not be shared. Use --swa-bounded-replay, or --yoco-truncation off."
            )
    caches = [layers[n].attn.swa_cache_layer for n in consumers if n in clipped_layers(truncation)]
    bound = ConsumerBound(max_num_seqs, device)
    bound_consumers(caches, bound)
    return TruncatedParts(truncation, frozenset(cache.prefix for cache in caches), bound)


def check_replay(truncation: Truncation, model: Any, vllm_config: VllmConfig, cut: int) -> None:
    """Raise where vLLM would quietly not trim on this rank, so that compact never means less than it says.

    The start-up checks have refused the same from the configuration alone; this is what the built model says.

    Raises:
        ValueError: the reason, with the flag.
    """
    topology, reason = truncation.topology, None
    if cut != topology.boundary:
        reason = f"vLLM cuts the model at layer {cut}, and its first layer of ratio 1 is {topology.boundary}"
    elif model.start_layer > cut or model.end_layer < topology.num_layers:
        reason = (
            f"this pipeline stage holds layers {model.start_layer}..{model.end_layer - 1}, and the one with the"
            f" boundary {cut} must hold every layer after it"
        )
    elif model.use_sequence_parallel:
        reason = "sequence parallelism spreads a step's rows over ranks"
    elif vllm_config.parallel_config.prefill_context_parallel_size > 1:
        reason = "prefill context parallelism spreads a prompt's rows over ranks"
    elif vllm_config.parallel_config.use_ubatching:
        reason = "microbatches split a step's rows between threads"
    if reason is not None:
        raise ValueError(f"--yoco-truncation={truncation.mode}: {reason}. Use --yoco-truncation off.")

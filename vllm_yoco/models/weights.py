"""From Hugging Face weight names to the fused projections of ``YocoForCausalLM``.

    q_proj k_proj v_proj (producers)                -> qkv_proj
    q_proj swa_q_proj [swa_k_proj swa_v_proj]       -> in_proj       one projection of a consumer's input
    swa_k_proj swa_v_proj (swa_share_hidden)        -> swa_kv_proj   of the shared hidden
    k_proj of every KV source, then v_proj          -> model.global_kv_proj
    gate_proj up_proj                               -> gate_up_proj
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_yoco.models.checkpoint import parameter_shapes
from vllm_yoco.models.config import YocoModelConfig
from vllm_yoco.topology import LayerTopology


def load_weights(
    model: nn.Module, config: YocoModelConfig, topology: LayerTopology, weights: Iterable[tuple[str, torch.Tensor]]
) -> set[str]:
    """Load a checkpoint; returns the names of the model's parameters that were filled.

    Raises:
        ValueError: for a weight that this config has no place for, one that is missing, or one in a quantised format
            that tensor parallelism would cut in the wrong places.
    """
    parameters = dict(model.named_parameters())
    loaded: set[str] = set()
    seen: set[str] = set()
    for name, weight in weights:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target, shard = _placement(name, topology)
        if target not in parameters:
            raise ValueError(f"checkpoint weight {name} has no place in this config (wanted {target})")
        parameter = parameters[target]
        if _joins_two_branches(target, topology):
            weight = _branches_per_rank(target, parameter, weight, get_tensor_model_parallel_world_size())
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        loader(parameter, weight) if shard is None else loader(parameter, weight, shard)
        loaded.add(target)
        seen.add(name)
    missing = {name for name in parameter_shapes(config)} - seen
    if missing:
        raise ValueError(f"the checkpoint lacks {sorted(missing)}, which this config needs")
    return loaded


def _placement(name: str, topology: LayerTopology) -> tuple[str, int | str | None]:
    """The parameter and shard that a checkpoint weight goes to."""
    *path, module, suffix = name.split(".")
    base = ".".join(path)
    if module in ("gate_proj", "up_proj"):
        return f"{base}.gate_up_proj.{suffix}", ("gate_proj", "up_proj").index(module)
    if "self_attn" not in path or module == "o_proj":
        return name, None
    layer = int(path[path.index("layers") + 1])
    if not topology.is_consumer(layer):
        return f"{base}.qkv_proj.{suffix}", module[0]
    if module in ("k_proj", "v_proj"):
        if layer not in topology.kv_source_layers:
            return name, None
        sources = topology.kv_source_layers
        return f"model.global_kv_proj.{suffix}", sources.index(layer) + len(sources) * (module == "v_proj")
    if module in ("swa_k_proj", "swa_v_proj") and topology.swa_share_hidden:
        return f"{base}.swa_kv_proj.{suffix}", ("swa_k_proj", "swa_v_proj").index(module)
    shards = ("q_proj", "swa_q_proj", "swa_k_proj", "swa_v_proj")
    return f"{base}.in_proj.{suffix}", shards.index(module)


def _joins_two_branches(parameter: str, topology: LayerTopology) -> bool:
    parts = parameter.split(".")
    return parts[-2] == "o_proj" and topology.has_swa(int(parts[2]))


def _branches_per_rank(name: str, parameter: torch.Tensor, weight: torch.Tensor, tp_size: int) -> torch.Tensor:
    """Bring a tensor of an output projection over two branches into the order that ranks cut it in."""
    if name.endswith(".weight"):
        return _interleave_branches(weight, tp_size)
    # Scales of whole rows and of the whole tensor are not cut; those of groups of columns and packed columns are.
    if tp_size > 1 and getattr(parameter, "input_dim", None) is not None:
        raise ValueError(
            f"--tensor-parallel-size={tp_size}: must be 1 with this checkpoint, because {name} is quantised in a"
            " format whose columns (global heads, then window heads) cannot be shared out between ranks. Set it to 1,"
            " or use weights without groups along the input."
        )
    return weight


def _interleave_branches(weight: torch.Tensor, tp_size: int) -> torch.Tensor:
    """Reorder output-projection columns [global heads | window heads] so that an equal cut of the columns gives
    every rank its heads of both branches. ``weight`` is [hidden, 2 * heads * head_dim]."""
    rows, columns = weight.shape
    return weight.view(rows, 2, tp_size, columns // (2 * tp_size)).transpose(1, 2).reshape(rows, columns)

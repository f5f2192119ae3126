"""``vllm-yoco init-model``: a checkpoint with random weights, to try the plugin without a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_yoco.plan import exact_keep_tokens, minimum_keep_tokens
from vllm_yoco.presets import find_model_config, model_presets
from vllm_yoco.tools.report import ranges
from vllm_yoco.topology import LayerTopology

HELP = "write a YOCO checkpoint with random weights and a byte tokenizer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help=f"JSON file, or one of the presets {', '.join(model_presets())}"
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="directory to write; must be empty or new")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="same seed, same weights (default: 0)")
    parser.add_argument("--force", action="store_true", help="write into a directory that is not empty")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print its size and topology.

    Raises:
        ValueError: for a bad config, a negative seed, or an output directory that must not be touched.
    """
    path = find_model_config(args.config)
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed}: must be 0 or more.")
    _check_out_dir(args.out_dir, args.force)

    from vllm_yoco.models import checkpoint  # loads torch

    config = checkpoint.read_model_config(path)
    checkpoint.save_checkpoint(args.out_dir, config, checkpoint.random_state_dict(config, args.seed))
    size = (args.out_dir / checkpoint.WEIGHTS_FILE).stat().st_size
    count = checkpoint.parameter_count(config)
    dtype = str(config.dtype).removeprefix("torch.")
    print(f"{args.out_dir}: {count:,} parameters, {size / 1e6:.1f} MB ({dtype}), seed {args.seed}")
    print(topology_line(config.topology()))
    return 0


def _check_out_dir(out_dir: Path, force: bool) -> None:
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"{out_dir}: is not a directory.")
    if not out_dir.is_dir() or not any(out_dir.iterdir()):
        return
    if not force:
        raise ValueError(f"{out_dir}: is not empty. Choose another directory, or add --force to overwrite it.")
    # Loaders read every weights file of a directory: left there, these would mix with the new ones.
    foreign = sorted(path.name for path in out_dir.glob("*.safetensors*") if path.name != "model.safetensors")
    if foreign:
        raise ValueError(f"{out_dir}: holds other weights ({', '.join(foreign)}). Remove them first.")


def topology_line(topology: LayerTopology) -> str:
    """One line on who does what: layer ranges, KV sources, window and the two K of interest (no speculation)."""
    window, swa = topology.consumer_window, topology.swa_layers
    smallest = minimum_keep_tokens(window, 1)
    exact = exact_keep_tokens(window, 1, len(swa), topology.swa_share_hidden)
    hidden = "shared hidden" if topology.swa_share_hidden else "own input"
    return "; ".join(
        (
            f"layers: producers {ranges(range(topology.boundary))}",
            f"consumers {ranges(range(topology.boundary, topology.num_layers))}",
            f"global KV from {ranges(topology.kv_source_layers)}",
            f"SWA {ranges(swa)} (W {window}, {hidden})" if swa else "no SWA",
            f"K min {smallest}, exact {exact}",
        )
    )

"""The small checkpoint of the checks: weights that bfloat16 holds exactly.

A bfloat16 engine then has the weights of the float32 reference, and what is compared is its arithmetic alone. A bundle
brings it along, so that it is the same whatever random numbers the machine's PyTorch draws.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs/models/ced-tiny.json"
BUNDLED = ROOT / "checkpoint"


def save_small_checkpoint(directory: Path) -> None:
    from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint

    config = read_model_config(CONFIG)
    state = random_state_dict(config, seed=0)
    save_checkpoint(directory, config, {name: value.bfloat16().float() for name, value in state.items()})


def small_checkpoint(directory: Path) -> Path:
    """The bundle's, or one made in ``directory``."""
    if BUNDLED.exists():
        return BUNDLED
    save_small_checkpoint(directory)
    return directory

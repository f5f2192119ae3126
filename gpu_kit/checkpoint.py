"""The small checkpoint of the checks: weights that bfloat16 holds exactly.

A bfloat16 engine then has the weights of the float32 reference, and what is compared is its arithmetic alone.
"""

from __future__ import annotations

from pathlib import Path

from vllm_yoco.models.checkpoint import random_state_dict, save_checkpoint
from vllm_yoco.models.config import YocoModelConfig


def save_rounded_checkpoint(directory: Path, config: YocoModelConfig) -> None:
    state = random_state_dict(config, seed=0)
    save_checkpoint(directory, config, {name: value.bfloat16().float() for name, value in state.items()})

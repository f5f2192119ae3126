"""The stages: each a program ``python -m gpu_kit.stages.NAME --out FILE`` that writes its result as it goes."""

from __future__ import annotations

import argparse
from pathlib import Path


def output_file() -> Path:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args().out

"""Stage 3: the engine invariants with CUDA graphs for decode."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_kit import pytest_report
from gpu_kit.results import SKIPPED, StageResult
from gpu_kit.settings import is_rehearsal
from gpu_kit.stages import output_file
from gpu_kit.stages.invariants import PROJECT, TESTS


def main(out: Path) -> int:
    if is_rehearsal():
        result = StageResult(out, "graphs")
        result.add("CUDA graphs", SKIPPED, 0.0, error="there are none without a GPU")
        result.finish()
        return 0
    return pytest_report.run("graphs", out, [str(TESTS), "-m", "graphs"], PROJECT)


if __name__ == "__main__":
    sys.exit(main(output_file()))

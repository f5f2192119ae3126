"""Stage 2: the engine invariants on the GPU, eager (tests/gpu/test_invariants.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_kit import pytest_report
from gpu_kit.settings import is_rehearsal
from gpu_kit.stages import output_file

PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests/gpu/test_invariants.py"
REHEARSED = (
    "(float32 and not exact and not min) or without_the_cap or (bfloat16 and (equals_reference and off or wrong_keep))"
)
"""Every test once; of bfloat16, which takes the interpreter longest, the comparison and its control."""

if __name__ == "__main__":
    selection = ["-k", REHEARSED] if is_rehearsal() else []
    sys.exit(pytest_report.run("invariants", output_file(), [str(TESTS), "-m", "not graphs", *selection], PROJECT))

"""A pytest plugin that writes every test's outcome as a check of a stage, at once (``-p gpu_kit.pytest_report``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpu_kit.results import FAILED, PASSED, SKIPPED, StageResult

ENV_RESULT, ENV_STAGE = "YOCO_GPU_STAGE_RESULT", "YOCO_GPU_STAGE_NAME"


class Reporter:
    def __init__(self, result: StageResult) -> None:
        self.result = result
        self.setup_seconds = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.rsplit("::", 1)[-1]
        if report.when == "setup":
            self.setup_seconds = report.duration
        if report.failed:
            self.result.add(
                name if report.when == "call" else f"{name} ({report.when})",
                FAILED,
                self.setup_seconds + report.duration,
                error=str(report.longrepr)[-6000:],
                **dict(report.user_properties),
            )
        elif report.skipped:
            self.result.add(name, SKIPPED, report.duration, error=str(report.longrepr[-1]))
        elif report.when == "call":
            self.result.add(name, PASSED, self.setup_seconds + report.duration, **dict(report.user_properties))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.result.add(f"collect {report.nodeid}", FAILED, 0.0, error=str(report.longrepr)[-6000:])

    def pytest_sessionfinish(self) -> None:
        self.result.finish()


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Reporter(StageResult(Path(os.environ[ENV_RESULT]), os.environ[ENV_STAGE])))


def run(stage: str, out: Path, arguments: list[str], root: Path) -> int:
    """Run pytest in this process; the result goes to ``out``. Returns pytest's exit code."""
    import pytest

    os.environ |= {ENV_RESULT: str(out), ENV_STAGE: stage}
    # The project's options may ask for plugins or a version of pytest that this machine lacks.
    inifile = Path(__file__).with_name("pytest.ini")
    options = ["-c", str(inifile), f"--rootdir={root}", "-p", "gpu_kit.pytest_report", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *arguments]))

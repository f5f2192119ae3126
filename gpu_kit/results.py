"""What a stage found, on disk the moment it is known.

A stage is a process that may be killed at any time: by its budget, by a crash of the GPU, with the machine itself. So
every check is written when it ends, the whole file through a rename, and a reader always finds valid JSON.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, ABSENT = "passed", "failed", "skipped", "absent"
"""Of a check. ``absent``: what it would check does not exist here."""

OK, RUNNING, TIMEOUT, CRASHED, NOT_RUN = "ok", "running", "timeout", "crashed", "not run"
"""Further states of a stage. ``running`` in a file that nobody writes any more means that its process was killed."""


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` in one step. Values that JSON does not know (NumPy's) become numbers or text."""
    partial = path.with_name(path.name + ".new")
    partial.write_text(json.dumps(value, indent=1, default=_plain) + "\n")
    os.replace(partial, path)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def verdict(checks: list[dict[str, Any]]) -> str:
    """Status of a stage that ran to its end: ok only where something passed and nothing failed."""
    statuses = {check["status"] for check in checks}
    for status in (FAILED, PASSED, ABSENT, SKIPPED):
        if status in statuses:
            return OK if status == PASSED else status
    return FAILED  # nothing was checked at all


class StageResult:
    """The file of one stage: ``status``, ``facts`` (what the machine is) and ``checks`` (what was asked of it)."""

    def __init__(self, path: Path, stage: str) -> None:
        self.path = path
        self.data: dict[str, Any] = {"stage": stage, "status": RUNNING, "facts": {}, "checks": []}
        self._write()

    def _write(self) -> None:
        write_json(self.path, self.data)

    def fact(self, **facts: Any) -> None:
        self.data["facts"].update(facts)
        self._write()

    def add(self, name: str, status: str, seconds: float, *, error: str = "", **values: Any) -> None:
        entry = {"name": name, "status": status, "seconds": round(seconds, 3)}
        if values:
            entry["values"] = values
        if error:
            entry["error"] = error
        self.data["checks"].append(entry)
        self._write()

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """A check is what the block does; it fails by raising, and the stage goes on. Yields its values to fill in."""
        values: dict[str, Any] = {}
        start = time.monotonic()
        try:
            yield values
        except Exception as error:
            self.add(name, FAILED, time.monotonic() - start, error="".join(traceback.format_exception(error)), **values)
        else:
            self.add(name, PASSED, time.monotonic() - start, **values)

    def finish(self) -> str:
        status = self.data["status"] = verdict(self.data["checks"])
        self._write()
        return status

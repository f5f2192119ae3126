"""docs/performance.md holds what the files of measurements say, and nothing typed in by hand."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
from pathlib import Path

from vllm_yoco.tools import bench

ROOT = Path(__file__).parents[2]


def _script():
    spec = importlib.util.spec_from_file_location("update_performance", ROOT / "scripts" / "update_performance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_files():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    script = _script()
    assert script.render(page) == page, "run python scripts/update_performance.py"
    used = {match[2] for match in script.BLOCK.finditer(page)}
    assert used == {path.name for path in (ROOT / "docs" / "performance").glob("*.json")}
    # Control: a changed digit inside a table is put right.
    start = next(script.BLOCK.finditer(page)).start()
    changed = page[:start] + re.sub(r"(?<=\n)( +)\d", r"\g<1>9", page[start:], count=1)
    assert changed != page and script.render(changed) == page


def test_commands_give_the_arguments_that_were_recorded():
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    files = (ROOT / "docs" / "performance").glob("*.json")
    # Older files have none, and the page no block for them.
    found = [json.loads(path.read_text(encoding="utf-8")).get("arguments") for path in files]
    assert any(found)
    flags = next(filter(None, found)) | {"engine_flags": ["--load-format", "dummy"], "one_process": True}
    for recorded in [*filter(None, found), flags]:
        name, command, *arguments = shlex.split(_script().command(recorded))
        assert (name, command) == ("vllm-yoco", "bench")
        parsed = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(parser.parse_args(arguments)).items()}
        # A flag that is younger than the file has its default.
        assert {k: v for k, v in parsed.items() if k in recorded or v != parser.get_default(k)} == recorded

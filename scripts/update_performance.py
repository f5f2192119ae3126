"""Put the tables of docs/performance/*.json, as ``vllm-yoco bench --json`` wrote them, into docs/performance.md.

    python scripts/update_performance.py            # after a new measurement
    python scripts/update_performance.py --check    # exit code 1 if the page is not what the files say

A table stands between ``<!-- FILE.json: TITLE -->`` and ``<!-- end -->``; TITLE is its heading in the report, or
``command`` for the command line that made the file.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"(<!-- (\S+\.json): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(page: str) -> str:
    """The page with every table made anew. KeyError for a title that a report does not have."""
    from vllm_yoco.tools.bench_report import sections

    def table(match: re.Match[str]) -> str:
        results = json.loads((DOCS / "performance" / match[2]).read_text(encoding="utf-8"))
        found = command(results["arguments"]) if match[3] == "command" else dict(sections(results))[match[3]]
        return f"{match[1]}```text\n{found}\n```\n{match[4]}"

    return BLOCK.sub(table, page)


def command(arguments: dict[str, Any]) -> str:
    """The command line that gives these arguments, without those that have their default."""
    from vllm_yoco.tools import bench

    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    words = ["vllm-yoco", "bench", arguments["model"]]
    for name, value in arguments.items():
        if name == "model" or value == parser.get_default(name):
            continue
        if name == "engine_flags":
            words.append(f"--engine-flags={shlex.join(value)}")
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return shlex.join(words)


def main() -> int:
    path = DOCS / "performance.md"
    page = path.read_text(encoding="utf-8")
    made = render(page)
    if "--check" in sys.argv[1:]:
        return int(made != page)
    path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

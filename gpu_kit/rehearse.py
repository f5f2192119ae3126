"""Rehearse the GPU check without a GPU (``make gpu-kit-rehearsal``): what the bundle lacks shows here.

    1. a fresh Python 3.12 environment with the packages of image.txt, which stand for the GPU machine's
    2. the network is refused from here on (a network namespace with the loopback interface alone)
    3. the bundle is installed by its own driver; every module that the CUDA platform imports has to resolve
    4. the driver runs the stages through Triton's interpreter: 1 and 2 as they are, on short prompts; 3 needs a GPU;
       4 and 5 as far as they go

The versions in image.txt are those of the machine, PyTorch included; on a CPU its CUDA build works without a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = Path(__file__).with_name("image.txt")
WHEELS = Path(__file__).with_name("wheels.txt")
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1


def say(text: str) -> None:
    print(f"gpu-kit: rehearsal: {text}", flush=True)


def refuse_network() -> None:
    """This process and its children see no network but their own loopback from now on.

    Raises:
        OSError: the kernel does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | (CLONE_NEWUSER if uid else 0)):
        raise OSError(ctypes.get_errno(), "unshare: no network namespace to be had")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        # vLLM's process groups meet on loopback, which starts down.
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    with socket.socket() as probe:
        probe.settimeout(5)
        if probe.connect_ex(("192.0.2.1", 80)) == 0:
            raise OSError("an address outside is still reached")


def make_environment(venv: Path, python: str) -> Path:
    """The environment of image.txt at ``venv``, made anew unless it is this one already. Returns its interpreter."""
    stamp = venv / "image.sha256"
    want = hashlib.sha256(IMAGE.read_bytes() + WHEELS.read_bytes()).hexdigest()
    interpreter = venv / "bin" / "python"
    if stamp.exists() and stamp.read_text() == want:
        say(f"{venv} is as image.txt wants it")
        return interpreter
    shutil.rmtree(venv, ignore_errors=True)
    say(f"making {venv}: PyTorch with CUDA, several GB")
    subprocess.run([python, "-m", "venv", str(venv)], check=True)
    pip = [str(interpreter), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--requirement", str(IMAGE)], check=True)
    # Dependencies of the above that the machine's image has not: the bundle must bring them.
    brought = [line.split("==")[0] for line in WHEELS.read_text().splitlines() if "==" in line]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *brought], check=True)
    stamp.write_text(want)
    return interpreter


def find_python() -> str:
    """A CPython 3.12 on PATH.

    Raises:
        SystemExit: there is none.
    """
    for folder in os.get_exec_path():
        path = Path(folder) / "python3.12"
        if os.access(path, os.X_OK):
            answer = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True)
            if answer.returncode == 0:
                return str(path)
    sys.exit("gpu-kit: the rehearsal needs Python 3.12, as the GPU machine has; name one with PYTHON312=PATH")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, default=ROOT / "build/gpu-kit", metavar="DIR")
    parser.add_argument("--venv", type=Path, default=ROOT / "build/gpu-kit-rehearsal/venv", metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-kit-rehearsal/results", metavar="DIR")
    parser.add_argument("--python", default="", metavar="PATH", help="a Python 3.12 (default: python3.12 on PATH)")
    parser.add_argument("--stages", default="1,2,3,4,5", metavar="1,2,...")
    parser.add_argument("--only-environment", action="store_true", help="make the environment and stop")
    args = parser.parse_args()
    interpreter = make_environment(args.venv.absolute(), args.python or find_python())
    if args.only_environment:
        return 0
    if not (args.bundle / "run.py").exists():
        sys.exit(f"gpu-kit: there is no bundle in {args.bundle}: make gpu-kit")
    try:
        refuse_network()
    except OSError as error:
        sys.exit(
            f"gpu-kit: the rehearsal proves nothing with a network at hand, and it cannot be refused here: {error}"
        )
    say("network refused")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = [str(interpreter), str(args.bundle / "run.py"), "--rehearsal", "--out", str(args.out)]
    command += ["--stages", args.stages, "--budget", "5400", "--budget-scale", "15"]
    return subprocess.run(command, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())

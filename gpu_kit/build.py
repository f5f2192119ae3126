"""Assemble build/gpu-kit: what a GPU machine without a network needs to run the stages (``make gpu-kit``).

    run.py              starts the driver
    MANIFEST.json       versions, and every file with its size and SHA-256
    wheels/             vLLM's Python sources and this plugin as wheels, and the wheels of wheels.txt
    project/            tests, configs, this package, and a small checkpoint

vLLM's own wheel is several hundred MB of compiled extensions; its Python sources are about 10. The sources come from
the vLLM that is installed here, the CPU build as well as the CUDA build: they are the same files.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpu_kit.bridges import MODULES
from gpu_kit.checkpoint import BUNDLED, save_small_checkpoint
from gpu_kit.driver import MANIFEST, STAGES
from gpu_kit.results import write_json

ROOT = Path(__file__).resolve().parents[1]
WHEELS = Path(__file__).with_name("wheels.txt")
MAX_BYTES = 60 * 2**20
"""What may be brought along to the machine."""

PYTHON = "3.12"
# pip takes each tag literally: the oldest one a wheel is tagged with decides.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)), "manylinux1_x86_64", "manylinux2014_x86_64")
PROJECT_FOLDERS = ("tests", "configs", "gpu_kit")
"""Not vllm_yoco: the installed wheel, in which patches and configs are in their places, must be what is imported."""

RUN = '''"""Run the GPU check: python3 run.py --out DIR. See project/gpu_kit/driver.py."""

import sys
from pathlib import Path

bundle = Path(__file__).resolve().parent
sys.path.insert(0, str(bundle / "project"))

from gpu_kit.driver import main

sys.exit(main(bundle=bundle))
'''


class BuildError(Exception):
    """The bundle cannot be made; the message says what to do."""


# ---- contents


def python_sources(package: Path) -> Iterator[Path]:
    """The files of a package that are neither compiled nor caches, relative to its parent."""
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts:
            yield path.relative_to(package.parent)


def write_wheel(path: Path, name: str, version: str, files: Iterable[tuple[str, bytes]]) -> None:
    """A pure-Python wheel. Equal input gives equal bytes."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: gpu-kit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for member, content in [*files, (f"{info}/METADATA", metadata.encode()), (f"{info}/WHEEL", wheel.encode())]:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.writerow([member, f"sha256={digest}", len(content)])
            archive.writestr(zipfile.ZipInfo(member), content, zipfile.ZIP_DEFLATED, 9)
        rows.writerow([f"{info}/RECORD", "", ""])
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record.getvalue(), zipfile.ZIP_DEFLATED, 9)


def vllm_wheel(folder: Path) -> str:
    """vLLM's Python sources as a wheel, with a stand-in where its CUDA extension was. Returns the version.

    Raises:
        BuildError: vLLM is not installed here.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise BuildError(
            "vLLM is not installed in this environment, and the bundle is made from its sources: run make setup"
        )
    package = Path(spec.origin).parent
    source = (package / "_version.py").read_text()
    found = re.search(r"^__version__ = version = '([\d.]+)", source, re.M)
    if found is None:
        raise BuildError(f"{package / '_version.py'} names no version: is this a release of vLLM?")
    version = found[1]
    # A build for CPUs calls itself +cpu, by which vLLM would take the CPU platform on a GPU.
    files = [(str(path), (package.parent / path).read_bytes()) for path in python_sources(package)]
    files += [(name, text.encode()) for name, text in MODULES.items()]
    write_wheel(folder / f"vllm-{version}-py3-none-any.whl", "vllm", version, files)
    return version


def project_wheel(folder: Path) -> None:
    # Setuptools packs what an earlier build left there, modules that are gone included.
    shutil.rmtree(ROOT / "build/lib", ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _run([*command, "--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)])


def download_wheels(folder: Path, wheels: Path = WHEELS) -> None:
    """Exactly the files that wheels.txt names by version and hash; pip resolves nothing."""
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", *platforms, "--disable-pip-version-check"]
    _run([*command, "--require-hashes", "--requirement", str(wheels), "--dest", str(folder)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:5])} ... failed:\n{done.stdout[-3000:]}")


def copy_project(folder: Path) -> None:
    """The files that git tracks or would track, so that nothing left lying about travels."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PROJECT_FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)


# ---- manifest


def manifest(bundle: Path) -> list[dict[str, object]]:
    """Path, size in bytes and SHA-256 of every file of the bundle but the manifest itself."""
    return [
        {
            "path": str(path.relative_to(bundle)),
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(bundle.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    ]


def check_size(files: list[dict[str, object]], max_bytes: int = MAX_BYTES) -> int:
    """Bytes in all.

    Raises:
        BuildError: more than ``max_bytes``; names the largest files.
    """
    sizes = {str(entry["path"]): int(str(entry["bytes"])) for entry in files}
    total = sum(sizes.values())
    if total > max_bytes:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        shown = ", ".join(f"{path} {sizes[path] / 2**20:.1f} MiB" for path in largest)
        raise BuildError(
            f"the bundle has {total / 2**20:.1f} MiB, more than the {max_bytes / 2**20:.0f} MiB that may be brought"
            f" along; largest: {shown}. Take wheels out of {WHEELS.name}."
        )
    return total


def build(bundle: Path) -> int:
    """Make the bundle anew. Returns its size in bytes."""
    partial = bundle.with_name(bundle.name + ".new")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "wheels").mkdir(parents=True)
    version = vllm_wheel(partial / "wheels")
    project_wheel(partial / "wheels")
    download_wheels(partial / "wheels")
    copy_project(partial / "project")
    save_small_checkpoint(partial / "project" / BUNDLED.name)
    (partial / "run.py").write_text(RUN)
    files = manifest(partial)
    versions = {"vllm": version, "vllm-yoco": importlib.metadata.version("vllm-yoco"), "commit": _commit()}
    write_json(partial / MANIFEST, {"versions": versions, "files": files})
    total = check_size(files)
    shutil.rmtree(bundle, ignore_errors=True)
    partial.rename(bundle)
    return total


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, default=ROOT / "build/gpu-kit", metavar="DIR")
    bundle: Path = parser.parse_args().bundle.resolve()
    try:
        total = build(bundle)
    except BuildError as error:
        print(f"gpu-kit: {error}", file=sys.stderr)
        return 1
    count = len(list((bundle / "wheels").iterdir()))
    print(f"gpu-kit: {bundle}: {total / 2**20:.1f} MiB of at most {MAX_BYTES / 2**20:.0f}, {count} wheels")
    for stage in STAGES:
        print(f"gpu-kit: stage {stage.number} {stage.name:12} {stage.budget_s:4d} s  {stage.title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

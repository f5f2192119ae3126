"""The GPU kit's own rules: size and manifest of the bundle, budgets, and results that survive a stage."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from gpu_kit import bridges, build, driver, results, settings
from gpu_kit.driver import Stage

# --- Stages -----------------------------------------------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from gpu_kit.results import StageResult
result = StageResult(Path(sys.argv[2]), "x")
result.add("first", "passed", 0.1, answer=42)
{then}
"""
GOOD = WRITER.format(then="result.finish()")
HANGS = WRITER.format(then="time.sleep(600)")
DIES = WRITER.format(then="import os; print('last words', flush=True); os.kill(os.getpid(), 9)")
FAILS = WRITER.format(then="result.add('second', 'failed', 0.1, error='Boom: no'); result.finish(); sys.exit(1)")
SILENT = "import sys; sys.exit('no result at all')"
IGNORES_SIGTERM = WRITER.format(then="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")


class Program(Stage):
    """A stage that runs a program text."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.name]


def run(tmp_path: Path, *programs: tuple[str, float], seconds: float = 60) -> list[dict]:
    stages = [Program(i, text, "title", budget) for i, (text, budget) in enumerate(programs, start=1)]
    env = settings.environment(site=None, project=driver.PROJECT, rehearsal=False)
    return driver.run_stages(stages, env, tmp_path, tmp_path, deadline=time.monotonic() + seconds)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(driver, "LEAST_BUDGET_S", 0.5)
    monkeypatch.setattr(driver, "GRACE_S", 0.5)


def test_one_bad_stage_does_not_lose_the_others(tmp_path):
    collected = run(tmp_path, (GOOD, 30), (DIES, 30), (SILENT, 30), (HANGS, 1), (FAILS, 30), (GOOD, 30))
    assert [data["status"] for data in collected] == ["ok", "crashed", "crashed", "timeout", "failed", "ok"]
    # On disk too, each in its file and all together; what a stage had found before it died is there.
    on_disk = json.loads((tmp_path / "results.json").read_text())["stages"]
    for number, data in enumerate(collected, start=1):
        assert json.loads((tmp_path / f"stage-{number}.json").read_text()) == data == on_disk[number - 1]
    for index in (0, 1, 3, 4, 5):
        assert collected[index]["checks"][0] == {
            "name": "first", "status": "passed", "seconds": 0.1, "values": {"answer": 42}
        }  # fmt: skip
    assert collected[1]["exit_code"] == -9 and "last words" in collected[1]["log_tail"]
    assert "no result at all" in collected[2]["log_tail"]
    assert "Boom: no" in driver.summary(collected[4])
    assert [driver.succeeded(data) for data in collected] == [True, False, False, False, False, True]


def test_results_are_on_disk_before_the_next_stage_starts(tmp_path):
    text = f"""
import json
stages = json.load(open({str(tmp_path / "results.json")!r}))["stages"]
assert [data["status"] for data in stages] == ["ok"]
{GOOD}"""
    assert [data["status"] for data in run(tmp_path, (GOOD, 30), (text, 30))] == ["ok", "ok"]


def test_budget_is_kept_even_against_a_stubborn_stage(tmp_path):
    start = time.monotonic()
    [data] = run(tmp_path, (IGNORES_SIGTERM, 1))
    assert data["status"] == "timeout" and data["exit_code"] is None
    assert time.monotonic() - start < 20


def test_children_of_a_killed_stage_end_too(tmp_path):
    pid_file = tmp_path / "pid"
    text = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pid_file)!r}, "w").write(str(child.pid))
{HANGS}"""
    run(tmp_path, (text, 3))
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_no_time_left(tmp_path):
    """A stage that would be killed at once is not started, and says so."""
    ok, late = run(tmp_path, (GOOD, 30), (GOOD, 0.1))
    assert ok["status"] == "ok"
    assert late["status"] == "not run" and not late["checks"] and not driver.succeeded(late)
    assert "left" in late["error"]
    assert json.loads((tmp_path / "stage-2.json").read_text())["status"] == "not run"


def test_deadline_cuts_a_budget(tmp_path):
    first, second = run(tmp_path, (HANGS, 30), (GOOD, 30), seconds=2)
    assert first["status"] == "timeout" and first["budget_s"] <= 2
    assert second["status"] == "not run"


def test_budgets_fit_one_command():
    assert sum(stage.budget_s for stage in driver.STAGES) <= 570
    assert [stage.number for stage in driver.STAGES] == [1, 2, 3, 4, 5]
    assert all((driver.HERE / "stages" / f"{stage.name}.py").exists() for stage in driver.STAGES)


def test_unknown_stage():
    assert [stage.number for stage in driver.chosen_stages("4,1")] == [4, 1]
    for text in ("7", "", "one"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"give stage numbers .* 4 \(speed\)"):
            driver.chosen_stages(text)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (["passed", "skipped"], "ok"),
        (["passed", "failed", "absent"], "failed"),
        (["absent", "skipped"], "absent"),
        (["skipped"], "skipped"),
        ([], "failed"),
    ],
)
def test_verdict(statuses, status):
    """Nothing checked is no success, and what is absent is never ok."""
    assert results.verdict([{"status": s} for s in statuses]) == status


def test_failed_check_goes_on(tmp_path):
    result = results.StageResult(tmp_path / "r.json", "x")
    with result.check("breaks") as values:
        values["seen"] = 1
        raise ValueError("why")
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "running"
    with result.check("works"):
        pass
    assert result.finish() == "failed"
    first, second = json.loads((tmp_path / "r.json").read_text())["checks"]
    assert first["status"] == "failed" and "ValueError: why" in first["error"] and first["values"] == {"seen": 1}
    assert second["status"] == "passed"


def test_pytest_outcomes_are_written(tmp_path):
    """Passed, failed, skipped, broken set-up and recorded values, as a stage's checks."""
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('worst', 0.5)\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_skip(): pytest.skip('no reason')\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('gone')\n"
        "def test_setup(broken): pass\n"
    )
    code = f"""
from pathlib import Path
from gpu_kit import pytest_report
pytest_report.run("x", Path({str(tmp_path / "out.json")!r}), [{str(tmp_path / "test_x.py")!r}], Path({str(tmp_path)!r}))
"""
    env = settings.environment(site=None, project=driver.PROJECT, rehearsal=False)
    subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=True, capture_output=True)
    data = json.loads((tmp_path / "out.json").read_text())
    found = {check["name"]: check for check in data["checks"]}
    assert data["status"] == "failed"
    assert {name: check["status"] for name, check in found.items()} == {
        "test_good": "passed", "test_bad": "failed", "test_skip": "skipped", "test_setup (setup)": "failed"
    }  # fmt: skip
    assert found["test_good"]["values"] == {"worst": 0.5}
    assert "assert 1 == 2" in found["test_bad"]["error"] and "gone" in found["test_setup (setup)"]["error"]


# --- Bundle -----------------------------------------------------------------------------------------------------


def test_manifest_and_size(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/big.whl").write_bytes(b"x" * 3000)
    (tmp_path / "run.py").write_bytes(b"y" * 1000)
    (tmp_path / build.MANIFEST).write_text("not part of itself")
    files = build.manifest(tmp_path)
    assert [entry["path"] for entry in files] == ["run.py", "wheels/big.whl"]
    assert files[0]["sha256"] == hashlib.sha256(b"y" * 1000).hexdigest()
    assert build.check_size(files, 4000) == 4000
    with pytest.raises(build.BuildError, match=r"more than .* largest: wheels/big.whl"):
        build.check_size(files, 3999)


def test_size_limit_is_sixty_mebibytes():
    assert build.MAX_BYTES == 60 * 1024 * 1024
    with pytest.raises(build.BuildError, match="more than the 60 MiB"):
        build.check_size([{"path": "a", "bytes": 60 * 2**20 + 1}])


def test_vllm_wheel_has_sources_and_stand_in_only(tmp_path, monkeypatch):
    package = tmp_path / "vllm"
    (package / "sub/__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text("__version__ = version = '0.32.0'\n")
    (package / "_C.abi3.so").write_bytes(b"compiled")
    (package / "sub/data.json").write_text("{}")
    (package / "sub/__pycache__/x.pyc").write_bytes(b"")
    spec = argparse.Namespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: spec)
    assert build.vllm_wheel(tmp_path) == "0.32.0"
    wheel = tmp_path / "vllm-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        # A local version (+cpu) would make vLLM choose the CPU platform on a GPU.
        assert b"Version: 0.32.0\n" in archive.read("vllm-0.32.0.dist-info/METADATA")
        record = archive.read("vllm-0.32.0.dist-info/RECORD").decode()
    info = {f"vllm-0.32.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")}
    assert names - info == {"vllm/__init__.py", "vllm/_version.py", "vllm/sub/data.json", *bridges.MODULES}
    assert all(name in record for name in names)
    first = wheel.read_bytes()
    build.vllm_wheel(tmp_path)
    assert wheel.read_bytes() == first, "equal input, equal bytes"


def test_wheels_are_pinned_by_version_and_hash():
    lines = [line for line in build.WHEELS.read_text().splitlines() if line and not line.startswith("#")]
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert len(pairs) > 10
    for requirement, digest in pairs:
        assert requirement.count("==") == 1 and requirement.endswith(" \\")
        assert digest.strip().startswith("--hash=sha256:") and len(digest.strip()) == len("--hash=sha256:") + 64


# --- Settings and bridges -----------------------------------------------------------------------------------------


def test_full_vllm_gets_no_bridge_and_no_options(tmp_path):
    base = {"PATH": "/bin", "PYTHONPATH": "/mine"}
    full = settings.environment(site=None, project=tmp_path, rehearsal=False, base=base)
    assert settings.ENV_MODE not in full and settings.ENV_OPTIONS not in full
    assert full["PYTHONPATH"] == f"{tmp_path}:/mine"
    kit = settings.environment(site=tmp_path / "site", project=tmp_path, rehearsal=False, base=base)
    assert kit[settings.ENV_MODE] == "kit" and kit["PYTHONPATH"].startswith(str(tmp_path / "site"))
    assert json.loads(kit[settings.ENV_OPTIONS])["attention_backend"] == "TRITON_ATTN"
    assert "TRITON_INTERPRET" not in kit
    rehearsal = settings.environment(site=tmp_path / "site", project=tmp_path, rehearsal=True, base=base)
    assert rehearsal[settings.ENV_MODE] == "kit rehearsal" and rehearsal["TRITON_INTERPRET"] == "1"


def test_bad_options(monkeypatch):
    monkeypatch.setenv(settings.ENV_OPTIONS, "attention_backend=X")
    with pytest.raises(ValueError, match=r"YOCO_GPU_LLM_OPTIONS='attention_backend=X': must be a JSON object"):
        settings.llm_options()


def test_every_bridge_has_a_reason(monkeypatch):
    assert all(len(bridge.reason) > 20 for bridge in bridges.BRIDGES)
    monkeypatch.delenv(settings.ENV_MODE, raising=False)
    on_a_gpu = {bridge.name for bridge in bridges.in_force()}
    monkeypatch.setenv(settings.ENV_MODE, "kit rehearsal")
    assert on_a_gpu < {bridge.name for bridge in bridges.in_force()}, "those of the rehearsal stay out of the GPU"


def test_the_plugin_knows_nothing_of_the_kit():
    plugin = [*(driver.PROJECT / "vllm_yoco").rglob("*.py"), *(driver.PROJECT / "patches").rglob("*.py")]
    assert len(plugin) > 50
    assert [path for path in plugin if "gpu_kit" in path.read_text()] == []


def test_full_vllm_is_looked_for(tmp_path):
    """An interpreter without it gets one message before any stage."""
    with pytest.raises(SystemExit, match=r"lacks what the stages need \(ModuleNotFoundError: .*pip install -e"):
        driver.check_full_vllm({"PATH": "/bin", "PYTHONPATH": ""} | {"PYTHONNOUSERSITE": "1"}, broken_vllm(tmp_path))


def broken_vllm(folder: Path) -> Path:
    """A folder in which ``import vllm.version`` fails, as it does where vLLM is not installed."""
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").write_text("")
    return folder

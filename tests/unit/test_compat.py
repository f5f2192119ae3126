"""Version gate, symbol table and import hook, on stand-ins for vLLM."""

from __future__ import annotations

import sys

import pytest

from vllm_yoco import compat
from vllm_yoco.compat import Symbol
from vllm_yoco.post_import import after_import


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.32.7", True),
        ("0.32.0+cpu", True),
        ("0.32.1rc1", True),
        ("0.32", True),
        ("0.3.2", False),
        ("0.320.0", False),
        ("0.33.0", False),
        ("1.32.0", False),
        ("dev", False),
        ("", False),
    ],
)
def test_tested_versions(version: str, tested: bool) -> None:
    assert compat.is_tested(version) is tested


@pytest.mark.parametrize(("value", "accepted"), [("1", True), ("0", False), ("", False), (None, False)])
def test_override(monkeypatch: pytest.MonkeyPatch, value: str | None, accepted: bool) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    if value is None:
        monkeypatch.delenv(compat.OVERRIDE_ENV, raising=False)
    else:
        monkeypatch.setenv(compat.OVERRIDE_ENV, value)
    assert compat.is_accepted() is accepted


@pytest.mark.parametrize(
    ("symbol", "defect"),
    [
        (Symbol("json", "JSONDecoder.raw_decode", "test", ("self", "s")), None),
        (Symbol("json", "JSONDecoder", "test"), None),
        (Symbol("json", "JSONDecoder.cooked_decode", "test"), "json:JSONDecoder.cooked_decode is missing"),
        (Symbol("no_such_module", "x", "test"), "no_such_module:x is missing"),
        (Symbol("json", "JSONDecoder.raw_decode", "test", ("s", "t")), "takes no t; used to test"),
    ],
)
def test_symbols(symbol: Symbol, defect: str | None) -> None:
    found = symbol.defect()
    assert found is None if defect is None else defect in str(found)


def test_symbols_of_modules_that_are_not_imported_cost_nothing() -> None:
    table = [Symbol("wave", "no_such_thing", "test")]
    sys.modules.pop("wave", None)
    assert compat.broken_symbols(table) == []
    assert "wave" not in sys.modules
    assert len(compat.broken_symbols(table, load=True)) == 1


def test_symbol_table_has_no_duplicates() -> None:
    names = [(symbol.module, symbol.name) for symbol in compat.SYMBOLS]
    assert len(names) == len(set(names))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process with a tested vLLM, a registered plugin and nothing broken."""
    monkeypatch.setattr(compat, "vllm_version", lambda: f"{compat.TESTED_SERIES[0]}.0")
    monkeypatch.setattr(compat, "_active", True)
    monkeypatch.setattr(compat, "_defects", [])
    monkeypatch.setattr(compat, "SYMBOLS", ())
    monkeypatch.delenv(compat.OVERRIDE_ENV, raising=False)
    return monkeypatch


def test_require_active(process: pytest.MonkeyPatch) -> None:
    compat.require_active("worker")

    process.setattr(compat, "_active", False)
    with pytest.raises(RuntimeError, match=r"not loaded in the worker.*VLLM_PLUGINS"):
        compat.require_active("worker")

    process.setattr(compat, "_active", True)
    compat.record_defect("patch x failed")
    with pytest.raises(RuntimeError, match=r"patch x failed.*Install vLLM 0\.32\.x"):
        compat.require_active("worker")


def test_require_active_on_an_untested_version(process: pytest.MonkeyPatch) -> None:
    process.setattr(compat, "vllm_version", lambda: "0.99.0")
    with pytest.raises(RuntimeError, match=r"0\.32\.x.*0\.99\.0.*VLLM_YOCO_ALLOW_UNTESTED=1"):
        compat.require_active("worker")


def test_after_import_waits_and_leaves_the_module_as_it_was(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooked_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls: list[int] = []

    def action() -> None:
        import hooked_module  # complete by now, and importable from the action

        calls.append(hooked_module.value)

    after_import("hooked_module", action)
    after_import("hooked_module", action)
    assert calls == []
    import hooked_module

    assert calls == [1, 1]
    assert type(hooked_module.__loader__).__name__ == type(hooked_module.__spec__.loader).__name__
    assert type(hooked_module.__loader__).__name__ == "SourceFileLoader"
    after_import("hooked_module", action)
    assert calls == [1, 1, 1]
    sys.modules.pop("hooked_module")


def test_after_import_of_a_half_imported_module(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_module.py").write_text(
        "from vllm_yoco.post_import import after_import\n"
        "try:\n    after_import(__name__, lambda: None)\nexcept RuntimeError as error:\n    problem = str(error)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import half_module

    assert "half imported" in half_module.problem
    sys.modules.pop("half_module")

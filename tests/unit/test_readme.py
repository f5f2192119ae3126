"""The README and the changelog against the repository: flags, commands, files, messages, the demo's output."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import yaml

from vllm_yoco import __version__, cli
from vllm_yoco.config import Mode, PromptLogprobsPolicy, YocoConfig
from vllm_yoco.tools.cli import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = [path for folder in ("vllm_yoco", "patches") for path in (ROOT / folder).rglob("*.py")]


def section(title: str) -> str:
    """Text under one ``## title``."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table_rows(text: str, number: int = 0) -> list[list[str]]:
    """Cells of the body of one of the tables in a text."""
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    lines = tables[number].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def shell_commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    listed = [row[0].strip("`") for row in table_rows(section("Development"))]
    inline = [span for span in code(README) if span.startswith(("make ", "vllm-yoco "))]
    return [shlex.split(line) for line in [*"".join(blocks).splitlines(), *listed, *inline] if line]


# ---- flags


def test_flag_table_equals_the_flags() -> None:
    rows = table_rows(section("Flags"))
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--yoco")]
    assert [code(row[0])[0] for row in rows] == [*options, "--plugin"]
    assert [code(row[3])[0] for row in rows] == list(YocoConfig.model_fields)
    values = {code(row[3])[0]: code(row[1]) for row in rows}
    assert values["truncation"] == list(get_args(Mode))
    assert values["keep_tokens"] == ["min", "exact"]
    assert values["prompt_logprobs"] == list(get_args(PromptLogprobsPolicy))
    for row in rows[:3]:
        assert code(row[2]) == [YocoConfig.model_fields[code(row[3])[0]].default]


def test_no_other_flag_of_ours_is_mentioned() -> None:
    known = {f"--yoco-{field.replace('_', '-')}" for field in YocoConfig.model_fields}
    assert set(re.findall(r"--yoco-[a-z-]+[a-z]", README + (ROOT / "CHANGELOG.md").read_text())) <= known


@pytest.mark.parametrize("name", ["compact", "exact", "demo"])
def test_serve_files_set_known_flags(name: str) -> None:
    settings = yaml.safe_load((ROOT / "configs" / "serve" / f"{name}.yaml").read_text())
    assert False not in settings.values()  # vLLM reads it as absent
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    ours, others = parser.parse_known_args([flag for flag in flags if flag != "vllm_yoco" and flag != "--plugin"])
    assert name == "demo" or (cli.settings_of(ours)["truncation"] == "compact" and not others)


# ---- commands and files


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = set()
    for command in shell_commands():
        match command:
            case ["make", target, *_]:
                assert target in targets
                seen.add(target)
            case ["vllm-yoco", name, *_]:
                assert name in COMMANDS
                seen.add(name)
            case ["python", "-m", module, *_]:
                assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
            case ["vllm", "serve", *_] | ["pip", "install", "."]:
                pass
            case ["head", "-n", _, file, ">", _]:
                assert (ROOT / file).exists()
            case _:
                pytest.fail(f"unknown command in the README: {command}")
    assert {"demo", "test", "inspect", "cost", "init-model"} <= seen


def test_command_lines_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkout in which the lines before have been typed: files that do not exist are refused at once."""
    for name in ("models", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    parser = build_parser(list(COMMANDS))
    for line in re.findall(r"^vllm-yoco (.+)$", README, re.MULTILINE):
        parser.parse_args(shlex.split(line))
    for options in re.findall(r'ARGS="([^"]+)"', README):
        parser.parse_args(["demo", *shlex.split(options)])


def test_python_block_has_known_settings() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    compile(block, "README.md", "exec")
    (settings,) = re.findall(r"additional_config=(\{.*\})\)", block)
    assert YocoConfig.from_additional_config(eval(settings)).truncation == "compact"


def test_links_lead_to_files() -> None:
    for document in (README, (ROOT / "CHANGELOG.md").read_text()):
        for target in re.findall(r"\]\(([^)]+)\)", document):
            assert target.startswith("https://") or (ROOT / target).exists(), target


# ---- messages


def joined_source() -> str:
    """Sources with adjacent string literals joined, as they are printed."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_quoted_messages_are_ours() -> None:
    source = joined_source()
    of_vllm = {
        "unrecognized arguments: --yoco-truncation",
        "EngineArgs.__init__() got an unexpected keyword argument 'yoco_truncation'",
        "CPU Generator does not use offset",  # of PyTorch
        "false",  # a value in a file, no message
        "vllm serve --config",
        "off",
        "(--yoco-truncation is compact.)",  # checked below: its mode is filled in
    }
    for symptom, *_ in table_rows(section("Troubleshooting")):
        for quoted in set(code(symptom)) - of_vllm:
            assert quoted in source, quoted
    assert "(--yoco-truncation is {config.truncation}.)" in source


def test_what_is_called_refused_is_refused() -> None:
    """Every flag in a row that says *refused* is in a message of the start-up checks."""
    source = (ROOT / "vllm_yoco" / "startup.py").read_text() + (ROOT / "vllm_yoco" / "connectors.py").read_text()
    named = 0
    for feature, status in table_rows(section("Compatibility")):
        if "refused" in status:
            for flag in re.findall(r"--[a-z-]+", feature):
                assert f"{flag}=" in source, flag
                named += 1
    assert named >= 8


# ---- the demo


def test_sample_output_has_the_shape_of_the_summary() -> None:
    from vllm_yoco.config import resolve_truncation
    from vllm_yoco.models.checkpoint import read_model_config
    from vllm_yoco.tools.demo import TRAINED, Answers, summary

    config = read_model_config(TRAINED / "config.json")
    truncation = resolve_truncation(YocoConfig(truncation="compact"), config.topology())
    right = [True] * 20
    compact = Answers(4096, [129] * 4, [2.0], ["token_id:1"], {"token_id:1": -1.0, "token_id:2": -2.0}, True, right)
    off = Answers(4096, [4096] * 4, [4.0], ["token_id:1"], {"token_id:1": -1.5}, True, right)
    ours = summary(compact, off, config, truncation)

    def shape(text: str) -> list[str]:
        for pattern, instead in (
            (r"the first \d+ of \d+", "AGREEMENT"),
            (r"\d+\.\d+ s", "SECONDS"),
            (r"\d\.\d+x; by", "MEASURED by"),
            (r"at most \S+ nat \(\d+ tokens", "DIFFERENCE"),
            (r"\d+ of \d+ answered right, \d+ by off; \d+ alike", "ANSWERS"),
            (r"  +|-{3,}", " "),
        ):
            text = re.sub(pattern, instead, text)
        return [line.strip() for line in text.splitlines() if line.strip()]

    (sample,) = re.findall(r"^```text\n(.*?)^```", section("The demo and its table"), re.MULTILINE | re.DOTALL)
    assert [line for line in shape(ours) if line not in shape(sample)] == []


# ---- versions


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    low, high = (int(part.split(".")[1]) for part in re.findall(r"3\.\d+", project["requires-python"]))
    assert f"Python 3.{low} to 3.{high - 1}" in README

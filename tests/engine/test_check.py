"""``vllm-yoco check`` passes on every model and runner, and fails when a bug is planted in its engines."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import RUNNERS
from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint
from vllm_yoco.presets import find_model_config
from vllm_yoco.tools.check import document, plan_study, text
from vllm_yoco.tools.check_study import Report, Study, run_study
from vllm_yoco.tools.cli import build_parser
from vllm_yoco.tools.engine_generate import generate
from vllm_yoco.tools.engine_process import EngineError, EngineHost, Engines

TEST_MODELS = Path(__file__).parents[1] / "data" / "models"
MODELS = {"ced-tiny": find_model_config("ced-tiny"), **{path.stem: path for path in TEST_MODELS.glob("*.json")}}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
SMALL = ("--quick", "--max-tokens", "3")

KEYS, CELLS, ROWS = "visible window keys", "window cells written", "rows computed"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("check-models")
    for name, path in MODELS.items():
        config = read_model_config(path)
        save_checkpoint(root / name, config, random_state_dict(config, seed=0))
    return root


@pytest.fixture(scope="module", params=RUNNERS)
def host(request: pytest.FixtureRequest) -> Iterator[EngineHost]:
    with EngineHost(request.param, environment=ENVIRONMENT) as host:
        yield host


def check(host: EngineHost, model: Path, *flags: str) -> tuple[Study, Report]:
    """What the command does, on engines that stay alive."""
    args = build_parser(["check"]).parse_args(["check", str(model), *flags])
    study = plan_study(args, str(model), read_model_config(model / "config.json"), host)
    return study, run_study(host, study)


def failed(report: Report) -> set[str]:
    return {name for name, right in report.verdicts() if not right}


@pytest.mark.parametrize("model", sorted(MODELS))
def test_passes(host, models, model):
    study, report = check(host, models / model, *SMALL)
    assert report.ok, text(study, report)
    assert report.engine["runner"] == host.runner
    has_window = bool(study.topology.swa_layers)
    expected = {ROWS, "global KV written", "visible global keys", "visible global keys, mask = compact"}
    if has_window:
        expected |= {KEYS, CELLS, f"{KEYS}, mask = compact", f"{CELLS}, mask = compact"}
    assert set(report.tallies) == expected
    assert all(tally.values > 20 for tally in report.tallies.values())
    assert set(report.differences) == {
        *("mask = compact", "L <= K = off", "K >= exact = off"),
        *(f"{mode}: chunk sizes" for mode in ("off", "mask", "compact")),
        *(f"{mode} = dense reference" for mode in ("off", "mask", "compact")),
    }
    if study.keeps[0] < study.exact:
        assert report.effect > 0.05
    else:
        assert report.effect is None
    json.dumps(document(study, report))


def test_passes_on_given_prompts(host, models, tmp_path):
    """Text and token ids, a forced continuation, odd K, another block size."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a" * 150, "continuation": "bc"}, {"prompt_token_ids": [7, 8, 9], "continuation": "de"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--prompts", str(prompts), "--keep-tokens", "min,37", "--no-reference", "--quick")
    study, report = check(host, models / "ced-tiny", *flags, "--engine-flags", "--block-size 64")
    assert report.ok, text(study, report)
    assert study.keeps == [25, 37]
    assert [len(prompt.tokens) for prompt in study.prompts] == [151, 3]
    assert report.engine["block_size"] == 64
    assert any("exact" in note for note in report.notes)


def test_passes_under_preemption(host, models):
    """A pool too small for the batch: requests are preempted and recompute their rows under the same plan."""
    flags = ("--quick", "--max-tokens", "40", "--no-reference", "--engine-flags", "--num-gpu-blocks-override 24")
    study, report = check(host, models / "ced-tiny", *flags)
    assert report.ok, text(study, report)
    assert report.recomputed_rows > 1000


# --- Planted bugs. They live in the engines' process and are applied to live engines.

_repairs: list[Callable[[], None]] = []


def plant(engines: Engines, fault: str) -> None:
    """Job: break the engines of this process."""
    FAULTS[fault][0](engines)


def repair(engines: Engines) -> None:
    """Job: undo ``plant``."""
    while _repairs:
        _repairs.pop()()


def _patch(owner: Any, name: str, value: Any) -> None:
    original = getattr(owner, name)
    _repairs.append(lambda: setattr(owner, name, original))
    setattr(owner, name, value)


def _clip_one_row_more(engines: Engines) -> None:
    from vllm_yoco.plan import kept_rows
    from vllm_yoco.step import PreparedStep

    def later(start: Any, length: Any, s_keep: Any) -> Any:
        return kept_rows(start, length, s_keep + (s_keep > 0))

    _patch(sys.modules[PreparedStep.__module__], "kept_rows", later)


def _placeholder_writes(engines: Engines) -> None:
    from vllm_yoco.step import PreparedStep

    original = PreparedStep.rewrite_slots

    def rewrite_slots(self: PreparedStep, group_id: int) -> None:
        original(self, group_id)
        if self.plan is None:
            return
        table, size = self.step.block_table(group_id), self._block_size
        for request, last in enumerate(self.plan.cu_seqlens[1:]):
            position = int(self.positions[last - 1])
            if position < self.keep_start[request]:
                slot = table[request, position // size] * size + position % size
                self.kept_slots[group_id][last - 1] = slot

    _patch(PreparedStep, "rewrite_slots", rewrite_slots)


def _window_one_key_short(engines: Engines) -> None:
    for llm in engines.llms.values():
        llm.apply_model(_shrink_windows)


def _shrink_windows(model: Any) -> None:
    for layer in model.model.consumers:
        attention = layer.self_attn
        if attention.has_swa and type(attention.swa_attn).__name__ == "ConsumerSlidingAttention":
            _patch(attention.swa_attn.impl, "sliding_window", attention.swa_attn.impl.sliding_window - 1)


def _keep_from_the_chunk(engines: Engines) -> None:
    from vllm_yoco.batch import SubBatchBuilder

    original = SubBatchBuilder.prepare

    def prepare(self: SubBatchBuilder, step: Any) -> Any:
        end = step.start + np.diff(step.query_start_loc)
        return original(self, dataclasses.replace(step, num_prompt_tokens=np.minimum(step.num_prompt_tokens, end)))

    _patch(SubBatchBuilder, "prepare", prepare)


def _empty_rows_keep_their_output(engines: Engines) -> None:
    from vllm_yoco.batch import SubBatchBuilder

    original = SubBatchBuilder.build

    def build(self: SubBatchBuilder, prepared: Any) -> Any:
        step = original(self, prepared)
        return step if step is None else dataclasses.replace(step, empty=None)

    _patch(SubBatchBuilder, "build", build)


def _view_one_key_late(engines: Engines) -> None:
    from vllm_yoco.attention import WindowView

    def seq_lens(self: WindowView, seq_lens: Any, original: Any = WindowView.seq_lens) -> Any:
        return original(self, seq_lens) - (self.shift[: seq_lens.shape[0]] > 0).int()

    _patch(WindowView, "seq_lens", seq_lens)


def _kernel_reads_stale_keys(engines: Engines) -> None:
    """The metadata is right, what the layer computes from it is not."""
    from vllm_yoco.attention import ConsumerSlidingAttention

    original = ConsumerSlidingAttention.forward

    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any) -> Any:
        return original(self, query, key, value.roll(1, 0), *args)

    _patch(ConsumerSlidingAttention, "forward", forward)


REFERENCE = {"mask = dense reference", "compact = dense reference"}
FAULTS: dict[str, tuple[Callable[[Engines], None], set[str]]] = {
    "clip off by one": (_clip_one_row_more, {ROWS, KEYS, CELLS}),
    "placeholder writes its slot": (_placeholder_writes, {CELLS}),
    "window off by one": (_window_one_key_short, {KEYS, "K >= exact = off", *REFERENCE}),
    "s_keep from the chunk": (_keep_from_the_chunk, {ROWS, KEYS, CELLS, "compact: chunk sizes", *REFERENCE}),
    "empty rows keep their output": (_empty_rows_keep_their_output, {KEYS}),
    "view off by one": (_view_one_key_late, {KEYS, *REFERENCE}),
    "values of another row": (_kernel_reads_stale_keys, {"compact: chunk sizes", *REFERENCE}),
}
"""What is planted, and checks that have to find it (others may find it too)."""


@pytest.mark.parametrize("fault", FAULTS)
def test_fails_with_a_planted_bug(host, models, fault):
    # Engines of these specifications are up already if test_passes ran; a bug in windows needs them to be.
    if fault == "window off by one":
        check(host, models / "ced-tiny", *SMALL)
    host.call(plant, fault)
    try:
        study, report = check(host, models / "ced-tiny", *SMALL)
    finally:
        host.call(repair)
    assert not report.ok
    assert failed(report) >= FAULTS[fault][1], text(study, report)
    printed = text(study, report).splitlines()[-1]
    assert printed.startswith("FAILED: ")
    assert all(name in printed for name in FAULTS[fault][1])
    assert not document(study, report)["ok"]


def test_forced_tokens_leave_the_scores_alone(host, models):
    """Log-probabilities before the forced token are those of free generation; the tokens are the forced ones."""
    args = build_parser(["check"]).parse_args(["check", "x", *SMALL])
    study = plan_study(args, str(models / "ced-tiny"), read_model_config(MODELS["ced-tiny"]), host)
    prompts = [prompt.tokens for prompt in study.prompts]
    free = host.run(study.spec, generate, prompts, 2)
    other = [[(answer.tokens[0] + 1) % 256, 5] for answer in free]
    forced = host.run(study.spec, generate, prompts, 0, other)
    for a, b, tokens in zip(free, forced, other, strict=True):
        assert b.tokens == tokens
        np.testing.assert_array_equal(a.logprobs[0], b.logprobs[0])
        assert np.abs(a.logprobs[1] - b.logprobs[1]).max() > 0.01


# --- The command as a user runs it.


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_yoco.tools.cli", "check", *arguments], capture_output=True, text=True, timeout=500
    )


def break_engines() -> None:
    """Initializer of an engine process."""
    plant(Engines("v1"), "placeholder writes its slot")


def test_command(tmp_path):
    process = command("ced-tiny", "--quick", "--runner", "v1", "--json", str(tmp_path / "report.json"))
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stderr == ""
    last = process.stdout.splitlines()[-1]
    assert last.startswith("ok: ") and last.endswith(" log-probabilities within the limit")
    assert "says nothing" in process.stdout or "does not say" in process.stdout.replace("\n", " ")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and report["command"] == "check" and report["engine"]["runner"] == "v1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-here"], "neither a file nor a preset"),
        (["ced-tiny", "--keep-tokens", "24"], "must be at least W + B"),
        (["ced-tiny", "--max-tokens", "0"], "must be 1 or more"),
        (["ced-tiny", "--prompts", "/no/such/file"], "there is no such file"),
    ],
)
def test_wrong_arguments(arguments, message):
    process = command(*arguments)
    assert process.returncode == 2
    assert message in process.stderr and process.stdout == ""


def test_engine_that_cannot_start(models):
    process = command(str(models / "ced-tiny"), "--quick", "--engine-flags", "--num-gpu-blocks-override 1")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("vllm-yoco check: ")


def test_initializer_and_dead_process(models):
    """An initializer runs before the first engine; a process that dies is an EngineError with its last words."""
    with EngineHost("v1", environment=ENVIRONMENT, initializer=break_engines) as host:
        assert host.call(_count_repairs) == 1
        with pytest.raises(EngineError, match="exit code 3") as caught:
            host.call(_die)
        assert "farewell" in caught.value.details
        assert host.call(_count_repairs) == 1, "the next call starts another process"


def test_interrupted_job(tmp_path):
    """Nobody waits for the job of an engine process that is no longer wanted."""
    begun = tmp_path / "begun"

    def interrupt() -> None:
        while not begun.exists():
            time.sleep(0.05)
        host.interrupt()

    with EngineHost("v1", environment=ENVIRONMENT) as host:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(EngineError, match=f"exit code -{signal.SIGTERM.value}"):
            host.call(_take_long, begun)


def _take_long(engines: Engines, begun: Path) -> None:
    begun.touch()
    time.sleep(300)


def _count_repairs(engines: Engines) -> int:
    return len(_repairs)


def _die(engines: Engines) -> None:
    print("farewell", flush=True)
    import os

    os._exit(3)

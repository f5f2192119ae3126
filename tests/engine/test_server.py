"""``vllm serve`` with the plugin: metrics across processes, and answers to requests for prompt log-probabilities."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import random_prompt
from tests.engine.harness import ENVIRONMENT, UNIPROC
from vllm_yoco.tools.server import Server, running_server

KEEP = 70
CHUNK = 128
ENV = {
    **{name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"},
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOG_STATS_INTERVAL": "1",
}

pytestmark = pytest.mark.slow


def serve_arguments(model: str, *more: str) -> list[str]:
    sizes = ["--max-model-len", "1024", "--max-num-batched-tokens", str(CHUNK), "--block-size", "32"]
    return [
        model,
        *("--plugin", "vllm_yoco", "--yoco-truncation", "compact", "--yoco-keep-tokens", str(KEEP)),
        *("--dtype", "float32", "--enforce-eager", "--num-gpu-blocks-override", "200", *sizes, *more),
    ]


@pytest.fixture(scope="module")
def server(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with running_server(serve_arguments(model_dir("ced-tiny")), log=log, env=ENV) as running:
        yield running


def get(server: Server, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return answer.read().decode()


def metric(server: Server, name: str) -> float:
    """Value of one sample; 0 where it has not been counted yet."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", get(server, "/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def rows(server: Server) -> dict[str, float]:
    kinds = ("scheduled", "consumer_computed", "consumer_dropped", "placeholder")
    return {kind: metric(server, f'vllm_yoco:prefill_rows_total{{kind="{kind}"}}') for kind in kinds}


def complete(server: Server, length: int, seed: int, **options: Any) -> Any:
    body = {"model": _model(server), "prompt": list(random_prompt(length, seed)), "max_tokens": 3, "temperature": 0}
    return server.post("/v1/completions", body | {"ignore_eos": True} | options)


def _model(server: Server) -> str:
    return json.loads(get(server, "/v1/models"))["data"][0]["id"]


def test_row_counters(server):
    before, truncated = rows(server), metric(server, "vllm_yoco:prompts_truncated_total")
    complete(server, 400, seed=1)  # 128 + 128 + 128 + 16, s_keep = 330
    complete(server, 50, seed=2)
    grown = {kind: value - before[kind] for kind, value in rows(server).items()}
    assert grown == {
        "scheduled": 450,
        "consumer_computed": (384 - 330) + 16 + 50,
        "consumer_dropped": 128 + 128 + (330 - 256),
        "placeholder": 0,  # two steps of a placeholder alone
    }
    assert metric(server, "vllm_yoco:prompts_truncated_total") - truncated == 1


def test_hit_counters(server):
    names = ("vllm_yoco:prefix_hits_shortened_total", "vllm_yoco:prefix_hit_rows_lost_total")
    complete(server, 400, seed=3)
    before = [metric(server, name) for name in names]
    answer = complete(server, 400, seed=3)
    # Blocks of 32: 384 tokens are cached, the cap at 400 - 70 = 330 leaves 320.
    assert [metric(server, name) - value for name, value in zip(names, before, strict=True)] == [1, 64]
    assert answer["choices"][0]["text"] is not None


def test_log_line(server):
    complete(server, 300, seed=4)
    deadline = 40
    while deadline and "YOCO: " not in server.log.read_text(errors="replace"):
        complete(server, 300, seed=100 + deadline)
        deadline -= 1
    log = server.log.read_text(errors="replace")
    assert re.search(r"YOCO: \d+ prompts truncated, consumer rows computed: \d+ of \d+ prefill rows", log)
    assert log.count("YOCO truncation compact: K=70") == 1, "the start-up line is logged once per engine"


@pytest.mark.parametrize("length, available", [(300, False), (60, True)])
def test_echo_with_logprobs(server, length, available):
    """One entry per prompt token and one per generated token; the values are there or null, never shifted."""
    before = metric(server, "vllm_yoco:prompt_logprobs_dropped_total")
    plain = complete(server, length, seed=5, logprobs=2)["choices"][0]["logprobs"]
    echoed = complete(server, length, seed=5, logprobs=2, echo=True)["choices"][0]["logprobs"]
    prompt_values = echoed["token_logprobs"][:length]
    assert len(echoed["token_logprobs"]) == length + 3
    assert echoed["token_logprobs"][length:] == pytest.approx(plain["token_logprobs"], abs=1e-4)
    assert prompt_values[0] is None
    assert all((value is not None) == available for value in prompt_values[1:])
    assert metric(server, "vllm_yoco:prompt_logprobs_dropped_total") - before == (0 if available else 1)


def test_streamed_echo_with_logprobs(server):
    body = {
        "model": _model(server),
        "prompt": list(random_prompt(300, 6)),
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "stream": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    values: list[float | None] = []
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    values += choice["logprobs"]["token_logprobs"]
    plain = complete(server, 300, seed=6, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"]
    assert values[:300] == [None] * 300
    assert values[300:] == pytest.approx(plain, abs=1e-4)


def test_prompt_logprobs_are_null(server):
    answer = complete(server, 300, seed=7, prompt_logprobs=1)
    assert answer["choices"][0]["prompt_logprobs"] is None
    assert "--yoco-prompt-logprobs" in server.log.read_text(errors="replace")


def test_reject_is_http_400(model_dir, tmp_path):
    arguments = serve_arguments(model_dir("ced-tiny"), "--yoco-prompt-logprobs", "reject")
    with running_server(arguments, log=Path(tmp_path) / "server.log", env=ENV | UNIPROC) as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(server, 300, seed=8, prompt_logprobs=0)
        assert refused.value.code == 400
        assert "--yoco-prompt-logprobs is reject" in refused.value.read().decode()
        assert complete(server, 300, seed=8)["usage"]["completion_tokens"] == 3

"""Several processes: tensor parallelism, how they are started, and what a dying worker leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.conftest import random_prompt
from tests.engine.harness import ENVIRONMENT, EngineConfig, Engines, Request, generate
from tests.engine.test_equivalence import ODD_KEEP
from tests.engine.test_server import ENV, complete, serve_arguments
from vllm_yoco.tools.server import running_server

pytestmark = pytest.mark.slow
BATCH = [Request(random_prompt(length, seed=length), 4) for length in (1, 70, 97, 300, 500)]


def serve_twice(config: EngineConfig, start_method: str, path: str) -> None:
    """Child of ``test_processes``: serve the batch cold and with hits; pickle what the engine and its processes say."""
    import pickle

    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_choose(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method  # which the platform has just set to spawn

    CpuPlatform.check_and_update_config = classmethod(check_and_choose)
    engines = Engines("v1")
    results = [generate(engines, config, BATCH) for _ in range(2)]
    active = engines.get(config).collective_rpc(_plugin_is_active)
    Path(path).write_bytes(pickle.dumps((results, active)))


def _plugin_is_active(worker: Any) -> tuple[int, str, bool, bool]:
    """(process id, kind of process, plugin loaded, runner patched) in a worker."""
    from vllm_yoco import compat

    build = type(worker.model_runner)._build_attention_metadata
    kind = type(multiprocessing.current_process()).__name__
    return os.getpid(), kind, compat.is_active(), getattr(build, "_yoco", False)


@pytest.mark.parametrize("start_method, tensor_parallel", [("spawn", 2), ("fork", 1)])
def test_processes(reference, model_dir, tmp_path, start_method, tensor_parallel):
    """TP=2 equals the reference (and so TP=1), with prefix hits; the plugin is in every worker process.

    A CPU engine spawns its processes; fork is what a GPU engine does by default.
    """
    config = EngineConfig(
        model_dir("ced-tiny"),
        "compact",
        ODD_KEEP,
        chunk_tokens=77,
        prefix_caching=True,
        options=(("tensor_parallel_size", tensor_parallel),),
    )
    script = tmp_path / "serve.py"
    script.write_text(
        "from tests.engine.harness import EngineConfig\n"
        "from tests.engine.test_parallel import serve_twice\n"
        f"if __name__ == '__main__':\n    serve_twice({config!r}, {start_method!r}, {str(tmp_path / 'out')!r})\n"
    )
    env = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=500)
    assert (tmp_path / "out").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    import pickle

    results, active = pickle.loads((tmp_path / "out").read_bytes())
    for result_set in results:
        for request, result in zip(BATCH, result_set, strict=True):
            reference.check(config.model, request, result, ODD_KEEP)
    assert results[1][-1].num_cached_tokens == (500 - ODD_KEEP) // 32 * 32
    assert len(active) == tensor_parallel
    assert len({pid for pid, *_ in active} | {os.getpid()}) == tensor_parallel + 1
    assert {kind for _, kind, *_ in active} == {f"{start_method.title()}Process"}
    assert all(loaded and patched for *_, loaded, patched in active)


def test_worker_killed_in_prefill(model_dir, tmp_path):
    """The request that was running fails with a clear error and the server ends; the next start serves correctly."""
    arguments = serve_arguments(model_dir("ced-tiny"), "--max-num-batched-tokens", "32")
    with running_server(arguments, log=tmp_path / "first.log", env=ENV) as server:
        expected = complete(server, 900, seed=1)["choices"][0]["text"]
        started = time.monotonic()
        request = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, server.url, str(model_dir("ced-tiny"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        engine_core = _engine_core(server.process.pid)
        _wait_for_running_request(server, started)
        engine_core.send_signal(signal.SIGKILL)
        answer, _ = request.communicate(timeout=120)
        # A request that was cut off is answered, never left hanging: an HTTP error or a closed connection.
        assert "HTTP 500" in answer or "closed" in answer, answer
    with running_server(arguments, log=tmp_path / "second.log", env=ENV) as server:
        assert complete(server, 900, seed=1)["choices"][0]["text"] == expected


_CLIENT = """
import json, sys, urllib.request, urllib.error, http.client
from tests.engine.conftest import random_prompt
body = {"model": sys.argv[2], "prompt": [list(random_prompt(900, s)) for s in range(50, 80)], "max_tokens": 100,
        "temperature": 0, "ignore_eos": True}
request = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
try:
    print("HTTP", urllib.request.urlopen(request, timeout=100).status)
except urllib.error.HTTPError as error:
    print("HTTP", error.code, error.read().decode()[:300])
except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as error:
    print("closed", repr(error))
"""


def _engine_core(server_pid: int) -> psutil.Process:
    """The process that computes: the server's busiest descendant."""
    children = psutil.Process(server_pid).children(recursive=True)
    return max(children, key=lambda process: process.memory_info().rss)


def _wait_for_running_request(server: Any, started: float) -> None:
    from tests.engine.test_server import metric

    while metric(server, f'vllm:num_requests_running{{engine="0",model_name="{_name(server)}"}}') == 0:
        assert time.monotonic() - started < 60, "the request never ran"
        time.sleep(0.05)


def _name(server: Any) -> str:
    from tests.engine.test_server import _model

    return _model(server)

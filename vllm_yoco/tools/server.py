"""A ``vllm serve`` process that lives as long as a ``with`` block, shared by the tools that need a server.

    with running_server(["MODEL", "--yoco-truncation", "compact"], log=Path("server.log")) as server:
        OpenAI(base_url=f"{server.url}/v1", ...)

The server gets a process group of its own. However the block ends (normally, by an error, by SIGINT, SIGTERM or
SIGHUP), the whole group is gone afterwards: ``vllm serve`` is three processes or more, and a signal to the first
alone may leave the others behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

HOST = "127.0.0.1"
GRACE_SECONDS = 15.0
"""Time between SIGTERM and SIGKILL."""

LOG_TAIL_LINES = 40
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A proxy from the environment has no business on loopback.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server ended or was not healthy in time; ``log_tail`` are the last lines it wrote."""

    def __init__(self, message: str, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class Interrupted(BaseException):
    """An ending signal arrived. Not an ``Exception``, so that nothing takes it for a failure."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        command: what to type to start the same one.
        start_seconds: time until it was healthy.
    """

    url: str
    process: subprocess.Popen[bytes]
    command: str
    log: Path
    start_seconds: float

    def post(self, path: str, body: Any) -> Any:
        """Send JSON, return JSON. Raises ``OSError`` for no answer and for an error status."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with _opener.open(request, timeout=60) as answer:
            return json.load(answer)


def openai_client(url: str) -> OpenAI:
    """A client of the server at ``url``, which fails rather than asks again."""
    import openai

    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy to loopback
    )


@contextlib.contextmanager
def running_server(
    arguments: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 600.0,
    progress: Callable[[float, str], None] = lambda seconds, line: None,
) -> Iterator[Server]:
    """Run ``vllm serve ARGUMENTS`` on a free port of the loopback interface.

    Args:
        arguments: what follows ``vllm serve``; host and port are added.
        log: file for everything the server prints.
        env: variables on top of this process's.
        progress: called every ten seconds of the start, thirty if the log is silent: seconds, last line of the log.

    Raises:
        ServerError: it did not become healthy.
        Interrupted: a signal arrived; the server is gone by then.
    """
    port = free_port()
    arguments = [*arguments, "--host", HOST, "--port", str(port)]
    with interruptible(), log.open("wb") as output:
        process = subprocess.Popen(
            # The module of the `vllm` command: whatever PATH says, this environment's.
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=log.parent,  # -m puts the working directory on sys.path, and a checkout has folders like `patches`
            start_new_session=True,
        )
        try:
            url = f"http://{HOST}:{port}"
            seconds = _wait_until_healthy(process, url, log, timeout_seconds, progress)
            yield Server(url, process, shlex.join(["vllm", "serve", *arguments]), log, seconds)
        finally:
            stop_group(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    return "\n".join(log.read_text(errors="replace").rstrip().splitlines()[-lines:])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first ending signal raises ``Interrupted`` inside the block, which has then time to clean up.

    In the main thread only, as always in Python.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in ENDING_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    previous = {number: signal.signal(number, interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_group(process: subprocess.Popen[bytes], grace_seconds: float = GRACE_SECONDS) -> None:
    """End every process of the group, politely first. Further signals wait: half a clean-up leaves orphans."""
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING_SIGNALS}
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + grace_seconds
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            while _group_exists(process) and time.monotonic() < deadline:
                time.sleep(0.1)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _group_exists(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader; a zombie would count as a member
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout: float, progress: Callable[[float, str], None]
) -> float:
    start = shown = time.monotonic()
    last_line = ""
    while True:
        code = process.poll()
        if code is not None:
            raise ServerError(f"the server ended with exit code {code} before it was healthy", log_tail(log))
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            if _opener.open(f"{url}/health", timeout=5).status == 200:
                return time.monotonic() - start
        now, line = time.monotonic(), log_tail(log, 1)
        if now - start > timeout:
            raise ServerError(f"the server was not healthy within {timeout:.0f} s", log_tail(log))
        if now - shown > (30 if line == last_line else 10):
            shown, last_line = now, line
            progress(now - start, line)
        time.sleep(0.5)

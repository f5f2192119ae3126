"""What truncation did, counted where it is decided and read where it is published.

The scheduler lives in the engine core, ``/metrics`` in the front end, and vLLM's statistics message between them
has no room for a plugin. The engine core therefore writes its counters into a small memory-mapped file, and the
front end adds up the files of its engine; both know the engine's instance id. Several front ends (``vllm serve
--api-server-count``) share the work: each publishes what none has published yet, and Prometheus adds them up.
Nothing is written when vLLM's statistics are off.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vllm_yoco.plan import Mode, keep_start

NAMES = (
    "scheduled",
    "consumer_computed",
    "consumer_dropped",
    "placeholder",
    "prompts_truncated",
    "hits_shortened",
    "hit_rows_lost",
    "prompt_logprobs_dropped",
)
"""Order in the file. Row counts are per consumer layer; a placeholder counts as computed too."""


ENV = "YOCO_COUNTERS"
"""Instance id of the engine, for API servers that another process starts. vLLM warns of unknown VLLM_ names."""


def in_api_server() -> bool:
    """Whether this is one of several API servers of an engine that their parent process has started."""
    return multiprocessing.current_process().name.startswith("ApiServer")


def announce(instance_id: str) -> None:
    """Tell API servers that this process may start which engine they belong to: their own id is another one."""
    os.environ[ENV] = instance_id
    atexit.register(remove, instance_id)


def directory(instance_id: str) -> Path:
    """Where the counters of one engine are; private to the user. In an API server, those of its parent's engine."""
    if in_api_server():
        instance_id = os.environ.get(ENV, instance_id)
    return Path(tempfile.gettempdir()) / f"vllm-yoco-{os.getuid()}-{instance_id}"


class CounterFile:
    """One process's counters, mapped into memory. Integers only grow; a reader sees each one whole."""

    def __init__(self, instance_id: str) -> None:
        folder = directory(instance_id)
        try:
            if not folder.exists():
                remove_abandoned()
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to another user")
            # Held until the process ends, however it ends: see remove_abandoned.
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH)
            # "r+" after "w+": the admission and the scheduler of an in-process engine share one file.
            path = folder / f"{os.getpid()}.counters"
            mode = "r+" if path.exists() else "w+"
            self._values: np.ndarray = np.memmap(path, np.int64, mode, shape=(len(NAMES),))
        except OSError:
            # Statistics are no reason not to serve: count where nobody reads.
            self._values = np.zeros(len(NAMES), np.int64)

    def add(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            self._values[NAMES.index(name)] += amount


def read(instance_id: str) -> dict[str, int]:
    """Totals over the processes of one engine; zeros before any has started."""
    total = np.zeros(len(NAMES), np.int64)
    for path in directory(instance_id).glob("*.counters"):
        values = np.fromfile(path, np.int64)
        if len(values) == len(NAMES):
            total += values
    return dict(zip(NAMES, total.tolist(), strict=True))


def take(instance_id: str) -> dict[str, int]:
    """What has been counted since any process last took it: each count is handed out once."""
    total, before = np.zeros(len(NAMES), np.int64), np.zeros(len(NAMES), np.int64)
    try:
        with open(directory(instance_id) / "published", "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            published = np.frombuffer(file.read(), np.int64)
            if len(published) == len(NAMES):
                before = published
            total = np.array(list(read(instance_id).values()), np.int64)
            if (total != before).any():
                file.truncate(0)
                file.write(total.tobytes())
    except OSError:  # nothing is counted yet, or nowhere to count
        total = before
    return dict(zip(NAMES, (total - before).tolist(), strict=True))


def remove(instance_id: str) -> None:
    shutil.rmtree(directory(instance_id), ignore_errors=True)


GRACE_S = 60.0
"""Age from which a folder may be abandoned: one that is just being made is not locked yet."""


def remove_abandoned() -> None:
    """Remove what engines left whose processes were killed: folders of this user that nobody counts in any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"vllm-yoco-{os.getuid()}-*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            status = os.fstat(lock)
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > GRACE_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use
            pass
        finally:
            os.close(lock)


def step_rows(chunks: Sequence[tuple[int, int, int, int]], mode: Mode, *, may_idle: bool) -> Mapping[str, int]:
    """Counts of one step, from (start, length, L, K) of every request in it.

    Args:
        may_idle: in a step of nothing but placeholders no consumer layer runs, see ``vllm_yoco.batch``.
    """
    counts = [prefill_rows(*chunk, mode) for chunk in chunks]
    total = {name: sum(of_chunk.get(name, 0) for of_chunk in counts) for name in NAMES}
    if may_idle and all(of_chunk.get("placeholder") for of_chunk in counts):
        total["consumer_dropped"] += total["placeholder"]
        total["consumer_computed"] = total["placeholder"] = 0
    return total


def prefill_rows(start: int, length: int, num_prompt_tokens: int, keep_tokens: int, mode: Mode) -> Mapping[str, int]:
    """Counts of one scheduled chunk ``[start, start + length)``; empty for decode rows.

    The rule is the plan's (``vllm_yoco.plan``): compact removes the rows below ``s_keep`` but one.
    """
    if start >= num_prompt_tokens:
        return {}
    s_keep = keep_start(num_prompt_tokens, keep_tokens)
    dropped = min(max(s_keep - start, 0), length - 1) if mode == "compact" else 0
    end = start + length
    return {
        "scheduled": length,
        "consumer_computed": length - dropped,
        "consumer_dropped": dropped,
        "placeholder": int(mode == "compact" and end <= s_keep),
        "prompts_truncated": int(s_keep > 0 and end >= num_prompt_tokens),
    }

"""KV connectors with truncation on: external hits end at or below L - K, and consumer SWA never leaves the engine.

vLLM's connectors copy blocks with CUDA. Here their schedulers, their workers and the engine around them are vLLM's own,
and only the copy of a block is done by PyTorch: ``CpuTieringSpec`` of ``examples/prefill_decode.py`` for the
OffloadingConnector, ``copy_on_the_host`` for the SimpleCPUOffloadConnector. ``BlockFiles`` stands for a connector that
is not vLLM's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from examples import prefill_decode
from tests.engine.conftest import MAX_LOGPROB_DIFFERENCE, Reference, random_prompt
from tests.engine.harness import (
    EngineConfig,
    Engines,
    Request,
    Result,
    RunnerProcess,
    consumer_swa_groups,
    generate,
    scheduler_of,
)
from tests.engine.test_equivalence import MODES, requests
from tests.engine.test_prefix_cache import BLOCK, KEEP, cached, longest_hit
from vllm_yoco import connectors
from vllm_yoco.models.checkpoint import random_state_dict, read_model_config, save_checkpoint

ROOT = Path(__file__).parents[2]
WINDOW = 24


class Transfer(dict):
    """A ``kv_transfer_config`` that can be part of an ``EngineConfig``."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def offloading(directory: Path) -> dict[str, Any]:
    return prefill_decode.kv_transfer_config(directory, on_cpu=True, memory=2**25)


# --- In the child -----------------------------------------------------------------------------------------------------

_AGENTS: dict[EngineConfig, Any] = {}


def connected(engines: Engines, config: EngineConfig, job: Callable[..., Any], *args: Any) -> Any:
    """Run a job with this engine's connector in place: vLLM keeps one a process, and the child has many engines."""
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    state._KV_CONNECTOR_AGENT = _AGENTS.get(config)
    try:
        engines.get(config)
        _AGENTS[config] = state._KV_CONNECTOR_AGENT
        return job(engines, config, *args)
    finally:
        state._KV_CONNECTOR_AGENT = None


def retire(engines: Engines, config: EngineConfig) -> None:
    """Give back what the connector holds: its shared memory has a name that outlives the process."""
    if config in _AGENTS:
        _AGENTS.pop(config).shutdown()
        scheduler_of(engines, config).connector.shutdown()
        del engines.llms[config]


def generate_and_store(engines: Engines, config: EngineConfig, batch: list[Request]) -> list[Result]:
    """Serve the batch; stores go on after the last answer, so step until none is left."""
    results = generate(engines, config, batch)
    core, deadline = engines.get(config).llm_engine.engine_core.engine_core, time.monotonic() + 60
    while core.scheduler.has_requests():
        assert time.monotonic() < deadline, "stores do not end"
        core.step()
        time.sleep(0.002)
    return results


def forget(engines: Engines, config: EngineConfig, connector: bool = False) -> None:
    """Empty the engine's own prefix cache, and what its connector holds in memory (not its files)."""
    assert scheduler_of(engines, config).reset_prefix_cache(reset_connector=connector)


def store_groups(engines: Engines, config: EngineConfig) -> tuple[set[int], set[int]]:
    """KV cache groups outside consumer SWA, and those of consumer SWA."""
    scheduler = scheduler_of(engines, config)
    swa = set(consumer_swa_groups(scheduler))
    return set(range(len(scheduler.kv_cache_config.kv_cache_groups))) - swa, swa


def remove_external_cap(engines: Engines, config: EngineConfig) -> None:
    """Back to what the connector itself reports."""
    connector = scheduler_of(engines, config).connector
    del connector.get_num_new_matched_tokens
    connector.__dict__.pop("_max_loadable_tokens", None)


def copy_on_the_host(engines: Engines) -> None:
    """SimpleCPUOffloadConnector in this process: PyTorch copies instead of CUDA streams and DMA."""
    from vllm.v1.simple_kv_offload import worker

    class Done:
        def record(self, *args: Any) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

    class Stream:
        def __init__(self, priority: int) -> None: ...
        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, 0

    class HostCopy:
        def init(self, caches: dict[str, Any], offloaded: dict[str, Any], *streams: Any) -> None:
            self._pairs = [(caches[name], offloaded[name]) for name in caches]

        def launch_copy(
            self, source: list[int], target: list[int], is_store: bool, event_idx: int, events_list: list, **_: Any
        ) -> None:
            for cache, offloaded in self._pairs:
                if is_store:
                    offloaded[target] = cache[source]
                else:
                    cache[target] = offloaded[source]
            events_list.append((event_idx, Done()))

    class HostTorch:
        Event = Done
        cuda = SimpleNamespace(Stream=Stream, current_stream=lambda: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    worker.torch, worker.DmaCopyBackend = HostTorch(), HostCopy


def look_up_without_bound(engines: Engines, config: EngineConfig) -> None:
    """Only the connector's answer is cut, not its look-up."""
    del scheduler_of(engines, config).connector.scheduler_manager.cpu_coordinator.find_longest_cache_hit


def lost_rows(engines: Engines, config: EngineConfig) -> dict[str, int]:
    from vllm_yoco import counters

    return counters.read(engines.get(config).llm_engine.vllm_config.instance_id)


def num_failed_loads(engines: Engines, config: EngineConfig) -> int:
    return len(scheduler_of(engines, config).connector.failed)


@dataclass
class BlockFilesMetadata(KVConnectorMetadata):
    """Per job: file name of a block and the block of each KV cache group."""

    stores: list[tuple[str, list[int]]] = field(default_factory=list)
    loads: list[tuple[str, list[tuple[str, list[int]]]]] = field(default_factory=list)


class BlockFiles(KVConnectorBase_V1, SupportsHMA):
    """Blocks in files named by their hash. Loads run between steps, and a request whose load fails is reported."""

    accepts_shorter_hits = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._directory = Path(self._kv_transfer_config.kv_connector_extra_config["directory"])
        self._groups = self._kv_cache_config.prefix_cacheable_group_ids
        self._requests: dict[str, Any] = {}
        self._local: dict[str, int] = {}
        self.failed: set[str] = set()
        self._pending = BlockFilesMetadata()
        self._results = KVConnectorTransferResults()

    def _path(self, block_hash: bytes) -> str:
        return str(self._directory / f"{block_hash.hex()}.safetensors")

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._local[request.request_id] = num_computed_tokens
        if request.request_id in self.failed:
            return 0, False
        end = num_computed_tokens
        for block_hash in request.block_hashes[end // BLOCK : (request.num_tokens - 1) // BLOCK]:
            if not os.path.exists(self._path(block_hash)):
                break
            end += BLOCK
        return end - num_computed_tokens, end > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._local[request.request_id] // BLOCK
            indices = range(first, first + num_external_tokens // BLOCK)
            self._pending.loads.append((request.request_id, self._named(request, blocks.get_block_ids(), indices)))

    def _named(self, request: Any, block_ids: Any, indices: Iterable[int]) -> list[tuple[str, list[int]]]:
        return [(self._path(request.block_hashes[i]), [block_ids[g][i] for g in self._groups]) for i in indices]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._pending = self._pending, BlockFilesMetadata()
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            start = request.num_computed_tokens
            full = range(start // BLOCK, min((start + count) // BLOCK, len(request.block_hashes)))
            metadata.stores += self._named(request, self._kv_cache_manager.get_block_ids(request_id), full)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        self.failed |= connector_output.failed_recving

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        del self._requests[request.request_id]
        return False, None

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        groups = self._kv_cache_config.kv_cache_groups
        self._caches = [{name: kv_caches[name] for name in groups[g].layer_names} for g in self._groups]

    def _cells(self, block_ids: list[int]) -> dict[str, torch.Tensor]:
        pairs = zip(self._caches, block_ids, strict=True)
        return {name: cache[block] for caches, block in pairs for name, cache in caches.items()}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, blocks in self._get_connector_metadata().loads:
            self._results.finished_recving.add(request_id)
            try:
                for path, block_ids in blocks:
                    stored = load_file(path)
                    for name, cells in self._cells(block_ids).items():
                        cells.copy_(stored[name])
            except Exception:
                self._results.failed_recving.add(request_id)

    def wait_for_save(self) -> None:
        for path, block_ids in self._get_connector_metadata().stores:
            save_file({name: cells.contiguous() for name, cells in self._cells(block_ids).items()}, f"{path}.new")
            os.replace(f"{path}.new", path)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...


class Undeclared(BlockFiles):
    accepts_shorter_hits = False


class WithoutHybridManager(KVConnectorBase_V1):
    accepts_shorter_hits = True


# --- In the test ------------------------------------------------------------------------------------------------------


@dataclass
class Connected:
    """One engine with a connector."""

    process: RunnerProcess
    config: EngineConfig

    def call(self, job: Callable[..., Any], *args: Any) -> Any:
        return self.process.call(connected, self.config, job, *args)

    def generate(self, batch: list[Request]) -> list[Result]:
        return self.call(generate_and_store, batch)

    def serve(self, reference: Reference, batch: list[Request], keep: int | None = KEEP) -> list[int]:
        """Serve and compare with the dense reference; returns the hits."""
        results = self.generate(batch)
        for request, result in zip(batch, results, strict=True):
            reference.check(self.config.model, request, result, keep)
        return cached(results)


@pytest.fixture
def start() -> Iterator[Callable[..., Connected]]:
    """Engines that are gone after the test."""
    started: list[Connected] = []

    def make(
        process: RunnerProcess,
        model: str,
        truncation: str,
        transfer: dict[str, Any],
        keep: int | str = KEEP,
        options: tuple[tuple[str, Any], ...] = (),
        **more: Any,
    ) -> Connected:
        options += (("kv_transfer_config", Transfer(transfer)),)
        config = EngineConfig(model, truncation, keep, prefix_caching=True, options=options, **more)
        started.append(Connected(process, config))
        return started[-1]

    yield make
    for engine in started:
        engine.call(retire)


def hits_of(batch: list[Request]) -> list[int]:
    return [longest_hit(len(request.prompt)) for request in batch]


@pytest.fixture(scope="module")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two of three producers have a window."""
    path = tmp_path_factory.mktemp("sliding")
    config = read_model_config(ROOT / "tests/data/models/sliding-producers.json")
    save_checkpoint(path, config, random_state_dict(config, seed=0))
    return str(path)


LENGTHS = (KEEP + 1, 101, 102, 103, 165, 166, 167, 300, 400, 411, 417)


@pytest.mark.parametrize("truncation", MODES)
def test_offloaded_hits(start, engine, reference, model_dir, tmp_path, truncation):
    """Cold; from host memory; from files; and with part of the prompt in the engine's own cache."""
    store = start(engine, model_dir("ced-tiny"), truncation, offloading(tmp_path))
    batch = requests(LENGTHS)
    assert store.serve(reference, batch) == [0] * len(batch)
    for in_memory_too in (False, True):
        store.call(forget, in_memory_too)
        assert store.serve(reference, batch) == hits_of(batch)
    store.call(forget)
    stem = [Request(batch[9].prompt[:200])]
    assert store.serve(reference, stem) == hits_of(stem)
    assert store.serve(reference, [batch[9]]) == [longest_hit(411)]
    # K rows of a prompt that short drop nothing and are all computed.
    short = requests((33, 64, KEEP))
    for _ in range(2):
        store.call(forget)
        assert store.serve(reference, short, keep=None) == [0, 0, 0]


def test_consumer_swa_is_not_stored(start, engine, model_dir, tmp_path):
    """By the group in the names of the files, and by their number: one file a block of prompt."""
    model = model_dir("ced-tiny")
    batch = requests((300, 411))
    for truncation in ("compact", "off"):
        store = start(engine, model, truncation, offloading(tmp_path / truncation))
        store.generate(batch)
        stored = [int(path.parent.name.split("_g")[1]) for path in (tmp_path / truncation).rglob("*.bin")]
        others, swa = store.call(store_groups)
        assert swa and set(stored) == (others if truncation == "compact" else others | swa)
        assert sum(group in others for group in stored) == 300 // BLOCK + 411 // BLOCK


def test_off_is_stock(start, engine, reference, model_dir, tmp_path):
    """Hits up to L - 1, consumer SWA from the store."""
    store = start(engine, model_dir("ced-tiny"), "off", offloading(tmp_path))
    batch = requests((400, 300))
    store.serve(reference, batch, keep=None)
    store.call(forget)
    assert store.serve(reference, batch, keep=None) == [384, 288]


def test_crowd_in_a_small_pool(start, engine, reference, model_dir, tmp_path):
    """Twins, evictions and preemptions: 46 blocks hold the longest request and little more."""
    store = start(engine, model_dir("ced-tiny"), "compact", offloading(tmp_path), num_blocks=46)
    lengths = (411, 300, 500, 411, 97, 300, 193, 500, KEEP, 411)
    batch = [Request(random_prompt(length, seed=length), 40) for length in lengths]
    for _ in range(3):
        results = store.generate(batch)
        for request, result in zip(batch, results, strict=True):
            reference.check(store.config.model, request, result, KEEP)
    assert max(cached(results)) == longest_hit(500)


def test_without_the_cap_offloaded_hits_are_wrong(start, engine, reference, model_dir, tmp_path):
    """Negative control."""
    store = start(engine, model_dir("ced-tiny"), "compact", offloading(tmp_path))
    batch = requests((400, 300))
    store.serve(reference, batch)
    store.call(remove_external_cap)
    store.call(forget)
    results = store.generate(batch)
    assert cached(results) == [384, 288]
    for request, result in zip(batch, results, strict=True):
        assert reference.difference(store.config.model, request, result, KEEP) > 100 * MAX_LOGPROB_DIFFERENCE


def test_unreadable_file_is_computed_again(start, engine, reference, model_dir, tmp_path):
    """The look-up finds the file, reading it fails: the hit ends in front of it."""
    store = start(engine, model_dir("ced-tiny"), "compact", offloading(tmp_path))
    [request] = batch = requests((411,))
    before: set[Path] = set()
    paths = []
    for length in (200, 411):  # the files of blocks 0 to 5, then those of the others
        store.serve(reference, [Request(request.prompt[:length])])
        paths.append(set(tmp_path.rglob("*.bin")) - before)
        before |= paths[-1]
    for path in paths[1]:
        path.write_bytes(b"short")
    store.call(forget, True)
    assert store.serve(reference, batch) == [200 // BLOCK * BLOCK]


DENSE = (("prefix_cache_retention_interval", BLOCK),)
"""Without it vLLM keeps a sliding producer's KV in front of the end of a prompt only, where no hit may end."""


@pytest.mark.parametrize("keep", [KEEP, 131])
def test_sliding_producers(start, engine, reference, sliding_model, tmp_path, keep):
    """A connector loads such a producer's KV only in front of the end of a hit, so it has to look up to the limit."""
    store = start(engine, sliding_model, "compact", offloading(tmp_path), keep, options=DENSE)
    batch = requests((300, 400, 411, 417))
    assert store.serve(reference, batch, keep) == [0] * 4
    for in_memory_too in (False, True):
        store.call(forget, in_memory_too)
        hits = store.serve(reference, batch, keep)
        assert hits == [longest_hit(len(request.prompt), keep) for request in batch]


SIMPLE = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**25},
}


def test_simple_offloading(start, engine, reference, model_dir):
    engine.call(copy_on_the_host)
    store = start(engine, model_dir("ced-tiny"), "compact", SIMPLE)
    batch = requests(LENGTHS)
    assert store.serve(reference, batch) == [0] * len(batch)
    store.call(forget)
    assert store.serve(reference, batch) == hits_of(batch)


def test_simple_offloading_sliding_producers(start, engine, reference, sliding_model):
    """And, as a negative control, with the limit applied to the answer only: blocks of the window are then missing."""
    engine.call(copy_on_the_host)
    store = start(engine, sliding_model, "compact", SIMPLE, keep=131, options=DENSE)
    batch = requests((300, 400, 411, 417))
    assert store.serve(reference, batch, 131) == [0] * 4
    store.call(forget)
    hits = store.serve(reference, batch, 131)
    assert hits == [longest_hit(len(request.prompt), 131) for request in batch]
    store.call(look_up_without_bound)
    store.call(forget)
    results = store.generate(batch)
    assert cached(results) == hits
    pairs = zip(batch, results, strict=True)
    differences = [reference.difference(sliding_model, request, result, 131) for request, result in pairs]
    assert max(differences) > 100 * MAX_LOGPROB_DIFFERENCE


def block_files(directory: Path) -> dict[str, Any]:
    return {
        "kv_connector": "BlockFiles",
        "kv_connector_module_path": "tests.engine.test_transfer",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"directory": str(directory)},
    }


def test_declared_connector_and_failed_loads(start, engine, reference, model_dir, tmp_path):
    """A connector from elsewhere: its answers are cut, the cut is counted, and a failed load is computed again."""
    options = (("disable_log_stats", False),)
    store = start(engine, model_dir("ced-tiny"), "compact", block_files(tmp_path), options=options)
    batch = requests((300, 400, 411, 97))
    assert store.serve(reference, batch) == [0] * 4
    store.call(forget)
    before = store.call(lost_rows)
    assert store.serve(reference, batch) == hits_of(batch)
    after = store.call(lost_rows)
    found = [(len(request.prompt) - 1) // BLOCK * BLOCK for request in batch]
    lost = [reported - used for reported, used in zip(found, hits_of(batch), strict=True)]
    assert after["hits_shortened"] - before["hits_shortened"] == sum(rows > 0 for rows in lost)
    assert after["hit_rows_lost"] - before["hit_rows_lost"] == sum(lost)

    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"not a tensor")
    store.call(forget)
    store.serve(reference, batch)
    assert store.call(num_failed_loads) == sum(hit > 0 for hit in hits_of(batch))


@pytest.mark.parametrize("truncation", MODES)
def test_prefill_here_and_decode_there(start, runner_processes, reference, model_dir, tmp_path, truncation):
    """Two processes, one with each model runner, and two K: the decode engine's outputs are those of its own K."""
    model, keep = model_dir("ced-tiny"), WINDOW + 1
    prefill = start(runner_processes("v1"), model, "compact", offloading(tmp_path), 131)
    decode = start(runner_processes("v2"), model, truncation, offloading(tmp_path), "min")
    batch = requests((300, 400, 411, 97, 20), max_tokens=12)
    prefill.serve(reference, [Request(request.prompt, 1) for request in batch], 131)
    hits = [hit for request in batch for hit in decode.serve(reference, [request], keep)]
    assert hits == [longest_hit(len(request.prompt), keep) for request in batch]


@pytest.mark.slow
def test_example(tmp_path):
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = os.environ | threads | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(ROOT / "examples" / "prefill_decode.py")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +(\d+) +(\d+) +equal ", done.stdout, re.MULTILINE)
    assert [length for length, _ in rows] == ["901", "701", "21"]
    assert int(rows[0][1]) > 700 and rows[2][1] == "0"


# --- Start-up ---------------------------------------------------------------------------------------------------------


def refusal(kv_connector: str, module: str | None = None, offloading_size: float | None = None) -> str | None:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector=kv_connector, kv_role="kv_both", kv_connector_module_path=module)
    cache = SimpleNamespace(kv_offloading_size=offloading_size)
    config: Any = SimpleNamespace(kv_transfer_config=transfer, cache_config=cache)
    return connectors.refusal(config)


def vllm_connectors() -> set[str]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return set(KVConnectorFactory._registry)


def test_every_connector_of_vllm_has_a_verdict():
    assert vllm_connectors() == {*connectors.TESTED, *connectors.REFUSED}
    for name in connectors.TESTED:
        assert refusal(name) is None
    for name, reason in connectors.REFUSED.items():
        message = refusal(name)
        assert message is not None and message.startswith(f"--kv-transfer-config (connector {name}): {reason}. Use ")
        assert "OffloadingConnector or SimpleCPUOffloadConnector" in message


def test_other_connectors():
    module = "tests.engine.test_transfer"
    assert refusal("BlockFiles", module) is None
    assert "does not declare accepts_shorter_hits = True" in (refusal("Undeclared", module) or "")
    assert "hybrid KV cache manager" in (refusal("WithoutHybridManager", module) or "")
    assert "it is not tested" in (refusal("Nobody") or "")
    # What --kv-offloading-size chooses, by its backend.
    assert refusal("OffloadingConnector", offloading_size=1.0) is None
    lmcache = refusal("LMCacheMPConnector", offloading_size=1.0)
    assert lmcache is not None and lmcache.startswith("--kv-offloading-size (connector LMCacheMPConnector): it is not")


def test_reasons_hold_in_this_vllm():
    """Where a reason is a fact about the class, it is looked up and not remembered."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

    for name, reason in connectors.REFUSED.items():
        if reason == connectors._NO_HYBRID:
            assert not supports_hma(KVConnectorFactory.get_connector_class_by_name(name))
    for name in connectors.TESTED:
        assert supports_hma(KVConnectorFactory.get_connector_class_by_name(name))


def test_the_documented_table_is_the_rule():
    table = (ROOT / "docs" / "transfer.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (tested|refused) \|", table, re.MULTILINE))
    assert rows == {name: "tested" for name in connectors.TESTED} | {name: "refused" for name in connectors.REFUSED}

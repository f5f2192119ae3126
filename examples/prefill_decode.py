#!/usr/bin/env python3
"""Prefill in one engine, decode in another: two processes on one machine that share a directory.

    python examples/prefill_decode.py [MODEL]

MODEL is a checkpoint directory of the ``yoco`` family (default: random weights in the shape of ``ced-tiny``). vLLM's
OffloadingConnector writes full blocks of KV to files named by the hash of the prompt up to there, and every engine
that is given the same directory finds them:

    prefill engine    computes the prompts, writes the KV of producers and the global KV, returns one token
    shared directory  no consumer SWA: it depends on where a prompt ends, and is never stored
    decode engine     loads the longest prefix of whole blocks that ends at or below L - K, computes the rest

The decode engine therefore rebuilds consumer SWA itself and needs to know nothing about the other engine, not even
its K. Its completions are compared with those of one engine that did everything.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

MODULE = Path(__file__).stem if __name__ == "__main__" else __name__
"""Where vLLM finds ``CpuTieringSpec``."""

PROMPTS = [topics[name][:length] for name, length in (("strings", 900), ("import", 700), ("execmodel", 20))]
MAX_TOKENS = 16


class TorchCopyWorker(OffloadingWorker):
    """Copies blocks between a KV cache in host memory and the offload region, at once."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._caches = kv_caches
        self._region = region
        self._pages = [region.create_next_worker_view(tensor.page_size_bytes) for tensor in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, cache: GPULoadStoreSpec, offloaded: LoadStoreSpec, *, store: bool) -> bool:
        assert isinstance(offloaded, CPULoadStoreSpec)
        cache_ids, page_ids = torch.from_numpy(cache.block_ids), torch.from_numpy(offloaded.block_ids)
        sizes = list(cache.group_sizes)
        groups = zip(self._caches.group_data_refs, cache_ids.split(sizes), page_ids.split(sizes), strict=True)
        for layers, blocks, pages in groups:
            for layer in layers:
                blocks_of = self._caches.tensors[layer.tensor_idx].tensor[:, : layer.page_size_bytes]
                pages_of = self._pages[layer.tensor_idx][:, : layer.page_size_bytes]
                if store:
                    pages_of[pages] = blocks_of[blocks]
                else:
                    blocks_of[blocks] = pages_of[pages]
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every job is done when it has been submitted."""

    def shutdown(self) -> None:
        self._pages.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiered offloading for a model that runs on the CPU; in 0.32 its copies need a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1, "TorchCopyWorker copies single blocks"
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = TorchCopyWorker(kv_caches, region)
        return self._worker


def kv_transfer_config(directory: str | Path, *, on_cpu: bool, memory: int = 2**26) -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config``: ``memory`` bytes of host memory in front of ``directory``."""
    own_spec = {"spec_name": "CpuTieringSpec", "spec_module_path": MODULE}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **(own_spec if on_cpu else {"spec_name": "TieringOffloadingSpec"}),
            "cpu_bytes_to_use": memory,
            "secondary_tiers": [{"type": "fs", "root_dir": str(directory), "n_read_threads": 1, "n_write_threads": 1}],
        },
    }


def random_model(directory: Path) -> str:
    from vllm_yoco.models import checkpoint
    from vllm_yoco.presets import find_model_config

    config = checkpoint.read_model_config(find_model_config("ced-tiny"))
    checkpoint.save_checkpoint(directory, config, checkpoint.random_state_dict(config, seed=0))
    return str(directory)


def start_engine(model: str, keep_tokens: int | str, directory: Path | None = None) -> Any:
    """An engine in a process of its own; with ``directory`` it stores KV there and loads it from there."""
    from vllm import LLM
    from vllm.platforms import current_platform

    transfer = {}
    if directory is not None:
        transfer["kv_transfer_config"] = kv_transfer_config(directory, on_cpu=current_platform.is_cpu())
    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=2**28,
        max_logprobs=-1,
        additional_config={"yoco": {"truncation": "compact", "keep_tokens": keep_tokens}},
        **transfer,
    )


def generate(llm: Any, max_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=-1, ignore_eos=True)
    return llm.generate(PROMPTS, sampling, use_tqdm=False)


def wait_for_files(directory: Path, count: int, seconds: float = 60) -> None:
    """Stores go on after the answer: wait until the prefill engine has written ``count`` blocks."""
    deadline = time.monotonic() + seconds
    while sum(1 for _ in directory.rglob("*.bin")) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"fewer than {count} blocks in {directory} after {seconds:.0f} s")
        time.sleep(0.1)


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference of the log-probabilities of all generated tokens, in nats."""
    pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
    return max(abs(a[token].logprob - b[token].logprob) for a, b in pairs for token in a)


def main() -> int:
    lines = [f"{'prompt tokens':>13}{'loaded':>9}{'completion':>13}{'max |delta logprob|':>22}"]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "kv"
        model = sys.argv[1] if len(sys.argv) > 1 else random_model(Path(folder) / "ced-tiny")

        print("starting the prefill and the decode engine (each takes half a minute or more)", flush=True)
        prefill, decode = start_engine(model, "exact", shared), start_engine(model, "min", shared)
        prefilled = generate(prefill, max_tokens=1)
        block_size = prefill.llm_engine.vllm_config.cache_config.block_size
        wait_for_files(shared, sum(len(output.prompt_token_ids) // block_size for output in prefilled))
        decoded = generate(decode, MAX_TOKENS)
        del prefill, decode

        print("starting the engine that does everything, to compare with", flush=True)
        expected = generate(start_engine(model, "min"), MAX_TOKENS)
        for ours, theirs in zip(decoded, expected, strict=True):
            equal = ours.outputs[0].token_ids == theirs.outputs[0].token_ids
            delta = difference(ours.outputs[0], theirs.outputs[0])
            failed |= not equal or delta > 1e-3
            length, loaded = len(ours.prompt_token_ids), ours.num_cached_tokens
            lines.append(f"{length:>13}{loaded:>9}{'equal' if equal else 'different':>13}{delta:>22.1e}")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

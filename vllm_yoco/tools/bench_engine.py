"""Jobs for ``EngineHost`` that serve a workload and measure it; see ``vllm_yoco.tools.bench``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_yoco.tools.bench_serve import CLOCKS, Serving, Workload
from vllm_yoco.tools.engine_process import Engines, llm_options

STATUS = Path("/proc/self/status")
CLEAR_PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class BenchEngine:
    """One engine to measure.

    Attributes:
        name: as the tables call it.
        truncation: off, mask or compact; None gives vLLM no setting of the plugin at all.
        keep_tokens: K in rows.
        kv_cache_bytes: on a CPU; a GPU gives the engine a share of what it has, see ``gpu_share``.
        options: further ``LLM`` arguments, which win over what is chosen here.
    """

    name: str
    model: str
    truncation: str | None
    keep_tokens: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    gpu_share: float = 0.9
    block_size: int = 32
    prefix_caching: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def get(engines: Engines, spec: BenchEngine) -> Any:
    """The child's engine for ``spec``, made on first use."""
    if spec not in engines.llms:
        from vllm import LLM

        options = llm_options(spec) | {
            "max_num_batched_tokens": spec.max_model_len,
            "block_size": spec.block_size,
            "enable_prefix_caching": spec.prefix_caching,
        }
        if "kv_cache_memory_bytes" not in options:
            options["gpu_memory_utilization"] = spec.gpu_share
        engines.llms[spec] = LLM(**options | dict(spec.options))
        if dict(spec.options).get("load_format") == "dummy":
            engines.llms[spec].apply_model(_randomise)
    return engines.llms[spec]


def _randomise(model: Any) -> None:
    """Dummy weights are so small that activations become denormal numbers, which a CPU computes slowly."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
            else:
                parameter.fill_(1)


def serve(engines: Engines, spec: BenchEngine, workload: Workload) -> dict[str, Any]:
    """Serve the requests once, without a pause; the outcome is that of ``Serving.metrics``."""
    return _serving(engines, spec, workload).run()


def begin(engines: Engines, spec: BenchEngine, workload: Workload) -> None:
    """Make ready to serve the requests by ``step``."""
    engines.serving[spec] = _serving(engines, spec, workload)


def step(engines: Engines, spec: BenchEngine) -> dict[str, Any] | None:
    """One step of what ``begin`` began; after the last one its outcome, as ``Serving.metrics`` has it."""
    serving = engines.serving[spec]
    return None if serving.step() else serving.metrics()


def _serving(engines: Engines, spec: BenchEngine, workload: Workload) -> Serving:
    llm = get(engines, spec)
    engine = llm.llm_engine
    engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = workload.step_tokens()
    prompts = workload.prompts(llm.model_config.get_vocab_size())
    if workload.hit_tokens:
        prefix = replace(workload, prompt_tokens=(workload.hit_tokens,), output_tokens=1, concurrency=1)
        Serving(engine, [prompts[0][: workload.hit_tokens]], prefix).run()
    gc.collect()
    return Serving(engine, prompts, workload)


# -- parts ---------------------------------------------------------------------------------------------------------

PARTS = ("producers", "global_kv", "consumers", "logits", "sampling")


class PartTimer:
    """Seconds spent in parts of a step, by wrapping methods on instances while a ``with`` block runs."""

    def __init__(self, synchronize: Callable[[], None], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self._synchronize = synchronize
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, method: str, part: str) -> None:
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._synchronize()
            start = self._clock()
            try:
                return original(*args, **kwargs)
            finally:
                self._synchronize()
                self.seconds[part] = self.seconds.get(part, 0.0) + self._clock() - start

        setattr(owner, method, timed)
        self._undo.append(partial(delattr, owner, method))

    def __enter__(self) -> PartTimer:
        return self

    def __exit__(self, *exception: object) -> None:
        for undo in self._undo:
            undo()


def parts(engines: Engines, spec: BenchEngine, workload: Workload) -> dict[str, float]:
    """Serve the requests once with timers on: seconds by part.

    ``producers`` holds layers below the boundary; ``global_kv`` the boundary norm, the projection and its writes;
    ``consumers`` layers P and above with the final norm; ``logits``, ``sampling``. ``runner`` is the rest of the
    model runner (embedding, batch preparation, selecting and scattering rows), ``engine`` the rest of the step
    (scheduler, output processing), ``total`` all of it.
    """
    runner = runner_of(get(engines, spec))
    model = runner.model
    with PartTimer(_synchronize(runner), CLOCKS[workload.clock]) as timer:
        inner = model.model
        topology = getattr(inner, "topology", None)
        # Gemma 4, see bench_gemma: its upper layers project no KV.
        boundary = topology.boundary if topology else len(inner.layers) - inner.config.num_kv_shared_layers
        for layer in inner.layers[:boundary]:
            timer.wrap(layer, "forward", "producers")
        if topology is None:
            for layer in inner.layers[boundary:]:
                timer.wrap(layer, "forward", "consumers")
        else:
            # The norm before layer P is the consumers' first; its forward is called once, at the boundary.
            timer.wrap(inner.consumers[0].input_layernorm, "forward", "global_kv")
            timer.wrap(inner, "_write_global_kv", "global_kv")
            timer.wrap(inner, "_run_consumers", "consumers")
        timer.wrap(model, "compute_logits", "logits")
        timer.wrap(runner.sampler, "forward" if hasattr(runner.sampler, "forward") else "__call__", "sampling")
        for method in ("execute_model", "sample_tokens"):
            timer.wrap(runner, method, "runner")
        total = serve(engines, spec, workload)["duration"]
    seconds = {name: timer.seconds.get(name, 0.0) for name in PARTS}
    in_runner = timer.seconds["runner"]
    return {**seconds, "runner": in_runner - sum(seconds.values()), "engine": total - in_runner, "total": total}


def runner_of(llm: Any) -> Any:
    """The model runner of an engine whose worker is in this process."""
    return llm.collective_rpc(_runner)[0]


def _runner(worker: Any) -> Any:
    return worker.model_runner


def _synchronize(runner: Any) -> Callable[[], None]:
    if runner.device.type == "cuda":
        import torch

        return torch.cuda.synchronize
    return lambda: None


# -- memory --------------------------------------------------------------------------------------------------------


def peak_memory(engines: Engines, spec: BenchEngine, workload: Workload) -> dict[str, int]:
    """Bytes: resident before the workload, and the most that was resident (on a GPU: allocated) during it."""
    runner = runner_of(get(engines, spec))
    if runner.device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        serve(engines, spec, workload)
        return {"before": before, "peak": torch.cuda.max_memory_allocated()}
    gc.collect()
    CLEAR_PEAK.write_text("5")  # sets VmHWM to VmRSS
    before = _status("VmRSS")
    serve(engines, spec, workload)
    return {"before": before, "peak": _status("VmHWM")}


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")


def admission(
    engines: Engines, spec: BenchEngine, prompt_tokens: int, chunk_tokens: int, num_requests: int
) -> dict[str, Any]:
    """How many prompts the engine's KV pool serves at once, and what each holds.

    The real scheduler and block pool run, the model does not: every step is answered with a made-up token, and each
    request decodes for ever. Counted when the scheduler admits no more.

    Returns:
        ``pool_blocks``; ``admitted``: requests in the decode phase together, none ever preempted;
        ``peak_blocks``: the most blocks that one request held, during its prefill; ``held_blocks``: what it holds
        afterwards; both with their bytes.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.outputs import ModelRunnerOutput

    engine = get(engines, spec).llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.max_num_scheduled_tokens = chunk_tokens
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    # More than the steps until the pool is full.
    room = spec.max_model_len - prompt_tokens
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True, detokenize=False)
    stream = np.random.default_rng(0)
    names = [f"admission-{chunk_tokens}-{n}" for n in range(num_requests)]
    for name in names:
        tokens = stream.integers(0, 256, prompt_tokens).tolist()
        engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), params)
    requests = {request.request_id for request in scheduler.waiting}

    def held(name: str) -> int:
        return sum(sum(not b.is_null for b in m.req_to_blocks.get(name, ())) for m in managers)

    first = next(iter(scheduler.waiting)).request_id
    peak = decoding = 0
    while True:
        output = scheduler.schedule()
        peak = max(peak, held(first))
        ids = list(output.num_scheduled_tokens)
        running = [r for r in scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens]
        sampled = [[1] if any(r.request_id == i for r in running) else [] for i in ids]
        scheduler.update_from_output(
            output, ModelRunnerOutput(ids, {i: n for n, i in enumerate(ids)}, sampled_token_ids=sampled)
        )
        preempted = any(r.num_preemptions for r in scheduler.requests.values())
        if preempted or (len(running) == decoding and len(scheduler.running) == decoding and decoding):
            break
        decoding = len(running)
        if not scheduler.waiting and decoding == num_requests:
            break
    held_after = held(first)
    pool = scheduler.kv_cache_config
    page = max(group.kv_cache_spec.page_size_bytes for group in pool.kv_cache_groups)
    layers = max(len(group.layer_names) for group in pool.kv_cache_groups)
    engine.abort_request(list(requests), internal=True)
    # The worker has not seen these requests, so it must not be told that they are gone.
    scheduler.finished_req_ids.clear()
    return {
        "pool_blocks": pool.num_blocks,
        "pool_bytes": sum(tensor.size for tensor in pool.kv_cache_tensors),
        "admitted": decoding,
        "peak_blocks": peak,
        "held_blocks": held_after,
        "peak_bytes": peak * page * layers,
        "held_bytes": held_after * page * layers,
    }


# -- preparation of a step -----------------------------------------------------------------------------------------


def step_preparation(
    engines: Engines,
    spec: BenchEngine,
    num_reqs: int,
    prompt_tokens: int,
    decode: bool,
    clock: str,
    repeats: int = 1000,
) -> dict[str, float]:
    """Seconds that preparing one step of ``num_reqs`` requests takes, median and best; no forward runs.

    The engine's own builder is given a made-up step: every request in its whole prompt, or (``decode``) one row past
    it. ``builders`` is the part that vLLM's metadata builders take for the sub-batch; ``plugin`` the rest, with what
    the plugin adds inside of them. Metadata of the full batch is in neither.
    """
    import torch

    from vllm_yoco.attention import ClippedBuilderMixin
    from vllm_yoco.staging import StepBuffers
    from vllm_yoco.step import StepInputs

    runner = runner_of(get(engines, spec))
    builder = getattr(runner, "_yoco_sub_batch", None) or runner.model_state._builder
    groups = runner.kv_cache_config.kv_cache_groups
    lengths = np.full(num_reqs, 1 if decode else prompt_tokens)
    start = np.full(num_reqs, prompt_tokens if decode else 0, dtype=np.int64)
    total, device = int(lengths.sum()), runner.device
    ends = torch.from_numpy((start + lengths).astype(np.int32))
    columns = [-(-(prompt_tokens + 1) // group.kv_cache_spec.block_size) for group in groups]
    blocks = runner.kv_cache_config.num_blocks - 1
    tables = [
        (1 + torch.arange(num_reqs * n, dtype=torch.int32) % blocks).view(num_reqs, n).to(device) for n in columns
    ]
    step = StepInputs(
        num_prompt_tokens=np.full(num_reqs, prompt_tokens, dtype=np.int64),
        start=start,
        query_start_loc=np.arange(num_reqs + 1) * lengths[0],
        keep_all=np.zeros(num_reqs, dtype=bool),
        num_shown=num_reqs,
        seq_lens=ends.to(device),
        seq_lens_cpu=ends,
        positions=torch.from_numpy(np.concatenate([s + np.arange(n) for s, n in zip(start, lengths, strict=True)])).to(
            device
        ),
        block_table=tables.__getitem__,
        slot_mappings=torch.zeros(len(groups), total, dtype=torch.int64, device=device),
        is_prefilling=np.full(num_reqs, not decode),
    )
    own = builder._buffers, builder._max_reqs, builder._max_rows
    # The step may have more rows than the scheduler of this engine ever puts into one.
    builder._buffers, builder._max_reqs, builder._max_rows = StepBuffers(device), num_reqs, total
    found: dict[str, list[float]] = {"plugin": [], "builders": []}
    with torch.inference_mode():  # as the runner does
        for _ in range(repeats):
            with PartTimer(lambda: None, CLOCKS[clock]) as timer:
                for group in builder._own_groups:
                    timer.wrap(group, "build_metadata", "builders")
                    clipped = group.get_metadata_builder()
                    if isinstance(clipped, ClippedBuilderMixin):
                        timer.wrap(clipped, "_clipped", "view")
                        timer.wrap(clipped, "_fresh_blocks", "view")
                begin = CLOCKS[clock]()
                builder.around(runner.attn_groups, step, lambda: None)
                seconds = CLOCKS[clock]() - begin
            found["builders"].append(timer.seconds.get("builders", 0.0) - timer.seconds.get("view", 0.0))
            found["plugin"].append(seconds - found["builders"][-1])
    builder._buffers, builder._max_reqs, builder._max_rows = own
    builder._decoding = None
    return {name: float(np.median(times)) for name, times in found.items()} | {"plugin_best": min(found["plugin"])}


# -- start -----------------------------------------------------------------------------------------------


def warm_up(engines: Engines, spec: BenchEngine, longest: int) -> dict[str, Any]:
    """Make the engine and serve a short and a long request, unmeasured; what the engine then is."""
    for length in sorted({min(600, longest - 4), longest - 4}):
        serve(engines, spec, Workload((length,), 4, 1, seed=length))
    runner = runner_of(get(engines, spec))
    groups = [group for groups in runner.attn_groups for group in groups]
    return {
        "runner": engines.runner,
        "backends": sorted({group.backend.get_name() for group in groups}),
        "dtype": str(runner.vllm_config.model_config.dtype).removeprefix("torch."),
        "device": str(runner.device.type),
    }

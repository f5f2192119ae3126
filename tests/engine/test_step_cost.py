"""What truncation adds to a step, counted: sub-batches, tensor operations, addresses, rows, blocks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from inspect import isroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.conftest import random_prompt
from tests.engine.harness import EngineConfig, Engines, Request, Result, consumer_swa_groups, generate
from tests.engine.test_equivalence import ODD_KEEP
from vllm_yoco.kv_cache import NoBlocksForDroppedRows
from vllm_yoco.tools.bench_overhead import aligned_prompt_tokens

SYNCHRONISING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
"""Operations that wait for a device: ``.item()``, ``bool(tensor)``, indices of unknown number."""


def record(engines: Engines, config: EngineConfig, requests: list[Request]) -> list[dict[str, Any]]:
    """Job: serve, and note for each forward its tensor operations, its largest consumer tensor and its sub-batch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from vllm_yoco.batch import SubBatchBuilder, current_step

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operations: list[str] = []
            self.largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations.append(func.__name__)
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view and out.dtype.is_floating_point:
                self.largest = max(self.largest, out.numel())
            return out

    steps: list[dict[str, Any]] = []
    model = engines.get(config).apply_model(lambda model: model)[0]
    forward, consumers = model.forward, model.model._run_consumers
    build = SubBatchBuilder.build

    def recorded_forward(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        idle = step is None or step.idle
        addresses = None if idle else (step.rows.data_ptr(), step.positions.data_ptr())
        steps.append({"addresses": addresses, "largest": 0})
        with Recorder() as recorder:
            out = forward(*args, **kwargs)
        steps[-1]["operations"] = recorder.operations
        return out

    def recorded_consumers(*args: Any, **kwargs: Any) -> Any:
        with Recorder() as recorder:
            out = consumers(*args, **kwargs)
        steps[-1]["largest"] = recorder.largest
        return out

    copies = []

    def recorded_build(self: Any, prepared: Any) -> Any:
        copies.append(self._buffers.num_copies)
        return build(self, prepared)

    model.forward, model.model._run_consumers, SubBatchBuilder.build = (
        recorded_forward,
        recorded_consumers,
        recorded_build,
    )
    try:
        generate(engines, config, requests)
    finally:
        SubBatchBuilder.build = build
        del model.forward, model.model._run_consumers
    for step, count in zip(steps, copies, strict=False):
        step["copies"] = count
    return steps


def test_decode_steps_are_those_of_off(engine, model_dir):
    """Past their prompts requests cost the same tensor operations, in the same order, and no sub-batch."""
    requests = [Request(random_prompt(n, seed=n), 8) for n in (300, 193, 411)]
    model = model_dir("ced-tiny")
    off, compact = (
        engine.call(record, EngineConfig(model, mode, ODD_KEEP, 1024), requests) for mode in ("off", "compact")
    )
    assert len(off) == len(compact) == 8
    assert compact[0]["addresses"] is not None, "control: the prefill step has a sub-batch"
    assert compact[0]["operations"] != off[0]["operations"]
    for plain, step in zip(off[1:], compact[1:], strict=True):
        assert step["addresses"] is None
        assert step["operations"] == plain["operations"]
        assert step["largest"] == plain["largest"]
    # The batch stays the same, and so does what the device has been told of it.
    assert compact[0]["copies"] > 0 and compact[2]["copies"] == compact[-1]["copies"]


def derivations(engines: Engines, config: EngineConfig, requests: list[Request]) -> tuple[int, int]:
    """Job: serve; the steps prepared, and how many of them derived what they need anew."""
    from vllm_yoco.batch import SubBatchBuilder

    counts = {"prepare": 0, "_derive": 0}
    originals = {name: getattr(SubBatchBuilder, name) for name in counts}

    def counting(name: str) -> Any:
        def counted(self: Any, *args: Any) -> Any:
            counts[name] += 1
            return originals[name](self, *args)

        return counted

    for name in counts:
        setattr(SubBatchBuilder, name, counting(name))
    try:
        generate(engines, config, requests)
    finally:
        for name, original in originals.items():
            setattr(SubBatchBuilder, name, original)
    return counts["prepare"], counts["_derive"]


def test_decode_steps_of_a_batch_derive_once(engine, model_dir):
    """A step of prefills, then decodes of three requests, then of the two that are left."""
    requests = [Request(random_prompt(n, seed=n), tokens) for n, tokens in ((300, 8), (193, 4), (411, 8))]
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, 1024)
    assert engine.call(derivations, config, requests) == (8, 3)


def logits_of_steps(engines: Engines, config: EngineConfig, requests: list[Request]) -> tuple[int, int, list[Result]]:
    """Job: serve; the forwards, the products with the output embedding among them, and the results."""
    model = engines.get(config).apply_model(lambda model: model)[0]
    counts = [0, 0]
    hooks = [
        module.register_forward_hook(lambda *_, index=index: counts.__setitem__(index, counts[index] + 1))
        for index, module in enumerate((model.model, model.logits_processor))
    ]
    try:
        results = generate(engines, config, requests)
    finally:
        for hook in hooks:
            hook.remove()
    return *counts, results


def test_idle_steps_compute_no_logits(engine, model_dir, reference):
    """Six chunks, some of which lie wholly below s_keep, then three decodes; control: mask computes them all.

    And beside a request that decodes no step is idle.
    """
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP)
    size = config.chunk_tokens
    long, other = Request(random_prompt(6 * size, seed=1), 4), Request(random_prompt(40, seed=2), 20)
    below = (6 * size - ODD_KEEP) // size
    assert below > 3
    for mode, requests, skipped in (("compact", [long], below), ("mask", [long], 0), ("compact", [other, long], 0)):
        forwards, products, results = engine.call(logits_of_steps, replace(config, truncation=mode), requests)
        assert forwards >= 6 + 3 and forwards - products == skipped
        for request, result in zip(requests, results, strict=True):
            reference.check(config.model, request, result, ODD_KEEP)


def generate_in_turns(engines: Engines, config: EngineConfig, requests: list[Request]) -> tuple[list[Result], int, int]:
    """Job: serve, every other decode step without the plugin; the results, the steps, and those that it prepared."""
    from vllm_yoco.batch import SubBatchBuilder
    from vllm_yoco.tools.bench_overhead import PluginSwitch

    llm = engines.get(config)
    switch, scheduler = PluginSwitch(llm), llm.llm_engine.engine_core.engine_core.scheduler
    step, prepare = llm.llm_engine.step, SubBatchBuilder.prepare
    counts = {"steps": 0, "prepared": 0}

    def in_turns() -> Any:
        running = scheduler.running
        decodes = running and not scheduler.waiting and all(r.num_output_tokens for r in running)
        counts["steps"] += 1
        if not decodes or counts["steps"] % 2:
            return step()
        switch.take_out()
        try:
            return step()
        finally:
            switch.put_back()

    def counted(*args: Any) -> Any:
        counts["prepared"] += 1
        return prepare(*args)

    llm.llm_engine.step, SubBatchBuilder.prepare = in_turns, counted
    try:
        return generate(engines, config, requests), counts["steps"], counts["prepared"]
    finally:
        del llm.llm_engine.step
        SubBatchBuilder.prepare = prepare


def test_steps_without_the_plugin_are_equal_where_s_keep_begins_a_block(engine, reference, model_dir):
    """What `vllm-yoco bench --measure overhead` rests on. Control: one token later they are not."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, options=(("disable_log_stats", False),))
    for late in (0, 1):
        lengths = [aligned_prompt_tokens(ODD_KEEP, n, config.block_size) + late for n in (100, 300)]
        requests = [Request(random_prompt(n, seed=n), 30) for n in lengths]
        results, steps, prepared = engine.call(generate_in_turns, config, requests)
        assert steps - prepared >= 12 and prepared >= 12
        with nullcontext() if not late else pytest.raises(AssertionError, match="L="):
            for request, result in zip(requests, results, strict=True):
                reference.check(config.model, request, result, ODD_KEEP)
    # The switch leaves nothing behind.
    request = Request(random_prompt(300, seed=1), 6)
    reference.check(config.model, request, engine.generate(config, [request])[0], ODD_KEEP)


def traces_of_the_plugin(engines: Engines, config: EngineConfig) -> list[set[str]]:
    """Job: methods of the plugin in what a step runs: as it is, with the switch out, and with it put back."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from vllm_yoco.tools.bench_engine import runner_of
    from vllm_yoco.tools.bench_overhead import PluginSwitch

    llm = engines.get(config)
    runner, scheduler = runner_of(llm), llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    managers = [manager, manager.coordinator, *manager.coordinator.single_type_managers]
    owners = [runner, getattr(runner, "model_state", None), scheduler, *managers, llm.llm_engine.input_processor]
    owners += [builder for groups in runner.attn_groups for group in groups for builder in group.metadata_builders]
    owners += [module for module in runner.model.modules() if isinstance(module, AttentionLayerBase)]

    def traces() -> set[str]:
        found = set()
        for owner in owners:
            for name in dir(type(owner)) + list(getattr(owner, "__dict__", ())):
                method = getattr(owner, name, None)
                ours = (getattr(method, "__module__", None) or "").startswith("vllm_yoco.")
                if isroutine(method) and (ours or getattr(method, "_yoco", False)):
                    found.add(f"{type(owner).__name__}.{name}")
        return found

    found, switch = [traces()], PluginSwitch(llm)
    switch.take_out()
    found.append(traces())
    switch.put_back()
    return [*found, traces()]


def test_the_switch_of_off_leaves_nothing(engine, model_dir, request):
    """What `--measure overhead` says of `off`; control: with the plugin there is something to take out."""
    config = EngineConfig(model_dir("ced-tiny"), "off", ODD_KEEP, 1024)
    before, without, after = engine.call(traces_of_the_plugin, config)
    of_a_step = {"process_inputs", "_build_attention_metadata"} if "v1" in request.node.name else {"process_inputs"}
    assert {name.partition(".")[2] for name in before} == {"__init__", *of_a_step}
    assert without == {"Scheduler.__init__"} & before, "of the start, not of a step"
    assert after == before


def rows_and_result(engines: Engines, config: EngineConfig, request: Request, every_row: bool) -> tuple[int, Result]:
    """Job: serve, with every row kept if so asked; the rows that the first consumer layer ran on, and the result."""
    from vllm_yoco.tools.bench_chunk_loss import keeping_every_row

    llm = engines.get(config)
    layer = llm.apply_model(lambda model: model.model.consumers[0])[0]
    before = layer.num_computed_rows
    with keeping_every_row(llm) if every_row else nullcontext():
        (result,) = generate(engines, config, [request])
    return layer.num_computed_rows - before, result


def test_one_engine_keeps_k_rows_or_all(engine, reference, model_dir):
    """What `--measure chunk_loss` rests on: without truncation it is `off`, and afterwards K is as before."""
    config, request = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP), Request(random_prompt(300, seed=5), 1)
    for every_row, kept in ((True, 300), (False, ODD_KEEP), (True, 300)):
        rows, result = engine.call(rows_and_result, config, request, every_row)
        reference.check(config.model, request, result, kept)
        assert rows == kept


@pytest.mark.parametrize("truncation", ["mask", "compact"])
def test_no_forward_waits_for_the_device(engine, model_dir, truncation):
    requests = [Request(random_prompt(n, seed=n), 4) for n in (300, 20, 150)]
    steps = engine.call(record, EngineConfig(model_dir("ced-tiny"), truncation, ODD_KEEP), requests)
    waiting = {name.split(".")[0] for step in steps for name in step["operations"]} & set(SYNCHRONISING)
    assert not waiting


def test_addresses_stay(engine, model_dir):
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, chunk_tokens=77)
    steps = engine.call(record, config, [Request(random_prompt(n, seed=n), 4) for n in (300, 411, 193)])
    addresses = [step["addresses"] for step in steps if step["addresses"] is not None]
    assert len(addresses) > 5 and len(set(addresses)) == 1


def test_activations_follow_the_kept_rows(engine, model_dir):
    """The largest tensor inside the consumer layers: that of K rows, whatever the chunk."""
    model = model_dir("ced-tiny")

    def largest(mode: str, length: int) -> int:
        config = EngineConfig(model, mode, ODD_KEEP, chunk_tokens=1024)
        return engine.call(record, config, [Request(random_prompt(length, seed=length), 1)])[0]["largest"]

    assert largest("compact", 300) == largest("compact", 900) < largest("off", 300) < largest("off", 900)


def count_boundary_calls(engines: Engines, config: EngineConfig, requests: list[Request]) -> dict[str, int]:
    """Job: serve; calls of what runs at the boundary, beside the number of forwards."""
    model = engines.get(config).apply_model(lambda model: model)[0]
    inner = model.model
    owners = {
        "forwards": model,
        "projections": inner.global_kv_proj,
        "boundary norms": inner.consumers[0].input_layernorm,
        "rotations": inner.rotary_emb,
    }
    calls = dict.fromkeys(owners, 0)
    for name, owner in owners.items():

        def counted(*args: Any, name: str = name, forward: Any = owner.forward, **kwargs: Any) -> Any:
            calls[name] += 1
            return forward(*args, **kwargs)

        owner.forward = counted
    try:
        generate(engines, config, requests)
    finally:
        for owner in owners.values():
            del owner.forward
    topology = inner.topology
    return calls | {
        "producers": topology.boundary, "consumers": topology.num_consumers, "with SWA": len(topology.swa_layers)
    }  # fmt: skip


@pytest.mark.parametrize("model", ["ced-tiny", "kv-shared"])
@pytest.mark.parametrize("truncation", ["off", "compact"])
def test_boundary_runs_once_for_all_sources(engine, model_dir, model, truncation):
    config = EngineConfig(model_dir(model), truncation, ODD_KEEP, chunk_tokens=77)
    calls = engine.call(count_boundary_calls, config, [Request(random_prompt(n, seed=n), 4) for n in (300, 90)])
    forwards = calls["forwards"]
    assert forwards > 4
    assert calls["projections"] == calls["boundary norms"] == forwards
    # The first two chunks of 77 rows lie below s_keep, and no consumer layer runs on them.
    with_consumers = forwards - (2 if truncation == "compact" else 0)
    # One for the queries of each layer, one more for those of each window, and one for the keys of all sources.
    in_consumers = with_consumers * (calls["consumers"] + calls["with SWA"])
    assert calls["rotations"] == forwards * (calls["producers"] + 1) + in_consumers


def test_placeholders_alone_run_no_consumer_layer(engine, model_dir):
    """Of four chunks of 77 rows the first two lie below s_keep = 300 - K; two prompts at once are no different."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, chunk_tokens=77)
    for prompts in ([300], [300, 300]):
        steps = engine.call(record, config, [Request(random_prompt(n, seed=i), 1) for i, n in enumerate(prompts)])
        ran = [bool(step["largest"]) for step in steps]
        assert ran[:3] == [False, False, True] and all(ran[2:4])
        assert ran.count(False) == 2 * len(prompts)


def prepare_on_device(engines: Engines, config: EngineConfig, requests: list[Request]) -> list[str]:
    """Job: serve while preparation takes its path for devices; the operations that it ran."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from vllm_yoco.step import PreparedStep

    operations: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(func.__name__)
            return func(*args, **(kwargs or {}))

    init, rewrite = PreparedStep.__init__, PreparedStep.rewrite_slots

    def recorded_init(self: Any, *args: Any) -> None:
        with Recorder():
            init(self, *args)
        self._buffers.on_host = False

    def recorded_rewrite(self: Any, group_id: int) -> None:
        with Recorder():
            rewrite(self, group_id)

    PreparedStep.__init__, PreparedStep.rewrite_slots = recorded_init, recorded_rewrite
    try:
        generate(engines, config, requests)
    finally:
        PreparedStep.__init__, PreparedStep.rewrite_slots = init, rewrite
    return operations


def test_preparation_does_not_wait_for_the_device(engine, reference, model_dir):
    """Its path for a device, run on the CPU: right results, and nothing is read back."""
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, chunk_tokens=77, max_num_seqs=5)
    requests = [Request(random_prompt(n, seed=n), 4) for n in (300, 411, 193)]
    operations = engine.call(prepare_on_device, config, requests)
    assert "take.default" in operations and "copy_.default" in operations
    assert not {name.split(".")[0] for name in operations} & set(SYNCHRONISING)
    for request, result in zip(requests, engine.generate(config, requests), strict=True):
        reference.check(config.model, request, result, ODD_KEEP)


# -- blocks of dropped rows


def held_blocks(engines: Engines, config: EngineConfig, requests: list[Request]) -> dict[str, int]:
    """Job: serve; the most consumer SWA blocks, and the most blocks at all, in use after a scheduling step."""
    scheduler = engines.get(config).llm_engine.engine_core.engine_core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    groups = consumer_swa_groups(scheduler)
    most = {"swa": 0, "all": 0}
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        held = [sum(not b.is_null for blocks in m.req_to_blocks.values() for b in blocks) for m in managers]
        most["swa"] = max(most["swa"], sum(held[group] for group in groups))
        most["all"] = max(most["all"], sum(held))
        return output

    scheduler.schedule = counted
    try:
        generate(engines, config, requests)
    finally:
        scheduler.schedule = schedule
    return most


@pytest.mark.parametrize("chunk_tokens", [320, 1024])
def test_dropped_rows_hold_no_window_blocks(engine, model_dir, chunk_tokens):
    model, request = model_dir("ced-tiny"), [Request(random_prompt(900, seed=900), 3)]
    off, compact = (
        engine.call(held_blocks, EngineConfig(model, mode, ODD_KEEP, chunk_tokens), request)
        for mode in ("off", "compact")
    )
    # K = 71 rows start inside a block and end inside one: at most 4 blocks of 32, and one for the decode rows.
    assert compact["swa"] <= 5
    assert off["swa"] > compact["swa"]


def test_requests_that_keep_every_row_hold_their_blocks(engine, model_dir):
    config = EngineConfig(model_dir("ced-tiny"), "compact", ODD_KEEP, 1024, prompt_logprobs="full")
    full = Request(random_prompt(900, seed=900), 3, (("prompt_logprobs", 0),))
    assert engine.call(held_blocks, config, [full])["swa"] >= 900 // 32


def test_small_pool_admits_more(engine, model_dir):
    """Two prompts of 512 tokens in one step: the pool holds both with compact, one with off."""
    requests = [Request(random_prompt(512, seed=n), 2) for n in (1, 2)]
    steps = {}
    for mode in ("off", "compact"):
        config = EngineConfig(model_dir("ced-tiny"), mode, ODD_KEEP, 1024, num_blocks=46, max_model_len=520)
        steps[mode] = len(engine.call(record, config, requests))
    assert steps["compact"] < steps["off"]


def _manager(block_size: int = 4):
    """vLLM's sliding-window manager as far as allocation goes: blocks are numbers, 0 is the null block."""
    manager = SimpleNamespace(block_size=block_size, req_to_blocks={"r": []}, next=1)
    manager.block_pool = SimpleNamespace(null_block=0)

    def allocate(request_id, num_tokens, *args):
        blocks = manager.req_to_blocks[request_id]
        new = list(range(manager.next, manager.next + max(0, -(-num_tokens // block_size) - len(blocks))))
        manager.next += len(new)
        blocks.extend(new)
        return new

    manager.allocate_new_blocks = allocate
    manager.get_num_blocks_to_allocate = lambda request_id, num_tokens, *args, **kwargs: max(
        0, -(-num_tokens // block_size) - len(manager.req_to_blocks[request_id])
    )
    manager.allocate_external_computed_blocks = lambda request_id, local, external: allocate(
        request_id, local + external
    )
    return manager


@pytest.mark.parametrize("s_keep", [0, 3, 4, 13, 40])
@pytest.mark.parametrize("steps", [[20], [5, 9, 20], [1, 2, 3, 20, 21, 30]])
def test_blocks_below_s_keep_are_null(s_keep, steps):

    manager, plain = _manager(), _manager()
    NoBlocksForDroppedRows._wrap(manager, lambda request_id: s_keep)
    for num_tokens in steps:
        counted = manager.get_num_blocks_to_allocate("r", num_tokens)
        added = manager.allocate_new_blocks("r", num_tokens, num_tokens)
        plain.allocate_new_blocks("r", num_tokens)
        table = manager.req_to_blocks["r"]
        assert counted == sum(block != 0 for block in added), "what is counted is what is taken"
        assert len(table) == len(plain.req_to_blocks["r"]), "the table has an entry for every block of rows"
        assert [block != 0 for block in table] == [index >= s_keep // 4 for index in range(len(table))]

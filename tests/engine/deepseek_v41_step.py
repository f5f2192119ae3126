"""One scheduled step of DeepSeek-V4.1 without the model: vLLM's state, builders and kernels on the CPU.

The jobs run in a process with Triton's interpreter (``RunnerProcess("v2")``). A step is given by its chunks and goes
through ``prepare_attn`` of the real model state, with real attention groups: an encoder layer and the consumer layers,
whose SWA caches share one KV cache group. What comes out is read back through vLLM's own index kernels into positions:

    paged      decode_swa_indices and prefill_swa_indices: FlashMLA decode, FlashInfer on SM120
    gathered   dequantize-and-gather plus combine_topk_swa_indices: FlashMLA prefill, mega attention
    mixed      build_flashinfer_mixed_sparse_indices: FlashInfer on SM100

``stock`` runs vLLM's own state and rule.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PRODUCER, BOUNDARY, CONSUMER = "model.layers.1.swa", "model.layers.2.swa", "model.layers.3.swa"
COMPRESSED = "model.layers.2.attn"
MAX_REQS, MAX_ROWS, MAX_LEN = 12, 1280, 4096
SWA_BLOCK, COMPRESSED_BLOCK = 32, 128
TOP_K = 8


@dataclass(frozen=True)
class Chunk:
    """Rows ``[start, start + length)`` of a request of ``prompt`` tokens; ``prefill`` as vLLM calls it.

    ``asks_for``: the sampling parameter, ``prompt_logprobs`` or ``prompt_logprob_token_ids``, that wants every row.
    """

    prompt: int
    start: int
    length: int
    replay_start: int = 0
    prefill: bool = True
    asks_for: str | None = None


@dataclass(frozen=True)
class Rule:
    """How the layers are served.

    Attributes:
        mode: stock, off, mask or compact. keep: K. max_backtracking: B, for the check of K.
        boundary_swa: as the flag. builder: a name of ``swa_backend``.
        trim_any: drop rows of tiny steps as well.
        sub_batch_only: build nothing for the rows that drop, to save the interpreter's time; needs a step that trims.
    """

    mode: str
    keep: int = 0
    window: int = 128
    boundary_swa: str = "clipped"
    builder: str = "flashmla"
    num_speculative_tokens: int = 0
    max_backtracking: int = 1
    trim_any: bool = True
    sub_batch_only: bool = False


@dataclass
class Layer:
    """What one layer's rows see. Visible ranges are [rows, 2] inclusive, absolute; lo = position + 1 for none.

    ``paged``, ``gathered`` and ``mixed`` are the index paths; ``gathered`` has the prefill part only.
    """

    paged: np.ndarray
    gathered: np.ndarray
    mixed: np.ndarray
    num_decode_rows: int
    min_len: int


@dataclass
class Step:
    """``rows`` [T] of the batch that the consumers run on, their positions, and per KV cache group their cells.

    A cell is (request, position), or (-1, -1) for a row that writes nothing.
    """

    rows: np.ndarray
    positions: np.ndarray
    cu_rows: np.ndarray
    swa_cells: np.ndarray
    compressed_cells: np.ndarray
    trimmed: bool
    layers: dict[str, Layer] = field(default_factory=dict)


# --- Stand-ins for what the step does not use -----------------------------------------------------------------


def vllm_config(rule: Rule) -> Any:
    from unittest.mock import MagicMock

    config = MagicMock()
    config.model_config.max_model_len = MAX_LEN
    config.model_config.enable_prompt_embeds = False
    config.model_config.uses_mrope = False
    config.model_config.hf_config.sliding_window = rule.window
    config.model_config.hf_config.compress_ratios = [0, 0, 1, 1]
    config.model_config.hf_config.mm_prefix_clamp_sliding_window = False
    config.scheduler_config.max_num_batched_tokens = MAX_ROWS
    config.scheduler_config.max_num_seqs = MAX_REQS
    config.parallel_config.data_parallel_size = 1
    config.parallel_config.prefill_context_parallel_size = 1
    config.compilation_config.cudagraph_decoder_replay = False
    config.compilation_config.static_forward_context = {}
    config.compilation_config.fast_moe_cold_start = False
    config.aux_output_config.enable_return_routed_experts = False
    config.use_v2_model_runner = True
    config.speculative_config = None
    if rule.num_speculative_tokens:
        config.speculative_config = MagicMock(
            num_speculative_tokens=rule.num_speculative_tokens, parallel_drafting=False
        )
        config.speculative_config.use_dspark.return_value = False
    return config


def swa_cache(config: Any, prefix: str, window: int, builder: str) -> Any:
    """vLLM's SWA cache module of one layer."""
    from unittest.mock import patch

    import torch
    from vllm.v1.attention.backends.mla import sparse_swa

    with patch.object(sparse_swa, "get_current_vllm_config", return_value=config):
        return sparse_swa.DeepseekV4SWACache(
            head_dim=512,
            window_size=window,
            dtype=torch.uint8,
            prefix=prefix,
            cache_config=config.cache_config,
            backend_cls=swa_backend(builder),
            block_size=SWA_BLOCK,
            bounded_replay=True,
        )


@functools.cache
def swa_backend(name: str) -> Any:
    """vLLM's SWA backends; ``base`` is the one that the other two derive from."""
    from vllm.models.deepseek_v41.nvidia.flashinfer_sparse import DeepseekSparseSWAFlashInferBackend
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekSparseSWAFlashMLABackend
    from vllm.models.deepseek_v41.sparse_mla import DeepseekV41SparseSWAMetadataBuilder
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend
    from vllm.v1.attention.backends.utils import subclass_attention_backend

    return {
        "flashmla": DeepseekSparseSWAFlashMLABackend,
        "flashinfer": DeepseekSparseSWAFlashInferBackend,
        # On a CPU get_builder_cls() of the base names another platform's builder.
        "base": subclass_attention_backend("Base", DeepseekSparseSWABackend, DeepseekV41SparseSWAMetadataBuilder),
    }[name]


class Model:
    """The attributes of the model that the state reads."""

    token_lookback_depth = 0

    def __init__(self, parts: Any, replay_layers: Any) -> None:
        self.yoco = parts
        self.decoder_replay_layers = replay_layers


def make_state(rule: Rule, max_reqs: int = MAX_REQS) -> Any:
    """The model state for a rule, with its attention groups as ``state.groups``."""
    from types import SimpleNamespace

    import torch
    from vllm.models.deepseek_v41.decoder_replay_layers import DecoderReplayLayers
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

    from vllm_yoco.config import YocoConfig, resolve_truncation
    from vllm_yoco.deepseek_v41.model_hooks import install_bound
    from vllm_yoco.deepseek_v41.state import truncating_state
    from vllm_yoco.topology import LayerTopology

    device = torch.device("cpu")
    config = vllm_config(rule)
    names = [PRODUCER, BOUNDARY, CONSUMER]
    caches = {name: swa_cache(config, name, rule.window, rule.builder) for name in names}
    spec = _swa_spec(rule.window)
    compressed = MLAAttentionSpec(block_size=COMPRESSED_BLOCK, num_kv_heads=1, head_size=512, dtype=torch.uint8)
    kv_config = KVCacheConfig(
        num_blocks=1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([COMPRESSED], compressed), KVCacheGroupSpec(names, spec)],
    )

    parts, cls = None, DeepseekV41ModelState
    if rule.mode in ("mask", "compact"):
        topology = LayerTopology(4, 2, (2,), (2, 3), rule.window)
        settings = YocoConfig(truncation=rule.mode, keep_tokens=rule.keep, boundary_swa=rule.boundary_swa)
        truncation = resolve_truncation(settings, topology, max_backtracking=rule.max_backtracking)
        layers = [None, *(SimpleNamespace(attn=SimpleNamespace(swa_cache_layer=caches[name])) for name in names)]
        parts = install_bound(truncation, layers, range(1, 4), max_reqs, device)
        cls = truncating_state(DeepseekV41ModelState)
    replay_layers = None
    if rule.mode in ("stock", "compact"):
        replay_layers = DecoderReplayLayers(rule.window, _unused, _unused, {BOUNDARY, CONSUMER}, BOUNDARY)
    state = cls(config, Model(parts, replay_layers), None, device)
    state.kv_config, state.groups = kv_config, attention_groups(config, caches, spec, device)
    return state


class _NoBuilder:
    supports_update_block_table = False

    def build(self, *args: Any, **kwargs: Any) -> None:
        return None


def _unused(*args: Any) -> Any:
    raise AssertionError("the layers do not run in these tests")


def _swa_spec(window: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    return SlidingWindowMLASpec(
        block_size=SWA_BLOCK,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=window,
        bounded_replay=True,
        model_version="deepseek_v4",
    )


def attention_groups(config: Any, caches: dict[str, Any], spec: Any, device: Any) -> list[list[Any]]:
    """Grouped as vLLM groups them: by backend class (gpu/attn_utils.py, ``init_attn_backend``)."""
    from vllm.v1.worker.utils import AttentionGroup

    groups: dict[tuple[str, str], Any] = {}
    for name, cache in caches.items():
        backend = cache.get_attn_backend()
        group = groups.setdefault(backend.full_cls_name(), AttentionGroup(backend, [], spec, 1))
        group.layer_names.append(name)
    for group in groups.values():
        group.create_metadata_builders(config, device, SWA_BLOCK)
    return [[], list(groups.values())]


# --- One step -------------------------------------------------------------------------------------------------


def run_step(rule: Rule, chunks: list[Chunk], seed: int = 0, layers: tuple[str, ...] = ()) -> Step:
    """``prepare_attn`` on these chunks, read back; ``layers`` default to all three."""
    return Stepper(rule).step(chunks, seed, layers)


class Stepper:
    """One state that serves several steps, as in an engine."""

    def __init__(self, rule: Rule, max_reqs: int = MAX_REQS) -> None:
        self.rule = rule
        self.state = make_state(rule, max_reqs)
        if rule.sub_batch_only:
            for group in self.state.groups[1]:
                group.metadata_builders = [_NoBuilder()]
        # FlashMLA's planner needs its extension; the plan does not concern visibility.
        kinds = ("swaonly", "c4a", "c128a", "c1a", "c2a")
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder

        DeepseekSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, n: dict.fromkeys(kinds)  # type: ignore

    def step(
        self,
        chunks: list[Chunk],
        seed: int = 0,
        layers: tuple[str, ...] = (),
        mode: str = "NONE",
        padding: tuple[int, int] = (0, 0),
    ) -> Step:
        """``padding``: requests and rows that fill a FULL graph; the rows come last and must see nothing."""
        from unittest.mock import patch

        from vllm.config import CUDAGraphMode

        from vllm_yoco.deepseek_v41 import rows

        state, rule = self.state, self.rule
        batch, tables, slots = self._batch(chunks, seed)
        if padding[1]:
            batch, tables, slots = self._pad(batch, tables, slots, *padding)
        trim = rows.boundary_may_trim
        with patch.object(rows, "boundary_may_trim", (lambda *_: True) if rule.trim_any else trim):
            metadata = state.prepare_attn(
                batch, CUDAGraphMode[mode], tables, slots, state.groups, state.kv_config
            )
        replay = state.decoder_replay_layers and state.decoder_replay_layers.replay_batch
        kept_rows = np.arange(batch.num_tokens_after_padding)
        kept_slots, kept_metadata = slots.numpy(), metadata
        cu_rows = batch.query_start_loc_np[: len(chunks) + 1]
        if replay is not None:
            kept_rows = replay.rows.numpy().copy()
            context = replay.forward_context
            kept_metadata = metadata | context.attn_metadata
            by_layer = context.slot_mapping
            kept_slots = np.stack([by_layer[COMPRESSED].numpy(), by_layer[CONSUMER].numpy()])
            cu_rows = kept_metadata[CONSUMER].query_start_loc_cpu.numpy().copy()
        count = len(kept_rows)
        positions = batch.positions.numpy()[kept_rows]
        swa_table = tables[1].numpy()
        result = Step(
            rows=kept_rows,
            positions=positions,
            cu_rows=np.asarray(cu_rows),
            swa_cells=cells(kept_slots[1, :count], swa_table, SWA_BLOCK),
            compressed_cells=cells(kept_slots[0, :count], tables[0].numpy(), COMPRESSED_BLOCK),
            trimmed=replay is not None,
        )
        for name in layers or (PRODUCER, BOUNDARY, CONSUMER):
            full = name == PRODUCER
            result.layers[name] = read_back(
                (metadata if full else kept_metadata)[name],
                swa_table,
                batch.positions.numpy() if full else positions,
                rule,
            )
        return result

    def _pad(self, batch: Any, tables: Any, slots: Any, num_reqs: int, num_rows: int) -> tuple[Any, Any, Any]:
        """As vLLM pads a batch to the size of its graph: empty requests, rows without a cell."""
        import torch
        from torch.nn.functional import pad

        batch.num_reqs_after_padding += num_reqs
        batch.num_tokens_after_padding += num_rows
        total = batch.num_tokens
        batch.query_start_loc_np = np.pad(batch.query_start_loc_np, (0, num_reqs), constant_values=total)
        batch.query_start_loc = torch.from_numpy(batch.query_start_loc_np.copy())
        batch.seq_lens = pad(batch.seq_lens, (0, num_reqs))
        batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
        batch.positions = pad(batch.positions, (0, num_rows))
        batch.max_query_len = int(batch.num_scheduled_tokens.max())
        tables = tuple(pad(table, (0, 0, 0, num_reqs)) for table in tables)
        return batch, tables, pad(slots, (0, num_rows), value=-1)

    def _batch(self, chunks: list[Chunk], seed: int) -> tuple[Any, tuple[Any, ...], Any]:
        """InputBatch, block tables and slot mappings; physical blocks are random and each is used once."""
        from types import SimpleNamespace

        import torch
        from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

        rng, state = np.random.default_rng(seed), self.state
        count, total = len(chunks), sum(chunk.length for chunk in chunks)
        indices = rng.permutation(MAX_REQS)[:count]
        for index, chunk in zip(indices, chunks, strict=True):
            wishes = {"prompt_logprobs": 0, "prompt_logprob_token_ids": [5]}
            params = SimpleNamespace(**{name: w if name == chunk.asks_for else None for name, w in wishes.items()})
            state.add_request(
                index,
                SimpleNamespace(
                    replay_start=chunk.replay_start, prompt_len=chunk.prompt, sampling_params=params
                ),
            )
        batch = InputBatch.make_dummy(count, total, InputBuffers(MAX_REQS, MAX_ROWS, torch.device("cpu")))
        start = np.array([chunk.start for chunk in chunks])
        lengths = np.array([chunk.length for chunk in chunks])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch.idx_mapping_np = indices.astype(np.intp)
        batch.num_scheduled_tokens = lengths.astype(np.int32)
        batch.query_start_loc_np = offsets
        batch.query_start_loc = torch.from_numpy(offsets.copy())
        batch.seq_lens = torch.from_numpy((start + lengths).astype(np.int32))
        batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
        batch.num_computed_tokens_np = start.astype(np.int32)
        batch.is_prefilling_np = np.array([chunk.prefill for chunk in chunks])
        request = np.repeat(np.arange(count), lengths)
        positions = np.arange(total) - offsets[request] + start[request]
        batch.positions = torch.from_numpy(positions)

        tables, slots = [], []
        for size in (COMPRESSED_BLOCK, SWA_BLOCK):
            width = MAX_LEN // size
            table = rng.permutation(MAX_REQS * width)[: count * width].reshape(count, width) + 1
            tables.append(torch.from_numpy(table.astype(np.int32)))
            slots.append(table[request, positions // size] * size + positions % size)
        return batch, tuple(tables), torch.from_numpy(np.stack(slots).astype(np.int64))


def cells(slots: np.ndarray, table: np.ndarray, block_size: int) -> np.ndarray:
    """[T, 2] request and position of each slot; -1, -1 for none."""
    owner = {int(block): divmod(i, table.shape[1]) for i, block in enumerate(table.ravel())}
    found = []
    for slot in slots.tolist():
        if slot < 0:
            found.append((-1, -1))
        else:
            request, column = owner[slot // block_size]
            found.append((request, column * block_size + slot % block_size))
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def interval(keys: np.ndarray, request: int, position: int) -> tuple[int, int]:
    """Ends of a row's visible keys, given as (request, position) pairs; they must be one range of its own request."""
    if not len(keys):
        return position + 1, position
    assert (keys[:, 0] == request).all(), "a row sees keys of another request"
    assert np.array_equal(keys[:, 1], np.arange(keys[0, 1], keys[0, 1] + len(keys))), "not one range"
    return int(keys[0, 1]), int(keys[-1, 1])


def read_back(metadata: Any, table: np.ndarray, positions: np.ndarray, rule: Rule) -> Layer:
    """Visible range of each row on each index path."""
    import torch
    from vllm.models.deepseek_v41.common.ops.cache_utils import (
        build_flashinfer_mixed_sparse_indices,
        combine_topk_swa_indices,
    )

    count = len(positions)
    request = metadata.token_to_req_indices.numpy()[:count]
    num_decodes, decode_rows, prefill_rows = (
        metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefill_tokens,
    )  # fmt: skip
    assert decode_rows + prefill_rows == count
    lens = [metadata.decode_swa_lens.numpy()[:decode_rows]]
    indices = [metadata.decode_swa_indices.numpy()[:decode_rows].reshape(decode_rows, rule.window)]
    if prefill_rows:
        lens.append(metadata.prefill_swa_lens.numpy())
        indices.append(metadata.prefill_swa_indices.numpy().reshape(prefill_rows, rule.window))
    length = np.concatenate(lens)
    paged = []
    flat = [row for part in indices for row in part]
    for row in range(count):
        visible, hidden = flat[row][: length[row]], flat[row][max(0, length[row]) :]
        assert (hidden == -1).all(), "keys past the length"
        paged.append(interval(cells(visible, table, SWA_BLOCK), request[row], positions[row]))

    top_k = torch.arange(TOP_K, dtype=torch.int32).repeat(count, 1)
    # FlashInfer on SM100: one matrix for the whole batch.
    mixed_indices, _ = build_flashinfer_mixed_sparse_indices(
        metadata.decode_swa_indices.reshape(decode_rows, rule.window),
        top_k[:decode_rows],
        None,
        top_k[decode_rows:],
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.token_to_req_indices[:count],
        metadata.block_table,
        SWA_BLOCK,
        metadata.block_table,
        SWA_BLOCK,
        rule.window,
        1,
        TOP_K,
        decode_compressed_indices_are_local=True,
        decode_is_valid_token=metadata.is_valid_token[:decode_rows],
        replay_start=metadata.replay_start,
    )
    mixed = []
    for row, values in enumerate(mixed_indices.numpy()[:, : rule.window]):
        assert (np.diff(np.flatnonzero(values >= 0), prepend=-1) == 1).all(), "a gap in front of a key"
        mixed.append(interval(cells(values[values >= 0], table, SWA_BLOCK), request[row], positions[row]))

    gathered: list[tuple[int, int]] = []
    if prefill_rows:
        gather = metadata.prefill_gather_lens
        ends = metadata.prefill_seq_lens
        # The chunk plan bounds the workspace from the host's lengths; a longer gather would write past it.
        plan = metadata.get_prefill_chunk_plan(1, 4, has_compressed=True)
        for first, last, compressed, width in plan:
            assert bool((gather[first:last] <= width - compressed).all()), "the gather overruns the workspace"
            rows = slice(*(metadata.query_start_loc[num_decodes + k].item() - decode_rows for k in (first, last)))
            combined, combined_lens = combine_topk_swa_indices(
                top_k[decode_rows:][rows],
                metadata.query_start_loc[num_decodes + first : num_decodes + last + 1],
                ends[first:last],
                gather[first:last],
                rule.window,
                1,
                TOP_K,
                width,
                compressed,
            )
            for offset, (values, n) in enumerate(zip(combined.numpy(), combined_lens.numpy(), strict=True)):
                row = decode_rows + rows.start + offset
                local = request[row] - num_decodes
                cell = values[:n][values[:n] >= 0] - width * (local - first)
                own = cell[cell >= compressed] - compressed
                assert (own < int(gather[local])).all(), "a key outside the gathered range"
                found = own + int(ends[local] - gather[local])
                keys = np.stack([np.full_like(found, request[row]), found], axis=1)
                gathered.append(interval(keys, request[row], positions[row]))
    return Layer(
        paged=np.array(paged).reshape(-1, 2),
        gathered=np.array(gathered).reshape(-1, 2),
        mixed=np.array(mixed).reshape(-1, 2),
        num_decode_rows=decode_rows,
        min_len=int(length.min()),
    )


# --- Jobs -----------------------------------------------------------------------------------------------------


def prepare_process() -> None:
    """Once per child: no pinned memory on a CPU, and block sizes that are no power of two (recorded cases)."""
    import triton.language as tl
    from triton.language import core, semantic
    from vllm.models.deepseek_v41.common.ops import cache_utils
    from vllm.v1.worker.gpu import buffer_utils

    buffer_utils.is_uva_available = lambda: False
    # Programs that share a request's rows; interpreted one after the other, one is as good as 128.
    cache_utils._COMBINE_TOPK_SWA_NUM_WORKERS = 1
    # A debugging aid of the interpreter that takes most of its time.
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *args, **kwargs: None
    # Recorded cases have windows that are no power of two. Only a compiler minds.
    core.validate_block_shape = lambda shape: math.prod(shape)

    def arange(self: Any, start: int, end: int, **kwargs: Any) -> Any:
        kind = tl.block_type(tl.int32, [end - start])
        return self.tensor(self.builder.create_make_range(kind.to_ir(self.builder), start, end), kind)

    semantic.TritonSemantic.arange = arange


def steps(engines: Any, work: list[tuple[Rule, list[Chunk], int]]) -> list[Step]:
    prepare_process()
    return [run_step(rule, chunks, seed) for rule, chunks, seed in work]


def recorded_steps(engines: Any, work: list[tuple[Rule, list[Chunk], int]]) -> list[Step]:
    """Of the consumers only: recorded cases have no other layer."""
    prepare_process()
    return [run_step(rule, chunks, seed, (CONSUMER,)) for rule, chunks, seed in work]


def graph_step(engines: Any, rule: Rule, chunks: list[Chunk], mode: str) -> Step:
    """A step inside a CUDA graph of this mode, as far as the metadata are concerned; an earlier one left bounds."""
    prepare_process()
    stepper = Stepper(rule)
    stepper.step([Chunk(60, 0, 20)] * 4, 4, (CONSUMER,))
    return stepper.step(chunks, 5, mode=mode, padding=(2, 5))


def consecutive_steps(engines: Any, rule: Rule, batches: list[list[Chunk]]) -> list[Step]:
    prepare_process()
    stepper = Stepper(rule)
    return [stepper.step(chunks, 7) for chunks in batches]


def gathered_values(engines: Any, rule: Rule, chunks: list[Chunk]) -> dict[str, dict[str, np.ndarray]]:
    """Positions that dequantize-and-gather fetches for each prefill, and those that it should."""
    import torch
    from vllm.models.deepseek_v41.common.ops.cache_utils import dequantize_and_gather_k_cache

    prepare_process()
    stepper = Stepper(rule)
    batch, tables, slots = stepper._batch(chunks, 8)
    from vllm.config import CUDAGraphMode

    metadata = stepper.state.prepare_attn(
        batch, CUDAGraphMode.NONE, tables, slots, stepper.state.groups, stepper.state.kv_config
    )[CONSUMER]
    num_blocks = int(tables[1].max()) + 1
    # FlashMLA's record on SM90: 448 fp8 values, 64 bf16 values, then the scales of the whole page.
    cache = torch.zeros(num_blocks, SWA_BLOCK, 584, dtype=torch.uint8)
    pages = cache.view(num_blocks, -1)
    rotary = pages[:, : SWA_BLOCK * 576].reshape(num_blocks, SWA_BLOCK, 576)[..., 448:].view(torch.bfloat16)
    table = tables[1].numpy()
    for request in range(len(chunks)):
        for position in range(chunks[request].start + chunks[request].length):
            block, offset = table[request, position // SWA_BLOCK], position % SWA_BLOCK
            value = torch.full((64,), float(position), dtype=torch.bfloat16).view(torch.uint8)
            pages[block, offset * 576 + 448 : offset * 576 + 576] = value
    del rotary
    gather, ends = metadata.prefill_gather_lens, metadata.prefill_seq_lens
    first = metadata.num_decodes
    out = torch.full((len(gather), int(gather.max()) + 2, 512), -1.0, dtype=torch.bfloat16)
    dequantize_and_gather_k_cache(
        out,
        cache,
        seq_lens=ends,
        gather_lens=gather,
        block_table=metadata.block_table[first:],
        block_size=SWA_BLOCK,
        offset=0,
    )
    result = {}
    for row, (length, end) in enumerate(zip(gather.tolist(), ends.tolist(), strict=True)):
        expected = np.full(out.shape[1], -1.0)
        expected[:length] = np.arange(end - length, end)
        result[f"request {row}"] = {"found": out[row, :, -1].float().numpy(), "expected": expected}
    return result

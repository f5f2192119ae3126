"""``vllm-yoco inspect``: layer roles, K, KV bytes and the work removed, from a model's config alone.

Reads the configs of this plugin and DeepSeek-V4.1's config.json; needs neither weights nor vLLM.

JSON (``--json``), with layers as lists of indices, sizes in bytes and shares from 0 to 1:

    command, version, model (file), family (yoco | deepseek_v41), notes [what could not be computed, and why]
    topology     num_layers, boundary, producers, consumers, sliding_producers, consumer_swa_layers, window,
                 swa_share_hidden, kv_sources [{source, layers that read it}]; for DeepSeek-V4.1 also
                 draft_layers, compress_ratios, index_key_sources, index_sources [as kv_sources],
                 candidate_source (null: no filter)
    placement    draft_targets, engram_layers: each {layers, ok, reason (null if ok)}
    truncation   mode, keep_tokens, keep_tokens_rule (min | exact | given), lossless, min, exact,
                 num_speculative_tokens, max_backtracking
    kv           null, or {dtype, prompt_tokens, groups, persisted_bytes_per_token,
                 persisted_bytes_per_request, dropped_bytes_per_request}; group: {group, layers,
                 bytes_per_token (of all its layers), held_tokens (null: every token), bytes_per_request,
                 persisted}
    state        null, or for DeepSeek-V4.1 {ring_tokens, ring_bytes, stored_rings, dropped_rings,
                 persisted_bytes, total_bytes}
    flops_unit   what a FLOP stands for; null if FLOPs are unknown
    work         [{prompt_tokens, layer_rows_off, layer_rows, layer_rows_removed, flops_off, flops,
                 flops_removed}], one prompt in one chunk; the FLOPs are null if unknown

Exit code: 0; 1 if a placement check refuses the mode; 2 for a broken config or a setting that cannot be.
"""

from __future__ import annotations

import argparse
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vllm_yoco.cache_partition import KV_BLOCK_TOKENS, SWA_ENTRY_BYTES, CachePartition, StateSettings
from vllm_yoco.config import CONFIG_KEY, KeepTokens, Mode, Truncation, YocoConfig, resolve_truncation
from vllm_yoco.deepseek_topology import DeepseekTopology, read_deepseek_topology
from vllm_yoco.model_cost import DeepseekCost, ModelCost, Prefill, YocoCost, layer_rows
from vllm_yoco.presets import find_model_config, model_presets
from vllm_yoco.tools import arguments
from vllm_yoco.tools.report import add_json_argument, emit, percent, ranges, table
from vllm_yoco.topology import LayerTopology, check_draft_targets, check_engram_layers

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig

HELP = "show layer roles, K, KV bytes and the prefill work removed, from a model's config alone"

KV_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
"""Bytes of one element of the KV cache."""

PROMPT_TOKENS = (128, 512, 1024, 4096, 16384, 65536, 131072)
REFERENCE_DRAFT_TOKENS = 5  # draft length of DeepSeek-V4.1 where the config names none


@dataclass(frozen=True)
class KvGroup:
    """KV of one kind; the fields are those of a group in the JSON document."""

    group: str
    layers: Sequence[int]
    bytes_per_token: int
    held_tokens: int | None
    bytes_per_request: int
    persisted: bool


class Model(ABC):
    """What a config says about a model.

    Attributes:
        path: file it came from.
        family: yoco or deepseek_v41.
        topology: roles of the layers.
        max_prompt_tokens: longest prompt the model takes.
        num_speculative_tokens: draft length unless one is given.
        draft_targets, engram_layers: layers whose place matters to compact.
    """

    family: str
    topology: LayerTopology
    max_prompt_tokens: int
    num_speculative_tokens = 0
    draft_targets: Sequence[int] = ()
    engram_layers: Sequence[int] = ()

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def cost(self) -> ModelCost:
        """Cost of prefill. ValueError if the config does not hold every size it needs."""

    @abstractmethod
    def sliding_producers(self) -> list[int]:
        """Producers with a sliding window."""

    @abstractmethod
    def kv(self, truncation: Truncation, length: int, dtype: str) -> dict[str, Any]:
        """The parts kv and state of the JSON document for a request of ``length`` prompt tokens.

        ValueError where the sizes are unknown.
        """

    def kv_sources(self) -> list[int]:
        """Layer whose global KV each layer reads, in order of layers; -1 for a layer without global KV."""
        layers = self.topology
        return [layers.kv_source_of(n) if layers.is_consumer(n) else -1 for n in range(layers.num_layers)]

    def describe_topology(self) -> dict[str, Any]:
        """The part topology of the JSON document."""
        topology = self.topology
        return {
            "num_layers": topology.num_layers,
            "boundary": topology.boundary,
            "producers": list(range(topology.boundary)),
            "consumers": list(range(topology.boundary, topology.num_layers)),
            "sliding_producers": self.sliding_producers(),
            "consumer_swa_layers": list(topology.swa_layers),
            "window": topology.window,
            "swa_share_hidden": topology.swa_share_hidden,
            "kv_sources": _segments(self.kv_sources()),
        }


class YocoModel(Model):
    family = "yoco"

    def __init__(self, path: Path) -> None:
        from vllm_yoco.models.checkpoint import read_model_config  # loads torch

        super().__init__(path)
        self.config: YocoModelConfig = read_model_config(path)
        self.topology = self.config.topology()
        self.max_prompt_tokens = self.config.max_position_embeddings

    def cost(self) -> ModelCost:
        return YocoCost(self.config)

    def sliding_producers(self) -> list[int]:
        return [n for n in range(self.topology.boundary) if self.config.producer_window(n)]

    def kv(self, truncation: Truncation, length: int, dtype: str) -> dict[str, Any]:
        config, topology = self.config, self.topology
        if dtype == "auto":
            dtype = str(config.dtype or "float32").removeprefix("torch.")
        if dtype not in KV_DTYPES:
            raise ValueError(
                f"dtype {dtype}: known KV dtypes are {', '.join(KV_DTYPES)}; give --kv-cache-dtype"
            )
        layer_bytes = 2 * config.num_key_value_heads * config.head_dim * KV_DTYPES[dtype]  # K and V
        sliding = self.sliding_producers()
        full = [n for n in range(topology.boundary) if n not in sliding]
        # What decode reaches back to, rejected draft tokens included. vLLM holds it in whole blocks.
        held = topology.window + truncation.max_backtracking

        def group(name: str, layers: Sequence[int], held: int | None, persisted: bool = True) -> KvGroup:
            tokens = length if held is None else min(length, held)
            size = len(layers) * layer_bytes
            return KvGroup(name, layers, size, held, size * tokens, persisted)

        groups = (
            group("producer full", full, None),
            group("producer sliding", sliding, held),
            group("global KV", topology.kv_source_layers, None),
            group("consumer SWA", topology.swa_layers, held, persisted=not truncation.active),
        )
        return {"kv": _kv_totals(dtype, length, [g for g in groups if g.layers]), "state": None}


class DeepseekModel(Model):
    family = "deepseek_v41"

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(path)
        text: Mapping[str, Any] = config.get("text_config") or config
        self.config = config
        self.layers: DeepseekTopology = read_deepseek_topology(config)
        self.topology = self.layers.layer_topology()
        self.max_prompt_tokens = int(text.get("max_position_embeddings") or PROMPT_TOKENS[-1])
        self.draft_targets, self.engram_layers = self.layers.draft_targets, self.layers.engram_layers
        if self.layers.num_draft_layers:
            self.num_speculative_tokens = int(text.get("dspark_block_size") or REFERENCE_DRAFT_TOKENS)
        for name, layers in (
            ("dspark_target_layer_ids", self.draft_targets),
            ("engram_layer_ids", self.engram_layers),
        ):
            if any(not 0 <= layer < self.topology.num_layers for layer in layers):
                raise ValueError(f"{name} {list(layers)} must be layers in 0..{self.topology.num_layers - 1}")

    def cost(self) -> ModelCost:
        return DeepseekCost(self.config)

    def sliding_producers(self) -> list[int]:
        return [n for n in range(self.topology.boundary) if self.layers.uses_swa[n]]

    def kv_sources(self) -> list[int]:
        return self._compressed(self.layers.kv_source)

    def _compressed(self, sources: Sequence[int]) -> list[int]:
        return [source if self.layers.ratios[n] else -1 for n, source in enumerate(sources)]

    def describe_topology(self) -> dict[str, Any]:
        layers = self.layers
        return {
            **super().describe_topology(),
            "draft_layers": list(range(layers.num_layers, layers.total_layers)),
            "compress_ratios": list(layers.ratios),
            "index_key_sources": _segments(self._compressed(layers.index_k_source)),
            "index_sources": _segments(self._compressed(layers.index_source)),
            "candidate_source": next((n for n in layers.candidate_source if n is not None), None),
        }

    def kv(self, truncation: Truncation, length: int, dtype: str) -> dict[str, Any]:
        if dtype != "auto":
            raise ValueError(
                "--kv-cache-dtype: DeepSeek-V4.1 fixes its cache formats (KV FP4, SWA FP8), use auto"
            )
        settings = StateSettings(truncation.mode, truncation.keep_tokens, truncation.max_backtracking)
        partition = CachePartition(self.layers, settings)
        slot, boundary, main = partition.inference, self.topology.boundary, self.topology.num_layers
        blocks = -(-length // KV_BLOCK_TOKENS)

        def block_kv(name: str, is_consumer: bool) -> KvGroup:
            owned = [
                (layer, size)
                for layer, _, size in partition.kv_layout()
                if (layer >= boundary) == is_consumer
            ]
            size = sum(size for _, size in owned)
            layers = [layer for layer, _ in owned]
            return KvGroup(name, layers, size // KV_BLOCK_TOKENS, None, blocks * size, persisted=True)

        def rings(name: str, layers: Sequence[int], persisted: bool = False) -> KvGroup:
            sizes = len(layers) * SWA_ENTRY_BYTES, slot.ring_tokens, len(layers) * slot.ring_bytes
            return KvGroup(name, layers, *sizes, persisted)

        pooling = [n for n in self.layers.kv_owners() if self.layers.ratios[n] > 1]
        block_sizes = sum(size for _, _, size in partition.kv_layout())
        block_padding = blocks * (partition.kv_block_bytes - block_sizes)
        slot_padding = slot.total_bytes - slot.stored_bytes - slot.dropped_bytes - slot.compressor_bytes
        consumers_and_drafts = partition.dropped_layers
        groups = (
            block_kv("producer compressed", is_consumer=False),
            block_kv("global KV", is_consumer=True),
            KvGroup("block padding", [], 0, None, block_padding, persisted=True),
            rings("producer sliding", partition.stored_layers, persisted=True),
            rings("consumer SWA", [n for n in consumers_and_drafts if n < main]),
            rings("draft SWA", [n for n in consumers_and_drafts if n >= main]),
            KvGroup("compressor state", pooling, 0, None, slot.compressor_bytes, persisted=False),
            KvGroup("state padding", [], 0, None, slot_padding, persisted=False),
        )
        return {
            "kv": _kv_totals("fp4 + fp8", length, [g for g in groups if g.bytes_per_request]),
            "state": {
                "ring_tokens": slot.ring_tokens,
                "ring_bytes": slot.ring_bytes,
                "stored_rings": len(partition.stored_layers),
                "dropped_rings": len(partition.dropped_layers),
                "persisted_bytes": partition.disk_bytes,
                "total_bytes": slot.total_bytes,
            },
        }


def load_model(name: str) -> Model:
    """The model of a directory with a config.json, of a JSON file, or of a preset name.

    Raises:
        ValueError: for a file that is no config of a known family, or one whose topology is broken.
    """
    directory = Path(name)
    path = directory / "config.json" if (directory / "config.json").is_file() else None
    if path is None and directory.is_dir() and name not in model_presets():
        raise ValueError(f"{name}: the directory has no config.json")
    path = path or find_model_config(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(config).__name__}")
    kind = config.get("model_type", "deepseek_v41" if "compress_ratios" in config else "yoco")
    if kind == "yoco":
        return YocoModel(path)
    if not str(kind).startswith("deepseek"):
        raise ValueError(
            f"{path}: model_type {kind!r} has no known consumer layers; known are yoco and deepseek_v41"
        )
    try:
        return DeepseekModel(path, config)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None


def truncation_of(
    model: Model, mode: str, keep_tokens: KeepTokens, num_speculative_tokens: int | None
) -> Truncation:
    """K for a model; ValueError as in `resolve_truncation`."""
    drafts = model.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
    config = YocoConfig.from_additional_config({CONFIG_KEY: {"truncation": mode, "keep_tokens": keep_tokens}})
    return resolve_truncation(config, model.topology, max_backtracking=drafts + 1)


def prompt_lengths(model: Model, given: Sequence[int] | None) -> list[int]:
    """The lengths asked for, or the usual ones that the model takes."""
    return list(
        given or [n for n in PROMPT_TOKENS if n <= model.max_prompt_tokens] or [model.max_prompt_tokens]
    )


# --- The command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="directory or JSON file of a config, or one of " + ", ".join(model_presets()),
    )
    parser.add_argument(
        "--truncation", choices=get_args(Mode), default="compact", help="mode to judge (default: compact)"
    )
    parser.add_argument(
        "--keep-tokens",
        metavar="{N,min,exact}",
        type=arguments.keep_tokens,
        default="min",
        help="K, rows that consumer layers run on (default: min)",
    )
    add_shared_arguments(parser)
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", *KV_DTYPES), default="auto", help="default: that of the config"
    )
    add_json_argument(parser)


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that describe requests."""
    parser.add_argument(
        "--prompt-tokens",
        metavar="N",
        action=arguments.List,
        item=arguments.positive,
        help="prompt lengths to tabulate, in tokens; separated by commas or spaces",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        metavar="N",
        type=arguments.non_negative,
        help="draft length, which moves K (default: 0, or that of DeepSeek-V4.1's own draft layers)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report. Exit code: see the module docstring."""
    model = load_model(args.model)
    truncation = truncation_of(model, args.truncation, args.keep_tokens, args.num_speculative_tokens)
    report = describe(model, truncation, prompt_lengths(model, args.prompt_tokens), args.kv_cache_dtype)
    emit("inspect", render(report), report, args.json)
    return 0 if all(check["ok"] for check in report["placement"].values()) else 1


def describe(model: Model, truncation: Truncation, lengths: Sequence[int], kv_dtype: str) -> dict[str, Any]:
    """The JSON document without command and version; KV per request is that of the longest prompt.

    Raises:
        ValueError: for a KV dtype that the model cannot have.
    """
    notes: list[str] = []
    cost: ModelCost | None = None
    try:
        cost = model.cost()
    except ValueError as error:
        notes.append(str(error))
    sizes: dict[str, Any] = {"kv": None, "state": None}
    try:
        sizes = model.kv(truncation, max(lengths), kv_dtype)
    except ValueError as error:
        if kv_dtype != "auto":
            raise
        notes.append(str(error))
    mode, topology = truncation.mode, model.topology
    return {
        "model": str(model.path),
        "family": model.family,
        "notes": notes,
        "topology": model.describe_topology(),
        "placement": {
            "draft_targets": _placement(check_draft_targets, topology, model.draft_targets, mode),
            "engram_layers": _placement(check_engram_layers, topology, model.engram_layers, mode),
        },
        "truncation": {
            "mode": mode,
            "keep_tokens": truncation.keep_tokens,
            "keep_tokens_rule": truncation.keep_tokens_rule,
            "lossless": truncation.lossless,
            "min": truncation.minimum_keep_tokens,
            "exact": truncation.exact_keep_tokens,
            "num_speculative_tokens": truncation.max_backtracking - 1,
            "max_backtracking": truncation.max_backtracking,
        },
        **sizes,
        "flops_unit": cost and cost.flops_unit,
        "work": [_work(truncation, cost, length) for length in lengths],
    }


def _work(truncation: Truncation, cost: ModelCost | None, length: int) -> dict[str, Any]:
    off, on = Prefill(length), Prefill(length, truncation.mode, truncation.keep_tokens)
    rows_off, rows = (layer_rows(truncation.topology, prefill) for prefill in (off, on))
    flops_off, flops = (cost.of(prefill).total_flops if cost else None for prefill in (off, on))
    return {
        "prompt_tokens": length,
        "layer_rows_off": rows_off,
        "layer_rows": rows,
        "layer_rows_removed": 1 - rows / rows_off,
        "flops_off": flops_off,
        "flops": flops,
        "flops_removed": None if flops is None or flops_off is None else 1 - flops / flops_off,
    }


def _placement(
    check: Callable[..., None], topology: LayerTopology, layers: Sequence[int], mode: str
) -> dict[str, Any]:
    reason = None
    try:
        check(topology, layers, mode=mode)
    except ValueError as error:
        reason = str(error)
    return {"layers": list(layers), "ok": reason is None, "reason": reason}


def _segments(sources: Sequence[int]) -> list[dict[str, Any]]:
    """Each source with the layers that use it; -1 stands for no source."""
    return [
        {"source": source, "layers": [layer for layer, s in enumerate(sources) if s == source]}
        for source in sorted({*sources} - {-1})
    ]


def _kv_totals(dtype: str, length: int, groups: Sequence[KvGroup]) -> dict[str, Any]:
    persisted = [group for group in groups if group.persisted]
    return {
        "dtype": dtype,
        "prompt_tokens": length,
        "groups": [vars(group) | {"layers": list(group.layers)} for group in groups],
        "persisted_bytes_per_token": sum(g.bytes_per_token for g in persisted if g.held_tokens is None),
        "persisted_bytes_per_request": sum(g.bytes_per_request for g in persisted),
        "dropped_bytes_per_request": sum(g.bytes_per_request for g in groups if not g.persisted),
    }


# --- Text ---


def render(report: Mapping[str, Any]) -> str:
    """The report for people."""
    sections = [_render_topology(report), _render_truncation(report)]
    if report["kv"]:
        sections.append(_render_kv(report))
    sections.append(_render_work(report))
    sections += [f"note: {note}" for note in report["notes"]]
    return "\n\n".join(sections)


def _render_topology(report: Mapping[str, Any]) -> str:
    topology = report["topology"]
    window = topology["window"]
    sliding = topology["sliding_producers"]
    full = [n for n in topology["producers"] if n not in sliding]
    sources = topology["kv_sources"]
    readers = "; ".join(f"{entry['source']} read by {ranges(entry['layers'])}" for entry in sources)
    hidden = "the shared hidden" if topology["swa_share_hidden"] else "the layer's own input"
    rows = [
        ("producers", ranges(topology["producers"]), f"every prompt row; boundary at {topology['boundary']}"),
        ("  full attention", ranges(full), ""),
        ("  sliding window", ranges(sliding), f"{window} keys" if sliding else ""),
        ("consumers", ranges(topology["consumers"]), "the last K prompt rows"),
        (
            "  sliding window",
            ranges(topology["consumer_swa_layers"]),
            f"{window} keys, K/V of {hidden}" if topology["consumer_swa_layers"] else "",
        ),
        ("KV sources", ranges(entry["source"] for entry in sources), readers),
    ]
    if report["family"] == "deepseek_v41":
        rows[1:3] = [("  sliding window", ranges(sliding), f"{window} keys" if sliding else "")]
        ratios = topology["compress_ratios"]
        rows += [
            ("compression", "", _runs(ratios)),
            ("index sources", ranges(e["source"] for e in topology["index_sources"]), ""),
            ("candidate source", ranges([] if (c := topology["candidate_source"]) is None else [c]), ""),
            ("draft layers", ranges(topology["draft_layers"]), ""),
        ]
    for name, check in report["placement"].items():
        verdict = f"refused: {check['reason']}" if not check["ok"] else "allowed" if check["layers"] else ""
        rows.append((name.replace("_", " "), ranges(check["layers"]), verdict))
    title = f"{report['model']} ({report['family']}, {topology['num_layers']} layers)"
    return table(("", "layers", ""), rows, title)


def _render_truncation(report: Mapping[str, Any]) -> str:
    truncation = report["truncation"]
    text = (
        f"K: min {truncation['min']:,}, exact {truncation['exact']:,}"
        f" (speculative tokens {truncation['num_speculative_tokens']}, B = {truncation['max_backtracking']})"
    )
    if truncation["mode"] == "off":
        return f"{text}\nmode off: nothing is truncated"
    quality = "lossless" if truncation["lossless"] else "an approximation"
    return f"{text}\nmode {truncation['mode']}, K = {truncation['keep_tokens']:,}: {quality}"


def _render_kv(report: Mapping[str, Any]) -> str:
    kv, state = report["kv"], report["state"]
    length = kv["prompt_tokens"]
    rows = [
        (
            group["group"],
            ranges(group["layers"]) if group["layers"] else "",
            group["bytes_per_token"] or None,
            _held(group),
            group["bytes_per_request"],
            "persisted" if group["persisted"] else "dropped",
        )
        for group in kv["groups"]
    ]
    rows.append(("persisted", "", kv["persisted_bytes_per_token"], "", kv["persisted_bytes_per_request"], ""))
    rows.append(("dropped", "", None, "", kv["dropped_bytes_per_request"], ""))
    headers = ("KV", "layers", "bytes/token", "tokens held", f"bytes/request, L = {length:,}", "")
    text = table(headers, rows, f"KV cache, {kv['dtype']}")
    if state:
        text += (
            f"\nstate: {state['persisted_bytes']:,} of {state['total_bytes']:,} bytes persisted;"
            f" {state['stored_rings']} rings stored, {state['dropped_rings']} dropped, of"
            f" {state['ring_tokens']} tokens each"
        )
    return text


def _held(group: Mapping[str, Any]) -> str:
    if group["held_tokens"] is not None:
        return f"last {group['held_tokens']:,}"
    return "all" if group["bytes_per_token"] else ""


def _render_work(report: Mapping[str, Any]) -> str:
    rows = [
        (
            work["prompt_tokens"],
            work["layer_rows_off"],
            work["layer_rows"],
            percent(work["layer_rows_removed"]),
            percent(work["flops_removed"]),
        )
        for work in report["work"]
    ]
    headers = (
        "prompt tokens",
        "layer rows, off",
        report["truncation"]["mode"],
        "rows removed",
        "FLOPs removed",
    )
    return table(headers, rows, "Prefill work, one prompt in one chunk")


def _runs(values: Sequence[int]) -> str:
    """``0 x2, 2 x18`` for two zeros and eighteen twos."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return ", ".join(f"{value} x{count}" for value, count in runs)

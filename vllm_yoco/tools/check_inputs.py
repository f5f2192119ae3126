"""The model and the prompts of ``check`` and ``error``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_yoco.config import CONFIG_KEY, Truncation, YocoConfig, resolve_truncation
from vllm_yoco.presets import find_model_config, model_presets
from vllm_yoco.tools.engine_process import MAX_NUM_SEQS
from vllm_yoco.topology import LayerTopology

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig
    from vllm_yoco.models.deepseek_v41_reference import V41Config

MODEL_HELP = f"checkpoint directory; or, for random weights, a config file or one of {', '.join(model_presets())}"

SHARED_PARAMETERS = 200_000_000
"""Up to here several engines of a model may be up at a time, and the dense float32 model is no burden."""

PROMPTS_HELP = (
    'JSON Lines (*.jsonl): each line a string or an object with "prompt" or "prompt_token_ids", and "continuation" or'
    ' "continuation_token_ids" if the tokens that follow are given; any other file is one prompt a line'
)


@contextmanager
def open_model(name: str, seed: int = 0) -> Iterator[tuple[str, YocoModelConfig]]:
    """Checkpoint directory and config of a MODEL argument.

    Raises:
        ValueError: for a model that is neither, or not of the ``yoco`` family.
    """
    from vllm_yoco.models import checkpoint  # loads torch

    if Path(name).is_dir():
        config = _directory_config(Path(name))
        if not config.topology().num_consumers:
            raise ValueError(f"{name}: has no consumer layers, so there is nothing to truncate.")
        yield str(Path(name).resolve()), config
        return
    config = checkpoint.read_model_config(find_model_config(name))
    with tempfile.TemporaryDirectory(prefix="vllm-yoco-model-") as folder:
        checkpoint.save_checkpoint(folder, config, checkpoint.random_state_dict(config, seed))
        yield folder, config


def _directory_config(directory: Path) -> YocoModelConfig:
    from vllm_yoco.models.config import YocoModelConfig

    file = directory / "config.json"
    try:
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{directory}: no checkpoint here, it needs a config.json.") from None
    if model_type != YocoModelConfig.model_type:
        raise ValueError(f"{file}: model_type={model_type!r} must be {YocoModelConfig.model_type!r}.")
    return YocoModelConfig.from_pretrained(directory)


def read_deepseek_v41(name: str) -> V41Config | None:
    """The config of a tiny DeepSeek-V4.1 model, for the dense float32 reference; None for any other model.

    Raises:
        ValueError: for a config that the reference does not cover, a model that is not tiny, or a directory with
            weights, which are in a format of their own.
    """
    folder = Path(name)
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        is_v41 = config.get("model_type") == "deepseek_v41"
    except (OSError, ValueError, AttributeError):
        return None  # another kind of MODEL, or what open_model has a message for
    if not is_v41:
        return None
    from vllm_yoco.models.deepseek_v41_reference import V41Config, parameter_count  # loads torch

    if folder.is_dir() and any(folder.glob("*.safetensors")):
        raise ValueError(f"{name}: weights of DeepSeek-V4.1 are not read, only random ones made. Name the config.json.")
    try:
        read = V41Config.read(config)
        count = parameter_count(read)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if count > SHARED_PARAMETERS:
        raise ValueError(
            f"{path}: {count:,} parameters are too many for the dense float32 reference, which takes up to"
            f" {SHARED_PARAMETERS:,}. Reduce the sizes; the layers may stay as they are."
        )
    return read


def resolve_keeps(text: str, topology: LayerTopology) -> list[Truncation]:
    """``min,64,exact`` as truncations of a model, K ascending, without repeats.

    Raises:
        ValueError: for a K that the model does not allow.
    """
    found: dict[int, Truncation] = {}
    for keep in text.split(","):
        settings = {"truncation": "compact", "keep_tokens": keep.strip()}
        truncation = resolve_truncation(YocoConfig.from_additional_config({CONFIG_KEY: settings}), topology)
        found.setdefault(truncation.keep_tokens, truncation)
    return [found[keep] for keep in sorted(found)]


def kv_cache_bytes(config: YocoModelConfig, max_model_len: int) -> int:
    """Enough KV cache for a full batch of the longest requests, in bytes, whatever the block size."""
    topology = config.topology()
    layers = topology.boundary + len(topology.kv_source_layers) + len(topology.swa_layers)
    per_token = layers * 2 * config.num_key_value_heads * config.head_dim * 4
    # Groups of layers are padded to one size, and requests to blocks.
    return max(64 << 20, 2 * MAX_NUM_SEQS * (max_model_len + 512) * per_token)


@dataclass(frozen=True)
class Prompt:
    """Token ids; ``continuation`` is what follows, where that is given."""

    tokens: tuple[int, ...]
    continuation: tuple[int, ...] | None = None


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Prompt]:
    """Prompts of these lengths, no two of which share a prefix of more than chance."""
    streams = [np.random.default_rng([seed, length]) for length in lengths]
    return [
        Prompt(tuple(int(token) for token in stream.integers(0, vocab_size, length)))
        for stream, length in zip(streams, lengths, strict=True)
    ]


def read_prompts(path: str | Path, model: str, vocab_size: int, max_prompt_tokens: int | None) -> list[Prompt]:
    """Prompts of a file (see ``PROMPTS_HELP``), cut to ``max_prompt_tokens`` each, without repeats.

    Raises:
        ValueError: for a line that is no prompt, or a token outside the vocabulary.
        OSError: for a file that cannot be read.
    """
    lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path}: holds no prompt.")
    encode = _Encoder(model)
    prompts = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, prompt {number}"
        entry: Any = line
        if Path(path).suffix == ".jsonl":
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: is not JSON: {error}") from None
        if isinstance(entry, str):
            entry = {"prompt": entry}
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: must be a string or an object, not {type(entry).__name__}.")
        tokens = encode(entry, "prompt", where)
        if not tokens:
            raise ValueError(f'{where}: has no "prompt" and no "prompt_token_ids".')
        follows = encode(entry, "continuation", where)
        outside = [t for t in (*tokens, *(follows or ())) if not 0 <= t < vocab_size]
        if outside:
            raise ValueError(f"{where}: token {outside[0]} is not in the vocabulary of {vocab_size}.")
        # Text follows the end of a prompt, so a prompt is cut at its beginning.
        prompts.append(Prompt(tokens[-max_prompt_tokens:] if max_prompt_tokens else tokens, follows))
    return list(dict.fromkeys(prompts))


class _Encoder:
    def __init__(self, model: str) -> None:
        self._model = model
        self._tokenizer: Any = None

    def __call__(self, entry: dict[str, Any], key: str, where: str) -> tuple[int, ...] | None:
        """Token ids under ``key``: given as such, or as text. None for neither."""
        ids = entry.get(f"{key}_token_ids")
        if ids is not None:
            if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                raise ValueError(f"{where}: {key}_token_ids must be a list of integers.")
            return tuple(ids)
        text = entry.get(key)
        if text is None:
            return None
        if not isinstance(text, str):
            raise ValueError(f"{where}: {key} must be a string.")
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            from vllm_yoco.models.config import YocoModelConfig

            # Left to find the config itself, transformers warns that it does not know the model type.
            config = YocoModelConfig.from_pretrained(self._model)
            self._tokenizer = AutoTokenizer.from_pretrained(self._model, config=config)
        return tuple(self._tokenizer(text, add_special_tokens=key == "prompt")["input_ids"])

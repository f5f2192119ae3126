"""Checkpoints of the ``yoco`` family: weight names, random weights, the byte tokenizer, reading and writing.

A checkpoint directory holds what vLLM and transformers expect:

    config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json

The tokenizer is byte level, so that it needs no training and reads any text: ids 0..255 are the bytes, 256 is
``<bos>``, 257 ``<eos>``, 258 ``<pad>``, and further ids of the vocabulary are unused special tokens. Encoding puts
``<bos>`` first; the chat template writes its own. The special tokens' spellings in a text are read as those tokens,
as usual (``split_special_tokens=True`` reads them as bytes).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from vllm_yoco.models.config import YocoModelConfig

ARCHITECTURE = "YocoForCausalLM"
BOS, EOS, PAD = 256, 257, 258
WEIGHTS_FILE = "model.safetensors"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def read_model_config(path: str | PathLike[str]) -> YocoModelConfig:
    """The model config in a JSON file.

    Raises:
        ValueError: for a file that is no JSON object, another model type, an unknown key (a mistyped one would
            otherwise silently mean its default), or an inconsistent model.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold a JSON object of model settings, not {type(values).__name__}.")
    if values.setdefault("model_type", YocoModelConfig.model_type) != YocoModelConfig.model_type:
        raise ValueError(f"{path}: model_type={values['model_type']!r} must be {YocoModelConfig.model_type!r}.")
    known = YocoModelConfig().to_dict().keys() | {"pad_token_id"}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ValueError(f"{path}: unknown keys {unknown}; known keys are {sorted(known)}.")
    del values["model_type"]
    try:
        return YocoModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parameter_shapes(config: YocoModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint; projections are [outputs, inputs], without biases.

    Input columns of a consumer's ``o_proj`` with SWA: all global heads, then all SWA heads.
    """
    topology = config.topology()
    hidden, middle = config.hidden_size, config.intermediate_size
    q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        swa = topology.has_swa(i)
        layer = {"input_layernorm": (hidden,), "self_attn.q_proj": (q_size, hidden)}
        if i < topology.boundary or i in topology.kv_source_layers:
            layer |= {"self_attn.k_proj": (kv_size, hidden), "self_attn.v_proj": (kv_size, hidden)}
        if swa:
            layer |= {"self_attn.swa_q_proj": (q_size, hidden)}
            layer |= {"self_attn.swa_k_proj": (kv_size, hidden), "self_attn.swa_v_proj": (kv_size, hidden)}
        layer |= {
            "self_attn.o_proj": (hidden, q_size * (2 if swa else 1)),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (middle, hidden),
            "mlp.up_proj": (middle, hidden),
            "mlp.down_proj": (hidden, middle),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def parameter_count(config: YocoModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def random_state_dict(config: YocoModelConfig, seed: int) -> dict[str, Tensor]:
    """Random float32 weights, a function of ``config`` and ``seed`` alone.

    Normal with ``initializer_range``; the projections that write to the residual stream are divided by
    sqrt(2N), so that its scale does not grow with depth. With ``initializer_range`` near hidden ** -0.5 every
    projection keeps the scale of its normalised input: attention is peaked enough for a single hidden key to
    show in the logits, as tests of truncation need.
    """
    residual = (2 * config.num_hidden_layers) ** -0.5
    state = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            state[name] = torch.ones(shape)
            continue
        scale = config.initializer_range
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= residual
        # One stream per tensor: a change to one layer leaves the others as they were.
        stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
        state[name] = torch.from_numpy(stream.standard_normal(shape, dtype=np.float32)).mul_(scale)
    return state


def check_state_dict(config: YocoModelConfig, state_dict: Mapping[str, Tensor]) -> None:
    """ValueError unless the tensors are exactly those of the model, by name and shape."""
    shapes = parameter_shapes(config)
    problems = [f"missing {name}" for name in shapes if name not in state_dict]
    problems += [f"unknown {name}" for name in state_dict if name not in shapes]
    problems += [
        f"{name} has shape {list(tensor.shape)}, must be {list(shapes[name])}"
        for name, tensor in state_dict.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"the weights do not fit the config: {'; '.join(problems[:3])}{more}")


def byte_tokenizer(vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Tokenizer of the module docstring.

    Raises:
        ValueError: if ``vocab_size`` has no room for the bytes and the special tokens.
    """
    if vocab_size <= PAD:
        raise ValueError(
            f"vocab_size={vocab_size}: the byte tokenizer needs at least {PAD + 1} ids (256 bytes, <bos>, <eos>"
            f" and <pad>). Set vocab_size to {PAD + 1} or more."
        )
    # ByteLevel spells a printable Latin-1 byte as itself and the others, in order, as characters above 255.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {char: ord(char) for char in alphabet if ord(char) < 256}
    others = sorted(set(range(256)) - set(ids.values()))
    ids |= dict(zip((char for char in alphabet if char not in ids), others, strict=True))

    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<pad>", *(f"<unused{i}>" for i in range(PAD + 1, vocab_size))]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(directory: str | PathLike[str], config: YocoModelConfig, state_dict: Mapping[str, Tensor]) -> None:
    """Write a complete checkpoint, weights in the config's dtype (float32 if it names none).

    Raises:
        ValueError: for weights that do not fit the config, or a vocabulary too small for the tokenizer.
    """
    check_state_dict(config, state_dict)
    tokenizer = byte_tokenizer(config.vocab_size, config.max_position_embeddings)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    config.architectures, config.dtype = [ARCHITECTURE], dtype
    config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS, EOS, PAD
    config.save_pretrained(directory)
    generation: dict[str, Any] = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    text = json.dumps(generation, indent=2) + "\n"
    (directory / "generation_config.json").write_text(text, encoding="utf-8")
    tokenizer.save_pretrained(directory)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state_dict.items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors creates its file for the owner alone, but a server often runs as somebody else.
    (directory / WEIGHTS_FILE).chmod((directory / "config.json").stat().st_mode)


def load_checkpoint(directory: str | PathLike[str]) -> tuple[YocoModelConfig, dict[str, Tensor]]:
    """Config and weights (as stored) of a checkpoint; the weights may be split over several safetensors files.

    Raises:
        ValueError: without config or weights, or where they do not fit each other.
    """
    directory = Path(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not (directory / "config.json").is_file() or not files:
        raise ValueError(f"{directory}: no checkpoint here, it needs config.json and *.safetensors.")
    config = YocoModelConfig.from_pretrained(directory)
    state_dict: dict[str, Tensor] = {}
    for file in files:
        state_dict |= load_file(file)
    check_state_dict(config, state_dict)
    return config, state_dict

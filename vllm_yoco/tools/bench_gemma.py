"""The closest that vLLM has by itself: KV-sharing fast prefill on a Gemma 4 of the same shape.

The upper layers of such a model (``num_kv_shared_layers``) read the KV of a lower layer, and with
``--kv-sharing-fast-prefill`` vLLM runs them on the rows that are sampled, and on no other row of the step. It serves
models whose upper layers have no KV of their own, so the comparison takes a ``yoco`` model without consumer windows.
Weights are dummies: the comparison is of time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_yoco.tools.bench_engine import BenchEngine
from vllm_yoco.tools.bench_report import ALTERNATIVE, ALTERNATIVE_OFF

if TYPE_CHECKING:
    from vllm_yoco.models.config import YocoModelConfig


@contextmanager
def model_of_shape(config: YocoModelConfig) -> Iterator[str]:
    """Directory with the config of a Gemma 4 whose layers have the sizes of ``config``'s."""
    topology = config.topology()
    windows = [config.producer_window(layer) for layer in range(topology.boundary)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    settings = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "global_head_dim": config.head_dim,
        "sliding_window": max([window or 0 for window in windows]) or config.max_position_embeddings,
        "layer_types": [*kinds, *["full_attention"] * topology.num_consumers],
        "num_kv_shared_layers": topology.num_consumers,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32",
    }
    with tempfile.TemporaryDirectory(prefix="vllm-yoco-gemma4-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        yield folder


def engines(like: BenchEngine, model: str) -> dict[str, BenchEngine]:
    """Without and with fast prefill; all else as ``like``."""
    return {
        name: replace(
            like,
            name=name,
            model=model,
            truncation=None,
            options=(*like.options, ("load_format", "dummy"), ("kv_sharing_fast_prefill", fast)),
        )
        for name, fast in ((ALTERNATIVE_OFF, False), (ALTERNATIVE, True))
    }

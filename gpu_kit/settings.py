"""Environment and engine options of the stages: what is set, where, and why. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KIT, REHEARSAL = "kit", "rehearsal"

ENV_MODE = "YOCO_GPU_KIT"
"""``kit`` on a bundle's vLLM without extensions; ``kit rehearsal`` for the same on a CPU; unset on a full vLLM."""

ENV_OPTIONS = "YOCO_GPU_LLM_OPTIONS"
"""JSON object: options that every engine of tests/gpu and of the stages gets."""

COMMON = {
    # The engine in the test's own process: its scheduler and its caches are looked at.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Nothing may wait for a network that is not there.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Triton multiplies float32 in TF32 unless told not to, which is 1e-3 off; float32 tests compare at 2e-3 nat.
    "TRITON_F32_DEFAULT": "ieee",
}

WITHOUT_EXTENSIONS = {
    # vLLM takes FlashInfer for granted on CUDA; its sampler would be imported for greedy requests too.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

OPTIONS_WITHOUT_EXTENSIONS: dict[str, Any] = {
    # The one backend that is Triton throughout, the write to the KV cache included.
    "attention_backend": "TRITON_ATTN",
    # Every custom op in its PyTorch form; nothing goes through Inductor, whose API vLLM patches by torch version.
    "compilation_config": {"mode": 0, "custom_ops": ["none"]},
    "kernel_config": {
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"], "gelu_and_mul_sparse": ["native"]}
    },
}


def environment(
    *, site: Path | None, project: Path, rehearsal: bool, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of a stage's process. ``site`` is where a bundle was installed, None for a full vLLM."""
    env = dict(os.environ if base is None else base) | COMMON
    path = [str(project)]
    if site is not None:
        env |= WITHOUT_EXTENSIONS
        env[ENV_MODE] = f"{KIT} {REHEARSAL}" if rehearsal else KIT
        env[ENV_OPTIONS] = json.dumps(OPTIONS_WITHOUT_EXTENSIONS)
        # Caches stay in the kit's own folder, and a second run in the same visit finds them.
        env |= {"TRITON_CACHE_DIR": str(site / ".triton"), "VLLM_CACHE_ROOT": str(site / ".vllm")}
        path.insert(0, str(site))
    if rehearsal:
        env |= {ENV_MODE: f"{KIT if site else ''} {REHEARSAL}".strip(), "OMP_NUM_THREADS": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env["TRITON_INTERPRET"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))])
    return env


def is_rehearsal() -> bool:
    return REHEARSAL in os.environ.get(ENV_MODE, "").split()


def without_extensions() -> bool:
    return KIT in os.environ.get(ENV_MODE, "").split()


def llm_options() -> dict[str, Any]:
    """Options for every engine of this process's stage, from the environment.

    Raises:
        ValueError: the variable holds no JSON object.
    """
    text = os.environ.get(ENV_OPTIONS, "{}")
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(
            f"{ENV_OPTIONS}={text!r}: must be a JSON object of LLM arguments, for example"
            ' {"attention_backend": "TRITON_ATTN"}'
        )
    return options

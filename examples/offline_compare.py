#!/usr/bin/env python3
"""What truncation changes on a model, offline: ``off`` against ``compact`` with K = min and K = exact.

    python examples/offline_compare.py [MODEL]

MODEL is a checkpoint directory of the ``yoco`` family (default: random weights in the shape of ``ced-tiny``). For
each setting the table has the prefill rows that one consumer layer ran on, summed over the prompts, how many greedy
completions equal those of ``off``, and how far the first token's distribution is off over the whole vocabulary.
Prefix caching is off, so that each run computes every prompt.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

PROMPTS = [topics[name][:length] for name, length in (("strings", 900), ("import", 700), ("execmodel", 20))]
MAX_TOKENS = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"truncation": "off"},
    "compact, K min": {"truncation": "compact", "keep_tokens": "min"},
    "compact, K exact": {"truncation": "compact", "keep_tokens": "exact"},
}


def random_model(directory: Path) -> str:
    from vllm_yoco.models import checkpoint
    from vllm_yoco.presets import find_model_config

    config = checkpoint.read_model_config(find_model_config("ced-tiny"))
    checkpoint.save_checkpoint(directory, config, checkpoint.random_state_dict(config, seed=0))
    return str(directory)


def generate(model: str, yoco: dict[str, Any]) -> tuple[list[Any], int]:
    """Completions of ``PROMPTS``, and the rows that one consumer layer ran on."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=2048,  # more than the prompts have: every prompt is one chunk
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**28,
        max_logprobs=-1,
        worker_extension_cls="vllm_yoco.worker_extension.YocoWorkerExtension",
        additional_config={"yoco": yoco},
    )

    def computed_rows() -> int:
        return int(llm.collective_rpc("yoco_computed_rows")[0][0])

    before = computed_rows()
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=-1, ignore_eos=True)
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    # Each decode step after the prefill runs on one row a request.
    rows = computed_rows() - before - len(PROMPTS) * (MAX_TOKENS - 1)
    return [output.outputs[0] for output in outputs], rows


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference of the first token's log-probabilities, in nats."""
    first, other = ours.logprobs[0], theirs.logprobs[0]
    return max(abs(first[token].logprob - other[token].logprob) for token in first)


def main() -> int:
    lines = [f"{'':18}{'prefill rows':>14}{'equal completions':>20}{'first token, max |delta logprob|':>36}"]
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else random_model(Path(folder) / "ced-tiny")
        baseline: list[Any] = []
        for name, yoco in SETTINGS.items():
            completions, rows = generate(model, yoco)
            baseline = baseline or completions
            pairs = list(zip(completions, baseline, strict=True))
            equal = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
            furthest = max(difference(*pair) for pair in pairs)
            lines.append(f"{name:18}{rows:>14,}{f'{equal} of {len(pairs)}':>20}{furthest:>36.1e}")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

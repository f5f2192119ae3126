"""Train a small byte-level CED model on a CPU: two checkpoints that show what training does about truncation.

The model (``configs/models/ced-byte-small.json``) has 4 sliding-window producers and 4 consumers, each with global
KV and a sliding window of its own, W = 128. Producers reach 4 (W - 1) = 508 bytes back at most, so what lies farther
away can only be read from the global KV. Half of the training bytes are real text, the other half a recall task:

    @kfw=482;                   a record, scattered among the lines of text: three letters, three digits
    ?kfw=482;                   a question, anywhere after its record; the three digits are the answer
    ...text...\\n?kfw=          a prompt of the evaluation, answered by the next three bytes

Text is the documentation in ``pydoc_data.topics``, which every CPython carries (PSF licence); repeated paragraphs are
dropped, the last tenth is held out. Records and questions are drawn per sequence. Bytes that cannot be predicted (a
record, the key of a question) have no loss, those of an answer have ``ANSWER_WEIGHT`` times that of text.

Two variants with the same steps, data and schedule:

    plain     every row of every sequence exists in the consumers
    replay    the same until ``--replay-from``; from there on half of the sequences are split into a prompt of L bytes
              and its continuation, both L and K at random. Rows below s_keep = L - K exist for the producers and the
              global KV alone: nothing sees them through a consumer window, and they have no loss. This is decoder
              replay in post-training, as in the DeepSeek-V4.1 report.

    python examples/train_ced.py --variant plain --output models/ced-byte-plain
    python examples/train_ced.py --variant replay --output models/ced-byte-replay

Step i draws from a generator seeded by (seed, i), so an interrupted run that is started again continues as if nothing
had happened. The state of the run is OUTPUT.state.pt; it is removed on success.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

from vllm_yoco.models.checkpoint import BOS, random_state_dict, read_model_config, save_checkpoint
from vllm_yoco.models.config import YocoModelConfig
from vllm_yoco.models.reference import DenseYoco

CONFIG = Path(__file__).parents[1] / "configs/models/ced-byte-small.json"
VARIANTS = ("plain", "replay")
KEY_BYTES = ANSWER_BYTES = 3
RECORD_BYTES = QUESTION_BYTES = len(b"@kfw=482;")
ANSWER_WEIGHT = 4.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# Data


def load_text() -> tuple[Bytes, Bytes]:
    """Training and validation text, without paragraphs that occur twice; its size depends on the Python version."""
    paragraphs = dict[str, str]()
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    text = np.frombuffer("\n\n".join(paragraphs.values()).encode(), np.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def line_starts(text: Bytes) -> np.ndarray:
    return np.concatenate(([0], np.flatnonzero(text[:-1] == ord("\n")) + 1))


@dataclass
class Sequence_:
    """Tokens of a sequence and the loss weight of each of them as a target."""

    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, content: Iterable[int], weight: float) -> None:
        before = len(self.tokens)
        self.tokens.extend(content)
        self.weights.extend([weight] * (len(self.tokens) - before))


def new_record(rng: Generator, taken: dict[bytes, bytes]) -> bytes:
    """Draw a key that is not taken and its answer; they are added to ``taken``."""
    while (key := bytes(rng.integers(ord("a"), ord("z") + 1, KEY_BYTES, np.uint8))) in taken:
        pass
    taken[key] = bytes(rng.integers(ord("0"), ord("9") + 1, ANSWER_BYTES, np.uint8))
    return key


def make_training_sequence(rng: Generator, length: int, text: Bytes, starts: np.ndarray) -> Sequence_:
    """``<bos>``, then lines of text with lines of records and questions between them; ``length`` tokens.

    How many there are, and how many of them are questions, is drawn per sequence. The last quarter asks only.
    """
    sequence, taken = Sequence_([BOS], [0.0]), dict[bytes, bytes]()
    position = int(rng.choice(starts))
    density, questions = rng.uniform(0, 5), rng.uniform(0.2, 0.8)
    while len(sequence.tokens) < length:
        end = position + 1
        while end < len(text) and text[end - 1] != ord("\n"):
            end += 1
        sequence.add(text[position:end].tolist(), 1.0)
        position = end if end < len(text) else 0
        events = rng.poisson(density)
        for _ in range(events):
            asks = len(taken) > 1 and (len(sequence.tokens) > 0.75 * length or rng.random() < questions)
            if asks:
                key = list(taken)[rng.integers(len(taken))]
                sequence.add(b"?" + key, 0.0)
                sequence.add(b"=", 1.0)
                sequence.add(taken[key], ANSWER_WEIGHT)
            else:
                key = new_record(rng, taken)
                sequence.add(b"@" + key, 0.0)
                sequence.add(b"=", 1.0)
                sequence.add(taken[key], 0.0)
            sequence.add(b";", 1.0)
        if events:
            sequence.add(b"\n", 0.0)
    return Sequence_(sequence.tokens[:length], sequence.weights[:length])

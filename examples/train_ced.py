"""Train a small byte-level CED model on a CPU: two checkpoints that show what training does about truncation.

The model (``configs/models/ced-byte-small.json``) has 4 sliding-window producers and 4 consumers, each with global
KV and a sliding window of its own, W = 128. Producers reach 4 (W - 1) = 508 bytes back at most, so what lies farther
away can only be read from the global KV. About half of the training bytes are text, the others a recall task:

    @kfw482;                    a record, scattered among the lines of text: three letters, three digits
    ?kfw482;                    a question, anywhere after its record; the three digits are the answer
    ...text...\\n?kfw           a prompt of the evaluation, answered by the next three bytes

Text is the documentation in ``pydoc_data.topics``, which every CPython carries (PSF licence); repeated paragraphs are
dropped, the last tenth is held out. Records and questions are drawn per sequence. Bytes that cannot be predicted (a
record, the key of a question) have no loss, those of an answer have ``ANSWER_WEIGHT`` times that of text.

Two variants with the same steps, data and schedule:

    plain     every row of every sequence exists in the consumers
    replay    the same for 70 % of the steps; then half of the sequences are split into a prompt of L bytes and its
              continuation, both L and K at random. Rows below s_keep = L - K exist for the producers and the global
              KV alone: nothing sees them through a consumer window, and they have no loss. This is decoder replay in
              post-training, as in the DeepSeek-V4.1 report.

    python examples/train_ced.py --variant plain --output models/ced-byte-plain --shared /tmp/shared.pt
    python examples/train_ced.py --variant replay --output models/ced-byte-replay --shared /tmp/shared.pt

``--shared`` spares the second run the steps that are the same. Step i draws from a generator seeded by (seed, i), so
an interrupted run that is started again continues as if nothing had happened. Its state is OUTPUT.state.pt, which is
removed on success.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import time
from collections.abc import Iterable, Sequence
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
from vllm_yoco.plan import exact_keep_tokens

CONFIG = Path(__file__).parents[1] / "configs/models/ced-byte-small.json"
VARIANTS = ("plain", "replay")
KEY_BYTES = ANSWER_BYTES = 3
RECORD_BYTES = QUESTION_BYTES = len(b"@kfw482;")
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


def line_starts(text: Bytes) -> np.ndarray[Any, np.dtype[np.intp]]:
    return np.concatenate(([0], np.flatnonzero(text[:-1] == ord("\n")) + 1))


@dataclass
class Sample:
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


def make_training_sample(rng: Generator, length: int, text: Bytes, starts: np.ndarray[Any, Any]) -> Sample:
    """``<bos>``, then lines of text with lines of records and questions between them; ``length`` tokens.

    How dense these are, and how many records there may be, is drawn per sequence: sequences with few records are
    what the task is learned from.
    """
    sample, taken = Sample([BOS], [0.0]), dict[bytes, bytes]()
    position = int(rng.choice(starts))
    density, records = rng.uniform(0, 8), int(2 ** rng.uniform(1, math.log2(max(4, length / 16))))
    while len(sample.tokens) < length:
        end = position + 1
        while end < len(text) and text[end - 1] != ord("\n"):
            end += 1
        sample.add(text[position:end].tolist(), 1.0)
        position = end if end < len(text) else 0
        events = rng.poisson(density)
        for _ in range(events):
            if len(taken) == records or (taken and rng.random() < 0.5):
                key = list(taken)[rng.integers(len(taken))]
                sample.add(b"?" + key, 0.0)
                sample.add(taken[key], ANSWER_WEIGHT)
            else:
                key = new_record(rng, taken)
                sample.add(b"@" + key + taken[key], 0.0)
            sample.add(b";", 1.0)
        if events:
            sample.add(b"\n", 0.0)
    return Sample(sample.tokens[:length], sample.weights[:length])


@dataclass
class RecallExample:
    """A prompt of the evaluation: the digits of one of its records are the answer.

    Attributes:
        prompt: tokens, ending in ``?kfw``.
        answer: ``ANSWER_BYTES`` tokens.
        gap: distance in tokens from the record to the question about it.
    """

    prompt: list[int]
    answer: list[int]
    gap: int


def make_recall_example(
    rng: Generator, length: int, *, text: Bytes, gap: int | None = None, records: int = 16
) -> RecallExample:
    """A prompt of exactly ``length`` tokens: text with records between its lines, then one question.

    Args:
        gap: from 9 (the record is the last line) to length - 5 (the first); None for any.
        records: number of records, the one in question included; fewer where they do not fit.
    """
    line, tail = RECORD_BYTES + 1, len(b"?kfw")
    if gap is None:
        gap = int(rng.integers(line, length - tail))
    if not line <= gap <= length - tail - 1:
        raise ValueError(f"gap={gap} must lie in {line}..{length - tail - 1} for length={length}.")
    taken = dict[bytes, bytes]()
    key = new_record(rng, taken)
    sizes = length - 1 - gap - tail, gap - line
    first = int(rng.binomial(records - 1, sizes[0] / max(1, sum(sizes))))
    before, between = (
        filler(rng, size, count, text, taken) for size, count in zip(sizes, (first, records - 1 - first), strict=True)
    )
    body = before + b"@" + key + taken[key] + b";\n" + between + b"?" + key
    return RecallExample([BOS, *body], list(taken[key]), gap)


def filler(rng: Generator, size: int, records: int, text: Bytes, taken: dict[bytes, bytes]) -> bytes:
    """``size`` bytes of text that end in a newline, with new records between its lines."""
    records = min(records, size // (2 * (RECORD_BYTES + 1)))
    plain = size - records * (RECORD_BYTES + 1)
    if plain <= 0:
        return b""
    start = int(rng.integers(len(text) - plain))
    lines = text[start : start + plain - 1].tobytes().decode("latin-1").split("\n")
    for place in sorted(rng.integers(0, len(lines), records), reverse=True):
        key = new_record(rng, taken)
        lines.insert(int(place), f"@{key.decode()}{taken[key].decode()};")
    return ("\n".join(lines) + "\n").encode("latin-1")


# Truncation


def draw_s_keep(rng: Generator, batch: int, length: int, window: int) -> Tensor:
    """[batch] lowest row that exists in the consumers; 0 (no truncation) for half of the sequences.

    For the others L is uniform over the sequence and K over window + 1 .. 3 window.
    """
    prompt = rng.integers(1, length + 1, batch)
    keep = rng.integers(window + 1, 3 * window + 1, batch)
    return torch.from_numpy(np.where(rng.random(batch) < 0.5, np.maximum(prompt - keep, 0), 0))


def loss_weights(weights: Tensor, s_keep: Tensor) -> Tensor:
    """Weights [B, T] of the targets of rows 0..T-1 without those of rows below s_keep [B]."""
    return weights * (torch.arange(weights.shape[1]) >= s_keep[:, None])


# Training


@dataclass(frozen=True)
class Plan:
    """Everything a run depends on; a state is continued under the same plan only.

    Attributes:
        lengths: (share of the steps, sequence length in tokens), in this order: the recall task is learned over short
            distances first.
        batch_tokens: tokens per step, whatever the length.
        replay_from: share of the steps after which ``replay`` truncates; before it both variants are equal.
    """

    variant: str = "plain"
    steps: int = 1000
    seed: int = 0
    batch_tokens: int = 2048
    lengths: tuple[tuple[float, int], ...] = ((0.4, 256), (0.8, 512), (1.0, 1024))
    replay_from: float = 0.7
    matrix_rate: float = 3e-3
    vector_rate: float = 3e-3
    warmup: int = 50

    def length(self, step: int) -> int:
        return next(length for share, length in self.lengths if step < share * self.steps or share == 1.0)

    def rate(self, step: int) -> float:
        """Factor on the learning rates: linear warm-up, then a half cosine down to 5 %."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2

    @property
    def parting(self) -> int:
        """The first step at which the variants differ."""
        return math.ceil(self.replay_from * self.steps)

    def truncates(self, step: int) -> bool:
        return self.variant == "replay" and step >= self.parting


class Trainer:
    """Muon on the matrices of the layers, AdamW on embedding and norms."""

    def __init__(self, config: YocoModelConfig, plan: Plan, text: Bytes) -> None:
        self.config, self.plan, self.text, self.starts = config, plan, text, line_starts(text)
        self.model = DenseYoco(config, random_state_dict(config, plan.seed))
        layers = [p for p in self.model.model.layers.parameters() if p.dim() == 2]
        inside = {id(p) for p in layers}
        others = [p for p in self.model.parameters() if id(p) not in inside]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(layers, lr=plan.matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.done, self.seconds, self.tokens = 0, 0.0, 0

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, T + 1], weights [B, T] of the targets, and s_keep [B]; a function of plan and step alone."""
        rng, length = np.random.default_rng([self.plan.seed, step]), self.plan.length(step)
        size = max(1, self.plan.batch_tokens // length)
        samples = [make_training_sample(rng, length + 1, self.text, self.starts) for _ in range(size)]
        tokens = torch.tensor([sample.tokens for sample in samples])
        weights = torch.tensor([sample.weights for sample in samples])[:, 1:]
        s_keep = torch.zeros(size, dtype=torch.int64)
        if self.plan.truncates(step):
            s_keep = draw_s_keep(rng, size, length, self.config.topology().consumer_window)
        return tokens, loss_weights(weights, s_keep), s_keep

    def step(self) -> dict[str, float]:
        """One update; returns its loss, bits per byte of text, and share of correct answer bytes."""
        started = time.process_time()
        for optimizer, peak in zip(self.optimizers, (self.plan.matrix_rate, self.plan.vector_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self.plan.rate(self.done)
        tokens, weights, s_keep = self.batch(self.done)
        logits = self.model(tokens[:, :-1], s_keep=s_keep)
        targets = tokens[:, 1:]
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
        loss = (entropy * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.done += 1
        self.tokens += targets.numel()
        self.seconds += time.process_time() - started
        with torch.no_grad():
            answers = weights == ANSWER_WEIGHT
            return {
                "loss": float(loss),
                "text_bits": float(entropy[weights == 1].mean()) / math.log(2),
                "answer_bytes": float((logits.argmax(-1) == targets)[answers].float().mean()),
            }

    def save_state(self, path: Path) -> None:
        state = {
            "plan": asdict(self.plan),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": (self.done, self.seconds, self.tokens),
        }
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load_state(self, path: Path) -> None:
        """ValueError if the state belongs to another plan; a ``plain`` state is one of ``replay`` until they part."""
        state = torch.load(path, weights_only=True)
        ours, theirs = asdict(self.plan), state["plan"]
        shared = state["counters"][0] <= self.plan.parting
        differ = [k for k in ours if ours[k] != theirs.get(k) and not (k == "variant" and shared)]
        if differ:
            raise ValueError(f"{path}: this run was started with another {', '.join(differ)}; remove it to start anew.")
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.done, self.seconds, self.tokens = state["counters"]


# Evaluation


@torch.inference_mode()
def evaluate_recall(
    model: DenseYoco,
    *,
    text: Bytes,
    length: int,
    gap: int | None = None,
    keep_tokens: int | None = None,
    records: int = 16,
    examples: int = 64,
    seed: int = 1,
) -> float:
    """Share of prompts answered exactly, as greedy decoding would; ``keep_tokens`` truncates at the prompt's end."""
    rng, right = np.random.default_rng([seed, length, gap or 0]), 0
    samples = [make_recall_example(rng, length, text=text, gap=gap, records=records) for _ in range(examples)]
    size = max(1, 8192 // length)
    for group in (samples[i : i + size] for i in range(0, examples, size)):
        # Greedy output equals the answer exactly if every byte of it is the likeliest after those before.
        tokens = torch.tensor([sample.prompt + sample.answer for sample in group])
        logits = model(tokens[:, :-1], num_prompt_tokens=length, keep_tokens=keep_tokens)
        right += int((logits[:, length - 1 :].argmax(-1) == tokens[:, length:]).all(-1).sum())
    return right / examples


@torch.inference_mode()
def evaluate_text(
    model: DenseYoco,
    *,
    text: Bytes,
    length: int = 1024,
    prompt: int | None = None,
    keep_tokens: int | None = None,
) -> float:
    """Bits per byte of pieces of ``length`` bytes, from a prompt's last row on, or of all rows."""
    pieces = [text[i : i + length].tolist() for i in range(0, len(text) - length + 1, length)]
    total, count, first = 0.0, 0, 0 if prompt is None else prompt - 1
    for i in range(0, len(pieces), 8):
        tokens = torch.tensor([[BOS, *piece] for piece in pieces[i : i + 8]])
        logits = model(tokens[:, :-1], num_prompt_tokens=prompt, keep_tokens=keep_tokens)[:, first:]
        targets = tokens[:, 1 + first :]
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return total / count / math.log(2)


@torch.inference_mode()
def evaluate_divergence(
    model: DenseYoco, *, text: Bytes, keep_tokens: Sequence[int], prompt: int = 768, pieces: int = 32
) -> list[tuple[float, float]]:
    """Mean KL divergence in nats of truncated from full prefill, at the last prompt row and at the first decode row.

    One pair for each of the given K.
    """
    totals = torch.zeros(len(keep_tokens), 2, dtype=torch.float64)
    starts = np.linspace(0, len(text) - prompt, pieces).astype(int)
    for group in (starts[i : i + 8] for i in range(0, pieces, 8)):
        tokens = torch.tensor([[BOS, *text[first : first + prompt].tolist()] for first in group])
        full, *cut = (
            model(tokens, num_prompt_tokens=prompt, keep_tokens=keep)[:, -2:].double().log_softmax(-1)
            for keep in (None, *keep_tokens)
        )
        totals += torch.stack([(full.exp() * (full - rows)).sum((0, -1)) for rows in cut])
    return [(last, decode) for last, decode in (totals / pieces).tolist()]


# Model card

GAPS = ((512, 32), (512, 200), (512, 400), (1024, 600), (1024, 900), (2048, 1500))
"""(prompt length, gap) of the recall table."""


def report(model: DenseYoco, text: Bytes, examples: int = 64) -> dict[str, Any]:
    """Figures of the model card: held-out text and recall, with every row and with the smallest K."""
    topology = model.config.topology()
    window = topology.window
    exact = exact_keep_tokens(topology.window, 1, topology.num_own_swa_layers, False)
    keep = window + 1
    figures: dict[str, Any] = {"keep_tokens": keep, "examples": examples, "text": evaluate_text(model, text=text)}
    keeps = (window // 16, window // 4, keep, 2 * window + 1, exact)
    pairs = evaluate_divergence(model, text=text, keep_tokens=keeps)
    figures["divergence"] = [(k, *pair) for k, pair in zip(keeps, pairs, strict=True)]
    figures["recall"] = []
    for length, gap in GAPS:
        both = [
            evaluate_recall(model, text=text, length=length, gap=gap, keep_tokens=k, examples=examples)
            for k in (None, keep)
        ]
        figures["recall"].append((length, gap, *both))
    return figures


def model_card(trainer: Trainer, figures: dict[str, Any], command: str) -> str:
    plan, text, config = trainer.plan, trainer.text, trainer.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    recall = "\n".join(f"| {length} | {gap} | {a:.1%} | {b:.1%} |" for length, gap, a, b in figures["recall"])
    divergence = "\n".join(f"| {k} | {last:.1e} | {decode:.1e} |" for k, last, decode in figures["divergence"])
    digest = hashlib.sha256(text.tobytes()).hexdigest()[:16]
    truncation = (
        f"From step {plan.parting:,} on, half of the sequences were trained under truncation with random L and K."
        if plan.variant == "replay"
        else "Every row of every sequence exists in the consumers: training knew no truncation."
    )
    keep, count = figures["keep_tokens"], figures["examples"]
    millions, minutes = trainer.tokens / 1e6, trainer.seconds / 60
    producers, window = config.n_prefill_layer, config.sliding_window
    return f"""---
license: apache-2.0
tags: [vllm-yoco, yoco, byte-level]
---
# ced-byte-{plan.variant}

A byte-level producer/consumer model to demonstrate and test prefill truncation; too small for anything else.

- Model: {parameters:,} parameters in float32; {producers} sliding-window producers and
  {config.num_hidden_layers - producers} consumers with global KV and a window of their own, W = {window}.
- {truncation}
- Data: {len(text):,} bytes of `pydoc_data.topics` of CPython {platform.python_version()}
  (SHA-256 {digest}...), and a synthetic recall task, see `examples/train_ced.py`.
- Licence: Apache-2.0 for the weights; the text is part of Python (PSF-2.0).
- Training: {trainer.done:,} steps, {millions:.2f} M tokens, seed {plan.seed}, {minutes:.0f} CPU minutes.
- Held-out text: {figures["text"]:.3f} bits/byte.

Recall: share of {count} prompts answered exactly, one of 16 records asked for (chance: 0.1 %); lengths in bytes.

| prompt | gap | every row | K = {keep} |
|---|---|---|---|
{recall}

What truncation changes on held-out text: mean KL divergence from full prefill in nats, prompts of 768 bytes. K below
{keep} is refused in serving; the last K is the smallest lossless one (what is left is rounding).

| K | last prompt row | first decode row |
|---|---|---|
{divergence}

To reproduce (rounding in floating point depends on the CPU, the text on the version of Python):

    {command}
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small byte-level CED model.")
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--config", type=Path, default=CONFIG, help="model config")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--shared", type=Path, help="file for the state at which the variants part: plain writes, replay reads it"
    )
    parser.add_argument("--save-every", type=int, default=25, metavar="STEPS")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    text, held_out = load_text()
    plan = Plan(variant=options.variant, steps=options.steps, seed=options.seed)
    trainer = Trainer(read_model_config(options.config), plan, text)
    output = options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    state, shared = output.with_name(f"{output.name}.state.pt"), options.shared
    source = shared if plan.variant == "replay" and not state.exists() else state
    if source and source.exists():
        trainer.load_state(source)
        print(f"continuing from {source} at step {trainer.done}", flush=True)
    figures = dict[str, float]()
    while trainer.done < plan.steps:
        for name, value in trainer.step().items():
            figures[name] = 0.9 * figures.get(name, value) + 0.1 * value
        done = trainer.done
        if done % options.save_every == 0 or done == plan.steps:
            trainer.save_state(state)
            values = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
            print(f"step {done}  length {plan.length(done - 1)}  {values}  {trainer.seconds:.0f} s", flush=True)
        if shared and done == plan.parting and plan.variant == "plain":
            trainer.save_state(shared)
        if done % (10 * options.save_every) == 0:
            bits = evaluate_text(trainer.model, text=held_out)
            recall = evaluate_recall(trainer.model, text=held_out, length=512, gap=400, examples=32)
            print(f"held out: {bits:.3f} bits/byte, recall {recall:.0%} over 400 bytes", flush=True)
    save_checkpoint(output, trainer.config, trainer.model.state_dict())
    command = f"python examples/train_ced.py --variant {plan.variant} --steps {plan.steps} --seed {plan.seed}"
    card = model_card(trainer, report(trainer.model, held_out), f"{command} --output models/ced-byte-{plan.variant}")
    (output / "README.md").write_text(card, encoding="utf-8")
    state.unlink(missing_ok=True)
    print(card)


if __name__ == "__main__":
    main()

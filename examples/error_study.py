"""The measurements of docs/error_study.md: what truncated prefill costs the two trained models of ``models/``.

    python examples/error_study.py

For every model and prompt length L, full prefill (``off``) and every K are run on the same prompts by the dense
float32 model:

    text     ``TEXT_PROMPTS`` passages of the held-out text, each continued by its own next ``TEXT_BYTES`` bytes. These
             bytes are the same for every L, which only changes how much comes before them; no two passages share any.
    recall   ``RECALL_PROMPTS`` questions for one of 16 records that lies at least ``RECALL_GAP`` bytes before it, and
             below s_keep for every K up to 256.

K below W + B is refused in serving. The model is defined there all the same, so these K are measured as well, and
marked in every table and plot.

What is measured goes to docs/error_study/results.json, by prompt, after every (model, L). A cell that is there, from
the same text, weights and settings, is not measured again (``--fresh`` does), so an interrupted run continues where it
was. Plots and the tables in docs/error_study.md are then drawn from that file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from train_ced import (  # the neighbouring example
    BOS,
    Bytes,
    DenseYoco,
    exact_keep_tokens,
    load_text,
    make_recall_example,
)

from vllm_yoco.models.reference import KeyValueCache
from vllm_yoco.tools.error_metrics import token_errors
from vllm_yoco.tools.report import new_figure, progress

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "error_study.md"
MODELS = (ROOT / "models" / "ced-byte-plain", ROOT / "models" / "ced-byte-replay")

LENGTHS = (512, 1024, 2048)
BELOW_MINIMUM = (8, 32, 64)
SERVED = (140, 192, 256)
"""Besides W + B and the smallest lossless K."""

TEXT_PROMPTS, TEXT_BYTES = 48, 128
RECALL_PROMPTS, RECALL_GAP = 128, 264
BATCH_TOKENS = 8192
SEED = 0
RESAMPLES = 10_000
OFF = "off"
SERVED_MODES = (OFF, "compact")

Array = np.ndarray[Any, Any]


# Measuring


def keep_sweep(model: DenseYoco) -> list[int]:
    """Every K of the study, ascending: three that serving refuses, then W + 1, ..., exact."""
    topology = model.topology
    exact = exact_keep_tokens(topology.window, 1, topology.num_own_swa_layers, topology.swa_share_hidden)
    return sorted({*BELOW_MINIMUM, topology.window + 1, *SERVED, exact})


@torch.inference_mode()
def continuation_logits(
    model: DenseYoco, prompts: Tensor, continuations: Tensor, keeps: Iterable[int]
) -> Iterator[Tensor]:
    """Logits [B, J, vocabulary] of the J continuation tokens: of full prefill, then of every K.

    Truncation changes neither producers nor global KV. So full prefill is run once and its cache is cut at s_keep =
    L - K; K rows and the continuation are run on top of that. Window KV below s_keep stays in the cache, unseen.

    Args:
        prompts: tokens [B, L].
        continuations: tokens [B, J].
    """
    length, tokens, cache = prompts.shape[1], torch.cat((prompts, continuations), 1)[:, :-1], KeyValueCache()
    yield model(tokens, cache=cache)[:, length - 1 :]
    for keep in keeps:
        first = max(0, length - keep)
        head = KeyValueCache(first, {name: (k[:, :first], v[:, :first]) for name, (k, v) in cache.entries.items()})
        yield model(tokens[:, first:], num_prompt_tokens=length, keep_tokens=keep, cache=head)[:, length - 1 - first :]


def text_prompts(text: Bytes, length: int) -> tuple[Tensor, Tensor]:
    """``TEXT_PROMPTS`` prompts [n, L] and their continuations [n, J]; the latter do not depend on L."""
    first = np.linspace(max(LENGTHS) - 1, len(text) - TEXT_BYTES, TEXT_PROMPTS).astype(int)
    prompts = [[BOS, *text[start - length + 1 : start].tolist()] for start in first]
    return torch.tensor(prompts), torch.tensor([text[start : start + TEXT_BYTES].tolist() for start in first])


def recall_prompts(text: Bytes, length: int) -> tuple[Tensor, Tensor]:
    """``RECALL_PROMPTS`` prompts [n, L] and their answers [n, 3]."""
    rng = np.random.default_rng([SEED, length])
    gaps = rng.integers(RECALL_GAP, length - 4, RECALL_PROMPTS)
    examples = [make_recall_example(rng, length, text=text, gap=int(gap)) for gap in gaps]
    return torch.tensor([e.prompt for e in examples]), torch.tensor([e.answer for e in examples])


def batches(prompts: Tensor, continuations: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = max(1, BATCH_TOKENS // prompts.shape[1])
    return list(zip(prompts.split(size), continuations.split(size), strict=True))


def measure_text(model: DenseYoco, text: Bytes, length: int, keeps: Sequence[int]) -> dict[str, Any]:
    """By K, a value for each prompt, means over its continuation; nats.

    ``nll`` of off is the negative log-likelihood a byte, ``delta_nll`` of a K its change. ``kl`` is KL(off || K),
    ``kl_first`` that of the first byte alone, which comes out of the prefill; ``top1`` the share of bytes whose
    likeliest prediction is unchanged.
    """
    cell: dict[str, Any] = {OFF: {"nll": []}}
    cell |= {str(keep): {"delta_nll": [], "kl": [], "kl_first": [], "top1": []} for keep in keeps}
    for prompts, continuations in progress(batches(*text_prompts(text, length)), f"text, L={length}"):
        off, *others = (
            logits.log_softmax(-1).numpy() for logits in continuation_logits(model, prompts, continuations, keeps)
        )
        for i, tokens in enumerate(continuations.tolist()):
            for keep, rows in zip(keeps, others, strict=True):
                errors, figures = token_errors(off[i], rows[i], tokens), cell[str(keep)]
                figures["delta_nll"].append(rounded((errors.nll - errors.nll_off).mean()))
                figures["kl"].append(rounded(errors.kl.mean()))
                figures["kl_first"].append(rounded(errors.kl[0]))
                figures["top1"].append(rounded(errors.top1.mean()))
            cell[OFF]["nll"].append(round(float(errors.nll_off.mean()), 5))
    return cell


def measure_recall(model: DenseYoco, text: Bytes, length: int, keeps: Sequence[int]) -> dict[str, str]:
    """By K, ``1`` for each prompt answered exactly, as greedy decoding would, ``0`` for the others."""
    names = (OFF, *map(str, keeps))
    cell = dict.fromkeys(names, "")
    for prompts, answers in progress(batches(*recall_prompts(text, length)), f"recall, L={length}"):
        for name, logits in zip(names, continuation_logits(model, prompts, answers, keeps), strict=True):
            # Greedy output equals the answer exactly if every byte of it is the likeliest after those before.
            cell[name] += "".join("01"[right] for right in (logits.argmax(-1) == answers).all(-1).tolist())
    return cell


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


# The file of results


def settings(text: Bytes) -> dict[str, Any]:
    """What a cell depends on besides the weights."""
    return {
        "held_out_sha256": hashlib.sha256(text.tobytes()).hexdigest(),
        "text": [TEXT_PROMPTS, TEXT_BYTES],
        "recall": [RECALL_PROMPTS, RECALL_GAP],
        "seed": SEED,
    }


def study(folders: Iterable[Path], results_file: Path, *, fresh: bool = False) -> dict[str, Any]:
    """Measure what ``results_file`` lacks, and return all that it then has."""
    _, text = load_text()
    results: dict[str, Any] = {"settings": settings(text), "models": {}}
    if results_file.exists() and not fresh:
        earlier = json.loads(results_file.read_text(encoding="utf-8"))
        if earlier["settings"] == results["settings"]:
            results = earlier
        else:
            print(f"{results_file} is from another text or other settings: all of it is measured again.")
    for folder in folders:
        model = DenseYoco.from_pretrained(folder)
        digest, keeps = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(), keep_sweep(model)
        entry = results["models"].get(folder.name)
        if entry is None or (entry["weights_sha256"], entry["keeps"]) != (digest, keeps):
            entry = {"weights_sha256": digest, "window": model.topology.window, "keeps": keeps, "lengths": {}}
            results["models"][folder.name] = entry
        for length in LENGTHS:
            if str(length) in entry["lengths"]:
                print(f"{folder.name}, L={length}: measured before")
                continue
            entry["lengths"][str(length)] = {
                "text": measure_text(model, text, length, keeps),
                "recall": measure_recall(model, text, length, keeps),
            }
            write(results_file, results)
            print(f"{folder.name}, L={length}: measured", flush=True)
    return results


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    # A line for each list of numbers: readable, and a change shows where it is.
    text = re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), json.dumps(results, indent=1))
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


# Statistics


def bootstrap(values: Array, statistic: Callable[[Array], Array]) -> tuple[float, float, float]:
    """Statistic and the ends of its 95 % interval: percentile bootstrap over prompts.

    Args:
        values: [series, prompts]; the series are resampled together, as pairs are.
        statistic: of the means [series, ...] over the prompts.
    """
    draw = np.random.default_rng(SEED).integers(0, values.shape[1], (RESAMPLES, values.shape[1]))
    low, high = np.quantile(statistic(values[:, draw].mean(-1)), (0.025, 0.975))
    return float(statistic(values.mean(-1))), float(low), float(high)


def wilson(successes: int, trials: int) -> tuple[float, float, float]:
    """Share and the ends of its 95 % interval by Wilson's score, which is not empty at 0 and 1 either."""
    z, share = 1.959964, successes / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low, high = ((middle + sign * half) / (1 + z * z / trials) for sign in (-1, 1))
    return share, max(0.0, low), min(1.0, high)


def text_figures(cell: dict[str, Any], keep: int | str) -> dict[str, tuple[float, float, float]]:
    """Perplexity a byte, its change as a factor, KL, and unchanged top-1 share; each with its interval."""
    off = np.array([cell[OFF]["nll"]])
    if keep == OFF:
        return {"perplexity": bootstrap(off, lambda m: np.exp(m[0]))}
    figures = {name: np.array([values]) for name, values in cell[str(keep)].items()}
    return {
        "perplexity": bootstrap(off + figures["delta_nll"], lambda m: np.exp(m[0])),
        "factor": bootstrap(figures["delta_nll"], lambda m: np.exp(m[0])),
        **{name: bootstrap(figures[name], lambda m: m[0]) for name in ("kl", "kl_first", "top1")},
    }


def recall_figures(cell: dict[str, str], keep: int | str) -> dict[str, Any]:
    """Share answered with its interval; against off, prompts that are answered no more or only now."""
    answers, off = cell[str(keep)], cell[OFF]
    pairs = list(zip(off, answers, strict=True))
    lost, gained = pairs.count(("1", "0")), pairs.count(("0", "1"))
    return {
        "share": wilson(answers.count("1"), len(answers)),
        "lost": lost,
        "gained": gained,
        "changed": wilson(lost + gained, len(pairs)),
    }


def both_variants(results: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plain, replay = (results["models"][folder.name] for folder in MODELS)
    return plain, replay


# Tables


def label(entry: dict[str, Any], keep: int | str) -> str:
    keeps = entry["keeps"]
    if keep == OFF:
        return "off"
    rule = {entry["window"] + 1: " (min)", keeps[-1]: " (exact)"}.get(int(keep), "")
    return f"*{keep}*" if int(keep) <= entry["window"] else f"{keep}{rule}"


def interval(figures: tuple[float, float, float], form: Callable[[float], str]) -> str:
    return "{} [{}, {}]".format(*map(form, figures))


def signed_percent(factor: float) -> str:
    return f"{round(100 * (factor - 1), 3) + 0.0:+.3f}%"  # + 0.0: no -0.000


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def text_table(entry: dict[str, Any]) -> str:
    rows = []
    for length, cell in entry["lengths"].items():
        for keep in (OFF, *reversed(entry["keeps"])):
            figures = text_figures(cell["text"], keep)
            row = [length, label(entry, keep), interval(figures["perplexity"], lambda x: f"{x:.3f}")]
            if keep == OFF:
                row += ["", "", "", ""]
            else:
                row += [
                    interval(figures["factor"], signed_percent),
                    interval(figures["kl"], lambda x: f"{x:.1e}"),
                    f"{figures['kl_first'][0]:.1e}",
                    interval(figures["top1"], lambda x: f"{x:.2%}"),
                ]
            rows.append(row)
    return markdown(("L", "K", "perplexity a byte", "change", "KL", "KL of the first byte", "top-1 unchanged"), rows)


def recall_table(results: dict[str, Any]) -> str:
    rows = []
    pair = both_variants(results)
    for length in pair[0]["lengths"]:
        for keep in (OFF, *reversed(pair[0]["keeps"])):
            row = [length, label(pair[0], keep)]
            for entry in pair:
                figures = recall_figures(entry["lengths"][length]["recall"], keep)
                row.append(interval(figures["share"], lambda x: f"{x:.1%}"))
                row.append("" if keep == OFF else f"{figures['lost']} / {figures['gained']}")
            rows.append(row)
    return markdown(("L", "K", "plain", "lost / gained", "replay", "lost / gained"), rows)


def ratio_table(results: dict[str, Any]) -> str:
    """Mean KL of replay over that of plain, on the same prompts."""
    plain, replay = both_variants(results)
    rows = []
    for keep in reversed(plain["keeps"][:-1]):
        row = [label(plain, keep)]
        for length in plain["lengths"]:
            kl = np.array([entry["lengths"][length]["text"][str(keep)]["kl"] for entry in (plain, replay)])
            row.append(interval(bootstrap(kl, lambda m: m[1] / m[0]), lambda x: f"{x:.2f}"))
        rows.append(row)
    return markdown(("K", *(f"L = {int(length):,}" for length in plain["lengths"])), rows)


def served_table(results: dict[str, Any] | None) -> str:
    """Of the results of ``served_eval.py``: a line for each model and task."""
    if results is None:
        return "*Not measured.*"
    rows = []
    for name, modes in results["models"].items():
        for task in modes["off"]:
            cells = {mode: modes[mode][task] for mode in SERVED_MODES}
            verdicts = {mode: cell if isinstance(cell, str) else cell["verdicts"] for mode, cell in cells.items()}
            off, compact = (recall_figures(verdicts, mode) for mode in SERVED_MODES)
            shares = [interval(figures["share"], lambda x: f"{x:.1%}") for figures in (off, compact)]
            rows.append([name, task, str(len(verdicts["off"])), *shares, f"{compact['lost']} / {compact['gained']}"])
    return markdown(("model", "task", "prompts", "off", f"compact, K {results['keep_tokens']}", "lost / gained"), rows)


def tables(results: dict[str, Any], served: dict[str, Any] | None) -> dict[str, str]:
    plain, replay = both_variants(results)
    return {
        "text-plain": text_table(plain),
        "text-replay": text_table(replay),
        "recall": recall_table(results),
        "ratio": ratio_table(results),
        "served": served_table(served),
    }


def fill_in(document: str, blocks: dict[str, str]) -> str:
    """``document`` with the text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` replaced.

    Raises:
        ValueError: if it does not have each of the blocks once.
    """
    for name, block in blocks.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        document, count = pattern.subn(lambda found, block=block: f"{found[1]}\n{block}\n\n{found[2]}", document)
        if count != 1:
            raise ValueError(f"the document has the block {name!r} {count} times instead of once.")
    return document


# Plots


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """KL, perplexity and recall over K, a panel for each L."""

    def kl(cell: dict[str, Any], keep: int | str) -> tuple[float, float, float]:
        return text_figures(cell["text"], keep)["kl"]

    def change(cell: dict[str, Any], keep: int | str) -> tuple[float, float, float]:
        low, middle, high = (100 * (x - 1) for x in text_figures(cell["text"], keep)["factor"])
        return low, middle, high

    def recall(cell: dict[str, Any], keep: int | str) -> tuple[float, float, float]:
        low, middle, high = (100 * x for x in recall_figures(cell["recall"], keep)["share"])
        return low, middle, high

    plots = {"kl": ("KL(off || K), nats a byte", kl), "perplexity": ("change of perplexity, %", change)}
    plots["recall"] = "recall, %", recall
    files = []
    for name, (title, figures) in plots.items():
        pair = both_variants(results)
        lengths = list(pair[0]["lengths"])
        figure = new_figure(len(lengths))
        panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axes, length in zip(panels, lengths, strict=True):
            keeps = pair[0]["keeps"]
            for variant, entry in zip(("plain", "replay"), pair, strict=True):
                values = np.array([figures(entry["lengths"][length], keep) for keep in keeps])
                spread = np.abs(values[:, 1:] - values[:, :1]).T
                axes.errorbar(keeps, values[:, 0], spread, marker="o", markersize=4, capsize=3, label=variant)
                if name == "recall":
                    share = figures(entry["lengths"][length], OFF)[0]
                    axes.axhline(share, linestyle="--", linewidth=1, color=axes.lines[-1].get_color())
            axes.axvspan(keeps[0] * 0.85, pair[0]["window"] + 0.5, color="grey", alpha=0.2, label="refused in serving")
            axes.set_xscale("log", base=2)
            axes.set_xlim(keeps[0] * 0.85, keeps[-1] * 1.15)
            named = ["" if keep == SERVED[0] else str(keep) for keep in keeps]  # 140 is too close to 129 for a label
            axes.set_xticks(keeps, named, rotation=45)
            axes.minorticks_off()
            if name == "kl":
                axes.set_yscale("log")
            elif name == "recall":
                axes.set_ylim(-3, 103)
            axes.set_xlabel("kept rows K")
            axes.set_title(f"L = {int(length):,}", fontsize=10)
            axes.grid(True, alpha=0.3)
        panels[0].set_ylabel(title)
        panels[-1].legend(fontsize=8)
        folder.mkdir(parents=True, exist_ok=True)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], metadata={"Software": None})
    return files


def read_served(folder: Path) -> dict[str, Any] | None:
    """What ``served_eval.py`` left there."""
    file = folder / "served.json"
    served: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return served


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the error of truncated prefill on the trained models.")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="default: docs/error_study.md")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    folder = options.document.with_suffix("")
    results = study(MODELS, folder / "results.json", fresh=options.fresh)
    files = draw(results, folder)
    text = fill_in(options.document.read_text(encoding="utf-8"), tables(results, read_served(folder)))
    options.document.write_text(text, encoding="utf-8")
    print(f"wrote {options.document} and {', '.join(path.name for path in files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

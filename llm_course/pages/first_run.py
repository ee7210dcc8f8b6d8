"""Demos and plots of the page on the first run."""

import contextlib
import functools
import io
import lzma
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from llm_course.model.decoder import DecoderModel
from llm_course.text.token_file import TokenFile
from llm_course.text.tokenization import BaseTokenizer
from llm_course.training.callbacks import read_metrics
from llm_course.training.checkpointing import load_checkpoint
from llm_course.training.folder import continuation, load_run
from llm_course.training.sources import read_config
from llm_course.training.train import main

Curve = tuple[Sequence[float], Sequence[float]]


def train(settings: str, run: str, *words: str) -> str:
    """Call `llm-course train` with these settings, YAML, and return what it prints."""
    Path("settings.yaml").write_text(settings, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        with contextlib.redirect_stderr(io.StringIO()):
            status = main(["--config", "settings.yaml", "--run-dir", run, *words])
    if status != 0:
        raise RuntimeError(printed.getvalue())
    return printed.getvalue()


def sample_in(report: str) -> str:
    """The text that the model wrote at the end of its training, up to its last full stop."""
    return whole_sentences(report.split("---\n")[1].strip())


def whole_sentences(text: str) -> str:
    """The text up to its last full stop; all of it if it has none."""
    return text[: text.rfind(".") + 1] or text


def longest_sentences(text: str, count: int) -> list[str]:
    """The longest sentences of a text."""
    return sorted(re.split(r"(?<=[.!?])\s+", text), key=len)[-count:]


def untrained_model(run: str) -> DecoderModel:
    """The model of a run as it was before the first step."""
    config = read_config(f"{run}/config.yaml")
    _, tokenizer = load_run(run)
    torch.manual_seed(config.training.seed)
    return DecoderModel(replace(config.model, vocab_size=tokenizer.vocab_size))


def models_by_step(run: str) -> dict[int, DecoderModel]:
    """The models of a run: the untrained one, and one for each checkpoint."""
    models = {0: untrained_model(run).eval()}
    for folder in sorted(Path(run, "checkpoints").glob("step_*")):
        model = untrained_model(run)
        model.load_state_dict(load_checkpoint(folder)["model"])
        models[int(folder.name.removeprefix("step_"))] = model.eval()
    return models


def continue_text(run: str, model: DecoderModel, prompt: str) -> str:
    """`prompt` and what a model of this run adds to it, the same each time."""
    tokenizer = _tokenizer_of(run)
    return prompt + "".join(continuation(model, tokenizer, prompt, seed=0, max_new_tokens=100))


@functools.cache  # a control still works when the page has removed its folder
def _tokenizer_of(run: str) -> BaseTokenizer:
    return load_run(run)[1]


def show_texts(texts: Mapping[int, str], *, width: int = 34, lines: int = 16) -> None:
    """What the models of several steps write, side by side."""
    figure, axes = plt.subplots(1, len(texts), figsize=(9, 3.6))
    for ax, (step, text) in zip(axes, texts.items(), strict=True):
        paragraphs = [textwrap.wrap(paragraph, width) for paragraph in text.split("\n")]
        wrapped = [line for paragraph in paragraphs for line in paragraph or [""]]
        shown = "\n".join("".join(map(_drawable, line)) for line in wrapped[:lines])
        ax.text(0, 1, shown, va="top", fontsize=8, family="monospace", transform=ax.transAxes)
        ax.set_title(f"step {step}", fontsize=10, loc="left")
        ax.axis("off")
    figure.tight_layout()
    plt.show()


def _drawable(character: str) -> str:
    """A character that the plot's font has; a dollar sign would begin a formula."""
    if character == "$":
        return r"\$"
    return character if character.isascii() and character.isprintable() else "?"


def token_ids(run: str, split: str) -> Tensor:
    """The token ids of a run's `train` or `val` text: (N,)."""
    return torch.from_numpy(TokenFile(f"{run}/data/{split}.tokens")[:].astype(np.int64))


def text_of(run: str, split: str) -> str:
    """A run's `train` or `val` text."""
    _, tokenizer = load_run(run)
    return tokenizer.decode(token_ids(run, split).tolist())


def curve(run: str, key: str = "loss", *, steps: int | None = None) -> Curve:
    """A column of metrics.jsonl and its steps: (steps, values), of the first `steps` rows."""
    rows = [row for row in read_metrics(f"{run}/metrics.jsonl") if key in row][:steps]
    return [row["step"] for row in rows], [row[key] for row in rows]


def plot_curves(
    title: str,
    curves: Mapping[str, Curve],
    *,
    levels: Mapping[str, float] | None = None,
    ylabel: str = "loss (nats per token)",
) -> None:
    """Curves over optimizer steps, and named levels to compare them with."""
    plt.figure(figsize=(6, 2.8))
    for (name, (steps, values)), style in zip(curves.items(), ("-", "--", "-."), strict=False):
        marker = "o" if len(steps) < 20 else None
        plt.plot(steps, values, style, label=name, marker=marker, markersize=4)
    for name, level in (levels or {}).items():
        plt.axhline(level, color="gray", linestyle=":")
        plt.text(plt.xlim()[1], level, name, fontsize=8, ha="right", va="top")
    plt.xlabel("step")
    plt.ylabel(ylabel)
    plt.legend(fontsize=8)
    plt.title(title, fontsize=11)
    plt.show()


def plot_bits(title: str, bits: Mapping[str, float], *, ours: str) -> None:
    """A bar of bits per byte for each model, `ours` in another colour."""
    colors = ["tab:blue" if name == ours else "tab:gray" for name in bits]
    plt.figure(figsize=(6, 2.8))
    plt.bar_label(plt.bar(list(bits), list(bits.values()), color=colors), fmt="%.2f", fontsize=8)
    plt.xticks(fontsize=8)
    plt.ylabel("bits per byte (validation)")
    plt.ylim(0, 1.15 * max(bits.values()))
    plt.title(title, fontsize=11)
    plt.show()


def plot_next_tokens(prompt: str, probabilities: Tensor, pieces: Sequence[str]) -> None:
    """The likeliest next tokens, the likeliest first."""
    plt.figure(figsize=(6, 2.2))
    bars = plt.bar(range(len(pieces)), probabilities.tolist())
    plt.bar_label(bars, fmt="%.2f", fontsize=8)
    plt.xticks(range(len(pieces)), [repr(piece) for piece in pieces], fontsize=8)
    plt.ylim(0, 1.1)
    plt.ylabel("probability")
    plt.title(f"What comes after {prompt!r}", fontsize=10)
    plt.show()


def compressed_bits(text: bytes, after: bytes) -> float:
    """Bits per byte of `text` in an .xz file that already holds `after`."""
    return 8 * (len(lzma.compress(after + text)) - len(lzma.compress(after))) / len(text)


def optimizer_of(model: DecoderModel) -> torch.optim.AdamW:
    """PyTorch's AdamW, set as in the run of the page."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)


def row_order(num_rows: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    """The order in which a run reads its rows."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows)

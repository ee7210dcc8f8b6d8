"""What the page on data measures, trains and lets the reader move: splits, leaks, known answers."""

import html
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from IPython.display import display
from torch import Tensor, nn
from torch.utils.data import DataLoader

from llm_course.pages.tokens import stories
from llm_course.text.corpus import each_paragraph_once, split_documents
from llm_course.text.data import BaseDataModule

Run = tuple[str, ...]

# ------------------------------------------------------------------------------------------- leaks

SIZE = 8  # words in a run
HELD_OUT = 0.1
WAYS = ["documents", "paragraphs", "overlapping windows"]
PARAGRAPHS = ["as they are", "each once"]


def help_pages(*, once: bool = False) -> list[str]:
    """The pages that Python's `help` shows, if asked with each paragraph only where it is first."""
    pages = [text for _, text in sorted(topics.items())]
    return each_paragraph_once(pages) if once else pages


def runs_of(text: str, size: int = SIZE) -> list[Run]:
    """All runs of `size` neighbouring words."""
    words = text.split()
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


def _pieces(pages: Sequence[str], way: str) -> list[str]:
    """What a split deals out: documents, paragraphs, or windows that overlap by half."""
    if way == "documents":
        return list(pages)
    if way == "paragraphs":
        return [part for page in pages for part in page.split("\n\n") if part.strip()]
    words = " ".join(pages).split()
    return [" ".join(words[i : i + 100]) for i in range(0, len(words) - 100, 50)]


@cache
def split_pages(way: str, paragraphs: str, seed: int) -> tuple[list[str], list[str]]:
    """Training and validation texts of the help pages, split in one of several ways."""
    pieces = _pieces(help_pages(once=paragraphs == "each once"), way)
    return split_documents(pieces, val_fraction=HELD_OUT, seed=seed)


@cache
def _known(way: str, paragraphs: str, seed: int) -> set[Run]:
    return {run for text in split_pages(way, paragraphs, seed)[0] for run in runs_of(text)}


def _covered(text: str, known: set[Run]) -> list[bool]:
    """For each word, whether it lies in a run that is known."""
    covered = [False] * len(text.split())
    for start, run in enumerate(runs_of(text)):
        if run in known:
            covered[start : start + SIZE] = [True] * SIZE
    return covered


def best_known(texts: Sequence[str], known: set[Run]) -> str:
    """The text with the largest share of words in runs that are known."""
    return max(texts, key=lambda text: float(np.mean(_covered(text, known) or [False])))


def show_seen(text: str, known: set[Run], title: str, *, most: int = 130) -> None:
    """The first words of a text; what the training text holds too is marked."""
    words = list(zip(text.split(), _covered(text, known), strict=True))[:most]
    pieces = []
    plain = []
    for seen, group in groupby(words, key=lambda pair: pair[1]):
        passage = " ".join(word for word, _ in group)
        style = ' style="background:rgba(217,128,50,0.45)"' if seen else ""
        pieces.append(f"<span{style}>{html.escape(passage)}</span>")
        plain.append(f"[{passage}]" if seen else passage)
    shown = f"{html.escape(title)}<p>{' '.join(pieces)}</p>"
    display({"text/html": shown, "text/plain": f"{title}\n{' '.join(plain)}"}, raw=True)


def look_at_split(way: str, paragraphs: str, seed: int, text: int) -> None:
    """One of the validation texts of a split, and how much of all of them was in training."""
    known = _known(way, paragraphs, seed)
    val = [each for each in split_pages(way, paragraphs, seed)[1] if len(each.split()) > 40]
    found = [run in known for each in val for run in runs_of(each)]
    share = sum(found) / len(found)
    number = text % len(val)
    title = (
        f"{share:.0%} of the validation text was in the training text. Text {number + 1} of"
        f" {len(val)}:"
    )
    show_seen(val[number], known, title)


def plot_split_shares(seeds: Iterable[int] = range(4)) -> dict[str, float]:
    """The share of the validation text that was in training, by way of splitting."""
    shares = {}
    as_they_are, once = PARAGRAPHS
    cases = [(way, as_they_are) for way in WAYS[::-1]] + [(way, once) for way in WAYS[1::-1]]
    for way, paragraphs in cases:
        name = way if paragraphs == as_they_are else f"{way},\neach paragraph once"
        found: list[bool] = []
        for seed in seeds:
            known = _known(way, paragraphs, seed)
            val = split_pages(way, paragraphs, seed)[1]
            found += [run in known for text in val for run in runs_of(text)]
        shares[name] = sum(found) / len(found)
    plt.figure(figsize=(6, 2.8))
    colors = ["tab:orange"] * 3 + ["tab:blue"] * 2
    bars = plt.barh(list(shares), [100 * share for share in shares.values()], color=colors)
    plt.bar_label(bars, fmt="%.0f %%", fontsize=8, padding=2)
    plt.gca().invert_yaxis()
    plt.xlim(0, 112)
    plt.xlabel("share of the validation text that was in training (%)")
    plt.title("What you split by decides how much leaks (four splits each)", fontsize=10)
    plt.show()
    return shares


# ------------------------------------------------------------------------------- a known answer


def _scores(model: nn.Conv1d, ids: Tensor) -> Tensor:
    one_hot = F.one_hot(ids, 12).float().transpose(1, 2)  # (B, T) -> (B, V, T)
    # padded on the left, so that no position sees what comes later
    return model(F.pad(one_hot, (model.kernel_size[0] - 1, 0)))


def _run_epoch(
    model: nn.Conv1d, loader: DataLoader, *, learning_rate: float = 0.0
) -> tuple[float, float]:
    """The loss per target and the share that is right; with a rate, also a step each."""
    total = 0.0
    targets = 0
    right = 0
    for batch in loader:
        logits = _scores(model, batch["input_ids"])
        loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
        count = int((batch["labels"] != -100).sum())
        if learning_rate:
            parameters = list(model.parameters())
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.data -= learning_rate * gradient / max(count, 1)
        total += loss.item()
        targets += count
        right += int((logits.argmax(1) == batch["labels"]).sum())
    return total / targets, right / targets


def learn(data: BaseDataModule, epochs: int = 8) -> np.ndarray:
    """Train a model that sees a token and the three before it: (epochs + 1, 2), loss and share."""
    torch.manual_seed(0)
    model = nn.Conv1d(12, 12, kernel_size=4)
    curve = [_run_epoch(model, data.val_dataloader())]
    for epoch in range(epochs):
        _run_epoch(model, data.train_dataloader(epoch=epoch), learning_rate=2.0)
        curve.append(_run_epoch(model, data.val_dataloader()))
    return np.array(curve)


def plot_learning(curves: dict[str, np.ndarray]) -> None:
    """Share right and loss over epochs, with the values that were predicted before training."""
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.8))
    for (name, curve), style in zip(curves.items(), ("-", "--", "-."), strict=True):
        axes[0].plot(curve[:, 1], style, label=name)
        axes[1].plot(curve[:, 0], style)
    for ax, floors in zip(axes, ((0.10, 0.70, 1), (0, np.log(10))), strict=True):
        for floor in floors:
            ax.axhline(floor, color="gray", linewidth=0.8, linestyle=":")
    axes[0].set(xlabel="epochs", ylabel="share right, validation")
    axes[1].set(xlabel="epochs", ylabel="loss, validation (nats)")
    figure.legend(fontsize=8, ncols=3, loc="lower center")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    plt.show()


# ------------------------------------------------------------------------------------------- files


def plot_lengths(lengths: np.ndarray) -> None:
    """The share of documents, and of text, up to each length; `lengths` are sorted."""
    plt.figure(figsize=(6, 2.5))
    share = np.arange(1, len(lengths) + 1) / len(lengths)
    plt.semilogx(lengths, share, label="of the documents")
    plt.semilogx(lengths, lengths.cumsum() / lengths.sum(), "--", label="of the text")
    plt.axhline(0.5, color="gray", linestyle=":")
    plt.xlabel("characters in a document")
    plt.ylabel("share up to this length")
    plt.title("Most documents are short; most of the text is in the long ones", fontsize=10)
    plt.legend(fontsize=8)
    plt.show()


def write_stories(folder: Path, count: int = 60) -> list[str]:
    """Write stories into text files, one each, and return the pattern that names them."""
    folder.mkdir(parents=True)
    for number, text in enumerate(stories(count, "easy")):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8", newline="")
    return [f"{folder}/*.txt"]


def written_at(folder: Path) -> dict[str, int]:
    """When each file below a folder was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.*")}

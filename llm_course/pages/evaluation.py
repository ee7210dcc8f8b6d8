"""What the page of chapter 21 draws and measures: the storyteller, and a worse copy of it."""

import copy
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes

from llm_course.model.decoder import DecoderModel
from llm_course.training.evaluation import Bin, Interval, bootstrap, compare
from llm_course.training.evaluation_tasks import Item, Result
from llm_course.training.scoring import Scorer


@torch.no_grad()
def rounded(model: DecoderModel, *, bits: int) -> DecoderModel:
    """A copy whose matrices have `bits` bits for each number, and one scale for each row."""
    found = copy.deepcopy(model)
    most = 2 ** (bits - 1) - 1
    for parameter in found.parameters():
        if parameter.ndim == 2:
            scale = parameter.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
            parameter.copy_((parameter / scale).round() * scale)
    return found


def picked(scorer: Scorer, item: Item) -> str:
    """The choice that a model finds the likeliest."""
    scores = scorer.log_likelihoods((item.context, choice) for choice in item.choices)
    return max(zip(scores, item.choices, strict=True))[1]


def show_choices(item: Item, log_probs: Sequence[float]) -> None:
    """The probability of each choice among the choices; the right one is green."""
    shares = torch.tensor(log_probs, dtype=torch.float64).softmax(0).tolist()
    colours = ["#3a9d5d" if i == item.answer else "#8a8f98" for i in range(len(shares))]
    _, axes = plt.subplots(figsize=(7, 0.32 * len(shares) + 0.6))
    axes.barh(range(len(shares)), shares, color=colours)
    axes.set_yticks(range(len(shares)), [choice.strip() for choice in item.choices])
    axes.invert_yaxis()
    axes.set_xlabel("share of the probability")
    plt.show()


def show_resamples(means: Sequence[float], middle: Sequence[float]) -> None:
    """How often each mean came up in the resamples, and the two ends of the interval."""
    _, axes = plt.subplots(figsize=(7, 2.4))
    axes.hist(means, bins=np.arange(0.15, 1.1, 0.1).tolist(), color="#3b82f6", edgecolor="white")
    for end in middle:
        axes.axvline(end, color="#d0562f", linestyle="--")
    axes.set_xlabel("accuracy of a resample (red: the middle 95%)")
    axes.set_ylabel("resamples")
    plt.show()


def _bars(axes: Axes, rows: Mapping[str, Interval], marks: Sequence[float]) -> None:
    for place, one in enumerate(rows.values()):
        axes.plot([one.low, one.high], [place, place], color="#3b82f6", linewidth=3)
        axes.plot(one.value, place, "o", color="#3b82f6")
    if marks:
        places = range(len(rows))
        axes.plot(marks, places, "|", color="#d0562f", markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def show_tasks(results: Mapping[str, Result]) -> None:
    """The accuracy of each task and its interval; a tick where a blind guess would be."""
    _, axes = plt.subplots(figsize=(7, 0.5 * len(results) + 0.8))
    rows = {name: result.metrics["accuracy"] for name, result in results.items()}
    _bars(axes, rows, [result.metrics["chance"].value for result in results.values()])
    axes.set_xlabel("accuracy, with its 95% interval (red: a blind guess)")
    plt.show()


def show_kinds(result: Result, chance: float) -> None:
    """The same for the kinds of one task."""
    _, axes = plt.subplots(figsize=(7, 0.4 * len(result.by_kind) + 0.8))
    _bars(axes, result.by_kind, [chance] * len(result.by_kind))
    axes.set_xlabel("accuracy, with its 95% interval (red: a blind guess)")
    plt.show()


def show_differences(gaps: Mapping[str, Interval]) -> None:
    """The difference between two models' accuracies, and its interval, for each name."""
    _, axes = plt.subplots(figsize=(7, 0.5 * len(gaps) + 0.8))
    axes.axvline(0, color="#8a8f98")
    _bars(axes, gaps, [])
    axes.set_xlim(-0.7, 0.3)
    axes.set_xlabel("difference in accuracy, question by question, with its 95% interval")
    plt.show()


def show_reliability(bins: Sequence[Bin]) -> None:
    """Accuracy over confidence; a calibrated model is on the diagonal."""
    _, axes = plt.subplots(figsize=(4.2, 4))
    axes.plot([0, 1], [0, 1], color="#8a8f98", linestyle="--")
    sizes = [40 + 3 * one.count for one in bins]
    axes.scatter([b.confidence for b in bins], [b.accuracy for b in bins], s=sizes, alpha=0.7)
    for one in bins:
        axes.annotate(str(one.count), (one.confidence, one.accuracy), ha="center", va="center")
    axes.set_xlabel("how sure it is")
    axes.set_ylabel("how often it is right")
    plt.show()


def drawn(
    first: Result, second: Result, *, num: int, seed: int
) -> tuple[list[float], list[float], list[int]]:
    """The marks of two models on `num` of the questions, drawn by `seed`, and their groups."""
    chosen = np.random.default_rng(seed).permutation(len(first.scores))[:num]
    return (
        [first.scores[i] for i in chosen],
        [second.scores[i] for i in chosen],
        [first.groups[i] for i in chosen],
    )


def show_race(first: Result, second: Result, *, num: int, seed: int) -> None:
    """What a test of `num` questions would have said about two models; questions drawn by seed."""
    *marks, groups = drawn(first, second, num=num, seed=seed)
    alone = [bootstrap(one, groups=groups, resamples=500) for one in marks]
    both = compare(*marks, groups=groups)
    _, axes = plt.subplots(1, 2, figsize=(9, 2.2))
    _bars(axes[0], dict(zip(("16 bits", "rounded"), alone, strict=True)), [])
    axes[0].set_xlabel("accuracy of each")
    gap = both.difference
    axes[1].axvline(0, color="#8a8f98")
    axes[1].plot([gap.low, gap.high], [0, 0], color="#3b82f6", linewidth=3)
    axes[1].plot(gap.value, 0, "o", color="#3b82f6")
    axes[1].set_xlim(-0.5, 0.5)
    axes[1].set_yticks([])
    axes[1].set_xlabel("rounded minus 16 bits, question by question")
    plt.show()
    verdict = "undecided"
    if gap.low > 0 or gap.high < 0:
        verdict = "the rounded one is better" if gap.value > 0 else "the rounded one is worse"
    print(f"{num} questions: {verdict}; they differ on {both.disagree:.0%}")


def coverage(*, copies: int, grouped: bool, trials: int = 200, seed: int = 0) -> float:
    """How often a 95% interval holds the truth, if each of 40 questions is asked `copies` times."""
    rng = np.random.default_rng(seed)
    hits = 0
    for trial in range(trials):
        marks = np.repeat(rng.random(40) < 0.7, copies).astype(float).tolist()
        groups = [i // copies for i in range(len(marks))] if grouped else None
        one = bootstrap(marks, groups=groups, resamples=200, seed=trial)
        hits += one.low <= 0.7 <= one.high
    return hits / trials

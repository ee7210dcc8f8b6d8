"""The larger runs of chapter 22: their data, what is measured of them, and their plots."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from torch import Tensor, nn

from llm_course.model.decoder import DecoderModel
from llm_course.pages.scaling import Beginnings, Runs, StoryData, StoryTask, as_runs
from llm_course.text.batches import IGNORE_INDEX, PackedDataset
from llm_course.text.stories import read_story
from llm_course.text.tokenization import BaseTokenizer, load_tokenizer
from llm_course.text.wording import COLOURS, SIZES, THINGS
from llm_course.training.scaling import Law
from llm_course.training.task import StepOutput

RECORD = Path(__file__).with_name("larger_runs.json")
WEIGHED = Path(__file__).with_name("weighed_things.json")
SPLITS = ("train", "val")

# ------------------------------------------------------------------------------ for the runs


class PreparedStories(StoryData):
    """Stories that were written and tokenized once for many runs, in a folder that they share.

    Where the rows are longer than `LONGEST`, those of the validation aren't.
    """

    LONGEST = 768

    def prepare_data(self, *, expected: dict[str, Any] | None = None) -> None:
        """Nothing is left to do."""

    def setup(self) -> None:
        self.tokenizer = load_tokenizer(self.folder)
        self.vocab_size = self.tokenizer.vocab_size
        train, val = (
            np.lib.format.open_memmap(self.folder / f"{name}.npy", mode="r") for name in SPLITS
        )
        self.train_dataset = PackedDataset(train, self.sequence_length)
        length = min(self.sequence_length, self.LONGEST)
        separator_id = self.tokenizer.eos_token_id
        assert separator_id is not None
        self.val_dataset = Beginnings(val, separator_id, length, num_rows=self.NUM_STORIES)

    def fingerprint(self) -> dict[str, Any]:
        return self.batching() | {"tokenizer_sha256": self.tokenizer.sha256}


class PreparedTask(StoryTask):
    """Language modeling on `PreparedStories`; `data.tokenizer` names their folder."""

    def build_data(self) -> PreparedStories:
        data = self.config.data
        training = self.config.training
        return PreparedStories(
            data.tokenizer,
            level=data.stories.level,
            sequence_length=data.sequence_length,
            batch_size=training.batch_size,
            seed=training.seed,
        )


class ThingWeights:
    """Weights for a mean over tokens in which the name of a thing counts `weight`: its noun, and
    the adjectives in front of it. Any other token counts one.
    """

    ADJECTIVES = [*COLOURS, *(size.split()[-1] for size in SIZES)]  # "a small"

    def __init__(self, tokenizer: BaseTokenizer, weight: int):
        words = (THINGS, self.ADJECTIVES)
        self.is_noun, self.is_adjective = (token_mask(tokenizer, one) for one in words)
        self.weight = weight

    def _named(self, labels: Tensor) -> Tensor:
        """Which of the labels (B, T) belong to the name of a thing, as far as the row shows it."""
        is_adjective = self.is_adjective.to(labels.device)[labels[:, :-1]]
        named = self.is_noun.to(labels.device)[labels]
        for _ in range(2):  # a size and a colour
            named[:, :-1] |= named[:, 1:] & is_adjective
        return named

    def __call__(self, labels: Tensor) -> Tensor:
        """The weight of each label: (B, T), int64; 0 where there is no target."""
        is_target = labels != IGNORE_INDEX
        named = self._named(labels.where(is_target, 0))
        return is_target * (1 + named.long() * (self.weight - 1))

    def step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        """The weighed loss of a batch, and the sum of its weights."""
        labels = batch["labels"]
        weights = self(labels)
        inputs = {name: batch[name] for name in ("input_ids", "document_ids") if name in batch}
        logits = model(**inputs).logits.flatten(0, 1).float()
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
        return StepOutput((losses * weights.flatten()).sum(), weights.sum())


class WeighedTask(PreparedTask):
    """`PreparedTask` with a weighed mean as its loss, in which the name of a thing counts 30."""

    def build_data(self) -> PreparedStories:
        self.weights = ThingWeights(load_tokenizer(self.config.data.tokenizer), weight=30)
        return super().build_data()

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        return self.weights.step(model, batch)


def token_mask(tokenizer: BaseTokenizer, words: Iterable[str]) -> Tensor:
    """Which tokens (V,) are one of the words with a space in front.

    ValueError names a word that isn't a single token.
    """
    mask = torch.zeros(tokenizer.vocab_size, dtype=torch.bool)
    for word in words:
        ids = tokenizer.encode(f" {word}")
        if len(ids) != 1:
            raise ValueError(
                f"{f' {word}'!r} has {len(ids)} tokens and must have one: train the tokenizer on"
                " more stories"
            )
        mask[ids] = True
    return mask


# ------------------------------------------------------------------------------ kinds of words


class Share(NamedTuple):
    """What tokens of one kind contribute to a text's information, in bits per byte of the text."""

    floor: float  # the information in them
    above: float  # what the model pays on top of it
    tokens: int


class Piece(NamedTuple):
    """A token of a story."""

    token: int
    kind: str  # of its first letter
    bits: float  # the information in it
    end: int  # where it ends, in bytes


def pieces_of(tokenizer: BaseTokenizer, text: str, level: str) -> Iterator[Piece]:
    """Each token of a story, from its beginning."""
    reading = read_story(text, level)
    kinds = reading.kinds()
    bits = reading.bits_by_character()
    start = 0
    for token in tokenizer.encode(text, allow_special=False):
        piece = tokenizer.decode([token])
        first = start + len(piece) - len(piece.lstrip())
        end = start + len(piece)
        yield Piece(token, kinds[min(first, end - 1)], math.fsum(bits[start:end]), end)
        start = end


@torch.no_grad()
def nats_of_tokens(model: DecoderModel, tokenizer: BaseTokenizer, text: str) -> list[float]:
    """What the model pays for each token of a text, as far as its context goes."""
    device = next(model.parameters()).device
    ids = tokenizer.encode(text, allow_special=False)[: model.config.max_position_embeddings]
    row = torch.tensor([[tokenizer.eos_token_id, *ids]], device=device)
    logits = model(row[:, :-1]).logits[0].float()
    return (-logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]).tolist()


def shares_by_kind(
    model: DecoderModel,
    tokenizer: BaseTokenizer,
    texts: Iterable[str],
    level: str,
    *,
    most: float = math.inf,
) -> dict[str, Share]:
    """Where a model's loss comes from, by the kind of each token's first letter.

    The texts are read from their beginnings, up to `most` bytes and as far as the model's context
    goes. A kind such as "name, known" has no information: the story so far leaves one choice.
    """
    floor: defaultdict[str, float] = defaultdict(float)
    paid: defaultdict[str, float] = defaultdict(float)
    tokens: defaultdict[str, int] = defaultdict(int)
    num_bytes = 0
    for text in texts:
        read = 0
        nats = nats_of_tokens(model, tokenizer, text)
        for piece, nat in zip(pieces_of(tokenizer, text, level), nats, strict=False):
            if piece.end > most:
                break
            floor[piece.kind] += piece.bits
            paid[piece.kind] += nat / math.log(2)
            tokens[piece.kind] += 1
            read = piece.end
        num_bytes += read
    return {
        kind: Share(floor[kind] / num_bytes, (paid[kind] - floor[kind]) / num_bytes, tokens[kind])
        for kind in sorted(paid)
    }


# ------------------------------------------------------------------------------ recorded runs


@cache
def record() -> dict[str, Any]:
    """What scripts/larger_runs.py has recorded."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def sizes(stage: str = "sizes") -> dict[str, dict[str, Any]]:
    """The models of a stage by their size in words, from the smallest."""
    rows = sorted(record()[stage], key=lambda row: row["N"])
    return {f"{row['N'] / 1e6:.0f} million": row for row in rows}


def law_runs() -> Runs:
    """The larger runs of the law, where several seeds make one."""
    return as_runs(record()["law"])


def named_things(story: str) -> tuple[list[str], list[str]]:
    """The things in a story: those that its second paragraph introduces, and those named later."""
    paragraphs = story.split("\n\n")
    is_thing = re.compile(rf"\b({'|'.join(THINGS)})\b")
    return is_thing.findall(paragraphs[1]), is_thing.findall(" ".join(paragraphs[3:]))


@torch.no_grad()
def expected_next(
    model: DecoderModel, tokenizer: BaseTokenizer, text: str, count: int = 6
) -> list[tuple[str, float]]:
    """The likeliest tokens after a beginning, with their probabilities."""
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text)]])
    found = model(ids).logits[0, -1].softmax(-1).topk(count)
    tokens = [tokenizer.decode([token]) for token in found.indices.tolist()]
    return list(zip(tokens, found.values.tolist(), strict=True))


# ------------------------------------------------------------------------------ plots


def _plot_distances(axes: Axes, rows: Mapping[str, Mapping[str, Any]], **style: Any) -> None:
    for name, row in rows.items():
        tokens, _, above = np.array(row["held_out"]).T
        options: dict[str, Any] = {"label": name, "markersize": 4} | style
        axes.plot(tokens / 1e6, above, "o-", **options)
    axes.axhline(0, color="black", linestyle=":")
    axes.set(xlabel="million tokens read", ylabel="nats above the floor")


def plot_sizes() -> None:
    """The distance to the entropy on held-out stories over the tokens read."""
    _, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
    _plot_distances(axes, sizes())
    axes.set(ylim=(-0.01, None))
    axes.legend(title="parameters", fontsize=8)
    plt.show()


def plot_push_and_patience() -> None:
    """The weighted loss of the pushed runs, and the held-out loss of the longer one, each beside
    what a hat costs.
    """
    _, (push, patience) = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    for name, row in sizes("pushed").items():
        tokens, loss = np.array(row["curve"]).T
        push.plot(tokens / 1e6, loss, label=name)
    push.set(title="thirty times the weight on things", xlabel="million tokens read")
    push.set(ylabel="weighted mean of the loss", ylim=(2, 2.6))
    ordinary = sizes()
    _plot_distances(patience, ordinary, color="gray", linewidth=1, markersize=2, label=None)
    patience.plot([], color="gray", linewidth=1, label="ordinary, all three sizes")
    _plot_distances(patience, sizes("longer"))
    patience.set(title="three times as many tokens", ylim=(-0.01, 0.25))
    for axes, price in ((push, "hat_weighed"), (patience, "hat")):
        axes.axhline(record()[price], color="tab:red", linestyle="--", label="things out of a hat")
        axes.legend(fontsize=8, loc="upper right")
    plt.show()


def plot_shares(by_model: Mapping[str, Mapping[str, Share]]) -> None:
    """What each model pays above the information, by kind of word."""
    kinds = sorted(next(iter(by_model.values())), key=lambda kind: _above(by_model, kind))
    height = 0.8 / len(by_model)
    _, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for place, (name, shares) in enumerate(by_model.items()):
        rows = np.arange(len(kinds)) + height * (place - (len(by_model) - 1) / 2)
        axes.barh(rows, [shares[kind].above for kind in kinds], height, label=name)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(xlabel="bits per byte above the entropy")
    axes.legend(fontsize=8, loc="lower right")
    plt.show()


def _above(by_model: Mapping[str, Mapping[str, Share]], kind: str) -> float:
    return sum(shares[kind].above for shares in by_model.values())


@cache
def weighed() -> dict[str, list[list[float]]]:
    """By the weight of a thing in the loss: steps, and bits per byte above the entropy for the
    things and for the rest. scripts/larger_runs.py has recorded them in its stage `things`.
    """
    return json.loads(WEIGHED.read_text(encoding="utf-8"))


def plot_weighed() -> None:
    """The storyteller's distance to the entropy while it's trained on, with two weights."""
    _, both = plt.subplots(1, 2, figsize=(7.5, 2.8), sharey=True, layout="constrained")
    for weight, rows in weighed().items():
        steps, *parts = zip(*rows, strict=True)
        for axes, part in zip(both, parts, strict=True):
            axes.plot(steps, part, label=f"things count {weight}")
    for axes, title in zip(both, ("things", "everything else"), strict=True):
        axes.set(title=title, xlabel="step", ylim=(0, None))
    both[0].set_ylabel("bits per byte above the entropy")
    both[1].legend(fontsize=8)
    plt.show()


def best_of_budgets(*groups: Runs) -> dict[float, float]:
    """The lowest loss of each budget."""
    best: dict[float, float] = {}
    for runs in groups:
        for budget, loss in zip(runs.budget.tolist(), runs.loss.tolist(), strict=True):
            best[budget] = min(loss, best.get(budget, math.inf))
    return dict(sorted(best.items()))


def plot_beyond(first: Runs, larger: Runs, law: Law, floor: float, plateau: float) -> None:
    """The best loss of each budget above the floor, the first law, and a plateau."""
    _, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    for name, runs, mark in (("fitted", first, "o"), ("larger", larger, "*")):
        best = best_of_budgets(runs)
        above = [loss - floor for loss in best.values()]
        axes.plot([*best], above, mark, markersize=9, label=f"best run of a budget, {name}")
    reach = np.geomspace(min(first.budget), 2 * max(larger.budget), 60)
    expected = [law.loss(*law.best_size(budget)) - floor for budget in reach]
    axes.plot(reach, expected, color="gray", linewidth=1, label="the first law")
    axes.axhline(plateau, color="tab:red", linestyle="--", label="doesn't know the things")
    axes.set(xscale="log", yscale="log", xlabel="operations", ylabel="nats above the floor")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.legend(fontsize=8)
    plt.show()


def plot_tasks(names: Sequence[str]) -> None:
    """The accuracy of the three models in some tasks, with intervals and a blind guess."""
    _, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for shift, (size, row) in zip((-0.2, 0, 0.2), sizes().items(), strict=True):
        found = np.array([row["tasks"][name]["accuracy"][:3] for name in names])
        errors = np.abs(found[:, 1:] - found[:, :1]).T
        places = np.arange(len(names)) + shift
        axes.errorbar(places, found[:, 0], errors, fmt="o", capsize=3, label=size)
    for place, name in enumerate(names):
        chance = row["tasks"][name]["chance"][0]
        axes.hlines(chance, place - 0.35, place + 0.35, color="tab:red", linestyle=":")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="accuracy", ylim=(0, 1.03))
    axes.legend(title="parameters", fontsize=8, loc="lower left")
    plt.show()

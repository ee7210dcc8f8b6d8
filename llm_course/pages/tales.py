"""What the pages about a text of known entropy show: one small story, and pictures of stories."""

import math
import random
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch

from llm_course.pages.storyteller import load_storyteller
from llm_course.text.choices import DRAWS, Span
from llm_course.text.questions import MinimalPair
from llm_course.text.stories import Reading, read_story, write_story
from llm_course.text.wording import LEVELS
from llm_course.text.world import World

# ---------------------------------------------------------------------------------------- the story


def candle() -> str:
    """The story of Felix, Omar and a candle, which all of these pages follow: 824 characters."""
    return write_story("easy", seed=7, index=82)


def show(text: str) -> None:
    """Print a text on lines that fit the page, with its paragraphs apart."""
    print("\n\n".join(textwrap.fill(part, 96) for part in text.strip().split("\n\n")), end="\n\n")


def random_event(world: World, rng: random.Random, *, may_leave: bool) -> None:
    """Let somebody do something with the first thing: take it, put it down, or walk, if they may.

    Whoever has the thing, or is where it lies, can move it; if nobody can, nothing happens.
    """
    [thing, *_] = world.things
    person = rng.choice(world.people)
    if may_leave and rng.random() < 0.3:
        places = [place for place in world.places if place is not person.place]
        world.go(person, rng.choice(places))
    elif thing.where is person and person.place.spots:
        world.put(person, thing, rng.choice(person.place.spots))
    elif thing.where in person.place.spots:
        world.take(person, thing)


# ------------------------------------------------------------------------------------------- levels


def plot_levels(stories: int = 30) -> None:
    """Bars: how long the stories of each level are, and how many bits they carry."""
    sizes: Mapping[str, list[float]] = {"words": [], "bits": []}
    levels = list(LEVELS)[::-1]
    for level in levels:
        texts = [write_story(level, seed=0, index=index) for index in range(stories)]
        sizes["words"].append(sum(len(text.split()) for text in texts) / stories)
        sizes["bits"].append(sum(read_story(text, level).bits for text in texts) / stories)
    _, axes = plt.subplots(1, 2, figsize=(8, 2.2), sharey=True)
    for ax, (name, values), color in zip(axes, sizes.items(), ("C0", "C1"), strict=True):
        bars = ax.barh(levels, values, color=color)
        ax.bar_label(bars, fmt="%.0f", padding=3)
        ax.set_title(f"{name} in a story, on average", fontsize=10)
        ax.set_xlim(0, 1.15 * max(values))
    plt.tight_layout()
    plt.show()


# ------------------------------------------------------------------------------------------- counts


def plot_shares(rows: Mapping[str, Mapping[str, int]]) -> None:
    """A bar for each row, cut into the shares of its counts."""
    _, ax = plt.subplots(figsize=(8, 0.5 + 0.5 * len(rows)))
    names = list(rows)[::-1]
    kinds = sorted({kind for counts in rows.values() for kind in counts})
    totals = {name: sum(rows[name].values()) for name in names}
    left = [0.0] * len(names)
    for kind in kinds:
        shares = [rows[name].get(kind, 0) / totals[name] for name in names]
        bars = ax.barh(names, shares, left=left, label=kind)
        labels = [f"{share:.0%}" if share > 0.03 else "" for share in shares]
        ax.bar_label(bars, labels, label_type="center", color="white")
        left = [a + b for a, b in zip(left, shares, strict=True)]
    ax.set_xlim(0, 1)
    ax.set_xticks([])
    ax.legend(ncol=len(kinds), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    plt.show()


def show_choices(text: str, part: str, level: str = "easy") -> None:
    """Print the choices of a part of a story: what was said, its bits, and the rule behind it."""
    start = text.index(part)
    for span in read_story(text, level).spans:
        if start <= span.start < start + len(part):
            why = span.why if span.is_certain else ""
            print(f"{span.bits:5.2f}  {span.text.strip()!r:26} {why}".rstrip())


def paint(reading: Reading, width: int = 92) -> None:
    """A story in which a character is the darker the more it tells a perfect reader."""
    bits = reading.bits_by_character()
    start = 0
    row = 0.0
    for paragraph in reading.text.split("\n\n"):
        for line in textwrap.wrap(paragraph, width):
            start = reading.text.index(line, start)
            row -= 1
            _paint_line(line, bits[start:], row)
            start += len(line)
        row -= 0.5
    ax = plt.gca()
    plt.gcf().set_size_inches(11, -0.27 * row)
    ax.set_xlim(0, width)
    ax.set_ylim(row, 0.2)
    ax.axis("off")
    plt.show()


def _paint_line(line: str, bits: Sequence[float], row: float) -> None:
    for column, letter in enumerate(line):
        shade = min(bits[column] / 5, 1)
        color = (1, 1 - shade / 2, 1 - shade)
        plt.gca().add_patch(plt.Rectangle((column, row), 1, 0.9, color=color))
        place = (column + 0.5, row + 0.25)
        plt.text(*place, letter, ha="center", fontsize=8, family="monospace")


def plot_calibration(spans: Sequence[Span]) -> None:
    """How often the first option of a choice is taken, against its stated probability."""
    groups: defaultdict[int, list[tuple[float, bool]]] = defaultdict(list)
    for span in spans:
        first = next(iter(span.options))
        probability = span.options[first] / DRAWS
        groups[round(math.log2(probability))].append((probability, span.text == first))
    means = [
        [sum(column) / len(group) for column in zip(*group, strict=True)]
        for group in groups.values()
    ]
    stated, taken = zip(*sorted(means), strict=True)
    _, ax = plt.subplots(figsize=(4, 3))
    ax.plot([stated[0], 1], [stated[0], 1], color="grey", linestyle="--")
    ax.loglog(stated, taken, "o")
    ax.set_xlabel("probability, as stated")
    ax.set_ylabel("share, as counted")
    plt.show()


# ------------------------------------------------------------------------------------- storyteller


def _log2_probabilities(text: str) -> tuple[list[int], torch.Tensor]:
    """The ids of a text, and the base-2 logarithms of the storyteller's probabilities at each."""
    model, tokenizer = load_storyteller()
    assert tokenizer.eos_token_id is not None
    ids = tokenizer.encode(text)
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.eos_token_id, *ids[:-1]]])).logits[0]
    return ids, torch.log_softmax(logits.double(), -1) / math.log(2)


def preferences(pairs: Sequence[MinimalPair]) -> list[float]:
    """By how many bits the storyteller prefers the right word of each pair; all of one story.

    The two words are compared by the first token in which they differ, given what comes before.
    """
    _, tokenizer = load_storyteller()
    ids, log2_probabilities = _log2_probabilities(pairs[0].kept)
    found = []
    for pair in pairs:
        other = tokenizer.encode(pair.broken)
        at = next(i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
        right, wrong = log2_probabilities[at, [ids[at], other[at]]].tolist()
        found.append(right - wrong)
    return found


def storyteller_bits(text: str) -> list[float]:
    """What the storyteller pays for each character; a token's bits are spread over its letters."""
    _, tokenizer = load_storyteller()
    ids, log2_probabilities = _log2_probabilities(text)
    found = []
    for token, row in zip(ids, log2_probabilities, strict=True):
        part = tokenizer.decode([token])
        letters = [not part.strip() or not letter.isspace() for letter in part]
        found += [-row[token].item() * is_letter / sum(letters) for is_letter in letters]
    return found


def plot_losses(levels: Mapping[str, Mapping[str, float]]) -> None:
    """Bars side by side: bits in a story, by kind of word, for each reader."""
    readers = list(levels)
    kinds = sorted(levels[readers[0]], key=lambda kind: levels[readers[-1]][kind])
    _, ax = plt.subplots(figsize=(8, 0.28 * len(kinds) + 0.6))
    for offset, reader in enumerate(readers):
        rows = [index + 0.4 * (offset - 0.5) for index in range(len(kinds))]
        ax.barh(rows, [levels[reader][kind] for kind in kinds], height=0.4, label=reader)
    ax.set_yticks(range(len(kinds)), kinds)
    ax.set_xlabel("bits in a story")
    ax.legend(frameon=False, loc="center right")
    plt.show()


def plot_preferences(gaps: Mapping[str, Sequence[float]]) -> None:
    """The share of pairs of each kind in which the right word is preferred, beside a coin's."""
    kinds = sorted(gaps, key=lambda kind: sum(gap > 0 for gap in gaps[kind]) / len(gaps[kind]))
    shares = [sum(gap > 0 for gap in gaps[kind]) / len(gaps[kind]) for kind in kinds]
    _, ax = plt.subplots(figsize=(8, 0.6 + 0.4 * len(kinds)))
    bars = ax.barh(kinds, shares)
    ax.bar_label(bars, [f"of {len(gaps[kind])} pairs" for kind in kinds], padding=4)
    ax.axvline(0.5, color="grey", linestyle="--")
    ax.set_xlim(0, 1.2)
    ax.set_xlabel("share of pairs in which the model prefers the right word (dashed: a coin)")
    plt.show()

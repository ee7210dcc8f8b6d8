"""What the pages about a text of known entropy show: one small story, and pictures of stories."""

import textwrap
from collections.abc import Mapping

import matplotlib.pyplot as plt

from llm_course.text.stories import read_story, write_story
from llm_course.text.wording import LEVELS

# ---------------------------------------------------------------------------------------- the story


def candle() -> str:
    """The story of Felix, Omar and a candle, which all of these pages follow: 824 characters."""
    return write_story("easy", seed=7, index=82)


def show(text: str) -> None:
    """Print a text on lines that fit the page, with its paragraphs apart."""
    print("\n\n".join(textwrap.fill(part, 96) for part in text.strip().split("\n\n")))


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

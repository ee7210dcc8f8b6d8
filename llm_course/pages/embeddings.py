"""What the page of embeddings shows: the storyteller's table, and hands that turn."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor

from llm_course.model.generation import generate
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import story_documents

KINDS = {
    "colours": ("red", "blue", "green", "yellow", "white", "brown", "pink"),
    "numbers": ("two", "three", "four", "five", "six", "seven", "eight"),
    "places": ("kitchen", "barn", "garden", "library", "market", "museum", "attic"),
    "names": ("Finn", "Anna", "Ben", "Tom", "Mia", "Leo", "Rosa"),
    "animals": ("sheep", "owl", "fox", "cow", "frog", "deer", "rabbit"),
    "verbs": ("went", "ran", "hurried", "asked", "whispered", "saw", "counted"),
}
WORDS = [word for words in KINDS.values() for word in words]

# -------------------------------------------------------------------------------- a trained table


def table() -> Tensor:
    """The storyteller's embedding table: (V, C)."""
    return load_storyteller()[0].embedding.embed_tokens.weight


def id_of(word: str) -> int:
    """The id of the token that is a space and this word; ValueError where it takes several."""
    ids = load_storyteller()[1].encode(f" {word}")
    if len(ids) != 1:
        raise ValueError(f"{word!r} is {len(ids)} tokens; choose a word with an entry of its own")
    return ids[0]


def _nearest(word: str, by: Literal["id", "vector"], count: int) -> tuple[list[str], list[float]]:
    """Tokens with the closest ids or vectors, closest first, and the cosine of each."""
    _, tokenizer = load_storyteller()
    own = id_of(word)
    directions = F.normalize(table(), dim=-1)
    cosines = directions @ directions[own]
    far = (torch.arange(len(cosines)) - own).abs() if by == "id" else -cosines
    ids = far.argsort(stable=True)[1 : count + 1]  # without the token itself
    return [tokenizer.decode([i]).strip() for i in ids.tolist()], cosines[ids].tolist()


def nearest(word: str, by: Literal["id", "vector"] = "vector", count: int = 8) -> str:
    """The tokens whose ids or vectors are closest to those of a word."""
    return ", ".join(_nearest(word, by, count)[0])


def show_nearest(word: str, by: Literal["id", "vector"] = "vector", count: int = 10) -> None:
    """A bar for the cosine of each of the closest tokens."""
    names, cosines = _nearest(word, by, count)
    plt.figure(figsize=(6, 2.8))
    places = range(count)
    plt.barh(places, cosines, color="tab:blue" if by == "vector" else "tab:gray")
    plt.yticks(places, names)
    plt.gca().invert_yaxis()
    plt.xlim(min(0.0, *cosines), 1)
    plt.xlabel(f"cosine with the vector of {word!r}")
    plt.title(f"{word!r}: closest by {by}")
    plt.show()


def show_cosines(kinds: Mapping[str, Sequence[str]] = KINDS) -> None:
    """The cosine of each pair of words, kind by kind."""
    words = [word for kind in kinds.values() for word in kind]
    directions = F.normalize(table()[[id_of(word) for word in words]], dim=-1)
    plt.figure(figsize=(6.4, 5.4))
    plt.imshow(directions @ directions.T, cmap="Blues", vmin=0, vmax=1)
    plt.colorbar(label="cosine", shrink=0.8)
    plt.xticks(range(len(words)), words, rotation=90, fontsize=7)
    plt.yticks(range(len(words)), words, fontsize=7)
    start = 0
    for name, kind in kinds.items():
        end = start + len(kind)
        place, side = (end, "left") if end < len(words) else (start - 1, "right")
        plt.text(place, start - 0.4, name, fontsize=9, va="top", ha=side, color="tab:red")
        start = end
    plt.title("Nobody told the model what a colour is")
    plt.show()


@cache
def counts(num_bytes: int = 100_000) -> Tensor:
    """How often each of the storyteller's tokens is read in the fresh stories of four worlds, each
    story with the end-of-text token in front: (V,).
    """
    _, tokenizer = load_storyteller()
    ids = []
    for seed in range(78, 82):  # one seed is one world; not every world has a compass
        for story in story_documents("easy", num_bytes=num_bytes, seed=seed):
            ids += [tokenizer.eos_token_id, *tokenizer.encode(story)]
    return torch.tensor(ids).bincount(minlength=len(table()))


def cosines_within(rows: Tensor) -> Tensor:
    """The cosines of all pairs of different rows, in one row: (N * (N - 1) / 2,)."""
    directions = F.normalize(rows, dim=-1)
    first, second = torch.triu_indices(len(rows), len(rows), offset=1)
    return (directions @ directions.T)[first, second]


@cache
def story_ids(num_tokens: int = 400) -> Tensor:
    """The beginning of a story that the storyteller hasn't read: (T,)."""
    text = "\n".join(story_documents("easy", num_bytes=4000, seed=78))
    return torch.tensor(load_storyteller()[1].encode(text)[:num_tokens])


@torch.no_grad()
def story_loss(shift: int = 0) -> float:
    """The storyteller's loss on a story, in nats a token, if all ids are off by `shift`."""
    model, _ = load_storyteller()
    ids = (story_ids() + shift) % len(table())
    return F.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:]).item()


def write(prompt: str, shift: int = 0, num_tokens: int = 30) -> str:
    """What the storyteller writes, most likely token by token, if all ids are off by `shift`."""
    model, tokenizer = load_storyteller()
    size = len(table())
    ids = (torch.tensor([tokenizer.encode(prompt)]) + shift) % size
    written = generate(model, ids, max_new_tokens=num_tokens, temperature=0.0)[0]
    return tokenizer.decode(((written - shift) % size).tolist())


# -------------------------------------------------------------------------------------- positions


def draw_hands(speeds: Sequence[float], positions: Sequence[int]) -> None:
    """A row of clock faces for each hand, one face for each position."""
    size = (1.25 * len(positions), 1.2 * len(speeds))
    fig, axes = plt.subplots(len(speeds), len(positions), figsize=size)
    for row, speed in zip(axes, speeds, strict=True):
        for ax, position in zip(row, positions, strict=True):
            angle = position * speed
            ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="tab:gray"))
            tip = (math.sin(angle), math.cos(angle))
            ax.annotate("", tip, (0, 0), arrowprops={"arrowstyle": "->", "color": "tab:blue"})
            ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), xticks=[], yticks=[], aspect="equal")
            ax.set_frame_on(False)
        row[0].set_ylabel(f"{speed:g} a step", fontsize=8)
    for ax, position in zip(axes[0], positions, strict=True):
        ax.set_title(f"position {position}", fontsize=9)
    fig.tight_layout()
    plt.show()


def draw_clock(clock: Tensor, starts: Sequence[int] = (0, 50), span: int = 50) -> None:
    """The table of positions (T, C), and the dot products from two of them onward."""
    half = clock.shape[-1] / 2  # the squared length of each row
    fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.6))
    axes[0].imshow(clock, cmap="RdBu", aspect="auto", interpolation="nearest")
    axes[0].set(
        xlabel="number in the vector", ylabel="position", title="fast hands left, slow right"
    )
    for start, style in zip(starts, ("-", "--"), strict=True):
        products = clock[start : start + span] @ clock[start] / half
        axes[1].plot(range(span), products, style, label=f"from {start}")
    axes[1].set(xlabel="distance", ylabel=f"dot product / {half:g}", title="one curve, any start")
    axes[1].legend(fontsize=8)
    fig.tight_layout()
    plt.show()


def draw_gradients(gradients: Sequence[float] | Tensor, rows: Sequence[str]) -> None:
    """A bar for the gradient of each row."""
    plt.figure(figsize=(6, 2))
    plt.bar(list(rows), gradients)
    plt.xlabel("row")
    plt.ylabel("gradient")
    plt.title("A batch trains only the rows that it reads")
    plt.show()

"""What the pages on rotation show: the storyteller at other positions, arrows that turn, and small
models with their tasks.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, nn

from llm_course.model.embedding import EmbeddingLayer
from llm_course.model.rope import RotaryEmbedding, apply_rotary, rotary_frequencies
from llm_course.pages.embeddings import story_ids
from llm_course.pages.storyteller import load_storyteller

# ids, each (rows, T), and targets (rows, T), -100 where nothing is asked
Task = Callable[[int, int, torch.Generator], tuple[tuple[Tensor, ...], Tensor]]


Place = Callable[[Tensor], Tensor]  # from the positions 0, 1, ... to those that a model is told

# ------------------------------------------------------------------ the storyteller, told of places


@torch.no_grad()
def story_loss(place: Place) -> float:
    """The storyteller's loss on a story, in nats a token, if it is told these positions."""
    model, _ = load_storyteller()
    ids = story_ids()
    positions = place(torch.arange(len(ids) - 1))
    return F.cross_entropy(model(ids[None, :-1], position_ids=positions).logits[0], ids[1:]).item()


@torch.no_grad()
def write(prompt: str, place: Place, num_tokens: int = 30) -> str:
    """What the storyteller writes, most likely token by token, if it is told these positions."""
    model, tokenizer = load_storyteller()
    ids = tokenizer.encode(prompt)
    for _ in range(num_tokens):
        positions = place(torch.arange(len(ids)))
        scores = model(torch.tensor([ids]), position_ids=positions).logits[0, -1]
        ids.append(int(scores.argmax()))
    return tokenizer.decode(ids)


@torch.no_grad()
def mixed_up_loss(*, convert: bool = False) -> float:
    """The storyteller's loss, in nats a token, from weights in Meta's layout, converted or not."""
    model = copy.deepcopy(load_storyteller()[0])
    D = model.config.head_dim
    assert D is not None
    order = torch.arange(D).view(2, D // 2).T.flatten()  # 0, D/2, 1, ...: as Meta stores a head
    for name, weight in model.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            rows = weight.unflatten(0, (-1, D))[:, order]
            weight.copy_((rows[:, order.argsort()] if convert else rows).flatten(0, 1))
    ids = story_ids()
    return F.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:]).item()


# ---------------------------------------------------------------------------------------- pictures


def _draw_arrows(ax: Axes, query: complex, key: complex, *, names: bool = False) -> None:
    """A query and a key as arrows in the plane."""
    for arrow, color, name in ((query, "tab:blue", "query"), (key, "tab:orange", "key")):
        tip = (arrow.real, arrow.imag)
        style = {"arrowstyle": "->", "color": color, "lw": 4 if name == "query" else 2}
        ax.annotate("", tip, (0, 0), arrowprops=style)
        if names:
            ax.text(1.25 * tip[0], 1.25 * tip[1], name, color=color, ha="center", fontsize=8)
    ax.set(xlim=(-1.8, 1.8), ylim=(-1.5, 1.5), xticks=[], yticks=[], aspect="equal")


def draw_turns(positions: Sequence[tuple[int, int]]) -> None:
    """The arrow (1, 0) as a query at m and as a key at n, each turned by its position."""
    fig, axes = plt.subplots(1, len(positions), figsize=(2 * len(positions), 2.4))
    for ax, (m, n) in zip(axes, positions, strict=True):
        _draw_arrows(ax, *(complex(math.cos(p), math.sin(p)) for p in (m, n)), names=True)
        ax.set_title(f"m = {m}, n = {n}")
    fig.suptitle("Both arrows turn; the angle between them stays", fontsize=11)
    fig.tight_layout()
    plt.show()


def show_score(query: int, key: int, *, head_dim: int = 8, rope_theta: float = 1000.0) -> None:
    """The pairs of a head that looks three places back, turned by the positions of a query and a
    key, and their score by distance.
    """
    speeds = rotary_frequencies(head_dim, rope_theta=rope_theta)
    q = torch.exp(1j * torch.tensor([0.3, 1.2, 0.8, 1.5]))  # one arrow for each pair
    k = q * torch.exp(1j * speeds * 3)  # what q becomes three places on
    turned_q = q * torch.exp(1j * speeds * query)
    turned_k = k * torch.exp(1j * speeds * key)
    distances = torch.arange(-20, 41)
    scores = ((distances[:, None] - 3) * speeds).cos().sum(-1)
    score = float((turned_q * turned_k.conj()).real.sum())
    fig = plt.figure(figsize=(6.4, 3.6), layout="constrained")
    grid = fig.add_gridspec(2, len(speeds), height_ratios=(1, 1.3))
    for i, speed in enumerate(speeds.tolist()):
        ax = fig.add_subplot(grid[0, i])
        _draw_arrows(ax, complex(turned_q[i]), complex(turned_k[i]))
        ax.set_title(f"pair {i}: {speed:.2g} a step", fontsize=8)
    ax = fig.add_subplot(grid[1, :])
    ax.plot(distances, scores, color="tab:gray")
    ax.plot([query - key], [score], "o", color="tab:red")
    ax.set(xlabel="distance, m - n", ylabel="score")
    fig.suptitle(f"query at {query}, key at {key}: score {score:.2f}", fontsize=11)
    plt.show()


def draw_layouts() -> None:
    """The eight numbers of a head, each with its pair, in both layouts."""
    layouts = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 0, 1, 2, 3]])
    plt.figure(figsize=(6, 1.5))
    plt.imshow(layouts, cmap="Pastel1", vmin=0, vmax=8, aspect="auto")
    for row, place in torch.cartesian_prod(torch.arange(2), torch.arange(8)).tolist():
        plt.text(place, row, f"pair {layouts[row, place]}", ha="center", va="center", fontsize=8)
    plt.yticks((0, 1), ("neighbours (paper, Meta)", "halves (Hugging Face, ours)"), fontsize=8)
    plt.title("The same four pairs, numbered differently", fontsize=11)
    plt.show()


def curves(
    title: str,
    x: Any,
    lines: dict[str, Tensor],
    xlabel: str,
    ylabel: str,
    xlog: bool = False,
    ylog: bool = False,
    mark: float | None = None,
) -> None:
    """Plot each line over `x`; one with rows becomes their mean, in a band of their range."""
    plt.figure(figsize=(4.6, 2.6))
    for (name, y), style in zip(lines.items(), ("-", "--", "-.", ":", (0, (1, 4))), strict=False):
        if y.ndim == 2:
            plt.fill_between(x, y.amin(0), y.amax(0), alpha=0.2)
        plt.plot(x, y.mean(0) if y.ndim == 2 else y, linestyle=style, label=name)
    if mark is not None:
        plt.axvline(mark, color="gray", linewidth=0.8)
    if xlog:
        plt.xscale("log", base=2)
    if ylog:
        plt.yscale("log")
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    plt.title(title, fontsize=11)
    if len(lines) > 1:
        plt.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()


# ------------------------------------------------------------------------ an oracle, and its angles


def llama_rotation(x: Tensor, positions: Tensor, *, rope_theta: float = 10_000.0) -> Tensor:
    """Queries or keys (B, H, T, D), rotated by Hugging Face's Llama; `positions` are (T,)."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    B, H, _, D = x.shape
    config = LlamaConfig(
        hidden_size=H * D,
        num_attention_heads=H,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    turn = LlamaRotaryEmbedding(config)(x, positions[None].expand(B, -1))
    return apply_rotary_pos_emb(x, x, *turn)[0]


def cosine_errors() -> dict[str, Tensor]:
    """The largest error of a cosine of RoPE (base 10,000, D = 128) near 2^8, 2^9, ... 2^16, if the
    positions, the speeds or neither are rounded to bfloat16.
    """
    places = torch.cat([2**n + torch.arange(1, 65, 3) for n in range(8, 17)])
    pairs = torch.arange(0, 128, 2).double() / 128
    exact = (places[:, None].double() * 10_000.0**-pairs).cos()
    speeds = rotary_frequencies(128)
    angles = {
        "positions in bfloat16": places.bfloat16().float()[:, None] * speeds,
        "speeds in bfloat16": places[:, None].float() * speeds.bfloat16().float(),
        "all in float32": places[:, None].float() * speeds,
    }
    errors = {name: (angle.cos() - exact).abs() for name, angle in angles.items()}
    return {name: error.amax(-1).view(9, -1).amax(-1) for name, error in errors.items()}


# ------------------------------------------------------------------------------------ small models


class Reader(nn.Module):
    """One attention head between an embedding and an output layer.

    `forward(*ids)` takes tensors (B, T), whose embeddings are added, and returns (B, T, V).
    """

    def __init__(
        self,
        position_type: Literal["none", "sinusoidal", "learned"] = "none",
        rope: RotaryEmbedding | None = None,
        vocab_size: int = 16,
        size: int = 32,
    ):
        super().__init__()
        self.embed = EmbeddingLayer(
            vocab_size, size, position_type=position_type, max_position_embeddings=128
        )
        self.rope = rope
        self.out = nn.Linear(size, vocab_size)
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))

    def forward(self, *ids: Tensor) -> Tensor:
        x = sum(self.embed(i) for i in ids)  # (B, T, C)
        q, k, v = (project(x)[:, None] for project in (self.q, self.k, self.v))  # (B, 1, T, C)
        if self.rope is not None:
            turn = self.rope(torch.arange(x.shape[1]))
            q = apply_rotary(q, *turn)
            k = apply_rotary(k, *turn)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def three_back(
    rows: int, T: int, generator: torch.Generator, places: int = 3
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Random texts of 16 tokens, and at each place the token that stands `places` back."""
    ids = torch.randint(16, (rows, T), generator=generator)
    targets = torch.full_like(ids, -100)
    targets[:, places:] = ids[:, :-places]
    return (ids,), targets


def look_up_names(
    rows: int, T: int, generator: torch.Generator
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A list of different names, each with a value, and then the names in another order, each
    asking for its value: ids of names (0 to 63) and of values (64 to 79, and 80 for a question).
    """
    half = T // 2
    names = torch.rand(rows, 64, generator=generator).argsort(-1)[:, :half]
    values = torch.randint(64, 80, (rows, half), generator=generator)
    asked = torch.rand(rows, half, generator=generator).argsort(-1)  # the order of the questions
    targets = torch.cat((torch.full_like(values, -100), values.gather(1, asked)), dim=1)
    ids = torch.cat((names, names.gather(1, asked)), dim=1)
    return (ids, torch.cat((values, torch.full_like(values, 80)), dim=1)), targets


def train(model: Reader, task: Task, steps: int = 100) -> Reader:
    """Train on texts of 8, 16 and 32 tokens in turns."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(steps):
        ids, targets = task(32, (8, 16, 32)[step % 3], generator)
        loss = F.cross_entropy(model(*ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def three_starts(build: Callable[[], Reader], task: Task) -> list[Reader]:
    """The same model trained from three seeds."""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(train(build(), task))
    return models


@torch.no_grad()
def share_right(model: Reader, task: Task, T: int = 128) -> Tensor:
    """The share of right answers at each place of 64 new texts: (T,), NaN where none is asked."""
    ids, targets = task(64, T, torch.Generator().manual_seed(1))
    right = (model(*ids).argmax(-1) == targets).float()
    return right.masked_fill(targets == -100, math.nan).nanmean(0)


@torch.no_grad()
def score_by_distance(model: Reader, T: int = 128) -> Tensor:
    """The mean score that the queries of new texts give to the key at each distance: (T,)."""
    assert model.rope is not None
    (ids,), _ = three_back(200, T, torch.Generator().manual_seed(1))
    x = model.embed(ids)
    turn = model.rope(torch.arange(T))
    q = apply_rotary(model.q(x)[:, None], *turn)
    k = apply_rotary(model.k(x)[:, None], *turn)
    scores = (q @ k.transpose(-1, -2))[:, 0] / q.shape[-1] ** 0.5  # (B, T, T)
    return torch.stack([scores.diagonal(-distance, 1, 2).mean() for distance in range(T)])


def after_stretching(
    starts: Sequence[Reader], task: Task, ropes: Sequence[RotaryEmbedding]
) -> Tensor:
    """The share right beyond 32 tokens with each of these rotations: (starts, ropes)."""
    shares = torch.zeros(len(starts), len(ropes))
    for i, model in enumerate(starts):
        for j, rope in enumerate(ropes):
            model.rope = rope
            shares[i, j] = share_right(model, task)[32:].nanmean()
    return shares


def draw_stretched(names: Sequence[str], shares: Mapping[str, Tensor]) -> None:
    """A bar for each task and each rotation: the mean of the starts, and their range."""
    plt.figure(figsize=(6.4, 2.8))
    for place, (task, share) in enumerate(shares.items()):
        mean = share.mean(0)
        spread = (mean - share.amin(0), share.amax(0) - mean)
        places = torch.arange(len(names)) + 0.27 * (place - 1)
        plt.bar(places, mean, width=0.27, label=task, yerr=spread)
    plt.xticks(range(len(names)), list(names))
    plt.xlabel("scaling by 4, no further training")
    plt.ylabel("share right")
    plt.ylim(0, 1.4)
    plt.legend(fontsize=8, loc="upper center", ncols=3)
    plt.title("No stretch keeps every distance", fontsize=11)
    plt.show()

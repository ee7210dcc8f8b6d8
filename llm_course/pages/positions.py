"""The small models of the pages on positions, their tasks, and a plot of curves."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_course.model.embedding import EmbeddingLayer
from llm_course.model.rope import RotaryEmbedding, apply_rotary

# ids, each (rows, T), and targets (rows, T), -100 where nothing is asked
Task = Callable[[int, int, torch.Generator], tuple[tuple[Tensor, ...], Tensor]]


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
    import matplotlib.pyplot as plt  # only here: a page that plots nothing need not wait for it

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

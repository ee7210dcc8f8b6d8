"""What the page of multi-token prediction reads, trains and draws."""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch import Tensor, nn

from llm_course.model.decoder import DecoderModel, init_weights
from llm_course.model.generation import generate
from llm_course.pages.loss import FRESH
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import write_story

LENGTH = 64  # positions of a row


class Rows(NamedTuple):
    """Rows of stories, and what the storyteller makes of them."""

    ids: Tensor  # (N, T + 1)
    stream: Tensor  # (N, T, C), after the last block


@torch.no_grad()
def stream_of(model: DecoderModel, ids: Tensor) -> Tensor:
    """The stream (B, T, C) after the last block."""
    caught: list[Tensor] = []
    hook = model.layers[-1].register_forward_hook(
        lambda module, args, result: caught.append(result[0])
    )
    model(ids)
    hook.remove()
    return caught[0]


@cache
def story_rows(stories: int) -> Rows:
    """Stories that the storyteller has never read, one after the other, cut into rows."""
    model, tokenizer = load_storyteller()
    end = tokenizer.eos_token_id
    assert end is not None
    ids: list[int] = []
    for index in range(stories):
        ids += [*tokenizer.encode(write_story("easy", index=FRESH + index)), end]
    count = len(ids) // (LENGTH + 1)
    rows = torch.tensor(ids[: count * (LENGTH + 1)]).view(count, LENGTH + 1)
    return Rows(rows, stream_of(model, rows[:, :-1]))


@cache
def written(tokens: int = LENGTH) -> Tensor:
    """What the storyteller writes after different beginnings, always its likeliest token."""
    model, tokenizer = load_storyteller()
    texts = [write_story("easy", index=FRESH + index) for index in range(1000, 1008)]
    prompts = torch.tensor([tokenizer.encode(text)[:8] for text in texts]).unique(dim=0)
    return generate(model, prompts, max_new_tokens=tokens - 8)  # (B, tokens)


def batches(steps: int, size: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    """The ids (B, T + 1) and the stream (B, T, C) of a few rows, drawn at random."""
    rows = story_rows(24)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(rows.ids), (size,), generator=generator)
        yield rows.ids[chosen], rows.stream[chosen]


def train(
    module: nn.Module, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], steps: int = 80
) -> list[float]:
    """Train a fresh module on `loss_of(module, ids, stream)`; its loss by step."""
    torch.manual_seed(0)
    init_weights(module, load_storyteller()[0].config)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.0)
    losses = []
    for ids, stream in batches(steps):
        loss = loss_of(module, ids, stream)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def show_losses(runs: Mapping[str, Sequence[float]]) -> None:
    """The loss of each training run by step."""
    _, ax = plt.subplots(figsize=(6.4, 2.5), layout="constrained")
    for (name, losses), style in zip(runs.items(), ("-", "--"), strict=True):
        ax.plot(losses, style, label=name)
    ax.set(xlabel="step", ylabel="loss (nats)", ylim=(0, None))
    ax.set_title("The cheat looks like a triumph", fontsize=11)
    ax.legend(fontsize=8)
    plt.show()


def show_drafts(name: str, ids: Tensor, drafts: Tensor) -> None:
    """A text (T + 2,), whose tokens from the third on have drafts (T,): green where they agree."""
    tokenizer = load_storyteller()[1]
    tokens = [tokenizer.decode([token]) for token in ids.tolist()]
    said = [tokenizer.decode([token]) for token in drafts.tolist()]
    spans = [html.escape(token) for token in tokens[:2]]
    plain = tokens[:2]
    for token, draft in zip(tokens[2:], said, strict=True):
        right = token == draft
        color = "rgba(77,154,91,0.45)" if right else "rgba(217,98,50,0.3)"
        spans.append(
            f'<span title="draft: {html.escape(repr(draft))}" style="background:{color}">'
            f"{html.escape(token)}</span>"
        )
        plain.append(f"[{token}]" if right else token)
    text = "".join(spans).replace("\n", "<br>")
    style = "font-family:monospace;line-height:1.7;margin:2px 0 12px 0"
    shown = f'<div>{html.escape(name)}</div><div style="{style}">{text}</div>'
    display({"text/html": shown, "text/plain": f"{name}\n" + "".join(plain)}, raw=True)


def show_sight(grids: Mapping[str, Tensor], targets: Mapping[str, int]) -> None:
    """Which predictions (columns) changed with which token (rows); red: each one's target."""
    fig, axes = plt.subplots(1, len(grids), figsize=(6, 2.9), sharey=True, layout="constrained")
    for ax, (name, grid) in zip(axes, grids.items(), strict=True):
        T = grid.shape[1]
        ahead = targets[name]
        ax.imshow(grid, cmap="Blues", vmin=0, vmax=1.5)
        frames = {"markersize": 16, "fillstyle": "none", "color": "red"}
        ax.plot(range(T), range(ahead, T + ahead), "s", **frames)
        ax.set(xlabel="prediction that changed")
        ax.set_title(name, fontsize=9)
    axes[0].set_ylabel("changed token")
    fig.suptitle("Module 1 sees one token more, but not its target", fontsize=11)
    plt.show()


def sight(predict: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """For each of these ids, whether each of the predictions (T, V) changes with it."""
    right = predict(ids)
    changed = []
    for position in range(len(ids)):
        other = ids.clone()
        other[position] = 0
        changed.append((predict(other) - right).abs().amax(-1) > 1e-5)
    return torch.stack(changed)

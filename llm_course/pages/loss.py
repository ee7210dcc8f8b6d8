"""What the page of the loss shows: a text coloured by a model's surprise, and a few curves."""

import html
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import display
from torch import Tensor

from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import write_story

FRESH = 10_000_000  # an index far beyond the stories that the storyteller was trained on
CALM = "Once upon a time there was a little girl called Rosa. She had a neighbour called Sam."
ODD = "Once upon a time there was a little girl called Rosa. She had a fridge called Sam."


@cache
def stories(count: int = 12) -> tuple[str, ...]:
    """Easy stories that the storyteller has never read, each within its context."""
    return tuple(write_story("easy", index=FRESH + index) for index in range(count))


@torch.no_grad()
def read(text: str) -> tuple[Tensor, Tensor]:
    """The tokens of a text (T,), and the storyteller's logits for each of them (T, V).

    The model sees the end of another story first, so that the first token is predicted, too.
    """
    model, tokenizer = load_storyteller()
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text)]])
    return ids[0, 1:], model(ids[:, :-1]).logits[0]


@torch.no_grad()
def hidden_of(text: str) -> tuple[Tensor, Tensor, Tensor]:
    """The last hidden vectors (T, C), the output matrix (V, C) and the labels (T,) of a text."""
    model, tokenizer = load_storyteller()
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text)]])
    states = model(ids[:, :-1], output_hidden_states=True).hidden_states
    return states[-1][0], model.lm_head.weight.detach().clone(), ids[0, 1:]


def pieces(ids: Tensor) -> list[str]:
    """Each token as text."""
    tokenizer = load_storyteller()[1]
    return [tokenizer.decode([token]) for token in ids.tolist()]


def show_surprise(rows: Mapping[str, tuple[Sequence[str], Sequence[float]]]) -> None:
    """Texts with each token on a background that is the darker, the higher its loss."""
    style = "font-family:monospace;white-space:pre-wrap;line-height:1.8;margin:2px 0 12px 0"
    parts = []
    plain = []
    for name, (tokens, losses) in rows.items():
        spans = "".join(_span(token, loss) for token, loss in zip(tokens, losses, strict=True))
        parts.append(f'<div>{html.escape(name)}</div><div style="{style}">{spans}</div>')
        marked = (f"{token}[{loss:.1f}]" for token, loss in zip(tokens, losses, strict=True))
        plain.append(f"{name}\n" + "".join(marked))
    display({"text/html": "".join(parts), "text/plain": "\n".join(plain)}, raw=True)


def _span(token: str, loss: float) -> str:
    """One token; a loss of 8 nats and more has the full colour."""
    text = html.escape(token).replace("\n", "↵\n")
    alpha = 0.8 * min(loss / 8, 1)
    return (
        f'<span title="{loss:.2f} nats" style="background:rgba(217,98,50,{alpha:.2f})">'
        f"{text}</span>"
    )


def text_box() -> Any:
    """A large text field, which reports a change when the reader leaves it."""
    try:
        from ipywidgets import Layout, Textarea
    except ImportError:  # then `play` shows the picture alone
        return ""
    return Textarea(continuous_update=False, layout=Layout(width="90%", height="6em"))


def show_reading(text: str, temperature: float = 1.0) -> None:
    """The storyteller's surprise at a text, with its logits divided by a temperature."""
    if not text:
        print("Type a sentence.")
        return
    ids, logits = read(text[:1000])
    losses = F.cross_entropy(logits / temperature, ids, reduction="none")
    bits = losses.sum().item() / math.log(2) / len(text[:1000].encode())
    mean = losses.mean().item()
    name = f"mean loss {mean:.2f} nats = perplexity {math.exp(mean):.1f}; {bits:.2f} bits per byte"
    show_surprise({name: (pieces(ids), losses.tolist())})


def show_price(guesses: Sequence[float]) -> None:
    """The loss against the probability of the token that came, and a few guesses on it."""
    p = torch.linspace(0.002, 1, 500)
    _, ax = plt.subplots(figsize=(6, 2.5), layout="constrained")
    ax.plot(p, -p.log())
    for guess in guesses:
        ax.plot(guess, -math.log(guess), "o", label=f"p = 1/{1 / guess:.0f}")
    ax.set(xlabel="probability of the token that came", ylabel="loss (nats)")
    ax.set_title("Ruling out what then happens is expensive", fontsize=11)
    ax.legend(fontsize=8)
    plt.show()


def show_gradient(p: Sequence[float], gradient: Sequence[float], came: int) -> None:
    """Two bar charts: what the model said, and the gradient of the loss."""
    colors = ["tab:orange" if token == came else "tab:blue" for token in range(len(p))]
    fig, axes = plt.subplots(1, 2, figsize=(6, 2.4), layout="constrained")
    for ax, values in zip(axes, (p, gradient), strict=True):
        ax.bar(range(len(p)), values, color=colors)
        ax.axhline(0, color="gray", linewidth=0.8)
        ax.set(xlabel="token", xticks=range(len(p)))
    axes[0].set_title("What the model said: p", fontsize=10)
    axes[1].set_title(f"The gradient: p, less 1 at token {came}", fontsize=10)
    plt.show()


def show_ladder(bits: Mapping[str, float]) -> None:
    """Bits per byte of several readers of the same text, as bars."""
    _, ax = plt.subplots(figsize=(6, 2.2), layout="constrained")
    bars = ax.barh(list(bits), list(bits.values()), color="tab:blue")
    ax.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    ax.set(xlabel="bits per byte", xlim=(0, 1.12 * max(bits.values())))
    ax.set_title("A better model needs fewer bits for the same text", fontsize=11)
    ax.invert_yaxis()
    plt.show()

"""What the pages of normalization draw, and the storyteller with other norms than its own."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_course.model.decoder import DecoderModel
from llm_course.model.normalization import RMSNorm
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import story_documents
from llm_course.training.run import continuation

STYLES = ("-", "--", "-.", ":")
Norm = Callable[[Tensor, Tensor, float], Tensor]  # of x (..., C), the weight (C,) and epsilon
Layer = Callable[[Tensor], Tensor]


def rms(x: Tensor) -> Tensor:
    """The root mean square over the last dimension: (..., C) -> (...)."""
    return x.pow(2).mean(-1).sqrt()


# -------------------------------------------------------------------- the storyteller, other norms


class _Replaced(nn.Module):
    """A norm in the place of an RMSNorm, with its weight and epsilon."""

    def __init__(self, norm: Norm, layer: RMSNorm):
        super().__init__()
        self.norm = norm
        self.weight = layer.weight
        self.eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


def with_norms(norm: Norm) -> DecoderModel:
    """A copy of the storyteller in which `norm(x, weight, eps)` replaces every RMSNorm."""
    model = copy.deepcopy(load_storyteller()[0])
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, RMSNorm):
                setattr(parent, name, _Replaced(norm, layer))
    return model


@cache
def story_ids() -> Tensor:
    """Tokens of stories that the storyteller hasn't read: (4, 256)."""
    _, tokenizer = load_storyteller()
    text = "\n".join(story_documents("easy", num_bytes=8_000, seed=78))
    return torch.tensor(tokenizer.encode(text)[: 4 * 256]).view(4, 256)


@torch.no_grad()
def story_loss(model: DecoderModel) -> float:
    """The loss on fresh stories, in nats a token."""
    ids = story_ids()
    logits = model(ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def tell(model: DecoderModel, opening: str = "Once upon a time there was a") -> str:
    """How the model goes on, in thirty tokens."""
    _, tokenizer = load_storyteller()
    pieces = continuation(model, tokenizer, opening, seed=1, max_new_tokens=30)
    return " ".join((opening + "".join(pieces)).split())


@torch.no_grad()
def stream(model: DecoderModel) -> list[Tensor]:
    """What enters each block on fresh stories, and what leaves the last: tensors (4, 256, C)."""
    seen: list[Tensor] = []
    blocks: list[Any] = list(model.layers)
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for block in blocks
    ]
    hooks.append(model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])))
    model(story_ids())
    for hook in hooks:
        hook.remove()
    return seen


# ------------------------------------------------------------------------------------ random layers


def scales(gain: float, norm: Layer = lambda x: x, *, depth: int = 50, C: int = 256) -> list[float]:
    """The RMS of 64 random vectors before and after each of `depth` random matrices."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, C, generator=generator)
    record = [1.0]
    for _ in range(depth):
        x = norm(x @ torch.randn(C, C, generator=generator) * gain / C**0.5)
        record.append(rms(x).mean().item())
    return record


def draw_depth(gain: float) -> None:
    """The scale by depth at this gain, with and without a division by the RMS after each layer."""
    plt.figure(figsize=(6.4, 2.8))
    divided = scales(gain, lambda x: x / rms(x)[:, None])
    plt.plot(scales(gain), "-", label="as it comes")
    plt.plot(divided, "--", label="divided by its RMS after each layer")
    plt.yscale("log")
    plt.ylim(1e-16, 1e16)
    plt.xlabel("layer")
    plt.ylabel("RMS of a vector")
    plt.legend(fontsize=8, loc="upper left")
    plt.title(f"Fifty random layers of gain {gain:.2f}")
    plt.show()


def draw_lines(
    title: str,
    x: Sequence[float] | Tensor,
    lines: Mapping[str, Sequence[float] | Tensor],
    xlabel: str,
    ylabel: str,
    *,
    log: str = "",
) -> None:
    """Curves over x; `log` names the axes that are logarithmic, "x", "y" or "xy"."""
    plt.figure(figsize=(6.4, 2.8))
    for (name, y), style in zip(lines.items(), STYLES, strict=False):
        plt.plot(x, y, style, label=name)
    if "x" in log:
        plt.xscale("log")
    if "y" in log:
        plt.yscale("log")
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    plt.legend(fontsize=8)
    plt.title(title)
    plt.show()


# --------------------------------------------------------------------------------------- the plane


def draw_moves(points: Tensor, normed: Mapping[str, Tensor]) -> None:
    """Where each norm moves points of the plane, (N, 2)."""
    fig, axes = plt.subplots(1, 2, figsize=(6.4, 3.1), layout="constrained")
    for ax, (name, y) in zip(axes, normed.items(), strict=True):
        ax.plot(*torch.stack((points, y), dim=1).permute(2, 1, 0), color="lightgray", linewidth=0.6)
        ax.plot(*points.T, ".", color="tab:gray", label="before")
        ax.plot(*y.T, "o", color="tab:blue", markersize=4, label="after")
        ax.set(title=name, xlabel="first number", ylabel="second number", aspect="equal")
        ax.set(xlim=(-3.6, 4.9), ylim=(-3.6, 4.9))
    axes[0].legend(fontsize=8, loc="upper left")
    plt.show()


def draw_gradients(norm: Layer) -> tuple[Tensor, Tensor]:
    """The gradient of the second output at places on two circles, as arrows; places and gradients.

    Both are (32, 2): sixteen places at radius 1, and then sixteen at radius 2.
    """
    angles = torch.arange(16) * torch.pi / 8
    circle = torch.stack((angles.cos(), angles.sin()), dim=-1)
    places = torch.cat((circle, 2 * circle)).requires_grad_()
    arrows = torch.autograd.grad(norm(places)[:, 1].sum(), places)[0]
    places = places.detach()
    plt.figure(figsize=(4.8, 3.3))
    for radius, color, part in ((1, "tab:orange", slice(16)), (2, "tab:blue", slice(16, None))):
        plt.plot(*places[part].T, ".", color=color, markersize=4)
        settings: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1.5}
        plt.quiver(
            *places[part].T, *arrows[part].T, color=color, label=f"radius {radius}", **settings
        )
    plt.gca().set(xlabel="first number", ylabel="second number", aspect="equal")
    plt.gca().set(xlim=(-2.4, 2.4), ylim=(-2.4, 2.4))
    plt.title("Gradients at a right angle to their vectors")
    plt.legend(fontsize=8, loc=(1.05, 0.4))
    plt.show()
    return places, arrows


# ------------------------------------------------------------------------------- the stream, a leak


def draw_stream(streams: Sequence[Tensor]) -> None:
    """The RMS of each token, and its largest number, before each block and after the last."""
    plt.figure(figsize=(6.4, 3))
    measures: dict[str, Layer] = {
        "RMS of a token": rms,
        "its largest number": lambda x: x.abs().amax(-1),
    }
    for (name, measure), shift, color in zip(
        measures.items(), (-0.12, 0.12), ("tab:blue", "tab:orange"), strict=True
    ):
        for place, x in enumerate(streams):
            values = measure(x).flatten()[::4]
            spread = torch.linspace(-0.08, 0.08, len(values))
            label = name if place == 0 else None
            plt.plot(place + shift + spread, values, ".", color=color, markersize=2, label=label)
    plt.axhline(256, color="tab:red", linestyle="--", label="256: the square overflows in float16")
    plt.yscale("log")
    last = len(streams) - 1
    names = ["before\nblock 0", *(str(i) for i in range(1, last)), "after the\nlast block"]
    plt.xticks(range(last + 1), names)
    plt.ylabel("size")
    plt.legend(fontsize=8, loc="upper left")
    plt.title("Vectors inside the storyteller")
    plt.show()


def draw_leaks(grids: Mapping[str, Tensor]) -> None:
    """Which outputs moved, (texts, tokens), for each layer."""
    fig, axes = plt.subplots(1, len(grids), figsize=(6.4, 1.9), layout="constrained")
    for ax, (name, grid) in zip(axes, grids.items(), strict=True):
        ax.imshow(grid, cmap="Blues", vmin=0, vmax=1.3)
        ax.set(xlabel="token", ylabel="text", yticks=range(len(grid)))
        ax.set_title(name, fontsize=10)
    plt.show()


# ------------------------------------------------------------------------------- training in depth


def train_stacks(
    norm: Layer, gains: Tensor, rates: Tensor, *, seeds: int = 5, depth: int = 12, steps: int = 100
) -> Tensor:
    """The loss of deep networks after training, by gain and learning rate: (gains, rates, seeds).

    Each has `depth` layers of 16 numbers, relu(norm(x W)), and learns the sine of one of its inputs
    by gradient descent. 1 is the loss of the answer 0. All R networks are trained as one stack.
    """
    g = torch.Generator().manual_seed(0)
    C = 16
    shape = (len(gains), len(rates), seeds)
    gain = gains[:, None, None].expand(shape).reshape(-1, 1, 1)  # (R, 1, 1)
    rate = rates[:, None].expand(shape).reshape(-1, 1, 1)
    weights = [
        (torch.randn(len(rate), C, C, generator=g) * gain / C**0.5).requires_grad_()
        for _ in range(depth)
    ]
    weights.append((torch.randn(len(rate), C, 1, generator=g) / C**0.5).requires_grad_())
    start = torch.randn(len(rate), 32, C, generator=g)  # 32 examples for each network
    target = torch.sin(2 * start[..., :1])
    for _ in range(steps):
        x = start
        for weight in weights[:-1]:
            x = F.relu(norm(x @ weight))
        loss = (x @ weights[-1] - target).square().mean((1, 2))  # (R,)
        gradients = torch.autograd.grad(loss.sum(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= rate * gradient
    return (loss.detach() / target.square().mean((1, 2))).view(shape)


def draw_learned(learned: Mapping[str, Tensor], gains: Sequence[str], rates: Tensor) -> None:
    """The share of networks that learned, (gains, rates), for each norm."""
    fig, axes = plt.subplots(1, len(learned), figsize=(6.4, 2.6), sharey=True, layout="constrained")
    places = range(1, len(rates), 3)
    powers = [f"$2^{{{round(rates[i].log2().item())}}}$" for i in places]
    for ax, (name, share) in zip(axes, learned.items(), strict=True):
        image = ax.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        ax.set(xlabel="learning rate", xticks=places, xticklabels=powers)
        ax.set_title(name, fontsize=10)
    axes[0].set(ylabel="gain at the start", yticks=range(len(gains)), yticklabels=gains)
    fig.colorbar(image, ax=axes, label="share that learned")
    plt.show()

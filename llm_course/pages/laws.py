"""Plots of the page on fitting a scaling law, and the fit that one would try first."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from llm_course.training.scaling import Law

STARTS = {  # log E, log A, a, log B, b
    "a good guess": (-1.0, 10.0, 1.0, 10.0, 1.0),
    "another one": (-3.0, 5.0, 0.3, 5.0, 0.3),
    "all halves": (0.0, 5.0, 0.5, 5.0, 0.5),
    "nearly flat": (0.0, 0.0, 0.1, 0.0, 0.1),
    "steep in D": (0.0, 5.0, 0.5, 20.0, 1.5),
}


def descend(
    N: Any, D: Any, losses: Any, start: Sequence[float], *, relative: bool = True
) -> tuple[float, Law]:
    """A law by PyTorch's LBFGS from a start, and its squared errors, relative or absolute."""
    sizes, tokens, heights = (torch.as_tensor(each, dtype=torch.double) for each in (N, D, losses))
    x = torch.tensor(start, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([x], max_iter=300, line_search_fn="strong_wolfe")

    def error() -> torch.Tensor:
        E, A, a, B, b = x
        law = E.exp() + (A - a * sizes.log()).exp() + (B - b * tokens.log()).exp()
        return ((law - heights) / (heights if relative else 1)).square().sum()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = error()
        value.backward()
        return value

    optimizer.param_groups[0].update(tolerance_grad=1e-12, tolerance_change=1e-14)
    optimizer.step(closure)
    E, A, a, B, b = x.detach().tolist()
    return error().item(), Law(np.exp(E), np.exp(A), a, np.exp(B), b)


def plot_law(N: Any, D: Any, losses: Any, law: Law) -> None:
    """Runs over their tokens, the runs of one size in one colour, and what a law says of them."""
    _, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
    for place, size in enumerate(sorted(set(N))):
        chosen = N == size
        tokens = np.geomspace(D[chosen].min() / 1.3, D[chosen].max() * 1.3, 40)
        axes.plot(tokens, law.loss(size, tokens), color=f"C{place}", linewidth=1)
        axes.plot(D[chosen], losses[chosen], "o", color=f"C{place}", label=f"{size:,.0f}")
    axes.axhline(law.E, color="gray", linestyle=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens D",
        ylabel="loss",
        title="The runs, the law, and its E",
    )
    axes.legend(title="parameters N", fontsize=7)
    plt.show()


def plot_exchange(laws: Sequence[Law], planted: Law) -> None:
    """E against each exponent, a point for each fit to resampled runs."""
    _, axes = plt.subplots(1, 2, figsize=(8.5, 2.9), layout="constrained", sharey=True)
    for place, name in zip(axes, ("a", "b"), strict=True):
        place.plot([getattr(law, name) for law in laws], [law.E for law in laws], "o", alpha=0.5)
        place.plot(getattr(planted, name), planted.E, "*", color="tab:red", markersize=14)
        place.set_xlabel(f"exponent {name}")
    axes[0].set(ylabel="E", title="Fits to resampled runs; the star was planted")
    plt.show()


def plot_bottom(law: Law, compute: float, sizes: np.ndarray, minimum: tuple[float, float]) -> None:
    """One budget: the law's curve, five runs on it, the parabola through them and its minimum."""
    _, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
    losses = law.loss(sizes, compute / 6 / sizes)
    parabola = np.polynomial.Polynomial.fit(np.log(sizes), losses, 2)
    N = np.geomspace(sizes[0] / 2, sizes[-1] * 2, 100)
    axes.plot(N, law.loss(N, compute / 6 / N), color="tab:blue", label="the law")
    axes.plot(N, parabola(np.log(N)), color="tab:orange", label="parabola through five runs")
    axes.plot(sizes, losses, "o", color="tab:blue")
    axes.plot(*minimum, "v", color="tab:orange", markersize=9)
    axes.plot(law.best_size(compute)[0], law.loss(*law.best_size(compute)), "*", color="tab:red")
    axes.set(xscale="log", xlabel="parameters N", ylabel="loss", title="One budget")
    axes.legend(fontsize=8)
    plt.show()

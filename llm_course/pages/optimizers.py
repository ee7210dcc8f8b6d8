"""What the pages of the optimizers train and draw."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Protocol

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from llm_course.model.decoder import DecoderModel
from llm_course.pages.engine import Paragraphs, tiny_model, write
from llm_course.training.config import OptimizationConfig
from llm_course.training.optim import build_optimizer, build_schedule


class Stepper(Protocol):
    """Anything that changes parameters by their gradients."""

    def step(self) -> Any: ...


Factory = Callable[[Any], Stepper]  # from parameters to an optimizer
STEEP = torch.tensor([100.0, 1.0])  # curvature across and along the valley
STYLES = ("-", "--", "-.", ":", "-", "--")

# ------------------------------------------------------------------------------ stories


@cache
def stories(rows: int = 8) -> Paragraphs:
    """Paragraphs of stories, `rows` of them in a batch."""
    data = Paragraphs(batch_size=rows)
    data.setup()
    return data


def train_stories(
    make: Callable[[nn.Module], Any], *, steps: int = 150, schedule: Any = None
) -> tuple[DecoderModel, list[float]]:
    """Train the tiny model, always from the same weights, with the optimizer that `make` makes.

    Returns the model, and the loss per word of each step. With `schedule`, an
    `OptimizationConfig`, the learning rate follows it.
    """
    data = stories()
    torch.manual_seed(0)
    model = tiny_model(data)
    optimizer = make(model)
    scheduler = schedule and build_schedule(optimizer, schedule, max_steps=steps)
    losses = []
    for _, batch in zip(range(steps), data.train_dataloader(epoch=0), strict=False):
        output = model(batch["input_ids"], labels=batch["labels"])
        loss = output.loss_sum / output.num_targets
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return model, losses


def tell(model: DecoderModel, count: int = 2) -> None:
    """Print paragraphs that a trained model makes up."""
    write(model, stories(), count)


def smooth(losses: Sequence[float], width: int = 10) -> list[float]:
    """The mean over the last `width` steps at each step."""
    means = []
    for end in range(1, len(losses) + 1):
        part = losses[max(0, end - width) : end]
        means.append(sum(part) / len(part))
    return means


def draw_losses(runs: Mapping[str, Sequence[float]], title: str) -> None:
    """The smoothed losses of runs on stories."""
    plt.figure(figsize=(6, 2.7), layout="constrained")
    for (name, losses), style in zip(runs.items(), STYLES, strict=False):
        plt.plot(smooth(losses), style, label=name)
    plt.xlabel("optimizer step")
    plt.ylabel("loss per word")
    plt.legend(fontsize=8, ncols=2)
    plt.title(title, fontsize=10)
    plt.show()


# ------------------------------------------------------------------------------ the valley


def valley_path(make: Factory, *, turned: bool = False, steps: int = 40) -> Tensor:
    """The places (steps + 1, 2), across and along, of an optimizer that starts at (1, 1).

    A turned valley lies diagonally between the two weights; its places are still counted across
    and along.
    """
    angle = math.pi / 4 if turned else 0.0
    axes = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    weights = (axes @ torch.ones(2)).requires_grad_()
    optimizer = make([weights])
    places = [torch.ones(2)]
    for _ in range(steps):
        weights.grad = None
        (0.5 * STEEP * (axes.T @ weights).square()).sum().backward()
        optimizer.step()
        places.append(axes.T @ weights.detach())
    return torch.stack(places)


def valley_loss(place: Tensor) -> float:
    """The loss at one place, across and along."""
    return (0.5 * STEEP * place.square()).sum().item()


def draw_valley(ax: Axes, paths: Mapping[str, Tensor], title: str) -> None:
    """Paths over the valley's lines of equal loss."""
    across, along = torch.meshgrid(
        torch.linspace(-1.15, 1.15, 80), torch.linspace(-0.35, 1.1, 60), indexing="ij"
    )
    loss = (STEEP[0] * across.square() + STEEP[1] * along.square()) / 2
    ax.contour(along, across, loss, levels=[0.05, 0.5, 5, 20, 50], colors="0.75", linewidths=0.8)
    for (name, places), marker in zip(paths.items(), "so^d", strict=False):
        ax.plot(places[:, 1], places[:, 0], marker=marker, ms=2.5, lw=0.7, label=name)
    ax.plot(0, 0, "k*", ms=8)
    ax.set(xlim=(-0.35, 1.1), ylim=(-1.15, 1.15))
    ax.set_xlabel("along the valley")
    ax.set_title(title, fontsize=9)


def draw_valleys(makers: Mapping[str, Factory], titles: Sequence[str] = ("", "")) -> None:
    """The same optimizers in the straight and in the turned valley."""
    fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.8), sharey=True, layout="constrained")
    for ax, turned, title in zip(axes, (False, True), titles, strict=True):
        paths = {name: valley_path(make, turned=turned) for name, make in makers.items()}
        draw_valley(ax, paths, title)
    axes[0].set_ylabel("across")
    axes[1].legend(fontsize=8, loc="lower left")
    plt.show()


def draw_paths(paths: Mapping[str, Tensor], title: str) -> None:
    """Paths through the valley, and the losses along them."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.8), layout="constrained")
    draw_valley(left, paths, title)
    left.set_ylabel("across")
    for (name, places), style in zip(paths.items(), STYLES, strict=False):
        right.semilogy([max(valley_loss(place), 1e-8) for place in places], style, label=name)
    if len(paths) > 1:
        right.legend(fontsize=8, loc="lower left")
    right.set_ylim(1e-7, 1e4)
    right.set_xlabel("step")
    right.set_title("loss", fontsize=9)
    plt.show()


def draw_path(make: Factory, name: str, *, turned: bool) -> None:
    """One path, and the loss along it."""
    draw_paths({name: valley_path(make, turned=turned)}, f"{name}, 40 steps")


# ------------------------------------------------------------------------------ comparisons


def compare(one: Factory, other: Factory, *, steps: int = 10) -> float:
    """The largest difference between two optimizers' weights, after the same random gradients."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).double() for shape in ((6, 4), (4,))]
    mine = [p.clone().requires_grad_() for p in start]
    theirs = [p.clone().requires_grad_() for p in start]
    first = one(mine)
    second = other(theirs)
    for _ in range(steps):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator).double()
            b.grad = a.grad.clone()
        first.step()
        second.step()
    return max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))


def first_step(gradient: Sequence[float], kind: Any, *, lr: float, **settings: Any) -> list[float]:
    """Where weights that start at 0 are after one step along a gradient."""
    weights = torch.zeros(len(gradient), requires_grad=True)
    weights.grad = torch.tensor(gradient)
    kind([weights], lr=lr, **settings).step()
    return [round(number, 3) for number in weights.tolist()]


def print_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Print which parameters of a model with one layer get which step and which decay."""
    names = {id(p): name.removeprefix("layers.0.") for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        members = [names[id(p)].removesuffix(".weight") for p in group["params"]]
        step = "Muon" if group["muon"] else "AdamW"
        print(f"{step}, decay {group['weight_decay']}: {', '.join(members)}")


def noisy_decay(make: Factory, *, sizes: Iterable[float] = (10.0, 0.1), steps: int = 300) -> Tensor:
    """Mean weights (steps + 1, sizes) that start at 1 and see only noise of these sizes."""
    spread = torch.tensor(list(sizes))
    weights = torch.ones(2000, len(spread), requires_grad=True)
    optimizer = make([weights])
    generator = torch.Generator().manual_seed(0)
    means = [weights.detach().mean(0)]
    for _ in range(steps):
        weights.grad = spread * torch.randn(weights.shape, generator=generator)
        optimizer.step()
        means.append(weights.detach().mean(0))
    return torch.stack(means)


def draw_decay(runs: Mapping[str, Tensor]) -> None:
    """How weights with large and with small gradients decay."""
    fig, axes = plt.subplots(1, len(runs), figsize=(6.4, 2.5), sharey=True, layout="constrained")
    for ax, (name, means) in zip(axes, runs.items(), strict=True):
        ax.plot(means[:, 0], label="gradients of size 10")
        ax.plot(means[:, 1], "--", label="gradients of size 0.1")
        ax.set_title(name, fontsize=9)
        ax.set_xlabel("step")
    axes[0].set_ylabel("mean weight")
    axes[0].legend(fontsize=8)
    plt.show()


def train_gains(decays: Sequence[float], rates: Sequence[float], *, steps: int = 300) -> Tensor:
    """Mean gains (steps, settings) where the right gain is 1 and the gradients' spread is 2."""
    torch.manual_seed(0)
    channels = 128
    gains = [torch.ones(channels, requires_grad=True) for _ in decays]
    groups = [
        {"params": [gain], "weight_decay": decay, "lr": rate}
        for gain, decay, rate in zip(gains, decays, rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    means = []
    for _ in range(steps):
        x = torch.randn(16, channels)
        y = x + 4 * torch.randn(16, channels)
        losses = [(gain * x - y).square().mean(0).sum() for gain in gains]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append([gain.mean().item() for gain in gains])
    return torch.tensor(means)


def draw_gains(means: Tensor, decays: Sequence[float]) -> None:
    """Mean gains over a run, and where the formula says that they come to rest."""
    plt.figure(figsize=(6, 2.5), layout="constrained")
    for curve, decay in zip(means.T, decays, strict=False):
        (line,) = plt.plot(curve, label=f"decay {decay}")
        plt.axhline(1 / (1 + decay), ls=":", color=line.get_color())
    plt.xlabel("step")
    plt.ylabel("mean gain")
    plt.ylim(0.5, 1.1)
    plt.legend(loc="lower left", fontsize=8)
    plt.title("Decay pulls the gains down to the dotted lines", fontsize=10)
    plt.show()


# ------------------------------------------------------------------------------ Muon, schedules


def draw_strengths(before: Tensor, after: Tensor) -> None:
    """The singular values of a gradient before and after it was orthogonalised."""
    places = range(1, len(before) + 1)
    plt.figure(figsize=(6, 2.6), layout="constrained")
    plt.semilogy(places, before / before[0], "o-", ms=3, label="gradient (strongest = 1)")
    plt.semilogy(places, after, "s-", ms=3, label="after five iterations")
    plt.xlabel("direction")
    plt.ylabel("strength")
    plt.ylim(1e-4, 5)
    plt.legend(loc="lower left", fontsize=8)
    plt.title(
        "The weak directions of a real gradient are lifted to the level of the strong ones",
        fontsize=10,
    )
    plt.show()


def race(
    name: Literal["adamw", "muon"], lr: float, *, steps: int = 60
) -> tuple[DecoderModel, list[float], list[float]]:
    """Train the tiny model on stories with the optimizer `name`, along a cosine schedule.

    Returns the model, the loss per word of each step, and how far each step moves attention's
    output projection: a root mean square, relative to the learning rate.
    """
    config = OptimizationConfig(
        optimizer=name, learning_rate=lr, warmup_steps=0, weight_decay=0.0, schedule="cosine"
    )
    sizes: list[float] = []

    def make(model: Any) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model, config)
        weight = model.layers[0].self_attn.o_proj.weight
        before = weight.detach().clone()

        def note(*_: Any) -> None:
            moved = (weight.detach() - before).square().mean().sqrt().item()
            sizes.append(moved / optimizer.param_groups[0]["lr"])
            before.copy_(weight.detach())

        optimizer.register_step_post_hook(note)
        return optimizer

    model, losses = train_stories(make, steps=steps, schedule=config)
    return model, losses, sizes


def draw_race(rates: Sequence[float], ends: Mapping[str, Sequence[float]]) -> None:
    """The loss at the end of each run, over the learning rate."""
    plt.figure(figsize=(6, 2.7), layout="constrained")
    for (name, values), style in zip(ends.items(), ("o-", "s--"), strict=True):
        plt.semilogx(rates, values, style, label=name)
    plt.minorticks_off()
    plt.xticks(rates, [f"{rate:g}" for rate in rates])
    plt.xlabel("learning rate")
    plt.ylabel("loss per word at the end")
    plt.legend(fontsize=8)
    plt.title("Each optimizer has a best rate of its own", fontsize=10)
    plt.show()


def draw_sizes(sizes: Mapping[str, Sequence[float]]) -> None:
    """How far each step of some runs moves a matrix, relative to the learning rate."""
    plt.figure(figsize=(6, 2.5), layout="constrained")
    for (name, values), style in zip(sizes.items(), STYLES, strict=False):
        plt.plot(range(1, 1 + len(values)), values, style, label=name)
    plt.xlabel("step")
    plt.ylabel("step / learning rate")
    plt.ylim(0, 1.05)
    plt.legend(fontsize=8)
    plt.title("AdamW's steps shrink, Muon's don't", fontsize=10)
    plt.show()


def draw_rounds(panels: Mapping[str, Callable[[Tensor], Tensor]], start: Tensor) -> None:
    """What five rounds of each polynomial make of the singular values `start`."""
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.8), sharey=True, layout="constrained")
    for ax, (name, polynomial) in zip(axes, panels.items(), strict=True):
        values = [start]
        for _ in range(5):
            values.append(polynomial(values[-1]))
        ax.plot(torch.stack(values), color="C0", lw=1)
        ax.axhspan(0.65, 1.25, color="0.5", alpha=0.2)
        ax.set(title=name, xlabel="round", xticks=range(6))
    axes[0].set_ylabel("singular value")
    figure.suptitle("Muon's polynomial lifts every value above 0.0015 in five rounds", fontsize=10)
    plt.show()


def draw_experts(moved: Mapping[str, Tensor]) -> None:
    """How far each step moves each expert, relative to the learning rate."""
    plt.figure(figsize=(6, 2.5), layout="constrained")
    for (name, curve), style in zip(moved.items(), ("-", "--", "k:"), strict=True):
        plt.plot(curve, style, label=name)
    plt.xlabel("step")
    plt.ylabel("step / learning rate")
    plt.legend(loc="lower left", fontsize=8)
    plt.title("An idle expert goes on for hundreds of steps", fontsize=10)
    plt.show()


def draw_schedules(factors: Mapping[str, Sequence[float]]) -> None:
    """The learning rate of each step, as a fraction of the peak."""
    plt.figure(figsize=(6, 2.5), layout="constrained")
    for (name, values), style in zip(factors.items(), STYLES, strict=False):
        plt.plot(values, style, label=name)
    plt.xlabel("optimizer step")
    plt.ylabel("fraction of the peak")
    plt.ylim(0, 1.1)
    plt.legend(loc="lower left", fontsize=8)
    plt.title("One way up, three ways down", fontsize=10)
    plt.show()


def train_deep(depth: int, warmup: int, lr: float, *, steps: int = 60) -> Tensor:
    """Train twelve plain networks of `depth` layers at once; returns their last losses (12,)."""
    torch.manual_seed(0)
    x = torch.randn(12, 512, 8)
    y = torch.tanh(x @ torch.randn(12, 8, 16) / 2) @ torch.randn(12, 16, 4) / 2
    sizes = [8] + [24] * (depth - 1) + [4]
    weights = [
        torch.randn(12, m, n).div(m**0.5).requires_grad_()
        for m, n in zip(sizes, sizes[1:], strict=False)
    ]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    curve = []
    for step in range(steps):
        rise = (step + 1) / max(warmup, 1)
        fall = (steps - step) / (steps - warmup)
        optimizer.param_groups[0]["lr"] = lr * min(rise, fall)
        rows = torch.randint(512, (64,))
        h = x[:, rows]
        for weight in weights[:-1]:
            h = torch.relu(h @ weight)
        losses = (h @ weights[-1] - y[:, rows]).square().mean((1, 2))
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(losses.detach())
    return torch.stack(curve)[-10:].mean(0)


def draw_warmup(rates: Sequence[float]) -> dict[tuple[int, int], Tensor]:
    """Final losses (rates,) of shallow and deep networks, by (depth, warmup)."""
    fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.7), sharey=True, layout="constrained")
    final = {}
    for ax, depth in zip(axes, (4, 8), strict=True):
        for warmup, style in ((0, "o-"), (20, "s--")):
            ends = torch.stack([train_deep(depth, warmup, lr) for lr in rates])  # (rates, 12)
            final[depth, warmup] = ends.median(1).values
            low, high = ends.quantile(torch.tensor([0.25, 0.75]), dim=1)
            ax.loglog(rates, final[depth, warmup], style, ms=4, label=f"warmup of {warmup} steps")
            ax.fill_between(rates, low, high, alpha=0.2)
        ax.minorticks_off()
        ax.set_xticks(rates, labels=[str(rate) for rate in rates], fontsize=8)
        ax.set_yticks([0.2, 0.4, 0.8], labels=["0.2", "0.4", "0.8"])
        ax.set_title(f"{depth} layers", fontsize=9)
        ax.set_xlabel("peak learning rate")
    axes[0].set_ylabel("final loss")
    axes[0].legend(fontsize=8)
    plt.show()
    return final


def rates_of(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
    *,
    steps: int = 100,
) -> Tensor:
    """The learning rates that a scheduler gives to an optimizer whose peak is 1."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return torch.tensor(seen, dtype=torch.float64)


def rates_by_pytorch(schedule: str, *, warmup: int = 10) -> Tensor:
    """The learning rates of 100 steps, by PyTorch's own schedulers one after the other."""

    def chain(optimizer: torch.optim.Optimizer) -> SequentialLR:
        rise = LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)
        if schedule == "cosine":
            return SequentialLR(
                optimizer, [rise, CosineAnnealingLR(optimizer, T_max=90, eta_min=0.1)], [warmup]
            )
        if schedule == "linear":
            return SequentialLR(
                optimizer, [rise, LinearLR(optimizer, 1.0, 0.1, total_iters=90)], [warmup]
            )
        flat = ConstantLR(optimizer, 1.0)
        fall = LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return SequentialLR(optimizer, [rise, flat, fall], [warmup, 80])

    with warnings.catch_warnings():
        # SequentialLR steps its parts in a way that PyTorch itself warns about
        warnings.simplefilter("ignore")
        return rates_of(chain)

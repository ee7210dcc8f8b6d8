"""What the page of the tasks trains and draws."""

import importlib

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_course.pages.engine import Paragraphs, cut, distance, tiny_model, write
from llm_course.text.data import BaseDataModule
from llm_course.training.config import Config, OptimizationConfig, TrainingConfig
from llm_course.training.task import LinearDataModule, RegressionTask, TrainingTask

Batch = dict[str, Tensor]


@cache
def stories(rows: int = 8) -> Paragraphs:
    """Paragraphs of stories, `rows` of them in a batch."""
    data = Paragraphs(batch_size=rows)
    data.setup()
    return data


def tell(model: nn.Module, count: int = 3) -> None:
    """Print paragraphs that a trained model makes up."""
    write(model, stories(), count)


# ------------------------------------------------------------------------------ cutting a batch


@cache
def rows_to_cut(equal: bool) -> tuple[nn.Module, Batch]:
    """A model, and sixteen paragraphs: short ones and long ones, or all cut to eight words."""
    torch.manual_seed(0)
    data = stories(16)
    batch = dict(next(iter(data.train_dataloader(epoch=0))))
    order = (batch["labels"] >= 0).sum(1).argsort(stable=True)
    batch = {name: tensor[order] for name, tensor in batch.items()}
    if equal:
        batch["labels"] = batch["labels"].clone()
        for row in batch["labels"]:
            row[(row >= 0).nonzero()[8:]] = -100
    return tiny_model(data).eval(), batch


def gradient_of(pieces: int, *, means: bool, equal: bool = False) -> list[Tensor]:
    """The gradient of sixteen paragraphs, cut into `pieces`: of sums, or of means of means."""
    model, batch = rows_to_cut(equal)
    model.zero_grad()
    targets = int((batch["labels"] >= 0).sum())
    for part in cut(batch, 16 // pieces):
        output = model(part["input_ids"], labels=part["labels"])
        divisor = output.num_targets * pieces if means else targets
        (output.loss_sum / divisor).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def cut_error(pieces: int, *, means: bool, equal: bool = False) -> float:
    """How far the gradient of a batch in pieces is from the whole batch's, relative to it."""
    whole = gradient_of(1, means=False, equal=equal)
    return distance(gradient_of(pieces, means=means, equal=equal), whole)


def draw_cut(pieces: int, *, equal: bool) -> None:
    """The targets of each micro-batch, the weight that a mean of means gives each, and its error.

    A target should weigh the same wherever the cuts are.
    """
    _, batch = rows_to_cut(equal)
    counts = [int((part["labels"] >= 0).sum()) for part in cut(batch, 16 // pieces)]
    fair = sum(counts) / pieces
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.6), layout="constrained")
    left.bar(range(pieces), counts)
    left.set(xlabel="micro-batch", ylabel="targets", ylim=(0, max(16, max(counts) * 1.1)))
    left.set_xticks(range(pieces))
    left.set_title(f"{sum(counts)} targets in {pieces} pieces", fontsize=9)
    right.bar(range(pieces), [fair / count for count in counts], color="tab:orange")
    right.axhline(1, color="black", ls=":", lw=1)
    right.set(xlabel="micro-batch", ylabel="weight of one target", ylim=(0, 3))
    right.set_xticks(range(pieces))
    error = cut_error(pieces, means=True, equal=equal)
    right.set_title(f"mean of means: gradient off by {error:.1%}", fontsize=9)
    plt.show()


# ------------------------------------------------------------------------------ a known answer


def excess_loss(model: nn.Module, data: LinearDataModule) -> float:
    """How far the squared error on the training rows is above least squares'."""
    rows = data.train_dataset

    def loss(weights: Tensor) -> float:
        return (rows.x @ weights[:-1] + weights[-1] - rows.y).square().mean().item()

    found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return loss(found) - loss(data.solution())


def gradient_at(
    task: TrainingTask, data: LinearDataModule, weights: Tensor, batch_size: int
) -> Tensor:
    """The gradient of a regression's mean loss at `weights`, read in batches of one size."""
    data.batch_size = batch_size
    model: Any = task.build_model(data)
    model.weight.data = weights[None, :-1].clone()
    model.bias.data = weights[-1:].clone()
    outputs = [task.train_step(model, batch) for batch in data.train_dataloader(epoch=0)]
    torch.stack([output.loss_sum for output in outputs]).sum().backward()
    targets = sum(int(output.num_targets) for output in outputs)
    return torch.cat([model.weight.grad[0], model.bias.grad]) / targets


def regressions(fit: Callable[..., Any], **mistake: Any) -> list[tuple[float, list[float]]]:
    """The excess loss and the learning rates of 80 steps of four micro-batches, for three seeds."""
    settings: dict[str, Any] = {"learning_rate": 0.5, "warmup_steps": 5, "weight_decay": 0.0}
    results = []
    for seed in range(3):
        config = Config(
            training=TrainingConfig(batch_size=4, seed=seed),
            optimization=OptimizationConfig(min_lr_ratio=0.0, **settings),
        )
        model, data, rates = fit(RegressionTask(config), steps=80, accumulate=4, **mistake)
        results.append((excess_loss(model, data), rates))
    return results


def draw_counting(runs: Mapping[str, Sequence[tuple[float, list[float]]]]) -> None:
    """The learning rates of one run of each kind, and the excess losses of all."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.7), layout="constrained")
    styles = ("-", "--", "-.")
    for place, (name, results) in enumerate(runs.items()):
        left.plot(results[0][1], styles[place], label=name)
        right.semilogy([place] * len(results), [excess for excess, _ in results], "o")
    left.set(xlabel="optimizer step", ylabel="learning rate")
    left.legend(fontsize=7)
    right.set(ylabel="excess loss", xlim=(-0.5, len(runs) - 0.5))
    right.set_xticks(range(len(runs)), labels=[name.replace(" ", "\n", 1) for name in runs])
    right.tick_params(axis="x", labelsize=8)
    plt.show()


# ------------------------------------------------------------------------------ a file of your own


class Spirals:
    """Points of two spirals, in turn."""

    def __init__(self, seed: int, size: int):
        t = torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 9 + 1
        self.y = torch.arange(size) % 2
        angle = t + torch.pi * self.y  # the second spiral is the first, turned by half a circle
        self.x = torch.stack([t * angle.cos(), t * angle.sin()], dim=1) / 10

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> Batch:
        return {"x": self.x[indices], "y": self.y[indices]}


class SpiralData(BaseDataModule):
    """512 points to train on, and 256 to test."""

    batch_size = 64

    def setup(self) -> None:
        self.train_dataset = Spirals(0, 512)
        self.val_dataset = Spirals(1, 256)


def load_task(source: str, name: str) -> type[TrainingTask]:
    """Write `source` to a file and load `module:Class` from it, as `--task` does."""
    module, _, cls = name.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{module}.py").write_text(source, encoding="utf-8")
        sys.path.insert(0, folder)
        sys.modules.pop(module, None)
        try:
            return getattr(importlib.import_module(module), cls)
        finally:
            sys.path.remove(folder)


def accuracy(model: nn.Module, data: BaseDataModule) -> float:
    """The fraction of the held-out points that a classifier gets right."""
    rows: Any = data.val_dataset
    with torch.no_grad():
        return (model(rows.x).argmax(1) == rows.y).float().mean().item()


def draw_spirals(model: nn.Module, data: BaseDataModule) -> None:
    """Held-out points of two spirals, and the sides that a model takes."""
    ticks = torch.linspace(-1.05, 1.05, 120)
    x, y = torch.meshgrid(ticks, ticks, indexing="xy")
    with torch.no_grad():
        side = model(torch.stack([x, y], dim=-1)).softmax(-1)[..., 1]  # (120, 120)
    rows: Any = data.val_dataset
    plt.figure(figsize=(4.4, 3.2), layout="constrained")
    plt.contourf(x, y, side, levels=[0, 0.5, 1], cmap="coolwarm", alpha=0.4)
    for kind, marker in ((0, "o"), (1, "s")):
        points = rows.x[rows.y == kind]
        plt.plot(*points.T, f"C{3 * kind}{marker}", ms=3, label=f"spiral {kind}")
    plt.xlabel("x")
    plt.ylabel("y")
    plt.legend(fontsize=8, loc="upper right")
    plt.title(f"{accuracy(model, data):.0%} of the held-out points are right", fontsize=10)
    plt.show()


def mean_is_right(task: TrainingTask, model: nn.Module, batch: Batch) -> bool:
    """Whether a language modelling task's loss per target is the one that PyTorch computes."""
    output = task.train_step(model, batch)
    logits = model(batch["input_ids"]).logits
    mean = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    return torch.allclose(output.loss_sum / output.num_targets, mean, rtol=1e-4)

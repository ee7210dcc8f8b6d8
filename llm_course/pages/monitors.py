"""Runs with a fault that the pages on monitoring watch, and what they draw of them."""

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.optim import Optimizer

from llm_course.model.config import ModelConfig
from llm_course.pages.engine import LONGEST, Paragraphs, Record, told
from llm_course.text.batches import SupervisedDataset
from llm_course.training.config import Config, DataConfig, OptimizationConfig, TrainingConfig
from llm_course.training.engine import TrainingEngine
from llm_course.training.hooks import Callback
from llm_course.training.monitoring import LayerMonitor
from llm_course.training.state import TrainState
from llm_course.training.task import LanguageModelingTask

STEPS = 100
EVERY = 4  # steps between two rows of a monitor
LAYERS = ("layers.0", "layers.1", "layers.2")
PLANTED = {
    "healthy": "nothing is wrong",
    "frozen": "the optimizer never got the parameters of layer 1",
    "large": "the outputs of layer 0 begin a hundred times too large",
    "endless": "the learning rate never stops rising: to 0.6 in 1200 steps, not to 0.003 in 20",
}
MONITORS = {
    "update_ratio": "update / weights",
    "activation_rms": "RMS of the output",
    "grad_norm": "gradient norm",
}


class Frozen(LanguageModelingTask):
    """Forgets a layer when it builds the optimizer."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        layer: Any = model.get_submodule("layers.1")
        layer.requires_grad_(False)
        optimizer = super().build_optimizer(model)
        layer.requires_grad_(True)
        return optimizer


class Large(LanguageModelingTask):
    """Initializes a layer a hundred times too large."""

    def build_model(self, data: Any) -> Any:
        model = super().build_model(data)
        with torch.no_grad():
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                model.get_submodule(f"layers.0.{name}").weight.mul_(100)  # type: ignore[operator]
        return model


TASKS = {"frozen": Frozen, "large": Large}


def make_engine(
    callbacks: Sequence[Callback] = (),
    *,
    fault: str = "healthy",
    data: Paragraphs | None = None,
    max_steps: int = STEPS,
    **training: Any,
) -> TrainingEngine:
    """An engine that trains a model of three blocks on paragraphs of stories, eight in a step."""
    endless = fault == "endless"
    settings: dict[str, Any] = {"device": "cpu", "precision": "fp32", "eval_interval": 1000}
    config = Config(
        data=DataConfig(sequence_length=LONGEST),
        model=ModelConfig(
            hidden_size=48, num_layers=3, num_heads=4, max_position_embeddings=LONGEST
        ),
        training=TrainingConfig(batch_size=8, max_steps=max_steps, **settings | training),
        optimization=OptimizationConfig(
            learning_rate=0.6 if endless else 3e-3,
            warmup_steps=1200 if endless else 20,
            schedule="constant",
            weight_decay=0.0,
        ),
    )
    task = TASKS.get(fault, LanguageModelingTask)(config)
    return TrainingEngine(config, task, data or Paragraphs(8, num_bytes=200_000), callbacks)


class Watched(Record):
    """A record that also keeps a paragraph that the model makes up after the last step."""

    text = ""

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        super().on_step_end(engine, metrics)
        if engine.state.step == STEPS:
            self.text = told(engine.model, engine.data, 1)[0]


@functools.cache
def watched_run(fault: str = "healthy") -> Watched:
    """The rows of a run with a monitor of its layers, and what its model writes in the end."""
    record = Watched()
    make_engine([LayerMonitor(log_interval=EVERY), record], fault=fault).run()
    return record


def smoothed(losses: Sequence[float], window: int = 10) -> list[float]:
    """The mean of each loss and of those right before it, `window` in all."""
    parts = [losses[max(0, end - window) : end] for end in range(1, 1 + len(losses))]
    return [sum(part) / len(part) for part in parts]


def column(fault: str, monitor: str, layer: str) -> dict[int, float]:
    """What a monitor says about a layer, by step."""
    name = f"{monitor}/{layer}"
    return {row["step"]: row[name] for row in watched_run(fault).rows if name in row}


def first_seen(fault: str, monitor: str, factor: float) -> int | None:
    """The first step at which a layer's value is `factor` times off that of the healthy run."""
    for step in range(EVERY, STEPS + 1, EVERY):
        for layer in LAYERS:
            ratio = column(fault, monitor, layer)[step] / column("healthy", monitor, layer)[step]
            if not 1 / factor < ratio < factor:
                return step
    return None


def loss_first_seen(fault: str, factor: float = 1.05) -> int | None:
    """The first step from which the smoothed loss stays above `factor` times the healthy one."""
    pairs = zip(
        smoothed(watched_run(fault).column("loss")),
        smoothed(watched_run("healthy").column("loss")),
        strict=True,
    )
    worse = [loss > factor * healthy for loss, healthy in pairs]
    if not worse[-1]:
        return None
    return STEPS - worse[::-1].index(False) + 1 if False in worse else 1


@contextmanager
def nothing_copied() -> Iterator[None]:
    """A planted mistake: what should be a copy of a tensor is the tensor itself."""
    with patch.object(Tensor, "clone", lambda tensor: tensor):
        yield


def stand_in(model: nn.Module, optimizer: Optimizer) -> Any:
    """What a monitor needs of an engine, around any model and optimizer."""
    return SimpleNamespace(model=model, optimizer=optimizer, state=TrainState())


# --------------------------------------------------------------------------------------- slow runs


class SlowRows(SupervisedDataset):
    """Rows that take long to fetch."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        time.sleep(0.03)
        return super().__getitems__(indices)


class SlowDisk(Paragraphs):
    """Paragraphs on a slow disk."""

    def setup(self) -> None:
        super().setup()
        self.train_dataset.__class__ = SlowRows


class SlowNotes(Callback):
    """Takes long after each step."""

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        time.sleep(0.03)


# ---------------------------------------------------------------------------------------- pictures


def show_losses(faults: Mapping[str, str]) -> None:
    """The smoothed training losses of runs under other names."""
    plt.figure(figsize=(6, 2.9))
    for name, fault in faults.items():
        plt.plot(smoothed(watched_run(fault).column("loss")), lw=1.5, label=name)
    plt.xlabel("optimizer step")
    plt.ylabel("loss per word, nats")
    plt.legend(fontsize=8)
    plt.title("Four runs, three of them with a fault")
    plt.show()


def draw_monitor(ax: Axes, fault: str, monitor: str, until: int = STEPS) -> None:
    """A line for each layer up to step `until`, over those of the healthy run in grey."""
    for layer in LAYERS:
        healthy = column("healthy", monitor, layer)
        ax.plot(list(healthy), list(healthy.values()), color="lightgray", lw=4)
    for layer, marker in zip(LAYERS, "osv", strict=True):
        seen = {step: v for step, v in column(fault, monitor, layer).items() if step <= until}
        points = [value or math.nan for value in seen.values()]  # a logarithm has no place for 0
        ax.plot(list(seen), points, marker=marker, ms=3, lw=1, label=layer)
    ax.set_yscale("log")
    ax.set_xlim(0, STEPS + 2)
    ax.set_xlabel("optimizer step")
    ax.set_title(MONITORS[monitor], fontsize=10)


def show_monitors(faults: Sequence[str], monitors: Sequence[str]) -> None:
    """A row of pictures for each fault, a column with one scale for each monitor."""
    size = (3.6 * len(monitors), 2.3 * len(faults))
    figure, axes = plt.subplots(
        len(faults), len(monitors), figsize=size, squeeze=False, sharey="col"
    )
    for row, fault in zip(axes, faults, strict=True):
        for ax, monitor in zip(row, monitors, strict=True):
            draw_monitor(ax, fault, monitor)
            ax.set_title(f"{fault}: {MONITORS[monitor]}", fontsize=10)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    plt.show()


def show_until(fault: str, monitor: str, until: int) -> None:
    """The loss and a monitor of a run, up to a step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3))
    left.plot(smoothed(watched_run("healthy").column("loss")), color="lightgray", lw=4)
    left.plot(smoothed(watched_run(fault).column("loss"))[:until], color="tab:blue")
    left.set_xlim(0, STEPS + 2)
    left.set_ylim(3, 7)
    left.set_xlabel("optimizer step")
    left.set_title("loss per word", fontsize=10)
    draw_monitor(right, fault, monitor, until)
    right.legend(fontsize=7)
    figure.suptitle(f"{fault}, up to step {until} (grey: the healthy run)", fontsize=11)
    figure.tight_layout()
    plt.show()


def show_time(rows: Mapping[str, Mapping[str, float]]) -> None:
    """How much of a step is spent waiting for data, for each run."""
    plt.figure(figsize=(6, 2))
    waiting = [1e3 * row["data_seconds"] for row in rows.values()]
    rest = [1e3 * (row["step_seconds"] - row["data_seconds"]) for row in rows.values()]
    plt.barh(list(rows), waiting, color="tab:red", label="waiting for data")
    plt.barh(list(rows), rest, left=waiting, color="tab:blue", label="the rest")
    plt.gca().invert_yaxis()
    plt.xlim(right=1.5 * max(a + b for a, b in zip(waiting, rest, strict=True)))
    plt.xlabel("ms a step")
    plt.legend(fontsize=8)
    plt.title("Waiting for data has a number of its own")
    plt.show()


def show_launches(seconds: Sequence[float]) -> None:
    """What a clock shows for each step on a device that runs ahead."""
    plt.figure(figsize=(5.5, 2.6))
    plt.bar(range(1, 1 + len(seconds)), [1e3 * each for each in seconds])
    plt.axhline(10, color="tab:red", ls="--", label="what a step takes")
    plt.xlabel("step")
    plt.ylabel("the clock shows (ms)")
    plt.legend(fontsize=8)
    plt.xticks(range(5, 1 + len(seconds), 5))
    plt.ylim(top=1.35e3 * max(seconds))
    plt.title("The step that reads the loss pays for the four before it")
    plt.show()


def show_ceiling(sizes: Sequence[int], speeds: Sequence[float]) -> None:
    """The speed of a product of two square matrices by their size."""
    plt.figure(figsize=(5, 2.5))
    plt.loglog(sizes, [speed / 1e9 for speed in speeds], marker="o")
    plt.xticks(sizes, [str(size) for size in sizes])
    plt.minorticks_off()
    plt.xlabel("rows and columns")
    plt.ylabel("billion operations / s")
    plt.title("Large products come near the ceiling")
    plt.show()


def show_memory(curves: Sequence[Sequence[int]], hill: float, gradients: float) -> None:
    """The bytes held over a step, with one micro-batch and with two."""
    plt.figure(figsize=(6, 2.8))
    for number, held in enumerate(curves, start=1):
        share = [i / len(held) for i in range(len(held))]
        plt.plot(share, [size / 1e6 for size in held], label=f"micro-batches: {number}")
    plt.axhline(hill / 1e6, color="gray", ls="--", label="activations + loss, estimated")
    plt.axhline((hill + gradients) / 1e6, color="black", ls=":", label="and gradients")
    plt.xlabel("share of the step's allocations")
    plt.ylabel("held more than\nbefore the step (MB)")
    plt.legend(fontsize=7, ncols=2)
    plt.ylim(top=1.4 * max(map(max, curves)) / 1e6)
    plt.title("From the second micro-batch on, gradients and activations coexist")
    plt.show()


def show_estimates(seconds: Mapping[str, float]) -> None:
    """Estimates of a run's time, and what it took."""
    plt.figure(figsize=(5.5, 2))
    colors = ["tab:gray", "tab:gray", "tab:blue", "tab:orange"]
    plt.barh(list(seconds), list(seconds.values()), color=colors)
    plt.gca().invert_yaxis()
    plt.xlabel("seconds")
    plt.title("Counting the validations matters most")
    plt.show()

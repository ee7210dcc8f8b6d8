"""The run that the pages on callbacks watch, and what they draw of it."""

import copy
import functools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import torch

from llm_course.model.config import ModelConfig
from llm_course.model.generation import generate
from llm_course.pages.engine import END, LONGEST, SIZES, START, Paragraphs, Record
from llm_course.training.callbacks import EarlyStopping, MetricsLogger, read_metrics
from llm_course.training.config import Config, DataConfig, OptimizationConfig, TrainingConfig
from llm_course.training.engine import TrainingEngine
from llm_course.training.hooks import Callback, CallbackList
from llm_course.training.state import TrainState
from llm_course.training.task import LanguageModelingTask

FEW = 128  # paragraphs to train on: a model soon knows them by heart
STEPS = 240
EVERY = 8  # steps between two validations


class FewParagraphs(Paragraphs):
    """Paragraphs of stories of which only a few are for training."""

    def _dataset(self, examples: list[tuple[list[int], list[int]]]) -> Any:
        return super()._dataset(examples[:FEW])


def make_engine(
    callbacks: Sequence[Callback] = (),
    *,
    rows: int = 8,
    dropout: float = 0.1,
    learning_rate: float = 5e-3,
    schedule: Any = "constant",
    **training: Any,
) -> TrainingEngine:
    """An engine that trains a model of one block on a few paragraphs, `rows` of them in a step."""
    settings: dict[str, Any] = {"device": "cpu", "precision": "fp32", "eval_interval": EVERY}
    config = Config(
        data=DataConfig(sequence_length=LONGEST),
        model=ModelConfig(**SIZES, dropout=dropout),
        training=TrainingConfig(batch_size=rows, **settings | training),
        optimization=OptimizationConfig(
            learning_rate=learning_rate,
            schedule=schedule,
            warmup_steps=0,
            weight_decay=0.0,
        ),
    )
    task = LanguageModelingTask(config)
    return TrainingEngine(config, task, FewParagraphs(rows, num_bytes=60_000), callbacks)


@functools.cache
def whole_run() -> Record:
    """What 240 steps report, in which the model learns the few paragraphs by heart."""
    record = Record()
    make_engine([record], max_steps=STEPS).run()
    return record


def losses_with(*callbacks: Callback, max_steps: int = 12) -> list[float]:
    """The loss of each step of a short run without a validation on the way."""
    record = Record()
    make_engine([*callbacks, record], max_steps=max_steps, eval_interval=1000).run()
    return record.column("loss")


def sample(model: Any, data: Paragraphs) -> str:
    """A paragraph that the model makes up, with the global random numbers."""
    start = torch.full((1, 1), START)
    length = LONGEST - 1
    ids = generate(model, start, max_new_tokens=length, temperature=0.6, stop_token_ids=[END])
    return data.text_of(ids[0])


class Recorder(Callback):
    """Notes the name of each hook that is called, and the number of steps done by then."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []


def _note(hook: str) -> Any:
    def note(self: Recorder, engine: Any, *arguments: Any) -> None:
        self.calls.append((engine.state.step, hook))

    return note


for _hook in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Recorder, _hook, _note(_hook))


# ---------------------------------------------------------------------------- the order of a list


class Perplexity(Callback):
    """Adds a number to the metrics."""

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        metrics["perplexity"] = math.exp(metrics["loss_sum"] / metrics["num_targets"])


class Reader(Callback):
    """Looks for the loss of a row."""

    found = False

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.found |= "loss" in metrics


class Saver(Callback):
    """Keeps the state of a logger, as a checkpoint would."""

    def __init__(self, logger: MetricsLogger):
        self.logger = logger

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.saved = self.logger.state_dict()["num_targets"]


def nothing_lost(order: Sequence[str]) -> bool:
    """Whether in this order the row has the perplexity, the reader a loss, the state the step.

    Two steps are made, and the second one has a row; the first is the one that is saved.
    """
    with tempfile.TemporaryDirectory() as folder:
        logger = MetricsLogger(folder, log_interval=2)
        reader = Reader()
        saver = Saver(logger)
        roles = {"add": Perplexity(), "write": logger, "read": reader, "save": saver}
        callbacks = CallbackList(roles[name] for name in order)
        engine = SimpleNamespace(state=TrainState(), num_batches=2)
        callbacks.call("on_train_start", engine)
        saved = []
        for _ in range(2):
            engine.state.advance(batches=1, targets=10, updated=True)
            callbacks.call("on_step_end", engine, {"loss_sum": 20.0, "num_targets": 10})
            saved.append(saver.saved)
        row = read_metrics(logger.path)[-1]
    return "perplexity" in row and reader.found and saved[0] == 10


# --------------------------------------------------------------------------- stopping and slowing


class Keep(Callback):
    """Notes each validation loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, engine: Any, metrics: dict[str, float]) -> None:
        self.losses.append(metrics["val_loss"])


def in_jobs(kind: type[Callback], *, steps: int, **settings: Any) -> tuple[list[float], int]:
    """The validation losses, and the last step, of a run in jobs of `steps` steps each.

    Each job is a new engine with a new callback, and resumes where the one before was.
    """
    keep = Keep()
    state = None
    while True:
        engine = make_engine([kind(**settings), keep], max_steps=STEPS)
        engine.setup(state)
        engine.max_steps = min(engine.state.step + steps, STEPS)
        engine.run()
        if engine.stop_reason or engine.state.step == STEPS:
            return keep.losses, engine.state.step
        state = copy.deepcopy(engine.state_dict())


class Planted(Callback):
    """Puts other numbers in the place of the validation losses."""

    def __init__(self, losses: Sequence[float]):
        self.losses: Iterator[float] = iter(losses)

    def on_validation_end(self, engine: Any, metrics: dict[str, float]) -> None:
        metrics["val_loss"] = next(self.losses)


class Rates(Callback):
    """Notes the learning rate with which each step is made."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_batch_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.rates.append(engine.optimizer.param_groups[0]["lr"])


def rates_with(*callbacks: Callback, val_losses: Sequence[float], schedule: Any) -> list[float]:
    """The rate of each step of a run with a validation after each, which finds `val_losses`."""
    rates = Rates()
    every = [Planted(val_losses), *callbacks, rates]
    length = len(val_losses)
    make_engine(every, schedule=schedule, max_steps=length, eval_interval=1).run()
    return rates.rates


# ---------------------------------------------------------------------------------------- pictures


def show_run(record: Record) -> None:
    """The training loss and the validation loss, and where the latter was lowest."""
    found = record.column("val_loss")
    steps = range(EVERY, EVERY * len(found) + 1, EVERY)
    best = min(range(len(found)), key=found.__getitem__)
    plt.figure(figsize=(6, 2.8))
    plt.plot(record.column("step"), record.column("loss"), lw=1, label="training")
    plt.plot(steps, found, "o-", ms=3, label="validation")
    plt.plot(steps[best], found[best], "*", color="tab:red", ms=12, label="the best")
    plt.xlabel("optimizer step")
    plt.ylabel("loss per word, nats")
    plt.legend(fontsize=8)
    plt.title("The model learns the paragraphs by heart, and nobody stops it")
    plt.show()


def show_gaps(gaps: Mapping[str, Sequence[float]], *, at: int) -> None:
    """How far the losses of watched runs are from those of the run alone."""
    plt.figure(figsize=(6, 2.6))
    for (name, values), marker in zip(gaps.items(), ("o-", "s-", "^-"), strict=False):
        plt.plot(range(1, 1 + len(values)), values, marker, ms=4, label=name)
    plt.axvline(at, color="tab:red", lw=1, ls=":")
    plt.yscale("symlog", linthresh=1e-4)  # powers of ten, and zero below them
    plt.ylim(bottom=-5e-5)
    plt.xlabel("optimizer step")
    plt.ylabel("difference of the loss")
    plt.legend(fontsize=8)
    plt.title(f"Two of three looks after step {at} change every later step")
    plt.show()


def show_patience(patience: int, min_delta: float) -> None:
    """Where a patience ends the run that nobody stopped."""
    found = whole_run().column("val_loss")
    steps = [EVERY * number for number in range(1, 1 + len(found))]
    stopper = EarlyStopping(patience=patience, min_delta=min_delta)
    asked: list[str] = []
    engine: Any = SimpleNamespace(stop=asked.append)
    best: list[float] = []
    for value in found:
        stopper.on_validation_end(engine, {"val_loss": value})
        best.append(stopper.best)
        if asked:
            break
    end = len(best)
    kept = min(range(end), key=found.__getitem__)
    plt.figure(figsize=(6.5, 2.9))
    plt.plot(steps, found, "o-", ms=3, color="lightgray")
    plt.plot(steps[:end], found[:end], "o-", ms=4, label="validation loss")
    plt.step(steps[:end], best, where="post", color="tab:green", lw=1, label="the best so far")
    plt.plot(steps[kept], found[kept], "*", color="tab:red", ms=12, label="the lowest seen")
    if asked:
        plt.axvspan(steps[end - 1], steps[-1], color="tab:red", alpha=0.1)
    plt.ylim(3, 5.6)
    plt.xlabel("optimizer step")
    plt.ylabel("loss per word, nats")
    plt.legend(fontsize=8)
    ended = f"ends at step {steps[end - 1]}" if asked else "never ends the run"
    plt.title(f"patience {patience} {ended}; its best loss is {found[kept]:.2f}")
    plt.show()


def show_jobs(ends: Mapping[str, Sequence[float]]) -> None:
    """The validation losses of runs that were cut into jobs."""
    plt.figure(figsize=(6, 2.6))
    for (name, found), style in zip(ends.items(), ("x--", "o-"), strict=True):
        plt.plot([EVERY * n for n in range(1, 1 + len(found))], found, style, ms=4, label=name)
    plt.xlabel("optimizer step")
    plt.ylabel("validation loss")
    plt.ylim(3, 4.6)
    plt.legend(fontsize=8)
    plt.title("In jobs of two validations, a patience that forgets never ends")
    plt.show()


def show_rates(rates: Mapping[str, Sequence[float]]) -> None:
    """The learning rate of each step."""
    plt.figure(figsize=(6, 2.6))
    for (name, values), style in zip(rates.items(), ("k:", "x-", "o-"), strict=True):
        plt.plot(range(1, 1 + len(values)), values, style, ms=3, lw=1, label=name)
    plt.xlabel("optimizer step")
    plt.ylabel("learning rate")
    plt.legend(fontsize=8)
    plt.title("A rate that is overwritten lasts for one step")
    plt.show()

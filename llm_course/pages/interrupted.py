"""The run that the pages on signals and on the train command interrupt, and what they draw of it.

The storyteller, which has read nothing but easy stories, goes on with six steps of harder ones.
"""

import functools
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator

from llm_course.pages.storyteller import load_storyteller
from llm_course.training.checkpointing import CheckpointManager, load_checkpoint
from llm_course.training.config import Config
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.folder import begin_with, continuation, load_initial, tokenizer_of
from llm_course.training.sources import load_config
from llm_course.training.task import LanguageModelingTask

STEPS = 6
SETTINGS = """\
init_from: storyteller
data: {corpus: stories, stories: {level: medium, num_bytes: 20_000}, sequence_length: 32}
training: {max_steps: 6, batch_size: 2, eval_interval: 6, device: cpu, precision: fp32}
optimization: {learning_rate: 1e-3, warmup_steps: 0}
checkpoint: {save_interval: 2}
logging: {log_interval: 1, progress: false, tensorboard: false,
          sample_prompt: One rainy day, sample_tokens: 40}
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


# -------------------------------------------------------------------------------------- the signal


class Notice(Callback):
    """Sends a signal to its own process within a step: PyTorch calls us when the weights moved."""

    def __init__(self, step: int, name: str = "SIGTERM", times: int = 1):
        self.step = step
        self.name = name
        self.times = times

    def on_train_start(self, engine: Any) -> None:
        def send(*told: Any) -> None:
            if engine.state.step + 1 == self.step:
                for _ in range(self.times):
                    signal.raise_signal(signal.Signals[self.name])

        self.hook = engine.optimizer.register_step_post_hook(send)

    def on_train_end(self, engine: Any) -> None:
        self.hook.remove()

    def on_exception(self, engine: Any, error: BaseException) -> None:
        self.hook.remove()


class EveryFew(Callback):
    """Sends SIGTERM after every few steps, as a cluster on which others have priority."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        if engine.state.step % self.steps == 0:
            signal.raise_signal(signal.SIGTERM)


def shell(program: str) -> str:
    """What a Python program prints, and then the exit status that the shell sees."""
    # whatever this process ignores, the program begins with the system's own handlers
    begin = (
        "import os, signal, sys; [signal.signal(s, signal.SIG_DFL) for s in (2, 15)];"
        "os.execvp('sh', ['sh', '-c', '\"$0\" -c \"$1\"; echo exit status $?', *sys.argv[1:]])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", begin, sys.executable, program], capture_output=True, text=True
    )
    return ended.stdout.strip()


MOMENTS = ("before the run", "during the run", "after one Ctrl-C", "after the run")


def handlers(callback: Callback) -> list[str]:
    """Whose handler waits for Ctrl-C at each of the `MOMENTS` of a run with this callback."""

    def whose() -> str:
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return "Python's" if default else "ours"

    before = {number: signal.getsignal(number) for number in SIGNALS}
    engine: Any = SimpleNamespace(stop=lambda reason: None)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        found = [whose()]
        callback.on_train_start(engine)
        found.append(whose())
        signal.raise_signal(signal.SIGINT)
        found.append(whose())
        callback.on_train_end(engine)
        return [*found, whose()]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_handlers(*callbacks: Callback) -> None:
    """A table of whose handler waits for Ctrl-C, with a column for each callback."""
    names = [type(callback).__name__ for callback in callbacks]
    print(f"{'':18}", *(f"{name:14}" for name in names))
    for moment, *found in zip(MOMENTS, *map(handlers, callbacks), strict=True):
        print(f"{moment:18}", *(f"{each:14}" for each in found))


# ----------------------------------------------------------------------------------------- the run


class Losses(Callback):
    """Notes the loss of each step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.losses[engine.state.step] = metrics["loss_sum"] / metrics["num_targets"]


class Ended(NamedTuple):
    """How a run ended, the loss of each of its steps, and its engine."""

    how: str
    losses: dict[int, float]
    engine: TrainingEngine


def _config() -> Config:
    Path("medium.yaml").write_text(SETTINGS)
    config, _ = load_config(["--config=medium.yaml", "--run_dir=by_hand"])
    return config


def _engine(callbacks: Sequence[Callback], state: dict[str, Any] | None) -> TrainingEngine:
    config, storyteller = begin_with(_config())
    task = LanguageModelingTask(config)
    engine = TrainingEngine(config, task, task.build_data(), callbacks)
    engine.setup(state)
    if state is None:
        load_initial(engine, storyteller)
    return engine


def train(*callbacks: Callback, state: dict[str, Any] | None = None) -> Ended:
    """Train to the end or to an interruption, from `state` or from the storyteller's weights.

    Whatever the callbacks do to the handlers of signals is undone.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    notes = Losses()
    engine = _engine([notes, *callbacks], state)
    try:
        engine.run()
        how = engine.stop_reason or "finished"
    except (SystemExit, KeyboardInterrupt) as error:
        how = repr(error)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return Ended(how, notes.losses, engine)


def resume(manager: CheckpointManager) -> Ended:
    """Finish a run from its newest checkpoint."""
    path = manager.latest()
    assert path is not None
    return train(state=load_checkpoint(path))


@functools.cache
def never_stopped() -> Ended:
    """The run that nobody interrupts."""
    return train()


def saved(manager: CheckpointManager) -> list[str]:
    """The names of a manager's checkpoints."""
    return sorted(path.name for path in manager.folder.glob("step_*"))


def same_weights(one: Ended, other: Ended) -> bool:
    """Whether two runs ended with the same weights, to the last bit."""
    weights = other.engine.model.state_dict()
    mine = one.engine.model.state_dict()
    return all(torch.equal(tensor, weights[name]) for name, tensor in mine.items())


def distance(one: Ended, other: Ended | None = None) -> float:
    """How far the weights of a run are from those of another, or from where it began."""
    weights = (other.engine.model if other else load_storyteller()[0]).state_dict()
    gaps = [
        (tensor - weights[name]).double().square().sum()
        for name, tensor in one.engine.model.named_parameters()  # the tied table counts once
    ]
    return torch.stack(gaps).sum().sqrt().item()


def same_tensors(one: CheckpointManager, other: CheckpointManager) -> bool:
    """Whether the newest checkpoints of two managers hold the same tensors, byte for byte."""
    folders = [manager.latest() for manager in (one, other)]
    first, second = (
        [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]
        for folder in folders
        if folder is not None
    )
    return first == second


def story(run: Ended, *, num: int = 40) -> str:
    """How the trained model continues "One rainy day"."""
    tokenizer: Any = tokenizer_of(Path("storyteller"))
    model: Any = run.engine.model.eval()
    pieces = continuation(model, tokenizer, "One rainy day", seed=0, max_new_tokens=num)
    return "One rainy day" + "".join(pieces)


# ---------------------------------------------------------------------------------------- pictures


def show_resumed(runs: Mapping[str, Ended], *, cut: int) -> None:
    """The losses of runs that were interrupted in step `cut`, over those of the whole run."""
    whole = never_stopped().losses
    plt.figure(figsize=(6.5, 3))
    plt.plot(
        list(whole), list(whole.values()), color="gray", lw=8, alpha=0.3, label="never stopped"
    )
    for (name, run), style in zip(runs.items(), ("x--", "o-"), strict=True):
        plt.plot(list(run.losses), list(run.losses.values()), style, ms=5, label=name)
    plt.axvline(cut, color="tab:red", lw=1, ls=":")
    plt.gca().xaxis.set_major_locator(MaxNLocator(integer=True))
    plt.xlabel("optimizer step")
    plt.ylabel("loss per token, nats")
    plt.title(f"SIGTERM in step {cut}, and two ways to go on", fontsize=11)
    plt.legend(fontsize=8)
    plt.tight_layout()
    plt.show()


def show_queue(attempts: Mapping[str, Sequence[tuple[int, int]]], *, steps: int) -> None:
    """The attempts of each command, of which each has an exit status and the step it reached."""
    figure, ax = plt.subplots(figsize=(6.5, 1.9))
    for row, found in enumerate(attempts.values()):
        begin = 0
        for status, end in found:
            colour = "tab:orange" if status else "tab:green"
            ax.barh(row, end - begin - 0.15, left=begin, height=0.55, color=colour, alpha=0.6)
            ax.text((begin + end) / 2, row, str(status), ha="center", va="center")
            begin = end
    ax.axvline(steps, color="gray", lw=1, ls=":")
    ax.set_yticks(range(len(attempts)), list(attempts))
    ax.invert_yaxis()
    ax.set(xlim=(0, steps + 1), xticks=range(0, steps + 1, 4), xlabel="optimizer step")
    ax.set_title("A status of 0 ends the queue's work, finished or not", fontsize=11)
    figure.tight_layout()
    plt.show()

"""The runs of the page on training: a story run, runs on a line, and a task of one's own."""

import contextlib
import functools
import io
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from filelock import FileLock
from torch import Tensor, nn

from llm_course.cli import main
from llm_course.text.data import BaseDataModule
from llm_course.training.callbacks import read_metrics
from llm_course.training.checkpointing import CheckpointManager, load_checkpoint
from llm_course.training.config import (
    CheckpointConfig,
    Config,
    LoggingConfig,
    OptimizationConfig,
    TrainingConfig,
)
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.run import train_worker
from llm_course.training.task import RegressionTask

# ------------------------------------------------------------------------------------ the terminal


class Said(NamedTuple):
    """What a command leaves: its exit status, and what it wrote to its two streams."""

    status: int
    out: str
    err: str


def quietly(function: Callable[..., Any], *arguments: Any, **settings: Any) -> tuple[Any, str, str]:
    """Call a function; returns its result, and what it printed to stdout and stderr."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        result = function(*arguments, **settings)
    return result, out.getvalue(), err.getvalue()


def terminal(*words: str) -> Said:
    """`llm-course` with these words; those of the first text are split at its spaces."""
    return Said(*quietly(main, [*words[0].split(), *words[1:]]))


class TakeMachineAway(Callback):
    """Sends SIGTERM to its own process in the middle of a run, as a cluster does."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        if engine.state.step == self.step:
            signal.raise_signal(signal.SIGTERM)


# --------------------------------------------------------------------------------------- a folder


def tree(folder: str | Path) -> str:
    """The files in a folder of a run, those of a checkpoint in one line each."""
    lines = []
    for path in sorted(Path(folder).iterdir()):
        if path.name == "checkpoints":
            for checkpoint in sorted(path.iterdir()):
                files = ", ".join(sorted(file.name for file in checkpoint.iterdir()))
                lines.append(f"checkpoints/{checkpoint.name}/  {files}")
        elif path.is_dir():
            lines.append(f"{path.name}/  {', '.join(sorted(file.name for file in path.iterdir()))}")
        elif path.name != ".lock":
            lines.append(path.name)
    return "\n".join(lines)


def show_curve(run_dir: str, *, cut: int) -> None:
    """The losses in a run's metrics.jsonl, and the step at which it was cut off."""
    rows = read_metrics(Path(run_dir, "metrics.jsonl"))
    validated = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    plt.figure(figsize=(6.5, 2.8))
    plt.plot([row["step"] for row in rows], [row["loss"] for row in rows], lw=1, label="training")
    plt.plot(*zip(*validated, strict=True), "o", label="validation")
    plt.axvline(cut + 0.5, color="tab:red", lw=1, ls=":")
    place = (cut - 2, 0.9 * plt.ylim()[1])
    plt.annotate("SIGTERM, and the same command again", place, fontsize=8, ha="right")
    plt.xlabel("optimizer step")
    plt.ylabel("loss per token, nats")
    plt.legend(fontsize=8)
    plt.title("One run, from two commands")
    plt.show()


def weights(run_dir: str) -> dict[str, Tensor]:
    """The weights in a run's newest checkpoint."""
    path = CheckpointManager(Path(run_dir, "checkpoints")).latest()
    assert path is not None
    found: dict[str, Tensor] = load_checkpoint(path)["model"]
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal, to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------------------- runs on a line


def line(run_dir: str, steps: int = 150, **optimization: Any) -> Config:
    """A run on a line in eight dimensions, whose answer is known: short, and silent."""
    settings: dict[str, Any] = {
        "learning_rate": 0.05,
        "warmup_steps": 10,
        "weight_decay": 0.0,
        "min_lr_ratio": 0.0,
    }
    return Config(
        run_dir=run_dir,
        task="regression",
        optimization=OptimizationConfig(**settings | optimization),
        training=TrainingConfig(max_steps=steps, eval_interval=150, precision="fp32", device="cpu"),
        logging=LoggingConfig(progress=False, tensorboard=False),
        checkpoint=CheckpointConfig(save_interval=20),
    )


FOLDERS = ["absent", "unfinished", "finished", "all checkpoints damaged", "in use"]
CHANGES = ["nothing", "60 steps", "a lower learning rate", "a larger model", "another batch size"]


@functools.cache
def _made() -> Path:
    """An unfinished run of forty steps, cut off after step 20, and a finished one."""
    base = Path(tempfile.mkdtemp())
    for name in ("unfinished", "finished"):
        quietly(train_worker, line(str(base / name), 40))
    shutil.rmtree(base / "unfinished" / "checkpoints" / "step_00000040")
    return base


def _prepared(folder: str, change: str) -> Config:
    """What somebody asks of a copy of such a folder: forty steps, with one change."""
    config = line(str(Path(tempfile.mkdtemp()) / "run"), 40)
    if folder != "absent":
        source = "finished" if folder == "finished" else "unfinished"
        shutil.copytree(_made() / source, config.run_dir)
    if folder == "all checkpoints damaged":
        for path in Path(config.run_dir, "checkpoints").iterdir():
            (path / "state.json").write_text("{}")
    if change == "60 steps":
        return replace(config, training=replace(config.training, max_steps=60))
    if change == "a lower learning rate":
        return replace(config, optimization=replace(config.optimization, learning_rate=0.01))
    if change == "a larger model":
        return replace(config, model=replace(config.model, hidden_size=512))
    if change == "another batch size":
        return replace(config, training=replace(config.training, batch_size=8))
    return config


def _files(folder: str) -> dict[Path, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in paths if path.name not in (".lock", "log.txt")}


@functools.cache
def attempt(folder: str, change: str = "nothing") -> tuple[int, int] | str:
    """From which step to which the command trains, or the words with which it refuses.

    A refusal must leave every file as it was.
    """
    config = _prepared(folder, change)
    before = _files(config.run_dir)
    with contextlib.ExitStack() as held:
        if folder == "in use":
            held.enter_context(FileLock(Path(config.run_dir) / ".lock"))
        try:
            result, _, said = quietly(train_worker, config)
        except ValueError as error:
            assert _files(config.run_dir) == before, "refused, and yet it has changed a file"
            return str(error).replace(config.run_dir, "runs/a")
    resumed = re.search(r"resuming .* at step (\d+)", said)
    return (int(resumed[1]) if resumed else 0), result.step


def show_attempt(folder: str, change: str) -> None:
    """What the command does with a folder: the steps that it trains, or its refusal."""
    found = attempt(folder, change)
    figure, ax = plt.subplots(figsize=(7, 1.5))
    there = {"absent": 0, "finished": 40}.get(folder, 20)
    ax.barh(0, there, color="lightgray", label="on the disk")
    if isinstance(found, tuple):
        begin, end = found
        ax.barh(0, end - begin, left=begin, color="tab:blue", height=0.5, label="trained now")
        verdict = f"trains steps {begin + 1} to {end}"
    else:
        verdict = "refuses"
    ax.set(xlim=(0, 62), yticks=[], xlabel="optimizer step")
    ax.set_title(f"{folder}, and asked for 40 steps with {change} changed: {verdict}", fontsize=10)
    if change == "60 steps":
        ax.set_title(f"{folder}, and asked for 60 steps: {verdict}", fontsize=10)
    ax.legend(fontsize=7, loc="right")
    figure.tight_layout()
    plt.show()
    if isinstance(found, str):
        print(f"error: {found}")


# ------------------------------------------------------------------------------------------- locks

LOCKS = {
    "a file named lock": "open('lock', 'x')",
    "the system's lock": (
        "from filelock import FileLock; lock = FileLock('system.lock'); lock.acquire(timeout=0)"
    ),
}


def killed_holder(kind: str) -> tuple[bool, bool]:
    """Whether a second process is refused while the first holds a lock, and after it is killed."""
    python = [sys.executable, "-c"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as folder:

        def refused() -> bool:
            second = subprocess.run([*python, LOCKS[kind]], cwd=folder, capture_output=True)
            return second.returncode != 0

        holder = subprocess.Popen(
            [*python, f"{LOCKS[kind]}; print(flush=True); input()"], cwd=folder, **pipes
        )
        assert holder.stdout is not None
        holder.stdout.readline()  # now it holds the lock
        meanwhile = refused()
        holder.kill()
        holder.communicate()
        return meanwhile, refused()


# ------------------------------------------------------------------------------------------ order

# from a configuration and a manager of checkpoints to a run's callbacks
Callbacks = Callable[[Config, CheckpointManager], list[Callback]]


def _to_step_8(folder: str, callbacks: Callbacks, *, log_interval: int) -> None:
    """Train up to step 8 from the newest checkpoint in the folder, or from the beginning."""
    config = line(folder, 8, schedule="constant")
    config.logging.log_interval = log_interval
    config.checkpoint.save_interval = 6
    manager = CheckpointManager(Path(folder, "checkpoints"))
    path = manager.latest()
    task = RegressionTask(config)
    engine = TrainingEngine(config, task, task.build_data(), callbacks(config, manager))
    engine.setup(load_checkpoint(path) if path else None)
    quietly(engine.run)


def losses_one_by_one(folder: str, callbacks: Callbacks) -> list[float]:
    """The losses of steps 5 to 8, each in a row of its own."""
    _to_step_8(folder, callbacks, log_interval=1)
    return [row["loss"] for row in read_metrics(Path(folder, "metrics.jsonl"))[4:]]


def row_of_step_8(folder: str, callbacks: Callbacks) -> list[tuple[float, dict[str, Tensor]]]:
    """The loss in the log's last row, and the weights at step 8: by a run that is killed after
    that step, and by its resume.
    """
    found = []
    for _ in range(2):
        _to_step_8(folder, callbacks, log_interval=4)
        row = read_metrics(Path(folder, "metrics.jsonl"))[-1]
        found.append((row["loss"], weights(folder)))
        shutil.rmtree(Path(folder, "checkpoints", "step_00000008"))  # as if killed before it
    return found


def saver_first(callbacks: Callbacks) -> Callbacks:
    """The same callbacks, with the one that saves in front."""

    def planted(config: Config, manager: CheckpointManager) -> list[Callback]:
        listed = callbacks(config, manager)
        return sorted(listed, key=lambda callback: type(callback).__name__ != "Checkpointer")

    return planted


# ------------------------------------------------------------------------------ a task of one's own


class Points:
    """Points of a square, and whether each lies in a disc."""

    def __init__(self, xy: Tensor):
        self.xy = xy
        self.inside = (xy.norm(dim=1) < 0.6).float()

    def __len__(self) -> int:
        return len(self.xy)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return {"xy": self.xy[indices], "inside": self.inside[indices]}


class DiscData(BaseDataModule):
    """A thousand points to learn from, and two hundred held out."""

    def __init__(self, batch_size: int):
        self.batch_size = batch_size

    def setup(self) -> None:
        xy = torch.rand(1200, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
        self.train_dataset = Points(xy[:1000])
        self.val_dataset = Points(xy[1000:])

    def fingerprint(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}


def small_network() -> nn.Module:
    """Two numbers in, one logit out."""
    inner = [nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*inner, nn.Linear(32, 1))


def show_disc(run_dir: str) -> float:
    """The losses of the run on the disc, and what its model takes for the disc.

    Returns the share of the square on which the model is right.
    """
    rows = read_metrics(Path(run_dir, "metrics.jsonl"))
    model = small_network()
    model.load_state_dict(weights(run_dir))
    axis = torch.linspace(-1, 1, 101)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        inside = model(grid)[:, 0] > 0
    right = (inside == (grid.norm(dim=1) < 0.6)).float().mean().item()
    figure, (left, square) = plt.subplots(1, 2, figsize=(6.5, 2.8), width_ratios=(1.4, 1))
    left.plot([row["step"] for row in rows], [row["loss"] for row in rows], label="training")
    validated = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    left.plot(*zip(*validated, strict=True), "o", label="validation")
    left.set(xlabel="optimizer step", ylabel="loss per point, nats", ylim=(0, None))
    left.legend(fontsize=8)
    answers = inside.view(101, 101).T
    square.imshow(answers, extent=(-1, 1, -1, 1), origin="lower", cmap="Blues", vmax=1.6)
    square.add_patch(plt.Circle((0, 0), 0.6, fill=False, color="black", lw=0.8))
    square.set(
        title=f"right on {right:.0%} of the square", xlabel="x", ylabel="y", xticks=(-1, 0, 1)
    )
    figure.tight_layout()
    plt.show()
    return right


@contextlib.contextmanager
def swapped(one: Path, other: Path) -> Iterator[None]:
    """Put one file in the place of another for a while."""
    kept = other.read_bytes()
    shutil.copyfile(one, other)
    try:
        yield
    finally:
        other.write_bytes(kept)

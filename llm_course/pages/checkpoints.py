"""The run that the page on checkpoints kills and resumes, and a camera for its disk."""

import copy
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from safetensors.torch import load_file, save_file

from llm_course.pages.engine import make_engine
from llm_course.pages.storyteller import load_storyteller
from llm_course.training.checkpointing import (
    Checkpointer,
    CheckpointManager,
    join_tensors,
    load_checkpoint,
)
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.logging import Logger

STEPS = 30
State = dict[str, Any]


# ------------------------------------------------------------------------------- a run to be saved


class Notes(Callback):
    """Notes the loss of each step, and after step `keep_at` the state: as it is, and copied."""

    def __init__(self, keep_at: int | None = None):
        self.keep_at = keep_at
        self.losses: dict[int, float] = {}

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.losses[engine.state.step] = metrics["loss_sum"] / metrics["num_targets"]
        if engine.state.step == self.keep_at:
            self.live: State = engine.state_dict()
            self.copied: State = copy.deepcopy(self.live)


def story_run(callbacks: Sequence[Callback], *, dropout: float = 0.1) -> TrainingEngine:
    """An engine for thirty steps of the tiny model that reads paragraphs of stories."""
    sizes: dict[str, Any] = {"max_steps": STEPS, "eval_interval": 1000}
    return make_engine(callbacks, rows=8, dropout=dropout, num_bytes=60_000, **sizes)


def train(
    state: State | None = None,
    *,
    forget: str = "nothing",
    keep_at: int | None = None,
    dropout: float = 0.1,
) -> Notes:
    """Train from `state`, in which a part may be forgotten, or from the start."""
    notes = Notes(keep_at)
    engine = story_run([notes], dropout=dropout)
    engine.setup()
    if state is not None:
        new = copy.deepcopy(engine.state_dict())
        engine.load_state_dict(without(copy.deepcopy(state), forget, new))
    engine.run()
    return notes


@functools.cache
def never_stopped() -> list[float]:
    """The losses of the run that nobody interrupts."""
    return list(train().losses.values())


PARTS = ["nothing", "model", "optimizer", "scheduler", "rng", "position"]


def without(saved: State, part: str, new: State) -> State:
    """A saved state in which one part has the value of a new run."""
    if part == "nothing":
        return saved
    if part == "position":
        return saved | {"state": saved["state"] | {"batch": new["state"]["batch"]}}
    return saved | {part: new[part]}


def brief(part: Any) -> str:
    """A part of a state, or its first keys if it is long."""
    text = str(part)
    if len(text) < 90:
        return text
    names = ", ".join(map(str, list(part)[:2]))
    return f"{type(part).__name__} with {names}, ..."


# -------------------------------------------------------------------------------- pulling the plug


class Killed(NamedTuple):
    """What is known of a process that was killed: how it ended, what it said, what it left."""

    status: int
    losses: list[float]
    folder: Path

    @property
    def checkpoints(self) -> list[str]:
        """The names in its folder of checkpoints."""
        return sorted(path.name for path in self.folder.glob("step_*"))


class SayLoss(Callback):
    """Prints each step's loss, with all its digits."""

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        print(repr(metrics["loss_sum"] / metrics["num_targets"]), flush=True)


class PullThePlug(Callback):
    """Kills its own process after a step. No handler, no `finally` and no `except` will run."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        if engine.state.step == self.step:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def train_until_killed(folder: str, after: int, save_every: int) -> None:
    """What the other process does."""
    torch.set_num_threads(1)
    manager = CheckpointManager(folder, logger=Told())
    saver = Checkpointer(manager, save_interval=save_every)
    story_run([SayLoss(), saver, PullThePlug(after)]).run()


@functools.cache
def pull_the_plug(*, after: int, save_every: int) -> Killed:
    """Train in a process of its own, which is killed after a step."""
    folder = Path(tempfile.mkdtemp())
    call = f"page.train_until_killed({str(folder)!r}, {after}, {save_every})"
    code = f"from llm_course.pages import checkpoints as page; {call}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    losses = [float(line) for line in ended.stdout.split()]
    assert len(losses) == after, ended.stderr
    return Killed(ended.returncode, losses, folder)


def resume(killed: Killed, *, forget: str = "nothing") -> dict[int, float]:
    """The loss of each step after the newest checkpoint, or of all steps if there is none."""
    path = CheckpointManager(killed.folder, logger=Told()).latest()
    state = None if path is None else load_checkpoint(path)
    return train(state, forget=forget).losses


def show_plug(killed: Killed, resumed: Mapping[int, float], forget: str = "nothing") -> None:
    """The killed run and the resumed one, over the run that was never stopped."""
    straight = never_stopped()
    stop = len(killed.losses)
    begin = min(resumed, default=stop + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 4.2), sharex=True, gridspec_kw={"height_ratios": [3, 1.2]}
    )
    top.plot(range(1, STEPS + 1), straight, color="gray", lw=8, alpha=0.3, label="never stopped")
    top.plot(range(1, stop + 1), killed.losses, "o-", ms=4, label="killed")
    top.plot(list(resumed), list(resumed.values()), "s-", ms=4, color="tab:green", label="resumed")
    top.axvspan(begin - 0.5, stop + 0.5, color="tab:red", alpha=0.12)
    top.axvline(stop + 0.5, color="tab:red", lw=2)
    top.set_ylabel("loss per word")
    top.legend(fontsize=8)
    gaps = [loss - straight[step - 1] for step, loss in resumed.items()]
    bottom.axhline(0, color="gray", lw=1)
    bottom.plot(list(resumed), gaps, "s-", ms=4, color="tab:green")
    bottom.set_ylim(min(-0.05, *gaps) * 1.1, max(0.05, *gaps) * 1.1)
    bottom.set(xlabel="optimizer step", ylabel="difference")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    lost = stop + 1 - begin
    again = "nothing is lost" if not lost else f"{lost} step{'s' * (lost > 1)} to do again"
    forgot = "" if forget == "nothing" else f"; the resume forgets: {forget}"
    top.set_title(f"killed after step {stop}: {again}{forgot}", fontsize=11)
    figure.tight_layout()
    plt.show()


def show_forgotten(runs: Mapping[str, Mapping[int, float]]) -> None:
    """The losses of runs that forgot a part, minus those of the run that was never stopped."""
    straight = never_stopped()
    plt.figure(figsize=(6.5, 2.8))
    for (name, losses), marker in zip(runs.items(), "osv^D", strict=False):
        gaps = [loss - straight[step - 1] for step, loss in losses.items()]
        plt.plot(list(losses), gaps, marker=marker, ms=4, lw=1, label=f"without {name}")
    plt.axhline(0, color="gray", lw=1)
    plt.gca().xaxis.set_major_locator(MaxNLocator(integer=True))
    plt.xlabel("optimizer step")
    plt.ylabel("loss minus the uninterrupted run's")
    plt.ylim(top=1.6 * plt.ylim()[1])
    plt.title("Each forgotten part changes the run, and none raises an error", fontsize=11)
    plt.legend(fontsize=8, ncols=2, loc="upper center")
    plt.show()


# ------------------------------------------------------------------------------------- small tools


class Told(Logger):
    """Keeps what a logger would print."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def _say(self, message: str) -> None:
        self.lines.append(message)


class Payload:
    """A value whose pickle writes a file when it's opened."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.target, "I could have done anything")


def flip_bit(file: Path, *, byte: int, bit: int) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def save_storyteller(file: Path) -> None:
    """Write the storyteller's weights. Its head is the embedding, which is stored once."""
    weights = load_storyteller()[0].state_dict()
    save_file({name: weights[name] for name in weights if name != "lm_head.weight"}, file)


def tell(file: Path, *, num: int = 28) -> str:
    """The first words of a story by the storyteller, with the weights of `file`."""
    model, tokenizer = load_storyteller()
    model = copy.deepcopy(model)
    model.load_state_dict(load_file(file), strict=False)  # the tied head isn't in the file
    ids = torch.tensor([tokenizer.encode("Once upon a time")])
    for _ in range(num):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return tokenizer.decode(ids[0].tolist()).strip()


def numbered(step: int, **metrics: float) -> State:
    """A tiny state, each part of which says its step."""
    values = torch.full((3,), float(step))
    return {"model": {"w": values}, "moments": values.clone(), "step": step, "metrics": metrics}


def seen(load: Callable[[Path], State], folder: Path) -> Any:
    """The step that a folder gives, "mixed" or "broken"."""
    try:
        state = load(folder)
    except Exception:
        return "broken"
    steps = {state["step"], *state["model"]["w"].tolist(), *state["moments"].tolist()}
    return steps.pop() if len(steps) == 1 else "mixed"


def newest(folder: Path) -> State:
    """The state of the newest whole checkpoint in a folder."""
    path = CheckpointManager(folder, logger=Told()).latest()
    assert path is not None
    return load_checkpoint(path)


def load_draft(folder: Path) -> State:
    """Read the three files that a draft has written, without any check."""
    tree = json.loads((folder / "state.json").read_text())
    state: State = join_tensors(tree, load_file(folder / "optimizer.safetensors"))
    return state | {"model": load_file(folder / "model.safetensors")}


# --------------------------------------------------------------------------------------- a camera


class Camera:
    """Copies a folder before each operation on the disk.

    A file whose bytes nobody has forced to the disk is loose. While there are some, a second photo
    shows what a power cut would leave: each loose file is cut to half.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.album = Path(tempfile.mkdtemp())
        self.titles: list[str] = []
        self.loose: set[int] = set()

    @property
    def photos(self) -> list[Path]:
        """The copies, in the order in which they were made."""
        return sorted(self.album.iterdir())

    def shoot(self, title: str) -> None:
        """Take a photo, and a second one if there are loose files."""
        self._copy(f"a kill {title}")
        loose = [
            path
            for path in self.folder.rglob("*")
            if path.is_file() and path.stat().st_ino in self.loose
        ]
        if loose:
            photo = self._copy(f"a power cut {title}")
            for path in loose:
                os.truncate(photo / path.relative_to(self.folder), path.stat().st_size // 2)

    def _copy(self, title: str) -> Path:
        photo = self.album / f"{len(self.titles):03d}"
        shutil.copytree(self.folder, photo)
        self.titles.append(title)
        return photo

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with a photo before each call."""

        def watched(*arguments: Any, **settings: Any) -> Any:
            self.shoot(f"before {function.__name__}")
            result = function(*arguments, **settings)
            paths = [path for path in arguments if isinstance(path, Path) and path.is_file()]
            self.loose |= {path.stat().st_ino for path in paths}
            if function.__name__ == "fsync":
                self.loose.discard(os.fstat(arguments[0]).st_ino)
            return result

        return watched


@contextmanager
def camera(folder: Path, names: dict[str, Any]) -> Iterator[Camera]:
    """Watch a folder while the body runs; `names` is where `save_file` is looked up."""
    made = Camera(folder)
    watched: dict[Any, tuple[str, ...]] = {
        Path: ("write_text", "rename", "mkdir", "rmdir"),
        os: ("fsync",),
        shutil: ("rmtree",),
    }
    with ExitStack() as stack:
        for owner, methods in watched.items():
            for name in methods:
                function = made.watch(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, function))
        stack.callback(names.update, save_file=names["save_file"])
        names["save_file"] = made.watch(save_file)
        yield made
    made.shoot("at the end")


def film_second_save(manager: CheckpointManager, names: dict[str, Any]) -> list[Any]:
    """What each photo of a save of step 2 gives, with step 1 on the disk before it."""
    manager.save(numbered(1), step=1)
    with camera(manager.folder, names) as film:
        manager.save(numbered(2), step=2)
    return [seen(newest, photo) for photo in film.photos]


def show_moments(rows: Mapping[str, Sequence[Any]]) -> None:
    """What each moment's photo gives, a row for each way of saving."""
    kinds = [1, 2, "mixed", "broken"]
    figure, axes = plt.subplots(
        len(rows), 1, figsize=(7.2, 1.15 * len(rows) + 0.4), layout="constrained"
    )
    for axis, (name, moments) in zip(axes, rows.items(), strict=True):
        values = [[kinds.index(kind) for kind in moments]]
        axis.imshow(values, aspect="auto", cmap="coolwarm", vmin=-1, vmax=4, alpha=0.7)
        for place, kind in enumerate(moments):
            turn = 0 if kind in (1, 2) else 90
            text = {"ha": "center", "va": "center", "fontsize": 8}
            axis.text(place, 0, kind, rotation=turn, **text)
        axis.set(yticks=[0], yticklabels=[name], xticks=[])
    axes[-1].set_xlabel("moment of the kill or power cut, from left to right")
    plt.show()


# --------------------------------------------------------------------------------------- how often


def show_intervals(cost: float, between_failures: float) -> list[float]:
    """The share of time that is lost by save interval: the formula, and failures at random.

    Returns how far the simulated shares are from the formula's, as a share of these.
    """
    rng = np.random.default_rng(0)
    intervals = np.geomspace(300, 20_000, 12)
    simulated = []
    for interval in intervals:
        worked = rng.exponential(between_failures, 4000)  # seconds from one failure to the next
        saves = worked // (interval + cost)
        simulated.append(1 - (saves * interval).sum() / worked.sum())
    formula = cost / intervals + intervals / (2 * between_failures)
    best = np.sqrt(2 * cost * between_failures)
    plt.figure(figsize=(6.5, 2.8))
    plt.semilogx(intervals / 60, 100 * formula, label="C/T + T/(2M)")
    plt.semilogx(intervals / 60, 100 * np.array(simulated), "o", label="simulated failures")
    plt.axvline(best / 60, color="gray", ls=":", label="sqrt(2CM)")
    plt.xlabel("minutes between saves, T")
    plt.ylabel("time lost, %")
    plt.xticks([5, 10, 20, 38, 80, 160, 320], ["5", "10", "20", "38", "80", "160", "320"])
    plt.minorticks_off()
    plt.ylim(0, 14)
    plt.legend(fontsize=8, loc="upper center")
    plt.title("A wide valley, with steep sides")
    plt.show()
    return [abs(found / right - 1) for found, right in zip(simulated, formula, strict=True)]

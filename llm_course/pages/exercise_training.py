"""The checks of exercise 19, training: each says what is wrong with an answer."""

import contextlib
import copy
import dataclasses
import functools
import io
import json
import math
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor, nn

from llm_course import cli
from llm_course.model.config import ModelConfig
from llm_course.pages.checking import Answer, Answers, case, same, written
from llm_course.text.data import check_same_data
from llm_course.training import sources, train
from llm_course.training.callbacks import EarlyStopping, read_metrics
from llm_course.training.checkpointing import Checkpointer, CheckpointManager, load_checkpoint
from llm_course.training.config import (
    CheckpointConfig,
    Config,
    LoggingConfig,
    OptimizationConfig,
    TrainingConfig,
)
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.named import find_task
from llm_course.training.task import RegressionTask, StepOutput


@functools.cache
def known_configs() -> dict[str, Config]:
    """What is in the checks' own files, by their paths, because YAML is slow to read.

    It's behind a function because the grader refuses an answer when a checker's variables change.
    """
    return {}


def read_config(path: str | Path) -> Config:
    """The configuration in a `config.yaml`."""
    return copy.deepcopy(known_configs().get(str(path)) or sources.read_config(path))


@contextlib.contextmanager
def silent_case(name: str) -> Iterator[None]:
    """A case whose log lines stay off the page; a SystemExit is a failure, too."""
    with case(name), contextlib.redirect_stderr(io.StringIO()):
        try:
            yield
        except SystemExit as error:
            raise AssertionError(f"your code raised SystemExit: {error}") from error


@functools.cache
def workshop() -> tempfile.TemporaryDirectory[str]:
    """A folder for everything that is written here, which is removed at the end."""
    return tempfile.TemporaryDirectory()


def new_folder() -> Path:
    """A fresh, empty folder."""
    return Path(tempfile.mkdtemp(dir=workshop().name))


def line_config(
    run_dir: str | Path,
    steps: int = 8,
    *,
    every: int = 1000,
    save: int = 6,
    log: int = 4,
    batch_size: int = 64,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: dict[str, Any] | None = None,
    **optimization: Any,
) -> Config:
    """The settings of a short run of the regression task."""
    usual = {"learning_rate": 0.05, "warmup_steps": 0, "schedule": "constant"}
    settings: dict[str, Any] = usual | optimization
    return Config(
        run_dir=str(run_dir),
        task="regression",
        optimization=OptimizationConfig(**settings),
        training=TrainingConfig(
            max_steps=steps,
            eval_interval=every,
            batch_size=batch_size,
            patience=patience,
            seed=seed,
            precision="fp32",
            device="cpu",
        ),
        logging=LoggingConfig(progress=False, tensorboard=False, log_interval=log),
        checkpoint=CheckpointConfig(save_interval=save, **(checkpoint or {})),
    )


def is_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal, to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ----------------------------------------------------------------------------- 1, compose a run


class RowCounter(Callback):
    """Counts the rows that a run has read."""

    def __init__(self) -> None:
        self.rows = 0

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.rows += metrics["num_targets"]
        metrics["rows"] = self.rows

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def compose_and_run(answers: Answers, config: Config) -> tuple[TrainingEngine, int]:
    """The student's engine after its run, and the step at which it began."""
    (compose,) = written(answers, "compose")
    task = RegressionTask(config)
    counter = RowCounter()
    engine = compose(config, task, counter)
    assert isinstance(engine, TrainingEngine), (
        f"compose must return the engine, not {type(engine).__name__}"
    )
    assert engine.is_set_up, (
        "the engine is not set up: call engine.setup, with the state where there is one"
    )
    assert any(callback is counter for callback in engine.callbacks), (
        "the counter that was given is not in the engine's list"
    )
    assert getattr(engine.data, "batch_size", None) == config.training.batch_size, (
        f"the data has batches of {getattr(engine.data, 'batch_size', None)} rows, and the"
        " configuration says"
        f" {config.training.batch_size}: let the task that was given build the data"
    )
    began = engine.state.step
    engine.run()
    return engine, began


def saved_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run's folder."""
    return sorted(
        int(path.name.removeprefix("step_")) for path in Path(folder, "checkpoints").glob("step_*")
    )


def logged(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's log."""
    path = Path(folder, "metrics.jsonl")
    assert path.exists(), (
        f"{path.name} is not in the run's folder: has the MetricsLogger the folder config.run_dir?"
    )
    return read_metrics(path)


def check_new_run(answers: Answers) -> tuple[Path, TrainingEngine, list[dict[str, Any]]]:
    """A run in an empty folder: its rows and its checkpoints."""
    with silent_case("Task 1, a new run"):
        folder = new_folder()
        whole, began = compose_and_run(answers, line_config(folder))
        assert began == 0, (
            f"in an empty folder compose returned an engine at step {began}: compose it, and do not"
            " run it"
        )
        rows = logged(folder)
        assert [row["step"] for row in rows] == [4, 8], (
            f"with log_interval 4 the log of 8 steps has rows for {[row['step'] for row in rows]},"
            " expected 4 and 8: one MetricsLogger, with the log_interval of the configuration"
        )
        assert all("rows" in row for row in rows), (
            "the row of step 4 has no 'rows': the counter must stand before the logger, and in the"
            " list"
        )
        assert saved_steps(folder) == [6, 8], (
            f"with save_interval 6 there are checkpoints of the steps {saved_steps(folder)},"
            " expected 6"
            " and 8"
        )
    return folder, whole, rows


def check_resume(
    answers: Answers, folder: Path, whole: TrainingEngine, rows: list[dict[str, Any]]
) -> None:
    """The run goes on from step 6 as if nobody had killed it."""
    with silent_case("Task 1, killed after step 8 and resumed from step 6"):
        shutil.rmtree(folder / "checkpoints" / "step_00000008")
        again, began = compose_and_run(answers, line_config(folder))
        assert began == 6, (
            f"the newest checkpoint is that of step 6, and the engine begins at step {began}: give"
            " setup the state of the newest checkpoint"
        )
        assert is_same_state(again.model.state_dict(), whole.model.state_dict()), (
            "the weights after step 8 are not those of the whole run: does setup get the whole"
            " state?"
        )
        for before, after in zip(rows, logged(folder), strict=True):
            wrong = [name for name in before if before[name] != after.get(name)]
            assert not wrong, (
                f"the row of step {before['step']} has another {', '.join(wrong)} after the"
                " resume: is"
                " something added to the sums or the counter after the Checkpointer has saved them?"
            )


def check_cut(answers: Answers, folder: Path) -> None:
    """A broken checkpoint is passed over."""
    with silent_case("Task 1, the newest checkpoint is cut"):
        (folder / "checkpoints" / "step_00000008" / "state.json").write_text("{}")
        try:
            began = compose_and_run(answers, line_config(folder))[1]
        except ValueError as error:
            assert " is incomplete" not in str(error), (
                "the checkpoint of step 8 is cut and that of step 6 is whole, and your code loads"
                " the"
                " former: the manager's latest passes over the broken"
            )
            raise
        assert began == 6, (
            "the checkpoint of step 8 is cut and that of step 6 is whole, and the engine begins at"
            f" step {began}: the manager's latest passes over the broken"
        )


def task1_resume(answers: Answers) -> None:
    """A new run, a resume, and a checkpoint that is cut."""
    folder, whole, rows = check_new_run(answers)
    check_resume(answers, folder, whole, rows)
    check_cut(answers, folder)


def check_early_stopping(answers: Answers) -> None:
    """Patience, its absence, and what a resume remembers of it."""
    with silent_case("Task 1, early stopping"):
        stuck = functools.partial(
            line_config, every=1, save=100, log=100, batch_size=256, learning_rate=1e-12
        )
        engine, _ = compose_and_run(answers, stuck(new_folder(), 5))
        assert engine.state.step == 5, (
            f"with patience None the run of 5 steps stopped after step {engine.state.step}: no"
            " EarlyStopping then"
        )
        assert not any(isinstance(callback, EarlyStopping) for callback in engine.callbacks), (
            "with patience None there is an EarlyStopping in the list: a large patience isn't none"
        )
        for patience in (2, 3):
            engine, _ = compose_and_run(answers, stuck(new_folder(), 8, patience=patience))
            wanted = engine.state.step
            assert wanted == 1 + patience, (
                f"with patience {patience} a run that never gets better ends after step {wanted},"
                f" expected {1 + patience}: the first validation and {patience} more. Is"
                " EarlyStopping"
                " in the list, with the patience of the configuration?"
            )
        with silent_case(
            "a run whose manager has no best_metric, which is not what EarlyStopping watches"
        ):
            compose_and_run(
                answers, stuck(new_folder(), 3, patience=3, checkpoint={"best_metric": None})
            )
        folder = new_folder()
        compose_and_run(answers, stuck(folder, 2, save=2, patience=3))
        engine, _ = compose_and_run(answers, stuck(folder, 8, save=2, patience=3))
        assert engine.state.step == wanted, (
            f"stopped after step 2 and resumed, the run ends after step {engine.state.step},"
            f" without a stop after {wanted}: is EarlyStopping's count restored, by setup and with"
            " the"
            " whole state?"
        )


def check_log_and_keep(answers: Answers) -> None:
    """The log's interval, and which checkpoints stay."""
    with silent_case("Task 1, the log"):
        folder = new_folder()
        compose_and_run(answers, line_config(folder, 4, log=3, save=100))
        steps = [row["step"] for row in logged(folder)]
        assert 3 in steps, (
            f"with log_interval 3 the log of 4 steps has rows for {steps}: take the log_interval"
            " of the"
            " configuration"
        )
    with silent_case("Task 1, which checkpoints stay"):
        folder = new_folder()
        keeps = {"keep_last": 1, "best_metric": "val_loss", "best_mode": "max"}
        compose_and_run(
            answers, line_config(folder, 3, every=1, save=1, batch_size=256, checkpoint=keeps)
        )
        assert saved_steps(folder) == [1, 3], (
            "with keep_last 1 and the highest val_loss as the best, the checkpoints of"
            f" {saved_steps(folder)} are left, expected 1 and 3: give the manager all three"
            " settings"
        )
        _, began = compose_and_run(
            answers, line_config(folder, 4, every=1, save=1, batch_size=256, checkpoint=keeps)
        )
        assert began == 3, (
            "the best checkpoint is that of step 1 and the newest of step 3, and the engine begins"
            " at"
            f" step {began}"
        )


def check_two_kept(answers: Answers) -> None:
    """Two newest, and no best."""
    with silent_case("Task 1, which checkpoints stay"):
        folder = new_folder()
        keeps = {"keep_last": 2, "best_metric": None}
        compose_and_run(answers, line_config(folder, 3, save=1, batch_size=256, checkpoint=keeps))
        assert saved_steps(folder) == [2, 3], (
            f"with keep_last 2 and no best, the checkpoints of {saved_steps(folder)} are left,"
            " expected 2 and 3: give the manager all three settings"
        )


def task1_settings(answers: Answers) -> None:
    """The settings of the configuration, one by one."""
    check_early_stopping(answers)
    check_log_and_keep(answers)


# ------------------------------------------------------------------------- 2, a task of one's own


def digit_config(steps: int = 60, seed: int = 0, batch_size: int = 100) -> Config:
    """The settings of a short run on digits."""
    return Config(
        task="my_digits:LargestDigit",
        optimization=OptimizationConfig(learning_rate=0.02, warmup_steps=5, schedule="linear"),
        training=TrainingConfig(
            max_steps=steps,
            eval_interval=1000,
            batch_size=batch_size,
            seed=seed,
            precision="fp32",
            device="cpu",
        ),
    )


def digit_task(answers: Answers, config: Config) -> Any:
    """The task, found by its name as the command finds it."""
    missing = [name for name in ("DigitData", "LargestDigit") if name not in answers]
    assert not missing, f"write {' and '.join(missing)} in the cell above and run it"
    my_digits: Any = types.ModuleType("my_digits")
    my_digits.LargestDigit = answers["LargestDigit"]
    with patch.dict(sys.modules, my_digits=my_digits):
        return find_task(config.task)(config)


def digit_rows(dataset: Any) -> Any:
    """All rows of a dataset."""
    return dataset.__getitems__(list(range(len(dataset))))


def set_up(answers: Answers, batch_size: int = 100, seed: int = 0) -> Any:
    """The student's data, set up."""
    data = answers["DigitData"](batch_size=batch_size, seed=seed)
    data.setup()
    return data


def digit_data(answers: Answers, seed: int = 0) -> tuple[Any, list[Any], list[Any]]:
    """The student's data, and its rows for training and validation."""
    digit_task(answers, digit_config())
    data = set_up(answers, seed=seed)
    found: list[Any] = []
    for name, count in (("train_dataset", 900), ("val_dataset", 100)):
        assert hasattr(data, name), f"after setup the data module has no {name}"
        dataset = getattr(data, name)
        assert len(dataset) == count, f"{name} has {len(dataset)} rows, expected {count}"
        batch = digit_rows(dataset)
        assert isinstance(batch, dict) and batch.keys() == {
            "digits",
            "largest",
        }, f"a batch of {name} must be a dictionary with digits and largest"
        digits = batch["digits"]
        largest = batch["largest"]
        assert digits.shape == (count, 4) and largest.shape == (count,), (
            f"all of {name} at once have the shapes {tuple(digits.shape)} and"
            f" {tuple(largest.shape)}, expected ({count}, 4) and ({count},)"
        )
        assert digits.dtype == largest.dtype == torch.int64, (
            f"{name} has {digits.dtype} and {largest.dtype}, expected torch.int64 for both"
        )
        assert digits.min() == 0 and digits.max() == 9, (
            f"the digits of {name} go from {int(digits.min())} to {int(digits.max())}, expected 0"
            " to 9: randint leaves its upper end out"
        )
        assert torch.equal(largest, digits.amax(1)), (
            "largest is not the largest of the four digits, first in"
            f" {digits[largest != digits.amax(1)][0].tolist()} of {name}"
        )
        found.append([tuple(row) for row in digits.tolist()])
    return data, found[0], found[1]


def check_digits(answers: Answers) -> None:
    """The rows come from the seed, and none occurs twice."""
    for seed in (0, 5):
        with silent_case(f"Task 2, the data of seed {seed}"):
            data, train_rows, val_rows = digit_data(answers, seed)
            both = set(train_rows) & set(val_rows)
            assert not both, (
                f"{len(both)} rows are in train_dataset and in val_dataset, such as {min(both)}:"
                " what"
                " is measured must be unseen"
            )
            assert len(set(train_rows)) == 900 and len(set(val_rows)) == 100, (
                f"a row occurs twice: train_dataset has {len(set(train_rows))} different ones,"
                f" val_dataset {len(set(val_rows))}. Draw without putting back"
            )
            assert digit_data(answers, seed)[1:] == (
                train_rows,
                val_rows,
            ), "the same seed gave other rows: use a generator of your own with that seed"
            torch.rand(())  # so that a seed shows
            before = torch.get_rng_state()
            data.setup()
            assert torch.equal(torch.get_rng_state(), before), (
                "setup() moves PyTorch's own random numbers, which the run needs for its weights"
                " and its dropout: use a generator of your own"
            )
            assert [
                tuple(row) for row in digit_rows(data.train_dataset)["digits"].tolist()
            ] == train_rows, (
                "a second setup() of the same module gave other rows: make the generator in setup"
            )
            assert digit_data(answers, seed + 1)[1] != train_rows, (
                f"the seeds {seed} and {seed + 1} give the same rows: is the seed used?"
            )
            used = {digit for row in val_rows for digit in row}
            firsts = sorted({row[0] for row in train_rows})
            assert len(used) == 10 and len(firsts) == 10, (
                f"the first digit of a training row is always one of {firsts}, but all ten are"
                " possible: can each row from 0000 to 9999 be drawn, and are the rows shuffled"
                " before"
                " they are split?"
            )


def check_fingerprint(answers: Answers) -> None:
    """The fingerprint tells runs on other data apart."""
    with silent_case("Task 2, the fingerprint"):
        data = digit_data(answers)[0]
        prints = [
            module.fingerprint()
            for module in (
                data,
                set_up(answers),
                set_up(answers, seed=1),
                set_up(answers, batch_size=50),
            )
        ]
        assert prints[0] == prints[1], (
            f"the fingerprint of the same data is once {prints[0]} and once {prints[1]}"
        )
        for other, what in ((prints[2], "seed"), (prints[3], "batch size")):
            try:
                check_same_data(prints[0], other)
            except ValueError:
                continue
            raise AssertionError(
                f"a run could be resumed with another {what}: fingerprint() says {prints[0]}"
                " and"
                f" then {other}"
            )
        json.dumps(prints)


def task2_data(answers: Answers) -> None:
    """The rows, and their fingerprint."""
    check_digits(answers)
    check_fingerprint(answers)


class StopAfter(Callback):
    """Stops a run after a step, if there is one."""

    def __init__(self, step: int | None):
        self.step = step

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        if engine.state.step == self.step:
            engine.stop("asked")


def digit_engine(
    answers: Answers,
    steps: int,
    state: dict[str, Any] | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> TrainingEngine:
    """An engine that has trained the student's task."""
    config = digit_config(steps, seed)
    digits_task = digit_task(answers, config)
    engine = TrainingEngine(config, digits_task, digits_task.build_data(), [StopAfter(stop)])
    engine.setup(state)
    engine.run()
    return engine


def check_step(digits_task: Any, data: Any, model: Any, count: int) -> None:
    """One training step on `count` rows: the sum, and the number of targets."""
    batch = data.train_dataset.__getitems__(list(range(count)))
    output = digits_task.train_step(model, batch)
    logits = model(batch["digits"])
    assert isinstance(output, StepOutput), (
        f"train_step must return a StepOutput, not {type(output).__name__}"
    )
    assert logits.shape == (count, 10), (
        f"for {count} rows the model returns the shape {tuple(logits.shape)}, expected"
        f" ({count}, 10)"
    )
    are_shares = bool((logits >= 0).all()) and same(logits.sum(1), torch.ones(count))
    assert not are_shares, (
        "each row of the model's output adds up to 1: return logits, not probabilities, for"
        " cross_entropy takes the softmax itself"
    )
    loss = float(output.loss_sum)
    right = F.cross_entropy(logits, batch["largest"], reduction="sum").item()
    assert abs(loss - right / count) > 1e-4, (
        f"loss_sum of {count} rows is {loss:.3f}, their mean: the engine wants the sum"
    )
    doubled = F.cross_entropy(logits.softmax(1), batch["largest"], reduction="sum").item()
    assert abs(loss - doubled) > 1e-4, "the softmax is taken twice: cross_entropy takes logits"
    assert abs(loss - right) < 1e-3, (
        f"loss_sum of {count} rows is {loss:.3f}, expected the summed cross-entropy of the"
        f" logits, {right:.3f}"
    )
    targets = torch.as_tensor(output.num_targets)
    assert not targets.is_floating_point(), (
        f"num_targets is {output.num_targets!r}, expected a whole number"
    )
    assert int(targets) == count, (
        f"num_targets of {count} rows is {int(targets)}, expected {count}: a row is one target"
    )


def check_loss(answers: Answers) -> tuple[Any, Any]:
    """build_data, and the loss of four and of eight rows."""
    with silent_case("Task 2, the loss"):
        digits_task = digit_task(answers, digit_config(seed=7, batch_size=40))
        data = digits_task.build_data()
        assert (data.batch_size, data.seed) == (40, 7), (
            f"build_data gave batch_size {data.batch_size} and seed {data.seed}; the configuration"
            " says"
            " 40 and 7"
        )
        data.setup()
        torch.manual_seed(0)
        model = digits_task.build_model(data).eval()
        for count in (4, 8):
            check_step(digits_task, data, model, count)
    return digits_task, data


def check_perplexity(digits_task: Any, data: Any) -> None:
    """e to the mean loss."""
    with silent_case("Task 2, perplexity"):
        given_metrics = digits_task.metrics(1.25, data)
        assert isinstance(given_metrics, dict) and "perplexity" in given_metrics, (
            f"metrics returns {given_metrics!r}, expected a dictionary with perplexity; the engine"
            " puts"
            " val_ in front"
        )
        found = float(given_metrics["perplexity"])
        assert abs(found - math.exp(1.25)) < 1e-4, (
            f"the perplexity of a mean loss of 1.25 is {found:.3f}, expected e to the 1.25 ="
            f" {math.exp(1.25):.3f}"
        )


def check_accuracy(answers: Answers) -> None:
    """After sixty steps most of the validation rows are right."""
    with silent_case("Task 2, trained for 60 steps"):
        engine = digit_engine(answers, 60)
        batch = digit_rows(engine.data.val_dataset)
        with torch.no_grad():
            logits = engine.model.eval()(batch["digits"])
        accuracy = (logits.argmax(1) == batch["largest"]).float().mean().item()
        assert accuracy >= 0.85, (
            f"{accuracy:.0%} of the validation rows are right after 60 steps, expected 85 %: does"
            " the"
            " model see all four digits, and each by an embedding or one-hot, not as a number? A"
            " hidden layer helps, too"
        )
        assert (
            abs(engine.metrics["val_loss"] - F.cross_entropy(logits, batch["largest"]).item())
            < 1e-3
        ), (
            "val_loss is not the mean over the validation rows: validation_step does what"
            " train_step"
            " does, so leave it alone"
        )


def check_digits_resume(answers: Answers) -> None:
    """A run that was stopped in epoch 1 goes on exactly, and not on other data."""
    with silent_case("Task 2, stopped in epoch 1 and resumed"):
        whole = digit_engine(answers, 12, seed=3)
        first = digit_engine(answers, 12, seed=3, stop=11)
        again = digit_engine(answers, 12, first.state_dict(), seed=3)
        assert is_same_state(again.model.state_dict(), whole.model.state_dict()), (
            "the weights are not those of the whole run: do the batches depend on more than seed,"
            " epoch"
            " and position?"
        )
        try:
            digit_engine(answers, 12, first.state_dict(), seed=4)
        except ValueError:
            pass
        else:
            raise AssertionError(
                "a run of seed 3 was resumed on the data of seed 4: put the seed into the"
                " fingerprint"
            )


def task2_task(answers: Answers) -> None:
    """The loss, the metric, and what sixty steps learn."""
    digits_task, data = check_loss(answers)
    check_perplexity(digits_task, data)
    check_accuracy(answers)


# --------------------------------------------------------------------------- 3, what will it do?


def folder_config(folder: Path, **training: Any) -> Config:
    """The settings of the command, with changes."""
    config = line_config(folder, save=3, checkpoint={"keep_last": 9})
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **training))


def prepare_folders() -> Path:
    """Folders with a finished run, a killed one, and two with cut checkpoints."""
    base = new_folder()
    config = folder_config(base / "finished")
    manager = CheckpointManager(base / "finished" / "checkpoints", keep_last=9)
    task = RegressionTask(config)
    TrainingEngine(config, task, task.build_data(), [Checkpointer(manager, save_interval=3)]).run()
    (base / "finished" / "config.yaml").touch()
    for name in ("killed", "cut", "all_cut"):
        shutil.copytree(base / "finished", base / name)
        shutil.rmtree(base / name / "checkpoints" / "step_00000008")
    for path in (
        base / "cut/checkpoints/step_00000006",
        base / "all_cut/checkpoints/step_00000003",
        base / "all_cut/checkpoints/step_00000006",
    ):
        (path / "state.json").write_text("{")
    return base


def commands(base: Path) -> dict[str, Config]:
    """What is asked of each folder."""
    killed = folder_config(base / "killed")
    configs = {
        name: folder_config(base / name)
        for name in ("absent", "killed", "cut", "all_cut", "finished")
    }
    configs["slower"] = dataclasses.replace(
        killed, optimization=OptimizationConfig(learning_rate=1e-4)
    )
    configs["wider"] = dataclasses.replace(killed, model=ModelConfig(hidden_size=512))
    configs["reseeded"] = folder_config(base / "killed", seed=1)
    configs["longer"] = folder_config(base / "finished", max_steps=20)
    configs["locked"] = killed
    return configs


def real_outcomes() -> dict[str, Any]:
    """What the package does, folder by folder: it is stopped where it would begin to train."""
    base = prepare_folders()
    configs = commands(base)
    killed = configs["killed"]
    shortcuts: dict[str, Any] = {
        "read_config": lambda path: killed,
        "save_config": lambda *_: None,
        "_callbacks": lambda *_, **__: [],
    }
    found: dict[str, Any] = {}
    for name, config in configs.items():
        taken: Any = (
            FileLock(base / "killed" / ".lock") if name == "locked" else contextlib.nullcontext()
        )
        with (
            taken,
            patch.dict(train.train_worker.__globals__, shortcuts),
            patch.object(TrainingEngine, "run", lambda engine: {}),
        ):
            try:
                found[name] = train.train_worker(config).step or "new"
            except ValueError:
                found[name] = "refused"
    return found


RULES = {
    "absent": "there is nothing to go on with, and nothing to destroy",
    "killed": (
        "an unfinished run with the same settings is resumed from its newest checkpoint."
        " One is due every 3 steps; kill -9 leaves no time for another"
    ),
    "slower": "how a run is trained may change: the new rate counts from then on",
    "wider": (
        "task and model of a run are fixed, and the settings are compared, also where a task"
        " does not look at them"
    ),
    "reseeded": (
        "this task's data come from the seed, and the fingerprint of the data is compared when"
        " the engine takes the state"
    ),
    "cut": "the manager passes over a broken checkpoint and takes the one before",
    "all_cut": (
        "to begin anew would destroy what is there, so somebody has to ask for it by removing"
        " the folder"
    ),
    "finished": "a finished run is not overwritten",
    "longer": (
        "with more steps the run is not finished any more, and is trained further from where it"
        " ended"
    ),
    "locked": "two runs in one folder would destroy each other's files; nobody waits",
}


def task3_outcome(answers: Answers) -> None:
    """The typed outcomes, against what the package does."""
    with silent_case("Task 3, folders"):
        (outcome,) = written(answers, "outcome")
        assert isinstance(outcome, dict), (
            f"outcome is {type(outcome).__name__}, expected a dictionary"
        )
        real = real_outcomes()
        missing = [name for name in real if name not in outcome]
        assert not missing, f"outcome lacks {', '.join(missing)}"
        for name, rule in RULES.items():
            value = (
                outcome[name].strip().lower() if isinstance(outcome[name], str) else outcome[name]
            )
            assert value in ("new", "refused") or isinstance(value, int), (
                f"{name!r} is {value!r}, expected 'new', 'refused' or a step"
            )
            assert value != 0, (
                f"{name!r} is {value!r}: who goes on with nothing begins anew, so say 'new' or"
                " 'refused', not a step"
            )
            assert value == real[name], f"{name!r} is not {value!r}: {rule}"


class SignalInStep(RegressionTask):
    """Something comes in the middle of step 5."""

    calls = 0
    on_signal: Callable[[], None]

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        self.calls += 1
        if self.calls == 5:
            self.on_signal()
        return super().train_step(model, batch)


class Killed(BaseException):
    """What stands for SIGKILL, which nothing catches."""


def real_ending(number: int) -> tuple[int, int]:
    """(status, newest checkpoint): SIGTERM asks the engine to stop, as GracefulStop does, and
    SIGKILL ends all at once.
    """
    config = line_config(new_folder(), save=3)
    task = SignalInStep(config)
    saver = Checkpointer(CheckpointManager(Path(config.run_dir, "checkpoints")), save_interval=3)
    engine = TrainingEngine(config, task, task.build_data(), [saver])

    def kill() -> None:
        raise Killed

    task.on_signal = kill if number == 9 else functools.partial(engine.stop, "SIGTERM")
    with contextlib.suppress(Killed):
        engine.run()
    path = saver.manager.latest()
    assert path is not None
    return 128 + number, int(path.name.removeprefix("step_"))


def task3_endings(answers: Answers) -> None:
    """The status, and the step of the newest checkpoint, after two signals."""
    with silent_case("Task 3, endings"):
        for name, number in (("sigterm", 15), ("sigkill", 9)):
            assert name in answers, f"type {name} into the cell above and run it"
            pair = answers[name]
            assert isinstance(pair, tuple | list) and len(pair) == 2, (
                f"{name} must be a pair (status, step), not {pair!r}"
            )
            status, step = real_ending(number)
            assert pair[0] != 0, (
                f"{name}: status 0 means that the run is finished, and a queue would not start it"
                " again"
            )
            assert pair[0] == status, (
                f"{name}: the status is not {pair[0]!r}. A shell shows 128 and the signal's number"
                " for"
                " what a signal has ended, and the command does the same for what it has caught"
            )
            if number == 15:
                assert pair[1] == step, (
                    f"sigterm: the newest checkpoint is not that of step {pair[1]!r}. The signal is"
                    " caught: the step that has begun is finished, and then the state is saved,"
                    " whatever the interval says"
                )
            assert pair[1] == step, (
                f"sigkill: the newest checkpoint is not that of step {pair[1]!r}. kill -9 cannot be"
                " caught, so what is there is the last one that was due"
            )


# --------------------------------------------------------------------------- 4, compare runs


def changed_settings(now: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What is not as in `default`, in a tree of settings."""
    differs = {name: value for name, value in now.items() if value != default[name]}
    return {
        name: changed_settings(value, default[name]) if isinstance(value, dict) else value
        for name, value in differs.items()
    }


class Saving(Callback):
    """Saves the steps in `stay`, and stops after `steps`; a poisoned model has a NaN."""

    def __init__(
        self, manager: CheckpointManager, stay: tuple[int, ...], steps: int, poison: bool
    ) -> None:
        self.manager = manager
        self.stay = stay
        self.steps = steps
        self.poison = poison

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        if self.poison:
            nn.init.constant_(engine.model.bias, math.nan)
        if engine.state.step in self.stay:
            state = engine.state_dict()
            # where each step is validated, the newest is the best by this score
            state["metrics"] = state["metrics"] | {"val_score": -engine.state.step}
            self.manager.save(state, step=engine.state.step)
        if engine.state.step == self.steps:
            engine.stop("killed")


def make_run(
    comparing: Path,
    name: str,
    learning_rate: float,
    *,
    steps: int = 3,
    every: int = 2,
    save: int = 1,
    log: int = 1,
    best_mode: str = "min",
    stay: tuple[int, ...] = (2, 3),
    poison: bool = False,
    checkpoint: dict[str, Any] | None = None,
    **more: Any,
) -> str:
    """A run with checkpoints of the steps in `stay`; where it was validated after step 2 only, that
    of step 3 has an old loss.
    """
    folder = comparing / name
    settings = {"keep_last": 9, "best_mode": best_mode} | (checkpoint or {})
    config = line_config(
        folder,
        4,
        every=every,
        save=save,
        log=log,
        checkpoint=settings,
        learning_rate=learning_rate,
        **more,
    )
    task = RegressionTask(config)
    manager = CheckpointManager(config.checkpoint_dir, keep_last=9)

    TrainingEngine(config, task, task.build_data(), [Saving(manager, stay, steps, poison)]).run()
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    # JSON is YAML
    path.write_text(
        json.dumps(changed_settings(dataclasses.asdict(config), dataclasses.asdict(Config())))
    )
    known_configs()[str(path)] = config
    return str(folder)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Ten runs to compare, each by the name of its folder."""

    folder: Path
    slow: str
    fast: str
    bare: str  # without a checkpoint
    wild: str  # every step is validated, and each is worse
    odd: str  # its best is the highest
    small: str  # 64 rows to measure, so batches of 24, 24 and 16
    nan: str
    unseen: str  # never validated
    scored: str  # its best is chosen by another metric than the loss
    elsewhere: str  # its checkpoints are in a folder of their own


def make_runs() -> Runs:
    """Train the ten runs."""
    folder = new_folder()
    make = functools.partial(make_run, folder)
    return Runs(
        folder,
        slow=make("slow", 0.001),
        fast=make("fast", 0.1, log=2),
        bare=make("bare", 0.01, stay=()),
        wild=make("wild", 30.0, save=5, every=1),
        odd=make("odd", 0.1, best_mode="max", every=1),
        small=make("small", 0.05, batch_size=24, seed=7),
        nan=make("nan", 0.5, steps=1, stay=(1,), poison=True),
        unseen=make("unseen", 0.1, every=100),
        scored=make("scored", 30.0, every=1, checkpoint={"best_metric": "val_score"}),
        elsewhere=make("elsewhere", 0.1, checkpoint={"dir": str(new_folder())}),
    )


@functools.cache
def loss_by_hand(
    run: str, step: int, first: int = 0, end: int = 64, data_of: str | None = None
) -> float:
    """The mean squared error over validation rows, all or some, of this run or of another."""
    data = RegressionTask(known_configs()[str(Path(data_of or run, "config.yaml"))]).build_data()
    data.setup()
    rows: Any = data.val_dataset
    x = rows.x[first:end]
    y = rows.y[first:end]
    weights = load_checkpoint(Path(run, "checkpoints", f"step_{step:08d}"))["model"]
    with torch.no_grad():
        return F.mse_loss(F.linear(x, weights["weight"], weights["bias"])[:, 0], y).item()


def files_in(folder: Path) -> dict[str, Any]:
    """The times and the content of all files in a folder."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def check_unchanged(runs: "Runs", before: dict[str, Any]) -> None:
    """Comparing must only look."""
    after = files_in(runs.folder)
    changed = sorted(
        Path(name).name
        for name in before.keys() ^ after.keys()
        | {
            name
            for name in before.keys() & after.keys()
            if Path(name).is_file() and before[name] != after[name]
        }
    )
    assert not changed, f"comparing has written or removed {', '.join(changed)}: it only looks"


def compared(answers: Answers, runs: Sequence[str], which: str = "latest") -> list[Any]:
    """What the student's compare returns, row by row."""
    rows = answers["compare"](list(runs), which)
    assert isinstance(rows, list) and all(isinstance(row, dict) for row in rows), (
        "compare must return a list of dictionaries"
    )
    assert len(rows) == len(runs), f"{len(runs)} runs gave {len(rows)} rows"
    for row in rows:
        lacking = {"run", "step", "val_loss"} - row.keys()
        assert not lacking, (
            f"a row has the keys {', '.join(row)}, and lacks {', '.join(sorted(lacking))}"
        )
    assert sorted(row["run"] for row in rows) == sorted(runs), (
        "run must be the folder as it was given"
    )
    return rows


def check_measured(answers: Answers, runs: Runs) -> None:
    """The losses are measured, and nothing is written."""
    with silent_case("Task 4, the numbers"):
        before = files_in(runs.folder)
        with FileLock(Path(runs.slow, ".lock")):
            rows = compared(answers, [runs.slow, runs.fast])
        Path(runs.slow, ".lock").unlink(missing_ok=True)
        for row in rows:
            name = Path(row["run"]).name
            right = loss_by_hand(row["run"], 3)
            logged_loss = loss_by_hand(row["run"], 2)
            assert row["step"] == 3, (
                f"the newest checkpoint of {name} is that of step 3, and step is {row['step']!r}"
            )
            assert abs(row["val_loss"] - logged_loss) > 1e-5, (
                f"the val_loss of {name} is that of step 2, the last validation before the newest"
                " checkpoint: measure it with the weights of step 3"
            )
            assert abs(row["val_loss"] - 64 * right) > 1e-3, (
                f"the val_loss of {name} is the sum over all rows: divide by the number of targets"
            )
            assert abs(row["val_loss"] - right) < 1e-5, (
                f"the val_loss of {name} is {row['val_loss']:.4f}, expected {right:.4f}: all"
                " validation"
                " rows, with the weights of step 3"
            )
        assert [row["run"] for row in rows] == [
            runs.fast,
            runs.slow,
        ], "the lowest loss must come first: sort by the number"
        check_unchanged(runs, before)


class Dropping(nn.Linear):
    """A linear layer with dropout before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


def check_dropout(answers: Answers, runs: Runs) -> None:
    """A model is measured in evaluation mode."""
    with (
        silent_case("Task 4, a model with dropout"),
        patch.object(RegressionTask, "build_model", lambda self, data: Dropping(8, 1)),
    ):
        [row] = compared(answers, [runs.fast])
        assert math.isclose(row["val_loss"], loss_by_hand(runs.fast, 3), rel_tol=1e-5), (
            f"val_loss is {row['val_loss']:.4f}, expected {loss_by_hand(runs.fast, 3):.4f}: is"
            " dropout switched off, by the model's eval()?"
        )


def check_places(answers: Answers, runs: Runs) -> None:
    """A run that was moved, and one whose checkpoints are in a folder of their own."""
    with silent_case("Task 4, where the checkpoints are"):
        moved = shutil.copytree(runs.fast, new_folder() / "moved")
        shutil.rmtree(moved / "checkpoints" / "step_00000003")
        [row] = compared(answers, [str(moved)])
        assert row["step"] == 2, (
            "a copy of fast lies in moved, without its newest checkpoint, so its step is 2, not"
            f" {row['step']!r}: run_dir in config.yaml is the old folder, so replace it"
        )
        [row] = compared(answers, [runs.elsewhere])
        assert row["step"] == 3, (
            "elsewhere keeps its checkpoints in the folder checkpoint.dir of its configuration, and"
            f" step is {row['step']!r}, expected 3: config.checkpoint_dir knows the folder"
        )


def check_other_data(answers: Answers, runs: Runs) -> None:
    """Each run is measured on its own rows, all of them."""
    with silent_case("Task 4, a run with another seed and with batches of 24, 24 and 16 rows"):
        [row] = [
            row for row in compared(answers, [runs.slow, runs.small]) if row["run"] == runs.small
        ]
        parts = [loss_by_hand(runs.small, 3, *part) for part in ((0, 24), (24, 48), (48, 64))]
        right = loss_by_hand(runs.small, 3)
        for number, why in (
            (parts[0], "that of the first batch: read all of them"),
            (
                sum(parts) / 3,
                (
                    "the mean of the three batches' means: divide the sum over all rows by the"
                    " number"
                    " of rows"
                ),
            ),
            (
                loss_by_hand(runs.small, 3, data_of=runs.slow),
                "on the rows of slow: each run is measured on the data of its own seed",
            ),
        ):
            assert abs(row["val_loss"] - number) > 1e-5, f"val_loss is {row['val_loss']:.4f}, {why}"
        assert abs(row["val_loss"] - right) < 1e-5, (
            f"val_loss is {row['val_loss']:.4f}, expected {right:.4f}: do task and data come from"
            " the"
            " run's own configuration?"
        )


def check_settings(answers: Answers, runs: Runs) -> None:
    """The settings in which runs differ."""
    with silent_case("Task 4, the settings"):
        rows = compared(answers, [runs.slow, runs.fast])
        keys = [name for name in rows[0] if name not in ("run", "step", "val_loss")]
        assert "run_dir" not in keys and not any(name.startswith("logging") for name in keys), (
            f"the rows have {', '.join(keys)}: leave run_dir and logging out"
        )
        assert keys == ["optimization.learning_rate"], (
            "the runs slow and fast differ in optimization.learning_rate, and the rows have"
            f" {', '.join(keys) or 'no further key'}"
        )
        assert [row["optimization.learning_rate"] for row in rows] == [
            0.1,
            0.001,
        ], "each row must have its own run's setting"
        keys = [
            name
            for name in compared(answers, [runs.slow, runs.wild])[0]
            if name not in ("run", "step", "val_loss")
        ]
        three = ["checkpoint.save_interval", "optimization.learning_rate", "training.eval_interval"]
        assert sorted(keys) == three, (
            f"slow and wild differ in {', '.join(three)}, and the rows have {', '.join(keys)}"
        )


def check_best_one(answers: Answers, runs: Runs) -> None:
    """The best checkpoint, as the run is configured."""
    with silent_case("Task 4, the best checkpoint"):
        [row] = compared(answers, [runs.wild], "best")
        assert row["step"] == 2, (
            f"the best checkpoint of wild is that of step 2, and step is {row['step']!r}: ask the"
            " manager, with the run's best_metric"
        )
        [none] = compared(answers, [runs.unseen], "best")
        assert none["step"] is None and none["val_loss"] is None, (
            "the checkpoints of unseen were never validated, so there is no best one: step and"
            f" val_loss are None, not {none['step']} and {none['val_loss']}"
        )
        [scored] = compared(answers, [runs.scored], "best")
        assert scored["step"] == 3, (
            "scored is configured with best_metric val_score, by which its checkpoint of step 3 is"
            f" the best, and step is {scored['step']!r}"
        )
        assert math.isclose(row["val_loss"], loss_by_hand(runs.wild, 2), rel_tol=1e-5), (
            f"the best checkpoint of wild has the loss {loss_by_hand(runs.wild, 2):.4f}, and"
            " val_loss is"
            f" {row['val_loss']:.4f}: are these the weights of step 2?"
        )


def check_ranking(answers: Answers, runs: Runs) -> None:
    """Numbers, then NaN, then None."""
    with silent_case("Task 4, the order"):
        asked = [runs.bare, runs.nan, runs.wild, runs.slow, runs.fast]
        before = files_in(runs.folder)
        rows = compared(answers, asked)
        names = [Path(row["run"]).name for row in rows]
        bare = rows[names.index("bare")]
        assert bare["step"] is None and bare["val_loss"] is None, (
            f"bare has no checkpoint, so step and val_loss are None, not {bare['step']} and"
            f" {bare['val_loss']}"
        )
        right = [
            *sorted(
                ("wild", "slow", "fast"), key=lambda name: loss_by_hand(str(runs.folder / name), 3)
            ),
            "nan",
            "bare",
        ]
        assert names == right, (
            f"the order is {', '.join(names)}, expected {', '.join(right)}: numbers, then NaN, then"
            " runs without a checkpoint"
        )
        check_unchanged(runs, before)


def check_refusals(answers: Answers, runs: Runs) -> None:
    """Other tasks, and folders without a run."""
    with silent_case("Task 4, what is refused"):
        (runs.folder / "poems").mkdir(exist_ok=True)
        (runs.folder / "poems" / "config.yaml").write_text("task: lm")
        known_configs()[str(runs.folder / "poems" / "config.yaml")] = Config()
        (runs.folder / "notes").mkdir(exist_ok=True)
        for name, words in (
            ("poems", ("lm", "regression")),
            ("notes", ("notes",)),
            ("nowhere", ("nowhere",)),
        ):
            told = None
            try:
                answers["compare"]([runs.slow, runs.fast, str(runs.folder / name)])
            except ValueError as error:
                told = str(error)
            what = "trains another task" if name == "poems" else "has no config.yaml"
            assert told is not None, f"the folder {name} {what}, and no ValueError was raised"
            assert all(word in told for word in words), (
                f"the folder {name} {what}: the message must name {' and '.join(words)}, but it"
                " says"
                f" {told!r}"
            )
        assert not (runs.folder / "nowhere").exists(), (
            "a folder that did not exist was made: comparing only looks"
        )


def say(answers: Answers, *words: str) -> tuple[int, str, str]:
    """The status of the command, and its two streams."""
    module: Any = types.SimpleNamespace(run=answers["compare_command"])
    entry = {"compare": ("measure several runs", "compare_module:run")}
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        with patch.dict(sys.modules, compare_module=module), patch.dict(cli.COMMANDS, entry):
            return cli.main(["compare", *words]), out.getvalue(), err.getvalue()


def check_command(answers: Answers, runs: Runs) -> None:
    """Status and lines of the command."""
    with silent_case("Task 4, the command"):
        with contextlib.redirect_stdout(io.StringIO()):
            status = answers["compare_command"]([runs.slow, runs.fast])
        assert status == 0, (
            f"the command returned {status!r}, expected 0: whoever calls it without main needs the"
            " number"
        )
        status, out, err = say(answers, runs.slow, runs.fast)
        assert status == 0, (
            f"the command returned {status!r}, expected 0; it said {err.strip()[-200:]!r}"
        )
        firsts = [Path(line.split()[0]).name for line in out.splitlines() if line.split()]
        assert firsts == ["fast", "slow"], (
            f"the lines begin with {', '.join(firsts) or 'nothing'}, expected the folders of fast"
            " and"
            " then slow, and no other line"
        )


def check_options(answers: Answers, runs: Runs) -> None:
    """The option, a run without a checkpoint, and a refusal."""
    with silent_case("Task 4, the command"):
        status, out, err = say(answers, runs.wild, "--checkpoint", "best")
        numbers = [
            float(number.replace(",", ""))
            for number in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", out)
        ]
        best_loss = loss_by_hand(runs.wild, 2)
        assert status == 0, (
            f"with --checkpoint best the command ended with status {status}, and said"
            f" {err.strip()[-200:]!r}"
        )
        assert any(abs(number / best_loss - 1) < 1e-3 for number in numbers), (
            "with --checkpoint best the line must show the loss of the best checkpoint,"
            f" {best_loss:.4f}: is the option handed on?"
        )
        with silent_case("a run without a checkpoint"):
            status, out, err = say(answers, runs.slow, runs.bare)
            firsts = [Path(line.split()[0]).name for line in out.splitlines() if line.split()]
            assert status == 0 and firsts == ["slow", "bare"], (
                "slow and bare, which has no checkpoint, need a line each, but the status is"
                f" {status},"
                f" and the lines begin with {', '.join(firsts) or 'nothing'}"
            )
        status, out, err = say(answers, runs.slow, str(runs.folder / "nowhere"))
        assert (status, out) == (2, "") and "nowhere" in err, (
            "a folder that is no run must end with status 2 and a message on stderr, but the"
            " status is"
            f" {status}, on stdout is {out.strip()[-100:]!r} and on stderr {err.strip()[-100:]!r}:"
            " let"
            " the ValueError go up to main"
        )


def check_odd_run(answers: Answers) -> None:
    """A run whose best is the highest, and three that differ."""
    runs = make_runs()
    with silent_case("Task 4"):
        with silent_case("the settings of a run"):
            [row] = compared(answers, [runs.odd], "best")
            assert row["step"] == 2, (
                "odd is configured with best_mode max, so its best checkpoint is that of step 2,"
                " and"
                f" step is {row['step']}"
            )
            assert len(row) == 3, (
                f"a run alone differs from nobody, but its row has {', '.join(row)}"
            )
            same_twice = compared(answers, [runs.fast, runs.odd])
            keys = sorted(same_twice[0].keys() - {"run", "step", "val_loss"})
            assert keys == ["checkpoint.best_mode", "training.eval_interval"], (
                "fast and odd differ in checkpoint.best_mode and training.eval_interval, and the"
                " rows"
                f" have {', '.join(keys)}"
            )
            # one setting differs in the middle only, one in the last
            three = compared(answers, [runs.fast, runs.slow, runs.odd])
            assert all(
                {"checkpoint.best_mode", "optimization.learning_rate"} <= row.keys()
                for row in three
            ), (
                "where one of three runs differs, the key must be in all rows: compare all, not"
                " only"
                " two of them"
            )


def task4_compare(answers: Answers) -> None:
    """Numbers, settings, order, refusals, and the command."""
    with silent_case("Task 4"):
        written(answers, "compare", "compare_command")
    runs = make_runs()
    check_measured(answers, runs)
    check_dropout(answers, runs)
    check_places(answers, runs)
    check_other_data(answers, runs)
    check_settings(answers, runs)
    check_best_one(answers, runs)
    check_ranking(answers, runs)
    check_refusals(answers, runs)
    check_command(answers, runs)
    check_options(answers, runs)


# ---------------------------------------------------------------------------- 5, a printed loop


PAD = 0
NUM_WORDS = 16


class Pairs(nn.Module):
    """Predicts the next word from the last one."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(NUM_WORDS, 8, generator=generator))
        self.head = nn.Parameter(torch.randn(8, NUM_WORDS, generator=generator) / 8)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits (B, T, V) after each word of ids (B, T)."""
        return self.embedding[ids] @ self.head


def make_sentences(count: int, seed: int) -> list[list[int]]:
    """Sentences of 3 to 10 words; after the word w comes w + 1, w + 3 or w + 6, around a circle of
    15 words.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, 11, (), generator=generator))
        row = torch.randint(15, (1,), generator=generator).tolist()
        for choice in torch.randint(3, (length - 1,), generator=generator):
            row.append((row[-1] + (1, 3, 6)[choice]) % 15)
        rows.append([word + 1 for word in row])
    return rows


def loss_of_rows(model: nn.Module, rows: list[list[int]]) -> tuple[Tensor, int]:
    """Summed loss and number of targets, sentence by sentence, so that nothing is padded."""
    logits = torch.cat([model(torch.tensor([row[:-1]]))[0] for row in rows])
    return F.cross_entropy(
        logits, torch.tensor([word for row in rows for word in row[1:]]), reduction="sum"
    ), len(logits)


class Recorder(Pairs):
    """Notes its inputs, without the padding."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.inputs: list[list[int]] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.inputs += [[word for word in row if word != PAD] for row in ids.tolist()]
        return super().forward(ids)


def orders_of(inputs: list[list[int]], rows: list[list[int]], epochs: int) -> list[list[list[int]]]:
    """The sentences of each epoch in the order in which they were fed, with or without their last
    words.
    """
    places = {tuple(row[:end]): place for place, row in enumerate(rows) for end in (-1, None)}
    fed: list[Any] = [places.get(tuple(noted)) for noted in inputs]
    orders = [fed[start : start + len(rows)] for start in range(0, len(fed), len(rows))]
    assert len(orders) == epochs and all(set(order) == set(range(len(rows))) for order in orders), (
        f"an epoch must feed each sentence once: {epochs} epochs of {len(rows)} sentences fed"
        f" {len(fed)}, of which {sum(place is not None for place in fed)} are known, and the first"
        f" epoch has {len({*fed[: len(rows)]} - {None})} different ones"
    )
    return [[rows[place] for place in order] for order in orders]


def trained_by_hand(
    orders: list[list[list[int]]], size: int, window: int, rate: float, seed: int
) -> tuple[Pairs, list[float]]:
    """The model and the losses when each window is one batch; `orders` has the sentences of each
    epoch, as they were fed.
    """
    model = Pairs(seed)
    losses = []
    done = 0
    step = size * window
    for order in orders:
        sums: list[tuple[float, int]] = []
        for start in range(0, len(order), step):
            loss, targets = loss_of_rows(model, order[start : start + step])
            gradients = torch.autograd.grad(loss / targets, list(model.parameters()))
            factor = 1 - done / (len(orders) * math.ceil(len(order) / step))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(rate * factor * gradient)
            sums = [*sums, (loss.item(), targets)]
            done = done + 1
        losses.append(sum(loss for loss, _ in sums) / sum(targets for _, targets in sums))
    return model, losses


def check_losses(found: Sequence[Any], losses: Sequence[float], what: str) -> None:
    """The loss of each epoch."""
    for epoch, (one, other) in enumerate(zip(found, losses, strict=True)):
        off = abs(float(one) - other)
        since_start = sum(losses[: epoch + 1]) / (epoch + 1)
        assert off < 1e-3 or abs(float(one) - since_start) > 1e-3, (
            f"the loss of epoch {epoch} is {float(one):.3f}, the mean since the first epoch,"
            f" expected {other:.3f}, that of this epoch alone: set the sums back"
        )
        assert off < 1e-3, (
            f"the loss of epoch {epoch} is {float(one):.3f}, expected {other:.3f}: {what}"
        )


def check_training(
    answers: Answers,
    rows: list[list[int]],
    what: str,
    *,
    size: int,
    window: int,
    rate: float = 1.0,
    seed: int = 0,
    epochs: int = 1,
) -> None:
    """The losses and the weights of a short training, against one by hand."""
    with silent_case(
        f"Task 5, {len(rows)} sentences, micro-batches of {size}, windows of {window}, {epochs}"
        " epochs"
    ):
        model = Recorder(seed)
        result = answers["mended_train"](
            model, rows, epochs=epochs, size=size, window=window, rate=rate, seed=seed
        )
        assert isinstance(result, dict) and {"losses", "best"} <= result.keys(), (
            f"expected a dictionary with losses and best, got {type(result).__name__}"
        )
        wanted, losses = trained_by_hand(
            orders_of(model.inputs, rows, epochs), size, window, rate, seed
        )
        assert len(result["losses"]) == epochs, (
            f"there are {len(result['losses'])} losses, expected one for each of the {epochs} "
            "epochs"
        )
        check_losses(result["losses"], losses, what)
        for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
            off = (one - other).abs().max().item()
            assert off < 1e-4, (
                f"the losses are right, but the weights differ by up to {off:.2g} afterwards: "
                f"{what}"
            )


class Watched(Recorder):
    """Its loss falls until it has been fed 18 sentences, and rises from there."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * abs(len(self.inputs) - 18)


EQUAL = [
    [first + step * place for place in range(4)] for step in (1, 2, 3) for first in (1, 2, 3, 4)
]


def check_one_update(answers: Answers) -> None:
    """The loss, and a single update."""
    check_training(
        answers,
        EQUAL,
        "nothing to pad here, and no update: is the output at a word compared with the word right"
        " after it?",
        size=4,
        window=3,
        rate=0.0,
    )
    check_training(
        answers,
        make_sentences(12, 1),
        "no update here: is padding left out of the loss and out of the number of targets?",
        size=4,
        window=3,
        rate=0.0,
    )
    check_training(
        answers,
        EQUAL,
        "one update by one micro-batch: it has the full rate, since the schedule moves after the"
        " update",
        size=12,
        window=1,
    )
    check_training(
        answers,
        make_sentences(12, 1),
        "one update by sentences of unequal length: is padding left out of the number that divides"
        " the"
        " gradient, too?",
        size=12,
        window=1,
    )
    check_training(
        answers,
        EQUAL,
        "one update by three micro-batches: all of them must count, so when is the gradient set"
        " back?",
        size=4,
        window=3,
    )


def check_many_updates(answers: Answers) -> None:
    """Several windows and epochs."""
    check_training(
        answers,
        EQUAL,
        "two windows: is the gradient of the first still there in the second, or its number of"
        " targets?"
        " And is the schedule planned in updates?",
        size=3,
        window=2,
    )
    check_training(
        answers,
        make_sentences(13, 2),
        "unequal sentences, and a last window that is short: it is an update, too, and counts in n",
        size=3,
        window=2,
    )
    check_training(
        answers,
        EQUAL,
        "an update in each of three epochs: is the schedule planned over all of them?",
        size=12,
        window=1,
        epochs=3,
        seed=1,
    )
    check_training(
        answers,
        make_sentences(13, 2),
        "each epoch ends with a window that is short: it is an update of its own, counts in n, and"
        " the"
        " next epoch begins a new window",
        size=3,
        window=2,
        epochs=2,
    )


def check_orders(answers: Answers) -> Any:
    """Another order in each epoch, decided by the seed."""
    with silent_case("Task 5, the orders"):
        watched = Watched()
        result = answers["mended_train"](watched, EQUAL, epochs=3, size=4, window=1, rate=0.0)
        first, second, third = orders_of(watched.inputs, EQUAL, 3)
        assert first != second and second != third, (
            "two epochs come in the same order: make the generator once, before the epochs"
        )
        assert first != third, (
            "the first and the third epoch come in the same order: each epoch needs another one"
        )
        again = Watched()
        other_seed = Watched()
        answers["mended_train"](again, EQUAL, epochs=3, size=4, window=1, rate=0.0)
        assert again.inputs == watched.inputs, "the same seed gave other orders in a second run"
        answers["mended_train"](other_seed, EQUAL, epochs=3, size=4, window=1, rate=0.0, seed=5)
        assert other_seed.inputs != watched.inputs, (
            "the seeds 0 and 5 gave the same orders: is the seed used?"
        )
    return result


def check_best_loss(result: Any) -> None:
    """The lowest of the losses."""
    with silent_case("Task 5, best"):
        losses = [float(loss) for loss in result["losses"]]
        assert float(result["best"]) == min(losses), (
            f"the losses are {', '.join(f'{loss:.2f}' for loss in losses)}, and best is"
            f" {float(result['best']):.2f}, expected the lowest"
        )


def task5_mend(answers: Answers) -> None:
    """All six promises."""
    with silent_case("Task 5"):
        written(answers, "mended_train")
    check_one_update(answers)
    check_many_updates(answers)
    check_best_loss(check_orders(answers))


Pieces = list[tuple[Tensor, int]]


def planted_mean(pieces: Pieces, window: int) -> Any:
    """The mean over all targets of a window."""
    return sum(loss for loss, _ in pieces) / sum(targets for _, targets in pieces)


def planted_order(count: int, generator: torch.Generator, epoch: int) -> list[int]:
    """The order of an epoch."""
    return torch.randperm(count, generator=generator).tolist()


def planted_updates(batches: int, window: int) -> int:
    """The updates of an epoch."""
    return math.ceil(batches / window)


def same_order(count: int, generator: torch.Generator, epoch: int) -> list[int]:
    """The same order in each epoch."""
    return planted_order(count, generator.manual_seed(generator.initial_seed()), epoch)


# what each loop does in place of the right thing; `pieces` are the (loss, targets) of the
# micro-batches of a window
PLANTED: dict[str | None, dict[str, Any]] = {
    None: {},
    "shift": dict(ahead=2),
    "padding": dict(trained=torch.ones_like, reported=torch.ones_like),
    "window": dict(
        mean=lambda pieces, window: pieces[-1][0] / sum(targets for _, targets in pieces)
    ),
    "window: a mean of means": dict(
        mean=lambda pieces, window: sum(loss / targets for loss, targets in pieces) / len(pieces)
    ),
    "order": dict(order=same_order),
    "order: half of the sentences, twice": dict(
        order=lambda count, *rest: (planted_order((count + 1) // 2, *rest) * 2)[:count]
    ),
    "rate": dict(factor=lambda done, updates: 1 - (done + 1) / updates),
    "rate: it never changes": dict(factor=lambda done, updates: 1.0),
    "rate: n is the number of micro-batches": dict(plan=lambda batches, window: batches),
}


USUAL: dict[str, Any] = {
    "ahead": 1,
    "mean": planted_mean,
    "order": planted_order,
    "plan": planted_updates,
    "factor": lambda done, updates: 1 - done / updates,
    "trained": lambda words: words != PAD,
    "reported": lambda words: words != PAD,
}


def loss_of_batch(model: nn.Module, batch: list[list[int]], how: dict[str, Any]) -> list[Any]:
    """(loss, targets) of a micro-batch, as it is trained and as it is reported."""
    rows = [torch.tensor(row) for row in batch]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    ahead = how["ahead"]
    logits = model(ids[:, :-1])[:, : ids.shape[1] - ahead]
    words = ids[:, ahead:]
    found = []
    for use in (how["trained"](words).bool(), how["reported"](words).bool()):
        loss = F.cross_entropy(logits[use], words[use], reduction="sum")
        found.append((loss, int(use.sum())))
    return found


def planted_train(fault: str | None, faults: dict[str | None, dict[str, Any]] = PLANTED) -> Answer:
    """A training function that keeps its promises, but for this one."""
    how = USUAL | faults[fault]

    def train(
        model: nn.Module,
        rows: list[list[int]],
        *,
        epochs: int,
        size: int,
        window: int,
        rate: float,
        seed: int = 0,
    ) -> dict[str, Any]:
        parameters = list(model.parameters())
        generator = torch.Generator().manual_seed(seed)
        updates = epochs * how["plan"](math.ceil(len(rows) / size), window)
        losses = []
        done = 0
        for epoch in range(epochs):
            places = how["order"](len(rows), generator, epoch)
            sums: Pieces = []
            for first in range(0, len(rows), size * window):
                pieces: Pieces = []
                for start in range(first, min(first + size * window, len(rows)), size):
                    batch = [rows[place] for place in places[start : start + size]]
                    trained, reported = loss_of_batch(model, batch, how)
                    pieces.append(trained)
                    sums.append(reported)
                gradients = torch.autograd.grad(how["mean"](pieces, window), parameters)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.sub_(rate * how["factor"](done, updates) * gradient)
                done += 1
            total = sum(loss.item() for loss, _ in sums)
            losses.append(total / sum(targets for _, targets in sums))
        return {"losses": losses, "best": min(losses)}

    return train


def verdict(answers: Answers, name: str, loop: Answer) -> bool:
    """Whether the student's test called `name` fails on a loop."""
    try:
        answers["tests"][name](loop)
    except AssertionError:
        return True
    return False


def promise_of(fault: str | None) -> str:
    """The name of the promise that a fault breaks."""
    return (fault or "").split(":")[0]


NAMES = ("window", "order", "padding", "rate")


def check_tests_dict(answers: Answers) -> None:
    """There is a function for each of the four names."""
    (tests,) = written(answers, "tests")
    assert isinstance(tests, dict), f"tests is {type(tests).__name__}, expected a dictionary"
    missing = [name for name in NAMES if not callable(tests.get(name))]
    assert not missing, f"tests has no function for {', '.join(missing)}"


def check_own_loops(answers: Answers, name: str, faults: dict[str | None, dict[str, Any]]) -> None:
    """The test fails on every loop that breaks its own promise."""
    for fault in faults:
        if promise_of(fault) == name:
            assert verdict(answers, name, planted_train(fault, faults)), (
                "it passes on a loop that breaks just this promise"
                f" ({(fault or '').partition(': ')[2] or 'as the printed loop does'}). Look at what"
                " such a loop gives you: which number differs? (A test fails by raising, not by"
                " what it returns.)"
            )


def task5_own(answers: Answers, more: dict[str, dict[str, Any]]) -> None:
    """Each test finds the loops that break its own promise, and lets the right one pass."""
    faults = PLANTED | more
    for name in NAMES:
        with silent_case(f"Task 5, the test {name!r}"):
            check_tests_dict(answers)
            assert not verdict(answers, name, planted_train(None)), (
                "it fails on a loop that keeps all promises: what it asks for is not promised"
            )
            check_own_loops(answers, name, faults)


def task5_others(answers: Answers, more: dict[str, dict[str, Any]]) -> None:
    """No test fails on a loop that breaks another promise."""
    faults = PLANTED | more
    for name in NAMES:
        with silent_case(f"Task 5, the test {name!r}"):
            check_tests_dict(answers)
            check_own_loops(answers, name, faults)
            others = [
                fault
                for fault in faults
                if promise_of(fault) in {*NAMES} - {name}
                and verdict(answers, name, planted_train(fault, faults))
            ]
            assert not others, (
                f"it fails on loops that only break {' and '.join(map(str, others))}. Choose"
                " sentences, sizes or a rate with which that does not show, or compare with what"
                " the model was really given"
            )

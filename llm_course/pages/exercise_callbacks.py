"""The checks of exercise 16, callbacks: each says what is wrong with an answer."""

import copy
import csv
import functools
import itertools
import json
import math
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from llm_course.pages.checking import Answers, case, expect_number, frozen, written
from llm_course.training.callbacks import EarlyStopping, LRSchedulerCallback, MetricsLogger
from llm_course.training.config import Config, OptimizationConfig, TrainingConfig
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.lr_finder import LearningRateCurve, find_learning_rate
from llm_course.training.runtime import rng_state
from llm_course.training.task import RegressionTask


def make_engine(
    task: Any = RegressionTask, callbacks: Any = (), *, learning_rate: Any = 0.05, **training: Any
) -> Any:
    """An engine on the CPU: six steps, three an epoch, a validation every second step."""
    defaults: dict[str, Any] = dict(
        device="cpu",
        precision="fp32",
        batch_size=150,
        max_steps=6,
        eval_interval=2,
        max_grad_norm=1e9,
    )
    config = Config(
        training=TrainingConfig(**(defaults | training)),
        optimization=OptimizationConfig(
            learning_rate=learning_rate, schedule="constant", warmup_steps=0, weight_decay=0.0
        ),
    )
    task = task(config)
    return TrainingEngine(config, task, task.build_data(), callbacks)


class Noisy(RegressionTask):
    """A small net with dropout: its losses show who touches its mode or its random numbers."""

    def build_model(self, data: Any) -> Any:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))


class Remember(Callback):
    """Notes the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, engine: Any, metrics: Any) -> None:
        self.losses.append(metrics["loss_sum"] / metrics["num_targets"])


class Keep(Callback):
    """Keeps a copy of the engine's state every few steps, as a checkpoint would."""

    def __init__(self, every: Any) -> None:
        self.every = every
        self.states: dict[int, Any] = {}

    def on_step_end(self, engine: Any, metrics: Any) -> None:
        if engine.state.step % self.every == 0:
            self.states[engine.state.step] = copy.deepcopy(engine.state_dict())


def plain_leaves(value: Any) -> Any:
    """The leaves of nested dictionaries, lists and tuples."""
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [leaf for part in value for leaf in plain_leaves(part)]
        if isinstance(value, list | tuple)
        else [value]
    )


class HookRecorder(Callback):
    """Notes every hook that is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []


class PlantedLosses(Callback):
    """Writes these validation losses over the real ones; raises where one is an error."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def on_validation_end(self, engine: Any, metrics: Any) -> None:
        value = self.values.pop(0)
        if isinstance(value, Exception):
            raise value
        metrics["val_loss"] = value


def _noter(hook: str) -> Any:
    def note(self: HookRecorder, *_: Any) -> None:
        self.calls.append(hook)

    return note


def recorded_run(*callbacks: Any) -> Any:
    """The hooks of a run of 7 steps."""
    recorder = HookRecorder()
    try:
        make_engine(callbacks=[recorder, *callbacks], max_steps=7).run()
    except OSError:
        pass
    return recorder.calls


for _hook in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(HookRecorder, _hook, _noter(_hook.removeprefix("on_")))


@functools.cache
def recorded_runs() -> dict[str, list[str]]:
    """The hooks of the runs A, B and C."""
    return {
        "A": recorded_run(),
        "B": recorded_run(PlantedLosses(5.0, 4.0, 4.0, 3.0), EarlyStopping(patience=1)),
        "C": recorded_run(PlantedLosses(1.0, OSError("planted"))),
    }


ALWAYS = "the last step of a run is validated, whatever eval_interval is"
CALL_SLIPS: dict[Any, str] = {
    ("A", "epoch_start", 2): "step 7 begins a third epoch",
    ("A", "validation_end", 3): ALWAYS,
    ("A", "epoch_end", 3): (
        "on_epoch_end comes after the last batch of an epoch, and the third has two more"
    ),
    ("A", "step_end", 6): (
        "there are 7 steps; the last one begins an epoch that is not finished, and is a step"
        " all the same"
    ),
    ("B", "step_end", 5): (
        "the stop is asked for inside the validation of step 6, and that step still ends"
    ),
    ("B", "step_end", 7): (
        "a loss of 4 after a loss of 4 is not better, so the run ends with step 6"
    ),
    ("B", "validation_end", 4): (
        "a loss of 4 after a loss of 4 is not better, so the run ends with step 6"
    ),
    ("B", "validation_end", 2): (
        "with patience=1 it takes one validation that is not better: that of step 6"
    ),
    ("A", "epoch_start", 1): (
        "each epoch has a start of its own: step 4 begins the second, step 7 the third"
    ),
    ("A", "train_end", 0): "a run that has made all its steps ends with on_train_end",
    ("B", "epoch_start", 3): ("the run ends with step 6, and that is the end of the second epoch"),
    ("B", "epoch_end", 1): (
        "step 6 uses the last batch of its epoch, so the epoch ends, though the run was stopped"
        " in it"
    ),
    (
        "B",
        "train_end",
        0,
    ): "a run that was stopped ends as one that has reached its last step",
    ("B", "exception", 1): "a run that was stopped has not failed",
    (
        "C",
        "step_end",
        4,
    ): (
        "a validation is part of its step: on_validation_end comes before on_step_end, which is"
        " not reached"
    ),
    ("C", "validation_end", 1): (
        "the recorder stands before the callback that raises, so it is called at step 4 too"
    ),
    ("C", "epoch_start", 1): (
        "an epoch starts before its first step: step 4 fails when the second epoch has begun"
    ),
    ("C", "epoch_end", 2): "the second epoch is not used up",
    ("C", "epoch_end", 0): "steps 1 to 3 are a whole epoch, and it ends before step 4",
    ("C", "exception", 2): (
        "two callbacks hear of the error, but the recorder is one of them, and is called once"
    ),
    ("C", "train_end", 1): "a run that fails on its way does not come to on_train_end",
    ("C", "exception", 0): (
        "each callback hears of the error in on_exception, also that which raised it"
    ),
}


def times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"


def task1_calls(answers: Answers) -> None:
    """How often each hook is called."""
    recorded = recorded_runs()
    with case("Task 1, calls"):
        written(answers, "calls")
        assert isinstance(answers["calls"], dict) and answers["calls"].keys() == recorded.keys(), (
            "calls has the keys A, B and C"
        )
        for run, hooks in recorded.items():
            for hook in (
                "epoch_start",
                "step_end",
                "validation_end",
                "epoch_end",
                "train_end",
                "exception",
            ):
                assert isinstance(answers["calls"][run], dict) and hook in answers["calls"][run], (
                    f"calls of run {run} has no {hook!r}"
                )
                found = expect_number(answers["calls"][run][hook], f"{hook} of run {run}")
                why = CALL_SLIPS.get((run, hook, found), "go through the run step by step")
                assert found == hooks.count(hook), (
                    f"run {run} doesn't call on_{hook} {times(found)}: {why}"
                )


END_SLIPS: dict[Any, str] = {
    ("A", "epoch_end"): "the third epoch has more batches, so it does not end",
    ("A", "validation_end"): "a validation comes before the on_step_end of its step",
    ("B", "step_end"): "step 6 used the last batch of its epoch",
    (
        "B",
        "validation_end",
    ): "the stop is asked for in the validation; then the step and its epoch end",
    ("A", "train_end"): "on_train_end is the very last of a run: is the pair turned round?",
    ("B", "train_end"): "on_train_end is the very last of a run: is the pair turned round?",
    (
        "C",
        "step_end",
    ): "the error comes before the on_step_end of step 4, and nothing goes on after it",
    ("C", "validation_end"): "the very last hook of a run is on_train_end or on_exception",
    ("C", "exception"): "after on_exception nothing is called",
}


def expect_ends(answers: Answers) -> None:
    """The last two hooks of each run."""
    recorded = recorded_runs()
    assert (
        isinstance(answers["last_two"], dict) and answers["last_two"].keys() == recorded.keys()
    ), "last_two has the keys A, B and C"
    for run, hooks in recorded.items():
        found = answers["last_two"][run]
        assert isinstance(found, list | tuple) and len(found) == 2, (
            f"last_two of run {run} has two names"
        )
        found = [str(hook).removeprefix("on_") for hook in found]
        why = END_SLIPS.get((run, found[0]), "look at how a run ends")
        assert found[0] == hooks[-2], (
            f"run {run}: the last hook but one is not on_{found[0]}: {why}"
        )
        assert found[1] == hooks[-1], (
            f"run {run}: the last hook is not on_{found[1]}: a run ends with on_train_end or with"
            " on_exception"
        )


def task1_ends(answers: Answers) -> None:
    """The last hooks, and the steps that are logged."""
    with case("Task 1, ends and rows"):
        written(answers, "last_two", "log_steps")
        expect_ends(answers)
        log_steps = answers["log_steps"]
        with tempfile.TemporaryDirectory() as folder:
            recorded_run(MetricsLogger(folder, log_interval=3))
            right = [
                json.loads(line)["step"]
                for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
            ]
        assert isinstance(log_steps, list | tuple), "log_steps is a list of steps"
        found = [expect_number(step, "a step of log_steps") for step in log_steps]
        assert found not in (
            [3, 6],
            [3, 6, 7],
        ), f"log_steps is {log_steps}: each validation has a row too"
        assert 7 in found, f"log_steps is {log_steps}: the last step has a row, too"
        assert found != [
            2,
            4,
            6,
            7,
        ], (
            f"log_steps is {log_steps}: these are the validations; every third step has a row as"
            f" well"
        )
        assert found == right, (
            f"log_steps is {log_steps}: every third step, each validation, and the last step, in"
            f" order,"
            " each step once"
        )


class Rates(Callback):
    """Notes the learning rate of each step."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def on_step_end(self, engine: Any, metrics: Any) -> None:
        self.rates[engine.state.step] = metrics["learning_rate"]


def rates_of_d(*callbacks: Any, values: Any, state: Any = None) -> Any:
    """(the rates by step, the states by step) of a run of 12 steps with these validation losses."""
    noted = Rates()
    keep = Keep(every=10)
    run = dict(max_steps=12, eval_interval=2, learning_rate=0.4)
    engine = make_engine(callbacks=[PlantedLosses(*values), *callbacks, noted, keep], **run)
    engine.setup(copy.deepcopy(state))
    engine.run()
    return noted.rates, keep.states


class Perplexity(Callback):
    def on_step_end(self, engine: Any, metrics: Any) -> None:
        metrics["perplexity"] = math.exp(min(metrics["loss_sum"] / metrics["num_targets"], 50))


class Bits(Callback):
    def on_step_end(self, engine: Any, metrics: Any) -> None:
        metrics["bits"] = math.log2(metrics["perplexity"]) if "perplexity" in metrics else None


class Worst(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, engine: Any, metrics: Any) -> None:
        if "loss" in metrics:
            self.losses.append(metrics["loss"])

    def state_dict(self) -> Any:
        return {"worst": max(self.losses, default=None)} | {"rows": len(self.losses)}


def expect_order(names: Any) -> None:
    """Nothing is lost in a run of six steps with rows at 2, 3, 4 and 6."""
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Any] = {
            "Perplexity": Perplexity(),
            "Bits": Bits(),
            "EarlyStopping": EarlyStopping(patience=9),
            "MetricsLogger": MetricsLogger(folder, log_interval=3),
            "Worst": Worst(),
            "Keep": Keep(every=1),
        }
        assert isinstance(names, list | tuple) and sorted(map(str, names)) == sorted(made), (
            f"order is {names}, expected a list of the names {', '.join(sorted(made))}, each once"
        )
        make_engine(callbacks=[made[name] for name in names]).run()
        row = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("perplexity", "bits"):
        assert name in row, (
            f"the last row has no {name!r}: what is to be written must be added before"
            " MetricsLogger comes"
        )
    assert row["bits"] is not None, "Bits finds no perplexity: it comes after the one that adds it"
    assert made["Worst"].losses, (
        "Worst saw no row: metrics['loss'] is there only after MetricsLogger"
    )
    states = {step: state["callbacks"] for step, state in made["Keep"].states.items()}
    assert states[5]["MetricsLogger"]["num_targets"] == 150, (
        "the state of step 5 has sums without that step: a row of a resumed run would lack it. Who"
        " must come before Keep?"
    )
    assert states[4]["Worst"]["rows"] == 3, (
        "the state of step 4 has a Worst that does not know the row of step 4. Who must come before"
        " Keep?"
    )


RATE_SLIPS: dict[Any, str] = {
    ("step 8", 0.2): (
        "the second validation that is not better is that of step 8 itself; its update was made"
        " before"
    ),
    ("step 9", 0.4): (
        "4, then 4 and 6: two validations that are not better, so the rate is lowered after step 8"
    ),
    ("step 9", 0.1): "the rate is halved once, not at each validation that is not better",
    ("step 12", 0.4): (
        "the base of the schedule was lowered, and not one step's rate; a better validation"
        " does not raise it"
    ),
    ("step 12", 0.1): (
        "one validation that is not better, that of step 12, is less than the patience"
    ),
    ("step 12, resumed", 0.4): (
        "the callback's state has the product of all factors, and a resume gives it back"
    ),
    ("step 12, resumed", 0.1): (
        "the resume brings the rate back to where it was, and does not lower it once more"
    ),
    ("step 12, resumed without the callback", 0.2): (
        "the schedule is built from the configuration, and nobody takes the scale out of the state"
    ),
}


def task1_rates(answers: Answers) -> None:
    """Learning rates, and an order of callbacks."""
    with case("Task 1, rates and order"):
        written(answers, "rates", "order")
        plateau: dict[str, Any] = dict(factor=0.5, patience=2)
        straight, states = rates_of_d(
            LRSchedulerCallback(**plateau), values=(5.0, 4.0, 4.0, 6.0, 3.0, 3.0)
        )
        resumed, _ = rates_of_d(LRSchedulerCallback(**plateau), values=(3.0,), state=states[10])
        without, _ = rates_of_d(values=(3.0,), state=states[10])
        right = {f"step {step}": straight[step] for step in (8, 9, 12)}
        right |= {
            "step 12, resumed": resumed[12],
            "step 12, resumed without the callback": without[12],
        }
        assert isinstance(answers["rates"], dict) and answers["rates"].keys() == right.keys(), (
            f"rates has the keys {', '.join(right)}"
        )
        for name, rate in right.items():
            found = round(expect_number(answers["rates"][name], f"the rate of {name}"), 6)
            why = RATE_SLIPS.get(
                (name, found), "follow the best loss and the count from validation to validation"
            )
            assert abs(found - rate) < 1e-6, f"the rate of {name} is not {found:g}: {why}"
        expect_order(answers["order"])


def csv_steps(count: Any, seed: Any = 0) -> Any:
    """Steps with unequal numbers of targets, a falling rate, and a validation every second step."""
    g = random.Random(seed)
    counts = [g.randint(1, 20) for _ in range(count)]
    steps = [
        {"loss_sum": n * g.uniform(0.1, 9.0), "num_targets": n, "learning_rate": 0.1 / (3 + i)}
        for i, n in enumerate(counts)
    ]
    return [step | ({"val_loss": 2.0} if i % 2 else {}) for i, step in enumerate(steps)]


def plain_state(logger: Any) -> Any:
    """The numbers and texts of the logger's state."""
    given = logger.state_dict()
    assert isinstance(given, dict), (
        f"state_dict returns a {type(given).__name__}, expected a dictionary"
    )
    leaves = plain_leaves(given)
    strange = [
        leaf for leaf in leaves if not isinstance(leaf, bool | int | float | str | Tensor | None)
    ]
    assert not strange, (
        f"the state holds a {type(strange[0]).__name__}: a checkpoint takes numbers and texts only"
    )
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def csv_run(
    answers: Answers, path: Any, steps: Any, *, interval: Any, start: Any = 0, state: Any = None
) -> Any:
    """A run over `steps`, begun after `start`; the states of its logger, and the file's text, after
    each step.
    """
    logger = answers["CSVLogger"](path, interval=interval)
    states = {}
    texts = {}
    if state is not None:
        given = copy.deepcopy(state)
        logger.load_state_dict(given)
        assert frozen(given) == frozen(state), (
            "load_state_dict changes the state that it is given: read from it only, for the same"
            " state may be loaded twice"
        )
        once = plain_state(logger)
        logger.load_state_dict(given)
        assert plain_state(logger) == once, (
            "a state that is loaded a second time, as after a range test, changes the logger: set"
            " what it holds, and add nothing"
        )
    engine = SimpleNamespace(state=SimpleNamespace(step=start))
    logger.on_train_start(engine)
    for step in range(start + 1, len(steps) + 1):
        engine.state.step = step
        logger.on_step_end(engine, dict(steps[step - 1]))
        given = plain_state(logger)
        assert plain_state(logger) == given, (
            "state_dict changes the logger: it is called at each checkpoint, and only reads"
        )
        states[step] = copy.deepcopy(logger.state_dict())
        texts[step] = path.read_text() if path.exists() else ""
    logger.on_train_end(engine)
    left = path.read_text() if path.exists() else ""
    assert left == texts[len(steps)], (
        "on_train_end writes to the file: steps that are left over at the end have no row"
    )
    return states, texts


def expect_rows(text: Any, steps: Any, interval: Any, last: Any = None) -> None:
    """The file has the header, and the rows of `steps` until `last`."""
    last = len(steps) if last is None else last
    lines = text.splitlines()
    assert lines and lines[0] == "step,loss,learning_rate", (
        f"the first line is {lines[0] if lines else None!r}, expected step,loss,learning_rate"
    )
    assert lines.count(lines[0]) == 1, f"the header is there {lines.count(lines[0])} times"
    found = list(csv.reader(lines[1:]))
    assert all(len(row) == 3 for row in found), (
        f"a row of the file is {next(row for row in found if len(row) != 3)}, expected three"
        " numbers: a torn row, or two that are glued together?"
    )
    at = [int(float(row[0])) for row in found]
    right = list(range(interval, last + 1, interval))
    twice = sorted({step for step in at if at.count(step) > 1})
    why = (
        "is the step compared as a text? '12' comes before '4'"
        if twice == [12]
        else "which rows does on_train_start keep?"
    )
    assert not twice, f"the steps in the file are {at}, and a step is there twice: {why}"
    what = f"the steps in the file are {at}, expected {right}"
    extra = [step for step in at if step % interval]
    assert not extra, (
        f"{what}: {interval} does not divide {extra[0] if extra else 0}, so that step has no row,"
        " validated or not"
    )
    assert at == right[: len(at)] or set(at) - set(right), (
        f"{what}: which rows does on_train_start keep?"
    )
    assert at == right or len(at) >= len(right), (
        f"{what}: a row must be on disk when on_step_end returns. Is the file closed?"
    )
    assert at == right, what
    for step, row in zip(at, found, strict=True):
        expect_csv_row(step, row, steps, interval)


def expect_csv_row(step: int, row: Any, steps: Any, interval: int) -> None:
    """A row has the mean over all targets of its steps, and the rate of its last step."""
    group = steps[step - interval : step]
    sums = [part["loss_sum"] for part in group]
    counts = [part["num_targets"] for part in group]
    mean = sum(sums) / sum(counts)
    loss = float(row[1])
    of_means = sum(s / n for s, n in zip(sums, counts, strict=True)) / interval
    assert interval == 1 or abs(loss - of_means) > 1e-9, (
        f"row {step} has the mean of the steps' means: add up losses, add up targets, then divide"
    )
    assert interval == 1 or abs(loss - sums[-1] / counts[-1]) > 1e-9, (
        f"row {step} has the loss of its last step: it must cover all since the row before"
    )
    everything = sum(part["loss_sum"] for part in steps[:step]) / sum(
        part["num_targets"] for part in steps[:step]
    )
    assert step == interval or abs(loss - everything) > 1e-9, (
        f"row {step} has the mean since the first step: begin anew after each row"
    )
    assert abs(loss - mean) < 5e-5, (
        f"row {step} has the loss {loss}, expected {mean}: which steps does it cover?"
    )
    rate = group[-1]["learning_rate"]
    assert abs(loss - mean) < 1e-12 and float(row[2]) == rate, (
        f"row {step} is {','.join(row)}, expected {step},{mean},{rate}: write the numbers with"
        " all their digits"
    )


def task2_csv(answers: Answers, more: bool = False) -> None:
    """A log that survives."""
    written(answers, "CSVLogger")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_toy(answers, folder)
        check_resumes(answers, folder / "new" / "run" / "log.csv")
        if more:
            check_kills(answers, folder)


def check_toy(answers: Answers, folder: Path) -> None:
    """Two steps by hand."""
    with case("Task 2, 10 targets with the sum 10, then 2 with the sum 8"):
        toy = [
            {"loss_sum": 10.0, "num_targets": 10, "learning_rate": 0.5},
            {"loss_sum": 8.0, "num_targets": 2, "learning_rate": 0.25},
        ]
        expect_rows(csv_run(answers, folder / "toy.csv", toy, interval=2)[1][2], toy, 2)


def check_resumes(answers: Answers, log: Path) -> None:
    """A run that is resumed at several places, and a new run in its folder."""
    with case("Task 2, a run of 14 steps, a row every 3"):
        steps = csv_steps(14)
        states, texts = csv_run(answers, log, steps, interval=3)
        for step in (2, 3, 8, 14):
            expect_rows(texts[step], steps, 3, last=step)
    check_row_of_resume(answers, log, steps, states, texts)
    with case("Task 2, resumed at step 6, which has a row"):
        csv_run(answers, log, steps, interval=3, start=6, state=states[6])
        assert "\n6," in log.read_text(), (
            "the row of step 6 is lost: it is not later than step 6, so it stays"
        )
        assert log.read_text() == texts[14], (
            "the log is not, letter for letter, that of a run without a stop"
        )
    with case("Task 2, killed in the row of step 12 and resumed at step 11"):
        log.write_text(texts[11] + "1")
        csv_run(answers, log, steps, interval=3, start=11, state=states[11])
        lines = log.read_text().splitlines()
        torn = [line for line in lines[1:] if line.startswith("112,") or line.count(",") != 2]
        assert not torn, (
            f"a row of the file is {torn[0]!r}: the kill left '1' of '12,...', which has no line"
            " break at its end"
        )
        expect_rows(log.read_text(), steps, 3)
    with case("Task 2, a new run in an old folder"):
        other = csv_steps(4, seed=1)
        csv_run(answers, log, other, interval=2)
        expect_rows(log.read_text(), other, 2)


def check_row_of_resume(answers: Answers, log: Path, steps: Any, states: Any, texts: Any) -> None:
    """The first row after a resume covers all of its steps."""
    with case("Task 2, ended after step 14 and resumed at step 4"):
        csv_run(answers, log, steps, interval=3, start=4, state=states[4])
        resumed = log.read_text()
        assert len(resumed.splitlines()) > 1 and "\n3," in resumed, (
            "the row of step 3 is lost: what was there before the resume must stay"
        )
        first = [row for row in csv.reader(resumed.splitlines()) if row[0] == "6"]
        sums = [sum(part["loss_sum"] for part in steps[start:6]) for start in (3, 4)]
        counts = [sum(part["num_targets"] for part in steps[start:6]) for start in (3, 4)]
        forgotten = {
            "step 4 is in no row: the sums are part of the state and must outlive on_train_start": (
                sums[1] / counts[1]
            ),
            "the targets of step 4 are forgotten: their number is part of the state, too": (
                sums[0] / counts[1]
            ),
            "the losses of step 4 are forgotten: their sum is part of the state, too": (
                sums[1] / counts[0]
            ),
        }
        for why, loss in forgotten.items():
            assert not first or abs(float(first[0][1]) - loss) > 1e-9, (
                f"the row of step 6 covers steps 4 to 6, and {why}"
            )
        expect_rows(resumed, steps, 3)
        assert resumed == texts[14], (
            "the log is not, letter for letter, that of a run without a stop"
        )


def check_kills(answers: Answers, folder: Path) -> None:
    """Runs that are killed in several rows."""
    for seed in range(3):
        steps = csv_steps(14, seed + 5)
        interval = 2 + seed
        kill = 9 + seed
        start = 5 + seed
        with case(f"Task 2, a row every {interval}, killed after {kill} and resumed at {start}"):
            path = folder / f"{seed}.csv"
            states, texts = csv_run(answers, path, steps, interval=interval)
            for torn in ("", f"{start},0.", f"{start},0.5,0.", "1"):
                path.write_text(texts[kill] + torn)
                csv_run(
                    answers,
                    path,
                    steps,
                    interval=interval,
                    start=start,
                    state=states[start],
                )
                assert path.read_text() == texts[14], (
                    f"the log is not that of a run without a stop; the torn row was {torn!r}"
                )
    with case("Task 2, resumed where there is no file"):
        csv_run(
            answers,
            folder / "other" / "log.csv",
            steps,
            interval=interval,
            start=start,
            state=states[start],
        )
    with case("Task 2, killed while the header was written"):
        path.write_text("step,lo")
        csv_run(answers, path, steps[:4], interval=4)
        expect_rows(path.read_text(), steps[:4], 4)


def weights_now(engine: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()])


class Bystander(Callback):
    """Notes weights, random numbers and mode after each step, when all others were called."""

    def __init__(self) -> None:
        self.weights: list[Any] = []
        self.rng: list[Any] = []
        self.places: list[Any] = []
        self.modes: list[Any] = []

    def on_step_end(self, engine: Any, metrics: Any) -> None:
        self.weights.append(weights_now(engine))
        self.rng.append(
            [
                leaf.tolist() if isinstance(leaf, Tensor) else leaf
                for leaf in plain_leaves(rng_state())
            ]
        )
        self.places.append(engine.state.epoch)
        self.modes.append(engine.model.training)


def watched(callback: Any = None, task: Any = Noisy) -> Any:
    """(losses, what a bystander saw, the engine) of a run of four steps."""
    remember = Remember()
    bystander = Bystander()
    engine = make_engine(
        task, [*([callback] if callback else []), remember, bystander], max_steps=4
    )
    engine.run()
    return remember.losses, bystander, engine


def expect_no_trace(
    callback: Any, alone: Any, drew: Any = "put them back, and not to a seed"
) -> Any:
    losses, seen, engine = watched(callback)
    off = [step for step, (a, b) in enumerate(zip(losses, alone[0], strict=True), 1) if a != b]
    assert all(seen.modes), (
        f"after step {seen.modes.index(False) + 1 if False in seen.modes else 0} the model is in"
        " evaluation mode: put its mode back"
    )
    for step, (a, b) in enumerate(zip(seen.rng, alone[1].rng, strict=True), 1):
        assert a == b, (
            f"after step {step} the random numbers are not those of the run alone: {drew}"
        )
    for step, (a, b) in enumerate(zip(seen.weights, alone[1].weights, strict=True), 1):
        assert torch.equal(a, b) or step in off, (
            f"after step {step} the weights are not those of the run alone"
        )
    assert not off, (
        f"the loss of step {off[0]} is not that of the run alone: something of the model or of its"
        " mode has changed"
    )
    return seen, engine


def check_size(answers: Answers, alone: Any) -> None:
    """WeightNorm reports sizes, and leaves no trace."""
    with case("Task 3, WeightNorm"):
        watcher = answers["WeightNorm"]()
        seen, _ = expect_no_trace(watcher, alone)
        right = [weights.square().mean().sqrt().item() for weights in seen.weights]
        found = [expect_number(size, "a size") for size in watcher.sizes]
        assert len(found) == 4 and np.allclose(found, right, rtol=1e-4), (
            f"the sizes are {np.round(found, 4)}, expected {np.round(right, 4)}: the root of the"
            " mean square of all weights"
        )
    with case("Task 3, WeightNorm of a model with BatchNorm"):
        watcher = answers["WeightNorm"]()
        seen = watched(watcher, Normed)[1]
        right = [weights.square().mean().sqrt().item() for weights in seen.weights]
        assert np.allclose(watcher.sizes, right, rtol=1e-4), (
            f"the sizes are {np.round(watcher.sizes, 4)}, expected {np.round(right, 4)}: running"
            " means are buffers and no weights, so take model.parameters()"
        )


def check_lookahead(answers: Answers, alone: Any) -> None:
    """Lookahead picks random rows, and leaves no trace."""
    with case("Task 3, Lookahead"):
        picked: dict[Any, list[int]] = {}
        for task in (Noisy, RegressionTask):
            watcher = answers["Lookahead"]()
            seen, engine = (
                expect_no_trace(watcher, alone) if task is Noisy else watched(watcher, task)[1:]
            )
            picked[task] = []
            for target, epoch in zip(watcher.targets, seen.places, strict=True):
                y = next(iter(engine.data.train_dataloader(epoch=epoch + 1)))["y"]
                place = (y - expect_number(target, "a target")).abs()
                assert place.min() < 1e-5, (
                    f"a target is {target:.3f}, which is not in the first batch of epoch"
                    f" {epoch + 1},"
                    " which is engine.state.epoch + 1"
                )
                picked[task].append(int(place.argmin()))
        places = picked[Noisy]
        assert len(set(places)) > 1, (
            f"the rows that were picked are {places}: they should differ from step to step"
        )
        places = picked[RegressionTask]
        assert len(set(places)) > 1, (
            f"in a model without dropout the rows that were picked are {places}: nobody else"
            f" draws from"
            " the global random numbers, so when they are put back, the same comes again. Draw"
            " from a"
            " generator of your own"
        )
    with case("Task 3, Lookahead, 60 batches of four rows"):
        watcher = answers["Lookahead"]()
        engine = make_engine(RegressionTask, [watcher], batch_size=4, max_steps=60)
        engine.run()
        y = next(iter(engine.data.train_dataloader(epoch=1)))["y"]
        picked_places = {int((y - target).abs().argmin()) for target in watcher.targets}
        assert picked_places == {0, 1, 2, 3}, (
            f"of four rows only {sorted(picked_places)} were ever picked: each row of the batch"
            " must have its chance, whatever the batch's size"
        )


def check_evaluate(answers: Answers, alone: Any) -> None:
    """Evaluate measures, and leaves no trace."""
    with case("Task 3, Evaluate"):
        watcher = answers["Evaluate"]()
        seen, engine = expect_no_trace(
            watcher,
            alone,
            "did dropout draw them? Put the whole model into evaluation mode, then back",
        )
        rows = engine.data.val_dataset
        right = []
        for weights in seen.weights:
            nn.utils.vector_to_parameters(weights.clone(), engine.model.parameters())
            with torch.no_grad():
                right.append(
                    mse_loss(copy.deepcopy(engine.model).eval()(rows.x)[:, 0], rows.y).item()
                )
        found = [expect_number(loss, "a loss") for loss in watcher.losses]
        assert len(found) == 4 and np.allclose(found, right, rtol=1e-4), (
            f"the losses are {np.round(found, 4)}, expected {np.round(right, 4)}: the loss of all"
            " validation rows, without dropout"
        )
        engine.model.eval()
        watcher.on_step_end(engine, {})
        assert not engine.model.training, (
            "Evaluate met a model in evaluation mode and left it in training mode: give back the"
            " mode"
            " that it had"
        )
        engine.model.train()
        engine.model[0] = nn.Linear(3, 16)
        try:
            watcher.on_step_end(engine, {})
        except RuntimeError:
            pass
        assert engine.model.training, (
            "the model raised an error in Evaluate and was left in evaluation mode: use try and"
            " finally"
        )


def check_history(answers: Answers, alone: Any) -> None:
    """History keeps states, and leaves no trace."""
    with case("Task 3, History"):
        watcher = answers["History"]()
        seen, _ = expect_no_trace(watcher, alone)
        assert len(watcher.states) == 4, f"there are {len(watcher.states)} states after four steps"
        for step, (state, weights) in enumerate(zip(watcher.states, seen.weights, strict=True), 1):
            found = torch.cat([tensor.flatten() for tensor in state["model"].values()])
            assert torch.equal(found, weights), (
                f"the state of step {step} has the weights of another step: the next step changes"
                " tensors that you keep without a copy, also inside of dictionaries"
            )
            assert state["state"]["step"] == step, (
                f"the state of step {step} says that it is of step {state['state']['step']}"
            )
            moments = state["optimizer"]["state"]
            counts = {int(part["step"]) for part in moments.values()}
            assert counts == {step}, (
                f"the state of step {step} has the optimizer's moments of step {max(counts)}:"
                f" copy all"
                " of it"
            )


def task3_mend(answers: Answers) -> None:
    """The four callbacks."""
    written(answers, "WeightNorm", "Lookahead", "Evaluate", "History")
    with case("Task 3, first part"):
        alone = watched()
    check_size(answers, alone)
    check_lookahead(answers, alone)
    check_evaluate(answers, alone)
    check_history(answers, alone)


class Meddler(Callback):
    """Does something of its own in one hook."""

    def __init__(self, hook: Any, act: Any) -> None:
        setattr(self, hook, act)


def draw(function: Any) -> Any:
    return lambda: Meddler("on_step_end", lambda engine, metrics: function())


def leave_evaluating(engine: Any, metrics: Any) -> None:
    if engine.state.step == 5:
        engine.model.eval()


def search(engine: Any) -> None:
    find_learning_rate(engine, num_steps=20)


def forgetful_search(engine: Any) -> None:
    """A range test that puts back all but the optimizer's moments."""
    back = engine.load_state_dict
    engine.load_state_dict = lambda state: back(
        state | {"optimizer": copy.deepcopy(engine.state_dict()["optimizer"])}
    )
    search(engine)
    del engine.load_state_dict


def expect_verdict(answers: Answers, make: Any, right: Any, what: Any) -> None:
    try:
        found = answers["leaves_no_trace"](make)
    except AssertionError as error:
        text = str(error) or "your code raised an AssertionError without a text"
        raise AssertionError(text) from None
    assert isinstance(found, bool | np.bool_), (
        f"leaves_no_trace returns {found if found is None else type(found).__name__}, expected True"
        " or False"
    )
    assert found == right, f"{what}: leaves_no_trace says {bool(found)}"


def task3_trace(answers: Answers, more: bool = False) -> None:
    """Who leaves a trace?"""
    with case("Task 3, second part"):
        written(answers, "leaves_no_trace")
        expect_verdicts(answers)
        expect_late_verdicts(answers)
        if more:
            expect_more_verdicts(answers)


def expect_verdicts(answers: Answers) -> None:
    """Callbacks that meddle, and some that don't."""
    expect_verdict(
        answers,
        Callback,
        True,
        "a callback that does nothing: two runs alone differ already in what you compare",
    )
    expect_verdict(
        answers,
        answers["BrokenHistory"],
        True,
        "BrokenHistory reports nonsense, but the run is that without it",
    )
    expect_verdict(
        answers,
        answers["BrokenEvaluate"],
        False,
        "BrokenEvaluate switches dropout off, which shows only in a model that has dropout",
    )
    expect_verdict(
        answers,
        draw(lambda: torch.rand(())),
        False,
        "a callback that draws from PyTorch's random numbers, which shows in a model with dropout,"
        " or in their state",
    )
    expect_verdict(
        answers,
        lambda: Meddler("on_train_start", search),
        True,
        "a range test that puts everything back",
    )
    expect_verdict(
        answers,
        lambda: Meddler("on_train_start", forgetful_search),
        False,
        "a range test that does not put the optimizer's moments back, which shows in the losses"
        " from the second step on",
    )


def expect_late_verdicts(answers: Answers) -> None:
    """Callbacks whose trace no loss shows."""
    expect_verdict(
        answers,
        draw(random.random),
        False,
        "a callback that draws from Python's random numbers, which no loss shows: compare their"
        " state",
    )
    expect_verdict(
        answers,
        lambda: Meddler(
            "on_train_end", lambda engine: next(engine.model.parameters()).data.mul_(2)
        ),
        False,
        "a callback that doubles weights in on_train_end, which no loss shows: compare the weights"
        " at the end",
    )
    expect_verdict(
        answers,
        lambda: Meddler("on_step_end", leave_evaluating),
        False,
        "a callback that switches dropout off at step 5: make six steps",
    )
    expect_verdict(
        answers,
        lambda: Meddler("on_train_end", lambda engine: torch.rand(())),
        False,
        "a callback that draws from PyTorch's random numbers in on_train_end: compare all of their"
        " state, and no shortened text",
    )


def expect_more_verdicts(answers: Answers) -> None:
    """Callbacks that meddle where few look."""
    expect_verdict(
        answers,
        lambda: Meddler(
            "on_step_end",
            lambda engine, metrics: metrics.update(size=weights_now(engine).norm().item()),
        ),
        True,
        "a callback that only adds to the metrics",
    )
    expect_verdict(
        answers,
        draw(np.random.rand),
        False,
        "a callback that draws from NumPy's random numbers, which no loss shows: compare their"
        " state",
    )
    expect_verdict(
        answers,
        lambda: Meddler(
            "on_train_end",
            lambda engine: next(engine.model.parameters()).data.view(-1)[0].mul_(1 + 2**-23),
        ),
        False,
        "a callback that changes the last bit of one weight in on_train_end: compare bit for bit,"
        " at the end, and no shortened text",
    )


class Normed(RegressionTask):
    """A model with buffers: the running means of BatchNorm change in each step, and are no
    parameters.
    """

    def build_model(self, data: Any) -> Any:
        return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))


class Measured(Callback):
    """Plants the validation loss of each step, and keeps the model before the other callbacks see
    it and after.
    """

    def __init__(self, values: Any) -> None:
        self.values = values
        self.models: dict[Any, Any] = {}

    def on_validation_end(self, engine: Any, metrics: Any) -> None:
        metrics["val_loss"] = self.values[engine.state.step]
        self.models[engine.state.step] = copy.deepcopy(engine.model.state_dict())

    def on_step_end(self, engine: Any, metrics: Any) -> None:
        self.models[f"{engine.state.step}, at its end"] = copy.deepcopy(engine.model.state_dict())


def same_model(a: Any, b: Any) -> Any:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def best_run(values: Any, callback: Any, state: Any = None) -> Any:
    """(what was measured, the states by step, the engine) of a run with a validation after every
    second step.
    """
    measured = Measured({2 * i: value for i, value in enumerate(values, 1)})
    keep = Keep(every=6)
    engine = make_engine(
        Normed,
        [measured, callback, keep],
        max_steps=2 * len(values),
        eval_interval=2,
        learning_rate=0.3,
    )
    engine.setup(copy.deepcopy(state))
    engine.run()
    return measured, keep.states, engine


def played_best(answers: Answers, values: Any, *, stop: Any = None, **arguments: Any) -> Any:
    """(callback, models by step, engine) of a run played by hand: each step adds 1 to all that is
    in the model.
    """
    model = Normed(Config()).build_model(None)
    models = {}
    callback = answers["BestWeights"](**arguments)
    engine = SimpleNamespace(model=model, state=SimpleNamespace(step=0), metrics={})
    callback.on_train_start(engine)
    for step, value in enumerate(values, 1):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(1)
        engine.state.step = step
        engine.metrics = {
            "val_loss": -float(step),
            arguments.get("metric", "val_loss"): value,
        }
        callback.on_validation_end(engine, engine.metrics)
        callback.on_step_end(engine, {"loss_sum": 1.0, "num_targets": 1} | engine.metrics)
        models[step] = copy.deepcopy(model.state_dict())
        if step == stop:
            state, callback = (
                copy.deepcopy(callback.state_dict()),
                answers["BestWeights"](**arguments),
            )
            callback.load_state_dict(state)
            callback.on_train_start(engine)
    callback.on_train_end(engine)
    assert engine.model is model, (
        "engine.model is another object after on_train_end: load the weights into the model that"
        " is there, for others hold it too"
    )
    return callback, models, engine


def expect_untouched(models: Any, plain: Any) -> None:
    touched = [step for step in models if not same_model(models[step], plain[step])]
    assert not touched, (
        f"in step {touched[0] if touched else 0} the model is not that of a run without the"
        " callback: change nothing before on_train_end"
    )


def step_slip(callback: Any, step: Any, validated: Any, resumed: bool) -> str:
    """What may have led to another best step."""
    why = ""
    if step is not None and step != callback.best_step:
        if callback.best_step is None:
            why = (
                ". Is it part of the state?" if resumed else ". Is it set where a value is better?"
            )
        elif callback.best_step == validated.index(step) + 1:
            why = (
                f", for it is engine.state.step: validation {callback.best_step} was that of step"
                f" {step}"
            )
    return why


def expect_best(
    callback: Any,
    models: Any,
    engine: Any,
    step: Any,
    values: Any,
    *,
    mode: Any = "min",
    resumed: Any = False,
) -> None:
    found = engine.model.state_dict()
    validated = [other for other in models if isinstance(other, int)]
    what = f"the metric was {values}, the {'smaller' if mode == 'min' else 'larger'} the better"
    why = step_slip(callback, step, validated, resumed)
    assert callback.best_step == step, (
        f"{what}: best_step is {callback.best_step}, expected {step}{why}"
    )
    expect_weights(found, models, step, what, resumed)


def expect_weights(found: Any, models: Any, step: Any, what: str, resumed: bool) -> None:
    """The model ends with the weights of the best step."""
    validated = [other for other in models if isinstance(other, int)]
    last = validated[-1]
    ask = (
        "Are the weights part of the state, and do they outlive on_train_start?"
        if resumed
        else ("Is the copy a copy, and is it put back in on_train_end?")
    )
    target = step or last
    wrong = [name for name in found if not torch.equal(found[name], models[target][name])]
    if (
        wrong
        and len(wrong) < len(found)
        and all(torch.equal(found[name], models[last][name]) for name in wrong)
    ):
        raise AssertionError(
            f"{what}: the model ends with {', '.join(wrong)} of its last step, and with the rest of"
            f" step {target}: keep all of model.state_dict()"
        )
    at = next(
        (
            f"those of step {other}"
            for other in models
            if isinstance(other, int) and same_model(found, models[other])
        ),
        "those of no validation",
    )
    assert target == last or at != f"those of step {last}", (
        f"{what}: the model ends with the weights of its last step, expected those of step"
        f" {target}. {ask}"
    )
    assert at == f"those of step {target}", (
        f"{what}: the model's weights at the end are {at}, expected those of step {target}"
    )


def task4_best(answers: Answers, more: bool = False) -> None:
    """Back to the best weights."""
    with case("Task 4"):
        written(answers, "BestWeights")
        plain = best_run([0.0] * 5, Callback())[0].models  # by step, two for each value
    with case("Task 4, one run"):
        values = [3.0, 1.0, 2.0, 1.0, 4.0]
        measured, states, engine = best_run(values, best := answers["BestWeights"]())
        expect_untouched(measured.models, plain)
        expect_best(best, plain, engine, 4, values)
    with case("Task 4, NaN"):
        for values in ([math.nan, 2.0, math.nan, 3.0, math.nan], [math.nan] * 3):
            right = 2 if len(values) == 5 else None
            callback, models, engine = played_best(answers, values)
            expect_best(callback, models, engine, right, values)
    with case("Task 4, mode max"):
        values = [0.5, 0.75, 0.25, 0.75, 0.1]
        largest = {"metric": "val_accuracy", "mode": "max"}
        callback, models, engine = played_best(answers, values, **largest)
        expect_best(callback, models, engine, 2, values, mode="max")
    check_best_resumed(answers, states, plain)
    if more:
        for values, mode, stop in itertools.product(SERIES, ("min", "max"), (None, 2)):
            check_best(answers, values, mode, stop)


def check_best_resumed(answers: Answers, states: Any, plain: Any) -> None:
    """A run that is stopped after its best validation."""
    with case("Task 4, stopped after step 6 and resumed"):
        values = [3.0, 1.0, 2.0, 1.0, 4.0]
        strange = [
            leaf
            for leaf in plain_leaves(states[6]["callbacks"]["BestWeights"])
            if not isinstance(leaf, Tensor | bool | int | float | str | None)
        ]
        assert not strange, (
            f"the state holds a {type(strange[0]).__name__}: it may hold tensors, numbers, texts"
            f" and"
            " None"
        )
        measured, _, engine = best_run(values, best := answers["BestWeights"](), states[6])
        expect_untouched(measured.models, plain)
        assert best.best_step != 8, (
            "best_step is 8, but the value of step 4 was as good, and it is forgotten: the best"
            " value"
            " is part of the state"
        )
        expect_best(best, plain, engine, 4, values, resumed=True)


SERIES: list[list[float]] = [
    [-1.0, -3.0, -2.0, -3.0, -1.0],
    [math.nan] * 4,
    [math.nan, 5.0, 7.0, 6.0, 5.0],
    [5.0, 4.0, 3.0, 2.0, 1.0],
    [0.0, 0.0, 0.5],
    [7e9, 6e9, 8e9],
    [-7e9, -6e9, -8e9],
]


def check_best(answers: Answers, values: list[float], mode: str, stop: int | None) -> None:
    """A played run, stopped or not."""
    with case(
        f"Task 4, {mode} of {values}, "
        + ("never stopped" if stop is None else f"stopped after step {stop} and resumed")
    ):
        finite = [value for value in values if not math.isnan(value)]
        right = values.index((min if mode == "min" else max)(finite)) + 1 if finite else None
        callback, models, engine = played_best(answers, values, mode=mode, stop=stop)
        expect_best(
            callback,
            models,
            engine,
            right,
            values,
            mode=mode,
            resumed=stop is not None,
        )


def average_of(losses: Any, smoothing: Any) -> Any:
    """The bias-corrected running average."""
    average = 0.0
    averages = []
    for step, loss in enumerate(losses, start=1):
        average = smoothing * average + (1 - smoothing) * loss
        averages.append(average / (1 - smoothing**step))
    return averages


def curve_through(rates: Any, losses: Any) -> Any:
    """A curve with these smoothed losses; the losses themselves lie four points to the left."""
    smoothed = [float(loss) for loss in losses]
    return LearningRateCurve(
        [float(rate) for rate in rates], smoothed[4:] + smoothed[-1:] * 4, smoothed
    )


def slopes_by_hand(curve: Any, scale: Any = math.log, losses: Any = None) -> Any:
    """The slope at each point, as the task says it; None at the ends."""
    pairs = list(zip([scale(rate) for rate in curve.rates], losses or curve.smoothed, strict=True))
    inner = [
        (after[1] - before[1]) / (after[0] - before[0])
        for before, after in zip(pairs, pairs[2:], strict=False)
    ]
    return [None, *inner, None]


def expect_steepest(
    answers: Answers, curve: Any, counted_from: Any, message: Any, **arguments: Any
) -> None:
    """A point with the steepest slope is found; where two are equal, either."""
    slopes = slopes_by_hand(curve)
    places = range(max(counted_from, 1), len(curve.rates) - 1)
    best = min(slopes[i] for i in places)
    right = min(places, key=lambda i: slopes[i])
    found = expect_number(answers["steepest"](curve, **arguments), "the result of steepest")
    place = min(
        range(len(curve.rates)), key=lambda i: abs(curve.rates[i] / found - 1) if found else i
    )
    assert found and abs(curve.rates[place] / found - 1) < 1e-4, (
        f"the result is {found:.3g}, which is no rate of the curve"
    )
    if place in places and slopes[place] <= best + 1e-4 * abs(best):
        return
    slips = steepest_slips(curve, slopes, places, place, counted_from)
    slip = next((text for text, at in slips.items() if at == place), message)
    raise AssertionError(
        f"the steepest rate is {found:.3g}, expected {curve.rates[right]:.3g}: {slip}"
    )


def steepest_slips(
    curve: Any, slopes: Any, places: range, place: int, counted_from: int
) -> dict[str, Any]:
    """The point that each slip would find."""
    right = min(places, key=lambda i: slopes[i])
    linear = slopes_by_hand(curve, float)
    raw = slopes_by_hand(curve, losses=curve.losses)
    weighted = np.gradient(curve.smoothed, np.log(curve.rates))
    even = [
        s and s * math.log(curve.rates[i + 1] / curve.rates[i - 1]) for i, s in enumerate(slopes)
    ]
    return {
        f"it lies at point {right}, which is the first that counts; neighbours may lie before": (
            right + 1 if right == places[0] else None
        ),
        "it lies at the last point but one, which has two neighbours": (
            right - 1 if right == places[-1] else None
        ),
        "this is where the loss rises": (
            place if slopes[place] is not None and slopes[place] > 0 else None
        ),
        "this is the lowest smoothed loss, not where it falls most steeply": min(
            range(len(slopes)), key=lambda i: curve.smoothed[i]
        ),
        "this point is an end, and has no two neighbours": (
            place if place in (0, len(slopes) - 1) else None
        ),
        "this is one of the points that do not count": place if place < counted_from else None,
        "this is steepest over the rate itself, and not over its logarithm": min(
            places, key=lambda i: linear[i]
        ),
        "this is the largest difference between neighbours: divide it by their distance": min(
            places, key=lambda i: even[i]
        ),
        "this is steepest by the weighted formula of np.gradient: take two neighbours": min(
            places, key=lambda i: weighted[i]
        ),
        "this is steepest in curve.losses, and not in curve.smoothed": min(
            places, key=lambda i: raw[i] if math.isfinite(raw[i]) else math.inf
        ),
        "this is one place too early: which point does a slope belong to?": right - 1,
        "this is one place too late: which point does a slope belong to?": right + 1,
    }


SETTINGS = [(0.9, 101, 7.0), (0.5, 21, 4.0), (0.7, 41, 5.0)]
MORE_SETTINGS = [(0.0, 50, 6.0), (0.8, 11, 3.0), (0.95, 500, 5.0)]


def task5_rules(answers: Answers, more: bool = False) -> None:
    """The lag of an average, and another rule."""
    written(answers, "lag", "steepest")
    for smoothing, num_steps, decades in SETTINGS + MORE_SETTINGS * more:
        check_lag(answers, smoothing, num_steps, decades)
    x = np.linspace(-5, 1, 61)  # the logarithms of the rates, ten a decade
    falls = 5 / (1 + np.exp(4 * (x + 2)))  # a slope that is steepest at 0.01
    check_steepest(answers, x, falls)
    check_uneven(answers)
    check_refusals(answers, x, falls)
    if more:
        for seed in range(30):
            with case(f"Task 5, random curve {seed}"):
                generator = np.random.default_rng(seed)
                count = int(generator.integers(12, 40))
                skip = int(generator.integers(0, 9))
                rates = 10 ** np.cumsum(generator.uniform(0.05, 0.4, count))
                expect_steepest(
                    answers,
                    curve_through(rates * 1e-6, generator.uniform(1, 5, count)),
                    skip,
                    f"skip was {skip}",
                    skip=skip,
                )


def check_lag(answers: Answers, smoothing: float, num_steps: int, decades: float) -> None:
    """The lag, measured on a falling line."""
    with case(f"Task 5, lag({smoothing}, {num_steps}, {decades})"):
        ramp = average_of(range(0, -1000, -1), smoothing)
        steps = ramp[-1] + 999  # by so many steps a falling line comes too late
        right = steps * decades / (num_steps - 1)
        found = expect_number(answers["lag"](smoothing, num_steps, decades), "the lag")
        slips = {
            "that is in steps: a step is so many decades": steps,
            "between num_steps points there are num_steps - 1 intervals": (
                steps * decades / num_steps
            ),
            "in whole steps; but the lag need not be a whole number of them": (
                round(steps) * decades / (num_steps - 1)
            ),
            "the lag is smoothing / (1 - smoothing) steps; between n points are n - 1": (
                (steps + 1) * decades / num_steps
            ),
            "that is the length of the average, 1 / (1 - smoothing): one step more than its lag": (
                (steps + 1) * decades / (num_steps - 1)
            ),
            "the lag is smoothing / (1 - smoothing) steps, 9 for 0.9": (
                smoothing * decades / (num_steps - 1)
            ),
        }
        slip = next(
            (
                text
                for text, value in slips.items()
                if abs(found - value) < 1e-4 < abs(value - right)
            ),
            "smoothing / (1 - smoothing) steps, in decades",
        )
        assert abs(found - right) < 1e-4, (
            f"the lag is {found:.4g}, measured on a falling line it is {right:.4g} decades: {slip}"
        )


def check_steepest(answers: Answers, x: Any, falls: Any) -> None:
    """Curves whose rates are evenly spaced."""
    with case("Task 5, steepest"):
        expect_steepest(
            answers,
            curve_through(10**x, falls),
            10,
            "the loss falls from 5 to 0, most steeply in the middle",
        )
        slow = np.interp(x, [-3, -2], [5, 4])
        fast = np.interp(x, [-1, 0], [0, -0.5])
        expect_steepest(
            answers,
            curve_through(10**x, slow + fast),
            10,
            "between 0.001 and 0.01 the loss falls by 1, and from 0.1 to 1 by 0.5",
        )
        early = falls + np.where(np.arange(61) % 2, 0, 4) * (np.arange(61) < 9)
        expect_steepest(
            answers, curve_through(10**x, early), 10, "the first 10 points jump, and must not count"
        )
        late = falls + np.where(np.arange(61) > 55, 9 * (61 - np.arange(61)) - 30, 0)
        expect_steepest(
            answers,
            curve_through(10**x, late),
            10,
            "the last points fall too, and they count: skip is from the front",
            skip=10,
        )
        for place, skip in ((10, 10), (59, 10), (59, 0)):
            edge = curve_through(10**x, 5 / (1 + np.exp(4 * (x - x[place]))))
            expect_steepest(
                answers,
                edge,
                skip,
                f"the loss falls most steeply at point {place}, and skip is {skip}",
                skip=skip,
            )
        exploded = curve_through(10**x, [*(falls[:-1] + 8), math.inf])
        expect_steepest(answers, exploded, 10, "the last loss is infinite, which is no fall")


def check_uneven(answers: Answers) -> None:
    """Curves whose rates are not."""
    with case("Task 5, rates that are not evenly spaced"):
        uneven = np.array([-4.0, -3.9, -3.8, -3.7, -2.0, -1.0, -0.9, -0.8, -0.7, -0.6])
        drops = curve_through(10**uneven, [9, 8.99, 8.98, 8.97, 7, 6, 5.8, 5.5, 5.2, 5.1])
        expect_steepest(
            answers,
            drops,
            1,
            "between two points that lie far apart the loss falls more, and less steeply",
            skip=1,
        )
        uneven = np.array([-5.0, -4.0, -3.0, -2.0, -1.9, -1.0, 0.0, 1.0, 2.0])
        drops = curve_through(10**uneven, [23, 21, 19, 18, 17.5, 16.6, 13.6, 10.6, 10.5])
        expect_steepest(answers, drops, 1, "the slope is that between the two neighbours", skip=1)


def summary(losses: list[float]) -> str:
    return ", ".join(f"{loss:g}" for loss in losses[:3]) + ", ..." * (len(losses) > 3)


def check_refusals(answers: Answers, x: Any, falls: Any) -> None:
    """Curves on which no point counts."""
    with case("Task 5, a curve that falls nowhere"):
        for curve, arguments in (
            (curve_through(10**x, np.arange(61)), {}),
            (curve_through(10 ** x[:5], falls[:5]), {"skip": 10}),
            (curve_through(10**x, np.full(61, 2.0)), {"skip": 0}),
            (LearningRateCurve([1e-3, 1e-2, 1e-1], [1.0, 2.0, 1.5], [1.0, 2.0, 1.5]), {"skip": 0}),
        ):
            try:
                found = answers["steepest"](curve, **arguments)
            except ValueError:
                continue
            raise AssertionError(
                f"the smoothed losses are {summary(curve.smoothed)} and skip is"
                f" {arguments.get('skip', 10)}: the result is {found}, expected a ValueError, for"
                " no point that counts has a loss that falls"
            )

"""The checks of exercise 17, monitoring: each says what is wrong with an answer."""

import contextlib
import io
import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import TrainingMemory, count_parameters, flops_per_token
from llm_course.pages.checking import Answers, case, expect_number, written
from llm_course.training.config import Config, DataConfig, TrainingConfig
from llm_course.training.cost import RunEstimate
from llm_course.training.logging import Logger
from llm_course.training.state import TrainState

Slips = Mapping[str, Mapping[float, str]]  # by the answer's name: a wrong value and its cause


def same_number(a: float, b: float) -> bool:
    """Equal up to rounding."""
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


class PlayedClock:
    """A clock that stands still until somebody moves it."""

    def __init__(self, now: float = 100.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


MODEL = DecoderModel(
    ModelConfig(vocab_size=20, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=16)
)
CONFIG = Config(
    model=MODEL.config,
    data=DataConfig(vocab_size=300, sequence_length=8),
    training=TrainingConfig(max_steps=99, batch_size=4),
)


def play_run(
    monitor: Any,
    clock: PlayedClock,
    script: Any,
    *,
    step: int = 0,
    targets: int = 0,
    data_seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """The metrics after each step of a played run.

    A step of `script` has seconds, how many of these it waits for data, targets, and the seconds of
    the validations that follow it. `step`, `targets`, `data_seconds`: what was there before.
    """
    state = TrainState(step=step, targets=targets)
    engine = SimpleNamespace(state=state, data_seconds=data_seconds, model=MODEL, config=CONFIG)
    engine.device = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    monitor.on_train_start(engine)
    for seconds, waiting, count, *validations in script:
        clock.now += seconds
        engine.data_seconds += waiting
        state.step += 1
        state.targets += count
        for duration in validations:
            monitor.on_validation_start(engine)
            clock.now += duration
            monitor.on_validation_end(engine, {"val_loss": 2.0})
        metrics = {"val_loss": 2.0} if validations else {}
        monitor.on_step_end(engine, metrics)
        rows.append({name: value for name, value in metrics.items() if name != "val_loss"})
    monitor.on_train_end(engine)
    return rows


# ---------------------------------------------------------------------------------- 1, by hand


CLOCK_SLIPS: Slips = {
    "fast_ms": {
        5: "that is how long the work takes; this step only launches it, and nobody waits",
        10: "in step 2 nobody waits for the device",
    },
    "slow_ms": {
        5: "that is the work of one step; who has waited for those of the three steps before?",
        15: "its own work is waited for, too",
        40: "step 4 has waited already: only the steps since then are left",
        0: "step 8 waits for the device",
    },
    "mean_ms": {
        20: "divide by all steps, also by those that look fast",
        10: (
            "that is the mean of a fast and a slow step, but there are three times as many fast"
            " ones"
        ),
        0: "that is the median; the mean is asked",
    },
}
LOST = "os._exit is no orderly end, and what rank 0 has collected by then is lost"
LINE_SLIPS: Slips = {
    "lines_print": {
        35: LOST,
        40: "rank 0 does not get to its last five lines, and more: " + LOST,
        34: LOST,
        10: "all ranks print",
        0: "ranks 1 to 3 end in an orderly way, and then their lines are written",
    },
    "lines_flush": {
        30: "with flush=True each line is written at once, so those before the end are there",
        40: "rank 0 ends after 5 lines",
        34: "i == 4 is the fifth line, and it is said before the end",
        5: "all ranks print",
    },
    "lines_logger": {
        10: "rank 0 ends after 5 lines",
        35: "the logger is silent on ranks 1 to 3",
        30: "the logger speaks on rank 0 alone",
        0: "the logger writes each line at once",
        40: "the logger is silent on ranks 1 to 3",
        4: "i == 4 is the fifth line",
    },
}


def expect_numbers(answers: Answers, right: Any, slips: Slips, close: Callable[..., bool]) -> None:
    """Compare the variables named in `right`; `slips` says what led to some wrong values."""
    written(answers, *right)
    for name, expected in right.items():
        found = expect_number(answers[name], name)
        why = "look at the second hint"
        for value, text in slips[name].items():
            if close(found, value):
                why = text
                break
        assert close(found, expected), f"{name} is {found:g}, which is not right: {why}"


def is_near(found: float, expected: float) -> bool:
    """Equal, but for what typing rounds."""
    return abs(found - expected) < 0.1


def clock_readings() -> list[int]:
    """What the clock of the task shows for its eight steps, in ms."""
    now = 0
    done = 0
    shown = []
    for step in range(1, 9):
        start = now
        done = max(done, now) + 5
        now = now if step % 4 else max(now, done)
        shown.append(now - start)
    return shown


def logged_lines() -> int:
    """How many lines four loggers write, of which the first one's process ends early."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for rank, count in enumerate((5, 10, 10, 10)):
            for i in range(count):
                Logger(rank=rank).info(f"line {i}")
    return len(said.getvalue().splitlines())


def task1_clock(answers: Answers) -> None:
    """The clock's readings, and the lines of four ranks."""
    shown = clock_readings()
    readings = {"fast_ms": shown[1], "slow_ms": shown[7], "mean_ms": sum(shown) / 8}
    lines = {"lines_print": 30, "lines_flush": 35, "lines_logger": logged_lines()}
    with case("Task 1, clock and lines"):
        expect_numbers(answers, readings, CLOCK_SLIPS, is_near)
        expect_numbers(answers, lines, LINE_SLIPS, is_near)


def flops_slips(
    C: int, layers: int, F: int, V: int, T: int, B: int
) -> tuple[float, dict[Any, str]]:
    """The operations of a step, and what comes out where something is forgotten."""

    def step(layer: float, output: float) -> float:
        return 3 * (layers * layer + output) * B * T

    q = 8 * C * C
    m = 6 * C * F
    s = 4 * C * T
    o = 2 * C * V
    right = step(q + m + s, o)
    keys = "for the scores: a token's query meets T keys of C numbers"
    slips = {
        step(q + m + 4 * C * C, o): f"4 C² {keys}",
        step(q + m + 4 * T * T, o): f"4 T² {keys}",
        step(q + m + 2 * C * (T + 1), o): (
            "a query is counted with all T keys, not with those before it"
        ),
        step(q + 6 * C * V + s, 2 * C * F): "F belongs to the MLP, and V to the output layer",
        right / 3: "backward is forgotten, which costs twice as much as forward",
        right * 2 / 3: "backward costs twice as much as forward, not the same",
        right / 2: "a multiplication and its addition are two operations",
        step(q + 4 * C * F + s, o): "a gated MLP has three matrices: gate, up, down",
        step(q + m, o): "the scores are forgotten: queries with keys, weights with values",
        step(q + m + s / 2, o): (
            "the scores are two products (queries with keys, weights with values), and each query"
            " is counted with all T keys"
        ),
        step(q + m, o + s): "each layer has its scores, not only one",
        step(q + m + s, 0): "the output layer is forgotten",
        step(q * 3 / 4 + m + s, o): "attention has four matrices: q, k, v and o",
        step(q + m + s, 2 * o): "the table of embeddings is looked up, not multiplied",
        step((q + m + s) / layers, o): "that is one layer",
        step(q + m + s + o, 0): "the output layer comes once, not in each layer",
        right / B / T: "that is one token; a step has B T of them",
        right / B: "that is one row; a step has B of them",
        right / T: "a row has T tokens",
    }
    return right, slips


def task1_arithmetic(answers: Answers, more: bool = False) -> None:
    """The operations of a step, and the share of the machine."""
    with case("Task 1, arithmetic"):
        right, slips = flops_slips(40, 3, 60, 110, 25, 8)
        seconds = 0.08
        ceiling = 4e9
        shares = {value / seconds / ceiling: text for value, text in slips.items()}
        shares |= {
            seconds * ceiling / right: "that is the inverse",
            100 * right / seconds / ceiling: "that is in percent; write the share",
        }
        shares |= {
            right / ceiling: "divide by the time of the step, too",
            right / ceiling / 80: "80 ms are 0.08 s",
            round(right / seconds / ceiling, 2): "that's right to two digits; write three",
        }
        expect_numbers(
            answers,
            {"step_flops": right, "mfu": right / seconds / ceiling},
            {"step_flops": slips, "mfu": shares},
            lambda a, b: math.isclose(a, b, rel_tol=1e-3),
        )
        assert "flops_of" in answers, "write flops_of in the cell above and run it"
        checks = [(40, 3, 60, 110, 25, 8), (16, 3, 24, 50, 6, 5)]
        if more:
            checks += [(64, 1, 160, 300, 24, 1), (32, 5, 64, 90, 1, 7), (8, 4, 12, 20, 64, 5)]
        for sizes in checks:
            C, layers, F, V, T, B = sizes
            model = ModelConfig(
                vocab_size=V, hidden_size=C, num_layers=layers, num_heads=2, intermediate_size=F
            )
            expected = flops_per_token(model, T).training * T * B
            found = expect_number(answers["flops_of"](*sizes), f"flops_of{sizes}")
            why = next(
                (
                    text
                    for value, text in flops_slips(*sizes)[1].items()
                    if same_number(found, value)
                ),
                "write the sum of the second hint",
            )
            assert same_number(found, expected), (
                f"flops_of(C, layers, F, V, T, B) is {found:,.0f} for {sizes}, expected"
                f" {expected:,.0f}: {why}"
            )


def check_median(answers: Answers, times: Any, repeats: Any, warmup: Any) -> None:
    """Without a device: `run` itself takes the time."""
    clock = PlayedClock()
    calls: list[int] = []

    def run() -> None:
        clock.now += times[len(calls)] if len(calls) < len(times) else 0.5
        calls.append(len(calls))

    with case(f"Task 2, calls that take {times} s, repeats={repeats}, warmup={warmup}"):
        found = expect_number(
            answers["time_of"](run, repeats=repeats, warmup=warmup, clock=clock), "the result"
        )
        assert len(calls) == repeats + warmup, (
            f"run was called {len(calls)} times, expected {warmup} + {repeats}"
        )
        warm = times[warmup:]
        slips = {
            sum(warm) / repeats: "that is the mean, which one disturbed call moves",
            min(warm): "that is the shortest",
            statistics.median(
                times
            ): "that is the median of all calls; those of the warm-up do not count",
            sum(times) / len(times): "that is the mean of all calls",
            sum(times) / repeats: "that is the time of all calls by the number of those that count",
            statistics.median_low(
                warm
            ): "of an even number, the median is the mean of the two in the middle",
            statistics.median_high(
                warm
            ): "of an even number, the median is the mean of the two in the middle",
            warm[repeats // 2]: "sort before you take the middle",
            0: "is the clock read by clock(), before and after?",
        }
        right = statistics.median(warm)
        why = next(
            (text for value, text in slips.items() if same_number(found, value)),
            "is the clock read by clock(), just before and just after?",
        )
        assert same_number(found, right), f"time_of returns {found:g}, expected {right:g}: {why}"


def check_refusal(answers: Answers, repeats: Any) -> None:
    with case(f"Task 2, repeats={repeats}"):
        calls: list[int] = []
        try:
            answers["time_of"](lambda: calls.append(1), repeats=repeats, clock=PlayedClock())
            refused = False
        except ValueError as error:
            refused = type(error) is ValueError
        assert refused, "no ValueError of yours: look at `repeats` first"
        assert not calls, "run was called before the ValueError: look at `repeats` first"


def task2_median(answers: Answers, more: bool = False) -> None:
    """Calls that take time themselves."""
    check_median(answers, [8.0, 0.25, 0.75, 2.0, 0.25, 0.5], 5, 1)
    check_median(answers, [8.0, 0.75, 0.25, 2.0, 0.5], 4, 1)
    check_median(answers, [0.25, 4.0, 1.0], 3, 0)
    check_refusal(answers, 0)
    if more:
        check_median(answers, [9.0, 7.0, 8.0, 1.0, 3.0], 2, 3)
        check_median(answers, [5.0, 0.5], 1, 1)
        check_refusal(answers, -2)


class PlayedDevice:
    """Works off what is launched, one piece after the other, while the clock goes on."""

    def __init__(self, busy: Any) -> None:
        self.clock = PlayedClock()
        self.free_at = self.clock.now + busy

    def launch(self, seconds: Any, launching: Any) -> None:
        self.clock.now += launching
        self.free_at = max(self.free_at, self.clock.now) + seconds

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.free_at)


LOOK = "before you look at the clock"
WAIT = f"wait for the device {LOOK}"
WAIT_TOO = f"wait for the device also {LOOK}"
WAIT_EACH = f"wait for the device in each call, {LOOK}"


def device_slip(found: float, right: float, launching: float) -> str:
    """What may have led to this time of a device that runs ahead."""
    if same_number(found, launching):
        return f"that is the time to launch: {WAIT} the second time"
    if launching and same_number(found, right - launching):
        return (
            "the time to launch is missing: look at the clock the first time before `run` is called"
        )
    if found > right:
        return f"work of other calls is counted: {WAIT_TOO} the first time"
    if found < right:
        return f"work is missing: {WAIT_EACH} the second time"
    return "each time must hold the work of one call and no other"


def check_device(
    answers: Answers, work: Any, repeats: Any, warmup: Any, busy: Any, launching: Any = 0.0
) -> None:
    device = PlayedDevice(busy)
    left = list(work)
    calls: list[int] = []

    def run() -> None:
        calls.append(len(calls))
        device.launch(left.pop(0) if left else 0.0, launching)

    what = (
        f"repeats={repeats}, warmup={warmup}, calls that take {launching:g} s to launch {work} s of"
        f" work, {busy:g} s of work left from before"
    )
    with case(f"Task 2, a device that runs ahead, {what}"):
        found = expect_number(
            answers["time_of"](
                run,
                repeats=repeats,
                warmup=warmup,
                synchronize=device.synchronize,
                clock=device.clock,
            ),
            "the result",
        )
        assert len(calls) == repeats + warmup, (
            f"run was called {len(calls)} times, expected {warmup} + {repeats}"
        )
        right = statistics.median(work[warmup:]) + launching
        why = device_slip(found, right, launching)
        assert same_number(found, right), f"time_of returns {found:g}, expected {right:g}: {why}"


def task2_device(answers: Answers, more: bool = False) -> None:
    """Calls that launch work on a device."""
    check_device(answers, [0.5, 0.5, 0.5, 0.5], 3, 1, 0)
    check_device(answers, [0.5, 0.5, 0.5], 2, 1, 0, 0.125)
    check_device(answers, [4.0, 0.5], 1, 1, 0)
    check_device(answers, [0.5], 1, 0, 2.0)
    if more:
        check_device(answers, [0.25, 1.0, 0.5, 8.0, 0.75], 5, 0, 16.0, 0.125)
        check_device(answers, [9.0, 9.0, 0.5, 0.25], 2, 2, 3.0, 0.0625)


class Row(NamedTuple):
    """What a row of the monitor is about, and what was before it."""

    events: list[Any]  # of its steps: seconds, waiting, targets and validations
    number: int  # of its last step
    total: int  # targets since the beginning
    waited: float  # seconds since the engine was made
    earlier: float  # seconds of validations in earlier rows
    log_interval: int

    def sum(self, part: int) -> float:
        return sum(event[part] for event in self.events)

    @property
    def validations(self) -> float:
        return sum(sum(event[3:]) for event in self.events)

    @property
    def last_validation(self) -> float:
        return next((event[-1] for event in self.events[::-1] if event[3:]), 0.0)

    @property
    def after_validation(self) -> float:
        """The seconds of the steps after the last validation."""
        marks = [i for i, event in enumerate(self.events) if event[3:]]
        return sum(event[0] for event in self.events[marks[-1] + 1 if marks else 0 :])

    @property
    def is_about(self) -> str:
        return (
            f"rule 5: the row is about {len(self.events)} steps, those since the row before or"
            " since on_train_start: divide by them"
        )


BOTH = "rule 1: validation counts as training time"
TWICE = "rule 1: validation is subtracted twice"
MOVED_TWICE = "rule 1: the validation counts twice: its time moves the start of the row forward"
MADE = "the row begins with on_train_start, not where the monitor is made"


def speed_slips(row: Row) -> list[tuple[float, str]]:
    """Wrong tokens per second; where two mistakes lead to the same number, the first is named."""
    n = len(row.events)
    t = row.sum(0)
    v = row.validations
    count = row.sum(2)
    return [
        (count / (t + v), BOTH),
        (count / (t - v) if t != v else 0.0, TWICE),
        (count / (t + 2 * v), MOVED_TWICE),
        (count / (t + 3.25), MADE),
        (
            count / (t - row.sum(1)),
            "waiting for data is part of the time of a step: leave out validations only",
        ),
        (
            32 * n / t,
            "rule 2: that is batch size times length times steps, but not all steps have as many"
            " targets: take the difference of engine.state.targets",
        ),
        (32 * n / (t + v), f"{BOTH}, and the tokens are batch size times length times steps"),
        (
            row.total / t,
            "rule 2: that counts the targets since the beginning of the run, too; take the"
            " difference to the row before or to on_train_start",
        ),
        (32 * row.number / t, row.is_about),
        (32 * row.number / (t + v), row.is_about),
        (32 * (row.number - 1) / t, row.is_about),
    ]


def step_slips(row: Row) -> list[tuple[float, str]]:
    """Wrong seconds of a step."""
    n = len(row.events)
    t = row.sum(0)
    v = row.validations
    return [
        ((t + v) / n, BOTH),
        ((t - v) / n, TWICE),
        ((t + 2 * v) / n, MOVED_TWICE),
        (
            row.after_validation / n,
            "rule 1: that leaves out the steps before the validation; only the validation is to be"
            " left out",
        ),
        (
            (t + v - row.last_validation) / n,
            "rule 1: there is more than one validation in this row; leave out all of them",
        ),
        ((t - row.earlier) / n, "rule 1: validations of earlier rows are subtracted again"),
        ((t + 3.25) / n, MADE),
        (t / row.number, row.is_about),
        ((t + v) / row.number, row.is_about),
        (t / row.log_interval, row.is_about),
        (t, "that is the sum of all steps of the row"),
    ]


def data_slips(row: Row) -> list[tuple[float, str]]:
    """Wrong seconds of waiting."""
    n = len(row.events)
    w = row.sum(1)
    return [
        (
            row.waited / n,
            "rule 3: that is the waiting since the engine was made; take the difference to the row"
            " before or to on_train_start",
        ),
        (
            row.waited / row.number,
            "rule 3: that is the mean since the beginning of the run; take differences to the row"
            " before",
        ),
        (
            (w - row.validations) / n,
            "rule 3: the engine does not count validation as waiting: nothing to subtract",
        ),
        (w / row.number, row.is_about),
        (w / row.log_interval, row.is_about),
        (w, "rule 3: divide by the steps of the row"),
        (w / row.sum(0), "rule 3: that is a share; seconds of a step are asked"),
    ]


def row_numbers(row: Row, peak: float) -> dict[str, tuple[float, list[tuple[float, str]]]]:
    """The right numbers of a row by name, each with what leads to wrong ones."""
    flops = flops_per_token(MODEL.config, 8)
    n = len(row.events)
    speed = row.sum(2) / row.sum(0)
    forward = "rule 4: that is the arithmetic of forward alone; training has backward, too"
    mfu = [
        (speed * flops.forward / peak, forward),
        (3 * speed * flops.training / peak, "rule 4: .training has backward in it already"),
        *((value * flops.training / peak, text) for value, text in speed_slips(row)),
    ]
    return {
        "tokens_per_second": (speed, speed_slips(row)),
        "step_seconds": (row.sum(0) / n, step_slips(row)),
        "data_seconds": (row.sum(1) / n, data_slips(row)),
        "mfu": (speed * flops.training / peak, mfu),
    }


def expect_row(found: Any, names: Any, row: Row, peak: float) -> None:
    """Compare a row with the right numbers; say which mistake leads to a difference."""
    number = row.number
    assert found, (
        f"step {number} writes no row, but one is due at every multiple of {row.log_interval},"
        " whatever the run began with"
    )
    missing = [name for name in names if name not in found]
    assert not missing, (
        f"the row of step {number} lacks {', '.join(missing)}; it has {sorted(found)}"
    )
    for name in names:
        right, causes = row_numbers(row, peak)[name]
        value = expect_number(found[name], f"{name} of step {number}")
        why = next(
            (text for wrong, text in causes if same_number(value, wrong)),
            "go through the rules again: is each number the difference of two moments, read from"
            " `clock`, and are both right?",
        )
        assert same_number(value, right), (
            f"{name} of step {number} is {value:.4g}, expected {right:.4g}: {why}"
        )


def expect_rows(
    found: Any,
    script: Any,
    names: Any,
    *,
    log_interval: int,
    step: int = 0,
    targets: int = 0,
    data_seconds: float = 0.0,
    peak: float = 1e6,
) -> None:
    """Compare all rows of a played run with its script."""
    since: list[Any] = []
    total = targets
    waited = data_seconds
    earlier = 0.0
    for number, (row, event) in enumerate(zip(found, script, strict=True), step + 1):
        since.append(event)
        total += event[2]
        waited += event[1]
        if number % log_interval:
            assert not row, (
                f"step {number} writes {row}, but rows are due every {log_interval} steps"
            )
            continue
        about = Row(since, number, total, waited, earlier, log_interval)
        expect_row(row, names, about, peak)
        earlier += about.validations
        since = []


def check_monitor(
    answers: Answers,
    what: Any,
    script: Any,
    names: Any,
    *,
    log_interval: Any = 2,
    peak: Any = 1e6,
    **before: Any,
) -> Any:
    with case(f"Task 3, {what}"):
        assert "Monitor" in answers, "write the class Monitor in the cell above and run it"
        clock = PlayedClock(50.0)
        monitor = answers["Monitor"](log_interval=log_interval, peak_flops=peak, clock=clock)
        clock.now += 3.25  # what lies between making the monitor and the start of training
        rows = play_run(monitor, clock, script, **before)
        expect_rows(rows, script, names, log_interval=log_interval, peak=peak, **before)
        return monitor, clock


EVEN = [(0.5, 0.125, 32)] * 3


TIMES = ("step_seconds", "data_seconds")


TIME_RUNS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("no validation", EVEN + [(1.5, 0.5, 32)] * 3, TIMES[:1], {"log_interval": 3}),
    (
        "a validation in the middle of a row",
        [(0.5, 0.125, 32, 0.125), (0.25, 0.125, 32)],
        TIMES[:1],
        {},
    ),
    ("a validation in the second row", [*EVEN, (0.5, 0.125, 32, 0.25)], TIMES[:1], {}),
    (
        "a slow disk in the second row",
        [(0.75, 0.125, 32)] * 2 + [(1.0, 0.75, 32)] * 2,
        TIMES,
        {},
    ),
    (
        "a resume at step 103",
        [(0.5, 0.125, 32)] * 17,
        TIMES,
        {"log_interval": 10, "step": 103, "targets": 3296, "data_seconds": 7.0},
    ),
    (
        "two validations in one row, one in the next",
        [(0.5, 0.0, 32, 0.25), (0.5, 0.0, 32, 2.0), (0.5, 0.0, 32, 4.0), (0.25, 0.0, 32)],
        TIMES,
        {},
    ),
]
FURTHER_RUNS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    (
        "two validations after one step",
        [(0.5, 0.25, 32, 1.0, 3.0), (0.5, 0.25, 32)] * 2,
        TIMES,
        {},
    ),
    (
        "an engine that has waited before",
        [(0.5, 0.25, 32)] * 4,
        TIMES,
        {"data_seconds": 7.0, "step": 6},
    ),
]


def task3_time(answers: Answers, more: bool = False) -> None:
    """Seconds of a step, and of waiting for data."""
    for what, script, names, settings in TIME_RUNS:
        check_monitor(answers, what, script, names, **settings)
    monitor, clock = check_monitor(
        answers, "a monitor's first run", [*EVEN[:2], (0.5, 0.125, 32, 1.0)], TIMES
    )
    with case("Task 3, a second run of the same monitor, where on_train_start begins anew"):
        clock.now += 20.0
        expect_rows(play_run(monitor, clock, EVEN, step=4), EVEN, TIMES, log_interval=2, step=4)
    if more:
        for what, script, names, settings in FURTHER_RUNS:
            check_monitor(answers, what, script, names, **settings)


WORK = ("tokens_per_second", "mfu")


ALL = (*WORK, "step_seconds", "data_seconds")


def check_random_run(answers: Answers, r: random.Random) -> None:
    """A run of random steps."""
    script: list[Any] = []
    for _ in range(r.randint(8, 25)):
        seconds = r.uniform(0.1, 2.0)
        waiting = seconds * r.random()
        validations = [r.uniform(0.1, 5.0) for _ in range(r.choice([0, 0, 1, 2]))]
        script.append((seconds, waiting, r.randint(1, 90), *validations))
    check_monitor(
        answers,
        f"a random run of {len(script)} steps",
        script,
        ALL,
        log_interval=r.randint(1, 6),
        step=r.randint(0, 40),
        targets=r.randint(0, 999),
        data_seconds=r.uniform(0.0, 9.0),
    )


def task3_work(answers: Answers, more: bool = False) -> None:
    """Tokens per second, and MFU."""
    check_monitor(answers, "two micro-batches in a step", [(0.5, 0.0, 64)] * 4, WORK)
    check_monitor(
        answers,
        "masked tokens and short batches",
        [(0.5, 0.0, 32), (0.5, 0.0, 20), (0.5, 0.0, 7), (0.5, 0.0, 32)],
        WORK,
    )
    check_monitor(
        answers,
        "a resume at step 7",
        [(0.5, 0.0, 32), (0.5, 0.0, 24), (0.5, 0.0, 32)],
        WORK,
        step=7,
        targets=200,
    )
    check_monitor(
        answers, "validations", [(0.5, 0.125, 30, 0.25), (0.5, 0.0, 32)] * 2, WORK, peak=3e5
    )
    with case("Task 3, no peak_flops"):
        now = PlayedClock()
        rows = play_run(answers["Monitor"](log_interval=1, clock=now), now, [(0.5, 0.0, 32)])
        assert "mfu" not in rows[0], "without peak_flops there is no mfu in the row"
    if more:
        for seed in range(6):
            check_random_run(answers, random.Random(seed))


def held(record: Any, moment: Any) -> Any:
    return sum(size for m, size in record if m <= moment)


def top(changes: Any) -> Any:
    return max(itertools.accumulate(changes), default=0)


def check_peak(answers: Answers, what: Any, record: Any) -> None:
    with case(f"Task 4, peak_of({what})"):
        given = list(record)
        copy = list(record)
        found = answers["peak_of"](given)
        assert given == copy, (
            "the record that was handed in is changed: use sorted(record), or work on a copy"
        )
        assert isinstance(found, (tuple, list)) and len(found) == 2, (
            f"returned {found!r}, expected (bytes, moment)"
        )
        moments = sorted({m for m, _ in record})
        right = max([0, *(held(record, m) for m in moments)])
        when = next((m for m in moments if held(record, m) == right), None) if right else None
        slips = {
            top(
                size for _, size in record
            ): "add up in the order of the moments; the record is in none",
            max(
                [size for _, size in record], default=0
            ): "that is the largest single allocation; what else is held at the time?",
            sum(abs(size) for _, size in record): "what is freed is subtracted",
            sum(
                size for _, size in record if size > 0
            ): "that is all that was ever allocated; what is freed is gone",
            top(
                size for _, size in sorted(record, key=lambda e: (e[0], -e[1]))
            ): "what is freed and allocated at one moment is one change",
            top(
                size for _, size in sorted(record, key=lambda e: e[0])
            ): "what is freed and allocated at one moment is one change",
            sum(size for _, size in record): "that is what is held at the end",
        }
        number = expect_number(found[0], "the peak")
        why = next(
            (text for value, text in slips.items() if number == value),
            "write down what is held after each moment",
        )
        if right == 0:
            why = "never more than 0 is held, so the answer is (0, None)"
        assert number == right, f"the peak is {number:g}, expected {right}: {why}"
        assert found[1] == when, (
            f"{right} bytes are held at {found[1]}, expected {when}: the first moment at which they"
            " are (None if nothing is)"
        )


def check_blame(answers: Answers, what: Any, record: Any, phases: Any) -> None:
    with case(f"Task 4, blame({what})"):
        given = list(record)
        found = answers["blame"](given, dict(phases))
        assert given == list(record), (
            "the record that was handed in is changed: use sorted(record), or work on a copy"
        )
        assert isinstance(found, dict) and found.keys() == phases.keys(), (
            f"returned {found!r}, expected a dictionary with {list(phases)}"
        )
        moments = {m for m, _ in record}
        for name, (start, end) in phases.items():
            inside = sorted(m for m in moments if start <= m < end)
            right = max(held(record, m) for m in [start, *inside])
            from_zero = max(0, top(sum(s for m, s in record if m == moment) for moment in inside))
            whole = [moment for moment in range(math.ceil(start), math.ceil(end))]
            slips = {
                max(
                    [held(record, m) for m in whole], default=0
                ): "moments need not be whole numbers",
                max(
                    [held(record, m) for m in inside if m > start] or [0]
                ): "what happens at `start` belongs to the phase",
                from_zero: "what was allocated before the phase and is still held counts, too",
                max(
                    [0, *(held(record, m) for m in inside)]
                ): "what is held when the phase begins counts, even if nothing happens in it",
                max(
                    [held(record, m) for m in [start, *(m for m in moments if start <= m <= end)]]
                ): "what happens at `end` belongs to the next phase",
                max(
                    [held(record, m) for m in [start - 1, *inside]]
                ): "what is freed at `start` is gone in the phase",
            }
            number = expect_number(found[name], name)
            why = next(
                (text for value, text in slips.items() if number == value),
                "write down what is held after each moment, and look from start to before end",
            )
            if right < 0 and number == 0:
                why = (
                    "more was freed than the record has seen come, so what is held is below 0: do"
                    " not stop at 0"
                )
            assert number == right, (
                f"in {name}, from {start} to {end}, at most {number:g} bytes are held, expected"
                f" {right}: {why}"
            )


STEP = [(30, -4), (40, -5), (10, 4), (20, 5), (50, 3), (60, -3)]


def task4_record(answers: Answers, more: bool = False) -> None:
    """The peak of a record, and who is to blame."""
    check_peak(answers, "a step in no order", STEP)
    check_peak(answers, "4 freed as 5 come", [(1, 4), (2, 5), (2, -4), (3, -5), (4, 2)])
    check_peak(answers, "5 come as 4 are freed, 3 stay", [(9, -5), (5, 5), (5, -4), (1, 4), (2, 3)])
    check_peak(answers, "the same peak twice", [(1, 6), (2, -6), (3, 6), (4, -6)])
    check_blame(
        answers,
        "three phases",
        STEP,
        {"forward": (0, 25), "backward": (25, 45), "update": (45, 70)},
    )
    check_blame(
        answers,
        "a phase in which nothing happens",
        [(1, 7), (9, -7)],
        {"waits": (3, 5), "all": (0, 10)},
    )
    check_blame(
        answers,
        "changes at the borders",
        [(1, 4), (5, -3), (10, 8), (15, -9)],
        {"first": (1, 5), "second": (5, 10), "third": (10, 20)},
    )
    check_blame(
        answers, "older memory is freed", [(1, -5), (3, 2)], {"first": (0, 2), "second": (2, 5)}
    )
    check_blame(
        answers,
        "moments between whole ones",
        [(0.5, 4), (2.5, -4)],
        {"first": (0, 1), "second": (1, 3)},
    )
    check_peak(answers, "an empty record", [])
    check_peak(answers, "only what is older is freed", [(3, -2), (1, -5)])
    if more:
        check_peak(answers, "older memory is freed first", [(1, -5), (2, 3), (3, 1), (0.5, 1)])
        for seed in range(12):
            r = random.Random(seed)
            record = [
                (r.randint(0, 12), r.choice([-3, -2, -1, 1, 2, 3, 5]))
                for _ in range(r.randint(1, 15))
            ]
            check_peak(answers, f"{record}", record)
            check_blame(
                answers, f"{record}", record, {"a": (0, 4), "b": (4, 9), "c": (9, 13), "d": (3, 4)}
            )


def play_step(memory: Any, micro_batches: Any, pieces: Any = 4) -> Any:
    """The most that is held in a step that is played piece by piece."""
    held = top = memory.weights + memory.optimizer
    for batch in range(micro_batches):
        held += memory.activations + memory.loss
        top = max(top, held)
        held -= memory.loss
        for _ in range(pieces):
            held -= memory.activations / pieces
            held += memory.gradients / pieces if batch == 0 else 0
            top = max(top, held)
    return top


def check_step(answers: Answers, what: Any, micro_batches: Any, *parts: Any) -> None:
    with case(f"Task 4, step_peak, {what}, micro-batches: {micro_batches}"):
        memory = TrainingMemory(*parts)
        found = expect_number(answers["step_peak"](memory, micro_batches), "the result")
        right = play_step(memory, micro_batches)
        (w, g, o, a, loss) = parts
        slips = {
            w
            + o
            + g
            + micro_batches
            * (a + loss): "backward takes the activations down before the next micro-batch",
            w + o + micro_batches * (a + loss): (
                "backward takes the activations down before the next micro-batch, but gradients"
                " stay"
            ),
            w + o + a + loss: (
                "gradients are as large as weights, and this model has more of them than of"
                " activations"
                if micro_batches == 1
                else "gradients of the first micro-batch are there when the second goes forward"
            ),
            w + o + g: "activations and the loss's share are held at the end of the forward pass",
            max(a + loss, g): "weights and moments are always there",
            a + loss + g: "weights and moments are always there",
            w + max(a + loss, g): "AdamW's moments are always there",
            w
            + o
            + max(
                a, g
            ): "the loss's share is held at the end of the forward pass, with the activations",
            w + o + a + g: (
                "the loss's share is held at the end of the forward pass, with the activations"
            ),
            w
            + o
            + max(
                a + loss, g
            ): "gradients of the first micro-batch are there when the second goes forward",
            w + g + o + a + loss: (
                "with one micro-batch activations go as gradients come: both are never there as a"
                " whole"
            ),
        }
        why = next(
            (text for value, text in slips.items() if same_number(found, value)),
            "draw the hills, and what they stand on",
        )
        assert same_number(found, right), f"{memory} gives {found:g}, expected {right:g}: {why}"


def task4_step(answers: Answers, more: bool = False) -> None:
    """The peak of a training step."""
    for batches in (1, 2, 4):
        check_step(answers, "many activations", batches, 100, 100, 200, 1600, 48)
        check_step(answers, "many parameters", batches, 800, 800, 1600, 64, 16)
    if more:
        for batches in (1, 2, 3):
            check_step(
                answers, "only the loss makes the difference", batches, 500, 500, 1000, 480, 80
            )
            check_step(
                answers, "half of the gradients in bfloat16", batches, 1200, 400, 1600, 900, 4
            )
            check_step(answers, "without moments", batches, 64, 64, 0, 128, 8)


def tick(calls: Any) -> Any:
    """Microsecond by microsecond: who covers it, and who is innermost? And what comes out by common
    mistakes.
    """
    own: dict[Any, int] = defaultdict(int)
    total: dict[Any, int] = defaultdict(int)
    mixed: dict[Any, int] = defaultdict(int)
    everybody = range(min((c[2] for c in calls), default=0), max((c[3] for c in calls), default=0))
    for thread in {c[1] for c in calls}:
        for moment in everybody:
            covering = sorted(
                (-c[2], c[3], c[0]) for c in calls if c[1] == thread and c[2] <= moment < c[3]
            )
            if covering:
                own[covering[0][2]] += 1
                for name in {name for _, _, name in covering}:
                    total[name] += 1
    for moment in everybody:
        covering = sorted((-c[2], c[3], c[0]) for c in calls if c[2] <= moment < c[3])
        if covering:
            mixed[covering[0][2]] += 1
    lengths: dict[Any, int] = defaultdict(int)
    inside: dict[Any, int] = defaultdict(int)
    for name, thread, start, end in calls:
        lengths[name] += end - start
        inside[name] += sum(
            c[3] - c[2]
            for c in calls
            if c[1] == thread and start <= c[2] and c[3] <= end and c[2:] != (start, end)
        )
    return own, total, lengths, {name: lengths[name] - inside[name] for name in lengths}, mixed


def self_slips(name: str, ticked: Any) -> dict[Any, str]:
    """What leads to a wrong time of a function's own."""
    own, total, lengths, all_inside, mixed = ticked
    return {
        lengths[name]: "that is the whole length of its calls; take off those directly inside",
        own[name] + lengths[name] - total[name]: (
            "a call of the same name inside is taken off, too: its own time counts anyway"
        ),
        all_inside[name]: (
            "calls deeper inside are taken off twice: take off only those directly inside"
        ),
        mixed[name]: "a call of another thread is no part of it",
        total[name] + own[name]: "is the same time added twice?",
    }


def total_slips(name: str, ticked: Any, calls: Any) -> dict[Any, str]:
    """What leads to a wrong total time."""
    own, _, lengths, _, _ = ticked
    spans = 0
    for thread in {call[1] for call in calls}:
        mine = [call for call in calls if call[:2] == (name, thread)]
        spans += max((c[3] for c in mine), default=0) - min((c[2] for c in mine), default=0)
    last = max((call[3], call[3] - call[2]) for call in calls if call[0] == name)
    return {
        lengths[name]: "time in a call of the same name inside counts once",
        own[name]: "that is its own work; the calls inside belong to the total",
        spans: "that is from the first call to the last one, gaps and all",
        last[1]: "that is one call; those that do not lie inside each other add up",
    }


def expect_time(name: str, pair: Any, calls: Any, ticked: Any, column: int) -> None:
    """The entry of a name has the right time in this column."""
    assert isinstance(pair, tuple | list) and len(pair) == 2, (
        f"the entry of {name} is {pair!r}, expected (self, total)"
    )
    what = f"{'total' if column else 'self'} of {name}"
    number = expect_number(pair[column], what)
    slips = total_slips(name, ticked, calls) if column else self_slips(name, ticked)
    right = ticked[column][name]
    why = next(
        (text for value, text in slips.items() if same_number(number, value)),
        "draw the calls as bars, one thread below the other; of calls that begin together the"
        " longest holds the others, and a call that begins where another ends does not lie in it",
    )
    assert same_number(number, right), f"{what} is {number:g}, expected {right}: {why}"


def check_table(answers: Answers, what: str, calls: Any, column: int) -> None:
    """A column of the table of these calls."""
    with case(f"Task 5, {what}"):
        given = list(calls)
        found = answers["table_of"](given)
        assert given == list(calls), (
            "the list that was handed in is changed: use sorted(calls), or work on a copy"
        )
        ticked = tick(calls)
        assert isinstance(found, dict), f"returned {type(found).__name__}, expected a dictionary"
        assert found.keys() == ticked[2].keys(), (
            f"the names are {sorted(map(str, found))}, expected {sorted(ticked[2])}"
        )
        for name in ticked[2]:
            expect_time(name, found[name], calls, ticked, column)


CALLS = {
    "three levels": [
        ("step", 0, 0, 100),
        ("forward", 0, 10, 60),
        ("mm", 0, 20, 50),
        ("mm", 0, 70, 90),
    ],
    "in no order": [("mm", 0, 30, 40), ("step", 0, 0, 50), ("svd", 0, 5, 30)],
    "calls that begin and end together": [
        ("mm", 0, 0, 6),
        ("linear", 0, 0, 10),
        ("step", 0, 0, 20),
        ("add", 0, 6, 10),
        ("mm", 0, 14, 20),
    ],
    "a function that calls itself": [
        ("walk", 0, 0, 30),
        ("walk", 0, 5, 20),
        ("mm", 0, 8, 10),
        ("walk", 0, 22, 25),
        ("mm", 0, 32, 35),
    ],
    "two threads at once": [
        ("step", 0, 0, 40),
        ("mm", 0, 10, 30),
        ("load", 1, 5, 35),
        ("mm", 1, 12, 18),
    ],
}


def random_calls(seed: Any) -> Any:
    """Calls cut out of calls."""
    r = random.Random(seed)
    calls: list[Any] = []

    def cut(thread: Any, start: Any, end: Any, depth: Any) -> None:
        while start < end and depth:
            stop = r.randint(start + 1, end)
            call = (r.choice(["a", "b", "c", "d"]), thread, start, stop)
            if r.random() < 0.7 and all(call[1:] != other[1:] for other in calls):
                calls.append(call)
                cut(thread, start, stop, depth - 1)
            start = stop + r.choice([0, 0, 2])

    for thread in range(r.randint(1, 2)):
        cut(thread, r.randint(0, 3), 16, 4)
    r.shuffle(calls)
    return calls


def task5_self(answers: Answers, more: bool = False) -> None:
    """The time of functions themselves."""
    for what, calls in CALLS.items():
        check_table(answers, f"{what}: {calls}", calls, 0)
    if more:
        check_table(answers, "no calls", [], 0)
        for seed in range(10):
            calls = random_calls(seed)
            check_table(answers, f"{calls}", calls, 0)


def task5_total(answers: Answers, more: bool = False) -> None:
    """The time of functions with those that they call."""
    for what, calls in CALLS.items():
        check_table(answers, f"{what}: {calls}", calls, 1)
    through = [("a", 0, 0, 20), ("b", 0, 2, 18), ("a", 0, 4, 9), ("b", 0, 5, 7), ("a", 1, 0, 20)]
    check_table(answers, f"a calls b, and b calls a: {through}", through, 1)
    if more:
        for seed in range(20, 30):
            calls = random_calls(seed)
            check_table(answers, f"{calls}", calls, 1)


def estimate(steps: Any, validation_steps: Any, step_seconds: Any) -> Any:
    model = ModelConfig(
        vocab_size=20, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=16
    )
    return RunEstimate(
        parameters=count_parameters(model),
        flops=1e4,
        memory=TrainingMemory(10, 10, 20, 5, 1),
        process_bytes=10**8,
        step_seconds=step_seconds,
        steps=steps,
        validation_steps=validation_steps,
    )


class Plan(NamedTuple):
    """A run as it was planned, and what its parts take."""

    steps: int
    per_validation: float  # in steps
    step_seconds: float
    eval_interval: int
    save_interval: int
    save_seconds: float

    @property
    def cost(self) -> RunEstimate:
        """The estimate of the run."""
        validations = -(-self.steps // self.eval_interval)
        return estimate(self.steps, self.per_validation * validations, self.step_seconds)

    @property
    def settings(self) -> dict[str, Any]:
        """What a student's function is told besides the estimate."""
        names = ("eval_interval", "save_interval", "save_seconds")
        return {name: getattr(self, name) for name in names}

    def ends(self, steps: int) -> list[float]:
        """How long after each step a run would be over, if this were its last; step by step."""
        dates = [
            n for n in range(1, self.steps + 1) if n % self.eval_interval == 0 or n == self.steps
        ]
        validation = self.cost.validation_steps * self.step_seconds / len(dates)
        now = 0.0
        ends = [0.0]
        for n in range(1, steps + 1):
            now += self.step_seconds
            # the last step has both, whatever the intervals
            ends.append(now + validation + self.save_seconds)
            now += validation * (n % self.eval_interval == 0)
            now += self.save_seconds * (n % self.save_interval == 0)
        return ends


def run_slips(plan: Plan, steps: int) -> dict[float, str]:
    """What leads to a wrong time of a run of so many steps."""
    planned, per_validation, pace, eval_interval, save_interval, save_seconds = plan
    cost = plan.cost
    v = per_validation * pace
    evals = -(-steps // eval_interval)
    alone = steps * pace
    base = alone + evals * v
    saved = -(-steps // save_interval) * save_seconds
    once = "where the last step is due for a {} anyway, there is only one"
    return {
        base: "checkpoints are forgotten",
        alone + saved: "validations are forgotten",
        alone: "validations and checkpoints are forgotten",
        base + steps // save_interval * save_seconds: (
            "there is a checkpoint after the last step, too"
        ),
        base + (steps // save_interval + 1) * save_seconds: once.format("checkpoint"),
        alone + steps // eval_interval * v + saved: (
            "there is a validation after the last step, too"
        ),
        alone + (steps // eval_interval + 1) * v + saved: once.format("validation"),
        **estimate_slips(cost, evals, planned, eval_interval, alone, saved),
        alone + evals * per_validation + saved: (
            "validation_steps are in training steps, not in seconds"
        ),
        planned * pace
        + -(-planned // eval_interval) * v
        + -(-planned // save_interval) * save_seconds: (
            "that is the run of the estimate; `steps` are asked"
        ),
        cost.seconds + saved: (
            "cost.seconds is of cost.steps steps and their validations; these are other steps"
        ),
    }


def estimate_slips(
    cost: RunEstimate, evals: int, planned: int, eval_interval: int, alone: float, saved: float
) -> dict[Any, str]:
    """What leads to a wrong time of a validation."""
    whole = cost.validation_steps * cost.step_seconds
    steps = alone / cost.step_seconds
    short = "the run of the estimate has a validation after its last step, too: "
    slips = {
        alone + whole + saved: (
            "cost.validation_steps are those of cost.steps steps; this run has another number of"
            " validations"
        ),
        alone + whole * steps / planned + saved: (
            "validations come in whole numbers: what does a single one take, and how many are"
            " there?"
        ),
        alone + evals * whole + saved: (
            "cost.validation_steps are all validations of that run together, not one"
        ),
        alone + evals * whole * eval_interval / planned + saved: (
            f"{short}count its validations, do not take cost.steps / eval_interval"
        ),
    }
    if planned // eval_interval > 1:
        floored = evals * whole / (planned // eval_interval)
        slips[alone + floored + saved] = f"{short}round the number of its validations up"
    return slips


def check_seconds(answers: Answers, steps: int, plan: Plan) -> None:
    cost = plan.cost
    what = (
        f"a run of {steps} steps of {plan.step_seconds} s, {plan.settings}, from an estimate of"
        f" {plan.steps} steps with {cost.validation_steps:g} validation_steps"
    )
    with case(f"Task 6, {what}"):
        found = expect_number(answers["run_seconds"](cost, steps, **plan.settings), "the result")
        right = plan.ends(steps)[steps]
        slips = run_slips(plan, steps)
        why = next(
            (text for value, text in slips.items() if same_number(found, value)),
            "write down what is done after each step" if steps else "a run of 0 steps does nothing",
        )
        assert same_number(found, right), (
            f"run_seconds returns {found:g}, expected {right:g}: {why}"
        )


def task6_seconds(answers: Answers, more: bool = False) -> None:
    """The time of a run."""
    check_seconds(answers, 20, Plan(20, 3.0, 0.5, 5, 10, 3.5))
    check_seconds(answers, 7, Plan(30, 3.0, 0.5, 5, 3, 3.5))
    check_seconds(answers, 43, Plan(20, 1.5, 0.25, 8, 9, 1.0))
    if more:
        check_seconds(answers, 0, Plan(20, 2.0, 0.5, 5, 10, 4.0))
        check_seconds(answers, 1, Plan(7, 3.0, 0.25, 4, 100, 8.0))
        check_seconds(answers, 12, Plan(7, 0.5, 2.0, 100, 1, 0.5))
        for seed in range(12):
            r = random.Random(seed)
            steps = r.randint(1, 90)
            plan = Plan(
                r.randint(1, 90),
                r.uniform(0.1, 9),
                r.uniform(0.1, 3),
                r.randint(1, 20),
                r.randint(1, 20),
                r.uniform(0, 9),
            )
            check_seconds(answers, steps, plan)


def fit_slip(number: float, right: int, planned: int, *, exact: bool, steps: float) -> str:
    """What may have led to this number of steps, where `right` fit."""
    if number == right + 1:
        return (
            "one step too many: does your loop end with the first that does *not* fit? Or do you"
            " round up?"
        )
    if number > right:
        return "so yours is too long: is the last checkpoint, and the last validation, counted?"
    if number == right - 1 and exact:
        return "one step too few: a run that takes exactly `seconds` fits"
    if number == right - 1:
        return "one step too few: is the last one that fits returned?"
    if number == planned < right:
        return "it may be more than cost.steps"
    if steps > 1000:
        return "so a longer one fits: where does your search end?"
    return "so a longer one fits"


def check_fits(answers: Answers, seconds: float, plan: Plan) -> None:
    pace = plan.step_seconds
    what = (
        f"a budget of {seconds:g} s, steps of {pace:g} s, {plan.settings}, validations of"
        f" {plan.per_validation:g} steps, {plan.steps} steps planned"
    )
    with case(f"Task 6, {what}"):
        found = answers["what_fits"](plan.cost, seconds=seconds, **plan.settings)
        number = expect_number(found, "the result")
        assert number == int(number) and number >= 0, (
            f"what_fits returns {number:g}, expected a whole number from 0 on"
        )
        assert number * pace <= seconds, (
            f"what_fits returns {number:g}, but these steps alone take {number * pace:g} s"
        )
        ends = plan.ends(int(seconds / pace) + 2)
        right = max(n for n, end in enumerate(ends) if end <= seconds)
        takes = (
            f"{number:g} steps take {ends[int(number)]:g} s, {right} take {ends[right]:g} s and"
            f" {right + 1} take {ends[right + 1]:g} s"
        )
        exact = ends[right] == seconds
        why = fit_slip(number, right, plan.steps, exact=exact, steps=ends[right] / pace)
        assert number == right, f"what_fits returns {number:g}, expected {right}. {takes}: {why}"
        assert isinstance(found, int), (
            f"what_fits returns {type(found).__name__}({number:g}), expected an int"
        )


def task6_fits(answers: Answers, more: bool = False) -> None:
    """The longest run that fits."""
    check_fits(answers, 50.0, Plan(20, 2.0, 0.5, 5, 10, 4.0))
    check_fits(answers, 26.0, Plan(20, 2.0, 0.5, 5, 10, 4.0))
    check_fits(answers, 5.0, Plan(20, 2.0, 0.5, 5, 10, 4.0))
    if more:
        check_fits(answers, 4000.0, Plan(20, 2.0, 0.5, 5, 10, 4.0))
        check_fits(answers, 0.0, Plan(20, 2.0, 0.5, 5, 10, 4.0))
        check_fits(answers, 5.5, Plan(20, 2.0, 0.5, 5, 10, 4.0))
        check_fits(answers, 24.75, Plan(20, 1.0, 0.25, 7, 3, 2.0))
        check_fits(answers, 64.0, Plan(3, 0.0, 1.0, 4, 4, 0.0))
        for seed in range(10):
            r = random.Random(seed)
            seconds = r.randint(0, 400) / 4
            plan = Plan(
                r.randint(1, 60),
                r.randint(0, 8) / 4,
                r.choice([0.25, 0.5, 1.0]),
                r.randint(1, 20),
                r.randint(1, 20),
                r.randint(0, 20) / 4,
            )
            check_fits(answers, seconds, plan)


# ------------------------------------------------------------------- 7, how far each layer moves


class Layered(nn.Module):
    """A model with a frozen embedding, layers of two matrices each, and a norm with a buffer."""

    def __init__(self, layers: int):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4).requires_grad_(False)
        block = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(layers)]
        self.layers = nn.ModuleList(block)
        self.norm = nn.LayerNorm(4)
        nn.init.ones_(self.norm.bias)
        self.norm.register_buffer("seen", torch.ones(100))


def named_layer(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def layer_slips(model: Any, before: Any, after: Any) -> dict[str, dict[float, str]]:
    """Wrong ratios of each layer, and what leads to them."""
    slips: dict[str, dict[float, str]] = {}
    for layer in {named_layer(name) for name in before}:
        mine = [name for name in before if named_layer(name) == layer]
        moved = sum(float((after[n] - before[n]).square().sum()) for n in mine)
        old = sum(float(before[n].square().sum()) for n in mine)
        new = sum(float(after[n].square().sum()) for n in mine)
        each = [
            float((after[n] - before[n]).norm() / before[n].norm().clamp(min=1e-9)) for n in mine
        ]
        lengths = [
            sum(float(tensor.norm()) for tensor in tensors)
            for tensors in ([after[n] - before[n] for n in mine], [before[n] for n in mine])
        ]
        buffers = sum(
            float(buffer.square().sum())
            for name, buffer in model.named_buffers()
            if named_layer(name) == layer
        )
        apart = abs(math.sqrt(new) - math.sqrt(old)) / math.sqrt(old)
        slips[layer] = {
            math.sqrt(moved / old): "",
            0.0: "copy the weights before the step: the step changes them in place",
            moved / old: "that's the square of the ratio: take the root at the end",
            sum(each) / len(each): "that's the mean over the layer's tensors: add squares first",
            lengths[0]
            / lengths[1]: "norms don't add up: add squares, and take the root at the end",
            math.sqrt(
                moved / (old + buffers)
            ): "buffers count as weights: take the parameters only",
            math.sqrt(moved / new): "divide by the norm of the weights before the step",
            math.sqrt(moved): "that's the length of the update; divide it by that of the weights",
            apart: "that's how much the norm has changed: a weight may move without getting longer",
        }
    return slips


def check_layers(answers: Answers, layers: int, moves: Mapping[str, float]) -> None:
    """A step that adds noise of a given size to the parameters of some layers."""
    model = Layered(layers)
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                size = moves.get(named_layer(name), 0.0)
                parameter.add_(size * torch.randn(parameter.shape))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with case(f"Task 7, {layers} layers, of which {', '.join(moves) or 'none'} move"):
        found = answers["watch_step"](model, step)
        assert len(calls) == 1, f"step was called {len(calls)} times, expected once"
        after = {name: p.detach() for name, p in model.named_parameters()}
        expect_layers(found, layer_slips(model, before, after))


def expect_layers(found: Any, slips: dict[str, dict[float, str]]) -> None:
    """The ratio of each layer; the first of the slips is the right number."""
    assert isinstance(found, dict), f"returned {type(found).__name__}, expected a dictionary"
    assert found.keys() == slips.keys(), (
        f"the layers are {sorted(map(str, found))}, expected {sorted(slips)}: all parameters count,"
        " also frozen ones, and only names that begin with 'layers.' keep two parts"
    )
    for layer, causes in slips.items():
        right = next(iter(causes))
        value = expect_number(found[layer], f"the ratio of {layer}")
        near = [text for wrong, text in causes.items() if math.isclose(value, wrong, rel_tol=1e-3)]
        why = next(
            filter(None, near),
            "compare the weights before the step with those after it, and add up the squares of"
            " all numbers of the layer before you take a root",
        )
        assert math.isclose(value, right, rel_tol=1e-3, abs_tol=1e-9), (
            f"the ratio of {layer} is {value:.4g}, expected {right:.4g}: {why}"
        )


def task7_ratio(answers: Answers, more: bool = False) -> None:
    """How far each layer moves."""
    written(answers, "watch_step")
    check_layers(answers, 2, {"layers.0": 0.01, "norm": 0.1})
    check_layers(answers, 3, {"embedding": 0.5, "layers.0": 0.02, "layers.1": 0.3})
    if more:
        check_layers(answers, 11, {"layers.1": 0.1, "layers.10": 0.2})
        check_layers(answers, 1, {})


def played_rows(layers: int, changed: Mapping[str, Callable[[int], float]]) -> list[Any]:
    """The rows of a monitor: ratios near 0.01 and activations near 1, but for what is changed."""
    rows: list[dict[str, float]] = []
    for step in range(1, 5):
        row = {"loss": 5 - 0.1 * step}
        for i in range(layers):
            ratio = changed.get(f"ratio{i}", changed.get("ratio", lambda step: 0.01))
            size = changed.get(f"size{i}", lambda step: 1.0)
            row[f"update_ratio/layers.{i}"] = ratio(step) * (1 + 0.1 * i)
            row[f"activation_rms/layers.{i}"] = size(step) * (1 + 0.1 * i)
        rows.append(row)
    return rows


def check_verdict(answers: Answers, what: str, right: Any, rows: Any, healthy: Any) -> None:
    """What `diagnose` says of these rows."""
    with case(f"Task 7, {what}"):
        found = answers["diagnose"](rows, healthy)
        assert isinstance(found, tuple) and len(found) == 2, (
            f"returned {found!r}, expected two values, such as ('frozen', 'layers.1')"
        )
        assert found == right, f"diagnose says {found}, expected {right}: {what}"


FaultyRun = tuple[str, Any, dict[str, Callable[[int], float]]]


def faulty_runs() -> list[FaultyRun]:
    """What is wrong with a run, in words and as `diagnose` says it, and what makes it so."""
    return [
        ("nothing is wrong", ("healthy", None), {}),
        ("a layer never moves", ("frozen", "layers.1"), {"ratio1": lambda step: 0.0}),
        (
            "a layer that rests in one row only isn't frozen",
            ("healthy", None),
            {"ratio1": lambda step: 0.01 * (step != 2)},
        ),
        (
            "a layer that rests in the last row only isn't frozen",
            ("healthy", None),
            {"ratio1": lambda step: 0.01 * (step != 4)},
        ),
        (
            "a layer that moves very little isn't frozen",
            ("healthy", None),
            {"ratio1": lambda step: 1e-6},
        ),
        (
            "fast comes before large",
            ("fast", None),
            {"ratio": lambda step: 0.2, "size1": lambda step: 9.0},
        ),
        ("all layers move too far at the end", ("fast", None), {"ratio": lambda step: 0.02 * step}),
        (
            "a single layer that moves far isn't too high a rate",
            ("healthy", None),
            {"ratio2": lambda step: 0.2},
        ),
        ("a layer starts too large", ("large", "layers.2"), {"size2": lambda step: 9.0}),
        (
            "a size that only grows later isn't a start",
            ("healthy", None),
            {"size0": lambda step: 2.0 * step},
        ),
    ]


def task7_diagnose(answers: Answers, more: bool = False) -> None:
    """The fault of some runs."""
    written(answers, "diagnose")
    healthy = played_rows(3, {})
    runs = faulty_runs()
    if more:
        runs += [
            (
                "of two that start too large, the first is named",
                ("large", "layers.1"),
                {"size1": lambda step: 6.0, "size2": lambda step: 20.0},
            ),
            (
                "frozen comes before large",
                ("frozen", "layers.2"),
                {"ratio2": lambda step: 0.0, "size0": lambda step: 7.0},
            ),
        ]
    for what, right, changed in runs:
        check_verdict(answers, what, right, played_rows(3, changed), healthy)
    if more:
        check_other_runs(answers)


def check_other_runs(answers: Answers) -> None:
    """Runs beside a healthy run of another length, of more layers, and at the border."""
    falling = played_rows(3, {"ratio": lambda step: 0.08 / step})
    short = played_rows(3, {"ratio": lambda step: 0.1})[:2]
    what = "the last row of a run is compared with the last row of the healthy run, which is longer"
    check_verdict(answers, what, ("fast", None), short, falling)
    many = played_rows(12, {"ratio2": lambda step: 0.0, "ratio10": lambda step: 0.0})
    what = "layers.2 comes before layers.10, as in the rows"
    check_verdict(answers, what, ("frozen", "layers.2"), many, played_rows(12, {}))
    thrice = played_rows(1, {"ratio": lambda step: 0.75})
    what = "exactly 3 times isn't more than 3 times"
    check_verdict(
        answers, what, ("healthy", None), thrice, played_rows(1, {"ratio": lambda step: 0.25})
    )

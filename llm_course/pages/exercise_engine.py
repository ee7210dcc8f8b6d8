"""The checks of exercise 14, the engine: each says what is wrong with an answer."""

import copy
import functools
import json
import math
import random
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from llm_course.pages.checking import (
    Answer,
    case,
    expect_number,
    expect_plain_number,
    frozen,
    written,
)
from llm_course.training.config import Config, OptimizationConfig, TrainingConfig
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.runtime import Runtime
from llm_course.training.task import RegressionTask

# ---------------------------------------------------------------------- 1, the gradient of a window


def window_factors(targets: list[int]) -> list[tuple[float, str]]:
    """How many times too large a slip makes loss or gradient, in a window of several micro-batches
    with these numbers of targets, and what to say to it.
    """
    total = sum(targets)
    count = len(targets)
    last = max(targets[-1], 1)
    return [
        (
            count,
            f"it is {count} times too large, and there are {count} micro-batches: are their means"
            " added up?",
        ),
        (
            1 / count,
            f"it is {count} times too small, and there are {count} micro-batches: the mean over all"
            " targets isn't divided by their number",
        ),
        (
            total / last,
            f"was it divided by the {last} targets of the last micro-batch? The window has {total}:"
            " add up the counts",
        ),
        (
            total / count,
            f"the sum over {total} targets was divided by the {count} micro-batches: divide by the"
            " number of targets",
        ),
    ]


def by_factor(ratio: float, targets: list[int], rows: int) -> str:
    """What to say to a loss or gradient that is so many times what it should be, in a window of so
    many rows; empty if no slip gives this ratio.
    """
    total = sum(targets)
    slips = [
        (
            total,
            f"it is {total} times too large, and there are {total} targets: it's the sum over them;"
            " divide by their number, once",
        ),
        (
            1 / total,
            f"it is {total} times too small, and there are {total} targets: a mean was divided by"
            " the number of targets once more",
        ),
        (
            total / rows,
            f"it was divided by all {rows} rows, but only {total} of them have a target: count"
            " where `use` is True",
        ),
        (-1, "it has the wrong sign"),
        (0, "it is 0: was backward called, and is the result kept?"),
        *(window_factors(targets) if len(targets) > 1 else []),
    ]
    return " ".join(
        words
        for slip, words in slips
        if slip != 1 and math.isclose(ratio, slip, rel_tol=1e-3, abs_tol=1e-6)
    )


def ratio_of(found: Tensor, right: Tensor) -> float | None:
    """How many times longer one gradient is than another, if they have one direction."""
    ratio = (found @ right / (right @ right)).item()
    return ratio if torch.allclose(found, ratio * right, rtol=1e-3, atol=1e-5) else None


def gradient_slip(found: Tensor, right: Tensor, model: nn.Module, window: list[Any]) -> str:
    """What a gradient says about the mistake that gave it, or an empty text."""
    targets = [int(batch["use"].sum()) for batch in window]
    ratio = ratio_of(found, right)
    if ratio is not None:
        known = by_factor(ratio, targets, sum(len(batch["x"]) for batch in window))
        return known or f"it has the right direction, but is {ratio:.3g} times as large"
    means = []
    for batch in window:
        if batch["use"].any():
            error = F.mse_loss(model(batch["x"])[batch["use"]], batch["y"][batch["use"]])
            grads = torch.autograd.grad(error, list(model.parameters()))
            means.append(torch.cat([grad.flatten() for grad in grads]))
    if ratio_of(found, sum(means)) is not None:  # type: ignore[arg-type]
        return (
            "it's made of the means of the micro-batches, so a target in a small one counts more:"
            " the counts are unequal; run backward on sums, divide by all targets"
        )
    if ratio_of(found, means[-1]) is not None:
        return "only the last micro-batch is in it: the gradients of a window add up"
    return ""


def check_window(window_gradient: Answer, counts: Any, hint: Any) -> None:
    """Micro-batches with these numbers of targets, and two rows more that aren't targets."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    rows = [torch.randn(count + 2, 1) for count in counts]
    window = [{"x": x, "y": 3 * x, "use": torch.arange(len(x)) > 1} for x in rows]
    x = torch.cat([row[2:] for row in rows])
    mean = F.mse_loss(model(x), 3 * x)
    right = torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(model.parameters()))])
    with case(f"Task 1, micro-batches of {counts} targets"):
        try:
            result = window_gradient(model, window)
        except TypeError as error:
            assert "NoneType" not in str(error), (
                "after the loop a gradient is None: backward must run in the loop, on the loss of"
                " each micro-batch"
            )
            raise
        assert all(p.grad is not None for p in model.parameters()), "there's no gradient"
        gradient = torch.cat([g.flatten() for p in model.parameters() if (g := p.grad) is not None])
        assert not gradient.isnan().any(), (
            "a gradient is NaN: the mean over no targets is 0 / 0. Add up sums, which are 0 there"
        )
        said = gradient_slip(gradient, right, model, window) or hint
        assert torch.allclose(gradient, right, atol=1e-5), (
            f"the gradient is {gradient[0]:.4f}, expected {right[0]:.4f}: {said}"
        )
        found = expect_plain_number(result, "the result")
        assert not math.isnan(found), (
            "the loss is NaN: the mean over no targets is 0 / 0. Add up sums, which are 0 there"
        )
        said = by_factor(found / mean.item(), counts, sum(counts) + 2 * len(counts)) or hint
        assert abs(found - mean.item()) < 1e-4, f"the loss is {found:.4f}, not {mean:.4f}: {said}"


def task1_window(window_gradient: Answer) -> None:
    """Windows of equal and unequal micro-batches."""
    check_window(
        window_gradient,
        [3],
        "with a single micro-batch, it's the ordinary mean over rows with a target",
    )
    check_window(
        window_gradient, [3, 3], "is each micro-batch's gradient added, and the sum divided once?"
    )
    check_window(
        window_gradient,
        [1, 5],
        "the counts are unequal: run backward on sums, divide by all targets",
    )
    check_window(window_gradient, [2, 0, 3], "a micro-batch without targets adds nothing to either")


# --------------------------------------------------------------------- 2, the numbers of small runs


def gradient_of_means(*micro_batches: list[float]) -> float:
    """The mean of the means of the gradients -2 y at w = 0, for targets (1, y)."""
    means = [sum(-2 * y for y in targets) / len(targets) for targets in micro_batches]
    return sum(means) / len(means)


CROSSING = (
    "a window never crosses the end of an epoch: compute the steps of one epoch, round up, then"
    " multiply"
)
SHORT = "the last window of an epoch is short, and makes a step all the same"
MICRO_BATCHES = "that counts micro-batches; three of them make a step"
SIGN = "the sign: a larger w brings the prediction nearer to y, so the loss falls"
FACTOR = "the derivative of a square has a factor 2"
LAST_TARGET = "B's last target is 2, the others are 1"
STEPS: dict[str, tuple[int, dict[float, str]]] = {
    "steps_1_epoch": (3, {7: MICRO_BATCHES, 2: SHORT}),
    "steps_4_epochs": (12, {9: CROSSING, 8: SHORT, 28: MICRO_BATCHES, 3: "that is one epoch"}),
    "steps_500_tokens": (
        7,
        {
            6: (
                "500 / 96 would be right if each step read 96 tokens; the last step of an epoch"
                " reads 16"
            ),
            9: "the run may end inside an epoch: three whole epochs are 624 tokens",
            5: "after as many steps fewer than 500 tokens are read",
            21: "a step reads 12 rows of 8 tokens, not one micro-batch",
        },
    ),
    "steps_2_processes": (
        8,
        {
            5: CROSSING,
            6: "half of 12 is too few: 26 rows in steps of 24 rows still need a second, short step",
            12: "both processes work on the same step, so it reads twice as many rows",
            4: SHORT,
            24: "two processes read more rows in a step, so they need fewer steps",
        },
    ),
}
NUMBERS: dict[str, tuple[float, dict[float, str]]] = {
    "gradient": (
        -2 * (5 + 1 + 1 + 1 + 2) / 5,
        {
            -6.25: "that is the mean of means: A's one target counts as much as B's four",
            -3.6: LAST_TARGET,
            -20.0: "that is the sum over all targets; divide it by their number, once",
            -10.0: (
                "that is divided by the number of micro-batches; divide by the number of targets"
            ),
            -2.0: FACTOR,
            -2.5: "that is the mean over B alone; A's target is one of the five",
            4.0: SIGN,
        },
    ),
    "mean_of_means": (
        gradient_of_means([5], [1, 1, 1, 2]),
        {
            -4.0: (
                "that is the mean over all targets; here each micro-batch is averaged by itself"
                " first"
            ),
            -6.0: LAST_TARGET,
            -12.5: "each of the two means is divided by 2",
            -3.125: FACTOR,
            6.25: SIGN,
        },
    ),
    "norm": (
        math.hypot(6, 8),
        {
            2.0: (
                "the norm is reported before clipping; after it, it would be the limit whatever"
                " happens"
            ),
            14.0: "the norm is the root of the sum of squares",
        },
    ),
    "loss": (
        (10 + 2) / (4 + 1),
        {
            2.25: (
                "that is the mean of the two means; the process with one target counts as much as"
                " the one with four"
            ),
            6.0: "divide by the number of targets, not of processes",
            12.0: "that is the sum; divide it by the number of targets",
            4.5: "the two means are not added: add the losses, add the targets, then divide",
            1.2: "divide by the number of targets, and by nothing else",
        },
    ),
}


def task2_steps(answers: dict[str, Any]) -> None:
    """Four numbers of steps."""
    with case("Task 2, steps"):
        written(answers, *STEPS)
        for name, (expected, slips) in STEPS.items():
            found = expect_number(answers[name], name)
            assert found not in slips, f"{name} is {found:g}: {slips[found]}"
            assert found == int(found), (
                f"{name} is {found:g}: a run has a whole number of steps, so round up"
            )
            assert found == expected, (
                f"{name} is {found:g}. Write down how many rows each step reads, one after the"
                " other"
            )


def task2_numbers(answers: dict[str, Any]) -> None:
    """Gradients, a clipped vector and a loss."""
    with case("Task 2, numbers"):
        written(answers, *NUMBERS, "clipped")
        for name, (expected, slips) in NUMBERS.items():
            found = expect_number(answers[name], name)
            said = [text for value, text in slips.items() if abs(found - value) < 0.006]
            assert not said, f"{name} is {found:g}: {said[0]}"
            assert abs(found - expected) < 0.006, (
                f"{name} is {found:g}, which is not right; look at the second hint"
            )
        clipped = answers["clipped"]
        assert isinstance(clipped, tuple | list | Tensor | np.ndarray) and len(clipped) == 2, (
            f"clipped is {clipped!r}, expected two numbers: type (.., ..)"
        )
        a, b = (expect_number(part, "a number of clipped") for part in clipped)
        assert (a, b) != (2.0, 2.0), (
            "clipped is (2, 2): the length of the whole vector is limited, not each of its numbers"
        )
        assert (a, b) != (6.0, 8.0), "clipped is (6, 8): its norm is larger than the limit"
        assert abs(a * 8 - b * 6) < 0.02, (
            f"clipped is ({a:g}, {b:g}), which points elsewhere than (6, 8): clipping keeps the"
            " direction"
        )
        assert abs(math.hypot(a, b) - 2) < 0.006, (
            f"clipped is ({a:g}, {b:g}), with the norm {math.hypot(a, b):g}: the limit is 2"
        )


# ------------------------------------------------------------- 3, an epoch that learns all the same


def line_batches(counts: Any, seed: Any = 0) -> Any:
    """Micro-batches of y = 3 x + 1, with so many targets each, and one row more that has none."""
    g = torch.Generator().manual_seed(seed)
    xs = [torch.rand(count + 1, 1, generator=g) * 2 - 1 for count in counts]
    return [{"x": x, "y": 3 * x + 1, "use": torch.arange(len(x)) > 0} for x in xs]


Slips = list[tuple[str, float]]


def loss_slips(model: Any, window: list[Any]) -> Slips:
    """What a mistake reports as the loss of a window, and what to say to it."""
    sums = []
    targets = []
    with torch.no_grad():
        for batch in window:
            use = batch["use"]
            error = F.mse_loss(model(batch["x"])[use], batch["y"][use], reduction="sum")
            sums.append(error.item())
            targets.append(int(use.sum()))
    means = [total / max(count, 1) for total, count in zip(sums, targets, strict=True)]
    rows = sum(len(batch["use"]) for batch in window)
    return [
        ("that is the loss of the last micro-batch alone", means[-1]),
        (
            "that is the mean of the micro-batches' means: the counts are unequal; add up losses of"
            " all targets (reduction='sum'), count the targets, divide once",
            sum(means) / len(means),
        ),
        ("that is the sum over its targets: divide it by their number", sum(sums)),
        ("that is the sum of the micro-batches' means, not yet divided", sum(means)),
        (
            "that is divided by all rows of the window; only those where `use` is True have a"
            " target",
            sum(sums) / rows,
        ),
    ]


def norm_slips(length: float, window: list[Any]) -> Slips:
    """What a gradient that is too long or too short reports as its norm."""
    targets = [int(batch["use"].sum()) for batch in window]
    rows = sum(len(batch["use"]) for batch in window)
    total = sum(targets)
    ratios = (total, 1 / total, total / rows, len(targets), 1 / len(targets), total / len(targets))
    return [
        (f"of the gradient, {said}", ratio * length)
        for ratio in ratios
        if (said := by_factor(ratio, targets, rows))
    ]


def epoch_by_hand(
    model: Any, batches: Any, size: Any, max_norm: Any, factor: Any
) -> tuple[Any, list[tuple[float, float, float]], list[tuple[Slips, Slips, Slips]]]:
    """What PyTorch does when each window is one batch: the trained model, the rows, and for each of
    their numbers what mistakes would give.
    """
    model = copy.deepcopy(model)
    rows: list[Any] = []
    slips: list[tuple[Slips, Slips, Slips]] = []
    for start in range(0, len(batches), size):
        window = batches[start : start + size]
        x, y, use = (torch.cat([batch[name] for batch in window]) for name in ("x", "y", "use"))
        if not use.any():
            continue
        of_loss = loss_slips(model, window)
        model.zero_grad()
        mean = F.mse_loss(model(x)[use], y[use])
        mean.backward()
        length = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        rate = 0.1 * factor(len(rows))
        after = (
            "that is the rate of the step after: the row holds the rate that the step used",
            0.1 * factor(len(rows) + 1),
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
        rows.append((mean.item(), length, rate))
        slips.append((of_loss, norm_slips(length, window), [after]))
    return model, rows, slips


def check_rows(found: Any, wanted: Any, slips: Any, max_norm: float, what: str) -> None:
    """Loss, norm and learning rate of each step."""
    names = ("loss", "norm", "learning rate")
    for step, (row, right, known) in enumerate(zip(found, wanted, slips, strict=True), start=1):
        assert isinstance(row, tuple | list) and len(row) == 3, (
            f"a row is (loss, norm, learning rate), but row {step} is {row!r}"
        )
        for name, one, other, mistakes in zip(names, row, right, known, strict=True):
            one = expect_plain_number(one, f"the {name} of step {step}")
            within = 1e-4 * (1 + abs(other))
            limited = name == "norm" and abs(one - max_norm) < 1e-4 < other - max_norm
            assert not limited, (
                f"the norm of step {step} is {one:.4g}, the limit itself, expected {other:.4g}:"
                " report it before clipping"
            )
            said = [words for words, wrong in mistakes if abs(one - wrong) < within]
            hint = said[0] if said else what
            assert abs(one - other) < within, (
                f"the {name} of step {step} is {one:.4g}, expected {other:.4g}: {hint}"
            )


def check_epoch(
    train_epoch: Answer,
    counts: Any,
    what: Any,
    size: Any = 2,
    max_norm: Any = 1e9,
    factor: Any = lambda step: 1.0,
    seed: Any = 0,
    stale: Any = None,
) -> None:
    """Train one epoch with the student's function; compare rows first, then weights."""
    torch.manual_seed(seed)
    model = nn.Linear(1, 1)
    batches = line_batches(counts, seed)
    wanted_model, wanted, slips = epoch_by_hand(model, batches, size, max_norm, factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = None if stale is None else torch.full_like(parameter, stale)
    with case(f"Task 3, micro-batches of {counts} targets, windows of {size}"):
        found = train_epoch(
            model, optimizer, LambdaLR(optimizer, factor), batches, size=size, max_norm=max_norm
        )
        assert isinstance(found, list), (
            f"train_epoch must return the list of rows, not {type(found).__name__}"
        )
        assert len(found) == len(wanted), (
            f"there are {len(found)} rows, expected {len(wanted)}: {what}"
        )
        check_rows(found, wanted, slips, max_norm, what)
        for name, one, other in zip(
            ("weight", "bias"), model.parameters(), wanted_model.parameters(), strict=True
        ):
            assert torch.allclose(one, other, atol=1e-5), (
                f"the {name} is {one.item():.4f} after the epoch, expected {other.item():.4f}:"
                f" {what}"
            )
        assert all(p.grad is None or not p.grad.any() for p in model.parameters()), (
            "a gradient is left behind after the epoch"
        )


def _check_steps_and_rates(train_epoch: Answer) -> None:
    """Equal windows: one step in each, from its own gradient, at the rate of the schedule."""
    check_epoch(
        train_epoch,
        [3, 3],
        "two micro-batches of equal size, one step. The loss of a row is that of the whole window,"
        " the gradient is divided once",
    )
    check_epoch(
        train_epoch, [3, 3, 3, 3], "is the gradient of the first window still there in the second?"
    )
    check_epoch(
        train_epoch,
        [3] * 6,
        "the schedule moves once for each optimizer step, after it, and the row holds the rate"
        " that the step used",
        factor=lambda step: 1 / (1 + step),
    )


def _check_what_a_window_holds(train_epoch: Answer) -> None:
    """Its own targets, however many they are, and no gradient from before."""
    check_epoch(
        train_epoch,
        [1, 6, 5, 2],
        "the counts are unequal: add up losses of all targets (reduction='sum'), count the targets,"
        " divide once",
    )
    check_epoch(
        train_epoch,
        [3, 3],
        "a gradient lay there before the epoch and has entered the first step: begin each window at"
        " zero",
        stale=7.0,
    )
    check_epoch(
        train_epoch,
        [3, 3, 3],
        "the last window is shorter than the others; it makes a step, and is divided by its own"
        " targets",
    )


def task3_steps(train_epoch: Answer) -> None:
    """Rows and weights of epochs, against PyTorch by hand."""
    _check_steps_and_rates(train_epoch)
    _check_what_a_window_holds(train_epoch)
    check_epoch(
        train_epoch,
        [4, 4, 4, 4],
        "clip once in a window: after the division, before the update, and not after each"
        " micro-batch",
        max_norm=0.7,
    )


class RootLine(nn.Linear):
    """w x + b + |w x|, written so that x = 0 gives a finite value with a gradient of NaN."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) + torch.sqrt((self.weight * x).square())


def empty(batch: Any) -> Any:
    return batch | {"use": torch.zeros_like(batch["use"])}


def check_poison(
    train_epoch: Answer, poison: Any, model: Any, what: Any, *, place: int = 3
) -> None:
    """One micro-batch of the second of three windows is poisoned: the state must be the one after
    the first window.
    """
    torch.manual_seed(0)
    first = copy.deepcopy(model)
    batches = line_batches([2, 3, 2, 2, 2, 2])
    poisoned = [poison(batch) if i == place else batch for i, batch in enumerate(batches)]
    states = []
    for trained, part in ((first, batches[:2]), (model, poisoned)):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        raised = None
        try:
            train_epoch(trained, optimizer, scheduler, part, size=2, max_norm=1.0)
        except FloatingPointError as error:
            raised = error
        except Exception as error:
            raise AssertionError(
                f"{what}: expected a FloatingPointError, but your code raised"
                f" {type(error).__name__}: {error}"
            ) from error
        moments = [
            [value.tolist() for value in state.values()] for state in optimizer.state.values()
        ]
        states.append(([p.tolist() for p in trained.parameters()], moments, scheduler.last_epoch))
    assert raised is not None, (
        f"{what}, and no FloatingPointError was raised: look at the loss and at the norm of each"
        " window"
    )
    for name, one, other in zip(
        ("the weights", "the optimizer's moments", "the schedule"), *states, strict=True
    ):
        assert one == other, (
            f"{what}: the error came, but {name} had already changed. Look before you step"
        )
    assert all(p.grad is None or not p.grad.any() for p in model.parameters()), (
        f"{what}: the spoilt gradient is still there after the error"
    )


def opposite(batch: Any) -> Any:
    """Squares beyond float32, with gradients that cancel. The first row has no target."""
    return batch | {"x": batch["x"] * 0, "y": torch.tensor([[0.0], [2e19], [-2e19]])}


def _check_rows_of_holes(
    train_epoch: Answer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    batches: list[Any],
    what: str,
) -> None:
    """A row and a move of the schedule for each window of two that has a target."""
    windows = [batches[start : start + 2] for start in range(0, len(batches), 2)]
    expected = sum(any(batch["use"].any() for batch in window) for window in windows)
    try:
        rows = train_epoch(model, optimizer, scheduler, batches, size=2, max_norm=1e9)
    except TypeError as error:
        assert "NoneType" not in str(error), (
            f"{what}; but where nothing ran backward, .grad is None: skip such a window before you"
            " divide its gradients"
        )
        raise
    assert isinstance(rows, list), (
        f"train_epoch must return the list of rows, not {type(rows).__name__}"
    )
    assert len(rows) == expected, (
        f"{what}, but the number of rows is {len(rows)}, expected {expected}"
    )
    assert scheduler.last_epoch == expected, (
        f"{what}, but the schedule is at {scheduler.last_epoch}, expected {expected}"
    )


def _task3_trouble_1(train_epoch: Answer) -> None:
    with case("Task 3, windows with a hole"):
        for holes, what in (
            ((1,), "a micro-batch without targets adds nothing"),
            ((0,), "a micro-batch without targets adds nothing, and the rest of its window counts"),
            ((2,), "a micro-batch without targets adds nothing, and the rest of its window counts"),
            (
                (0, 1),
                "a window without targets has no update, no row, and does not move the schedule",
            ),
        ):
            torch.manual_seed(0)
            batches = line_batches([2, 3, 3, 2, 1])
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
            batches = [
                empty(batch) if index in holes else batch for index, batch in enumerate(batches)
            ]
            _check_rows_of_holes(train_epoch, model, optimizer, scheduler, batches, what)
            torch.manual_seed(0)
            other = nn.Linear(1, 1)
            used = [batch for index, batch in enumerate(batches) if index not in holes]
            sizes = [
                sum(index not in holes for index in window) for window in ((0, 1), (2, 3), (4,))
            ]
            done = 0
            sgd_too = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
            for step, size in enumerate(filter(None, sizes)):
                x, y, use = (
                    torch.cat([batch[name] for batch in used[done : done + size]])
                    for name in ("x", "y", "use")
                )
                sgd_too.param_groups[0]["lr"], done = 0.1 / (1 + step), done + size
                sgd_too.zero_grad()
                F.mse_loss(other(x)[use], y[use]).backward()
                sgd_too.step()
            assert torch.allclose(model.weight, other.weight, atol=1e-5), (
                f"{what}, but the weight is {model.weight.item():.4f}, expected"
                f" {other.weight.item():.4f}"
            )


def _task3_trouble_2(train_epoch: Answer) -> None:
    with case("Task 3, numbers that are none"):
        torch.manual_seed(1)
        check_poison(
            train_epoch,
            lambda batch: batch | {"y": batch["y"] * math.nan},
            nn.Linear(1, 1),
            "the loss of the second window is NaN",
        )
        check_poison(
            train_epoch,
            lambda batch: batch | {"x": batch["x"] * 0},
            RootLine(1, 1),
            "the loss of the second window is finite and its gradient NaN",
        )
        for place, which in ((3, "last"), (2, "first")):
            check_poison(
                train_epoch,
                opposite,
                nn.Linear(1, 1),
                f"the loss of the {which} micro-batch of the second window is infinite (in float32,"
                " the dtype of the data) and its gradient finite",
                place=place,
            )


def _check_perfect_fit(train_epoch: Answer) -> None:
    """A window with targets and a loss of 0 has its row and its move of the schedule."""
    with case("Task 3, a window whose loss is exactly 0"):
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [batch | {"y": 0 * batch["y"]} for batch in line_batches([2, 3])]
        what = "it has targets, so it's a step like any other: skip a window by its targets"
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
        _check_rows_of_holes(train_epoch, model, optimizer, scheduler, batches, what)


def task3_trouble(train_epoch: Answer) -> None:
    """Micro-batches without targets, a loss of 0, and numbers that aren't finite."""
    _task3_trouble_1(train_epoch)
    _check_perfect_fit(train_epoch)
    _task3_trouble_2(train_epoch)


# --------------------------------------------------------- 4, a validation that runs on one machine


ROUNDED: dict[str, dict[float, str]] = {
    "next_number": {
        1 + 1 / 256: "1/256 is the largest error of rounding; the numbers lie twice as far apart",
        1 / 128: "that is the gap; add it to 1",
        1 + 1 / 1024: "that is float16, which has 10 bits of fraction",
    },
    "stuck": {
        2: "in float32. Here 1.001 has to be rounded to one of the two numbers beside it",
        1.5: "it does not get that far: to which number is 1.001 rounded?",
        1 + 1 / 128: "1.001 is nearer to 1 than to 1 + 1/128",
    },
    "tiny": {
        2.9e-8: "float16 has no such number: it begins near 6e-8",
        6e-8: "it is less than half of that, so rounded down",
    },
    "large": {
        65504: "that is the largest float16; what lies beyond is not cut to it",
        1e5: "float16 ends at 65504",
    },
}
PRECISION = {
    "bf16": (
        "PyTorch says that an emulated bfloat16 is supported, and we ask for the real thing: does"
        " it pay?"
    ),
    "fp16": (
        "float16 needs a scaler, so auto never takes it: what is left where bfloat16 is only"
        " emulated?"
    ),
}


def check_rounded(answers: dict[str, Any]) -> None:
    """What 16-bit formats make of four numbers, as PyTorch says."""
    weight = torch.ones((), dtype=torch.bfloat16)
    follows = torch.nextafter(weight, 2 * weight).item()
    for _ in range(1000):
        weight += 0.001
    tiny, large = torch.tensor([2.9e-8, 1e5]).half().tolist()
    right = {"next_number": follows, "stuck": weight.item(), "tiny": tiny, "large": large}
    for name, expected in right.items():
        found = expect_number(answers[name], name)
        close = 0.05 if name == "tiny" else 1e-4
        slips = ROUNDED[name].items()
        said = [text for value, text in slips if math.isclose(found, value, rel_tol=close)]
        assert not said, f"{name} is {found:g}: {said[0]}"
        digits = 1e-3 if name == "next_number" else 1e-6  # 1.008 is rounded, and right
        assert math.isclose(found, expected, rel_tol=digits, abs_tol=1e-12), (
            f"{name} is {found:g}; look at the second hint"
        )


def task4_numbers(answers: dict[str, Any]) -> None:
    """What machines do with names and numbers."""
    with case("Task 4, names and numbers"):
        written(answers, "fails_at", *ROUNDED, "precision")
        fails_at, precision = (answers[name] for name in ("fails_at", "precision"))
        torch.device("cuda:7")  # raises nothing, on any machine
        assert fails_at in ("device", "read", "zeros"), (
            f"fails_at is {fails_at!r}, expected 'device', 'read' or 'zeros'"
        )
        assert fails_at != "device", (
            "torch.device makes a name, and any well-formed name is accepted: who needs the device?"
        )
        assert fails_at == "zeros", (
            "reading data asks for no device: the first tensor that is to live there does"
        )
        large = answers["large"]
        assert not isinstance(large, str), (
            f"large is the text {large!r}: type a number; the infinite one is math.inf"
        )
        check_rounded(answers)
        assert precision in ("fp32", "bf16", "fp16"), (
            f"precision is {precision!r}, expected 'fp32', 'bf16' or 'fp16'"
        )
        assert precision not in PRECISION, PRECISION[precision]


class Group:
    """Processes played by threads. Whoever waits for one that has ended is told so at once."""

    def __init__(self, size: Any) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.given: dict[int, dict[int, Any]] = {}
        self.ended: set[int] = set()

    def exchange(self, rank: Any, number: Any, value: Any) -> Any:
        with self.changed:
            values = self.given.setdefault(number, {})
            values[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: len(values) == self.size or self.ended - values.keys(), timeout=20
            )
            assert len(values) == self.size, (
                f"process {rank} waits forever in the runtime for one that never calls it: did only"
                " some processes ask?"
            )
            return [values[other] for other in range(self.size)]

    def run(self, function: Any) -> Any:
        """function(runtime) in every process; the results by rank."""
        results = [None] * self.size
        errors = []

        def play(rank: Any) -> None:
            try:
                results[rank] = function(Member(self, rank))
            except Exception as error:
                errors.append(error)
            with self.changed:
                self.ended.add(rank)
                self.changed.notify_all()

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors.sort(key=lambda error: "waits forever" in str(error))  # the cause before its effect
        if errors:
            raise errors[0]
        return results


class Member(Runtime):
    """One of the processes of a group."""

    def __init__(self, group: Any, rank: Any) -> None:
        self.group = group
        self.rank = rank
        self.world_size = group.size
        self.calls = 0

    def gather(self, value: Any) -> Any:
        self.calls += 1
        return self.group.exchange(self.rank, self.calls, value)

    def sum(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"runtime.sum takes a tensor, not {type(tensor).__name__}")
        return sum(self.gather(tensor.detach().clone()))

    def any(self, flag: Any) -> Any:
        return any(self.gather(flag))

    def barrier(self) -> None:
        self.gather(None)


class DataParallel(DistributedDataParallel):
    """PyTorch's wrapper, without a group of processes."""

    def __init__(self, module: Any) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)


class Compiled(nn.Module):
    """Looks like what torch.compile returns."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *arguments: Any) -> Any:
        return self._orig_mod(*arguments)


class Far(Tensor):
    """A number from another device: on a GPU, adding it to a tensor on the CPU in place raises an
    error, and on the device "meta" it wouldn't.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        in_place = function in (Tensor.__iadd__, Tensor.add_)
        if in_place and not isinstance(args[0], Far) and args[0].device.type == "cpu":
            raise RuntimeError("Expected all tensors to be on the same device")
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **kwargs or {})
        return found.as_subclass(Tensor) if isinstance(found, Far) else found


class Head(nn.Module):
    """A model whose author called one part `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(2, 1)
        self.register_buffer("seen", torch.tensor(3.0))

    def forward(self, x: Any) -> Any:
        return self.out(self.drop(self.module(x)))


def head(seed: Any = 0) -> Any:
    torch.manual_seed(seed)
    return Head()


def head_loss(model: Any, batch: Any) -> Any:
    error = (model(batch["x"])[:, 0] - batch["y"]) ** 2
    return error.sum(), torch.tensor(len(error))


def head_batches(counts: Any, seed: Any = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(count, 2, generator=g), "y": 3 * torch.randn(count, generator=g)}
        for count in counts
    ]


def mean_of(model: Any, batches: Any) -> Any:
    """The mean over all rows, in one go."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        x, y = (torch.cat([batch[name] for batch in batches]) for name in ("x", "y"))
        return F.mse_loss(model(x)[:, 0], y).item()


def validated(
    validate: Answer, model: Any, batches: Any, runtime: Any, loss_of: Any = head_loss
) -> Any:
    result = validate(model, batches, loss_of, runtime)
    recording = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert recording, (
        "after validate nothing is recorded for backward any more, so training stands still: use"
        " `with`"
    )
    assert isinstance(result, dict) and {"loss", "weights"} <= result.keys(), (
        "expected a dictionary with loss and weights, got"
        f" {result if result is None else type(result).__name__}"
    )
    return expect_plain_number(result["loss"], "loss"), result["weights"]


def validate_together(validate: Answer, models: Any, parts: Any) -> Any:
    """(loss, weights) of each process, for its model and its batches."""
    return Group(len(models)).run(
        lambda runtime: validated(validate, models[runtime.rank], parts[runtime.rank], runtime)
    )


def _task4_validate_1(validate: Answer) -> Any:
    with case("Task 4, one process"):
        model = head()
        batches = head_batches([4, 4])
        found, weights = validated(validate, model, batches, Runtime())
        right = mean_of(model, batches)
        again, _ = validated(validate, model, batches, Runtime())
        assert found == again, (
            f"the same model and batches have the loss {found:.4f} once and {again:.4f} the next"
            " time: is dropout off?"
        )
        assert abs(found - right) < 1e-4, (
            f"two batches of four rows have the loss {right:.4f}, and validate says {found:.4f}:"
            " add up losses and targets of all batches, then divide"
        )
        assert model.training, (
            "the model came in training mode, and is in evaluation mode afterwards"
        )
        model.eval()
        validated(validate, model, batches, Runtime())
        assert not model.training, (
            "the model came in evaluation mode, and is in training mode afterwards: restore what"
            " you"
            " found"
        )
        batches = head_batches([1, 6])
        found = validated(validate, model, batches, Runtime())[0]
        right = mean_of(model, batches)
        assert abs(found - right) < 1e-4, (
            f"batches of 1 and 6 rows have loss {right:.4f}, but validate says {found:.4f}: add up"
            " losses and targets, then divide"
        )
        recorded = []

        def watched_loss(model: Any, batch: Any) -> Any:
            recorded.append(torch.is_grad_enabled())
            return head_loss(model, batch)

        validated(validate, model, batches, Runtime(), watched_loss)
        assert not any(recorded), (
            "the forward pass is recorded for backward, which costs memory for nothing: use"
            " torch.no_grad()"
        )


def _task4_validate_2(validate: Answer) -> Any:
    with case("Task 4, a model that is elsewhere"):
        seen: list[str] = []

        def far_loss(model: Any, batch: Any) -> Any:
            seen.extend(tensor.device.type for tensor in batch.values())
            return torch.tensor(1.0).as_subclass(Far), torch.tensor(1).as_subclass(Far)

        said = ""
        try:
            validate(head().to("meta"), head_batches([2]), far_loss, Runtime())
        except Exception as error:
            # the device "meta" has no numbers: little that follows the forward pass matters here
            said = str(error)
        assert seen, "a model with all its parameters on another device was never asked for a loss"
        assert set(seen) == {"meta"}, (
            "the parameters are on the device meta, and the batch on"
            f" {', '.join(sorted(set(seen)))}:"
            " move all its tensors to the device of the parameters"
        )
        assert "on the same device" not in said, (
            "the parameters are on another device, and a total of losses or targets begins on the"
            " CPU: there `+=` raises an error. Make it with device=..."
        )


def _task4_validate_3(validate: Answer) -> None:
    with case("Task 4, the weights"):
        for wrap, what in (
            (lambda m: m, "a bare model"),
            (Compiled, "a compiled model"),
            (DataParallel, "a model in DDP"),
            (lambda m: Compiled(DataParallel(m)), "a model in DDP, compiled"),
            (lambda m: DataParallel(Compiled(m)), "a compiled model in DDP, as the engine has it"),
        ):
            model = head(1)
            _, weights = validated(validate, wrapped := wrap(model), head_batches([2]), Runtime())
            names = sorted(model.state_dict())
            assert all(part.training for part in wrapped.modules()), (
                f"{what}: it came in training mode, and a part of it is in evaluation mode"
                " afterwards:"
                " give the mode back to the model that you got"
            )
            assert isinstance(weights, dict), (
                f"{what}: weights is {type(weights).__name__} on the main process, not a dictionary"
            )
            assert sorted(weights) == names, (
                f"{what}: the weights are called {sorted(weights)}, expected {names}"
            )
        before = {name: tensor.clone() for name, tensor in weights.items()}
        with torch.no_grad():
            model.out.weight += 1
        assert all(torch.equal(before[name], weights[name]) for name in before), (
            "training goes on, and the weights that you returned change with it: return copies"
        )


def _task4_validate_4(validate: Answer) -> None:
    for shares in ([[4], [4]], [[1, 3], [7]], [[5, 2], []]):
        with case(f"Task 4, two processes with batches of {shares[0]} and {shares[1]} rows"):
            parts = [head_batches(counts, rank) for rank, counts in enumerate(shares)]
            results = validate_together(
                validate, [DataParallel(head()), DataParallel(head())], parts
            )
            right = mean_of(head(), parts[0] + parts[1])
            own = mean_of(head(), parts[0])
            found = [loss for loss, _ in results]
            assert not shares[1] or abs(found[0] - own) > 1e-4, (
                f"the main process says {found[0]:.4f}, the loss of its own share: ask the runtime"
                " for"
                " the sum over all"
            )
            assert max(abs(number - right) for number in found) < 1e-4, (
                f"the processes say {found[0]:.4f} and {found[1]:.4f}, and both should say"
                f" {right:.4f}:"
                " sum the losses, sum the targets, then divide"
            )
            assert results[1][1] is None, (
                "the second process returns weights too: only the main process writes them, the"
                " others"
                " return None"
            )
            assert isinstance(results[0][1], dict), "the main process must return the weights"


def task4_validate(validate: Answer) -> None:
    """One process, wrappers, another device, two processes."""
    _task4_validate_1(validate)
    _task4_validate_2(validate)
    _task4_validate_3(validate)
    _task4_validate_4(validate)


# --------------------------------------------------------------------------------- 5, a loss scaler


def _task5_gradients_1(Scaler: Any) -> None:
    with case("Task 5, gradients"):
        scaler = Scaler(scale=1024.0)
        loss = torch.tensor(3.0)
        scaled = scaler.scale_loss(loss)
        assert isinstance(scaled, Tensor), (
            f"scale_loss must return the scaled loss, a tensor, not {type(scaled).__name__}"
        )
        assert scaled.item() == 3 * 1024, (
            f"the loss 3 with the scale 1024 becomes {scaled.item():g}, expected 3072"
        )
        assert loss.item() == 3, (
            "scale_loss has changed the loss itself, which the loop will print: return a new tensor"
        )
        for scale, expected in ((1.0, 0.0), (2.0**16, 1e-8)):
            weight = nn.Parameter(torch.tensor(1.0))
            scaler = Scaler(scale=scale)
            scaler.scale_loss(
                (weight.half() * torch.tensor(1e-4, dtype=torch.float16)).float() * 1e-4
            ).backward()
            scaler.unscale([weight])
            found = expect_number(weight.grad, "the gradient")
            assert abs(found - expected) < 2e-10, (
                f"a gradient of 1e-8 that passes through float16 is {found:.3g} with the scale"
                f" {scale:g}, expected {expected:.3g}: multiply before backward, divide after it"
            )


def _task5_gradients_2(Scaler: Any) -> None:
    with case("Task 5, gradients"):
        model = nn.Linear(2, 1)
        scaler = Scaler(scale=8.0)
        for name, gradients, finite in (
            ("finite gradients", ([[8.0, 16.0]], [24.0]), True),
            ("an infinite gradient", ([[8.0, math.inf]], [24.0]), False),
            ("a negative infinite gradient", ([[8.0, -math.inf]], [24.0]), False),
            ("NaN in the last gradient", ([[8.0, 16.0]], [math.nan]), False),
            ("inf and -inf, whose sum is NaN", ([[math.inf, -math.inf]], [24.0]), False),
        ):
            model.weight.grad, model.bias.grad = map(torch.tensor, gradients)
            given = model.weight.grad
            found = scaler.unscale(model.parameters())
            assert model.weight.grad is given, (
                f"{name}: the gradient is another tensor now: divide in place"
            )
            assert isinstance(found, bool | np.bool_), (
                f"{name}: unscale returns {found!r}, expected True or False; of a tensor,"
                " bool(tensor)"
            )
            assert bool(found) == finite, (
                f"{name}: unscale returns {bool(found)}, expected {finite}. Is the generator of"
                " parameters read twice, or only one of inf and NaN looked for?"
            )
            assert not finite or model.weight.grad.tolist() == [[1.0, 2.0]], (
                f"{name}: with the scale 8 the gradient (8, 16) becomes"
                f" {model.weight.grad.tolist()[0]}, expected [1.0, 2.0]"
            )
            assert gradients[1] != [24.0] or model.bias.grad.tolist() == [3.0], (
                f"{name}: with the scale 8 the gradient of the bias, 24, becomes"
                f" {model.bias.grad.item():g}, expected 3: all gradients are divided, also after"
                " one that is not finite"
            )
        model.bias.grad = torch.tensor([2e38])
        model.weight.grad = torch.tensor([[2e38, 2e38]])
        assert Scaler(scale=1.0).unscale(model.parameters()), (
            "three gradients of 2e38 are finite, though neither their sum nor their norm is: look"
            " at each number"
        )
        model.bias.grad = None
        model.weight.grad = torch.tensor([[8.0, 16.0]])
        assert scaler.unscale(model.parameters()), (
            "a parameter without a gradient is passed over; the others are finite"
        )
        model.weight.grad = torch.tensor([[1e36, 0.0]])
        assert not Scaler(scale=2.0**-20).unscale(model.parameters()), (
            "with a scale below 1 the division itself can overflow: look at the gradients after it"
        )


def task5_gradients(Scaler: Any) -> None:
    """What is scaled, unscaled and found finite."""
    _task5_gradients_1(Scaler)
    _task5_gradients_2(Scaler)


def scales_of(scaler: Any, pattern: Any) -> Any:
    """The scale after each step."""
    found = []
    for finite in pattern:
        scaler.update(finite)
        found.append(float(scaler.scale))
    return found


def pytorch_scales(pattern: Any, scale: Any, interval: Any) -> Any:
    """The same by PyTorch's scaler."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    found = []
    for finite in pattern:
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.ones(1) if finite else torch.full((1,), math.inf)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def _check_scale_moves(Scaler: Any) -> None:
    """Doubled after a row of finite steps, halved at each overflow."""
    pattern = [True] * 9
    found = scales_of(Scaler(64.0, 4), pattern)
    right = pytorch_scales(pattern, 64.0, 4)
    assert found == right, (
        f"nine finite steps with growth_interval 4 give the scales {found}, expected {right}:"
        " double after step 4, and start counting again"
    )
    pattern = [False, False, True]
    found = scales_of(Scaler(64.0, 4), pattern)
    right = pytorch_scales(pattern, 64.0, 4)
    assert found == right, (
        f"two overflows and a finite step give the scales {found}, expected {right}: halve at"
        " each overflow"
    )
    found = scales_of(Scaler(1.0, 4), [False, False])
    assert found == [0.5, 0.25], (
        f"two overflows at the scale 1 give the scales {found}, expected [0.5, 0.25]: it may"
        " fall below 1"
    )
    pattern = [True, True, True, False, True, True, True, True, True]
    found = scales_of(Scaler(64.0, 4), pattern)
    right = pytorch_scales(pattern, 64.0, 4)
    assert found == right, (
        f"an overflow in the fourth step gives the scales {found}, expected {right}: the finite"
        " steps must come in a row"
    )


def _check_scale_resumes(Scaler: Any) -> None:
    """Saved as JSON between two steps and loaded, the scaler goes on as if it had not stopped."""
    first = Scaler(64.0, 4)
    second = Scaler(2.0, 4)
    scales_of(first, [False, True, True, True])
    state = first.state_dict()
    assert isinstance(state, dict), (
        f"state_dict returns {type(state).__name__}, expected a dictionary"
    )
    try:
        state = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state_dict holds what JSON cannot: {error}") from None
    second.load_state_dict(state)
    assert second.scale == 32.0, (
        f"a scaler that is loaded has the scale {second.scale}, and was saved with 32.0"
    )
    found = scales_of(second, [True, True])
    right = scales_of(first, [True, True])
    assert found == right, (
        f"saved after three finite steps, the scaler goes on with {found}; the one that was not"
        f" stopped with {right}: what else is part of the state?"
    )


def task5_scale(Scaler: Any) -> None:
    """The scale, beside PyTorch's."""
    with case("Task 5, the scale"):
        _check_scale_moves(Scaler)
        _check_scale_resumes(Scaler)


# ----------------------------------------------------------------------------- 6, to resume exactly


def strange_in(value: Any, path: Any = "state") -> Any:
    """Where the first thing is that is neither a tensor nor JSON's, or None."""
    if isinstance(value, dict):
        bad = next(
            (f"the key {key!r} of {path}" for key in value if type(key) not in (str, int)), None
        )
        return bad or next(
            filter(None, (strange_in(part, f"{path}[{name!r}]") for name, part in value.items())),
            None,
        )
    if type(value) in (list, tuple):
        return next(
            filter(
                None, (strange_in(part, f"{path}[{place}]") for place, part in enumerate(value))
            ),
            None,
        )
    return (
        None
        if type(value) in (str, int, float, bool, type(None)) or isinstance(value, Tensor)
        else f"{path}, of the type {type(value).__name__},"
    )


def parts_of(loop: Any) -> Any:
    """What a loop is made of, by name, without the generators."""
    return {
        "the weights are not those": frozen(loop.model.state_dict()),
        "the place in the data is not that": (loop.epoch, loop.batch),
        "the optimizer's moments are not those": [
            frozen(dict(moments)) for moments in loop.optimizer.state.values()
        ],
        "the schedule's count is not that": loop.scheduler.last_epoch,
        "the optimizer's learning rate is not that": [
            group["lr"] for group in loop.optimizer.param_groups
        ],
        "best is not that": loop.best,
    }


def next_draws() -> Any:
    return {
        "PyTorch's": torch.rand(2).tolist(),
        "NumPy's": np.random.standard_normal(3).tolist(),
        "Python's": [random.gauss() for _ in range(3)],
    }


def after(TinyLoop: Any, steps: Any) -> Any:
    """A loop that was not stopped, after these steps."""
    loop = TinyLoop(0)
    return loop, [loop.step() for _ in range(steps)]


def check_second_load(Resumable: Any, state: Any, stop: Any, seed: Any, straight: Any) -> None:
    """Load the same state once more: neither the first load nor training may have changed it."""
    saved = frozen(state)
    other = Resumable(seed + 1)
    other.load_state_dict(state)
    losses = [other.step() for _ in range(len(straight) - stop)]
    first = next(
        (
            step
            for step, (a, b) in enumerate(zip(losses, straight[stop:], strict=False), stop + 1)
            if a != b
        ),
        None,
    )
    assert first is None, (
        f"loaded for the second time, the run differs from step {first} on: what has the first"
        " load, or training after it, left in the state?"
    )
    assert frozen(state) == saved, (
        "training on after loading has changed the state that you loaded: PyTorch's optimizers keep"
        " the tensors that they are given, so copy"
    )


def check_resume(Resumable: Any, TinyLoop: Any, stop: Any, seed: Any, straight: Any) -> None:
    loop = Resumable(0)
    for _ in range(stop):
        loop.step()
    state = loop.state_dict()
    assert isinstance(state, dict), (
        f"state_dict returns {type(state).__name__}, expected a dictionary"
    )
    strange = strange_in(state)
    assert strange is None, (
        f"{strange} is neither a tensor nor what JSON can hold; rng_state of the package gives such"
        " values"
    )
    saved = frozen(state)
    losses = [loop.step() for _ in range(3)]
    assert losses == straight[stop : stop + 3], (
        "to save the state has changed the run: does state_dict draw random numbers?"
    )
    assert frozen(state) == saved, (
        "training on after saving has changed the saved state: it refers to living tensors, so copy"
    )
    other = Resumable(seed)
    for _ in range(7):
        other.step()
    other.best = -1.0
    other.load_state_dict(state)
    drawn = next_draws()
    right, _ = after(TinyLoop, stop)
    for name, draws in next_draws().items():
        assert drawn[name] == draws, (
            f"after the load {name} next random numbers are not those of the run that was not"
            " stopped"
        )
    for (name, one), two in zip(parts_of(other).items(), parts_of(right).values(), strict=True):
        assert one == two, (
            f"loaded into a loop that has made 7 steps, {name} of the run that was not stopped: set"
            " it, whatever it was"
        )
    check_second_load(Resumable, state, stop, seed, straight)


def task6_resume(Resumable: Any, TinyLoop: Any) -> None:
    """Saved in an epoch and at its end; then without one part at a time."""
    with case("Task 6, saved after step 5"):
        straight = after(TinyLoop, 8)[1]
        check_resume(Resumable, TinyLoop, 5, 99, straight)

    with case("Task 6, saved at the end of an epoch"):
        check_resume(Resumable, TinyLoop, 3, 7, straight)

    saved_loop = Resumable(0)

    for _ in range(5):
        saved_loop.step()

    whole = saved_loop.state_dict()
    fresh = Resumable(99).state_dict()

    assert len(whole) >= 4, (
        f"Task 6: the state has the keys {list(whole)}: put parts that have nothing to do with each"
        " other under keys of their own"
    )

    for key in whole:
        loop = Resumable(99)
        loop.load_state_dict(whole | {key: fresh[key]})
        losses = (loop.step() for _ in range(3))
        first = next(
            (
                f"step {step}"
                for step, (a, b) in enumerate(zip(losses, straight[5:], strict=False), 6)
                if abs(a - b) > 1e-5
            ),
            "no step",
        )
        print(f"saved after step 5 without {key!r}: the first loss that differs is that of {first}")


# ------------------------------------------------------------------------------ 7, averaged weights


def weights_of(engine: Any) -> Any:
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


class Seen(Callback):
    """Notes the weights at the start and after each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []

    def on_train_start(self, engine: Any) -> None:
        self.rows.append(weights_of(engine))

    def on_step_end(self, engine: Any, metrics: Any) -> None:
        self.rows.append(weights_of(engine))


class Behind(Callback):
    """Stands after the callback in the list, as a checkpointer does, and notes what it meets."""

    def __init__(self) -> None:
        self.after_validation: list[dict[str, Tensor]] = []
        self.at_error = None

    def on_validation_end(self, engine: Any, metrics: Any) -> None:
        self.after_validation.append(weights_of(engine))

    def on_exception(self, engine: Any, error: Any) -> None:
        self.at_error = weights_of(engine)


class Looks(RegressionTask):
    """Notes the weights that a validation meets; fails where it is asked to."""

    fail_in_validation = fail_in_step = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.met: list[dict[str, Tensor]] = []
        self.steps = 0

    def train_step(self, model: Any, batch: Any) -> Any:
        self.steps += 1
        if self.steps == self.fail_in_step:
            raise OSError("planted")
        return super().train_step(model, batch)

    def validation_step(self, model: Any, batch: Any) -> Any:
        self.met.append(
            {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        )
        if len(self.met) == self.fail_in_validation:
            raise OSError("planted")
        return super().train_step(model, batch)


def regression_engine(callbacks: Any, steps: Any = 4, every: Any = 2, **faults: Any) -> Any:
    training = TrainingConfig(
        batch_size=64, max_steps=steps, eval_interval=every, device="cpu", precision="fp32"
    )
    config = Config(
        training=training,
        optimization=OptimizationConfig(learning_rate=0.1, warmup_steps=0, schedule="constant"),
    )
    task = Looks(config)
    vars(task).update(faults)
    return TrainingEngine(config, task, task.build_data(), callbacks)


@functools.cache
def plain_run() -> tuple[Any, Seen]:
    """A run without the callback, and what it saw."""
    engine: Any = regression_engine([seen := Seen()])
    engine.run()
    return engine, seen


def averages(rows: Any, decay: Any) -> Any:
    """The average at the start and after each step, from the weights."""
    found = [rows[0]]
    for row in rows[1:]:
        found.append(
            {name: decay * old + (1 - decay) * row[name] for name, old in found[-1].items()}
        )
    return found


def expect_weights(found: Any, right: Any, message: Any) -> None:
    assert isinstance(found, dict), (
        f"average is {type(found).__name__}, expected a dictionary of tensors"
    )
    assert found.keys() == right.keys(), (
        f"average has the names {sorted(found)}, expected {sorted(right)}"
    )
    off = max((found[name] - tensor).abs().max().item() for name, tensor in right.items())
    assert off < 1e-5, f"{message} (largest difference {off:.2g})"


def is_same(one: Any, other: Any) -> Any:
    return all(torch.equal(one[name], other[name]) for name in other)


def check_slips(average: Any, rows: list[dict[str, Tensor]]) -> None:
    """Averages that mistakes give, with decay 0.75."""
    swapped = averages(rows, 0.25)
    zero = {name: torch.zeros_like(row) for name, row in rows[0].items()}
    for other, what in (
        (
            rows[-1],
            "the weights themselves: is it a copy, and does it move after each step?",
        ),
        (rows[0], "the weights at the start: which hook moves it?"),
        (swapped[-1], "what comes from swapping decay and 1 - decay"),
        (
            averages([zero, *rows[1:]], 0.75)[-1],
            "what comes from a start at 0: begin with a copy of the weights",
        ),
        (
            averages([rows[1], *rows[1:]], 0.75)[-1],
            "what comes from a start after the first step: begin at on_train_start",
        ),
    ):
        same = (
            isinstance(average, dict)
            and average.keys() == other.keys()
            and all(torch.allclose(average[n].float(), other[n], atol=1e-5) for n in other)
        )
        assert not same, f"with decay 0.75, after 4 steps, the average is {what}"


def _task7_average_1(AveragedWeights: Any) -> None:
    with case("Task 7, the average"):
        plain, plainly = plain_run()
        regression_engine([averaged := AveragedWeights(0.75), seen := Seen()], every=100).run()
        assert is_same(seen.rows[3], plainly.rows[3]), (
            "the run has other weights than one without the callback: it must not change the"
            " training."
            " Is the average a copy?"
        )
        assert is_same(seen.rows[4], plainly.rows[4]), (
            "after a validation the model has other weights than in a run without the callback:"
            " give"
            " back its own, to the last bit"
        )
        assert averaged.average is not None, (
            "after the run average is still None: is it set in on_train_start, on a name of the"
            " engine's hooks?"
        )
        graphs = [name for name, tensor in averaged.average.items() if tensor.requires_grad]
        assert not graphs, (
            f"the average of {', '.join(graphs)} requires a gradient, so it keeps the graph of all"
            " steps before: average under torch.no_grad()"
        )
        check_slips(averaged.average, seen.rows)
        right = averages(seen.rows, 0.75)
        expect_weights(
            averaged.average,
            right[-1],
            "with decay 0.75, after 4 steps, the average is not decay * average + (1 - decay) *"
            " weights"
            " after each step",
        )


def _task7_average_2(AveragedWeights: Any) -> None:
    plain, plainly = plain_run()
    with case("Task 7, the validation"):
        engine = regression_engine([AveragedWeights(0.5), seen := Seen(), behind := Behind()])
        engine.run()
        right = averages(seen.rows, 0.5)
        met = engine.task.met
        assert not is_same(met[0], plain.task.met[0]), (
            "a validation after step 2 meets the model's own weights: give it the average in"
            " on_validation_start"
        )
        assert is_same(seen.rows[2], plainly.rows[2]), (
            "after the validation of step 2 the model has other weights than in a run without the"
            " callback: give back its own, to the last bit"
        )
        assert is_same(behind.after_validation[0], seen.rows[2]), (
            "the weights come back too late: a callback further down the list still meets the"
            " average"
            " in its on_validation_end"
        )
        expect_weights(
            met[0], right[1], "the validation after step 2 must meet the average up to step 1"
        )
        assert is_same(met[-1], met[-1 - len(met) // 2]) is False, (
            "the second validation meets the weights of the first: take the average of now"
        )


def _task7_average_3(AveragedWeights: Any) -> None:
    plain, plainly = plain_run()
    with case("Task 7, a validation that fails"):
        for fault, step, what in (
            (
                "fail_in_validation",
                2,
                (
                    "the first validation failed, and the model was left with the average: give"
                    " back"
                    " its weights in on_exception"
                ),
            ),
            (
                "fail_in_step",
                4,
                (
                    "a training step failed, and on_exception has changed the weights: only give"
                    " back"
                    " what was taken"
                ),
            ),
        ):
            engine = regression_engine(
                [AveragedWeights(0.5), behind := Behind()], **{fault: 1 if step == 2 else step}
            )
            try:
                engine.run()
                raised = None
            except OSError as error:
                raised = error
            assert raised, f"{fault}: the error must come out of the run, but it was swallowed"
            failed = [note for note in getattr(raised, "__notes__", []) if "on_exception" in note]
            assert not failed, f"{fault}: on_exception failed itself: {failed[0]}"
            assert is_same(weights_of(engine), plainly.rows[2 if step == 2 else 3]), what
            assert is_same(behind.at_error, weights_of(engine)), (
                f"{fault}: a callback further down the list still meets the average in its"
                " on_exception, and might save it"
            )


def _task7_average_4(AveragedWeights: Any) -> None:
    with case("Task 7, resume"):
        regression_engine([whole := AveragedWeights(0.9)]).run()
        first = regression_engine([AveragedWeights(0.9)], steps=3)
        first.run()
        state = copy.deepcopy(first.state_dict())
        assert state["callbacks"]["AveragedWeights"], (
            "state_dict returns nothing, so a resumed run cannot know the average"
        )
        second = regression_engine([later := AveragedWeights(0.9)])
        second.setup(state)
        second.run()
        assert is_same(later.average, whole.average), (
            "stopped after step 3 and resumed, the average ends elsewhere than in a run without a"
            " stop:"
            " does on_train_start overwrite what was loaded?"
        )


def _task7_average_5(AveragedWeights: Any) -> None:
    with case("Task 7, copies"):
        averaged = AveragedWeights(0.9)
        engine = regression_engine([averaged], steps=3)
        engine.run()
        state = averaged.state_dict()
        saved = frozen(state)
        averaged.on_step_end(engine, {})
        assert frozen(state) == saved, (
            "a further step has changed the saved state: state_dict must return copies of the"
            " tensors"
        )
        other = AveragedWeights(0.9)
        other.load_state_dict(state)
        other.on_train_start(engine)
        other.on_step_end(engine, {})
        assert frozen(state) == saved, (
            "a step after loading has changed the state that was loaded: load copies of the tensors"
        )


def _task7_average_6(AveragedWeights: Any) -> None:
    with case("Task 7, a parameter that isn't trained"):
        averaged = AveragedWeights(0.75)
        engine = regression_engine([], steps=1)
        engine.run()
        for index, parameter in enumerate(engine.model.parameters()):
            parameter.requires_grad_(index > 0)
        averaged.on_train_start(engine)
        message = "the weights haven't moved, so the average must be equal to them"
        expect_weights(averaged.average, weights_of(engine), message)
        averaged.on_step_end(engine, {})
        expect_weights(averaged.average, weights_of(engine), message)


def task7_average(AveragedWeights: Any) -> None:
    """The average, validations, failures, a resumed run, and what must be a copy."""
    _task7_average_1(AveragedWeights)
    _task7_average_2(AveragedWeights)
    _task7_average_3(AveragedWeights)
    _task7_average_4(AveragedWeights)
    _task7_average_5(AveragedWeights)
    _task7_average_6(AveragedWeights)

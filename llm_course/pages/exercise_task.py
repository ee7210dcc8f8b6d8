"""The checks of exercise 13, optimizers and tasks: each says what is wrong with an answer."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from llm_course.pages.checking import Answer, case, expect, expect_number, written
from llm_course.text.batches import IGNORE_INDEX
from llm_course.text.data import BaseDataModule
from llm_course.training.config import Config, OptimizationConfig
from llm_course.training.task import RegressionTask, StepOutput

Numbers = dict[str, tuple[float, dict[float, str]]]
Batch = dict[str, Tensor]
F64 = torch.float64


def _expect(actual: Any, expected: Tensor, message: str, atol: float = 1e-9) -> None:
    """Most numbers here are of double precision."""
    expect(actual, expected, message, rtol=1e-6, atol=atol)


# ---------------------------------------------------------------------- 1, three micro-batches

LISTS: dict[str, tuple[list[float], str]] = {
    "loss_sums": ([2, 25, 0], "add the squares up, and divide by nothing"),
    "counts": ([2, 1, 0], "a masked position isn't a target"),
}


def step_numbers(w: int) -> Numbers:
    """What a right engine computes in the step at `w`, each with likely slips."""
    return {
        "loss_of_step": (
            27 / 3,
            {
                13: "that is the mean of means: divide the sum of all losses by the number of all"
                " targets",
                26
                / 3: "that is the sum of the means over the number of micro-batches: add up losses,"
                " not means",
                27: "divide by the number of targets, once",
                13.5: "there are three targets, in two micro-batches",
                6.75: "C has no target, so the sum is divided by three",
            },
        ),
        "gradient_of_step": (
            -10 / 3,
            {
                10 / 3: f"the sign: at w = {w} most targets lie above",
                -10: "divide by the number of targets, once",
                -5: "that is the mean of means: A has the mean gradient 0, B has -10",
                -5 / 3: "the derivative of a square has a factor 2",
                -2.5: "C has no target, so the sum is divided by three",
            },
        ),
    }


def numbers_at(w: int) -> Numbers:
    """The six numbers, each with likely slips; the targets are w - 1, w + 1 and w + 5."""
    total = 3 * w + 5
    return step_numbers(w) | {
        "mean_of_means": (
            (1 + 25) / 2,
            {
                26 / 3: "the empty micro-batch has no mean, so it is not counted among them",
                9: "that is the right loss; here the mean of A and the mean of B are averaged",
                12.5: "A's mean loss is 1, and B's is 25",
            },
        ),
        "resting_w": (
            total / 3,
            {
                w + 2.5: "that is where the mean of means rests; each target has the same say here",
                total / 4: "only targets count, and there are three",
                total / 2: "there are three targets, in two micro-batches",
                total: "the gradient vanishes at the mean of the targets",
            },
        ),
        "resting_w_of_means": (
            w + 2.5,
            {
                total / 3: "that is where the right mean rests; here A and B have the same say",
                (2 * w + 5)
                / 3: "the empty micro-batch has no mean, so it is not counted among them",
            },
        ),
        "aux_of_step": (
            (2 * 0.2 + 0.8) / 3,
            {
                1.6 / 3: "each is weighted by the number of its targets; C has none",
                0.5: "each is weighted by the number of its targets: A has two",
                1.6: "the sum is divided by the targets",
                1.2: "the sum is divided by the targets of the step, too",
                1 / 3: "each is weighted by the number of its targets: A has two",
            },
        ),
    }


def task1_numbers(answers: dict[str, Any], *, w: int) -> None:
    """Two lists and six numbers."""
    numbers = numbers_at(w)
    with case("Task 1"):
        written(answers, *LISTS, *numbers)
        for name, (right, why) in LISTS.items():
            typed = answers[name]
            assert isinstance(typed, list | tuple) and len(typed) == 3, (
                f"{name} is {typed!r}, expected a list of three numbers"
            )
            for letter, value, real in zip("ABC", typed, right, strict=True):
                found = expect_number(value, f"{name} of {letter}")
                assert abs(found - real) < 1e-6, f"{name} of {letter} is {found:g}: {why}"
        for name, (real, slips) in numbers.items():
            found = expect_number(answers[name], name)
            said = [words for slip, words in slips.items() if abs(slip - found) < 0.006]
            why = said[0] if said else "see hint 2 for what to write down before you average"
            assert abs(found - real) < 0.006, f"{name} is {found:.4g}: {why}"


# ---------------------------------------------------------------------- 2, AdamW

USUAL: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
Gradients = Sequence[Sequence[Tensor | None]]


def _refuse_optimizers(*args: Any, **kwargs: Any) -> None:
    raise AssertionError(
        "your code uses an optimizer of torch.optim; in this task you write it yourself"
    )


@contextmanager
def _no_optimizers() -> Iterator[None]:
    """Inside, PyTorch's optimizers and the functions that do their work are refused."""
    module = sys.modules[torch.optim.Adam.__module__]
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch.optim.Optimizer, "__init__", _refuse_optimizers))
        for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
            patches.enter_context(patch.object(module, name, _refuse_optimizers, create=True))
        for name in ("_fused_adam_", "_fused_adamw_"):
            patches.enter_context(patch.object(torch, name, _refuse_optimizers))
        yield


def adam_steps(
    optimizer: Answer,
    values: Sequence[Tensor],
    gradients: Gradients,
    changes: dict[int, float] | None = None,
    **settings: Any,
) -> list[Tensor]:
    """The tensors after the student's steps; `changes` maps steps to another learning rate."""
    params = [value.clone().requires_grad_() for value in values]
    with _no_optimizers():
        mine = optimizer(params, **settings)
        for step, row in enumerate(gradients):
            given = [None if g is None else g.clone() for g in row]
            for p, gradient in zip(params, given, strict=True):
                p.grad = gradient
            mine.lr = (changes or {}).get(step, mine.lr)
            mine.step()
            for gradient, before in zip(given, row, strict=True):
                kept = gradient is None or before is None or torch.equal(gradient, before)
                assert kept, "the gradient was changed: it belongs to the engine"
    return [p.detach() for p in params]


def _torch_steps(
    values: Sequence[Tensor],
    gradients: Gradients,
    changes: dict[int, float] | None = None,
    *,
    weight_decay: float,
    **settings: Any,
) -> list[Tensor]:
    params = [value.clone().requires_grad_() for value in values]
    groups = [{"params": [p], "weight_decay": weight_decay if p.ndim >= 2 else 0.0} for p in params]
    real = torch.optim.AdamW(groups, foreach=False, **settings)
    for step, row in enumerate(gradients):
        for p, gradient in zip(params, row, strict=True):
            p.grad = None if gradient is None else gradient.clone()
        for group in real.param_groups:
            group["lr"] = (changes or {}).get(step, group["lr"])
        real.step()
    return [p.detach() for p in params]


def compare_steps(
    optimizer: Answer,
    shapes: Sequence[tuple[int, ...]],
    steps: int,
    what: str,
    why: str,
    *,
    missing: Sequence[tuple[int, int]] = (),
    changes: dict[int, float] | None = None,
    **settings: Any,
) -> None:
    """Random gradients, some of them missing; PyTorch's AdamW must come to the same numbers."""
    generator = torch.Generator().manual_seed(len(shapes) + steps)
    values = [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]
    rows: list[list[Tensor | None]] = [
        [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]
        for _ in range(steps)
    ]
    for step, place in missing:
        rows[step][place] = None
    ours = adam_steps(optimizer, values, rows, changes, **USUAL | settings)
    theirs = _torch_steps(values, rows, changes, **USUAL | settings)
    for shape, found, right in zip(shapes, ours, theirs, strict=True):
        with case(f"{what}, the tensor of shape {tuple(shape)}, {steps} steps"):
            # if t is a tensor, as PyTorch's own is, its powers are of single precision
            _expect(found, right, f"torch.optim.AdamW is elsewhere: {why}", 1e-5)


def _first_steps(optimizer: Answer) -> None:
    """One step of a vector, and decay alone."""
    gradient = torch.tensor([1000.0, 0.1, -3.0], dtype=F64)
    [moved] = adam_steps(optimizer, [torch.zeros(3, dtype=F64)], [[gradient]], lr=0.1)
    assert not torch.equal(moved, torch.zeros_like(moved)), (
        "a vector with a gradient did not move: change the tensor in place"
    )
    with case("the first step of a vector, lr=0.1"):
        _expect(
            moved,
            torch.tensor([-0.1, -0.1, 0.1], dtype=F64),
            "every weight moves by lr, whatever its gradient: is v the mean of the squares, and"
            " are both means corrected by their own t, which is 1 here? It moves by"
            f" {[round(x, 4) for x in moved.tolist()]}",
            1e-5,
        )
    start = [torch.full(shape, 3.0, dtype=F64) for shape in ((2, 2), (2,), (2, 2, 3), ())]
    still = [torch.zeros_like(p) for p in start]
    ends = adam_steps(optimizer, start, [still], lr=0.1, weight_decay=0.5)
    matrix, vector, stack, scalar = ends
    only = "decay acts on two or more dimensions only"
    with case("one step with gradients of zero, p = 3, lr = 0.1, decay 0.5"):
        assert (vector == 3).all(), f"a vector went from 3 to {vector[0]:.4g}: {only}"
        assert scalar == 3, f"a single number went from 3 to {scalar:.4g}: {only}"
        _expect(
            matrix,
            torch.full((2, 2), 2.85, dtype=F64),
            f"a matrix goes from 3 to 3 (1 - 0.1 * 0.5), here to {matrix[0, 0]:.4g}: decay is"
            " scaled by lr, and is no part of the gradient",
        )
        assert (stack == matrix[0, 0]).all(), (
            "a tensor of shape (2, 2, 3) decays, too: it has two or more dimensions"
        )


def _corners(optimizer: Answer) -> None:
    """Decay and a step, a gradient as small as eps, and a missing one."""
    three = torch.full((1, 1), 3.0, dtype=F64)
    one = torch.ones(1, 1, dtype=F64)
    [moved] = adam_steps(optimizer, [three], [[one]], lr=0.1, weight_decay=0.5)
    with case("one step with a gradient of 1, p = 3, lr = 0.1, decay 0.5"):
        _expect(
            moved,
            torch.full((1, 1), 2.75, dtype=F64),
            "the weight is shrunk first, to 2.85, and then moved by 0.1; here it ends at"
            f" {moved.item():.4g}",
            1e-6,
        )
    small = torch.full((1,), 1e-4, dtype=F64)
    [tiny] = adam_steps(optimizer, [torch.zeros(1, dtype=F64)], [[small]], lr=1.0, eps=1e-4)
    with case("a gradient as small as eps, lr=1"):
        _expect(
            tiny,
            torch.tensor([-0.5], dtype=F64),
            f"it moves by half of lr, here by {-tiny.item():.4g}: eps is added outside the root,"
            " and to the root of the *corrected* v",
        )
    values = [torch.ones(3, dtype=F64), torch.ones(2, 2, dtype=F64)]
    still, _ = adam_steps(optimizer, values, [[None, torch.ones(2, 2, dtype=F64)]] * 2, lr=0.1)
    assert torch.equal(still, values[0]), "a tensor without a gradient moved: leave it alone"


def task2_adamw(optimizer: Answer) -> None:
    """Hand-computed steps, then PyTorch's AdamW as the oracle."""
    with case("Task 2"):
        _first_steps(optimizer)
        _corners(optimizer)
        pair = [(3, 4), (4,)]
        compare_steps(optimizer, pair, 1, "random gradients", "look at the two corrections")
        kept = "do t, m and v live on from step to step, and has each mean its own beta?"
        compare_steps(optimizer, pair, 6, "random gradients", kept)
        gone = [(0, 0), (1, 0), (3, 1)]
        what = "gradients missing in some steps"
        own = "each tensor counts its own steps, and without a gradient nothing decays"
        compare_steps(optimizer, [(2, 3), (3,)], 5, what, own, missing=gone)
        what = "other settings, and lr changed from outside"
        why = "read self.lr, self.betas and self.eps in each step"
        other: dict[str, Any] = {"betas": (0.8, 0.99), "eps": 1e-4, "changes": {2: 0.01}}
        compare_steps(optimizer, [*pair, ()], 4, what, why, **other)
        rows = [[torch.ones(2, dtype=F64)], [torch.zeros(2, dtype=F64)]]
        start = [torch.zeros(2, dtype=F64)]
        [ours] = adam_steps(optimizer, start, rows, **USUAL)
        [theirs] = _torch_steps(start, rows, **USUAL)
        with case("a vector with the gradients 1 and then 0"):
            why = "a gradient of zero is a gradient: its step is counted, and m still moves the"
            _expect(ours, theirs, f"{why} weight", 1e-5)


# ---------------------------------------------------------------------- 3, Muon

NORM = "divide by the norm of the matrix, the root of the sum of all squares"
POLYNOMIAL = (
    "each singular value s becomes f(s), U and V stay: (15 x - 10 x x^T x + 3 x x^T x x^T x) / 8"
)


def _scalar_f(s: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        s = (15 * s - 10 * s**3 + 3 * s**5) / 8
    return s


def with_singular_values(
    values: Sequence[float], M: int, N: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix (M, N) with these singular values, and its U and V^T."""
    generator = torch.Generator().manual_seed(seed)
    U, _ = torch.linalg.qr(torch.randn(M, len(values), generator=generator, dtype=F64))
    V, _ = torch.linalg.qr(torch.randn(N, len(values), generator=generator, dtype=F64))
    return U * torch.tensor(values, dtype=F64) @ V.mT, U, V.mT


def _refuse_svd(*args: Any, **kwargs: Any) -> None:
    raise AssertionError(
        "your code decomposes the matrix; in this task products of matrices do it, without an SVD"
    )


@contextmanager
def _products_only() -> Iterator[None]:
    """Inside, the decompositions of PyTorch are refused."""
    with ExitStack() as patches:
        for owner in (torch.linalg, torch, Tensor):
            for name in ("svd", "svdvals", "eigh", "eig", "qr", "pinv"):
                if hasattr(owner, name):
                    patches.enter_context(patch.object(owner, name, _refuse_svd))
        yield


def check_orthogonal(
    orthogonalize: Answer, values: list[float], M: int, N: int, steps: int, why: str
) -> None:
    """A matrix with known singular values: they must go through the polynomial."""
    G, U, Vt = with_singular_values(values, M, N)
    before = G.clone()
    s = torch.tensor(values, dtype=F64)
    with case(f"orthogonalize, a matrix ({M}, {N}) with singular values {values}, {steps} steps"):
        with _products_only():
            found = orthogonalize(G, steps)
        assert torch.equal(G, before), "G was changed: make a new tensor"
        right = U * _scalar_f(s / s.norm(), steps) @ Vt
        if (
            steps < 2
            and isinstance(found, Tensor)
            and found.shape == right.shape
            and (found - right).abs().max() < 0.01
        ):
            why = (
                "the first digits are right, the others are not: is anything computed in bfloat16,"
                " or added to the norm?"
            )
        _expect(found, right, why, 1e-5)


def task3_orthogonalize(orthogonalize: Answer) -> None:
    """Square, wide and tall matrices, a stack, a small one and zero."""
    with case("Task 3"):
        check_orthogonal(orthogonalize, [3.0, 4.0], 2, 2, 0, NORM)
        check_orthogonal(orthogonalize, [3.0, 4.0], 2, 2, 1, POLYNOMIAL)
        three = [3.0, 2.0, 1.0]
        check_orthogonal(orthogonalize, three, 3, 5, 2, f"a wide matrix: {POLYNOMIAL}")
        check_orthogonal(orthogonalize, three, 5, 3, 2, f"a tall matrix: {POLYNOMIAL}")
        check_orthogonal(orthogonalize, three, 4, 3, 15, "is f applied `steps` times?")
        generator = torch.Generator().manual_seed(3)
        stack = torch.randn(4, 3, 5, generator=generator, dtype=F64)
        with case("orthogonalize, a stack (4, 3, 5)"):
            ones = torch.stack([orthogonalize(matrix, 3) for matrix in stack])
            own = "a stack is four matrices, each with its own norm"
            _expect(orthogonalize(stack, 3), ones, own, 1e-5)
        with case("orthogonalize, the same stack times 1e-4, as small as gradients are"):
            size = "the result does not depend on the size of G: where is its norm cut off?"
            _expect(orthogonalize(1e-4 * stack, 3), ones, size, 1e-3)
        with case("orthogonalize(G), without steps"):
            _expect(orthogonalize(stack), orthogonalize(stack, 15), "steps is 15 unless told")
        with case("orthogonalize, a zero matrix"):
            why = "zero divided by its norm: keep the norm away from 0"
            _expect(orthogonalize(torch.zeros(3, 2), 15), torch.zeros(3, 2), why)


def hidden_orthogonalize(orthogonalize: Answer) -> None:
    """Other sizes, a stack that holds a zero matrix, and two dimensions of a stack."""
    check_orthogonal(orthogonalize, [1e-3], 1, 4, 12, "one row")
    check_orthogonal(orthogonalize, [2.0, 1.9, 1.8, 1.7], 4, 6, 15, "well conditioned")
    scaled = with_singular_values([5e3, 2e3], 3, 2)[0]
    with case("orthogonalize, the same matrix a million times larger"):
        _expect(orthogonalize(scaled * 1e6, 9), orthogonalize(scaled, 9), NORM, 1e-5)
    mixed = torch.stack([torch.zeros(2, 3), torch.ones(2, 3)])
    with case("orthogonalize, a stack with one zero matrix, float32"):
        found = orthogonalize(mixed, 15)
        _expect(found[0], torch.zeros(2, 3), "a zero matrix stays zero", 1e-6)
        right = torch.full((2, 3), 1 / math.sqrt(6))
        _expect(found[1], right, "the matrix of ones has one singular value", 1e-5)
    generator = torch.Generator().manual_seed(4)
    deep = torch.randn(2, 3, 4, 3, generator=generator, dtype=F64)
    with case("orthogonalize, no dimension of a stack, and two"):
        one = orthogonalize(deep[1, 2], 4)
        _expect(orthogonalize(deep, 4)[1, 2], one, "each matrix of a stack by itself", 1e-5)


def _stack_of(values: Sequence[float], shape: tuple[int, ...], seed: int) -> Tensor:
    """A stack of matrices that all have these singular values."""
    some = list(values[: min(shape[-2:])])
    M, N = shape[-2:]
    count = math.prod(shape[:-2])
    made = [with_singular_values(some, M, N, seed + i)[0] for i in range(count)]
    return torch.stack(made).view(shape)


def check_step(
    muon_step: Answer,
    shape: tuple[int, ...],
    seed: int,
    why: str,
    *,
    buffered: bool = False,
    values: Sequence[float] = (1.0, 0.8, 0.6),
    **given: float,
) -> None:
    """One step against the SVD's orthogonal matrix; what isn't given is left to its default."""
    settings = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.1} | given
    lr = settings["lr"]
    mu = settings["momentum"]
    decay = settings["weight_decay"]
    gradient = _stack_of(values, shape, seed)
    p = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    buffer = _stack_of(values, shape, seed + 9) * (0.1 if buffered else 0.0)
    moved = p.clone()
    kept = buffer.clone()
    same = gradient.clone()
    state = "of earlier steps" if buffered else "of zeros"
    with case(f"muon_step, p of shape {tuple(shape)}, {settings}, a buffer {state}"):
        with _products_only():
            muon_step(moved, same, kept, **{"lr": lr} | given)
        assert torch.equal(same, gradient), "g was changed: it belongs to the engine"
        right_buffer = mu * buffer + (1 - mu) * gradient
        ahead = mu * right_buffer + (1 - mu) * gradient
        U, _, Vt = torch.linalg.svd(ahead, full_matrices=False)
        right = p * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(shape[-2:])) * (U @ Vt)
        in_place = "must be changed in place"
        assert not torch.equal(kept, buffer), f"the buffer is as before: it {in_place}"
        _expect(
            kept,
            right_buffer,
            "the buffer becomes momentum * buffer + (1 - momentum) * g; momentum is 0.95 unless"
            " told",
        )
        assert not torch.equal(moved, p), f"p is as before: it {in_place}"
        _expect(moved, right, why, 1e-5)


def task3_step(muon_step: Answer) -> None:
    """A square, a wide and a tall matrix; a weak direction; a buffer of earlier steps."""
    with case("Task 3"):
        check_step(
            muon_step,
            (3, 3),
            1,
            "decay first, then -lr * 0.2 * sqrt(max(M, N)) times the orthogonalised lookahead",
        )
        check_step(
            muon_step,
            (2, 8),
            2,
            "the scale is 0.2 * sqrt(max(M, N)), and the decay (1 - lr * weight_decay) comes before"
            " the step",
        )
        smallest = (
            "one direction is a hundred times weaker than the first, and moves as far: does"
            " orthogonalize get its 15 steps?"
        )
        check_step(muon_step, (3, 3), 6, smallest, values=(1.0, 0.5, 0.01))
        decay = (
            "p decays by (1 - lr * weight_decay), and M and N are the sides of p, whichever is"
            " longer"
        )
        check_step(muon_step, (8, 2), 5, decay, lr=0.02, weight_decay=0.5)
        stack = "a stack of matrices: M and N are the last two sides of p"
        check_step(muon_step, (5, 2, 3), 7, stack)
        ahead = "look ahead with the new buffer: momentum * buffer + (1 - momentum) * g"
        check_step(muon_step, (3, 4), 3, ahead, buffered=True, momentum=0.6)


# ---------------------------------------------------------------------- 4, a schedule

BY_HAND: dict[str, Any] = {"warmup": 2, "cycle": 4, "cycles": 2, "cooldown": 2, "lowest": 0.2}


def check_factor(factor: Answer, step: int, right: float, shape: dict[str, Any], why: str) -> None:
    """The learning rate of one step."""
    with case(f"factor({step}, {', '.join(f'{name}={value}' for name, value in shape.items())})"):
        found = expect_number(factor(step, **shape), "the result")
        assert abs(found - right) < 1e-6, f"expected {right:.4g}, got {found:.4g}: {why}"


def _rates(scheduler_class: Any, steps: int, **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = scheduler_class(optimizer, **settings)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def check_shape(
    factor: Answer, warmup: int, cycle: int, cycles: int, cooldown: int, lowest: float
) -> None:
    """PyTorch's own schedulers, one for each part."""
    shape = dict(warmup=warmup, cycle=cycle, cycles=cycles, cooldown=cooldown, lowest=lowest)
    rise: dict[str, Any] = {"start_factor": 1 / max(warmup, 1), "end_factor": 1.0}
    rates = _rates(LinearLR, warmup, total_iters=max(warmup - 1, 1), **rise)
    rates += _rates(CosineAnnealingWarmRestarts, cycle * cycles, T_0=cycle, eta_min=lowest)
    fall: dict[str, Any] = {"start_factor": 1.0, "end_factor": 0.0}
    fallen = _rates(LinearLR, cooldown, total_iters=max(cooldown, 1), **fall)
    rates += [lowest * rate for rate in fallen]
    places = [f"step {i} of the warmup" for i in range(warmup)]
    for number in range(cycles):
        of = f"cycle {number + 1} of {cycles}, each of {cycle} steps"
        places += [f"step {i} of {of}" for i in range(cycle)]
    places += [f"step {i} of the cool-down of {cooldown} steps" for i in range(cooldown)]
    places += ["after the end"] * 2
    for step, (right, place) in enumerate(zip([*rates, 0, 0], places, strict=True)):
        why = f"this is {place}, and PyTorch's scheduler for this part says so"
        check_factor(factor, step, right, shape, why)


def task4_factor(factor: Answer) -> None:
    """The table of the task, its ends, and PyTorch's schedulers."""
    with case("Task 4"):
        top = (1 + math.cos(math.pi / 4)) / 2
        low = (1 + math.cos(3 * math.pi / 4)) / 2
        first = [1, 0.2 + 0.8 * top, 0.6, 0.2 + 0.8 * low]
        whys = (
            ["the first step of the warmup has 1 / warmup, and its last step has 1"] * 2
            + [
                "the first cycle starts at 1, right after the warmup: does its place count from"
                " there?"
            ]
            + ["a cosine falls from 1 towards `lowest`, over `cycle` steps"] * 3
            + ["the second cycle starts here, at 1 again"]
            + ["the second cycle is like the first"] * 2
            + ["this is still the last step of the second cycle"]
            + ["the first step of the cool-down has `lowest`"]
            + ["the cool-down falls from `lowest` to 0 in `cooldown` steps"]
            + ["0 right after the cool-down"]
        )
        table = [0.5, 1, *first, *first, 0.2, 0.1, 0]
        for step, (right, why) in enumerate(zip(table, whys, strict=True)):
            check_factor(factor, step, right, BY_HAND, why)
        for step in (13, 50, 10**6):
            check_factor(factor, step, 0, BY_HAND, "0 for ever after")
        why = "without a warmup the first cycle starts at step 0"
        check_factor(factor, 0, 1, BY_HAND | {"warmup": 0}, why)
        why = "without a cool-down it is 0 right after the cycles"
        check_factor(factor, 10, 0, BY_HAND | {"cooldown": 0}, why)
        check_shape(factor, 3, 5, 4, 6, 0.1)


# ---------------------------------------------------------------------- 5, four faults

FAULTS = ("group", "zero", "means", "schedule")


class UnevenData(BaseDataModule):
    """Least squares on micro-batches of two sizes, in turn.

    The rows of the second size lie 2 higher than the others.
    """

    def __init__(self, sizes: tuple[int, int], seed: int):
        self.sizes = sizes
        self.seed = seed

    def setup(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        weight = 0.5 * torch.randn(8, generator=g)
        self.batches = []
        for i in range(12):
            x = torch.randn(self.sizes[i % 2], 8, generator=g)
            noise = 0.1 * torch.randn(len(x), generator=g)
            self.batches.append({"x": x, "y": x @ weight + 2 + 2 * (i % 2) + noise})

    def train_dataloader(self, *, epoch: int, **kwargs: Any) -> Any:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(epoch))
        return [self.batches[i] for i in order.tolist()]


class UnevenRegression(RegressionTask):
    """Regression on micro-batches of unequal sizes."""

    sizes = 6, 2

    def build_data(self) -> Any:
        return UnevenData(self.sizes, self.config.training.seed)


def measured_task() -> UnevenRegression:
    """The task on which the faults are measured."""
    settings: dict[str, Any] = {"learning_rate": 0.3, "warmup_steps": 4, "weight_decay": 0.3}
    return UnevenRegression(Config(optimization=OptimizationConfig(min_lr_ratio=0.0, **settings)))


def excess_loss(model: nn.Module, data: UnevenData) -> float:
    """How far the mean loss over all rows is above the best that is possible."""
    x = torch.cat([batch["x"] for batch in data.batches])
    y = torch.cat([batch["y"] for batch in data.batches])
    ones = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    best = ones @ torch.linalg.lstsq(ones, y[:, None]).solution[:, 0]
    with torch.no_grad():
        return ((model(x)[:, 0] - y).square().mean() - (best - y).square().mean()).item()


class Watched(UnevenRegression):
    """Notes the batches that it was given, and gradients, groups and rate of each step."""

    def __init__(self, config: Config, aux: float = 0.0):
        super().__init__(config)
        self.read: list[tuple[Batch, Batch]] = []
        self.steps: list[tuple[list[tuple[int, float, Any]], float]] = []
        self.aux = aux

    def train_step(self, model: Any, batch: Batch) -> StepOutput:
        self.read.append((batch, {n: p.detach().clone() for n, p in model.named_parameters()}))
        output = super().train_step(model, batch)
        return output._replace(aux_sum=self.aux * model.bias.sum() * output.num_targets)

    def validation_step(self, model: Any, batch: Batch) -> StepOutput:
        raise AssertionError(
            "train asks validation_step for the loss: in training it is train_step"
        )

    def note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        noted = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient = None if p.grad is None else p.grad.detach().clone().flatten()
                noted.append((p.numel(), group["weight_decay"], gradient))
        noted.sort(key=lambda item: -item[0])
        self.steps.append((noted, optimizer.param_groups[0]["lr"]))


def _watch(
    train: Answer, steps: int, accumulate: int, faults: Any, sizes: tuple[int, int], aux: float
) -> tuple[Watched, nn.Module]:
    """Run `train`, and check what holds with each fault: its batches, its steps, its start."""
    settings: dict[str, Any] = {"learning_rate": 0.25, "warmup_steps": 2, "weight_decay": 0.3}
    task = Watched(Config(optimization=OptimizationConfig(min_lr_ratio=0.0, **settings)), aux)
    task.sizes = sizes
    handle = register_optimizer_step_pre_hook(task.note)
    try:
        result = train(task, steps=steps, accumulate=accumulate, faults=faults)
    finally:
        handle.remove()
    assert isinstance(result, tuple) and len(result) == 2, (
        f"train returned {type(result).__name__}, expected (model, data)"
    )
    assert len(task.steps) == steps, f"the optimizer made {len(task.steps)} steps, expected {steps}"
    assert len(task.read) == steps * accumulate, (
        f"{len(task.read)} micro-batches were read, expected {steps} times {accumulate}"
    )
    data = task.build_data()
    data.setup()
    expected = chain.from_iterable(data.train_dataloader(epoch=epoch) for epoch in count())
    for number, ((batch, _), right) in enumerate(zip(task.read, expected, strict=False)):
        assert torch.equal(batch["x"], right["x"]), (
            f"micro-batch {number} of the run is not the loader's: read an epoch to its end, then"
            " the next one, `epoch` + 1"
        )
    torch.manual_seed(0)
    first = task.build_model(data)
    assert all(torch.equal(p, task.read[0][1][name]) for name, p in first.named_parameters()), (
        "the model begins with other weights than after torch.manual_seed(0): is the seed set,"
        " right before the model is built?"
    )
    return task, result[0]


def _replay(task: Watched, decays: list[float]) -> Tensor:
    """The weights and the bias after AdamW steps with the noted gradients and rates."""
    settings = task.config.optimization
    first = sorted(task.read[0][1].values(), key=lambda p: -p.numel())
    parameters: list[Tensor] = [nn.Parameter(p.flatten().clone()) for p in first]
    groups = [
        {"params": [p], "weight_decay": decay} for p, decay in zip(parameters, decays, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2))
    for noted, lr in task.steps:
        members = zip(parameters, optimizer.param_groups, noted, strict=True)
        for p, group, (_, _, gradient) in members:
            p.grad = gradient
            group["lr"] = lr
        optimizer.step()
    return torch.cat(parameters).detach()


def _gradient_of(batch: Batch, parameters: Batch, aux: float) -> Tensor:
    """The gradient of a batch's mean loss, 8 numbers for the weights and one for the bias."""
    off = batch["x"] @ parameters["weight"][0] + parameters["bias"] - batch["y"]
    mean = torch.cat([2 * off @ batch["x"], 2 * off.sum()[None]]) / len(off)
    return mean + aux * (torch.arange(9) == 8)


def _near(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, atol=1e-5, rtol=1e-4)


def _along(found: Tensor, wanted: Tensor) -> bool:
    return torch.cosine_similarity(found, wanted, dim=0).item() > 1 - 1e-6


def _check_right_gradient(
    found: Tensor, whole: Tensor, each: Tensor, plain: Tensor, accumulate: int
) -> None:
    """The gradient of the mean over all rows of the step: `whole`; `plain` lacks aux_sum."""
    if _near(found, whole):
        return
    assert accumulate == 1 or not _along(found, each[-1]), (
        "only the last micro-batch counts: who zeroes the gradients?"
    )
    assert _near(plain, whole) or not _near(found, plain), "aux_sum is left out"
    assert not _near(found, each.mean(0)), (
        "the gradient is a mean of means: divide once, by all targets of the step"
    )
    assert not _near(found, whole / accumulate), "the gradient is divided twice"
    ratio = float(found @ whole / (whole @ whole))
    assert not _along(found, whole), (
        f"the gradient is {ratio:.3g} times that of the mean loss: divide by the number of targets"
        " of the step, and clip nothing"
    )
    raise AssertionError(
        "the gradient is not that of the mean loss over all rows of the step: is anything left"
        " from before?"
    )


def _check_gradient(task: Watched, step: int, found: Tensor, accumulate: int, faults: Any) -> None:
    """The gradient of one step, right or with the faults that were asked for."""
    parts = task.read[step * accumulate : (step + 1) * accumulate]
    joined = {name: torch.cat([batch[name] for batch, _ in parts]) for name in ("x", "y")}
    here = parts[-1][1]
    each = torch.stack([_gradient_of(batch, here, task.aux) for batch, _ in parts])
    if "zero" in faults:
        assert _along(found, each[-1]), (
            "with the fault 'zero' only the gradient of the last micro-batch is left"
        )
        assert "means" not in faults or _near(found, each[-1] / accumulate), (
            "with the faults 'zero' and 'means' the gradient is the last micro-batch's mean over"
            f" {accumulate}"
        )
    elif "means" in faults:
        without = torch.stack([_gradient_of(batch, here, 0.0) for batch, _ in parts])
        assert not task.aux or not _near(found, without.mean(0)), (
            "with the fault 'means' aux_sum is left out: line 3 divides loss_sum + aux_sum"
        )
        assert _near(found, each.mean(0)), (
            "with the fault 'means' the gradient is the mean of the micro-batches' mean gradients"
        )
    else:
        whole = _gradient_of(joined, here, task.aux)
        _check_right_gradient(found, whole, each, _gradient_of(joined, here, 0.0), accumulate)


def _check_rate(task: Watched, step: int, lr: float, steps: int, moves: int) -> None:
    """The learning rate of one step; `moves` is how often the faulty schedule moves in it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.25)
    plan: Any = task.build_scheduler(optimizer, max_steps=steps).lr_lambdas[0]
    if moves:
        assert any(abs(lr - 0.25 * plan(moves * (step + late))) < 1e-6 for late in (0, 1)), (
            "with the fault 'schedule' the schedule moves once for each micro-batch"
        )
        return
    right = 0.25 * plan(step)
    assert abs(lr - right) < 1e-6, (
        f"step {step} has the learning rate {lr:.4f}, expected {right:.4f}: the schedule moves once"
        " for each optimizer step, after it, and is planned for optimizer steps"
    )


def check_train(
    train: Answer,
    steps: int,
    accumulate: int,
    faults: Any = (),
    sizes: tuple[int, int] = (6, 2),
    aux: float = 0.0,
) -> None:
    """All that must hold in each step of a run."""
    task, model = _watch(train, steps, accumulate, faults, sizes, aux)
    for step, (noted, lr) in enumerate(task.steps):
        with case(f"step {step}"):
            assert len(noted) == 2 and all(grad is not None for _, _, grad in noted), (
                "a parameter has no gradient"
            )
            found = torch.cat([gradient for _, _, gradient in noted])
            _check_gradient(task, step, found, accumulate, faults)
        decays = [decay for _, decay, _ in noted]
        if "group" in faults:
            assert decays == [0.3, 0.3], (
                f"with the fault 'group' weights and bias decay by 0.3, here {decays}"
            )
        else:
            assert decays == [0.3, 0.0], (
                f"weights decay by 0.3 and the bias does not, here {decays}: see"
                " task.build_optimizer"
            )
        _check_rate(task, step, lr, steps, accumulate if "schedule" in faults else 0)
    ordered = sorted(model.parameters(), key=lambda p: -p.numel())
    ends = torch.cat([p.detach().flatten() for p in ordered])
    off = (ends - _replay(task, decays)).abs().max().item()
    assert off < 1e-4, (
        f"gradients, decays and learning rates are right, and the weights end {off:.2g} away: is it"
        " AdamW, with beta1 and beta2 of the settings, in every step?"
    )


def task5_train(train: Answer) -> None:
    """Runs without a fault, with each, and with several."""
    with case("Task 5, no fault"):
        check_train(train, 2, 1)
        check_train(train, 5, 3)
        check_train(train, 2, 2, aux=0.5)
    for name in FAULTS:
        with case(f"Task 5, faults={[name]!r}"):
            check_train(train, 3, 2, [name])
    with case("Task 5, faults=['means'], with a balancing loss"):
        check_train(train, 2, 2, ["means"], aux=0.5)
    for faults in (["group", "means", "schedule"], ["zero", "means"]):
        with case(f"Task 5, faults={faults!r}, all of them at once"):
            check_train(train, 3, 3, faults)


def task5_excess(train: Answer, excess: Any) -> None:
    """The five measured numbers."""
    with case("Task 5, excess"):
        assert isinstance(excess, dict) and set(excess) == {"none", *FAULTS}, (
            f"excess is {excess!r}; expected a dictionary with the keys none and the four faults"
        )
        numbers = {name: expect_number(one, f"excess of {name}") for name, one in excess.items()}
        real = excess_loss(*train(measured_task(), steps=20, accumulate=2))
        # two decimals are enough
        assert abs(numbers["none"] - real) < 0.006, (
            f"excess of none is {numbers['none']:.4f}, but train without faults gives {real:.4f}"
        )
        for name in FAULTS:
            found = numbers[name]
            assert found > numbers["none"] + 0.01, (
                f"excess of {name} is {found:.4f}, not above none, {numbers['none']:.4f}: was this"
                " fault planted in this run?"
            )
            real = excess_loss(*train(measured_task(), steps=20, accumulate=2, faults=[name]))
            assert abs(found - real) < 0.006, (
                f"excess of {name} is {found:.4f}, but your train with faults={[name]!r} gives"
                f" {real:.4f}: was it measured?"
            )


# ---------------------------------------------------------------------- 6, two heads


class HolesData(BaseDataModule):
    """Rows with a label and a number, either of which may be unknown."""

    batch_size = 16

    def setup(self) -> None:
        self.train_dataset = HolesRows(0, 96)
        self.val_dataset = HolesRows(1, 32)


class HolesRows:
    """Feature vectors, classes and numbers, with holes."""

    def __init__(self, seed: int, size: int):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 3, generator=g)
        label = torch.randint(4, (size,), generator=g)
        self.label = label.masked_fill(torch.rand(size, generator=g) < 0.4, IGNORE_INDEX)
        unknown = torch.rand(size, generator=g) < 0.3
        self.number = self.x.sum(1).masked_fill(unknown, math.nan)

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> Batch:
        return {"x": self.x[indices], "label": self.label[indices], "number": self.number[indices]}


class TwoHeaded(nn.Module):
    """A body with a head for the class and one for the number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.classes = nn.Linear(8, 4)
        self.number = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))  # (B, 8)
        return self.classes(h), self.number(h)[:, 0]  # (B, 4), (B,)


def _heads(task_class: Answer) -> tuple[Any, TwoHeaded]:
    torch.manual_seed(1)
    task = task_class(Config())
    return task, task.build_model(None)


def heads_batch(
    labels: Sequence[int | None], numbers: Sequence[float | None], seed: int = 0
) -> Batch:
    """A batch with these labels and numbers, None where one is unknown."""
    x = torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(seed))
    label = torch.tensor([IGNORE_INDEX if one is None else one for one in labels])
    number = torch.tensor([math.nan if one is None else float(one) for one in numbers])
    return {"x": x, "label": label, "number": number}


def _check_loss(found: Any, costs: list[float], aux: float) -> None:
    """The sum and the count of the labels."""
    loss = expect_number(found.loss_sum, "loss_sum")
    n = found.num_targets
    assert isinstance(n, Tensor) and not n.is_floating_point(), (
        f"num_targets is {n!r}, expected an integer tensor"
    )
    assert n.item() == len(costs), (
        f"num_targets is {n.item()}, expected {len(costs)}: count the labels that are known"
    )
    assert not math.isnan(loss), "loss_sum is NaN: a sum over no label is 0"
    if abs(loss - sum(costs)) <= 1e-4:
        return
    assert not costs or abs(loss - sum(costs) / len(costs)) > 1e-4, (
        "loss_sum is a mean: the engine divides"
    )
    assert abs(loss - sum(costs) - aux) > 1e-4, (
        "loss_sum holds the error of the numbers: it belongs into aux_sum"
    )
    raise AssertionError(
        f"loss_sum is {loss:.4f}, expected {sum(costs):.4f}: the cross-entropy of the known"
        " labels, added up"
    )


def _check_aux(seen: float, errors: list[float], sizes: tuple[int, int], weight: float) -> None:
    """The auxiliary sum: `sizes` are the numbers of known labels and of rows."""
    known, rows = sizes
    mean = sum(errors) / len(errors) if errors else 0.0
    aux = weight * mean * known
    assert not math.isnan(seen), (
        "aux_sum is NaN: NaN times 0 is NaN, and a mean of nothing as well. Take out what is known"
        " first"
    )
    if abs(seen - aux) <= 1e-4:
        return
    slips = [  # two may give the same number: the first is the likelier one
        (
            weight * mean,
            "aux_sum is the weighted mean error itself: it will be divided by num_targets, so"
            " multiply it by num_targets",
        ),
        (
            weight * sum(errors),
            "aux_sum is the weighted *sum* of the errors: take their mean, then multiply it by"
            " num_targets",
        ),
        (
            aux * len(errors) / rows,
            "the mean error counts unknown numbers: divide by the known ones",
        ),
        (weight * mean * rows, "aux_sum is scaled by the rows, not by the known labels"),
        (mean * known, "is WEIGHT used?"),
        (
            0.5 * mean * known,
            f"WEIGHT is {weight:g} here, and 0.5 was used: read self.WEIGHT",
        ),
    ]
    for slip, words in slips:
        assert abs(seen - slip) > 1e-4, words
    raise AssertionError(
        f"aux_sum is {seen:.4f}, expected {aux:.4f} = WEIGHT * mean error of the known numbers *"
        " num_targets"
    )


def _check_gradients(found: StepOutput, model: TwoHeaded, *, number_learns: bool) -> None:
    """A gradient for each head, and no NaN in any."""
    assert isinstance(found.loss_sum, Tensor) and found.loss_sum.requires_grad, (
        "loss_sum has no gradient, and the engine refuses that: is it cut off from the model? A"
        " sum over no label is 0 and still hangs on the model"
    )
    torch.as_tensor(found.loss_sum + found.aux_sum).backward()
    for name, p in model.named_parameters():
        assert p.grad is None or not p.grad.isnan().any(), (
            f"the gradient of {name} is NaN: NaN must not enter the computation at all"
        )
    gradient = model.number.weight.grad
    assert not number_learns or (gradient is not None and gradient.abs().max() > 0), (
        "the number's head has no gradient"
    )


def check_heads(
    task_class: Any,
    labels: Sequence[int | None],
    numbers: Sequence[float | None],
    seed: int = 0,
    weight: float = 0.5,
) -> None:
    """The three numbers row by row, and no NaN in any gradient."""
    with (
        case(f"train_step, labels {list(labels)}, numbers {list(numbers)}, WEIGHT = {weight}"),
        patch.object(task_class, "WEIGHT", weight),
    ):
        task, model = _heads(task_class)
        batch = heads_batch(labels, numbers, seed)
        kept = {name: tensor.clone() for name, tensor in batch.items()}
        found = task.train_step(model, batch)
        assert isinstance(found, StepOutput), (
            f"it returned {type(found).__name__}, expected a StepOutput"
        )
        same = [torch.equal(batch[n].nan_to_num(7.0), kept[n].nan_to_num(7.0)) for n in kept]
        assert all(same), "the batch was changed"
        with torch.no_grad():
            logits, guesses = model(batch["x"])
        costs = [
            -logits[i].log_softmax(0)[one].item() for i, one in enumerate(labels) if one is not None
        ]
        off = [
            None if one is None else (g - one).item() ** 2
            for g, one in zip(guesses, numbers, strict=True)
        ]
        errors = [error for error in off if error is not None]
        mean = sum(errors) / len(errors) if errors else 0.0
        _check_loss(found, costs, weight * mean * len(costs))
        seen = expect_number(found.aux_sum, "aux_sum")
        others = [
            error for error, one in zip(off, numbers, strict=True) if error is not None and one
        ]
        without_zero = weight * sum(others) / len(others) * len(costs) if others else math.nan
        left_out = len(others) < len(errors) and abs(seen - without_zero) < 1e-4
        assert not left_out, "a number of exactly 0 is left out: it is known, only NaN is not"
        _check_aux(seen, errors, (len(costs), len(labels)), weight)
        _check_gradients(found, model, number_learns=bool(costs and errors and weight))


def task6_heads(task_class: Any) -> None:
    """Batches with and without holes, then validation and metrics."""
    with case("Task 6"):
        check_heads(task_class, [0, 3, 2], [1.0, -1.0, 0.5])
        check_heads(task_class, [0, None, 2, None], [1.0, None, 2.0, 3.0])
        check_heads(task_class, [0, 1, None], [0.0, None, 3.0], weight=2.0)
        check_heads(task_class, [0, 1], [None, None])
        check_heads(task_class, [None, None, None], [1.0, None, 2.0])
        task, model = _heads(task_class)
        batch = heads_batch([0, None, 2], [1.0, None, 2.0])
        with case("validation_step"):
            checked = task.validation_step(model, batch)
            trained = task.train_step(model, batch)
            assert isinstance(checked, StepOutput), (
                f"it returned {type(checked).__name__}, expected a StepOutput"
            )
            assert expect_number(checked.aux_sum, "aux_sum") == 0, (
                "aux_sum must be 0: what is reported is the loss of the labels"
            )
            assert torch.equal(checked.loss_sum, trained.loss_sum), (
                "the loss is not that of train_step"
            )
            assert checked.num_targets == trained.num_targets, "the count is not that of train_step"
        with case("metrics"):
            found = task.metrics(math.log(8), None)
            assert isinstance(found, dict) and set(found) == {"perplexity"}, (
                f"metrics gives {found!r}, expected a perplexity"
            )
            value = expect_number(found["perplexity"], "perplexity")
            assert abs(value - 8) < 1e-6, (
                f"the perplexity of a loss of ln 8 is 8, here {value:.4g}: the loss is in nats, so"
                " e to the loss"
            )


def hidden_heads(task_class: Any) -> None:
    """A batch cut into unequal parts, and another device."""
    task, model = _heads(task_class)
    data = task.build_data()
    data.setup()
    whole = data.train_dataset.__getitems__(list(range(40)))
    with case("a micro-batch cut into unequal parts"):
        cuts = [{n: t[rows] for n, t in whole.items()} for rows in (slice(0, 7), slice(7, 40))]
        one, other = (task.train_step(model, part) for part in cuts)
        full = task.train_step(model, whole)
        assert torch.allclose(full.loss_sum, one.loss_sum + other.loss_sum, rtol=1e-5), (
            "the sums of the parts are not the whole"
        )
        assert full.num_targets == one.num_targets + other.num_targets, (
            "the counts of the parts are not the whole"
        )
    with case("on another device"):
        # a tensor that is made without a device lands there, and the model's do not
        with torch.device("meta"):
            far = task.train_step(model, whole)
        assert far.num_targets.device == far.loss_sum.device, (
            "num_targets is on another device than the loss: make it from a tensor of the batch, or"
            " say device=..."
        )

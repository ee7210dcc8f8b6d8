"""The visible checks of exercise 04, normalization and linear layers: each says what is wrong with
an answer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llm_course.model.normalization import LayerNorm, RMSNorm
from llm_course.pages.checking import (
    Answer,
    Answers,
    case,
    expect,
    expect_kind,
    expect_number,
    forbid,
    written,
)

READY_NORMS = (
    F.layer_norm,
    torch.layer_norm,
    torch.native_layer_norm,
    F.rms_norm,
    torch.rms_norm,
    F.group_norm,
    torch.group_norm,
    F.instance_norm,
    torch.instance_norm,
    F.batch_norm,
    torch.batch_norm,
    LayerNorm.forward,
    RMSNorm.forward,
)
AUTOGRAD = (
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    torch.autograd.functional.jacobian,
    torch.autograd.functional.vjp,
    torch.autograd.functional.jvp,
    torch.func.vjp,
    torch.func.grad,
    torch.func.jacrev,
    torch.func.jacfwd,
    torch.func.jvp,
    torch.func.linearize,
    torch.autograd.forward_ad.make_dual,
)
Layer = Callable[[Tensor], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers of this shape, the same ones in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def untouched(answer: Answer, arguments: Sequence[Tensor], *more: Any, words: str) -> Any:
    """What the answer returns for these tensors; `words` if it changes one of them in place."""
    before = [argument.clone() for argument in arguments]
    result = answer(*arguments, *more)
    assert all(map(torch.equal, arguments, before)), words
    return result


def worst_error(actual: Tensor, exact: Tensor) -> float:
    """The largest relative error; numbers below 0.001 count as 0.001."""
    if not actual.numel():
        return 0.0
    off = (actual.double() - exact).abs() / exact.abs().clamp(min=1e-3)
    return float(off.max())


# ------------------------------------------------------------------------------------------- task 1

WEIGHT = (1, 2, 1, -1, 0)
BIAS = (0, 1, 1, 1, 1)


def check_by_hand(answers: Answers, *, x: Sequence[float]) -> None:
    """Task 1: both norms of the five numbers x, whose mean is 3 and whose mean square is 25."""
    with case("Task 1"):
        typed = {}
        for name, numbers in zip(
            ("by_rms", "by_layer"), written(answers, "by_rms", "by_layer"), strict=True
        ):
            typed[name] = _five_numbers(name, numbers)
        x5, w5, b5 = torch.tensor([x, WEIGHT, BIAS], dtype=torch.float64)
        for slip, wrong in _rms_slips(x5, w5, b5).items():
            assert not _nearly(typed["by_rms"], wrong), f"by_rms: {slip}"
        for slip, wrong in _layer_slips(x5, w5, b5).items():
            assert not _nearly(typed["by_layer"], wrong), f"by_layer: {slip}"
        right = {
            "by_rms": F.rms_norm(x5, (5,), w5, eps=0.0),
            "by_layer": F.layer_norm(x5, (5,), w5, b5, eps=0.0),
        }
        for name, expected in right.items():
            wrong_places = [i for i in range(5) if not _nearly(typed[name][i], expected[i])]
            first = wrong_places[0] if wrong_places else 0
            assert not wrong_places, (
                f"{name}: PyTorch gets something else at place"
                f" {', '.join(str(i + 1) for i in wrong_places)} of 1 to 5. At place {first + 1}, x"
                f" is {x5[first]:g} and the weight {w5[first]:g}; you typed"
                f" {typed[name][first]:.3g}: check the division and the sign"
            )


def _five_numbers(name: str, numbers: Any) -> Tensor:
    try:
        typed = torch.as_tensor(numbers, dtype=torch.float64).flatten()
    except Exception:
        raise AssertionError(f"{name} is {numbers!r}, expected a list of five numbers") from None
    assert len(typed) == 5, f"{name} has {len(typed)} numbers, expected five"
    return typed


def _nearly(numbers: Tensor, other: Tensor) -> bool:
    return torch.allclose(numbers, other, atol=6e-3, rtol=0)


def _rms_slips(x: Tensor, w: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {
        "you left out the weight": x / 5,
        "you divided by the length, the root of the sum of the squares; take the root of their"
        " mean": x / 125**0.5 * w,
        "you divided by the mean square 25; its root is missing": x / 25 * w,
        "you subtracted the mean; RMSNorm does not": (x - 3) / 5 * w,
        "this is LayerNorm without its bias": (x - 3) / 4 * w,
        "you added the bias; RMSNorm has none": x / 5 * w + b,
        "these are the numbers of the other norm": (x - 3) / 4 * w + b,
        "you divided the squares by C - 1 = 4; RMSNorm divides by C = 5 too": (
            x / (125 / 4) ** 0.5 * w
        ),
    }


def _layer_slips(x: Tensor, w: Tensor, b: Tensor) -> dict[str, Tensor]:
    centred = (x - 3) / 4
    slipped = x - 21 / 5
    return {
        "you left out weight and bias": centred,
        "you left out the bias": centred * w,
        "you left out the weight": centred + b,
        "the bias comes after the weight, so the weight does not multiply it": (centred + b) * w,
        "you divided the squares by C - 1 = 4; these five numbers are all there is, so divide by"
        " 5": (x - 3) / 20**0.5 * w + b,
        "you divided by the variance 16; its root is missing": (x - 3) / 16 * w + b,
        "you divided by the RMS of x itself; take the RMS of the differences from the mean": (
            (x - 3) / 5 * w + b
        ),
        "you did not subtract the mean before the division": x / 4 * w + b,
        "LayerNorm subtracts the mean before it squares and divides; you divided x itself": (
            x / 5 * w + b
        ),
        "these are the numbers of the other norm": x / 5 * w,
        "the mean of the five numbers is 3: one of them is negative": (
            slipped / slipped.pow(2).mean().sqrt() * w + b
        ),
    }


# ------------------------------------------------------------------------------------------- task 2

CHANGED = "your function changes its argument in place: work on a new tensor"
BUGS = ("epsilon", "order", "variance")


def check_mended(mended: Answer) -> None:
    """Task 2: the layer norm without its three bugs."""
    with case("Task 2, mended_layer_norm"):
        x = normal(3, 5)
        w = torch.linspace(0.5, 2, 5)
        b = torch.linspace(-1, 1, 5)
        one = torch.ones(5)
        none = torch.zeros(5)
        with forbid(*READY_NORMS):
            untouched(mended, (x, w, b), 1e-5, words=CHANGED)
            plain = mended(x, one, none, 1e-5)
            weighed = mended(x, w, b, 1e-5)
            tiny = mended(x * 1e-3, one, none, 1e-5)
            shifted = mended(x + 3, one, none, 1e-5)
        _check_plain(plain, x)
        expect(
            shifted,
            F.layer_norm(x + 3, (5,)),
            "an input with the mean 3 comes out wrong: is the mean subtracted?",
            atol=1e-4,
        )
        _check_tiny(tiny, x)
        expect(
            weighed,
            F.layer_norm(x, (5,), w, b),
            "with weight and bias the output is wrong: normalise, then times the weight, then plus"
            " the bias",
        )


def _check_plain(plain: Any, x: Tensor) -> None:
    """With weight 1 and bias 0, on normal numbers."""
    expect_kind(plain, x)
    scale = (plain.pow(2).mean() / F.layer_norm(x, (5,)).pow(2).mean()).sqrt().item()
    assert abs(scale - 0.8**0.5) > 0.01, (
        "for C = 5 the output is too small by the root of 4 / 5: `std` and `var` divide by C - 1"
        " unless you ask them not to"
    )
    assert abs(scale - 5**-0.5) > 0.01, (
        "for C = 5 the output is too small by the root of 5: divide by the root of the mean of the"
        " squares, not of their sum"
    )
    expect(
        plain,
        F.layer_norm(x, (5,)),
        f"with weight 1 and bias 0, row 0 has the mean {plain[0].mean():.3f} and the RMS"
        f" {plain[0].pow(2).mean().sqrt():.3f}, expected 0 and 1: is the variance taken around the"
        " mean, both over the last dimension, and epsilon added inside the root?",
    )


def _check_tiny(tiny: Tensor, x: Tensor) -> None:
    """On numbers of size 0.001, where epsilon counts."""
    right = F.layer_norm(x * 1e-3, (5,))
    size = tiny.pow(2).mean().sqrt().item()
    assert size < 0.9, (
        f"numbers of size 0.001 come out with an RMS of {size:.2f}, expected"
        f" {right.pow(2).mean().sqrt():.2f}: epsilon belongs inside the root, beside the variance"
    )
    expect(tiny, right, "numbers of size 0.001 come out wrong: which epsilon, and where?")


def check_seen_by(answers: Answers) -> None:
    """Task 2: which test sees which bug."""
    with case("Task 2, seen_by"):
        [seen_by] = written(answers, "seen_by")
        assert isinstance(seen_by, dict) and set(seen_by) == set("ABCD"), (
            'seen_by needs the keys "A", "B", "C" and "D"'
        )
        for test, bugs in seen_by.items():
            assert isinstance(bugs, set | frozenset | list | tuple) and set(bugs) <= set(BUGS), (
                f'seen_by["{test}"] is {bugs!r}, expected a set with some of {list(BUGS)}, or set()'
            )
        for test, size, C in (("A", 1, 4096), ("B", 1, 4), ("C", 1e-3, 4096), ("D", 1, 4096)):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(8, C, generator=generator) * size
            w = torch.ones(C)
            b = torch.zeros(C)
            if test == "D":
                w, b = torch.randn(2, C, generator=generator)
            right = F.layer_norm(x, (C,), w, b)
            for bug in BUGS:
                y = _norm_with_bug(bug, x, w, b)
                is_seen = not torch.allclose(y, right, atol=1e-3, rtol=1e-3)
                assert is_seen == (bug in seen_by[test]), (
                    f'seen_by["{test}"]: the bug "{bug}" alone changes the output there by up to'
                    f" {(y - right).abs().max():.2g}, and the tolerance is 0.001 plus 0.001 times"
                    " the number. Does this test see it, and why?"
                )


def _norm_with_bug(bug: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance = x.var(-1, keepdim=True, correction=int(bug == "variance"))
    root = variance.sqrt() + 1e-5 if bug == "epsilon" else (variance + 1e-5).sqrt()
    normed = (x - x.mean(-1, keepdim=True)) / root
    return (normed + b) * w if bug == "order" else normed * w + b


# ------------------------------------------------------------------------------------------- task 3


def layer_rms(r: float, eps: float) -> float:
    """The RMS of what the package's layer makes of a vector with the RMS r, in float64."""
    x = torch.tensor([-1.4, -0.2, 0.2, 1.4], dtype=torch.float64) * r
    return float(RMSNorm(4, eps=eps).double()(x).pow(2).mean().sqrt())


def check_input_rms(input_rms: Answer) -> None:
    """Task 3: the vector that comes out with a given RMS."""
    with case("Task 3, input_rms"):
        for share, eps in ((0.5, 1e-6), (0.9, 1e-6), (0.5, 1e-5)):
            r = expect_number(input_rms(share, eps), f"input_rms({share}, {eps})")
            assert r > 0, f"input_rms({share}, {eps}) = {r}, but an RMS is positive"
            assert abs(r / (share * eps / (1 - share)) - 1) > 1e-3, (
                f"input_rms({share}, {eps}) = {r:.3g} is right for an epsilon outside the root;"
                " ours is added to the mean square"
            )
            found = layer_rms(r, eps)
            is_right = abs(found - share) < 1e-3
            assert is_right or abs(r / (share**2 * eps / (1 - share**2)) - 1) > 1e-3, (
                f"input_rms({share}, {eps}) = {r:.3g} is the mean square; its root is missing"
            )
            assert is_right, (
                f"input_rms({share}, {eps}) = {r:.3g}: a vector of that RMS comes out with"
                f" {found:.4f}, not with {share}. Solve share = r / sqrt(r * r + eps) for r"
            )


def check_wrong_eps_factor(wrong_eps_factor: Answer) -> None:
    """Task 3: what a wrong epsilon does to the output."""
    with case("Task 3, wrong_eps_factor"):
        for r, trained, loaded in ((0.003, 1e-5, 1e-6), (0.001, 1e-6, 1e-5), (1.0, 1e-5, 1e-6)):
            factor = expect_number(wrong_eps_factor(r, trained, loaded), "the factor")
            real = layer_rms(r, loaded) / layer_rms(r, trained)
            name = f"wrong_eps_factor({r}, {trained}, {loaded}) = {factor:.4g}"
            assert abs(real - 1) < 2e-3 or abs(factor * real - 1) > 1e-3, (
                f"{name} is upside down: a larger epsilon makes the output smaller; divide the"
                " output with `loaded` by the output with `trained`"
            )
            assert abs(real - 1) < 2e-3 or abs(factor / real**2 - 1) > 1e-3, (
                f"{name} is the square of the factor: a root is missing"
            )
            assert abs(factor / real - 1) < 1e-3, (
                f"{name}, but the layer's two outputs have the ratio {real:.4g}"
            )


# ------------------------------------------------------------------------------------------- task 4

CHANGES: Mapping[str, Layer] = {
    "a": lambda x: x * 10,
    "b": lambda x: x + 5,
    "c": lambda x: -x,
    "d": lambda x: x[[3, 1, 2, 0]],
    "e": lambda x: x * 3 - 2,
}


def check_ignores(answers: Answers) -> None:
    """Task 4: which changes of a vector each norm can't see."""
    with case("Task 4, rms_ignores and layer_ignores"):
        rms_ignores, layer_ignores = written(answers, "rms_ignores", "layer_ignores")
        x = torch.tensor([1.0, 4.0, -2.0, 3.0]).double()
        w = torch.tensor([1.0, 2.0, -1.0, 0.5]).double()
        norms: dict[str, tuple[Any, Layer]] = {
            "rms_ignores": (rms_ignores, lambda x: F.rms_norm(x, (4,), w, 0.0)),
            "layer_ignores": (layer_ignores, lambda x: F.layer_norm(x, (4,), w, None, 0.0)),
        }
        for name, (typed, norm) in norms.items():
            is_set = isinstance(typed, set | frozenset | list | tuple | str)
            assert is_set and set(typed) <= set(CHANGES), (
                f"{name} is {typed!r}, expected a set of letters from a to e"
            )
            for letter, change in CHANGES.items():
                is_ignored = torch.allclose(norm(change(x)), norm(x))
                assert is_ignored == (letter in typed), (
                    f'{name}: try "{letter}" on (1, 4, -2, 3): the output'
                    f" {'stays' if is_ignored else 'changes'}"
                )


def by_autograd(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> Tensor:
    """The gradient of RMSNorm by autograd, from PyTorch's own norm."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(F.rms_norm(x, x.shape[-1:], weight, eps), x, grad)[0]


def check_backward(rms_backward: Answer) -> None:
    """Task 4: the gradient of RMSNorm."""
    with case("Task 4, rms_backward"):
        _check_two_numbers(rms_backward)
        x, grad = normal(2, 3, 5)
        w = torch.linspace(0.5, 2, 5)
        one = torch.ones(5)
        words = "your function changes one of its arguments in place: work on new tensors"
        with forbid(*AUTOGRAD):
            weighed = untouched(rms_backward, (x, w, grad), 1e-6, words=words)
            unweighed = rms_backward(x, one, grad, 1e-6)
            small = rms_backward(x * 1e-3, w, grad, 1e-5)
        expect(
            unweighed,
            by_autograd(x, one, grad, 1e-6),
            "with weights of 1 three rows of five numbers differ from autograd: each row has its"
            " own r and its own mean, over the last dimension",
        )
        expect(
            weighed,
            by_autograd(x, w, grad, 1e-6),
            "with weights other than 1 it differs from autograd: the weight multiplies grad before"
            " anything else, also inside the mean",
        )
        expect(
            small / 1e3,
            by_autograd(x * 1e-3, w, grad, 1e-5) / 1e3,
            "for numbers of size 0.001 and eps=1e-5 it differs from autograd: where does epsilon"
            " enter, and is y / weight = x / r still used in both places?",
        )


def _check_two_numbers(rms_backward: Answer) -> None:
    """The page's example, x = (1, 7)."""
    x = torch.tensor([[1.0, 7.0]])
    up = torch.tensor([[0.0, 1.0]])
    with forbid(*AUTOGRAD):
        by_hand = rms_backward(x, torch.ones(2), up, 0.0)
    expect_kind(by_hand, x)
    found = [round(number, 3) for number in by_hand[0].tolist()]
    assert found != [0.0, 0.2], (
        "for x = (1, 7) you return (0, 0.2), grad / r: that treats r as a constant, but r depends"
        " on every number of x"
    )
    along = (by_hand * x).sum().item()
    assert abs(along) < 1e-4, (
        f"for x = (1, 7) and grad = (0, 1) you return {tuple(found)}: times x it is {along:.2f},"
        " but the gradient is at a right angle to x, because a longer x gives the same output"
    )
    assert found == [-0.028, 0.004], (
        f"for x = (1, 7) and grad = (0, 1) you return {tuple(found)}, expected (-0.028, 0.004): the"
        " direction may be right, is it divided by r = 5 once?"
    )


# ------------------------------------------------------------------------------------------- task 5


def half_draft(number: float) -> float:
    """What a draft in float16 makes of a vector of equal numbers."""
    x = torch.full((4,), float(number), dtype=torch.float16)
    return float((x / x.pow(2).mean().sqrt())[0])


def check_half_numbers(answers: Answers) -> None:
    """Task 5: from where on float16 loses a vector, and what a sum in bfloat16 gets wrong."""
    with case("Task 5, lost_from and bf16_factor"):
        lost_from, bf16_factor = written(answers, "lost_from", "bf16_factor")
        lost = expect_number(lost_from, "lost_from")
        up = expect_number(bf16_factor, "bf16_factor")
        assert 0 < lost < math.inf and lost == 2.0 ** round(math.log2(lost)), (
            f"lost_from = {lost:g} is no power of two"
        )
        assert lost < 2**15.5, (
            f"lost_from = {lost:g}: float16 cannot hold that number itself; what happens to its"
            " square?"
        )
        assert half_draft(lost) == 0, (
            f"lost_from: the draft turns {lost:g} into {half_draft(lost):g}, not zeros: are the"
            " squares too large?"
        )
        assert half_draft(lost / 2) != 0, (
            f"lost_from: {lost / 2:g}s are lost already; the squares overflow, long before the"
            " numbers"
        )
        _check_stalled_sum(up)


def _check_stalled_sum(up: float) -> None:
    """By what the output is too large where 1024 ones are added up in bfloat16."""
    total = torch.tensor(0.0, dtype=torch.bfloat16)
    for _ in range(1024):
        total = total + 1
    factor = (1024 / total.float()).sqrt().item()
    assert abs(up * factor - 1) > 1e-3, (
        "bf16_factor is upside down: a sum that is too small makes the output too large"
    )
    assert abs(up - factor**2) > 1e-3, (
        f"bf16_factor: the mean square is too small by the factor {up:g}. The output goes with its"
        " root"
    )
    assert abs(up - 1) > 1e-3, (
        "bf16_factor: 8 significant binary digits cannot count to 1024 in ones; where do they stop?"
    )
    assert abs(up - factor) < 1e-3, (
        f"bf16_factor = {up:g}: the running sum stands still at some number; divide it by 1024 and"
        " take the root. By which factor is that too small?"
    )


def exact_sum_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of x + residual, in float64."""
    return F.rms_norm(x.double() + residual.double(), x.shape[-1:], weight.double(), eps)


def check_add_and_norm(add_and_norm: Answer) -> None:
    """Task 5: the norm of a sum, in all four types."""
    with case("Task 5, add_and_norm in float32"):
        _check_float32(add_and_norm)
    with case("Task 5, add_and_norm in float16"):
        _check_float16(add_and_norm)
    with case("Task 5, add_and_norm in bfloat16"):
        generator = torch.Generator().manual_seed(1)
        x, residual = torch.randn(2, 64, 256, generator=generator).bfloat16()
        w = (torch.rand(256, generator=generator) + 0.5).bfloat16()
        y = add_and_norm(x, residual, w)
        expect_kind(y, x)
        worst = worst_error(y, exact_sum_norm(x, residual, w))
        assert worst < 1.05 * 2**-8, (
            f"the worst relative error is {worst:.4f}; one rounding to bfloat16 errs by at most"
            " 0.0039. Are the sum, and the product with the weight, computed before the rounding?"
        )
    with case("Task 5, add_and_norm in float64"):
        generator = torch.Generator().manual_seed(0)
        x, residual = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
        w = torch.linspace(0.5, 2, 5)
        y = add_and_norm(x, residual, w)
        expect_kind(y, x)
        off = (y - exact_sum_norm(x, residual, w)).abs().max().item()
        assert off < 1e-12, (
            f"a float64 input is off by {off:.0e}, as if float32 had been inside: widen to float32"
            " *at least*"
        )


def _check_float32(add_and_norm: Answer) -> None:
    x, residual = normal(2, 2, 3, 5)
    w = torch.linspace(0.5, 2, 5)
    one = torch.ones(5)
    words = (
        "your function changes one of its arguments in place: in float32 `.to` copies nothing, so"
        " write a + b, not a += b"
    )
    y = untouched(add_and_norm, (x, residual, w), words=words)
    slips = {
        "you normalise x and add after; here the sum is normalised": (
            F.rms_norm(x, (5,), w, 1e-6) + residual
        ),
        "the weight is left out": exact_sum_norm(x, residual, one).float(),
        "you subtracted the mean; RMSNorm does not": F.layer_norm(x + residual, (5,), w, eps=1e-6),
    }
    right = exact_sum_norm(x, residual, w).float()
    expect(y, right, "not the RMSNorm of x + residual, times the weight", slips.items())
    leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
    learning = add_and_norm(*leaves, w)
    assert learning.requires_grad, (
        "no gradient can pass: is there a no_grad, a detach or a .data on the way?"
    )
    learning.pow(3).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves), (
        "a gradient reaches only one of x and residual"
    )
    small = x * 1e-3, residual * 1e-3, w, 1e-4
    expect(
        add_and_norm(*small),
        exact_sum_norm(*small).float(),
        "small numbers with eps=1e-4 come out wrong: is the argument eps used, inside the root?",
    )


def _check_float16(add_and_norm: Answer) -> None:
    big = torch.tensor([[40000.0, -20000.0, 30000.0, 1000.0]]).half()
    w = torch.ones(4)
    hundreds = add_and_norm(big / 100, torch.zeros_like(big), w)
    expect_kind(hundreds, big)
    assert hundreds.abs().max() > 0, (
        "numbers of size 400 come out as zeros: their squares overflow in float16"
    )
    y = add_and_norm(big, big, w)
    assert not y.isnan().any() and y.abs().max() > 0, (
        f"40000 + 40000 gives {[round(n, 2) for n in y[0].tolist()]}: the sum overflows in float16,"
        " before any square. Widen both first"
    )
    expect(
        y,
        exact_sum_norm(big, big, w).half(),
        "40000 + 40000 in float16 comes out wrong: nothing may be cut off or rounded before the"
        " norm",
        rtol=2e-3,
    )


# ------------------------------------------------------------------------------------------- task 6


def one_leaks(x: Tensor, i: int) -> Tensor:
    """x with coordinate i of every token replaced by its sum over all tokens."""
    leaked = x[..., i : i + 1].sum((0, 1), True).expand(*x.shape[:2], 1)
    return torch.cat((x[..., :i], leaked, x[..., i + 1 :]), -1)


def _batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x)


Layers = Mapping[str, tuple[Layer, str]]  # a layer, and which outputs move
LAYERS: Layers = {
    "a layer without any norm": (lambda x: 2 * x, "itself"),
    "RMSNorm": (lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6), "itself"),
    "LayerNorm": (lambda x: F.layer_norm(x, x.shape[-1:]), "itself"),
    "BatchNorm in training": (_batch_norm, "all"),
    "a running sum over the positions": (lambda x: x.cumsum(1), "later"),
    "a small leak to the other tokens of a text": (
        lambda x: x + 1e-3 * (x.mean(1, keepdim=True) - x),
        "text",
    ),
    "a layer one of whose numbers leaks": (lambda x: one_leaks(x, x.shape[-1] // 2), "all"),
}


def check_moved(
    moved: Answer,
    B: int,
    T: int,
    b: int,
    t: int,
    *,
    C: int = 6,
    layers: Layers = LAYERS,
    token: float | None = None,
) -> None:
    """Task 6: which outputs move when token t of text b changes, for several layers.

    `token` is what the token holds; None is random numbers.
    """
    x = normal(B, T, C, seed=10 * B + T)
    if token is not None:
        x[b, t] = token
    before = x.clone()
    for name, (layer, kind) in layers.items():
        inputs: list[Tensor] = []

        def spy(z: Tensor, layer: Layer = layer, inputs: list[Tensor] = inputs) -> Tensor:
            inputs.append(z.detach().clone())
            return layer(z)

        torch.manual_seed(B + T)
        table = moved(spy, x, b, t)
        assert torch.equal(x, before), "x has changed after the call: change a copy, x.clone()"
        assert any(torch.equal(z, before) for z in inputs), (
            f"{name}: the layer never got x itself; run it on x and on a changed copy of x"
        )
        right = torch.zeros(B, T, dtype=torch.bool)
        right[_moving(kind, b, t)] = True
        _check_kind_of_table(table, right)
        has_norm = name in ("RMSNorm", "LayerNorm")
        assert table.any() or (token is None and not has_norm), (
            f"{name}: no output moves, not even that of the token that changed"
            f"{'' if token is None else f' from {token}s'}. Your change is one that this layer"
            " does not see: a multiple of the token, a shift of all its numbers, or none"
        )
        _check_table(name, table, right, b, t)


def _moving(kind: str, b: int, t: int) -> Any:
    """An index of the outputs that move."""
    return {"itself": (b, t), "all": slice(None), "later": (b, slice(t, None)), "text": b}[kind]


def _check_kind_of_table(table: Any, right: Tensor) -> None:
    if isinstance(table, Tensor) and table.shape == right.shape and table.dtype != torch.bool:
        raise AssertionError(
            f"the dtype is {table.dtype}, expected torch.bool: True and False, not 1 and 0"
        )
    expect_kind(table, right)


def _check_table(name: str, table: Tensor, right: Tensor, b: int, t: int) -> None:
    count = int(right.sum())
    assert not torch.equal(table, ~right), (
        f"{name}: your table says just the opposite; True is for the outputs that differ"
    )
    found = table.nonzero().tolist()
    assert len(found) != count or torch.equal(table, right), (
        f"{name}: the output of token {t} of text {b} moves, but your table has text"
        f" {found[0][0]}, token {found[0][1]}: which index is the text?"
    )
    assert not (right & ~table).any(), (
        f"{name}: {count} outputs move when token {t} of text {b} changes, but you found only"
        f" {len(found)}. Is the tolerance too coarse, or do you look at a part of the numbers only,"
        " or change a part of them only?"
    )
    assert not (table & ~right).any(), (
        f"{name}: {count} of {right.numel()} outputs move when token {t} of text {b} changes, but"
        f" you found {len(found)}. Do you change one token only, and compare with the same x?"
    )


def group_layer(
    group_norm: Answer, C: int, groups: int, *, eps: float = 1e-6, seed: int = 0
) -> tuple[Any, Tensor]:
    """The student's layer with random weights, and the weights."""
    layer = group_norm(C, groups, eps=eps)
    assert isinstance(layer, RMSNorm), (
        "GroupRMSNorm is no subclass of RMSNorm: write class GroupRMSNorm(RMSNorm)"
    )
    sizes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert sizes == {"weight": (C,)}, (
        f"the parameters are {sizes}, expected one weight of {C} numbers, as RMSNorm has it"
    )
    with torch.no_grad():
        layer.weight.copy_(torch.rand(C, generator=torch.Generator().manual_seed(seed)) + 0.5)
    return layer, layer.weight.detach()


def by_group(x: Tensor, weight: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """Group after group, in float64."""
    parts = x.double().chunk(groups, dim=-1)
    normed = [F.rms_norm(part, part.shape[-1:], eps=eps) for part in parts]
    return torch.cat(normed, dim=-1) * weight.double()


def check_group_norm(answers: Answers) -> None:
    """Task 6: RMSNorm of each group of neighbours."""
    with case("Task 6, GroupRMSNorm"), torch.no_grad():
        assert "GroupRMSNorm" in answers, (
            "write the class GroupRMSNorm in the cell above and run it"
        )
        group_norm = answers["GroupRMSNorm"]
        x = normal(2, 4, 6) * torch.tensor([1.0, 1.0, 5.0, 5.0, 0.2, 0.2])
        layer, w = group_layer(group_norm, 6, 3)
        y = untouched(layer, (x,), words="x has changed after the call: work on a new tensor")
        _check_groups(y, x, w)
        changed = x.clone()
        changed[..., 4:] = normal(2, 4, 2, seed=1)
        assert torch.equal(layer(changed)[..., :4], y[..., :4]), (
            "the last group changes, and others move: a leak between groups"
        )
        half = (x * 300).half()
        expect_kind(layer(half), half)
        expect(
            layer(half),
            by_group(half, w, 3).half(),
            "float16 numbers in the hundreds come out wrong: widen before you square",
            rtol=2e-3,
        )
        tiny, w = group_layer(group_norm, 6, 3, eps=1e-4)
        expect(
            tiny(x * 1e-2),
            by_group(x * 1e-2, w, 3, 1e-4).float(),
            "small numbers with eps=1e-4 come out wrong: is eps passed on?",
        )
        _check_refusal(group_norm)


def _check_groups(y: Any, x: Tensor, w: Tensor) -> None:
    """Six numbers in three groups."""
    right = by_group(x, w, 3).float()
    apart = by_group(x.unflatten(-1, (2, 3)).mT.flatten(-2), torch.ones(6), 3)
    slips = {
        "this is RMSNorm of the whole vector: each group needs its own root": F.rms_norm(
            x, (6,), w, 1e-6
        ),
        "`groups` is the number of the groups, not their size": by_group(x, w, 2).float(),
        "a group holds neighbours, the numbers 0 and 1, then 2 and 3; yours are 0 and 3, then 1"
        " and 4": apart.unflatten(-1, (3, 2)).mT.flatten(-2).float() * w,
        "the weight is left out": by_group(x, torch.ones(6), 3).float(),
        "each group is divided by its length: take the root of the mean of the squares, not of"
        " their sum": right / 2**0.5,
        "you subtracted the mean of each group; RMSNorm does not": (
            F.layer_norm(x.unflatten(-1, (3, 2)), (2,), eps=1e-6).flatten(-2) * w
        ),
    }
    expect(
        y,
        right,
        "C = 6 in 3 groups differ from RMSNorm of each pair of neighbours, times the weight",
        slips.items(),
    )


def _check_refusal(group_norm: Answer) -> None:
    """Six numbers do not make four groups."""
    try:
        group_norm(6, 4)
        words = None
    except ValueError as error:
        words = str(error)
    assert words is not None, (
        "GroupRMSNorm(6, 4) is accepted, but 6 numbers do not make 4 equal groups: raise a"
        " ValueError"
    )
    assert "6" in words and "4" in words, (
        f"the ValueError says {words!r}: name both numbers, 6 and 4"
    )


# ------------------------------------------------------------------------------------------- task 7


def product_intensity(n: int, ins: int, outs: int, width: int) -> float:
    """Operations a byte of a linear layer."""
    return 2 * n * ins * outs / (width * (ins * outs + n * ins + n * outs))


def check_waits_for(waits_for: Answer) -> None:
    """Task 7: what a layer waits for."""
    with case("Task 7, waits_for"):
        for n, ins, outs, width, ridge in ((1, 1024, 1024, 4, 4.0), (4096, 1024, 1024, 2, 100.0)):
            found = waits_for(n, ins, outs, width, ridge)
            assert found in ("memory", "arithmetic"), (
                f'waits_for returns {found!r}, expected "memory" or "arithmetic"'
            )
        for n, ins, outs, width, ridge, words in (
            (1, 1024, 1024, 4, 4.0, "one row has half an operation a byte"),
            (4096, 1024, 1024, 2, 100.0, "thousands of rows have hundreds of operations a byte"),
            (6, 1000, 1000, 4, 2.5, "count two operations for each weight and row"),
            (400, 1024, 1024, 2, 295.0, "inputs and outputs are bytes, too"),
            (8, 512, 2048, 2, 6.0, "a number has 2 bytes here, not 4"),
            (300, 64, 4096, 2, 59.0, "the outputs are bytes, too: n F numbers"),
        ):
            intensity = product_intensity(n, ins, outs, width)
            right = "memory" if intensity < ridge else "arithmetic"
            assert waits_for(n, ins, outs, width, ridge) == right, (
                f"waits_for({n}, {ins}, {outs}, {width}, {ridge}): it's {intensity:.2f} operations"
                f" a byte there, so it waits for {right}: {words}"
            )


def check_most_tokens(most_tokens: Answer) -> None:
    """Task 7: how many tokens a second a model can write at most."""
    with case("Task 7, most_tokens"):
        alone = expect_number(most_tokens(100e6, 4, 1e12, 20e9, 1), "most_tokens")
        assert abs(alone - 200) > 1e-3, (
            "100 million weights are 400 million bytes in float32: 20 billion bytes a second read"
            " them less often than 200 times"
        )
        assert abs(alone - 50) < 1e-6 * 50, (
            f"100 million weights in float32, 20 GB a second and one user: you get {alone:g}, but"
            " 0.4 GB are read for each token, which makes 50"
        )
        many = expect_number(most_tokens(100e6, 4, 1e12, 20e9, 2), "most_tokens")
        assert abs(many - 50) > 1e-3, (
            "with two users, both get a token for one reading of the weights: 100 in a second"
        )
        assert abs(many - 100) < 1e-3, f"with two users there are 100 tokens a second, not {many:g}"
        full = expect_number(most_tokens(100e6, 4, 30e9, 20e9, 64), "most_tokens")
        assert abs(full - 3200) > 1e-3, (
            "64 users: 3200 tokens a second would take 640 billion operations, and the machine has"
            " 30: the slower of the two limits decides"
        )
        assert abs(full - 300) > 1e-3, (
            "64 users: a weight costs a multiplication *and* an addition for each token"
        )
        assert abs(full - 150) < 1e-3, (
            f"64 users: 30 billion operations, at 200 million for each token, make 150 tokens a"
            f" second, not {full:g}"
        )

"""What the checkers of the exercises share: reading an answer, and saying what is wrong with it."""

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

Answer = Callable[..., Any]  # a function or class that a student wrote
Answers = Mapping[str, Any]  # the names of the notebook: `globals()`


@contextmanager
def case(name: str) -> Iterator[None]:
    """Say in which case a check failed, also if the student's code raised an error of its own."""
    try:
        yield
    except Exception as error:
        if isinstance(error, AssertionError) and _is_from_test(error):
            raise AssertionError(f"{name}: {error}") from None
        if isinstance(error, NameError) and _is_from_test(error):
            words = f"{name}: there is no {error.name} yet: run the cell in which you write it"
            raise AssertionError(words) from error
        words = f": {error}" if str(error) else ""
        raise AssertionError(f"{name}: your code raised {type(error).__name__}{words}") from error


def _is_from_test(error: Exception) -> bool:
    """Whether a checker or the test cell itself raised it: a student's cell is another file."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # files[0] is that of `case`, which the error passes through, and files[1] that of the test
    return files[-1] == files[1] or Path(files[-1]).parent == Path(__file__).parent


@contextmanager
def explained(kind: type[Exception] | tuple[type[Exception], ...], reason: str) -> Iterator[None]:
    """Give the likely reason of an error that the student's code raises in a `case`."""
    try:
        yield
    except AssertionError as error:
        if isinstance(error.__cause__, kind):
            raise AssertionError(f"{error}: {reason}") from error.__cause__
        raise


@contextmanager
def forbid(*ready_made: Any) -> Iterator[None]:
    """Refuse calls of these functions, of the methods of these classes and of everything in these
    modules, whatever name they were imported under.
    """
    modules = tuple(f"{one.__name__}." for one in ready_made if isinstance(one, ModuleType))
    codes = set().union(*map(_codes, ready_made))

    def watch(frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        refused = None
        if event == "c_call" and any(called is one for one in ready_made):
            refused = called.__qualname__
        elif event == "call" and (code in codes or _is_inside(frame, modules)):
            refused = code.co_qualname
        if refused:
            raise AssertionError(
                f"your code calls the ready-made {refused}; in this task you write it yourself"
            )

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


def _codes(thing: Any) -> set[Any]:
    """What runs when it is called: the code of a function, or of all methods of a class."""
    if isinstance(thing, type):
        return set().union(*map(_codes, vars(thing).values()))
    code = getattr(inspect.unwrap(thing), "__code__", None)
    return {code} - {None}


def _is_inside(frame: FrameType, modules: tuple[str, ...]) -> bool:
    """Whether a function of these modules runs; importing one of them is no call."""
    name = f"{frame.f_globals.get('__name__', '')}."
    return name.startswith(modules) and frame.f_code.co_name != "<module>"


def written(answers: Answers, *names: str) -> list[Any]:
    """The values of these names; say which of them the student hasn't defined."""
    missing = [name for name in names if name not in answers]
    assert not missing, f"type {', '.join(missing)} into the cell above and run it"
    return [answers[name] for name in names]


def expect_number(value: Any, name: str) -> float:
    """A float from a number of Python's or NumPy's, or from a tensor that holds one."""
    try:
        assert not isinstance(value, str | bool)
        return float(value)
    except (AssertionError, RuntimeError, TypeError, ValueError):
        kind = type(value).__name__
        kind = f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
        if shape := getattr(value, "shape", ()):
            kind += f" of the shape {tuple(shape)}"
        hint = ": does the function return its result?" if value is None else ""
        raise AssertionError(f"{name} is {kind}, expected a number{hint}") from None


def expect_plain_number(value: Any, name: str) -> float:
    """A number of Python's or NumPy's: a tensor would keep its device, and perhaps its graph."""
    if isinstance(value, Tensor):
        graph = ", and with it the graph of its computation" if value.requires_grad else ""
        raise AssertionError(f"{name} is a tensor{graph}: give a Python number, by .item()")
    return expect_number(value, name)


def expect_kind(actual: Any, expected: Tensor) -> None:
    """Compare type, shape and dtype."""
    assert isinstance(actual, Tensor), (
        f"expected a tensor, got {type(actual).__name__}: does the function return its result?"
    )
    assert actual.shape == expected.shape, (
        f"the shape is {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    assert actual.dtype == expected.dtype, (
        f"the dtype is {actual.dtype}, expected {expected.dtype}, that of the input"
    )


def same(actual: Tensor, expected: Tensor, *, rtol: float = 1e-4, atol: float = 1e-5) -> bool:
    """Whether two tensors have the same shape and, within these tolerances, the same numbers."""
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol, atol)


def expect(
    actual: Any,
    expected: Tensor,
    message: str,
    slips: Iterable[tuple[str, Tensor]] = (),
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Compare type, shape, dtype and numbers; `message` says what to look at when only the numbers
    differ. `slips` are pairs of words and of the tensor that this slip gives.
    """
    expect_kind(actual, expected)
    assert not actual.isnan().any(), (
        f"{int(actual.isnan().sum())} of {actual.numel()} numbers are NaN: {message}"
    )
    for words, wrong in slips:
        is_slip = same(actual, wrong, rtol=rtol, atol=atol)
        assert not is_slip or same(wrong, expected, rtol=rtol, atol=atol), words
    off = (actual - expected).abs()
    assert same(actual, expected, rtol=rtol, atol=atol), (
        f"{message} (largest difference {off.max():.2g})"
    )


def is_close(found: Any, expected: float, *, within: float = 1e-6) -> bool:
    """Whether `found` is this number, up to a relative error."""
    try:
        return math.isclose(float(found), expected, rel_tol=within, abs_tol=1e-9)
    except (TypeError, ValueError):
        return False


def frozen(value: Any) -> Any:
    """A value with all tensors inside turned into lists, to be compared with `==`."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: frozen(part) for name, part in value.items()}
    return [frozen(part) for part in value] if isinstance(value, list | tuple) else value

"""What the checkers of the exercises share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def case(name: str) -> Iterator[None]:
    """Say in which case a check failed, also if the student's code raised an error of its own."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None
    except Exception as error:
        raise AssertionError(f"{name}: your code raised {type(error).__name__}: {error}") from error


def number(value: Any, name: str) -> float:
    """A float from a Python or NumPy number, or from a tensor that holds one."""
    assert value is not None, f"{name} is None: does the function return its result?"
    good = isinstance(value, int | float) or (
        getattr(value, "shape", None) == () and hasattr(value, "item")
    )
    assert good, f"{name} should be one number, but it is {type(value).__name__}" + (
        f" of the shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    )
    return float(value)


def written(answers: dict[str, Any], *names: str) -> None:
    """Refuse a cell that doesn't define all these names."""
    missing = [name for name in names if name not in answers]
    assert not missing, f"type {', '.join(missing)} into the cell above and run it"


def frozen(value: Any) -> Any:
    """A value with all tensors inside turned into lists, to be compared with `==`."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: frozen(part) for name, part in value.items()}
    return [frozen(part) for part in value] if isinstance(value, list | tuple) else value

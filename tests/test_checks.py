"""Bad arguments are refused in one line that names the value, the rule and the way out."""

import dataclasses
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm_course.checks import (
    bounded,
    check_choice,
    check_columns,
    check_dtype,
    check_fields,
    check_lists,
    check_numbers,
    check_shape,
    check_sizes,
    fits_type,
    in_range,
    plain,
    range_in_words,
    type_in_words,
)

# ---------------------------------------------------------------- sizes


@given(st.lists(st.integers(1, 10**30), max_size=5))
def test_sizes_come_back_in_order(sizes):
    named = {f"size_{place}": size for place, size in enumerate(sizes)}
    assert check_sizes(**named) == tuple(sizes)


def test_sizes_become_plain_ints():
    (size,) = check_sizes(size=np.int64(3))
    assert size == 3 and type(size) is int
    assert check_sizes(0, size=0) == (0,)
    assert check_sizes(-5, size=-5) == (-5,)


@pytest.mark.parametrize("bad", [0, -1, 2.0, math.nan, True, False, None, "3", [3], np.bool_(True)])
def test_what_is_no_size_is_named(bad):
    message = f"size={bad!r} must be a whole number of at least 1: give an int"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_sizes(fine=1, size=bad)


def test_the_first_bad_size_is_named():
    with pytest.raises(ValueError, match="^second=0 "):
        check_sizes(first=1, second=0, third=-1)


# ---------------------------------------------------------------- ranges

ENDS = st.sampled_from(["-inf", "-1.5", "-1", "0", "0.5", "1", "7", "inf"])


@given(ENDS, ENDS, st.sampled_from("[("), st.sampled_from("])"), st.floats(allow_nan=False) | ENDS)
def test_a_range_is_what_its_brackets_say(low, high, opening, closing, value):
    value = float(value)
    above = value > float(low) or (opening == "[" and value == float(low))
    below = value < float(high) or (closing == "]" and value == float(high))
    assert in_range(value, f"{opening}{low}, {high}{closing}") is (above and below)


@pytest.mark.parametrize("bad", [math.nan, None, True, False, "0.5", [0.5], 1j])
def test_what_is_no_real_number_is_in_no_range(bad):
    assert not in_range(bad, "[-inf, inf]")


@pytest.mark.parametrize("fine", [0.5, 1, np.float32(0.5), np.int64(1), Fraction(1, 2), 10**300])
def test_every_kind_of_real_number_counts(fine):
    assert in_range(fine, "(0, inf)")


def test_whole_numbers_are_compared_without_rounding():
    assert not in_range(2**53 + 1, f"[0, {2**53}]")


@pytest.mark.parametrize(
    "interval, words",
    [
        ("[0, 1)", "at least 0 and below 1"),
        ("(0, 1]", "above 0 and at most 1"),
        ("[0, inf)", "finite and not negative"),
        ("(0, inf)", "positive and finite"),
        ("[2, inf)", "finite and at least 2"),
        ("(2, inf)", "finite and above 2"),
    ],
)
def test_ranges_in_words(interval, words):
    assert range_in_words(interval) == words
    with pytest.raises(ValueError, match=f"^rate=-1 must be {words}$"):
        check_numbers(interval, rate=-1)


def test_a_hint_follows_the_rule():
    check_numbers("[0, 1)", a=0, b=0.5)
    with pytest.raises(ValueError, match="^b=1 must be at least 0 and below 1: try 0.1$"):
        check_numbers("[0, 1)", hint="try 0.1", a=0, b=1)


# ---------------------------------------------------------------- choices


@pytest.mark.parametrize("bad", ["Adam", "", None, 1, ["adam"]])
def test_what_is_no_choice_is_named_with_the_choices(bad):
    message = f"optimizer={bad!r} is unknown: choose one of 'adam', 'sgd', or name a class"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_choice(["adam", "sgd"], hint=", or name a class", optimizer=bad)
    check_choice(["adam", "sgd"], optimizer="sgd")


# ---------------------------------------------------------------- tensors


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_a_shape_fits_itself_and_any_size(shape, data):
    x = torch.empty(shape)
    check_shape("x", x, shape)
    masked = [data.draw(st.sampled_from([size, None])) for size in shape]
    check_shape("x", x, masked)
    cut = data.draw(st.integers(0, len(shape)))
    check_shape("x", x, [..., *shape[cut:]])


@pytest.mark.parametrize(
    "expected, rule",
    [
        ((2, 4), "(2, 4)"),
        ((2, 3, None), "(2, 3, *)"),
        ((3,), "(3)"),
        ((..., 4), "(..., 4)"),
        ((..., 1, 2, 3), "(..., 1, 2, 3)"),
        ((), "()"),
    ],
)
def test_another_shape_is_shown_beside_the_rule(expected, rule):
    message = f"x has shape (2, 3), expected {rule} = (B, C)"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_shape("x", torch.empty(2, 3), expected, "(B, C)")


def test_arrays_have_shapes_too():
    check_shape("x", np.zeros((2, 3)), (2, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_types(dtype):
    check_dtype("x", torch.zeros(1, dtype=dtype), "floating")
    with pytest.raises(ValueError, match="expected int64 or int32.*with .long()"):
        check_dtype("x", torch.zeros(1, dtype=dtype), "integer")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_types(dtype):
    check_dtype("x", torch.zeros(1, dtype=dtype), "integer")
    with pytest.raises(ValueError, match="expected a floating-point type.*with .float()"):
        check_dtype("x", torch.zeros(1, dtype=dtype), "floating")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16])
def test_small_integers_and_flags_are_no_indices(dtype):
    with pytest.raises(ValueError, match=f"x has dtype {dtype}, expected int64 or int32"):
        check_dtype("x", torch.zeros(1, dtype=dtype), "integer")


@pytest.mark.parametrize("bad", [[1.0], 1.0, None, np.zeros(2)])
@pytest.mark.parametrize("kind", ["floating", "integer"])
def test_what_is_no_tensor_is_named_by_its_type(bad, kind):
    with pytest.raises(ValueError, match=f"x is a {type(bad).__name__}, expected a tensor"):
        check_dtype("x", bad, kind)


# ---------------------------------------------------------------- fields of a dataclass

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("aß😀")
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner), max_leaves=8
)


@given(TREES)
def test_plain_values_stay_as_they_are(tree):
    try:
        assert plain(tree) == tree
    except OverflowError:
        assert "inf" not in str(tree)  # an integer that is too large for a float


def test_values_become_plain():
    given = [np.float32(0.5), np.int64(3), Path("a") / "b", (1, 2), {"a": (np.int8(1),)}]
    found = plain(given)
    assert found == [0.5, 3, str(Path("a/b")), [1, 2], {"a": [1]}]
    assert [type(value) for value in found[:3]] == [float, int, str]
    assert plain(True) is True
    with pytest.raises(OverflowError):
        plain(10**400)
    with pytest.raises(UnicodeEncodeError):
        plain("\ud800")


@pytest.mark.parametrize(
    "kind, words, fine, bad",
    [
        (int, "a whole number", [0, -3], [1.0, True, "1", None]),
        (float, "a number", [0, 0.5], [True, "1", None]),
        (bool, "true or false", [True, False], [0, 1, "true"]),
        (str, "a string", ["", "a"], [1, None]),
        (int | None, "a whole number or null", [1, None], [1.5, "a"]),
        (Literal["a", "b"], "a or b", ["a"], ["c", None, 1]),
        (list[str], "a list of strings", [[], ["a"]], ["a", [1], None]),
        (list[int], "a list of a whole number", [[1]], [[1.5], 1]),
        (Path, "a Path", [Path("a")], ["a"]),
    ],
)
def test_types(kind, words, fine, bad):
    assert type_in_words(kind) == words
    assert all(fits_type(value, kind) for value in fine)
    assert not any(fits_type(value, kind) for value in bad)


@dataclasses.dataclass
class Inner:
    rate: float = bounded(0.5, "(0, 1]")
    size: int | None = bounded(None, "[1, inf)")

    def __post_init__(self):
        check_fields(self, "outer.inner")


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str = "a"
    inner: Inner = dataclasses.field(default_factory=Inner)
    maybe: Inner | None = None

    def __post_init__(self):
        check_fields(self)


def test_fields_become_plain_and_mappings_become_their_class():
    outer = Outer(name=Path("a"), inner={"rate": np.float64(1), "size": np.int64(2)}, maybe=None)
    assert outer == Outer("a", Inner(1.0, 2), None)
    assert type(outer.inner.rate) is float and type(outer.inner.size) is int
    assert Outer(maybe={}).maybe == Inner()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Outer(name=1), "name=1 must be a string"),
        (lambda: Outer(inner=3), "inner=3 must be a Inner"),
        (lambda: Outer(inner={"rat": 1}), "inner={'rat': 1}: .*unexpected keyword argument 'rat'"),
        (lambda: Outer(inner={"rate": 0}), "outer.inner.rate=0 must be above 0 and at most 1"),
        (lambda: Inner(rate="1"), "outer.inner.rate='1' must be a number"),
        (lambda: Inner(size=0), "outer.inner.size=0 must be finite and at least 1"),
        (lambda: Inner(rate=10**400), "outer.inner.rate: int too large"),
        (lambda: Outer(name="\ud800"), "name: .*surrogates not allowed"),
    ],
)
def test_the_first_bad_field_is_named_by_its_path(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


# ---------------------------------------------------------------- lists and what is no tensor


@pytest.mark.parametrize("bad", ["a.txt", b"a.txt", Path("a.txt"), None, 5])
def test_what_is_no_list_is_named(bad):
    with pytest.raises(ValueError, match="files=.* must be a list"):
        check_lists(steps=["nfc"], files=bad)
    check_lists(files=[], steps=("nfc",), more=iter(["a"]))


@pytest.mark.parametrize("bad", [None, [1.0], 1.0, "x"])
def test_what_has_no_shape_is_named(bad):
    with pytest.raises(ValueError, match=f"x is a {type(bad).__name__}, expected a tensor"):
        check_shape("x", bad, (None,))


def test_a_number_beyond_every_float_is_in_no_range():
    assert not in_range(10**400, "[0, inf)") and in_range(10**300, "[0, inf)")
    with pytest.raises(ValueError, match="must be positive and finite"):
        check_numbers("(0, inf)", rate=10**400)


def test_a_changing_size_is_compared_under_compile():
    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def double(x):
        check_shape("x", x, (None, 4), "(B, C)")
        return 2 * x

    for rows in (2, 3, 5):
        assert torch.equal(double(torch.ones(rows, 4)), torch.full((rows, 4), 2.0))


@pytest.mark.parametrize(
    "column",
    [[1, 0, 2], (True, False, 2.0), np.array([1, 0, 2], np.uint8), torch.tensor([1, 0, 2])],
)
def test_columns_of_any_kind_become_floats(column):
    assert check_columns(marks=column) == ([1.0, 0.0, 2.0],)
    assert check_columns(a=column, b=[np.float32(0.5), np.True_, 7]) == (
        [1.0, 0.0, 2.0],
        [0.5, 1.0, 7.0],
    )


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, "b=None must be a list"),
        ("abc", "b='abc' must be a list"),
        (3.0, "b=3.0 must be a list"),
        ([1, math.nan], r"b\[1\]=nan must be a finite number: drop it"),
        ([math.inf, 1], r"b\[0\]=inf must be"),
        ([1, "2"], r"b\[1\]='2' must be"),
        ([None, 2], r"b\[0\]=None must be"),
        (np.ones((2, 2)), r"b\[0\]=\[1.0, 1.0\] must be"),
        ([1], "differ in length: a has 2, b has 1"),
    ],
)
def test_a_bad_column_is_named(column, message):
    with pytest.raises(ValueError, match=message):
        check_columns(a=[1, 2], b=column, hint="drop it")

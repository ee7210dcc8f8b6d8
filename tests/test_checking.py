"""What the checkers of the exercises share: what is refused, and what a student is told."""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F

from llm_course.model import masks, sampling
from llm_course.model.generation import generate
from llm_course.model.mlp import MLP
from llm_course.pages import checking
from llm_course.pages.checking import (
    case,
    expect,
    expect_number,
    expect_plain_number,
    forbid,
    written,
)
from llm_course.text.bpe import learn_merges

PAGES = Path(checking.__file__).parent


@dataclass
class Point:
    x: int

    @staticmethod
    def origin():
        return Point(0)


def mlp():
    return MLP(hidden_size=4, intermediate_size=8)


@pytest.mark.parametrize(
    "ready_made, call, name",
    [
        (learn_merges, lambda: learn_merges({}, num_merges=0), "learn_merges"),
        (
            generate,
            lambda: generate(None, torch.zeros(0), max_new_tokens=1),
            "generate",
        ),  # decorated
        (torch.rms_norm, lambda: torch.rms_norm(torch.ones(2), (2,)), "rms_norm"),  # of C
        (F.layer_norm, lambda: F.layer_norm(torch.ones(2), (2,)), "layer_norm"),
        (MLP.forward, lambda: mlp()(torch.ones(4)), "MLP.forward"),
        (MLP, mlp, "MLP.__init__"),
        (Point, lambda: Point(1), "__init__"),  # written by @dataclass
        (Point, Point.origin, "Point.origin"),
        (sampling, lambda: sampling.keep_top_k(torch.ones(1, 2), 1), "keep_top_k"),
    ],
)
def test_a_ready_made_call_is_refused(ready_made, call, name):
    with pytest.raises(AssertionError, match=f"calls the ready-made .*{name}; in this task"):
        with forbid(masks, ready_made):
            call()
    assert sys.getprofile() is None


def test_what_is_not_forbidden_runs():
    with forbid(learn_merges, generate, torch.rms_norm, MLP.forward, masks):
        with torch.no_grad():  # `generate` has the same decorator as many others
            mlp()
        sampling.keep_top_k(torch.ones(1, 2), 1)
        __import__("llm_course.model.masks")


def test_an_outer_refusal_holds_after_an_inner_one():
    with pytest.raises(AssertionError, match="MLP"), forbid(MLP):
        with forbid(generate):
            pass
        mlp()


@pytest.mark.parametrize(
    "value, words",
    [
        (None, "n is a NoneType, expected a number: does the function return its result?"),
        ("3", "n is a str, expected a number"),
        (True, "n is a bool, expected a number"),
        ([3], "n is a list, expected a number"),
        (torch.ones(2, 3), "n is a Tensor of the shape (2, 3), expected a number"),
    ],
)
def test_what_is_no_number_is_named(value, words):
    with pytest.raises(AssertionError, match=f"^{re.escape(words)}$"):
        expect_number(value, "n")
    assert expect_number(torch.ones(1), "n") == expect_number(1, "n") == 1.0


def test_a_tensor_is_no_plain_number():
    for value, words in (
        (torch.ones(()), "n is a tensor: give a Python number, by .item()"),
        (
            torch.ones((), requires_grad=True),
            "n is a tensor, and with it the graph of its computation: give a Python number",
        ),
        (None, "n is a NoneType, expected a number"),
        (True, "n is a bool, expected a number"),
    ):
        with pytest.raises(AssertionError, match=f"^{re.escape(words)}"):
            expect_plain_number(value, "n")
    assert expect_plain_number(numpy.float32(1), "n") == expect_plain_number(1, "n") == 1.0


def test_a_tensor_is_compared_and_a_slip_named():
    right = torch.arange(3.0)
    for wrong, words in (
        (None, "got NoneType: does the function return its result"),
        (right[None], r"the shape is \(1, 3\), expected \(3,\)"),
        (right.double(), "the dtype is torch.float64, expected torch.float32"),
        (right * torch.nan, "3 of 3 numbers are NaN: add them"),
        (right * 2, "doubled"),
        (right + 1, r"add them \(largest difference 1\)"),
    ):
        with pytest.raises(AssertionError, match=words):
            expect(wrong, right, "add them", [("doubled", right * 2), ("never", right)])
    expect(right + 1e-6, right, "add them", [("never", right)])


def test_what_is_not_written_is_named():
    assert written({"a": 1, "b": 2}, "b", "a") == [2, 1]
    with pytest.raises(AssertionError, match="^Task 1: type b, c into the cell above and run it$"):
        with case("Task 1"):
            written({"a": 1}, "a", "b", "c")


def test_an_assert_of_the_students_is_not_taken_for_a_test():
    """Each cell of a notebook is a file of its own."""
    cell: dict = {"case": case}
    exec(compile("def answer(n):\n    assert n > 2, 'n is small'", "answer", "exec"), cell)
    exec(compile("def bare():\n    assert False", "bare", "exec"), cell)
    test = "with case('Task 1'):\n    answer(3)\n    assert answer(3) == 3, 'expected 3'"
    with pytest.raises(AssertionError, match="^Task 1: expected 3$"):
        exec(compile(test, "test", "exec"), cell)
    for call, words in (
        ("answer(1)", "AssertionError: n is small"),
        ("bare()", "AssertionError"),
        ("int('')", "ValueError: invalid literal for int.. with base 10: ''"),
        ("Cache", None),
    ):
        words = f"your code raised {words}" if words else "there is no Cache yet: run the cell .*"
        with pytest.raises(AssertionError, match=f"^Task 1: {words}$"):
            exec(compile(f"with case('Task 1'):\n    {call}", "test", "exec"), cell)
    with pytest.raises(AssertionError, match="^Task 1: Part 2: n is a NoneType, expected a number"):
        with case("Task 1"), case("Part 2"):
            expect_number(None, "n")


@pytest.mark.parametrize("path", sorted(PAGES.glob("exercise_*.py")), ids=lambda path: path.stem)
def test_a_checker_does_not_repeat_what_is_shared(path):
    shared, own = (
        {node.name for node in ast.parse(p.read_text()).body if isinstance(node, ast.FunctionDef)}
        for p in (Path(checking.__file__), path)
    )
    assert not shared & own

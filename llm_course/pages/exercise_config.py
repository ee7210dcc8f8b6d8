"""The checks of exercise 12, configuration: each says what is wrong with an answer."""

import argparse
import contextlib
import difflib
import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from itertools import pairwise
from numbers import Integral
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from llm_course.model.config import ModelConfig
from llm_course.pages.checking import Answer, Answers, case, explained, written
from llm_course.training.config import DataConfig
from llm_course.training.sources import KEY_TYPES, SECTIONS, StrictLoader, load_config

Tree = dict[str, dict[str, Any]]


def refusal_of(call: Callable[[], Any], what: str) -> str:
    """The words of the ValueError that `call()` raises."""
    try:
        found = call()
    except ValueError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(
            f"{what}: raised {type(error).__name__} ({error}), expected a ValueError"
        ) from None
    shown = repr(found) if len(repr(found)) < 60 else f"{repr(found)[:56]} ..."
    raise AssertionError(f"{what}: was taken, expected a ValueError; it gave {shown}")


@contextmanager
def folder_with(files: Mapping[str, str]) -> Iterator[None]:
    """Be in a fresh folder that holds these texts as files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
        yield


# ---------------------------------------------------------------------------- 1, what arrives

LINES = {
    "a": ("optimization.learning_rate", "5e-4"),
    "b": ("training.max_steps", "1e3"),
    "c": ("training.max_steps", '"7"'),
    "d": ("training.max_steps", "7.0"),
    "e": ("training.compile", "yes"),
    "f": ("data.corpus", "no"),
    "g": ("data.corpus", "'no'"),
    "h": ("checkpoint.best_metric", "'null'"),
    "i": ("training.batch_size", "010"),
    "j": ("training.max_steps", "1_000"),
    "k": ("data.text_field", "2024"),
    "l": ("optimization.weight_decay", "0"),
}
WHY_IN_YAML = {
    "a": "a number with an exponent needs a point in YAML 1.1",
    "b": "a number with an exponent needs a point, and its exponent a sign",
    "e": "yes is an answer, not a word",
    "f": "no is an answer, not a word",
    "i": "a leading zero means base 8",
    "j": "underscores between digits are allowed",
}
WHY_IT_ARRIVES = {
    "a": (
        "the annotation is float, and the loader makes a number of it, whether YAML calls it text"
        " or not"
    ),
    "b": (
        "1e3 is a number for the loader, but a float: only whole numbers fit, and 1000.0 is"
        " refused like 7.5"
    ),
    "c": (
        "the annotation wants a whole number, and the loader reads one from the text; YAML alone"
        " would leave it a text"
    ),
    "d": "7.0 is a float, and a float is refused as a rule: 7.5 steps make no sense",
    "e": "YAML reads yes as True, and the annotation is bool",
    "f": "for YAML no is False, and False is no text",
    "g": "in quotes it is the text, two letters and nothing else",
    "h": (
        "the loader reads the word null as nothing, with quotes or without, where the annotation"
        " allows it"
    ),
    "i": (
        "it is 8 for YAML, and the loader refuses whole numbers in base 8: nobody writes them on"
        " purpose"
    ),
    "j": "an underscore between digits changes nothing",
    "k": "it is a whole number for YAML, and a text field takes texts only: it wants quotes",
    "l": "a whole number is a number too, so it fits float",
}


def read(key: str, text: str) -> Any:
    """What load_config makes of one key in a file."""
    section, _, name = key.partition(".")
    with folder_with({"run.yaml": f"{section}: {{{name}: {text}}}"}):
        try:
            config, _ = load_config(["--config", "run.yaml"], use_environment=False)
        except ValueError:
            return "refused"
    return attrgetter(key)(config)


def equal(one: Any, other: Any, kind: Any) -> bool:
    """Whether two values are the same, type included; in a float field 0 is 0.0."""
    numbers = kind is float and not isinstance(one, bool) and isinstance(one, int | float)
    return one == other and (numbers or type(one) is type(other))


def _check_letters(name: str, typed: Any, wanted: str) -> None:
    assert isinstance(typed, dict), (
        f"{name} is a {type(typed).__name__}, expected a dictionary with letters as keys"
    )
    assert set(typed) == set(wanted), (
        f"{name} has the keys {', '.join(map(str, sorted(typed, key=str)))}; expected"
        f" {', '.join(wanted)}"
    )


def task1_arrives(answers: Answers) -> None:
    """The two dictionaries that were typed."""
    with case("Task 1"):
        arrives, by_pyyaml = written(answers, "arrives", "by_pyyaml")
        _check_letters("arrives", arrives, "abcdefghijkl")
        _check_letters("by_pyyaml", by_pyyaml, "abefij")
        for letter, typed in by_pyyaml.items():
            text = LINES[letter][1]
            real = yaml.safe_load(text)
            assert equal(typed, real, type(real)), (
                f"by_pyyaml, {letter}: you say {typed!r} for {text}, PyYAML has another view:"
                f" {WHY_IN_YAML[letter]}"
            )
        for letter, (key, text) in LINES.items():
            typed = arrives[letter]
            real = read(key, text)
            right = equal(typed, real, KEY_TYPES[key])
            refused = isinstance(typed, str) and typed.strip().lower() == "refused"
            assert right or not refused or real != "refused", (
                f'{letter}: type the text "refused", in small letters'
            )
            assert right or typed != real, (
                f"{letter}, {key}: {text} arrives, but as a {type(real).__name__}; you typed the"
                f" {type(typed).__name__} {typed!r}"
            )
            assert right, f"{letter}, {key}: {text}, you say {typed!r}: {WHY_IT_ARRIVES[letter]}"


# ---------------------------------------------------------------------------- 2, a section

NAN = float("nan")
TAKEN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"weight": 1, "teacher": "runs/a"}, "weight=1 is in [0, 1]: both ends count"),
    ({"weight": 0.5, "teacher": "runs/a", "layers": [0, 3]}, "a good section"),
    (
        {"layers": [99]},
        "layer 99 may exist: the section does not know the model, so that rule stands in the tree",
    ),
    (
        {"teacher": "runs/default"},
        "the section does not know run_dir, so that rule stands in the tree",
    ),
)
NAN_IS_FALSE = "every comparison with nan is False: say what is allowed, and refuse the rest"
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": NAN}, NAN_IS_FALSE),
    ({"temperature": math.inf}, "inf is no temperature: positive and finite"),
    ({"temperature": 0}, "0 is not positive"),
    ({"temperature": True}, "True is no number: does check_fields run first?"),
    ({"temperature": "2"}, "a text is no number: does check_fields run first?"),
    ({"every": 0}, "0 is not positive"),
    ({"every": 1.5}, "half a step makes no sense: does check_fields run first?"),
    ({"layers": [1, 0, 1]}, "the number 1 stands twice"),
    ({"layers": [2, -1]}, "-1 is no layer"),
    ({"layers": [-1, 2]}, "-1 is no layer"),
    ({"layers": [1.0]}, "1.0 is no whole number"),
    ({"weight": NAN, "teacher": "a"}, NAN_IS_FALSE),
    ({"weight": 1.01, "teacher": "a"}, "1.01 is above 1"),
    ({"weight": -0.1, "teacher": "a"}, "-0.1 is below 0"),
)


def check_words(
    call: Callable[[], Any], path: str, value: Any, others: Sequence[str], what: str
) -> None:
    """What a refusal must say."""
    words = refusal_of(call, what)
    assert words.startswith(f"distillation.{path}"), (
        f"{what}: the message must begin with distillation.{path}; it says: {words}"
    )
    assert str(value) in words, f"{what}: the message must hold the value {value}; it says: {words}"
    for other in others:
        assert other in words, (
            f"{what}: the message must name {other}, the other half of the rule; it says: {words}"
        )
    assert not others or ": " in words, (
        f"{what}: the message must end in a way out after a colon; it says: {words}"
    )


def check_refused(make: Answer, given: Mapping[str, Any], why: str = "") -> None:
    """One section that has to be refused."""
    path, value = next(iter(given.items()))
    what = f"DistillationConfig({path}={value!r})" + (f", {why}" if why else "")
    check_words(lambda: make(**given), path, value, [], what)


def task2_section(make: Answer) -> None:
    """The section: what it takes, what it refuses, and what it makes plain."""
    with case("Task 2, the section"):
        default = {"temperature": 1.0, "weight": 0.0, "every": 1, "layers": [], "teacher": None}
        assert make() == make(**default), "DistillationConfig() does not give the defaults"
        for given, why in TAKEN:
            try:
                make(**given)
            except Exception as error:
                raise AssertionError(f"{given} was refused ({error}), but {why}") from None
        for given, why in REFUSED:
            check_refused(make, given, why)
        what = "a weight above 0 without a teacher"
        needed = ["distillation.teacher"]
        check_words(lambda: make(weight=0.7), "weight", 0.7, needed, what)
        teacher = Path("runs") / "a"
        plain = make(temperature=np.float32(2), layers=(0, np.int64(2)), teacher=teacher)
        try:
            yaml.safe_dump(asdict(plain))
        except yaml.YAMLError:
            raise AssertionError(
                f"{plain} cannot be saved as YAML: check_fields makes every value plain"
            ) from None
        mine = [0]
        kept = make(layers=mine)
        mine.append(7)
        assert kept.layers == [0], (
            "the section shares its list with the caller: who appends to the list changes the"
            " section"
        )


def task2_tree(make: Answer, whole: Answer) -> None:
    """The rules that only the whole knows."""
    with case("Task 2, the tree"):
        with case("DistilledConfig(), which has no layers"):
            default = whole()
        assert default.training.max_steps == 1000, (
            "DistilledConfig() has no length, but Config gives 1000 steps where none is given: does"
            " super().__post_init__() run?"
        )
        what = "a row longer than the model's positions"
        words = refusal_of(lambda: whole(data=DataConfig(sequence_length=10**6)), what)
        assert "sequence_length" in words, f"{what}: the message is about something else: {words}"
        reason = "Config's __post_init__ makes a section of it, so it must run first"
        with explained(AttributeError, reason), case("a dictionary in place of the section"):
            made = whole(distillation={"layers": [0]}).distillation
        assert made == make(layers=[0]), (
            f"a dictionary in place of the section gave {made!r}: Config makes the section of it,"
            " if its __post_init__ runs first"
        )
        what = "the number 7 in place of the section"
        words = refusal_of(lambda: whole(distillation=7), what)
        assert words.startswith("distillation="), (
            f"{what}: the message is about something else: {words}"
        )
        _check_clashes(make, whole)


def _check_clashes(make: Answer, whole: Answer) -> None:
    four = ModelConfig(num_layers=4)
    whole(model=four, distillation=make(layers=[3, 0]))

    def with_layers(layers: list[int]) -> Callable[[], Any]:
        return lambda: whole(model=four, distillation=make(layers=layers))

    for wrong in ([4], [9, 1], [1, 9]):
        what = f"layers {wrong} of a model with layers 0 to 3"
        check_words(with_layers(wrong), "layers", wrong, ["model.num_layers"], what)

    def own_teacher() -> Any:
        return whole(run_dir="runs/a", distillation=make(teacher="runs/a"))

    what = "a teacher in the folder that this run writes"
    check_words(own_teacher, "teacher", "runs/a", ["run_dir"], what)
    with case("the teacher runs/a of a run that writes runs/ab, which is another folder"):
        whole(run_dir="runs/ab", distillation=make(teacher="runs/a"))


def task2_copy(answers: Answers, with_teacher: Answer) -> None:
    """The copy that shares nothing that was changed."""
    make, whole = written(answers, "DistillationConfig", "DistilledConfig")
    with case("Task 2, the copy"):
        section = make(teacher="runs/a", weight=0.5, layers=[0, 2], every=3)
        seven = {"max_steps": 7}
        first = whole(run_dir="runs/b", task="mine", training=seven, distillation=section)
        before = asdict(first)
        second = with_teacher(first, "runs/c")
        assert isinstance(second, whole), (
            f"expected a DistilledConfig, got {second!r}: does with_teacher return it?"
        )
        assert asdict(first) == before, (
            "the given configuration was changed, its teacher is now"
            f" {first.distillation.teacher!r}: is a section shared?"
        )
        assert second.distillation.teacher == "runs/c", (
            f"the copy has the teacher {second.distillation.teacher!r}, expected 'runs/c'"
        )
        there = before | before.pop("distillation")
        now = asdict(second)
        now |= now.pop("distillation")
        lost = [key for key in there if key != "teacher" and there[key] != now[key]]
        assert not lost, (
            f"the copy lost {lost[0]}: it is {now[lost[0]]!r}, expected {there[lost[0]]!r}"
        )
        second.distillation.layers.append(1)
        assert first.distillation.layers == [0, 2], (
            "who appends to the copy's layers changes those of the given configuration: construct"
            " the section, do not copy it"
        )
        what = "a teacher in the folder that this run writes"
        words = refusal_of(lambda: with_teacher(first, "runs/b"), what)
        assert words.startswith("distillation.teacher"), (
            f"the message must begin with distillation.teacher; it says: {words}"
        )


def hidden_section(make: Answer) -> None:
    """More sections to refuse."""
    with case("Task 2, the section"):
        for given in (
            {"temperature": -1},
            {"temperature": None},
            {"every": -3},
            {"every": True},
            {"layers": "1"},
            {"layers": [True]},
            {"layers": [0, 5, 2, 5]},
            {"weight": math.inf, "teacher": "a"},
            {"weight": "0.5", "teacher": "a"},
            {"teacher": 3},
        ):
            check_refused(make, given)
        what = "a tiny weight without a teacher"
        needed = ["distillation.teacher"]
        check_words(lambda: make(weight=1e-9), "weight", 1e-9, needed, what)


def hidden_tree(make: Answer, whole: Answer) -> None:
    """A good tree, and two that share nothing."""
    with case("Task 2, the tree"):
        section = make(teacher="runs/a", weight=1.0, layers=[0])
        good = whole(run_dir="runs/b", distillation=section)
        assert good.distillation.layers == [0], "a good tree lost its layers"
        one = whole()
        other = whole()
        one.distillation.layers.append(1)
        assert other.distillation.layers == [], "two trees share one list of layers"


def hidden_copy(answers: Answers, with_teacher: Answer) -> None:
    """Teachers that are refused, and a path that becomes plain."""
    make, whole = written(answers, "DistillationConfig", "DistilledConfig")
    section = make(teacher="runs/a", weight=0.5, layers=[0, 2], every=3)
    first = whole(run_dir="runs/b", task="mine", distillation=section)
    with case("Task 2, the copy"):
        refusal_of(lambda: with_teacher(first, 7), "the number 7 as a teacher")
        what = "no teacher, with a weight above 0"
        refusal_of(lambda: with_teacher(first, None), what)
        plain = with_teacher(whole(), Path("runs") / "d").distillation.teacher
        assert plain == "runs/d", (
            f"a teacher given as a Path is {plain!r} in the copy, expected the text 'runs/d': does"
            " check_fields run?"
        )


# ---------------------------------------------------------------------------- 3, a growing batch

Schedule = list[tuple[int, int]]
GROWS = [(0, 2), (3, 4), (5, 8)]


def check_steps(
    count: Answer,
    schedule: Schedule,
    rows: int,
    T: int,
    right: int,
    known: Mapping[int, str],
    **goal: int,
) -> None:
    """The steps of one run; `known` explains likely wrong numbers."""
    given = list(schedule)
    aims = ", ".join(f"{key}={value}" for key, value in goal.items())
    what = f"schedule={schedule}, {rows} rows of {T} tokens, {aims}"
    with case(f"Task 3: {what}"):
        found = count(given, rows=rows, T=T, **goal)
    with case("Task 3"):
        assert given == schedule, f"{what}: the schedule of the caller was changed"
        assert found is not None, (
            f"{what}: expected a whole number, got None: does the function return its result?"
        )
        assert isinstance(found, Integral) and not isinstance(found, bool), (
            f"{what}: expected a whole number, got {found!r}"
        )
        assert found == right, (
            f"{what}: expected {right} steps, got {found}:"
            f" {known.get(int(found), 'walk through it with pencil and paper')}"
        )


@contextmanager
def at_most(lines: int) -> Iterator[None]:
    """Stop a student's code that would never end."""
    left = iter(range(lines))

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        assert next(left, None) is not None, "it walked on and on"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def check_schedule(count: Answer, schedule: Schedule, entry: str) -> None:
    """One schedule that has to be refused."""
    what = f"schedule={schedule}"
    with case("Task 3"):
        with at_most(lines=10_000):
            words = refusal_of(lambda: count(list(schedule), rows=9, T=4, max_epochs=1), what)
        assert entry in words, (
            f"{what}: the message must hold the offending entry {entry}; it says: {words}"
        )


def task3_steps(count: Answer) -> None:
    """The three answers by hand, and some more."""
    boundary = (
        "off by one at a boundary? (3, 4) means that step 3, which is the fourth, takes 4 rows; (5,"
        " 8) holds to the end"
    )
    each = "look the batch up before each step, not once an epoch"
    again = (
        "the schedule counts the steps of the whole run; it does not start again with each epoch"
    )
    short = "is the short step at the end of an epoch dropped? Its rows are read, too"
    once = (
        "an epoch ends with its own short step: the last step of an epoch is not filled from the"
        " next one"
    )
    tokens = "are tokens counted as rows? A row has T of them"
    goal = "the last step may pass the goal: stop neither before it, nor when it is reached already"
    own = "the short step at the end of an epoch reads its own rows only"
    threes = [(0, 3)]
    check_steps(count, GROWS, 20, 4, 6, {7: boundary, 5: boundary, 10: each}, max_epochs=1)
    check_steps(count, GROWS, 20, 4, 6, {7: goal, 5: goal, 15: tokens}, max_tokens=80)
    slips = {8: goal, 6: goal, 9: again, 18: tokens}
    check_steps(count, GROWS, 20, 4, 7, slips, max_tokens=100)
    check_steps(count, GROWS, 20, 4, 9, {8: short, 12: again}, max_epochs=2)
    check_steps(count, threes, 10, 4, 8, {7: once, 6: short}, max_epochs=2)
    check_steps(count, threes, 10, 4, 5, {4: own}, max_tokens=44)
    check_steps(count, GROWS, 20, 4, 7, {6: goal}, max_tokens=81)


def task3_refused(count: Answer) -> None:
    """Schedules that make no sense."""
    for wrong, entry in (
        ([], "[]"),
        ([(1, 2), (3, 4)], "(1, 2)"),
        ([(0, 0)], "(0, 0)"),
        ([(0, 2), (5, 0)], "(5, 0)"),
        ([(0, 2), (5, -1)], "(5, -1)"),
        ([(0, 2), (4, 0), (6, 2)], "(4, 0)"),
        ([(0, 2), (5, 8), (3, 4)], "(3, 4)"),
        ([(0, 2), (4, 3), (4, 5)], "(4, 5)"),
    ):
        check_schedule(count, wrong, entry)


def row_by_row(
    schedule: Schedule,
    rows: int,
    T: int,
    max_epochs: int | None = None,
    max_tokens: int | None = None,
) -> int:
    """The same, by taking one row after the other."""
    sizes = [size for _, size in schedule]
    starts = [first for first, _ in schedule][1:]
    steps = filled = seen = 0
    while True:
        epoch, place = divmod(seen, rows)
        if filled == sizes[sum(start <= steps for start in starts)] or (place == 0 and filled):
            steps += 1
            filled = 0
            done = epoch >= (math.inf if max_epochs is None else max_epochs)
            if done or seen * T >= (math.inf if max_tokens is None else max_tokens):
                return steps
        filled += 1
        seen += 1


def hidden_steps(count: Answer) -> None:
    """Many schedules, rows and goals."""
    grids = [[(0, 1)], [(0, 4)], [(0, 2), (1, 3)], [(0, 1), (4, 6)], [(0, 5), (2, 2)], GROWS]
    grids.append([(0, 1), (2, 3), (40, 9)])
    aims = [{"max_epochs": 1}, {"max_epochs": 4}]
    aims += [{"max_tokens": tokens} for tokens in (1, 37, 120)]
    for schedule in grids:
        for rows in (1, 2, 5, 12, 25):
            for aim in aims:
                right = row_by_row(schedule, rows, 3, **aim)
                check_steps(count, schedule, rows, 3, right, {}, **aim)


# ---------------------------------------------------------------------------- 4, a careless loader

SEVEN: Tree = {
    "training": {"max_steps": 1000, "batch_size": 16, "compile": False},
    "optimization": {"learning_rate": 1e-3, "schedule": "cosine"},
    "logging": {"progress": True, "tensorboard": True},
}
KINDS: dict[str, Callable[[str], Any]] = {
    "max_steps": int,
    "batch_size": int,
    "learning_rate": float,
    "schedule": str,
}
QUESTIONS = {
    "A": "the file's section was there until somebody put another one in its place",
    "B": "the text arrives, and becomes something: what is bool of a text that is not empty?",
    "C": "which of two sources comes later, and who says so?",
    "D": "half of a section has no effect: look where the file is read, and what's in it twice",
    "E": "who would have to ask for a name that nobody knows?",
}


def merged_flat(*sources: Mapping[str, Any]) -> Tree:
    """What must come out, from flat dictionaries with values."""
    plain = deepcopy(SEVEN)
    for source in sources:
        for path, value in source.items():
            section, _, name = path.partition(".")
            plain[section][name] = value
    return plain


def _valued(source: Mapping[str, str]) -> dict[str, Any]:
    """The values that texts mean."""
    return {
        path: KINDS.get(path.partition(".")[2], yaml.safe_load)(text)
        for path, text in source.items()
    }


def check_load(
    answers: Answers,
    file: Mapping[str, Any],
    environment: Mapping[str, str],
    words: Mapping[str, str],
    why: str,
) -> None:
    """`file` is flat, path to value; the other two are flat, path to text."""
    load, defaults = written(answers, "load", "DEFAULTS")
    tree: Tree = {}
    for path, value in file.items():
        section, _, name = path.partition(".")
        tree.setdefault(section, {})[name] = value
    variables = {
        f"LLM_COURSE_{path.upper().replace('.', '__')}": text for path, text in environment.items()
    }
    typed = [f"--{path}={text}" for path, text in words.items()]
    text = yaml.safe_dump(tree, default_flow_style=True).strip()
    what = f"file {text}, environment {variables}, words {typed}"
    with case("Task 4, load"):
        with case(what):
            found = load(yaml.safe_dump(tree), variables, typed)
        right = merged_flat(file, _valued(environment), _valued(words))
        assert isinstance(found, dict), (
            f"{what}: expected a dictionary, got {found!r}: does load return its result?"
        )
        assert defaults == SEVEN, (
            f"{what}: your code changed DEFAULTS. Mend it, and run the given cell again"
        )
        for section, values in right.items():
            for name, value in values.items():
                seen = found.get(section, {}).get(name)
                assert type(seen) is type(value) and seen == value, (
                    f"{what}: {section}.{name} is {seen!r}, expected {value!r}: {why}"
                )
        assert found == right, f"{what}: there are keys that nobody asked for: {found}"


def task4_lines(answers: Answers) -> None:
    """Which line each user met."""
    with case("Task 4, line_of"):
        (line_of,) = written(answers, "line_of")
        assert sorted(line_of) == list("ABCDE") and set(map(type, line_of.values())) == {int}, (
            "line_of needs the letters A to E, and the number of a line for each"
        )
        right = {"A": 4, "B": 1, "C": 5, "D": 2, "E": 3}
        for letter, question in QUESTIONS.items():
            assert line_of[letter] == right[letter], (
                f"user {letter} did not meet line {line_of[letter]}: {question}"
            )


def task4_load(answers: Answers) -> None:
    """What the five users wrote, and what is between them."""
    check_load(answers, {}, {}, {}, "nothing was set, so the defaults hold")
    why = "a key of the file is lost after a word about another one: is a section replaced as a"
    eight = {"training.batch_size": 8}
    check_load(answers, eight, {}, {"training.max_steps": "5"}, f"{why} whole?")
    for text in ("false", "no", "True", "off"):
        why = "bool of a text that is not empty is True: read the word"
        check_load(answers, {}, {"training.compile": text}, {}, why)
    why = "YAML alone leaves 5e-4 a text: the kind of the default says that it is a number"
    check_load(answers, {}, {"optimization.learning_rate": "5e-4"}, {}, why)
    file = eight | {"optimization.schedule": "wsd"}
    four = {"training.batch_size": "4"}
    check_load(answers, file, four, {}, "the environment stands above the file")
    why = "the command line stands above the environment"
    check_load(answers, {}, four, {"training.batch_size": "2"}, why)


def check_load_refuses(
    answers: Answers,
    what: str,
    words: Sequence[str],
    file: str = "",
    environment: Mapping[str, str] | None = None,
    typed: Sequence[str] = (),
    must: str = "",
) -> None:
    """One input that has to be refused, with these words in the message."""
    (load,) = written(answers, "load")
    with case("Task 4, load"):
        said = refusal_of(lambda: load(file, dict(environment or {}), list(typed)), what)
        assert all(word in said for word in words), f"{what}: {must}; it says: {said}"


def task4_refused(answers: Answers) -> None:
    """Keys twice, unknown variables, and words that are no bool."""
    load, defaults = written(answers, "load", "DEFAULTS")
    with case("Task 4, load"):
        try:
            load("", {"HOME": "/", "LLM_COURSES": "x", "MY_LLM_COURSE_DIR": "x"}, [])
        except Exception as error:
            raise AssertionError(
                "HOME, LLM_COURSES and MY_LLM_COURSE_DIR belong to other programs, so leave them"
                f" alone; your code raised: {error}"
            ) from None
    doubled = "training:\n  max_steps: 9\nlogging: {progress: no}\ntraining:\n  batch_size: 8\n"
    what = "the section training stands in the lines 1 and 4 of a file"
    must = "the message must name it, and line 4"
    check_load_refuses(answers, what, ["training", "4"], doubled, must=must)
    name = "LLM_COURSE_TRAINING__MAX_STEPZ"
    must = "the message must hold its name"
    check_load_refuses(answers, f"a variable {name}", [name], environment={name: "5"}, must=must)
    must = "the message must hold the text"
    for text in ("0", "tRuE", "{"):
        what = f"compile={text!r}, which is neither true nor false"
        wrong = {"LLM_COURSE_TRAINING__COMPILE": text}
        check_load_refuses(answers, what, [text], environment=wrong, must=must)
    with case("Task 4, load"):
        load("training: {batch_size: 8}", {}, [])["optimization"]["schedule"] = "mine"
        shared = defaults["optimization"]["schedule"] == "mine"
        defaults["optimization"]["schedule"] = "cosine"
        assert not shared, (
            "the result shares a section with DEFAULTS: whoever changes the result changes the"
            " defaults"
        )


def hidden_load(answers: Answers) -> None:
    """More words for a bool, all sources at once, and load_config itself."""
    for text in ("NO", "off", "False", "FALSE", "on", "Yes"):
        word = {"logging.progress": text}
        check_load(answers, {"logging.progress": True}, {}, word, "a bool on the command line")
    file = {"training.max_steps": 7, "training.compile": True, "logging.tensorboard": False}
    environment = {"training.max_steps": "8", "logging.progress": "off"}
    environment |= {"optimization.learning_rate": "5e-4"}
    words = {"training.max_steps": "9", "optimization.schedule": "no"}
    check_load(answers, file, environment, words, "all sources at once")
    (load,) = written(answers, "load")
    yes = {"LLM_COURSE_TRAINING__COMPILE": "yes"}
    text = "training: {batch_size: 8}"
    with folder_with({"run.yaml": text}), patch.dict(os.environ, yes):
        real = asdict(load_config(["--config", "run.yaml", "--training.max_steps=5"])[0])
    for section, values in load(text, yes, ["--training.max_steps=5"]).items():
        for name, value in values.items():
            assert real[section][name] == value, (
                f"load_config gives {section}.{name}={real[section][name]!r}, you {value!r}"
            )


def hidden_refused(answers: Answers) -> None:
    """More to refuse."""
    inner = "optimization:\n  schedule: wsd\n  learning_rate: 0.1\n  schedule: linear\n"
    what = "schedule stands in the lines 2 and 4, inside a section"
    must = "the message must name it, and line 4"
    check_load_refuses(answers, what, ["schedule", "4"], inner, must=must)
    must = "the message must hold its name"
    for end in ("MAX_STEPS", "TRAINING", "DATA__SEED", "training__max_steps"):
        name = f"LLM_COURSE_{end}"
        one = {name: "5"}
        check_load_refuses(answers, f"a variable {name}", [name], environment=one, must=must)
    must = "the message must hold the text"
    for wrong in ("1", "2", "", "maybe", "null", "n"):
        typed = [f"--training.compile={wrong}"]
        check_load_refuses(answers, f"compile={wrong!r}", [wrong], typed=typed, must=must)
    keep = "is no key (keep the check of the given cell)"
    for word in ("--training.max_stepz=5", "--trainin.max_steps=5"):
        check_load_refuses(answers, f"{word} {keep}", [], typed=[word])
    check_load_refuses(answers, f"max_stepz in the file {keep}", [], "training: {max_stepz: 5}")


def check_saved(save: Answer, why: str, **changes: Any) -> None:
    """One tree that comes back from its text."""
    tree = deepcopy(SEVEN)
    for name, value in changes.items():
        next(section for section in tree.values() if name in section)[name] = value
    before = deepcopy(tree)
    with case("Task 4, save"):
        with case(f"save({tree})"):
            text = save(tree)
        assert tree == before, f"save({before}): the given tree was changed, it is now {tree}"
        assert isinstance(text, str), (
            f"save({tree}) is {text!r}, expected a text: does save return it?"
        )
        try:
            back = StrictLoader(text).get_single_data()
        except Exception as error:
            raise AssertionError(
                f"save({tree}): what it gives cannot be read ({error}): {why}. It begins:"
                f" {text[:60]!r}"
            ) from None
        assert isinstance(back, dict), (
            f"save({tree}): the text is read as {back!r}, expected keys and values: {why}"
        )
        for section, values in before.items():
            for name, value in values.items():
                found = back.get(section) or {}
                assert name in found, f"save({tree}): {section}.{name} is not in the text: {why}"
                seen = found[name]
                assert type(seen) is type(value) and seen == value, (
                    f"save({tree}): {section}.{name}={value!r} comes back as {seen!r}: {why}"
                )
        assert back == before, f"save({tree}): there are keys that nobody asked for: {back}"


def task4_save(save: Answer) -> None:
    """Values that look like something else."""
    check_saved(save, "the defaults of today may change, so they belong into the file, too")
    check_saved(save, "a bool, and a whole number", max_steps=5, progress=False)
    for text, why in (
        ("no", "without quotes no is False"),
        ("010", "without quotes 010 is 8"),
        ("a: b", "a colon means a key"),
    ):
        check_saved(save, why, schedule=text)
    check_saved(save, "in YAML 1.1 a number with an exponent needs a point", learning_rate=5e-5)
    for text, why in (
        ("it's", "a quote inside of a text in quotes must be written twice"),
        ("a\nb", "a line break inside of a text must come back as a line break"),
        ("", "an empty text is a value, too, and without quotes it is null"),
    ):
        check_saved(save, why, schedule=text)


# ---------------------------------------------------------------------------- 5, who said it

LEAVES = [
    key
    for key in KEY_TYPES
    if key not in SECTIONS and ("." not in key or key.rpartition(".")[0] in SECTIONS)
]


def values_of(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """{key: value} for each of LEAVES, as load_config reads them with this environment and no
    other.
    """
    return dict(_values_read(os.getcwd(), tuple(words), tuple(environment.items())))


@functools.cache  # reading takes a while
def _values_read(
    folder: str, words: tuple[str, ...], environment: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    """`values_of` in a working folder."""
    others = {name: text for name, text in os.environ.items() if not name.startswith("LLM_COURSE_")}
    with patch.dict(os.environ, others | dict(environment), clear=True):
        config = load_config(list(words))[0]
    return {key: attrgetter(key)(config) for key in LEAVES}


def check_explained(
    explain: Answer,
    words: Sequence[str],
    environment: Mapping[str, str],
    expected: Mapping[str, str],
    whys: Mapping[str, str],
) -> None:
    """`expected` has the sources that are not "default"."""
    what = f"words {list(words)}, environment {dict(environment)}"
    before = list(words), dict(environment), dict(os.environ)
    reason = "there's no next word. --resume has no value, and --key=value has its own"
    with case("Task 5"):
        with explained(StopIteration, reason), case(what):
            found = explain(words, environment)
        after = list(words), dict(environment), dict(os.environ)
        assert after == before, f"{what}: words, environment or os.environ were changed"
        assert isinstance(found, dict), (
            f"{what}: expected a dictionary, got {found!r}: does explain return its result?"
        )
        lost = set(LEAVES) - set(found)
        more = set(found) - set(LEAVES)
        assert not lost and not more, (
            f"keys that are missing: {sorted(lost)[:3]}, keys that are too many:"
            f" {sorted(more)[:3]}; there is one for each of LEAVES ({what})"
        )
        values = values_of(words, environment)
        for key in LEAVES:
            assert isinstance(found[key], tuple) and len(found[key]) == 2, (
                f"{key} has {found[key]!r}, expected (value, source)"
            )
            value, source = found[key]
            assert value == values[key] and type(value) is type(values[key]), (
                f"{key} has the value {value!r}, load_config reads {values[key]!r} ({what})"
            )
            right = expected.get(key, "default")
            why = whys.get(key, "the source that spoke last about this key is wanted")
            assert source == right, (
                f"{key} comes from {source!r}, expected {right!r}: {why} ({what})"
            )


FILES = {
    "site.yaml": "training: {max_steps: 50}\noptimization: {weight_decay: 0.0}\n",
    "configs/base.yaml": (
        "training: {max_steps: 100, batch_size: 8, seed: 0}\nmodel: {rope_scaling: {rope_type:"
        " linear, factor: 2.0}}\n"
    ),
    "mine.yaml": "training: {max_steps: 200, max_epochs: null}\ndata:\n  corpus: python-source\n",
    "my-base.yaml": "training: {batch_size: 8}",
    "my_base.yaml": "training: {seed: 1}",
}
ALL_WORDS = [
    "--config",
    "configs/base.yaml",
    "--optimization.beta2",
    "0.95",
    "--config=mine.yaml",
    "--model.rope_scaling.factor=8",
    "--run-dir=runs/x",
    "--resume",
    "--data.text_field",
    "data.clean",
]
ALL_VARIABLES = {
    "LLM_COURSE_TRAINING__BATCH_SIZE": "4",
    "LLM_COURSE_OPTIMIZATION__BETA1": "0.9",
    "HOME": "/",
    "LLM_COURSE_CONFIG": "site.yaml",
    "LLM_COURSE_DATA__TEXT_FIELD": "text",
}
ALL_SOURCES = {
    "training.max_steps": "file mine.yaml",
    "training.max_epochs": "file mine.yaml",
    "training.seed": "file configs/base.yaml",
    "data.corpus": "file mine.yaml",
    "optimization.weight_decay": "file site.yaml",
    "training.batch_size": "environment LLM_COURSE_TRAINING__BATCH_SIZE",
    "optimization.beta1": "environment LLM_COURSE_OPTIMIZATION__BETA1",
    "optimization.beta2": "command line",
    "model.rope_scaling": "command line",
    "run_dir": "command line",
    "data.text_field": "command line",
}
ALL_WHYS = {
    "training.max_steps": (
        "of two files the later one wins, and that of LLM_COURSE_CONFIG comes before those of"
        " --config"
    ),
    "training.max_epochs": (
        "the file sets it to null, the default's own value, and has spoken all the same"
    ),
    "optimization.weight_decay": (
        "LLM_COURSE_CONFIG of the dictionary `environment` names a file, too"
    ),
    "training.seed": (
        "the file, named as it was given, sets it to the default's own value: it has spoken"
    ),
    "optimization.beta1": (
        "the variable sets it to the default's own value, and has spoken all the same"
    ),
    "optimization.beta2": (
        "the word sets it to the default's own value, and has spoken all the same"
    ),
    "training.batch_size": "the environment stands above the files",
    "model.rope_scaling": "a word that sets one part of a nested value has spoken about it",
    "run_dir": "--run-dir is --run_dir",
    "data.clean": "the word after a key without '=' is its value, not a key",
    "data.text_field": (
        "--key value is a way to say it, too, and the command line stands above the environment"
    ),
}


def task5_explain(explain: Answer) -> None:
    """All sources at once, odd names, and what has to be refused."""
    nested = "LLM_COURSE_MODEL__ROPE_SCALING"
    prompt = "LLM_COURSE_LOGGING__SAMPLE_PROMPT"
    with folder_with(FILES):
        check_explained(explain, ALL_WORDS, ALL_VARIABLES, ALL_SOURCES, ALL_WHYS)
        hyphen = "a hyphen in the name of a file stays a hyphen"
        check_explained(
            explain,
            ["--config=my-base.yaml", "--data.files=a=b.txt"],
            {nested: "{rope_type: linear, factor: 4}", prompt: ""},
            {
                "training.batch_size": "file my-base.yaml",
                "data.files": "command line",
                "model.rope_scaling": f"environment {nested}",
                "logging.sample_prompt": f"environment {prompt}",
            },
            {
                "training.batch_size": hyphen,
                "training.seed": hyphen,
                "data.files": "the value begins after the first '='",
                "model.rope_scaling": "a nested value has a variable of its own",
                "logging.sample_prompt": "a variable with an empty text has spoken all the same",
            },
        )
        with case("Task 5"):
            what = "a key that does not exist"
            words = refusal_of(lambda: explain(["--training.max_stepz=1"], {}), what)
            assert "max_stepz" in words, f"{what}: load_config's own words are wanted, not: {words}"
            what = "none.yaml is not there (call values_of before you read files)"
            refusal_of(lambda: explain(["--config=none.yaml"], {}), what)


def hidden_explain(explain: Answer) -> None:
    """The file that a variable names."""
    variables = {"LLM_COURSE_CONFIG": "configs/base.yaml", "LLM_COURSE_RUN_DIR": "runs/y"}
    variables |= {"LLM_COURSE_TRAINING__SEED": "2"}
    sources = {
        "training.max_steps": "file mine.yaml",
        "training.max_epochs": "file mine.yaml",
        "data.corpus": "file mine.yaml",
        "training.batch_size": "file configs/base.yaml",
        "model.rope_scaling": "file configs/base.yaml",
        "training.seed": "command line",
        "run_dir": "environment LLM_COURSE_RUN_DIR",
    }
    whys = {
        "training.max_steps": "the file of LLM_COURSE_CONFIG comes before those of --config",
        "training.batch_size": "LLM_COURSE_CONFIG names a file, too",
        "model.rope_scaling": "LLM_COURSE_CONFIG names a file, too",
        "training.seed": "the command line stands above the environment",
    }
    words = ["--config=mine.yaml", "--training.seed", "3"]
    with folder_with(FILES):
        check_explained(explain, words, variables, sources, whys)
        check_explained(explain, [], {"LLM_COURSE_CONFIG": ""}, {}, {})


# ---------------------------------------------------------------------------- 6, typos

NEIGHBOURS: dict[str, str] = {}  # of a character: those beside it on the keyboard
for _row in ("1234567890-_", "qwertyuiop", "asdfghjkl", "zxcvbnm"):
    for _left, _right in pairwise(_row):
        NEIGHBOURS[_left] = NEIGHBOURS.get(_left, "") + _right
        NEIGHBOURS[_right] = NEIGHBOURS.get(_right, "") + _left
OPTIMIZATION = [key.partition(".")[2] for key in KEY_TYPES if key.startswith("optimization.")]
FEW = ["learning_rate", "beta1", "beta2", "schedule"]
LOADERS = ("dictionary", "argparse", "strict")
FATES = ("taken", "refused", "named")


def check_slips(slips: Answer, name: str, right: set[str]) -> None:
    """All slips of one name."""
    with case("Task 6"):
        with case(f"slips({name!r})"):
            found = slips(name)
        assert isinstance(found, set | frozenset), (
            f"slips({name!r}) is a {type(found).__name__}, expected a set"
        )
        assert name not in found, f"slips({name!r}) holds the name itself, and that is no slip"
        lost = sorted(right - found)
        more = sorted(found - right, key=str)
        if not (lost or more):
            return
        odd = str((lost or more)[0])
        kind = "a neighbour of the keyboard"
        if len(odd) != len(name):
            kind = "left out" if len(odd) < len(name) else "typed twice"
        elif sorted(odd) == sorted(name):
            kind = "swapped"
        why = "missing" if lost else "no slip of one movement"
        raise AssertionError(f"slips({name!r}): {odd!r} ({kind}) is {why}")


def task6_slips(slips: Answer) -> None:
    """Three names."""
    check_slips(slips, "ee", {"e", "eee", "ew", "er", "we", "re"})
    check_slips(slips, "a", {"", "aa", "s"})
    of_seed = "eed sed see sseed seeed seedd esed sede aeed deed swed sred sewd serd sees seef"
    check_slips(slips, "seed", set(of_seed.split()))


def task6_fate(fate: Answer) -> None:
    """What three loaders do with a slip."""
    for slip, name, wanted, why in (
        (
            "learning_rat",
            "learning_rate",
            "taken taken named",
            "an abbreviation that fits one key is taken by argparse",
        ),
        (
            "beta",
            "beta1",
            "taken refused refused",
            "it fits two keys, so argparse refuses it, and one suggestion is one too few",
        ),
        (
            "beta2",
            "beta1",
            "taken taken taken",
            "a slip that is a key itself is taken by everybody",
        ),
        ("earning_rate", "learning_rate", "taken refused named", "it begins no key"),
    ):
        what = f"fate({slip!r}, {name!r}, {FEW})"
        with case(f"Task 6: {what}"):
            found = fate(slip, name, FEW)
        want = dict(zip(LOADERS, wanted.split(), strict=True))
        assert found == want, f"Task 6: {what} is {found}, expected {want}: {why}"
    with case(f"Task 6: fate('beta', 'beta1', {FEW}, suggestions=2)"):
        both = [fate("beta", name, FEW, suggestions=2)["strict"] for name in ("beta1", "beta2")]
        assert both == ["named", "named"], (
            "with two suggestions 'beta' names both beta1 and beta2: is `suggestions` used?"
        )
    with case("Task 6: fate('lr', 'alr', ['alr', 'lrate'])"):
        answer = fate("lr", "alr", ["alr", "lrate"])["argparse"]
        assert answer == "taken", (
            f"argparse: {answer!r}, expected 'taken': exactly one key begins with it, and nobody"
            " asks which key was meant"
        )
    with case("Task 6: fate('beta', 'betas', ['beta', 'betas', 'beta2'])"):
        answer = fate("beta", "betas", ["beta", "betas", "beta2"])["argparse"]
        assert answer == "taken", (
            f"argparse: {answer!r}, expected 'taken': beta is a key itself, however many keys"
            " begin with it"
        )


def check_shares(
    shares: Answer, keys: Sequence[str], suggestions: int, right: Mapping[str, Sequence[int]]
) -> None:
    """The shares of the fates over all slips of some keys."""
    what = f"shares({list(keys)}, suggestions={suggestions})"
    with case("Task 6"):
        with case(what):
            found = shares(keys, suggestions)
        for loader, counts in right.items():
            assert isinstance(found, dict) and set(found.get(loader, {})) == set(FATES), (
                f"{what}: expected the shares of taken, refused and named for {loader}, got {found}"
            )
            total = sum(found[loader].values())
            assert abs(total - 1) < 1e-6, (
                f"{what}: the shares of {loader} add up to {total:.3f}, not to 1"
            )
            for word, count in zip(FATES, counts, strict=True):
                share = found[loader][word]
                wanted = count / sum(counts)
                assert abs(share - wanted) < 1e-9, (
                    f"{what}: {loader}, {word}: {share:.4f}, expected {count} of {sum(counts)} ="
                    f" {wanted:.4f}. Count each slip of each key once, and divide by all"
                )


def task6_shares(shares: Answer) -> None:
    """Four keys, with one suggestion and with two."""
    right = {"dictionary": (143, 0, 0), "argparse": (4, 139, 0), "strict": (2, 2, 139)}
    check_shares(shares, FEW, 1, right)
    with case(f"Task 6: shares({FEW}, suggestions=2)"):
        named = [shares(FEW, suggestions)["strict"]["named"] for suggestions in (1, 2)]
        assert abs(named[0] - named[1]) > 1e-6, (
            "two suggestions give the same shares as one: is `suggestions` handed on to fate?"
        )
    check_shares(shares, FEW, 2, right | {"strict": (2, 0, 141)})


def check_twins(twins: Answer, keys: Sequence[str], right: set[tuple[str, str]]) -> None:
    """The pairs that one slip joins."""
    with case("Task 6"):
        with case(f"twins({list(keys)})"):
            pairs = twins(keys)
        assert pairs == right, (
            f"twins({list(keys)}) is {pairs}, expected {right}: one slip in either direction, each"
            " pair once, a < b"
        )


def print_shares(shares: Answer) -> None:
    """The table that the last paragraph reads."""
    for suggestions in (1, 2):
        print("suggestions:", suggestions)
        for loader, row in shares(FEW, suggestions).items():
            print(f"{loader:11}", *(f"{word} {row[word]:6.1%}" for word in FATES), sep="  ")


class AskArgparse(argparse.ArgumentParser):
    """The real one."""

    def error(self, message: str) -> Any:
        raise ValueError(message)

    def takes(self, slip: str) -> bool:
        """Whether an option of this name is taken."""
        try:
            return not self.parse_known_args([f"--{slip}=1"])[1]
        except ValueError:
            return False


def true_slips(name: str) -> set[str]:
    """All slips of a name."""
    found = set()
    for i, letter in enumerate(name):
        rest = name[i + 1 :]
        found |= {name[:i] + put + rest for put in ("", letter * 2, *NEIGHBOURS.get(letter, ""))}
        if rest:
            found.add(name[:i] + rest[0] + letter + rest[1:])
    return found - {name}


def hidden_typos(slips: Answer, shares: Answer, twins: Answer) -> None:
    """Other names, the real argparse, and other twins."""
    for name in ("", "top_k", "aab", "lr10", "mm", "beta1"):
        check_slips(slips, name, true_slips(name))
    for keys, suggestions in ((["beta1", "beta2", "lr"], 2), (["seed", "speed", "rate"], 1)):
        ask = AskArgparse(add_help=False)
        counts = {loader: [0, 0, 0] for loader in LOADERS}
        for key in keys:
            ask.add_argument(f"--{key}")
        for name in keys:
            for slip in true_slips(name):
                named = name in difflib.get_close_matches(slip, keys, n=suggestions)
                counts["dictionary"][0] += 1
                counts["argparse"][0 if ask.takes(slip) else 1] += 1
                counts["strict"][0 if slip in keys else 2 if named else 1] += 1
        check_shares(shares, keys, suggestions, counts)
    three = {("sed", "seed"), ("sed", "sede"), ("sede", "seed")}
    pairs: Iterable[tuple[list[str], set[tuple[str, str]]]] = (
        (["lr", "l", "top"], {("l", "lr")}),
        (["seed", "sed", "sede"], three),
        (["rate", "tare"], set()),
        (["zoom", "zom", "seed"], {("zom", "zoom")}),
    )
    for names, want in pairs:
        check_twins(twins, names, want)
        check_twins(twins, names[::-1], want)
    check_twins(twins, OPTIMIZATION, {("beta1", "beta2")})

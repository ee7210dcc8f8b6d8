"""The visible checks of exercise 21, evaluation: each says what is wrong with an answer."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from llm_course.pages.checking import Answer, case, explained, forbid, is_close
from llm_course.training import contamination, evaluation, evaluation_tasks
from llm_course.training.evaluation import calibration_error, questions_needed, reliability


def call(answer: Answer, *arguments: Any, **options: Any) -> Any:
    """What the answer returns, without help from the package."""
    with (
        case(getattr(answer, "__name__", "your answer")),
        forbid(evaluation, evaluation_tasks, contamination),
    ):
        return answer(*arguments, **options)


# ------------------------------------------------------------------------------------- task 1


def check_marks(
    marks: Answer, log_probs: Sequence[float], choices: Sequence[str], answer: int
) -> None:
    """`marks(log_probs, choices, answer)`: by sum, by byte, and the confidence."""
    with (
        explained(ZeroDivisionError, "log-probabilities may be so low that math.exp gives 0"),
        explained(OverflowError, "of the largest log-probability, math.exp must not overflow"),
    ):
        found = call(marks, list(log_probs), list(choices), answer)
    assert isinstance(found, tuple) and len(found) == 3, (
        f"marks returned {found!r}, expected three: by_sum, by_byte, confidence"
    )
    by_sum, by_byte, confidence = found
    for name, mark in (("by_sum", by_sum), ("by_byte", by_byte)):
        assert isinstance(mark, bool | np.bool_), (
            f"{name} is {mark!r}, expected True or False: is the choice the right one?"
        )
    best = max(range(len(choices)), key=lambda i: log_probs[i])
    assert by_sum == (best == answer), (
        f"by_sum is {by_sum!r}: the likeliest choice is {choices[best]!r}, and the answer"
        f" {choices[answer]!r}, so it should be {best == answer}"
    )
    rates = [one / len(text.encode()) for one, text in zip(log_probs, choices, strict=True)]
    longest = max(range(len(choices)), key=lambda i: rates[i])
    assert by_byte == (longest == answer), (
        f"by_byte is {by_byte!r}: the likeliest choice per byte of its UTF-8 (spaces, too) is"
        f" {choices[longest]!r}, and the answer {choices[answer]!r}, so it should be"
        f" {longest == answer}"
    )
    total = sum(math.exp(one - log_probs[best]) for one in log_probs)
    assert not is_close(confidence, math.exp(log_probs[best])) or is_close(total, 1), (
        "confidence is the probability among all texts; it is asked among the choices"
    )
    assert not is_close(confidence, math.exp(log_probs[answer] - log_probs[best]) / total) or (
        best == answer
    ), "confidence belongs to the likeliest choice, whether it is right or not"
    assert is_close(confidence, 1 / total), (
        f"confidence is {confidence!r}, expected {1 / total:.4f}: the share of the likeliest choice"
        " in the probability of all choices. Very small probabilities must not vanish"
    )


# ------------------------------------------------------------------------------------- task 2


def check_interval(
    interval: Answer, marks: Sequence[float], groups: Sequence[int], *, seed: int = 0
) -> None:
    """`interval(marks, groups, resamples, seed)`: low and high."""
    found = call(interval, list(marks), list(groups), 4000, seed)
    assert isinstance(found, tuple) and len(found) == 2, (
        f"interval returned {found!r}, expected low and high"
    )
    low, high = (float(one) for one in found)
    assert (low, high) == tuple(
        map(float, call(interval, list(marks), list(groups), 4000, seed))
    ), "the same seed gives another interval: draw with a generator of your own"
    expected = _interval(marks, groups, 40_000)
    plain = _interval(marks, range(len(marks)), 4000)
    width = expected[1] - expected[0]
    off = max(abs(low - expected[0]), abs(high - expected[1]))
    near = max(abs(low - plain[0]), abs(high - plain[1]))
    assert off <= 0.1 * width or near > 0.1 * (plain[1] - plain[0]), (
        f"[{low:.3f}, {high:.3f}] is the interval for single questions: draw whole groups,"
        " whose marks needn't be next to each other"
    )
    assert high - low > 1e-9, f"low is {low}, high {high}: the interval has no width"
    assert off <= max(0.06 * width, 1.01 / len(marks)), (
        f"the interval is [{low:.3f}, {high:.3f}], expected about"
        f" [{expected[0]:.3f}, {expected[1]:.3f}]: draw as many groups as there are, with"
        " replacement; take the mean over all their marks, not of their means; and of these means"
        " the quantiles 0.025 and 0.975. A group's marks needn't be next to each other"
    )


def check_resamples(interval: Answer) -> None:
    """How many resamples are drawn is up to the caller."""
    marks, groups = marks_by_story(stories=30, each=6, seed=3)
    few, many = (call(interval, marks, groups, resamples, 0) for resamples in (40, 400))
    assert few != many, "40 resamples and 400 give the same interval: draw as many as `resamples`"


def _interval(marks: Sequence[float], groups: Sequence[int], resamples: int) -> tuple[float, float]:
    names = sorted(set(groups))
    inside = [[m for m, g in zip(marks, groups, strict=True) if g == name] for name in names]
    sums = np.array([[sum(one), len(one)] for one in inside])
    draws = np.random.default_rng(7).multinomial(
        len(names), [1 / len(names)] * len(names), resamples
    )
    totals = draws @ sums
    low, high = np.quantile(totals[:, 0] / totals[:, 1], [0.025, 0.975])
    return float(low), float(high)


def marks_by_story(*, stories: int, each: int, seed: int) -> tuple[list[float], list[int]]:
    """Marks that go together within a story, and the number of each one's story, in no order."""
    rng = np.random.default_rng(seed)
    marks: list[float] = []
    groups: list[int] = []
    for story in range(stories):
        size = int(rng.integers(1, 2 * each))
        share = 0.95 if rng.random() < 0.6 else 0.15
        marks += (rng.random(size) < share).astype(float).tolist()
        groups += [7 * story + 3] * size
    order = rng.permutation(len(marks))
    return [marks[i] for i in order], [groups[i] for i in order]


# ------------------------------------------------------------------------------------- task 3


def check_calibration(
    ece: Answer, confidences: Sequence[float], correct: Sequence[bool], num_bins: int
) -> None:
    """`ece(confidences, correct, num_bins)`: a number."""
    found = call(ece, list(confidences), list(correct), num_bins)
    order = np.argsort(confidences, kind="stable")
    gaps = np.subtract(confidences, correct)
    bins = [inside for inside in np.array_split(gaps[order], num_bins) if len(inside)]
    total = len(gaps)
    right = sum(abs(inside.sum()) for inside in bins) / total
    unsorted = sum(abs(inside.sum()) for inside in np.array_split(gaps, num_bins)) / total
    slips = {
        "these are the page's bins of equal width: yours hold equally many answers": (
            calibration_error(reliability(confidences, correct, num_bins=num_bins))
        ),
        "the answers must be sorted by confidence before they are cut into bins": unsorted,
        "every bin counts alike: weigh each gap by the number of its answers": (
            np.mean([abs(inside.mean()) for inside in bins])
        ),
        "gaps of different signs cancel: take the absolute value in each bin": (
            abs(gaps.sum()) / total
        ),
    }
    for words, slip in slips.items():
        assert is_close(right, slip) or not is_close(found, slip), words
    sizes = [len(inside) for inside in bins]
    assert is_close(found, right), (
        f"the calibration error is {found!r}, expected {right:.4f}: {total} answers by confidence,"
        f" equal ones in the order in which they came; bins of {sizes[0]} down to {sizes[-1]}"
        " answers, those with one more first; and in each the mean confidence against the accuracy"
    )


# ------------------------------------------------------------------------------------- task 4


def check_detectable(detectable: Answer, questions: int, disagree: float, **how: float) -> None:
    """`detectable(questions, disagree, power=..., confidence=...)`: a difference, or inf."""
    found = call(detectable, questions, disagree, **how)
    asked = f"detectable({questions}, {disagree})"
    if questions_needed(disagree, disagree, **how) > questions:
        assert is_close(found, math.inf), (
            f"{asked} is {found!r}, expected inf: even a difference of {disagree}, at which one of"
            f" the models wins every time they differ, takes more than {questions} questions"
        )
        return
    assert isinstance(found, float) and 0 < found <= disagree, (
        f"{asked} is {found!r}, expected a difference between 0 and {disagree}, the share of"
        " questions on which the models differ"
    )
    # of a smaller difference the package says that it takes more questions
    larger = min(found * (1 + 1e-6), disagree)
    enough = questions_needed(larger, disagree, **how)
    fewer = questions_needed(found * (1 - 1e-6), disagree, **how)
    assert enough <= questions < fewer, (
        f"{asked} is {found:.5f}, but by the formula of page 21a that takes about {enough}"
        " questions. Z, z_confidence + z_power, times the standard deviation of one question's"
        " difference is the difference times the root of the number of questions, and that"
        " deviation contains the difference, too. The confidence has two tails, the power one"
    )


# ------------------------------------------------------------------------------------- task 5


def check_leaks(
    leaks: Answer,
    documents: Sequence[str],
    questions: Sequence[str],
    expected: Sequence[int],
    *,
    n: int,
    threshold: float,
) -> None:
    """`leaks(documents, questions, n, threshold)`: the indices of the questions, in order."""
    found = call(leaks, list(documents), list(questions), n, threshold)
    assert isinstance(found, list), f"leaks returned {found!r}, expected a list of indices"
    missed = sorted(set(expected) - set(found))
    assert not missed, (
        f"question {missed[0]} is in the training text, and you don't find it:"
        f" {questions[missed[0]][:60]!r}. Case, punctuation and line breaks don't count, a question"
        " of fewer words than n is a single run, its runs may come from several documents, and a"
        " share equal to the threshold is enough"
    )
    wrongly = sorted(set(found) - set(expected))
    assert not wrongly, (
        f"question {wrongly[0]} hasn't leaked: {questions[wrongly[0]][:60]!r}. What counts is the"
        " share of its runs of n words that a document has: whole words, and not across two"
        " documents. A question without words has no runs"
    )
    assert found == list(expected), f"the indices are {found}: each once, in order"

"""Answers that resemble each other more than chance makes them: what two students share beyond
what both were given.

An answer is seen as the runs of RUN tokens in it. Comments and layout don't count, nor do the
names that a student may choose, so renaming the variables of a copy hides nothing. Runs that stand
in the exercise or in its solution don't count either, since they are what a good answer looks
like. A high share is a reason to read both, and no proof.
"""

import builtins
import io
import keyword
import tokenize
from dataclasses import dataclass
from itertools import combinations

from grading import grade_id, is_answer
from nbformat import NotebookNode

RUN = 8  # tokens
FEWEST = 12  # runs of an answer's own, below which it could hardly be written differently
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@dataclass
class Pair:
    students: tuple[str, str]
    cell: str
    share: float  # of the runs of the shorter answer


def tokens(code: str) -> list[str]:
    """The code's tokens without its layout; a name of the student's own is just a name."""
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            own = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
            if own and not hasattr(builtins, token.string):
                found.append("NAME")
            elif token.type not in LAYOUT:
                found.append(token.string)
    except (tokenize.TokenError, SyntaxError):
        pass  # what came before the fault still counts
    return found


def runs(text: str, is_code: bool) -> set[tuple[str, ...]]:
    words = tokens(text) if is_code else text.casefold().split()
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}


def similar_answers(
    notebooks: dict[str, NotebookNode], exercise: NotebookNode, least: float
) -> list[Pair]:
    """The pairs of `notebooks`, by student, that share at least this part of an answer."""
    pairs = []
    given = set().union(*(runs(c.source, c.cell_type == "code") for c in exercise.cells))
    for name in [grade_id(cell) for cell in exercise.cells if is_answer(cell)]:
        answers = {}
        for student, notebook in notebooks.items():
            cells = [cell for cell in notebook.cells if grade_id(cell) == name]
            own = set().union(*(runs(c.source, c.cell_type == "code") for c in cells)) - given
            if len(own) >= FEWEST:
                answers[student] = own
        for (one, first), (other, second) in combinations(sorted(answers.items()), 2):
            share = len(first & second) / min(len(first), len(second))
            if share >= least:
                pairs.append(Pair((one, other), name, share))
    return sorted(pairs, key=lambda pair: -pair.share)

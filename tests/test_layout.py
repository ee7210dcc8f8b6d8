"""The shape of the code: what a reader can take in at once, and names that stay in their room.

`ruff format` decides the layout (`make lint`); these rules are about what no formatter can mend.
Each checker returns what is wrong, so that the same function judges the real tree and planted
violations.
"""

import ast
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    path
    for path in (ROOT / "llm_course").rglob("*.py")
    if path.name not in {"__init__.py", "_modidx.py"}
)
PAGES = sorted((ROOT / "nbs").glob("[0-9][0-9]*_*.ipynb"))
BORROWERS = sorted(
    path
    for pattern in ("nbs/*.ipynb", "solutions/*.ipynb", "scripts/*.py", "benchmarks/*.py")
    for path in ROOT.glob(pattern)
)
FUNCTION_LINES = 50
CLASS_LINES = 200
# Of an exported cell, lines of code: a docstring tells what the cell does, and a comment why, so a
# cell that has more of both is easier to read, not harder, and should never be cut to fit.
CELL_LINES = 60
# data by name: tables of values and of fields, which nobody reads from top to bottom
TABLES = {"PRESETS", "ModelConfig", "GPT2"}
# Classes that are one idea: half of an optimizer, a file format or a forward pass teaches nothing,
# and a base class made only for this rule would be one more name to learn. They may have a few
# lines more; whoever finds a good cut takes the name off.
WHOLE = {
    "ByteBPETokenizer",
    "BPETokenizer",
    "TokenFile",
    "DecoderModel",
}
WHOLE_LINES = 65


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def size_faults(code: str) -> list[str]:
    """Functions and classes that are longer than two screens."""
    faults = []
    for node in ast.walk(ast.parse(code)):
        is_class = isinstance(node, ast.ClassDef)
        if not is_class and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = node.end_lineno - node.lineno + 1
        limit = CLASS_LINES if is_class else FUNCTION_LINES
        if lines > limit and node.name not in TABLES:
            faults.append(f"{node.name} has {lines} lines, of at most {limit}: name its parts")
    return faults


def packed_faults(code: str) -> list[str]:
    """Two assignments in one statement, `a, b = x, y`; a swap, which needs both at once, is one."""
    faults = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
            continue
        used = {ast.unparse(part) for element in value.elts for part in ast.walk(element)}
        together = any(ast.unparse(element) in used for element in target.elts)
        if len(target.elts) == len(value.elts) and not together:
            faults.append(
                f"line {node.lineno}: {ast.unparse(node)[:60]}: one assignment a statement"
            )
    return faults


def private_names(code: str) -> set[str]:
    """The names with one underscore that this code gives, to itself or to its objects."""
    given = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            given.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            given.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in given if name.startswith("_") and not name.startswith("__")}


def private_faults(code: str, owners: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Names with an underscore that belong to another module of the course.

    They are found where they are imported, as an attribute of an imported module, and, with
    `owners` (the module of each private name of the course), as an attribute of any object: a class
    that inherits from another module's must not use its private attributes either.
    """
    faults, modules = [], set()
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ImportFrom):
            continue
        if not node.level and not (node.module or "").startswith("llm_course"):
            continue
        for alias in node.names:
            modules.add(alias.asname or alias.name)
            if alias.name.startswith("_") and alias.name != "__version__":
                faults.append(f"{alias.name} is private to {node.module}")
    own = private_names(code)
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        base = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr.startswith("__"):
            continue
        if base in modules and base.islower():
            faults.append(f"{ast.unparse(node)} is private to {base}")
        elif node.attr in owners and node.attr not in own:
            faults.append(f"{ast.unparse(node)} is private to {owners[node.attr]}")
    return faults


def lines_of_code(code: str) -> int:
    """How many lines hold code: no docstring, no comment, and not blank."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(code.splitlines(), start=1)
    held = ((number, line.strip()) for number, line in lines)
    return sum(bool(line) and line[0] != "#" and n not in docstrings for n, line in held)


def cell_faults(notebook: dict) -> list[str]:
    """Exported cells that are longer than a reader takes in at once; a table is meant to be."""
    faults = []
    for index, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or not re.match(r"#\|\s*export", source):
            continue
        named = set(re.findall(r"^(?:class )?(\w+)\b", source, re.MULTILINE))
        limit = WHOLE_LINES if named & WHOLE else CELL_LINES
        lines = lines_of_code(source)
        if lines > limit and not named & TABLES:
            faults.append(f"exported cell {index} has {lines} lines of code, {limit} at most")
    return faults


@cache
def private_owners() -> dict[str, str]:
    """The module of each private name."""
    return {
        name: path.relative_to(ROOT).as_posix()
        for path in MODULES
        for name in private_names(path.read_text(encoding="utf-8"))
        if not hasattr(NamedTuple("Any", []), name)  # `_fields` and `_asdict` are public there
    }


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_module_is_readable(path):
    code = path.read_text(encoding="utf-8")
    assert size_faults(code) == []
    assert packed_faults(code) == []
    assert private_faults(code, private_owners()) == []


@pytest.mark.parametrize("path", BORROWERS, ids=names(BORROWERS))
def test_nobody_borrows_private_names(path):
    """Neither pages and exercises nor scripts; tests may, where they plant a failure."""
    code = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(code)["cells"] if cell["cell_type"] == "code"]
        python = TransformerManager().transform_cell  # `%magic` becomes a call
        code = "\n".join(python("".join(cell["source"])) for cell in cells)
    assert private_faults(code, private_owners()) == []


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_module_has_no_wide_line(path):
    """`ruff` sees the notebooks; this sees what nbdev makes of them, beside its own `__all__`."""
    code = re.sub(r"^__all__ = \[.*?\]\n", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert [line for line in code.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_exported_cells_are_short(path):
    assert cell_faults(json.loads(path.read_text(encoding="utf-8"))) == []


# ---------------------------------------------------------------- the rules can fail


def test_planted_sizes():
    long_function = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
    assert len(size_faults(long_function)) == 1
    assert size_faults("def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1)) == []
    assert len(size_faults("class A:\n" + "    x = 1\n" * CLASS_LINES)) == 1


@pytest.mark.parametrize(
    "code, count",
    [
        ("a, b = 1, 2", 1),
        ("self.a, self.b = a, b", 1),
        ("a, b = b, a", 0),
        ("a, b = f(x)", 0),
        ("x = 1\ny = 2", 0),
    ],
)
def test_planted_packing(code, count):
    assert len(packed_faults(code)) == count


@pytest.mark.parametrize(
    "code, count",
    [
        ("from llm_course.model.moe import _load", 1),
        ("from .moe import _load", 1),
        ("from ..text import bpe\nbpe._SYMBOLS", 1),
        ("from ..text import bpe\nbpe.SYMBOLS", 0),
        ("from torch.optim._functional import _adam", 0),
        ("class B(A):\n    def f(self):\n        return self._load", 1),
        ("class B(A):\n    _load = 1\n    def f(self):\n        return self._load", 0),
        ("x = step.totals()._asdict()", 0),
    ],
)
def test_planted_borrowing(code, count):
    assert len(private_faults(code, {"_load": "model/moe.py"})) == count


def test_planted_cell():
    def page(source: str) -> dict:
        return {"cells": [{"cell_type": "code", "source": [source]}]}

    assert len(cell_faults(page("#| export\n" + "x = 1\n" * (CELL_LINES + 1)))) == 1
    assert cell_faults(page("x = 1\n" * 100)) == []
    longer = "    x = 1\n" * (CELL_LINES + 1)
    assert cell_faults(page("#| export\nclass DecoderModel:\n" + longer)) == []
    assert len(cell_faults(page("#| export\nclass Other:\n" + longer))) == 1
    assert len(cell_faults(page("#| export\nclass DecoderModel:\n" + 2 * longer))) == 1
    documented = "def f():\n" + '    """\n' + "    a line\n" * 100 + '    """\n'
    assert cell_faults(page("#| export\n" + documented)) == []
    assert cell_faults(page("#| export\nPRESETS = {\n" + "    1: 1,\n" * 100 + "}")) == []

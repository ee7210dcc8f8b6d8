"""The exercises grade the student: solutions pass, blanks fail, and each wrong answer is caught by
a message that teaches.

A graded notebook in solutions/ gives its cells names: `task3-mask` holds a solution,
`task3-mask-test` its test, and more tests of it are called `task3-mask-test-NAME`. The wrong
answers to NN_name.ipynb stand in wrong_answers/NN_name.md.
"""

import ast
import contextlib
import functools
import io
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbgrader.nbgraderformat import MetadataValidator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import exercises  # noqa: E402

NOTEBOOKS = exercises.find_exercises()
NAMES = [path.stem for path in NOTEBOOKS]
FEWEST_WRONG_ANSWERS = 5
MARKERS = (
    "BEGIN SOLUTION",
    "END SOLUTION",
    "BEGIN HIDDEN TESTS",
    "END HIDDEN TESTS",
    "MARK SCHEME",
)


@dataclass(frozen=True)
class Cell:
    name: str  # nbgrader's grade_id, or empty
    # "given", "solution", "test" (graded by the machine) or "manual" (graded by a person)
    kind: str
    source: str
    is_code: bool
    points: float

    @property
    def task(self) -> str:
        return self.name.split("-")[0]


def read_cells(path: Path) -> list[Cell]:
    cells = []
    for cell in nbformat.read(path, as_version=4).cells:
        marks = cell.metadata.get("nbgrader", {})
        kind = {(1, 0): "test", (0, 1): "solution", (1, 1): "manual"}.get(
            (marks.get("grade"), marks.get("solution")), "given"
        )
        cells.append(
            Cell(
                marks.get("grade_id", ""),
                kind,
                cell.source,
                cell.cell_type == "code",
                marks.get("points", 0),
            )
        )
    return cells


@functools.cache
def compiled(source: str, name: str):
    return compile(source, name, "exec")


def run(cells: list[Cell], *, replace: dict[str, str] | None = None) -> dict[str, Exception]:
    """Run the code cells in a fresh namespace, as nbgrader does: on after an error. Return the
    errors by the cells' names.

    `replace` gives cells another source.
    """
    namespace: dict = {"__name__": "__main__"}
    errors: dict[str, Exception] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in cells:
            if not cell.is_code:
                continue
            try:
                exec(compiled((replace or {}).get(cell.name, cell.source), cell.name), namespace)
            except Exception as error:
                errors[cell.name] = error
    return errors


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class Answer:
    exercise: str
    cell: str
    name: str
    message: str  # a part of what the student must be told
    # ("python", a whole cell) or ("diff", changes to the solution)
    blocks: tuple[tuple[str, str], ...]

    @property
    def is_right(self) -> bool:
        return self.message == "passes"

    def write(self, solution: str) -> str:
        """The cell as the student hands it in."""
        for language, block in self.blocks:
            if language == "python":
                solution = block
                continue
            lines = block.rstrip("\n").split("\n")
            old = "".join(line[1:] + "\n" for line in lines if line.startswith("-"))
            new = "".join(line[1:] + "\n" for line in lines if line.startswith("+"))
            framed = f"\n{solution}\n"  # so that only whole lines match
            assert framed.count(f"\n{old}") == 1, (
                f"{self.name}: not once in the solution of {self.cell}:\n{old}"
            )
            solution = framed.replace(f"\n{old}", f"\n{new}")[1:-1]
        return solution


def read_answers(path: Path) -> list[Answer]:
    """`## cell`, below it for each answer `### name`, `> the words that must appear`, and a fenced
    block or more.
    """
    answers = []
    for section in re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        cell, *parts = re.split(r"^### ", section, flags=re.MULTILINE)
        for part in parts:
            quoted = re.findall(r"^> (.+)$", part, re.MULTILINE)
            blocks = re.findall(r"^```(python|diff)\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
            name = part.splitlines()[0].strip()
            assert quoted and blocks, (
                f"{path.name}, {name}: needs a quoted message and a block of code"
            )
            answers.append(Answer(path.stem, cell.strip(), name, quoted[0].strip(), tuple(blocks)))
    return answers


ANSWERS = [
    answer
    for name in NAMES
    if (path := ROOT / "tests" / "wrong_answers" / f"{name}.md").exists()
    for answer in read_answers(path)
]


@functools.cache
def cells_of(exercise: str) -> list[Cell]:
    return read_cells(exercises.SOURCES / f"{exercise}.ipynb")


def only_task(cells: list[Cell], task: str) -> list[Cell]:
    """The cells of a task, and those that are given to all."""
    return [cell for cell in cells if cell.task == task or not re.fullmatch(r"task\d+", cell.task)]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: f"{a.exercise}-{a.cell}-{a.name}")
def test_answer(answer):
    """A wrong answer fails its task with a message that teaches; a right one passes.
    `test_tasks_stand_alone` is why the other tasks are not run. Nor are, for a wrong one, the tests
    of the other answers to its task: nothing is asked of them.
    """
    cells = only_task(cells_of(answer.exercise), answer.cell.split("-")[0])
    if not answer.is_right:
        own_test = f"{answer.cell}-test"
        cells = [c for c in cells if c.kind != "test" or c.name.startswith(own_test)]
    solution = {cell.name: cell.source for cell in cells if cell.kind == "solution"}[answer.cell]
    errors = run(cells, replace={answer.cell: answer.write(solution)})
    if answer.is_right:
        assert errors == {}, "another way to the right result must earn its points"
        return
    own = {name: error for name, error in errors.items() if name.startswith(own_test)}
    assert own, f"nothing noticed it; errors elsewhere: {errors}"
    assert errors == own, "the answer itself must run: it is wrong, not broken"
    for name, error in own.items():
        assert isinstance(error, AssertionError), (
            f"{name} ends in {error!r}, not in a message of its own"
        )
    assert any(answer.message in str(error) for error in own.values()), "\n".join(
        map(str, own.values())
    )


@pytest.mark.parametrize("exercise", NAMES)
def test_every_graded_cell_has_wrong_answers(exercise):
    cells = cells_of(exercise)
    found = [
        answer.cell for answer in ANSWERS if answer.exercise == exercise and not answer.is_right
    ]
    tested = {cell.name.split("-test")[0] for cell in cells if cell.kind == "test"}
    assert {cell.name for cell in cells if cell.kind == "solution"} == tested == set(found)
    assert {
        name: found.count(name) for name in tested if found.count(name) < FEWEST_WRONG_ANSWERS
    } == {}


# ---------------------------------------------------------------- the notebooks


@pytest.mark.parametrize("exercise", NAMES)
def test_names_points_and_messages(exercise):
    cells = cells_of(exercise)
    graded = [cell for cell in cells if cell.kind in ("test", "manual")]
    assert graded and all(cell.points > 0 for cell in graded)
    tests = [cell.name for cell in cells if cell.kind == "test"]
    assert [
        name for name in tests if not re.fullmatch(r"task\d+-[a-z0-9_]+-test(-[a-z0-9_]+)?", name)
    ] == []
    assert [cell.source for cell in cells if cell.is_code and not cell.name] in (
        [],
        ["# Measure here. This cell is not graded."],
    ), "every code cell needs a grade_id, lock those that are given; but one to try things in"
    given = [cell.source for cell in cells if cell.is_code and cell.kind == "given"]
    assert 'warnings.simplefilter("ignore")' in given[0], "a warning costs points"
    text = "\n".join(cell.source for cell in cells if not cell.is_code)
    for cell in graded:
        statements = (
            [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Assert)]
            if cell.is_code
            else []
        )
        assert [ast.unparse(s) for s in statements if not s.msg] == [], (
            f"{cell.name}: an assert without a message"
        )
    assert sum(cell.points for cell in graded) == sum(
        map(int, re.findall(r"^\| \d+ \|.*\| (\d+) \|$", text, re.MULTILINE))
    )
    tasks = len({cell.task for cell in graded})
    assert text.count("<summary>Hint 1</summary>") >= tasks and text.count("Hint 1<") == text.count(
        "Hint 2<"
    )


def metadata_faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What nbgrader would stumble over: cells that are marked as nothing, twice, or without points.

    It looks up the `grade_id` of every marked cell, yet a cell that is neither graded, nor to be
    solved, nor locked loses its own: such a cell must carry no mark at all.
    """
    faults = []
    seen = set()
    for cell in notebook.cells:
        marks = cell.metadata.get("nbgrader")
        if marks is None:
            continue
        name = marks.get("grade_id")
        given = (marks["grade"], marks["solution"], marks["locked"])
        allowed = {
            "code": {(False, False, True), (False, True, False), (True, False, True)},
            "markdown": {(True, True, False)},
        }[cell.cell_type]
        if given not in allowed:
            faults.append(f"{name}: grade, solution and locked are {given}")
        if not name or name in seen:
            faults.append(f"the grade_id {name!r} is empty or not unique")
        if marks["grade"] != (marks.get("points", 0) > 0):
            faults.append(f"{name}: a graded cell has points, and no other has")
        seen.add(name)
    return faults


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_metadata_is_what_nbgrader_accepts(path):
    notebook = nbformat.read(path, as_version=4)
    MetadataValidator().validate_nb(notebook)
    assert metadata_faults(notebook) == []


def test_planted_metadata():
    def cell(name, *marks, **points):
        grade, solution, locked = marks
        keys = {"grade_id": name, "grade": grade, "solution": solution, "locked": locked}
        return nbformat.v4.new_code_cell(metadata={"nbgrader": keys | points})

    def faults(*cells):
        return len(metadata_faults(nbformat.v4.new_notebook(cells=list(cells))))

    graded = (True, False, True)
    good = cell("a", *graded, points=1)
    assert faults(good, cell("b", False, True, False)) == 0
    assert faults(cell("a", False, False, False)) == 1
    assert faults(good, cell("a", *graded, points=1)) == 1
    assert (
        faults(cell("a", True, False, True)) == faults(cell("a", False, True, False, points=1)) == 1
    )


def names_in(source: str, context: type[ast.Load] | type[ast.Store]) -> set[str]:
    """The names that a cell reads or binds, at its top level or inside."""
    nodes = list(ast.walk(ast.parse(source)))
    bound = {
        node.name
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and context is ast.Store
    }
    return bound | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }


@pytest.mark.parametrize("exercise", NAMES)
def test_tasks_stand_alone(exercise):
    """Each task passes without the others, and reads no name that a student writes for another."""
    cells = [cell for cell in cells_of(exercise) if cell.is_code]
    tasks = {cell.task for cell in cells if cell.kind == "solution"}
    for task in tasks:
        assert run(only_task(cells, task)) == {}
    wanted = {
        cell.name: {
            node.name
            for node in ast.parse(cell.source).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        for cell in cells
        if cell.kind == "solution"
    }
    for name, asked in wanted.items():
        task = name.split("-")[0]
        readers = [
            cell.name
            for cell in cells
            if cell.task != task
            and cell.kind != "solution"
            and names_in(cell.source, ast.Load) & asked
        ]
        assert readers == [], f"{name} writes {asked}"


# ---------------------------------------------------------------- the release, and nbgrader itself


def check_release(source: Path, released: Path) -> None:
    """The student version has the same cells, with stubs, and gives nothing away."""
    text = released.read_text(encoding="utf-8")
    assert [marker for marker in MARKERS if marker in text] == []
    assert all(not cell.get("outputs") for cell in nbformat.read(released, as_version=4).cells)
    for before, after in zip(read_cells(source), read_cells(released), strict=True):
        assert after.name == before.name
        assert "YOUR" in after.source or before.kind not in ("solution", "manual")
        assert before.kind != "manual" or before.source not in after.source
        for region in re.findall(
            r"### BEGIN (?:SOLUTION|HIDDEN TESTS)\n(.*?)### END", before.source, re.DOTALL
        ):
            assert region.strip() not in after.source


@pytest.fixture(scope="module")
def student_folder(tmp_path_factory) -> Path:
    """All that a student gets."""
    folder = tmp_path_factory.mktemp("student") / "course"
    exercises.main(["student", str(folder)])
    return folder


@pytest.mark.filterwarnings("ignore:Object of type")  # SQLAlchemy on nbgrader's queries
def test_release_gives_nothing_away(tmp_path, student_folder):
    """What students get has stubs for the solutions, fails every test as it is, and is the same
    each time it is made.
    """
    for path in exercises.release(NOTEBOOKS[::8], tmp_path / "course", tmp_path / "exercises"):
        assert (student_folder / "exercises" / path.name).read_bytes() == path.read_bytes()
    for source in NOTEBOOKS:
        path = student_folder / "exercises" / source.name
        check_release(source, path)
        cells = read_cells(path)
        assert {cell.name for cell in cells if cell.kind == "test"} <= run(cells).keys(), (
            f"{path.stem}: a blank earns points"
        )


def read_text(path: Path, *kinds: str) -> str:
    """A file as text, a notebook as the sources of its cells of these kinds."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type in kinds)


@pytest.mark.filterwarnings("ignore:Object of type")
def test_student_release_is_complete_and_gives_nothing_away(student_folder):
    """Every link leads somewhere, and no file holds a solution, a hidden test or a mark scheme."""
    folder = student_folder
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix() for path in files}
    assert {"nbs/index.ipynb", "llm_course/cli.py", "exercises/05_attention.ipynb"} <= names
    assert [name for name in names if name.startswith(("solutions", "tests", "_nbgrader"))] == []
    dead = [
        (path.name, link)
        for path in files
        if path.suffix in (".md", ".ipynb")
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", read_text(path, "markdown"))
        if not (path.parent / link).exists()
    ]
    assert dead == []
    # weights and pictures hold no text
    texts = [path for path in files if path.suffix not in (".safetensors", ".png")]
    everything = "\n".join(read_text(path, "markdown", "code") for path in texts)
    assert [marker for marker in MARKERS if marker in everything] == []
    regions = [
        region.strip()
        for name in NAMES
        for cell in cells_of(name)
        for region in re.findall(
            r"### BEGIN (?:SOLUTION|HIDDEN TESTS)\n(.*?)### END", cell.source, re.DOTALL
        )
        if cell.is_code
    ]
    written = [cell.source for name in NAMES for cell in cells_of(name) if cell.kind == "manual"]
    assert len(regions) > 100 and len(written) > 10
    assert [secret for secret in regions + written if secret in everything] == []
    with pytest.raises(SystemExit, match="not empty"):
        exercises.main(["student", str(folder)])


def test_a_students_checkers_hold_what_the_visible_tests_call_and_no_more(student_folder):
    for source in NOTEBOOKS:
        shown = read_text(student_folder / "exercises" / source.name, "code")
        imports = re.findall(r"from llm_course\.pages import (exercise_\w+) as (\w+)", shown)
        assert imports, source.name
        for module, name in set(imports):
            path = student_folder / "llm_course" / "pages" / f"{module}.py"
            checker = runpy.run_path(str(path))
            assert set(re.findall(rf"\b{name}\.(\w+)", shown)) <= checker.keys(), path.name
            assert [one for one in checker if one.startswith("hidden_")] == []
    code = "def a(): return b()\ndef b(): return 1\n\n@cache\ndef c(): return a()\nONE = 1\n"
    assert exercises.without_hidden(code, "check.a()") == code.replace(
        "@cache\ndef c(): return a()\n", ""
    )
    assert exercises.without_hidden(code + "TWO = c\n", "check.b()") == code + "TWO = c\n"


def test_work_in_the_release_is_not_overwritten(tmp_path, monkeypatch, capsys):
    """Without nbgrader: a stand-in makes the student versions."""

    def generate(sources: list[Path], course: Path, seed: int) -> list[Path]:
        made = course / "release" / "05_x" / "05_x.ipynb"
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(version)
        return [made]

    monkeypatch.setattr(exercises, "generate", generate)
    arguments = [], tmp_path / "course", tmp_path / "exercises"
    target = tmp_path / "exercises" / "05_x.ipynb"
    for version in ("first", "first", "second"):  # nobody has touched the file, so it follows
        assert exercises.release(*arguments) == [target]
        assert target.read_text() == version
    target.write_text("a student's work")
    for version in ("second", "third"):  # noqa: B007
        assert exercises.release(*arguments) == []
        assert target.read_text() == "a student's work" and "kept" in capsys.readouterr().err
    assert exercises.release(*arguments, force=True) == [target]
    assert target.read_text() == "third"

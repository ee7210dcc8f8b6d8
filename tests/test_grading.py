"""No submission harms, cheats or ends the grading of others: the grader, and attacks on it.

Every attack is run, one exercise goes through nbgrader with all kinds of files, and a right and a
wrong copy of each of the twenty. Students' code runs in the best isolation that this machine has;
what needs one is skipped where there is none.
"""

import ast
import csv
import functools
import json
import os
import re
import socket
import sys
import time
import zipfile
from pathlib import Path

import nbformat
import pytest

if os.name != "posix":
    pytest.skip("grading needs Linux or macOS", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]
import answers  # noqa: E402
import attacks  # noqa: E402
import exercises  # noqa: E402
import grading  # noqa: E402
import isolation  # noqa: E402
import similarity  # noqa: E402
import test_exercises as corpus  # noqa: E402

WORKING = [way for way in isolation.WAYS if not isolation.find_ways()[way.name]]
WAY = WORKING[0] if WORKING else isolation.TRUST
apart = pytest.mark.skipif(not WORKING, reason="nothing here keeps programs apart")
sources = {path.stem: path for path in exercises.find_exercises()}


@functools.cache
def exercise_called(name: str) -> grading.Exercise:
    return grading.Exercise(sources[name])


def blank_of(name: str) -> nbformat.NotebookNode:
    """The exercise as a student gets it, made of the solution as nbgrader makes it."""
    notebook = nbformat.read(sources[name], as_version=4)
    for cell in notebook.cells:
        if grading.is_answer(cell):
            cell.source = "raise NotImplementedError()"
    return notebook


def run(name: str, replace: dict[str, str], task: str = "") -> dict[str, str | None]:
    """Run the blank exercise, or one task of it, with some answers; the error of each cell, None
    where there is none.
    """
    notebook = blank_of(name)
    if task:
        tasks = {id(cell): grading.task_of(grading.grade_id(cell)) for cell in notebook.cells}
        notebook.cells = [cell for cell in notebook.cells if tasks[id(cell)] in ("", task)]
    for cell in notebook.cells:
        cell.source = replace.get(grading.grade_id(cell), cell.source)
    grading.run_notebook(notebook, exercise_called(name), WAY)
    found = {}
    for cell in notebook.cells:
        errors = [o.evalue for o in cell.get("outputs", ()) if o.output_type == "error"]
        found[grading.grade_id(cell)] = errors[0] if errors else None
    return found


def refusal(name: str, code: str) -> str:
    """Why the rules refuse an answer before it runs; empty where they don't."""
    session = answers.Session([], sorted(exercise_called(name).opened))
    try:
        answers.Rules(session.opened).visit(ast.parse(answers.without_magics(code)))
    except answers.Refused as error:
        return str(error)
    except (SyntaxError, MemoryError, RecursionError):  # no Python, or too deep
        pass
    return ""


def outcome(name: str, cell: str, code: str, task: str = "") -> tuple[list[str], str]:
    """The tests that an attack passes, and everything that the grader says. What the rules refuse
    needs no process: `test_what_the_rules_refuse_does_not_run`.
    """
    if said := refusal(name, code):
        return [], said
    try:
        found = run(name, {cell: code}, task)
    except grading.NotGraded as error:
        return [], str(error)
    tests = exercise_called(name).tests & found.keys()
    passed = [test for test in tests if found[test] is None]
    return passed, "\n".join(filter(None, found.values()))


def ids(table: list) -> list[str]:
    return [row[0] for row in table]


@pytest.fixture(autouse=True)
def short_cells(monkeypatch):
    monkeypatch.setattr(grading, "CELL_SECONDS", 6.0)
    monkeypatch.setattr(grading, "PATIENCE", 2.0)


@pytest.mark.parametrize("name, code, words", attacks.PLAIN, ids=ids(attacks.PLAIN))
def test_attack_earns_nothing(name, code, words, monkeypatch):
    monkeypatch.setattr(grading, "CELL_SECONDS", 2.0)
    passed, said = outcome("01_tokenization", "task2-choose", code)
    assert passed == []
    assert words in said
    assert "\x1b" not in said


def test_what_the_rules_refuse_does_not_run():
    """A right answer passes, and earns nothing with one refused word below it."""
    [cell] = [c for c in corpus.cells_of("01_tokenization") if c.name == "task2-choose"]
    found = run("01_tokenization", {cell.name: cell.source}, cell.task)
    assert found[f"{cell.name}-test"] is None
    found = run("01_tokenization", {cell.name: f"{cell.source}\nimport socket"}, cell.task)
    assert "`socket` is closed" in found[cell.name] and found[f"{cell.name}-test"]


@pytest.mark.parametrize("name, code, words", attacks.TORCH, ids=ids(attacks.TORCH))
def test_attack_on_torch_earns_nothing(name, code, words):
    passed, said = outcome("05_attention", "task7-alibi", code, "task7")
    assert passed == [] and words in said


@pytest.mark.parametrize("name, code, words", attacks.READY, ids=ids(attacks.READY))
def test_ready_made_answer_earns_nothing(name, code, words):
    passed, said = outcome("05_attention", "task2-mask", code, "task2")
    assert passed == [] and words in said


@apart
@pytest.mark.parametrize(
    "name, exercise, cell, code, words", attacks.SHARED, ids=ids(attacks.SHARED)
)
def test_nothing_that_a_cell_did_meets_the_tests(name, exercise, cell, code, words):
    """No hook, no thread and no process of a student's cell is there, nor can memory be read."""
    passed, said = outcome(exercise, cell, code, cell.split("-")[0])
    assert passed == [] and words in said
    assert "BEGIN HIDDEN" not in said


WAYS_TO_DEFINE = """
import functools
LIMIT = 2
TABLE = {}
for key in range(3):
    TABLE[key] = (key, {float(key)}, b"x", 1j, None)
least, most = min, functools.partial(max, default=None)
def choose_pair(words, lengths, *, min_frequency=LIMIT, max_bytes=None):
    assert TABLE[2] == (2, {2.0}, b"x", 1j, None) and Rules.limit == LIMIT
    choose_pair.calls += 1
    counts = Counter()
    for symbols, frequency in words.items():
        for pair in pairwise(symbols):
            counts[pair] += frequency
    room = math.inf if max_bytes is None else max_bytes
    allowed = [(a, b) for (a, b), n in counts.items()
               if n >= min_frequency and lengths[a] + lengths[b] <= room]
    return least(allowed, key=lambda pair: (-counts[pair], pair), default=None)
choose_pair.calls = 0
class Rules:
    pass
Rules.limit = LIMIT
print(choose_pair({(1, 2): 3}, [1] * 9))
"""


def test_what_a_cell_defines_is_there_for_the_tests():
    """Functions, classes, what they carry, assignments, and plain data made in any way."""
    passed, said = outcome("01_tokenization", "task2-choose", WAYS_TO_DEFINE, "task2")
    assert passed == ["task2-choose-test"], said


def test_what_is_not_defined_anew_is_named():
    code = "for number in range(3):\n    def choose_pair(*rest, **more):\n        return None\n"
    passed, said = outcome("01_tokenization", "task2-choose", code, "task2")
    assert passed == [] and "`choose_pair` is made by a statement that the grader does not" in said


def test_copied_answer_earns_nothing():
    """The package's encoder under other names, without its docstring, is still the package's."""
    [cell] = [c for c in corpus.cells_of("01_tokenization") if c.name == "task3-encode"]
    [wanted] = [n for n in ast.parse(cell.source).body if isinstance(n, ast.FunctionDef)]
    text = (ROOT / "llm_course/text/merging.py").read_text(encoding="utf-8")
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    [copied] = [node for node in functions if node.name == "merge_by_rank"]
    copied.name = wanted.name
    code = re.sub(r"\bsymbols\b", "mine", ast.unparse(copied))
    passed, said = outcome("01_tokenization", "task3-encode", code)
    assert passed == [] and "is the package's own `merge_by_rank`" in said


@pytest.mark.parametrize("name, code, words", attacks.ENDING, ids=ids(attacks.ENDING))
def test_notebook_that_never_ends(name, code, words, monkeypatch):
    monkeypatch.setattr(grading, "CELL_SECONDS", 1.0)
    passed, said = outcome("01_tokenization", "task2-choose", code)
    assert passed == [] and words in said


@apart
@pytest.mark.parametrize("name, code, words", attacks.WITH_OS, ids=ids(attacks.WITH_OS))
def test_attack_with_os(name, code, words):
    passed, said = outcome("02_data", "task2-collate", code)
    assert passed == [] and words in said


def test_rules_are_open_to_honest_answers():
    """Of all answers that the exercises are tested with, right or wrong, the rules refuse six: one
    that patches a module's clock, one that keeps state in a function's `__dict__`, two that import
    what their exercise doesn't open (`os` and `filelock`), and two, which are wrong, that write
    into a frozen dataclass by `object.__setattr__`.
    """
    refused = []
    for answer in corpus.ANSWERS:
        cells = {cell.name: cell.source for cell in corpus.cells_of(answer.exercise)}
        opened = exercise_called(answer.exercise).opened
        session = answers.Session([], sorted(opened))
        try:
            answers.Rules(session.opened).visit(ast.parse(answer.write(cells[answer.cell])))
        except answers.Refused:
            refused.append(answer.name)
    assert sorted(refused) == [
        "Filled in at once",
        "One seen for all calls",
        "The file of another environment",
        "The key/value heads filled in",
        "The lock taken",
        "The package's monitor under another clock",
    ]


# ---------------------------------------------------------------- what student code can reach


def probe(way: isolation.Isolation, code: str, tmp_path: Path) -> str:
    """What a program prints that runs under `way`."""
    isolation.give_away(tmp_path)
    process = way.start([sys.executable, "-c", code], tmp_path)
    return process.communicate(timeout=60)[0].decode().strip()


@apart
@pytest.mark.parametrize("way", WORKING, ids=[way.name for way in WORKING])
def test_student_code_reaches_nothing(way, tmp_path):
    secret = tmp_path / "gradebook.db"
    secret.write_text("26 points")
    home = tmp_path / "home"
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach_nothing(way, secret, home, server.getsockname()[1])
    assert secret.read_text() == "26 points"
    for path in list(home.iterdir()):
        path.unlink()
    assert probe(way, "import os; print(os.listdir(os.path.expanduser('~')))", home) == "[]"


def reach_nothing(way: isolation.Isolation, secret: Path, home: Path, port: int) -> None:
    code = f"""
import os, socket
def fails(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return True
print(os.getuid() != 0 or {os.geteuid() != 0})
print(fails(open, {str(secret)!r}), fails(os.listdir, {str(ROOT / "solutions")!r}))
print(fails(os.remove, {str(secret)!r}), fails(open, {str(ROOT / "llm_course/cli.py")!r}, "a"))
print(fails(open, {sys.prefix + "/new"!r}, "w"), fails(os.kill, {os.getpid()}, 0))
print(fails(socket.create_connection, ("127.0.0.1", {port}), 1) or {not way.home})
print(sorted(os.listdir(os.path.expanduser("~"))))
open(os.path.expanduser("~/sitecustomize.py"), "w").write("x = 1")
"""
    expected = ["True", "True True", "True True", "True True", "True", "[]"]
    assert probe(way, code, home).splitlines() == expected


@apart
def test_limits(tmp_path):
    program = "import sys; sys.path.insert(0, '/course'); import resource\n"
    code = (ROOT / "scripts" / "answers.py").read_text(encoding="utf-8").split("def main")[0]
    checks = """
limit(True)
file = open(os.path.expanduser("~/f"), "wb")
for action in (lambda: bytearray(MEMORY + 1), lambda: file.write(bytes(FILE + 10**6))):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        action()
        print("no limit")
    except (MemoryError, OSError) as error:
        print(type(error).__name__)
"""
    said = probe(WAY, program + code + checks, tmp_path)
    assert said.splitlines() == ["MemoryError", "OSError"]


def test_no_isolation_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(isolation, "find_ways", lambda: {w.name: "none" for w in isolation.WAYS})
    with pytest.raises(ValueError, match="Install bubblewrap.*--trust"):
        isolation.choose()
    with pytest.raises(SystemExit, match="--trust"):
        exercises.main(["grade", str(tmp_path)])


@pytest.mark.parametrize("command", ["grade", "student"])
def test_a_folder_must_be_named(command):
    with pytest.raises(SystemExit, match=f"make {command} DIR=FOLDER"):
        exercises.main([command, ""])


# ---------------------------------------------------------------- files and names


@pytest.mark.parametrize(
    "name, found",
    [
        ("05_attention.ipynb", "05_attention"),
        ("05_attention (1).ipynb", "05_attention"),
        ("05_attention_jane.ipynb", "05_attention"),
        ("Jane-05_Attention-Copy1.IPYNB", "05_attention"),
        ("05 Attention.ipynb", "05_attention"),
        ("105_attention.ipynb", None),
        ("05_attentions.ipynb", None),
        ("attention.ipynb", None),
        ("05_attention 06_mlp.ipynb", None),
    ],
)
def test_names_are_matched_where_they_are_clear(name, found):
    assert grading.exercise_of(name, list(sources)) == found


def test_what_is_not_clear_is_listed(tmp_path):
    names = [
        "ann/deep/er/05_attention.ipynb",
        "ben/homework.ipynb",
        "cat/05_attention.ipynb",
        "cat/05_attention (1).ipynb",
        "eve/.ipynb_checkpoints/05_attention-checkpoint.ipynb",
        "05_attention.ipynb",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "dan").mkdir()
    handed_in, problems = grading.collect(tmp_path, list(sources))
    assert list(handed_in) == [("ann", "05_attention")]
    assert {(p.student, p.what) for p in problems} == {
        ("", "05_attention.ipynb"),
        ("ben", "homework.ipynb"),
        ("cat", "05_attention"),
        ("dan", "-"),
        ("eve", "-"),
    }


@pytest.mark.parametrize(
    "names, students",
    [
        (["Jane Doe_1234567_assignsubmission_file_"], ["Jane Doe"]),
        (["Jane Doe_1234567_assignsubmission_file"], ["Jane Doe"]),
        (["Zoë O'Neil_12_assignsubmission_file_05_attention.ipynb"], ["Zoë O_Neil"]),
        (["doejane_4321_98765_05_attention-1.ipynb"], ["doejane"]),
        (["doejane_LATE_4321_98765_05_attention.ipynb"], ["doejane"]),
        (["Jane Doe_1_assignsubmission_file_", "Jane Doe_2_assignsubmission_file_"], None),
        (["course-jane", "jane_doe", "j.doe@example.org"], None),
        (["=1+1", 'Doe, "Jane"'], ["_1_1", "Doe_ _Jane_"]),
    ],
)
def test_platforms_name_the_students(names, students):
    """Two of one name keep their numbers; nothing in a name ends a column of a table."""
    expected = students or [re.sub("_assignsubmission_file_", "", name) for name in names]
    assert list(grading.students_of(names).values()) == expected


def test_an_archive_is_taken_as_it_comes(tmp_path):
    archive = tmp_path / "moodle.zip"
    with zipfile.ZipFile(archive, "w") as files:
        for name in (
            "Jane Doe_17_assignsubmission_file_/05_attention.ipynb",
            "Jane Doe_17_assignsubmission_file_/nbs/03_embedding.ipynb",
            "John Roe_18_assignsubmission_file_05_Attention (2).ipynb",
            "../outside.ipynb",
        ):
            files.writestr(zipfile.ZipInfo(name, (2027, 2, 3, 4, 5, 6)), "{}")
    with exercises.opened(archive) as folder:
        handed_in, problems = grading.collect(folder, list(sources))
        assert list(handed_in) == [("Jane Doe", "05_attention"), ("John Roe", "05_attention")]
        assert [(p.student, p.what) for p in problems] == [("", "outside.ipynb")]
        times = {time.localtime(path.stat().st_mtime)[:6] for path in handed_in.values()}
        assert times == {(2027, 2, 3, 4, 5, 6)}
    assert [path.name for path in tmp_path.iterdir()] == ["moodle.zip"]
    (tmp_path / "not.zip").write_text("")
    with pytest.raises(SystemExit, match="no folder or zip archive"):
        exercises.opened(tmp_path / "not.zip").__enter__()


def test_an_archive_that_would_fill_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(grading, "LARGEST_ARCHIVE", 10)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w") as files:
        files.writestr("jane/05_attention.ipynb", "x" * 11)
    with pytest.raises(SystemExit, match="would unpack to 11 bytes"):
        exercises.opened(tmp_path / "bomb.zip").__enter__()


def test_escape_sequences_do_not_reach_a_terminal():
    text = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \u202eabc\r\n\x1b"
    assert grading.printable(text).isprintable()
    assert "red" in grading.printable(text) and "title" not in grading.printable(text)


def cell_of(name: str, source: str = "x = 1", **marks) -> nbformat.NotebookNode:
    marks = {"grade_id": name, "grade": False, "solution": True, "locked": False} | marks
    return nbformat.v4.new_code_cell(source, metadata={"nbgrader": marks})


def test_only_answers_are_taken_from_a_submission():
    """Points, tests, order and further marked cells are those of the exercise."""
    test = {"grade": True, "solution": False, "locked": True, "points": 2}
    handed_out = nbformat.v4.new_notebook(
        cells=[cell_of("a"), cell_of("a-test", "assert False", **test), cell_of("b")]
    )
    theirs = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("helper = 1"),
            cell_of("a-test", "assert True", **(test | {"points": 100})),
            cell_of("c", "stray = 1", **test),
            cell_of("a", "mine = 1"),
        ]
    )
    built = grading.rebuild(handed_out, theirs)
    assert [(grading.grade_id(cell), cell.source) for cell in built.cells] == [
        ("", "helper = 1"),
        ("a", "mine = 1"),
        ("a-test", "assert False"),
        ("", "stray = 1"),
        ("b", ""),
    ]
    assert built.cells[2].metadata.nbgrader.points == 2


# ---------------------------------------------------------------- a whole class, through nbgrader


def write_class(folder: Path, name: str, handed_out: Path) -> dict[str, str]:
    """A folder of good and bad submissions; for each bad one a part of the reason."""
    blank = handed_out.read_text(encoding="utf-8")
    solved = sources[name].read_text(encoding="utf-8")
    twice = json.loads(blank)
    twice["cells"].append(twice["cells"][-2] | {"id": "again"})
    marked = [c for c in twice["cells"] if c["metadata"].get("nbgrader")]
    twice["cells"].append(marked[1] | {"id": "twice"})
    stripped = json.loads(blank)
    for cell in stripped["cells"]:
        cell["metadata"] = {}
    files = {
        "solved": (solved, ""),
        "blank": (blank, ""),
        "empty": ("", "the file is empty"),
        "pdf": ("%PDF-1.4", "it is a PDF"),
        "conflict": (f"<<<<<<< HEAD\n{blank}\n>>>>>>> mine\n", "merge conflict"),
        "twice": (json.dumps(twice), "is there twice"),
        "stripped": (json.dumps(stripped), "lost nbgrader's metadata"),
        "old": ('{"nbformat": 3, "worksheets": []}', "notebook format 3"),
        "list": ("[1, 2]", "damaged"),
        "deep": ("[" * 100_000, "damaged"),
        "cells": ('{"nbformat": 4, "cells": [1]}', "damaged"),
    }
    for student, (text, _) in files.items():
        (folder / student).mkdir(parents=True)
        (folder / student / f"{name}.ipynb").write_text(text, encoding="utf-8")
    (folder / "folder" / f"{name}.ipynb").mkdir(parents=True)
    (folder / "folder" / f"{name}.ipynb" / "notes.txt").write_text("")
    (folder / "linked").mkdir()
    (folder / "linked" / f"{name}.ipynb").symlink_to(folder / "solved" / f"{name}.ipynb")
    reasons = {student: reason for student, (_, reason) in files.items() if reason}
    return reasons | {"folder": "it is a folder", "linked": "it is a link"}


HARM = """
import pathlib
for path in [{submissions!r}, {course!r}, {solutions!r}]:
    for file in pathlib.Path(path).rglob("*"):
        try:
            file.unlink()
        except OSError:
            pass
(pathlib.Path.home() / "sitecustomize.py").write_text("raise SystemExit")
try:
    print("x" * 10**8)
finally:
    raise AssertionError("\\x1b[2Jall points to me")
"""


def add_answer(path: Path, cell_name: str, code: str) -> str:
    notebook = nbformat.read(path, as_version=4)
    [cell] = [cell for cell in notebook.cells if grading.grade_id(cell) == cell_name]
    cell.source = code
    return nbformat.writes(notebook)


@apart
@pytest.mark.filterwarnings("ignore")
def test_a_class_is_graded_whatever_it_hands_in(tmp_path, capfd, monkeypatch):
    """One row for each student, the scores of the others are right, and nothing is harmed."""
    name = "01_tokenization"
    course = tmp_path / "course"
    submissions = tmp_path / "submissions"
    [handed_out] = exercises.release([sources[name]], course, tmp_path / "exercises")
    reasons = write_class(submissions, name, handed_out)
    places = {"submissions": submissions, "course": course, "solutions": ROOT / "solutions"}
    harm = HARM.format(**{key: str(path) for key, path in places.items()})
    (submissions / "a_harm").mkdir()
    harmful = add_answer(handed_out, "task2-choose", harm)
    (submissions / "a_harm" / f"{name} (2).ipynb").write_text(harmful, encoding="utf-8")
    (submissions / "\x1b[31mred").mkdir()
    before = sorted(path for path in submissions.rglob("*"))
    monkeypatch.setattr(exercises, "COURSE", course)
    monkeypatch.setattr(exercises, "find_exercises", lambda names=None: [sources[name]])
    assert exercises.grade_folder(submissions, WAY.name) == 1
    assert sorted(path for path in submissions.rglob("*")) == before
    output, errors = capfd.readouterr()
    assert "\x1b" not in output and WAY.name in output and "Traceback" not in output + errors
    for student, reason in reasons.items():
        assert re.search(rf"^{student} +not graded: .*{reason}", output, re.MULTILINE), student
    total = sum(cell.points for cell in corpus.cells_of(name) if cell.kind == "test")
    assert re.search(rf"^solved .* {total}\+4\?$", output, re.MULTILINE)
    assert re.search(r"^blank .* 0$", output, re.MULTILINE)
    assert re.search(r"^a_harm .* 0$", output, re.MULTILINE)
    failed = dict(re.findall(r"^blank +(task\d\S+) +(\S.+)$", output, re.MULTILINE))
    assert failed.keys() == {c.name for c in corpus.cells_of(name) if c.kind == "test"}
    check_feedback(course, name)


def check_feedback(course: Path, name: str) -> None:
    """The page that a student gets back holds no hidden test."""
    api = exercises.open_course(course, WAY.name)
    exercises.succeed(api.generate_feedback(name, "blank"), "write the feedback")
    [page] = course.glob("feedback/blank/**/*.html")
    text = re.sub(r"<[^>]+>|\s+", "", page.read_text(encoding="utf-8"))
    assert "HIDDENTESTS" not in text
    cells = "\n".join(cell.source for cell in corpus.cells_of(name))
    hidden = re.findall(r"### BEGIN HIDDEN TESTS\n(.*?)### END", cells, re.DOTALL)
    lines = [line.strip() for region in hidden for line in region.splitlines()]
    visible = re.sub(r"### BEGIN HIDDEN TESTS\n.*?### END", "", cells, flags=re.DOTALL)
    secret = [line for line in lines if len(line) > 40 and line not in visible]
    assert len(secret) > 10
    assert [line for line in secret if re.sub(r"\s+", "", line) in text] == []


@pytest.mark.filterwarnings("ignore")
def test_deadlines_and_what_goes_back(tmp_path, capfd, monkeypatch):
    """An archive is graded; late days are counted, and what comes after them earns nothing."""
    name = "04_normalization"
    monkeypatch.setattr(grading, "CELL_SECONDS", 60.0)
    monkeypatch.setattr(exercises, "COURSE", tmp_path / "course")
    course = exercises.COURSE
    exercises.generate([sources[name]], course)
    api = exercises.open_course(course)
    with exercises.Gradebook(api.coursedir.db_url, "llm_course") as gradebook:
        gradebook.update_or_create_assignment(name, duedate="2027-02-01 12:00:00 UTC")
    archive = tmp_path / "moodle.zip"
    days = {"Ann": 1, "Ben": 2, "Cid": 9}
    with zipfile.ZipFile(archive, "w") as files:
        for number, (student, day) in enumerate(days.items()):
            entry = zipfile.ZipInfo(
                f"{student}_{number}_assignsubmission_file_/{name}.ipynb", (2027, 2, day, 0, 0, 0)
            )
            files.writestr(entry, sources[name].read_text(encoding="utf-8"))
    assert exercises.grade_folder(archive, WAY.name, [name], late_days=3) == 0
    output = capfd.readouterr().out
    assert re.search(rf"^late days\nBen +1  {name} 1\nCid +8  {name} 8$", output, re.MULTILINE)
    with (course / "grades.csv").open(encoding="utf-8") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    scores = {student: float(row["score"]) for student, row in rows.items()}
    assert scores == {"Ann": 28, "Ben": 28, "Cid": 0}, output
    assert float(rows["Cid"]["late_submission_penalty"]) == 28
    pages = sorted(path.parts[-3] for path in course.glob("feedback/*/*/*.html"))
    assert pages == list(days)
    assert exercises.find_graded(course) == {(student, name) for student in days}


def test_similar_answers_are_listed():
    """A copy with other names is found; what the exercise gives, or its solution, isn't counted."""
    name = "06_mlp"
    cell = next(c for c in corpus.cells_of(name) if c.kind == "solution")
    own = "def f(x, y):\n" + "".join(
        f"    x = x * {i} + y ** {i % 7} - {i * i}\n" for i in range(30)
    )
    other = own.replace("x", "value").replace("f(", "work(").replace("\n    ", "\n    # mine\n    ")
    unlike = "def f(a):\n" + "".join(
        f"    print(a[{i}:], {i} // 3, sep='{i}')\n" for i in range(30)
    )
    answers = {"ann": own, "ben": other, "cid": unlike, "dan": cell.source, "eve": cell.source}
    notebooks = {}
    for student, code in answers.items():
        notebooks[student] = blank_of(name)
        for blank in notebooks[student].cells:
            if grading.grade_id(blank) == cell.name:
                blank.source = code
    exercise = nbformat.read(sources[name], as_version=4)
    [pair] = similarity.similar_answers(notebooks, exercise, 0.6)
    assert (pair.students, pair.cell, pair.share) == (("ann", "ben"), cell.name, 1)


# ---------------------------------------------------------------- versions by seed

VARIED = json.loads(exercises.VARIANTS.read_text(encoding="utf-8"))


def answers_in(notebook: nbformat.NotebookNode) -> dict[str, str]:
    return {grading.grade_id(c): c.source for c in notebook.cells if grading.is_answer(c)}


@pytest.mark.parametrize("name", VARIED)
def test_a_version_is_right_for_any_seed(name, tmp_path):
    """Its solution passes the tests, hidden ones too; the stored version's answers don't."""
    stored = nbformat.read(sources[name], as_version=4)
    texts = [cell.source for cell in stored.cells]
    for seed, words in enumerate(exercises.variants_of(name)[1:], 1):
        assert {old: sum(old in text for text in texts) for old in words} == dict.fromkeys(words, 1)
        source = tmp_path / f"{name}.ipynb"
        nbformat.write(exercises.vary(sources[name], seed), source)
        exercise = grading.Exercise(source)
        own = exercise.own
        changed = {n for n in own if own[n] != exercise_called(name).own[n]}
        [task] = {grading.task_of(cell) for cell in changed}
        varied = corpus.only_task(corpus.read_cells(source), task)
        assert corpus.run(varied) == {}, seed
        assert corpus.run(varied, replace=answers_in(stored)).keys() == changed, seed


def test_a_seed_is_given_to_a_class(tmp_path):
    """What students get has its numbers; who hands in another version is told."""
    [path] = exercises.release(
        [sources["04_normalization"]], tmp_path / "c", tmp_path / "e", seed=7
    )
    text = path.read_text(encoding="utf-8")
    assert "| x | 9 | 1 | 5 | -3 | 3 |" in text and "| x | 1 | 9 |" not in text
    [same] = exercises.release([sources["06_mlp"]], tmp_path / "c", tmp_path / "e", seed=7)
    assert "variant" not in nbformat.read(same, as_version=4).metadata
    released = nbformat.read(path, as_version=4)
    with pytest.raises(grading.NotGraded, match="version 0 of the exercise, and you grade 1"):
        grading.rebuild(released, nbformat.read(sources["04_normalization"], as_version=4))
    assert len(grading.rebuild(released, released).cells) == len(released.cells)


# ---------------------------------------------------------------- all twenty


def wrong_answers(name: str) -> dict[str, str]:
    """For each answer the first of its wrong ones."""
    cells = {cell.name: cell.source for cell in corpus.cells_of(name)}
    wrong = [a for a in corpus.ANSWERS if a.exercise == name and not a.is_right]
    return {answer.cell: answer.write(cells[answer.cell]) for answer in reversed(wrong)}


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """One gradebook for all: to make one takes longer than to write into it."""
    return tmp_path_factory.mktemp("nbgrader") / "course"


def graded(name: str, student: str, text: str, course: Path, folder: Path) -> dict:
    """The scores of one student's copy, through nbgrader, by cell."""
    (folder / "in" / student).mkdir(parents=True)
    (folder / "in" / student / f"{name}.ipynb").write_text(text, encoding="utf-8")
    found, problems = exercises.grade(folder / "in", [sources[name]], course, WAY.name)
    assert problems == []
    scores = {score.cell: score for score in found}
    marked = {cell.name for cell in corpus.cells_of(name) if cell.kind in ("test", "manual")}
    assert scores.keys() == marked and {score.student for score in found} == {student}
    return scores


LAST = max(sources)
BY_DAY = {min(sources), "15_distributed", LAST}  # the first, the one with processes, the last


def some_by_day(names: set[str]) -> list:
    return [pytest.param(n, marks=[pytest.mark.nightly] * (n not in names)) for n in sources]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some_by_day(BY_DAY))
def test_right_copy_has_all_points(name, course, tmp_path):
    """And a person's part waits. By day three stand for all: `test_exercises.py` proves of every
    solution that its tests pass.
    """
    scores = graded(name, "solved", sources[name].read_text(encoding="utf-8"), course, tmp_path)
    for cell in corpus.cells_of(name):
        if cell.kind == "test":
            assert scores[cell.name].score == cell.points
        elif cell.kind == "manual":
            assert (scores[cell.name].score, scores[cell.name].points) == (None, cell.points)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some_by_day({LAST}))
def test_wrong_copy_has_none(name, course, tmp_path):
    """By day one exercise stands for all: `test_exercises.py` proves of each wrong answer that its
    tests catch it. (A blank: `test_release_gives_nothing_away`, and the class above.)
    """
    wrong = nbformat.read(sources[name], as_version=4)
    for cell in wrong.cells:
        cell.source = wrong_answers(name).get(grading.grade_id(cell), cell.source)
    scores = graded(name, "wrong", nbformat.writes(wrong), course, tmp_path)
    tests = [cell.name for cell in corpus.cells_of(name) if cell.kind == "test"]
    refuted = {test.split("-test")[0] for test in tests if not scores[test].score}
    assert refuted == wrong_answers(name).keys()

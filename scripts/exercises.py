"""Hand out the exercises without their solutions, and grade what comes back.

    python scripts/exercises.py                       write exercises/NN_name.ipynb for every
        solutions/NN_name.ipynb
    python scripts/exercises.py release 05_attention  only this one
    python scripts/exercises.py student DIR           write pages, package and exercises to DIR
    python scripts/exercises.py grade DIR             grade DIR/STUDENT/NN_name.ipynb, or an archive
        of Moodle or Canvas; print points, and what failed
    python scripts/exercises.py feedback              write again what goes back to the students
    python scripts/exercises.py similar DIR           answers that resemble each other

`make exercises` runs the first. What a student has changed in exercises/ is never overwritten
without --force. docs/teaching.md is the teacher's guide.

Behind it stands an ordinary nbgrader course in the folder _nbgrader/: one assignment for each
chapter, the sources, the submissions, and the gradebook with its deadlines. Grading leaves
grades.csv, with all exercises, and a page for each student under feedback/ there. Written answers
are graded by a person: `make formgrader`, and then `make feedback`.

Grading runs each notebook by itself, apart from your files and from the network (isolation.py), and
says how. Where a machine offers no way to do so it refuses, unless you --trust your students.
"""

import argparse
import ast
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import nbformat
from grading import (
    NotGraded,
    Problem,
    collect,
    late_days,
    printable,
    printable_lines,
    read_submission,
    rebuild,
    unpack,
    way_called,
)
from isolation import TRUST, choose
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.apps import NbGraderAPI
from nbgrader.coursedir import CourseDirectory
from nbgrader.plugins import CsvExportPlugin
from similarity import similar_answers
from traitlets.config import PyFileConfigLoader

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "solutions"
RELEASE = ROOT / "exercises"
COURSE = ROOT / "_nbgrader"
VARIANTS = SOURCES / "variants.json"
LATE_DAYS = 5  # of each student in the whole course, where there are deadlines

FOR_STUDENTS = [
    *[
        "nbs",
        "llm_course",
        "lab",
        "docs",
        "configs",
        "README.md",
        "TROUBLESHOOTING.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
    ],
    *["pyproject.toml", "constraints.txt", "settings.ini"],
]

SETTINGS = """import sys

sys.path.insert(0, {scripts!r})
c = get_config()
c.CourseDirectory.course_id = "llm_course"
c.OverwriteCells.add_missing_cells = True  # deleting a test earns nothing
# student code runs apart from everything, and not with a teacher's rights
c.Autograde.autograde_preprocessors = [
    "grading.RunAnswers",
    "nbconvert.preprocessors.ClearMetadataPreprocessor",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
c.RunAnswers.sources = {sources!r}
c.RunAnswers.way = {way!r}
c.AssignLatePenalties.plugin_class = "grading.LateDays"
c.LateDays.allowed = {late_days}
c.GenerateFeedback.preprocessors = [
    "nbgrader.preprocessors.ClearHiddenTests",
    "nbgrader.preprocessors.GetGrades",
    "nbconvert.preprocessors.CSSHTMLHeaderPreprocessor",
]
"""

# nbgrader calls `alembic` by its bare name
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
# SQLAlchemy has opinions on nbgrader's queries
warnings.filterwarnings("ignore", module="nbgrader")


@dataclass
class Score:
    """What one graded cell brought; `score` is None until a person has graded it."""

    student: str
    exercise: str
    cell: str
    score: float | None
    points: float
    message: str = ""  # why the cell failed: the first line of its error


def succeed(result: dict, what: str) -> None:
    if not result["success"]:
        sys.exit(
            f"nbgrader could not {what}:\n{result.get('log') or ''}\n{result.get('error') or ''}"
        )


def known_exercises() -> list[str]:
    return sorted(path.stem for path in SOURCES.glob("[0-9][0-9]_*.ipynb"))


def find_exercises(names: list[str] | None = None) -> list[Path]:
    """The notebooks with solutions, all or those named."""
    paths = {path.stem: path for path in sorted(SOURCES.glob("[0-9][0-9]_*.ipynb"))}
    if unknown := set(names or ()) - set(paths):
        sys.exit(
            f"no exercise is called {', '.join(sorted(unknown))}; there are:"
            f" {', '.join(paths) or 'none'}"
        )
    return [path for name, path in paths.items() if not names or name in names]


def open_course(course: Path, way: str = "", late_days: int = LATE_DAYS) -> NbGraderAPI:
    """The course in this folder, with the same settings as for nbgrader's own commands there; `way`
    is how student code is kept apart, by default the best that the machine has.
    """
    course.mkdir(parents=True, exist_ok=True)
    course.chmod(0o700)  # solutions and grades
    scripts = str(Path(__file__).resolve().parent)
    sources = str(course.resolve() / "source")
    settings = SETTINGS.format(scripts=scripts, sources=sources, way=way, late_days=late_days)
    (course / "nbgrader_config.py").write_text(settings, encoding="utf-8")
    config = PyFileConfigLoader("nbgrader_config.py", str(course)).load_config()
    config.CourseDirectory.root = str(course.resolve())
    return NbGraderAPI(CourseDirectory(config=config), config=config)


def variants_of(name: str) -> list[dict[str, str]]:
    """What other versions of an exercise write in place of what: first the one that is stored."""
    return [{}, *json.loads(VARIANTS.read_text(encoding="utf-8")).get(name, [])]


def vary(source: Path, seed: int) -> nbformat.NotebookNode:
    """The exercise with other numbers, its solution and hidden tests too, if it has such a version.
    A seed chooses it; 0 is what is stored.
    """
    notebook = nbformat.read(source, as_version=4)
    variants = variants_of(source.stem)
    number = seed % len(variants)
    if number:
        words = variants[number]
        pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        for cell in notebook.cells:
            cell.source = re.sub(pattern, lambda found: words[found[0]], cell.source)
        notebook.metadata["variant"] = number
    return notebook


def generate(sources: list[Path], course: Path, seed: int = 0) -> list[Path]:
    """Take the notebooks into the nbgrader course, solutions and hidden tests included; return the
    student versions.
    """
    api = open_course(course)
    for source in sources:
        # nbgrader wants a folder for each assignment
        staged = course / "source" / source.stem / source.name
        staged.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(vary(source, seed), staged)
        succeed(api.generate_assignment(source.stem), f"make the student version of {source.name}")
    return [course / "release" / source.stem / source.name for source in sources]


def release(
    sources: list[Path],
    course: Path = COURSE,
    destination: Path = RELEASE,
    *,
    force: bool = False,
    seed: int = 0,
) -> list[Path]:
    """Write the student versions to `destination`, and return those written. A file changed by hand
    is kept, but for `force`.
    """
    previous = {path.name: path.read_bytes() for path in course.glob("release/*/*.ipynb")}
    destination.mkdir(parents=True, exist_ok=True)
    written = []
    for made in generate(sources, course, seed):
        target = destination / made.name
        if (
            target.exists()
            and not force
            and target.read_bytes() not in (made.read_bytes(), previous.get(made.name))
        ):
            print(
                f"kept {target}: it holds work, or comes from elsewhere; --force overwrites it",
                file=sys.stderr,
            )
            continue
        shutil.copyfile(made, target)
        written.append(target)
    return written


def write_student(destination: Path, seed: int = 0) -> None:
    """Write all that a student needs to an empty folder: pages, package, exercises."""
    if destination.exists() and any(destination.iterdir()):
        sys.exit(f"{destination} is not empty: name a new folder, or empty it first")
    caches = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "runs")
    for name in FOR_STUDENTS:
        source = ROOT / name
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=caches)
        else:
            shutil.copyfile(source, target)
    with tempfile.TemporaryDirectory() as course:
        written = release(find_exercises(), Path(course), destination / "exercises", seed=seed)
    for path in written:
        cells = nbformat.read(path, as_version=4).cells
        shown = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        for checker in set(re.findall(r"from llm_course\.pages import (exercise_\w+)", shown)):
            module = destination / "llm_course" / "pages" / f"{checker}.py"
            module.write_text(without_hidden(module.read_text("utf-8"), shown), "utf-8")


def without_hidden(code: str, shown: str) -> str:
    """A checker's module without the functions and classes that no visible test reaches: those are
    the hidden tests'. `shown` is the code of the student version.
    """
    body = ast.parse(code).body
    hidden = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    kept = [node for node in body if node not in hidden.values()]
    words = set(re.findall(r"\w+", shown))
    while kept:
        words |= {name.id for node in kept for name in ast.walk(node) if isinstance(name, ast.Name)}
        kept = [hidden.pop(name) for name in words & hidden.keys()]
    lines = code.splitlines(keepends=True)
    for node in hidden.values():
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines[start - 1 : node.end_lineno] = [""] * (node.end_lineno - start + 1)
    return "".join(lines)


def grade(
    submissions: Path,
    sources: list[Path],
    course: Path = COURSE,
    way: str = "",
    late_days: int = LATE_DAYS,
    seed: int = 0,
) -> tuple[list[Score], list[Problem]]:
    """Grade `submissions`/STUDENT/NN_name.ipynb with nbgrader, each by itself: the scores, and a
    problem for each notebook that has none. What nbgrader and Python say of it is in grading.log.
    """
    exercises = {source.stem: source for source in sources}
    handed_in, problems = collect(submissions, known_exercises())
    handed_in = {key: path for key, path in handed_in.items() if key[1] in exercises}
    used = {exercise for _, exercise in handed_in}
    released = generate([source for source in sources if source.stem in used], course, seed)
    blanks = {path.stem: path for path in released}
    api = open_course(course, way or choose().name, late_days)
    scores = []
    with (course / "grading.log").open("w", encoding="utf-8") as log:
        for (student, exercise), path in handed_in.items():
            try:
                submission = read_submission(path, submissions)
                blank = nbformat.read(blanks[exercise], as_version=4)
                answered = rebuild(blank, submission)
                stage(course, student, exercise, answered, path.stat().st_mtime)
                result = api.autograde(exercise, student)
                said = f"== {path}\n{result.get('log', '')}\n{result.get('error', '')}\n"
                log.write(printable_lines(said))
                if not result["success"]:
                    raise NotGraded(reason_in(result))
                graded = course / "autograded" / student / exercise / f"{exercise}.ipynb"
                messages = read_messages(graded)
                scores += read_scores(api.coursedir.db_url, student, exercise, messages)
            except NotGraded as error:
                problems.append(Problem(student, exercise, str(error)))
            except Exception as error:
                log.write(f"== {path}\n{traceback.format_exc()}\n")
                why = f"{type(error).__name__}: see {log.name}"
                problems.append(Problem(student, exercise, why))
    return scores, problems


def stage(
    course: Path, student: str, exercise: str, notebook: nbformat.NotebookNode, handed_in: float
) -> None:
    """Put a notebook where nbgrader looks for it, with the time when it was handed in."""
    folder = course / "submitted" / student / exercise
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / f"{exercise}.ipynb")
    time = datetime.fromtimestamp(handed_in, UTC)
    (folder / "timestamp.txt").write_text(f"{time:%Y-%m-%d %H:%M:%S} UTC", encoding="utf-8")


def write_feedback(course: Path, api: NbGraderAPI, graded: set[tuple[str, str]]) -> None:
    """What goes back: a page for each (student, exercise), and grades.csv with the whole course."""
    with Gradebook(api.coursedir.db_url, "llm_course") as gradebook:
        CsvExportPlugin(to=str(course / "grades.csv")).export(gradebook)
    for student, exercise in sorted(graded):
        succeed(api.generate_feedback(exercise, student), f"write {student}'s feedback")


def find_graded(course: Path) -> set[tuple[str, str]]:
    """Each (student, exercise) that was graded at any time."""
    paths = course.glob("autograded/*/*/*.ipynb")
    return {(path.parts[-3], path.parts[-2]) for path in paths}


def reason_in(result: dict) -> str:
    """Why nbgrader gave up: our own reason, or where to read its."""
    text = f"{result.get('log', '')}\n{result.get('error', '')}"
    found = re.findall(r"NotGraded: (.+)", text)
    return found[-1] if found else "nbgrader could not read it: see grading.log"


def read_messages(path: Path) -> dict[str, str]:
    """The first line of the error below each cell of a graded notebook, by the cell's name."""
    messages = {}
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            text = (
                output.get("evalue") or output.get("ename")
                if output.output_type == "error"
                else output.get("text")
            )
            # nbgrader takes both for a failure
            is_error = output.output_type == "error" or output.get("name") == "stderr"
            if is_error and text and text.strip():
                messages.setdefault(
                    cell.metadata.get("nbgrader", {}).get("grade_id", ""),
                    text.strip().splitlines()[0],
                )
    return messages


def read_scores(db_url: str, student: str, exercise: str, messages: dict[str, str]) -> list[Score]:
    """What the gradebook holds, in the order of the notebook's cells."""
    with Gradebook(db_url, "llm_course") as gradebook:
        try:
            notebook = gradebook.find_submission_notebook(exercise, exercise, student)
        except MissingEntry:
            return []
        order = [cell.name for cell in notebook.notebook.source_cells]
        grades = sorted(notebook.grades, key=lambda grade: order.index(grade.name))
        return [
            Score(
                student,
                exercise,
                g.name,
                None if g.needs_manual_grade else g.score,
                g.max_score,
                messages.get(g.name, ""),
            )
            for g in grades
        ]


def points(scores: list[Score]) -> str:
    """The points of some cells; `+4?` waits for a person."""
    waiting = sum(score.points for score in scores if score.score is None)
    sure = sum(score.score or 0 for score in scores)
    return f"{sure:g}" + (f"+{waiting:g}?" if waiting else "")


def print_exercise(exercise: str, scores: list[Score], problems: list[Problem]) -> None:
    """A row for each student, a column for each task; below, a line for each cell that failed."""
    task_of = {score.cell: re.split("[-_]", score.cell)[0] for score in scores}
    tasks = list(dict.fromkeys(task_of.values()))
    by_student: dict[str, dict[str, list[Score]]] = {}
    for score in scores:
        rows = by_student.setdefault(score.student, {task: [] for task in tasks})
        rows[task_of[score.cell]].append(score)
    students = [*by_student, *(problem.student for problem in problems)]
    left = max(20, *(len(printable(student)) + 2 for student in students))
    print(f"\n{exercise}")
    if by_student:
        print(f"{'':{left}}" + "".join(f"{task:>9}" for task in tasks) + f"{'total':>9}")
        some = next(iter(by_student.values()))
        highest = [sum(score.points for score in some[task]) for task in tasks]
        row = "".join(f"{most:9g}" for most in [*highest, sum(highest)])
        print(f"{'points':{left}}{row}")
    for student, rows in sorted(by_student.items()):
        found = [*rows.values(), [score for row in rows.values() for score in row]]
        print(f"{printable(student):{left}}" + "".join(f"{points(row):>9}" for row in found))
    for problem in sorted(problems, key=lambda problem: problem.student):
        print(f"{printable(problem.student):{left}}not graded: {printable(problem.why)}")
    failed = [s for s in scores if s.message and s.score is not None and s.score < s.points]
    width = max((len(score.cell) for score in failed), default=0)
    if failed:
        print()
    for score in sorted(failed, key=lambda score: score.student):
        message = printable(score.message)
        print(f"{printable(score.student):{left}}{score.cell:{width}}  {message}")


def print_scores(scores: list[Score], problems: list[Problem]) -> None:
    """A table for each exercise, then what belongs to none."""
    known = set(known_exercises())
    graded = {score.exercise for score in scores}
    for exercise in sorted(graded | {p.what for p in problems if p.what in known}):
        here = [score for score in scores if score.exercise == exercise]
        print_exercise(exercise, here, [p for p in problems if p.what == exercise])
    others = [problem for problem in problems if problem.what not in known]
    if others:
        print("\nnot matched")
    for problem in others:
        where = printable("/".join(filter(None, [problem.student, problem.what])))
        print(f"{where:20}  {printable(problem.why)}")
    if any(score.score is None for score in scores):
        print("\n+N?: up to N points wait for a person, in Formgrader (see --help)")


def print_late_days(course: Path, api: NbGraderAPI, students: set[str]) -> None:
    with Gradebook(api.coursedir.db_url, "llm_course") as gradebook:
        late = {student: late_days(gradebook, student) for student in sorted(students)}
    if any(late.values()):
        print("\nlate days")
    for student, days in late.items():
        if days:
            spent = ", ".join(f"{exercise} {count}" for exercise, count in days.items())
            print(f"{printable(student):20}{sum(days.values()):9}  {spent}")


@contextmanager
def opened(submissions: Path) -> Iterator[Path]:
    """A folder of submissions; an archive is unpacked for as long as it is needed."""
    if submissions.is_dir():
        yield submissions
    elif zipfile.is_zipfile(submissions):
        with tempfile.TemporaryDirectory() as name:
            try:
                unpack(submissions, Path(name))
            except (ValueError, OSError, RuntimeError, zipfile.BadZipFile) as error:
                sys.exit(str(error))
            yield Path(name)
    else:
        sys.exit(f"{submissions} is no folder or zip archive; it should hold each student's work")


def grade_folder(
    submissions: Path,
    way: str,
    names: list[str] | None = None,
    late_days: int = LATE_DAYS,
    seed: int = 0,
) -> int:
    """Grade, print the table, and return the exit status: 1 if a notebook has no scores."""
    if os.name != "posix":
        sys.exit("grading runs on Linux, or with --trust on macOS; on Windows take WSL")
    try:
        way = way or choose().name
    except ValueError as error:
        sys.exit(str(error))
    with opened(submissions) as folder:
        print(f"student code runs under: {way} ({way_called(way).promise})")
        scores, problems = grade(folder, find_exercises(names), COURSE, way, late_days, seed)
    print_scores(scores, problems)
    graded = {(score.student, score.exercise) for score in scores}
    api = open_course(COURSE, way, late_days)
    print_late_days(COURSE, api, {student for student, _ in graded})
    write_feedback(COURSE, api, graded)
    print(f"\n{len(graded)} graded, {len(problems)} not; details in {COURSE / 'grading.log'}")
    print(f"grades.csv, and a page for each student in feedback/, are in {COURSE}")
    return int(bool(problems))


def print_similar(submissions: Path, names: list[str] | None, least: float) -> None:
    """The pairs of answers that share most, the most alike first."""
    with opened(submissions) as folder:
        handed_in, _ = collect(folder, known_exercises())
        for source in find_exercises(names):
            notebooks = {}
            for (student, exercise), path in handed_in.items():
                if exercise == source.stem:
                    try:
                        notebooks[student] = read_submission(path, folder)
                    except NotGraded as error:
                        print(f"{printable(student)}: {error}", file=sys.stderr)
            handed_out = nbformat.read(source, as_version=4)
            for pair in similar_answers(notebooks, handed_out, least):
                first, second = map(printable, pair.students)
                print(f"{source.stem}  {pair.share:4.0%}  {first} and {second}: {pair.cell}")


def print_released(names: list[str], force: bool) -> None:
    for path in release(find_exercises(names), force=force):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        marks = [cell["metadata"].get("nbgrader", {}) for cell in cells]
        worth = [mark["points"] for mark in marks if "points" in mark]
        print(f"{path.relative_to(ROOT)}: {sum(worth)} points in {len(worth)} graded cells")


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    help = "write the student versions (without any command: of all exercises)"
    to_release = commands.add_parser("release", help=help)
    help = "exercises, all if none is named"
    to_release.add_argument("names", nargs="*", metavar="NN_name", help=help)
    help = "overwrite what was changed by hand, too"
    to_release.add_argument("--force", action="store_true", help=help)

    help = "write a folder for students: pages, package, exercises, no solutions"
    to_students = commands.add_parser("student", help=help)
    help = "a folder that is new, or empty"
    to_students.add_argument("folder", type=Path, metavar="DIR", help=help)

    to_grade = commands.add_parser("grade", help="grade what students handed in")
    help = "run students' code with your own rights and files"
    to_grade.add_argument("--trust", action="store_true", help=help)
    help = "how many days a student may be late in the whole course (default: %(default)s)"
    to_grade.add_argument("--late-days", type=int, default=LATE_DAYS, metavar="N", help=help)

    for with_seed in (to_students, to_grade):
        help = "which version of those exercises that have several (default: %(default)s)"
        with_seed.add_argument("--seed", type=int, default=0, metavar="N", help=help)

    help = "write grades.csv and all pages for students again, after Formgrader"
    commands.add_parser("feedback", help=help)

    to_compare = commands.add_parser("similar", help="list answers that resemble each other")
    help = "share that two answers have in common, from 0 to 1 (default: %(default)s)"
    to_compare.add_argument("--least", type=float, default=0.6, metavar="SHARE", help=help)
    for parser_of_class in (to_grade, to_compare):
        help = "holds a folder for each student, or is an archive of Moodle or Canvas"
        parser_of_class.add_argument("folder", type=Path, metavar="DIR", help=help)
        help = "only these exercises"
        parser_of_class.add_argument("--only", nargs="+", metavar="NN_name", help=help)
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = command_line().parse_args(arguments or ["release"])
    if str(getattr(options, "folder", "named")) == ".":
        sys.exit(f"name a folder: make {options.command} DIR=FOLDER")
    if options.command == "student":
        write_student(options.folder, options.seed)
        print(f"{options.folder} holds the course for students, without solutions")
    elif options.command == "grade":
        way = TRUST.name if options.trust else ""
        sys.exit(grade_folder(options.folder, way, options.only, options.late_days, options.seed))
    elif options.command == "feedback":
        write_feedback(COURSE, open_course(COURSE), find_graded(COURSE))
        print(f"grades.csv, and a page for each student in feedback/, are in {COURSE}")
    elif options.command == "similar":
        print_similar(options.folder, options.only, options.least)
    else:
        print_released(options.names, options.force)


if __name__ == "__main__":
    main(sys.argv[1:])

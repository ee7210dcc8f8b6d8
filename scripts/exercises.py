"""Hand out the exercises without their solutions, and grade what comes back.

    python scripts/exercises.py                       write exercises/NN_name.ipynb for every
        solutions/NN_name.ipynb
    python scripts/exercises.py release 05_attention  only this one
    python scripts/exercises.py student DIR           write pages, package and exercises to DIR
    python scripts/exercises.py grade DIR             grade DIR/STUDENT/NN_name.ipynb; print points,
        and what failed

`make exercises` runs the first. What a student has changed in exercises/ is never overwritten
without --force.

Behind it stands an ordinary nbgrader course in the folder _nbgrader/: one assignment for each
chapter, the sources, the submissions, and the gradebook. Written answers are graded by a person:
open JupyterLab in _nbgrader/, and Formgrader in its Nbgrader menu. There `nbgrader
generate_feedback 05_attention` also writes a page for each student.

Grading runs the students' code with your rights. Take a container or an account without secrets for
people you do not know.
"""

import argparse
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.apps import NbGraderAPI
from nbgrader.coursedir import CourseDirectory
from traitlets.config import PyFileConfigLoader

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "solutions"
RELEASE = ROOT / "exercises"
COURSE = ROOT / "_nbgrader"

FOR_STUDENTS = [
    *["nbs", "llm_course", "configs", "README.md", "CONTRIBUTING.md", "LICENSE", "Makefile"],
    *["pyproject.toml", "constraints.txt", "settings.ini"],
]

SETTINGS = """c = get_config()
c.CourseDirectory.course_id = "llm_course"
c.OverwriteCells.add_missing_cells = True  # deleting a test earns nothing
c.Execute.timeout = 120  # seconds for a cell
# no warning for each student that the kernel talks over TCP
c.Execute.extra_arguments = ["--IPKernelApp.log_level=ERROR"]
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


def find_exercises(names: list[str] | None = None) -> list[Path]:
    """The notebooks with solutions, all or those named."""
    paths = {path.stem: path for path in sorted(SOURCES.glob("[0-9][0-9]_*.ipynb"))}
    if unknown := set(names or ()) - set(paths):
        sys.exit(
            f"no exercise is called {', '.join(sorted(unknown))}; there are:"
            f" {', '.join(paths) or 'none'}"
        )
    return [path for name, path in paths.items() if not names or name in names]


def open_course(course: Path) -> NbGraderAPI:
    """The course in this folder, with the same settings as for nbgrader's own commands there."""
    course.mkdir(parents=True, exist_ok=True)
    (course / "nbgrader_config.py").write_text(SETTINGS, encoding="utf-8")
    config = PyFileConfigLoader("nbgrader_config.py", str(course)).load_config()
    config.CourseDirectory.root = str(course.resolve())
    return NbGraderAPI(CourseDirectory(config=config), config=config)


def generate(sources: list[Path], course: Path) -> list[Path]:
    """Take the notebooks into the nbgrader course, solutions and hidden tests included; return the
    student versions.
    """
    api = open_course(course)
    for source in sources:
        # nbgrader wants a folder for each assignment
        staged = course / "source" / source.stem / source.name
        staged.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, staged)
        succeed(api.generate_assignment(source.stem), f"make the student version of {source.name}")
    return [course / "release" / source.stem / source.name for source in sources]


def release(
    sources: list[Path], course: Path = COURSE, destination: Path = RELEASE, *, force: bool = False
) -> list[Path]:
    """Write the student versions to `destination`, and return those written. A file changed by hand
    is kept, but for `force`.
    """
    previous = {path.name: path.read_bytes() for path in course.glob("release/*/*.ipynb")}
    destination.mkdir(parents=True, exist_ok=True)
    written = []
    for made in generate(sources, course):
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


def write_student(destination: Path) -> None:
    """Write all that a student needs to an empty folder: pages, package, exercises."""
    if destination.exists() and any(destination.iterdir()):
        sys.exit(f"{destination} is not empty: name a new folder, or empty it first")
    caches = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in FOR_STUDENTS:
        source = ROOT / name
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=caches)
        else:
            shutil.copyfile(source, target)
    with tempfile.TemporaryDirectory() as course:
        release(find_exercises(), Path(course), destination / "exercises")


def grade(submissions: Path, sources: list[Path], course: Path = COURSE) -> list[Score]:
    """Grade `submissions`/STUDENT/NN_name.ipynb with nbgrader. Tests are replaced by the real ones,
    hidden tests included.
    """
    exercises = {source.stem: source for source in sources}
    handed_in = [path for path in sorted(submissions.glob("*/*.ipynb")) if path.stem in exercises]
    if not handed_in:
        sys.exit(
            f"found no {submissions / 'STUDENT' / 'NN_name.ipynb'}, with one of the names"
            f" {', '.join(exercises)}"
        )
    used = {path.stem for path in handed_in}
    generate([source for source in sources if source.stem in used], course)
    api = open_course(course)
    scores = []
    for path in handed_in:
        student = path.parent.name
        exercise = path.stem
        staged = course / "submitted" / student / exercise / path.name
        staged.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, staged)
        succeed(api.autograde(exercise, student), f"grade {path}")
        messages = read_messages(course / "autograded" / student / exercise / path.name)
        scores += read_scores(api.coursedir.db_url, student, exercise, messages)
    return scores


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


def print_scores(scores: list[Score]) -> None:
    """One table for each exercise: a row for each student, a column for each task. `+4?` waits for
    a person.

    Below it stands a line for each cell that failed: the student, the cell, and the first line of
    its message.
    """

    def cell(found: list[Score]) -> str:
        waiting = sum(score.points for score in found if score.score is None)
        return f"{sum(score.score or 0 for score in found):g}" + (
            f"+{waiting:g}?" if waiting else ""
        )

    for exercise in sorted({score.exercise for score in scores}):
        here = [score for score in scores if score.exercise == exercise]
        tasks = list(dict.fromkeys(re.split("[-_]", score.cell)[0] for score in here))
        by_task = {
            task: [score for score in here if re.split("[-_]", score.cell)[0] == task]
            for task in tasks
        }
        students = sorted({score.student for score in here})
        some = students[0]
        left = max(20, *(len(student) + 2 for student in students))
        print(f"\n{exercise}")
        print(f"{'':{left}}" + "".join(f"{task:>9}" for task in tasks) + f"{'total':>9}")
        highest = [sum(s.points for s in found if s.student == some) for found in by_task.values()]
        print(
            f"{'points':{left}}"
            + "".join(f"{points:9g}" for points in highest)
            + f"{sum(highest):9g}"
        )
        for student in students:
            rows = [[s for s in found if s.student == student] for found in by_task.values()]
            total = cell([s for row in rows for s in row])
            print(f"{student:{left}}" + "".join(f"{cell(row):>9}" for row in rows) + f"{total:>9}")
        failed = [
            score
            for score in here
            if score.message and score.score is not None and score.score < score.points
        ]
        width = max((len(score.cell) for score in failed), default=0)
        if failed:
            print()
        for score in sorted(failed, key=lambda score: score.student):
            print(f"{score.student:{left}}{score.cell:{width}}  {score.message}")
    if any(score.score is None for score in scores):
        print("\n+N?: up to N points wait for a person, in Formgrader (see --help)")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    to_release = commands.add_parser(
        "release", help="write the student versions (without any command: of all exercises)"
    )
    to_release.add_argument(
        "names", nargs="*", metavar="NN_name", help="exercises, all if none is named"
    )
    to_release.add_argument(
        "--force", action="store_true", help="overwrite what was changed by hand, too"
    )
    to_students = commands.add_parser(
        "student", help="write a folder for students: pages, package, exercises, no solutions"
    )
    to_students.add_argument(
        "folder", type=Path, metavar="DIR", help="a folder that is new, or empty"
    )
    to_grade = commands.add_parser("grade", help="grade what students handed in")
    to_grade.add_argument(
        "submissions",
        type=Path,
        metavar="DIR",
        help="holds a folder for each student, with notebooks in it",
    )
    options = parser.parse_args(arguments or ["release"])
    if options.command == "student":
        if str(options.folder) == ".":
            sys.exit("name the folder to write: make student DIR=FOLDER")
        write_student(options.folder)
        print(f"{options.folder} holds the course for students, without solutions")
        return
    if options.command == "grade":
        print_scores(grade(options.submissions, find_exercises()))
        return
    for path in release(find_exercises(options.names), force=options.force):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        points = [
            c["metadata"]["nbgrader"]["points"]
            for c in cells
            if "points" in c["metadata"].get("nbgrader", {})
        ]
        print(f"{path.relative_to(ROOT)}: {sum(points)} points in {len(points)} graded cells")


if __name__ == "__main__":
    main(sys.argv[1:])

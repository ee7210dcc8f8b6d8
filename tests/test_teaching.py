"""The teacher's guide keeps its word: hours, points and rubrics."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from test_pages import reading_minutes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import exercises  # noqa: E402

GUIDE = (ROOT / "docs/teaching.md").read_text(encoding="utf-8")
LIST = (ROOT / "docs/exercises.md").read_text(encoding="utf-8")
SOLUTIONS = {path.stem: nbformat.read(path, as_version=4) for path in exercises.find_exercises()}
MOST_OFF = 0.25  # the plans give whole hours


def rows(text: str, columns: int) -> list[list[str]]:
    """The cells of a Markdown table's rows with this number of columns, but for its head."""
    found = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r" ?\| ?", row)] for row in found]
    return [row for row in cells if len(row) == columns and re.match(r"\d", row[0])]


def tasks(exercise: str) -> list[tuple[int, int]]:
    """Minutes and points of each task, as its first cell states them."""
    row = re.compile(r"^\| \d+ (?:\| [^|]+){3}\| (\d+) \| (\d+) \|$", re.MULTILINE)
    return [(int(m), int(p)) for m, p in row.findall(SOLUTIONS[exercise].cells[0].source)]


def exercise_minutes(numbers: str) -> float:
    named = {stem[:2]: stem for stem in SOLUTIONS}
    return sum(minutes for number in numbers.split(", ") for minutes, _ in tasks(named[number]))


def core_pages(chapter: str) -> list[Path]:
    """The pages in the README's column `pages`, without the deep ones."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"^\| {chapter} \|([^|]*)\|", readme, re.MULTILINE)
    return [ROOT / link for link in re.findall(r"\]\(([^)]+)\)", row)]


def test_the_contents_state_honest_hours():
    """The core pages at the pace of fresh readers, and the exercises at their own."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    chapters = re.findall(r"^\| (\d\d) \|", readme, re.MULTILINE)
    pages = [nbformat.read(page, as_version=4) for c in chapters for page in core_pages(c)]
    hours = {
        "read": sum(map(reading_minutes, pages)) / 60,
        "exercises": sum(minutes for stem in SOLUTIONS for minutes, _ in tasks(stem)) / 60,
    }
    contents = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4).cells[0].source
    said = re.search(r"about (\d+) hours to read, and the exercises (\d+) more", contents)
    off = {
        name: f"{hour:.0f} hours, not {stated}: write that in nbs/index.ipynb"
        for (name, hour), stated in zip(hours.items(), said.groups(), strict=True)
        if abs(hour - int(stated)) > MOST_OFF * hour
    }
    assert off == {}


def test_the_core_path_takes_an_honest_twenty_hours():
    """The pages in bold in the contents' table: at least one for each chapter but two."""
    contents = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4).cells[0].source
    bold = re.findall(r"\*\*\[[^]]+\]\((\d\d\w_\w+\.ipynb)\)\*\*", contents)
    # 11 and 12, other people's models and settings, are taken from the package
    assert {page[:2] for page in bold} == {f"{n:02}" for n in range(23)} - {"11", "12"}
    pages = [nbformat.read(ROOT / "nbs" / page, as_version=4) for page in bold]
    hours = sum(map(reading_minutes, pages)) / 60
    said = [int(hour) for hour in re.findall(r"\*\*core path\*\*, about (\d+) hours", contents)]
    said += [int(hour) for hour in re.findall(r"core path,\*\* about (\d+) hours", contents)]
    assert len(said) == 2 and hours <= 20, f"the core path takes {hours:.1f} hours"
    assert all(abs(hours - hour) < 0.7 for hour in said), f"not {said}: {hours:.1f} hours"


def plan(columns: int, title: str) -> list[list[str]]:
    section = GUIDE.split(f"### {title}")[1].split("\n#")[0]
    return rows(section, columns)


@pytest.mark.parametrize("title", ["Ten weeks", "Four weeks"])
def test_hours_of_a_plan_are_honest(title):
    off = {}
    for week, pages, hours, handed_in, _ in plan(5, title):
        linked = [ROOT / "docs" / link for link in re.findall(r"\]\(([^)]+)\)", pages)]
        paths = linked or [path for c in pages.split(", ") for path in core_pages(c)]
        reading = sum(reading_minutes(nbformat.read(path, as_version=4)) for path in paths)
        minutes = reading + exercise_minutes(handed_in)
        if abs(minutes / 60 - int(hours)) > MOST_OFF * minutes / 60:
            off[f"week {week}"] = f"{minutes / 60:.1f} hours, not {hours}"
    assert off == {}


def test_the_plans_cover_what_they_promise():
    chapters = ", ".join(row[1] for row in plan(5, "Ten weeks")).split(", ")
    assert chapters == [stem[:2] for stem in SOLUTIONS]
    assert len(plan(5, "Ten weeks")) == 10 and len(plan(5, "Four weeks")) == 4


def test_the_list_of_exercises_is_theirs():
    listed = {}
    for name, _, minutes, points, by_hand in rows(LIST, 5):
        listed[name] = (int(minutes), int(points), int(by_hand or 0))
    expected = {}
    for name, notebook in SOLUTIONS.items():
        minutes, points = map(sum, zip(*tasks(name), strict=True))
        expected[name] = (minutes, points, sum(manual_cells(notebook).values()))
    assert listed == expected


def manual_cells(notebook: nbformat.NotebookNode) -> dict[str, int]:
    """The points of each cell that a person grades."""
    marks = [cell.metadata.get("nbgrader", {}) for cell in notebook.cells]
    return {m["grade_id"]: m["points"] for m in marks if m.get("grade") and m.get("solution")}


def test_each_written_answer_is_in_the_guide():
    listed = {(number, name.strip("`")): int(points) for number, name, points, _ in rows(GUIDE, 4)}
    cells = {
        (stem[:2], name): points
        for stem, notebook in SOLUTIONS.items()
        for name, points in manual_cells(notebook).items()
    }
    assert listed == cells
    number = len({number for number, _ in cells})
    assert f"are {sum(cells.values())} points, in {number} of the notebooks" in GUIDE


@pytest.mark.parametrize("stem", [s for s in SOLUTIONS if manual_cells(SOLUTIONS[s])])
def test_each_written_answer_has_a_rubric(stem):
    """A table below the question, or a mark scheme in the answer; its points are the cell's."""
    cells = SOLUTIONS[stem].cells
    names = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in cells]
    for name, points in manual_cells(SOLUTIONS[stem]).items():
        place = names.index(name)
        asked = "\n".join(cell.source for cell in cells[max(0, place - 3) : place])
        rubric = re.split(r"A person grades this answer \(\d points\), by this rubric:", asked)
        scheme = cells[place].source.partition("MARK SCHEME.")[2]
        found = re.findall(r"^\| (\d) \|", rubric[-1], re.MULTILINE) if rubric[1:] else []
        found = found or re.findall(r"(\d) points? for", scheme)
        assert sum(map(int, found)) == points

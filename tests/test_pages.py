"""What the pages' helpers show, and what a page promises about the reader's time."""

import asyncio
import re
import sys
import threading
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from IPython.utils.capture import capture_output
from ipywidgets import VBox

from llm_course.pages.play import play
from llm_course.pages.tools import refusal
from scripts.store import WIDGET, without_widgets

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "nbs").glob("[0-9][0-9]*_*.ipynb"))
WORDS_A_MINUTE = 110
LINES_A_MINUTE = 8
CORE_MINUTES = 60


# ---------------------------------------------------------------------------- the promise of time


def reading_minutes(notebook: nbformat.NotebookNode) -> float:
    """Words of prose and lines of code at the pace of fresh readers; collapsed cells are free."""
    words = 0
    lines = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            words += len(re.sub(r"<svg.*?</svg>|<[^>]+>", " ", cell.source, flags=re.S).split())
        elif not cell.metadata.get("jupyter", {}).get("source_hidden"):
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    return words / WORDS_A_MINUTE + lines / LINES_A_MINUTE


def time_faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What is wrong with `**Time.** 45 minutes to read, 60 for the exercises.`"""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    promised = re.search(r"\*\*Time\.\*\* (?:About )?(\d+) minutes", text)
    if not promised:
        return []
    measured = reading_minutes(notebook)
    faults = []
    if abs(int(promised[1]) - measured) > 0.2 * measured + 0.5:  # half a minute of rounding
        faults.append(f"promises {promised[1]} minutes, takes {measured:.0f}")
    if "**Deep page.**" not in text and measured > CORE_MINUTES:
        faults.append(f"a core page of {measured:.0f} minutes; {CORE_MINUTES} is the most")
    return faults


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_takes_the_time_that_it_promises(path):
    assert time_faults(nbformat.read(path, as_version=4)) == []


def page(words: int, lines: int, promise: str, **metadata) -> nbformat.NotebookNode:
    code = nbformat.v4.new_code_cell("x = 1\n" * lines, metadata=metadata)
    prose = nbformat.v4.new_markdown_cell(promise + "\n\n" + "word " * words)
    return nbformat.v4.new_notebook(cells=[prose, code])


@pytest.mark.parametrize(
    ("notebook", "faults"),
    [
        (page(1100, 80, "**Time.** 20 minutes to read."), 0),
        (page(1100, 80, "**Time.** 15 minutes to read."), 1),
        (page(1100, 80, "**Time.** 25 minutes to read."), 1),
        (page(1100, 80, "**Time.** 10 minutes to read.", jupyter={"source_hidden": True}), 0),
        (page(6600, 80, "**Time.** 70 minutes to read."), 1),
        (page(6600, 80, "**Deep page.** **Time.** 70 minutes to read."), 0),
    ],
)
def test_planted_promise(notebook, faults):
    assert len(time_faults(notebook)) == faults


# ------------------------------------------------------------------------------------- the control


@pytest.fixture
def boxes(monkeypatch) -> list[VBox]:
    """The boxes of controls that a test makes."""
    InteractiveShell.instance()
    made = []
    create = VBox.__init__

    def create_and_keep(box, *arguments, **settings):
        create(box, *arguments, **settings)
        made.append(box)

    monkeypatch.setattr(VBox, "__init__", create_and_keep)
    return made


def say(word="one", loud=False):
    print(word.upper() if loud else word)


def screen_text(box: VBox) -> str:
    return box.children[-1].outputs[0]["data"]["text/plain"]


def test_one_output_holds_the_control_and_its_picture(boxes):
    with capture_output() as captured:
        play(say, word=["two", "one"], loud=True)
    (output,) = captured.outputs
    assert output.data["text/plain"] == "one\n"
    assert WIDGET in output.data


def test_a_control_begins_with_the_default_and_draws_again(boxes):
    with capture_output():
        play(say, word=["two", "one"], loud=True)
    (box,) = boxes
    menu, checkbox, _ = box.children
    assert (menu.value, checkbox.value, screen_text(box)) == ("one", False, "one\n")
    menu.value = "two"
    checkbox.value = True
    assert screen_text(box) == "TWO\n"


def test_controls_may_be_named_in_any_order(boxes):
    with capture_output():
        play(say, loud=True, word=["two", "one"])
    (box,) = boxes
    menu, checkbox, _ = box.children
    assert (menu.value, checkbox.value) == ("one", False)
    menu.value = "two"
    assert screen_text(box) == "two\n"


def test_pictures_are_drawn_one_after_the_other_in_the_thread_of_the_cells(boxes):
    """Whatever threads hear of the controls; and only for the last choice."""
    drawn = []

    def note(low=0.0, high=1.0):
        drawn.append((threading.current_thread(), low, high))
        print(low, high)

    async def move_both() -> None:
        with capture_output():
            play(note, low=(0.0, 1.0, 0.1), high=(0.0, 1.0, 0.1))
        low, high, _ = boxes[0].children
        await asyncio.gather(
            asyncio.to_thread(setattr, low, "value", 0.3),
            asyncio.to_thread(setattr, high, "value", 0.6),
        )
        await asyncio.sleep(0)
        low.value = 0.30000000000000004  # what a slider sends for 0.3 when it's shown
        await asyncio.sleep(0)

    asyncio.run(move_both())
    assert {thread for thread, *_ in drawn} == {threading.current_thread()}
    assert [values for _, *values in drawn][-1] == [0.3, 0.6]
    assert len(drawn) <= 3
    assert screen_text(boxes[0]) == "0.3 0.6\n"


def test_the_shell_keeps_its_publisher_while_a_picture_is_drawn(boxes):
    """The kernel sets its parent for each message; one that comes meanwhile is lost without it."""
    shell = InteractiveShell.instance()
    publishers = []

    def note(value=1):
        publishers.append(shell.display_pub)
        display({"text/plain": f"the value is {value}"}, raw=True)

    with capture_output():
        publisher = shell.display_pub
        play(note, value=(1, 3))
        boxes[0].children[0].value = 2
    assert publishers == [publisher, publisher]
    assert screen_text(boxes[0]) == "the value is 2"


def test_an_error_is_shown_in_the_pictures_place(boxes):
    def halve(number=2):
        print(12 // number)

    with capture_output():
        play(halve, number=(0, 4))
    (box,) = boxes
    slider, screen = box.children
    slider.value = 0
    (output,) = screen.outputs
    assert output["output_type"] == "error"
    assert output["traceback"] == [f"ZeroDivisionError: {output['evalue']}"]
    slider.value = 3
    assert screen_text(box) == "4\n"


def test_a_slow_picture_waits_until_the_slider_is_released(boxes):
    def slow(steps=1):
        print(steps)

    with capture_output():
        play(slow, live=False, steps=(1, 4))
        play(slow, steps=(1, 4))
    assert [box.children[0].continuous_update for box in boxes] == [False, True]


def test_without_ipywidgets_the_picture_stands_alone(monkeypatch):
    InteractiveShell.instance()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with capture_output() as captured:
        play(say, word=["two", "one"], loud=True)
    assert [output.data for output in captured.outputs] == [{"text/plain": "one\n"}]


def test_a_stored_page_keeps_the_picture_alone():
    output = nbformat.v4.new_output("display_data", {WIDGET: {"model_id": "x"}, "image/png": "AA"})
    cell = nbformat.v4.new_code_cell("play(draw)", outputs=[output])
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    stored = without_widgets(notebook)
    assert stored.cells[0].outputs[0]["data"] == {"image/png": "AA"}
    assert "widgets" not in stored.metadata


# ---------------------------------------------------------------------------- planted mistakes


def test_a_planted_mistake_must_be_refused_with_a_reason():
    assert "invalid literal" in refusal(int, "seven")
    with pytest.raises(AssertionError, match="not refused: \\('7',\\)"):
        refusal(int, "7")
    with pytest.raises(TypeError):  # a broken call is no refusal
        refusal(int, [])


# ------------------------------------------------------------------------------------ descriptions


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_picture_is_described(path):
    """`#| fig-alt: ...` in its cell; JupyterLab and the site give it to the picture."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    drawn = [c for c in cells if any("image/png" in o.get("data", {}) for o in c.outputs)]
    described = re.compile(r"(?m)^#\|\s*fig-alt: .{20,}$")
    assert [cell.source for cell in drawn if not described.search(cell.source)] == []

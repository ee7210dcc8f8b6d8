"""The course and its site as a person sees them: JupyterLab and `_docs/html/`, in Chromium.

`make browser` runs this file. Each JupyterLab serves a student's folder, with the settings of `make
lab`. A page with controls is run whole, so these tests are no part of `make test`.
"""

import contextlib
import functools
import http.server
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts")]
import exercises  # noqa: E402
import grading  # noqa: E402
import isolation  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    pytest.skip("no Chromium here: `make browser` installs it", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

EXERCISE = "04_normalization"
WIDTHS = (1100, 1440)
THEMES = ("JupyterLab Light", "JupyterLab Dark")
PATIENCE = 60_000  # milliseconds, on a busy machine
IS_LOCAL = re.compile(r"(https?|wss?)://(127\.0\.0\.1|localhost)[:/]|data:|blob:|about:")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Chromium refuses its own sandbox to root
        arguments = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def tab_of(browser, width: int = 1440, **options):
    """A fresh window; at its end it has asked for nothing outside this machine, and nothing that
    ran in it has failed.
    """
    context = browser.new_context(viewport={"width": width, "height": 1000}, **options)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    outside, failed = [], []
    page.on("request", lambda r: IS_LOCAL.match(r.url) or outside.append(r.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("console", lambda m: m.type == "error" and failed.append(m.text))
    try:
        yield page
        assert outside == [] and failed == []  # before we take its kernels away
        page.evaluate("() => window.jupyterapp?.serviceManager.sessions.shutdownAll()")
    finally:
        context.close()


# ---------------------------------------------------------------- JupyterLab


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    """What `make student` writes, with one exercise, and a page with a line as long as it gets."""
    folder = tmp_path_factory.mktemp("student")
    for name in exercises.FOR_STUDENTS:
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copyfile(source, folder / name)
    course = tmp_path_factory.mktemp("course")
    exercises.release(exercises.find_exercises([EXERCISE]), course, folder / "exercises")
    write_page(folder / "wide.ipynb", "#" * 100, "print('x' * 100)")
    write_page(folder / "control.ipynb", *WITH_CONTROLS)
    write_page(folder / "idle.ipynb", WITH_AN_IDLE_CONTROL)
    return folder


def write_page(path: Path, *code: str) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in code]
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def lab(student, tmp_path_factory):
    """The address of a JupyterLab in the student's folder, with nobody's own settings."""
    own = tmp_path_factory.mktemp("jupyter")
    folders = {
        f"JUPYTER_{name}_DIR": str(own / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")
    }
    folders |= {
        f"JUPYTERLAB_{name}_DIR": str(own / name.lower()) for name in ("SETTINGS", "WORKSPACES")
    }
    environment = os.environ | folders | {"JUPYTER_CONFIG_PATH": str(student / "lab")}
    environment |= {"PYTHONPATH": str(student), "OMP_NUM_THREADS": "1", "HOME": str(own)}
    environment.pop("MPLBACKEND", None)
    words = "-m jupyterlab --no-browser --port=0 --allow-root --expose-app-in-browser".split()
    with (own / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, *words], cwd=student, env=environment, stdout=log, stderr=log
        )
        try:
            until = time.monotonic() + 180  # a busy machine
            while not (found := list(own.glob("runtime/jpserver-*.json"))):
                assert time.monotonic() < until and server.poll() is None, (own / "log").read_text()
                time.sleep(0.2)
            time.sleep(1)
            yield json.loads(found[0].read_text())
        finally:
            server.kill()  # its kernels end when they miss it
            server.wait()


CURRENT = "window.jupyterapp.shell.currentWidget"


def open_notebook(page, lab: dict, path: str, theme: str = THEMES[0]) -> None:
    """Open a notebook, and wait until its kernel is ready."""
    page.goto(f"{lab['url']}lab/tree/{path}?token={lab['token']}&reset")
    page.wait_for_function("window.jupyterapp && window.jupyterapp.started")
    page.evaluate("() => window.jupyterapp.started.then(() => null)")
    page.wait_for_function(f"{CURRENT}?.context?.path === {json.dumps(path)}")
    page.evaluate(f"() => {CURRENT}.context.ready.then(() => null)")
    page.evaluate(f"() => {CURRENT}.sessionContext.ready.then(() => null)")
    change_theme(page, theme)
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    wait_until_idle(page)


def change_theme(page, theme: str) -> None:
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
    page.evaluate(change, theme)
    page.wait_for_selector(f"body[data-jp-theme-name='{theme}']", state="attached")


def wait_until_idle(page, seconds: float = 60) -> None:
    idle = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook-ExecutionIndicator[data-status=idle]"
    page.wait_for_selector(idle, timeout=1000 * seconds)


def run(page, command: str = "notebook:run-all-cells", seconds: float = 600) -> None:
    page.evaluate(
        """command => {
            window.hasRun = false;
            const run = window.jupyterapp.commands.execute(command);
            run.finally(() => { window.hasRun = true; });
        }""",
        command,
    )
    page.wait_for_function("window.hasRun", timeout=1000 * seconds)


def errors_on(page) -> list[str]:
    """The errors below the cells, shown or not."""
    return page.evaluate(
        f"""() => {CURRENT}.content.widgets.flatMap(cell =>
            (cell.model.sharedModel.outputs || [])
                .filter(output => output.output_type === 'error')
                .map(output => output.ename + ': ' + output.evalue))"""
    )


def cells_not_run(page) -> list[int]:
    """The places of the cells with code that no kernel has run."""
    return page.evaluate(
        f"""() => {CURRENT}.content.widgets.flatMap((cell, index) =>
            cell.model.type === 'code' && cell.model.sharedModel.source.trim()
                && cell.model.executionCount === null ? [index] : [])"""
    )


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_contents_open(browser, lab, width, theme):
    """No teacher's button, no dialog, nothing said to be unsaved, nothing wider than the page."""
    with tab_of(browser, width) as page:
        open_notebook(page, lab, "nbs/index.ipynb", theme)
        page.get_by_role("heading", name="llm_course").first.wait_for()
        assert page.locator("body").get_attribute("data-jp-theme-name") == theme
        page.wait_for_timeout(1000)  # what is late comes now
        text = page.locator("body").inner_text()
        assert "Formgrader" not in text and "Create Assignment" not in text
        commands = page.evaluate("() => window.jupyterapp.commands.listCommands()")
        assert [name for name in commands if "nbgrader" in name or "formgrader" in name] == []
        assert page.locator(".jp-Dialog").count() == 0
        assert page.evaluate(f"() => {CURRENT}.context.model.dirty") is False
        assert page.locator(".jp-mod-dirty").count() == 0


@pytest.mark.parametrize("path", ["nbs/05a_attention.ipynb", f"exercises/{EXERCISE}.ipynb"])
def test_a_page_that_nobody_changed_is_saved(browser, lab, path):
    with tab_of(browser) as page:
        open_notebook(page, lab, path)
        page.wait_for_timeout(1000)
        assert page.evaluate(f"() => {CURRENT}.context.model.dirty") is False
        page.evaluate(f"() => {{ {CURRENT}.content.widgets[0].model.sharedModel.setSource('x') }}")
        assert page.evaluate(f"() => {CURRENT}.context.model.dirty") is True


def test_every_link_of_the_contents_leads_somewhere(browser, lab, student):
    with tab_of(browser) as page:
        open_notebook(page, lab, "nbs/index.ipynb")
        page.locator(".jp-RenderedMarkdown a[href*='TROUBLESHOOTING.md']").wait_for()
        links = page.locator(".jp-RenderedMarkdown a[href*='/files/']").evaluate_all(
            "found => [...new Set(found.map(link => link.href))]"
        )
        assert len(links) >= len(list(student.glob("nbs/*.ipynb")))
        assert [link for link in links if not page.request.get(link).ok] == []
        page.locator(".jp-RenderedMarkdown a", has_text="Byte pair encoding").first.click()
        page.wait_for_function(f"{CURRENT}?.context?.path === 'nbs/01a_bpe.ipynb'")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_of_code_is_cut_off(browser, lab, width):
    """A hundred columns fit beside the file browser; and so does what they print."""
    with tab_of(browser, width) as page:
        open_notebook(page, lab, "wide.ipynb")
        run(page)
        for place in (".jp-CodeCell .cm-scroller", ".jp-OutputArea-output pre"):
            sizes = page.locator(place).evaluate_all(
                "found => found.map(node => [node.scrollWidth, node.clientWidth])"
            )
            assert sizes and all(inner <= outer for inner, outer in sizes), (place, sizes)


@pytest.mark.parametrize("theme", THEMES)
def test_plots_are_described_and_readable(browser, lab, theme):
    with tab_of(browser) as page:
        open_notebook(page, lab, "nbs/05a_attention.ipynb", theme)
        assert look_through(page, theme) > 3


def look_through(page, theme: str) -> int:
    """Every cell of the notebook as it is shown: no line of code is cut off, each picture has its
    text, and stands in the theme. The number of pictures.
    """
    seen = 0
    for index in range(page.evaluate(f"() => {CURRENT}.content.widgets.length")):
        page.evaluate(f"i => {CURRENT}.content.scrollToItem(i)", index)
        cell = page.locator(f".jp-Cell[data-windowed-list-index='{index}']")
        lines = cell.locator(".cm-scroller:visible, .jp-OutputArea-output pre:visible")
        sizes = lines.evaluate_all(
            "found => found.map(node => [node.scrollWidth, node.clientWidth])"
        )
        assert all(inner <= outer for inner, outer in sizes), (index, sizes)
        for image in cell.locator(".jp-RenderedImage img").all():
            assert len(image.get_attribute("alt") or "") > 20, index
            assert stands_in(image, dark="Dark" in theme), index
            seen += 1
    return seen


def stands_in(image, *, dark: bool) -> bool:
    """Whether a picture's ground is that of the theme, and its letters stand out against it.

    What is described by its shades stays as it was drawn, in the dark theme too.
    """
    pixels = plt.imread(io.BytesIO(image.screenshot()))[..., :3].mean(-1)
    ground = pixels[3, -4]  # inside a rounded corner
    as_drawn = "as-drawn" in (image.get_attribute("class") or "")
    in_place = ground < 0.2 if dark and not as_drawn else ground > 0.8
    return bool(in_place and abs(pixels - ground).max() > 0.6)


def answers_to(exercise: str) -> dict[str, str]:
    notebook = nbformat.read(ROOT / "solutions" / f"{exercise}.ipynb", as_version=4)
    found = {grading.grade_id(c): c.source for c in notebook.cells if grading.is_answer(c)}
    return {name: re.sub(r"(?m)^\s*### (BEGIN|END) SOLUTION\n?", "", found[name]) for name in found}


def test_an_exercise_is_solved_and_graded(browser, lab, student, tmp_path):
    """From the link on a page to the points in the table, the way that a student goes."""
    path = student / "exercises" / f"{EXERCISE}.ipynb"
    with tab_of(browser) as page:
        open_notebook(page, lab, "nbs/04c_normalization.ipynb")
        page.locator(f".jp-RenderedMarkdown a[href*='{EXERCISE}']").first.click()
        page.wait_for_function(f"{CURRENT}?.context?.path === 'exercises/{path.name}'")
        wait_until_idle(page)
        cells = nbformat.read(path, as_version=4).cells
        answers = answers_to(EXERCISE)
        for index, cell in enumerate(cells):
            answer = answers.get(grading.grade_id(cell))
            if answer is None:
                continue
            page.evaluate(f"i => {{ {CURRENT}.content.activeCellIndex = i }}", index)
            page.evaluate(f"i => {CURRENT}.content.scrollToItem(i)", index)
            page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-mod-active .cm-content").click()
            page.keyboard.press("ControlOrMeta+A")
            page.keyboard.insert_text(answer)
        run(page)
        assert errors_on(page) == []
        page.keyboard.press("Control+S")
        page.wait_for_function(f"{CURRENT}.context.model.dirty === false")
    handed_in = tmp_path / "submissions" / "jane"
    handed_in.mkdir(parents=True)
    shutil.copy(path, handed_in)
    ways = [way for way in isolation.WAYS if not isolation.find_ways()[way.name]]
    way = ways[0] if ways else isolation.TRUST
    sources = exercises.find_exercises([EXERCISE])
    scores, problems = exercises.grade(handed_in.parent, sources, tmp_path / "course", way.name)
    assert problems == []
    assert [score for score in scores if score.score != score.points] == []
    assert sum(score.points for score in scores) == 28


# ---------------------------------------------------------------- controls

WITH_CONTROLS = (
    """
import matplotlib.pyplot as plt
from ipywidgets import interact

@interact(height=(1, 5), color=["red", "blue"], filled=False)
def draw(height=2, color="red", filled=False):
    plt.figure(figsize=(2, 1))
    plt.bar([0], [height], color=color, fill=filled)
    plt.ylim(0, 6)
    plt.show()
    print("height", height, color)
""",
)
WITH_AN_IDLE_CONTROL = """
from llm_course.pages.play import play

def draw(used=1, idle=1):
    print("used", used)

play(draw, used=(1, 3), idle=(1, 3))
"""
CONTROLS = ", ".join(
    f".jp-OutputArea .{kind}"
    for kind in ("widget-slider", "widget-dropdown", "widget-checkbox", "widget-text")
)


def pages_with_controls() -> list[str]:
    """The pages that take a control from `llm_course.pages`."""
    taken = re.compile(r"from llm_course\.pages\.\w+ import .*\bplay\b")
    pages = sorted((ROOT / "nbs").glob("*.ipynb"))
    return [f"nbs/{p.name}" for p in pages if taken.search(p.read_text(encoding="utf-8"))]


def move(page, control, times: int) -> None:
    """Change what a control says, as a hand would; it has been moved so many `times` before."""
    kind = control.get_attribute("class")
    if "widget-slider" in kind:
        before = control.inner_text()
        for way in (-1, 1) if times else (1, -1):  # there is another way if it's at its end
            if control.inner_text() != before:
                break
            # by the mouse: a slider that waits for the release doesn't hear the arrow keys
            control.scroll_into_view_if_needed()
            box = control.locator(".noUi-handle").first.bounding_box()
            x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            page.mouse.move(x, y)
            page.mouse.down()
            page.mouse.move(x + way * 100, y, steps=4)
            page.mouse.up()
            page.wait_for_timeout(100)
    elif "widget-dropdown" in kind:
        select = control.locator("select")
        chosen, choices = select.evaluate("node => [node.selectedIndex, node.options.length]")
        select.select_option(index=(chosen + 1) % choices)
    elif "widget-checkbox" in kind:
        control.locator("input").click()
    else:
        field = control.locator("input")
        field.fill(field.input_value() + " and")
        field.press("Enter")


SHOWN = """node => [...node.querySelectorAll('img, pre, .jp-RenderedHTMLCommon')]
    .map(part => part.src || part.innerText).join()"""


def changes(page, cell, before: str) -> bool:
    """Whether the cell shows something else once the kernel has nothing left to do."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        page.wait_for_timeout(100)
        wait_until_idle(page, 180)
        if cell.evaluate(SHOWN) != before:
            return True
    return False


def check_controls(page) -> int:
    """Move every control of the notebook until what is shown below it changes: five moves at most,
    since some choices differ in nothing that is seen. The others are where they were at first.
    """
    moved = 0
    for index in range(page.evaluate(f"() => {CURRENT}.content.widgets.length")):
        page.evaluate(f"i => {CURRENT}.content.scrollToItem(i)", index)
        source = page.evaluate(f"i => {CURRENT}.content.widgets[i].model.sharedModel.source", index)
        if not re.search(r"(?m)^play\(|^@interact", source):
            continue
        cell = page.locator(f".jp-Cell[data-windowed-list-index='{index}']")
        cell.locator(CONTROLS).first.wait_for()
        for number in range(cell.locator(CONTROLS).count()):
            page.evaluate(f"i => {{ {CURRENT}.content.activeCellIndex = i }}", index)
            run(page, "notebook:run-cell")
            check_control(page, cell, cell.locator(CONTROLS).nth(number))
            moved += 1
    return moved


def check_control(page, cell, control) -> None:
    control.wait_for()
    before = cell.evaluate(SHOWN)
    for times in range(5):
        move(page, control, times)
        if changes(page, cell, before):
            break
    else:
        raise AssertionError(f"{control.inner_text()!r} does nothing")
    page.wait_for_timeout(300)
    assert cell.locator("[data-mime-type*=stderr], [data-mime-type*=error]").count() == 0


def test_a_control_that_does_nothing_is_found(browser, lab):
    with tab_of(browser) as page:
        open_notebook(page, lab, "idle.ipynb")
        run(page)
        with pytest.raises(AssertionError, match="idle.* does nothing"):
            check_controls(page)


@pytest.mark.parametrize("path", ["control.ipynb", *pages_with_controls()])
def test_a_page_with_controls(browser, lab, path):
    """It runs, each control changes what is shown, and it looks right in any window and theme."""
    with tab_of(browser) as page:
        open_notebook(page, lab, path)
        run(page)
        assert errors_on(page) == [] and cells_not_run(page) == []
        assert check_controls(page) >= (3 if path == "control.ipynb" else 1)
        assert errors_on(page) == []
        for theme, width in itertools.product(THEMES, WIDTHS) if path.startswith("nbs/") else ():
            page.set_viewport_size({"width": width, "height": 1000})
            change_theme(page, theme)
            if width < 1300:  # as the page does when it opens in a narrow window
                page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
            assert look_through(page, theme) >= 1


# ---------------------------------------------------------------- the site


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site():
    folder = ROOT / "_docs" / "html"
    assert (folder / "index.html").is_file(), "there is no site: `make docs`"
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_site_finds_what_is_sought(browser, site):
    with tab_of(browser) as page:
        page.goto(f"{site}/search.html?q=rotary")
        page.locator("#search-results li").first.wait_for()
        found = page.locator("#search-results").inner_text()
        assert "Rotary" in found and "llm_course.model" in found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_of_the_site(browser, site, width, scheme):
    """Formulas are set, pictures described and in the theme, and nothing is wider than the page."""
    with tab_of(browser, width, color_scheme=scheme) as page:
        page.goto(f"{site}/index.html")
        page.wait_for_url("**/docs/index.html")
        page.goto(f"{site}/nbs/05a_attention.html")
        page.locator("mjx-container").first.wait_for()
        assert page.locator("mjx-merror").count() == 0
        wide = page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= width
        cut = page.locator(".cell_input pre").evaluate_all(
            "found => found.filter(node => node.scrollWidth > node.clientWidth).length"
        )
        assert cut == 0
        pictures = page.locator(".cell_output img").all()
        assert len(pictures) > 3
        for image in pictures:
            assert len(image.get_attribute("alt")) > 20
            assert stands_in(image, dark=scheme == "dark")

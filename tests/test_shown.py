"""Pages are run by nbdev, and what they show is what they store: `scripts/pages.py`."""

import sys
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import pages  # noqa: E402

RESULT = "execute_result"


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def display(kind="display_data", **data):
    return nbformat.v4.new_output(kind, {name.replace("_", "/"): data[name] for name in data})


def run(folder, *cells):
    """Whether a page with these cells passes; a cell is its code and what it stores."""
    page = nbformat.v4.new_notebook()
    page.cells = [nbformat.v4.new_code_cell(code, outputs=list(stored)) for code, *stored in cells]
    nbformat.write(page, folder / "page.ipynb")
    return pages.test_page(folder / "page.ipynb", skip_flags=["slow"])[0]


@pytest.mark.skipif(sys.platform == "win32", reason="a process for each of them takes long there")
@pytest.mark.parametrize(
    "cell, passes",
    [
        (("print(6 * 7)", stream("42\n")), True),
        (("print(6 * 7)", stream("43\n")), False),
        (("print(6 * 7)",), False),
        (("6 * 7", display(RESULT, text_plain="42")), True),
        (("6 * 7", display(RESULT, text_plain="42.0")), False),
        (("x = 6 * 7", display(RESULT, text_plain="42")), False),
        (("# NBVAL_IGNORE_OUTPUT\nprint(6 * 7)", stream("43\n")), True),
        (("# NBVAL_IGNORE_OUTPUT\n1 / 0",), False),
        (("#| slow\n1 / 0", stream("1\n")), True),
        (("#| eval: false\n1 / 0",), True),
        (("import sys; print('careful', file=sys.stderr)",), False),
    ],
)
def test_a_page_shows_what_it_stores(tmp_path, cell, passes):
    assert run(tmp_path, ("x = 1",), cell) is passes


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it takes seconds to start")
def test_pages_do_not_meet(tmp_path):
    """What a page sets, or leaves in a temporary folder, is gone when the next one begins."""
    left = "import tempfile, torch; torch.set_default_dtype(torch.half); path = tempfile.mkdtemp()"
    write = f"open({str(tmp_path / 'path')!r}, 'w').write(path);"
    assert run(tmp_path, (left,), (write,))
    assert not Path((tmp_path / "path").read_text()).exists()
    assert run(tmp_path, ("import torch; print(torch.ones(1).dtype)", stream("torch.float32\n")))


def test_what_differs_is_shown(tmp_path, capfd):
    assert not run(tmp_path, ("print(1)", stream("2\n")), ("print(3)", stream("4\n")))
    said = capfd.readouterr().err
    assert "Differs in " in said and all(line in said for line in ("-2", "+1", "-4", "+3"))


@pytest.mark.parametrize(
    "stored, now, differs",
    [
        ([stream("a\n"), stream("b\n")], [stream("a\nb\n")], False),  # as it came, in pieces
        ([stream("a\n")], [stream("a\n", "stderr")], True),
        ([stream("a\n")], [stream("a")], True),
        ([display(text_plain="F", image_png="1")], [display(text_plain="F", image_png="2")], False),
        ([display(text_plain="F")], [display(text_plain="F"), display(text_plain="F")], True),
        ([display(text_plain="F")], [display(text_plain="F", text_html="<b>")], True),
    ],
)
def test_what_is_compared(stored, now, differs):
    assert bool(pages.difference(stored, now)) is differs

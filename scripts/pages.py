"""Run pages as a test and compare what they show with what they store: `python scripts/pages.py`
for all of them, `python scripts/pages.py nbs/05a_attention.ipynb` for some.

nbdev_test runs them. Here each page gets a process of its own (on Linux a fork of this one, which
has imported what many pages import), and a cell that shows something else than it stores fails like
one that raises. What is compared is what nbval compares: printed text, and the text of what is
displayed; pictures are counted. A cell with the line `# NBVAL_IGNORE_OUTPUT` may show anything.

What only a kernel can tell, `make nightly` asks: there nbval runs every page in one.
"""

import difflib
import importlib
import os
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import nbdev.test
from execnb.shell import CaptureShell
from matplotlib_inline.backend_inline import set_matplotlib_formats

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["nbs", "solutions"]
# What many pages import, or what they call imports: forked pages find it here. None of it draws a
# random number, sets an option, or starts a thread.
IMPORTED = [
    "matplotlib.pyplot",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "ipywidgets",
    "transformers.models.llama.modeling_llama",
    "llm_course.training.train",
    "llm_course.pages.storyteller",
]
CORES = min(4, os.cpu_count() or 1)
IGNORED = re.compile(r"^\s*#\s*NBVAL_IGNORE_OUTPUT\s*$", re.MULTILINE)
# pictures differ with the fonts of a machine, and a control needs a kernel
NOT_COMPARED = {"image/png", "image/jpeg", "application/vnd.jupyter.widget-view+json"}


class Differs(AssertionError):
    """A page shows something else than it stores."""


def shown(outputs: list) -> dict[str, list[str]]:
    """What a cell shows, by kind. All that it prints is one text, as in nbval."""
    printed: dict[str, str] = defaultdict(str)
    displayed = defaultdict(list)
    for output in outputs:
        if output["output_type"] == "stream":
            printed[output["name"]] += "".join(output["text"])
        for kind, value in output.get("data", {}).items():
            if kind not in NOT_COMPARED:
                displayed[kind].append("".join(value))
    return displayed | {name: [text] for name, text in printed.items()}


def difference(stored: list, outputs: list) -> str:
    """A diff of what is stored and what is shown now; empty where they are the same."""
    before = shown(stored)
    now = shown(outputs)
    lines = []
    for kind in sorted(before.keys() | now.keys()):
        texts = ("\n".join(side.get(kind, [])) for side in (before, now))
        lines += difflib.unified_diff(*(t.splitlines() for t in texts), "stored", kind, lineterm="")
        if not lines and before.get(kind) != now.get(kind):
            lines.append(f"{before.get(kind)!r} is stored as {kind}, and {now.get(kind)!r} shown")
    return "\n".join(lines)


class Page(CaptureShell):
    """nbdev's shell; it raises at the end of a page what differs in its cells."""

    def __init__(self, path):
        super().__init__(path)
        # pictures are only counted: nbdev's have four times the pixels, and are measured first
        set_matplotlib_formats("png", bbox_inches=None)

    def run_all(self, nb, **options):
        self.differences = []
        super().run_all(nb, **options)
        if self.differences:
            self.exc = Differs("\n\n".join(self.differences))
            raise self.exc

    def cell(self, cell, **options):
        stored = cell.get("outputs", [])
        cell.outputs = []
        super().cell(cell, **options)
        if cell.cell_type == "code" and not self.exc and not IGNORED.search(cell.source):
            if found := difference(stored, cell.outputs):
                self.differences.append(f"Cell #{cell.idx_ + 1}:\n{cell.source}\n\n{found}")


run_as_nbdev = nbdev.test.test_nb


def run_page(path: Path, **options) -> bool:
    """Whether a page runs, and shows what it stores."""
    with patch.object(nbdev.test, "CaptureShell", Page):
        return run_as_nbdev(path, **options)[0]


def _run_and_exit(path: Path, folder: str, options: dict) -> None:
    # as in a kernel; a shell may have started this in its background, where Ctrl-C is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    sys.exit(not run_page(path, **options))


def test_page(path: Path, **options) -> tuple[bool, float]:
    """What nbdev's `test_nb` returns: whether it passed, and the seconds."""
    start = time.monotonic()
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = context.Process(target=_run_and_exit, args=(path, folder, options))
        process.start()
        process.join()
    return process.exitcode == 0, time.monotonic() - start


def main(paths: list[str]) -> int:
    os.chdir(ROOT)
    if sys.platform == "linux":
        sys.path.insert(0, str(ROOT))  # the package of this tree, as in a page
        os.environ["HF_HUB_OFFLINE"] = "1"  # which pages set before they import transformers
        for name in IMPORTED:
            importlib.import_module(name)
    status = 0
    with patch.object(nbdev.test, "test_nb", test_page):
        for path in paths:
            try:
                nbdev.test.nbdev_test(path, n_workers=CORES, do_print=True)
            except SystemExit as end:  # it has said which pages failed
                status = end.code
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PAGES))

"""Run pages and store them with what they show: `python scripts/store.py nbs/05a_attention.ipynb`.

A control is stored as its picture alone: without a running kernel it would be a message about a
missing model. Cells that begin with `#| eval: false` are not run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

WIDGET = "application/vnd.jupyter.widget-view+json"
NOT_RUN = re.compile(r"^#\|\s*eval:\s*false\s*$", re.MULTILINE)


def without_widgets(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET, None)
    return notebook


def store(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    left_out = [cell for cell in notebook.cells if NOT_RUN.search(cell.source)]
    for cell in left_out:
        cell.cell_type = "raw"
    resources = {"metadata": {"path": path.parent}}
    # a text that is printed in parts is stored as one
    settings = {"timeout": 600, "resources": resources, "coalesce_streams": True}
    NotebookClient(notebook, **settings).execute()
    for cell in left_out:
        cell.cell_type = "code"
    nbformat.write(without_widgets(notebook), path)
    subprocess.run(["nbdev_clean", "--fname", path], check=True)


if __name__ == "__main__":
    os.environ.pop("MPLBACKEND", None)  # of a shell; plots would not be shown
    for name in sys.argv[1:]:
        print(f"{name} ...", flush=True)
        store(Path(name))

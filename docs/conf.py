"""The site: the stored pages, the documents, and the package's reference: `make docs`.

Sphinx reads the tree as it is, so that every link on GitHub is a link of the site, and executes
nothing. What a notebook says for other tools (its directives, its hidden cells, its alternative
texts) is translated as it is read.
"""

import functools
import importlib.util
import json
import re
import sys
from pathlib import Path
from unittest.mock import patch

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this tree, wherever another is installed
SETTINGS = dict(re.findall(r"(?m)^(\w+) = (.*)$", (ROOT / "settings.ini").read_text("utf-8")))
REPOSITORY = f"https://github.com/{SETTINGS['user']}/{SETTINGS['repo']}"

project = SETTINGS["title"]
author = SETTINGS["author"]
version = release = SETTINGS["version"]
html_title = f"{project} {version}"
html_show_copyright = False
html_show_sphinx = False

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "nbs/*.ipynb", "README.md", "TROUBLESHOOTING.md"]
include_patterns += ["CONTRIBUTING.md", "benchmarks/*.md"]
exclude_patterns = [".*", "_*", "runs", "**/.ipynb_checkpoints", "**/__pycache__"]

html_theme = "sphinx_book_theme"
html_theme_options = {
    "repository_url": REPOSITORY,
    "repository_branch": SETTINGS["branch"],
    "use_repository_button": True,
    "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    "show_toc_level": 2,
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_extra_path = ["index.html"]  # leads to docs/index.html
# MathJax comes from a package, since a reader may have no network
MATHJAX = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent
html_favicon = "static/favicon.svg"
html_static_path = ["static", str(MATHJAX / "static")]
html_css_files = ["site.css"]
mathjax_path = "mathjax/tex-chtml.js"

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # without a kernel a control does nothing: its picture is shown
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4

default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True  # the fields of a dataclass are documented beside their types
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 88
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!llm_course\.).*|.*\._\w+")]  # of others, and private ones


# ---------------------------------------------------------------- notebooks


SHADES = re.compile(r"\b(black|white|dark|pale|bright)", re.IGNORECASE)


def translate_cell(cell: dict, near: str) -> None:
    """Without what the reader needn't see; `#| fig-alt:` becomes the picture's text. In the dark
    theme a picture stays as it was drawn if its text, or the text `near` it, names a shade.
    """
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        # a student's copy of an exercise is made by `make lab`, and is not on the site
        source = re.sub(r"\(\.\./exercises/\w+\.ipynb\)", "(../docs/exercises.md)", source)
        cell["source"] = source
        return
    alt = re.search(r"(?m)^#\|\s*fig-alt:\s*(.+)$", source)
    image = {"alt": alt[1].strip()} if alt else {}
    if SHADES.search(f"{image.get('alt', '')} {near}"):
        image["classes"] = "as-drawn"
    cell["metadata"]["mystnb"] = {"image": image}
    if cell["metadata"].get("jupyter", {}).get("source_hidden"):
        cell["metadata"].setdefault("tags", []).append("hide-input")
    cell["source"] = re.sub(r"(?m)^(#\||# NBVAL_).*\n?", "", source).strip("\n")


def show_folder(link: re.Match, home: Path) -> str:
    """A link to a folder leads to it in the repository, since the site has no list of files."""
    folder = (home / link[1]).resolve()
    if not folder.is_dir():
        return link[0]
    return f"]({REPOSITORY}/tree/{SETTINGS['branch']}/{folder.relative_to(ROOT).as_posix()})"


def translate(app: Sphinx, docname: str, source: list[str]) -> None:
    if not docname.startswith("nbs/"):
        home = (ROOT / docname).parent
        source[0] = re.sub(r"\]\(([\w./-]+)\)", lambda link: show_folder(link, home), source[0])
        return
    notebook = json.loads(source[0])
    cells = notebook["cells"]
    texts = ["".join(c["source"]) if c["cell_type"] == "markdown" else "" for c in cells]
    for index, cell in enumerate(cells):
        translate_cell(cell, " ".join(texts[max(0, index - 1) : index + 2]))
    notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    source[0] = json.dumps(notebook)


# ---------------------------------------------------------------- docstrings


def translate_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """From plain text with code between backticks, as we write it, to reStructuredText."""
    parts = re.split(r"(`[^`]+`)", "\n".join(lines))
    parts[::2] = [re.sub(r"([\\*|]|_(?!\w))", r"\\\1", text) for text in parts[::2]]
    lines[:] = "".join(parts).split("\n")


# ---------------------------------------------------------------- navigation


@functools.cache
def titles(env: BuildEnvironment) -> dict[str, nodes.bullet_list]:
    """The tables of contents, once all is read, without the headings below a title."""
    tocs = {name: toc.deepcopy() for name, toc in env.tocs.items()}
    for toc in tocs.values():
        for item in toc:
            if not list(item.findall(addnodes.toctree)):
                del item[1:]
    return tocs


def navigate_by_titles(
    app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None
) -> None:
    """The list of all pages beside each page: Sphinx would copy all their headings for it, and drop
    them again, which took a third of the build.
    """
    show_toctree = context["toctree"]

    def show_titles(**options: object) -> str:
        with patch.object(app.env, "tocs", titles(app.env)):
            return show_toctree(**options)

    context["toctree"] = show_titles


def setup(app: Sphinx) -> None:
    app.connect("source-read", translate)
    app.connect("autodoc-process-docstring", translate_docstring, priority=400)  # before napoleon
    app.connect("html-page-context", navigate_by_titles)

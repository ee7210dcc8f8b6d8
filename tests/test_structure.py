"""The rules that hold the course together, each with proof that it can fail.

A chapter is a page `nbs/NN_name.ipynb`, or several: `nbs/NNa_name.ipynb`, `nbs/NNb_name.ipynb` and
so on. The order of the names is the order of the book. A page that exports a module of the package
may use what was built before it; one that exports none shows the finished package, and may use all
of it. The checkers return a list of what is wrong, so that the same function judges the real tree
and, at the end of this file, planted violations.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from string import ascii_lowercase

import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llm_course"
PAGES = sorted((ROOT / "nbs").glob("[0-9][0-9]*_*.ipynb"))
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
NOTEBOOKS = [*PAGES, ROOT / "nbs" / "index.ipynb", *SOLUTIONS]
HELPERS = sorted((PACKAGE / "pages").glob("*.py"))  # of the pages: written by hand
MODULES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.name not in {"__init__.py", "_modidx.py"} and path not in HELPERS
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def names(paths: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in paths]


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def python(cell: dict) -> str:
    """The cell as Python: `%magic` and `!shell` lines become calls."""
    return TransformerManager().transform_cell(source(cell))


# ---------------------------------------------------------------- the book is the dependency graph


def exported_module(page: dict) -> str | None:
    """The module that a page writes, such as `llm_course.model.moe`."""
    for cell in code_cells(page):
        if found := re.search(r"^#\|\s*default_exp[ \t]+([\w.]+)", source(cell), re.MULTILINE):
            return f"llm_course.{found[1]}"
    return None


def modules_by_chapter(pages: dict[str, dict]) -> dict[str, str]:
    """Map each module to the number of its chapter, such as "07"."""
    modules = {exported_module(page): stem[:2] for stem, page in pages.items()}
    return {module: chapter for module, chapter in modules.items() if module}


def course_imports(code: str, module: str) -> list[tuple[str, str]]:
    """All imports of the course in `code`, wherever they stand: (module, name), with an empty name
    for `import module`.
    """
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # nbdev writes an absolute import of the course as a relative one.
            parent = module.split(".")[: -node.level] if node.level else []
            found += [
                (".".join([*parent, *filter(None, [node.module])]), alias.name)
                for alias in node.names
            ]
    return [pair for pair in found if pair[0].split(".")[0] == "llm_course"]


def import_faults(code: str, module: str, chapter: str, chapters: dict[str, str]) -> list[str]:
    """What in `code` breaks the rule: import by name, no star, from this chapter or earlier."""
    faults = []
    for imported, name in course_imports(code, module):
        if (imported, name) in {("llm_course", ""), ("llm_course", "__version__")}:
            continue
        if f"{imported}.{name}" in chapters:
            imported = f"{imported}.{name}"  # from llm_course.model import attention
        if name == "*":
            faults.append(f"from {imported} import *: import by name")
        elif not name:
            faults.append(f"import {imported}: import its names, `from {imported} import ...`")
        elif imported not in chapters:
            faults.append(f"{imported} belongs to no chapter")
        elif chapters[imported] > chapter:
            faults.append(f"{imported} is of chapter {chapters[imported]}, after {chapter}")
    return faults


def notebook_import_faults(notebook: dict, chapter: str, chapters: dict[str, str]) -> list[str]:
    """A page uses what the reader has built, and imports it absolutely; its helpers are exported
    by no page.
    """
    faults = []
    helpers = {module_name(path): "00" for path in HELPERS}
    for cell in code_cells(notebook):
        code = python(cell)
        known = chapters if re.search(r"^#\|\s*export", code, re.MULTILINE) else chapters | helpers
        imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
        relative = [node for node in imports if node.level]
        faults += [f"{ast.unparse(node)}: import absolutely" for node in relative]
        if not relative:
            faults += import_faults(code, "", chapter, known)
    return faults


def import_circles(codes: dict[str, str]) -> list[str]:
    """Modules that import each other, directly or through others."""
    graph = {}
    for module, code in codes.items():
        found = [pair for pair in course_imports(code, module)]
        needed = {f"{parent}.{name}" for parent, name in found} | {parent for parent, _ in found}
        graph[module] = needed & codes.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


BOOK = {path.stem: load(path) for path in PAGES}
MODULE_CHAPTERS = modules_by_chapter(BOOK)


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_module_imports_only_earlier_chapters(path):
    module = module_name(path)
    assert module in MODULE_CHAPTERS, f"no page exports {module}"
    code = path.read_text(encoding="utf-8")
    assert import_faults(code, module, MODULE_CHAPTERS[module], MODULE_CHAPTERS) == []


def test_no_module_imports_itself_through_others():
    assert import_circles({module_name(p): p.read_text(encoding="utf-8") for p in MODULES}) == []


@pytest.mark.parametrize("stem", BOOK)
def test_notebook_imports_only_what_is_built(stem):
    page = BOOK[stem]
    chapter = stem[:2] if exported_module(page) else "99"
    assert notebook_import_faults(page, chapter, MODULE_CHAPTERS) == []


# ---------------------------------------------------------------- modules


def python_alone(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh process."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")


IMPORT_EACH = """
import json, os, sys
from collections import Counter

def import_each(needs, done):
    "Fork for each module; first for all that import the same thing from elsewhere, and import that"
    while needs:
        left = Counter(name for names in needs.values() for name in set(names) - done)
        shared, count = left.most_common(1)[0] if left else ("", 0)
        here = {m: names for m, names in needs.items() if shared in names} if count > 1 else needs
        for part in [here] if count > 1 else [{m: names} for m, names in needs.items()]:
            if child := os.fork():
                status = os.waitpid(child, 0)[1]
                if len(part) == 1:
                    print(*part, status, flush=True)
                continue
            if count > 1:
                __import__(shared)
                import_each(part, done | {shared})
            else:
                __import__(*part)
            sys.stdout.flush()
            os._exit(0)
        needs = {m: names for m, names in needs.items() if m not in here}

import_each(json.loads(sys.argv[1]), set())
"""


def needs(codes: dict[str, str]) -> dict[str, list[str]]:
    """What importing each module imports from elsewhere, by itself or through the course."""
    elsewhere: dict[str, set[str]] = {}

    def look_up(module: str) -> set[str]:
        if module not in codes:
            return set()
        if module not in elsewhere:
            elsewhere[module] = set()
            kinds = (ast.Import, ast.ImportFrom)
            body = [node for node in ast.parse(codes[module]).body if isinstance(node, kinds)]
            for node in body:
                if isinstance(node, ast.Import):
                    elsewhere[module] |= {alias.name for alias in node.names}
                elif not node.level:
                    elsewhere[module].add(node.module)
            for parent, name in course_imports("\n".join(map(ast.unparse, body)), module):
                elsewhere[module] |= look_up(parent) | look_up(f"{parent}.{name}")
        return elsewhere[module]

    quick = {"llm_course", *sys.stdlib_module_names}
    return {
        module: sorted(n for n in look_up(module) if n.split(".")[0] not in quick)
        for module in codes
    }


@pytest.mark.nightly
def test_each_module_imports_alone_and_in_silence():
    """In a fork that has imported only what the module itself imports from elsewhere."""
    codes = {module_name(path): path.read_text(encoding="utf-8") for path in [*MODULES, *HELPERS]}
    process = python_alone(IMPORT_EACH, json.dumps(needs(codes)))
    said = sorted(process.stdout.splitlines())
    assert said == sorted(f"{module} 0" for module in codes), process.stderr


REFUSING = """
import builtins, importlib, io, sys
import numpy, torch

def refuse(path="the processor", *args, **options):
    assert not str(path).startswith(("/proc", "the processor")), path
    return opened(path, *args, **options)

opened = io.open
io.open = builtins.open = refuse
torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = refuse
modules, pages = (words.split(",") for words in sys.argv[1:])
for module in modules: importlib.import_module(module)
late = {"tensorboard", "matplotlib", "transformers", "datasets"} & set(sys.modules)
assert not late, late
io.open = builtins.open = opened  # the helpers of pages draw
for module in pages: importlib.import_module(module)
"""


def test_the_last_module_may_be_imported_first_and_asks_the_machine_nothing():
    """All in one process, each before those it builds on, and in silence. None reads /proc or
    imports what only some commands need, before someone asks for it.
    """
    late_first = sorted(map(module_name, MODULES), key=MODULE_CHAPTERS.__getitem__, reverse=True)
    process = python_alone(REFUSING, ",".join(late_first), ",".join(map(module_name, HELPERS)))
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_planted_module_that_does_not_import():
    planted = {"json": [], "no.such_module": ["abc"], "this": ["abc"], "json.tool": ["abc", "re"]}
    process = python_alone(IMPORT_EACH, json.dumps(planted))
    assert {"json 0", "no.such_module 256", "json.tool 0"} <= set(process.stdout.splitlines())
    assert "Zen" in process.stdout  # it speaks, so the comparison above fails


@pytest.mark.parametrize(
    "code", ["import llm_course", "from llm_course.cli import main; sys.exit(main())"]
)
def test_the_door_opens_without_torch(code):
    without_torch = "import sys; sys.modules['torch'] = None; "  # now importing it raises
    process = python_alone(without_torch + code, "--help")
    assert process.returncode == 0, process.stderr
    assert python_alone(without_torch + "import torch").returncode == 1


def test_package_is_what_the_notebooks_export(tmp_path):
    shutil.copytree(
        ROOT / "nbs", tmp_path / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints")
    )
    shutil.copytree(PACKAGE / "pages", tmp_path / "llm_course" / "pages")  # written by hand
    shutil.copy(ROOT / "settings.ini", tmp_path)
    nbdev_export = Path(sys.executable).with_name("nbdev_export")
    subprocess.run([nbdev_export], cwd=tmp_path, check=True, env=os.environ | {"PYTHONUTF8": "1"})

    def modules(root: Path) -> dict[str, str]:
        paths = (p for p in (root / "llm_course").rglob("*.py") if p.name != "__init__.py")
        return {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in paths}

    exported = modules(tmp_path)
    committed = modules(ROOT)
    assert sorted(exported) == sorted(committed)
    assert [name for name in exported if exported[name] != committed[name]] == [], (
        "run `make export`"
    )


UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def unsafe_loads(code: str) -> list[str]:
    """Everything that could run what a file says: pickle in any disguise, and YAML's unsafe
    loaders.
    """
    faults = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            faults += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
            faults += [
                name
                for name in imported
                if name.split(".")[0] in UNPICKLERS or name == "torch.load"
            ]
        elif isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            allows_pickle = any(
                k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords
            )
            if allows_pickle or call in {
                "torch.load",
                "yaml.load",
                "yaml.unsafe_load",
                "yaml.full_load",
            }:
                faults.append(ast.unparse(node))
    return faults


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_module_unpickles_nothing(path):
    code = path.read_text(encoding="utf-8")
    assert unsafe_loads(code) == []


# ---------------------------------------------------------------- pages


def title_faults(notebook: dict) -> list[str]:
    first = notebook["cells"][0]
    promise = (
        re.match(r"# \S.*\n\s*\n?> \S", source(first)) if first["cell_type"] == "markdown" else None
    )
    return [] if promise else ["the first cell must be `# Title` and then `> what it promises`"]


def merge_faults(text: str) -> list[str]:
    """The lines that a merge left for somebody to settle."""
    return [line for line in text.splitlines() if re.match("(<{7}|>{7}) ", line)]


def numbering_faults(stems: list[str]) -> list[str]:
    """A chapter's only page is NN_name; where there are several, they are NNa_, NNb_ and so on."""
    faults, letters = [], defaultdict(list)
    for stem in sorted(stems):
        found = re.fullmatch(r"(\d\d)([a-z]?)_[a-z0-9_]+", stem)
        if not found:
            faults.append(f"{stem} is not called NN_name or NNa_name")
            continue
        letters[found[1]].append(found[2])
    for chapter, found in letters.items():
        expected = [""] if len(found) == 1 else list(ascii_lowercase[: len(found)])
        if found != expected:
            faults.append(f"the pages of chapter {chapter} have the letters {found}: {expected}")
    return faults


def prose(notebook: dict) -> str:
    return "\n".join(source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def dead_links(text: str, folder: Path) -> list[str]:
    """Links in Markdown to files that are not there. A student's exercise is made of a solution of
    the same name, and may not be made yet.
    """
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    found = {link: folder / re.sub(r"^\.\./exercises/", "../solutions/", link) for link in links}
    return sorted(link for link, path in found.items() if not path.exists())


def next_faults(book: dict[str, dict]) -> list[str]:
    """Each page ends with **Next**, and its first link leads to the page that follows by name."""
    faults = []
    stems = sorted(book)
    for stem, following in zip(stems, [*stems[1:], stems[0]], strict=True):
        found = re.findall(r"\*\*Next\*\*.*?\]\(([^)#]+)\)", prose(book[stem]), re.DOTALL)
        if found[-1:] != [f"{following}.ipynb"]:
            faults.append(f"{stem} leads to {found[-1:]}, and the next page is {following}.ipynb")
    return faults


PROGRESS = re.compile(r"\d%\||it/s|s/it|Warning")
MACHINE = re.compile(
    r"(?<![\w.~/])/(?:home|root|Users|tmp|var|mnt|opt|work|content)/\w"
    r"|\b[A-Z]:\\\\?\w|\bat 0x[0-9a-fA-F]{6,}"
)


def shows_something(code: str) -> bool:
    """Whether a top-level statement prints, shows a plot, or is a bare value at the end."""
    statements = ast.parse(code).body
    calls = [
        ast.unparse(s.value.func)
        for s in statements
        if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)
    ]
    last = statements[-1] if statements else None
    bare_value = isinstance(last, ast.Expr) and isinstance(
        last.value, ast.Name | ast.Attribute | ast.Subscript | ast.JoinedStr
    )
    return bare_value or bool({"print", "plt.show"} & set(calls))


def output_faults(notebook: dict) -> list[str]:
    """Stored pages are executed, and say nothing about the machine that executed them."""
    faults = []
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        shown = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        for output in cell["outputs"]:
            shown += "".join(
                "".join(text)
                for kind, text in output.get("data", {}).items()
                if kind.startswith("text/")
            )
            if output["output_type"] == "error":
                faults.append(f"cell {index} stores an error: {output['ename']}")
            if output.get("name") == "stderr" and PROGRESS.search("".join(output["text"])):
                faults.append(f"cell {index} stores a warning or a progress bar")
        if match := MACHINE.search(shown):
            faults.append(
                f"cell {index} stores a path or an address: {shown[match.start() :][:40]!r}"
            )
        runs = not re.search(r"^#\|\s*(eval:\s*false|slow|gpu)", source(cell), re.MULTILINE)
        if runs and not cell["outputs"] and shows_something(python(cell)):
            faults.append(
                f"cell {index} shows something, but its output is not stored: run the notebook "
                "and save it"
            )
    return faults


def test_pages_are_numbered():
    assert numbering_faults(list(BOOK)) == []
    assert numbering_faults([p.stem for p in SOLUTIONS]) == []


def test_each_page_leads_to_the_next():
    assert next_faults(BOOK) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_links_of_a_page_lead_somewhere(path):
    assert dead_links(prose(load(path)), path.parent) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_page_is_titled_small_executed_and_clean(path):
    notebook = load(path)
    assert title_faults(notebook) == []
    assert [fault for cell in notebook["cells"] for fault in merge_faults(source(cell))] == []
    assert path.stat().st_size <= 500_000
    assert output_faults(notebook) == []


DOCUMENTS = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/teaching.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_link_only_to_what_exists(name):
    assert dead_links((ROOT / name).read_text(encoding="utf-8"), (ROOT / name).parent) == []


def test_no_page_leads_to_solutions():
    """A reader who follows a link gets the exercise without its answers."""
    pages = [*PAGES, ROOT / "nbs" / "index.ipynb"]
    assert [p.name for p in pages if re.search(r"\]\([^)]*solutions", prose(load(p)))] == []
    asked = "".join(prose(load(path)) for path in pages)
    assert [p.name for p in SOLUTIONS if f"](../exercises/{p.name}" not in asked] == []


def test_readme_and_index_link_to_every_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = prose(load(ROOT / "nbs" / "index.ipynb"))
    assert [stem for stem in BOOK if f"](nbs/{stem}.ipynb)" not in readme] == []
    assert [stem for stem in BOOK if f"]({stem}.ipynb)" not in index] == []


# ---------------------------------------------------------------- the rules can fail


def page(*cells: str | dict) -> dict:
    """A notebook of code cells; a dict is taken as it is."""
    blank = {"cell_type": "code", "outputs": []}
    return {
        "cells": [cell if isinstance(cell, dict) else blank | {"source": [cell]} for cell in cells]
    }


def test_modules_are_mapped_to_chapters():
    pages = {
        "03_a": page("#| default_exp model.a", "#| export\nx = 1"),
        "05b_more": page("#| default_exp model.b"),
        "06_shows": page("x = 1"),
    }
    expected = {"llm_course.model.a": "03", "llm_course.model.b": "05"}
    assert modules_by_chapter(pages) == expected


def test_planted_line_of_a_merge():
    left = ["<" * 7 + " ours", ">" * 7 + " theirs"]
    assert merge_faults("\n".join(["a", left[0], "=======", "b", left[1]])) == left
    assert merge_faults("=======\n<<< not a conflict") == []


def test_planted_circle():
    a = "from .b import x"
    assert import_circles({"llm_course.a": a, "llm_course.b": ""}) == []
    assert import_circles({"llm_course.a": a, "llm_course.b": "from .a import y"})
    assert import_circles({"llm_course.a": "from . import b", "llm_course.b": "from .a import y"})


def test_planted_links():
    def leads_to(*links: str) -> dict:
        cells = [{"cell_type": "markdown", "source": [f"**Next**: [it]({link})"]} for link in links]
        return {"cells": cells}

    book = {"00_a": leads_to("01_b.ipynb"), "01_b": leads_to("00_a.ipynb")}
    assert next_faults(book) == []
    assert len(next_faults(book | {"00b_new": leads_to("01_b.ipynb")})) == 1
    assert len(next_faults(book | {"00_a": leads_to()})) == 1
    assert dead_links("[a](test_structure.py) and [b](gone.py#there)", Path(__file__).parent) == [
        "gone.py"
    ]


GRAPH = {
    "llm_course.model.mlp": "06",
    "llm_course.model.moe": "07",
    "llm_course.training.engine": "14",
}


@pytest.mark.parametrize(
    "code, fault",
    [
        ("from llm_course.model.mlp import MLP", None),
        ("from .mlp import MLP", None),
        ("from . import mlp", None),
        ("import torch\nfrom math import *", None),
        ("from llm_course import __version__", None),
        ("from .moe import MoE", None),
        ("from ..training.engine import TrainingEngine", "after 07"),
        ("def f():\n    from llm_course.training.engine import TrainingEngine", "after 07"),
        ("from ..training import engine", "after 07"),
        ("from .mlp import *", "by name"),
        ("import llm_course.model.mlp", "names"),
        ("from llm_course.cli import main", "no chapter"),
    ],
)
def test_planted_import(code, fault):
    faults = import_faults(code, "llm_course.model.moe", "07", GRAPH)
    assert [fault in found for found in faults] == ([True] if fault else [])


@pytest.mark.parametrize(
    "code, fault",
    [
        ("#| export\nfrom llm_course.model.mlp import MLP", None),
        ("%matplotlib inline\nfrom llm_course.model.moe import MoE", None),
        ("#| export\nfrom llm_course.training.engine import Callback", "after 07"),
        ("from llm_course.training.engine import TrainingEngine", "after 07"),
        ("#| export\nfrom .mlp import MLP", "absolutely"),
        ("from llm_course.pages.play import play\nplay(print)", None),
        ("#| export\nfrom llm_course.pages.play import play", "no chapter"),
    ],
)
def test_planted_import_on_a_page(code, fault):
    faults = notebook_import_faults(page(code), "07", GRAPH)
    assert [fault in found for found in faults] == ([True] if fault else [])


@pytest.mark.parametrize(
    "code, count",
    [
        ("import pickle", 1),
        ("from joblib import load", 1),
        ("from torch import load", 1),
        ("torch.load(path, weights_only=True)", 1),
        ("np.load(path, allow_pickle=True)", 1),
        ("yaml.load(text, yaml.Loader)", 1),
        (
            "np.load(path)\nyaml.safe_load(text)\nsafetensors.torch.load_file(path)\n"
            "model.load_state_dict(state)",
            0,
        ),
    ],
)
def test_planted_unpickler(code, count):
    assert len(unsafe_loads(code)) == count


def cell_with(text: str = "", **output) -> dict:
    return {
        "cell_type": "code",
        "source": ["print(x)"],
        "outputs": [{"output_type": "stream", "text": [text], **output}],
    }


@pytest.mark.parametrize(
    "cell, count",
    [
        (cell_with("a loss of 3.14, and/or/home/run\n"), 0),
        (cell_with("saved to /home/ada/runs/x\n"), 1),
        (cell_with("saved to C:\\Users\\ada\n"), 1),
        (cell_with("<object at 0x7f3a5c2d1e80>"), 1),
        (cell_with("100%|####|", name="stderr"), 1),
        (cell_with("x.py:3: UserWarning: late", name="stderr"), 1),
        (cell_with("error: 'tarin' is not a command", name="stderr"), 0),
        (cell_with(output_type="error", ename="ValueError"), 1),
        (page("print(1)")["cells"][0], 1),
        (page("loss")["cells"][0], 1),
        (page("fig, ax = plt.subplots()\nplt.show()")["cells"][0], 1),
        (page("#| slow\nprint(1)")["cells"][0], 0),
        (page("x = 1\nassert x\nmodel.eval()\ndef f():\n    print(x)")["cells"][0], 0),
    ],
)
def test_planted_output(cell, count):
    assert len(output_faults(page(cell))) == count


def test_planted_title_and_number():
    good = {"cell_type": "markdown", "source": ["# Attention\n", "\n", "> Read what came before."]}
    assert title_faults(page(good)) == []
    assert title_faults(page({"cell_type": "markdown", "source": ["Attention, a chapter"]}))
    assert title_faults(page("x = 1"))
    assert numbering_faults(["01a_bpe", "01b_tokenization", "02_data"]) == []
    assert len(numbering_faults(["01_a", "01_b"])) == 1
    assert len(numbering_faults(["01a_only"])) == 1
    assert len(numbering_faults(["01a_x", "01c_y"])) == 1
    assert len(numbering_faults(["attention"])) == 1


def test_what_pip_and_uv_install_is_pinned():
    """constraints.txt is the lock of both; the one pin that `uv sync` reads is the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    extras = project["project"]["optional-dependencies"].values()
    wanted = [*project["project"]["dependencies"], *(one for extra in extras for one in extra)]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", one)[0]).lower() for one in wanted}
    assert names - pinned == {"llm-course"}
    assert set(project["tool"]["uv"]["constraint-dependencies"]) <= set(pins)


@pytest.mark.parametrize("is_checkout", [True, False])
def test_make_init_installs_the_checks_of_a_checkout(tmp_path, is_checkout):
    for name in ("Makefile", ".pre-commit-config.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    if is_checkout:
        subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    # what is set up already is not set up again
    words = ["make", f"VENV={sys.prefix}", "--old-file", f"{sys.prefix}/.dev", "init"]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / ".git" / "hooks" / "pre-commit").is_file() == is_checkout

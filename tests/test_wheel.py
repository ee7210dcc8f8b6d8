"""What a release holds, built from a clean tree. The wheel trains, and runs a page, in an empty
environment: nothing leans on the tree or on the dev tools.
"""

import ast
import configparser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).resolve().parent.parent
LAUNCHED = "00a_first_run"  # the page that the badges open
IMPORT = ast.Import | ast.ImportFrom


def run(*command: str | Path, cwd: Path) -> str:
    """Run `command` as a stranger would: outside of the tree, with no PYTHONPATH."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "VIRTUAL_ENV"}
    }
    process = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout


def clean_tree(destination: Path) -> Path:
    """The tree as a fresh checkout has it: without what git ignores."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.strip("/") for line in lines if line and not line.startswith("#")]
    return Path(shutil.copytree(ROOT, destination, ignore=shutil.ignore_patterns(".git", *ignored)))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """A folder with the source distribution and the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("dist")
    tree = clean_tree(folder / "tree")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    run(*build, tree, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions) -> Path:
    return next(distributions.glob("*.whl"))


@pytest.fixture
def empty_environment(tmp_path):
    folder = tmp_path / "empty"
    venv.create(folder, with_pip=True)
    yield Path(sysconfig.get_path("scripts", vars={"base": str(folder)}))
    shutil.rmtree(folder)  # a gigabyte


def install(python: Path, *what: str | Path) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]  # what is run is compiled
    run(*pip, "-c", ROOT / "constraints.txt", *what, cwd=python.parent)


def required(own: metadata.Distribution, *asked: str) -> dict[str, metadata.Distribution]:
    """What `pip install` of these brings: they, and whatever they require; `own` is the wheel's."""
    waiting = [Requirement(text) for text in asked]
    seen: set[str] = set()
    found = {}
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        name = canonicalize_name(requirement.name)
        found[name] = own if name == "llm-course" else metadata.distribution(name)
        extras = ["", *requirement.extras]
        for further in map(Requirement, found[name].requires or []):
            marker = further.marker
            if not marker or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(further)
    return found


@pytest.fixture
def link(tmp_path, wheel):
    """A function that adds distributions to an environment that holds the wheel, by links to the
    files of this one: it takes a second where pip takes a minute. It returns all of their names
    and the environment's folder of programs.
    """
    base = dict(base=str(tmp_path / "linked"))
    venv.create(base["base"])
    site = Path(sysconfig.get_path("purelib", vars=base))
    scripts = Path(sysconfig.get_path("scripts", vars=base))
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", wheel, cwd=tmp_path)
    own = metadata.PathDistribution(next(site.glob("llm_course-*.dist-info")))

    def add(*asked: str) -> tuple[set[str], Path]:
        found = required(own, *asked)
        for name in found.keys() - {"llm-course"}:
            for file in found[name].files:
                target = site / file
                if ".." not in file.parts and file.locate().exists() and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(file.locate())
        return set(found), scripts

    return add


def test_wheel_holds_the_package_alone(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in files} == {"llm_course"}
    package = ROOT / "llm_course"
    data = [package / "py.typed", *(package / "pages" / "storyteller_model").iterdir()]
    data += [*(package / "pages").glob("*.json"), *(package / "training").glob("*.json")]
    sources = {path.relative_to(ROOT).as_posix() for path in [*package.rglob("*.py"), *data]}
    assert {name for name in files if ".dist-info/" not in name} == sources


def test_the_source_distribution_holds_the_pages_and_no_solution(distributions):
    [archive] = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    pages = {p.relative_to(ROOT).as_posix() for p in (ROOT / "nbs").glob("*.ipynb")}
    assert pages <= names and {"settings.ini", "constraints.txt", "LICENSE"} <= names
    assert {name for name in names if name.startswith(("solutions", "tests", "runs", "_"))} == set()


def test_what_is_released_is_what_an_index_takes(distributions):
    files = [*distributions.glob("*.whl"), *distributions.glob("*.tar.gz")]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=distributions)


RUN_PAGE = """
import sys

import nbformat
from nbclient import NotebookClient

page = nbformat.read(sys.argv[1], as_version=4)
page.cells.insert(0, nbformat.v4.new_code_cell(sys.argv[2]))
NotebookClient(page, timeout=600).execute()
"""
# in the kernel: no address but this machine's own
OFFLINE = """
import socket
_connect = socket.socket.connect
def _refuse(self, address):
    assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
    return _connect(self, address)
socket.socket.connect = _refuse
"""


DEV_TOOLS = {"nbdev", "pytest", "ipython", "jupyterlab"}


def train_three_steps(scripts: Path, folder: Path) -> None:
    config = shutil.copy(ROOT / "configs" / "first_run.yaml", folder)
    options = "--run-dir a_run --training.max_steps 3 --model.hidden_size 32".split()
    options += "--data.vocab_size 512".split()
    run(scripts / "llm-course", "train", "--config", config, *options, cwd=folder)
    assert list(folder.glob("a_run/checkpoints/*/manifest.json"))


def only_imports(page: Path, folder: Path) -> Path:
    """A page with nothing but the imports of its cells, and the cell that installs the package."""
    notebook = nbformat.read(page, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in notebook.cells:
        if "%pip" not in cell.source:
            tree = ast.parse(cell.source)
            found = [node for node in ast.walk(tree) if isinstance(node, IMPORT)]
            cell.source = "\n".join(map(ast.unparse, found))
    assert sum(bool(cell.source) for cell in notebook.cells) > 1
    nbformat.write(notebook, folder / page.name)
    return folder / page.name


@pytest.mark.skipif(os.name != "posix", reason="links need rights there")
def test_wheel_trains_and_opens_a_page_where_nothing_else_is(link, tmp_path):
    """Whatever the page imports is found there; that it runs there to its end is for the night."""
    names, scripts = link("llm_course")
    assert not DEV_TOOLS & names
    train_three_steps(scripts, tmp_path)

    link("llm_course[pages]", "ipykernel", "nbclient")
    page = only_imports(ROOT / "nbs" / f"{LAUNCHED}.ipynb", tmp_path)
    run(scripts / "python", "-c", RUN_PAGE, page, OFFLINE, cwd=tmp_path)


@pytest.mark.nightly
def test_wheel_trains_and_runs_a_page_in_an_empty_environment(wheel, empty_environment, tmp_path):
    """The page is that of the badges: Colab and Kaggle bring a kernel, the wheel the rest."""
    python = empty_environment / "python"
    install(python, wheel)
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert not DEV_TOOLS & {line.split("==")[0] for line in installed.splitlines()}
    train_three_steps(empty_environment, tmp_path)

    install(python, f"{wheel}[pages]", "ipykernel", "nbclient")
    run(python, "-c", RUN_PAGE, ROOT / "nbs" / f"{LAUNCHED}.ipynb", OFFLINE, cwd=tmp_path)


def test_the_badges_lead_to_the_repository():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    values = settings["DEFAULT"]
    repository = f"github.com/{values['user']}/{values['repo']}"
    page = f"blob/{values['branch']}/nbs/{LAUNCHED}.ipynb"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"](https://colab.research.google.com/{repository.replace('.com', '')}/{page})" in readme
    assert f"](https://kaggle.com/kernels/welcome?src=https://{repository}/{page})" in readme
    first = json.loads((ROOT / "nbs" / f"{LAUNCHED}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = next("".join(cell["source"]) for cell in first if cell["cell_type"] == "code")
    assert f"git+https://{repository}" in code and 'find_spec("llm_course") is None' in code

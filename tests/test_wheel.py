"""The wheel, built from a clean tree, trains in an empty environment: nothing leans on the tree or
on the dev tools.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).resolve().parent.parent


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
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--outdir",
        folder,
        clean_tree(folder / "tree"),
        cwd=folder,
    )
    return next(folder.glob("*.whl"))


@pytest.fixture
def empty_environment(tmp_path):
    folder = tmp_path / "empty"
    venv.create(folder, with_pip=True)
    yield folder
    shutil.rmtree(folder)  # a gigabyte


def test_wheel_holds_the_package_alone(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in files} == {"llm_course"}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "llm_course").rglob("*.py")} | {
        "llm_course/py.typed"
    }
    assert {name for name in files if ".dist-info/" not in name} == sources


def test_wheel_trains_in_an_empty_environment(wheel, empty_environment, tmp_path):
    scripts = Path(sysconfig.get_path("scripts", vars={"base": str(empty_environment)}))
    run(
        scripts / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        ROOT / "constraints.txt",
        wheel,
        cwd=tmp_path,
    )
    installed = run(scripts / "python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert not {"nbdev", "pytest", "ipython", "jupyterlab"} & {
        line.split("==")[0] for line in installed.splitlines()
    }

    config = shutil.copy(ROOT / "configs" / "first_run.yaml", tmp_path)
    options = "--run-dir a_run --training.max_steps 3 --model.hidden_size 32".split()
    options += "--data.vocab_size 512".split()
    run(scripts / "llm-course", "train", "--config", config, *options, cwd=tmp_path)
    assert list(tmp_path.glob("a_run/checkpoints/*/manifest.json"))

"""Prove the whole course, one stage after another: `make test`, or `python scripts/check.py lint
types` for some.

It stops at the first stage that fails and says what to do about it. Where a stage leaves a core
without work, others run beside it; what they print comes after it. The totals in the last line are
the sums of what the stages' own tools counted: pytest its tests, nbdev its notebooks, any other
command one.
"""

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["nbs", "solutions"]
# what people write
SOURCES = [*PAGES, "tests", "scripts", "benchmarks", "docs", "lab", "conftest.py"]
CORES = min(4, os.cpu_count() or 1)
# of pytest, whose workers often wait for a kernel or a process: one more keeps the cores busy
WORKERS = str(CORES + 1)
TESTS = [*"pytest -q --dist worksteal -n".split(), WORKERS, "-m"]


def count_command(output: str, succeeded: bool) -> tuple[int, int]:
    """A command without tests of its own passes or fails as one."""
    return int(succeeded), int(not succeeded)


def count_pytest(output: str, succeeded: bool) -> tuple[int, int]:
    """Read pytest's last summary line: `2 failed, 40 passed, 1 skipped in 3.14s`."""
    summaries = re.findall(r"^.*\d+ [a-z]+.* in [\d.]+s.*$", output, re.MULTILINE)
    counts = (
        {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summaries[-1])}
        if summaries
        else {}
    )
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return counts.get("passed", 0), failed or int(not succeeded)


def count_nbdev(output: str, succeeded: bool) -> tuple[int, int]:
    """nbdev_test says `- Completed FILE` after every notebook, and at the end names those that
    failed, indented.
    """
    failed = len(re.findall(r"^\t\S+\.ipynb$", output, re.MULTILINE))
    return output.count("- Completed ") - failed, failed or int(not succeeded)


@dataclass
class Stage:
    name: str
    commands: list[list[str]]
    advice: str
    count: Callable[[str, bool], tuple[int, int]] = count_command
    # files that the commands must leave as they were
    unchanged: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    beside: str = ""  # the stage before it in the list, if both can run at once


STAGES = [
    Stage(
        "export",
        [["nbdev_export"], ["nbdev_clean"], ["nbdev_clean", "--fname", "solutions"]],
        "The notebooks are the source: llm_course/ and the clean notebooks are written now; look at"
        " `git diff` and keep it.",
        unchanged=["llm_course/**/*.py", "nbs/**/*.ipynb", "solutions/*.ipynb"],
    ),
    Stage(
        "lint",
        [
            ["ruff", "format", "--check", *SOURCES],
            ["ruff", "check", "llm_course", *SOURCES],
        ],
        "`make format` lays it out. Mend the rest where it is written: for llm_course/ that is the"
        " notebook named in the file's"
        " first lines; then `make export`.",
    ),
    Stage(
        "pages",
        [[sys.executable, "scripts/pages.py"]],
        "A cell raised, or a page no longer shows what its code gives. Run that notebook from the"
        " top in `make lab`. If the new output is right, save the notebook, then `make export`.",
        count_nbdev,
    ),
    Stage(
        "types",
        [["mypy"]],
        "Mend the signature in the chapter's notebook, then `make export`.",
        beside="pages",
    ),
    Stage(
        "docs",
        [[*"sphinx-build -q -W --keep-going -b html -c docs . _docs/html".split()]],
        "A warning names the page or the docstring, and the link or the mark in it that leads"
        " nowhere. After a change of docs/conf.py, remove _docs/ first.",
        beside="types",
    ),
    Stage(
        "tests",
        [[*TESTS, "not browser and not nightly", "tests"]],
        "Run the one that failed alone: `python -m pytest tests/FILE.py -k NAME`.",
        count_pytest,
        env={"MPLBACKEND": "agg"},
    ),
    Stage(
        "kernels",
        [[*"pytest -q --nbval --nbval-current-env --dist loadfile -n".split(), WORKERS, *PAGES]],
        "A page shows something else in a Jupyter kernel than in nbdev's shell. Run and save it in"
        " `make lab`, then `python scripts/pages.py nbs/PAGE.ipynb`.",
        count_pytest,
    ),
    Stage(
        "nightly",
        [[*TESTS, "nightly", "tests"]],
        "Run the one that failed alone: `python -m pytest tests/FILE.py -k NAME`.",
        count_pytest,
        env={"MPLBACKEND": "agg"},
    ),
    Stage(
        "browser",
        [["pytest", "-q", "-rs", "tests/test_browser.py"]],
        "Run the one that failed alone: `python -m pytest tests/test_browser.py -k NAME`.",
        count_pytest,
    ),
]
BY_NAME_ALONE = {"kernels", "nightly", "browser"}  # minutes, and the last needs a browser

ENVIRONMENT = {
    # the tools of this Python, whoever calls
    "PATH": sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"],
    "PYTHONUTF8": "1",
    "PYTHONUNBUFFERED": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "JUPYTER_PLATFORM_DIRS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # the workers share the cores, and a sum does not depend on how many there are
    "OMP_NUM_THREADS": "1",
}


def run(command: list[str], env: dict[str, str], say: Callable[[str], None]) -> tuple[str, bool]:
    """Run `command` in the repository's root, say what it prints as it comes, and return that with
    whether it succeeded.
    """
    say(f"$ {' '.join(command)}\n")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    lines = []
    for line in process.stdout:
        say(line)
        lines.append(line)
    return "".join(lines), process.wait() == 0


def read(patterns: list[str]) -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for pattern in patterns
        for path in ROOT.glob(pattern)
    }


@dataclass
class Result:
    stage: Stage
    seconds: float
    passed: int
    failed: int


def run_stage(stage: Stage, say: Callable[[str], None]) -> Result:
    say(f"\n== {stage.name}\n")
    start = time.monotonic()
    before = read(stage.unchanged)
    passed = failed = 0
    for command in stage.commands:
        output, succeeded = run(command, os.environ | stage.env, say)
        more_passed, more_failed = stage.count(output, succeeded)
        passed = passed + more_passed
        failed = failed + more_failed
    after = read(stage.unchanged)
    changed = sorted(name for name in before | after if before.get(name) != after.get(name))
    for name in changed:
        say(f"changed: {name}\n")
    if stage.unchanged:
        passed = passed + (not changed)
        failed = failed + bool(changed)
    return Result(stage, time.monotonic() - start, passed, failed)


def side_by_side(stages: list[Stage]) -> list[list[Stage]]:
    """The stages in their order, those that can run at once in one list."""
    rows: list[list[Stage]] = []
    for stage in stages:
        if rows and stage.beside == rows[-1][-1].name:
            rows[-1].append(stage)
        else:
            rows.append([stage])
    return rows


def run_at_once(stages: list[Stage]) -> list[Result]:
    """Run the stages, and show what the first says as it comes, what the others say after it."""
    show = partial(print, end="", flush=True)
    kept: list[list[str]] = [[] for _ in stages]
    says = [show, *(lines.append for lines in kept[1:])]
    with ThreadPoolExecutor(len(stages)) as pool:
        results = list(pool.map(run_stage, stages, says))
    for lines in kept:
        show("".join(lines))
    return results


def main(names: list[str]) -> int:
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        sys.exit(
            f"no stage is called {', '.join(sorted(unknown))}; there are"
            f" {', '.join(s.name for s in STAGES)}"
        )
    os.environ.update(ENVIRONMENT)
    every = {stage.name for stage in STAGES} - BY_NAME_ALONE
    results: list[Result] = []
    for stages in side_by_side([stage for stage in STAGES if stage.name in (names or every)]):
        results += run_at_once(stages)
        if any(result.failed for result in results):
            break
    print(f"\n{'stage':8}{'seconds':>8}{'passed':>8}{'failed':>8}")
    for r in results:
        print(f"{r.stage.name:8}{r.seconds:8.0f}{r.passed:8}{r.failed:8}")
    failed = [result.stage for result in results if result.failed]
    for stage in failed:
        print(f"\n{stage.name} failed. {stage.advice}")
    print(f"\n{sum(r.passed for r in results)} passed, {sum(r.failed for r in results)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

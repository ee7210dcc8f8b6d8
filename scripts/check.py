"""Prove the whole course, one stage after another: `make test`, or `python scripts/check.py lint
types` for some.

It stops at the first stage that fails and says what to do about it. The totals in the last line are
the sums of what the stages' own tools counted: pytest its tests and nbval its cells, nbdev its
notebooks, any other command one.
"""

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["nbs", "solutions"]
# what people write
SOURCES = [*PAGES, "tests", "scripts", "benchmarks", "docs", "lab", "conftest.py"]
WORKERS = str(min(4, os.cpu_count() or 1))


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
    Stage("types", [["mypy"]], "Mend the signature in the chapter's notebook, then `make export`."),
    Stage(
        "run",
        [["nbdev_test", "--n_workers", WORKERS, "--do_print"]],
        "A cell raised. Run that notebook from the top in `make lab` until it ends without an"
        " error.",
        count_nbdev,
    ),
    Stage(
        "show",
        [[*"pytest -q --nbval --nbval-current-env --dist loadfile -n".split(), WORKERS, *PAGES]],
        "A page no longer shows what its code gives. If the new output is right, run and save the"
        " notebook, then `make export`.",
        count_pytest,
    ),
    Stage(
        "docs",
        [[*"sphinx-build -q -W --keep-going -j auto -b html -c docs . _docs/html".split()]],
        "A warning names the page or the docstring, and the link or the mark in it that leads"
        " nowhere. After a change of docs/conf.py, remove _docs/ first.",
    ),
    Stage(
        "tests",
        [["pytest", "-q", "-n", WORKERS, "-m", "not browser", "tests"]],
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
BY_NAME_ALONE = {"browser"}  # it needs a browser, and minutes

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


def run(command: list[str], env: dict[str, str]) -> tuple[str, bool]:
    """Run `command` in the repository's root, show its output as it comes, and return it with
    whether it succeeded.
    """
    print("$", *command, flush=True)
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
        print(line, end="", flush=True)
        lines.append(line)
    return "".join(lines), process.wait() == 0


def read(patterns: list[str]) -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for pattern in patterns
        for path in ROOT.glob(pattern)
    }


def run_stage(stage: Stage) -> tuple[int, int]:
    before = read(stage.unchanged)
    passed = failed = 0
    for command in stage.commands:
        output, succeeded = run(command, os.environ | stage.env)
        more_passed, more_failed = stage.count(output, succeeded)
        passed = passed + more_passed
        failed = failed + more_failed
    after = read(stage.unchanged)
    changed = sorted(name for name in before | after if before.get(name) != after.get(name))
    for name in changed:
        print(f"changed: {name}")
    if stage.unchanged:
        passed = passed + (not changed)
        failed = failed + bool(changed)
    return passed, failed


def main(names: list[str]) -> int:
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        sys.exit(
            f"no stage is called {', '.join(sorted(unknown))}; there are"
            f" {', '.join(s.name for s in STAGES)}"
        )
    os.environ.update(ENVIRONMENT)
    rows = []
    failed_stage = None
    every = {stage.name for stage in STAGES} - BY_NAME_ALONE
    for stage in STAGES:
        if stage.name not in (names or every):
            continue
        print(f"\n== {stage.name}", flush=True)
        start = time.monotonic()
        passed, failed = run_stage(stage)
        rows.append((stage.name, time.monotonic() - start, passed, failed))
        if failed:
            failed_stage = stage
            break
    print(f"\n{'stage':8}{'seconds':>8}{'passed':>8}{'failed':>8}")
    for name, seconds, passed, failed in rows:
        print(f"{name:8}{seconds:8.0f}{passed:8}{failed:8}")
    if failed_stage:
        print(f"\n{failed_stage.name} failed. {failed_stage.advice}")
    print(f"\n{sum(row[2] for row in rows)} passed, {sum(row[3] for row in rows)} failed")
    return int(failed_stage is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How long one waits for the first word."""

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.measure import Row, alternate


def rows(*, full: bool) -> Iterator[Row]:
    def python(*words: str) -> None:
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)

    seconds = alternate(
        {
            "import llm_course": lambda: python("-c", "import llm_course"),
            "llm-course --help": lambda: python(
                "-c", "from llm_course.cli import main; main(['--help'])"
            ),
            "import torch": lambda: python("-c", "import torch"),
        },
        rounds=9 if full else 5,
    )
    for what in ("import llm_course", "llm-course --help"):
        yield Row(what, "import torch", seconds[what], seconds["import torch"], unit="s")

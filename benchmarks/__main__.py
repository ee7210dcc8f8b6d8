"""Measure this machine and write benchmarks/RESULTS.md: `make bench`, or `python -m benchmarks
[--full] [NAME ...]` for some.
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.measure import measured, title
from benchmarks.report import write_report

FOLDER = Path(__file__).parent
NAMES = (
    "training",
    "decoding",
    "experts",
    "text",
    "engine",
    "memory",
    "startup",
    "growth",
    "roofline",
)
APART = ("litgpt", "gpu")  # by name alone: it needs another environment, or a GPU


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"some of {', '.join(NAMES)} (default: all), or {', '.join(APART)}"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="more rounds, and the candidates that take seconds a call",
    )
    options = parser.parse_args()
    if unknown := set(options.names) - {*NAMES, *APART}:
        parser.error(f"{', '.join(sorted(unknown))}: choose among {', '.join((*NAMES, *APART))}")
    os.environ |= {
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    results = FOLDER / "results.json"
    tables = json.loads(results.read_text()) if results.exists() else {}
    for name in options.names or NAMES:
        start = time.perf_counter()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(measured, name, options.full).result()
        tables.setdefault(title(), {})[name] = found
        results.write_text(json.dumps(tables, indent=1) + "\n")
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
    write_report(tables)


if __name__ == "__main__":
    main()

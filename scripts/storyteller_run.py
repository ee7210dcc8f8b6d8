"""Record how the storyteller was trained, for chapter 20: python scripts/storyteller_run.py RUN_DIR

Writes llm_course/pages/storyteller_run.json: at most a hundred rows of the run's metrics, and each
of its samples.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from llm_course.files import write_text
from llm_course.pages.pretraining import STORYTELLER
from llm_course.training.callbacks import read_metrics

COLUMNS = "step targets loss val_loss val_bits_per_byte grad_norm learning_rate".split()


def shorten(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(run_dir: str) -> None:
    rows = read_metrics(Path(run_dir, "metrics.jsonl"))
    every = math.ceil(len(rows) / 100)
    kept = [row for place, row in enumerate(rows, 1) if place % every == 0 or "val_loss" in row]
    stored = {
        "rows": [{name: shorten(row[name]) for name in COLUMNS if name in row} for row in kept],
        "samples": {row["step"]: row["sample"] for row in rows if "sample" in row},
    }
    write_text(STORYTELLER, json.dumps(stored) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""Record the small run of chapter 20 on one process and on two, for the page on several machines.

    python scripts/two_processes.py     # a few minutes on two cores

Writes llm_course/pages/two_processes.json: the curves of each run, and what its model writes. Run
it again if `configs/small_stories.yaml` changes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from llm_course.files import write_text
from llm_course.training.bands import record_curves
from llm_course.training.callbacks import read_metrics
from llm_course.training.folder import continuation, load_run

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "llm_course" / "pages" / "two_processes.json"
SETTINGS = {"training.precision": "fp32", "logging.tensorboard": "false"}
RUNS = {
    "one process, 16 rows": {"training.batch_size": 16},
    "two, 8 rows each": {"training.batch_size": 8, "distributed.world_size": 2},
    "two, 16 rows each": {"training.batch_size": 16, "distributed.world_size": 2},
}


def record(settings: dict[str, object]) -> dict[str, object]:
    """Train with these settings, and keep the curves and a text."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{key}={value}" for key, value in (SETTINGS | settings).items()]
        config = str(ROOT / "configs" / "small_stories.yaml")
        subprocess.run(
            [sys.executable, "-m", "llm_course.cli", "train", "--config", config]
            + ["--run-dir", folder, *words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        )
        prompt = "Once upon a time"
        pieces = continuation(*load_run(folder), prompt, seed=0, max_new_tokens=80)
        rows = read_metrics(Path(folder, "metrics.jsonl"))
        return record_curves(rows) | {"sample": prompt + "".join(pieces)}


if __name__ == "__main__":
    write_text(RECORD, json.dumps({name: record(each) for name, each in RUNS.items()}) + "\n")

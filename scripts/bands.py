"""Record the reference bands: train each configuration below with several seeds, one after another.

    python scripts/bands.py [NAME ...]     # half a minute a run, on one thread

Writes llm_course/training/bands.json, in which `llm-course check-run` looks runs up. A run's curves
differ a little between processors, by less than they differ between seeds.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from llm_course.files import write_text
from llm_course.training.bands import curve_settings, record_curves
from llm_course.training.callbacks import read_metrics
from llm_course.training.config import Config
from llm_course.training.run import train_worker
from llm_course.training.sources import read_config

ROOT = Path(__file__).resolve().parent.parent
BANDS = ROOT / "llm_course" / "training" / "bands.json"
CONFIGURATIONS = ("small_stories",)
SEEDS = range(6)


def quiet(config: Config, run_dir: str, seed: int) -> Config:
    """The same run in another folder, with another seed, and without what only a person needs."""
    training = replace(config.training, seed=seed)
    logging = replace(config.logging, progress=False, tensorboard=False, level="warning")
    return replace(config, run_dir=run_dir, training=training, logging=logging)


def record(name: str) -> dict:
    """The entry of a configuration: what it learns, its knobs, and the curves of each seed."""
    config = read_config(ROOT / "configs" / f"{name}.yaml")
    task, knobs = curve_settings(config)
    runs = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            result = train_worker(quiet(config, folder, seed))
            rows = read_metrics(Path(folder, "metrics.jsonl"))
        print(f"{name}, seed {seed}: val_loss {result.metrics['val_loss']:.3f}", flush=True)
        runs.append({"seed": seed} | record_curves(rows))
    return {"task": task, "knobs": knobs, "runs": runs}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    bands = json.loads(BANDS.read_text(encoding="utf-8")) if BANDS.exists() else {}
    for name in names or CONFIGURATIONS:
        bands[name] = record(name)
        write_text(BANDS, json.dumps(bands) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

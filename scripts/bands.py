"""Record the reference bands: train each configuration below with several seeds, one after another.

    python scripts/bands.py [NAME ...]     # a quarter of a minute a run, on one thread

Goes on where it was stopped. Writes llm_course/training/bands.json, in which `llm-course check-run`
looks runs up, and llm_course/pages/fresh_seeds.json, runs that no band has seen, on which chapter
20 tries the band. A run's curves differ a little between processors, by less than they differ
between seeds.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from llm_course.files import write_text
from llm_course.training import callbacks
from llm_course.training.bands import curve_settings, record_curves
from llm_course.training.config import Config
from llm_course.training.run import train_worker
from llm_course.training.sources import read_config

ROOT = Path(__file__).resolve().parent.parent
BANDS = ROOT / "llm_course" / "training" / "bands.json"
CONFIGURATIONS = ("small_stories",)
SEEDS = range(10)
FRESH = ROOT / "llm_course" / "pages" / "fresh_seeds.json"
FRESH_SEEDS = range(10, 16)


def quiet(config: Config, run_dir: str, seed: int) -> Config:
    """The same run in another folder, with another seed, and without what only a person needs."""
    training = replace(config.training, seed=seed)
    logging = replace(config.logging, progress=False, tensorboard=False, level="warning")
    return replace(config, run_dir=run_dir, training=training, logging=logging)


def curves(config: Config, seed: int) -> dict[str, Any]:
    """Train with this seed, and keep the curves."""
    with tempfile.TemporaryDirectory() as folder, patch.object(callbacks, "plot_losses"):
        result = train_worker(quiet(config, folder, seed))
        rows = callbacks.read_metrics(Path(folder, "metrics.jsonl"))
    print(f"seed {seed}: val_loss {result.metrics['val_loss']:.3f}", flush=True)
    return {"seed": seed} | record_curves(rows)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    has_changed = False
    bands = json.loads(BANDS.read_text(encoding="utf-8")) if BANDS.exists() else {}
    for name in names or CONFIGURATIONS:
        print(name)
        config = read_config(ROOT / "configs" / f"{name}.yaml")
        task, knobs = json.loads(json.dumps(curve_settings(config)))
        entry = bands.get(name, {})
        if (entry.get("task"), entry.get("knobs")) != (task, knobs):  # the file has changed
            entry = {"task": task, "knobs": knobs, "runs": []}
            has_changed = True
        bands[name] = entry
        recorded = {run["seed"] for run in entry["runs"]}
        for seed in SEEDS:
            if seed not in recorded:
                entry["runs"].append(curves(config, seed))
                write_text(BANDS, json.dumps(bands) + "\n")
    if has_changed or not FRESH.exists():
        config = read_config(ROOT / "configs" / f"{CONFIGURATIONS[0]}.yaml")
        write_text(FRESH, json.dumps([curves(config, seed) for seed in FRESH_SEEDS]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

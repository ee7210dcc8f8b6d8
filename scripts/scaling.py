"""Record the runs of chapter 22, in a quarter of an hour on one core: `make scaling`

    python scripts/scaling.py [FOLDER]     # where the runs go; default runs/

Makes the two sweeps, fits the law, writes down what it predicts for a run four times larger, and
only then trains that run. Goes on where it was stopped. Writes llm_course/pages/scaling_runs.json.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from llm_course.files import write_text
from llm_course.model.config import ModelConfig
from llm_course.model.estimate import count_parameters
from llm_course.pages.scaling import RECORD
from llm_course.training.callbacks import read_metrics
from llm_course.training.scaling import FLOPS_PER_PARAMETER, bootstrap_laws, fit_law, interval
from llm_course.training.sweep import Point, read_sweep, run_sweep

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
BUDGETS = (6e10, 1.5e11, 3.8e11)  # of the runs in configs/scaling.yaml
LARGER = 4  # the predicted run's compute, over that of the largest budget
SHAPES = {64: (3, 2), 96: (3, 3), 112: (4, 4), 128: (4, 4), 160: (4, 5)}  # width: layers, heads


def short(value: float) -> float:
    return float(f"{value:.5g}")


def size(shape: ModelConfig) -> int:
    return count_parameters(replace(shape, vocab_size=512)).total


def sweep(name: str, folder: Path) -> list[tuple[Point, dict[str, Any]]]:
    points = read_sweep(CONFIGS / f"{name}.yaml", folder / name)
    rows = run_sweep(points, folder / name, tell=print)
    return list(zip(points, rows, strict=True))


def measured(point: Point, row: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run that the law is fitted to."""
    N = size(point.config.model)
    D = row["targets"]
    budget = min(BUDGETS, key=lambda one: abs(one - FLOPS_PER_PARAMETER * N * D))
    width = point.config.model.hidden_size
    rows = read_metrics(Path(point.config.run_dir, "metrics.jsonl"))
    curve = [[each["targets"], short(each["loss"])] for each in rows]
    kept = {"width": width, "N": N, "D": D, "budget": budget, "loss": short(row["val_loss"])}
    return kept | {"curve": curve}


def prediction(runs: list[dict[str, Any]], floor: float) -> dict[str, Any]:
    """The largest run, and what two laws expect of it, before it's made."""
    columns = [[run[name] for run in runs] for name in ("N", "D", "loss")]
    budget = LARGER * max(BUDGETS)
    law = fit_law(*columns, floor=floor)
    shapes = [
        ModelConfig(
            hidden_size=width,
            num_layers=layers,
            num_heads=heads,
            qk_norm=True,
            tie_word_embeddings=True,
        )
        for width, (layers, heads) in SHAPES.items()
    ]
    wanted = np.log(law.best_size(budget)[0])
    chosen = min(shapes, key=lambda shape: abs(np.log(size(shape)) - wanted))
    N = size(chosen)
    steps = round(budget / FLOPS_PER_PARAMETER / N / 1024)
    found = {"width": chosen.hidden_size, "N": N, "D": 1024 * steps, "budget": budget}
    for name, known in (("free", None), ("fixed", floor)):
        laws = bootstrap_laws(*columns, floor=known)
        ends = interval([one.loss(N, found["D"]) for one in laws])
        middle = fit_law(*columns, floor=known).loss(N, found["D"])
        found[name] = [short(ends[0]), short(middle), short(ends[1])]
    return found


def largest_run(found: dict[str, Any], folder: Path) -> float:
    """Train the run that was predicted, and return its loss."""
    layers, heads = SHAPES[found["width"]]
    steps = found["D"] // 1024
    point = {
        "model": {"hidden_size": found["width"], "num_layers": layers, "num_heads": heads},
        "training": {"max_steps": steps},
        "optimization": {
            "learning_rate": float(f"{0.02 * (32 / found['width']) ** 0.5:.3g}"),
            "warmup_steps": steps // 10,
        },
    }
    base = yaml.safe_load((CONFIGS / "scaling.yaml").read_text(encoding="utf-8"))["base"]
    file = folder / "largest.yaml"
    write_text(file, yaml.safe_dump({"base": base, "points": [point]}))
    [row] = run_sweep(read_sweep(file, folder / "scaling"), folder / "scaling", tell=print)
    return short(row["val_loss"])


def transferred(point: Point, row: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run that looks for a learning rate."""
    config = point.config
    return {
        "task": "muP" if config.task.endswith("MuPTask") else "standard",
        "optimizer": config.optimization.optimizer,
        "width": config.model.hidden_size,
        "rate": config.optimization.learning_rate,
        "loss": short(row["val_loss"]) if "val_loss" in row else None,
    }


def main(folder: Path) -> None:
    pairs = sweep("scaling", folder)
    runs = [measured(point, row) for point, row in pairs]
    floor = short(pairs[0][1]["val_loss"] - pairs[0][1]["val_excess"])
    stored: dict[str, Any] = {"floor": floor, "scaling": runs}
    stored["prediction"] = prediction(runs, floor)
    write_text(RECORD, json.dumps(stored) + "\n")
    stored["prediction"]["measured"] = largest_run(stored["prediction"], folder)
    write_text(RECORD, json.dumps(stored) + "\n")
    stored["transfer"] = [transferred(point, row) for point, row in sweep("transfer", folder)]
    write_text(RECORD, json.dumps(stored) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))

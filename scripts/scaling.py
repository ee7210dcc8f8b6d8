"""Record the runs of chapter 22, in three quarters of an hour on one core: `make scaling`

    python scripts/scaling.py [FOLDER]     # where the runs go; default runs/

Makes the runs of the law, writes down what it predicts for a run four times larger, and only then
trains that run, with three seeds; then the two sweeps over batch sizes and over learning rates.
Goes on where it was stopped. Writes llm_course/pages/scaling_runs.json after each stage.
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
from llm_course.pages.scaling import RECORD, as_runs
from llm_course.training.callbacks import read_metrics
from llm_course.training.folder import continuation, load_run
from llm_course.training.scaling import FLOPS_PER_PARAMETER, bootstrap_laws, fit_law, interval
from llm_course.training.sweep import Point, read_sweep, run_sweep

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
BUDGETS = (6e10, 1.5e11, 3.8e11, 1e12)  # of the runs in configs/scaling.yaml
LARGER = 4  # the predicted run's compute, over that of the largest budget
# width: layers, heads. All are large enough to read no text twice with that compute.
SHAPES = {64: (3, 2), 96: (3, 3), 112: (4, 4), 128: (4, 4)}
PROMPT = "Once upon a time there was a little"

Record = dict[str, Any]


def short(value: float) -> float:
    return float(f"{value:.5g}")


def size(shape: ModelConfig) -> int:
    return count_parameters(replace(shape, vocab_size=512)).total


def sweep(name: str, folder: Path) -> list[tuple[Point, Record]]:
    points = read_sweep(CONFIGS / f"{name}.yaml", folder / name)
    rows = run_sweep(points, folder / name, tell=print)
    return list(zip(points, rows, strict=True))


def curve(point: Point, position: str) -> list[list[float]]:
    """The training loss over `position`, a column of the run's metrics."""
    rows = read_metrics(Path(point.config.run_dir, "metrics.jsonl"))
    return [[row[position], short(row["loss"])] for row in rows]


def sample(run_dir: str | Path) -> str:
    """How a run's model continues the prompt with its likeliest tokens."""
    model, tokenizer = load_run(run_dir)
    pieces = continuation(model, tokenizer, PROMPT, seed=0, temperature=0.0, max_new_tokens=40)
    return PROMPT + "".join(pieces)


# ------------------------------------------------------------------------------ the stages


def law_runs(stored: Record, folder: Path) -> None:
    """The runs that the law is fitted to."""
    pairs = sweep("scaling", folder)
    _, first = pairs[0]
    stored["floor"] = short(first["val_loss"] - first["val_excess"])
    stored["scaling"] = [law_run(point, row) for point, row in pairs]


def law_run(point: Point, row: Record) -> Record:
    config = point.config
    N = size(config.model)
    D = row["targets"]
    return {
        "width": config.model.hidden_size,
        "seed": config.training.seed,
        "N": N,
        "D": D,
        "budget": min(BUDGETS, key=lambda one: abs(one - FLOPS_PER_PARAMETER * N * D)),
        "loss": short(row["val_loss"]),
        "sample": sample(config.run_dir),
        "curve": curve(point, "targets"),
    }


def prediction(stored: Record, folder: Path) -> None:
    """The largest run, and what two laws expect of it, before it's made."""
    runs = as_runs(stored["scaling"])
    columns = runs.N, runs.D, runs.loss
    budget = LARGER * max(BUDGETS)
    wanted = np.log(fit_law(*columns, floor=stored["floor"]).best_size(budget)[0])
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
    chosen = min(shapes, key=lambda shape: abs(np.log(size(shape)) - wanted))
    N = size(chosen)
    steps = round(budget / FLOPS_PER_PARAMETER / N / 1024)
    found: Record = {"width": chosen.hidden_size, "N": N, "D": 1024 * steps, "budget": budget}
    for name, known in (("free", None), ("fixed", stored["floor"])):
        laws = bootstrap_laws(*columns, floor=known)
        low, high = interval([one.loss(N, found["D"]) for one in laws])
        middle = fit_law(*columns, floor=known).loss(N, found["D"])
        found[name] = [short(low), short(middle), short(high)]
    stored["prediction"] = found


def largest_run(stored: Record, folder: Path) -> None:
    """Train the run that was predicted, and twice more with other seeds."""
    found = stored["prediction"]
    layers, heads = SHAPES[found["width"]]
    steps = found["D"] // 1024
    points = [
        {
            "model": {"hidden_size": found["width"], "num_layers": layers, "num_heads": heads},
            "training": {"max_steps": steps, "seed": seed},
            "optimization": {
                "learning_rate": float(f"{0.02 * (32 / found['width']) ** 0.5:.3g}"),
                "warmup_steps": steps // 10,
            },
        }
        for seed in range(3)
    ]
    base = yaml.safe_load((CONFIGS / "scaling.yaml").read_text(encoding="utf-8"))["base"]
    file = folder / "largest.yaml"
    write_text(file, yaml.safe_dump({"base": base, "points": points}))
    runs = read_sweep(file, folder / "scaling")
    rows = run_sweep(runs, folder / "scaling", tell=print)
    found["measured"], *found["other_seeds"] = [short(row["val_loss"]) for row in rows]
    found["sample"] = sample(runs[0].config.run_dir)


def batches(stored: Record, folder: Path) -> None:
    """Curves for several sizes of a batch."""
    stored["batches"] = [
        {
            "tokens": point.config.training.batch_size * point.config.data.sequence_length,
            "rate": point.config.optimization.learning_rate,
            "curve": curve(point, "step"),
        }
        for point, _ in sweep("batches", folder)
    ]


def transfer(stored: Record, folder: Path) -> None:
    """Losses over the learning rate at several widths."""
    stored["transfer"] = [
        {
            "task": "muP" if point.config.task.endswith("MuPTask") else "standard",
            "optimizer": point.config.optimization.optimizer,
            "width": point.config.model.hidden_size,
            "rate": point.config.optimization.learning_rate,
            "loss": short(row["val_loss"]) if "val_loss" in row else None,
        }
        for point, row in sweep("transfer", folder)
    ]


STAGES = (law_runs, prediction, largest_run, batches, transfer)


def main(folder: Path) -> None:
    stored = json.loads(RECORD.read_text(encoding="utf-8"))
    for stage in STAGES:
        stage(stored, folder)
        write_text(RECORD, json.dumps(stored) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))

"""Record the larger runs of page 22e, in twenty minutes of a GPU and 16 cores.

    python scripts/larger_runs.py FOLDER [--stages texts,again,law_cpu,law_auto,sizes,...]

The stages can also be named: `texts` writes and tokenizes the stories, `again` repeats a run of
configs/scaling.yaml to measure it, `law_cpu` and `law_auto` make such runs with up to 64 times
their compute, and `sizes` trains three models on hard stories and measures them. `pushed` trains
these three with more weight on the things, and `longer` two of them on three times as many tokens.
FOLDER holds the runs; those that are finished aren't made again. When all are there, it writes
llm_course/pages/larger_runs.json, or the file named by --record.

The stage `things` needs none of the others, and no GPU: it trains the storyteller on, with more
weight on the things of its stories, and writes llm_course/pages/weighed_things.json.
"""

import argparse
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import yaml

from llm_course.files import write_text
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import count_parameters
from llm_course.pages.larger import (
    RECORD,
    SPLITS,
    WEIGHED,
    PreparedTask,
    Share,
    WeighedTask,
    pieces_of,
    shares_by_kind,
)
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import (
    is_held_out,
    read_story,
    split_stories,
    story_documents,
    write_story,
)
from llm_course.text.tokenization import BaseTokenizer, BPETokenizer, load_tokenizer
from llm_course.text.wording import COLOURS, THINGS
from llm_course.text.wording import SIZES as LOOKS
from llm_course.training.callbacks import read_metrics
from llm_course.training.config import OptimizationConfig
from llm_course.training.evaluation import bootstrap, compare
from llm_course.training.evaluation_tasks import TASKS, build_task
from llm_course.training.folder import continuation, load_run
from llm_course.training.optim import build_optimizer, build_schedule
from llm_course.training.scaling import FLOPS_PER_PARAMETER
from llm_course.training.scoring import Scorer
from llm_course.training.sweep import Point, read_sweep, run_sweep

Record = dict[str, Any]

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TOKENS_PER_STEP = 1024  # of a run of the law, as in configs/scaling.yaml
# stage: budget: for each shape, (width, layers, heads), the number of seeds
Shape = tuple[int, int, int]
LAW: dict[str, dict[float, dict[Shape, int]]] = {
    "law_auto": {  # on the GPU, where there is one
        6.4e13: {(112, 4, 4): 1, (128, 4, 4): 1, (160, 4, 5): 1, (192, 4, 6): 1},
        1.6e13: {(80, 3, 2): 1, (96, 3, 3): 1, (112, 4, 4): 2, (128, 4, 4): 1, (160, 4, 5): 1},
        4e12: {(64, 3, 2): 1},  # the same as one on the CPU
    },
    "law_cpu": {  # as the runs that the first law was fitted to
        4e12: {(64, 2, 2): 1, (64, 3, 2): 3, (80, 3, 2): 3, (96, 3, 3): 1, (112, 4, 4): 1},
    },
    "again": {1e12: {(48, 2, 2): 1}},  # the best of the first law's largest budget
}
DEVICES = {"law_auto": "auto", "law_cpu": "cpu", "again": "cpu"}
BUDGETS = sorted({budget for budgets in LAW.values() for budget in budgets})
SIZES = {"small": (192, 6, 3), "medium": (320, 8, 5), "large": (512, 9, 8)}
LEVEL = "hard"  # of the stories that the three sizes read
PROMPT = "Once upon a time"


def short(value: float) -> float:
    return float(f"{value:.5g}")


def model_settings(shape: Shape) -> Record:
    return dict(zip(("hidden_size", "num_layers", "num_heads"), shape, strict=True))


# ------------------------------------------------------------------------------ the texts


class Text(NamedTuple):
    """Stories, and how they are prepared."""

    level: str
    vocab_size: int
    val_fraction: float
    num_stories: int


TEXTS = {
    "easy": Text("easy", 512, 0.05, 65_000),
    LEVEL: Text(LEVEL, 1536, 0.005, 74_000),
    "longer": Text(LEVEL, 1536, 0.005, 155_000),  # begins like the one before
}
CHUNK = 250  # stories that a process writes at a time


def write_texts(folder: Path, processes: int) -> None:
    """The tokens of the texts, each in a folder; of every text 9 MB make its tokenizer."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for name, text in TEXTS.items():
            few = story_documents(text.level, num_bytes=9_000_000)
            train, _ = split_stories(few, val_fraction=text.val_fraction)
            place = folder / name
            BPETokenizer.train(train, vocab_size=text.vocab_size).save(place)
            starts = range(0, text.num_stories, CHUNK)
            chunks = pool.map(partial(write_chunk, text, place), starts)
            for split, ids in zip(SPLITS, zip(*chunks, strict=True), strict=True):
                np.save(place / f"{split}.npy", np.concatenate(ids))


def write_chunk(text: Text, place: Path, start: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of some stories, each with a separator behind it: for training and validation."""
    tokenizer = load_tokenizer(place)
    sides: tuple[list[int], list[int]] = ([], [])
    for index in range(start, start + CHUNK):
        story = write_story(text.level, index=index)
        ids = sides[is_held_out(story, text.val_fraction)]
        ids += [*tokenizer.encode(story, allow_special=False), tokenizer.eos_token_id]
    return np.array(sides[0], np.uint16), np.array(sides[1], np.uint16)


# ------------------------------------------------------------------------------ the law


def law_points(folder: Path, stage: str) -> list[Point]:
    """The runs of a stage of `LAW`, by the rules of configs/scaling.yaml."""
    base = yaml.safe_load((CONFIGS / "scaling.yaml").read_text(encoding="utf-8"))["base"]
    base["task"] = "llm_course.pages.larger:PreparedTask"
    base["data"] |= {"tokenizer": str(folder / "easy")}
    base["checkpoint"]["save_interval"] = 1_000_000
    base["training"]["device"] = DEVICES[stage]
    points = []
    for budget, shapes in LAW[stage].items():
        for shape, seeds in shapes.items():
            settings = model_settings(shape)
            wanted = budget / FLOPS_PER_PARAMETER / parameters(ModelConfig(**settings), base)
            steps = round(wanted / TOKENS_PER_STEP)
            rate = float(f"{0.02 * (32 / shape[0]) ** 0.5:.3g}")
            points += [
                {
                    "model": settings,
                    "training": {"max_steps": steps, "seed": seed},
                    "optimization": {"learning_rate": rate, "warmup_steps": steps // 10},
                    "logging": {"log_interval": max(1, steps // 40)},
                }
                for seed in range(seeds)
            ]
    return sweep_of(base, points, folder / stage)


def parameters(shape: ModelConfig, base: Record) -> int:
    vocab_size = base["data"]["vocab_size"]
    return count_parameters(replace(shape, **base["model"], vocab_size=vocab_size)).total


def sweep_of(base: Record, points: list[Record], folder: Path) -> list[Point]:
    file = folder.with_suffix(".yaml")
    base["logging"].pop("log_interval", None)
    write_text(file, yaml.safe_dump({"base": base, "points": points}))
    return read_sweep(file, folder)


def law_record(point: Point, row: Record) -> Record:
    config = point.config
    N = count_parameters(replace(config.model, vocab_size=512)).total
    D = row["targets"]
    operations = FLOPS_PER_PARAMETER * N * D
    return {
        "width": config.model.hidden_size,
        "seed": config.training.seed,
        "device": config.training.device,
        "N": N,
        "D": D,
        "budget": min(BUDGETS, key=lambda one: abs(math.log(one / operations))),
        "loss": short(row["val_loss"]),
        "floor": short(row["val_loss"] - row["val_excess"]),
    }


def train_law(folder: Path, stage: str, workers: int) -> None:
    run_sweep(law_points(folder, stage), folder / stage, workers=workers, tell=tell)


def repeated(folder: Path) -> Record:
    """The run that was made again, and where its loss comes from."""
    [(point, row)] = finished(law_points(folder, "again"), folder / "again")
    run_dir = point.config.run_dir
    shutil.copy(folder / "easy" / "tokenizer.json", run_dir)
    texts = [write_story("easy", seed=2222, index=index) for index in range(60)]
    shares = shares_by_kind(*load_run(run_dir), texts, "easy")
    return law_record(point, row) | {"shares": as_rows(shares)}


def as_rows(shares: Mapping[str, Share]) -> dict[str, list[float]]:
    return {kind: [short(one) for one in share] for kind, share in shares.items()}


def tell(line: str) -> None:
    print(line, flush=True)


# ------------------------------------------------------------------------------ three sizes

# bits a token: a noun alone half of the time, or with a colour, or with a size and a colour
HAT = (
    math.log2(len(THINGS))
    + 0.5 * 1
    + 0.5 * 2
    + 0.5 * math.log2(len(COLOURS))
    + 0.25 * math.log2(len(LOOKS))
) / 1.75


class Sizes(NamedTuple):
    """Runs of some of `SIZES` on hard stories, the same but for their size."""

    names: Sequence[str]
    text: str  # of TEXTS
    steps: int
    evaluations: int
    task: str = "PreparedTask"  # of llm_course.pages.larger


SIZE_RUNS = {
    "sizes": Sizes(tuple(SIZES), LEVEL, 1500, 10),
    "longer": Sizes(("small", "large"), "longer", 4500, 15),
    "pushed": Sizes(tuple(SIZES), LEVEL, 1500, 10, "WeighedTask"),
}


def size_points(folder: Path, stage: str) -> list[Point]:
    names, text, steps, evaluations, task = SIZE_RUNS[stage]
    base: Record = {
        "task": f"llm_course.pages.larger:{task}",
        "model": {"qk_norm": True, "tie_word_embeddings": True, "max_position_embeddings": 2048},
        "data": {
            "corpus": "stories",
            "stories": {"level": LEVEL},
            "tokenizer": str(folder / text),
            "sequence_length": 2048,
        },
        "training": {
            "batch_size": 16,
            "max_steps": steps,
            "eval_interval": max(1, steps // evaluations),
            "precision": "bf16",
            "compile": True,
        },
        "optimization": {
            "optimizer": "muon",
            "schedule": "linear",
            "warmup_steps": steps // 20,
            "min_lr_ratio": 0.0,
        },
        "checkpoint": {"save_interval": 1_000_000, "keep_last": 1},
        "logging": {},
    }
    points = [
        {
            "model": model_settings(SIZES[name]),
            "optimization": {"learning_rate": float(f"{0.01 * (256 / SIZES[name][0]) ** 0.5:.3g}")},
            "logging": {"log_interval": max(1, steps // 40)},
        }
        for name in reversed(names)
    ]
    return sweep_of(base, points, folder / stage)


def measure(run_dir: str, questions: int) -> Record:
    """What a model knows: each task, its distance to the entropy, and a story."""
    model, tokenizer = load_run(run_dir)
    if torch.cuda.is_available():
        model = model.cuda()
    found: Record = {"tasks": {}, "by_kind": {}}
    scorer = Scorer(model, tokenizer)
    for name in TASKS:
        result = build_task(name, level=LEVEL, num=questions).measure(scorer)
        found["tasks"][name] = {key: rounded(one) for key, one in result.metrics.items()}
        found["by_kind"][name] = {key: rounded(one) for key, one in result.by_kind.items()}
        if name == "bits_per_byte":
            texts = build_task(name, level=LEVEL, num=questions).texts  # type: ignore[attr-defined]
            best = [read_story(text, LEVEL).bits / len(text) for text in texts]
            found["entropy"] = rounded(bootstrap(best))
            found["above"] = rounded(compare(best, result.scores).difference)
        else:
            found.setdefault("marks", {})[name] = [int(mark) for mark in result.scores]
    held_out = [write_story(LEVEL, seed=2222, index=index) for index in range(questions // 2)]
    shares = shares_by_kind(model, tokenizer, held_out, LEVEL)
    found["shares"] = as_rows(shares)
    pieces = continuation(model, tokenizer, PROMPT, seed=0, temperature=1.0, max_new_tokens=500)
    found["sample"] = PROMPT + "".join(pieces)
    return found


def rounded(interval: Any) -> list[float | None]:
    return [None if math.isnan(one) else short(one) for one in interval]


def train_sizes(folder: Path, stage: str, questions: int) -> None:
    points = size_points(folder, stage)
    run_sweep(points, folder / stage, workers=len(points), tell=tell)
    for point in points:
        shutil.copy(folder / LEVEL / "tokenizer.json", point.config.run_dir)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(len(points), spawn) as pool:
        runs = [point.config.run_dir for point in points]
        for point, found in zip(
            points, pool.map(measure, runs, [questions] * len(runs)), strict=True
        ):
            write_text(Path(point.config.run_dir, "measured.json"), json.dumps(found))


def size_record(point: Point, row: Record) -> Record:
    config = point.config
    rows = read_metrics(Path(config.run_dir, "metrics.jsonl"))
    tokens = config.training.batch_size * config.data.sequence_length  # in a step
    measured = Path(config.run_dir, "measured.json")
    return {
        "width": config.model.hidden_size,
        "N": count_parameters(replace(config.model, vocab_size=1536)).total,
        "D": config.training.max_steps * tokens,
        "loss": short(row["val_loss"]),
        "excess": short(row["val_excess"]),
        "curve": [[one["step"] * tokens, short(one["loss"])] for one in rows if "loss" in one],
        "held_out": [
            [one["step"] * tokens, short(one["val_loss"]), short(one["val_excess"])]
            for one in rows
            if "val_loss" in one
        ],
        **(json.loads(measured.read_text(encoding="utf-8")) if measured.is_file() else {}),
    }


# ------------------------------------------------------------------------------ the things

WEIGHTS = (1, 30)  # of a token that belongs to a thing, in the loss of a run
RATE = OptimizationConfig(
    optimizer="muon", learning_rate=5e-3, schedule="linear", warmup_steps=30, min_lr_ratio=0.0
)
THING_STEPS = 700
STORIES = 8  # in a step
LONGEST = 320  # tokens of a story


def learn_things(weight: float) -> list[list[float]]:
    """Train the storyteller on: every 50 steps, its distance to the entropy, in bits per byte, for
    the things and for everything else.
    """
    torch.set_num_threads(1)
    model, tokenizer = load_storyteller()
    model.train().requires_grad_(True)
    optimizer = build_optimizer(model, RATE)
    schedule = build_schedule(optimizer, RATE, max_steps=THING_STEPS)
    texts = [write_story("easy", seed=2222, index=index) for index in range(40)]
    rows = []
    for step in range(THING_STEPS + 1):
        if step % 50 == 0:
            shares = shares_by_kind(model, tokenizer, texts, "easy")
            above = {kind: share.above for kind, share in shares.items()}
            rows.append([step, short(above.pop("thing")), short(sum(above.values()))])
            tell(f"weight {weight}: {rows[-1]}")
        if step < THING_STEPS:
            indices = range(step * STORIES, (step + 1) * STORIES)
            stories = [write_story("easy", seed=3, index=index) for index in indices]
            weighed_loss(model, tokenizer, stories, weight).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return rows


def weighed_loss(
    model: DecoderModel, tokenizer: BaseTokenizer, stories: Sequence[str], weight: float
) -> torch.Tensor:
    """The mean loss of some stories' beginnings, in which a token of a thing counts `weight`."""
    ids = torch.full((len(stories), LONGEST + 1), tokenizer.eos_token_id)
    weights = torch.zeros(len(stories), LONGEST)
    for row, story in enumerate(stories):
        pieces = list(islice(pieces_of(tokenizer, story, "easy"), LONGEST))
        ids[row, 1 : len(pieces) + 1] = torch.tensor([piece.token for piece in pieces])
        marks = [weight if piece.kind == "thing" else 1.0 for piece in pieces]
        weights[row, : len(pieces)] = torch.tensor(marks)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1]).logits
    losses = F.cross_entropy(logits.float().mT, ids[:, 1:], reduction="none")
    return (losses * weights).sum() / weights.sum()


def weigh_things() -> None:
    with ProcessPoolExecutor(len(WEIGHTS), get_context("spawn")) as pool:
        found = dict(zip(map(str, WEIGHTS), pool.map(learn_things, WEIGHTS), strict=True))
    write_text(WEIGHED, json.dumps(found) + "\n")


# ------------------------------------------------------------------------------ the record


def price_of_a_hat(folder: Path) -> float:
    """What drawing each thing out of a hat costs on the held-out hard stories, in nats per token
    above their information: no model that does so can be closer to the floor.
    """
    [point, *_] = size_points(folder, "sizes")
    data = PreparedTask(point.config).build_data()
    data.setup()
    excess = 0.0
    for row, document in zip(data.val_dataset.rows, data.val_dataset.documents, strict=True):
        story = data.tokenizer.decode(document.tolist())
        pieces = islice(pieces_of(data.tokenizer, story, LEVEL), len(row) - 1)
        excess += sum(HAT - piece.bits for piece in pieces if piece.kind == "thing")
    return short(excess * math.log(2) / data.val_dataset.rows[:, 1:].size)


def weighed_prices(folder: Path, num_stories: int = 250) -> dict[str, float]:
    """What a model that draws each thing out of a hat and knows everything else pays in the mean
    that `WeighedTask` trains on, and the information in it, in nats.
    """
    [point, *_] = size_points(folder, "pushed")
    task = WeighedTask(point.config)
    task.build_data()
    tokenizer = load_tokenizer(folder / LEVEL)
    hat = floor = total = 0.0
    for index in range(num_stories):
        pieces = [*pieces_of(tokenizer, write_story(LEVEL, index=index), LEVEL)]
        labels = torch.tensor([[piece.token for piece in pieces]])
        weights = task.weights(labels)[0].tolist()
        for piece, weight in zip(pieces, weights, strict=True):
            hat += weight * (HAT if piece.kind == "thing" else piece.bits)
            floor += weight * piece.bits
        total += sum(weights) + 1  # the separator
    nats = math.log(2) / total
    return {"hat_weighed": short(hat * nats), "floor_weighed": short(floor * nats)}


def finished(points: list[Point], folder: Path) -> list[tuple[Point, Record]]:
    """The points that have a row already."""
    file = folder / "results.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    return [(point, rows[point.name]) for point in points if point.name in rows]


def record(folder: Path) -> Record:
    """All that is known so far."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "law": [
            law_record(*one)
            for stage in ("law_auto", "law_cpu")
            for one in finished(law_points(folder, stage), folder / stage)
        ],
        "again": repeated(folder),
        "hat": price_of_a_hat(folder),
        **weighed_prices(folder),
        **{
            stage: [
                size_record(*one) for one in finished(size_points(folder, stage), folder / stage)
            ]
            for stage in SIZE_RUNS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", default=",".join(("texts", *LAW, *SIZE_RUNS)))
    parser.add_argument("--workers", type=int, default=12, help="processes at a time")
    parser.add_argument("--questions", type=int, default=250, help="in each task")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    folder = options.folder.resolve()
    stages = {
        "texts": lambda: write_texts(folder, options.workers),
        **{name: partial(train_law, folder, name, options.workers) for name in LAW},
        **{name: partial(train_sizes, folder, name, options.questions) for name in SIZE_RUNS},
        "things": weigh_things,
    }
    for stage in options.stages.split(","):
        stages[stage]()
    if all((folder / name / "results.jsonl").is_file() for name in (*LAW, *SIZE_RUNS)):
        write_text(options.record, json.dumps(record(folder)) + "\n")


if __name__ == "__main__":
    main()

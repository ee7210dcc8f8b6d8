"""Record the runs of page 22f, in 55 minutes on two cores: python scripts/phrases.py FOLDER

Makes the runs of configs/phrases.yaml in FOLDER, measures them by kind of word, lets each tell a
story, and writes llm_course/pages/phrases_runs.json. Goes on where it was stopped.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_course.files import write_text
from llm_course.model.estimate import count_parameters
from llm_course.pages.larger import shares_by_kind
from llm_course.pages.phrases import RECORD, ApartTask, PushTask
from llm_course.text.stories import write_story
from llm_course.training.callbacks import read_metrics
from llm_course.training.folder import continuation, load_run
from llm_course.training.sweep import Point, read_sweep, run_sweep

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "phrases.yaml"
PROMPT = "Once upon a time there was a"


def short(value: float) -> float:
    return float(f"{value:.5g}")


def recorded(point: Point, row: dict[str, Any]) -> dict[str, Any]:
    config = point.config
    model, tokenizer = load_run(config.run_dir)
    texts = [write_story("easy", seed=2222, index=index) for index in range(100)]
    shares = shares_by_kind(model, tokenizer, texts, "easy")
    rows = read_metrics(Path(config.run_dir, "metrics.jsonl"))
    pieces = continuation(model, tokenizer, PROMPT, seed=0, temperature=1.0, max_new_tokens=400)
    return {
        "tokenizer": config.data.tokenizer,
        "is_pushed": config.task.endswith((PushTask.__name__, ApartTask.__name__)),
        "is_apart": config.task.endswith(ApartTask.__name__),
        "width": config.model.hidden_size,
        "N": count_parameters(replace(config.model, vocab_size=tokenizer.vocab_size)).total,
        "steps": row["step"],
        "tokens": row["step"] * config.training.batch_size * config.data.sequence_length,
        "bytes_per_token": short(
            sum(map(len, texts)) / sum(len(tokenizer.encode(text)) for text in texts)
        ),
        "seconds": short(row["seconds"]),
        "val_loss": short(row["val_loss"]),
        "bits_per_byte": short(row["val_bits_per_byte"]),
        "above": short(row["val_above"]),
        "curve": [[one["step"], short(one["val_above"])] for one in rows if "val_above" in one],
        "shares": {kind: [short(one) for one in share] for kind, share in shares.items()},
        "sample": PROMPT + "".join(pieces),
    }


def main(folder: str) -> None:
    points = read_sweep(CONFIG, folder)
    rows = run_sweep(points, folder, workers=2, tell=print)
    found = [recorded(point, row) for point, row in zip(points, rows, strict=True)]
    write_text(RECORD, json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

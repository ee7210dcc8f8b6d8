"""Faults that are put into a run on purpose, to see whether `llm-course check-run` names them.

    python -m tests.faults [KIND ...]        # all of them take a few minutes

Each fault is a mistake that people make, in the data, the code or the settings. It's injected while
the run trains, and the run's folder doesn't say so: the diagnosis gets the folder alone. What it
looked at is written to llm_course/pages/faults.json, from which chapter 20 draws, and which
tests/test_check_run.py diagnoses again.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.optim.lr_scheduler import LambdaLR

from llm_course.files import write_text
from llm_course.model import attention
from llm_course.model.decoder import DecoderModel
from llm_course.pages.pretraining import FAULTS as RECORDS
from llm_course.pages.pretraining import to_record, with_knobs
from llm_course.text.batches import IGNORE_INDEX, PackedDataset, ResumableBatchSampler
from llm_course.text.data import TextRecipe
from llm_course.text.tokenization import BPETokenizer
from llm_course.training import callbacks
from llm_course.training.config import Config
from llm_course.training.diagnosis import Evidence, diagnose, read_evidence
from llm_course.training.folder import continuation, load_run
from llm_course.training.run import train_worker
from llm_course.training.sources import read_config
from llm_course.training.task import LanguageModelingTask
from llm_course.training.window import GradientWindow

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "small_stories.yaml"
SEED = 20  # not one of the band's


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Replace a function by `change(original, *arguments)`."""
    original = getattr(owner, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        return change(original, *arguments, **options)

    return patch.object(owner, name, changed)


def change_batches(change: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
    """Change each batch of text, of training and validation, on its way to the model."""

    def batches(original: Any, dataset: PackedDataset, indices: list[int]) -> Any:
        batch = original(dataset, indices)
        change(batch)
        return batch

    return wrap(PackedDataset, "__getitems__", batches)


# ------------------------------------------------------------------------------------ the data


def shifted_twice() -> Any:
    """The data shifts the labels, and so does the loss: position t learns token t + 2."""

    def shift(batch: dict[str, torch.Tensor]) -> None:
        labels = batch["labels"].roll(-1, dims=1)
        labels[:, -1] = IGNORE_INDEX
        batch["labels"] = labels

    return change_batches(shift)


def not_shifted() -> Any:
    """Nobody shifts the labels: position t learns to repeat token t."""
    return change_batches(lambda batch: batch.update(labels=batch["input_ids"].clone()))


def masked_half() -> Any:
    """Half of the labels are ignored, as if they were a prompt."""

    def mask(batch: dict[str, torch.Tensor]) -> None:
        batch["labels"][:, : batch["labels"].shape[1] // 2] = IGNORE_INDEX

    return change_batches(mask)


def tokens_out_of_order() -> Any:
    """The tokens of each row are shuffled before they are shifted."""

    def shuffle(batch: dict[str, torch.Tensor]) -> None:
        B, T = batch["input_ids"].shape
        rows = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1)
        order = torch.rand(B, T + 1).argsort(dim=1)
        rows = rows.gather(1, order)
        batch["input_ids"] = rows[:, :-1]
        batch["labels"] = rows[:, 1:]

    return change_batches(shuffle)


def same_batch() -> Any:
    """The sampler gives the same few rows again and again."""

    def repeat(original: Any, sampler: ResumableBatchSampler) -> Iterator[list[int]]:
        batches = list(original(sampler))
        return iter(batches[:1] * len(batches))

    return wrap(ResumableBatchSampler, "__iter__", repeat)


def leak() -> Any:
    """The validation documents are in the training text, too."""

    def split(original: Any, recipe: TextRecipe, corpus: Any) -> Any:
        train, val = original(recipe, corpus)
        return train + val, val

    return wrap(TextRecipe, "split", split)


def slow_data() -> Any:
    """A batch takes as long to load as a step takes to compute."""
    last = time.perf_counter()

    def wait(batch: dict[str, torch.Tensor]) -> None:
        nonlocal last
        time.sleep(min(time.perf_counter() - last, 3.0))
        last = time.perf_counter()

    return change_batches(wait)


# ------------------------------------------------------------------------------------ the code


def sees_the_future() -> Any:
    """Attention has no causal mask."""
    return wrap(
        attention,
        "_attend",
        lambda original, q, k, v, mask, is_causal, **o: original(q, k, v, mask, False, **o),
    )


def loss_in_bits() -> Any:
    """The loss is multiplied by a constant, as where somebody reports bits for nats."""

    def scale(original: Any, *arguments: Any) -> Any:
        output = original(*arguments)
        return output._replace(loss_sum=output.loss_sum / 0.6931)

    both = ExitStack()
    for name in ("train_step", "validation_step"):
        both.enter_context(wrap(LanguageModelingTask, name, scale))
    return both


def gradient_of_the_sum() -> Any:
    """The gradient is that of the summed loss, and nobody divides it by the targets."""

    def sum_up(original: Any, window: GradientWindow, num_targets: torch.Tensor) -> Any:
        return original(window, torch.ones_like(num_targets))

    return wrap(GradientWindow, "mean_and_clip", sum_up)


def frozen_block() -> Any:
    """One block is left out of training, as in a fine-tuning script that was copied."""

    def freeze(original: Any, task: LanguageModelingTask, module: Any) -> DecoderModel:
        model = original(task, module)
        model.layers[1].requires_grad_(False)
        return model

    return wrap(LanguageModelingTask, "build_model", freeze)


def schedule_never_steps() -> Any:
    """Nobody calls scheduler.step(), so the rate stays at the first step of the warmup."""

    def stay(original: Any, scheduler: LambdaLR, *arguments: Any) -> None:
        if not hasattr(scheduler, "_last_lr"):  # the call in its constructor
            original(scheduler, *arguments)

    return wrap(LambdaLR, "step", stay)


def validates_in_training_mode() -> Any:
    """Nobody calls model.eval() before a validation, so dropout is on."""
    return patch.object(DecoderModel, "eval", lambda model: model)


# ------------------------------------------------------------------------------------ the whole


def exchange_tokenizer(run_dir: Path) -> None:
    """Somebody copies another run's tokenizer.json over this one's."""
    BPETokenizer.train(["the wrong text"] * 9, vocab_size=270).save(run_dir)


class Fault(NamedTuple):
    """A mistake, and the cause that a diagnosis should name first."""

    cause: str | None  # None: nothing is wrong
    inject: Callable[[], AbstractContextManager[Any]] = nullcontext
    knobs: dict[str, Any] = {}  # settings that are changed, by their path
    afterwards: Callable[[Path], None] | None = None


RATE = "optimization.learning_rate"
FAULTS = {
    "healthy": Fault(None),
    "labels shifted twice": Fault("shifted labels", shifted_twice),
    "labels not shifted": Fault("shifted labels", not_shifted),
    "half of the labels masked": Fault("masked targets", masked_half),
    "tokens out of order": Fault("no context", tokens_out_of_order),
    "the same batch again": Fault("repeated batch", same_batch),
    "validation text in training": Fault("leak", leak),
    "slow data": Fault("waits for data", slow_data),
    "another tokenizer": Fault("tokenizer", afterwards=exchange_tokenizer),
    "no causal mask": Fault("sees the future", sees_the_future),
    "loss in another unit": Fault("loss scale", loss_in_bits),
    "gradient of the sum": Fault("gradient scale", gradient_of_the_sum),
    "a frozen block": Fault("frozen", frozen_block),
    "the schedule never steps": Fault("schedule", schedule_never_steps),
    "validation in training mode": Fault(
        "validates in training mode", validates_in_training_mode, {"model.dropout": 0.1}
    ),
    "ten times the rate": Fault("learning rate too high", knobs={RATE: 0.1}),
    "a tenth of the rate": Fault("learning rate too low", knobs={RATE: 0.001}),
    "no warmup": Fault("no warmup", knobs={"optimization.warmup_steps": 0}),
    "much dropout": Fault("dropout", knobs={"model.dropout": 0.5}),
}


# ------------------------------------------------------------------------------------ runs


def small_config(run_dir: str, *, seed: int, max_steps: int | None = None) -> Config:
    """The configuration whose band is used, without what only a person needs."""
    config = read_config(CONFIG)
    training = replace(config.training, seed=seed)
    if max_steps is not None:
        training = replace(training, max_steps=max_steps)
    logging = replace(config.logging, progress=False, tensorboard=False, level="warning")
    return replace(config, run_dir=run_dir, training=training, logging=logging)


def train_with(fault: Fault, config: Config) -> Evidence:
    """Train with the fault, and collect what the folder says once it's over."""
    # the picture of the losses costs more than some steps do
    with fault.inject(), patch.object(callbacks, "plot_losses"):
        train_worker(with_knobs(config, fault.knobs))
    if fault.afterwards is not None:
        fault.afterwards(Path(config.run_dir))
    return read_evidence(config.run_dir)


def sample(run_dir: str) -> str:
    """What the model of a run writes, by our own code, which has no mistake."""
    prompt = "Once upon a time"
    pieces = continuation(*load_run(run_dir), prompt, seed=0, max_new_tokens=80)
    return prompt + "".join(pieces)


def record(name: str, seed: int, prepared: Path) -> dict[str, Any]:
    """Run a fault, print what the diagnosis makes of it, and return what it looked at.

    `prepared` is a folder for the text, so that it is encoded once.
    """
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as folder:
        if fault.inject is not leak and any(prepared.iterdir()):
            shutil.copytree(prepared, folder, dirs_exist_ok=True)
        evidence = train_with(fault, small_config(folder, seed=seed))
        text = sample(folder) if evidence.text.tokenizer_fits else ""
        if fault == FAULTS["healthy"]:
            shutil.copytree(Path(folder, "data"), prepared / "data", dirs_exist_ok=True)
            shutil.copy(Path(folder, "tokenizer.json"), prepared)
    found = [cause.kind for cause in diagnose(evidence).causes]
    verdict = "hit" if found[:1] == [fault.cause] or not found and not fault.cause else "MISS"
    print(f"{verdict:4} {name}, seed {seed}: {', '.join(found) or 'normal'}", flush=True)
    about = {"cause": fault.cause, "knobs": fault.knobs, "seed": seed, "sample": text}
    return about | to_record(evidence)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Plant mistakes in runs, and diagnose them.")
    parser.add_argument("names", nargs="*", default=list(FAULTS), help="which (default: all)")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    stored: dict[str, Any] = {"runs": {}}
    if RECORDS.exists():
        stored = json.loads(RECORDS.read_text(encoding="utf-8"))
    stored["config"] = CONFIG.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as prepared:
        for name in options.names:
            stored["runs"][name] = record(name, options.seed, Path(prepared))
            runs = stored["runs"]
            stored["runs"] = {each: runs[each] for each in FAULTS if each in runs}
            write_text(RECORDS, json.dumps(stored) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

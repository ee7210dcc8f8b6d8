"""The small run that the pages of the engine train, and what they draw of it."""

import copy
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate
from llm_course.text.batches import SupervisedDataset
from llm_course.text.data import BaseDataModule
from llm_course.text.stories import story_documents
from llm_course.training.config import Config, DataConfig, OptimizationConfig, TrainingConfig
from llm_course.training.engine import TrainingEngine
from llm_course.training.hooks import Callback
from llm_course.training.task import LanguageModelingTask, StepOutput

PAD, START, END = range(3)
WORD = re.compile(r"\w+|[^\w\s]")
LONGEST = 40  # words of a paragraph
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 1,
    "num_heads": 4,
    "max_position_embeddings": LONGEST,
}

Batch = dict[str, Tensor]


# ------------------------------------------------------------------------------ a run to look at


class Paragraphs(BaseDataModule):
    """Paragraphs of stories, a row each, in words: rows differ in length, and so in targets."""

    def __init__(self, batch_size: int = 16, *, num_bytes: int = 500_000, seed: int = 0):
        self.batch_size = batch_size
        self.seed = seed
        self.num_bytes = num_bytes

    def setup(self) -> None:
        rows = [
            WORD.findall(paragraph)
            for story in story_documents("easy", num_bytes=self.num_bytes)
            for paragraph in story.split("\n\n")
        ]
        self.words = ["<pad>", "<start>", "<end>", *sorted({word for row in rows for word in row})]
        self.vocab_size = len(self.words)
        ids = {word: i for i, word in enumerate(self.words)}
        examples = [
            ([START], [ids[word] for word in row] + [END]) for row in rows if len(row) < LONGEST
        ]
        held_out = len(examples) // 20
        self.val_dataset = self._dataset(examples[:held_out])
        self.train_dataset = self._dataset(examples[held_out:])

    def _dataset(self, examples: list[tuple[list[int], list[int]]]) -> SupervisedDataset:
        return SupervisedDataset(examples, pad_token_id=PAD, max_length=LONGEST)

    def fingerprint(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "seed": self.seed, "num_bytes": self.num_bytes}

    def text_of(self, ids: Tensor) -> str:
        """The words of one row, with the spaces put back."""
        words = [self.words[i] for i in ids.tolist() if i > END]
        text = re.sub(r" ([.,!?])", r"\1", " ".join(words))
        return re.sub(r'" ([^"]*) "', r'"\1"', text)


def tiny_model(data: Paragraphs, **sizes: Any) -> DecoderModel:
    """A decoder with one block and some 107,000 parameters."""
    return DecoderModel(ModelConfig(vocab_size=data.vocab_size, **SIZES | sizes))


def model_and_optimizer(data: Paragraphs) -> tuple[DecoderModel, torch.optim.AdamW]:
    """A tiny model, always the same, and AdamW for it."""
    torch.manual_seed(0)
    model = tiny_model(data)
    settings: dict[str, Any] = {"lr": 5e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    return model, torch.optim.AdamW(model.parameters(), **settings)


def cut(batch: Batch, rows: int) -> list[Batch]:
    """The micro-batches of a batch, with `rows` rows each."""
    parts = {name: tensor.split(rows) for name, tensor in batch.items()}
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]


def kept_for_backward(model: nn.Module, batch: Batch) -> int:
    """The bytes that the forward pass keeps for backward, without the weights themselves."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}  # by address: a tensor that is kept twice counts once

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(batch["input_ids"], labels=batch["labels"])
    assert output.loss_sum.requires_grad  # the tensors live as long as the output does
    return sum(kept.values())


def told(model: nn.Module, data: Paragraphs, count: int = 3, *, seed: int = 0) -> list[str]:
    """A few paragraphs that the model makes up."""
    generator = torch.Generator().manual_seed(seed)
    rows = generate(
        model,  # type: ignore[arg-type]
        torch.full((count, 1), START),
        max_new_tokens=LONGEST - 1,
        temperature=0.6,
        pad_token_id=PAD,
        stop_token_ids=[END],
        generator=generator,
    )
    return [data.text_of(row) for row in rows]


def write(model: nn.Module, data: Paragraphs, count: int = 3, *, seed: int = 0) -> None:
    """Print a few paragraphs that the model makes up."""
    for text in told(model, data, count, seed=seed):
        print("|", text)


@torch.no_grad()
def validation_loss(model: nn.Module, data: Paragraphs) -> float:
    """The loss per word on the paragraphs that are held out."""
    loss = 0.0
    targets = 0
    for batch in data.val_dataloader():
        output = model(batch["input_ids"], labels=batch["labels"])
        loss += output.loss_sum.item()
        targets += output.num_targets.item()
    return loss / targets


def distance(found: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """The distance between two gradients, relative to the length of the second."""
    one = torch.cat([tensor.flatten() for tensor in found])
    other = torch.cat([tensor.flatten() for tensor in right])
    return ((one - other).norm() / other.norm()).item()


def make_engine(
    callbacks: Sequence[Callback] = (),
    *,
    rows: int = 16,
    accumulation: int = 1,
    dropout: float = 0.0,
    num_bytes: int = 500_000,
    task: type[LanguageModelingTask] = LanguageModelingTask,
    **training: Any,
) -> TrainingEngine:
    """An engine that trains the tiny model on paragraphs: `rows` of them in each micro-batch."""
    settings: dict[str, Any] = {"device": "cpu", "precision": "fp32", "batch_size": rows} | training
    config = Config(
        data=DataConfig(sequence_length=LONGEST),
        model=ModelConfig(**SIZES, dropout=dropout),
        training=TrainingConfig(gradient_accumulation_steps=accumulation, **settings),
        optimization=OptimizationConfig(learning_rate=5e-3, warmup_steps=0, weight_decay=0.0),
    )
    return TrainingEngine(config, task(config), Paragraphs(rows, num_bytes=num_bytes), callbacks)


def same_weights(engine: TrainingEngine, rows: int) -> TrainingEngine:
    """A new engine with the weights of `engine`, whose batches have `rows` rows."""
    other = make_engine(rows=rows, max_steps=1)
    other.setup()
    other.model.load_state_dict(engine.model.state_dict())
    return other


@torch.no_grad()
def mean_of_batch_means(engine: TrainingEngine) -> float:
    """A validation loss computed wrongly: each batch counts the same, whatever its targets."""
    engine.model.eval()
    batches = engine.data.val_dataloader()
    outputs = [engine.task.validation_step(engine.model, batch) for batch in batches]
    return sum(float(each.loss_sum / each.num_targets) for each in outputs) / len(outputs)


class Record(Callback):
    """Keeps what each step reports, and its loss per target."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        loss = metrics["loss_sum"] / max(metrics["num_targets"], 1)
        self.rows.append(metrics | {"step": engine.state.step, "loss": loss})

    def column(self, name: str) -> list[float]:
        """What the steps report as `name`, without the steps that don't."""
        return [row[name] for row in self.rows if name in row]


class Losses:
    """Keeps the loss that a draft of the engine reports after each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, engine: Any, metrics: dict[str, float]) -> None:
        self.values.append(metrics["loss"])


class Poisoned(LanguageModelingTask):
    """The loss of the fifth micro-batch isn't a number."""

    calls = 0

    def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.calls += 1
        output = super().train_step(model, batch)
        return output._replace(loss_sum=output.loss_sum * (math.nan if self.calls == 5 else 1))


class StopAt(Callback):
    """Stops the run after a given step, if there is one."""

    def __init__(self, step: int | None):
        self.step = step

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        if engine.state.step == self.step:
            engine.stop(f"step {self.step} is done")


# ----------------------------------------------------------------------------------- the window


def show_windows(counts: Sequence[int], size: int) -> None:
    """A bar for the targets of each micro-batch, with a colour for each step."""
    plt.figure(figsize=(6, 2.4))
    for step, first in enumerate(range(0, len(counts), size)):
        heights = counts[first : first + size]
        label = f"step {step + 1}: {sum(heights)} targets"
        plt.bar(range(first, first + len(heights)), heights, label=label)
    plt.xlabel("micro-batch of 2 paragraphs")
    plt.ylabel("targets")
    plt.ylim(0, 1.7 * max(counts))
    plt.legend(fontsize=7, ncols=3, loc="upper center")
    plt.title("Micro-batches are unequal, and the last window may be short")
    plt.show()


def show_errors(rows: Sequence[int], errors: Sequence[float]) -> None:
    """The error of the gradient for each micro-batch size."""
    plt.figure(figsize=(6, 2.6))
    plt.plot(rows, [100 * error for error in errors], "o-", color="tab:red")
    plt.xscale("log", base=2)
    plt.xticks(rows, [str(number) for number in rows])
    plt.xlabel("paragraphs in each micro-batch, of 16 in the window")
    plt.ylabel("error of the gradient, %")
    plt.title("The mean of means gets worse as micro-batches get smaller")
    plt.show()


def after_strange_batch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Paragraphs, *, limit: float
) -> list[float]:
    """Train a copy on one batch whose labels are all the same word, and then on good ones.

    Returns the validation loss before the strange batch, and after each of 24 steps.
    """
    twin, its_optimizer = copy.deepcopy((model, optimizer))  # together, so that they stay linked
    losses = [validation_loss(twin, data)]
    for step, batch in enumerate(islice(data.train_dataloader(epoch=1), 24)):
        labels = batch["labels"]
        if step == 0:
            labels = torch.where(labels == -100, labels, 500)
        output = twin(batch["input_ids"], labels=labels)
        (output.loss_sum / output.num_targets).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), limit)
        its_optimizer.step()
        its_optimizer.zero_grad()
        losses.append(validation_loss(twin, data))
    return losses


# --------------------------------------------------------------------------------- half precision

SMALLEST = 2.0**-24  # what float16 can tell from 0
LARGEST = 65504.0


def logit_gradients(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient of the mean loss with respect to each logit of the batch's targets."""
    logits = model(batch["input_ids"]).logits.detach()
    labels = batch["labels"]
    logits = logits[labels != -100].requires_grad_()  # (N, V)
    nn.functional.cross_entropy(logits, labels[labels != -100]).backward()
    assert logits.grad is not None
    return logits.grad.flatten()


def show_range(gradients: Tensor, scale: float) -> None:
    """Where scaled gradients fall in the range of float16, and which are lost."""
    sizes = gradients[gradients != 0].abs().double() * scale
    lost = (sizes < SMALLEST / 2).double().mean().item()
    infinite = (sizes > LARGEST).double().mean().item()
    figure, ax = plt.subplots(figsize=(6.5, 2.8))
    ax.hist(sizes.log2().numpy(), bins=range(-56, 33), color="tab:blue", alpha=0.8)
    ax.axvspan(-56, -25, color="tab:gray", alpha=0.3)
    ax.axvspan(16, 32, color="tab:red", alpha=0.3)
    height = ax.get_ylim()[1]
    ax.text(-55, 0.88 * height, f"becomes 0: {lost:.1%}", fontsize=9)
    ax.text(16.4, 0.88 * height, f"infinite: {infinite:.1%}", fontsize=9)
    ax.set_xlim(-56, 32)
    ax.set_xlabel("size of a scaled gradient, as a power of 2")
    ax.set_ylabel("how many")
    verdict = "the step is skipped" if infinite else "the update happens"
    ax.set_title(f"scale {scale:g}: {verdict}")
    plt.show()


def show_scale_errors(exponents: Sequence[int], errors: Mapping[str, Sequence[float]]) -> None:
    """The relative error of a gradient in 16 bits, over the exponent of the loss scale."""
    plt.figure(figsize=(6, 2.6))
    for (name, values), style in zip(errors.items(), ("o-", "s--"), strict=True):
        plt.semilogy(exponents, values, style, ms=4, label=name)
    plt.xlabel("scale: 2 to the power of")
    plt.ylabel("relative error")
    plt.legend(fontsize=8)
    plt.title("Without a scale float16 loses the whole gradient")
    plt.show()


def show_scales(scales: Sequence[float], skipped: Sequence[int]) -> None:
    """The loss scale after each step of a run; `skipped` are the steps that overflowed."""
    plt.figure(figsize=(6, 2.6))
    steps = range(1, 1 + len(scales))
    plt.semilogy(steps, scales, base=2, drawstyle="steps-mid", label="scale after the step")
    crosses = [scales[step - 1] for step in skipped]
    plt.plot(skipped, crosses, "x", color="tab:red", label="skipped")
    plt.xlabel("optimizer step")
    plt.ylabel("scale")
    plt.legend(fontsize=8)
    plt.title("The scale halves until the gradients fit, then tries more")
    plt.show()


# ------------------------------------------------------------------------- a step, moment by moment


@dataclass(frozen=True)
class Moment:
    """A place in the loop: what is called there, and what the run looks like."""

    name: str
    says: str
    batches: int  # micro-batches of the step that are done
    norm: float  # of the mean gradient of these micro-batches
    moved: float  # how far the weights have gone since the start


SAYS = {
    "on_train_start": "the model is built",
    "on_epoch_start": "an epoch begins",
    "on_batch_end": "a micro-batch's gradient has been added",
    "the update": "divide, clip, look, update",
    "on_validation_start": "the model is about to be evaluated",
    "on_validation_end": "val_loss is known",
    "on_step_end": "the step is done; gradients are gone",
    "on_epoch_end": "all batches of the epoch are used",
    "on_train_end": "the last step is done",
}


class Watch(Callback):
    """Notes the gradient and the weights at each hook."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.batches = 0
        self.targets = 0

    def note(self, name: str, model: nn.Module) -> None:
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        if not self.moments:
            self.start = weights
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        divisor = max(self.targets, 1) if name == "on_batch_end" else 1
        norm = nn.utils.get_total_norm(gradients).item() / divisor if gradients else 0.0
        ways = [one - other for one, other in zip(weights, self.start, strict=True)]
        moved = nn.utils.get_total_norm(ways).item()
        self.moments.append(Moment(name, SAYS[name], self.batches, norm, moved))

    def on_train_start(self, engine: Any) -> None:
        self.note("on_train_start", engine.model)

    def on_epoch_start(self, engine: Any) -> None:
        self.note("on_epoch_start", engine.model)

    def on_batch_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.batches += 1
        self.targets += int(metrics["num_targets"])
        self.note("on_batch_end", engine.model)

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.note("on_step_end", engine.model)
        self.batches = 0
        self.targets = 0

    def on_validation_start(self, engine: Any) -> None:
        self.note("on_validation_start", engine.model)

    def on_validation_end(self, engine: Any, metrics: dict[str, float]) -> None:
        self.note("on_validation_end", engine.model)

    def on_epoch_end(self, engine: Any) -> None:
        self.note("on_epoch_end", engine.model)

    def on_train_end(self, engine: Any) -> None:
        self.note("on_train_end", engine.model)


@functools.cache
def watch_run(*, accumulation: int = 3) -> list[Moment]:
    """The moments of two steps of a tiny run: six micro-batches an epoch, one validation."""
    watch = Watch()

    class Told(LanguageModelingTask):
        """Tells the watch of the update, which has no hook of its own."""

        def after_update(self, model: nn.Module, sum_over_ranks: Any) -> None:
            super().after_update(model, sum_over_ranks)
            watch.note("the update", model)

    sizes: dict[str, Any] = {"num_bytes": 3_000, "max_steps": 2, "eval_interval": 2}
    make_engine([watch], rows=4, accumulation=accumulation, task=Told, **sizes).run()
    return watch.moments


def show_moment(moments: Sequence[Moment], moment: int) -> None:
    """The loop as a list of moments with the present one lit, beside gradient and weights."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.4, 3.9), gridspec_kw={"width_ratios": [1.15, 1]}
    )
    moment = min(moment, len(moments) - 1)
    now = moments[moment]
    _draw_list(left, moments, moment)
    past = range(moment + 1)
    every = range(len(moments))
    right.plot(every, [m.norm for m in moments], color="tab:orange", alpha=0.2)
    right.plot(past, [moments[i].norm for i in past], "o-", color="tab:orange", ms=4)
    right.set_ylabel("norm of the mean gradient so far", color="tab:orange")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("moment")
    weights = right.twinx()
    weights.plot(every, [m.moved for m in moments], color="tab:blue", alpha=0.2)
    weights.plot(past, [moments[i].moved for i in past], "s-", color="tab:blue", ms=4)
    weights.set_ylabel("how far the weights have moved", color="tab:blue")
    figure.suptitle(f"{moment}. {now.name}: {now.says}", fontsize=11)
    figure.tight_layout()
    plt.show()


def _draw_list(ax: Axes, moments: Sequence[Moment], moment: int) -> None:
    """A line for each moment: done, present or still to come."""
    for i, each in enumerate(moments):
        lit = i == moment
        color = "tab:orange" if lit else "tab:green" if i < moment else "tab:gray"
        name = f"{each.name} {each.batches}" if each.name == "on_batch_end" else each.name
        indent = 0.3 * (each.name not in ("on_train_start", "on_train_end"))
        indent += 0.3 * (each.name in ("on_batch_end", "the update"))
        weight = "bold" if lit else "normal"
        ax.text(
            0.25 + indent, -i, f"{i}. {name}", color=color, weight=weight, fontsize=9, va="center"
        )
        ax.plot(0.1, -i, "o" if i <= moment else ".", color=color, ms=9 if lit else 5)
    ax.set_xlim(0, 3)
    ax.set_ylim(-len(moments), 1)
    ax.axis("off")


# ------------------------------------------------------------------------------------- the knobs

STRANGE_STEP = 8
STRANGE_WORD = 300
SGD_RATE = 0.3
LOSSES = (4.3, 9.7)  # the same axis for all settings


@functools.cache
def run_with(accumulation: int, *, clipping: bool, optimizer: str = "AdamW") -> Record:
    """Twenty steps of the engine; one of them gets a batch in which every label is the same."""

    class Strange(LanguageModelingTask):
        """Replaces the labels of one micro-batch."""

        calls = 0

        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            if optimizer == "SGD":
                return torch.optim.SGD(model.parameters(), lr=SGD_RATE)
            return super().build_optimizer(model)

        def train_step(self, model: nn.Module, batch: Batch) -> StepOutput:
            step, index = divmod(self.calls, accumulation)
            self.calls += 1
            if step + 1 == STRANGE_STEP and index == 0:
                labels = batch["labels"]
                batch = batch | {"labels": torch.where(labels == -100, labels, STRANGE_WORD)}
            return super().train_step(model, batch)

    record = Record()
    sizes: dict[str, Any] = {"num_bytes": 60_000, "max_steps": 20, "eval_interval": 1000}
    limit = 1.0 if clipping else 1e9
    task: Any = Strange
    make_engine(
        [record], rows=4, accumulation=accumulation, task=task, max_grad_norm=limit, **sizes
    ).run()
    return record


def show_settings(accumulation: int, *, clipping: bool, optimizer: str) -> None:
    """Loss and gradient norm of each step, beside those of windows of one, clipped."""
    usual = run_with(1, clipping=True, optimizer=optimizer)
    chosen = run_with(accumulation, clipping=clipping, optimizer=optimizer)
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3))
    columns = {"loss": "loss per word, nats", "grad_norm": "norm before clipping"}
    for ax, (name, label) in zip(axes, columns.items(), strict=True):
        steps = usual.column("step")
        of_usual = "windows of 1, clipped at 1"
        ax.plot(steps, usual.column(name), color="gray", lw=4, alpha=0.4, label=of_usual)
        ax.plot(steps, chosen.column(name), "o-", ms=4, label="your choice")
        ax.axvline(STRANGE_STEP, color="tab:red", lw=1, ls=":")
        ax.set(xlabel="optimizer step", ylabel=label)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylim(LOSSES)
    axes[0].legend(fontsize=8)
    if clipping:
        axes[1].axhline(1, color="tab:green", lw=1, ls="--")
    how = "clipped at 1" if clipping else "not clipped"
    windows = f"{accumulation} micro-batch{'es' * (accumulation > 1)} of 4 paragraphs a step"
    figure.suptitle(f"{optimizer}, {windows}, {how}", fontsize=11)
    figure.tight_layout()
    plt.show()


def show_planted(right: Sequence[float], wrong: Mapping[str, Sequence[float]]) -> None:
    """How far the losses of wrong loops are from the right ones, step by step."""
    plt.figure(figsize=(6, 2.8))
    for (name, losses), style in zip(wrong.items(), ("o-", "s--"), strict=True):
        gaps = [100 * abs(b / a - 1) for a, b in zip(right, losses, strict=True)]
        plt.plot(range(1, 1 + len(gaps)), gaps, style, ms=4, label=name)
    plt.axhline(0.001, color="gray", ls=":")
    plt.text(len(right), 0.001, "the tolerance", fontsize=8, ha="right", va="bottom", color="gray")
    plt.yscale("log")
    plt.ylim(3e-4, 1e1)
    plt.xlabel("optimizer step")
    plt.ylabel("difference of the loss, %")
    plt.legend(fontsize=8)
    plt.title("Both planted mistakes train, and both are found")
    plt.show()


# ----------------------------------------------------------------------------------------- a run


def show_run(record: Record) -> None:
    """The training loss of each step, and the validation losses."""
    plt.figure(figsize=(6, 2.8))
    plt.plot(record.column("step"), record.column("loss"), lw=1, label="training")
    validated = [(row["step"], row["val_loss"]) for row in record.rows if "val_loss" in row]
    plt.plot(*zip(*validated, strict=True), "o", label="validation")
    plt.xlabel("optimizer step")
    plt.ylabel("loss per word, nats")
    plt.legend()
    plt.title("A run with a validation every 20 steps")
    plt.show()


def show_seen(happened: Sequence[float], seen: Sequence[float]) -> None:
    """The loss of each step of a run, and the part of it that a callback saw."""
    plt.figure(figsize=(6, 2.5))
    plt.plot(range(1, 1 + len(happened)), happened, "o-", ms=3, label="what happened")
    plt.plot(range(1, 1 + len(seen)), seen, lw=6, alpha=0.4, label="what the last callback saw")
    plt.xlabel("optimizer step")
    plt.ylabel("loss per word, nats")
    plt.gca().xaxis.set_major_locator(MaxNLocator(integer=True))
    plt.legend(fontsize=8)
    plt.title("A swallowed error: the run goes on, and nobody watches")
    plt.show()


def cosine(planned: int, *, steps: int, peak: float = 5e-3) -> list[float]:
    """The learning rate of each of `steps` steps, along a cosine planned for `planned` steps."""
    task = LanguageModelingTask(Config(optimization=OptimizationConfig(warmup_steps=0)))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = task.build_scheduler(optimizer, max_steps=planned)
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


def show_plans(rates: Mapping[int, Sequence[float]]) -> None:
    """The learning rate of each step, for each number of steps that was planned."""
    plt.figure(figsize=(6, 2.4))
    for (planned, values), style in zip(rates.items(), ("s--", "o-"), strict=True):
        plt.plot(range(1, 1 + len(values)), values, style, label=f"planned for {planned} steps")
    plt.xlabel("optimizer step")
    plt.ylabel("learning rate")
    plt.ylim(0)
    plt.gca().xaxis.set_major_locator(MaxNLocator(integer=True))
    plt.legend(fontsize=8)
    plt.title("Planned too short, the run ends at the lowest rate")
    plt.show()


def first_difference(one: Sequence[float], other: Sequence[float]) -> int:
    """The first index at which two lists of numbers differ."""
    pairs = zip(one, other, strict=True)
    return next(index for index, (a, b) in enumerate(pairs) if a != b)


def show_resumes(
    straight: Sequence[float], resumed: Mapping[str, Sequence[float]], stop: int
) -> None:
    """Runs that forgot a part of their state, beside the uninterrupted run."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    left.plot(range(1, len(straight) + 1), straight, color="lightgray", lw=6, label="never stopped")
    for (name, losses), marker in zip(resumed.items(), "osv^", strict=False):
        steps = range(stop + 1, stop + 1 + len(losses))
        left.plot(steps, losses, marker=marker, ms=4, lw=1)
        gaps = [abs(a - b) for a, b in zip(straight[stop:], losses, strict=True)]
        seen = [(step, gap) for step, gap in zip(steps, gaps, strict=True) if gap]
        right.semilogy(*zip(*seen, strict=True), marker=marker, ms=4, label=f"forgot {name}")
    left.set(xlabel="optimizer step", ylabel="loss per word", title="All look like training")
    right.set(xlabel="optimizer step", ylabel="difference", title="Only the comparison shows it")
    right.set_xlim(left.get_xlim())
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.tight_layout()
    plt.show()

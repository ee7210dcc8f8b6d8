"""Settings for the pages of chapter 12: sources to merge, a change to look at, and pictures."""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import TrainingMemory, count_parameters, training_memory
from llm_course.pages.engine import Paragraphs, tiny_model, write
from llm_course.pages.pretrained import continued, story_rows
from llm_course.pages.storyteller import load_storyteller
from llm_course.training import epoch
from llm_course.training.config import Config
from llm_course.training.sources import load_config, read_config, save_config

PARTS = ("weights", "gradients", "optimizer", "activations", "loss")
RUN = """\
model: {hidden_size: 256, num_layers: 4, num_heads: 4, vocab_size: 4096}
data: {corpus: stories, sequence_length: 256}
training: {max_steps: 1000, batch_size: 16, precision: fp32}
"""

# ------------------------------------------------------------------------------ a run to mistype


@cache
def paragraphs() -> Paragraphs:
    """Paragraphs of little stories."""
    data = Paragraphs(batch_size=16, num_bytes=200_000)
    data.setup()
    return data


def train(
    num_layers: int, learning_rate: float, steps: int = 70
) -> tuple[DecoderModel, list[float]]:
    """A tiny model, always the same at first, and the losses of a short run."""
    data = paragraphs()
    torch.manual_seed(0)
    model = tiny_model(data, num_layers=num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    losses = []
    for batch in islice(data.train_dataloader(epoch=0), steps):
        output = model(batch["input_ids"], labels=batch["labels"])
        loss = output.loss_sum / output.num_targets
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def say(model: DecoderModel) -> None:
    """Print two paragraphs that the model makes up."""
    write(model, paragraphs(), 2)


def show_losses(runs: Mapping[str, Sequence[float]]) -> None:
    """The loss of each run by step."""
    _, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for (name, losses), (style, width) in zip(
        runs.items(), (("-", 1.5), (":", 3.5), ("--", 1.5)), strict=True
    ):
        axis.plot(losses, style, label=name, linewidth=width)
    axis.set(xlabel="optimizer step", ylabel="loss, nats a word")
    axis.set_title("The mistyped run is the default run, bit for bit", fontsize=10)
    axis.legend(fontsize=8)
    plt.show()


# ------------------------------------------------------------------------------ sources


def refusal(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str | None:
    """The words with which a call is refused, or None where it isn't."""
    try:
        function(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def outcome(
    words: Iterable[str] = (),
    file: str | Sequence[str] | None = None,
    environment: Mapping[str, str] | Iterable[tuple[str, str]] = (),
) -> Config | str:
    """What `load_config` makes of words, of a file or several, and of variables.

    The files are called run.yaml and later.yaml; the variables have no LLM_COURSE_ in front.
    Returns the configuration, or the words of the refusal.
    """
    variables = {f"LLM_COURSE_{name}": value for name, value in dict(environment).items()}
    texts = [] if file is None else [file] if isinstance(file, str) else file
    names = ["run.yaml", "later.yaml"][: len(texts)]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        patch.dict(os.environ, variables),
    ):
        for name, text in zip(names, texts, strict=True):
            Path(name).write_text(text, encoding="utf-8")
        try:
            return load_config([*(f"--config={name}" for name in names), *words])[0]
        except ValueError as error:
            return str(error)


def set_by(key: str, value: str, where: str, file: str) -> Config | str:
    """The configuration of `file` with one key set in one more place, or a refusal."""
    if where == "command line":
        return outcome([f"--{key}={value}"], file)
    if where == "environment":
        return outcome([], file, {_variable(key): value})
    return outcome([], [file, _line(key, value)])


def command(key: str, value: str, where: str) -> str:
    """How one types what `set_by` does."""
    train = "llm-course train --config run.yaml"
    if where == "command line":
        return f"{train} {shlex.quote(f'--{key}={value}')}"
    if where == "environment":
        return f"LLM_COURSE_{_variable(key)}={shlex.quote(value)} {train}"
    return f"{train} --config later.yaml, where later.yaml says {_line(key, value)}"


def _variable(key: str) -> str:
    return key.upper().replace(".", "__")


def _line(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    return f"{section}: {{{name}: {value}}}" if section else f"{name}: {value}"


def flat(config: Config) -> dict[str, Any]:
    """The value of each key by its path."""
    sections = {name: part for name, part in asdict(config).items() if isinstance(part, dict)}
    return {
        f"{name}.{key}": value for name, part in sections.items() for key, value in part.items()
    }


def memory_of(config: Config) -> TrainingMemory:
    """The memory of a training step of this run."""
    return training_memory(
        config.model,
        config.training.batch_size,
        config.data.sequence_length,
        mixed_precision=config.training.precision in ("bf16", "fp16"),
        activation_checkpointing=config.training.activation_checkpointing,
    )


def show_change(key: str, value: str, where: str) -> None:
    """What setting one key of RUN does to the configuration, the parameters and the memory."""
    print(command(key, value, where))
    before = outcome([], RUN)
    after = set_by(key, value, where, RUN)
    assert isinstance(before, Config)
    if isinstance(after, str):
        print(f"refused: {after}")
        return
    old = flat(before)
    new = flat(after)
    for name in old:
        if old[name] != new[name]:
            print(f"{name}: {old[name]} -> {new[name]}")
    if old == new:
        print("nothing changed")
    sizes = [count_parameters(config.model).total / 1e6 for config in (before, after)]
    print(f"parameters: {sizes[0]:.2f} million -> {sizes[1]:.2f} million")
    show_memory({"before": memory_of(before), "after": memory_of(after)})


def show_memory(runs: Mapping[str, TrainingMemory]) -> None:
    """A bar for each run, of the parts of its memory."""
    _, axis = plt.subplots(figsize=(6.4, 1.9), layout="constrained")
    for row, memory in enumerate(runs.values()):
        left = 0.0
        for color, part in enumerate(PARTS):
            size = getattr(memory, part) / 2**20
            label = part if row == 0 else None
            axis.barh(row, size, left=left, color=plt.get_cmap("tab10")(color), label=label)
            left += size
        axis.text(left, row, f" {left:.0f} MiB", va="center", fontsize=8)
    axis.set_yticks(range(len(runs)), list(runs))
    axis.invert_yaxis()
    axis.margins(x=0.13)
    axis.set_xlabel("memory of a training step, MiB")
    axis.legend(ncols=5, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.35))
    plt.show()


# ------------------------------------------------------------------------------ another reading


@torch.no_grad()
def read_twice(config: Config, environment: Mapping[str, str]) -> tuple[Config, Config]:
    """A saved configuration, read by `read_config` and, with the variables, by `load_config`."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, environment):
        path = Path(folder, "config.yaml")
        save_config(config, path)
        return read_config(path), load_config([f"--config={path}"])[0]


def storyteller_as(config: ModelConfig) -> tuple[list[float], str]:
    """The storyteller's weights in a model of another configuration.

    Returns the loss at each position of stories, and how it continues one.
    """
    trained, _ = load_storyteller()
    model = DecoderModel(replace(config)).eval()
    model.load_state_dict(trained.state_dict())  # the shapes fit, whatever else differs
    rows = story_rows()
    logits = model(rows[:, :-1]).logits  # (B, T, V)
    losses = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(0)
    return losses.tolist(), continued(
        model, "One rainy morning Peter was eating some porridge.", 40
    )


def show_positions(runs: Mapping[str, Sequence[float]]) -> None:
    """The loss by position, smoothed over sixteen of them."""
    _, axis = plt.subplots(figsize=(6.4, 2.4), layout="constrained")
    for (name, losses), style in zip(runs.items(), ("-", "--"), strict=True):
        smooth = torch.tensor(losses).unfold(0, 16, 1).mean(-1)
        axis.plot(range(16, 16 + len(smooth)), smooth, style, label=name)
    axis.set(xlabel="position in the story", ylabel="loss, nats a token", ylim=(0, None))
    axis.legend(fontsize=8)
    axis.set_title("The same weights, read with another setting", fontsize=10)
    plt.show()


def show_table(
    cells: Sequence[Sequence[str]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    colors: Sequence[Sequence[float]],
    cmap: str = "Blues",
) -> None:
    """A table of words on coloured squares."""
    _, axis = plt.subplots(figsize=(6.4, 0.8 + 0.3 * len(rows)), layout="constrained")
    axis.imshow(colors, cmap=cmap, vmin=0, vmax=1.8 * max(map(max, colors)) or 1, aspect="auto")
    for row, words in enumerate(cells):
        for column, word in enumerate(words):
            axis.text(column, row, word, ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(columns)), list(columns), fontsize=8)
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.set_title(title, fontsize=10)
    plt.show()


def planned_steps(config: Config, num_items: int) -> int:
    """What the engine of chapter 14 makes of the length of a run."""
    return epoch.planned_steps(config, num_items=num_items)

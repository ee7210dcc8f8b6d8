"""The experiments of the pages on scaling, their recorded runs, and their plots."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import LogLocator
from torch import Tensor, nn
from torch.utils.data import Dataset

from llm_course.model.config import ModelConfig
from llm_course.text.batches import shift
from llm_course.text.data import BaseDataModule, TextDataModule
from llm_course.text.stories import read_story
from llm_course.training.config import Config, OptimizationConfig
from llm_course.training.mup import MuPTask
from llm_course.training.scaling import Law, slice_minimum
from llm_course.training.task import LanguageModelingTask

RECORD = Path(__file__).with_name("scaling_runs.json")

# ---------------------------------------------------------------- stories with a known entropy


def whole_documents(ids: np.ndarray, separator_id: int) -> list[np.ndarray]:
    """The documents with a separator on either side, as int64."""
    ids = ids.astype(np.int64)
    ends = np.flatnonzero(ids == separator_id)
    return [ids[a + 1 : b] for a, b in pairwise(ends)]


class Beginnings(Dataset):
    """The first T tokens of documents, in batches like a `PackedDataset`'s.

    A row begins with the separator in front of its document, so a model sees all that the tokens
    depend on. Documents that don't fill a row are left out.
    """

    def __init__(self, ids: np.ndarray, separator_id: int, sequence_length: int, *, num_rows: int):
        whole = whole_documents(ids, separator_id)
        self.documents = [one for one in whole if len(one) >= sequence_length][:num_rows]
        rows = [np.concatenate([[separator_id], one[:sequence_length]]) for one in self.documents]
        self.rows = np.stack(rows)  # (N, T + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return shift(torch.from_numpy(self.rows[list(indices)]))


class StoryData(TextDataModule):
    """Stories; those that are held out are read from their beginnings.

    A window that begins in the middle of a story lacks what was said before, and nobody knows the
    entropy of what is left. From the beginning on it's known, token by token.
    """

    NUM_STORIES = 200
    val_dataset: Beginnings

    def __init__(self, folder: str, *, level: str, **settings: Any):
        super().__init__(folder, **settings)
        self.level = level

    def setup(self) -> None:
        super().setup()
        tokens = self.prepared.open_tokens("val", self.tokenizer)
        self.val_dataset = Beginnings(
            tokens[:],
            tokens.header["separator_id"],
            self.sequence_length,
            num_rows=self.NUM_STORIES,
        )

    @cached_property
    def floor(self) -> float:
        """The information in the validation rows, in nats per token: no model has a lower loss.

        The last token of a row also tells a little about the letters after it. That isn't counted,
        so the true floor is higher by a trifle.
        """
        bits = 0.0
        for row, document in zip(self.val_dataset.rows, self.val_dataset.documents, strict=True):
            seen = len(self.tokenizer.decode(row[1:].tolist()))
            reading = read_story(self.tokenizer.decode(document.tolist()), self.level)
            bits += math.fsum(reading.bits_by_character()[:seen])
        return bits * math.log(2) / self.val_dataset.rows[:, 1:].size


class StoryTask(LanguageModelingTask):
    """Language modeling on `StoryData`; a validation also measures the loss above the floor."""

    def build_data(self) -> StoryData:
        settings = asdict(self.config.data)
        del settings["synthetic"]
        training = self.config.training
        batches = {"batch_size": training.batch_size, "seed": training.seed}
        level = self.config.data.stories.level
        return StoryData(self.config.run_dir, level=level, **settings, **batches)

    def metrics(self, loss: float, data: BaseDataModule) -> dict[str, float]:
        assert isinstance(data, StoryData)
        return {"excess": loss - data.floor}


# ------------------------------------------------------------------------------ recorded runs


class Runs(NamedTuple):
    """Runs that a law can be fitted to, as arrays in the same order."""

    N: np.ndarray  # parameters
    D: np.ndarray  # tokens
    loss: np.ndarray  # on held-out stories, in nats per token
    budget: np.ndarray  # 6 N D, rounded: the slice that each run belongs to


@cache
def record() -> dict[str, Any]:
    """What `make scaling` has recorded."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def as_runs(rows: Sequence[Mapping[str, Any]]) -> Runs:
    """The recorded runs, where several seeds of a run make one: its loss is their mean."""
    seeds: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        seeds.setdefault((row["N"], row["D"]), []).append(row)
    means = [{**same[0], "loss": np.mean([row["loss"] for row in same])} for same in seeds.values()]
    return Runs(*(np.array([row[name] for row in means]) for name in Runs._fields))


def scaling_runs() -> Runs:
    """The runs that the law is fitted to."""
    return as_runs(record()["scaling"])


def of_budget(runs: Runs, budget: float) -> Runs:
    """The runs of one slice, from the smallest model to the largest."""
    chosen = np.flatnonzero(runs.budget == budget)
    return Runs(*(column[chosen[runs.N[chosen].argsort()]] for column in runs))


class Passing(NamedTuple):
    """A run, and the longest run of the same size as it passed the same number of tokens."""

    N: int
    D: int
    planned: float  # the training loss at the run's end
    passing: float  # that of the longer run after D tokens


def single_runs() -> list[dict[str, Any]]:
    """The recorded runs with the first seed: one for each size and budget."""
    return [row for row in record()["scaling"] if row["seed"] == 0]


def read_in_passing() -> list[Passing]:
    """For each run that has a longer one of its size: its loss, and the longer run's there."""
    found = []
    for row in single_runs():
        longest = max((r for r in single_runs() if r["N"] == row["N"]), key=lambda r: r["D"])
        if longest["D"] > row["D"]:
            tokens, losses = np.array(longest["curve"]).T
            passing = float(np.interp(row["D"], tokens, losses))
            found.append(Passing(row["N"], row["D"], row["curve"][-1][1], passing))
    return sorted(found)


def seeds_of(budget: float) -> dict[int, list[float]]:
    """The losses of each size of one slice, one for each seed."""
    found: dict[int, list[float]] = {}
    for row in record()["scaling"]:
        if row["budget"] == budget:
            found.setdefault(row["N"], []).append(row["loss"])
    return dict(sorted(found.items()))


def show_samples(*losses: float) -> None:
    """For each loss, the text of the run that ended nearest to it, from the prompt on."""
    for wanted in losses:
        row = min(single_runs(), key=lambda row: abs(row["loss"] - wanted))
        print(f"{row['loss']:.2f}  {' '.join(row['sample'].split())}\n")


def steps_to(loss: float) -> dict[int, float]:
    """The fewest steps to a training loss, of all rates, for each size of a batch in tokens."""
    steps: dict[int, float] = {}
    for row in record()["batches"]:
        taken, losses = np.array(row["curve"]).T
        below = np.flatnonzero(losses <= loss)
        if len(below) and below[0] > 0:
            last = below[0]
            between = np.interp(-loss, -losses[last - 1 : last + 1], taken[last - 1 : last + 1])
            steps[row["tokens"]] = min(steps.get(row["tokens"], np.inf), float(between))
    return dict(sorted(steps.items()))


# ------------------------------------------------------------------------------ plots


def _operations(budget: float) -> str:
    mantissa, exponent = f"{budget:.1e}".split("e")
    return rf"${mantissa}\cdot10^{{{int(exponent)}}}$"


def _plain_ticks(axis: Any) -> None:
    """Numbers such as 0.5 on a logarithmic axis, not powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def best_of(runs: Runs, budget: float, count: int = 4) -> Runs:
    """The runs of one slice with the lowest losses, from the smallest model to the largest."""
    chosen = of_budget(runs, budget)
    lowest = np.sort(chosen.loss.argsort()[:count])
    return Runs(*(column[lowest] for column in chosen))


def plot_slice(runs: Runs, budget: float) -> None:
    """The losses of one budget over the models' sizes."""
    chosen = of_budget(runs, budget)
    _, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
    axes.plot(chosen.N / 1000, chosen.loss, "o-")
    _label_tokens(axes, chosen)
    _finish_slice(axes, chosen, budget)


def plot_parabolas(runs: Runs, budget: float) -> None:
    """The losses of one budget, a parabola through the four best of them, and one through all."""
    chosen = of_budget(runs, budget)
    _, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(chosen.N / 1000, chosen.loss, "o", color="tab:blue")
    some = {"the four best": best_of(runs, budget), "all": chosen}
    for (name, near), color in zip(some.items(), ("tab:orange", "tab:red"), strict=True):
        N = np.geomspace(near.N[0] / 1.4, near.N[-1] * 1.4, 80)
        parabola = np.polynomial.Polynomial.fit(np.log(near.N), near.loss, 2)
        axes.plot(N / 1000, parabola(np.log(N)), color=color, linewidth=1, label=name)
        size, loss = slice_minimum(near.N.tolist(), near.loss.tolist())
        axes.plot(size / 1000, loss, "v", color=color, markersize=8)
    axes.legend(title="a parabola through", fontsize=8)
    _finish_slice(axes, chosen, budget)


def _finish_slice(axes: Any, chosen: Runs, budget: float) -> None:
    axes.set(xscale="log", xlabel="thousand parameters", ylabel="loss, nats per token")
    axes.set(
        title=f"{len(chosen.N)} models, each with a budget of {_operations(budget)} operations"
    )
    axes.margins(x=0.15, y=0.2)
    _plain_ticks(axes.xaxis)
    plt.show()


def _label_tokens(axes: Any, chosen: Runs) -> None:
    best = chosen.N[chosen.loss.argmin()]
    for N, D, loss in zip(chosen.N, chosen.D, chosen.loss, strict=True):
        side = "left" if N < best else "right" if N > best else "center"
        place: Any = dict(textcoords="offset points", fontsize=8, ha=side)
        up = -14 if N == best else 7
        axes.annotate(f"{D / 1000:,.0f}k tokens", (N / 1000, loss), xytext=(0, up), **place)


def plot_slices(runs: Runs, floor: float, law: Law | None = None) -> None:
    """The loss above the floor over size, a curve for each budget; with a law also its misses."""
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    if law:
        plt.close(figure)
        figure, (axes, misses) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for place, budget in enumerate(sorted(set(runs.budget))):
        chosen = of_budget(runs, budget)
        style: Any = dict(color=f"C{place}", label=_operations(budget))
        axes.plot(chosen.N / 1000, chosen.loss - floor, "o" if law else "o-", **style)
        if law:
            N = np.geomspace(chosen.N[0] / 1.3, chosen.N[-1] * 1.3, 60)
            axes.plot(N / 1000, law.loss(N, budget / 6 / N) - floor, color=f"C{place}", linewidth=1)
            off = 100 * (chosen.loss / law.loss(chosen.N, chosen.D) - 1)
            misses.plot(chosen.N / 1000, off, "o-", linewidth=0.7, **style)
    axes.set(xscale="log", yscale="log", ylabel="nats above the floor")
    (misses if law else axes).legend(title="operations", fontsize=8)
    _plain_ticks(axes.yaxis)
    if law:
        misses.axhline(0, color="gray", linestyle=":")
        misses.set(xscale="log", ylabel="loss over the law's, percent")
    for each in figure.axes:
        each.set_xlabel("thousand parameters")
        _plain_ticks(each.xaxis)
    plt.show()


def plot_floors(free: Sequence[Law], floor: float) -> None:
    """Where the fits to resampled runs put E, beside the floor that is known."""
    _, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
    axes.hist([law.E for law in free], bins=30, color="tab:blue", alpha=0.6, label="fitted E")
    axes.axvline(0, color="black", linestyle=":", linewidth=4, label="lowest E allowed")
    axes.axvline(floor, color="tab:red", label="the entropy")
    axes.set(xlabel="nats per token", ylabel="fits", xlim=(0, None))
    axes.legend(fontsize=8)
    plt.show()


def plot_prediction(runs: Runs, law: Law, found: Mapping[str, Any], floor: float) -> None:
    """The best run of each budget, the law's best, and the run that was predicted."""
    _, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
    budgets = sorted(set(runs.budget))
    best = [of_budget(runs, budget).loss.min() - floor for budget in budgets]
    axes.plot(budgets, best, "o", label="best run of a budget")
    reach = np.geomspace(budgets[0], found["budget"] * 2, 50)
    expected = [law.loss(*law.best_size(budget)) - floor for budget in reach]
    axes.plot(reach, expected, color="gray", linewidth=1, label="the law at its best size")
    low, middle, high = (value - floor for value in found["fixed"])
    errors = [[middle - low], [high - middle]]
    axes.errorbar(found["budget"], middle, errors, fmt="s", capsize=4, label="predicted")
    axes.plot(found["budget"], found["measured"] - floor, "k*", markersize=11, label="measured")
    axes.set(xscale="log", yscale="log", xlabel="operations", ylabel="nats above the floor")
    axes.legend(fontsize=8)
    _plain_ticks(axes.yaxis)
    plt.show()


def plot_purchase(law: Law, floor: float, seconds: float, speed: float, ratio: float) -> None:
    """What `seconds` of a machine buy: the loss over the model's size, and where it comes from."""
    budget = seconds * speed
    best, _ = law.best_size(budget)
    N = best * ratio
    D = budget / 6 / N
    _, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", width_ratios=(2, 1))
    sizes = best * np.geomspace(1 / 16, 16, 80)
    axes[0].plot(sizes, law.loss(sizes, budget / 6 / sizes))
    axes[0].plot(N, law.loss(N, D), "o", color="tab:orange", markersize=9)
    axes[0].axhline(floor, color="gray", linestyle=":")
    axes[0].set(xscale="log", xlabel="parameters", ylabel="loss", title=_operations(budget))
    parts = {
        "not knowable": law.E,
        "too small": law.A / N**law.a,
        "read too little": law.B / D**law.b,
    }
    bottom = 0.0
    for (name, value), color in zip(parts.items(), ("0.7", "tab:blue", "tab:red"), strict=True):
        axes[1].bar(0, value, bottom=bottom, color=color, label=f"{name}: {value:.2f}")
        bottom += value
    axes[1].set(xlim=(-0.6, 2.6), xticks=[], title=f"loss {bottom:.2f}")
    axes[1].legend(fontsize=8, loc="upper right")
    plt.show()
    print(f"{N:,.0f} parameters read {D:,.0f} tokens, {D / N:.1f} for each parameter")


def plot_transfer() -> None:
    """The loss over the learning rate, a curve for each width, without muP and with it."""
    rows = record()["transfer"]
    _, axes = plt.subplots(2, 2, figsize=(9, 5), layout="constrained", sharex=True, sharey="row")
    for i, optimizer in enumerate(("adamw", "muon")):
        for j, task in enumerate(("standard", "muP")):
            axes[i, j].set_title(f"{optimizer}, {task}", fontsize=10)
            for place, (width, curve) in enumerate(rate_curves(optimizer, task).items()):
                rates, losses = zip(*curve, strict=True)
                best = int(np.argmin(losses))
                axes[i, j].plot(rates, losses, ".-", color=f"C{place}", label=f"{width}")
                axes[i, j].plot(rates[best], losses[best], "o", color=f"C{place}", markersize=9)
            axes[i, j].set_xscale("log")
            axes[i, j].set_xticks(sorted({row["rate"] for row in rows}))
            axes[i, j].xaxis.set_major_formatter("{x:g}")
            axes[i, j].minorticks_off()
        axes[i, 0].set_ylabel("validation loss")
    axes[0, 0].legend(title="width", fontsize=8)
    for place in axes[1]:
        place.set_xlabel("peak learning rate")
    plt.show()


def rate_curves(optimizer: str, task: str) -> dict[int, list[tuple[float, float]]]:
    """The recorded (rate, loss) of each width; runs that diverged are left out."""
    curves: dict[int, list[tuple[float, float]]] = {}
    for row in record()["transfer"]:
        if (row["optimizer"], row["task"]) == (optimizer, task) and row["loss"] is not None:
            curves.setdefault(row["width"], []).append((row["rate"], row["loss"]))
    return {width: sorted(curve) for width, curve in sorted(curves.items())}


def best_rate(curve: Sequence[tuple[float, float]]) -> float:
    """The rate with the lowest loss, from a parabola through the best point and its neighbours."""
    rates, losses = zip(*curve, strict=True)
    place = min(max(int(np.argmin(losses)), 1), len(curve) - 2)
    near = slice(place - 1, place + 2)
    return slice_minimum(rates[near], losses[near])[0]


def best_rates() -> dict[tuple[str, str], dict[int, float]]:
    """The best rate of each width, by optimizer and parametrization."""
    return {
        (optimizer, task): {w: best_rate(c) for w, c in rate_curves(optimizer, task).items()}
        for optimizer in ("adamw", "muon")
        for task in ("standard", "muP")
    }


def plot_best_rates() -> None:
    """The best rate over the width, without muP and with it."""
    _, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for (optimizer, task), best in best_rates().items():
        color = "tab:blue" if optimizer == "adamw" else "tab:orange"
        style = "o--" if task == "standard" else "o-"
        axes.plot([*best], [*best.values()], style, color=color, label=f"{optimizer}, {task}")
    axes.set(xscale="log", yscale="log", xlabel="width", ylabel="best learning rate")
    axes.set_xticks([*best], [str(width) for width in best])
    axes.minorticks_off()
    _plain_ticks(axes.yaxis)
    axes.legend(fontsize=8)
    plt.show()


def plot_batches(loss: float) -> None:
    """Steps and tokens to a loss over the size of the batch, and the law of diminishing returns."""
    steps = steps_to(loss)
    tokens, fewest = np.array([*steps.items()]).T
    least, critical = critical_batch(steps)
    _, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    reach = np.geomspace(tokens[0] / 1.5, tokens[-1] * 1.5, 60)
    axes[0].plot(tokens, fewest, "o")
    axes[0].plot(reach, least * (1 + critical / reach), color="gray", linewidth=1)
    axes[1].plot(tokens, fewest * tokens / 1000, "o")
    axes[1].plot(reach, least * (reach + critical) / 1000, color="gray", linewidth=1)
    for place, what in zip(axes, ("steps", "thousand tokens"), strict=True):
        place.axvline(critical, color="tab:red", linestyle=":", label="critical batch")
        place.set(xscale="log", yscale="log", xlabel="tokens in a batch")
        place.set_ylabel(what)
        place.set_title(f"{what} to a loss of {loss:g}", fontsize=10)
        place.set_xticks(tokens, [f"{size:,.0f}" for size in tokens])
        place.minorticks_off()
        _plain_ticks(place.yaxis)
    axes[0].legend(fontsize=8)
    plt.show()


def critical_batch(steps: Mapping[int, float]) -> tuple[float, float]:
    """The least steps S and the critical batch B of steps = S * (1 + B / tokens).

    Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.3.
    """
    tokens, fewest = np.array([*steps.items()]).T
    slope, least = np.polyfit(1 / tokens, fewest, 1, w=1 / fewest)
    return float(least), float(slope / least)


# ------------------------------------------------------------------------------ muP


class Moved(NamedTuple):
    """How far numbers have moved from their initial values, as a root mean square."""

    stream: float  # the residual stream after the first block
    logits: float


def coordinate_config(optimizer: str, *, width: int) -> Config:
    """A model of two layers with a constant rate, for a few steps on random tokens."""
    shape = ModelConfig(
        hidden_size=width, num_layers=2, num_heads=4, qk_norm=True, tie_word_embeddings=True
    )
    rate: Any = {"optimizer": optimizer, "learning_rate": 3e-3}
    rate |= {"schedule": "constant", "warmup_steps": 0}
    return Config(model=shape, optimization=OptimizationConfig(**rate))


def few_steps(
    task: type[LanguageModelingTask], optimizer: str, *, width: int, steps: int = 4
) -> tuple[nn.Module, Moved]:
    """Train on one batch of random tokens; returns the model, and how far it has moved."""
    ids = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
    inputs = ids[:, :-1]
    learner = task(coordinate_config(optimizer, width=width))
    torch.manual_seed(0)
    model: Any = learner.build_model(SimpleNamespace(vocab_size=256))  # type: ignore[arg-type]
    update = learner.build_optimizer(model)
    with torch.no_grad():
        before = model(inputs, output_hidden_states=True)
    for _ in range(steps):
        output = model(inputs, labels=ids[:, 1:])
        (output.loss_sum / output.num_targets).backward()
        update.step()
        update.zero_grad()
    with torch.no_grad():
        after = model(inputs, output_hidden_states=True)
    stream = after.hidden_states[1] - before.hidden_states[1]
    return model, Moved(_rms(stream), _rms(after.logits - before.logits))


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def coordinate_check(widths: Sequence[int]) -> dict[tuple[str, str, int], Moved]:
    """How far models of these widths move, by optimizer, parametrization and width."""
    tasks = {"lm": LanguageModelingTask, "mup": MuPTask}
    return {
        (optimizer, name, width): few_steps(task, optimizer, width=width)[1]
        for optimizer in ("adamw", "muon")
        for name, task in tasks.items()
        for width in widths
    }


def plot_coordinates(moved: Mapping[tuple[str, str, int], Moved]) -> None:
    """The movement of the stream and of the logits over the width."""
    _, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    for place, measure in zip(axes, Moved._fields, strict=True):
        for optimizer, color in (("adamw", "tab:blue"), ("muon", "tab:orange")):
            for name, style in (("lm", "o--"), ("mup", "o-")):
                chosen = {w: m for (o, n, w), m in moved.items() if (o, n) == (optimizer, name)}
                values = [getattr(m, measure) for m in chosen.values()]
                label = f"{optimizer}{', muP' if name == 'mup' else ''}"
                place.plot([*chosen], values, style, color=color, label=label)
        place.set(xscale="log", yscale="log", xlabel="width", title=f"movement of the {measure}")
        place.set_xticks([*chosen], [str(width) for width in chosen])
        place.minorticks_off()
        _plain_ticks(place.yaxis)
    axes[0].legend(fontsize=8)
    plt.show()

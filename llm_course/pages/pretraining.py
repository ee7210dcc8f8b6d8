"""Recorded runs and plots of the pages on pretraining."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import LogLocator

from llm_course.training.bands import COLUMNS, Band, find_band
from llm_course.model.config import ModelConfig
from llm_course.model.estimate import count_parameters
from llm_course.training.callbacks import read_metrics
from llm_course.training.config import (
    Config,
    DataConfig,
    LoggingConfig,
    OptimizationConfig,
    StoriesConfig,
    TrainingConfig,
)
from llm_course.training.diagnosis import (
    Evidence,
    TextFacts,
    WeightFacts,
    diagnose,
    read_evidence,
)
from llm_course.training.folder import load_run
from llm_course.training.sources import read_config

FAULTS = Path(__file__).with_name("faults.json")
STORYTELLER = Path(__file__).with_name("storyteller_run.json")
TWO_PROCESSES = Path(__file__).with_name("two_processes.json")
FRESH_SEEDS = Path(__file__).with_name("fresh_seeds.json")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class FaultyRun:
    """A run with a mistake in it, and the cause that a diagnosis should name first, if any."""

    cause: str | None
    evidence: Evidence
    sample: str  # what its model writes, where that was kept


def with_knobs(config: Config, knobs: Mapping[str, Any]) -> Config:
    """`config` with the settings in `knobs`, each named by its section and key."""
    for path, value in knobs.items():
        section, key = path.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def tiny_run(run_dir: str | Path, *, max_steps: int, **data: Any) -> Config:
    """A run of seconds on a few stories, which keeps nothing back."""
    sizes: dict[str, Any] = dict(hidden_size=32, num_layers=1, num_heads=2)
    few = StoriesConfig(level="easy", num_bytes=60_000)
    return Config(
        run_dir=str(run_dir),
        model=ModelConfig(**sizes, max_position_embeddings=data.get("sequence_length", 256)),
        data=DataConfig(stories=few, **data),
        training=TrainingConfig(
            max_steps=max_steps, batch_size=8, eval_interval=max_steps, precision="fp32"
        ),
        optimization=OptimizationConfig(warmup_steps=1),
        logging=LoggingConfig(log_interval=2, progress=False, tensorboard=False),
    )


def to_record(evidence: Evidence) -> dict[str, Any]:
    """What a diagnosis looks at, as short JSON."""
    kept = "step epoch targets loss val_loss grad_norm learning_rate step_seconds data_seconds"
    rows = [
        {name: _short(row[name]) for name in kept.split() if name in row} for row in evidence.rows
    ]
    weights = evidence.weights._asdict() if evidence.weights is not None else None
    return {"rows": rows, "text": evidence.text._asdict(), "weights": weights}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _from_record(record: Mapping[str, Any], base: Config) -> Evidence:
    weights = record["weights"]
    if weights is not None:
        by_offset = {int(offset): loss for offset, loss in weights["by_offset"].items()}
        weights = WeightFacts(**(weights | {"by_offset": by_offset}))
    config = with_knobs(base, record["knobs"])
    return Evidence(config, record["rows"], TextFacts(**record["text"]), weights, find_band(config))


@cache
def load_faults() -> dict[str, FaultyRun]:
    """The recorded runs by the name of their mistake; `healthy` has none."""
    stored = json.loads(FAULTS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(stored["config"], encoding="utf-8")
        base = read_config(path)
    return {
        name: FaultyRun(record["cause"], _from_record(record, base), record.get("sample", ""))
        for name, record in stored["runs"].items()
    }


def column(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """A column of the rows that have it, over thousands of targets."""
    chosen = [row for row in rows if name in row]
    return [row["targets"] / 1000 for row in chosen], [row[name] for row in chosen]


def _plain_ticks(axes: Any) -> None:
    """Numbers such as 0.5 on a logarithmic axis, not powers of ten."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def plot_band(
    band: Band | None,
    rows: Sequence[Row],
    *,
    name: str = "loss",
    title: str = "",
    floor: float | None = None,
    axes: Any = None,
) -> None:
    """A run's curve, the band where it's expected, and the entropy of the text where it's known."""
    axes = axes or plt.subplots(figsize=(6, 2.8), layout="constrained")[1]
    places, values = column(rows, name)
    if band is not None:
        expected = [band.interval(name, 1000 * place) for place in places]
        low, middle, high = zip(*expected, strict=True)
        axes.fill_between(places, low, high, color="tab:green", alpha=0.3, label="band")
        axes.plot(places, middle, color="tab:green", linewidth=1)
    axes.plot(places, values, color="tab:orange", label="this run")
    if floor is not None:
        axes.axhline(floor, color="gray", linestyle=":", label="entropy of the text")
    axes.set(xlabel="thousand tokens", ylabel=name, yscale="log", title=title)
    _plain_ticks(axes)
    axes.legend(fontsize=8)


def show_run(evidence: Evidence, title: str = "", note: str = "") -> None:
    """The three curves of a run, each against its band, and a note below."""
    _, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
    for name, place in zip(("loss", "val_loss", "grad_norm"), axes, strict=True):
        floor = None if name == "grad_norm" else evidence.text.floor
        plot_band(evidence.band, evidence.rows, name=name, floor=floor, axes=place)
    axes[1].set_title(title)
    if note:
        axes[1].figure.supxlabel(note, fontsize=10)
    plt.show()


def explain(mistake: str) -> None:
    """Show a recorded run, and what the diagnosis makes of it."""
    evidence = load_faults()[mistake].evidence
    show_run(evidence, mistake)
    for cause in diagnose(evidence).causes:
        print(f"{cause.kind}: {cause.evidence}. {cause.advice}")


TOO_GOOD = (
    "no causal mask",
    "labels not shifted",
    "half of the labels masked",
    "the same batch again",
    "validation text in training",
)


def suspects() -> dict[str, str]:
    """The recorded runs under letters that say nothing."""
    names = sorted(load_faults(), key=lambda name: name[::-1])
    return {chr(ord("A") + i): name for i, name in enumerate(names)}


def show_suspect(letter: str, *, verdict: bool) -> None:
    """A recorded run against its bands; with `verdict`, what is wrong and how it was found."""
    name = suspects()[letter]
    evidence = load_faults()[name].evidence
    causes = [f"{cause.kind}: {cause.evidence}" for cause in diagnose(evidence).causes]
    lines = "\n".join(textwrap.fill(cause, 110) for cause in causes) or "nothing unusual was found"
    show_run(evidence, f"Run {letter}", note=f"{name}\n{lines}" if verdict else "")


def plot_offsets(names: Sequence[str]) -> None:
    """The loss of recorded runs' checkpoints at each offset, and the lowest one marked."""
    _, axes = plt.subplots(1, len(names), figsize=(9, 2.6), layout="constrained", sharey=True)
    for name, place in zip(names, axes, strict=True):
        weights = load_faults()[name].evidence.weights
        assert weights is not None
        losses = weights.by_offset
        best = min(losses, key=lambda offset: losses[offset])
        colors = ["tab:green" if offset == best else "tab:gray" for offset in losses]
        bars = place.bar([str(offset) for offset in losses], list(losses.values()), color=colors)
        place.bar_label(bars, fmt="%.2f", fontsize=8)
        place.set(title=name, xlabel="offset", ylim=(0, 18))
    axes[0].set_ylabel("loss of the checkpoint")
    plt.show()


def compare_runs(names: Sequence[str]) -> None:
    """The validation losses of recorded runs in one picture."""
    _, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
    for name, label in zip(names, "AB", strict=True):
        axes.plot(
            *column(load_faults()[name].evidence.rows, "val_loss"), "o-", label=f"run {label}"
        )
    axes.set(
        xlabel="thousand tokens", ylabel="validation loss", ylim=0, title="Which run is better?"
    )
    axes.legend()
    plt.show()


# ---------------------------------------------------------------------------- a run of one's own


def start(config: str | Path, run_dir: str) -> subprocess.Popen[bytes]:
    """Begin `llm-course train` in a process of its own, as a terminal does."""
    program = "import sys; from llm_course.cli import main; sys.exit(main())"
    words = ["train", "--config", str(config), "--run-dir", run_dir, "--logging.progress", "false"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_step(
    metrics: str | Path, step: int, process: subprocess.Popen[bytes], *, seconds: float = 300
) -> None:
    """Wait until a run has logged `step`; RuntimeError if the process ends before."""
    end = time.monotonic() + seconds
    while not any(row["step"] >= step for row in _rows(metrics)):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{metrics} has no row of step {step}")
        time.sleep(0.05)


def _rows(metrics: str | Path) -> list[dict[str, Any]]:
    """The rows that a run has logged so far."""
    return read_metrics(metrics) if Path(metrics).exists() else []


def by_command(command: Callable[[list[str]], int], *words: str) -> str:
    """What a command of `llm-course` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        with contextlib.redirect_stderr(io.StringIO()):
            command(list(words))
    return printed.getvalue()


@torch.no_grad()
def compare_with_transformers(run_dir: str | Path, folder: str | Path) -> None:
    """Assert that `transformers` gets our logits from an exported folder, and not without a norm.

    Prints the largest difference of both. AssertionError if the logits differ, or if those of a
    model that has lost its last norm don't.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ids = torch.arange(3, 27)[None]
    model, _ = load_run(run_dir)
    ours = model(ids).logits
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    right = (theirs(ids).logits - ours).abs().max().item()
    theirs.model.norm = torch.nn.Identity()
    wrong = (theirs(ids).logits - ours).abs().max().item()
    assert right < 1e-3 < wrong
    print(f"largest difference {right:.3f}; without the last norm {wrong:.0f}")


def model_card(run_dir: str | Path) -> str:
    """A model card, in Markdown, of nothing but what the run's folder says."""
    evidence = read_evidence(run_dir)
    config = evidence.config
    info = json.loads(Path(run_dir, "data", "info.json").read_text(encoding="utf-8"))
    measured = [row for row in evidence.rows if "val_bits_per_byte" in row][-1]
    shape = config.model
    model, tokenizer = load_run(run_dir)
    found = diagnose(evidence)
    lines = {
        "model": f"a decoder of {count_parameters(model.config).total:,} parameters: "
        f"{shape.num_layers} layers of width {shape.hidden_size}",
        "tokenizer": f"{type(tokenizer).__name__}, {tokenizer.vocab_size} entries"
        f" (sha256 {tokenizer.sha256[:12]})",
        "data": f"{info['source']}, {info['corpus_bytes']:,} bytes"
        f" (sha256 {info['corpus_sha256'][:12]})",
        "training": f"{measured['step']:,} steps, {measured['targets']:,} tokens,"
        f" {config.optimization.optimizer}, seed {config.training.seed}",
        "loss": f"{measured['val_loss']:.2f} nats per token,"
        f" {measured['val_bits_per_byte']:.2f} bits per byte on text that was held out",
        "held-out text in training": f"{evidence.text.overlap:.0%}",
        "curves": "normal" if found.is_normal else "; ".join(found.symptoms) or "unusual",
        "again with": f"`llm-course train --config {Path(run_dir).name}/config.yaml`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in lines.items())
    return f"# {Path(run_dir).name}\n\n| | |\n|---|---|\n{table}\n"


# ------------------------------------------------------------------------------- the storyteller


@cache
def storyteller_run() -> dict[str, Any]:
    """The recorded run of the storyteller: `rows` of its metrics, and `samples` by step."""
    stored = json.loads(STORYTELLER.read_text(encoding="utf-8"))
    stored["samples"] = {int(step): text for step, text in stored["samples"].items()}
    return stored


def plot_bits(rows: Sequence[Row], entropy: float) -> None:
    """Bits per byte over millions of tokens, and how far they are from the entropy."""
    measured = [row for row in rows if "val_bits_per_byte" in row]
    tokens = [row["targets"] / 1e6 for row in measured]
    bits = [row["val_bits_per_byte"] for row in measured]
    _, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    axes[0].plot(tokens, bits, "o-")
    axes[0].axhline(entropy, color="gray", linestyle=":")
    axes[0].set(ylabel="bits per byte", ylim=(0, None), title="The loss, and the entropy (dotted)")
    axes[1].plot(tokens, [b - entropy for b in bits], "o-", color="tab:red")
    axes[1].set(ylabel="bits above the entropy", yscale="log", title="What is left to learn")
    _plain_ticks(axes[1])
    for place in axes:
        place.set_xlabel("million tokens")
    plt.show()


def compare_rates(names: Sequence[str]) -> None:
    """The validation losses of recorded runs, each beside its learning rate."""
    _, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
    for name in names:
        evidence = load_faults()[name].evidence
        rate = evidence.config.optimization.learning_rate
        axes.plot(*column(evidence.rows, "val_loss"), "o-", label=f"{rate:g}")
    axes.set(xlabel="thousand tokens", ylabel="validation loss", title="Three learning rates")
    axes.legend(title="peak rate", fontsize=8)
    plt.show()


# ------------------------------------------------------------------------------ several processes


@cache
def two_processes() -> dict[str, Any]:
    """The small run on one process and on two, by name: its curves, and what its model writes."""
    return json.loads(TWO_PROCESSES.read_text(encoding="utf-8"))


def plot_processes(runs: Mapping[str, Any], band: Band) -> None:
    """The training losses of runs of 100 steps, over steps and over tokens."""
    _, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
    styles = zip(("tab:blue", "tab:orange", "tab:red"), (4, 1.5, 1.5), strict=True)
    for (name, run), (color, width) in zip(runs.items(), styles, strict=True):
        targets, losses = zip(*run["loss"], strict=True)
        steps = [100 * each / targets[-1] for each in targets]
        for place, x in zip(axes, (steps, [each / 1000 for each in targets]), strict=True):
            place.plot(x, losses, color=color, linewidth=width, label=name)
    places = [targets for targets, _ in runs["one process, 16 rows"]["loss"]]
    low, _, high = zip(*(band.interval("loss", each) for each in places), strict=True)
    axes[1].fill_between([x / 1000 for x in places], low, high, color="tab:green", alpha=0.3)
    axes[0].set(xlabel="steps", ylabel="loss", yscale="log", title="Over steps")
    axes[1].set(xlabel="thousand tokens", title="Over tokens, with the band of ten seeds")
    _plain_ticks(axes[0])
    axes[0].legend(fontsize=8)
    plt.show()


# -------------------------------------------------------------------------------------- the bands


def band_runs(name: str) -> dict[str, Any]:
    """What a band of the package is made from: its task, its knobs and the curves of its runs."""
    text = files("llm_course.training").joinpath("bands.json").read_text(encoding="utf-8")
    return json.loads(text)[name]


@cache
def fresh_seeds() -> dict[int, list[dict[str, float]]]:
    """Rows of healthy runs that no band has seen, by their seed."""
    found = {}
    for run in json.loads(FRESH_SEEDS.read_text(encoding="utf-8")):
        rows: dict[float, dict[str, float]] = {}
        for name in COLUMNS:
            for targets, value in run[name]:
                rows.setdefault(targets, {"targets": targets})[name] = value
        found[run["seed"]] = [rows[targets] for targets in sorted(rows)]
    return found


def plot_seeds(runs: Sequence[Mapping[str, Any]]) -> None:
    """The training and validation losses of runs that differ only in their seed."""
    _, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
    for name, place in zip(("loss", "val_loss"), axes, strict=True):
        for run in runs:
            targets, values = zip(*run[name], strict=True)
            place.plot([each / 1000 for each in targets], values, linewidth=1)
        place.set(xlabel="thousand tokens", ylabel=name, yscale="log")
        _plain_ticks(place)
    plt.show()

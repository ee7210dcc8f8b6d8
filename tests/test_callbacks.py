"""Callbacks see what happened, in order, once; their state is saved; and what they refuse they say."""

import copy
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llm_course.training.callbacks import (
    EarlyStopping,
    LossPlot,
    LRSchedulerCallback,
    MetricsLogger,
    ProgressBar,
    SampleWriter,
    TensorBoardLogger,
    WandbLogger,
    read_metrics,
)
from llm_course.training.config import Config, OptimizationConfig, TrainingConfig
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.task import RegressionTask


def make_engine(*callbacks, max_steps=12, **training) -> TrainingEngine:
    config = Config(
        training=TrainingConfig(**(dict(max_steps=max_steps, eval_interval=4, precision="fp32", device="cpu") | training)),
        optimization=OptimizationConfig(learning_rate=0.05, schedule="constant", warmup_steps=1, weight_decay=0.0),
    )
    task = RegressionTask(config)
    return TrainingEngine(config, task, task.build_data(), list(callbacks))


class Hooks(Callback):
    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda engine, *rest: self.seen.append((name, engine.state.step))
        return super().__getattribute__(name)


def test_every_hook_is_called_at_its_time():
    hooks = Hooks()
    make_engine(hooks, max_steps=30).run()  # 448 rows, 16 a batch: 28 steps an epoch
    assert hooks.seen[:3] == [("on_train_start", 0), ("on_epoch_start", 0), ("on_step_end", 1)]
    names = [name for name, _ in hooks.seen]
    declared = {name for name in vars(Callback) if name.startswith("on_")}
    assert set(names) == declared - {"on_exception"}
    assert names.count("on_epoch_start") == 2
    assert hooks.seen.index(("on_epoch_end", 28)) < hooks.seen.index(("on_epoch_start", 28))
    assert names.count("on_step_end") == 30 and names[-1] == "on_train_end"
    at_four = [name for name, step in hooks.seen if step == 4]
    assert at_four == ["on_validation_start", "on_validation_end", "on_step_end"]


def test_the_log_holds_the_mean_over_all_targets_since_the_row_before(tmp_path):
    seen = []

    class Keep(Callback):
        def on_step_end(self, engine, metrics):
            seen.append((metrics["loss_sum"], metrics["num_targets"]))

    make_engine(Keep(), MetricsLogger(tmp_path, log_interval=5), max_steps=12, batch_size=30).run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 5, 8, 10, 12]
    sums, counts = zip(*seen[5:8], strict=True)
    assert rows[2]["loss"] == pytest.approx(sum(sums) / sum(counts)) and rows[2]["targets"] == sum(c for _, c in seen[:8])


def test_the_console_table_has_a_line_for_each_row(tmp_path):
    lines = []
    make_engine(MetricsLogger(tmp_path, log_interval=6, print_row=lines.append)).run()
    assert lines[0].split() == list(MetricsLogger.COLUMNS) and len(lines) == 1 + 4
    assert len({len(line) for line in lines}) == 1 and lines[2].split()[0] == "6"


def events(folder: Path) -> dict[str, list[int]]:
    steps: dict[str, list[int]] = {}
    for file in sorted(folder.glob("events*")):
        accumulator = EventAccumulator(str(file))
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            steps.setdefault(tag, []).extend(event.step for event in accumulator.Scalars(tag))
    return steps


def test_after_a_resume_no_step_appears_twice(tmp_path):
    def build(max_steps):
        return make_engine(MetricsLogger(tmp_path, log_interval=2), TensorBoardLogger(tmp_path / "tb"), max_steps=max_steps)

    class Keep(Callback):
        def on_step_end(self, engine, metrics):
            if engine.state.step == 4:
                self.kept = copy.deepcopy(engine.state_dict())

    first, keep = build(8), Keep()
    first.callbacks.append(keep)
    first.run()
    second = build(8)
    second.setup(keep.kept)
    second.run()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4, 6, 8]
    multiplexed = EventAccumulator(str(tmp_path / "tb"))
    multiplexed.Reload()
    assert [event.step for event in multiplexed.Scalars("loss")] == [2, 4, 6, 8]
    assert {"loss", "val_loss", "grad_norm", "learning_rate"} <= set(multiplexed.Tags()["scalars"])


def test_early_stopping_waits_for_its_patience_and_survives_a_resume():
    stopper = EarlyStopping(patience=2, min_delta=0.1)
    engine = types.SimpleNamespace(stopped=None)
    engine.stop = lambda reason: setattr(engine, "stopped", reason)
    for value in (5.0, 4.0, 3.95):
        stopper.on_validation_end(engine, {"val_loss": value})
    assert engine.stopped is None and stopper.waited == 1
    other = EarlyStopping(patience=2, min_delta=0.1)
    other.load_state_dict(json.loads(json.dumps(stopper.state_dict())))
    other.on_validation_end(engine, {"val_loss": math.nan})
    assert engine.stopped == "no better val_loss in 2 validations"


def test_early_stopping_counts_upwards_where_more_is_better():
    stopper, engine = EarlyStopping(patience=1, metric="accuracy", mode="max"), types.SimpleNamespace(stop=lambda reason: None)
    stopper.on_validation_end(engine, {"accuracy": 0.5})
    stopper.on_validation_end(engine, {"accuracy": 0.6})
    assert stopper.waited == 0
    with pytest.raises(ValueError, match="metric='accuracy' is not measured; there are val_loss"):
        stopper.on_validation_end(engine, {"val_loss": 1.0})


@pytest.mark.parametrize("settings", [dict(patience=0), dict(patience=1, mode="least"), dict(patience=1, min_delta=-1.0)])
def test_early_stopping_refuses_nonsense(settings):
    with pytest.raises(ValueError, match="must be at least 1"):
        EarlyStopping(**settings)


def test_the_learning_rate_falls_on_a_plateau_and_stays_low_after_a_resume():
    class Flat(RegressionTask):
        def validation_step(self, model, batch):
            output = super().validation_step(model, batch)
            return output._replace(loss_sum=output.num_targets.float())  # always 1

    def build(lower):
        engine = make_engine(lower)
        engine.task = Flat(engine.config)
        return engine

    lower = LRSchedulerCallback(factor=0.5, patience=1)
    engine = build(lower)
    engine.run()  # validations at 4, 8 and 12: the first is the best, the two others lower the rate
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 4) and lower.scale == 0.25
    resumed = build(LRSchedulerCallback(factor=0.5, patience=1))
    resumed.setup(engine.state_dict())
    resumed._call("on_train_start")
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 4)
    with pytest.raises(ValueError, match=r"factor=2 must lie in \(0, 1\)"):
        LRSchedulerCallback(factor=2)


def test_samples_are_written_and_logged(tmp_path):
    writer = SampleWriter(tmp_path, interval=5, sample=lambda model: f"weight {tuple(model.weight.shape)}")
    make_engine(writer, TensorBoardLogger(tmp_path / "tb")).run()
    text = (tmp_path / "samples.txt").read_text(encoding="utf-8")
    assert text == "--- step 5\nweight (1, 8)\n--- step 10\nweight (1, 8)\n"
    accumulator = EventAccumulator(str(tmp_path / "tb"))
    accumulator.Reload()
    assert "sample/text_summary" in accumulator.Tags()["tensors"]


def test_loss_plot_is_a_picture_of_the_log(tmp_path):
    make_engine(MetricsLogger(tmp_path, log_interval=3), LossPlot(tmp_path)).run()
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_wandb_is_asked_for_by_name_and_gets_the_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="needs the package wandb: pip install wandb"):
        WandbLogger(tmp_path, project="p")
    rows, run = {}, types.SimpleNamespace(id="abc", finish=lambda **k: rows.setdefault("end", k))
    run.log = lambda row, step: rows.update({step: row})
    asked = {}
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **k: asked.update(k) or run))
    logger = WandbLogger(tmp_path, project="p")
    make_engine(MetricsLogger(tmp_path, log_interval=4), logger).run()
    assert sorted(step for step in rows if step != "end") == [4, 8, 12] and "val_loss" in rows[4] and rows["end"] == {}
    assert asked["project"] == "p" and asked["config"]["training"]["max_steps"] == 12
    again = WandbLogger(tmp_path, project="p")
    again.load_state_dict(logger.state_dict())
    again.on_train_start(make_engine())
    assert asked["id"] == "abc" and asked["resume"] == "allow"


# Case 20
def test_a_callback_that_raises_is_named_and_the_others_are_closed(tmp_path):
    class Broken(Callback):
        def on_step_end(self, engine, metrics):
            if engine.state.step == 3:
                raise RuntimeError("no more ink")

    closed = []

    class Careful(Callback):
        def on_exception(self, engine, error):
            closed.append(str(error))

    bar = ProgressBar()
    with pytest.raises(RuntimeError, match="no more ink") as caught:
        make_engine(Careful(), Broken(), bar, TensorBoardLogger(tmp_path / "tb"), Careful()).run()
    assert caught.value.__notes__ == ["raised by Broken.on_step_end"]
    assert closed == ["no more ink"] * 2 and bar._bar.disable


def test_metrics_are_plain_numbers_when_callbacks_see_them():
    kinds = set()

    class Look(Callback):
        def on_step_end(self, engine, metrics):
            kinds.update(type(value) for value in metrics.values())

    make_engine(Look()).run()
    assert kinds == {int, float} and torch.Tensor not in kinds

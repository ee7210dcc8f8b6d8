"""Callbacks see what happened, in order, once; their state is saved; they say what they refuse."""

import copy
import json
import math
import sys
import types
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.summary.writer import event_file_writer

from llm_course.model.config import ModelConfig
from llm_course.text.data import SyntheticDataModule
from llm_course.training.callbacks import (
    EarlyStopping,
    LossPlot,
    LRSchedulerCallback,
    MetricsLogger,
    ProgressBar,
    SampleWriter,
    TensorBoardLogger,
    WandbLogger,
    plot_losses,
    read_metrics,
)
from llm_course.training.config import Config, OptimizationConfig, TrainingConfig
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.hooks import batch_teller
from llm_course.training.lr_finder import LearningRateCurve, find_learning_rate, trial
from llm_course.training.monitoring import PerformanceMonitor
from llm_course.training.task import LanguageModelingTask, RegressionTask


def make_engine(*callbacks, max_steps=12, **training) -> TrainingEngine:
    config = Config(
        training=TrainingConfig(
            **(
                dict(max_steps=max_steps, eval_interval=4, precision="fp32", device="cpu")
                | training
            )
        ),
        optimization=OptimizationConfig(
            learning_rate=0.05, schedule="constant", warmup_steps=1, weight_decay=0.0
        ),
    )
    task = RegressionTask(config)
    return TrainingEngine(config, task, task.build_data(), list(callbacks))


class Keep(Callback):
    """The states after every `every` steps."""

    def __init__(self, every):
        self.every = every
        self.states = {}

    def on_step_end(self, engine, metrics):
        if engine.state.step % self.every == 0:
            self.states[engine.state.step] = copy.deepcopy(engine.state_dict())


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
    assert hooks.seen[:2] == [("on_train_start", 0), ("on_epoch_start", 0)]
    assert hooks.seen[2:4] == [("on_batch_end", 0), ("on_step_end", 1)]
    names = [name for name, _ in hooks.seen]
    declared = {name for name in vars(Callback) if name.startswith("on_")}
    assert set(names) == declared - {"on_exception"}
    assert names.count("on_epoch_start") == 2
    assert hooks.seen.index(("on_epoch_end", 28)) < hooks.seen.index(("on_epoch_start", 28))
    assert names.count("on_step_end") == 30 and names[-1] == "on_train_end"
    at_four = [name for name, step in hooks.seen if step == 4]
    assert at_four[:3] == ["on_validation_start", "on_validation_end", "on_step_end"]


def test_micro_batches_add_up_to_their_step_and_cost_nothing_unheard():
    batches, steps = [], []

    class Listener(Callback):
        def on_batch_end(self, engine, metrics):
            batches.append((metrics["batch"], float(metrics["loss_sum"])))
            assert int(metrics["num_targets"]) > 0

        def on_step_end(self, engine, metrics):
            steps.append(metrics["loss_sum"])

    make_engine(Listener(), max_steps=3, gradient_accumulation_steps=4).run()
    assert [number for number, _ in batches] == list(range(12))
    sums = [sum(loss for _, loss in batches[start : start + 4]) for start in (0, 4, 8)]
    assert sums == pytest.approx(steps)
    deaf = make_engine(max_steps=1)
    deaf.run()
    assert batch_teller(deaf) is None


def test_intervals_may_be_an_epoch(tmp_path):
    hooks = Hooks()
    config_of = dict(max_steps=None, max_epochs=3, eval_interval="epoch")
    make_engine(hooks, MetricsLogger(tmp_path, log_interval="epoch"), **config_of).run()
    assert [step for name, step in hooks.seen if name == "on_validation_end"] == [28, 56, 84]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [28, 56, 84]
    with pytest.raises(ValueError, match="log_interval='week' must be a whole number"):
        MetricsLogger(tmp_path, log_interval="week")


def test_the_log_holds_the_mean_over_all_targets_since_the_row_before(tmp_path):
    seen = []

    class Keep(Callback):
        def on_step_end(self, engine, metrics):
            seen.append((metrics["loss_sum"], metrics["num_targets"]))

    make_engine(Keep(), MetricsLogger(tmp_path, log_interval=5), max_steps=12, batch_size=30).run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 5, 8, 10, 12]
    sums, counts = zip(*seen[5:8], strict=True)
    assert rows[2]["loss"] == pytest.approx(sum(sums) / sum(counts)) and rows[2]["targets"] == sum(
        c for _, c in seen[:8]
    )


def test_the_console_table_has_a_line_for_each_row(tmp_path):
    lines = []
    make_engine(MetricsLogger(tmp_path, log_interval=6, print_row=lines.append)).run()
    assert lines[0].split() == list(MetricsLogger.COLUMNS) and len(lines) == 1 + 4
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split()[:3] == ["6", "0", "6/28"]
    assert "28/28" in _table(tmp_path, max_steps=None, max_epochs=1)[-1]


def _table(folder, **settings) -> list[str]:
    lines = []
    monitor = PerformanceMonitor(log_interval=1)
    logger = MetricsLogger(folder / "table", log_interval=1, print_row=lines.append)
    make_engine(monitor, logger, **settings).run()
    assert float(lines[1].split()[-1].replace(",", "")) > 0  # milliseconds a batch
    return lines


def events(folder: Path) -> dict[str, list[int]]:
    steps: dict[str, list[int]] = {}
    for file in sorted(folder.glob("events*")):
        accumulator = EventAccumulator(str(file))
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            steps.setdefault(tag, []).extend(event.step for event in accumulator.Scalars(tag))
    return steps


def test_after_a_resume_no_step_appears_twice(tmp_path, monkeypatch):
    # files sort by it in one second
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def build(max_steps):
        return make_engine(
            MetricsLogger(tmp_path, log_interval=2),
            TensorBoardLogger(tmp_path / "tb"),
            max_steps=max_steps,
        )

    first = build(8)
    keep = Keep(4)
    first.callbacks.append(keep)
    first.run()
    second = build(8)
    second.setup(keep.states[4])
    second.run()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4, 6, 8]
    multiplexed = EventAccumulator(str(tmp_path / "tb"))
    multiplexed.Reload()
    assert [event.step for event in multiplexed.Scalars("loss")] == [2, 4, 6, 8]
    for tag in multiplexed.Tags()["scalars"]:
        steps = [event.step for event in multiplexed.Scalars(tag)]
        assert len(set(steps)) == len(steps), tag
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
    stopper = EarlyStopping(patience=1, metric="accuracy", mode="max")
    engine = types.SimpleNamespace(stop=lambda reason: None)
    stopper.on_validation_end(engine, {"accuracy": 0.5})
    stopper.on_validation_end(engine, {"accuracy": 0.6})
    assert stopper.waited == 0
    with pytest.raises(
        ValueError, match="metric='accuracy' is not measured: choose one of val_loss"
    ):
        stopper.on_validation_end(engine, {"val_loss": 1.0})


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(patience=0), "patience=0 must be a whole number of at least 1"),
        (dict(patience=1, mode="least"), "mode='least' is unknown: choose one of 'min', 'max'"),
        (dict(patience=1, min_delta=-1.0), "min_delta=-1.0 must be finite and not negative"),
    ],
)
def test_early_stopping_refuses_nonsense(settings, message):
    with pytest.raises(ValueError, match=message):
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
    resumed.callbacks.call("on_train_start", resumed)
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 4)
    with pytest.raises(ValueError, match="factor=2 must be above 0 and below 1"):
        LRSchedulerCallback(factor=2)


def test_samples_are_written_and_logged(tmp_path):
    writer = SampleWriter(
        tmp_path, interval=5, sample=lambda model: f"weight {tuple(model.weight.shape)}"
    )
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
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **k: asked.update(k) or run)
    )
    logger = WandbLogger(tmp_path, project="p")
    make_engine(MetricsLogger(tmp_path, log_interval=4), logger).run()
    assert (
        sorted(step for step in rows if step != "end") == [4, 8, 12]
        and "val_loss" in rows[4]
        and rows["end"] == {}
    )
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


def test_the_log_goes_on_where_the_state_was_although_a_row_was_torn(tmp_path):
    def run(folder, max_steps, state=None):
        engine = make_engine(
            MetricsLogger(folder, log_interval=3),
            keep := Keep(4),
            max_steps=max_steps,
            eval_interval=8,
        )
        engine.setup(state)
        engine.run()
        return keep.states[4] if state is None else None

    state = run(tmp_path / "straight", 8)
    run(tmp_path / "killed", 7)
    path = tmp_path / "killed" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 7, "lo')
    run(tmp_path / "killed", 8, state)
    # row 6 covers steps 4, 5 and 6
    assert read_metrics(path) == read_metrics(tmp_path / "straight" / "metrics.jsonl")
    assert [row["step"] for row in read_metrics(path)] == [3, 6, 8]


def test_a_metric_may_be_a_tensor_of_one_number(tmp_path):
    class Tell(Callback):
        def on_step_end(self, engine, metrics):
            metrics["norm"] = engine.model.weight.detach().norm()

    make_engine(Tell(), MetricsLogger(tmp_path, log_interval=1), max_steps=1).run()
    assert isinstance(read_metrics(tmp_path / "metrics.jsonl")[0]["norm"], float)


@pytest.mark.parametrize(
    "build",
    [lambda f: MetricsLogger(f, log_interval=0), lambda f: SampleWriter(f, interval=0, sample=str)],
)
def test_an_interval_of_nothing_is_refused(build, tmp_path):
    with pytest.raises(ValueError, match="interval=0 must be a whole number of at least 1"):
        build(tmp_path)


def test_the_plot_names_a_unit_for_text_only(tmp_path):
    titles = []
    for more in ({}, {"val_bits_per_byte": 1.0}):
        row = {"step": 5, "loss": 2.0, "val_loss": 3.0} | more
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        with patch(
            "llm_course.training.reports.draw_lines",
            lambda *a, **labels: titles.append(labels["title"]),
        ):
            plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (
        titles[0] == "Validation loss 3.00 after 5 steps"
        and "nats per token" in titles[1]
        and "1.00 bits" in titles[1]
    )


def test_early_stopping_agrees_with_its_definition():
    def stops_at(values, patience):
        ends = range(patience + 1, len(values) + 1)
        return next(
            (
                end
                for end in ends
                if min(values[end - patience : end]) >= min(values[: end - patience])
            ),
            None,
        )

    random = torch.Generator().manual_seed(0)
    for values in torch.randint(0, 12, (200, 12), generator=random).tolist():
        stopper = EarlyStopping(patience=3)
        stopped = []
        engine = types.SimpleNamespace(stop=stopped.append)
        seen = 0
        while seen < len(values) and not stopped:
            stopper.on_validation_end(engine, {"val_loss": values[seen]})
            seen += 1
        assert (seen if stopped else None) == stops_at(values, 3)


def test_a_resumed_run_stops_at_the_step_of_the_straight_one():
    class Forgetful(EarlyStopping):
        def load_state_dict(self, state):
            pass

    def last_step(stopper, state=None, *more):
        engine = make_engine(stopper, *more, max_steps=300, eval_interval=10, batch_size=150)
        engine.setup(copy.deepcopy(state))
        engine.run()
        return engine.state.step

    straight = last_step(EarlyStopping(patience=3, min_delta=0.01), None, keep := Keep(10))
    late = straight - 10
    assert (
        straight < 300
        and last_step(EarlyStopping(patience=3, min_delta=0.01), keep.states[late]) == straight
    )
    assert last_step(Forgetful(patience=3, min_delta=0.01), keep.states[late]) > straight


def test_the_lowered_rates_are_those_of_reduce_lr_on_plateau():
    class Rates(Callback):
        def __init__(self):
            self.rows = []

        def on_step_end(self, engine, metrics):
            if "val_loss" in metrics:
                self.rows.append((metrics["val_loss"], engine.optimizer.param_groups[0]["lr"]))

    rates = Rates()
    engine = make_engine(
        LRSchedulerCallback(factor=0.5, patience=2), rates, max_steps=150, eval_interval=5
    )
    engine.run()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    oracle = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=1, threshold=0.0
    )
    for value, rate in rates.rows:
        oracle.step(value)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
    assert rates.rows[-1][1] < 0.05
    engine.callbacks.call("on_train_start", engine)  # again: nothing is multiplied twice
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(rates.rows[-1][1])
    with pytest.raises(
        ValueError, match="metric='accuracy' is not measured: choose one of val_loss"
    ):
        make_engine(LRSchedulerCallback(metric="accuracy")).run()


def test_tensorboard_has_hyperparameters_as_numbers_and_each_final_once(tmp_path, monkeypatch):
    # files sort by it in one second
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def run(max_steps, state=None):
        engine = make_engine(
            MetricsLogger(tmp_path), TensorBoardLogger(tmp_path), max_steps=max_steps
        )
        engine.setup(state)
        engine.run()
        return copy.deepcopy(engine.state_dict())

    run(8, run(4))
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    content = reader.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert (
        settings["training.batch_size"].number_value == 16 and settings["task"].string_value == "lm"
    )
    assert [event.step for event in reader.Scalars("final/val_loss")] == [4, 8]
    assert [event.step for event in reader.Tensors("config/text_summary")] == [0]


def test_what_is_before_a_checkpoint_is_in_the_event_file(tmp_path, monkeypatch):
    engine = make_engine(
        MetricsLogger(tmp_path, log_interval=1), TensorBoardLogger(tmp_path / "tb")
    )
    engine.setup()
    engine.callbacks.call("on_train_start", engine)
    engine.state.step = 1
    engine.callbacks.call("on_step_end", engine, {"loss_sum": 2.0, "num_targets": 1})
    writer = engine.callbacks[1]._writer
    assert writer is not None
    # the writer's own thread may flush at any time as well
    flushes = []
    flush = writer.flush
    monkeypatch.setattr(writer, "flush", lambda: (flush(), flushes.append("by the callback")))
    engine.state_dict()  # as a kill -9 right after the save would leave it
    assert flushes == ["by the callback"] and events(tmp_path / "tb")["loss"] == [1]
    engine.callbacks.call_on_exception(engine, RuntimeError())


class Noisy(RegressionTask):
    def build_model(self, data):
        return torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )


def noisy_engine(*callbacks, task=Noisy, **training):
    engine = make_engine(*callbacks, **training)
    engine.task = task(engine.config)
    return engine


def test_who_watches_leaves_no_trace(tmp_path):
    def meddling(model):
        assert not model.training and not torch.is_grad_enabled()
        model.train()
        return f"{model(torch.randn(1, 8)).item()}"

    loggers = (
        MetricsLogger(tmp_path),
        TensorBoardLogger(tmp_path),
        LossPlot(tmp_path),
        EarlyStopping(patience=9),
    )
    watched = noisy_engine(SampleWriter(tmp_path, interval=2, sample=meddling), *loggers)
    alone = noisy_engine()
    watched.run(), alone.run()
    assert watched.metrics == alone.metrics and same(
        watched.state_dict()["rng"], alone.state_dict()["rng"]
    )

    def broken(model):
        torch.rand(1)
        raise RuntimeError("no text")

    engine = noisy_engine(SampleWriter(tmp_path, interval=2, sample=broken))
    with pytest.raises(RuntimeError, match="no text") as caught:
        engine.run()
    assert (
        caught.value.__notes__ == ["raised by SampleWriter.on_step_end"] and engine.model.training
    )


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Explodes(Noisy):
    calls = 0

    def train_step(self, model, batch):
        self.calls += 1
        self.kept = batch["x"]
        return super().train_step(
            model, batch | {"y": batch["y"] * (math.inf if self.calls > 25 else 1.0)}
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("task", [Noisy, Explodes])
def test_a_range_test_puts_everything_back(task, precision):
    """In the middle of an epoch, with windows of two, also where it ends in an infinite loss; the
    run after it is the same.
    """

    def resumed(search):
        engine = noisy_engine(
            Keep(4), task=task, precision=precision, gradient_accumulation_steps=2
        )
        engine.setup(copy.deepcopy(state))
        before = copy.deepcopy(engine.state_dict())
        attributes = dict(vars(engine.task))
        if search:
            curve = find_learning_rate(engine, num_steps=40)
            assert (
                same(engine.state_dict(), before)
                and vars(engine.task) == attributes
                and not engine.in_step
            )
            assert (curve.losses[-1] == math.inf) == (task is Explodes) and len(curve.rates) == len(
                curve.losses
            )
            assert (
                engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
                and engine.data_seconds == 0.0
            )
        engine.run()
        return engine.state_dict()

    first = noisy_engine(
        keep := Keep(4), task=Noisy, precision=precision, gradient_accumulation_steps=2
    )
    first.run()
    state = keep.states[4]
    assert same(*(ended | {"callbacks": None} for ended in (resumed(False), resumed(True))))


@pytest.mark.parametrize("forgotten", ["model", "optimizer", "rng"])
def test_a_range_test_that_forgets_a_part_is_found(forgotten):
    def run_after(search):
        engine = noisy_engine()
        engine.setup()
        back = engine.load_state_dict
        with patch.object(
            engine,
            "load_state_dict",
            lambda state: back(state | {forgotten: engine.state_dict()[forgotten]}),
        ):
            if search:
                find_learning_rate(engine, num_steps=20)
        return engine.run()

    assert run_after(True) != run_after(False)


class Descent(RegressionTask):
    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_range_test_measures_what_algebra_predicts():
    """Full batches, plain gradient descent: the loss is known at each rate, and explodes soon after
    2 / largest eigenvalue.
    """
    engine = noisy_engine(task=Descent, batch_size=448, max_grad_norm=1e9)
    curve = find_learning_rate(engine, lowest=1e-3, smoothing=0.0)
    data = engine.data.train_dataset
    x = torch.cat([data.x, torch.ones(448, 1)], dim=1).double()
    y = data.y.double()
    hessian = 2 * x.T @ x / 448
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    error = (
        torch.cat(
            [parameter.detach().flatten() for parameter in engine.model.parameters()]
        ).double()
        - best
    )
    limit = 2 / torch.linalg.eigvalsh(hessian).max().item()
    for rate, loss in zip(curve.rates, curve.losses, strict=True):
        if rate > limit:
            break
        assert loss == pytest.approx(
            ((x @ best - y).square().mean() + error @ hessian @ error / 2).item(), rel=1e-4
        )
        error = error - rate * hessian @ error
    assert limit < curve.rates[-1] < 6 * limit and curve.smoothed == curve.losses
    ratios = [b / a for a, b in zip(curve.rates, curve.rates[1:], strict=False)]
    assert min(ratios) == pytest.approx(max(ratios)) and curve.rates[0] == 1e-3


class Copying(LanguageModelingTask):
    def build_data(self):
        return SyntheticDataModule(
            num_examples=200, length=4, batch_size=8, seed=self.config.training.seed
        )

    def metrics(self, loss, data):
        return {}


def test_the_suggested_rate_beats_a_tenth_and_ten_times_of_it():
    def engine(rate=1e-3):
        config = Config(
            model=ModelConfig(hidden_size=32, num_layers=1, num_heads=2),
            training=TrainingConfig(
                max_steps=60, eval_interval=60, batch_size=8, seed=3, precision="fp32", device="cpu"
            ),
            optimization=OptimizationConfig(learning_rate=rate, warmup_steps=10),
        )
        task = Copying(config)
        return TrainingEngine(config, task, task.build_data())

    rate = find_learning_rate(engine()).suggest()  # the page does it with seeds 0 to 2
    tenth, once, ten = (engine(rate * multiple).run()["val_loss"] for multiple in (0.1, 1, 10))
    assert once < tenth / 3 and once < ten / 3


def test_a_curve_suggests_only_what_it_has_seen(tmp_path):
    def curve(*losses):
        return LearningRateCurve(
            [10.0 ** (place - 3) for place in range(len(losses))], list(losses), list(losses)
        )

    assert curve(5.0, 2.0, 3.0).suggest() == pytest.approx(1e-3) and curve(
        5.0, 2.0, math.inf
    ).suggest() == pytest.approx(1e-3)
    for one_sided in (curve(5.0, 6.0, 7.0), curve(5.0, 4.0, 3.0)):
        with pytest.raises(ValueError, match="where the test ends: widen its range"):
            one_sided.suggest()
    curve(5.0, 2.0, math.inf).plot(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(lowest=0.0), "lowest=0.0 must be positive and finite"),
        (dict(lowest=1.0, highest=0.5), "highest=0.5 must be finite and above 1.0"),
        (dict(num_steps=1), "num_steps=1 must be a whole number of at least 2"),
        (dict(smoothing=1.0), "smoothing=1.0 must be at least 0 and below 1"),
    ],
)
def test_a_range_test_refuses_nonsense(wrong, message):
    with pytest.raises(ValueError, match=message):
        find_learning_rate(make_engine(), **wrong)


def test_a_range_test_refuses_several_processes():
    engine = make_engine()
    engine.runtime = types.SimpleNamespace(world_size=2)
    with pytest.raises(
        ValueError,
        match="the search runs in one process: multiply training.gradient_accumulation_steps by",
    ):
        find_learning_rate(engine)


def test_a_trial_leaves_no_trace_even_where_it_fails():
    """A loop of one's own around the engine's step, which breaks off in the middle of one."""
    engine = noisy_engine(task=Noisy)
    engine.setup()
    before = copy.deepcopy(engine.state_dict())
    batches = list(engine.data.train_dataloader(epoch=0))
    with pytest.raises(KeyboardInterrupt), trial(engine):
        engine.train_model.train()
        for batch in batches[:3]:
            engine.optimizer_step([batch])
        assert engine.state.step == 3 and not same(engine.state_dict(), before)
        engine.in_step = True
        raise KeyboardInterrupt
    assert same(engine.state_dict(), before) and not engine.in_step
    assert engine.run() == noisy_engine(task=Noisy).run()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_range_test_ends_where_the_loss_explodes_and_calls_no_hook(precision):
    hooks = Hooks()
    engine = noisy_engine(hooks, task=Descent, precision=precision, max_grad_norm=1e9)
    curve = find_learning_rate(engine, highest=1e6)
    assert (
        len(curve.rates) < 100
        and max(curve.smoothed[:-1]) <= 4 * min(curve.smoothed) + curve.smoothed[0]
    )
    assert hooks.seen == [] and engine.state.step == 0
    engine.run()  # as if nothing had been
    assert hooks.seen[-1] == ("on_train_end", 12)


def test_wandb_itself_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    make_engine(MetricsLogger(tmp_path, log_interval=4), WandbLogger(tmp_path, project="p")).run()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))

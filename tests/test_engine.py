"""The engine against answers that it did not compute: algebra, plain PyTorch, a run that was never
stopped.
"""

import copy
import math
import os
import random
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from llm_course.model.config import ModelConfig
from llm_course.text.data import BaseDataModule, SyntheticDataModule
from llm_course.training.config import CheckpointConfig, Config, OptimizationConfig, TrainingConfig
from llm_course.training.engine import Callback, StepEngine, TrainingEngine, mean_loss
from llm_course.training.epoch import Epoch, planned_steps
from llm_course.training.hooks import CallbackList
from llm_course.training.precision import MixedPrecision
from llm_course.training.runtime import Runtime
from llm_course.training.state import TrainState
from llm_course.training.task import LanguageModelingTask, RegressionTask, StepOutput, TrainingTask
from llm_course.training.window import group_micro_batches

NO_LIMIT = 1e9


class Rows:
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitems__(self, indices):
        return {name: column[indices] for name, column in self.columns.items()}


class Points(BaseDataModule):
    """y = 3 x + 1; a third of the rows has no target."""

    def __init__(self, batch_size=4, *, rows=21, val_rows=9, masked=()):
        self.batch_size = batch_size
        self.rows = rows
        self.val_rows = val_rows
        self.masked = masked

    def setup(self):
        total = self.rows + self.val_rows
        x = torch.rand(total, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
        columns = {"x": x, "y": 3 * x + 1, "use": torch.arange(total) % 3 > 0}
        columns["use"][list(self.masked)] = False
        self.train_dataset = Rows({name: column[: self.rows] for name, column in columns.items()})
        self.val_dataset = Rows({name: column[self.rows :] for name, column in columns.items()})

    def fingerprint(self):
        return {"batch_size": self.batch_size, "rows": self.rows}


class Line(TrainingTask):
    """Keeps the gradients of each update."""

    DROPOUT = 0.0
    SGD = False

    def __init__(self, config):
        super().__init__(config)
        self.gradients = []

    def build_criterion(self):
        return nn.MSELoss(reduction="sum")

    def build_model(self, data):
        return nn.Sequential(nn.Linear(1, 4), nn.Dropout(self.DROPOUT), nn.Linear(4, 1))

    def build_optimizer(self, model):
        return (
            torch.optim.SGD(model.parameters(), lr=1.0)
            if self.SGD
            else super().build_optimizer(model)
        )

    def train_step(self, model, batch):
        use = batch["use"]
        return StepOutput(self.criterion(model(batch["x"])[use], batch["y"][use]), use.sum())

    def after_update(self, model, sum_over_ranks):
        self.gradients.append([parameter.grad.clone() for parameter in model.parameters()])


class Noisy(Line):
    DROPOUT = 0.3


class Record(Callback):
    def __init__(self):
        self.rows = []
        self.weights = []

    def on_step_end(self, engine, metrics):
        self.rows.append(dict(metrics))
        self.weights.append(copy.deepcopy(engine.model.state_dict()))

    @property
    def losses(self):
        return [row["loss_sum"] / max(row["num_targets"], 1) for row in self.rows]


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, engine, metrics):
        if engine.state.step == self.step:
            engine.stop("the test asked for it")


def make(
    task=Line,
    data=None,
    callbacks=(),
    *,
    schedule="cosine",
    optimizer="adamw",
    allow_changes=False,
    **training,
):
    training = dict(device="cpu", precision="fp32", max_grad_norm=NO_LIMIT, batch_size=4) | training
    config = Config(
        model=ModelConfig(vocab_size=11, hidden_size=16, num_layers=1, num_heads=2),
        training=TrainingConfig(**training),
        optimization=OptimizationConfig(
            learning_rate=0.05,
            warmup_steps=0,
            weight_decay=0.0,
            schedule=schedule,
            optimizer=optimizer,
        ),
        checkpoint=CheckpointConfig(allow_changes=allow_changes),
    )
    return TrainingEngine(
        config, task(config), data or Points(config.training.batch_size), callbacks
    )


def same(a, b):
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# ---------------------------------------------------------------- the right answer


def regression(**training):
    config = Config(
        training=TrainingConfig(device="cpu", precision="fp32", **training),
        optimization=OptimizationConfig(
            learning_rate=0.05,
            warmup_steps=0,
            weight_decay=0.0,
            schedule="linear",
            min_lr_ratio=0.0,
        ),
    )
    task = RegressionTask(config)
    return TrainingEngine(config, task, task.build_data())


def test_reaches_the_least_squares_solution():
    engine = regression(batch_size=448, max_steps=250, eval_interval=1000)
    engine.run()
    found = torch.cat([engine.model.weight.detach()[0], engine.model.bias.detach()])
    assert_close(found, engine.data.solution(), atol=1e-3, rtol=0)


def test_equals_a_loop_in_plain_pytorch():
    """Its own accumulation, clip, AdamW and learning rates; windows of 3 with a short tail."""
    engine = regression(
        batch_size=16, gradient_accumulation_steps=3, max_epochs=2, max_grad_norm=0.5
    )
    engine.run()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.0, fused=False
    )
    step = 0
    for epoch in range(2):
        batches = list(engine.data.train_dataloader(epoch=epoch))
        assert len(batches) % 3
        for start in range(0, len(batches), 3):
            window = batches[start : start + 3]
            x, y = (torch.cat([batch[name] for batch in window]) for name in "xy")
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x)[:, 0], y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / engine.max_steps)
            optimizer.step()
            step += 1
    assert (engine.state.step, engine.max_steps) == (step, step)
    assert_close(list(engine.model.parameters()), list(model.parameters()), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- accumulation and clipping


class Ragged(BaseDataModule):
    """Eight rows of token ids; row i has i + 1 targets."""

    vocab_size = 11

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def setup(self):
        ids = torch.randint(11, (8, 10), generator=torch.Generator().manual_seed(0))
        labels = ids.masked_fill(torch.arange(10) > torch.arange(8)[:, None], -100)
        self.train_dataset = self.val_dataset = Rows({"input_ids": ids, "labels": labels})


class KeepingLM(LanguageModelingTask):
    def after_update(self, model, sum_over_ranks):
        self.gradients = [parameter.grad.clone() for parameter in model.parameters()]

    def metrics(self, loss, data):
        return {}


def test_one_times_eight_rows_equals_four_times_two():
    whole, parts = (
        make(
            KeepingLM,
            Ragged(size),
            batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_steps=1,
        )
        for size in (8, 2)
    )
    whole.run(), parts.run()
    assert whole.state.targets == parts.state.targets == 36 and parts.state.epoch == 1
    assert_close(parts.task.gradients, whole.task.gradients, atol=1e-6, rtol=1e-4)
    # planted: the mean of the micro-batches' means is another gradient
    model = whole.task.build_model(whole.data)
    whole.setup()
    model.load_state_dict(whole.model.state_dict())
    for batch in parts.data.train_dataloader(epoch=0):
        output = model(**batch)
        (output.loss_sum / output.num_targets / 4).backward()
    wrong = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    right = torch.cat([gradient.flatten() for gradient in whole.task.gradients])
    assert (wrong - right).norm() > 0.02 * right.norm()


def test_short_tail_window_is_divided_by_its_own_targets():
    engine = make(Line, callbacks=[record := Record()], gradient_accumulation_steps=4, max_epochs=1)
    engine.run()
    tail = list(engine.data.train_dataloader(epoch=0))[4:]
    assert engine.state.step == 2 and len(tail) == 2
    model = engine.task.build_model(engine.data)
    model.load_state_dict(record.weights[0])
    x, y, use = (torch.cat([batch[name] for batch in tail]) for name in ("x", "y", "use"))
    nn.functional.mse_loss(model(x)[use], y[use]).backward()
    assert_close(engine.task.gradients[1], [parameter.grad for parameter in model.parameters()])


def test_clips_once_and_reports_the_norm_before():
    class Descent(Line):
        SGD = True

    free = make(Descent, callbacks=[before := Record()], gradient_accumulation_steps=3, max_steps=1)
    free.run()
    clipped = make(
        Descent,
        callbacks=[after := Record()],
        gradient_accumulation_steps=3,
        max_steps=1,
        max_grad_norm=0.25,
    )
    clipped.run()
    norm = torch.cat([gradient.flatten() for gradient in free.task.gradients[0]]).norm().item()
    assert norm > 0.5
    assert_close([before.rows[0]["grad_norm"], after.rows[0]["grad_norm"]], [norm, norm])
    scaled = [gradient * 0.25 / norm for gradient in free.task.gradients[0]]
    assert_close(clipped.task.gradients[0], scaled, atol=1e-6, rtol=1e-4)


class Halved(Line):
    """Half of the loss is reported, and the other half is only minimised."""

    def train_step(self, model, batch):
        loss_sum, count, _ = super().train_step(model, batch)
        return StepOutput(loss_sum / 2, count, loss_sum / 2)


def test_an_auxiliary_loss_is_minimised_and_not_reported():
    records = [Record(), Record()]
    for task, record in zip((Line, Halved), records, strict=True):
        make(task, callbacks=[record], gradient_accumulation_steps=3, max_steps=4).run()
    whole, halved = records
    assert_close(halved.losses, [loss / 2 for loss in whole.losses], rtol=1e-5, atol=0)
    norms = [[row["grad_norm"] for row in record.rows] for record in records]
    assert_close(*norms, rtol=1e-5, atol=0)
    assert_close(halved.weights, whole.weights, rtol=1e-4, atol=1e-6)


def test_a_routers_loss_counts_once_for_each_micro_batch():
    """By hand: cross-entropy and the router's loss, of each micro-batch, over all targets."""
    engine = make(KeepingLM, Ragged(2), batch_size=2, gradient_accumulation_steps=4, max_steps=1)
    engine.config.model = replace(
        engine.config.model, use_moe=True, num_experts=4, top_k=2, router_aux_loss_coef=0.5
    )
    engine.setup()
    window = list(engine.data.train_dataloader(epoch=0))
    model = copy.deepcopy(engine.model)
    metrics = engine.optimizer_step(window)

    def by_hand(times):
        model.zero_grad()
        loss_sum = 0.0
        for batch in window:
            output = model(**batch)
            share = output.num_targets / 36
            (output.loss_sum / 36 + times * share * output.aux_loss).backward()
            loss_sum += output.loss_sum.item()
        return [parameter.grad.clone() for parameter in model.parameters()], loss_sum

    right, loss_sum = by_hand(times=1)
    assert_close(engine.task.gradients, right, atol=1e-6, rtol=1e-4)
    assert metrics["loss_sum"] == pytest.approx(loss_sum, rel=1e-5)
    # planted: forgotten, counted twice, or counted once for each of the four micro-batches' windows
    for times in (0, 2, 4):
        with pytest.raises(AssertionError):
            assert_close(engine.task.gradients, by_hand(times)[0], atol=1e-6, rtol=1e-4)


def test_a_decoder_with_experts_learns_to_copy():
    """The engine trains what the chapters before it have built, a router among it."""
    config = Config(
        model=ModelConfig(
            hidden_size=32, num_layers=2, num_heads=2, use_moe=True, num_experts=4, top_k=2
        ),
        training=TrainingConfig(
            device="cpu", precision="fp32", batch_size=16, max_steps=150, eval_interval=150
        ),
        optimization=OptimizationConfig(learning_rate=1e-2, warmup_steps=10, weight_decay=0.0),
    )
    data = SyntheticDataModule(batch_size=16)
    found = TrainingEngine(config, LanguageModelingTask(config), data).run()
    assert found["val_loss"] < 0.7 * math.log(data.vocab_size)


class Waits(TorchDispatchMode):
    """Counts the reads of a number, each of which waits for the device, and the backward passes
    before them.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.calls.append("read")
        if function is torch.ops.aten.mse_loss_backward.default:
            self.calls.append("backward")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulation", [1, 5])
def test_reads_numbers_once_a_step_after_the_last_backward(accumulation):
    class Count(RegressionTask):
        def train_step(self, model, batch):
            output = super().train_step(model, batch)
            return StepOutput(output.loss_sum, torch.full((), len(batch["y"])))

    engine = make(
        Count,
        RegressionTask(Config()).build_data(),
        gradient_accumulation_steps=accumulation,
        max_steps=1,
    )
    engine.setup()
    window = list(engine.data.train_dataloader(epoch=0))[:accumulation]
    with Waits() as waits:
        engine.optimizer_step(window)
    # loss, targets and norm, one after the other
    assert waits.calls == ["backward"] * accumulation + ["read"] * 3


# ---------------------------------------------------------------- a loop of one's own


def test_steps_in_a_loop_of_ones_own_are_those_of_the_engine():
    """The public parts alone make a run, bit for bit; nothing but the hooks is missing."""
    engine = make(Noisy, gradient_accumulation_steps=4, max_epochs=3)
    engine.run()
    steps = StepEngine(engine.config, Noisy(engine.config), Points(4))
    steps.setup()
    steps.train_model.train()
    for epoch in range(3):
        for window in group_micro_batches(steps.data.train_dataloader(epoch=epoch), 4):
            steps.optimizer_step(window)
    assert steps.state.step == engine.state.step == 6
    assert same(steps.model.state_dict(), engine.model.state_dict())
    assert same(steps.task.gradients, engine.task.gradients)
    assert same(steps.optimizer.state_dict(), engine.optimizer.state_dict())


@given(st.integers(0, 30), st.integers(1, 7))
def test_groups_keep_every_batch_in_order(number, size):
    groups = list(group_micro_batches(range(number), size))
    assert [batch for group in groups for batch in group] == list(range(number))
    assert all(len(group) == size for group in groups[:-1])
    assert len(groups) == math.ceil(number / size)


@pytest.mark.parametrize("position", range(6))
def test_an_epoch_goes_on_from_any_position(position):
    data = Points(4)
    data.setup()
    whole = [
        batch for window, _ in Epoch(data, TrainState(epoch=2), Runtime(), 4) for batch in window
    ]
    begin = TrainState(epoch=2, batch=position)
    rest = [batch for window, _ in Epoch(data, begin, Runtime(), 4) for batch in window]
    assert same(rest, whole[position:])


def test_an_epoch_without_a_batch_left_is_refused():
    data = Points(4)
    data.setup()
    with pytest.raises(ValueError, match="epoch 1 has no batch 6 to begin with"):
        Epoch(data, TrainState(epoch=1, batch=6), Runtime(), 4)


def test_a_mean_loss_is_sum_over_sum():
    outputs = [StepOutput(torch.tensor(2.0), torch.tensor(2)), StepOutput(torch.tensor(4.0), 1)]
    assert mean_loss(outputs, runtime=Runtime(), device=torch.device("cpu")) == 2.0
    with pytest.raises(ValueError, match="the validation data has no target"):
        mean_loss([], runtime=Runtime(), device=torch.device("cpu"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_only_fp16_has_a_scale_and_may_overflow(precision):
    mixed = MixedPrecision(precision, torch.device("cpu"))
    half = precision == "fp16"
    assert mixed.scaler.is_enabled() is half
    assert [mixed.overflowed(norm) for norm in (1.0, math.inf, math.nan)] == [False, half, half]
    if half:
        mixed.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-24)
        assert not mixed.overflowed(math.nan)  # the scale has come down far enough
    with mixed.autocast():
        assert torch.is_autocast_enabled("cpu") is (precision != "fp32")
        assert not torch.is_autocast_cache_enabled() or precision == "fp32"


# ---------------------------------------------------------------- half precision


class Loud(Line):
    """A loss that is far too large for float16's gradients at the first scales."""

    def train_step(self, model, batch):
        output = super().train_step(model, batch)
        return StepOutput(output.loss_sum * 1e6, output.num_targets)


class Follow(Callback):
    def __init__(self):
        self.rows = []

    def on_step_end(self, engine, metrics):
        state = copy.deepcopy((engine.model.state_dict(), engine.optimizer.state_dict()["state"]))
        self.rows.append(
            (
                engine.state.skipped_steps,
                engine.scheduler.last_epoch,
                engine.scaler.get_scale(),
                state,
            )
        )


def test_fp16_overflow_skips_update_and_schedule_and_is_counted():
    engine = make(
        Loud,
        callbacks=[follow := Follow()],
        precision="fp16",
        gradient_accumulation_steps=2,
        max_steps=25,
    )
    engine.run()
    assert 3 < engine.state.skipped_steps < 20
    for (skipped, updates, scale, before), (
        skipped_then,
        updates_then,
        scale_then,
        after,
    ) in pairwise(follow.rows):
        if skipped_then > skipped:
            assert (updates_then, scale_then) == (updates, scale / 2) and same(before, after)
        else:
            assert (updates_then, scale_then) == (updates + 1, scale) and not same(before, after)
    assert (
        engine.scheduler.last_epoch == 25 - engine.state.skipped_steps
        and len(engine.task.gradients) == 25
    )
    # the batches of a skipped step are used up
    assert engine.state.batch + 6 * engine.state.epoch == 50


def test_fp16_gradient_that_is_never_finite_ends_the_run():
    class NaNGradient(Line):
        def train_step(self, model, batch):
            loss_sum, count, _ = super().train_step(model, batch)
            loss_sum.register_hook(lambda gradient: gradient * math.nan)
            return StepOutput(loss_sum, count)

    engine = make(NaNGradient, precision="fp16", gradient_accumulation_steps=6, max_steps=100)
    with pytest.raises(FloatingPointError, match="gradient norm .nan. is not finite in step 29"):
        engine.run()
    assert engine.state.skipped_steps == 28  # from 2**4 to 2**-24


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(precision):
    engine = make(precision=precision, gradient_accumulation_steps=2, max_steps=100)
    assert engine.run()["val_loss"] < 0.01
    assert engine.precision == precision and engine.state.skipped_steps == 0
    assert next(engine.model.parameters()).dtype == torch.float32


# ---------------------------------------------------------------- batches that must not count


def poisoned(where, at):
    class Poisoned(Noisy):
        calls = 0

        def train_step(self, model, batch):
            self.calls += 1
            loss_sum, count, _ = super().train_step(model, batch)
            if self.calls == at and where == "loss":
                loss_sum = loss_sum * math.nan
            if self.calls == at and where == "gradient":
                loss_sum.register_hook(lambda gradient: gradient * math.inf)
            if self.calls == at and where == "auxiliary":
                return StepOutput(loss_sum, count, loss_sum * math.nan)
            return StepOutput(loss_sum, count)

    return Poisoned


@pytest.mark.parametrize(
    "where,precision",
    [("loss", "fp32"), ("loss", "fp16"), ("gradient", "bf16"), ("auxiliary", "fp32")],
)
def test_nan_batch_stops_before_the_update(where, precision):
    """The second micro-batch of step 5 is bad; epochs have six batches."""
    task = poisoned(where, at=10)
    engine = make(
        task,
        callbacks=[follow := Follow()],
        precision=precision,
        gradient_accumulation_steps=2,
        max_steps=9,
    )
    with pytest.raises(
        FloatingPointError,
        match=r"not finite in step 5 \(epoch 1, batches 2 to 3\).*those of step 4.*fp32",
    ):
        engine.run()
    *_, (model, optimizer) = follow.rows[-1]
    assert same(engine.model.state_dict(), model) and same(
        engine.optimizer.state_dict()["state"], optimizer
    )
    assert (
        engine.state.step,
        engine.state.epoch,
        engine.state.batch,
        engine.scheduler.last_epoch,
    ) == (4, 1, 2, 4)
    assert engine.in_step  # random numbers were drawn: this is not the state after step 4
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_step_without_targets_is_skipped_and_counted():
    data = Points(4, rows=8, masked=range(8))
    task = type(
        "Decay",
        (Line,),
        {"build_optimizer": lambda self, m: torch.optim.AdamW(m.parameters(), weight_decay=0.5)},
    )
    engine = make(task, data, max_steps=2)
    engine.setup()
    before = copy.deepcopy(engine.model.state_dict())
    with pytest.raises(ValueError, match="no row of epoch 0 has a target: is every label -100"):
        engine.run()
    assert engine.state.skipped_steps == 2 and engine.scheduler.last_epoch == 0
    assert same(engine.model.state_dict(), before)  # no decay either


def test_last_steps_without_targets_do_not_fail_a_resumed_run():
    data = Points(4)
    data.setup()
    last = [
        int((data.train_dataset.columns["x"] == x).nonzero()[0, 0])
        for x in list(data.train_dataloader(epoch=0))[-1]["x"]
    ]
    first = make(Line, Points(4, masked=last), [StopAt(5)], max_epochs=2)
    first.run()
    second = make(Line, Points(4, masked=last), max_epochs=2)
    second.setup(first.state_dict())
    second.run()
    straight = make(Line, Points(4, masked=last), max_epochs=2)
    straight.run()
    assert second.state == straight.state and same(
        second.model.state_dict(), straight.model.state_dict()
    )


def test_data_without_batches_or_validation_targets():
    with pytest.raises(ValueError, match="the validation data has no target"):
        make(data=Points(4, masked=range(21, 30)), max_steps=1).run()
    for length in (dict(max_epochs=1), dict(max_tokens=10)):
        with pytest.raises(ValueError, match="the training data has no row"):
            make(data=Points(4, rows=0), **length).run()


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize("batch_size", [1, 2, 4, 9, 100])
def test_validation_does_not_depend_on_the_batches(batch_size):
    engine = make(batch_size=batch_size, max_steps=1)
    engine.setup()
    result = engine.validate()["val_loss"]
    rows = engine.data.val_dataset.columns
    with torch.no_grad():
        wanted = nn.functional.mse_loss(
            engine.model(rows["x"])[rows["use"]], rows["y"][rows["use"]]
        ).item()
    assert result == pytest.approx(wanted, rel=1e-6)
    assert engine.model.training


def test_validation_comes_at_intervals_and_at_the_end_and_changes_nothing():
    with_many = make(Noisy, callbacks=[many := Record()], max_steps=10, eval_interval=3)
    with_one = make(Noisy, callbacks=[one := Record()], max_steps=10, eval_interval=100)
    with_many.run(), with_one.run()
    assert [step for step, row in enumerate(many.rows, 1) if "val_loss" in row] == [3, 6, 9, 10]
    assert [step for step, row in enumerate(one.rows, 1) if "val_loss" in row] == [10]
    assert same(many.weights, one.weights)


# ---------------------------------------------------------------- how long


@pytest.mark.parametrize(
    "length,wanted",
    [
        (dict(max_steps=7), (7, 2, 2)),
        (dict(max_epochs=2), (6, 2, 0)),
        (dict(max_tokens=21 * 5 + 40), (4, 1, 2)),
    ],
)
def test_all_three_lengths(length, wanted):
    """21 rows of 5 tokens, 6 batches, 3 steps an epoch; 40 tokens are 8 rows, one step."""
    engine = make(gradient_accumulation_steps=2, **length)
    engine.config.data.sequence_length = 5
    engine.run()
    assert (engine.state.step, engine.state.epoch, engine.state.batch) == wanted
    assert engine.max_steps == wanted[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 400),
)
def test_planned_steps_equal_those_of_a_simulated_run(
    rows, batch_size, accumulation, world_size, length, tokens
):
    def simulate(*, epochs=math.inf, tokens=math.inf):
        steps = epoch = read = 0
        while epoch < epochs and read < tokens:
            left = rows
            while left and read < tokens:
                taken = min(left, batch_size * accumulation * world_size)
                left = left - taken
                read = read + taken * length
                steps = steps + 1
            epoch += 1
        return steps

    def planned(**run_length):
        config = Config(
            training=TrainingConfig(
                batch_size=batch_size, gradient_accumulation_steps=accumulation, **run_length
            )
        )
        config.data.sequence_length = length
        return planned_steps(config, num_items=rows, world_size=world_size)

    assert planned(max_epochs=3) == simulate(epochs=3)
    assert planned(max_tokens=tokens) == simulate(tokens=tokens)
    assert planned(max_steps=5) == 5


def test_a_run_in_epochs_needs_to_know_the_rows():
    class Stream(Points):
        def setup(self):
            super().setup()
            self.rows_of_training = self.__dict__.pop("train_dataset")

        def train_dataloader(self, *, epoch, position=0, rank=0, world_size=1):
            return [self.rows_of_training.__getitems__([i, i + 1]) for i in range(0, 20, 2)][
                position:
            ]

    with pytest.raises(ValueError, match="Stream has no train_dataset, so give training.max_steps"):
        make(data=Stream(), max_epochs=1).run()
    engine = make(data=Stream(), max_steps=12)
    engine.run()
    assert (engine.state.epoch, engine.state.batch) == (1, 2)


# ---------------------------------------------------------------- tasks and callbacks at fault


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda loss, count: loss, "this is Tensor"),
        (lambda loss, count: (loss, count), "this is tuple"),
        (lambda loss, count: None, "this is NoneType"),
        (
            lambda loss, count: StepOutput(loss * torch.ones(2), count),
            "loss_sum must be a scalar tensor",
        ),
        (lambda loss, count: StepOutput(loss.item(), count), "loss_sum must be a scalar tensor"),
        (lambda loss, count: StepOutput(loss.detach(), count), "loss_sum has no gradient"),
        (
            lambda loss, count: StepOutput(loss, count.float()),
            "num_targets must be a whole number",
        ),
        (
            lambda loss, count: StepOutput(loss, count.repeat(2)),
            "num_targets must be a whole number",
        ),
        (lambda loss, count: StepOutput(loss, None), "num_targets must be a whole number"),
    ],
)
def test_task_that_returns_nonsense(change, message):
    class Nonsense(Line):
        def train_step(self, model, batch):
            return change(*super().train_step(model, batch)[:2])

    with pytest.raises(
        ValueError, match=f"Nonsense.train_step must return StepOutput.*: {message}"
    ):
        make(Nonsense, max_steps=1).run()


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Diary(Callback):
    def __init__(self, name, lines, fail=()):
        self.name = name
        self.lines = lines
        self.fail = fail


def _hook(name):
    def hook(self, engine, *arguments):
        self.lines.append((self.name, name))
        if name in self.fail:
            raise OSError(f"{self.name} failed")

    return hook


for _name in HOOKS:
    setattr(Diary, _name, _hook(_name))


def test_hooks_come_in_list_order():
    lines = []
    engine = make(
        callbacks=[Diary("a", lines), Diary("b", lines)],
        gradient_accumulation_steps=3,
        max_epochs=2,
        eval_interval=3,
    )
    engine.run()
    assert lines[::2] == [("a", name) for _, name in lines[1::2]] and {
        name for name, _ in lines[1::2]
    } == {"b"}
    batches = [name for _, name in lines[::2]].count("on_batch_end")
    assert batches == 2 * len(list(engine.data.train_dataloader(epoch=0)))
    lines = [(name, hook) for name, hook in lines if hook != "on_batch_end"]
    step = ["on_step_end"]
    validation = ["on_validation_start", "on_validation_end"]
    first = ["on_epoch_start", *step, *step, "on_epoch_end"]
    second = [
        "on_epoch_start",
        *validation,
        *step,
        *validation,
        *step,
    ]
    assert [name for _, name in lines[::2]] == [
        "on_train_start",
        *first,
        *second,
        "on_epoch_end",
        "on_train_end",
    ]


@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "on_exception"])
def test_callback_that_raises_is_named_and_all_are_told(hook):
    lines = []
    callbacks = [Diary("a", lines), Diary("b", lines, fail=(hook,)), Diary("c", lines)]
    engine = make(callbacks=callbacks, max_epochs=1, gradient_accumulation_steps=3)
    with pytest.raises(OSError, match="b failed") as caught:
        engine.run()
    assert caught.value.__notes__ == [f"raised by Diary.{hook}"]
    assert lines[-3:] == [(name, "on_exception") for name in "abc"]
    # between two steps the state can be saved, and is that of the last step
    assert engine.in_step == (hook == "on_batch_end")


def test_state_after_a_callback_that_raised_goes_on_exactly():
    lines = []
    straight = make(Noisy, max_steps=8)
    straight.run()

    class Fails(Callback):
        def on_step_end(self, engine, metrics):
            if engine.state.step == 4:
                raise OSError("no space left on device")

    failed = make(Noisy, callbacks=[Fails(), Diary("a", lines)], max_steps=8)
    with pytest.raises(OSError):
        failed.run()
    second = make(Noisy, max_steps=8)
    second.setup(copy.deepcopy(failed.state_dict()))
    second.run()
    assert same(second.model.state_dict(), straight.model.state_dict())


def test_errors_while_failing_do_not_hide_the_first():
    lines = []
    callbacks = [Diary("a", lines, fail=("on_step_end", "on_exception")), Diary("b", lines)]
    with pytest.raises(OSError) as caught:
        make(callbacks=callbacks, max_steps=2).run()
    assert caught.value.__notes__ == [
        "raised by Diary.on_step_end",
        "and Diary.on_exception raised OSError('a failed')",
    ]
    assert lines[-1] == ("b", "on_exception")


def test_callbacks_of_one_kind_are_numbered():
    class Timer(Callback): ...

    kinds = CallbackList([Timer(), Callback(), Timer(), Timer()])
    assert list(kinds.by_name()) == ["Timer", "Callback", "Timer#2", "Timer#3"]
    assert list(kinds.by_name().values()) == list(kinds)


def test_callbacks_state_is_kept_by_name_and_newcomers_are_left_alone():
    class Counts(Callback):
        def __init__(self):
            self.steps = 0

        def on_step_end(self, engine, metrics):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    first = make(callbacks=[Counts(), StopAt(3), Counts()], max_steps=6)
    first.callbacks[2].steps = 100
    first.run()
    state = first.state_dict()
    assert state["callbacks"] == {"Counts": {"steps": 3}, "StopAt": {}, "Counts#2": {"steps": 103}}
    second = make(callbacks=[Counts(), Counts(), Counts()], max_steps=6)  # the third is new
    second.setup(state)
    second.run()
    assert [callback.steps for callback in second.callbacks] == [6, 106, 3]


# ---------------------------------------------------------------- loaders that fail


class FailsAt(Rows):
    def __init__(self, columns, how):
        super().__init__(columns)
        self.how = how
        self.parent = os.getpid()
        self.calls = 0

    def __getitems__(self, indices):
        self.calls += 1
        if self.calls == 3:
            if self.how == "dies" and os.getpid() != self.parent:
                time.sleep(1)  # until the engine waits for this batch
                os._exit(1)
            raise OSError("the disk is gone")
        return super().__getitems__(indices)


@pytest.mark.parametrize("how,workers,error", [("raises", 0, OSError), ("dies", 1, RuntimeError)])
def test_loader_that_fails_is_located(how, workers, error):
    class Failing(Points):
        num_workers = workers

        def setup(self):
            super().setup()
            self.train_dataset = FailsAt(self.train_dataset.columns, how)

    lines = []
    engine = make(data=Failing(), callbacks=[Diary("a", lines)], max_steps=6)
    with pytest.raises(error) as caught:
        engine.run()
    assert caught.value.__notes__ == ["raised while loading batch 2 of epoch 0 (rank 0)"]
    assert not engine.in_step and lines[-1] == ("a", "on_exception")


# ---------------------------------------------------------------- exact resume


def run(stop_at=None, state=None, *, task=Noisy, data=None, steps=9, **training):
    training = dict(gradient_accumulation_steps=2, max_steps=steps, eval_interval=2) | training
    engine = make(task, data, [record := Record(), StopAt(stop_at)], **training)
    engine.setup(copy.deepcopy(state))
    engine.run()
    return engine, record


class PlainLoader(Points):
    """PyTorch's own loader, which draws from the global generator whenever it begins."""

    def train_dataloader(self, *, epoch, position=0, rank=0, world_size=1):
        rows = self.train_dataset.__getitems__
        batches = [rows(list(range(i, min(i + 4, 21)))) for i in range(0, 21, 4)]
        return DataLoader(batches[position:], batch_size=None)


CASES = {
    "plain": {},
    "fp16": dict(precision="fp16", task=type("NoisyLoud", (Loud, Noisy), {})),
    "bf16": dict(precision="bf16"),
    "muon": dict(optimizer="muon"),
    "loader that draws": dict(data=PlainLoader()),
    "compiled": dict(compile=True),
}


@pytest.mark.parametrize("case", CASES)
def test_resume_is_exact_at_every_step(case, monkeypatch):
    """In the middle of an epoch, at its end, around a validation; 3 steps are an epoch."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    straight, wanted = run(**CASES[case])
    for stop_at in (1, 2, 3, 5) if case == "plain" else (2,):
        torch._dynamo.reset()
        first, before = run(stop_at, **CASES[case])
        state = copy.deepcopy(first.state_dict())
        torch.manual_seed(999)
        second, after = run(state=state, **CASES[case])
        assert before.losses + after.losses == wanted.losses
        # a norm may be NaN, which equals nothing
        assert repr(before.rows + after.rows) == repr(wanted.rows)
        assert same(before.weights + after.weights, wanted.weights)
        ours = second.state_dict()
        theirs = straight.state_dict()
        assert [name for name in ours if not same(ours[name], theirs[name])] == []


class DrawsEverywhere(Line):
    def train_step(self, model, batch):
        loss_sum, num_targets = super().train_step(model, batch)[:2]
        return StepOutput(loss_sum * (1 + np.random.rand() + random.random()), num_targets)


def test_a_position_behind_the_data_is_refused():
    first, _ = run(2)
    state = copy.deepcopy(first.state_dict())
    state["state"]["batch"] = 100  # 21 rows are 6 batches
    engine = make(max_steps=9)
    engine.setup(state)
    with pytest.raises(ValueError, match="epoch 0 has no batch 100 to begin with: give more text"):
        engine.run()


def test_the_seed_is_that_of_all_libraries():
    runs = []
    for noise in (1, 2):
        np.random.rand(noise), random.random()
        runs.append(run(task=DrawsEverywhere)[1].losses)
    assert runs[0] == runs[1]


def test_what_is_forgotten_shows_at_its_step():
    """The position and the random numbers in the first loss after the resume, what acts in the
    update in the second.
    """
    _, wanted = run()
    first, _ = run(5)
    saved = copy.deepcopy(first.state_dict())

    def first_difference(part):
        torch.manual_seed(999)
        engine = make(
            Noisy,
            callbacks=[record := Record()],
            gradient_accumulation_steps=2,
            max_steps=9,
            eval_interval=2,
        )
        engine.setup()
        fresh = copy.deepcopy(engine.state_dict())
        change = {"nothing": {}, "position": {"state": saved["state"] | {"batch": 0}}}
        engine.load_state_dict(copy.deepcopy(saved | change.get(part, {part: fresh.get(part)})))
        engine.run()
        pairs = zip(range(6, 10), wanted.losses[5:], record.losses, strict=False)
        return next((step for step, a, b in pairs if a != b), None)

    parts = ["nothing", "model", "position", "rng", "optimizer", "scheduler"]
    assert {part: first_difference(part) for part in parts} == dict(
        nothing=None, model=6, position=6, rng=6, optimizer=7, scheduler=7
    )


def test_resume_with_other_data_or_processes_is_refused_unless_allowed():
    first, _ = run(2)
    state = copy.deepcopy(first.state_dict())
    with pytest.raises(ValueError, match="batch_size was 4, is 7"):
        run(state=state, data=Points(7))
    with pytest.raises(ValueError, match="trained by 2 processes and now there are 1"):
        run(state=state | {"world_size": 2})
    with pytest.warns(UserWarning, match="batch_size was 4, is 7.*going on from the next epoch"):
        engine, record = run(state=state, data=Points(7), allow_changes=True)
    assert engine.state.step == 9 and len(record.rows) == 7
    assert engine.state.epoch == 1 + 7 // 2  # two steps an epoch now, from epoch 1 on


def test_optimizer_keeps_its_moments_and_takes_the_configured_rate():
    first, _ = run(2, schedule="constant")
    state = copy.deepcopy(first.state_dict())
    engine = make(Noisy, gradient_accumulation_steps=2, max_steps=9, schedule="constant")
    engine.config.optimization.learning_rate = 0.01
    engine.setup(copy.deepcopy(state))
    assert {group["lr"] for group in engine.optimizer.param_groups} == {0.01}
    assert same(engine.optimizer.state_dict()["state"], state["optimizer"]["state"])
    # the newest validation, should the run end before the next
    assert engine.metrics == first.metrics != {}


def test_interrupt_inside_a_step_is_not_a_state_to_save():
    class Interrupted(Noisy):
        def train_step(self, model, batch):
            if self.gradients:
                raise KeyboardInterrupt
            return super().train_step(model, batch)

    lines = []
    engine = make(Interrupted, callbacks=[Diary("a", lines)], max_steps=3)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert engine.in_step and lines[-1] == ("a", "on_exception")


def test_stop_ends_after_the_step():
    engine = make(callbacks=[StopAt(4)], max_steps=9)
    engine.run()
    assert (engine.state.step, engine.stop_reason, engine.done) == (
        4,
        "the test asked for it",
        True,
    )


def test_a_run_that_was_broken_off_inside_a_step_is_not_run_again():
    class Interrupted(Line):
        def train_step(self, model, batch):
            if self.calls == 3:
                raise KeyboardInterrupt
            self.calls += 1
            return super().train_step(model, batch)

    Interrupted.calls = 0
    engine = make(Interrupted, max_steps=9)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert engine.in_step
    with pytest.raises(ValueError, match="ended inside a step: make a new engine"):
        engine.run()


def test_a_state_that_was_refused_leaves_the_engine_at_its_beginning():
    state = make(max_steps=4)
    state.run()
    engine = make(max_steps=6)
    engine.data.batch_size = 3
    with pytest.raises(ValueError, match="batch_size was 4, is 3"):
        engine.setup(state.state_dict())
    engine.run()
    assert engine.state.step == 6 and len(engine.task.gradients) == 6


def test_a_loader_that_is_shorter_than_it_says_is_refused():
    class Short(Points):
        def train_dataloader(self, **place):
            loader = super().train_dataloader(**place)
            return type(
                "Loader",
                (),
                {"__len__": lambda self: len(loader) + 1, "__iter__": lambda self: iter(loader)},
            )()

    with pytest.raises(ValueError, match="the loader of epoch 0 ended after 6 of 7 batches"):
        make(data=Short(), max_steps=20).run()


def test_stop_asked_at_the_start_ends_before_the_first_step():
    class Enough(Callback):
        ended = False

        def on_train_start(self, engine):
            engine.stop("all was done before")

        def on_train_end(self, engine):
            self.ended = True

    engine = make(callbacks=[enough := Enough()])
    engine.run()
    assert (engine.state.step, engine.stop_reason, enough.ended) == (0, "all was done before", True)


# ---------------------------------------------------------------- compile


@pytest.mark.parametrize(
    "rows,val_rows", [(21, 9), (22, 6), (5, 3)], ids=["last of 1", "last of 2", "first of 1"]
)
def test_at_most_two_graphs(rows, val_rows, monkeypatch):
    graphs = []

    def counting(graph, inputs):
        graphs.append(
            [tuple(tensor.shape) for tensor in inputs if isinstance(tensor, torch.Tensor)]
        )
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    torch._dynamo.reset()
    compiled = make(
        data=Points(4, rows=rows, val_rows=val_rows), max_epochs=2, compile=True, eval_interval=3
    )
    compiled.run()
    assert len(graphs) == 2, graphs
    eager = make(data=Points(4, rows=rows, val_rows=val_rows), max_epochs=2, eval_interval=3)
    eager.run()
    assert_close(compiled.model.state_dict(), eager.model.state_dict())
    # free of _orig_mod.
    assert compiled.state_dict()["model"].keys() == eager.state_dict()["model"].keys()


class Bigrams(nn.Module):
    """A table of logits, with the labels inside the model."""

    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(
            self.table(input_ids).flatten(0, 1), labels.flatten(), reduction="sum"
        )


class BigramTask(TrainingTask):
    def build_model(self, data):
        return Bigrams(data.vocab_size)

    def train_step(self, model, batch):
        return StepOutput(model(batch["input_ids"], batch["labels"]), (batch["labels"] >= 0).sum())


def test_at_most_two_graphs_whatever_the_strides(monkeypatch):
    """The labels of the course's data are views; in a batch of one row their strides are others,
    and would make a graph.
    """
    graphs = []
    monkeypatch.setattr(
        torch,
        "compile",
        partial(torch.compile, backend=lambda graph, inputs: graphs.append(graph) or graph),
    )
    torch._dynamo.reset()
    data = SyntheticDataModule(
        "copy", num_symbols=4, length=3, num_examples=20, val_fraction=0.35, batch_size=4
    )
    engine = make(BigramTask, data, max_epochs=2, compile=True, eval_interval=2)
    engine.run()
    assert [len(batch["labels"]) for batch in data.train_dataloader(epoch=0)] == [4, 4, 4, 1]
    strides = {batch["labels"].stride() for batch in data.train_dataloader(epoch=0)}
    assert len(strides) == 2 and len(graphs) == 2

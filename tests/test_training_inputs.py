"""Inputs that the training modules were not made for: each ends in a right answer or in words that
name the value and the rule.
"""

import json
import math
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from llm_course.training.callbacks import (
    EarlyStopping,
    LRSchedulerCallback,
    MetricsLogger,
    SampleWriter,
    plot_losses,
    read_metrics,
)
from llm_course.training.checkpointing import Checkpointer, CheckpointManager
from llm_course.training.config import Config, DistributedConfig, OptimizationConfig, TrainingConfig
from llm_course.training.distributed import ProcessGroup
from llm_course.training.engine import StepEngine, TrainingEngine
from llm_course.training.epoch import planned_steps
from llm_course.training.folder import load_run, load_state
from llm_course.training.launch import launch
from llm_course.training.lr_finder import LearningRateCurve, running_average, set_learning_rate
from llm_course.training.monitoring import PerformanceMonitor, RandomTokens, measure_step
from llm_course.training.muon import Muon, newton_schulz
from llm_course.training.named import find_task
from llm_course.training.optim import learning_rate_factor
from llm_course.training.precision import MixedPrecision
from llm_course.training.reports import draw_lines
from llm_course.training.runtime import seed_everything
from llm_course.training.speed import peak_memory_bytes
from llm_course.training.state import TrainState
from llm_course.training.task import LinearDataModule, RegressionTask
from llm_course.training.window import group_micro_batches

CPU = torch.device("cpu")
RATES = OptimizationConfig()


def config(**training) -> Config:
    return Config(training=TrainingConfig(device="cpu", precision="fp32", **training))


def engine(kind=StepEngine):
    task = RegressionTask(config(max_steps=3))
    return kind(task.config, task, task.build_data())


def muon(shape=(2, 2), **settings):
    return Muon([dict(params=[nn.Parameter(torch.ones(shape))], muon=True)], **settings)


REFUSED = {
    "a window of 0": (lambda: [*group_micro_batches([{}], 0)], "size=0 must be a whole number"),
    "a window of None": (lambda: [*group_micro_batches([{}], None)], "size=None must be a whole"),
    "rows of None": (
        lambda: planned_steps(config(max_epochs=1), num_items=None),
        "num_items=None must be a whole number of at least 0",
    ),
    "no rows": (lambda: planned_steps(config(max_epochs=1), num_items=0), "has no row"),
    "no process": (
        lambda: planned_steps(config(max_epochs=1), num_items=9, world_size=0),
        "world_size=0",
    ),
    "every 0 steps": (lambda: TrainState().is_due(0), "interval=0 must be a whole number"),
    "every week": (lambda: TrainState().is_due("week"), "interval='week' must be a whole number"),
    "int8": (lambda: MixedPrecision("int8", CPU), "precision='int8' is unknown: choose one of"),
    "a step too early": (lambda: engine().optimizer_step([{}]), "call setup.. first"),
    "a state too early": (lambda: engine().state_dict(), "call setup.. first"),
    "a validation too early": (lambda: engine(TrainingEngine).validate(), "call setup.. first"),
    "vectors": (lambda: newton_schulz(torch.ones(3)), "matrices has shape .3,., expected"),
    "integers": (lambda: newton_schulz(torch.ones(3, 3).long()), "matrices has dtype torch.int64"),
    "a list": (lambda: newton_schulz([[1.0]]), "matrices is a list, expected a tensor"),
    "-1 products": (lambda: newton_schulz(torch.ones(2, 2), steps=-1), "steps=-1"),
    "step -1": (lambda: learning_rate_factor(-1, RATES, max_steps=10), "step=-1 must be a whole"),
    "a rate of -1": (lambda: muon(lr=-1.0), "lr=-1.0 must be finite and not negative"),
    "a rate of NaN": (lambda: muon(lr=math.nan), "lr=nan must be finite and not negative"),
    "beta 1": (lambda: muon(betas=(1.0, 0.9)), "beta1=1.0 must be at least 0 and below 1"),
    "momentum 1": (lambda: muon(momentum=1.0), "momentum=1.0 must be at least 0 and below 1"),
    "Muon of a vector": (lambda: muon(shape=(2,)), "only matrices have directions"),
    "examples of None": (lambda: LinearDataModule(num_examples=None), "num_examples=None"),
    "a batch of 0": (lambda: LinearDataModule(batch_size=0), "batch_size=0 must be a whole number"),
    "few examples": (lambda: LinearDataModule(num_examples=3), "must be at least 16"),
    "no patience": (lambda: EarlyStopping(patience=0), "patience=0 must be a whole number"),
    "a delta of NaN": (lambda: EarlyStopping(patience=1, min_delta=math.nan), "min_delta=nan"),
    "no factor": (lambda: LRSchedulerCallback(factor=None), "factor=None must be above 0"),
    "a row a week": (lambda: MetricsLogger("x", log_interval="week"), "log_interval='week' must"),
    "samples of None": (
        lambda: SampleWriter("x", interval=None, sample=str),
        "interval=None must be a whole number",
    ),
    "smoothing 1": (lambda: running_average([1.0], 1.0), "smoothing=1.0 must be at least 0"),
    "no curve": (lambda: LearningRateCurve([], [], []).suggest(), "the curve is empty"),
    "one point": (lambda: LearningRateCurve([1.0], [1.0], [1.0]).suggest(), "where the test ends"),
    "a rate below 0": (lambda: set_learning_rate(None, -1.0), "rate=-1.0 must be finite"),
    "a save a week": (lambda: Checkpointer(None, save_interval="week"), "save_interval='week'"),
    "a save each 0": (lambda: Checkpointer(None, save_interval=0), "save_interval=0 must be"),
    "no batch": (lambda: RandomTokens(config(), num_batches=0), "num_batches=0 must be a whole"),
    "steps of None": (lambda: measure_step(config(), steps=None), "steps=None must be a whole"),
    "a row each None": (lambda: PerformanceMonitor(log_interval=None), "log_interval=None must be"),
    "a peak of NaN": (lambda: PerformanceMonitor(peak_flops=math.nan), "peak_flops=nan must be"),
    "a peak in words": (lambda: PerformanceMonitor(peak_flops="1"), "peak_flops='1' must be"),
    "no seed": (lambda: seed_everything(None), "seed=None must be a whole number of at least 0"),
    "a seed of 1.5": (lambda: seed_everything(1.5), "seed=1.5 must be a whole number"),
    "a huge seed": (lambda: seed_everything(2**70), "seed=.* must be at least 0 and below"),
    "processes of None": (lambda: launch(print, None), "world_size=None must be a whole number"),
    "port -5": (lambda: launch(print, 1, master_port=-5), "master_port=-5: bind"),
    "a port too high": (lambda: launch(print, 1, master_port=10**6), "master_port=1000000: bind"),
    "a port in words": (lambda: launch(print, 1, master_port="29500"), "master_port=29500: 'str'"),
    "no address": (
        lambda: launch(print, 1, master_addr=""),
        "master_addr=, .*the address is empty",
    ),
    "the address None": (lambda: launch(print, 1, master_addr=None), "master_addr=None"),
    "no function": (lambda: launch(None, 1), "function=None can't be called"),
    "a local function": (lambda: launch(lambda: 1, 1), "so define it in a module"),
    "a lock": (lambda: launch(print, 1, threading.Lock()), "arguments must be picklable"),
    "a relative task": (lambda: find_task("..a:B"), "task='..a:B' cannot be loaded"),
    "a run of no name": (lambda: load_state("nowhere"), "nowhere holds no latest checkpoint"),
    "the newest": (lambda: load_run("nowhere", which="newest"), "which='newest' is unknown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_value_and_the_rule(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
    assert os.listdir() == []


def test_an_engine_without_a_micro_batch_is_as_it_was():
    ours = engine()
    ours.setup()
    with pytest.raises(ValueError, match="at least one micro-batch"):
        ours.optimizer_step([])
    assert ours.state == TrainState() and not ours.in_step


def test_a_rank_that_is_no_number_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "first")
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers"):
        ProcessGroup(DistributedConfig())


@pytest.mark.parametrize(
    "state, step, words",
    [
        (None, 1, "the state must be a dict whose 'model' is a dict of tensors"),
        ({"model": [1]}, 1, "the state must be a dict whose 'model' is a dict of tensors"),
        # it would be written, and no checkpoint afterwards
        ({"model": {}, "metrics": [1.0]}, 1, "whose 'metrics' is a dict of numbers"),
        ({"model": {}}, None, "step=None must be a whole number of at least 0"),
        ({"model": {}}, 1.5, "step=1.5 must be a whole number of at least 0"),
    ],
)
def test_a_state_that_is_none_is_refused_before_anything_is_written(state, step, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        CheckpointManager(tmp_path / "checkpoints").save(state, step=step)
    assert os.listdir(tmp_path) == []


def test_a_row_ends_at_a_line_feed_and_nowhere_else(tmp_path):
    path = Path(tmp_path, "metrics.jsonl")
    row = {"step": 1, "sample": "one\u2028two\x85three"}
    path.write_text(json.dumps(row, ensure_ascii=False) + '\n{"step": 2', encoding="utf-8")
    assert read_metrics(path) == [row]


def test_a_picture_that_can_not_be_drawn_leaves_the_old_one(tmp_path):
    path = Path(tmp_path, "metrics.jsonl")
    path.write_text('{"step": 1, "loss": 2.0}\n')
    plot_losses(path, tmp_path / "loss.png")
    before = (tmp_path / "loss.png").read_bytes()
    assert before.startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="same first dimension"):
        draw_lines(tmp_path / "loss.png", ([1, 2], [1], {}))
    assert (tmp_path / "loss.png").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["loss.png", "metrics.jsonl"]


def test_the_peak_of_a_device_by_its_name():
    assert peak_memory_bytes("cpu") == pytest.approx(peak_memory_bytes(CPU), rel=0.5)


@pytest.mark.parametrize("line", ["nonsense", "[1]", "{}", "null", "[" * 100_000])
def test_a_broken_row_is_named_by_its_line(line, tmp_path):
    path = Path(tmp_path, "metrics.jsonl")
    path.write_text(f'{{"step": 1, "loss": 2.0}}\n{line}\n{{"step": 2, "loss": 1.0}}\n')
    with pytest.raises(ValueError, match="metrics.jsonl: line 2 is not a row of metrics"):
        read_metrics(path)


@pytest.mark.parametrize(
    "rows", ["", '{"step": 1}\n', '{"step": 1, "loss": NaN}\n', '{"step": 1, "val_loss": 1.0}\n']
)
def test_losses_are_drawn_whatever_the_rows_have(rows, tmp_path):
    path = Path(tmp_path, "metrics.jsonl")
    path.write_text(rows)
    plot_losses(path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_at_the_edge_is_taken():
    assert newton_schulz(torch.ones(0, 3)).shape == (0, 3)
    assert newton_schulz(torch.ones(0, 3, 3)).shape == (0, 3, 3)
    assert newton_schulz(torch.full((2, 2), math.nan)).isnan().all()
    assert learning_rate_factor(10**30, RATES, max_steps=10) == pytest.approx(0.1)
    assert running_average([], 0.9) == []
    seed_everything(2**64 - 1)
    assert [*group_micro_batches([], 3)] == []

"""The commands around a run, and what they tell a person whose own code or folder is at fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm_course.cli import main as cli
from llm_course.training.callbacks import read_metrics
from llm_course.training.config import Config, OptimizationConfig, TrainingConfig
from llm_course.training.train import find_task, train_worker

ROOT = Path(__file__).resolve().parent.parent
QUIET = ["--logging.tensorboard", "false", "--logging.progress", "false", "--training.device", "cpu"]
MINE = """
from torch import nn
from llm_course.training.task import RegressionTask

class Mine(RegressionTask):
    def build_model(self, data):
        return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))

class Broken(RegressionTask):
    def train_step(self, model, batch):
        raise ValueError("my own mistake")

class Nonsense(RegressionTask):
    def train_step(self, model, batch):
        return 3.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_tasks.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_tasks", None)
    return tmp_path


def test_a_task_of_ones_own_trains_and_is_evaluated(folder, capsys):
    length = ["--training.max_steps", "20", "--training.eval_interval", "10"]
    assert cli(["train", "--task", "my_tasks:Mine", "--run-dir", "run", *length, *QUIET]) == 0
    last = read_metrics("run/metrics.jsonl")[-1]
    assert last["step"] == 20 and "val_loss" in last
    capsys.readouterr()
    assert cli(["evaluate", "--run", "run"]) == 0
    assert f"step 20, 64 targets: val_loss {last['val_loss']:.4f}" in capsys.readouterr().out
    assert cli(["evaluate", "--run", "run", "--checkpoint", "best"]) == 0
    assert cli(["resume", "--run", "run", "--training.max_steps", "24"]) == 0
    assert read_metrics("run/metrics.jsonl")[-1]["step"] == 24


def test_a_mistake_in_ones_own_code_shows_its_place(folder, capsys):
    assert cli(["train", "--task", "my_tasks:Broken", "--run-dir", "run", *QUIET]) == 2
    err = capsys.readouterr().err
    assert "my_tasks.py" in err and "error: my own mistake" in err
    assert cli(["train", "--task", "my_tasks:Nonsense", "--run-dir", "other", *QUIET]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and "Nonsense.train_step must return StepOutput(loss_sum, num_targets)" in err


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", r"task='nothing' is not one of \['lm', 'regression'\]"),
        ("no_such_module:Task", "cannot be loaded"),
        ("my_tasks:Absent", "cannot be loaded"),
        ("math:sqrt", "not a subclass of TrainingTask"),
    ],
)
def test_a_task_that_is_not_there_is_refused(folder, name, message):
    with pytest.raises(ValueError, match=message):
        find_task(name)


def test_regression_finds_the_least_squares_answer(tmp_path):
    config = Config(
        run_dir=str(tmp_path / "run"),
        task="regression",
        training=TrainingConfig(max_epochs=40, precision="fp32", device="cpu", eval_interval=1000),
        optimization=OptimizationConfig(learning_rate=0.05, warmup_steps=10, min_lr_ratio=0.0, weight_decay=0.0),
    )
    config.logging.tensorboard = config.logging.progress = False
    result = train_worker(config)
    assert result.step == result.max_steps == 40 * 28 and result.stop_reason is None
    assert result.metrics["val_loss"] < 0.02  # the noise alone leaves 0.01


def test_patience_ends_a_run(tmp_path):
    config = Config(
        run_dir=str(tmp_path / "run"),
        task="regression",
        training=TrainingConfig(max_steps=5000, precision="fp32", device="cpu", eval_interval=20, patience=2),
        optimization=OptimizationConfig(learning_rate=0.05, schedule="constant", warmup_steps=1),
    )
    config.logging.tensorboard = config.logging.progress = False
    result = train_worker(config)
    assert result.step < 5000 and result.stop_reason == "no better val_loss in 2 validations"


# Case 23
@pytest.mark.skipif(sys.platform != "linux", reason="/proc refuses to be written even by root")
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(capsys):
    assert cli(["train", "--task", "regression", "--run-dir", "/proc/nowhere", *QUIET]) == 2
    assert "/proc/nowhere cannot be written" in capsys.readouterr().err


# Case 21
def test_a_second_run_in_the_folder_is_refused(folder):
    holder = (
        "from pathlib import Path; from llm_course.training.train import _alone_in\n"
        "with _alone_in(Path('run')): print('held', flush=True); input()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", holder], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="another process is training in run"):
        train_worker(Config(run_dir="run", task="regression"))
    process.kill()  # however it ends, the lock is free
    process.wait()
    config = Config(run_dir="run", task="regression", training=TrainingConfig(max_steps=2, device="cpu"))
    config.logging.tensorboard = config.logging.progress = False
    assert train_worker(config).step == 2

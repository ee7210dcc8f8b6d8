"""The commands around a run, and what they tell a person whose own code or folder is at fault."""

import dataclasses
import importlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from llm_course.cli import COMMANDS
from llm_course.cli import main as cli
from llm_course.model.config import ModelConfig
from llm_course.training import run as train
from llm_course.training.callbacks import read_metrics
from llm_course.training.checkpointing import CheckpointManager, load_checkpoint
from llm_course.training.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimizationConfig,
    TrainingConfig,
)
from llm_course.training.distributed import DistributedManager
from llm_course.training.engine import TrainingEngine
from llm_course.training.folder import load_run
from llm_course.training.named import find_task
from llm_course.training.run import train_worker

ROOT = Path(__file__).resolve().parent.parent
QUIET = [
    "--logging.tensorboard",
    "false",
    "--logging.progress",
    "false",
    "--training.device",
    "cpu",
]
MINE = """
from torch import nn
from llm_course.training.task import RegressionTask

class Mine(RegressionTask):
    def build_model(self, data):
        return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))

class Broken(RegressionTask):
    def train_step(self, model, batch):
        raise ValueError("my own mistake")

class Late(Mine):
    def train_step(self, model, batch):
        import my_helpers  # looked up while training, long after the task was found

        return super().train_step(model, batch)

class Nonsense(RegressionTask):
    def train_step(self, model, batch):
        return 3.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_tasks.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_tasks", "my_helpers"):
        sys.modules.pop(name, None)
    return tmp_path


def test_a_task_of_ones_own_trains_and_is_evaluated(folder, capsys):
    length = [
        "--training.max_steps",
        "20",
        "--training.eval_interval",
        "10",
        "--training.precision",
        "fp32",
    ]
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
    assert (
        "Traceback" not in err
        and "Nonsense.train_step must return StepOutput(loss_sum, num_targets)" in err
    )


def test_the_folder_of_a_task_stays_on_the_path_while_it_trains(folder):
    Path("my_helpers.py").touch()
    config = Config(
        run_dir="run", task="my_tasks:Late", training=TrainingConfig(max_steps=2, device="cpu")
    )
    config.logging.tensorboard = config.logging.progress = False
    assert train_worker(config).step == 2
    find_task("my_tasks:Mine")
    assert sys.path.count(os.getcwd()) == 1


def _weights(run_dir):
    return load_checkpoint(CheckpointManager(Path(run_dir, "checkpoints")).latest())["model"]


def test_torchrun_is_the_environment_and_gives_the_same_weights(folder, monkeypatch):
    words = [
        "train",
        "--task",
        "regression",
        "--training.max_steps",
        "20",
        "--training.precision",
        "fp32",
        *QUIET,
    ]
    assert cli([*words, "--run-dir", "plain"]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    contract = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in contract.items():
        monkeypatch.setenv(name, value)
    wrapped = patch.object(
        DistributedManager, "wrap", autospec=True, side_effect=DistributedManager.wrap
    )
    with wrapped as wrap:  # with a world of one, a plain run gives these weights, too
        assert cli([*words, "--run-dir", "as_torchrun"]) == 0
    assert wrap.called
    plain = _weights("plain")
    as_torchrun = _weights("as_torchrun")
    assert plain.keys() == as_torchrun.keys() and all(
        torch.equal(plain[name], as_torchrun[name]) for name in plain
    )


def test_what_a_folder_holds_decides(folder):
    def settings(run_dir="run", steps=4, task="regression"):
        config = Config(
            run_dir=run_dir, task=task, training=TrainingConfig(max_steps=steps, device="cpu")
        )
        config.logging.tensorboard = config.logging.progress = False
        return config

    with pytest.raises(ValueError, match="holds no checkpoint; leave --resume out"):
        train_worker(settings("nowhere"), resume=True)
    assert train_worker(settings()).step == 4
    with pytest.raises(ValueError, match=r"holds a finished run \(step 4 of 4\)"):
        train_worker(settings())
    before = {path: path.read_bytes() for path in sorted(Path("run").rglob("*")) if path.is_file()}
    with pytest.raises(
        ValueError, match="another run: task=.regression. there, .my_tasks:Mine. now"
    ):
        train_worker(settings(steps=8, task="my_tasks:Mine"))
    assert before == {
        path: path.read_bytes() for path in sorted(Path("run").rglob("*")) if path.is_file()
    }
    assert train_worker(settings(steps=8)).step == 8  # longer is allowed
    for state in Path("run/checkpoints").glob("*/state.json"):
        state.write_text("{}")
    with pytest.raises(ValueError, match="every checkpoint in .* is broken"):
        train_worker(settings(steps=12))


def test_a_saved_state_lets_the_log_go_on_as_if_nothing_had_been(folder):
    """Rows every 4 steps, a checkpoint after 6: the row of step 8 needs what the logger had summed
    up by then.
    """
    config = Config(
        run_dir="run",
        task="regression",
        training=TrainingConfig(max_steps=8, device="cpu", precision="fp32"),
    )
    config.logging.tensorboard = config.logging.progress = False
    config.logging.log_interval = 4
    config.checkpoint.save_interval = 6
    train_worker(config)
    row = read_metrics("run/metrics.jsonl")[-1]
    shutil.rmtree("run/checkpoints/step_00000008")  # as if killed before it was written
    train_worker(config)
    again = read_metrics("run/metrics.jsonl")[-1]
    assert row["step"] == again["step"] == 8 and row["loss"] == again["loss"]


def test_every_command_is_where_the_table_says():
    for module, _, function in (target.partition(":") for _, target in COMMANDS.values()):
        assert callable(getattr(importlib.import_module(module), function))


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
        optimization=OptimizationConfig(
            learning_rate=0.05, warmup_steps=10, min_lr_ratio=0.0, weight_decay=0.0
        ),
    )
    config.logging.tensorboard = config.logging.progress = False
    result = train_worker(config)
    assert result.step == result.max_steps == 40 * 28 and result.stop_reason is None
    assert result.metrics["val_loss"] < 0.02  # the noise alone leaves 0.01


def test_patience_ends_a_run(tmp_path):
    config = Config(
        run_dir=str(tmp_path / "run"),
        task="regression",
        training=TrainingConfig(
            max_steps=5000, precision="fp32", device="cpu", eval_interval=20, patience=2
        ),
        optimization=OptimizationConfig(learning_rate=0.05, schedule="constant", warmup_steps=1),
    )
    config.logging.tensorboard = config.logging.progress = False
    result = train_worker(config)
    assert result.step < 5000 and result.stop_reason == "no better val_loss in 2 validations"
    again = train_worker(config)  # it is remembered: no step more
    assert (again.step, again.stop_reason, again.metrics) == (
        result.step,
        result.stop_reason,
        result.metrics,
    )
    config.training.patience = 4
    assert train_worker(config).step > result.step  # and who has more patience goes on


def _files(run_dir):
    return sorted(path.name for path in Path(run_dir).iterdir())


class TestWhatCannotWrite:
    """A run without text, a run whose text is gone, and a best checkpoint without a measure."""

    SHORT = ["--training.max_steps", "4", "--training.precision", "fp32", *QUIET]

    @pytest.mark.parametrize("task", ["regression", "my_tasks:Mine", "my_tasks:Spelling"])
    def test_samples_of_it_are_refused_before_the_first_step(self, folder, task, capsys):
        # the last one has a tokenizer, and its model is no decoder
        with Path("my_tasks.py").open("a") as file:
            file.write(
                "from llm_course.text.tokenization import BPETokenizer\n"
                "class Spelling(Mine):\n"
                "    def build_model(self, data):\n"
                "        BPETokenizer.train(['a b'], vocab_size=259).save(self.config.run_dir)\n"
                "        return super().build_model(data)\n"
            )
        words = ["train", "--task", task, "--run-dir", "run", *self.SHORT]
        assert cli([*words, "--logging.sample_interval", "2"]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(
            f"error: logging.sample_interval=2 needs a run that writes text, and task='{task}' has "
        )
        assert {*_files("run")} - {"tokenizer.json"} == {".lock", "log.txt"}
        assert cli(words) == 0  # as the message says
        assert read_metrics("run/metrics.jsonl")[-1]["step"] == 4

    def test_it_is_not_asked_for_a_text(self, folder, capsys):
        assert cli(["train", "--task", "regression", "--run-dir", "a run", *self.SHORT]) == 0
        capsys.readouterr()
        assert cli(["generate", "--run", "a run", "--prompt", "x"]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith(
            "error: a run holds a run of task='regression' and no tokenizer.json, so it writes no"
            " text"
        )
        assert error.endswith("llm-course evaluate --run 'a run'")
        assert cli(["evaluate", "--run", "a run"]) == 0

    @pytest.mark.parametrize("command", [["evaluate"], ["generate", "--prompt", "x"]])
    def test_a_best_one_that_was_not_measured(self, folder, command, capsys):
        best = ["--checkpoint.best_metric", "null"]
        assert cli(["train", "--task", "regression", "--run-dir", "run", *self.SHORT, *best]) == 0
        capsys.readouterr()
        assert cli([*command, "--run", "run", "--checkpoint", "best"]) == 2
        error = capsys.readouterr().err
        assert (
            "run holds no best checkpoint: no whole one was measured by checkpoint.best_metric=None"
            in error
        )
        assert error.strip().endswith("Use --checkpoint latest")
        assert cli(["evaluate", "--run", "run", "--checkpoint", "latest"]) == 0
        assert cli([*command, "--run", "nowhere", "--checkpoint", "best"]) == 2
        assert (
            "nowhere holds no best checkpoint: train one with llm-course train --run-dir nowhere"
            in capsys.readouterr().err
        )


def test_the_settings_are_written_last_before_the_first_step(folder, monkeypatch):
    texts = []

    def save(config, path, save=train.save_config):
        texts.append(Path("run/log.txt").read_text())
        save(config, path)

    monkeypatch.setattr(train, "save_config", save)
    monkeypatch.setattr(
        TrainingEngine, "run", lambda engine: texts.append(Path("run/log.txt").read_text())
    )
    config = Config(
        run_dir="run", task="regression", training=TrainingConfig(max_steps=2, device="cpu")
    )
    train_worker(config)
    assert texts[0] == texts[1] and "model: 9 parameters" in texts[0]


# Case 23
@pytest.mark.skipif(sys.platform != "linux", reason="/proc refuses to be written even by root")
def test_a_run_killed_before_its_first_checkpoint_begins_again_but_as_no_other_run(folder):
    config = Config(
        run_dir="run", task="regression", training=TrainingConfig(max_steps=2, device="cpu")
    )
    train_worker(config)
    shutil.rmtree("run/checkpoints")
    before = {path: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}
    with pytest.raises(
        ValueError, match="another run: task=.regression. there, .my_tasks:Mine. now"
    ):
        train_worker(dataclasses.replace(config, task="my_tasks:Mine"))
    assert before == {path: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}
    assert train_worker(config).step == 2


def test_a_closed_pipe_is_no_success(tmp_path):
    (tmp_path / "many.py").write_text(
        "def lines(words):\n    for number in range(100_000):\n        print(number)\n   "
        " return 0\n"
    )
    code = (
        "import sys; from llm_course.cli import COMMANDS, main; COMMANDS['many'] = ('',"
        " 'many:lines'); sys.exit(main(['many']))"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr is not None and process.stderr.read() == b""


PIPES = """
import subprocess, sys

def short(words):
    print("a line")
    return 0

def large(words):
    print("x" * 100_000)
    return 0

def child_died(words):
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, bufsize=0)
    child.wait()
    child.stdin.write(b"a batch")
"""


@pytest.mark.skipif(
    sys.platform == "win32",
    reason="Windows has other errors for a closed pipe, and nothing to ask it by",
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command, reads, status",
    [("short", 0, 141), ("short", 1, 0), ("large", 0, 141), ("child_died", 1, 2)],
)
def test_only_a_pipe_without_a_reader_ends_in_silence(tmp_path, command, reads, status, unbuffered):
    (tmp_path / "pipes.py").write_text(PIPES)
    code = (
        "import sys; from llm_course.cli import COMMANDS, main; COMMANDS['it'] = '',"
        f" 'pipes:{command}'"
    )
    code += "; sys.exit(main(['it']))"
    reader, writer = os.pipe()
    if not reads:
        os.close(reader)  # before the process is there: nobody is faster
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", code]
    process = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    if reads:
        os.close(reader)
    assert process.returncode == status
    if status == 2:  # a pipe of its own: with its place
        assert "in child_died" in process.stderr and process.stderr.endswith(
            "error: [Errno 32] Broken pipe\n"
        )
    else:
        assert process.stderr == ""


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(capsys):
    assert cli(["train", "--task", "regression", "--run-dir", "/proc/nowhere", *QUIET]) == 2
    assert "/proc/nowhere cannot be written" in capsys.readouterr().err


# Case 21
def test_a_second_run_in_the_folder_is_refused(folder):
    holder = (
        "from pathlib import Path; from llm_course.training.run import _alone_in\n"
        "with _alone_in(Path('run')): print('held', flush=True); input()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", holder],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="another process is training in run"):
        train_worker(Config(run_dir="run", task="regression"))
    process.kill()  # however it ends, the lock is free
    process.wait()
    config = Config(
        run_dir="run", task="regression", training=TrainingConfig(max_steps=2, device="cpu")
    )
    config.logging.tensorboard = config.logging.progress = False
    assert train_worker(config).step == 2


def test_a_second_run_into_the_same_folder_of_checkpoints_is_refused(folder):
    config = Config(
        run_dir="mine", task="regression", training=TrainingConfig(max_steps=2, device="cpu")
    )
    config.logging.tensorboard = config.logging.progress = False
    config.checkpoint.dir = "shared"
    with train._alone_in(Path("shared")):  # as another run holds it
        with pytest.raises(ValueError, match="in shared: .* choose another --checkpoint.dir"):
            train_worker(config)
        assert not Path("mine", "config.yaml").exists()
        assert [path.name for path in Path("shared").iterdir()] == [".lock"]
        own = dataclasses.replace(config, run_dir="own", checkpoint=CheckpointConfig(dir="own"))
        assert train_worker(own).step == 2  # one folder for both has one lock
    assert train_worker(config).step == 2
    assert load_checkpoint(CheckpointManager("shared").latest())["state"]["step"] == 2


def of_text(task="lm"):
    """A run of two steps on a text of its own, in the current folder."""
    Path("text.txt").write_text(
        "\n\n".join(f"It was the best of times, number {n}." for n in range(200)), encoding="utf-8"
    )
    config = Config(
        run_dir="run",
        task=task,
        model=ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_position_embeddings=32),
        data=DataConfig(files=["text.txt"], vocab_size=270, sequence_length=16),
        training=TrainingConfig(max_steps=2, batch_size=2, device="cpu", precision="fp32"),
    )
    config.logging.tensorboard = config.logging.progress = False
    return config


def test_other_text_is_cut_by_the_tokenizer_of_the_run(tmp_path, monkeypatch):
    """With allow_changes: a new tokenizer would give the numbers that the weights have learned
    other meanings.
    """
    monkeypatch.chdir(tmp_path)
    Path("new.txt").write_text(
        "\n\n".join(f"{n} ways of saying something else altogether" for n in range(200)),
        encoding="utf-8",
    )
    config = of_text()
    train_worker(config)
    before = Path("run/tokenizer.json").read_bytes()
    config.data.files = ["new.txt"]
    config.training.max_steps = 4
    config.checkpoint.allow_changes = True
    with pytest.warns(UserWarning, match="going on from the next epoch"):
        assert train_worker(config).step == 4
    assert Path("run/tokenizer.json").read_bytes() == before
    load_run("run")


def test_a_task_with_its_own_model_writes_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("turned_tasks.py").write_text(
        "from llm_course.model.decoder import DecoderModel\nfrom llm_course.training.task import"
        " LanguageModelingTask\nclass Turned(DecoderModel):\n    pass\nclass"
        " Task(LanguageModelingTask):\n    def build_model(self, data):\n        model ="
        " super().build_model(data)\n        model.__class__ = Turned\n        return model\n",
        encoding="utf-8",
    )
    config = of_text(task="turned_tasks:Task")
    train_worker(config)
    assert type(load_run("run")[0]).__name__ == "Turned"


def test_resume_trains_the_run_that_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        config = Config(
            run_dir=name, task="regression", training=TrainingConfig(max_steps=2, device="cpu")
        )
        config.logging.tensorboard = config.logging.progress = False
        train_worker(config)
    assert cli(["resume", "--run", "a", "--run-dir", "b", "--training.max_steps", "4"]) == 0
    assert [read_metrics(f"{name}/metrics.jsonl")[-1]["step"] for name in ("a", "b")] == [4, 2]


PROGRAMS = "llm_course.cli train", "llm_course.training.train"


@pytest.mark.parametrize(
    "trains, refuses",
    [PROGRAMS, pytest.param(*reversed(PROGRAMS), marks=pytest.mark.nightly)],
)
def test_the_modules_are_programs_too(tmp_path, trains, refuses):
    """`python -m` trains, and refuses, as `llm-course train` does."""
    words = "--task regression --training.max_steps 2 --logging.progress false --run-dir run"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    options = dict(cwd=tmp_path, capture_output=True, text=True, env=environment)
    commands = [[sys.executable, "-m", *m.split(), *words.split()] for m in (trains, refuses)]
    first = subprocess.run(commands[0], **options)
    assert first.returncode == 0 and "validation loss" in first.stdout, first.stderr
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()
    again = subprocess.run(commands[1], **options)
    assert again.returncode == 2 and "error: run holds a finished run" in again.stderr

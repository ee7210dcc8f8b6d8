"""A run folder that version 0.1.0 wrote, in its first layout, is still read, continued and resumed.

`data/run_0_1_0` holds a run of 4 steps: two layers of experts, Muon with AdamW, documents kept
apart, router biases. The figures below are what that version itself gave, in float32.
"""

import shutil
from pathlib import Path

import pytest

from llm_course.cli import main
from llm_course.training.callbacks import read_metrics

KEPT = Path(__file__).parent / "data" / "run_0_1_0"
LOSSES = [5.676160812, 5.677035332, 5.648143291, 5.660599709]  # of steps 5 to 8
VALIDATION = {4: 5.688287020, 8: 5.662721872}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The kept run and its text, in a folder of their own that is the current one."""
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_writes(folder, capsys):
    words = ["--prompt", "Anna took", "--temperature", "0", "--max-new-tokens", "4"]
    assert main(["generate", "--run", "run", *words]) == 0
    assert capsys.readouterr().out == "Anna took took took took took\n"


def test_it_is_evaluated(folder, capsys):
    assert main(["evaluate", "--run", "run"]) == 0
    assert f"val_loss {VALIDATION[4]:.4f}" in capsys.readouterr().out


def test_it_is_resumed(folder):
    words = "--run-dir run --training.max_steps 8 --resume".split()
    assert main(["train", "--config", "run/config.yaml", *words]) == 0
    rows = read_metrics("run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["loss"] for row in rows[4:]] == pytest.approx(LOSSES, rel=1e-5)
    assert rows[-1]["val_loss"] == pytest.approx(VALIDATION[8], rel=1e-5)

"""`llm-course sweep`: what a file may say, and a sweep that is killed and goes on."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import warm

from llm_course.cli import main
from llm_course.training.callbacks import read_metrics
from llm_course.training.sources import flatten, read_config
from llm_course.training.sweep import (
    as_options,
    point_name,
    read_results,
    read_sweep,
    run_sweep,
    table,
)

BASE = """
base:
  task: regression
  training: {max_steps: 12, eval_interval: 12, precision: fp32}
  optimization: {warmup_steps: 2}
"""
GRID = BASE + "grid: {optimization.learning_rate: [0.01, 0.1], training.seed: [0, 1]}\n"


def write(folder: Path, text: str) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def measured(rows: list[dict]) -> list[dict]:
    """Rows without their time."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


# ------------------------------------------------------------------------------ the file


def test_points_are_combined_with_the_grid(tmp_path):
    file = write(
        tmp_path,
        BASE
        + "grid: {training.seed: [0, 1]}\n"
        + "points: [{optimization: {learning_rate: 0.1}}, {training.max_steps: 5}]\n",
    )
    points = read_sweep(file, tmp_path / "runs")
    assert [point.settings for point in points] == [
        {"optimization.learning_rate": 0.1, "training.seed": 0},
        {"optimization.learning_rate": 0.1, "training.seed": 1},
        {"training.max_steps": 5, "training.seed": 0},
        {"training.max_steps": 5, "training.seed": 1},
    ]
    assert [point.config.training.max_steps for point in points] == [12, 12, 5, 5]
    assert {Path(point.config.run_dir).parent for point in points} == {tmp_path / "runs"}


def test_a_base_may_begin_with_the_file_of_a_configuration(tmp_path):
    (tmp_path / "common.yaml").write_text("training: {max_steps: 7, batch_size: 3}\n")
    file = write(tmp_path, "base: {config: common.yaml, training.batch_size: 5}\n")
    [point] = read_sweep(file, tmp_path / "runs")
    assert point.name == "base"
    assert (point.config.training.max_steps, point.config.training.batch_size) == (7, 5)


def test_every_kind_of_value_survives_the_way_through_options(tmp_path):
    text = (
        "base: {training: {patience: null, compile: false}, data: {files: [a.txt, 'b c.txt']},"
        " optimization: {learning_rate: 5e-4}, checkpoint: {best_metric: null}}\n"
    )
    [point] = read_sweep(write(tmp_path, text), tmp_path / "runs")
    config = point.config
    assert config.training.patience is None and config.training.compile is False
    assert config.data.files == ["a.txt", "b c.txt"]
    assert (config.optimization.learning_rate, config.checkpoint.best_metric) == (5e-4, None)
    assert as_options(flatten({"model": {"rope_layers": [True]}})) == ["--model.rope_layers=[true]"]


def test_a_name_fits_into_a_folder_and_tells_keys_apart():
    settings = {"data.stories.seed": 1, "training.seed": 2, "task": "a/b:C", "hidden": None}
    assert point_name(settings) == "data.stories.seed=1,training.seed=2,task=a%2Fb%3AC,hidden=None"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected some of base, grid, points"),
        ("- 1\n", "it has list"),
        ("grid: {}\nextra: 1\n", "it has grid, extra"),
        ("grid: [1]\n", "grid must hold keys and values"),
        ("points: {training.seed: 1}\n", "points must hold a list of runs"),
        ("points: [3]\n", "points: 3 must hold keys and values"),
        ("grid: {training.seed: 3}\n", "grid: training.seed=3 must be a list of values: [3]"),
        ("grid: {training.seed: []}\n", "must be a list of values"),
        ("grid: {training.sed: [1]}\n", "do you mean 'training.seed'?"),
        ("grid: {training.seed: [-1]}\n", "training.seed=-1 must be"),
        ("grid: {training.seed: [1, 1]}\n", "the run training.seed=1 is listed twice"),
        ("grid: {run_dir: [a, b]}\n", "run_dir is chosen by the sweep"),
        ("base: {config: none.yaml}\n", "there is no such file"),
        ("base: {task: lm\n", "sweep.yaml"),
        ("base: {task: lm, task: lm}\n", "is set in line 1 and again in line 1"),
        ("base: {training: {seed: 1}, training.seed: 2}\n", "'training.seed' is set twice"),
        (
            "points: [{training.seed: 1}]\ngrid: {training.seed: [2]}\n",
            "training.seed is in points and in grid",
        ),
        ("base: {run-dir: a}\n", "run-dir is chosen by the sweep"),
        ("base: {resume: true}\n", "resume is what a sweep does anyway"),
        ("base: {help: true}\n", "help is not a setting"),
        ("base: {config: [a.yaml, b.yaml]}\n", "must be the path of one file"),
        ("base: {task: 2020-01-01}\n", "is a date in YAML: put it in quotes"),
        ("base: &a {task: *a}\n", "nested too deeply"),
        (f"base: {{training: {{seed: 1{400 * '0'}}}}}\n", "too large"),
        (f"grid: {{data.files: [[{300 * 'a'}]]}}\n", "and 255 is the most"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_trained(tmp_path, text, words):
    file = write(tmp_path, text)
    with pytest.raises(ValueError) as refusal:
        read_sweep(file, tmp_path / "runs")
    assert str(refusal.value).startswith(str(file)) and words in str(refusal.value)
    assert not (tmp_path / "runs").exists()


def test_a_file_that_config_names_lies_beside_the_sweep_in_every_part(tmp_path):
    for name, steps in (("short.yaml", 3), ("long.yaml", 9)):
        (tmp_path / name).write_text(f"training: {{max_steps: {steps}}}\n")
    for text in ("grid: {config: [short.yaml, long.yaml]}\n", "points: [{config: short.yaml}]\n"):
        points = read_sweep(write(tmp_path, text), tmp_path / "runs")
        assert [point.config.training.max_steps for point in points] == [3, 9][: len(points)]
        assert points[0].name == "config=short.yaml"


@pytest.mark.parametrize("line", ["{", "3", '{"loss": 1.0}', ""])
def test_a_spoilt_line_of_results_is_named(tmp_path, line):
    (tmp_path / "results.jsonl").write_text(f'{{"name": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match="results.jsonl: line 2 is not the row of a run"):
        read_results(tmp_path)


def test_a_missing_file_is_an_error_at_the_terminal(tmp_path, capsys):
    assert main(["sweep", str(tmp_path / "none.yaml")]) == 2
    assert "there is no such file" in capsys.readouterr().err


# ------------------------------------------------------------------------------ the runs


def test_one_worker_and_two_give_the_same_rows(tmp_path, monkeypatch):
    """The two are warm: those of the killed sweep start as they do for a user."""
    server = warm.server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: server)
    file = write(tmp_path, GRID)
    rows = [
        run_sweep(read_sweep(file, tmp_path / name), tmp_path / name, workers=workers)
        for name, workers in (("one", 1), ("two", 2))
    ]
    assert measured(rows[0]) == measured(rows[1])
    assert len({row["val_loss"] for row in rows[0]}) == 4


def test_a_run_is_an_ordinary_run(tmp_path):
    points = read_sweep(write(tmp_path, GRID), tmp_path / "runs")
    rows = run_sweep(points[:1], tmp_path / "runs")
    folder = Path(points[0].config.run_dir)
    assert read_config(folder / "config.yaml") == points[0].config
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert (rows[0]["step"], rows[0]["val_loss"]) == (12, last["val_loss"])


def test_a_changed_base_is_refused_and_a_larger_grid_is_not(tmp_path):
    folder = tmp_path / "runs"
    run_sweep(read_sweep(write(tmp_path, GRID), folder), folder)
    larger = write(tmp_path, GRID.replace("[0, 1]", "[0, 1, 2]"))
    told: list[str] = []
    rows = run_sweep(read_sweep(larger, folder), folder, tell=told.append)
    assert (len(rows), len(told)) == (6, 2)
    changed = read_sweep(
        write(tmp_path, GRID.replace("eval_interval: 12", "eval_interval: 6")), folder
    )
    with pytest.raises(ValueError, match="training.eval_interval=12 there, 6 now"):
        run_sweep(changed, folder)


def test_a_run_that_diverges_is_a_row_that_says_so(tmp_path):
    text = GRID.replace("[0.01, 0.1]", "[0.01, 1e30]").replace("[0, 1]", "[0]")
    folder = tmp_path / "runs"
    rows = run_sweep(read_sweep(write(tmp_path, text), folder), folder)
    assert "val_loss" in rows[0] and "error" not in rows[0]
    assert "not finite" in rows[1]["error"] or "finite" in rows[1]["error"]
    assert run_sweep(read_sweep(write(tmp_path, text), folder), folder) == rows
    assert "error" in table(rows).splitlines()[0]


def test_text_is_prepared_once_and_borrowed(tmp_path):
    text = """
base:
  model: {hidden_size: 16, num_layers: 1, num_heads: 1, max_position_embeddings: 32}
  data: {corpus: stories, stories: {level: easy, num_bytes: 40000}, vocab_size: 300}
  training: {max_steps: 2, batch_size: 2, eval_interval: 2, precision: fp32}
grid: {data.sequence_length: [16, 32], optimization.learning_rate: [0.01, 0.02]}
"""
    folder = tmp_path / "runs"
    points = read_sweep(
        write(tmp_path, text.replace("corpus:", "val_fraction: 0.1, corpus:")), folder
    )
    run_sweep(points, folder)
    files = [Path(point.config.run_dir, "data", "train.tokens") for point in points]
    same = [os.path.samefile(files[0], file) for file in files]
    assert same == [True, True, False, False]  # another length is another data section
    assert files[0].read_bytes() == files[2].read_bytes()


# ------------------------------------------------------------------------------ a killed sweep

LONG = BASE.replace("12", "600") + (
    "  checkpoint: {save_interval: 20}\n"
    "  logging: {log_interval: 20}\n"
    "grid: {optimization.learning_rate: [0.001, 0.01]}\n"
)


def start(file: Path, folder: Path, workers: int) -> warm.Warm:
    return warm.llm_course("sweep", str(file), "--to", str(folder), "--workers", str(workers))


def wait_until(ready, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


def steps_logged(folder: Path) -> list[int]:
    files = list(folder.glob("*/metrics.jsonl"))
    return [row["step"] for file in files for row in read_metrics(file)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_sweep_goes_on_and_gives_the_same_rows(tmp_path, workers):
    file = write(tmp_path, LONG)
    whole = tmp_path / "whole"
    expected = run_sweep(read_sweep(file, whole), whole)
    folder = tmp_path / "killed"
    process = start(file, folder, workers)
    wait_until(lambda: any(step >= 60 for step in steps_logged(folder)))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    points = read_sweep(file, folder)
    seen = len(read_results(folder))

    def free() -> bool:  # the workers have ended with their parent
        try:
            rows = run_sweep(points, folder)
        except ValueError as error:
            assert "another process is training" in str(error)
            return False
        assert measured(rows) == measured(expected)
        return True

    wait_until(free)
    assert seen < 2, "the sweep was over before it was killed"
    first = steps_logged(Path(points[0].config.run_dir).parent)
    assert len(first) == 2 * len(set(first))  # no step was logged twice


def test_a_run_that_ended_before_its_row_was_written_gets_its_row(tmp_path):
    """The sweep is killed between the end of a run and the write of its row."""
    points = read_sweep(write(tmp_path, GRID), tmp_path / "runs")
    expected = run_sweep(points, tmp_path / "runs")
    results = tmp_path / "runs" / "results.jsonl"
    first, *_ = results.read_text().splitlines(keepends=True)
    results.write_text(first)
    lines: list[str] = []
    assert run_sweep(points, tmp_path / "runs", tell=lines.append) == expected
    assert len(lines) == len(points) - 1


def test_an_interrupted_sweep_saves_its_run_and_says_so(tmp_path):
    file = write(tmp_path, LONG)
    folder = tmp_path / "runs"
    process = start(file, folder, workers=1)
    wait_until(lambda: any(step >= 40 for step in steps_logged(folder)))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(read_results(folder)) < 2
    [checkpoint, *_] = sorted(folder.glob("*/checkpoints/step_*/manifest.json"))
    assert json.loads(checkpoint.read_text())

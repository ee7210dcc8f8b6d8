"""`llm-course check-run` names mistakes that were made on purpose, and accuses no healthy run.

The runs were recorded by `python -m tests.faults`; here they are diagnosed again. One of each kind
of evidence is also trained anew, with a model of a few steps.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from llm_course.commands.check_run import check_run_command, report
from llm_course.pages.pretraining import load_faults
from llm_course.training.bands import Band, find_band, load_bands
from llm_course.training.diagnosis import diagnose, read_evidence
from llm_course.training.run import train_worker
from llm_course.training.sources import read_config
from tests.faults import FAULTS, exchange_tokenizer, small_config, train_with

ROOT = Path(__file__).resolve().parent.parent
RECORDED = load_faults()


def named(evidence) -> str | None:
    causes = diagnose(evidence).causes
    return causes[0].kind if causes else None


# ------------------------------------------------------------------------------ recorded runs


def test_there_is_a_record_of_each_fault():
    assert list(RECORDED) == list(FAULTS)
    assert len(FAULTS) > 10
    assert {name: run.cause for name, run in RECORDED.items()} == {
        name: fault.cause for name, fault in FAULTS.items()
    }


def test_at_least_eight_of_ten_faults_are_named():
    faulty = {name: run for name, run in RECORDED.items() if run.cause}
    missed = [name for name, run in faulty.items() if named(run.evidence) != run.cause]
    assert len(missed) <= 0.2 * len(faulty), missed


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.cause is None])
def test_a_healthy_run_is_normal(name):
    found = diagnose(RECORDED[name].evidence)
    assert found.is_normal, found


def test_each_seed_of_the_band_would_be_normal_beside_the_others():
    """Leave one out: the band of five seeds holds the sixth."""
    stored = json.loads((ROOT / "llm_course/training/bands.json").read_text(encoding="utf-8"))
    for name, entry in stored.items():
        for run in entry["runs"]:
            others = [other for other in entry["runs"] if other is not run]
            band = Band(name, entry | {"runs": others})
            for column in ("loss", "val_loss", "grad_norm"):
                rows = [{"targets": targets, column: value} for targets, value in run[column]]
                deviations = sorted(map(abs, band.deviations(column, rows)))
                assert deviations[len(rows) // 2] < Band.WIDTH, (name, run["seed"], column)


def test_every_band_has_five_seeds_and_belongs_to_its_configuration():
    for name, band in load_bands().items():
        assert len(set(band.seeds)) >= 5
        assert find_band(read_config(ROOT / "configs" / f"{name}.yaml")) is band, (
            f"configs/{name}.yaml has changed: run `make bands`"
        )


# ------------------------------------------------------------------------------ runs of seconds


def quick(folder: Path):
    """The small run, cut down to a few steps of a smaller model."""
    config = small_config(str(folder), seed=1, max_steps=16)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, hidden_size=32, num_layers=2, num_heads=2),
        data=dataclasses.replace(
            config.data,
            stories=dataclasses.replace(config.data.stories, num_bytes=100_000),
            vocab_size=300,
            sequence_length=32,
            val_fraction=0.2,
        ),
        training=dataclasses.replace(config.training, batch_size=4, eval_interval=8),
        optimization=dataclasses.replace(config.optimization, warmup_steps=2),
        checkpoint=dataclasses.replace(config.checkpoint, save_interval=8),
    )


@pytest.mark.parametrize(
    "name", ["labels not shifted", "validation text in training", "a frozen block"]
)
def test_a_fault_is_named_without_a_band(name, tmp_path):
    assert named(train_with(FAULTS[name], quick(tmp_path))) == FAULTS[name].cause


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    train_worker(quick(folder))
    return folder


def test_a_healthy_run_without_a_band_is_normal_and_its_report_says_so(healthy, capsys):
    assert check_run_command([str(healthy), "--speed"]) == 0
    printed = capsys.readouterr().out
    assert "none for this task" in printed and "nothing unusual" in printed
    assert "for one process on this machine" in printed


def test_the_command_says_what_is_unusual_and_returns_1(healthy, tmp_path, capsys):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    exchange_tokenizer(tmp_path)
    assert check_run_command([str(tmp_path)]) == 1
    assert "likely       tokenizer" in capsys.readouterr().out


def test_an_unfinished_run_can_be_checked(healthy):
    evidence = read_evidence(healthy)
    begun = dataclasses.replace(evidence, rows=evidence.rows[:2], weights=None)
    assert diagnose(begun).is_normal
    assert any("none that this model can load" in line for line in report(begun, diagnose(begun)))


@pytest.mark.parametrize("task", ["nothing", "regression"])
def test_a_folder_without_a_language_model_is_refused(task, tmp_path):
    if task == "regression":
        config = dataclasses.replace(quick(tmp_path), task="regression")
        train_worker(config)
    with pytest.raises(ValueError, match="holds no run|can't be checked"):
        read_evidence(tmp_path)

"""`llm-course check-run` names mistakes that were made on purpose, and accuses no healthy run.

The runs were recorded by `python -m tests.faults`; here they are diagnosed again. One of each kind
of evidence is also trained anew, with a model of a few steps.
"""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from llm_course.commands.check_run import check_run_command, report
from llm_course.pages.pretraining import load_faults
from llm_course.training.bands import Band, find_band, load_bands
from llm_course.training.diagnosis import (
    diagnose,
    losses_by_offset,
    read_evidence,
    shared_share,
    unigram_entropy,
)
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
    """Leave one out: the band of the other seeds holds it."""
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


def with_changed_row(changes: dict):
    """The recorded healthy run, with another fifth row."""
    evidence = RECORDED["healthy"].evidence
    rows = [dict(row) for row in evidence.rows]
    rows[5] |= changes
    return dataclasses.replace(evidence, rows=rows)


@pytest.mark.parametrize("column", ["loss", "val_loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_named_alone(column, value):
    evidence = with_changed_row({column: value})
    found = diagnose(evidence)
    step = evidence.rows[5]["step"]
    assert [cause.kind for cause in found.causes] == ["not finite"] and not found.symptoms
    assert found.causes[0].evidence == f"{column} is {value} at step {step}"
    assert any("likely       not finite" in line for line in report(evidence, found))


def test_a_step_that_fp16_skipped_may_have_an_infinite_norm():
    changes = {"grad_norm": math.inf, "skipped_steps": 1}
    assert "not finite" not in [cause.kind for cause in diagnose(with_changed_row(changes)).causes]


def test_a_run_without_targets_is_named():
    evidence = RECORDED["healthy"].evidence
    rows = [dict(row, loss=0.0, targets=0) for row in evidence.rows]
    assert named(dataclasses.replace(evidence, rows=rows, band=None)) == "masked targets"


# ------------------------------------------------------------------------------ bands


CURVE = [[10, 2.0], [20, 1.0]]


def band_of(*curves) -> Band:
    runs = [
        {"seed": seed, "loss": curve, "val_loss": CURVE, "grad_norm": CURVE}
        for seed, curve in enumerate(curves)
    ]
    return Band("toy", {"task": {}, "knobs": {}, "runs": runs})


def test_a_band_needs_two_seeds_and_numbers_with_a_logarithm():
    assert band_of(CURVE, CURVE).interval("loss", 10).middle == pytest.approx(2)
    with pytest.raises(ValueError, match="the band toy has 1 runs"):
        band_of(CURVE)
    for bad in ([], [[10, 0.0]], [[10, -1.0]], [[10, math.nan]], [1, 2], [[10, 2.0, 3.0]]):
        with pytest.raises(ValueError, match="pairs of targets and a value"):
            band_of(CURVE, bad)
    for targets in (-1, math.nan, None):
        with pytest.raises(ValueError, match=f"targets={targets}"):
            band_of(CURVE, CURVE).interval("loss", targets)
    values = [{"targets": 10, "loss": value} for value in (0.0, math.nan, math.inf, 2.0)]
    assert band_of(CURVE, CURVE).deviations("loss", values) == pytest.approx([0])


# ------------------------------------------------------------------------------ facts


def test_facts_about_text_of_any_integer_type():
    ids = np.random.default_rng(0).integers(500, size=400, dtype=np.uint16)
    for dtype in (np.uint16, np.int64, ">u2"):  # a file's ids, a tensor's, another machine's
        assert shared_share(ids, ids.astype(dtype)) == pytest.approx(0.96)
        assert unigram_entropy(ids.astype(dtype)) == unigram_entropy(ids)
    assert shared_share(np.repeat(ids, 2)[::2], ids) == pytest.approx(0.96)
    assert shared_share(ids[:10], ids) == 1  # shorter than the window
    assert math.copysign(1, unigram_entropy(np.array([3, 3]))) == 1  # 0.0, and not -0.0
    for bad in (ids[:0], ids.reshape(2, 200), ids.astype(float), None, "abc"):
        for call in (
            lambda bad=bad: unigram_entropy(bad),
            lambda bad=bad: shared_share(bad, ids),
            lambda bad=bad: shared_share(ids, bad),
        ):
            with pytest.raises(ValueError, match=r"(ids|val|train) has"):
                call()
    for window in (0, -1, None):
        with pytest.raises(ValueError, match="window"):
            shared_share(ids, ids, window=window)


class Uniform(torch.nn.Module):
    def forward(self, input_ids):
        return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 9)})


def test_losses_by_offset_are_refused_where_no_target_is():
    ids = torch.arange(8).view(2, 4)
    for whole in (ids, ids.int(), ids.t().contiguous().t()):
        assert losses_by_offset(Uniform(), whole)[1] == pytest.approx(math.log(9))
    for bad in (ids[:, :3], ids[:0], ids[0], ids.float(), None):
        with pytest.raises(ValueError, match="ids "):
            losses_by_offset(Uniform(), bad)
    for offset in (-2, 3, 0.5, None):
        with pytest.raises(ValueError, match="offset="):
            losses_by_offset(Uniform(), ids, offsets=(offset,))


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


def test_null_in_a_row_is_nan(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    *rows, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    spoilt = json.dumps(json.loads(last) | {"val_loss": None})
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, spoilt]) + "\n")
    assert diagnose(read_evidence(tmp_path)).causes[0].evidence == "val_loss is nan at step 16"


@pytest.mark.parametrize("task", ["nothing", "regression"])
def test_a_folder_without_a_language_model_is_refused(task, tmp_path):
    if task == "regression":
        config = dataclasses.replace(quick(tmp_path), task="regression")
        train_worker(config)
    with pytest.raises(ValueError, match="holds no run|can't be checked"):
        read_evidence(tmp_path)

"""What chapter 20 shows: a card of facts, a recorded run, and a model that other programs open."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from llm_course.commands.export import export_command
from llm_course.pages.exercise_pretraining import HONEST, write_run
from llm_course.pages.pretraining import model_card, storyteller_run, tiny_run
from llm_course.text.stories import entropy
from llm_course.training.folder import load_run
from llm_course.training.run import train_worker


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = dict(corpus="stories", sequence_length=32, vocab_size=300, val_fraction=0.2)
    train_worker(tiny_run(folder, max_steps=4, **data))
    return folder


def test_a_card_says_what_the_folder_says(run):
    card = model_card(run)
    info = json.loads((run / "data" / "info.json").read_text(encoding="utf-8"))
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    for fact in (info["corpus_sha256"][:12], f"{last['val_loss']:.2f} nats", "4 steps", "300 entr"):
        assert fact in card


def test_the_exported_model_is_the_same_to_transformers(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    with contextlib.redirect_stdout(io.StringIO()):
        export_command(["--run", str(run), "--to", str(tmp_path / "hf")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours, _ = load_run(run)
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_storyteller_came_near_the_entropy_and_not_below():
    rows = [row for row in storyteller_run()["rows"] if "val_bits_per_byte" in row]
    best = entropy("easy", num_stories=200).bits_per_byte
    bits = [row["val_bits_per_byte"] for row in rows]
    assert best < bits[-1] == min(bits) < 1.25 * best
    assert set(storyteller_run()["samples"]) >= {200, 600, 2000}  # which page 20a shows


def test_the_honest_card_of_the_exercise_is_that_of_its_folder(tmp_path):
    write_run(tmp_path)
    rows = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    *_, measured, last = map(json.loads, rows[:-1])  # the very last one is cut off
    assert (last["step"], last["targets"]) == (HONEST["steps"], HONEST["tokens"])
    assert measured["val_loss"] == pytest.approx(HONEST["val_loss"], rel=0.01)

"""Phrases: where they may end, what a held-out story is measured by, and when a push is over."""

import re

import pytest
import torch

from llm_course.pages import phrases as page
from llm_course.pages.larger import ThingWeights
from llm_course.pages.phrases import PushTask, WholeStoryTask, train_phrases
from llm_course.text.batches import IGNORE_INDEX
from llm_course.text.stories import read_story, write_story
from llm_course.training.config import Config, DataConfig, OptimizationConfig, StoriesConfig

TEXTS = [write_story("easy", index=index) for index in range(60)]


@pytest.fixture(scope="module")
def phrases():
    return train_phrases(TEXTS, num_words=900, vocab_size=1200)


def config(folder):
    return Config(
        run_dir=str(folder),
        data=DataConfig(
            corpus="stories",
            stories=StoriesConfig(level="easy", num_bytes=1_500_000),
            tokenizer="phrases",
            vocab_size=1700,
            sequence_length=64,
            val_fraction=0.01,
        ),
        optimization=OptimizationConfig(schedule="constant", warmup_steps=0),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    found = WholeStoryTask(config(tmp_path_factory.mktemp("run"))).build_data()
    found.prepare_data()
    found.setup()
    return found


def test_no_phrase_reaches_across_the_end_of_a_sentence(phrases):
    texts = [phrases.decode([i]) for i in range(phrases.vocab_size)]
    assert any(re.search(r"\w \w+ \w", text) for text in texts)
    assert not [text for text in texts if re.search(r'[.!?"\n].*\w|\w.*[.!?"\n]', text)]


@pytest.mark.parametrize("text", ["", " ", '"So?" he said.\n\n"No!"', "a\tb", "Zoë 3,000 \u2603"])
def test_any_text_comes_back(phrases, text):
    assert phrases.decode(phrases.encode(text)) == text
    assert "".join(page.sentences(text)) == text


def test_held_out_stories_are_read_from_end_to_end(data):
    rows = data.val_dataset
    assert len(rows) > 3
    batch = rows.__getitems__(range(len(rows)))
    for row, labels, text in zip(batch["input_ids"], batch["labels"], data.texts, strict=True):
        told = labels[labels != IGNORE_INDEX]
        assert data.tokenizer.decode(told.tolist()) == text and read_story(text, "easy").is_whole
        assert row[0] == data.tokenizer.eos_token_id
        assert torch.equal(row[1 : len(told)], told[:-1])
    bits = sum(read_story(text, "easy").bits for text in data.texts)
    assert data.entropy == pytest.approx(bits / len("".join(data.texts).encode()))


def test_a_loss_is_converted_with_the_bytes_of_the_stories_it_was_measured_on(data):
    task = WholeStoryTask(config(data.folder))
    chance = torch.tensor(float(data.vocab_size)).log().item()
    found = task.metrics(chance, data)
    targets = (data.val_dataset.labels != IGNORE_INDEX).sum().item()
    bits = targets * torch.tensor(float(data.vocab_size)).log2().item()
    assert found["bits_per_byte"] == pytest.approx(bits / sum(map(len, data.texts)))
    assert found["above"] == pytest.approx(found["bits_per_byte"] - data.entropy)


def test_a_push_ends_after_three_quarters_of_the_steps(data):
    task = PushTask(config(data.folder))
    task.data = data
    model = task.build_model(data)
    schedule = task.build_scheduler(torch.optim.SGD(model.parameters(), lr=0.0), max_steps=4)
    batch = data.train_dataset.__getitems__([0, 1])
    targets = []
    for _ in range(4):
        targets.append(int(task.train_step(model, batch).num_targets))
        schedule.optimizer.step()
        schedule.step()
    pushed = int(task.weights(batch["labels"]).sum())
    assert targets == [pushed, pushed, pushed, 128] and pushed > 128 + 19
    ordinary = WholeStoryTask(config(data.folder)).train_step(model, batch)
    assert task.train_step(model, batch).loss_sum == ordinary.loss_sum


def test_a_tokenizer_that_cuts_the_name_of_a_thing_is_refused(phrases):
    with pytest.raises(ValueError, match="tokens and must have one: train the tokenizer on more"):
        ThingWeights(phrases, weight=20)


def test_the_recorded_runs_had_the_same_time_and_the_same_stories():
    rows = list(page.runs().values())
    assert [row["is_pushed"] for row in rows] == [False, False, True, False, True]
    assert [row["tokenizer"] == "phrases" for row in rows] == [False, False, False, True, True]
    seconds = [row["seconds"] for row in rows]
    assert max(seconds) < 1.3 * min(seconds)
    entropy = {round(row["bits_per_byte"] - row["above"], 4) for row in rows}
    assert len(entropy) == 1

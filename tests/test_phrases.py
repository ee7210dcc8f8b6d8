"""Phrases: where they may end, what a held-out story is measured by, and when a push is over."""

import re
from dataclasses import replace

import pytest
import torch

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.pages import phrases as page
from llm_course.pages.larger import ThingWeights
from llm_course.pages.phrases import PushTask, WholeStoryTask, train_phrases
from llm_course.pages.scaling import whole_documents
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


def test_a_box_gets_what_leaves_the_least_room():
    assert page.best_fit([3, 6, 4, 5, 2], 10) == [[1, 2], [3, 0, 4]]
    lengths = torch.randint(1, 300, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    boxes = page.best_fit(lengths, 512)
    assert sorted(index for box in boxes for index in box) == list(range(2000))
    assert max(sum(lengths[index] for index in box) for box in boxes) <= 512
    assert len(boxes) < 1.02 * sum(lengths) / 512
    with pytest.raises(
        ValueError, match="513 tokens don't fit into a row of 512: give longer rows"
    ):
        page.best_fit([5, 513], 512)


def test_a_packed_row_holds_whole_stories_and_each_of_them_once(data):
    separator_id = data.tokenizer.eos_token_id
    tokens = data.prepared.open_tokens("train", data.tokenizer)[:]
    stories = whole_documents(tokens, separator_id)
    rows = page.StoryRows(tokens, separator_id, 512)
    batch = rows.__getitems__(range(len(rows)))
    assert batch["input_ids"].shape == batch["labels"].shape == (len(rows), 512)
    found = []
    for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        told = labels[labels != IGNORE_INDEX]
        assert inputs[0] == told[-1] == separator_id
        assert torch.equal(inputs[1 : len(told)], told[:-1])
        assert (inputs[len(told) :] == separator_id).all()
        found += whole_documents(torch.cat([inputs[:1], told]).numpy(), separator_id)
    assert sorted(map(tuple, found)) == sorted(map(tuple, stories))
    assert (batch["labels"] != IGNORE_INDEX).float().mean() > 0.95


def test_a_story_apart_is_read_as_if_it_were_alone(data):
    tokens = data.prepared.open_tokens("train", data.tokenizer)[:]
    separator_id = data.tokenizer.eos_token_id
    batch = page.StoryRows(tokens, separator_id, 512).__getitems__([-1])
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=data.vocab_size, hidden_size=32, num_heads=2, num_layers=2)
    model = DecoderModel(replace(config, max_position_embeddings=512)).eval()
    numbers = batch["document_ids"]
    assert numbers.max() > 1
    with torch.no_grad():
        apart = model(batch["input_ids"], document_ids=numbers).logits
        for number in numbers.unique():
            alone = model(batch["input_ids"][numbers == number][None]).logits[0]
            torch.testing.assert_close(apart[numbers == number], alone, atol=1e-5, rtol=1e-5)


def test_a_push_keeps_documents_apart_and_skips_what_is_no_target(data):
    weights = ThingWeights(data.tokenizer, weight=20)
    labels = torch.randint(4, 1000, (2, 32), generator=torch.Generator().manual_seed(0))
    labels[:, 20:] = IGNORE_INDEX
    every = weights(labels)
    assert (every[:, 20:] == 0).all() and torch.equal(
        every[:, :19], weights(labels[:, :20])[:, :19]
    )
    torch.manual_seed(0)
    model = DecoderModel(ModelConfig(vocab_size=data.vocab_size, hidden_size=32, num_heads=2))
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    together = weights.step(model, batch)
    batch["document_ids"] = torch.arange(32).expand(2, 32) // 7
    apart = weights.step(model, batch)
    assert together.num_targets == apart.num_targets == every.sum()
    assert together.loss_sum != apart.loss_sum


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
    pushed = [row["is_pushed"] for row in rows]
    assert pushed == [False, False, True, False, True, True]
    in_phrases = [row["tokenizer"] == "phrases" for row in rows]
    assert in_phrases == [False, False, False, True, True, True]
    assert [row["is_apart"] for row in rows] == [False] * 5 + [True]
    seconds = [row["seconds"] for row in rows]
    assert max(seconds) < 1.3 * min(seconds)
    entropy = {round(row["bits_per_byte"] - row["above"], 4) for row in rows}
    assert len(entropy) == 1

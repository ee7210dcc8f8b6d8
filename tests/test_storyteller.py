"""The small model that comes with the package: it loads, it's small, and it tells stories."""

import math
from itertools import islice

import torch

from llm_course.pages.generation import first_impossible, tell
from llm_course.pages.storyteller import FOLDER, load_storyteller
from llm_course.text.stories import read_story, stories

MARGIN = 0.05  # bits per byte between the model's loss and the entropy of the stories


def fresh_stories(num: int) -> list[str]:
    """Stories of a seed that the model wasn't trained on, short enough for its context."""
    model, tokenizer = load_storyteller()
    longest = model.config.max_position_embeddings
    fit = (text for text in stories("easy", seed=10_000) if len(tokenizer.encode(text)) < longest)
    return list(islice(fit, num))


def bits_per_byte(texts: list[str]) -> tuple[float, float]:
    """The model's loss on these texts, and the information that is in them."""
    model, tokenizer = load_storyteller()
    end = tokenizer.eos_token_id
    assert end is not None
    lost = 0.0
    held = 0.0
    num_bytes = 0
    for text in texts:
        ids = torch.tensor([[end, *tokenizer.encode(text), end]])
        with torch.no_grad():
            lost += model(ids[:, :-1], labels=ids[:, 1:]).loss_sum.item() / math.log(2)
        held += read_story(text, "easy").bits
        num_bytes += len(text)
    return lost / num_bytes, held / num_bytes


def test_it_is_small_and_says_how_it_was_made():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert sum(files.values()) < 12_000_000
    assert "configs/storyteller.yaml" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_it_loads_without_a_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load_storyteller.cache_clear()
    model, tokenizer = load_storyteller()
    assert not model.training
    assert next(model.parameters()).dtype == torch.float32
    assert model.config.vocab_size == tokenizer.vocab_size
    assert load_storyteller()[0] is model


def test_its_loss_on_fresh_stories_is_near_their_entropy():
    lost, held = bits_per_byte(fresh_stories(40))
    assert held - 0.01 < lost < held + MARGIN, (lost, held)


def test_planted_weights_miss_the_entropy(monkeypatch):
    model, _ = load_storyteller()
    head = model.embedding.embed_tokens.weight
    monkeypatch.setattr(head, "data", head.data.roll(1, dims=0))  # each token gets another's vector
    lost, held = bits_per_byte(fresh_stories(2))
    assert lost > held + MARGIN


def test_it_writes_what_could_be_a_story():
    model, tokenizer = load_storyteller()
    (text,) = tell(model, tokenizer, "Once upon a time there was", tokens=60, temperature=0.0)
    assert first_impossible(text) > 60, text

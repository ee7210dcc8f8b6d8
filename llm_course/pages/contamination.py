"""What the page on contamination trains and draws: a storyteller that has read the test."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

from llm_course.model.decoder import DecoderModel
from llm_course.text.stories import read_story
from llm_course.text.tokenization import BaseTokenizer
from llm_course.training.scoring import Scorer

OTHER_WORDS = {
    "Anton": "Felix",
    "Maya": "Clara",
    "clock": "drum",
    "paintbrush": "kettle",
    "pink": "silver",
    "black": "golden",
    "garden": "orchard",
    "playground": "hill",
    "apple tree": "plum tree",
    "slide": "ladder",
}


def read_again(
    model: DecoderModel, tokenizer: BaseTokenizer, texts: Sequence[str], *, times: int
) -> DecoderModel:
    """A copy of a model that has been trained on each of `texts` a few times."""
    found = copy.deepcopy(model).requires_grad_(True)
    encode = Scorer(found, tokenizer).encode
    optimizer = torch.optim.AdamW(found.parameters(), lr=2e-3, weight_decay=0)
    for _ in range(times):
        for text in texts:
            ids = torch.tensor([encode(text)])
            loss = F.cross_entropy(found(ids[:, :-1]).logits[0], ids[0, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return found.requires_grad_(False)


def bits_per_byte(scorer: Scorer, texts: Sequence[str]) -> float:
    """How many bits a model needs for each byte of some texts."""
    scores = scorer.document_scores(texts)
    return -math.fsum(one.log_prob for one in scores) / math.log(2) / _num_bytes(texts)


def least_bits_per_byte(texts: Sequence[str]) -> float:
    """What the program that wrote these easy stories would need: it knows every probability."""
    return math.fsum(read_story(text, "easy").bits for text in texts) / _num_bytes(texts)


def _num_bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def renamed(story: str) -> str:
    """A story with other names for its people, things, colours and places."""
    for word, other in OTHER_WORDS.items():
        story = story.replace(word, other)
    return story


def longest_run(first: str, second: str) -> int:
    """How many words in a row two texts share, by the standard library; case doesn't count."""
    a, b = (re.findall(r"\w+", text.casefold()) for text in (first, second))
    return SequenceMatcher(None, a, b, autojunk=False).find_longest_match().size


def show_bits(rows: Mapping[str, Sequence[float]], least: Sequence[float]) -> None:
    """Bits per byte of leaked and of new stories for each model, and the least that is honest."""
    _, axes = plt.subplots(figsize=(6.4, 2.8))
    for place, (name, values) in enumerate(rows.items()):
        axes.bar([x + 0.3 * place for x in range(2)], values, 0.28, label=name)
    for x, value in enumerate(least):
        label = "" if x else "the stories' own entropy"
        axes.hlines(value, x - 0.2, x + 0.5, color="#d0562f", linestyle="--", label=label)
    axes.set_xticks([0.15, 1.15], ["the three leaked stories", "three new stories"])
    axes.set_ylabel("bits per byte")
    axes.set_ylim(0, 0.6)
    axes.legend(loc="upper left", fontsize=8)
    plt.show()


def show_overlaps(sizes: Sequence[int], rows: Mapping[str, Sequence[float]]) -> None:
    """The overlap of some stories over the length of a run."""
    _, axes = plt.subplots(figsize=(6.4, 2.8))
    for name, values in rows.items():
        axes.plot(sizes, values, "o-", label=name, alpha=0.8)
    axes.axhline(0.5, color="#8a8f98", linestyle=":")
    axes.axvline(13, color="#8a8f98", linestyle=":")
    axes.set_xlabel("n, the words in a run (dotted: 13 words, threshold 0.5)")
    axes.set_ylabel("overlap")
    axes.legend(fontsize=8)
    plt.show()

"""Stories in phrases: a tokenizer whose tokens may cross spaces, a push that ends, and the recorded
runs of the page that compares them.
"""

import json
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from llm_course.pages.larger import Share, ThingWeights
from llm_course.pages.scaling import whole_documents
from llm_course.text.batches import IGNORE_INDEX, shift
from llm_course.text.data import BaseDataModule, TextDataModule
from llm_course.text.stories import read_story, split_stories, story_documents
from llm_course.text.tokenization import SPECIAL_TOKENS, BaseTokenizer, BPETokenizer
from llm_course.training.task import LanguageModelingTask, StepOutput

RECORD = Path(__file__).with_name("phrases_runs.json")

# ------------------------------------------------------------------------------ the tokenizer

# No phrase reaches across the end of a sentence or of a quotation.
ENDS = r',(?=")| ?[.!?"\n]'
PARTS = pre_tokenizers.Split(Regex(rf"(?:{ENDS})+|(?:(?!{ENDS})[\s\S])+"), "isolated")
FIRST_LETTER = ord("一")  # of 20,000 in a row


def train_phrases(texts: Sequence[str], *, num_words: int, vocab_size: int) -> BPETokenizer:
    """A BPE that learns words first, up to `num_words` entries, and then phrases.

    In the second part two neighbours may merge across a space. Both parts make one list of merges,
    so every program that reads a `tokenizer.json` encodes with them. Source: Liu et al. 2025,
    "SuperBPE: Space Travel for Language Models".
    """
    words = BPETokenizer.train(texts, vocab_size=num_words)
    model = json.loads(words.to_json())["model"]
    vocab = model["vocab"]
    merges = [tuple(merge) for merge in model["merges"]]
    # in the second part each word is a letter
    token_of = {chr(FIRST_LETTER + i): token for token, i in vocab.items()}
    ends = "".join(
        letter
        for i, letter in enumerate(sorted(token_of))
        if set(words.decode([i])) & set('.!?"\n')
    )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{ends}]+|[^{ends}]+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=list(token_of), show_progress=False
    )
    in_letters = ("".join(chr(FIRST_LETTER + i) for i in words.encode(text)) for text in texts)
    learner.train_from_iterator(in_letters, trainer)
    for pair in json.loads(learner.to_str())["model"]["merges"]:
        left, right = ("".join(map(token_of.__getitem__, part)) for part in pair)
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    phrases = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    phrases.pre_tokenizer = pre_tokenizers.Sequence([PARTS, in_bytes])
    phrases.decoder = decoders.ByteLevel()
    phrases.add_special_tokens(list(SPECIAL_TOKENS))
    return BPETokenizer(phrases)


# ------------------------------------------------------------------------------ for the runs


class WholeStories(Dataset):
    """Stories from their first token to their last; what pads them to one length is no target.

    A row begins with the separator in front of its story, in batches like a `PackedDataset`'s.
    """

    def __init__(self, ids: np.ndarray, separator_id: int, *, num_rows: int):
        self.documents = whole_documents(ids, separator_id)[:num_rows]
        longest = max(map(len, self.documents))
        self.input_ids = torch.full((len(self.documents), longest), separator_id)
        self.labels = torch.full_like(self.input_ids, IGNORE_INDEX)
        for row, document in enumerate(map(torch.from_numpy, self.documents)):
            self.input_ids[row, 1 : len(document)] = document[:-1]
            self.labels[row, : len(document)] = document

    def __len__(self) -> int:
        return len(self.documents)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = list(indices)
        return {"input_ids": self.input_ids[rows], "labels": self.labels[rows]}


class WholeStoryData(TextDataModule):
    """Stories in windows; those that are held out are read whole, so that their entropy is known,
    whatever the tokenizer.
    """

    NUM_STORIES = 150
    val_dataset: WholeStories

    def __init__(self, folder: str, *, level: str, **settings: Any):
        super().__init__(folder, **settings)
        self.level = level

    def setup(self) -> None:
        super().setup()
        tokens = self.prepared.open_tokens("val", self.tokenizer)
        separator_id = tokens.header["separator_id"]
        self.val_dataset = WholeStories(tokens[:], separator_id, num_rows=self.NUM_STORIES)

    @cached_property
    def texts(self) -> list[str]:
        """The held-out stories."""
        return [self.tokenizer.decode(one.tolist()) for one in self.val_dataset.documents]

    @cached_property
    def entropy(self) -> float:
        """The information in the held-out stories, in bits per byte."""
        bits = math.fsum(read_story(text, self.level).bits for text in self.texts)
        return bits / sum(map(len, self.texts))


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack things of these lengths into few boxes, and return the indices in each box.

    From the longest to the shortest, each goes where it leaves the least room. ValueError for one
    that is longer than a box. Source: Ding et al. 2024, "Fewer Truncations Improve Language
    Modeling", section 3.
    """
    if max(lengths) > room:
        raise ValueError(f"{max(lengths)} tokens don't fit into a row of {room}: give longer rows")
    boxes: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # room that is left, and where, in order
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect_left(spaces, (lengths[index], 0))
        if at == len(spaces):
            space = room
            box = len(boxes)
            boxes.append([])
        else:
            space, box = spaces.pop(at)
        boxes[box].append(index)
        insort(spaces, (space - lengths[index], box))
    return boxes


class StoryRows(Dataset):
    """Rows of T tokens that hold only whole stories, in batches like a `PackedDataset`'s.

    Each story has its separator on either side, and document ids that keep attention inside it.
    What fills up a row after the last story is no target.
    """

    def __init__(self, ids: np.ndarray, separator_id: int, sequence_length: int):
        self.separator_id = separator_id
        documents = whole_documents(ids, separator_id)
        boxes = best_fit([len(one) + 1 for one in documents], sequence_length)
        self.rows = torch.full((len(boxes), sequence_length + 1), separator_id)
        self.targets = torch.full_like(self.rows, IGNORE_INDEX)
        for row, box in enumerate(boxes):
            told = np.concatenate([[separator_id, *documents[index]] for index in box])
            self.rows[row, : len(told)] = torch.from_numpy(told)
            self.targets[row, : len(told) + 1] = self.rows[row, : len(told) + 1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = list(indices)
        batch = shift(self.rows[rows], self.targets[rows])
        # a story sees the separator in front of it, and nothing before that
        batch["document_ids"] = (batch["input_ids"] == self.separator_id).cumsum(dim=1)
        return batch


class ApartData(WholeStoryData):
    """`WholeStoryData` that learns from whole stories, each apart from the others in its row."""

    def setup(self) -> None:
        super().setup()
        tokens = self.prepared.open_tokens("train", self.tokenizer)
        separator_id = tokens.header["separator_id"]
        self.train_dataset = StoryRows(tokens[:], separator_id, self.sequence_length)


class WholeStoryTask(LanguageModelingTask):
    """Language modeling on `WholeStoryData`, whose words `data.tokenizer=phrases` joins."""

    NUM_WORDS = 1536  # of these the phrases are made
    DATA = WholeStoryData

    def build_data(self) -> WholeStoryData:
        settings = asdict(self.config.data)
        del settings["synthetic"]
        if settings["tokenizer"] == "phrases":
            settings["tokenizer"] = str(self.phrases())
        training = self.config.training
        batches = {"batch_size": training.batch_size, "seed": training.seed}
        level = self.config.data.stories.level
        return self.DATA(self.config.run_dir, level=level, **settings, **batches)

    def phrases(self) -> Path:
        """The folder of the run's phrases, which are learned from its first training stories."""
        folder = Path(self.config.run_dir, "phrases")
        if not folder.exists():
            data = self.config.data
            enough = min(4_000_000, data.stories.num_bytes)
            stories = story_documents(data.stories.level, num_bytes=enough)
            train, _ = split_stories(stories, val_fraction=data.val_fraction)
            sizes = {"num_words": self.NUM_WORDS, "vocab_size": data.vocab_size}
            train_phrases(train, **sizes).save(folder)
        return folder

    def metrics(self, loss: float, data: BaseDataModule) -> dict[str, float]:
        """Bits per byte of the held-out stories, and how many of them are above their entropy."""
        assert isinstance(data, WholeStoryData)
        num_tokens = sum(map(len, data.val_dataset.documents))
        bits_per_byte = loss * num_tokens / sum(map(len, data.texts)) / math.log(2)
        return {"bits_per_byte": bits_per_byte, "above": bits_per_byte - data.entropy}


class PushTask(WholeStoryTask):
    """`WholeStoryTask` in which the name of a thing counts 20 for the first three quarters."""

    WEIGHT = 20
    SHARE = 0.75

    def build_data(self) -> WholeStoryData:
        self.data = super().build_data()
        return self.data

    @cached_property
    def weights(self) -> ThingWeights:
        """The weights during the push."""
        return ThingWeights(self.data.tokenizer, self.WEIGHT)

    def build_scheduler(self, optimizer: Optimizer, *, max_steps: int) -> LambdaLR:
        self.release = self.SHARE * max_steps
        self.schedule = super().build_scheduler(optimizer, max_steps=max_steps)
        return self.schedule

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        if self.schedule.last_epoch < self.release:
            return self.weights.step(model, batch)
        return super().train_step(model, batch)


class ApartTask(PushTask):
    """`PushTask` on whole stories, each apart from the others in its row."""

    DATA = ApartData


# ------------------------------------------------------------------------------ the recorded runs

NAMES = (
    "make train's model",
    "a smaller one",
    "pushed",
    "in phrases",
    "in phrases, pushed",
    "and each story apart",
)


@cache
def runs() -> dict[str, dict[str, Any]]:
    """What scripts/phrases.py has recorded, by name."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    return dict(zip(NAMES, rows, strict=True))


def shares(name: str) -> dict[str, Share]:
    """Where the loss of a recorded run comes from, by kind of word."""
    return {kind: Share(*share) for kind, share in runs()[name]["shares"].items()}


def plot_runs(names: Sequence[str]) -> None:
    """The distance to the entropy over the time, for some recorded runs."""
    _, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    for name in names:
        row = runs()[name]
        steps, above = np.array(row["curve"]).T
        minutes = steps / row["steps"] * row["seconds"] / 60
        axes.plot(minutes, above, color=f"C{NAMES.index(name)}", label=name)
    axes.set(xlabel="minutes on one core", ylabel="bits per byte above the entropy")
    axes.set(yscale="log", ylim=(0.02, 0.4))
    axes.set_yticks(
        [0.02, 0.03, 0.05, 0.1, 0.2, 0.3], ["0.02", "0.03", "0.05", "0.1", "0.2", "0.3"]
    )
    axes.minorticks_off()
    axes.legend(fontsize=8)
    plt.show()


def show_tokens(tokenizer: BaseTokenizer, text: str) -> None:
    """Print a text with a bar between its tokens."""
    print("|".join(tokenizer.decode([token]) for token in tokenizer.encode(text)))


def merges(tokenizer: BPETokenizer) -> list[tuple[str, str]]:
    """All merges of a tokenizer from the top of its list, a space written as GPT-2 does."""
    return [(left, right) for left, right in json.loads(tokenizer.to_json())["model"]["merges"]]


def tokens(tokenizer: BPETokenizer, text: str) -> list[str]:
    """The tokens of a text, a space written as GPT-2 does."""
    vocab = json.loads(tokenizer.to_json())["model"]["vocab"]
    names = {i: name for name, i in vocab.items()}
    return [names[i] for i in tokenizer.encode(text)]


def sentences(text: str) -> list[str]:
    """The parts that no phrase reaches beyond: sentences, and what stands between them."""
    return [part for part, _ in PARTS.pre_tokenize_str(text)]

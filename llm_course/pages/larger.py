"""The larger runs of chapter 22: their data, what is measured of them, and their plots."""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from llm_course.model.decoder import DecoderModel
from llm_course.pages.scaling import Beginnings, StoryData, StoryTask
from llm_course.text.batches import PackedDataset
from llm_course.text.stories import read_story
from llm_course.text.tokenization import BaseTokenizer, load_tokenizer

RECORD = Path(__file__).with_name("larger_runs.json")
SPLITS = ("train", "val")

# ------------------------------------------------------------------------------ for the runs


class PreparedStories(StoryData):
    """Stories that were written and tokenized once for many runs, in a folder that they share.

    Where the rows are longer than `LONGEST`, those of the validation aren't.
    """

    LONGEST = 768

    def prepare_data(self, *, expected: dict[str, Any] | None = None) -> None:
        """Nothing is left to do."""

    def setup(self) -> None:
        self.tokenizer = load_tokenizer(self.folder)
        self.vocab_size = self.tokenizer.vocab_size
        train, val = (np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in SPLITS)
        self.train_dataset = PackedDataset(train, self.sequence_length)
        length = min(self.sequence_length, self.LONGEST)
        separator_id = self.tokenizer.eos_token_id
        assert separator_id is not None
        self.val_dataset = Beginnings(val, separator_id, length, num_rows=self.NUM_STORIES)

    def fingerprint(self) -> dict[str, Any]:
        return self.batching() | {"tokenizer_sha256": self.tokenizer.sha256}


class PreparedTask(StoryTask):
    """Language modeling on `PreparedStories`; `data.tokenizer` names their folder."""

    def build_data(self) -> PreparedStories:
        data = self.config.data
        training = self.config.training
        return PreparedStories(
            data.tokenizer,
            level=data.stories.level,
            sequence_length=data.sequence_length,
            batch_size=training.batch_size,
            seed=training.seed,
        )


# ------------------------------------------------------------------------------ kinds of words


class Share(NamedTuple):
    """What tokens of one kind contribute to a text's information, in bits per byte of the text."""

    floor: float  # the information in them
    above: float  # what the model pays on top of it
    tokens: int


@torch.no_grad()
def shares_by_kind(
    model: DecoderModel, tokenizer: BaseTokenizer, texts: Iterable[str], level: str
) -> dict[str, Share]:
    """Where a model's loss comes from, by the kind of each token's first letter.

    The texts are read from their beginnings, as far as the model's context goes. A kind such as
    "name, known" has no information: the story so far leaves one choice.
    """
    device = next(model.parameters()).device
    floor: defaultdict[str, float] = defaultdict(float)
    paid: defaultdict[str, float] = defaultdict(float)
    tokens: defaultdict[str, int] = defaultdict(int)
    num_bytes = 0
    for text in texts:
        reading = read_story(text, level)
        kinds, bits = reading.kinds(), reading.bits_by_character()
        ids = tokenizer.encode(text, allow_special=False)[: model.config.max_position_embeddings]
        row = torch.tensor([[tokenizer.eos_token_id, *ids]], device=device)
        logits = model(row[:, :-1]).logits[0].float()
        nats = -logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        start = 0
        for token, nat in zip(ids, nats.tolist(), strict=True):
            piece = tokenizer.decode([token])
            first = start + len(piece) - len(piece.lstrip())
            end = start + len(piece)
            kind = kinds[min(first, end - 1)]
            floor[kind] += math.fsum(bits[start:end])
            paid[kind] += nat / math.log(2)
            tokens[kind] += 1
            start = end
        num_bytes += start
    return {
        kind: Share(floor[kind] / num_bytes, (paid[kind] - floor[kind]) / num_bytes, tokens[kind])
        for kind in sorted(paid)
    }

"""A small trained model that comes with the package, so that a page can show readable text."""

from functools import cache
from pathlib import Path

import torch

from llm_course.model.decoder import DecoderModel
from llm_course.model.pretrained import load_pretrained
from llm_course.text.tokenization import BPETokenizer

FOLDER = Path(__file__).with_name("storyteller_model")


@cache
def load_storyteller() -> tuple[DecoderModel, BPETokenizer]:
    """The storyteller and its tokenizer: a decoder that writes the easy stories of chapter 2.

    The model is in evaluation mode, in float32, and the same object for every caller. Nothing is
    downloaded. `storyteller_model/README.md` says how it was trained.
    """
    model = load_pretrained(FOLDER, dtype=torch.float32).requires_grad_(False)
    return model, BPETokenizer.load(FOLDER)

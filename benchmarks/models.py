"""The two shapes that everything is measured with, and the peer: Hugging Face with our weights."""

import os
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.pretrained import save_pretrained

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMALL = ModelConfig(
    vocab_size=4096,
    hidden_size=384,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    intermediate_size=1024,
    tie_word_embeddings=False,
)
TINY = ModelConfig(
    vocab_size=65,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    intermediate_size=352,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
BATCH = {"small": (16, 256), "tiny": (12, 64)}  # (B, T)
SHAPES = {"small": SMALL, "tiny": TINY}


def ours(config: ModelConfig) -> DecoderModel:
    torch.manual_seed(0)
    return DecoderModel(config)


def hugging_face(model: DecoderModel) -> nn.Module:
    """The same weights in `transformers`' own class, as it loads them by default."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = save_pretrained(model, f"{folder}/model")
        return AutoModelForCausalLM.from_pretrained(path)


def batch_of(vocab_size: int, B: int, T: int) -> tuple[Tensor, Tensor]:
    """Random ids and labels, each (B, T)."""
    tokens = torch.randint(vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_on(ids: Tensor, labels: Tensor) -> Callable[[nn.Module], Tensor]:
    """The mean loss of our model on a batch."""

    def loss_of(model: nn.Module) -> Tensor:
        out = model(ids, labels=labels)
        return out.loss_sum / out.num_targets

    return loss_of

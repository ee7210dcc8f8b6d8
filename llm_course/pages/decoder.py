"""What the page of the decoder draws, and the models that it compares with."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.pages.storyteller import load_storyteller

TANH_GELU = partial(F.gelu, approximate="tanh")
STORY = (
    "Once upon a time there was a little girl called Rosa. She had a neighbour called Sam. "
    "They loved the meadow, the market and the shed. "
    "One sunny morning Sam was at the market and met a small dog."
)


def tiny(name: str = "llama-3.2-1b", **changes: Any) -> ModelConfig:
    """A published model in small: its style, with sizes that run in milliseconds."""
    sizes: dict[str, Any] = dict(
        vocab_size=100,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    return ModelConfig.preset(name, **(sizes | changes))


@cache
def story_ids() -> Tensor:
    """The tokens of the page's story, (1, T)."""
    return torch.tensor([load_storyteller()[1].encode(STORY)])


def text_of(ids: Sequence[int]) -> str:
    return load_storyteller()[1].decode(list(ids))


def show_next(logits: Tensor, position: int, *, count: int = 8) -> None:
    """The likeliest tokens after `position` of the story, from logits (T, V)."""
    ids = story_ids()[0].tolist()
    best = logits[position].softmax(-1).topk(count)
    names = [repr(text_of([token]))[1:-1].replace("$", r"\$") for token in best.indices.tolist()]
    _, ax = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    ax.barh(range(count), best.values, color="tab:blue")
    ax.set_yticks(range(count), names)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1), xlabel="probability of the next token")
    ax.set_title("... " + text_of(ids[max(0, position - 9) : position + 1]) + " _", fontsize=10)
    plt.show()


def show_curves(
    title: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    **axis: Any,
) -> None:
    """Lines by name, each with its x and y."""
    _, ax = plt.subplots(figsize=(6.4, 2.7), layout="constrained")
    for (name, (x, y)), style in zip(lines.items(), ("-", "--", "-.", ":"), strict=False):
        ax.plot(x, y, style, label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel, **axis)
    ax.set_title(title, fontsize=11)
    ax.legend(fontsize=8, ncols=2 if len(lines) > 2 else 1)
    plt.show()


def show_grids(grids: Mapping[str, Tensor]) -> None:
    """Which positions (columns) moved when a token (rows) was changed."""
    fig, axes = plt.subplots(1, len(grids), figsize=(5, 2.5), sharey=True, layout="constrained")
    for ax, (name, grid) in zip(axes, grids.items(), strict=True):
        ax.imshow(grid, cmap="Blues", vmin=0, vmax=1.5)
        ax.set(xlabel="position that moved")
        ax.set_title(name, fontsize=9)
    axes[0].set_ylabel("changed token")
    fig.suptitle("A sound model moves later positions only", fontsize=11)
    plt.show()


@torch.no_grad()
def stream_rms(L: int, *, scaled: bool, seed: int = 0) -> list[float]:
    """The size of the stream after each of L fresh blocks, with or without the scaled start."""
    torch.manual_seed(seed)
    model = DecoderModel(tiny(num_layers=L, initializer_range=0.1))
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and not scaled:
            parameter.mul_(math.sqrt(2 * L))
    sizes: list[float] = []
    for layer in model.layers:
        layer.register_forward_hook(
            lambda module, args, result: sizes.append(result[0].square().mean().sqrt().item())
        )
    model(torch.randint(0, 100, (4, 16)))
    return sizes


def pytorch_logits(
    model: DecoderModel,
    ids: Tensor,
    *,
    gelu: Callable[[Tensor], Tensor] = TANH_GELU,
    eps: float = 1e-5,
    first: int = 0,
) -> Tensor:
    """The logits of a GPT-2 by PyTorch's own transformer, with the weights of `model`."""
    embedding = model.embedding
    assert embedding.embed_positions is not None
    T = ids.shape[1]
    x = embedding.embed_tokens(ids) + embedding.embed_positions(torch.arange(first, first + T))
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    hidden = _in_pytorch(model, gelu, eps)(x, mask=mask, is_causal=True)
    return hidden @ embedding.embed_tokens.weight.T


def _in_pytorch(model: DecoderModel, gelu: Any, eps: float) -> nn.Module:
    names = {
        "o_proj": "out_proj",
        "mlp.up_proj": "linear1",
        "mlp.down_proj": "linear2",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
    }
    ours = model.state_dict()
    theirs = {}
    for our_name, tensor in ours.items():
        name = our_name
        for our, their in names.items():
            name = name.replace(our, their)
        if "q_proj" in name:  # q, k and v are one matrix there
            qkv = [ours[our_name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, tensor = name.replace("q_proj.", "in_proj_"), torch.cat(qkv)
        # what still says _proj, but for out_proj, is k or v, which are in the merged matrix already
        if name.startswith(("layers", "norm")) and "_proj." not in name.replace("out_proj.", ""):
            theirs[name] = tensor
    c = model.config
    sizes = (c.hidden_size, c.num_heads, c.resolved_intermediate_size)
    block = nn.TransformerEncoderLayer(*sizes, 0.0, gelu, eps, batch_first=True, norm_first=True)
    last = nn.LayerNorm(c.hidden_size, eps)
    encoder = nn.TransformerEncoder(block, c.num_layers, last, enable_nested_tensor=False)
    encoder.load_state_dict(theirs)
    return encoder.eval()

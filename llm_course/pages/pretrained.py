"""Models of another library for the pages of chapter 11, mistakes to plant, and pictures."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate
from llm_course.model.gguf import load_gguf, save_gguf
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import story_documents

State = dict[str, Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# what each family has that others lack, so small that it acts on a short text
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
    "mistral": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4},
    "qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": SMALL_EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "phi3": {"sliding_window": 8, "pad_token_id": 0},
    "olmo3": {"sliding_window": 8},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 0.5},
    "qwen2_moe": SMALL_EXPERTS | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
}

# ------------------------------------------------------------------------------ their models


def random_oracle(model_type: str, *, noise: float = 1.0, seed: int = 0, **settings: Any) -> Any:
    """A tiny random model of transformers, with noise on its norms and biases, too.

    It has what is special about its family.

    A fresh norm is all ones and a fresh bias all zeros, which would hide a wrong mapping.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    default = AutoConfig.for_model(model_type)  # not every family has a key for every size
    sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    config = AutoConfig.for_model(model_type, **sizes | SPECIAL.get(model_type, {}) | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            size = noise * (0.3 if parameter.ndim == 1 else 0.1)
            parameter.add_(torch.randn_like(parameter) * size)
    return model


def random_ids(rows: int = 2, length: int = 40) -> Tensor:
    """Token ids for such a model: (rows, length)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=generator)


def spoiled(folder: Path, change: Callable[[State], State] = dict, **keys: Any) -> Path:
    """A copy of a model's folder, with its tensors changed and keys set in its config.json."""
    copy = Path(tempfile.mkdtemp(dir=folder.parent)) / folder.name
    shutil.copytree(folder, copy)
    described = json.loads((copy / "config.json").read_text()) | keys
    (copy / "config.json").write_text(json.dumps(described))
    tensors = change(load_file(copy / "model.safetensors"))
    save_file(tensors, copy / "model.safetensors")
    return copy


def show_names(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], containing: str) -> None:
    """The tensors whose names contain a text, theirs on the left and ours on the right."""
    columns = [
        sorted((name, tuple(t.shape)) for name, t in state.items() if containing in name)
        for state in (theirs, ours)
    ]
    for (their_name, their_shape), (our_name, our_shape) in zip(*columns, strict=True):
        print(f"{their_name:48}{their_shape!s:12}  {our_name:42}{our_shape}")


# ------------------------------------------------------------------------------ the storyteller


def load_state(model: DecoderModel, state: Mapping[str, Tensor]) -> DecoderModel:
    """A new model of the same configuration with other weights, in evaluation mode."""
    other = DecoderModel(model.config).eval()
    other.load_state_dict(dict(state))
    return other.requires_grad_(False)


@cache
def story_rows(rows: int = 6, length: int = 192) -> Tensor:
    """The beginnings of stories from which the storyteller has not learned: ids (rows, length)."""
    _, tokenizer = load_storyteller()
    encoded = (
        tokenizer.encode(story) for story in story_documents("easy", num_bytes=40_000, seed=7)
    )
    return torch.tensor([ids[:length] for ids in encoded if len(ids) >= length][:rows])


@torch.no_grad()
def story_loss(model: nn.Module) -> float:
    """The mean loss in nats a token on such stories."""
    rows = story_rows()
    logits = model(rows[:, :-1]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def through_gguf(dtype: str, folder: Path) -> tuple[int, DecoderModel]:
    """The storyteller, written as a GGUF file and read back, and the size of that file in bytes."""
    model, tokenizer = load_storyteller()
    path = save_gguf(model, tokenizer, folder / f"storyteller-{dtype}.gguf", dtype=dtype)
    return path.stat().st_size, load_gguf(path)


def continued(model: DecoderModel, prompt: str, length: int = 40) -> str:
    """What the model adds to a prompt, always with its likeliest token."""
    _, tokenizer = load_storyteller()
    ids = torch.tensor([tokenizer.encode(prompt)])
    new = generate(model, ids, max_new_tokens=length)[0, ids.shape[1] :]
    return " ".join(tokenizer.decode(new.tolist()).split())


# ------------------------------------------------------------------------------ pictures


def show_split(c_attn: Tensor, parts: Mapping[str, Tensor]) -> None:
    """The columns of `c_attn`, numbered, and the three matrices that are made of them."""
    matrices = {"c_attn": c_attn} | dict(parts)
    _, axes = plt.subplots(1, 4, figsize=(6.4, 1.8), width_ratios=[3, 1, 1, 1])
    for axis, (name, matrix) in zip(axes, matrices.items(), strict=True):
        axis.imshow(matrix // 4, cmap="Pastel1", vmin=0, vmax=8)
        for row, numbers in enumerate(matrix.tolist()):
            for column, number in enumerate(numbers):
                axis.text(column, row, number, ha="center", va="center", fontsize=7)
        axis.set_title(f"{name} {tuple(matrix.shape)}", fontsize=8)
        axis.set(xticks=[], yticks=[])
    plt.suptitle("Transpose and cut: columns of c_attn become rows of q, k and v", fontsize=10)
    plt.tight_layout()
    plt.show()


def show_layers(curves: Mapping[str, Sequence[float]]) -> None:
    """The largest difference of the hidden states after each layer, on a logarithmic axis."""
    _, axis = plt.subplots(figsize=(6.4, 2.4), layout="constrained")
    for (name, values), style in zip(curves.items(), ("o--", "s-"), strict=False):
        points = [
            "embedding",
            *(f"layer {i}" for i in range(len(values) - 2)),
            "last layer\nand norm",
        ]
        axis.semilogy(points, [max(value, 1e-8) for value in values], style, label=name)
    axis.set(ylabel="largest difference", ylim=(3e-9, 300))
    axis.legend(fontsize=8, loc="center right")
    axis.set_title("Hidden states, ours against theirs", fontsize=10)
    plt.show()


def show_damage(losses: Mapping[str, Sequence[float]], right: float) -> None:
    """How far each mistake raises the loss, a dot for each layer in which it's planted."""
    _, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for row, values in enumerate(losses.values()):
        for layer, value in enumerate(values):
            added = max(value - right, 1e-4)
            axis.plot(added, row, "o", ms=11, color=plt.get_cmap("tab10")(layer), alpha=0.75)
            axis.annotate(str(layer), (added, row), ha="center", va="center", fontsize=7)
    axis.set_yticks(range(len(losses)), list(losses), fontsize=8)
    axis.set(xlabel="added loss, nats a token", xscale="log", ylim=(-0.6, len(losses) - 0.4))
    axis.grid(axis="x", alpha=0.3)
    axis.set_title("What one mistake costs; the number is the layer", fontsize=10)
    plt.show()


def show_file(path: Path, parts: Mapping[str, str]) -> None:
    """The tensors of a safetensors file as pieces of a bar, coloured by a part of their names."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    _, axis = plt.subplots(figsize=(6.4, 1.5), layout="constrained")
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (offset / 1e6 for offset in entry["data_offsets"])
            color = next(color for part, color in parts.items() if part in name)
            axis.barh(0, end - begin, left=begin, color=color, edgecolor="white", linewidth=0.4)
    for part, color in parts.items():
        axis.plot([], [], "s", color=color, label=part)
    axis.legend(ncols=len(parts), fontsize=8, loc="lower center")
    axis.set(ylim=(-1.3, 0.5), yticks=[], xlabel="position in the data, MB")
    axis.set_title("The storyteller's file: tensors side by side, without gaps", fontsize=10)
    plt.show()


def show_grid(grid: Sequence[Sequence[bool]], rows: Sequence[str], columns: Sequence[str]) -> None:
    """Which row has which part: blue squares."""
    _, axis = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    axis.imshow(grid, cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right", fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.set(xlabel="what a plain Llama lacks", ylabel="model_type")
    axis.set_title("Fifteen families are one decoder with different parts", fontsize=10)
    plt.show()


def show_by_position(curves: Mapping[str, Sequence[Tensor]]) -> None:
    """The largest difference of the logits at each position, a line for each model."""
    _, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for (name, models), color in zip(curves.items(), ("tab:green", "tab:red"), strict=True):
        for values in models:
            axis.loglog(range(1, len(values) + 1), values.clamp(min=1e-7), color=color, lw=0.7)
        axis.plot([], [], color=color, label=f"{name}, {len(models)} models")
    axis.set(xlabel="position, counted from 1", ylabel="largest logit difference")
    axis.legend(fontsize=8)
    axis.set_title("An ignored key: small at first, large later in the text", fontsize=10)
    plt.show()


def shuffled(state: State, seed: int) -> State:
    """Another model: the numbers of each tensor in another order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t.flatten()[torch.randperm(t.numel(), generator=generator)].view(t.shape)
        for name, t in state.items()
    }


def show_sizes(damage: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """What each mistake does to the logits and to the best token, a dot for each model."""
    ordered = sorted(damage, key=lambda title: min(damage[title]))
    _, axes = plt.subplots(1, 2, figsize=(6.4, 3), sharey=True, layout="constrained")
    for row, title in enumerate(ordered):
        color = "black" if title.startswith("(") else "tab:blue"
        for axis, values in zip(axes, zip(*damage[title], strict=True), strict=True):
            axis.plot(values, [row] * len(values), "o", ms=4, color=color)
    axes[0].set_xscale("log")
    axes[0].set_yticks(range(len(ordered)), ordered, fontsize=8)
    axes[0].set_xlabel("largest logit difference", fontsize=8)
    axes[1].set_xlabel("positions with another best token, %", fontsize=8)
    plt.suptitle("A wrong epsilon would drown in bfloat16's rounding", fontsize=10)
    plt.show()


def show_clouds(clouds: Mapping[str, Mapping[str, Tensor]]) -> None:
    """The error of each token in percent, for each family and each kind of rounding."""
    _, axis = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    for shift, color, (label, errors) in zip(
        (-0.2, 0.2), ("tab:blue", "tab:orange"), clouds.items(), strict=True
    ):
        for i, values in enumerate(errors.values()):
            generator = torch.Generator().manual_seed(0)
            jitter = 0.3 * (torch.rand(len(values), generator=generator) - 0.5)
            axis.plot(i + shift + jitter, values, ".", ms=1.5, color=color)
        axis.plot([], [], "o", color=color, label=label)
    axis.set(yscale="log", ylim=(0.1, 600), ylabel="error of a token, %")
    axis.set_xticks(range(len(errors)), list(errors), fontsize=7)
    axis.legend(fontsize=7, ncols=2, loc="upper left")
    axis.set_title("bfloat16 costs about a percent, unless an expert changes", fontsize=10)
    plt.show()

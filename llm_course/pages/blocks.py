"""What the pages of the configuration and the block draw and measure: sizes, streams, gradients."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, TypeVar

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, nn

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate
from llm_course.model.normalization import RMSNorm
from llm_course.model.transformer_block import TransformerBlock
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import story_documents

STYLES = ("-", "--", "-.", ":")
_M = TypeVar("_M", bound=nn.Module)

# ------------------------------------------------------------------------------- a model's size

PARTS = {"MLP, experts": "tab:blue", "attention": "tab:orange", "embedding, output": "tab:gray"}


def count_parts(config: ModelConfig) -> dict[str, int]:
    """The parameters of the model of `config` by part, counted in the real model without memory.

    The few of the norms are counted with the part that they belong to, the last with the output.
    """
    on_meta: AbstractContextManager[Any] = torch.device("meta")
    with on_meta:
        model = DecoderModel(config)
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        in_mlp = ".mlp" in name or "post_attention" in name
        part = "attention" if ".self_attn" in name or "input_layernorm" in name else ""
        part = "MLP, experts" if in_mlp else part or "embedding, output"
        counts[part] += parameter.numel()
    return counts


def differences(config: ModelConfig) -> dict[str, Any]:
    """The values of `config` that are not the default, as plain values."""
    values = asdict(config)
    return {f.name: values[f.name] for f in fields(config) if values[f.name] != f.default}


def draw_sizes(counts: Mapping[str, Mapping[str, int]]) -> None:
    """The share of each part in some models, with their totals."""
    fig, ax = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for row, parts in enumerate(counts.values()):
        total = sum(parts.values())
        left = 0.0
        for part, color in PARTS.items():
            ax.barh(row, parts[part] / total, left=left, color=color, label=part)
            left += parts[part] / total
        ax.text(1.02, row, f"{total / 1e9:.2f} billion", va="center", fontsize=9)
    ax.set_yticks(range(len(counts)), list(counts))
    ax.invert_yaxis()
    ax.set(xlabel="share of the parameters", xlim=(0, 1.25), xticks=[0, 0.25, 0.5, 0.75, 1])
    handles = ax.get_legend_handles_labels()[0][: len(PARTS)]
    fig.legend(handles, list(PARTS), loc="outside lower center", ncol=3, fontsize=8)
    ax.set_title("Where the parameters of four published models are", fontsize=11)
    plt.show()


def show_shape(**shape: int) -> None:
    """The parameters of a Llama-like model of this shape by part, or why there is no such model."""
    try:
        config = ModelConfig(**shape)  # type: ignore[arg-type]
    except ValueError as error:
        print(", ".join(f"{name}={size}" for name, size in shape.items()))
        print(f"refused: {error}")
        return
    counts = count_parts(config)
    plt.figure(figsize=(6.4, 1.9))
    plt.barh(list(counts), [n / 1e6 for n in counts.values()], color=list(PARTS.values()))
    plt.gca().invert_yaxis()
    plt.xlabel("million parameters")
    plt.xlim(0, max(60, 1.1 * max(counts.values()) / 1e6))
    total = sum(counts.values())
    D = config.resolved_head_dim
    plt.title(
        f"{total / 1e6:.1f} million; heads of {D}, MLP of {config.resolved_intermediate_size}"
    )
    plt.show()


# ----------------------------------------------------------------------------------- measurements


def gain_one(module: _M) -> _M:
    """Draw each matrix so that it keeps the size of an unrelated input."""
    for weight in module.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)  # (out, in)
    return module


def randomise(module: _M) -> _M:
    """Draw norm weights and biases, too: with weights of 1, two norms can't be told apart."""
    for parameter in module.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 2.0)
    return module


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def likeness(x: Tensor) -> float:
    """The mean cosine between two different tokens of a text, of x (B, T, C)."""
    direction = F.normalize(x, dim=-1)
    T = x.shape[1]
    cosines = direction @ direction.transpose(1, 2)  # (B, T, T)
    return ((cosines.sum((1, 2)) - T) / (T * (T - 1))).mean().item()


@dataclass(frozen=True)
class Journey:
    """The stream after each block of a stack, and the gradient of a loss at each of them."""

    sizes: list[float]
    likeness: list[float]
    gradients: list[float]


def journey(make_block: Callable[[int], nn.Module], depth: int = 24, C: int = 64) -> Journey:
    """Send random tokens through `depth` fresh blocks of gain 1, and a random wish back."""
    torch.manual_seed(0)
    streams = [torch.randn(4, 16, C, requires_grad=True)]
    for _ in range(depth):
        x = gain_one(make_block(C))(streams[-1])
        streams.append(x[0] if isinstance(x, tuple) else x)
    wish = torch.randn(4, 16, C)  # for each number of the output
    loss = (F.rms_norm(streams[-1], (C,)) * wish).sum()
    gradients = torch.autograd.grad(loss, streams)
    return Journey(
        [rms(x) for x in streams],
        [likeness(x.detach()) for x in streams],
        [gradient.norm().item() for gradient in gradients],
    )


def stack(depth: int, C: int = 32, **options: Any) -> nn.ModuleList:
    """Fresh blocks of gain 1, always the same ones."""
    torch.manual_seed(0)
    config = ModelConfig(hidden_size=C, num_heads=2, intermediate_size=2 * C, **options)
    return nn.ModuleList(gain_one(TransformerBlock(config, index)) for index in range(depth))


@torch.no_grad()
def through(blocks: nn.ModuleList, x: Tensor) -> list[Tensor]:
    """The stream before the first block and after each."""
    streams = [x]
    for block in blocks:
        streams.append(block(streams[-1])[0])
    return streams


# ------------------------------------------------------------------------------------- pictures


def curves(
    ax: Axes,
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    title: str,
    *,
    xlabel: str,
    ylabel: str,
    logs: str = "",
) -> None:
    """Draw `lines` over `x`; `logs` names the axes that are logarithmic."""
    for (name, y), style in zip(lines.items(), STYLES, strict=False):
        ax.plot(x, y, style, label=name)
    if "x" in logs:
        ax.set_xscale("log", base=2)
    if "y" in logs:
        ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)


def show_curves(
    x: Sequence[float], lines: Mapping[str, Sequence[float]], title: str, **options: Any
) -> None:
    """One picture of `curves`."""
    _, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    curves(ax, x, lines, title, **options)
    plt.show()


def show_journeys(journeys: Mapping[str, Journey]) -> None:
    """How alike the tokens become, and how the gradient changes on its way back."""
    _, axes = plt.subplots(1, 2, figsize=(6.8, 2.9), layout="constrained")
    depths = range(len(next(iter(journeys.values())).sizes))
    alike = {name: run.likeness for name, run in journeys.items()}
    gradients = {name: run.gradients for name, run in journeys.items()}
    curves(axes[0], depths, alike, "tokens", xlabel="block", ylabel="mean cosine of two tokens")
    curves(axes[1], depths, gradients, "gradient", xlabel="block", ylabel="norm", logs="y")
    axes[0].set_ylim(-0.05, 1.05)
    plt.show()


def show_depth(layers: int, norm_position: str, scale: float) -> None:
    """The stream's size and the gradient by depth, with `scale` on each sublayer's output."""
    torch.manual_seed(1)
    streams = [torch.randn(4, 16, 32, requires_grad=True)]
    for block in stack(layers, norm_position=norm_position, residual_multiplier=scale):
        streams.append(block(streams[-1])[0])
    wish = torch.randn(4, 16, 32)
    gradients = torch.autograd.grad((F.rms_norm(streams[-1], (32,)) * wish).sum(), streams)
    _, axes = plt.subplots(1, 2, figsize=(6.8, 2.7), layout="constrained")
    axes[0].plot([rms(x) for x in streams], "o-", markersize=3)
    axes[0].set(xlabel="block", ylabel="RMS of the stream", ylim=(0, 10))
    axes[1].plot([gradient.norm() for gradient in gradients], "o-", markersize=3, color="tab:red")
    axes[1].set(xlabel="block", ylabel="gradient norm", yscale="log", ylim=(0.5, 1e6))
    plt.suptitle(f"{layers} blocks, {norm_position}, outputs times {scale:g}", fontsize=11)
    plt.show()


# --------------------------------------------------------------------------------------- oracle


def llama_block(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Hugging Face's block of a Llama of this shape, with random weights and a causal mask.

    Its weights are in the attribute `weights`.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    sizes: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.resolved_intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    layer: Any = randomise(LlamaDecoderLayer(LlamaConfig(**sizes), 0)).eval()
    D = config.resolved_head_dim

    def run(x: Tensor) -> Tensor:
        T = x.shape[1]
        future = torch.full((1, 1, T, T), torch.finfo(torch.float32).min).triu(1)
        unturned = (torch.ones(1, T, D), torch.zeros(1, T, D))  # cosines and sines of angle 0
        y = layer(x, attention_mask=future, position_embeddings=unturned)
        return y[0] if isinstance(y, tuple) else y

    run.weights = layer.state_dict()  # type: ignore[attr-defined]
    return run


# ------------------------------------------------------------------------ the trained storyteller

PROMPT = "Once upon a time there was a little girl called"


class Replacing(nn.Module):
    """A block of the storyteller without its residual connections."""

    def __init__(self, block: Any):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, cache: Any = None, **context: Any) -> tuple[Tensor, None]:
        block = self.block
        x = block.self_attn(block.input_layernorm(x), cache=cache, **only_attention(context))
        return block.mlp(block.post_attention_layernorm(x)), None


def only_attention(context: Mapping[str, Any]) -> dict[str, Any]:
    return {name: context.get(name) for name in ("position_embeddings", "mask")}


def tell(*, residual: bool = True, tokens: int = 48) -> str:
    """What the storyteller writes, with or without its residual connections."""
    model, tokenizer = load_storyteller()
    if not residual:
        model = copy.deepcopy(model)
        blocks: list[Any] = list(model.layers)
        model.layers = nn.ModuleList(Replacing(block) for block in blocks)
    end = tokenizer.eos_token_id
    ids = torch.tensor([[end, *tokenizer.encode(PROMPT)]])
    written = generate(model, ids, max_new_tokens=tokens)
    return tokenizer.decode(written[0, 1:].tolist())


@cache
def story_ids(num_bytes: int = 12_000) -> Tensor:
    """Tokens of fresh easy stories, (rows, 128)."""
    _, tokenizer = load_storyteller()
    text = "\n".join(story_documents("easy", num_bytes=num_bytes, seed=78))
    ids = torch.tensor(tokenizer.encode(text))
    return ids[: len(ids) // 128 * 128].view(-1, 128)


@torch.no_grad()
def enter(ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What the storyteller's first block gets: the stream (B, T, C), and RoPE's angles."""
    model = load_storyteller()[0]
    assert model.rotary is not None
    return model.embedding(ids), model.rotary(torch.arange(ids.shape[1]))


@torch.no_grad()
def loss_of(model: DecoderModel, ids: Tensor) -> float:
    """The cross-entropy of the next token, in nats."""
    logits = model(ids).logits
    assert logits is not None
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def loss_without(writer: int | None) -> float:
    """The storyteller's loss on fresh stories if one sublayer writes nothing.

    Attention of block 0 is writer 0, its MLP writer 1, and so on.
    """
    model = load_storyteller()[0]
    if writer is not None:
        model = copy.deepcopy(model)
        block: Any = model.layers[writer // 2]
        last = block.mlp.down_proj if writer % 2 else block.self_attn.o_proj
        nn.init.zeros_(last.weight)
    return loss_of(model, story_ids())


def show_silenced(whole: float, losses: Sequence[float]) -> None:
    """The loss without each sublayer, beside that of the whole model."""
    names = [f"{kind} {block}" for block in range(len(losses) // 2) for kind in ("att.", "MLP")]
    plt.figure(figsize=(6.4, 2.6))
    plt.bar(names, losses, color=["tab:orange", "tab:blue"] * (len(losses) // 2))
    plt.axhline(whole, color="black", linewidth=0.8)
    plt.text(len(losses) - 0.4, whole, " whole\n model", va="center", fontsize=8)
    plt.ylabel("loss (nats)")
    plt.xticks(fontsize=8)
    plt.title("The loss if one sublayer writes nothing")
    plt.show()


def show_lens(probabilities: Tensor, ids: Tensor, *, first: int, count: int) -> None:
    """The likeliest next token after each block, (L + 1, T, V), at `count` places of a story."""
    _, tokenizer = load_storyteller()

    def text(token: int) -> str:
        return tokenizer.decode([token]).strip().replace("$", r"\$") or "·"

    best, guess = probabilities[:, first : first + count].max(-1)  # (L + 1, count)
    fig, ax = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    image = ax.imshow(best, cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    right = ids[first + 1 : first + count + 1].tolist()
    for row, tokens in enumerate(guess.tolist()):
        for place, token in enumerate(tokens):
            weight = "bold" if token == right[place] else "normal"
            ax.text(
                place,
                row,
                text(token),
                ha="center",
                va="center",
                fontsize=8 if len(text(token)) < 8 else 7,
                color="black",
                weight=weight,
            )
    read = ids[first : first + count].tolist()
    ax.set_xticks(range(count), [text(token) for token in read], fontsize=8)
    ax.set_yticks(range(len(best)), ["embedding", *(f"block {i}" for i in range(len(best) - 1))])
    ax.set_xlabel("the token that has just been read")
    ax.set_title("Its guess of the next token, read after each block (bold: right)", fontsize=10)
    bar = fig.colorbar(image, ax=ax, label="probability", ticks=[0, 0.5, 1])
    bar.ax.set_ylim(0, 1)  # the colours go on to 1.3, so that black letters can be read on all
    plt.show()


# --------------------------------------------------------------- a small model, trained on the page


@cache
def story_bytes() -> Tensor:
    """Easy stories, a byte for each token; they are ASCII."""
    return torch.tensor(list("\n".join(story_documents("easy", num_bytes=300_000)).encode()))


class TinyModel(nn.Module):
    """The next letter of a story, without positions: an embedding, blocks, a norm and a head."""

    def __init__(self, depth: int = 6, C: int = 32, **options: Any):
        super().__init__()
        self.embed = nn.Embedding(128, C)
        self.head = nn.Linear(C, 128, bias=False)
        config = ModelConfig(hidden_size=C, num_heads=2, intermediate_size=2 * C, **options)
        self.blocks = nn.ModuleList(
            gain_one(TransformerBlock(config, index)) for index in range(depth)
        )
        self.norm = nn.Identity() if config.norm_position == "post" else RMSNorm(C)

    def streams(self, before: Tensor) -> list[Tensor]:
        """(B, T) ids to depth + 1 streams of (B, T, C)."""
        streams = [self.embed(before)]
        for block in self.blocks:
            streams.append(block(streams[-1])[0])
        return streams

    def loss(self, stream: Tensor, after: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(stream)).flatten(0, 1), after.flatten())


def batch(generator: torch.Generator, B: int = 8, T: int = 32) -> tuple[Tensor, Tensor]:
    """Letters, (B, T), and those that follow."""
    ids = story_bytes()
    starts = torch.randint(len(ids) - T, (B, 1), generator=generator)
    rows = ids[starts + torch.arange(T + 1)]  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]


def letter_loss(after: Tensor) -> float:
    """What a guess by frequency alone pays for these letters, in nats."""
    ids = story_bytes()
    frequency = torch.bincount(ids, minlength=128).clamp(min=1) / len(ids)
    return -frequency.log()[after].mean().item()


def train(seed: int, steps: int = 36, warmup: int = 1, **options: Any) -> list[float]:
    """The loss of a fresh model in each step, less that of letter frequencies."""
    torch.manual_seed(seed)
    model = TinyModel(**options)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    log = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, (step + 1) / warmup)
        before, after = batch(generator)
        loss = model.loss(model.streams(before)[-1], after)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item() - letter_loss(after))
    return log


def show_race(runs: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """The loss of each start, as the mean of four steps."""
    _, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    colors = ("tab:blue", "tab:red", "tab:orange", "tab:gray")
    for (kind, logs), style, color in zip(runs.items(), STYLES, colors, strict=True):
        for index, log in enumerate(logs):
            smooth = torch.tensor(log).unfold(0, 4, 1).mean(-1)
            steps = range(2, 2 + len(smooth))
            ax.plot(steps, smooth, style, color=color, label=None if index else kind)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="step", ylabel="loss, less that of\nletter frequencies", ylim=(-1.2, 1.2))
    ax.legend(fontsize=8)
    plt.show()

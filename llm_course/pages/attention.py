"""What the pages of attention draw, and the small model's training that they watch."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator
from torch import Tensor

from llm_course.model import attention as attention_module
from llm_course.model.attention import MultiHeadAttention
from llm_course.model.attention_weights import attention_weights
from llm_course.model.generation import generate
from llm_course.pages.storyteller import load_storyteller

WORDS = tuple(
    "we sat by the river bank and watched two old men mend their red boats while her young "
    "brother threw flat stones into cold clear water until it grew dark outside again".split()
)


def ids_of(text: str) -> Tensor:
    """The words of `text` as a batch of one: (1, T)."""
    return torch.tensor([[WORDS.index(word) for word in text.split()]])


def text_of(ids: Tensor) -> str:
    return " ".join(WORDS[i] for i in ids.flatten().tolist())


# ---------------------------------------------------------------------------------------- pictures


def draw_meanings(before: Sequence[float], after: Mapping[str, Sequence[float]]) -> None:
    """An arrow from one vector to each vector that it becomes, in the plane of two meanings."""
    start = (float(before[0]), float(before[1]))
    plt.figure(figsize=(4, 3.4))
    plt.plot(*start, "o", color="tab:gray")
    plt.annotate("bank, alone", start, (7, 7), textcoords="offset points")
    for (name, vector), color in zip(after.items(), ("tab:blue", "tab:orange"), strict=True):
        end = (float(vector[0]), float(vector[1]))
        plt.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color})
        plt.plot(*end, "o", color=color)
        away = 9 if end[1] > start[1] else -17
        plt.annotate(name, end, (-28, away), textcoords="offset points")
    plt.xlabel("water")
    plt.ylabel("money")
    plt.xlim(-0.5, 8.5)
    plt.ylim(-0.5, 8.5)
    plt.title("One word, two sentences")
    plt.show()


def draw_map(
    ax: Axes, weights: Tensor, words: Sequence[str] = (), *, numbers: bool = False
) -> None:
    """An attention map (T, S): a row for each query, a column for each key."""
    ax.imshow(weights, cmap="Blues", vmin=0, vmax=1.3, aspect="auto", interpolation="nearest")
    ax.set_xlabel("key")
    for axis, size in ((ax.yaxis, weights.shape[0]), (ax.xaxis, weights.shape[1])):
        # on a short axis, the locator would put ticks between the whole numbers
        axis.set_major_locator(
            MaxNLocator(4, integer=True) if size > 4 else FixedLocator(range(size))
        )
    if words:
        ax.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
        ax.set_yticks(range(len(words)), words, fontsize=8)
    if numbers:
        for t, row in enumerate(weights.tolist()):
            for s, weight in enumerate(row):
                ax.text(s, t, f"{weight:.3f}", ha="center", va="center", fontsize=8)


def show_maps(
    title: str,
    maps: Mapping[str, Tensor],
    words: Sequence[str] = (),
    *,
    numbers: bool = False,
    labels: tuple[str, str] = ("query", "key"),
    height: float = 2.5,
) -> None:
    """Several maps side by side."""
    width = min(3.2 * len(maps), 8)
    fig, axes = plt.subplots(1, len(maps), figsize=(width, height), squeeze=False)
    for ax, (name, weights) in zip(axes[0], maps.items(), strict=True):
        draw_map(ax, weights, words, numbers=numbers)
        ax.set_title(name, fontsize=9)
        ax.set_xlabel(labels[1])
    axes[0, 0].set_ylabel(labels[0])
    fig.suptitle(title, fontsize=11)
    fig.tight_layout()
    plt.show()


def show_curves(
    title: str,
    x: Sequence[float] | Tensor,
    lines: Mapping[str, Sequence[float] | Tensor],
    xlabel: str,
    ylabel: str,
    *,
    log: str = "",
) -> None:
    """Lines over `x`; `log` names the axes with powers of two: "", "x" or "xy"."""
    plt.figure(figsize=(6, 2.6))
    for (name, y), style in zip(lines.items(), ("-", "--", "-.", ":"), strict=False):
        plt.plot(x, y, style, label=name)
    if "x" in log:
        plt.xscale("log", base=2)
    if "y" in log:
        plt.yscale("log", base=2)
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    plt.legend(fontsize=8)
    plt.title(title)
    plt.show()


def keys_read(scores: Tensor) -> float:
    """How many keys a query reads on average: the exponential of the entropy of its weights."""
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1)  # entr(p) is -p log p
    return entropy.exp().mean().item()


def who_reads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """bool (H, K): which query heads notice a change of the values of each key/value head."""
    before = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    columns = []
    for head in range(k.shape[1]):
        changed = v.clone()
        changed[:, head] += 1
        after = F.scaled_dot_product_attention(q, k, changed, enable_gqa=True)
        columns.append((after - before).abs().amax((0, 2, 3)) > 0.5)
    return torch.stack(columns, dim=1)


def planted(mistake: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> type[MultiHeadAttention]:
    """The layer with a mistake: `mistake` changes its queries, keys and values."""

    class Wrong(MultiHeadAttention):
        def project(
            self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None
        ) -> tuple[Tensor, Tensor, Tensor]:
            return mistake(*super().project(x, position_embeddings))

    return Wrong


def llama_attention(**sizes: int) -> Any:
    """Hugging Face's attention layer of a fresh Llama."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    options: dict[str, Any] = {"attn_implementation": "sdpa", **sizes}
    return LlamaAttention(LlamaConfig(**options), layer_idx=0)


# C, H, K and D of three published models
PUBLISHED = {
    "Qwen2 0.5B": (896, 14, 2, 64),
    "Qwen3 0.6B": (1024, 16, 8, 128),
    "Gemma 2 9B": (3584, 16, 8, 256),
}


def published_attention() -> dict[str, Any]:
    """Hugging Face's attention layers of these models, without memory for their weights."""
    from transformers import Gemma2Config, Qwen2Config, Qwen3Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    classes: list[tuple[Any, Any]] = [
        (Qwen2Config, Qwen2Attention),
        (Qwen3Config, Qwen3Attention),
        (Gemma2Config, Gemma2Attention),
    ]
    layers = {}
    for (name, sizes), (make_config, make_layer) in zip(PUBLISHED.items(), classes, strict=True):
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        config = make_config(**dict(zip(names, sizes, strict=True)))
        with torch.device("meta"):
            layers[name] = make_layer(config, layer_idx=0)
    return layers


def weight_shapes(layer: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in layer.named_parameters()}


# ------------------------------------------------------------------------------ a model that copies


@dataclass
class Training:
    """What was recorded while a model trained."""

    first: list[float] = field(default_factory=list)  # loss on each first period, by step
    repeats: list[float] = field(default_factory=list)  # loss on the repeats, by step
    maps: dict[int, list[Tensor]] = field(default_factory=dict)  # by step: a layer's (H, T, T)


def repeated(
    batch: int, generator: torch.Generator, shortest: int = 6, longest: int = 16, T: int = 32
) -> tuple[Tensor, Tensor]:
    """Words in random order, repeated after a random period: ids (B, T) and periods (B, 1)."""
    order = torch.rand(batch, len(WORDS), generator=generator).argsort(-1)
    period = torch.randint(shortest, longest + 1, (batch, 1), generator=generator)
    return order.gather(1, torch.arange(T) % period), period


@torch.no_grad()
def attention_maps(model: Any, ids: Tensor) -> list[Tensor]:
    """The weights of each layer of a `Copier`: (B, H, T, T)."""
    x = model.embed(ids)
    turn = model.rope(torch.arange(ids.shape[1]))
    maps = []
    for norm, layer in zip(model.norms, model.layers, strict=False):
        q, k, _ = layer.project(norm(x), turn)
        maps.append(attention_weights(q, k, is_causal=True))
        x = x + layer(norm(x), position_embeddings=turn)
    return maps


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """The cross-entropy of each next token: (B, T - 1)."""
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")


def train(model: Any, *, steps: int = 250, batch: int = 32, watch: str | None = None) -> Training:
    """Teach `model` to predict repeated words, and look at its maps of a text every ten steps."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    seen = Training()
    for step in range(steps + 1):
        if watch is not None and step % 10 == 0:
            seen.maps[step] = [weights[0] for weights in attention_maps(model, ids_of(watch))]
        ids, period = repeated(batch, generator)
        losses = token_losses(model, ids)
        repeats = torch.arange(1, ids.shape[1]) > period  # the word before has been seen before
        seen.first.append(losses[~repeats].mean().item())
        seen.repeats.append(losses[repeats].mean().item())
        if step == steps:
            break
        optimizer.zero_grad()
        # all but the last target: even without a mask there is nothing to its right to copy
        losses[:, :-1].mean().backward()
        optimizer.step()
    return seen


def find_heads(model: Any, text: str) -> dict[str, tuple[int, int]]:
    """The head of layer 1 that reads the previous word, and the one of layer 2 that reads the word
    after an earlier copy, in a text that was said twice; as (layer, head), counted from 1.
    """
    ids = ids_of(text)
    first, second = (weights[0] for weights in attention_maps(model, ids))
    period = ids.shape[1] // 2
    before = first.diagonal(-1, 1, 2).mean(-1)  # (H,)
    after = second.diagonal(1 - period, 1, 2)[:, 1:].mean(-1)  # queries of the second time
    assert before.max() > 0.4 and after.max() > 0.4, (before, after)
    return {
        "word before": (1, int(before.argmax()) + 1),
        "after my copy": (2, int(after.argmax()) + 1),
    }


@torch.no_grad()
def loss_without(model: Any, heads: Sequence[tuple[int, int]] = ()) -> float:
    """The loss on the repeats of a hundred fresh texts, with these heads, (layer, head), silenced:
    `o_proj` is zero where it would read them.
    """
    model = copy.deepcopy(model)
    for layer, head in heads:
        attention = model.layers[layer - 1]
        weight = attention.o_proj.weight  # (C, H * D)
        weight.view(len(weight), attention.num_heads, -1)[:, head - 1] = 0
    ids, _ = repeated(100, torch.Generator().manual_seed(1), shortest=12, longest=12, T=24)
    return token_losses(model, ids)[:, 12:].mean().item()


@torch.no_grad()
def continue_text(model: Any, text: str, words: int) -> str:
    """Append the most likely next word, `words` times; return what was appended."""
    ids = ids_of(text)
    for _ in range(words):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    return text_of(ids[:, -words:])


@torch.no_grad()
def in_training_mode(
    dropout: float, story: str, prompt: str, tokens: int = 40
) -> tuple[float, str]:
    """The storyteller's loss on a story, and what it writes, with dropout that is never off."""
    shared, tokenizer = load_storyteller()
    model = copy.deepcopy(shared).train()
    for layer in model.layers:
        layer.self_attn.dropout = dropout  # type: ignore[union-attr]
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(story)])
    loss = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item()
    text = torch.tensor([tokenizer.encode(prompt)])
    for _ in range(tokens):
        text = torch.cat((text, model(text).logits[:, -1:].argmax(-1)), dim=1)
    return loss, tokenizer.decode(text[0].tolist())


def write_with(choose: Callable[[int], Callable[..., Tensor]], text: str, tokens: int) -> str:
    """What the storyteller writes after a text if `choose(T)` computes its attention."""
    model, tokenizer = load_storyteller()
    ids = torch.tensor([tokenizer.encode(text)])
    with patch.object(attention_module, "fastest_attention", lambda q, k, v: choose(q.shape[2])):
        written = generate(model, ids, max_new_tokens=tokens)
    return tokenizer.decode(written[0].tolist())


@torch.no_grad()
def share_right(model: Any) -> float:
    """Continue texts of 14 words, whose last two repeat the first two: what share is right?"""
    generator = torch.Generator().manual_seed(2)
    ids, _ = repeated(200, generator, shortest=12, longest=12, T=24)
    text = ids[:, :14]
    for _ in range(10):
        text = torch.cat((text, model(text)[:, -1:].argmax(-1)), dim=1)
    return (text[:, 14:] == ids[:, 14:]).float().mean().item()


def show_losses(runs: Mapping[str, Training]) -> None:
    """Each run's loss on the repeats, and the first run's loss where nothing can be predicted."""
    lines: dict[str, Sequence[float]] = {
        f"repeats, {name}": run.repeats for name, run in runs.items()
    }
    name, run = next(iter(runs.items()))
    lines[f"first time, {name}"] = run.first
    show_curves(
        "Loss while they learn", range(len(run.first)), lines, "training step", "loss (nats)"
    )


def show_head(training: Training, step: int, layer: int, head: int, text: str) -> None:
    """How far the loss had fallen at a training step, and where a head looked at that point."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), width_ratios=[1, 1.3])
    left.plot(training.repeats, color="tab:gray", lw=1)
    left.plot(step, training.repeats[step], "o", color="tab:blue")
    left.set_xlabel("training step")
    left.set_ylabel("loss on the repeats (nats)")
    draw_map(right, training.maps[step][layer - 1][head - 1], text.split())
    right.set_ylabel("query")
    right.set_title(f"layer {layer}, head {head}, after {step} steps", fontsize=10)
    fig.tight_layout()
    plt.show()


def show_leak(runs: Mapping[str, tuple[Any, Training]]) -> None:
    """For each model, its last loss where nothing can be predicted, and how well it writes."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6, 2.4))
    colors = ["tab:blue", "tab:orange"]
    losses = [training.first[-1] for _, training in runs.values()]
    left.bar_label(left.bar(list(runs), losses, color=colors), fmt="%.1f", fontsize=9)
    left.set_ylabel("training loss,\nfirst time (nats)")
    shares = [share_right(model) for model, _ in runs.values()]
    right.bar_label(right.bar(list(runs), shares, color=colors), fmt="%.1f", fontsize=9)
    right.set_ylabel("share right\nwhen it writes")
    for ax in (left, right):
        ax.margins(y=0.18)  # room for the numbers
    fig.suptitle("Without the mask: a perfect loss, and no language model")
    fig.tight_layout()
    plt.show()


def show_film(
    training: Training, steps: Sequence[int], heads: Mapping[str, tuple[int, int]], text: str
) -> None:
    """A row of maps for each head, given as (layer, head), at some steps of the training."""
    shape = (len(heads), len(steps))
    size = (9, 2.5 * len(heads))
    fig, axes = plt.subplots(*shape, figsize=size, sharex=True, sharey=True, squeeze=False)
    for row, (name, (layer, head)) in zip(axes, heads.items(), strict=True):
        for ax, step in zip(row, steps, strict=True):
            draw_map(ax, training.maps[step][layer - 1][head - 1], text.split())
            ax.set_title(f"step {step}, loss {training.repeats[step]:.1f}", fontsize=9)
            ax.tick_params(labelsize=7)
            ax.set_xlabel("")
        row[0].set_ylabel(f"{name}\nquery", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("key")
    fig.suptitle("One sentence, said twice, and read by two heads while they learn", fontsize=11)
    fig.tight_layout()
    plt.show()


# ------------------------------------------------------------------------------- the storyteller


@torch.no_grad()
def story_maps(story: str) -> tuple[list[str], Tensor, list[str]]:
    """The T tokens of `story`, what each head of the storyteller reads, (layers, H, T, T), and the
    token that it finds likeliest after each of the T.
    """
    model, tokenizer = load_storyteller()
    assert tokenizer.eos_token_id is not None
    ids = [tokenizer.eos_token_id, *tokenizer.encode(story)]
    maps: list[Tensor] = []

    def watch(layer: Any, arguments: tuple[Tensor], options: dict[str, Any]) -> None:
        q, k, _ = layer.project(*arguments, options["position_embeddings"])
        maps.append(attention_weights(q, k, is_causal=True)[0])

    attentions = [layer for layer in model.modules() if isinstance(layer, MultiHeadAttention)]
    hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in attentions]
    likeliest = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    for hook in hooks:
        hook.remove()
    tokens, after = ([tokenizer.decode([i]).strip() for i in row] for row in (ids, likeliest))
    return tokens, torch.stack(maps), after


def show_names(story: str, names: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What the head that looks up names reads: `names` tells which name is due after a word.

    Of all heads, it is the one that gives these names the most weight. Returns, for each of the
    words, the token that this head reads most, and the one that the model finds likeliest next.
    """
    tokens, maps, after = story_maps(story)
    T = len(tokens)
    rows = [T - 1 - tokens[::-1].index(word) for word in names]  # where each word comes last
    due = torch.tensor([[token == name for token in tokens] for name in names.values()])
    found = (maps[:, :, rows] * due).sum((-2, -1))  # (layers, H)
    layer, head = divmod(int(found.argmax()), maps.shape[1])
    weights = maps[layer, head, rows]  # (rows, T)
    written = {word: after[row] for word, row in zip(names, rows, strict=True)}
    plt.figure(figsize=(9, 1.9))
    draw_map(plt.gca(), weights[:, 1:])
    plt.xticks(range(T - 1), tokens[1:], rotation=90, fontsize=8)
    labels = [f"... {word} (next: {token})" for word, token in written.items()]
    plt.yticks(range(len(rows)), labels, fontsize=9)
    plt.title(f"The storyteller, layer {layer + 1}, head {head + 1}", fontsize=11)
    plt.show()
    read = [tokens[int(row.argmax())] for row in weights]
    return dict(zip(names, read, strict=True)), written

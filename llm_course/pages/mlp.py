"""What the page of the MLP draws, and a model of the next word with one layer to choose."""

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_course.model import mlp as mlp_module
from llm_course.model.normalization import RMSNorm
from llm_course.pages.memory import saved_tensors
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import story_documents

Activation = Callable[[Tensor], Tensor]
STYLES = ("-", "--", "-.", ":")
PARTS = ("MLP", "attention", "embedding, output")  # of a model, and norms too thin to draw

# ---------------------------------------------------------------------------------------- pictures


def plane(low: float, high: float, steps: int = 81) -> tuple[Tensor, Tensor]:
    """The two coordinates of a square grid of points."""
    ticks = torch.linspace(low, high, steps)
    a, b = torch.meshgrid(ticks, ticks, indexing="xy")
    return a, b


def draw_xor(maps: Mapping[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
    """What each map makes of two facts, with the four cases and what they should be."""
    a, b = plane(-0.25, 1.25)
    fig, axes = plt.subplots(1, len(maps), figsize=(6.4, 2.7), layout="constrained", sharey=True)
    for ax, (name, f) in zip(axes, maps.items(), strict=True):
        box = (-0.25, 1.25, -0.25, 1.25)
        image = ax.imshow(f(a, b), origin="lower", extent=box, vmin=-0.5, vmax=1, cmap="Blues")
        ax.scatter([0, 0, 1, 1], [0, 1, 0, 1], c=["w", "k", "k", "w"], edgecolors="k", zorder=2)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel('a: I read a "don\'t"')
    axes[0].set_ylabel('b: I am "dislike"')
    fig.colorbar(image, ax=axes, label="output")
    fig.suptitle("Black should be 1, white should be 0", fontsize=11)
    plt.show()


def pieces(neurons: int, seed: int = 0) -> Tensor:
    """Number the sets of ReLU neurons that fire together, over a square: (400, 400)."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.stack(plane(-2, 2, 400), dim=-1)  # (400, 400, 2)
    keys = torch.randn(2, neurons, generator=generator)
    shifts = 0.5 * torch.randn(neurons, generator=generator)
    fires = points @ keys + shifts > 0  # (400, 400, neurons)
    return (fires * 2 ** torch.arange(neurons)).sum(-1).unique(return_inverse=True)[1]


def draw_neurons(key: Sequence[float], value: Sequence[float], neurons: int) -> None:
    """What one ReLU neuron writes at each token of a plane, and the pieces that many make of it."""
    fig, axes = plt.subplots(1, 2, figsize=(6.4, 3.1), layout="constrained", sharey=True)
    tokens = torch.stack(plane(-1.8, 1.8, 9), dim=-1).reshape(-1, 2)
    written = (tokens @ torch.tensor(key)).relu()[:, None] * torch.tensor(value)
    options: dict[str, Any] = {"angles": "xy", "scale_units": "xy"}
    axes[0].quiver(*tokens.T, *written.T, scale=2, color="tab:blue", width=0.006, **options)
    axes[0].quiver(0, 0, *key, scale=1, color="tab:orange", width=0.014, **options)
    axes[0].text(key[0], key[1] + 0.1, "key", color="tab:orange")
    axes[0].set_title("one neuron writes its value", fontsize=10)
    axes[0].set(xlabel="first number", ylabel="second number", aspect="equal")
    axes[0].set(xlim=(-2, 2), ylim=(-2, 2))
    parts = pieces(neurons)
    shuffled = torch.randperm(int(parts.max()) + 1, generator=torch.Generator().manual_seed(1))
    axes[1].imshow(shuffled[parts], origin="lower", extent=(-2, 2, -2, 2), cmap="tab20", alpha=0.8)
    axes[1].set_title(f"{neurons} neurons make {int(parts.max()) + 1} pieces", fontsize=10)
    axes[1].set_xlabel("first number")
    plt.show()


def slope(activation: Activation, z: Tensor) -> Tensor:
    """The derivative of an activation at each number of `z`."""
    return torch.autograd.functional.jvp(activation, z, torch.ones_like(z))[1]


def draw_activations(activations: Mapping[str, Activation]) -> None:
    """The activations, and their derivatives."""
    z = torch.linspace(-4, 2.5, 651)
    fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.7), layout="constrained")
    for (name, activation), style in zip(activations.items(), STYLES, strict=False):
        axes[0].plot(z, activation(z), style, label=name)
        axes[1].plot(z, slope(activation, z), style, label=name)
    axes[0].set(xlabel="z", ylabel="f(z)", ylim=(-0.5, 2.5))
    axes[1].set(xlabel="z", ylabel="derivative of f")
    axes[0].legend(fontsize=8)
    fig.suptitle("The smooth ones dip below 0, and never go quite flat there", fontsize=11)
    plt.show()


def draw_gate(activation: Activation, gate_angle: float, up_angle: float) -> None:
    """What a plain neuron and a gated one put out over a plane; the arrows are their keys."""
    a, b = plane(-3, 3)
    along = lambda degrees: (  # noqa: E731
        math.cos(math.radians(degrees)) * a + math.sin(math.radians(degrees)) * b
    )
    outputs = {
        "plain: f(up · x)": activation(along(up_angle)),
        "gated: f(gate · x) times up · x": activation(along(gate_angle)) * along(up_angle),
    }
    fig, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained", sharey=True)
    levels = [-9, -6, -4, -2, -1, -0.25, -0.05, 0.05, 0.25, 1, 2, 4, 6, 9]
    for ax, (name, z) in zip(axes, outputs.items(), strict=True):
        image = ax.contourf(a, b, z, levels=levels, cmap="RdBu", norm="symlog", extend="both")
        arrows = {"up": (up_angle, "tab:green")}
        if "gated" in name:
            arrows["gate"] = (gate_angle, "tab:purple")
        for label, (degrees, color) in arrows.items():
            x = 2 * math.cos(math.radians(degrees))
            y = 2 * math.sin(math.radians(degrees))
            ax.annotate(
                "", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": color, "lw": 2}
            )
            ax.text(1.2 * x, 1.2 * y, label, color=color, ha="center", va="center", weight="bold")
        ax.set_title(name, fontsize=10)
        ax.set(xlabel="a", aspect="equal", xlim=(-3, 3), ylim=(-3, 3))
    axes[0].set_ylabel("b")
    fig.colorbar(image, ax=axes, label="output", ticks=[-9, -2, -0.25, 0.25, 2, 9], format="%g")
    plt.show()


def draw_shares(models: Mapping[str, Mapping[str, int]]) -> None:
    """The share of each part in a model's parameters; parts below a hundredth are left out."""
    plt.figure(figsize=(6.4, 2.4))
    left = torch.zeros(len(models))
    totals = [sum(parts.values()) for parts in models.values()]
    for part, color in zip(PARTS, ("tab:blue", "tab:orange", "tab:gray"), strict=True):
        sizes = [parts[part] for parts in models.values()]
        width = torch.tensor([size / total for size, total in zip(sizes, totals, strict=True)])
        plt.barh(list(models), width, left=left, label=part, color=color)
        left = left + width
    plt.xlabel("share of the parameters")
    plt.gca().invert_yaxis()  # the first model at the top
    plt.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=3)
    plt.title("Most of a large model is in its MLPs")
    plt.show()


def published_models() -> dict[str, dict[str, int]]:
    """The parameters of three published models by part, from their sizes."""

    def llama(V: int, C: int, neurons: int, layers: int, kv_width: int) -> dict[str, int]:
        return {
            "MLP": layers * 3 * C * neurons,
            "attention": layers * 2 * C * (C + kv_width),
            "embedding, output": 2 * V * C,
            "norms": (2 * layers + 1) * C,
        }

    gpt2 = {  # with biases, learned positions and one matrix for embedding and output
        "MLP": 12 * (8 * 768**2 + 5 * 768),
        "attention": 12 * (4 * 768**2 + 4 * 768),
        "embedding, output": (50257 + 1024) * 768,
        "norms": (2 * 12 + 1) * 2 * 768,
    }
    return {
        "GPT-2 small": gpt2,
        "Llama 2 7B": llama(32000, 4096, 11008, 32, 4096),
        "Llama 3 8B": llama(128256, 4096, 14336, 32, 1024),
    }


# ------------------------------------------------------------------------------- oracle and probe


def llama_mlp(hidden_size: int, intermediate_size: int) -> Any:
    """Hugging Face's MLP of a fresh Llama."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }
    return LlamaMLP(LlamaConfig(**sizes, num_attention_heads=1))


def reads(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """bool (T, T): does output t change when input s changes? The derivative decides."""
    gradients = torch.autograd.functional.jacobian(lambda x: layer(x)[0].sum(-1), x)
    return gradients[:, 0].abs().sum(-1) > 0  # (T, 1, T, C) -> (T, T)


# ------------------------------------------------------------------- the neurons of a trained model


@cache
def story_reading(num_bytes: int = 16_000) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Tokens of stories, (N,), and what the MLP of each of the storyteller's layers reads there."""
    model, tokenizer = load_storyteller()
    text = "\n".join(story_documents("easy", num_bytes=num_bytes, seed=78))
    ids = torch.tensor(tokenizer.encode(text))
    ids = ids[: len(ids) // 256 * 256].view(-1, 256)
    seen: list[Tensor] = []
    blocks: list[Any] = list(model.layers)
    hooks = [
        block.mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].flatten(0, 1)))
        for block in blocks
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return ids.flatten(), tuple(seen)


@torch.no_grad()
def read_neuron(layer: int, neuron: int, texts: int = 5) -> None:
    """Print where a neuron of the storyteller is strongest, and which tokens its value promotes."""
    model, tokenizer = load_storyteller()
    ids, seen = story_reading()
    block: Any = model.layers[layer]
    mlp = block.mlp
    gate = mlp.gate_proj.weight[neuron]
    up = mlp.up_proj.weight[neuron]
    strength = F.silu(seen[layer] @ gate) * (seen[layer] @ up)  # (N,)
    words: dict[str, None] = {}
    for place in strength.argsort(descending=True).tolist():
        before = tokenizer.decode(ids[max(place - 4, 0) : place + 1].tolist())
        if place % 256 > 4:  # else the model has read too little of the text
            words.setdefault(" ".join(before.split()), None)
        if len(words) == texts:
            break
    scores = model.embedding.embed_tokens.weight @ mlp.down_proj.weight[:, neuron]  # (V,)
    best = scores.topk(6).indices.tolist()
    print("strongest after:", *words, sep="\n    ... ")
    print("promotes:", " | ".join(tokenizer.decode([token]).strip() for token in best))


# ---------------------------------------------------------------------------- a model of next words


@dataclass(frozen=True)
class StoryWords:
    """Easy stories as word ids, the last tenth of them held out."""

    words: tuple[str, ...]  # the vocabulary, most frequent first
    train: Tensor
    held_out: Tensor


def split_words(text: str) -> list[str]:
    """Words and punctuation marks."""
    return re.findall(r"[A-Za-z]+|[^\sA-Za-z]", text)


@cache
def story_words(num_bytes: int = 400_000) -> StoryWords:
    found = split_words("\n".join(story_documents("easy", num_bytes=num_bytes)))
    words = tuple(word for word, _ in Counter(found).most_common())
    numbers = {word: i for i, word in enumerate(words)}
    ids = torch.tensor([numbers[word] for word in found])
    cut = len(ids) * 9 // 10
    return StoryWords(words, ids[:cut], ids[cut:])


class NextWord(nn.Module):
    """Guess the next word from the last four: embed, one layer on a residual stream, score.

    `layer` maps (N, C) to (N, C), or to that and something more, as a mixture of experts does.
    """

    context = 4
    width = 24
    hidden_size = context * width  # C

    def __init__(self, layer: nn.Module, vocab_size: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, self.width)
        self.norm = RMSNorm(self.hidden_size)
        self.layer = layer
        self.head = nn.Linear(self.hidden_size, vocab_size)

    def forward(self, before: Tensor) -> tuple[Tensor, Any]:
        x = self.embed(before).flatten(1)  # (N, 4) -> (N, 4, 24) -> (N, C)
        y = self.layer(self.norm(x))
        y, stats = y if isinstance(y, tuple) else (y, None)
        return self.head(x + y), stats  # (N, V)


def windows(ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The four words at each place, (N, 4), and the word that follows, (N,)."""
    before = ids[places[:, None] + torch.arange(NextWord.context)]
    return before, ids[places + NextWord.context]


@torch.no_grad()
def held_out_loss(model: NextWord, stride: int = 4) -> float:
    """The cross-entropy of the next word on the held-out stories, in nats."""
    ids = story_words().held_out
    before, target = windows(ids, torch.arange(0, len(ids) - NextWord.context, stride))
    return F.cross_entropy(model(before)[0], target).item()


def train_words(
    make_layer: Callable[[], nn.Module],
    *,
    learning_rate: float = 0.01,
    seed: int = 0,
    steps: int = 150,
    batch: int = 64,
) -> NextWord:
    """A model of the next word with a fresh layer, trained on the stories."""
    data = story_words()
    torch.manual_seed(seed)
    model = NextWord(make_layer(), len(data.words))
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True)
    last = len(data.train) - NextWord.context
    for places in torch.randint(last, (steps, batch), generator=order):
        before, target = windows(data.train, places)
        optimizer.zero_grad()
        F.cross_entropy(model(before)[0], target).backward()
        optimizer.step()
    return model


@torch.no_grad()
def continue_words(model: NextWord, text: str, count: int = 12) -> str:
    """The text with the most probable next word, again and again."""
    words = list(story_words().words)
    found = split_words(text)
    for _ in range(count):
        before = torch.tensor([[words.index(word) for word in found[-NextWord.context :]]])
        found.append(words[int(model(before)[0].argmax())])
    return re.sub(r" (?=[.,!?])", "", " ".join(found))


def losses(models: Sequence[Sequence[NextWord]]) -> Tensor:
    """The held-out loss of each model, as a table."""
    return torch.tensor([[held_out_loss(model) for model in row] for row in models])


def draw_race(rates: Sequence[float], runs: Mapping[str, Tensor]) -> None:
    """The held-out loss of each start, (rates, starts), by learning rate."""
    plt.figure(figsize=(6.4, 2.7))
    places = torch.arange(len(rates))
    for (name, losses), marker, shift in zip(runs.items(), "os", (-0.08, 0.08), strict=True):
        x = places.repeat_interleave(losses.shape[1]) + shift
        plt.plot(x, losses.flatten(), marker, label=name, alpha=0.7)
    plt.xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    plt.xlim(-0.5, len(rates) - 0.5)
    plt.xlabel("learning rate")
    plt.ylabel("held-out loss (nats)")
    plt.legend(fontsize=8)
    plt.title("Equal parameters, equal data, every start")
    plt.show()


# ----------------------------------------------------------------------- what backward has to know


def vectors_kept(mlp: Any, tokens: int = 8) -> int:
    """How many vectors of F numbers an MLP keeps for backward, per token, besides its input."""
    x = torch.randn(tokens, mlp.hidden_size, requires_grad=True)
    F = mlp.up_proj.weight.shape[0]
    return sum(tensor.shape == (tokens, F) for tensor in saved_tensors(lambda: mlp(x)))


def story_step(form: Callable[[Tensor, Tensor], Tensor], text: str) -> dict[str, float]:
    """MiB that the storyteller keeps for backward while it reads a text, with this SwiGLU."""
    shared, tokenizer = load_storyteller()
    model = copy.deepcopy(shared).requires_grad_()
    ids = torch.tensor([tokenizer.encode(text)])
    mlp: Any = model.layers[0].mlp
    neurons = mlp.up_proj.weight.shape[0]
    with patch.object(mlp_module, "swiglu", form):
        saved = saved_tensors(lambda: model(ids), leave_out=model.parameters())
    kept = {"activations of the MLPs": 0.0, "everything else": 0.0}
    for tensor in saved:
        part = "activations of the MLPs" if tensor.shape[-1] == neurons else "everything else"
        kept[part] += tensor.untyped_storage().nbytes() / 2**20
    return kept


def draw_kept(runs: Mapping[str, Mapping[str, float]]) -> None:
    """One bar for each form, made of the parts that it keeps."""
    plt.figure(figsize=(6.4, 1.9))
    left = [0.0] * len(runs)
    for part, color in zip(next(iter(runs.values())), ("tab:blue", "tab:gray"), strict=True):
        sizes = [kept[part] for kept in runs.values()]
        drawn = plt.barh(list(runs), sizes, left=left, label=part, color=color)
        plt.bar_label(drawn, fmt="%.1f", label_type="center", color="white", fontsize=8)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    plt.xlabel("MiB kept for backward")
    plt.gca().invert_yaxis()
    plt.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35), ncol=2)
    plt.title("The storyteller reads one story", fontsize=10)
    plt.show()


# ------------------------------------------------------------------------------------ dead neurons


@dataclass(frozen=True)
class Recovery:
    """What became of a network after one step of a chosen size: (starts, steps + 1), (starts,)."""

    dead: Tensor  # the share of dead neurons, by step
    loss: Tensor  # at the end
    returned: int  # how many neurons died and came back


def dead_neurons(up_proj: nn.Module, activation: Activation, x: Tensor) -> Tensor:
    """bool (F,): the neurons whose activation has a derivative below 0.001 for every row of x."""
    match = up_proj(x).detach().requires_grad_()  # (N, F)
    slopes = torch.autograd.grad(activation(match).sum(), match)[0]
    return slopes.abs().amax(0) < 1e-3


def recover(
    make_mlp: Callable[[], Any], activation: Activation, first_rate: float, *, starts: int = 3
) -> Recovery:
    """Fit a smooth function of two numbers: one step with `first_rate`, then 60 with 0.01."""
    masks = []
    losses = []
    for seed in range(starts):
        torch.manual_seed(seed)
        mlp = make_mlp()
        x = 2 * torch.rand(128, 2) - 1
        target = torch.sin(3 * x) * x.flip(-1)
        dead = []
        for rate, count in ((first_rate, 1), (0.01, 60)):
            optimizer = torch.optim.Adam(mlp.parameters(), lr=rate, fused=True)
            for _ in range(count):
                optimizer.zero_grad()
                loss = F.mse_loss(mlp(x), target)
                loss.backward()
                optimizer.step()
                dead.append(dead_neurons(mlp.up_proj, activation, x))
        masks.append(torch.stack(dead))
        losses.append(loss.item())
    mask = torch.stack(masks)  # (starts, steps + 1, F)
    returned = int((mask[:, :-1] & ~mask[:, 1:]).sum())
    return Recovery(mask.float().mean(-1), torch.tensor(losses), returned)


def draw_deaths(first_rates: Sequence[float], runs: Mapping[str, Sequence[Recovery]]) -> None:
    """Dead ReLU neurons by step, and at the end by the size of the first step."""
    fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.8), layout="constrained", sharey=True)
    for rate, run, style in zip(first_rates, runs["ReLU"], STYLES, strict=True):
        axes[0].plot(run.dead.mean(0), style, label=f"ReLU, first step {rate:g}")
    for (name, by_rate), style in zip(runs.items(), ("o-", "s--", "^:"), strict=True):
        last = [run.dead[:, -1].mean() for run in by_rate]
        axes[1].plot(first_rates, last, style, label=name, markersize=5)
    axes[0].set(xlabel="steps after the first", ylabel="share of dead neurons", ylim=(-0.03, 0.65))
    axes[1].set(xlabel="learning rate of the first step", xscale="log")
    for ax in axes:
        ax.legend(fontsize=7, loc="upper left")
    fig.suptitle("Dead ReLU neurons do not come back", fontsize=11)
    plt.show()

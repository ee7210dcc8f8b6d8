"""What the pages of the mixture of experts draw and measure.

The task is taken from a trained model: the storyteller's third MLP, 704 neurons wide. A layer sees
what that MLP sees while the model reads stories, and learns to put out what it puts out.
`python -m llm_course.pages.experts` trains all the runs that the pages plot, and stores their
loads and errors in `experts_runs.json`.
"""

import copy
import html
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import HTML, display
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.testing import assert_close

from llm_course.files import write_text
from llm_course.model.generation import generate
from llm_course.model.mlp import MLP, gated_activation
from llm_course.model.moe import Experts, MoE, Router
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import story_documents
from llm_course.text.wording import BOYS, COLOURS, GIRLS, PLACES, SIZES, SLOTS, THINGS

RECORDED = Path(__file__).with_name("experts_runs.json")
LAYER = 2  # of the storyteller's five
NEURONS = 704  # of that layer's MLP
LENGTH = 256  # tokens that the storyteller reads at a time
STEPS = 300
COLORS_OF_EXPERTS = (
    "#4a86c8",
    "#d98032",
    "#4d9a5b",
    "#c85250",
    "#9467bd",
    "#8c6d4f",
    "#d678b4",
    "#7f8c8d",
)
EVERY = 10  # steps that a recorded load is the mean of

# -------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class Task:
    """What one MLP of the storyteller reads and puts out, token by token."""

    ids: Tensor  # (N,): the tokens
    x: Tensor  # (N, C): what the layer reads
    y: Tensor  # (N, C): what it puts out, with a mean square of 1
    scale: float  # by which its output was divided
    cut: int  # the tokens from here on are held out


@cache
def storyteller_task(num_bytes: int = 80_000) -> Task:
    model, tokenizer = load_storyteller()
    text = "\n\n".join(story_documents("easy", num_bytes=num_bytes, seed=77))
    ids = torch.tensor(tokenizer.encode(text))
    ids = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    seen: list[tuple[Tensor, Tensor]] = []
    shallow = copy.deepcopy(model)
    shallow.layers = shallow.layers[: LAYER + 1]
    mlp: Any = shallow.layers[LAYER].mlp
    mlp.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    with torch.no_grad():
        for rows in ids.split(8):
            shallow(rows)
    x = torch.cat([inputs.flatten(0, 1) for inputs, _ in seen])
    y = torch.cat([output.flatten(0, 1) for _, output in seen])
    scale = y.square().mean().sqrt().item()
    return Task(ids.flatten(), x, y / scale, scale, len(x) * 9 // 10)


class Load(NamedTuple):
    """What a toy layer returns besides its output, with the names of a `MoE`'s `RouterStats`."""

    tokens_per_expert: Tensor  # (E,)
    aux_loss: float = 0.0


@dataclass(frozen=True)
class Run:
    """A layer, and what was noted while it trained."""

    layer: Any
    loads: Tensor  # each expert's share of the choices: (steps, E), or (steps, 0) for an MLP
    losses: Tensor  # the error on the training batch: (steps,)

    @property
    def error(self) -> float:
        """The mean squared error on held-out tokens: 0 is perfect, 1 is no better than zeros."""
        return error(self.layer)


@torch.no_grad()
def error(layer: nn.Module) -> float:
    task = storyteller_task()
    y = layer(task.x[task.cut :])
    y = y[0] if isinstance(y, tuple) else y
    return F.mse_loss(y, task.y[task.cut :]).item()


def train(
    make_layer: Callable[[], Any],
    *,
    bias_rate: float = 0.0,
    seed: int = 0,
    steps: int = STEPS,
    batch: int = 128,
) -> Run:
    """Teach a fresh layer the task; after each step, move the router's bias by `bias_rate`."""
    task = storyteller_task()
    torch.manual_seed(seed)
    layer = make_layer()
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.003, fused=True)
    # down to 0, so that the errors at the end don't depend on the luck of the last steps
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    loads = []
    losses = []
    for places in torch.randint(task.cut, (steps, batch), generator=order):
        y = layer(task.x[places])
        y, stats = y if isinstance(y, tuple) else (y, None)
        loss = F.mse_loss(y, task.y[places])
        optimizer.zero_grad()
        (loss if stats is None else loss + stats.aux_loss).backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if stats is not None:
            loads.append(stats.tokens_per_expert / stats.tokens_per_expert.sum())
            if bias_rate:
                layer.gate.update_bias(stats.tokens_per_expert, rate=bias_rate)
    noted = torch.stack(loads) if loads else torch.empty(steps, 0)
    return Run(layer, noted, torch.tensor(losses))


def eight_experts(balancing_loss: float = 0.0) -> MoE:
    """A mixture as large as the MLP that it learns from, of which each token uses an eighth."""
    return MoE(
        256,
        NEURONS // 8,
        num_experts=8,
        top_k=1,
        norm_topk_prob=False,
        router_aux_loss_coef=balancing_loss,
    )


# ------------------------------------------------------------------------------------ many runs


@dataclass(frozen=True)
class Record:
    """What is kept of a run: means of ten steps, and the error on held-out tokens at the end."""

    loads: Tensor  # (steps / 10, E)
    losses: Tensor  # (steps / 10,)
    error: float


BALANCING: dict[str, dict[str, float]] = {
    "no balancing": {},
    "loss": {"balancing_loss": 0.03},
    "bias": {"bias_rate": 0.01},
}
STARTS = 5
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
PLAIN = {"equal work": NEURONS // 8, "equal size": NEURONS}  # dense layers: their neurons


def planned_runs() -> list[tuple[str, int, float]]:
    """Name, seed and bias rate of every run that the pages plot."""
    names = [*BALANCING, "equal work"]
    rates = {name: settings.get("bias_rate", 0.0) for name, settings in BALANCING.items()}
    plan = [(name, seed, rates.get(name, 0.0)) for seed in range(STARTS) for name in names]
    plan += [("equal size", seed, 0.0) for seed in range(1)]
    return plan + [("bias", 0, rate) for rate in RATES if rate != rates["bias"]]


def record_run(name: str, seed: int, bias_rate: float) -> dict[str, Any]:
    """Train one of the runs, and return what is kept of it."""
    make: Callable[[], nn.Module] = partial(
        eight_experts, BALANCING.get(name, {}).get("balancing_loss", 0.0)
    )
    if name in PLAIN:
        make = partial(MLP, 256, PLAIN[name])
    run = train(make, bias_rate=bias_rate, seed=seed)
    loads = run.loads.unflatten(0, (-1, EVERY)).mean(1)
    losses = run.losses.unflatten(0, (-1, EVERY)).mean(1)
    return {
        "name": name,
        "seed": seed,
        "rate": bias_rate,
        "error": round(run.error, 4),
        "losses": [round(loss, 4) for loss in losses.tolist()],
        "loads": [[round(share, 3) for share in row] for row in loads.tolist()],
    }


def record_all() -> None:
    """Train every run that the pages plot, and store what is kept of them. It takes minutes."""
    torch.set_num_threads(1)
    lines = []
    for name, seed, rate in planned_runs():
        lines.append(json.dumps(record_run(name, seed, rate)))
        print(lines[-1][:70], flush=True)
        write_text(RECORDED, "[\n" + ",\n".join(lines) + "\n]\n")


@cache
def recorded() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(RECORDED.read_text(encoding="utf-8")))


def records(name: str) -> list[Record]:
    """The recorded starts of one kind, all with the settings of `BALANCING`."""
    rate = BALANCING.get(name, {}).get("bias_rate", 0.0)
    found = [run for run in recorded() if run["name"] == name and run["rate"] == rate]
    return [as_record(run) for run in found]


def records_by_rate() -> dict[float, Record]:
    """From one start, the run without balancing and those with the bias, by rate."""
    found = [run for run in recorded() if run["seed"] == 0]
    chosen = [run for run in found if run["name"] in ("no balancing", "bias")]
    return {run["rate"]: as_record(run) for run in sorted(chosen, key=lambda run: run["rate"])}


def as_record(run: Mapping[str, Any]) -> Record:
    return Record(torch.tensor(run["loads"]), torch.tensor(run["losses"]), run["error"])


def experts_in_use(loads: Tensor) -> Tensor:
    """The exponential of the load's entropy: E if it's even, 1 if one expert does everything."""
    return torch.special.entr(loads).sum(-1).exp()


# -------------------------------------------------------------------------------------- pictures


def draw_routing(words: Sequence[str], chosen: Tensor, weights: Tensor, num_experts: int) -> None:
    """Words below, experts in the middle, sums above; a line is as thick as its weight."""
    _, ax = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    last = len(words) - 1
    at = [last * (e + 0.5) / num_experts for e in range(num_experts)]
    for n, word in enumerate(words):
        for e, share in zip(chosen[n].tolist(), weights[n].tolist(), strict=True):
            ax.plot([n, at[e], n], [0, 1, 2], color=f"C{n}", lw=7 * share, alpha=0.8, zorder=1)
        ax.text(n, -0.12, word, ha="center", va="top")
        ax.text(n, 2, "+", ha="center", va="center", bbox={"boxstyle": "circle", "fc": "white"})
    load = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
    for e, tokens in enumerate(load):
        box = {"boxstyle": "round", "fc": "lightgray"}
        ax.text(at[e], 1, f"expert {e}\nload {tokens}", ha="center", va="center", bbox=box)
    ax.set(xlim=(-0.5, last + 0.5), ylim=(-0.4, 2.3))
    ax.axis("off")
    plt.show()


def draw_loads(ax: Axes, loads: Tensor, step: int = 1) -> None:
    """The experts' shares of the work, stacked, over the steps of a training."""
    steps = torch.arange(len(loads)) * step
    ax.stackplot(steps, loads.T, colors=COLORS_OF_EXPERTS)
    ax.set(xlabel="training step", ylim=(0, 1), xlim=(0, int(steps[-1])))


def show_loads(runs: Mapping[str, Run]) -> None:
    """The loads of live runs side by side; each colour is an expert."""
    _, axes = plt.subplots(1, len(runs), figsize=(6.4, 2.5), layout="constrained", squeeze=False)
    for ax, (name, run) in zip(axes[0], runs.items(), strict=True):
        smooth = run.loads.unflatten(0, (-1, EVERY)).mean(1)
        draw_loads(ax, smooth, EVERY)
        ax.set_title(f"{name}: error {run.error:.2f}", fontsize=10)
    axes[0, 0].set_ylabel("share of the tokens")
    plt.show()


def show_rate(rate: float) -> None:
    """A recorded training with this bias rate: its loads, and its error among the others."""
    runs = records_by_rate()
    rate = min(runs, key=lambda other: abs(other - rate))
    _, (left, right) = plt.subplots(
        1, 2, figsize=(7, 2.8), layout="constrained", width_ratios=(1.6, 1)
    )
    draw_loads(left, runs[rate].loads, EVERY)
    left.set_ylabel("share of the tokens")
    left.set_title(f"bias rate {rate:g}: {experts_in_use(runs[rate].loads[-1]):.1f} of 8 in use")
    names = [f"{other:g}" for other in runs]
    colors = ["tab:orange" if other == rate else "tab:gray" for other in runs]
    right.barh(names, [run.error for run in runs.values()], color=colors)
    right.invert_yaxis()
    right.set(xlabel="error on held-out tokens", ylabel="bias rate")
    plt.show()


def show_starts() -> None:
    """Every recorded start: experts in use by step, and the errors at the end."""
    _, (left, right) = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    palette = ("tab:red", "tab:blue", "tab:orange", "black", "gray")
    colors = dict(zip([*BALANCING, *PLAIN], palette, strict=True))
    for name in BALANCING:
        for start, record in enumerate(records(name)):
            steps = torch.arange(len(record.loads)) * EVERY
            label = None if start else name
            left.plot(steps, experts_in_use(record.loads), color=colors[name], lw=1, label=label)
    left.set(xlabel="training step", ylabel="experts in use, of 8", ylim=(0, 8.5))
    left.legend(fontsize=8, loc="center right")
    for place, (name, color) in enumerate(colors.items()):
        errors = [record.error for record in records(name)]
        right.plot(errors, [place] * len(errors), "o", color=color, alpha=0.7)
    right.set_yticks(range(len(colors)), colors)
    right.invert_yaxis()
    right.set(xlabel="error on held-out tokens", xlim=(0, None))
    plt.show()


# --------------------------------------------------------------------- the storyteller's own MLP


@torch.no_grad()
def keep_neurons(count: int, *, for_each_token: bool) -> tuple[float, int]:
    """The error if only the `count` neurons that write most are kept, and how many are ever used.

    They are chosen for each token, or else the same for all tokens.
    """
    task = storyteller_task()
    mlp: Any = load_storyteller()[0].layers[LAYER].mlp
    x = task.x[task.cut :]
    strength = gated_activation("silu", mlp.gate_proj(x), mlp.up_proj(x))  # (N, F)
    written = strength.square() * mlp.down_proj.weight.square().sum(0)
    ranked = written if for_each_token else written.mean(0, keepdim=True).expand_as(written)
    kept = torch.zeros_like(strength).scatter(1, ranked.topk(count).indices, 1.0)
    y = mlp.down_proj(strength * kept) / task.scale
    used = int(kept.amax(0).sum())
    return F.mse_loss(y, task.y[task.cut :]).item(), used


class Spliced(nn.Module):
    """A trained layer, made to fit into the place of the storyteller's MLP."""

    def __init__(self, layer: nn.Module, scale: float):
        super().__init__()
        self.layer = layer
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.scale * (y[0] if isinstance(y, tuple) else y)


def storyteller_with(layer: nn.Module | None) -> Any:
    """The storyteller with `layer` in place of its third MLP, or as it is."""
    model = load_storyteller()[0]
    if layer is None:
        return model
    model = copy.deepcopy(model)
    block: Any = model.layers[LAYER]
    block.mlp = Spliced(layer, storyteller_task().scale)
    return model


@torch.no_grad()
def story_loss(layer: nn.Module | None) -> float:
    """The storyteller's loss on held-out stories, in nats a token, with this layer in its place."""
    task = storyteller_task()
    ids = task.ids[task.cut // LENGTH * LENGTH :].view(-1, LENGTH)
    logits = storyteller_with(layer)(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def tell(layer: nn.Module | None, prompt: str, tokens: int = 60) -> str:
    """What the storyteller writes with this layer in its place, always the most likely token."""
    _, tokenizer = load_storyteller()
    ids = torch.tensor([tokenizer.encode(prompt)])
    written = generate(storyteller_with(layer), ids, max_new_tokens=tokens)
    return tokenizer.decode(written[0].tolist())


# ------------------------------------------------------------------------ which expert reads what

KINDS: dict[str, frozenset[str]] = {
    "name": frozenset(GIRLS + BOYS),
    "place": frozenset(PLACES),
    "thing": frozenset(THINGS),
    "colour": frozenset(COLOURS),
    "number": frozenset(SLOTS["number"]),
    "adjective": frozenset(word.split()[1] for word in (*SIZES, *SLOTS["look"])),
    "animal": frozenset(SLOTS["animal"] + SLOTS["animals"]),
    "a, an, the": frozenset("a an the A An The some".split()),
    "he, she, it": frozenset("he she it they He She It They him her I you".split()),
    "to, in, of": frozenset("to in of at on with under from about for by behind as".split()),
    "and, but, that": frozenset("and but that so who when where And But So When".split()),
    ". and line end": frozenset([".", "!", "?", "\n"]),
    ", and quotes": frozenset([",", '"', ',"', '!"', '?"', '."']),
    "past tense": frozenset(
        "was had went knew asked gave ate called lived sang came smelled ran wanted saw picked "
        "whispered cried flew mumbled longed found dreamed answered laughed took looked made grew "
        "met fed promised said drew pretended bought blew missed waved heard hurried".split()
    ),
}


def kind_of(token: str) -> str | None:
    """The kind of word that a token is, or None for pieces of words and the rest."""
    word = token.strip(" ")
    return next((kind for kind, words in KINDS.items() if word in words), None)


@torch.no_grad()
def readers(layer: MoE) -> Tensor:
    """The first expert of each held-out token of the task: (N,)."""
    task = storyteller_task()
    return layer.gate(task.x[task.cut :]).expert_index[:, 0]


def division(layer: MoE) -> Tensor:
    """Which share of each kind of word goes to each expert: (kinds, E)."""
    task = storyteller_task()
    _, tokenizer = load_storyteller()
    names = list(KINDS)
    table = torch.zeros(len(names), len(layer.gate.weight))
    for token, expert in zip(task.ids[task.cut :].tolist(), readers(layer).tolist(), strict=True):
        kind = kind_of(tokenizer.decode([token]))
        if kind is not None:
            table[names.index(kind), expert] += 1
    return table / table.sum(1, keepdim=True).clamp(min=1)


def show_division(layers: Mapping[str, MoE]) -> None:
    """Kind of word against expert, for several layers."""
    _, axes = plt.subplots(1, len(layers), figsize=(7, 3.4), layout="constrained", sharey=True)
    for ax, (name, layer) in zip(axes, layers.items(), strict=True):
        ax.imshow(division(layer), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        ax.set(xlabel="expert", xticks=range(len(layer.gate.weight)))
        ax.set_title(name, fontsize=10)
    axes[0].set_yticks(range(len(KINDS)), KINDS)
    plt.show()


def show_reading(layer: MoE, tokens: int = 110) -> None:
    """Held-out text in which each token has the colour of its expert."""
    task = storyteller_task()
    _, tokenizer = load_storyteller()
    start = task.cut + 1 + int((task.ids[task.cut :] == tokenizer.encode("\n")[0]).nonzero()[0])
    spans = []
    for token, expert in zip(
        task.ids[start : start + tokens].tolist(),
        readers(layer)[start - task.cut :].tolist(),
        strict=False,
    ):
        text = html.escape(tokenizer.decode([token])).replace("\n", "<br>")
        color = COLORS_OF_EXPERTS[expert]
        style = f"background-color: {color}55; border-bottom: 2px solid {color}"
        spans.append(f'<span style="{style}" title="expert {expert}">{text}</span>')
    display(HTML(f'<p style="line-height: 1.9">{"".join(spans)}</p>'))


def rows_by_expert(sentence: str, num_experts: int, seed: int) -> list[list[str]]:
    """A sentence's tokens, sorted by the expert that a fresh router picks in the storyteller."""
    model, tokenizer = load_storyteller()
    seen: list[Tensor] = []
    mlp: Any = model.layers[LAYER].mlp
    handle = mlp.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0][0]))
    ids = tokenizer.encode(sentence)
    with torch.no_grad():
        model(torch.tensor([ids]))
    handle.remove()
    torch.manual_seed(seed)
    router = Router(seen[0].shape[-1], num_experts, top_k=1)
    chosen = router(seen[0]).expert_index[:, 0].tolist()  # (T,)
    tokens = [tokenizer.decode([token]) for token in ids]
    return [
        [token for token, expert in zip(tokens, chosen, strict=True) if expert == e]
        for e in range(num_experts)
    ]


# --------------------------------------------------------------------------------------- oracle


def check_same(
    one: Callable[[], Tensor], other: Callable[[], Tensor], tensors: Sequence[Tensor]
) -> None:
    """AssertionError unless both have the same output, and the same gradients of all `tensors`."""
    assert_close(one(), other(), atol=1e-5, rtol=1e-4)
    probe = torch.randn_like(one())  # any direction for the gradient
    gradients = [torch.autograd.grad((f() * probe).sum(), tensors) for f in (one, other)]
    assert_close(*gradients, atol=1e-5, rtol=1e-4)


def mixtral_block(C: int, inner: int, num_experts: int, top_k: int) -> tuple[Any, MoE]:
    """Hugging Face's Mixtral layer with random weights, and ours with the same ones."""
    from transformers import MixtralConfig, logging
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    logging.set_verbosity_error()  # it warns about a layer without its model
    sizes: dict[str, Any] = {
        "hidden_size": C,
        "intermediate_size": inner,
        "num_attention_heads": 1,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
    }
    theirs = MixtralSparseMoeBlock(MixtralConfig(**sizes))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    state = theirs.state_dict()
    gate_proj, up_proj = state["experts.gate_up_proj"].chunk(2, dim=1)
    ours = MoE(C, inner, num_experts=num_experts, top_k=top_k)
    ours.gate.weight.data = state["gate.weight"]
    ours.experts.load_state_dict(
        {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": state["experts.down_proj"]}
    )
    return theirs, ours


def as_mlps(experts: Experts) -> list[Callable[[Tensor], Tensor]]:
    """Each expert of a stack as an `MLP` that computes with the stack's parameters."""
    E, C, inner = experts.down_proj.shape
    activation: Any = experts.activation
    mlp = MLP(C, inner, use_glu=experts.gate_proj is not None, activation=activation)

    def expert(e: int) -> Callable[[Tensor], Tensor]:
        matrices = {f"{name}.weight": stack[e] for name, stack in experts.named_parameters()}
        return lambda x: torch.func.functional_call(mlp, matrices, x)

    return [expert(e) for e in range(E)]


def published_mixtures() -> dict[str, tuple[int, int]]:
    """Parameters in all, and those that one token uses, of two published models."""

    def count(
        V: int, C: int, inner: int, layers: int, E: int, k: int, q: int, kv: int, qk_norm: int = 0
    ) -> tuple[int, int]:
        attention = 2 * C * q + 2 * C * kv + qk_norm
        # router and norms in each layer; embedding, output and last norm
        others = layers * (attention + E * C + 2 * C) + 2 * V * C + C
        expert = layers * 3 * C * inner
        return others + E * expert, others + k * expert

    return {
        "Mixtral 8x7B": count(32000, 4096, 14336, 32, 8, 2, 4096, 1024),
        "Qwen3 30B-A3B": count(151936, 2048, 768, 48, 128, 8, 4096, 512, 256),
    }


# ----------------------------------------------------------------------------------------- time


def seconds(work: Callable[[], Any], repeats: int = 4) -> float:
    """Processor time of the fastest of some calls."""
    best = math.inf
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def split_time(num_experts: int, tokens: int, C: int = 128, inner: int = 128) -> dict[str, float]:
    """Where a training step of a mixture goes, in multiples of a dense layer of equal work."""
    torch.manual_seed(0)
    moe = MoE(C, inner, num_experts=num_experts, top_k=2)
    dense = MLP(C, 2 * inner)
    x = torch.randn(tokens, C)
    routing = moe.gate(x)
    order = routing.expert_index.flatten().argsort(stable=True)
    counts = torch.bincount(routing.expert_index.flatten(), minlength=num_experts)
    rows = x[order // 2]

    def step(layer: nn.Module) -> None:
        layer.zero_grad()
        y = layer(x)
        (y[0].sum() + y[1].aux_loss if isinstance(y, tuple) else y.sum()).backward()

    whole = seconds(lambda: step(dense))
    parts = {
        "router": seconds(lambda: moe.gate(x)),
        "products": seconds(lambda: moe.experts(rows, counts)),
    }
    forward = seconds(lambda: moe(x))
    parts["sort and back"] = max(forward - sum(parts.values()), 0.0)
    parts["gradients"] = seconds(lambda: step(moe)) - forward
    return {name: part / whole for name, part in parts.items()}


def show_split(splits: Mapping[str, Mapping[str, float]]) -> None:
    """The parts of a training step, one bar for each size; a dense layer is 1."""
    plt.figure(figsize=(6.4, 0.6 + 0.5 * len(splits)))
    left = torch.zeros(len(splits))
    for part in next(iter(splits.values())):
        width = torch.tensor([split[part] for split in splits.values()])
        plt.barh(list(splits), width, left=left, label=part)
        left = left + width
    plt.axvline(1, color="gray", linestyle="--")
    plt.gca().invert_yaxis()
    plt.xlabel("time of a training step; a dense layer of equal work is 1")
    plt.legend(fontsize=8)
    plt.show()


def recorded_counts(steps: int, rows: int, seed: int) -> list[list[int]]:
    """Block sizes for `rows` choices, drawn with the loads of a recorded run, step by step."""
    generator = torch.Generator().manual_seed(seed)
    loads = records("loss")[0].loads[-steps:]
    return [
        torch.bincount(
            load.multinomial(rows, True, generator=generator), minlength=len(load)
        ).tolist()
        for load in loads
    ]


def product_time(all_sizes: Sequence[Sequence[int]], rule: Callable[[Tensor, int], int]) -> float:
    """Milliseconds that one step's products take in bfloat16: the median over the steps."""
    x = torch.randn(2 * sum(all_sizes[0]), 64).bfloat16()  # with room for additional rows
    matrices = torch.randn(len(all_sizes[0]), 64, 64).bfloat16()
    y = torch.empty_like(x)
    times = []
    for sizes in all_sizes:
        began = time.perf_counter()
        start = 0
        for size, matrix in zip(sizes, matrices, strict=True):
            rows = slice(start, start + rule(x, size))
            torch.mm(x[rows], matrix, out=y[rows])
            start += size
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def show_product_times(times: Mapping[str, Sequence[float]]) -> None:
    """Milliseconds for sizes that were never multiplied before, and for known ones."""
    _, axis = plt.subplots(figsize=(6.4, 2.2), layout="constrained")
    for row, (new, known) in enumerate(times.values()):
        axis.barh(row - 0.18, new, 0.36, color="#d98032", label="new sizes" if row == 0 else None)
        axis.barh(row + 0.18, known, 0.36, color="#4a86c8", label="known" if row == 0 else None)
    axis.set_yticks(range(len(times)), list(times))
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds for the products of one step", ylabel="sizes are rounded")
    axis.legend(fontsize=8)
    plt.show()


if __name__ == "__main__":
    record_all()

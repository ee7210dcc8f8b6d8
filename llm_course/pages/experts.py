"""What the pages of the mixture of experts draw and measure.

The task is taken from a trained model: the storyteller's third MLP, 704 neurons wide. A layer sees
what that MLP sees while the model reads stories, and learns to put out what it puts out.
`python -m llm_course.pages.experts` trains all the runs that the pages plot, and stores their
loads and errors in `experts_runs.json`.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import HTML, display
from torch import Tensor, nn

from llm_course.files import write_text
from llm_course.model.generation import generate
from llm_course.model.mlp import MLP
from llm_course.model.moe import Experts, MoE, mix_experts
from llm_course.pages.storyteller import load_storyteller
from llm_course.text.stories import story_documents
from llm_course.text.wording import BOYS, COLOURS, GIRLS, PLACES, SIZES, SLOTS, THINGS

RECORDED = Path(__file__).with_name("experts_runs.json")
LAYER = 2  # of the storyteller's five
NEURONS = 704  # of that layer's MLP
LENGTH = 256  # tokens that the storyteller reads at a time
STEPS = 400
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
    batch: int = 256,
) -> Run:
    """Teach a fresh layer the task; after each step, move the router's bias by `bias_rate`."""
    task = storyteller_task()
    torch.manual_seed(seed)
    layer = make_layer()
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.003, fused=True)
    loads = []
    losses = []
    for places in torch.randint(task.cut, (steps, batch), generator=order):
        y = layer(task.x[places])
        y, stats = y if isinstance(y, tuple) else (y, None)
        loss = F.mse_loss(y, task.y[places])
        optimizer.zero_grad()
        (loss if stats is None else loss + stats.aux_loss).backward()
        optimizer.step()
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
STARTS = 6
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
PLAIN = {"equal work": NEURONS // 8, "equal size": NEURONS}  # dense layers: their neurons


def planned_runs() -> list[tuple[str, int, float]]:
    """Name, seed and bias rate of every run that the pages plot."""
    names = [*BALANCING, "equal work"]
    rates = {name: settings.get("bias_rate", 0.0) for name, settings in BALANCING.items()}
    plan = [(name, seed, rates.get(name, 0.0)) for seed in range(STARTS) for name in names]
    plan += [("equal size", seed, 0.0) for seed in range(2)]
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


if __name__ == "__main__":
    record_all()

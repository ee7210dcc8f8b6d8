"""How cost grows: a training step and a decoded token against each size, with the theory beside the
measurement.

The theory counts: operations for time (`flops_per_token`), bytes for memory (`training_memory`).
Time is held against it with one constant, the speed of the middle point, so a line above the theory
means that this size is paid more dearly than it counts.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from benchmarks.measure import Row, plot_path, title
from benchmarks.models import batch_of, loss_on, ours
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import flops_per_token, training_memory
from llm_course.model.generation import generate_tokens

Curve = tuple[list, list]  # what was found, and what the theory says
BASE = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=704,
    max_position_embeddings=2048,
)
B = 8
T = 128
SIZES = {
    "length T": [32, 128, 512, 2048],
    "batch B": [2, 4, 8, 16, 32],
    "layers": [1, 2, 4, 8, 16],
    "width C": [64, 128, 256, 512, 1024],
    "experts E": [2, 4, 8, 16, 32],
    "vocabulary V": [512, 2048, 8192, 32768],
}


def setting(kind: str, size: int) -> tuple[ModelConfig, int, int]:
    """The configuration, batch and length that differ from the base in one size."""
    changes = {
        "layers": dict(num_layers=size),
        "width C": dict(hidden_size=size, intermediate_size=11 * size // 4),
        "experts E": dict(use_moe=True, num_experts=size, top_k=2),
        "vocabulary V": dict(vocab_size=size),
    }
    return (
        replace(BASE, **changes.get(kind, {})),
        size if kind == "batch B" else B,
        size if kind == "length T" else T,
    )


def kept_bytes(model: DecoderModel, ids: Tensor, labels: Tensor) -> int:
    """What autograd keeps of a forward pass, without the parameters."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(ids, labels=labels)
        # it holds the graph, so nothing is freed before we have counted
        assert out.loss_sum is not None
    return sum(kept.values())


def step(config: ModelConfig, batch: int, length: int, *, runs: int) -> tuple[float, int]:
    """Median seconds of forward and backward, and the bytes kept between them."""
    model = ours(config)
    ids, labels = batch_of(config.vocab_size or 0, batch, length)
    loss_of = loss_on(ids, labels)
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        loss_of(model).backward()
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    return statistics.median(seconds[1:]), kept_bytes(model, ids, labels)


def without_cache(model: DecoderModel, prompt: Tensor, tokens: int) -> None:
    with torch.no_grad():
        for _ in range(tokens):
            prompt = torch.cat((prompt, model(prompt, logits_to_keep=1).logits.argmax(-1)), dim=1)


def decoding(*, full: bool) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """For both ways of decoding: lengths, seconds of one more token, and its operations."""
    model = ours(BASE).eval()
    lengths = [64, 256, 1024, 1984]
    found = {}
    for name in ("with the cache", "without it"):
        seconds = []
        counted = []
        for S in lengths:
            prompt = torch.randint(4096, (1, S))
            n = 16 if name == "with the cache" else 2
            taken = []
            for _ in range(5 if full else 3):
                if name == "with the cache":
                    tokens = generate_tokens(model, prompt, max_new_tokens=n + 1)
                    next(tokens)  # the prompt
                    start = time.perf_counter()
                    for _ in tokens:
                        pass
                else:
                    start = time.perf_counter()
                    without_cache(model, prompt, n)
                taken.append((time.perf_counter() - start) / n)
            seconds.append(statistics.median(taken))
            flops = flops_per_token(BASE, S)
            counted.append(flops.forward * (1 if name == "with the cache" else S))
        found[name] = lengths, seconds, counted
    return found


def draw(panel: Axes, kind: str, sizes: list[int], time: Curve, memory: Curve) -> None:
    """A panel of seconds (left) and kept bytes (right), each with what was counted beforehand."""
    right = panel.twinx()
    for ax, (found, theory), color, unit in (
        (panel, time, "tab:blue", 1e3),
        (right, memory, "tab:green", 1e-6),
    ):
        ax.loglog(sizes, [unit * value for value in found], "o", color=color)
        ax.loglog(sizes, [unit * value for value in theory], "--", color=color)
        ax.set_ylabel("ms" if ax is panel else "MB kept for backward", color=color)
        low, high = ax.get_ylim()
        # what hardly changes shall look like it
        ax.set_ylim(min(low, high / 4), max(high, 4 * low))
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    panel.set(title=f"a step against {kind}", xlabel=kind)
    panel.set_xticks(sizes, [str(size) for size in sizes])


def rows(*, full: bool) -> Iterator[Row]:
    fig = Figure(figsize=(17, 7), layout="constrained")
    panels = iter(fig.subplots(2, 4).flat)
    for kind, sizes in SIZES.items():
        seconds = []
        counted = []
        kept = []
        promised = []
        for size in sizes:
            config, batch, length = setting(kind, size)
            spent, held = step(config, batch, length, runs=5 if full else 3)
            seconds.append(spent)
            kept.append(held)
            counted.append(flops_per_token(config, length).training * batch * length)
            memory = training_memory(config, batch, length)
            promised.append(
                memory.activations
                + 4 * (batch * length + (config.vocab_size or 0)) * config.hidden_size
            )
        middle = len(sizes) // 2
        theory = [flops / counted[middle] * seconds[middle] for flops in counted]
        draw(next(panels), kind, sizes, (seconds, theory), (kept, promised))
        for i in (0, -1):
            what = f"growth of a step with {kind}, {sizes[middle]} to {sizes[i]}"
            yield Row(what, "its operations", 1e3 * seconds[i], 1e3 * theory[i])
            yield Row(
                f"kept for backward, {kind} {sizes[i]}",
                "counted beforehand",
                kept[i] / 1e6,
                promised[i] / 1e6,
                "MB",
            )
    panel = next(panels)
    for (name, (lengths, seconds, counted)), color in zip(
        decoding(full=full).items(), ("tab:blue", "tab:orange"), strict=True
    ):
        panel.loglog(lengths, [1e3 * s for s in seconds], "o", color=color, label=name)
        theory = [1e3 * c / counted[-1] * seconds[-1] for c in counted]
        panel.loglog(lengths, theory, "--", color=color, label="its operations")
        yield Row(
            f"a new token after {lengths[-1]} ({name})",
            f"after {lengths[0]}",
            1e3 * seconds[-1],
            1e3 * seconds[0],
        )
    panel.set(title="a new token against the text's length", xlabel="tokens before it", ylabel="ms")
    panel.legend(fontsize=7)
    rest = next(panels)
    rest.axis("off")
    rest.text(
        0,
        0.5,
        "dots: measured\ndashed: counted beforehand\n(time: operations, at the\nspeed of the middle"
        " point)",
        fontsize=11,
    )
    fig.savefig(plot_path("growth", title()), dpi=70)

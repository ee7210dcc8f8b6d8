"""What the pages of linear layers measure and draw, and the words that the storyteller expects."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm_course.model.generation import generate
from llm_course.model.kernels import linear as kernels
from llm_course.pages.storyteller import load_storyteller

Product = Callable[[Tensor, Tensor], Tensor]  # x (n, C) and W (F, C) to (n, F)
WIDTH = 1024  # C = F of the products that are measured


# ---------------------------------------------------------------------------------- the storyteller


@torch.no_grad()
def last_vector(text: str) -> Tensor:
    """What the storyteller's last linear layer reads at the end of the text: (C,)."""
    model, tokenizer = load_storyteller()
    seen: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda _, __, output: seen.append(output[0, -1]))
    model(torch.tensor([tokenizer.encode(text)]))
    hook.remove()
    return seen[0]


def write(text: str, tokens: int, *, in_parts: bool = False) -> tuple[str, list[int]]:
    """What the storyteller writes after a text, and how many rows each of its products had.

    `in_parts` says whether few rows go in parts, whatever processor this is.
    """
    model, tokenizer = load_storyteller()
    rows: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, inputs: rows.append(inputs[0].numel() // inputs[0].shape[-1])
        )
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad(), patch.object(kernels, "parts_pay", lambda: in_parts):
        written = generate(model, ids, max_new_tokens=tokens)
    for hook in hooks:
        hook.remove()
    return tokenizer.decode(written[0].tolist()), rows


# ------------------------------------------------------------------------------------- measurements


class _NewBytes(TorchDispatchMode):
    """Adds up the bytes of every tensor that is made, views left out."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if torch.is_tensor(t)}
        for tensor in tree_leaves(made):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.total += tensor.nbytes
        return made


def new_bytes(product: Product, x: Tensor, weight: Tensor) -> int:
    """How many bytes of new tensors a product writes on its way; a view writes none."""
    with _NewBytes() as count:
        product(x, weight)
    return count.total


@dataclass(frozen=True)
class Machine:
    """What a machine can do in a second, and the width of the numbers that it does it with."""

    operations_per_second: float
    bytes_per_second: float
    bytes_per_number: int

    @property
    def ridge(self) -> float:
        """Operations a byte from which on arithmetic is the limit."""
        return self.operations_per_second / self.bytes_per_second


# NVIDIA's data sheets: bfloat16 without sparsity, and the memory of the SXM form (A100: 80 GB)
DATA_SHEETS = {
    "A100": Machine(312e12, 2.039e12, 2),
    "H100": Machine(989e12, 3.35e12, 2),
}


def best_seconds(action: Callable[[], object], runs: int = 9) -> float:
    """The seconds of the fastest of several runs, after one to warm up."""
    action()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_machine() -> Machine:
    """The speed of a large product in float32, and of reading 256 MiB."""
    a = torch.randn(2048, WIDTH)
    b = torch.randn(WIDTH, WIDTH)
    operations = 2 * 2048 * WIDTH * WIDTH
    much = torch.ones(2**26)
    return Machine(
        operations / best_seconds(lambda: a @ b.T), much.nbytes / best_seconds(much.sum), 4
    )


def product_seconds(product: Product, rows: Sequence[int]) -> list[float]:
    """The seconds of one product with (WIDTH, WIDTH) weights, for each number of rows.

    Each call takes the next of 64 matrices, 256 MiB in all, so that the weights come from memory
    and not from a cache. For many rows, where arithmetic is the limit, fewer matrices do.
    """
    torch.manual_seed(0)
    weights = torch.randn(64, WIDTH, WIDTH)
    seconds = []
    for n in rows:
        x = torch.randn(n, WIDTH)
        some = weights[: 64 if n < 32 else 16 if n < 128 else 4]

        def multiply(x: Tensor = x, some: Tensor = some) -> None:
            for weight in some:
                product(x, weight)

        seconds.append(best_seconds(multiply, runs=3) / len(some))
    return seconds


def bytes_read_per_second(sizes: Sequence[int]) -> list[float]:
    """How fast a piece of each size, in bytes, is read when it's read again and again."""
    speeds = []
    for size in sizes:
        piece = torch.ones(size // 4)
        times = max(1, 2**26 // size)

        def read(piece: Tensor = piece, times: int = times) -> None:
            for _ in range(times):
                piece.sum()

        speeds.append(times * size / best_seconds(read))
    return speeds


# ----------------------------------------------------------------------------------------- pictures


def intensity(n: int, bytes_per_number: int = 4) -> float:
    """Operations a byte of a product of n rows with (WIDTH, WIDTH) weights."""
    return 2 * n * WIDTH**2 / (bytes_per_number * (WIDTH**2 + 2 * n * WIDTH))


def _draw_roof(machine: Machine) -> None:
    x = torch.logspace(-1, 3.5, 200)
    roof = (x * machine.bytes_per_second).clamp(max=machine.operations_per_second)
    plt.loglog(x, roof / 1e9, color="tab:gray", label="the roof")
    plt.xlabel("operations a byte")
    plt.ylabel("billion operations a second")


def draw_roofline(machine: Machine, rows: Sequence[int], runs: Mapping[str, list[float]]) -> None:
    """The roof of a machine, and measured products of some numbers of rows below it."""
    plt.figure(figsize=(6.4, 3))
    _draw_roof(machine)
    for (name, seconds), marker in zip(runs.items(), "os", strict=False):
        rate = [2 * n * WIDTH**2 / s / 1e9 for n, s in zip(rows, seconds, strict=True)]
        plt.loglog([intensity(n) for n in rows], rate, marker, label=name)
    plt.legend(fontsize=8)
    plt.title(f"Products of {rows[0]} to {rows[-1]} rows on this machine")
    plt.show()


def draw_limits(machine: Machine, rows: int) -> None:
    """A product of so many rows on a machine's roof, and how long memory and arithmetic take."""
    width = machine.bytes_per_number
    operations = 2 * rows * WIDTH**2
    arithmetic = operations / machine.operations_per_second
    reading = width * (WIDTH**2 + 2 * rows * WIDTH) / machine.bytes_per_second
    slower = "memory" if reading > arithmetic else "arithmetic"
    plt.figure(figsize=(6.4, 2.8), layout="constrained")
    plt.subplot(1, 2, 1)
    _draw_roof(machine)
    rate = operations / max(arithmetic, reading)
    plt.loglog(intensity(rows, width), rate / 1e9, "o", color="tab:orange", markersize=9)
    plt.subplot(1, 2, 2)
    plt.bar(["memory", "arithmetic"], [1e6 * reading, 1e6 * arithmetic], color="tab:orange")
    plt.ylabel("least time (microseconds)")
    plt.suptitle(f"{rows} rows: the product waits for {slower}", fontsize=11)
    plt.show()


def draw_cache(sizes: Sequence[int], speeds: Sequence[float], machine: Machine) -> None:
    """How fast pieces of each size are read again and again, beside the memory's speed."""
    plt.figure(figsize=(6.4, 2.8))
    plt.semilogx(sizes, [speed / 1e9 for speed in speeds], "o-", base=2)
    roof = machine.bytes_per_second / 1e9
    plt.axhline(roof, color="tab:gray", linestyle="--", label="memory, as we measured it")
    plt.xlabel("bytes that are read again and again")
    plt.ylabel("GB a second")
    plt.title("A piece that fits a cache says nothing about the memory")
    plt.legend(fontsize=8)
    plt.show()

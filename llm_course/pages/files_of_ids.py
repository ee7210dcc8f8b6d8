"""What the page on token files measures and draws: bytes for each id, memory, a misread file."""

import math
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np


def bytes_in_a_list(ids: list[int]) -> int:
    """What a list of ids takes in memory: its addresses, and each object once."""
    objects = {id(i): i for i in ids}.values()
    return sys.getsizeof(ids) + sum(map(sys.getsizeof, objects))


def plot_bytes(bytes_each: Mapping[str, float]) -> None:
    """The bytes that each way of keeping ids takes for one of them."""
    plt.figure(figsize=(6, 1.9))
    bars = plt.barh(list(bytes_each), list(bytes_each.values()))
    plt.bar_label(bars, fmt="%.0f", padding=3)
    plt.gca().invert_yaxis()
    plt.xlim(0, 1.12 * max(bytes_each.values()))
    plt.xlabel("bytes for each id")
    times = max(bytes_each.values()) / min(bytes_each.values())
    plt.title(f"A list takes {times:.0f} times what these ids need", fontsize=10)
    plt.show()


def peak_memory(function: Callable[[], Any]) -> int:
    """The most bytes that Python asks for while the function runs."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def bigram_loss(row: Sequence[int] | np.ndarray, vocab_size: int) -> float:
    """The loss on the last tenth of a table that counted which token follows which, plus one."""
    ids = np.asarray(row, dtype=np.int64)
    cut = len(ids) * 9 // 10
    counts = np.ones((vocab_size, vocab_size))
    np.add.at(counts, (ids[: cut - 1], ids[1:cut]), 1)
    probability = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(probability[ids[cut:-1], ids[cut + 1 :]]).mean())


def plot_losses(losses: Mapping[str, float]) -> None:
    """The losses of a table of counts, in nats per token."""
    plt.figure(figsize=(6, 1.6))
    bars = plt.barh(list(losses), list(losses.values()), color=["tab:blue", "tab:orange"])
    plt.bar_label(bars, fmt="%.1f", padding=3)
    plt.gca().invert_yaxis()
    plt.xlim(0, math.ceil(max(losses.values()) + 0.2))
    plt.xlabel("loss (nats per token)")
    plt.title("The misread file has the better loss", fontsize=10)
    plt.show()

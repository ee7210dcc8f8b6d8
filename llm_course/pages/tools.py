"""What the pages of the tools draw and try out: checks, files and the hardware."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------ checks


def attempt(function: Callable[[Any], Any], *values: Any) -> None:
    """Print what each value gives: the error, or that it was accepted."""
    for value in values:
        try:
            function(value)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            print(f"{value!r} is accepted")


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The reason for which a check or a constructor refuses; AssertionError if it doesn't."""
    try:
        call(*arguments, **options)
    except (AssertionError, ValueError) as error:
        return str(error)
    raise AssertionError(f"not refused: {arguments or options}")


def fit(x: Tensor, y: Tensor) -> nn.Linear:
    """The line that 200 steps of gradient descent on the mean squared error find."""
    torch.manual_seed(0)
    line = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(line.parameters(), lr=0.3)
    for _ in range(200):
        optimizer.zero_grad()
        (line(x) - y).square().mean().backward()
        optimizer.step()
    return line


def draw_fits(x: Tensor, y: Tensor, lines: Mapping[str, nn.Module]) -> None:
    """Points, and the line that each model has learned; x and y are (N, 1) and (N,)."""
    _, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    ax.plot(x[:, 0], y, "o", color="tab:gray", markersize=4)
    for (name, line), style in zip(lines.items(), ("-", "--"), strict=True):
        ax.plot(x[:, 0], line(x)[:, 0].detach(), style, label=name)
    ax.set(xlabel="x", ylabel="y")
    ax.set_title("The same data, layer and optimizer; only the shape of the targets differs")
    ax.title.set_fontsize(10)
    ax.legend(fontsize=8)
    plt.show()


def graphs_in(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How many graphs `torch.compile` makes of one call of `function`."""
    graphs = []

    def keep(graph, inputs):  # type: ignore[no-untyped-def]  # a backend that runs what it gets
        graphs.append(graph)
        return graph.forward

    torch.compile(function, backend=keep)(x)
    return len(graphs)


# ------------------------------------------------------------------------------------------- files


def killed(code: str, folder: Path) -> None:
    """Run `code` in a process of its own, in `folder`, where `die()` kills it without a warning."""
    number = int(getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has only the second
    die = f"import os\ndef die():\n    os.kill(os.getpid(), {number})\n"
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    run = [sys.executable, "-c", die + code]
    done = subprocess.run(run, cwd=folder, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode not in (0, 1), "the code ended or failed by itself"


STATES = {"old": "#7fa8d9", "nothing": "#d9d9d9", "half": "#e8a868", "new": "#7fbf8b"}
OLD = "Once upon a time there was a boy called Emil.\n"
NEW = "Once upon a time there was a girl called Olive, and she had a red kite.\n"


def watch(writer: Callable[[Path], Iterator[None]], path: Path) -> list[str]:
    """What a reader finds in `path` after each step of `writer`: a key of `STATES`."""
    path.write_text(OLD, encoding="utf-8")
    names = {OLD: "old", "": "nothing", NEW: "new"}
    return [names.get(path.read_text(encoding="utf-8"), "half") for _ in writer(path)]


def show_moments(moments: Mapping[str, Sequence[str]]) -> None:
    """What a reader finds after each step of each way of writing."""
    _, ax = plt.subplots(figsize=(6.8, 0.9 + 0.5 * len(moments)), layout="constrained")
    names = list(STATES)
    table = [[names.index(state) for state in row] for row in moments.values()]
    ax.imshow(table, cmap=ListedColormap(list(STATES.values())), vmin=0, vmax=3, aspect="auto")
    for row, states in enumerate(table):
        for column, state in enumerate(states):
            ax.text(column, row, names[state], ha="center", va="center", fontsize=9, color="black")
    ax.set_xticks(range(len(table[0])), [f"after step {n + 1}" for n in range(len(table[0]))])
    ax.set_yticks(range(len(moments)), list(moments))
    ax.tick_params(labelsize=9)
    ax.set_title("What a reader finds under the name", fontsize=10)
    plt.show()


def after_power_cut(safe: Sequence[str], pending: Sequence[str]) -> dict[tuple[str, ...], str]:
    """What `path` holds after a power cut, for each set of `pending` steps that reached the disk.

    Steps are "data", the bytes of the new file, and "rename". Those in `safe` are on the disk.
    """
    sets = [reached for n in range(len(pending) + 1) for reached in combinations(pending, n)]
    found = {}
    for reached in sets:
        disk = {*safe, *reached}
        found[reached] = "old" if "rename" not in disk else "new" if "data" in disk else "nothing"
    return found


# ---------------------------------------------------------------------------------------- hardware


def draw_speeds(sizes: Sequence[int], speeds: Mapping[str, Sequence[float]]) -> None:
    """The speed of each kind of work by size, as a share of the highest."""
    best = max(max(line) for line in speeds.values())
    _, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    for (name, line), style in zip(speeds.items(), ("o-", "s--"), strict=True):
        ax.plot(sizes, [speed / best for speed in line], style, label=name, markersize=4)
    ax.set(xscale="log", ylim=(0, 1.05), xlabel="n, for matrices of n x n", ylabel="share of best")
    ax.set_xticks(sizes, list(map(str, sizes)))
    ax.minorticks_off()
    ax.set_title("Operations in a second, by size", fontsize=10)
    ax.legend(fontsize=8)
    plt.show()


def write_tree(folder: Path, files: Mapping[str, str]) -> None:
    """Write small files, each with the folders that lead to it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def best_time(work: Callable[[], Any], tries: int = 5) -> float:
    """The shortest of several times that `work` took, in seconds."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def sum_flops(n: int) -> float:
    """Operations per second of the sum of two matrices of n x n."""
    a, b = torch.randn(2, n, n)
    out = torch.empty(n, n)
    return n * n / best_time(lambda: torch.add(a, b, out=out), tries=20)

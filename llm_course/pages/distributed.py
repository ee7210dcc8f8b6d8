"""What the pages of chapter 15 draw."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyArrowPatch
from torch import Tensor

BLUE = "tab:blue"
ORANGE = "tab:orange"
GRAY = "gray"
Step = dict[str, Any]  # its tokens, and the seconds of steps, alone and together


# ---------------------------------------------------------------------------------------- the ring


def show_ring(ring_step: Callable[[list[Tensor], int], Any], step: int, processes: int) -> None:
    """Processes by parts after `step` steps of a ring, and what travels in the next one."""
    tensors = [torch.ones(processes) for _ in range(processes)]
    last = 2 * (processes - 1)
    step = min(step, last)
    for index in range(step):
        ring_step(tensors, index)
    counts = torch.stack(tensors)
    figure, axis = plt.subplots(figsize=(5.6, 3))
    axis.imshow(counts, vmin=0, vmax=1.5 * processes, cmap="Blues")
    for rank in range(processes):
        for part in range(processes):
            color = "white" if counts[rank, part] == processes else "black"
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": color}
            axis.text(part, rank, f"{counts[rank, part]:.0f}", **style)
        if step < last:
            _show_message(axis, rank, (rank - step) % processes, processes)
    half = "reduce-scatter: the receiver adds" if step < processes - 1 else "all-gather: it copies"
    note = "every process has every sum" if step == last else half
    axis.set_title(f"after step {step} of {last}; {note}", fontsize=10)
    axis.set(xlabel="part of the tensor", ylabel="process")
    axis.set(xticks=range(processes), yticks=range(processes), xlim=(-0.8, processes - 0.2))
    figure.tight_layout()
    plt.show()


def _show_message(axis: Any, rank: int, part: int, processes: int) -> None:
    """An arrow from a process to its neighbour, for the part that it sends next."""
    to = (rank + 1) % processes
    bend = "arc3,rad=-0.35" if to else "arc3,rad=0.25"
    arrow = FancyArrowPatch(
        (part + 0.3, rank),
        (part + 0.3, to),
        connectionstyle=bend,
        arrowstyle="-|>",
        mutation_scale=11,
        color=ORANGE,
        lw=1.6,
    )
    axis.add_patch(arrow)


def show_bytes(sizes: Sequence[int], by_one: Sequence[float], by_ring: Sequence[float]) -> None:
    """Tensors sent by the busiest process, by way of rank 0 and by the ring."""
    plt.figure(figsize=(5, 2.4))
    plt.plot(sizes, by_one, "o-", color=ORANGE, label="through rank 0")
    plt.plot(sizes, by_ring, "s-", color=BLUE, label="ring")
    plt.xlabel("processes")
    plt.ylabel("tensors sent")
    plt.legend()
    plt.title("The busiest process of a ring never sends two tensors", fontsize=10)
    plt.tight_layout()
    plt.show()


# -------------------------------------------------------------------------------- data parallelism


def show_gradients(expected: Tensor, found: Mapping[str, Tensor]) -> None:
    """Each number of the gradients of two processes over that of one."""
    plt.figure(figsize=(4.6, 2.8))
    limit = expected.abs().max().item()
    plt.plot([-limit, limit], [-limit, limit], color=GRAY, lw=0.5)
    for (name, gradient), color in zip(found.items(), (ORANGE, BLUE), strict=True):
        plt.plot(expected, gradient, ".", ms=2, color=color, label=name)
    plt.xlabel("gradient of one process")
    plt.ylabel("gradient of two")
    plt.legend(fontsize=8, markerscale=5)
    plt.title("Only sum over sum lies on the diagonal", fontsize=10)
    plt.tight_layout()
    plt.show()


def show_events(events: Sequence[Any]) -> list[int]:
    """The events of one backward pass. Returns how many gradients were complete as each bucket
    left.
    """
    plt.figure(figsize=(6, 2.3))
    places = ["norm", "layers.1", "layers.0", "embedding"]
    leaving: list[int] = []
    for moment, event in enumerate(events):
        if isinstance(event, int):
            leaving.append(moment - len(leaving))
            plt.axvline(moment, color=ORANGE)
            plt.text(moment - 0.2, -0.7, f"{event / 1000:.0f} kB", ha="right", fontsize=8)
        else:
            place = next(i for i, place in enumerate(places) if event.startswith(place))
            plt.plot(moment, place, "o", color=BLUE)
    plt.yticks(range(4), places)
    plt.ylim(3.5, -1.2)
    plt.xlabel("events of backward (dot: a gradient; line: a bucket leaves)")
    plt.title("The first bucket leaves before layer 0 has a gradient", fontsize=10)
    plt.tight_layout()
    plt.show()
    return leaving


def gains(steps: Sequence[Step], kind: str) -> dict[int, float]:
    """How many times the tokens of one process two of them get through in a second, by tokens.

    The fastest step of each size counts: what else the machine did made the others slower.
    """
    fastest: dict[int, dict[str, float]] = {}
    for step in steps:
        found = fastest.setdefault(step["tokens"], {"alone": math.inf, "together": math.inf})
        for how in found:
            found[how] = min(found[how], *step[how][kind])
    return {tokens: 2 * of["alone"] / of["together"] for tokens, of in fastest.items()}


def show_gains(measured: Mapping[str, Mapping[int, float]]) -> None:
    """The measured gains of two processes over one, by tokens in each, for each kind of second."""
    plt.figure(figsize=(5, 2.6))
    plt.axhline(2, color=GRAY, lw=1, ls=":", label="no cost at all")
    plt.axhline(1, color=GRAY, lw=1, ls="--", label="one process")
    for (kind, found), color in zip(measured.items(), (BLUE, ORANGE), strict=True):
        plt.plot(list(found), list(found.values()), "o-", color=color, label=kind)
    plt.xscale("log", base=2)
    plt.ylim(0, 1.1 * max(2, *(gain for found in measured.values() for gain in found.values())))
    plt.xlabel("tokens in each process and step")
    plt.ylabel("speed of two over one")
    plt.legend(fontsize=8, ncol=2, loc="lower left")
    plt.title("Two processes on this machine", fontsize=10)
    plt.tight_layout()
    plt.show()


def show_speedups(speedup: Callable[[int], float], processes: int) -> None:
    """The computed speed of `processes` over that of one, by tokens in each."""
    tokens = [2**k for k in range(8, 19)]
    plt.figure(figsize=(5, 2.6))
    plt.axhline(processes, color=GRAY, lw=1, ls=":", label="no cost at all")
    plt.axhline(1, color=GRAY, lw=1, ls="--", label="one process")
    plt.plot(tokens, [speedup(count) for count in tokens], color=BLUE, label="computed")
    plt.xscale("log", base=2)
    plt.ylim(0, 1.1 * processes)
    plt.xlabel("tokens in each process and step")
    plt.ylabel(f"speed of {processes} over one")
    plt.legend(fontsize=8)
    plt.title("More tokens hide the messages", fontsize=10)
    plt.tight_layout()
    plt.show()


# ------------------------------------------------------------------------------ starting processes


def show_attempts(made: Set[tuple[int, int, int]]) -> None:
    """The steps that two ranks have begun, given as (attempt, step, rank), along time."""
    plt.figure(figsize=(6.4, 2.2))
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for attempt, step, rank in made:
        place = step + 2 * attempt  # between the attempts everything is started again
        waits = (attempt, step, 1 - rank) not in made
        color = ORANGE if waits else BLUE
        plt.barh(rank, 0.92, left=place - 0.46, height=0.6, color=color, alpha=0.5)
        plt.text(place, rank, "waits" if waits else f"step {step}", **style)
        if waits:
            plt.text(place, 1 - rank, "killed", color=ORANGE, **style)
            plt.text(place + 1, 0.5, "all start\nagain", **style)
        elif step % 2 == 0:
            plt.plot(place + 0.5, 0.5, "v", color=GRAY)
    plt.plot([], [], "v", color=GRAY, label="checkpoint")
    plt.yticks([0, 1], ["rank 0", "rank 1"])
    plt.xticks([])
    plt.ylim(1.6, -0.6)
    plt.xlabel("time")
    plt.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1.0), frameon=False)
    plt.title("Step 5 is done again, steps 1 to 4 are not", fontsize=10)
    plt.tight_layout()
    plt.show()


# ---------------------------------------------------------------------------------------- sharding

MOMENTS = ["start", "f0", "f1", "f2", "f3", "loss", "b3", "b2", "b1", "b0", "end"]


def show_whole(seen: Tensor, moment: int) -> None:
    """Which groups are whole at a moment of a step, in both processes, and over the whole step."""
    figure, (now, step) = plt.subplots(
        1, 2, figsize=(7, 2.6), gridspec_kw={"width_ratios": [1, 2.2]}
    )
    groups = ["rest", *(f"block {i}" for i in range(seen.shape[1] - 1))]
    for row, whole in enumerate(seen[moment].tolist()):
        for rank in range(2):
            for half, owner in enumerate((BLUE, ORANGE)):
                held = whole or half == rank
                box: dict[str, Any] = {"color": owner if held else "none", "ec": GRAY, "alpha": 0.8}
                now.add_patch(plt.Rectangle((1.3 * rank + half / 2, row + 0.1), 0.5, 0.8, **box))
    now.set(xlim=(-0.1, 2.5), ylim=(len(groups), 0), xticks=[0.5, 1.8])
    now.set_xticklabels(["rank 0", "rank 1"])
    now.set_yticks([row + 0.5 for row in range(len(groups))], groups)
    now.set_title(f"held at {MOMENTS[moment]!r}", fontsize=10)
    step.imshow(seen.T.float(), cmap="Blues", vmax=1.6, aspect="auto")
    step.axvline(moment, color=ORANGE, lw=2)
    step.set_xticks(range(len(MOMENTS)), MOMENTS, fontsize=8)
    step.set_yticks([])
    step.set_title("gathered (f: forward through a block, b: backward)", fontsize=10)
    figure.tight_layout()
    plt.show()


def show_held(held: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Bytes by rank, measured; and gigabytes for a billion parameters in 16 blocks, computed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.7))
    bars = {
        f"{name.upper()}\nrank {rank}": sizes
        for name, both in held.items()
        for rank, sizes in enumerate(both)
    }
    bottom = [0.0] * len(bars)
    for kind, part in zip(
        ("parameters", "gradients", "moments"), zip(*bars.values(), strict=True), strict=True
    ):
        left.bar(list(bars), [size / 1000 for size in part], bottom=bottom, label=kind)
        bottom = [low + size / 1000 for low, size in zip(bottom, part, strict=True)]
    left.set(ylabel="kB held after a step")
    left.set_title("Measured: FSDP's ranks hold half", fontsize=10)
    left.legend(fontsize=7)
    left.tick_params(axis="x", labelsize=8)
    processes = [2**k for k in range(1, 7)]
    right.loglog(processes, [16 for n in processes], "o-", label="DDP")
    right.loglog(processes, [16 / n + 12 / 16 for n in processes], "s-", label="FSDP, at its peak")
    right.loglog(processes, [16 / n for n in processes], "s:", label="FSDP, between steps")
    right.set_xticks(processes, [str(n) for n in processes])
    right.set_yticks([0.25, 1, 4, 16], ["0.25", "1", "4", "16"])
    right.minorticks_off()
    right.set(xlabel="processes", ylabel="GB per process")
    right.set_title("Computed: a billion parameters", fontsize=10)
    right.legend(fontsize=7)
    figure.tight_layout()
    plt.show()

"""What all benchmarks share: rows, timing that alternates between the candidates, and the machine
with its limits.
"""

import importlib
import math
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

BF16 = torch.bfloat16
FP32 = torch.float32


@dataclass
class Row:
    """One line of the table: `ours` and `theirs` are costs in `unit`, so the ratio is theirs / ours
    and more is better.
    """

    what: str
    peer: str
    ours: float
    theirs: float
    unit: str = "ms"
    goals: tuple[float, float] | None = None  # the ratio wanted with AVX-512-BF16, and with AMX
    share: str = ""  # of the machine's limit, in words
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def alternate(
    candidates: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 1
) -> dict[str, float]:
    """The median seconds of each candidate. They take turns, and what slows a whole round down is
    taken out of it.

    For the latter one step of Tukey's median polish: a round counts as slow by the median, over the
    candidates, of how far each is above its own median (in logarithms). So two candidates are
    compared within a round first, and between rounds after that.
    """
    for function in candidates.values():
        for _ in range(warmup):
            function()
    logs = torch.empty(rounds, len(candidates), dtype=torch.float64)
    columns = {name: column for column, name in enumerate(sorted(candidates))}
    for index in range(rounds):
        for name in sorted(candidates, reverse=bool(index % 2)):
            start = time.perf_counter()
            candidates[name]()
            logs[index, columns[name]] = math.log(time.perf_counter() - start)
    slow = (logs - logs.quantile(0.5, dim=0)).quantile(0.5, dim=1, keepdim=True)  # (rounds, 1)
    medians = (logs - slow).quantile(0.5, dim=0).exp()
    return {name: medians[column].item() for name, column in columns.items()}


def cpu_kind() -> str:
    """Which of the goals apply: those of AMX, of AVX-512-BF16, or none."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX-512-BF16" if torch.cpu._is_avx512_bf16_supported() else "no bf16 instructions"


def processor() -> str:
    """Its name and family: virtual machines call several generations by one name."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux alone has it
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    told = dict(re.findall(r"^(model name|cpu family)\s*: (.+)$", text, re.MULTILINE))
    return (
        f"{told['model name']} family {told['cpu family']}"
        if len(told) == 2
        else platform.processor()
    )


def title() -> str:
    """The kind of machine that a table belongs to."""
    return f"{processor()}, {cpu_kind()}"


def plot_path(name: str, title: str) -> Path:
    """Where the plot of a module lies: one for each kind of machine."""
    return Path(__file__).parent / f"{name}-{re.sub('[^a-z0-9]+', '-', title.lower())}.png"


def machine() -> dict[str, str]:
    """The processor and the versions that the figures belong to."""
    return {
        "cpu": processor(),
        "kind": cpu_kind(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{
            name: version(name)
            for name in ("torch", "transformers", "tokenizers", "litgpt")
            if find_spec(name)
        },
    }


def matmul_rate(m: int, n: int, k: int, dtype: torch.dtype, *, seconds: float = 0.5) -> float:
    """The best floating-point operations per second of (m, k) @ (k, n)."""
    a = torch.randn(m, k).to(dtype)
    b = torch.randn(k, n).to(dtype)
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * m * n * k / best


def bandwidth(*, seconds: float = 0.5, megabytes: int = 512) -> float:
    """The best bytes per second at which a tensor that no cache can hold is read."""
    a = torch.ones(megabytes * 2**20 // 4)
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a.sum()
        best = min(best, time.perf_counter() - start)
    return a.nbytes / best


def ceilings() -> dict[str, float]:
    """The limits that shares refer to: GFLOP/s at the widest product of *small*, GB/s."""
    rates = {
        f"{name} products": matmul_rate(4096, 1024, 384, dtype) / 1e9
        for name, dtype in (("fp32", FP32), ("bf16", BF16))
    }
    return rates | {"memory read": bandwidth() / 1e9}


def measured(name: str, full: bool) -> dict[str, Any]:
    """The rows of a module of this folder; in a process of its own nothing is there that another
    has compiled or allocated.
    """
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "ceilings": ceilings(),
        "rows": [],
    }
    for row in importlib.import_module(f"benchmarks.{name}").rows(full=full):
        print(
            f"{row.what:64} {row.ours:9.2f} {row.theirs:9.2f} {row.unit:11} x{row.ratio:<8.2f}"
            f" {row.peer}",
            flush=True,
        )
        found["rows"].append(asdict(row))
    return found

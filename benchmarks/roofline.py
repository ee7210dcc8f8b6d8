"""The roofline of this machine, and the kernels of a training step and of a decoded token on it."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from benchmarks.measure import BF16, FP32, Row, bandwidth, cpu_kind, matmul_rate, plot_path, title
from benchmarks.models import BATCH, SMALL
from llm_course.model.attention import scaled_dot_product_attention
from llm_course.model.cross_entropy import linear_cross_entropy
from llm_course.model.linear import Linear
from llm_course.model.normalization import RMSNorm

B, T = BATCH["small"]
N = B * T
C = SMALL.hidden_size
FF = SMALL.resolved_intermediate_size
V = SMALL.vocab_size or 0


def kernels(dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], float, float]]:
    """Name: what to run, its operations, and the bytes that it must read and write at least."""
    size = torch.finfo(dtype).bits // 8
    H = SMALL.num_heads
    K = SMALL.num_kv_heads or 0
    D = SMALL.resolved_head_dim
    x = torch.randn(N, C).to(dtype)
    wide = Linear(C, FF, bias=False).to(dtype)
    layers = [Linear(C, FF, bias=False).to(dtype) for _ in range(48)]  # more than a cache holds
    q, k, v = (torch.randn(B, heads, T, D).to(dtype).requires_grad_() for heads in (H, K, K))
    # A head as at the start of training: larger logits have probabilities so small that some
    # processors are slow with them.
    norm = RMSNorm(C).to(dtype)
    head = (0.05 * torch.randn(V, C)).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,))

    def one_token(count: int) -> Callable[[], object]:
        row = torch.randn(1, C).to(dtype)
        return lambda: (
            [layer(row) for layer in layers[:count]]
            if count
            else [F.linear(row, layer.weight) for layer in layers]
        )

    def attention() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    def loss() -> None:
        linear_cross_entropy(x.detach().requires_grad_(), head, labels).backward()

    weights = len(layers) * C * FF
    found: dict[str, tuple[Callable[[], object], float, float]] = {
        "up_proj, 4096 rows": (
            no_grad(lambda: wide(x)),
            2 * N * C * FF,
            size * (N * C + C * FF + N * FF),
        ),
        "up_proj, 1 row": (no_grad(one_token(len(layers))), 2 * weights, size * weights),
        "F.linear, 1 row": (no_grad(one_token(0)), 2 * weights, size * weights),
        "RMSNorm": (no_grad(lambda: norm(x)), 4 * N * C, size * 2 * N * C),
        # causal: half of the pairs; backward is twice forward and a half for the weights again
        "attention, both ways": (
            attention,
            3.5 * 2 * B * H * T * T * D,
            4 * size * B * T * (2 * H + 2 * K) * D,
        ),
        "loss, both ways": (loss, 6 * N * C * V, size * (2 * N * C + 2 * V * C)),
    }
    return found


def no_grad(function: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(function)


def best_seconds(function: Callable[[], object], seconds: float) -> float:
    function()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def rows(*, full: bool) -> Iterator[Row]:
    fig = Figure(figsize=(9, 4.6), layout="tight")
    ax = fig.subplots()
    read = bandwidth()
    dtypes = (FP32,) if cpu_kind() == "no bf16 instructions" else (FP32, BF16)
    for dtype, color in zip(dtypes, ("tab:blue", "tab:orange"), strict=False):
        peak = matmul_rate(4096, 1024, 384, dtype)
        name = str(dtype).removeprefix("torch.")
        intensity = torch.logspace(-1, 3, 200)
        ax.loglog(
            intensity,
            (intensity * read).clamp(max=peak) / 1e9,
            color=color,
            label=f"the roof in {name}",
        )
        for (kernel, (function, flops, moved)), marker in zip(
            kernels(dtype).items(), "os^vD*", strict=True
        ):
            spent = best_seconds(function, 2.0 if full else 0.7)
            roof = min(peak, flops / moved * read)
            ax.loglog(
                flops / moved,
                flops / spent / 1e9,
                marker,
                color=color,
                label=kernel if dtype == FP32 else None,
            )
            yield Row(f"{kernel}, {name}", "the roof", 1e3 * spent, 1e3 * flops / roof)
    ax.set(
        xlabel="operations a byte",
        ylabel="GFLOP/s",
        title=f"Roofline: {title()}, {torch.get_num_threads()} threads",
    )
    ax.legend(fontsize=7)
    fig.savefig(plot_path("roofline", title()), dpi=80)

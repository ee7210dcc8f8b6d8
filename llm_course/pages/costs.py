"""What the page of costs counts and measures: published models, small variants, and their plots."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llm_course.hardware import cpu_multiplies_bf16
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import (
    ParameterCount,
    TrainingMemory,
    count_parameters,
    flops_per_token,
    kv_cache_bytes,
    training_memory,
)
from llm_course.pages.memory import MemoryMeter, kept_bytes

GB = 1e9
NAIVE_TABLES = 3  # so many tables of logits does a plainly written loss hold

# ------------------------------------------------------------------------------------------ models

_LLAMA_3: dict[str, Any] = dict(
    vocab_size=128_256, num_kv_heads=8, max_position_embeddings=8192, tie_word_embeddings=False
)
PUBLISHED = {
    "GPT-2 small": ModelConfig.preset("gpt2"),
    "Llama 3 8B": ModelConfig(
        hidden_size=4096, num_layers=32, num_heads=32, intermediate_size=14_336, **_LLAMA_3
    ),
    "Mixtral 8x7B": ModelConfig.preset("mixtral-8x7b"),
    "Qwen3 30B-A3B": ModelConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=768,
        max_position_embeddings=40_960,
        use_moe=True,
        num_experts=128,
        top_k=8,
        qk_norm=True,
        tie_word_embeddings=False,
    ),
}
LLAMA_405B = ModelConfig(
    hidden_size=16_384, num_layers=126, num_heads=128, intermediate_size=53_248, **_LLAMA_3
)

_SMALL: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    max_position_embeddings=64,
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "GPT-2's": dict(
        norm_type="layernorm",
        use_glu=False,
        position_type="learned",
        attention_bias=True,
        mlp_bias=True,
    ),
    "sandwich, QK-norm": dict(norm_position="sandwich", qk_norm=True, head_dim=24),
    "post-norm, untied": dict(
        norm_position="post",
        tie_word_embeddings=False,
        attention_bias=True,
        attention_out_bias=False,
    ),
    "window": dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "soft cap": dict(attn_logit_softcapping=30.0, activation="relu"),
    "experts": dict(use_moe=True, num_experts=5, top_k=2, shared_expert_intermediate_size=40),
    "two tokens ahead": dict(
        num_mtp_layers=2, use_moe=True, num_experts=3, top_k=1, norm_type="layernorm"
    ),
}
VARIANTS = {name: ModelConfig(**(_SMALL | options)) for name, options in _OPTIONS.items()}

# ---------------------------------------------------------------------------------------- measured


def real_size(config: ModelConfig) -> int:
    """The parameters of a model that is built."""
    return DecoderModel(config).num_parameters()


def counted(config: ModelConfig, T: int = 40, *, training: bool = False) -> float:
    """What PyTorch's counter reports for a built model, for each token of two rows.

    Attention is written out: on a CPU, the counter doesn't see the fused kernel.
    """
    model = DecoderModel(config)
    ids = torch.randint(config.resolved_vocab_size, (2, T))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = model(ids, labels=ids if training else None)
        if training:
            (out.loss_sum + out.aux_loss).backward()  # aux_loss: the tokens further ahead
    return counter.get_total_flops() / ids.numel()


def estimated_and_measured(
    config: ModelConfig, *, mixed: bool, B: int = 4, T: int = 48
) -> tuple[int, int]:
    """Bytes that B more rows add between forward and backward: by `training_memory`, and measured.

    What is there for any number of rows cancels, such as autocast's copies of the weights.
    """
    model = DecoderModel(config)
    heads = 1 + config.num_mtp_layers
    width = 2 if mixed else 4
    estimated = []
    measured = []
    for rows in (B, 2 * B):
        ids = torch.randint(config.resolved_vocab_size, (rows, T))
        run = partial(model, ids, labels=ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            measured.append(kept_bytes(run, leave_out=model.parameters()))
        how = dict(mixed_precision=mixed, on_bf16_cpu=cpu_multiplies_bf16())
        # the loss keeps the gradient of its input
        kept_by_loss = heads * width * rows * T * config.hidden_size
        estimated.append(training_memory(config, rows, T, **how).activations + kept_by_loss)
    return estimated[1] - estimated[0], measured[1] - measured[0]


def kept_by_layers(
    layers: Sequence[int], *, checkpointing: bool, B: int = 4, T: int = 64
) -> tuple[list[int], list[Tensor]]:
    """Bytes kept for backward by models of so many layers, and the gradients of the deepest."""
    kept: list[int] = []
    for num_layers in layers:
        torch.manual_seed(0)
        model = DecoderModel(replace(VARIANTS["plain"], num_layers=num_layers))
        model.activation_checkpointing = checkpointing
        ids = torch.randint(101, (B, T))
        run = partial(model, ids, labels=ids)
        kept.append(kept_bytes(run, leave_out=model.parameters()))
        run().loss_sum.backward()
    return kept, [p.grad for p in model.parameters() if p.grad is not None]


# ----------------------------------------------------------------------------------------- pictures


def show_parts(counts: Mapping[str, ParameterCount]) -> None:
    """The share of each part in the parameters of some models."""
    left = torch.zeros(len(counts))
    _, ax = plt.subplots(figsize=(6, 2.4), layout="constrained")
    for part in ("embedding", "attention", "mlp", "lm_head"):
        share = torch.tensor([getattr(count, part) / count.total for count in counts.values()])
        ax.barh(list(counts), share, left=left, label=part)
        left += share
    ax.set(xlabel="share of all parameters", xlim=(0, 1))
    ax.set_title("Experts make a model nearly all MLP", fontsize=11)
    ax.invert_yaxis()
    ax.figure.legend(ncols=4, fontsize=8, loc="outside lower center")
    plt.show()


def show_arithmetic(config: ModelConfig) -> None:
    """The share of each part in the operations for a token, against the length of the text."""
    long = replace(config, max_position_embeddings=2**18)
    lengths = [2**i for i in range(9, 19)]
    flops = [flops_per_token(long, T) for T in lengths]
    _, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
    for part, style in zip(
        ("mlp", "projections", "lm_head", "scores"), ("-", "--", ":", "o-"), strict=True
    ):
        ax.plot(lengths, [getattr(f, part) / f.forward for f in flops], style, label=part)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="T (tokens)", ylabel="share of the operations")
    ax.set_title("Attention scores lead only in long texts", fontsize=11)
    ax.legend(fontsize=8)
    plt.show()


def show_ratios(ratios: Mapping[str, Sequence[float]]) -> None:
    """Estimate divided by measurement for each variant."""
    _, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
    for (name, values), marker in zip(ratios.items(), "ox", strict=True):
        ax.plot(values, list(VARIANTS), marker, label=name)
    ax.axvspan(0.95, 1.05, alpha=0.15, color="gray")
    ax.set(xlabel="estimated / measured", xlim=(0.9, 1.1))
    ax.set_title("What backward needs, known to 5 %", fontsize=11)
    ax.legend(fontsize=8)
    plt.show()


def show_step() -> float:
    """Bytes alive over one step of a small model; returns the estimate divided by the peak."""
    config = replace(VARIANTS["plain"], num_layers=6)
    model = DecoderModel(config)
    ids = torch.randint(101, (8, 64))
    with MemoryMeter() as meter:
        loss = model(ids, labels=ids).loss_sum
        forward = len(meter.history)
        assert loss is not None
        loss.backward()
    memory = training_memory(config, 8, 64)
    top = memory.activations + memory.loss
    _, ax = plt.subplots(figsize=(6, 2.5), layout="constrained")
    ax.plot([size / 1e6 for size in meter.history])
    ax.axvline(forward, color="tab:red", linestyle=":", label="backward begins")
    ax.axhline(top / 1e6, color="gray", linestyle="--", label="activations + loss, estimated")
    ax.axhline(
        memory.gradients / 1e6, color="tab:green", linestyle="-.", label="gradients, estimated"
    )
    ax.set(xlabel="operation", ylabel="in use (MB)")
    ax.set_title("Activations climb, and fall while gradients appear", fontsize=11)
    ax.legend(fontsize=8)
    plt.show()
    return top / meter.peak


def with_naive_loss(memory: TrainingMemory, config: ModelConfig, rows: int, T: int) -> float:
    """The total if all logits were held, in bytes."""
    return memory.total - memory.loss + NAIVE_TABLES * rows * T * config.resolved_vocab_size * 4


def show_batches(config: ModelConfig, T: int, card: float) -> None:
    """The memory of a training step against the number of rows, part by part."""
    rows = list(range(1, 61))
    memory = [training_memory(config, B, T, mixed_precision=True) for B in rows]
    naive = [with_naive_loss(m, config, B, T) / GB for m, B in zip(memory, rows, strict=True)]
    _, ax = plt.subplots(figsize=(6, 3), layout="constrained")
    parts = ([m[i] / GB for m in memory] for i in range(5))
    ax.stackplot(rows, *parts, labels=TrainingMemory._fields)
    ax.plot(rows, naive, "--", color="gray", label="with naive logits")
    ax.axhline(card, color="black", linewidth=1)
    ax.set(xlabel=f"rows of {T} tokens", ylabel="memory (GB)", ylim=(0, 40))
    ax.set_title("Nearly all that grows is activations", fontsize=11)
    ax.legend(fontsize=7, loc="upper left", ncols=2)
    plt.show()


def show_kept(layers: Sequence[int], kept: Mapping[str, Sequence[int]]) -> None:
    """Bytes kept for backward against the number of layers."""
    _, ax = plt.subplots(figsize=(6, 2.5), layout="constrained")
    for (name, sizes), marker in zip(kept.items(), "os", strict=True):
        ax.plot(layers, [size / 1e6 for size in sizes], f"{marker}-", label=name)
    ax.set(xlabel="layers", ylabel="kept for backward (MB)", ylim=(0, None), xticks=list(layers))
    ax.set_title("Checkpointing keeps one tensor for each block", fontsize=11)
    ax.legend(fontsize=8)
    plt.show()


def show_fit(model: str, rows: int, T: int, card: int, checkpointing: bool) -> None:
    """Whether a training step fits onto a card, part by part."""
    config = PUBLISHED[model]
    length = min(T, config.max_position_embeddings)
    memory = training_memory(
        config, rows, length, mixed_precision=True, activation_checkpointing=checkpointing
    )
    left = 0.0
    fig, ax = plt.subplots(figsize=(6.6, 1.9), layout="constrained")
    for part, size in memory._asdict().items():
        ax.barh([0], [size / GB], left=left, label=f"{part} {size / GB:.1f}")
        left += size / GB
    ax.axvline(card, color="black", lw=2)
    ax.set(xlim=(0, 1.15 * max(left, card)), yticks=[], xlabel="GB")
    operations = flops_per_token(config, length).training * rows * length
    verdict = "fits" if left <= card else "doesn't fit"
    ax.set_title(
        f"{rows} rows of {length} tokens: {left:.1f} GB, {verdict};"
        f" a step takes {operations / 1e12:.0f} TFLOP",
        fontsize=10,
    )
    fig.legend(fontsize=7, loc="outside lower center", ncols=5)
    plt.show()


def show_cache() -> None:
    """The cache against the length of the text, with and without what makes it smaller."""
    llama = PUBLISHED["Llama 3 8B"]
    kinds: list[Any] = ["sliding_attention", "full_attention"] * 16
    lines = {
        "K = 32 (no sharing)": replace(llama, num_kv_heads=32),
        "Llama 3 8B, K = 8": llama,
        "and a window in every second layer": replace(
            llama, sliding_window=1024, layer_types=kinds
        ),
    }
    lengths = [2**i for i in range(7, 14)]
    _, ax = plt.subplots(figsize=(6, 2.5), layout="constrained")
    for (name, config), style in zip(lines.items(), ("--", "-", "o-"), strict=True):
        ax.plot(lengths, [kv_cache_bytes(config, T) / 2**20 for T in lengths], style, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="T (tokens)", ylabel="cache (MiB)")
    ax.set_title("Sharing divides the cache, windows bend its growth", fontsize=11)
    ax.legend(fontsize=8)
    plt.show()


def show_table() -> None:
    """Everything in one table, for texts of 1024 tokens."""
    print("               total   active   GFLOP/token   cache/token   training, 1 row")
    for name, config in PUBLISHED.items():
        count = count_parameters(config)
        flops = flops_per_token(config, 1024)
        memory = training_memory(config, 1, 1024, mixed_precision=True).total
        print(
            f"{name:13} {count.total / GB:5.1f} B  {count.active / GB:5.1f} B "
            f" {flops.forward / GB:8.1f}      {kv_cache_bytes(config, 1) / 1024:6.0f} KiB "
            f" {memory / GB:10.0f} GB"
        )

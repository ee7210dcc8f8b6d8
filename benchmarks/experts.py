"""A mixture of experts, forward and backward, beside Hugging Face's Mixtral and beside a dense
layer of equal active size.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import nn

from benchmarks.measure import BF16, Row, alternate, cpu_kind
from llm_course.model.mlp import MLP
from llm_course.model.moe import MoE

C = 384
F = 1024
N = 4096
TOP_K = 2


def both_ways(layer: nn.Module, *, bf16: bool) -> Callable[[], None]:
    """Forward and backward of new tokens each time, as in training: the experts' loads are never
    the same twice.
    """
    device = next(layer.parameters()).device
    generator = torch.Generator(device).manual_seed(0)

    def run() -> None:
        x = torch.randn(1, N, C, generator=generator, device=device).requires_grad_()
        with torch.autocast(device.type, dtype=BF16) if bf16 else nullcontext():
            y = layer(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        layer.zero_grad()

    return run


def mixtral(layer: MoE, implementation: str) -> nn.Module:
    """Hugging Face's layer with the weights of ours; it keeps gate and up in one tensor."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    E = layer.gate.weight.shape[0]
    config = MixtralConfig(
        hidden_size=C, intermediate_size=F, num_local_experts=E, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    assert layer.experts.gate_proj is not None
    with torch.no_grad():
        block.gate.weight.copy_(layer.gate.weight)
        block.experts.gate_up_proj.copy_(
            torch.cat((layer.experts.gate_proj, layer.experts.up_proj), dim=1)
        )
        block.experts.down_proj.copy_(layer.experts.down_proj)
    return block


def rows(*, full: bool) -> Iterator[Row]:
    bf16 = cpu_kind() != "no bf16 instructions"
    mode = "bf16" if bf16 else "fp32"
    dense = both_ways(MLP(C, TOP_K * F), bf16=bf16)
    for E, beside_peer, beside_dense in ((8, 1.2, 0.9), (16, 2.4, 0.8), (64, 2.0, 0.6)):
        torch.manual_seed(0)
        layer = MoE(C, F, num_experts=E, top_k=TOP_K)
        runs = {"ours": both_ways(layer, bf16=bf16), "dense": dense}
        x = torch.randn(1, 64, C, generator=torch.Generator().manual_seed(1))
        for implementation in ("eager", "grouped_mm"):
            if implementation == "eager" and E == 64 and not full:
                continue  # seconds a call: its backward grows with the square of the experts
            block = mixtral(layer, implementation)
            torch.testing.assert_close(block(x), layer(x)[0], rtol=1e-4, atol=1e-4)
            runs[implementation] = both_ways(block, bf16=bf16)
        seconds = {
            name: 1e3 * value for name, value in alternate(runs, rounds=15 if full else 9).items()
        }
        what = f"MoE layer, {E} experts, top {TOP_K}, forward and backward, {mode}"
        best = min(set(seconds) - {"ours", "dense"}, key=seconds.__getitem__)
        yield Row(
            what,
            f"HF Mixtral, the better one ({best})",
            seconds["ours"],
            seconds[best],
            goals=(beside_peer,) * 2,
        )
        dense_peer = "a dense layer of equal active size"
        yield Row(what, dense_peer, seconds["ours"], seconds["dense"], goals=(beside_dense,) * 2)

"""The mixture of experts at its edges: Hugging Face's blocks as the oracle, odd sizes, idle
experts, no tokens, ties, compile.
"""

import copy
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from llm_course.model.kernels import moe as kernel
from llm_course.model.kernels.moe import (
    fits_grouped_mm,
    grouped_linear,
    grouped_linear_saved_bytes,
    grouped_outer,
    rounded_rows,
)
from llm_course.model.mlp import MLP
from llm_course.model.moe import (
    Experts,
    MoE,
    Router,
    bias_step,
    linear_by_expert,
    load_balancing_loss,
    router_z_loss,
)

os.environ["HF_HUB_OFFLINE"] = "1"
BENDS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
SMALL = dict(num_experts=4, top_k=2)


def random_moe(C, inner, *, scale=0.5, **options):
    moe = MoE(C, inner, **options)
    for parameter in moe.parameters():
        # fresh routers are nearly undecided, which hides wrong weights
        nn.init.normal_(parameter, std=scale)
    nn.init.normal_(moe.gate.weight)
    return moe


def by_definition(moe, x, chosen):
    """For each token, for each chosen expert; the choice itself is given, so that ties cannot
    matter.
    """
    experts = moe.experts
    bend = BENDS[moe.experts.activation]
    rows = []
    for token, choice in zip(x.reshape(-1, x.shape[-1]), chosen.tolist(), strict=True):
        exps = [
            math.exp((moe.gate.weight[e].double() @ token.double()).item())
            for e in range(len(moe.gate.weight))
        ]
        total = sum(exps[e] for e in choice) if moe.gate.norm_topk_prob else sum(exps)
        out = torch.zeros_like(token)
        for e in choice:
            up = experts.up_proj[e] @ token
            hidden = (
                bend(up) if experts.gate_proj is None else bend(experts.gate_proj[e] @ token) * up
            )
            out = out + exps[e] / total * (experts.down_proj[e] @ hidden)
        rows.append(out if moe.shared_expert is None else out + moe.shared_expert(token))
    return torch.stack(rows).view(x.shape) if rows else x


@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=2),
    C=st.integers(1, 7),
    inner=st.integers(1, 9),
    E=st.integers(1, 6),
    data=st.data(),
    norm=st.booleans(),
    use_glu=st.booleans(),
    shared=st.sampled_from([None, 3]),
    activation=st.sampled_from([None, *BENDS]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(shape, C, inner, E, data, norm, use_glu, shared, activation, seed):
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, E))
    moe = random_moe(
        C,
        inner,
        num_experts=E,
        top_k=k,
        norm_topk_prob=norm,
        shared_expert_intermediate_size=shared,
        use_glu=use_glu,
        activation=activation,
    )
    x = torch.randn(*shape, C)
    y, stats = moe(x)
    routing = moe.gate(x.reshape(-1, C))
    expected = F.linear(x.reshape(-1, C), moe.gate.weight).topk(k).values
    # the k largest, largest first
    assert_close(routing.logits.gather(-1, routing.expert_index), expected)
    assert_close(y, by_definition(moe, x, routing.expert_index), atol=1e-5, rtol=1e-4)
    assert (
        stats.tokens_per_expert.tolist()
        == torch.bincount(routing.expert_index.flatten(), minlength=E).tolist()
    )
    assert stats.tokens_per_expert.dtype == torch.int64 and stats.aux_loss.shape == ()


@pytest.mark.parametrize("norm", [True, False])
def test_gradcheck(norm):
    torch.manual_seed(0)
    moe = random_moe(
        2, 3, num_experts=3, top_k=2, norm_topk_prob=norm, router_z_loss_coef=0.1
    ).double()
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def outputs(x, *values):
        y, stats = torch.func.functional_call(moe, dict(zip(names, values, strict=True)), x)
        return y, stats.aux_loss

    names, values = zip(*moe.named_parameters(), strict=True)
    assert torch.autograd.gradcheck(outputs, (x, *values))
    cut = lambda x, *values: outputs(x.detach(), *values)[0] + 0 * x.sum()  # noqa: E731
    # the check can fail
    assert not torch.autograd.gradcheck(cut, (x, *values), raise_exception=False)


# ---------------------------------------------------------------- the grouped product


@pytest.mark.parametrize("counts", [[3, 0, 4, 0], [0, 0, 0, 7], [7, 0, 0, 0], [2, 2, 2, 1]])
def test_grouped_product(counts):
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor(counts)
    expert = torch.repeat_interleave(torch.arange(4), counts)
    assert_close(
        grouped_linear(x, weight, counts),
        torch.stack([w @ row for w, row in zip(weight[expert], x, strict=True)]),
    )
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, counts), (x, weight))
    grouped_linear(x, weight, counts).sum().backward()  # an expanded gradient
    assert weight.grad[counts == 0].abs().sum() == 0 and (weight.grad[counts > 0] != 0).all()


COUNTS = [[31, 0, 33, 1, 64, 3], [0, 132, 0, 0, 0, 0], [2, 3, 0, 1, 0, 5], [0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 3e-3),
    ],
)
def test_the_operator_equals_the_loop_over_experts(counts, weight_dtype, dtype, tolerance):
    """Outputs and gradients in every dtype, also with weights of another dtype than the rows."""
    torch.manual_seed(0)
    M = sum(counts)
    counts = torch.tensor(counts)
    x = torch.randn(M, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, 12, 8, dtype=weight_dtype or dtype, requires_grad=True)
    probe = torch.randn(M, 12, dtype=dtype)
    results = []
    for product in (grouped_linear, linear_by_expert):
        y = product(x, weight, counts)
        results.append([y, *torch.autograd.grad(y, (x, weight), probe)])
    for ours, readable in zip(*results, strict=True):
        assert ours.dtype == readable.dtype and ours.shape == readable.shape
        scale = readable.abs().max().item() if readable.numel() else 0.0
        assert_close(ours, readable, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_keeps_what_it_says(dtype, weight_dtype):
    x = torch.randn(40, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 12, 8, dtype=weight_dtype, requires_grad=True)
    counts = torch.tensor([30, 0, 10])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(x, weight, counts)
    others = {weight.data_ptr(), counts.data_ptr()}
    found = sum(t.nbytes for t in kept if t.data_ptr() not in others)
    assert found == grouped_linear_saved_bytes(40, 8, width=dtype.itemsize)


def test_half_precision_meets_eight_sizes_between_two_powers_of_two():
    x = torch.zeros(33, 1, dtype=torch.bfloat16)
    for power in range(5, 15):
        sizes = range(2**power, 2 ** (power + 1))
        rounded = [rounded_rows(x, size) for size in sizes]
        assert len(set(rounded)) <= 9  # the next power of two is one of them
        assert all(
            size <= rows <= max(size + 31, 1.125 * size)
            for size, rows in zip(sizes, rounded, strict=True)
        )
    assert [rounded_rows(x, size) for size in (0, 1, 32, 33)] == [0, 32, 32, 64]
    assert [rounded_rows(other, 33) for other in (x.float(), x[:32], x.to("meta"))] == [33, 33, 33]


@pytest.mark.parametrize(
    "counts",
    [
        [31, 0, 33, 1, 64, 3],
        [0, 132, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 127],
        [32, 32, 32, 32, 4, 0],
        [700, 5, 0, 515, 1, 2],
        [1, 1030, 0, 0, 0, 33],
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grouped_product_in_half_precision_rounds_the_blocks_up(counts, dtype, monkeypatch):
    torch.manual_seed(0)
    counts, M = torch.tensor(counts), sum(counts)
    half = (
        torch.randn(M, 8, dtype=dtype, requires_grad=True),
        torch.randn(6, 12, 8, dtype=dtype, requires_grad=True),
    )
    full = [tensor.detach().float().requires_grad_() for tensor in half]
    probe = torch.randn(M, 12)
    shapes = set()
    product = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, **out: (shapes.add((a.shape, b.shape)), product(a, b, **out))[1]
    )
    y = grouped_linear(*half, counts)
    found = torch.autograd.grad(y, half, probe.to(dtype))
    assert shapes and all(size % 32 == 0 for a, b in shapes for size in {*a, *b} - {8, 12})
    wanted = grouped_linear(*full, counts)
    assert_close(y.float(), wanted, rtol=1e-2, atol=1e-2)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, full, probe), strict=True):
        assert_close(ours.float(), theirs, rtol=2e-2, atol=0.1)
    assert (found[1][counts == 0] == 0).all()


def test_second_derivatives():
    torch.manual_seed(0)
    counts = torch.tensor([2, 0, 3])
    x = torch.randn(5, 3).double().requires_grad_()
    weight = torch.randn(3, 2, 3).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_linear(x, w, counts), (x, weight))
    dy = torch.randn(5, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda dy, x: grouped_outer(dy, x, counts, x.dtype), (dy, x))
    moe = random_moe(3, 4, **SMALL).double()
    tokens = torch.randn(6, 3).double().requires_grad_()
    (slope,) = torch.autograd.grad(moe(tokens)[0].square().sum(), tokens, create_graph=True)
    slope.square().sum().backward()  # a penalty on the gradient reaches the experts
    assert moe.experts.up_proj.grad.abs().sum() > 0


def test_pytorchs_counter_sees_the_experts():
    from torch.utils.flop_counter import FlopCounterMode

    N = 10
    C = 6
    inner = 8
    E = 4
    k = 2
    forward = N * (2 * E * C + 2 * k * 3 * C * inner)
    for device in ("cpu", "meta"):
        moe = MoE(C, inner, num_experts=E, top_k=k).to(device)
        x = torch.ones(N, C, device=device, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            y, _ = moe(x)
            assert counter.get_total_flops() == forward
            y.sum().backward()
        assert counter.get_total_flops() == 3 * forward


def test_a_layer_without_memory_has_shapes():
    moe = MoE(6, 8, **SMALL, shared_expert_intermediate_size=5).to("meta")
    x = torch.empty(2, 3, 6, device="meta")
    y, stats = moe(x)
    assert (
        y.is_meta
        and y.shape == x.shape
        and stats.tokens_per_expert.shape == (4,)
        and stats.aux_loss.shape == ()
    )
    with torch.autocast("cpu", torch.bfloat16):  # that of another device
        assert moe(x)[0].dtype == torch.float32


def test_operators_are_registered_right():
    counts = torch.tensor([3, 0, 4, 0])
    x = torch.randn(7, 5, requires_grad=True)
    weight = torch.randn(4, 3, 5, requires_grad=True)
    torch.library.opcheck(grouped_linear, (x, weight, counts))
    torch.library.opcheck(
        grouped_outer, (torch.randn(7, 3, requires_grad=True), x, counts, torch.float32)
    )


def test_grouped_product_equals_pytorchs():
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 5])
    tensors = x, weight = (
        torch.randn(8, 16, requires_grad=True),
        torch.randn(3, 24, 16, requires_grad=True),
    )
    theirs = F.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    ours = grouped_linear(x, weight, counts)
    assert_close(ours, theirs)
    probe = torch.randn(8, 24)
    assert_close(
        torch.autograd.grad(ours, tensors, probe), torch.autograd.grad(theirs, tensors, probe)
    )


def test_counts_that_do_not_cover_the_rows_are_refused():
    with pytest.raises(ValueError, match=r"blocks of \[3, 3\] rows must fill the 7 rows"):
        grouped_linear(torch.randn(7, 5), torch.randn(2, 3, 5), torch.tensor([3, 3]))


# ---------------------------------------------------------------- Hugging Face


def hugging_face_block(family, **options):
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    if family == "mixtral":
        return MixtralSparseMoeBlock(
            MixtralConfig(
                hidden_size=12,
                intermediate_size=20,
                num_local_experts=5,
                num_experts_per_tok=2,
                num_attention_heads=2,
            )
        )
    return Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=12,
            moe_intermediate_size=20,
            num_experts=5,
            num_experts_per_tok=3,
            num_attention_heads=2,
            **options,
        )
    )


@pytest.mark.parametrize("family, norm", [("mixtral", True), ("qwen3", True), ("qwen3", False)])
def test_equals_hugging_face(family, norm):
    torch.manual_seed(0)
    theirs = hugging_face_block(family, norm_topk_prob=norm)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    state = theirs.state_dict()
    gate_proj, up_proj = state["experts.gate_up_proj"].chunk(2, dim=1)
    ours = MoE(12, 20, num_experts=5, top_k=theirs.gate.top_k, norm_topk_prob=norm)
    ours.load_state_dict(
        {
            "gate.weight": state["gate.weight"],
            "gate.expert_bias": torch.zeros(5),
            "experts.gate_proj": gate_proj,
            "experts.up_proj": up_proj,
            "experts.down_proj": state["experts.down_proj"],
        }
    )
    x = torch.randn(2, 9, 12)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [ours(inputs[0])[0], theirs(inputs[1])]
    assert_close(*outputs, atol=1e-5, rtol=1e-4)
    probe = torch.randn_like(x)
    for y in outputs:
        (y * probe).sum().backward()
    assert_close(inputs[0].grad, inputs[1].grad, atol=1e-4, rtol=1e-4)
    assert_close(ours.gate.weight.grad, theirs.gate.weight.grad, atol=1e-4, rtol=1e-4)
    assert_close(
        torch.cat((ours.experts.gate_proj.grad, ours.experts.up_proj.grad), dim=1),
        theirs.experts.gate_up_proj.grad,
        atol=1e-4,
        rtol=1e-4,
    )
    swapped = copy.deepcopy(ours)
    swapped.experts.gate_proj = ours.experts.up_proj
    swapped.experts.up_proj = ours.experts.gate_proj
    other = copy.deepcopy(ours)
    other.gate.norm_topk_prob = not norm
    for wrong in (swapped, other):
        with pytest.raises(AssertionError):
            assert_close(wrong(x)[0], theirs(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_load_balancing_loss_is_that_of_hugging_face(k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = torch.randn(40, 5) * 2
    ours = load_balancing_loss(logits, logits.topk(k).indices)
    assert_close(k * ours, load_balancing_loss_func((logits,), 5, k))


def test_the_published_totals_of_the_chapter():
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    mixtral = MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
    )
    qwen3 = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        head_dim=128,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
    )
    with torch.device("meta"):
        models = MixtralForCausalLM(mixtral), Qwen3MoeForCausalLM(qwen3)
    assert [sum(p.numel() for p in model.parameters()) for model in models] == [
        46_702_792_704,
        30_532_122_624,
    ]


# ---------------------------------------------------------------- losses


def test_losses_by_hand():
    p = torch.tensor([[0.6, 0.4]]).expand(4, 2)
    assert_close(
        load_balancing_loss(p.log(), torch.tensor([[0], [0], [0], [1]])), torch.tensor(1.1)
    )
    for E, k in ((4, 1), (8, 2), (8, 8)):
        collapsed = torch.arange(k).expand(9, k)
        sure = torch.full((9, E), -60.0)
        sure[:, :k] = 60
        assert_close(load_balancing_loss(sure, collapsed), torch.tensor(E / k))
        assert_close(load_balancing_loss(torch.zeros(9, E), collapsed), torch.tensor(1.0))
    assert_close(router_z_loss(torch.zeros(3, 2) + 10), torch.tensor((10 + math.log(2)) ** 2))
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        logits = torch.zeros(3, 2, dtype=dtype)
        assert load_balancing_loss(logits, torch.zeros(3, 1, dtype=torch.long)).dtype == expected
        assert router_z_loss(logits).dtype == expected


def test_coefficients_weigh_the_losses():
    torch.manual_seed(0)
    moe = random_moe(6, 8, **SMALL, router_aux_loss_coef=0.3, router_z_loss_coef=0.7)
    x = torch.randn(11, 6)
    routing = moe.gate(x)
    expected = 0.3 * load_balancing_loss(
        routing.logits, routing.expert_index
    ) + 0.7 * router_z_loss(routing.logits)
    assert_close(moe(x)[1].aux_loss, expected)
    assert MoE(6, 8, **SMALL, router_aux_loss_coef=0.0)(x)[1].aux_loss == 0
    z = MoE(6, 8, **SMALL, router_aux_loss_coef=0.0, router_z_loss_coef=1.0)
    z(x + 3)[1].aux_loss.backward()
    assert z.gate.weight.grad.abs().sum() > 0 and z.experts.up_proj.grad is None


def test_a_loss_that_is_off_cannot_spoil_the_others():
    torch.manual_seed(0)
    moe = random_moe(6, 8, **SMALL)
    x = torch.randn(11, 6)
    # the square of such a log-sum-exp is inf in float32, and 0 * inf is NaN
    aux_loss = moe(x * 1e21)[1].aux_loss
    assert aux_loss.isfinite() and router_z_loss(moe.gate(x * 1e21).logits).isinf()
    aux_loss.backward()
    assert moe.gate.weight.grad.isfinite().all()
    off = random_moe(6, 8, **SMALL, router_aux_loss_coef=0.0)(x)[1].aux_loss
    assert off == 0 and off.shape == () and off.dtype == torch.float32


def test_losses_refuse_other_types():
    index = torch.zeros(6, 1)
    for logits, wrong in (
        (torch.zeros(6, 4), index),
        (torch.zeros(6, 4), index.int()),
        (torch.zeros(6, 4).long(), index.long()),
    ):
        rule = "expected int64" if logits.is_floating_point() else "expected a floating-point type"
        with pytest.raises(ValueError, match=rule):
            load_balancing_loss(logits, wrong)
    for logits, rule in (
        (torch.zeros(6, 0), "at least one expert"),
        (torch.zeros(6, 4, dtype=torch.bool), "expected a floating-point type"),
        (torch.zeros(6, 4).long(), "expected a floating-point type"),
        (None, "logits is a NoneType, expected a tensor"),
    ):
        with pytest.raises(ValueError, match=rule):
            router_z_loss(logits)
    with pytest.raises(ValueError, match="expert_index is a list, expected a tensor"):
        load_balancing_loss(torch.zeros(6, 4), [[1]] * 6)
    with pytest.raises(ValueError, match="tokens_per_expert is a NoneType, expected a tensor"):
        bias_step(None, 0.1)


def test_losses_refuse_unflattened_logits():
    with pytest.raises(ValueError, match="flatten the tokens first"):
        load_balancing_loss(torch.zeros(2, 3, 4), torch.zeros(2, 3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="flatten the tokens first"):
        load_balancing_loss(torch.zeros(6, 4), torch.zeros(5, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="flatten the tokens first"):
        router_z_loss(torch.zeros(2, 3, 4))


# ---------------------------------------------------------------- the router


def test_bias_acts_on_the_choice_alone():
    torch.manual_seed(0)
    gate = Router(6, 4, top_k=2)
    x = torch.randn(50, 6) * 50
    free = gate(x)
    gate.expert_bias += 2.5  # a common shift
    assert torch.equal(gate(x).expert_index, free.expert_index)
    gate.expert_bias.copy_(torch.tensor([0.0, 9.0, 7.0, 0.0]))
    for norm in (True, False):
        gate.norm_topk_prob = norm
        forced = gate(x)
        assert forced.expert_index.sort(-1).values.tolist() == [[1, 2]] * 50
        assert torch.equal(forced.logits, free.logits)
        p = free.logits.softmax(-1).gather(-1, forced.expert_index)
        assert_close(forced.weights, p / p.sum(-1, keepdim=True) if norm else p)


def test_an_expert_whose_probability_vanished_can_still_be_chosen():
    gate = Router(1, 2, top_k=1)
    gate.weight.data = torch.tensor([[0.0], [-200.0]])
    gate.expert_bias.copy_(torch.tensor([0.0, 5.0]))
    routing = gate(torch.ones(1, 1))
    assert routing.expert_index.item() == 1 and routing.weights.item() == 1  # not 0 / 0


def test_update_bias_follows_the_sign_rule():
    gate = Router(6, 4, top_k=2)
    gate.update_bias(torch.tensor([6, 1, 1, 0]), rate=0.1)
    assert_close(gate.expert_bias, torch.tensor([-0.1, 0.1, 0.1, 0.1]))
    gate.update_bias(torch.tensor([2, 2, 2, 2]), rate=0.1)  # at the mean: no step
    gate.update_bias(torch.tensor([0, 0, 0, 0]), rate=0.1)
    gate.update_bias(torch.tensor([9, 0, 0, 0]), rate=0.0)
    assert_close(gate.expert_bias, torch.tensor([-0.1, 0.1, 0.1, 0.1]))
    assert "expert_bias" in gate.state_dict() and "expert_bias" not in dict(gate.named_parameters())
    with pytest.raises(ValueError, match="one number for each expert"):
        gate.update_bias(torch.tensor([1, 2, 3]))
    for rate in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"rate={rate} must be finite"):
            gate.update_bias(torch.zeros(4), rate=rate)


@pytest.mark.parametrize("convert", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_bias_keeps_its_digits_in_a_converted_model(convert):
    gate = Router(8, 4, top_k=1)
    gate.expert_bias.copy_(torch.tensor([0.503, 0.0, 0.25, -0.7]))
    before = gate.expert_bias.clone()
    gate = copy.deepcopy(gate).to(convert)
    assert gate.weight.dtype == convert and torch.equal(gate.expert_bias, before)
    gate.update_bias(torch.tensor([0, 9, 9, 9]))
    assert abs(gate.expert_bias[0] - 0.504) < 1e-6  # in bfloat16 the step would vanish
    routing = gate(torch.ones(3, 8, dtype=convert))
    assert routing.logits.dtype == torch.promote_types(convert, torch.float32)
    assert gate.state_dict()["expert_bias"].dtype == torch.float32
    again = Router(8, 4, top_k=1).to(convert)
    again.load_state_dict(gate.state_dict())
    assert torch.equal(again.expert_bias, gate.expert_bias)
    with torch.device("meta"):
        empty = Router(8, 4, top_k=1).to(convert)
    assert (
        empty.expert_bias.is_meta
        and empty.to_empty(device="cpu").expert_bias.dtype == torch.float32
    )


def test_loads_that_differ_by_little_are_told_apart():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        gate = Router(8, 4, top_k=2).to(dtype)
        gate.update_bias(torch.tensor([1000, 1001, 1002, 1003]))
        assert gate.expert_bias.sign().tolist() == [1, 1, -1, -1]
        gate.update_bias(torch.tensor([70000, 10, 10, 10]), rate=1.0)  # beyond float16
        assert gate.expert_bias.sign().tolist() == [-1, 1, 1, 1]
        # beyond float32's whole numbers
        gate.update_bias(torch.tensor([2**40 + 1, 2**40, 2**40, 2**40]), rate=9.0)
        assert gate.expert_bias.sign().tolist() == [-1, 1, 1, 1] and gate.expert_bias[0] < -9


@pytest.mark.parametrize("load", [[math.nan] * 4, [1, 2, 3, math.inf], [1, 2, 3, -1]])
def test_loads_that_are_no_counts_are_refused(load):
    gate = Router(6, 4, top_k=2)
    with pytest.raises(ValueError, match="must be counts"):
        gate.update_bias(torch.tensor(load))
    assert gate.expert_bias.abs().sum() == 0


def test_bias_evens_the_load_of_a_router_that_prefers_one_expert():
    torch.manual_seed(0)
    gate = Router(4, 8, top_k=2)
    x = torch.randn(400, 4)
    gate.weight.data[0] += x.mean(0) + 0.5
    load = lambda: torch.bincount(gate(x).expert_index.flatten(), minlength=8)  # noqa: E731
    before = load().max().item()
    for _ in range(400):
        gate.update_bias(load(), rate=3e-3)
    assert load().max() < 150 < 200 < before  # 100 each would be even


def test_one_expert_with_scaled_weights_leaves_the_router_without_gradient():
    for norm, learns in ((True, False), (False, True)):
        moe = random_moe(6, 8, num_experts=4, top_k=1, norm_topk_prob=norm)
        moe(torch.randn(9, 6))[0].square().sum().backward()
        assert (moe.gate.weight.grad.abs().sum() > 0) == learns


def test_ties():
    moe = random_moe(6, 8, num_experts=5, top_k=3)
    x = torch.zeros(7, 6)
    routing = moe.gate(x)
    # three different experts
    assert all(len(set(row)) == 3 for row in routing.expert_index.tolist())
    assert_close(routing.weights, torch.full((7, 3), 1 / 3))
    assert moe(x)[0].isfinite().all() and torch.equal(
        routing.expert_index, moe.gate(x).expert_index
    )


# ---------------------------------------------------------------- edges of the layer


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (0, 3, 6)])
def test_no_tokens(shape):
    moe = random_moe(6, 8, **SMALL, shared_expert_intermediate_size=5, router_z_loss_coef=1.0)
    x = torch.empty(shape, requires_grad=True)
    y, stats = moe(x)
    assert y.shape == shape and stats.aux_loss == 0 and stats.tokens_per_expert.tolist() == [0] * 4
    (y.sum() + stats.aux_loss).backward()
    assert x.grad.shape == shape
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in moe.parameters())


def test_idle_experts_get_zero_gradients():
    torch.manual_seed(0)
    moe = random_moe(6, 8, **SMALL)
    moe(torch.randn(6))[0].sum().backward()  # one token without a batch: two experts work
    for name, stack in moe.experts.named_parameters():
        assert sorted((stack.grad.abs().sum((1, 2)) > 0).tolist()) == [
            False,
            False,
            True,
            True,
        ], name


def test_each_token_alone():
    torch.manual_seed(0)
    moe = random_moe(6, 8, **SMALL)
    x = torch.randn(1, 12, 6)
    order = torch.randperm(12)
    assert_close(moe(x[:, order])[0], moe(x)[0][:, order], atol=1e-5, rtol=1e-5)
    spoiled = x.clone()
    spoiled[0, 5] = math.nan
    assert moe(spoiled)[0].isnan().any(-1)[0].nonzero().flatten().tolist() == [5]


def test_not_contiguous_and_the_same_twice():
    torch.manual_seed(0)
    moe = random_moe(6, 8, **SMALL)
    x = torch.randn(3, 5, 6)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not turned.is_contiguous()
    assert_close(moe(turned)[0], moe(x)[0])
    gradients = []
    for _ in range(2):
        moe.zero_grad()
        moe(x)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in moe.parameters()])
    assert torch.equal(moe(x)[0], moe(x)[0])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_float_types(dtype):
    torch.manual_seed(0)
    moe = random_moe(6, 10, **SMALL, scale=0.3, shared_expert_intermediate_size=4)
    x = torch.randn(30, 6)
    low = copy.deepcopy(moe).to(dtype)
    inputs = x.to(dtype).requires_grad_()
    y, stats = low(inputs)
    assert y.dtype == dtype and stats.aux_loss.dtype == torch.promote_types(dtype, torch.float32)
    (y.sum() + stats.aux_loss).backward()
    assert inputs.grad.dtype == dtype and all(
        p.grad.dtype == dtype and p.grad.isfinite().all() for p in low.parameters()
    )
    expected = by_definition(
        low.float(), inputs.detach().float(), low.gate(inputs.detach().float()).expert_index
    )
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(dtype, 1e-5)
    assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)


def test_float64_is_not_rounded_inside():
    torch.manual_seed(0)
    moe = random_moe(6, 8, **SMALL).double()
    x = torch.randn(9, 6, dtype=torch.float64)
    nn.init.normal_(moe.gate.weight)  # anew, with all the digits of float64
    exact = by_definition(moe, x, moe.gate(x).expert_index)
    assert (moe(x)[0] - exact).abs().max() < 1e-12
    moe.gate.weight.data = moe.gate.weight.float().double()
    assert (moe(x)[0] - exact).abs().max() > 1e-10  # the check sees a router in float32


@pytest.mark.parametrize("use_glu", [True, False])
def test_autocast_gives_the_dtype_of_an_mlp(use_glu):
    torch.manual_seed(0)
    moe = random_moe(8, 16, **SMALL, use_glu=use_glu, scale=0.3, shared_expert_intermediate_size=4)
    x = torch.randn(20, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, stats = moe(x)
        assert (
            y.dtype == MLP(8, 16)(x).dtype == torch.bfloat16
            and stats.aux_loss.dtype == torch.float32
        )
        assert torch.equal(moe.gate(x).logits, F.linear(x, moe.gate.weight).float()) is False
        double = copy.deepcopy(moe).double()
        exact = double(x.double())[0]
    assert torch.equal(exact, double(x.double())[0])  # autocast leaves float64 alone
    # the router stays in float32
    assert torch.equal(stats.tokens_per_expert, moe(x)[1].tokens_per_expert)
    assert_close(y.float(), moe(x)[0], atol=5e-2, rtol=5e-2)
    y.sum().backward()


def test_dropout_acts_on_the_output_and_in_training_only():
    torch.manual_seed(0)
    moe = random_moe(8, 16, **SMALL, dropout=0.5)
    x = torch.randn(1, 8).expand(2000, 8)
    with torch.no_grad():
        dropped = moe(x)[0]
        whole = moe.eval()(x)[0]
    kept = dropped != 0
    assert abs(kept.float().mean() - 0.5) < 0.03
    assert_close(dropped[kept], 2 * whole[kept])


def test_experts_are_drawn_as_linear_layers():
    torch.manual_seed(0)
    experts = Experts(50, 16, 36)
    for stack, inputs in ((experts.gate_proj, 16), (experts.up_proj, 16), (experts.down_proj, 36)):
        linear = nn.Linear(inputs, 50 * 36 * 16 // inputs).weight
        assert stack.abs().max() <= inputs**-0.5
        assert_close(stack.std(), linear.std(), atol=0, rtol=0.02)
        assert_close(stack.quantile(0.9), linear.quantile(0.9), atol=0, rtol=0.02)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", None, True])
@pytest.mark.parametrize(
    "name",
    ["hidden_size", "intermediate_size", "num_experts", "top_k", "shared_expert_intermediate_size"],
)
def test_wrong_sizes(name, value):
    if name == "shared_expert_intermediate_size" and value is None:
        return
    arguments = dict(hidden_size=6, intermediate_size=8, num_experts=4, top_k=2) | {name: value}
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a whole number of at least 1"):
        MoE(**arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(top_k=5), "top_k=5 must be at most num_experts=4"),
        (dict(router_aux_loss_coef=-0.1), "router_aux_loss_coef=-0.1 must be finite"),
        (dict(router_aux_loss_coef=math.nan), "router_aux_loss_coef=nan"),
        (dict(router_z_loss_coef=math.inf), "router_z_loss_coef=inf"),
        (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (dict(dropout=math.nan), "dropout=nan"),
        (dict(activation="swish"), "choose one of 'silu', 'gelu', 'gelu_tanh', 'relu', or None"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        MoE(6, 8, **(SMALL | options))


@pytest.mark.parametrize("value", [None, "0.5", True, [0.5]])
@pytest.mark.parametrize("name", ["router_aux_loss_coef", "router_z_loss_coef", "dropout", "rate"])
def test_what_is_no_number_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be ")):
        if name == "rate":
            Router(6, 4, top_k=2).update_bias(torch.zeros(4), rate=value)
        else:
            MoE(6, 8, **SMALL, **{name: value})


def test_an_activation_in_a_list_is_refused():
    with pytest.raises(ValueError, match="activation=.'silu'. is unknown"):
        Experts(4, 6, 8, activation=["silu"])


@pytest.mark.parametrize(
    "x", [torch.ones(7, 5), torch.ones(6), torch.ones(2, 7, 6), torch.ones(7, 6, dtype=torch.long)]
)
def test_experts_and_router_refuse_another_x(x):
    rule = "x has dtype torch.int64, expected a floating-point type"
    if x.is_floating_point():
        rule = re.escape(f"x has shape {tuple(x.shape)}, expected (*, 6) = ")
    with pytest.raises(ValueError, match=rule):
        Experts(2, 6, 8)(x, torch.tensor([3, 4]))
    with pytest.raises(ValueError, match=rule):
        Router(6, 2, top_k=1)(x)


@pytest.mark.parametrize("counts", [[3, 2, 2], [7], [3.0, 4.0], [[3, 4]], [True, True]])
def test_experts_refuse_other_counts(counts):
    with pytest.raises(ValueError, match="counts has (shape|dtype)"):
        Experts(2, 6, 8)(torch.ones(7, 6), torch.tensor(counts))
    with pytest.raises(ValueError, match="counts is a list, expected a tensor"):
        Experts(2, 6, 8)(torch.ones(7, 6), counts)


def test_wrong_inputs():
    moe = MoE(6, 8, **SMALL)
    for x in (torch.randn(2, 5), torch.randn(())):
        with pytest.raises(ValueError, match=r"x has shape .*, expected \(\.\.\., 6\)"):
            moe(x)
    with pytest.raises(ValueError, match="x has dtype torch.int64, expected a floating-point type"):
        moe(torch.ones(2, 6, dtype=torch.long))
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(ValueError, match="convert one, or use torch.autocast"):
            moe(torch.randn(2, 6).to(dtype))


def test_it_prints_its_options():
    text = repr(MoE(6, 8, **SMALL))
    assert (
        "num_experts=4, top_k=2, norm_topk_prob=True" in text
        and "intermediate_size=8, activation=silu" in text
    )


# ---------------------------------------------------------------- compile, devices


def test_compiles_whole_and_trains_the_same():
    torch.manual_seed(0)
    moe = random_moe(6, 10, **SMALL, shared_expert_intermediate_size=4, router_z_loss_coef=0.1)
    compiled = torch.compile(moe, fullgraph=True, dynamic=False)
    probe = torch.randn(2, 9, 6)
    for _ in range(2):  # other tokens, other loads, the same program
        x = torch.randn(2, 9, 6)
        results = []
        for layer in (moe, compiled):
            moe.zero_grad()
            inputs = x.clone().requires_grad_()
            y, stats = layer(inputs)
            ((y * probe).sum() + stats.aux_loss).backward()
            results.append(
                [
                    y,
                    stats.aux_loss,
                    stats.tokens_per_expert,
                    inputs.grad,
                    *(p.grad.clone() for p in moe.parameters()),
                ]
            )
        assert_close(*results, atol=1e-4, rtol=1e-4)


ACCELERATED = torch.cuda.is_available() or torch.backends.mps.is_available()


@pytest.mark.skipif(not ACCELERATED, reason="needs an accelerator")
def test_an_accelerator_agrees_with_the_cpu():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "mps"
    moe = random_moe(16, 24, **SMALL, shared_expert_intermediate_size=8)
    x = torch.randn(3, 11, 16)
    there = copy.deepcopy(moe).to(device)
    for layer, inputs in ((moe, x), (there, x.to(device))):
        y, stats = layer(inputs)
        (y.square().sum() + stats.aux_loss).backward()
    assert_close(there(x.to(device))[0].cpu(), moe(x)[0], atol=1e-4, rtol=1e-3)
    for ours, theirs in zip(moe.parameters(), there.parameters(), strict=True):
        assert_close(theirs.grad.cpu(), ours.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
        ),
    ],
)
def test_one_kernel_for_all_blocks_equals_the_loop(device, monkeypatch):
    x = torch.randn(37, 16, device=device, dtype=torch.bfloat16)
    weight = torch.randn(6, 24, 16, device=device)
    counts = torch.tensor([0, 5, 0, 7, 25, 0], device=device)
    probe = torch.randn(37, 24, device=device, dtype=torch.bfloat16)
    if device == "cpu":  # there nothing else calls it
        monkeypatch.setattr(kernel, "fits_grouped_mm", lambda x, *sizes: True)
    assert kernel.fits_grouped_mm(x, 24, 16)
    found, wanted = (
        product_and_gradients(product, x.to(dtype), weight, counts, probe.to(dtype))
        for product, dtype in ((grouped_linear, x.dtype), (linear_by_expert, torch.float32))
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one.float(), other, atol=0.2, rtol=2e-2)
    assert not found[2][counts == 0].any()  # zeros for an idle expert, not what lay there


def product_and_gradients(product, x, weight, counts, probe):
    inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = product(*inputs, counts)
    return y, *torch.autograd.grad(y, inputs, probe)


@pytest.mark.parametrize(
    "x, sizes",
    [
        (torch.ones(3, 16, dtype=torch.bfloat16), (24, 16)),  # on a CPU
        (torch.ones(3, 16, dtype=torch.bfloat16, device="meta"), (24, 16)),
    ],
)
def test_elsewhere_each_block_is_a_product(x, sizes):
    assert not fits_grouped_mm(x, *sizes)


# ---------------------------------------------------------------- what the page plots


def test_the_recorded_runs_are_those_of_the_plan():
    from llm_course.pages import experts

    recorded = [(run["name"], run["seed"], run["rate"]) for run in experts.recorded()]
    assert recorded == experts.planned_runs()
    for run in experts.recorded():
        assert len(run["losses"]) == experts.STEPS // experts.EVERY
        loads = torch.tensor(run["loads"])
        if run["name"] not in experts.PLAIN:
            assert_close(loads.sum(-1), torch.ones(len(loads)), atol=0.01, rtol=0)

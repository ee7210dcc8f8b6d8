"""The MLP at its edges: odd sizes, every float type, wrong inputs, and Hugging Face's layers as the
oracle.
"""

import copy
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from llm_course.model.mlp import MLP

os.environ["HF_HUB_OFFLINE"] = "1"
BENDS = {
    "silu": lambda z: z / (1 + math.exp(-z)),
    "gelu": lambda z: z * 0.5 * (1 + math.erf(z / math.sqrt(2))),
    "gelu_tanh": (
        lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    ),
    "relu": lambda z: max(z, 0.0),
}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
GATED = pytest.mark.parametrize("use_glu", [True, False])


def random_mlp(*sizes, scale=1.0, **options):
    """An MLP whose weights are large enough to tell the bends apart, and whose biases are not 0."""
    mlp = MLP(*sizes, **options)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(std=scale)
    return mlp


def by_definition(mlp, x):
    """One token and one neuron at a time, in Python's floats."""
    bend = BENDS[mlp.activation]

    def match(linear, neuron, token):
        bias = 0.0 if linear.bias is None else linear.bias[neuron].item()
        return (
            math.fsum(w * t for w, t in zip(linear.weight[neuron].tolist(), token, strict=True))
            + bias
        )

    rows = []
    for token in x.reshape(-1, x.shape[-1]).tolist():
        out = [0.0] * len(token) if mlp.down_proj.bias is None else mlp.down_proj.bias.tolist()
        for neuron in range(mlp.up_proj.out_features):
            up = match(mlp.up_proj, neuron, token)
            strength = (
                bend(up)
                if mlp.gate_proj is None
                else bend(match(mlp.gate_proj, neuron, token)) * up
            )
            value = mlp.down_proj.weight[:, neuron].tolist()
            out = [o + strength * v for o, v in zip(out, value, strict=True)]
        rows.append(out)
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    C=st.integers(1, 6),
    neurons=st.integers(1, 9),
    use_glu=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from([None, *BENDS]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(shape, C, neurons, use_glu, bias, activation, seed):
    torch.manual_seed(seed)
    mlp = random_mlp(C, neurons, use_glu=use_glu, bias=bias, activation=activation)
    assert mlp.activation == (activation or ("silu" if use_glu else "gelu_tanh"))
    x = torch.randn(*shape, C)
    assert_close(mlp(x), by_definition(mlp, x).float(), atol=1e-5, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(T=st.integers(1, 9), C=st.integers(1, 9), use_glu=st.booleans(), seed=st.integers(0, 99))
def test_each_token_alone(T, C, use_glu, seed):
    torch.manual_seed(seed)
    mlp = random_mlp(C, 2 * C, use_glu=use_glu)
    x = torch.randn(1, T, C)
    order = torch.randperm(T)
    assert_close(mlp(x[:, order]), mlp(x)[:, order], atol=1e-5, rtol=1e-5)
    changed = x.clone()
    changed[0, T // 2] = math.nan  # nothing of it may reach another token
    spoiled = mlp(changed).isnan().any(-1)[0]
    assert spoiled.nonzero().flatten().tolist() == [T // 2]


@settings(max_examples=10, deadline=None)
@given(C=st.integers(1, 40), neurons=st.integers(1, 40), use_glu=st.booleans(), bias=st.booleans())
def test_parameters_and_operations_follow_the_formula(C, neurons, use_glu, bias):
    mlp = MLP(C, neurons, use_glu=use_glu, bias=bias)
    weights = (3 if use_glu else 2) * C * neurons
    biases = (neurons * (2 if use_glu else 1) + C) if bias else 0
    assert sum(p.numel() for p in mlp.parameters()) == weights + biases
    with FlopCounterMode(display=False) as counter:
        mlp(torch.randn(3, 5, C))
    assert counter.get_total_flops() == 2 * weights * 15


def test_two_thirds_of_the_neurons_cost_the_same():
    count = lambda **sizes: sum(p.numel() for p in MLP(**sizes).parameters())  # noqa: E731
    for C in (3, 48, 96):
        gated = count(hidden_size=C, intermediate_size=8 * C // 3)
        assert gated == count(hidden_size=C, intermediate_size=4 * C, use_glu=False)


# ---------------------------------------------------------------- Hugging Face


def test_equals_llama_and_gemma():
    from transformers import GemmaConfig, LlamaConfig
    from transformers.models.gemma.modeling_gemma import GemmaMLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    x = torch.randn(2, 5, 12) * 2
    sizes = dict(hidden_size=12, intermediate_size=20, num_attention_heads=2)
    llama = LlamaMLP(LlamaConfig(**sizes, mlp_bias=True))
    gemma = GemmaMLP(GemmaConfig(**sizes, hidden_act="gelu_pytorch_tanh"))
    cases = (
        (random_mlp(12, 20, bias=True), llama),
        (random_mlp(12, 20, activation="gelu_tanh"), gemma),
    )
    for ours, theirs in cases:
        theirs.load_state_dict(ours.state_dict())  # the names are the same
        assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    ours = random_mlp(12, 20, activation="gelu_tanh")
    llama_without_bias = LlamaMLP(LlamaConfig(**sizes))
    llama_without_bias.load_state_dict(ours.state_dict())
    with pytest.raises(AssertionError):  # the wrong bend under the right weights
        assert_close(ours(x), llama_without_bias(x), atol=1e-5, rtol=1e-5)


def test_equals_gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    torch.manual_seed(0)
    x = torch.randn(2, 5, 12) * 2
    theirs = GPT2MLP(48, GPT2Config(n_embd=12)).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = MLP(12, 48, use_glu=False, bias=True)
    ours.load_state_dict(
        {  # Conv1D keeps its weights as (in, out)
            "up_proj.weight": theirs.c_fc.weight.T,
            "up_proj.bias": theirs.c_fc.bias,
            "down_proj.weight": theirs.c_proj.weight.T,
            "down_proj.bias": theirs.c_proj.bias,
        }
    )
    assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    exact = MLP(12, 48, use_glu=False, bias=True, activation="gelu")
    exact.load_state_dict(ours.state_dict())
    with pytest.raises(AssertionError):  # the other GELU
        assert_close(exact(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_the_published_totals_of_the_chapter():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    llama_2 = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
    )
    llama_3 = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        models = GPT2LMHeadModel(GPT2Config()), LlamaForCausalLM(llama_2), LlamaForCausalLM(llama_3)
    totals = [sum(p.numel() for p in model.parameters()) for model in models]
    assert totals == [124_439_808, 6_738_415_616, 8_030_261_248]
    in_mlps = [
        sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)
        for model in models
    ]
    assert [round(part / total, 2) for part, total in zip(in_mlps, totals, strict=True)] == [
        0.46,
        0.64,
        0.70,
    ]


# ---------------------------------------------------------------- edges


@GATED
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_types(use_glu, dtype):
    torch.manual_seed(0)
    mlp = random_mlp(6, 10, use_glu=use_glu, bias=True, scale=0.5)
    x = torch.randn(3, 6)
    expected = by_definition(mlp, x)
    low = copy.deepcopy(mlp).to(dtype)
    inputs = x.to(dtype).requires_grad_()
    y = low(inputs)
    y.sum().backward()
    assert y.dtype == inputs.grad.dtype == dtype and inputs.grad.isfinite().all()
    tolerance = {torch.float16: 2e-2, torch.bfloat16: 2e-1}.get(dtype, 1e-5)
    assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


@GATED
def test_autocast(use_glu):
    mlp = random_mlp(8, 16, use_glu=use_glu, scale=0.3)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), mlp(x), atol=5e-2, rtol=5e-2)


@GATED
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
def test_gradcheck(use_glu, activation):
    torch.manual_seed(0)
    mlp = random_mlp(3, 5, use_glu=use_glu, bias=True, activation=activation).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mlp, x)
    names, values = zip(*mlp.named_parameters(), strict=True)

    def by_parameters(*new):
        return torch.func.functional_call(mlp, dict(zip(names, new, strict=True)), x.detach())

    assert torch.autograd.gradcheck(by_parameters, values)
    cut = lambda x: mlp(x.detach()) + 0 * x.sum()  # noqa: E731
    assert not torch.autograd.gradcheck(cut, x, raise_exception=False)  # the check can fail


@GATED
def test_edges(use_glu):
    mlp = random_mlp(6, 10, use_glu=use_glu)
    x = torch.randn(4, 6)
    assert mlp(torch.empty(0, 6)).shape == (0, 6)
    assert mlp(torch.empty(2, 0, 6)).shape == (2, 0, 6)
    assert_close(mlp(x[1]), mlp(x)[1])  # one token, no batch
    assert_close(mlp(x.T.contiguous().T), mlp(x))  # not contiguous
    assert_close(mlp(torch.stack((x, x), -1)[..., 0]), mlp(x))
    assert_close(mlp(torch.zeros(2, 6)), torch.zeros(2, 6))  # no bias: nothing in, nothing out
    one = random_mlp(1, 1, use_glu=use_glu)
    assert_close(one(x[:, :1]), by_definition(one, x[:, :1]).float(), atol=1e-5, rtol=1e-5)
    empty = torch.empty(0, 6, requires_grad=True)
    mlp(empty).sum().backward()
    assert empty.grad.shape == (0, 6) and all(p.grad.abs().sum() == 0 for p in mlp.parameters())


def test_two_gated_neurons_multiply_exactly():
    multiply = MLP(2, 2).double()
    gate = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    up = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    multiply.load_state_dict(
        {
            "gate_proj.weight": gate,
            "up_proj.weight": up,
            "down_proj.weight": torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
        }
    )
    pairs = torch.randn(50, 2, dtype=torch.float64) * 10
    assert_close(multiply(pairs)[:, 0], pairs.prod(-1))


def test_four_plain_neurons_multiply_at_a_price():
    """GELU(su) + GELU(-su) is about s^2 u^2 sqrt(2 / pi): small keys, and huge values."""
    plain = MLP(2, 4, use_glu=False, activation="gelu").double()
    pairs = 3 * torch.randn(100, 2, generator=torch.Generator().manual_seed(0)).double()
    reads = torch.tensor([[1.0, 1], [-1, -1], [1, -1], [-1, 1]]).double()
    errors = []
    for size in (0.1, 0.01, 0.001):
        value = 1 / (4 * size**2 * math.sqrt(2 / math.pi))
        with torch.no_grad():
            plain.up_proj.weight.copy_(size * reads)
            plain.down_proj.weight.zero_()
            plain.down_proj.weight[0] = value * torch.tensor([1.0, 1, -1, -1])
            errors.append((plain(pairs)[:, 0] - pairs.prod(-1)).abs().max().item())
    assert errors[0] > 10 * errors[1] > 100 * errors[2] and errors[2] < 1e-2
    assert value > torch.finfo(torch.float16).max


def test_dropout_acts_on_the_output_and_in_training_only():
    torch.manual_seed(0)
    mlp = random_mlp(8, 16, dropout=0.5, scale=0.3)
    x = torch.randn(1, 8).expand(4000, 8)  # one token, many times
    with torch.no_grad():
        dropped = mlp(x)
        whole = mlp.eval()(x)
    kept = dropped != 0
    assert abs(kept.float().mean() - 0.5) < 0.02
    # a number is 0, or the whole output doubled: nothing inside was dropped
    assert_close(dropped[kept], 2 * whole[kept])
    assert_close(dropped.mean(0), whole[0], atol=0.1, rtol=0.1)
    silent = MLP(8, 16)
    assert torch.equal(silent.train()(x[:2]), silent.eval()(x[:2]))


@pytest.mark.parametrize("size", [0, -3, 2.0, "8", None, True])
@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_wrong_sizes(name, size):
    with pytest.raises(ValueError, match=f"{name}={size!r} must be a whole number of at least 1"):
        MLP(**{"hidden_size": 4, "intermediate_size": 4} | {name: size})


def test_sizes_from_numpy():
    assert MLP(np.int64(4), np.int32(8))(torch.randn(2, 4)).shape == (2, 4)


@GATED
def test_projections_can_be_wrapped(use_glu):
    """As adapters do, which add to a frozen projection and have no `in_features`."""

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    mlp = random_mlp(4, 6, use_glu=use_glu)
    x = torch.randn(2, 4)
    expected = mlp(x)
    for name in ("up_proj", "down_proj", *(["gate_proj"] if use_glu else [])):
        setattr(mlp, name, Wrapper(getattr(mlp, name)))
    assert torch.equal(mlp(x), expected)
    with pytest.raises(ValueError, match=r"expected \(\.\.\., 4\) = \(\.\.\., C\)"):
        mlp(torch.randn(2, 5))


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5, math.nan])
def test_wrong_dropout(dropout):
    with pytest.raises(ValueError, match=f"dropout={dropout} must be at least 0 and below 1"):
        MLP(4, 8, dropout=dropout)


@pytest.mark.parametrize("activation", ["swish", "", "SiLU"])
def test_wrong_activation(activation):
    with pytest.raises(ValueError, match="one of 'silu', 'gelu', 'gelu_tanh', 'relu', or None"):
        MLP(4, 8, activation=activation)


@GATED
@pytest.mark.parametrize("shape", [(2, 5), (4, 1), (4,)[:0], (0, 5)])
def test_wrong_last_dimension(use_glu, shape):
    with pytest.raises(ValueError, match=r"expected \(\.\.\., 4\)"):
        MLP(4, 8, use_glu=use_glu)(torch.randn(shape))


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", None])
def test_swiglu_differentiates_as_pytorch_does(frozen):
    torch.manual_seed(0)
    mlp = random_mlp(6, 10, use_glu=True).double()
    if frozen:
        getattr(mlp, frozen).requires_grad_(False)
    trained = [p for p in mlp.parameters() if p.requires_grad]
    x = torch.randn(4, 6, dtype=torch.float64)
    # a gradient that is not contiguous
    direction = torch.randn(3, 4, dtype=torch.float64).T[:, [0, 1, 2, 0, 1, 2]]

    def derivatives(y: torch.Tensor) -> list[torch.Tensor]:
        first = torch.autograd.grad(y, trained, direction, create_graph=True)
        return [*first, *torch.autograd.grad(sum(d.square().sum() for d in first), trained)]

    expected = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert_close(derivatives(mlp(x)), derivatives(expected))


@GATED
def test_compiles_without_a_graph_break(use_glu):
    torch.manual_seed(0)
    mlp = random_mlp(6, 10, use_glu=use_glu)
    compiled = torch.compile(mlp, fullgraph=True, backend="eager")
    for tokens in (3, 4, 5):  # a changing length too
        x = torch.randn(2, tokens, 6)
        assert_close(compiled(x), mlp(x))


def test_repr_names_the_bend():
    assert "activation=silu" in repr(MLP(4, 8)) and "activation=gelu_tanh" in repr(
        MLP(4, 8, use_glu=False)
    )


# ---------------------------------------------------------------- the checks can fail

MISTAKES = {
    "gate and up exchanged": lambda m, x: m.down_proj(m.gate_proj(x) * F.silu(m.up_proj(x))),
    "sigmoid as the bend": lambda m, x: m.down_proj(m.gate_proj(x).sigmoid() * m.up_proj(x)),
    "GELU as the bend": lambda m, x: m.down_proj(F.gelu(m.gate_proj(x)) * m.up_proj(x)),
    "bend after the product": lambda m, x: m.down_proj(F.silu(m.gate_proj(x) * m.up_proj(x))),
    "no bend": lambda m, x: m.down_proj(m.gate_proj(x) * m.up_proj(x)),
    "no gate": lambda m, x: m.down_proj(F.silu(m.up_proj(x))),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_differ_from_the_definition(name):
    torch.manual_seed(0)
    mlp = random_mlp(4, 6)
    x = torch.randn(3, 4)
    assert_close(mlp(x), by_definition(mlp, x).float(), atol=1e-5, rtol=1e-4)
    with pytest.raises(AssertionError):
        assert_close(MISTAKES[name](mlp, x), by_definition(mlp, x).float(), atol=1e-5, rtol=1e-4)

"""Normalization at its edges: odd sizes, every float type, wrong inputs, and Hugging Face's layers
as the oracle.
"""

import copy
import math
import os
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from llm_course.model.normalization import LayerNorm, RMSNorm

os.environ["HF_HUB_OFFLINE"] = "1"
HALF = [torch.float16, torch.bfloat16]
FLOATS = [*HALF, torch.float32, torch.float64]
BOTH = pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])


def random_norm(norm_class, hidden_size, **options):
    """A layer whose weight (and bias) are not the ones and zeros that would hide a mistake."""
    layer = norm_class(hidden_size, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 2.0)
    return layer


def by_definition(layer, x):
    """One vector at a time, in Python's floats (float64)."""
    weight = layer.weight.tolist()
    bias = getattr(layer, "bias", None)
    bias = [0.0] * len(weight) if bias is None else bias.tolist()
    result = []
    for row in x.reshape(-1, len(weight)).tolist():
        if isinstance(layer, LayerNorm):
            mean = math.fsum(row) / len(row)
            row = [number - mean for number in row]
        root = math.sqrt(math.fsum(number**2 for number in row) / len(row) + layer.eps)
        result.append(
            [w * number / root + b for w, number, b in zip(weight, row, bias, strict=True)]
        )
    return torch.tensor(result, dtype=torch.float64).view(x.shape)


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    C=st.integers(1, 9),
    eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(norm_class, shape, C, eps, scale, dtype, seed):
    torch.manual_seed(seed)
    layer = random_norm(norm_class, C, eps=eps)
    x = (torch.randn(*shape, C) * scale).to(dtype)
    # for half types those of the rounded result
    tolerance = {} if dtype in HALF else {"atol": 1e-5, "rtol": 1e-5}
    assert_close(layer(x), by_definition(layer, x).to(dtype), **tolerance)


@BOTH
@settings(max_examples=30, deadline=None)
@given(C=st.integers(2, 40), factor=st.floats(0.5, 1e3), seed=st.integers(0, 99))
def test_scale_and_sign(norm_class, C, factor, seed):
    layer = norm_class(C, eps=1e-12)
    x = torch.randn(3, C, generator=torch.Generator().manual_seed(seed)).double()
    assert_close(layer(x * factor), layer(x), atol=1e-6, rtol=1e-6)
    assert_close(layer(-x), -layer(x))
    assert_close(
        layer(x).norm(dim=-1), torch.full((3,), C**0.5, dtype=torch.float64), atol=1e-5, rtol=1e-5
    )


@settings(max_examples=30, deadline=None)
@given(C=st.integers(2, 40), shift=st.floats(-10, 10), seed=st.integers(0, 99))
def test_layer_norm_is_rms_norm_of_what_is_left_without_the_mean(C, shift, seed):
    x = torch.randn(3, C, generator=torch.Generator().manual_seed(seed)).double()
    layer = LayerNorm(C, eps=1e-6)
    rms = RMSNorm(C)
    assert_close(layer(x + shift), layer(x))
    assert_close(layer(x), rms(x - x.mean(-1, keepdim=True)))
    assert abs(shift) < 0.1 or not torch.allclose(rms(x + shift), rms(x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1000.0])
def test_equals_pytorch(dtype, scale):
    torch.manual_seed(0)
    x = (torch.randn(3, 5, 33) * scale).to(dtype)
    rms = random_norm(RMSNorm, 33)
    layer = random_norm(LayerNorm, 33)
    plain = random_norm(LayerNorm, 33, bias=False)
    wide = x.double()
    assert_close(rms(x), F.rms_norm(wide, (33,), rms.weight.double(), 1e-6).to(dtype))
    assert_close(
        layer(x),
        F.layer_norm(wide, (33,), layer.weight.double(), layer.bias.double(), 1e-5).to(dtype),
    )
    assert_close(plain(x), F.layer_norm(wide, (33,), plain.weight.double(), None, 1e-5).to(dtype))


def test_state_dicts_are_those_of_pytorch():
    for ours, theirs in (
        (RMSNorm(8), nn.RMSNorm(8, eps=1e-6)),
        (LayerNorm(8), nn.LayerNorm(8)),
        (LayerNorm(8, bias=False), nn.LayerNorm(8, bias=False)),
    ):
        assert list(ours.state_dict()) == list(theirs.state_dict())
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.uniform_(0.5, 2.0)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(4, 8)
        assert_close(ours(x), theirs(x))
    assert "eps=1e-06" in repr(RMSNorm(8)) and "bias=False" in repr(LayerNorm(8, bias=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_hugging_face(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    ours = random_norm(RMSNorm, 64, eps=1e-5).to(dtype)
    theirs = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    x = (torch.randn(2, 7, 64) * 3).to(dtype)
    if dtype == torch.float32:
        assert_close(ours(x), theirs(x))
        with pytest.raises(AssertionError):  # the epsilon of another model, on small vectors
            assert_close(random_norm(RMSNorm, 64, eps=1e-6)(x * 1e-3), theirs(x * 1e-3))
        return
    exact = F.rms_norm(x.double(), (64,), ours.weight.double(), 1e-5)
    errors = [((layer(x).double() - exact) / exact).abs() for layer in (ours, theirs)]
    assert errors[0].max() <= 1.01 * 2**-8  # one rounding to bfloat16
    assert errors[1].max() <= 2.02 * 2**-8  # theirs rounds before and after the weight
    assert errors[0].mean() < errors[1].mean()


# ---------------------------------------------------------------- types and ranges


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_the_type_of_the_input_is_kept(norm_class, dtype, weight_dtype):
    layer = norm_class(6).to(weight_dtype)
    x = torch.randn(2, 6).to(dtype).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.dtype == dtype and x.grad.dtype == dtype and layer.weight.grad.dtype == weight_dtype
    assert y.isfinite().all() and x.grad.isfinite().all()


@BOTH
@pytest.mark.parametrize("dtype", HALF)
def test_squares_beyond_float16_do_not_overflow(norm_class, dtype):
    x = torch.tensor([[-30000.0, 30000.0, 300.0, -300.0]], dtype=dtype)
    y = norm_class(4)(x)
    assert_close(y.float(), F.rms_norm(x.double(), (4,), eps=1e-6).float(), atol=1e-2, rtol=1e-2)


@BOTH
def test_many_numbers_in_bfloat16(norm_class):
    # a running sum in bfloat16 would stall at 256
    x = torch.cat((torch.ones(8192), -torch.ones(8192))).bfloat16()
    assert norm_class(16384)(x).abs().unique().tolist() == [1.0]


@BOTH
@pytest.mark.parametrize("dtype", HALF)
def test_half_weights_and_half_input_are_computed_in_float32(norm_class, dtype):
    torch.manual_seed(0)
    layer = random_norm(norm_class, 64).to(dtype)
    wide = copy.deepcopy(layer).double()
    x, up = (torch.randn(2, 32, 64) * 3).to(dtype)
    gradients = []
    for z, norm, g in ((x.clone(), layer, up), (x.double(), wide, up.double())):
        gradients += torch.autograd.grad(norm(z.requires_grad_()), z, g)
    assert_close(layer(x), wide(x.double()).to(dtype))
    unit = torch.finfo(dtype).eps * gradients[1].abs().mean()
    # with a rounded root it is 0.24 to 0.28
    assert (gradients[0] - gradients[1]).abs().mean() < 0.21 * unit


@BOTH
def test_autocast_computes_and_returns_the_input_type(norm_class):
    torch.manual_seed(0)
    layer = random_norm(norm_class, 32)
    x = torch.randn(4, 32) * 300
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(layer(x), by_definition(layer, x).float(), atol=1e-5, rtol=1e-5)
        assert layer(x.bfloat16()).dtype == torch.bfloat16


@BOTH
def test_gradcheck(norm_class):
    torch.manual_seed(0)
    layer = random_norm(norm_class, 5).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    names, values = zip(*layer.named_parameters(), strict=True)

    def by_parameters(*new):
        return torch.func.functional_call(layer, dict(zip(names, new, strict=True)), x.detach())

    assert torch.autograd.gradcheck(by_parameters, values)
    through_float32 = lambda x: layer.float()(x.float()).double()  # noqa: E731
    # the planted mistake
    assert not torch.autograd.gradcheck(through_float32, x, raise_exception=False)


@BOTH
def test_gradient_is_at_a_right_angle_and_halves_when_the_input_doubles(norm_class):
    torch.manual_seed(0)
    layer = norm_class(16, eps=1e-12).double()
    direction = torch.randn(16, dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    gradients = []
    for factor in (1.0, 2.0):
        scaled = (factor * x).requires_grad_()
        (layer(scaled) @ direction).sum().backward()
        gradients.append(scaled.grad)
    assert (gradients[0] * x).sum(-1).abs().max() < 1e-9
    assert_close(gradients[0], 2 * gradients[1])


# ---------------------------------------------------------------- edges


@BOTH
def test_edges(norm_class):
    layer = random_norm(norm_class, 6)
    x = torch.randn(4, 6)
    assert layer(torch.empty(0, 6)).shape == (0, 6)
    assert layer(torch.empty(2, 0, 6)).shape == (2, 0, 6)
    assert_close(layer(x[1]), layer(x)[1])  # one vector, no batch
    assert_close(layer(torch.stack((x, x), -1)[..., 0]), layer(x))  # not contiguous
    assert_close(layer(x.T.contiguous().T), layer(x))
    assert_close(layer(x[:1].expand(3, 6)), layer(x)[:1].expand(3, 6))
    bias = getattr(layer, "bias", None)
    at_rest = torch.zeros(6) if bias is None else bias
    assert_close(layer(torch.zeros(6)), at_rest)
    empty = torch.empty(0, 6, requires_grad=True)
    layer(empty).sum().backward()
    assert empty.grad.shape == (0, 6) and layer.weight.grad.abs().sum() == 0
    nothing = torch.zeros(6, requires_grad=True)
    layer(nothing).sum().backward()
    assert nothing.grad.isfinite().all()


def test_one_number():
    x = torch.tensor([[3.0], [-0.5], [0.0]])
    assert_close(RMSNorm(1, eps=1e-12)(x), x.sign())
    layer = random_norm(LayerNorm, 1)
    assert_close(layer(x), layer.bias.expand(3, 1))  # the mean of one number is the number


@BOTH
def test_each_vector_is_normalised_alone(norm_class):
    torch.manual_seed(0)
    layer = random_norm(norm_class, 8)
    x = torch.randn(2, 5, 8)
    changed = x.clone()
    changed[0, 3] = torch.randn(8) * 100
    moved = (layer(changed) != layer(x)).any(-1)
    assert moved.nonzero().tolist() == [[0, 3]]
    assert torch.equal(layer(x), layer.eval()(x))
    bad = x.clone()
    bad[1, 2, 0] = math.nan  # NaN and infinity stay in their own vector, and are not hidden
    bad[0, 0, 1] = math.inf
    finite = layer(bad).isfinite().all(-1)
    assert (~finite).nonzero().tolist() == [[0, 0], [1, 2]]


@BOTH
@pytest.mark.parametrize("size", [0, -1, 2.0, "4", None, True, np.float32(4)])
def test_wrong_sizes(norm_class, size):
    with pytest.raises(
        ValueError,
        match=f"hidden_size={re.escape(repr(size))} must be a whole number of at least 1",
    ):
        norm_class(size)


@BOTH
def test_sizes_from_numpy(norm_class):
    assert norm_class(np.int64(4))(torch.randn(2, 4)).shape == (2, 4)


@BOTH
def test_a_layer_made_on_meta_can_be_filled(norm_class):
    with torch.device("meta"):
        layer = norm_class(4)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(math.nan)  # what lies in empty memory
    layer.reset_parameters()
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), norm_class(4)(x))


@BOTH
@pytest.mark.parametrize("eps", [0.0, -1e-6, math.nan, math.inf, 1e-50, 1e39])
def test_wrong_eps(norm_class, eps):
    with pytest.raises(
        ValueError, match=re.escape(f"eps={eps} must be positive and finite in float32")
    ):
        norm_class(4, eps=eps)


@BOTH
@pytest.mark.parametrize(
    "x, words",
    [
        (torch.randn(2, 5), r"\(2, 5\), expected \(\.\.\., 4\)"),
        (torch.randn(4, 1), r"\(4, 1\), expected"),  # would broadcast
        (torch.tensor(1.0), r"\(\), expected"),
        (torch.ones(2, 4, dtype=torch.long), "int64, expected a floating-point type"),
        (torch.ones(4, dtype=torch.bool), "bool, expected a floating-point type"),
        (torch.ones(4, dtype=torch.complex64), "complex64, expected a floating-point type"),
    ],
)
def test_wrong_input(norm_class, x, words):
    with pytest.raises(ValueError, match=words):
        norm_class(4)(x)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_without_a_graph_break(norm_class, dtype):
    torch.manual_seed(0)
    layer = random_norm(norm_class, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for tokens in (3, 4, 5):  # a changing length too
        x = torch.randn(2, tokens, 12).to(dtype)
        assert_close(compiled(x), layer(x))
    # a planted break is seen
    with pytest.raises(Exception, match="graph break|data-dependent|Unsupported"):
        torch.compile(lambda x: layer(x) if x.sum() > 0 else x, fullgraph=True, backend="eager")(x)


# ---------------------------------------------------------------- the checks can fail

MISTAKES = {
    "epsilon outside the root": (
        lambda x, w: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w
    ),
    "sum instead of mean": lambda x, w: x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() * w,
    "weight forgotten": lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(),
    "mean over the batch": lambda x, w: x / (x.pow(2).mean(0, keepdim=True) + 1e-6).sqrt() * w,
    "variance instead of mean square": (
        lambda x, w: x / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt() * w
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_differ_from_the_definition(name):
    torch.manual_seed(0)
    layer = random_norm(RMSNorm, 5)
    x = torch.randn(4, 5) * 1e-3
    assert_close(layer(x), by_definition(layer, x).float(), atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_close(
            MISTAKES[name](x, layer.weight), by_definition(layer, x).float(), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("correction, eps", [(1, 1e-5), (0, 1e-6)])
def test_planted_variances_differ_from_layer_norm(correction, eps):
    torch.manual_seed(0)
    layer = random_norm(LayerNorm, 5)
    x = torch.randn(4, 5) * 1e-3
    wrong = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, keepdim=True, correction=correction) + eps
    ).sqrt()
    with pytest.raises(AssertionError):
        assert_close(
            wrong * layer.weight + layer.bias, by_definition(layer, x).float(), atol=1e-4, rtol=1e-4
        )

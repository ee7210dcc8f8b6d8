"""The linear layer: everywhere what `nn.Linear` gives, and the fast way only where it belongs."""

import copy
import runpy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from llm_course import hardware
from llm_course.model.kernels import linear as kernels
from llm_course.model.linear import Linear


def pair(inputs, outputs, *, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    oracle = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    ours = Linear(inputs, outputs, bias=bias).to(dtype)
    ours.load_state_dict(oracle.state_dict())
    return ours, oracle


@pytest.fixture
def products(monkeypatch):
    """The shapes that `torch.bmm` has been called with, on a processor where the parts pay."""
    shapes = []
    real = torch.bmm
    monkeypatch.setattr(kernels, "parts_pay", lambda: True)
    monkeypatch.setattr(
        torch, "bmm", lambda a, b: shapes.append((*a.shape, b.shape[2])) or real(a, b)
    )
    return shapes


@settings(deadline=None, max_examples=60)
@given(
    inputs=st.integers(1, 33),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    in_parts=st.booleans(),
)
def test_it_is_nn_linear(inputs, outputs, bias, shape, dtype, in_parts):
    ours, oracle = pair(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(*shape, inputs).to(dtype)
    with torch.no_grad(), patch.object(kernels, "parts_pay", lambda: in_parts):
        y = ours(x)
        wanted = oracle(x)
    assert (
        y.dtype == wanted.dtype
        and y.shape == wanted.shape
        and y.is_contiguous() == wanted.is_contiguous()
    )
    assert_close(
        y,
        wanted,
        rtol=1e-5 if dtype != torch.bfloat16 else 2e-2,
        atol=1e-5 if dtype != torch.bfloat16 else 2e-2,
    )


@pytest.mark.parametrize("rows, parts", [(1, True), (4, True), (5, False)])
def test_few_rows_go_in_parts(products, rows, parts):
    ours, oracle = pair(12, 24)
    x = torch.randn(rows, 12)
    with torch.no_grad():
        assert_close(ours(x), oracle(x))
    assert products == ([(8, 3, 12, rows)] if parts else [])


@pytest.mark.parametrize(
    "maker, mkl, parts",
    [("AuthenticAMD", True, True), ("AuthenticAMD", False, False), ("GenuineIntel", True, False)],
)
def test_parts_are_for_the_processors_on_which_they_pay(monkeypatch, maker, mkl, parts):
    monkeypatch.setattr(Path, "read_text", lambda path, **options: f"vendor_id : {maker}")
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    hardware_asked = runpy.run_module(hardware.__name__)["cpu_is_amd"]
    monkeypatch.setattr(kernels, "cpu_is_amd", hardware_asked)
    kernels._ask_for_mkl_on_amd.cache_clear()
    assert kernels.parts_pay() is parts
    kernels._ask_for_mkl_on_amd.cache_clear()


def test_elsewhere_it_leaves_the_work_to_pytorch(products):
    ours, oracle = pair(12, 24)
    x = torch.randn(2, 12, requires_grad=True)
    ours(x).sum().backward()  # with gradients
    assert_close(ours.weight.grad, torch.autograd.grad(oracle(x).sum(), oracle.weight)[0])
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(x).dtype == torch.bfloat16
        transposed = copy.deepcopy(ours)
        transposed.weight = nn.Parameter(ours.weight.detach().T.contiguous().T)  # stored by columns
        assert_close(transposed(x), oracle(x))
        assert pair(12, 7)[0](x).shape == (2, 7)  # seven outputs cannot be cut
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ours(torch.randn(2, 11))
        with pytest.raises(ValueError, match="x is torch.bfloat16 and the weights are "):
            ours(x.bfloat16())
    assert products == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_compiled(rows, dtype):
    ours, oracle = pair(32, 48, dtype=dtype)
    x = torch.randn(rows, 1, 32).to(dtype)
    with torch.no_grad():
        y = torch.compile(ours, fullgraph=True)(x)
        wanted = oracle(x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert y.dtype == dtype and y.shape == wanted.shape
    assert_close(y, wanted, rtol=tolerance, atol=tolerance)


def test_parts_give_the_same_numbers_with_any_number_of_threads(products):
    ours, _ = pair(64, 64)
    x = torch.randn(3, 64)
    threads = torch.get_num_threads()
    found = []
    with torch.no_grad():
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(ours(x))
    torch.set_num_threads(threads)
    assert torch.equal(*found) and len(products) == 2


@pytest.mark.parametrize(
    "wrong", [None, [[1.0]], torch.ones(2, 12).long(), torch.ones(2, 12).bool()]
)
def test_what_is_no_tensor_of_numbers_is_refused(wrong):
    with pytest.raises(ValueError, match="x (is a|has dtype)"):
        Linear(12, 4)(wrong)


def test_the_dtypes_are_compared_before_anything_is_computed():
    layer = Linear(12, 4)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.ones(2, 12, dtype=dtype)
        with pytest.raises(ValueError, match=f"x is {dtype} and the weights are torch.float32"):
            layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            if dtype == torch.float64:  # autocast leaves it alone
                with pytest.raises(ValueError, match="x is torch.float64"):
                    layer(x)
            else:
                assert layer(x).dtype == torch.bfloat16
    with torch.device("meta"):  # which has no autocast
        assert Linear(12, 4)(torch.ones(2, 12)).shape == (2, 4)
        with pytest.raises(ValueError, match="x is torch.float64"):
            Linear(12, 4)(torch.ones(2, 12, dtype=torch.float64))

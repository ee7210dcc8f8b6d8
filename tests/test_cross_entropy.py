"""The chunked loss at its edges: odd sizes, half precision, nothing to learn from, wrong inputs;
PyTorch's own is the oracle.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from llm_course.model.cross_entropy import linear_cross_entropy
from llm_course.model.kernels.cross_entropy import (
    cross_entropy_saved_bytes,
    cross_entropy_working_bytes,
    default_chunk_size,
    fused_loss_and_gradients,
    loss_and_gradients,
)
from llm_course.text.batches import IGNORE_INDEX


def example(shape=(7,), C=5, V=11, dtype=torch.float32, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, C, generator=g, dtype=dtype)
    weight = torch.randn(V, C, generator=g, dtype=dtype)
    labels = torch.randint(V, shape, generator=g)
    return hidden.to(device).requires_grad_(), weight.to(device).requires_grad_(), labels.to(device)


def oracle(hidden, weight, labels, softcap=None, z_loss_coef=0.0):
    logits = (hidden @ weight.T).flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    labels = labels.flatten()
    z = logits.logsumexp(-1)[labels != IGNORE_INDEX]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss if z_loss_coef is None else loss + z_loss_coef * z.square().sum()


def with_gradients(function, hidden, weight, labels, **options):
    loss = function(hidden, weight, labels, **options)
    return loss, *torch.autograd.grad(1.7 * loss, (hidden, weight))


# ---------------------------------------------------------------- equal to the oracle


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    C=st.integers(1, 6),
    V=st.integers(1, 13),
    chunk_size=st.integers(1, 40),
    ignored=st.floats(0, 1),
    softcap=st.sampled_from([None, 2.0]),
    z_loss_coef=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_equals_pytorch(shape, C, V, chunk_size, ignored, softcap, z_loss_coef, seed):
    hidden, weight, labels = example(shape, C, V, torch.float64, seed)
    labels[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < ignored] = (
        IGNORE_INDEX
    )
    options = dict(softcap=softcap, z_loss_coef=z_loss_coef)
    got = with_gradients(
        linear_cross_entropy, hidden, weight, labels, chunk_size=chunk_size, **options
    )
    assert_close(got, with_gradients(oracle, hidden, weight, labels, **options))


def test_gradcheck():
    hidden, weight, labels = example((11,), 6, 9, torch.float64)
    labels[3] = IGNORE_INDEX

    def function(h, w):
        return linear_cross_entropy(h, w, labels, softcap=5.0, z_loss_coef=0.1, chunk_size=4)

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("shift", [0.0, 1e3, -1e3, 1e15])
def test_any_size_of_logits(shift):
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).requires_grad_()
    hidden = torch.tensor([[shift, shift + 1]], requires_grad=True)
    for label in range(3):
        got = with_gradients(linear_cross_entropy, hidden, weight, torch.tensor([label]))
        assert_close(got, with_gradients(oracle, hidden, weight, torch.tensor([label])))


def test_without_a_z_loss_its_square_is_not_taken():
    """0 * inf is NaN: beyond 1e19 the square of the log-sum-exp overflows."""
    hidden, weight, labels = example()
    big = (hidden.detach() * 1e20).requires_grad_()
    got, expected = (
        with_gradients(f, big, weight, labels)
        for f in (linear_cross_entropy, lambda *a: oracle(*a, None, None))
    )
    assert_close(got, expected)


def test_large_logits_lose_no_digits():
    # lse - z would round to 3e-5
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[1000.0], [999.0]])
    got = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    assert_close(got, torch.tensor(math.log1p(math.exp(-1))), atol=1e-7, rtol=0)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype, tolerance):
    hidden, weight, labels = example((65,), 32, 301, torch.float64)
    labels[::4] = IGNORE_INDEX
    halves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
    loss, d_hidden, d_weight = with_gradients(
        linear_cross_entropy, *halves, labels, chunk_size=16, softcap=30.0
    )
    expected = with_gradients(
        oracle, *(t.detach().double().requires_grad_() for t in halves), labels, softcap=30.0
    )
    assert (loss.dtype, d_hidden.dtype, d_weight.dtype) == (torch.float32, dtype, dtype)
    for ours, theirs in zip((loss, d_hidden, d_weight), expected, strict=True):
        assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


def test_half_precision_adds_up_in_float32():
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.long)
    linear_cross_entropy(hidden, weight, labels, chunk_size=1).backward()
    # in bfloat16, 128 + 0.5 would stay 128
    assert_close(weight.grad.float(), torch.tensor([[-2048.0], [2048.0]]))


@pytest.mark.parametrize("dtype, fits", [(torch.bfloat16, True), (torch.float16, False)])
def test_the_gradient_of_the_sum_must_fit_the_type(dtype, fits):
    """As the docstring says: it is stored before the mean is taken."""
    hidden = torch.full((40_000, 2), 4.0, dtype=dtype)
    weight = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
    (
        linear_cross_entropy(hidden, weight, torch.zeros(40_000, dtype=torch.long)) / 40_000
    ).backward()
    assert weight.grad.isfinite().all() == fits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype):
    hidden, weight, labels = example((9,), 8, 21)
    mixed = hidden.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, d_hidden, d_weight = with_gradients(linear_cross_entropy, mixed, weight, labels)
    halves = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    expected = with_gradients(linear_cross_entropy, *halves, labels)
    assert_close(
        (loss, d_hidden, d_weight), (expected[0], expected[1].to(dtype), expected[2].float())
    )


def test_autocast_leaves_float64_alone_as_pytorch_does():
    hidden, weight, labels = example(dtype=torch.float64)
    expected = with_gradients(linear_cross_entropy, hidden, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(hidden, weight).dtype == torch.float64
        assert_close(
            with_gradients(linear_cross_entropy, hidden, weight, labels), expected, atol=0, rtol=0
        )
        with pytest.raises(ValueError, match="hidden is torch.float64 and weight torch.float32"):
            linear_cross_entropy(hidden, weight.detach().float(), labels)


# ---------------------------------------------------------------- the kernel and its readable form


@pytest.mark.parametrize("softcap, z_loss_coef", [(None, 0.0), (5.0, 0.0), (None, 0.1), (5.0, 0.1)])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 3e-3),
    ],
)
def test_the_kernel_equals_the_readable_form(dtype, tolerance, softcap, z_loss_coef):
    hidden, weight, labels = (t.detach() for t in example((65,), 32, 301, torch.float64))
    labels[::4] = IGNORE_INDEX
    inputs = hidden.to(dtype), weight.to(dtype), labels
    for chunk_size in (1, 16, 65, 100):
        options = (softcap, z_loss_coef, chunk_size)
        readable = loss_and_gradients(*inputs, *options)
        fused = fused_loss_and_gradients(*inputs, *options, True, True)
        for ours, theirs in zip(fused, readable, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("asked", [(True, False), (False, True), (False, False)])
def test_the_kernel_computes_only_what_is_asked_for(asked):
    hidden, weight, labels = (t.detach() for t in example((65,), 8, 30))
    loss, *gradients = loss_and_gradients(hidden, weight, labels, 5.0, 0.1, 16)
    got_loss, *got = fused_loss_and_gradients(hidden, weight, labels, 5.0, 0.1, 16, *asked)
    assert_close(got_loss, loss)
    for found, expected, wanted in zip(got, gradients, asked, strict=True):
        assert_close(found, expected if wanted else expected[:0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kernel_keeps_what_it_says(dtype):
    hidden, weight, labels = example((65,), 32, 301, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, labels)
    assert sum(t.nbytes for t in kept) == cross_entropy_saved_bytes(65, 32, 301, dtype)


@pytest.mark.parametrize("has_softcap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_the_kernel_by_hand(dtype, has_softcap):
    """N = 1000, C = 10, V = 50, chunks of 100: tables of 5000 numbers, a matrix of 500."""
    sizes = (1000, 10, 50, dtype)
    options = dict(chunk_size=100, has_softcap=has_softcap)
    half = dtype == torch.bfloat16
    buffers = 5000 * 6 if half else 5000 * 4
    passing = 5000 * 4 if has_softcap else 500 * 2 * half
    assert cross_entropy_working_bytes(*sizes, **options) == buffers + passing + 500 * 2 * half
    assert cross_entropy_saved_bytes(*sizes) == (1000 + 50) * 10 * dtype.itemsize
    few = cross_entropy_working_bytes(7, 10, 50, dtype)  # fewer positions than a chunk holds
    assert few == cross_entropy_working_bytes(7, 10, 50, dtype, chunk_size=7)


# ---------------------------------------------------------------- nothing to learn from


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_places(shape):
    hidden, weight, labels = example(shape)
    loss, d_hidden, d_weight = with_gradients(
        linear_cross_entropy, hidden, weight, labels, z_loss_coef=0.1
    )
    assert loss == 0 and d_hidden.shape == hidden.shape and d_weight.abs().max() == 0


def test_all_places_ignored():
    hidden, weight, labels = example()
    results = with_gradients(
        linear_cross_entropy,
        hidden,
        weight,
        labels.fill_(IGNORE_INDEX),
        softcap=3.0,
        z_loss_coef=0.1,
    )
    assert [t.abs().max().item() for t in results] == [0, 0, 0]


def test_what_an_ignored_place_holds_does_not_count():
    hidden, weight, labels = example()
    labels[2] = IGNORE_INDEX
    expected = linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        hidden[2] = math.nan
    assert_close(linear_cross_entropy(hidden, weight, labels), expected)


def test_one_vector_without_a_batch():
    hidden, weight, labels = example(())
    assert_close(
        linear_cross_entropy(hidden, weight, labels), oracle(hidden[None], weight, labels[None])
    )


def test_int32_labels_and_strided_inputs():
    hidden, weight, labels = example((4, 6))
    expected = linear_cross_entropy(hidden, weight, labels)
    assert_close(linear_cross_entropy(hidden, weight, labels.int()), expected)
    turned = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    assert_close(linear_cross_entropy(turned, weight.detach().T.contiguous().T, labels), expected)


# ---------------------------------------------------------------- only what is asked for


def products(function, N=64, C=8, V=32):
    hidden, weight, labels = example((N,), C, V)
    with FlopCounterMode(display=False) as counter:
        function(hidden, weight, labels)
    return counter.get_total_flops() / (2 * N * C * V)


def test_counts_only_the_products_that_are_needed():
    def frozen_head(hidden, weight, labels):
        linear_cross_entropy(hidden, weight.detach(), labels, chunk_size=10).backward()
        assert hidden.grad is not None

    def frozen_body(hidden, weight, labels):
        linear_cross_entropy(hidden.detach(), weight, labels, chunk_size=10).backward()
        assert weight.grad is not None

    assert products(lambda *a: linear_cross_entropy(*a, chunk_size=10).backward()) == 3
    assert products(frozen_head) == products(frozen_body) == 2
    assert products(torch.no_grad()(linear_cross_entropy)) == 1
    assert products(torch.inference_mode()(linear_cross_entropy)) == 1


def test_prepares_no_slopes_without_gradients():
    hidden, weight, labels = example()
    for grad in (True, False):
        with torch.profiler.profile() as profile, torch.set_grad_enabled(grad):
            linear_cross_entropy(hidden, weight, labels)
        assert any(event.name == "aten::scatter_add_" for event in profile.events()) == grad


def test_the_slope_that_arrives_is_not_rounded():
    """A mean divides by 11 after the loss: in bfloat16 that factor is wrong by 8e-4, in the same
    direction everywhere.
    """
    hidden, weight = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (11, 30))
    labels = torch.randint(30, (11,))
    summed, mean = (
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels) / n, weight)[0].double()
        for n in (1, 11)
    )
    assert abs((mean * summed).sum() * 11 / summed.square().sum() - 1) < 3e-4 and mean.norm() > 0


def test_second_derivative_is_refused():
    hidden, weight, labels = example()
    with pytest.raises(RuntimeError, match="no second derivative.*F.cross_entropy"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden, create_graph=True)
    # the first one is fine
    torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden)


def test_backward_twice_gives_the_same():
    hidden, weight, labels = example()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    loss.backward()
    assert_close(hidden.grad, 2 * once)


# ---------------------------------------------------------------- compiled, and elsewhere


def test_compiled_in_one_graph_and_without_unrolling():
    operations = []

    def backend(graph, inputs):
        operations.extend(graph.graph.nodes)
        return graph

    function = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    hidden, weight, labels = example((3, 301))
    labels[0, :9] = IGNORE_INDEX
    # 452 chunks: compiled one by one they would take minutes
    options = dict(softcap=4.0, z_loss_coef=0.1, chunk_size=2)
    expected = with_gradients(linear_cross_entropy, hidden, weight, labels, **options)
    assert_close(with_gradients(function, hidden, weight, labels, **options), expected)
    assert 0 < len(operations) < 100
    with pytest.raises(RuntimeError, match="index 11 is out of bounds"):
        function(hidden, weight, torch.full_like(labels, 11), **options)


def test_operator_keeps_the_promises_of_an_operator():
    hidden, weight, labels = (t.detach() for t in example())
    for for_hidden, for_weight in ((True, True), (True, False), (False, False)):
        arguments = (hidden, weight, labels, 4.0, 0.1, 3, for_hidden, for_weight)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            torch.ops.llm_course.linear_cross_entropy.default, arguments, test_utils=checks
        )


def test_shapes_without_memory():
    hidden, weight, labels = example((1000,), device="meta")
    with FlopCounterMode(display=False) as counter:
        loss, d_hidden, d_weight = with_gradients(linear_cross_entropy, hidden, weight, labels)
    assert (loss.shape, d_hidden.shape, d_weight.shape) == (
        (),
        hidden.shape,
        weight.shape,
    ) and d_weight.is_meta
    assert counter.get_total_flops() == 3 * 2 * 1000 * 5 * 11


@pytest.mark.skipif(
    not torch.cuda.is_available() and not torch.backends.mps.is_available(), reason="no accelerator"
)
def test_accelerator_agrees():
    device = "cuda" if torch.cuda.is_available() else "mps"
    options = dict(softcap=4.0, z_loss_coef=0.1, chunk_size=100)
    expected = with_gradients(linear_cross_entropy, *example((1025,), 64, 5003), **options)
    got = with_gradients(
        linear_cross_entropy, *example((1025,), 64, 5003, device=device), **options
    )
    assert_close([t.cpu() for t in got], list(expected), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "vocab_size, device, expected",
    [(32_000, "cpu", 512), (32_000, "cuda", 2097), (512, "mps", 131_072), (10**6, "cuda", 512)],
)
def test_a_gpu_takes_larger_chunks(vocab_size, device, expected):
    assert default_chunk_size(vocab_size, device) == expected


# ---------------------------------------------------------------- errors


HIDDEN, WEIGHT, LABELS = (t.detach() for t in example((2, 3), 5, 11))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(labels=torch.tensor([[0, 1, 2], [3, 11, -1]])),
            r"label 11 at \[1, 1\].*0\.\.10.*IGNORE_INDEX=-100.*tokenizer",
        ),
        (dict(labels=torch.tensor([[0, 1, 2], [-1, 11, 0]])), r"label -1 at \[1, 0\]"),
        (
            dict(labels=LABELS.flatten()),
            r"labels \(6,\): expected \(\.\.\., C\), \(V, C\) and \(\.\.\.\)",
        ),
        (dict(labels=LABELS.float()), r"float32, expected int64 or int32.*\.long\(\)"),
        (dict(labels=LABELS.bool()), "bool"),
        (dict(weight=WEIGHT.T), r"weight \(5, 11\)"),
        (dict(weight=WEIGHT[0]), r"weight \(5,\)"),
        (dict(weight=WEIGHT[:0]), r"weight \(0, 5\)"),
        (dict(hidden=torch.tensor(1.0)), r"hidden \(\)"),
        (dict(weight=WEIGHT.double()), "hidden is torch.float32 and weight torch.float64"),
        (
            dict(hidden=HIDDEN.long(), weight=WEIGHT.long()),
            "torch.int64, expected the same floating-point type",
        ),
        (dict(softcap=0.0), "softcap=0.0"),
        (dict(softcap=math.inf), "softcap=inf"),
        (dict(z_loss_coef=-1e-4), "z_loss_coef=-0.0001"),
        (dict(z_loss_coef=math.nan), "z_loss_coef=nan"),
        (dict(chunk_size=0), "chunk_size=0 must be a whole number of at least 1"),
        (dict(chunk_size=512.0), "chunk_size=512.0 must be a whole number"),
        (dict(chunk_size=True), "chunk_size=True must be a whole number"),
        (dict(labels=None), "labels is a NoneType, expected a tensor"),
        (dict(labels=[[0, 1, 2], [3, 4, 5]]), "labels is a list, expected a tensor"),
        (dict(weight=torch.nn.Linear(5, 11)), "weight is a Linear, expected a tensor"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = dict(hidden=HIDDEN, weight=WEIGHT, labels=LABELS) | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)

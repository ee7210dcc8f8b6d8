"""Rotary positions at their edges: odd sizes, wrong inputs, half precision, and Hugging Face's
layers as the oracle.
"""

import copy
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from llm_course.model.embedding import sinusoidal_positions
from llm_course.model.rope import (
    RotaryEmbedding,
    apply_rotary,
    rotary_frequencies,
    rotate_half,
)
from llm_course.model.rope_scaling import RopeScaling

os.environ["HF_HUB_OFFLINE"] = "1"
even = st.integers(1, 9).map(lambda n: 2 * n)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
DYNAMIC = dict(rope_type="dynamic", factor=3.0, original_max_position_embeddings=20)
LONGROPE = dict(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=20,
    short_factor=[1.0, 1.1, 1.5, 2.0],
    long_factor=[1.0, 2.0, 4.0, 9.0],
)
SCALINGS = [None, dict(rope_type="linear", factor=4.0), LLAMA3, YARN]


def rotary(head_dim, settings=None, **options):
    return RotaryEmbedding(
        head_dim, scaling=None if settings is None else RopeScaling(**settings), **options
    )


def turn(x, positions, frequencies):
    """Rotate float64 `x` (B, H, T, D) by float64 tables."""
    angles = positions[:, None].double() * frequencies.double()  # (T, D/2)
    angles = torch.cat((angles, angles), dim=-1)[None]
    return apply_rotary(x, angles.cos(), angles.sin())


def by_complex(x, positions, frequencies):
    """The rotation as a product of complex numbers, one pair (i, i + D/2) at a time."""
    D = x.shape[-1]
    out = x.clone()
    for i in range(D // 2):
        angle = positions.double() * frequencies[i].double()
        pair = torch.complex(x[..., i], x[..., i + D // 2]) * torch.polar(
            torch.ones_like(angle), angle
        )
        out[..., i] = pair.real
        out[..., i + D // 2] = pair.imag
    return out


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 3),
    H=st.integers(1, 3),
    T=st.integers(0, 5),
    D=even,
    start=st.integers(-50, 200_000),
    theta=st.sampled_from([2.0, 100.0, 10_000.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_rotation_is_the_complex_product_and_keeps_lengths(B, H, T, D, start, theta, seed):
    x = torch.randn(B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(start, start + T)
    frequencies = rotary_frequencies(D, rope_theta=theta)
    turned = turn(x, positions, frequencies)
    assert_close(turned, by_complex(x, positions, frequencies))
    assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert_close(turn(turned, -positions, frequencies), x)  # and back


@settings(max_examples=40, deadline=None)
@given(
    D=even,
    m=st.integers(0, 5000),
    n=st.integers(0, 5000),
    shift=st.integers(-4000, 100_000),
    scaling=st.sampled_from(SCALINGS),
)
def test_score_depends_on_the_distance_only(D, m, n, shift, scaling):
    q, k = torch.randn(
        2, 1, 1, 1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(D)
    )
    frequencies = rotary(D, scaling).frequencies

    def score(a, b):
        return (
            turn(q, torch.tensor([a]), frequencies) * turn(k, torch.tensor([b]), frequencies)
        ).sum()

    assert_close(score(m, n), score(m + shift, n + shift), atol=1e-10, rtol=1e-10)


def attend(turn_q, turn_k, turn_v, positions):
    q, k, v = torch.randn(
        3, 1, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return nn.functional.scaled_dot_product_attention(
        turn_q(q, positions), turn_k(k, positions), turn_v(v, positions)
    )


def check_rotation(turn_q, turn_k, turn_v=lambda x, positions: x):
    here = torch.arange(6)
    assert_close(attend(turn_q, turn_k, turn_v, here), attend(turn_q, turn_k, turn_v, here + 100))
    expected = attend(rotate_by_complex, rotate_by_complex, lambda x, positions: x, here)
    assert_close(attend(turn_q, turn_k, turn_v, here), expected)


def rotate_by_complex(x, positions):
    return by_complex(x, positions, rotary_frequencies(8))


def rotate(x, positions):
    return turn(x, positions, rotary_frequencies(8))


def layout_mixed(x, positions):
    angles = (positions[:, None].double() * rotary_frequencies(8).double()).repeat_interleave(
        2, dim=-1
    )[None]
    return apply_rotary(x, angles.cos(), angles.sin())


MISTAKES = {
    "not turned": (lambda x, p: x,) * 2,
    "only the query": (rotate, lambda x, p: x),
    "key backwards": (rotate, lambda x, p: rotate(x, -p)),
    "both backwards": (lambda x, p: rotate(x, -p),) * 2,
    "value turned": (rotate,) * 3,
    "positions added": (lambda x, p: x + sinusoidal_positions(p, 8),) * 2,
    "angles of the other layout": (layout_mixed,) * 2,
    "half of the angle": (lambda x, p: turn(x, p, rotary_frequencies(8) / 2),) * 2,
    "another base": (lambda x, p: turn(x, p, rotary_frequencies(8, rope_theta=500.0)),) * 2,
}


def test_check_passes_for_the_right_rotation():
    check_rotation(rotate, rotate)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_caught(mistake):
    with pytest.raises(AssertionError):
        check_rotation(*MISTAKES[mistake])


def test_layouts_differ_by_a_permutation():
    D = 10
    x = torch.randn(1, 2, 4, 10, dtype=torch.float64)
    positions = torch.arange(4)
    angles = positions[:, None].double() * rotary_frequencies(D).double()
    neighbours = torch.view_as_complex(x.unflatten(-1, (D // 2, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    order = torch.cat((torch.arange(0, D, 2), torch.arange(1, D, 2)))
    turned = turn(x[..., order], positions, rotary_frequencies(D))
    assert_close(torch.view_as_real(neighbours).flatten(-2)[..., order], turned)


def test_rotate_half_by_hand():
    assert rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-3.0, -4.0, 1.0, 2.0]


def test_gradients_are_right_in_float64():
    cos, sin = (t.double() for t in RotaryEmbedding(6)(torch.arange(3)))
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin), x)


def hf_rotary(settings, head_dim=64, theta=10_000.0):
    """Hugging Face's Llama rotary embedding with these settings."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = dict(rope_type="default") | (settings or {}) | dict(rope_theta=theta)
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=32_768,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


HUGGING_FACE = [
    (None, 64, 10_000.0),
    (None, 10, 500_000.0),
    (dict(rope_type="linear", factor=4.0), 64, 10_000.0),
    (LLAMA3, 64, 500_000.0),
    (LLAMA3, 128, 500_000.0),
    (YARN, 64, 10_000.0),
    (YARN, 128, 1e6),
    (YARN | dict(attention_factor=1.5), 64, 10_000.0),
    (YARN | dict(beta_fast=16.0, beta_slow=2.0), 64, 10_000.0),
    (YARN | dict(factor=32.0), 6, 150_000.0),
]


@pytest.mark.parametrize("settings, head_dim, theta", HUGGING_FACE)
@pytest.mark.parametrize(
    "positions",
    [torch.arange(50)[None], torch.tensor([[0, 131_071], [7, 100_003]])],
    ids=["near", "far"],
)
def test_equals_hugging_face(settings, head_dim, theta, positions):
    theirs = hf_rotary(settings, head_dim, theta)
    ours = rotary(head_dim, settings, rope_theta=theta)
    for mine, expected in zip(ours(positions), theirs(torch.zeros(1), positions), strict=True):
        assert_close(mine, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("factor", [1.0, 3.0, 5.7, 10.0, 40.0])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_speeds_equal_hugging_face_bit_for_bit(kind, factor):
    settings = {"linear": dict(rope_type="linear"), "llama3": LLAMA3, "yarn": YARN}[kind] | dict(
        factor=factor
    )
    for head_dim, theta in ((6, 1e4), (64, 1e4), (96, 1e6), (128, 5e5)):
        ours = rotary(head_dim, settings, rope_theta=theta).frequencies
        assert torch.equal(ours, hf_rotary(settings, head_dim, theta).inv_freq)
        assert factor == 1 or not torch.equal(ours, hf_rotary(None, head_dim, theta).inv_freq)


@pytest.mark.parametrize(
    "options",
    [
        dict(mscale=1.0, mscale_all_dim=0.8),
        dict(mscale=0.7, mscale_all_dim=0.7),
        dict(mscale=0.7, mscale_all_dim=0.4, attention_factor=1.3),
        dict(truncate=False),
        dict(truncate=False, beta_fast=20.0, beta_slow=2.5),
    ],
)
def test_yarn_of_deepseek_and_gpt_oss_equals_hugging_face(options):
    positions = torch.tensor([[0, 5, 40_000]])
    for head_dim, theta, factor in ((6, 1e4, 1.0), (64, 1e4, 40.0), (128, 1.5e5, 32.0)):
        settings = YARN | options | dict(factor=factor)
        ours = rotary(head_dim, settings, rope_theta=theta)
        theirs = hf_rotary(settings, head_dim, theta)
        assert torch.equal(ours.frequencies, theirs.inv_freq)
        for mine, expected in zip(ours(positions), theirs(torch.zeros(1), positions), strict=True):
            assert_close(mine, expected, atol=1e-6, rtol=0)
    plain = rotary(128, YARN | dict(factor=32.0), rope_theta=1.5e5)
    found = rotary(128, YARN | dict(factor=32.0) | options, rope_theta=1.5e5)
    assert (plain.attention_factor != found.attention_factor) == ("mscale" in options)
    assert torch.equal(plain.frequencies, found.frequencies) == ("truncate" not in options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scaling", SCALINGS, ids=["none", "linear", "llama3", "yarn"])
def test_tables_do_not_depend_on_the_default_dtype(scaling, dtype):
    positions = torch.tensor([3, 20_003])
    expected = rotary(128, scaling, rope_theta=1e6)
    torch.set_default_dtype(dtype)
    try:
        rope = rotary(128, scaling, rope_theta=1e6)
        tables = rope(positions)
        converted = copy.deepcopy(rope).to(dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rope.frequencies, expected.frequencies) and torch.equal(
        converted.frequencies, expected.frequencies
    )
    assert all(torch.equal(*pair) for pair in zip(tables, expected(positions), strict=True))


def test_rotation_equals_hugging_face():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q = torch.randn(2, 4, 5, 64)
    k = torch.randn(2, 2, 5, 64)
    positions = torch.arange(10).view(2, 5)
    theirs = apply_rotary_pos_emb(q, k, *hf_rotary(None)(q, positions))
    tables = RotaryEmbedding(64)(positions)
    for ours, expected in zip(
        (apply_rotary(q, *tables), apply_rotary(k, *tables)), theirs, strict=True
    ):
        assert_close(ours, expected, atol=1e-6, rtol=0)


@settings(max_examples=30, deadline=None)
@given(D=even, T=st.integers(0, 6), B=st.integers(1, 3), start=st.integers(0, 10**6))
def test_rows_do_not_depend_on_what_stands_beside_them(D, T, B, start):
    rope = RotaryEmbedding(D)
    positions = torch.arange(start, start + T)
    cos, sin = rope(positions)
    assert cos.shape == sin.shape == (1, T, D) and cos.dtype == torch.float32
    batch = rope(positions.expand(B, T).int())
    assert_close(batch[0], cos.expand(B, T, D), atol=0, rtol=0)
    for t in range(T):  # one token at a time, as in cached decoding
        assert_close(rope(positions[t : t + 1])[1], sin[:, t : t + 1], atol=0, rtol=0)


def test_scaled_speeds_by_hand():
    options = dict(factor=4.0, original_max_position_embeddings=157)  # 25, 2.5 and 0.25 turns
    by_hand = torch.tensor([1.0, 0.0625, 0.0025])
    for kind in ("llama3", "yarn"):
        speeds = RopeScaling(rope_type=kind, **options).frequencies(6, rope_theta=1000.0)
        assert_close(speeds, by_hand, atol=1e-4, rtol=0)
    assert math.isclose(
        RopeScaling(rope_type="yarn", **options).resolved_attention_factor, 0.1 * math.log(4) + 1
    )
    assert RopeScaling(rope_type="llama3", **options).resolved_attention_factor == 1.0


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    factor=st.floats(1, 64),
    D=even,
    context=st.integers(8, 10**5),
    theta=st.floats(10, 1e6),
)
def test_scaled_speeds_lie_between_the_plain_and_the_slowed(kind, factor, D, context, theta):
    scaling = RopeScaling(
        rope_type=kind,
        factor=factor,
        original_max_position_embeddings=None if kind == "linear" else context,
    )
    plain = rotary_frequencies(D, rope_theta=theta)
    scaled = scaling.frequencies(D, rope_theta=theta)
    assert scaled.shape == (D // 2,) and scaled.dtype == torch.float32
    assert (scaled <= plain * (1 + 1e-6)).all() and (scaled >= plain / factor * (1 - 1e-6)).all()
    assert (scaled.diff() <= 1e-7).all()  # still from fast to slow


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double", "float"])
def test_speeds_survive_a_conversion_of_the_model(convert):
    rope = rotary(8, LLAMA3)
    positions = torch.tensor([3, 1001, 100_003])
    model = getattr(nn.Sequential(nn.Linear(2, 2), copy.deepcopy(rope)), convert)()
    for got, expected in zip(model[1](positions), rope(positions), strict=True):
        assert got.dtype == torch.float32
        assert_close(got, expected, atol=0, rtol=0)


def test_speeds_survive_a_start_without_memory():
    with torch.device("meta"):
        rope = rotary(8, YARN)
    rope = rope.to("meta")
    assert rope.frequencies.is_meta
    rope = rope.to_empty(device="cpu")
    assert_close(rope(torch.arange(9))[0], rotary(8, YARN)(torch.arange(9))[0], atol=0, rtol=0)


def test_a_model_on_another_default_device_runs_there():
    with torch.device("meta"):
        rope = rotary(8, YARN)
        cos, sin = rope(torch.arange(9))
        assert cos.is_meta and sin.is_meta and cos.shape == (1, 9, 8)
    # real values, so that a checkpoint that is assigned makes a model that runs
    assert rope.frequencies.device.type == "cpu"
    assert torch.equal(rope(torch.arange(9))[0], rotary(8, YARN)(torch.arange(9))[0])
    assert torch.equal(
        rope.to_empty(device="cpu")(torch.arange(9))[0], rotary(8, YARN)(torch.arange(9))[0]
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_frequencies_are_made_on_the_default_device():
    with torch.device("cuda"):
        rope = rotary(8, YARN)
    assert rope.frequencies.is_cuda and rope(torch.arange(9, device="cuda"))[0].is_cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries_keep_their_dtype_and_stay_near(dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 64)
    tables = RotaryEmbedding(64)(torch.arange(5) + 100_000)
    turned = apply_rotary(x.to(dtype), *tables)
    assert turned.dtype == dtype
    assert_close(turned.float(), apply_rotary(x, *tables), atol=5e-2, rtol=2e-2)


def test_autocast_leaves_the_tables_alone():
    rope = RotaryEmbedding(8)
    positions = torch.tensor([100_003])
    with torch.autocast("cpu", torch.bfloat16):
        tables = rope(positions)
    for got, expected in zip(tables, rope(positions), strict=True):
        assert_close(got, expected, atol=0, rtol=0)


def test_angles_at_100_000_are_near_float64():
    positions = torch.arange(100_000, 100_064)
    exact = positions[:, None].double() * 10_000.0 ** (-torch.arange(0, 128, 2).double() / 128)
    cos = RotaryEmbedding(128)(positions)[0][0, :, :64]
    assert_close(cos.double(), exact.cos(), atol=0.02, rtol=0)
    half = (positions.bfloat16().float()[:, None] * rotary_frequencies(128)).cos()
    assert (half - exact.cos()).abs().max() > 1  # what bfloat16 positions would do


@pytest.mark.parametrize("scaling", SCALINGS, ids=["none", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rotary_compiles_as_one_graph(scaling, dynamic):
    torch._dynamo.reset()
    rope = rotary(8, scaling)
    compiled = torch.compile(copy.deepcopy(rope), backend="eager", fullgraph=True, dynamic=dynamic)
    for positions in (torch.arange(6), torch.arange(5) + 70, torch.arange(6).expand(2, 6)):
        for got, expected in zip(compiled(positions), rope(positions), strict=True):
            assert_close(got, expected)


def test_nothing_is_saved_or_learned():
    assert RotaryEmbedding(8).state_dict() == {} and list(RotaryEmbedding(8).parameters()) == []


def test_the_clock_of_the_sinusoids_turns_at_the_same_speeds():
    positions = torch.arange(50)
    angles = positions[:, None].float() * rotary_frequencies(16, rope_theta=300.0)
    clock = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    assert torch.equal(sinusoidal_positions(positions, 16, base=300.0), clock)


def test_sizes_of_numpy_are_whole_numbers_too():
    ours = RopeScaling(
        **LLAMA3 | dict(factor=np.float64(8), original_max_position_embeddings=np.int64(8192))
    )
    frequencies = ours.frequencies(np.int64(64), rope_theta=np.float64(1e4))
    assert frequencies.dtype == torch.float32 and torch.equal(
        frequencies, rotary(64, LLAMA3).frequencies
    )
    lists = dict(short_factor=np.ones(4), long_factor=tuple(np.full(4, 2.0)))
    assert (
        RopeScaling(**LONGROPE | {k: tuple(v) for k, v in lists.items()}).long_factor == [2.0] * 4
    )


def test_settings_show_in_the_printed_model():
    assert repr(rotary(8, YARN)) == "RotaryEmbedding(8, rope_theta=10000.0, yarn scaling by 4.0)"


# ---------------------------------------------------------------- speeds that follow the length


def hf_following(settings, window=20):
    """Hugging Face's rotary embedding, whose original length is `window`."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = settings | dict(rope_theta=500.0)
    if settings["rope_type"] == "dynamic":
        del parameters["original_max_position_embeddings"]  # it takes max_position_embeddings
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=2,
        head_dim=8,
        max_position_embeddings=window,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("settings", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("T", [1, 19, 20, 21, 33, 60])
def test_speeds_that_follow_the_length_equal_hugging_face(settings, T):
    ours = rotary(8, settings, rope_theta=500.0)
    for positions in (torch.arange(T)[None], torch.stack((torch.arange(T), torch.arange(T) // 2))):
        expected = hf_following(settings)(torch.zeros(1), positions)
        for mine, theirs in zip(ours(positions), expected, strict=True):
            assert_close(mine, theirs, atol=2e-6, rtol=0)
    plain = rotary(8, settings, rope_theta=500.0)(torch.arange(5))[0]
    assert torch.equal(ours(torch.arange(5))[0], plain)  # no call leaves anything behind


def test_speeds_that_follow_the_length_change_only_beyond_it():
    for scaling in (DYNAMIC, LONGROPE):
        rope = rotary(8, scaling, rope_theta=500.0)
        within, beyond = (rope(torch.arange(n))[0][0, 1] for n in (20, 21))
        assert torch.equal(within, rope(torch.arange(7))[0][0, 1])
        assert not torch.allclose(within, beyond, atol=1e-5)
    assert rotary(2, DYNAMIC)(torch.arange(50))[0].isfinite().all()  # one pair keeps its speed


@pytest.mark.parametrize("settings", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_speeds_that_follow_the_length_in_odd_places(settings):
    rope = rotary(8, settings)
    assert rope(torch.arange(0))[0].shape == (1, 0, 8)
    assert rope(torch.arange(3).expand(0, 3))[0].shape == (0, 3, 8)
    for got, expected in zip(
        copy.deepcopy(rope).bfloat16()(torch.arange(30)), rope(torch.arange(30)), strict=True
    ):
        assert torch.equal(got, expected)
    with torch.device("meta"):
        assert rotary(8, settings)(torch.arange(9))[0].is_meta
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(rope), backend="eager", fullgraph=True, dynamic=True)
    for positions in (torch.arange(6), torch.arange(30)):
        for got, expected in zip(compiled(positions), rope(positions), strict=True):
            assert_close(got, expected)


# ---------------------------------------------------------------- errors


TABLES = RotaryEmbedding(4)(torch.arange(3))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: RotaryEmbedding(4)(np.arange(3)), "position_ids is a ndarray, expected a tensor"),
        (lambda: RotaryEmbedding(8.0), "head_dim=8.0"),
        (lambda: RotaryEmbedding(8, rope_theta=1e39), "rope_theta=1e[+]39"),
        (lambda: RotaryEmbedding(8, scaling=dict(YARN)), "scaling is a dict, expected RopeScaling"),
        (lambda: RotaryEmbedding(7), "head_dim=7"),
        (lambda: RotaryEmbedding(0), "head_dim=0"),
        (lambda: RotaryEmbedding(8, rope_theta=1.0), "rope_theta=1.0"),
        (lambda: RotaryEmbedding(8, rope_theta=math.nan), "rope_theta=nan"),
        (lambda: RotaryEmbedding(8)(torch.arange(3).bfloat16()), "bfloat16.*long"),
        (
            lambda: RotaryEmbedding(8)(torch.zeros(1, 2, 3, dtype=torch.long)),
            r"\(1, 2, 3\), expected \(T,\) or \(B, T\)",
        ),
        (lambda: apply_rotary(torch.zeros(1, 1, 2, 3), *torch.zeros(2, 1, 2, 3)), "even number"),
        (lambda: rotate_half(torch.zeros(2, 3)), r"\(2, 3\), expected an even number"),
        (lambda: apply_rotary(torch.zeros(1, 1, 3, 4).long(), *TABLES), "int64"),
        (
            lambda: apply_rotary(torch.zeros(3, 4), *TABLES),
            r"\(3, 4\).*expected floating-point \(B, H, T, D\)",
        ),
        (lambda: apply_rotary(torch.zeros(1, 3, 4), *TABLES), r"x is torch.float32 \(1, 3, 4\)"),
        (
            lambda: apply_rotary(torch.zeros(1, 1, 1, 4), *TABLES),
            r"\(1, 1, 1, 4\), cos \(1, 3, 4\).*these T tokens only",
        ),
        (
            lambda: apply_rotary(torch.zeros(1, 1, 3, 4), *torch.zeros(2, 1, 1, 4)),
            r"cos \(1, 1, 4\)",
        ),
        (
            lambda: apply_rotary(torch.zeros(1, 1, 3, 4), *torch.zeros(2, 2, 3, 4)),
            r"cos \(2, 3, 4\)",
        ),
        (lambda: apply_rotary(torch.zeros(2, 1, 3, 4), *torch.zeros(2, 3, 4)), r"cos \(3, 4\)"),
        (
            lambda: apply_rotary(torch.zeros(2, 1, 3, 4), TABLES[0], TABLES[1][:, :1]),
            r"sin \(1, 1, 4\)",
        ),
        (
            lambda: RopeScaling(rope_type="ntk", factor=2.0),
            "'ntk' is unknown: choose one of 'linear', 'dynamic', 'llama3', 'yarn'",
        ),
        (
            lambda: RopeScaling(rope_type=["linear"], factor=2.0),
            "is unknown: choose one of 'linear'",
        ),
        (lambda: RopeScaling(rope_type="linear", factor=0.5), "factor=0.5"),
        (lambda: RopeScaling(rope_type="linear", factor=True), "factor=True must be a number"),
        (lambda: RopeScaling(rope_type="linear", factor="4.0"), "factor='4.0' must be a number"),
        (lambda: RopeScaling(rope_type="linear", factor=None), "factor=None must be a number"),
        (
            lambda: RopeScaling(rope_type="linear", factor=2.0, low_freq_factor=True),
            "low_freq_factor=True must be a number",
        ),
        (lambda: RopeScaling(**LLAMA3 | dict(high_freq_factor=math.nan)), "high_freq_factor=nan"),
        (lambda: RopeScaling(**YARN | dict(attention_factor=math.nan)), "attention_factor=nan"),
        *(
            (
                lambda kind=kind, n=n: RopeScaling(
                    **kind | dict(original_max_position_embeddings=n)
                ),
                "must be a (whole )?number",
            )
            for kind in (LLAMA3, YARN)
            for n in (math.nan, math.inf, 8192.5, 8192.0, True, 0, -1, "8192")
        ),
        (lambda: RopeScaling(rope_type="linear", factor=math.inf), "factor=inf"),
        (
            lambda: RopeScaling(rope_type="yarn", factor=2.0),
            "original_max_position_embeddings=None",
        ),
        (
            lambda: RopeScaling(rope_type="linear", factor=2.0, beta_fast=9.0),
            "beta_fast=9.0 means nothing to rope_type='linear'",
        ),
        (
            lambda: RopeScaling(**LLAMA3 | dict(attention_factor=1.2)),
            "attention_factor=1.2 means nothing",
        ),
        (
            lambda: RopeScaling(**LLAMA3 | dict(low_freq_factor=4.0)),
            "low_freq_factor=4.0 must be positive and below",
        ),
        (lambda: RopeScaling(**YARN | dict(beta_slow=0.0)), "beta_slow=0.0"),
        (lambda: RopeScaling(**YARN | dict(attention_factor=-1.0)), "attention_factor=-1.0"),
        (lambda: RopeScaling(**YARN | dict(mscale=1.0)), "mscale_all_dim=None: give both"),
        (
            lambda: RopeScaling(**YARN | dict(mscale=0.0, mscale_all_dim=1.0)),
            "mscale=0.0 must be positive",
        ),
        (lambda: RopeScaling(**YARN | dict(truncate=0)), "truncate=0 must be true or false"),
        (lambda: RopeScaling(**YARN | dict(truncate=None)), "truncate=None must be true"),
        (lambda: RopeScaling(**LLAMA3 | dict(truncate=False)), "truncate=False means nothing"),
        (
            lambda: RopeScaling(rope_type="dynamic", factor=2.0),
            "original_max_position_embeddings=None",
        ),
        (
            lambda: RopeScaling(**LONGROPE | dict(original_max_position_embeddings=1)),
            "original_max_position_embeddings=1 must be a whole number of at least 2",
        ),
        (
            lambda: RopeScaling(**LONGROPE | dict(long_factor=None)),
            "long_factor=None must be a list",
        ),
        (
            lambda: RopeScaling(**LONGROPE | dict(short_factor=[])),
            r"short_factor=\[\] must be a list",
        ),
        (
            lambda: RopeScaling(**LONGROPE | dict(long_factor=[1.0, -2.0])),
            r"long_factor\[1\]=-2.0 must be positive",
        ),
        (
            lambda: RopeScaling(**LONGROPE | dict(long_factor=[1.0])),
            "short_factor has 4 numbers and long_factor 1",
        ),
        (lambda: RopeScaling(**YARN | dict(short_factor=[1.0])), "short_factor=.* means nothing"),
        (lambda: rotary(6, LONGROPE), "short_factor has 4 numbers, expected 3"),
        (lambda: RotaryEmbedding(8, scaling=4.0), "scaling is a float, expected RopeScaling"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

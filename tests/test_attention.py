"""Attention at its edges: odd sizes, blind rows, wrong inputs, and Hugging Face's layers as the
oracle.
"""

import copy
import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_cache import Cache
from torch import nn
from torch.testing import assert_close

from llm_course.model.attention import MultiHeadAttention, scaled_dot_product_attention
from llm_course.model.attention_weights import attention_weights
from llm_course.model.kernels import attention as kernels
from llm_course.model.masks import causal_mask, document_mask, padding_mask
from llm_course.model.rope import RotaryEmbedding, apply_rotary

os.environ["HF_HUB_OFFLINE"] = "1"
sizes = st.integers(1, 7)


def by_definition(q, k, v, visible, scale, softcap=None):
    """One query, one head, one key at a time, in float64."""
    B, H, T, D = q.shape
    K = k.shape[1]
    S = k.shape[2]
    out = torch.zeros(B, H, T, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                keys = [s for s in range(S) if visible[b, h, t, s]]
                if not keys:
                    continue
                kv = h // (H // K)
                scores = torch.stack(
                    [(q[b, h, t].double() @ k[b, kv, s].double()) * scale for s in keys]
                )
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp() / scores.exp().sum()
                out[b, h, t] = sum(
                    w * v[b, kv, s].double() for w, s in zip(weights, keys, strict=True)
                )
    return out.float()


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 2),
    K=st.integers(1, 3),
    group=st.integers(1, 3),
    T=sizes,
    S=sizes,
    D=sizes,
    is_causal=st.booleans(),
    masked=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(B, K, group, T, S, D, is_causal, masked, softcap, seed):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, K * group, T, D, generator=g)
    k = torch.randn(B, K, S, D, generator=g)
    v = torch.randn(B, K, S, D, generator=g)
    # often with rows that see nothing
    mask = torch.rand(B, 1, T, S, generator=g) > 0.5 if masked else None
    visible = torch.ones(B, K * group, T, S, dtype=torch.bool)
    if masked:
        visible &= mask
    if is_causal:
        visible &= torch.tensor([[s <= S - T + t for s in range(S)] for t in range(T)])
    got = scaled_dot_product_attention(
        q, k, v, mask=mask, is_causal=is_causal, softcap=softcap, scale=0.7
    )
    assert_close(got, by_definition(q, k, v, visible, 0.7, softcap), atol=1e-5, rtol=1e-4)
    weights = attention_weights(q, k, mask=mask, is_causal=is_causal, softcap=softcap, scale=0.7)
    assert_close(weights.sum(-1), visible.any(-1).float())


@settings(max_examples=30, deadline=None)
@given(T=st.integers(0, 9), S=st.integers(0, 9), W=st.one_of(st.none(), st.integers(1, 10)))
def test_causal_mask_follows_its_rule(T, S, W):
    mask = causal_mask(T, S, sliding_window=W)
    assert mask.shape == (T, S) and mask.dtype == torch.bool
    for t in range(T):
        for s in range(S):
            distance = S - T + t - s
            assert mask[t, s].item() == (distance >= 0 and (W is None or distance < W))


def test_masks_have_the_shapes_that_broadcast():
    assert padding_mask(torch.tensor([[0, 1, 1]])).tolist() == [[[[False, True, True]]]]
    ids = torch.tensor([[0, 0, 1]])
    assert document_mask(ids)[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    for function in (padding_mask, document_mask):
        with pytest.raises(ValueError, match="expected"):
            function(torch.ones(3))


@pytest.mark.parametrize(
    "shape",
    [(), (5,), (1,), (3, 5), (3, 1), (1, 1, 1, 5), (2, 1, 3, 5), (2, 4, 3, 5), (2, 4, 3, 1)],
)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_every_mask_that_broadcasts(shape, softcap):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 3, 8)
    k = torch.randn(2, 2, 5, 8)
    v = torch.randn(2, 2, 5, 8)
    mask = torch.rand(shape) > 0.4
    got = scaled_dot_product_attention(q, k, v, mask=mask, softcap=softcap)
    assert_close(
        got, by_definition(q, k, v, mask.expand(2, 4, 3, 5), 8**-0.5, softcap), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_blind_rows_are_zero_and_keep_gradients_finite(softcap):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    mask = padding_mask(torch.tensor([[0, 0, 1, 1]]))
    out = scaled_dot_product_attention(q, k, v, mask=mask, is_causal=True, softcap=softcap)
    assert out[:, :, :2].abs().max() == 0
    out.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert q.grad[:, :, :2].abs().max() == 0 and k.grad[:, :, :2].abs().max() == 0


def test_more_queries_than_keys_and_no_keys_at_all():
    q = torch.randn(1, 2, 5, 4)
    k = torch.randn(1, 2, 3, 4)
    out = scaled_dot_product_attention(q, k, k, is_causal=True)
    # the last query stands on the last key
    assert out[:, :, :2].abs().max() == 0 and out[:, :, 2:].abs().min() > 0
    for is_causal in (False, True):
        assert (
            scaled_dot_product_attention(q, k[:, :, :0], k[:, :, :0], is_causal=is_causal)
            .abs()
            .max()
            == 0
        )
        assert scaled_dot_product_attention(q[:, :, :0], k, k, is_causal=is_causal).shape == (
            1,
            2,
            0,
            4,
        )


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=torch.randn(2, 3, 4)), "expected"),
        (dict(q=torch.randn(1, 3, 4, 8)), "multiple of 2"),
        (dict(q=torch.randn(1, 4, 4, 6)), "one B and D"),
        (dict(v=torch.randn(1, 2, 3, 8)), "each key needs one value"),
        (dict(mask=torch.ones(4, 4)), "mask.bool"),
        (dict(mask=torch.ones(1, 1, 1, 3, dtype=torch.bool)), "does not broadcast"),
        (dict(mask=torch.ones(1, 1, 1, 1, 4, dtype=torch.bool)), "does not broadcast"),
        (dict(softcap=0.0), "softcap=0.0"),
        (dict(softcap=float("inf")), "softcap=inf"),
        (dict(softcap=float("nan")), "softcap=nan"),
        (dict(softcap=1e39), "below 1e38"),  # infinite there, and NaN behind it
        (dict(scale=float("nan")), "scale=nan"),
        (dict(dropout=-0.1), "dropout=-0.1"),
        (dict(dropout=1.0), "dropout=1.0"),
        (
            dict(v=torch.randn(1, 2, 4, 8).double()),
            "torch.float64, expected the same floating-point type",
        ),
        (dict(k=torch.randn(1, 2, 4, 8).half()), "torch.float16, torch.float32, expected the same"),
        (
            {name: torch.ones(1, 2, 4, 8, dtype=torch.long) for name in "qkv"},
            "q has dtype torch.int64, expected a floating-point type",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = (
        dict(q=torch.randn(1, 4, 4, 8), k=torch.randn(1, 2, 4, 8), v=torch.randn(1, 2, 4, 8))
        | change
    )
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(
            arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments
        )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(num_heads=3), "num_heads=3, or give head_dim"),
        (dict(num_kv_heads=3), "num_kv_heads=3"),
        (dict(num_heads=0), "num_heads=0"),
        (dict(num_kv_heads=0), "num_kv_heads=0"),
        (dict(head_dim=0), "head_dim=0"),
        (dict(sliding_window=0), "sliding_window=0"),
        (dict(sliding_window=2.5), "sliding_window=2.5"),
        (dict(num_heads=True), "num_heads=True must be a whole number of at least 1"),
        (dict(head_dim="4"), "head_dim='4' must be a whole number of at least 1"),
        (dict(attn_logit_softcapping=-1.0), "attn_logit_softcapping=-1.0"),
        (dict(attn_logit_softcapping=float("inf")), "attn_logit_softcapping=inf"),
        (dict(dropout=1.0), "dropout=1.0"),
    ],
)
def test_wrong_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(16, **({"num_heads": 4} | arguments))


class Forgetful:
    def update(self, layer_index, k, v):
        return k[:, :, -1:], v[:, :, -1:]


class Rounding:
    def update(self, layer_index, k, v):
        return k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("B, T", [(1, 0), (0, 3), (0, 0)])
# float32 could, bfloat16 with gradients could not
def test_nothing_in_nothing_out_in_half_precision(B, T):
    assert MultiHeadAttention(16, 4).bfloat16()(torch.randn(B, T, 16).bfloat16()).shape == (
        B,
        T,
        16,
    )


def test_forward_refuses_what_does_not_fit():
    layer = MultiHeadAttention(16, 4)
    x = torch.randn(2, 5, 16)
    rope = RotaryEmbedding(4)
    with pytest.raises(ValueError, match=r"expected \(\*, \*, 16\) = \(B, T, C\)"):
        layer(x[0])
    with pytest.raises(ValueError, match="positions of these T tokens only"):
        # would broadcast: every token at position 0
        layer(x, position_embeddings=rope(torch.arange(1)))
    with pytest.raises(ValueError, match="does not broadcast"):
        layer(x, mask=torch.ones(2, 5, dtype=torch.bool))  # a (B, S) padding mask
    with pytest.raises(ValueError, match="the cache returned S=1"):
        layer(x, cache=Forgetful())
    with pytest.raises(ValueError, match="expected the same floating-point type"):
        layer(x, cache=Rounding())
    with pytest.raises(ValueError, match="does not broadcast"):
        # before it meets the window
        MultiHeadAttention(16, 4, sliding_window=2)(x, mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="an even number"):
        MultiHeadAttention(15, 5)(
            torch.randn(1, 2, 15), position_embeddings=(torch.ones(1, 2, 3), torch.zeros(1, 2, 3))
        )


@pytest.mark.parametrize("new", [1, 3])
def test_a_mask_must_cover_the_cached_keys(new):
    layer = MultiHeadAttention(16, 4)
    x = torch.randn(1, 4 + new, 16)
    cache = Cache()
    tokens = torch.tensor([[0, 0, 1, 1] + [1] * new])
    layer(x[:, :4], mask=padding_mask(tokens[:, :4]), cache=cache)
    with pytest.raises(ValueError, match=f"expected {4 + new} keys"):
        # of the new tokens only: would show the padding
        layer(x[:, 4:], mask=padding_mask(tokens[:, 4:]), cache=cache)


def test_it_prints_its_options():
    assert (
        repr(MultiHeadAttention(16, 4)).splitlines()[1].strip()
        == "num_heads=4, num_kv_heads=4, head_dim=4"
    )
    text = repr(
        MultiHeadAttention(16, 4, sliding_window=3, attn_logit_softcapping=5.0, dropout=0.1)
    )
    assert "head_dim=4, sliding_window=3, attn_logit_softcapping=5.0, dropout=0.1" in text


@settings(max_examples=25, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    kv=st.sampled_from([1, 2, 4]),
    padding=st.integers(0, 3),
    window=st.sampled_from([None, 1, 3]),
    softcap=st.sampled_from([None, 4.0]),
    qk_norm=st.booleans(),
)
def test_cached_decoding_equals_the_full_pass(pieces, kv, padding, window, softcap, qk_norm):
    torch.manual_seed(0)
    T = sum(pieces)
    rope = RotaryEmbedding(6)
    layer = MultiHeadAttention(
        16,
        4,
        num_kv_heads=kv,
        head_dim=6,
        sliding_window=window,
        attn_logit_softcapping=softcap,
        qk_norm=qk_norm,
        layer_index=3,
    )
    tokens = torch.ones(2, T, dtype=torch.long)
    tokens[1, : min(padding, T - 1)] = 0
    x = torch.randn(2, T, 16)
    positions = (tokens.cumsum(-1) - 1).clamp(min=0)
    mask = padding_mask(tokens)
    full = layer(x, position_embeddings=rope(positions), mask=mask)
    cache = Cache()
    outputs = []
    end = 0
    for size in pieces:
        start = end
        end = end + size
        turn = rope(positions[:, start:end])
        outputs.append(
            layer(x[:, start:end], position_embeddings=turn, mask=mask[..., :end], cache=cache)
        )
    assert_close(torch.cat(outputs, 1), full, atol=1e-5, rtol=1e-4)
    n = min(padding, T - 1)
    alone = layer(x[1:, n:], position_embeddings=rope(torch.arange(T - n)))
    assert_close(full[1:, n:], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(sliding_window=2),
        dict(attn_logit_softcapping=5.0),
        dict(num_kv_heads=1),
        dict(qk_norm=True),
    ],
)
def test_no_future_leaks_through_any_option(options):
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, **options)
    x = torch.randn(1, 6, 16, requires_grad=True)
    everything = torch.ones(6, 6, dtype=torch.bool)
    for mask in (None, everything):
        for t in range(6):
            (gradient,) = torch.autograd.grad(layer(x, mask=mask)[0, t].sum(), x)
            assert gradient[0, t + 1 :].abs().sum() == 0 and gradient[0, t].abs().sum() > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_agrees_with_hugging_face(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    name = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral"}[family]
    sizes = dict(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        num_hidden_layers=1,
    )
    extra = {"llama": dict(attention_bias=True), "qwen3": {}, "mistral": dict(sliding_window=3)}[
        family
    ]
    config = getattr(transformers, f"{name}Config")(**sizes, **extra, attn_implementation="eager")
    module = getattr(transformers.models, family)
    theirs = getattr(getattr(module, f"modeling_{family}"), f"{name}Attention")(
        config, layer_idx=0
    ).eval()
    ours = MultiHeadAttention(
        32,
        4,
        num_kv_heads=2,
        head_dim=10,
        attention_bias=family == "llama",
        qk_norm=family == "qwen3",
        sliding_window=3 if family == "mistral" else None,
    )
    for parameter in theirs.parameters():
        # fresh norms and biases would hide a wrong mapping
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 32)
    turn = RotaryEmbedding(10)(torch.arange(7))
    hidden = ~causal_mask(7, sliding_window=3 if family == "mistral" else None)
    additive = torch.zeros(1, 1, 7, 7).masked_fill(hidden, torch.finfo(torch.float32).min)
    assert_close(
        ours(x, position_embeddings=turn), theirs(x, turn, additive)[0], atol=1e-5, rtol=1e-4
    )


def test_agrees_with_pytorchs_layer_and_its_biases():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(64, 4, batch_first=True)
    ours = MultiHeadAttention(64, 4, attention_bias=True)
    for bias in (theirs.in_proj_bias, theirs.out_proj.bias):
        nn.init.normal_(bias)  # fresh ones are zero and would hide a mix-up
    for i, projection in enumerate((ours.q_proj, ours.k_proj, ours.v_proj)):
        weight = theirs.in_proj_weight.chunk(3)[i]
        projection.load_state_dict({"weight": weight, "bias": theirs.in_proj_bias.chunk(3)[i]})
    ours.o_proj.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 10, 64)
    assert_close(ours(x), theirs(x, x, x, attn_mask=~causal_mask(10))[0])


def test_order_enters_by_rotation_and_only_distances_count():
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, 2, qk_norm=True)
    rope = RotaryEmbedding(16)
    x = torch.randn(1, 6, 32)
    shuffled = x[:, [3, 0, 4, 2, 1, 5]]  # the last stays where it is, and sees all others
    assert_close(layer(shuffled)[:, -1], layer(x)[:, -1])
    turn = rope(torch.arange(6))
    turned = layer(x, position_embeddings=turn)
    assert not torch.allclose(
        layer(shuffled, position_embeddings=turn)[:, -1], turned[:, -1], atol=1e-4
    )
    later = rope(torch.arange(6) + 1000)
    assert_close(layer(x, position_embeddings=later), turned, atol=1e-3, rtol=1e-3)


class RotatedLate(MultiHeadAttention):
    """A planted mistake: it caches the keys before rotation, and turns all of them by the position
    of the newest token, since it has no other. Without a cache it is right.
    """

    def forward(self, x, *, position_embeddings=None, mask=None, cache=None):
        q, k, v = self.project(x)
        late = position_embeddings
        if cache is not None:
            k, v = cache.update(0, k, v)
            late = [angles[:, -1:].expand(-1, k.shape[2], -1) for angles in position_embeddings]
        q = apply_rotary(q, *position_embeddings)
        y = scaled_dot_product_attention(q, apply_rotary(k, *late), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("layer_class, right", [(MultiHeadAttention, True), (RotatedLate, False)])
def test_keys_are_cached_after_rotation(layer_class, right):
    torch.manual_seed(0)
    layer = layer_class(32, 2)
    rope = RotaryEmbedding(16)
    cache = Cache()
    x = torch.randn(2, 9, 32)
    full = layer(x, position_embeddings=rope(torch.arange(9)))
    pieces = [
        layer(x[:, t : t + 3], position_embeddings=rope(torch.arange(t, t + 3)), cache=cache)
        for t in (0, 3, 6)
    ]
    assert torch.allclose(torch.cat(pieces, dim=1), full, atol=1e-5) == right


@pytest.mark.parametrize("softcap", [None, 1e4])
def test_dropout_keeps_the_mean(softcap):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 4, 256, 8)
    # with values of 1 the output is the sum of the weights that are left: 1 on average
    out = scaled_dot_product_attention(q, k, torch.ones_like(k), softcap=softcap, dropout=0.5)
    assert abs(out.mean() - 1) < 0.02 and out.std() > 0.05


def test_the_best_loss_where_nothing_repeats_yet():
    """What the page on attention says of its texts: 32 words in random order, which start again
    after 6 to 16. The best that a model without the future can do the first time is 3.17 nats.
    """
    costs = []
    for period in range(6, 17):
        for seen in range(1, period + 1):
            # that the text starts again here, if it has not yet; else one of the words left
            chance = 1 / (17 - seen) if seen >= 6 else 0.0
            right = chance if seen == period else (1 - chance) / (32 - seen)
            costs.append(-math.log(right))
    assert round(sum(costs) / len(costs), 2) == 3.17


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    for softcap in (None, 5.0):
        layer = MultiHeadAttention(16, 4, dropout=0.5, attn_logit_softcapping=softcap)
        x = torch.randn(1, 6, 16)
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        assert_close(layer(x), layer(x), atol=0, rtol=0)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bfloat16_autocast_stays_near_float32(softcap):
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, 4, num_kv_heads=2, qk_norm=True, attn_logit_softcapping=softcap)
    x = torch.randn(2, 6, 32)
    turn = RotaryEmbedding(8)(torch.arange(6))
    mask = padding_mask(torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]))
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x, position_embeddings=turn, mask=mask)
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), layer(x, position_embeddings=turn, mask=mask), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_scores_are_float32_in_half_precision(autocast):
    q = torch.full((1, 1, 1, 64), 40.0)
    # q . k is 102,400: above all of float16
    k = torch.tensor([40.0, 41.0]).view(1, 1, 2, 1).expand(1, 1, 2, 64)
    if not autocast:
        q = q.half()
        k = k.half()
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        weights = attention_weights(q, k, scale=1 / 2560)  # the scores are 40 and 41
        capped = attention_weights(q, k, scale=1 / 2560, softcap=1e4)
    expected = torch.tensor([1.0, math.e]) / (1 + math.e)
    for got in (weights, capped):
        assert got.dtype == torch.float32
        assert_close(got.flatten(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, dict(sliding_window=2), dict(attn_logit_softcapping=5.0)])
def test_gradients_are_right_in_float64(options):
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 4, num_kv_heads=2, attention_bias=True, **options).double()
    turn = tuple(t.double() for t in RotaryEmbedding(2)(torch.arange(4)))
    mask = padding_mask(torch.tensor([[0, 1, 1, 1]]))
    x = torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, position_embeddings=turn, mask=mask), x)


@pytest.mark.parametrize("options", [{}, dict(sliding_window=2), dict(attn_logit_softcapping=5.0)])
@pytest.mark.parametrize("masked", [False, True])
def test_compiles_as_one_graph(options, masked):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, qk_norm=True, **options)
    x = torch.randn(2, 6, 16)
    turn = RotaryEmbedding(4)(torch.arange(6))
    mask = padding_mask(torch.ones(2, 6).long()) if masked else None
    # fullgraph: an error at any break
    compiled = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True)
    assert_close(
        compiled(x, position_embeddings=turn, mask=mask),
        layer(x, position_embeddings=turn, mask=mask),
    )


@pytest.mark.parametrize("options", [{}, dict(sliding_window=2), dict(attn_logit_softcapping=5.0)])
def test_compiles_with_a_changing_length(options):
    torch._dynamo.reset()
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, **options)
    compiled = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True, dynamic=True)
    for T in (6, 9, 5):
        x = torch.randn(2, T, 16)
        turn = RotaryEmbedding(4)(torch.arange(T))
        assert_close(compiled(x, position_embeddings=turn), layer(x, position_embeddings=turn))


def test_non_contiguous_inputs():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 8, 4, 2).transpose(2, 4).unbind(0)  # (5, 2, 4, 8), strided
    assert_close(
        scaled_dot_product_attention(q, k, v, is_causal=True),
        scaled_dot_product_attention(
            q.contiguous(), k.contiguous(), v.contiguous(), is_causal=True
        ),
    )


def test_scale_and_the_bias_of_the_last_projection_alone():
    x = torch.randn(2, 5, 16)
    plain = MultiHeadAttention(16, 4)
    scaled = MultiHeadAttention(16, 4, attention_scale=0.125)
    scaled.load_state_dict(plain.state_dict())
    plain.q_proj.weight.data /= 4  # 1 / sqrt(D) is 1/2
    torch.testing.assert_close(scaled(x), plain(x))
    qwen2 = MultiHeadAttention(16, 4, attention_bias=True, attention_out_bias=False)
    assert (
        qwen2.q_proj.bias is not None
        and qwen2.v_proj.bias is not None
        and qwen2.o_proj.bias is None
    )
    with pytest.raises(ValueError, match="attention_scale=0"):
        MultiHeadAttention(16, 4, attention_scale=0.0)


class LastKeys(Cache):
    """Keeps the two newest keys, all that a window of three reaches from the next token on."""

    def update(self, layer_index, k, v):
        k, v = super().update(layer_index, k, v)
        self.layers[layer_index] = k[:, :, -2:], v[:, :, -2:]
        return k, v


def test_a_cache_may_forget_what_the_window_cannot_reach():
    layer = MultiHeadAttention(16, 4, sliding_window=3)
    x = torch.randn(2, 9, 16)
    tokens = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    cache = LastKeys()
    full = layer(x, mask=padding_mask(tokens))
    for start, end in ((0, 4), (4, 7), (7, 8), (8, 9)):
        part = layer(x[:, start:end], mask=padding_mask(tokens[:, :end]), cache=cache)
        torch.testing.assert_close(part, full[:, start:end])


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 3),
    K=st.integers(1, 3),
    group=st.integers(1, 3),
    T=sizes,
    S=sizes,
    D=sizes,
    mask=st.sampled_from([None, "causal", (1, 1), (0, 1), (0, 0)]),
    scale=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_two_products_are_pytorchs_function(B, K, group, T, S, D, mask, scale, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, K * group, T, D), (B, K, S, D), (B, K, S, D)]
    pairs = [
        [t.requires_grad_(), t.detach().clone().requires_grad_()]
        for t in (torch.randn(s, generator=g).to(dtype) for s in shapes)
    ]
    options = dict(scale=scale, enable_gqa=True)
    if mask == "causal":
        T = S = min(T, S)
        pairs = [[t.detach()[:, :, :T].requires_grad_() for t in two] for two in pairs]
        options["is_causal"] = True
    elif mask is not None:
        b = B if mask[0] else 1
        h = 1 if mask[1] else K * group
        seen = torch.rand(b, h, T, S, generator=g) > 0.4
        # the caller sees to blind rows
        options["attn_mask"] = seen | ~seen.any(dim=-1, keepdim=True)
    ours = kernels.attention_by_products(*(mine for mine, _ in pairs), **options)
    theirs = F.scaled_dot_product_attention(*(other for _, other in pairs), **options)
    near = dict(rtol=3e-2, atol=3e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-5)
    assert ours.dtype == dtype
    assert_close(ours, theirs, **near)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    for mine, other in pairs:
        assert_close(mine.grad, other.grad, **{name: 10 * value for name, value in near.items()})


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 3),
    K=st.integers(1, 3),
    group=st.integers(1, 3),
    S=sizes,
    D=sizes,
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_sums_for_one_query_are_pytorchs_function(B, K, group, S, D, masked, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(shape, generator=g).to(dtype)
        for shape in ((B, K * group, 1, D), (B, K, S, D), (B, K, S, D))
    ]
    pairs = [[t.requires_grad_(), t.detach().clone().requires_grad_()] for t in tensors]
    options = dict(scale=0.3, enable_gqa=True)
    if masked:
        seen = torch.rand(B, 1, 1, S, generator=g) > 0.4
        options["attn_mask"] = seen | ~seen.any(dim=-1, keepdim=True)
    ours = kernels.attention_of_one_query(*(mine for mine, _ in pairs), **options)
    theirs = F.scaled_dot_product_attention(*(other for _, other in pairs), **options)
    near = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-5)
    assert ours.dtype == dtype
    assert_close(ours, theirs, **near)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    for mine, other in pairs:
        assert_close(mine.grad, other.grad, **{name: 10 * value for name, value in near.items()})


@pytest.mark.parametrize("T", [1, 2])
def test_sums_for_one_query_are_for_the_compiler_alone(T):
    programs = []

    def keep(graph, inputs):
        programs.append({node.target for node in graph.graph.nodes})
        return graph.forward

    torch._dynamo.reset()
    q = torch.randn(2, 4, T, 8)
    k = torch.randn(2, 2, 5, 8)
    v = torch.randn(2, 2, 5, 8)
    mask = padding_mask(torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]))
    compiled = torch.compile(scaled_dot_product_attention, backend=keep, fullgraph=True)
    assert_close(
        compiled(q, k, v, mask=mask, is_causal=True),
        scaled_dot_product_attention(q, k, v, mask=mask, is_causal=True),
    )
    assert (F.scaled_dot_product_attention in programs[0]) is (T > 1) and len(programs) == 1


def test_products_only_where_they_pay(monkeypatch):
    calls = []
    real = kernels.attention_by_products
    monkeypatch.setattr(
        kernels, "attention_by_products", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    monkeypatch.setattr(kernels, "cpu_multiplies_bf16", lambda: True)

    def taken(T=8, S=8, dtype=torch.bfloat16, grad=True, **options):
        calls.clear()
        q, k, v = (torch.randn(1, 2, n, 4).to(dtype).requires_grad_(grad) for n in (T, S, S))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        assert y.dtype == dtype and y.shape == q.shape
        return bool(calls)

    assert (
        taken()
        and taken(S=512)
        and taken(mask=torch.ones(8, 8, dtype=torch.bool))
        and taken(dropout=0.5)
    )
    assert (
        not taken(S=513)
        and not taken(dtype=torch.float32)
        and not taken(grad=False)
        and not taken(softcap=5.0)
    )
    monkeypatch.setattr(kernels, "cpu_multiplies_bf16", lambda: False)
    assert not taken()


@pytest.mark.parametrize("mask", [None, "padding"])
def test_bf16_training_agrees_with_float32(monkeypatch, mask):
    monkeypatch.setattr(kernels, "cpu_multiplies_bf16", lambda: True)
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, 4, num_kv_heads=2)
    x = torch.randn(3, 20, 32)
    probe = torch.randn(3, 20, 32)
    seen = (
        None
        if mask is None
        else padding_mask((torch.arange(20) >= torch.tensor([[0], [5], [19]])).long())
    )
    found = []
    for half in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            y = layer(x, mask=seen)
        (y.float() * probe).sum().backward()
        found.append([y.float(), *(p.grad.clone() for p in layer.parameters())])
    for full, half in zip(*found, strict=True):
        assert (half - full).norm() < 0.02 * full.norm()


def test_products_drop_weights_and_keep_the_mean(monkeypatch):
    monkeypatch.setattr(kernels, "cpu_multiplies_bf16", lambda: True)
    torch.manual_seed(0)
    q, k = (torch.randn(1, 4, 256, 8).bfloat16().requires_grad_() for _ in range(2))
    dropped = scaled_dot_product_attention(q, k, torch.ones_like(k), dropout=0.5).float()
    assert abs(dropped.mean() - 1) < 0.02 and dropped.std() > 0.05


@pytest.mark.parametrize("wrong", [None, [[1.0]], "x", torch.ones(1, 1, 2, 4).long()])
def test_what_is_no_tensor_is_refused_by_name(wrong):
    q = torch.randn(1, 1, 2, 4)
    for arguments in ((wrong, q, q), (q, wrong, q), (q, q, wrong)):
        with pytest.raises(ValueError, match="[qkv] (is a|has dtype)"):
            scaled_dot_product_attention(*arguments)
    with pytest.raises(ValueError, match="x (is a|has)"):
        MultiHeadAttention(16, 4)(wrong)
    if not isinstance(wrong, torch.Tensor):
        with pytest.raises(ValueError, match="attention_mask is a"):
            padding_mask(wrong)


def test_masks_and_angles_of_another_kind_are_refused():
    layer = MultiHeadAttention(16, 4)
    x = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match="expected a bool tensor"):
        layer(x, mask=[[True]])
    for pair in ([], [torch.ones(1, 3, 4)], torch.ones(2, 1, 3, 4)):
        with pytest.raises(ValueError, match="the pair .cos, sin."):
            layer(x, position_embeddings=pair)
    # a mask that is added to the scores: its 0 would be read as padding
    with pytest.raises(ValueError, match="attention_mask has dtype torch.float32"):
        padding_mask(torch.tensor([[-torch.inf, 0.0]]))
    for wrong in (2.5, "2", None, -1, True):
        with pytest.raises(ValueError, match="must be a whole number"):
            causal_mask(wrong)
    for name, option in dict(scale="x", softcap=[2.0], dropout="0.1").items():
        with pytest.raises(ValueError, match=f"{name}="):
            scaled_dot_product_attention(*[x[:, None]] * 3, **{name: option})

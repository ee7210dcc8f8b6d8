"""Token embeddings and added positions at their edges: odd sizes, wrong inputs, half precision, and
Hugging Face's layers as the oracle.
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

from llm_course.model import embedding, rope
from llm_course.model.embedding import EmbeddingLayer, sinusoidal_positions

os.environ["HF_HUB_OFFLINE"] = "1"
even = st.integers(1, 9).map(lambda n: 2 * n)


def test_the_documented_place_of_rotary_embedding_leads_to_its_module():
    assert embedding.RotaryEmbedding is rope.RotaryEmbedding
    assert not hasattr(embedding, "apply_rotary") and not hasattr(embedding, "RopeScaling")


@pytest.mark.parametrize("position_type", ["none", "sinusoidal", "learned"])
def test_embedding_compiles_as_one_graph(position_type):
    torch._dynamo.reset()
    layer = EmbeddingLayer(9, 4, position_type=position_type, max_position_embeddings=16)
    compiled = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True, dynamic=True)
    for T in (4, 7):
        ids = torch.randint(9, (2, T))
        assert_close(compiled(ids), layer(ids))
        assert_close(compiled(ids, torch.arange(T) + 3), layer(ids, torch.arange(T) + 3))


@settings(max_examples=40, deadline=None)
@given(
    C=even, T=st.integers(0, 5), start=st.integers(0, 3000), base=st.sampled_from([50.0, 10_000.0])
)
def test_sinusoidal_positions_follow_the_formula(C, T, start, base):
    expected = torch.tensor(
        [
            [
                f((start + t) / base ** (2 * i / C))
                for i in range(C // 2)
                for f in (math.sin, math.cos)
            ]
            for t in range(T)
        ]
    ).view(T, C)
    ours = sinusoidal_positions(torch.arange(start, start + T), C, base=base)
    assert_close(ours, expected, atol=1e-3, rtol=0)  # float32 angles of up to 3000 radians


def test_sinusoidal_positions_are_marians_interleaved():
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    theirs = MarianSinusoidalPositionalEmbedding(30, 8).create_weight()  # sines first, then cosines
    ours = sinusoidal_positions(torch.arange(30), 8)
    assert_close(torch.cat((ours[:, 0::2], ours[:, 1::2]), dim=1), theirs, atol=1e-5, rtol=0)


def test_sinusoidal_products_depend_on_the_distance_only():
    table = sinusoidal_positions(torch.arange(200), 32)
    products = table @ table.T
    for k in (0, 1, 17):
        line = products.diagonal(k)
        assert_close(line, line[:1].expand_as(line), atol=1e-3, rtol=0)


@settings(max_examples=30, deadline=None)
@given(
    V=st.integers(1, 9),
    C=even,
    B=st.integers(0, 3),
    T=st.integers(0, 5),
    seed=st.integers(0, 99),
    position_type=st.sampled_from(["none", "sinusoidal", "learned"]),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_layer_is_the_sum_of_its_rows(V, C, B, T, seed, position_type, scale):
    torch.manual_seed(seed)
    layer = EmbeddingLayer(
        V, C, position_type=position_type, max_position_embeddings=8, embedding_scale=scale
    )
    ids = torch.randint(V, (B, T))
    positions = torch.randint(8, (B, T))
    tokens = layer.embed_tokens.weight
    out = layer(ids, positions)
    assert out.shape == (B, T, C)
    for b in range(B):
        for t in range(T):
            place = {
                "none": torch.zeros(C),
                "sinusoidal": sinusoidal_positions(positions[b, t : t + 1], C)[0],
                "learned": (
                    layer.embed_positions.weight[positions[b, t]]
                    if position_type == "learned"
                    else None
                ),
            }[position_type]
            assert_close(out[b, t], tokens[ids[b, t]] * scale + place)
    assert_close(layer(ids), layer(ids, torch.arange(T)))
    assert_close(layer(ids, torch.arange(T)[None].int()), layer(ids))


def test_embedding_equals_gpt2_and_gemma():
    from transformers import GPT2Config, GPT2Model
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    config = GPT2Config(vocab_size=11, n_positions=7, n_embd=8, n_layer=0, n_head=2)
    theirs = GPT2Model(config).eval()
    theirs.ln_f = nn.Identity()
    ours = EmbeddingLayer(11, 8, position_type="learned", max_position_embeddings=7)
    ours.load_state_dict(
        {"embed_tokens.weight": theirs.wte.weight, "embed_positions.weight": theirs.wpe.weight}
    )
    ids = torch.randint(11, (2, 5))
    assert_close(ours(ids), theirs(ids).last_hidden_state)
    scaled = Gemma3TextScaledWordEmbedding(11, 8, padding_idx=0, embed_scale=8**0.5)
    ours = EmbeddingLayer(11, 8, embedding_scale=8**0.5)
    ours.embed_tokens.load_state_dict({"weight": scaled.weight})
    assert_close(ours(ids), scaled(ids))


@pytest.mark.parametrize("position_type", ["none", "sinusoidal", "learned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_layer_keeps_the_dtype_of_its_table(position_type, dtype):
    layer = EmbeddingLayer(9, 4, position_type=position_type, max_position_embeddings=8).to(dtype)
    assert layer(torch.randint(9, (2, 3))).dtype == dtype


def test_only_rows_that_are_read_get_a_gradient():
    layer = EmbeddingLayer(9, 4, position_type="learned", max_position_embeddings=8)
    layer(torch.tensor([[2, 5, 2]])).sum().backward()
    assert layer.embed_tokens.weight.grad[:, 0].tolist() == [0, 0, 2, 0, 0, 1, 0, 0, 0]
    assert layer.embed_positions.weight.grad[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_an_index_error_of_a_hook_is_not_renamed():
    layer = EmbeddingLayer(9, 4)
    layer.embed_tokens.register_forward_hook(lambda *_: "abc".__getitem__(3))
    with pytest.raises(IndexError, match="string index"):
        layer(torch.zeros(1, 2, dtype=torch.long))


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    layer = EmbeddingLayer(9, 64, dropout=0.5)
    ids = torch.zeros(1, 8, dtype=torch.long)
    assert (layer(ids) == 0).float().mean() > 0.3
    assert_close(layer.eval()(ids), layer.embed_tokens(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_positions_do_not_depend_on_the_default_dtype(dtype):
    positions = torch.tensor([3, 20_003])
    torch.set_default_dtype(dtype)
    try:
        clock = sinusoidal_positions(positions, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(clock, sinusoidal_positions(positions, 8))


def test_added_positions_are_saved_only_where_they_are_learned():
    assert list(
        EmbeddingLayer(5, 4, position_type="learned", max_position_embeddings=3).state_dict()
    ) == [
        "embed_tokens.weight",
        "embed_positions.weight",
    ]
    assert list(EmbeddingLayer(5, 4, position_type="sinusoidal").state_dict()) == [
        "embed_tokens.weight"
    ]


def test_sizes_of_numpy_are_whole_numbers_too():
    layer = EmbeddingLayer(
        np.int64(9), np.uint8(4), position_type="learned", max_position_embeddings=np.int32(8)
    )
    assert layer(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 4)


def test_settings_show_in_the_printed_model():
    assert "position_type='sinusoidal', embedding_scale=2.0" in repr(
        EmbeddingLayer(4, 4, position_type="sinusoidal", embedding_scale=2.0)
    )


# ---------------------------------------------------------------- errors


LAYER = EmbeddingLayer(9, 4, position_type="learned", max_position_embeddings=8)
IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: LAYER(torch.tensor([[1, 2], [3, 9]])),
            r"token id 9 at \[1, 1\].*0\.\.8.*tokenizer",
        ),
        (lambda: LAYER(torch.tensor([[-1, 2]])), r"token id -1 at \[0, 0\]"),
        (
            lambda: LAYER(torch.zeros(1, 9, dtype=torch.long)),
            r"position 8 at \[8\].*0\.\.7.*max_position_embeddings",
        ),
        (lambda: LAYER(IDS, torch.tensor([0, 1, -2])), r"position -2 at \[2\]"),
        (lambda: LAYER(IDS.float()), "float32.*long"),
        (lambda: LAYER(IDS.bool()), "bool"),
        (lambda: LAYER(IDS[0]), r"\(3,\), expected \(\*, \*\) = \(B, T\)"),
        (lambda: LAYER(IDS, torch.arange(4)), r"\(4,\), expected \(3,\) or \(2, 3\)"),
        (lambda: LAYER(IDS, torch.arange(3.0)), "float32"),
        (lambda: EmbeddingLayer(0, 4), "vocab_size=0"),
        (lambda: EmbeddingLayer(4, -1), "hidden_size=-1"),
        (lambda: EmbeddingLayer(4, 4, position_type="rope"), "'rope'.*'none'"),
        (lambda: EmbeddingLayer(4, 4, position_type="learned"), "max_position_embeddings=None"),
        (lambda: EmbeddingLayer(4, 5, position_type="sinusoidal"), "hidden_size=5 must be even"),
        (
            lambda: EmbeddingLayer(4, 4, position_type="learned", max_position_embeddings=8.0),
            "max_position_embeddings=8.0",
        ),
        (lambda: EmbeddingLayer(4, 4, dropout=1.5), "dropout=1.5"),
        (lambda: EmbeddingLayer(4, 4, dropout=1.0), "dropout=1.0"),
        (lambda: EmbeddingLayer(4, 4, dropout=math.nan), "dropout=nan"),
        (lambda: EmbeddingLayer(4, 4, embedding_scale=math.nan), "embedding_scale=nan"),
        (lambda: EmbeddingLayer(4, 4, embedding_scale=0.0), "embedding_scale=0.0"),
        (lambda: EmbeddingLayer(True, 4), "vocab_size=True must be a whole number"),
        (lambda: EmbeddingLayer(4, 4.0), "hidden_size=4.0 must be a whole number"),
        (lambda: EmbeddingLayer(4, "4"), "hidden_size='4' must be a whole number"),
        (lambda: EmbeddingLayer(None, 4), "vocab_size=None must be a whole number"),
        (lambda: LAYER([[1, 2]]), r"input_ids is a list, expected a tensor: torch.as_tensor"),
        (lambda: sinusoidal_positions(torch.arange(3), 4, base=0.0), "base=0.0"),
        (lambda: sinusoidal_positions(torch.arange(3), 4, base=math.nan), "base=nan"),
        (lambda: sinusoidal_positions(torch.arange(3), 4.0), "hidden_size=4.0"),
        (lambda: sinusoidal_positions(torch.arange(3), 5), "hidden_size=5"),
        (lambda: sinusoidal_positions(torch.arange(3.0), 4), "float32"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

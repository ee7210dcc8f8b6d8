"""The transformer block at its edges: every option against Hugging Face's blocks, causality,
caches, wrong arguments.
"""

import copy
import math
import os
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_cache import Cache
from torch import nn
from torch.testing import assert_close

from llm_course.model.attention import causal_mask, padding_mask
from llm_course.model.config import ModelConfig
from llm_course.model.mlp import MLP
from llm_course.model.moe import MoE
from llm_course.model.normalization import LayerNorm, RMSNorm
from llm_course.model.rope import RotaryEmbedding
from llm_course.model.transformer_block import TransformerBlock, build_norm

os.environ["HF_HUB_OFFLINE"] = "1"
POSITIONS = ["pre", "post", "sandwich"]
KINDS = [
    {},
    dict(norm_position="post"),
    dict(norm_position="sandwich"),
    dict(use_moe=True, num_experts=4, top_k=2),
]
RULE = pytest.mark.parametrize("position", POSITIONS)
KIND = pytest.mark.parametrize("options", KINDS, ids=["pre", "post", "sandwich", "experts"])


def config_of(C=16, **options):
    return ModelConfig(hidden_size=C, **(dict(num_heads=4, intermediate_size=24) | options))


def random_block(C=16, layer_index=0, **options):
    """A block whose norms and biases are not at their start, where a mix-up would not show."""
    torch.manual_seed(0)
    return randomise(TransformerBlock(config_of(C, **options), layer_index))


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    return module


def by_definition(block, x, rule, multiplier, **arguments):
    """The three rules of the papers, with the names of the norms from the module's table."""

    def f_mlp(z):
        y = block.mlp(z)
        return y[0] if isinstance(y, tuple) else y

    def f_attention(z):
        return block.self_attn(z, **arguments)

    for f, before, after in (
        (f_attention, block.input_layernorm, block.attention_output_norm),
        (f_mlp, block.post_attention_layernorm, block.mlp_output_norm),
    ):
        if rule == "pre":
            x = x + multiplier * f(before(x))
        elif rule == "post":
            x = after(x + multiplier * f(x))
        else:
            x = x + multiplier * after(f(before(x)))
    return x


@settings(max_examples=25, deadline=None)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 6),
    K=st.integers(1, 3),
    group=st.integers(1, 3),
    D=st.sampled_from([2, 6]),
    C=st.integers(1, 11),
    F=st.integers(1, 9),
    E=st.integers(0, 3),
    k=st.integers(1, 3),
    rule=st.sampled_from(POSITIONS),
    norm_type=st.sampled_from(["rmsnorm", "layernorm"]),
    use_glu=st.booleans(),
    multiplier=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(
    B, T, K, group, D, C, F, rule, norm_type, E, k, use_glu, multiplier, seed
):
    torch.manual_seed(seed)
    experts = dict(use_moe=True, num_experts=E, top_k=min(k, E)) if E else {}
    config = config_of(
        C,
        num_heads=K * group,
        num_kv_heads=K,
        head_dim=D,
        intermediate_size=F,
        norm_position=rule,
        norm_type=norm_type,
        use_glu=use_glu,
        residual_multiplier=multiplier,
        **experts,
    )
    block = randomise(TransformerBlock(config))
    x = torch.randn(B, T, C)
    turn = RotaryEmbedding(D)(torch.arange(T))
    y, stats = block(x, position_embeddings=turn)
    assert_close(
        y, by_definition(block, x, rule, multiplier, position_embeddings=turn), atol=1e-5, rtol=1e-4
    )
    assert y.dtype == x.dtype and y.shape == x.shape
    if E:
        assert stats.tokens_per_expert.sum() == B * T * min(k, E) and stats.aux_loss.isfinite()
    else:
        assert stats is None


def test_the_rules_differ_and_hold_only_their_norms():
    x = torch.randn(2, 5, 16)
    blocks = {rule: random_block(norm_position=rule) for rule in POSITIONS}
    outputs = [block(x)[0] for block in blocks.values()]
    assert all((a - b).abs().max() > 0.1 for i, a in enumerate(outputs) for b in outputs[:i])
    norms = {
        rule: {
            name
            for name, _ in block.named_children()
            if "norm" in name and list(block.get_submodule(name).parameters())
        }
        for rule, block in blocks.items()
    }
    assert norms["pre"] == {"input_layernorm", "post_attention_layernorm"}
    assert norms["post"] == {"attention_output_norm", "mlp_output_norm"}
    assert norms["sandwich"] == norms["pre"] | norms["post"]
    for name in (
        "input_layernorm",
        "attention_output_norm",
        "post_attention_layernorm",
        "mlp_output_norm",
    ):
        assert isinstance(getattr(blocks["sandwich"], name), RMSNorm)
        assert isinstance(
            getattr(random_block(norm_position="sandwich", norm_type="layernorm"), name), LayerNorm
        )


def test_options_reach_the_parts():
    config = config_of(
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=24,
        attention_bias=True,
        attention_out_bias=False,
        qk_norm=True,
        attention_scale=0.3,
        sliding_window=3,
        attn_logit_softcapping=20.0,
        rms_norm_eps=1e-3,
        activation="gelu",
        mlp_bias=True,
        dropout=0.2,
        norm_type="layernorm",
    )
    block = TransformerBlock(config, 5)
    attention = block.self_attn
    mlp = block.mlp
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 6)
    assert {0.3, 20.0} <= {v for v in vars(attention).values() if isinstance(v, float)}
    assert (attention.sliding_window, attention.dropout, attention.layer_index) == (3, 0.2, 5)
    assert attention.q_proj.bias is not None and attention.o_proj.bias is None
    assert (
        attention.q_norm.eps
        == block.input_layernorm.eps
        == block.post_attention_layernorm.eps
        == 1e-3
    )
    assert (
        isinstance(mlp, MLP)
        and mlp.activation == "gelu"
        and mlp.up_proj.bias is not None
        and mlp.dropout.p == 0.2
    )
    assert mlp.gate_proj is not None
    config = config_of(
        use_moe=True,
        num_experts=6,
        top_k=3,
        norm_topk_prob=False,
        use_glu=False,
        shared_expert_intermediate_size=10,
        router_aux_loss_coef=0.5,
        router_z_loss_coef=0.25,
        activation="relu",
    )
    experts = TransformerBlock(config).mlp
    assert (
        isinstance(experts, MoE)
        and experts.experts.up_proj.shape == (6, 24, 16)
        and experts.experts.gate_proj is None
    )
    assert experts.shared_expert.up_proj.out_features == 10 and experts.experts.activation == "relu"
    assert (experts.router_aux_loss_coef, experts.router_z_loss_coef) == (0.5, 0.25)
    assert (experts.gate.top_k, experts.gate.norm_topk_prob) == (3, False)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(norm_position="middle"), "norm_position='middle' must be pre or post or sandwich"),
        (dict(norm_position=None), "norm_position=None"),
        (dict(norm_type="batchnorm"), "norm_type='batchnorm' must be rmsnorm or layernorm"),
        (dict(norm_type="batchnorm", norm_position="post"), "norm_type='batchnorm'"),
        (dict(residual_multiplier=0.0), "residual_multiplier=0.0 must be positive and finite"),
        (dict(residual_multiplier=-1.0), "residual_multiplier=-1.0"),
        (dict(residual_multiplier=math.nan), "residual_multiplier=nan"),
        (dict(residual_multiplier=math.inf), "residual_multiplier=inf"),
        (dict(residual_multiplier=None), "residual_multiplier=None must be a number"),
        (dict(residual_multiplier="0.5"), "residual_multiplier='0.5'"),
        (dict(residual_multiplier=True), "residual_multiplier=True"),
        (dict(use_moe=True, mlp_bias=True), "set mlp_bias=False"),
        (dict(use_moe=True, top_k=9), "top_k=9"),
        (dict(num_heads=3), "num_heads=3"),
        (dict(intermediate_size=0), "intermediate_size=0"),
        (dict(activation="tanh"), "activation='tanh'"),
        (dict(dropout=1.0), "dropout=1.0"),
        (dict(rms_norm_eps=0.0), "eps=0.0"),
        (dict(attention_scale=-1.0), "scale=-1.0"),
    ],
)
def test_wrong_options_never_reach_a_block(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformerBlock(config_of(**change))


def test_experts_options_do_nothing_in_a_dense_block():
    dense = random_block(num_experts=3, top_k=7)
    assert (
        isinstance(dense.mlp, MLP)
        and dense.state_dict().keys() == random_block().state_dict().keys()
    )


def test_each_layer_gets_its_window():
    config = config_of(
        num_layers=2, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    )
    windows = [TransformerBlock(config, index).self_attn.sliding_window for index in range(2)]
    assert windows == [3, None]


@RULE
def test_forward_refuses_what_does_not_fit(position):
    block = random_block(norm_position=position)
    for x in (torch.randn(2, 5, 15), torch.randn(5, 16)):
        with pytest.raises(ValueError, match="expected"):
            block(x)
    with pytest.raises(ValueError, match="does not broadcast"):
        block(torch.randn(2, 5, 16), mask=torch.ones(2, 5, dtype=torch.bool))


@KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_type_is_refused_in_words(options, dtype):
    block = random_block(**options)
    x = torch.randn(2, 5, 16)
    with pytest.raises(
        ValueError, match=f"x is {dtype} and the weights are torch.float32: convert one"
    ):
        block(x.to(dtype))
    with pytest.raises(
        ValueError, match=f"x is torch.float32 and the weights are {dtype}: convert one"
    ):
        copy.deepcopy(block).to(dtype)(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert block(x.bfloat16())[0].isfinite().all()


class Wrapped(nn.Module):
    """A projection without a `weight` of its own, as a LoRA or a quantised layer may be."""

    def __init__(self, layer):
        super().__init__()
        self.base = layer
        self.in_features = layer.in_features

    def forward(self, x):
        return self.base(x)


@KIND
def test_a_projection_may_be_replaced(options):
    block = random_block(**options)
    wrapped = copy.deepcopy(block)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(wrapped.self_attn, name, Wrapped(getattr(wrapped.self_attn, name)))
    x = torch.randn(2, 5, 16)
    assert torch.equal(wrapped(x)[0], block(x)[0])
    with pytest.raises(ValueError, match="x is torch.float64 and the weights are torch.float32"):
        wrapped(x.double())


@KIND
def test_a_block_without_memory_has_shapes(options):
    y, stats = random_block(**options).to("meta")(torch.empty(2, 5, 16, device="meta"))
    assert (
        y.is_meta
        and y.shape == (2, 5, 16)
        and (stats is None or stats.tokens_per_expert.shape == (4,))
    )


def test_build_norm():
    for norm_type, kind, eps in (("rmsnorm", RMSNorm, 1e-3), ("layernorm", LayerNorm, 1e-4)):
        norm = build_norm(
            ModelConfig(
                hidden_size=7,
                num_heads=1,
                position_type="none",
                norm_type=norm_type,
                rms_norm_eps=eps,
            )
        )
        assert type(norm) is kind and norm.eps == eps and norm.weight.shape == (7,)


@RULE
def test_silent_layers_leave_the_stream_alone(position):
    block = random_block(norm_position=position)
    x = torch.randn(2, 5, 16) * 3
    nn.init.zeros_(block.self_attn.o_proj.weight)
    nn.init.zeros_(block.mlp.down_proj.weight)
    assert torch.equal(block(x)[0], x) == (position != "post")


def test_a_multiplier_of_one_is_a_plain_sum_to_the_last_bit():
    block = random_block()
    x = torch.randn(2, 5, 16)
    y = x + block.self_attn(block.input_layernorm(x))
    assert torch.equal(block(x)[0], y + block.mlp(block.post_attention_layernorm(y)))


def test_the_multiplier_equals_smaller_weights():
    plain = random_block()
    x = torch.randn(2, 5, 16)
    scaled = random_block(residual_multiplier=0.25)
    plain.self_attn.o_proj.weight.data /= 4
    plain.mlp.down_proj.weight.data /= 4
    assert_close(scaled(x)[0], plain(x)[0])


@KIND
@pytest.mark.parametrize(
    "extra",
    [{}, dict(sliding_window=2), dict(num_kv_heads=1, qk_norm=True, attn_logit_softcapping=5.0)],
)
def test_no_future_leaks(options, extra):
    block = random_block(**options, **extra)
    x = torch.randn(1, 6, 16, requires_grad=True)
    for mask in (None, torch.ones(6, 6, dtype=torch.bool)):
        for t in range(6):
            (gradient,) = torch.autograd.grad(block(x, mask=mask)[0][0, t].sum(), x)
            assert gradient[0, t + 1 :].abs().sum() == 0 and gradient[0, t].abs().sum() > 0


@settings(max_examples=20, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    options=st.sampled_from(KINDS),
    padding=st.integers(0, 3),
    window=st.sampled_from([None, 3]),
    kv=st.sampled_from([1, 4]),
)
def test_cached_decoding_equals_the_full_pass(pieces, options, padding, window, kv):
    torch.manual_seed(0)
    T = sum(pieces)
    rope = RotaryEmbedding(4)
    blocks = [
        random_block(num_kv_heads=kv, sliding_window=window, layer_index=i, **options)
        for i in range(2)
    ]
    tokens = torch.ones(2, T, dtype=torch.long)
    tokens[1, : min(padding, T - 1)] = 0
    positions = (tokens.cumsum(-1) - 1).clamp(min=0)
    mask = padding_mask(tokens)
    full = x = torch.randn(2, T, 16)
    for block in blocks:
        full, _ = block(full, position_embeddings=rope(positions), mask=mask)
    cache = Cache()
    outputs = []
    end = 0
    for size in pieces:
        start = end
        end = end + size
        y = x[:, start:end]
        for block in blocks:
            y, _ = block(
                y,
                position_embeddings=rope(positions[:, start:end]),
                mask=mask[..., :end],
                cache=cache,
            )
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), full, atol=1e-5, rtol=1e-4)


def agree(theirs, ours, rename, sliding_window=None, head_dim=10, **arguments):
    """Both on the same input, after copying their weights by `rename(name, tensor) -> [(our name,
    tensor), ...]`.
    """
    randomise(theirs)
    weights = dict(
        pair for name, tensor in theirs.state_dict().items() for pair in rename(name, tensor)
    )
    missing = ours.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and all(
        key.endswith("expert_bias") for key in missing.missing_keys
    )
    x = torch.randn(2, 7, 32)
    turn = RotaryEmbedding(head_dim)(torch.arange(7))
    additive = torch.zeros(1, 1, 7, 7).masked_fill(
        ~causal_mask(7, sliding_window=sliding_window), torch.finfo(torch.float32).min
    )
    positions = {} if arguments.pop("no_rotation", False) else {"position_embeddings": turn}
    expected = theirs.eval()(x, attention_mask=additive, **positions)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert_close(ours.eval()(x, **positions)[0], expected, atol=2e-5, rtol=1e-4)


SIZES = dict(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    num_hidden_layers=1,
    vocab_size=8,
)
OURS = dict(num_heads=4, num_kv_heads=2, head_dim=10)


def test_agrees_with_llama_and_granite():
    from transformers import GraniteConfig, LlamaConfig
    from transformers.models.granite.modeling_granite import GraniteDecoderLayer
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, intermediate_size=48, attn_implementation="eager", rms_norm_eps=1e-3
    )
    ours = TransformerBlock(config_of(32, intermediate_size=48, rms_norm_eps=1e-3, **OURS))
    agree(LlamaDecoderLayer(config, 0), ours, lambda name, tensor: [(name, tensor)])
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    config = GraniteConfig(
        **sizes,
        intermediate_size=48,
        residual_multiplier=0.22,
        attention_multiplier=0.5,
        attn_implementation="eager",
    )
    ours = TransformerBlock(
        config_of(
            32,
            num_heads=4,
            num_kv_heads=2,
            intermediate_size=48,
            residual_multiplier=0.22,
            attention_scale=0.5,
        )
    )
    agree(GraniteDecoderLayer(config, 0), ours, lambda name, tensor: [(name, tensor)], head_dim=8)


@pytest.mark.parametrize("window", [3, None])
def test_agrees_with_gemma2(window):
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES,
        intermediate_size=48,
        attn_implementation="eager",
        query_pre_attn_scalar=7,
        attn_logit_softcapping=2.0,
        sliding_window=3,
        layer_types=["sliding_attention" if window else "full_attention"],
    )
    ours = TransformerBlock(
        config_of(
            32,
            intermediate_size=48,
            norm_position="sandwich",
            activation="gelu_tanh",
            attention_scale=7**-0.5,
            attn_logit_softcapping=2.0,
            sliding_window=window,
            **OURS,
        )
    )
    names = {
        "post_attention_layernorm": "attention_output_norm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "mlp_output_norm",
    }

    def rename(name, tensor):
        module = name.removesuffix(".weight")
        # Gemma stores weight - 1
        return [(f"{names.get(module, module)}.weight", 1 + tensor if "norm" in name else tensor)]

    agree(Gemma2DecoderLayer(config, 0), ours, rename, sliding_window=window)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_agrees_with_qwen3_moe(norm_topk_prob):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=12,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=norm_topk_prob,
        attn_implementation="eager",
    )
    ours = TransformerBlock(
        config_of(
            32,
            intermediate_size=12,
            qk_norm=True,
            use_moe=True,
            num_experts=5,
            top_k=2,
            norm_topk_prob=norm_topk_prob,
            **OURS,
        )
    )

    def rename(name, tensor):
        if name.endswith("gate_up_proj"):
            return list(
                zip(
                    ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
                    tensor.chunk(2, dim=1),
                    strict=True,
                )
            )
        return [(name, tensor)]

    agree(Qwen3MoeDecoderLayer(config, 0), ours, rename)


def test_agrees_with_gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_head=4, n_layer=1, n_inner=48, vocab_size=8, attn_implementation="eager"
    )
    ours = TransformerBlock(
        config_of(
            32,
            num_heads=4,
            intermediate_size=48,
            use_glu=False,
            attention_bias=True,
            mlp_bias=True,
            norm_type="layernorm",
            rms_norm_eps=config.layer_norm_epsilon,
        )
    )
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }

    def rename(name, tensor):
        module, kind = name.rsplit(".", 1)
        tensor = tensor.T if tensor.ndim == 2 else tensor  # GPT-2 keeps (in, out)
        if module == "attn.c_attn":
            return [
                (f"self_attn.{q}_proj.{kind}", part)
                for q, part in zip("qkv", tensor.chunk(3), strict=True)
            ]
        return [(f"{names[module]}.{kind}", tensor)]

    agree(GPT2Block(config, layer_idx=0), ours, rename, no_rotation=True)


@pytest.mark.parametrize("rule", ["pre", "post"])
def test_agrees_with_pytorch(rule):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        32,
        4,
        48,
        dropout=0.0,
        activation="relu",
        batch_first=True,
        norm_first=rule == "pre",
        layer_norm_eps=1e-6,
    )
    ours = TransformerBlock(
        config_of(
            32,
            num_heads=4,
            intermediate_size=48,
            use_glu=False,
            activation="relu",
            attention_bias=True,
            mlp_bias=True,
            norm_type="layernorm",
            norm_position=rule,
        )
    )
    randomise(theirs)
    norms = (
        ["input_layernorm", "post_attention_layernorm"]
        if rule == "pre"
        else ["attention_output_norm", "mlp_output_norm"]
    )
    names = {
        "norm1": norms[0],
        "norm2": norms[1],
        "linear1": "mlp.up_proj",
        "linear2": "mlp.down_proj",
        "self_attn.out_proj": "self_attn.o_proj",
    }
    for their_name, our_name in names.items():
        ours.get_submodule(our_name).load_state_dict(theirs.get_submodule(their_name).state_dict())
    for i, projection in enumerate(
        (ours.self_attn.q_proj, ours.self_attn.k_proj, ours.self_attn.v_proj)
    ):
        projection.weight.data = theirs.self_attn.in_proj_weight.data.chunk(3)[i]
        projection.bias.data = theirs.self_attn.in_proj_bias.data.chunk(3)[i]
    x = torch.randn(2, 7, 32)
    assert_close(ours(x)[0], theirs(x, src_mask=~causal_mask(7)), atol=2e-5, rtol=1e-4)


@KIND
def test_every_parameter_learns(options):
    block = random_block(
        residual_multiplier=0.5,
        shared_expert_intermediate_size=6 if options.get("use_moe") else None,
        attention_bias=True,
        **options,
    )
    y, stats = block(torch.randn(2, 9, 16))
    loss = (y * torch.randn_like(y)).sum()
    (loss if stats is None else loss + stats.aux_loss).backward()
    without = {
        name
        for name, parameter in block.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    }
    # without rotation it shifts all scores of a query alike
    assert without <= {"self_attn.k_proj.bias"}


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    block = random_block(dropout=0.5)
    x = torch.randn(1, 6, 16)
    assert not torch.equal(block(x)[0], block(x)[0])
    block.eval()
    assert torch.equal(block(x)[0], block(x)[0])


@KIND
def test_half_precision_stays_near_float32(options):
    block = random_block(**options)
    x = torch.randn(2, 6, 16)
    full = block(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        half = block(x)[0]
    assert half.dtype == torch.float32  # the stream keeps its type, the layers compute in half
    assert (half - full).norm() < 0.1 * full.norm()
    low = copy.deepcopy(block).bfloat16()(x.bfloat16())[0]
    assert low.dtype == torch.bfloat16 and (low.float() - full).norm() < 0.1 * full.norm()


@RULE
def test_gradients_are_right_in_float64(position):
    block = random_block(8, num_heads=2, norm_position=position, residual_multiplier=0.5).double()
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: block(x)[0], x)


@pytest.mark.parametrize(
    "options", [dict(norm_position="sandwich"), dict(use_moe=True, num_experts=4, top_k=2)]
)
def test_compiles_as_one_graph(options):
    torch._dynamo.reset()
    block = random_block(residual_multiplier=0.5, **options)
    x = torch.randn(2, 6, 16)
    compiled = torch.compile(copy.deepcopy(block), backend="eager", fullgraph=True)
    turn = RotaryEmbedding(4)(torch.arange(6))
    expected = block(x, position_embeddings=turn)
    got = compiled(x, position_embeddings=turn)
    assert_close(got[0], expected[0])
    if expected[1] is not None:
        assert torch.equal(got[1].tokens_per_expert, expected[1].tokens_per_expert)


def test_the_plain_stream_grows_and_the_multiplier_stops_it():
    torch.manual_seed(0)

    def grown(**options):
        y = torch.randn(2, 16, 32)
        for _ in range(32):
            block = TransformerBlock(config_of(32, num_heads=2, intermediate_size=64, **options))
            for parameter in block.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            y = block(y)[0]
        return y.square().mean().sqrt().item()

    assert (
        grown() > 4
        and grown(residual_multiplier=64**-0.5) < 1.4
        and abs(grown(norm_position="post") - 1) < 0.01
    )


def test_it_prints_where_the_norms_stand():
    assert "norm_position=sandwich, residual_multiplier=0.5" in repr(
        random_block(norm_position="sandwich", residual_multiplier=0.5)
    )


ACCELERATOR = "cuda" if torch.cuda.is_available() else "mps"


@pytest.mark.skipif(
    not torch.cuda.is_available() and not torch.backends.mps.is_available(), reason="no accelerator"
)
@KIND
def test_same_on_an_accelerator(options):
    block = random_block(**options)
    x = torch.randn(2, 6, 16)
    turn = RotaryEmbedding(4)(torch.arange(6))
    expected, _ = block(x, position_embeddings=turn)
    got, _ = block.to(ACCELERATOR)(
        x.to(ACCELERATOR), position_embeddings=tuple(t.to(ACCELERATOR) for t in turn)
    )
    assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "experts", [{}, dict(use_moe=True, num_experts=np.int64(4), top_k=np.int8(2))]
)
def test_sizes_of_numpy_compile_as_one_graph(experts):
    """A NumPy number that is left in a layer would break the graph, so the layers keep Python's
    ints.
    """
    sizes = dict(
        num_heads=np.int64(4),
        num_kv_heads=np.uint8(2),
        head_dim=np.int32(4),
        intermediate_size=np.int64(24),
    )
    torch.manual_seed(0)
    config = config_of(np.int64(16), **sizes, sliding_window=np.int16(3), **experts)
    block = TransformerBlock(config)
    x = torch.randn(2, 7, 16)
    turn = RotaryEmbedding(4)(torch.arange(7))
    compiled = torch.compile(copy.deepcopy(block), backend="eager", fullgraph=True)
    assert_close(compiled(x, position_embeddings=turn)[0], block(x, position_embeddings=turn)[0])

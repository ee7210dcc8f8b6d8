"""Estimates against what exists: built models, PyTorch's counter, the memory that is really held,
Hugging Face's sizes.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llm_course.commands.doctor import check_device
from llm_course.hardware import cpu_multiplies_bf16
from llm_course.model.config import ModelConfig
from llm_course.model.cross_entropy import linear_cross_entropy
from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import (
    count_parameters,
    flops_per_token,
    kv_cache_bytes,
    training_memory,
)
from llm_course.pages.memory import MemoryMeter

os.environ["HF_HUB_OFFLINE"] = "1"
SMALL = dict(
    vocab_size=101,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    max_position_embeddings=64,
)
EXPERTS = dict(use_moe=True, num_experts=4, top_k=2)


# ---------------------------------------------------------------- parameters


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_parameters_of_any_configuration(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    use_moe = draw(False, True)
    config = ModelConfig(
        vocab_size=draw(1, 17),
        hidden_size=draw(8, 24),
        num_layers=draw(1, 3),
        num_heads=4,
        num_kv_heads=draw(None, 1, 2),
        head_dim=draw(None, 6),
        intermediate_size=draw(None, 7),
        max_position_embeddings=draw(5, 9),
        position_type=draw("rope", "learned", "sinusoidal", "none"),
        norm_type=draw("rmsnorm", "layernorm"),
        norm_position=draw("pre", "post", "sandwich"),
        attention_bias=draw(False, True),
        attention_out_bias=draw(None, False, True),
        qk_norm=draw(False, True),
        use_glu=draw(False, True),
        mlp_bias=draw(False, True) and not use_moe,
        use_moe=use_moe,
        num_experts=draw(2, 5),
        top_k=draw(1, 2),
        shared_expert_intermediate_size=draw(None, 3) if use_moe else None,
        num_mtp_layers=draw(0, 1, 2),
        tie_word_embeddings=draw(False, True),
    )
    model = DecoderModel(config)
    count = count_parameters(config)
    assert count.total == model.num_parameters()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = sum(
        size for name, size in sizes.items() if name.startswith(("embedding.", "lm_head."))
    )
    assert count.without_embedding == count.total - tables
    idle = sum(size for name, size in sizes.items() if ".experts." in name) * (
        config.num_experts - config.top_k
    )
    mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert count.active == count.total - mtp - (idle // config.num_experts if use_moe else 0)


def test_parameters_of_hugging_face_models():
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    llama = dict(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    qwen = dict(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    )
    theirs = {
        GPT2LMHeadModel: GPT2Config(),
        LlamaForCausalLM: LlamaConfig(vocab_size=128_256, **llama),
        MixtralForCausalLM: MixtralConfig(**llama),
        Qwen3MoeForCausalLM: Qwen3MoeConfig(**qwen),
    }
    common = dict(num_heads=32, num_kv_heads=8, tie_word_embeddings=False)
    llama = dict(hidden_size=4096, num_layers=32, intermediate_size=14_336, **common)
    gpt2 = dict(
        norm_type="layernorm",
        use_glu=False,
        position_type="learned",
        attention_bias=True,
        mlp_bias=True,
    )
    ours = [
        ModelConfig(
            vocab_size=50_257,
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            max_position_embeddings=1024,
            **gpt2,
        ),
        ModelConfig(vocab_size=128_256, **llama),
        ModelConfig(vocab_size=32_000, use_moe=True, num_experts=8, **llama),
        ModelConfig(
            vocab_size=151_936,
            hidden_size=2048,
            num_layers=48,
            head_dim=128,
            intermediate_size=768,
            use_moe=True,
            num_experts=128,
            top_k=8,
            qk_norm=True,
            **common | dict(num_kv_heads=4),
        ),
    ]
    for config, (build, reference) in zip(ours, theirs.items(), strict=True):
        with torch.device("meta"):
            model = build(reference)
        assert count_parameters(config).total == sum(p.numel() for p in model.parameters()), (
            build.__name__
        )


# ---------------------------------------------------------------- arithmetic


def counted(config, training, B=2, T=40):
    """What PyTorch's counter sees of one token, with attention and experts written as products that
    it knows.
    """
    model = DecoderModel(config)
    ids = torch.randint(config.vocab_size, (B, T))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = model(ids, labels=ids if training else None)
        if training:
            (out.loss_sum + out.aux_loss).backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(
            norm_type="layernorm",
            use_glu=False,
            position_type="learned",
            attention_bias=True,
            mlp_bias=True,
        ),
        dict(norm_position="sandwich", qk_norm=True, head_dim=24),
        dict(norm_position="post", tie_word_embeddings=False),
        dict(sliding_window=8),
        dict(attn_logit_softcapping=30.0),
        dict(num_mtp_layers=2),
        dict(num_kv_heads=1, num_layers=1),
    ],
)
@pytest.mark.parametrize("T", [1, 40])
def test_arithmetic_is_what_pytorch_counts(options, T):
    config = ModelConfig(**(SMALL | options))
    if T > 1:  # PyTorch writes the products of one token with the attention of one key differently
        assert counted(config, training=True) == flops_per_token(config, 40).training
    assert counted(config, training=False, T=T) == flops_per_token(config, T).forward


def test_arithmetic_of_experts():
    for options in (
        EXPERTS,
        EXPERTS | dict(use_glu=False, top_k=1),
        EXPERTS | dict(shared_expert_intermediate_size=40),
    ):
        config = ModelConfig(**SMALL, **options)
        # without the sum of the k answers, which some versions write as a product
        ours = flops_per_token(config, 40)
        assert counted(config, training=False) == pytest.approx(ours.forward, rel=5e-3)
        assert counted(config, training=True) == pytest.approx(ours.training, rel=5e-3)
    all_chosen = flops_per_token(ModelConfig(**SMALL, **EXPERTS | dict(top_k=4)), 40)
    one_wide = flops_per_token(ModelConfig(**SMALL | dict(intermediate_size=4 * 96)), 40)
    assert all_chosen.mlp == one_wide.mlp + 2 * 2 * 64 * 4  # two layers with a router of four rows


@settings(max_examples=40, deadline=None)
@given(T=st.integers(1, 12), window=st.one_of(st.none(), st.integers(1, 14)))
def test_visible_pairs(T, window):
    config = ModelConfig(
        vocab_size=5, hidden_size=8, num_layers=2, num_heads=2, max_position_embeddings=12
    )
    if window:
        config = replace(
            config, sliding_window=window, layer_types=["full_attention", "sliding_attention"]
        )
    pairs = [sum(0 <= q - k < w for q in range(T) for k in range(T)) for w in (T, window or T)]
    assert flops_per_token(config, T, visible_only=True).scores == pytest.approx(
        4 * 8 * sum(pairs) / T
    )
    assert flops_per_token(config, T).scores == 4 * 8 * 2 * T


# ---------------------------------------------------------------- memory


def held(config, *, mixed, checkpointing, B=4, T=48):
    """Bytes alive after the forward pass, and at the worst moment of forward and backward; without
    the parameters.
    """
    torch.manual_seed(0)
    model = DecoderModel(config)
    ids = torch.randint(config.vocab_size, (B, T))
    model.activation_checkpointing = checkpointing
    with MemoryMeter() as meter:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = model(ids, labels=ids)
        after_forward = meter.live
        (out.loss_sum + out.aux_loss).backward()
    return after_forward, meter.peak


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(
            norm_type="layernorm",
            use_glu=False,
            position_type="learned",
            attention_bias=True,
            mlp_bias=True,
        ),
        dict(qk_norm=True, norm_position="sandwich", head_dim=24),
        dict(norm_position="post", activation="relu"),
        dict(sliding_window=8),
        dict(attn_logit_softcapping=5.0),
        EXPERTS | dict(shared_expert_intermediate_size=40),
        dict(num_mtp_layers=2, tie_word_embeddings=False),
    ],
)
def test_what_is_held_between_forward_and_backward(options, mixed):
    config = ModelConfig(**(SMALL | options))
    memory = training_memory(
        config, 4, 48, mixed_precision=mixed, on_bf16_cpu=cpu_multiplies_bf16()
    )
    count = count_parameters(config)
    width = 2 if mixed else 4
    heads = 1 + config.num_mtp_layers
    # of two shared experts; the others are converted one by one
    mlp = 3 * 2 * 64 * 40 if config.use_moe else count.mlp
    copies = 2 * (count.attention + mlp + count.mtp) if mixed else 0
    assert memory.weights == 4 * count.total + copies + mixed * 2 * 101 * 64
    estimate = memory.activations + copies + heads * width * (4 * 48 + 101) * 64
    assert estimate == pytest.approx(held(config, mixed=mixed, checkpointing=False)[0], rel=0.05)


@pytest.mark.parametrize(
    "options", [{}, dict(norm_type="layernorm", use_glu=False), dict(hidden_size=32, num_layers=6)]
)
def test_worst_moment_of_a_step(options):
    config = ModelConfig(**(SMALL | options))
    for checkpointing in (False, True):
        memory = training_memory(config, 8, 64, activation_checkpointing=checkpointing)
        peak = held(config, mixed=False, checkpointing=checkpointing, B=8, T=64)[1]
        # gradients are made while activations go, and an operation holds its inputs and its result
        # at once
        assert 0.8 * peak < memory.activations + memory.loss < 1.2 * peak + memory.gradients


def test_checkpointed_blocks_keep_their_inputs_only():
    config = ModelConfig(**SMALL | dict(num_layers=6))
    N = 4 * 48
    after = held(config, mixed=False, checkpointing=True)[0]
    # of six blocks, of the last norm with what it keeps, and the loss's gradient
    inputs = 4 * N * 64 * (6 + 3)
    assert after == pytest.approx(inputs + 4 * 101 * 64, rel=0.1)
    memory = [
        training_memory(config, 4, 48, activation_checkpointing=on).activations
        for on in (False, True)
    ]
    assert memory[1] < memory[0] / 3


def test_parts_of_a_step():
    config = ModelConfig(**SMALL)
    P = DecoderModel(config).num_parameters()
    memory = training_memory(config, 4, 48)
    assert memory[:3] == (4 * P, 4 * P, 8 * P) and memory.total == sum(memory)
    twice = training_memory(config, 8, 48)
    assert twice[:3] == memory[:3] and twice.activations == 2 * memory.activations
    chunks = [training_memory(config, 64, 64, chunk_size=n).loss for n in (100, 200)]
    assert chunks[1] - chunks[0] == 100 * 101 * 4
    assert (
        training_memory(config, 4, 48, mixed_precision=True).total
        < memory.total + 2 * P + 101 * 64 * 2
    )


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_loss_holds_what_is_said(mixed, softcap):
    hidden = torch.randn(2048, 256, requires_grad=True)
    weight = torch.randn(1024, 256, requires_grad=True)
    with MemoryMeter() as meter, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        linear_cross_entropy(hidden, weight, torch.randint(1024, (2048,)), softcap=softcap)
    sizes = dict(vocab_size=1024, hidden_size=256, num_heads=4, max_position_embeddings=2048)
    config = ModelConfig(**sizes, final_logit_softcapping=softcap)
    extra = 2 * (2048 + 1024) * 256 if mixed else 0  # copies of both factors
    estimate = training_memory(config, 1, 2048, mixed_precision=mixed).loss + extra
    assert estimate == pytest.approx(meter.peak, rel=0.03)


def test_cache():
    sizes = dict(vocab_size=10, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8)
    llama = ModelConfig(**sizes, max_position_embeddings=8192)
    assert kv_cache_bytes(llama, 1) == 131_072 and kv_cache_bytes(llama, 8192) == 2**30
    assert kv_cache_bytes(llama, 5, bytes_per_number=4) == 10 * kv_cache_bytes(llama, 1)
    mixed = replace(
        llama, sliding_window=100, layer_types=["full_attention", "sliding_attention"] * 16
    )
    assert kv_cache_bytes(mixed, 50) == kv_cache_bytes(llama, 50)
    assert kv_cache_bytes(mixed, 1000) == 16 * 4096 * (1000 + 100)


def test_numpys_sizes_are_sizes():
    config = ModelConfig(**SMALL)
    assert training_memory(config, np.int32(2**20), np.int32(48)) == training_memory(
        config, 2**20, 48
    )


# ---------------------------------------------------------------- the device


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda c: count_parameters(replace(c, vocab_size=None)), "vocab_size=None"),
        (lambda c: flops_per_token(replace(c, vocab_size=None), 8), "vocab_size=None"),
        (
            lambda c: flops_per_token(c, 65),
            r"sequence_length=65 must lie in 1\.\.64: raise max_position_embeddings",
        ),
        (lambda c: flops_per_token(c, 0), "sequence_length=0"),
        (lambda c: flops_per_token(c, 5.5), "sequence_length=5.5 must be a whole number"),
        (lambda c: flops_per_token(c, True), "sequence_length=True must be a whole number"),
        (lambda c: training_memory(c, 0, 8), "batch_size=0 must be a whole number of at least 1"),
        (lambda c: training_memory(c, 1.5, 8), "batch_size=1.5 must be a whole number"),
        (lambda c: training_memory(c, float("nan"), 8), "batch_size=nan must be a whole number"),
        (
            lambda c: training_memory(c, 1, 8, chunk_size=0),
            "chunk_size=0 must be a whole number of at least 1",
        ),
        (lambda c: training_memory(c, 1, 8, chunk_size=-100), "chunk_size=-100"),
        (lambda c: training_memory(c, 1, 65), "sequence_length=65"),
        (lambda c: kv_cache_bytes(c, 65), "sequence_length=65"),
        (
            lambda c: kv_cache_bytes(c, 8, bytes_per_number=-2),
            "bytes_per_number=-2 must be a whole number of at least 1",
        ),
        (
            lambda c: check_device("cpu", config=c, batch_size=0),
            "batch_size=0 must be a whole number of at least 1",
        ),
        (
            lambda c: check_device("cpu", config=c, tolerance=float("nan")),
            "tolerance=nan must be positive and finite",
        ),
        (
            lambda c: check_device("cpu", config=c, tolerance=-1),
            "tolerance=-1 must be positive and finite",
        ),
        (lambda c: check_device("cpu", config=c, sequence_length=65), "sequence_length=65"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(ModelConfig(**SMALL))

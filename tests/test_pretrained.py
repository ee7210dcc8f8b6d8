"""Checkpoints in and out: every family against Hugging Face's own model, and every planted mistake
found.

`pytest -s` prints the largest difference of each family.
"""

import ctypes
import gc
import json
import os
import random
import re
import sys
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before `transformers` is imported

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from warm import Warm

from llm_course.model import pretrained
from llm_course.model.config import PRESETS, ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.families import (
    CHANGES,
    FAMILIES,
    VALUES,
    Rule,
    read_config,
    rules,
    tensor_rules,
    write_config,
)
from llm_course.model.generation import generate
from llm_course.model.pretrained import load_pretrained, pretrained_folder, save_pretrained
from llm_course.model.rope_scaling import RopeScaling
from llm_course.text.tokenization import BPETokenizer, ByteBPETokenizer, SimpleCharacterTokenizer

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
    rope_theta=5e3,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e4)
DEEPSEEK = YARN | dict(mscale=1.0, mscale_all_dim=0.4, beta_fast=2.0, beta_slow=0.1)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
GEMMA = dict(
    head_dim=16,
    sliding_window=8,
    query_pre_attn_scalar=24,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
)
LONGROPE = dict(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=16,
    short_factor=[1.0, 1.1, 1.3, 1.7],
    long_factor=[1.0, 2.0, 3.5, 6.0],
    rope_theta=1e4,
)
GEMMA_3 = dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=24)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LOCAL = dict(
    full_attention=dict(rope_type="linear", factor=4.0, rope_theta=2e4),
    sliding_attention=dict(rope_type="default", rope_theta=3e2),
)
QWEN2_MOE = MOE | dict(shared_expert_intermediate_size=20)
VARIANTS: dict[str, tuple[str, dict]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-wide-untied": (
        "gpt2",
        dict(
            n_inner=44,
            tie_word_embeddings=False,
            activation_function="relu",
            layer_norm_epsilon=1e-3,
        ),
    ),
    "llama": ("llama", {}),
    "llama-one-kv-head-tied": (
        "llama",
        dict(num_key_value_heads=1, tie_word_embeddings=True, head_dim=10, rms_norm_eps=1e-3),
    ),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=4)),
    "llama-3": ("llama", dict(rope_parameters=LLAMA3)),
    "llama-linear": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    ),
    "llama-yarn": (
        "llama",
        dict(rope_parameters=YARN | dict(attention_factor=1.3, beta_fast=16.0, beta_slow=2.0)),
    ),
    "llama-yarn-of-deepseek": (
        "llama",
        dict(rope_parameters=DEEPSEEK | dict(truncate=False)),
    ),
    "mistral": ("mistral", dict(sliding_window=8)),
    "mistral-no-window": ("mistral", dict(sliding_window=None)),
    "mixtral": ("mixtral", dict(num_local_experts=4)),
    "mixtral-window-three-of-five": (
        "mixtral",
        dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=8),
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen2-yarn": ("qwen2", dict(rope_parameters=YARN)),
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-bias-window": (
        "qwen3",
        dict(
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=2,
        ),
    ),
    "qwen3-moe": ("qwen3_moe", MOE | dict(head_dim=16, norm_topk_prob=True)),
    "qwen3-moe-shares-window": (
        "qwen3_moe",
        MOE | dict(norm_topk_prob=False, use_sliding_window=True, sliding_window=8),
    ),
    "phi3": ("phi3", {}),
    "phi3-window-one-kv-head-tied": (
        "phi3",
        dict(num_key_value_heads=1, sliding_window=8, tie_word_embeddings=True, rms_norm_eps=1e-3),
    ),
    "phi3-heads-of-another-width": (
        "phi3",
        dict(head_dim=10, rope_parameters=dict(rope_type="default", rope_theta=5e3)),
    ),
    "llama-dynamic": (
        "llama",
        dict(
            max_position_embeddings=24,
            rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=1e4),
        ),
    ),
    "llama-longrope": ("llama", dict(rope_parameters=LONGROPE)),
    "llama-longrope-short-text": (
        "llama",
        dict(rope_parameters=LONGROPE | dict(original_max_position_embeddings=48)),
    ),
    "phi3-longrope-partial": (
        "phi3",
        dict(
            original_max_position_embeddings=16,
            partial_rotary_factor=0.5,
            rope_parameters=LONGROPE | dict(short_factor=[1.0, 1.4], long_factor=[1.0, 5.0]),
        ),
    ),
    "phi3-partial": ("phi3", dict(partial_rotary_factor=0.75)),
    "qwen3-moe-dense-layers": (
        "qwen3_moe",
        MOE | dict(num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=2),
    ),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe-dense-window-no-bias": (
        "qwen2_moe",
        QWEN2_MOE
        | dict(
            mlp_only_layers=[2],
            qkv_bias=False,
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=8,
        ),
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-bias-yarn": (
        "olmo2",
        dict(attention_bias=True, num_key_value_heads=4, rope_parameters=YARN),
    ),
    "olmo3": ("olmo3", dict(sliding_window=8)),
    "olmo3-two-bases": ("olmo3", dict(sliding_window=8, layer_types=MIXED, rope_parameters=LOCAL)),
    "gemma3": ("gemma3_text", GEMMA_3 | dict(layer_types=MIXED)),
    "gemma3-two-bases-cap-untied": (
        "gemma3_text",
        GEMMA_3
        | dict(
            layer_types=MIXED,
            rope_parameters=LOCAL,
            final_logit_softcapping=3.0,
            tie_word_embeddings=False,
            attention_bias=True,
        ),
    ),
    "smollm3": ("smollm3", dict(num_hidden_layers=5)),
    "smollm3-window-bias": (
        "smollm3",
        dict(
            no_rope_layers=[1, 0, 1],
            use_sliding_window=True,
            sliding_window=8,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "granite": ("granite", {}),
    "granite-multipliers": (
        "granite",
        dict(
            embedding_multiplier=12.0,
            attention_multiplier=0.2,
            residual_multiplier=0.22,
            logits_scaling=7.0,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-no-caps-untied": (
        "gemma2",
        GEMMA
        | dict(
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            tie_word_embeddings=False,
            attention_bias=True,
        ),
    ),
}
IDS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(0))


def build(model_type, changes):
    """A model of transformers in which nothing is zero or one by accident."""
    default = AutoConfig.for_model(model_type)
    # GPT-2 has no key for each
    sizes = {key: size for key, size in SIZES.items() if hasattr(default, key)}
    config = AutoConfig.for_model(model_type, **(sizes | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1))
    return model


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Make (model, folder) for a variant, once."""
    made = {}
    root = tmp_path_factory.mktemp("published")

    def get(variant):
        if variant not in made:
            model = build(*VARIANTS[variant])
            model.save_pretrained(root / variant)
            made[variant] = model, root / variant
        return made[variant]

    return get


@torch.no_grad()
def difference(ours, theirs, ids=IDS):
    return (ours(ids).logits.float() - theirs(ids).logits).abs().max().item()


def rewrite(folder, target, weights=lambda state: state, **config):
    """A copy of a folder with other weights and keys in config.json (... takes a key out)."""
    target.mkdir()
    described = json.loads((folder / "config.json").read_text()) | config
    (target / "config.json").write_text(
        json.dumps({k: v for k, v in described.items() if v is not ...})
    )
    state = weights(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, target / "model.safetensors"
    )
    return target


# ---------------------------------------------------------------- both directions


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_directions(variant, published, tmp_path):
    theirs, folder = published(variant)
    ours = load_pretrained(folder)
    assert not ours.training
    model_type = VARIANTS[variant][0]
    written = save_pretrained(ours, tmp_path / "out", model_type=model_type, max_shard_size=16_000)
    assert (
        len(list(written.glob("model-*.safetensors"))) > 3
        and (written / "model.safetensors.index.json").exists()
    )
    index = json.loads((written / "model.safetensors.index.json").read_text())
    # their names, to the letter
    assert index["weight_map"].keys() == load_file(folder / "model.safetensors").keys()
    back = AutoModelForCausalLM.from_pretrained(written, attn_implementation="eager").eval()
    assert type(back) is type(theirs)
    state = theirs.state_dict()
    for name, tensor in back.state_dict().items():
        assert_close(
            tensor,
            state[name],
            atol=1e-7 if model_type.startswith("gemma") and "norm" in name else 0,
            rtol=0,
        )
    again = load_pretrained(written)  # from the shards
    assert all(
        torch.equal(a, b) or model_type.startswith("gemma")
        for a, b in zip(again.parameters(), ours.parameters(), strict=True)
    )
    with torch.no_grad():
        outward = (back(IDS).logits - theirs(IDS).logits).abs().max().item()
    inward = difference(ours, theirs)
    print(f"  {variant:30} in {inward:.1e}, out {outward:.1e}")
    assert inward < 1e-5 and outward < 1e-5


@pytest.mark.parametrize(
    "variant",
    [
        "gpt2",
        "llama-3",
        "mistral",
        "mixtral-window-three-of-five",
        "qwen2-window",
        "qwen3",
        "qwen3-moe",
        "phi3-window-one-kv-head-tied",
        "gemma2",
    ],
)
def test_greedy_texts_and_left_padding(variant, published):
    theirs, folder = published(variant)
    ours = load_pretrained(folder)
    ones = torch.ones(2, 11, dtype=torch.int64)
    expected = theirs.generate(IDS[:, :11], attention_mask=ones, max_new_tokens=20, do_sample=False)
    assert torch.equal(generate(ours, IDS[:, :11], max_new_tokens=20), expected)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        a = ours(IDS, attention_mask=mask, position_ids=positions).logits
        b = theirs(IDS, attention_mask=mask, position_ids=positions).logits
        alone = ours(IDS[:1, 7:]).logits
    assert_close(a[mask.bool()], b[mask.bool()], atol=1e-5, rtol=0)
    assert_close(a[:1, 7:], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["gpt2", "llama-3", "qwen3-moe", "gemma2"])
def test_bfloat16_in_and_out(variant, published, tmp_path):
    theirs, folder = published(variant)
    ours = load_pretrained(folder, dtype=torch.bfloat16)
    kinds = {
        parameter.dtype
        for name, parameter in ours.named_parameters()
        if not (variant == "gemma2" and "norm" in name)
    }
    assert kinds == {torch.bfloat16}
    with torch.no_grad():
        expected = theirs(IDS).logits
        # not the largest: a router may choose another expert
        error = (ours(IDS).logits.float() - expected).abs().median()
    assert 0 < error < 0.03 * expected.std()
    written = save_pretrained(ours, tmp_path / "half")
    assert json.loads((written / "config.json").read_text())["torch_dtype"] == "bfloat16"
    back = AutoModelForCausalLM.from_pretrained(written, attn_implementation="eager")
    for (name, a), b in zip(back.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert_close(
            a, b.bfloat16(), atol=0, rtol=2**-7 if variant == "gemma2" and "norm" in name else 0
        )
    # None keeps the file's
    assert {p.dtype for p in load_pretrained(written).embedding.parameters()} == {torch.bfloat16}
    assert load_pretrained(written, dtype=torch.float32).lm_head.weight.dtype == torch.float32


def test_gemma_norms_keep_their_digits_in_bfloat16(published):
    theirs, folder = published("gemma2")
    norm = load_pretrained(folder, dtype=torch.bfloat16).norm.weight
    assert norm.dtype == torch.float32
    assert_close(norm, theirs.model.norm.weight.data + 1, atol=1e-6, rtol=0)


# ---------------------------------------------------------------- planted mistakes


def scale(end, change):
    return lambda state: {name: change(t) if name.endswith(end) else t for name, t in state.items()}


def exchange(a, b):
    def change(state):
        pairs = {name: name.replace(a, b) if a in name else name.replace(b, a) for name in state}
        return {name: state[pairs[name]] for name in state}

    return change


MISTAKES = {
    "gate and up": ("llama", exchange("gate_proj", "up_proj"), {}),
    "the two norms": ("llama", exchange("input_layernorm", "post_attention_layernorm"), {}),
    "w1 and w3": ("mixtral", exchange(".w1.", ".w3."), {}),
    "experts 0 and 1": ("mixtral", exchange("experts.0.", "experts.1."), {}),
    "queries after the keys": (
        "phi3",
        scale("qkv_proj.weight", lambda t: t[[*range(32, 48), *range(32), *range(48, 64)]]),
        {},
    ),
    "up above gate": ("phi3", scale("gate_up_proj.weight", lambda t: t.roll(40, 0)), {}),
    "no normalised weights": ("qwen3-moe", None, dict(norm_topk_prob=False)),
    "output not transposed": ("gpt2", scale("attn.c_proj.weight", lambda t: t.T), {}),
    "c_attn read as k, q, v": (
        "gpt2",
        scale("c_attn.weight", lambda t: t[:, [*range(32, 64), *range(32), *range(64, 96)]]),
        {},
    ),
    "c_attn not transposed": ("gpt2", scale("c_attn.weight", lambda t: t.T.reshape(32, 96)), {}),
    "forgotten + 1": ("gemma2", scale("norm.weight", lambda t: t - 1), {}),
    "the norms after": (
        "gemma2",
        exchange("post_attention_layernorm", "post_feedforward_layernorm"),
        {},
    ),
    "no soft cap": ("gemma2", None, dict(attn_logit_softcapping=None)),
    "windows in the odd layers": (
        "gemma2",
        None,
        dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "scale of the heads": ("gemma2", None, dict(query_pre_attn_scalar=16)),
    "no mscale": (
        "llama-yarn-of-deepseek",
        None,
        dict(rope_parameters=DEEPSEEK | dict(truncate=False, mscale=None, mscale_all_dim=None)),
    ),
    "rounded ends of yarn": (
        "llama-yarn-of-deepseek",
        None,
        dict(rope_parameters=DEEPSEEK),
    ),
    "the two bases": (
        "gemma3-two-bases-cap-untied",
        None,
        dict(
            rope_parameters=dict(
                full_attention=LOCAL["full_attention"],
                sliding_attention=dict(rope_type="default", rope_theta=2e4),
            )
        ),
    ),
    "forgotten + 1 of a query norm": ("gemma3", scale("q_norm.weight", lambda t: t - 1), {}),
    "rope in a layer without": ("smollm3-window-bias", None, dict(no_rope_layers=[1, 1, 1])),
    "no gate of the shared expert": (
        "qwen2-moe",
        scale("shared_expert_gate.weight", torch.zeros_like),
        {},
    ),
    "logits not scaled": ("granite-multipliers", None, dict(logits_scaling=1.0)),
    "norms exchanged": (
        "olmo2",
        exchange("post_attention_layernorm", "post_feedforward_layernorm"),
        {},
    ),
    "all of each head rotated": (
        "phi3-partial",
        None,
        dict(
            partial_rotary_factor=1.0,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
    "the long factors": (
        "llama-longrope",
        None,
        dict(rope_parameters=LONGROPE | dict(long_factor=[1.0, 2.0, 3.5, 9.0])),
    ),
    "dynamic from another length": ("llama-dynamic", None, dict(max_position_embeddings=23)),
    "missing bias": ("qwen2", scale("_proj.bias", torch.zeros_like), {}),
    "query and key norm": ("qwen3", exchange("q_norm", "k_norm"), {}),
    "no window": ("mistral", None, dict(sliding_window=None)),
    "window of 9": ("mistral", None, dict(sliding_window=9)),
    "theta": ("llama", None, dict(rope_parameters=dict(rope_type="default", rope_theta=20_000.0))),
    "no scaling": (
        "llama-3",
        None,
        dict(rope_parameters=dict(rope_type="default", rope_theta=5e3)),
    ),
    "epsilon": ("llama", None, dict(rms_norm_eps=1e-5)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_finds_each_mistake(mistake, published, tmp_path):
    variant, weights, config = MISTAKES[mistake]
    theirs, folder = published(variant)
    broken = load_pretrained(
        rewrite(folder, tmp_path / "broken", weights or (lambda state: state), **config)
    )
    assert difference(broken, theirs) > 5e-4  # the right mapping stays below 1e-5


# ---------------------------------------------------------------- the files


def test_rules_have_inverses():
    torch.manual_seed(0)
    tensors = {"split": [torch.randn(6, 18)], "stack": list(torch.randn(4, 3, 5))}
    tensors["rows"] = [torch.randn(3, 5)]
    for name, change in CHANGES.items():
        given_ = tensors.get(name, [torch.randn(3, 5), torch.randn(4)])
        for a, b in zip(given_, change.write(change.read(given_, [2, 1])), strict=True):
            assert_close(a, b, atol=1e-6 if name == "plus_one" else 0, rtol=0)


def test_values_have_inverses():
    for change in ("root", "inverse_square"):
        read, write = VALUES[change]
        assert all(write(read(n, {})) == n for n in range(1, 20_000))
    assert int((3**0.5) ** 2) == 2  # so an inverse that does not round would fail
    read, write = VALUES["activation"]
    assert {
        name: write(read(name, {})) for name in ("silu", "gelu", "relu", "gelu_pytorch_tanh")
    } == {name: name for name in ("silu", "gelu", "relu", "gelu_pytorch_tanh")}
    assert write(read("gelu_new", {})) == "gelu_pytorch_tanh"  # up to spelling
    rope = dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    read, write = VALUES["rope"]
    assert write(read(rope, {})).items() >= rope.items() and read(
        write(read(rope, {})), {}
    ) == read(rope, {})
    assert write(read(None, {})) is None
    read, write = VALUES["or_four_times"]
    for x, expected in ((None, 64), (40, 40)):
        assert (
            read(x, dict(n_embd=16)) == expected
            and read(write(expected), dict(n_embd=16)) == expected
        )


def test_values_about_windows():
    window = "sliding_attention"
    full = "full_attention"
    late = VALUES["late_layers"].read
    even = VALUES["even_layers"].read
    qwen = dict(num_hidden_layers=4, max_window_layers=3, use_sliding_window=True)
    assert late(None, qwen) == [full, full, full, window] and late([window], qwen) == [window]
    assert (
        late(None, qwen | dict(use_sliding_window=False))
        is late(None, dict(num_hidden_layers=4))
        is None
    )
    assert late(None, qwen | dict(sliding_window=None)) is None
    assert (
        late(None, dict(num_hidden_layers=30, use_sliding_window=True))
        == [full] * 28 + [window] * 2
    )
    assert even(None, dict(num_hidden_layers=3)) == [window, full, window] and even([full], {}) == [
        full
    ]
    assert even([full], dict(sliding_window=None)) is None
    assert [VALUES["if_used"].read(9, dict(use_sliding_window=used)) for used in (True, False)] == [
        9,
        None,
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_each_absent_key_means(name):
    """A file with the keys that have no default, and the same with all keys filled in."""
    theirs = AutoConfig.for_model(name).to_dict()
    asked = [
        next(n for n in key.name.split("|") if n in theirs)
        for key in FAMILIES[name].keys.values()
        if key.default is ...
    ]
    bare = {"model_type": name} | {n: theirs[n] for n in asked}
    filled = json.loads(AutoConfig.for_model(**bare).to_json_string(use_diff=False))
    ours, right = (write_config(read_config(hf)[1], model_type=name)[1] for hf in (bare, filled))
    assert ours == right


def test_mixtral_without_a_theta(published, tmp_path):
    theirs, folder = published("mixtral")
    without = rewrite(folder, tmp_path / "without", rope_parameters=..., rope_theta=...)
    assert load_pretrained(without).config.rope_theta == 1e6
    loaded = AutoModelForCausalLM.from_pretrained(without, attn_implementation="eager").eval()
    assert difference(load_pretrained(without), loaded) < 1e-5


def test_rules_are_data_that_is_checked():
    with pytest.raises(
        ValueError, match="change='turn' is unknown: choose one of 'same', 'transpose'"
    ):
        rules({"a": "b"}, "turn")
    assert rules({"a": "b", "c.{w}": "d.{w} e.{w}"}) == (
        Rule(("a",), ("b",)),
        Rule(("c.weight",), ("d.weight", "e.weight")),
        Rule(("c.bias",), ("d.bias", "e.bias")),
    )


def test_hub_spelling_of_gpt2(published, tmp_path):
    """Without the prefix, with the masks and keys of 2019."""
    theirs, folder = published("gpt2")
    masks = {
        "h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    old = dict(
        n_ctx=64, task_specific_params={"text-generation": {}}, tie_word_embeddings=..., dtype=...
    )

    def strip(state):
        return {name.removeprefix("transformer."): tensor for name, tensor in state.items()} | masks

    assert (
        difference(load_pretrained(rewrite(folder, tmp_path / "old", strip, **old)), theirs) < 1e-5
    )


def test_hub_spelling_of_llama(published, tmp_path):
    """Old rotary keys and dtype, inv_freq buffers, absent keys."""
    theirs, folder = published("llama-3")
    plain = {
        name: value for name, value in LLAMA3.items() if name not in ("rope_theta", "rope_type")
    }
    for index, kind in enumerate(("rope_type", "type")):
        old = dict(
            rope_parameters=...,
            rope_theta=5e3,
            rope_scaling=plain | {kind: "llama3"},
            dtype=...,
            torch_dtype="float16",
            head_dim=...,
            attention_bias=...,
            mlp_bias=...,
            tie_word_embeddings=...,
            pretraining_tp=1,
        )
        extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
        folder_ = rewrite(
            folder, tmp_path / f"old{index}", lambda state, extra=extra: state | extra, **old
        )
        assert difference(load_pretrained(folder_), theirs) < 1e-5


def test_qwen_yarn_of_the_hub(published, tmp_path):
    """Qwen's documentation leaves out what the length was, and says `type`."""
    theirs, folder = published("qwen2-yarn")
    hub = dict(
        rope_parameters=...,
        rope_theta=1e4,
        max_position_embeddings=16,
        rope_scaling=dict(type="yarn", factor=4.0),
    )
    config = read_config(
        json.loads((rewrite(folder, tmp_path / "hub", **hub) / "config.json").read_text())
    )[1]
    assert config.rope_scaling == RopeScaling(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16
    )


def test_layer_types_by_the_rules_of_old_files(published, tmp_path):
    for variant in ("gemma2", "qwen2-window"):
        theirs, folder = published(variant)
        assert (
            difference(
                load_pretrained(rewrite(folder, tmp_path / variant, layer_types=...)), theirs
            )
            < 1e-5
        )


def test_what_an_absent_window_means(published):
    qwen = json.loads((published("qwen2-window")[1] / "config.json").read_text())
    gemma = json.loads((published("gemma2")[1] / "config.json").read_text())
    del qwen["use_sliding_window"], gemma["sliding_window"]
    moe = json.loads((published("qwen3-moe-shares-window")[1] / "config.json").read_text()) | dict(
        use_sliding_window=False
    )
    for hf in (qwen, qwen | dict(use_sliding_window=False), moe, gemma):
        # Qwen: none, Gemma: 4096
        assert read_config(hf)[1].sliding_window == AutoConfig.for_model(**hf).sliding_window
    assert read_config(gemma | dict(sliding_window=None))[1].sliding_window is None


def test_tied_head_in_the_file(published, tmp_path):
    theirs, folder = published("qwen3")
    table = "model.embed_tokens.weight"
    same = load_pretrained(
        rewrite(folder, tmp_path / "same", lambda s: s | {"lm_head.weight": s[table].clone()})
    )
    assert (
        same.lm_head.weight is same.embedding.embed_tokens.weight
        and difference(same, theirs) < 1e-5
    )
    other = rewrite(folder, tmp_path / "other", lambda s: s | {"lm_head.weight": s[table] + 1})
    with pytest.raises(ValueError, match="tie_word_embeddings=true"):
        load_pretrained(other)
    with pytest.raises(ValueError, match="lm_head.weight is missing"):
        load_pretrained(rewrite(folder, tmp_path / "untied", tie_word_embeddings=False))


def test_the_weights_are_our_own(published, tmp_path):
    _, folder = published("llama")
    copied = rewrite(folder, tmp_path / "copy")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = load_pretrained(copied)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was initialised
    logits = model(IDS).logits.detach()
    path = copied / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(2000)
        file.write(bytes(path.stat().st_size - 2000))
    assert torch.equal(model(IDS).logits, logits)
    storages = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(storages)) == len(storages) and all(
        p.is_contiguous() and p.requires_grad for p in model.parameters()
    )
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    model.train()(IDS, labels=IDS).loss_sum.backward()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("twice", [False, True])
def test_the_weights_are_in_memory_once(twice, tmp_path, monkeypatch):
    def own_memory():  # without mapped files
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    model = tiny(vocab_size=20_000, hidden_size=512)
    size = sum(p.nbytes for p in model.parameters())
    folder = save_pretrained(model, tmp_path / "large")
    # the first time imports what "meta" needs, 60 MB
    load_pretrained(save_pretrained(tiny(), tmp_path / "small"))
    del model
    gc.collect()
    # what is free counts neither before nor after
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    peak = []
    before = own_memory()
    real = torch.Tensor.aminmax

    def note(self):  # called once for each tensor, after it has been copied
        peak.append(own_memory() - before)
        return real(self)

    class Copying:  # the planted mistake: what is read is copied before it is copied
        def __init__(self, *args):
            self.context = real_open(*args)

        def __enter__(self):
            self.file = self.context.__enter__()
            return self

        def __exit__(self, *args):
            return self.context.__exit__(*args)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            return self.file.get_tensor(name).clone()

    real_open = pretrained.safe_open
    monkeypatch.setattr(torch.Tensor, "aminmax", note)
    if twice:
        monkeypatch.setattr(pretrained, "safe_open", Copying)
    loaded = load_pretrained(folder)
    assert loaded.config.hidden_size == 512
    print(f"  at most {max(peak) / size:.2f} times the weights")
    assert max(peak) > 1.7 * size if twice else 0.8 * size < max(peak) < 1.3 * size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_that_are_not_finite_are_found_without_a_copy(
    dtype, published, tmp_path, monkeypatch
):
    _, folder = published("llama")
    name = "model.layers.2.mlp.down_proj.weight"
    sizes = []
    real = torch.Tensor.isfinite

    def note(self):
        sizes.append(self.numel())
        return real(self)

    monkeypatch.setattr(torch.Tensor, "isfinite", note)
    for index, value in enumerate((torch.nan, torch.inf, -torch.inf, 1.0)):

        def spoil(state, value=value):
            state = {key: tensor.to(dtype) for key, tensor in state.items()}
            state[name][3, 5] = value
            return state

        spoiled = rewrite(folder, tmp_path / str(index), spoil)
        if value == 1.0:
            assert load_pretrained(spoiled).lm_head.weight.dtype == dtype
            continue
        with pytest.raises(
            ValueError,
            match=f"^{name} has numbers that are not finite as {dtype}",
        ):
            load_pretrained(spoiled)
    # isfinite of a whole tensor makes several of its size, and took half the loading time
    assert set(sizes) == {1}


def test_padded_vocabulary_and_any_device(published):
    _, folder = published("llama")
    assert load_pretrained(str(folder), device="cpu").lm_head.weight.device.type == "cpu"


GPU = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else None


@pytest.mark.skipif(GPU is None, reason="needs an accelerator")
@pytest.mark.parametrize("variant", ["gpt2", "mixtral", "gemma2"])
def test_onto_an_accelerator_and_back(variant, published, tmp_path):
    theirs, folder = published(variant)
    ours = load_pretrained(folder, device=GPU)
    assert {t.device.type for t in (*ours.parameters(), *ours.buffers())} == {GPU}
    with torch.no_grad():
        assert_close(ours(IDS.to(GPU)).logits.cpu(), theirs(IDS).logits, atol=2e-3, rtol=0)
    again = load_pretrained(save_pretrained(ours, tmp_path / "out"))
    assert all(
        torch.equal(a.cpu(), b) or variant == "gemma2"
        for a, b in zip(ours.parameters(), again.parameters(), strict=True)
    )


# ---------------------------------------------------------------- refusals


REFUSED = {
    "quantization_config={'bits': 4} is not known": (
        "llama",
        dict(quantization_config={"bits": 4}),
    ),
    "partial_rotary_factor=0.5 is not supported": ("llama", dict(partial_rotary_factor=0.5)),
    "rope_interleaved=True": ("llama", dict(rope_interleaved=True)),
    "'ntk'": (
        "llama",
        dict(rope_parameters=dict(rope_type="ntk", factor=2.0, rope_theta=1e4)),
    ),
    "short_factor has 1 numbers, expected 4": (
        "llama",
        dict(rope_parameters=dict(rope_type="longrope", short_factor=[1], long_factor=[1])),
    ),
    "long_factor=None must be a list": (
        "llama",
        dict(rope_parameters=dict(rope_type="longrope", short_factor=[1])),
    ),
    "have a rope_theta of their own, and no scaling": (
        "gemma3",
        dict(rope_parameters=LOCAL | dict(sliding_attention=LOCAL["full_attention"])),
    ),
    "decoder_sparse_step=0 must be a whole number": ("qwen3-moe", dict(decoder_sparse_step=0)),
    "dense_layers=[0, 1, 2] must be some of the layers 0 to 2": (
        "qwen3-moe",
        dict(mlp_only_layers=[0, 1, 2]),
    ),
    "layer_types needs sliding_window": (
        "gemma3",
        dict(sliding_window=None, layer_types=["sliding_attention"] * 3),
    ),
    "mscale": ("llama", dict(rope_parameters=YARN | dict(mscale=0.7))),
    "partial_rotary_factor=0.5 is not supported, only 1.0": (
        "llama",
        dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
    ),
    "'full_attention'": (
        "gemma2",
        dict(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    ),
    "keep one of them": ("llama", dict(rope_scaling=dict(rope_type="linear", factor=2.0))),
    "'rope_theta': 20000.0": ("llama", dict(rope_theta=2e4)),  # rope_parameters says 10000
    "'type': 'linear'": (
        "llama-3",
        dict(rope_parameters=LLAMA3 | dict(type="linear")),
    ),
    "rope_scaling='linear', expected an object": (
        "llama",
        dict(rope_parameters=..., rope_scaling="linear"),
    ),
    "rope_parameters=[1]": ("llama", dict(rope_parameters=[1])),
    "rope_parameters=3": ("llama", dict(rope_parameters=3)),
    "model_type=['llama']": ("llama", dict(model_type=["llama"])),
    "model_type='../../etc/passwd' is none of": ("llama", dict(model_type="../../etc/passwd")),
    "model_type=None": ("llama", dict(model_type=...)),
    "config.json of a gemma2: ": ("gemma2", dict(query_pre_attn_scalar=0)),
    "config.json of a llama: ": ("llama", dict(hidden_size=10**400)),
    "use_sliding_window='false' is not supported, only False or True or None": (
        "qwen2",
        dict(use_sliding_window="false"),
    ),
    "factor=0.5": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", factor=0.5, rope_theta=1e4)),
    ),
    "missing 1 required": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4))),
    "activation='quick_gelu'": ("llama", dict(hidden_act="quick_gelu")),
    "architectures=": ("llama", dict(architectures=["LlamaForSequenceClassification"])),
    "rope_scaling={'rope_type': 'yarn'": (  # transformers takes it for longrope there
        "phi3",
        dict(rope_parameters=YARN),
    ),
    "lm_head_bias=True": ("phi3", dict(lm_head_bias=True)),
    "rms_norm_eps is missing": ("llama", dict(rms_norm_eps=...)),
    "hidden_size=0": ("llama", dict(hidden_size=0)),
    "none of gpt2, llama": ("llama", dict(model_type="mamba")),
    "scale_attn_by_inverse_layer_idx=True": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)),
    "scale_attn_weights=False": ("gpt2", dict(scale_attn_weights=False)),
    "add_cross_attention=True": ("gpt2", dict(add_cross_attention=True)),
    "several values": ("qwen3-moe", dict(num_experts=3)),
    "router_jitter_noise=0.1": ("mixtral", dict(router_jitter_noise=0.1)),
    "use_bidirectional_attention=True": ("gemma2", dict(use_bidirectional_attention=True)),
    "chunked_attention": ("gemma2", dict(layer_types=["chunked_attention"] * 3)),
    "max_position_embeddings=None must be a whole number": (
        "llama",
        dict(max_position_embeddings=None, rope_parameters=dict(rope_type="dynamic", factor=2.0)),
    ),
    "factor='2' must be finite and at least 1": (
        "llama",
        dict(rope_parameters=dict(rope_type="dynamic", factor="2")),
    ),
    "original_max_position_embeddings=0 must be a whole number": (
        "llama",
        dict(rope_parameters=dict(rope_type="longrope", original_max_position_embeddings=0)),
    ),
    "hidden_act=['silu'] can't be used: expected the name": ("llama", dict(hidden_act=["silu"])),
    "hidden_act=None can't be used": ("llama", dict(hidden_act=None)),
    "no_rope_layers has 1 entries, and num_hidden_layers=5": ("smollm3", dict(no_rope_layers=[1])),
    "no_rope_layers=5 can't be used": ("smollm3", dict(no_rope_layers=5)),
    "sliding_window_pattern=0 must be": (
        "gemma3",
        dict(layer_types=None, sliding_window_pattern=0),
    ),
    "max_window_layers='3' must be": (
        "qwen2-window",
        dict(layer_types=None, max_window_layers="3"),
    ),
    "query_pre_attn_scalar='x' can't be used": ("gemma2", dict(query_pre_attn_scalar="x")),
    "mlp_only_layers=1 can't be used": ("qwen3-moe", dict(mlp_only_layers=1)),
    "must have num_layers=3 entries": ("gemma2", dict(layer_types=["full_attention"] * 2)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_settings_are_refused_by_name(words, published):
    variant, config = REFUSED[words]
    hf = json.loads((published(variant)[1] / "config.json").read_text()) | config
    with pytest.raises(ValueError) as error:
        read_config({name: value for name, value in hf.items() if value is not ...})
    assert words in str(error.value)


@pytest.mark.parametrize("content", [None, [], 3, "llama"])
def test_what_is_no_object_is_no_config(content):
    with pytest.raises(ValueError, match="config.json holds a .*, expected an object"):
        read_config(content)
    with pytest.raises(ValueError, match="expected a ModelConfig"):
        write_config(content)


@pytest.mark.parametrize("name", [None, "", 5, b"folder"])
def test_what_names_no_model_is_refused(name):
    with pytest.raises(ValueError, match="names no model: give a folder"):
        load_pretrained(name)


def test_a_file_is_not_looked_for_on_the_hub(published, monkeypatch):
    folder = published("llama")[1]
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ValueError, match="config.json' is a file: give the folder"):
        load_pretrained(f"{folder.name}/config.json")


def test_a_model_larger_than_its_files_is_never_built(published, tmp_path):
    """A billion layers would take hours, on the meta device too."""
    for variant, key in (("llama", "num_hidden_layers"), ("mixtral", "num_local_experts")):
        folder = rewrite(published(variant)[1], tmp_path / variant)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {key: 10**9}))
        with pytest.raises(ValueError, match="num_.*=1000000000 does not go with"):
            load_pretrained(folder)


def test_a_device_is_checked_before_a_file_is_read(published):
    for device in ("abacus", "cuda:77", "meta", torch.device("meta")):
        with pytest.raises(ValueError, match="^device='.*' (cannot be used|holds no numbers)"):
            load_pretrained("no-such-folder", device=device)
    assert load_pretrained(published("llama")[1], device="auto").config.num_layers == 3


def test_what_cannot_be_written_is_refused_before_a_file_is_made(tmp_path):
    with torch.device("meta"):
        empty = tiny()
    tokenizer = BPETokenizer.train(["a b c"] * 5, vocab_size=260)
    template = "{{ messages }}"
    for words, call in {
        "must be a path": lambda: save_pretrained(tiny(), None),
        "holds no numbers": lambda: save_pretrained(empty, tmp_path / "x"),
        "has dtype torch.float8": lambda: save_pretrained(
            tiny().to(torch.float8_e4m3fn), tmp_path / "x"
        ),
        "goes with a tokenizer": lambda: save_pretrained(
            tiny(), tmp_path / "x", chat_template=template
        ),
        "must be a string": lambda: save_pretrained(
            tiny(vocab_size=260), tmp_path / "x", tokenizer=tokenizer, chat_template={"a": 1}
        ),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    assert list(tmp_path.iterdir()) == []


HARMLESS = {
    "use_mrope": ("qwen2", False),
    "_num_labels": ("llama", 2),
    "transformers.js_config": ("llama", {"kv_cache_dtype": {"fp16": "float16"}}),
}


@pytest.mark.parametrize("key", HARMLESS)
def test_keys_that_change_nothing_are_read(key, published):
    variant, value = HARMLESS[key]
    hf = json.loads((published(variant)[1] / "config.json").read_text())
    assert read_config(hf | {key: value}) == read_config(hf)
    with pytest.raises(ValueError, match="use_mrope=True is not supported, only False"):
        read_config(hf | dict(use_mrope=True))


@pytest.mark.parametrize("model_type, head_dim", [("qwen3", 128), ("gemma2", 256)])
def test_an_absent_head_dim_is_the_default_of_the_family(model_type, head_dim, published):
    hf = json.loads((published(model_type)[1] / "config.json").read_text())
    del hf["head_dim"]
    assert AutoConfig.for_model(**hf).head_dim == head_dim
    assert read_config(hf)[1].head_dim == head_dim


def test_an_error_has_the_name_of_the_files_key(published):
    cases = {
        "hidden_act": ("llama", dict(hidden_act="gelu_fast"), "activation='gelu_fast'"),
        "hidden_activation": ("gemma2", dict(hidden_activation="x"), "activation='x'"),
        "activation_function": ("gpt2", dict(activation_function="x"), "activation='x'"),
        "n_embd": ("gpt2", dict(n_embd="32"), "hidden_size='32'"),
        "num_attention_heads": ("llama", dict(num_attention_heads=0), "num_heads=0"),
        "moe_intermediate_size": (
            "qwen3-moe",
            dict(moe_intermediate_size=0),
            "intermediate_size=0",
        ),
    }
    for key, (variant, change, ours) in cases.items():
        hf = json.loads((published(variant)[1] / "config.json").read_text())
        with pytest.raises(ValueError) as error:
            read_config(hf | change)
        setting = ours.partition("=")[0]
        assert f": {ours} must be " in str(error.value)
        assert str(error.value).endswith(f"; {setting} is {key} in the file")


def test_an_error_has_the_name_of_the_files_tensor(published, tmp_path):
    for variant, name in (
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("gpt2", "transformer.h.1.mlp.c_fc.weight"),
    ):
        folder = published(variant)[1]
        lacking = rewrite(
            folder, tmp_path / variant, lambda s, name=name: {k: s[k] for k in s if k != name}
        )
        with pytest.raises(ValueError, match=f": {name} is missing"):
            load_pretrained(lacking)
        broken = rewrite(
            folder,
            tmp_path / f"{variant}-nan",
            lambda s, name=name: s | {name: s[name] * torch.nan},
        )
        with pytest.raises(ValueError, match=f"^{name} has numbers that are not finite"):
            load_pretrained(broken)
    model = tiny()
    model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="^model.layers.1.mlp.up_proj.weight has numbers"):
        save_pretrained(model, tmp_path / "x")


def test_what_is_said_twice_alike_is_read(published):
    hf = json.loads((published("llama-3")[1] / "config.json").read_text())
    twice = hf | dict(rope_theta=LLAMA3["rope_theta"], rope_parameters=LLAMA3 | dict(type="llama3"))
    assert read_config(twice) == read_config(hf) and read_config(
        hf | dict(rope_theta=None)
    ) == read_config(hf)


def test_tensors_are_refused_by_name(published, tmp_path):
    _, folder = published("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "is missing": lambda s: {k: v for k, v in s.items() if k != name},
        "score.weight is unexpected": lambda s: s | {"score.weight": torch.ones(2, 2)},
        r"has shape \[32, 40\], expected \[40, 32\]": lambda s: s | {name: s[name].T},
        "not finite as torch.float32": lambda s: s | {name: s[name] * torch.inf},
        f"{name} is stored as I8, expected F64, F32, F16 or BF16": (
            lambda s: s | {name: torch.ones(40, 32, dtype=torch.int8)}
        ),
        "is stored as BOOL": lambda s: s | {name: torch.ones(40, 32, dtype=torch.bool)},
        "is stored as C64": lambda s: s | {name: torch.ones(40, 32, dtype=torch.complex64)},
        "is stored as F8_E4M3": lambda s: s | {name: torch.ones(40, 32).to(torch.float8_e4m3fn)},
        "stored as I64, .* and 26 more": lambda s: {k: t.long() for k, t in s.items()},
        "holds .* twice": lambda s: s | {"norm.weight": torch.ones(32)},
        "; and 3 more": lambda s: {
            k: v for k, v in s.items() if ".0.self_attn" not in k and ".0.mlp" not in k
        },
    }
    for index, (words, change) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=words):
            load_pretrained(rewrite(folder, tmp_path / str(index), change))
    with pytest.raises(ValueError, match="not finite as torch.float16"):
        load_pretrained(
            rewrite(folder, tmp_path / "big", lambda s: s | {name: s[name] * 1e7}),
            dtype=torch.float16,
        )
    for dtype in (torch.int8, torch.complex64, torch.float8_e4m3fn, "float32", float, False):
        with pytest.raises(ValueError, match="must be a floating-point type"):
            load_pretrained(folder, dtype=dtype)
    for device in ("meta", torch.device("meta")):
        with pytest.raises(ValueError, match="device='meta' holds no numbers"):
            load_pretrained(folder, device=device)


def test_files_are_refused_by_name(published, tmp_path):
    _, folder = published("llama")
    good = rewrite(folder, tmp_path / "good")
    weights = good / "model.safetensors"
    index = good / "model.safetensors.index.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="damaged .*download complete"):
        load_pretrained(good)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_pretrained(good)
    (good / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(
        ValueError, match="a pickle, which can run any code when opened: take a copy"
    ):
        load_pretrained(good)
    index.write_text(json.dumps({"weight_map": {"a": "../good/x.safetensors"}}))
    with pytest.raises(ValueError, match="outside the folder"):
        load_pretrained(good)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="x.safetensors is missing, but the index names it"):
        load_pretrained(good)
    for text in ("[1]", '[["model_type", "llama"]]', "3", "null", "{", "[" * 100_000, "\udcff"):
        (good / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(ValueError, match="config.json does not hold a JSON object"):
            load_pretrained(good)
    (good / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        load_pretrained(good)


def test_half_a_folder_is_refused_by_name(published, tmp_path):
    _, folder = published("llama")
    good = rewrite(folder, tmp_path / "good")
    weights = good / "model.safetensors"
    index = good / "model.safetensors.index.json"
    weights.rename(good / "part.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert difference(load_pretrained(good), published("llama")[0]) < 1e-5
    for content in (
        {},
        {"weight_map": ["part.safetensors"]},
        {"weight_map": {"a": 3}},
        {"weight_map": {"a": None}},
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(
            ValueError, match="index.json has no weight_map from tensors to names of files"
        ):
            load_pretrained(good)
    (good / "folder.safetensors").mkdir()
    index.write_text(json.dumps({"weight_map": {"a": "folder.safetensors"}}))
    with pytest.raises(ValueError, match="folder.safetensors is damaged"):
        load_pretrained(good)
    weights.mkdir()
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        load_pretrained(good)


def test_an_index_names_nothing_outside_its_folder(published, tmp_path, monkeypatch):
    _, folder = published("llama")
    good, other = (rewrite(folder, tmp_path / name) for name in ("good", "other"))
    (good / "model.safetensors").unlink()
    opened = []
    real = pretrained.safe_open
    monkeypatch.setattr(
        pretrained, "safe_open", lambda path, *args: opened.append(path) or real(path, *args)
    )
    absolute = other / "model.safetensors"
    assert absolute.is_file() and (good / "../other/model.safetensors").is_file()
    hostile = (
        "../other/model.safetensors",
        str(absolute),
        "../../x.safetensors",
        "..",
        ".",
        "",
        "./model.safetensors",
        "a/../b.safetensors",
        "..\\other\\model.safetensors",
        "C:model.safetensors",
        "model\0.safetensors",
        "model.safetensors\n",
        "config.json",
    )
    for name in hostile:
        index = {"weight_map": {"model.norm.weight": name, "lm_head.weight": "fine.safetensors"}}
        (good / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(
            ValueError, match="which is not a safetensors file or lies outside the folder"
        ) as error:
            load_pretrained(good)
        assert f"names {name!r}" in str(error.value) and opened == []


# ---------------------------------------------------------------- saving


CANNOT = {
    "norm_position='post'": dict(norm_position="post"),
    "norm_position='output'": dict(norm_position="output"),
    "residual_multiplier=0.5": dict(residual_multiplier=0.5, qk_norm=True),
    "logits_scaling=2.0": dict(logits_scaling=2.0, qk_norm=True),
    "partial_rotary_factor=0.5": dict(partial_rotary_factor=0.5, attention_bias=True),
    "rope_layers=[False]": dict(rope_layers=[False], qk_norm=True),
    "shared_expert_gate=True": dict(
        use_moe=True, shared_expert_intermediate_size=16, shared_expert_gate=True, qk_norm=True
    ),
    "num_mtp_layers=1": dict(num_mtp_layers=1),
    "shared_expert_intermediate_size=16": dict(use_moe=True, shared_expert_intermediate_size=16),
    "position_type='sinusoidal'": dict(position_type="sinusoidal"),
    "embedding_scale=2.0": dict(embedding_scale=2.0, qk_norm=True),
    "attention_scale=0.3": dict(attention_scale=0.3, qk_norm=True),
    "use_glu=False": dict(use_glu=False),
    "attention_out_bias=True": dict(attention_out_bias=True),
}


@pytest.mark.parametrize("words", CANNOT)
def test_a_model_that_no_family_has(words, tmp_path):
    model = DecoderModel(
        ModelConfig(vocab_size=11, hidden_size=16, num_layers=1, num_heads=2, **CANNOT[words])
    )
    with pytest.raises(ValueError, match="no family can express this model") as error:
        save_pretrained(model, tmp_path / "x")
    assert words in str(error.value) and not (tmp_path / "x").exists()


def random_config(seed):
    """A small model near some family: what all its models share, with any other setting changed."""
    pick = random.Random(seed).choice
    while True:
        family = FAMILIES[sorted(FAMILIES)[seed % len(FAMILIES)]]
        layers = pick([1, 3])
        C = pick([16, 24, 50])
        gemma = dict(embedding_scale=C**0.5, activation="gelu_tanh", use_glu=True)
        window = pick([None, None, 1, 4, 300])
        types = [pick(["sliding_attention", "full_attention"]) for _ in range(layers)]
        yarn = RopeScaling(rope_type="yarn", factor=2.5, original_max_position_embeddings=8)
        usual = dict(
            vocab_size=pick([1, 97]),
            hidden_size=C,
            num_layers=layers,
            num_heads=pick([1, 2, 4, 6]),
            head_dim=pick([None, 2, 8, 14]),
            num_kv_heads=pick([None, 1, 2]),
            intermediate_size=pick([None, 1, 24]),
            max_position_embeddings=pick([8, 32]),
            rope_scaling=pick([None, None, RopeScaling(rope_type="linear", factor=2), yarn]),
            rms_norm_eps=pick([1e-6, 1e-3]),
            attention_bias=pick([False, False, True]),
            sliding_window=window,
            layer_types=types if window and pick([True, False]) else None,
            activation=pick([None, None, "relu", "gelu"]),
            num_experts=pick([1, 4, 5]),
            top_k=pick([1, 2]),
            norm_topk_prob=pick([True, False]),
            tie_word_embeddings=pick([True, False]),
            dropout=pick([0.0, 0.1]),
            initializer_range=pick([0.02, 0.02, 0.02, 2.0]),
            attn_logit_softcapping=pick([None, None, None, 2.0]),
            attention_scale=pick([None, None, None, 7**-0.5]),
            residual_multiplier=pick([1.0] * 9 + [0.5]),
            rope_layers=pick([None] * 9 + [[i % 2 == 0 for i in range(layers)]]),
            sliding_rope_theta=pick([None] * 9 + [300.0]),
        )
        if family.fixed.get("use_moe"):
            usual |= dict(dense_layers=pick([None, [0]]), dense_intermediate_size=pick([None, 20]))
        if family.fixed.get("qk_norm") and family.fixed.get("norm_position"):
            usual |= dict(sliding_rope_theta=pick([None, 300.0]), attn_logit_softcapping=None)
        if family.fixed.get("shared_expert_gate"):
            usual |= dict(shared_expert_intermediate_size=12, attention_scale=None)
        is_gemma = family.fixed.get("norm_position") == "sandwich"
        settings = usual | dict(family.fixed) | (gemma if is_gemma else {})
        if settings.get("position_type") == "learned":
            settings |= dict(rope_scaling=None, head_dim=None, num_kv_heads=None)
        try:
            return ModelConfig(**settings)
        except ValueError:
            continue  # settings that don't go together: draw again


def noisy(config, seed=0):
    torch.manual_seed(seed)
    model = DecoderModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def reopened(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, kind", [(16, None), (20, "eager"), (50, "eager")])
def test_experts_of_any_width_run_elsewhere(width, kind, dtype, tmp_path):
    moe = dict(use_moe=True, num_experts=4, num_heads=2, head_dim=8, tie_word_embeddings=False)
    model = noisy(ModelConfig(vocab_size=97, hidden_size=width, intermediate_size=24, **moe))
    folder = save_pretrained(model.to(dtype), tmp_path / "x")
    described = json.loads((folder / "config.json").read_text())
    assert described.get("experts_implementation") == kind
    exact = load_pretrained(folder, dtype=torch.float32)
    ran = difference(exact, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    assert ran < 1e-4 or dtype == torch.bfloat16
    assert difference(exact, reopened(folder).float()) < 1e-4


def test_any_model_opens_elsewhere_or_is_refused_before_anything_is_written(tmp_path):
    found = Counter()
    for seed in range(160):
        model = noisy(random_config(seed), seed)
        config = model.config
        folder = tmp_path / str(seed)
        try:
            save_pretrained(model, folder)
        except ValueError as error:
            assert str(error).startswith("no family can express this model: ") and error.args
            assert not folder.exists()
            found["refused"] += 1
            continue
        theirs = reopened(folder)
        ids = torch.randint(0, config.vocab_size, (2, config.max_position_embeddings))
        largest = model(ids).logits.abs().max().item()
        assert difference(model, theirs, ids) <= 5e-5 * max(1.0, largest), (seed, config)
        found[theirs.config.model_type] += 1
    # a Phi-3 is a Llama or a Mistral with other files, and those come first
    assert found.keys() == {"refused", *FAMILIES} - {"phi3"} and found["refused"] < 100


OTHERS_CANNOT = {
    "llama opens no such heads": (dict(hidden_size=50, num_heads=6, head_dim=14), "mistral"),
    "one expert, unused": (dict(num_experts=1), "llama"),
    "no width for the heads": (dict(hidden_size=6, num_heads=4, head_dim=4), "mistral"),
    "an odd width": (dict(hidden_size=15, num_heads=5, head_dim=4, qk_norm=True), "qwen3"),
}


@pytest.mark.parametrize("case", OTHERS_CANNOT)
def test_a_family_that_cannot_does_not_stop_the_next(case, tmp_path):
    changes, model_type = OTHERS_CANNOT[case]
    usual = dict(vocab_size=97, hidden_size=16, num_layers=2, num_heads=4)
    model = noisy(ModelConfig(**usual | changes))
    theirs = reopened(save_pretrained(model, tmp_path / "x"))
    assert theirs.config.model_type == model_type and difference(model, theirs) < 1e-5


def test_every_near_family_says_why_not(tmp_path):
    wide = dict(vocab_size=11, hidden_size=50, num_layers=1, num_heads=6, head_dim=14)
    with pytest.raises(ValueError) as error:
        save_pretrained(DecoderModel(ModelConfig(**wide, mlp_bias=True)), tmp_path / "x")
    assert str(error.value) == (
        "no family can express this model: llama lacks hidden_size=50 with num_heads=6 "
        "(transformers wants a multiple); mistral lacks mlp_bias=True"
    )
    with pytest.raises(ValueError, match="^gpt2 cannot .* gpt2 lacks .*head_dim=14"):
        write_config(ModelConfig(**wide), model_type="gpt2")
    with pytest.raises(ValueError, match=r"llama lacks initializer_range=2.0 \(transformers"):
        write_config(
            ModelConfig(**wide | dict(hidden_size=48), initializer_range=2.0), model_type="llama"
        )
    with pytest.raises(ValueError, match="gemma2 lacks attention_scale=3.0"):
        gemma = dict(norm_position="sandwich", embedding_scale=16**0.5, activation="gelu_tanh")
        write_config(tiny(**gemma, attention_scale=3.0).config)
    assert list(tmp_path.iterdir()) == []


def test_a_gemma_without_a_window(tmp_path):
    gemma = dict(norm_position="sandwich", embedding_scale=16**0.5, activation="gelu_tanh")
    model = noisy(tiny(**gemma).config)
    folder = save_pretrained(model, tmp_path / "x")
    described = json.loads((folder / "config.json").read_text())
    assert described["model_type"] == "gemma2" and described["sliding_window"] == 4096
    assert described["layer_types"] == ["full_attention"] * 2
    theirs = reopened(folder)
    assert difference(model, theirs) < 1e-5
    ones = torch.ones(2, 11, dtype=torch.int64)
    expected = theirs.generate(
        IDS[:, :11], attention_mask=ones, max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    assert torch.equal(generate(load_pretrained(folder), IDS[:, :11], max_new_tokens=9), expected)


@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    H=st.integers(1, 4),
    K=st.integers(1, 2),
    D=st.sampled_from([None, 2, 6]),
    L=st.integers(1, 3),
    F=st.one_of(st.none(), st.integers(1, 9)),
    window=st.one_of(st.none(), st.integers(1, 9)),
    tied=st.booleans(),
    vocab=st.integers(1, 30),
    E=st.integers(1, 4),
)
def test_what_is_written_reads_back_for_odd_sizes(family, H, K, D, L, F, window, tied, vocab, E):
    gpt2 = family == "gpt2"
    fixed = dict(FAMILIES[family].fixed) | dict(
        vocab_size=vocab, num_layers=L, num_heads=H * K, tie_word_embeddings=tied
    )
    fixed |= dict(num_experts=E, top_k=E, hidden_size=2 * H * K, intermediate_size=F)
    if not gpt2:
        fixed |= dict(num_kv_heads=K)
    gemma = family in ("gemma2", "gemma3_text")
    if gemma or family in ("llama", "mistral", "phi3", "qwen3", "mixtral", "qwen3_moe", "granite"):
        fixed |= dict(head_dim=D)
    if family == "qwen2_moe":
        fixed |= dict(shared_expert_intermediate_size=3)
    if window and family not in ("gpt2", "llama", "olmo2", "granite"):
        fixed |= dict(sliding_window=window)
        if gemma or family in ("qwen2", "qwen3", "qwen2_moe", "olmo3", "smollm3"):
            fixed |= dict(layer_types=["full_attention"] * (L - 1) + ["sliding_attention"])
    if gemma:
        fixed |= dict(
            embedding_scale=(2 * H * K) ** 0.5, attention_scale=7**-0.5, activation="gelu_tanh"
        )
    config = ModelConfig(**fixed)
    found, hf = write_config(config, model_type=family)
    back = read_config(json.loads(json.dumps(hf)))[1]
    assert found.model_type == family
    with torch.device("meta"):
        a = DecoderModel(config)
        b = DecoderModel(back)
    assert {k: v.shape for k, v in a.state_dict().items()} == {
        k: v.shape for k, v in b.state_dict().items()
    }
    assert [back.window_of(i) for i in range(L)] == [config.window_of(i) for i in range(L)]
    rules = tensor_rules(found, config, a.state_dict())
    claimed = [name for rule in rules for name in rule.ours]
    assert len(claimed) == len(set(claimed)) and len(
        {name for rule in rules for name in rule.theirs}
    ) >= len(rules)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_published_models(preset):
    family, hf = write_config(ModelConfig.preset(preset))
    theirs = AutoConfig.for_model(**hf)
    assert theirs.model_type == family.model_type
    assert read_config(json.loads(theirs.to_json_string()))[0] is family


def test_the_first_family_that_fits_or_the_one_that_is_named(tmp_path):
    config = ModelConfig(
        vocab_size=11,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        dropout=0.1,
        router_aux_loss_coef=0.5,
    )
    assert write_config(config)[0].model_type == "llama"
    assert write_config(config, model_type="mistral")[1]["sliding_window"] is None
    with pytest.raises(
        ValueError, match="^qwen3 cannot express this model: qwen3 lacks qk_norm=False$"
    ):
        write_config(config, model_type="qwen3")
    for name in ("bert", "../../bert", ["llama"], ""):
        with pytest.raises(
            ValueError, match="^model_type=.* is unknown: choose one of 'gpt2'"
        ) as error:
            save_pretrained(DecoderModel(config), tmp_path / "x", model_type=name)
        assert repr(name) in str(error.value) and list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="vocab_size=None: give"):
        write_config(ModelConfig())


def tiny(**changes):
    torch.manual_seed(0)
    return DecoderModel(
        ModelConfig(**dict(vocab_size=300, hidden_size=16, num_layers=2, num_heads=2) | changes)
    ).eval()


def test_all_or_nothing(tmp_path, monkeypatch):
    model = tiny()
    calls = []

    def full(shard, path, metadata):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        save_file(shard, path, metadata)

    monkeypatch.setattr(pretrained, "save_file", full)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(model, tmp_path / "a", max_shard_size=1)
    assert list(tmp_path.iterdir()) == [] and len(calls) == 3
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    assert save_pretrained(model, tmp_path / "empty") == tmp_path / "empty"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty"]
    before = (tmp_path / "empty" / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        save_pretrained(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == before
    assert save_pretrained(model, tmp_path / "new" / "deep").is_dir()


def test_links_and_the_current_folder(tmp_path, monkeypatch):
    model = tiny()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert save_pretrained(model, tmp_path / "link") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", ""):
        with pytest.raises(ValueError, match="is the current folder, which cannot be replaced"):
            save_pretrained(model, name)
    assert Path.cwd().exists() and list(Path.cwd().iterdir()) == []
    assert save_pretrained(model, "inside") == Path("inside") and load_pretrained("inside")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "link", "real"]


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
def test_others_may_read_what_the_umask_lets_them(tmp_path):
    tokenizer = BPETokenizer.train(["a b c a b c abc"] * 9, vocab_size=264)
    for umask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            folder = save_pretrained(
                tiny(), tmp_path / f"{umask}", tokenizer=tokenizer, max_shard_size=20_000
            )
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}


def test_the_folder_gets_its_name_last_and_in_one_step(tmp_path, monkeypatch):
    seen = []

    def rename(self, target):
        seen.append((sorted(path.name for path in self.iterdir()), target.exists()))
        raise OSError("power cut")

    monkeypatch.setattr(pretrained.Path, "rename", rename)
    with pytest.raises(OSError, match="power cut"):
        save_pretrained(tiny(), tmp_path / "a")
    assert (
        seen == [(["config.json", "model.safetensors"], False)] and list(tmp_path.iterdir()) == []
    )


def test_a_killed_process_leaves_no_folder(tmp_path):
    code = f"""
import os
from llm_course.model import pretrained
from llm_course.model.decoder import DecoderModel, ModelConfig
pretrained._write_json = lambda *a: os._exit(9)
model = DecoderModel(ModelConfig(vocab_size=11, hidden_size=16, num_layers=1, num_heads=2))
pretrained.save_pretrained(model, {str(tmp_path / "x")!r})
"""
    process = Warm(exec, code, {})
    process.communicate()
    assert process.returncode == 9 and not (tmp_path / "x").exists()
    [left] = tmp_path.iterdir()  # nobody was there to delete it
    assert re.fullmatch(r"\.x\.[0-9a-f]+\.tmp", left.name)
    assert save_pretrained(tiny(), tmp_path / "x").is_dir()  # and it is in nobody's way


def test_shards_and_their_index(tmp_path):
    model = tiny(tie_word_embeddings=False)
    folder = save_pretrained(model, tmp_path / "a", max_shard_size=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("model-*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    where = {name: f.name for f in files for name in load_file(f)}
    assert where == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert all(sum(t.nbytes for t in load_file(f).values()) <= 20_000 for f in files)
    assert len(list(save_pretrained(model, tmp_path / "b").glob("*.safetensors"))) == 1


def test_wrong_things_are_not_saved(tmp_path):
    moe = tiny(use_moe=True, num_experts=2)
    moe.layers[1].mlp.gate.expert_bias[0] = 0.1
    with pytest.raises(ValueError, match=r"layers.1.mlp.gate.expert_bias is not zero"):
        save_pretrained(moe, tmp_path / "x")
    for value in (torch.nan, torch.inf):
        broken = tiny()
        broken.layers[1].mlp.up_proj.weight.data[3, 5] = value
        with pytest.raises(
            ValueError,
            match=r"^model.layers.1.mlp.up_proj.weight has numbers that are not finite as torch",
        ):
            save_pretrained(broken, tmp_path / "x")
    for size in (0, -5, True, float("nan"), 1e9, "5GB", None):
        with pytest.raises(
            ValueError, match="max_shard_size=.* must be a whole number of at least 1"
        ):
            save_pretrained(tiny(), tmp_path / "x", max_shard_size=size)
    with pytest.raises(ValueError, match="expected a DecoderModel"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "x")
    with pytest.raises(ValueError, match="cannot open a SimpleCharacterTokenizer"):
        save_pretrained(tiny(), tmp_path / "x", tokenizer=SimpleCharacterTokenizer.from_text("abc"))
    tokenizer = BPETokenizer.train(["a b c a b c abc"] * 9, vocab_size=264)
    with pytest.raises(
        ValueError, match="the tokenizer has 264 entries, the model only vocab_size=263"
    ):
        save_pretrained(tiny(vocab_size=263), tmp_path / "x", tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [BPETokenizer, ByteBPETokenizer])
def test_the_tokenizer_goes_along(kind, tmp_path):
    tokenizer = kind.train(["the cat sat on the mat, the cat ran"] * 5, vocab_size=270)
    folder = save_pretrained(tiny(), tmp_path / "a", tokenizer=tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "the cat, ran naïve <|eos|>"
    assert (
        theirs(text).input_ids == tokenizer.encode(text)
        and theirs.decode(tokenizer.encode(text)) == text
    )
    config = AutoConfig.from_pretrained(folder)
    for role in ("bos", "eos", "pad"):
        ours = getattr(tokenizer, f"{role}_token_id")
        assert (
            getattr(theirs, f"{role}_token_id")
            == getattr(config, f"{role}_token_id")
            == ours
            is not None
        )
    assert kind.load(folder) == tokenizer
    bare = AutoConfig.from_pretrained(save_pretrained(tiny(), tmp_path / "b"))
    assert bare.eos_token_id is bare.bos_token_id is None  # not Llama's 1 and 2


def test_a_tokenizer_of_pieces_is_refused(tmp_path):
    pieces = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2}, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Metaspace()
    pieces.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="it is not byte-level BPE"):
        BPETokenizer.load(tmp_path)


# ---------------------------------------------------------------- the hub


def test_the_hub(published, tmp_path, monkeypatch):
    import huggingface_hub

    _, folder = published("llama")
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert difference(load_pretrained("org/name"), published("llama")[0]) < 1e-5
    assert asked[0][0] == "org/name" and not any(
        "bin" in pattern or pattern == "*" for pattern in asked[0][1]
    )
    monkeypatch.chdir(tmp_path)
    rewrite(folder, (tmp_path / "org").mkdir() or tmp_path / "org" / "name")
    # a path wins
    assert (
        pretrained_folder("org/name") == (tmp_path / "org" / "name").relative_to(tmp_path)
        and len(asked) == 1
    )
    climbing = (
        "../x",
        "../..",
        "..",
        "./x",
        "org/..",
        "org/.",
        "../../etc/passwd",
        "org/..x",
        "org/x..y",
        "..\\x",
        "org/x\0",
        ".org/x",
    )
    for name in ("gpt2", "/no/such/folder", "a/b/c", "../x y", "org/x\n", *climbing):
        if Path(name).is_dir():
            continue  # a path that the user types may lead anywhere
        with pytest.raises(
            FileNotFoundError, match="is neither a folder nor a model.s name on the hub"
        ) as error:
            load_pretrained(name)
        assert repr(name) in str(error.value) and len(asked) == 1  # nobody was asked

    def fails(name, allow_patterns):
        raise OSError("the network is down")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(ValueError, match="its download failed: the network is down"):
        load_pretrained("org/other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'llm_course\[hub\]'"):
        load_pretrained("org/other")

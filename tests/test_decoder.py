"""The decoder at its edges: configurations, empty and odd batches, ties, and Hugging Face's models
as the oracle.
"""

import copy
import dataclasses
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_cache import Cache
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from llm_course.model import decoder
from llm_course.model.cache import KVCache
from llm_course.model.config import PRESETS, ModelConfig
from llm_course.model.decoder import DecoderModel, with_both_names
from llm_course.model.mtp import further_rows
from llm_course.model.rope_scaling import RopeScaling
from llm_course.text.batches import IGNORE_INDEX, shift
from llm_course.training.sources import load_config

os.environ["HF_HUB_OFFLINE"] = "1"
SIZES = dict(
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=64,
)
SCALING = RopeScaling(rope_type="llama3", factor=4.0, original_max_position_embeddings=16)
WINDOWS = dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"])
STYLES = {
    "llama": dict(num_kv_heads=2, rope_scaling=SCALING),
    "gpt2": dict(PRESETS["gpt2"]),
    "gemma2": WINDOWS
    | dict(
        norm_position="sandwich",
        embedding_scale=5.5,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
        activation="gelu_tanh",
    ),
    "post-norm": dict(norm_position="post", position_type="sinusoidal", tie_word_embeddings=False),
    "moe": dict(
        use_moe=True,
        num_experts=4,
        shared_expert_intermediate_size=16,
        qk_norm=True,
        num_mtp_layers=1,
    ),
}


def build(style="llama", **changes):
    torch.manual_seed(0)
    return DecoderModel(
        ModelConfig(**(STYLES.get(style, {}) | SIZES | dict(initializer_range=0.2) | changes))
    )


def tokens(*shape, seed=0):
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def total(output):
    return output.loss_sum / output.num_targets.clamp(min=1) + output.aux_loss


def gradients(model, **batch):
    model.zero_grad()
    total(model(**batch)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------- the configuration


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(hidden_size=0), "hidden_size=0 must be finite and at least 1"),
        (dict(hidden_size=64.0), "hidden_size=64.0 must be a whole number"),
        (dict(num_layers=True), "num_layers=True must be a whole number"),
        (dict(num_heads="4"), "num_heads='4' must be a whole number"),
        (dict(num_heads=None), "num_heads=None must be a whole number"),
        (dict(num_mtp_layers=-1), "num_mtp_layers=-1 must be finite and not negative"),
        (dict(vocab_size=-5), "vocab_size=-5"),
        (dict(rms_norm_eps=math.nan), "rms_norm_eps=nan must be positive and finite"),
        (dict(rms_norm_eps=0.0), "rms_norm_eps=0.0"),
        (dict(rope_theta=math.inf), "rope_theta=inf"),
        (dict(rope_theta=1.0), "rope_theta=1.0 must be above 1"),
        (dict(initializer_range=True), "initializer_range=True"),
        (dict(z_loss_coef=-0.1), "z_loss_coef=-0.1 must be finite and not negative"),
        (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (dict(dropout=math.nan), "dropout=nan"),
        (dict(attention_scale=0.0), "attention_scale=0.0"),
        (dict(z_loss_coef=1e-60), "z_loss_coef=1e-60 must be representable in float32"),
        (dict(final_logit_softcapping=-3.0), "final_logit_softcapping=-3.0"),
        (dict(hidden_size=2**63), "hidden_size=9223372036854775808 must be below"),
        (dict(hidden_size=10**400), "hidden_size: int too large"),
        (dict(embedding_scale=10**400), "embedding_scale: int too large"),
        (
            dict(rms_norm_eps=1e-60),
            "rms_norm_eps=1e-60 must be representable in float32",
        ),
        (
            dict(rope_theta=1e39),
            "rope_theta=1e[+]39 must be representable in float32",
        ),
        (dict(use_glu="false"), "use_glu='false' must be true or false"),
        (dict(attention_out_bias=1), "attention_out_bias=1 must be true or false or null"),
        (dict(position_type="rotary"), "position_type='rotary' must be rope or learned"),
        (dict(norm_type=None), "norm_type=None must be rmsnorm or layernorm"),
        (dict(activation="swish"), "activation='swish' must be silu or gelu"),
        (
            dict(hidden_size=100, num_heads=3),
            "hidden_size=100 must be a multiple of num_heads=3, or head_dim",
        ),
        (
            dict(num_heads=6, head_dim=8, num_kv_heads=4),
            "num_heads=6 must be a multiple of num_kv_heads=4",
        ),
        (dict(num_heads=2, num_kv_heads=4), "num_heads=2 must be a multiple of num_kv_heads=4"),
        (dict(head_dim=7), "head_dim=7 must be even"),
        (
            dict(hidden_size=33, num_heads=3, position_type="sinusoidal"),
            "hidden_size=33 must be even",
        ),
        (
            dict(rope_scaling=SCALING, position_type="learned"),
            "rope_scaling needs position_type='rope', not 'learned'",
        ),
        (dict(rope_scaling=4.0), "rope_scaling=4.0 must be a RopeScaling"),
        (dict(rope_scaling=dict(rope_type="linear", factor=0.5)), "factor=0.5"),
        (dict(rope_scaling=dict(rope_type="linear", faktor=2.0)), "rope_scaling={.*'faktor'"),
        (dict(rope_scaling=dict(factor=2.0)), "rope_scaling={'factor': 2.0}: .*'rope_type'"),
        (dict(layer_types=["full_attention"] * 4), "layer_types needs sliding_window"),
        (dict(sliding_window=4, layer_types=["full_attention"]), "must have num_layers=4 entries"),
        (dict(sliding_window=4, layer_types=[]), "must have num_layers=4 entries"),
        (
            dict(sliding_window=4, layer_types=["full_attention", "full"] * 2),
            "must be a list of sliding_attention or full_attention",
        ),
        (
            dict(sliding_window=4, layer_types="full_attention"),
            "layer_types='full_attention' must be a list",
        ),
        (dict(use_moe=True, top_k=9), "top_k=9 must be at most num_experts=8"),
        (dict(use_moe=True, mlp_bias=True), "mlp_bias=True does not go with use_moe=True"),
        (
            dict(shared_expert_intermediate_size=8),
            "shared_expert_intermediate_size=8 needs use_moe=True",
        ),
    ],
)
def test_wrong_configurations_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**arguments)


def test_what_must_be_allowed():
    ModelConfig(use_moe=True, num_experts=3, top_k=3)
    ModelConfig(num_heads=1, hidden_size=2, num_kv_heads=1)
    ModelConfig(head_dim=7, position_type="none")
    ModelConfig(attention_bias=True, attention_out_bias=False)
    ModelConfig(rope_theta=10_000)
    ModelConfig(position_type="learned", rope_theta=0.5)  # which nothing reads
    ModelConfig(
        **{
            name: 0
            for name in (
                "num_mtp_layers",
                "dropout",
                "router_aux_loss_coef",
                "router_z_loss_coef",
                "mtp_loss_coef",
            )
        }
    )
    config = ModelConfig(hidden_size=np.int64(64), dropout=np.float32(0.5), num_heads=np.int32(2))
    values = (config.hidden_size, config.dropout, config.num_heads, config.rope_theta)
    assert [type(value) for value in values] == [int, float, int, float]


@pytest.mark.parametrize(
    "config",
    [ModelConfig.preset(name) for name in PRESETS] + [ModelConfig(**(SIZES | STYLES["gemma2"]))],
)
def test_a_configuration_survives_yaml(config):
    again = ModelConfig(**yaml.safe_load(yaml.safe_dump(dataclasses.asdict(config))))
    assert again == config and dataclasses.replace(again, num_heads=config.num_heads) == config


def test_a_yaml_file_reaches_the_model(tmp_path):
    model = SIZES | WINDOWS | dict(rope_scaling=dataclasses.asdict(SCALING))
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(dict(model=model, data=dict(sequence_length=16)))
    )
    config, _ = load_config(["--config", str(tmp_path / "run.yaml")], use_environment=False)
    assert config.model == ModelConfig(**(SIZES | WINDOWS | dict(rope_scaling=SCALING)))


def test_a_configuration_is_fixed():
    config = ModelConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 3


def test_the_old_place_still_has_it():
    assert decoder.ModelConfig is ModelConfig


def test_no_option_is_forgotten():
    """Each field is read by somebody who builds, runs or trains a model."""
    read = set()

    class Watched(ModelConfig):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    experts = dict(use_moe=True, num_experts=4, norm_position="sandwich")
    for options in (STYLES["llama"], experts, dict(num_mtp_layers=1, position_type="learned")):
        config = Watched(**(SIZES | options))
        read.clear() if options is STYLES["llama"] else None
        total(DecoderModel(config)(**shift(tokens(2, 9)))).backward()
    assert {field.name for field in dataclasses.fields(ModelConfig)} <= read


def test_whole_numbers_become_real_ones():
    config = ModelConfig(rope_theta=10_000, dropout=0, attention_scale=1)
    values = (config.rope_theta, config.dropout, config.attention_scale)
    assert [type(value) for value in values] == [float] * 3
    assert ModelConfig().attention_scale is None


def test_presets():
    assert (
        ModelConfig.preset("gpt2", num_layers=2).num_layers == 2
        and PRESETS["gpt2"]["num_layers"] == 12
    )
    with pytest.raises(ValueError, match="no preset 'gpt9': choose one of gpt2, "):
        ModelConfig.preset("gpt9")
    with pytest.raises(ValueError, match="no preset"):
        ModelConfig.preset(["gpt2"])
    with pytest.raises(ValueError, match="vocab_size=None"):
        DecoderModel(ModelConfig())


# ---------------------------------------------------------------- the forward pass


@pytest.mark.parametrize("style", STYLES)
def test_one_pass_equals_every_prefix_and_the_loss_equals_pytorchs(style):
    model = build(style).eval()
    ids = tokens(2, 9)
    labels = tokens(2, 9, seed=1)
    labels[0, :4] = IGNORE_INDEX
    with torch.no_grad():
        logits = model(ids).logits
        prefixes = [model(ids[:, : t + 1], logits_to_keep=1).logits for t in range(9)]
        output = model(ids, labels=labels)
    assert_close(torch.cat(prefixes, 1), logits, atol=1e-4, rtol=1e-4)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert_close(output.loss_sum, expected, atol=1e-4, rtol=1e-5)
    assert output.num_targets.item() == 14 and output.logits is None


@settings(max_examples=15, deadline=None)
@given(
    B=st.integers(0, 3),
    T=st.integers(1, 7),
    K=st.integers(1, 2),
    group=st.integers(1, 3),
    half=st.integers(1, 4),
    C=st.integers(1, 9),
    V=st.integers(2, 9),
    moe=st.booleans(),
    mtp=st.integers(0, 2),
    half_precision=st.booleans(),
)
def test_odd_sizes(B, T, K, group, half, C, V, moe, mtp, half_precision):
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=V,
        hidden_size=C,
        num_layers=1,
        num_heads=K * group,
        num_kv_heads=K,
        head_dim=2 * half,
        intermediate_size=5,
        use_moe=moe,
        num_experts=3,
        top_k=3,
        num_mtp_layers=mtp,
        max_position_embeddings=7,
    )
    model = DecoderModel(config).to(torch.bfloat16 if half_precision else torch.float32)
    output = model(**shift(torch.randint(0, V, (B, T + 1))))
    total(output).backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    assert output.num_targets.item() == B * T and output.loss_sum.dtype == torch.float32
    assert model(torch.zeros(B, T, dtype=torch.long)).logits.shape == (B, T, V)


@pytest.mark.parametrize("style", STYLES)
def test_an_empty_batch_has_no_loss_and_zero_gradients(style):
    model = build(style, num_mtp_layers=1, z_loss_coef=0.1)
    output = model(tokens(0, 5), labels=tokens(0, 5))
    assert (output.loss_sum.item(), output.num_targets.item(), output.aux_loss.item()) == (0, 0, 0)
    (output.loss_sum + output.aux_loss).backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() == 0
        for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(input_ids=tokens(2, 0)),
            r"\(2, 0\), expected \(B, T\) with T from 1 to max_position_embeddings=64",
        ),
        (dict(input_ids=tokens(1, 65)), r"\(1, 65\), expected"),
        (dict(input_ids=tokens(5)), r"\(5,\), expected \(B, T\)"),
        (
            dict(input_ids=tokens(2, 5).float()),
            "input_ids has dtype torch.float32, expected int64 or int32",
        ),
        (dict(input_ids=[[1, 2]]), "input_ids is a list, expected a tensor"),
        (dict(input_ids=None), "input_ids is a NoneType, expected a tensor"),
        (dict(labels=[[1, 2]]), "labels is <class 'list'>, expected a tensor"),
        (dict(labels=tokens(2, 4)), r"labels has shape \(2, 4\), expected \(2, 5\)"),
        (dict(document_ids=tokens(1, 5)), r"document_ids has shape \(1, 5\), expected \(2, 5\)"),
        # 0 and -inf
        (
            dict(attention_mask=torch.zeros(2, 5)),
            "attention_mask is torch.float32, expected a tensor of whole",
        ),
        (dict(attention_mask=[[1] * 5] * 2), "attention_mask is <class 'list'>"),
        (
            dict(attention_mask=tokens(2, 6)),
            r"attention_mask has shape \(2, 6\), expected \(2, 5\)",
        ),
        (
            dict(position_ids=torch.arange(4)),
            r"position_ids has shape \(4,\), expected \(2, 5\) or \(1, 5\) or \(5,\)",
        ),
        (dict(position_ids=tokens(3, 5)), r"position_ids has shape \(3, 5\)"),
        (dict(position_ids=torch.arange(5) + 60), "position 64 at "),
        (dict(logits_to_keep=0), "logits_to_keep=0 must be a whole number of at least 1"),
        (dict(logits_to_keep=-2), "logits_to_keep=-2 must be a whole number of at least 1"),
        (dict(logits_to_keep=1.5), "logits_to_keep=1.5 must be a whole number"),
        (dict(logits_to_keep=1, labels=tokens(2, 5)), "must not be given with labels"),
    ],
)
def test_wrong_inputs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("gpt2")(**(dict(input_ids=tokens(2, 5)) | arguments))


@pytest.mark.parametrize("wrong", ["x", torch.arange(5.0), torch.arange(4)])
def test_positions_are_looked_at_where_nothing_reads_them(wrong):
    with pytest.raises(ValueError, match="position_ids"):
        build("", position_type="none")(tokens(2, 5), position_ids=wrong)


@pytest.mark.parametrize("style", STYLES)
def test_cached_decoding_with_padding_equals_the_full_pass(style):
    model = build(style)
    ids = tokens(2, 8)
    cache = Cache()
    model.eval()
    model.activation_checkpointing = True  # recomputing would feed the cache twice
    mask = torch.tensor([[0, 0] + [1] * 6, [1] * 8])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    full = model(ids, position_ids=positions, attention_mask=mask).logits
    parts = [
        model(
            ids[:, a:b], position_ids=positions[:, a:b], attention_mask=mask[:, :b], cache=cache
        ).logits
        for a, b in ((0, 4), (4, 7), (7, 8))
    ]
    assert_close(torch.cat(parts, 1)[mask.bool()], full[mask.bool()], atol=1e-4, rtol=1e-4)
    alone = model(ids[:1, 2:]).logits
    assert_close(full[:1, 2:], alone, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="expected 9 keys"):
        model(ids[:, :1], position_ids=positions[:, :1], attention_mask=mask[:, :1], cache=cache)


def test_what_does_not_go_with_a_cache():
    model = build()
    with pytest.raises(ValueError, match="with a cache, position_ids must be given"):
        model(tokens(1, 2), cache=Cache())
    with pytest.raises(ValueError, match="document_ids must not"):
        model(tokens(1, 2), position_ids=torch.arange(2), document_ids=tokens(1, 2), cache=Cache())


@pytest.mark.parametrize("width", [4, 6, 7])
def test_a_mask_that_does_not_fit_a_cache_is_refused(width):
    """One that is too long would be cut on the left, as for a window, and hide the wrong keys."""
    model = build().eval()
    cache = KVCache(10)
    options = dict(
        position_ids=torch.arange(4), attention_mask=torch.ones(1, 4, dtype=torch.long), cache=cache
    )
    model(tokens(1, 4), **options)
    options |= dict(position_ids=torch.tensor([4]))
    with pytest.raises(
        ValueError, match=rf"attention_mask has shape \(1, {width}\), expected \(1, 5\)"
    ):
        model(tokens(1, 1), **options | dict(attention_mask=torch.ones(1, width, dtype=torch.long)))
    assert cache.length == 4  # refused before anything was written
    model(tokens(1, 1), **options | dict(attention_mask=torch.ones(1, 5, dtype=torch.long)))


def test_documents_of_a_row_do_not_meet():
    model = build().eval()
    ids = tokens(1, 9)
    documents = torch.tensor([[0] * 4 + [1] * 5])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model(ids, document_ids=documents, position_ids=positions).logits
    assert_close(packed[:, 4:], model(ids[:, 4:]).logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model(ids).logits[:, 4:], packed[:, 4:], atol=1e-2)
    padded = model(ids, document_ids=documents, attention_mask=torch.tensor([[0] + [1] * 8])).logits
    # both masks act
    assert not torch.allclose(padded[:, 1:4], model(ids).logits[:, 1:4], atol=1e-2)


def test_labels_never_hold_all_logits():
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(
                t.numel()
                for t in torch.utils._pytree.tree_leaves(result)
                if isinstance(t, torch.Tensor)
            )
            return result

    model = build(vocab_size=5000)
    batch = shift(tokens(32, 65))
    with Watch():
        model(**batch).loss_sum.backward()
    assert max(sizes) < 32 * 64 * 5000 / 2
    sizes.clear()
    with Watch():
        model(batch["input_ids"])
    assert max(sizes) == 32 * 64 * 5000


def test_training_losses_are_off_in_evaluation():
    ids = tokens(2, 8)
    labels = tokens(2, 8, seed=1)
    plain = build()
    extra = build(num_mtp_layers=2, z_loss_coef=0.1)
    extra.load_state_dict(plain.state_dict(), strict=False)
    logits = plain(ids).logits
    z_loss = 0.1 * logits.logsumexp(-1).square().sum()
    assert_close(
        extra(ids, labels=labels).loss_sum,
        plain(ids, labels=labels).loss_sum + z_loss,
        atol=1e-3,
        rtol=1e-4,
    )
    assert extra(ids, labels=labels).aux_loss > 0
    output = extra.eval()(ids, labels=labels)
    assert_close(output.loss_sum, plain(ids, labels=labels).loss_sum, atol=1e-4, rtol=1e-5)
    assert output.aux_loss.item() == 0 and output.tokens_per_expert is None


def test_dropout_acts_in_training_only():
    model = build(dropout=0.5)
    ids = tokens(2, 8)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert_close(model(ids).logits, model(ids).logits, atol=0, rtol=0)


# ---------------------------------------------------------------- further tokens


def further_losses(model, row):
    """For each depth the loss of each place, from nothing but the beginning of the row that it may
    see.
    """
    stream = []
    hook = model.layers[-1].register_forward_hook(
        lambda module, args, result: stream.append(result[0])
    )
    model(row[None, :-1])
    hook.remove()
    x = stream[0]
    losses = []
    T = len(row) - 1
    for depth, module in enumerate(model.mtp, start=1):
        outputs = []
        places = []
        for t in range(T - depth):
            nexts = model.embedding(row[None, depth : t + depth + 1])
            y = module(
                x[:, : t + 1],
                nexts,
                position_embeddings=model.rotary(torch.arange(t + 1)),
                mask=None,
            )
            outputs.append(y[:, -1:])
            places.append(F.cross_entropy(model._logits(y[0, -1:]), row[None, t + depth + 1]))
        x = torch.cat(outputs, 1)
        losses = [*losses, torch.stack(places)]
    return losses


@pytest.mark.parametrize("packed", [False, True])
def test_further_rows_place_by_place(packed):
    ids, labels = shift(tokens(2, 8)).values()
    labels[0, :3] = IGNORE_INDEX
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]) if packed else None
    rows = further_rows(ids, labels, documents, depth=9)
    assert len(rows) == 9  # more than the row is long
    for depth, (next_ids, targets) in enumerate(rows, start=1):
        for b in range(2):
            for t in range(7):
                further = t + depth
                inside = further < 7
                met = inside and (documents is None or documents[b, further] == documents[b, t])
                assert next_ids[b, t] == (ids[b, further] if inside else 0)
                assert targets[b, t] == (labels[b, further] if met else IGNORE_INDEX)


def test_further_tokens_equal_the_loop():
    model = build("llama", num_mtp_layers=2, mtp_loss_coef=0.5)
    row = tokens(11)
    first, second = further_losses(model, row)
    assert (len(first), len(second)) == (9, 8)
    assert_close(
        model(**shift(row[None])).aux_loss,
        0.5 / 2 * (first.sum() + second.sum()) / 10,
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("place", [0, 3])
def test_no_depth_sees_what_it_predicts(place):
    model = build("llama", num_mtp_layers=2)
    row = tokens(9)
    streams = []
    for module in model.mtp:
        module.register_forward_hook(lambda module, args, result: streams.append(result))
    tables = []
    model.embedding.register_forward_hook(lambda module, args, result: tables.append(result))
    model(**shift(row[None]))
    for depth, stream in enumerate(streams, start=1):
        inputs = torch.autograd.grad(
            stream[0, place].sum(), tables, retain_graph=True, allow_unused=True
        )
        seen = {
            (k, t)
            for k, g in enumerate(inputs)
            if g is not None
            for t in range(8)
            if g[0, t].abs().sum() > 0
        }
        assert max(k + t for k, t in seen) == place + depth  # table k holds token t + k at place t


def test_further_tokens_stay_in_their_document():
    model = build("llama", num_mtp_layers=2)
    row = tokens(8)
    ids = row[None, :7]
    labels = row[None, 1:].clone()
    labels[0, [3, 6]] = IGNORE_INDEX
    documents = torch.tensor([[0] * 4 + [1] * 3])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    packed = model(ids, labels=labels, document_ids=documents, position_ids=positions)
    alone = [model(ids[:, part], labels=labels[:, part]) for part in (slice(0, 4), slice(4, 7))]
    expected = sum(part.aux_loss * part.num_targets for part in alone)
    assert_close(packed.aux_loss * packed.num_targets, expected, atol=1e-5, rtol=1e-5)
    mixed = model(ids, labels=labels, position_ids=positions)
    assert not torch.allclose(mixed.aux_loss, packed.aux_loss, atol=1e-2)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("style", STYLES)
def test_every_weight_starts_as_promised(style):
    model = build(style, hidden_size=96, vocab_size=100, num_layers=2)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            written = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
            assert_close(parameter.std().item(), 0.2 / (2 if written else 1), atol=0, rtol=0.15)
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all()


def test_the_tie_survives(tmp_path):
    model = build()
    ids = tokens(1, 6)
    expected = model(ids).logits
    state = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(state, tmp_path / "one_name.safetensors")
    save_model(model, str(tmp_path / "model.safetensors"))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    others = {name: build() for name in ("one name", "save_model", "assign", "both names")}
    with torch.device("meta"):
        others["meta"] = build()
        others["meta and assign"] = build()
    others["meta"].to_empty(device="cpu").load_state_dict(state)
    others["meta and assign"].load_state_dict(model.state_dict(), assign=True)
    others["one name"].load_state_dict(load_file(tmp_path / "one_name.safetensors"))
    load_model(others["save_model"], str(tmp_path / "model.safetensors"))
    others["assign"].load_state_dict(copy.deepcopy(state), assign=True)
    others["both names"].load_state_dict(model.state_dict())
    others["copy"] = copy.deepcopy(model)
    others["moved"] = copy.deepcopy(model).double().float()
    for name, other in others.items():
        assert other.lm_head.weight is other.embedding.embed_tokens.weight, name
        assert other.num_parameters() == model.num_parameters(), name
        assert_close(other(ids).logits, expected, atol=0, rtol=0)
    with pytest.raises(RuntimeError, match="embed_tokens"):
        build().load_state_dict({"lm_head.weight": state["embedding.embed_tokens.weight"]})
    with pytest.raises(RuntimeError, match="lm_head"):
        build(tie_word_embeddings=False).load_state_dict(state)


@pytest.mark.parametrize("options", [{}, dict(assign=True), dict(strict=False)])
def test_two_tables_do_not_go_into_a_tied_model(options):
    """Silently, one of the two would win: which one, `assign` decides."""
    untied = build(tie_word_embeddings=False)
    tied = build()
    before = copy.deepcopy(tied.state_dict())
    with pytest.raises(
        ValueError,
        match="lm_head.weight is not embedding.embed_tokens.weight, but tie_word_embeddings=True",
    ):
        tied.load_state_dict(untied.state_dict(), **options)
    assert all(tensor.equal(before[name]) for name, tensor in tied.state_dict().items())


def test_both_names_of_a_tied_table():
    one = torch.randn(3, 2)
    state = {"embedding.embed_tokens.weight": one, "norm.weight": torch.ones(2)}
    both = with_both_names(state)
    assert both["lm_head.weight"] is one and "lm_head.weight" not in state
    assert state.keys() <= both.keys()
    with_both_names(state | {"lm_head.weight": one.clone()})  # equal is enough


def test_the_tied_gradient_is_the_sum_of_both_uses():
    tied = build()
    untied = build(tie_word_embeddings=False)
    batch = shift(tokens(2, 9))
    untied.load_state_dict(tied.state_dict())
    one = gradients(tied, **batch)
    two = gradients(untied, **batch)
    both = two.pop("lm_head.weight") + two["embedding.embed_tokens.weight"]
    assert_close(one["embedding.embed_tokens.weight"], both)


@pytest.mark.parametrize("style", STYLES)
def test_checkpointing_changes_no_gradient(style):
    model = build(style, dropout=0.1)
    batch = shift(tokens(2, 9))
    found = []
    for model.activation_checkpointing in (False, True):
        torch.manual_seed(1)
        found.append(gradients(model, **batch))
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5)


def test_router_biases_follow_their_layers():
    model = build("moe")
    loads = torch.tensor([[9, 1, 3, 3], [0, 0, 0, 8]])
    model.update_router_bias(loads, rate=0.5)
    biases = [layer.mlp.gate.expert_bias.tolist() for layer in model.layers]
    assert biases == [[-0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, -0.5]]
    output = model(tokens(2, 9))
    assert (
        output.tokens_per_expert.sum(1).tolist() == [36, 36]
        and output.tokens_per_expert.dtype == torch.int64
    )
    for wrong in (loads[:1], loads[:, :3], torch.cat((loads, loads)), None):
        with pytest.raises(
            ValueError,
            match=(
                r"tokens_per_expert has shape .*, expected \(2, 4\): a row for each layer with"
                r" experts"
            ),
        ):
            model.update_router_bias(wrong)
    # a refusal changes no layer
    assert [layer.mlp.gate.expert_bias.tolist() for layer in model.layers] == biases
    for load in (loads, build()(tokens(1, 2)).tokens_per_expert):
        with pytest.raises(ValueError, match="tokens_per_expert has shape"):
            build().update_router_bias(load)


def test_frozen_parameters_count_too():
    model = build()
    total = model.num_parameters()
    assert model.layers.requires_grad_(False) and model.num_parameters() == total


# ---------------------------------------------------------------- oracles


def randomised(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        # fresh norms and biases would hide a wrong mapping
        mean = 1.0 if parameter.ndim == 1 else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    return model.eval()


def renamed(state, family):
    """The weights of Hugging Face's model under our names."""
    ours = {}
    for name, tensor in state.items():
        name = name.removeprefix("model.").replace("embed_tokens", "embedding.embed_tokens")
        if family == "gemma2":
            tensor = tensor + 1 if "norm" in name else tensor  # it multiplies by 1 + weight
            name = name.replace("post_attention_layernorm", "attention_output_norm")
            name = name.replace("pre_feedforward_", "post_attention_").replace(
                "post_feedforward_layernorm", "mlp_output_norm"
            )
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            ours |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
            continue
        ours[name] = tensor
    ours |= {
        name.replace("weight", "expert_bias"): torch.zeros(4)
        for name in ours
        if name.endswith("mlp.gate.weight")
    }
    return ours


def renamed_gpt2(state):
    places = {
        "wte": "embedding.embed_tokens",
        "wpe": "embedding.embed_positions",
        "ln_f": "norm",
        "lm_head": "lm_head",
    }
    parts = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    ours = {}
    for name, tensor in state.items():
        name, _, kind = name.removeprefix("transformer.").rpartition(".")
        tensor = tensor.T if ".c_" in name and kind == "weight" else tensor
        if name in places:
            ours[f"{places[name]}.{kind}"] = tensor
            continue
        _, layer, part = name.split(".", 2)
        if part == "attn.c_attn":
            for letter, third in zip("qkv", tensor.chunk(3), strict=True):
                ours[f"layers.{layer}.self_attn.{letter}_proj.{kind}"] = third
        else:
            ours[f"layers.{layer}.{parts[part]}.{kind}"] = tensor
    return ours


HF = dict(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=64,
    attn_implementation="eager",
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    original_max_position_embeddings=16,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
FAMILIES = {
    "llama": (
        dict(
            rms_norm_eps=1e-5,
            rope_parameters=LLAMA3 | dict(rope_theta=500.0),
            tie_word_embeddings=True,
        ),
        dict(rms_norm_eps=1e-5, rope_theta=500.0, rope_scaling=SCALING),
    ),
    "qwen3": (
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4), tie_word_embeddings=False),
        dict(qk_norm=True, tie_word_embeddings=False),
    ),
    "mixtral": (
        dict(
            rms_norm_eps=1e-5, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
        ),
        dict(
            rms_norm_eps=1e-5,
            use_moe=True,
            num_experts=4,
            rope_theta=1e6,
            tie_word_embeddings=False,
        ),
    ),
    "gemma2": (
        dict(
            query_pre_attn_scalar=16,
            sliding_window=3,
            layer_types=WINDOWS["layer_types"],
            attn_logit_softcapping=4.0,
            final_logit_softcapping=3.0,
        ),
        WINDOWS
        | dict(
            attention_scale=0.25,
            embedding_scale=32**0.5,
            norm_position="sandwich",
            activation="gelu_tanh",
            attn_logit_softcapping=4.0,
            final_logit_softcapping=3.0,
        ),
    ),
}


def hugging_face(family):
    transformers = pytest.importorskip("transformers")
    name = {"llama": "Llama", "qwen3": "Qwen3", "mixtral": "Mixtral", "gemma2": "Gemma2"}[family]
    config = getattr(transformers, f"{name}Config")(**(HF | FAMILIES[family][0]))
    return randomised(getattr(transformers, f"{name}ForCausalLM")(config))


@torch.no_grad()
def difference(theirs, state, **options):
    ours = DecoderModel(ModelConfig(**(SIZES | dict(num_kv_heads=2) | options))).eval()
    ours.load_state_dict(state)
    ids = tokens(2, 12)
    expected = theirs(ids).logits
    return ((ours(ids).logits - expected).abs().max() / expected.std()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_hugging_face(family):
    theirs = hugging_face(family)
    assert difference(theirs, renamed(theirs.state_dict(), family), **FAMILIES[family][1]) < 1e-4


def tiled(state):
    """Each query head with another key/value head: head h reads h mod K, where it should read h //
    (H / K).
    """
    order = torch.tensor([0, 2, 1, 3])
    state = dict(state)
    for name in list(state):
        if name.endswith("q_proj.weight"):
            state[name] = state[name].view(4, 8, 32)[order].flatten(0, 1)
        if name.endswith("o_proj.weight"):
            state[name] = state[name].view(32, 4, 8)[:, order].flatten(1)
    return state


def test_the_comparison_sees_planted_mistakes():
    theirs = hugging_face("llama")
    right = FAMILIES["llama"][1]
    state = renamed(theirs.state_dict(), "llama")
    for mistake in (
        dict(rope_theta=510.0),
        dict(rms_norm_eps=1e-3),
        dict(rope_scaling=None),
        dict(sliding_window=11),
    ):
        assert difference(theirs, state, **(right | mistake)) > 1e-3, mistake
    assert difference(theirs, tiled(state), **right) > 1e-2


def test_agrees_with_hugging_faces_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=64
    )
    theirs = randomised(transformers.GPT2LMHeadModel(config))
    options = PRESETS["gpt2"] | SIZES | dict(num_kv_heads=None)
    assert difference(theirs, renamed_gpt2(theirs.state_dict()), **options) < 3e-5
    assert (
        difference(theirs, renamed_gpt2(theirs.state_dict()), **(options | dict(activation="gelu")))
        > 1.2e-4
    )


def test_presets_have_the_published_sizes():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        assert DecoderModel(ModelConfig.preset("gpt2")).num_parameters() == 124_439_808
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        # its defaults are those of 8x7B
        mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig())
        assert DecoderModel(ModelConfig.preset("gpt2")).num_parameters() == theirs.num_parameters()
        assert (
            DecoderModel(ModelConfig.preset("mixtral-8x7b")).num_parameters()
            == mixtral.num_parameters()
        )


# ---------------------------------------------------------------- compiled, half, accelerator


def test_a_compiled_training_step_equals_eager():
    torch._dynamo.reset()
    model = build("llama", num_layers=1, num_mtp_layers=1, z_loss_coef=0.01)
    batch = shift(tokens(2, 9)) | dict(document_ids=torch.tensor([[0] * 4 + [1] * 4, [0] * 8]))
    expected = gradients(model, **batch)
    # fullgraph: an error at any break
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    total(compiled(**batch)).backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


def test_a_compiled_decoding_step_equals_eager():
    torch._dynamo.reset()
    model = build("moe", sliding_window=3).eval()
    ids = tokens(2, 7)
    plain = Cache()
    own = Cache()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for cache in (plain, own):
            model(ids[:, :5], position_ids=torch.arange(5), cache=cache)
        for t in (5, 6):
            step = dict(position_ids=torch.tensor([t]), logits_to_keep=1)
            expected = model(ids[:, t : t + 1], cache=plain, **step).logits
            assert_close(
                compiled(ids[:, t : t + 1], cache=own, **step).logits,
                expected,
                atol=1e-5,
                rtol=1e-4,
            )


def test_bfloat16_autocast_stays_near_float32():
    model = build("moe", initializer_range=0.05)
    batch = shift(tokens(2, 17))
    expected = total(model(**batch))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)
        assert model(batch["input_ids"]).logits.dtype == torch.bfloat16
    assert output.loss_sum.dtype == output.aux_loss.dtype == torch.float32
    assert_close(total(output), expected, atol=3e-2, rtol=1e-2)


@pytest.mark.parametrize("style", STYLES)
def test_a_step_asks_nothing_at_which_older_compilers_stop(style, monkeypatch):
    def stop(device):
        raise AssertionError("torch 2.11 can't trace this, and compiles the rest of the step anew")

    monkeypatch.setattr(torch.amp, "is_autocast_available", stop)
    with torch.autocast("cpu", torch.bfloat16):
        assert total(build(style)(**shift(tokens(2, 17)))).isfinite()


@pytest.mark.skipif(
    not torch.cuda.is_available() and not torch.backends.mps.is_available(),
    reason="needs an accelerator",
)
@pytest.mark.parametrize("style", STYLES)
def test_an_accelerator_agrees(style):
    device = torch.accelerator.current_accelerator()
    model = build(style)
    batch = shift(tokens(2, 17))
    expected = gradients(model, **batch)
    moved = gradients(
        copy.deepcopy(model).to(device), **{name: ids.to(device) for name, ids in batch.items()}
    )
    for name, gradient in expected.items():
        assert_close(moved[name].cpu(), gradient, atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------- hidden states


@pytest.mark.parametrize("style", ["llama", "gemma2"])
def test_hidden_states_are_those_of_transformers(style, tmp_path):
    from transformers import AutoModelForCausalLM

    from llm_course.model.pretrained import save_pretrained

    scale = dict(embedding_scale=32**0.5) if style == "gemma2" else {}
    model = build(style, rope_scaling=None, **scale).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = save_pretrained(model, tmp_path / "x")
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = tokens(2, 20)
    expected = theirs(ids, output_hidden_states=True).hidden_states
    found = model(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 3
    for ours, state in zip(found, expected, strict=True):
        assert_close(ours, state, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_hidden_states_on_request(style):
    model = build(style).eval()
    ids = tokens(2, 9)
    plain = model(ids)
    asked = model(ids, output_hidden_states=True)
    assert plain.hidden_states is None and torch.equal(plain.logits, asked.logits)
    assert [tuple(state.shape) for state in asked.hidden_states] == [(2, 9, 32)] * 3
    assert torch.equal(asked.hidden_states[0], model.embedding(ids, torch.arange(9)))
    cut = model(ids, output_hidden_states=True, logits_to_keep=1)
    assert cut.logits.shape[1] == 1 and cut.hidden_states[-1].shape == (2, 9, 32)

    model.train()
    model.activation_checkpointing = True
    labels = tokens(2, 9, seed=1)
    trained = model(ids, labels=labels, output_hidden_states=True)
    assert torch.equal(trained.loss_sum, model(ids, labels=labels).loss_sum)
    trained.hidden_states[1].sum().backward()  # reaches the first block, and nothing after it
    assert model.layers[0].self_attn.o_proj.weight.grad is not None
    assert all(parameter.grad is None for parameter in model.layers[1].parameters())


def test_hidden_states_cost_nothing_unless_asked_for():
    calls = []
    model = build().eval()
    model.norm.register_forward_hook(lambda *args: calls.append(1))

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[-1] += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for options in ({}, dict(output_hidden_states=False), dict(output_hidden_states=True)):
        counts.append(0)
        with Count(), torch.no_grad():
            model(tokens(1, 5), **options)
    assert counts[0] == counts[1] < counts[2] and len(calls) == 4


# ---------------------------------------------------------------- layers in place of projections


class LoRA(nn.Module):
    """W x + B A x with a frozen W, and with no `weight` or `in_features` of its own."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def replace_linear(model, kind):
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, kind(module))


def with_lora(model):
    """A copy with LoRA on every linear layer, and nothing else to learn."""
    model = copy.deepcopy(model).requires_grad_(False)
    replace_linear(model, LoRA)
    return model


@pytest.mark.parametrize("style", STYLES)
def test_lora_on_every_projection(style):
    plain = build(style).eval()
    lora = with_lora(plain)
    ids = tokens(2, 12)
    labels = tokens(2, 12, seed=1)
    wrapped = {name for name, module in lora.named_modules() if isinstance(module, LoRA)}
    assert {name.rpartition(".")[2] for name in wrapped} >= {
        *("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
    }
    if style != "moe":  # its experts share one stacked tensor: there is no module to replace
        assert {"layers.0.mlp.up_proj", "layers.1.mlp.down_proj"} <= wrapped
    # at the start B is zero: the same model
    assert torch.equal(lora(ids).logits, plain(ids).logits)
    assert_close(lora(ids, labels=labels).loss_sum, plain(ids, labels=labels).loss_sum)

    output = lora.train()(ids, labels=labels)
    (output.loss_sum + output.aux_loss).backward()
    learned = {name for name, p in lora.named_parameters() if p.grad is not None}
    assert learned == {f"{name}.{part}" for name in wrapped for part in "ab"}
    optimizer = torch.optim.SGD((p for p in lora.parameters() if p.requires_grad), lr=1e-2)
    optimizer.step()
    assert lora.eval()(ids, labels=labels).loss_sum < output.loss_sum
    assert not torch.equal(lora(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("style", STYLES)
def test_lora_generates_with_a_cache(style):
    from llm_course.model.generation import generate

    lora = with_lora(build(style)).eval()
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if name.endswith(".b"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    ids = tokens(2, 5)
    expected = ids
    for _ in range(12):  # without a cache
        expected = torch.cat((expected, lora(expected).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(lora, ids, max_new_tokens=12), expected)


def test_a_wrapped_head_keeps_its_tie(tmp_path):
    lora = with_lora(build(tie_word_embeddings=True))
    table = lora.embedding.embed_tokens.weight
    assert lora.lm_head.base.weight is table
    lora.load_state_dict(lora.state_dict())
    lora.to(torch.float64)
    assert lora.lm_head.base.weight is lora.embedding.embed_tokens.weight
    assert [name for name, _ in lora.lm_head.named_parameters()] == ["a", "b", "base.weight"]
    ids = tokens(2, 6)
    assert lora(ids, labels=ids).loss_sum.dtype == torch.float64


@pytest.mark.parametrize("options", [{}, dict(final_logit_softcapping=2.0, z_loss_coef=0.01)])
def test_the_loss_of_a_wrapped_head(options):
    plain = build(tie_word_embeddings=False, **options).train()
    wrapped = copy.deepcopy(plain)
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    ids = tokens(2, 12)
    labels = tokens(2, 12, seed=1).index_fill(1, torch.tensor([3]), IGNORE_INDEX)
    losses = [model(ids, labels=labels).loss_sum for model in (plain, wrapped)]
    assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert_close(plain.lm_head.weight.grad, wrapped.lm_head[0].weight.grad)
    assert_close(plain.norm.weight.grad, wrapped.norm.weight.grad)


class Int8Linear(nn.Module):
    """W x with W as whole numbers and a scale for each row."""

    def __init__(self, base):
        super().__init__()
        scale = base.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("numbers", (base.weight.detach() / scale).round().to(torch.int8))
        self.bias = base.bias

    def forward(self, x):
        return F.linear(x, self.numbers * self.scale, self.bias)


def test_quantised_layers_in_place_of_all_projections():
    plain = build("gpt2").eval()
    quantised = copy.deepcopy(plain)
    replace_linear(quantised, Int8Linear)
    ids = tokens(2, 12)
    a, b = (model(ids).logits for model in (quantised, plain))
    assert 0 < (a - b).abs().max() < 0.1 * b.std()
    assert_close(
        quantised(ids, labels=ids).loss_sum, plain(ids, labels=ids).loss_sum, rtol=0.02, atol=0
    )

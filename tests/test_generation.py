"""Generation at its edges: caches, filters, batches, streams and drafts, with Hugging Face's
`generate` as the oracle.
"""

import math
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from llm_course.model.cache import KVCache, LayerCache
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel, DecoderOutput
from llm_course.model.generation import (
    generate,
    generate_tokens,
    pad_left,
    stream_text,
    until_stop,
    whole_characters,
)
from llm_course.model.sampling import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    sample,
    token_probabilities,
)
from llm_course.model.speculative import accept_drafts, generate_speculatively
from llm_course.text.tokenization import BPETokenizer, SimpleCharacterTokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
MIXED = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])


def build(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=40,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        initializer_range=0.5,
    )
    return DecoderModel(ModelConfig(**sizes | changes)).eval().requires_grad_(False)


def prompts(*lengths, V=40):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, V, (n,), generator=generator).tolist() for n in lengths]


# ---------------------------------------------------------------- the cache


@settings(max_examples=25, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    B=st.integers(1, 2),
    K=st.integers(1, 2),
    D=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 6)),
    extra=st.integers(0, 5),
)
def test_cache_returns_the_newest_keys_that_are_read(pieces, B, K, D, window, extra):
    total = sum(pieces)
    k, v = torch.randn(2, B, K, total, D)
    cache = KVCache(total + extra, windows=[window])
    end = 0
    for T in pieces:
        new_k = k[:, :, end : end + T]
        new_v = v[:, :, end : end + T]
        end += T
        got_k, got_v = cache.update(0, new_k, new_v)
        S = end if window is None else min(end, window - 1 + T)
        assert_close(got_k, k[:, :, end - S : end], rtol=0, atol=0)
        assert_close(got_v, v[:, :, end - S : end], rtol=0, atol=0)
        assert cache.length == end
    places = total + extra if window is None else min(total + extra, 2 * window)
    assert cache.num_bytes == 2 * B * K * places * D * 4


@pytest.mark.parametrize("pieces", [[1] * 20, [7, 1, 1, 5, 6], [13, 7], [3, 2, 9, 6], [20]])
@pytest.mark.parametrize(
    "changes",
    [{}, MIXED, dict(sliding_window=1), dict(position_type="learned"), dict(num_kv_heads=1)],
)
def test_cached_logits_equal_the_full_pass(pieces, changes):
    model = build(**changes)
    ids = torch.randint(0, 40, (2, 20))
    windows = [model.config.window_of(layer) for layer in range(2)]
    for cache in (KVCache(20), KVCache(23, windows=windows)):
        places = torch.arange(20).split(pieces)
        logits = torch.cat(
            [model(ids[:, p], position_ids=p, cache=cache).logits for p in places], dim=1
        )
        assert_close(logits, model(ids).logits, atol=2e-4, rtol=1e-3)


def test_cache_in_bfloat16_keeps_the_dtype():
    cache = KVCache(4)
    k, _ = cache.update(3, *torch.randn(2, 1, 2, 3, 4).bfloat16())
    assert k.dtype == torch.bfloat16 and cache.length == 3 and cache.num_bytes == 2 * 2 * 4 * 4 * 2


@settings(max_examples=25, deadline=None)
@given(
    before=st.integers(1, 15),
    back=st.integers(0, 15),
    window=st.one_of(st.none(), st.integers(1, 4)),
)
def test_truncate_forgets_exactly_the_newest_or_refuses(before, back, window):
    k = torch.randn(1, 1, 20, 2)
    cache = KVCache(20, windows=[window])
    length = max(0, before - back)
    for position in range(before):
        cache.update(0, k[:, :, position : position + 1], k[:, :, position : position + 1])
    try:
        cache.truncate(length)
    except ValueError as error:
        assert window is not None and "Leave its window out" in str(error)
        return
    assert cache.length == length
    got, _ = cache.update(0, k[:, :, 19:], k[:, :, 19:])
    S = length + 1 if window is None else min(length + 1, window)
    assert_close(
        got, torch.cat((k[:, :, length - S + 1 : length], k[:, :, 19:]), dim=2), rtol=0, atol=0
    )


def test_cache_refuses_what_does_not_fit():
    for wrong in (
        dict(max_length=0),
        dict(max_length=3.5),
        dict(max_length=3, windows=[0]),
        dict(max_length=3, windows=[1.5]),
    ):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            KVCache(**wrong)
    cache = KVCache(3)
    cache.update(0, *torch.randn(2, 1, 2, 3, 4))
    with pytest.raises(ValueError, match="4 positions do not fit a KVCache of max_length=3"):
        cache.update(0, *torch.randn(2, 1, 2, 1, 4))
    for shape in ((2, 2, 1, 4), (1, 1, 1, 4), (1, 2, 1, 3)):
        with pytest.raises(ValueError, match="needs a new KVCache"):
            cache.update(0, *torch.randn(2, *shape))
    windowed = KVCache(3, windows=[1])
    with pytest.raises(ValueError, match="5 positions do not fit"):
        windowed.update(0, *torch.randn(2, 1, 2, 5, 4))


def test_cache_refuses_values_that_do_not_belong_to_the_keys():
    cache = KVCache(9)
    k = torch.randn(2, 2, 3, 4)
    # all but the last would be broadcast
    for v in (k[:, :, :1], k[:1], k[:, :1], k[..., :1], k[0]):
        with pytest.raises(ValueError, match=r"expected the same shape \(B, K, T, D\)"):
            cache.update(0, k, v)
    with pytest.raises(ValueError, match=r"expected the same shape"):
        cache.update(0, k[0], k[0])
    cache.update(0, k, k)
    with pytest.raises(ValueError, match="a different dtype needs a new KVCache"):
        cache.update(0, k.double(), k.double())
    assert cache.length == 3 and repr(cache) == "KVCache(max_length=9, length=3, layers=1)"


def test_the_cache_of_one_layer_counts_what_it_holds():
    layer = LayerCache(max_length=20, window=3)
    assert (layer.length, layer.num_bytes) == (0, 0)
    k = torch.randn(1, 1, 1, 2)
    for _ in range(9):
        layer.append(k, k)
    assert layer.length == 9 and layer.num_bytes == 2 * 6 * 2 * 4
    # positions 4 to 8 are held: 2W places, of which the last move kept the newest W - 1
    assert (layer.kept_before(9), layer.kept_before(8), layer.kept_before(2)) == (5, 4, -2)
    assert (layer.needed_before(9), layer.needed_before(1)) == (2, 1)
    layer.truncate(8)
    assert layer.length == 8
    assert LayerCache(max_length=20).needed_before(9) == 0


def test_a_refused_truncate_changes_nothing():
    cache = KVCache(20, windows=[None, 4])
    k = torch.randn(1, 1, 20, 2)
    for layer in (0, 1):
        for position in range(20):
            cache.update(layer, *2 * [k[:, :, position : position + 1]])
    with pytest.raises(ValueError, match="layer 1 keeps"):
        cache.truncate(5)
    assert cache.length == 20
    for wrong in (-1, -2, 1.5):
        with pytest.raises(ValueError, match=f"length={wrong} must be a whole number"):
            cache.truncate(wrong)
    cache.truncate(99)
    assert cache.length == 20


def test_no_gradient_flows_into_the_cache():
    cache = KVCache(4)
    k = torch.randn(1, 1, 2, 4, requires_grad=True)
    assert not any(kept.requires_grad for kept in cache.update(0, k * 2, k * 3))
    assert not any(kept.requires_grad for kept in cache.update(0, k * 2, k * 3))


# ---------------------------------------------------------------- one token


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 3),
    V=st.integers(1, 17),
    k=st.one_of(st.none(), st.integers(1, 20)),
    seed=st.integers(0, 99),
    p=st.sampled_from([None, 0.01, 0.35, 0.77, 1.0]),
    m=st.sampled_from([None, 0.0, 0.12, 1.0]),
    t=st.sampled_from([0.3, 1.0, 2.5]),
    penalty=st.sampled_from([1.0, 1.7, 0.6]),
)
def test_distribution_is_hugging_faces(B, V, k, seed, p, m, t, penalty):
    from transformers.generation import logits_process as hf

    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(B, V, generator=generator)
    ids = torch.randint(0, V, (B, 5), generator=generator)
    chain = [hf.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    chain += [hf.TemperatureLogitsWarper(t)]
    chain += [hf.TopKLogitsWarper(k)] if k else []
    chain += [hf.TopPLogitsWarper(p)] if p else []
    chain += [hf.MinPLogitsWarper(m)] if m is not None else []
    expected = logits.clone()
    for rule in chain:
        expected = rule(ids, expected)
    seen = torch.zeros(B, V, dtype=torch.bool).scatter_(1, ids, True)
    got = token_probabilities(
        logits, temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=penalty, seen=seen
    )
    assert_close(got, expected.softmax(-1), atol=1e-5, rtol=1e-4)


def test_filters_by_hand_in_any_order_of_the_vocabulary():
    p = torch.tensor([[0.05, 0.5, 0.15, 0.3]])

    def left(logits):
        return logits.isfinite()[0].nonzero().flatten().tolist()

    assert left(keep_top_k(p.log(), 2)) == [1, 3]
    assert left(keep_top_k(p.log(), 9)) == [0, 1, 2, 3]
    assert left(keep_top_p(p.log(), 0.49)) == [1]
    assert left(keep_top_p(p.log(), 0.6)) == [1, 3]
    assert left(keep_min_p(p.log(), 0.25)) == [1, 2, 3]
    assert left(keep_min_p(p.log(), 1.0)) == [1]
    seen = torch.tensor([[True, True, False, False]])
    assert penalize_repetition(torch.tensor([[-1.0, 3.0, -1.0, 3.0]]), seen, 2.0).tolist() == [
        [-2.0, 1.5, -1.0, 3.0]
    ]


def test_filters_keep_the_best_and_take_any_shape():
    logits = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    for rule in (
        lambda x: keep_top_p(x, 0.6),
        lambda x: keep_top_k(x, 3),
        lambda x: keep_min_p(x, 0.2),
    ):
        assert rule(logits).equal(rule(logits.flatten(0, 1)).view(2, 5, 8))
        assert rule(logits[0, 0]).equal(rule(logits[0, :1])[0])
    assert keep_top_p(logits, 1e-300).isfinite().sum(-1).eq(1).all()  # a p that is 0 in float32
    assert token_probabilities(logits[0], top_p=1e-300).sum(-1).eq(1).all()


def test_seen_must_be_a_mask_of_the_logits():
    for seen, rule in (
        (torch.ones(2, 4, dtype=torch.long), "expected bool"),
        (torch.ones(4, dtype=torch.bool), "expected .2, 4. = the shape of the logits"),
        (None, "seen is a NoneType, expected a tensor"),
    ):
        with pytest.raises(ValueError, match=rule):
            penalize_repetition(torch.zeros(2, 4), seen, 1.5)


@pytest.mark.parametrize(
    "wrong",
    [None, [[1.0]], "x", torch.tensor(1.0), torch.zeros(2, 0), torch.ones(1, 3).long()],
    ids=["None", "list", "text", "0-d", "no vocabulary", "integers"],
)
def test_what_is_no_table_of_logits_is_refused(wrong):
    for rule in (
        lambda x: keep_top_p(x, 0.6),
        lambda x: keep_top_k(x, 3),
        lambda x: keep_min_p(x, 0.2),
        lambda x: penalize_repetition(x, torch.ones(1, 3, dtype=torch.bool), 1.5),
        token_probabilities,
        sample,
    ):
        with pytest.raises(ValueError, match="logits (is a|has)"):
            rule(wrong)


def test_what_is_no_tensor_of_ids_is_refused():
    model = build()
    for wrong in (None, [[1, 2]], "x", torch.tensor([[1.0]])):
        with pytest.raises(ValueError, match="input_ids (is a|has dtype)"):
            generate(model, wrong, max_new_tokens=1)
        with pytest.raises(ValueError, match="input_ids (is a|has dtype)"):
            generate_speculatively(model, model, wrong, max_new_tokens=1)
        with pytest.raises(ValueError, match="drafts (is a|has dtype)"):
            accept_drafts(wrong, torch.eye(4), torch.eye(4))
    with pytest.raises(ValueError, match="attention_mask is a list"):
        generate(model, torch.tensor([[1]]), max_new_tokens=1, attention_mask=[[1]])
    for k in (None, [[1.0]], torch.ones(1, 1, 1, 1).long()):
        with pytest.raises(ValueError, match="k (is a|has dtype)"):
            KVCache(4).update(0, k, k)
    for rows in (None, 5, "text"):
        with pytest.raises(ValueError, match="rows=.* must be a list"):
            pad_left(rows, 0)


def test_top_p_of_one_keeps_everything_in_a_large_vocabulary():
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    assert keep_top_p(logits, 1.0).isfinite().all()
    assert (token_probabilities(logits, top_p=1.0, min_p=0.0) > 0).all()


def test_sampling_has_the_distribution_and_obeys_the_seed():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(20_000, 4)
    draws = sample(logits, temperature=0.5, top_k=3, generator=torch.Generator().manual_seed(1))
    expected = torch.tensor([0.16, 0.09, 0.04, 0]) / 0.29
    assert_close(draws.bincount(minlength=4) / 20_000, expected, atol=0.015, rtol=0)
    assert draws.equal(
        sample(logits, temperature=0.5, top_k=3, generator=torch.Generator().manual_seed(1))
    )
    assert draws.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-45, 1e-8, 1e10, 1e300])
def test_extreme_temperatures_and_logits(dtype, temperature):
    logits = torch.tensor([[3.0, -1e4, 4.0, -math.inf]], dtype=dtype)
    p = token_probabilities(logits, temperature=temperature)
    cold = torch.tensor([[0.0, 0, 1, 0]])
    hot = torch.tensor([[1.0, 1, 1, 0]]) / 3
    assert_close(p, cold if temperature < 1 else hot, atol=1e-4, rtol=0)
    assert sample(logits, temperature=temperature).item() != 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(temperature=math.inf), "temperature=inf"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_k=2.0), "top_k=2.0"),
        (dict(top_k=True), "top_k=True"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.01), "top_p=1.01"),
        (dict(top_p=math.nan), "top_p=nan"),
        (dict(min_p=-0.1), "min_p=-0.1"),
        (dict(min_p=1.1), "min_p=1.1"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0"),
        (dict(repetition_penalty=math.inf), "repetition_penalty=inf"),
        (dict(repetition_penalty=1.1), "needs `seen`"),
    ],
)
def test_wrong_options_are_refused(wrong, message):
    for also in ({}, {"temperature": 0.0}):  # greedy decoding checks them too
        with pytest.raises(ValueError, match=message):
            sample(torch.zeros(1, 4), **also | wrong)
    if "seen" not in message:
        with pytest.raises(ValueError, match=message):
            generate(build(), torch.tensor([[1]]), max_new_tokens=0, **wrong)


@pytest.mark.parametrize("row", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_wrong_logits_are_refused(row, temperature):
    with pytest.raises(ValueError, match="a row of logits holds NaN"):
        sample(torch.tensor([[0.0, 1.0], row]), temperature=temperature)
    with pytest.raises(ValueError, match=r"expected \(B, V\)"):
        sample(torch.zeros(4), temperature=temperature)


def test_generator_of_another_device_is_refused():
    with pytest.raises(ValueError, match="the generator is on cuda"):
        sample(torch.zeros(1, 4), generator=SimpleNamespace(device=torch.device("cuda")))


# ---------------------------------------------------------------- many tokens


def slowly(model, ids, n):
    """No cache, no batch: the newest tokens are read anew for each one."""
    context = model.config.max_position_embeddings
    new = []
    ids = list(ids)[-context:]
    for _ in range(n):
        ids = ids if len(ids) <= context else ids[-((context + 1) // 2) :]
        new.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        ids.append(new[-1])
    return new


@pytest.mark.parametrize("context", [1, 3, 12, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        MIXED,
        dict(position_type="learned"),
        dict(position_type="none"),
        dict(norm_position="post"),
    ],
)
def test_each_row_is_as_if_alone_also_beyond_the_context(context, changes):
    model = build(max_position_embeddings=context, **changes)
    rows = prompts(3, 9, 1, 17)
    ids, mask = pad_left(rows, 0)
    together = generate(model, ids, max_new_tokens=20, attention_mask=mask)
    assert together.shape == (4, 37) and together[:, :17].equal(ids)
    for row, text in zip(rows, together.tolist(), strict=True):
        assert text[17:] == slowly(model, row, 20)


def test_padding_does_not_count_as_a_repetition():
    model = build()
    rows = prompts(3, 9)
    options = dict(max_new_tokens=15, repetition_penalty=3.0)
    wanted = generate(model, torch.tensor(rows[:1]), **options)[0, 3].item()
    ids, mask = pad_left(rows, wanted)  # counted as seen, it would not be chosen again
    together = generate(model, ids, attention_mask=mask, **options)
    for row, text in zip(rows, together, strict=True):
        alone = generate(model, torch.tensor([row]), **options)[0, len(row) :]
        assert text[9:].equal(alone)
    assert not together[:, 9:].equal(
        generate(model, ids, attention_mask=mask, max_new_tokens=15)[:, 9:]
    )


def test_sequences_stop_and_are_filled_up():
    model = build()
    ids = torch.tensor(prompts(4, 4, 4))
    free = generate(model, ids, max_new_tokens=20)
    stop = free[1, 9].item()
    stopped = generate(model, ids, max_new_tokens=20, stop_token_ids=[stop, 39], pad_token_id=39)
    for whole, row in zip(free.tolist(), stopped.tolist(), strict=True):
        n = next((n for n, token in enumerate(whole, 1) if n > 4 and token in (stop, 39)), 24)
        assert row == (whole[:n] + [39] * 24)[: stopped.shape[1]]
    # one row needs no padding
    one = generate(model, ids[1:2], max_new_tokens=20, stop_token_ids=[stop])
    assert one[0].tolist() == free[1, : free[1].tolist().index(stop, 4) + 1].tolist()


def test_several_sequences_share_a_prompt_but_not_their_luck():
    model = build(initializer_range=0.1)
    ids = torch.tensor(prompts(3, 3))

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(
            model,
            ids,
            max_new_tokens=6,
            temperature=1.0,
            num_return_sequences=4,
            generator=generator,
        )

    assert draw(0).shape == (8, 9) and draw(0)[:, :3].equal(ids.repeat_interleave(4, dim=0))
    assert draw(0).equal(draw(0)) and not draw(0).equal(draw(1))
    assert len({tuple(row) for row in draw(0).tolist()}) == 8


def test_model_gets_its_modes_back_and_no_gradients_flow():
    model = DecoderModel(
        ModelConfig(vocab_size=10, hidden_size=8, num_layers=2, num_heads=2, dropout=0.5)
    )
    model.layers[0].eval()
    ids = torch.tensor([[1, 2]])
    # no dropout
    assert generate(model, ids, max_new_tokens=8).equal(generate(model, ids, max_new_tokens=8))
    assert (model.training, model.layers[0].training, model.layers[1].mlp.training) == (
        True,
        False,
        True,
    )
    tokens = generate_tokens(model, ids, max_new_tokens=8)
    first = next(tokens)
    assert not first.requires_grad and not first.is_inference()  # it can be trained on
    assert (model.training, model.layers[0].training) == (True, False)  # between two tokens, too
    tokens.close()
    assert model.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with pytest.raises(ValueError, match="NaN"):
        model.lm_head.weight.data.fill_(math.nan)
        generate(model, ids, max_new_tokens=1)
    assert model.training


def test_two_iterators_share_a_model():
    """The end of one must not bring dropout back under the other."""
    model = DecoderModel(
        ModelConfig(vocab_size=10, hidden_size=8, num_layers=2, num_heads=2, dropout=0.5)
    )
    ids = torch.tensor([[1, 2]])
    for write in (generate_tokens, partial(generate_speculatively, model)):
        expected = [each.tolist() for each in write(model, ids, max_new_tokens=8)]
        first = write(model, ids, max_new_tokens=8)
        second = write(model, ids, max_new_tokens=8)
        got = [(next(first), next(second))[1].tolist()]
        first.close()
        model.train()
        assert got + [each.tolist() for each in second] == expected


def test_generators_refuse_at_once():
    model = build()
    ids = torch.tensor([[1, 2]])
    for wrong in (
        dict(max_new_tokens=-1),
        dict(max_new_tokens=1, top_p=2.0),
        dict(max_new_tokens=1, temperature=-1.0),
    ):
        for write in (
            partial(generate_tokens, model),
            partial(generate_speculatively, model, model),
        ):
            with pytest.raises(ValueError):
                write(ids, **wrong)


def test_stop_tokens_may_come_in_any_collection():
    model = build()
    ids = torch.tensor(prompts(4))
    stop = generate(model, ids, max_new_tokens=9)[0, 8].item()
    expected = generate(model, ids, max_new_tokens=9, stop_token_ids=[stop])
    for stops in ({stop}, torch.tensor([stop]), (stop,)):
        assert generate(model, ids, max_new_tokens=9, stop_token_ids=stops).equal(expected)
    for wrong in (3, None, [3.7]):
        with pytest.raises(ValueError, match="a list of whole numbers"):
            generate(model, ids, max_new_tokens=9, stop_token_ids=wrong)


def test_a_penalty_takes_int32_and_names_ids_outside():
    model = build()
    ids = torch.tensor(prompts(4))
    options = dict(max_new_tokens=5, repetition_penalty=2.0)
    assert generate(model, ids.int(), **options).equal(generate(model, ids, **options))
    with pytest.raises(ValueError, match=r"outside 0..39"):
        generate(model, ids + 40, **options)


def test_nothing_is_asked_for():
    ids = torch.tensor(prompts(3))
    assert generate(build(), ids, max_new_tokens=0).equal(ids)
    assert generate(build(), ids.int(), max_new_tokens=0).dtype == torch.int64
    # they came back as they were
    with pytest.raises(ValueError, match="dtype torch.float32, expected int64 or int32"):
        generate(build(), ids.float(), max_new_tokens=0)


@pytest.mark.parametrize(
    "ids, options, message",
    [
        ([[]], {}, "at least one token"),
        ([1, 2], {}, "at least one token"),
        ([[1, 2]], dict(max_new_tokens=-1), "max_new_tokens=-1"),
        ([[1, 2]], dict(max_new_tokens=2.5), "max_new_tokens"),
        ([[1, 2]], dict(num_return_sequences=0), "num_return_sequences=0"),
        ([[1, 2]], dict(stop_token_ids=[40]), "40 is outside 0..39"),
        ([[1, 2]], dict(stop_token_ids=[3], pad_token_id=-1), "-1 is outside 0..39"),
        ([[1], [2]], dict(stop_token_ids=[3]), "pad_token_id=None: 2 rows"),
        ([[1]], dict(stop_token_ids=[3], num_return_sequences=2), "pad_token_id=None: 2 rows"),
        ([[1, 2]], dict(attention_mask=torch.tensor([[1, 0]])), "padding belongs on the left"),
        ([[1, 2, 3]], dict(attention_mask=torch.tensor([[1, 0, 1]])), "padding belongs on the"),
        ([[1, 2]], dict(attention_mask=torch.tensor([[0, 0]])), "padding belongs on the left"),
        ([[1, 2]], dict(attention_mask=torch.tensor([[1]])), "the shape of input_ids"),
        ([[1, 2]], dict(attention_mask=torch.tensor([[-math.inf, 0.0]])), "bool or integers"),
    ],
)
def test_wrong_prompts_are_refused(ids, options, message):
    with pytest.raises(ValueError, match=message):
        generate(build(), torch.tensor(ids, dtype=torch.long), **dict(max_new_tokens=1) | options)


def test_pad_left():
    ids, mask = pad_left([[5], [6, 7, 8]], 9)
    assert ids.tolist() == [[9, 9, 5], [6, 7, 8]] and mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert pad_left([torch.tensor([5]), torch.tensor([6, 7, 8])], 9)[0].equal(ids)
    for rows in ([], [[1], []]):
        with pytest.raises(ValueError, match="none empty"):
            pad_left(rows, 0)
    for rows, pad in (([[1.0], [2, 3]], 0), ([[1]], None), ([[1], [2, 3]], 1.5)):
        with pytest.raises(ValueError, match="a list of whole numbers"):
            pad_left(rows, pad)


# ---------------------------------------------------------------- Hugging Face writes the same


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
    )
    oracle = LlamaForCausalLM(config).eval()
    for name, parameter in oracle.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    oracle.generation_config.eos_token_id = None
    oracle.generation_config.pad_token_id = 0
    model = build(intermediate_size=64, max_position_embeddings=64, tie_word_embeddings=False)
    renamed = {
        name.removeprefix("model.").replace("embed_tokens", "embedding.embed_tokens"): weight
        for name, weight in oracle.state_dict().items()
    }
    model.load_state_dict(renamed)
    return oracle, model


def test_hugging_face_writes_the_same():
    oracle, model = llama()
    ids, mask = pad_left(prompts(3, 9, 1), 0)
    for options in (dict(), dict(repetition_penalty=1.4)):
        for each, hidden in ((ids[1:2], None), (ids, mask)):
            if options and hidden is not None:
                continue  # there, the padding counts as seen
            full = torch.ones_like(each) if hidden is None else hidden
            expected = oracle.generate(
                each, attention_mask=full, max_new_tokens=25, do_sample=False, **options
            )
            assert generate(model, each, attention_mask=hidden, max_new_tokens=25, **options).equal(
                expected
            )
    stop = generate(model, ids, attention_mask=mask, max_new_tokens=25)[0, 14].item()
    expected = oracle.generate(
        ids, attention_mask=mask, max_new_tokens=25, do_sample=False, eos_token_id=stop
    )
    got = generate(
        model, ids, attention_mask=mask, max_new_tokens=25, stop_token_ids=[stop], pad_token_id=0
    )
    assert got.equal(expected)


# ---------------------------------------------------------------- compiled


@pytest.mark.parametrize(
    "changes, dynamic, most", [({}, True, 1), (MIXED, True, 2), ({}, None, 3), (MIXED, None, 7)]
)
def test_compiled_steps_are_the_same_and_compile_seldom(changes, dynamic, most):
    programs = []

    def count(graph, inputs):
        programs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = build(**changes)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=count)
    for P, n in ((5, 12), (9, 20), (3, 7), (2, 15)):
        ids = torch.tensor(prompts(P, P))
        assert generate(compiled, ids, max_new_tokens=n).equal(
            generate(model, ids, max_new_tokens=n)
        )
    assert 1 <= len(programs) <= most


def test_compiled_with_padding():
    torch._dynamo.reset()
    model = build(num_layers=1)
    (ids, mask) = pad_left(prompts(3, 9), 0)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for n in (3, 9):
        options = dict(attention_mask=mask, max_new_tokens=n)
        assert generate(compiled, ids, **options).equal(generate(model, ids, **options))


# ---------------------------------------------------------------- text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab c", max_size=20),
    stops=st.lists(st.text("ab c", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=8),
)
def test_stop_strings_do_not_depend_on_the_cut(text, stops, cuts):
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    expected = text
    for end in range(1, len(text) + 1):  # the first prefix that ends with a stop string
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            expected = text[: end - max(map(len, found))]
            break
    got = list(until_stop(pieces, stops))
    assert "".join(got) == expected and all(got)


def test_what_cannot_be_a_stop_string_is_shown_at_once():
    shown = until_stop(iter(["hello ", "wor", "m", "ld"]), ["world"])
    assert [next(shown), next(shown), next(shown)] == ["hello ", "worm", "ld"]
    assert list(until_stop(["abc"], (stop for stop in ["b"]))) == ["a"]
    for wrong in ("abc", ["a", ""], ["a", 1], None):
        with pytest.raises(ValueError, match="must be a list|must be strings, none of them empty"):
            list(until_stop(["x"], wrong))


@pytest.fixture(scope="module")
def tokenizer():
    return BPETokenizer.train(["a b"], vocab_size=259)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=12))
def test_no_half_characters(tokenizer, text):
    pieces = list(whole_characters(tokenizer.encode(text, allow_special=False), tokenizer))
    assert "".join(pieces) == text and all(pieces)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_stray_bytes_are_not_decoded_again_and_again(tokenizer):
    [end] = tokenizer.encode("\u6df1")[-1:]  # a byte that never begins a character
    lengths = []
    watched = SimpleNamespace(decode=lambda ids: lengths.append(len(ids)) or tokenizer.decode(ids))
    ids = 50 * [end] + tokenizer.encode("\u6df1a") + 3 * [end]
    assert "".join(whole_characters(ids, watched)) == tokenizer.decode(ids)
    assert max(lengths) <= 4


class Parrot(torch.nn.Module):
    """Says given tokens, whatever it reads."""

    def __init__(self, ids, V=300):
        super().__init__()
        self.ids = iter(ids)
        self.V = V
        self.config = ModelConfig(vocab_size=V)
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, *, position_ids, attention_mask, cache, logits_to_keep):
        self.read = input_ids.tolist()
        cache.update(0, *torch.zeros(2, 1, 1, input_ids.shape[1], 1))
        return DecoderOutput(torch.eye(self.V)[next(self.ids)][None, None], torch.zeros(()))


def test_streamed_text(tokenizer):
    def said(text, *, eos=True, max_new_tokens=99, **options):
        ids = tokenizer.encode(text) + [tokenizer.eos_token_id] * eos
        return list(
            stream_text(
                Parrot(ids),
                tokenizer,
                "",
                max_new_tokens=max_new_tokens,
                temperature=0.0,
                **options,
            )
        )

    assert said("a深b") == ["a", "深", "b"]
    # it ends inside of a character
    assert said("a深b", eos=False, max_new_tokens=2) == ["a", "\ufffd"]
    assert said("one two", stop_strings=["e t"]) == ["o", "n"]
    assert said("深深é!", stop_strings=["é"]) == ["深", "深"]
    assert said("") == []
    letters = SimpleCharacterTokenizer.from_text("abc")  # it has no end-of-sequence token
    assert list(
        stream_text(Parrot([2, 3, 4, 1]), letters, "ab", max_new_tokens=3, temperature=0.0)
    ) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="at least one token"):
        list(stream_text(Parrot([2]), letters, "", max_new_tokens=3))


def test_stream_that_is_left_restores_the_mode(tokenizer):
    model = build(vocab_size=259).train()
    stream = stream_text(
        model, tokenizer, "a", max_new_tokens=50, generator=torch.Generator().manual_seed(0)
    )
    next(stream)
    stream.close()
    assert model.training


# ---------------------------------------------------------------- drafts


def rule_counts(rule, p, q, draws=1500):
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(len(p))
    for _ in range(draws):
        draft = torch.multinomial(q, 1, generator=generator)
        counts[rule(draft, q[None], p.expand(2, -1), generator=generator)[0]] += 1
    return ((counts - draws * p) ** 2 / (draws * p)).sum().item()


def keep_all(drafts, q, p, *, generator):
    return torch.cat((drafts, torch.multinomial(p[-1], 1, generator=generator)))


def resample_from_p(drafts, q, p, *, generator):
    places = torch.arange(len(drafts))
    kept = torch.rand(len(drafts), generator=generator) * q[places, drafts] < p[places, drafts]
    k = int(kept.long().cumprod(dim=0).sum())
    return torch.cat((drafts[:k], torch.multinomial(p[k], 1, generator=generator)))


def test_drafts_leave_the_distribution_as_it_is():
    p = torch.tensor([0.5, 0.3, 0.2])
    q = torch.tensor([0.2, 0.3, 0.5])
    # chi-square with 2 degrees of freedom: 1 in 10,000
    assert rule_counts(accept_drafts, p, q) < 18.4
    assert rule_counts(keep_all, p, q) > 60 and rule_counts(resample_from_p, p, q) > 60


def test_drafts_at_the_edges():
    eye = torch.eye(4)
    generator = torch.Generator().manual_seed(0)
    assert accept_drafts(
        torch.tensor([1, 2]), eye[[1, 2]], eye[[1, 2, 3]], generator=generator
    ).tolist() == [1, 2, 3]
    assert accept_drafts(
        torch.tensor([1, 2]), eye[[1, 2]], eye[[1, 0, 3]], generator=generator
    ).tolist() == [1, 0]
    assert accept_drafts(
        torch.tensor([1, 2]), eye[[1, 2]], eye[[0, 2, 3]], generator=generator
    ).tolist() == [0]
    none = torch.empty(0, dtype=torch.long)
    assert accept_drafts(none, torch.empty(0, 4), eye[[3]], generator=generator).tolist() == [3]


def test_accept_drafts_refuses_shapes_that_do_not_fit():
    eye = torch.eye(4)
    for drafts, q, p in ((2, 2, 2), (2, 3, 3), (2, 2, 4), (2, 1, 3)):
        with pytest.raises(ValueError, match="drafts, q and p have shapes"):
            accept_drafts(torch.zeros(drafts, dtype=torch.long), eye[:q], eye[:p])
    with pytest.raises(ValueError, match="drafts, q and p have shapes"):
        accept_drafts(torch.zeros(1, 1, dtype=torch.long), eye[:1], eye[:2])


@pytest.mark.parametrize("changes", [{}, MIXED])
@pytest.mark.parametrize("num_drafts", [1, 4, 30])
def test_greedy_speculation_is_the_model_itself(changes, num_drafts):
    model = build(max_position_embeddings=25, **changes)
    ids = torch.tensor(prompts(4))
    expected = generate(model, ids, max_new_tokens=21)[0, 4:]
    for draft in (build(1, hidden_size=16, num_layers=1), model):
        rounds = list(
            generate_speculatively(model, draft, ids, max_new_tokens=21, num_drafts=num_drafts)
        )
        assert torch.cat(rounds).equal(expected)
        assert all(1 <= len(each) <= num_drafts + 1 for each in rounds)
    assert len(rounds) == -(-21 // (num_drafts + 1))  # its own drafts are all kept
    assert not list(generate_speculatively(model, model, ids, max_new_tokens=0))


class Table(torch.nn.Module):
    """The next token depends on the last one only."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits
        self.config = ModelConfig(vocab_size=len(logits))

    def forward(self, input_ids, *, position_ids, cache, logits_to_keep):
        cache.update(0, *torch.zeros(2, 1, 1, input_ids.shape[1], 1))
        return DecoderOutput(self.logits[input_ids][:, -logits_to_keep:], torch.zeros(()))


@pytest.mark.parametrize("rule", [accept_drafts, resample_from_p])
def test_sampled_speculation_has_the_distribution_of_the_model(rule, monkeypatch):
    monkeypatch.setattr("llm_course.model.speculative.accept_drafts", rule)
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(
        [
            [0.48, 0.3, 0.18, 0.04],
            [0.18, 0.48, 0.3, 0.04],
            [0.3, 0.18, 0.48, 0.04],
            [0.25, 0.25, 0.25, 0.25],
        ]
    )
    big = Table(rows.log())
    small = Table(rows[:, [2, 0, 1, 3]].log())
    filters = dict(temperature=0.8, top_p=0.97)  # which drops the last of the first three rows
    options = dict(max_new_tokens=2, num_drafts=3) | filters
    p, q = (token_probabilities(each.logits, **filters) for each in (big, small))
    assert (p[:3, 3] == 0).all() and (p[:3, :3] > 0.1).all()
    counts = torch.zeros(4, 4)
    for _ in range(600):
        rounds = generate_speculatively(
            big, small, torch.tensor([[0]]), generator=generator, **options
        )
        counts[tuple(torch.cat(list(rounds)))] += 1
    distances = [(counts / 600 - table[0][:, None] * table).abs().sum() / 2 for table in (p, q)]
    assert (distances[0] < 0.11) == (rule is accept_drafts) and distances[1] > 0.2, distances


def test_speculation_refuses_what_it_cannot_do():
    model = build(max_position_embeddings=20)
    ids = torch.tensor(prompts(4))
    for wrong, message in (
        (dict(input_ids=torch.zeros(2, 3, dtype=torch.long)), r"expected \(1, T\)"),
        (dict(num_drafts=0), "num_drafts=0"),
        (dict(max_new_tokens=17), "make 21 tokens, more than max_position_embeddings=20"),
        (dict(draft_model=build(vocab_size=41)), "vocab_size=41 and 40: they must share"),
        (dict(input_ids=torch.tensor(1)), r"expected \(1, T\)"),
        (dict(repetition_penalty=1.2), "repetition_penalty=1.2 can't be combined with drafts"),
    ):
        with pytest.raises(ValueError, match=message):
            list(
                generate_speculatively(
                    model, **dict(draft_model=model, input_ids=ids, max_new_tokens=5) | wrong
                )
            )


# ---------------------------------------------------------------- accelerators


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    model = build(**MIXED).cuda()
    (ids, mask) = pad_left(prompts(3, 9), 0)
    options = dict(attention_mask=mask.cuda(), max_new_tokens=30)
    expected = generate(model.cpu(), ids, attention_mask=mask, max_new_tokens=30)
    assert (generate(model.cuda(), ids.cuda(), **options).cpu() == expected).float().mean() > 0.9
    generator = torch.Generator("cuda").manual_seed(0)
    assert generate(model, ids.cuda(), temperature=1.0, generator=generator, **options).shape == (
        2,
        39,
    )
    with pytest.raises(ValueError, match="the generator is on cpu"):
        generate(model, ids.cuda(), temperature=1.0, generator=torch.Generator(), **options)

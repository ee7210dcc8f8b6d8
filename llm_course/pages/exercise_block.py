"""The visible checks of exercise 08, the transformer block: each says what is wrong."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_course.model import estimate
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.moe import MoE
from llm_course.model.normalization import RMSNorm
from llm_course.model.rope import RotaryEmbedding
from llm_course.model.transformer_block import TransformerBlock
from llm_course.pages.checking import (
    case,
    expect,
    expect_number,
    expect_plain_number,
    forbid,
    same,
    written,
)


def randomise(module: Any, seed: int = 0) -> Any:
    """Random weights everywhere, also in the norms: with weights of 1, two norms cannot be told
    apart.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in module.parameters():
            if parameter.ndim == 1:
                nn.init.uniform_(parameter, 0.5, 2.0)
            else:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def config_of(C: int, num_heads: int = 2, intermediate_size: int = 12, **options: Any) -> Any:
    return ModelConfig(
        hidden_size=C, num_heads=num_heads, intermediate_size=intermediate_size, **options
    )


def noise(*shape: Any, seed: int = 1) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class ToyCache:
    """The cache of chapter 5: it keeps all keys and values."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer_index: int, k: Any, v: Any) -> Any:
        old_k, old_v = self.kept.get(layer_index, (k[:, :, :0], v[:, :, :0]))
        self.kept[layer_index] = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
        return self.kept[layer_index]


# ------------------------------------------------------------------------------------------- task 1


def check_pairs(name: str, typed: Any, right: Any, slips: Any) -> None:
    """`typed` and `right` by rule; `slips` by rule: words, and the pair that a slip would give."""
    assert isinstance(typed, dict), f"{name} is a {type(typed).__name__}, expected a dictionary"
    for rule, pair in right.items():
        assert rule in typed, f'{name}: the key "{rule}" is missing'
        try:
            numbers = torch.as_tensor(typed[rule]).double().flatten()
        except Exception:
            raise AssertionError(
                f'{name}["{rule}"] is {typed[rule]!r}, expected a pair of numbers'
            ) from None
        assert len(numbers) == 2, f'{name}["{rule}"] has {len(numbers)} numbers, expected 2'

        def near(a: Any, b: Any) -> Any:
            return bool(((a - b).abs() < 2e-3).all())

        assert near(numbers, pair) or not near(numbers, pair.flip(0)), (
            f'{name}["{rule}"]: the two numbers are exchanged'
        )
        for words, wrong in slips.get(rule, {}).items():
            assert near(wrong, pair) or not near(numbers, wrong), f'{name}["{rule}"]: {words}'
        assert near(numbers, pair) or (numbers - pair).abs().max() > 0.06, (
            f'{name}["{rule}"]: right, but round to three places'
        )
        assert near(numbers, pair), (
            f'{name}["{rule}"]: you have {tuple(round(n, 3) for n in numbers.tolist())}, and that'
            " is not what the rule gives. Write down what the layer reads, what it returns, and"
            " the sum"
        )


def doubled_swap(v: Any) -> Any:
    """The layer of task 1."""
    return 2 * v.flip(0)


def unit(v: Any) -> Any:
    """The norm of task 1."""
    return v / v.square().mean().sqrt()


def check_full(answers: Any) -> None:
    """Task 1."""
    with case("Task 1, full"):
        written(answers, "full")
        s = torch.tensor([17.0, 7.0]).double()
        f = doubled_swap
        n = unit
        centred = torch.tensor([1.0, -1.0]).double()  # what a LayerNorm makes of s
        right = {"pre": s + f(n(s)), "post": n(s + f(s)), "sandwich": s + n(f(n(s)))}
        slips = {
            "pre": {
                "the layer reads the stream without a norm": s + f(s),
                "the factor 2 of the layer is missing, or the norm stands behind the layer": (
                    s + n(f(s))
                ),
                "the layer swaps the two numbers": s + 2 * n(s),
                "the RMS is the root of the *mean* of the squares, here of half their sum": (
                    s + f(s / s.norm())
                ),
                "the stream itself must stay: only the layer reads its norm": n(s) + f(n(s)),
                "the mean was taken off; that is a LayerNorm": s + f(centred),
                "the output must be added to the stream": f(n(s)),
            },
            "post": {
                "the norm of the sum is missing": s + f(s),
                "the norm comes after the sum, not before it": n(s) + f(n(s)),
                "the layer reads the stream itself here, not its norm": n(s + f(n(s))),
                "the norm is of the sum, not of the output": s + n(f(s)),
                "the sum is divided by the RMS of the old stream; take its own": (s + f(s)) / 13,
                "the RMS is the root of the *mean* of the squares, here of half their sum": (
                    (s + f(s)) / (s + f(s)).norm()
                ),
            },
            "sandwich": {
                "the second norm, that of the output, is missing": s + f(n(s)),
                "the stream itself must stay: only the layer reads its norm": n(s) + n(f(n(s))),
                "the norm is of the output, not of the sum": n(s + f(n(s))),
                "the mean was taken off; that is a LayerNorm": s + n(f(centred)),
            },
        }
        check_pairs("full", answers["full"], right, slips)


def check_half(answers: Any) -> None:
    """Task 1."""
    with case("Task 1, half"):
        written(answers, "half")
        s = torch.tensor([17.0, 7.0]).double()
        f = doubled_swap
        n = unit
        right = {"pre": s + f(n(s)) / 2, "post": n(s + f(s) / 2), "sandwich": s + n(f(n(s))) / 2}
        slips = {
            "pre": {
                "this is the answer for m = 1": s + f(n(s)),
                "m multiplies the stream; it belongs to the output": s / 2 + f(n(s)),
                "m multiplies the sum; it belongs to the output alone": (s + f(n(s))) / 2,
            },
            "post": {
                "this is the answer for m = 1": n(s + f(s)),
                "m multiplies the stream; it belongs to the output": n(s / 2 + f(s)),
                "m multiplies the norm of the sum; it belongs to the output, inside": n(s + f(s))
                / 2,
                "the norm of the sum is missing": s + f(s) / 2,
            },
            "sandwich": {
                "m comes before the second norm, which takes it away again; multiply last": (
                    s + n(f(n(s)))
                ),
                "m multiplies the stream; it belongs to the output": s / 2 + n(f(n(s))),
                "the second norm, that of the output, is missing": s + f(n(s)) / 2,
            },
        }
        check_pairs("half", answers["half"], right, slips)


def check_silent(answers: Any) -> None:
    """Task 1."""
    with case("Task 1, silent"):
        written(answers, "silent")
        s = torch.tensor([17.0, 7.0]).double()
        n = s / s.square().mean().sqrt()
        silence = {"a layer that says nothing does not erase the stream": 0 * s}
        slips = {
            "pre": {"the norm is for the layer only; the stream stays": n} | silence,
            "post": (
                {"nothing was added, but this rule normalises the stream all the same": s} | silence
            ),
            "sandwich": {"both norms are on the branch; the stream stays": n} | silence,
        }
        check_pairs("silent", answers["silent"], {"pre": s, "post": n, "sandwich": s}, slips)


# ------------------------------------------------------------------------------------------- task 2


def block_pair(
    block_class: Any, C: int = 8, heads: int = 2, layer_index: int = 0, **options: Any
) -> Any:
    """A block of `block_class` and the package's, with the same random weights."""
    ours, real = (
        kind(config_of(C, heads, **options), layer_index).eval()
        for kind in (block_class, TransformerBlock)
    )
    randomise(real)
    ours.load_state_dict(real.state_dict())
    return ours, real


def called(block: Any, x: Any, **arguments: Any) -> Any:
    """The two things that a block returns, of an x that stays as it was."""
    before = x.clone()
    found = block(x, **arguments)
    assert isinstance(found, tuple) and len(found) == 2, (
        f"forward returned a {type(found).__name__}, expected a pair: the stream, and the"
        " statistics of the experts or None"
    )
    assert torch.equal(x, before), (
        "the x of the caller has changed: `x += y` writes into it, `x = x + y` does not"
    )
    return found


def call_block(block: Any, x: Any, **arguments: Any) -> Any:
    """The same, without the forward of the package's block."""
    with forbid(TransformerBlock.forward, TransformerBlock.add_to_stream):
        return called(block, x, **arguments)


def check_rule(block_class: Any, rule: str, B: int = 2, T: int = 5, **options: Any) -> None:
    ours, b = block_pair(block_class, norm_position=rule, **options)
    x = 3 * noise(B, T, 8)
    found = call_block(ours, x)[0]
    expect(
        found,
        b(x)[0],
        "the output is not that of the package with the same weights",
        rule_slips(rule, b, x).items(),
    )


def check_silent_layers(block_class: Any, rule: str) -> None:
    silent = block_class(config_of(8, norm_position=rule))
    for layer in (silent.self_attn.o_proj, silent.mlp.down_proj):
        nn.init.zeros_(layer.weight)
    x = 3 * noise(2, 5, 8)
    right = F.rms_norm(x, (8,), eps=1e-6) if rule == "post" else x
    found = call_block(silent, x)[0]
    expect(found, right, "with silent layers the stream is not what the rule leaves of it")


def parts(b: Any) -> Any:
    """Attention, the MLP, and the four norms of a block, in the order in which they are met."""
    return (
        b.self_attn,
        b.mlp,
        b.input_layernorm,
        b.attention_output_norm,
        b.post_attention_layernorm,
        b.mlp_output_norm,
    )


def rule_slips(rule: str, b: Any, x: Any) -> Any:
    """What each slip in a block's wiring gives."""
    a, f, n1, n2, n3, n4 = parts(b)
    h = b.add_to_stream(x, a(n1(x)), n2)  # the stream after attention
    slips = {
        "the MLP reads the stream from before attention; it must read the new one": b.add_to_stream(
            h, f(n3(x)), n4
        ),
        "the MLP reads the new stream, but adds to the old one": b.add_to_stream(x, f(n3(h)), n4),
        "attention's output replaces the stream; add it": b.add_to_stream(
            n2(a(n1(x))), f(n3(n2(a(n1(x))))), n4
        ),
        "the MLP's output replaces the stream; add it": n4(f(n3(h))),
        "the MLP is missing": h,
    }
    if rule == "post":
        slips |= post_slips(b, x)
    else:
        slips |= input_norm_slips(b, x)
    return slips | (output_norm_slips(b, x) if rule in ("sandwich", "output") else {})


def post_slips(b: Any, x: Any) -> Any:
    """What a slip gives that only post-norm can have."""
    a, f, _, n2, _, n4 = parts(b)
    h = n2(x + a(x))  # the stream after attention
    z = x + n2(a(x))
    w = n2(x) + a(x)
    v = n4(x + a(x))
    return {
        "post-norm takes the norm of the sum, norm(x + y); you have x + norm(y)": z + n4(f(z)),
        "post-norm takes the norm of the sum, norm(x + y); you have norm(x) + y": n4(w) + f(w),
        "the first half is post-norm, the second is not: norm(x + y) there too": h + n4(f(h)),
        "the second half is post-norm, the first is not: norm(x + y) there too": n4(z + f(z)),
        "the two output norms are exchanged": n2(v + f(v)),
        "both halves use mlp_output_norm; attention has a norm of its own": n4(v + f(v)),
        "both halves use attention_output_norm; the MLP has a norm of its own": n2(h + f(h)),
    }


def input_norm_slips(b: Any, x: Any) -> Any:
    """What a slip gives that only a rule with norms before its layers can have."""
    a, f, n1, n2, n3, n4 = parts(b)
    h = x + n2(a(n1(x)))  # the stream after attention
    z = n1(x) + n2(a(n1(x)))
    w = x + n2(a(n3(x)))
    g = x + n3(a(n1(x)))
    return {
        "you add the output to norm(x); the layer reads norm(x), but its output is added to x"
        " itself": b.add_to_stream(n3(z), f(n3(z)), n4),
        "the norms are exchanged: attention reads input_layernorm(x), the MLP"
        " post_attention_layernorm": (w + n4(f(n1(w)))),
        "both layers read input_layernorm(x): the MLP's own norm is post_attention_layernorm": (
            h + n4(f(n1(h)))
        ),
        "both layers read post_attention_layernorm(x), which is the norm before the MLP, in"
        " spite of its name": w + n4(f(n3(w))),
        "post_attention_layernorm stands before the MLP, not behind attention": g + n4(f(g)),
        "the MLP reads the stream without its norm": h + n4(f(h)),
    }


def output_norm_slips(b: Any, x: Any) -> Any:
    """What a slip gives that only a rule with output norms can have."""
    a, f, n1, n2, n3, n4 = parts(b)
    slips = {}
    bare = x + a(n1(x))
    slips["the output norms are missing, which this rule has after each sublayer"] = bare + f(
        n3(bare)
    )
    p = n2(x + a(n1(x)))
    q = x + n4(a(n1(x)))
    slips["this rule takes the norm of the output, x + norm(y); you have norm(x + y)"] = n4(
        p + f(n3(p))
    )
    slips["the two output norms are exchanged"] = q + n2(f(n3(q)))
    slips["both halves use mlp_output_norm; attention has a norm of its own"] = q + n4(f(n3(q)))
    h = x + n2(a(n1(x)))
    slips["both halves use attention_output_norm; the MLP has a norm of its own"] = h + n2(f(n3(h)))
    return slips


def check_multiplier(block_class: Any, rule: str, m: float, **options: Any) -> None:
    ours, b = block_pair(block_class, norm_position=rule, residual_multiplier=m, **options)
    x = 3 * noise(2, 5, 8)
    found = call_block(ours, x)[0]

    def half(x: Any, y: Any, norm: Any, inside: Any, outside: Any = 1.0, stream: Any = 1.0) -> Any:
        return (
            norm(stream * x + inside * y) * outside
            if rule == "post"
            else stream * x + outside * norm(inside * y)
        )

    def wired(first: Any, second: Any) -> Any:
        h = half(x, b.self_attn(b.input_layernorm(x)), b.attention_output_norm, *first)
        return half(h, b.mlp(b.post_attention_layernorm(h)), b.mlp_output_norm, *second)

    right = (m, 1, 1) if rule == "post" else (1, m, 1)
    once = (1, 1, 1)
    on_stream = (1, 1, m)
    slips = {
        "the multiplier is forgotten": wired(once, once),
        "the multiplier is forgotten for attention": wired(once, right),
        "the multiplier is forgotten for the MLP": wired(right, once),
        "the multiplier scales the stream; it belongs to the output": wired(on_stream, on_stream),
        "the multiplier scales the sum; it belongs to the output alone": wired(
            (m, 1, m), (m, 1, m)
        ),
    }
    if rule == "post":
        slips["the multiplier scales the norm of the sum; it belongs to the output, inside"] = (
            wired((1, m, 1), (1, m, 1))
        )
    if rule == "sandwich":
        slips["the multiplier stands inside the output norm, which takes it away again"] = wired(
            (m, 1, 1), (m, 1, 1)
        )
    expect(found, b(x)[0], "the output is not that of the package", slips.items())


def check_arguments(block_class: Any, T: int = 6, **options: Any) -> None:
    ours, real = block_pair(block_class, **options)
    x = noise(2, T, 8)
    turn = RotaryEmbedding(4)(torch.arange(3, 3 + T))
    plain, right = real(x)
    mask = noise(2, 1, T, T, seed=5) > -0.3
    mask |= torch.eye(T, dtype=torch.bool)
    for given in (
        {"position_embeddings": turn},
        {"mask": mask},
        {"position_embeddings": turn, "mask": mask},
    ):
        found, stats = call_block(ours, x, **given)
        name = " and ".join(given)
        expect(
            found,
            real(x, **given)[0],
            f"with {name} the output is not that of the package",
            [(f"with {name} the output is the same as without: hand it on to attention", plain)],
        )
    check_gradients(ours, real, x)
    _, stats = call_block(ours, x)
    check_statistics(stats, right)
    check_pieces(call_block, ours, x, turn, real(x, position_embeddings=turn)[0])


def check_gradients(ours: Any, real: Any, x: Any) -> None:
    """The gradients of x and attention are those of the package."""
    gradients = []
    for block in (ours, real):
        with torch.enable_grad():
            probe = x.clone().requires_grad_()
            y = block(probe)[0]
            assert y.requires_grad, "no gradient passes through the block"
            wanted = probe, block.self_attn.o_proj.weight
            found = torch.autograd.grad(
                (y * noise(*x.shape, seed=7)).sum(), wanted, allow_unused=True
            )
        assert all(gradient is not None for gradient in found), (
            "the output is right, but no gradient reaches x or attention: is something detached?"
        )
        gradients.append(found)
    for name, one, other in zip(("x", "o_proj"), *gradients, strict=True):
        expect(
            one,
            other,
            f"the output is right, but not the gradient of {name}: is something detached?",
        )


def check_statistics(stats: Any, right: Any) -> None:
    """The statistics are handed on, or None."""
    if right is None:
        assert stats is None, (
            f"a block with a plain MLP returns None beside the stream, not a {type(stats).__name__}"
        )
    else:
        assert stats is not None, (
            "the block has experts, but returned None: hand on the statistics of the MoE"
        )
        ok = (
            isinstance(stats, tuple)
            and len(stats) == 2
            and torch.equal(stats[1], right[1])
            and torch.allclose(stats[0], right[0])
        )
        assert ok, "the statistics are not those of the MoE: its second result, as it is"


def check_pieces(call: Any, ours: Any, x: Any, turn: Any, right: Any) -> None:
    """With a cache, in pieces, the output is that of one go."""
    T = x.shape[1]
    cache = ToyCache()
    pieces = []
    end = 0
    for size in (T - 2, 1, 1):
        start = end
        end = end + size
        positions = tuple(part[:, start:end] for part in turn)
        pieces.append(call(ours, x[:, start:end], position_embeddings=positions, cache=cache)[0])
    assert cache.kept, "nothing was written into the cache: hand it on to attention"
    kept = next(iter(cache.kept.values()))[0].shape[2]
    assert kept == T, f"after {T} tokens the cache holds {kept} keys: call attention once only"
    expect(
        torch.cat(pieces, 1),
        right,
        "with a cache, in pieces, the output is not that of one go",
    )


# ------------------------------------------------------------------------------------------- task 3


def check_mended(answers: Any, name: str, m: float, T: int = 5, **options: Any) -> None:
    written(answers, name)
    block = randomise(TransformerBlock(config_of(8, residual_multiplier=m, **options))).eval()
    x = 3 * noise(2, T, 8)
    before = x.clone()
    with forbid(TransformerBlock.forward, TransformerBlock.add_to_stream):
        found = answers[name](block, x)
    assert torch.equal(x, before), (
        "the x of the caller has changed: `x += y` writes into it, `x = x + y` does not"
    )
    expect(
        found,
        block(x)[0],
        "the output is not that of the package",
        mended_slips(block, x, m)[name[-1]].items(),
    )


def mended_slips(block: Any, x: Any, m: float) -> Any:
    """What is left of each bug, and what a wrong repair gives."""
    a, f, n1, _, n3, _ = parts(block)
    h = x + m * a(n1(x))
    z = n1(x) + m * a(n1(x))
    k = x + a(n1(x))
    s = m * x + a(n1(x))
    slips = {
        "a": {
            "nothing has changed: x is overwritten by its norm, so the stream is normalised"
            " twice": (n3(z) + m * f(n3(z))),
            "the second half is still broken: x is overwritten by post_attention_layernorm(x)": (
                n3(h) + m * f(n3(h))
            ),
            "the first half is still broken: x is overwritten by input_layernorm(x)": (
                z + m * f(n3(z))
            ),
            "a norm is gone: the layers read the bare stream": (x + m * a(x)) + m * f(x + m * a(x)),
        },
        "b": {
            "nothing has changed: the MLP reads the stream from before attention": h + m * f(n3(x)),
            "the MLP reads what attention has returned; it must read the stream with that added": (
                h + m * f(n3(m * a(n1(x))))
            ),
            "the MLP must read x + m * gathered, through its own norm": h + m * f(h),
            "the MLP reads x + gathered; the multiplier is missing there": h + m * f(n3(k)),
            "attention's output is added twice": h + m * a(n1(x)) + m * f(n3(h)),
            "attention's output is lost from the sum": x + m * f(n3(h)),
        },
        "c": {
            "nothing has changed: the multiplier scales the stream": m * s + f(n3(s)),
            "the second half is still broken": m * h + f(n3(h)),
            "the first half is still broken": s + m * f(n3(s)),
            "the multiplier scales the sum, the stream too; mind the brackets": (
                m * k + m * f(n3(m * k))
            ),
            "the multiplier scales the sums, the stream too; mind the brackets": (
                m * (m * k + f(n3(m * k)))
            ),
        },
    }
    common = wrong_repairs(block, x, m)
    return {letter: own | common for letter, own in slips.items()}


def wrong_repairs(block: Any, x: Any, m: float) -> Any:
    """What a wrong repair of any of the three gives."""
    a, f, n1, _, n3, _ = parts(block)
    h = x + m * a(n1(x))
    k = x + a(n1(x))
    w = x + m * a(n3(x))
    return {
        "the MLP reads input_layernorm(x); its own norm is post_attention_layernorm": (
            h + m * f(n1(h))
        ),
        "attention reads post_attention_layernorm(x); its own norm is input_layernorm": (
            w + m * f(n3(w))
        ),
        "the norms are exchanged: post_attention_layernorm is the MLP's": w + m * f(n1(w)),
        "the multiplier is gone from attention's output": k + m * f(n3(k)),
        "the multiplier is gone from the MLP's output": h + f(n3(h)),
        "the multiplier is gone: this is right for m = 1 only": k + f(n3(k)),
    }


def check_shows(answers: Any, broken: Any) -> None:
    """Task 3: the experiments that show each of the broken functions."""
    with case("Task 3, shows"), torch.no_grad():
        written(answers, "shows")
        shows = answers["shows"]
        assert isinstance(shows, dict), f"shows is a {type(shows).__name__}, expected a dictionary"
        for name in ("silent", "silent, m = 0.3", "oracle", "oracle, m = 0.3"):
            assert name in shows, f'the key "{name}" is missing'
            try:
                letters = set("".join(shows[name]).replace(",", "").replace(" ", "").lower())
            except TypeError:
                raise AssertionError(
                    f'"{name}": {shows[name]!r} is not letters like "bc"'
                ) from None
            assert letters <= set("abc"), (
                f'"{name}": {shows[name]!r} has other letters than a, b and c'
            )
            block = randomise(
                TransformerBlock(config_of(8, residual_multiplier=0.3 if "m =" in name else 1.0))
            )
            if "silent" in name:
                block.self_attn.o_proj.weight.zero_()
                block.mlp.down_proj.weight.zero_()
            x = 3 * noise(2, 5, 8)
            for letter, function in broken.items():
                seen = not same(function(block, x), block(x)[0])
                said = letter in letters
                difference = (function(block, x) - block(x)[0]).abs().max().item()
                assert said or not seen, (
                    f'"{name}" does show bug ({letter}): the outputs differ by up to'
                    f" {difference:.2g}"
                )
                assert seen or not said, (
                    f'"{name}" does not show bug ({letter}): the outputs are the same'
                )


# ------------------------------------------------------------------------------------------- task 4


def small_model(
    depth: int, C: int = 8, V: int = 11, multiplier: float = 1.0, eps: float = 1e-06
) -> Any:
    """The blocks, the last norm and the head of a pre-norm model with random weights."""
    blocks = [
        TransformerBlock(config_of(C, residual_multiplier=multiplier), layer_index)
        for layer_index in range(depth)
    ]
    norm = RMSNorm(C, eps=eps)
    head = nn.Linear(C, V, bias=False)
    for seed, module in enumerate((norm, head, *blocks)):
        randomise(module, seed).requires_grad_(False)
    return nn.ModuleList(blocks), norm, head


def check_contributions(answer: Any, depth: int, multiplier: float, B: int = 2, T: int = 5) -> None:
    blocks, norm, _ = small_model(depth, multiplier=multiplier)
    x = noise(B, T, 8)
    answers = []
    streams = []
    hooks = [
        layer.register_forward_hook(lambda *call: answers.append(call[2]))
        for b in blocks
        for layer in (b.self_attn, b.mlp)
    ]
    streams.append(x.clone())
    for block in blocks:
        streams.append(block(streams[-1])[0])
    for hook in hooks:
        hook.remove()
    before = x.clone()
    parts = answer(blocks, x)
    assert torch.equal(x, before), (
        "the x of the caller has changed: `x += part` writes into it, `x = x + part` does not"
    )
    check_parts(parts, depth)
    count = len(parts)
    right = [before, *(multiplier * answer for answer in answers)]
    for i, (part, real) in enumerate(zip(parts, right, strict=True)):
        block = (i + 1) // 2
        layer = "attention" if i % 2 else "MLP"
        name = (
            f"part {i} of 0 to {count - 1}, {layer} of block {block}"
            if i
            else f"part 0 of 0 to {count - 1}, what came in"
        )
        slips = part_slips(i, right, streams, blocks, norm, multiplier) if i else []
        with case(name):
            expect(part, real, "this is not what was added to the stream there", slips)
    expect(sum(parts), streams[-1], "the parts do not add up to the last stream")


def check_parts(parts: Any, depth: int) -> None:
    """A list of as many parts as there are writers."""
    assert isinstance(parts, list | tuple), (
        f"contributions returned a {type(parts).__name__}, expected a list of tensors"
    )
    count = 1 + 2 * depth
    assert len(parts) != 2 * depth, (
        f"there are {2 * depth} parts, expected {count}: what came in is a part too"
    )
    assert not depth or len(parts) != 1 + depth, (
        f"there are {1 + depth} parts, expected {count}: attention and MLP separately"
    )
    assert len(parts) == count, f"there are {len(parts)} parts, expected 1 + 2 x {depth} = {count}"


def part_slips(i: int, right: Any, streams: Any, blocks: Any, norm: Any, multiplier: float) -> Any:
    """What each slip gives at part i."""
    block = (i + 1) // 2
    real = right[i]
    before = right[0]
    b = blocks[block - 1]
    h = streams[block - 1]
    slips = [
        (
            ("the multiplier is missing: the part is what was added, not what the layer returned"),
            real / multiplier,
        ),
        ("this is the stream after the layer, not what the layer added", streams[block]),
        ("this is the stream after the layer, not what the layer added", h + real),
        ("attention and MLP are exchanged", right[i + 1 if i % 2 else i - 1]),
        (
            (
                "the last norm is not part of it: the parts add up to the last stream,"
                " before the norm"
            ),
            norm(real),
        ),
    ]
    if i % 2 == 0:
        stale = b.mlp(b.post_attention_layernorm(h))
        bare = b.mlp(h + right[i - 1])
        late = b.mlp(b.post_attention_layernorm(h + right[i - 1] / multiplier))
        slips += [
            ("the MLP reads the stream from before attention", multiplier * stale),
            ("the MLP reads the stream without its norm", multiplier * bare),
            (
                (
                    "the MLP reads a stream to which attention's output was added without"
                    " the multiplier"
                ),
                multiplier * late,
            ),
        ]
    else:
        slips += [("attention reads the stream without its norm", multiplier * b.self_attn(h))]
        slips += [
            (
                ("the layers read what came into the first block, not the stream before them"),
                multiplier * b.self_attn(b.input_layernorm(before)),
            )
        ]
    return slips


def check_shares(
    answer: Any,
    count: int,
    size: float = 1.0,
    eps: float = 1e-06,
    B: int = 2,
    T: int = 5,
    C: int = 8,
    V: int = 11,
) -> None:
    _, norm, head = small_model(0, C, V, eps=eps)
    parts = [size * noise(B, T, C, seed=seed) for seed in range(count)]
    kept = [part.clone() for part in parts]
    found = answer(list(parts), norm, head)
    assert all(torch.equal(part, old) for part, old in zip(parts, kept, strict=True)), (
        "the parts have changed after the call"
    )
    total: Any = sum(kept)
    right, slips = shares_and_slips(kept, norm, head)
    expect(found, right, "the shares are not those of the model", slips)
    expect(found.sum(0), head(norm(total)), "the shares do not add up to the logits")


def shares_and_slips(kept: Any, norm: Any, head: Any) -> Any:
    """The shares of the parts in the logits, and what each slip gives."""
    eps = norm.eps
    count = len(kept)
    total: Any = sum(kept)

    def gain(v: Any) -> Any:
        return (v.double().square().mean(-1, keepdim=True) + eps).rsqrt()

    def logits(scales: Any, w: Any = norm.weight) -> Any:
        return torch.stack(
            [F.linear((w * p * s).float(), head.weight) for p, s in zip(kept, scales, strict=True)]
        )

    one = [gain(total)] * count
    everywhere = torch.stack([p.double() for p in kept]).sum(0).square().mean().add(eps).rsqrt()
    slips = [
        (
            "each part is divided by its own RMS; the norm divides all by that of their sum",
            logits([gain(p) for p in kept]),
        ),
        ("the weight of the norm is missing", logits(one, 1.0)),
        (
            "the epsilon of the norm is missing",
            logits([total.double().square().mean(-1, keepdim=True).rsqrt()] * count),
        ),
        (
            "epsilon is added to the root; it belongs under it",
            logits([1 / (total.square().mean(-1, keepdim=True).sqrt() + eps)] * count),
        ),
        (
            "the norm is missing: the parts go into the head as they are",
            logits([torch.ones(1)] * count, 1.0),
        ),
        ("r is missing: divide by it", logits([torch.ones(1)] * count)),
        ("r is that of the last part; take that of the sum", logits([gain(kept[-1])] * count)),
        (
            "r is one number for the whole batch; it is one for each token",
            logits([everywhere] * count),
        ),
        (
            "a root is missing: divide by the RMS, not by the mean square",
            logits([gain(total) ** 2] * count),
        ),
        (
            "the sum of the squares is divided by nothing: take their mean",
            logits([(total.double().square().sum(-1, keepdim=True) + eps).rsqrt()] * count),
        ),
    ]
    return logits(one), slips


def check_lens(answer: Any, depth: int, multiplier: float, B: int = 2, T: int = 5) -> None:
    blocks, norm, head = small_model(depth, multiplier=multiplier)
    x = noise(B, T, 8)
    streams = [x.clone()]
    for block in blocks:
        streams.append(block(streams[-1])[0])
    found = answer(blocks, norm, head, x)
    assert torch.equal(x, streams[0]), "the x of the caller has changed after the call"
    assert isinstance(found, Tensor), (
        f"lens returned a {type(found).__name__}, expected a tensor: torch.stack makes one"
    )
    assert found.ndim != 4 or len(found) != depth, (
        f"there are {depth} readings, expected {depth + 1}: read before the first block too"
    )
    assert not depth or found.ndim != 4 or len(found) != 2 * depth + 1, (
        f"there are {len(found)} readings, expected {depth + 1}: one for each block"
    )
    expect(
        found,
        torch.stack([head(norm(s)) for s in streams]),
        "the readings are not those of the streams",
        lens_slips(blocks, streams, norm, head),
    )


def lens_slips(blocks: Any, streams: Any, norm: Any, head: Any) -> Any:
    """What each slip gives."""
    slips = [("the last norm is missing", torch.stack([head(s) for s in streams]))]
    if not blocks:
        return slips
    first = [head(norm(streams[0]))]
    changes = [after - before for before, after in pairwise(streams)]
    size = (streams[-1].square().mean(-1, keepdim=True) + norm.eps).sqrt()
    slips += [
        (
            "the last norm is missing from all readings but the first",
            torch.stack(first + [head(s) for s in streams[1:]]),
        ),
        (
            "these are the changes; a lens reads the whole stream",
            torch.stack(first + [head(norm(change)) for change in changes]),
        ),
        (
            "each block read the first stream: pass on what the block before returned",
            torch.stack(first + [head(norm(block(streams[0])[0])) for block in blocks]),
        ),
        (
            "every reading is divided by the size of the last stream; the lens divides by that of"
            " its own",
            torch.stack([head(norm.weight * s / size) for s in streams]),
        ),
        (
            "every reading is that of the last stream",
            torch.stack([head(norm(streams[-1]))] * len(streams)),
        ),
    ]
    for z in (streams[0], norm(streams[0])):  # what the first block reads
        normed = [norm(streams[0])]
        for block in blocks:
            z = norm(block(z)[0])
            normed.append(z)
        read_on = "the norm is for the reading only; the next block reads the stream itself"
        slips.append((read_on, torch.stack([head(s) for s in normed])))
    return slips


# ------------------------------------------------------------------------------------------- task 5


def deep_stack(
    depth: int, rule: str = "pre", gain: float = 1.0, use_glu: Any = True, C: int = 32
) -> Any:
    """Fresh blocks whose matrices keep the size of a vector (gain 1), or multiply it by `gain`."""
    config = config_of(C, intermediate_size=2 * C, norm_position=rule, use_glu=use_glu)
    blocks = nn.ModuleList(TransformerBlock(config, layer_index) for layer_index in range(depth))
    for seed, weight in enumerate(blocks.parameters()):
        if weight.ndim == 2:
            weight.data = noise(*weight.shape, seed=seed) * gain * weight.shape[1] ** -0.5
    return blocks


def check_rms(answer: Any, depth: int, rule: str, B: int = 2, T: int = 5) -> None:
    blocks = deep_stack(depth, rule, C=16)
    x = noise(B, T, 16) * (1 + torch.arange(B * T).view(B, T, 1))  # tokens of different sizes
    streams = [x.clone()]
    with torch.no_grad():
        for block in blocks:
            streams.append(block(streams[-1])[0])
    found = answer(blocks, x)
    assert torch.equal(x, streams[0]), "stream_rms: the x of the caller has changed after the call"
    assert isinstance(found, list | tuple), (
        f"stream_rms returned a {type(found).__name__}, expected a list of {depth + 1} floats"
    )
    assert len(found) != depth, (
        f"stream_rms returned {depth} numbers, expected {depth + 1}: begin before the first block"
    )
    assert len(found) == depth + 1, (
        f"stream_rms returned {len(found)} numbers, expected {depth + 1}"
    )
    numbers = torch.tensor([expect_plain_number(one, "a number of stream_rms") for one in found])
    expect(
        numbers.double(),
        torch.tensor([s.square().mean().sqrt().item() for s in streams]).double(),
        "stream_rms: the RMS is something else",
        rms_slips(streams),
    )


def rms_slips(streams: Any) -> Any:
    """Other means than the right one."""

    def measure(function: Any) -> Any:
        return torch.tensor([function(stream).item() for stream in streams]).double()

    return [
        (
            "stream_rms: this is the mean square; the root is missing",
            measure(lambda s: s.square().mean()),
        ),
        (
            "stream_rms: this is the mean of the tokens' RMS; take one mean of all squares",
            measure(lambda s: s.square().mean(-1).sqrt().mean()),
        ),
        (
            "stream_rms: this is the mean over the texts of their RMS",
            measure(lambda s: s.square().mean((1, 2)).sqrt().mean()),
        ),
        (
            "stream_rms: this is the RMS of the first text only",
            measure(lambda s: s[0].square().mean().sqrt()),
        ),
        (
            "stream_rms: this is the RMS of the last token only",
            measure(lambda s: s[:, -1].square().mean().sqrt()),
        ),
        ("stream_rms: this is the standard deviation", measure(lambda s: s.std())),
        (
            "stream_rms: this is the norm, the root of the *sum* of squares",
            measure(lambda s: s.norm()),
        ),
    ]


def check_exponent(answer: Any, xs: Any, ys: Any) -> None:
    given = list(xs), list(ys)
    name = f"exponent({xs}, {[round(y, 3) for y in ys]})"
    found = expect_number(answer(*given), name)
    assert given == (xs, ys), f"{name}: the lists have changed after the call"
    x64 = torch.tensor(xs).double()
    y64 = torch.tensor(ys).double()
    u = x64.log()
    w = y64.log()

    def slope(a: Any, b: Any) -> Any:
        return (((a - a.mean()) * (b - b.mean())).sum() / (a - a.mean()).square().sum()).item()

    right = slope(u, w)
    slips = {
        "no logarithms were taken": slope(x64, y64),
        "only x went through the logarithm": slope(u, y64),
        "only y went through the logarithm": slope(x64, w),
        "this uses the first and the last point only": ((w[-1] - w[0]) / (u[-1] - u[0])).item(),
        "this is the slope of a line through (0, 0); take the means off first": (
            ((u * w).sum() / (u * u).sum()).item()
        ),
        "x and y are exchanged": slope(w, u) if w.std() > 1e-9 else math.inf,
    }
    for slip, wrong in slips.items():
        assert abs(wrong - right) < 1e-4 or abs(found - wrong) > 1e-4, (
            f"{name} is {found:.4f}: {slip}"
        )
    assert abs(found - right) < 1e-4, f"{name} is {found:.4f}, expected {right:.4f}"


def check_scale(answer: Any, depth: int, v: Any, limit: float) -> None:
    name = f"multiplier_for({depth}, {v}, {limit})"
    found = expect_number(answer(depth, v, limit), name)
    right = math.sqrt((limit**2 - 1) / (depth * v))
    slips = {
        "the multiplier scales the output, its square the variance: a root is missing": right**2,
        "v is what a whole block adds, so there are `depth` of it, not 2 x depth": (
            right / math.sqrt(2)
        ),
        "the limit is for the RMS, the root of the variance: square it": math.sqrt(
            (limit - 1) / (depth * v)
        ),
        "the stream has the variance 1 before the first block: it counts too": (
            limit / math.sqrt(depth * v)
        ),
        "take the root of depth and v too": math.sqrt(limit**2 - 1) / (depth * v),
        "multipliers above 1 are allowed: it is the largest that keeps the limit": 1.0,
        "this is the factor of GPT-2, which knows no limit": (2 * depth) ** -0.5,
    }
    for slip, wrong in slips.items():
        assert abs(wrong / right - 1) < 1e-5 or abs(found / wrong - 1) > 1e-5, (
            f"{name} is {found:.4f}: {slip}"
        )
    grown = math.sqrt(1 + depth * v * found**2)
    assert abs(found / right - 1) < 1e-5, (
        f"{name} is {found:.4f}, with which the RMS becomes {grown:.4f}"
    )


def check_refusal(answer: Any, depth: int, v: Any, limit: float) -> None:
    try:
        found = answer(depth, v, limit)
    except ValueError as error:
        assert "math domain" not in str(error), (
            "the ValueError is that of the root; test the limit, and say what is wrong with it"
        )
        assert str(error), "the ValueError has no words: say what is wrong with the limit"
    else:
        raise AssertionError(
            f"multiplier_for({depth}, {v}, {limit}) returned {found!r}; a limit that is not above 1"
            " needs a ValueError"
        )


def check_growth_and_rise(answers: Any) -> None:
    """Task 5, third part."""
    with case("Task 5, growth and rise"):
        written(answers, "growth", "rise")
        growth = answers["growth"]
        rise = answers["rise"]
        for name, typed, keys in (
            ("growth", growth, ("pre", "sandwich", "post")),
            ("rise", rise, ("gated, gain 1", "plain, gain 1", "gated, gain 0.25")),
        ):
            assert isinstance(typed, dict), (
                f"{name} is a {type(typed).__name__}, expected a dictionary"
            )
            missing = [key for key in keys if key not in typed]
            assert not missing, f'{name}: the key "{missing[0] if missing else ""}" is missing'
        check_growth(growth)
        check_rise(rise)


def check_growth(growth: Any) -> None:
    """The exponents, by measurement."""
    for rule in ("pre", "sandwich", "post"):
        said = expect_number(growth[rule], f'growth["{rule}"]')
        assert said in (
            0,
            0.25,
            0.5,
            1,
        ), f'growth["{rule}"] is {said}: choose from 0, 0.25, 0.5 and 1'
        y = noise(2, 8, 32)
        sizes = []
        with torch.no_grad():
            for block in deep_stack(20, rule):
                y = block(y)[0]
                sizes.append(y.square().mean().sqrt().item())
        measured = math.log(sizes[19] / sizes[4]) / math.log(4)
        assert said != 1 or rule == "post", (
            f'growth["{rule}"]: the *variance* grows with exponent 1; the RMS is its root'
        )
        assert abs(said - measured) < 0.125, (
            f'growth["{rule}"]: you say {said}, but from 5 to 20 blocks the RMS goes from'
            f" {sizes[4]:.2f} to {sizes[19]:.2f}"
        )


def check_rise(rise: Any) -> None:
    """The gradient over 24 blocks, by measurement."""
    for name in ("gated, gain 1", "plain, gain 1", "gated, gain 0.25"):
        said = rise[name]
        assert said in ("steep", "mild"), f'rise["{name}"] is {said!r}: choose "steep" or "mild"'
        start = noise(2, 8, 32).requires_grad_()
        y = start
        deep = deep_stack(24, "post", use_glu=False) if "plain" in name else deep_stack(24, "post")
        if "0.25" in name:  # the last of the three
            for weight in deep.parameters():
                weight.data *= 0.25 if weight.ndim == 2 else 1
        for block in deep:
            y = block(y)[0]
        wish = noise(2, 8, 32, seed=3)
        factor = (torch.autograd.grad((y * wish).sum(), start)[0].norm() / wish.norm()).item()
        measured = "steep" if factor > 5 else "mild"
        assert said == measured, (
            f'rise["{name}"]: you say "{said}", but over 24 blocks the gradient is multiplied by'
            f" {factor:.2g}"
        )


# ------------------------------------------------------------------------------------------- task 6


def parallel_pair(answers: Any, C: int = 8, layer_index: int = 1, **options: Any) -> Any:
    """The student's block, and a TransformerBlock with the same weights that serves as a box of
    parts.
    """
    written(answers, "ParallelBlock")
    own = answers["ParallelBlock"]
    assert isinstance(own, type) and issubclass(own, nn.Module), (
        "ParallelBlock is not a class of modules"
    )
    block: Any = own
    ours, parts = (
        kind(config_of(C, **options), layer_index).eval() for kind in (block, TransformerBlock)
    )
    assert ours.self_attn.layer_index == layer_index, (
        f"block {layer_index} writes into the cache as block {ours.self_attn.layer_index}: hand"
        " layer_index on to super().__init__"
    )
    randomise(parts)
    names = set(ours.state_dict())
    expected = {name for name in parts.state_dict() if "post_attention" not in name}
    left = [name for name in sorted(names) if "post_attention" in name]
    assert not left, (
        f"{left[0] if left else ''} is still a parameter; no one uses it, and the parallel block"
        " has one norm only"
    )
    assert names == expected, (
        f"the parameters are {sorted(names)}, expected {sorted(expected)}: keep the other parts and"
        " their names"
    )
    ours.load_state_dict(
        {name: weight for name, weight in parts.state_dict().items() if name in expected}
    )
    return ours, parts


def check_parallel(answers: Any, m: float, T: int = 5, **options: Any) -> None:
    ours, b = parallel_pair(answers, residual_multiplier=m, **options)
    x = 3 * noise(2, T, 8)
    a = b.self_attn
    f = b.mlp
    h = b.input_layernorm(x)
    after = x + m * a(h)
    expect(
        called(ours, x)[0],
        x + m * (a(h) + f(h)),
        "the output is not that of the formula",
        [
            (
                "the MLP reads the stream after attention; here it reads what attention reads",
                after + m * f(b.input_layernorm(after)),
            ),
            ("this is the output of the usual block: its forward has to be replaced", b(x)[0]),
            ("the MLP reads x without the norm", x + m * (a(h) + f(x))),
            ("attention reads x without the norm", x + m * (a(x) + f(h))),
            ("both layers read x without the norm", x + m * (a(x) + f(x))),
            ("the MLP reads attention's output", x + m * (a(h) + f(a(h)))),
            ("the MLP reads attention's output", x + m * f(a(h))),
            ("the multiplier is forgotten", x + a(h) + f(h)),
            ("the multiplier is forgotten for the MLP: mind the brackets", x + m * a(h) + f(h)),
            ("the multiplier is forgotten for attention: mind the brackets", x + a(h) + m * f(h)),
            ("the multiplier scales the stream", m * (x + a(h) + f(h))),
            ("the stream is missing from the sum", m * (a(h) + f(h))),
            (
                "the outputs are added to the normalised stream; add them to x",
                h + m * (a(h) + f(h)),
            ),
            ("the stream is added twice", 2 * x + m * (a(h) + f(h))),
        ],
    )


def check_promises(answers: Any, T: int = 6, m: float = 1.0, **options: Any) -> None:
    """Cached = full, causal, arguments handed on, statistics, gradients."""
    ours, b = parallel_pair(answers, residual_multiplier=m, **options)
    x = noise(2, T, 8)
    turn = RotaryEmbedding(4)(torch.arange(T))
    mask = noise(T, T, seed=4) > -0.3
    mask |= torch.eye(T, dtype=torch.bool)
    h = b.input_layernorm(x)
    z, right = b.mlp(h) if isinstance(b.mlp, MoE) else (b.mlp(h), None)
    for given in ({"position_embeddings": turn}, {"mask": mask}):
        name = next(iter(given))
        bare = x + m * (b.self_attn(h) + z)
        expect(
            called(ours, x, **given)[0],
            x + m * (b.self_attn(h, **given) + z),
            f"with {name} the output is not that of the formula",
            [(f"with {name} the output is the same as without: hand it on to attention", bare)],
        )
    stats = called(ours, x)[1]
    if right is None:
        assert stats is None, (
            f"a block with a plain MLP returns None beside the stream, not a {type(stats).__name__}"
        )
    else:
        ok = isinstance(stats, tuple) and len(stats) == 2 and torch.equal(stats[1], right[1])
        assert ok, (
            "the statistics of the experts are not handed on, or not those of the MoE for norm(x)"
        )
    whole = called(ours, x, position_embeddings=turn)[0]
    check_pieces(called, ours, x, turn, whole)
    changed = x.clone()
    changed[:, -1] += 1
    assert same(called(ours, changed)[0][:, :-1], called(ours, x)[0][:, :-1]), (
        "an earlier token has seen the last one"
    )
    with torch.enable_grad():
        y, stats = ours(x)
        loss = (y * noise(*y.shape, seed=7)).sum() + (0 if stats is None else stats[0])
        loss.backward()
    unused = [name for name, parameter in ours.named_parameters() if parameter.grad is None]
    assert not unused, (
        f"no gradient reaches {unused[0] if unused else ''}: it is left over, or the graph is cut"
    )


def check_position(answers: Any, rule: str) -> None:
    """A position that the formula doesn't have is refused by name."""
    try:
        parallel_pair(answers, norm_position=rule)
    except ValueError as error:
        assert rule in str(error), (
            f"the ValueError for norm_position={rule!r} does not name the position: {error}"
        )
    else:
        raise AssertionError(f"norm_position={rule!r} needs a ValueError: the formula is pre-norm")


def check_joined(
    answer: Any, C: int = 8, F: int = 12, dtype: Any = torch.float32, **options: Any
) -> None:
    block = randomise(TransformerBlock(config_of(C, intermediate_size=F, **options))).to(dtype)
    attention = block.self_attn
    mlp = block.mlp
    five = {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
    }
    old = {name: weight.clone() for name, weight in block.state_dict().items()}
    with torch.enable_grad():
        one = answer(attention, mlp)
    assert isinstance(one, nn.Linear), (
        f"joined returned a {type(one).__name__}, expected one nn.Linear"
    )
    rows = sum(layer.out_features for layer in five.values())
    assert one.weight.shape == (
        rows,
        C,
    ), f"the weight is {tuple(one.weight.shape)}, expected {(rows, C)}: the five below one another"
    assert one.weight.dtype == dtype, (
        f"the weight is {one.weight.dtype}, expected {dtype}, that of the five"
    )
    assert all(parameter.requires_grad for parameter in one.parameters()), (
        "the new layer cannot be trained: a weight is frozen"
    )
    x = noise(2, 3, C).to(dtype)
    y = one(x)
    start = 0
    for name, layer in five.items():
        check_piece(name, five, one, y, x, start)
        start += layer.out_features
    for parameter in one.parameters():
        parameter.data.add_(1)
    changed = [
        name for name, weight in block.state_dict().items() if not torch.equal(weight, old[name])
    ]
    assert not changed, (
        f"{changed[0] if changed else ''} has changed with the new layer: copy the weights"
    )


def check_piece(name: str, five: Any, one: Any, y: Any, x: Any, start: int) -> None:
    """The numbers of one of the five layers."""
    layer = five[name]
    piece = y[..., start : start + layer.out_features]
    slips = [
        (
            f"at the place of {name} stands {other}: the order is q, k, v, gate, up",
            five[other](x),
        )
        for other in five
        if other != name and five[other].out_features == layer.out_features
    ]
    if layer.bias is not None:
        slips += [(f"the bias of {name} is missing", layer(x) - layer.bias)]
    elif one.bias is not None:
        slips += [
            (
                (
                    f"{name} has no bias, but something is added to it: a new nn.Linear begins"
                    " with a random bias"
                ),
                piece,
            )
        ]
        slips = (
            slips[:-1]
            if not same(piece - one.bias[start : start + layer.out_features], layer(x))
            else slips
        )
    expect(piece, layer(x), f"the outputs for {name} are not those of {name}_proj", slips)


# ------------------------------------------------------------------------------------------- task 7


def check_heads(kind: Any, C: int = 64, H: int = 4) -> None:
    """What a None means, also in a copy, and that a choice survives."""
    shape = kind(hidden_size=C, num_heads=H)
    for name, right in (("kv_heads", H), ("width", C // H)):
        found = getattr(shape, name)
        assert found == right, f"{name} is {found}, expected {right} for C = {C} and H = {H}"
        assert isinstance(found, int), f"{name} is {found!r}: a size is a whole number, so use //"
    copy = replace(shape, num_heads=2 * H)
    assert copy.width == C // (2 * H), (
        f"a copy with {2 * H} heads has heads of {copy.width}, the number of before: keep the None,"
        " and work the rule out when it is asked"
    )
    assert copy.kv_heads == 2 * H, (
        f"a copy with {2 * H} heads has {copy.kv_heads} key/value heads, the number of before: keep"
        " the None"
    )
    chosen = replace(kind(hidden_size=C, num_heads=H, num_kv_heads=1, head_dim=32), num_heads=2 * H)
    assert (chosen.kv_heads, chosen.width) == (1, 32), (
        "num_kv_heads=1 and head_dim=32 were chosen, and a choice must survive in a copy"
    )
    try:
        kind(C, H)
    except TypeError:
        pass
    else:
        raise AssertionError(f"Heads({C}, {H}) is accepted: fields are given by keyword, kw_only")
    try:
        shape.num_heads = 1
    except AttributeError:  # a FrozenInstanceError is one
        return
    raise AssertionError("num_heads can be overwritten: the dataclass isn't frozen")


def check_refused(kind: Any, names: str, **values: Any) -> None:
    """That these values are refused, in words that name the value at fault."""
    given = ", ".join(f"{name}={value}" for name, value in values.items())
    try:
        kind(**values)
    except ValueError as error:
        assert names in str(error), f"{given}: the message {str(error)!r} doesn't hold {names!r}"
        return
    except AssertionError:
        raise AssertionError(f"{given}: raise a ValueError, not an AssertionError") from None
    raise AssertionError(f"{given} is accepted; expected a ValueError that names {names}")


def check_accepted(kind: Any, **values: Any) -> None:
    """That these values are not refused."""
    given = ", ".join(f"{name}={value}" for name, value in values.items())
    try:
        kind(**values)
    except ValueError as error:
        raise AssertionError(f"{given} is a sound shape, but it is refused: {error}") from None


def check_count(count: Any, **options: Any) -> None:
    """The number of parameters of a Llama-like model, without building it."""
    config = ModelConfig(**options)
    C = config.hidden_size
    L = config.num_layers
    H = config.num_heads
    K = config.num_kv_heads or H
    D = config.resolved_head_dim
    F_ = config.resolved_intermediate_size
    table = config.resolved_vocab_size * C
    tables = table if config.tie_word_embeddings else 2 * table
    right = L * (2 * C * D * (H + K) + 3 * C * F_ + 2 * C) + tables + C
    with forbid(DecoderModel, TransformerBlock, estimate):
        found = expect_number(count(config), "count(config)")
    slips = {
        "each query head has its own key and value: there are K of them": 2 * C * D * (H - K) * L,
        "a gated MLP has three matrices": -C * F_ * L,
        "the norms of the blocks are missing": -2 * C * L,
        "each block has two norms, and one of them is missing": -C * L,
        "the last norm is missing": -C,
        "the output layer is counted, but it shares the table": table * (tables == table),
        "the output layer is missing: without tying it has a table of its own": table - tables,
        "q_proj and o_proj have C x (H * D) numbers each, not C x C": 2 * C * L * (C - H * D),
        "q_proj and o_proj are C x (H * D), and that is not always C x C": (
            2 * C * L * (C + (C // H) * K - D * (H + K))
        ),
    }
    for words, difference in slips.items():
        assert not difference or found != right + difference, words
    assert found == right, f"count gives {found:,.0f} for {options}, expected {right:,}"

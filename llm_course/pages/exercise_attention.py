"""The visible checks of exercise 05, attention: each says what is wrong with an answer."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from llm_course.model.attention import MultiHeadAttention, scaled_dot_product_attention
from llm_course.model.attention_weights import attention_weights
from llm_course.model.masks import causal_mask
from llm_course.pages.checking import (
    Answers,
    case,
    expect,
    expect_kind,
    expect_number,
    forbid,
    same,
    written,
)

Attend = Callable[..., Tensor]
Bytes = Callable[..., int]
READY_MADE = (
    F.scaled_dot_product_attention,
    scaled_dot_product_attention,
    attention_weights,
    MultiHeadAttention.forward,
)


class Watch(TorchDispatchMode):
    """Count the operations that run inside, and the numbers in the largest tensor that one of them
    allocates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(result, Tensor):
            used = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            if result.untyped_storage().data_ptr() not in used:  # a view allocates nothing
                self.largest = max(
                    self.largest, result.untyped_storage().nbytes() // result.element_size()
                )
        return result


def kept_tensors(thing: Any) -> list[Tensor]:
    """The tensors inside an object: in its attributes, dictionaries, lists and tuples."""
    if isinstance(thing, Tensor):
        return [thing]
    parts: list[Any] = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    if isinstance(thing, dict):
        parts += thing.values()
    elif isinstance(thing, list | tuple | set | deque):
        parts += thing
    return [tensor for part in parts for tensor in kept_tensors(part)]


def kept_numbers(thing: Any) -> int:
    """How many numbers the tensors inside an object hold."""
    return sum(tensor.numel() for tensor in kept_tensors(thing))


def kept_memory(thing: Any) -> int:
    """How many numbers the memory behind these tensors has room for: a slice keeps all of the
    tensor that it was cut from.
    """
    tensors = kept_tensors(thing)
    rooms = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size()
        for t in tensors
        if t.numel()
    }
    return sum(rooms.values())


# -------------------------------------------------------------------------------- task 1


def check_by_hand(answers: Answers) -> None:
    """Task 1: weights and outputs of three tokens."""
    with case("Task 1"):
        weights, outputs = written(answers, "weights", "outputs")
        assert len({len(row) for row in weights}) == 1, (
            f"weights has rows of {[len(row) for row in weights]} numbers; each row needs three"
            " numbers: type 0 where the query may not look"
        )
        assert len({len(row) for row in outputs}) == 1, (
            f"outputs has rows of {[len(row) for row in outputs]} numbers; each row needs two"
            " numbers"
        )
        numbers = torch.tensor(weights, dtype=torch.float64)
        mixed = torch.tensor(outputs, dtype=torch.float64)
        _check_table(numbers, mixed)
        _check_sharpness((numbers[1, 1] / numbers[1, 0]).item())
        _check_against_pytorch(numbers, mixed)


def _check_table(numbers: Tensor, mixed: Tensor) -> None:
    """Shapes, no weight on the future, and rows that sum to 1."""
    assert numbers.shape == (3, 3), (
        f"weights has the shape {tuple(numbers.shape)}: three queries, and three keys for each,"
        " make"
        " (3, 3)"
    )
    assert mixed.shape == (3, 2), (
        f"outputs has the shape {tuple(mixed.shape)}: three tokens, and two numbers for each, make"
        " (3, 2)"
    )
    for t in range(3):
        assert (numbers[t, t + 1 :] == 0).all(), (
            f"query {t} reads a token that comes after it; the causal mask makes those weights 0"
        )
        total = numbers[t].sum().item()
        assert abs(total - 1) < 1e-3 or not 0.95 < total < 1.05, (
            f"row {t} of weights sums to {total:.3f}: did you round? Type fractions such as 5 / 8"
        )
        assert abs(total - 1) < 1e-3, (
            f"the weights of query {t} sum to {total:.3f}, not to 1: mask first, then share among"
            " the visible keys only"
        )


def _check_sharpness(ratio: float) -> None:
    """The ratio of the two weights of query 1, which should be 3."""
    assert abs(ratio - 9) > 0.01, (
        "query 1 weighs key 1 nine times as much as key 0: did you forget to divide the scores by"
        " the root of D?"
    )
    assert abs(ratio - math.sqrt(3)) > 0.01, (
        "query 1: you divided the scores by D; the scale is 1 over the root of D"
    )
    assert abs(ratio - 1) > 0.01, (
        "query 1 spreads evenly, but its two scores differ: multiply its query with each key,"
        " number by number"
    )
    assert ratio > 1, "query 1: key 1 has the larger score, so it must get the larger weight"


def _check_against_pytorch(numbers: Tensor, mixed: Tensor) -> None:
    """PyTorch's weights for the same queries and keys."""
    q = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.float64)
    k = torch.tensor(
        [
            [0, math.log(4), 0, 0],
            [math.log(9), 0, math.log(4), 0],
            [math.log(4), math.log(25), math.log(9), 0],
        ],
        dtype=torch.float64,
    )
    v = torch.tensor([[8, 0], [0, 8], [8, 8]], dtype=torch.float64)
    seen = F.scaled_dot_product_attention(
        q[None], k[None], torch.eye(3, dtype=torch.float64)[None], is_causal=True
    )[0]
    for t in range(3):
        assert torch.allclose(numbers[t], seen[t], atol=1e-3), (
            f"PyTorch computes other weights for query {t}: check its scores, take their"
            " exponentials, then divide by their sum"
        )
    for t in range(3):
        assert torch.allclose(mixed[t], numbers[t] @ v, atol=1e-2), (
            f"your weights of query {t} are right, but output {t} is not the sum of the values"
            " times these weights"
        )


# -------------------------------------------------------------------------------- task 2


def check_prefix_mask(prefix_mask: Callable[[int, int, int], Tensor]) -> None:
    """Task 2: a square mask, a new token, and new tokens inside and behind the prefix."""
    with case("Task 2, prefix_mask"):
        _check_mask_type(prefix_mask)
        with forbid(causal_mask):
            plain = prefix_mask(4, 4, 0)
            square = prefix_mask(4, 4, 2)
            one = prefix_mask(1, 6, 2)
            wide = prefix_mask(2, 6, 5)
        _check_causal(plain)
        for t in range(4):
            for s in range(4):
                seen = bool(square[t, s])
                assert seen or s >= 2, (
                    f"a prefix of 2: row {t} can't see token {s}, which belongs to the prefix and"
                    " is visible to everybody"
                )
                assert not seen or s <= max(t, 1), (
                    f"a prefix of 2: row {t} sees token {s}, which comes later: only tokens 0 and 1"
                    " belong to the prefix"
                )
                assert seen or s > t, (
                    f"a prefix of 2: row {t} can't see token {s}, which comes no later: the prefix"
                    " only adds pairs, it hides none"
                )
        assert one.all(), (
            "one new token and 6 keys: it is the last of the six, so it reads all 6, but here"
            f" {int(one.sum())}. The first query isn't aligned with the first key"
        )
        counts = wide.sum(1).tolist()
        assert counts == [5, 6], (
            "two new tokens, 6 keys and a prefix of 5: the queries have the positions 4 and 5 and"
            f" read 5 and 6 keys, but here {counts}: which position does query t have?"
        )


def _check_mask_type(prefix_mask: Callable[[int, int, int], Tensor]) -> None:
    for T, S in ((4, 4), (1, 6), (2, 6)):
        with forbid(causal_mask):
            mask = prefix_mask(T, S, 2)
        name = f"prefix_mask({T}, {S}, 2)"
        assert isinstance(mask, Tensor), (
            f"{name} is a {type(mask).__name__}, expected a tensor: does the function return its"
            " result?"
        )
        assert mask.dtype == torch.bool, (
            f"{name} has the dtype {mask.dtype}: a mask answers yes or no, so compare positions, or"
            " end with .bool()"
        )
        assert mask.shape == (T, S), (
            f"{name} has the shape {tuple(mask.shape)}, expected {(T, S)}: a row for each query and"
            " a column for each key"
        )


def _check_causal(plain: Tensor) -> None:
    """Without a prefix, the mask is the causal one."""
    for t in range(4):
        for s in range(4):
            seen = bool(plain[t, s])
            assert not seen or s <= t, (
                f"no prefix: row {t} sees token {s}, which comes later: is the mask transposed, or"
                " True where it hides, or one step off?"
            )
            assert seen or s != t, (
                f"no prefix: row {t} can't see itself: `<` in place of `<=`, or True where it"
                " hides?"
            )
            assert seen or s > t, (
                f"no prefix: row {t} can't see token {s}: a query reads itself and every token"
                " before it"
            )


def check_trap(answers: Answers) -> None:
    """Task 2: how many keys new tokens read, with our mask and with PyTorch's flag."""
    with case("Task 2, the trap"):
        names = ("reads_with_our_mask", "reads_with_pytorch_flag")
        reads_with_our_mask, reads_with_pytorch_flag = written(answers, *names)
        for name, reads in (
            ("reads_with_our_mask", reads_with_our_mask),
            ("reads_with_pytorch_flag", reads_with_pytorch_flag),
        ):
            assert hasattr(reads, "__len__") and len(reads) == 3, (
                f"{name} is {reads}: type a list of three numbers, one for each query"
            )
        # with these values the output is the weights
        q = torch.zeros(1, 3, 4)
        k = torch.zeros(1, 7, 4)
        v = torch.eye(7)[None]
        ours = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(3, 7))[0]
        flag = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
        assert list(reads_with_our_mask) == (ours > 0).sum(1).tolist(), (
            "reads_with_our_mask: which positions do the three queries have? Count the keys up to"
            " there"
        )
        assert list(reads_with_pytorch_flag) == (flag > 0).sum(1).tolist(), (
            "reads_with_pytorch_flag: this flag puts the first query on the first key; what can it"
            " read"
            " there?"
        )


# -------------------------------------------------------------------------------- task 3


def inputs(
    B: int, H: int, K: int, T: int, S: int, D: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries (B, H, T, D), keys and values (B, K, S, D)."""
    torch.manual_seed(0)
    return (
        torch.randn(B, H, T, D, dtype=dtype),
        torch.randn(B, K, S, D, dtype=dtype),
        torch.randn(B, K, S, D, dtype=dtype),
    )


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def alone(grouped_query_attention: Attend) -> Attend:
    """The function, without help from the ready-made ones and without changes to its inputs."""

    def yours(q: Tensor, k: Tensor, v: Tensor, **mask: Tensor) -> Tensor:
        before = q.clone(), k.clone(), v.clone()
        with forbid(*READY_MADE):
            y = grouped_query_attention(q, k, v, **mask)
        for name, was, now in zip("qkv", before, (q, k, v), strict=True):
            assert torch.equal(was, now), (
                f"your code changed its input {name}: write {name} * s, not {name} *= s"
            )
        return y

    return yours


def check_grouped(grouped_query_attention: Attend) -> None:
    """Task 3: numbers, shared heads, the mask, no loop, and no copies."""
    yours = alone(grouped_query_attention)
    _check_heads(yours)
    _check_mask_with_batch(yours)
    _check_views(yours)
    _check_large_scores(yours)
    _check_no_loop(yours)
    _check_no_copy(yours)


def _check_heads(yours: Attend) -> None:
    """Which head reads which, and with which mask."""
    with case("Task 3, one head"):
        q, k, v = inputs(2, 1, 1, 5, 5, 6)
        expect(
            yours(q, k, v),
            oracle(q, k, v),
            "even one head differs from PyTorch: is the scale 1 over the root of D, and is the"
            " softmax"
            " over the keys?",
        )
    with case("Task 3, as many key/value heads as query heads"):
        q, k, v = inputs(2, 4, 4, 5, 5, 8)
        expect(
            yours(q, k, v),
            oracle(q, k, v),
            "head h must read key/value head h: look at the order in your reshapes",
        )
    with case("Task 3, H = 6 and K = 2"):
        q, k, v = inputs(1, 6, 2, 3, 5, 8)
        # the values of key/value head i are all i
        marked = torch.arange(2.0)[None, :, None, None].expand(1, 2, 5, 8)
        reads = yours(q, k, marked)
        assert reads.shape == q.shape, (
            f"the shape is {tuple(reads.shape)}, expected {tuple(q.shape)}"
        )
        heads = [round(x, 2) for x in reads[0, :, 0, 0].tolist()]
        assert heads == [0, 0, 0, 1, 1, 1], (
            "query heads 0 to 5 must read the key/value heads [0, 0, 0, 1, 1, 1], but they read"
            f" {heads}: neighbours share"
        )
        expect(
            yours(q, k, v),
            oracle(q, k, v),
            "the values come from the right heads, so look at the keys: are the queries folded in"
            " the same order, and is the scale still 1 over the root of D?",
        )
    with case("Task 3, with a causal mask"):
        q, k, v = inputs(2, 4, 2, 3, 5, 8)
        mask = causal_mask(3, 5)
        expect(
            yours(q, k, v, mask=mask),
            oracle(q, k, v, mask),
            'give the scores the shape (B, H, T, S) before you mask: is True "may attend", and'
            " hidden -inf?",
        )


def _check_mask_with_batch(yours: Attend) -> None:
    """Each text of the batch has its own mask."""
    with case("Task 3, a mask (B, 1, T, S)"):
        q, k, v = inputs(2, 4, 2, 3, 5, 8)
        mask = torch.stack((causal_mask(3, 5), torch.arange(5).expand(3, 5) > 0))[:, None]
        y = yours(q, k, v, mask=mask)
        message = (
            "mask scores of the shape (B, H, T, S), so that a mask of any such shape broadcasts"
        )
        expect_kind(y, q)
        assert same(y[:1], oracle(q, k, v, mask)[:1]), f"text 0 is wrong: {message}"
        assert same(y, oracle(q, k, v, mask)), (
            f"text 0 is right, but text 1, which has another mask, is wrong: {message}"
        )


def _check_views(yours: Attend) -> None:
    """Queries, keys and values as projections give them, with heads and positions transposed."""
    with case("Task 3, inputs that are transposed views"):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(2, 4, 2, 3, 5, 8))
        try:
            y = yours(q, k, v)
        except RuntimeError as error:
            assert "view" not in str(error), (
                "q, k and v are transposed views, and .view needs numbers that lie side by side in"
                " memory: use .reshape, which copies where it must"
            )
            raise
        expect(y, oracle(q, k, v), "a view that is not contiguous gives other numbers")


def _check_large_scores(yours: Attend) -> None:
    """Scores of -500 to -100: neither an overflow nor a hidden score that is too large."""
    with case("Task 3, large scores"):
        q, k, v = inputs(2, 4, 2, 5, 5, 8)
        mask = causal_mask(5)
        # every score is far below zero
        q, k = 24 * q.abs(), -24 * k.abs()
        other = v.clone()
        other[:, :, -1] += 1  # only the last query may see this
        first = yours(q, k, v, mask=mask)
        second = yours(q, k, other, mask=mask)
        assert not first.isnan().any(), (
            "with large scores some numbers are NaN: a softmax by hand must subtract each row's"
            " maximum before the exponential"
        )
        assert torch.equal(first[:, :, :-1], second[:, :, :-1]), (
            "with large scores a query reads the future: a hidden score must be -inf, not only a"
            " large negative number"
        )
        assert torch.allclose(first, oracle(q, k, v, mask), atol=1e-2), (
            "with large scores the result differs from PyTorch's: are scores or weights cut off"
            " somewhere?"
        )


def _check_no_loop(yours: Attend) -> None:
    """More heads, more groups and larger groups run the same operations."""
    with case("Task 3, no loop"), torch.no_grad():
        counts = []
        for H, K in ((4, 2), (8, 2), (32, 16)):
            with Watch() as watch:
                yours(*inputs(2, H, K, 3, 5, 8))
            counts.append(watch.operations)
        assert counts[0] == counts[2], (
            f"{counts[0]} operations for 4 heads but {counts[2]} for 32: is there a loop over"
            " heads?"
        )
        assert counts[0] == counts[1], (
            f"{counts[0]} operations when 2 query heads share a key head but {counts[1]} when 4"
            " do: is there a loop over the heads of a group?"
        )


def _check_no_copy(yours: Attend) -> None:
    """No tensor as large as a key for each query head."""
    with case("Task 3, memory"), torch.no_grad():
        with Watch() as watch:
            q, k, v = inputs(1, 8, 2, 1, 256, 32)
            watch.largest = 0  # forget the inputs
            yours(q, k, v)
        assert watch.largest < 8 * 256 * 32, (
            f"a tensor of {watch.largest:,} numbers was created; k has {k.numel():,}, and H * S * D"
            f" is {8 * 256 * 32:,}. That means k or v was copied for each query head:"
            " repeat_interleave and"
            " repeat copy, and so does @ when it must broadcast. Fold the group into the queries"
        )


# -------------------------------------------------------------------------------- task 4


ONLY_ITSELF = (
    "the last query reads nothing but its own key, though all tokens come before it: is the mask"
    " the wrong way round?"
)


def _check_names(layer: Any) -> None:
    names = [n for n in ("q_proj", "k_proj", "v_proj", "o_proj") if not hasattr(layer, n)]
    assert not names, f"the layer has no {', '.join(names)}: keep the names of the sub-modules"


def outputs_of(layer: Any, x: Tensor) -> Tensor:
    """What the layer returns, checked to be of the shape of `x`, without ready-made attention."""
    with forbid(*READY_MADE):
        y = layer(x)
    expect_kind(y, x)
    return y


def probe(layer_class: Any, num_heads: int, equal_scores: bool = False) -> Any:
    """A layer of 8 channels that hands its values straight through, and with one-hot tokens shows
    its weights.
    """
    torch.manual_seed(0)
    layer = layer_class(8, num_heads)
    _check_names(layer)
    layer.q_proj.weight.data *= 0 if equal_scores else 10
    for projection in (layer.v_proj, layer.o_proj):
        projection.weight.data = torch.eye(8)
    return layer


def check_merge(answers: Answers) -> None:
    """Task 4: the heads of a token end up side by side."""
    with case("Task 4, the heads"), torch.no_grad():
        [layer_class] = written(answers, "MendedAttention")
        layer = probe(layer_class, 2, equal_scores=True)
        last = outputs_of(layer, torch.arange(1.0, 9).expand(1, 8, 8))[0, -1]
        x = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(1))
        mean = outputs_of(layer, x)[0, -1]
        assert not last.isnan().any(), (
            "the last output is NaN, as if the last query saw nothing: is the mask the wrong way"
            " round?"
        )
        found = [round(number, 2) for number in last.tolist()]
        assert torch.allclose(last * 36 / last.sum(), torch.arange(1.0, 9), atol=1e-3), (
            "two heads and eight equal tokens (1, 2, ..., 8): the last must come out as it went in,"
            f" but it is {found}. Do the heads of one token end up side by side?"
        )
        total = last[0].item()
        assert abs(total - 1) < 1e-3, (
            f"eight equal tokens come out {total:.2f} times as large, so the weights of the last"
            " query"
            f" sum to {total:.2f}: is the softmax over the keys, dim=-1?"
        )
        expect(
            mean,
            x[0].mean(0),
            "two heads and equal scores: the last output must be the mean of all tokens",
            [(ONLY_ITSELF, x[0, -1])],
        )


def check_scale(answers: Answers) -> None:
    """Task 4: the weights are as sharp as they should be."""
    with case("Task 4, the scale"), torch.no_grad():
        [layer_class] = written(answers, "MendedAttention")
        healthy = probe(MultiHeadAttention, 1)(torch.eye(8)[None])[0, -1]
        mended = outputs_of(probe(layer_class, 1), torch.eye(8)[None])[0, -1]
        assert not mended.isnan().any(), (
            "row 7 is NaN, as if the last query saw nothing: is the mask the wrong way round?"
        )
        assert abs(mended.sum() - 1) < 1e-3, (
            f"row 7 sums to {mended.sum():.2f}: is the softmax over the keys, dim=-1?"
        )
        assert not same(mended, torch.eye(8)[-1]), ONLY_ITSELF
        assert mended.max() > 0.9 * healthy.max(), (
            f"the last query's largest weight is {mended.max():.2f}, expected {healthy.max():.2f}:"
            " too"
            " even, so the scores are too small. By what are they divided?"
        )
        assert mended.max() < 1.1 * healthy.max(), (
            f"the last query's largest weight is {mended.max():.2f}, expected {healthy.max():.2f}:"
            " too"
            " sharp, so the scores are too large. By what are they divided?"
        )
        expect(
            mended,
            healthy,
            "the weights of the last query are not the softmax of its scores over the keys: does"
            " each"
            " key keep its place?",
        )


def check_mask(answers: Answers) -> None:
    """Task 4: no weight on later tokens."""
    with case("Task 4, the mask"), torch.no_grad():
        [layer_class] = written(answers, "MendedAttention")
        # (T, S): row t is the weights of query t
        shares = outputs_of(probe(layer_class, 1), torch.eye(8)[None])[0]
        assert not shares.isnan().any(), (
            "some rows are NaN, as if their queries saw nothing: is the mask the wrong way round,"
            " or"
            " does some query not see itself?"
        )
        later = shares.triu(1)
        assert later.any() <= shares.tril(-1).any(), (
            "every query reads the tokens after it and none of those before it: the mask is the"
            " wrong way round"
        )
        assert later.abs().max() < 1e-6, (
            f"row {int(later.abs().max(1).values.argmax())} gives weight {later.abs().max():.2f}"
            " to a"
            " token that comes later: what is left of a hidden score after the softmax?"
        )
        worst = int((shares.sum(1) - 1).abs().argmax())
        assert abs(shares[worst].sum() - 1) < 1e-4, (
            f"no token reads the future, but row {worst} sums to {shares[worst].sum():.2f}, not to"
            " 1:"
            " hide the scores before the softmax, which must run over the keys"
        )
        assert (shares.tril() > 0).sum() == 36, (
            "some query doesn't read a token before it, or itself: 1 + 2 + ... + 8 = 36 pairs must"
            " be"
            " visible"
        )


def twins(
    layer_class: Any, hidden_size: int, num_heads: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, MultiHeadAttention]:
    """The mended layer and the package's, with the same weights."""
    torch.manual_seed(0)
    mended = layer_class(hidden_size, num_heads).to(dtype)
    _check_names(mended)
    healthy = MultiHeadAttention(hidden_size, num_heads).to(dtype)
    mended.load_state_dict(healthy.state_dict())  # the same names, the same weights
    for projection in (mended.q_proj, mended.k_proj, healthy.q_proj, healthy.k_proj):
        projection.weight.data *= 3  # scores large enough that the scale is seen
    return mended, healthy


def layer_slips(healthy: MultiHeadAttention, x: Tensor) -> list[tuple[str, Tensor]]:
    """What the layer gives with a wrong scale, and what to say to it."""
    head_dim = healthy.q_proj.weight.shape[0] // 4
    weight = healthy.q_proj.weight.data.clone()
    slips = []
    for name, divisor in (
        ("divided by the root of hidden_size", x.shape[-1] ** 0.5),
        ("divided by the root of T", x.shape[1] ** 0.5),
        ("divided by the root of the number of heads", 4**0.5),
        ("divided by head_dim", head_dim),
        ("divided by the root of 8, whatever the sizes", 8**0.5),
        ("not divided by anything", 1),
    ):
        healthy.q_proj.weight.data = weight * head_dim**0.5 / divisor
        slips.append((f"the scores are {name}; the scale is the root of head_dim", healthy(x)))
    healthy.q_proj.weight.data = weight
    return slips


def check_layer(answers: Answers) -> None:
    """Task 4: the same outputs as the package's layer."""
    with case("Task 4, the whole layer with 4 heads"):
        [layer_class] = written(answers, "MendedAttention")
        mended, healthy = twins(layer_class, 24, 4)  # D = 6
        x = torch.randn(2, 5, 24)
        expected = healthy(x)
        slips = layer_slips(healthy, x)
        expect(
            outputs_of(mended, x),
            expected,
            "not what MultiHeadAttention gives with the same weights. If one of the three tests"
            " above fails, begin there. If they pass, look at what depends on the number of heads,"
            " and at o_proj",
            slips,
        )


# -------------------------------------------------------------------------------- task 5


def piece(
    start: int, end: int, heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys that carry their position, and values that carry its negative: (1, heads, end - start,
    3).
    """
    k = torch.arange(start, end, dtype=dtype)[None, None, :, None].expand(1, heads, end - start, 3)
    return k, -k


def positions(tensor: Tensor) -> list[int]:
    return [int(x) for x in tensor[0, 0, :, 0].tolist()]


def held(cache: Any) -> float:
    """How many positions the cache holds: keys and values, of 2 heads and 3 numbers each."""
    return kept_numbers(cache) / (2 * 2 * 3)


def updated(cache: Any, layer_index: int, k: Tensor, v: Tensor) -> list[int]:
    """The positions that `update` returns."""
    try:
        result = cache.update(layer_index, k, v)
    except RuntimeError as error:
        raise AssertionError(
            f"update raised RuntimeError: {error} When you concatenate: positions are dimension 2"
        ) from error
    except LookupError as error:
        raise AssertionError(
            f"update raised {type(error).__name__} for layer {layer_index}: layers may come in any"
            " order, with any numbers, so keep them in a dictionary"
        ) from error
    assert isinstance(result, tuple) and len(result) == 2, (
        f"update must return the pair (keys, values), not {type(result).__name__}"
    )
    keys, values = result
    assert keys.shape[:2] == k.shape[:2] and keys.shape[3] == k.shape[3], (
        f"the keys have the shape {tuple(keys.shape)}: only dimension 2, the positions, may grow"
    )
    assert values.shape == keys.shape, (
        f"the keys have the shape {tuple(keys.shape)} but the values {tuple(values.shape)}"
    )
    assert keys.dtype == k.dtype, f"the keys went in as {k.dtype} and came out as {keys.dtype}"
    assert torch.equal(values, -keys), (
        "the second tensor doesn't hold the values of these keys: are the two mixed up, or stored"
        " as one?"
    )
    return positions(keys)


def check_cache(Cache: Any) -> None:
    """Task 5: with and without a window."""
    _check_full_cache(Cache)
    _check_window_cache(Cache)
    _check_window_of_one(Cache)
    _check_memory_of_cache(Cache)


def _check_full_cache(Cache: Any) -> None:
    """Without a window, everything is kept."""
    with case("Task 5, Cache without a window"):
        cache = Cache()
        first = updated(cache, 0, *piece(0, 5))
        second = updated(cache, 0, *piece(5, 7))
        assert first == [
            0,
            1,
            2,
            3,
            4,
        ], (
            "five keys into an empty cache must come back as they are, but the positions are"
            f" {first}"
        )
        assert second == [0, 1, 2, 3, 4, 5, 6], (
            "positions 0 to 4 were kept and 5 and 6 are new, so all seven come back in this order,"
            " but"
            f" here {second}"
        )
        other = updated(cache, 1, *piece(0, 5))
        assert other == [0, 1, 2, 3, 4], (
            f"layer 1 was empty, but after its first five keys it returns {other}: does each layer"
            " have"
            " its own store?"
        )
        assert updated(cache, 0, *piece(7, 8)) == list(range(8)), (
            "layer 0 lost or gained keys while layer 1 was filled: does each layer have its own"
            " store?"
        )
        fresh = updated(Cache(), 0, *piece(0, 2))
        assert fresh == [0, 1], (
            f"a second, new Cache begins with the keys of the first one, {fresh}: is the store an"
            " attribute of the class, instead of self?"
        )
        assert kept_numbers(cache) > 0, (
            "after four updates no tensor is found in the cache: keep them in attributes of self,"
            " in"
            " dictionaries, lists or tuples"
        )


def _check_window_cache(Cache: Any) -> None:
    """With a window, no more is kept than a later query can read."""
    with case("Task 5, Cache with window=3"):
        cache = Cache(window=3)
        first = updated(cache, 0, *piece(0, 5))
        assert first == [0, 1, 2, 3, 4], (
            f"a first piece of five came back as the positions {first}: its own queries read all"
            " five,"
            " so shorten what you keep, not what you return"
        )
        assert held(cache) <= 3, (
            f"after a piece of five the cache holds {held(cache):.0f} positions, the window is 3:"
            " forget what no later query can read"
        )
        for end in (6, 7, 8):
            seen = updated(cache, 0, *piece(end - 1, end))
            assert seen[-3:] == [end - 3, end - 2, end - 1], (
                f"query {end - 1} must read the positions {end - 3} to {end - 1}, but update"
                " returned"
                f" {seen}: how many old keys do you keep?"
            )
            assert held(cache) <= 3, (
                f"after {end} tokens the cache holds {held(cache):.0f} positions, and the window"
                " is 3:"
                " forget what no later query can read"
            )
        seen = updated(cache, 0, *piece(8, 12))
        assert seen[-6:] == [6, 7, 8, 9, 10, 11], (
            "a piece of four, 8 to 11: its first query reads 6 to 8, so 6 to 11 are needed, but"
            " update"
            f" returned {seen}"
        )
        assert held(cache) <= 3, (
            f"after a piece of four the cache holds {held(cache):.0f}, the window is 3: cut after"
            " every"
            " call, not only after a single token"
        )


def _check_window_of_one(Cache: Any) -> None:
    """Every query reads its own key only."""
    with case("Task 5, Cache with window=1"):
        cache = Cache(window=1)
        for start, end in ((0, 2), (2, 3), (3, 6)):
            seen = updated(cache, 0, *piece(start, end))
            assert seen[-(end - start) :] == list(range(start, end)), (
                f"the new positions are {start} to {end - 1}, but update returned {seen}"
            )
            assert held(cache) <= 1, (
                f"after {end} tokens the cache holds {held(cache):.0f} positions: at most one"
                " position may be kept, and `[-0:]` keeps everything"
            )


def _check_memory_of_cache(Cache: Any) -> None:
    """What is forgotten must not stay in memory behind a slice. (With one key/value head such a
    slice is contiguous, so `.contiguous()` wouldn't copy it.)
    """
    with case("Task 5, the memory of a Cache with window=3"):
        cache = Cache(window=3)
        k, v = (x.contiguous() for x in piece(0, 100, heads=1))
        cache.update(0, k, v)
        room = kept_memory(cache) / (2 * 3)  # keys and values, of 3 numbers each
        assert room <= 3, (
            f"after a piece of 100 the cache holds 3 positions, but memory for {room:.0f}: a slice"
            " is a view, which keeps the whole tensor it was cut from. Store a copy of it, .clone()"
        )


def check_decode(
    decode: Callable[..., Tensor],
    Cache: Any,
    Stack: Any,
    B: int,
    T: int,
    prompt_length: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Task 5: the outputs of the full pass, from one call for each new token."""
    torch.manual_seed(0)
    model = Stack(sliding_window=window).to(dtype)
    x = torch.randn(B, T, 32, dtype=dtype)
    cache = Cache(window)
    layers: Any = model.layers
    for layer in layers:  # larger weights, so that a wrong position is seen
        layer.q_proj.weight.data *= 4
    calls: list[int] = []
    marked: list[Tensor] = []

    def mark(module: nn.Module, arguments: Any, named: Any, result: Tensor) -> Tensor:
        """Note each call, and add its number to what it returns: so we see where an output comes
        from.
        """
        calls.append((named["x"] if "x" in named else arguments[0]).shape[1])
        marked.append(result + len(calls))
        return marked[-1]

    with torch.no_grad():
        full = model(x, torch.arange(T))
        model.register_forward_hook(mark, with_kwargs=True)
        y = decode(model, x, prompt_length, cache)
    _check_outputs(y, x, full, calls, marked, prompt_length)
    assert kept_numbers(cache) > 0, (
        "the cache that you were given is still empty: pass it to the model"
    )


def _check_outputs(
    y: Any,
    x: Tensor,
    full: Tensor,
    calls: list[int],
    marked: list[Tensor],
    prompt_length: int,
) -> None:
    """The calls that were made, and that `y` is what they returned."""
    expected = [prompt_length] + [1] * (x.shape[1] - prompt_length)
    assert calls == expected, (
        f"the model was called with {calls} tokens, expected {expected}: the prompt at once, then"
        " only what is new"
    )
    assert isinstance(y, Tensor) and y.shape == x.shape, (
        f"the result must have the shape {tuple(x.shape)}, one output for each token, not"
        f" {tuple(getattr(y, 'shape', ()))}"
    )
    assert torch.allclose(y, torch.cat(marked, dim=1), atol=1e-5), (
        "the result is not what these calls returned: concatenate their outputs, in their"
        " order, along dimension 1"
    )
    y = y - torch.arange(1, len(calls) + 1).repeat_interleave(torch.tensor(calls))[:, None]
    expect(
        y[:, :prompt_length],
        full[:, :prompt_length],
        "the outputs of the prompt differ from the full pass: which positions do you give it?",
    )
    expect(
        y[:, prompt_length : prompt_length + 1],
        full[:, prompt_length : prompt_length + 1],
        "the prompt is right, the first token after it is not: which position does it have, and did"
        " both calls get the cache?",
    )
    expect(
        y,
        full,
        "the first tokens are right, later ones are not: does the position grow with every token?",
    )


# -------------------------------------------------------------------------------- task 6


def without_help(cache_bytes: Bytes, measured_bytes: Bytes) -> Bytes:
    """The formula, without a call of the measurement."""

    def yours(tokens: int, **sizes: Any) -> int:
        with forbid(measured_bytes):
            return cache_bytes(tokens, **sizes)

    return yours


def check_bytes(cache_bytes: Bytes, measured_bytes: Bytes) -> None:
    """Task 6: the formula against real layers."""
    yours = without_help(cache_bytes, measured_bytes)
    with case("Task 6, cache_bytes"):
        size: dict[str, Any] = dict(num_layers=3, num_kv_heads=2, head_dim=24)
        ours = yours(10, **size)
        real = measured_bytes(10, **size)
        assert ours is not None, "cache_bytes returns None: does it return its result?"
        assert ours * 2 != real, (
            f"{ours:,} bytes, but real layers hold {real:,}, twice as much: keys and values"
        )
        assert ours != real * 8, (
            f"{ours:,} bytes, but real layers hold {real:,}: the cache holds key/value heads only,"
            " here 2"
        )
        assert ours == real, (
            f"{ours:,} bytes for 10 tokens in 3 layers with K = 2 and D = 24, but real layers hold"
            f" {real:,}: which factor is missing, or too many?"
        )
        ours = yours(10, **size, bytes_per_number=4)
        real = measured_bytes(10, **size, dtype=torch.float32)
        assert ours == real, (
            f"{ours:,} bytes in float32, but real layers hold {real:,}: does bytes_per_number"
            " count?"
        )
        window: dict[str, Any] = dict(sliding_window=6, num_window_layers=2)
        for tokens in (4, 6, 10):
            ours = yours(tokens, **size, **window)
            real = measured_bytes(tokens, **size, **window)
            assert ours == real, (
                f"{tokens} tokens, 2 of 3 layers with a window of 6: {ours:,} bytes, but real"
                " layers"
                f" hold {real:,}. A layer with a window holds at most 6 tokens, and never more"
                " than there are,"
                f" and the one layer without a window holds all {tokens}"
            )


def saved(tokens: int, measured_bytes: Bytes) -> float:
    """The share of Gemma's cache that its window saves."""
    gemma: dict[str, Any] = dict(num_layers=42, num_kv_heads=8, head_dim=256)
    window: dict[str, Any] = dict(sliding_window=4096, num_window_layers=21)
    return 1 - measured_bytes(tokens, **gemma, **window) / measured_bytes(tokens, **gemma)


def check_four_numbers(answers: Answers, measured_bytes: Bytes) -> None:
    """Task 6: bytes for a token, and what a window saves."""
    with case("Task 6, the four numbers"):
        names = ("bytes_per_token", "first_saving", "saved_at_8192", "saved_at_most")
        typed = zip(names, written(answers, *names), strict=True)
        per_token, first, at_8192, at_most = (expect_number(n, name) for name, n in typed)
        gemma: dict[str, Any] = dict(num_layers=42, num_kv_heads=8, head_dim=256)

        real = measured_bytes(1, **gemma)
        assert per_token * 1000 > real * 1.1, (
            f"bytes_per_token: you have {per_token:,.0f}; type it in bytes, not in thousands"
        )
        assert per_token != 2 * real, (
            "bytes_per_token is twice what it should be: the cache holds the 8 key/value heads,"
            " not the 16"
            " query heads"
        )
        assert per_token == real, (
            "bytes_per_token: a token leaves a key and a value, in each layer and key/value head,"
            " of"
            f" 256 numbers of 2 bytes; you have {per_token:,.0f}"
        )
        assert first.is_integer() and first > 0, (
            f"first_saving is {first:g}, expected a number of tokens"
        )
        assert saved(int(first), measured_bytes) > 0, (
            f"first_saving: at {first:,.0f} tokens every window layer still holds the whole"
            " text,"
            " so nothing is saved"
        )
        assert saved(int(first) - 1, measured_bytes) == 0, (
            f"first_saving: at {first - 1:,.0f} tokens something is saved already; look for the"
            " first key that is dropped"
        )
        _check_shares(at_8192, at_most, measured_bytes)


def _check_shares(saved_at_8192: float, saved_at_most: float, measured_bytes: Bytes) -> None:
    """What the window saves at 8192 tokens, and in the limit."""
    for name, share in (("saved_at_8192", saved_at_8192), ("saved_at_most", saved_at_most)):
        assert 0 <= share <= 1, f"{name} is {share}, but a share is between 0 and 1"
    assert abs(saved_at_8192 - 0.5) > 0.01, (
        "saved_at_8192: only the window layers hold half of the text; the other 21 hold all of it"
    )
    assert abs(saved_at_8192 - saved(8192, measured_bytes)) < 0.01, (
        "saved_at_8192: at 8192 tokens 21 layers hold 8192 tokens and 21 hold 4096; which share of"
        f" 42 x 8192 is missing? You have {saved_at_8192}"
    )
    assert abs(saved_at_most - saved(2**24, measured_bytes)) < 0.01, (
        "saved_at_most: the window layers become free in the end, but 21 layers still hold"
        f" everything; you have {saved_at_most}"
    )


# -------------------------------------------------------------------------------- task 7


def weights_of(alibi_attention: Attend, q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    """With one-hot values the output is the weights: (B, H, T, S)."""
    S = k.shape[2]
    return alibi_attention(q, k, torch.eye(S, dtype=k.dtype).expand(*k.shape[:2], S, S), slopes)


def check_alibi(alibi_attention: Attend) -> None:
    """Task 7: no slope, equal scores, and new queries after old keys."""
    with case("Task 7, slope 0"):
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 2, 2, 5, 6)
        expect(
            alibi_attention(q, k, v, torch.zeros(2)),
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "with slope 0 this is plain causal attention: look at the scale and at the causal mask",
        )
    _check_slopes(alibi_attention)
    _check_gradient_of_slopes(alibi_attention)
    with case("Task 7, two new queries and six keys"):
        shares = weights_of(
            alibi_attention, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 6, 4), torch.ones(1)
        )[0, 0]
        counts = (shares > 0).sum(1).tolist()
        assert counts == [5, 6], (
            f"the two queries have the positions 4 and 5 and read 5 and 6 keys, but here {counts}:"
            " the last query belongs to the last key"
        )
        assert shares[0].argmax() == 4 and shares[1].argmax() == 5, (
            "of equal keys a query must weigh its own position most: which position does query t"
            " have?"
        )


def _check_slopes(alibi_attention: Attend) -> None:
    """With equal scores, the weights show the bias alone."""
    with case("Task 7, equal scores"):
        # (H, T, S)
        shares = weights_of(
            alibi_attention,
            torch.zeros(1, 2, 6, 4),
            torch.zeros(1, 2, 6, 4),
            torch.tensor([0.5, 2.0]),
        )[0]
        assert shares.shape == (
            2,
            6,
            6,
        ), f"the output has the shape {tuple(shares.shape)}, expected (2, 6, 6)"
        assert (shares.triu(1) == 0).all(), (
            "a query gives weight to a later token: hide with -inf every key whose distance is"
            " negative"
        )
        last = shares[:, -1]
        assert (shares.sum(-1) - 1).abs().max() < 1e-4, (
            f"the weights of the last query sum to {last[1].sum():.2f}, not to 1: the bias is"
            " added to"
            " the scores, so before the softmax"
        )
        assert (last.diff() > 0).all(), (
            "of equal keys the nearest must weigh most: look at the sign of the bias"
        )
        ratios = (last[:, 1:] / last[:, :-1]).log()
        assert (ratios[0] - ratios[0, 0]).abs().max() < 1e-3, (
            "the scores must fall by the same amount with each step back: is the bias linear in the"
            " distance?"
        )
        found = [round(x, 2) for x in ratios[:, 0].tolist()]
        assert found == [0.5, 2.0], (
            "the slopes are [0.5, 2.0], but one step back lowers the scores of the two heads by"
            f" {found}: add the bias after the scale, and give each head its own slope"
        )


def _check_gradient_of_slopes(alibi_attention: Attend) -> None:
    """Slopes that are learned."""
    with case("Task 7, slopes that are learned"):
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, 2, 4, 8)
        slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        y = alibi_attention(q, k, v, slopes)
        gradient = None
        if y.requires_grad:
            [gradient] = torch.autograd.grad(y.square().sum(), slopes, allow_unused=True)
        assert gradient is not None and gradient.all(), (
            "no gradient reaches the slopes: do not copy their numbers out with .item(), .tolist()"
            " or torch.tensor"
        )


def check_reach(answers: Answers) -> None:
    """Task 7: where a weight has halved, and how many heads look far."""
    with case("Task 7, half_distance and far_heads"):
        [half_distance] = written(answers, "half_distance")
        for slope in (0.5, 0.125, 1 / 256):
            distance = half_distance(slope)
            assert isinstance(distance, int | float | Tensor), (
                f"half_distance({slope}) is a {type(distance).__name__}, expected a number"
            )
            # The own key, and an equally good one that far back.
            scores = torch.tensor([0.0, -slope * float(distance)], dtype=torch.float64)
            own, far = scores.softmax(0).tolist()
            assert abs(far / own - 0.5) < 1e-3, (
                f"half_distance({slope}) = {float(distance):.3g}: there the weight is"
                f" {far / own:.3f}"
                " of the own key's, not 0.5. Which d makes exp(-slope * d) one half?"
            )
        [answer] = written(answers, "far_heads")
        far_heads = expect_number(answer, "far_heads")
        weights_at_100 = torch.tensor([-100 / 2**i for i in range(1, 9)]).exp()
        assert far_heads == int((weights_at_100 >= 0.5).sum()), (
            f"far_heads = {far_heads:g}: take half_distance of each of the eight slopes, and count"
            " those"
            " of 100 or more"
        )

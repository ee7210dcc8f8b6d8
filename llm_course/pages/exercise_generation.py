"""The visible checks of exercise 10, writing: each says what is wrong with an answer."""

import codecs
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llm_course.model.cache import KVCache
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate, generate_tokens, until_stop, whole_characters
from llm_course.model.sampling import keep_min_p, keep_top_k, keep_top_p, token_probabilities
from llm_course.model.speculative import generate_speculatively
from llm_course.pages.checking import Answer, Answers, case, forbid, written

GENERATE = (generate, generate_tokens, generate_speculatively)
STREAM = (until_stop, whole_characters)


def random_model(seed: int, **changes: Any) -> Any:
    """A small model with large random weights: each token depends on what the model reads."""
    sizes: dict[str, Any] = dict(
        vocab_size=30,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=24,
        initializer_range=0.5,
    )
    torch.manual_seed(seed)
    return (
        DecoderModel(ModelConfig(**sizes | dict(tie_word_embeddings=False) | changes))
        .eval()
        .requires_grad_(False)
    )


def numbers(value: Any, name: str, length: int | None = None) -> list[float]:
    """`value` as a list of floats: from a list, a tuple, a set, a tensor, an array."""
    assert not (isinstance(value, list | tuple) and any(isinstance(x, bool) for x in value)), (
        f"{name} holds True or False, expected numbers"
    )
    try:
        found = [float(x) for x in (sorted(value) if isinstance(value, set) else value)]
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"{name} is {value!r}, expected a list of numbers") from None
    assert length is None or len(found) == length, (
        f"{name} has {len(found)} numbers, expected {length}"
    )
    return found


# -------------------------------------------------------------------------------- task 1


def four_after(**options: Any) -> list[float]:
    """The four probabilities of the task after some rules."""
    return token_probabilities(torch.tensor([[0.3, 0.1, 0.4, 0.2]]).log(), **options)[0].tolist()


def close(found: Sequence[float], expected: Sequence[float], within: float = 0.006) -> bool:
    return all(abs(a - b) < within for a, b in zip(found, expected, strict=True))


def check_filters(answers: Answers) -> None:
    """Task 1: a temperature, four cuts and a chain."""
    with case("Task 1, filters"):
        names = ("halved", "top_k_2", "top_p_65", "top_p_75", "min_p_40", "chain")
        halved, *kept, chain = written(answers, *names)
        _check_halved(halved)
        _check_kept(dict(zip(names[1:5], kept, strict=True)))
        _check_chain(chain)


def _check_halved(halved: Any) -> None:
    """The probabilities at temperature 1/2."""
    found = numbers(halved, "halved", 4)
    assert not close(found, [0.533, 0.3, 0.133, 0.033]), (
        "halved is sorted; keep the order of the tokens, 0 to 3"
    )
    assert not close(found, four_after(temperature=2)), (
        "halved: these are the probabilities at temperature 2; 1/2 makes the best token more"
        " probable"
    )
    straight = torch.tensor([0.6, 0.2, 0.8, 0.4]).softmax(-1).tolist()
    assert not close(found, straight), (
        "halved: you divided the probabilities by 1/2, but the temperature divides the logits,"
        " their logarithms"
    )
    assert not close(found, [30, 3, 53, 13], within=1), (
        f"halved is {halved}: type shares of 1, not percentages"
    )
    assert not close(found, [0.09, 0.01, 0.16, 0.04]), (
        "halved: the squares are right, but their sum is 0.30 and not 1: divide by it"
    )
    assert close(found, four_after(temperature=0.5)), (
        f"halved is {halved}: double each logarithm, so square each probability, and divide by"
        " the sum"
    )


def _check_kept(answers: Answers) -> None:
    """The tokens that each rule leaves."""
    places: dict[str, tuple[dict[str, Any], str]] = {
        "top_k_2": (dict(top_k=2), "the two best of the four have 0.4 and 0.3"),
        "top_p_65": (
            dict(top_p=0.65),
            (
                "0.4 alone is less than 0.65, so the next one is needed too: the token that crosses"
                " the line stays"
            ),
        ),
        "top_p_75": (
            dict(top_p=0.75),
            (
                "0.4 and 0.3 are less than 0.75, so a third is needed: the token that crosses the"
                " line stays"
            ),
        ),
        "min_p_40": (
            dict(min_p=0.4),
            "the line is 0.4 times the best probability, 0.16, and not 0.4",
        ),
    }
    for name, (options, why) in places.items():
        right = [i for i, p in enumerate(four_after(**options)) if p > 0]
        kept = sorted(numbers(answers[name], name))
        ranks = list(range(len(right)))
        shown = f"{name} is {[int(i) if i == int(i) else i for i in kept]}"
        assert kept != [i + 1 for i in right], (
            f"{shown}: the tokens count from 0, so the best one is number 2"
        )
        assert all(i in (0, 1, 2, 3) for i in kept), (
            f"{shown}: type the numbers of the tokens, 0 to 3, not their probabilities"
        )
        assert kept != ranks or kept == right, (
            f"{shown}: these are ranks, not tokens. The best token is number 2"
        )
        assert kept == right, f"{shown}: {why}"


def _check_chain(chain: Any) -> None:
    """Top-k and then top-p."""
    found = numbers(chain, "chain", 4)
    assert not close(found, [1 / 3, 0, 4 / 9, 2 / 9]), (
        "chain: top-p saw 0.4 + 0.3 = 0.7. But top-k has left three tokens, and they share 1: what"
        " are they then?"
    )
    assert not close(found, [0.333, 0, 0.444, 0]), (
        "chain: two tokens stay, that is right, and what is left is renormalised: the sum must be 1"
    )
    assert not close(found, [0.3, 0, 0.4, 0]), (
        "chain: two tokens stay, that is right, and what is left is renormalised: the sum must be 1"
    )
    assert not close(found, [0, 0, 1, 0]), (
        "chain: 4/9 alone is less than 0.75; the token that crosses the line stays"
    )
    assert close(found, four_after(top_k=3, top_p=0.75)), (
        f"chain is {chain}: top-k leaves 3/9, 0, 4/9, 2/9; then the fewest best that hold 0.75;"
        " then share 1"
    )


def calls_of(P: int, n: int) -> list[int]:
    """How many tokens each call of a model with 8 positions reads."""
    model = random_model(0, max_position_embeddings=8)
    read: list[int] = []
    model.embedding.register_forward_pre_hook(
        lambda module, inputs: read.append(inputs[0].shape[1])
    )
    generate(model, torch.arange(P)[None], max_new_tokens=n)
    return read


def check_work(answers: Answers) -> None:
    """Task 1: passes, calls, operations and buffers."""
    with case("Task 1, work"):
        names = (
            "slow_passes",
            "fast_passes",
            "short_calls",
            "long_calls",
            "step_operations",
            "places",
        )
        slow, fast, short, long, step, places = written(answers, *names)
        _check_passes(slow, fast)
        _check_calls("short_calls", short, calls_of(6, 6))
        _check_calls("long_calls", long, calls_of(11, 5))
        _check_operations(step)
        _check_places(places)


def _check_passes(slow_passes: Any, fast_passes: Any) -> None:
    """Passes without a cache and with one."""
    P = 20
    n = 50
    slips: dict[float, str] = {
        n * P
        + n
        * (n + 1)
        // 2: "the first call reads 20 tokens and not 21, so the sum is n P + n (n - 1) / 2",
        n * P: "each call reads one token more than the one before it",
        (P + n) * n: "only the last call reads nearly all of the text; the first reads 20",
        P + n - 1: "that is with a cache; without one every call reads the whole text again",
    }
    [slow] = numbers([slow_passes], "slow_passes")
    assert slow not in slips, f"slow_passes is {slow:g}: {slips[slow]}"
    assert slow == sum(range(P, P + n)), (
        f"slow_passes is {slow:g}: add 20 + 21 + ... up to the last of 50 calls"
    )
    [fast] = numbers([fast_passes], "fast_passes")
    assert fast != P + n, f"fast_passes is {fast:g}: the last token is written, and never read"
    assert fast != n, f"fast_passes is {fast:g}: the prompt is read too"
    assert fast == P + n - 1, (
        f"fast_passes is {fast:g}: the prompt once, and each new token once, but for the last"
    )


def _check_calls(name: str, read: Any, right: list[int]) -> None:
    """How many tokens each call reads."""
    found = numbers(read, name)
    new = len(right)
    shown = f"{name} is {[int(x) for x in found]}"
    assert found[:1] != [11], (
        f"{shown}: a context of 8 cannot hold 11 tokens, only the newest are read"
    )
    assert len(found) == new, f"{shown}: {len(found)} calls, but each of the {new} tokens takes one"
    assert max(found) <= 8, f"{shown}: no call reads more than the context of 8"
    assert found[0] == right[0], f"{shown}: the first call reads the prompt, or its newest 8 tokens"
    assert found[1] != found[0] + 1, (
        f"{shown}: with a cache a call reads what is new to it, one token, and not the text again"
    )
    assert found[1:] != (new - 1) * [1], (
        f"{shown}: this is the cache alone; but the context of 8 is full before the end"
    )
    assert found.count(8) <= right.count(8), (
        f"{shown}: with all 8 of the newest, the context would be full again at once; it goes"
        " on from the newest half"
    )
    assert found == right, (
        f"{shown}: when the context holds 8, the next call reads the newest 4 again, and from"
        " there one at a time"
    )


def _check_operations(step_operations: Any) -> None:
    """The operations of a decode step."""
    W = 10_000
    D = 8
    H = 4
    S = 50
    slips: dict[float, str] = {
        W + 2 * H * D * S: "a multiplication and an addition are two operations",
        2 * W: "the keys cost something too: 4 H D for each of the 50",
        2 * W + 4 * D * S: "each of the 4 heads has a key of its own to meet: 4 H D and not 4 D",
        2 * W + 2 * H * D * S: "a key costs twice: for its score and for its value",
        2 * W + 4 * H * D: "the token meets 50 keys and not one",
        2 * W * S + 4 * H * D * S * S: (
            "that is 50 tokens; with a cache, a decode step computes one"
        ),
    }
    [step] = numbers([step_operations], "step_operations")
    assert step not in slips, f"step_operations is {step:g}: {slips[step]}"
    assert step == 2 * W + 4 * H * D * S, (
        f"step_operations is {step:g}: two for each weight, and 4 H D for each of the 50 keys"
    )


def _check_places(places: Any) -> None:
    """How many positions the buffers have room for."""
    cache = KVCache(1000, windows=[4, None])
    one = torch.zeros(1, 1, 1, 1)
    right_places = []
    for layer in (0, 1):
        before = cache.num_bytes
        cache.update(layer, one, one)
        right_places.append((cache.num_bytes - before) // 8)  # a key and a value of 4 bytes each
    room = numbers(places, "places", 2)
    said = f"places is {[int(x) for x in room]}"
    assert room != right_places[::-1], f"{said}: the window is in layer 0"
    assert room[0] != 4, (
        f"{said}: a window of 4 reads 4 positions, but its buffer has room for twice as many"
    )
    assert room[1] != 500, (
        f"{said}: a full layer makes room for the longest text at once, however much has been read"
    )
    assert room == right_places, f"{said}: 2W for a window, the longest text for a full layer"


def check_draft(answers: Answers) -> None:
    """Task 1: what is kept, what replaces the rest, and what a slip does."""
    with case("Task 1, draft"):
        share, instead, sloppy, per_round = written(
            answers, "share", "instead", "sloppy", "per_round"
        )
        p = [0.4, 0.1, 0.5]
        q = [0.3, 0.5, 0.2]
        _check_share(share, p, q)
        _check_instead(instead, p, q)
        _check_sloppy(sloppy, p, q)
        _check_per_round(per_round)


def _check_share(share: Any, p: list[float], q: list[float]) -> None:
    """The share of drafts that is kept."""
    a = sum(min(pair) for pair in zip(p, q, strict=True))
    [found] = numbers([share], "share")
    assert not close([found], [1 - a]), f"share is {found:g}: that is refused; what is kept?"
    assert not close([found], [sum(min(1, x / y) for x, y in zip(p, q, strict=True)) / 3]), (
        f"share is {found:g}: the three tokens are not drafted equally often; weigh each chance"
        " with q"
    )
    assert not close([found], [sum(x * y for x, y in zip(p, q, strict=True))]), (
        f"share is {found:g}: that is how often two draws agree; a draft is also kept where q gives"
        " a token less than p"
    )
    assert close([found], [a]), (
        f"share is {found:g}: sum q(x) min(1, p(x) / q(x)), which is the smaller of p and q"
    )


def _check_instead(instead: Any, p: list[float], q: list[float]) -> None:
    """What replaces a refused draft."""
    above = [max(0.0, x - y) for x, y in zip(p, q, strict=True)]
    found = numbers(instead, "instead", 3)
    assert not close(found, above), (
        "instead: max(0, p - q) is right, but its sum is 0.4 and not 1: divide by it"
    )
    assert not close(found, p), (
        "instead: drawn from p itself, the favourites of q get too much: draw from what p has"
        " above q"
    )
    assert not close(found, [max(0.0, y - x) / 0.4 for x, y in zip(p, q, strict=True)]), (
        "instead: that is what q has above p; the refused mass goes to tokens that got too little"
    )
    assert close(found, [x / sum(above) for x in above]), (
        f"instead is {found}: max(0, p - q), divided by its sum"
    )


def _check_sloppy(sloppy: Any, p: list[float], q: list[float]) -> None:
    """What the careless program draws."""
    smaller = [min(pair) for pair in zip(p, q, strict=True)]
    a = sum(smaller)
    found = numbers(sloppy, "sloppy", 3)
    assert not close(found, p), (
        "sloppy: that would be right decoding; but token 1 is at times kept, at times drawn again"
    )
    assert not close(found, q), "sloppy: that is the drafts alone, but some of them are refused"
    assert close(found, [x + (1 - a) * y for x, y in zip(smaller, p, strict=True)]), (
        f"sloppy is {found}: the kept part min(p, q), plus the refused share times p"
    )


def _check_per_round(per_round: Any) -> None:
    """The tokens of a round with two drafts."""
    a = 0.6
    [found] = numbers([per_round], "per_round")
    assert not close([found], [a + a * a]), (
        f"per_round is {found:g}: the large model adds a token of its own in each round"
    )
    assert not close([found], [1 + 2 * a]), (
        f"per_round is {found:g}: the second draft counts only if the first was kept"
    )
    assert not close([found], [1 + a + a * a + a**3]), (
        f"per_round is {found:g}: that is a round with three drafts"
    )
    assert close([found], [1 + a + a * a]), (
        f"per_round is {found:g}: one token is certain, the drafts bring a and a a"
    )


# -------------------------------------------------------------------------------- task 2


def typical_loop(row: list[float], p: float, rule: str = "right") -> set[int]:
    """The tokens that stay, as a set, by a loop; with other rules, by what a slip would do."""
    weights = [math.exp(x - max(row)) for x in row]
    probs = [w / sum(weights) for w in weights]
    entropy = -sum(q * math.log(q) for q in probs if q > 0)
    surprise = [-math.log(q) if q > 0 else math.inf for q in probs]
    keys: dict[str, Callable[[int], float]] = {
        "probable": lambda i: surprise[i],
        "farthest": lambda i: -abs(surprise[i] - entropy),
        "bits": lambda i: abs(surprise[i] - entropy / math.log(2)),
        "mean": lambda i: abs(surprise[i] - sum(surprise) / len(row)),
    }
    order = sorted(range(len(row)), key=keys.get(rule, lambda i: abs(surprise[i] - entropy)))
    added = [probs[i] for i in order]
    if rule == "unsorted":
        added = probs
    if rule == "by_probability":
        added = sorted(probs, reverse=True)
    kept: list[int] = []
    mass = 0.0
    for i, q in zip(order, added, strict=True):
        crosses = mass + q >= p and (rule == "none" or rule == "crossing" and kept)
        if mass >= p or crosses:
            break
        kept.append(i)
        mass += q
    if rule == "complement":
        return {i for i, q in enumerate(probs) if i not in kept and q > 0}
    if rule == "sorted":
        return set(range(len(kept)))
    if rule == "inverse":
        return {i for i, place in enumerate(order) if place < len(kept)}
    return {i for i in kept if probs[i] > 0}


TYPICAL_SLIPS = {
    "probable": (
        "the most probable come first: that is top-p, or the distance lacks its absolute value, or"
        " the minus of the surprise"
    ),
    "farthest": "the farthest come first; the nearest must",
    "bits": "the entropy is in bits and the surprise in nats",
    "mean": (
        "you compare with the plain mean of the surprises; in the entropy, each counts with its"
        " probability"
    ),
    "unsorted": (
        "the probabilities are summed in the order of the tokens; bring them into the order of the"
        " distances first, by gather"
    ),
    "by_probability": (
        "the probabilities are summed from the largest down; sum them in the order of the distances"
    ),
    "complement": (
        "what should go stays, and what should stay goes: the mask is the wrong way round"
    ),
    "sorted": "the mask is still in sorted order; bring it back to the order of the tokens",
    "inverse": "the mask is brought back with `index` itself; the way back is `index.argsort(-1)`",
    "none": "the token that crosses the line is dropped, even if it is the first",
    "crossing": "the token that crosses the line is dropped, so what stays holds less than p",
}


def check_typical(keep_typical: Answer, logits: Tensor, p: float) -> None:
    """Task 2: the right tokens stay, with the logits that they had."""
    before = logits.clone()
    with forbid(keep_top_p, keep_min_p, keep_top_k):
        try:
            found = keep_typical(logits, p)
        except RuntimeError as error:
            assert "must match" not in str(error), (
                f"two tensors don't fit, for logits {tuple(logits.shape)}: {error}. A number for"
                " each row, such as the entropy, needs keepdim=True"
            )
            raise
    assert logits.equal(before), "keep_typical changed its argument; return a new tensor"
    assert isinstance(found, Tensor), (
        f"keep_typical returned a {type(found).__name__}, expected a tensor"
    )
    assert found.shape == logits.shape, (
        f"the shape is {tuple(found.shape)}, expected {tuple(logits.shape)}"
    )
    assert not found.isnan().any(), "the result holds NaN: in the entropy, 0 times -inf counts 0"
    for i, row in enumerate(before.tolist()):
        _check_row(i, row, found[i], p, functools.partial(_typical_slip, before, found, p))


def _typical_slip(before: Tensor, found: Tensor, p: float) -> str:
    """What to say to a result, by the slip that gives it in all rows."""
    stay = [{j for j, x in enumerate(row) if x > -math.inf} for row in found.tolist()]
    same = (
        why
        for rule, why in TYPICAL_SLIPS.items()
        if stay == [typical_loop(row, p, rule) for row in before.tolist()]
    )
    return next(same, "Each row has its own entropy and its own order")


def _check_row(i: int, row: list[float], found: Tensor, p: float, slip: Callable[[], str]) -> None:
    """One row of `check_typical`."""
    kept = {j for j, x in enumerate(found.tolist()) if x > -math.inf}
    right = typical_loop(row, p) if p < 1 else {j for j, x in enumerate(row) if x > -math.inf}
    assert kept or not right, (
        f"row {i}: nothing stays with p = {p}; the first token in order must always stay"
    )
    said = f"row {i}, p = {p}: the tokens {sorted(kept)[:9]} stay, expected {sorted(right)[:9]}"
    finite = [j for j in kept if found[j] != row[j]]
    assert not finite or found[finite[0]] > -1e4, (
        f"row {i}: what goes must be -inf, not {found[finite[0]]:g}"
    )
    if kept != right and p < 1 and -math.inf in row:
        raise AssertionError(
            f"{said}. The row holds -inf: is your entropy NaN there? 0 times -inf counts 0"
        )
    if kept != right and p == 1:
        raise AssertionError(
            f"row {i}: {len(kept):,} of {len(right):,} tokens stay. With p = 1 all stay; a sum of"
            " probabilities may reach 1 too early, by rounding"
        )
    assert kept == right, f"{said}. {slip()}"
    changed = [j for j in right if found[j] != row[j]]
    assert not changed, (
        f"row {i}: what stays must keep its logit, but {row[changed[0]]:.4g} became"
        f" {found[changed[0]]:.4g}"
    )


def check_without_best(answers: Answers) -> None:
    """Task 2: a distribution whose best token is dropped."""
    with case("Task 2, without the best"):
        [without_best] = written(answers, "without_best")
        chosen = numbers(without_best, "without_best")
        assert 2 <= len(chosen) <= 10, f"without_best has {len(chosen)} numbers, expected 2 to 10"
        assert min(chosen) > 0 and abs(sum(chosen) - 1) < 0.01, (
            f"without_best: the smallest is {min(chosen):g} and the sum {sum(chosen):g};"
            " probabilities"
            " are positive, with the sum 1"
        )
        best_one = chosen.index(max(chosen))
        assert sorted(chosen)[-2] < max(chosen) - 1e-6, (
            "without_best: two tokens share the first place, so there is no best one"
        )
        total_surprise = -sum(q * math.log(q) for q in chosen)
        gap = sorted((abs(-math.log(q) - total_surprise), i) for i, q in enumerate(chosen))
        come_before = sum(chosen[i] for _, i in gap[: [i for _, i in gap].index(best_one)])
        assert gap[0][1] != best_one, (
            f"H is {total_surprise:.2f}, and the best token, with the surprise"
            f" {-math.log(max(chosen)):.2f}, is the nearest to it: it comes first"
        )
        assert come_before >= 0.5, (
            f"the tokens that come before the best one hold {come_before:.2f} together, so it is"
            " still"
            " needed for 0.5"
        )


# -------------------------------------------------------------------------------- task 3


@torch.no_grad()
def planted_batch(
    model: Any,
    rows: list[list[int]],
    n: int,
    pad: int,
    read: str,
    counted: str,
    later: str,
) -> Tensor:
    """The new tokens as some mistakes would write them, without an end."""
    width = max(len(row) for row in rows)
    lengths = torch.tensor([[len(row)] for row in rows])  # (B, 1)
    feed = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask: Tensor | None = (torch.arange(width) < lengths).long()
    places = torch.arange(width).expand(len(rows), width)
    newest = lengths - 1 if read == "own" else torch.full_like(lengths, width - 1)
    goes_on = {
        "tokens": lengths,
        "padding": torch.full_like(lengths, width),
        "ahead": lengths + 1,
        "stands": lengths - 1,
    }[counted]
    cache = KVCache(width + n)
    new: list[Tensor] = []
    for step in range(n):
        logits = model(feed, position_ids=places, attention_mask=mask, cache=cache).logits
        new.append(logits.take_along_dim(newest[..., None], dim=1)[:, 0].argmax(-1))
        feed = new[-1][:, None]
        newest = torch.zeros_like(newest)
        places = goes_on if counted == "stands" else goes_on + step
        mask = (
            None
            if later == "none" or mask is None
            else F.pad(mask, (0, 1), value=int(later == "seen"))
        )
    return torch.stack(new, dim=1)


BATCH_SLIPS = {
    "last": (
        "the first new token of a short row comes from the logits of its padding: take those of the"
        " row's own newest token"
    ),
    "padding": (
        "the positions of the new tokens count the padding: a row goes on with the number of its"
        " own tokens"
    ),
    "ahead": "the positions of the new tokens leave one out: behind position 1 comes 2",
    "stands": "the position of the new tokens does not go on",
    "hidden": "the mask gets a 0 for each new token, so that later ones cannot see it",
    "none": "the mask is given for the prompt only, so that later tokens see the padding",
}


def which_slips(
    found: list[list[int]], model: Any, rows: list[list[int]], n: int, stop: int, pad: int
) -> str:
    """The fewest mistakes that write the same tokens, up to the first stop of each row."""
    choices = itertools.product(
        ("own", "last"), ("tokens", "padding", "ahead", "stands"), ("seen", "hidden", "none")
    )
    for choice in sorted(choices, key=lambda names: sum(name in BATCH_SLIPS for name in names)):
        tokens = planted_batch(model, rows, n, pad, *choice).tolist()
        ends = [row.index(stop) + 1 if stop in row else n for row in tokens]
        if all(
            a[:end] == b[: min(end, len(a))] for a, b, end in zip(found, tokens, ends, strict=True)
        ):
            return "; ".join(BATCH_SLIPS[name] for name in choice if name in BATCH_SLIPS)
    return "check the first new token, the positions, and the mask"


def written_alone(model: Any, row: list[int], n: int, stop: int) -> list[int]:
    """The new tokens of one prompt that has no company."""
    ids = generate(model, torch.tensor([row]), max_new_tokens=n, stop_token_ids=[stop])
    return ids[0, len(row) :].tolist()


def check_batch(
    generate_batch: Answer,
    name: str,
    model: Any,
    rows: list[list[int]],
    n: int,
    stop: int,
    pad: int,
) -> None:
    """Task 3: each row as if it were alone, up to its stop token, and padding behind it."""
    given = [list(row) for row in rows]
    # it makes every call slow
    alone_only: AbstractContextManager[None] = (
        forbid(*GENERATE) if len(rows) == 1 else nullcontext()
    )
    with case(name), alone_only, inputs_of(model) as calls:
        found = generate_batch(model, rows, n, stop, pad)
    with case(name):
        assert rows == given, "your code changed the lists in `rows`"
        _check_first_call(calls, rows)
        right = [written_alone(model, row, n, stop) for row in rows]
        steps = max(map(len, right))
        assert isinstance(found, Tensor) and found.ndim == 2 and len(found) == len(rows), (
            "expected a tensor with a row for each prompt"
        )
        assert found.dtype == torch.int64, f"the dtype is {found.dtype}, expected torch.int64"
        found = found.tolist()
        for i, (mine, expected) in enumerate(zip(found, right, strict=True)):
            first = next(
                (j for j, (a, b) in enumerate(zip(mine, expected, strict=False)) if a != b), None
            )
            if first is not None:
                others = [j for j, row in enumerate(right) if j != i and mine[: len(row)] == row]
                assert not others, (
                    f"row {i} holds what belongs to row {others[0]}: keep the order of the prompts"
                )
                _explain_difference(i, first, mine, expected, rows, stop, pad)
                said = (
                    f"row {i} differs from the same prompt alone from new token {first} on:"
                    f" {mine[: first + 3]} against {expected[: first + 3]}"
                )
                raise AssertionError(f"{said}. {which_slips(found, model, rows, n, stop, pad)}")
            _check_end(i, mine, expected, steps, stop, pad)


def _check_first_call(calls: list[Tensor], rows: list[list[int]]) -> None:
    """All prompts together, with the padding on the right."""
    assert calls and len(calls[0]) == len(rows), (
        f"the first call of the model must read all {len(rows)} prompts together"
    )
    read = calls[0].tolist()
    for row in rows:
        assert any(ids[: len(row)] == row for ids in read), (
            f"the first call reads {read}, where no row begins with the prompt {row}: the padding"
            " stays on the right here"
        )


@contextmanager
def inputs_of(model: Any) -> Iterator[list[Tensor]]:
    """The ids of each call of `model`."""
    calls: list[Tensor] = []

    def note(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append((positional[0] if positional else named["input_ids"]).clone())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _explain_difference(
    i: int,
    first: int,
    mine: list[int],
    alone: list[int],
    rows: list[list[int]],
    stop: int,
    pad: int,
) -> None:
    """An AssertionError for the reasons that the tokens themselves give away."""
    assert (alone[first], mine[first]) != (stop, pad), (
        f"row {i}: the stop token {stop} itself is one of the new tokens; {pad} comes after it"
    )
    assert any(token != pad for token in mine[first:]) or pad not in alone[:first], (
        f"row {i} has ended before its stop token: the model may write {pad} itself; only {stop}"
        " ends a row"
    )
    if any(pad in row for row in rows):
        raise AssertionError(
            f"row {i} differs from the same prompt alone, and {pad} is a token of a prompt here:"
            " the mask must come from the lengths of the rows, and not from `ids != pad`"
        )


def _check_end(i: int, mine: list[int], alone: list[int], steps: int, stop: int, pad: int) -> None:
    """Nothing but padding after the stop token, up to the end of the longest row."""
    assert len(mine) >= len(alone), (
        f"row {i} has {len(mine)} new tokens, alone it writes {len(alone)}: one row's stop must"
        " not end the others"
    )
    after = mine[len(alone) :]
    assert all(token == pad for token in after), (
        f"row {i} goes on writing after its stop token {stop}: {after[:4]}, expected only {pad}"
    )
    assert len(mine) == steps, f"{len(mine)} steps, but after {steps} all rows have ended"


LEARNED: dict[str, Any] = dict(position_type="learned", max_position_embeddings=64)


def check_batches(generate_batch: Answer) -> None:
    """Task 3: the batches of the visible test."""
    three = [[7, 3, 9, 1, 4], [11, 2], [5, 6, 1]]
    for name, rows, pad in (
        ("one prompt", three[1:2], 0),
        ("three prompts", three, 0),
        ("the model writes 20, which is also the padding", three[:2], 20),
        ("a prompt with 2, which is also the padding, the shorter prompt first", three[1::-1], 2),
    ):
        model = random_model(4, **LEARNED)
        check_batch(generate_batch, f"Task 3, {name}", model, rows, 6, 25, pad)


# -------------------------------------------------------------------------------- task 4


def places_of(text: str, stops: list[str]) -> list[tuple[int, int]]:
    """Where the stops begin and end: of each, the one that is complete first, and no overlaps."""
    found: list[tuple[int, int]] = []
    behind = 0  # the last one
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[behind:end].endswith(stop)]
        if starts:
            found.append((min(starts), end))
            behind = end
    return found


def text_before(text: str, stops: list[str], times: int) -> tuple[str, bool]:
    """The text before stop number `times`, and whether there is one."""
    found = places_of(text, stops)
    return (text[: found[times - 1][0]], True) if len(found) >= times else (text, False)


def may_be_shown(text: str, stops: list[str]) -> str:
    """What of a text without its last stop is certain, whatever follows."""
    behind = max((end for _, end in places_of(text, stops)), default=0)
    for start in range(behind, len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start]
    return text


def check_stream(
    stream_until: Answer, pieces: list[bytes], stops: list[str], times: int = 1
) -> None:
    """Task 4: the text up to stop number `times`, never too early and never too late."""
    name = f"pieces {pieces}, stops {stops}, times {times}"
    got: list[str] = []
    shown: list[str] = []
    asked: list[bytes] = []

    def feed() -> Iterator[bytes]:
        for piece in pieces:
            asked.append(piece)
            yield piece
            shown.append("".join(got))

    yielded = stream_until(feed(), list(stops), times)
    assert yielded is not None and not isinstance(yielded, (str, list)), (
        f"stream_until returned {type(yielded).__name__}, expected a generator: use yield"
    )
    for text in yielded:
        assert isinstance(text, str), f"{name}: you yield {type(text).__name__}, expected texts"
        got.append(text)
    _check_text(name, "".join(got), pieces, stops, times)
    _check_timing(name, pieces, stops, times, shown, asked)


def _check_text(name: str, found: str, pieces: list[bytes], stops: list[str], times: int) -> None:
    """All that was shown, joined."""
    whole = b"".join(pieces).decode("utf-8", "replace")
    right, has_stop = text_before(whole, stops, times)
    said = f"{name}: the joined text is {found!r}, expected {right!r}"
    if times > 1:
        assert found == right or found != text_before(whole, stops, 1)[0], (
            f"{said}. That is the text before the first stop string; it takes {times} to end it"
        )
        places = places_of(right, stops)
        kept = [right[a:b] for a, b in pairwise((0, *itertools.chain(*places), len(right)))][::2]
        assert found == right or found != "".join(kept), (
            f"{said}. A stop string that doesn't end the text is shown, like any other text"
        )
    assert not (has_stop and found == right + "\ufffd"), (
        f"{said}. After the stop string nothing comes, no left-over bytes either"
    )
    assert found == right or found != right.replace("\ufffd", ""), (
        f"{said}. Bytes that aren't valid UTF-8 become U+FFFD, those left over at the end too"
    )
    assert found.count("\ufffd") <= right.count("\ufffd"), (
        f"{said}. A character was cut: its bytes came in two pieces, keep one decoder for all of"
        " them"
    )
    assert not (len(found) < len(whole) and any(found == right + stop for stop in stops)), (
        f"{said}. The stop string itself is left out"
    )
    assert not (has_stop and found.startswith(right) and len(found) > len(right)), (
        f"{said}. The stop string was missed, or a later or shorter one was taken: it may begin in"
        " one piece and end in another"
    )
    assert not (has_stop and right.startswith(found) and found != right), (
        f"{said}. The stop string that is complete first counts, and of two the longer; nothing"
        " before it is lost"
    )
    assert not (right.startswith(found) and found != right), (
        f"{said}. At the end nothing may be held back any more: neither text nor bytes"
    )
    assert found == right, said


def _check_timing(
    name: str,
    pieces: list[bytes],
    stops: list[str],
    times: int,
    shown: list[str],
    asked: list[bytes],
) -> None:
    """What was shown after each piece, and how many pieces were asked for."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    so_far = ""
    for i, piece in enumerate(pieces):
        so_far += decoder.decode(piece)
        if text_before(so_far, stops, times)[1]:
            assert len(asked) <= i + 1, (
                f"{name}: after piece {i} the stop string is complete, but you asked for another"
                " piece"
            )
            break
        certain = may_be_shown(so_far, stops)
        early = shown[i]
        assert len(early) <= len(certain), (
            f"{name}: after piece {i} {early!r} was shown, too early: the end of it may begin a"
            " stop string"
        )
        assert len(early) == len(certain), (
            f"{name}: after piece {i} only {early!r} was shown, too late: {certain!r} is certain"
        )


def all_cuts(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut `data` into pieces."""
    for chosen in itertools.product((False, True), repeat=max(len(data) - 1, 0)):
        ends = [0, *(i + 1 for i, cut in enumerate(chosen) if cut), len(data)]
        yield [data[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def check_streams(stream_until: Answer) -> None:
    """Task 4: the streams of the visible test."""
    with case("Task 4"), forbid(*STREAM):
        check_stream(stream_until, [b"one ", b"two", b" three"], [])
        check_stream(stream_until, [b"one S", b"TO", b"P two"], ["STOP"])
        check_stream(stream_until, [b"one ST", b"ART", b" two"], ["STOP"])
        check_stream(stream_until, [b"na\xc3", b"\xafve"], ["x"])
        check_stream(stream_until, [b"aab", b"aa", b"baac", b"d"], ["aabaac"])
        check_stream(stream_until, [b"the end ST"], ["STOP"])
        check_stream(stream_until, [b"a\xff", b"b\xf0\x9f"], ["x"])
        check_stream(stream_until, [b"aSTbST"], ["ST"])
        check_stream(stream_until, [b"abcd"], ["bcd", "c"])
        check_stream(stream_until, [b"xabc"], ["bc", "abc"])
        check_stream(stream_until, [b"axb a.b"], ["a.b"])
        check_stream(stream_until, [b"one\n\ntwo\n", b"\nthree\n\n", b"four"], ["\n\n"], 3)
        check_stream(stream_until, [b"a.b!c.d"], [".", "!"], 2)
        check_stream(stream_until, [b"aaa", b"aab"], ["aa", "ab"], 3)
        for text, stops in (
            ("aébSTa", ["ST"]),
            ("aabcaac", ["aac", "b"]),
            ("xabc", ["abc", "bd"]),
            ("xabc", ["bd", "abc"]),
        ):
            for pieces in all_cuts(text.encode()):
                check_stream(stream_until, pieces, stops)


# -------------------------------------------------------------------------------- task 5


@torch.no_grad()
def summed_log_p(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """The log-probability of each of `tokens` after the prompt."""
    log_p = model(torch.tensor([prompt + tokens])).logits[0].double().log_softmax(-1)
    return [log_p[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens)]


@torch.no_grad()
def kept_beams(
    model: Any, prompt: list[int], n: int, k: int, apart: bool = False
) -> list[tuple[float, list[int]]]:
    """All beams by plain lists, best first; `apart` lets each beam choose for itself."""
    held: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(n):
        log_p = (
            model(torch.tensor([prompt + tokens for _, tokens in held]))
            .logits[:, -1]
            .log_softmax(-1)
            .tolist()
        )
        nexts = [
            [(score + p, [*tokens, i]) for i, p in enumerate(row)]
            for (score, tokens), row in zip(held, log_p, strict=True)
        ]
        if apart and len(held) > 1:
            held = [max(row) for row in nexts]
        else:
            held = sorted(sum(nexts, []), reverse=True)[:k]
    return sorted(held, reverse=True)


def check_beams(
    beam_search: Answer,
    name: str,
    model: Any,
    prompt: list[int],
    n: int,
    k: int,
    best: tuple[float, list[int]] | None = None,
) -> None:
    """Task 5: the tokens and the log-probability of the best beam."""
    with case(name):
        found = beam_search(model, list(prompt), n, k)
    with case(name):
        assert isinstance(found, tuple | list) and len(found) == 2, (
            f"beam_search returned {found!r:.80}, expected a pair: the tokens, and their"
            " log-probability"
        )
        tokens = [int(x) for x in numbers(found[0], "the first result")]
        [score] = numbers([found[1]], "the second result")
        assert tokens[: len(prompt)] != prompt or len(tokens) == n, (
            "the tokens begin with the prompt; return only the new ones"
        )
        assert len(tokens) == n, f"{len(tokens)} new tokens, expected {n}"
        assert min(tokens) >= 0 and max(tokens) < model.config.vocab_size, (
            f"the tokens {tokens} are not ids: how do you find the token in the joined row?"
        )
        right_score, right = best or kept_beams(model, prompt, n, k)[0]
        said = f"{tokens} with {score:.4f}, expected {right} with {right_score:.4f}"
        parts = summed_log_p(model, prompt, tokens)
        _check_log(said, score, parts)
        if tokens == right:
            _check_sum(said, score, parts)
        else:
            _explain_tokens(said, score, right_score, tokens, parts, model, prompt, k)
        assert tokens == right, (
            f"{said}. Keep the {k} best of all candidates at each step, by the summed"
            " log-probability"
        )
        assert near(score, right_score), (
            f"{said}. The tokens are right; sum the log-probabilities of the new tokens, from"
            " log_softmax"
        )


def near(score: float, value: float) -> bool:
    return abs(score - value) < 1e-3


def _check_log(said: str, score: float, parts: list[float]) -> None:
    """The score is the logarithm of a probability."""
    assert not near(score, math.exp(sum(parts))), (
        f"{said}. Yours is the probability, its logarithm was asked"
    )
    assert not near(score, -sum(parts)), (
        f"{said}. The sign is wrong: the logarithm of a probability is negative"
    )
    assert score <= 0, (
        f"{said}. A log-probability is never positive: sum what log_softmax gives, no"
        " probabilities and no logits"
    )


def _check_sum(said: str, score: float, parts: list[float]) -> None:
    """The score is the sum over all new tokens."""
    n = len(parts)
    assert n == 1 or not near(score, sum(parts) / n), (
        f"{said}. Your score is divided by the length; the sum was asked"
    )
    assert n == 1 or not near(score, sum(parts[1:])), (
        f"{said}. The first token's log-probability is missing, from the last logits of the prompt"
    )
    assert n == 1 or not near(score, parts[-1]), (
        f"{said}. This is the last token's log-probability alone"
    )


def _explain_tokens(
    said: str,
    score: float,
    right_score: float,
    tokens: list[int],
    parts: list[float],
    model: Any,
    prompt: list[int],
    k: int,
) -> None:
    """Which slip leads to these tokens."""
    n = len(tokens)
    vocabulary = model.config.vocab_size
    assert k <= vocabulary or tokens != kept_beams(model, prompt, n, vocabulary)[0][1], (
        f"{said}. That is what {vocabulary} beams find, one for each token of the vocabulary. You"
        f" may keep {k}: from the second step on, all beams together have more candidates than one"
    )
    ids = generate(model, torch.tensor([prompt]), max_new_tokens=n)
    greedy = ids[0, len(prompt) :].tolist()
    assert k == 1 or tokens != greedy, (
        f"{said}. That is the greedy text: are your {k} beams {k} copies, or do you forget"
        " what a beam has scored before?"
    )
    assert tokens != kept_beams(model, prompt, n, k, apart=True)[0][1], (
        f"{said}. Each beam chooses for itself; the candidates of all must compete together"
    )
    kept = [beam for _, beam in kept_beams(model, prompt, n, k)]
    worse = near(score, sum(parts)) and score < right_score - 1e-3
    assert not (worse and k > 1 and tokens in kept), (
        f"{said}. It is one of the beams, but not the best: topk puts the best first"
    )
    assert near(score, sum(parts)), (
        f"{said}. The score doesn't fit the tokens, {sum(parts):.4f}: does the history"
        " of a beam move with its score?"
    )


def check_searches(beam_search: Answer) -> None:
    """Task 5: one beam, three beams, and enough beams to find the best of all texts."""
    best_first = random_model(2)
    check_beams(beam_search, "Task 5, one beam is greedy", best_first, [3, 1, 4], 4, 1)
    check_beams(beam_search, "Task 5, 3 beams", best_first, [3, 1, 4], 4, 3)
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))  # all 64 texts of 3 tokens
    for seed, prompt in ((15, [0, 2]), (2, [0, 1])):
        few = random_model(seed, vocab_size=4)
        with torch.no_grad():
            texts = torch.cat((torch.tensor([prompt]).expand(64, 2), every), dim=1)
            of_all = few(texts).logits[:, 1:-1].log_softmax(-1)
        of_all = of_all.gather(2, every[..., None]).sum(dim=(1, 2))
        best = (of_all.max().item(), every[of_all.argmax()].tolist())
        name = f"Task 5, 16 beams of 4 tokens after {prompt} find the best of all"
        check_beams(beam_search, name, few, prompt, 3, 16, best=best)


def check_uses(answers: Answers) -> None:
    """Task 5: search or chance, for five purposes."""
    with case("Task 5, uses"):
        [uses] = written(answers, "uses")
        assert isinstance(uses, dict) and set(uses) == set("ABCDE"), (
            f'uses is {uses!r}, expected a dict with "A" to "E"'
        )
        assert set(uses.values()) <= {
            "beam",
            "sample",
        }, f'the values are {sorted(map(str, set(uses.values())))}, expected "beam" or "sample"'
        reasons = {
            "A": (
                "beam",
                "a sentence of a manual has few right translations, and a surprise in it is a"
                " mistake",
            ),
            "B": ("sample", "the most probable story is dull and repeats itself"),
            "C": (
                "sample",
                "a search returns one text however often you ask; ten captions need chance",
            ),
            "D": ("beam", "one text is right, what was said, so find the most probable"),
            "E": ("sample", "texts that must not sound alike need chance"),
        }
        for letter, (way, reason) in reasons.items():
            assert uses[letter] == way, f"{letter}: {reason}"


# -------------------------------------------------------------------------------- task 6


def looked_up(ids: list[int], n: int) -> list[int]:
    """The draft, by listing all places."""
    places = [i for i in range(len(ids) - 2) if (ids[i], ids[i + 1]) == (ids[-2], ids[-1])]
    return [ids[j] for j in range(places[-1] + 2, len(ids))][:n] if places else []


def check_lookup(lookup: Answer, ids: list[int], n: int, why: str) -> None:
    before = list(ids)
    with case(f"lookup({before}, {n})"):
        found = lookup(ids, n)
    right = looked_up(before, n)
    assert ids == before, "lookup changed its argument"
    assert isinstance(found, list), f"lookup({before}, {n}) returned {found!r}, expected a list"
    assert found == right, f"lookup({before}, {n}) is {found}, expected {right}: {why}"


def check_lookups(lookup: Answer) -> None:
    """Task 6: the last earlier place of the newest two."""
    with case("Task 6, lookup"):
        check_lookup(
            lookup,
            [1, 2, 3, 4],
            3,
            "3, 4 is new: the newest two themselves do not count as an earlier place",
        )
        check_lookup(
            lookup,
            [0, 8, 1, 2, 3, 8, 1],
            2,
            "2, 3 followed 8, 1, and n is 2. The draft begins behind the two, it does not repeat"
            " them;"
            " the newest two themselves do not count as an earlier place",
        )
        check_lookup(
            lookup,
            [8, 1, 2, 3, 4, 8, 1],
            3,
            "2, 3, 4 followed 8, 1, and n is 3; the earlier place may be the very first",
        )
        check_lookup(lookup, [8, 1, 2, 3, 4, 8, 1], 1, "at most n tokens")
        check_lookup(
            lookup, [1, 2, 3, 1, 2, 4, 1, 2], 1, "the last earlier place counts, not the first"
        )
        check_lookup(lookup, [1, 2, 9, 1, 2], 5, "where fewer than n followed, return these")
        check_lookup(lookup, [5, 5, 5], 3, "places may overlap")
        check_lookup(lookup, [1, 2, 3, 2], 2, "both tokens must agree, in their order")
        check_lookup(lookup, [11, 2, 3, 1, 2], 2, "11, 2 is another pair than 1, 2")
        check_lookup(lookup, [7], 2, "fewer than two tokens give an empty list")
        check_lookup(lookup, [], 2, "fewer than two tokens give an empty list")


def fewest_calls(prompt: list[int], new: list[int], n: int) -> int:
    """How many calls these new tokens take, when drafts come from the text."""
    ids = list(prompt)
    end = len(prompt) + len(new)
    calls = 0
    whole = prompt + new
    while len(ids) < end:
        drafts = looked_up(ids, n) if len(ids) > 1 else []
        kept = next(
            (
                i
                for i, pair in enumerate(zip(drafts, whole[len(ids) :], strict=False))
                if pair[0] != pair[1]
            ),
            len(drafts),
        )
        ids = whole[: len(ids) + kept + 1]
        calls += 1
    return calls


def _watching(seen: list[int]) -> Callable[..., None]:
    """A hook that notes how many tokens each call reads, and checks where it begins."""

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        places = kwargs.get("position_ids")
        cache = kwargs.get("cache")
        seen.append(ids.shape[1])
        if cache is not None and places is not None:
            held = cache.length
            assert ids.shape[1] > 0, (
                f"call {len(seen)} reads no token: the cache holds {held} positions, with refused"
                " drafts among them. Take them out with `truncate`, so that it holds one position"
                " less than the text has tokens"
            )
            first = int(places.flatten()[0])
            assert first != 0 or held == 0, (
                f"call {len(seen)} begins at position 0, but the cache holds {held} positions:"
                " positions go on from there"
            )
            assert first >= held, (
                f"call {len(seen)} begins at position {first}, but the cache holds {held}"
                " positions: the refused drafts are still in it"
            )
            assert first == held, (
                f"call {len(seen)} begins at position {first}, but the cache holds only {held}"
                " positions"
            )

    return watch


def check_writing(
    write_with_lookup: Answer, name: str, model: Any, prompt: list[int], new: int, n: int
) -> None:
    """Task 6: the tokens of greedy decoding, from as few calls as the drafts allow."""
    seen: list[int] = []
    given = list(prompt)
    right = generate(model, torch.tensor([prompt]), max_new_tokens=new)[0, len(prompt) :].tolist()
    hook = model.register_forward_pre_hook(_watching(seen), with_kwargs=True)
    try:
        with case(name):
            found = write_with_lookup(model, prompt, new, n)
    finally:
        hook.remove()
    with case(name):
        assert prompt == given, "your code changed the list `prompt`"
        assert isinstance(found, tuple | list) and len(found) == 2, (
            f"write_with_lookup returned {found!r:.80}, expected a pair: the new tokens, and the"
            " number of calls"
        )
        tokens = [int(x) for x in numbers(found[0], "the first result")]
        [calls] = numbers([found[1]], "the second result")
        assert tokens[: len(prompt)] != prompt or len(tokens) <= new, (
            "the tokens begin with the prompt; return only the new ones"
        )
        assert tokens[:new] != right or len(tokens) == new, (
            f"{len(tokens)} new tokens, but {new} were asked: the last call may bring too many"
        )
        _check_tokens(tokens, right)
        _check_count(calls, seen, fewest_calls(prompt, right, n), n)


def _check_tokens(tokens: list[int], right: list[int]) -> None:
    """The tokens are those of greedy decoding."""
    wrong = next(
        (i for i, (a, b) in enumerate(itertools.zip_longest(tokens, right)) if a != b), None
    )
    assert wrong is None, (
        f"the tokens differ from greedy `generate` from token {wrong} on:"
        f" {tokens[wrong : wrong + 3]} against {right[wrong : wrong + 3]}. Is a draft kept"
        " behind one that was refused, or compared with the logits of the wrong place, or"
        " still in the cache after it was refused?"
    )


def _check_count(calls: float, seen: list[int], least: int, n: int) -> None:
    """The number of calls, and what each of them read."""
    assert calls == len(seen), (
        f"you report {calls:g} calls of the model, but it was called {len(seen)} times"
    )
    assert calls >= least, (
        f"{calls:g} calls, but these drafts take {least}: are there more than n drafts in a call?"
    )
    assert calls == least, (
        f"{calls:g} calls, but {least} are enough: every right draft saves one, and behind the"
        " last comes a free token"
    )
    assert not seen[1:] or max(seen[1:]) <= n + 1, (
        f"a later call reads {max(seen[1:])} tokens; with the cache it is the newest and at"
        f" most {n} drafts"
    )


def circle() -> Any:
    """A model without attention, whose greedy text runs in a circle."""
    model = random_model(26, num_layers=1)
    torch.nn.init.zeros_(model.layers[0].self_attn.o_proj.weight)
    return model


def check_writings(write_with_lookup: Answer) -> None:
    """Task 6: texts that run in circles, repeat themselves, and wander."""
    wandering = random_model(4, **LEARNED)
    repeats = [1, 11, 20, 17, 29, 18, 8, 12, 26, 1, 11]
    for name, model, prompt, new, n in (
        ("a text that runs in a circle", circle(), [1], 20, 4),
        ("a text with loops that end", random_model(5), [1, 2, 3], 30, 3),
        ("a prompt that repeats itself", circle(), repeats, 12, 4),
        ("a text that wanders", wandering, [4, 9, 4, 9, 4], 5, 4),
        ("a right draft behind a wrong one", random_model(2), [4, 9, 4, 9, 4], 30, 3),
    ):
        check_writing(write_with_lookup, f"Task 6, {name}", model, prompt, new, n)

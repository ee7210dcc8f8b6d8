"""The visible checks of exercise 07, mixture of experts: each says what is wrong with an answer."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_course.model.moe import MoE, Router, Routing, choose_experts
from llm_course.pages.checking import Answer, Answers, case, expect_number, forbid, written

Batches = list[tuple[Tensor, Tensor]]


def expect_named(actual: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Compare type, shape and dtype; `name` is what the student returned."""
    assert isinstance(actual, Tensor), (
        f"{name} is a {type(actual).__name__}, expected a tensor: does your code return its result?"
    )
    assert actual.shape == shape, (
        f"{name} has the shape {tuple(actual.shape)}, expected {tuple(shape)}"
    )
    assert actual.dtype == dtype, f"{name} is {actual.dtype}, expected {dtype}"


def is_near(actual: Tensor, other: Tensor, within: float) -> bool:
    """Whether no number is farther off than this; NaN is near to nothing."""
    return bool((actual - other).abs().max() < within)


def best(scores: Tensor, k: int) -> Tensor:
    """The k largest scores of each token, as a table (N, E) of zeros and ones."""
    return F.one_hot(scores.topk(k).indices, scores.shape[1]).sum(1)


# ------------------------------------------------------------------------------------------- task 1

SHARES = (6, 1, 2, 3)  # the exponentials of the token's logits
OUTPUTS = ((6, 0), (9, 9), (0, 30), (3, 12))  # of the four experts
CHOICES = ((0, 2), (0, 1), (2, 0), (1, 0))
MEANS = (0.4, 0.4, 0.2)


def check_typed(name: str, numbers: Any, right: Tensor, slips: Mapping[str, Any]) -> None:
    """`numbers` against `right`; `slips` says for wrong numbers how they came about."""
    try:
        typed = torch.as_tensor(numbers).double().flatten()
    except Exception:
        raise AssertionError(
            f"{name} is {numbers!r}, expected {len(right)} of your numbers"
        ) from None
    assert len(typed) == len(right), f"{name} has {len(typed)} numbers, expected {len(right)}"
    for slip, numbers_of_slip in slips.items():
        wrong = torch.as_tensor(numbers_of_slip).double().flatten()
        assert len(wrong) != len(typed) or not is_near(typed, wrong, 2e-3), f"{name}: {slip}"
    places = [i + 1 for i in range(len(right)) if not abs(typed[i] - right[i]) < 2e-3]
    where = (
        f" at place {', '.join(map(str, places))} of 1 to {len(right)}" if len(right) > 1 else ""
    )
    is_rounded = bool((typed - right).abs().max() < 6e-3)
    assert not places or not is_rounded, (
        f"{name}: right, but rounded too early; type fractions such as 2 / 3, or three decimals"
    )
    assert not places, (
        f"{name}: you have {[round(n, 3) for n in typed.tolist()]}, PyTorch gets something"
        f" else{where}"
    )


def check_token(answers: Answers) -> None:
    """Task 1: one token, four experts, k = 2."""
    names = ("weights", "result", "switch_result")
    assert set(names) <= answers.keys(), "type your numbers into the cell above and run it"
    weights, result, switch_result = written(answers, *names)
    p = torch.tensor(SHARES, dtype=torch.float64) / 12
    outputs = torch.tensor(OUTPUTS, dtype=torch.float64)
    kept, chosen = p.topk(2)
    scaled = kept / kept.sum()
    slips: dict[str, Any] = {
        "these are the probabilities among all four; scale the two chosen to the sum 1": kept,
        "larger one first": scaled.flip(0),
        "these are the shares of the logits; take the exponentials first": (
            torch.tensor([6, 3]).log() / math.log(18)
        ),
    }
    check_typed("weights", weights, scaled, slips)
    pair = outputs[chosen]
    slips = {
        "these are the probabilities as they are; here the weights sum to 1": kept @ pair,
        "you add the answers without their weights": pair.sum(0),
        "you added the answers of all four experts; the two others are not even computed": (
            p @ outputs
        ),
        "the weights are at the wrong experts": scaled.flip(0) @ pair,
        "this is the plain mean of the two answers": pair.mean(0),
    }
    check_typed("result", result, scaled @ pair, slips)
    slips = {
        "this is the result with scaled weights": scaled @ pair,
        "you added the answers of all four experts; only two are chosen in this form too": (
            p @ outputs
        ),
    }
    check_typed("switch_result", switch_result, kept @ pair, slips)


def check_batch(answers: Answers) -> None:
    """Task 1: four tokens, three experts, k = 2."""
    names = ("load", "loss", "bias")
    assert set(names) <= answers.keys(), "type your numbers into the cell above and run it"
    load, loss, bias = written(answers, *names)
    choices = torch.tensor(CHOICES)
    count = torch.bincount(choices.flatten()).double()
    mean = torch.tensor(MEANS, dtype=torch.float64)
    slips: dict[str, Any] = {
        "these are shares; the load counts choices": count / 8,
        "you count first choices only; a token's second choice is work too": torch.bincount(
            choices[:, 0], minlength=3
        ),
    }
    check_typed("load", load, count, slips)
    right = 3 * (count / 8 * mean).sum()
    slips = {
        "the factor E is missing": right / 3,
        "you divide the load by the four tokens; f is a share of the eight choices "
        "(Hugging Face has your number)": 2 * right,
        "divide the load by the eight choices first": 8 * right,
        "this is the value of an even load, and this load is not even": 1.0,
        "the probabilities are missing: this is the sum of the squared shares": (
            3 * (count / 8).square().sum()
        ),
        "you subtracted the shares; they are multiplied": 3 * (count / 8 - mean).abs().sum(),
    }
    check_typed("loss", loss, right[None], slips)
    off = count.mean() - count
    slips = {
        "the signs are the wrong way round: who has too much work must become *less* attractive": (
            -0.1 * off.sign()
        ),
        "only the sign counts, not how far the load is from the mean": 0.1 * off,
        "only the sign counts; these are shares": 0.1 * off / off.abs().max(),
        "experts below the mean go up as well": [-0.1, 0, 0],
        "the rate is missing": off.sign(),
        "compare with the mean load 8/3; nobody has exactly that": [-0.1, 0.0, 0.1],
    }
    check_typed("bias", bias, 0.1 * off.sign(), slips)


# ------------------------------------------------------------------------------------------- task 2


def check_route(
    route: Answer, logits: Tensor, k: int, norm: bool, bias: Tensor | None = None
) -> None:
    """Task 2: the experts that the bias has a say in, and the weights that know nothing of it."""
    N, E = logits.shape
    kept = logits.clone()
    kept_bias = None if bias is None else bias.clone()
    name = (
        f"{N} tokens, {E} experts, k={k}, norm_topk_prob={norm},"
        f" {'no bias' if bias is None else 'a bias'}, {logits.dtype}"
    )
    with case(f"Task 2, {name}"):
        with forbid(Router.forward, choose_experts):
            found = route(logits, k, norm) if bias is None else route(logits, k, norm, bias)
        assert torch.equal(logits, kept), "the logits have changed after the call: work on a copy"
        assert bias is None or kept_bias is not None and torch.equal(bias, kept_bias), (
            "the bias has changed after the call: work on a copy"
        )
        assert isinstance(found, tuple | list) and len(found) == 2, (
            f"expected two tensors, got {type(found).__name__}"
        )
        shift = torch.zeros(E) if bias is None else bias
        expect_named(found[0], (N, k), torch.int64, "expert_index")
        wide = logits.float() if logits.dtype != torch.float64 else logits
        _check_chosen(found[0], wide, shift)
        expect_named(found[1], (N, k), wide.dtype, "weights")
        _check_vanished(found[1], norm, wide.softmax(-1).gather(-1, found[0]))
        _check_route_weights(found[1], found[0], logits, shift, norm)


def _check_chosen(index: Tensor, wide: Tensor, shift: Tensor) -> None:
    """The k experts of each token."""
    N, E = wide.shape
    k = index.shape[1]
    assert ((index >= 0) & (index < E)).all(), f"expert_index holds numbers outside 0 to {E - 1}"
    table = F.one_hot(index, E).sum(1)
    p = wide.softmax(-1)
    right = best(p + shift, k)
    assert table.max() <= 1, "a token has chosen an expert twice"
    if torch.equal(table, right):
        return
    slips = {
        "the softmax runs over the tokens; it belongs to the last dimension, the experts": (
            wide.softmax(0) + shift
        ),
        "you chose without the bias": p,
        "the bias is added to the logits; it belongs to the probabilities": wide + shift,
        "the bias is subtracted; it is added": p - shift,
        "these are the *smallest* scores": -p - shift,
        "it is the bias alone that decides here; add it to the probabilities": shift.expand(N, E),
    }
    for slip, scores in slips.items():
        assert not torch.equal(table, best(scores, k)), f"other experts are chosen: {slip}"
    row = int((table != right).any(1).nonzero()[0])
    raise AssertionError(
        f"token {row} has the experts {sorted(index[row].tolist())}, expected"
        f" {right[row].nonzero().flatten().tolist()}, the {k} largest of probability + bias"
    )


def _check_vanished(weights: Tensor, norm: bool, chosen: Tensor) -> None:
    """What happens where all the chosen probabilities are 0 in float32."""
    assert not weights.isnan().any(), (
        "a weight is NaN: 0 divided by 0, because all the chosen probabilities have vanished. A"
        " softmax over the chosen logits gives the same weights without that division"
    )
    assert not norm or not (weights.sum(-1) < 1e-3).any(), (
        "the weights of a token are all 0: its chosen probabilities have vanished, and a small"
        " number added to the divisor does not bring them back. A softmax over the chosen"
        " logits needs no division"
    )
    even = weights[(chosen == 0).all(-1)] - 1 / weights.shape[-1]
    assert not norm or chosen.shape[-1] == 1 or not (even.abs() < 1e-6).any(), (
        "the weights of a token are all the same: its chosen probabilities have vanished, and a"
        " small number in their place is the same for all. A softmax over the chosen logits keeps"
        " them apart"
    )


def _check_route_weights(
    weights: Tensor, index: Tensor, logits: Tensor, shift: Tensor, norm: bool
) -> None:
    wide = logits.float() if logits.dtype != torch.float64 else logits
    p = wide.softmax(-1)
    plain = p.gather(-1, index)
    scaled = wide.gather(-1, index).softmax(-1)
    biased = (p + shift).gather(-1, index)
    expected = scaled if norm else plain
    largest = p.topk(index.shape[1]).values
    slips = {
        "they are not scaled to the sum 1": plain,
        "they sum to 1, but norm_topk_prob=False leaves them as they are": scaled,
        "they contain the bias; it acts on the choice only": biased,
        "they contain the bias, scaled; it acts on the choice only": (
            biased / biased.sum(-1, keepdim=True)
        ),
        "they come from logits plus bias; the bias acts on the choice only": (
            (wide + shift).gather(-1, index).softmax(-1)
        ),
        "they contain the bias inside the softmax; it acts on the choice only": (
            (wide + shift).softmax(-1).gather(-1, index)
        ),
        "a softmax of probabilities: take it of the logits": plain.softmax(-1),
        "the softmax was taken in half precision; convert the logits first": (
            logits.gather(-1, index).softmax(-1) if norm else logits.softmax(-1).gather(-1, index)
        ).to(wide.dtype),
        "they belong to the experts in another order than expert_index": (
            expected.sort(-1, descending=True).values
        ),
        "they are those of the k largest probabilities, "
        "not of the experts that the bias has chosen": (
            largest / largest.sum(-1, keepdim=True) if norm else largest
        ),
        "these are the logits": wide.gather(-1, index),
    }
    is_right = is_near(weights, expected, 1e-5)
    for slip, wrong in slips.items():
        assert is_right or not is_near(weights, wrong, 1e-5), f"the weights are wrong: {slip}"
    assert is_right, (
        f"the weights are wrong: token 0 has {[round(w, 3) for w in weights[0].tolist()]},"
        f" expected {[round(w, 3) for w in expected[0].tolist()]}"
    )


def check_route_gradient(route: Answer, logits: Tensor) -> None:
    """Task 2: the weights stay in the graph."""
    with case("Task 2, gradients"):
        weights = route(logits.clone().requires_grad_(), 2)[1]
        assert weights.requires_grad, "no gradient reaches the logits from the weights"


CASES = {  # E, k, norm_topk_prob, and whether the chosen experts have the same output
    "a": (4, 1, True, False),
    "b": (4, 1, False, False),
    "c": (4, 2, True, False),
    "d": (4, 2, True, True),
    "e": (4, 2, False, True),
    "f": (1, 1, False, False),
}
THINK_AGAIN = {
    "a": "one weight that is scaled to the sum 1 is always 1",
    "b": "the weight is a probability, which moves with the logit",
    "c": "the two weights share the sum 1, and different answers make the share matter",
    "d": "with equal answers only the *sum* of the two weights reaches the output",
    "e": "with equal answers only the *sum* of the two weights reaches the output; is it"
    " constant here?",
    "f": "what is the softmax of a single number?",
}


def largest_gradient(E: int, k: int, norm: bool, same_outputs: bool) -> float:
    """The largest gradient of a logit, for one token with logits and outputs made up."""
    logits = torch.arange(E).double().mul(0.7).requires_grad_()
    kept = logits[-k:].softmax(0) if norm else logits.softmax(0)[-k:]  # the last k are the largest
    outputs = torch.ones(k).double() if same_outputs else torch.arange(k).double() + 1
    (kept @ outputs).backward()
    return 0.0 if logits.grad is None else logits.grad.abs().max().item()


def check_learns(answers: Answers) -> None:
    """Task 2: the cases in which the loss of the model teaches the router."""
    assert "learns" in answers, "type the letters into the cell above and run it"
    learns = answers["learns"]
    try:
        letters = {letter.strip().lower() for letter in learns}
    except Exception:
        raise AssertionError(
            f'learns is {learns!r}, expected a set of letters such as {{"a", "b"}}'
        ) from None
    assert letters <= set(CASES), (
        f"learns holds {sorted(letters - set(CASES))}; the letters are a to f"
    )
    for letter, options in CASES.items():
        assert (largest_gradient(*options) > 1e-9) == (letter in letters), (
            f'learns: "{letter}" is on the wrong side. Think again: {THINK_AGAIN[letter]}'
        )


# ------------------------------------------------------------------------------------------- task 3

Calls = list[tuple[int, Tensor]]  # the number of an expert, and the rows that it got


def spying_expert(e: int, matrix: Tensor, calls: Calls) -> Callable[[Tensor], Tensor]:
    """Expert number e, which keeps what it is called with."""

    def expert(rows: Tensor) -> Tensor:
        calls.append((e, rows.detach().clone()))
        return torch.tanh(rows @ matrix) + e

    return expert


def check_dispatch(
    dispatch: Answer,
    name: str,
    expert_index: Tensor,
    E: int,
    C: int = 3,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Task 3: what the experts get, what comes back, and its gradient."""
    N, k = expert_index.shape
    g = torch.Generator().manual_seed(N + E)
    x = torch.randn(N, C, generator=g).to(dtype).requires_grad_()
    weights = torch.rand(N, k, generator=g).to(dtype).requires_grad_()
    matrices = torch.randn(E, C, C, generator=g).to(dtype)
    calls: Calls = []
    kept = x.detach().clone(), expert_index.clone(), weights.detach().clone()
    with case(f"Task 3, {name}"):
        experts = [spying_expert(e, matrix, calls) for e, matrix in enumerate(matrices)]
        found = dispatch(x, expert_index, weights, experts)
        same = [torch.equal(a, b) for a, b in zip((x, expert_index, weights), kept, strict=True)]
        assert all(same), "x, expert_index or weights has changed after the call"
        names = [e for e, _ in calls]
        assert len(set(names)) == len(names), (
            f"an expert was called {max(map(names.count, names))} times; one call must serve all"
            " its tokens"
        )
        for e in range(E):
            _check_tokens_of(e, E, calls, expert_index, kept[0])
        expect_named(found, (N, C), dtype, "the result")
        _check_weighted_sum(found.detach(), x, expert_index, weights, matrices)
        _check_dispatch_gradient(found, x, expert_index, weights, matrices, g)


def _check_tokens_of(e: int, E: int, calls: Calls, expert_index: Tensor, x: Tensor) -> None:
    """Expert e gets the tokens that have chosen it, those that chose it first in front."""
    expected = (expert_index.T == e).nonzero()[:, 1].tolist()
    rows = torch.cat([rows for number, rows in calls if number == e] or [x[:0]])
    got = []
    for row in rows:
        places = (x == row).all(1).nonzero()
        got.append(int(places[0]) if len(places) else -1)
    if got == expected:
        return
    assert sorted(got) != sorted(expected), (
        f"expert {e} got the right tokens, but in the order {got}, expected {expected}: first those"
        " that chose it first, then those that chose it second"
    )
    used = set(expert_index.flatten().tolist())
    idle = [other for other in range(E) if other not in used]
    hint = "the choices lie column by column, so number i belongs to token i % N"
    if len(got) != len(expected) and idle:
        hint = (
            f"expert {idle[0]} is idle; its block is empty, and must not be left out of the counts"
        )
    elif len(got) != len(expected):
        hint = "its block has the wrong length: count the choices of each expert"
    raise AssertionError(f"expert {e} got the tokens {got}, expected {expected}: {hint}")


def _every_output(x: Tensor, matrices: Tensor) -> Tensor:
    """What each expert makes of each token: (N, E, C)."""
    return torch.stack([torch.tanh(x @ matrix) + e for e, matrix in enumerate(matrices)], 1)


def _check_weighted_sum(
    found: Tensor, x: Tensor, expert_index: Tensor, weights: Tensor, matrices: Tensor
) -> None:
    """The result, when every expert has its tokens."""
    N, k = expert_index.shape
    order = expert_index.T.flatten().argsort(stable=True)
    token = torch.arange(N)[:, None]
    own = _every_output(x.detach(), matrices)[token, expert_index].transpose(0, 1)  # (k, N, C)
    in_blocks = own.flatten(0, 1)[order]  # in the order of the experts
    w = weights.detach().T[..., None]
    right = (w * own).sum(0)
    slips = {
        "the answers never went back; sort them into the order of the tokens": (
            (w * in_blocks.view_as(own)).sum(0)
        ),
        "the order itself does not lead back; its inverse is order.argsort()": (
            (w * in_blocks[order].view_as(own)).sum(0)
        ),
        "back in order they lie column by column, all first choices in front": (
            (w.transpose(0, 1) * own.reshape(N, k, -1)).sum(1)
        ),
        "the answers are added without their weights": own.sum(0),
        "the answers are averaged without their weights": own.mean(0),
        "the weights are in sorted order, the answers are not": (
            (w.flatten()[order].view(k, N, 1) * own).sum(0)
        ),
        "the weighted answers are averaged; they are added": (w * own).mean(0),
        "only the first choice counts": w[0] * own[0],
    }
    is_right = is_near(found, right, 1e-4)
    for slip, wrong in slips.items():
        assert is_right or not is_near(found, wrong, 1e-4), (
            f"every expert has its tokens, but the result is wrong: {slip}"
        )
    assert is_right, (
        "every expert has its tokens, but the result is not the weighted sum of a token's own"
        " answers"
    )


def _check_dispatch_gradient(
    found: Tensor,
    x: Tensor,
    expert_index: Tensor,
    weights: Tensor,
    matrices: Tensor,
    g: torch.Generator,
) -> None:
    probe = torch.randn(found.shape, generator=g).to(found.dtype)
    assert found.requires_grad, "no gradient passes from the result to x and weights"
    gradients = torch.autograd.grad((found * probe).sum(), (x, weights), allow_unused=True)
    own = _every_output(x, matrices)[torch.arange(len(x))[:, None], expert_index]
    oracle = (weights[..., None] * own).sum(1)
    expected = torch.autograd.grad((oracle * probe).sum(), (x, weights))
    for what, ours, real in zip(("x", "weights"), gradients, expected, strict=True):
        assert ours is not None and torch.allclose(ours, real, atol=1e-4), (
            f"the result is right, but not the gradient of {what}"
        )


# ------------------------------------------------------------------------------------------- task 4


def check_sigmoid(
    router_class: Answer,
    N: int,
    C: int,
    E: int,
    k: int,
    norm: bool,
    biased: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Task 4: logits, experts and weights of a router with sigmoid scores."""
    torch.manual_seed(N + E)
    router = router_class(C, E, top_k=k, norm_topk_prob=norm).to(dtype)
    nn.init.normal_(router.weight)
    if biased:
        router.expert_bias.copy_((torch.rand(E) - 0.5).to(dtype))
    x = torch.randn(N, C).to(dtype)
    kept = router.expert_bias.clone()
    with case(
        f"Task 4, {N} tokens, {E} experts, top_k={k}, norm_topk_prob={norm},"
        f" {'a' if biased else 'no'} bias, {dtype}"
    ):
        found = router(x)
        assert torch.equal(router.expert_bias, kept), (
            "forward has changed expert_bias; only update_bias may"
        )
        assert isinstance(found, Routing), f"expected a Routing, got {type(found).__name__}"
        wide = torch.promote_types(dtype, torch.float32)
        logits = x.to(wide) @ router.weight.T.to(wide)
        expect_named(found.logits, (N, E), wide, "logits")
        _check_sigmoid_logits(found.logits, logits, (x @ router.weight.T).to(wide))
        expect_named(found.expert_index, (N, k), torch.int64, "expert_index")
        _check_sigmoid_choice(found.expert_index, logits, kept)
        expect_named(found.weights, (N, k), wide, "weights")
        right = _check_sigmoid_weights(found.weights, found.expert_index, logits, kept, norm)
        assert found.weights.requires_grad, "no gradient reaches the router from its weights"
        probe = torch.randn(N, k).to(wide)
        ours, real = (
            torch.autograd.grad((weights * probe).sum(), router.weight)[0]
            for weights in (found.weights, right)
        )
        assert torch.allclose(ours, real, atol=1e-4), (
            "the weights are right, but not their gradient: is something detached?"
        )


def _check_sigmoid_logits(found: Tensor, logits: Tensor, half: Tensor) -> None:
    """The logits; `half` are those in the type of x."""
    assert not torch.allclose(found, logits.sigmoid(), atol=1e-4), (
        "logits: these are the sigmoids; return the logits"
    )
    is_right = torch.allclose(found, logits, atol=1e-4)
    assert is_right or not torch.allclose(found, half, atol=1e-4), (
        "logits: computed in half precision; convert x and the weight first"
    )
    assert is_right, "logits: these are not x times the weight; is the bias in them?"


def _check_sigmoid_choice(index: Tensor, logits: Tensor, shift: Tensor) -> None:
    E = logits.shape[1]
    k = index.shape[1]
    score = logits.sigmoid()
    table = F.one_hot(index, E).sum(1)
    if torch.equal(table, best(score + shift, k)):
        return
    slips = {
        "you chose without the bias": score,
        "the bias is added to the logits; here it belongs to the sigmoids": logits + shift,
        "these scores are a softmax": logits.softmax(-1) + shift,
        "these are the smallest scores": -score - shift,
    }
    for slip, scores in slips.items():
        assert not torch.equal(table, best(scores, k)), f"other experts are chosen: {slip}"
    raise AssertionError("other experts are chosen than the largest of sigmoid + expert_bias")


def _check_sigmoid_weights(
    found: Tensor, index: Tensor, logits: Tensor, shift: Tensor, norm: bool
) -> Tensor:
    """The weights of the chosen experts; the right ones are returned."""
    score = logits.sigmoid()

    def part(numbers: Tensor) -> Tensor:
        return numbers.gather(-1, index)

    def scaled(numbers: Tensor) -> Tensor:
        return numbers / numbers.sum(-1, keepdim=True)

    right = scaled(part(score)) if norm else part(score)
    slips = {
        "they are not divided by their sum": part(score),
        "they are divided by their sum, but norm_topk_prob=False leaves them": scaled(part(score)),
        "they contain the bias; it acts on the choice only": part(score + shift),
        "they contain the bias, scaled; it acts on the choice only": scaled(part(score + shift)),
        "they are divided by the sum over *all* experts; take that of the chosen": part(
            scaled(score)
        ),
        "they are a softmax of the logits": part(logits).softmax(-1),
        "they are a softmax of the sigmoids; divide by the sum": part(score).softmax(-1),
        "they are a softmax over all experts": part(logits.softmax(-1)),
    }
    is_right = is_near(found, right, 1e-5)
    for slip, wrong in slips.items():
        assert is_right or not is_near(found, wrong, 1e-5), f"the weights are wrong: {slip}"
    assert is_right, (
        "the weights are not those of the chosen experts' sigmoids, in the order of expert_index"
    )
    return right


def leaning_router(
    N: int, C: int, E: int, k: int, lean: float, bias: float = 0.0, roll: int = 0
) -> tuple[Router, Tensor]:
    """A router with a favourite, and tokens."""
    torch.manual_seed(N + E)
    router = Router(C, E, top_k=k)
    x = torch.randn(N, C) + 1
    nn.init.normal_(router.weight, std=0.3)
    with torch.no_grad():
        router.weight[0] += lean
        router.weight.copy_(router.weight.roll(roll, 0))
    router.expert_bias += bias * torch.arange(E)
    return router, x


def even_router() -> tuple[Router, Tensor]:
    """A router that shares twelve tokens out evenly among four experts."""
    router = Router(4, 4, top_k=1)
    with torch.no_grad():
        router.weight.copy_(3 * torch.eye(4))
    return router, torch.eye(4).repeat(3, 1)


class HardRouter(Router):
    """Scores by the logits themselves."""

    def forward(self, x: Tensor) -> Routing:
        logits = x @ self.weight.T
        index = (logits + self.expert_bias).topk(self.top_k).indices
        return Routing(logits, index, logits[:, : self.top_k])


def hard_router() -> tuple[Router, Tensor]:
    """A router of another kind, and tokens."""
    torch.manual_seed(0)
    return HardRouter(3, 5, top_k=1), torch.randn(50, 3) + 2


def updates_needed(router: Any, x: Tensor, rate: float, limit: float, most: int) -> int | None:
    """How many updates balance the router, which keeps them; None if `most` are too few."""
    E = len(router.expert_bias)
    for updates in range(most + 1):
        with torch.no_grad():
            chosen = router(x).expert_index.flatten().tolist()
        count = torch.tensor([chosen.count(e) for e in range(E)])
        if count.max().item() <= limit * len(chosen) / E:
            return updates
        if updates < most:
            router.update_bias(count, rate=rate)
    return None


def check_balance(
    balance: Answer, name: str, router: Any, x: Tensor, *, rate: float, limit: float, most: int
) -> int | None:
    """Task 4: the number of updates, which is returned, and where the bias is after them."""
    oracle = copy.deepcopy(router)
    expected = updates_needed(oracle, x, rate, limit, most)
    start = router.expert_bias.clone()
    weight = router.weight.detach().clone()
    kept = x.clone()
    with case(f"Task 4, balance, {name}"):
        found = balance(router, x, rate=rate, limit=limit, most=most)
        assert torch.equal(router.weight, weight) and torch.equal(x, kept), (
            "the router's weight or x has changed; only the bias may"
        )
        moved = router.expert_bias - start
        real = oracle.expert_bias - start
        if expected is None:
            assert found is None, (
                f"after {most} updates the load is not balanced yet: expected None, got {found!r}"
            )
        else:
            assert found is not None, (
                f"balance returned None, expected {expected}: {_why_none(expected, moved, real)}"
            )
            number = expect_number(found, "what balance returned")
            assert number == expected, (
                f"balance returned {number:g}, expected {expected}: it looks before the first"
                f" update, and stops when the busiest expert has at most {limit} times the mean"
                " load"
            )
        assert torch.allclose(moved, real, atol=1e-6), (
            "the number of updates is right, but the bias has moved by"
            f" {[round(m, 3) for m in moved.tolist()]}, expected"
            f" {[round(m, 3) for m in real.tolist()]}: each update starts from the last bias, with"
            " the load that it gives, and none comes after the end"
        )
    return expected


def _why_none(expected: int, moved: Tensor, real: Tensor) -> str:
    """Why `balance` may have returned None where there is a number."""
    if expected == 0:
        return "nothing was to be done: an expert may have exactly `limit` times the mean load"
    if not moved.any():
        return "the bias has not moved: call update_bias, and return the number of updates"
    if torch.allclose(moved, real, atol=1e-6):
        return (
            "the bias is right: look after the last update too, and compare with the mean"
            " load N k / E"
        )
    return (
        "count the load anew before each update, pass `rate` on, and compare with the"
        " mean load N k / E"
    )


# ------------------------------------------------------------------------------------------- task 5


def loads_of(recorded: str) -> Tensor:
    """The loads of a training (rows, E), from the text of the cell."""
    return torch.tensor([[int(n) for n in row.split()] for row in recorded.splitlines()])


def experts_in_use(row: Sequence[float]) -> float:
    """The exponential of the entropy of the shares."""
    total = sum(row)
    return math.exp(-sum(n / total * math.log(n / total) for n in row if n > 0))


def first_of(collapsed: Sequence[bool]) -> int | None:
    """Where the unbroken run of True at the end begins."""
    first = len(collapsed)
    while first and collapsed[first - 1]:
        first -= 1
    return None if first == len(collapsed) else first


def check_collapse(collapse_row: Answer, name: str, loads: Tensor) -> None:
    """Task 5: the row from which on all are collapsed."""
    rows = loads.tolist()
    E = loads.shape[1]
    used = [experts_in_use(row) for row in rows]
    expected = first_of([u < E / 2 for u in used])
    kept = loads.clone()
    with case(f"Task 5, {name}"):
        found = collapse_row(loads)
        assert torch.equal(loads, kept), "the loads have changed after the call"
        assert not isinstance(found, bool), (
            f"collapse_row returned {found}, expected the number of a row, or None"
        )
        found = None if found is None else expect_number(found, "what collapse_row returned")
        if found == expected:
            return
        seen = (
            f"your numbers of experts in use should be {[round(u, 2) for u in used]} of {E}: print"
            f" yours; expected {expected}, got {'None' if found is None else f'{found:g}'}"
        )
        assert found != first_of([u < E / 2 + 1e-6 for u in used]), (
            f"{seen}. A row with exactly {E / 2:g} experts in use is not collapsed"
        )
        idle = _hint_at_nan(rows, used, found)
        assert found is not None, (
            f"{seen}. The last row is collapsed, "
            f"so there is such a row (number 0 is one, too){idle}"
        )
        if used[-1] >= E / 2:
            raise AssertionError(
                f"{seen}. The last row is not collapsed: from the row on *all* rows to the last"
                f" must be, so return None{idle}"
            )
        after = [i for i in range(int(found), len(rows)) if used[i] >= E / 2]
        assert not after, (
            f"{seen}. Row {after[-1]} is not collapsed; from the row on *all* rows to the last must"
            f" be{idle}"
        )
        raise AssertionError(
            f"{seen}. The first such row is an earlier one; experts in use are the exponential of"
            f" the entropy of the shares{idle}"
        )


def _hint_at_nan(rows: list[list[float]], used: list[float], found: float | None) -> str:
    """For who takes 0 * ln 0 for NaN, which is neither below nor above E / 2."""
    half = len(rows[0]) / 2
    nan = [min(row) == 0 for row in rows]
    misled = (
        first_of([bad or u < half for u, bad in zip(used, nan, strict=True)]),
        first_of([not bad and u < half for u, bad in zip(used, nan, strict=True)]),
    )
    if any(nan) and found in misled:
        return ". An expert without choices adds 0 to the entropy, not NaN"
    return ""


STORIES = {
    "never": "without any balance the collapse comes in the first steps, and stays",
    "always": "with the bias from the start most experts are in use in every row",
    "on late": "it starts like the one without a bias, and recovers after step 80",
    "off late": "it starts like the one with the bias, and row 6 is the first without it",
}


def check_stories(answers: Answers, recorded: Mapping[str, str]) -> None:
    """Task 5: which training had which bias."""
    assert "stories" in answers, "type the four letters into the cell above and run it"
    stories = answers["stories"]
    assert isinstance(stories, dict) and set(stories) == set(STORIES), (
        f"stories must be a dictionary with the keys {list(STORIES)}"
    )
    kinds = {(True, True): "always", (True, False): "off late", (False, True): "on late"}
    four = {}
    for letter, text in recorded.items():
        used = [experts_in_use(row) for row in loads_of(text).tolist()]
        four[kinds.get((used[3] > 4, used[9] > 4), "never")] = letter
    for description, why in STORIES.items():
        assert stories[description] == four[description], (
            f'stories: "{description}" is not {stories[description]!r}: {why}'
        )


def oracle_step(
    moe: Any,
    batches: Batches,
    rate: float,
    lr: float,
    *,
    aux: float = 1,
    mean: bool = True,
    bias: str = "whole",
    old: list[Tensor] | None = None,
    last: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """A step of gradient descent, written without an optimizer; the keywords plant mistakes."""
    losses = []
    loads = []
    for x, target in batches:
        y, stats = moe(x)
        losses.append((y - target).square().mean() + aux * stats.aux_loss)
        loads.append(stats.tokens_per_expert)
        if bias == "each":
            moe.gate.update_bias(stats.tokens_per_expert, rate=rate)
    loss = losses[-1] if last else torch.stack(losses).sum()
    if mean:
        loss = loss / len(losses)
    parameters = list(moe.parameters())
    gradients = list(torch.autograd.grad(loss, parameters))
    whole = torch.stack(loads).sum(0)
    with torch.no_grad():
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter -= lr * (gradient if old is None else gradient + old[i])
    if bias in ("whole", "last"):
        moe.gate.update_bias(whole if bias == "whole" else loads[-1], rate=rate)
    return whole, gradients


def two_steps(
    fresh: MoE, steps: list[Batches], rate: float, lr: float, *, stale: str = "", **planted: Any
) -> tuple[MoE, Tensor]:
    """The layer after both steps, and the last load. Before the first step all gradients are 1;
    `stale` says whether they are still there in the "first" step, or what was there in "all".
    """
    layer = copy.deepcopy(fresh)
    old = [torch.ones_like(parameter) for parameter in layer.parameters()]
    load = torch.empty(0)
    for number, batches in enumerate(steps):
        is_stale = stale == "all" or stale == "first" and number == 0
        load, new = oracle_step(layer, batches, rate, lr, old=old if is_stale else None, **planted)
        old = [before + now for before, now in zip(old, new, strict=True)]
    return layer, load


def check_step(
    training_step: Answer,
    pieces: int,
    N: int,
    E: int,
    k: int,
    *,
    seed: int,
    lr: float = 0.2,
    rate: float = 0.02,
) -> None:
    """Task 5: two steps over `pieces` micro-batches of N tokens."""
    torch.manual_seed(seed)
    moe = MoE(4, 6, num_experts=E, top_k=k, norm_topk_prob=False, router_aux_loss_coef=0.5)
    nn.init.normal_(moe.gate.weight)
    steps = [
        [(torch.randn(N, 4) + 0.5, torch.randn(N, 4)) for _ in range(pieces)] for _ in range(2)
    ]
    fresh = copy.deepcopy(moe)
    optimizer = torch.optim.SGD(moe.parameters(), lr=lr)
    for parameter in moe.parameters():
        parameter.grad = torch.ones_like(parameter)  # from before the first step
    seen: list[float] = []  # what backward has left behind when the layer is called

    def note(*_: Any) -> None:
        gradients = [p.grad for p in moe.parameters() if p.grad is not None]
        seen.append(sum(gradient.double().abs().sum().item() for gradient in gradients))

    moe.register_forward_pre_hook(note)
    with case(
        f"Task 5, training_step, {pieces} micro-batches of {N} tokens, {E} experts, top_k={k}"
    ):
        found = [training_step(moe, optimizer, list(batches), rate) for batches in steps][-1]
        _check_trained(moe, fresh, steps, rate, lr)
        assert len(set(seen[: len(seen) // 2])) >= pieces, (
            "the layer is called again before backward: so all micro-batches are in memory at once;"
            " call backward in the loop"
        )
        expect_named(found, (E,), torch.int64, "what training_step returned")
        _, load = two_steps(fresh, steps, rate, lr)
        assert torch.equal(found, load), (
            f"the returned load is {found.tolist()}, expected {load.tolist()}, the sum over the"
            " micro-batches of what the layer has counted. (After the optimizer's step its router"
            " is another: don't route again.)"
        )


def _check_trained(moe: MoE, fresh: MoE, steps: list[Batches], rate: float, lr: float) -> None:
    """Parameters and bias after two steps."""

    def same(layer: MoE) -> bool:
        pairs = zip(moe.parameters(), layer.parameters(), strict=True)
        return all(torch.allclose(p, q, atol=1e-5) for p, q in pairs)

    def near(layer: MoE) -> bool:
        return torch.allclose(moe.gate.expert_bias, layer.gate.expert_bias, atol=1e-6)

    right, _ = two_steps(fresh, steps, rate, lr)
    if same(right) and near(right):
        return
    assert not same(fresh), "the parameters have not moved: are backward and optimizer.step called?"
    for slip, planted in _step_slips(len(steps[0])).items():
        wrong, _ = two_steps(fresh, steps, rate, lr, **planted)
        assert not (same(wrong) and near(wrong)), slip
    usual, _ = two_steps(fresh, steps, 1e-3, lr)
    assert not (same(usual) and near(usual)), (
        f"the bias moves at update_bias's own rate: pass rate={rate} on"
    )
    assert near(right) or not same(right), (
        "the parameters are right, but not the bias: one update, with the load of all micro-batches"
    )
    raise AssertionError(
        "after two steps the parameters are not those of the mean of mse + aux_loss over"
        " the micro-batches, with one backward for each micro-batch and one optimizer step"
        " after the loop"
    )


def _step_slips(pieces: int) -> dict[str, dict[str, Any]]:
    """What is said of each mistake, and how `two_steps` makes it."""
    return {
        "aux_loss is missing from the loss: nothing but the bias balances the router": dict(aux=0),
        "the gradients of the micro-batches are summed; divide each loss by their number": (
            dict(mean=False)
        ),
        "the bias is updated for each micro-batch; add up the loads and update once": dict(
            bias="each"
        ),
        "the bias is updated with the load of the last micro-batch only": dict(bias="last"),
        "the bias is not updated": dict(bias="never"),
        "gradients of the step before are still there: zero_grad comes first": dict(stale="all"),
        "gradients from before the first call are still there: zero_grad comes first, not last": (
            dict(stale="first")
        ),
        "only the last micro-batch has a gradient: call zero_grad once, before the loop": (
            dict(last=True)
        ),
        "aux_loss is not divided by the number of micro-batches": dict(aux=pieces),
    }


# ------------------------------------------------------------------------------------------- task 6


def check_size(
    moe_size: Answer, C: int, hidden: int, E: int, k: int, shared: int | None = None
) -> None:
    """Task 6: the weights in all, the weights in use, and the operations."""
    with torch.device("meta"):
        layer = MoE(C, hidden, num_experts=E, top_k=k, shared_expert_intermediate_size=shared)
    sizes = {
        name: sum(p.numel() for p in part.parameters()) for name, part in layer.named_children()
    }
    router = sizes["gate"]
    one = sizes["experts"] // E
    common = sizes.get("shared_expert", 0)
    name = f"moe_size({C}, {hidden}, {E}, {k}{'' if shared is None else f', shared={shared}'})"
    with case("Task 6"):
        given = {} if shared is None else {"shared": shared}
        found = moe_size(C, hidden, E, k, **given)
        assert isinstance(found, tuple | list | Tensor) and len(found) == 3, (
            f"{name} is {found!r}, expected three numbers"
        )
        whole = expect_number(found[0], f"{name}: the weights in all")
        used = expect_number(found[1], f"{name}: the weights used")
        work = expect_number(found[2], f"{name}: the operations")
        for what, number, factor in (("in all", whole, E), ("used by a token", used, k)):
            right = router + factor * one + common
            slips = {
                "the router is missing": right - router,
                "of the router you count only the chosen experts' rows; "
                "a token needs all logits to choose": right - router + k * C,
                "a gated expert has three matrices, not two": (
                    router + factor * 2 * C * hidden + common
                ),
                "the shared expert is missing": right - common,
                "the shared expert has three matrices, too": right - common // 3,
                "the shared expert is counted for each expert": right + (factor - 1) * common,
                "the shared expert has its own width, `shared`": (
                    right - common + (3 * C * hidden if shared else 0)
                ),
                "every expert is counted, but a token uses k": router + E * one + common,
                "only one expert is counted": router + one + common,
                "these are operations, two for each weight": 2 * right,
                "a whole layer has all E experts": router + k * one + common,
            }
            _check_weights_counted(f"{name}: {number:.0f} weights {what}", number, right, slips)
        _check_work(name, work, router=router, experts=E * one, used=k * one, common=common)


def _check_weights_counted(name: str, number: float, right: int, slips: Mapping[str, int]) -> None:
    for slip, wrong in slips.items():
        assert wrong == right or number != wrong, f"{name}, but the package says {right}: {slip}"
    assert number == right, f"{name}, but the package says {right}"


def _check_work(
    name: str, work: float, *, router: int, experts: int, used: int, common: int
) -> None:
    """The operations for one token, two for each weight in use."""
    right = 2 * (router + used + common)
    slips = {
        "a weight in use is multiplied *and* the product is added: two operations": right // 2,
        "these are the operations of all E experts, but a token uses k": (
            2 * (router + experts + common)
        ),
        "the router's product counts, too": right - 2 * router,
        "the shared expert's products count, too": right - 2 * common,
    }
    for slip, wrong in slips.items():
        assert wrong == right or work != wrong, (
            f"{name}: {work:.0f} operations, expected {right}: {slip}"
        )
    assert work == right, (
        f"{name}: {work:.0f} operations, expected {right}, two for each weight that a token uses"
    )


def check_read(tokens_to_read: Answer, E: int, k: int, share: float) -> None:
    """Task 6: how many tokens read this share of the experts."""

    def read(n: float) -> float:
        return 1 - (1 - k / E) ** n

    expected = next(n for n in range(1, 10_000) if read(n) >= share)
    name = f"tokens_to_read({E}, {k}, {share})"
    with case("Task 6"):
        found = expect_number(tokens_to_read(E, k, share), name)
        assert found == int(found), (
            f"{name} is {found:g}: tokens are whole, the smallest number that is *enough*"
        )
        assert found <= expected, (
            f"{name} is {found:g}, but {expected} already read {read(expected):.1%} in expectation"
        )
        assert found >= expected, (
            f"{name} is {found:g}, too few: an expert stays unread with"
            f" chance (1 - k/E)^n, so {found:g} read {read(found):.2%} in expectation, and"
            f" {share:.2%} are wanted"
        )


def dropped_by(
    index: list[list[int]], E: int, places: int, queue: Sequence[tuple[int, int]]
) -> Tensor:
    """Which choices find no place when they come in this order, (token, column)."""
    taken = [0] * E
    dropped = torch.ones(len(index), len(index[0]), dtype=torch.bool)
    for n, j in queue:
        if taken[index[n][j]] < places:
            taken[index[n][j]] += 1
            dropped[n, j] = False
    return dropped


def check_capacity(
    with_capacity: Answer,
    N: int,
    E: int,
    k: int,
    factor: float,
    lean: float = 0.0,
    norm: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Task 6: which choices are dropped, and what the layer makes of the others."""
    torch.manual_seed(N + E)
    moe = MoE(4, 6, num_experts=E, top_k=k, norm_topk_prob=norm).to(dtype)
    nn.init.normal_(moe.gate.weight)
    x = (torch.randn(N, 4) + lean).to(dtype)
    _, index, weights = moe.gate(x)
    kept = {name: part.clone() for name, part in moe.state_dict().items()}
    x_before = x.clone()
    places = math.ceil(factor * N * k / E)
    with case(f"Task 6, {N} tokens, {E} experts, top_k={k}, factor {factor}, capacity {places}"):
        with torch.no_grad():
            found = with_capacity(moe, x, factor)
        assert torch.equal(x, x_before), "x has changed after the call"
        same = [torch.equal(part, kept[name]) for name, part in moe.state_dict().items()]
        assert all(same), "the layer has changed after the call"
        assert isinstance(found, tuple | list) and len(found) == 2, (
            f"expected y and dropped, got {type(found).__name__}"
        )
        y, dropped = found
        expect_named(dropped, (N, k), torch.bool, "dropped")
        by_choice = [(n, j) for j in range(k) for n in range(N)]
        right = dropped_by(index.tolist(), E, places, by_choice)
        if not torch.equal(dropped, right):
            _explain_dropped(dropped, right, index.tolist(), E, factor)
        expect_named(y, (N, 4), dtype, "y")
        with torch.no_grad():
            _check_kept(y, right, moe, x, index, weights)


def _explain_dropped(
    dropped: Tensor, right: Tensor, index: list[list[int]], E: int, factor: float
) -> None:
    """Which mistake drops just these choices."""
    N, k = right.shape
    places = math.ceil(factor * N * k / E)
    by_choice = [(n, j) for j in range(k) for n in range(N)]
    by_token = [(n, j) for n in range(N) for j in range(k)]

    def drop(places: int, queue: Sequence[tuple[int, int]] = by_choice) -> Tensor:
        return dropped_by(index, E, places, queue)

    columns = [drop(places, [(n, j) for n in range(N)])[:, j : j + 1] for j in range(k)]
    slips = {
        "these are the choices that are *kept*": ~right,
        "places go to all first choices before any second choice; yours go token by token": drop(
            places, by_token
        ),
        "the capacity is rounded up, not down": drop(math.floor(factor * N * k / E)),
        "the even share is N k / E choices; you left out k": drop(math.ceil(factor * N / E)),
        "one place is left empty: a capacity of c has c places": drop(places - 1),
        "the last in line were served first": drop(places, by_choice[::-1]),
        "the factor plays no part": drop(math.ceil(N * k / E)),
        "round only factor * N k / E; you have rounded the even share, too": drop(
            math.ceil(factor * math.ceil(N * k / E))
        ),
        f"one choice too many finds a place: a capacity of {places} has {places} places, and a"
        " whole number isn't rounded up": drop(places + 1),
        "every column has places of its own; an expert's places serve all columns": torch.cat(
            columns, 1
        ),
        "the queue goes column by column: turn it back by .view(k, N).T": right.T.reshape(N, k),
        "nothing is dropped": torch.zeros_like(right),
    }
    for slip, wrong in slips.items():
        assert not torch.equal(dropped, wrong), f"dropped: {slip}"
    n, j = (dropped != right).nonzero()[0].tolist()
    raise AssertionError(
        f"dropped: choice {j} of token {n} (expert {index[n][j]}) is {bool(dropped[n, j])},"
        f" expected {bool(right[n, j])}; each expert has {places} places, for all first"
        " choices in the order of the tokens, then for all second ones"
    )


def _check_kept(
    y: Tensor, dropped: Tensor, moe: MoE, x: Tensor, index: Tensor, weights: Tensor
) -> None:
    """The output, when the right choices are dropped."""
    experts: Any = moe.experts
    parts = zip(experts.gate_proj, experts.up_proj, experts.down_proj, strict=True)
    everyone = [(F.silu(x @ gate.T) * (x @ up.T)) @ down.T for gate, up, down in parts]
    outputs = torch.stack(everyone, 1)[torch.arange(len(x))[:, None], index]  # (N, k, C)

    def total(w: Tensor) -> Tensor:
        return (w[..., None] * outputs).sum(1)

    left = weights * ~dropped
    whole = left.sum(1, keepdim=True)
    gone = dropped.all(1, keepdim=True)
    expected = total(left)
    slips = {
        "dropped choices still add their answers": total(weights),
        "the weights of the kept choices are scaled up; they stay what they were": total(
            torch.where(whole > 0, left / whole, 0)
        ),
        "a token whose choices are all dropped gets zeros, not itself "
        "(the block around the layer adds the token)": torch.where(gone, x, expected),
        "a token with one dropped choice keeps its others": total(
            weights * ~dropped.any(1, keepdim=True)
        ),
        "the dropped choices are the only ones that count": total(weights * dropped),
        "the answers are added without their weights": total((~dropped).to(y.dtype)),
    }
    is_right = is_near(y, expected, 1e-4)
    for slip, wrong in slips.items():
        assert is_right or not is_near(y, wrong, 1e-4), f"dropped is right, but not y: {slip}"
    assert is_right, (
        "dropped is right, but y is not the weighted sum of the kept answers: does each"
        " answer return to its token?"
    )


def check_capacity_gradients(with_capacity: Answer) -> None:
    """Task 6: every parameter learns."""
    torch.manual_seed(0)
    moe = MoE(4, 6, num_experts=3, top_k=2)
    y, _ = with_capacity(moe, torch.randn(9, 4), 0.5)
    assert y.requires_grad, "no gradient reaches the parameters: is there a no_grad or a detach?"
    y.square().sum().backward()
    assert all(p.grad is not None for p in moe.parameters()), (
        "no gradient reaches some parameters: is something detached?"
    )


def check_capacity_dtype(with_capacity: Answer) -> None:
    """Task 6: y in the dtype of x, though the router's weights are float32."""
    torch.manual_seed(0)
    moe = MoE(4, 6, num_experts=3, top_k=2).bfloat16()
    y, _ = with_capacity(moe, torch.randn(9, 4).bfloat16(), 0.5)
    assert y.dtype == torch.bfloat16, (
        f"y is {y.dtype} for a bfloat16 x: the weights are float32, so convert the sum back"
    )

"""The visible checks of exercise 22, scaling: each says what is wrong with an answer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llm_course.pages.checking import Answer, case, forbid, is_close
from llm_course.training import mup, scaling


def call(answer: Answer, *arguments: Any, **options: Any) -> Any:
    """What the answer returns, without help from the package."""
    with case(getattr(answer, "__name__", "your answer")), forbid(scaling, mup):
        return answer(*arguments, **options)


def pair(found: Any, names: str) -> tuple[float, float]:
    """Two numbers, or an AssertionError that says which were expected."""
    good = isinstance(found, tuple | list) and len(found) == 2
    assert good, f"your function returned {found!r}, expected two numbers: {names}"
    try:
        first, second = (float(one) for one in found)
    except (TypeError, ValueError):
        raise AssertionError(f"{found!r} should be two numbers: {names}") from None
    return first, second


# ------------------------------------------------------------------------------------- task 1


def check_spend(spend: Answer, budget: float, tokens_per_parameter: float) -> None:
    """`spend(budget, tokens_per_parameter)`: parameters and tokens."""
    N, D = pair(call(spend, budget, tokens_per_parameter), "parameters, tokens")
    assert N > 0 and D > 0, f"{N:,.0f} parameters and {D:,.0f} tokens: both must be positive"
    used = 6 * N * D / budget
    for factor, what in ((2, "forward pass alone"), (4, "backward pass alone")):
        assert not is_close(used, 6 / factor), (
            f"you count {factor} operations for each parameter and token, which is the {what}"
        )
    assert is_close(used, 1), (
        f"training this model takes {used:.3g} times the budget: 6 N D operations must equal it"
    )
    assert not is_close(N / D, tokens_per_parameter) or is_close(tokens_per_parameter, 1), (
        "parameters and tokens have changed places"
    )
    assert is_close(D / N, tokens_per_parameter), (
        f"each parameter gets {D / N:.3g} tokens, expected {tokens_per_parameter:g}"
    )


# ------------------------------------------------------------------------------------- task 2


def check_line(line: Answer, N: Sequence[float], losses: Sequence[float], floor: float) -> None:
    """`line(N, losses, floor)`: A and a of loss = floor + A / N**a."""
    A, a = pair(call(line, list(N), list(losses), floor), "A, a")
    x = np.log(N)
    y = np.log(np.asarray(losses) - floor)
    slope, level = np.polyfit(x, y, 1)
    without, _ = np.polyfit(x, np.log(losses), 1)
    assert not is_close(a, slope), "the exponent has the wrong sign: A / N**a falls where a > 0"
    assert not is_close(abs(a), -without) or is_close(slope, without), (
        "this is the exponent of the whole loss: take the floor away before the logarithm"
    )
    assert is_close(a, -slope, within=1e-3), (
        f"a is {a:.4g}, expected {-slope:.4g}: the slope of log(loss - floor) over log N"
    )
    assert not is_close(A, level, within=1e-3), "A is still a logarithm: exp turns it back"
    in_tens = math.exp(level / math.log(10))
    assert not is_close(A, in_tens, within=1e-3) or is_close(A, math.exp(level), within=1e-3), (
        f"A is {A:.4g}, expected {math.exp(level):.4g}: log10 and exp don't belong together; take"
        " log with exp, or log10 with 10 **"
    )
    assert is_close(A, math.exp(level), within=1e-3), (
        f"A is {A:.4g}, expected {math.exp(level):.4g}: exp of the line's height where log N is 0"
    )


# ------------------------------------------------------------------------------------- task 3


def check_slice(best: Answer, N: Sequence[float], losses: Sequence[float]) -> None:
    """`best(N, losses)`: the size at the parabola's lowest point, and the loss there."""
    size, loss = pair(call(best, list(N), list(losses)), "size, loss")
    right_size, right_loss = _lowest(np.log(N), losses)
    is_whole = abs(size - math.exp(right_size)) < 1  # int() of the right size
    if not is_whole and not is_close(size, math.exp(right_size), within=1e-3):
        _explain_size(size, right_size, N, losses)
    assert not is_close(loss, min(losses)) or is_close(loss, right_loss), (
        "this is the lowest loss that was measured: asked is the parabola's at its lowest point"
    )
    assert is_close(loss, right_loss, within=1e-3), (
        f"the loss is {loss:.4f}, expected {right_loss:.4f}: the parabola at its lowest point"
    )


def _explain_size(size: float, right: float, N: Sequence[float], losses: Sequence[float]) -> None:
    """Which mistake gives this size; `right` is the logarithm of the right one."""
    by_loss = np.argsort(losses)
    few = [by_loss[:count] for count in range(3, len(N))]
    partial = [_lowest(np.log(N)[best], [losses[i] for i in best])[0] for best in few]
    slips = [
        (
            N[by_loss[0]],
            "this is the best of the sizes that were tried; the parabola's lowest point lies"
            " between them, or outside",
        ),
        (right, "this is the logarithm of the size: exp turns it back"),
        (
            _lowest(np.array(N, dtype=float), losses)[0],
            "this is a parabola over N: sizes differ by factors, so take it over log N",
        ),
        (
            math.exp(right / math.log(10)),
            "log10 and exp don't belong together; take log with exp, or log10 with 10 **",
        ),
        (math.exp(-right), "the sign: the slope 2 a x + b is zero at x = -b / (2 a)"),
        *(
            (float(np.exp(min(x, 99))), "this parabola leaves runs out: fit all of them")
            for x in partial
        ),
    ]
    expected = f"the size is {size:,.6g}, expected {math.exp(right):,.0f}"
    for wrong, slip in slips:
        assert not is_close(size, wrong, within=1e-3), f"{expected}: {slip}"
    raise AssertionError(f"{expected}: where the slope of the parabola over log N is zero")


def _lowest(x: np.ndarray, losses: Sequence[float]) -> tuple[float, float]:
    center = x.mean()
    scale = x.std()
    bend, tilt, level = np.polyfit((x - center) / scale, losses, 2)
    return float(center - scale * tilt / (2 * bend)), float(level - tilt**2 / (4 * bend))


# ------------------------------------------------------------------------------------- task 4


def check_served(cheapest: Answer, law: Mapping[str, float], target: float, served: float) -> None:
    """`cheapest(law, target, served)`: parameters and tokens of the cheapest model."""
    N, D = pair(call(cheapest, dict(law), target, served), "parameters, tokens")
    assert not math.isnan(D), (
        f"the tokens of {N:,.0f} parameters are NaN: this size can't reach the target, however much"
        " it reads"
    )
    assert N > 0 and D > 0, f"{N:,.0f} parameters and {D:,.0f} tokens: both must be positive"
    reached = law["E"] + law["A"] / N ** law["a"] + law["B"] / D ** law["b"]
    assert is_close(reached, target, within=1e-3), (
        f"this model reaches a loss of {reached:.4f}, and the target is {target:g}"
    )
    sizes, cost = _costs(law, target, served)
    alone, _ = _costs(law, target, 0.0)
    mine = 6 * N * D + 2 * N * served
    if served:
        best_alone = alone[int(np.argmin(_costs(law, target, 0.0)[1]))]
        assert not is_close(N, best_alone, within=0.03), (
            f"{N:,.0f} parameters are the cheapest to train: serving {served:.1e} tokens costs"
            " 2 operations for each parameter and token, so a smaller model that reads more is"
            " cheaper in the end"
        )
        tripled = sizes[int(np.argmin(cost + 2 * 2 * sizes * served))]
        assert not is_close(N, tripled, within=0.03), (
            "you count training and serving alike: training takes 6 operations for each parameter"
            " and token, serving only 2, since it has no backward pass"
        )
    assert mine <= 1.002 * cost.min(), (
        f"{N:,.0f} parameters cost {mine / cost.min():.2f} times as much as the cheapest model:"
        " training is 6 N D, serving 2 N times the tokens served. Have you tried"
        f" {'smaller' if N > sizes[int(np.argmin(cost))] else 'larger'} sizes, and enough of them?"
    )


def _costs(law: Mapping[str, float], target: float, served: float) -> tuple[np.ndarray, np.ndarray]:
    """Sizes that can reach the target, and what each costs with as many tokens as it needs."""
    smallest = (law["A"] / (target - law["E"])) ** (1 / law["a"])
    sizes = smallest * np.geomspace(1.001, 1000, 40_000)
    left = target - law["E"] - law["A"] / sizes ** law["a"]
    tokens = (law["B"] / left) ** (1 / law["b"])
    return sizes, 6 * sizes * tokens + 2 * sizes * served


# ------------------------------------------------------------------------------------- task 5

KINDS = {
    "embedding.embed_tokens.weight": "table",
    "layers.0.self_attn.q_proj.weight": "hidden",
    "layers.0.self_attn.q_proj.bias": "vector",
    "layers.0.mlp.down_proj.weight": "hidden",
    "layers.0.input_layernorm.weight": "vector",
    "layers.1.self_attn.o_proj.weight": "hidden",
    "norm.weight": "vector",
    "lm_head.weight": "table",
}
SHAPES = {"table": 2, "hidden": 2, "vector": 1}


def check_rates(rates: Answer, optimizer: str, width: int, base: int, rate: float = 0.01) -> None:
    """`rates(names, optimizer, width, base, rate)`: the learning rate of each parameter."""
    dims = {name: SHAPES[kind] for name, kind in KINDS.items()}
    found = call(rates, dict(dims), optimizer, width, base, rate)
    assert isinstance(found, dict) and found.keys() == dims.keys(), (
        f"rates returned {found!r}, expected a rate for each name"
    )
    ratio = width / base
    factor = 1 / ratio if optimizer == "adamw" else 1 / math.sqrt(ratio)
    for name, kind in KINDS.items():
        got = float(found[name])
        if kind != "hidden":
            assert is_close(got, rate), (
                f"{name} has the rate {got:g}, expected {rate:g}: only matrices inside the blocks"
                " are scaled"
            )
            continue
        assert ratio == 1 or not is_close(got, rate), (
            f"{name} keeps the rate {rate:g} at {ratio:g} times the width"
        )
        assert ratio == 1 or not is_close(got, rate / factor), (
            f"{name} has the rate {got:g}: it must fall with the width, not rise"
        )
        assert is_close(got, rate * factor), (
            f"{name} has the rate {got:g}, expected {rate * factor:g} at {ratio:g} times the width:"
            f" {optimizer}'s updates move the outputs"
            f" {'with the width' if optimizer == 'adamw' else 'with its square root'}"
        )

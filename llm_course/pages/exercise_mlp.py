"""The visible checks of exercise 06, the MLP: each says what is wrong with an answer."""

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_course.model.mlp import MLP
from llm_course.pages.checking import (
    Answer,
    Answers,
    expect,
    expect_kind,
    expect_number,
    forbid,
    written,
)

Parts = dict[str, Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers of this shape, the same ones in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expect_numbers(actual: Any, expected: Tensor) -> None:
    """Compare type, shape and dtype, and refuse NaN."""
    expect_kind(actual, expected)
    assert not actual.isnan().any(), (
        f"{int(actual.isnan().sum())} of {actual.numel()} numbers are NaN"
    )


# ------------------------------------------------------------------------------------------- task 1

TOKEN = (2, -1, 3)
UP = ((1, 0, -1), (0, 2, 1), (1, 1, 1), (-1, 1, 1))
DOWN = ((5, 1, -1, 7), (5, 0, 1, 1), (5, 2, 0, -4))
BRANCH = (2, 3, -1, 5)  # what the up branch of the gated layer holds
SIZES = {"matches": 4, "output": 3, "gated": 3}


def check_by_hand(answers: Answers) -> None:
    """Task 1: four neurons, plain and gated."""
    assert SIZES.keys() <= answers.keys(), "type your numbers into the cell above and run it"
    typed = {name: _typed_numbers(name, answers[name], size) for name, size in SIZES.items()}
    x, up, down, branch = (
        torch.tensor(numbers, dtype=torch.float64) for numbers in (TOKEN, UP, DOWN, BRANCH)
    )
    match = up @ x
    assert not torch.equal(typed["matches"], match.relu()), (
        "matches: the activation has already acted on them; type the matches before it"
    )
    for i, key in enumerate(UP):
        assert typed["matches"][i] == match[i], (
            f"matches: neuron {i + 1} of 4 has the key {key}; multiply it"
            " with (2, -1, 3) number by number, and add"
        )
    slips = {"output": _plain_slips(match), "gated": _gated_slips(match, branch)}
    for name, numbers in slips.items():
        for slip, hidden in numbers.items():
            assert not torch.equal(typed[name], down @ hidden), f"{name}: {slip}"
    assert not torch.equal(typed["output"], (down @ match).relu()), (
        "output: the activation comes before `down`, not after"
    )
    for name, right in (
        ("output", down @ match.relu()),
        ("gated", down @ (match.relu() * branch)),
    ):
        places = [i + 1 for i in range(3) if typed[name][i] != right[i]]
        assert not places, (
            f"{name}: PyTorch gets something else at place {', '.join(map(str, places))} of 1 to 3."
            " Add up the columns of `down`, each times what its neuron holds"
        )


def _typed_numbers(name: str, numbers: Any, size: int) -> Tensor:
    try:
        typed = torch.as_tensor(numbers).double().flatten()
    except Exception:
        raise AssertionError(f"{name} is {numbers!r}, expected a list of {size} numbers") from None
    assert len(typed) == size, f"{name} has {len(typed)} numbers, expected {size}"
    return typed


def _plain_slips(match: Tensor) -> dict[str, Tensor]:
    """What the four neurons hold before `down` for each slip."""
    return {
        "a neuron with a negative match writes nothing: ReLU makes the match 0": match,
        "a neuron writes its value *times* its match": (match > 0).double(),
        "a match of 0 writes nothing; only a match above 0 counts": match.relu() + (match == 0),
    }


def _gated_slips(match: Tensor, branch: Tensor) -> dict[str, Tensor]:
    """The same for the gated layer."""
    return {
        "this is the output without the up branch": match.relu(),
        "you activated the up branch; the activation acts on the gate only": match * branch.relu(),
        "you activated the product; the activation acts on the gate only": (match * branch).relu(),
        "you activated both branches; the activation acts on the gate only": match.relu()
        * branch.relu(),
        "the gate has no activation": match * branch,
        "the gate multiplies the up branch, it is not added to it": match.relu() + branch,
    }


# ------------------------------------------------------------------------------------------- task 2


def twins(
    layer_class: Answer, *sizes: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, MLP]:
    """A layer and the package's with the same random weights, of size 1, both in eval mode."""
    torch.manual_seed(0)
    ours = layer_class(*sizes, **options)
    real = MLP(*sizes, **options)
    for parameter in real.parameters():
        nn.init.normal_(parameter)
    names = sorted(ours.state_dict())
    expected = sorted(real.state_dict())
    assert names == expected, (
        f"the parameters are called {names}, expected {expected}: keep the projections, their names"
        " and biases"
    )
    ours.load_state_dict(real.state_dict())
    return ours.to(dtype).eval(), real.to(dtype).eval()


def mended_class(answers: Answers) -> Answer:
    """The student's class of task 2."""
    assert "MendedMLP" in answers, "write the class MendedMLP in the cell above and run it"
    return answers["MendedMLP"]


def without_package(mended: Answer, x: Tensor) -> Any:
    """What the student's layer makes of x when the package's is out of reach."""
    with forbid(MLP.forward):
        return mended(x)


def check_gate(answers: Answers) -> None:
    """Task 2: SiLU acts on the gate, and on nothing else."""
    with torch.no_grad():
        x = normal(2, 5, 6, seed=1)
        mended, real = twins(mended_class(answers), 6, 10, use_glu=True)
        y = without_package(mended, x)
        expect_numbers(y, x)
        g = mended.gate_proj(x)
        u = mended.up_proj(x)
        for slip, hidden in {
            "SiLU acts on the up branch; it must act on the gate": g * F.silu(u),
            "SiLU acts on both branches; it must act on the gate only": F.silu(g) * F.silu(u),
            "SiLU acts on the product; it must act on the gate only": F.silu(g * u),
            "the gate goes through a sigmoid; SiLU is x times the sigmoid of x": g.sigmoid() * u,
            "the branches are added; the gate multiplies": F.silu(g) + u,
            "there is no activation": g * u,
        }.items():
            assert not torch.allclose(y, mended.down_proj(hidden), atol=1e-4), slip
        expect(
            y,
            real(x),
            "with a gate the output is not that of the package with the same weights:"
            " down(silu(gate(x)) * up(x))",
            rtol=1e-5,
        )


def check_plain(answers: Answers) -> None:
    """Task 2: without a gate, GELU in the tanh form."""
    with torch.no_grad():
        x = normal(2, 5, 6, seed=1)
        mended, real = twins(mended_class(answers), 6, 10, use_glu=False, bias=True)
        y = without_package(mended, x)
        expect_numbers(y, x)
        u = mended.up_proj(x)
        assert not torch.allclose(y, mended.down_proj(F.gelu(u)), atol=1e-6), (
            "this is the exact GELU; GPT-2 and our layer use the form with tanh, which differs by"
            " up to 0.0005"
        )
        assert not torch.allclose(y, mended.down_proj(F.silu(u)), atol=1e-4), (
            "this is SiLU; without a gate the activation is GELU in the tanh form"
        )
        expect(
            y,
            real(x),
            "without a gate the output is not that of the package: down(gelu(up(x))), with the tanh"
            " form",
            rtol=1e-5,
        )


def check_like_package(
    mended: Answer, shape: Sequence[int], neurons: int, words: str, **options: Any
) -> None:
    """Task 2: in float64, the output of the package's layer with the same weights."""
    with torch.no_grad():
        ours, real = twins(mended, shape[-1], neurons, dtype=torch.float64, **options)
        x = normal(*shape, seed=2).double()
        expect(without_package(ours, x), real(x), words, rtol=1e-5)


def check_dropout(answers: Answers) -> None:
    """Task 2: dropout at the very end, in training mode only, for both kinds of layer."""
    for use_glu in (True, False):
        with torch.no_grad():
            mended, _ = twins(mended_class(answers), 50, 8, use_glu=use_glu, dropout=0.25)
            x = normal(40, 50, seed=1)
            first = without_package(mended, x)
            second = without_package(mended, x)
            dropped = without_package(mended.train(), x)
            expect_numbers(dropped, x)
            assert torch.equal(first, second), (
                "in eval mode two calls give two results: dropout acts in training mode only, and"
                " the layer knows its mode as self.training"
            )
            assert not torch.equal(dropped, first), (
                "in training mode nothing is dropped: dropout is part of the layer, only not in"
                " eval mode"
            )
            _check_quarter(dropped == 0)
            kept = dropped != 0
            expect(
                dropped[kept],
                first[kept] / 0.75,
                "what is kept in training mode must be divided by 1 - dropout, as F.dropout does,"
                " and nothing else may change: is there a second dropout?",
                atol=1e-4,
            )


def _check_quarter(is_zero: Tensor) -> None:
    """A quarter of the outputs is dropped, each for itself."""
    share = is_zero.double().mean().item()
    assert share > 0.05, (
        f"in training mode {share:.0%} of the outputs are 0, expected about 25%: it drops"
        " neurons; here dropout stands at the very end"
    )
    assert abs(share - 0.25) < 0.1, (
        f"in training mode {share:.0%} of the outputs are 0, expected about 25%: is the"
        " probability used?"
    )
    for what, dim in (("tokens", 1), ("channels", 0)):
        assert is_zero.double().mean(dim).max() < 1, (
            f"whole {what} are dropped; every single number has its own chance"
        )


def check_probability(mended: Answer, p: float) -> None:
    """Task 2: the layer drops with the probability that it was given."""
    with torch.no_grad():
        layer, _ = twins(mended, 50, 8, dropout=p)
        x = normal(40, 50, seed=1)
        whole = without_package(layer, x)
        dropped = without_package(layer.train(), x)
    kept = dropped != 0
    share = 1 - kept.double().mean().item()
    assert abs(share - p) < 0.1, (
        f"with dropout={p}, {share:.0%} of the outputs are 0: is the probability used?"
    )
    words = f"with dropout={p}, what is kept must be divided by {1 - p:g}"
    expect(dropped[kept], whole[kept] / (1 - p), words, atol=1e-4)


# ------------------------------------------------------------------------------------------- task 3


def check_product(product_mlp: Answer, pairs: Sequence[tuple[int, int]], hidden_size: int) -> None:
    """Task 3: output i is the product of the two inputs of pair i, and the rest is 0."""
    given = list(pairs)
    mlp = product_mlp(given, hidden_size)
    assert given == list(pairs), (
        f"the list of pairs has changed after the call: it was {list(pairs)}, and is {given}"
    )
    _check_layer_of_products(mlp, len(pairs))
    x = 3 * normal(50, hidden_size, seed=len(pairs))
    with torch.no_grad():
        y = mlp.eval()(x)
    expect_numbers(y, x)
    for i, (j, k) in enumerate(pairs):
        name = f"pairs={pairs}, hidden_size={hidden_size}: output {i}"
        _check_one_product(name, y[:, i], x, j, k)
        large = 100 * x.double()
        exact = 1e4 * (x[:, j].double() * x[:, k].double())
        with torch.no_grad():
            far = (copy.deepcopy(mlp).double()(large)[:, i] - exact).abs().max().item()
        assert far < 1e-6 * exact.abs().max(), (
            f"{name}: right for small inputs, but off by {far:.2g} for inputs a hundred times"
            " larger, as an approximation is. Two neurons make it exact: SiLU(a) b and SiLU(-a)"
            " (-b)"
        )
    with torch.no_grad():
        assert torch.equal(mlp.train()(x), y), (
            f"pairs={pairs}: in training mode the output is another: leave dropout at 0"
        )
    rest = y[:, len(pairs) :]
    assert rest.numel() == 0 or rest.abs().max() < 1e-3, (
        f"pairs={pairs}, hidden_size={hidden_size}: the outputs from {len(pairs)} on must be 0: set"
        " the rest of `down` to zero"
    )


def _check_layer_of_products(mlp: Any, pairs: int) -> None:
    """The package's layer, with a gate and two neurons for each pair."""
    assert isinstance(mlp, MLP), (
        f"expected the package's MLP, got {type(mlp).__name__}: does the function return its layer?"
    )
    assert mlp.gate_proj is not None, (
        "the layer has no gate: without one a product can only be approximated"
    )
    neurons = mlp.up_proj.out_features
    assert neurons <= 2 * pairs, (
        f"{pairs} pairs take {2 * pairs} neurons, two for each; yours has {neurons}"
    )


def _check_one_product(name: str, got: Tensor, x: Tensor, j: int, k: int) -> None:
    """One output, for inputs of ordinary size."""
    a = x[:, j]
    b = x[:, k]
    assert not torch.allclose(got, -a * b, atol=1e-3), f"{name} has the wrong sign"
    assert j == k or not torch.allclose(got, F.silu(a) * b, atol=1e-3), (
        f"{name} is SiLU(a) * b: one neuron is not enough, a second one with -a cancels SiLU"
    )
    assert not torch.allclose(got, (F.silu(a) + F.silu(-a)) * b, atol=1e-3), (
        f"{name} is (SiLU(a) + SiLU(-a)) * b: change the sign of the up branch too, or subtract"
        " the second neuron in `down`"
    )
    off = (got - a * b).abs().max().item()
    assert off < 1e-3, (
        f"{name} is not the product of the inputs {j} and {k} (off by up to {off:.2g}). Which"
        " weights are not 0, and are any left from the initialisation?"
    )


# ------------------------------------------------------------------------------------------- task 4

MISTRAL = 7_241_732_096  # all parameters of Mistral 7B


def package_cost(
    hidden_size: int, intermediate_size: int, tokens: int, use_glu: bool, bias: bool
) -> tuple[int, int]:
    """Parameters of the package's layer, and 2 for each number of its matrices and token."""
    with torch.device("meta"):
        mlp = MLP(hidden_size, intermediate_size, use_glu=use_glu, bias=bias)
    matrices = sum(p.numel() for p in mlp.parameters() if p.ndim == 2)
    return sum(p.numel() for p in mlp.parameters()), 2 * matrices * tokens


def check_cost(mlp_cost: Answer, hidden_size: int, intermediate_size: int, tokens: int) -> None:
    """Task 4: the two costs of all four kinds of layer of this size."""
    sizes = (hidden_size, intermediate_size, tokens)
    for use_glu in (True, False):
        for bias in (False, True):
            name = f"mlp_cost{(*sizes, use_glu, bias)}"
            found = mlp_cost(*sizes, use_glu, bias)
            assert isinstance(found, tuple | list) and len(found) == 2, (
                f"{name} is {found!r}, expected two numbers"
            )
            parameters, operations = package_cost(*sizes, use_glu, bias)
            assert not (bias and found[0] == package_cost(*sizes, use_glu, False)[0]), (
                f"{name}: bias=True adds a bias to each matrix"
            )
            assert found[0] == parameters, (
                f"{name}: {found[0]:,} parameters, but the package's layer has {parameters:,}."
                f" {3 if use_glu else 2} matrices"
                f"{'; gate and up have a bias for each neuron,' if bias else ''}"
                f"{' down has one for each of the C outputs' if bias else ''}"
            )
            biases = parameters - operations // (2 * tokens)
            _check_operations(name, found[1], operations, tokens * biases)


def _check_operations(name: str, found: Any, right: int, for_biases: int) -> None:
    assert found * 2 != right, (
        f"{name}: only half of the operations: each weight takes a multiplication and an addition"
    )
    assert not for_biases or found not in (right + 2 * for_biases, right + for_biases), (
        f"{name}: you count operations for the biases; here only the matrices count"
    )
    assert found == right, (
        f"{name}: {found:,} operations, expected {right:,}: 2 for each weight and token"
    )


def check_same_cost(same_cost_size: Answer, plain: int, multiple: int) -> None:
    """Task 4: the smallest gated layer that costs at least as much; says what is wrong with it."""
    found = same_cost_size(plain, multiple)
    name = f"same_cost_size({plain}, {multiple})"
    expect_number(found, name)
    assert found == int(found), f"{name} = {found}, but neurons are whole"
    assert found % multiple == 0, f"{name} = {found} is not a multiple of {multiple}"
    assert found >= 2 * plain / 3, (
        f"{name} = {found} is too small: 3 matrices of {found} are less than 2 of {plain}. Round up"
    )
    assert found - multiple < 2 * plain / 3, (
        f"{name} = {found} is too large: {found - multiple} would do, two thirds of {plain} are"
        f" {2 * plain / 3:.1f}"
    )
    check_smallest(same_cost_size, plain, multiple)


def check_smallest(same_cost_size: Answer, plain: int, multiple: int) -> None:
    """Task 4: the number itself."""
    found = same_cost_size(plain, multiple)
    start = 2 * plain // 3 // multiple * multiple
    right = next(n for n in range(start, 2 * plain + multiple, multiple) if 3 * n >= 2 * plain)
    assert found == right, (
        f"same_cost_size({plain}, {multiple}) = {found}, expected {right}: the first multiple of"
        f" {multiple} that is at least two thirds of {plain}, rounded only once, and up"
    )


def check_mistral(answers: Answers) -> None:
    """Task 4: two numbers about Mistral 7B."""
    mlp_share, operations_per_token = written(answers, "mlp_share", "operations_per_token")
    share = expect_number(mlp_share, "mlp_share")
    operations = expect_number(operations_per_token, "operations_per_token")
    layer, layer_operations = package_cost(4096, 14336, 1, True, False)
    right = 32 * layer / MISTRAL
    assert 0 < share < 1, f"mlp_share is {share:g}, but a share is between 0 and 1"
    assert abs(share - right * 2 / 3) > 0.01, "mlp_share: a gated layer has three matrices, not two"
    assert abs(share - right / 32) > 0.005, "mlp_share: this is one layer; there are 32"
    assert abs(share - right) < 0.01, (
        f"mlp_share = {share:.3f}: 32 layers of {layer:,} weights, divided by all parameters"
    )
    ratio = operations / (32 * layer_operations)
    assert abs(ratio - 1 / 2) > 0.02, (
        "operations_per_token: each weight takes a multiplication and an addition, so 2"
    )
    assert abs(ratio - 1 / 32) > 0.001, "operations_per_token: this is one layer; there are 32"
    assert abs(ratio - 2 / 3) > 0.02, (
        "operations_per_token: a gated layer has three matrices, not two"
    )
    assert ratio > 1e-3, f"operations_per_token = {operations:g}: type it in full, not in billions"
    assert abs(ratio - 1) < 0.02, (
        f"operations_per_token = {operations:,.0f}: 2 for each of the MLPs' weights"
    )


# ------------------------------------------------------------------------------------------- task 5


def check_chunks(in_chunks: Answer, B: int, T: int, size: int, out: int = 4) -> None:
    """Task 5: what the layer gets, piece by piece, and what comes back."""
    torch.manual_seed(0)
    x = torch.randn(B, T, 3)
    matrix = torch.randn(3, out)
    calls: list[Tensor] = []

    def spy(piece: Tensor) -> Tensor:
        calls.append(piece)
        return F.relu(piece @ matrix)

    before = x.clone()
    name = f"B={B}, T={T}, size={size}"
    try:
        y = in_chunks(spy, x, size)
    except Exception as error:  # What the layer got may say more than the error
        y = error
    assert torch.equal(x, before), f"{name}: x has changed after the call"
    _check_pieces(name, [tuple(piece.shape) for piece in calls], B * T, size)
    if isinstance(y, Exception) and calls:
        raise AssertionError(
            f"{name}: the pieces are right, but to join them your code raised {type(y).__name__}:"
            f" {y}. The last dimension of the result is {out} here, which may differ from C = 3"
        )
    if isinstance(y, Exception):
        raise y
    assert calls, f"{name}: the layer was never called"
    full, rest = divmod(B * T, size)
    parts = [piece.shape[1] for piece in calls]
    assert parts == [size] * full + [rest] * (rest > 0), (
        f"{name}: the pieces hold {parts} tokens; only the last may hold fewer than {size}"
    )
    assert isinstance(y, Tensor), (
        f"expected a tensor, got {type(y).__name__}: does the function return its result?"
    )
    assert y.shape == (B, T, out), (
        f"{name}: the shape is {tuple(y.shape)}, expected {(B, T, out)}; join the pieces along the"
        " tokens"
    )
    expect(
        y,
        F.relu(before @ matrix),
        f"{name}: the tokens are not where they were in x: in which order are they cut and joined?",
        rtol=1e-5,
    )


def _check_pieces(name: str, shapes: list[tuple[int, ...]], tokens: int, size: int) -> None:
    """The shapes of what the layer got: one long row, and every token once."""
    for shape in shapes:
        assert len(shape) == 3 and shape[0] == 1 and shape[2] == 3, (
            f"{name}: the layer got a tensor of the shape {shape}, expected (1, n, 3): one long row"
            " of tokens, with all their channels"
        )
    most = max((shape[1] for shape in shapes), default=0)
    assert most <= size, (
        f"{name}: the layer got {most} tokens at once, more than {size}: is `size` taken for the"
        " number of pieces?"
    )
    row = sum(shape[1] for shape in shapes)
    assert row <= tokens, (
        f"{name}: the layer got {row} tokens in all, expected {tokens}: some went through it twice,"
        " or were added"
    )
    assert row == tokens or not shapes, (
        f"{name}: the layer got {row} tokens in all, expected {tokens}: what about the last piece?"
    )


def doubled(piece: Tensor) -> Tensor:
    """The simplest layer."""
    return 2 * piece


def check_gradient_passes(in_chunks: Answer) -> None:
    """Task 5: the pieces stay in the graph."""
    learning = in_chunks(doubled, torch.ones(2, 5, 3, requires_grad=True), 4)
    assert learning.requires_grad, (
        "no gradient can pass: is there a no_grad, a detach or a new tensor on the way?"
    )


def check_wider(in_chunks: Answer) -> None:
    """Task 5: a layer that returns another type than it gets."""
    y = in_chunks(lambda piece: 2 * piece.double(), torch.ones(2, 5, 3), 4)
    assert isinstance(y, Tensor) and y.dtype == torch.float64, (
        f"the layer returns torch.float64 for a float32 x, but the result is"
        f" {getattr(y, 'dtype', y)}: join what the layer returns, or take its dtype"
    )


def check_doubled(in_chunks: Answer, x: Tensor, size: int, words: str) -> None:
    """Task 5: any x, through a layer that doubles it."""
    expect(in_chunks(doubled, x, size), 2 * x, words, rtol=1e-5)


def check_safe(answers: Answers, layers: Mapping[str, Answer]) -> None:
    """Task 5: the layers that give the same in pieces."""
    [safe] = written(answers, "safe")
    is_set = isinstance(safe, set | frozenset | list | tuple | str)
    assert is_set and set(safe) <= set("abcdef"), (
        f"safe is {safe!r}, expected a set of letters from a to f"
    )
    x = normal(2, 5, 8)
    for letter, layer in layers.items():
        with torch.no_grad():
            whole = layer(x)
            pieces = [layer(piece) for piece in x.reshape(1, 10, 8).split(4, dim=1)]
        is_safe = torch.allclose(whole, torch.cat(pieces, dim=1).reshape(2, 5, -1), atol=1e-5)
        assert is_safe == (letter in safe), (
            f'safe: layer "{letter}" in pieces of 4 gives'
            f" {'the same as' if is_safe else 'something else than'} in one go. Does an output"
            " depend on another token there?"
        )


# ------------------------------------------------------------------------------------------- task 6


def check_compare(compare: Answer, a: list[float], b: list[float]) -> None:
    """Task 6: difference, error and verdict for two lists of losses."""
    given = (list(a), list(b))
    name = f"compare({list(a)}, {list(b)})"
    found = compare(*given)
    assert given == (a, b), f"{name}: the lists have changed after the call: sort or change a copy"
    assert isinstance(found, tuple | list) and len(found) == 3, (
        f"{name} is {found!r}, expected three things: difference, error, verdict"
    )
    difference = expect_number(found[0], f"{name}: the difference")
    error = expect_number(found[1], f"{name}: the error")
    right = statistics.fmean(a) - statistics.fmean(b)
    assert abs(right) < 1e-4 or abs(difference + right) > 1e-5, (
        f"{name}: the difference is {difference:.4f}, but it is mean(a) - mean(b)"
    )
    by_pairs = statistics.fmean(x - y for x, y in zip(a, b, strict=False))
    assert len(a) == len(b) or abs(by_pairs - right) < 1e-5 or abs(difference - by_pairs) > 1e-5, (
        f"{name}: the difference is {difference:.4f}: one list is longer, and each mean is taken"
        " over all runs of its list"
    )
    assert abs(difference - right) < 1e-5, (
        f"{name}: the difference is {difference:.4f}, expected {right:.4f}"
    )
    if min(len(a), len(b)) < 2:
        assert error == math.inf, (
            f"{name}: one run says nothing about the spread, so the error is math.inf, not {error}"
        )
        assert found[2] == "unclear", (
            f'{name}: the verdict is {found[2]!r}, but with one run it is "unclear"'
        )
        return
    real = _check_error(name, error, a, b)
    _check_verdict(name, found[2], right, real)


def _check_error(name: str, error: float, a: Sequence[float], b: Sequence[float]) -> float:
    """The standard error, which is returned."""
    real = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    single = [math.sqrt(statistics.variance(runs) / len(runs)) for runs in (a, b)]
    slips = {
        "divide the squares by n - 1, the runs are a sample": math.sqrt(
            statistics.pvariance(a) / len(a) + statistics.pvariance(b) / len(b)
        ),
        "this is the spread of single runs; a mean of n has the variance / n": math.sqrt(
            statistics.variance(a) + statistics.variance(b)
        ),
        "a root is missing": real**2,
        "you add the two errors; their squares add": sum(single),
    }
    both = statistics.variance(a) + statistics.variance(b)
    for n in (len(a), len(b)):
        slip = f"divide each variance by the number of its own runs, not both by {n}"
        slips[slip] = math.sqrt(both / n)
    for slip, wrong in slips.items():
        assert abs(wrong - real) < 1e-5 or abs(error - wrong) > 1e-5, (
            f"{name}: the error is {error:.4f}: {slip}"
        )
    assert abs(error - real) < 1e-5, f"{name}: the error is {error:.4f}, expected {real:.4f}"
    return real


def _check_verdict(name: str, verdict: Any, difference: float, error: float) -> None:
    assert verdict in ("a", "b", "unclear"), (
        f'{name}: the verdict is {verdict!r}, expected "a", "b" or "unclear"'
    )
    if abs(difference) <= 2 * error:
        assert verdict == "unclear", (
            f"{name}: the difference {difference:.3f} is not above twice its error {error:.3f}, so"
            " this is unclear"
        )
        return
    lower = "a" if difference < 0 else "b"
    assert verdict != "unclear", (
        f"{name}: the difference {difference:.3f} is above twice its error {error:.3f}, so this is"
        " not unclear"
    )
    assert verdict == lower, (
        f'{name}: {lower} has the lower loss and wins; the verdict is "{verdict}"'
    )


def _sleepy_layer(
    C: int,
    neurons: int,
    N: int,
    dead: Sequence[int],
    rare: Sequence[int],
    faint: Sequence[int],
    zero_key: Sequence[int],
    dtype: torch.dtype,
    far: float = 1.0,
) -> tuple[MLP, Tensor]:
    """A plain layer and N examples; the lists are those of `check_revive`."""
    torch.manual_seed(C + N)
    mlp = MLP(C, neurons, use_glu=False, bias=True, activation="relu").to(dtype)
    x = torch.randn(N, C).to(dtype) + 1
    x[0] *= far
    bias = mlp.up_proj.bias
    with torch.no_grad():
        matches = x @ mlp.up_proj.weight.T
        bias[:] = -matches.median(0).values
        for i in dead:
            bias[i] = -matches[:, i].max() - 1
        for i in rare:
            bias[i] = -matches[:, i].topk(2).values.mean()
        for i in faint:
            bias[i] = 5e-4 - matches[:, i].max()
        for i in zero_key:
            mlp.up_proj.weight[i] = 0
            bias[i] = 0
    return mlp, x


def check_revive(
    revive: Answer,
    C: int,
    neurons: int,
    N: int,
    dead: Sequence[int],
    rare: Sequence[int] = (),
    faint: Sequence[int] = (),
    zero_key: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    far: float = 1.0,
) -> None:
    """Task 6: the neurons in `dead` never fire, in `rare` for one example, in `faint` for one and
    hardly; `zero_key` has nothing but zeros. The first example is `far` times as large.
    """
    mlp, x = _sleepy_layer(C, neurons, N, dead, rare, faint, zero_key, dtype, far)
    gone = sorted((*dead, *zero_key))
    was = {name: part.clone() for name, part in _parts_of(mlp).items()}
    with torch.no_grad():
        y = mlp(x)
        fired = (mlp.up_proj(x) > 0).sum(0).tolist()
    found = _in_place(revive, mlp, x)
    now = _parts_of(mlp)
    assert torch.equal(now["down_proj.bias"], was["down_proj.bias"]), (
        "the bias of down_proj has changed; it belongs to no neuron"
    )
    _check_alive(was, now, [i for i in range(neurons) if i not in gone], fired, N)
    with torch.no_grad():
        after = mlp(x)
        share = (mlp.up_proj(x) > 0).double().mean(0).tolist()
    for i in gone:
        _check_fires(i, was, now, x, share[i], gone)
    words = (
        "the output for x has changed: a revived neuron must write nothing yet. Its value is a"
        " column of down_proj.weight"
    )
    expect(after, y, words, rtol=1e-5)
    for i in gone:
        _check_new_key(i, was, now)
    _check_revived(revive, found, mlp, x, gone)


def _in_place(revive: Answer, mlp: MLP, x: Tensor) -> Any:
    """What `revive` returns; it may change the numbers of the layer, and nothing else."""
    x_before = x.clone()
    kept = list(mlp.parameters())
    try:
        found = revive(mlp, x)
    except IndexError as error:
        up = tuple(mlp.up_proj.weight.shape)
        down = tuple(mlp.down_proj.weight.shape)
        raise AssertionError(
            f"your code raised IndexError: {error}. The weight of up_proj is {up}, a key"
            f" is a row; that of down_proj is {down}, a value is a column"
        ) from None
    except RuntimeError as error:
        assert "dtype" not in str(error), (
            f"your code raised RuntimeError: {error} x and the layer are {x.dtype}, so draw the"
            " keys with dtype=x.dtype"
        )
        raise
    assert torch.equal(x, x_before), "x has changed after the call"
    assert all(p is q and p.requires_grad for p, q in zip(mlp.parameters(), kept, strict=True)), (
        "the layer has new parameters, or some that no longer learn: an optimizer holds the old"
        " ones, so change their numbers in place"
    )
    return found


def _parts_of(mlp: MLP) -> Parts:
    """The parameters of a plain layer: keys, biases, values, and the bias of `down_proj`."""
    names = ("key", "bias", "value", "down_proj.bias")
    return dict(zip(names, (p.detach() for p in mlp.parameters()), strict=True))


def _neuron(parts: Parts, i: int) -> Parts:
    """What one neuron has."""
    return {"key": parts["key"][i], "bias": parts["bias"][i], "value": parts["value"][:, i]}


def _check_alive(was: Parts, now: Parts, alive: list[int], fired: list[int], N: int) -> None:
    """Who fires stays as it was."""
    for i in alive:
        old = _neuron(was, i)
        changed = [
            name for name, part in _neuron(now, i).items() if not torch.equal(part, old[name])
        ]
        assert not changed, (
            f"neuron {i} fires for {fired[i]} of {N} examples, so it is not dead, but its"
            f" {', '.join(changed)} changed: dead means that *no* example fires it"
        )


def _check_fires(i: int, was: Parts, now: Parts, x: Tensor, share: float, gone: list[int]) -> None:
    """A neuron that was dead fires for a good share of the examples."""
    old = _neuron(was, i)
    new = _neuron(now, i)
    unchanged = torch.equal(new["key"], old["key"]) and torch.equal(new["bias"], old["bias"])
    assert not unchanged, (
        f"neuron {i} was dead, and is unchanged: dead is a match of at most 0 everywhere;"
        " the match is up_proj(x)"
    )
    is_shared = len(gone) > 1 and new["bias"] != 0 and len(now["bias"][gone].unique()) == 1
    assert 0.25 <= share <= 0.75 or not is_shared, (
        f"neuron {i} was dead, and now fires for {share:.0%} of the examples: all new biases are"
        f" {new['bias']:.2g}. Every key has matches of its own, so take the median of each"
    )
    bare = x @ new["key"]  # the matches without the bias
    assert share > 0, (
        f"neuron {i} was dead, and still fires for none of the {len(x)} examples: its bias is"
        f" {new['bias']:.2g}, and the median of its matches without it"
        f" {bare.median():.2g}. Which sign lets half of them rise above 0?"
    )
    assert 0.25 <= share <= 0.75, (
        f"neuron {i} was dead, and now fires for {share:.0%} of the examples; wanted is"
        " a quarter to three quarters. What would the median of its matches tell you?"
    )


def _check_new_key(i: int, was: Parts, now: Parts) -> None:
    """A revived neuron has a value of zeros, and a key that nobody has or had."""
    new = _neuron(now, i)
    old_key = was["key"][i]
    assert (new["value"] == 0).all(), f"neuron {i}: its value is not zero"
    others = [k for k in range(len(now["key"])) if k != i]
    assert not any(torch.allclose(new["key"], now["key"][k]) for k in others), (
        f"neuron {i} has the key of another neuron: both would get the same gradients for"
        " ever, so draw a key for each"
    )
    along = F.cosine_similarity(new["key"], old_key, dim=0).abs().item()
    assert len(old_key) == 1 or not old_key.any() or along <= 0.9999, (
        f"neuron {i} has its old key, or a multiple of it; wanted is a new random one"
    )
    assert (new["key"] != 0).all(), (
        f"neuron {i}: its key is 0 at some place, and never reads that number"
    )


def _check_revived(revive: Answer, found: Any, mlp: MLP, x: Tensor, gone: list[int]) -> None:
    """What the call returned, and what comes after it: a second call, and a gradient."""
    size = found.numel() if isinstance(found, Tensor) else 1
    assert size == 1, (
        f"revive returned a tensor of {size} numbers; expected is how many neurons were dead: if it"
        " is the mask, its sum"
    )
    assert found is not None and not isinstance(found, bool), (
        f"revive returned {found!r}, expected how many neurons were dead"
    )
    count = expect_number(found, "what revive returned")
    assert count == len(gone), f"revive returned {count:g}, but {len(gone)} neurons were dead"
    assert all(p.grad is None for p in mlp.parameters()), (
        "after the call the parameters hold gradients: an optimizer would use them"
    )
    again = expect_number(revive(mlp, x), "what revive returned")
    assert again == 0, (
        "dead means a match above 0 for no example, whatever the mean or the gradient; but called"
        f" again, when every neuron fires for some example, revive returned {again:g}"
    )
    F.mse_loss(mlp(x), torch.randn_like(x)).backward()
    gradient = mlp.down_proj.weight.grad
    for i in gone:
        assert gradient is not None and (gradient[:, i] != 0).all(), (
            f"no gradient reaches the value of neuron {i}, so it cannot learn"
        )


def check_random(revive: Answer) -> None:
    """Task 6: no seed of its own."""
    mlp, x = _sleepy_layer(6, 20, 50, range(10), (), (), (), torch.float32)
    layers = [mlp, copy.deepcopy(mlp)]
    for layer in layers:
        revive(layer, x)
    first, second = (layer.up_proj.weight.detach()[:10] for layer in layers)
    assert not torch.equal(first, second), (
        "two calls draw the same keys. Set no seed in the function: it would change the random"
        " numbers of the whole training, and what dies later would get the keys of these neurons"
    )

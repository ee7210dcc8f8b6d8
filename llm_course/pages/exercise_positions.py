"""The visible checks of exercise 03, embeddings and positions: each says what is wrong with an
answer.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llm_course.model.rope import RotaryEmbedding, apply_rotary, rotary_frequencies, rotate_half
from llm_course.pages.checking import Answers, case, forbid, written

Answer = Callable[..., Any]
READY_MADE = (apply_rotary, rotate_half, rotary_frequencies, RotaryEmbedding.forward)


def _expect_kind(actual: Any, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    """Compare type, shape and dtype."""
    assert isinstance(actual, Tensor), (
        f"expected a tensor, got {type(actual).__name__}: does the function return its result?"
    )
    assert actual.shape == shape, f"the shape is {tuple(actual.shape)}, expected {tuple(shape)}"
    assert actual.dtype == dtype, f"the dtype is {actual.dtype}, expected {dtype}"
    assert not actual.isnan().any(), (
        f"{int(actual.isnan().sum())} of {actual.numel()} numbers are NaN"
    )


def _expect(actual: Any, expected: Tensor, message: str, atol: float = 2e-4) -> None:
    """Compare the numbers too; `message` says what to look at if only they differ."""
    _expect_kind(actual, expected.shape, expected.dtype)
    off = float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0
    assert off < (0.05 if actual.dtype == torch.bfloat16 else atol), (
        f"{message} (largest difference {off:.2g})"
    )


# ------------------------------------------------------------------------------------------ task 1


def check_table(answers: Answers) -> None:
    """Task 1: the size of the tables, and the gradient of each row."""
    with case("Task 1, the table"):
        numbers, gradient = written(answers, "numbers", "gradient")
        assert hasattr(numbers, "__float__"), f"numbers is {numbers!r}: type a number, not a text"
        _check_numbers(numbers)
        assert isinstance(gradient, list | tuple | Tensor) and len(gradient) == 5, (
            f"gradient is {gradient}: type a list of five numbers, one for each row of the table"
        )
        assert all(hasattr(number, "__float__") for number in gradient), (
            f"gradient is {gradient}: type five plain numbers, that of the first column of each row"
        )
        _check_gradient([float(number) for number in gradient])


def _check_numbers(numbers: Any) -> None:
    tokens = nn.Embedding(1000, 16).weight.numel()
    rows = nn.Embedding(50, 16).weight.numel()
    assert numbers != 2 * tokens + rows, (
        "numbers: you counted the output layer as a table of its own, but tied layers share one"
    )
    assert numbers not in (tokens + rows + 1000, 2 * tokens + rows + 1000), (
        "numbers: you counted a bias of 1000 numbers, but this output layer has none"
    )
    assert numbers != tokens, "numbers: the learned positions are a table too"
    assert numbers != tokens + 50, "numbers: a position has a row of C numbers, as a token has"
    assert numbers == tokens + rows, (
        f"numbers: you have {numbers}; there are two tables, each with a row for each token or"
        " position, and C numbers in a row"
    )


def _check_gradient(typed: list[float]) -> None:
    table = nn.Embedding(5, 2)
    (table(torch.tensor([2, 0, 2, 3, 2])) * torch.arange(5.0)[:, None]).sum().backward()
    assert table.weight.grad is not None
    true = table.weight.grad[:, 0].tolist()
    assert typed != [1, 0, 3, 1, 0], (
        "gradient: you counted how often each row is read; here the place t gives t, and not 1"
    )
    assert typed != [2, 0, 9, 4, 0], "gradient: places are counted from 0"
    assert typed != [1, 0, 4, 3, 0], (
        "gradient: row 2 is read three times, and its places add up; the last doesn't replace the"
        " others"
    )
    assert typed != [1, 0, 2, 3, 0], "gradient: the places of a row are added up, not averaged"
    assert typed[1] == typed[4] == 0, "gradient: the rows 1 and 4 are never read, so they get 0"
    assert typed == true, (
        f"gradient: you have {typed}; for each row, add the places t at which its id occurs"
    )


def check_pair(answers: Answers, *, query: int, key: int) -> None:
    """Task 1: the arrows (2, 0) and (0, 3), turned by 30 degrees a position, and their score."""
    with case("Task 1, the pair"):
        names = "turned_query", "turned_key", "score", "score_later"
        typed_query, typed_key, score, later = written(answers, *names)
        q = _arrow(2, 0, 30 * query)
        k = _arrow(0, 3, 30 * key)
        _check_arrow("turned_query", typed_query, (2, 0), query, key, k)
        _check_arrow("turned_key", typed_key, (0, 3), key, query, q)
        for name, typed in (("score", score), ("score_later", later)):
            assert hasattr(typed, "__float__"), (
                f"{name} is {typed!r}: type a number, or an expression that gives one"
            )
        _check_scores(float(score), float(later), (q * k.conjugate()).real, 30 * (query - key))


def _arrow(x: float, y: float, degrees: float) -> complex:
    angle = math.radians(degrees)
    return complex(x, y) * complex(math.cos(angle), math.sin(angle))


def _check_arrow(
    name: str, typed: Any, start: tuple[int, int], position: int, partner: int, other: complex
) -> None:
    """One turned arrow; `partner` is the position of the other."""
    assert isinstance(typed, list | tuple | Tensor) and len(typed) == 2, (
        f"{name} is {typed}: type its two numbers, as in (1, 0)"
    )
    assert all(hasattr(number, "__float__") for number in typed), (
        f"{name} is {typed}: type two numbers, not texts"
    )
    seen = complex(float(typed[0]), float(typed[1]))
    true = _arrow(*start, 30 * position)
    slips = {
        "this is the arrow before it is turned; it starts at the angle that it has, and turns"
        " on from there": _arrow(*start, 0),
        "it is turned clockwise; turning (x, y) by a gives (x cos a - y sin a, y cos a + x sin"
        " a)": _arrow(*start, -30 * position),
        "math.cos takes radians, and you gave it degrees": _arrow(
            *start, math.degrees(30 * position)
        ),
        "it is turned by the distance; each arrow turns by its own position, before anybody"
        " knows the other": _arrow(*start, 30 * abs(position - partner)),
        "a rotation keeps the length, and your arrow has length 1": true / abs(true),
        "the two numbers are swapped: the length times the cosine of the angle is the first": (
            complex(true.imag, true.real)
        ),
        f"it is turned by {position + 1} steps; positions are counted from 0, so at the position"
        f" {position} it is {position}": _arrow(*start, 30 * (position + 1)),
        "these are the numbers of the other arrow": other,
    }
    # two slips may give the same arrow
    likely = [slip for slip, wrong in slips.items() if abs(seen - wrong) < 0.05 < abs(true - wrong)]
    assert not likely, f"{name}: {'. Or: '.join(likely)}"
    assert abs(seen - true) < 0.02, (
        f"{name} is {tuple(typed)}: it starts as {start} and turns by 30 degrees for each of its"
        f" {position} positions"
    )


def _check_scores(score: float, later: float, true: float, degrees: int) -> None:
    """The dot product; the distance turns by so many degrees."""
    alone = 6 * math.cos(math.radians(degrees))
    assert abs(score + true) > 0.02, (
        "score has the wrong sign: multiply the first numbers, multiply the second numbers, and add"
    )
    assert abs(score) > 0.02, "score: this is the score of the arrows before they are turned"
    assert abs(score - alone) > 0.02, (
        f"score: the distance turns by {degrees} degrees, but the arrows were 90 degrees apart to"
        " begin with"
    )
    assert abs(score - true / 6) > 0.02, (
        "score: a cosine alone; a dot product is multiplied by both lengths"
    )
    assert abs(score - true) < 0.02, (
        f"score is {score:.3f}, but the dot product of the turned arrows is another: multiply the"
        " first numbers, multiply the second numbers, and add"
    )
    assert abs(later - true) < 0.02, (
        f"score_later is {later:.3f}: both turn on by the same angle, so what becomes of the angle"
        " between them?"
    )


# ------------------------------------------------------------------------------------------ task 2


def _sinusoid_rows(positions: Sequence[int], C: int, base: float = 1e4) -> Tensor:
    """Number by number: all sines, then all cosines (T, C)."""
    angles = [[p * base ** (-2 * i / C) for i in range(C // 2)] for p in positions]
    return torch.tensor([[math.sin(a) for a in row] + [math.cos(a) for a in row] for row in angles])


def check_sinusoids(sinusoids: Answer) -> None:
    """Task 2: positions of shape (T,)."""
    with case("Task 2, sinusoids"):
        found = sinusoids(torch.arange(5), 6)
        true = _sinusoid_rows(range(5), 6)
        _expect_kind(found, true.shape)
        assert not torch.allclose(found, true[:, [0, 3, 1, 4, 2, 5]], atol=1e-4), (
            "sines and cosines are side by side; here all sines come first"
        )
        _expect(
            found[:1],
            true[:1],
            "position 0 must be 0, 0, 0 and then 1, 1, 1: sines first, cosines last, and the first"
            " position is 0",
        )
        squares = found[:, :3].square() + found[:, 3:].square()
        assert torch.allclose(squares, torch.ones(5, 3), atol=1e-4), (
            "number i and number i + C/2 must be the sine and the cosine of one angle: do they"
            " have the same speed?"
        )
        _expect(
            found,
            true,
            "position 0 is right, later ones are not: is the angle position times speed?",
        )
        _expect(
            sinusoids(torch.tensor([30, 2]), 6),
            _sinusoid_rows((30, 2), 6),
            "right for 0, 1, 2, ..., wrong for the positions 30 and 2: do you use the positions"
            " that you are given?",
        )
        _expect(
            sinusoids(torch.arange(4), 4, base=100.0),
            _sinusoid_rows(range(4), 4, 100.0),
            "with base=100 the numbers are wrong: does `base` count?",
        )


def check_many_sinusoids(
    sinusoids: Answer,
    positions: Sequence[Sequence[int]],
    C: int,
    words: str,
    *,
    atol: float = 2e-4,
) -> None:
    """Task 2: positions of shape (B, T)."""
    with case("Task 2, sinusoids"):
        true = torch.stack([_sinusoid_rows(row, C) for row in positions])
        _expect(sinusoids(torch.tensor(positions), C), true, words, atol=atol)


def check_shift(shift_matrix: Answer, k: int, C: int, base: float = 1e4) -> None:
    """Task 2: the matrix that moves all positions by k."""
    with case(f"Task 2, shift_matrix, k = {k}"):
        start = _sinusoid_rows(range(6), C, base).T
        goal = _sinusoid_rows(range(k, k + 6), C, base).T
        M = shift_matrix(k, C, base)
        _expect_kind(M, (C, C))
        if _moves(M, start, goal):
            return
        _check_places(M, k, start, goal, base)
        _check_move(M, k, C, base)
        off = (M @ start - goal).abs().amax(dim=0)
        raise AssertionError(
            f"C = {C}, base = {base:g}: M @ p(0) differs from p({k}) by {off[0]:.2g}, and"
            f" M @ p(5) from p({k + 5}) by {off[5]:.2g}. Each pair turns by k times its own speed"
        )


def _moves(matrix: Tensor, old: Tensor, new: Tensor) -> bool:
    return torch.allclose(matrix @ old, new, atol=1e-3)


def _check_places(M: Tensor, k: int, start: Tensor, goal: Tensor, base: float) -> None:
    """The right numbers in the wrong places."""
    C = len(M)
    order = torch.arange(C).view(2, -1).T.flatten()
    angles = torch.tensor([k * base ** (-2 * i / C) for i in range(C // 2)])
    cosines = angles.cos()
    numbers = torch.cat((cosines, cosines, angles.sin(), -angles.sin(), torch.zeros(C * C - 2 * C)))
    assert not _moves(M.T, start, goal), (
        f"the vectors move by {-k}, not by {k}, unless the cosines come first; here all sines"
        " come first. Look at the signs of the two sines"
    )
    assert not _moves(M, start[order], goal[order]), (
        "this matrix is right for sines and cosines side by side; here all sines come first"
    )
    assert not torch.allclose(M.flatten().sort().values, numbers.sort().values, atol=1e-3), (
        "these are the right numbers, but in other places: which rows hold the new sines, which"
        " columns the old, and where is the minus?"
    )


def _check_move(M: Tensor, k: int, C: int, base: float) -> None:
    """Another distance, another base, or no rotation."""
    start = _sinusoid_rows(range(6), C, base).T
    assert not _moves(M, start, _sinusoid_rows(range(k + 1, k + 7), C, base).T), (
        f"the vectors move by {k + 1}, not by {k}"
    )
    usual = _sinusoid_rows(range(6), C).T
    assert not _moves(M, usual, _sinusoid_rows(range(k, k + 6), C).T), (
        f"base = {base:g}: these are the speeds of base 10,000: does `base` count?"
    )
    assert _moves(M @ M.T, torch.eye(C), torch.eye(C)), (
        "M is no rotation: M @ M.T must be 1 on the diagonal and 0 elsewhere, so that lengths are"
        " kept"
    )


# ------------------------------------------------------------------------------------------ task 3


def check_part(
    turn_part: Answer,
    B: int,
    H: int,
    T: int,
    D: int,
    R: int,
    *,
    dtype: torch.dtype = torch.float32,
    own: bool = False,
) -> None:
    """Task 3: against complex numbers; `own` gives each text of the batch a table."""
    words = ", R = D" if R == D else ""
    if own:
        words += f", a table for each {'of B = H texts' if B == H else 'text of the batch'}"
    words += f", in {str(dtype)[6:]}" if dtype != torch.float32 else ""
    with case(f"Task 3, turn_part, (B, H, T, D, R) = {(B, H, T, D, R)}{words}"):
        generator = torch.Generator().manual_seed(D + R)
        x = torch.randn(B, H, T, D, generator=generator).to(dtype)
        angles = torch.randn(B if own else 1, T, R // 2, generator=generator)
        before = x.clone()
        y = turn_part(x, *(torch.cat((t, t), dim=-1) for t in (angles.cos(), angles.sin())))
        assert torch.equal(x, before), (
            "your function changes x itself; the caller may still need it, so make a new tensor"
        )
        _check_left_alone(y, before, R)
        arrows = torch.complex(*before[..., :R].float().chunk(2, dim=-1))
        arrows = arrows * torch.polar(torch.ones_like(angles), angles)[:, None]
        true = torch.cat((arrows.real, arrows.imag, before[..., R:].float()), dim=-1).to(dtype)
        message = (
            f"D = {D}, R = {R}: the numbers 0 to {R - 1} are turned, but not as pairs (i, i +"
            f" {R // 2}) of their own. Do the pairs lie inside the turned part?"
        )
        if own:
            message = "is text b turned by its own table, cos[b] and sin[b], in all of its heads?"
        _expect(y, true, message)


def _check_left_alone(y: Any, x: Tensor, R: int) -> None:
    """Type, shape and dtype, and the numbers from R on."""
    D = x.shape[-1]
    assert isinstance(y, Tensor), (
        f"expected a tensor, got {type(y).__name__}: does the function return its result?"
    )
    assert y.shape == x.shape, (
        f"x is {tuple(x.shape)}, but the result is {tuple(y.shape)}: the numbers that are not"
        " turned belong to it too"
    )
    assert y.dtype == x.dtype, f"the dtype is {y.dtype}, expected {x.dtype}, that of x"
    assert R == D or not torch.equal(y[..., : D - R], x[..., R:]), (
        "the two pieces are glued in the wrong order: the turned numbers come first"
    )
    assert R == D or not torch.equal(y[..., : D - R], x[..., : D - R]), (
        f"the last {R} numbers are turned; here it is the first {R}"
    )
    assert torch.equal(y[..., R:], x[..., R:]), (
        f"D = {D}, R = {R}: the numbers {R} to {D - 1} are not to be turned, but they changed"
    )


def check_part_gradient(turn_part: Answer) -> None:
    """Task 3: gradients flow back to x."""
    with case("Task 3, turn_part, the gradient"):
        x = torch.ones(1, 1, 2, 6, requires_grad=True)
        y = turn_part(x, torch.ones(1, 2, 4), torch.zeros(1, 2, 4))
        assert isinstance(y, Tensor) and y.requires_grad, (
            "none reaches x: is a copy made by detach(), .data or no_grad()?"
        )
        [reached] = torch.autograd.grad(y.sum(), [x])
        assert torch.equal(reached, torch.ones(1, 1, 2, 6)), "that of some numbers of x is lost"


def check_rows(
    to_halves: Answer,
    H: int,
    D: int,
    R: int | None = None,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Task 3: give each row its number, and look which is where."""
    words = f"{H * D} rows in {H} heads of {D}, rotary_dim "
    words += "not given" if R is None else f"= {R}"
    words += ", a bias" if bias else ""
    words += f", in {str(dtype)[6:]}" if dtype != torch.float32 else ""
    with case(f"Task 3, to_halves, {words}"):
        numbered = torch.arange(float(H * D))
        if not bias:
            numbered = numbered[:, None] + torch.tensor([0, 0.25, 0.5])
        numbered = numbered.to(dtype)
        before = numbered.clone()
        made = to_halves(numbered, H) if R is None else to_halves(numbered, H, R)
        assert torch.equal(numbered, before), (
            "your function changes the weight itself; make a new tensor"
        )
        rows = _rows_of(made, numbered)
        _check_order(rows, H, D, D if R is None else R)


def _rows_of(made: Any, numbered: Tensor) -> list[int]:
    """Which row is where, if all of them are there, each as a whole."""
    kind = "bias" if numbered.ndim == 1 else "weight"
    assert isinstance(made, Tensor), (
        f"expected a tensor, got {type(made).__name__}: does the function return its result?"
    )
    assert made.shape == numbered.shape, (
        f"the shape is {tuple(made.shape)}, expected {tuple(numbered.shape)}, that of the {kind}"
    )
    assert made.dtype == numbered.dtype, (
        f"the dtype is {made.dtype}, expected {numbered.dtype}, that of the weight"
    )
    if kind == "weight":
        assert torch.equal(made - made[:, :1], numbered - numbered[:, :1]), (
            "the rows are mixed up inside: permute whole rows, along dimension 0"
        )
        made = made[:, 0]
    rows = made.long().tolist()
    assert sorted(rows) == list(range(len(rows))), (
        f"some rows are missing and others are there twice: {rows}"
    )
    return rows


def _check_order(rows: list[int], H: int, D: int, R: int) -> None:
    """Evens before odds in each head, and then those that aren't turned."""
    kept = [*range(R, D)]
    orders = {
        "right": [*range(0, R, 2), *range(1, R, 2), *kept],
        "back": [*(i // 2 + i % 2 * (R // 2) for i in range(R)), *kept],
        "odd": [*range(1, R, 2), *range(0, R, 2), *kept],
    }
    all_heads = {name: [h * D + r for h in range(H) for r in o] for name, o in orders.items()}
    if rows == all_heads["right"]:
        return
    assert rows != list(range(H * D)), "no row has moved"
    assert rows != all_heads["back"], (
        "this is the way back, from halves to neighbours; the first head begins with the"
        f" rows {rows[:R]}"
    )
    assert rows != all_heads["odd"], (
        "odd rows come first, so every pair is swapped and turns the other way round"
    )
    assert all(row // D == i // D for i, row in enumerate(rows)), (
        f"rows move from one head to another, the first head is {rows[:D]}: permute within"
        " each head"
    )
    assert all(rows[i] == i for i in range(H * D) if i % D >= R), (
        f"the rows from {R} on in each head are not turned, and must stay where they are,"
        f" but the first head is {rows[:D]}"
    )
    raise AssertionError(
        f"the first head is {rows[:D]}, the last {rows[-D:]}. In a head, old rows 0 and 1"
        f" must come to the places 0 and {R // 2}, old rows 2 and 3 to the places 1 and"
        f" {R // 2 + 1}"
    )


def check_same_scores(to_halves: Answer, H: int, D: int, R: int, T: int = 4) -> None:
    """Task 3: neighbouring pairs before and halves after give the same scores."""
    with case("Task 3, to_halves, the scores"):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(T, 5, generator=generator)
        angles = torch.arange(T)[:, None] * torch.rand(R // 2, generator=generator)
        turn = torch.polar(torch.ones_like(angles), angles)
        before = []
        after = []
        for weight in torch.randn(2, H * D, 5, generator=generator):  # of queries, and of keys
            # (H, T, D)
            old, new = (
                (x @ rows.T).view(T, H, D).transpose(0, 1)
                for rows in (weight, to_halves(weight.clone(), H, R))
            )
            pairs = torch.view_as_complex(old[..., :R].unflatten(-1, (R // 2, 2)).contiguous())
            pairs = pairs * turn
            before.append(torch.cat((pairs.real, pairs.imag, old[..., R:]), dim=-1))
            pairs = torch.complex(*new[..., :R].chunk(2, dim=-1)) * turn
            after.append(torch.cat((pairs.real, pairs.imag, new[..., R:]), dim=-1))
        scores = [q @ k.transpose(-1, -2) for q, k in (after, before)]
        _expect(
            scores[0],
            scores[1],
            f"H = {H}, D = {D}, R = {R}: halves after the conversion give other scores than"
            " neighbours before it",
        )


# ------------------------------------------------------------------------------------------ task 4


def _mended(answers: Answers) -> Answer:
    assert "mended_rotary" in answers, (
        "write the function mended_rotary in the cell above and run it"
    )
    return answers["mended_rotary"]


def check_pairs(answers: Answers) -> None:
    """Task 4: number i turns with number i + D/2."""
    with case("Task 4, the pairs"):
        mended = _mended(answers)
        x = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(1))
        one = torch.eye(8)[1].expand(1, 1, 1, 8)
        with forbid(*READY_MADE):
            turned = mended(x, torch.arange(9))
            spread = mended(one, torch.tensor([1]))
        _expect_kind(turned, x.shape)
        off = (turned.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max()
        places = spread[0, 0, 0].nonzero().flatten().tolist()
        assert places not in ([0, 1], [1, 2]), (
            f"number 1 of a head is turned into the places {places}: these are neighbouring pairs,"
            " another layout; here number 1 belongs to number 5"
        )
        assert places == [1, 5], (
            f"number 1 of a head is turned into the places {places}, expected [1, 5]: the pairs are"
            " (i, i + D/2)"
        )
        assert off < 1e-3, (
            f"a turned vector changes its length by up to {off:.0%}: the two numbers of a pair must"
            " turn by the same angle. Where are they, and which angles are there?"
        )


def check_speeds(answers: Answers) -> None:
    """Task 4: the last pair has turned by 1 radian where it should have."""
    with case("Task 4, the speeds"), forbid(*READY_MADE):
        mended = _mended(answers)
        for D, base in ((8, 1e4), (16, 500.0)):
            x = torch.eye(D)[-1].expand(1, 1, 1, D)
            place = round(base ** (1 - 2 / D))
            turned = mended(x, torch.tensor([place]), base)
            _expect_kind(turned, x.shape)
            cosine = turned[0, 0, 0, -1].item()
            true = math.cos(place * base ** (2 / D - 1))
            halved = math.cos(place * base ** ((1 - D / 2) / D))
            assert abs(cosine - halved) > 1e-2, (
                f"D = {D}, base {base:g}: the last pair turns by the base to the power of"
                f" -{D // 2 - 1}/{D} a position, far too fast; the exponents go in steps of 2/{D}"
            )
            assert abs(cosine - 1) > 1e-3, (
                f"D = {D}: one token at position {place} is hardly turned: does it turn by the"
                " position that you are given, or is the last speed far too slow?"
            )
            assert abs(cosine - true) < 1e-2, (
                f"D = {D}, base {base:g}: at position {place} the cosine of the last pair is"
                f" {cosine:.3f}, expected {true:.3f}: its speed must be the base to the power of"
                f" -{D - 2}/{D}{'' if base == 1e4 else '. Does rope_theta count?'}"
            )


def check_precision(answers: Answers) -> None:
    """Task 4: positions around 1000, for a model in bfloat16."""
    with case("Task 4, the precision"):
        mended = _mended(answers)
        x = torch.eye(8)[0].expand(1, 1, 8, 8).bfloat16()
        with forbid(*READY_MADE):
            turned = mended(x, torch.arange(1000, 1008))
        _expect_kind(turned, x.shape, torch.bfloat16)
        distinct = len(turned[0, 0, :, 0].unique())
        assert distinct == 8, (
            f"in bfloat16 only {distinct} of the 8 positions 1000 to 1007 give different vectors:"
            " are the positions, or the angles, rounded before their cosine is taken?"
        )
        found = turned[0, 0, :, 0].double()
        assert (found - torch.arange(8).double().cos()).abs().max() > 0.02, (
            "the positions 1000 to 1007 are turned as if they were 0 to 7: use the positions that"
            " you are given"
        )
        off = (found - torch.arange(1000, 1008).double().cos()).abs().max()
        assert off < 0.02, (
            "in bfloat16 the first pair, which turns 1 radian a position, has a cosine that is off"
            f" by {off:.2g} at the positions 1000 to 1007: are the positions, or the angles,"
            " rounded before their cosine is taken?"
        )


def check_rotary(
    answers: Answers,
    sizes: tuple[int, int, int],
    positions: Sequence[int],
    base: float = 1e4,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Task 4: the whole rotation of (B, H, D), against complex numbers in float64."""
    with case("Task 4, the whole rotation"):
        mended = _mended(answers)
        B, H, D = sizes
        generator = torch.Generator().manual_seed(D)
        x = torch.randn(B, H, len(positions), D, generator=generator).to(dtype)
        before = x.clone()
        with forbid(*READY_MADE):
            turned = mended(x, torch.tensor(positions), base)
        assert torch.equal(x, before), (
            "your function changes x itself; the caller may still need it, so make a new tensor"
        )
        _expect_kind(turned, before.shape, dtype)
        speeds = torch.tensor([base ** (-2 * i / D) for i in range(D // 2)]).double()
        turn = torch.exp(1j * torch.tensor(positions).double()[:, None] * speeds)
        arrows = torch.complex(*before.double().chunk(2, dim=-1))
        off, backwards = (
            (turned.double() - torch.cat((y.real, y.imag), dim=-1)).abs().max()
            for y in (arrows * turn, arrows * turn.conj())
        )
        limit = 0.06 if dtype == torch.bfloat16 else 2e-3
        assert off < limit or backwards > limit, (
            "every pair turns backwards, by minus its angle: look at the sign of the two halves"
            " beside the sine"
        )
        assert off < limit, (
            f"D = {D}, positions {positions}, {dtype}: the result differs by {off:.2g} from that of"
            " complex numbers. Is one of the three bugs left, or a sign changed, or something"
            " rounded?"
        )


# ------------------------------------------------------------------------------------------ task 5


def _speeds(n: int, D: int, L: int, base: float) -> Tensor:
    """One base for one text, number by number: (D/2,)."""
    own = base * max(n / L, 1) ** (D / (D - 2)) if D > 2 else base
    return torch.tensor([own ** (-2 * i / D) for i in range(D // 2)])


def _slowed(stretched_speeds: Answer, n: int, D: int, L: int, base: float = 1e4) -> Tensor:
    """How many times slower than in training, pair by pair."""
    arguments = (torch.tensor([n]), D, L) if base == 1e4 else (torch.tensor([n]), D, L, base)
    found = stretched_speeds(*arguments)
    _expect_kind(found, (1, D // 2))
    return _speeds(L, D, L, base) / found[0]


def check_one_text(stretched_speeds: Answer) -> None:
    """Task 5: a text of one length, first where nothing should be stretched."""
    with case("Task 5, one text"):
        ratio = _slowed(stretched_speeds, 64, 8, 64)
        assert (ratio - 1).abs().max() < 1e-3, (
            "64 tokens after a training on 64, so s = 1: even without a stretch the last pair turns"
            f" {1 / ratio[-1]:.3g} times as fast as in training. Do the exponents go in steps of"
            " 2/D (0, -2/8, -4/8, -6/8), and is only s raised to the power of D / (D - 2)?"
        )
        _check_96(_slowed(stretched_speeds, 96, 8, 64))
        ratio = _slowed(stretched_speeds, 16, 8, 64)
        assert ratio[-1] > 0.999, (
            "16 tokens after a training on 64: the last pair turns"
            f" {1 / ratio[-1]:.2f} times as fast as before; s is never less than 1"
        )
        _expect(
            ratio,
            torch.ones(4),
            "16 tokens after a training on 64: a short text keeps the speeds of the training",
        )
    does_it_count = {
        (
            96,
            8,
            64,
            5e5,
        ): "right for rope_theta = 10,000, wrong for 500,000: does rope_theta count?",
        (300, 8, 100, 1e4): "right for a training on 64 tokens, wrong for one on 100: does"
        " trained_length count?",
        (96, 16, 64, 1e4): "right for D = 8, wrong for D = 16: does head_dim count, in the exponent"
        " of s too?",
        (2000, 16, 500, 5e5): "wrong for D = 16, L = 500 and rope_theta = 500,000",
    }
    for sizes, words in does_it_count.items():
        check_text(stretched_speeds, *sizes, words=words)


def _check_96(ratio: Tensor) -> None:
    """A stretch by 1.5, with D = 8."""
    trained = "96 tokens after a training on 64"
    assert abs(ratio[0] - 1) < 1e-3, (
        f"{trained}: the first pair is slowed by {ratio[0]:.3f}, but this rule keeps its speed;"
        " stretch the base, not the speeds or the positions"
    )
    assert abs(ratio[-1] - 1) > 1e-3, (
        f"{trained}: nothing is slowed. Is 96 / 64 rounded down to 1, or clamped from above,"
        " or upside down?"
    )
    assert abs(ratio[-1] - 1.5 ** (1 - 2 / 8)) > 1e-3, (
        f"the last pair is slowed by {ratio[-1]:.3f}, a little less than 1.5: the base is"
        " multiplied by s itself, without the exponent D / (D - 2)"
    )
    assert abs(ratio[-1] - 1.5) < 1e-3, (
        f"{trained}: the last pair is slowed by {ratio[-1]:.3f}, expected exactly 1.5"
    )
    _expect(
        ratio / (_speeds(64, 8, 64, 1e4) / _speeds(96, 8, 64, 1e4)),
        torch.ones(4),
        "the first and the last pair are right, those between are not: one base for all pairs of a"
        " text",
    )


def check_text(
    stretched_speeds: Answer, n: int, D: int, L: int, base: float = 1e4, *, words: str = ""
) -> None:
    """Task 5: the speeds of one text of n tokens."""
    with case("Task 5, one text"):
        ratio = _slowed(stretched_speeds, n, D, L, base)
        _expect(
            ratio * _speeds(n, D, L, base) / _speeds(L, D, L, base),
            torch.ones(D // 2),
            words or f"n = {n}, D = {D}, L = {L}, base {base:g}",
        )


def check_batch(
    stretched_speeds: Answer, lengths: Sequence[int], D: int, L: int, base: float
) -> None:
    """Task 5: each text of a batch has its own speeds."""
    with case("Task 5, a batch"):
        given = torch.tensor(lengths)
        found = stretched_speeds(given, D, L, base)
        assert given.tolist() == list(lengths), (
            "your function changes `lengths` itself; the caller may still need them"
        )
        _expect_kind(found, (len(lengths), D // 2))
        for row, n in zip(found, lengths, strict=True):
            worst = (row / _speeds(n, D, L, base) - 1).abs().max()
            others = [m for m in lengths if torch.allclose(row, _speeds(m, D, L, base), rtol=1e-3)]
            whose = (
                f": these are the speeds of a text with {others[0]}; does each text have its own"
                " stretch?"
                if others
                else ""
            )
            assert worst < 1e-3, (
                f"lengths {lengths}, D = {D}, L = {L}, base {base:g}: the speeds of the text with"
                f" {n} tokens are off by {worst:.1%}{whose}"
            )


# ------------------------------------------------------------------------------------------ task 6


def check_share(
    share_on_target: Answer,
    rope: RotaryEmbedding,
    T: int,
    distance: int,
    *,
    seed: int = 0,
    words: str = "",
) -> None:
    """Task 6: against a sum of cosines, since a score depends on the distance alone."""
    with case(f"Task 6, share_on_target{words}"):
        D = rope.head_dim
        q, k = torch.randn(2, D, generator=torch.Generator().manual_seed(seed))
        found = share_on_target(rope, q.clone(), k.clone(), T, distance)
        _check_shares_kind(found, T, distance)
        true = _shares(rope, q, k, T, distance)
        if torch.allclose(found.float(), true, atol=1e-4):
            return
        assert found.any(), (
            f"all shares are 0, but the query {distance} has such a key, the first token: is the"
            " mask the wrong way round, or the limit for T off by one?"
        )
        _check_share_slips(found, rope, q, k, T, distance)
        raise AssertionError(
            f"D = {D}, T = {T}, distance = {distance}: the shares end in"
            f" {[round(share, 3) for share in found[-3:].tolist()]}, expected"
            f" {[round(share, 3) for share in true[-3:].tolist()]}: are both turned by their"
            " positions, with the scaling and the attention factor of `rope`, and is it the key t -"
            " distance?"
        )


def _check_shares_kind(found: Any, T: int, distance: int) -> None:
    assert not isinstance(found, list | tuple), (
        "the result is a list: make it a tensor, with torch.stack or torch.tensor"
    )
    assert isinstance(found, Tensor), (
        f"expected a tensor, got {type(found).__name__}: does the function return its result?"
    )
    assert found.shape == (T,), (
        f"T = {T}, distance = {distance}: the shape is {tuple(found.shape)}, expected ({T},): a"
        " number for each query, also for those without such a key"
    )
    assert not found.isnan().any(), (
        f"the shares at {found.isnan().nonzero().flatten().tolist()} are NaN: is the mask the wrong"
        " way round, or are there queries without such a key? These get 0"
    )
    assert (found[:distance] == 0).all(), (
        f"distance = {distance}: the queries before {distance} have no key so far back, so their"
        f" share is 0, but here {[round(share, 3) for share in found[:distance].tolist()]}"
    )


def _shares(
    rope: RotaryEmbedding,
    q: Tensor,
    k: Tensor,
    T: int,
    distance: int,
    *,
    turned: Tensor | None = None,
    divisor: float | None = None,
    hidden: Tensor | None = None,
    fill: float = -math.inf,
    dim: int = -1,
    back: int | None = None,
) -> Tensor:
    """The right shares (T,), or those of a slip: other angles, another scale, mask or softmax."""
    t = torch.arange(T)[:, None]
    s = torch.arange(T)
    pairs = torch.complex(*q.double().chunk(2)) * torch.complex(*k.double().chunk(2)).conj()
    angles = (t - s if turned is None else turned)[..., None] * rope.frequencies.double()
    scores = (pairs * rope.attention_factor**2 * torch.exp(1j * angles)).real.sum(-1)
    scores = scores / (math.sqrt(rope.head_dim) if divisor is None else divisor)
    weights = scores.masked_fill(s > t if hidden is None else hidden, fill).softmax(dim)
    back = distance if back is None else back
    shares = torch.cat((torch.zeros(min(back, T)), weights.diagonal(-back))).float()
    return shares.masked_fill(torch.arange(T) < distance, 0.0)


def _check_share_slips(
    found: Tensor, rope: RotaryEmbedding, q: Tensor, k: Tensor, T: int, distance: int
) -> None:
    t = torch.arange(T)[:, None]
    s = torch.arange(T)
    slips: dict[str, dict[str, Any]] = {
        "the weights also go to later tokens: hide them before the softmax": {"hidden": s > T + t},
        "the scores are not divided by the root of D": {"divisor": 1},
        "the scores are divided by D, and not by its root": {"divisor": rope.head_dim},
        "the scores are divided by 2, the root of 4, whatever D is": {"divisor": 2},
        "query and key have changed roles, or turn the other way round": {"turned": s - t},
        "later tokens get the score 0, and exp(0) is 1: give them minus infinity": {"fill": 0.0},
        "a token does not see itself: hide only the later ones": {"hidden": s >= t},
        "only the query is turned: the key turns by its own position": {"turned": t + 0 * s},
        "only the key is turned: the query turns by its own position": {"turned": 0 * t - s},
        "nothing is turned: query and key turn by their positions": {"turned": 0 * (t - s)},
        "the softmax goes over the queries: each query shares its weight among the keys, so the"
        " last dimension": {"dim": 0},
        "this is the key one place too far back": {"back": distance + 1},
        "this is the key 3 places back: does `distance` count?": {"back": 3},
    }
    for words, slip in slips.items():
        wrong = _shares(rope, q, k, T, distance, **slip)
        assert wrong.shape != found.shape or not torch.allclose(found.float(), wrong, atol=1e-4), (
            words
        )


def check_failure(
    first_failure: Answer,
    shares: Sequence[float],
    distance: int,
    expected: int | None,
    words: str,
    **limit: float,
) -> None:
    """Task 6: the first position from `distance` on whose share is below the limit."""
    with case("Task 6, first_failure"):
        given = torch.tensor(shares)
        found = first_failure(given, distance, **limit)
        assert torch.equal(given, torch.tensor(shares)), (
            "first_failure changes `shares` itself; the caller may still need them"
        )
        assert found is None or not isinstance(found, bool | str) and int(found) == found, (
            f"first_failure returns {found!r}, expected a position, or None"
        )
        if found is not None and expected is not None and found != expected:
            is_relative = distance > 0 and found == expected - distance
            if found < distance and not is_relative:
                words = "look from `distance` on: the queries before it have no such key"
            if is_relative and shares[int(found)] > limit.get("limit", 0.9):
                words = "positions are counted from 0, not from `distance`"
        assert found == expected, (
            f"shares {shares}, distance = {distance}: first_failure returns {found}, expected"
            f" {expected}: {words}"
        )

"""The visible checks of exercise 20, pretraining: each says what is wrong with an answer."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llm_course.pages.checking import Answer, case, explained, forbid, is_close
from llm_course.training.bands import Band
from llm_course.training.diagnosis import losses_by_offset

Curve = list[tuple[float, float]]


def call(answer: Answer, *arguments: Any, **options: Any) -> Any:
    """What the answer returns, without help from the package."""
    with case(getattr(answer, "__name__", "your answer")), forbid(Band, losses_by_offset):
        return answer(*arguments, **options)


# ------------------------------------------------------------------------------------- task 1


def check_how_far(
    how_far: Answer, *, loss: float, bytes_per_token: float, size: int, entropy: float
) -> None:
    """`how_far(loss, bytes_per_token, vocab_size, entropy)`: three numbers."""
    found = call(how_far, loss, bytes_per_token, size, entropy)
    assert isinstance(found, tuple) and len(found) == 3, (
        f"how_far returned {found!r}, expected three numbers: bits_per_byte, above, learned"
    )
    bits, above, learned = found
    right = loss / bytes_per_token / math.log(2)
    assert not is_close(bits, loss / bytes_per_token), (
        "bits_per_byte is still in nats: a bit is ln 2 nats"
    )
    assert not is_close(bits, loss * bytes_per_token / math.log(2)), (
        "bits_per_byte: a token's loss is shared by its bytes, so divide by bytes_per_token"
    )
    assert is_close(bits, right), f"bits_per_byte is {bits}, expected {right:.4f}"
    assert not is_close(above, right / entropy - 1), (
        "above is asked in bits per byte, not as a share of the entropy"
    )
    assert is_close(above, right - entropy), (
        f"above is {above}, expected bits_per_byte - entropy = {right - entropy:.4f}"
    )
    nothing = math.log2(size) / bytes_per_token
    assert not is_close(learned, 1 - right / nothing), (
        "learned measures the way to 0, and nobody gets below the entropy: it ends there"
    )
    in_nats = math.log(size) / bytes_per_token
    assert not is_close(learned, (in_nats - right) / (in_nats - entropy)), (
        "learned begins at ln V nats per token; convert that to bits per byte, too"
    )
    expected = (nothing - right) / (nothing - entropy)
    assert is_close(learned, expected), (
        f"learned is {learned}, expected {expected:.4f}: the part of the way from knowing nothing"
        f" ({nothing:.2f}) to the entropy that the model has gone, negative if it went the other"
        " way"
    )


# ------------------------------------------------------------------------------------- task 2


def _seconds(steps: int, eval_interval: int, save_interval: int, costs: Sequence[float]) -> float:
    step, validation, save = costs
    times = math.ceil(steps / eval_interval) * validation + math.ceil(steps / save_interval) * save
    return steps * step + times


def check_plan(
    plan: Answer,
    *,
    seconds: float,
    costs: Sequence[float],
    most_lost: float = 20.0,
    share: float = 0.1,
) -> None:
    """`plan(seconds, step, validation, save, most_lost=..., share=...)`: a dictionary."""
    step, validation, _ = costs
    with explained(ZeroDivisionError, "an interval is at least 1, also where a step takes longer"):
        found = call(plan, seconds, *costs, most_lost=most_lost, share=share)
    names = ("max_steps", "eval_interval", "save_interval")
    assert isinstance(found, dict) and set(found) == set(names), (
        f"plan returned {found!r}, expected a dictionary with {', '.join(names)}"
    )
    assert all(type(found[name]) is int and found[name] >= 1 for name in names), (
        f"plan returned {found!r}: these are whole numbers of at least 1"
    )
    saving = found["save_interval"]
    assert saving == 1 or saving * step <= most_lost + 1e-9, (
        f"save_interval is {saving}: a crash just before the save loses {saving * step:.1f} s of"
        f" steps, and {most_lost:.0f} s are allowed"
    )
    assert (saving + 1) * step > most_lost, (
        f"save_interval is {saving}: with one more step a crash still loses no more than"
        f" {most_lost:.0f} s, so you save too often"
    )
    every = found["eval_interval"]
    assert validation <= share * every * step + 1e-9, (
        f"eval_interval is {every}: {validation} s of validation for {every * step:.1f} s of steps"
        f" are more than {share:.0%} of the time for the steps"
    )
    assert every == 1 or validation > share * (every - 1) * step, (
        f"eval_interval is {every}, and one step less keeps to the share, too: choose the smallest"
    )
    steps = found["max_steps"]
    needed = _seconds(steps, every, saving, costs)
    assert needed <= seconds + 1e-9, (
        f"max_steps is {steps}: with its validations and saves, one of each after the last step,"
        f" the run takes {needed:.1f} s of {seconds:.0f}"
    )
    more = _seconds(steps + 1, every, saving, costs)
    assert more > seconds, (
        f"max_steps is {steps}, and {steps + 1} steps with their validations and saves take"
        f" {more:.1f} s, which fit into {seconds:.0f}"
    )


# ------------------------------------------------------------------------------------- task 3


POINTS = (1e3, 1.5e3, 2e3, 3e3, 4e3, 6e3, 8e3, 11e3, 15e3, 20e3, 30e3)
EVEN = [1000.0 * i for i in range(1, 31)]
LATE = EVEN[:8] + [20_500.0 + 450 * i for i in range(22)]  # 22 of 30 points in the last third


def healthy_curves(num: int, *, first_seed: int = 0, noise: float = 0.04) -> list[Curve]:
    """Losses that fall alike, each by a factor of its own above or below the others; the factors
    come closer to 1 while the losses fall.
    """
    curves = []
    for seed in range(first_seed, first_seed + num):
        own = noise * float(torch.randn((), generator=torch.Generator().manual_seed(seed)))
        falling = [(x, (1000 / x) ** 0.5) for x in POINTS]
        curves.append([(x, (1 + own * (0.5 + fall)) * (0.5 + 5 * fall)) for x, fall in falling])
    return curves


def run_beside(reference: Sequence[Curve], tokens: Sequence[float], off: Sequence[float]) -> Curve:
    """A run whose losses lie so many spreads above the mean of the reference."""
    logs = np.log([[loss for _, loss in curve] for curve in reference])
    spreads = np.maximum(0.01, logs.std(axis=0, ddof=1) * math.sqrt(1 + 1 / len(reference)))
    points = [x for x, _ in reference[0]]
    mean = np.interp(tokens, points, logs.mean(axis=0))
    losses = np.exp(mean + np.array(off) * np.interp(tokens, points, spreads))
    return list(zip(tokens, losses.tolist(), strict=True))


SPREAD = (
    "a spread is the standard deviation (divided by n - 1) of the logarithms times sqrt(1 + 1/n),"
    " and only then at least 0.01; between two points it lies on a straight line, as the mean does"
)
# how far each of 30 points is off, in spreads; what is expected; what to look at
JUDGED: dict[str, tuple[Sequence[float], str, str]] = {
    "a run on the mean of the reference": (
        [0] * 30,
        "inside",
        "it's the mean of the logarithms, on a straight line between two points' tokens",
    ),
    "a run 3.99 spreads above": (
        [3.99] * 30,
        "inside",
        SPREAD,
    ),
    "a run 4.01 spreads above": (
        [4.01] * 30,
        "above",
        SPREAD,
    ),
    "a run 4.01 spreads below": ([-4.01] * 30, "below", "a loss can be too low, too"),
    "a run with one wild row near the end": (
        [0] * 27 + [90] + [0] * 2,
        "inside",
        "the median doesn't care how wild one row is",
    ),
    "a run that began badly and recovered": (
        [30] * 20 + [0] * 10,
        "inside",
        "only its last 10 points count",
    ),
    "a run whose last ten points are off": (
        [0] * 20 + [6] * 10,
        "above",
        "its last 10 points count",
    ),
    "a run that is off at the first five of its last ten points": (
        [0] * 20 + [10] * 5 + [0] * 5,
        "above",
        "the median of five times 10 spreads and five times 0 is 5; a third is rounded up",
    ),
    "a run 3 spreads above, and 4.5 at its last five points": (
        [0] * 20 + [3] * 5 + [4.5] * 5,
        "inside",
        "the median of ten deviations is the mean of the two in the middle",
    ),
}


def check_judge(judge: Answer, *, seed: int) -> None:
    """`judge(reference, run)`: "inside", "above" or "below"."""
    healthy = healthy_curves(6, first_seed=10 * seed)
    almost_equal = [healthy[0], healthy[0], [*healthy[0][:-1], (POINTS[-1], 1.2)]]
    for reference, who in (
        (healthy, "six healthy runs"),
        (almost_equal, "three runs that are equal but for their last point"),
    ):
        for tokens, where in (
            (EVEN, "30 points"),
            (EVEN[1:], "29 points"),
            (EVEN[2:], "28 points"),
            (LATE, "30 points, of which 22 lie in the last third of the tokens"),
        ):
            for name, (off, expected, hint) in JUDGED.items():
                run = run_beside(reference, tokens, off[-len(tokens) :])
                with explained(ZeroDivisionError, "the spread is at least 0.01"):
                    found = call(judge, reference, run)
                assert found == expected, (
                    f"{name} is judged {found!r}, expected {expected!r} ({who}, {where}): {hint}"
                )


# ------------------------------------------------------------------------------------- task 4


class PlantedModel(nn.Module):
    """Continues rows that count up or down in steps of their own: it bets on the token `offset`
    places ahead, and hardly less on the one `second` places ahead.

    It's sure of the wrong token at the first position, where it can't know the step, and in
    training mode it's wrong everywhere.
    """

    def __init__(self, offset: int, second: int, vocab_size: int = 97):
        super().__init__()
        self.offsets = (offset, second)
        self.vocab_size = vocab_size
        self.scale = nn.Parameter(torch.tensor(12.0))

    def forward(self, input_ids: Tensor) -> Any:
        step = input_ids.diff(dim=1, prepend=input_ids[:, :1])
        logits = torch.zeros(())
        for offset, doubt in zip(self.offsets, (0, 0.1), strict=True):
            ahead = (input_ids + offset * step + 11 * self.training) % self.vocab_size
            one_hot = nn.functional.one_hot(ahead, self.vocab_size)
            logits = logits + (self.scale - doubt) * one_hot
        logits[:, 0] *= 100
        return type("Output", (), {"logits": logits})()


def counting_rows(num: int, length: int, *, seed: int, vocab_size: int = 97) -> Tensor:
    """Rows (B, T) of tokens that count in steps, modulo the vocabulary; the first stands still."""
    generator = torch.Generator().manual_seed(seed)
    start, step = torch.randint(1, vocab_size, (2, num, 1), generator=generator)
    step[0] = 0
    return (start + step * torch.arange(length)) % vocab_size


def check_what_it_predicts(what_it_predicts: Answer, *, seed: int, length: int) -> None:
    """`what_it_predicts(model, ids)`: the offset of the token that the model has learned."""
    ids = counting_rows(5, length, seed=seed)
    for offset, second, training in (
        (1, 3, True),
        (2, 0, False),
        (0, 3, True),
        (-1, 3, False),
        (3, 0, True),
    ):
        model = PlantedModel(offset, second).train(training)
        found = call(what_it_predicts, model, ids.clone())
        switched_off = not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert not switched_off, (
            "you switched the gradients off for everybody who comes after you: `with"
            " torch.no_grad():` ends with its block"
        )
        assert model.training == training, (
            f"model.training was {training} before, and is {not training} now: put it back as it"
            " was"
        )
        assert model.scale.grad is None, "measuring isn't training: leave the gradients alone"
        assert found == offset, (
            f"a model that predicts the token {offset:+d} places ahead, and a little worse the one"
            f" {second:+d} places ahead, is said to predict {found!r}: in evaluation mode, compare"
            " position t with the token at t + offset, take the mean over all rows, and leave out"
            " position 0 and the positions that have no such token"
        )


# ------------------------------------------------------------------------------------- task 5

HONEST = {
    "steps": 60,
    "tokens": 61_440,
    "val_loss": 1.42,
    "bits_per_byte": 0.91,
    "vocab_size": 512,
    "corpus_bytes": 800_216,
    "seed": 3,
}


MEANT = {
    "steps": "`step` of the last whole row of metrics.jsonl",
    "tokens": "`targets` of the last whole row of metrics.jsonl",
    "val_loss": "`val_loss` of the last row that has one, to within 1% of it",
    "bits_per_byte": "`val_bits_per_byte` of the last row that has one, to within 1% of it",
    "vocab_size": "the number in data/info.json",
    "corpus_bytes": "the number in data/info.json",
    "seed": "`training.seed` of config.yaml",
}


def write_run(folder: str | Path, *, cut: bool = True) -> None:
    """A run's folder, without its weights: it was stopped at step 60 of 100."""
    root = Path(folder)
    (root / "data").mkdir(parents=True, exist_ok=True)
    (root / "config.yaml").write_text("training: {max_steps: 100, seed: 3}\n", encoding="utf-8")
    info = {"vocab_size": 512, "corpus_bytes": 800_216, "tokens": {"train": 330_000, "val": 9_000}}
    (root / "data" / "info.json").write_text(json.dumps(info), encoding="utf-8")
    rows: list[dict[str, float]] = []
    for step in range(10, 61, 10):
        rows.append({"step": step, "targets": 1024 * step, "loss": 1.3 + 30 / step})
    for row, loss in zip(rows[::2], (2.2, 1.402, 1.434), strict=True):
        row |= {"val_loss": loss, "val_bits_per_byte": loss / 2.27 / math.log(2)}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    # the process died while it wrote this row
    rest = '{"step": 70, "targets": 7168' if cut else ""
    (root / "metrics.jsonl").write_text(text + rest, encoding="utf-8")


def check_card_faults(card_faults: Answer, changes: Mapping[str, Any]) -> None:
    """`card_faults(card, run_dir)`: the names of the claims that the folder doesn't confirm."""
    for cut in (True, False):
        for card in (HONEST | dict(changes), dict(changes)):
            with tempfile.TemporaryDirectory() as folder:
                write_run(folder, cut=cut)
                found = call(card_faults, dict(card), folder)
            _check_faults(found, card, changes)


def _check_faults(found: Any, card: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    assert isinstance(found, list), f"card_faults returned {found!r}, expected a list of names"
    unclaimed = sorted(set(found) - set(card))
    assert not unclaimed, f"the card {card} doesn't claim {unclaimed[0]}, and you call it false"
    wrongly = sorted(set(found) - set(changes))
    assert not wrongly, (
        f"the claim {wrongly[0]}={card[wrongly[0]]!r} is true, and you call it false: what counts"
        f" is {MEANT[wrongly[0]]}"
    )
    missed = sorted(set(changes) - set(found))
    assert not missed, (
        f"the card says {missed[0]}={changes[missed[0]]!r}, the folder doesn't, and you accept it:"
        f" what counts is {MEANT.get(missed[0], 'that such a claim cannot be confirmed')}"
    )
    assert found == sorted(found), f"the names are {found}: sort them"

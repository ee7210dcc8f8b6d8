"""The visible checks of exercise 20, pretraining: each says what is wrong with an answer."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llm_course.pages.checking import Answer, case, forbid, is_close
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
        f" ({nothing:.2f}) to the entropy that the model has gone"
    )


# ------------------------------------------------------------------------------------- task 2


def _seconds(steps: int, eval_interval: int, save_interval: int, costs: Sequence[float]) -> float:
    step, validation, save = costs
    times = math.ceil(steps / eval_interval) * validation + math.ceil(steps / save_interval) * save
    return steps * step + times


def check_plan(plan: Answer, *, seconds: float, costs: Sequence[float]) -> None:
    """`plan(seconds, step, validation, save, most_lost=..., share=...)`: a dictionary."""
    step, validation, save = costs
    most_lost = 20.0
    share = 0.1
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


def healthy_curves(num: int, *, first_seed: int = 0, noise: float = 0.04) -> list[Curve]:
    """Losses that fall alike, each by a factor of its own above or below the others."""
    grid = [1000.0 * i for i in range(1, 31)]
    curves = []
    for seed in range(first_seed, first_seed + num):
        generator = torch.Generator().manual_seed(seed)
        own = 1 + noise * float(torch.randn((), generator=generator))
        wobble = 1 + 0.1 * noise * torch.randn(len(grid), generator=generator)
        curves.append(
            [
                (x, own * w * (0.5 + 5 * (1000 / x) ** 0.5))
                for x, w in zip(grid, wobble.tolist(), strict=True)
            ]
        )
    return curves


def bent(curve: Curve, factor: float, *, start: int = 0, stop: int | None = None) -> Curve:
    """The curve with the losses of some points multiplied by a factor."""
    places = range(len(curve))[start:stop]
    return [(x, y * factor if i in places else y) for i, (x, y) in enumerate(curve)]


def check_judge(judge: Answer, *, seed: int) -> None:
    """`judge(reference, run)`: "inside", "above" or "below"."""
    reference = healthy_curves(6, first_seed=10 * seed)
    middle = [
        (x, math.exp(sum(math.log(curve[i][1]) for curve in reference) / 6))
        for i, (x, _) in enumerate(reference[0])
    ]
    logs = torch.tensor([[math.log(y) for _, y in curve] for curve in reference])
    spread = max(0.01, float((logs.std(0) * math.sqrt(1 + 1 / 6))[-10:].median()))
    edge = math.exp(4 * spread)
    between = [((a + b) / 2, (y + z) / 2) for (a, y), (b, z) in pairwise(middle)]
    cases = {
        "the middle of the reference": (middle, "inside"),
        "a run that is logged at other points": (between, "inside"),
        "a run 3.9 spreads above": (bent(middle, edge ** (3.9 / 4)), "inside"),
        "a run 4.4 spreads above": (bent(middle, edge**1.1), "above"),
        "a run 4.4 spreads below": (bent(middle, edge**-1.1), "below"),
        "a run with one wild row near the end": (bent(middle, 40, start=27, stop=28), "inside"),
        "a run that began badly and recovered": (bent(middle, 3, stop=18), "inside"),
        "a run that goes wrong in its last third": (bent(middle, edge**1.5, start=20), "above"),
    }
    for name, (curve, expected) in cases.items():
        found = call(judge, reference, curve)
        assert found == expected, (
            f"{name} is judged {found!r}, expected {expected!r} (six seeds, spread {spread:.3f})"
        )
    equal = [middle] * 3
    found = call(judge, equal, bent(middle, 1.02))
    assert found == "inside", (
        f"three equal curves, and a run 2% above them, give {found!r}: the spread is at least 1%"
    )


# ------------------------------------------------------------------------------------- task 4


class PlantedModel(nn.Module):
    """Continues rows that count up or down in steps of their own, `offset` tokens ahead.

    Its logits are sharp, and wrong at the first position, where it can't know the step. In training
    mode it's wrong everywhere.
    """

    def __init__(self, offset: int, vocab_size: int = 97):
        super().__init__()
        self.offset = offset
        self.vocab_size = vocab_size
        self.scale = nn.Parameter(torch.tensor(12.0))

    def forward(self, input_ids: Tensor) -> Any:
        step = input_ids.diff(dim=1, prepend=input_ids[:, :1])
        ahead = (input_ids + self.offset * step) % self.vocab_size
        if self.training:
            ahead = (ahead + 11) % self.vocab_size
        logits = self.scale * nn.functional.one_hot(ahead, self.vocab_size).float()
        return type("Output", (), {"logits": logits})()


def counting_rows(num: int, length: int, *, seed: int, vocab_size: int = 97) -> Tensor:
    """Rows (B, T) of tokens that count in steps, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    start, step = torch.randint(1, vocab_size, (2, num, 1), generator=generator)
    return (start + step * torch.arange(length)) % vocab_size


def check_what_it_predicts(what_it_predicts: Answer, *, seed: int, length: int) -> None:
    """`what_it_predicts(model, ids)`: the offset of the token that the model has learned."""
    ids = counting_rows(5, length, seed=seed)
    for offset in (1, 2, 0, -1, 3):
        model = PlantedModel(offset).train()
        found = call(what_it_predicts, model, ids.clone())
        assert model.training, (
            "the model was in training mode before, and isn't now: put it back as it was"
        )
        assert model.scale.grad is None, "measuring isn't training: leave the gradients alone"
        assert found == offset, (
            f"a model that predicts the token {offset:+d} places ahead is said to predict"
            f" {found!r}: in evaluation mode, compare position t with the token at t + offset, and"
            " leave out the positions that have none"
        )


# ------------------------------------------------------------------------------------- task 5

HONEST = {
    "steps": 60,
    "tokens": 61_440,
    "val_loss": 1.43,
    "bits_per_byte": 0.91,
    "vocab_size": 512,
    "corpus_bytes": 800_216,
    "seed": 3,
}


def write_run(folder: str | Path) -> None:
    """A run's folder, without its weights: it was stopped at step 60 of 100."""
    root = Path(folder)
    (root / "data").mkdir(parents=True, exist_ok=True)
    (root / "config.yaml").write_text("training: {max_steps: 100, seed: 3}\n", encoding="utf-8")
    info = {"vocab_size": 512, "corpus_bytes": 800_216, "tokens": {"train": 330_000, "val": 9_000}}
    (root / "data" / "info.json").write_text(json.dumps(info), encoding="utf-8")
    rows: list[dict[str, float]] = []
    for step in range(10, 61, 10):
        rows.append({"step": step, "targets": 1024 * step, "loss": 1.3 + 30 / step})
    for row, loss in zip(rows[1::2], (2.2, 1.402, 1.434), strict=True):
        row |= {"val_loss": loss, "val_bits_per_byte": loss / 2.27 / math.log(2)}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    cut = '{"step": 70, "targets": 7168'  # the process died while it wrote this row
    (root / "metrics.jsonl").write_text(text + cut, encoding="utf-8")


def check_card_faults(card_faults: Answer, changes: Mapping[str, Any]) -> None:
    """`card_faults(card, run_dir)`: the names of the claims that the folder doesn't confirm."""
    with tempfile.TemporaryDirectory() as folder:
        write_run(folder)
        found = call(card_faults, HONEST | dict(changes), folder)
    assert isinstance(found, list), f"card_faults returned {found!r}, expected a list of names"
    wrongly = sorted(set(found) - set(changes))
    assert not wrongly, (
        f"the claim {wrongly[0]}={HONEST.get(wrongly[0])!r} is true, and you call it false: what"
        " counts is the last whole row and the last validation, and 1% is for rounding"
    )
    missed = sorted(set(changes) - set(found))
    assert not missed, (
        f"the card says {missed[0]}={changes[missed[0]]!r}, the folder doesn't, and you accept it"
    )
    assert found == sorted(found), f"the names are {found}: sort them"

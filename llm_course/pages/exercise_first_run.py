"""The checks of exercise 00, first run: each says what is wrong with an answer."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.pages.checking import (
    Answer,
    case,
    expect_number,
    expect_plain_number,
    explained,
    written,
)

# -------------------------------------------------------------------------------- 1, losses by hand


def near(value: float, expected: float) -> bool:
    """Whether two numbers are equal to two decimals."""
    return abs(value - expected) < 0.011


def check_tokens(guess: float, quarter: float) -> None:
    """The losses of single tokens."""
    assert min(guess, quarter) >= 0, (
        "a loss is never negative: the logarithm of a probability is, so the loss has a minus sign"
        " in front"
    )
    slips = {
        10: "10 is right in bits; in nats, the logarithm is the natural one",
        3.01: "that is the logarithm to the base 10; in nats, the logarithm is the natural one",
    }
    for slip, message in slips.items():
        assert not near(guess, slip), f"guess_loss: {message}"
    assert not math.isclose(guess, 1 / 1024, rel_tol=0.05), (
        "guess_loss: that is the probability; the loss is its negative logarithm"
    )
    exact = {"guess_loss": (guess, math.log(1024)), "quarter_loss": (quarter, math.log(4))}
    for name, (value, right) in exact.items():
        coarse = not near(value, right) and math.isclose(value, round(right, 1), abs_tol=1e-9)
        assert not coarse, f"{name}: close: give two decimals"
    assert guess < 7.5, (
        f"guess_loss = {guess:g}: each entry has the probability 1/1024, and the loss is the"
        " logarithm of 1,024, not the number itself"
    )
    real = F.cross_entropy(torch.zeros(1, 1024), torch.tensor([7])).item()  # any true token
    assert near(guess, real), (
        f"guess_loss = {guess:g}, but PyTorch computes another number from 1,024 equal logits: 1024"
        " is 2 to the power of 10"
    )
    slips = {
        2: "2 is right in bits; in nats, the logarithm is the natural one",
        0.75: "the loss is not a probability, nor what is missing to 1; it is a negative logarithm",
        0.25: "the loss is not a probability; it is the negative logarithm of 1/4",
        0.2877: "that is the loss of the probability 3/4; the true token had 1/4",
    }
    for slip, message in slips.items():
        assert not near(quarter, slip), f"quarter_loss: {message}"
    assert near(quarter, math.log(4)), (
        f"quarter_loss = {quarter:g}: 1/4 is 2 to the power of -2, so how many times ln 2 is it?"
    )


def check_text(text: float, bits: float) -> None:
    """The loss of a text of three tokens, in nats and in bits."""
    p = torch.tensor([1.0, 1 / 2, 1 / 4])
    assert text >= 0, "text_loss: a loss is never negative"
    slips = {
        1: "1 is right in bits; in nats, the logarithm is the natural one",
        -p.log().sum().item(): (
            "this is the sum of the three losses; the loss of a text is their mean"
        ),
        -p.mean().log().item(): (
            "you took the mean of the probabilities and then the logarithm; take the three"
            " logarithms first, then the mean"
        ),
        -p.log().sum().item() / 2: "divide by all three tokens; the one with the loss 0 counts too",
    }
    for slip, message in slips.items():
        assert not near(text, slip), f"text_loss: {message}"
    assert near(text, -p.log().mean().item()), (
        f"text_loss = {text:g}: the three losses are 0, ln 2 and 2 ln 2; what is their mean?"
    )
    slips = {
        math.log(2): "that is the loss in nats again; a bit is ln 2 nats",
        math.log(2) ** 2: "you multiply by ln 2, but a bit is less than a nat: divide",
        3: "that is the sum of 0, 1 and 2 bits; the loss of a text is their mean",
        -math.log2(p.mean()): "it comes from the mean loss, not from the mean probability",
    }
    for slip, message in slips.items():
        assert not near(bits, slip), f"text_bits: {message}"
    assert near(bits, 1), (
        f"text_bits = {bits:g}: how many bits does each of the three tokens cost, and what is their"
        " mean?"
    )


def task1_losses(answers: dict[str, Any]) -> None:
    """Four losses by hand, which `answers` holds by name."""
    names = ("guess_loss", "quarter_loss", "text_loss", "text_bits")
    with case("Task 1"):
        written(answers, *names)
        guess, quarter, text, bits = (expect_number(answers[name], name) for name in names)
        check_tokens(guess, quarter)
        check_text(text, bits)


# --------------------------------------------------------------------------------- 2, bits per byte


def bits_slips(expected: float, num_tokens: int, num_bytes: int) -> dict[float, str]:
    """What a mistake gives in place of `expected`, and what to say to it."""
    ratio = num_bytes / num_tokens
    mistakes: dict[float, str] = {
        expected * math.log(2): "this is still in nats; how many nats are one bit?",
        expected * math.log(2) ** 2: (
            "you multiply by ln 2; but a bit is less than a nat (0.69 of one), so there must be"
            " more bits than nats"
        ),
        expected * ratio**2: (
            "you multiply by the bytes of a token; a byte is a part of a token, so it costs less"
            " than the token"
        ),
        expected * ratio: "this is in bits per token; a token has several bytes",
        expected * num_tokens: "this is the sum over all tokens, not yet divided by them",
        expected * ratio / num_tokens: (
            "num_tokens does not count in it: how many nats does the whole text cost?"
        ),
        expected / num_tokens: (
            "num_tokens does not count in it: how many nats does the whole text cost?"
        ),
        expected
        * ratio
        / (
            num_bytes // num_tokens
        ): "the bytes of a token need not be a whole number: divide with /, not with //",
        expected
        * math.log(2)
        / math.log(10): "this is a logarithm to the base 10; a bit goes with the base 2",
    }
    for digits in (2, 3, 4, 5):
        rounded = round(math.log(2), digits)
        mistakes[expected * math.log(2) / rounded] = (
            f"almost: {rounded} is ln 2 rounded; use math.log(2)"
        )
    for rounded in (math.floor(expected), *(round(expected, digits) for digits in range(5))):
        mistakes[float(rounded)] = (
            f"you round to {rounded}; return the number as it is, and round where you print it"
        )
    return mistakes


def check_bits(
    bits_per_byte: Answer, nats: Any, num_tokens: Any, num_bytes: Any, expected: Any
) -> None:
    found = expect_number(
        bits_per_byte(nats, num_tokens, num_bytes),
        f"bits_per_byte({nats:.4g}, {num_tokens}, {num_bytes})",
    )
    mistakes = bits_slips(expected, num_tokens, num_bytes)
    for wrong, message in mistakes.items():
        assert (
            expected == 0
            or math.isclose(wrong, expected, rel_tol=1e-6)
            or not math.isclose(found, wrong, rel_tol=1e-6)
        ), message
    assert math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-12), (
        f"bits_per_byte({nats:.4g}, {num_tokens}, {num_bytes}) is {found:.6g}, expected"
        f" {expected:.6g}: first the nats of the whole text, then bits, then divide by the bytes"
    )


def _task2_bits_1(bits_per_byte: Answer) -> None:
    with case("Task 2, 10 bits for each of 6 tokens, in 15 bytes"):
        check_bits(bits_per_byte, 10 * math.log(2), 6, 15, 4.0)


def _task2_bits_2(bits_per_byte: Answer) -> None:
    with case("Task 2, a guess among 256 bytes"):
        check_bits(
            bits_per_byte, math.log(256), 100, 100, 8.0
        )  # plain text takes 8 bits for each byte


def _task2_bits_3(bits_per_byte: Answer) -> None:
    with case("Task 2, 2.5 nats for each of 3 tokens, in 7 bytes"):
        check_bits(bits_per_byte, 2.5, 3, 7, 2.5 * 3 / 7 * math.log2(math.e))


def task2_bits(bits_per_byte: Answer) -> None:
    """Bits per byte of three small texts."""
    _task2_bits_1(bits_per_byte)
    _task2_bits_2(bits_per_byte)
    _task2_bits_3(bits_per_byte)


# -------------------------------------------------------------------- 3, an opponent made of counts


def check_table(table: Any, V: Any) -> None:
    assert isinstance(table, Tensor), (
        f"expected a tensor, got {type(table).__name__}: does the function return its result?"
    )
    assert table.shape == (V, V), (
        f"the shape is {tuple(table.shape)}, expected {(V, V)}: a row and a column for each entry"
        " of the vocabulary, also for those that never occur"
    )
    assert table.is_floating_point(), f"the dtype is {table.dtype}; probabilities are floats"
    assert table.dtype in (torch.float32, torch.float64), (
        f"the dtype is {table.dtype}, in which large counts are rounded: count in float32"
    )
    assert not table.isnan().any(), "some rows are NaN: what is the sum of a row without any count?"
    assert (table > 0).all(), (
        "a pair that never occurred has the probability 0: start each count at 1, before you divide"
    )


def check_rows(table: Any) -> None:
    sums = table.sum(1)
    a = int((sums - 1).abs().argmax())
    assert not torch.isclose(table.sum(), torch.tensor(1.0).to(table), atol=1e-4), (
        "the whole table sums to 1, but each row must: what comes after a, given a?"
    )
    assert abs(sums[a] - 1) < 1e-4, (
        f"row {a} sums to {sums[a]:.3f}, not to 1: divide each row by its own sum, smoothing"
        " included, with keepdim=True"
    )


def task3_counts(bigram_probabilities: Answer) -> None:
    """The table of a text of eight tokens."""
    with case("Task 3, the text abababac"):
        ids = torch.tensor([0, 1, 0, 1, 0, 1, 0, 2])
        table = bigram_probabilities(ids, 3)
        check_table(table, 3)
        after_a = [round(7 * x, 3) for x in table[0].tolist()]
        six = [round(6 * x, 3) for x in table[0].tolist()]
        uniform = [round(3 * x, 3) for x in table[2].tolist()] == [1, 1, 1]
        assert not (six == [1, 4, 1] and uniform), (
            "the pair a -> c at the very end is missing: 8 ids hold 7 pairs"
        )
        assert six != [1, 4, 1], (
            "this is the table on its side: the token that comes first is the row, the one after"
            " it the"
            " column"
        )
        assert [round(x * 5 / 7, 3) for x in after_a] != [1, 2, 2], (
            "after a, b and c get the same, although b came three times and c once: a pair that"
            " repeats"
            " must count each time (see hint 2)"
        )
        check_rows(table)
        assert after_a == [1, 4, 2], (
            f"the row of a must be [1, 4, 2] / 7, and yours is {after_a} / 7: count neighbours"
            " only,"
            " each pair once, add 1 to every count, and divide by the sum"
        )
        after_b = [round(6 * x, 3) for x in table[1].tolist()]
        assert after_b == [4, 1, 1], (
            "after b comes a, three times, so the row of b must be [4, 1, 1] / 6, and yours is"
            f" {after_b} / 6: is every pair of neighbours counted?"
        )
        last = [round(3 * x, 3) for x in table[2].tolist()]
        assert last == [1, 1, 1], (
            "nothing comes after the last token, c, so its row must be [1, 1, 1] / 3, and yours is"
            f" {last} / 3: does your text end there, or go round?"
        )


def loss_slips(table: Tensor, ids: Tensor, p: Tensor) -> dict[float, str]:
    """What a mistake gives in place of the loss, and what to say to it."""
    right = -p.log().mean().item()
    return {
        right / math.log(2): "this is in bits; nats come from the natural logarithm",
        -right: "the loss is negative: it is minus the logarithm",
        right * 6: "this is the sum of the losses; divide by the number of pairs",
        right * 6 / 7: (
            "you divide by the 7 ids, but there are 6 pairs: nothing is asked about the first token"
        ),
        -p.mean().log().item(): (
            "you took the mean of the probabilities and then the logarithm; take the logarithms"
            " first, then the mean"
        ),
        -table[ids, ids].log().mean().item(): (
            "you ask for the probability of each token after itself: the target is the next one"
        ),
        -table[ids[:-1], ids[:-1]].log().mean().item(): (
            "you ask for the probability of each token after itself: the target is the next one"
        ),
        -table[ids[1:], ids[:-1]].log().mean().item(): (
            "rows and columns are mixed up: the row is the token that was read, the column the one"
            " after it"
        ),
        F.cross_entropy(table[ids[:-1]], ids[1:]).item(): (
            "F.cross_entropy takes logits and puts a softmax on them; these are probabilities"
            " already. What are their logits?"
        ),
        1 - p.mean().item(): (
            "this is 1 minus the mean probability; the loss of a token is the negative logarithm of"
            " its probability"
        ),
        -p[:5].log().mean().item(): "the last pair is missing: 7 ids hold 6 pairs",
        -p[1:].log().mean().item(): "the first pair is missing: 7 ids hold 6 pairs",
        -p[:4].log().mean().item(): (
            "you count each kind of pair once, but 0 1 and 1 2 come twice: every pair counts, also"
            " one that comes again"
        ),
    }


def _task3_loss_1(bigram_loss: Answer) -> None:
    with case("Task 3, bigram_loss on 0 1 1 2 0 1 2"):
        # After 0: 1/2, 1/4, 1/4. After 1: 1/8, 1/8, 3/4. After 2: 1/4, 1/2, 1/4.
        table = torch.tensor([[4, 2, 2], [1, 1, 6], [2, 4, 2]]) / 8
        ids = torch.tensor([0, 1, 1, 2, 0, 1, 2])
        p = torch.tensor(
            [1 / 4, 1 / 8, 3 / 4, 1 / 4, 1 / 4, 3 / 4]
        )  # of 1 after 0, 1 after 1, 2 after 1, 0 after 2, and the first and third again
        right = -p.log().mean().item()
        mistakes = loss_slips(table, ids, p)
        loss = expect_number(bigram_loss(table, ids), "the loss")
        for wrong, message in mistakes.items():
            assert not math.isclose(loss, wrong, rel_tol=1e-5), message
        assert math.isclose(loss, right, rel_tol=1e-5), (
            f"the loss is {loss:.4f}, expected {right:.4f}: the six true tokens have the"
            " probabilities"
            " 1/4, 1/8, 3/4, 1/4, 1/4, 3/4"
        )


def _task3_loss_2(bigram_loss: Answer) -> None:
    with case("Task 3, bigram_loss of a uniform table"):
        loss = expect_number(
            bigram_loss(torch.full((50, 50), 1 / 50), torch.arange(50)), "the loss"
        )
        assert abs(loss - math.log(50)) < 1e-4, (
            "a uniform table over 50 tokens must have the loss of a guess, ln 50 ="
            f" {math.log(50):.4f},"
            f" and yours is {loss:.4f}"
        )


def _task3_loss_3(bigram_loss: Answer) -> None:
    with case("Task 3, bigram_loss of a pair with the probability 1e-12"):
        table = torch.tensor([[1e-12, 1 - 1e-12], [0.5, 0.5]], dtype=torch.float64)
        loss = expect_number(bigram_loss(table, torch.tensor([0, 0])), "the loss")
        assert math.isclose(loss, 12 * math.log(10), rel_tol=1e-5), (
            f"the loss is {loss:.4f}, expected 12 ln 10 = {12 * math.log(10):.4f}: is a small"
            " number added to the probabilities, or are they clamped? A table that is sure and"
            " wrong must pay for it"
        )


def task3_loss(bigram_loss: Answer) -> None:
    """The loss of a table on seven tokens, of a uniform one, and of one that is sure and wrong."""
    _task3_loss_1(bigram_loss)
    _task3_loss_2(bigram_loss)
    _task3_loss_3(bigram_loss)


# ------------------------------------------------------------------------------ 4, a loop that lies


def tiny_model(initializer_range: Any = 0.02) -> Any:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=16,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        tie_word_embeddings=False,
        initializer_range=initializer_range,
    )
    return DecoderModel(config)


def walk(rows: Any, length: Any, seed: Any) -> Any:
    """Walks on the circle: (rows, length + 1) token ids."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randint(16, (rows, 1), generator=draw)
    moves = 1 + 2 * torch.randint(2, (rows, length), generator=draw)
    return torch.cat((start, start + moves.cumsum(1)), dim=1) % 16


def refuse_closure(arguments: Any, options: Any) -> None:
    """The gradient is looked at before the step, and a closure computes it inside."""
    assert len(arguments) == 1 and not options, (  # the optimizer itself is the first argument
        "optimizer.step() is called with a closure; the loop called backward, and then step():"
        " change what is wrong, and leave the rest as it was"
    )


def gradient_lengths(fit: Answer, batches: Any) -> Any:
    """The length of the gradient at each optimizer step, when the learning rate is 0 and so the
    weights stay.
    """
    lengths = []

    def note(optimizer: Any, arguments: Any, options: Any) -> None:
        refuse_closure(arguments, options)
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        lengths.append(sum(g.square().sum() for g in grads) ** 0.5 if grads else torch.tensor(0.0))

    handle = register_optimizer_step_pre_hook(note)
    try:
        fit(tiny_model(), batches, [walk(1, 4, 0)], learning_rate=0.0)
    finally:
        handle.remove()
    return [float(length) for length in lengths]


def constant(token: Any, rows: Any, length: Any) -> Any:
    return torch.full((rows, length + 1), token)


def symptoms(fit: Answer) -> None:
    train_losses, _ = fit(
        tiny_model(), [walk(8, 16, seed) for seed in range(60)], [walk(8, 16, 99)]
    )
    print(
        f"training loss: {train_losses[0]:.1f} in the first step, {train_losses[-1]:.1f} in step"
        f" 60; the floor is {math.log(2):.1f}"
    )
    lengths = gradient_lengths(fit, [walk(8, 16, 0)] * 3)
    print(
        "three times the same batch, weights held still: gradient lengths"
        f" {', '.join(f'{x / lengths[0]:.1f}' for x in lengths)} times the first"
    )
    parts = [
        fit(tiny_model(0.5), [], [batch])[1] for batch in (constant(10, 4, 8), constant(9, 1, 2))
    ]
    both = fit(tiny_model(0.5), [], [constant(10, 4, 8), constant(9, 1, 2)])[1]
    print(
        f"a batch of 32 targets has the loss {parts[0]:.1f}, one of 2 targets {parts[1]:.1f};"
        f" reported for both together: {both:.1f}"
    )


def task4_targets(mended_fit: Answer) -> Any:
    """What one step makes the model believe."""
    with case("Task 4, the targets"):
        model = tiny_model()
        # always one further, from every start
        batch = (torch.arange(16)[:, None] + torch.arange(9)) % 16
        places = {
            "the next token": 1,
            "the token that it has just read": 0,
            "the token before": -1,
            "the token after the next": 2,
        }

        def opinions() -> Any:
            with torch.no_grad():
                log_p = model(batch).logits.log_softmax(-1)
            return {
                name: log_p.gather(2, (batch[..., None] + move) % 16).mean().item()
                for name, move in places.items()
            }

        before = opinions()
        mended_fit(model, [batch], [batch])
        after = opinions()
        gains = {name: after[name] - before[name] for name in places}
        learned = max(gains, key=lambda name: gains[name])
        assert any(gains.values()), (
            "one step has changed nothing in the model: is there a gradient when optimizer.step()"
            " is"
            " called?"
        )
        assert learned == "the next token", (
            f"after one step the model believes more in {learned}: which columns of the batch are"
            " the"
            " inputs, and which the targets?"
        )


def task4_gradients(mended_fit: Answer) -> None:
    """The gradients of three equal steps."""
    with case("Task 4, the gradients"):
        lengths = gradient_lengths(mended_fit, [walk(8, 16, 0)] * 3)
        assert len(lengths) == 3, (
            f"three batches must make three optimizer steps, but there were {len(lengths)}"
        )
        assert max(lengths) > 0, (
            "the gradient is empty when optimizer.step() is called: clear the old one before"
            " backward,"
            " not after it"
        )
        times = [round(x / max(lengths[0], 1e-9), 2) for x in lengths]
        assert max(times) < 1.5, (
            "the same batch three times and weights held still must give three equal gradients, but"
            f" their lengths are {times} times the first: backward adds to what is there. Who"
            " clears"
            " it, in every step?"
        )
        assert times == [1, 1, 1], (
            f"the gradients differ although learning_rate=0 was passed (their lengths are {times}"
            " times"
            " the first): do the weights move? Does the optimizer get learning_rate?"
        )


def target_losses(model: Any, batches: list[Tensor]) -> list[Tensor]:
    """The loss of each target, a tensor (B, T) for each batch."""
    with torch.no_grad():
        return [
            F.cross_entropy(model(b[:, :-1]).logits.transpose(1, 2), b[:, 1:], reduction="none")
            for b in batches
        ]


def report_slips(losses: list[Tensor]) -> dict[str, Tensor]:
    """What to say to a mistake, and what it reports."""
    every = torch.cat([loss.flatten() for loss in losses])
    means = torch.stack([loss.mean() for loss in losses])
    rows = torch.cat([loss.mean(1) for loss in losses])
    # with T + 1 tokens in a row
    tokens = torch.tensor([loss.shape[0] * (loss.shape[1] + 1) for loss in losses])
    lengths = torch.tensor([loss.shape[1] for loss in losses])
    return {
        (
            "this is the mean of the batch means, so a target in a small batch counts more than one"
            " in a large batch"
        ): means.mean(),
        (
            "this is the mean of the means of the rows, so a target in a short row counts more than"
            " one in a long row"
        ): rows.mean(),
        (
            "each batch mean is weighted by its B * (T + 1) tokens; a row of T + 1 tokens has T"
            " targets"
        ): (means * tokens).sum() / tokens.sum(),
        (
            "each batch mean is weighted by the length of its rows, whatever their number: a batch"
            " has B * T targets"
        ): (means * lengths).sum() / lengths.sum(),
        ("each batch mean is weighted by the T + 1 tokens of a row: a batch has B * T targets"): (
            means * (lengths + 1)
        ).sum()
        / (lengths + 1).sum(),
        "this is the sum over all targets: divide it by their number": every.sum(),
        (
            "each batch counts only once, whatever its size: the sum of the batch means is divided "
            "by the number of targets"
        ): means.sum() / every.numel(),
        (
            "the sum over all targets is divided by the number of batches; divide by the number of "
            "targets"
        ): every.sum() / len(losses),
        (
            "the sum over all targets is divided by the number of tokens, T + 1 for each row; a row"
            " of T + 1 tokens has T targets"
        ): every.sum() / tokens.sum(),
        "only the last validation batch is in it": means[-1],
        "only the first validation batch is in it": means[0],
    }


def check_reported(found: Any, model: Any, batches: list[Tensor]) -> None:
    """The second of the two results, against the losses of the trained model."""
    assert isinstance(found, tuple) and len(found) == 2, (
        "the function must return two things: the list of training losses, and the validation loss"
    )
    reported = expect_number(found[1], "the validation loss")
    losses = target_losses(model, batches)
    expected = torch.cat([loss.flatten() for loss in losses]).mean()
    for message, wrong in report_slips(losses).items():
        assert torch.isclose(wrong, expected, rtol=1e-4) or not math.isclose(
            reported, wrong, rel_tol=1e-4
        ), f"{message} (reported {reported:.3f}, expected {expected:.3f})"
    assert math.isclose(reported, expected, rel_tol=1e-4), (
        f"reported {reported:.3f}, expected {expected:.3f}, the mean over all validation"
        " targets: is it measured on the validation batches, and after training?"
    )


def check_report(mended_fit: Answer, sizes: Any, train_batches: Any, learning_rate: Any) -> None:
    """In rows of one repeated token every target is that token, so this test does not depend on the
    other bugs.
    """
    model = tiny_model(0.5)
    batches = [constant(token, rows, length) for token, rows, length in sizes]
    found = mended_fit(model, train_batches, batches, learning_rate)
    check_reported(found, model, batches)


def task4_report(mended_fit: Answer) -> None:
    """The validation loss of batches of several sizes."""
    with case("Task 4, the report"):
        check_report(mended_fit, [(3, 4, 8), (5, 1, 2), (9, 2, 5)], [], 0.0)
        check_report(mended_fit, [(3, 4, 8), (5, 1, 2), (9, 2, 5)], [constant(11, 2, 6)], 0.0)


class Steps:
    """What a loop hands to its optimizers, step by step, beside the gradient that the mean loss of
    the batch has at that moment.
    """

    def __init__(self, model: Any, batches: list[Tensor]) -> None:
        self.model = model
        self.batches = batches
        self.optimizers: list[torch.optim.Optimizer] = []
        self.losses: list[float] = []
        self.gradients: list[tuple[Tensor, Tensor]] = []  # found, expected

    def __call__(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        refuse_closure(arguments, options)
        batch = self.batches[min(len(self.losses), len(self.batches) - 1)]
        parameters = list(self.model.parameters())
        with torch.enable_grad():
            logits = self.model(batch[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            expected = torch.autograd.grad(loss, parameters)
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.optimizers.append(optimizer)
        self.losses.append(loss.item())
        one, other = (torch.cat([g.flatten() for g in x]) for x in (found, expected))
        self.gradients.append((one, other))


def _check_nothing_else(mended_fit: Answer) -> None:
    """The optimizer, the gradients and the losses of four steps are what they were."""
    model = tiny_model(0.1)
    batches = [walk(1 + i % 3, 4 + i, i) for i in range(4)]
    steps = Steps(model, batches)
    with_graph: list[bool] = []  # whether each call of the model kept a graph for backward
    model.register_forward_pre_hook(lambda *_: with_graph.append(torch.is_grad_enabled()))
    handle = register_optimizer_step_pre_hook(steps)
    try:
        train_losses, _ = mended_fit(model, batches, [walk(2, 4, 50)], 0.02)
    finally:
        handle.remove()
    assert not with_graph[-1], (
        "the validation batches build graphs for backward: measure them under torch.no_grad(), as"
        " the loop did"
    )
    assert model.training, (
        "the model is left in evaluation mode, and the next epoch would train without dropout:"
        " leave the rest as it was"
    )
    assert len(steps.losses) == 4, (
        f"four batches must make four optimizer steps, but there were {len(steps.losses)}"
    )
    built = len(set(map(id, steps.optimizers)))
    assert built == 1, (
        f"{built} optimizers made the four steps: AdamW remembers the steps before, so build one"
        " before the loop, as it was"
    )
    _check_optimizer(steps.optimizers[0], learning_rate=0.02)
    for step, (batch, gradients) in enumerate(zip(batches, steps.gradients, strict=True), 1):
        _check_gradient(step, *gradients, num_targets=batch[:, 1:].numel())
    for step, (value, expected) in enumerate(zip(train_losses, steps.losses, strict=False), 1):
        found = expect_plain_number(value, f"the training loss of step {step}")
        is_rounded = any(found == round(expected, digits) for digits in range(5))
        assert not is_rounded, (
            f"the training loss of step {step} is rounded to {found}: round where you print it"
        )
        assert math.isclose(found, expected, rel_tol=1e-3), (
            f"the training loss of step {step} is {found:.4f}, expected {expected:.4f}, the mean"
            " loss of its batch before the step"
        )


def _check_gradient(step: int, found: Tensor, expected: Tensor, num_targets: int) -> None:
    """What the optimizer gets is the gradient of the mean loss, whole."""
    times = (found.norm() / expected.norm()).item()
    is_parallel = F.cosine_similarity(found, expected, dim=0) > 0.999
    assert not is_parallel or not math.isclose(times, num_targets, rel_tol=1e-3), (
        f"the gradient of step {step} is that of the sum over all {num_targets} targets: train on"
        " their mean, as the loop did"
    )
    assert not is_parallel or math.isclose(times, 1, rel_tol=1e-3), (
        f"the gradient of step {step} points in the right direction but is {times:.2f} times as"
        " long: is it limited or scaled? Leave the rest (the optimizer too) as it was"
    )
    assert is_parallel, (
        f"the gradient of step {step} is not that of the mean loss of its batch: does the whole"
        " batch count, each target once, and no other batch?"
    )


def _check_optimizer(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    assert type(optimizer) is torch.optim.AdamW, (
        f"the optimizer is {type(optimizer).__name__}; the loop had AdamW: leave the rest as it was"
    )
    found = {name: optimizer.param_groups[0][name] for name in ("lr", "weight_decay", "betas")}
    expected = {"lr": learning_rate, "weight_decay": 0, "betas": (0.9, 0.999)}
    for name in expected:
        assert found[name] == expected[name], (
            f"the optimizer has {name}={found[name]}, expected {expected[name]}: leave the rest"
            " (the optimizer too) as it was"
        )


def task4_whole_loop(mended_fit: Answer) -> None:
    """Four steps in detail, and forty steps with validation batches of two sizes."""
    with case("Task 4, nothing else is changed"):
        _check_nothing_else(mended_fit)
    with case("Task 4, the whole loop"):
        model = tiny_model()
        val_batches = [walk(16, 16, 99), walk(1, 3, 98)]
        train_losses, val_loss = mended_fit(
            model,
            [walk(8, 16, seed) for seed in range(40)],
            val_batches,
            learning_rate=0.01,
        )
        assert len(train_losses) == 40, (
            f"40 batches must give 40 training losses, not {len(train_losses)}"
        )
        assert abs(train_losses[0] - math.log(16)) < 0.3, (
            f"the first training loss is {train_losses[0]:.2f}; an untrained model is near ln 16 ="
            f" {math.log(16):.2f}"
        )
        assert val_loss > 0.6, (
            f"the validation loss is {val_loss:.2f}, but no honest model can get below ln 2 = 0.69:"
            " does the model see what it must predict?"
        )
        assert val_loss < 1.0, (
            f"the validation loss is {val_loss:.2f} after 40 steps; the right loop comes below"
            " 1.0. If the three tests above pass, what else have you changed?"
        )
        check_reported((train_losses, val_loss), model, val_batches)


# --------------------------------------------------------------------------------------- 5, the log


def make_run(train: Any, val: Any) -> Any:
    """Rows as in metrics.jsonl: 100 steps, and a validation loss in every tenth."""
    rows = [
        {"step": step, "epoch": step // 25, "loss": round(train(step), 2)} for step in range(1, 101)
    ]
    for row in rows[9::10]:
        row["val_loss"] = round(val(row["step"]), 2)
    return rows


def make_log(*val_losses: Any, train: Any = (), first: Any = 10, every: Any = 10) -> Any:
    """For the tests: rows with these validation losses; None makes a row without one."""
    train = train or [3.0 - 0.1 * i for i in range(len(val_losses))]
    rows = [{"step": first + every * i, "epoch": 0, "loss": loss} for i, loss in enumerate(train)]
    for row, value in zip(rows, val_losses, strict=True):
        if value is not None:
            row["val_loss"] = value
    return rows


def example_runs() -> Any:
    """The logs of three runs, by name."""
    return {
        "A": make_run(
            lambda s: 0.1 + 6.2 * math.exp(-s / 25),
            lambda s: 2.6 + 3.6 * math.exp(-s / 15) + 0.0003 * s**2,
        ),
        "B": make_run(
            lambda s: 3.0 + 3.2 * math.exp(-s / 15) + 0.0013 * max(0, s - 50) ** 2,
            lambda s: 3.05 + 3.2 * math.exp(-s / 15) + 0.0013 * max(0, s - 50) ** 2,
        ),
        "C": make_run(
            lambda s: 3.4 + 2.8 * math.exp(-s / 60), lambda s: 3.6 + 2.8 * math.exp(-s / 60)
        ),
    }


def _task5_best_step_1(best_step: Answer) -> None:
    with case("Task 5, best_step of run A"):
        found = best_step(example_runs()["A"])
        assert found is not None, (
            "best_step returns None, but ten rows have a validation loss: does it return its"
            " result?"
        )
        assert found != 100, (
            "100 has the lowest training loss, or is the last step; the lowest validation loss"
            " comes"
            " earlier"
        )
        assert found not in (
            3,
            39,
        ), f'{found} is a place in a list; the answer is the row\'s own "step"'
        assert not isinstance(found, float | dict), (
            f"best_step returns {found!r}: return the step, not the loss or the row"
        )
        assert found == 40, (
            f"best_step gives {found}, but the table above has its lowest val_loss at step 40"
        )


def _task5_best_step_2(best_step: Answer) -> None:
    with case("Task 5, best_step of a few rows"):
        rows = make_log(None, 4.0, 3.0, None, 2.5, 2.75)
        assert best_step(rows) == 50, (
            "the validation losses are 4.0, 3.0, 2.5 and 2.75 at the steps 20, 30, 50 and 60, so"
            " the"
            f" best is 50, not {best_step(rows)}"
        )
        assert best_step(make_log(4.0, 3.0, 3.5, 3.0)) == 20, (
            "steps 20 and 40 are equally good: take the earlier one"
        )
        assert best_step(make_log(4.0, 3.0, 3.25, 2.5)) == 40, (
            "3.0 is followed by 3.25, but then by 2.5: a validation loss may rise and fall again,"
            " so"
            " look at all of them"
        )
        assert best_step(make_log(math.nan, 4.0, 3.0)) == 30, (
            "the first validation loss is NaN, and 3.0 at step 30 is the lowest: a NaN is never"
            " the "
            "best"
        )


def _task5_best_step_3(best_step: Answer) -> None:
    with case("Task 5, best_step where nothing was measured"):
        logs: list[Any] = [[], make_log(None, None), make_log(math.nan, None, math.nan)]
        for empty in logs:
            found = best_step(empty)
            assert found is None, (
                f"best_step gives {found}, but nothing was measured in {empty}, so the answer is"
                " None"
            )
    with case("Task 5, best_step with a loss of 0"):
        assert best_step(make_log(0.5, 0.0, 0.25)) == 20, (
            "a validation loss of exactly 0.0 is a number like others: ask whether it is there, not"
            " whether it is true"
        )
    with case("Task 5, best_step of high losses"):
        assert best_step(make_log(250.0, 150.0, 180.0)) == 20, (
            "all validation losses are above 100: what do you compare the first one with?"
        )


def task5_best_step(best_step: Answer) -> None:
    """The best step of run A, and of short logs."""
    _task5_best_step_1(best_step)
    _task5_best_step_2(best_step)
    _task5_best_step_3(best_step)


def check_overfits(
    overfits: Answer, rows: Any, expected: Any, message: Any, **options: Any
) -> None:
    found = overfits(rows, **options)
    assert found is not None, "overfits returns None: does it return its result?"
    assert isinstance(found, bool), f"overfits returns {found!r}, expected True or False"
    assert found == expected, f"overfits gives {found}, expected {expected}: {message}"


def _check_three_runs(overfits: Answer) -> None:
    """The runs of the table, whole."""
    with case("Task 5, overfits of the three runs"):
        check_overfits(
            overfits,
            example_runs()["A"],
            True,
            "in run A the validation loss rises from step 40 on, and the training loss goes on"
            " falling",
        )
        check_overfits(
            overfits,
            example_runs()["B"],
            False,
            "in run B the training loss rises together with the validation loss; that is not"
            " learning by heart",
        )
        check_overfits(
            overfits, example_runs()["C"], False, "in run C the last measured row is the best one"
        )


def _check_validation_loss(overfits: Answer) -> None:
    """Which validation losses count: the best one, and the last that was measured."""
    reason = "the last row of a log need not be measured; which one is the last that was?"
    with explained(KeyError, reason), case("Task 5, overfits of a few rows"):
        check_overfits(
            overfits,
            make_log(3.9, 3.8, 3.7, train=(3.0, 1.5, 0.5)),
            False,
            "the validation loss still falls, so every step made the model better, however large"
            " the gap to the training loss is",
        )
        check_overfits(
            overfits,
            make_log(4.0, 3.0, 3.05),
            False,
            "the rise after the best step, 3.00 to 3.05, is within the margin of 0.1",
        )
        check_overfits(
            overfits,
            make_log(4.0, 3.0, 3.05),
            True,
            "the rise after the best step, 3.00 to 3.05, is more than the margin of 0.01",
            margin=0.01,
        )
        check_overfits(
            overfits,
            make_log(4.0, 3.0, 3.5, None),
            True,
            "the last row has no val_loss; the last measured one is 0.5 above the best",
        )
        check_overfits(
            overfits,
            make_log(4.0, 3.0, 3.5, math.nan),
            True,
            "the last val_loss is NaN, so it does not count; the one before is 0.5 above the best",
        )
        check_overfits(
            overfits,
            make_log(math.nan, 3.0, 3.5),
            True,
            "the first val_loss is NaN, so it does not count",
        )
        check_overfits(
            overfits,
            make_log(4.0, 3.0, 3.5, 3.05),
            False,
            "the validation loss came back: only the last measured row counts",
        )


def _check_training_loss(overfits: Answer) -> None:
    """It must have fallen between the best row and the last one that was measured."""
    with case("Task 5, overfits of a few rows"):
        check_overfits(
            overfits,
            make_log(4.0, 3.0, 4.0, train=(3.0, 2.0, 2.5)),
            False,
            "since the best step the training loss has risen, though it is lower than at the"
            " beginning",
        )
        check_overfits(
            overfits,
            make_log(3.0, 4.0, 4.0, None, train=(2.0, 2.5, 2.4, 1.0)),
            False,
            "between the two measured rows the training loss has risen; the fall comes in a row"
            " that was not measured",
        )
        check_overfits(
            overfits,
            make_log(3.0, 3.5, 3.5, train=(2.0, 1.5, 2.5)),
            False,
            "the training loss fell to 1.5 in between, but is 2.5 in the last measured row,"
            " above the 2.0 of the best: only these two rows count",
        )
        check_overfits(
            overfits,
            make_log(4.0, 3.0, 3.5, train=(1.0, 2.0, 1.5)),
            True,
            "since the best step the training loss has fallen, from 2.0 to 1.5; that it was 1.0"
            " before does not matter",
        )
        check_overfits(
            overfits,
            make_log(3.0, 3.5, train=(2.0, 2.0)),
            False,
            "the training loss is 2.0 at both steps: an equal one has not fallen",
        )


def _check_margin(overfits: Answer) -> None:
    """It is in nats, the same for a large and a small loss."""
    with case("Task 5, overfits of a few rows"):
        check_overfits(
            overfits,
            make_log(8.0, 8.5),
            True,
            "8.0 to 8.5 is a rise of 0.5 nats, more than the margin: 0.1 is absolute, not a tenth"
            " of the loss",
        )
        check_overfits(
            overfits,
            make_log(0.5, 0.58),
            False,
            "0.50 to 0.58 is a rise of 0.08 nats, within the margin: 0.1 is absolute, not a tenth"
            " of the loss",
        )


def _check_odd_logs(overfits: Answer) -> None:
    """Empty logs, a loss of 0, two best rows, and a rise of exactly the margin."""
    with case("Task 5, overfits where nothing can have risen"):
        logs: list[Any] = [[], make_log(None, None), make_log(math.nan), make_log(2.5)]
        for empty in logs:
            check_overfits(overfits, empty, False, f"nothing can have risen in {empty}")
    with case("Task 5, overfits of a few rows"):
        check_overfits(
            overfits,
            make_log(0.0, 0.5),
            True,
            "a val_loss of exactly 0.0 is a number like others: ask whether it is there, not"
            " whether it is true",
        )
        check_overfits(
            overfits,
            make_log(3.0, 3.0, 3.5, train=(2.0, 1.0, 1.5)),
            True,
            "steps 10 and 20 are equally good, so step 10 is the best, and the training loss has"
            " fallen since then",
        )
        check_overfits(
            overfits,
            make_log(3.0, 3.5),
            False,
            "from 3.0 to 3.5 with a margin of 0.5: a rise of exactly the margin is not more than"
            " it",
            margin=0.5,
        )


def task5_overfits(overfits: Answer) -> None:
    """Three runs, and short logs."""
    _check_three_runs(overfits)
    _check_validation_loss(overfits)
    _check_training_loss(overfits)
    _check_margin(overfits)
    _check_odd_logs(overfits)


# ----------------------------------------------------------------------------------- 6, temperature


def check_probabilities(
    next_token_probabilities: Answer, logits: Any, temperature: Any, expected: Any, message: Any
) -> None:
    kept = logits.clone()
    p = next_token_probabilities(logits, temperature)
    assert isinstance(p, Tensor), (
        f"expected a tensor, got {type(p).__name__}: does the function return its result?"
    )
    assert torch.equal(logits, kept), (
        "your function has changed the logits that it was given; whoever called it still needs them"
    )
    assert p.shape == logits.shape, (
        f"the shape is {tuple(p.shape)}, expected {tuple(logits.shape)}, that of the logits: a"
        " probability for each entry, also where all but one are 0"
    )
    assert p.dtype == logits.dtype, (
        f"the dtype is {p.dtype}, expected {logits.dtype}, that of the logits"
    )
    assert not p.isnan().any(), (
        f"{int(p.isnan().sum())} of {p.numel()} probabilities are NaN: {message}"
    )
    shown = [round(x, 3) for x in p.reshape(-1, p.shape[-1])[0].tolist()]
    assert (p >= 0).all(), f"a probability is negative: {shown}"
    sums = p.sum(-1)
    assert torch.allclose(
        sums, torch.ones_like(sums), atol=1e-2 if p.dtype == torch.bfloat16 else 1e-4
    ), (
        "each row must sum to 1 over the last dimension, but the sums are"
        f" {[round(x, 3) for x in sums.flatten().tolist()]}: {message}"
    )
    assert torch.allclose(
        p, torch.as_tensor(expected).to(p), atol=1e-2 if p.dtype == torch.bfloat16 else 1e-5
    ), f"the first row is {shown}: {message}"


three = torch.tensor([0.0, math.log(2), math.log(5)])


def _task6_temperature_2(next_token_probabilities: Answer) -> None:
    with case("Task 6, the logits 0, ln 2, ln 5"):
        check_probabilities(
            next_token_probabilities,
            three,
            1.0,
            [1 / 8, 2 / 8, 5 / 8],
            "at temperature 1 expected the plain softmax, 1/8, 2/8 and 5/8",
        )
        check_probabilities(
            next_token_probabilities,
            three,
            0.5,
            [1 / 30, 4 / 30, 25 / 30],
            "at temperature 1/2 the logits double, so expected 1/30, 4/30 and 25/30; a low"
            " temperature"
            " sharpens. Do you divide the logits, before the softmax?",
        )
        check_probabilities(
            next_token_probabilities,
            three,
            1e9,
            [1 / 3, 1 / 3, 1 / 3],
            "a very high temperature makes all tokens equally likely",
        )


def _task6_temperature_3(next_token_probabilities: Answer) -> None:
    with case("Task 6, several rows"):
        rows = torch.stack((three, three.flip(0)))
        check_probabilities(
            next_token_probabilities,
            rows,
            1.0,
            [[1 / 8, 2 / 8, 5 / 8], [5 / 8, 2 / 8, 1 / 8]],
            "is the softmax over the last dimension, each row for itself?",
        )


def _task6_temperature_4(next_token_probabilities: Answer) -> None:
    with case("Task 6, temperature 0"):
        check_probabilities(
            next_token_probabilities,
            three,
            0,
            [0.0, 0.0, 1.0],
            "temperature 0 puts everything on the largest logit; nothing can be divided by 0, so"
            " treat"
            " it apart",
        )
        check_probabilities(
            next_token_probabilities,
            torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]]),
            0.0,
            [[0.0, 1, 0], [1, 0, 0]],
            "each row has one winner; if two are equally large, the first of them",
        )


def _task6_temperature_5(next_token_probabilities: Answer) -> None:
    with case("Task 6, large logits"):
        check_probabilities(
            next_token_probabilities,
            torch.tensor([1000.0, 1000.0 + math.log(3)]),
            1.0,
            [0.25, 0.75],
            "e to the power of 1000 is too large for a float: subtract the maximum first",
        )
        check_probabilities(
            next_token_probabilities,
            torch.tensor([1e38, 0.0]),
            0.1,
            [1.0, 0.0],
            "1e38 / 0.1 is too large for a float: subtract the maximum before you divide",
        )
        check_probabilities(
            next_token_probabilities,
            torch.tensor([1e38, 0.9e38]),
            0.1,
            [1.0, 0.0],
            "1e38 / 0.1 and 0.9e38 / 0.1 are both too large for a float, and cut off they look"
            " equal: subtract the maximum before you divide",
        )
        second = 1 / (1 + math.exp(10))
        check_probabilities(
            next_token_probabilities,
            torch.tensor([[1e38, 0.0], [0.0, 1.0]]),
            0.1,
            [[1.0, 0.0], [second, 1 - second]],
            "subtract from each row its own maximum, not one maximum from all rows",
        )


def task6_temperature(next_token_probabilities: Answer) -> None:
    """Temperatures from 0 to huge, and huge logits."""
    _task6_temperature_2(next_token_probabilities)
    _task6_temperature_3(next_token_probabilities)
    _task6_temperature_4(next_token_probabilities)
    _task6_temperature_5(next_token_probabilities)

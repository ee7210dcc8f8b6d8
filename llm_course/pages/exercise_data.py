"""The visible checks of exercise 2, data: each says what is wrong with an answer."""

import hashlib
import json
import lzma
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from llm_course.pages.checking import Answer, Answers, case, forbid, written
from llm_course.text import batches as package
from llm_course.text import cleaning
from llm_course.text.batches import IGNORE_INDEX
from llm_course.text.corpus import split_documents
from llm_course.text.token_file import TokenFile

Example = tuple[Sequence[int], Sequence[int]]
Batches = list[list[int]]

# -------------------------------------------------------------------------- task 1: a row by hand

LONG_ROW = [7, 8, 5, 0, 9, 0, 4, 4, 6, 3, 0, 2, 8, 0, 5, 0]


def _windows() -> dict[str, Tensor]:
    """The three windows of the long row, by the package."""
    return package.PackedDataset(np.array(LONG_ROW), 4, separator_id=0).__getitems__(range(3))


def is_table(thing: Any, rows: int, columns: int) -> bool:
    """Whether it is a list of so many lists, each of so many whole numbers."""
    return (
        isinstance(thing, list | tuple)
        and len(thing) == rows
        and all(isinstance(row, list | tuple) and len(row) == columns for row in thing)
        and all(isinstance(number, int) for row in thing for number in row)
    )


def check_rows(answers: Answers) -> None:
    """Task 1: the labels and the document ids of the three windows."""
    with case("Task 1, the rows"):
        written(answers, "labels", "document_ids")
        for name in ("labels", "document_ids"):
            typed = answers[name]
            assert isinstance(typed, list | tuple), f"{name} is {typed!r}: type a list of rows"
            assert len(typed) != 4, (
                f"{name} has four rows: a fourth window would begin at place 12, and its last label"
                " would be the id at place 16, which doesn't exist"
            )
            assert is_table(typed, 3, 4), (
                f"{name} must be three rows of four whole numbers, but it is {typed!r}"
            )
        _check_labels([list(row) for row in answers["labels"]])
        _check_document_ids([list(row) for row in answers["document_ids"]])


def _check_labels(typed: Batches) -> None:
    windows = _windows()
    inputs = windows["input_ids"].tolist()
    assert typed != inputs, "labels holds the inputs: the label of a place is the id after it"
    assert typed[1] != [4, 4, 6, 3], (
        "window 1 begins at place 4, not at place 5: windows follow each other in steps of T,"
        " although each needs T + 1 ids"
    )
    assert not any(number < 0 for row in typed for number in row), (
        "labels has places that aren't targets; in a packed row each place has a target, also a"
        " separator and what comes after one"
    )
    for r, right in enumerate(windows["labels"].tolist()):
        assert typed[r] == right, (
            f"row {r} of labels is {typed[r]}; its inputs are {inputs[r]}, at the places {4 * r} to"
            f" {4 * r + 3}. Read off the id that follows each of them in the long row"
        )


def _check_document_ids(typed: Batches) -> None:
    windows = _windows()
    inputs = windows["input_ids"].tolist()
    counted = np.cumsum(np.array(inputs) == 0, axis=1).tolist()
    assert typed != counted, (
        "document_ids gives the separators to the document after them; a separator belongs to the"
        " document that it ends"
    )
    assert not all(row[0] == 1 for row in typed), (
        "document_ids begins at 1; the first document in each window has the number 0"
    )
    assert typed[1][0] == 0 == typed[2][0], (
        f"window {1 if typed[1][0] else 2} begins with document {typed[1][0] or typed[2][0]}; the"
        " numbers begin at 0 again in every window, also in the middle of a document"
    )
    for r, right in enumerate(windows["document_ids"].tolist()):
        assert typed[r] == right, (
            f"row {r} of document_ids is {typed[r]}; its inputs are {inputs[r]}: the number grows"
            " by one after each 0, and nowhere else"
        )


def check_counts(answers: Answers) -> None:
    """Task 1: what is left out, who may read whom, and the size of the file."""
    with case("Task 1, the counts"):
        names = ("never_a_target", "pairs", "file_bytes")
        for name, typed in zip(names, written(answers, *names), strict=True):
            assert name == "never_a_target" or not isinstance(typed, set), (
                f"{name} is a set, which has no order: type a list"
            )
            assert isinstance(typed, list | tuple | set) and all(
                isinstance(number, int) for number in typed
            ), f"{name} is {typed!r}: type a list of whole numbers"
        _check_never_a_target(answers["never_a_target"])
        _check_pairs(list(answers["pairs"]))
        _check_file_bytes(list(answers["file_bytes"]))


def _check_never_a_target(typed: Iterable[int]) -> None:
    rows = package.PackedDataset(np.arange(16), 4).__getitems__(range(3))
    places = rows["labels"].flatten().tolist()
    for place in sorted(set(range(16)) - set(places)):
        why = "nothing before it could predict it" if place == 0 else "no window reaches it"
        assert place in typed, f"never_a_target lacks place {place}: {why}"
    for place in sorted(typed):
        assert place not in places, (
            f"never_a_target holds place {place}, but its id is a label of window"
            f" {places.index(place) // 4}: the last label of a window is the first input of the"
            " next"
        )
        assert place in range(16), f"never_a_target holds {place}: type places, from 0 to 15"


def _check_pairs(typed: list[int]) -> None:
    numbered = _windows()["document_ids"]
    same = numbered[:, :, None] == numbered[:, None, :]
    assert typed != [10, 10, 10], (
        "pairs counts what causal attention allows; now take away the pairs of two different"
        " documents"
    )
    assert typed != same.sum((1, 2)).tolist(), (
        "pairs counts pairs within a document in both directions; a place reads itself and what"
        " came before, not what comes after"
    )
    assert typed != [6, 2, 3], "pairs leaves out the places that read themselves"
    assert typed == same.tril().sum((1, 2)).tolist(), (
        f"pairs is {typed}: for each window, count the pairs of each piece of a document in it, and"
        " add them up"
    )


class _Letters:
    """A tokenizer whose ids don't matter, only the size of its vocabulary."""

    eos_token_id = 0
    sha256 = "0" * 64
    vocab_size = 0

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        return [1] * len(text)


def _check_file_bytes(typed: list[int]) -> None:
    sizes = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, "row.tokens")
        for vocab_size in (65_536, 65_537):
            tokenizer: Any = _Letters()
            tokenizer.vocab_size = vocab_size
            TokenFile.write(path, ["aaa", "a", "aaaa", "aa", "a"], tokenizer)
            sizes.append(path.stat().st_size)
    assert typed != [size - TokenFile.HEADER_BYTES for size in sizes], (
        f"file_bytes counts the ids only; the header takes {TokenFile.HEADER_BYTES} bytes more"
    )
    assert len(typed) == 2, f"file_bytes is {typed}: type two numbers, one for each vocabulary"
    for entries, found, size in zip(("65,536", "65,537"), typed, sizes, strict=True):
        assert found == size, (
            f"file_bytes: with {entries} entries the file has {size} bytes, not {found}: 16 ids"
            " times the bytes of one, plus the header. Which is the largest id, and how many bytes"
            " does it need?"
        )


# ------------------------------------------------------------------ task 2: prompts and answers


def check_collate(collate: Answer, examples: list[Example], pad: int) -> None:
    """Task 2: each place of each row, against the rule."""
    before = [(list(prompt), list(answer)) for prompt, answer in examples]
    with forbid(package.SupervisedDataset):
        try:
            batch = collate(examples, pad)
        except ValueError as error:
            _expect_unchanged(examples, before)
            assert "expected sequence of length" not in str(error), (
                "the rows have unequal lengths: ids, targets and mask need `width` numbers for each"
                " example"
            )
            raise
    _expect_unchanged(examples, before)
    assert isinstance(batch, dict) and {"input_ids", "labels", "attention_mask"} <= batch.keys(), (
        "collate must return a dict of input_ids, labels and attention_mask"
    )
    T = max(len(prompt) + len(answer) for prompt, answer in before) - 1
    for name in ("input_ids", "labels", "attention_mask"):
        shape = tuple(getattr(batch[name], "shape", ()))
        assert isinstance(batch[name], Tensor) and shape == (len(before), T), (
            f"{name} has the shape {shape}, expected {(len(before), T)}: append one list of `width`"
            " numbers for each example"
        )
        assert batch[name].dtype == torch.int64, (
            f"{name} has the dtype {batch[name].dtype}, expected torch.int64: append whole numbers"
        )
    for b, (prompt, answer) in enumerate(before):
        _check_inputs(b, batch["input_ids"][b].tolist(), prompt + answer, pad)
        _check_targets(b, batch["labels"][b].tolist(), prompt, answer, pad)
        _check_mask(b, batch["attention_mask"][b].tolist(), len(prompt + answer))


def _expect_unchanged(examples: Sequence[Example], before: Sequence[Example]) -> None:
    assert [(list(prompt), list(answer)) for prompt, answer in examples] == before, (
        "your code changed the examples: `prompt += answer` writes into the caller's list,"
        " `[*prompt, *answer]` makes a new one"
    )


def _check_inputs(b: int, inputs: list[int], row: list[int], pad: int) -> None:
    T = len(inputs)
    n = len(row)
    assert inputs[:n] == row[:T] or n > T or inputs[T - n + 1 :] != row[:-1], (
        f"example {b}: input_ids is {inputs}: pad on the right, so that the text begins at place 0"
    )
    for t in range(T):
        wanted = row[t] if t < n else pad
        assert inputs[t] == wanted, (
            f"example {b}, place {t}: input_ids holds {inputs[t]}, expected {wanted}: first the"
            " prompt, then the answer, then the padding id"
        )


def _check_targets(
    b: int, labels: list[int], prompt: list[int], answer: list[int], pad: int
) -> None:
    T = len(labels)
    row = prompt + answer
    n = len(row)
    right = [row[t + 1] if len(prompt) <= t + 1 < n else IGNORE_INDEX for t in range(T)]
    assert T < 3 or labels == right or labels[:-1] != right[1:], (
        f"example {b}: the labels are {labels}, expected {right}. They come one place too early:"
        " shift moves the targets by one, so your lists must not"
    )
    for t, got in enumerate(labels):
        where = f"example {b} (prompt {prompt}, answer {answer}), place {t}: the label is {got}"
        if t + 1 < len(prompt):
            assert got == IGNORE_INDEX, (
                f"{where}, which is id {t + 1} of the prompt; the prompt isn't a target, so -100"
                " belongs here"
            )
        elif t + 1 < n:
            why = "Each id of the answer is a target, also the last"
            if t + 1 == len(prompt):
                why = (
                    "The first id of the answer is a target too, predicted at the last place of the"
                    " prompt"
                )
            if row[t + 1] == pad:
                why = (
                    "This id of the answer equals the padding id, but it isn't padding: decide by"
                    " the place"
                )
            assert got == row[t + 1], f"{where}, expected {row[t + 1]}. {why}"
        else:
            assert got == IGNORE_INDEX, (
                f"{where}, but after the answer nothing is a target: -100 belongs at the padding"
            )


def _check_mask(b: int, mask: list[int], n: int) -> None:
    for t, found in enumerate(mask):
        assert found == (t < n), (
            f"example {b}: attention_mask is {found} at place {t}, expected {int(t < n)}: 1 at each"
            f" of the {n} ids of prompt and answer, even one that equals the padding id, and 0"
            " after them"
        )


def check_collates(collate: Answer) -> None:
    """Task 2: one example, several lengths, and texts that hold the padding id."""
    with case("Task 2, one example"):
        check_collate(collate, [([5, 6, 7], [8, 9, 2])], pad=3)
    with case("Task 2, three lengths"):
        check_collate(collate, [([5, 6, 7], [8, 2]), ([4], [9, 9, 8, 7, 2]), ([6, 5], [2])], pad=3)
    with case("Task 2, a text that holds the padding id"):
        check_collate(collate, [([5, 0, 7, 7, 5], [0, 8, 0]), ([0, 6], [0, 2])], pad=0)
    with case("Task 2, an answer that ends with the padding id"):
        check_collate(collate, [([5, 6, 7, 7], [8, 0]), ([6], [9, 0])], pad=0)


# ------------------------------------------------------------------ task 3: an order to resume in


def _numpy_state() -> list[Any]:
    return [part.tobytes() if hasattr(part, "tobytes") else part for part in np.random.get_state()]


GENERATORS = {
    "random": random.getstate,
    "np.random": _numpy_state,
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
}


def ordered(batches_of: Answer, num_items: int, batch_size: int, **at: int) -> Batches:
    """Your batches as lists of int; your code must leave the global generators alone."""
    before = {name: state() for name, state in GENERATORS.items()}
    with forbid(package.ResumableBatchSampler):
        result = batches_of(num_items, batch_size, **at)
        hint = "does it return its result?"
        if hasattr(result, "__next__"):
            hint = "wrap what it yields in list(...)"
        assert isinstance(result, list), (
            f"batches_of returned {type(result).__name__}, expected a list of lists: {hint}"
        )
    for name, state in GENERATORS.items():
        assert state() == before[name], (
            f"your code used the global generator of {name}: dropout and others draw from it too,"
            " so make a generator of your own"
        )
    for batch in result:
        assert hasattr(batch, "__len__") and hasattr(batch, "__iter__"), (
            f"a batch is {batch!r}, expected a list of indices"
        )
        assert all(hasattr(index, "__index__") for index in batch), (
            f"a batch is {batch!r}, expected a list of whole numbers"
        )
    return [[int(index) for index in batch] for batch in result]


def check_epoch(
    batches_of: Answer, num_items: int, batch_size: int, *, seed: int, epoch: int
) -> Batches:
    """Task 3: each item once, in batches of the right sizes."""
    got = ordered(batches_of, num_items, batch_size, seed=seed, epoch=epoch)
    seen = Counter(index for batch in got for index in batch)
    strange = sorted(index for index in seen if index not in range(num_items))
    assert not strange, (
        f"the indices {strange} are not among the {num_items} items 0 to {num_items - 1}"
    )
    missing = num_items - len(seen)
    assert missing == 0, (
        f"{missing} of {num_items} items never come: is the last, short batch dropped?"
    )
    twice = sorted(index for index, count in seen.items() if count > 1)
    assert not twice, (
        f"the items {twice} come more than once in an epoch: is the last batch filled up?"
    )
    sizes = [len(batch) for batch in got]
    wanted = [min(batch_size, num_items - start) for start in range(0, num_items, batch_size)]
    assert sizes == wanted, (
        f"{num_items} items in batches of {batch_size}: the batches have {sizes} items, expected"
        f" {wanted}"
    )
    return got


def check_one_epoch(batches_of: Answer) -> None:
    """Task 3: an order that follows from seed and epoch, and from nothing else."""
    with case("Task 3, one epoch on one rank"):
        first = check_epoch(batches_of, 50, 8, seed=0, epoch=0)
        assert check_epoch(batches_of, 50, 8, seed=0, epoch=0) == first, (
            "the same seed and epoch gave two different orders: the order must follow from these"
            " numbers alone"
        )
        flat = [index for batch in first for index in batch]
        assert flat != sorted(flat), "the items come in their own order: shuffle them"
        other = check_epoch(batches_of, 50, 8, seed=0, epoch=1)
        assert other != first, (
            "epochs 0 and 1 have the same order: the epoch must go into the generator"
        )
        assert {frozenset(batch) for batch in other} != {frozenset(batch) for batch in first}, (
            "the same items are together in a batch in each epoch: shuffle the items, not the"
            " batches"
        )
        swapped = check_epoch(batches_of, 50, 8, seed=1, epoch=0)
        assert swapped != first, "seeds 0 and 1 give the same order"
        assert swapped != other, (
            "seed 0 in epoch 1 has the order of seed 1 in epoch 0: their sum cannot tell them"
            " apart; give the generator both numbers"
        )


def check_resuming(batches_of: Answer) -> None:
    """Task 3: from any position, what is left of the epoch."""
    with case("Task 3, resuming"):
        whole = ordered(batches_of, 10, 4, seed=3, epoch=2)
        for position in range(4):
            rest = ordered(batches_of, 10, 4, seed=3, epoch=2, position=position)
            assert rest == whole[position:], (
                f"{position} steps of 4 items are done, so {whole[position:]} is left, but"
                f" position={position} gives {rest}: `position` counts steps, and the order is that"
                " of the whole epoch"
            )
        at = {"seed": 3, "epoch": 2, "rank": 1, "world_size": 3}
        whole = ordered(batches_of, 13, 2, **at)
        rest = ordered(batches_of, 13, 2, position=1, **at)
        assert rest == whole[1:], (
            f"13 items on three ranks of 2: after one step, rank 1 still has to see {whole[1:]},"
            f" but position=1 gives {rest}: a step takes batch_size * world_size items"
        )


def check_ranks(
    batches_of: Answer, num_items: int, batch_size: int, world_size: int, **at: int
) -> None:
    """Task 3: the shares of a step are the batch of a single rank with the joint batch size."""
    joint = ordered(batches_of, num_items, batch_size * world_size, **at)
    ranks = [
        ordered(batches_of, num_items, batch_size, rank=rank, world_size=world_size, **at)
        for rank in range(world_size)
    ]
    lengths = [len(batches) for batches in ranks]
    assert max(lengths) <= len(joint), (
        f"the ranks have {lengths} steps, expected {len(joint)} each: a step takes batch_size *"
        " world_size items"
    )
    assert lengths == [len(joint)] * world_size, (
        f"the ranks have {lengths} steps, expected {len(joint)} each: a rank without items still"
        " takes the step, with an empty list"
    )
    for step, wanted in enumerate(joint):
        shares = [batches[step] for batches in ranks]
        together = sorted(sum(shares, []))
        assert len(together) == len(set(together)), (
            f"in step {step} two ranks have the same items: {shares}"
        )
        assert together == sorted(wanted), (
            f"step {step}: the ranks have {shares}, a single rank with the joint batch size has"
            f" {wanted}. Cut the order into steps first, then share out each step"
        )
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1, (
            f"step {step}: the ranks have {sizes} items; spread a short step evenly"
        )


def check_several_ranks(batches_of: Answer) -> None:
    """Task 3: ranks that divide evenly, and ranks that don't."""
    with case("Task 3, two ranks that divide evenly"):
        check_ranks(batches_of, 12, 3, 2, seed=0, epoch=0)
    with case("Task 3, 7 items on three ranks of 2"):
        check_ranks(batches_of, 7, 2, 3, seed=0, epoch=0)
    with case("Task 3, 8 items left for three ranks of 3"):
        check_ranks(batches_of, 17, 3, 3, seed=0, epoch=0)
    with case("Task 3, 4 items left for three ranks of 3"):
        check_ranks(batches_of, 13, 3, 3, seed=0, epoch=0)


# ------------------------------------------------------------------ task 4: a pipeline to mend


def perfect_logits(texts: Sequence[Sequence[int]], sure: float = 50.0) -> Tensor:
    """A model that is sure of the true next id at each place of each text: (B, T, 300)."""
    logits = torch.zeros(len(texts), max(map(len, texts)) - 1, 300)
    for b, text in enumerate(texts):
        for t, following in enumerate(text[1:]):
            logits[b, t, following] = sure
    return logits


def symptoms(pipeline_class: Answer) -> None:
    """Print four things that a pipeline does."""
    one = [[5, 299, 270, 0]]
    two = [[5, 4, 3, 0], [7, 0]]
    same = [[5, 4, 3, 0], [9, 8, 7, 0]]
    inputs = pipeline_class(one).batch([0])["input_ids"][0].tolist()
    print(f"the text {one[0]} has the inputs {inputs}")
    labels = pipeline_class(two).batch([0])["labels"][0].tolist()
    print(f"the text {two[0]} has the labels {labels}")
    inputs = pipeline_class(two).batch([0, 1])["input_ids"][1].tolist()
    print(f"the text {two[1]}, beside a longer one, has the inputs {inputs}")
    pipeline = pipeline_class(same)
    loss = pipeline.loss(perfect_logits(same), pipeline.batch([0, 1])["labels"])
    print(f"a perfect model has the loss {loss:.0f}")


def mended(
    answers: Answers, texts: list[list[int]], indices: list[int] | None = None
) -> tuple[Any, dict[str, Tensor]]:
    """Your pipeline, and its batch of these texts, with the shapes checked."""
    assert "MendedPipeline" in answers, "write the class MendedPipeline in the cell above, run it"
    chosen = list(range(len(texts))) if indices is None else indices
    with forbid(package.SupervisedDataset, package.PackedDataset):
        pipeline = answers["MendedPipeline"](texts)
        batch = pipeline.batch(chosen)
    assert isinstance(batch, dict) and {"input_ids", "labels"} <= batch.keys(), (
        "batch must return a dict with input_ids and labels"
    )
    shape = (len(chosen), max(len(texts[index]) for index in chosen) - 1)
    for name in ("input_ids", "labels"):
        found = tuple(getattr(batch[name], "shape", ()))
        assert isinstance(batch[name], Tensor) and found == shape, (
            f"{name} has the shape {found}, expected {shape}: a row for each of the indices"
            f" {chosen}, as long as the longest text of this batch, less one"
        )
        assert batch[name].dtype == torch.int64, (
            f"{name} has the dtype {batch[name].dtype}, expected torch.int64"
        )
    return pipeline, batch


def check_type(answers: Answers) -> None:
    """Task 4: every id comes back."""
    with case("Task 4, the type"):
        for text in ([5, 299, 270, 0], [255, 256, 257, 128, 127, 0]):
            found = mended(answers, [text])[1]["input_ids"][0].tolist()
            for place, (was, now) in enumerate(zip(text, found, strict=False)):
                assert now != was - 256, (
                    f"the id {was} came back as {now}, 256 too small: which numbers fit into the"
                    " type in which the rows are stored?"
                )
                assert now == was, (
                    f"the id {was} at place {place} came back as {now}: are the rows stored in a"
                    " type that holds every id below 300?"
                )


def check_end(answers: Answers) -> None:
    """Task 4: the end of a text is a target, and padding isn't."""
    with case("Task 4, the end"):
        found = mended(answers, [[5, 4, 3, 0]])[1]["labels"][0].tolist()
        assert found != [5, 4, 3], (
            "the labels are the inputs: the label of a place is the id after it, so shift in the"
            " batch, and only there"
        )
        assert found[-1] != IGNORE_INDEX, (
            f"the text 5 4 3 0 has the labels {found}: its end, 0, isn't a target, so no model"
            " learns to stop. Mask the padding, not the end"
        )
        assert found == [4, 3, 0], f"the text 5 4 3 0 has the labels {found}, expected [4, 3, 0]"
        both = mended(answers, [[5, 4, 3, 0], [7, 0]])[1]["labels"].tolist()
        assert both[1][0] == 0, (
            f"the text 7 0 beside a longer one has the labels {both[1]}, but its end is the target"
            " at place 0"
        )
        assert both[1][1:] == [IGNORE_INDEX] * 2, (
            f"the text 7 0 beside a longer one has the labels {both[1]}, expected [0, -100, -100]:"
            " after its end nothing is a target"
        )
        assert both[0] == [4, 3, 0], (
            f"beside a shorter text, 5 4 3 0 has the labels {both[0]}, expected [4, 3, 0]"
        )


def check_copy(answers: Answers) -> None:
    """Task 4: inputs and labels share no memory."""
    with case("Task 4, the copy"):
        for texts in ([[5, 4, 3, 0]], [[5, 4, 3, 0], [7, 0]]):
            batch = mended(answers, texts)[1]
            found = batch["input_ids"].tolist()
            batch["labels"].fill_(77)
            assert batch["input_ids"].tolist() == found, (
                f"texts {texts}: writing into the labels changed the inputs; both are a view of the"
                " same memory, so take a copy"
            )
            assert IGNORE_INDEX not in sum(found, []), (
                f"input_ids is {found}, but -100 belongs in the labels only: inputs are padded with"
                " an id, 1"
            )
            assert found[0] == [5, 4, 3] and found[-1][0] == texts[-1][0], (
                f"input_ids is {found}: the texts {texts} must begin at place 0"
            )
            if len(texts) == 2:
                assert found[1][1] in (0, 1) and found[1][2] == 1, (
                    f"input_ids is {found}: after the text 7 0 stands padding, the id 1"
                )


def check_shift(answers: Answers) -> None:
    """Task 4: a perfect model has a loss of 0."""
    with case("Task 4, the shift"):
        same = [[5, 4, 3, 0], [9, 8, 7, 0]]
        pipeline, batch = mended(answers, same)
        value = pipeline.loss(perfect_logits(same), batch["labels"])
        assert isinstance(value, Tensor) and value.shape == (), (
            f"the loss is {value!r}, expected a tensor with one number"
        )
        moved = pipeline.loss(perfect_logits([text[1:] + [0] for text in same]), batch["labels"])
        assert value < 1e-3 or moved > 1e-3, (
            f"a model that knows every next id has the loss {value:.0f}, and one that says the id"
            " after the next has 0: labels and logits are moved against each other twice"
        )
        assert value < 1e-3, (
            f"a model that knows every next id has the loss {value:.1f}, expected 0: at which place"
            " does the loss look for which label?"
        )


def check_pipeline(answers: Answers, texts: list[list[int]], indices: list[int]) -> None:
    """Task 4: the targets, the rows, and the loss of random logits."""
    before = [list(text) for text in texts]
    pipeline, batch = mended(answers, texts, indices)
    labels = batch["labels"]
    found = Counter(labels[labels != IGNORE_INDEX].tolist())
    wanted = Counter(number for index in indices for number in before[index][1:])
    lost = dict(wanted - found)
    extra = dict(found - wanted)
    assert not lost, f"these ids should be targets and are not (id: how often): {lost}"
    assert not extra, f"these targets are too many (id: how often): {extra}"
    rows = [torch.tensor(before[index]) for index in indices]
    for b, row in enumerate(rows):
        n = len(row) - 1
        for name, right in (("input_ids", row[:-1]), ("labels", row[1:])):
            assert torch.equal(batch[name][b, :n], right), (
                f"row {b} of {name}, for indices {indices}, begins {batch[name][b, :n].tolist()},"
                f" expected {right.tolist()}"
            )
        assert (labels[b, n:] == IGNORE_INDEX).all(), (
            f"row {b} has targets after its text has ended"
        )
    logits = torch.randn(*labels.shape, 300, generator=torch.Generator().manual_seed(0))
    each = [
        -logits[b, t].log_softmax(0)[row[t + 1]]
        for b, row in enumerate(rows)
        for t in range(len(row) - 1)
    ]
    honest = torch.stack(each).mean()
    value = pipeline.loss(logits, labels)
    assert isinstance(value, Tensor), f"the loss is {value!r}, expected a tensor"
    assert torch.allclose(value, honest, atol=1e-4), (
        f"the loss of random logits is {value:.4f}, but the mean over the {len(each)} targets is"
        f" {honest:.4f}: is every target counted once, with the same weight?"
    )
    assert [list(text) for text in texts] == before, "your code changed the texts that it was given"


def check_whole(answers: Answers) -> None:
    """Task 4: all of it together."""
    with case("Task 4, the whole pipeline"):
        check_pipeline(answers, [[5, 299, 256, 0], [7, 0], [298, 2, 3, 255, 4, 0]], [0, 1, 2])
        check_pipeline(answers, [[5, 4, 299, 0], [7, 8, 9, 10, 11, 0], [8, 9, 0]], [2, 0])


# ------------------------------------------------------------------ task 5: an honest score


FIVES = ". Yours is right for runs of 5 words: do you give `size` to shingles?"


def _kept(documents: Sequence[str], threshold: float, size: int) -> list[str]:
    """The documents that must be kept, by their exact similarity."""
    runs = [cleaning.shingles(document, size) for document in documents]
    kept: list[int] = []
    for i, mine in enumerate(runs):
        if not any(len(mine & runs[j]) >= threshold * len(mine | runs[j]) - 1e-9 for j in kept):
            kept.append(i)
    return [documents[i] for i in kept]


def check_near(
    drop: Answer, documents: list[str], threshold: float, size: int, message: str
) -> None:
    """Task 5: what is kept of these documents."""
    before = list(documents)
    with forbid(cleaning.near_duplicates):
        got = drop(documents, threshold, size)
    assert documents == before, "your code changed the list that it was given; return a new one"
    assert isinstance(got, list), (
        f"drop_near_duplicates returned {type(got).__name__}, expected a list: does it return its"
        " result?"
    )
    wanted = _kept(before, threshold, size)
    hint = FIVES if got == _kept(before, threshold, 5) else ""
    assert got == wanted, (
        f"{message}. With threshold={threshold} and size={size}, of {before} you keep {got},"
        f" expected {wanted}{hint}"
    )


CATS = ["the cat sat on the mat", "the cat sat on the hat"]
# documents, threshold, size, what to look at
NEAR: list[tuple[list[str], float, int, str]] = [
    (
        ["e f g h", "A b c d", "a b c d"],
        0.9,
        2,
        "an equal document has the similarity 1 (shingles are in lower case) and is dropped; the"
        " first of the two stays",
    ),
    (
        ["a b c", "c b a"],
        0.5,
        2,
        "the same words in another order share no run of 2 words: compare shingles, not words",
    ),
    (
        CATS,
        0.7,
        2,
        "the cats share 4 of 6 runs: the similarity is what they share / what both together have ="
        " 0.67, which is below the threshold (each alone has 5 runs, and single words are no runs)",
    ),
    (
        [CATS[0], "x y z", CATS[1]],
        0.6,
        2,
        "the cats share 4 of 6 runs, 0.67, which is above the threshold: compare with every"
        " document that was kept before, not only with the last",
    ),
    (
        ["a b c d e", "a b c d x"],
        0.6,
        2,
        "these share 3 of 5 runs, 0.6, which is the threshold: `threshold or more` is dropped",
    ),
    (
        ["a b c d", "e f g h", "a b c d"],
        1.0,
        2,
        "the third is the first once more: an equal document has the similarity 1, which is the"
        " threshold",
    ),
    (
        ["one", "two", "one", "a b", "a b"],
        0.5,
        5,
        "a text shorter than `size` words is a single run, as shingles makes it",
    ),
    (
        ["a b c d e f", "c d e f g h", "e f g h i j"],
        0.4,
        2,
        "the second is dropped (3 of 7), and the third resembles only the second: who was dropped"
        " drops nobody",
    ),
    (
        ["a b c d e f g h", "a b c d"],
        0.5,
        2,
        "the short one lies wholly in the long one, but they share 3 of 7 runs: divide by the runs"
        " of both together",
    ),
]


def check_drop_near_duplicates(drop: Answer) -> None:
    """Task 5: the visible cases of `drop_near_duplicates`."""
    with case("Task 5, drop_near_duplicates"):
        for documents, threshold, size, message in NEAR:
            check_near(drop, list(documents), threshold, size, message)


def check_known(
    share_known: Answer, train: list[str], val: list[str], size: int, message: str
) -> None:
    """Task 5: the share of each validation document that is known."""
    before = (list(train), list(val))
    got = share_known(train, val, size)
    assert (train, val) == before, "your code changed the lists that it was given"
    assert isinstance(got, list | tuple), (
        f"share_known returned {type(got).__name__}, expected a list with a number for each"
        " validation document"
    )
    assert len(got) == len(val), (
        f"share_known returned {len(got)} numbers for {len(val)} validation documents: one for each"
        " of them, and none for training documents"
    )
    for text, share in zip(val, got, strict=True):
        wanted = _share(train, text, size)
        hint = FIVES if share == _share(train, text, 5) else ""
        assert isinstance(share, int | float | np.number), (
            f"the share of {text!r} is of the type {type(share).__name__}: give a float"
        )
        assert abs(share - wanted) < 1e-6, (
            f"{message}. For train={train} and the validation document {text!r} you find {share},"
            f" expected {wanted:.3f}{hint}"
        )


def _share(train: Sequence[str], text: str, size: int) -> float:
    known: set[str] = set().union(*(cleaning.shingles(one, size) for one in train))
    mine = cleaning.shingles(text, size)
    return len(mine & known) / len(mine)


# training documents, validation documents, size, what to look at
KNOWN: list[tuple[list[str], list[str], int, str]] = [
    (
        ["a b c d"],
        ["a b c d", "x y z"],
        2,
        "all runs of the first are known and none of the second",
    ),
    (["a b c"], ["c b a"], 2, "the same words in another order are no known runs"),
    (
        ["u v a b c w x y z"],
        ["a b c d"],
        2,
        "2 of the 3 runs of the validation document are known: divide by its own runs, not by those"
        " of both together or of the training text",
    ),
    (
        ["a b q", "r c d"],
        ["a b x c d"],
        2,
        "one run is known from the first training document and one from the second: take all"
        " training documents together",
    ),
    (
        ["a b", "c d"],
        ["b c"],
        2,
        "b ends one document and c begins the next: no run crosses a border",
    ),
    (
        ["a b c", "x a b"],
        ["a b d"],
        2,
        "1 of the 2 runs is known, from two training documents, and a run is known or not: it"
        " counts once",
    ),
    (["The Cat sat"], ["the cat SAT"], 2, "shingles are in lower case"),
    (
        ["word", "a b"],
        ["word", "other"],
        5,
        "a text shorter than `size` words is a single run, as shingles makes it",
    ),
    (
        ["a b"],
        ["a b", "a b"],
        2,
        "two equal validation documents have the same share, and each has its own number",
    ),
    (
        ["p"],
        ["a b c", "a b c", "b c d"],
        2,
        "what stood in another validation document is not known: known is what stands in training",
    ),
]


def check_share_known(share_known: Answer) -> None:
    """Task 5: the visible cases of `share_known`."""
    with case("Task 5, share_known"):
        for train, val, size, message in KNOWN:
            check_known(share_known, list(train), list(val), size, message)


def _invent(dice: random.Random, words: Sequence[str], length: int = 180) -> str:
    """An article: common words are common, and lines have 12 words."""
    chosen = [words[int(len(words) ** dice.random()) - 1] for _ in range(length)]
    return "\n".join(" ".join(chosen[i : i + 12]) for i in range(0, length, 12))


def _edited(text: str, dice: random.Random, words: Sequence[str], step: int = 12) -> str:
    """A copy in which every `step`-th word is another."""
    lines = [line.split(" ") for line in text.split("\n")]
    for number, line in enumerate(lines):
        line[(number * 5) % step] = dice.choice(words)
    return "\n".join(" ".join(line) for line in lines)


def bits_per_byte(train: Sequence[str], val: Sequence[str]) -> float:
    """What a compressor needs for the validation text after it has read the training text."""
    before, after = (
        len(lzma.compress("\n".join(texts).encode(), preset=1)) for texts in (train, [*train, *val])
    )
    return 8 * (after - before) / len("\n".join(val).encode())


def four_splits(seed: int = 0) -> dict[str, tuple[list[str], list[str]]]:
    """Four ways to (train, val), by their names."""
    dice = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [
        "".join(dice.choice(letters) for _ in range(dice.randrange(3, 9))) for _ in range(2000)
    ]
    articles = [_invent(dice, words) for _ in range(24)]
    copies = {_edited(text, dice, words): text for text in articles}
    pile = articles + list(copies)
    dice.shuffle(pile)
    lines = [line for text in pile for line in text.split("\n")]
    train, val = split_documents(pile, val_fraction=0.2, seed=seed)
    # no copy beside its original
    train_once, val_once = (
        [text for text in side if copies.get(text) not in side] for side in (train, val)
    )
    return {
        "A: split by lines": split_documents(lines, val_fraction=0.2, seed=seed),
        "B: split by documents": (train, val),
        "C: split, then each side without duplicates": (train_once, val_once),
        "D: without duplicates, then split": split_documents(articles, val_fraction=0.2, seed=seed),
    }


# ------------------------------------------------------------------ task 6: many files into one


class Characters:
    """A tokenizer that makes a character an id; `shift_by` makes another one of it."""

    eos_token_id = 0

    def __init__(self, vocab_size: int = 1000, shift_by: int = 1):
        self.vocab_size = vocab_size
        self.shift_by = shift_by
        self.sha256 = hashlib.sha256(f"{vocab_size} {shift_by}".encode()).hexdigest()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return [ord(character) % 900 + self.shift_by for character in text]

    def decode(self, ids: Any) -> str:
        raise AssertionError(
            "copy the ids as they are: they take no decoding, and what is decoded and encoded again"
            " may have other ids"
        )


def write_parts(folder: str, groups: Sequence[Sequence[str]], tokenizer: Any) -> list[Path]:
    """A token file for each group of documents; their names run against their order."""
    paths = [Path(folder, f"part{9 - number}.tokens") for number in range(len(groups))]
    with mock.patch("os.fsync"):
        for part, group in zip(paths, groups, strict=True):
            TokenFile.write(part, group, tokenizer)
    return paths


def _left_over(folder: str, known: Iterable[Path]) -> list[str]:
    return sorted({file.name for file in Path(folder).iterdir()} - {file.name for file in known})


def check_joined(
    join: Answer,
    groups: Sequence[Sequence[str]],
    tokenizer: Any,
    kind: Any = Path,
    order: Sequence[int] | None = None,
) -> None:
    """Task 6: the joined file is what `TokenFile.write` writes, byte for byte."""
    order = range(len(groups)) if order is None else order
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        paths = write_parts(folder, groups, tokenizer)
        path = Path(folder, "all.tokens")
        before = [part.read_bytes() for part in paths]
        with mock.patch("os.fsync"):  # slow, and nothing here need survive a crash
            join(kind(path), [kind(paths[number]) for number in order], tokenizer)
        assert path.exists(), "there is no file under `path`: does your function write it?"
        assert [part.read_bytes() for part in paths] == before, (
            "the parts are no longer what they were: read them, but leave them"
        )
        left = _left_over(folder, [*paths, path])
        assert not left, f"besides the file itself your code left {left} in the folder"
        documents = [document for number in order for document in groups[number]]
        whole = Path(folder, "whole.tokens")
        with mock.patch("os.fsync"):
            TokenFile.write(whole, documents, tokenizer)
        _compare_files(path.read_bytes(), whole.read_bytes())


def _compare_files(ours: bytes, real: bytes) -> None:
    start = TokenFile.HEADER_BYTES
    try:
        header = json.loads(ours[:start])
    except ValueError:
        header = None
    assert isinstance(header, dict), (
        f"the first {start} bytes are no header: they must be JSON, filled up with spaces"
    )
    wanted = json.loads(real[:start])
    width = np.dtype(wanted["dtype"]).itemsize
    assert len(ours) == len(real), (
        f"the file has {(len(ours) - start) / width:g} ids after the header, expected"
        f" {(len(real) - start) // width}: does every part come once, without its own header, and"
        " in the type of the parts?"
    )
    assert ours[start:] == real[start:], "the ids are not those of the parts in the given order"
    for name, value in wanted.items():
        assert name in header, f"the header has no entry {name!r}: take over what the parts say"
        rule = "as in the parts"
        if name.startswith("num_"):
            rule = "the sum over all parts"
        elif name == "sha256":
            rule = "the hash of all bytes after the header, of all parts"
        assert header[name] == value, (
            f"the header says {name}={header[name]!r}, expected {value!r}: {rule}"
        )
    assert ours == real, (
        "the header holds the right values, but it is not byte for byte what TokenFile.write"
        " writes: the entries in the order of the parts, as json.dumps writes them, then spaces"
    )


def check_content(join: Answer) -> None:
    """Task 6: the visible cases of the content."""
    with case("Task 6, two parts"):
        check_joined(join, [["abc", "de"], ["fgh"]], Characters())
    with case("Task 6, three parts, not in the order of the alphabet"):
        check_joined(join, [["zebra", "yak"], ["ape"], ["mule", "é", "gnu"]], Characters())


def check_refused(join: Answer, spoil: Answer, what: str, middle: int = 1) -> None:
    """Task 6: a spoiled part must be refused, and a former file must survive."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tokenizer = Characters()
        paths = write_parts(folder, [["abc"], ["defg"], ["hi"]], tokenizer)
        path = Path(folder, "all.tokens")
        former = paths[0].read_bytes()
        path.write_bytes(former)
        spoil(paths[middle])
        try:
            join(path, list(paths), tokenizer)
        except ValueError:
            pass
        except NameError:
            raise
        except Exception as error:
            raise AssertionError(
                f"{what} was refused with {type(error).__name__}, expected a ValueError"
            ) from None
        else:
            raise AssertionError(f"{what} was joined without a word; expected a ValueError")
        assert path.exists(), f"{what} was refused, but the former file under `path` is gone"
        assert path.read_bytes() == former, (
            f"{what} was refused, but the former file under `path` has already been changed"
        )
        left = _left_over(folder, [*paths, path])
        assert not left, f"{what} was refused, but {left} was left lying in the folder"


def flip(part: Path) -> None:
    """Flip one bit of one id."""
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)


def _check_takes_its_place(join: Answer) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tokenizer: Any = Characters()
        paths = write_parts(folder, [["abc"], ["de"]], tokenizer)
        path = Path(folder, "all.tokens")
        former = TokenFile.write(path, ["the former file"], tokenizer).path.read_bytes()
        second = Path(folder, "second name")
        try:
            os.link(path, second)  # who writes into the former file changes it under this name too
        except OSError:
            pass  # this disk knows no second names
        join(path, paths, tokenizer)
        assert path.read_bytes() != former, "the former file is still there, the new one is not"
        assert not second.exists() or second.read_bytes() == former, (
            "your code wrote into the former file: a crash in the middle would leave half of it."
            " Write beside it, and let the new file take its place when it is whole"
        )


def _check_last_moment(join: Answer) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        paths = write_parts(folder, [["abc"], ["de"]], Characters())
        path = Path(folder, "all.tokens")
        path.write_bytes(paths[0].read_bytes())
        before = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
        broken = OSError("the disk failed while a file took its name")
        failed = False
        with (
            mock.patch("os.replace", side_effect=broken),
            mock.patch("os.rename", side_effect=broken),
        ):
            try:
                join(path, paths, Characters())
            except OSError:
                failed = True
        after = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
        assert not failed or path.name in after, (
            "the disk failed when the new file took its name, and the former file was already gone:"
            " do not remove it, let the new one replace it"
        )
        assert not failed or after == before, (
            "the disk failed when the new file took its name, and the folder is not as before: it"
            f" holds {sorted(after)}, before it held {sorted(before)}. Remove what you have begun"
            " also after an error"
        )


def check_safety(join: Answer) -> None:
    """Task 6: what is refused, and that a file is whole or not there."""
    other: Any = Characters(shift_by=2)
    with case("Task 6, what is refused"):
        check_refused(
            join,
            lambda part: TokenFile.write(part, ["defg"], other),
            "a part of another tokenizer",
        )
        check_refused(join, flip, "a part in which one bit has flipped")
        check_refused(
            join, lambda part: part.write_bytes(part.read_bytes()[:-2]), "a part that was cut"
        )
    with case("Task 6, whole or not at all"):
        _check_takes_its_place(join)
    with case("Task 6, an error at the last moment"):
        _check_last_moment(join)


# ----------------------------------------------------- task 7: files that belong together

FILES = ("tokenizer", "train", "val")


class PowerFailure(BaseException):
    """The end of the program: no `except Exception` sees it, and the disk takes no more changes."""


class Disk(MutableMapping[str, str]):
    """Texts by name. Instead of change number `fails_at` there is an error of the kind `how`."""

    def __init__(
        self,
        files: Mapping[str, str] | None = None,
        *,
        fails_at: int = 0,
        how: type[BaseException] = OSError,
    ):
        self.files = dict(files or {})
        self.changes = 0
        self.fails_at = fails_at
        self.how = how

    def _change(self) -> None:
        self.changes += 1
        off = self.how is PowerFailure and 0 < self.fails_at < self.changes
        if off or self.changes == self.fails_at:
            raise self.how("no change is possible")

    def __getitem__(self, name: str) -> str:
        return self.files[name]

    def __setitem__(self, name: str, text: str) -> None:
        self._change()
        self.files[name] = text

    def __delitem__(self, name: str) -> None:
        self._change()
        del self.files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def made(name: str, corpus: str) -> str:
    """What a file of a corpus holds."""
    return f"{name} of {corpus}"


def _expect_prepared(disk: Disk, corpus: str, when: str) -> None:
    expected = {name: made(name, corpus) for name in FILES} | {"info": corpus}
    assert disk.files == expected, f"{when}, the disk holds {disk.files}, expected {expected}"


def check_prepare(prepare: Answer) -> None:
    """`prepare(disk, corpus, make)` while nothing goes wrong."""
    with case("Task 7, nothing goes wrong"):
        disk = Disk()
        prepare(disk, "stories", made)
        _expect_prepared(disk, "stories", "after the first call")
        disk = Disk(disk.files)
        calls = []

        def make(name: str, corpus: str) -> str:
            calls.append(name)
            return made(name, corpus)

        prepare(disk, "stories", make)
        assert not calls and not disk.changes, (
            f"the note says that this corpus is prepared, and yet you make {calls} and change the"
            f" disk {disk.changes} times: return at once"
        )
        prepare(disk, "manual", made)
        _expect_prepared(disk, "manual", "after another corpus")


def check_refused_text(prepare: Answer) -> None:
    """`make` refuses the last file: nothing may have changed."""

    def refuse(name: str, corpus: str) -> str:
        if name == FILES[-1]:
            raise ValueError("the text is too short")
        return made(name, corpus)

    with case("Task 7, make refuses a text"):
        disk = Disk()
        prepare(disk, "stories", made)
        with suppress(ValueError):
            prepare(disk, "manual", refuse)
            raise AssertionError("make raised a ValueError: it must reach the caller")
        _expect_prepared(
            disk, "stories", "after `make` has refused the last file of another corpus"
        )


def check_crashes(
    prepare: Answer, then: str = "manual", how: type[BaseException] = PowerFailure
) -> None:
    """From stories to the manual, with an error instead of each change in turn, then once more."""
    with case(f"Task 7, {how.__name__} at each change, then {then}"):
        before = Disk()
        prepare(before, "stories", made)
        for number in range(1, 20):
            disk = Disk(before.files, fails_at=number, how=how)
            with suppress(how):
                prepare(disk, "manual", made)
            note = disk.get("info")
            found = {name: disk.get(name) for name in FILES}
            mixed = {name: text for name, text in found.items() if text != made(name, note or "")}
            assert note is None or not mixed, (
                f"change {number} fails, and afterwards the note says {note!r}, but the disk holds"
                f" {mixed}: when must the old note go, and when may the new one come?"
            )
            disk = Disk(disk.files)
            prepare(disk, then, made)
            _expect_prepared(disk, then, f"change {number} failed, and in the next run")

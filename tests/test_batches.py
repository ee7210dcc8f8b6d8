"""Batches: where labels are shifted, what is a target, and an order that nothing but (seed, epoch,
position) decides.
"""

import ast
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from llm_course.text.batches import (
    IGNORE_INDEX,
    PackedDataset,
    ResumableBatchSampler,
    SupervisedDataset,
    batch_loader,
    shift,
)
from llm_course.text.tokenization import CHAT_TOKENS, SPECIAL_TOKENS, BPETokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(  # demos of the pages shift by hand where that is what they show
    path for path in (ROOT / "llm_course").rglob("*.py") if path.parent.name != "pages"
)
token_rows = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def assert_same_batch(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype == torch.int64
        assert one[name].tolist() == other[name].tolist(), name


def stacked(items):
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


# ---------------------------------------------------------------- the shift


@settings(max_examples=50, deadline=None)
@given(B=st.integers(0, 3), T=st.integers(0, 6), seed=st.integers(0, 99))
def test_label_of_a_token_is_the_next_one(B, T, seed):
    ids = torch.randint(0, 9, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    batch = shift(ids)
    assert batch["input_ids"].shape == batch["labels"].shape == (B, T)
    for b in range(B):
        for t in range(T):
            assert batch["input_ids"][b, t] == ids[b, t] and batch["labels"][b, t] == ids[b, t + 1]


def test_labels_are_a_copy():
    ids = torch.arange(5)
    batch = shift(ids)
    batch["labels"][:] = IGNORE_INDEX
    assert batch["input_ids"].tolist() == [0, 1, 2, 3] and ids.tolist() == [0, 1, 2, 3, 4]


def test_targets_replace_the_labels_only():
    batch = shift(torch.tensor([[1, 2, 3]]), torch.tensor([[IGNORE_INDEX, IGNORE_INDEX, 3]]))
    assert batch["input_ids"].tolist() == [[1, 2]] and batch["labels"].tolist() == [
        [IGNORE_INDEX, 3]
    ]


def test_one_shift_is_what_hugging_face_does_inside_its_loss():
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(1))
    targets = ids.masked_fill(ids < 4, IGNORE_INDEX)
    theirs = ForCausalLMLoss(logits, targets, vocab_size=11)  # takes labels that are not shifted
    labels = shift(ids, targets)["labels"]
    assert_close(F.cross_entropy(logits[:, :5].flatten(0, 1), labels.flatten()), theirs)
    perfect = 50.0 * F.one_hot(ids[:, 1:], 11)  # sure of the true next token
    assert F.cross_entropy(perfect.flatten(0, 1), labels.flatten()) < 1e-6
    # the planted mistake: a second shift, in the loss
    assert ForCausalLMLoss(perfect, labels, vocab_size=11) > 1


def cuts(node: ast.AST) -> str | None:
    """'head' for x[..., :-1], 'tail' for x[..., 1:], with any or no other dimensions before; else
    None.
    """
    if not isinstance(node, ast.Subscript) or ast.unparse(node.value).endswith(".shape"):
        return None
    last = (
        node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    )
    return {":-1": "head", "1:": "tail"}.get(ast.unparse(last))


def is_sliced_labels(node: ast.AST) -> bool:
    """Whether it is labels[..., 1:], batch["labels"][:, 1:], self.labels[a:b], or rolled."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).split(".")[-1] == "roll"
    slices = isinstance(node, ast.Subscript) and any(
        isinstance(part, ast.Slice) for part in ast.walk(node.slice)
    )
    return slices and "labels" in ast.unparse(node.value)


def shifting_places(code: str, module: str) -> list[str]:
    """The functions that cut off the last and the first token, or slice labels: they shift."""
    functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
    found = []
    for function in functions:
        nodes = list(ast.walk(function))
        if {"head", "tail"} <= {cuts(node) for node in nodes} or any(map(is_sliced_labels, nodes)):
            found.append(f"{module}:{function.name}")
    return found


# they train nothing
NEIGHBOURS = {
    "llm_course/model/sampling.py:keep_top_p",
    "llm_course/model/generation.py:_check_prompts",
}


def test_the_package_shifts_in_one_place_only():
    places = [
        shifting_places(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
        for path in MODULES
    ]
    assert set(sum(places, [])) == {"llm_course/text/batches.py:shift"} | NEIGHBOURS


@pytest.mark.parametrize(
    "code, planted",
    [
        ("def f(window):\n    return window[:-1], window[1:]", True),
        ("def loss(logits, labels):\n    return ce(logits[:, :-1], labels[:, 1:])", True),
        (
            (
                "def loss(logits, batch):\n    return ce(logits[..., :-1, :], batch['labels'][...,"
                " 1:])"
            ),
            True,
        ),
        (
            "class Task:\n    def step(self, x):\n        return x[..., :-1], x[..., 1:].clone()",
            True,
        ),
        ("def f(ids):\n    return ids, torch.roll(ids, -1)", True),
        ("def f(labels, T):\n    return labels[1 : T + 1]", True),
        ("def f(words):\n    return zip(words, words[1:])", False),
        ("def f(argv):\n    return argv[1:]", False),
        ("def f(x):\n    return x[:-1]", False),
        ("def f(labels):\n    return (labels != -100).sum()", False),
        ("def f(batch, i):\n    return batch['labels'][i]", False),
    ],
)
def test_planted_second_shift(code, planted):
    assert bool(shifting_places(code, "module")) == planted


# ---------------------------------------------------------------- packed rows


def document_ids_by_loop(ids, separator_id):
    numbers = []
    current = 0
    for token in ids:
        numbers.append(current)
        current += token == separator_id
    return numbers


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 60),
    T=st.integers(1, 20),
    dtype=st.sampled_from([np.uint16, np.uint32, np.int64, ">u2"]),
    step=st.sampled_from([1, 2, -1]),
    seed=st.integers(0, 99),
)
def test_packed_rows_equal_the_definition(n, T, dtype, step, seed):
    # often not contiguous
    tokens = np.random.default_rng(seed).integers(0, 4, size=n).astype(dtype)[::step]
    if len(tokens) < T + 1:
        with pytest.raises(
            ValueError, match=f"{len(tokens)} tokens are too few for one row of sequence_length={T}"
        ):
            PackedDataset(tokens, T)
        return
    data = PackedDataset(tokens, T, separator_id=0)
    plain = PackedDataset(tokens, T)
    ids = tokens.tolist()
    assert len(data) == len(plain) == (len(ids) - 1) // T
    for i, item in enumerate(data[i] for i in range(len(data))):
        assert item["input_ids"].tolist() == ids[i * T : i * T + T]
        assert item["labels"].tolist() == ids[i * T + 1 : i * T + T + 1]
        assert item["labels"][:-1].tolist() == item["input_ids"][1:].tolist()
        assert item["document_ids"].tolist() == document_ids_by_loop(item["input_ids"].tolist(), 0)
        assert plain[i].keys() == {"input_ids", "labels"}
    everything = list(range(len(data)))
    assert_same_batch(data.__getitems__(everything), stacked([data[i] for i in everything]))
    targets = data.__getitems__(everything)["labels"].flatten().tolist()
    # each once and in order, but for the first and the rest
    assert targets == ids[1 : len(data) * T + 1]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_packed_rows_from_a_memory_map(tmp_path, dtype):
    ids = (
        np.random.default_rng(0)
        .integers(0, np.iinfo(dtype).max, size=41, endpoint=True)
        .astype(dtype)
    )
    ids[-2] = np.iinfo(dtype).max  # the largest id is no negative number
    (tmp_path / "tokens").write_bytes(b"head" + ids.tobytes())
    mapped = np.memmap(tmp_path / "tokens", dtype=dtype, mode="r", offset=4)
    data = PackedDataset(mapped, 8)
    assert data.tokens is mapped  # nothing was read
    assert_same_batch(
        data.__getitems__([4, 0, 2]), PackedDataset(ids.astype(np.int64), 8).__getitems__([4, 0, 2])
    )
    assert data[4]["labels"].max() == np.iinfo(dtype).max


def test_packed_indices():
    data = PackedDataset(np.arange(13), 4, separator_id=99)
    assert_same_batch(data.__getitems__([-1, 0]), stacked([data[2], data[0]]))
    for outside in (3, -4):
        with pytest.raises(IndexError):
            data[outside]
        with pytest.raises(IndexError):
            data.__getitems__([0, outside])
    assert len(list(data)) == 3  # iterating ends
    assert {name: rows.shape for name, rows in data.__getitems__([]).items()} == dict.fromkeys(
        data[0], (0, 4)
    )


@pytest.mark.parametrize(
    "T, n, message",
    [
        (0, 9, "sequence_length=0"),
        (-1, 9, "sequence_length=-1"),
        (9, 9, "9 tokens are too"),
        (1, 0, "0 tokens"),
    ],
)
def test_packed_bad_input(T, n, message):
    with pytest.raises(ValueError, match=message):
        PackedDataset(np.arange(n), T)


def test_border_of_documents():
    item = PackedDataset(np.array([7, 8, 0, 9, 0, 0, 5, 6, 4]), 8, separator_id=0)[0]
    # two separators: an empty document between them
    assert item["document_ids"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    same = item["document_ids"][:, None] == item["document_ids"]
    assert same.sum() == 9 + 4 + 1 + 4
    # from a separator, how the next one begins
    assert item["labels"][item["input_ids"] == 0].tolist() == [9, 0, 5]


# ---------------------------------------------------------------- prompts and answers


@settings(max_examples=60, deadline=None)
@given(
    examples=st.lists(st.tuples(token_rows, token_rows), min_size=1, max_size=5),
    pad=st.integers(0, 12),
    data=st.data(),
)
def test_supervised_batches_equal_the_definition(examples, pad, data):
    dataset = SupervisedDataset(examples, pad_token_id=pad, max_length=15)
    indices = data.draw(st.lists(st.integers(0, len(examples) - 1), min_size=1, max_size=4))
    batch = dataset.__getitems__(indices)
    T = max(len(sum(examples[i], [])) for i in indices) - 1
    assert {name: (rows.shape, rows.dtype) for name, rows in batch.items()} == dict.fromkeys(
        ["input_ids", "labels", "attention_mask"], ((len(indices), T), torch.int64)
    )
    for row, i in enumerate(indices):
        prompt, answer = examples[i]
        whole = [*prompt, *answer]
        for t in range(T):
            assert batch["input_ids"][row, t] == (whole[t] if t < len(whole) else pad)
            assert batch["attention_mask"][row, t] == (t < len(whole))
            is_target = len(prompt) <= t + 1 < len(whole)
            assert batch["labels"][row, t] == (whole[t + 1] if is_target else IGNORE_INDEX)
            if is_target and t + 1 < T:
                assert batch["labels"][row, t] == batch["input_ids"][row, t + 1]
    found = Counter(batch["labels"].flatten().tolist())
    found.pop(IGNORE_INDEX, None)
    # every token of every answer, once
    assert found == Counter(token for i in indices for token in examples[i][1])
    assert_same_batch(
        dataset[0], {name: rows[0] for name, rows in dataset.__getitems__([0]).items()}
    )


def test_padding_that_also_occurs_in_the_text_stays_a_target():
    batch = SupervisedDataset(
        [([5], [0]), ([5, 0, 5], [0, 0])], pad_token_id=0, max_length=4
    ).__getitems__([0, 1])
    assert batch["labels"].tolist() == [[0, -100, -100, -100], [-100, -100, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    by_comparing = (batch["input_ids"] != 0).long()  # the planted mistake: padding found by its id
    assert by_comparing.tolist() != batch["attention_mask"].tolist()


def test_supervised_takes_arrays_and_an_empty_batch():
    lists = SupervisedDataset([([1, 2], [3]), ([4], [5, 6, 7])], pad_token_id=0, max_length=3)
    arrays = [
        tuple(np.array(part, dtype=np.uint16) for part in example) for example in lists.examples
    ]
    assert_same_batch(
        SupervisedDataset(arrays, pad_token_id=0, max_length=3).__getitems__([1, 0]),
        lists.__getitems__([1, 0]),
    )
    for rows in lists.__getitems__([]).values():
        assert rows.shape == (0, 1) and rows.dtype == torch.int64
    assert_same_batch(lists[-1], lists[1])
    for outside in (2, -3):
        with pytest.raises(IndexError):
            lists[outside]


@pytest.mark.parametrize(
    "example, pad, message",
    [
        (([1], [2]), None, "pad_token_id=None"),
        (([], [2]), 0, "example 1 has a prompt of 0 and an answer of 1"),
        (([1], []), 0, "a prompt of 1 and an answer of 0"),
        (([1, 2], [3, 4]), 0, r"at most max_length \+ 1 = 3"),
    ],
)
def test_supervised_bad_input(example, pad, message):
    with pytest.raises(ValueError, match=message):
        SupervisedDataset([([1], [2, 3]), example], pad_token_id=pad, max_length=2)


# ---------------------------------------------------------------- the order


def epoch_by_rank(num_items, batch_size, world_size, **at):
    """Step -> the indices of each rank; strict: all ranks take equally many steps."""
    ranks = range(world_size)
    samplers = [
        ResumableBatchSampler(num_items, batch_size, rank=rank, world_size=world_size, **at)
        for rank in ranks
    ]
    steps = list(zip(*samplers, strict=True))
    assert {len(sampler) for sampler in samplers} == {len(steps)}
    return steps


@settings(max_examples=80, deadline=None)
@given(
    num_items=st.integers(1, 50),
    batch_size=st.integers(1, 8),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    position=st.integers(0, 8),
)
def test_ranks_share_the_batch_of_one_rank(
    num_items, batch_size, world_size, seed, epoch, position
):
    state = {"seed": seed, "epoch": epoch, "position": position}
    steps = epoch_by_rank(num_items, batch_size, world_size, **state)
    alone = list(
        ResumableBatchSampler(num_items, batch_size * world_size, **json.loads(json.dumps(state)))
    )
    assert [sum(step, []) for step in steps] == alone
    for step in steps:
        sizes = [len(share) for share in step]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch_size
        assert all(type(index) is int for share in step for index in share)
    whole = epoch_by_rank(num_items, batch_size, world_size, seed=seed, epoch=epoch)
    assert steps == whole[position:]  # resuming at any position, also behind the end
    assert sorted(sum((sum(step, []) for step in whole), [])) == list(range(num_items))


class Recorded:
    """A dataset whose batches are the indices themselves, with the worker that fetched them."""

    def __getitems__(self, indices):
        worker = torch.utils.data.get_worker_info()
        return {"indices": list(indices), "worker": 0 if worker is None else worker.id}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_three_epochs_on_one_to_four_ranks(num_workers):
    workers = set()
    for world_size in (1, 2, 3, 4):
        orders = [[], [], []]
        for rank in range(world_size):
            epochs = [
                list(
                    ResumableBatchSampler(
                        19, 3, seed=4, epoch=epoch, rank=rank, world_size=world_size
                    )
                )
                for epoch in range(3)
            ]
            # workers start once for all three
            batches = list(batch_loader(Recorded(), sum(epochs, []), num_workers=num_workers))
            assert [batch["indices"] for batch in batches] == sum(epochs, [])
            workers |= {batch["worker"] for batch in batches}
            for order, batches_of_epoch in zip(orders, epochs, strict=True):
                order += sum(batches_of_epoch, [])
        for order in orders:
            assert sorted(order) == list(range(19))  # nothing repeated, nothing lost
        assert orders[0] != orders[1] != orders[2] != orders[0]
    assert workers == set(range(max(1, num_workers)))  # each worker did work


def test_order_depends_on_seed_and_epoch_and_on_nothing_else():
    def order(seed, epoch):
        return sum(ResumableBatchSampler(30, 4, seed=seed, epoch=epoch), [])

    orders = {(seed, epoch): order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(set(map(tuple, orders.values()))) == 16
    np.random.seed(3), torch.manual_seed(3)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert order(2, 1) == orders[2, 1]
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    # Runs in progress rely on this order: if NumPy ever changes it, they cannot be resumed.
    assert sum(ResumableBatchSampler(7, 2, seed=0, epoch=0), []) == [2, 4, 3, 6, 5, 0, 1]
    sampler = ResumableBatchSampler(30, 4, seed=2, epoch=1)
    assert list(sampler) == list(sampler)  # iterating does not move it


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_items": 0}, "num_items=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2 must lie in 0..1"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"position": -1}, "position=-1"),
        ({"epoch": -1}, "epoch=-1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_sampler_bad_input(wrong, message):
    with pytest.raises(ValueError, match=message):
        ResumableBatchSampler(**{"num_items": 9, "batch_size": 2, "seed": 0, "epoch": 0} | wrong)


def test_pytorchs_sampler_agrees_where_the_numbers_divide_and_repeats_elsewhere():
    def handed_out(num_items):
        samplers = [DistributedSampler(range(num_items), 4, rank, seed=0) for rank in range(4)]
        return Counter(index for sampler in samplers for index in sampler)

    def ours(num_items):
        return Counter(
            sum((sum(step, []) for step in epoch_by_rank(num_items, 2, 4, seed=0, epoch=0)), [])
        )

    assert handed_out(16) == ours(16) == Counter(range(16))
    assert ours(13) == Counter(range(13)) and sum(handed_out(13).values()) == 16


# ---------------------------------------------------------------- the loader


def test_loader_leaves_the_global_generator_alone():
    data = PackedDataset(np.arange(13), 4)
    sampler = ResumableBatchSampler(3, 2, seed=0, epoch=0)

    def moved_by(loader):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        list(loader)
        return not torch.equal(before, torch.get_rng_state())

    assert not moved_by(batch_loader(data, sampler))
    assert not moved_by(batch_loader(data, sampler, num_workers=1))
    # the planted mistake: no generator of its own
    assert moved_by(DataLoader(data, batch_sampler=sampler, collate_fn=dict))


def test_loader_gives_whole_batches_also_empty_ones():
    data = PackedDataset(np.arange(13), 4, separator_id=5)
    batches = list(batch_loader(data, [[2, 0], [], [1]], num_workers=0))
    assert [batch["input_ids"].shape for batch in batches] == [(2, 4), (0, 4), (1, 4)]
    assert_same_batch(batches[0], data.__getitems__([2, 0]))
    through_a_worker = list(batch_loader(data, [[2, 0], [], [1]], num_workers=1))
    for one, other in zip(batches, through_a_worker, strict=True):
        assert_same_batch(one, other)
    through_a_worker[0]["labels"][:] = IGNORE_INDEX
    assert through_a_worker[0]["input_ids"].min() >= 0


@pytest.mark.parametrize(
    "tokens",
    [None, [1, 2, 3], 5, "abc", torch.arange(9)],
    ids=["None", "list", "int", "str", "tensor"],
)
def test_tokens_must_be_an_array(tokens):
    with pytest.raises(ValueError, match="tokens is a .*expected a NumPy array"):
        PackedDataset(tokens, 2)


def test_ids_of_special_roles_are_whole_numbers():
    for wrong in (-1, 2.5, "0", True):
        with pytest.raises(ValueError, match="separator_id="):
            PackedDataset(np.arange(9), 2, separator_id=wrong)
        with pytest.raises(ValueError, match="pad_token_id="):
            SupervisedDataset([([1], [2])], pad_token_id=wrong, max_length=4)
        with pytest.raises(ValueError, match="num_workers="):
            batch_loader(None, [], num_workers=wrong)
    for wrong in (0, None, 2.5):
        with pytest.raises(ValueError, match="max_length="):
            SupervisedDataset([([1], [2])], pad_token_id=0, max_length=wrong)


def test_shift_refuses_other_shapes():
    for ids in (None, [1, 2], torch.tensor(3)):
        with pytest.raises(ValueError, match="ids must be a tensor"):
            shift(ids)
    with pytest.raises(ValueError, match="targets has shape .2,., expected .3."):
        shift(torch.arange(3), torch.arange(2))


# ---------------------------------------------------------------- faults that no loss shows

END, PAD = 0, 10


def fit(batch, *, second_shift=False):
    """A table that looks at the last token only, trained for a hundred steps; and its losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    losses = []
    for _ in range(100):
        logits, labels = model(batch["input_ids"]), batch["labels"]
        if second_shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def written_by(model, start, most=12):
    text = [start]
    while len(text) < most and text[-1] != END:
        text.append(model(torch.tensor(text[-1])).argmax().item())
    return text


def supervised(texts):
    rows = [(text[:1], text[1:]) for text in texts]
    return SupervisedDataset(rows, pad_token_id=PAD, max_length=40).__getitems__(range(len(rows)))


def test_a_second_shift_has_as_good_a_loss_and_counts_by_two():
    circle = PackedDataset(np.arange(201) % 10, sequence_length=20).__getitems__(range(10))
    (once, losses), (twice, other) = fit(circle), fit(circle, second_shift=True)
    assert max(losses[-1], other[-1]) < 0.01
    assert written_by(once, 1, 6) == [1, 2, 3, 4, 5, 6]
    assert written_by(twice, 1, 6) == [1, 3, 5, 7, 9, 1]


def test_an_end_that_is_masked_with_the_padding_is_never_written():
    countdowns = [[*range(n, 0, -1), END] for n in (5, 9, 3, 7, 2, 9, 4, 6)]
    ours = supervised(countdowns)
    masked = ours | {"labels": ours["labels"].masked_fill(ours["labels"] == END, IGNORE_INDEX)}
    assert written_by(fit(ours)[0], 9) == [*range(9, 0, -1), END]
    model, losses = fit(masked)
    assert losses[-1] < 0.05
    assert all(written_by(model, start)[-1] != END for start in range(1, 10))


def test_padding_that_counts_flatters_the_loss_and_not_the_model():
    rng = np.random.default_rng(0)
    noise = [rng.integers(1, 10, size=rng.integers(2, 21)).tolist() for _ in range(200)]
    honest = supervised(noise)
    width = honest["input_ids"].shape[1]
    rows = [torch.tensor([*text, *[PAD] * (width + 1 - len(text))]) for text in noise]
    expected = fit(honest)[1][-1]  # nobody can foresee the digits: about ln 9
    model, losses = fit(shift(torch.stack(rows)))
    logits = model(honest["input_ids"])
    true = F.cross_entropy(logits.flatten(0, 1), honest["labels"].flatten()).item()
    assert losses[-1] < 0.7 * expected < expected < true


def test_an_answer_that_begins_with_a_line_break_hides_where_the_prompt_ends():
    text = "user\n\n\nTwo and two?\n\n\nassistant\n\n\nFour.\n\n\nA fruit?\n\n\nAn apple."
    special = [*SPECIAL_TOKENS, *CHAT_TOKENS]
    tokenizer = BPETokenizer.train([text] * 2, vocab_size=280, special_tokens=special)
    question = {"role": "user", "content": "Two and two?"}
    prompt = tokenizer.encode_chat([question], add_generation_prompt=True)
    for answer, is_prefix in (("Four.", True), ("\n\nFour.", False)):
        whole = tokenizer.encode_chat([question, {"role": "assistant", "content": answer}])
        assert (whole[: len(prompt)] == prompt) == is_prefix

"""Data modules that lose nothing, and a task whose answer is known."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.text import token_file as token_file_module
from llm_course.text.batches import IGNORE_INDEX, PackedDataset, SupervisedDataset
from llm_course.text.corpus import load_corpus, split_documents
from llm_course.text.data import (
    BaseDataModule,
    SyntheticDataModule,
    SyntheticTask,
    TextDataModule,
    check_same_data,
)
from llm_course.text.token_file import TokenFile
from llm_course.text.tokenization import BPETokenizer

pytestmark = pytest.mark.filterwarnings("ignore:the text supports")


def documents_in(tokens: TokenFile, tokenizer: BPETokenizer) -> list[str]:
    """The documents again, from the ids alone."""
    ends = np.flatnonzero(tokens[:] == tokens.header["separator_id"])
    assert not len(tokens) or ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(tokens[:], ends + 1)[:-1]]


# ---- loaders


class Numbers(BaseDataModule):
    """Items 0, 1, 2, ... as rows of one token and the next."""

    def __init__(self, num_items: int, batch_size: int):
        self.batch_size = batch_size
        self.train_dataset = self.val_dataset = PackedDataset(np.arange(num_items + 1), 1)


def items(loader) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() for batch in loader]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_items", [1, 2, 5, 12, 13])
def test_validation_loses_and_repeats_nothing(num_items, world_size):
    module = Numbers(num_items, batch_size=3)
    ranks = [
        items(module.val_dataloader(rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    # each rank takes as many steps, or one would wait for ever
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch) <= 3 for batches in ranks for batch in batches)
    assert sum((batch for step in zip(*ranks, strict=True) for batch in step), []) == list(
        range(num_items)
    )
    assert ranks == [
        items(module.val_dataloader(rank=rank, world_size=world_size)) for rank in range(world_size)
    ]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 12)
)
def test_training_order_is_a_function_of_epoch_and_position(
    num_items, batch_size, world_size, epoch, position
):
    module = Numbers(num_items, batch_size)
    ranks = [
        items(module.train_dataloader(epoch=epoch, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    joint = [sum(step, []) for step in zip(*ranks, strict=True)]
    assert joint == items(Numbers(num_items, batch_size * world_size).train_dataloader(epoch=epoch))
    assert sorted(sum(joint, [])) == list(range(num_items))
    for rank, batches in enumerate(ranks):
        rest = module.train_dataloader(
            epoch=epoch, position=position, rank=rank, world_size=world_size
        )
        assert items(rest) == batches[position:] and len(rest) == len(batches[position:])


def test_each_epoch_and_each_seed_has_its_own_order():
    module = Numbers(40, 4)
    other = Numbers(40, 4)
    other.seed = 1
    orders = [items(m.train_dataloader(epoch=epoch)) for m in (module, other) for epoch in range(3)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_an_empty_share_is_a_batch_of_no_rows(tmp_path):
    packed = next(iter(Numbers(1, 1).val_dataloader(rank=1, world_size=2)))
    assert packed["input_ids"].shape == packed["labels"].shape == (0, 1)
    module = SyntheticDataModule(num_examples=10, val_fraction=0.1)
    module.setup()
    assert next(iter(module.val_dataloader(rank=1, world_size=2)))["labels"].shape[0] == 0


def test_what_differs_is_named():
    check_same_data({}, {"seed": 1})
    check_same_data({"seed": 1}, {"seed": 1, "new": 2})
    with pytest.raises(
        ValueError, match="seed was 1, is 2; batch_size was 3, is None.*new run_dir"
    ):
        check_same_data({"seed": 1, "batch_size": 3, "same": 0}, {"seed": 2, "same": 0})


# ---- synthetic tasks


@pytest.mark.parametrize("task", SyntheticDataModule.TASKS)
def test_the_answers_are_right_and_after_the_separator(task):
    module = SyntheticDataModule(task, num_symbols=7, length=4, num_examples=40, batch_size=4)
    module.setup()
    for prompt, answer in module.train_dataset.examples + module.val_dataset.examples:
        assert prompt[-1] == 1 and 1 not in prompt[:-1] and module.vocab_size == 9
        digits = [symbol - 2 for symbol in prompt[:-1]]
        assert all(0 <= digit < 7 for digit in digits)
        expected = {"copy": digits, "reverse": digits[::-1], "modular_addition": [sum(digits) % 7]}[
            task
        ]
        assert [symbol - 2 for symbol in answer] == expected
    batch = next(iter(module.train_dataloader(epoch=0)))
    first = (batch["input_ids"] == 1).int().argmax(dim=1)
    targets = batch["labels"] != IGNORE_INDEX
    # the separator is the first place that must answer
    assert torch.equal(targets.int().argmax(dim=1), first)
    assert int(targets.sum()) == 4 * (1 if task == "modular_addition" else 4)


@pytest.mark.parametrize(
    "arguments, sizes",
    [
        (dict(length=100, num_examples=200), (180, 20)),
        (dict(length=2, num_symbols=3), (8, 1)),
        (
            dict(task="modular_addition", num_symbols=31, num_examples=10**9, val_fraction=0.5),
            (481, 480),
        ),
    ],
)
def test_no_prompt_occurs_twice(arguments, sizes):
    modules = [SyntheticDataModule(**arguments) for _ in range(2)]
    for module in modules:
        module.setup()
    assert (len(modules[0].train_dataset), len(modules[0].val_dataset)) == sizes
    prompts = [
        tuple(prompt)
        for d in (modules[0].train_dataset, modules[0].val_dataset)
        for prompt, _ in d.examples
    ]
    assert len(set(prompts)) == len(prompts) == modules[0].num_examples
    assert modules[0].train_dataset.examples == modules[1].train_dataset.examples
    other = SyntheticDataModule(**arguments | {"seed": 1})
    other.setup()
    assert other.train_dataset.examples != modules[0].train_dataset.examples
    assert modules[0].fingerprint() == modules[1].fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(task="sort"),
            "task='sort' is unknown: choose one of 'copy', 'reverse'",
        ),
        (dict(num_symbols=1), "num_symbols=1 must be a whole number of at least 2"),
        (dict(length=0), "length=0 must be a whole number of at least 1"),
        (dict(num_examples=1), "num_examples=1 must be a whole number of at least 2"),
        (dict(batch_size=0), "batch_size=0 must be a whole number of at least 1"),
        (dict(num_workers=-1), "num_workers=-1"),
        (dict(seed=-1), "seed=-1 must be a whole number of at least 0"),
        (dict(val_fraction=0.0), "val_fraction=0.0 must be above 0 and below 1"),
        (dict(val_fraction=1.0), "val_fraction=1.0 must be above 0 and below 1"),
        (dict(val_fraction=-0.5), "val_fraction=-0.5 must be above 0 and below 1"),
        (dict(num_symbols=2, length=2), "of 4 examples leaves one"),
        (dict(val_fraction=None), "val_fraction=None must be above 0 and below 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SyntheticDataModule(**arguments)


def learn(module: BaseDataModule, steps: int) -> tuple[float, float]:
    """Train a small decoder; the share of validation answers that are right in every place, and the
    last mean loss.
    """
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=module.vocab_size,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        max_position_embeddings=16,
    )
    model = DecoderModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    epoch = 0
    while len(losses) < steps:
        for batch in module.train_dataloader(epoch=epoch):
            loss = F.cross_entropy(
                model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses) == steps:
                break
        epoch += 1
    right = []
    with torch.no_grad():
        for batch in module.val_dataloader():
            guess = model(batch["input_ids"]).logits.argmax(-1)
            right.append(
                ((guess == batch["labels"]) | (batch["labels"] == IGNORE_INDEX)).all(dim=1)
            )
    return torch.cat(right).float().mean().item(), float(np.mean(losses[-20:]))


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_decoder_learns_to_copy_and_cannot_learn_what_has_no_rule(one_thread):
    module = SyntheticDataModule("copy", length=4, num_examples=2000, batch_size=32)
    module.setup()
    accuracy, loss = learn(module, steps=250)
    assert accuracy > 0.95 and loss < 0.1

    # the same, but each prompt has the answer of another
    for dataset in (module.train_dataset, module.val_dataset):
        prompts, answers = zip(*dataset.examples, strict=True)
        rolled = list(zip(prompts, [*answers[1:], answers[0]], strict=True))
        dataset.examples = SupervisedDataset(rolled, pad_token_id=0, max_length=8).examples
    accuracy, loss = learn(module, steps=100)
    # the floor: an even guess among ten symbols
    assert accuracy < 0.05 and abs(loss - math.log(10)) < 0.2


# ---- text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(20):
        words = [f"word{(number * 7 + i * i) % 50}" for i in range(60)]
        Path("texts", f"{number:02}.txt").write_text(
            f"Text {number}. " + " ".join(words), encoding="utf-8"
        )
    return tmp_path


def text_module(folder: str | Path = "run", **arguments) -> TextDataModule:
    defaults = dict(
        files=["texts/*.txt"], vocab_size=300, sequence_length=16, batch_size=4, val_fraction=0.2
    )
    return TextDataModule(folder, **defaults | arguments)


def prepared(folder: str | Path = "run", **arguments) -> TextDataModule:
    module = text_module(folder, **arguments)
    module.prepare_data()
    module.setup()
    return module


def contents(folder: str = "run") -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def same_batches(one, two) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(one, two, strict=True)
    )


def test_text_becomes_the_batches_of_the_pieces(folder):
    module = prepared()
    train, val = split_documents(
        load_corpus(files=["texts/*.txt"]).documents, val_fraction=0.2, seed=0
    )
    assert documents_in(module.train_dataset.tokens, module.tokenizer) == train
    assert documents_in(module.val_dataset.tokens, module.tokenizer) == val
    assert (
        module.tokenizer == BPETokenizer.train(train, vocab_size=300) and module.vocab_size == 300
    )
    assert module.info["documents"] == {"train": len(train), "val": len(val)}
    assert module.bytes_per_token == len("".join(val).encode()) / len(module.val_dataset.tokens)
    assert set(contents()) == {
        "tokenizer.json",
        "data/train.tokens",
        "data/val.tokens",
        "data/info.json",
    }
    for batch in module.val_dataloader():
        assert batch.keys() == {"input_ids", "labels"} and batch["input_ids"].shape[1] == 16
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    joined = torch.cat([batch["input_ids"] for batch in module.val_dataloader()]).flatten()
    assert joined.tolist() == module.val_dataset.tokens[: len(joined)].tolist()


def test_prepared_files_are_used_again(folder, monkeypatch):
    prepared()
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    monkeypatch.setattr(token_file_module, "encode_documents", None)  # would fail
    Path("texts").rename("moved")  # the text counts, not its name
    prepared(files=["moved/*.txt"], sequence_length=8, batch_size=2, separate_documents=True)
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before


@pytest.mark.parametrize(
    "change",
    [dict(vocab_size=290), dict(val_fraction=0.3), dict(seed=1), dict(clean=["length"]), "text"],
)
def test_other_text_or_settings_are_prepared_anew(folder, change):
    before = prepared(clean=[]).fingerprint()
    if change == "text":
        Path("texts", "07.txt").write_text(
            "A changed text, long enough to count, of which there is a line."
        )
        change = {}
    if "clean" in change:
        Path("texts", "99.txt").write_text("Short.")
        prepared()
        change["clean"] = ["length"]
    anew = prepared(**change)
    fresh = prepared("fresh", **change)
    assert contents() == contents("fresh") and same_batches(
        anew.val_dataloader(), fresh.val_dataloader()
    )
    assert ("clean" in change) or anew.fingerprint() != before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "data/train.tokens", "data/val.tokens", "data/info.json"]
)
@pytest.mark.parametrize("damage", ["lost", "cut", "empty", "flipped"])
def test_a_damaged_file_is_made_again(folder, name, damage):
    prepared()
    before = contents()
    path = Path("run", name)
    raw = bytearray(path.read_bytes())
    if damage == "lost":
        path.unlink()
    elif damage == "flipped" and name != "data/info.json":
        raw[-len(raw) // 3] ^= 1
        path.write_bytes(raw)
    else:
        path.write_bytes(raw[: len(raw) // 2 if damage == "cut" else 0])
    prepared()
    assert contents() == before


def test_text_that_became_too_short_leaves_the_prepared_files(folder):
    prepared()
    before = contents()
    for path in Path("texts").iterdir():
        path.write_text("x")
    for message, arguments in (
        ("the train split is too short: .* sequence_length=500", dict(sequence_length=500)),
        ("the val split is too short", dict(val_fraction=0.1)),
    ):
        with pytest.raises(ValueError, match=message):
            text_module(**arguments).prepare_data()
        assert contents() == before and not Path("run", ".data").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("x", "too few for val_fraction=0.2"),
        ("one two three", "too short"),
        ("", "is empty"),
        (" \n", "is empty"),
    ],
)
def test_too_little_text_is_refused_and_leaves_no_file(folder, text, message):
    Path("small.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        text_module(files=["small.txt"]).prepare_data()
    assert not Path("run").exists() or not contents()


def test_a_sequence_longer_than_prepared_data_is_refused_at_setup(folder):
    prepared()
    module = text_module(sequence_length=10_000)
    module.prepare_data()
    with pytest.raises(ValueError, match="the train split is too short"):
        module.setup()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(files="texts/00.txt"), r"files='texts/00.txt' must be a list: \['texts/00.txt'\]"),
        (dict(datasets="imdb"), "datasets='imdb' must be a list"),
        (dict(clean="nfc"), "clean='nfc' must be a list"),
        (dict(sequence_length=0), "sequence_length=0 must be a whole number of at least 1"),
        (dict(batch_size=0), "batch_size=0 must be a whole number of at least 1"),
        (dict(num_proc=0), "num_proc=0 must be a whole number of at least 1"),
        (dict(num_workers=-1), "num_workers=-1 must be a whole number of at least 0"),
        (dict(clean=["nfk"]), "do you mean 'nfc'"),
        (dict(val_fraction=1.0), "val_fraction=1.0 must be above 0 and below 1"),
        (dict(vocab_size=100), "vocab_size=100 "),
        (dict(files=["none/*.txt"]), "no file matches"),
    ],
)
def test_bad_settings_are_refused_and_write_nothing(folder, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        text_module(**arguments).prepare_data()
    assert not Path("run").exists()


def test_setup_without_prepare_says_so(folder):
    with pytest.raises(FileNotFoundError, match=r"call prepare_data\(\) first"):
        text_module().setup()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seed=1), "seed was 0, is 1"),
        (dict(val_fraction=0.3), "val_fraction was 0.2, is 0.3"),
        (dict(vocab_size=290), "vocab_size_asked was 300, is 290"),
        (dict(clean=["length"]), "corpus_sha256 was"),
        (dict(batch_size=2), "batch_size was 4, is 2"),
        (dict(sequence_length=8), "sequence_length was 16, is 8"),
        (dict(separate_documents=True), "separate_documents was False, is True"),
        (dict(tokenizer="other"), "tokenizer_sha256 was 0000"),
    ],
)
@pytest.mark.parametrize("lost", [False, True])
def test_a_resume_on_other_data_is_refused_before_anything_is_written(
    folder, change, message, lost
):
    Path("texts", "99.txt").write_text("Short.")
    expected = json.loads(json.dumps(prepared().fingerprint()))  # as a checkpoint keeps it
    text_module().prepare_data(expected=expected)
    if change == dict(tokenizer="other"):
        change = {}
        expected["tokenizer_sha256"] = "0" * 64
        lost = True
    if lost:
        Path("run", "data", "info.json").unlink()
    before = contents()
    with pytest.raises(ValueError, match=message):
        text_module(**change).prepare_data(expected=expected)
    assert contents() == before and not Path("run", ".data").exists()


@pytest.mark.parametrize("step", range(4))
def test_killed_between_two_steps_the_data_is_made_again(folder, monkeypatch, step):
    """tokenizer.json, train.tokens, val.tokens and info.json take their places one by one."""
    prepared()
    Path("texts", "07.txt").write_text("A changed text, long enough to count.")
    real = Path.replace
    moved = []

    def replace(self, target):
        if ".data" not in str(target):
            if len(moved) == step:
                raise KeyboardInterrupt
            moved.append(target)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        text_module().prepare_data()
    assert not list(Path("run").glob(".data-*"))
    with pytest.raises(FileNotFoundError, match="call prepare_data"):
        text_module().setup()
    monkeypatch.setattr(Path, "replace", real)
    prepared()
    prepared("fresh")
    assert contents() == contents("fresh")


def test_the_tokenizer_knows_the_training_split_only(folder):
    Path("texts", "zz.txt").write_text("zzqq " * 55)
    for seed in range(20):  # a split that holds it out
        documents = load_corpus(files=["texts/*.txt"]).documents
        if "zzqq " * 55 in split_documents(documents, val_fraction=0.2, seed=seed)[1]:
            break
    tokenizer = prepared(seed=seed, vocab_size=400).tokenizer
    assert len(tokenizer.encode(" zzqq")) == 5 and len(tokenizer.encode(" word1")) < 5
    assert len(BPETokenizer.train(documents, vocab_size=400).encode(" zzqq")) == 1


def test_documents_are_numbered_where_attention_is_to_stay_inside_them(folder):
    module = prepared(separate_documents=True)
    for batch in module.train_dataloader(epoch=0):
        ids = batch["input_ids"]
        numbers = batch["document_ids"]
        ends = ids == module.tokenizer.eos_token_id
        assert (
            torch.equal(numbers[:, 1:] - numbers[:, :-1], ends[:, :-1].long())
            and not numbers[:, 0].any()
        )
    without = [
        {name: batch[name] for name in ("input_ids", "labels")} for batch in module.val_dataloader()
    ]
    assert same_batches(without, prepared().val_dataloader())


def test_worker_processes_change_nothing(folder):
    none = prepared()
    two = prepared(num_workers=2)
    state = torch.random.get_rng_state()
    assert same_batches(
        none.train_dataloader(epoch=3, position=2), two.train_dataloader(epoch=3, position=2)
    )
    assert same_batches(none.val_dataloader(), two.val_dataloader())
    assert torch.equal(torch.random.get_rng_state(), state)  # dropout does not notice the loaders


def test_cleaning_comes_before_the_split_and_is_reported(folder):
    Path("texts", "zz.txt").write_text(Path("texts", "00.txt").read_text())
    module = prepared(clean=["exact_duplicates"])
    assert (
        sum(module.info["documents"].values()) == 20 and module.info["cleaning"][0]["dropped"] == 1
    )


@pytest.mark.parametrize(
    "damage", ["swapped", "copied", "info is a list", "info without tokens", "header without hash"]
)
def test_prepared_files_that_do_not_belong_together_are_made_anew(folder, damage):
    data = text_module()
    data.prepare_data()
    train, val, info = (
        Path("run", "data", name) for name in ("train.tokens", "val.tokens", "info.json")
    )
    before = [path.read_bytes() for path in (train, val, info)]
    if damage == "swapped":
        train.write_bytes(before[1]), val.write_bytes(before[0])
    elif damage == "copied":
        val.write_bytes(before[0])
    elif damage == "header without hash":
        val.write_bytes(before[1].replace(b'"sha256"', b'"sha257"'))
    else:
        info.write_text(
            "[]" if "list" in damage else json.dumps(json.loads(before[2]) | {"tokens_sha256": {}})
        )
    text_module().prepare_data()
    assert [path.read_bytes() for path in (train, val, info)] == before


def test_another_tokenizer_is_refused_also_where_the_data_is_prepared(folder):
    data = text_module()
    data.prepare_data()
    data.setup()
    data.prepare_data(expected=data.fingerprint())
    with pytest.raises(ValueError, match="tokenizer_sha256 was zzz"):
        data.prepare_data(expected=data.fingerprint() | {"tokenizer_sha256": "zzz"})


def test_validation_for_a_rank_that_is_not_there():
    data = SyntheticDataModule("copy", num_examples=20)
    data.setup()
    for rank, world_size in ((-1, 2), (2, 2), (0.5, 2), (0, 0)):
        rule = "must lie in 0.." if world_size else "world_size=0 must be"
        with pytest.raises(ValueError, match=rule):
            data.val_dataloader(rank=rank, world_size=world_size)


def test_a_decoder_that_gets_document_ids_reads_each_document_alone():
    torch.manual_seed(0)
    model = DecoderModel(
        ModelConfig(vocab_size=20, hidden_size=32, num_layers=2, num_heads=2)
    ).eval()
    first = torch.randint(20, (1, 5))
    second = torch.randint(20, (1, 7))
    row = torch.cat((first, second), dim=1)
    document_ids = torch.tensor([[0] * 5 + [1] * 7])
    apart = torch.cat([model(part).logits for part in (first, second)], dim=1)
    torch.testing.assert_close(
        model(row, document_ids=document_ids).logits, apart, rtol=1e-4, atol=1e-5
    )
    # without them the second reads the first
    assert (model(row).logits - apart)[:, 5:].abs().max() > 0.01


def test_more_prompts_than_there_are_are_refused():
    """It would draw forever."""
    rule = SyntheticTask("copy", 2, 2)
    assert len(set(rule.draw_prompts(4, seed=0))) == rule.num_prompts == 4
    with pytest.raises(ValueError, match="count=5 is more than the 4 prompts"):
        rule.draw_prompts(5, seed=0)


def test_settings_are_refused_before_the_text_is_read(tmp_path):
    for wrong, message in (
        (dict(vocab_size=100), "vocab_size=100 is too small"),
        (dict(val_fraction=1.5), "val_fraction=1.5 must be above 0 and below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            TextDataModule(tmp_path, **wrong)
    data = TextDataModule(tmp_path)
    for ask in (data.fingerprint, lambda: data.bytes_per_token):
        with pytest.raises(ValueError, match="call setup.. first"):
            ask()

"""Byte pair encoding beside the Rust library, and the loader beside what the model eats."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from benchmarks.measure import Row, alternate
from benchmarks.models import SMALL, ours
from llm_course.text.batches import PackedDataset, ResumableBatchSampler, batch_loader
from llm_course.text.bpe import BYTE_CHARACTERS, count_words
from llm_course.text.corpus import load_corpus
from llm_course.text.tokenization import BPETokenizer, ByteBPETokenizer

VOCAB = 4096
NAIVE_MERGES = 40


def recount(text: str, merges: int) -> list[tuple[int, int]]:
    """Byte pair encoding as the paper writes it: count all pairs, merge the best, and again."""
    symbol = {byte: number for number, byte in enumerate(BYTE_CHARACTERS)}
    words = {
        tuple(symbol[byte] for byte in word): count for word, count in count_words([text]).items()
    }
    made: list[tuple[int, int]] = []
    while len(made) < merges:
        pairs: Counter[tuple[int, int]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        most = max(pairs.values())
        best = min(pair for pair, count in pairs.items() if count == most)
        new = 256 + len(made)
        made.append(best)
        merged: dict[tuple[int, ...], int] = {}
        for word, count in words.items():
            symbols = []
            index = 0
            while index < len(word):
                found = word[index : index + 2] == best
                symbols.append(new if found else word[index])
                index += 1 + found
            merged[tuple(symbols)] = count
        words = merged
    return made


def rows(*, full: bool) -> Iterator[Row]:
    text = "\n\n".join(load_corpus().documents)[:2_000_000]
    rounds = 5 if full else 3
    size = f"{len(text.encode()) / 1e6:.1f} MB"
    mine, theirs = (cls.train([text], vocab_size=VOCAB) for cls in (ByteBPETokenizer, BPETokenizer))
    assert mine.to_json() == theirs.to_json() and mine.encode(text) == theirs.encode(text)
    trained = alternate(
        {
            "ours": lambda: ByteBPETokenizer.train([text], vocab_size=VOCAB),
            "theirs": lambda: BPETokenizer.train([text], vocab_size=VOCAB),
        },
        rounds=rounds,
    )
    yield Row(
        f"BPE from scratch, training on {size}, {VOCAB} entries",
        "tokenizers (Rust)",
        **trained,
        unit="s",
        goals=(1.0, 1.0),
    )
    start = time.perf_counter()
    assert recount(text, NAIVE_MERGES) == mine.merges[:NAIVE_MERGES]
    # every later merge recounts as much, or a little less as words grow shorter
    naive = (time.perf_counter() - start) / NAIVE_MERGES * len(mine.merges)
    note = f"{NAIVE_MERGES} merges measured, the others at their rate"
    yield Row(
        f"BPE from scratch, training on {size}, {VOCAB} entries",
        "naive recount",
        trained["ours"],
        naive,
        "s",
        (400, 400),
        note=note,
    )
    blank = mine.to_json()
    encoded = alternate(
        {
            "ours": lambda: ByteBPETokenizer.from_json(blank).encode(text),
            "theirs": lambda: theirs.encode(text),
        },
        rounds=rounds,
    )
    yield Row(
        f"BPE from scratch, encoding one document of {size}",
        "tokenizers' encode",
        **encoded,
        unit="s",
        goals=(2.0, 2.0),
    )
    yield loader_row()


def loader_row() -> Row:
    """Seconds that a batch takes to load, and to learn from."""
    B = 16
    T = 256
    batches = 200
    model = ours(SMALL)
    with tempfile.NamedTemporaryFile() as file:
        tokens = np.memmap(file.name, dtype=np.uint16, mode="w+", shape=(2_000_000,))
        tokens[:] = np.random.default_rng(0).integers(SMALL.vocab_size, size=len(tokens))
        dataset = PackedDataset(tokens, T)
        loader = batch_loader(dataset, ResumableBatchSampler(len(dataset), B, seed=0, epoch=0))
        start = time.perf_counter()
        for count, batch in enumerate(loader, start=1):  # noqa: B007
            if count == batches:
                break
        loading = (time.perf_counter() - start) / batches

    def step() -> None:
        out = model(batch["input_ids"], labels=batch["labels"])
        (out.loss_sum / out.num_targets).backward()
        model.zero_grad()

    step()
    start = time.perf_counter()
    step()
    eating = 1e3 * (time.perf_counter() - start)
    return Row(
        "data loader, a batch of 16 x 256",
        "forward and backward of it",
        1e3 * loading,
        eating,
        goals=(50, 50),
    )

"""Token files that are whole or refused, and documents that come back from them."""

import itertools
import json
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_course.files import replacing
from llm_course.text.batches import PackedDataset
from llm_course.text.token_file import TokenFile
from llm_course.text.tokenization import BPETokenizer, SimpleCharacterTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:the text supports")
DOCUMENTS = [
    "The cat sat on the mat. " * 5,
    "Straße, naïve, 深層 \N{CAT FACE}\n\n",
    "",
    "<|eos|> is text, and so is <|pad|>.",
]


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return BPETokenizer.train(
        ["the cat sat on the mat, and the rat sat on the cat. "] * 3, vocab_size=280
    )


@pytest.fixture(scope="module")
def other() -> BPETokenizer:
    return BPETokenizer.train(["a quick brown fox jumps over a lazy dog. "] * 3, vocab_size=280)


def wide(vocab_size: int) -> SimpleCharacterTokenizer:
    """A tokenizer with as many entries as one likes, the last of them for the character of the
    highest code point.
    """
    code_points = itertools.chain(range(0xD800), range(0xE000, 0x110000))
    tokenizer = SimpleCharacterTokenizer(map(chr, itertools.islice(code_points, vocab_size - 2)))
    tokenizer.eos_token_id = 1
    return tokenizer


def documents_in(tokens: TokenFile, tokenizer: BPETokenizer) -> list[str]:
    """The documents again, from the ids alone."""
    ends = np.flatnonzero(tokens[:] == tokens.header["separator_id"])
    assert not len(tokens) or ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(tokens[:], ends + 1)[:-1]]


# ---- files written whole


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_replacing_leaves_the_old_file_or_the_new(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as file:
        file.write(b"half of the n")
        raise error
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and path.read_bytes() == b"old"
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_dies_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    if (child := os.fork()) == 0:
        with replacing(path) as file:
            file.write(b"half")
            file.flush()
            os._exit(9)  # nothing is tidied up, as with a loss of power
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
    with replacing(path) as file:  # what the dead process left is no hindrance
        file.write(b"new")
    assert path.read_bytes() == b"new"


# ---- token files


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(DOCUMENTS),
        min_size=1,
        max_size=8,
    )
)
def test_any_documents_come_back(tokenizer, documents):
    with tempfile.TemporaryDirectory() as folder:
        tokens = TokenFile.write(Path(folder, "a.tokens"), documents, tokenizer)
        assert documents_in(tokens, tokenizer) == documents
        expected = [
            i
            for d in documents
            for i in [*tokenizer.encode(d, allow_special=False), tokenizer.eos_token_id]
        ]
        assert (
            tokens[:].tolist() == expected and len(tokens) == len(expected) and tokens.is_intact()
        )
        assert tokens.header["num_bytes"] == len("".join(documents).encode())
        del tokens


def test_the_header_says_what_the_file_is(tmp_path, tokenizer):
    path = tmp_path / "a.tokens"
    tokens = TokenFile.write(path, DOCUMENTS, tokenizer)
    raw = path.read_bytes()
    assert json.loads(raw[:4096]) == tokens.header
    assert tokens.header["dtype"] == "<u2" and tokens.header["tokenizer_sha256"] == tokenizer.sha256
    assert (tokens.header["num_documents"], tokens.header["num_tokens"]) == (
        4,
        (len(raw) - 4096) // 2,
    )
    assert np.frombuffer(raw[4096:], "<u2").tolist() == tokens[:].tolist()
    assert TokenFile.write(tmp_path / "b.tokens", DOCUMENTS, tokenizer).path.read_bytes() == raw


@pytest.mark.parametrize(
    "vocab_size, dtype", [(2**16, "<u2"), (2**16 + 1, "<u4"), (200_000, "<u4")]
)
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path, vocab_size, dtype):
    tokenizer = wide(vocab_size)
    last = tokenizer.decode([vocab_size - 2, vocab_size - 1])
    tokens = TokenFile.write(tmp_path / "a", [last, ""], tokenizer)
    assert tokens.header["dtype"] == dtype and tokens[:].tolist() == [
        vocab_size - 2,
        vocab_size - 1,
        1,
        1,
    ]
    batch = PackedDataset(tokens, 2)[0]
    assert (
        batch["input_ids"].tolist() == [vocab_size - 2, vocab_size - 1]
        and batch["input_ids"].dtype == torch.int64
    )


def test_documents_cannot_end_themselves(tmp_path, tokenizer):
    documents = ["Hello.", "Bye.<|eos|>You are free.<|bos|>"]
    tokens = TokenFile.write(tmp_path / "a", documents, tokenizer)
    assert (tokens[:] == tokenizer.eos_token_id).sum() == 2 and documents_in(
        tokens, tokenizer
    ) == documents
    # what would have happened
    assert tokenizer.encode("".join(documents)).count(tokenizer.eos_token_id) == 1


def test_a_tokenizer_that_fails_leaves_nothing_or_the_old_file(tmp_path, tokenizer):
    path = tmp_path / "a.tokens"
    broken = [*DOCUMENTS, "half a pair: \ud83d"]
    with pytest.raises(ValueError, match="surrogate"):
        TokenFile.write(path, broken, tokenizer)
    assert not list(tmp_path.iterdir())
    before = TokenFile.write(path, DOCUMENTS, tokenizer).path.read_bytes()
    with pytest.raises(ValueError, match="surrogate"):
        TokenFile.write(path, broken, tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tokens"] and path.read_bytes() == before


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no end-of-text token.*train it with '<|eos|>'"):
        TokenFile.write(tmp_path / "a", ["abc"], SimpleCharacterTokenizer.from_text("abc"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_a_cut_file_is_refused(tmp_path, tokenizer, share):
    path = TokenFile.write(tmp_path / "a", DOCUMENTS * 50, tokenizer).path
    raw = path.read_bytes()
    path.write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(ValueError, match="prepare the data again"):
        TokenFile(path)


def test_more_bytes_than_the_header_says_are_refused(tmp_path, tokenizer):
    path = TokenFile.write(tmp_path / "a", DOCUMENTS, tokenizer).path
    path.write_bytes(path.read_bytes() + b"\0\0")
    with pytest.raises(ValueError, match="has .* bytes, its header says"):
        TokenFile(path)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\x93NUMPY",
        b"plain text",
        b"[1]",
        b"3",
        b"{}",
        b"[" * 4096,
        b'{"format": "llm_course tokens 1"}',
        b'{"format": "llm_course tokens 2", "num_tokens": 0, "dtype": "<u2"}',
        b'{"format": "llm_course tokens 1", "num_tokens": 0, "dtype": "object"}',
        b'{"format": "llm_course tokens 1", "num_tokens": 0, "dtype": ["<u2"]}',
    ],
)
def test_another_kind_of_file_is_refused(tmp_path, start):
    (tmp_path / "a").write_bytes(start.ljust(4096))
    with pytest.raises(ValueError, match="is not a token file"):
        TokenFile(tmp_path / "a")


def test_a_flipped_bit_is_found_by_the_checksum_only(tmp_path, tokenizer):
    path = TokenFile.write(tmp_path / "a", DOCUMENTS, tokenizer).path
    raw = bytearray(path.read_bytes())
    for place in (4096, len(raw) - 1):
        flipped = raw.copy()
        flipped[place] ^= 1
        path.write_bytes(flipped)
        assert not TokenFile(path, tokenizer).is_intact()
    path.write_bytes(raw)
    assert TokenFile(path, tokenizer).is_intact()


def test_the_file_of_another_tokenizer_is_refused(tmp_path, tokenizer, other):
    path = TokenFile.write(tmp_path / "a", DOCUMENTS, tokenizer).path
    assert (
        TokenFile(path, BPETokenizer.from_json(tokenizer.to_json()))[:].tolist()
        == TokenFile(path)[:].tolist()
    )
    with pytest.raises(ValueError, match=f"{tokenizer.sha256[:12]}, not {other.sha256[:12]}"):
        TokenFile(path, other)


def test_the_number_of_processes_changes_nothing(tmp_path, tokenizer):
    documents = [f"{number}: {DOCUMENTS[number % 4]}" for number in range(50)]
    one = TokenFile.write(tmp_path / "one", documents, tokenizer)
    two = TokenFile.write(tmp_path / "two", documents, tokenizer, num_proc=2)
    assert one.path.read_bytes() == two.path.read_bytes()


def test_a_pickled_token_file_is_its_path_and_opens_again(tmp_path, tokenizer):
    tokens = TokenFile.write(tmp_path / "a", DOCUMENTS * 100, tokenizer)
    state = pickle.dumps(tokens)
    assert len(state) < 500 < len(tokens) and pickle.loads(state)[:].tolist() == tokens[:].tolist()


@pytest.mark.parametrize("documents", [[], "one text", None])
def test_no_documents_write_no_file(tmp_path, tokenizer, documents):
    with pytest.raises(ValueError, match="documents"):
        TokenFile.write(tmp_path / "a", documents, tokenizer)
    with pytest.raises(ValueError, match="num_proc=0"):
        TokenFile.write(tmp_path / "a", ["x"], tokenizer, num_proc=0)
    assert not list(tmp_path.iterdir())

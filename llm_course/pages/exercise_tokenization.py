"""The visible checks of exercise 1, tokenization: each says what is wrong with an answer."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from llm_course.pages.checking import Answer, Answers, case, forbid, written
from llm_course.text import bpe as package
from llm_course.text.merging import PairIndex, merge_by_rank
from llm_course.text.tokenization import ByteBPETokenizer

Pair = tuple[int, int]

READY_MADE = (package.apply_merges, package.learn_merges, merge_by_rank, PairIndex.most_frequent)


def spell(merges: Iterable[Pair]) -> list[bytes]:
    """The bytes of every symbol: of the 256 bytes, then of what each merge makes."""
    spelled = [bytes([byte]) for byte in package.BYTE_CHARACTERS]
    for a, b in merges:
        spelled.append(spelled[a] + spelled[b])
    return spelled


# --------------------------------------------------------------------------------- task 1: by hand

FOUR_WORDS = {b"brr": 3, b"shh": 5, b"brrr": 2, b"aha": 5}


def three_merges() -> list[tuple[str, str]]:
    """The right merges of the four words."""
    learned = package.learn_merges(FOUR_WORDS, num_merges=3)
    parts = spell(learned)
    return [(parts[a].decode(), parts[b].decode()) for a, b in learned]


def check_merges(answers: Answers) -> None:
    """Task 1: the three merges, their order, and how often each pair occurred."""
    with case("Task 1, merges"):
        assert "merges" in answers, "type your merges into the cell above and run it"
        merges = answers["merges"]
        assert isinstance(merges, list | tuple) and len(merges) == 3, (
            "merges must be a list of three merges"
        )
        for number, merge_typed in enumerate(merges, 1):
            assert isinstance(merge_typed, list | tuple) and len(merge_typed) == 3, (
                f"merge {number} is {merge_typed!r}: type left part, right part and count, such as"
                " ('q', 'u', 12)"
            )
            assert isinstance(merge_typed[0], str) and isinstance(merge_typed[1], str), (
                f"merge {number} is {merge_typed!r}: its first two entries are text in quotes"
            )
            assert isinstance(merge_typed[2], int), (
                f"merge {number} is {merge_typed!r}: its count is a whole number, typed without"
                " quotes"
            )
        real = three_merges()
        typed = [tuple(merge_typed[:2]) for merge_typed in merges]
        _check_pairs(typed, real, merges[0][2])
        _check_counts(merges, real)


def _check_pairs(
    typed: Sequence[tuple[Any, ...]], real: Sequence[tuple[str, str]], first: int
) -> None:
    """The pairs of the merges; `first` is the count that was typed for the first one."""
    assert typed[0] == real[0], (
        f"the first merge is not {typed[0]}: multiply what stands in a word by the frequency of the"
        " word, and count the pair (r, r) twice in brrr"
    )
    assert first != 5, (
        "the first merge occurs more than 5 times: brrr holds (r, r) twice, since pairs overlap"
    )
    assert typed[1] not in {("b", "rr"), ("s", "h"), ("h", "h"), ("h", "a")}, (
        f"the second merge: {typed[1]} does occur 5 times, but so does a pair with smaller symbols;"
        " which first symbol is the smallest?"
    )
    assert typed[1] == real[1], (
        f"the second merge is not {typed[1]}: write the words anew after the first merge, and count"
        " again"
    )
    assert typed[2] != ("ah", "a"), (
        "the third merge: (ah, a) occurs 5 times, but 'ah' was made by a merge, and is larger than"
        " every letter"
    )
    assert typed[2] not in {("h", "h"), ("s", "h")}, (
        f"the third merge: {typed[2]} occurs 5 times, but so does a pair whose first letter comes"
        " earlier"
    )
    assert typed[2] != (
        "h",
        "a",
    ), "the third merge: aha is ah + a now, so its h no longer stands alone beside the last a"
    assert typed[2] == real[2], (
        f"the third merge is not {typed[2]}: write the words anew after the second merge, and count"
        " again"
    )


def _check_counts(merges: Sequence[Any], real: Sequence[tuple[str, str]]) -> None:
    """How often each of the right merges occurred."""
    words_now = {tuple(word.decode()): times for word, times in FOUR_WORDS.items()}
    for number, (left, right) in enumerate(real, 1):
        seen = sum(
            times
            for word, times in words_now.items()
            for pair_seen in pairwise(word)
            if pair_seen == (left, right)
        )
        assert merges[number - 1][2] == seen, (
            f"merge {number} is right, but {left} and {right} stand side by side {seen} times, not"
            f" {merges[number - 1][2]}"
        )
        # No part holds a line break, so a text of one part a line can be merged by `replace`.
        words_now = {
            tuple("\n".join(word).replace(f"{left}\n{right}", left + right).split("\n")): times
            for word, times in words_now.items()
        }


def check_tokens(answers: Answers) -> None:
    """Task 1: the tokens of a new word, and the id of the last merge."""
    with case("Task 1, tokens and last_id"):
        assert {"tokens", "last_id"} <= set(answers), (
            "type tokens and last_id into the cell above and run it"
        )
        tokens = answers["tokens"]
        last_id = answers["last_id"]
        assert isinstance(tokens, list | tuple) and all(
            isinstance(token, str) for token in tokens
        ), f"tokens is {tokens!r}: type a list of texts in quotes"
        assert "".join(tokens) == "brrrah", (
            f"your tokens spell {''.join(tokens)!r}, not 'brrrah': an encoder loses nothing"
        )
        learned = package.learn_merges(FOUR_WORDS, num_merges=3)
        parts = spell(learned)
        real = [
            parts[symbol].decode()
            for symbol in package.apply_merges(
                b"brrrah", {pair: 256 + rank for rank, pair in enumerate(learned)}
            )
        ]
        assert list(tokens) != [
            "b",
            "rr",
            "r",
            "ah",
        ], "after the first two merges there is b rr r ah; the third merge fits too"
        assert "rr" not in list(tokens)[2:] and list(tokens)[:2] != [
            "b",
            "r",
        ], "of three r in a row the two on the left are merged: words are read from left to right"
        assert "brrr" not in tokens and "rrr" not in tokens, (
            "only three merges were learned, and none of them makes 'rrr' or 'brrr'"
        )
        assert list(tokens) == real, (
            f"{list(tokens)} is not what the three merges make: start from letters, apply merge 1"
            " wherever it fits, then merge 2, then merge 3"
        )
        _check_last_id(last_id)


def _check_last_id(last_id: Any) -> None:
    """Special tokens, then bytes, then merges."""
    assert isinstance(last_id, int), f"last_id is {last_id!r}: type a whole number, without quotes"
    assert last_id not in {
        258,
        259,
    }, f"last_id = {last_id}: the special tokens take ids too, the first three"
    assert last_id != 262, (
        "last_id = 262: the first merge makes 3 + 256 = 259; how many steps further is the third?"
    )
    assert last_id == 3 + 256 + 2, (
        f"last_id = {last_id}: three special tokens, 256 bytes, then the merges; the first id is 0"
    )


# ---------------------------------------------------------------------- task 2: the pair that wins


def chosen(
    choose_pair: Answer,
    words: Mapping[Any, int],
    lengths: Sequence[int] = (1,) * 300,
    **limits: Any,
) -> Any:
    """What your function returns, checked to be a pair or None; `words` must stay as they were."""
    before = dict(words)
    with case(f"for {words}"), forbid(*READY_MADE):
        pair = choose_pair(words, list(lengths), **limits)
    assert words == before, "your function changed the words it was given"
    assert pair is None or (isinstance(pair, tuple) and list(map(type, pair)) == [int, int]), (
        f"for {words} your function returned {pair!r}, expected a tuple of two symbols, such as"
        " (3, 4), and nothing else, or None"
    )
    return pair


def _check_frequency(choose_pair: Answer) -> None:
    """The most frequent pair."""
    with case("Task 2, the most frequent pair"):
        found = chosen(choose_pair, {(1, 2): 2, (8, 1, 2): 2, (3, 4): 5})
        assert found is not None, (
            "there are pairs that occur often enough, but your function returned None: does"
            " it return its result?"
        )
        assert found != (1, 2), (
            "(3, 4) occurs in one word with the frequency 5, (1, 2) in two words with the"
            " frequency 2 each: add frequencies, not 1"
        )
        assert found == (3, 4), f"{found} was chosen, but (3, 4) is the most frequent pair"
        found = chosen(choose_pair, {(1, 2): 2, (8, 1, 2): 2, (3, 4): 3})
        assert found == (1, 2), (
            "(1, 2) occurs in two words with the frequency 2 each, 4 against 3 for (3, 4), but"
            f" {found} was chosen: add the frequencies of all words"
        )


def _check_overlaps(choose_pair: Answer) -> None:
    """Pairs that overlap."""
    with case("Task 2, pairs that overlap"):
        found = chosen(choose_pair, {(7, 7, 7, 7): 2, (1, 2): 5})
        assert found == (7, 7), (
            "(7, 7, 7, 7) holds three pairs, and occurs twice: that is 6 against 5 for (1, 2), but"
            f" {found} was chosen"
        )


def _check_ties(choose_pair: Answer) -> None:
    """Ties."""
    with case("Task 2, ties"):
        found = chosen(choose_pair, {(5, 6): 3, (2, 9): 3, (2, 4): 3})
        assert found != (5, 6), (
            "three pairs occur 3 times and (5, 6) was chosen: not the first one found nor"
            " the largest wins, but the one with the smaller symbols"
        )
        assert found == (2, 4), (
            f"(2, 9) and (2, 4) begin with the same symbol, and {found} was chosen: then the second"
            " symbol decides"
        )
        found = chosen(choose_pair, {(260, 1): 3, (9, 270): 3})
        assert found == (9, 270), (
            f"of (260, 1) and (9, 270) the first symbol decides, and 9 is smaller, but {found} was"
            " chosen"
        )


def _check_min_frequency(choose_pair: Answer) -> None:
    """Min_frequency."""
    with case("Task 2, min_frequency"):
        found = chosen(choose_pair, {(1, 2): 1})
        assert found is None, (
            f"the only pair occurs once, and min_frequency is 2, but your function returned {found}"
        )
        found = chosen(choose_pair, {(1, 2): 3}, min_frequency=3)
        assert found == (
            1,
            2,
        ), (
            "a pair that occurs exactly min_frequency times qualifies, but your function"
            " returned None"
        )
        found = chosen(choose_pair, {(1, 2): 2}, min_frequency=3)
        assert found is None, (
            f"the only pair occurs twice and min_frequency=3 was asked for, but {found} was"
            " chosen: 2 is only the default"
        )
        found = chosen(choose_pair, {(1, 2): 1, (8, 1, 2): 1})
        assert found == (1, 2), (
            "(1, 2) occurs in two words with the frequency 1 each, and so it occurs twice:"
            " min_frequency=2 is about the pair, not about the word"
        )
        assert chosen(choose_pair, {(4,): 9, (): 3}) is None, (
            "words of one symbol or none hold no pair: return None"
        )


def _check_max_bytes(choose_pair: Answer) -> None:
    """Max_bytes."""
    with case("Task 2, max_bytes"):
        spelled_lengths = [1] * 256 + [2, 3]
        words = {(256, 5): 9, (1, 2): 4, (257, 256): 12}
        found = chosen(choose_pair, words, spelled_lengths)
        assert found == (257, 256), f"without max_bytes there is no limit, but {found} was chosen"
        found = chosen(choose_pair, words, spelled_lengths, max_bytes=3)
        assert found is not None, (
            "the most frequent pair is too long, and your function gave up: look for the"
            " best of the pairs that are short enough"
        )
        assert found != (257, 256), (
            "(257, 256) joins 3 and 2 bytes, more than max_bytes=3: what counts is the"
            " length of both together"
        )
        assert found == (
            256,
            5,
        ), f"(256, 5) joins 2 and 1 bytes, which max_bytes=3 allows, but {found} was chosen"
        for (a, b), left_bytes, right_bytes in (
            ((256, 256), 2, 2),
            ((257, 5), 3, 1),
            ((5, 257), 1, 3),
        ):
            found = chosen(choose_pair, {(a, b): 9, (1, 2): 4}, spelled_lengths, max_bytes=3)
            assert found == (1, 2), (
                f"{(a, b)} joins {left_bytes} and {right_bytes} bytes, more than max_bytes=3, but"
                f" {found} was chosen: add lengths[a] and lengths[b]"
            )


def check_choose_pair(choose_pair: Answer, train_with: Answer) -> None:
    """Task 2: the choice of the pair, alone and in a whole training with the notebook's trainer."""
    _check_frequency(choose_pair)
    _check_overlaps(choose_pair)
    _check_ties(choose_pair)
    _check_min_frequency(choose_pair)
    _check_max_bytes(choose_pair)
    with case("Task 2, a whole training"):
        toy = package.count_words(["deep water, deep sea, a deep blue sea"])
        trained = train_with(choose_pair, toy, 10)
        expected = package.learn_merges(toy, num_merges=10)
        for number, (mine, right) in enumerate(zip(trained, expected, strict=False), 1):
            assert mine == right, (
                f"training with your function on {dict(toy)}: merge number {number} is {mine},"
                f" and the package merges {right}. Which of the two is more frequent there? In a"
                " tie only the symbols count, the first before the second"
            )
        assert len(trained) == len(expected), (
            f"training with your function learns {len(trained)} merges from {dict(toy)}, the"
            f" package {len(expected)}"
        )
        for limit in (None, 3):
            print(
                f"max_bytes={limit}:",
                *(
                    repr(token.decode())
                    for token in spell(train_with(choose_pair, toy, 10, max_bytes=limit))[256:]
                ),
            )


# -------------------------------------------------------------------------- task 3: encode by rank


def encoded_by_you(encode_word: Answer, word: bytes, merges: Sequence[Any]) -> list[bytes]:
    """What your function returns: a list of tokens that spell the word."""
    given_merges = list(merges)
    with case(f"for {word!r}"), forbid(*READY_MADE):
        found = encode_word(word, given_merges)
    assert given_merges == list(merges), "your function changed the list of merges"
    assert found is not None, (
        f"for {word!r} your function returned None: does it return its result?"
    )
    assert isinstance(found, list), (
        f"for {word!r} your function returned a {type(found).__name__}, expected a list"
    )
    assert all(isinstance(token, bytes) for token in found), (
        f"for {word!r} your function returned {found}, but tokens are bytes: word[i] is a"
        " number, and word[i : i + 1] one byte"
    )
    assert b"".join(found) == word, (
        f"your tokens {found} do not spell {word!r}: nothing may be lost or added, not even a space"
    )
    return found


def check_encode_word(encode_word: Answer) -> None:
    """Task 3: words for which the usual mistakes give something else."""
    with case("Task 3, encode_word"):
        found = encoded_by_you(encode_word, b"abc", [(b"b", b"c"), (b"a", b"b")])
        assert found != [b"ab", b"c"], (
            "'abc' with the merges (b, c), (a, b): you cut ab + c, but (b, c) was learned"
            " first. Is the longest token taken, or the leftmost pair, or the last merge?"
        )
        assert found == [
            b"a",
            b"bc",
        ], f"'abc' with the merges (b, c), (a, b) is a + bc, but you have {found}"
        toy = [(b"e", b"s"), (b"es", b"t"), (b"l", b"o"), (b"lo", b"w")]
        found = encoded_by_you(encode_word, b"lowest", toy)
        assert found != [b"lo", b"w", b"es", b"t"], (
            "'lowest': es and lo were joined, but then t and w can be joined to them: look"
            " again after each merge"
        )
        assert found == [b"low", b"est"], f"'lowest' is low + est, but you have {found}"
        found = encoded_by_you(encode_word, b"aaaaa", [(b"a", b"a")])
        assert len(found) != 4, (
            "'aaaaa' with (a, a): the pair fits twice, not only once; go on until nothing is"
            " left to merge"
        )
        assert found == [
            b"aa",
            b"aa",
            b"a",
        ], f"'aaaaa' with (a, a) is aa + aa + a, read from left to right, but you have {found}"
        _check_bytes(encode_word)
        _check_the_pair(encode_word)
        assert encoded_by_you(encode_word, b"", toy) == [], (
            "the empty word has no tokens: return an empty list"
        )
        assert encoded_by_you(encode_word, b"low", []) == [
            b"l",
            b"o",
            b"w",
        ], "without merges a word falls into its bytes"


def _check_the_pair(encode_word: Answer) -> None:
    """The rank belongs to the pair, not to what it makes."""
    found = encoded_by_you(encode_word, b"abc", [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")])
    assert found != [b"abc"], (
        "'abc' with the merges (b, c), (a, b), (ab, c): a + bc cannot be joined, since"
        " the pair (a, bc) is not in the list; look up the pair, not what it would make"
    )
    assert found == [
        b"a",
        b"bc",
    ], f"'abc' with the merges (b, c), (a, b), (ab, c) is a + bc, but you have {found}"


def _check_bytes(encode_word: Answer) -> None:
    """Bytes that are no characters by themselves, and a space."""
    found = encoded_by_you(encode_word, "né".encode(), [(b"n", b"\xc3")])
    assert found == [b"n\xc3", b"\xa9"], (
        f"'né' is three bytes, and a merge may join the first two, but you have {found}: begin with"
        " bytes, not with characters"
    )
    found = encoded_by_you(encode_word, b" dog", [(b" ", b"d")])
    assert found == [b" d", b"o", b"g"], (
        f"' dog' with the merge (space, d) begins with the token ' d', but you have {found}: a"
        " space is a byte like any other"
    )


def both_ways(name: str, answer: Any) -> tuple[list[bytes], list[bytes]]:
    """How many tokens a word has by rank, and by the longest token."""
    assert isinstance(answer, list | tuple) and len(answer) == 2, (
        f"{name} must hold two things: a list of merges, and a word"
    )
    typed_merges, word = answer
    assert isinstance(word, bytes) and word, (
        f"{name}: the word is {word!r}, expected bytes such as b'abcd'"
    )
    assert isinstance(typed_merges, list | tuple) and len(typed_merges) <= 6, (
        f"{name}: a list of at most six merges is wanted"
    )
    symbol_of = {bytes([byte]): symbol for symbol, byte in enumerate(package.BYTE_CHARACTERS)}
    pairs_typed = {}
    for number, pair in enumerate(typed_merges, 1):
        assert (
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(isinstance(part, bytes) for part in pair)
        ), f"{name}: merge {number} is {pair!r}, expected a pair of bytes such as (b'a', b'b')"
        for part in pair:
            assert part in symbol_of, (
                f"{name}: merge {number} joins {part}, but no merge before it makes {part}"
            )
        assert pair[0] + pair[1] not in symbol_of, (
            f"{name}: merge {number} makes {pair[0] + pair[1]} a second time"
        )
        pairs_typed[symbol_of[pair[0]], symbol_of[pair[1]]] = symbol_of[pair[0] + pair[1]] = (
            255 + number
        )
    by_rank = [list(symbol_of)[symbol] for symbol in package.apply_merges(word, pairs_typed)]
    rest = word
    by_longest = []
    while rest:
        by_longest.append(max((token for token in symbol_of if rest.startswith(token)), key=len))
        rest = rest[len(by_longest[-1]) :]
    return by_rank, by_longest


def check_counterexamples(answers: Answers) -> None:
    """Task 3: two words that show that longest-first is another algorithm."""
    with case("Task 3, the counterexamples"):
        assert {"longest_is_shorter", "rank_is_shorter"} <= set(answers), (
            "type both counterexamples into the cell above and run it"
        )
        for name, answer, sign in (
            ("longest_is_shorter", answers["longest_is_shorter"], 1),
            ("rank_is_shorter", answers["rank_is_shorter"], -1),
        ):
            by_rank, by_longest = both_ways(name, answer)
            told = f"by rank the word is {by_rank}, by the longest token {by_longest}"
            same = by_rank == by_longest
            cuts = "the same cut" if same else "two cuts, but equally many tokens"
            assert len(by_rank) != len(by_longest), (
                f"{name}: {told}: {cuts}; one must have fewer tokens"
            )
            assert sign * (len(by_rank) - len(by_longest)) > 0, (
                f"{name}: {told}: that is the other way round"
            )


# -------------------------------------------------------------- task 4: a tokenizer with four bugs


def whole_numbers(name: str, ids: Any) -> list[int]:
    """The ids that a method returned, if they are ids."""
    assert isinstance(ids, list), (
        f"{name} returned {type(ids).__name__}, expected a list of ids: does it return its result?"
    )
    assert all(isinstance(i, int) for i in ids), f"{name} returned {ids}, expected whole numbers"
    return ids


def check_white_space(answers: Answers) -> None:
    """Task 4: nothing is lost between words, in training and in encoding."""
    with case("Task 4, white space"):
        [MendedTokenizer] = written(answers, "MendedTokenizer")
        text = "deep water, deep sea, deep  blue sea\n"
        judge = ByteBPETokenizer.train([text], vocab_size=256 + 8, special_tokens=())
        bare = MendedTokenizer.train(text, 0)
        for sample in ("deep  sea", " sea", "sea\n", "\n\n  a\tb "):
            back = judge.decode_bytes(whole_numbers("encode", bare.encode(sample))).decode()
            assert back == sample, (
                f"the ids of {sample!r} spell {back!r}: encode loses or changes"
                f" {'white space' if ''.join(back.split()) == ''.join(sample.split()) else 'text'}"
            )
        mended = MendedTokenizer.train(text, 8)
        learned = [bytes(mended.spelled[256 + rank]) for rank in range(len(mended.spelled) - 256)]
        assert learned, (
            f"training has learned nothing from {text!r}: count_words takes a list of texts,"
            " [text]; of a bare text it takes each character for a text"
        )
        assert any(b" " in token for token in learned), (
            f"training has learned {learned}, and no token begins with a space: does train"
            " still cut with split(), or make a word of the space alone?"
        )
        crossing = [token for token in learned if b" " in token[1:]]
        assert crossing == [], (
            f"training has learned {crossing}, which run past the end of a word: cut into"
            " words first"
        )
        assert learned == [
            bytes(judge.decode_bytes([256 + rank])) for rank in range(len(learned))
        ], (
            f"training has learned {learned}, not what the package learns: are the words those of"
            " GPT2_PATTERN?"
        )
        found = whole_numbers("encode", mended.encode("a deep sea!"))
        assert found == judge.encode("a deep sea!"), (
            f"'a deep sea!' has the ids {found}, with the package"
            f" {judge.encode('a deep sea!')}: does encode cut as train does?"
        )
        _check_whole_text(MendedTokenizer)


def _check_whole_text(MendedTokenizer: Any) -> None:
    """A longer text with contractions, digits and indentation."""
    text = (
        "They'll say it's 3 dogs, 3 cats; they'll run.\n\n    x = 10\n  naïve  don't don't"
        " deep_sea\tdeep  deep\n" * 2
    )
    judge = ByteBPETokenizer.train([text], vocab_size=256 + 60, special_tokens=())
    mended = MendedTokenizer.train(text, 60)
    for number in range(256, judge.vocab_size):
        token = judge.decode_bytes([number])
        spelled = mended.spelled.get(number)
        assert spelled == token, (
            f"trained on {text[:52]!r}..., id {number} is {spelled}, with the package"
            f" {token!r}: use GPT-2's pattern in train and in encode"
        )
    for sample in (
        "they'll  run\n",
        "don't  run\n",
        "3 dogs, 10 cats",
        "deep_sea\tdeep",
        "\n\n    x",
    ):
        right = judge.encode(sample)
        found = whole_numbers("encode", mended.encode(sample))
        cuts = [
            [judge.decode_bytes([i]).decode("utf-8", "replace") for i in ids]
            for ids in (found, right)
        ]
        assert found == right, (
            f"{sample!r} is cut into {cuts[0]}, by the package into {cuts[1]}: use GPT-2's pattern"
            " in train and in encode"
        )


def check_decode(answers: Answers) -> None:
    """Task 4: characters of several bytes, and bytes that are no text."""
    with case("Task 4, decode"):
        [MendedTokenizer] = written(answers, "MendedTokenizer")
        bare = MendedTokenizer.train("", 0)
        judge = ByteBPETokenizer.train([], vocab_size=256, special_tokens=())
        for sample in ("deep", "深", "naïve café", "\N{SLIGHTLY SMILING FACE}"):
            back = bare.decode(judge.encode(sample))
            assert isinstance(back, str), (
                f"decode returned {type(back).__name__}, expected a str: does it return its result?"
            )
            assert "\ufffd" not in back, (
                f"the ids of {sample!r} are decoded to {back!r}: one id may hold a part of a"
                " character, so join all bytes first, and decode then"
            )
            assert back == sample, (
                f"the ids of {sample!r} are decoded to {back!r}: were bytes dropped, or read as"
                " something other than UTF-8?"
            )
        with case("two of the three bytes of 深, which aren't text on their own"):
            back = bare.decode(judge.encode_bytes(b"a\xe6\xb7"))
        assert back == "a\ufffd", (
            f"the ids of b'a' and of two of the three bytes of 深 are decoded to {back!r}:"
            " unreadable bytes become U+FFFD, as in the package"
        )


def check_file(answers: Answers) -> None:
    """Task 4: the same ids after saving and loading."""
    with case("Task 4, save and load"):
        [MendedTokenizer] = written(answers, "MendedTokenizer")
        mended = MendedTokenizer.train("ababab", 2)
        saved = mended.to_json()
        assert isinstance(saved, str), f"to_json returned {type(saved).__name__}, expected a str"
        json.loads(saved)
        loaded = MendedTokenizer.from_json(saved)
        assert isinstance(loaded, MendedTokenizer), (
            f"from_json returned {type(loaded).__name__}, expected a MendedTokenizer"
        )
        before = mended.encode("abababb")
        after = loaded.encode("abababb")
        assert all(isinstance(i, int) for i in before), (
            f"encode gives {before} before anything was saved: ids are whole numbers"
        )
        assert not any(isinstance(i, str) for i in after), (
            f"the ids were {before}, and after loading they are {after}: keys of a JSON"
            " object are text"
        )
        assert after == before, f"the ids were {before}, and after loading they are {after}"
        assert not any(isinstance(key, str) for key in loaded.spelled), (
            "after loading the keys of `spelled` are text, so decode cannot find the id 257:"
            " keys of a JSON object are text"
        )
        assert loaded.decode(before) == "abababb", (
            f"a loaded tokenizer decodes the ids of 'abababb' to {loaded.decode(before)!r}"
        )


def ratio(train_on: str, measure_on: str, num_merges: int) -> float:
    """Bytes per token of one text after training on another."""
    judge = ByteBPETokenizer.train([train_on], vocab_size=256 + num_merges, special_tokens=())
    return len(measure_on.encode()) / len(judge.encode(measure_on))


def check_evaluate(answers: Answers) -> None:
    """Task 4: training and measuring use different parts of the text."""
    with case("Task 4, evaluate"):
        [MendedTokenizer] = written(answers, "MendedTokenizer")
        one_word = (
            "abcdefghi" * 10 + "abcqxqxqxq"
        )  # no white space, so this test looks at nothing else
        found = MendedTokenizer.evaluate(one_word, 99)
        cut = len(one_word) * 9 // 10
        assert isinstance(found, int | float), (
            f"evaluate returned {type(found).__name__}, expected a number"
        )
        assert abs(found - 1) > 1e-9, (
            "evaluate finds 1 byte per token, as if no merge had been learned, or none fits:"
            " does train give count_words a list of texts, [text], and is the last tenth measured?"
        )
        assert abs(found - ratio(one_word, one_word[cut:], 99)) > 1e-9, (
            f"the last tenth holds pairs that were never seen, and yet it has {found:.1f} bytes per"
            " token: evaluate trains on the text that it measures"
        )
        assert abs(found - ratio(one_word[cut:], one_word[cut:], 99)) > 1e-9, (
            "evaluate trains on the last tenth: train on the other nine"
        )
        assert abs(found - ratio(one_word[:cut], one_word[:cut], 99)) > 1e-9, (
            "evaluate measures the text that it was trained on: measure the last tenth"
        )
        assert abs(found - ratio(one_word[:cut], one_word[cut:], 99)) < 1e-9, (
            f"evaluate says {found:.2f} bytes per token, expected"
            f" {ratio(one_word[:cut], one_word[cut:], 99):.2f}: train on text[:cut], and measure"
            " text[cut:]"
        )
        _check_cut(MendedTokenizer)


def _check_cut(MendedTokenizer: Any) -> None:
    """The pair (i, q) is learned only with the first character of the last tenth."""
    text = "iq" + "ab" * 43 + "xi" + "qabiqiqabq"
    found = MendedTokenizer.evaluate(text, 99)
    assert abs(found - ratio(text[:91], text[90:], 99)) > 1e-9, (
        "evaluate trains on text[: cut + 1]: the first character of the last tenth is not for"
        " training"
    )
    assert abs(found - ratio(text[:90], text[90:], 99)) < 1e-9, (
        f"evaluate says {found:.2f} bytes per token on the last 10 of 100 letters, expected"
        f" {ratio(text[:90], text[90:], 99):.2f}: does it cut as before, and measure all of them?"
    )


# ----------------------------------------------------------------------- task 5: what a text costs


def _slips_in_bytes(tokenizer: Any, text: str) -> list[tuple[str, float, str]]:
    """What the usual mistakes make of the bytes per token, and what to say."""
    tokens = len(tokenizer.encode(text, allow_special=False))
    special = len(tokenizer.encode(text))
    size = len(text.encode())
    characters = len(text)
    alone = sum(len(tokenizer.encode(word, allow_special=False)) for word in text.split())
    return [
        (
            "bytes_per_token",
            size / alone,
            "encode the text once, not each word alone: a space belongs to its word",
        ),
        (
            "bytes_per_token",
            size / special,
            (
                "the name of a special token became one token: text from outside needs"
                " allow_special=False"
            ),
        ),
        (
            "bytes_per_token",
            characters / tokens,
            "these are characters for each token, and some characters have more than one byte",
        ),
        ("bytes_per_token", tokens / size, "these are tokens for each byte, the other way round"),
    ]


def _slips_in_words(tokenizer: Any, text: str) -> list[tuple[str, float, str]]:
    """What the usual mistakes make of the tokens per word, and what to say."""
    tokens = len(tokenizer.encode(text, allow_special=False))
    special = len(tokenizer.encode(text))
    characters = len(text)
    words = len(text.split())
    written = len(re.findall(r"\w+", text))
    alone = sum(len(tokenizer.encode(word, allow_special=False)) for word in text.split())
    return [
        (
            "tokens_per_word",
            alone / words,
            "encode the text once, not each word alone: a space belongs to its word",
        ),
        (
            "tokens_per_word",
            tokens / written,
            (
                "words are what split() gives, with their signs: \"it's\" and 'sea-deep' are one"
                " word each"
            ),
        ),
        (
            "tokens_per_word",
            special / words,
            (
                "the name of a special token became one token: text from outside needs"
                " allow_special=False"
            ),
        ),
        ("tokens_per_word", words / tokens, "these are words for each token, the other way round"),
        (
            "tokens_per_word",
            tokens / len(text.split(" ")),
            "split(' ') cuts at single spaces only, and split() at all white space",
        ),
        ("tokens_per_word", characters / words, "these are characters for each word: count tokens"),
    ]


def _slips_in_bits(tokenizer: Any, text: str, nats: float) -> list[tuple[str, float, str]]:
    """What the usual mistakes make of the bits per byte, and what to say."""
    tokens = len(tokenizer.encode(text, allow_special=False))
    special = len(tokenizer.encode(text))
    size = len(text.encode())
    characters = len(text)
    return [
        (
            "bits_per_byte",
            nats * tokens / size / math.log10(2),
            "math.log is the natural logarithm, which is wanted here; log10 is another one",
        ),
        ("bits_per_byte", nats * tokens / size, "these are nats for each byte: divide by ln 2"),
        (
            "bits_per_byte",
            nats / math.log(2),
            "these are bits for each token: how many tokens and bytes has the text?",
        ),
        (
            "bits_per_byte",
            nats * tokens / characters / math.log(2),
            "these are bits for each character, not for each byte",
        ),
        (
            "bits_per_byte",
            nats * tokens / size * math.log(2),
            "to turn nats into bits divide by ln 2; you multiplied",
        ),
        (
            "bits_per_byte",
            nats / tokens * size / math.log(2),
            "a token holds several bytes, so a byte holds fewer bits than a token",
        ),
        (
            "bits_per_byte",
            nats / size / math.log(2),
            "nats_per_token is a mean: the whole text has that many for each of its tokens",
        ),
        (
            "bits_per_byte",
            nats * special / size / math.log(2),
            (
                "the name of a special token became one token: text from outside needs"
                " allow_special=False"
            ),
        ),
    ]


def reported(report: Answer, tokenizer: Any, text: str, nats: float) -> None:
    """Your three numbers, compared with those of the slips that are made most often."""
    found = report(tokenizer, text, nats)
    assert isinstance(found, dict), (
        f"report returned {type(found).__name__}, expected a dictionary: does it return its result?"
    )
    missing = {"bytes_per_token", "tokens_per_word", "bits_per_byte"} - found.keys()
    assert not missing, f"the dictionary lacks {', '.join(sorted(missing))}"
    for name, value in found.items():
        assert isinstance(value, int | float), (
            f"{name} is a {type(value).__name__}, expected a number"
        )
    tokens = len(tokenizer.encode(text, allow_special=False))
    size = len(text.encode())
    words = len(text.split())
    right = {
        "bytes_per_token": size / tokens,
        "tokens_per_word": tokens / words,
        "bits_per_byte": nats * tokens / size / math.log(2),
    }
    for name, value, told in [
        *_slips_in_bytes(tokenizer, text),
        *_slips_in_words(tokenizer, text),
        *_slips_in_bits(tokenizer, text, nats),
    ]:
        if not math.isclose(value, right[name], rel_tol=1e-9):
            assert not math.isclose(found[name], value, rel_tol=1e-9), (
                f"{name} = {found[name]:.4g} for {text[:24]!r}: {told}"
            )
    for name, value in right.items():
        assert math.isclose(found[name], value, rel_tol=1e-9) or not math.isclose(
            found[name], value, rel_tol=2e-2
        ), f"{name} = {found[name]} is nearly right, {value:.6g} is expected: did you round?"
        assert math.isclose(found[name], value, rel_tol=1e-9), (
            f"{name} = {found[name]:.4g} for {text[:24]!r}, expected {value:.4g}"
        )


def check_report(report: Answer) -> None:
    """Task 5: four texts with a tokenizer of their own."""
    with case("Task 5, report"):
        judge = ByteBPETokenizer.train(["deep water, deep sea, deep blue sea"], vocab_size=259 + 8)
        reported(report, judge, "deep water,   deep\nblue sea", 2.0)
        reported(report, judge, " it's Deep, sea-deep\n", 1.5)
        reported(report, judge, "naïve café in the deep", 2.5)
        reported(report, judge, "deep <|eos|> deep sea", 1.5)


# ---------------------------------------------------------------- task 6: stream until a stop text


class CountingTokenizer:
    """The method that the task allows, and `decode` to say what it does wrong; both count ids."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.decoded = 0

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        ids = list(ids)
        self.decoded += len(ids)
        return self.tokenizer.decode_bytes(ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"of the tokenizer use decode_bytes only, not {name}: a stop text need not"
            " begin where a token does"
        )


def streamed(
    stream_until: Answer, tokenizer: Any, ids: Sequence[int], stop: str
) -> tuple[str, list[str], int]:
    """The text that your stream makes, what it had shown each time it asked for another id, and how
    many ids it decoded.
    """
    shown: list[str] = []
    at_each: list[str] = []
    counting = CountingTokenizer(tokenizer)

    def source() -> Iterator[int]:
        for i in ids:
            at_each.append("".join(shown))
            yield i
        at_each.append("".join(shown))

    stream = stream_until(counting, source(), stop)
    assert stream is not None, (
        "stream_until returned None: write `yield`, and not `return` or `print`"
    )
    assert at_each == [], (
        "stream_until reads ids before anybody asks for text: write `yield` for each piece"
    )
    for piece in stream:
        assert isinstance(piece, str), f"a piece is {piece!r}, expected text"
        assert piece != "", "a piece is empty: yield only when there is something to show"
        shown.append(piece)
    return "".join(shown), at_each, counting.decoded


def check_stream(stream_until: Answer, tokenizer: Any, text: str, stop: str) -> None:
    """A valid text: right in the end, and at each moment neither too much nor too little."""
    ids = tokenizer.encode(text, allow_special=False)
    found, at_each, decoded = streamed(stream_until, tokenizer, ids, stop)
    name = f"the text {text!r} with stop={stop!r}"
    _check_moments(name, tokenizer, ids, at_each, text, stop)
    before = text.split(stop)[0]
    assert found != before + stop or stop not in text, (
        f"{name}: your stream shows the stop text too"
    )
    assert len(found) >= len(before) or not before.startswith(found), (
        f"{name} gives {found!r}, and {before[len(found) :]!r} is missing: show at the end what was"
        " held back"
    )
    assert found == before, f"{name} gives {found!r}, expected {before!r}"
    assert decoded <= len(ids) + 1, (
        f"{name} has {len(ids)} ids, but your stream decodes {decoded}: do not decode the whole"
        " text again for each id"
    )


def _check_moments(
    name: str, tokenizer: Any, ids: Sequence[int], at_each: Sequence[str], text: str, stop: str
) -> None:
    """What had been shown each time another id was asked for."""
    arrived = 0
    for number, seen in enumerate(at_each):
        whole = ""
        size = 0
        for character in text:  # the characters that have arrived completely
            size += len(character.encode())
            if size > arrived:
                break
            whole += character
        assert stop not in whole, (
            f"{name}: the stop text is complete after {number} of {len(ids)} ids, and your stream"
            " asks for another one"
        )
        sure = min(n for n in range(len(whole) + 1) if stop.startswith(whole[n:]))
        assert "\ufffd" not in seen or "\ufffd" in text, (
            f"{name}: after {number} of {len(ids)} ids your stream shows {seen!r}, with half a"
            " character: keep bytes back until the character is complete"
        )
        assert len(seen) <= sure or not whole.startswith(seen), (
            f"{name}: after {number} of {len(ids)} ids your stream shows {seen!r}, but"
            f" {whole[sure:]!r} could be the beginning of the stop text: hold it back"
        )
        assert len(seen) >= sure, (
            f"{name}: after {number} of {len(ids)} ids {whole[:sure]!r} can be shown, but your"
            f" stream shows {seen!r}: yield what is sure before you ask for the next id"
        )
        assert seen == whole[:sure], (
            f"{name}: after {number} of {len(ids)} ids your stream shows {seen!r}, expected"
            f" {whole[:sure]!r}"
        )
        arrived += len(tokenizer.decode_bytes(ids[number : number + 1]))


def two_judges() -> tuple[ByteBPETokenizer, ByteBPETokenizer]:
    """A tokenizer of bytes alone, and one whose tokens cross characters."""
    bytes_only = ByteBPETokenizer.train([], vocab_size=256, special_tokens=())
    judge = ByteBPETokenizer.train(
        ["深度学习需要大量的数据和很长的时间。" * 3, "deep sea, deep sea"], vocab_size=259 + 14
    )
    return bytes_only, judge


def check_stream_until(stream_until: Answer) -> None:
    """Task 6: texts, an end in the middle of a character, and a byte that is no text."""
    bytes_only, judge = two_judges()
    with case("Task 6, texts"):
        check_stream(stream_until, judge, "deep sea", "###")
        check_stream(stream_until, judge, "naïve café, 深度学习", "###")
        check_stream(stream_until, judge, "deep sea### deep", "###")
        check_stream(stream_until, judge, "a #1 ##", "###")
        check_stream(stream_until, judge, "deep sea, deep", "ea, ")
        check_stream(stream_until, bytes_only, "aaab a!", "aab a")
        # a token is a word
        longer = ByteBPETokenizer.train(["deep sea, banana, " * 6], vocab_size=259 + 24)
        check_stream(stream_until, longer, "deep sea, banana", "ea")
        check_stream(stream_until, longer, "deep sea, banana", "an")
    with case("Task 6, an end in the middle of a character"):
        half = judge.encode_bytes("a深".encode()[:-1])
        found, at_each, _ = streamed(stream_until, judge, half, "###")
        assert found != "a", (
            "the ids end with two of the three bytes of a character, and your stream drops"
            " them: what does `decode` make of them?"
        )
        assert found == judge.decode(half), (
            f"the ids end in the middle of a character: decode gives {judge.decode(half)!r}, your"
            f" stream {found!r}"
        )
    with case("Task 6, a byte that is no text"):
        _, at_each, _ = streamed(
            stream_until, bytes_only, bytes_only.encode_bytes(b"\xffab"), "###"
        )
        told = (
            "the byte FF, which begins no character, then 'ab': before each id and at the end your"
            f" stream had shown {at_each}"
        )
        expected = ["", "\ufffd", "\ufffda", "\ufffdab"]
        assert at_each == expected, (
            f"{told}, expected {expected}. What can never become a character must not hold up what"
            " follows"
        )

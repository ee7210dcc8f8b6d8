"""Cleaning on any text: each step does what it says and no more, and near copies are found."""

import hashlib
import json
import sys
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm_course.text.cleaning import (
    CLEANING_STEPS,
    clean_corpus,
    exact_duplicates,
    keep_length,
    near_duplicates,
    normalize_nfc,
    remove_controls,
    replace_emoji,
    replace_urls,
    shingles,
)
from llm_course.text.corpus import Corpus

EMOJI_PARTS = "a1#\u00a9\u2764\u231a\u20e3\ufe0e\ufe0f\u200d\U0001f3fd\U0001f469\U0001f441"
EMOJI_PARTS += "\U0001f5e8\U0001f1e9\U0001f1ea\U0001f3f4\U000e0067\U000e007f"
URL_PARTS = [
    "http://",
    "https://",
    "www.",
    "a",
    "b.c",
    ".",
    ",",
    "(",
    ")",
    "[",
    "]",
    "/",
    "?",
    " ",
    "é",
    "。",
    "<",
    "*",
    "_",
]
any_text = st.one_of(
    st.text(st.characters()),  # lone surrogates included
    st.text(EMOJI_PARTS),
    st.lists(st.sampled_from(URL_PARTS)).map("".join),
    st.text("ab\r\n\t\v\f\x00\x85\u2028\u200b\u200d\u202e\ufeff\xad"),
    st.text("eé\u0301\u0323ﬁ²각ㄱ\u1100\u1161"),
)
TEXT_STEPS = ["nfc", "controls", "urls", "emoji", "no_emoji"]


@settings(max_examples=300, deadline=None)
@given(text=any_text, name=st.sampled_from(TEXT_STEPS))
# what is left must not join to a new emoji
@example(text="\U0001f441\u200d1\ufe0f\u20e3\U0001f441", name="no_emoji")
@example(text="\u00a9\U0001f600\ufe0f\ufe0f", name="no_emoji")
@example(text="1\U0001f600\u20e3", name="no_emoji")
def test_steps_are_idempotent_on_any_text(text, name):
    step = CLEANING_STEPS[name]()
    once = step(text)
    assert step(once) == once


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(any_text, min_size=1, max_size=6),
    steps=st.lists(st.sampled_from(list(CLEANING_STEPS)), max_size=4),
)
def test_pipelines_never_fail_on_any_text(documents, steps):
    try:
        cleaned, report = clean_corpus(Corpus(documents, "any"), steps)
    except ValueError as error:
        assert "left no document" in str(error)
        return
    sizes = [row["documents"] for row in report] + [len(cleaned.documents)]
    assert [row["dropped"] for row in report] == [
        a - b for a, b in zip(sizes, sizes[1:], strict=False)
    ]
    assert sum(row["removed"] for row in report) == sum(map(len, documents)) - sum(
        map(len, cleaned.documents)
    )
    if steps:
        again, report = clean_corpus(cleaned, steps[-1:])
        assert again.documents == cleaned.documents and (
            report[0]["dropped"],
            report[0]["changed"],
        ) == (0, 0)


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=2)))
def test_exact_duplicates_keep_the_first(documents):
    step = exact_duplicates()
    assert [text for text in documents if step(text)] == [
        text for text in dict.fromkeys(documents) if text
    ]


@given(any_text)
def test_nfc_changes_no_meaning(text):
    assert unicodedata.normalize("NFD", normalize_nfc(text)) == unicodedata.normalize("NFD", text)


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("See https://a.b/c.", "See <url>."),
        ("(http://a.b/x_(y))", "(<url>)"),
        ("[x](https://a.b/c) <https://a.b>", "[x](<url>) <<url>>"),
        ("'https://a.b/c', \"https://a.b/c\"", "'<url>', \"<url>\""),
        ("www.a.com, WWW.B.COM! HTTPS://C.d...", "<url>, <url>! <url>..."),
        ("**https://a.b** _https://a.b_", "**<url>** _<url>_"),
        ("https://de.wikipedia.org/wiki/Käse。好", "<url>。好"),
        ("見https://a.b/c）", "見<url>）"),
        ("ftp://x.y?q=[1]&a=2#f http://[::1]:80/x.", "<url> <url>."),
        ("https://a.b/(open", "<url>(open"),
        ("http:// www. awww.a.b a@b.c file.txt", "http:// www. awww.a.b a@b.c file.txt"),
        ("https://a.b\nnext", "<url>\nnext"),
    ],
)
def test_urls(text, cleaned):
    assert replace_urls(text) == cleaned


@pytest.mark.parametrize(
    "emoji",
    [
        "\U0001f600",
        "\u231a\ufe0f",
        "\u2764\ufe0f",  # heart and variation selector
        "\U0001f44b\U0001f3fd",  # hand and skin
        "\u261d\U0001f3fd",  # a sign that takes a skin
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",  # family
        "\U0001f469\U0001f3fd\u200d\u2764\ufe0f\u200d\U0001f48b\u200d\U0001f468\U0001f3fb",  # kiss
        "\U0001f3f3\ufe0f\u200d\U0001f308",  # rainbow flag
        "\U0001f3f3\u200d\U0001f308",  # the same without its selector
        "\U0001f441\u200d\U0001f5e8",
        "\U0001f1e9\U0001f1ea",  # flag
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",  # flag of England
        "1\ufe0f\u20e3",
        "#\u20e3",
        "\u00a9\ufe0f",
    ],
)
def test_an_emoji_is_one(emoji):
    assert replace_emoji(f"a{emoji}b") == "a<emoji>b"
    assert replace_emoji(f"{emoji}{emoji}") == "<emoji><emoji>"
    assert replace_emoji(f"7 {emoji} x", "") == "7  x"
    assert replace_emoji(emoji, r"\1") == r"\1"  # the placeholder is no pattern
    assert replace_emoji(f"a{emoji}\u200db", "") == "ab"  # a joiner that joins nothing goes with it


@pytest.mark.parametrize(
    "text", ["Room 101 #7 *", "© ® ™ ✔ ❤ ↔", "\u231a\ufe0e", "क्\u200dष", "e\u0301"]
)
def test_what_is_no_emoji_stays(text):
    assert replace_emoji(text) == text


def test_controls():
    assert remove_controls("a\r\nb\rc\x85d\u2028e\fe") == "a\nb\nc\nd\ne\ne"
    assert remove_controls("\x00a\x1b[0m\x7f\u200b\u202e\u2066\u200e\ufeff\xad\tb\n") == "a[0m\tb\n"
    assert (
        remove_controls("می\u200cخواهم \U0001f469\u200d\U0001f692")
        == "می\u200cخواهم \U0001f469\u200d\U0001f692"
    )


@pytest.mark.parametrize(
    "unit",
    [
        "\u200d",
        "😀\u200d",
        "www.",
        "http://",
        "http://a(",
        "((",
        ".",
        "1\ufe0f",
        "\U0001f1e9",
        "\r",
        "https://a.b)",
    ],
)
def test_no_text_takes_forever(unit):
    text = unit * (100_000 // len(unit))  # a quadratic pattern would take minutes
    for name in TEXT_STEPS:
        CLEANING_STEPS[name]()(text)


def test_near_duplicates_agree_with_the_exact_similarity():
    words = [hashlib.sha256(bytes([i % 256, i // 256])).hexdigest()[:6] for i in range(3000)]
    originals = [" ".join(words[start : start + 300]) for start in range(0, 3000, 300)]
    near = [" ".join(["new", *text.split()[1:]]) for text in originals]  # J = 295/297
    far = [" ".join([*text.split()[:150], *words[:100]]) for text in originals[1:]]  # shares half
    step = near_duplicates()
    assert [bool(step(text)) for text in originals + near + far[:1]] == [True] * 10 + [
        False
    ] * 10 + [True]
    assert len(shingles(originals[0]) & shingles(near[0])) == 295
    fresh = near_duplicates()
    assert [bool(fresh(text)) for text in near] == [True] * 10  # nothing is remembered across runs


def test_near_duplicates_are_the_same_on_every_machine():
    from datasketch import MinHash

    sketch = MinHash(num_perm=128, seed=1)
    sketch.update_batch([b"a b c d e", b"b c d e f"])
    assert (
        hashlib.sha256(sketch.hashvalues.astype("<u8").tobytes()).hexdigest()[:16]
        == "5a4b06320c1a77ed"
    )


def test_shingles_and_scripts():
    assert (
        shingles("A b C", 2) == {"a b", "b c"}
        and shingles("a", 5) == {"a"}
        and shingles("", 5) == {""}
    )
    assert shingles("猫は好き", 3) == {"猫 は 好", "は 好 き"}
    step = near_duplicates()
    text = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
    text += "何でも薄暗いじめじめした所でニャーニャー泣いていた事だけは記憶している。"
    assert step(text) and not step(text.replace("。何", "。")), (
        "Japanese has no spaces, and near copies all the same"
    )
    assert step("!!!") and step("???")


def test_lengths_and_thresholds():
    assert [keep_length(2, 3)(text) for text in ("a", "ab", "abc", "abcd")] == ["", "ab", "abc", ""]
    for threshold in (0, -1, 0.1, 1.5, float("nan")):  # below 0.5 the bands miss pairs
        with pytest.raises(
            ValueError, match=f"threshold={threshold} must be at least 0.5 and at most 1"
        ):
            near_duplicates(threshold)


def test_pipeline_and_report():
    corpus = Corpus(["e\u0301", "é", "x https://a.b y", "é"], "toy")
    cleaned, report = clean_corpus(corpus, ["nfc", "urls", "exact_duplicates"])
    assert cleaned == Corpus(["é", "x <url> y"], "toy, cleaned by nfc, urls, exact_duplicates")
    assert [list(row.values()) for row in report] == [
        ["nfc", 4, 0, 1, 1],
        ["urls", 4, 0, 1, 6],
        ["exact_duplicates", 4, 2, 0, 2],
    ]
    assert str(report).splitlines()[2].split() == ["urls", "4", "0", "1", "6"]
    assert clean_corpus(corpus, ["exact_duplicates", "nfc"])[0].documents == [
        "é",
        "é",
        "x https://a.b y",
    ]
    assert clean_corpus(corpus, []) == (corpus, []) and json.loads(json.dumps(report)) == report
    with pytest.raises(ValueError, match="do you mean 'near_duplicates'.*nfc, controls, urls"):
        clean_corpus(corpus, ["nfc", "near_duplicate"])
    with pytest.raises(ValueError, match=r"must be a list: \['nfc'\]"):
        clean_corpus(corpus, "nfc")
    with pytest.raises(ValueError, match="cleaning left no document of toy"):
        clean_corpus(Corpus(["\u200b"], "toy"), ["controls"])


def test_near_duplicates_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ImportError, match="llm_course"):
        clean_corpus(Corpus(["a"], "toy"), ["near_duplicates"])


def test_wrong_options_of_steps_are_refused():
    for wrong in (0, -1, 2.5, None, "5"):
        with pytest.raises(ValueError, match="size=.* must be a whole number"):
            shingles("a b c", wrong)
        if wrong != 0:
            with pytest.raises(ValueError, match="shortest=.* must be a whole number"):
                keep_length(wrong)
    with pytest.raises(ValueError, match="there is no cleaning step 5"):
        clean_corpus(Corpus(["a"], "toy"), [5])

"""Corpora at their edges: broken files, data sets without a network, cleaning on any text, splits
of any documents.
"""

import hashlib
import json
import os
import sys
import unicodedata
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm_course.text import corpus as module
from llm_course.text.corpus import (
    CLEANING_STEPS,
    Corpus,
    clean_corpus,
    exact_duplicates,
    keep_length,
    load_corpus,
    near_duplicates,
    normalize_nfc,
    remove_controls,
    replace_emoji,
    replace_urls,
    shingles,
    split_documents,
)

TEXTS = ["One ring.\nTwo lines.", "Naïve café.", "第三"]


@pytest.fixture
def plant(tmp_path):
    def write(data, name="planted.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(path)

    return write


def write_table(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


# ---------------------------------------------------------------- built-in corpora


def test_built_in_corpora():
    prose = load_corpus()
    code = load_corpus("python-source")
    assert prose.source.startswith("python-docs of ") and 1_500_000 < prose.num_bytes < 6_000_000
    assert 5_000_000 < code.num_bytes < 40_000_000 and all(
        document.strip() for document in prose.documents + code.documents
    )
    assert any("def open_code" in text or "class JSONDecoder" in text for text in code.documents)
    assert not any(
        "class SupportTest" in text or "import pytest" in text for text in code.documents
    ), "no tests"
    paragraphs = [
        paragraph for document in prose.documents for paragraph in set(document.split("\n\n"))
    ]
    assert len(paragraphs) == len(set(paragraphs)), "a paragraph stands in two documents"


def test_docstrings_are_found_in_every_block(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""m"""\nif x:\n  def f():\n    """f"""\nelse:\n  class C:\n    """C"""\n    async def'
        ' g(self):\n      """g"""\ntry:\n  pass\nexcept E:\n  def h():\n    """h"""\nfinally:\n '
        ' def i():\n    """i"""\nmatch x:\n  case 1:\n    def j():\n      """j"""\nwith y:\n  def'
        ' k():\n    x = 1\n    """no docstring"""\n'
    )
    assert module._docstrings(path) == ["m\n\nf\n\nC\n\ng\n\nh\n\ni\n\nj"]
    path.write_text("x = 1")
    assert module._docstrings(path) == []
    path.write_text("def")
    assert module._docstrings(path) == []


def test_a_python_without_its_documentation(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="lacks its documentation"):
        load_corpus()


@pytest.mark.parametrize("arguments", [{"files": "a.txt"}, {"datasets": "wikitext"}])
def test_a_name_in_place_of_a_list(arguments):
    with pytest.raises(ValueError, match="must be lists"):
        load_corpus(**arguments)


def test_unknown_name():
    with pytest.raises(
        ValueError, match="no corpus is called 'python_docs': there are python-docs, python-source"
    ):
        load_corpus("python_docs")


# ---------------------------------------------------------------- files


def test_every_door_gives_the_same_documents(tmp_path, plant, monkeypatch):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = "".join(
        json.dumps({"id": i, "body": text}, ensure_ascii=i % 2 == 0) + "\n"
        for i, text in enumerate(TEXTS)
    )
    texts = [plant(text, f"{i}.txt") for i, text in enumerate(TEXTS)]
    table = write_table(tmp_path / "table.parquet", id=[0, 1, 2], body=TEXTS)
    line_file = plant(lines, "folder/lines.jsonl")
    for arguments in (
        {"files": texts},
        {"files": [str(tmp_path / "?.txt")]},
        {"files": [line_file]},
        {"files": [table]},
        {"datasets": [str(tmp_path / "folder")]},
        {"files": texts[:2], "datasets": [str(write_folder(tmp_path, TEXTS[2:]))]},
    ):
        assert load_corpus(**arguments, field="body").documents == TEXTS


def write_folder(tmp_path, texts):
    (tmp_path / "other").mkdir()
    write_table(tmp_path / "other" / "train.parquet", body=texts)
    return tmp_path / "other"


def test_order_is_kept_and_a_file_is_read_once(plant, tmp_path):
    b = plant("b", "b.md")
    a = plant("a", "a.text")
    corpus = load_corpus(files=[b, a, str(tmp_path / "*")])
    assert corpus.documents == ["b", "a"] and corpus.source == f"{b}, {a}, {tmp_path / '*'}"


@pytest.mark.parametrize(
    "data, name, message",
    [
        (b"", "a.txt", r"a\.txt is empty"),
        (b" \n\t", "a.txt", r"a\.txt is empty"),
        (b"\xef\xbb\xbf", "a.txt", r"a\.txt is empty"),
        ("café".encode("latin-1"), "a.txt", r"a\.txt is not UTF-8: byte 0xe9 at offset 3"),
        (b"\xef\xbb\xbfab\xff", "a.txt", "byte 0xff at offset 5"),
        ("hi".encode("utf-16"), "a.txt", "byte 0x(ff|fe) at offset 0"),
        ("hi".encode("utf-16-le"), "a.txt", "NUL byte at offset 1.*UTF-16"),
        (b"\xef\xbb\xbfab\0", "a.txt", "NUL byte at offset 5"),
        (b"", "a.jsonl", r"a\.jsonl is empty"),
        (b"\n\n", "a.jsonl", r"a\.jsonl is empty"),
        ('{"text": ""}\n{"text": " "}', "a.jsonl", r"a\.jsonl is empty"),
        (
            '{"text": "a"}\n\n{"text": "b',
            "a.jsonl",
            r"a\.jsonl, line 3 is not JSON: Unterminated string",
        ),
        ("[" * 100_000, "a.jsonl", "line 1 is not JSON"),
        ("1" * 10_000, "a.jsonl", "line 1 is not"),
        ('["a"]', "a.jsonl", r'line 1 is \["a"\], expected an object'),
        ('"text"', "a.jsonl", "line 1 is .*expected an object"),
        (
            '{"title": "x", "body": "y"}',
            "a.jsonl",
            "line 1 has no field 'text', it has 'title', 'body'",
        ),
        ("{}", "a.jsonl", "line 1 has no field 'text', it has none"),
        (
            '{"text": "a"}\n{"text": 7}',
            "a.jsonl",
            r"line 2: the field holds 7 \(int\), expected text",
        ),
        ('{"text": null}', "a.jsonl", r"line 1: the field holds None \(NoneType\)"),
        ('{"text": ["a"]}', "a.jsonl", r"holds \['a'\] \(list\)"),
        (
            r'{"text": "ab\ud800"}',
            "a.jsonl",
            r"line 1: character 2 is \\ud800, half of a surrogate pair",
        ),
        (b'{"text": "caf\xe9"}', "a.jsonl", "byte 0xe9 at offset 13"),
        (b"PAR1 and no more", "a.parquet", "not a whole parquet file"),
        (b"", "a.parquet", "not a whole parquet file"),
    ],
)
def test_broken_files_name_their_place(plant, data, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_corpus(files=[plant(data, name)])
    assert name in str(caught.value)


def test_good_files_that_look_odd(plant):
    assert load_corpus(files=[plant("x", "one.txt")]).documents == ["x"]
    assert load_corpus(files=[plant(b"\xef\xbb\xbf{}", "bom.txt")]).documents == ["{}"]
    lines = (
        '\ufeff{"text": "a\u2028b"}\r\n\r\n{"text": "\\ud83d\\ude00", "other": 1}\n{"text":'
        ' "\\u0000"}'
    )
    assert load_corpus(files=[plant(lines, "odd.JSONL")]).documents == [
        "a\u2028b",
        "\U0001f600",
        "\0",
    ]


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(
        IsADirectoryError, match=r"is a directory: name its files, for example '.*/\*\.txt'"
    ):
        load_corpus(files=[str(tmp_path)])
    for missing in (tmp_path / "*.txt", tmp_path / "missing.txt"):
        with pytest.raises(FileNotFoundError, match="no file matches"):
            load_corpus(files=[str(missing)])


def test_broken_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    write_table(path, body=["a", "b"], id=[1, 2])
    with pytest.raises(ValueError, match="has no field 'text', it has 'body', 'id'"):
        load_corpus(files=[str(path)])
    with pytest.raises(ValueError, match=r"row 0: the field holds 1 \(int\)"):
        load_corpus(files=[str(path)], field="id")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet is not a whole parquet file"):
        load_corpus(files=[str(path)])
    write_table(path, text=["a", None])
    with pytest.raises(ValueError, match="row 1: the field holds None"):
        load_corpus(files=[str(path)])


@pytest.mark.parametrize(
    "extra, arguments", [("pyarrow", {"files": ["a.parquet"]}), ("datasets", {"datasets": ["x"]})]
)
def test_a_missing_extra_says_how_to_get_it(plant, monkeypatch, extra, arguments):
    monkeypatch.setitem(sys.modules, extra, None)  # importing it raises
    if "files" in arguments:
        arguments = {"files": [plant("x", "a.parquet")]}
    with pytest.raises(ImportError, match=rf'{extra}.*pip install "llm_course\[hub\]"'):
        load_corpus(**arguments)


def test_near_duplicates_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ImportError, match="llm_course"):
        clean_corpus(Corpus(["a"], "toy"), ["near_duplicates"])


# ---------------------------------------------------------------- data sets


@pytest.mark.parametrize(
    "name", ["no-such-owner/no-such-dataset", "nosuchdataset:config", "./missing-folder"]
)
def test_unknown_dataset_without_a_network(name):
    with pytest.raises(ValueError, match="cannot be loaded: .*offline") as caught:
        load_corpus(datasets=[name])
    assert (
        name in str(caught.value)
        and "\n" not in str(caught.value)
        and caught.value.__cause__ is None
    )


def test_dataset_arguments_are_passed_on(monkeypatch):
    import datasets

    calls = []

    def load_dataset(name, config, **options):
        calls.append((name, config, options))
        return datasets.Dataset.from_dict({"body": [name, " "], "id": [1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load_corpus(datasets=["owner/one:raw", "two"], field="body", num_proc=2)
    assert corpus.documents == ["owner/one", "two"] and corpus.source == "owner/one:raw, two"
    options = {"split": "train", "num_proc": 2}
    assert calls == [("owner/one", "raw", options), ("two", None, options)]
    with pytest.raises(ValueError, match="dataset 'two' has no field 'text', it has 'body', 'id'"):
        load_corpus(datasets=["two"])
    with pytest.raises(ValueError, match=r"dataset 'two', row 0: the field holds 1 \(int\)"):
        load_corpus(datasets=["two"], field="id")


def test_broken_folders(tmp_path, plant, monkeypatch):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    plant('{"text": "a"}\n{"text": ', "broken/a.jsonl")
    with pytest.raises(ValueError, match="cannot be loaded: JSON parse error"):
        load_corpus(datasets=[str(tmp_path / "broken")])
    plant('{"text": "a"}', "whole/a.jsonl")
    assert load_corpus(datasets=[str(tmp_path / "whole")]).documents == ["a"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_corpus(datasets=[str(tmp_path / "empty")])


# ---------------------------------------------------------------- cleaning

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
        with pytest.raises(ValueError, match=f"threshold={threshold} must lie between 0.5 and 1"):
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


# ---------------------------------------------------------------- the split


@settings(max_examples=300, deadline=None)
@given(
    documents=st.lists(st.text("ab\n", min_size=1, max_size=60), min_size=1, max_size=12),
    val_fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 9),
)
def test_split_is_disjoint_complete_and_ordered(documents, val_fraction, seed):
    documents = [f"{i}{text}" for i, text in enumerate(documents)]  # all different
    try:
        train, val = split_documents(documents, val_fraction=val_fraction, seed=seed)
    except ValueError as error:
        assert "too few" in str(error) and val_fraction * sum(map(len, documents)) < 1
        return
    assert train and val and all(train) and all(val)
    assert (train, val) == split_documents(documents, val_fraction=val_fraction, seed=seed)
    if set(train + val) == set(documents):  # whole documents
        assert train == [text for text in documents if text in train] and val == [
            text for text in documents if text in val
        ]
        assert not set(train) & set(val) and len(train) + len(val) == len(documents)
    else:  # the end of the longest
        joined = [text if text in documents else text + val[0] for text in train]
        [cut] = [after for before, after in zip(train, joined, strict=True) if before != after]
        assert joined == documents and len(val) == 1 and len(cut) == max(map(len, documents))


def test_split_is_the_one_that_runs_were_trained_on():
    documents = [f"{i} " * (i * 7 % 50 + 1) for i in range(200)]
    train, val = split_documents(documents, val_fraction=0.05, seed=0)
    assert [int(text.split()[0]) for text in val] == [
        0,
        6,
        50,
        65,
        71,
        72,
        90,
        105,
        111,
        152,
        159,
        165,
        168,
        179,
    ]
    assert split_documents(["abcdefghij"], val_fraction=0.2, seed=0) == (["abcdefgh"], ["ij"])
    assert split_documents(["ab\ncdefghij"], val_fraction=0.2, seed=0) == (["ab\ncdefgh"], ["ij"])
    assert split_documents(["abcdef\nhij"], val_fraction=0.2, seed=0) == (["abcdef\n"], ["hij"])


def test_a_longest_document_of_the_wanted_size_is_held_out_whole():
    documents = ["a" * 36, "b" * 9, "c" * 37]
    splits = [split_documents(documents, val_fraction=0.48, seed=seed) for seed in range(20)]
    assert all(len("".join(val)) >= 30 for _, val in splits)


@pytest.mark.parametrize("documents", [[], [""], ["a"]])
def test_too_little_to_split(documents):
    with pytest.raises(ValueError, match="no document|too few"):
        split_documents(documents, val_fraction=0.05, seed=0)


@pytest.mark.parametrize("val_fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_fraction_outside(val_fraction):
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        split_documents(["abc"], val_fraction=val_fraction, seed=0)


def test_hash_knows_borders():
    assert Corpus(["a", "b"], "x").sha256 == Corpus(["a", "b"], "y").sha256
    assert (
        len(
            {
                Corpus(documents, "").sha256
                for documents in (["ab"], ["a", "b"], ["", "ab"], ["b", "a"])
            }
        )
        == 4
    )


def test_two_spellings_of_a_path_are_one_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("once")
    Path("link.txt").symlink_to("a.txt")
    assert load_corpus(files=["a.txt", "./a.txt", tmp_path / "a.txt", "*.txt"]).documents == [
        "once"
    ]

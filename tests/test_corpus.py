"""Corpora at their edges: broken files, data sets without a network, splits of any documents."""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_course.text import corpus as module
from llm_course.text.corpus import Corpus, docstrings_in, load_corpus, split_documents

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
    assert docstrings_in(path) == ["m\n\nf\n\nC\n\ng\n\nh\n\ni\n\nj"]
    path.write_text("x = 1")
    assert docstrings_in(path) == []
    path.write_text("def")
    assert docstrings_in(path) == []


def test_a_python_without_its_documentation(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="lacks its documentation"):
        load_corpus()


@pytest.mark.parametrize("arguments", [{"files": "a.txt"}, {"datasets": "wikitext"}])
def test_a_name_in_place_of_a_list(arguments):
    with pytest.raises(ValueError, match="must be a list: "):
        load_corpus(**arguments)


def test_unknown_name():
    with pytest.raises(
        ValueError,
        match="no corpus is called 'python_docs': there are python-docs, python-source, stories",
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
        (b"PAR1 and no more", "a.parquet", "not a complete parquet file"),
        (b"", "a.parquet", "not a complete parquet file"),
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
    with pytest.raises(ValueError, match=r"a\.parquet is not a complete parquet file"):
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
    with pytest.raises(ValueError, match="must be above 0 and below 1"):
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


@pytest.mark.parametrize("wrong", [None, -1, 1.5, "0", True])
def test_a_split_needs_a_seed(wrong):
    with pytest.raises(ValueError, match="seed=.* must be a whole number"):
        split_documents(["abc", "d"], val_fraction=0.5, seed=wrong)
    with pytest.raises(ValueError, match="documents='abc' must be a list"):
        split_documents("abc", val_fraction=0.5, seed=0)

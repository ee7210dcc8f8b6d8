"""What the pages of chapter 1 show: texts cut into coloured tokens, counts, and their oracles."""

import html
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib.pyplot as plt
import regex
from IPython.display import display
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from llm_course.text.bpe import (
    BYTE_CHARACTERS,
    GPT2_PATTERN,
    apply_merges,
    bytes_of_symbols,
    count_words,
    learn_merges,
)
from llm_course.text.stories import write_story
from llm_course.text.tokenization import (
    BaseTokenizer,
    BPETokenizer,
    ByteBPETokenizer,
    SimpleCharacterTokenizer,
)

Merges = Sequence[tuple[int, int]]

# ------------------------------------------------------------------------------------------- texts


@cache
def _stories(count: int, level: str) -> tuple[str, ...]:
    return tuple(write_story(level, index=index) for index in range(count))


def stories(count: int, level: str = "medium") -> list[str]:
    """The first stories of the course's own corpus: the same on every machine."""
    return list(_stories(count, level))


def python_docs() -> str:
    """The reference behind Python's `help`, with each paragraph once; it changes with Python."""
    paragraphs = "\n\n".join(text for _, text in sorted(topics.items())).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


# One story, written for this course in two languages.
CHINESE = (
    "村口有一条小河，河上没有桥，只有一只旧木船。摆渡的老人姓陈，今年七十三岁，每天天不亮就坐在船头"
    "等人。过河的大多是去镇上赶集的乡亲，也有背着书包的孩子。老人不爱说话，可是谁家的孩子考试得了第几"
    "名，谁家的母鸡又孵出了小鸡，他心里都清清楚楚。去年夏天下了一场大雨，河水一夜之间涨了三尺。天亮的"
    "时候，对岸有人喊救命，原来是一个年轻人急着送生病的母亲去医院。水流很急，大家都劝老人不要下水。老人"
    "没有回答，只把竹篙插进水里，试了试深浅，然后解开了绳子。"
)
ENGLISH = (
    "At the edge of the village there is a small river. It has no bridge, only an old wooden boat."
    " The ferryman, old Chen, is seventy-three this year, and every day before dawn he sits in the"
    " bow and waits for people. Most of those who cross are neighbours on their way to market in"
    " town; some are children with satchels on their backs. The old man is not fond of talking,"
    " but whose child came out where in the examination, and whose hen has hatched chicks again,"
    " he knows it all by heart. Last summer there was a great rain, and overnight the river rose by"
    " a metre. At daybreak somebody on the far bank called for help: a young man had to get his"
    " sick mother to hospital in a hurry. The current was fierce, and everybody urged the old man"
    " not to go. He gave no answer. He only put his bamboo pole into the water to feel how deep it"
    " was, and then untied the rope."
)

# ------------------------------------------------------------------------------------------ tokens


def cut(text: str, merges: Merges) -> list[bytes]:
    """The tokens of a text, as bytes."""
    tokens = bytes_of_symbols(merges)
    merged = {pair: 256 + rank for rank, pair in enumerate(merges)}
    words = GPT2_PATTERN.findall(text)
    return [tokens[symbol] for word in words for symbol in apply_merges(word.encode(), merged)]


def tokens_of(tokenizer: BaseTokenizer, text: str) -> list[bytes]:
    """The tokens of a text as a tokenizer cuts it, as bytes; of a special token, its name."""
    ids = tokenizer.encode(text)
    if isinstance(tokenizer, ByteBPETokenizer):
        return [tokenizer.decode_bytes([i]) for i in ids]
    return [tokenizer.decode([i]).encode() for i in ids]


def library_cut(tokenizer: BPETokenizer, text: str) -> list[bytes]:
    """The tokens of a text as bytes, also where a token is a part of a character."""
    bytes_of = {character: byte for byte, character in BYTE_CHARACTERS.items()}
    names = json.loads(tokenizer.to_json())["model"]["vocab"]
    names = {i: token for token, i in names.items()}
    return [bytes(map(bytes_of.__getitem__, names[i])) for i in tokenizer.encode(text)]


COLORS = ("74,134,200", "217,128,50", "77,154,91", "170,100,180", "190,165,50")


def _piece(token: bytes, number: int) -> str:
    """One token on a background that reads in light and dark; half a character as its bytes."""
    text = html.escape(token.decode("utf-8", "backslashreplace")).replace("\n", "↵\n")
    return f'<span style="background:rgba({COLORS[number % len(COLORS)]},0.38)">{text}</span>'


def show_tokens(rows: Mapping[str, Sequence[bytes]]) -> None:
    """Texts with each token in a colour of its own, and how many tokens there are."""
    style = "font-family:monospace;white-space:pre-wrap;line-height:1.7;margin:2px 0 12px 0"
    parts = []
    plain = []
    for name, tokens in rows.items():
        pieces = "".join(_piece(token, number) for number, token in enumerate(tokens))
        title = f"{name}: {len(tokens)} tokens"
        parts.append(f'<div>{html.escape(title)}</div><div style="{style}">{pieces}</div>')
        plain.append(
            f"{title}\n" + "|".join(token.decode("utf-8", "backslashreplace") for token in tokens)
        )
    display({"text/html": "".join(parts), "text/plain": "\n".join(plain)}, raw=True)


SOURCES = ["stories", "Python's manual"]
MANUAL = 300_000  # so many characters of Python's manual are learned from


def _source(name: str) -> list[str]:
    return stories(300) if name == "stories" else [python_docs()[:MANUAL]]


@cache
def _learned(source: str, num_merges: int) -> list[tuple[int, int]]:
    return learn_merges(count_words(_source(source)), num_merges=num_merges)


def show_merges(text: str, source: str, merges: int, most: int = 2000) -> None:
    """A text in the tokens that so many merges of a source make, and the merge learned last."""
    learned = _learned(source, most)[:merges]
    tokens = bytes_of_symbols(learned)
    last = f", the last one {tokens[-1].decode('utf-8', 'backslashreplace')!r}" if learned else ""
    cut_up = cut(text, learned)
    ratio = len(text.encode()) / max(len(cut_up), 1)
    show_tokens({f"{len(learned)} merges from {source}{last}; {ratio:.1f} bytes a token": cut_up})


def bytes_per_token(texts: Iterable[str], merges: Merges) -> float:
    """How many bytes of these texts a token holds, on average."""
    tokens = [token for text in texts for token in cut(text, merges)]
    return sum(map(len, tokens)) / len(tokens)


def compression(tokenizer: BaseTokenizer, text: str) -> float:
    """Bytes of text for each token."""
    return len(text.encode()) / len(tokenizer.encode(text))


def symbol_of(byte: int) -> int:
    """The number of a byte in GPT-2's order."""
    return list(BYTE_CHARACTERS).index(byte)


def manual_end() -> str:
    """Some of Python's manual that nothing here has learned from."""
    return python_docs()[MANUAL : MANUAL + 40_000]


@cache
def tokenizers() -> dict[str, BaseTokenizer]:
    """Tokenizers of about equal size that were trained on different texts."""
    texts = {name: _source(name) for name in SOURCES} | {"half a Chinese story": [CHINESE[:110]]}
    made: dict[str, BaseTokenizer] = {
        name: quietly(ByteBPETokenizer.train, some, vocab_size=1259) for name, some in texts.items()
    }
    letters = "".join(stories(300)) + python_docs()
    return made | {"characters": SimpleCharacterTokenizer.from_text(letters)}


def compare_encoders(
    encoders: Mapping[str, Callable[..., Sequence[str]]],
    merges: Sequence[tuple[str, str]],
    words: Mapping[bytes, int],
    spell: Callable[[bytes], str],
) -> dict[str, float]:
    """How many tokens each encoder needs for the words of a text; each must give them all back."""
    lengths = dict.fromkeys(encoders, 0.0)
    for name, encode in encoders.items():
        for word, count in words.items():
            symbols = encode(spell(word), merges)
            assert "".join(symbols) == spell(word), (name, word)
            lengths[name] += count * len(symbols)
    return lengths


# ---------------------------------------------------------------------------------------- patterns

CONTRACTIONS = r"'(?:[sdmt]|ll|ve|re)"
PATTERNS = {
    "no pattern": r"[\s\S]+",
    "GPT-2": GPT2_PATTERN.pattern,
    "Llama 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "each digit": CONTRACTIONS + r"| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


def pieces_by(pattern: str, text: str) -> list[str]:
    """The pieces into which a pattern cuts a text."""
    return regex.findall(pattern, text)


# ----------------------------------------------------------------------------------------- oracles


def library(
    texts: Iterable[str],
    num_merges: int,
    *,
    pattern: str | None = None,
    min_frequency: int = 2,
) -> Tokenizer:
    """A byte-level BPE that Hugging Face's `tokenizers` has trained, by GPT-2's
    pattern or another."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    trainer = trainers.BpeTrainer(
        vocab_size=256 + num_merges,
        min_frequency=min_frequency,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(texts, trainer)
    return made


def library_merges(trained: Tokenizer) -> list[tuple[str, str]]:
    """The merges of such a tokenizer as its file has them: pairs of visible tokens."""
    return [(a, b) for a, b in json.loads(trained.to_str())["model"]["merges"]]


def library_words(text: str) -> list[str]:
    """The words into which the library's own splitter for GPT-2 cuts a text."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]


# The beginning of GPT-2's merges.txt: 63 of its 50,000 lines (OpenAI 2019, MIT license), with "_"
# for the space in front of a word.
GPT2_START = """
_ t|_ a|h e|i n|r e|o n|_t he|e r|_ s|a t|_ w|_ o|e n|_ c|i t|i s|a n|o r|e s|_ b|e d|_ f|in g|_ p
o u|_a n|a l|a r|_t o|_ m|_o f|_ in|_ d|_ h|_an d|i c|a s|l e|_t h|i on|o m|l l|en t|_ n|_ l|s t
_ re|v e|_ e|r o|l y|_b e|_ g|_ T|c t|_ S|i d|o t|_ I|u t|e t|_ A|_ is
"""


def write_gpt2_start(folder: str | Path) -> tuple[Path, Path]:
    """Write the beginning of GPT-2's vocab.json and merges.txt, and return where they are."""
    merges = (
        GPT2_START.replace("_", BYTE_CHARACTERS[ord(" ")]).strip().replace("\n", "|").split("|")
    )
    tokens = [*BYTE_CHARACTERS.values(), *(merge.replace(" ", "") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    files = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
    files[0].write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    files[1].write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    return files


def library_from(vocab_json: str | Path, merges_txt: str | Path) -> Tokenizer:
    """The library's own reading of GPT-2's two files."""
    read = Tokenizer(models.BPE.from_file(str(vocab_json), str(merges_txt)))
    read.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return read


# ---------------------------------------------------------------------------------------- pictures


def plot_word_frequencies(text: str) -> float:
    """How often each word occurs, by rank; returns the share of words that occur once."""
    counted = sorted(Counter(regex.findall(r"\p{L}+", text)).values(), reverse=True)
    once = counted.count(1) / len(counted)
    plt.figure(figsize=(6, 2.5))
    ranks = range(1, len(counted) + 1)
    plt.loglog(ranks, counted, ".-", markersize=3, label="this text")
    plt.loglog(ranks, [counted[0] / rank for rank in ranks], ":", color="gray", label="1 / rank")
    plt.xlabel("rank of the word")
    plt.ylabel("times it occurs")
    plt.title(f"{once:.0%} of {len(counted):,} different words occur only once", fontsize=10)
    plt.legend(fontsize=8)
    plt.show()
    return once


def draw_rows(rows: Sequence[Sequence[str]], title: str) -> None:
    """One word after another merge in each row; what a merge has made is blue."""
    plt.figure(figsize=(6, 0.42 * len(rows) + 0.5))
    for y, row in enumerate(rows):
        x = 0
        for token in row:
            color = "tab:blue" if len(token) > 1 else "lightgray"
            ink = "white" if len(token) > 1 else "black"
            plt.barh(-y, len(token) - 0.08, left=x + 0.04, height=0.7, color=color)
            plt.text(x + len(token) / 2, -y, token, ha="center", va="center", color=ink)
            x += len(token)
    plt.yticks([-y for y in range(len(rows))], [f"{len(row)} symbols" for row in rows], fontsize=8)
    plt.xticks([])
    plt.title(title, fontsize=10)
    plt.gca().set_frame_on(False)
    plt.show()


def plot_lines(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    title: str,
    *,
    log: str = "",
    ticks: bool = False,
) -> None:
    """Lines over `x`; `log` names the logarithmic axes, and `ticks` marks each x by its number."""
    plt.figure(figsize=(6, 2.6))
    for (name, y), style in zip(lines.items(), ("o-", "s--", "^-.", "d:"), strict=False):
        plt.plot(x[: len(y)], y, style, label=name, markersize=4)
    if "x" in log:
        plt.xscale("log", base=2)
    if "y" in log:
        plt.yscale("log")
    if ticks:
        plt.minorticks_off()
        plt.xticks(x, [f"{number:,}" for number in x])
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    if len(lines) > 1:
        plt.legend(fontsize=8)
    plt.title(title, fontsize=10)
    plt.show()


def plot_bars(bars: Mapping[str, float], xlabel: str, title: str, *, marked: str = "") -> None:
    """One horizontal bar for each name; the one that is `marked` has another colour."""
    plt.figure(figsize=(6, 0.36 * len(bars) + 0.9))
    colors = ["tab:orange" if name == marked else "tab:blue" for name in bars]
    drawn = plt.barh(list(bars), list(bars.values()), color=colors)
    whole = all(value == int(value) for value in bars.values())
    plt.bar_label(drawn, fmt="{:,.0f}" if whole else "{:.2f}", padding=3, fontsize=8)
    plt.xlim(0, 1.15 * max(bars.values()))
    plt.gca().invert_yaxis()
    plt.xlabel(xlabel)
    plt.title(title, fontsize=10)
    plt.show()


def plot_groups(
    table: Mapping[str, Sequence[float]],
    groups: Sequence[str],
    ylabel: str,
    title: str,
    *,
    legend: str | None = None,
) -> None:
    """Groups of bars, in each group one bar for each row of the table."""
    _, ax = plt.subplots(figsize=(6, 2.8))
    width = 0.84 / len(table)
    for offset, (name, row) in enumerate(table.items()):
        ax.bar([n + width * offset for n in range(len(groups))], row, width * 0.92, label=name)
    middle = width * (len(table) - 1) / 2
    ax.set_xticks([n + middle for n in range(len(groups))], groups, fontsize=9)
    ax.set_ylabel(ylabel)
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8, title=legend, title_fontsize=8)
    plt.show()


def quietly(train: Any, *arguments: Any, **options: Any) -> Any:
    """Train without the warning that a short text supports few entries."""
    with warnings.catch_warnings(action="ignore"):
        return train(*arguments, **options)

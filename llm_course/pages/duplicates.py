"""What the page on cleaning measures and draws: sketches, bands, and what a leak is worth."""

import lzma
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

import matplotlib.pyplot as plt
import numpy as np

from llm_course.pages.corpora import help_pages
from llm_course.text.cleaning import CleaningStep, clean_corpus, shingles
from llm_course.text.corpus import Corpus, split_documents

P = 2**31 - 1  # a prime
Sketch = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

# ----------------------------------------------------------------------------------------- sketches


def hash_functions(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The numbers a and b of `count` functions (a x + b) mod P: (count,) each."""
    a, b = np.random.default_rng(seed).integers(1, P, size=(2, count), dtype=np.uint64)
    return a, b


def random_pair(similarity: float, union: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Two sets of numbers whose Jaccard similarity is known."""
    items = rng.choice(P, size=union, replace=False).astype(np.uint64)
    shared, rest = np.split(items, [round(similarity * union)])
    return [np.concatenate((shared, half)) for half in np.array_split(rest, 2)]


def orders_with_a_common_first(one: set[str], other: set[str]) -> tuple[int, int]:
    """In how many orders of all shingles both sets have the same first one, and of how many."""
    either = sorted(one | other)
    same = 0
    total = 0
    for order in permutations(range(len(either))):
        place = dict(zip(either, order, strict=True))
        same += min(one, key=place.__getitem__) == min(other, key=place.__getitem__)
        total += 1
    return same, total


def plot_errors(sketch: Sketch, sizes: Sequence[int] = (16, 64, 256, 1024)) -> None:
    """The error of the estimate for J = 1/2 against the theory, over 80 pairs."""
    rng = np.random.default_rng(0)
    errors: dict[int, list[float]] = {size: [] for size in sizes}
    for trial in range(80):
        one, other = random_pair(0.5, 200, rng)
        a, b = hash_functions(max(sizes), seed=trial)
        agree = sketch(one, a, b) == sketch(other, a, b)
        for size in sizes:
            errors[size].append(agree[:size].mean() - 0.5)
    measured = [float(np.std(errors[size])) for size in sizes]
    theory = [0.5 / size**0.5 for size in sizes]
    assert all(0.7 < m / t < 1.4 for m, t in zip(measured, theory, strict=True))
    plt.figure(figsize=(6, 2.4))
    plt.loglog(sizes, theory, "--", label=r"theory, $\sqrt{J(1-J)/k}$")
    plt.loglog(sizes, measured, "o", label="measured, 80 pairs")
    plt.xlabel("k, numbers in a sketch")
    plt.ylabel("error of the estimate")
    plt.title("Four times the numbers halve the error", fontsize=10)
    plt.legend(fontsize=8)
    plt.show()


def plot_bands(
    sketch: Sketch, caught: Callable[..., np.ndarray], arrangements: Sequence[tuple[int, int]]
) -> None:
    """How many pairs are compared, by their similarity: the formula, and 120 pairs for each dot."""
    rng = np.random.default_rng(0)
    similarities = np.arange(1, 11) / 10
    found: dict[tuple[int, int], list[float]] = {key: [] for key in arrangements}
    for number, similarity in enumerate(similarities):
        a, b = hash_functions(128, seed=number)
        pairs = [random_pair(similarity, 60, rng) for _ in range(120)]
        agree = np.array([sketch(one, a, b) == sketch(other, a, b) for one, other in pairs])
        for bands, rows in arrangements:
            found[bands, rows].append(agree.reshape(-1, bands, rows).all(-1).any(-1).mean())
    plt.figure(figsize=(6, 2.5))
    fine = np.linspace(0, 1, 101)
    for bands, rows in arrangements:
        measured = np.array(found[bands, rows])
        assert np.abs(measured - caught(similarities, bands, rows)).max() < 0.15
        line = plt.plot(fine, caught(fine, bands, rows), label=f"{bands} bands of {rows}")
        plt.plot(similarities, measured, "o", color=line[0].get_color())
    plt.axvline(0.8, color="gray", linestyle=":", label="threshold 0.8")
    plt.xlabel("Jaccard similarity")
    plt.ylabel("share compared")
    plt.title("The number of bands decides who is compared", fontsize=10)
    plt.legend(loc="upper left", fontsize=8)
    plt.show()


# ------------------------------------------------------------------------------------ near copies


def jaccard(one: set[str], other: set[str]) -> float:
    """What two sets share, divided by what they have together."""
    return len(one & other) / len(one | other)


def edited(text: str, every: int) -> str:
    """A copy in which every so many words one is another."""
    words = text.split(" ")
    return " ".join("~" if i % every == every // 2 else word for i, word in enumerate(words))


def _share_dropped(make: Callable[[], CleaningStep], changes: int) -> float:
    """Of 30 texts of 204 words, how many copies with so many changed words are dropped."""
    words = [f"w{number}" for number in np.random.default_rng(0).permutation(100_000)]
    hits = 0
    for start in range(0, 30 * 300, 300):
        one = words[start : start + 204]
        other = [
            words[start + 204 + i] if i % 25 == 12 and i < 25 * changes else word
            for i, word in enumerate(one)
        ]
        step = make()
        step(" ".join(one))
        hits += step(" ".join(other)) == ""
    return hits / 30


def check_threshold(make: Callable[[], CleaningStep]) -> None:
    """Copies with three changed words (J = 0.86) must go, those with seven (J = 0.70) must stay."""
    assert _share_dropped(make, 3) > 0.85, "too little"
    assert _share_dropped(make, 7) < 0.15, "too much"


def check_real_text(make: Callable[[], CleaningStep]) -> None:
    """Help pages and edited copies, against the exact similarity of all pairs."""
    originals = [text for text in help_pages(once=True) if 2000 < len(text) < 6000][:9]
    pile = originals + [edited(text, every) for every in (200, 60, 20) for text in originals]
    step = make()
    dropped = [step(text) == "" for text in pile]
    runs = [shingles(text) for text in pile]
    highest = [
        max((jaccard(runs[i], runs[j]) for i in range(j) if not dropped[i]), default=0.0)
        for j in range(len(pile))
    ]
    # three standard errors from the threshold; nearer than that, an estimate may go either way
    clear = [j for j in range(len(pile)) if abs(highest[j] - 0.8) > 0.12]
    assert [dropped[j] for j in clear] == [highest[j] >= 0.8 for j in clear]
    assert sum(highest[j] >= 0.8 for j in clear) >= 3
    assert sum(0.3 < highest[j] < 0.8 for j in clear) >= 3


# ----------------------------------------------------------------------------- what a leak is worth

NAMES = ("with copies", "exact ones removed", "near ones removed", "quotations removed", "control")


def bits_per_byte(train: Sequence[str], val: Sequence[str]) -> float:
    """What a compressor needs for the validation text after it has read the training text."""
    before, after = ("\n".join(texts).encode() for texts in (train, [*train, *val]))
    assert len(after) < 2**20  # what lzma remembers at preset 1
    more = len(lzma.compress(after, preset=1)) - len(lzma.compress(before, preset=1))
    return 8 * more / len("\n".join(val).encode())


def _without(texts: Sequence[str], gone: set[str]) -> list[str]:
    kept = ([part for part in text.split("\n\n") if part not in gone] for text in texts)
    return ["\n\n".join(parts) for parts in kept if parts]


def five_training_texts(
    train: list[str], val: list[str], copies: list[str], originals: set[str], seed: int
) -> list[list[str]]:
    """Training texts that leak less and less, and one that is only shorter."""
    exact = [text for text in train + copies if text not in set(val)]
    near = [text for text in exact if text in originals]
    once = _without(near, {part for text in val for part in text.split("\n\n")})
    others = [part for text in once for part in text.split("\n\n")]
    random.Random(seed).shuffle(others)
    too_long = sum(map(len, near)) - sum(map(len, once))
    enough = int(np.cumsum([len(part) for part in others]).searchsorted(too_long)) + 1
    return [train + copies, exact, near, once, _without(near, set(others[:enough]))]


def leak_scores(seeds: int = 4) -> dict[str, np.ndarray]:
    """Bits per byte of the same validation texts after each of five training texts: (seeds,)."""
    pages = [text for text in help_pages() if len(text) < 12_000]  # without the longest: time
    copies = [edited(text, 200) for text in pages[::2]] + pages[::3]
    steps = ["exact_duplicates", "near_duplicates"]
    kept, _ = clean_corpus(Corpus(pages + copies, "pages, then copies"), steps)
    scores = []
    for seed in range(seeds):
        train, val = split_documents(pages, val_fraction=0.2, seed=seed)
        texts = five_training_texts(train, val, copies, set(kept.documents), seed)
        scores.append([bits_per_byte(text, val) for text in texts])
    return dict(zip(NAMES, np.array(scores).T, strict=True))


def plot_scores(scores: Mapping[str, np.ndarray]) -> None:
    """The mean over the splits as bars, and each split as a dot."""
    plt.figure(figsize=(6, 2.6))
    colors = ["tab:orange"] * 3 + ["tab:blue", "tab:gray"]
    means = [float(values.mean()) for values in scores.values()]
    plt.barh(list(scores), means, color=colors, alpha=0.6)
    most = max(float(values.max()) for values in scores.values())
    for row, (values, mean) in enumerate(zip(scores.values(), means, strict=True)):
        plt.plot(values, [row] * len(values), "k.", markersize=4)
        plt.text(1.05 * most, row, f"{mean:.2f}", va="center", fontsize=8)
    plt.gca().invert_yaxis()
    plt.xlim(0, 1.2 * most)
    plt.xlabel("bits per byte (four splits, and their mean)")
    plt.title("What was seen in training looks easy", fontsize=10)
    plt.show()

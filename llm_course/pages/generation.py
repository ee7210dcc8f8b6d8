"""What the pages of chapter 10 draw and measure: the stories of the storyteller above all."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate
from llm_course.model.sampling import token_probabilities
from llm_course.text.choices import Impossible
from llm_course.text.stories import read_story
from llm_course.text.tokenization import BPETokenizer

# ------------------------------------------------------------------------------------- the stories


def tell(
    model: DecoderModel,
    tokenizer: BPETokenizer,
    prompt: str,
    *,
    tokens: int = 60,
    texts: int = 1,
    seed: int = 0,
    **options: Any,
) -> list[str]:
    """Continuations of `prompt` with these options of `generate`, each with the prompt before it.

    A story ends where the model ends it.
    """
    end = tokenizer.eos_token_id
    assert end is not None
    prompt_ids = [end, *tokenizer.encode(prompt)]
    ids = generate(
        model,
        torch.tensor([prompt_ids]),
        max_new_tokens=tokens,
        num_return_sequences=texts,
        stop_token_ids=[end],
        pad_token_id=end,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    rows = [row[1:] for row in ids.tolist()]
    rows = [row[: row.index(end)] if end in row else row for row in rows]
    return [tokenizer.decode(row) for row in rows]


def first_impossible(text: str, prompt: str = "") -> int:
    """Where a story says the first thing that no easy story could say; its length if it doesn't.

    The `prompt`, with which it begins, is taken to be possible.
    """
    try:
        read_story(text, "easy")
    except Impossible as fault:
        return max(fault.position, len(prompt))
    return len(text)


def fault_in(text: str) -> str:
    """Why the story can't go on at its `>>>`, in brackets; "" if nothing in it is impossible."""
    try:
        read_story(text, "easy")
    except Impossible as fault:
        why = fault.why or f"expected something like {fault.expected[0].strip()!r} here"
        return f"[{why}]"
    return ""


def marked(text: str, prompt: str = "") -> str:
    """The text on lines of equal width, with `>>>` where it first says something impossible."""
    place = first_impossible(text, prompt)
    if place < len(text):
        text = f"{text[:place].rstrip()} >>> {text[place:].lstrip()}"
    return fill(" ".join(text.split()), 98)


def difference(texts: Sequence[str]) -> float:
    """How much texts differ: the share of word triples that two of them do not have in common.

    0 for equal texts, 1 where no triple of words occurs in two of them.
    """
    triples = []
    for text in texts:
        words = text.split()
        triples.append(set(zip(words, words[1:], words[2:], strict=False)))
    shares = [len(a ^ b) / max(len(a | b), 1) for a, b in combinations(triples, 2)]
    return sum(shares) / len(shares)


class Reach(NamedTuple):
    """How far a sampler's stories get, in characters, and how much they differ."""

    characters: float
    difference: float


def reach(
    model: DecoderModel,
    tokenizer: BPETokenizer,
    prompt: str,
    *,
    tokens: int,
    texts: int,
    seed: int = 0,
    **options: Any,
) -> Reach:
    """Measure some texts: how much of what the model wrote comes before the first impossible word,
    on average, and how much the texts differ.
    """
    told = tell(model, tokenizer, prompt, tokens=tokens, texts=texts, seed=seed, **options)
    new = [first_impossible(text, prompt) - len(prompt) for text in told]
    return Reach(sum(new) / len(new), difference([text[len(prompt) :] for text in told]))


# ------------------------------------------------------------------------- what the model is given


@contextmanager
def recorded_positions(model: DecoderModel) -> Iterator[list[Tensor]]:
    """Note the positions that each call of the model inside the block is given."""
    calls: list[Tensor] = []

    def note(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.append(options["position_ids"])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


@contextmanager
def padding_counted(model: DecoderModel, attention_mask: Tensor) -> Iterator[None]:
    """Plant a mistake: inside the block, positions count a row's padding as well as its tokens."""
    padding = (attention_mask == 0).sum(dim=1, keepdim=True)  # (B, 1)

    def shift(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return args, options | {"position_ids": options["position_ids"] + padding}

    hook = model.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def untrained_model(**changes: Any) -> DecoderModel:
    """A tiny model with large random weights: each token depends on everything that it reads."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.5,
    }
    return DecoderModel(ModelConfig(**sizes | changes)).eval().requires_grad_(False)


def llama_pair() -> tuple[Any, DecoderModel]:
    """Hugging Face's Llama with random weights, and ours with the same ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = untrained_model(vocab_size=40, max_position_embeddings=64)
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": ours.config.rms_norm_eps,
        "tie_word_embeddings": False,
    }
    theirs = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    state = {
        name if name.startswith("lm_head") else f"model.{name.removeprefix('embedding.')}": weight
        for name, weight in ours.state_dict().items()
    }
    theirs.load_state_dict(state)
    return theirs, ours


# -------------------------------------------------------------------------------------- pictures


def show_bars(groups: Mapping[str, Tensor], title: str) -> None:
    """Groups of bars, one for each distribution over the same few tokens."""
    size = len(next(iter(groups.values())))
    plt.figure(figsize=(6, 2.3))
    for i, (name, heights) in enumerate(groups.items()):
        places = [(size + 1) * i + token for token in range(size)]
        bars = plt.bar(places, heights.tolist(), label=name)
        plt.bar_label(bars, fmt="%.2f", fontsize=8)
    ticks = [(size + 1) * i + token for i in range(len(groups)) for token in range(size)]
    plt.xticks(ticks, [str(token + 1) for token in range(size)] * len(groups))
    plt.xlabel("token")
    plt.ylabel("probability")
    plt.ylim(0, 0.8)
    plt.legend(fontsize=8)
    plt.title(title)
    plt.show()


def logits_along(model: DecoderModel, tokenizer: BPETokenizer, text: str) -> Tensor:
    """The logits (T, V) of each token of `text`, a document, and of the one that follows it."""
    assert tokenizer.eos_token_id is not None
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text)]])
    with torch.no_grad():
        return model(ids).logits[0]


def next_logits(model: DecoderModel, tokenizer: BPETokenizer, text: str) -> Tensor:
    """The logits (1, V) of the token that follows `text` at the start of a document."""
    return logits_along(model, tokenizer, text)[-1:]


def hugging_faces_chain(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> Tensor:
    """What Hugging Face's rules leave of the logits (B, V) after the texts `ids` (B, T)."""
    from transformers.generation import logits_process as rules

    chain: tuple[Any, ...] = (
        rules.RepetitionPenaltyLogitsProcessor(repetition_penalty),
        rules.TemperatureLogitsWarper(temperature),
        rules.TopKLogitsWarper(top_k),
        rules.TopPLogitsWarper(top_p),
        rules.MinPLogitsWarper(min_p),
    )
    for rule in chain:
        logits = rule(ids, logits)
    return logits.softmax(-1)


def draw_candidates(
    ax: Axes, tokenizer: BPETokenizer, probabilities: Tensor, before: Tensor, bars: int = 10
) -> None:
    """The likeliest tokens (V,): solid as the rules leave them, outlined as they were `before`."""
    best = before.argsort(descending=True)[:bars]
    labels = [repr(tokenizer.decode([token]))[1:-1] for token in best.tolist()]
    places = range(len(labels))
    ax.barh(places, before[best].tolist(), color="none", edgecolor="tab:gray", height=0.8)
    ax.barh(places, probabilities[best].tolist(), color="tab:blue", alpha=0.75, height=0.5)
    ax.set_yticks(places, [label.replace(" ", "\u00b7") for label in labels], fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.set_xlabel("probability")


def show_next(
    model: DecoderModel,
    tokenizer: BPETokenizer,
    prompt: str,
    *,
    tokens: int = 40,
    seed: int = 0,
    **options: Any,
) -> None:
    """The next token's distribution before and after the rules, and a continuation below it."""
    logits = next_logits(model, tokenizer, prompt)
    left = token_probabilities(logits, **options)[0]
    (text,) = tell(model, tokenizer, prompt, tokens=tokens, seed=seed, **options)
    fig, ax = plt.subplots(figsize=(7, 4.6))
    draw_candidates(ax, tokenizer, left, logits[0].softmax(-1))
    count = int((left > 0).sum())
    may_follow = "1 token may follow" if count == 1 else f"{count} tokens may follow"
    ax.set_title(f"{may_follow} (outlined: without any rule)", fontsize=10)
    fig.subplots_adjust(bottom=0.34, left=0.16, top=0.92)
    fig.text(0.02, 0.2, marked(text, prompt), fontsize=8.5, family="monospace", va="top")
    plt.show()


def show_rules(
    rows: Mapping[str, Tensor], rules: Mapping[str, Any], *, shown: int = 40
) -> dict[tuple[str, str], int]:
    """What each rule leaves of each row of logits (1, V), by rank; returns how many tokens."""
    counts = {}
    size = (7, 1.6 * len(rows))
    fig, axes = plt.subplots(len(rows), len(rules), figsize=size, sharex=True, sharey="row")
    for line, (place, logits) in zip(axes, rows.items(), strict=True):
        for ax, (name, rule) in zip(line, rules.items(), strict=True):
            left = rule(logits).softmax(-1)[0].sort(descending=True).values
            counts[place, name] = int((left > 0).sum())
            ax.stairs(left[:shown], fill=True)
            ax.set_title(f"{name}: {counts[place, name]} left", fontsize=8)
        line[0].set_ylabel(place, fontsize=9)
    fig.supxlabel("rank of the token", fontsize=9, y=0.03)
    fig.suptitle("Top-k cuts at one rank; the others follow the shape", fontsize=11)
    fig.tight_layout()
    plt.show()
    return counts


def show_reach(
    by_temperature: Mapping[float, Reach], others: Mapping[float, tuple[str, Reach]]
) -> None:
    """How far stories get and how much they differ, over temperature; `others` with their rule."""
    _, left = plt.subplots(figsize=(6.5, 3.2))
    right = left.twinx()
    temperatures = list(by_temperature)
    far = [found.characters for found in by_temperature.values()]
    differ = [found.difference for found in by_temperature.values()]
    left.plot(temperatures, far, "o-", color="tab:blue")
    right.plot(temperatures, differ, "s--", color="tab:orange")
    for (t, (name, found)), marker in zip(others.items(), "^*", strict=False):
        left.plot(t, found.characters, marker, color="tab:blue", markersize=10, label=name)
        right.plot(t, found.difference, marker, color="tab:orange", markersize=10)
    left.set_xlabel("temperature")
    left.set_ylabel("characters before a slip", color="tab:blue")
    left.set_ylim(bottom=0)
    right.set_ylabel("difference of the texts", color="tab:orange")
    right.set_ylim(-0.03, 1.05)
    left.legend(fontsize=8, loc="lower center")
    left.set_title("A little heat helps; too much breaks the story")
    plt.show()


def show_padding(lengths: Sequence[int]) -> None:
    """Prompts padded on the left and on the right, with their positions; the newest token dark."""
    width = max(lengths)
    fig, axes = plt.subplots(1, 2, figsize=(6, 2.0))
    for ax, side in zip(axes, ("left", "right"), strict=True):
        shade = torch.zeros(len(lengths), width)
        for row, n in enumerate(lengths):
            start = width - n if side == "left" else 0
            shade[row, start : start + n] = 1
            shade[row, start + n - 1] = 2
            for position in range(n):
                color = "white" if position == n - 1 else "black"
                place = (start + position, row)
                ax.text(*place, str(position), ha="center", va="center", color=color)
        ax.imshow(shade, cmap="Blues", vmin=0, vmax=2.6, aspect="auto")
        ax.set(title=f"padding on the {side}", xlabel="column", yticks=range(len(lengths)))
    axes[0].set_ylabel("row")
    fig.suptitle("Only on the left do the newest tokens share a column")
    fig.tight_layout()
    plt.show()


def show_shares(shares: Mapping[str, float], ylabel: str, title: str) -> None:
    """One bar for each way of doing something: the first is the right one."""
    plt.figure(figsize=(6, 2.3))
    colors = ["tab:blue"] + ["tab:orange"] * (len(shares) - 1)
    bars = plt.bar(list(shares), list(shares.values()), color=colors)
    plt.bar_label(bars, fmt="%.2f", fontsize=9)
    plt.margins(y=0.12)
    plt.ylabel(ylabel)
    plt.title(title)
    plt.show()


def show_passes(prompt: int, new: int) -> tuple[int, int]:
    """Which tokens each call reads without and with a cache; returns how many passes that makes."""
    calls = torch.arange(prompt, prompt + new)[:, None]  # how many tokens the text has in each call
    places = torch.arange(prompt + new - 1)
    known = places < calls
    fresh = known & (places >= torch.where(calls == prompt, 0, calls - 1))
    fig, axes = plt.subplots(1, 2, figsize=(6, 2.3), sharey=True)
    pictures = {"without a cache": known.int() + fresh, "with a cache": 2 * fresh}
    extent = (-0.5, len(places) - 0.5, new + 0.5, 0.5)
    for ax, (name, picture) in zip(axes, pictures.items(), strict=True):
        ax.imshow(picture, cmap="Blues", vmin=0, vmax=2.6, aspect="auto", extent=extent)
        ax.set_title(f"{name}: {int((picture > 0).sum())} passes", fontsize=9)
        ax.set_xlabel("position in the text")
    axes[0].set_ylabel("call")
    fig.tight_layout()
    plt.show()
    return int(known.sum()), int(fresh.sum())


def show_lines(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    title: str,
    *,
    log: bool = False,
) -> None:
    """Lines over `x`, on two logarithmic axes if `log`."""
    plt.figure(figsize=(6, 2.6))
    for (name, y), style in zip(lines.items(), ("o-", "s--", "^-.", ":"), strict=False):
        plt.plot(x, y, style, label=name, markersize=4)
    if log:
        plt.xscale("log")
        plt.yscale("log")
    plt.xlabel(xlabel)
    plt.ylabel(ylabel)
    plt.legend(fontsize=8)
    plt.title(title)
    plt.show()

"""What the page on batches trains, draws and lets the reader move: rows of little stories."""

import html
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from IPython.display import display
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import generate
from llm_course.pages.tokens import stories
from llm_course.text.batches import (
    IGNORE_INDEX,
    PackedDataset,
    ResumableBatchSampler,
    SupervisedDataset,
    shift,
)
from llm_course.text.tokenization import CHAT_TOKENS, SPECIAL_TOKENS, BPETokenizer

Batch = dict[str, Tensor]
Row = list[int]
MakeBatch = Callable[[Sequence[Row]], Batch]
LossOf = Callable[[Tensor, Tensor], Tensor]

# ------------------------------------------------------------------------------------------- texts


@cache
def story_tokenizer() -> BPETokenizer:
    """A tokenizer of 1,400 entries, trained on 200 stories; it knows the roles of a chat."""
    special = [*SPECIAL_TOKENS, *CHAT_TOKENS]
    return BPETokenizer.train(stories(200, "easy"), vocab_size=1400, special_tokens=special)


def end_of_text() -> int:
    """The id that ends a text, and separates packed documents."""
    end = story_tokenizer().eos_token_id
    assert end is not None
    return end


def packed_stories(count: int = 200) -> np.ndarray:
    """The ids of some stories in one long row, with a separator after each."""
    tokenizer = story_tokenizer()
    ids = [[*tokenizer.encode(text), end_of_text()] for text in stories(count, "easy")]
    return np.concatenate([np.array(row, dtype=np.uint16) for row in ids])


@cache
def paragraphs(longest: int = 32) -> list[Row]:
    """The paragraphs of some stories as ids, each with the end-of-text token at its end."""
    tokenizer = story_tokenizer()
    texts = [part for text in stories(800, "easy") for part in text.split("\n\n")]
    rows = [[*tokenizer.encode(text), end_of_text()] for text in texts]
    return [row for row in rows if len(row) <= longest]


def prompt_and_answer(question: str, answer: str) -> tuple[Row, Row]:
    """The ids of a question, with the assistant's turn opened, and those of the answer."""
    tokenizer = story_tokenizer()
    user = {"role": "user", "content": question}
    reply = {"role": "assistant", "content": answer}
    prompt = tokenizer.encode_chat([user], add_generation_prompt=True)
    whole = tokenizer.encode_chat([user, reply])
    assert whole[: len(prompt)] == prompt, "the conversation doesn't begin with its prompt"
    return prompt, whole[len(prompt) :]


# ---------------------------------------------------------------------------------- the two runs


def popular_batch(rows: Sequence[Row]) -> Batch:
    """A batch as many programs make it; the page says what is wrong with it."""
    end = end_of_text()
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[end] * (width - len(row))] for row in rows])
    labels = ids.masked_fill(ids == end, IGNORE_INDEX)
    return {"input_ids": ids[:, :-1], "labels": labels[:, 1:]}


def popular_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss that goes with it."""
    return our_loss(logits[:, :-1], labels[:, 1:])


def our_batch(rows: Sequence[Row]) -> Batch:
    """The same rows by `SupervisedDataset`: the first token is the prompt, the rest the answer."""
    pad = story_tokenizer().pad_token_id
    data = SupervisedDataset([(row[:1], row[1:]) for row in rows], pad_token_id=pad, max_length=99)
    return data.__getitems__(range(len(rows)))


def our_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy over the targets."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def padded_batch(rows: Sequence[Row]) -> Batch:
    """The same rows, in which the padding is a target like any other token."""
    pad = story_tokenizer().pad_token_id
    assert pad is not None
    tensors = [torch.tensor(row) for row in rows]
    return shift(pad_sequence(tensors, batch_first=True, padding_value=pad))


STEPS = 160
ROWS = 16  # of a batch


def _order(position: int = 0) -> ResumableBatchSampler:
    return ResumableBatchSampler(len(paragraphs()), ROWS, seed=0, epoch=0, position=position)


def unread_paragraphs(steps: int = 20) -> list[Row]:
    """The paragraphs of the steps that would follow the training."""
    batches = islice(_order(position=STEPS), steps)
    return [paragraphs()[index] for indices in batches for index in indices]


def train(
    make_batch: MakeBatch, loss_of: LossOf, *, steps: int = STEPS
) -> tuple[DecoderModel, list[float]]:
    """A tiny decoder, trained on batches of sixteen paragraphs; also its loss at each step."""
    torch.manual_seed(0)
    size = story_tokenizer().vocab_size
    shape = dict(hidden_size=64, num_layers=1, num_heads=4, max_position_embeddings=64)
    model = DecoderModel(ModelConfig(vocab_size=size, **shape))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for indices in islice(_order(), steps):
        batch = make_batch([paragraphs()[index] for index in indices])
        loss = loss_of(model(batch["input_ids"]).logits, batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def measured_loss(model: DecoderModel, batch: Batch) -> float:
    """The mean loss of a model over the targets of one batch."""
    return our_loss(model(batch["input_ids"]).logits, batch["labels"]).item()


def continue_text(model: DecoderModel, prompt: str, *, most: int = 45) -> str:
    """What a model adds to a prompt until it ends the text, or `most` tokens at most."""
    tokenizer = story_tokenizer()
    ids = torch.tensor([tokenizer.encode(prompt)])
    row = generate(
        model,
        ids,
        max_new_tokens=most,
        temperature=0.5,
        stop_token_ids=[end_of_text()],
        generator=torch.Generator().manual_seed(1),
    )[0]
    return tokenizer.decode(row.tolist())


# ---------------------------------------------------------------------------------------- pictures

COLORS = ("74,134,200", "217,128,50", "77,154,91", "170,100,180")


def plot_losses(curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Training losses over steps, each the mean of the ten steps up to there."""
    plt.figure(figsize=(6, 2.5))
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        smooth = [np.mean(losses[max(0, step - 9) : step + 1]) for step in range(len(losses))]
        plt.plot(smooth, style, label=name)
    plt.xlabel("step")
    plt.ylabel("loss (nats per target)")
    plt.title(title, fontsize=10)
    plt.legend(fontsize=8)
    plt.show()


def plot_targets(counts: Mapping[str, Sequence[int]]) -> None:
    """How often each id of a row is a target, for several strides."""
    plt.figure(figsize=(6, 2.2))
    for number, (name, row) in enumerate(counts.items()):
        places = np.arange(len(row)) + 0.4 * number - 0.2
        plt.bar(places, row, width=0.4, label=name)
    plt.xticks(range(len(row)))
    plt.xlabel("id")
    plt.ylabel("times a target")
    plt.title("With stride T, each id is a target at most once", fontsize=10)
    plt.legend(fontsize=8)
    plt.show()


def plot_waste(lengths: Sequence[int], *, T: int, B: int) -> dict[str, float]:
    """How much of its work each way of batching wastes on documents of these lengths."""
    mixed = np.random.default_rng(0).permutation(lengths)
    ids = sum(lengths) + len(lengths)  # with a separator after each document
    waste = {
        "padded": _wasted_by_padding(mixed, B),
        "sorted, padded": _wasted_by_padding(np.sort(lengths), B),
        "packed": (ids - 1) % T / ids,
    }
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.5), width_ratios=(2, 3))
    axes[0].hist(lengths, bins=np.geomspace(min(lengths), max(lengths), 16).tolist())
    axes[0].set(xlabel="tokens in a document", ylabel="documents", xscale="log")
    bars = axes[1].barh(list(waste), [100 * share for share in waste.values()])
    axes[1].bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    axes[1].set(xlabel="positions that teach nothing (%)", xlim=(0, 95))
    axes[1].invert_yaxis()
    figure.tight_layout()
    plt.show()
    return waste


def _wasted_by_padding(lengths: np.ndarray, B: int) -> float:
    batches = np.split(lengths, range(B, len(lengths), B))
    return 1 - lengths.sum() / sum(batch.max() * len(batch) for batch in batches)


def plot_masks(masks: Mapping[str, Tensor], tokens: Sequence[Any]) -> None:
    """Who may read whom: a filled square for each pair that is allowed."""
    figure, axes = plt.subplots(1, len(masks), figsize=(6, 3))
    for ax, (name, mask) in zip(axes, masks.items(), strict=True):
        ax.imshow(mask, cmap="Blues", vmax=1.6)
        ax.set_title(name, fontsize=10)
        ax.set(xlabel="the token that is read", xticks=range(len(tokens)))
        ax.set(ylabel="the token that reads", yticks=range(len(tokens)))
        ax.set_xticklabels(tokens)
        ax.set_yticklabels(tokens)
    figure.tight_layout()
    plt.show()


def plot_shares(steps: Sequence[Sequence[Sequence[int]]], places: int) -> None:
    """A row for each step of an epoch, and a colour for each rank's items in it."""
    figure, ax = plt.subplots(figsize=(5.5, 0.5 * len(steps) + 0.9))
    for y, shares in enumerate(steps):
        items = [(rank, item) for rank, share in enumerate(shares) for item in share]
        for x, (rank, item) in enumerate(items):
            ax.barh(y, 0.94, left=x, height=0.8, color=f"C{rank}", alpha=0.45)
            ax.text(x + 0.47, y, str(item), ha="center", va="center")
    for rank in range(len(steps[0])):
        ax.barh(0, 0, color=f"C{rank}", alpha=0.45, label=f"rank {rank}")
    ax.set(xlim=(0, places), yticks=range(len(steps)), ylabel="step", xticks=[])
    ax.invert_yaxis()
    ax.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)
    ax.set_frame_on(False)
    plt.show()


# ------------------------------------------------------------------------------- batches, as tables


COLUMNS = 16  # of a table; a longer row goes on in the next one


def _named(tokenizer: BPETokenizer, token: int) -> str:
    """A token without the space before it; a separator is a square, no target a dot."""
    if token == IGNORE_INDEX:
        return "·"
    text = tokenizer.decode([token]).replace("\n", "↵").replace("<|eos|>", "■")
    return text.strip().removeprefix("<|im_").removesuffix("|>").removeprefix("<|") or "␣"


def _line(texts: Sequence[str], colors: Sequence[str]) -> str:
    style = "padding:1px 5px;text-align:center;border:0"
    cells = (
        f'<td style="{style};background:{color}">{html.escape(text)}</td>'
        for text, color in zip(texts, colors, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def show_batch(batch: Batch, names: Sequence[str] | None = None, *, title: str = "") -> None:
    """Each row's tokens, with its labels under them; one colour for each document of a row.

    Without document ids the colour says which positions have a target.
    """
    tokenizer = story_tokenizer()
    parts = [title] if title else []
    plain = [title] if title else []
    for number, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        groups = (labels != IGNORE_INDEX).long()
        if "document_ids" in batch:
            groups = batch["document_ids"][number]
        colors = [f"rgba({COLORS[group % len(COLORS)]},0.35)" for group in groups.tolist()]
        above = [_named(tokenizer, token) for token in ids.tolist()]
        below = [_named(tokenizer, token) for token in labels.tolist()]
        name = names[number] if names else f"row {number}"
        parts.append(f"<div><b>{name}</b></div>")
        for start in range(0, len(above), COLUMNS):
            piece = slice(start, start + COLUMNS)
            inputs = _line(above[piece], colors[piece])
            answers = _line(below[piece], [""] * len(below[piece]))
            parts.append(f'<table style="margin:0 0 4px 0">{inputs}{answers}</table>')
        plain.append(f"{name}: {' '.join(above)}\nlabel: {' '.join(below)}")
    display({"text/html": "".join(parts), "text/plain": "\n".join(plain)}, raw=True)


def look_at_batch(
    tokens: np.ndarray, *, T: int, B: int, epoch: int, position: int, ranks: int
) -> None:
    """The global batch at a place of a run, as several ranks share it."""
    data = PackedDataset(tokens, T, separator_id=end_of_text())
    here: dict[str, Any] = {"seed": 0, "epoch": epoch, "position": position, "world_size": ranks}
    samplers = [ResumableBatchSampler(len(data), B, rank=rank, **here) for rank in range(ranks)]
    shares = [next(iter(sampler), []) for sampler in samplers]
    indices = [index for share in shares for index in share]
    names = [f"rank {rank}, row {i}" for rank, share in enumerate(shares) for i in share]
    total = position + len(samplers[0])
    title = (
        f"{len(data):,} rows of {T} in the corpus, step {position} of {total:,} in epoch {epoch}"
    )
    show_batch(data.__getitems__(indices), names, title=title)

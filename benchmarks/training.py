"""A training step, forward to AdamW, beside Hugging Face's Llama with the same weights on the same
batch.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measure import BF16, Row, alternate, cpu_kind, matmul_rate
from benchmarks.models import BATCH, SHAPES, batch_of, hugging_face, loss_on, ours
from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import flops_per_token

GOALS = {
    ("small", "fp32 eager"): (1.15, 1.05),
    ("small", "bf16 eager"): (1.1, 1.4),
    ("small", "bf16 compiled"): (1.2, 1.4),
    ("small", "best"): (2.8, 4.0),
    ("tiny", "best"): (2.3, 2.6),
}


class Peer(NamedTuple):
    """A library whose model takes a step beside ours."""

    name: str
    like: Callable[[DecoderModel], nn.Module]  # its own model with the weights of ours
    # of ids and labels: gives the mean loss of its model
    loss_on: Callable[[Tensor, Tensor], Callable[[nn.Module], Tensor]]
    goals: dict[tuple[str, str], tuple[float, float]]


def their_loss(ids: Tensor, labels: Tensor) -> Callable[[nn.Module], Tensor]:
    """The mean loss of Hugging Face's model on a batch."""
    return lambda model: model(input_ids=ids, labels=labels, shift_labels=labels).loss


def step_of(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, bf16: bool, compiled: bool
) -> Callable[[], Tensor]:
    """One optimizer step of `model`."""
    model.train()
    device = next(model.parameters()).device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model

    def step() -> Tensor:
        with torch.autocast(device, dtype=BF16) if bf16 else nullcontext():
            loss = loss_of(run)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def candidates(
    shape: str, modes: dict[str, dict[str, bool]], peer: Peer
) -> dict[str, Callable[[], Tensor]]:
    """Our step and the peer's in each of `modes`, each with a model of its own; equal losses are
    asserted first.
    """
    (B, T) = BATCH[shape]
    config = SHAPES[shape]
    assert config.vocab_size is not None
    ids, labels = batch_of(config.vocab_size, B, T)
    steps = {}
    for mode, settings in modes.items():
        model = ours(config)
        steps[f"{mode}, ours"] = step_of(model, loss_on(ids, labels), **settings)
        steps[f"{mode}, theirs"] = step_of(peer.like(model), peer.loss_on(ids, labels), **settings)
    first = {name: float(step().detach()) for name, step in steps.items()}
    wanted = next(iter(first.values()))
    assert all(abs(value - wanted) < 0.02 for value in first.values()), first
    return steps


def step_rows(peer: Peer, *, full: bool) -> Iterator[Row]:
    """Both shapes in each mode, and our best beside the peer as it comes."""
    modes = {
        "fp32 eager": dict(bf16=False, compiled=False),
        "fp32 compiled": dict(bf16=False, compiled=True),
    }
    # elsewhere each product would take a hundred times as long
    if cpu_kind() != "no bf16 instructions":
        modes |= {
            "bf16 eager": dict(bf16=True, compiled=False),
            "bf16 compiled": dict(bf16=True, compiled=True),
        }
    ceiling = matmul_rate(4096, 1024, 384, BF16 if "bf16 eager" in modes else torch.float32)
    for shape, rounds in (("small", 9 if full else 5), ("tiny", 60)):
        seconds = alternate(candidates(shape, modes, peer), rounds=rounds, warmup=2)
        flops = (
            flops_per_token(SHAPES[shape], BATCH[shape][1]).training
            * BATCH[shape][0]
            * BATCH[shape][1]
        )

        best = min(modes, key=lambda mode: seconds[f"{mode}, ours"])  # noqa: B023
        pairs = [(mode, mode, f"{peer.name}, same mode", mode) for mode in modes]
        for mode, theirs, beside, goal in [
            *pairs,
            (best, "fp32 eager", f"{peer.name}, its default (fp32 eager)", "best"),
        ]:
            mine = seconds[f"{mode}, ours"]
            yield Row(
                f"training step, {shape}, {mode}",
                beside,
                1e3 * mine,
                1e3 * seconds[f"{theirs}, theirs"],
                goals=peer.goals.get((shape, goal)),
                share=f"{flops / mine / ceiling:.2f} of the matrix ceiling",
            )


def rows(*, full: bool) -> Iterator[Row]:
    return step_rows(Peer("HF Llama", hugging_face, their_loss, GOALS), full=full)

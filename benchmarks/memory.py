"""Peak memory of a training step with a large vocabulary, each way in a process of its own."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.measure import Row
from benchmarks.models import BATCH, SMALL, batch_of, loss_on, ours
from llm_course.training.launch import launch
from llm_course.training.monitoring import peak_memory_bytes

VOCAB = 32_768


def peak(way: str) -> float:
    """The most bytes that the process has held."""
    (B, T) = BATCH["small"]
    model = ours(replace(SMALL, vocab_size=VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids, labels = batch_of(VOCAB, B, T)
    if way == "chunked":
        loss = loss_on(ids, labels)(model)
    else:
        loss = F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    return float(peak_memory_bytes(torch.device("cpu")))


def rows(*, full: bool) -> Iterator[Row]:
    ours_bytes, theirs_bytes = (launch(peak, 1, way) / 1e6 for way in ("chunked", "plain"))
    what = f"peak memory, small at V={VOCAB}, a step"
    yield Row(what, "plain cross-entropy", ours_bytes, theirs_bytes, unit="MB", goals=(1.67, 1.67))

"""What the engine, its checkpoints and its processes cost beside the bare loop, `torch.save` and
one process.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Row, alternate
from benchmarks.models import BATCH, SHAPES, SMALL, batch_of, loss_on, ours
from benchmarks.training import step_of
from llm_course.text.data import BaseDataModule
from llm_course.training.callbacks import MetricsLogger, TensorBoardLogger
from llm_course.training.checkpointing import Checkpointer, CheckpointManager, load_checkpoint
from llm_course.training.config import (
    Config,
    DataConfig,
    DistributedConfig,
    LoggingConfig,
    OptimizationConfig,
    TrainingConfig,
)
from llm_course.training.distributed import DistributedManager
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.launch import launch
from llm_course.training.monitoring import PerformanceMonitor, RandomTokens
from llm_course.training.task import LanguageModelingTask

STEPS = {"tiny": 400, "small": 16}


class Task(LanguageModelingTask):
    """Random tokens have no bytes to count."""

    def metrics(self, loss: float, data: BaseDataModule) -> dict[str, float]:
        return {}


class Alternately(Callback):
    """Takes a step of the bare loop after each step of the engine, and the seconds of both."""

    def __init__(self, bare: Callable[[], object]) -> None:
        self.bare = bare
        self.start = 0.0
        self.engine_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.checkpoint_seconds = 0.0

    def on_step_end(self, engine: TrainingEngine, metrics: dict[str, Any]) -> None:
        end = time.perf_counter()
        self.bare()
        self.engine_seconds.append(end - self.start)
        self.start = time.perf_counter()
        self.bare_seconds.append(self.start - end)

    # the Checkpointer stands before this one, and has saved
    def on_train_end(self, engine: TrainingEngine) -> None:
        self.checkpoint_seconds = time.perf_counter() - self.start


def whole_engine(shape: str) -> tuple[float, float]:
    """Milliseconds of a step with loader, metrics, TensorBoard, speed, a checkpoint every 500
    steps; and those of a bare one.
    """
    (B, T) = BATCH[shape]
    steps = STEPS[shape]
    config = Config(
        model=SHAPES[shape],
        data=DataConfig(sequence_length=T, vocab_size=4096),
        training=TrainingConfig(
            batch_size=B, max_steps=steps, eval_interval=10**9, device="cpu", precision="fp32"
        ),
        optimization=OptimizationConfig(schedule="constant", warmup_steps=0),
        logging=LoggingConfig(progress=False),
    )
    loss_of = loss_on(*batch_of(SHAPES[shape].vocab_size or 0, B, T))
    both = Alternately(step_of(ours(SHAPES[shape]), loss_of, bf16=False, compiled=False))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpointer = Checkpointer(CheckpointManager(folder / "checkpoints"), save_interval=500)
        watchers = [
            PerformanceMonitor(),
            MetricsLogger(folder),
            TensorBoardLogger(folder),
            checkpointer,
            both,
        ]
        TrainingEngine(
            config, Task(config), RandomTokens(config, num_batches=steps), watchers
        ).run()
    # the first step warms up, and the last one validates, which the bare step does not
    engine, bare = (
        1e3 * statistics.median(seconds[1:-1])
        for seconds in (both.engine_seconds, both.bare_seconds)
    )
    return engine + 1e3 * both.checkpoint_seconds / 500, bare


def two_processes() -> float:
    """Seconds of a step of two processes with one thread each, together the batch of *small*."""
    torch.set_num_threads(1)
    with DistributedManager(DistributedConfig(world_size=2), device="cpu"):
        model = DistributedDataParallel(ours(SMALL), gradient_as_bucket_view=True)
        return time_steps(model, BATCH["small"][0] // 2)


def one_process() -> float:
    torch.set_num_threads(2)
    return time_steps(ours(SMALL), BATCH["small"][0])


def time_steps(model: nn.Module, batch_size: int, *, steps: int = 5) -> float:
    loss_of = loss_on(*batch_of(SMALL.vocab_size or 0, batch_size, BATCH["small"][1]))
    step = step_of(model, loss_of, bf16=False, compiled=False)
    seconds = []
    step()
    for _ in range(steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def checkpoint_rows(*, full: bool) -> Iterator[Row]:
    """Ours verifies: hashes while writing and while reading, and waits for the disk. `torch.save`
    does neither.
    """
    model = ours(SMALL)
    optimizer = torch.optim.AdamW(model.parameters())
    model(
        torch.zeros(1, 8, dtype=torch.long), labels=torch.zeros(1, 8, dtype=torch.long)
    ).loss_sum.backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": {"step": 1}}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        manager = CheckpointManager(Path(folder, "ours"), keep_last=1)
        step = iter(range(1, 10**6))
        rounds = 15 if full else 7
        saved = alternate(
            {
                "ours": lambda: manager.save(state, step=next(step)),
                "theirs": lambda: torch.save(state, Path(folder, "theirs.pt")),
            },
            rounds=rounds,
        )
        path = manager.latest()
        assert path is not None
        loaded = alternate(
            {
                "ours": lambda: load_checkpoint(path),
                "theirs": lambda: torch.load(Path(folder, "theirs.pt")),
            },
            rounds=rounds,
        )
    size = f"{3 * sum(p.nbytes for p in model.parameters()) / 1e6:.0f} MB"
    for what, seconds, peer in (("save", saved, "torch.save"), ("load", loaded, "torch.load")):
        times = 1e3 * seconds["ours"], 1e3 * seconds["theirs"]
        yield Row(f"checkpoint, {what}, {size}, with hashes", peer, *times, goals=(0.67, 0.67))


def rows(*, full: bool) -> Iterator[Row]:
    for shape in ("tiny", "small"):
        yield Row(
            f"whole engine, a step, {shape}",
            "the bare step on one batch",
            *whole_engine(shape),
            goals=(0.97, 0.97),
        )
    yield from checkpoint_rows(full=full)
    ddp = []
    single = []
    for _ in range(3):
        ddp.append(launch(two_processes, 2))
        single.append(launch(one_process, 1))
    what = "DDP, two processes of one thread, a step, small"
    peer = "one process of two threads"
    yield Row(
        what, peer, 1e3 * statistics.median(ddp), 1e3 * statistics.median(single), goals=(1.0, 0.9)
    )

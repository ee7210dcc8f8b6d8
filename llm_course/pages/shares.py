"""What the processes on the pages of chapter 15 train: a tiny decoder, and rows to share."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.moe import Experts
from llm_course.pages.engine import Paragraphs, tiny_model, told
from llm_course.pages.launched import sign
from llm_course.pages.storyteller import load_storyteller
from llm_course.training.config import (
    Config,
    DistributedConfig,
    OptimizationConfig,
    TrainingConfig,
)
from llm_course.training.distributed import DistributedManager
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.runtime import Runtime
from llm_course.training.sharding import ShardedManager
from llm_course.training.task import RegressionTask, StepOutput

# what a function that a page sends to its processes may use
IMPORTS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from llm_course.pages import shares
from llm_course.training.config import DistributedConfig
from llm_course.training.distributed import DistributedManager
"""
ROWS = 8
SENT = ("input_ids", "labels")
IGNORED = -100


def make_model(num_layers: int = 2, *, seed: int = 0) -> DecoderModel:
    """A decoder of a few thousand parameters, whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_heads": 2, "max_position_embeddings": 16}
    return DecoderModel(ModelConfig(vocab_size=32, num_layers=num_layers, **sizes))


def rows(rank: int | None = None) -> dict[str, Tensor]:
    """Eight rows, or the four of a rank. The first four have one target each, the others eight."""
    ids = torch.randint(0, 32, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[: ROWS // 2, 1:] = IGNORED
    mine = slice(None) if rank is None else slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    return {"input_ids": ids[mine, :-1], "labels": labels[mine]}


def flat(tensors: Iterable[Any]) -> Tensor:
    """All numbers of these tensors in one row; of a sharded one, the numbers of all processes."""
    whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in tensors)
    return torch.cat([tensor.detach().flatten() for tensor in whole])


def manager(strategy: Any) -> DistributedManager:
    """The manager of a strategy, for processes that have met already."""
    kind = ShardedManager if strategy == "fsdp" else DistributedManager
    return kind(DistributedConfig(strategy=strategy), device="cpu")


def one_process(model: nn.Module) -> Tensor:
    """The gradient of one process that has all rows, and divides by all their targets."""
    output = model(**rows())
    (output.loss_sum / output.num_targets).backward()
    return flat(parameter.grad for parameter in model.parameters())


# ------------------------------------------------------------------------------------- buckets


def watch_window(runtime: Runtime, *, use_no_sync: bool) -> tuple[list[list[Any]], Tensor]:
    """What happens in the four backward passes of a window, and the gradient of its step.

    An event is the name of a parameter whose gradient is complete, or the bytes of a bucket that
    leaves.
    """
    inner = make_model()
    events: list[Any] = []
    for name, parameter in inner.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))

    def leave(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    model = DistributedDataParallel(inner, bucket_cap_mb=0.01)
    model.register_comm_hook(None, leave)
    batch = rows(runtime.rank)
    model(**batch).loss_sum.backward()  # the first pass only teaches DDP the order
    model.zero_grad()
    log = []
    for row in range(ROWS // 2):
        events.clear()
        quiet = runtime.no_sync(model) if use_no_sync and row < ROWS // 2 - 1 else nullcontext()
        with quiet:
            one_row = {name: column[row : row + 1] for name, column in batch.items()}
            model(**one_row).loss_sum.backward()
        log.append(list(events))
    num_targets = runtime.sum((batch["labels"] != IGNORED).sum())
    gradient = flat(p.grad for p in inner.parameters())
    return log, runtime.world_size / num_targets * gradient


# ----------------------------------------------------------------------------------------- experts


class ListOfExperts(nn.Module):
    """Experts as many people write them: a list of modules, of which idle ones are not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """The first `counts[0]` rows go to expert 0, and so on."""
        parts = zip(self.experts, x.split(counts.tolist()), strict=True)
        return torch.cat([expert(part) for expert, part in parts if len(part)])


def make_experts(kind: str) -> nn.Module:
    """A list of three experts, or the course's stacked ones."""
    torch.manual_seed(0)
    return ListOfExperts() if kind == "list" else Experts(3, 4, 4)


def expert_gradient(model: nn.Module, rank: int) -> float:
    """The first number of the gradient, of a backward pass in which expert 2 has no token."""
    model.zero_grad()
    model(torch.full((2, 4), 1.0 + rank), torch.tensor([1, 1, 0])).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient.flatten()[0].item()


def idle_expert(runtime: Runtime, *, kind: str, **settings: Any) -> tuple[float, str]:
    """The first gradient under DDP, and how a second backward pass ends."""
    model = DistributedDataParallel(make_experts(kind), **settings)
    gradient = expert_gradient(model, runtime.rank)
    try:
        expert_gradient(model, runtime.rank)
    except RuntimeError as error:
        return gradient, str(error).split(". ")[0]
    return gradient, "the second pass works"


# ----------------------------------------------------------------------------------------- scaling


def seconds_of_steps(model: nn.Module, rows: int, *, repeats: int) -> dict[str, list[float]]:
    """Seconds by the clock, and of processor time, of steps on this many rows of 64 tokens."""
    ids = torch.randint(0, 256, (rows, 65), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kinds = {"clock": time.perf_counter, "processor": time.process_time}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(repeats + 1):
        starts = {kind: now() for kind, now in kinds.items()}
        model(ids[:, :-1], labels=ids[:, 1:]).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:  # the first one warms up
            for kind, now in kinds.items():
                seconds[kind].append(round(now() - starts[kind], 5))
    return seconds


def time_steps(
    runtime: Runtime, *, row_counts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Seconds of steps in this process alone, and in all of them by DDP, by tokens in each."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "num_layers": 2, "num_heads": 4}
    model = DecoderModel(ModelConfig(vocab_size=256, **sizes))
    pair = DistributedDataParallel(model)
    runs = []
    for rows in row_counts:
        alone = seconds_of_steps(model, rows, repeats=repeats if runtime.rank == 0 else 0)
        runtime.barrier()  # where the others have waited
        together = seconds_of_steps(pair, rows, repeats=repeats)
        runs.append({"tokens": 64 * rows, "alone": alone, "together": together})
    return runs


def sign_and_time(folder: str, row_counts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """What launched processes run: each leaves a file that says who it is, then `time_steps`."""
    sign(folder)
    torch.set_num_threads(1)
    with DistributedManager(DistributedConfig(), device="cpu") as runtime:
        return time_steps(runtime, row_counts=row_counts, repeats=repeats)


# ---------------------------------------------------------------------------------------- sharding


def count_collectives(runtime: Runtime) -> dict[str, int]:
    """How often each collective runs in forward and backward of four blocks under FSDP."""
    model = make_model(num_layers=4)
    manager("fsdp").shard(model, bf16=False)
    with warnings.catch_warnings(), CommDebugMode() as watch:
        warnings.simplefilter("ignore")  # its hooks mind that token ids have no gradient
        model(**rows(runtime.rank)).loss_sum.backward()
    names = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
    counts = {str(op).split(".")[-1]: times for op, times in watch.get_comm_counts().items()}
    return {names.get(name, name): times for name, times in counts.items()}


def whole_groups(runtime: Runtime) -> list[list[bool]]:
    """Which groups of parameters are whole, at eleven moments of a step under FSDP.

    The first group is what belongs to no block: the embedding and the last norm.
    """
    model: Any = make_model(num_layers=4)
    seen: list[list[bool]] = []
    manager("fsdp").shard(model, bf16=False)

    def look(*_: Any) -> None:
        groups = (model, *model.layers)
        seen.append([not isinstance(next(group.parameters()), DTensor) for group in groups])

    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(look)
        layer.mlp.register_full_backward_hook(look)
    look()
    loss = model(**rows(runtime.rank)).loss_sum
    look()
    loss.backward()
    look()
    return seen


def write_sharded(runtime: Runtime, *, num_tokens: int = 16) -> tuple[int, int, str]:
    """The storyteller under FSDP: the bytes held here and in all, and what it writes."""
    model, tokenizer = load_storyteller()
    size = sum(parameter.nbytes for parameter in model.parameters())
    manager("fsdp").shard(model, bf16=False)
    held = sum(_local(parameter).nbytes for parameter in model.parameters())
    ids = torch.tensor([tokenizer.encode("Once upon a time there was")])
    with torch.no_grad():
        for _ in range(num_tokens):  # always the likeliest token
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return held, size, tokenizer.decode(ids[0].tolist())


def held_bytes(model: nn.Module, optimizer: Optimizer) -> tuple[int, ...]:
    """The bytes of parameters, gradients and moments that this process holds."""
    moments = [
        moment
        for state in optimizer.state.values()
        for name, moment in state.items()
        if name != "step"
    ]
    kinds = (model.parameters(), [p.grad for p in model.parameters()], moments)
    return tuple(sum(_local(tensor).nbytes for tensor in kind) for kind in kinds)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def adamw_steps(
    model: nn.Module, run: Callable[..., Any], runtime: Runtime, batch: dict[str, Tensor]
) -> Optimizer:
    """Three steps of AdamW; `run` is the model as it is called, perhaps wrapped.

    Both DDP and FSDP leave the mean over processes in `.grad`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        output = run(**batch)
        output.loss_sum.backward()
        factor = runtime.world_size / runtime.sum(output.num_targets)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= factor
        optimizer.step()
    return optimizer


def three_steps(runtime: Runtime, *, strategy: str, bf16: bool = False) -> dict[str, Any]:
    """Three steps of AdamW: the weights, the bytes held, and the types of what was used."""
    runtime = manager(strategy)
    model: Any = make_model()
    runtime.shard(model, bf16=bf16)
    types: list[torch.dtype] = []
    hook = model.layers[0].self_attn.register_forward_pre_hook(
        lambda attention, x: types.append(attention.q_proj.weight.dtype)
    )
    optimizer = adamw_steps(model, runtime.wrap(model), runtime, rows(runtime.rank))
    hook.remove()
    held = held_bytes(model, optimizer)
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return {
        "weights": flat(model.parameters()),
        "held": held,
        "computed in": types[-1],
        "gradients in": gradient.dtype,
    }


# ----------------------------------------------------------------------------------------- stories


def stories(runtime: Runtime, *, mean_of_means: bool = False, steps: int = 200) -> str:
    """Train the tiny decoder on stories, each process on its share of a batch's rows; returns a
    paragraph that the model then makes up.
    """
    data = Paragraphs(batch_size=8)
    data.setup()
    torch.manual_seed(0)
    model = tiny_model(data).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    for _, batch in zip(range(steps), data.train_dataloader(epoch=0), strict=False):
        mine = {name: batch[name][runtime.rank :: runtime.world_size] for name in SENT}
        output = model(**mine)
        if mean_of_means:
            divisor = output.num_targets * runtime.world_size
        else:
            divisor = runtime.sum(output.num_targets)
        optimizer.zero_grad()
        output.loss_sum.backward()
        for parameter in model.parameters():
            parameter.grad = runtime.sum(parameter.grad / divisor)
        optimizer.step()
    return told(model, data, 1)[0]


# -------------------------------------------------------------------------------------- the engine


class Norms(Callback):
    """Keeps the gradient norm of each step."""

    def on_train_start(self, engine: TrainingEngine) -> None:
        self.norms: list[float] = []

    def on_step_end(self, engine: TrainingEngine, metrics: dict[str, Any]) -> None:
        self.norms.append(metrics["grad_norm"])


class SomeTargets(RegressionTask):
    """A line to learn, from the rows with y > 0 alone, so that shares have unequal counts."""

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> StepOutput:
        used = batch["y"] > 0
        return super().train_step(model, {name: column[used] for name, column in batch.items()})


def by_engine(
    runtime: Runtime, *, strategy: str | None = None, planted: bool = False
) -> tuple[list[float], Tensor, list[Tensor]]:
    """An epoch by the engine: its norms, and the weights and moments of a second engine that has
    loaded its state.

    `planted` forgets that the processes' gradients were averaged.
    """
    runtime = runtime if strategy is None else manager(strategy)
    sizes: dict[str, Any] = {"batch_size": 16 // runtime.world_size, "max_epochs": 1}
    config = Config(
        training=TrainingConfig(
            device="cpu", precision="fp32", gradient_accumulation_steps=2, **sizes
        ),
        optimization=OptimizationConfig(learning_rate=0.05, warmup_steps=0),
    )

    def make(record: Norms) -> TrainingEngine:
        task = SomeTargets(config)
        return TrainingEngine(config, task, task.build_data(), [record], runtime=runtime)

    record = Norms()
    engine = make(record)
    if planted:
        engine.setup()
        divide = engine.window.mean_and_clip
        window: Any = engine.window
        window.mean_and_clip = lambda n: divide(n * runtime.world_size)
    engine.run()
    again = make(Norms())
    again.setup(runtime.gather(engine.state_dict())[0])
    moments = [flat(state.values()) for state in again.optimizer.state.values()]
    return record.norms, flat(again.model.parameters()), moments

"""What the processes of the distributed tests run: importable, so that `launch` and torchrun find
it.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from warm import IS_WARM, warm_processes

from llm_course.cli import main
from llm_course.model.config import ModelConfig
from llm_course.text.data import BaseDataModule, SyntheticDataModule
from llm_course.training.config import Config, DistributedConfig, OptimizationConfig, TrainingConfig
from llm_course.training.distributed import DistributedManager
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.runtime import Runtime
from llm_course.training.sharding import ShardedManager
from llm_course.training.task import LanguageModelingTask

MODEL = dict(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, max_position_embeddings=256)


class CopyTask(LanguageModelingTask):
    """A language model that learns to copy. Rows have unequal numbers of targets, and 45 rows
    divide by nothing here.
    """

    def build_data(self) -> BaseDataModule:
        return SyntheticDataModule(
            num_examples=50, length=4, batch_size=self.config.training.batch_size
        )

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return super().train_step(model, fewer_targets(batch))

    def validation_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return super().validation_step(model, fewer_targets(batch))

    def metrics(self, loss: float, data: BaseDataModule) -> dict[str, float]:
        return {}


def fewer_targets(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One target only in the rows that begin with an even symbol: which rows these are does not
    depend on the batch.
    """
    labels = batch["labels"].clone()
    labels[batch["input_ids"][:, 0] % 2 == 0, :-1] = -100
    return batch | {"labels": labels}


class GradientTask(CopyTask):
    """Plain gradient descent with learning rate 1: what a step adds to the weights is the gradient,
    exactly.
    """

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def build_scheduler(self, optimizer: torch.optim.Optimizer, *, max_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def make_config(*, model: dict | None = None, training: dict | None = None, **parts: Any) -> Config:
    settings = dict(
        max_steps=8,
        batch_size=4,
        eval_interval=4,
        precision="fp32",
        device="cpu",
        max_grad_norm=1e9,
    )
    return Config(
        model=ModelConfig(**(MODEL | (model or {}))),
        training=TrainingConfig(**(settings | (training or {}))),
        optimization=OptimizationConfig(warmup_steps=2, learning_rate=1e-2),
        **parts,
    )


class Recorder(Callback):
    """Keeps each step's numbers, and the state after step `at`."""

    def __init__(self, at: int = 0):
        self.at = at
        self.rows = []
        self.state = None

    def on_step_end(self, engine: TrainingEngine, metrics: dict[str, Any]) -> None:
        self.rows.append(dict(metrics))
        if engine.state.step == self.at:
            self.state = clone(engine.state_dict())


def clone(tree: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(tree, dict):
        return {name: clone(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [clone(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def train(
    config: Config,
    *,
    task: type[LanguageModelingTask] = CopyTask,
    runtime: Runtime | None = None,
    at: int = 0,
    state: Any = None,
) -> tuple[dict[str, Any], Recorder]:
    """The last state and the record of a run."""
    recorder = Recorder(at)
    learner = task(config)
    engine = TrainingEngine(config, learner, learner.build_data(), [recorder], runtime=runtime)
    engine.setup(state)
    engine.run()
    return clone(engine.state_dict()), recorder


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states differ in a single bit."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: keys"]
        return [
            found for name in one for found in differences(one[name], other[name], f"{path}.{name}")
        ]
    if isinstance(one, (list, tuple)):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{path}.{index}")]
    same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
    return [] if same else [path]


def resume_differs(config: Config, *, at: int, runtime: Runtime | None = None) -> list[str]:
    """Train without a break, and with one after step `at`: what differs at the end."""
    whole, record = train(config, runtime=runtime, at=at)
    # as from a file: that of the main process
    state = (runtime or Runtime()).gather(record.state)[0]
    resumed, second = train(config, runtime=runtime, state=state)
    return differences(whole, resumed) + differences(record.rows[at:], second.rows, "rows")


class CountingManager(DistributedManager):
    """Counts the all-reduces of gradients that DDP makes."""

    counted = 0

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        wrapped.register_comm_hook(None, self._count)
        return wrapped

    def _count(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.counted += 1
        return allreduce_hook(None, bucket)


class NeverSyncs(DistributedManager):
    """Planted: gradients are never exchanged."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


def held_bytes(runtime: Runtime) -> list[int]:
    """Bytes of parameters, gradients and moments that each process holds after a step, added up by
    kind and rank.
    """
    held = []

    class Weigh(CopyTask):
        def after_update(self, model: nn.Module, sum_over_ranks: Any) -> None:
            moments = [
                state[name]
                for state in self.optimizer.state.values()
                for name in ("exp_avg", "exp_avg_sq")
            ]
            parts = (
                list(model.parameters()),
                [parameter.grad for parameter in model.parameters()],
                moments,
            )
            local = [
                [getattr(tensor, "_local_tensor", tensor).nbytes for tensor in part]
                for part in parts
            ]
            held.append([sum(sizes) for sizes in local])

        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            self.optimizer = super().build_optimizer(model)
            return self.optimizer

    train(make_config(training=dict(max_steps=1)), task=Weigh, runtime=runtime)
    return runtime.gather(held[0])


def on_two_ranks() -> dict[str, Any]:
    """Everything that two processes are asked, in one start of them; returns plain values."""
    found: dict[str, Any] = {}
    with DistributedManager(DistributedConfig(world_size=2), device="cpu") as ddp:
        runtimes = {
            "ddp": ddp,
            "fsdp": ShardedManager(DistributedConfig(strategy="fsdp"), device="cpu"),
        }
        for name, runtime in runtimes.items():
            once = dict(max_steps=1, batch_size=4, eval_interval=1)
            state, record = train(make_config(training=once), task=GradientTask, runtime=runtime)
            found[f"{name} step"] = (numbers(state["model"]), record.rows[0])
            twice = once | dict(batch_size=2, gradient_accumulation_steps=2)
            state, _ = train(make_config(training=twice), task=GradientTask, runtime=runtime)
            found[f"{name} accumulated"] = numbers(state["model"])
            dropout = make_config(
                model=dict(dropout=0.1), training=dict(gradient_accumulation_steps=2, max_steps=7)
            )
            found[f"{name} resume"] = resume_differs(dropout, at=4, runtime=runtime)
            found[f"{name} held"] = held_bytes(runtime)
        # Everything that saves memory at once. The moments' place does not change what is computed.
        saving = ShardedManager(DistributedConfig(strategy="fsdp", cpu_offload=True), device="cpu")
        frugal = dict(activation_checkpointing=True)
        state, _ = train(make_config(training=once | frugal), task=GradientTask, runtime=saving)
        found["frugal step"] = numbers(state["model"])
        dropout = make_config(model=dict(dropout=0.1), training=frugal | dict(max_steps=4))
        found["frugal resume"] = resume_differs(dropout, at=2, runtime=saving)
        state, record = train(
            make_config(training=once | dict(precision="bf16")),
            task=GradientTask,
            runtime=runtimes["fsdp"],
        )
        found["bf16 step"] = (
            numbers(state["model"]),
            record.rows[0],
            str(next(iter(state["model"].values())).dtype),
        )
        steps = dict(max_steps=3, batch_size=2, gradient_accumulation_steps=3)
        counting = CountingManager(DistributedConfig(), device="cpu")
        train(make_config(training=steps), runtime=counting)
        found["all-reduces"] = counting.counted
        broken = NeverSyncs(DistributedConfig(), device="cpu")
        state, _ = train(make_config(training=once), task=GradientTask, runtime=broken)
        found["never synced"] = numbers(state["model"])
        few = make_config(
            model=dict(use_moe=True, num_experts=16, top_k=1),
            training=dict(batch_size=1, max_steps=3),
        )
        states = [train(few, runtime=runtime)[0]["model"] for runtime in runtimes.values()]
        agree = (
            [torch.allclose(states[0][name], states[1][name], atol=1e-5) for name in states[0]]
            if ddp.is_main
            else [True]
        )
        found["idle experts"] = all(agree) and bool(
            all(torch.isfinite(p).all() for p in states[0].values())
        )
        compiled = make_config(training=dict(compile=True, max_steps=2))
        # the eager backend: names are in question here, not speed
        with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
            found["compiled ddp"] = saved(train(compiled, runtime=ddp)[0])
        found["blocks in blocks"] = blocks_in_blocks(runtimes["fsdp"])
        found["mean"] = float(ddp.reduce_mean(torch.tensor(float(ddp.rank))))
        found["any"] = (ddp.any(ddp.rank == 1), ddp.any(False))
    return found


def numbers(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """A state that travels between processes."""
    if isinstance(state, dict):
        return {name: saved(value) for name, value in state.items()}
    return ("tensor", state.numpy()) if isinstance(state, Tensor) else state


def dies_in_rank_1(seconds: float) -> None:
    """Rank 1 is killed while rank 0 waits for it."""
    with DistributedManager(
        DistributedConfig(world_size=2, timeout=seconds), device="cpu"
    ) as runtime:
        if runtime.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        runtime.barrier()


def train_in_forks(words: list[str]) -> int:
    """The command, whose processes are forked from this one."""
    with warm_processes("fork"):
        return main(words)


def under_torchrun(words: list[str]) -> None:
    """The command in two processes, as torchrun starts and, once, restarts them, but forked."""
    meeting = dict(rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    method = "fork" if IS_WARM else "spawn"
    config = LaunchConfig(1, 1, 2, **meeting, max_restarts=1, start_method=method)
    elastic_launch(config, main)(words)


def refuses_in_rank_1() -> None:
    with DistributedManager(DistributedConfig(world_size=2), device="cpu") as runtime:
        if runtime.rank == 1:
            raise ValueError("rank 1 has had enough")
        runtime.barrier()


class Dying(CopyTask):
    """Under torchrun: rank 1 dies in step 6 of the first attempt, as a machine does."""

    def after_update(self, model: nn.Module, sum_over_ranks: Any) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        attempt = Path(self.config.run_dir, "died")
        if os.environ["RANK"] == "1" and self.steps == 6 and not attempt.exists():
            attempt.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def is_interrupted() -> None:
    raise KeyboardInterrupt


class Refused(Exception):
    """Pickle keeps its words, and its class asks for two arguments."""

    def __init__(self, name: str, value: int):
        super().__init__(f"{name}={value} is refused")


def refuses_with_two_words() -> None:
    raise Refused("x", 3)


def leaves_in_silence() -> None:
    os._exit(0)


def threads_while_rank_1_exits() -> int:
    if os.environ["RANK"] == "1":
        sys.exit(0)
    time.sleep(1)  # the other has left by then
    return torch.get_num_threads()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) + self.experts[1](x)


class Stack(nn.Module):
    """Lists of blocks in a list of blocks, as of experts in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


def blocks_in_blocks(runtime: DistributedManager) -> bool:
    """Whether FSDP computes what the model alone does where blocks hold blocks."""
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(3, 2)
    alone = model(x).detach()
    runtime.shard(model, bf16=False)
    return torch.allclose(model(x).detach(), alone)

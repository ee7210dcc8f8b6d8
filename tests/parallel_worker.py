"""What the processes of the tests of tensor and pipeline parallelism run."""

from typing import Any
from unittest.mock import patch

import distributed_worker as worker
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llm_course.model.decoder import DecoderModel
from llm_course.training import parallel
from llm_course.training.checkpointing import split_tensors
from llm_course.training.config import Config, DistributedConfig, OptimizationConfig
from llm_course.training.distributed import DistributedManager
from llm_course.training.engine import TrainingEngine
from llm_course.training.parallel import build_manager
from llm_course.training.runtime import Runtime
from llm_course.training.task import LanguageModelingTask

# three layers on two stages; two heads for each key and value
GROUPED = dict(num_layers=3, num_heads=4, num_kv_heads=2, qk_norm=True)
# all that GROUPED is not
OLD_FASHIONED = dict(
    num_layers=2,
    num_heads=4,
    num_kv_heads=None,
    tie_word_embeddings=False,
    norm_type="layernorm",
    norm_position="post",
    position_type="learned",
    use_glu=False,
    mlp_bias=True,
    attention_bias=True,
    z_loss_coef=1e-3,
)
# what the newer families have
NEWER = dict(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    norm_position="sandwich",
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    sliding_rope_theta=1e3,
    partial_rotary_factor=0.5,
    embedding_scale=4.0,
    residual_multiplier=0.5,
    logits_scaling=2.0,
)


class DocumentTask(worker.GradientTask):
    """Each row has two documents."""

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
        return super().train_step(model, batch | {"document_ids": (places > 3).long()})


class Manager:
    """Managers of several strategies for one start of the processes."""

    def __init__(self) -> None:
        self.first: DistributedManager | None = None

    def __call__(self, strategy: str) -> DistributedManager:
        size = 2 if "+" in strategy else None
        config = DistributedConfig(strategy=strategy, model_parallel_size=size)
        manager = build_manager(config, device="cpu")
        if self.first is None:
            self.first = manager
            manager.__enter__()
        return manager


def config_of(
    runtime: Runtime, model: dict[str, Any], *, optimizer: str = "adamw", **training: Any
) -> Config:
    """A run whose steps have eight rows, on any number of processes."""
    accumulation = training.get("gradient_accumulation_steps", 1)
    sizes = dict(batch_size=8 // accumulation // runtime.data_world_size, max_grad_norm=0.5)
    config = worker.make_config(model=model, training=sizes | training)
    rate = 1e-2 if optimizer == "adamw" else 1e-3
    config.optimization = OptimizationConfig(
        warmup_steps=2, learning_rate=rate, optimizer=optimizer
    )
    return config


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two sets of weights; infinite where their names differ."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def states_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of weights or moments; infinite where anything is called otherwise."""
    first, second = (
        split_tensors({"optimizer": s["optimizer"], "model": dict(s["model"])})
        for s in (one, other)
    )
    return apart(first[1], second[1]) if first[0] == second[0] else float("inf")


def compare(
    runtime: DistributedManager,
    model: dict[str, Any],
    *,
    task: type[LanguageModelingTask] = worker.CopyTask,
    **settings: Any,
) -> dict[str, Any]:
    """How far a run of these processes is from that of one, which the first of them makes."""
    mine, record = worker.train(config_of(runtime, model, **settings), task=task, runtime=runtime)
    mine = runtime.gather(mine)[0]  # as from a file
    if not runtime.is_main:
        return {}  # `launch` takes the first one's answers
    alone, expected = worker.train(config_of(Runtime(), model, **settings), task=task)
    return {
        "state": states_apart(mine, alone),
        "weights": apart(mine["model"], alone["model"]),
        "rows": (record.rows, expected.rows),
    }


def change_over(runtime: DistributedManager) -> dict[str, float]:
    """A run of which these processes make one half and one process the other."""
    plain = Runtime()
    whole, record = worker.train(config_of(plain, GROUPED), at=4)
    begun = runtime.gather(
        worker.train(config_of(runtime, GROUPED), runtime=runtime, at=4)[1].state
    )
    theirs = begun[0]
    mine = worker.train(config_of(plain, GROUPED), state=theirs)[0]
    back = worker.train(config_of(runtime, GROUPED), runtime=runtime, state=record.state)[0]
    return {
        "to one": states_apart(mine, whole),
        "from one": states_apart(runtime.gather(back)[0], whole),
    }


def held_numbers(runtime: DistributedManager) -> list[dict[str, int]]:
    """How many numbers of a model each process holds, by its parts."""
    config = config_of(runtime, GROUPED | dict(num_layers=4))
    task = worker.CopyTask(config)
    data = task.build_data()
    data.setup()
    model = task.build_model(data)
    runtime.shard(model, bf16=False)
    held = {"blocks": 0, "others": 0}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part = "blocks" if name.startswith("layers.") else "others"
        held[part] += 0 if local.is_meta else local.numel()
    return runtime.gather(held)


def held_bytes(runtime: DistributedManager, model: dict[str, Any]) -> list[dict[str, int]]:
    """The bytes of weights, gradients and moments that each process really holds in a step."""
    config = config_of(runtime, model)
    task = worker.CopyTask(config)
    data = task.build_data()
    engine = TrainingEngine(config, task, data, runtime=runtime)
    engine.setup()
    held = {}

    def look(*_: Any) -> None:  # gradients are gone after the step
        mine = [p for p in engine.model.parameters() if not parallel.local(p).is_meta]
        held["weights"] = sum(parallel.local(p).nbytes for p in mine)
        held["gradients"] = sum(parallel.local(p.grad).nbytes for p in mine)

    engine.optimizer.register_step_pre_hook(look)
    engine.model.train()
    engine.optimizer_step([next(iter(data.train_dataloader(epoch=0)))])
    held["optimizer"] = sum(
        parallel.local(entries[name]).nbytes
        for entries in engine.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
        if name in entries and not parallel.local(entries[name]).is_meta
    )
    return runtime.gather(held)


def refusals(runtime: DistributedManager) -> list[str]:
    """What a pipeline says where it is asked for anything but the loss, as it is."""
    torch.manual_seed(0)
    model = DecoderModel(worker.ModelConfig(**(worker.MODEL | GROUPED | dict(vocab_size=16))))
    runtime.shard(model, bf16=False)
    ids = torch.arange(8)[None]

    def halved() -> None:
        (model(ids, labels=ids).loss_sum / 2).backward()

    said = []
    for ask in (lambda: model(ids), halved, lambda: runtime.shard(nn.Linear(2, 2), bf16=False)):
        try:
            ask()
        except ValueError as error:
            said.append(str(error))
    return said


def draws_alike(runtime: DistributedManager) -> dict[str, bool]:
    """Whether two processes drop alike: after the embedding, in attention, and after it."""
    config = worker.ModelConfig(**(worker.MODEL | GROUPED | dict(vocab_size=16, dropout=0.5)))
    torch.manual_seed(0)
    model = DecoderModel(config)
    runtime.shard(model, bf16=False)
    seen: dict[str, list[int]] = {}

    def note(name: str) -> Any:
        def hook(*_: Any) -> None:
            seen.setdefault(name, torch.get_rng_state().tolist())

        return hook

    attention = model.layers[0].self_attn
    model.embedding.register_forward_hook(note("embedding"))
    attention.register_forward_pre_hook(note("attention"))
    attention.register_forward_hook(note("behind"))
    ids = torch.arange(8)[None]
    model(ids, labels=ids)
    first, second = runtime.gather(seen)
    return {name: first[name] == second[name] for name in first}


class Untied(parallel.PipelineParallel):
    """Planted: the two stages that share a table do not share its gradient."""

    sync_gradients = parallel.ModelParallel.sync_gradients


class OwnNorm(parallel.PipelineParallel):
    """Planted: each stage clips by its own norm."""

    clip = Runtime.clip


def through_shards(runtime: DistributedManager, folder: str) -> bool:
    """Read one process's shards into halves, write the halves: whether they are the weights."""
    torch.manual_seed(0)
    model = DecoderModel(worker.ModelConfig(**(worker.MODEL | GROUPED | dict(vocab_size=16))))
    runtime.shard(model, bf16=False)
    expected = runtime.model_state(model)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    dcp.load(state, checkpoint_id=f"{folder}/one")
    found = runtime.model_state(model)
    dcp.save(state, checkpoint_id=f"{folder}/two")
    return all(torch.equal(found[name], expected[name]) for name in expected)


def on_two_ranks(folder: str) -> dict[str, Any]:
    """Everything that two processes are asked, in one start of them."""
    found: dict[str, Any] = {}
    managers = Manager()
    found["shards"] = through_shards(managers("fsdp"), folder)
    for strategy in ("tp", "pp"):
        runtime = managers(strategy)
        once = dict(task=worker.GradientTask, max_steps=1, eval_interval=1, max_grad_norm=1e9)
        found[f"{strategy} gradient"] = compare(runtime, GROUPED, **once)
        found[f"{strategy} old-fashioned"] = compare(runtime, OLD_FASHIONED, **once)
        found[f"{strategy} newer"] = compare(runtime, NEWER, **once)
        accumulated = dict(gradient_accumulation_steps=2, activation_checkpointing=True)
        found[f"{strategy} accumulated"] = compare(runtime, GROUPED, **once, **accumulated)
        found[f"{strategy} trained"] = compare(runtime, GROUPED)
        found[f"{strategy} bf16"] = compare(runtime, GROUPED, **once, precision="bf16")
        found[f"{strategy} documents"] = compare(
            runtime, GROUPED, **(once | dict(task=DocumentTask))
        )
        found[f"{strategy} changes over"] = change_over(runtime)
        config = config_of(runtime, GROUPED | dict(dropout=0.1), gradient_accumulation_steps=2)
        found[f"{strategy} resume"] = worker.resume_differs(config, at=4, runtime=runtime)
        found[f"{strategy} held"] = held_numbers(runtime)
    for strategy in ("ddp", "fsdp", "tp", "pp"):
        for name, model in (("grouped", GROUPED), ("old-fashioned", OLD_FASHIONED)):
            found[f"{strategy} {name} bytes"] = held_bytes(managers(strategy), model)
    found["tp draws alike"] = draws_alike(managers("tp"))
    found["refusals"] = refusals(managers("pp"))
    found["pp muon"] = compare(managers("pp"), GROUPED, optimizer="muon")
    # planted: each process keeps its own part of the gradient of q_norm and k_norm
    with patch.object(parallel, "sum_over", lambda gradient, mesh: gradient):
        found["no sum"] = compare(managers("tp"), GROUPED, **once)
    halves = DistributedConfig(strategy="pp")
    found["untied"] = compare(Untied(halves, device="cpu"), GROUPED, **once)
    found["own norm"] = compare(OwnNorm(halves, device="cpu"), GROUPED)
    return found


def on_four_ranks() -> dict[str, Any]:
    """Two groups of two, and one of four."""
    found: dict[str, Any] = {}
    managers = Manager()
    for strategy in ("ddp+tp", "fsdp+tp", "ddp+pp", "pp"):
        model = GROUPED | dict(num_layers=5)
        once = dict(task=worker.GradientTask, max_steps=1, eval_interval=1, max_grad_norm=1e9)
        found[f"{strategy} gradient"] = compare(managers(strategy), model, **once)
        found[f"{strategy} trained"] = compare(managers(strategy), model, max_steps=5)
        found[f"{strategy} bytes"] = held_bytes(managers(strategy), model)
    return found

"""Wrappers, random state, and the runtime of one process."""

import json
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llm_course.training.runtime import (
    Runtime,
    rng_state,
    seed_everything,
    set_rng_state,
    unwrap,
)


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, 2**63 - 1])
def test_a_seed_begins_all_generators(seed):
    drawn = []
    for noise in (1, 2):
        torch.rand(noise)
        np.random.rand(noise)
        random.random()
        seed_everything(seed)
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


class Named(nn.Module):
    """A model whose own part is called `module`."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.out = nn.Linear(2, 1)

    def forward(self, x):
        return self.out(self.module(x))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}",
        rank=0,
        world_size=1,
    )
    yield
    dist.destroy_process_group()


def test_unwrap_removes_wrappers_and_nothing_else(group):
    model = Named()
    assert unwrap(model) is model  # not model.module
    for wrapped in (
        torch.compile(model),
        DistributedDataParallel(model),
        DistributedDataParallel(torch.compile(model)),
        torch.compile(DistributedDataParallel(model)),
    ):
        assert wrapped is not model and unwrap(wrapped) is model
        assert set(unwrap(wrapped).state_dict()) == {
            "module.weight",
            "module.bias",
            "out.weight",
            "out.bias",
        }


def draws():
    return [
        torch.rand(3).tolist(),
        np.random.standard_normal(3).tolist(),
        np.random.rand(),
        random.gauss(),
        random.random(),
    ]


def test_random_state_of_all_generators_is_drawn_again():
    outside = rng_state()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    draws()  # normal numbers come in pairs: in NumPy and in Python one is now waiting
    state = rng_state()
    wanted = [draws(), draws()]
    torch.manual_seed(2), np.random.seed(2), random.seed(2)
    assert all(a != b for a, b in zip(draws(), wanted[0], strict=True))
    set_rng_state(state)
    assert [draws(), draws()] == wanted

    def differing(part):  # leave one library out: its draws differ, and only they
        set_rng_state(state | {part: {"torch": outside["torch"]}.get(part, outside[part])})
        return [a != b for a, b in zip(draws(), wanted[0], strict=True)]

    assert differing("torch") == [True, False, False, False, False]
    assert differing("numpy") == [False, True, True, False, False]
    assert differing("python") == [False, False, False, True, True]
    set_rng_state(outside)


def test_random_state_is_tensors_and_json():
    state = rng_state()
    again = json.loads(json.dumps(state, default=lambda tensor: tensor.tolist()))
    assert (
        again["torch"] == state["torch"].tolist()
        and again["python"]["keys"] == state["python"]["keys"].tolist()
    )
    again["torch"] = torch.tensor(again["torch"], dtype=torch.uint8)
    for part in ("numpy", "python"):
        again[part]["keys"] = torch.tensor(again[part]["keys"])
    wanted = draws()
    set_rng_state(again)
    assert draws() == wanted


def test_runtime_of_one_process():
    runtime = Runtime()
    model = nn.Linear(2, 2)
    assert (runtime.rank, runtime.world_size, runtime.is_main) == (0, 1, True)
    assert (runtime.data_rank, runtime.data_world_size, runtime.seed_rank) == (0, 1, 0)
    assert runtime.wrap(model) is model and runtime.device("cpu") == torch.device("cpu")
    assert runtime.any(True) and not runtime.any(False) and runtime.gather({"a": 1}) == [{"a": 1}]
    tensor = torch.tensor(3.0)
    assert runtime.sum(tensor) == 3
    runtime.shard(model, bf16=True), runtime.barrier()
    optimizer = torch.optim.AdamW(model.parameters())
    with runtime.no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    runtime.sync_gradients(model)
    norm = runtime.clip(list(model.parameters()), 1.0)
    assert norm == pytest.approx(6**0.5)  # six gradients of 1
    assert model.weight.grad.norm() == pytest.approx((4 / 6) ** 0.5)
    optimizer.step()
    other = nn.Linear(2, 2)
    resumed = torch.optim.AdamW(other.parameters())
    runtime.load_model(other, runtime.model_state(model))
    runtime.load_optimizer(resumed, runtime.optimizer_state(optimizer))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(
        resumed.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )

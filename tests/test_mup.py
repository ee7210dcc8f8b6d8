"""muP: the coordinate check, the base width, and what it refuses."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llm_course.model.config import ModelConfig
from llm_course.pages.scaling import coordinate_check, coordinate_config, few_steps
from llm_course.training.config import Config, LoggingConfig, OptimizationConfig, TrainingConfig
from llm_course.training.folder import load_run
from llm_course.training.mup import MuPTask, hidden_matrices, scale_rates
from llm_course.training.named import find_task
from llm_course.training.run import train_worker
from llm_course.training.task import LanguageModelingTask

DATA = SimpleNamespace(vocab_size=256)


@pytest.fixture(scope="module")
def moved():
    torch.set_num_threads(1)
    return coordinate_check((64, 256))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_activations_move_equally_at_every_width_in_mup_and_more_at_larger_ones_without(
    moved, optimizer
):
    growth = {}
    for task in ("lm", "mup"):
        narrow, wide = (moved[optimizer, task, width] for width in (64, 256))
        growth[task] = wide.stream / narrow.stream, wide.logits / narrow.logits
    assert growth["lm"][0] > 2 and growth["lm"][1] > 2
    assert 0.9 < growth["mup"][0] < 1.05  # without the rates' rule, 1.10 with Muon
    assert 0.5 < growth["mup"][1] < 1.1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_at_the_base_width_it_is_the_same_run_to_the_last_bit(optimizer):
    plain, _ = few_steps(LanguageModelingTask, optimizer, width=MuPTask.BASE_WIDTH)
    model, _ = few_steps(MuPTask, optimizer, width=MuPTask.BASE_WIDTH)
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize(("optimizer", "factor"), [("adamw", 1 / 4), ("muon", 1 / 2)])
def test_only_the_rates_of_hidden_matrices_are_scaled(optimizer, factor):
    task = MuPTask(coordinate_config(optimizer, width=256))
    model = task.build_model(DATA)
    groups = task.build_optimizer(model).param_groups
    hidden = {id(matrix) for matrix in hidden_matrices(model)}
    seen = set()
    for group in groups:
        for parameter in group["params"]:
            seen.add(id(parameter))
            inside = id(parameter) in hidden
            assert group["lr"] == pytest.approx(3e-3 * (factor if inside else 1))
            if parameter.ndim >= 2:  # a step shrinks all matrices equally
                assert group["lr"] * group["weight_decay"] == pytest.approx(3e-3 * 0.1)
            if group.get("muon"):
                assert inside
    assert seen == {id(parameter) for parameter in model.parameters()}


def test_an_output_layer_of_its_own_and_learned_positions_are_not_hidden():
    shape = ModelConfig(
        vocab_size=256, hidden_size=64, position_type="learned", tie_word_embeddings=False
    )
    model = LanguageModelingTask(Config(model=shape)).build_model(DATA)
    chosen = {id(matrix) for matrix in hidden_matrices(model)}
    names = {name for name, p in model.named_parameters() if id(p) in chosen}
    assert all(name.startswith("layers.") for name in names)
    assert len(names) == 7 * shape.num_layers


def test_the_model_has_other_factors_and_the_configuration_stays():
    config = coordinate_config("adamw", width=256)
    task = MuPTask(config)
    built = task.build_model(DATA).config
    assert (built.logits_scaling, built.attention_scale) == (4.0, 16**0.5 / 64)
    assert task.config is config and config.model.logits_scaling == 1.0
    std = {p.std().item() for p in hidden_matrices(task.build_model(DATA))}
    assert max(std) == pytest.approx(0.02 / 2, rel=0.05)


@pytest.mark.parametrize("change", [{"use_moe": True}, {"attention_scale": 0.1}])
def test_what_it_has_no_rule_for_is_refused(change):
    config = coordinate_config("adamw", width=128)
    task = MuPTask(replace(config, model=replace(config.model, **change)))
    with pytest.raises(ValueError, match="muP has no rule"):
        task.build_model(DATA)


@pytest.mark.parametrize("factor", [0, -0.5, math.nan, math.inf, None, "2"])
def test_a_factor_that_is_no_scale_is_refused(factor):
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
    with pytest.raises(ValueError, match="factor=.* must be positive and finite"):
        scale_rates(optimizer, [layer.weight], factor)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


def test_the_matrices_must_be_those_of_the_optimizer():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.Rprop(layer.parameters(), lr=0.5)  # it has no weight decay
    with pytest.raises(ValueError, match=r"doesn't have 1 of the matrices, one of shape \(2, 3\)"):
        scale_rates(optimizer, [layer.weight, nn.Linear(3, 2).weight], 0.25)
    frozen = nn.Linear(3, 2).requires_grad_(False)
    scale_rates(optimizer, [layer.weight, frozen.weight], 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]


def test_a_run_in_mup_is_resumed_and_loaded(tmp_path):
    name = "llm_course.training.mup:MuPTask"
    assert find_task(name) is MuPTask
    config = Config(
        run_dir=str(tmp_path),
        task=name,
        model=ModelConfig(hidden_size=32, num_layers=1, num_heads=2, max_position_embeddings=16),
        data={"corpus": "stories", "stories": {"num_bytes": 20_000}, "vocab_size": 300}
        | {"sequence_length": 16, "val_fraction": 0.2},
        training=TrainingConfig(max_steps=3, batch_size=2, eval_interval=3, precision="fp32"),
        optimization=OptimizationConfig(warmup_steps=0, schedule="constant"),
        logging=LoggingConfig(progress=False, tensorboard=False, level="warning"),
    )
    train_worker(config)
    longer = replace(config, training=replace(config.training, max_steps=5))
    assert train_worker(longer).step == 5
    model, _ = load_run(tmp_path)
    assert model.config.logits_scaling == 0.5

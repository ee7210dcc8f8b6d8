"""Sums that add up, optimizers and schedules equal to PyTorch's and to their formulas, and tasks of
the user's own.
"""

import copy
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.testing import assert_close

from llm_course import hardware
from llm_course.hardware import computes_in_bf16
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.text.batches import IGNORE_INDEX
from llm_course.text.data import SyntheticDataModule
from llm_course.training.config import Config, DataConfig, OptimizationConfig, TrainingConfig
from llm_course.training.muon import Muon, _stacks, muon_dtype, newton_schulz
from llm_course.training.optim import build_optimizer, build_schedule, learning_rate_factor
from llm_course.training.task import (
    LanguageModelingTask,
    LinearDataModule,
    RegressionTask,
    StepOutput,
    TrainingTask,
)

TINY = ModelConfig(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2)
EXPERTS = ModelConfig(
    vocab_size=11, hidden_size=16, num_layers=2, num_heads=2, use_moe=True, num_experts=4, top_k=2
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def lm_batch(rows=6, length=8, ignored=0.4, seed=0):
    ids, labels = torch.randint(11, (2, rows, length), generator=seeded(seed))
    labels[torch.rand(rows, length, generator=seeded(seed + 1)) < ignored] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}


def cut(batch, *places):
    return [
        dict(zip(batch, parts, strict=True))
        for parts in zip(*(t.tensor_split(places) for t in batch.values()), strict=True)
    ]


def matrix_and_vector(seed=0):
    return [
        nn.Parameter(torch.randn(12, 8, generator=seeded(seed))),
        nn.Parameter(torch.randn(8, generator=seeded(seed + 1))),
    ]


def muon(W, b, **options):
    options = dict(lr=0.02, dtype=torch.float32) | options
    return Muon([dict(params=[W], muon=True), dict(params=[b], weight_decay=0.0)], **options)


def run_steps(optimizers, parameters, steps, seed=0, dtype=torch.float32):
    generator = seeded(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = (
                torch.randn(parameter.shape, generator=generator).to(dtype).to(parameter.device)
            )
        for optimizer in optimizers:
            optimizer.step()


# ---------------------------------------------------------------- the task


def test_what_a_subclass_forgets_is_named():
    class Forgetful(TrainingTask):
        pass

    with pytest.raises(TypeError, match="abstract class Forgetful.*build_model.*train_step"):
        Forgetful(Config())

    class WithoutData(Forgetful):
        def build_model(self, data):
            return torch.nn.Linear(1, 1)

        def train_step(self, model, batch):
            raise AssertionError("never called")

    with pytest.raises(NotImplementedError, match="WithoutData must define build_data"):
        WithoutData(Config()).build_data()


def test_defaults_of_a_task():
    task = RegressionTask(
        Config(
            optimization=OptimizationConfig(optimizer="adamw", learning_rate=0.5, warmup_steps=10)
        )
    )
    optimizer = task.build_optimizer(nn.Linear(3, 2))
    assert isinstance(optimizer, torch.optim.AdamW)
    scheduler = task.build_scheduler(optimizer, max_steps=20)
    assert isinstance(scheduler, LambdaLR) and scheduler.get_last_lr() == [0.05, 0.05]
    assert task.metrics(1.0, task.build_data()) == {}
    assert task.after_update(nn.Linear(3, 2), lambda tensor: tensor) is None
    assert StepOutput(torch.ones(()), torch.ones(())).aux_sum == 0.0


@pytest.mark.parametrize("task", ["regression", "dense", "experts"])
@pytest.mark.parametrize("places", [(1,), (2, 3), (5,), (0, 3)])
def test_sums_of_micro_batches_are_those_of_the_batch(task, places):
    torch.manual_seed(0)
    if task == "regression":
        task = RegressionTask(Config())
        data = task.build_data()
        data.setup()
        model = task.build_model(data)
        batch = data.train_dataset.__getitems__(list(range(6)))
    else:
        config = TINY if task == "dense" else EXPERTS
        task = LanguageModelingTask(Config(model=config))
        model = DecoderModel(config)
        batch = lm_batch()
    whole = task.train_step(model, batch)
    parts = [task.train_step(model, part) for part in cut(batch, *places)]
    assert_close(sum(part.loss_sum for part in parts), whole.loss_sum)
    assert (
        sum(part.num_targets for part in parts) == whole.num_targets
        and not whole.num_targets.is_floating_point()
    )
    gradients = [
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
        for loss in (whole.loss_sum, sum(part.loss_sum for part in parts))
    ]
    assert_close(*gradients, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- least squares


@settings(max_examples=15, deadline=None)
@given(num_examples=st.integers(16, 300), seed=st.integers(0, 99))
def test_solution_is_the_minimum(num_examples, seed):
    data = LinearDataModule(num_examples=num_examples, seed=seed)
    data.setup()
    assert len(data.train_dataset) + len(data.val_dataset) == num_examples
    x = data.train_dataset.x
    y = data.train_dataset.y

    def loss(solution):
        return (x @ solution[:-1] + solution[-1] - y).square().mean()

    solution = data.solution().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(solution), solution)
    assert gradient.abs().max() < 1e-4
    shifts = 0.1 * torch.randn(5, 9, generator=seeded(seed))
    assert all(loss(solution + shift) > loss(solution) for shift in shifts)


def test_linear_data_is_a_function_of_its_seed():
    first = LinearDataModule(seed=1)
    again = LinearDataModule(seed=1)
    other = LinearDataModule(seed=2)
    for data in (first, again, other):
        data.setup()
    assert torch.equal(first.train_dataset.x, again.train_dataset.x)
    assert not torch.equal(first.train_dataset.x, other.train_dataset.x)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    with pytest.raises(ValueError, match="num_examples=15 must be at least 16"):
        LinearDataModule(num_examples=15)


def test_regression_reaches_the_solution():
    optimization = OptimizationConfig(
        learning_rate=0.1, warmup_steps=5, weight_decay=0.0, min_lr_ratio=0.0
    )
    task = RegressionTask(Config(training=TrainingConfig(batch_size=64), optimization=optimization))
    data = task.build_data()
    data.setup()
    torch.manual_seed(0)
    model = task.build_model(data)
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer, max_steps=140)
    for epoch in range(20):
        for batch in data.train_dataloader(epoch=epoch):
            output = task.train_step(model, batch)
            (output.loss_sum / output.num_targets).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_close(torch.cat([model.weight[0], model.bias]), data.solution(), rtol=0, atol=0.02)


# ---------------------------------------------------------------- AdamW


def test_adamw_is_the_formula_and_decays_matrices_only():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    config = OptimizationConfig(learning_rate=0.01, weight_decay=0.3, beta1=0.8, beta2=0.9)
    optimizer = build_optimizer(model, config)
    parameters = list(model.parameters())
    expected = [
        (p.detach().double(), torch.zeros(p.shape).double(), torch.zeros(p.shape).double())
        for p in parameters
    ]
    generator = seeded()
    for t in range(1, 8):
        for place, parameter in enumerate(parameters):
            g = parameter.grad = torch.randn(parameter.shape, generator=generator)
            p, m, v = expected[place]
            m = 0.8 * m + 0.2 * g
            v = 0.9 * v + 0.1 * g**2
            p = p * (1 - 0.01 * (0.3 if p.ndim == 2 else 0.0))
            expected[place] = (
                p - 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8),
                m,
                v,
            )
        optimizer.step()
    for parameter, (p, _, _) in zip(parameters, expected, strict=True):
        assert_close(parameter.detach().double(), p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group(optimizer, config, tied):
    model = DecoderModel(
        ModelConfig(**(vars(config) | {"tie_word_embeddings": tied, "position_type": "learned"}))
    )
    frozen = model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    groups = build_optimizer(
        model, OptimizationConfig(optimizer=optimizer, weight_decay=0.1)
    ).param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p is not frozen)
    for group in groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])
    if optimizer == "muon":
        inner = {id(p) for group in groups if group["muon"] for p in group["params"]}
        names = {name for name, p in model.named_parameters() if id(p) in inner}
        assert (
            all(name.startswith("layers.") for name in names)
            and "layers.1.self_attn.q_proj.weight" in names
        )
        assert ("layers.0.mlp.experts.down_proj" in names) == (config is EXPERTS)


def test_other_models_embeddings_are_found_by_their_type():
    model = nn.ModuleDict(
        {"wte": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)}
    )
    groups = build_optimizer(model, OptimizationConfig(optimizer="muon")).param_groups
    assert [group["muon"] for group in groups] == [True, False, False]
    assert (
        groups[0]["params"][0] is model["body"].weight
        and len(groups[1]["params"]) == len(groups[2]["params"]) == 2
    )


def test_impossible_optimizers_are_refused():
    with pytest.raises(
        ValueError, match="muon needs a matrix inside the model, and there is none: use adamw"
    ):
        build_optimizer(nn.Embedding(4, 3), OptimizationConfig(optimizer="muon"))
    for name in ("adamw", "muon"):
        with pytest.raises(ValueError, match="Linear has no parameter with requires_grad=True"):
            build_optimizer(
                nn.Linear(2, 2).requires_grad_(False), OptimizationConfig(optimizer=name)
            )
    with pytest.raises(ValueError, match=r"shape \(3,\): only matrices"):
        Muon([dict(params=[nn.Parameter(torch.ones(3))], muon=True)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be"),
        ({"lr": math.nan}, "lr=nan must be"),
        ({"betas": None}, "betas=None must be two numbers"),
        ({"betas": (0.9, 0.9, 0.9)}, "must be two numbers"),
        ({"betas": (0.9, 1.0)}, "beta2=1.0 must be"),
        ({"momentum": 1.0}, "momentum=1.0 must be"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be"),
        ({"muon": "no"}, "muon='no' must be True or False"),
    ],
)
def test_the_settings_of_a_muon_group_are_checked_like_the_defaults(settings, message):
    W = nn.Parameter(torch.eye(3))
    with pytest.raises(ValueError, match=message):
        Muon([dict(params=[W], **settings)])
    optimizer = Muon([dict(params=[nn.Parameter(torch.eye(2))], muon=True)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(dict(params=[W], **settings))
    assert len(optimizer.param_groups) == 1  # as it was


@pytest.mark.parametrize(
    "groups", [[nn.Parameter(torch.eye(3))], nn.Linear(2, 2).parameters(), [{}]]
)
def test_muon_does_not_leave_parameters_without_groups_to_adamw(groups):
    with pytest.raises(ValueError, match="groups must be parameter groups"):
        Muon(groups)


@pytest.mark.parametrize("dtype", [torch.int64, None, "float32"])
def test_newton_schulz_needs_a_type_with_fractions(dtype):
    with pytest.raises(ValueError, match="dtype=.* must be a floating-point type"):
        newton_schulz(torch.eye(3), dtype=dtype)


# ---------------------------------------------------------------- Newton-Schulz


@settings(max_examples=60, deadline=None)
@given(
    stack=st.lists(st.integers(1, 3), max_size=2),
    M=st.integers(1, 9),
    N=st.integers(1, 9),
    steps=st.integers(0, 8),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_newton_schulz_is_a_polynomial_of_the_singular_values(stack, M, N, steps, scale, seed):
    matrices = scale * torch.randn(*stack, M, N, generator=seeded(seed), dtype=torch.float64)
    before = matrices.clone()
    U, S, Vh = torch.linalg.svd(matrices, full_matrices=False)
    s = S / S.norm(dim=-1, keepdim=True)
    for _ in range(steps):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    assert_close(
        newton_schulz(matrices, steps=steps, dtype=torch.float64),
        U @ (s[..., None] * Vh),
        rtol=0,
        atol=1e-9,
    )
    assert torch.equal(matrices, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_is_nearly_orthogonal(dtype):
    matrix = torch.randn(24, 16, generator=seeded())
    got = newton_schulz(matrix, dtype=dtype)
    U, _, Vh = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.linalg.svdvals(got)
    assert got.dtype == torch.float32 and 0.6 < values.min() and values.max() < 1.3
    assert (
        (got - U @ Vh).norm() / (U @ Vh).norm()
        < 0.35
        < (matrix / matrix.norm() - U @ Vh).norm() / (U @ Vh).norm()
    )
    # experts without a token
    assert torch.equal(newton_schulz(torch.zeros(3, 2, 2), dtype=dtype), torch.zeros(3, 2, 2))


def test_newton_schulz_lifts_what_is_above_a_700th_of_the_norm():
    for share, lifted in ((1 / 700, True), (1 / 2000, False)):
        values = torch.tensor([1.0, share], dtype=torch.float64)
        small = newton_schulz(torch.diag(values / values.norm()), dtype=torch.float64)[1, 1]
        assert (0.65 < small < 1.21) == lifted


# ---------------------------------------------------------------- Muon


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (1, 8), (8, 1)])
def test_muon_equals_the_formula(shape, weight_decay):
    p = torch.randn(shape, generator=seeded(7))
    W = nn.Parameter(p.clone())
    optimizer = Muon(
        [dict(params=[W], muon=True)],
        lr=0.02,
        momentum=0.9,
        weight_decay=weight_decay,
        dtype=torch.float32,
    )
    B = torch.zeros(shape)
    generator = seeded()
    for _ in range(10):
        W.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        B = 0.9 * B + W.grad
        x = W.grad + 0.9 * B
        x = x / x.norm()
        for _ in range(5):
            A = x @ x.T
            x = 3.4445 * x - 4.775 * A @ x + 2.0315 * A @ A @ x
        p = (1 - 0.02 * weight_decay) * p - 0.02 * 0.2 * max(shape) ** 0.5 * x
    assert_close(W.detach(), p, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_muon_and_its_adamw_equal_pytorchs(shape):
    (W, _) = matrix_and_vector()
    (b, c) = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    W = nn.Parameter(torch.randn(shape, generator=seeded()))
    V = nn.Parameter(W.detach().clone())
    start = W.detach().clone()
    run_steps([muon(W, b, dtype=torch.bfloat16, weight_decay=0.1)], [W, b], 15)
    theirs = torch.optim.Muon([V], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    run_steps(
        [theirs, torch.optim.AdamW([c], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)], [V, c], 15
    )
    assert_close(b, c)
    assert_close(W, V, rtol=0, atol=6e-3)
    assert (V - start).abs().max() > 0.05  # far more than the tolerance


def test_a_stack_of_matrices_is_so_many_matrices():
    start = torch.randn(3, 6, 4, generator=seeded())
    stack = nn.Parameter(start.clone())
    single = [nn.Parameter(matrix.clone()) for matrix in start]
    together = Muon([dict(params=[stack], muon=True)], dtype=torch.float32)
    apart = Muon([dict(params=single, muon=True)], dtype=torch.float32)
    generator = seeded(1)
    for _ in range(5):
        stack.grad = torch.randn(start.shape, generator=generator)
        stack.grad[2] = 0  # an expert without a token
        for parameter, gradient in zip(single, stack.grad, strict=True):
            parameter.grad = gradient.clone()
        together.step()
        apart.step()
    assert_close(stack.detach(), torch.stack([p.detach() for p in single]))
    assert_close(stack.detach()[2], start[2] * (1 - 1e-3 * 0.1) ** 5)  # decays, and no more
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([stack])  # why ours exists


def test_small_matrices_of_one_shape_step_in_stacks_and_as_each_alone():
    shapes = [
        (8, 8),
        (12, 8),
        (8, 8),
        (2, 4, 4),
        (8, 8),
        (1024, 256),
        (1024, 256),
        (1024, 256),
        (0, 8),
    ]
    generator = seeded()
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    parameters, alone = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    together = Muon([dict(params=parameters, muon=True)], dtype=torch.float32)
    apart = [
        Muon([dict(params=[parameter], muon=True)], dtype=torch.float32) for parameter in alone
    ]
    for _ in range(3):
        for p, q in zip(parameters, alone, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        together.step()
        for optimizer in apart:
            optimizer.step()
    for p, q, before in zip(parameters, alone, start, strict=True):
        assert_close(p.detach(), q.detach())
        assert before.numel() == 0 or (p - before).abs().max() > 1e-4
    # at most half a million numbers in one
    assert [len(stack) for stack in _stacks(parameters)] == [3, 1, 1, 2, 1, 1]


def test_an_idle_expert_goes_on_unless_it_never_had_a_gradient():
    experts = nn.Parameter(torch.zeros(3, 8, 8))  # busy, idle after two steps, idle from the start
    optimizer = Muon(
        [dict(params=[experts], muon=True, weight_decay=0.0)], lr=1.0, dtype=torch.float32
    )
    generator = seeded()
    for step in range(401):
        noise = 1e-3 * torch.randn(experts.shape, generator=generator)
        experts.grad = noise * torch.tensor([1, step < 2, 0])[:, None, None]
        before = experts.detach().clone()
        optimizer.step()
        moved = (experts.detach() - before).square().mean((1, 2)).sqrt()
        assert moved[2] == 0
        assert not 2 <= step <= 200 or moved[1] > 0.7 * moved[0] > 0
    assert moved[1] < 0.01 * moved[0]  # its momentum fell below the floor of Newton-Schulz


@pytest.mark.parametrize("lr", [1e-3, 0.1])
def test_muons_steps_have_the_size_of_adamws(lr):
    for shape in ((64, 64), (16, 128)):
        W = nn.Parameter(torch.zeros(shape))
        W.grad = torch.randn(shape, generator=seeded())
        Muon([dict(params=[W], muon=True)], lr=lr, dtype=torch.float32).step()
        assert 0.15 * lr < W.detach().square().mean().sqrt() < 0.23 * lr


def test_parameters_without_gradient_stay():
    W, b = matrix_and_vector()
    before = [W.detach().clone(), b.detach().clone()]
    optimizer = muon(W, b)
    optimizer.step()
    assert torch.equal(W, before[0]) and torch.equal(b, before[1]) and not optimizer.state
    b.grad = torch.ones(8)
    optimizer.step()
    assert torch.equal(W, before[0]) and not torch.equal(b, before[1])


def test_step_of_muon_is_a_step_of_an_optimizer():
    """Hooks fire once, also where an AdamW was made before; the closure runs first and once; groups
    stay.
    """
    W, b = matrix_and_vector()
    torch.optim.AdamW([b])
    optimizer = muon(W, b)
    events = []
    groups = optimizer.param_groups
    optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
    optimizer.register_step_post_hook(lambda *_: events.append("post"))

    def closure():
        events.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = W.square().sum() + b.square().sum()
        loss.backward()
        return loss

    start = W.detach().clone()
    loss = optimizer.step(closure)
    assert events == ["pre", "closure", "post"] and loss.item() > 0
    # W had no gradient before the closure
    assert optimizer.param_groups is groups and not torch.equal(W, start)

    def failing():
        raise RuntimeError("in the closure")

    before = W.detach().clone()
    with pytest.raises(RuntimeError, match="in the closure"):
        optimizer.step(failing)
    assert optimizer.param_groups is groups and len(groups) == 2 and torch.equal(W, before)


def test_schedule_reaches_all_groups_of_muon():
    W, b = matrix_and_vector()
    optimizer = muon(W, b, lr=1.0)
    scheduler = build_schedule(
        optimizer,
        OptimizationConfig(schedule="linear", warmup_steps=2, min_lr_ratio=0.0),
        max_steps=4,
    )
    seen = []
    for _ in range(4):
        seen.append([group["lr"] for group in optimizer.param_groups])
        run_steps([optimizer], [W, b], 1)
        scheduler.step()
    assert seen == [[0.5] * 2, [1.0] * 2, [1.0] * 2, [0.5] * 2]
    start = W.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run_steps([optimizer], [W, b], 1)
    assert torch.equal(W, start)


@pytest.mark.parametrize("bad", ["W", "b"])
def test_gradscaler_skips_muon_whole(bad):
    W, b = matrix_and_vector()
    optimizer = muon(W, b)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [W.detach().clone(), b.detach().clone()]
    W.grad = torch.ones(12, 8)
    b.grad = torch.ones(8)
    {"W": W, "b": b}[bad].grad[0] = math.inf
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(W, before[0]) and torch.equal(b, before[1]) and scaler.get_scale() == 4.0
    # and a scaled step is the unscaled one
    V, c = matrix_and_vector()
    plain = muon(V, c)
    V.grad = torch.ones(12, 8)
    c.grad = torch.ones(8)
    W.grad = torch.full((12, 8), 4.0)
    b.grad = torch.full((8,), 4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    plain.step()
    assert_close([W, b], [V, c])


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_muon_goes_on_from_a_copy_bit_for_bit(way):
    W, b = matrix_and_vector()
    optimizer = muon(W, b)
    run_steps([optimizer], [W, b], 3)
    if way == "state_dict":
        V = nn.Parameter(W.detach().clone())
        c = nn.Parameter(b.detach().clone())
        other = muon(V, c)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif way == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = pickle.loads(pickle.dumps(optimizer))
    V, c = (group["params"][0] for group in other.param_groups)
    assert V is not W and other.dtype == torch.float32
    run_steps([optimizer], [W, b], 3, seed=5)
    run_steps([other], [V, c], 3, seed=5)
    assert torch.equal(W, V) and torch.equal(b, c)
    fresh = muon(*(copies := [nn.Parameter(torch.zeros(12, 8)), nn.Parameter(torch.zeros(8))]))
    run_steps([fresh], copies, 1)
    assert {tuple(state) for state in fresh.state.values()} == {
        ("momentum_buffer",),
        ("step", "exp_avg", "exp_avg_sq"),
    }


@pytest.fixture
def asked_again():
    """The processor's answer, kept for the whole process, is forgotten before and after."""
    hardware._ask_for_bf16.cache_clear()
    yield
    hardware._ask_for_bf16.cache_clear()


def dtype_of_a_step(model, monkeypatch):
    """The type in which the optimizer of a configuration runs Newton-Schulz."""
    used = []
    optimizer = build_optimizer(model, OptimizationConfig(optimizer="muon"))
    model(torch.ones(2)).sum().backward()
    with monkeypatch.context() as patched:
        patched.setattr(
            "llm_course.training.muon.newton_schulz",
            lambda matrices, *, dtype: used.append(dtype) or matrices,
        )
        optimizer.step()
    assert len(used) == 1
    return used[0]


def test_dtype_follows_the_hardware(monkeypatch, asked_again):
    for supported in ((True, False), (False, True), (False, False)):
        hardware._ask_for_bf16.cache_clear()
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported[0])  # noqa: B023
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: supported[1])  # noqa: B023
        expected = torch.bfloat16 if any(supported) else torch.float32
        assert muon_dtype(torch.device("cpu")) == expected
        assert dtype_of_a_step(nn.Linear(2, 2), monkeypatch) == expected
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert muon_dtype(torch.device("cuda")) == torch.float32


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "meta"])
def test_muon_and_the_precision_ask_the_same_question(monkeypatch, asked_again, device, native):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: native)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or native,
    )
    expected = torch.bfloat16 if computes_in_bf16(torch.device(device)) else torch.float32
    assert muon_dtype(torch.device(device)) == expected
    assert computes_in_bf16(torch.device(device)) is (native and device in ("cpu", "cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda():
    W, b = (nn.Parameter(p.detach().cuda()) for p in matrix_and_vector())
    V, c = matrix_and_vector()
    run_steps([muon(W, b)], [W, b], 5)
    run_steps([muon(V, c)], [V, c], 5)
    assert_close(W.detach().cpu(), V.detach(), rtol=1e-3, atol=1e-3)
    assert_close(b.detach().cpu(), c.detach(), rtol=1e-5, atol=1e-6)
    U = nn.Parameter(torch.ones(12, 8, device="cuda"))
    T = nn.Parameter(torch.ones(12, 8, device="cuda"))
    run_steps([Muon([dict(params=[U], muon=True)], lr=0.02)], [U], 5)
    theirs = torch.optim.Muon([T], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    run_steps([theirs], [T], 5)
    assert_close(U, T, rtol=0, atol=6e-3)
    model = nn.Linear(64, 64).cuda()
    for name in ("adamw", "muon"):
        optimizer = build_optimizer(model, OptimizationConfig(optimizer=name))
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        before = model.weight.detach().clone()
        for scale_of_loss, changed in ((math.inf, False), (1.0, True)):
            optimizer.zero_grad()
            scaler.scale(
                scale_of_loss * model(torch.ones(2, 64, device="cuda")).square().sum()
            ).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(model.weight, before) != changed and model.weight.isfinite().all()


# ---------------------------------------------------------------- schedules


def rates(make_scheduler, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = make_scheduler(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return torch.tensor(seen, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    warmup=st.integers(2, 30),
    fifths=st.integers(1, 8),
    ratio=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
)
def test_schedules_equal_pytorchs(schedule, warmup, fifths, ratio):
    steps = 5 * (fifths + warmup)  # the last 20% are whole steps, and the warmup ends before them
    down = {
        "cosine": lambda o: [CosineAnnealingLR(o, T_max=steps - warmup, eta_min=0.5 * ratio)],
        "linear": lambda o: [LinearLR(o, 1.0, ratio, total_iters=steps - warmup)],
        "wsd": lambda o: [ConstantLR(o, 1.0), LinearLR(o, 1.0, ratio, total_iters=steps // 5)],
        "constant": lambda o: [ConstantLR(o, 1.0)],
    }[schedule]
    ends = [warmup, steps - steps // 5] if schedule == "wsd" else [warmup]
    config = OptimizationConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = rates(
            lambda o: SequentialLR(
                o, [LinearLR(o, 1 / warmup, 1.0, total_iters=warmup - 1), *down(o)], ends
            ),
            steps,
        )
    assert_close(
        rates(lambda o: build_schedule(o, config, max_steps=steps), steps),
        theirs,
        rtol=1e-7,
        atol=0,
    )


@settings(max_examples=200, deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    warmup=st.integers(0, 40),
    max_steps=st.integers(0, 60),
    ratio=st.floats(0, 1),
)
def test_a_schedule_rises_once_and_then_never(schedule, warmup, max_steps, ratio):
    config = OptimizationConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    factors = [
        learning_rate_factor(step, config, max_steps=max_steps) for step in range(max_steps + 45)
    ]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:warmup] == [(step + 1) / warmup for step in range(warmup)][: len(factors)]
    falling = factors[warmup:]
    assert falling == sorted(falling, reverse=True)
    if schedule != "constant":  # past the end it stays at the lowest
        assert factors[-1] == pytest.approx(ratio)
    if 0 < warmup < max_steps:
        assert factors[warmup] == factors[warmup - 1] == 1.0


def test_values_by_hand():
    def share(schedule, step):
        return learning_rate_factor(
            step, OptimizationConfig(schedule=schedule, warmup_steps=10), max_steps=100
        )

    assert [share("cosine", step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert share("cosine", 55) == pytest.approx(0.55) and share("linear", 55) == pytest.approx(0.55)
    # a third of half a wave: (1 - cos 60) / 2 = 1/4 of the way
    assert share("cosine", 40) == pytest.approx(0.775)
    assert share("linear", 40) == pytest.approx(0.7)
    assert [share("wsd", step) for step in (10, 80)] == [1.0, 1.0] and share(
        "wsd", 90
    ) == pytest.approx(0.55)


# ---------------------------------------------------------------- language modelling


def test_masked_labels_do_not_count_and_none_at_all_is_no_error():
    model = DecoderModel(TINY)
    batch = lm_batch(ignored=1.0)
    output = LanguageModelingTask(Config(model=TINY)).train_step(model, batch)
    assert output.loss_sum.item() == 0 and output.num_targets.item() == 0
    nn.init.zeros_(model.lm_head.weight)
    batch["labels"][0, :3] = 1
    output = LanguageModelingTask(Config(model=TINY)).train_step(model, batch)
    assert_close(output.loss_sum, torch.tensor(3 * math.log(11))) and output.num_targets.item() == 3


def test_auxiliary_loss_is_trained_on_and_not_reported():
    model = DecoderModel(EXPERTS)
    batch = lm_batch()
    task = LanguageModelingTask(Config(model=EXPERTS))
    train = task.train_step(model, batch)
    val = task.validation_step(model, batch)
    direct = model(**batch)
    assert direct.aux_loss > 0 and val.aux_sum == 0.0
    assert_close(train.aux_sum / train.num_targets, direct.aux_loss)
    assert_close([train.loss_sum, val.loss_sum], [direct.loss_sum] * 2)
    assert task._tokens_per_expert is None  # nobody asked for the loads


def test_documents_are_kept_apart_and_unknown_fields_ignored():
    model = DecoderModel(TINY)
    batch = lm_batch()
    task = LanguageModelingTask(Config(model=TINY))
    plain = task.train_step(model, batch | {"attention_mask": torch.zeros(6, 8)}).loss_sum
    assert_close(plain, task.train_step(model, batch).loss_sum)
    documents = task.train_step(
        model, batch | {"document_ids": torch.arange(8).expand(6, 8) // 4}
    ).loss_sum
    assert not torch.allclose(plain, documents)


class CopyTask(LanguageModelingTask):
    def build_data(self):
        return SyntheticDataModule("copy", num_symbols=9, length=3, batch_size=4)


def copy_task(**optimization):
    config = Config(
        model=EXPERTS,
        data=DataConfig(sequence_length=8),
        optimization=OptimizationConfig(**optimization),
    )
    return CopyTask(config)


def biases(model):
    return torch.stack([layer.mlp.gate.expert_bias for layer in model.layers])


def test_router_bias_follows_the_loads_of_the_whole_step():
    task = copy_task(router_bias_rate=0.25)
    model = DecoderModel(EXPERTS)
    parts = cut(lm_batch(), 1, 4)
    with torch.no_grad():
        loads = sum(model(**part).tokens_per_expert for part in parts)  # (L, E)
    for part in parts:
        task.train_step(model, part)
        task.validation_step(model, part)  # must not count
    other_rank = torch.randint(0, 50, loads.shape, generator=seeded())
    handed = []
    task.after_update(model, lambda counts: handed.append(counts) or counts + other_rank)
    assert torch.equal(handed[0], loads)
    expected = (loads + other_rank).float()
    assert_close(biases(model), 0.25 * (expected.mean(1, keepdim=True) - expected).sign())
    before = biases(model)
    task.after_update(model, lambda counts: counts)  # used once
    assert torch.equal(biases(model), before) and before.abs().max() > 0
    quiet = copy_task()
    dense = DecoderModel(TINY)
    quiet.train_step(model, parts[0])
    quiet.after_update(model, lambda counts: counts)
    assert torch.equal(biases(model), before)
    task.train_step(dense, parts[0])
    task.after_update(dense, lambda counts: counts)  # a dense model has no loads


def test_the_vocabulary_is_that_of_the_data():
    task = copy_task()
    data = task.build_data()
    assert data.vocab_size == 11 and task.build_model(data).config.vocab_size == 11
    data.vocab_size = 12
    with pytest.raises(
        ValueError, match="model.vocab_size=11 is less than the tokenizer's 12: leave it out"
    ):
        task.build_model(data)
    assert task.metrics(1.0, data) == {}  # no text, no bytes


def test_text_from_the_configuration_to_bits_per_byte(tmp_path):
    (tmp_path / "text.txt").write_text(
        "The quick brown fox jumps over the lazy dog.\n\n" * 40, encoding="utf-8"
    )
    config = Config(
        run_dir=str(tmp_path / "run"),
        model=ModelConfig(hidden_size=16, num_layers=1, num_heads=2),
        data=DataConfig(
            files=str(tmp_path / "text.txt"), vocab_size=270, sequence_length=16, val_fraction=0.2
        ),
        training=TrainingConfig(batch_size=3, seed=5, activation_checkpointing=True),
    )
    config.logging.progress = False
    task = LanguageModelingTask(config)
    data = task.build_data()
    data.prepare_data()
    data.setup()
    model = task.build_model(data)
    batch = next(iter(data.train_dataloader(epoch=0)))
    assert data.seed == 5 and batch["input_ids"].shape == (3, 16) and model.activation_checkpointing
    output = task.train_step(model, batch)
    output.loss_sum.backward()
    assert output.num_targets == 48 and output.loss_sum.item() / 48 == pytest.approx(
        math.log(data.vocab_size), rel=0.1
    )
    assert task.metrics(data.bytes_per_token * math.log(2), data)["bits_per_byte"] == pytest.approx(
        1.0
    )

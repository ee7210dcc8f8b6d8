"""A model that is divided among processes must learn what one process learns, and its checkpoints
must be those of one. On gloo, so on any machine.
"""

import dataclasses
import sys

import parallel_worker as worker
import pytest
import torch
from distributed_worker import MODEL
from warm import launch_warm

from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import training_memory
from llm_course.training.checkpointing import CheckpointManager, load_checkpoint
from llm_course.training.config import (
    Config,
    DataConfig,
    DistributedConfig,
    LoggingConfig,
    ModelConfig,
    OptimizationConfig,
    TrainingConfig,
)
from llm_course.training.parallel import (
    check_division,
    held_parameters,
    layers_of,
    process_memory,
)
from llm_course.training.shards import from_shards, read_shards, to_shards
from llm_course.training.train import train_worker

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="gloo over Windows is not tried here"
)
VOCABULARY = 12  # two tokens of the synthetic task, and ten symbols
GRADIENT = 1e-6  # of a step of gradient descent with rate 1
TRAINED = 1e-4  # of eight steps of AdamW with rate 0.01, and its moments


@pytest.fixture(scope="module")
def model():
    """The weights that `through_shards` draws in two processes."""
    torch.manual_seed(0)
    return DecoderModel(ModelConfig(**(MODEL | worker.GROUPED | dict(vocab_size=16))))


@pytest.fixture(scope="module")
def shards(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("shards")
    state = {"model": dict(model.state_dict()), "optimizer": {}, "state": {"step": 3}}
    to_shards(CheckpointManager(folder / "checkpoints").save(state, step=3), folder / "one")
    return folder


@pytest.fixture(scope="module")
def two_ranks(shards):
    return launch_warm(worker.on_two_ranks, 2, str(shards))


@pytest.fixture(scope="module")
def four_ranks():
    return launch_warm(worker.on_four_ranks, 4)


def check_rows(rows, *, rel):
    """Losses, numbers of targets, norms and validations are those of one process."""
    mine, expected = rows
    assert len(mine) == len(expected) > 0
    for row, other in zip(mine, expected, strict=True):
        assert row == pytest.approx(other, rel=rel)


@pytest.mark.parametrize("kind", ["gradient", "old-fashioned", "newer", "accumulated", "documents"])
@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_two_ranks_give_the_gradient_of_one_process(two_ranks, strategy, kind):
    found = two_ranks[f"{strategy} {kind}"]
    assert found["state"] < GRADIENT
    check_rows(found["rows"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp+tp", "fsdp+tp", "ddp+pp", "pp"])
def test_four_ranks_give_the_gradient_of_one_process(four_ranks, strategy):
    found = four_ranks[f"{strategy} gradient"]
    assert found["state"] < GRADIENT
    check_rows(found["rows"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_two_ranks_train_as_one_process(two_ranks, strategy):
    found = two_ranks[f"{strategy} trained"]
    assert found["state"] < TRAINED
    check_rows(found["rows"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp+tp", "fsdp+tp", "ddp+pp", "pp"])
def test_four_ranks_train_as_one_process(four_ranks, strategy):
    found = four_ranks[f"{strategy} trained"]
    assert found["state"] < TRAINED
    check_rows(found["rows"], rel=1e-5)


@pytest.mark.parametrize(
    "mistake, bound", [("no sum", GRADIENT), ("untied", GRADIENT), ("own norm", TRAINED)]
)
def test_a_planted_mistake_is_found(two_ranks, mistake, bound):
    assert two_ranks[mistake]["weights"] > 10 * bound


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_a_run_changes_between_one_process_and_two(two_ranks, strategy):
    """The state of either goes on in the other, without checkpoint.allow_changes."""
    apart = two_ranks[f"{strategy} changes over"]
    assert apart["to one"] < TRAINED and apart["from one"] < TRAINED


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_resume_is_exact_with_dropout_and_accumulation(two_ranks, strategy):
    assert two_ranks[f"{strategy} resume"] == []


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_bf16_is_close_and_keeps_float32(two_ranks, strategy):
    found = two_ranks[f"{strategy} bf16"]
    assert found["state"] < 2e-2
    check_rows(found["rows"], rel=1e-2)


def test_muon_trains_a_pipeline(two_ranks):
    found = two_ranks["pp muon"]
    assert found["state"] < 2e-3  # it may multiply in bfloat16
    check_rows(found["rows"], rel=1e-3)


def test_each_process_holds_its_part(two_ranks):
    by_tensor, by_pipeline = two_ranks["tp held"], two_ranks["pp held"]
    assert by_tensor[0] == by_tensor[1]
    # two norms of C, and two of D = C / 4 for queries and keys, in each of four blocks
    norms = 4 * (2 * 16 + 2 * 4)
    whole = sum(held["blocks"] for held in by_pipeline)
    assert by_tensor[0]["blocks"] == (whole - norms) // 2 + norms
    assert by_pipeline[0]["blocks"] == by_pipeline[1]["blocks"] == whole // 2
    # the tied table is in both, the last norm in the second
    assert by_pipeline[1]["others"] - by_pipeline[0]["others"] == 16


def promised_bytes(strategy: str, model: dict, world_size: int) -> list[dict[str, int]]:
    """The bytes of weights, gradients and moments that are expected of each process."""
    size = 2 if "+" in strategy else None
    config = DistributedConfig(strategy=strategy, model_parallel_size=size)
    shape = ModelConfig(**(MODEL | model | dict(vocab_size=VOCABULARY)))
    held = held_parameters(shape, config, world_size)
    held *= world_size // len(held)
    return [dict(weights=4 * n, gradients=4 * n, optimizer=8 * n) for n in held]


@pytest.mark.parametrize("name", ["grouped", "old-fashioned"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "pp"])
def test_two_processes_hold_the_bytes_that_are_promised(two_ranks, strategy, name):
    model = worker.GROUPED if name == "grouped" else worker.OLD_FASHIONED
    assert two_ranks[f"{strategy} {name} bytes"] == promised_bytes(strategy, model, 2)


@pytest.mark.parametrize("strategy", ["ddp+tp", "fsdp+tp", "ddp+pp", "pp"])
def test_four_processes_hold_the_bytes_that_are_promised(four_ranks, strategy):
    model = worker.GROUPED | dict(num_layers=5)
    assert four_ranks[f"{strategy} bytes"] == promised_bytes(strategy, model, 4)


def memory_of(strategy: str, world_size: int, *, training: dict | None = None, **numbers: bool):
    """What is promised of the processes of a small model."""
    config = Config(
        model=ModelConfig(vocab_size=512, hidden_size=64, num_layers=4, num_heads=4),
        distributed=DistributedConfig(strategy=strategy, **numbers.pop("parts", {})),
        training=TrainingConfig(**({"batch_size": 8} | (training or {}))),
        data=DataConfig(sequence_length=64),
    )
    return config, process_memory(config, world_size, **numbers)


@pytest.mark.parametrize("mixed", [False, True])
def test_memory_of_one_process_is_that_of_the_estimate(mixed):
    config, [found] = memory_of("ddp", 4, mixed_precision=mixed)
    assert found == training_memory(config.model, 8, 64, mixed_precision=mixed)
    assert memory_of("tp", 1, mixed_precision=mixed)[1] == [found]
    assert memory_of("pp", 1, mixed_precision=mixed, parts=dict(micro_batches=1))[1] == [found]


@pytest.mark.parametrize("mixed", [False, True])
def test_stages_hold_together_what_one_process_holds(mixed):
    """But for the tied table, which both ends hold."""
    config, [whole] = memory_of("ddp", 1)
    _, stages = memory_of("pp", 4)
    table = 4 * 512 * 64
    assert sum(stage.gradients for stage in stages) == whole.gradients + table
    assert sum(stage.optimizer for stage in stages) == whole.optimizer + 2 * table
    assert [stage.loss > 0 for stage in stages] == [False, False, False, True]
    # 1F1B: a micro-batch less from stage to stage
    kept = [stage.activations for stage in stages]
    assert [size / kept[-1] for size in kept] == [4, 3, 2, 1]
    with_copies = memory_of("pp", 4, mixed_precision=True)[1]
    assert all(more.weights > less.weights for more, less in zip(with_copies, stages, strict=True))


def test_shares_become_smaller_and_what_is_gathered_does_not():
    sizes = [memory_of("fsdp", n)[1][0] for n in (1, 2, 4)]
    assert [size.optimizer for size in sizes] == [sizes[0].optimizer // n for n in (1, 2, 4)]
    gathered = [size.weights - size.optimizer // 2 for size in sizes]
    assert len(set(gathered)) == 1 and gathered[0] > 4 * 512 * 64
    twice = memory_of("fsdp", 2, training=dict(gradient_accumulation_steps=2))[1][0]
    whole = sizes[0].optimizer // 2
    assert twice.gradients == whole + whole // 2  # between micro-batches it is not shared yet


def test_memory_of_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of the 3 processes"):
        memory_of("tp", 3)


def test_tensor_parallel_drops_alike_but_in_its_heads(two_ranks):
    expected = {"embedding": True, "attention": False, "behind": True}
    assert two_ranks["tp draws alike"] == expected


def test_a_pipeline_computes_its_loss_and_nothing_else(two_ranks):
    without_labels, halved, linear = two_ranks["refusals"]
    assert "load the checkpoint in one process" in without_labels
    assert "multiplied by 0.5" in halved
    assert "divides a DecoderModel, and this task trains a Linear" in linear


def test_stages_have_neighbouring_layers_and_as_many():
    for num_layers in range(1, 12):
        for stages in range(1, num_layers + 1):
            parts = [layers_of(stage, stages, num_layers) for stage in range(stages)]
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            assert {len(part) for part in parts} <= {num_layers // stages, num_layers // stages + 1}


def test_two_processes_read_the_shards_of_one_and_one_reads_theirs(two_ranks, shards, model):
    assert two_ranks["shards"]
    files = [path.name for path in (shards / "two").glob("*.distcp")]
    assert len(files) == 2  # each has written its part
    found = read_shards(shards / "two")
    assert found.keys() == {f"model.{name}" for name in model.state_dict()}
    assert all(torch.equal(found[f"model.{n}"], t) for n, t in model.state_dict().items())


def test_a_checkpoint_comes_back_from_its_shards(shards, tmp_path):
    first = CheckpointManager(shards / "checkpoints").latest()
    again = from_shards(shards / "one", CheckpointManager(tmp_path))
    assert again.name == first.name
    for name in ("model.safetensors", "state.json"):
        assert (again / name).read_bytes() == (first / name).read_bytes()
    assert load_checkpoint(again)["state"] == {"step": 3}


def test_shards_are_not_written_over_anything(shards):
    with pytest.raises(ValueError, match="is not empty: choose a new folder"):
        to_shards(CheckpointManager(shards / "checkpoints").latest(), shards / "one")


# ---------------------------------------------------------------- what is refused at the start


def divided(strategy: str, size: int | None = None, **parts) -> Config:
    distributed = DistributedConfig(strategy=strategy, model_parallel_size=size)
    return Config(distributed=distributed, **parts)


@pytest.mark.parametrize("strategy", ["tp", "pp"])
@pytest.mark.parametrize(
    "parts, message",
    [
        (dict(model=ModelConfig(use_moe=True)), "use_moe=True does not go with .*: experts"),
        (dict(model=ModelConfig(num_mtp_layers=1)), "num_mtp_layers=1 .* take ddp or fsdp"),
        (dict(training=TrainingConfig(precision="fp16")), "precision=fp16 .* use ddp, or bf16"),
        (dict(training=TrainingConfig(compile=True)), "compile=True .* use ddp, or leave it out"),
        (dict(logging=LoggingConfig(sample_interval=5)), "sample_interval=5 .* use ddp, or null"),
    ],
)
def test_what_cannot_be_divided_is_refused(strategy, parts, message):
    with pytest.raises(ValueError, match=message):
        divided(strategy, **parts)


def test_a_norm_over_all_heads_is_refused_where_heads_are_divided():
    model = ModelConfig(qk_norm=True, qk_norm_over="projection")
    divided("pp", model=model)
    with pytest.raises(ValueError, match="qk_norm_over=projection .* no process has all heads"):
        divided("tp", model=model)


def test_muon_is_refused_where_matrices_are_divided():
    muon = OptimizationConfig(optimizer="muon")
    divided("pp", optimization=muon)
    with pytest.raises(ValueError, match="muon does not go with distributed.strategy=fsdp.tp"):
        divided("fsdp+tp", 2, optimization=muon)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(strategy="ddp+tp"), "needs distributed.model_parallel_size"),
        (dict(strategy="ddp", model_parallel_size=2), "needs tp or pp in distributed.strategy"),
        (dict(strategy="tp", model_parallel_size=1), "must be finite and at least 2"),
        (dict(strategy="pp", cpu_offload=True), "pp has nothing to offload"),
    ],
)
def test_sizes_and_strategy_must_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**settings)


SHAPE = dict(hidden_size=12, num_layers=2)


@pytest.mark.parametrize(
    "strategy, size, world_size, model, message",
    [
        ("tp", None, 4, dict(num_heads=6, head_dim=4), "num_heads=6 is not a multiple of the 4"),
        ("tp", None, 2, dict(num_heads=2, num_kv_heads=1), "num_kv_heads=1 is not a multiple of"),
        ("tp", None, 2, dict(num_heads=2, intermediate_size=7), "intermediate_size=7 is not"),
        ("pp", None, 3, dict(num_heads=2), "num_layers=2 are too few for the 3 processes"),
        ("pp", None, 5, dict(num_heads=2, num_layers=5), "micro_batches=4 are fewer than the 5"),
        ("ddp+tp", 2, 3, dict(num_heads=2), "3 processes are not a multiple"),
        ("tp", 2, 4, dict(num_heads=2), r"take ddp\+tp"),
    ],
)
def test_what_does_not_divide_is_refused(strategy, size, world_size, model, message):
    config = divided(strategy, size, model=ModelConfig(**(SHAPE | model)))
    with pytest.raises(ValueError, match=message):
        check_division(config, world_size)


def test_what_divides_is_taken():
    model = ModelConfig(num_heads=4, num_kv_heads=2, num_layers=4)
    for strategy in ("tp", "pp"):
        check_division(divided(strategy, model=model), 2)
        check_division(divided(f"ddp+{strategy}", 2, model=model), 4)
    check_division(Config(), 3)


def test_one_process_divides_nothing(tmp_path):
    config = dataclasses.replace(divided("tp"), run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="strategy=tp needs several processes"):
        train_worker(config)
    assert not (tmp_path / "run").exists()

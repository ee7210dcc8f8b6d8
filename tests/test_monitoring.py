"""Numbers about a run: measured over training time only, and predictions that hold."""

import inspect
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llm_course.commands import estimate
from llm_course.commands.estimate import estimate_command
from llm_course.hardware import cpu_multiplies_bf16, matmul_flops
from llm_course.model.config import ModelConfig
from llm_course.model.decoder import DecoderModel
from llm_course.model.estimate import flops_per_token, training_memory
from llm_course.text.batches import PackedDataset
from llm_course.training import cost as run_cost
from llm_course.training.config import Config, DataConfig, DistributedConfig, TrainingConfig
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.logging import Logger
from llm_course.training.monitoring import (
    LayerMonitor,
    PerformanceMonitor,
    RandomTokens,
    StepCost,
    estimate_run,
    measure_step,
    peak_memory_bytes,
)
from llm_course.training.parallel import process_memory
from llm_course.training.state import TrainState
from llm_course.training.task import LanguageModelingTask

SMALL = dict(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_position_embeddings=64)


def test_the_logger_is_silent_on_other_ranks_and_keeps_a_file(tmp_path, capsys):
    Logger(rank=1, file=tmp_path / "log").warning("nobody hears")
    Logger(file=tmp_path / "log").warning("low ink")
    assert capsys.readouterr().err == "warning: low ink\n"
    assert (tmp_path / "log").read_text().endswith(" warning: low ink\n") and "nobody" not in (
        tmp_path / "log"
    ).read_text()


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    return now


@pytest.mark.parametrize("first", [0, 1, 3], ids=["from the start", "resumed", "resumed late"])
def test_speed_leaves_validation_out_and_tells_waiting_from_computing(clock, first):
    """Each row is of its own steps: of the one that is left where a run resumes between two rows,
    and never of earlier ones.
    """
    config = ModelConfig(vocab_size=64, **SMALL)
    model = DecoderModel(config)
    engine = SimpleNamespace(
        state=TrainState(step=first, targets=100 * first),
        data_seconds=7.0,
        device=torch.device("cpu"),
        model=model,
        config=Config(data=DataConfig(sequence_length=16)),
    )
    monitor = PerformanceMonitor(log_interval=2, peak_flops=1e9)
    rows = []
    monitor.on_train_start(engine)
    for step in range(first + 1, 7):
        clock.seconds += 0.5
        engine.data_seconds += 0.1
        engine.state.step = step
        engine.state.targets = step * 100
        metrics: dict = {}
        if step == 2:  # validation takes ten seconds; the row is due in the same step
            monitor.on_validation_start(engine)
            clock.seconds += 10
            monitor.on_validation_end(engine, {})
        monitor.on_step_end(engine, metrics)
        rows += [metrics] if metrics else []
    assert len(rows) == (3 - first // 2)
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(100 / 0.5)
        assert row["step_seconds"] == pytest.approx(0.5) and row["data_seconds"] == pytest.approx(
            0.1
        )
        assert row["mfu"] == pytest.approx(200 * flops_per_token(config, 16).training / 1e9)
        assert row["peak_memory_gb"] > 0.05


def test_the_ceiling_and_the_memory_are_of_this_machine():
    assert 1e8 < matmul_flops(torch.device("cpu"), torch.float32, size=256, seconds=0.02) < 1e14
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(60_000_000)  # 240 MB
    assert peak_memory_bytes(torch.device("cpu")) >= before and held.numel()


STATUS = Path("/proc/self/status")


@pytest.mark.skipif(
    not (STATUS.exists() and "VmHWM" in STATUS.read_text()),
    reason="this kernel does not say the peak",
)
def test_the_memory_is_that_of_this_process_and_not_of_the_one_that_started_it():
    held = bytearray(300_000_000)
    names = (
        "from __future__ import annotations\nimport re, sys\nfrom pathlib import Path\nfrom types"
        " import SimpleNamespace\n"
    )
    # without torch, the process is small
    cpu = "torch = SimpleNamespace(device=lambda name: SimpleNamespace(type=name))\n"
    call = "print(peak_memory_bytes('cpu'))"
    program = names + cpu + inspect.getsource(peak_memory_bytes) + call
    child = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert 10**6 < int(child.stdout) < 10**8 < len(held) < peak_memory_bytes(torch.device("cpu"))


def test_where_the_kernel_does_not_say_the_peak_the_system_is_asked(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(Path, "read_text", lambda path: "Name: python\n")
    unit = 1 if sys.platform == "darwin" else 1024
    assert (
        peak_memory_bytes(torch.device("cpu"))
        == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    )


@pytest.mark.parametrize("first", [0.01, 0.3], ids=["warm", "cold"])
def test_the_first_product_is_not_the_ceiling(clock, monkeypatch, first):
    seconds = iter([first] + [0.01] * 1000)
    product = torch.Tensor.__matmul__

    def slow_product(a, b):
        clock.seconds += next(seconds)
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", slow_product)
    assert matmul_flops(torch.device("cpu"), torch.float32, size=8) == pytest.approx(
        2 * 8**3 / 0.01
    )


def test_the_ceiling_is_the_best_and_waits_for_the_device(clock, monkeypatch):
    """Products of 1, 3 and 2 s on a device that runs ahead: only reading waits."""
    seconds = iter([1.0, 1.0, 3.0, 2.0])
    product = torch.Tensor.__matmul__
    item = torch.Tensor.item
    pending = []

    def launch(a, b):
        pending.append(next(seconds))
        return product(a, b)

    def read(tensor):
        clock.seconds += sum(pending)
        pending.clear()
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "__matmul__", launch)
    monkeypatch.setattr(torch.Tensor, "item", read)
    assert matmul_flops(torch.device("cpu"), torch.float32, size=8, seconds=6) == pytest.approx(
        2 * 8**3
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_and_the_flops_are_those_of_the_configuration(
    monkeypatch, precision, checkpointing
):
    monkeypatch.setattr(run_cost, "_text_rows", lambda config: (1000, 90))
    monkeypatch.setattr(
        run_cost, "measure_step", lambda config, steps=3: StepCost(0.02, 0.001, 0.0, 0)
    )
    training = dict(
        batch_size=4,
        gradient_accumulation_steps=2,
        activation_checkpointing=checkpointing,
        precision=precision,
    )
    config = Config(
        model=ModelConfig(**SMALL),
        data=DataConfig(vocab_size=300, sequence_length=32),
        training=TrainingConfig(max_steps=20, eval_interval=5, device="cpu", **training),
    )
    cost = estimate_run(config)
    model = ModelConfig(vocab_size=300, **SMALL)
    half = precision == "bf16"
    options = dict(
        activation_checkpointing=checkpointing,
        mixed_precision=half,
        on_bf16_cpu=half and cpu_multiplies_bf16(),
    )
    assert cost.memory == training_memory(model, 4, 32, **options)
    assert cost.memory != training_memory(model, 8, 32, **options)
    assert cost.flops == flops_per_token(model, 32).training


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "pp"])
def test_estimate_counts_what_the_fullest_of_several_processes_holds(capsys, monkeypatch, strategy):
    monkeypatch.setattr(run_cost, "_text_rows", lambda config: (1000, 90))
    monkeypatch.setattr(
        run_cost, "measure_step", lambda config, steps=3: StepCost(2.0, 0.001, 0.0, 0)
    )
    words = ["--distributed.strategy", strategy, "--training.max_steps", "4"]
    words += ["--training.precision", "fp32", "--training.device", "cpu"]
    assert estimate_command(words) == 0
    alone = capsys.readouterr().out
    assert "in tensors: weights" in alone and "processes" not in alone
    assert estimate_command([*words, "--distributed.world_size", "2"]) == 0
    together = capsys.readouterr().out
    assert f"in tensors in the fullest of 2 processes ({strategy}): weights" in together
    assert ("by one process with the whole model" in together) == (strategy != "ddp")
    each = "each group of 2 processes" if strategy in ("tp", "pp") else "each of 2 processes"
    assert f"rows of 256 in {each}" in together

    config = Config(
        model=ModelConfig(vocab_size=4096),
        training=TrainingConfig(max_steps=4, precision="fp32", device="cpu"),
        distributed=DistributedConfig(strategy=strategy, world_size=2),
    )
    cost = estimate_run(config)
    parts = process_memory(config, 2)
    assert cost.memory.total == max(part.total for part in parts)
    whole = training_memory(config.model, config.training.batch_size, config.data.sequence_length)
    assert (cost.memory.optimizer < whole.optimizer) == (strategy != "ddp")


def test_estimate_refuses_what_does_not_divide():
    config = Config(
        model=ModelConfig(num_heads=4),
        distributed=DistributedConfig(strategy="tp", world_size=3),
    )
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of the 3 processes"):
        estimate_run(config)  # before a text is read


@pytest.mark.parametrize(
    "size, seconds, words",
    [
        (92_000, 0.0061, ("92.00 kB", "6.1 ms", "24.4 ms")),
        (900_000_000, 0.5, ("900.00 MB", "500.0 ms", "2 s")),
        (1_270_000_000, 2.5, ("1.27 GB", "2.5 s", "10 s")),
    ],
)
def test_estimate_prints_small_numbers_in_small_units(capsys, monkeypatch, size, seconds, words):
    cost = run_cost.RunEstimate(
        parameters=run_cost.ParameterCount(1, 1, 1, 1, 1, 1, 1),
        flops=6.0,
        memory=run_cost.TrainingMemory(size, size, 0, 0, 0),
        process_bytes=size,
        step_seconds=seconds,
        steps=3,
        validation_steps=1.0,
    )
    monkeypatch.setattr(estimate, "estimate_run", lambda config: cost)
    assert estimate_command([]) == 0
    lines = dict(
        (line[:16].rstrip(), line[16:36].strip()) for line in capsys.readouterr().out.splitlines()
    )
    found = [
        value
        for name, value in lines.items()
        if name == "process" or name.startswith(("step on", "the whole run"))
    ]
    assert tuple(found) == words, lines


def test_estimate_says_whose_memory_it_is(capsys, monkeypatch):
    cost = run_cost.RunEstimate(
        parameters=run_cost.ParameterCount(1, 1, 1, 1, 1, 1, 1),
        flops=6.0,
        memory=run_cost.TrainingMemory(1, 1, 1, 1, 1),
        process_bytes=10**9,
        step_seconds=0.5,
        steps=4,
        validation_steps=1.0,
    )
    monkeypatch.setattr(estimate, "estimate_run", lambda config: cost)
    for device, words in (
        ("cuda", "tensors on the accelerator alone"),
        ("cpu", "PyTorch itself included"),
    ):
        monkeypatch.setattr(
            estimate, "resolve_device", lambda _, device=device: torch.device(device)
        )
        assert estimate_command([]) == 0
        assert f"1.00 GB   measured at its peak, {words}" in capsys.readouterr().out


def test_a_measured_step_takes_the_time_that_steps_take():
    config = Config(
        model=ModelConfig(**SMALL),
        data=DataConfig(vocab_size=300, sequence_length=32),
        training=TrainingConfig(
            max_epochs=3,
            batch_size=4,
            gradient_accumulation_steps=2,
            precision="fp32",
            device="cpu",
        ),
    )
    start = time.perf_counter()
    cost = measure_step(config, steps=2)
    assert (
        0 < 2 * (cost.seconds + 4 * cost.validation_row_seconds) < time.perf_counter() - start
        and cost.process_bytes > 0
    )
    assert cost.validation_row_seconds > 0


def test_the_clock_takes_the_medians_of_warm_steps_and_of_warm_validations(clock, monkeypatch):
    seconds = {
        "train_step": [9.0, 0.2, 0.2, 7.0, 0.2, 0.2],
        "validation_step": [99.0, 50.0, 88.0, 50.0, 50.0, 50.0],
    }

    def slow(name):  # the first is slow, and one was disturbed
        real = getattr(LanguageModelingTask, name)
        times = iter(seconds[name])

        def step(task, model, batch):
            clock.seconds += next(times)
            return real(task, model, batch)

        monkeypatch.setattr(LanguageModelingTask, name, step)

    slow("train_step")
    slow("validation_step")
    config = Config(
        model=ModelConfig(**SMALL),
        data=DataConfig(vocab_size=50, sequence_length=8),
        training=TrainingConfig(
            max_tokens=10**9,
            batch_size=2,
            eval_interval=1,
            patience=1,
            precision="fp32",
            device="cpu",
        ),
    )
    cost = measure_step(config, steps=5)
    # After the 2nd, 4th and 6th step two batches of two rows are validated: 149, 138 and 100
    # seconds.
    assert cost[:3] == pytest.approx((0.2, 119 / 4, 8.8 + 149 - 119))
    with pytest.raises(ValueError, match="steps=0 must be a whole number of at least 1"):
        measure_step(config, steps=0)


def test_random_tokens_have_the_shape_of_the_run():
    config = Config(
        data=DataConfig(vocab_size=7, sequence_length=16, separate_documents=True, num_workers=0),
        training=TrainingConfig(batch_size=3),
    )
    data = RandomTokens(config, num_batches=4)
    data.setup()
    batches = list(data.train_dataloader(epoch=0))
    assert len(batches) == 4 and all(
        batch["input_ids"].shape == batch["document_ids"].shape == (3, 16) for batch in batches
    )
    assert batches[0]["input_ids"].max() < 7 and len(data.val_dataset) == 3


def test_a_slow_loader_is_found():
    class SlowRows(PackedDataset):
        def __getitems__(self, indices):
            time.sleep(0.05)
            return super().__getitems__(indices)

    class SlowData(RandomTokens):
        def setup(self):
            super().setup()
            self.train_dataset = SlowRows(self.train_dataset.tokens, self.sequence_length)

    config = Config(
        model=ModelConfig(**SMALL),
        data=DataConfig(vocab_size=50, sequence_length=8),
        training=TrainingConfig(max_steps=4, batch_size=2, precision="fp32", device="cpu"),
    )
    rows = []

    class Keep(run_cost.Callback):
        def on_step_end(self, engine, metrics):
            rows.append(dict(metrics))

    for data in (SlowData, RandomTokens):
        callbacks = [PerformanceMonitor(log_interval=4), Keep()]
        TrainingEngine(
            config, LanguageModelingTask(config), data(config, num_batches=4), callbacks
        ).run()
    slow = rows[3]
    sound = rows[7]
    assert slow["step_seconds"] > slow["data_seconds"] >= 0.05 > sound["data_seconds"]


def test_a_monitor_refuses_what_it_cannot_divide_by():
    with pytest.raises(ValueError, match="log_interval=0 must be a whole number of at least 1"):
        PerformanceMonitor(log_interval=0)
    with pytest.raises(ValueError, match="peak_flops=0.0 must be positive"):
        PerformanceMonitor(peak_flops=0.0)


@pytest.fixture
def text(tmp_path):
    generator = random.Random(0)
    words = [
        "".join(generator.choices("abcdefghij", k=generator.randint(2, 7))) for _ in range(300)
    ]
    for index in range(30):
        (tmp_path / f"{index}.txt").write_text(" ".join(generator.choices(words, k=200)))
    return str(tmp_path / "*.txt")


WORDS = (
    "--model.hidden_size 32 --model.num_layers 1 --model.num_heads 2 --data.vocab_size 300"
    " --data.sequence_length 32"
)
WORDS += (
    " --training.device cpu --training.batch_size 4 --training.gradient_accumulation_steps 2"
    " --data.files"
)


def test_estimate_says_what_a_run_will_cost(capsys, text, monkeypatch):
    measured = []

    def measure(config, steps=3):  # a few of the steps that it's asked for
        measured.append((steps, measure_step(config, steps=min(steps, 9))))
        return measured[-1][1]

    monkeypatch.setattr(run_cost, "measure_step", measure)
    assert estimate_command([*WORDS.split(), text, "--training.max_tokens", "2560"]) == 0
    [(few, first), (many, _)] = measured
    assert (few, many) == (3, round(4 / first.seconds)), "four seconds of steps"
    out = capsys.readouterr().out
    count = DecoderModel(
        ModelConfig(vocab_size=300, hidden_size=32, num_layers=1, num_heads=2)
    ).num_parameters()
    assert (
        f"{count:,d}" in out
        and "10 steps" in out
        and "2 x 4 rows of 32" in out
        and "measured at its peak" in out
    )
    assert (
        estimate_command(
            [*WORDS.split(), text, "--training.max_tokens", "2560", "--distributed.world_size", "2"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "5 steps" in out and "512   2 x 4 rows of 32 in each of 2 processes" in out
    with pytest.raises(FileNotFoundError, match="nowhere"):
        estimate_command([*WORDS.split(), "nowhere*.txt"])


def test_epochs_and_validations_are_counted_as_the_run_will_count_them(tmp_path, text, monkeypatch):
    monkeypatch.setattr(
        run_cost, "measure_step", lambda config, steps=3: StepCost(0.5, 0.03, 7.0, 10**9)
    )
    config = Config(
        run_dir=str(tmp_path / "run"),
        model=ModelConfig(**SMALL),
        data=DataConfig(files=[text], vocab_size=300, sequence_length=32, val_fraction=0.2),
        training=TrainingConfig(
            max_epochs=3, batch_size=4, eval_interval=50, precision="fp32", device="cpu"
        ),
        distributed=DistributedConfig(world_size=2),
    )
    config.logging.progress = False
    cost = estimate_run(config)
    data = LanguageModelingTask(config).build_data()
    data.prepare_data()
    data.setup()
    steps = 3 * -(-len(data.train_dataset) // 8)
    assert cost.steps == pytest.approx(steps, rel=0.1)
    assert cost.validation_steps == pytest.approx(
        -(-steps // 50) * len(data.val_dataset) / 2 * 0.03 / 0.5, rel=0.1
    )
    assert (
        cost.seconds == pytest.approx(7 + 0.5 * (cost.steps + cost.validation_steps))
        and cost.process_bytes == 10**9
    )


class Rows(Callback):
    """What each step reports."""

    def __init__(self):
        self.rows = []

    def on_step_end(self, engine, metrics):
        self.rows.append(dict(metrics))


def layers_engine(*callbacks, **training):
    settings = dict(max_steps=4, batch_size=2, precision="fp32", device="cpu") | training
    config = Config(
        model=ModelConfig(**SMALL),
        data=DataConfig(vocab_size=300, sequence_length=16),
        training=TrainingConfig(eval_interval=2, **settings),
    )
    data = RandomTokens(config, num_batches=4)
    return TrainingEngine(config, LanguageModelingTask(config), data, callbacks)


@pytest.mark.parametrize(
    "training", [{}, {"max_grad_norm": 0.01}, {"activation_checkpointing": True}]
)
def test_a_monitor_of_layers_reports_its_steps_and_leaves_no_trace(training):
    layers_engine(alone := Rows(), **training).run()
    engine = layers_engine(LayerMonitor(log_interval=2), rows := Rows(), **training)
    engine.run()
    own = [
        {name: row[name] for name in before}
        for row, before in zip(rows.rows, alone.rows, strict=True)
    ]
    assert own == alone.rows
    names = {"embedding", "layers.0", "norm"}
    for step, row in enumerate(rows.rows, start=1):
        found = {name for name in row if "/" in name}
        kinds = ("grad_norm", "update_ratio", "activation_rms")
        assert found == ({f"{k}/{n}" for k in kinds for n in names} if step % 2 == 0 else set())
        if found:
            squares = sum(row[f"grad_norm/{name}"] ** 2 for name in names)
            assert squares**0.5 == pytest.approx(row["grad_norm"], rel=1e-4)
    hooks = [module._forward_hooks for module in engine.model.modules()]
    assert not any(hooks) and not engine.optimizer._optimizer_step_pre_hooks


def test_a_monitor_of_layers_removes_its_hooks_from_a_run_that_fails():
    class Fail(Callback):
        def on_step_end(self, engine, metrics):
            raise OSError("the disk is full")

    engine = layers_engine(LayerMonitor(), Fail())
    with pytest.raises(OSError, match="the disk is full"):
        engine.run()
    assert not engine.optimizer._optimizer_step_post_hooks
    with pytest.raises(ValueError, match="log_interval=0 must be"):
        LayerMonitor(log_interval=0)

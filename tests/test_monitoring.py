"""Numbers about a run: measured over training time only, and predictions that hold."""

import time
from types import SimpleNamespace

import pytest
import torch

from llm_course.model.decoder import DecoderModel, ModelConfig
from llm_course.model.estimate import flops_per_token
from llm_course.training import monitoring
from llm_course.training.config import Config, DataConfig, TrainingConfig
from llm_course.training.monitoring import (
    Logger,
    PerformanceMonitor,
    doctor_command,
    estimate_command,
    matmul_flops,
    measure_step,
    peak_memory_bytes,
)

SMALL = dict(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_position_embeddings=64)


def test_the_logger_is_silent_on_other_ranks_and_keeps_a_file(tmp_path, capsys):
    Logger(rank=1, file=tmp_path / "log").warning("nobody hears")
    Logger(file=tmp_path / "log").warning("low ink")
    assert capsys.readouterr().err == "warning: low ink\n"
    assert (tmp_path / "log").read_text().endswith(" warning: low ink\n") and "nobody" not in (tmp_path / "log").read_text()


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(monitoring.time, "perf_counter", lambda: now.seconds)
    return now


def test_speed_leaves_validation_out_and_tells_waiting_from_computing(clock):
    config = ModelConfig(vocab_size=64, **SMALL)
    model = DecoderModel(config)
    engine = SimpleNamespace(
        state=SimpleNamespace(step=0, targets=0),
        data_seconds=0.0,
        device=torch.device("cpu"),
        model=model,
        config=Config(data=DataConfig(sequence_length=16)),
    )
    monitor = PerformanceMonitor(log_interval=2, peak_flops=1e9)
    monitor.on_train_start(engine)
    for step in (1, 2):
        clock.seconds += 0.5
        engine.data_seconds += 0.1
        engine.state.step, engine.state.targets = step, step * 100
        metrics: dict = {}
        if step == 2:  # validation takes ten seconds; the row is due in the same step
            monitor.on_validation_start(engine)
            clock.seconds += 10
            monitor.on_validation_end(engine, {})
        monitor.on_step_end(engine, metrics)
    assert metrics["tokens_per_second"] == pytest.approx(200 / 1.0)
    assert metrics["step_seconds"] == pytest.approx(0.5) and metrics["data_seconds"] == pytest.approx(0.1)
    assert metrics["mfu"] == pytest.approx(200 * flops_per_token(config, 16).training / 1e9)
    assert metrics["peak_memory_gb"] > 0.05


def test_the_ceiling_and_the_memory_are_of_this_machine():
    assert 1e8 < matmul_flops(torch.device("cpu"), torch.float32, size=256, seconds=0.02) < 1e14
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(60_000_000)  # 240 MB
    assert peak_memory_bytes(torch.device("cpu")) >= before and held.numel()


def test_a_measured_step_takes_the_time_that_steps_take():
    config = Config(
        model=ModelConfig(**SMALL),
        data=DataConfig(vocab_size=300, sequence_length=32),
        training=TrainingConfig(max_epochs=3, batch_size=4, gradient_accumulation_steps=2, precision="fp32", device="cpu"),
    )
    start = time.perf_counter()
    seconds, memory = measure_step(config, steps=2)
    assert 0 < 2 * seconds < time.perf_counter() - start and memory > 0


def test_estimate_says_what_a_run_will_cost(capsys):
    words = "--model.hidden_size 32 --model.num_layers 1 --model.num_heads 2 --data.vocab_size 300 --data.sequence_length 32"
    words += " --training.device cpu --training.batch_size 4 --training.gradient_accumulation_steps 2"
    assert estimate_command([*words.split(), "--training.max_tokens", "2560"]) == 0
    out = capsys.readouterr().out
    count = DecoderModel(ModelConfig(vocab_size=300, hidden_size=32, num_layers=1, num_heads=2)).num_parameters()
    assert f"{count:,d}" in out and "10 steps" in out and "2 x 4 rows of 32" in out
    assert estimate_command([*words.split(), "--training.max_epochs", "2"]) == 0
    assert "depends on how much text there is" in capsys.readouterr().out


def test_doctor_says_that_the_cpu_agrees_with_itself(capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)  # the compiler takes ten seconds
    monkeypatch.setattr(monitoring, "matmul_flops", lambda *a, **k: 5e10)
    assert doctor_command(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out and "50 GFLOP/s" in out and "sound" in out


def test_doctor_finds_a_device_that_computes_wrong(capsys, monkeypatch):
    monkeypatch.setattr(monitoring, "matmul_flops", lambda *a, **k: 5e10)

    def broken(function):
        raise RuntimeError("no compiler here\nand more")

    def wrong(device):
        import warnings

        warnings.warn("cpu does not compute what the CPU computes", RuntimeWarning, stacklevel=2)
        return {"logits": 0.5}

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(monitoring, "check_device", wrong)
    assert doctor_command(["--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "does not work here, leave training.compile out: no compiler here" in out and "does not compute" in out

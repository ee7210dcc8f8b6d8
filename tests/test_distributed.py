"""Two processes must learn what one learns, resume exactly, stop together, and fall together. On
gloo, so on any machine.
"""

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import distributed_worker as worker
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.distributed.distributed_c10d import BackendConfig
from warm import Warm, launch_warm, warm_processes

from llm_course.cli import main
from llm_course.training import distributed
from llm_course.training.callbacks import read_metrics
from llm_course.training.checkpointing import CheckpointManager, load_checkpoint
from llm_course.training.config import Config, DistributedConfig, ModelConfig, TrainingConfig
from llm_course.training.distributed import DistributedManager
from llm_course.training.engine import TrainingEngine
from llm_course.training.launch import launch
from llm_course.training.train import train_worker

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="gloo over Windows is not tried here"
)
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def two_ranks():
    return launch_warm(worker.on_two_ranks, 2)


@pytest.fixture(scope="module")
def one_process():
    """A step of gradient descent on eight rows at once."""
    config = worker.make_config(training=dict(max_steps=1, batch_size=8, eval_interval=1))
    return worker.train(config, task=worker.GradientTask)


def largest_difference(one, other):
    return max(float(np.abs(np.asarray(one[name]) - np.asarray(other[name])).max()) for name in one)


# Case 13
def test_accumulation_gives_the_gradient_of_the_whole_batch(one_process):
    config = worker.make_config(
        training=dict(max_steps=1, batch_size=4, gradient_accumulation_steps=2, eval_interval=1)
    )
    state, record = worker.train(config, task=worker.GradientTask)
    assert largest_difference(one_process[0]["model"], state["model"]) < 1e-6
    assert record.rows[0]["num_targets"] == one_process[1].rows[0]["num_targets"]
    assert record.rows[0]["num_targets"] < 8 * 4, (
        "the rows must have unequal numbers of targets, or nothing is proved"
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["step", "accumulated"])
def test_two_ranks_give_the_gradient_of_the_whole_batch(one_process, two_ranks, strategy, kind):
    weights = two_ranks[f"{strategy} {kind}"]
    weights = weights[0] if kind == "step" else weights
    moved = largest_difference(one_process[0]["model"], worker.numbers(fresh_weights()))
    assert moved > 1e-2 and largest_difference(one_process[0]["model"], weights) < 1e-6


def fresh_weights():
    config = worker.make_config()
    task = worker.GradientTask(config)
    engine = TrainingEngine(config, task, task.build_data())
    engine.setup()
    return engine.model.state_dict()


# Case 17
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_uneven_validation_is_the_mean_over_all_targets(one_process, two_ranks, strategy):
    row = two_ranks[f"{strategy} step"][1]
    expected = one_process[1].rows[0]
    assert row["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert row["num_targets"] == expected["num_targets"] and row["loss_sum"] == pytest.approx(
        expected["loss_sum"], rel=1e-5
    )


# Case 10
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resume_on_two_ranks_is_exact(two_ranks, strategy):
    assert two_ranks[f"{strategy} resume"] == []


@pytest.mark.parametrize("at", [2, 3, 7])
@pytest.mark.parametrize(
    "training",
    [
        dict(gradient_accumulation_steps=2),
        dict(precision="bf16"),
        dict(precision="fp16", gradient_accumulation_steps=3),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_resume_in_one_process_is_exact(training, at):
    config = worker.make_config(model=dict(dropout=0.1), training=training | dict(max_steps=9))
    assert worker.resume_differs(config, at=at) == []


def test_resume_is_exact_where_other_code_has_left_autocast_open():
    torch.autocast_increment_nesting()  # its cache is emptied only when the outermost context ends
    try:
        assert (
            worker.resume_differs(
                worker.make_config(training=dict(precision="bf16", max_steps=4)), at=2
            )
            == []
        )
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def test_a_difference_would_be_found():
    config = worker.make_config(model=dict(dropout=0.1), training=dict(max_steps=4))
    whole, record = worker.train(config, at=2)
    record.state["rng"]["0"]["torch"] = torch.get_rng_state()
    assert any(
        ".model." in path
        for path in worker.differences(whole, worker.train(config, state=record.state)[0])
    )


# Case 12
def test_a_compiled_distributed_model_loads_into_a_plain_one_and_back(two_ranks):
    there = {
        name: torch.from_numpy(tensor)
        for name, (_, tensor) in two_ranks["compiled ddp"]["model"].items()
    }
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in there)
    config = worker.make_config()
    task = worker.CopyTask(config)
    engine = TrainingEngine(config, task, task.build_data())
    engine.setup()
    assert engine.model.load_state_dict(there).missing_keys == []


# Case 11
def test_another_number_of_processes_is_refused_unless_allowed(two_ranks):
    state = restore(two_ranks["compiled ddp"])
    config = worker.make_config()
    task = worker.CopyTask(config)
    with pytest.raises(
        ValueError, match="trained by 2 processes and now there are 1.*allow_changes"
    ):
        TrainingEngine(config, task, task.build_data()).setup(state)
    config.checkpoint.allow_changes = True
    engine = TrainingEngine(config, task, task.build_data())
    with pytest.warns(UserWarning, match="world_size was 2, is 1.*next epoch"):
        engine.setup(state)
    assert (engine.state.step, engine.state.epoch, engine.state.batch) == (
        2,
        state["state"]["epoch"] + 1,
        0,
    )
    engine.run()


def restore(tree):
    if isinstance(tree, dict):
        return {name: restore(value) for name, value in tree.items()}
    return torch.from_numpy(tree[1]) if isinstance(tree, tuple) and tree[0] == "tensor" else tree


def test_no_sync_leaves_one_exchange_of_gradients_a_step(two_ranks):
    assert two_ranks["all-reduces"] == 3  # a bucket a step in this small model; 9 micro-batches


def test_a_model_that_never_exchanges_gradients_is_found(one_process, two_ranks):
    assert largest_difference(one_process[0]["model"], two_ranks["never synced"]) > 1e-3


def test_fsdp_holds_half_of_what_ddp_holds(two_ranks):
    (parameters, gradients, moments), other = two_ranks["ddp held"]
    assert (
        other == [parameters, gradients, moments]
        and gradients == parameters
        and moments == 2 * parameters
    )
    assert [sum(parts) for parts in zip(*two_ranks["fsdp held"], strict=True)] == [
        parameters,
        gradients,
        moments,
    ]
    assert max(map(sum, two_ranks["fsdp held"])) < 0.55 * 4 * parameters


def test_fsdp_with_offload_and_activation_checkpointing_computes_the_same(one_process, two_ranks):
    assert largest_difference(one_process[0]["model"], two_ranks["frugal step"]) < 1e-6
    assert two_ranks["frugal resume"] == []


def test_fsdp_in_bf16_rounds_what_is_computed_and_keeps_float32(one_process, two_ranks):
    weights, row, dtype = two_ranks["bf16 step"]
    assert dtype == "torch.float32" and row["loss_sum"] == pytest.approx(
        one_process[1].rows[0]["loss_sum"], rel=1e-2
    )
    assert 1e-6 < largest_difference(one_process[0]["model"], weights) < 2e-2


def test_lists_of_blocks_may_be_nested(two_ranks):
    assert two_ranks["blocks in blocks"]


def test_idle_experts_and_small_questions(two_ranks):
    assert (
        two_ranks["idle experts"] and two_ranks["mean"] == 0.5 and two_ranks["any"] == (True, False)
    )


# Case 18
def test_a_rank_that_dies_brings_the_run_down_at_once():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a training process ended"):
        launch_warm(worker.dies_in_rank_1, 2, 300.0)
    assert time.monotonic() - start < 100  # far below the timeout of 300 s


def test_the_error_of_a_rank_is_raised_here():
    with pytest.raises(ValueError, match="rank 1 has had enough"):
        launch_warm(worker.refuses_in_rank_1, 2)


def test_ctrl_c_in_every_process_ends_the_launch():
    with pytest.raises(KeyboardInterrupt):  # it waited for a result for ever
        launch_warm(worker.is_interrupted, 2)


@pytest.mark.parametrize(
    "function, world_size, error, words",
    [
        # it was lost, and the others went on
        (worker.refuses_with_two_words, 1, Exception, "Refused: x=3 is refused"),
        # it was waited for without end
        (worker.leaves_in_silence, 1, RuntimeError, "without a result"),
        (
            worker.refuses_in_rank_1,
            0,
            ValueError,
            "world_size=0 must be a whole number of at least 1",
        ),
    ],
)
def test_what_cannot_be_sent_does_not_keep_the_launch_waiting(function, world_size, error, words):
    with pytest.raises(error, match=words):
        launch_warm(function, world_size)


def test_processes_share_the_cores_and_one_that_exits_does_not_answer_for_the_first(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(worker.threads_while_rank_1_exits, 2) == max(1, os.cpu_count() // 2)


def test_a_launch_in_another_thread_is_refused_before_it_starts():
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="main thread"):
        pool.submit(launch, worker.refuses_in_rank_1, 1).result()


WORDS = (
    "--task distributed_worker:CopyTask --run-dir run --model.hidden_size 16 --model.num_layers 1"
    " --model.num_heads 2 --model.num_kv_heads 1 --training.batch_size 4 --training.eval_interval 5"
    " --training.device cpu --training.precision fp32 --checkpoint.save_interval 2"
    " --logging.log_interval 1 --logging.tensorboard false --logging.progress false"
).split()
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    "OMP_NUM_THREADS": "1",
}


# Cases 18 and 10: torchrun carries on
def test_torchrun_restarts_a_dead_rank_from_the_last_checkpoint(tmp_path):
    words = ["train", *WORDS, "--task", "distributed_worker:Dying", "--training.max_steps", "8"]
    process = Warm(worker.under_torchrun, words, cwd=tmp_path, env=ENVIRONMENT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert (tmp_path / "run" / "died").exists()
    assert "resuming the unfinished run in run at step" in stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    last = load_checkpoint(CheckpointManager(tmp_path / "run" / "checkpoints").latest())
    assert last["state"]["step"] == 8


def test_torchrun_without_restarts_ends_with_an_error_and_ends_the_others(tmp_path):
    dying = (
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(),"
        " signal.SIGKILL)\ntime.sleep(300)\n"
    )
    (tmp_path / "dying.py").write_text(dying)  # no PyTorch in it: what is asked is who watches
    words = ["--standalone", "--nproc-per-node", "2", "dying.py"]
    process = Warm(torchrun.main, words, cwd=tmp_path, env=ENVIRONMENT)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 1 and "Signal 9 (SIGKILL)" in stderr, stderr


# Cases 19 and 21
def test_sigterm_stops_all_ranks_at_one_step_and_a_second_run_is_refused(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    two = "--distributed.world_size 2 --training.max_steps 1000000".split()
    process = Warm(worker.train_in_forks, ["train", *WORDS, *two], env=ENVIRONMENT)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while (
        not (metrics.is_file() and len(read_metrics(metrics)) > 2) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert main(["train", *WORDS, "--training.max_steps", "3"]) == 2
    assert "another process is training in run" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    state = load_checkpoint(CheckpointManager(tmp_path / "run" / "checkpoints").latest())
    assert f"stopped by SIGTERM after step {state['state']['step']}" in stdout
    assert state["world_size"] == 2 and state["rng"].keys() == {"0", "1"}
    assert read_metrics(metrics)[-1]["step"] == state["state"]["step"]


@pytest.mark.parametrize(
    "parts, message",
    [
        (dict(distributed=DistributedConfig(strategy="fsdp")), "needs several processes"),
        (dict(distributed=DistributedConfig(world_size=2, backend="nccl")), "nccl needs CUDA"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, parts, message):
    if torch.cuda.is_available() and "nccl" in message:
        pytest.skip("nccl can be used here")
    with warm_processes(), pytest.raises(ValueError, match=message):
        train_worker(
            Config(
                run_dir=str(tmp_path / "run"),
                model=ModelConfig(),
                training=TrainingConfig(),
                **parts,
            )
        )


@pytest.mark.parametrize("strategy, size", [("fsdp", None), ("fsdp+tp", 2)])
def test_a_manager_refuses_the_strategy_of_another(strategy, size):
    config = DistributedConfig(strategy=strategy, world_size=4, model_parallel_size=size)
    with pytest.raises(ValueError, match=rf"strategy={re.escape(strategy)} isn't what a Distr"):
        DistributedManager(config)


def test_without_torchrun_the_manager_says_what_is_missing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK is not in the environment: start with torchrun"):
        DistributedManager(DistributedConfig())


class Asked(Exception):
    """Carries the backend that a process group was asked for."""


@pytest.mark.parametrize(
    "device, backend, expected",
    [
        ("cuda", "auto", {"cpu": "gloo", "cuda": "nccl"}),
        # NCCL alone could not reduce the flags of `any`
        ("cuda", "nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("cuda", "gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("cpu", "auto", {"cpu": "gloo"}),
    ],
)
def test_the_group_can_always_reduce_tensors_on_the_cpu(monkeypatch, device, backend, expected):
    def ask(backend, **settings):
        raise Asked(backend)

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "1")
    monkeypatch.setattr(distributed, "resolve_device", lambda name: torch.device(device))
    monkeypatch.setattr(
        distributed, "rendezvous", lambda *where, **settings: iter([(dist.HashStore(), 0, 1)])
    )
    monkeypatch.setattr(dist, "init_process_group", ask)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    with pytest.raises(Asked) as asked:
        DistributedManager(DistributedConfig(backend=backend)).__enter__()
    served = BackendConfig(dist.Backend(asked.value.args[0])).get_device_backend_map()
    assert {kind: served.get(kind) for kind in expected} == expected

"""The files that hand a run over to several machines: what each of them would start, and, where it
can be, the run itself.
"""

import json
import os
import py_compile
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from warm import Warm

from llm_course.training.callbacks import read_metrics
from llm_course.training.checkpointing import CheckpointManager, load_checkpoint
from llm_course.training.sources import read_config
from llm_course.training.train import load_run, train_worker

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "configs" / "launch"
FILES = sorted(path for path in LAUNCH.iterdir() if path.is_file())
posix = pytest.mark.skipif(os.name != "posix", reason="these are scripts for bash")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_says_how_far_it_was_run(path):
    head = "\n".join(path.read_text(encoding="utf-8").splitlines()[:20])
    assert "How far it was run" in head


@posix
@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_bash(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.py")), ids=lambda path: path.name)
def test_a_program_is_python(path, tmp_path):
    py_compile.compile(str(path), cfile=str(tmp_path / "compiled"), doraise=True)


def test_the_settings_for_deepspeed_are_json_and_ask_for_a_disk():
    settings = json.loads((LAUNCH / "deepspeed_zero.json").read_text(encoding="utf-8"))
    zero = settings["zero_optimization"]
    assert zero["stage"] == 3  # the only one that offloads parameters
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "nvme"


def fake(folder: Path, name: str, body: str) -> None:
    """A command that stands in for one which is not here."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def with_fakes(folder: Path, **variables: str) -> dict[str, str]:
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"} | variables


@posix
def test_slurm_would_start_one_torchrun_on_each_machine(tmp_path):
    fake(tmp_path, "scontrol", '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"')
    fake(tmp_path, "srun", 'echo "$@"')
    job = dict(
        SLURM_JOB_NODELIST="node[3-4]",
        SLURM_NNODES="2",
        SLURM_JOB_ID="77",
        SLURM_GPUS_ON_NODE="4",
    )
    process = subprocess.run(
        [LAUNCH / "slurm.sh", "--config", "run.yaml"],
        env=with_fakes(tmp_path, **job),
        check=True,
        capture_output=True,
        text=True,
    )
    assert (
        process.stdout.split()
        == (
            "torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d"
            " --rdzv-id 77 --rdzv-endpoint node3:29500"
            " --no-python llm-course train --config run.yaml"
        ).split()
    )


# what SkyPilot's documentation says of a task and of its resources
SKYPILOT = {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run"}
RESOURCES = {"accelerators", "disk_size"}


@posix
def test_skypilot_would_start_one_torchrun_on_each_machine(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task.keys() <= SKYPILOT and task["resources"].keys() <= RESOURCES
    assert isinstance(task["num_nodes"], int) and isinstance(task["resources"]["disk_size"], int)
    fake(tmp_path, "torchrun", 'echo "$@"')
    given = dict(
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_RANK="1",
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        **task["envs"],
    )
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", task["run"]],
        env=with_fakes(tmp_path, **given),
        check=True,
        capture_output=True,
        text=True,
    )
    assert (
        process.stdout.split()
        == (
            "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 29500"
            " --no-python llm-course train --config configs/first_run.yaml"
        ).split()
    )
    assert (ROOT / task["envs"]["CONFIG"]).is_file()


WORDS = (
    "--model.hidden_size 16 --model.num_layers 2 --model.num_heads 2 --data.vocab_size 300"
    " --data.sequence_length 16 --data.files text.txt --training.batch_size 4"
    " --training.device cpu --training.precision fp32 --training.eval_interval 4"
    " --checkpoint.save_interval 4 --logging.log_interval 1 --logging.tensorboard false"
    " --logging.progress false --run-dir run"
).split()
DIVIDED = "--distributed.strategy pp --training.max_steps 4".split()


@posix
@pytest.mark.skipif(shutil.which("torchrun") is None, reason="needs torchrun")
def test_two_machines_train_one_model_and_one_process_goes_on(tmp_path, monkeypatch):
    """Two torchruns with a process each, as on two machines, divide a model by its layers."""
    words = "It was the best of times, it was the worst of times. "
    (tmp_path / "text.txt").write_text("\n\n".join(words * (3 + n) for n in range(20)))
    fake(tmp_path, "llm-course", f'exec {sys.executable} -m llm_course.cli "$@"')
    given = dict(
        HEAD="127.0.0.1",
        ADDRESS="127.0.0.1",
        PORT=str(free_port()),
        NODES="2",
        PROCESSES="1",
        RESTARTS="0",
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT),
    )
    nodes = [
        subprocess.Popen(
            [LAUNCH / "nodes.sh", *WORDS, *DIVIDED],
            cwd=tmp_path,
            env=with_fakes(tmp_path, **given),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    said = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)

    monkeypatch.chdir(tmp_path)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    model, tokenizer = load_run("run")  # whole, in this process
    assert model(torch.tensor([tokenizer.encode("It was")])).logits.isfinite().all()

    config = read_config(tmp_path / "run" / "config.yaml")
    config.distributed.strategy = "ddp"
    config.training.max_steps = 6
    assert train_worker(config, resume=True).step == 6
    before, after = (tmp_path / "run" / "checkpoints" / f"step_{step:08d}" for step in (4, 6))
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (before, after)]
    assert manifests[0]["files"].keys() == manifests[1]["files"].keys()
    first, second = (load_checkpoint(path) for path in (before, after))
    assert first["model"].keys() == second["model"].keys()
    assert first["optimizer"]["state"].keys() == second["optimizer"]["state"].keys()
    assert CheckpointManager(tmp_path / "run" / "checkpoints").latest() == after


AS_RAYS_WORKER = """
import os, sys, types
import torch.distributed as dist
ray, train = types.ModuleType("ray"), types.ModuleType("ray.train")
ray.train, train.report = train, lambda metrics: print("reported", metrics["step"])
sys.modules |= {"ray": ray, "ray.train": train}
dist.init_process_group("gloo")  # as TorchTrainer has done before it calls
sys.path.insert(0, LAUNCH)
from ray_train import train_in_worker
train_in_worker({"config": "run.yaml", "folder": os.getcwd()})
"""


def test_a_worker_of_ray_trains_in_a_group_of_its_own(tmp_path):
    """Ray is not here: its place is taken by what it leaves in a worker's environment."""
    run = (
        "{task: regression, run_dir: run, training: {max_steps: 3, device: cpu},"
        " logging: {tensorboard: false, progress: false}}"
    )
    (tmp_path / "run.yaml").write_text(run)
    address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", PYTHONPATH=str(ROOT))
    names = {"LAUNCH": str(LAUNCH)}
    process = Warm(exec, AS_RAYS_WORKER, names, cwd=tmp_path, env=address | ranks)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "reported 3" in stdout


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

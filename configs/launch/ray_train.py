"""A run on the machines of a Ray cluster: Ray starts the processes that train.

    pip install 'ray[train]'
    python configs/launch/ray_train.py run.yaml --workers 16 --gpu

Each worker's folder must be one that all machines see.

How far it was run: `train_in_worker` in a process with the environment and the process group that
Ray's TorchTrainer gives it (tests/test_launch.py). Not under Ray itself.
"""

import argparse
import os
from pathlib import Path
from typing import Any


def train_in_worker(settings: dict[str, Any]) -> None:
    """What each of Ray's workers runs: Ray has set RANK, WORLD_SIZE, LOCAL_RANK and the address."""
    import ray.train
    import torch.distributed as dist

    from llm_course.training.sources import read_config
    from llm_course.training.train import train_worker

    if dist.is_initialized():  # by Ray; the run makes its own group, with gloo beside NCCL
        dist.destroy_process_group()
    os.chdir(settings["folder"])
    result = train_worker(read_config(Path(settings["config"])))
    ray.train.report({"step": result.step, **result.metrics})


def main() -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    words = parser.parse_args()
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"config": words.config, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=words.workers, use_gpu=words.gpu),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()

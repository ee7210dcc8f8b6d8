"""Our model under DeepSpeed's ZeRO-3, with weights and moments on an NVMe disk: ZeRO-Infinity.

    pip install deepspeed        # and libaio, CUDA's compiler, a disk at nvme_path of the .json
    deepspeed --num_gpus 8 configs/launch/deepspeed_zero.py run.yaml

How far it was run: it compiles (tests/test_launch.py). DeepSpeed and its disk were not at hand.

Without the disk, `distributed.cpu_offload: true` with fsdp needs nothing but PyTorch. DeepSpeed
brings its own loop, optimizer and checkpoints, so this is a bare loop around our data and model,
without validation, schedule or resume.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from llm_course.training.sources import read_config
from llm_course.training.task import LanguageModelingTask


def main(config_file: str) -> None:
    import deepspeed

    config = read_config(config_file)
    settings = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    settings.pop("How far it was run")
    settings["train_micro_batch_size_per_gpu"] = config.training.batch_size

    deepspeed.init_distributed()
    task = LanguageModelingTask(config)
    data = task.build_data()
    if dist.get_rank() == 0:
        data.prepare_data()
    dist.barrier()
    data.setup()

    torch.manual_seed(config.training.seed)
    model = task.build_model(data)  # on the CPU; not in zero.Init, where init_weights finds nothing
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    batches = data.train_dataloader(epoch=0, rank=dist.get_rank(), world_size=dist.get_world_size())
    for step, batch in enumerate(batches):
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        output = task.train_step(engine, batch)
        loss = output.loss_sum / output.num_targets  # rows of one length: as many on each rank
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(step, loss.item())
    engine.save_16bit_model(config.run_dir, "pytorch_model.bin")


if __name__ == "__main__":
    main(sys.argv[1])

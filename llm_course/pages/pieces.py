"""What the page on shards lets several processes do: hold pieces of tensors, and tell a story."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

from llm_course.model.decoder import DecoderModel
from llm_course.model.generation import stream_text
from llm_course.pages.storyteller import load_storyteller
from llm_course.training.checkpointing import load_checkpoint


def _mesh(runtime: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (runtime.world_size,))


def piece_of(whole: Tensor, runtime: Any) -> DTensor:
    """This process's rows of a tensor that all processes know."""
    return distribute_tensor(whole, _mesh(runtime), [Shard(0)])


def empty_pieces(folder: str, runtime: Any) -> dict[str, DTensor]:
    """For each tensor in a DCP folder, zeros in the place of this process's rows."""
    mesh = _mesh(runtime)
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: zeros(
            entry.size,
            dtype=entry.properties.dtype,
            device_mesh=mesh,
            placements=[Shard(0) if entry.size else Replicate()],  # a number has no rows
        )
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def story(checkpoint: Path) -> str:
    """What a new model with a checkpoint's weights makes of "Once upon a time"."""
    storyteller, tokenizer = load_storyteller()
    model = DecoderModel(storyteller.config)  # random weights
    model.load_state_dict(load_checkpoint(checkpoint)["model"])
    start = "Once upon a time"
    told = stream_text(model.eval(), tokenizer, start, temperature=0.0, max_new_tokens=40)
    return start + "".join(told)

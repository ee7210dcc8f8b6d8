"""How the pages measure memory: what autograd keeps, and what is alive after each operation."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """Note how many bytes are alive after each operation, in `history`.

    It sees what operations return, not what one uses inside itself. What an operation reads and
    the meter hasn't met was there before, and isn't counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.live = 0
        self.history: list[int] = []

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once."""
        return max(self.history)

    def meet(self, tensors: Any, *, new: bool) -> None:
        leaves = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
        for storage in [leaf.untyped_storage() for leaf in leaves]:
            key = storage._cdata
            if key not in self.known:
                size = storage.nbytes() if new else 0
                self.known.add(key)
                self.live += size
                weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meet((args, kwargs), new=False)
        out = func(*args, **(kwargs or {}))
        self.meet(out, new=True)
        self.history.append(self.live)
        return out


def saved_tensors(run: Callable[[], Any], leave_out: Iterable[Tensor] = ()) -> list[Tensor]:
    """The tensors that autograd keeps during `run()`, each block of memory once."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in leave_out}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in left_out:
            kept[address] = tensor  # holding it, so that the address isn't used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return list(kept.values())


def kept_bytes(run: Callable[[], Any], leave_out: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors that autograd keeps during `run()`, each block of memory once."""
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors(run, leave_out))

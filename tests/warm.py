"""Processes that begin with PyTorch imported: of the ten seconds that a test of two ranks takes,
nine are imports.
"""

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.multiprocessing

from llm_course.training.launch import launch

IMPORTED = ["llm_course.training.train", "torch._dynamo", "torch.distributed.checkpoint"]


@contextmanager
def warm_processes() -> Iterator[None]:
    """Inside, the processes of `launch` are forked from a server that has imported what they use,
    where there is one. They get the server's environment: a test of that takes cold ones.
    """
    if sys.platform != "linux":
        yield
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    forked = partial(torch.multiprocessing.start_processes, start_method="forkserver")
    with patch.object(torch.multiprocessing, "spawn", forked):
        yield


def launch_warm(*arguments: Any) -> Any:
    with warm_processes():
        return launch(*arguments)

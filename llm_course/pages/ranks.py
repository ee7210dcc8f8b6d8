"""Processes that stay and answer a page's questions, since to start one takes seconds."""

import ast
import linecache
import multiprocessing as mp
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from typing import Any

import torch

from llm_course.training.config import DistributedConfig
from llm_course.training.distributed import DistributedManager


def cell_of(thing: Callable[..., Any]) -> str:
    """The functions and classes of the cell that defines this one."""
    methods = [thing] if hasattr(thing, "__code__") else vars(thing).values()
    functions = (getattr(method, "__func__", method) for method in methods)  # of a staticmethod
    code = next(function.__code__ for function in functions if hasattr(function, "__code__"))
    cell = ast.parse("".join(linecache.getlines(code.co_filename)))
    made = (node for node in cell.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return "\n\n".join(map(ast.unparse, made))


class Ranks:
    """`world_size` processes of one group, for functions that are defined in a page's cells."""

    def __init__(self, world_size: int, *, imports: str = ""):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start: Any = mp.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":  # PyTorch is imported once, and copied
            preload = [__name__, "llm_course.training.parallel", "llm_course.pages.shares"]
            start.set_forkserver_preload(preload)
        self.pipes: list[Any] = []
        self.processes = []
        for rank in range(world_size):
            pipe, end = mp.Pipe()
            arguments = (rank, world_size, port, end, imports)
            process = start.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            end.close()  # its only owner is the process: when it ends, this side hears of it
            self.pipes.append(pipe)
            self.processes.append(process)

    def ask(self, *things: Callable[..., Any], **settings: Any) -> list[Any]:
        """What the last of `things` returns in each process, called with its runtime and settings.

        Before, the functions and classes of the cells that define `things` are sent, and stay. A
        function of a module needs no sending. The first error is raised.
        """
        cells = [cell_of(thing) for thing in things if thing.__module__ == "__main__"]
        asked = things[-1].__name__ if things[-1].__module__ == "__main__" else things[-1]
        for pipe in self.pipes:
            pipe.send((cells, asked, settings))
        answers: dict[Any, Any] = {}
        while len(answers) < len(self.pipes):
            ready: list[Any] = connection.wait(set(self.pipes) - set(answers), timeout=100)
            assert ready, "a process has not answered for 100 seconds"
            for pipe in ready:
                answers[pipe] = pickle.loads(pipe.recv_bytes())
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return [answers[pipe] for pipe in self.pipes]

    def close(self) -> list[int | None]:
        """End the processes; returns their exit statuses."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=60)
        return [process.exitcode for process in self.processes]


def _serve(
    rank: int, world_size: int, port: int, pipe: connection.Connection, imports: str
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    exec(imports, names)
    config = DistributedConfig(timeout=100.0)
    with DistributedManager(config, device="cpu") as runtime, suppress(EOFError):
        while True:
            cells, asked, settings = pipe.recv()
            try:
                for cell in cells:
                    exec(cell, names)
                function = names[asked] if isinstance(asked, str) else asked
                answer = function(runtime, **settings)
            except Exception as error:
                answer = error
            pipe.send_bytes(pickle.dumps(answer))

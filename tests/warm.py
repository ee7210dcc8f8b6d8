"""Processes that begin with PyTorch imported: of the ten seconds that a test of two ranks takes,
nine are imports.
"""

import atexit
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.multiprocessing

from llm_course.cli import main
from llm_course.training.launch import launch

IMPORTED = ["llm_course.training.train", "torch._dynamo", "torch.distributed.checkpoint"]
IS_WARM = sys.platform == "linux"  # elsewhere there is no server to fork from, or it's new


def server() -> Any:
    """What forks processes from one that has imported what they use, where that can be."""
    context = multiprocessing.get_context("forkserver" if IS_WARM else "spawn")
    if IS_WARM:
        context.set_forkserver_preload(IMPORTED)
    return context


@contextmanager
def warm_processes(method: str = "forkserver") -> Iterator[None]:
    """Inside, the processes of `launch` are forked, where that can be, from a server that has
    imported what they use. They get the server's environment: a test of that takes cold ones.
    """
    if not IS_WARM:
        yield
        return
    server()
    forked = partial(torch.multiprocessing.start_processes, start_method=method)
    with patch.object(torch.multiprocessing, "spawn", forked):
        yield


def launch_warm(*arguments: Any) -> Any:
    with warm_processes():
        return launch(*arguments)


class Warm:
    """A function in a process of its own, which begins in `cwd` and with more in its environment;
    what it prints, and its status, as `subprocess.Popen` tells them.
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        *arguments: Any,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ):
        self.said = tempfile.TemporaryDirectory()
        place = cwd or Path.cwd(), Path(self.said.name), dict(env or {})
        self.process = server().Process(target=_call, args=(*place, function, arguments))
        self.process.start()
        atexit.register(self.process.kill)  # where a test has failed; Python would wait for it

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.process.join(timeout)
        assert self.returncode is not None, f"it goes on after {timeout} seconds"
        with self.said as folder:
            out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
        return out, err


def _call(
    cwd: Path,
    said: Path,
    env: dict[str, str],
    function: Callable[..., int | None],
    arguments: tuple[Any, ...],
) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ |= env
    sys.exit(function(*arguments))


def llm_course(*words: str, **place: Any) -> Warm:
    """The command with these words."""
    return Warm(main, list(words), **place)

"""What the processes run that the page on starting processes starts; quick, so without PyTorch."""

import os
import signal
import sys
import time
from pathlib import Path


def sign(folder: str) -> str:
    """Leave a file that says which process this is; return what it says."""
    name = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    Path(folder, name).touch()
    return name


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def sign_and_wait(folder: str) -> None:
    """Rank 1 fails at once; the others wait for its file, as they would in an all-reduce."""
    if os.environ["RANK"] == "1":
        raise SystemExit(3)
    sign(folder)
    _wait_for(Path(folder, "rank 1 of 2"))


def refuse(folder: str) -> None:
    """Rank 1 raises an error; the others wait for its file."""
    if os.environ["RANK"] == "1":
        raise ValueError("planted in rank 1")
    sign_and_wait(folder)


def train(folder: Path) -> None:
    """Six steps with a checkpoint every two; rank 1 kills itself in step 5 of the first attempt.

    A step is a file, and its barrier waits for the other rank's file. Rank 1 dies once rank 0 has
    begun the step, so that step 4 is over for both.
    """
    rank, attempt = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    checkpoint = folder / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    while step < 6:
        step += 1
        theirs = folder / f"{attempt} {step} {1 - rank}"
        if (rank, attempt, step) == (1, 0, 5):
            _wait_for(theirs)
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"{attempt} {step} {rank}").touch()
        _wait_for(theirs)
        if rank == 0 and step % 2 == 0:
            checkpoint.write_text(str(step))


if __name__ == "__main__":
    train(Path(sys.argv[1]))

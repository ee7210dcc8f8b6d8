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


def sign_and_wait(folder: str) -> None:
    """Rank 1 fails at once; the others wait for its file, as they would in an all-reduce."""
    if os.environ["RANK"] == "1":
        raise SystemExit(3)
    sign(folder)
    while not Path(folder, "rank 1 of 2").exists():
        time.sleep(0.01)


def refuse(folder: str) -> None:
    """Rank 1 raises an error; the others wait for its file."""
    if os.environ["RANK"] == "1":
        raise ValueError("planted in rank 1")
    sign_and_wait(folder)


def train(folder: Path) -> None:
    """Six steps with a checkpoint every two; rank 1 kills itself in step 5 of the first attempt.

    A step is a file, and its barrier waits for the other rank's file.
    """
    rank, attempt = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    checkpoint = folder / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    while step < 6:
        step += 1
        if (rank, attempt, step) == (1, 0, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"{attempt} {step} {rank}").touch()
        while not (folder / f"{attempt} {step} {1 - rank}").exists():
            time.sleep(0.01)
        if rank == 0 and step % 2 == 0:
            checkpoint.write_text(str(step))


if __name__ == "__main__":
    train(Path(sys.argv[1]))

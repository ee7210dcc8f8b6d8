"""What a checkpoint must survive. The numbers are those of the cases that the engine is built
against.
"""

import ast
import functools
import json
import math
import os
import pickle
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from llm_course.training import checkpointing
from llm_course.training.checkpointing import (
    Checkpointer,
    CheckpointManager,
    join_tensors,
    load_checkpoint,
    split_tensors,
    verify,
)
from llm_course.training.config import Config, TrainingConfig
from llm_course.training.engine import Callback, TrainingEngine
from llm_course.training.logging import Logger
from llm_course.training.signals import GracefulStop
from llm_course.training.state import TrainState
from llm_course.training.task import RegressionTask
from llm_course.training.train import main

PACKAGE = Path(checkpointing.__file__).parents[1]
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
torch.set_num_threads(1)  # a forked child has no threads but the one that forked
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


class Told(Logger):
    """Keeps what a logger would print."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def _say(self, message: str) -> None:
        self.lines.append(message)


def numbered(step: int, size: int = 5, **metrics: float) -> dict[str, Any]:
    """A state each part of which says its step."""
    return {
        "model": {"w": torch.full((size,), float(step))},
        "optimizer": {"state": {0: {"exp_avg": torch.full((size,), float(step))}}},
        "step": step,
        "metrics": metrics,
    }


def step_of(path: Path | None) -> int:
    """The step of a checkpoint, where all parts of it agree."""
    assert path is not None
    state = load_checkpoint(path)
    moments = state["optimizer"]["state"][0]["exp_avg"]
    steps = {state["step"], *state["model"]["w"].tolist(), *moments.tolist()}
    assert steps == {int(path.name.removeprefix("step_"))}
    return state["step"]


def manager_of(folder: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, logger=Told(), **options)


def in_child(function: Callable[[], Any]) -> Callable[[], int]:
    """Run `function` in a copy of this process, which has torch already; the result waits for its
    exit status (-9: killed).
    """
    pid = os.fork()
    if pid == 0:
        status = 99
        random.seed(0)  # Python seeds its own generator anew in a fork
        try:
            status = function() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    wait = functools.cache(lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    wait.pid = pid  # type: ignore[attr-defined]
    return wait


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states differ in a single bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [
            found for name in one for found in differences(one[name], other[name], f"{path}.{name}")
        ]
    if isinstance(one, (list, tuple)):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{path}.{index}")]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [path]


# ---------------------------------------------------------------- killed


@forks
def test_case_1_killed_twenty_times_at_random_moments_while_saving(tmp_path):
    dice = random.Random(0)
    stopped_at = []
    acknowledged = tmp_path / "acknowledged"
    acknowledged.write_text("0")
    ours = manager_of(tmp_path / "checkpoints")

    def save_for_ever(first: int, ready: int) -> None:
        os.write(ready, b"!")
        for step in range(first, 10**6):
            ours.save(numbered(step, size=20_000), step=step)
            acknowledged.with_suffix(".new").write_text(str(step))
            acknowledged.with_suffix(".new").replace(acknowledged)

    for _ in range(20):
        found = ours.latest()
        acknowledged.write_text(str(step_of(found) if found else 0))
        receives, sends = os.pipe()
        child = in_child(
            functools.partial(save_for_ever, step_of(found) + 1 if found else 1, sends)
        )
        os.read(receives, 1)
        time.sleep(dice.uniform(0, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        assert child() == -signal.SIGKILL
        os.close(receives), os.close(sends)
        done = int(acknowledged.read_text())
        if done or ours.latest():
            # never less than what was said to be saved
            assert step_of(ours.latest()) in (done, done + 1)
        stopped_at.append(
            sorted(path.name[:7] for path in ours.folder.glob(".*")) if ours.folder.exists() else []
        )
    assert any(".saving" in names for names in stopped_at), (
        "no kill fell into a save: the test shows nothing"
    )
    ours.save(numbered(done + 9), step=done + 9)
    assert not list(ours.folder.glob(".*"))  # what the killed ones left is gone


OPERATIONS = [
    (checkpointing, "save_file"),
    (Path, "write_text"),
    (os, "fsync"),
    (Path, "rename"),
    (shutil, "rmtree"),
    (Path, "rmdir"),
    (Path, "mkdir"),
]


@forks
@pytest.mark.parametrize("again", [False, True], ids=["the next step", "one step twice"])
def test_case_2_killed_before_every_single_operation_on_the_disk(tmp_path, again):
    new = 1 if again else 2
    for count in range(100):
        ours = manager_of(tmp_path / f"{count}", keep_last=1)
        ours.save(numbered(1), step=1)

        def die_at_operation(ours=ours, count=count) -> None:
            left = count

            def watch(function: Callable) -> Callable:
                def watched(*arguments: Any, **options: Any) -> Any:
                    nonlocal left
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
                    return function(*arguments, **options)

                return watched

            for owner, name in OPERATIONS:
                setattr(owner, name, watch(getattr(owner, name)))
            ours.save(numbered(new), step=new)

        status = in_child(die_at_operation)()
        found = step_of(ours.latest())
        assert found in (1, new), count
        ours.keep_last = 2
        # what was found is among the two newest, under its own name, and nothing else is there
        ours.save(numbered(3), step=3)
        assert sorted(path.name for path in ours.folder.iterdir()) == [
            f"step_{found:08d}",
            "step_00000003",
        ]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert count > 10  # there are that many operations


def test_case_2_killed_within_a_file_that_the_library_writes_under_a_name_of_its_own(tmp_path):
    (tmp_path / ".saving_killed").mkdir()
    (tmp_path / ".saving_killed" / ".tmpxhiyKj").touch()  # as safetensors leaves it
    path = manager_of(tmp_path).save(numbered(1), step=1)
    assert list(tmp_path.iterdir()) == [path]


def test_case_2_a_writer_in_place_would_not_survive_it(tmp_path):
    """The check above can fail: a manager that writes under the final name from the beginning mixes
    or loses.
    """
    ours = manager_of(tmp_path, keep_last=1)
    path = ours.save(numbered(1), step=1)
    with (
        patch.object(checkpointing, "_put_in_place", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        ours.save(numbered(1), step=1)
    assert step_of(ours.latest()) == 1 and sorted(tmp_path.iterdir()) == [path]
    with (
        patch.object(Path, "write_text", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        checkpointing._write(numbered(2), path, step=2)
    assert ours.latest() is None


# ---------------------------------------------------------------- changed on the disk


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_case_3_a_file_that_is_cut_is_named_and_the_one_before_is_used(tmp_path, share):
    for name in FILES:
        ours = manager_of(tmp_path / name)
        old, new = (ours.save(numbered(step, size=500), step=step) for step in (1, 2))
        content = (new / name).read_bytes()
        (new / name).write_bytes(content[: math.floor(len(content) * share)])
        assert ours.latest() == old
        assert (
            len(ours.logger.lines) == 1
            and "step_00000002" in ours.logger.lines[0]
            and name in ours.logger.lines[0]
        )
        (new / name).unlink()
        assert ours.latest() == old and name in ours.logger.lines[1]
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            load_checkpoint(new)
        assert ours.save(numbered(2), step=2) == ours.latest()  # the run comes by again


def test_case_4_one_flipped_bit_is_caught_where_a_plain_loader_reads_it(tmp_path):
    ours = manager_of(tmp_path)
    dice = random.Random(0)
    silent = 0
    old, new = (ours.save(numbered(step), step=step) for step in (1, 2))
    for name in FILES[:3]:
        content = (new / name).read_bytes()
        for _ in range(40):
            bit = dice.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            (new / name).write_bytes(flipped)
            with pytest.raises(ValueError, match=f"{name} was changed after it was saved"):
                verify(new)
            # the five weights stand at the end
            if name == "model.safetensors" and bit >= 8 * (len(content) - 20):
                silent += not torch.equal(load_file(new / name)["w"], numbered(2)["model"]["w"])
        assert ours.latest() == old
        (new / name).write_bytes(content)
        assert ours.latest() == new
    assert silent > 0


class Payload:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", FILES)
def test_case_5_a_pickle_in_the_place_of_a_file_is_refused_and_never_opened(tmp_path, name):
    ours = manager_of(tmp_path / "run")
    target = tmp_path / "surprise"
    old, new = (ours.save(numbered(step), step=step) for step in (1, 2))
    torch.save({"w": Payload(target)}, new / name)
    assert ours.latest() == old
    (new / name).write_bytes(pickle.dumps(Payload(target)))
    assert ours.latest() == old
    if name != "manifest.json":  # and where the manifest was made to fit
        manifest = json.loads((new / "manifest.json").read_text())
        manifest["files"][name] = {
            "size": (new / name).stat().st_size,
            "sha256": checkpointing.sha256_of(new / name),
        }
        (new / "manifest.json").write_text(json.dumps(manifest))
        verify(new)
        with pytest.raises(ValueError, match="does not hold the state of a run"):
            load_checkpoint(new)
    assert not target.exists()
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()  # the payload was live


# ---------------------------------------------------------------- what may be saved


class Broken:
    pass


@pytest.mark.parametrize(
    "part, message",
    [
        ({"a": {"b": Broken()}}, "a.b is a Broken"),
        ({"a": [1, {2, 3}]}, "a.1 is a set"),
        ({"a": lambda: 0}, "a is a function"),
        ({"a": b"bytes"}, "a is a bytes"),
        ({"a": torch.float32}, "a is a dtype"),
        ({"a": torch.eye(2).to_sparse()}, "a is a tensor of torch.float32, torch.sparse_coo"),
        ({"a": torch.empty(2, device="meta")}, "on meta, which a checkpoint cannot hold"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "a is a tensor of torch.complex128"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\)"),
        ({"a": {True: 3}}, "a has the key True"),
        ({"__tensor__": "a"}, "without a leading __"),
        (
            {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
            "two tensors of the state are called a.b",
        ),
        ({"model": {"w": Broken()}}, "model.w is a Broken"),
        ({"model": {"w": torch.empty(2, device="meta")}}, "model.w is a tensor of torch.float32"),
    ],
)
def test_case_6_what_cannot_be_saved_safely_is_refused_at_save(tmp_path, part, message):
    ours = manager_of(tmp_path)
    path = ours.save(numbered(1), step=1)
    with pytest.raises(TypeError, match=message):
        ours.save(numbered(2) | part, step=2)
    assert list(tmp_path.iterdir()) == [path] and ours.latest() == path


TENSORS = st.sampled_from(
    [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
).flatmap(
    lambda dtype: st.sampled_from([(), (0,), (3,), (2, 1, 3)]).map(
        lambda shape: torch.randint(0, 2, shape).to(dtype)
    )
)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | TENSORS
)
WORDS = st.text(st.characters(exclude_characters="."), max_size=4).filter(
    lambda key: not key.startswith("__")
)
KEYS = st.integers(-3, 9) | WORDS
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=3))
def test_any_tree_of_plain_values_comes_back_bit_for_bit(state):
    tree, tensors = split_tensors(state)
    assert differences(join_tensors(json.loads(json.dumps(tree)), tensors), state) == []


def test_tied_and_overlapping_tensors_come_back_with_every_name(tmp_path):
    square = torch.arange(9.0).view(3, 3)
    base = torch.arange(6.0)
    model = {
        "a": square,
        "tied": square,
        "turned": square.T,
        "flat": square.view(-1),
        "row": square[1],
    }
    model |= {
        "left": base[:3],
        "right": base[3:],
        "bits": base.view(torch.int32),
        "none": torch.empty(0),
        "no": torch.empty(0),
    }
    path = manager_of(tmp_path).save({"model": model, "twice": [base, {"again": base}]}, step=1)
    state = load_checkpoint(path)
    assert differences(state["model"], model) == [] and list(
        load_file(path / "model.safetensors")
    ) != list(model)
    assert differences(state["twice"], [base, {"again": base}]) == []
    assert state["model_aliases"] == {"tied": "a"}


# ---------------------------------------------------------------- the disk refuses


@forks
def test_case_7_a_full_disk_leaves_the_old_one_and_the_run_goes_on(tmp_path):
    import resource

    ours = manager_of(tmp_path / "run")
    old = ours.save(numbered(1), step=1)

    def fill() -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        for limit, size in ((30_000, 20_000), (300, 5)):  # in a file of tensors; in state.json
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                ours.save(numbered(2, size=size), step=2)
                os._exit(5)
            except OSError as error:
                message = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            assert str(ours.folder / "step_00000002") in message and "MB free in" in message, (
                message
            )
            assert list(ours.folder.iterdir()) == [old] and ours.latest() == old
        engine = SimpleNamespace(
            state=TrainState(step=4),
            state_dict=lambda: numbered(4, size=20_000),
            runtime=ALONE,
        )
        checkpointer = Checkpointer(ours, save_interval=4)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
        checkpointer.on_step_end(engine, {})
        assert "The run goes on" in ours.logger.lines[-1] and ours.latest() == old
        with pytest.raises(OSError, match="could not be written"):
            checkpointer.on_train_end(engine)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        checkpointer.on_train_end(engine)

    assert in_child(fill)() == 0
    assert step_of(ours.latest()) == 4


ALONE = SimpleNamespace(is_main=True, world_size=1, any=lambda flag: flag)


def test_when_the_main_process_cannot_save_the_others_try_again_with_it(tmp_path):
    """All processes take part in state_dict: one that believed in a save that failed would leave
    the others waiting.
    """
    engine = SimpleNamespace(state=TrainState(step=4), state_dict=lambda: numbered(4))
    # the main process was refused
    engine.runtime = SimpleNamespace(is_main=False, world_size=2, any=lambda flag: True)
    checkpointer = Checkpointer(manager_of(tmp_path / "run"), save_interval=4)
    checkpointer.on_step_end(engine, {})
    assert checkpointer.saved_step == -1 and not (tmp_path / "run").exists()
    engine.runtime.any = lambda flag: flag
    checkpointer.on_train_end(engine)
    assert checkpointer.saved_step == 4 and not (tmp_path / "run").exists()


def test_case_23_a_folder_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    if Path("/proc/self").exists():  # where even root cannot write
        with pytest.raises(
            OSError, match=r"/proc/x/step_00000001 could not be written.*MB free in"
        ):
            manager_of(Path("/proc/x")).save(numbered(1), step=1)
        assert manager_of(Path("/proc/x")).latest() is None
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="step_00000001 could not be written"):
        manager_of(tmp_path / "file").save(numbered(1), step=1)
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        ours = manager_of(tmp_path / "locked")
        path = ours.save(numbered(1), step=1)
        ours.folder.chmod(0o500)
        try:
            with pytest.raises(OSError, match="step_00000002 could not be written"):
                ours.save(numbered(2), step=2)
            assert ours.latest() == path  # reading still goes
        finally:
            ours.folder.chmod(0o700)


# ---------------------------------------------------------------- which ones stay

METRICS = st.sampled_from([1.0, 2.0, 2.0, 3.0, -1.0, math.inf, math.nan, None])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "again", "cut"]), st.integers(1, 40), METRICS
    ),
    max_size=9,
)


@settings(max_examples=25, deadline=None)
@given(EVENTS, st.integers(1, 3), st.sampled_from(["min", "max"]), st.booleans())
def test_case_8_retention_under_random_sequences(
    tmp_path_factory, events, keep_last, mode, with_best
):
    """A model of the rules, kept in a dictionary, says after every event which folders there must
    be.
    """
    folder = tmp_path_factory.mktemp("random")
    ours = manager_of(
        folder, keep_last=keep_last, best_metric="loss" if with_best else None, best_mode=mode
    )
    foreign = [folder / "step_00000001" / "notes.txt", folder / "step_5" / "x", folder / "x.txt"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    there: dict[int, float | None] = {}  # whole checkpoints by step
    cut: set[int] = set()
    for event, stride, metric in events:
        step = max(there, default=1) + (0 if event == "again" and there else stride)
        if event == "cut" and there:
            newest = max(there)
            os.truncate(folder / f"step_{newest:08d}" / "state.json", 5)
            there.pop(newest)
            cut.add(newest)
            continue
        with patch.object(checkpointing, "sync"):  # nobody pulls the plug here
            ours.save(
                numbered(step) | {"metrics": {} if metric is None else {"loss": metric}}, step=step
            )
        there[step] = metric
        cut.discard(step)
        whole = sorted(other for other in there if other <= step)
        # broken ones do not count; those between stay
        since = whole[-keep_last] if len(whole) >= keep_last else 0
        scores = {
            other: value
            for other, value in there.items()
            if value is not None and not math.isnan(value)
        }
        best = (min if mode == "min" else max)(scores.values(), default=None)
        ties = [other for other, value in scores.items() if value == best]
        stays = {other for other in {*there, *cut} if since <= other <= step} | {
            *([max(ties)] if with_best and ties else [])
        }
        there = {s: there[s] for s in there if s in stays}
        cut = cut & stays
        names = {f"step_{other:08d}" for other in {*there, *cut, 1}}
        assert {path.name for path in folder.iterdir()} == names | {"step_5", "x.txt"}
        assert step_of(ours.latest()) == step
        assert (ours.best() and step_of(ours.best())) == (max(ties) if with_best and ties else None)
    assert all(path.read_text() == "mine" for path in foreign)


def test_case_8_a_later_one_stays_where_it_is_whole_and_goes_where_it_is_broken(tmp_path):
    ours = manager_of(tmp_path, keep_last=1)
    ours.save(numbered(9), step=9)
    early = ours.save(numbered(3), step=3)
    assert (
        step_of(ours.latest()) == 9
        and "step_00000009 is kept although it is later than step_00000003" in ours.logger.lines[-1]
    )
    (tmp_path / "step_00000009" / "state.json").unlink()
    ours.save(numbered(3), step=3)
    assert list(tmp_path.iterdir()) == [early]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_ones_to_fall_back_on_are_whole(tmp_path, keep_last):
    """One flipped bit in the newest, then another save: of the older ones as many whole ones stay
    as without the bit.
    """
    ours = manager_of(tmp_path, keep_last=keep_last)
    for step in (10, 20, 30, 40):
        path = ours.save(numbered(step), step=step)
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    ours.save(numbered(50), step=50)
    fresh = manager_of(tmp_path)
    whole = []
    for folder in sorted(tmp_path.iterdir()):
        whole += [step_of(folder)] if fresh._first_whole([folder]) else []
    assert whole == [20, 30, 50][-keep_last:]
    assert keep_last == 1 or "step_00000040/model.safetensors was changed" in ours.logger.lines[
        -1
    ].replace(os.sep, "/")


def test_a_save_reads_back_what_it_has_written_and_no_more(tmp_path, monkeypatch):
    """Three files for each save, also where the best one is old; what others have written, or
    changed, is read once.
    """
    now = time.time_ns  # files that are as young as a tick of the clock would be read again
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10**9)
    real = checkpointing.sha256_of
    read = []
    monkeypatch.setattr(
        checkpointing, "sha256_of", lambda path: read.append(path.parent.name[-1]) or real(path)
    )

    def read_by_saving(manager: CheckpointManager, step: int) -> str:
        read.clear()
        manager.save(numbered(step, loss=float(step)), step=step)  # the first stays the best
        return "".join(read[3:])  # the first three are those of the new one, under another name

    ours = manager_of(tmp_path, keep_last=3, best_metric="loss")
    assert [read_by_saving(ours, step) for step in range(1, 6)] == [""] * 5
    ours = manager_of(tmp_path, keep_last=3, best_metric="loss")
    assert [read_by_saving(ours, step) for step in (6, 7)] == ["555444111", ""]
    time.sleep(0.02)
    os.utime(tmp_path / "step_00000007" / "state.json")
    os.truncate(tmp_path / "step_00000006" / "model.safetensors", 9)
    assert [read_by_saving(ours, step) for step in (8, 9)] == ["777666", ""]
    assert len(ours.logger.lines) == 1 and "is incomplete" in ours.logger.lines[0]  # told once
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["1", "7", "8", "9"]


@pytest.mark.skipif(os.name == "nt", reason="permissions are not those of POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_who_may_read_a_checkpoint_is_said_by_the_umask(tmp_path, umask):
    former = os.umask(umask)
    try:
        ours = manager_of(tmp_path / "run")
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
        for step in (1, 1):
            path = ours.save(numbered(step), step=step)
    finally:
        os.umask(former)
    ordinary = [(tmp_path / name).stat().st_mode for name in ("folder", "file")]
    assert {path.stat().st_mode, ours.folder.stat().st_mode} == {ordinary[0]}
    assert {file.name: file.stat().st_mode for file in path.iterdir()} == dict.fromkeys(
        FILES, ordinary[1]
    )


@pytest.mark.parametrize("metric", ["val_los", "val_bits_per_byte"])
def test_a_best_metric_that_there_is_not_is_an_error_and_loses_nothing(tmp_path, metric):
    first = manager_of(tmp_path, keep_last=1, best_metric="val_loss")
    for step, loss in enumerate([1.0, 2.0], start=1):
        first.save(numbered(step, val_loss=loss), step=step)
    ours = manager_of(tmp_path, keep_last=1, best_metric=metric)
    with pytest.raises(
        ValueError,
        match=(
            f"best_metric='{metric}' is not a result of the validation, which gives val_loss,"
            " val_x: "
        ),
    ):
        ours.save(numbered(3, val_loss=3.0, val_x=1.0), step=3)
    # the best of the former name is there, too
    assert [step_of(path) for path in sorted(tmp_path.iterdir())] == [1, 2, 3]
    ours.save(numbered(4), step=4)  # before the first validation nobody can know
    manager_of(tmp_path, keep_last=1).save(numbered(5, val_loss=3.0), step=5)  # none is asked for


def test_steps_are_compared_as_numbers(tmp_path):
    ours = manager_of(tmp_path, keep_last=1)
    for step in (99_999_999, 100_000_000):
        ours.save(numbered(step), step=step)
    assert [path.name for path in tmp_path.iterdir()] == ["step_100000000"]


@pytest.mark.parametrize("mode, best", [("min", 3), ("max", 4)])
def test_case_9_nan_is_never_best(tmp_path, mode, best):
    ours = manager_of(tmp_path, keep_last=9, best_metric="loss", best_mode=mode)
    ours.save(numbered(1, loss=math.nan), step=1)
    assert ours.best() is None
    for step, loss in enumerate([math.nan, -1.0, 1.0, math.nan], start=2):
        ours.save(numbered(step, loss=loss), step=step)
    ours.save(numbered(6), step=6)
    assert step_of(ours.best()) == best
    (tmp_path / f"step_{best:08d}" / "model.safetensors").write_bytes(b"")
    assert step_of(ours.best()) == 7 - best  # a broken one is not the best either


def test_case_24_a_clock_that_goes_backwards_changes_nothing(tmp_path):
    ours = manager_of(tmp_path, keep_last=2)
    for step in range(1, 6):
        path = ours.save(numbered(step), step=step)
        for file in [path, *path.iterdir()]:
            os.utime(file, (2e9 - step * 1e8,) * 2)  # each one seems older than the one before
        assert ours.latest() == path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files | {"../../outside": files["state.json"]},
        lambda files: {
            "../../outside" if name == "state.json" else name: entry
            for name, entry in files.items()
        },
        lambda files: {
            "/etc/hostname" if name == "state.json" else name: entry
            for name, entry in files.items()
        },
        lambda files: {},
        lambda files: list(files),
        lambda files: None,
    ],
)
def test_case_25_a_manifest_that_leads_out_of_its_folder_is_none(tmp_path, change):
    ours = manager_of(tmp_path / "a" / "b")
    path = ours.save(numbered(1), step=1)
    (tmp_path / "outside").write_bytes((path / "state.json").read_bytes())
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"files": change(manifest["files"])}))
    assert ours.latest() is None and "is not a checkpoint" in ours.logger.lines[0]
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load_checkpoint(path)


def test_case_25_hostile_names_in_a_state_stay_names(tmp_path):
    names = ["../../outside", "/etc/passwd", "..", "a/b", "nul\0", "", "C:\\x"]
    state = {
        "model": {name: torch.ones(1) for name in names},
        "callbacks": {name: torch.zeros(1) for name in names},
    }
    path = manager_of(tmp_path / "a" / "b").save(state, step=1)
    loaded = load_checkpoint(path)
    assert differences({part: loaded[part] for part in state}, state) == []
    assert sorted(
        file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()
    ) == [f"a/b/step_00000001/{name}" for name in sorted(FILES)]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{}",
        "[]",
        "3",
        '{"model_aliases": {"a": "b"}}',
        '{"a": {"__tensor__": "no"}}',
    ],
)
def test_a_state_that_makes_no_sense_is_an_error_of_ours(tmp_path, text):
    ours = manager_of(tmp_path)
    path = ours.save(numbered(1), step=1)
    (path / "state.json").write_text(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {
        "size": len(text),
        "sha256": checkpointing.sha256_of(path / "state.json"),
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    if text == "{}":
        assert load_checkpoint(path).keys() == {"model"}
    else:
        with pytest.raises(ValueError, match="does not hold the state of a run"):
            load_checkpoint(path)
    (path / "manifest.json").write_text(text)
    assert ours.latest() is None


# ---------------------------------------------------------------- with the engine


class StopAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, engine: TrainingEngine, metrics: dict[str, Any]) -> None:
        if engine.state.step == self.step:
            engine.stop("the test asked for it")


class WithDropout(RegressionTask):
    def build_model(self, data: Any) -> torch.nn.Module:
        return torch.nn.Sequential(super().build_model(data), torch.nn.Dropout(0.5))


def make_engine(state: Any = None, *callbacks: Any, **training: Any) -> TrainingEngine:
    options = (
        dict(max_steps=4, batch_size=4, precision="fp32", device="cpu", eval_interval=99) | training
    )
    config = Config(training=TrainingConfig(**options))
    task = WithDropout(config)
    engine = TrainingEngine(config, task, task.build_data(), callbacks)
    engine.setup(state)
    return engine


def test_case_12_plain_and_compiled_load_each_other(tmp_path, monkeypatch):
    """The eager backend: names and loading are in question here, not speed. (With DDP:
    tests/test_distributed.py.)
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    ends = {}
    for first in (False, True):
        ours = manager_of(tmp_path / str(first))
        half = make_engine(None, Checkpointer(ours, save_interval=99), max_steps=2, compile=first)
        half.run()
        assert hasattr(half.train_model, "_orig_mod") is first
        keys = (
            load_file(ours.latest() / "model.safetensors").keys()
            | load_checkpoint(ours.latest())["model"].keys()
        )
        assert not any("module." in key or "_orig_mod" in key for key in keys) and keys == {
            "0.weight",
            "0.bias",
        }
        for second in (False, True):
            engine = make_engine(load_checkpoint(ours.latest()), max_steps=4, compile=second)
            assert differences(dict(engine.model.state_dict()), dict(half.model.state_dict())) == []
            engine.run()
            ends[first, second] = dict(engine.model.state_dict())
    assert all(differences(end, ends[False, False]) == [] for end in ends.values())


class FailsAfter4(Callback):
    def on_step_end(self, engine: TrainingEngine, metrics: dict[str, Any]) -> None:
        if engine.state.step == 4:
            raise RuntimeError("a callback failed")


class FailsWithin4(Callback):
    def on_step_end(self, engine: TrainingEngine, metrics: dict[str, Any]) -> None:
        if engine.state.step == 3:
            engine.task.train_step = None  # step 4 fails in its forward pass


@pytest.mark.parametrize(
    "fails, saved", [(FailsAfter4, ["step_00000004"]), (FailsWithin4, [])], ids=["after", "within"]
)
def test_a_run_that_fails_is_saved_between_two_steps_and_not_within_one(tmp_path, fails, saved):
    ours = manager_of(tmp_path / "run")
    engine = make_engine(None, Checkpointer(ours, save_interval=99), fails(), max_steps=6)
    with pytest.raises((RuntimeError, TypeError)):
        engine.run()
    assert [path.name for path in ours.folder.glob("step_*")] == saved


def test_a_refused_save_is_a_warning_on_the_way_and_an_error_at_the_end(tmp_path):
    class Refusing(CheckpointManager):
        refusals = 1

        def save(self, state: dict[str, Any], *, step: int) -> Path:
            if self.refusals:
                self.refusals -= 1
                raise OSError("no space left on device")
            return super().save(state, step=step)

    ours = Refusing(tmp_path / "run", logger=Told())
    make_engine(None, Checkpointer(ours, save_interval=2), max_steps=5).run()
    assert "tries again after the next 2 steps" in ours.logger.lines[0]
    assert sorted(path.name for path in ours.folder.iterdir()) == ["step_00000004", "step_00000005"]
    ours.refusals = 99
    with pytest.raises(OSError, match="no space left on device"):
        make_engine(None, Checkpointer(ours, save_interval=99), max_steps=2).run()


def test_best_is_a_checkpoint_that_was_validated(tmp_path):
    """The results that a state carries may be those of earlier weights: only the step that they
    were measured at has a score.
    """
    ours = manager_of(tmp_path / "run", best_metric="val_loss", keep_last=1)
    engine = make_engine(None, Checkpointer(ours, save_interval=4), max_steps=9, eval_interval=4)
    engine.callbacks.append(StopAt(5))  # a step after a validation, as a signal may
    engine.run()
    assert [path.name for path in sorted(ours.folder.iterdir())] == [
        "step_00000004",
        "step_00000005",
    ]
    assert ours.best().name == "step_00000004" and ours.latest().name == "step_00000005"
    # the newest results go on
    assert load_checkpoint(ours.latest())["metrics"] == load_checkpoint(ours.best())["metrics"]


def test_a_run_that_fails_in_the_validation_of_an_epochs_end_goes_on(tmp_path):
    class Fails(Callback):
        def on_validation_start(self, engine: TrainingEngine) -> None:
            raise RuntimeError("no memory")

    ours = manager_of(tmp_path / "run")
    rows = 448
    with pytest.raises(RuntimeError, match="no memory"):
        make_engine(
            None,
            Checkpointer(ours, save_interval=99),
            Fails(),
            max_steps=6,
            batch_size=rows // 4,
            eval_interval=4,
        ).run()
    engine = make_engine(
        load_checkpoint(ours.latest()), max_steps=6, batch_size=rows // 4, eval_interval=4
    )
    assert (engine.state.step, engine.state.epoch, engine.state.batch) == (4, 1, 0)
    engine.run()
    assert engine.state.step == 6


def test_a_metric_may_be_a_tensor(tmp_path):
    class Measures(WithDropout):
        def metrics(self, loss: float, data: Any) -> dict[str, Any]:
            return {"half": torch.tensor(loss / 2)}

    config = Config(training=TrainingConfig(max_steps=2, precision="fp32", device="cpu"))
    task = Measures(config)
    ours = manager_of(tmp_path / "run", best_metric="val_half")
    TrainingEngine(config, task, task.build_data(), [Checkpointer(ours, save_interval=2)]).run()
    metrics = load_checkpoint(ours.best())["metrics"]
    assert metrics["val_half"] == pytest.approx(metrics["val_loss"] / 2)


def test_a_conjugate_keeps_its_sign(tmp_path):
    c = torch.tensor([1 + 2j, 3 - 4j])
    model = {"a": c.imag, "b": c.conj().imag, "c": c.conj()}
    loaded = load_checkpoint(manager_of(tmp_path).save({"model": model}, step=1))["model"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize(
    ("state", "step"),
    [({}, 1), ({"model": None}, 1), ({"model": [torch.ones(1)]}, 1), ({"model": {}}, -1)],
)
def test_what_is_no_state_is_refused_before_anything_is_written(state, step, tmp_path):
    ours = manager_of(tmp_path / "run")
    with pytest.raises(ValueError, match="step=-1 must be|the state must be a dict whose 'model'"):
        ours.save(state, step=step)
    assert not ours.folder.exists()


def test_a_wrong_best_metric_ends_a_run_at_the_first_save_that_can_know_it(tmp_path):
    """A validation after step 2, saves after each step: step 1 is saved, step 2 is saved and ends
    the run, once.
    """
    ours = manager_of(tmp_path / "run", best_metric="val_los")
    engine = make_engine(None, checkpointer := Checkpointer(ours, save_interval=1), eval_interval=2)
    with pytest.raises(
        ValueError,
        match="best_metric='val_los' is not a result of the validation, which gives val_loss",
    ) as caught:
        engine.run()
    assert (
        caught.value.__notes__ == ["raised by Checkpointer.on_step_end"]
        and checkpointer.saved_step == 2
    )
    assert [path.name for path in sorted(ours.folder.iterdir())] == [
        "step_00000001",
        "step_00000002",
    ]
    ours.best_metric = "val_loss"
    engine = make_engine(load_checkpoint(ours.latest()), Checkpointer(ours, save_interval=1))
    engine.run()  # and goes on with the right name
    assert engine.state.step == 4


def test_a_wrong_best_metric_ends_all_processes_alike(tmp_path):
    """All come to the exchange of who was refused, and all raise after it: nobody waits for one
    that has ended.
    """
    for is_main in (True, False):
        asked = []
        runtime = SimpleNamespace(
            is_main=is_main, world_size=2, any=lambda flag, asked=asked: asked.append(flag) or flag
        )
        engine = SimpleNamespace(
            state=TrainState(step=4),
            state_dict=lambda: numbered(4, val_loss=1.0),
            runtime=runtime,
        )
        checkpointer = Checkpointer(
            manager_of(tmp_path / "run", best_metric="val_los"), save_interval=4
        )
        with pytest.raises(ValueError, match="best_metric='val_los' is not a result"):
            checkpointer.on_step_end(engine, {})
        assert asked == [False] and checkpointer.saved_step == 4
    assert step_of(checkpointer.manager.latest()) == 4


class Watched(RegressionTask):
    """Sends itself a signal in the middle of a step, or of a validation."""

    signal_at: tuple[str, int] = ("never", 0)
    calls = {"train": 0, "validation": 0}

    def _count(self, kind: str) -> None:
        self.calls[kind] += 1
        if self.signal_at == (kind, self.calls[kind]):
            os.kill(os.getpid(), signal.SIGTERM)

    def train_step(self, model: Any, batch: Any) -> Any:
        self._count("train")
        return super().train_step(model, batch)

    def validation_step(self, model: Any, batch: Any) -> Any:
        self._count("validation")
        return super().train_step(model, batch)


def command(folder: Path, signal_at: tuple[str, int] = ("never", 0), **words: Any) -> int:
    """`llm-course train` in a child, with a signal on the way; its exit status."""
    words = {
        "run-dir": folder,
        "task": "regression",
        "training.max_steps": 9,
        "training.eval_interval": 3,
        "training.batch_size": 4,
        "training.gradient_accumulation_steps": 2,
        "training.device": "cpu",
        "training.precision": "fp32",
        "checkpoint.save_interval": 100,
        "checkpoint.keep_last": 99,
        "logging.progress": False,
        "logging.tensorboard": False,
    } | words

    def run() -> int:
        Watched.signal_at = signal_at
        with (
            patch.dict("llm_course.training.train.AVAILABLE_TASKS", regression=Watched),
            patch("llm_course.training.run.matmul_flops", return_value=1e9),
            patch("llm_course.training.reports.plot_losses"),
        ):
            return main(
                [
                    f"--{name}={json.dumps(value) if isinstance(value, bool) else value}"
                    for name, value in words.items()
                ]
            )

    return in_child(run)()


@forks
@pytest.mark.parametrize("where, call, step", [("train", 7, 4), ("validation", 20, 6)])
def test_case_19_sigterm_finishes_the_step_saves_and_exits_with_143(tmp_path, where, call, step):
    """Call 7 is the first half of step 4; a validation has 16 batches, so call 20 is in the second
    one, after step 6.
    """
    assert command(tmp_path / "stopped", (where, call)) == 143
    ours = manager_of(tmp_path / "stopped" / "checkpoints")
    assert [path.name for path in ours.folder.iterdir()] == [f"step_{step:08d}"]
    assert command(tmp_path / "straight", **{"checkpoint.save_interval": 1}) == 0
    straight = tmp_path / "straight" / "checkpoints"
    state = load_checkpoint(ours.latest())
    # weights, moments, RNG, validation: all
    assert differences(state, load_checkpoint(straight / f"step_{step:08d}")) == []
    assert ("val_loss" in state["metrics"]) and state["state"]["step"] == step
    assert command(tmp_path / "stopped") == 0  # the same command again
    assert (
        differences(load_checkpoint(ours.latest()), load_checkpoint(straight / "step_00000009"))
        == []
    )


def test_a_second_signal_stops_at_once_and_the_handlers_come_back():
    before = [signal.getsignal(number) for number in GracefulStop.SIGNALS]
    engine = make_engine()
    callback = GracefulStop()
    callback.on_exception(engine, RuntimeError())  # before on_train_start: nothing to give back
    callback.on_train_start(engine)
    signal.raise_signal(signal.SIGTERM)
    assert engine._stop_asked == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    callback.on_train_end(engine)
    assert [signal.getsignal(number) for number in GracefulStop.SIGNALS] == before


# ---------------------------------------------------------------- nothing is unpickled

UNSAFE = {
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "torch.serialization.load",
    "pandas.read_pickle",
    "numpy.load",
    "numpy.lib.format.read_array",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.UnsafeLoader",
    "yaml.Loader",
    "torch.distributed.checkpoint.load",
}
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MADE_SAFE = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}


def unsafe_uses(code: str) -> list[str]:
    """Every use of a function that can run what a file says, under whatever name it was imported; a
    mention is enough, as in `read = torch.load`, unless it is a call that says itself that it is
    safe.
    """
    tree = ast.parse(code)
    names = {}
    safe = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names |= {alias.asname: alias.name} if alias.asname else {top: top}
            found += [
                alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES
            ]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
            found += [node.module] * (node.module.split(".")[0] in UNSAFE_MODULES)

    def full_name(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full_name(node.value)}.{node.attr}"
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and isinstance(node.args[1], ast.Constant)
        ):
            return f"{full_name(node.args[0])}.{node.args[1].value}"
        return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"

    loaders = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "yaml.SafeLoader" in map(full_name, node.bases)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and full_name(node.func) == "yaml.load":
            given = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            if [full_name(loader) in loaders | {"yaml.SafeLoader"} for loader in given] == [True]:
                safe.add(node.func)
        if isinstance(node, ast.Call) and (rule := MADE_SAFE.get(full_name(node.func))):
            given = {
                keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords
            }
            if given.get(rule[0]) is rule[1]:
                safe.add(node.func)
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Attribute, ast.Name, ast.Call))
            and node not in safe
            and full_name(node) in UNSAFE
        ):
            found.append(full_name(node))
    return found


ALLOWED = {
    # a format of PyTorch's own, which it reads by unpickling: the docstring and page 18c warn
    "training/shards.py": ["torch.distributed.checkpoint.load"],
    # what the processes of one page send each other
    "pages/ranks.py": ["pickle"],
    # what the processes of an exercise send each other
    "pages/exercise_distributed.py": ["pickle"],
}


def test_case_5_no_module_of_the_package_calls_a_loader_that_can_run_code():
    """What this cannot see, and is meant so: processes of ours that hand objects to each other
    (DataLoader workers, `launch`, `all_gather_object`) pickle them in memory, never from a file;
    and libraries that we call on purpose read files in their own ways (`datasets`, TensorBoard, the
    compiler's cache). No file of a run or a model is read by any of those. Nor does it follow names
    that are made up at run time, such as `getattr(torch, "lo" + "ad")`.
    """
    found = {
        str(path.relative_to(PACKAGE)): unsafe_uses(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    assert len(found) > 20 and {name: uses for name, uses in found.items() if uses} == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import torch as t\nread = t.load",
        "from torch import load as read\nread('x')",
        "import torch\ngetattr(torch, 'load')('x')",
        "def f():\n    import pickle\n    return pickle.loads(b'')",
        "from pickle import Unpickler",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x', Loader=yaml.Loader)",
        "import yaml\nclass Open(yaml.Loader): pass\nyaml.load('', Open)",
    ],
)
def test_case_5_the_reader_of_the_sources_finds_planted_faults(code):
    assert unsafe_uses(code)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load('x', weights_only=True)",
        "import yaml\nyaml.safe_load('')",
        "import yaml\nclass Strict(yaml.SafeLoader): pass\nyaml.load('', Strict)",
        "model.load_state_dict(x)",
    ],
)
def test_case_5_the_reader_of_the_sources_lets_safe_ones_pass(code):
    assert unsafe_uses(code) == []

"""The checks of exercise 18, checkpointing: each says what is wrong with an answer."""

import copy
import json
import math
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakSet

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from llm_course.pages.checking import Answer, Answers, case, written
from llm_course.training.engine import Callback


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def as_lists(value: Any) -> Any:
    """A value with its tensors turned into lists, to be compared with `==`; the types of containers
    and keys count.
    """
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return "dict", [(type(key).__name__, key, as_lists(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [as_lists(part) for part in value]
    return type(value).__name__, value


# ------------------------------------------------------------------ 1, what a test would miss


class Losses(Callback):
    """Notes the losses, and after step 2 the state: a copy, and what was not copied."""

    def __init__(self) -> None:
        self.rows: dict[int, float] = {}
        self.state: dict[str, Any] = {}
        self.living: dict[str, Any] = {}

    def on_step_end(self, engine: Any, metrics: dict[str, Any]) -> None:
        self.rows[engine.state.step] = metrics["loss_sum"]
        if engine.state.step == 2:
            self.living = engine.state_dict()
            self.state = copy.deepcopy(self.living)


def go_on(engine: Any, state: dict[str, Any]) -> dict[int, float]:
    """The losses of a run resumed from `state`, which gives the engine all that setup would."""
    [notes] = engine.callbacks
    notes.rows = {}
    engine.load_state_dict(state)
    engine.run()
    rows: dict[int, float] = notes.rows
    return rows


ORDER = {
    "model": "the weights are read in the forward pass, before the loss of the same step",
    "rng": (
        "dropout draws in the forward pass, before the loss of the same step; where there is no"
        " dropout, nobody draws"
    ),
    "position": "another position gives another batch, before the loss of the same step",
    "optimizer": (
        "what the optimizer remembers is read in the update, after the loss of that step; plain"
        " gradient descent remembers nothing, and the engine takes the learning rate from the"
        " schedule"
    ),
    "scheduler": (
        "the learning rate is read in the update, after the loss of that step; a constant one"
        " is the same at every count"
    ),
}


def check_run(first: dict[str, Any], name: str, make_run: Answer) -> tuple[bool, int]:
    """One of the three runs; returns whether a state is changed in place, and what it counts."""
    assert isinstance(first[name], dict) and first[name].keys() == ORDER.keys(), (
        f"run {name} has the keys {', '.join(ORDER)}"
    )
    straight = make_run(name, [notes := Losses()])
    straight.setup()
    fresh = copy.deepcopy(straight.state_dict())
    straight.run()
    right = notes.rows
    saved = notes.state
    ended = copy.deepcopy(straight.state_dict())
    in_place = torch.equal(notes.living["model"]["0.weight"], ended["model"]["0.weight"])
    for part, reason in ORDER.items():
        place = {part: fresh.get(part)}
        if part == "position":
            place = {"state": saved["state"] | {"batch": 0}}
        losses = go_on(straight, copy.deepcopy(saved | place))
        differing = (
            step for step in (3, 4) if abs(losses[step] - right[step]) > 1e-5 * right[step]
        )
        seen = next(differing, None)
        assert first[name][part] == seen, (
            f"run {name}, {part}: you say {first[name][part]!r}, which is not what the run shows."
            f" Think: {reason}"
        )
    return in_place, notes.living["state"]["step"]


def task1_predict(answers: Answers) -> None:
    """The typed steps, against runs that forget one part each."""
    with case("Task 1"):
        names = ("first", "kept_weights", "kept_counter")
        first, kept_weights, kept_counter = written(answers, *names)
        assert isinstance(first, dict) and first.keys() == {*"ABC"}, "first has the keys A, B and C"
        for name in "ABC":
            in_place, counted = check_run(first, name, answers["make_run"])
        kept = kept_weights, kept_counter
        assert kept != (2, 2), (
            "kept was not copied: its tensors are those that the run goes on to change"
        )
        assert kept != (4, 4), (
            "a tensor in kept is the living one, but a number in it was copied when the state was"
            " made"
        )
        assert kept == (4 if in_place else 2, counted), (
            f"kept_weights, kept_counter = {kept_weights}, {kept_counter} is not right: which of"
            " the two is changed in place?"
        )


# ------------------------------------------------------------------------- 2, split and join


def there_and_back(answers: Answers, tree: Any, what: str) -> tuple[Any, dict[str, Tensor]]:
    """split, through both formats, and join; returns (result, the tensors that were stored)."""
    split, join = written(answers, "split", "join")
    before = as_lists(tree)
    with case(what):
        result = split(tree)
        assert isinstance(result, tuple) and len(result) == 2, (
            f"split must return the pair (plain, tensors), not {type(result).__name__}"
        )
        plain, tensors = result
        assert isinstance(tensors, dict), (
            f"the second result of split is {type(tensors).__name__}, expected a dictionary of"
            " tensors"
        )
        strange = [
            name
            for name, tensor in tensors.items()
            if not (isinstance(name, str) and isinstance(tensor, Tensor))
        ]
        assert not strange, f"tensors has the entry {strange[:1]}: it maps strings to tensors"
        try:
            text = json.dumps(plain)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"the plain tree is not plain: {error}") from None
        try:
            stored = load(save(tensors))
        except Exception as error:
            raise AssertionError(
                f"safetensors refuses the tensors: {str(error).strip().splitlines()[0][:150]}"
            ) from None
        joined = join(json.loads(text), stored)
        assert as_lists(tree) == before, "split has changed the tree that it was given"
        return joined, stored


def check_same_tree(answers: Answers, tree: Any, what: str) -> None:
    """A tree must come back as it was, with the types of its containers and keys."""
    with case("Task 2"):
        joined, _ = there_and_back(answers, tree, what)
        came_back = as_lists(joined) == as_lists(tree)
        assert came_back, f"{what}: {str(tree)[:120]} came back as {str(joined)[:120]}"


def task2_types(answers: Answers) -> None:
    """Trees of all kinds come back; what cannot be stored is refused by its path."""
    check_same_tree(
        answers, {"step": 3, "moments": {"w": torch.ones(2)}}, "dictionaries and a tensor"
    )
    check_same_tree(
        answers, {"state": {0: torch.zeros(2), 10: torch.ones(1), -1: 5}}, "whole numbers as keys"
    )
    check_same_tree(answers, {0: "number", "0": "string"}, "the keys 0 and '0' in one dictionary")
    check_same_tree(
        answers,
        {"betas": (0.9, 0.95), "list": [1, (2, [3])], "none": (), "empty": [], "nothing": {}},
        "tuples and lists",
    )
    check_same_tree(answers, {"pair": (torch.ones(1), [torch.zeros(1)])}, "tensors in a tuple")
    check_same_tree(answers, [True, False, None, 1, 1.0, "1", math.inf], "plain values in a list")
    check_same_tree(
        answers,
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        "the keys a.b, and a with b in it",
    )
    check_same_tree(
        answers,
        {
            "half": torch.ones(2, dtype=torch.bfloat16),
            "one": torch.tensor(3),
            "none": torch.zeros(0, 2),
            "many": [torch.zeros(1), torch.ones(1)],
        },
        "other dtypes and shapes",
    )
    check_same_tree(
        answers,
        {"name": "__main__", "mark": ["__tensor__", ("__tuple__",)]},
        "values that begin with __, which only keys may not",
    )
    check_refused(answers)


class Pair(NamedTuple):
    """A tuple with a type of its own, which would come back as a plain one."""

    one: int
    two: int


def check_refused(answers: Answers) -> None:
    """What cannot come back is refused when it is split, by its path."""
    (split,) = written(answers, "split")
    with case("Task 2, what cannot be stored"):
        for tree, path in (
            ({"a": {"b": [object()]}}, "a.b.0"),
            ({"a": {"b": ({1, 2},)}}, "a.b.0"),
            ({"a": {"b": [Pair(1, 2)]}}, "a.b.0"),
            ({"outer": {"inner": {True: 1}}}, "outer.inner"),
            ({"outer": {"inner": {None: 1}}}, "outer.inner"),
            ({"outer": {"inner": {"__tensor__": "w"}}}, "outer.inner"),
            ({"outer": {"inner": {"__tuple__": [1]}}}, "outer.inner"),
        ):
            try:
                result = split(tree)
            except TypeError as error:
                assert path in str(error), (
                    f"{tree} is refused, but the message {str(error)!r} does not name the path"
                    f" {path}"
                )
                assert f".{path}" not in str(error), (
                    f"{tree} is refused with {str(error)!r}: the path is {path}, with no dot in"
                    " front"
                )
                continue
            raise AssertionError(
                f"{tree} was taken, and split returned {result!r}: refuse with a TypeError what"
                " cannot come back as it was, with its type"
            )


def task2_ties(answers: Answers) -> None:
    """One tensor in two places comes back as one."""
    (split,) = written(answers, "split")
    with case("Task 2, ties"):
        counts = [len(split({"w": one})[1]) for one in [torch.ones(2)] * 2]
        assert counts == [1, 1], (
            f"split is called twice with one tensor and stores {counts} tensors, expected [1, 1]:"
            " is"
            " `seen` shared by all calls?"
        )
        weight = torch.arange(4.0).view(2, 2)
        tree: dict[str, Any] = {
            "embed": weight,
            "norm": torch.ones(2),
            "head": weight,
            "same": weight.clone(),
            "turned": weight.T,
            "list": [weight],
        }
        tree["row"] = weight[0]
        joined, stored = there_and_back(answers, tree, "one weight in several places")
        for name in ("embed", "norm", "head", "same", "turned", "row"):
            assert torch.equal(joined[name], tree[name]), (
                f"{name} was {tree[name].tolist()} and came back as {joined[name].tolist()}: is it"
                " taken for another tensor at the same address?"
            )
        count = len(stored)
        assert joined["head"] is joined["embed"], (
            "embed and head were one tensor and came back as two: a training step would pull them"
            " apart"
        )
        assert joined["list"][0] is joined["embed"], (
            "a tie between a dictionary and a list inside of it was lost: hand `seen` on"
        )
        assert joined["same"] is not joined["embed"], (
            "two tensors with equal numbers came back as one: ask for the memory, not for the"
            " numbers"
        )
        joined["embed"][0, 0] = 99.0
        assert joined["same"][0, 0] == 0, (
            "a change of embed changes a tensor that was not tied to it"
        )
        assert count == 5, (
            f"{count} tensors were stored, expected 5: embed with its ties once, norm, same,"
            " turned,"
            " row"
        )
        check_model_ties(answers)


def check_model_ties(answers: Answers) -> None:
    """The state_dict of a model with tied weights, which has two objects for one tensor."""
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    joined, stored = there_and_back(
        answers, model.state_dict(), "the state_dict of a model with tied weights"
    )
    assert len(stored) == 1 and joined["head.weight"] is joined["embed.weight"], (
        f"the state_dict of a model with tied weights: {len(stored)} tensors were stored, expected"
        " 1. state_dict gives two Python objects in the same memory, so ask for the memory"
        " (data_ptr), not for the object"
    )


# ------------------------------------------------------------------ 3, one file, whole or not


class DiskRecorder:
    """Stands for os.fsync, os.replace and os.rename: notes what they are asked for, and fails where
    it should.
    """

    def __init__(
        self,
        write_atomic: Answer,
        path: Path,
        fail_at: str | None = None,
        error: BaseException | None = None,
        between: Callable[[], Any] | None = None,
    ):
        self.write_atomic = write_atomic
        self.path = path
        self.fail_at = fail_at
        self.error: Any = error
        self.between = between
        self.synced: dict[int, int] = {}
        self.moves: list[Any] = []
        self.seen: set[bytes | None] = set()
        self.folder_synced_after = False
        self.real: dict[str, Any] = {"replace": os.replace, "rename": os.rename, "write": os.write}
        self.short = ""

    def look(self) -> None:
        """Note what the file holds now."""
        self.seen.add(self.path.read_bytes() if self.path.exists() else None)

    def fsync(self, file: Any) -> None:
        """Stands for os.fsync."""
        info = os.fstat(file if isinstance(file, int) else file.fileno())
        self.look()
        if stat.S_ISDIR(info.st_mode):
            self.folder_synced_after |= (
                bool(self.moves) and info.st_ino == os.stat(self.path.parent).st_ino
            )
            return
        self.synced[info.st_ino] = info.st_size
        if self.fail_at == "fsync":
            raise self.error
        if self.between:
            between = self.between
            self.between = None
            between()

    def mover(self, name: str) -> Callable[..., Any]:
        """What stands for os.replace or os.rename."""

        def move(source: Any, target: Any, **settings: Any) -> Any:
            self.look()
            if self.fail_at == "replace":
                raise self.error
            info = os.stat(source)
            self.moves.append(
                (
                    Path(source).resolve(),
                    Path(target).resolve(),
                    info.st_size,
                    self.synced.get(info.st_ino),
                )
            )
            result = self.real[name](source, target, **settings)
            self.look()
            return result

        return move

    def write(self, descriptor: int, data: Any) -> Any:
        """Stands for os.write, which may take fewer bytes than it is given."""
        if len(data) > 4096:
            self.short = (
                ": os.write may take fewer bytes than it is given, and returns how many it took"
            )
        return self.real["write"](descriptor, data[:4096])

    def run(self, content: bytes) -> "DiskRecorder":
        """Let the student's function write."""
        with patch.object(os, "write", self.write):
            self.run_recorded(content)
        return self

    def run_recorded(self, content: bytes) -> None:
        """Let it write while the disk is recorded."""
        with (
            patch.object(os, "fsync", self.fsync),
            patch.object(os, "fdatasync", self.fsync, create=True),
        ):
            with (
                patch.object(os, "replace", self.mover("replace")),
                patch.object(os, "rename", self.mover("rename")),
            ):
                self.write_atomic(self.path, content)


def check_moves(disk: DiskRecorder, content: bytes, old: bytes | None) -> None:
    """The file got its name once, by a rename, after its bytes were on the disk."""
    moves = [move for move in disk.moves if move[1] == disk.path.resolve()]
    assert moves, (
        "the file never got its name by a rename, so it was written in place: a kill in the"
        " middle leaves half of it"
    )
    assert disk.seen <= {old, content}, (
        f"at some moment the file held {sorted(map(str, disk.seen - {old, content}))[0][:60]}:"
        " a kill there loses the old and the new content"
    )
    assert len(moves) == 1, f"the file got its name {len(moves)} times; once is enough"
    source, _, size, synced = moves[0]
    assert source.parent == disk.path.parent.resolve(), (
        f"the new file was written into {source.parent.name}, not into the folder of the file:"
        " a rename from another disk is a copy"
    )
    assert synced is not None, (
        "the file got its name before os.fsync had forced its bytes to the disk: after a power"
        " cut the name may be there, and the bytes not"
    )
    assert synced == size, (
        f"os.fsync found {synced} of {size} bytes: the others were still in the buffer of the"
        " Python file, so flush first"
    )
    if os.name != "nt":
        assert disk.folder_synced_after, (
            "after the rename, the folder of the file was not forced to the disk: the new name"
            " may be lost"
        )


def check_write(write_atomic: Answer, path: Path, content: bytes, what: str) -> None:
    """One write, from the first operation on the disk to the last."""
    old = path.read_bytes() if path.exists() else None
    others = {entry.name for entry in path.parent.iterdir()} - {path.name}
    with case(f"Task 3, {what}"):
        disk = DiskRecorder(write_atomic, path).run(content)
        there = path.read_bytes() if path.exists() else b""
        assert there == content, (
            f"afterwards the file does not hold the new content, but {len(there)} of {len(content)}"
            f" bytes{disk.short}"
        )
        check_moves(disk, content, old)
        left = {entry.name for entry in path.parent.iterdir()} - {path.name}
        assert left >= others, (
            f"{sorted(others - left)[0]} was somebody else's, and it is gone: did you write under"
            " that name? Take a new name each time"
        )
        assert left == others, f"{sorted(left - others)[0][:30]}... was left in the folder"
        if os.name != "nt":
            ordinary = path.with_name("ordinary")
            ordinary.write_bytes(b"")
            modes = [f"{stat.S_IMODE(entry.stat().st_mode):o}" for entry in (path, ordinary)]
            ordinary.unlink()
            assert modes[0] == modes[1], (
                f"the file has the mode {modes[0]}, an ordinary new file has {modes[1]}: a"
                " temporary file of the module tempfile is for its owner alone, so others who read"
                " the folder cannot read this file, and a mode that you set yourself knows nothing"
                " of the user's umask"
            )


def check_errors(write_atomic: Answer, folder: Path) -> None:
    """A disk that refuses: the error comes out, and the old content stays."""
    for fail_at, error in (
        ("fsync", OSError(28, "No space left on device")),
        ("replace", PermissionError(13, "Permission denied")),
    ):
        with case(f"Task 3, os.{fail_at} fails"):
            raised = None
            try:
                DiskRecorder(write_atomic, folder / "state.json", fail_at, error).run(b"third" * 50)
            except OSError as caught:
                raised = caught
            target = folder / "state.json"
            assert target.exists(), "the old content is gone: the file itself was removed"
            assert raised is not None or fail_at != "fsync", (
                "os.fsync failed, and nobody was told: the error was swallowed, and whoever called"
                " believes that the bytes are on the disk"
            )
            assert raised is not None or target.read_bytes() != b"third" * 50, (
                "the rename failed, and the file holds the new content all the same: it was copied"
                " over the old one, as shutil.move does, and a kill in the middle leaves half of"
                " it. Use os.replace"
            )
            assert raised is not None, (
                "the error was swallowed: whoever called believes that the file is written"
            )
            assert raised is error or raised.__cause__ is error or raised.__context__ is error, (
                f"another error came out: {raised!r}"
            )
            assert target.read_bytes() == b"second" * 30, "the old content is gone"
            left = {entry.name for entry in folder.iterdir()}
            others = {
                "state.json",
                "state.json.tmp",
                "state.tmp",
            }
            assert left >= others, (
                f"{min(others - left)} was somebody else's, and it is gone: remove nothing but your"
                " own file"
            )
            assert left == others, (
                "the half-finished file was left in the folder: remove it, then raise the error"
                " again"
            )


def check_two_writers(write_atomic: Answer, folder: Path) -> None:
    """Another program writes the same file in between."""
    with case("Task 3, two writers at once"):
        path = folder / "state.json"
        try:
            DiskRecorder(
                write_atomic, path, between=lambda: write_atomic(path, b"from the other")
            ).run(b"from this one")
        except OSError as error:
            raise AssertionError(
                "another program wrote the same file in between, and your code raised"
                f" {type(error).__name__}: did both use one temporary name?"
            ) from None
        assert path.read_bytes() == b"from this one", (
            "another program wrote the same file in between, and afterwards it holds"
            f" {path.read_bytes()[:30]!r}: did both use one temporary name?"
        )


def check_interrupted(write_atomic: Answer, folder: Path) -> None:
    """Ctrl-C in the middle leaves the old content, and nothing else."""
    with case("Task 3, stopped by the keyboard"):
        before = sorted(folder.iterdir())
        (folder / "state.json").write_bytes(b"from this one")
        try:
            DiskRecorder(write_atomic, folder / "state.json", "fsync", KeyboardInterrupt()).run(
                b"fourth"
            )
        except KeyboardInterrupt:
            pass
        assert (folder / "state.json").read_bytes() == b"from this one", "the old content is gone"
        assert len(list(folder.iterdir())) == len({*before, folder / "state.json"}), (
            "Ctrl-C left a half-finished file: KeyboardInterrupt is no Exception, so catch"
            " BaseException"
        )


def task3_write(write_atomic: Answer) -> None:
    """A new file, one that is there, errors, and two writers at once."""
    with new_folder() as folder:
        (folder / "state.json.tmp").write_bytes(b"somebody else's")
        (folder / "state.tmp").write_bytes(b"somebody else's")
        check_write(write_atomic, folder / "state.json", b"first" * 100, "a new file")
        check_write(write_atomic, folder / "state.json", b"second" * 30, "a file that is there")
        usual = os.umask(0o027)
        try:
            check_write(write_atomic, folder / "secret", b"third", "a user whose umask is 027")
        finally:
            os.umask(usual)
            (folder / "secret").unlink(missing_ok=True)
        check_errors(write_atomic, folder)
        check_two_writers(write_atomic, folder)


# ----------------------------------------------------------------------------- 4, a manager


@contextmanager
def managed(
    answers: Answers, losses: list[float], keep_last: int = 2, first: int = 1
) -> Iterator[Any]:
    """A MendedManager that has saved one step for each loss."""
    assert "MendedManager" in answers, "write the class MendedManager in the cell above and run it"
    with new_folder() as folder:
        manager = answers["MendedManager"](folder / "run", keep_last)
        for step, loss in enumerate(losses, first):
            manager.save({"step": step}, step=step, loss=loss)
        yield manager


def step_of(path: Any) -> Any:
    """The step in the name of a checkpoint's folder."""
    return path if path is None else int(Path(path).name.removeprefix("step_"))


def steps_in(manager: Any) -> list[int]:
    """The steps of the checkpoints in a manager's folder."""
    return sorted(
        int(path.name[5:]) for path in manager.folder.iterdir() if path.name[5:].isdigit()
    )


def check_order(answers: Answers) -> None:
    """The newest is found by its step, as a number."""
    with case("Task 4, the order"):
        with managed(answers, [4.0, 3.0, 2.0], keep_last=3) as manager:
            for age, path in enumerate(sorted(manager.folder.iterdir(), reverse=True)):
                os.utime(path, (1000 + age, 1000 + age))  # the clock was set back between the saves
            found = step_of(manager.latest())
            assert found == 3, (
                f"steps 1, 2 and 3 are saved, and the clock was set back: latest is step {found},"
                " expected 3. Order by the step"
            )
        with managed(answers, [4.0, 3.0], keep_last=1, first=99_999_999) as manager:
            found = steps_in(manager)
            assert step_of(manager.latest()) == 100_000_000, (
                "after step 99,999,999 step 100,000,000 was saved, and latest is"
                f" {manager.latest().name}: compare numbers, not text"
            )
            assert found == [100_000_000], (
                f"keep_last=1, and the steps {found} are there, expected only the newest: are older"
                " ones removed, and is it found by number?"
            )


def check_best(answers: Answers) -> None:
    """The lowest loss, never NaN, and of equals the newest."""
    with case("Task 4, the best"):
        for losses, kept, best in (
            ([1.0, 3.0, 2.0, 5.0], [1, 4], 1),
            ([math.nan, 2.0, 3.0, 4.0], [2, 4], 2),
            ([2.0, math.nan, 3.0, 4.0], [1, 4], 1),
            ([2.0, 2.0, 3.0, 4.0], [2, 4], 2),
        ):
            with managed(answers, losses, keep_last=1) as manager:
                what = f"steps 1 to 4 have the losses {losses}, and keep_last is 1"
                found = step_of(manager.best())
                assert found is not None, f"{what}: there is no best, expected step {best}"
                nan = (
                    "NaN was taken for the best, or kept from comparing"
                    if math.nan in losses
                    else (
                        "of equals the newest is the best"
                        if losses[0] == losses[1]
                        else "the lowest loss is the best"
                    )
                )
                assert found == best, f"{what}: the best is step {found}, expected {best}: {nan}"
                assert steps_in(manager) == kept, (
                    f"{what}: the steps {steps_in(manager)} are there, expected {kept}: {nan}"
                )
        with managed(answers, [math.nan, math.nan]) as manager:
            assert manager.best() is None, (
                "all losses are NaN, so there is no best: None is expected"
            )


def task4_order(answers: Answers) -> None:
    """The order, and the best."""
    check_order(answers)
    check_best(answers)


def flip(path: Path, place: int = -3) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def without_loss(path: Path) -> None:
    """Take the loss out of a manifest."""
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in manifest.items() if name != "loss"}))


def with_loss(path: Path, loss: Any) -> None:
    """Write another loss into a manifest."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"loss": loss}))


def empty(folder: Path) -> None:
    """Remove what is in a folder."""
    for entry in folder.iterdir():
        entry.unlink()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "one bit of its state has changed": lambda folder: flip(folder / "state.json"),
    "its state is cut": lambda folder: (folder / "state.json").write_text('{"st'),
    "its state is missing": lambda folder: (folder / "state.json").unlink(),
    "its manifest is missing": lambda folder: (folder / "manifest.json").unlink(),
    "its manifest is cut": (
        lambda folder: (folder / "manifest.json").write_text('{"loss": 0.5, "si')
    ),
    "its manifest is a list": lambda folder: (folder / "manifest.json").write_text("[1, 2]"),
    "its manifest is {}": lambda folder: (folder / "manifest.json").write_text("{}"),
    "its manifest has no loss": lambda folder: without_loss(folder / "manifest.json"),
    "its manifest has a text as the loss": (
        lambda folder: with_loss(folder / "manifest.json", "low")
    ),
    "its manifest holds a byte that is not UTF-8": (
        lambda folder: (folder / "manifest.json").write_bytes(b'{"loss": 0.5, "\xff')
    ),
    "it is empty": lambda folder: empty(folder),
}


def check_damage(answers: Answers) -> None:
    """The newest is damaged in one way or another, and the one before is used."""
    for what, damage in DAMAGES.items():
        with (
            case(f"Task 4, of step 3 {what}"),
            managed(answers, [4.0, 3.0, 2.0], keep_last=3) as manager,
        ):
            newest = max(manager.folder.iterdir())
            damage(newest)
            whole = manager.is_whole(newest)
            why = "compare what is there with the hash in the manifest"
            if "loss" in what:
                why = (
                    "best() reads the loss, so a manifest without it makes no sense, nor one in"
                    " which it is no number"
                )
            if not isinstance(whole, bool):
                why = "does every way out of it return True or False, also after an error?"
            assert whole is False, f"is_whole gives {whole!r}, expected False: {why}"
            assert step_of(manager.latest()) == 2, (
                f"latest is step {step_of(manager.latest())}, expected 2, the newest that is whole"
            )
            assert step_of(manager.best()) == 2, (
                f"best is step {step_of(manager.best())}, expected 2, the best that is whole"
            )
            manager.save({"step": 4}, step=4, loss=9.0)
            assert step_of(manager.latest()) == 4, (
                "after the damage a further save does not become the latest"
            )


def check_reserve(answers: Answers) -> None:
    """Only whole ones count as something to fall back on."""
    with case("Task 4, a broken one among the newest"), managed(answers, [4.0, 3.0]) as manager:
        DAMAGES["its state is cut"](manager.folder / "step_00000002")
        manager.save({"step": 3}, step=3, loss=1.0)
        assert (manager.folder / "step_00000001").exists(), (
            "keep_last is 2, steps 1 and 3 are whole and the state of step 2 is cut, and save has"
            " removed step 1, the only one to fall back on behind step 3: count the whole ones only"
        )


def check_nothing_there(answers: Answers) -> None:
    """Before the first save there is neither a newest nor a best."""
    with case("Task 4, nothing there"), new_folder() as folder:
        manager = answers["MendedManager"](folder / "run")
        for name in ("latest", "best"):
            found = getattr(manager, name)()
            assert found is None, f"before the first save {name}() is {found}, expected None"


def check_foreign(answers: Answers) -> None:
    """What the manager did not write stays."""
    with case("Task 4, what is not its own"), managed(answers, [4.0], keep_last=1) as manager:
        foreign = [
            manager.folder / name
            for name in (
                "step_final",
                "step_0000000a",
                "steps_of_my_plan",
                "step_1",
                "step_00000000",
            )
        ]
        for path in foreign:
            path.mkdir()
            (path / "notes.txt").write_text("not yours")
        for name in ("step_list.txt", "step_00000009"):
            (manager.folder / name).write_text("not yours")
        shutil.copytree(manager.folder / "step_00000001", manager.folder / "step_00000007.bak")
        foreign.append(manager.folder / "step_00000007.bak")
        (manager.folder / "step_1" / "notes.txt").rename(manager.folder / "step_1" / "state.json")
        for step in (2, 3):
            manager.save({"step": step}, step=step, loss=1.0)
        lost = [path.name for path in foreign if not path.exists()]
        assert not lost, (
            f"save has removed {lost[0]}, which is not its own: look at the name, and at what is"
            " in the"
            " folder"
        )
        for name in ("step_list.txt", "step_00000009"):
            assert (manager.folder / name).exists(), (
                f"save has removed {name}, which is not even a folder"
            )
        assert not (manager.folder / "step_00000001").exists(), (
            "step 1 is old, not the best, and its own, but it is still there"
        )
        latest = manager.latest()
        assert latest and latest.name == "step_00000003", (
            f"latest is {latest and latest.name}, expected step_00000003: a copy called"
            " step_00000007.bak is no checkpoint, so match the whole name"
        )
        (manager.folder / "step_00000003" / "my_plot.png").write_text("not yours")
        for step in (4, 5):
            manager.save({"step": step}, step=step, loss=0.5)
        assert (manager.folder / "step_00000003" / "my_plot.png").exists(), (
            "step 3 is old and whole, but a plot lay beside its two files, and save has removed it"
            " with"
            " them: remove a folder only where nothing else is in it"
        )


def task4_damage(answers: Answers) -> None:
    """Damage of all kinds, and folders that aren't the manager's own."""
    check_damage(answers)
    check_reserve(answers)
    check_nothing_there(answers)
    check_foreign(answers)


# -------------------------------------------------------------------------- 5, which ones stay


def check_keep(
    to_keep: Answer,
    checkpoints: list[Any],
    expected: set[int],
    what: str,
    keep_last: int = 2,
    every: int | None = None,
) -> None:
    """One list of checkpoints: which must stay, and which must go."""
    settings = f"keep_last={keep_last}" + (f", every={every}" if every else "")
    with case(f"Task 5, {settings}, {checkpoints}"):
        given_list = list(checkpoints)
        found = to_keep(given_list, keep_last=keep_last, every=every)
        assert isinstance(found, set | frozenset), (
            f"to_keep must return a set of steps, not {type(found).__name__}"
        )
        assert given_list == checkpoints, (
            "the list that was given has changed: do not sort or empty it in place"
        )
        missing = sorted(expected - found)
        extra = sorted(found - expected)
        assert not missing, f"step {missing[0]} would be lost: {what}"
        assert not extra, f"step {extra[0]} stays and should go: {what}"


def check_newest_and_best(to_keep: Answer) -> None:
    """The newest, the best, and broken ones."""
    check_keep(
        to_keep,
        [(10, 5.0, True), (20, 2.0, True), (30, 3.0, True), (40, 4.0, True)],
        {20, 30, 40},
        "the two newest, and the best beside them",
    )
    check_keep(
        to_keep,
        [(40, 4.0, True), (20, 2.0, True), (10, 5.0, True), (30, 3.0, True)],
        {20, 30, 40},
        "the list may have any order",
    )
    check_keep(
        to_keep,
        [(10, math.nan, True), (20, 2.0, True), (30, 3.0, True), (40, 4.0, True)],
        {20, 30, 40},
        "NaN is never the best",
    )
    check_keep(
        to_keep,
        [(10, 2.0, True), (20, math.nan, True), (30, None, True), (40, 4.0, True), (50, 5.0, True)],
        {10, 40, 50},
        "None and NaN are never the best",
    )
    check_keep(
        to_keep,
        [(10, 2.0, True), (20, 2.0, True), (30, 4.0, True), (40, 4.0, True)],
        {20, 30, 40},
        "of equals the newest is the best",
    )
    check_keep(
        to_keep,
        [(10, 2.0, True), (20, 1.0, False), (30, 3.0, True), (40, 4.0, False), (50, 5.0, True)],
        {10, 30, 50},
        "a broken one is neither the best nor among the newest",
    )
    check_keep(
        to_keep,
        [(10, 5.0, True), (20, 3.0, True), (30, None, False)],
        {10, 20, 30},
        "a broken one that is newer than every whole one may be in the making",
    )


def check_milestones(to_keep: Answer) -> None:
    """Milestones, and lists at the edge."""
    check_keep(
        to_keep,
        [
            (100, 5.0, True),
            (150, 1.0, True),
            (200, 4.0, True),
            (250, 3.0, True),
            (300, 4.0, True),
            (310, 4.0, True),
        ],
        {100, 150, 200, 300, 310},
        "multiples of 100, and beside them the two newest and the best",
        every=100,
    )
    check_keep(
        to_keep,
        [(100, 5.0, False), (200, 4.0, True), (210, 4.0, True), (220, 4.0, True)],
        {200, 210, 220},
        "a broken milestone is none",
        every=100,
    )
    check_keep(
        to_keep,
        [(10, 5.0, True), (20, 4.0, True), (30, 3.0, True), (40, 1.0, True)],
        {30, 40},
        "the best is the newest here: look for it among all, and do not keep another one in its"
        " place",
    )
    check_keep(
        to_keep,
        [(10, 0.0, True), (20, 2.0, True), (30, 3.0, True), (40, 4.0, True)],
        {10, 30, 40},
        "a loss of 0.0 is a number",
    )
    check_keep(to_keep, [(10, None, True)], {10}, "the only one stays")
    check_keep(
        to_keep,
        [(0, None, False)],
        {0},
        "no whole one is there, so a broken step 0 is newer than every whole one",
    )
    check_keep(to_keep, [], set(), "nothing is there")
    check_keep(
        to_keep,
        [(10, 1.0, False), (20, 1.0, False)],
        {10, 20},
        "no whole one is there, so both broken ones are newer than every whole one",
    )


def task5_keep(to_keep: Answer) -> None:
    """All the rules."""
    check_newest_and_best(to_keep)
    check_milestones(to_keep)


# -------------------------------------------------------------------- 6, save in the background


class SlowDisk:
    """A save that waits until it is let go, and notes what happens around it."""

    def __init__(self, fail_at: tuple[int, ...] = ()):
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.fail_at = fail_at
        self.running = 0
        self.most = 0
        self.states: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []
        self.timed_out = False

    def __call__(self, state: dict[str, Any], step: int) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.threads.append(threading.current_thread())
        self.begun.set()
        self.timed_out |= not self.gate.wait(
            0.05 if threading.current_thread() is threading.main_thread() else 10
        )
        threading.Event().wait(0.02 if step == 1 else 0)  # a disk takes its time
        self.states[step] = {
            name: copy.deepcopy(part) for name, part in state.items() if name != "where"
        }
        self.running -= 1
        if step in self.fail_at:
            raise (
                OSError(28, f"No space left for step {step}")
                if step == 1
                else TypeError(f"step {step} cannot be stored")
            )


@contextmanager
def slow_disk(fail_at: tuple[int, ...] = ()) -> Iterator[SlowDisk]:
    """A SlowDisk that is let go at the end, whatever happens."""
    disk = SlowDisk(fail_at)
    try:
        with patch.object(threading, "excepthook", lambda arguments: None):
            yield disk
    finally:
        disk.gate.set()


class CopiedWhere:
    """Notes which thread makes a copy of it."""

    thread: Any = None

    def __deepcopy__(self, memo: Any) -> "CopiedWhere":
        CopiedWhere.thread = threading.current_thread()
        return self


def a_state() -> dict[str, Any]:
    """A small state, with tensors at two depths."""
    return {"model": {"w": torch.zeros(3)}, "optimizer": {"moments": [torch.zeros(2)]}, "step": 1}


def error_of(function: Answer, *arguments: Any) -> Exception | None:
    """What a call raises, if anything."""
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def check_one_save(answers: Answers) -> None:
    """The copy is made before the call returns, and written in a thread."""
    with case("Task 6, one save"), slow_disk() as disk:
        saver = answers["BackgroundSaver"](disk)
        state = a_state()
        saver.wait()
        caller = threading.current_thread()
        CopiedWhere.thread = None
        saver({**state, "where": CopiedWhere()}, 1)
        assert disk.states == {} and not disk.timed_out, (
            "the call returned only after the save was done: the training has waited for the disk"
        )
        state["model"]["w"] += 1  # training goes on while the save is still waiting
        state["optimizer"]["moments"][0] += 1
        state["step"] = 2
        assert disk.begun.wait(3), "the save was not started by the call"
        disk.gate.set()
        saver.wait()
        assert 1 in disk.states, (
            "wait() returned before the save was done: at the end of a program the last checkpoint"
            " would be lost"
        )
        assert CopiedWhere.thread in (None, caller), (
            "the copy is made in the thread, while training may already change the state: copy"
            " before"
            " the thread starts"
        )
        written = disk.states[1]
        assert written["model"]["w"].tolist() == [0, 0, 0], (
            f"the weights that were written are {written['model']['w'].tolist()}, those of a later"
            " step, expected zeros: copy the tensors, at all depths"
        )
        assert written["optimizer"]["moments"][0].tolist() == [0, 0], (
            "the moments that were written are those of a later step: a copy must reach into lists"
            " and"
            " dictionaries"
        )
        assert disk.threads[0] is not caller, "save ran in the thread of the caller"
        assert not disk.threads[0].daemon, (
            "the thread is a daemon: when the program ends, it is killed in the middle of a file"
        )
        saver.wait()


def begin_save(started: threading.Event, saver: Any) -> None:
    """Save step 2 from another thread."""
    started.set()
    saver({**a_state(), "where": CopiedWhere()}, 2)


def check_several_saves(answers: Answers) -> None:
    """Saves wait for each other, and so does the copy."""
    with case("Task 6, several saves"), slow_disk() as disk:
        saver = answers["BackgroundSaver"](disk)
        saver(a_state(), 1)
        assert disk.begun.wait(3), "the save was not started by the call"
        started = threading.Event()
        CopiedWhere.thread = None
        second = threading.Thread(target=begin_save, args=(started, saver))
        second.start()
        started.wait(10)
        second.join(0.04)
        assert disk.most == 1, "a second save began while the first one was running: wait for it"
        assert second.is_alive(), (
            "a second call returned while the first save was still running: it must wait, or the"
            " order"
            " is lost"
        )
        assert CopiedWhere.thread is None, (
            "the second state was copied while the first save was still running: two copies lay in"
            " memory. Wait first, then copy"
        )
        disk.gate.set()
        second.join(10)
        saver(a_state(), 3)
        saver.wait()
        assert list(disk.states) == [
            1,
            2,
            3,
        ], f"the steps 1, 2, 3 were saved in the order {list(disk.states)}"
        assert disk.most == 1, "two saves ran at the same time"


class Copied:
    """A part of a state that notes how many copies of it there were at most at one time."""

    copies: WeakSet["Copied"] = WeakSet()
    most = 0

    def __deepcopy__(self, memo: Any) -> "Copied":
        deadline = time.monotonic() + 0.5  # a thread that has ended may still hold its own
        while self.copies and time.monotonic() < deadline:
            time.sleep(0.005)
        copied = Copied()
        self.copies.add(copied)
        Copied.most = max(Copied.most, len(self.copies))
        return copied


def check_one_copy(answers: Answers) -> None:
    """The copy of a save that is done is gone when the next one is made."""
    with case("Task 6, one copy at a time"):
        Copied.most = 0
        saver = answers["BackgroundSaver"](lambda state, step: None)
        for step in (1, 2):
            saver({"part": Copied()}, step)
        saver.wait()
        assert Copied.most < 2, (
            "the copy of step 1 was still in memory when that of step 2 was made: keep no copy in"
            " an attribute after its save is done"
        )


def check_saver_errors(answers: Answers) -> None:
    """The error of a save comes out once, at the next call."""
    with case("Task 6, errors"), slow_disk(fail_at=(1, 4)) as disk:
        disk.gate.set()
        saver = answers["BackgroundSaver"](disk)
        first = error_of(saver, a_state(), 1)
        assert first is None, (
            f"the call for step 1 raised {first!r} itself: the save belongs into a thread"
        )
        error = error_of(saver, a_state(), 2)
        assert isinstance(error, OSError), (
            f"the save of step 1 failed, and the next call raised {error!r}, expected its OSError:"
            " nobody would know"
        )
        error = error_of(saver, a_state(), 3)
        assert error is None, (
            f"the error of step 1 came out a second time, or something else did: {error!r}"
        )
        error = error_of(saver.wait)
        assert error is None, f"wait() raised {error!r}, though the last save went well"
        assert sorted(disk.states) == [1, 3], (
            f"the steps {sorted(disk.states)} reached the disk, expected 1 and 3: the call that"
            " raises"
            " saves nothing"
        )
        saver(a_state(), 4)
        error = error_of(saver.wait)
        assert isinstance(error, TypeError), (
            "the last save failed with a TypeError, as for a state that cannot be stored, and"
            " wait()"
            f" raised {error!r}: either wait() raises nothing, or the thread catches the errors of"
            " the"
            " disk only"
        )
        assert error_of(saver.wait) is None, "wait() raises the same error twice"


def task6_saver(answers: Answers) -> None:
    """One save, several, and errors."""
    check_one_save(answers)
    check_several_saves(answers)
    check_one_copy(answers)
    check_saver_errors(answers)

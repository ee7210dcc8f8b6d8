"""The checks of exercise 15, distributed: each says what is wrong with an answer.

`run` starts a process for each rank. The processes share nothing but a wire, whose other end is a
switchboard in this process: it passes on what they send, and since it sees who waits for whom, it
can tell them at once when all of them wait.
"""

import copy
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

import torch
import torch._dynamo  # what PyTorch imports for its first optimizer: here once, not in each process
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_of_torch  # the function behind torch.optim.AdamW

from llm_course.pages.checking import case, expect_number, written

MOST_CALLS = 2000  # of a wire in one run; more is a loop that never ends
MOST_SECONDS = 20.0
MEETINGS = {
    "broadcast": 1,
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
}  # halves of rings


# --------------------------------------------------------------------------- processes and a wire


class Stuck(AssertionError):
    """A process waits for something that never comes."""


class Wire:
    """What connects one process to the others."""

    def __init__(self, rank: int, world_size: int, pipe: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self.pipe = pipe
        self.sent = 0.0
        self.log: list[tuple[str, int]] = []
        self.calls = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pipe": None}

    def tell(self, *message: Any) -> None:
        """Send a message to the switchboard."""
        self.pipe.send_bytes(pickle.dumps(message))

    def ask(self, *message: Any) -> Any:
        """Send a message, and wait for its answer."""
        self.tell(*message)
        answer = pickle.loads(self.pipe.recv_bytes())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def count(self) -> None:
        """Count a call, and end a loop that has no end."""
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise Stuck(
                f"rank {self.rank} has called its wire {MOST_CALLS} times: does a loop never end?"
            )

    def send(self, tensor: Tensor, to: int) -> None:
        self.count()
        if to not in range(self.world_size):
            raise ValueError(f"send to rank {to}, but the ranks are 0 to {self.world_size - 1}")
        self.sent += tensor.nbytes
        self.tell("send", tensor.detach().clone(), to)

    def receive(self, buffer: Tensor, source: int) -> None:
        self.count()
        if source not in range(self.world_size):
            raise ValueError(
                f"receive from rank {source}, but the ranks are 0 to {self.world_size - 1}"
            )
        arrived = self.ask("receive", source)
        shapes = tuple(arrived.shape), tuple(buffer.shape)
        assert shapes[0] == shapes[1], (
            f"receive: a tensor of shape {shapes[0]} came, and the buffer has {shapes[1]}: another"
            " part?"
        )
        with torch.no_grad():
            buffer.copy_(arrived)

    def meet(self, kind: str, tensor: Tensor) -> list[Tensor]:
        """The tensors that all bring, by rank."""
        self.count()
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{kind} takes a tensor, not {type(tensor).__name__}")
        tensors: list[Tensor] = self.ask("meet", kind, tensor.detach().clone())
        whole = sum(t.nbytes for t in tensors) if kind == "all_gather" else tensor.nbytes
        self.sent += MEETINGS[kind] * (self.world_size - 1) * whole / self.world_size
        self.log.append((kind, tensor.numel()))
        return tensors

    def broadcast(self, tensor: Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(self.meet("broadcast", tensor)[0])

    def all_reduce(self, tensor: Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(added(self.meet("all_reduce", tensor)))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        total = added(self.meet("reduce_scatter", tensor))
        return total.tensor_split(self.world_size)[self.rank].clone()

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self.meet("all_gather", part))


def added(tensors: list[Tensor]) -> Tensor:
    """The sum, in the order of the ranks, so that all get the same bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


class Switchboard:
    """Passes tensors on between processes, and sees when all of them wait."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes: dict[tuple[int, int], list[Tensor]] = {}
        self.waiting: dict[int, tuple[Any, ...]] = {}
        self.ended: set[int] = set()
        self.results: list[Any] = [None] * size
        self.errors: dict[int, tuple[bool, str]] = {}  # whether it is only stuck, and the words
        self.answers: list[tuple[int, Any]] = []

    def take(self, rank: int, kind: str, *rest: Any) -> None:
        """One message of a process."""
        if kind == "send":
            tensor, to = rest
            self.boxes.setdefault((rank, to), []).append(tensor)
        elif kind == "result":
            self.results[rank] = rest[0]
            self.ended.add(rank)
        elif kind == "error":
            self.errors[rank] = rest[0]
            self.ended.add(rank)
        else:
            self.waiting[rank] = kind, *rest

    def answer_all(self) -> None:
        """Answer whoever waits for what has come; and all of them, if all wait."""
        for rank, (kind, *rest) in list(self.waiting.items()):
            if kind == "receive" and self.boxes.get((rest[0], rank)):
                del self.waiting[rank]
                self.answers.append((rank, self.boxes[rest[0], rank].pop(0)))
        meeting = {rank: w[1:] for rank, w in self.waiting.items() if w[0] == "meet"}
        if len(meeting) == self.size:
            self.waiting.clear()
            self.answers += [(rank, self.outcome(meeting)) for rank in meeting]
        if (
            self.waiting
            and not self.answers
            and len(self.waiting | dict.fromkeys(self.ended)) == self.size
        ):
            stuck = Stuck(self.describe())
            self.answers += [(rank, stuck) for rank in self.waiting]
            self.waiting.clear()

    def outcome(self, meeting: dict[int, tuple[Any, ...]]) -> Any:
        """All tensors, or what is wrong with them."""
        kinds, tensors = zip(*(meeting[rank] for rank in range(self.size)), strict=True)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(set(kinds)) == 1 and (kinds[0] == "all_gather" or len(set(shapes)) == 1):
            return list(tensors)
        calls = list(zip(kinds, shapes, strict=True))
        return AssertionError(
            f"the processes must make the same calls, but they are in {calls}: does one skip a"
            " call?"
        )

    def describe(self) -> str:
        """Who waits for what."""
        states = ["has ended"] * self.size
        hint = "all processes must make the same calls, the same number of times"
        for rank, (kind, what, *_) in self.waiting.items():
            states[rank] = f"waits in {what}"
            if kind == "receive":
                states[rank] = f"waits for a tensor from rank {what}"
                hint = "does each process send before it receives, and to the right one?"
        return ", ".join(f"rank {rank} {state}" for rank, state in enumerate(states)) + f": {hint}"


def _work(function: Callable[[Wire], Any], wire: Wire) -> None:
    """What a process runs: the function, and then it reports."""
    torch.set_num_threads(1)
    try:
        wire.tell("result", function(wire))
    except BaseException as error:
        told = isinstance(error, AssertionError) and str(error)
        what = "" if told else f"your code raised {type(error).__name__}: "
        wire.tell("error", (isinstance(error, Stuck), f"{what}{error}"))


def run(size: int, function: Callable[[Wire], Any], *, left: list[str] | None = None) -> list[Any]:
    """`function(wire)` in `size` processes; the results by rank.

    An AssertionError tells the cause of a failure, not its effects. `left` receives what was sent
    and never received.
    """
    board = Switchboard(size)
    fork = multiprocessing.get_context("fork")  # a copy of this process, with the student's code
    pipes: list[Any] = []
    processes = []
    for rank in range(size):
        pipe, end = fork.Pipe()
        process = fork.Process(target=_work, args=(function, Wire(rank, size, end)), daemon=True)
        process.start()
        end.close()
        pipes.append(pipe)
        processes.append(process)
    try:
        _serve(board, pipes, time.monotonic() + MOST_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, (stuck, words) in sorted(
        board.errors.items(), key=lambda item: (item[1][0], item[0])
    ):
        raise AssertionError(words if stuck else f"rank {rank} of {size}: {words}")
    if left is not None:
        left += [f"rank {one} to rank {to}" for (one, to), box in board.boxes.items() if box]
    return board.results


def _serve(board: Switchboard, pipes: list[Any], until: float) -> None:
    """Pass messages on until all processes have ended."""
    while len(board.ended) < board.size:
        live = {pipes[rank]: rank for rank in range(board.size) if rank not in board.ended}
        ready: list[Any] = connection.wait(list(live), timeout=max(until - time.monotonic(), 0))
        if not ready:
            ranks = sorted(live.values())
            raise AssertionError(f"ranks {ranks} do not come to an end: does a loop never end?")
        for pipe in ready:
            try:
                board.take(live[pipe], *pickle.loads(pipe.recv_bytes()))
            except EOFError:
                board.take(live[pipe], "error", (False, "the process has ended without a word"))
        board.answer_all()
        for rank, answer in board.answers:
            pipes[rank].send_bytes(pickle.dumps(answer))
        board.answers.clear()


# ------------------------------------------------------------------------------ 1, numbers by hand


STEP_SLIPS: dict[str, dict[float, str]] = {
    "gradient": {
        3: ("that is the mean of means: the first rank's 2 targets count as much as the other's 6"),
        8: "that is divided by the number of processes; divide by that of targets",
        16: "that is the sum over all targets; divide it by their number",
    },
    "mean_of_means": {
        2: (
            "that is the mean over all targets; here each rank takes its own mean"
            " first: 10 / 2"
            " and 6 / 6"
        ),
        6: "that is the sum of the two means; average them",
    },
    "ddp": {
        16: "that is the sum over the processes; DDP averages",
        2: "DDP knows nothing of targets: it averages over processes",
        3: "backward was called on the sums, not on the means",
    },
    "factor": {
        0.125: "that is right for a sum; DDP has divided by the world size already",
        4: "that is the inverse",
        2: "and the targets? .grad holds a sum over targets, divided by 2",
        0.5: "DDP has divided by 2 already: multiply by it",
    },
}


def _expect_numbers(
    answers: Any, right: Any, slips: Any, is_near: Any, hint: str = "look at the second hint"
) -> None:
    """The numbers are right, or the slip behind a wrong one is named."""
    for name, expected in right.items():
        found = expect_number(answers[name], name)
        slip = next((text for value, text in slips[name].items() if is_near(found, value)), None)
        assert slip is None, f"{name} is {found:g}: {slip}"
        assert is_near(found, expected), f"{name} is {found:g}, which is not right: {hint}"


def task1_step(answers: Any) -> None:
    """Task 1, a step."""
    with case("Task 1, a step"):
        sums = (10.0, 6.0)
        targets = (2, 6)
        right = {
            "gradient": sum(sums) / sum(targets),
            "mean_of_means": sum(s / t for s, t in zip(sums, targets, strict=True)) / 2,
            "ddp": sum(sums) / 2,
            "factor": 2 / sum(targets),
        }
        written(answers, *right, "step_gradient")
        _expect_numbers(answers, right, STEP_SLIPS, lambda a, b: abs(a - b) < 0.006)
    check_steps(answers, [((10.0, 6.0), (2, 6)), ((10.0, -4.0, 6.0), (2, 1, 1))])
    check_steps(answers, [((3.0, 0.0, 9.0), (1, 0, 3))])


def check_steps(answers: Any, checks: Any) -> None:
    """`step_gradient` on these sums and counts."""
    [step_gradient] = written(answers, "step_gradient")
    with case("Task 1, a step"):
        for sums, targets in checks:
            try:
                found = step_gradient(list(sums), list(targets))
            except ZeroDivisionError:
                raise AssertionError(
                    f"step_gradient({list(sums)}, {list(targets)}) divides by zero: a rank"
                    f" may have no"
                    " targets, so divide by their sum only"
                ) from None
            found = expect_number(found, f"step_gradient({list(sums)}, {list(targets)})")
            expected = sum(sums) / sum(targets)
            assert abs(found - expected) < 1e-4, (
                f"step_gradient({list(sums)}, {list(targets)}) is {found:g}, expected"
                f" {expected:g}: add"
                " the sums, add the targets, divide once"
            )


BOTH_WAYS = "a wire sends and receives at the same time, and in each step of a ring it does both"
COST_SLIPS: dict[str, dict[float, str]] = {
    "ring_mb": {
        700: "that is one half of the ring, reduce-scatter; all-gather sends as much",
        11200: "that is the whole tensor in each of the 14 steps; a step sends one part of 8",
        1600: "there are 2 (n - 1) steps, not 2 n",
        5600: "that is what rank 0 sends without a ring",
        1.4: "that is in GB",
    },
    "ring_ms": {
        35: "that is one half of the ring",
        140: BOTH_WAYS,
        80: "there are 2 (n - 1) steps, not 2 n",
        0.07: "that is in seconds",
    },
    "one_mb": {
        6400: "rank 0 need not send to itself",
        11200: "rank 0 sends half of that, and receives the other half",
        1400: "that is the ring",
    },
    "one_ms": {
        280: "first it receives 7 tensors, and then it sends 7",
        320: "rank 0 need not send to itself",
        640: "rank 0 need not send to itself",
        0.56: "that is in seconds",
    },
}


def task1_costs(answers: Any) -> None:
    """Task 1, costs."""
    with case("Task 1, costs"):
        n = 8
        megabytes = 800
        speed = 20  # MB in a millisecond
        right = {
            "ring_mb": 2 * (n - 1) * megabytes / n,
            "ring_ms": 2 * (n - 1) * megabytes / n / speed,
            "one_mb": (n - 1) * megabytes,
            "one_ms": 2 * (n - 1) * megabytes / speed,
        }
        written(answers, *right)
        _expect_numbers(answers, right, COST_SLIPS, lambda a, b: abs(a / b - 1) < 0.004)


# ------------------------------------------------------------------------- 2, two halves of a ring


def expect_own_loop(wires: Any, what: Any) -> None:
    called = sorted({kind for wire in wires for kind, _ in wire.log})
    assert not called, (
        f"{what} calls wire.{called[0] if called else ''}: build it from wire.send and wire.receive"
        " alone"
    )


def expect_tidy(wires: Any, nbytes: Any, what: Any, left: Any) -> None:
    """Nothing is left on the wires, and no process has sent too much."""
    assert not left, f"{what}: tensors sent from {', '.join(left)} were never received"
    n = len(wires)
    for wire in wires:
        limit = (n - 1) * nbytes / n
        assert wire.sent <= limit, (
            f"{what}: rank {wire.rank} sends {wire.sent:g} bytes, and a ring {limit:.0f}: a step"
            " sends one part, not the tensor, and there are n - 1 steps"
        )


def _expect_indices(indices: Any, n: Any) -> Any:
    """The indices that the ranks return, each part's once."""
    indices = [
        expect_number(index, f"what rank {rank} returns") for rank, index in enumerate(indices)
    ]
    assert sorted(indices) == list(range(n)), (
        f"the ranks return the indices {indices}: each of the {n} parts must be that of one process"
    )
    return indices


def _expect_sum(number: Any, held: Any, n: Any) -> None:
    """`number` is a sum of what ranks bring, and no mean of it."""
    assert math.isfinite(number) and number >= 0, (
        f"{held}: no sum of what the ranks bring gives that. Is a buffer added before"
        " `receive` has filled it?"
    )
    assert abs(number * n - sum(10**r for r in range(n))) > 0.5 or n == 1, (
        f"{held}: that is the mean; the sum is asked"
    )
    assert number % 1 == 0, (
        f"{held}: no sum of what the ranks bring is a fraction, so something divides it"
    )


def _expect_each_rank_once(number: Any, held: Any, n: Any) -> None:
    """Digit r of `number` says how often rank r is counted."""
    digits = f"{round(number):0{n}d}"[::-1]
    lost = [r for r in range(n) if digits[r] == "0"]
    twice = [r for r in range(n) if digits[r] not in "01"]
    assert not twice, (
        f"{held}, so rank {twice[0]} is counted {digits[twice[0]]} times: which part"
        " has this process added to in the step before? And does it receive into a"
        " buffer of its own, not into the part?"
    )
    assert not lost, (
        f"{held}, so rank {lost[0]} is missing: are there n - 1 steps, does each *add*,"
        " and into the part itself (`+=` writes into it; `a = a + b` makes a new"
        " tensor), and is this the part of the last step?"
    )


def _expect_no_other_sum(rank: int, index: int, tensor: Tensor, n: int) -> None:
    """The part that is complete is the one whose index is returned."""
    total = sum(10**r for r in range(n))
    whole = [i for i, part in enumerate(tensor.tensor_split(n)) if (part == total).all()]
    assert index in whole or len(whole) != 1 or len(tensor) < n, (
        f"rank {rank} returns {index}, and its part {whole[0]} is the one that holds the sum,"
        f" {total}: return that part's index"
    )


def check_reduce_scatter(answers: Any, n: Any, size: Any) -> Any:
    """The first half alone."""
    [reduce_scatter] = written(answers, "reduce_scatter")
    left: list[str] = []

    def play(wire: Any) -> Any:
        tensor = torch.full((size,), 10.0**wire.rank)
        return reduce_scatter(tensor, wire), tensor, wire

    with case(f"Task 2, reduce_scatter of {size} numbers on {n} processes"):
        indices, tensors, wires = zip(*run(n, play, left=left), strict=True)
        expect_own_loop(wires, "reduce_scatter")
        indices = _expect_indices(indices, n)
        for rank, (index, tensor) in enumerate(zip(indices, tensors, strict=True)):
            _expect_no_other_sum(rank, int(index), tensor, n)
            for number in tensor.tensor_split(n)[int(index)].tolist():
                held = (
                    f"rank {rank} returns part {index:g}, which holds {number:g}, expected"
                    f" {sum(10**r for r in range(n))}. Rank r brings 10 to the power r"
                )
                _expect_sum(number, held, n)
                _expect_each_rank_once(number, held, n)
        round_ring = all((b - a) % n == 1 % n for a, b in zip(indices, indices[1:], strict=False))
        assert round_ring, (
            f"the ranks return the indices {indices}: from each to its right neighbour they must"
            " grow by 1, round the ring"
        )
        if size % n == 0:
            expect_tidy(wires, 4 * size, "reduce_scatter", left)


def check_all_gather(answers: Any, n: Any, size: Any, shift: Any) -> Any:
    """The second half alone."""
    [all_gather] = written(answers, "all_gather")
    left: list[str] = []

    def play(wire: Any) -> Any:
        tensor = torch.full((size,), 0.5)
        tensor.tensor_split(n)[(wire.rank + shift) % n][:] = 1 + (wire.rank + shift) % n
        all_gather(tensor, wire, (wire.rank + shift) % n)
        return tensor, wire

    with case(
        f"Task 2, all_gather of {size} numbers on {n} processes, where rank r begins with part r +"
        f" {shift}"
    ):
        tensors, wires = zip(*run(n, play, left=left), strict=True)
        expect_own_loop(wires, "all_gather")
        for rank, tensor in enumerate(tensors):
            for index, part in enumerate(tensor.tensor_split(n)):
                for number in part.tolist():
                    held = f"part {index} of rank {rank} is {number:g} and should be {index + 1}"
                    assert number != 0.5, (
                        f"{held}, as before: it was never filled. Are there n - 1 steps, and do"
                        " they start from `index`?"
                    )
                    assert number % 1 == 0, (
                        f"{held}, and was 0.5 before: copy what you receive, do not add it"
                    )
                    assert number == index + 1, (
                        f"{held}: copy what you receive into the part that it is"
                    )
        if size % n == 0:
            expect_tidy(wires, 4 * size, "all_gather", left)


def task2_halves(answers: Any) -> None:
    """Both halves, each by itself."""
    for n, size in ((3, 6), (2, 4), (4, 5)):
        check_reduce_scatter(answers, n, size)
    for n, size, shift in ((2, 4, 1), (3, 6, 1), (3, 6, 0), (4, 5, 2)):
        check_all_gather(answers, n, size, shift)


def check_all_reduce(answers: Any, n: Any, *shape: Any) -> Any:
    """Both halves, one after the other."""
    reduce_scatter, all_gather = written(answers, "reduce_scatter", "all_gather")
    g = torch.Generator().manual_seed(n)
    brought = [torch.randn(*shape, generator=g) for _ in range(n)]

    def play(wire: Any) -> Any:
        tensor = brought[wire.rank].clone()
        all_gather(tensor, wire, reduce_scatter(tensor, wire))
        return tensor, wire

    with case(f"Task 2, both halves, shape {shape}, {n} processes"):
        found, wires = zip(*run(n, play), strict=True)
        expect_own_loop(wires, "one of the halves")
        for rank, tensor in enumerate(found):
            off = (tensor - sum(brought)).abs().max().item()
            assert off < 1e-5, (
                f"rank {rank} ends {off:.3g} from the sum over all processes: do both halves agree"
                " on the direction, and on who has which part?"
            )
            assert torch.equal(tensor, found[0]), (
                f"rank {rank} and rank 0 have sums that differ in the last bits: compute each part"
                " once, and copy it"
            )


def task2_whole(answers: Any) -> None:
    """Both halves together."""
    for n, size in ((1, 4), (2, 5), (3, 7), (5, 3)):
        check_all_reduce(answers, n, size)


# ------------------------------------------------------------------------- 3, a script that learns


def _plane(count: Any, seed: Any, masked: Any = False) -> Any:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=g)
    noise = 0.1 * torch.randn(count, generator=g)
    use = torch.rand(count, generator=g) > 0.35 if masked else torch.ones(count, dtype=torch.bool)
    return {"x": x, "y": x @ torch.tensor([2.0, -1.0]) + 0.5 + noise, "use": use}


@torch.no_grad()
def _plain(parameters: Any) -> None:
    for parameter in parameters:
        parameter -= 0.1 * parameter.grad


@torch.no_grad()
def _signs(parameters: Any) -> None:
    """Like AdamW's first step: what counts is the direction of each number."""
    for parameter in parameters:
        parameter -= 0.05 * parameter.grad.sign()


def _alone(
    data: Any, valid: Any, epochs: Any, rows: Any, update: Any, max_norm: Any, seed: Any
) -> Any:
    """One process with everything."""
    model = nn.Linear(2, 1)
    g = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g))
    parameters = list(model.parameters())
    for epoch in range(epochs):
        order = torch.randperm(
            len(data["x"]), generator=torch.Generator().manual_seed(seed + epoch)
        )
        for step in order.split(rows):
            step = step[data["use"][step]]
            model.zero_grad()
            F.mse_loss(model(data["x"][step])[:, 0], data["y"][step]).backward()
            nn.utils.clip_grad_norm_(parameters, max_norm)
            update(parameters)
    with torch.no_grad():
        return (
            torch.cat([p.flatten() for p in parameters]).tolist(),
            F.mse_loss(model(valid["x"])[:, 0], valid["y"]).item(),
        )


def _trained(answers: Any, n: Any, data: Any, valid: Any, **settings: Any) -> Any:
    """The student's results with names and types checked, those of one process, and how many rows
    went through the models of `start_line`.
    """
    settings = {"epochs": 1, "rows": 6, "update": _plain, "max_norm": 1e9, "seed": 0} | settings
    [train] = written(answers, "train")

    def play(wire: Any) -> Any:
        with _rows_counted(answers) as computed:
            return train(wire, data, valid, **settings), sum(computed)

    results, computed = zip(*run(n, play), strict=True)
    for rank, result in enumerate(results):
        assert isinstance(result, dict) and {"weights", "read", "loss"} <= result.keys(), (
            f"rank {rank} must return a dictionary with weights, read and loss"
        )
        assert isinstance(result["weights"], list) and len(result["weights"]) == 3, (
            f"rank {rank}: weights must be a list of 3 numbers"
        )
    return results, *_alone(data, valid, **settings), sum(computed)


@contextmanager
def _rows_counted(answers: Any) -> Iterator[Any]:
    """A list of how many rows go through the models of `start_line`."""
    rows = []
    given = answers["start_line"]

    def counted(seed: Any) -> Any:
        model = given(seed)
        model.register_forward_pre_hook(
            lambda _, arguments: rows.append(sum(x.numel() for x in arguments) // 2)
        )
        return model

    answers["start_line"] = counted
    try:
        yield rows
    finally:
        answers["start_line"] = given


def check_start(answers: Any, n: Any) -> None:
    """The weights before the first step, and a validation of equal shares."""
    with case(f"Task 3, {n} processes, no epoch"):
        found, weights, loss, _ = _trained(answers, n, _plane(21, 0), _plane(6, 9), epochs=0)
        for rank, result in enumerate(found):
            assert result["weights"] == weights, (
                f"before the first step rank {rank} has the weights"
                f" {[round(w, 2) for w in result['weights']]}, expected those of"
                f" start_line(seed):"
                f" {[round(w, 2) for w in weights]}"
            )
        for rank, result in enumerate(found):
            assert abs(expect_number(result["loss"], "loss") - loss) < 1e-4, (
                f"a validation of 6 rows gives {result['loss']:.4f} in rank {rank}, expected"
                f" {loss:.4f}: the mean over all rows of all processes"
            )


def check_read(answers: Any, n: Any, rows: Any) -> None:
    """Each row is read once in an epoch, by one process."""
    with case(f"Task 3, {n} processes, 21 rows in steps of {rows}"):
        data = _plane(21, 0, True)
        found, _, _, _ = _trained(answers, n, data, _plane(6, 9), rows=rows, epochs=2)
        read = sum((list(result["read"]) for result in found), [])
        counts = [read.count(row) for row in range(21)]
        told = [f"row {row} is read {count} times in 2 epochs" for row, count in enumerate(counts)]
        much = next((words for words, count in zip(told, counts, strict=True) if count > 2), None)
        less = next((words for words, count in zip(told, counts, strict=True) if count < 2), None)
        assert not much, (
            f"{much}, in all processes together: cut the rows of a step, so that"
            f" each is read by"
            " one process"
        )
        unread = [row for row, count in enumerate(counts) if not count]
        assert not unread or data["use"][unread].any() or data["use"].sum() + len(unread) != 21, (
            f"{less}, in all processes together, like all rows without a target:"
            f" they are read too,"
            " and `read` lists them"
        )
        assert not less, (
            f"{less}, in all processes together: the last step reads what is left, also if its"
            " shares are unequal"
        )


def check_fair(answers: Any, n: int, rows: int) -> None:
    """No process reads more of a step's rows than its share, rounded up."""
    with case(f"Task 3, {n} processes, one epoch of 21 rows in steps of {rows}"):
        found, _, _, _ = _trained(answers, n, _plane(21, 0), _plane(6, 9), rows=rows)
        order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
        for number, step in enumerate(order.split(rows)):
            share = math.ceil(len(step) / n)
            counts = [len(set(step.tolist()) & set(result["read"])) for result in found]
            assert max(counts) <= share, (
                f"of the {len(step)} rows of step {number} the processes read {counts}: share them"
                f" out, at most {share} for each"
            )


def check_validation(answers: Any, n: Any, rows: Any) -> None:
    """A validation of unequal shares, in which each row is computed once."""
    with case(f"Task 3, {n} processes validate {rows} rows"):
        found, _, loss, computed = _trained(answers, n, _plane(21, 0), _plane(rows, 3), epochs=0)
        for rank, result in enumerate(found):
            assert abs(expect_number(result["loss"], "loss") - loss) < 1e-4, (
                f"the loss is {result['loss']:.4f} in rank {rank}, expected {loss:.4f}:"
                f" the shares"
                " are unequal, so add up squares and rows of all processes, then divide"
            )
        assert computed <= rows, (
            f"the loss is right, but {computed} rows go through the models of the {n}"
            f" processes, and `valid` has {rows}: each row is computed by one process"
        )


def task3_shares(answers: Any) -> None:
    """Start, rows and validation."""
    for n in (1, 2, 3):
        check_start(answers, n)
    for n, rows in ((2, 4), (3, 6)):
        check_read(answers, n, rows)
    check_fair(answers, 3, 6)
    for n, rows in ((2, 5), (3, 7)):
        check_validation(answers, n, rows)


def check_small_validation(answers: Any) -> None:
    """A process without a row to validate."""
    with case("Task 3, 4 processes and 3 rows to validate"):
        found, _, loss, _ = _trained(answers, 4, _plane(21, 0), _plane(3, 4), epochs=0, seed=5)
        assert all(abs(result["loss"] - loss) < 1e-4 for result in found), (
            f"the losses are {[result['loss'] for result in found]}, expected {loss:.4f}: a process"
            " without a row adds 0 to both sums"
        )


WHY: dict[str, str] = {
    "two epochs": (
        "one epoch is right: is the order drawn anew in each, by seed + epoch, and the same in all"
        " processes?"
    ),
    "equal numbers of targets": (
        "by what is the sum of the gradients divided? And is the start the same, and each row read"
        " once?"
    ),
    "unequal numbers of targets": (
        "add up the gradients of sums over all processes, and divide once by the targets of all of"
        " them"
    ),
    "a low limit": (
        "clip the gradient of the step, which is known only after the all-reduce and the division"
    ),
    "updates by sign": (
        "all-reduce the gradients of each step, not the weights: this update, like AdamW's, is no"
        " sum over processes"
    ),
    "processes without a row": (
        "do the rows of all processes make up the step? One without rows adds nothing, but takes"
        " part in all exchanges and updates"
    ),
}


def check_weights(answers: Any, n: Any, what: Any, data: Any, **settings: Any) -> None:
    """The weights after training are those of one process."""
    with case(f"Task 3, {n} processes, {what}"):
        found, weights, _, _ = _trained(answers, n, data, _plane(6, 9), **settings)
        for rank, result in enumerate(found):
            numbers = [expect_number(one, "a weight") for one in result["weights"]]
            apart = max(abs(a - b) for a, b in zip(numbers, weights, strict=True))
            first = [expect_number(one, "a weight") for one in found[0]["weights"]]
            is_first_right = max(abs(a - b) for a, b in zip(first, weights, strict=True)) < 1e-4
            assert apart < 1e-4 or not is_first_right, (
                f"after the run the weights of rank {rank} are {[round(a, 3) for a in numbers]}, of"
                f" one process {[round(b, 3) for b in weights]}, and rank 0 has these: do all"
                " processes make all updates, also where they have no target of their own?"
            )
            assert apart < 1e-4, (
                f"after the run the weights of rank {rank} are {[round(a, 3) for a in numbers]}, of"
                f" one process {[round(b, 3) for b in weights]}: {WHY[what]}"
            )
            assert numbers == found[0]["weights"], (
                f"the weights of ranks 0 and {rank} differ in the last bits: all must make the same"
                " update"
            )


def plane(count: Any, seed: Any, masked: Any = False) -> Any:
    """Rows of a plane with noise; `masked` takes the target from a third of them."""
    return _plane(count, seed, masked)


def task3_weights(answers: Any) -> None:
    """Training, in several settings."""
    check_weights(answers, 2, "equal numbers of targets", _plane(20, 0), rows=4)
    check_weights(answers, 2, "two epochs", _plane(20, 0), rows=4, epochs=2)
    check_weights(answers, 2, "unequal numbers of targets", _plane(21, 1, True))
    check_weights(answers, 3, "updates by sign", _plane(21, 1, True), update=_signs)
    check_weights(answers, 2, "a low limit", _plane(20, 0), rows=4, max_norm=0.3)
    check_weights(answers, 4, "processes without a row", _plane(13, 0), rows=6)


# -------------------------------------------------------------------------------------- 4, buckets


def net(seed: Any) -> Any:
    """Layers of 32, 72 and 18 numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def rows_of(counts: Any, seed: Any) -> Any:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 3, generator=g) for count in counts]


def _packed(model: Any, numbers: Any) -> Any:
    """How many numbers each bucket holds."""
    sizes: list[int] = []
    for parameter in [p for p in model.parameters() if p.requires_grad][::-1]:
        if sizes and sizes[-1] + parameter.numel() <= numbers:
            sizes[-1] += parameter.numel()
        else:
            sizes.append(parameter.numel())
    return sizes


@contextmanager
def _backward_of(model: nn.Module, what: str) -> Iterator[None]:
    """Where a bucket is packed too early, a `.grad` is still None: say so."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        absent = [
            name for name, p in model.named_parameters() if p.requires_grad and p.grad is None
        ]
        if "NoneType" not in str(error) or not absent:
            raise
        raise AssertionError(
            f"{what} a hook raised {type(error).__name__}: {error}, while {', '.join(absent)} had"
            " no gradient yet. Does a bucket travel before *all* its gradients have come? Does"
            " each hook know *its* bucket? Does finish begin anew, also when it raises?"
        ) from error


def _windows(DataParallel: Any, models: Any, numbers: Any, shares: Any) -> Any:
    """By rank: weights at the start, and for each window gradients and what travelled.
    `shares[rank][window]` has rows.
    """

    def play(wire: Any) -> Any:
        model = models[wire.rank]
        parallel = DataParallel(model, wire, numbers)
        start = [p.detach().clone() for p in model.parameters()]
        rows = []
        first = next(p for p in model.parameters() if p.requires_grad)
        first.register_hook(lambda gradient: wire.log.append(("first layer", 0)))
        for window in shares[wire.rank]:
            del wire.log[:]
            for x in window[:-1]:
                with parallel.no_sync(), _backward_of(model, "in a backward within no_sync"):
                    model(x).square().sum().backward()
            quiet = [event for event in wire.log if event[0] != "first layer"]
            del wire.log[:]
            with _backward_of(model, "in a backward"):
                model(window[-1]).square().sum().backward()
            during = list(wire.log)
            parallel.finish()
            after = wire.log[len(during) :]
            rows.append(
                (
                    [None if p.grad is None else p.grad.clone() for p in model.parameters()],
                    quiet,
                    during,
                    after,
                )
            )
            model.zero_grad(set_to_none=False)
        return start, rows

    return run(len(models), play)


def _expect_start_of_first(played: Any, alone: Any) -> None:
    """All ranks begin with the weights of rank 0."""
    for rank, (start, _) in enumerate(played):
        same = all(
            torch.equal(one, other) for one, other in zip(start, alone.parameters(), strict=True)
        )
        assert same, (
            f"rank {rank} does not begin with the weights of rank 0: copy all parameters, in place"
        )


def _expect_quiet(at: Any, quiet: Any, after: Any) -> None:
    """Nothing travels within no_sync or in finish."""
    assert not quiet, f"{at}{quiet[0][0]} was called within no_sync, where nothing travels"
    assert not after, (
        f"{at}{len(after)} exchanges in finish: a bucket travels during backward, when"
        " its last gradient has come"
    )


def _expect_buckets(at: Any, during: Any, sizes: Any, numbers: Any) -> None:
    """In backward each bucket travels once, when it is full."""
    travelled = [number for kind, number in during if kind == "all_reduce"]
    assert travelled, (
        f"{at}no bucket travelled in backward: is no_sync over, and does finish set everything"
        " back?"
    )
    assert len(travelled) <= len(sizes) or sum(travelled) == sum(sizes), (
        f"{at}{len(travelled)} all-reduces, expected {len(sizes)}: does each bucket"
        " travel once, and is all set back after a window?"
    )
    assert travelled == sizes, (
        f"{at}the buckets that travelled held {travelled} numbers, expected {sizes}:"
        f" reverse order of the parameters, at most {numbers} numbers in a bucket"
    )
    is_early = during[0][0] == "all_reduce" or len(sizes) == 1
    assert is_early, (
        f"{at}the gradient of the first layer came before the first all-reduce: a"
        " bucket travels when it is full"
    )


def _expect_gradients(at: Any, gradients: Any, alone: Any, n: Any) -> None:
    """Each `.grad` holds the sum over the `n` processes."""
    for (name, parameter), found in zip(alone.named_parameters(), gradients, strict=True):
        right = parameter.grad
        assert (found is None) == (right is None), f"{at}{name}.grad is {found}"
        if right is None:
            continue
        assert not torch.allclose(found * n, right, atol=1e-4), (
            f"{at}{name}.grad is the average over the processes; the sum is asked"
        )
        off = (found - right).abs().max().item()
        assert off < 1e-4 * (1 + right.abs().max().item()), (
            f"{at}{name}.grad is off by {off:.3g} from that of one process with all"
            " rows: is what no_sync gathered in it, and is the sum in .grad?"
        )


def check_travel(answers: Any, what: Any, models: Any, numbers: Any, shares: Any) -> None:
    with case(f"Task 4, {what}"):
        alone = copy.deepcopy(models[0])
        [DataParallel] = written(answers, "DataParallel")
        played = _windows(DataParallel, models, numbers, shares)
        _expect_start_of_first(played, alone)
        sizes = _packed(alone, numbers)
        for window in range(len(shares[0])):
            alone.zero_grad()
            alone(
                torch.cat([x for share in shares for x in share[window]])
            ).square().sum().backward()
            for rank, (_, rows) in enumerate(played):
                gradients, quiet, during, after = rows[window]
                at = f"window {window + 1}, rank {rank}: "
                _expect_quiet(at, quiet, after)
                _expect_buckets(at, during, sizes, numbers)
                _expect_gradients(at, gradients, alone, len(models))


def task4_travel(answers: Any) -> None:
    """What travels, when, and what it sums to."""
    check_travel(
        answers,
        "two processes, one backward",
        [net(0), net(1)],
        80,
        [[rows_of([2], 0)], [rows_of([5], 1)]],
    )
    check_travel(
        answers,
        "windows of three, and then of one",
        [net(2), net(3)],
        80,
        [[rows_of([2, 1, 3], 2), rows_of([1], 3)], [rows_of([1, 4, 1], 4), rows_of([2], 5)]],
    )


class _Forgetful(nn.Module):
    """Does not use its layer `idle`, if it is told so; uses its layer `twice` two times."""

    def __init__(self, seed: Any) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.twice = nn.Linear(4, 4)
        self.idle = nn.Linear(4, 1)

    def forward(self, x: Any, skip: Any = False) -> Any:
        x = self.twice(self.twice(self.first(x)).tanh())
        return x.sum() if skip else self.idle(x).sum()


def _passes(DataParallel: Any, models: Any) -> Any:
    """By rank: what `finish` raised and what travelled, with `idle`, without it, and with it."""

    def play(wire: Any) -> Any:
        model = models[wire.rank]
        messages: list[tuple[str | None, list[int]]] = []
        parallel = DataParallel(model, wire, 20)
        for skip in (False, True, False):
            del wire.log[:]
            what = "in a backward without `idle`" if skip else "in a backward with all layers"
            with _backward_of(model, what + ", after one without `idle`," * len(messages[1:])):
                model(torch.ones(2, 3), skip).backward()
            travelled = [number for _, number in wire.log]
            message = None
            try:
                parallel.finish()
            except RuntimeError as error:
                message = str(error)
            messages.append((message, travelled))
            model.zero_grad(set_to_none=skip)  # after the first backward zeros stay in .grad
        return messages

    return run(len(models), play)


def _expect_idle_named(rank: Any, message: Any) -> None:
    """`finish` names the parameters of `idle`, and no others."""
    assert message is not None, (
        f"rank {rank}: the second backward does not use the layer `idle`, and"
        f" finish raised no"
        " RuntimeError. Note which hooks were called since the last finish: .grad may hold"
        " zeros from before"
    )
    named = [name for name in ("idle.weight", "idle.bias") if name not in message]
    assert not named, (
        f"rank {rank}: the message of finish must name {' and '.join(named)}; it says: {message}"
    )
    others = [
        name
        for name in ("first.weight", "first.bias", "twice.weight", "twice.bias")
        if name in message
    ]
    assert not others, (
        f"rank {rank}: the message of finish names {' and '.join(others)},"
        f" whose gradients have"
        f" come: {message}"
    )


def _expect_full_buckets(rank: Any, travels: Any, sizes: Any) -> None:
    """Without `idle` its bucket, the first, stays, and those behind it may wait for it."""
    for number, travelled in enumerate(travels):
        expected = sizes[number % 2 :]
        waits = number == 1 and not travelled
        assert travelled == expected or waits, (
            f"rank {rank}: in the {('first', 'second', 'third')[number]} backward,"
            f" {'without' if number == 1 else 'with'} `idle`, buckets of"
            f" {travelled} numbers"
            f" travelled, expected {expected}: those all of whose gradients have"
            f" come in this"
            " backward"
        )


def check_unused(answers: Any) -> Any:
    """A parameter that gets no gradient in one of three passes."""
    [DataParallel] = written(answers, "DataParallel")
    with case("Task 4, a parameter that is not used"):
        models = [_Forgetful(0), _Forgetful(1)]
        for rank, played in enumerate(_passes(DataParallel, models)):
            (earlier, message, later), travels = zip(*played, strict=True)
            assert earlier is None, (
                f"rank {rank}: the first backward uses all layers, and finish raises: {earlier}"
            )
            _expect_idle_named(rank, message)
            _expect_full_buckets(rank, travels, _packed(models[rank], 20))
            assert later is None, (
                f"rank {rank}: the next backward uses all layers, and finish raises again: {later}"
            )


def check_twice(answers: Any) -> Any:
    """A layer that is used twice."""
    [DataParallel] = written(answers, "DataParallel")
    with case("Task 4, a layer that is used twice"):

        def play(wire: Any) -> Any:
            model = models[wire.rank]
            parallel = DataParallel(model, wire, 20)
            del wire.log[:]
            model(torch.ones(2, 3) + wire.rank).backward()
            parallel.finish()
            return [number for _, number in wire.log], model.twice.weight.grad.clone()

        models = [_Forgetful(2), _Forgetful(2)]
        alone = _Forgetful(2)
        (alone(torch.ones(2, 3)) + alone(torch.ones(2, 3) + 1)).backward()
        for travelled, gradient in run(2, play):
            assert travelled == _packed(alone, 20), (
                f"the buckets that travelled held {travelled} numbers, expected"
                f" {_packed(alone, 20)}: a"
                " parameter counts once, however often it is used"
            )
            right = alone.twice.weight.grad
            assert right is not None and torch.allclose(gradient, right, atol=1e-4), (
                "the gradient of a layer that is used twice is not that of one process"
            )


def task4_cases(answers: Any) -> None:
    """Parameters that are unused, used twice, or frozen."""
    check_unused(answers)
    check_twice(answers)
    frozen = [net(0), net(1)]
    for model in frozen:
        model[4].weight.requires_grad_(False)
    check_travel(answers, "frozen parameters", frozen, 80, [[rows_of([2], 0)], [rows_of([3], 1)]])


def check_error_within_no_sync(answers: Any) -> Any:
    """After an error within `no_sync`, buckets travel again."""
    [DataParallel] = written(answers, "DataParallel")
    with case("Task 4, an error within no_sync"):

        def play(wire: Any) -> Any:
            model = models[wire.rank]
            parallel = DataParallel(model, wire, 80)
            try:
                with parallel.no_sync():
                    raise OSError("planted")
            except OSError:
                pass
            del wire.log[:]
            model(torch.ones(2, 3)).sum().backward()
            return len(wire.log)

        models = [net(0), net(1)]
        assert run(2, play) == [
            3,
            3,
        ], "after an error within no_sync nothing travels any more: reset the flag in `finally`"


# -------------------------------------------------------- 5, an AdamW whose moments are shared out


def _kept(value: Any, seen: Any) -> Any:
    """The storages of all tensors inside of an object's attributes, with their bytes."""
    if isinstance(value, Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, dict):
        for part in list(value.values()):
            _kept(part, seen)
    elif isinstance(value, list | tuple | set):
        for part in value:
            _kept(part, seen)
    elif isinstance(value, torch.optim.Optimizer):
        _kept(dict(value.state), seen)
    return seen


LOADED = 0.25  # what is added to all parameters after each step, like a load of other weights


def _adamw_by_torch(
    start: Any, gradients: Any, *, lr: Any, betas: Any, eps: Any, weight_decay: Any, **slip: Any
) -> Any:
    """All parameters after each step, by PyTorch."""
    w = start.clone()
    m = torch.zeros_like(start)
    v = torch.zeros_like(start)
    t = torch.zeros(())
    rows = []
    for g in gradients:
        if "coupled" in slip:
            g = g + weight_decay * w
        if "uncounted" in slip:
            t.zero_()
        adamw_of_torch(
            [w],
            [g.clone()],
            [m],
            [v],
            [],
            [t],
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=0.0 if "coupled" in slip or "late" in slip else weight_decay,
            amsgrad=False,
            maximize=False,
            foreach=False,
        )
        if "late" in slip:
            w -= lr * weight_decay * w
        rows.append(w.clone())
        if "kept" not in slip:
            w += LOADED
    return rows


def _sharded_steps(
    ShardedAdamW: Any, start: Any, gradients: Any, shapes: Any, settings: Any
) -> Any:
    """By rank: all parameters after each step, the bytes sent in it, held_bytes(), and the bytes of
    all tensors that the optimizer keeps.
    """
    numbers = [math.prod(shape) for shape in shapes]

    def play(wire: Any) -> Any:
        parameters = [
            nn.Parameter(piece.clone().reshape(shape))
            for piece, shape in zip(start.split(numbers), shapes, strict=True)
        ]
        optimizer = ShardedAdamW(iter(parameters), wire, **settings)
        rows = []
        sent = []
        for row in gradients[:, wire.rank]:
            before = wire.sent
            for parameter, piece, shape in zip(parameters, row.split(numbers), shapes, strict=True):
                parameter.grad = piece.clone().reshape(shape)
            optimizer.step()
            rows.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(LOADED)
            sent.append(wire.sent - before)
        seen = _kept(vars(optimizer), {})
        theirs = _kept([parameters, [parameter.grad for parameter in parameters]], {})
        return (
            rows,
            sent,
            optimizer.held_bytes(),
            sum(seen[key] for key in seen.keys() - theirs.keys()),
        )

    return run(gradients.shape[1], play)


def _slips_of_update(start: Any, sums: Any, settings: Any) -> Any:
    """Parameters after each step of updates that are not AdamW's, and what they are."""
    rate = settings["lr"]
    decay = settings["weight_decay"]
    return [
        ([start] * len(sums), "those of the start: change the model's own parameters, in place"),
        (
            _adamw_by_torch(start, sums, **settings, coupled=True),
            (
                "those of Adam, which adds the decay to the gradient. AdamW shrinks the weights"
                " beside it"
            ),
        ),
        (
            _adamw_by_torch(start, sums, **settings, uncounted=True),
            (
                "those of an AdamW that takes every step for the first: count the steps for the"
                " bias correction"
            ),
        ),
        (
            _adamw_by_torch(start, sums, **settings | {"weight_decay": decay / rate}),
            "those of a decay by weight_decay * w; it is lr * weight_decay * w",
        ),
        (
            _adamw_by_torch(start, sums, **settings | {"weight_decay": 0.0}),
            "those without weight decay",
        ),
        (
            _adamw_by_torch(start, sums, **settings, late=True),
            "those of a decay after the update; it comes before it",
        ),
        (
            _adamw_by_torch(start, sums, **settings, kept=True),
            (
                "those of a copy that was kept from the step before. Weights may be loaded between"
                " two steps: read the parameters in each"
            ),
        ),
    ]


def _slips_of_sum(start: Any, gradients: Any, settings: Any) -> Any:
    """The same for gradients that are not the sum over the processes."""
    n = gradients.shape[1]
    if n == 1:
        return []
    own = torch.cat([gradients[:, rank].tensor_split(n, dim=1)[rank] for rank in range(n)], dim=1)
    return [
        (
            _adamw_by_torch(start, gradients.sum(dim=1) / n, **settings),
            ("those of the *mean* of the gradients over the processes; they are to be added up"),
        ),
        (
            _adamw_by_torch(start, own, **settings),
            (
                "those of one process's gradients for each part: add up those of all"
                " processes, by wire.reduce_scatter"
            ),
        ),
    ]


def _expect_no_slip(found: Any, expected: Any, slips: Any, step: Any, rank: Any) -> None:
    """The parameters after a step are not those of a known slip."""
    for wrong, what in slips:
        is_slip = not torch.allclose(wrong[step - 1], expected, atol=1e-4) and torch.allclose(
            found, wrong[step - 1], atol=1e-5
        )
        assert not is_slip, f"after step {step} the parameters of rank {rank} are {what}"


def _expect_adamw(found: Any, expected: Any, n: Any, step: Any, rank: Any) -> None:
    """The parameters after a step are those of torch.optim.AdamW, in each of `n` parts."""
    off = (found - expected).abs()
    assert not off.isnan().any(), (
        f"after step {step} the parameters of rank {rank} hold nan: for t = 0 the bias"
        " correction divides by 0. Is the step counted before it?"
    )
    parts = [
        index
        for index, part in enumerate(off.tensor_split(n))
        if part.numel() and part.max() > 1e-5
    ]
    assert not parts, (
        f"after step {step} the parameters of rank {rank} differ from"
        f" torch.optim.AdamW's by {off.max():.3g}, in the parts {parts} of {n}: is each"
        " part updated with the sum of all processes' gradients, m and v corrected for"
        f" t = {step}, and eps outside of the root?"
    )


def _expect_bytes_sent(sent: Any, start: Any, n: Any, rank: Any) -> None:
    """No step sends more than an all-reduce."""
    # a ring, or each part of the gradient straight to its process, and the new part from
    # there to all
    length = len(start.tensor_split(n)[rank])
    limit = max(2 * (n - 1) * start.nbytes / n, start.nbytes + (n - 2) * 4 * length)
    assert max(sent) <= limit + 1, (
        f"rank {rank} sends {max(sent):g} bytes in a step, expected at most {limit:g}, as"
        " for an all-reduce: sum only this process's part, by reduce_scatter, and gather"
        " parts of the parameters once"
    )


def _expect_bytes_held(held: Any, kept: Any, start: Any, n: Any, rank: Any) -> None:
    """The moments of a part, as `held_bytes()` says and as the tensors kept show."""
    share = 8 * len(start.tensor_split(n)[rank])
    held = expect_number(held, "held_bytes()")
    assert held == share or held != 2 * start.nbytes, (
        f"rank {rank}: held_bytes() is {held:g}, expected {share}: those are the moments of"
        " all parameters, not of this process's part"
    )
    assert held == share, (
        f"rank {rank}: held_bytes() is {held:g}, expected {share}: two moments, of 4 bytes,"
        " for each number of this part"
    )
    most = 2 * share + 256
    assert kept <= most, (
        f"rank {rank} keeps tensors of {kept} bytes beside the parameters, and the moments"
        f" of its part have {share}: keep no moments of other parts, and no whole rows"
    )


def check_sharded(
    answers: Any, n: Any, shapes: Any, seed: Any, steps: Any = 3, **settings: Any
) -> Any:
    [ShardedAdamW] = written(answers, "ShardedAdamW")
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.2} | settings
    g = torch.Generator().manual_seed(seed)
    total = sum(math.prod(shape) for shape in shapes)
    start = torch.randn(total, generator=g)
    gradients = torch.randn(steps, n, total, generator=g)
    lengths = [len(part) for part in start.tensor_split(n)]
    with case(f"Task 5, {n} processes, {total} parameters in parts of {lengths}"):
        played = _sharded_steps(ShardedAdamW, start, gradients, shapes, settings)
        sums = gradients.sum(dim=1)
        right = _adamw_by_torch(start, sums, **settings)
        slips = _slips_of_update(start, sums, settings)
        slips += _slips_of_sum(start, gradients, settings)
        for rank, (rows, *_) in enumerate(played):
            for step, (found, expected) in enumerate(zip(rows, right, strict=True), 1):
                _expect_no_slip(found, expected, slips, step, rank)
                _expect_adamw(found, expected, n, step, rank)
                assert torch.equal(found, played[0][0][step - 1]), (
                    f"after step {step} the parameters of ranks 0 and {rank} differ in the last"
                    " bits: all must take the gathered ones"
                )
        for rank, (_, sent, held, kept) in enumerate(played):
            _expect_bytes_sent(sent, start, n, rank)
            _expect_bytes_held(held, kept, start, n, rank)
        return [held for _, _, held, _ in played]


def task5_sharded(answers: Any) -> None:
    """Steps, bytes held and bytes sent; prints a table."""
    check_sharded(answers, 1, [(4, 3), (4,)], 0, steps=2)
    check_sharded(answers, 2, [(4, 3), (5,), (2, 2)], 1)
    check_sharded(answers, 4, [(4, 3), (6,), (2, 2)], 5, steps=2)
    table = [(n, check_sharded(answers, n, [(60, 10), (8, 25)], n, steps=2)) for n in (2, 4)]
    for n, row in [(1, [6400]), *table]:
        print(f"800 parameters, {n} processes: each holds {row[0]:g} bytes of moments")


TWO_MOMENTS = (
    "AdamW keeps two moments for each parameter: 4 bytes of parameter, 4 of gradient, 8 of moments"
)
MEMORY_SLIPS: dict[str, dict[float, str]] = {
    "ddp_gb": {
        24: TWO_MOMENTS,
        12: TWO_MOMENTS,
        36: TWO_MOMENTS,
        3: "DDP shares nothing out: every process holds everything",
        44.7: "that is in GiB; 1 GB is 10⁹ bytes here",
    },
    "stage1_gb": {
        48: "your optimizer shares the moments out",
        3: "parameters and gradients stay whole in each process",
        14.25: "gradients stay whole in each process, too: they are in .grad",
        24: "each process holds its sixteenth of the moments as well",
        12.75: TWO_MOMENTS,
        24.75: TWO_MOMENTS,
        27: "the moments are 24 GB in all, 8 bytes for each parameter",
    },
    "fsdp_gb": {
        1.5: TWO_MOMENTS,
        0.75: TWO_MOMENTS,
        48: "FSDP shares parameters, gradients and moments out",
        25.5: "parameters and gradients are shared out too",
        14.25: "parameters are shared out too",
        2.79: "that is in GiB; 1 GB is 10⁹ bytes here",
    },
    "block_gb": {
        3: "the whole block lies beside the shares, in addition",
        0.5: "and the shares?",
        4: "only the parameters of the block are gathered, not its gradients",
        3.25: "a parameter in float32 has 4 bytes",
        5: "only the parameters of the block are gathered, not its gradients and moments",
        15: "one block of 24 is whole, not all of them",
        3.125: "3 billion / 24 are parameters, and each has 4 bytes",
        3.03: "a block has 3 billion / 24 parameters; all processes' shares of it are gathered",
    },
}


def task5_memory(answers: Any) -> None:
    """Task 5, memory."""
    with case("Task 5, memory"):
        billions = 3
        n = 16
        blocks = 24
        right = {
            "ddp_gb": 16 * billions,
            "stage1_gb": (8 + 8 / n) * billions,
            "fsdp_gb": 16 * billions / n,
            "block_gb": 16 * billions / n + 4 * billions / blocks,
        }
        written(answers, *right)
        hint = (
            "for each parameter, write down the bytes of the parameter itself, its gradient and its"
            " moments, and divide by 16 what is shared out"
        )
        _expect_numbers(answers, right, MEMORY_SLIPS, lambda a, b: abs(a / b - 1) < 0.004, hint)


# --------------------------------------------------------------------- 6, attention split by heads


def _made(num_heads: Any, num_kv_heads: Any, D: Any, width: Any, seed: Any) -> Any:
    """Weights in which all numbers differ, so that a part shows where it comes from."""
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "q_proj": (num_heads * D, width),
        "k_proj": (num_kv_heads * D, width),
        "v_proj": (num_kv_heads * D, width),
        "o_proj": (width, num_heads * D),
        "bias": (width,),
    }
    return {name: torch.randn(shape, generator=g) / 2 for name, shape in shapes.items()}


def check_split(
    answers: Any, num_heads: Any, num_kv_heads: Any, n: Any, D: Any = 3, width: Any = 10
) -> None:
    with case(f"Task 6, split of {num_heads} heads and {num_kv_heads} key-value heads over {n}"):
        [split] = written(answers, "split")
        weights = _made(num_heads, num_kv_heads, D, width, n)
        before = {name: weight.clone() for name, weight in weights.items()}
        for rank in range(n):
            part = split(weights, rank, n, D)
            assert isinstance(part, dict), (
                f"split returns {type(part).__name__}, expected a dictionary"
            )
            assert part.keys() == weights.keys(), (
                f"split returns the names {sorted(part)}, expected {sorted(weights)}"
            )
            for name, weight in weights.items():
                count = {"q_proj": num_heads, "o_proj": num_heads, "bias": 0}.get(
                    name, num_kv_heads
                ) // n
                axis = 1 if name == "o_proj" else 0
                right = weight.narrow(axis, rank * count * D, count * D) if count else weight
                found = part[name]
                what = {
                    "bias": "the bias stays whole",
                    "o_proj": (
                        "o_proj stores (what comes out, what goes in), and the heads' outputs go"
                        " in: cut its columns"
                    ),
                }.get(name, "a head is head_dim neighbouring rows")
                assert isinstance(found, Tensor) and found.shape == right.shape, (
                    f"rank {rank}: {name} has shape {tuple(getattr(found, 'shape', ()))}, expected"
                    f" {tuple(right.shape)}: {what}"
                )
                assert torch.equal(found, right) or name != "bias", (
                    f"rank {rank}: bias has the right shape, and other numbers: it stays as it is,"
                    " in every process"
                )
                assert torch.equal(found, right), (
                    f"rank {rank}: {name} has the right shape, and other numbers: take the heads"
                    f" {rank * count} to {(rank + 1) * count - 1}, which follow each other, so that"
                    " query heads and key-value heads belong together"
                )
        assert all(torch.equal(before[name], weight) for name, weight in weights.items()), (
            "split has changed the weights that it was given"
        )


def check_refusal(answers: Any, *impossible: Any) -> None:
    """Heads that don't divide are refused in words."""
    [split] = written(answers, "split")
    for heads, kv, n in impossible:
        with case(f"Task 6, split of {heads} heads and {kv} key-value heads over {n}"):
            try:
                split(_made(heads, kv, 5, 7, 0), 0, n, 5)
                message = None
            except Exception as error:
                assert isinstance(error, ValueError), (
                    f"split raises {type(error).__name__} ({error}), expected a ValueError"
                )
                message = str(error)
            assert message is not None, f"{n} does not divide {kv}, and there was no ValueError"
            unsaid = [number for number in (heads, kv, n) if str(number) not in message]
            assert not unsaid, (
                f"the ValueError must say H = {heads}, K = {kv} and n = {n}; {unsaid} is not in:"
                f" {message}"
            )


def task6_split(answers: Any) -> None:
    """Parts of the weights, and what can't be split."""
    check_split(answers, 4, 2, 1)
    check_split(answers, 4, 2, 2)
    check_refusal(answers, (4, 2, 4), (6, 2, 3))


def _attention_alone(x: Any, weights: Any, D: Any) -> Any:
    """The oracle: every head by itself."""
    B, T, _ = x.shape
    q, k, v = ((x @ weights[name].T).view(B, T, -1, D) for name in ("q_proj", "k_proj", "v_proj"))
    mask = torch.full((T, T), -math.inf).triu(1)
    group = q.shape[2] // k.shape[2]
    y = weights["bias"]
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, :, head // group].transpose(1, 2) / math.sqrt(D) + mask
        y = (
            y
            + scores.softmax(-1)
            @ v[:, :, head // group]
            @ weights["o_proj"][:, head * D : (head + 1) * D].T
        )
    return y


def _cut(name: Any, weight: Any, rank: Any, n: Any) -> Any:
    return weight if name == "bias" else weight.chunk(n, dim=1 if name == "o_proj" else 0)[rank]


def _expect_close(found: Any, right: Any, message: Any) -> None:
    assert isinstance(found, Tensor) and found.shape == right.shape, (
        f"{message} (it is"
        f" {found if found is None else getattr(found, 'shape', type(found).__name__)})"
    )
    assert torch.allclose(found, right, atol=1e-4), (
        f"{message} (largest difference {(found - right).abs().max():.3g})"
    )


def _attention_in_parts(
    attention_part: Any, weights: Any, x: Any, slope: Any, n: Any, D: Any
) -> Any:
    """By rank: the output, the gradients of x and of its weights, and the numbers of exchanges."""

    def play(wire: Any) -> Any:
        mine = {
            name: _cut(name, weight.detach(), wire.rank, n).clone().requires_grad_()
            for name, weight in weights.items()
        }
        own = x.detach().clone().requires_grad_()
        found = attention_part(own, mine, wire, D)
        assert isinstance(found, Tensor), (
            f"attention_part returns {type(found).__name__}, expected a tensor"
        )
        forward = len(wire.log)
        assert torch.equal(own, x), "attention_part has changed x"
        (found * slope).sum().backward()
        grads = {name: weight.grad for name, weight in mine.items()}
        return found.detach(), own.grad, grads, (forward, len(wire.log) - forward)

    return run(n, play)


def _expect_output(found: Any, y: Any, bias: Any, n: Any, rank: Any) -> None:
    """The output is that of the whole, with the bias once."""
    if n > 1 and isinstance(found, Tensor) and found.shape == y.shape:
        extra = torch.allclose(found - (n - 1) * bias, y, atol=1e-4)
        assert not extra, (
            f"rank {rank}: the output holds the bias {n} times: add it once, after the sum"
            " over the processes"
        )
    _expect_close(
        found,
        y.detach(),
        f"rank {rank}: the output is not that of the whole attention; each process has a"
        " part of a sum over heads",
    )


def _expect_weight_gradients(grads: Any, weights: Any, n: Any, rank: Any) -> None:
    """The gradient of each weight is that part of the whole's."""
    for name, weight in weights.items():
        right = _cut(name, weight.grad, rank, n)
        what = f"rank {rank}: the gradient of {name} is not that part of the whole's gradient"
        if name == "bias":
            what = (
                f"rank {rank}: the gradient of bias is not the whole's: is it added whole,"
                " after leave, in each process?"
            )
        _expect_close(grads[name], right, what)


def check_heads(
    answers: Any,
    num_heads: Any,
    num_kv_heads: Any,
    n: Any,
    D: Any = 3,
    width: Any = 10,
    seed: Any = 0,
) -> Any:
    weights = {
        name: weight.requires_grad_()
        for name, weight in _made(num_heads, num_kv_heads, D, width, seed).items()
    }
    g = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(2, 4, width, generator=g).requires_grad_()
    slope = torch.randn(2, 4, width, generator=g)
    y = _attention_alone(x, weights, D)
    (y * slope).sum().backward()
    with case(f"Task 6, {num_heads} heads and {num_kv_heads} key-value heads on {n} processes"):
        [attention_part] = written(answers, "attention_part")
        played = _attention_in_parts(attention_part, weights, x, slope, n, D)
        for rank, (found, gradient, grads, counts) in enumerate(played):
            _expect_output(found, y, weights["bias"], n, rank)
            assert counts[0] == 1 or n == 1, (
                f"rank {rank}: {counts[0]} exchanges in forward, expected 1: heads need nothing of"
                " each other, only their outputs are summed"
            )
            _expect_close(
                gradient,
                x.grad,
                f"rank {rank}: the output is right, and the gradient of x is not that of the whole:"
                " each process knows what *its* heads contribute, `enter` sums it in backward",
            )
            _expect_weight_gradients(grads, weights, n, rank)
            assert counts[1] == 1 or n == 1, (
                f"rank {rank}: {counts[1]} exchanges in backward, expected 1: `enter` x once, for"
                " all three projections"
            )


def _through_doors(enter: Any, leave: Any, n: Any) -> Any:
    """By rank: for each door what comes out, the gradient through it, and what x is afterwards;
    and the numbers that x began with.
    """

    def play(wire: Any) -> Any:
        numbers = torch.tensor([1.0, 2.0]) * 10**wire.rank
        rows = []
        for door in (enter, leave):
            x = numbers.clone().requires_grad_()
            y = door(x, wire)
            assert isinstance(y, Tensor), (
                f"{door.__name__} returns {type(y).__name__}, expected a tensor"
            )
            assert y.requires_grad, (
                f"no gradient comes back through {door.__name__}: is it cut off by in-place work or"
                " detach?"
            )
            ((y + x) * numbers).sum().backward()  # x goes through the door, and round it
            through = x.grad - numbers
            assert through.any(), (
                f"no gradient comes back through {door.__name__}: is it cut off by in-place work or"
                " detach?"
            )
            rows += [y.tolist(), through.tolist(), x.tolist()]
        return rows, numbers.tolist()

    return run(n, play)


def _expect_enter(e: Any, e_grad: Any, numbers: Any, total: Any, rank: Any, n: Any) -> None:
    """`enter` hands x through, and sums in backward."""
    assert e == numbers, (
        f"rank {rank}: enter returns {e} for {numbers}: forward it hands x through as it is"
    )
    doubled = [2 * there - own for there, own in zip(total, numbers, strict=True)]
    assert n == 1 or e_grad != doubled, (
        f"rank {rank}: the backward of enter sums in the gradient that it was given, which"
        " autograd uses elsewhere too (here x also goes round enter): sum a copy of it. (If yours"
        " does, a hook sits on x itself, and is given what goes round as well: put it on"
        " x.view_as(x))"
    )
    assert e_grad == total, (
        f"rank {rank}: the gradient that comes out of enter is {e_grad}, expected the sum"
        f" over all, {total}"
    )


def _expect_leave(y: Any, y_grad: Any, numbers: Any, total: Any, rank: Any) -> None:
    """`leave` sums, and hands the gradient through in backward."""
    assert y == total, (
        f"rank {rank}: leave returns {y} for {numbers}, expected the sum over all, {total}"
    )
    assert y_grad == numbers, (
        f"rank {rank}: the gradient that comes out of leave is {y_grad}, expected what came"
        f" in, {numbers}"
    )


def check_doors(answers: Any, n: Any) -> Any:
    """`enter` and `leave` alone."""
    with case(f"Task 6, enter and leave on {n} processes"):
        enter, leave = written(answers, "enter", "leave")
        total = [sum(10**rank for rank in range(n)), 2 * sum(10**rank for rank in range(n))]
        played = _through_doors(enter, leave, n)
        for rank, ((e, e_grad, e_x, y, y_grad, y_x), numbers) in enumerate(played):
            assert e_x == y_x == numbers, (
                f"rank {rank}: enter or leave has changed the tensor that it was given: work on a"
                " copy"
            )
            _expect_enter(e, e_grad, numbers, total, rank, n)
            _expect_leave(y, y_grad, numbers, total, rank)


def task6_gradients(answers: Any) -> None:
    """The doors alone, and attention with its gradients."""
    check_doors(answers, 2)
    check_heads(answers, 4, 2, 1)
    check_heads(answers, 4, 2, 2)

"""The collectives of several engines in one process, with memory between them as processes of a host share it."""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from mmap import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from overlap.collectives.call import Call, call
from overlap.collectives.kinds import Collective
from overlap.runtime.engine.host_memory import _make_table
from overlap.runtime.engine.pulls import pulls
from tests.threads import running
from transports.shared_memory.board import BOARD_BYTES

native = pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")
pytestmark = pytest.mark.usefixtures("slices_of_three_ranks")

PENDING, DONE, MISMATCH, LOST, WITHDRAWN, NO_MEMORY, CORRUPT, HOMELESS, CANCELLED = range(9)
LONG_S = 60.0
NO_PLACES = 1
SEGMENT_BYTES = BOARD_BYTES + (24 << 20)
Array = np.ndarray[Any, Any]

# On the board (beside the row and behind all rows), in lent places, sliced there by three ranks, and where they are.
COUNTS = {"nothing": 0, "one": 1, "near": 6, "far": 500, "lent": 6_000, "sliced": 48_000, "private": 360_000}


@dataclass
class Host:
    """The engines of some processes of a host, and a board that all of them have."""

    size: int
    reads: bool = True
    lends: bool = True
    most: int = 1
    cores: int = 4
    engines: list[Any] = field(default_factory=list)
    boards: list[Any] = field(default_factory=list)
    bells: list[memoryview] = field(default_factory=list)
    segments: list[mmap] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        everybody = range(self.size)
        rings = {(i, j): memoryview(mmap(-1, 1 << 16)) for i, j in product(everybody, everybody) if i != j}
        self.bells = bells = [memoryview(mmap(-1, 4096)) for _ in everybody]
        self.segments = [mmap(-1, SEGMENT_BYTES) for _ in everybody]
        for i in everybody:
            ways = [None if i == j else (rings[i, j], rings[j, i], bells[j]) for j in everybody]
            self.engines.append(native.Engine(bells[i], ways, 0.0, -1, self.most, False, self.cores))
            self.taken.append(BOARD_BYTES)
        for i in everybody:
            views = [memoryview(segment) for segment in self.segments]
            seats = [(view[:BOARD_BYTES], view, 0 if i == j else os.getpid(), j) for j, view in enumerate(views)]
            self.boards.append(native.Board(self.engines[i], seats, self.reads))

    def submit(self, rank: int, what: Call, number: int, x: Array | None, out: Array | None, priority: int = 0) -> Any:
        """Begin a rank's end of an operation."""
        table, tag = _make_table(what, rank), (number + 1) << 8
        source, target = (0 if each is None else each.ctypes.data for each in (x, out))
        args = (self.boards[rank], table, (x, out), number, tag, source, target, priority, 0)
        run = self.engines[rank].submit(*args, 0)
        if run is None:
            self.loan(rank, x.nbytes if x is not None else 1)
            run = self.engines[rank].submit(*args, NO_PLACES)
        return run

    def loan(self, rank: int, nbytes: int) -> None:
        """Lend memory of a process to its operations, if it has any."""
        nbytes = max(4096, 1 << (nbytes - 1).bit_length())
        if self.lends and self.taken[rank] + nbytes <= SEGMENT_BYTES:
            self.boards[rank].add_place(self.taken[rank], nbytes)
            self.taken[rank] += nbytes

    def wait(self, rank: int, run: Any, seconds: float = LONG_S) -> int:
        return int(self.engines[rank].wait(run, seconds))

    def sleepers(self, rank: int) -> int:
        return int(self.bells[rank].cast("I")[1])

    def word(self, rank: int, number: int, index: int) -> memoryview:
        """Return a word of the row of an operation."""
        at = number % 64 * 64 + 8 * index
        return memoryview(self.segments[rank])[at : at + 8].cast("Q")

    def close(self) -> None:
        for engine in self.engines:
            engine.take_ended()  # each end has the engine, and all its memory
            engine.close()


def inputs(what: Call, seed: int = 0) -> list[Array]:
    """Return what each rank gives: any bits, so that there are infinities, negative zeros and what is no number."""
    assert what.dtype is not None
    found = []
    for rank in range(what.size):
        rng = np.random.default_rng([seed, rank])
        if what.dtype.kind == "b":
            found.append(rng.integers(0, 2, what.shape).astype(bool))
        else:
            shape = (*(what.shape or ()), what.dtype.itemsize)
            found.append(rng.integers(0, 256, shape, np.uint8).view(what.dtype).reshape(what.shape or ()))
    return found


def expected(what: Call, xs: Sequence[Array], rank: int, out: Array) -> Array:
    """Make the result of a rank as one thread does it, in the order of ranks."""
    for start, size, sources in pulls(what, rank):
        parts = [xs[who].reshape(-1)[at : at + size] for who, at in sources]
        if what.reducer is None:
            out[start : start + size] = parts[0]
        else:
            with np.errstate(all="ignore"):
                what.reducer.reduce_into(parts, out[start : start + size])
    return out


def alike(a: Array, b: Array) -> bool:
    """Whether the bits are the same; of what is no number, numpy itself does not say which bits survive."""
    if a.dtype.kind in "fcV":
        with np.errstate(all="ignore"):
            neither = np.isnan(a.astype(np.complex128)) & np.isnan(b.astype(np.complex128))
        a, b = a[~neither], b[~neither]
    return a.tobytes() == b.tobytes()


def made(kind: str, op: str | None, dtype: Any, count: int, size: int, root: int = 0) -> Call:
    pairs = ((0, size - 1), (size - 1, 0)) if kind == "permute" and size > 1 else ()
    return call(kind, op, np.dtype(dtype), (count,), size, root, pairs)


def carry_out(host: Host, what: Call, number: int, *, seed: int, in_place: bool = False) -> None:
    """Let all ranks, in some order, carry out an operation, and compare every bit."""
    xs = inputs(what, seed)
    outs, runs = [], []
    for rank in map(int, np.random.default_rng(seed).permutation(what.size)):
        got = what.kind is not Collective.BARRIER and bool(pulls(what, rank))
        given = xs[rank].copy()
        out = given if in_place else np.zeros(what.result_shape_at(rank), what.dtype) if got else None
        outs.append((rank, given, out))
        runs.append((rank, host.submit(rank, what, number, given, out)))
    for rank, run in runs:
        assert host.wait(rank, run) == DONE
    for rank, _, out in outs:
        if out is not None and (what.size > 1):
            want = expected(what, xs, rank, np.zeros(what.result_shape_at(rank), what.dtype).reshape(-1))
            assert alike(out.reshape(-1), want), (what, rank)


KINDS = {
    **dict.fromkeys(("all_reduce", "reduce", "reduce_scatter"), "sum"),
    **dict.fromkeys(("all_gather", "gather", "scatter", "broadcast", "all_to_all", "permute"), None),
}


@pytest.mark.parametrize("reads", [True, False], ids=["read", "mapped"])
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_collective(size: int, count: int, reads: bool) -> None:
    host = Host(size, reads, lends=reads or count < COUNTS["private"])
    count -= count % size
    for number, (kind, op) in enumerate(KINDS.items()):
        for root in range(min(size, 2)):
            if kind == "permute" and size == 1:
                continue
            what = made(kind, op, np.float32, count, size, root if kind in ("reduce", "gather", "scatter") else 0)
            if host.lends:
                carry_out(host, what, 2 * number + root, seed=number)
            elif size > 1:  # a program has to do it: there is no place
                assert carried_out_by_none(host, what, 2 * number + root)
    host.close()


def carried_out_by_none(host: Host, what: Call, number: int) -> bool:
    outs = [np.zeros(what.result_shape_at(rank), what.dtype) for rank in range(what.size)]
    runs = [host.submit(rank, what, number, x, outs[rank]) for rank, x in enumerate(inputs(what))]
    return [host.wait(rank, run) for rank, run in enumerate(runs)] == [HOMELESS] * what.size


def thread_ids() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def sleeps_of(thread: str) -> int:
    """Return how often a thread has gone to sleep."""
    with open(f"/proc/self/task/{thread}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary"))


@pytest.mark.parametrize("kind", ["reduce", "gather", "broadcast"])
@pytest.mark.parametrize(("most", "cores"), [(1, 2), (2, 2), (1, 1)])
def test_a_rank_that_alone_moves_bytes_has_a_second_thread_work_on_an_idle_core(
    kind: str, most: int, cores: int
) -> None:
    host, before, times = Host(2, most=most, cores=cores), thread_ids(), 30
    what = made(kind, KINDS[kind], np.float32, 1 << 20, 2)
    active = int(kind == "broadcast")
    xs, outs = inputs(what), [np.zeros(what.result_shape_at(rank), what.dtype) for rank in range(2)]
    begun_sleeps, begun_s, spare = 0, 0.0, ""
    for number in range(times + 1):
        run = host.submit(active, what, number, xs[active], outs[active])
        if number == 0:
            (spare,) = thread_ids() - before
        waiting = threading.Thread(target=host.wait, args=(active, run))
        waiting.start()
        while host.sleepers(active) == 0:
            waiting.join(0.001)
        if number == 1:
            begun_sleeps, begun_s = sleeps_of(spare), time.monotonic()
        other = host.submit(1 - active, what, number, xs[1 - active], outs[1 - active])
        waiting.join()
        assert [host.wait(active, run), host.wait(1 - active, other)] == [DONE, DONE]
    looks = (time.monotonic() - begun_s) / 0.1 + 2  # the thread looks ten times a second
    sleeps = sleeps_of(spare) - begun_sleeps
    assert sleeps >= times / 3 if cores == 2 else sleeps <= looks
    want = expected(what, xs, active, np.zeros(what.result_shape_at(active), what.dtype).reshape(-1))
    assert alike(outs[active].reshape(-1), want)
    host.close()


OPERATORS = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), ("sum", "mean", "prod", "max", "min")),
    **dict.fromkeys(("complex64", "complex128"), ("sum", "mean", "prod", "max")),
    **{
        f"{sign}int{bits}": ("sum", "mean", "prod", "max", "min", "band", "bor", "bxor")
        for sign, bits in product(("", "u"), (8, 16, 32, 64))
    },
    "bool": ("max", "min", "band", "bor", "bxor"),
}


@pytest.mark.parametrize("dtype", OPERATORS)
def test_reductions_have_the_bits_of_numpy(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    host, number = Host(3), 0
    for op in OPERATORS[dtype]:
        for count in (1, 777, 70_000):
            for in_place in (False, True):
                carry_out(host, made("all_reduce", op, kind, count, 3), number, in_place=in_place, seed=number)
                number += 1
    host.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_values_of_a_narrow_type(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    every = np.arange(1 << 16, dtype=np.uint16).view(kind)
    host = Host(2)
    for number, op in enumerate(("sum", "max", "min", "prod", "mean")):
        what = made("all_reduce", op, kind, 1 << 16, 2)
        xs, outs = [every, np.roll(every, 12_345)], [np.zeros(1 << 16, kind) for _ in range(2)]
        runs = [host.submit(rank, what, number, xs[rank], outs[rank]) for rank in range(2)]
        assert [host.wait(rank, run) for rank, run in enumerate(runs)] == [DONE, DONE]
        want = expected(what, xs, 0, np.zeros(1 << 16, kind))
        assert all(alike(out, want) for out in outs)
    host.close()


def test_rows_are_used_again_by_ranks_far_ahead() -> None:
    host, ahead = Host(2), 300
    sent = [np.full(6, float(number)) for number in range(ahead)]
    got = [np.zeros(6) for _ in range(ahead)]
    what = made("broadcast", None, np.float64, 6, 2)
    runs = [host.submit(0, what, number, x, x) for number, x in enumerate(sent)]
    assert {run.state for run in runs[:64]} == {DONE}  # it waits for nobody, as long as there are rows
    assert {run.state for run in runs[64:]} == {PENDING}
    for number, out in enumerate(got):
        assert host.wait(1, host.submit(1, what, number, None, out)) == DONE
    assert [host.wait(0, run) for run in runs] == [DONE] * ahead
    assert all((out == number).all() for number, out in enumerate(got))
    host.close()


def test_an_operation_waits_for_the_others_and_no_longer() -> None:
    host = Host(2)
    what, x, out = made("all_reduce", "sum", np.float64, 5, 2), np.ones(5), np.zeros(5)
    run = host.submit(0, what, 0, x, out)
    assert host.wait(0, run, 0.01) == PENDING
    found: list[int] = []
    with running(*(threading.Thread(target=lambda: found.append(host.wait(0, run))) for _ in range(3))):
        assert host.wait(1, host.submit(1, what, 0, x, np.zeros(5))) == DONE
    assert found == [DONE] * 3
    assert (out == 2).all()
    host.close()


def test_without_anybody_who_waits_the_thread_of_the_engine_does_it() -> None:
    host, ended = Host(2), threading.Event()
    what = made("all_reduce", "sum", np.float32, COUNTS["private"], 2)
    outs = [np.zeros(COUNTS["private"], np.float32) for _ in range(2)]
    runs = [host.submit(rank, what, 0, np.ones(COUNTS["private"], np.float32), outs[rank]) for rank in range(2)]
    while {run.state for run in runs} != {DONE}:
        assert not ended.wait(0.001)
    assert all((out == 2).all() for out in outs)
    assert len(host.engines[0].take_ended()[0]) == 1
    assert host.engines[0].take_ended() == ([], [])
    host.close()


@pytest.mark.parametrize("count", [5, 6_000, 48_000, COUNTS["private"]])
def test_a_run_that_is_cancelled(count: int) -> None:
    """Nothing of its rank's is touched afterwards; the others are told by whoever cancels it."""
    host = Host(2)
    what, x, out = made("all_reduce", "sum", np.float64, count, 2), np.ones(count), np.zeros(count)
    run = host.submit(0, what, 0, x, out)
    if not host.engines[0].cancel(run):
        assert host.wait(0, run) == CANCELLED
    assert run.state == CANCELLED
    assert host.engines[0].cancel(run)
    other = host.submit(1, what, 0, np.ones(count), np.zeros(count))
    host.wait(1, other, 0.05)
    assert (out == 0).all()
    host.close()


def test_a_lost_rank() -> None:
    host = Host(2)
    what = made("all_reduce", "sum", np.float64, 5, 2)
    run = host.submit(0, what, 0, np.ones(5), np.zeros(5))
    host.boards[0].lose()
    assert host.wait(0, run) == LOST
    assert host.wait(0, host.submit(0, what, 1, np.ones(5), np.zeros(5))) == LOST
    host.close()


def test_memory_of_a_process_that_is_gone() -> None:
    host = Host(2)
    views = [memoryview(segment) for segment in host.segments]
    seats = [(view[:BOARD_BYTES], view, (0, 2**22 - 1)[j], j) for j, view in enumerate(views)]
    host.boards[0] = native.Board(host.engines[0], seats, True)  # as if rank 1 were another process
    count = COUNTS["private"]
    what = made("all_reduce", "sum", np.float32, count, 2)
    runs = [host.submit(r, what, 0, np.ones(count, np.float32), np.zeros(count, np.float32)) for r in range(2)]
    assert host.wait(0, runs[0]) == LOST
    host.close()


def test_the_most_urgent_is_worked_on_first() -> None:
    host, count = Host(2), 1 << 24
    what = made("all_reduce", "sum", np.float32, count, 2)
    arrays = [[(np.ones(count, np.float32), np.zeros(count, np.float32)) for _ in range(2)] for _ in range(2)]
    runs = [[host.submit(r, what, n, *arrays[n][r], priority) for r in range(2)] for n, priority in enumerate((5, 0))]
    assert [host.wait(r, runs[n][r]) for n in range(2) for r in range(2)] == [DONE] * 4
    assert max(run.ended_ns for run in runs[1]) < min(run.ended_ns for run in runs[0])
    host.close()


MUTATIONS: list[Callable[[Host, random.Random, int], None]] = [
    lambda host, rng, number: host.word(1, number, 0).__setitem__(0, rng.getrandbits(64)),
    lambda host, rng, number: host.word(1, number, 1).__setitem__(0, rng.getrandbits(64)),
    lambda host, rng, number: host.word(1, number, 1).__setitem__(0, rng.choice([0, 4095, 4097, SEGMENT_BYTES - 1])),
    lambda host, rng, number: host.word(1, number, 2).__setitem__(0, rng.getrandbits(64)),
    lambda host, rng, number: host.word(1, number, 2).__setitem__(0, (number + 1) << 8 | rng.randrange(256)),
    lambda host, rng, number: host.word(1, number, 3).__setitem__(0, rng.getrandbits(64)),
]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_garbage_in_the_rows_of_a_peer_harms_nobody_else(seed: int) -> None:
    """It may give a wrong number, a state, or no end; never a crash, nor a byte beside the result."""
    rng, host = random.Random(seed), Host(2)
    for number in range(40):
        count = rng.choice([1, 6, 500, 6_000, 48_000, COUNTS["private"]])
        kind, op = rng.choice([("all_reduce", "sum"), ("all_gather", None), ("all_to_all", None)])
        what = made(kind, op, np.float32, count + count % 2, 2)
        size = int(np.prod(what.result_shape_at(0)))
        room = np.full(size + 2, 7.0, np.float32)
        x = np.ones(what.shape or (), np.float32)
        run = host.submit(0, what, number, x, room[1:-1])
        word, tag = host.word(1, number, 0), (number + 1) << 8
        host.word(1, number, 2)[0] = (number + 1) << 8 | rng.randrange(6)
        word[0] = tag | rng.choice([1, 2, 3, 255])
        for _ in range(rng.randrange(3)):
            rng.choice(MUTATIONS)(host, rng, number)
        if host.wait(0, run, 0.01) == PENDING and not host.engines[0].cancel(run):
            host.wait(0, run)
        assert room[0] == room[-1] == 7.0
        assert (x == 1).all()
    host.close()


def test_a_fork_leaves_the_engine_alone() -> None:
    host = Host(2)
    what = made("all_reduce", "sum", np.float64, 5, 2)
    run = host.submit(0, what, 0, np.ones(5), np.zeros(5))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            host.submit(0, what, 1, np.ones(5), np.zeros(5))
        except RuntimeError:
            code = 0 if host.wait(0, run, 0.0) == PENDING and host.engines[0].cancel(run) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert host.wait(1, host.submit(1, what, 0, np.ones(5), np.zeros(5))) == DONE
    assert host.wait(0, run) == DONE
    host.close()


def test_an_engine_that_is_closed_while_its_thread_works() -> None:
    """It writes sums as long as it is open, and nothing once it is closed."""
    for _ in range(20):
        host, count = Host(2), 3 * COUNTS["private"]
        what, outs = made("all_reduce", "sum", np.float32, count, 2), np.zeros((2, count), np.float32)
        for rank in range(2):
            host.submit(rank, what, 0, np.ones(count, np.float32), outs[rank])
        host.close()
        left = outs.copy()
        assert {*np.unique(left)} <= {0.0, 2.0}
        time.sleep(0.001)
        assert np.array_equal(outs, left)


@pytest.mark.parametrize(
    "wrong",
    [
        {"take": [(0, 16, [(0, 0)])], "result_bytes": 8},
        {"take": [(0, 8, [(2, 0)])]},
        {"take": [(0, 8, [(0, 0), (1, 0)])]},
        {"needed": b"\x01"},
        {"position": 2},
        {"unread": (4, 2)},
        {"active": 0},
        {"active": 3},
    ],
    ids=[
        "beyond the result",
        "from nobody",
        "summed without a sum",
        "needs too few",
        "nowhere",
        "backwards",
        "moved by none",
        "moved by more than there are",
    ],
)
def test_a_table_that_cannot_be(wrong: dict[str, Any]) -> None:
    table: dict[str, Any] = {
        "position": 0, "size": 2, "active": 2, "flags": 0, "nbytes": 8, "result_bytes": 8, "unread": (0, 0),
        "needed": b"\1\1", "take": [], "reduce": [], "collect": [], "reducer": None,
    }  # fmt: skip
    native.Table(*table.values())
    with pytest.raises(ValueError):
        native.Table(*(table | wrong).values())


def test_a_reduction_that_numpy_has_no_loop_for() -> None:
    with pytest.raises(LookupError):
        native.Table(0, 1, 1, 0, 0, 0, (0, 0), b"\1", [], [], [], (np.bitwise_and, None, np.dtype("f4").num, 4, b"", 0))

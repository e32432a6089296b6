"""Rows of boards: signed ones, those that a peer has written over; runs that are cancelled or lose their board."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")

from overlap.collectives.call import Call
from tests.threads import running

from .test_collectives_of_engines import (
    BOARD_BYTES,
    CANCELLED,
    CORRUPT,
    DONE,
    LOST,
    MISMATCH,
    PENDING,
    Host,
    _make_table,
    made,
    native,
)

pytestmark = pytest.mark.usefixtures("slices_of_three_ranks")

# -- rows of boards: signed ones, those that a peer has written over, and what ranks of one process read ---------------

# ----------------------------------------------------------------------------------------------------------------------
# Rows of boards with signatures: another call is noticed by the ranks that wait for it, and rows can be looked at


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(3)
    yield host
    host.close()


def begin(host: Host, rank: int, what: Call, number: int, call: int, count: int = 6, text: bytes = b"") -> object:
    """Begin a rank's end of an operation; the call is the upper part of its tag, and of its fingerprint."""
    x, out = np.ones(count, np.float32), np.zeros(int(np.prod(what.result_shape_at(rank))), np.float32)
    tag = call << 24 | (number & 0xFFFF) << 8
    args = (host.boards[rank], _make_table(what, rank), (x, out), number, tag, x.ctypes.data, out.ctypes.data, 0, 0, 0)
    return host.engines[rank].submit(*args, call << 40, text or b"call %d" % call)


ALL_REDUCE = made("all_reduce", "sum", np.float32, 6, 3)
BROADCAST = made("broadcast", None, np.float32, 6, 3)


def test_a_rank_that_only_looks_posts_nothing_and_ends_at_the_first_row(host: Host) -> None:
    table = native.Table(1, 3, 3, 64, 0, 0, (0, 0), b"\1\0\0", [], [], [], None)  # LOOKS in native/collectives.c
    looking = host.boards[1], table, None, 70, 70 << 8, 0, 0, 0, 0, 0, 1 << 40, b"open"
    runs = [host.engines[1].submit(*looking) for _ in range(2)]
    assert host.engines[1].cancel(runs[1])
    assert [run.state for run in runs] == [PENDING, CANCELLED]
    sent = begin(host, 0, BROADCAST, 70, call=5)
    assert host.wait(1, runs[0]) == MISMATCH
    assert runs[0].position == 0
    assert host.boards[1].row(0, 70)[2:] == (5 << 40, b"call 5")
    assert host.boards[1].row(1, 70)[0] == 0
    received = [begin(host, rank, BROADCAST, 70, call=5) for rank in (1, 2)]
    assert [host.wait(rank + 1, run) for rank, run in enumerate(received)] == [DONE] * 2
    assert host.wait(0, sent) == DONE
    assert host.engines[1].submit(*looking).state == MISMATCH


def test_ranks_that_wait_see_another_call_and_read_its_signature(host: Host) -> None:
    runs = [begin(host, rank, ALL_REDUCE, 70, call=5 + (rank == 1)) for rank in range(2)]
    assert [host.wait(rank, run) for rank, run in enumerate(runs)] == [MISMATCH] * 2
    assert [run.position for run in runs] == [1, 0]  # type: ignore[attr-defined]
    for rank, other in ((0, 1), (1, 0)):
        word, number_mode, fingerprint, text = host.boards[rank].row(other, 70)
        assert (word >> 24, number_mode >> 8) == (6 - rank, 71)
        assert (fingerprint, text) == ((6 - rank) << 40, b"call %d" % (6 - rank))
    late = begin(host, 2, ALL_REDUCE, 70, call=5)
    assert host.wait(2, late) == MISMATCH
    assert late.position == 1  # type: ignore[attr-defined]
    after = [begin(host, rank, ALL_REDUCE, 71, call=5) for rank in range(3)]
    assert [host.wait(rank, run) for rank, run in enumerate(after)] == [DONE] * 3


def test_a_rank_that_gives_waits_until_ranks_with_its_call_have_read(host: Host) -> None:
    count = 360_000  # read where it lies
    broadcast, other = (made(kind, None, np.float32, count, 3) for kind in ("broadcast", "all_gather"))
    root = begin(host, 0, broadcast, 0, call=5, count=count)
    assert host.wait(0, root, 0.01) == PENDING
    differs = begin(host, 2, other, 0, call=6, count=count)
    assert host.wait(2, differs) == MISMATCH
    assert host.wait(0, root, 0.2) == PENDING  # the rank between may still come
    same = begin(host, 1, broadcast, 0, call=5, count=count)
    assert [host.wait(1, same), host.wait(0, root)] == [DONE, MISMATCH]


def test_a_row_is_written_only_where_it_held_another_signature(host: Host) -> None:
    at = 64 * (64 + 4096)  # behind the rows and their payloads
    label = memoryview(host.segments[0])[at : at + 128]
    for text, seen in ((b"one", b"one"), (b"two", b"two"), (b"two", b"twX")):
        number = 0 if text == b"one" else 64 if seen == b"two" else 128
        if seen == b"twX":
            label[18] = ord("X")  # as nobody else would: it shows that nothing was written
            label[0:8] = (1 << 40).to_bytes(8, "little")
        runs = [begin(host, rank, ALL_REDUCE, number, call=1, text=text) for rank in range(3)]
        assert [host.wait(rank, run) for rank, run in enumerate(runs)] == [DONE] * 3
        assert bytes(label[16:19]) == (text if seen == b"twX" else seen)


def test_without_signatures_no_rank_looks_for_other_calls(host: Host) -> None:
    x, out = np.ones(6, np.float32), np.zeros(6, np.float32)
    for rank, call in ((0, 5), (1, 6)):
        args = (host.boards[rank], _make_table(ALL_REDUCE, rank), None, 0, call << 24, x.ctypes.data, out.ctypes.data)
        run = host.engines[rank].submit(*args, 0, 0, 0)
    assert host.wait(1, run, 0.2) == PENDING
    host.engines[1].cancel(run)


def test_a_row_with_nonsense_is_refused(host: Host) -> None:
    at = 64 * (64 + 4096)
    memoryview(host.segments[0])[at + 8 : at + 12] = (89).to_bytes(4, "little")
    with pytest.raises(ValueError, match="claims 89 bytes"):
        host.boards[1].row(0, 0)
    with pytest.raises(ValueError, match="there is no rank at position 3"):
        host.boards[1].row(3, 0)
    with pytest.raises(ValueError, match="bytes, at most 88"):
        begin(host, 0, ALL_REDUCE, 0, 1, text=b"x" * 89)


# -- rows of a board that a peer has written over, and ranks of one process that read each other's memory --------------


ON_BOARD, MAPPED, PRIVATE = 1, 2, 3
ARRIVED, SLICED, TAKEN = 1, 2, 3
PRIVATE_BIT = 1 << 63
LENT = 48_000  # elements of float32 that are copied into lent memory, and sliced by three ranks


def in_one_process(host: Host) -> None:
    """Let the first two ranks live in the first process."""
    views = [memoryview(segment) for segment in host.segments]
    seats = [(view[:BOARD_BYTES], view, 0, -1) for view in views[:2]]
    seats += [(view[:BOARD_BYTES], view, 1, rank) for rank, view in enumerate(views[2:], 2)]
    host.boards[0] = host.boards[1] = native.Board(host.engines[0], seats, True)
    host.engines[1] = host.engines[0]


def post(host: Host, rank: int, number: int, mode: int, where: int, phase: int = 1) -> None:
    """Write the row of a rank that does nothing itself."""
    host.word(rank, number, 1)[0] = where
    host.word(rank, number, 2)[0] = (number + 1) << 8 | mode
    host.word(rank, number, 0)[0] = (number + 1) << 8 | phase


@pytest.mark.parametrize("where", [0, 8, 1 << 62])
def test_an_address_in_this_process_is_not_believed(where: int) -> None:
    host = Host(2)
    in_one_process(host)
    out = np.zeros(12, np.float32)
    run = host.submit(0, made("all_gather", None, np.float32, 6, 2), 0, np.ones(6, np.float32), out)
    post(host, 1, 0, PRIVATE, where)
    assert host.wait(0, run) == CORRUPT
    host.close()


def test_a_rank_reads_its_own_slice_from_its_own_memory(host: Host) -> None:
    out = np.zeros(LENT, np.float32)
    run = host.submit(0, made("all_reduce", "sum", np.float32, LENT, 3), 0, np.ones(LENT, np.float32), out)
    for other in (1, 2):
        host.loan(other, 4 * LENT)
        memoryview(host.segments[other])[BOARD_BYTES : BOARD_BYTES + 4 * LENT] = np.ones(LENT, np.float32).tobytes()
        post(host, other, 0, MAPPED, BOARD_BYTES)
    while host.word(0, 0, 0)[0] & 255 != 2:  # until its slice is there
        assert host.wait(0, run, 0.001) == PENDING
    host.word(0, 0, 3)[0] = PRIVATE_BIT | 8
    for other in (1, 2):
        host.word(other, 0, 3)[0] = BOARD_BYTES
        host.word(other, 0, 0)[0] = 1 << 8 | TAKEN
    assert host.wait(0, run) == DONE
    assert (out[: LENT // 3] == 3).all()
    assert (out[LENT // 3 :] == 1).all()


def test_memory_that_an_operation_has_is_not_given_back(host: Host) -> None:
    x, out = np.ones(LENT, np.float32), np.zeros(LENT, np.float32)
    run = host.submit(0, made("all_reduce", "sum", np.float32, LENT, 3), 0, x, out)
    while host.word(0, 0, 0)[0] == 0:  # until it is copied
        assert host.wait(0, run, 0.001) == PENDING
    for rank in range(3):  # as if all were far beyond it
        host.word(rank, 0, 2)[0] = 100 << 8
    assert host.boards[0].take_places(False) == []
    host.engines[0].cancel(run)
    assert len(host.boards[0].take_places(False)) == 1


@pytest.mark.parametrize("ended_by", ["cancelled", "lost"])
def test_memory_is_not_given_up_while_a_rank_of_this_process_reads_it(ended_by: str) -> None:
    host, count = Host(2), 8 << 20
    in_one_process(host)
    what = made("all_gather", None, np.float32, count, 2)
    arrays = [(np.ones(count, np.float32), np.zeros(2 * count, np.float32)) for _ in range(2)]
    runs = [host.submit(rank, what, 0, *arrays[rank], priority=rank) for rank in range(2)]
    while host.word(0, 0, 0)[0] & 255 < TAKEN:  # the first is done, but for the second
        assert runs[0].state == PENDING
    if ended_by == "cancelled":
        assert not host.engines[0].cancel(runs[0]) or runs[1].state == DONE
    else:
        host.boards[0].lose()
        assert runs[0].state != LOST or runs[1].state != PENDING
    assert host.wait(1, runs[1]) in (DONE, LOST)
    assert host.wait(0, runs[0]) != PENDING
    host.close()


def garbage(host: Host, rng: random.Random, number: int) -> None:
    """Write over a word of a row, of any rank: with any bits, or with others that mean something."""
    rank, index = rng.randrange(host.size), rng.randrange(4)
    told = (number + 1) << 8
    means = [
        [told | rng.choice([0, 1, 2, 3, 255]), 0],
        [rng.randrange(0, 8192), BOARD_BYTES + rng.randrange(1 << 16), len(host.segments[0]) - rng.randrange(64), 8],
        [told | rng.randrange(8), (number + rng.randrange(100)) << 8],
        [BOARD_BYTES + rng.randrange(1 << 16), PRIVATE_BIT | rng.randrange(1 << 12), len(host.segments[0])],
    ]
    host.word(rank, number, index)[0] = rng.choice([*means[index], rng.getrandbits(64)])


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_garbage_while_operations_are_under_way(seed: int) -> None:
    """Ranks get wrong numbers, states, or no end; nothing beside their results is written, and nothing crashes."""
    rng, host, over = random.Random(seed), Host(3), threading.Event()
    if seed % 2:
        in_one_process(host)
    number = 0

    def write() -> None:
        own = random.Random(seed + 1)
        while not over.wait(own.choice([0.0, 1e-4])):
            garbage(host, own, max(0, number - own.randrange(2)))

    with running(threading.Thread(target=write)):
        for number in range(60):
            count = 3 * rng.choice([1, 2, 500, 6_000, LENT, 120_000])
            dtype = rng.choice([np.float32, np.float16, ml_dtypes.bfloat16, np.complex64])
            kind, op = rng.choice([("all_reduce", "sum"), ("reduce_scatter", "sum"), ("all_gather", None)])
            what = made(kind, op, dtype, count, 3)
            rooms = [np.full(int(np.prod(what.result_shape_at(rank))) + 2, 7, dtype) for rank in range(3)]
            xs = [np.ones(count, dtype) for _ in range(3)]
            runs = [host.submit(rank, what, number, xs[rank], rooms[rank][1:-1]) for rank in range(3)]
            for rank, run in enumerate(runs):
                if host.wait(rank, run, 0.005) == PENDING and not host.engines[rank].cancel(run):
                    host.wait(rank, run)
            if rng.randrange(8) == 0:
                host.boards[rng.randrange(3)].take_places(False)
            assert all(room[0] == room[-1] == 7 for room in rooms)
            assert all((x == 1).all() for x in xs)
        over.set()
    host.close()


# -- runs of an engine that are cancelled, or whose board is lost, in every phase --------------------------------------

LONG = 16 << 20  # elements of float32 that take a thread many pieces


def others_give(host: Host, number: int, value: float) -> None:
    """Post an input of the other ranks, in memory that all map."""
    for other in (1, 2):
        data = np.full(LENT, value, np.float32).tobytes()
        memoryview(host.segments[other])[BOARD_BYTES : BOARD_BYTES + len(data)] = data
        post(host, other, number, MAPPED, BOARD_BYTES)


def until_said(host: Host, run: Any, phase: int) -> None:
    while host.word(0, 0, 0)[0] & 255 < phase:
        assert host.wait(0, run, 0.001) == PENDING


def without_a_row(host: Host, out: np.ndarray[Any, Any]) -> Any:
    what = made("broadcast", None, np.float32, 6, 3)
    x = np.ones(6, np.float32)
    ahead = [host.submit(0, what, number, x, x) for number in range(64)]
    assert {run.state for run in ahead} == {DONE}
    return host.submit(0, what, 64, out[:6], out[:6])


def meeting(host: Host, out: np.ndarray[Any, Any]) -> Any:
    run = host.submit(0, made("all_reduce", "sum", np.float32, LENT, 3), 0, np.ones(LENT, np.float32), out)
    until_said(host, run, ARRIVED)
    return run


def slicing(host: Host, out: np.ndarray[Any, Any]) -> Any:
    run = meeting(host, out)
    others_give(host, 0, 1.0)
    until_said(host, run, SLICED)
    return run


def leaving(host: Host, out: np.ndarray[Any, Any]) -> Any:
    x = np.ones(3 * 360_000, np.float32)  # too long to be copied: the others have to take it
    run = host.submit(0, made("reduce_scatter", "sum", np.float32, len(x), 3), 0, x, np.zeros(360_000, np.float32))
    for other in (1, 2):
        post(host, other, 0, MAPPED, BOARD_BYTES)
    until_said(host, run, TAKEN)
    return run


def taking(host: Host, out: np.ndarray[Any, Any]) -> Any:
    for other in (1, 2):
        post(host, other, 0, 3, out.ctypes.data)
    target = np.zeros(3 * LONG, np.float32)
    return host.submit(0, made("all_gather", None, np.float32, LONG, 3), 0, np.ones(LONG, np.float32), target)


PHASES = [without_a_row, meeting, slicing, leaving]


@pytest.mark.everyday(8)
@pytest.mark.parametrize("lost", [False, True], ids=["cancelled", "lost"])
@pytest.mark.parametrize("begin", PHASES, ids=lambda begin: begin.__name__)
def test_a_run_that_waits_ends_at_once(host: Host, begin: Callable[..., Any], lost: bool) -> None:
    out, found = np.zeros(LENT, np.float32), list[int]()
    run = begin(host, out)
    with running(*(threading.Thread(target=lambda: found.append(host.wait(0, run))) for _ in range(2))):
        if lost:
            host.boards[0].lose()
        else:
            assert host.engines[0].cancel(run)
    # A rank that only gives has what it needs, with a row: it is done whether or not others come.
    assert found == [DONE if lost and begin is without_a_row else LOST if lost else CANCELLED] * 2
    others_give(host, 0, 5.0)
    assert host.wait(0, run, 0.0) == found[0]
    assert not out.any()


def test_a_run_that_a_thread_works_on_ends_with_its_piece(host: Host) -> None:
    out = np.ones(LONG, np.float32)
    run = taking(host, out)
    assert not host.engines[0].cancel(run) or run.state == CANCELLED
    assert host.wait(0, run) == CANCELLED
    assert host.engines[0].cancel(run)


def test_rows_of_runs_that_were_cancelled_are_used_again(host: Host) -> None:
    what, x, out = made("all_reduce", "sum", np.float32, 6, 3), np.ones(6, np.float32), np.zeros(6, np.float32)
    for number in range(200):
        cancelled = number % 3 == 0
        outs = [np.zeros(6, np.float32) for _ in range(3)]
        runs = [host.submit(rank, what, number, x, outs[rank]) for rank in range(2 if cancelled else 3)]
        if cancelled:
            assert all(host.engines[rank].cancel(run) for rank, run in enumerate(runs))
            runs.append(host.submit(2, what, number, x, out))
            assert host.wait(2, runs[2]) == DONE  # the others have given
        else:
            assert [host.wait(rank, run) for rank, run in enumerate(runs)] == [DONE] * 3
            assert all((each == 3).all() for each in outs)

"""Rows of boards with signatures: another call is noticed by the ranks that wait for it, and rows can be looked at."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")

from overlap.collectives.call import Call

from .test_collectives_of_engines import DONE, MISMATCH, PENDING, Host, _table, made


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(3)
    yield host
    host.close()


def begin(host: Host, rank: int, what: Call, number: int, call: int, count: int = 6, text: bytes = b"") -> object:
    """Begin a rank's end of an operation; the call is the upper part of its tag, and of its fingerprint."""
    x, out = np.ones(count, np.float32), np.zeros(int(np.prod(what.result_at(rank))), np.float32)
    tag = call << 24 | (number & 0xFFFF) << 8
    args = (host.boards[rank], _table(what, rank), (x, out), number, tag, x.ctypes.data, out.ctypes.data, 0, 0, 0)
    return host.engines[rank].submit(*args, call << 40, text or b"call %d" % call)


ALL_REDUCE = made("all_reduce", "sum", np.float32, 6, 3)
BROADCAST = made("broadcast", None, np.float32, 6, 3)


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
        args = (host.boards[rank], _table(ALL_REDUCE, rank), None, 0, call << 24, x.ctypes.data, out.ctypes.data)
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

"""`run(check="nan")`: the first rank to send a NaN or an infinity is named, before anybody has added it to anything."""

import re
import threading
from collections.abc import Callable
from inspect import currentframe
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import trio

import overlap
from overlap.runtime.checking import first_not_finite_index
from tests.errors import error_from

from .companies import run_far
from .worlds import TIMEOUT_S, failure_of

R = overlap.Rank
Array = npt.NDArray[np.generic]
NARROW = [
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
FLOATS = [
    *(np.dtype(name) for name in ("float16", "float32", "float64", "longdouble", "complex64", "complex128")),
    *(np.dtype(getattr(ml_dtypes, name)) for name in NARROW),
]
OTHERS = [
    *(np.dtype(name) for name in ("bool", "int8", "uint16", "int64", "uint64")),
    *(np.dtype(getattr(ml_dtypes, name)) for name in ("int4", "uint4", "float4_e2m1fn", "float6_e2m3fn")),
]


def line(offset: int) -> str:
    """Where the caller's line is, so many lines further on."""
    frame = currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{Path(__file__).relative_to(Path.cwd())}:{frame.f_back.f_lineno + offset}"


def test_the_rank_the_operation_the_step_and_the_line_are_named(clock: str) -> None:
    place = []

    async def main(rank: R) -> None:
        for step in range(3):
            with rank.step(step):
                grad = np.ones((4, 8), np.float32)
                if (rank.rank, step) == (1, 2):
                    grad[2, 7] = grad[3, 0] = np.nan
                place.append(line(1))
                await rank.all_reduce(grad, name="gradients")

    failure = failure_of(overlap.run, main, ranks=3, clock=clock, timeout_s=TIMEOUT_S, check="nan")
    error = failure.cause
    assert isinstance(error, overlap.NonFiniteError)
    assert str(error) == (
        f"rank 1 was about to send nan by gradients #2 on group 'world' at {place[0]} in step 2: element [2, 7] of "
        "float32 (4, 8), the first of 2 that are not finite, is nan; no rank has received it: look for its cause in "
        "the computes of this rank"
    )
    assert (error.rank, error.seq, error.step, error.call_site) == (1, 2, 2, place[0])
    assert (error.index, error.value, error.count) == ((2, 7), "nan", 2)
    assert failure.rank == 1
    assert str(failure).startswith(f"rank 1 failed at {Path(__file__).name}:")
    assert str(error) in str(failure)


def test_the_line_is_named_where_others_fail_of_it_first() -> None:
    async def main(rank: R) -> None:
        ended = rank.all_reduce(np.full((), np.inf if rank.rank == 1 else 1.0))
        if rank.rank == 1:
            await trio.sleep_forever()
        await ended

    failure = failure_of(overlap.run, main, ranks=3, timeout_s=TIMEOUT_S, check="nan")
    assert failure.rank == 1
    issued = main.__code__.co_firstlineno + 1
    assert str(failure).startswith(f"rank 1 failed at {Path(__file__).name}:{issued}: NonFiniteError: ")


def test_others_are_told_whose_it_was() -> None:
    """And may go on, if their programs catch it."""

    async def main(rank: R) -> str:
        try:
            await rank.all_reduce(np.full((), np.inf if rank.rank == 0 else 1.0))
        except (overlap.NonFiniteError, overlap.PeerFailedError) as error:
            assert await rank.all_gather(np.array([rank.rank])) is not None
            return f"{type(error).__name__}: {error}"
        return "nothing"

    mine, theirs = overlap.run(main, ranks=2, timeout_s=TIMEOUT_S, check="nan")
    assert re.fullmatch(
        r"NonFiniteError: (rank 0 was about to send inf by all_reduce #0 on group 'world' at \S+:\d+: the value of "
        r"float64 \(\) is inf; no rank has received it: look for its cause in the computes of this rank)",
        mine,
    )
    assert re.fullmatch(
        r"PeerFailedError: rank 0 failed before all_reduce #0 on group 'world' \(\S+:\d+\): " + re.escape(mine), theirs
    )


def test_between_processes() -> None:
    async def main(rank: R) -> str:
        x = np.full(5, rank.rank, np.float32)
        if rank.rank == 3:
            x[4] = -np.inf
        return str(await error_from((overlap.NonFiniteError, overlap.PeerFailedError), rank.all_reduce(x)))

    for told in run_far(main, 2, 2, check="nan"):
        assert "rank 3 was about to send -inf by all_reduce #0 on group 'world' at " in told
        assert "element [4] of float32 (5,) is -inf; no rank has received it" in told


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_type_that_can_say_it(dtype: np.dtype[np.generic]) -> None:
    async def main(rank: R, value: Array) -> None:
        await rank.all_gather(value)

    for place in (0, 6, 99_999):
        x = np.ones(100_000, dtype)
        assert first_not_finite_index(x) is None
        x[place] = np.array(np.nan).astype(dtype)
        assert first_not_finite_index(x) == place
        assert first_not_finite_index(x[place : place + 1]) == 0
    failure = failure_of(overlap.run, main, x, ranks=2, timeout_s=TIMEOUT_S, check="nan")
    assert isinstance(failure.cause, overlap.NonFiniteError)
    assert f"element [99999] of {dtype.name} (100000,) is " in str(failure)
    assert first_not_finite_index(np.ones(0, dtype)) is None


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_types_that_cannot_say_it_are_not_looked_at(dtype: np.dtype[np.generic]) -> None:
    assert first_not_finite_index(np.arange(3).astype(dtype)) is None


def test_infinities_and_either_part_of_a_complex_number() -> None:
    assert first_not_finite_index(np.array([1, np.inf])) == 1
    assert first_not_finite_index(np.array([[0, 1], [2, -np.inf]], np.float16)) == 3
    assert first_not_finite_index(np.array([1, 1 + 1j * np.nan], np.complex64)) == 1
    assert first_not_finite_index(np.array([np.inf], ml_dtypes.float8_e5m2)) == 0


OPERATIONS: dict[str, Callable[[R, Array], object]] = {
    "all_reduce": lambda rank, x: rank.all_reduce(x, op="max"),
    "reduce_scatter": lambda rank, x: rank.reduce_scatter(x),
    "all_gather": lambda rank, x: rank.all_gather(x),
    "all_to_all": lambda rank, x: rank.all_to_all(x),
    "uneven all_to_all": lambda rank, x: rank.all_to_all(x, counts=[[1, 1], [1, 1]]),
    "reduce": lambda rank, x: rank.reduce(x, root=0),
    "gather": lambda rank, x: rank.gather(x, root=0),
    "broadcast": lambda rank, x: rank.broadcast(x, root=1),
    "scatter": lambda rank, x: rank.scatter(x if rank.rank else None, root=1),
    "permute": lambda rank, x: rank.permute(x, [(1, 0)]),
    "send": lambda rank, x: rank.send(x, 0) if rank.rank else rank.recv(x.copy(), 1),
    "any source": lambda rank, x: rank.send(x, 0) if rank.rank else rank.recv(x.copy(), None),
    "future": lambda rank, x: rank.all_reduce(rank.compute(np.add, x, 0)),
    "not contiguous": lambda rank, x: rank.all_reduce(x[::-1]),
    "stream": lambda rank, x: rank.all_reduce(x, stream=rank.stream("other")),
    "axis": lambda rank, x: rank.mesh(a=2)["a"].all_reduce(x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_looks_at_what_leaves(name: str) -> None:
    async def main(rank: R) -> None:
        x = np.array([1, np.nan if rank.rank else 2.0])
        await OPERATIONS[name](rank, x)  # type: ignore[misc]

    failure = failure_of(overlap.run, main, ranks=2, timeout_s=TIMEOUT_S, check="nan")
    assert isinstance(failure.cause, overlap.NonFiniteError)
    assert failure.rank == 1


def test_what_does_not_leave_is_not_looked_at() -> None:
    """A rank's array for the result of a broadcast, what nobody is sent by a permute, and what `out` holds."""

    async def main(rank: R) -> list[float]:
        bad = np.full(2, np.nan)
        x = bad if rank.rank else np.ones(2)
        got = [await rank.broadcast(x.copy(), root=0), await rank.permute(x.copy(), [(0, 1)])]
        got.append(await rank.all_reduce(np.ones(2), out=bad))
        return [float(one[0]) for one in got]

    assert overlap.run(main, ranks=2, timeout_s=TIMEOUT_S, check="nan") == [[1, 0, 2], [1, 1, 2]]


def test_the_step_is_that_of_the_call() -> None:
    """Also when the input comes, or its turn, in a later step, and in threads."""
    released = threading.Event()

    def computed(when: threading.Event) -> Array:
        when.wait(TIMEOUT_S)
        return np.array([np.nan])

    async def main(rank: R) -> None:
        with rank.step(6):
            future = rank.all_reduce(rank.compute(computed, released))
        with rank.step(7):
            released.set()
            await future

    failure = failure_of(overlap.run, main, ranks=1, timeout_s=TIMEOUT_S, check="nan")
    assert getattr(failure.cause, "step", None) == 6

    async def threaded(rank: R) -> None:
        with rank.step(8):
            future = await trio.to_thread.run_sync(rank.all_reduce, np.array([np.nan]))
        await future

    failure = failure_of(overlap.run, threaded, ranks=1, timeout_s=TIMEOUT_S, check="nan")
    assert getattr(failure.cause, "step", None) == 8


def test_arrays_are_given_back() -> None:
    async def main(rank: R) -> None:
        x = np.array([np.nan])
        with pytest.raises(overlap.NonFiniteError):
            await rank.all_reduce(x)
        x[0] = 1

    overlap.run(main, ranks=1, timeout_s=TIMEOUT_S, check="nan")


def test_nothing_is_in_the_way_of_who_does_not_ask() -> None:
    async def main(rank: R) -> bool:
        assert np.isnan(await rank.all_reduce(np.array([np.nan])))
        return rank.world._messages._inbox.shared.intercept is None

    assert overlap.run(main, ranks=2, timeout_s=TIMEOUT_S) == [True, True]


def test_the_variable_says_it_and_nothing_else_can_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(rank: R) -> None:
        await rank.all_reduce(np.array([np.nan]))

    with pytest.raises(overlap.UsageError, match=r"^check: expected 'nan', got 'inf'$"):
        overlap.run(main, check="inf")
    with pytest.raises(overlap.UsageError, match=r"^check: with shapes_only, arrays have no data to check; leave"):
        overlap.run(main, check="nan", clock=overlap.Virtual(shapes_only=True))
    monkeypatch.setenv("OVERLAP_CHECK", "nan")
    failure = failure_of(overlap.run, main, ranks=2)
    assert isinstance(failure.cause, overlap.NonFiniteError)
    monkeypatch.setenv("OVERLAP_CHECK", "all")
    with pytest.raises(overlap.UsageError, match=r"^check: expected 'nan', got 'all' \(check: OVERLAP_CHECK\)$"):
        overlap.run(main, ranks=2)


@pytest.mark.parametrize("check", ["nan", None])
def test_an_input_that_another_view_writes_to_in_flight_fails(check: str | None) -> None:
    """Without the check nothing is looked at; with it the rank, the operation and the line are named."""

    async def main(rank: overlap.Rank) -> None:
        x = np.ones(4)
        view = x[:2]  # locks of x do not reach it
        if rank.rank == 1:
            await rank.recv(np.empty(1), 0)
        summed = rank.all_reduce(x)
        if rank.rank == 0:
            view[0] = 2.0
            await rank.send(np.ones(1), 1)
        await summed

    if check is None:
        overlap.run(main, ranks=2, timeout_s=TIMEOUT_S)
        return
    failure = failure_of(overlap.run, main, ranks=2, check=check, timeout_s=TIMEOUT_S)
    at = f"tests/runtime/test_not_finite.py:{main.__code__.co_firstlineno + 5}"
    assert str(failure.cause) == (
        f"x: was changed while all_reduce #0 on group 'world' ({at}) was reading it; await that first"
    )


def test_a_sum_in_place_is_no_change() -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        x = np.ones(4)
        await rank.all_reduce(x, out=x)
        await rank.barrier()
        return [float(each) for each in x]

    assert overlap.run(main, ranks=2, check="nan", timeout_s=TIMEOUT_S) == [[2.0] * 4] * 2

"""What strangers did: futures of other worlds, arrays that are being written, names and lists that are none."""

import asyncio
import inspect
import re
import threading

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import overlap
from overlap import UsageError, parallel
from overlap.errors import shorten_line
from overlap.ranklist import format_rank_list, parse_rank_list
from tests.errors import error_of

from .worlds import failure_of, run

# -- what strangers did: futures of other worlds, arrays that are being written, errors that cannot speak --------------

R = overlap.Rank


@pytest.mark.parametrize("how", ["await", "reduce"])
def test_a_future_of_another_world_is_refused_where_it_is_used(how: str) -> None:
    futures: list[overlap.Future[None]] = []
    begun, over = threading.Event(), threading.Event()
    results: list[object] = []

    async def owner(rank: R) -> str:
        futures.append(rank.compute(over.wait, 30))
        begun.set()
        await futures[0]
        return "mine"

    async def stranger(rank: R) -> None:
        if how == "await":
            await futures[0]
        else:
            await rank.all_reduce(futures[0])

    thread = threading.Thread(target=lambda: results.extend(overlap.run(owner, ranks=1)))
    thread.start()
    begun.wait(30)
    try:
        failure = failure_of(run, stranger, 1)
        assert isinstance(failure.cause, overlap.UsageError)
        advice = "call `await trio.to_thread.run_sync(future.result)`"
        assert f"compute 'wait' belongs to another world; {advice}" in str(failure)
    finally:
        over.set()
        thread.join()
    assert results == ["mine"]


def test_an_array_that_is_being_written_is_not_read() -> None:
    refused = trio.Event()

    async def main(rank: R) -> list[str]:
        x, told = np.ones(4), []
        if rank.rank == 0:
            first = rank.all_reduce(x, out=x)  # waits for rank 1
            for use in (lambda: rank.send(x, 1), lambda: rank.compute(np.sum, [x])):
                told.append(str(error_of(overlap.UsageError, use)))
            total = rank.compute(np.sum, first)  # its future may be passed at once
            refused.set()
            return [*told, str(float(await total))]
        await refused.wait()
        await rank.all_reduce(x, out=x)
        return []

    rule = "an operation that has not ended still writes this array; pass its future"
    assert run(main, 2)[0] == [f"x: {rule}", f"compute 'sum': {rule}", "8.0"]


def test_an_error_without_a_text_still_names_its_rank() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    async def main(rank: R) -> None:
        if rank.rank == 1:
            raise Mute
        await rank.barrier()

    failure = failure_of(run, main, 2)
    assert failure.rank == 1
    assert "Mute: (its text cannot be had: RuntimeError)" in str(failure)


@pytest.mark.parametrize(
    ("limit", "kept"), [(0, ("", "")), (1, ("a", "")), (2, ("a", "h")), (5, ("abc", "gh")), (7, ("abcd", "fgh"))]
)
def test_a_long_line_keeps_as_many_characters_as_asked(limit: int, kept: tuple[str, str]) -> None:
    assert shorten_line("abcdefgh", limit) == f" ... {8 - limit} characters left out ... ".join(kept)
    assert shorten_line("abcdefgh", 8) == "abcdefgh"


def test_how_long_a_thread_waits() -> None:
    def wait(rank: R) -> list[str]:
        slow, told = rank.all_reduce(np.ones(1)), []
        for timeout in ("x", float("nan"), -1):
            with pytest.raises(overlap.UsageError, match="timeout: expected a number of seconds") as caught:
                slow.result(timeout)  # type: ignore[arg-type]
            told.append(str(caught.value).rpartition(" ")[2])
        return [*told, str(slow.result(float("inf"))), str(slow.result(1e30))]

    async def main(rank: R) -> list[str]:
        return await rank.compute(wait, rank)

    assert run(main, 2) == [["'x'", "nan", "-1", "[2.]", "[2.]"]] * 2


def test_a_task_that_is_no_async_function_is_told_by_what_it_returned() -> None:
    def plain() -> int:
        return 7

    async def main(rank: R) -> None:
        await rank.spawn(plain)  # type: ignore[arg-type]

    failure = failure_of(run, main, 1)
    assert isinstance(failure.cause, overlap.UsageError)
    assert str(failure.cause) == "fn: expected an async function, but plain returned 7"


# -- hints -------------------------------------------------------------------------------------------------------------


def notes_of(main):
    return getattr(failure_of(overlap.run, main, ranks=1).__cause__, "__notes__", [])


@pytest.mark.parametrize(
    ("name", "meant"),
    [("size", "world_size"), ("get_rank", "rank"), ("allreduce", "all_reduce"), ("reduce_scater", "reduce_scatter")],
)
def test_a_misspelt_attribute_of_a_rank_is_told_with_the_right_one(name, meant):
    async def main(rank):
        getattr(rank, name)

    assert notes_of(main) == [f"did you mean {meant}?"]


@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    "use",
    [
        lambda rank: rank._private,
        lambda rank: rank.nothing_like_it_at_all,
        lambda rank: rank.all_reduce(np.ones(3)).shape,  # its message says what to do; its name is right
        lambda rank: np.ones(3, shap=2),  # an error of others
    ],
)
def test_other_mistakes_have_no_hint(use):
    async def main(rank):
        use(rank)

    assert notes_of(main) == []


@pytest.mark.parametrize(("argument", "hint"), [("operation", "did you mean op=?"), ("async_op", "no async_op")])
def test_a_misspelt_argument_of_a_call_is_told_with_the_right_one(argument, hint):
    async def main(rank):
        await rank.all_reduce(np.ones(3), **{argument: "max"})

    (note,) = notes_of(main)
    assert note.endswith(hint)


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: rank.send(),
        lambda rank: rank.world.all_reduce(),
        lambda rank: rank.broadcast_object(of=1),
        lambda rank: rank.gather(),
        lambda rank: parallel.DataParallel(rank, {"w": np.ones(2)}, optimizer=parallel.SGD(0.1)).reduce(),
        lambda rank: parallel.DataParallel(rank, {"w": np.ones(2)}, optimizer=parallel.SGD(0.1)).step(1),
    ],
)
def test_an_error_of_a_call_names_no_class_that_users_do_not_know(call):
    async def main(rank):
        return str(error_of(TypeError, call, rank))

    assert re.match(r"(send|all_reduce|broadcast_object|gather|reduce|step)\(\) ", overlap.run(main, ranks=1)[0])


def test_sleeping_as_asyncio_does_is_told_with_trio():
    async def main(rank):
        await asyncio.sleep(1)

    (note,) = notes_of(main)
    assert "trio.sleep" in note


@pytest.mark.parametrize("call", [overlap.run, overlap.connect])
def test_a_misspelt_argument_at_the_door_is_told_with_the_right_one(call):
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) .* 'time_out'; did you mean timeout_s="):
        call(lambda rank: None, time_out=2)


def test_arguments_of_other_libraries_are_known():
    with pytest.raises(TypeError, match="did you mean ranks="):
        overlap.run(lambda rank: None, num_ranks=2)


def test_doors_keep_their_signatures():
    assert "timeout_s" in inspect.signature(overlap.run).parameters
    assert "store" in inspect.signature(overlap.connect).parameters
    assert overlap.run.__doc__


def test_a_program_of_asyncio_is_told_its_doors():
    async def main(rank):
        return rank.rank

    with pytest.raises(UsageError, match=r"no Trio program runs here; use overlap\.run, or"):
        asyncio.run(overlap.run_async(main, ranks=1))
    assert trio.run(overlap.run_async, main) == [0, 1]


def test_a_name_of_another_room_is_told() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'overlap' .* 'Sharded'; did you mean overlap\.parallel\.Sharded\?$"
    ):
        _ = overlap.Sharded
    with pytest.raises(AttributeError, match=r"'Rangs'$"):
        _ = overlap.Rangs


# -- ranklist ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), min_size=1))
def test_lists_read_back_in_their_order(ranks):
    assert parse_rank_list(format_rank_list(ranks)) == tuple(ranks)


def test_runs_are_shortened():
    assert format_rank_list([0, 1, 2, 5, 7, 8, 3]) == "0-2, 5, 7-8, 3"
    assert format_rank_list([]) == ""


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "2-", "3-1", "1 2", "\u0663", "1-2-3"])
def test_what_is_not_a_list_is_named(text):
    with pytest.raises(ValueError, match="is not a rank or a range such as 3-5"):
        parse_rank_list(text)


@pytest.mark.parametrize("text", ["0-999999999", "5, 0-999999", "0-500000, 0-500000"])
def test_a_slip_does_not_fill_the_memory(text):
    with pytest.raises(ValueError, match="makes more than 1000000 ranks"):
        parse_rank_list(text)

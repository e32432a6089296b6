"""Operations that take too long, groups that are given up, and whose line is to blame."""

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from tests.errors import error_from, error_of

from .worlds import run

R = overlap.Rank

PATHS = ("direct", "ring", "wire")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_operation_that_has_not_ended_in_time_fails(path: str) -> None:
    async def main(rank: R) -> str:
        if rank.rank == 1:
            await given_up.wait()
            try:
                await rank.all_reduce(np.ones(2))
            except overlap.PeerFailedError as error:
                return str(error).split(" (")[0]
        try:
            await rank.all_reduce(np.ones(2), timeout_s=0.01)
        except overlap.DeadlineError as error:
            given_up.set()
            return f"{str(error).split(' (')[0]}{str(error).split(')')[1]}"
        return "no"

    given_up = trio.Event()
    first, second = run(main, 2, path=path)
    assert first == "all_reduce #0 on group 'world' has not ended within timeout_s=0.01: it waits for rank 1"
    assert second == "rank 0 gave up: all_reduce #0 on group 'world'"


def test_what_ends_in_time_is_none_of_its_business(path: str) -> None:
    async def main(rank: R) -> float:
        futures = [rank.all_reduce(np.ones(1), timeout_s=1000.0 + k % 2) for k in range(20)]
        return float(sum([(await future)[0] for future in futures]))

    assert run(main, 2, path=path) == [40.0, 40.0]


def test_after_a_deadline_other_groups_and_streams_go_on(path: str) -> None:
    async def main(rank: R) -> list[Any]:
        pair, found = rank.group([0, 1], name="pair"), []
        rank.stream("other")
        if rank.rank == 0:
            with pytest.raises(overlap.DeadlineError):
                await pair.barrier(timeout_s=0.01)
            given_up.set()
        await given_up.wait()
        try:
            await pair.barrier()
        except overlap.PeerFailedError as error:
            found.append(error.culprit)
        found.append(float((await pair.all_reduce(np.ones(1), stream="other"))[0]))
        found.append(float((await rank.all_reduce(np.ones(1)))[0]))
        return found

    given_up = trio.Event()
    assert run(main, 2, path=path) == [[0, 2.0, 2.0]] * 2


def test_a_message_that_does_not_come_in_time(path: str) -> None:
    async def main(rank: R) -> list[Any]:
        if rank.rank == 1:
            await given_up.wait()
            with pytest.raises(overlap.PeerFailedError):
                await rank.send(np.ones(1), 0, tag=3)
            await rank.send(np.full(1, 4.0), 0, tag=4)
            return []
        error = await error_from(TimeoutError, rank.recv(((1,), "float64"), 1, tag=3, timeout_s=0.01))
        with pytest.raises(overlap.DeadlineError):
            await rank.recv(((1,), "float64"), None, tag=5, timeout_s=0.01)
        given_up.set()
        return [str(error).split(" (")[0], float((await rank.recv(((1,), "float64"), 1, tag=4))[0])]

    given_up = trio.Event()
    assert run(main, 2, path=path)[0] == ["recv #0 from rank 1 with tag 3 on group 'world'", 4.0]


def test_a_receive_from_any_rank_keeps_its_deadline_when_it_has_chosen_a_message() -> None:
    """The message takes 107 ms, and the receive has 5 ms left when it comes."""

    async def main(rank: R) -> float:
        if rank.rank == 0:
            with pytest.raises(overlap.DeadlineError, match=r"recv #0 from rank 1 on group 'world'"):
                await rank.recv(((1 << 27,), "float64"), None, timeout_s=0.5)
            return trio.current_time()
        await trio.sleep(0.495)
        await rank.send(overlap.shape_only((1 << 27,), "float64"), 0)
        return 0.0

    assert overlap.run(main, ranks=2, clock=overlap.Virtual(shapes_only=True)) == [0.5, 0.0]


def test_deadlines_are_in_virtual_time() -> None:
    async def main(rank: R) -> float:
        if rank.rank == 0:
            with pytest.raises(overlap.DeadlineError):
                await rank.all_reduce(np.ones(1), timeout_s=3600.0)
        else:
            await trio.sleep(7200)
        return rank.now_ns() / 1e9

    assert overlap.run(main, ranks=2, clock="virtual") == [3600.0, 7200.0]


def test_a_deadline_a_little_after_its_nanosecond_expires() -> None:
    """As a sum of doubles, it is 0.0010040000000000001 s."""

    async def main(rank: R) -> int:
        if rank.rank == 0:
            await trio.sleep(4e-6)
            with pytest.raises(overlap.DeadlineError):
                await rank.barrier(timeout_s=1e-3)
        else:
            await trio.sleep(1)
        return rank.now_ns()

    assert overlap.run(main, ranks=2, clock="virtual") == [1_004_000, 1_000_000_000]


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), "2", True])
def test_a_time_that_cannot_go_by(wrong: Any) -> None:
    async def main(rank: R) -> str:
        return str(error_of(overlap.UsageError, rank.barrier, timeout_s=wrong))

    assert run(main, 1) == [f"timeout_s: expected a positive number of seconds, or None, got {wrong!r}"]


def test_an_aborted_group_fails_and_the_world_lives(path: str) -> None:
    async def main(rank: R) -> list[Any]:
        pair = rank.group([0, 1], name="pair")
        if rank.rank == 0:
            pending = [pair.all_reduce(np.ones(2)), pair.recv(((1,), "float64"), 1), pair.recv(((1,), "float64"), None)]
            pair.abort(ValueError("no more"))
            aborted.set()
        else:
            await aborted.wait()
            pending = [pair.all_reduce(np.ones(2)), pair.send(np.ones(1), 0)]
        texts = set()
        for future in pending:
            error = await error_from(overlap.GroupAbortedError, future)
            texts.add(f"{error} {error.culprit}")
        again = rank.group([0, 1], name="again")
        return [*texts, float((await again.all_reduce(np.ones(1)))[0]), float((await rank.all_reduce(np.ones(1)))[0])]

    aborted = trio.Event()
    expected = "group 'pair' was aborted by rank 0: ValueError: no more 0"
    assert run(main, 2, path=path) == [[expected, 2.0, 2.0]] * 2


def test_what_an_abort_cuts_off_fails_no_rank_that_does_not_ask(path: str) -> None:
    async def main(rank: R) -> float:
        pair = rank.group([0, 1])
        if rank.rank == 0:
            pair.all_reduce(np.ones(2))
            pair.abort()
        return float((await rank.all_reduce(np.ones(1)))[0])

    assert run(main, 2, path=path) == [2.0, 2.0]


def test_whoever_asks_on_behalf_of_others_names_their_line() -> None:
    def adapter(rank: R, frame: FrameType) -> Any:
        return rank.all_reduce(np.ones(1 + rank.rank), call_site=frame)

    async def main(rank: R) -> str:
        if rank.rank == 0:
            future = rank.all_reduce(np.ones(1), call_site="train.py:41")
        else:
            future = adapter(rank, sys._getframe())
        error = await error_from(overlap.CollectiveMismatchError, future)
        return " ".join(site.rpartition("/")[2] for site in sorted(error.call_sites))

    line = main.__code__.co_firstlineno + 4
    assert run(main, 2) == [f"test_deadlines.py:{line} train.py:41"] * 2


@pytest.mark.parametrize("wrong", ["train.py", ":3", "a:b"])
def test_a_place_that_is_none(wrong: str) -> None:
    async def main(rank: R) -> str:
        return str(error_of(overlap.UsageError, rank.barrier, call_site=wrong))

    assert run(main, 1) == [f'call_site: expected a frame or "file:line", got {wrong!r}']


def test_what_others_compute_is_in_the_timeline() -> None:
    async def main(rank: R) -> list[Any]:
        with rank.step(3):
            rank.record("forward", 10, 25)
        error = error_of(overlap.UsageError, rank.record, "backward", 25, 10)
        spans = [(s.kind, s.lane, s.name, s.start_ns, s.end_ns, s.step) for s in rank.recorder.spans()]
        return [spans[0], str(error)]

    assert run(main, 1) == [
        [
            ("compute", "compute", "forward", 10, 25, 3),
            "record: end_ns 10 lies before start_ns 25; pass the start first",
        ]
    ]


def test_a_deadline_that_was_seen_is_enough_for_later_operations_that_fail_of_it(path: str) -> None:
    async def main(rank: R) -> str:
        with pytest.raises(overlap.DeadlineError):
            await rank.recv(((1,), float), src=1 - rank.rank, timeout_s=0.01)
        rank.recv(((1,), float), src=1 - rank.rank)  # nobody awaits it
        await rank.barrier()
        return "ended well"

    assert run(main, 2, path=path) == ["ended well"] * 2

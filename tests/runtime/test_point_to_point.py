"""send and recv: matched by source, destination and tag, in any order, with oneself too."""

from typing import Any

import numpy as np
import pytest
import trio

import overlap

from .companies import by_sockets, run_far
from .worlds import run

Array = np.ndarray


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (400_000,)])
def test_what_is_sent_arrives(shape: tuple[int, ...], path: str) -> None:
    async def main(rank: overlap.Rank) -> Array | None:
        if rank.rank == 0:
            assert await rank.send(np.full(shape, 7, np.float32), 1) is None
            return None
        return await rank.recv((shape, np.float32), 0)

    _, got = run(main, 2, path=path)
    assert (got.dtype, got.shape) == (np.float32, shape)
    assert (got == 7).all()


def test_recv_fills_the_array_it_is_given(path: str) -> None:
    async def main(rank: overlap.Rank) -> bool:
        x = np.arange(6.0).reshape(2, 3)
        if rank.rank == 0:
            await rank.send(x, 1)
            return True
        room = np.zeros((2, 3))
        got = await rank.recv(room, 0)
        return got is room and np.array_equal(room, x) and room.flags.writeable

    assert run(main, 2, path=path) == [True, True]


def test_tags_are_received_in_any_order(path: str) -> None:
    count = 20

    async def main(rank: overlap.Rank) -> list[int] | None:
        order = np.random.default_rng(rank.rank).permutation(count).tolist()
        if rank.rank == 0:
            for tag in order:
                rank.send(np.array([tag]), 1, tag)
            return None
        futures = {tag: rank.recv(((1,), np.int64), 0, tag) for tag in order}
        return [int((await futures[tag])[0]) for tag in range(count)]

    assert run(main, 2, path=path)[1] == list(range(count))


def test_one_tag_is_first_in_first_out(path: str) -> None:
    count = 30

    async def main(rank: overlap.Rank) -> list[int] | None:
        if rank.rank == 0:
            for i in range(count):
                rank.send(np.full(1 + i % 3 * 100_000, i), 1, tag=5)
            return None
        futures = [rank.recv(((1 + i % 3 * 100_000,), np.int64), 0, tag=5) for i in range(count)]
        return [int((await future)[-1]) for future in reversed(futures)]

    assert run(main, 2, path=path)[1] == list(reversed(range(count)))


def test_a_ring_of_sends_before_any_receive_does_not_deadlock(path: str) -> None:
    """More of them than a stream has room for: point to point takes no room in the window."""
    size, rounds = 4, 20

    async def main(rank: overlap.Rank) -> list[int]:
        right, left = (rank.rank + 1) % size, (rank.rank - 1) % size
        sends = [rank.send(np.full(3, rank.rank * 100 + i), right) for i in range(rounds)]
        for send in sends[: rounds // 2]:
            assert not send.done
        await trio.lowlevel.checkpoint()
        got = [int((await rank.recv(((3,), np.int64), left))[0]) for _ in range(rounds)]
        for send in sends:
            await send
        return got

    expected = [[(rank - 1) % size * 100 + i for i in range(rounds)] for rank in range(size)]
    assert run(main, size, path=path) == expected


def test_everybody_sends_to_everybody_and_to_itself(path: str) -> None:
    size = 3

    async def main(rank: overlap.Rank) -> list[int]:
        receives = [rank.recv(((1,), np.int64), src, tag=9) for src in reversed(range(size))]
        for dst in range(size):
            rank.send(np.array([rank.rank * 10 + dst]), dst, tag=9)
        return [int((await receive)[0]) for receive in reversed(receives)]

    assert run(main, size, path=path) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_both_directions_of_a_tag_are_apart(path: str) -> None:
    async def main(rank: overlap.Rank) -> int:
        other = 1 - rank.rank
        future = rank.recv(((1,), np.int64), other)
        await rank.send(np.array([rank.rank]), other)
        return int((await future)[0])

    assert run(main, 2, path=path) == [1, 0]


def test_ranks_of_a_group_and_futures(path: str) -> None:
    async def main(rank: overlap.Rank) -> int | None:
        if rank.rank == 1:
            return None
        group = rank.group([2, 0])
        if group.rank == 0:
            group.send(rank.compute(np.array, [42]), 1, tag=2**24 - 1)
            return None
        return int((await group.recv(((1,), np.int64), 0, tag=2**24 - 1))[0])

    assert run(main, 3, path=path) == [42, None, None]


def test_it_goes_past_collectives_that_wait(path: str) -> None:
    """Rank 1 enters the collectives, which fill the window, only after it has had the message."""

    async def main(rank: overlap.Rank) -> int:
        if rank.rank == 0:
            futures = [rank.all_reduce(np.array([1])) for _ in range(20)]
            await rank.send(np.array([5]), 1)
        else:
            assert int((await rank.recv(((1,), np.int64), 0))[0]) == 5
            futures = [rank.all_reduce(np.array([1])) for _ in range(20)]
        return sum([int((await future)[0]) for future in futures])

    assert run(main, 2, path=path) == [40, 40]


@pytest.mark.parametrize("tags", [300, pytest.param(98_000, marks=pytest.mark.slow)])
def test_receives_on_fresh_tags_that_are_given_up_leave_nothing(tags: int, clock: Any) -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        inbox = rank._communicators.inbox
        await rank.barrier()
        for tag in range(tags):
            receive = rank.recv(((1,), float), None if tag % 3 else 1 - rank.rank, tag)
            if tag % 2:
                assert receive.cancel()
            else:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await receive
        await rank.barrier()
        before = len(inbox.lanes) + len(inbox.queues)
        await rank.barrier()
        first = rank.recv(((1,), float), 1 - rank.rank)
        during = len(inbox.lanes)
        rank.send(np.ones(1), 1 - rank.rank)
        await first
        await rank.barrier()
        return [before, during > 0, len(inbox.lanes)]

    assert overlap.run(main, ranks=2, clock=clock) == [[0, True, 0]] * 2


@pytest.mark.parametrize("src", [0, None])
def test_a_held_receive_is_done_at_the_first_look_once_its_message_is_there(src: int | None, clock: Any) -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        if rank.rank == 0:
            await rank.barrier()
            rank.send(np.full(100_000, 3.0), 1)
            await rank.barrier()
            await rank.barrier()
            return []
        held = rank.recv(((100_000,), float), src)
        with trio.CancelScope() as scope:
            scope.cancel()
            await held
        assert not held.done
        await rank.barrier()
        await rank.barrier()  # the message is there
        assert held.done
        got = await held
        await rank.barrier()
        return [float(got.sum()), float(held.src or 0)]

    assert overlap.run(main, ranks=2, clock=clock)[1] == [300_000.0, 0.0]


def test_a_lane_in_use_keeps_its_numbers_where_those_of_others_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap.runtime.inbox._MOST_IDLE_LANES", 4)

    async def main(rank: overlap.Rank) -> list[int]:
        async def message(tag: int) -> int:
            x = np.ones(1)
            future = rank.send(x, 1, tag=tag) if rank.rank == 0 else rank.recv(x, 0, tag=tag)
            await future
            return future.seq

        seqs = [await message(0) for _ in range(3)]
        open_lane = rank.recv(np.empty(1), 0, tag=0) if rank.rank == 1 else None
        for tag in range(1, 12):
            await message(tag)
        await rank.barrier()
        if open_lane is None:
            await rank.send(np.ones(1), 1, tag=0)
        else:
            await open_lane
            seqs += [open_lane.seq, await message(0)]
        if rank.rank == 0:
            await message(0)
        return seqs

    assert run_far(main, 2, 1, wires=by_sockets)[1] == [0, 1, 2, 3, 4]

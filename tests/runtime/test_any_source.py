"""Receives that name no source, and messages of many tags that leave nothing behind."""

import gc
from contextlib import suppress

import numpy as np
import pytest
import trio

import overlap
from overlap.runtime.lane import Lane
from transports import NeuronLink, Recording

from .companies import FAR, Company, Wires, by_shared_memory, by_sockets, in_memory, run_far, world
from .worlds import TIMEOUT_S, failure_of, run

R = overlap.Rank
HERE = "tests/runtime/test_any_source.py"
LIKE = ((1,), "float64")


async def serve(rank: R) -> list[tuple[int | None, float]]:
    """Rank 0 answers whoever asks; each of the others asks three times."""
    if rank.rank == 0:
        served = []
        for _ in range(3 * (rank.world_size - 1)):
            asked = rank.recv(LIKE, None, tag=1)
            value = float((await asked)[0])
            assert asked.src is not None
            await rank.send(np.array([value + 0.5]), asked.src, tag=2)
            served.append((asked.src, value))
        return sorted(served)
    for turn in range(3):
        await rank.send(np.array([10.0 * rank.rank + turn]), 0, tag=1)
        answer = await rank.recv(LIKE, 0, tag=2)
        assert answer[0] == 10.0 * rank.rank + turn + 0.5
    return []


def expected(size: int) -> list[tuple[int, float]]:
    return [(rank, 10.0 * rank + turn) for rank in range(1, size) for turn in range(3)]


@pytest.mark.parametrize("path", ["direct", "ring", "wire"])
def test_a_server_of_many_clients(path: str) -> None:
    assert run(serve, 4, path=path)[0] == expected(4)


@pytest.mark.parametrize("wires", [in_memory, by_sockets])
@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
def test_a_server_of_clients_in_other_processes(layout: tuple[int, int], wires: object) -> None:
    outcome = run_far(serve, *layout, wires=wires)  # type: ignore[arg-type]
    assert outcome[0] == expected(4)


def test_a_server_in_virtual_time_takes_the_first_and_of_one_instant_the_lowest() -> None:
    async def main(rank: R) -> list[int | None]:
        if rank.rank == 0:
            order = []
            await trio.sleep(1e-3)
            for _ in range(3):
                asked = rank.recv(LIKE, None)
                await asked
                order.append(asked.src)
            return order
        await trio.sleep({1: 2e-6, 2: 1e-6, 3: 1e-6}[rank.rank])
        await rank.send(np.ones(1), 0)
        return []

    for _ in range(5):
        assert overlap.run(main, ranks=4, clock="virtual")[0] == [2, 3, 1]


def test_receives_take_turns_in_the_order_of_their_calls() -> None:
    async def main(rank: R) -> list[float]:
        if rank.rank == 0:
            waiting = [rank.recv(LIKE, None) for _ in range(4)]
            return [float((await future)[0]) for future in waiting]
        for number in range(4):
            await rank.send(np.array([float(number)]), 0)
        return []

    assert run(main, 2)[0] == [0.0, 1.0, 2.0, 3.0]


def test_two_receives_do_not_go_for_one_message() -> None:
    """Both would find the first message; one would then wait for a second one of that sender for ever."""

    async def main(rank: R) -> list[int | None]:
        if rank.rank == 0:
            both = [rank.recv(LIKE, None), rank.recv(LIKE, None)]
            for future in both:
                await future
            return sorted(future.src or 0 for future in both)
        await rank.send(np.ones(1), 0)
        return []

    assert run_far(main, 3, 1, wires=by_sockets)[0] == [1, 2]


@pytest.mark.parametrize("wires", [in_memory, by_sockets, by_shared_memory])
@pytest.mark.parametrize("elements", [3, 1_000_000])
@pytest.mark.parametrize("sent_first", [True, False])
@pytest.mark.parametrize("other", [((2,), "float64"), ((3,), "int64")])
def test_another_call_in_another_process_is_told_to_both(
    other: tuple[tuple[int, ...], str], sent_first: bool, elements: int, wires: Wires
) -> None:
    async def main(rank: R) -> None:
        if rank.rank == 0:
            if not sent_first:
                await rank.barrier()
            sent = rank.send(np.zeros(elements), 1)
            if sent_first:
                await rank.barrier()
            await sent
            await trio.sleep_forever()
        if sent_first:
            await rank.barrier()
        received = rank.recv(other, None)
        if not sent_first:
            await rank.barrier()
        await received

    for outcome in run_far(main, 2, 1, wires=wires):
        assert isinstance(outcome, overlap.RankFailedError)
        assert isinstance(outcome.cause, (overlap.CollectiveMismatchError, overlap.RemoteError))
        assert f"rank 0 called send/recv(float64 ({elements},)) at tests/runtime/test_any_source.py:" in str(outcome)
        assert f"rank 1 called send/recv({other[1]} ({other[0][0]},)) at tests/runtime/test_any_source.py:" in str(
            outcome
        )


async def differing(rank: R) -> list[float]:
    """The first message is none for the first receive, though it is one for the second; that takes the second one."""
    if rank.rank == 0:
        with suppress(overlap.CollectiveMismatchError):  # a small message may have left before
            await rank.send(np.full(3, 1.0), 1)
        await rank.barrier()
        await rank.send(np.full(3, 2.0), 1)
        return []
    first, second = rank.recv(((2,), "float64"), None), rank.recv(((3,), "float64"), None)
    with pytest.raises(overlap.CollectiveMismatchError):
        await first
    assert not second.done
    await rank.barrier()
    return list(await second)


@pytest.mark.everyday(4)
@pytest.mark.parametrize("way", ["direct", "wire", "virtual", *FAR])
def test_a_message_goes_to_the_first_receive_whatever_its_call(way: str) -> None:
    assert world(differing, way)[1] == [2.0, 2.0, 2.0]


DONE = 9  # the tag of messages that say that others have been sent


async def in_turns(rank: R, turns: list[tuple[int, int]]) -> list[int | None]:
    """Each sender sends so many messages when it is its turn; when all are there, rank 0 receives them."""
    if rank.rank:
        sent = []
        for number, (sender, messages) in enumerate(turns):
            if sender == rank.rank:
                await rank.recv(LIKE, 0, tag=DONE + number)
                sent += [rank.send(np.ones(1), 0) for _ in range(messages)]
                await rank.send(np.ones(1), 0, tag=DONE + number)
        for each in sent:
            await each
        return []
    for number, (sender, _) in enumerate(turns):
        await rank.send(np.ones(1), sender, tag=DONE + number)
        await rank.recv(LIKE, sender, tag=DONE + number)
    order = []
    for _ in range(sum(messages for _, messages in turns)):
        received = rank.recv(LIKE, None)
        await received
        order.append(received.src)
    return order


@pytest.mark.parametrize("wires", [by_sockets, by_shared_memory])
def test_messages_of_other_processes_are_taken_in_the_order_in_which_they_came(wires: Wires) -> None:
    turns = [(1, 3), (2, 1), (1, 2)]
    assert run_far(in_turns, 3, 1, turns, wires=wires)[0] == [1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("wires", [by_sockets, by_shared_memory])
@pytest.mark.parametrize(
    ("turns", "order"),
    [
        ([(1, 1), (2, 2), (3, 1), (2, 1)], [1, 2, 2, 3, 2]),
        ([(2, 1), (1, 1), (3, 2)], [2, 1, 3, 3]),
        ([(1, 4), (2, 2)], [1, 2, 2, 1, 1, 1]),  # a message of this process is offered once the one before has left
    ],
)
def test_messages_of_this_process_and_of_others_are_taken_in_the_order_in_which_they_came(
    turns: list[tuple[int, int]], order: list[int], wires: Wires
) -> None:
    assert run_far(in_turns, 2, 2, turns, wires=wires)[0] == order


@pytest.mark.parametrize("wires", [in_memory, by_sockets, by_shared_memory])
@pytest.mark.parametrize("elements", [1, 2])
def test_messages_are_left_to_receives_that_name_their_source(elements: int, wires: Wires) -> None:
    """The second of these still waits for its turn while both messages come, and a receive from any rank looks."""

    async def main(rank: R) -> int | None:
        if rank.rank == 0:
            named = [rank.recv(LIKE, 1), rank.recv(LIKE, 1)]
            await rank.send(np.ones(1), 1, tag=1)
            await sent.wait()
            received = rank.recv(((elements,), "float64"), None)
            for each in named:
                await each
            await rank.send(np.ones(1), 2, tag=1)
            await received
            await rank.send(np.ones(1), 1, tag=1)
            return received.src
        await rank.recv(LIKE, 0, tag=1)
        if rank.rank == 1:
            both = [rank.send(np.ones(1), 0), rank.send(np.ones(1), 0)]
            sent.set()
            for each in both:
                await each
            await rank.recv(LIKE, 0, tag=1)
        else:
            await rank.send(np.ones(elements), 0)
        return None

    sent = trio.Event()
    assert run_far(main, 3, 1, wires=wires)[0] == 2


def test_a_receive_of_ones_own_message() -> None:
    async def main(rank: R) -> int | None:
        received = rank.recv(LIKE, None)
        sent = rank.send(np.ones(1), rank.rank)
        await received
        await sent
        return received.src

    assert run(main, 1) == [0]


def test_the_array_is_locked_and_given_back() -> None:
    async def main(rank: R) -> bool:
        if rank.rank == 1:
            await ready.wait()
            await rank.send(np.full(2, 7.0), 0)
            return True
        room = np.zeros(2)
        received = rank.recv(room, None)
        locked = not room.flags.writeable
        ready.set()
        got = await received
        return locked and got is room and room.flags.writeable and room.tolist() == [7.0, 7.0]

    ready = trio.Event()
    assert run(main, 2) == [True, True]


def test_nobody_is_left_to_send() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 0:
            await rank.recv(LIKE, None, tag=5)

    failure = failure_of(run, main, 4)
    line = str(failure)
    assert line.startswith("rank 0 failed at test_any_source.py:")  # it receives more than is sent
    text = (
        "RankLeftError: all other ranks finished their programs while rank 0 waits in recv from any rank with tag 5 "
        "on group 'world' ("
    )
    assert text in line
    assert "were stopped" not in line


def test_nobody_is_left_to_send_in_other_processes() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 0:
            await rank.recv(LIKE, None, tag=5)

    outcome = run_far(main, 2, 1)[0]
    assert "all other ranks finished their programs while rank 0 waits" in str(outcome)


def test_the_world_fails_while_it_waits() -> None:
    async def main(rank: R) -> None:
        if rank.rank == 1:
            raise ValueError("boom")
        await rank.recv(LIKE, None)

    failure = failure_of(run, main, 2)
    assert failure.rank == 1


def test_a_bad_tag_is_refused_at_once() -> None:
    async def main(rank: R) -> None:
        with pytest.raises(overlap.UsageError, match="tag: must be an integer from 0"):
            rank.recv(LIKE, None, tag=-1)

    run(main, 2)


def test_where_ranks_stand_for_others_a_receive_names_its_source() -> None:
    async def main(rank: R) -> None:
        with pytest.raises(overlap.UsageError, match="must name its source"):
            rank.recv(LIKE, None)

    clock = overlap.Virtual(alike=1, shapes_only=True)
    overlap.run(main, ranks=4, cluster="local", clock=clock)


@pytest.mark.parametrize("way", ["direct", *FAR])
def test_a_send_that_fails_before_it_begins_fails_a_receive_from_any_rank(way: str) -> None:
    async def main(rank: R) -> None:
        if rank.rank == 1:
            held = rank.recv(LIKE, 1, tag=1)
            rank.send(held, 0)
            assert held.cancel()
            return
        with pytest.raises(overlap.PeerFailedError, match=r"rank 1 failed before send #0 .* was cancelled"):
            await rank.recv(LIKE, None)

    assert world(main, way) == [None, None]


# -- a new tag for each message --------------------------------------------------------------------------------------


def lanes() -> int:
    gc.collect()
    # by type: `isinstance` would also ask each object for its class, of which some that torch keeps warn
    return sum(issubclass(type(each), Lane) for each in gc.get_objects())


async def many_tags(rank: R) -> int:
    peer = 1 - rank.rank
    before = lanes()  # of whatever worlds are still about
    for tag in range(300):
        sent = rank.send(np.full(1, float(tag)), peer, tag=tag)
        assert (await rank.recv(LIKE, peer, tag=tag))[0] == tag
        await sent
    await rank.barrier()
    return lanes() - before


@pytest.mark.slow
@pytest.mark.parametrize("wire", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_messages_of_many_tags_leave_nothing_behind(wire: bool) -> None:
    transport = Recording(NeuronLink(2)) if wire else NeuronLink(2)
    assert max(overlap.run(many_tags, ranks=2, transport=transport, timeout_s=TIMEOUT_S)) < 10


@pytest.mark.slow
def test_messages_of_many_tags_between_processes_leave_nothing_behind() -> None:
    left = run_far(many_tags, 2, 1, wires=by_sockets)
    assert max(each for each in left if isinstance(each, int)) < 10


def test_a_tag_that_has_rested_is_used_again() -> None:
    async def main(rank: R) -> list[float]:
        got = []
        for number in range(5):
            if rank.rank == 0:
                await rank.send(np.array([float(number)]), 1, tag=3)
            else:
                got.append(float((await rank.recv(LIKE, 0, tag=3))[0]))
            await rank.barrier()
        return got

    assert run_far(main, 2, 1, wires=by_sockets)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_difference_is_found_though_the_sender_has_forgotten_its_message() -> None:
    """A small message is gone at once; the receiver, who expects another, waits, and tells the sender of that."""

    async def main(rank: R) -> None:
        if rank.rank == 0:
            await rank.send(np.zeros(3), 1)
            await trio.sleep_forever()
        await rank.recv(((2,), "float64"), 0)

    async def nobody(everybody: list[Company]) -> None:
        await trio.lowlevel.checkpoint()

    for outcome in run_far(main, 2, 1, wires=by_sockets, nemesis=nobody):
        assert isinstance(outcome, overlap.RankFailedError)
        assert isinstance(outcome.cause, (overlap.CollectiveMismatchError, overlap.RemoteError))
        assert "send/recv(float64 (3,))" in str(outcome)
        assert "send/recv(float64 (2,))" in str(outcome)

"""Receives that give their place or their message back: the next receive gets it, whatever else is under way."""

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap.runtime.failure import Failure
from overlap.runtime.state import CANCELLING, RUNNING
from transports import NeuronLink, Recording, Request, Transport, Wire
from transports.faulty import Faulty
from transports.paced import LinkSpeed, Paced
from transports.wrappers import RelayedRequest, WrappedWire, Wrapper

from .cancelled_awaits import channels, play
from .worlds import TIMEOUT_S

R = overlap.Rank
LIKE = ((3,), "float64")


class DecidingLater(Wrapper):
    """A transport that decides later whether a receive that is withdrawn has met its message."""

    def __init__(self, inner: Transport, decide: Callable[[Callable[[], None]], object] | None = None) -> None:
        super().__init__(inner)
        self.decide = decide

    def wrap(self, wire: Wire) -> Wire:
        return WireDecidingLater(wire, self)


class WireDecidingLater(WrappedWire):
    def __init__(self, inner: Wire, transport: DecidingLater) -> None:
        super().__init__(inner, transport.peers)
        self.transport = transport

    def begin_recv(self, src: int, tag: int, out: Any, nbytes: int, *, done: Any, **options: Any) -> Request:
        request = RequestDecidedLater(done, nbytes, partial(self.inner.begin_recv, src, tag, out, nbytes, **options))
        request.transport = self.transport
        request.begin()
        return request


class RequestDecidedLater(RelayedRequest):
    transport: DecidingLater

    def withdraw(self) -> None:
        decide = self.transport.decide or trio.lowlevel.current_trio_token().run_sync_soon
        decide(super().withdraw)


WRAPPED: dict[str, Callable[[Transport], Transport]] = {
    "recording": Recording,
    "faulty": lambda inner: Faulty(inner, seed=3, delay=0.5, delay_s=2e-3),
    "paced": lambda inner: Paced(inner, links=lambda *_: LinkSpeed(latency_s=1e-4, bandwidth_bytes_per_s=5e8)),
    "deciding later": DecidingLater,
}
WIRES = ["virtual", "direct", *WRAPPED]


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(main: Callable[[R], Awaitable[object]], wire: str, ranks: int = 2) -> list[object]:
    """Run a program on the virtual clock, in memory, or over a transport whose messages are begun in tasks."""
    if wire == "virtual":
        return overlap.run(main, ranks=ranks, clock="virtual", cluster="trn1.32xlarge")
    inner = NeuronLink(ranks)
    transport = WRAPPED[wire](inner) if wire in WRAPPED else inner
    return overlap.run(main, ranks=ranks, transport=transport, timeout_s=TIMEOUT_S)


def message(value: float) -> np.ndarray:
    return np.full(3, float(value))


async def ended(future: overlap.Future[np.ndarray]) -> None:
    """Wait until a future is done, without awaiting it."""
    while not future.done:  # noqa: ASYNC110 (what an event needs, a callback, would count as a user of the result)
        await trio.sleep(1e-3)


async def cancelled_await(future: overlap.Future[np.ndarray]) -> None:
    """Await a future in a task that is cancelled before."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await future
    assert scope.cancelled_caught


def test_a_receive_under_way_gets_the_message_that_an_earlier_one_gives_back(wire: str) -> None:
    """The first receive has met its message, and the second waits for another, which never comes."""

    async def main(rank: R) -> float:
        if rank.rank == 1:
            await rank.send(message(7), 0)
            await rank.barrier()
            return 7
        first, second = rank.recv(LIKE, 1), rank.recv(LIKE, 1)
        await ended(first)
        await cancelled_await(first)
        got = await second
        await rank.barrier()
        return float(got[0])

    assert run(main, wire) == [7, 7]


def test_messages_that_are_given_back_keep_their_order(wire: str) -> None:
    async def main(rank: R) -> list[float]:
        if rank.rank == 1:
            for value in range(4):
                rank.send(message(value), 0)
            await rank.barrier()
            return []
        receives = [rank.recv(LIKE, 1) for _ in range(3)]
        await ended(receives[2])
        for receive in (receives[1], receives[2], receives[0]):
            await cancelled_await(receive)
        got = [float((await rank.recv(LIKE, 1))[0]) for _ in range(4)]
        await rank.barrier()
        return got

    assert run(main, wire)[0] == [0, 1, 2, 3]


def test_two_receives_from_any_source_do_not_choose_one_message_that_was_given_back(wire: str) -> None:
    """One message of rank 1 was given back while a later one is met; the others get messages of both ranks."""

    async def main(rank: R) -> list[float]:
        if rank.rank == 0:
            first, second = rank.recv(LIKE, 1), rank.recv(LIKE, 1)
            await ended(first)
            await cancelled_await(first)
            rest = [rank.recv(LIKE, None) for _ in range(2)]
            await rank.barrier()
            got = [float((await each)[0]) for each in (second, *rest)]
            await rank.barrier()
            return sorted(got)
        if rank.rank == 1:
            rank.send(message(1), 0)
            await rank.barrier()
            rank.send(message(2), 0)
        else:
            await rank.barrier()
            if rank.rank == 2:
                rank.send(message(3), 0)
        await rank.barrier()
        return []

    assert run(main, wire, ranks=4)[0] == [1, 2, 3]


def test_a_receive_without_a_message_can_be_cancelled_over_any_transport(wire: str) -> None:
    async def main(rank: R) -> float:
        got = 5.0
        if rank.rank == 0:
            receive = rank.recv(LIKE, 1)
            await trio.sleep(1e-3)
            assert receive.cancel()
            assert receive.cancel()
            with pytest.raises(overlap.FutureCancelledError):
                await receive
            assert receive.cancelled()
            waiting = rank.recv(LIKE, 1)
            with trio.move_on_after(1e-3):
                await waiting
            await rank.barrier()
            got = float((await rank.recv(LIKE, 1))[0])
        else:
            await rank.barrier()
            await rank.send(message(5), 0)
        await rank.barrier()
        return got

    assert run(main, wire) == [5, 5]


def test_a_message_of_any_form_is_received_over_any_transport(wire: str) -> None:
    async def main(rank: R) -> list[float]:
        if rank.rank == 1:
            await rank.send(message(5), 0)
            return []
        received: Any = await rank.recv(None, 1)
        return list(received)

    assert run(main, wire)[0] == [5.0] * 3


def test_a_rank_ends_although_nobody_sends_what_it_has_waited_for(wire: str) -> None:
    async def main(rank: R) -> str:
        with trio.move_on_after(1e-3):
            await rank.recv(LIKE, 1 - rank.rank)
        await rank.barrier()  # else the other rank may have left before
        return "ended"

    assert run(main, wire) == ["ended"] * 2


def test_a_look_that_finds_no_message_yet_takes_none() -> None:
    """The message has been announced, and its bytes take another 16 ms."""

    async def main(rank: R) -> bool:
        if rank.rank == 1:
            await rank.barrier()
            await rank.send(np.ones(1_000_000), 0)
            return True
        first: Any = rank.recv(src=1)
        await cancelled_await(first)
        await rank.barrier()
        while not first.inbox.has_message(first):  # noqa: ASYNC110 (no event says so)
            await trio.sleep(1e-3)
        assert not first.done
        return bool((await rank.recv(src=1) == 1).all())

    assert run(main, "paced") == [True] * 2


def test_a_receive_that_was_left_has_failed_once_its_world_has_ended(wire: str) -> None:
    left: list[overlap.Future[Any]] = []

    async def main(rank: R) -> None:
        if rank.rank == 0:
            left.append(rank.recv(src=1))
            await cancelled_await(left[0])
        await rank.barrier()

    run(main, wire)
    assert left[0].done
    with pytest.raises(overlap.PeerFailedError, match="the world has ended"):
        left[0].result()


def test_a_scope_that_a_callback_cancels_withdraws_the_next_receive_before_it_starts() -> None:
    """The callback of the first receive runs between its end and the start of the second."""

    async def main(rank: R) -> list[bool]:
        if rank.rank == 1:
            await rank.barrier()
            await rank.send(message(1), 0)
            await rank.barrier()
            return []
        first, second, third = (rank.recv(LIKE, 1) for _ in range(3))
        scope, asked = trio.CancelScope(), list[bool]()
        first.add_done_callback(lambda _: (scope.cancel(), asked.append(third.cancel())))
        await rank.barrier()
        with scope:
            await second
        await rank.barrier()
        return [scope.cancelled_caught, *asked, bool(second.done)]

    assert run(main, "direct")[0] == [True, True, False]


def test_a_receive_of_another_thread_is_cancelled_before_the_loop_hears_of_it() -> None:
    async def main(rank: R) -> bool:
        made: list[overlap.Future[np.ndarray]] = []
        if rank.rank == 0:
            issued = trio.Event()

            def issue() -> None:
                made.append(rank.recv(LIKE, 1))

            computed = rank.compute(issue)
            while not made:  # without giving the loop a turn
                pass
            assert made[0].cancel()
            await computed
            issued.set()
            with pytest.raises(overlap.FutureCancelledError):
                await made[0]
        await rank.barrier()
        return True

    assert run(main, "direct") == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "virtual"])
def test_no_message_is_lost_over_a_real_transport(wire: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):

        async def main(rank: R, seed: int = seed) -> object:
            return await play(rank, seed, 1e-3)

        ranks = 2 + seed % 3
        lived: Any = run(main, wire, ranks=ranks)
        for channel in channels(seed, ranks):
            sent = [number + 1000 * source for source in range(len(channel.sources)) for number in range(channel.each)]
            assert sorted(lived[channel.dst][0][channel.tag]) == sent
        for _, counted in lived:
            seen += counted
    assert min(seen[way] for way in ("await cancelled", "receive cancelled", "task cancelled")) > 0


def test_to_cancel_a_parked_receive_takes_no_message() -> None:
    async def main(rank: R) -> list[float]:
        if rank.rank == 0:
            await rank.barrier()
            rank.send(message(1), 1)
            await rank.barrier()
            return []
        future = rank.recv(LIKE, 0)
        await cancelled_await(future)
        await rank.barrier()
        await rank.barrier()  # the message is there
        assert not future.failed
        assert future.cancel()
        return (await rank.recv(LIKE, 0)).tolist()

    assert run(main, "direct") == [[], [1.0] * 3]


@pytest.mark.parametrize("waits", ["task", "thread"])
def test_a_parked_receive_whose_array_is_read_only_meanwhile_fails(waits: str) -> None:
    async def main(rank: R) -> list[Any]:
        out = np.empty(3)
        future = rank.recv(out, 0)
        await cancelled_await(future)
        out.flags.writeable = False
        errors = []
        for _ in range(2):
            with pytest.raises(overlap.UsageError, match="like: is read-only") as raised:
                await (future if waits == "task" else trio.to_thread.run_sync(future.result))
            errors.append(raised.value)
        rank.send(message(1), 0)
        return [errors[0] is errors[1], (await rank.recv(LIKE, 0)).tolist()]

    assert run(main, "direct", ranks=1) == [[True, [1.0] * 3]]


# -- a wire that decides later -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["before", "after"])
def test_a_receive_is_cancelled_whatever_a_wire_decides_later(sent: str) -> None:
    """Its message, which comes before the decision or after it, goes to the next receive."""
    asked: list[Callable[[], None]] = []

    async def main(rank: R) -> list[Any]:
        if rank.rank == 1:
            await rank.barrier()
            await rank.send(message(1), 0)
            await rank.barrier()
            return []
        first = rank.recv(LIKE, 1)
        answers: list[Any] = [first.state is RUNNING, first.cancel(), first.cancel(), first.state is CANCELLING]
        second = rank.recv(LIKE, 1)
        if sent == "before":
            await rank.barrier()
        else:
            asked.pop()()
        with pytest.raises(overlap.FutureCancelledError):
            await first
        if sent == "after":
            await rank.barrier()
        got = (await second).tolist()
        await rank.barrier()
        return [*answers, first.cancel(), got]

    transport = DecidingLater(NeuronLink(2), asked.append)
    found = overlap.run(main, ranks=2, transport=transport, timeout_s=TIMEOUT_S)[0]
    assert found == [True, True, True, True, True, [1.0] * 3]
    assert len(asked) == (sent == "before")


def test_a_receive_that_is_cancelled_stays_so_if_the_world_ends_before_the_wire_decides() -> None:
    asked: list[Callable[[], None]] = []
    found: list[bool] = []

    def decide(withdraw: Callable[[], None]) -> None:
        asked.append(withdraw)
        if len(asked) > 1:  # the first is never answered
            withdraw()

    async def main(rank: R) -> None:
        await rank.barrier()
        if rank.rank == 1:
            raise ValueError("planted")
        receive = rank.recv(LIKE, 1)
        found.extend([receive.cancel(), receive.state is CANCELLING])
        try:
            with pytest.raises(overlap.FutureCancelledError):
                await receive
        finally:
            found.append(receive.cancelled())

    with pytest.raises(overlap.RankFailedError, match="planted"):
        overlap.run(main, ranks=2, transport=DecidingLater(NeuronLink(2), decide), timeout_s=TIMEOUT_S)
    assert found == [True, True, True]


def test_a_receive_that_is_known_to_have_met_its_message_is_not_cancelled() -> None:
    """A thread copies the long message."""
    sent = trio.Event()

    async def main(rank: R) -> list[Any]:
        if rank.rank == 1:
            sending = rank.send(np.full(1_000_000, 7.0), 0)
            sent.set()
            await sending
            return []
        await sent.wait()
        receive = rank.recv(((1_000_000,), "float64"), 1)
        state, answer = receive.state, receive.cancel()
        return [state is RUNNING, answer, (await receive)[-1]]

    assert run(main, "recording")[0] == [True, False, 7.0]


@pytest.mark.parametrize("wire", ["recording", "deciding later"])
def test_a_receive_that_has_failed_is_not_cancelled(wire: str) -> None:
    """Its transfer is about to be stopped."""

    async def main(rank: R) -> list[Any]:
        answers = []
        if rank.rank == 0:
            receive: Any = rank.recv(LIKE, 1)
            receive.fail(Failure(ValueError("late")))
            answers = [receive.state.word, receive.cancel()]
            with pytest.raises(ValueError, match="late"):
                await receive
        await rank.barrier()
        return answers

    assert run(main, wire)[0] == ["stopping", False]


@pytest.mark.parametrize(
    ("wire", "ends"), [("recording", "failed"), ("deciding later", "failed"), ("deciding later", "cancelled")]
)
def test_a_message_that_is_given_back_passes_a_receive_that_is_over(wire: str, ends: str) -> None:
    """Also a cancelled one of another shape, which the message would not fit."""
    asked: list[Callable[[], None]] = []

    async def main(rank: R) -> list[Any]:
        if rank.rank == 1:
            await rank.send(message(1), 0)
            await rank.barrier()
            return []
        first = rank.recv(LIKE, 1)
        await ended(first)
        second: Any = rank.recv(LIKE if ends == "failed" else ((4,), "float64"), 1)
        while second.state is not RUNNING:  # until its transfer has begun
            await trio.lowlevel.checkpoint()
        third = rank.recv(LIKE, 1)
        if ends == "failed":
            second.fail(Failure(ValueError("late")))
        else:
            assert second.cancel()
        await cancelled_await(first)
        while asked:
            asked.pop()()
        with (
            pytest.raises(ValueError, match="late") if ends == "failed" else pytest.raises(overlap.FutureCancelledError)
        ):
            await second
        got = (await third).tolist()
        await rank.barrier()
        return got

    transport = WRAPPED[wire](NeuronLink(2)) if ends == "failed" else DecidingLater(NeuronLink(2), asked.append)
    assert overlap.run(main, ranks=2, transport=transport, timeout_s=TIMEOUT_S)[0] == [1.0] * 3

"""Recording, Faulty, the gate that keeps held-up messages in order, and awaiting over the worst wires."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import trio
import trio.testing
from trio.testing import MockClock, wait_all_tasks_blocked

from transports import (
    ArgumentError,
    Envelope,
    Faulty,
    LinkLostError,
    NeuronLink,
    Recording,
    Request,
    Sent,
    TransportClosedError,
)
from transports.request import Done
from transports.wire import begin_and_wait
from transports.wrappers import DelayedMessages, RelayedRequest, WrappedWire

# -- recording, Faulty and the gate that keeps held-up messages in order -----------------------------------------------


async def test_recording_writes_down_calls_in_order() -> None:
    recording = Recording(NeuronLink(2), keep_payloads=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(recording.wire(0).send, priority=-2), 1, 7, b"one")
        await wait_all_tasks_blocked()
        nursery.start_soon(recording.wire(1).send, 0, 7, b"")
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert recording.sent == [
        Sent(src=0, dst=1, tag=7, nbytes=3, priority=-2, payload=b"one"),
        Sent(src=1, dst=0, tag=7, nbytes=0, priority=0, payload=b""),
    ]
    assert repr(recording) == "<Recording around <NeuronLink of ranks 0, 1>>"
    assert not recording.shares_memory(recording.ranks)


async def test_recording_keeps_payloads_only_when_asked() -> None:
    recording = Recording(NeuronLink(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(recording.wire(0).send, 0, 0, b"x")
        await recording.wire(0).recv_into(0, 0, bytearray(1))
    assert [sent.payload for sent in recording.sent] == [None]


def test_a_wrapper_keeps_its_endpoints_and_rejects_strangers() -> None:
    recording = Recording(NeuronLink((0, 1, 2)))
    assert recording.wire(1) is recording.wire(1)
    with pytest.raises(ArgumentError, match="there is no rank 3 here"):
        recording.wire(3)
    with pytest.raises(ArgumentError, match=r"^there is no rank 9 here; known are ranks 0-2$"):
        trio.run(recording.wire(0).send, 9, 0, b"x")
    with pytest.raises(ArgumentError, match="tag -1 is not in"):
        trio.run(recording.wire(0).send, 1, -1, b"x")
    assert recording.sent == []


async def test_messages_that_wait_begin_in_order_and_give_way_when_withdrawn(autojump_clock) -> None:
    begun: list[int] = []
    ended: list[Request] = []

    def begin(number: int, done: Done) -> None:
        begun.append(number)

    later, lane = DelayedMessages(), (0, 1, 2)
    requests = [RelayedRequest(ended.append, 8, partial(begin, number)) for number in range(5)]
    with pytest.raises(TransportClosedError, match="is not open"):
        later.hold(lane, requests[0])
    async with trio.open_nursery() as nursery:
        later.runs = True
        nursery.start_soon(later.run)
        for request, due_s in zip(requests, (8, 1, 1, 99, 1), strict=True):
            later.hold(lane, request)
            later.plan(lane, request, due_s)
        await trio.sleep(5)
        assert begun == []
        requests[1].withdraw()  # while it waits for its turn
        await trio.sleep(5)
        assert begun == [0, 2]
        requests[3].withdraw()  # while it is first, and held up
        assert begun == [0, 2, 4]
        assert not later.holds(lane)
        later.hold(lane, RelayedRequest(ended.append, 8, partial(begin, 5)))
        nursery.cancel_scope.cancel()
    assert isinstance(ended.pop().error, TransportClosedError)
    assert begun == [0, 2, 4]
    assert [request.withdrawn for request in ended].count(True) == 2


async def test_a_message_that_is_planned_anew_begins_at_its_last_time(autojump_clock) -> None:
    begun: list[float] = []

    def begin(done: Done) -> None:
        begun.append(trio.current_time())

    later, request = DelayedMessages(), RelayedRequest(lambda _: None, 8, begin)
    async with trio.open_nursery() as nursery:
        later.runs = True
        nursery.start_soon(later.run)
        later.hold((0, 1, 2), request)
        for due_s in (3, 7, 5):
            later.plan((0, 1, 2), request, due_s)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert begun == [5]


def run_many(**options: float) -> tuple[Faulty, list[bytes]]:
    """Send 200 numbered messages on separate tags; return the transport and what has arrived."""
    faulty, received = Faulty(NeuronLink(2), seed=5, **options), list[bytes]()

    async def receive(tag: int) -> None:
        out = bytearray(4)
        await faulty.wire(1).recv_into(0, tag, out)
        received.append(bytes(out))

    async def main() -> None:
        async with faulty.open(), trio.open_nursery() as nursery:
            for tag in range(200):
                nursery.start_soon(receive, tag)
                nursery.start_soon(faulty.wire(0).send, 1, tag, tag.to_bytes(4, "little"))
            await trio.sleep(100)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return faulty, received


def hit(faulty: Faulty, kind: str) -> set[int]:
    return {fault.envelope.tag for fault in faulty.faults if fault.kind == kind}


def test_without_probabilities_nothing_happens() -> None:
    faulty, received = run_many()
    assert (faulty.faults, sorted(received)) == ([], sorted(tag.to_bytes(4, "little") for tag in range(200)))


def test_dropped_messages_vanish_and_no_others() -> None:
    faulty, received = run_many(drop=0.25)
    dropped = hit(faulty, "drop")
    assert 20 < len(dropped) < 80
    assert {int.from_bytes(message, "little") for message in received} == set(range(200)) - dropped


def test_all_messages_may_be_corrupted() -> None:
    faulty, received = run_many(corrupt=1)
    assert len(hit(faulty, "corrupt")) == len(received) == 200


async def test_corrupt_messages_arrive_with_one_bit_flipped() -> None:
    recording = Recording(Faulty(NeuronLink(1), seed=0, corrupt=1))
    data, out = bytes(range(256)), bytearray(256)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(recording.wire(0).send, 0, 0, data)
        await recording.wire(0).recv_into(0, 0, out)
    flipped = int.from_bytes(data, "little") ^ int.from_bytes(out, "little")
    assert flipped.bit_count() == 1
    assert data == bytes(range(256))


async def test_empty_messages_cannot_be_corrupted() -> None:
    faulty = Faulty(NeuronLink(1), seed=0, corrupt=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(faulty.wire(0).send, 0, 0, b"")
        await faulty.wire(0).recv_into(0, 0, bytearray())
    assert faulty.faults == []


def test_faults_follow_from_the_seed_alone() -> None:
    first, second = run_many(drop=0.25, corrupt=0.25)[0], run_many(drop=0.25, corrupt=0.25)[0]
    assert hit(first, "drop") == hit(second, "drop")
    assert hit(first, "corrupt") == hit(second, "corrupt")
    more = run_many(drop=0.5, corrupt=0.25)[0]
    assert hit(more, "drop") > hit(first, "drop")
    assert hit(more, "corrupt") == hit(first, "corrupt") - hit(more, "drop")


async def test_delays_are_bounded_and_keep_the_order(autojump_clock) -> None:
    faulty = Faulty(NeuronLink(2), seed=1, delay=0.5, delay_s=8)
    async with faulty.open(), trio.open_nursery() as nursery:
        for i in range(30):
            nursery.start_soon(faulty.wire(0).send, 1, 0, bytes([i]))
            await wait_all_tasks_blocked()
        for i in range(30):
            with await faulty.wire(1).recv(0, 0, 1) as delivery:
                assert bytes(delivery.view) == bytes([i])
    assert 4 < trio.current_time() <= 8
    assert 5 < len(faulty.faults) < 25


async def test_a_cut_ends_pending_and_later_operations_of_its_link_only(autojump_clock) -> None:
    lost: list[str] = []
    faulty = Faulty(NeuronLink(3), seed=0)
    a, b, c = (faulty.wire(rank) for rank in range(3))

    async def note(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(LinkLostError) as caught, trio.fail_after(1):
            await call()
        lost.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, partial(a.send, 1, 4, b"x"))
        nursery.start_soon(note, partial(a.recv, 1, 5, 1))
        nursery.start_soon(note, partial(b.recv_into, 0, 6, bytearray(1)))
        nursery.start_soon(a.send, 2, 7, b"x")
        await wait_all_tasks_blocked()
        faulty.cut(1, 0)
        await note(partial(b.send, 0, 8, b"x"))
        (await c.recv(0, 7, 1)).release()
    assert sorted(lost) == [
        "message from rank 0 to rank 1, tag 4: the link was cut",
        "message from rank 0 to rank 1, tag 6: the link was cut",
        "message from rank 1 to rank 0, tag 5: the link was cut",
        "message from rank 1 to rank 0, tag 8: the link was cut",
    ]


async def test_a_call_that_was_refused_is_not_ended_by_a_cut() -> None:
    ended: list[Request] = []
    async with Faulty(NeuronLink(2), seed=0).open() as faulty:
        with pytest.raises(ArgumentError, match="read-only"):
            faulty.wire(1).begin_recv(0, 1, b"read-only", 9, done=ended.append)
        faulty.cut(0, 1)
    assert ended == []


def test_a_cut_by_chance_is_written_down() -> None:
    faulty = Faulty(NeuronLink(2), seed=0, cut=1, drop=1)
    with pytest.raises(LinkLostError):
        trio.run(faulty.wire(0).send, 1, 0, b"x")
    assert [fault.kind for fault in faulty.faults] == ["cut"]


@pytest.mark.parametrize("options", [{"drop": -0.1}, {"cut": 1.1}, {"corrupt": float("nan")}, {"delay_s": -1}])
def test_impossible_faults_are_rejected(options: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(options))} is "):
        Faulty(NeuronLink(1), seed=0, **options)


async def test_a_cut_link_ends_waiting_for_any() -> None:
    faulty = Faulty(NeuronLink(3), seed=1)
    errors: list[LinkLostError] = []

    async def look() -> None:
        with pytest.raises(LinkLostError, match="the link was cut") as caught:
            await faulty.wire(0).wait_any([(1, 5), (2, 6)])
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await wait_all_tasks_blocked()
        faulty.cut(0, 2)
    await look()
    assert [(error.src, error.dst, error.tag) for error in errors] == [(2, 0, 6)] * 2


# -- awaiting calls over wires that do everything in the worst order ---------------------------------------------------


class Late(WrappedWire):
    """A wire whose message arrives in another thread, as the first watcher begins to watch: too late to notify."""

    message: Envelope | None = None

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        return [] if self.message is None else [self.message]

    @contextmanager
    def watch(self, notify: Callable[[], None]) -> Iterator[None]:
        self.message = Envelope(src=1, dst=0, tag=2, nbytes=1)
        yield


async def test_a_message_that_arrives_just_before_the_watch_is_found(autojump_clock) -> None:
    late = Late(NeuronLink(2).wire(0), [0, 1])
    with trio.fail_after(10):
        assert await late.wait_any([(1, 2)]) == Envelope(src=1, dst=0, tag=2, nbytes=1)


async def test_a_request_that_ends_in_another_thread_wakes_its_task() -> None:
    begun: list[Request] = []
    ended: list[Request | None] = []

    async def wait() -> None:
        ended.append(await begin_and_wait(begin))

    def begin(done: Callable[[Request], None]) -> Request:
        begun.append(Request(done))
        return begun[0]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert ended == []
        await trio.to_thread.run_sync(begun[0].end)
    assert ended == begun


@pytest.mark.parametrize("ends", ["at once", "later", "in time"])
async def test_a_cancelled_call_waits_for_the_end_of_its_request(ends: str) -> None:
    """Withdrawn at once or later it raises Cancelled; what has met its other end ends well."""
    ended: list[str] = []

    def withdraw(request: Request) -> None:
        if ends == "at once":
            request.end(withdrawn=True)

    request = Request(print, withdraw=withdraw)

    def begin(done: Callable[[Request], None]) -> Request:
        request.done = done
        return request

    async def call() -> None:
        try:
            await begin_and_wait(begin)
            ended.append("well")
        except trio.Cancelled:
            ended.append("cancelled")
            raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            assert ended == (["cancelled"] if ends == "at once" else [])
            request.end(withdrawn=ends == "later")
    assert ended == ["well" if ends == "in time" else "cancelled"]

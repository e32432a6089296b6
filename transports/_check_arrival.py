"""Checks of the contract suite: messages arrive intact and in order, whatever else waits."""

from __future__ import annotations

import random
from array import array
from functools import partial
from threading import get_ident

import numpy as np
import trio
from trio.testing import assert_checkpoints

from transports._checking import Scale, delivery_from, expect_message, make_message, require, wait_until_blocked
from transports.buffers import Buffer
from transports.request import Request
from transports.wire import TAG_LIMIT, Envelope, Wire


async def names(a: Wire, b: Wire, scale: Scale) -> None:
    """Two endpoints are two ranks, and their repr says which."""
    require(a.rank != b.rank, f"both ends say that they are rank {a.rank}")
    for end in (a, b):
        require(str(end.rank) in repr(end), f"the repr of rank {end.rank} is {end!r}")
    await trio.lowlevel.checkpoint()


async def order_of_sends(a: Wire, b: Wire, scale: Scale) -> None:
    """Sends of one tag that wait together arrive in the order of the calls, whatever their sizes and priorities."""
    count = scale.messages
    lengths = [70_000 - 10_000 * i if i < 8 else (8, 100, 2000)[i % 3] for i in range(count)]
    messages = [make_message(nbytes, i) for i, nbytes in enumerate(lengths)]
    async with trio.open_nursery() as nursery:
        for i, message in enumerate(messages):
            nursery.start_soon(partial(a.send, priority=-(i % 8)), b.rank, 7, message)
            await wait_until_blocked()
        for i, message in enumerate(messages):
            await expect_message(b, a, 7, message, f"message {i} of {count} on one tag")
    await _check_order_at_once(a, b, scale)


async def _check_order_at_once(a: Wire, b: Wire, scale: Scale) -> None:
    """Long and short messages in turn arrive in order, though each send follows as soon as the one before suspends."""
    messages = [make_message(nbytes, i) for i, nbytes in enumerate((max(scale.sizes), 8) * 3)]
    async with trio.open_nursery() as nursery:
        for message in messages:
            nursery.start_soon(a.send, b.rank, 8, message)
            await trio.lowlevel.checkpoint()  # the task has started when this one continues
        for i, message in enumerate(messages):
            case = f"message {i} of {len(messages)} on one tag, sent as soon as the one before had suspended"
            await expect_message(b, a, 8, message, case)


async def order_of_receives(a: Wire, b: Wire, scale: Scale) -> None:
    """Receives of one tag that wait together are served in the order of the calls."""
    messages = [make_message(1000, i) for i in range(scale.messages)]
    async with trio.open_nursery() as nursery:
        for i, message in enumerate(messages):
            nursery.start_soon(expect_message, b, a, 7, message, f"receive {i} of {scale.messages} on one tag")
            await wait_until_blocked()
        for message in messages:
            await a.send(b.rank, 7, message)


async def ends(a: Wire, b: Wire, scale: Scale) -> None:
    """`done` is called once for each request, in the thread of the event loop, and then the request has ended."""
    for nbytes in (0, *scale.sizes):
        calls: list[tuple[Request, int]] = []
        begun: list[Request | None] = []

        def done(request: Request, calls: list[tuple[Request, int]] = calls) -> None:
            calls.append((request, get_ident()))

        message = make_message(nbytes)
        for begin in (
            lambda done=done, nbytes=nbytes: b.begin_recv(a.rank, 11, bytearray(nbytes), nbytes, done=done),
            lambda done=done, message=message: a.begin_send(b.rank, 11, message, done=done),
            lambda done=done: b.begin_recv(a.rank, 12, bytearray(1), 1, done=done),
        ):
            begun.append(begin())
        with trio.move_on_after(scale.patience_s):
            while not all(request is None or request.ended for request in begun[:2]):  # noqa: ASYNC110 - wires have no event
                await trio.sleep(0.001)  # a virtual clock moves while all sleep
        withdrawn = begun[2]
        require(withdrawn is not None, "begin_recv returned None, not a Request")
        if withdrawn is not None:
            withdrawn.withdraw()
        with trio.move_on_after(scale.patience_s):
            while len(calls) < sum(request is not None for request in begun):  # noqa: ASYNC110 - wires have no event
                await trio.sleep(0.001)  # a virtual clock moves while all sleep
        await wait_until_blocked()
        for request in begun:
            count = sum(called is request for called, _ in calls)
            if request is not None and not count:
                require(False, f"done was not called; the request has {'' if request.ended else 'not '}ended")
            require(request is None or count == 1, "done was called twice for one request")
        elsewhere = [thread for _, thread in calls if thread != get_ident()]
        require(not elsewhere, "done was called in another thread than the event loop's")


async def sends_without_tasks(a: Wire, b: Wire, scale: Scale) -> None:
    """A message begun by a plain function arrives as it was, though its callback writes there and begins more."""
    await _check_begun_order(a, b)
    await _check_callback_sends(a, b, scale)


async def _check_begun_order(a: Wire, b: Wire) -> None:
    """Messages of one tag arrive in the order in which they were begun, with their bytes as they were then."""
    messages = [make_message(nbytes, i) for i, nbytes in enumerate((8, 0, 70_000, 9, 100))]
    async with trio.open_nursery() as nursery:
        for first in ("the receiver", "the sender"):
            if first == "the receiver":
                for i, message in enumerate(messages):
                    nursery.start_soon(
                        expect_message, b, a, 9, message, f"message {i}, which {first} was first to name"
                    )
                    await wait_until_blocked()
            for message in messages:
                buffer = bytearray(message)
                if a.begin_send(b.rank, 9, buffer, priority=2, done=partial(_clear, buffer)) is None:
                    _clear(buffer)
                await wait_until_blocked()
            if first == "the sender":
                for i, message in enumerate(messages):
                    await expect_message(b, a, 9, message, f"message {i}, which {first} was first to name")


def _clear(buffer: bytearray, _: Request | None = None) -> None:
    """Overwrite a buffer, which is the sender's again."""
    buffer[:] = bytes(len(buffer))  # the buffer is the sender's again


async def _check_callback_sends(a: Wire, b: Wire, scale: Scale) -> None:
    """Sends that begin other sends in their callbacks arrive intact, though no receive waits at first."""
    messages = [make_message(nbytes, i) for i, nbytes in enumerate((8, max(scale.sizes), 70_000, 1000, 60_000) * 5)]
    buffers, pending, all_ended = [bytearray(message) for message in messages], set(range(len(messages))), trio.Event()

    def start(i: int) -> None:
        if a.begin_send(b.rank, i, buffers[i], priority=i % 3, done=partial(on_end, i)) is None:
            on_end(i, None)

    def on_end(i: int, call: Request | None) -> None:
        """Overwrite the buffer of an ended send, and begin a later one."""
        _clear(buffers[i])
        pending.remove(i)
        if (call is None or call.error is None) and i + len(messages) // 2 < len(messages):
            start(i + len(messages) // 2)
        if not pending:
            all_ended.set()

    for i in range(len(messages) // 2):
        start(i)
    await wait_until_blocked()  # unreceived messages have used up all credit
    for i, message in enumerate(messages):
        await expect_message(
            b, a, i, message, f"message {i} of {len(messages)}, which were started by a plain function,"
        )
    await all_ended.wait()


async def tags_are_independent(a: Wire, b: Wire, scale: Scale) -> None:
    """A message that nobody receives yet, large or small, does not hold up other tags."""
    large, small, urgent = make_message(max(scale.sizes)), make_message(8, 1), make_message(8, 2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.send, b.rank, 1, large)
        nursery.start_soon(a.send, b.rank, 2, small)
        await wait_until_blocked()
        nursery.start_soon(a.send, b.rank, 3, urgent)
        await expect_message(b, a, 3, urgent, "tag 3 while tags 1 and 2 wait")
        await expect_message(b, a, 2, small, "tag 2 while tag 1 waits")
        await expect_message(b, a, 1, large, "tag 1, late")


async def many_tags(a: Wire, b: Wire, scale: Scale) -> None:
    """Thousands of tags may be outstanding, and are received in any order."""
    tags = list(range(scale.tags))
    async with trio.open_nursery() as nursery:
        for tag in tags:
            nursery.start_soon(a.send, b.rank, tag, tag.to_bytes(8, "little"))
        await wait_until_blocked()
        for tag in random.Random(0).sample(tags, len(tags)):
            await expect_message(b, a, tag, tag.to_bytes(8, "little"), f"tag {tag} of {len(tags)}")


async def extreme_tags(a: Wire, b: Wire, scale: Scale) -> None:
    """Tags reach from 0 to 2**64 - 1, and none is taken for another."""
    tags = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, TAG_LIMIT - 1]
    async with trio.open_nursery() as nursery:
        for tag in tags:
            nursery.start_soon(a.send, b.rank, tag, tag.to_bytes(8, "little"))
            await wait_until_blocked()
        for tag in reversed(tags):
            await expect_message(b, a, tag, tag.to_bytes(8, "little"), f"tag {tag}")


async def zero_bytes(a: Wire, b: Wire, scale: Scale) -> None:
    """An empty message is a message: it is matched, in its turn, by either kind of receive."""
    for send_first in (True, False):
        async with trio.open_nursery() as nursery:
            for message in (b"", b"x", b""):
                if send_first:
                    nursery.start_soon(a.send, b.rank, 5, message)
                    await wait_until_blocked()
                else:
                    nursery.start_soon(expect_message, b, a, 5, message, f"{len(message)} bytes between empty messages")
                    await wait_until_blocked()
            for message in (b"", b"x", b""):
                if send_first:
                    with await delivery_from(b, a, 5, len(message)) as delivery:
                        require(bytes(delivery.view) == message, "an empty message brought bytes")
                else:
                    await a.send(b.rank, 5, message)


async def sizes(a: Wire, b: Wire, scale: Scale) -> None:
    """Every length arrives intact, by either kind of receive, whichever end comes first."""
    for nbytes in scale.sizes:
        message = make_message(nbytes)
        for send_first in (True, False):
            async with trio.open_nursery() as nursery:
                if send_first:
                    nursery.start_soon(_send_twice, a, b, message)
                    await wait_until_blocked()
                    nursery.start_soon(_receive_both_ways, a, b, message)
                else:
                    nursery.start_soon(_receive_both_ways, a, b, message)
                    await wait_until_blocked()
                    nursery.start_soon(_send_twice, a, b, message)


async def _send_twice(a: Wire, b: Wire, message: bytearray) -> None:
    await a.send(b.rank, 4, message)
    await a.send(b.rank, 4, message)


async def _receive_both_ways(a: Wire, b: Wire, message: bytearray) -> None:
    await expect_message(b, a, 4, message, f"{len(message)} bytes by recv_into")
    with await delivery_from(b, a, 4, len(message)) as delivery:
        require(delivery.view == message, f"{len(message)} bytes by recv: other bytes than those sent")


async def both_directions(a: Wire, b: Wire, scale: Scale) -> None:
    """Large messages of one tag cross in both directions at once."""
    there, back = make_message(max(scale.sizes), 1), make_message(max(scale.sizes), 2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.send, b.rank, 9, there)
        nursery.start_soon(b.send, a.rank, 9, back)
        await wait_until_blocked()
        nursery.start_soon(expect_message, b, a, 9, there, "the way there")
        nursery.start_soon(expect_message, a, b, 9, back, "the way back")


async def kinds_of_buffers(a: Wire, b: Wire, scale: Scale) -> None:
    """Every C-contiguous buffer is sent as its bytes and received into: any dtype, any shape, read-only sources."""
    columns = np.arange(12, dtype=np.float32).reshape(3, 4)
    pairs: list[tuple[Buffer, Buffer]] = [
        (b"read-only", bytearray(9)),
        (array("d", [1.0, -0.0]), np.zeros(2)),
        (columns, np.zeros((3, 4), np.float32)),
        (np.array([1 + 2j]), np.zeros(1, np.complex128)),
        (np.array(7, np.int16), np.zeros((), np.int16)),
        (np.array([[True], [False]]), memoryview(bytearray(2))),
        (np.zeros((0, 3), np.float16), np.zeros((3, 0), np.float64)),
    ]
    for data, out in pairs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send, b.rank, 6, data)
            await b.recv_into(a.rank, 6, out)
        sent, got = np.asarray(data).tobytes(), np.asarray(out).tobytes()
        require(got == sent, f"sent {data!r}, received {out!r}")


async def ownership(a: Wire, b: Wire, scale: Scale) -> None:
    """A buffer may be overwritten as soon as its send has returned; the sent bytes arrive."""

    async def send_and_scribble(message: bytearray) -> None:
        await a.send(b.rank, 2, message)
        message[:] = bytes(len(message))

    for nbytes in scale.sizes:
        message = make_message(nbytes)
        sent = bytes(message)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_and_scribble, message)
            await wait_until_blocked()
            await expect_message(b, a, 2, sent, f"{nbytes} bytes whose buffer was overwritten after the send")


async def deliveries(a: Wire, b: Wire, scale: Scale) -> None:
    """A delivery's view is flat, read-only bytes, and stays intact until its release, which may come twice."""
    for nbytes in (0, *scale.sizes):
        message = make_message(nbytes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send, b.rank, 2, message)
            with await delivery_from(b, a, 2, nbytes) as delivery:
                shape = (delivery.view.format, delivery.view.ndim, delivery.view.nbytes)
                require(delivery.view.readonly, "a delivery may be written to")
                require(shape == ("B", 1, nbytes), f"a delivery of {nbytes} bytes has (format, ndim, nbytes) {shape}")
                require(delivery.view == message, "a delivery has other bytes than those sent")
                delivery.release()


async def announcements(a: Wire, b: Wire, scale: Scale) -> None:
    """`wait_any` waits for a message of its choices and names the oldest; it takes none, so they can be received.

    `announced` names the same message, or, where it cannot know without waiting, none.
    """
    choices = [(a.rank, 1), (a.rank, 2)]
    for nbytes in (8, max(scale.sizes)):
        messages = {tag: make_message(nbytes, tag) for tag in (1, 2, 3)}
        announced: list[Envelope] = []
        sent = {tag: Envelope(src=a.rank, dst=b.rank, tag=tag, nbytes=nbytes) for tag in messages}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_record_wait_any, b, choices, announced)
            await wait_until_blocked()
            nursery.start_soon(a.send, b.rank, 3, messages[3])
            only = await b.wait_any([(a.rank, 3)])
            require(only == sent[3], f"{sent[3]} was the only message, and wait_any returned {only}")
            await wait_until_blocked()
            require(not announced, "wait_any returned for a message that is none of its choices")
            nursery.start_soon(a.send, b.rank, 2, messages[2])
            await b.wait_any([(a.rank, 2)])
            await wait_until_blocked()
            require(
                announced == [sent[2]],
                f"{sent[2]} was the only choice with a message, and wait_any returned {announced}",
            )
            nursery.start_soon(a.send, b.rank, 1, messages[1])
            await b.wait_any([(a.rank, 1)])
            with assert_checkpoints():
                first = await b.wait_any(choices)
            require(first == sent[2], f"{sent[2]} was the older message, and wait_any returned {first}")
            at_once = b.announced(choices)
            require(at_once in (None, first), f"wait_any returned {first}, and announced {at_once}")
            for tag, message in messages.items():
                await expect_message(b, a, tag, message, f"tag {tag}, after it was waited for")
    await _check_free_bits(a, b)
    await _check_matched_not_announced(a, b)


async def _check_free_bits(a: Wire, b: Wire) -> None:
    """A tag may differ from the choice's in its free bits, and in no other."""
    announced: list[Envelope] = []
    choices, only = [(a.rank, 2**40), (a.rank, 2**41)], Envelope(src=a.rank, dst=b.rank, tag=2**41 + 5, nbytes=8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_record_wait_any, b, choices, announced, 32)
        await wait_until_blocked()
        nursery.start_soon(a.send, b.rank, 2**32, b"another")
        await b.wait_any([(a.rank, 2**32)])
        await wait_until_blocked()
        require(not announced, "wait_any returned for a tag that differs above the free bits")
        require(b.announced(choices, free_bits=32) is None, "announced a tag that differs above the free bits")
        nursery.start_soon(a.send, b.rank, 2**41 + 5, b"this one")
        await b.wait_any([(a.rank, 2**41 + 5)])
        await wait_until_blocked()
        require(announced == [only], f"{only} was the only choice with a message, and wait_any returned {announced}")
        again = await b.wait_any(choices, free_bits=32)
        require(again == only, f"{only} was there, and wait_any returned {again}")
        await expect_message(b, a, 2**32, b"another", "a tag above the free bits")
        await expect_message(b, a, 2**41 + 5, b"this one", "a tag that was waited for with free bits")


async def _check_matched_not_announced(a: Wire, b: Wire) -> None:
    """A message that a receive has matched is not announced any more, in either order of arrival."""
    announced: list[Envelope] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_record_wait_any, b, [(a.rank, 1)], announced)
        await wait_until_blocked()
        async with trio.open_nursery() as both:
            both.start_soon(expect_message, b, a, 1, b"awaited", "a receive beside wait_any")
            await wait_until_blocked()
            both.start_soon(a.send, b.rank, 1, b"awaited")
        await wait_until_blocked()
        require(not announced, "wait_any returned for a message that a receive had waited for")
        nursery.cancel_scope.cancel()


async def _record_wait_any(
    end: Wire, choices: list[tuple[int, int]], announced: list[Envelope], free_bits: int = 0
) -> None:
    """Add the result of `wait_any` to a list."""
    announced.append(await end.wait_any(choices, free_bits=free_bits))

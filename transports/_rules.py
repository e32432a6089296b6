"""Rules of the contract suite, `transports.testing`: a function each, whose docstring is the promise."""

from __future__ import annotations

import random
from array import array
from functools import partial
from itertools import product

import numpy as np
import trio
from trio.testing import assert_checkpoints

from transports._checking import (
    BrokenPromise,
    Call,
    Pair,
    Rule,
    begun,
    each_size,
    make_message,
    meet,
    outcome_of,
    require,
    settle,
)  # fmt: skip
from transports.buffers import Buffer
from transports.failures import ArgumentError, LengthMismatchError
from transports.request import Request
from transports.wire import TAG_LIMIT, Envelope

# -- messages arrive intact and in order, whatever else waits ---------------------------------------------------------


async def names(p: Pair) -> None:
    """Two endpoints are two ranks, and their repr says which."""
    require(p.a.rank != p.b.rank, f"both ends say that they are rank {p.a.rank}")
    for end in (p.a, p.b):
        require(str(end.rank) in repr(end), f"the repr of rank {end.rank} is {end!r}")
    await trio.lowlevel.checkpoint()


@each_size
async def sizes(p: Pair, nbytes: int) -> None:
    """Every length arrives intact, by either kind of receive, whichever end comes first."""
    message = make_message(nbytes)

    async def send_twice() -> None:
        await p.send(4, message)
        await p.send(4, message)

    async def receive_both_ways() -> None:
        await p.expect(4, message, f"{nbytes} bytes by recv_into")
        await p.expect(4, message, f"{nbytes} bytes by recv", loan=True)

    await meet(send_twice, receive_both_ways)
    await meet(receive_both_ways, send_twice)


async def zero_bytes(p: Pair) -> None:
    """An empty message is a message: it is matched, in its turn, by either kind of receive."""
    messages, case = (b"", b"x", b""), "bytes between empty messages"
    async with begun(*(partial(p.send, 5, message) for message in messages)):
        for message in messages:
            await p.expect(5, message, f"{len(message)} {case}", loan=True)
    async with begun(*(partial(p.expect, 5, message, f"{len(message)} {case}") for message in messages)):
        for message in messages:
            await p.send(5, message)


async def order_of_sends(p: Pair) -> None:
    """Sends of one tag that wait together arrive in the order of the calls, whatever their sizes and priorities."""
    count = p.scale.messages
    lengths = [70_000 - 10_000 * i if i < 8 else (8, 100, 2000)[i % 3] for i in range(count)]
    messages = [make_message(nbytes, i) for i, nbytes in enumerate(lengths)]
    async with begun(*(partial(p.send, 7, message, -(i % 8)) for i, message in enumerate(messages))):
        for i, message in enumerate(messages):
            await p.expect(7, message, f"message {i} of {count} on one tag")
    # long and short ones in turn, each as soon as the one before has suspended
    messages = [make_message(nbytes, i) for i, nbytes in enumerate((max(p.scale.sizes), 8) * 3)]
    async with trio.open_nursery() as nursery:
        for message in messages:
            nursery.start_soon(p.send, 8, message)
            await trio.lowlevel.checkpoint()  # the task has started when this one continues
        for i, message in enumerate(messages):
            await p.expect(8, message, f"message {i} of 6 on one tag, sent as soon as the one before had suspended")


async def order_of_receives(p: Pair) -> None:
    """Receives of one tag that wait together are served in the order of the calls."""
    count = p.scale.messages
    messages = [make_message(1000, i) for i in range(count)]
    receives = [
        partial(p.expect, 7, message, f"receive {i} of {count} on one tag") for i, message in enumerate(messages)
    ]
    async with begun(*receives):
        for message in messages:
            await p.send(7, message)


@each_size
async def ends(p: Pair, nbytes: int) -> None:
    """`done` is called once for each request, in the thread of the event loop, and then the request has ended."""
    received = p.begin_recv(11, bytearray(nbytes), nbytes)
    sent, lone = p.begin_send(11, make_message(nbytes)), p.begin_recv(12, bytearray(1), 1)
    if received.request is None or lone.request is None:
        raise BrokenPromise("begin_recv returned None, not a Request")
    with trio.move_on_after(p.scale.patience_s):
        while not (received.request.ended and (sent.request is None or sent.request.ended)):  # noqa: ASYNC110
            await trio.sleep(0.001)  # wires have no event, and a virtual clock moves while all sleep
    lone.request.withdraw()
    every = [each for each in (received, sent, lone) if each.request is not None]
    with trio.move_on_after(p.scale.patience_s):
        while not all(each.calls for each in every):  # noqa: ASYNC110
            await trio.sleep(0.001)
    await settle()
    for each in every:
        has = "" if each.request is not None and each.request.ended else "not "
        require(bool(each.calls), f"done was not called; the request has {has}ended")
        require(len(each.calls) == 1, "done was called twice for one request")
        require(each.calls == [each.thread], "done was called in another thread than the event loop's")


async def sends_without_tasks(p: Pair) -> None:
    """A message begun by a plain function arrives as it was, though its callback writes there and begins more."""
    messages = [make_message(nbytes, i) for i, nbytes in enumerate((8, 0, 70_000, 9, 100))]
    for first in ("the receiver", "the sender"):
        receives = [
            partial(p.expect, 9, message, f"message {i}, which {first} was first to name")
            for i, message in enumerate(messages)
        ]
        async with begun(*(receives if first == "the receiver" else ())):
            for message in messages:
                buffer = bytearray(message)
                if p.a.begin_send(p.b.rank, 9, buffer, priority=2, done=partial(_clear, buffer)) is None:
                    _clear(buffer)
                await settle()
            if first == "the sender":
                for receive in receives:
                    await receive()
    # sends that begin other sends in their callbacks, though no receive waits at first
    messages = [make_message(nbytes, i) for i, nbytes in enumerate((8, max(p.scale.sizes), 70_000, 1000, 60_000) * 5)]
    buffers, pending, all_ended = [bytearray(message) for message in messages], set(range(len(messages))), trio.Event()

    def start(i: int) -> None:
        if p.a.begin_send(p.b.rank, i, buffers[i], priority=i % 3, done=partial(on_end, i)) is None:
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
    await settle()  # unreceived messages have used up all credit
    for i, message in enumerate(messages):
        await p.expect(i, message, f"message {i} of {len(messages)}, which were started by a plain function,")
    await all_ended.wait()


def _clear(buffer: bytearray, _: Request | None = None) -> None:
    """Overwrite a buffer, which is the sender's again."""
    buffer[:] = bytes(len(buffer))


async def tags_are_independent(p: Pair) -> None:
    """A message that nobody receives yet, large or small, does not hold up other tags."""
    large, small, urgent = make_message(max(p.scale.sizes)), make_message(8, 1), make_message(8, 2)
    async with begun(partial(p.send, 1, large), partial(p.send, 2, small)) as nursery:
        nursery.start_soon(p.send, 3, urgent)
        await p.expect(3, urgent, "tag 3 while tags 1 and 2 wait")
        await p.expect(2, small, "tag 2 while tag 1 waits")
        await p.expect(1, large, "tag 1, late")


async def many_tags(p: Pair) -> None:
    """Thousands of tags may be outstanding, and are received in any order."""
    tags = list(range(p.scale.tags))
    async with trio.open_nursery() as nursery:
        for tag in tags:
            nursery.start_soon(p.send, tag, tag.to_bytes(8, "little"))
        await settle()
        for tag in random.Random(0).sample(tags, len(tags)):
            await p.expect(tag, tag.to_bytes(8, "little"), f"tag {tag} of {len(tags)}")


async def extreme_tags(p: Pair) -> None:
    """Tags reach from 0 to 2**64 - 1, and none is taken for another."""
    tags = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, TAG_LIMIT - 1]
    async with begun(*(partial(p.send, tag, tag.to_bytes(8, "little")) for tag in tags)):
        for tag in reversed(tags):
            await p.expect(tag, tag.to_bytes(8, "little"), f"tag {tag}")


async def both_directions(p: Pair) -> None:
    """Large messages of one tag cross in both directions at once."""
    there, back = make_message(max(p.scale.sizes), 1), make_message(max(p.scale.sizes), 2)
    other = Pair(p.b, p.a, p.scale)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(p.send, 9, there)
        nursery.start_soon(other.send, 9, back)
        await settle()
        nursery.start_soon(p.expect, 9, there, "the way there")
        nursery.start_soon(other.expect, 9, back, "the way back")


async def kinds_of_buffers(p: Pair) -> None:
    """Every C-contiguous buffer is sent as its bytes and received into: any dtype, any shape, read-only sources."""
    pairs: list[tuple[Buffer, Buffer]] = [
        (b"read-only", bytearray(9)),
        (array("d", [1.0, -0.0]), np.zeros(2)),
        (np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((3, 4), np.float32)),
        (np.array([1 + 2j]), np.zeros(1, np.complex128)),
        (np.array(7, np.int16), np.zeros((), np.int16)),
        (np.array([[True], [False]]), memoryview(bytearray(2))),
        (np.zeros((0, 3), np.float16), np.zeros((3, 0), np.float64)),
    ]
    for data, out in pairs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.send, 6, data)
            await p.b.recv_into(p.a.rank, 6, out)
        require(np.asarray(data).tobytes() == np.asarray(out).tobytes(), f"sent {data!r}, received {out!r}")


@each_size
async def ownership(p: Pair, nbytes: int) -> None:
    """A buffer may be overwritten as soon as its send has returned; the sent bytes arrive."""
    message = make_message(nbytes)
    sent = bytes(message)

    async def send_and_overwrite() -> None:
        await p.send(2, message)
        _clear(message)

    async with begun(send_and_overwrite):
        await p.expect(2, sent, f"{nbytes} bytes whose buffer was overwritten after the send")


@each_size
async def deliveries(p: Pair, nbytes: int) -> None:
    """A delivery's view is flat, read-only bytes, and stays intact until its release, which may come twice."""
    message = make_message(nbytes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(p.send, 2, message)
        with await p.delivery(2, nbytes) as delivery:
            shape = (delivery.view.format, delivery.view.ndim, delivery.view.nbytes)
            require(delivery.view.readonly, "a delivery may be written to")
            require(shape == ("B", 1, nbytes), f"a delivery of {nbytes} bytes has (format, ndim, nbytes) {shape}")
            require(delivery.view == message, "a delivery has other bytes than those sent")
            delivery.release()


async def announcements(p: Pair) -> None:
    """`wait_any` waits for a message of its choices and names the oldest; it takes none, so they can be received.

    `announced` names the same message, or, where it cannot know without waiting, none.
    """
    src, b = p.a.rank, p.b
    choices = [(src, 1), (src, 2)]
    announced: list[Envelope] = []

    async def note_any(*choices: tuple[int, int]) -> None:
        announced.append(await b.wait_any(choices))

    for nbytes in (8, max(p.scale.sizes)):
        messages = {tag: make_message(nbytes, tag) for tag in (1, 2, 3)}
        sent = {tag: Envelope(src=src, dst=b.rank, tag=tag, nbytes=nbytes) for tag in messages}
        announced.clear()
        async with begun(partial(note_any, *choices)) as nursery:
            nursery.start_soon(p.send, 3, messages[3])
            only = await b.wait_any([(src, 3)])
            require(only == sent[3], f"{sent[3]} was the only message, and wait_any returned {only}")
            await settle()
            require(not announced, "wait_any returned for a message that is none of its choices")
            nursery.start_soon(p.send, 2, messages[2])
            await b.wait_any([(src, 2)])
            await settle()
            told = f"{sent[2]} was the only choice with a message, and wait_any returned {announced}"
            require(announced == [sent[2]], told)
            nursery.start_soon(p.send, 1, messages[1])
            await b.wait_any([(src, 1)])
            with assert_checkpoints():
                first = await b.wait_any(choices)
            require(first == sent[2], f"{sent[2]} was the older message, and wait_any returned {first}")
            at_once = b.announced(choices)
            require(at_once in (None, first), f"wait_any returned {first}, and announced {at_once}")
            for tag, message in messages.items():
                await p.expect(tag, message, f"tag {tag}, after it was waited for")
    announced.clear()
    async with begun(partial(note_any, (src, 1))) as nursery:  # a message that a receive has matched is not announced
        await meet(partial(p.expect, 1, b"awaited", "a receive beside wait_any"), partial(p.send, 1, b"awaited"))
        await settle()
        require(not announced, "wait_any returned for a message that a receive had waited for")
        nursery.cancel_scope.cancel()


# -- wrong calls, cancelled calls, and calls that need not wait -------------------------------------------------------


async def bad_arguments(p: Pair) -> None:
    """Buffers, tags, ranks and lengths that cannot work are rejected at the call, and leave nothing behind."""
    a, b, scattered, frozen, data = p.a, p.b, np.zeros((4, 4))[:, ::2], np.zeros(4), b"12345678"
    frozen.flags.writeable = False
    nobody = max(a.rank, b.rank) + 10**6
    into = partial(b.recv_into, a.rank)
    wrong: list[tuple[str, Call]] = [
        ("sending a buffer that is not contiguous", partial(p.send, 6, scattered)),
        ("receiving into a buffer that is not contiguous", partial(into, 6, scattered)),
        ("receiving into a read-only array", partial(into, 6, frozen)),
        ("receiving into bytes", partial(into, 6, data)),
        ("receiving a negative length", partial(b.recv, a.rank, 6, -1)),
        *((f"sending with tag {tag}", partial(p.send, tag, data)) for tag in (-1, TAG_LIMIT)),
        *((f"receiving with tag {tag}", partial(into, tag, bytearray(8))) for tag in (-1, TAG_LIMIT)),
        ("sending to a rank that does not exist", partial(a.send, nobody, 6, data)),
        ("receiving from a rank that does not exist", partial(b.recv, nobody, 6, 8)),
        *(
            (f"waiting for any of {choices}", partial(b.wait_any, choices))
            for choices in ([], [(a.rank, -1)], [(nobody, 6)])
        ),
    ]
    for case, call in wrong:
        outcome: list[BaseException | None] = []
        await outcome_of(call, outcome)
        if not isinstance(outcome[0], ArgumentError):
            raise BrokenPromise(f"{case} gave {outcome[0]!r}; an ArgumentError is promised")
    await settle()
    await p.still_works(6, "the tag of rejected calls, used again")


async def lengths_disagree(p: Pair) -> None:
    """Both ends raise an error that names both lengths, whichever comes first; the tag works on.

    The send of a message that leaves before its receiver is known has no error. The check finds these by trying.
    """
    for i, nbytes in enumerate(p.scale.lengths):
        if i and not await _sender_raises(p, nbytes, nbytes - 1, send_first=True, loan=False):
            continue
        cases = product((nbytes - 1, nbytes + 1, 0), (True, False), (True, False))
        raised = [await _sender_raises(p, nbytes, expected, send_first=f, loan=loan) for expected, f, loan in cases]
        await p.still_works(3, "the tag of a failed message, used again")
        if all(raised):
            return


async def _sender_raises(p: Pair, sent_bytes: int, expected_bytes: int, *, send_first: bool, loan: bool) -> bool:
    """Let two ends name different lengths, and require their errors; False if the message had left its sender."""
    sender: list[BaseException | None] = []
    receiver: list[BaseException | None] = []
    calls = [
        partial(outcome_of, partial(p.send, 3, bytes(sent_bytes)), sender),
        partial(outcome_of, partial(p.receive, 3, expected_bytes, loan=loan), receiver),
    ]
    await meet(*(calls if send_first else reversed(calls)))
    for who, (error,) in (("receiver", receiver), ("sender", sender)):
        if who == "sender" and error is None and await _leaves_unreceived(p, sent_bytes):
            return False
        told = f"the {who}, with {sent_bytes} bytes sent, {expected_bytes} expected, got"
        if not isinstance(error, LengthMismatchError):
            raise BrokenPromise(f"{told} {error!r}; a LengthMismatchError is promised")
        named = (error.sent_bytes, error.expected_bytes)
        require(named == (sent_bytes, expected_bytes), f"{told} an error with the lengths {named}")
    return True


async def _leaves_unreceived(p: Pair, nbytes: int) -> bool:
    """Return whether a send of this length ends although nobody receives."""
    with trio.move_on_after(p.scale.patience_s) as waiting:
        await p.send(5, bytes(nbytes))
    if not waiting.cancelled_caught:
        await p.expect(5, bytes(nbytes), "a message that had left its sender")
    return not waiting.cancelled_caught


async def checkpoints(p: Pair) -> None:
    """Every call is a checkpoint, also when the other end is already there."""
    for loan in (True, False):
        ends = partial(p.send, 2, b"12345678"), partial(p.receive, 2, 8, loan=loan)
        for first, second in (ends, reversed(ends)):
            async with begun(first):
                with assert_checkpoints():
                    await second()


async def cancelled_at_the_call(p: Pair) -> None:
    """A call in a cancelled scope raises Cancelled and does nothing, also when the other end is already there."""

    async def cancel(call: Call, who: str) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await call()
        require(scope.cancelled_caught, f"{who} did not notice that it was cancelled")

    async with begun(partial(p.expect, 2, b"real one", "after a send that was cancelled at the call")):
        await cancel(partial(p.send, 2, b"no such!"), "send")
        await p.send(2, b"real one")
    for loan in (True, False):
        async with begun(partial(p.send, 2, b"real one")):
            await cancel(partial(p.receive, 2, 8, loan=loan), "a receive")
            await p.expect(2, b"real one", "after a receive that was cancelled at the call")


async def cancelled_before_match(p: Pair) -> None:
    """A call that is cancelled while it waits for its other end is withdrawn; the next one takes its place."""
    for loan in (True, False):
        async with begun(partial(p.receive, 2, 8, loan=loan)) as nursery:
            nursery.cancel_scope.cancel()
    for nbytes in p.scale.lengths:
        first, second = make_message(nbytes, 1), make_message(nbytes, 2)
        sender: list[BaseException | None] = []
        async with begun(partial(outcome_of, partial(p.send, 2, first), sender)) as nursery:
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.send, 2, second)
            if sender == [None]:
                await p.expect(2, first, "a send that had returned before it was cancelled")
            await p.expect(2, second, "after receives and a send that were withdrawn")
        if sender != [None]:
            return


async def cancelled_after_match(p: Pair) -> None:
    """A sender that is cancelled while its message is on loan waits for the release, and its send succeeds."""

    async def send(message: bytearray, scope: trio.CancelScope, sender: list[BaseException | None]) -> None:
        with scope:
            await outcome_of(partial(p.send, 2, message), sender)
        _clear(message)

    for nbytes in (8, max(p.scale.sizes)):
        message, scope, sender = make_message(nbytes), trio.CancelScope(), list[BaseException | None]()
        sent = bytes(message)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, message, scope, sender)
            with await p.delivery(2, nbytes) as delivery:
                scope.cancel()
                await settle()
                require(delivery.view == sent, "the send returned while its memory was on loan")
        require(sender == [None], f"the message was received, but its send ended with {sender[0]!r}")


#: The rules of this file, in the order in which `check_transport` tries them.
RULES: tuple[Rule, ...] = (
    names, sizes, zero_bytes, order_of_sends, order_of_receives, ends, sends_without_tasks, tags_are_independent,
    many_tags, extreme_tags, both_directions, kinds_of_buffers, bad_arguments, lengths_disagree, checkpoints,
    cancelled_at_the_call, cancelled_before_match, cancelled_after_match, ownership, deliveries, announcements,
)  # fmt: skip

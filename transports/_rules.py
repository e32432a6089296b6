"""Rules of the contract suite, `transports.testing`: a function each, whose docstring is the promise."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import trio
from trio.testing import assert_checkpoints

from transports._checking import (
    BegunMessage,
    BrokenPromise,
    Call,
    Rule,
    WirePair,
    clear,
    for_each_size,
    make_message,
    require,
)
from transports.buffers import Buffer
from transports.failures import ArgumentError, LengthMismatchError, SignatureMismatchError
from transports.request import Request
from transports.signature import TEXT_BYTES, PlainSignature
from transports.wire import OPEN, TAG_LIMIT, Envelope


async def names(pair: WirePair) -> None:
    """Two endpoints are two ranks, and their repr says which."""
    require(pair.a.rank != pair.b.rank, f"both ends say that they are rank {pair.a.rank}")
    for end in (pair.a, pair.b):
        require(str(end.rank) in repr(end), f"the repr of rank {end.rank} is {end!r}")
    await trio.lowlevel.checkpoint()


# -- messages arrive intact and in order, whatever else waits ---------------------------------------------------------


@for_each_size
async def sizes(pair: WirePair, nbytes: int) -> None:
    """Every length arrives intact, by either kind of receive, whichever end comes first.

    The sender overwrites its buffer as soon as its send has returned. A delivery's view is flat, read-only bytes, and
    stays intact until its release, which may come twice.
    """
    for loan in (True, False):
        await pair.send(4, nbytes)
        await pair.receive(4, loan=loan)
        await pair.receive(4, nbytes, loan=loan)
        await pair.send(4, nbytes)


async def order_of_sends(pair: WirePair) -> None:
    """Sends of one tag that wait together arrive in the order of the calls, whatever their sizes and priorities.

    An empty message is a message: it is matched in its turn.
    """
    for i in range(pair.scale.messages):
        # First eight messages of falling length, long ones before short ones; then short and empty ones. Later sends
        # are more urgent, so that a wire that follows priorities or lengths within a tag is found.
        await pair.send(7, 70_000 - 10_000 * i if i < 8 else (8, 0, 100, 1, 2000)[i % 5], priority=-(i % 8))
    for i in range(pair.scale.messages):
        await pair.receive(7, loan=i % 2 == 0)
    for nbytes in (max(pair.scale.sizes), 8) * 3:  # each as soon as the one before has suspended
        pair.nursery.start_soon(pair.make_send(8, nbytes))
        await trio.lowlevel.checkpoint()  # the task has started when this one continues
    for _ in range(6):
        await pair.receive(8)


async def order_of_receives(pair: WirePair) -> None:
    """Receives of one tag that wait together are served in the order of the calls."""
    lengths = [(1000, 0, 1)[i % 3] for i in range(pair.scale.messages)]
    for nbytes in lengths:
        await pair.receive(7, nbytes)
    for nbytes in lengths:
        await pair.send(7, nbytes)


@for_each_size
async def ends(pair: WirePair, nbytes: int) -> None:
    """`done` is called once for each request, in the thread of the event loop, and then the request has ended."""
    received = pair.begin_recv(11, bytearray(nbytes), nbytes)
    sending, lone = pair.begin_send(11, make_message(nbytes)), pair.begin_recv(12, bytearray(1), 1)
    if received.request is None or lone.request is None:
        raise BrokenPromise("begin_recv returned None, not a Request")
    with trio.move_on_after(pair.scale.patience_s):
        while not (received.request.ended and (sending.request is None or sending.request.ended)):  # noqa: ASYNC110
            await trio.sleep(0.001)  # wires have no event, and a virtual clock moves while all sleep
    lone.request.withdraw()
    every = [each for each in (received, sending, lone) if each.request is not None]
    with trio.move_on_after(pair.scale.patience_s):
        while not all(each.calls for each in every):  # noqa: ASYNC110
            await trio.sleep(0.001)
    await pair.wait_all_blocked()
    for each in every:
        has = "" if each.request is not None and each.request.ended else "not "
        require(bool(each.calls), f"done was not called; the request has {has}ended")
        require(len(each.calls) == 1, "done was called twice for one request")
        require(each.calls == [each.thread], "done was called in another thread than the event loop's")


async def sends_without_tasks(pair: WirePair) -> None:
    """A message begun by a plain function arrives as it was, though its callback writes there and begins more."""
    lengths: tuple[int, ...] = (8, 0, 70_000, 9, 100)
    for receiver_first in (True, False):
        for nbytes in lengths if receiver_first else ():
            await pair.receive(9, nbytes)
        for nbytes in lengths:
            buffer = bytearray(pair.next_message("send", 9, nbytes))
            if pair.a.begin_send(pair.b.rank, 9, buffer, priority=2, done=partial(clear, buffer)) is None:
                clear(buffer)
            await pair.wait_all_blocked()
        for _ in () if receiver_first else lengths:
            await pair.receive(9)
    # Each of these has a tag of its own. The first half is begun now; each that ends begins one of the second half.
    lengths = (8, max(pair.scale.sizes), 70_000, 1000, 60_000) * 5
    pending, all_ended = set(range(len(lengths))), trio.Event()

    def start_send(i: int) -> None:
        buffer = bytearray(pair.next_message("send", i, lengths[i]))
        if pair.a.begin_send(pair.b.rank, i, buffer, priority=i % 3, done=partial(on_end, i, buffer)) is None:
            on_end(i, buffer, None)

    def on_end(i: int, buffer: bytearray, call: Request | None) -> None:
        """Overwrite the buffer of an ended send, and begin a later one."""
        clear(buffer)
        pending.remove(i)
        if (call is None or call.error is None) and i + len(lengths) // 2 < len(lengths):
            start_send(i + len(lengths) // 2)
        if not pending:
            all_ended.set()

    for i in range(len(lengths) // 2):
        start_send(i)
    await pair.wait_all_blocked()  # unreceived messages have used up all credit
    for i, nbytes in enumerate(lengths):
        await pair.make_receive(i, nbytes)()
    await all_ended.wait()


async def tags_are_independent(pair: WirePair) -> None:
    """A message that nobody receives yet, large or small, does not hold up other tags."""
    for tag, nbytes in ((1, max(pair.scale.sizes)), (2, 8), (3, 8)):
        await pair.send(tag, nbytes)
    for tag in (3, 2, 1):
        await pair.receive(tag)


async def many_tags(pair: WirePair) -> None:
    """Thousands of tags may be outstanding, and are received in any order."""
    tags = range(pair.scale.tags)
    for tag in tags:
        pair.nursery.start_soon(pair.make_send(tag, 8))
    await pair.wait_all_blocked()
    for tag in random.Random(0).sample(tags, len(tags)):
        await pair.receive(tag)


async def extreme_tags(pair: WirePair) -> None:
    """Tags reach from 0 to 2**64 - 1, and none is taken for another."""
    tags = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, TAG_LIMIT - 1]
    for tag in tags:
        await pair.send(tag, 8)
    for tag in reversed(tags):
        await pair.receive(tag)


async def both_directions(pair: WirePair) -> None:
    """Large messages of one tag cross in both directions at once."""
    back = WirePair(pair.b, pair.a, pair.scale, pair.nursery)
    for way in (pair, back):
        await way.send(9, max(pair.scale.sizes))
    for way in (pair, back):
        await way.receive(9)


async def kinds_of_buffers(pair: WirePair) -> None:
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
        pair.nursery.start_soon(pair.a.send, pair.b.rank, 6, data)
        await pair.b.recv_into(pair.a.rank, 6, out)
        require(np.asarray(data).tobytes() == np.asarray(out).tobytes(), f"sent {data!r}, received {out!r}")


async def announcements(pair: WirePair) -> None:
    """`wait_any` waits for a message of its choices and names the oldest; it takes none, so they can be received.

    `announced` names the same message, or, where it cannot know without waiting, none.
    """
    src, b = pair.a.rank, pair.b
    announced: list[Envelope] = []

    async def receive_any(*choices: tuple[int, int]) -> None:
        announced.append(await b.wait_any(choices))

    for nbytes in (8, max(pair.scale.sizes)):
        choices, names = [(src, 1), (src, 2)], partial(Envelope, src=src, dst=b.rank, nbytes=nbytes)
        announced.clear()
        await pair.start(partial(receive_any, *choices))
        for tag, expected in ((3, []), (2, [names(tag=2)]), (1, [names(tag=2)])):
            pair.nursery.start_soon(pair.make_send(tag, nbytes))
            only = await b.wait_any([(src, tag)])
            require(only == names(tag=tag), f"the only message has tag {tag}, and wait_any returned {only}")
            await pair.wait_all_blocked()
            require(announced == expected, f"wait_any returned {announced}, not {expected}, as tag {tag} came")
        with assert_checkpoints():
            first = await b.wait_any(choices)
        require(first == names(tag=2), f"the older message has tag 2, and wait_any returned {first}")
        at_once = b.announced(choices)
        require(at_once in (None, first), f"wait_any returned {first}, and announced {at_once}")
        for tag in (1, 2, 3):
            await pair.receive(tag)
    announced.clear()
    watch = await pair.start(partial(receive_any, (src, 1)))
    await pair.receive(1, 8)
    await pair.send(1, 8)
    require(not announced, "wait_any returned for a message that a receive had waited for")
    watch.scope.cancel()


# -- wrong calls, cancelled calls, and calls that need not wait -------------------------------------------------------


async def bad_arguments(pair: WirePair) -> None:
    """Buffers, tags, ranks and lengths that cannot work are rejected at the call, and leave nothing behind."""
    a, b, scattered, frozen, data = pair.a, pair.b, np.zeros((4, 4))[:, ::2], np.zeros(4), b"12345678"
    frozen.flags.writeable = False
    nobody = max(a.rank, b.rank) + 10**6
    send, into = partial(a.send, b.rank), partial(b.recv_into, a.rank)
    wrong: list[tuple[str, Call]] = [
        ("sending a buffer that is not contiguous", partial(send, 6, scattered)),
        ("receiving into a buffer that is not contiguous", partial(into, 6, scattered)),
        ("receiving into a read-only array", partial(into, 6, frozen)),
        ("receiving into bytes", partial(into, 6, data)),
        ("receiving a negative length", partial(b.recv, a.rank, 6, -1)),
        *((f"sending with tag {tag}", partial(send, tag, data)) for tag in (-1, TAG_LIMIT)),
        *((f"receiving with tag {tag}", partial(into, tag, bytearray(8))) for tag in (-1, TAG_LIMIT)),
        ("sending to a rank that does not exist", partial(a.send, nobody, 6, data)),
        ("receiving from a rank that does not exist", partial(b.recv, nobody, 6, 8)),
        *(
            (f"waiting for any of {choice}", partial(b.wait_any, choice))
            for choice in ([], [(a.rank, -1)], [(nobody, 6)])
        ),
    ]
    for case, call in wrong:
        error = await (await pair.start(call)).wait()
        require(isinstance(error, ArgumentError), f"{case} ended with {error!r}; an ArgumentError is promised")
    await pair.send(6, 8)
    await pair.receive(6)


async def lengths_disagree(pair: WirePair) -> None:
    """Both ends raise an error that names both lengths, whichever comes first; the tag works on.

    The send of a message that leaves before its receiver is known has no error. The check finds these by trying.
    """
    for i, nbytes in enumerate(pair.scale.lengths):
        # The first length is so short that it may leave at once; for longer ones a single trial shows whether they
        # still do.
        if i and not await _require_length_errors(pair, nbytes, nbytes - 1, send_first=True, loan=False):
            continue
        cases = product((nbytes - 1, nbytes + 1, 0), (True, False), (True, False))
        raised = [
            await _require_length_errors(pair, nbytes, expected, send_first=f, loan=loan) for expected, f, loan in cases
        ]
        await pair.send(3, 8)
        await pair.receive(3)
        if all(raised):
            return


async def _require_length_errors(
    pair: WirePair, sent_bytes: int, expected_bytes: int, *, send_first: bool, loan: bool
) -> bool:
    """Let two ends name different lengths, and require their errors; False if the message had left its sender."""
    send = partial(pair.a.send, pair.b.rank, 3, bytes(sent_bytes))
    calls: list[Call] = [send, partial(pair.receive_bytes, 3, expected_bytes, loan=loan)]
    ends = [await pair.start(call) for call in (calls if send_first else calls[::-1])]
    sender, receiver = ends if send_first else ends[::-1]
    for who, end in (("receiver", receiver), ("sender", sender)):
        error, end_text = await end.wait(), f"the {who}, with {sent_bytes} bytes sent, {expected_bytes} expected, got"
        if who == "sender" and error is None and await _send_ends_unreceived(pair, sent_bytes):
            return False
        if not isinstance(error, LengthMismatchError):
            raise BrokenPromise(f"{end_text} {error!r}; a LengthMismatchError is promised")
        named = (error.sent_bytes, error.expected_bytes)
        require(named == (sent_bytes, expected_bytes), f"{end_text} an error with the lengths {named}")
    return True


async def _send_ends_unreceived(pair: WirePair, nbytes: int) -> bool:
    with trio.move_on_after(pair.scale.patience_s) as waiting:
        await pair.make_send(5, nbytes)()
    if waiting.cancelled_caught:
        pair.drop_message(5)
    else:
        await pair.receive(5)
    return not waiting.cancelled_caught


async def checkpoints(pair: WirePair) -> None:
    """Every call is a checkpoint, also when the other end is already there."""
    for loan in (True, False):
        await pair.receive(2, 8, loan=loan)
        with assert_checkpoints():
            await pair.a.send(pair.b.rank, 2, pair.next_message("send", 2, 8))
        await pair.send(2, 8)
        with assert_checkpoints():
            await pair.receive(2, loan=loan)


async def cancelled_at_the_call(pair: WirePair) -> None:
    """A call in a cancelled scope raises Cancelled and does nothing, also when the other end is already there."""

    async def run_cancelled(call: Call, who: str) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await call()
        require(scope.cancelled_caught, f"{who} did not notice that it was cancelled")

    tag, nbytes = 2, 8
    # a receive waits already, so that the send could match it at once
    await pair.receive(tag, nbytes)
    await run_cancelled(partial(pair.a.send, pair.b.rank, tag, b"no such!"), "send")
    # the receive was not consumed: it gets the next message, whose bytes it checks
    await pair.send(tag, nbytes)
    for loan in (True, False):
        # a message waits already; the cancelled receive must leave it to the next one
        await pair.send(tag, nbytes)
        await run_cancelled(partial(pair.receive_bytes, tag, nbytes, loan=loan), "a receive")
        await pair.receive(tag)


async def cancelled_before_match(pair: WirePair) -> None:
    """A call that is cancelled while it waits for its other end is withdrawn; the next one takes its place."""
    for loan in (True, False):
        (await pair.start(partial(pair.receive_bytes, 2, 8, loan=loan))).scope.cancel()
        await pair.wait_all_blocked()
    for nbytes in pair.scale.lengths:
        first = await pair.start(pair.make_send(2, nbytes))
        first.scope.cancel()
        withdrawn = await first.wait() is not None
        if withdrawn:
            pair.drop_message(2)
        await pair.send(2, nbytes)
        # A message that had left despite the cancellation arrives, too: then two are received. Longer lengths are tried
        # until one is withdrawn.
        for _ in range(2 - withdrawn):
            await pair.receive(2)
        if withdrawn:
            return


async def cancelled_after_match(pair: WirePair) -> None:
    """A sender that is cancelled while its message is on loan waits for the release, and its send succeeds."""
    for nbytes in (8, max(pair.scale.sizes)):
        sender, message = await pair.start(pair.make_send(2, nbytes)), pair.next_message("receive", 2, None)
        with await pair.b.recv(pair.a.rank, 2, nbytes) as delivery:
            sender.scope.cancel()
            await pair.wait_all_blocked()
            require(delivery.view == message, "the send returned while its memory was on loan")
        error = await sender.wait()
        require(error is None, f"the message was received, but its send ended with {error!r}")


# -- signatures are compared where messages meet, and say what a message is -------------------------------------------

_TAG = 21  # of all messages below
_NEXT_BYTES = 4  # length of the message after one that has failed
# Signatures of two calls that differ in the last part, and one that leaves it open. The texts are of any bytes; that of
# call 5 is as long as a text may be.
_CALL_5 = PlainSignature(7 << 40 | 1 << 20 | 5, b"five" + bytes(range(256 - TEXT_BYTES + 4, 256)))
_CALL_6 = PlainSignature(7 << 40 | 1 << 20 | 6, b"\0six\0")
_ANY_CALL = PlainSignature(7 << 40 | 1 << 20, b"")


async def _run_both_ends(
    pair: WirePair, send: Callable[[], BegunMessage], receive: Callable[[], BegunMessage], *, send_first: bool
) -> tuple[BegunMessage, BegunMessage]:
    """Begin both ends of a message, one of them first, and wait for them; return the send and the receive."""
    first = (send if send_first else receive)()
    await pair.wait_all_blocked()
    second = (receive if send_first else send)()
    sent, received = (first, second) if send_first else (second, first)
    await received.wait()
    await sent.wait()
    return sent, received


@for_each_size
async def signatures_agree(pair: WirePair, nbytes: int) -> None:
    """Messages whose signatures are equal, or open on one side, arrive, the sender or the receiver first."""
    message, case = make_message(nbytes), f"{nbytes} bytes of one call"
    equal, open_ = ((_CALL_5, _CALL_5),), ((_CALL_5, _ANY_CALL), (_ANY_CALL, _CALL_6), (None, _CALL_6), (_CALL_5, None))
    for mine, theirs in equal + open_:
        out = bytearray(nbytes)
        ends = (
            partial(pair.begin_send, _TAG, message, theirs),
            partial(pair.begin_recv, _TAG, out, nbytes, signature=mine),
        )
        for end in await _run_both_ends(pair, *ends, send_first=bool(nbytes % 2)):  # either order, by the length
            require(await end.wait() is None, f"{case}: {await end.wait()!r}")
        require(out == message, f"{case}: other bytes than those sent")


@for_each_size
async def signatures_differ(pair: WirePair, nbytes: int) -> None:
    """Both ends that wait fail with the other's signature, whatever the lengths; the next message arrives."""
    for expected_bytes, send_first in ((nbytes, True), (nbytes, False), (nbytes + 1, True), (OPEN, False)):
        out = None if expected_bytes == OPEN else bytearray(expected_bytes)
        send = partial(pair.begin_send, _TAG, make_message(nbytes), _CALL_6)
        receive = partial(pair.begin_recv, _TAG, out, expected_bytes, signature=_CALL_5)
        sent, received = await _run_both_ends(pair, send, receive, send_first=send_first)
        for who, end, other in (("receiver", received, _CALL_6), ("sender", sent, _CALL_5)):
            error, end_text = await end.wait(), f"the {who} of {nbytes} bytes"
            if who == "sender" and error is None:  # on some wires a send succeeds before it meets its receive
                continue
            if not isinstance(error, SignatureMismatchError) or end.request is None:
                raise BrokenPromise(f"{end_text}, of another call, ended with {error!r}")
            seen = end.request.theirs
            require(error.theirs == seen == other, f"{end_text} got the signature {seen!r}, not {other!r}")
        pair.nursery.start_soon(pair.make_send(_TAG, _NEXT_BYTES))
        await pair.receive(_TAG)


async def signatures_of_many_calls(pair: WirePair) -> None:
    """Each message is delivered with its own signature, though there are more of them than a wire may remember."""
    for number in range(1, 5000):
        signature = PlainSignature(number << 40, b"call %d" % number)
        # Every 100th receive is of any length, and two in three are begun before their send.
        receive = partial(pair.begin_recv, _TAG, bytearray(1), OPEN if number % 100 == 0 else 1, signature=signature)
        received = receive() if number % 3 else None
        sent = pair.begin_send(_TAG, b"x", signature)
        error = await (received or receive()).wait()
        require(error is None, f"call {number}: {error!r}")
        await sent.wait()


@for_each_size
async def any_length(pair: WirePair, nbytes: int) -> None:
    """A receive of any length learns length and signature where it meets its message, which it gets whole."""
    message, case, envelopes = make_message(nbytes), f"{nbytes} bytes of any length", list[tuple[int, object]]()

    def allocate(request: Request) -> Buffer:
        envelopes.append((request.nbytes, request.theirs))
        return memory

    for loans in (True, False):
        memory = bytearray(nbytes)
        sending = pair.begin_send(_TAG, message, _CALL_6)
        if nbytes % 2:
            await pair.wait_all_blocked()
        begun = pair.begin_recv(_TAG, None, OPEN, signature=_ANY_CALL, allocate=None if loans else allocate)
        error, received = await begun.wait(), begun.request
        if error is not None or received is None:
            raise BrokenPromise(f"{case}: {error!r}")
        require(received.theirs == _CALL_6, f"the signature of the sender is {received.theirs!r}, not {_CALL_6!r}")
        require(received.nbytes == nbytes, f"the length is {received.nbytes}, not {nbytes}")
        require(loans or envelopes == [(nbytes, _CALL_6)], f"allocate was called with {envelopes}")
        if loans:
            with received.delivery() as delivery:
                memory[:] = delivery.view
        await sending.wait()
        require(memory == message, f"{case}: other bytes than those sent")


@for_each_size
async def no_memory_for_any_length(pair: WirePair, nbytes: int) -> None:
    """If the memory for a receive of any length cannot be made, the receive fails with the error of `allocate`.

    Its sender ends, and the next message arrives.
    """

    def allocate(_: Request) -> Buffer:
        raise MemoryError("as the check wants it")

    send = partial(pair.begin_send, _TAG, make_message(nbytes), _CALL_6)
    receive = partial(pair.begin_recv, _TAG, None, OPEN, allocate=allocate)
    _, received = await _run_both_ends(pair, send, receive, send_first=True)
    error = await received.wait()
    require(isinstance(error, MemoryError), f"without memory for {nbytes} bytes, the receive ended with {error!r}")
    pair.nursery.start_soon(pair.make_send(_TAG, _NEXT_BYTES))
    await pair.receive(_TAG)


#: Every rule, in the order in which `check_transport` tries them.
RULES: tuple[Rule, ...] = (
    names, sizes, order_of_sends, order_of_receives, ends, sends_without_tasks, tags_are_independent,
    many_tags, extreme_tags, both_directions, kinds_of_buffers, bad_arguments, lengths_disagree, checkpoints,
    cancelled_at_the_call, cancelled_before_match, cancelled_after_match, announcements,
    signatures_agree, signatures_differ, signatures_of_many_calls, any_length, no_memory_for_any_length,
)  # fmt: skip

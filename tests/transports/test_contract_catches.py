"""Every check of the contract suite fails on an endpoint that breaks the promise it is about."""

import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.errors import error_of
from transports import ArgumentError, Buffer, Delivery, Envelope, LengthMismatchError, NeuronLink, Wire, wire
from transports._checking import Scale
from transports.buffers import as_bytes
from transports.request import Done, Request
from transports.signature import PlainSignature, Signature
from transports.testing import CHECKS, ContractViolation, check_transport, run_check
from transports.wire import TAG_LIMIT


class Honest(Wire):
    """Passes everything on; its subclasses each break one promise."""

    def __init__(self, inner: Wire, nursery: trio.Nursery) -> None:
        self.rank = inner.rank
        self.inner = inner
        self.nursery = nursery
        self.lock = trio.Lock()
        self.room = trio.CapacityLimiter(100)

    def begin_send(self, *args: Any, **options: Any) -> Request | None:
        return self.inner.begin_send(*args, **options)

    def begin_recv(self, *args: Any, **options: Any) -> Request:
        return self.inner.begin_recv(*args, **options)

    def unexpected(self, tag: int | None = None) -> Sequence[Envelope]:
        return self.inner.unexpected(tag)

    def watch(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        return self.inner.watch(notify)

    def check(self, peer: int, tag: int = 0) -> None:
        self.inner.check(peer, tag)

    # Subclasses await calls of the inner wire, whatever they do to messages that are begun.

    async def send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None
    ) -> None:
        await self.inner.send(dst, tag, data, priority=priority)

    async def recv_into(self, src: int, tag: int, out: Buffer, *, signature: Signature | None = None) -> None:
        await self.inner.recv_into(src, tag, out)

    async def recv(self, src: int, tag: int, nbytes: int, *, signature: Signature | None = None) -> Delivery:
        return await self.inner.recv(src, tag, nbytes)

    def announced(self, choices: Sequence[tuple[int, int]]) -> Envelope | None:
        return None

    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> Envelope:
        return await self.inner.wait_any(choices)


class SameRank(Honest):
    def __init__(self, inner: Wire, nursery: trio.Nursery) -> None:
        super().__init__(inner, nursery)
        self.rank = 0


class Swaps(Honest):
    """Lets one send, or receive, in ten begin after the next one."""

    def __init__(self, inner: Wire, nursery: trio.Nursery, *, seed: int, what: str) -> None:
        super().__init__(inner, nursery)
        self.chance, self.what = random.Random(seed), what
        self.held: trio.Event | None = None

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        await self.in_turn("send", partial(super().send, dst, tag, data, priority=priority))

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        await self.in_turn("receive", partial(super().recv_into, src, tag, out))

    async def in_turn(self, what: str, call: Callable[[], Awaitable[None]]) -> None:
        if what == self.what and self.held is None and self.chance.random() < 0.1:
            self.held = trio.Event()
            await self.held.wait()
            await call()
            return
        held, self.held = self.held, None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            if held is not None:
                await trio.testing.wait_all_tasks_blocked()
                held.set()


class NamelessRepr(Honest):
    def __repr__(self) -> str:
        return "<endpoint>"


class LosesLastByte(Honest):
    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        await super().recv_into(src, tag, out)
        if as_bytes(out).nbytes > 2**16:
            as_bytes(out)[-1] ^= 1


class ReadsTheBufferLater(Honest):
    """Says of a message that a task is going to send that it has left."""

    def begin_send(self, dst: int, tag: int, data: Buffer, **options: Any) -> Request | None:
        self.nursery.start_soon(self.inner.send, dst, tag, data)
        return None


class TellsBeforeItReads(Honest):
    """Has a message that is started by a plain function sent by a task, and says at once that it was."""

    def begin_send(self, dst: int, tag: int, data: Buffer, *, done: Done, **options: Any) -> Request | None:
        self.nursery.start_soon(self.inner.send, dst, tag, data)
        request = Request(done)
        request.end()
        return request


class EndsTwice(Honest):
    def begin_recv(self, *args: Any, done: Done, **options: Any) -> Request:
        def twice(request: Request) -> None:
            done(request)
            done(request)

        return self.inner.begin_recv(*args, done=twice, **options)


class LosesLentByte(Honest):
    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        with await super().recv(src, tag, nbytes) as delivery:
            return Delivery(memoryview(bytes(delivery.view[:-1]) + b"?" * bool(nbytes)))


class KeepsTheDelivery(Honest):
    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        await super().recv(src, tag, nbytes)
        return None  # type: ignore[return-value]  # as where the word return is forgotten


class Polls(Honest):
    """Looks again and again, and is never blocked."""

    def __init__(self, inner: Wire, nursery: trio.Nursery) -> None:
        super().__init__(inner, nursery)
        self.turns: defaultdict[tuple[int, int], deque[object]] = defaultdict(deque)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        turns, turn = self.turns[src, tag], object()
        turns.append(turn)
        try:
            while turns[0] is not turn or self.inner.announced([(src, tag)]) is None:  # polls on purpose
                await trio.lowlevel.checkpoint()
            await self.inner.recv_into(src, tag, out)
        finally:
            turns.remove(turn)


class WaitsForItsBytes(Honest):
    """Keeps the order only of messages that are far apart: a short one overtakes."""

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        await trio.sleep(as_bytes(data).nbytes * 1e-7)  # longer than a busy machine needs to send the next one
        await super().send(dst, tag, data)


class SkipsEmpty(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        if as_bytes(data).nbytes:
            await super().send(dst, tag, data)


class OneAtATime(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        async with self.lock:
            await super().send(dst, tag, data)


class FewAtATime(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        async with self.room:
            await super().send(dst, tag, data)


class MostUrgentFirst(Honest):
    """Keeps what waits in a heap of its own, by priority only."""

    def __init__(self, inner: Wire, nursery: trio.Nursery) -> None:
        super().__init__(inner, nursery)
        self.heap: list[tuple[int, bytes]] = []

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        self.heap.append((priority, bytes(as_bytes(data))))
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(1)
        self.heap.sort()
        await super().send(dst, tag, self.heap.pop(0)[1])


class LastReceiveFirst(Honest):
    """Serves waiting receives from the newest to the oldest."""

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        self.waiting = [*getattr(self, "waiting", []), out]
        await trio.sleep(1)
        newest = self.waiting.pop()
        room = bytearray(as_bytes(newest).nbytes)
        await super().recv_into(src, tag, room)
        as_bytes(newest)[:] = room


class ShortTags(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        await super().send(dst, tag % 2**32 if 0 <= tag < TAG_LIMIT else tag, data)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        await super().recv_into(src, tag % 2**32 if 0 <= tag < TAG_LIMIT else tag, out)


class HalfDuplex(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        async with self.lock:
            await super().send(dst, tag, data)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        async with self.lock:
            await super().recv_into(src, tag, out)


class PlainBuffersOnly(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        await super().send(dst, tag, memoryview(data).cast("B"))  # type: ignore[arg-type]


class CopiesScattered(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        self.nursery.start_soon(self.inner.send, dst, tag, np.ascontiguousarray(data))
        await trio.lowlevel.checkpoint()


class IgnoresReadOnly(Honest):
    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        if as_bytes(out).readonly:
            return
        await super().recv_into(src, tag, out)


class WrapsTags(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        if 0 <= tag < TAG_LIMIT:
            await super().send(dst, tag, data)


class SendsToNobody(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        if dst < 2:
            await super().send(dst, tag, data)


class LeavesRejectedBehind(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        try:
            await super().send(dst, tag, data)
        except ValueError:
            self.nursery.start_soon(self.inner.send, 1, 6, b"rejected")
            raise


class AdaptsLength(Honest):
    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        try:
            await super().recv_into(src, tag, out)
        except LengthMismatchError:
            return


class TellsReceiverOnly(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        try:
            await super().send(dst, tag, data)
        except LengthMismatchError:
            return


class Eager(Honest):
    """Keeps the contract, though messages of up to 20,000 bytes leave before anybody receives them."""

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        if as_bytes(data).nbytes > 20_000:
            await self.send_long(dst, tag, data)
        else:
            await trio.lowlevel.checkpoint()
            self.nursery.start_soon(self._deliver, dst, tag, bytes(as_bytes(data)))

    async def send_long(self, dst: int, tag: int, data: Buffer) -> None:
        await self.inner.send(dst, tag, data)

    async def _deliver(self, dst: int, tag: int, data: bytes) -> None:
        with suppress(LengthMismatchError):
            await self.inner.send(dst, tag, data)


class EagerThenSilent(Eager):
    async def send_long(self, dst: int, tag: int, data: Buffer) -> None:
        with suppress(LengthMismatchError):
            await super().send_long(dst, tag, data)


class EagerThenNotWithdrawn(Eager):
    async def send_long(self, dst: int, tag: int, data: Buffer) -> None:
        self.nursery.start_soon(self.inner.send, dst, tag, bytes(as_bytes(data)))
        await trio.sleep(1)


class MixesUpLengths(Honest):
    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        try:
            await super().recv_into(src, tag, out)
        except LengthMismatchError as error:
            error.sent_bytes, error.expected_bytes = error.expected_bytes, error.sent_bytes
            raise


class DeafToCancel(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        with trio.CancelScope(shield=True):
            await super().send(dst, tag, data)


class DeafReceive(Honest):
    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        with trio.CancelScope(shield=True):
            return await super().recv(src, tag, nbytes)
        raise AssertionError("a shielded scope nobody cancels lets the result through")


class NotWithdrawn(Honest):
    """Hands the message to the background, so that cancelling the call does not take it back."""

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        done = trio.Event()
        self.nursery.start_soon(self._deliver, done, dst, tag, self.keep(data))
        await done.wait()

    def keep(self, data: Buffer) -> Buffer:
        return bytes(as_bytes(data))

    async def _deliver(self, done: trio.Event, dst: int, tag: int, data: Buffer) -> None:
        await self.inner.send(dst, tag, data)
        done.set()


class GivesBackEarly(NotWithdrawn):
    def keep(self, data: Buffer) -> Buffer:
        return data


class ReceiveNotWithdrawn(Honest):
    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        done = trio.Event()
        self.nursery.start_soon(self._receive, done, src, tag, out)
        await done.wait()

    async def _receive(self, done: trio.Event, src: int, tag: int, out: Buffer) -> None:
        await self.inner.recv_into(src, tag, out)
        done.set()


class EagerWithoutCopy(Honest):
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        self.nursery.start_soon(self.inner.send, dst, tag, data)
        await trio.lowlevel.checkpoint()


class WritableDelivery(Honest):
    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        with await super().recv(src, tag, nbytes) as delivery:
            return Delivery(memoryview(bytearray(delivery.view)))


class ShapedDelivery(Honest):
    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        with await super().recv(src, tag, nbytes) as delivery:
            return Delivery(memoryview(bytes(delivery.view)).cast("b"))


class ReleasesOnce(Honest):
    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        delivery = await super().recv(src, tag, nbytes)
        return _Fragile(delivery.view, delivery.release)


class _Fragile(Delivery):
    released = False

    def release(self) -> None:
        if self.released:
            raise RuntimeError("released twice")
        self.released = True
        super().release()


class NamesTheNewest(Honest):
    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> Envelope:
        found = [await self.inner.wait_any(choices)]

        async def look(choice: tuple[int, int]) -> None:
            message = await self.inner.wait_any([choice])
            if message not in found:
                found.append(message)

        async with trio.open_nursery() as nursery:
            for choice in choices:
                nursery.start_soon(look, choice)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return found[-1]


class WakesForAnything(Honest):
    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> Envelope:
        return await self.inner.wait_any([*choices, (choices[0][0], 3)])


class AlwaysTheFirst(Honest):
    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> Envelope:
        found = await self.inner.wait_any(choices)
        return replace(found, tag=choices[0][1])


class AnnouncesAnother(Honest):
    def announced(self, choices: Sequence[tuple[int, int]]) -> Envelope | None:
        return self.inner.announced(choices[:1])


class WaitsForNothing(Honest):
    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> Envelope:
        if not choices:
            return Envelope(src=0, dst=1, tag=0, nbytes=0)
        return await self.inner.wait_any(choices)


class BendsSignatures(Honest):
    """Begins messages by the inner wire, with other options."""

    def begin_send(self, *args: Any, **options: Any) -> Request | None:
        return self.inner.begin_send(*args, **self.send_options(options))

    def begin_recv(self, *args: Any, **options: Any) -> Request:
        return self.inner.begin_recv(*args, **self.receive_options(options))

    def send_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def receive_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options


class SaysNothing(BendsSignatures):
    def send_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"signature": None}


class _Strict(PlainSignature):
    def agrees(self, theirs: int) -> bool:
        return theirs == self.fingerprint


class AgreesIfEqual(BendsSignatures):
    def receive_options(self, options: dict[str, Any]) -> dict[str, Any]:
        given = options.pop("signature")
        return options | {"signature": given and _Strict(given.fingerprint, given.text)}


class RemembersFew(BendsSignatures):
    """Says an old signature once there are many."""

    def send_options(self, options: dict[str, Any]) -> dict[str, Any]:
        number = options["signature"].fingerprint >> 40
        return options | {"signature": PlainSignature((number % 4096 or 1) << 40)}


class MakesMemoryAnyway(BendsSignatures):
    def receive_options(self, options: dict[str, Any]) -> dict[str, Any]:
        allocate = options.pop("allocate")

        def other(request: Request) -> Any:
            with suppress(MemoryError):
                return allocate(request)
            return bytearray(request.nbytes)

        return options | {"allocate": allocate and other}


BROKEN: list[tuple[str, type[Honest]]] = [
    ("names", SameRank),
    ("names", NamelessRepr),
    ("sizes", LosesLastByte),
    ("sizes", LosesLentByte),
    ("sizes", KeepsTheDelivery),
    ("order_of_sends", SkipsEmpty),
    ("order_of_sends", MostUrgentFirst),
    ("order_of_receives", LastReceiveFirst),
    ("ends", EndsTwice),
    ("sends_without_tasks", ReadsTheBufferLater),
    ("sends_without_tasks", TellsBeforeItReads),
    ("tags_are_independent", OneAtATime),
    ("many_tags", FewAtATime),
    ("extreme_tags", ShortTags),
    ("both_directions", HalfDuplex),
    ("kinds_of_buffers", PlainBuffersOnly),
    ("bad_arguments", CopiesScattered),
    ("bad_arguments", IgnoresReadOnly),
    ("bad_arguments", WrapsTags),
    ("bad_arguments", SendsToNobody),
    ("bad_arguments", LeavesRejectedBehind),
    ("lengths_disagree", AdaptsLength),
    ("lengths_disagree", TellsReceiverOnly),
    ("lengths_disagree", MixesUpLengths),
    ("lengths_disagree", EagerThenSilent),
    ("cancelled_at_the_call", DeafToCancel),
    ("cancelled_at_the_call", DeafReceive),
    ("cancelled_before_match", NotWithdrawn),
    ("cancelled_before_match", ReceiveNotWithdrawn),
    ("cancelled_before_match", EagerThenNotWithdrawn),
    ("cancelled_after_match", NotWithdrawn),
    ("cancelled_after_match", GivesBackEarly),
    ("sizes", EagerWithoutCopy),
    ("sizes", WritableDelivery),
    ("sizes", ShapedDelivery),
    ("sizes", ReleasesOnce),
    ("announcements", NamesTheNewest),
    ("announcements", AnnouncesAnother),
    ("announcements", WakesForAnything),
    ("announcements", AlwaysTheFirst),
    ("bad_arguments", WaitsForNothing),
    ("signatures_agree", AgreesIfEqual),
    ("signatures_differ", SaysNothing),
    ("signatures_of_many_calls", RemembersFew),
    ("any_length", SaysNothing),
    ("no_memory_for_any_length", MakesMemoryAnyway),
]


@asynccontextmanager
async def broken_pair(bend: Callable[[Wire, trio.Nursery], Wire]) -> AsyncIterator[tuple[Wire, Wire]]:
    link = NeuronLink(2, thread_copy_bytes=None)
    async with trio.open_nursery() as nursery:
        try:
            yield bend(link.wire(0), nursery), bend(link.wire(1), nursery)
        finally:
            nursery.cancel_scope.cancel()


def assert_passes(
    check: str, bend: Callable[[Wire, trio.Nursery], Wire], *, real: bool = False, scale: Scale | None = None
) -> None:
    clock = None if real else MockClock(autojump_threshold=0)
    trio.run(partial(run_check, check, partial(broken_pair, bend), scale=scale or Scale()), clock=clock)


@pytest.mark.everyday(20)
@pytest.mark.parametrize("check", CHECKS)
def test_the_honest_endpoint_passes(check: str) -> None:
    assert_passes(check, Honest)


@pytest.mark.parametrize("check", ["lengths_disagree", "cancelled_before_match"])
def test_an_eager_endpoint_passes(check: str) -> None:
    assert_passes(check, Eager)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("check", ["sizes", "order_of_receives", "both_directions"])
def test_a_polling_endpoint_passes(check: str) -> None:
    assert_passes(check, Polls, real=True, scale=Scale(messages=9, timeout_s=5))


def test_a_short_message_that_overtakes_a_long_one_on_the_real_clock_is_seen() -> None:
    with pytest.raises(ContractViolation, match=r"^order_of_sends: "):
        assert_passes("order_of_sends", WaitsForItsBytes, real=True)


@pytest.mark.everyday(40)
@pytest.mark.parametrize(("check", "bend"), BROKEN)
def test_a_broken_endpoint_fails(check: str, bend: type[Honest]) -> None:
    error = error_of(ContractViolation, assert_passes, check, bend)
    assert error.check == check
    assert str(error) == f"{check}: {error.reason}"


@pytest.mark.everyday(4)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("check", "what"), [("order_of_sends", "send"), ("order_of_receives", "receive")])
def test_an_order_that_breaks_by_chance_is_seen(check: str, what: str, seed: int) -> None:
    with pytest.raises(ContractViolation, match=r"other bytes than those sent|LengthMismatchError"):
        assert_passes(check, partial(Swaps, seed=seed, what=what))


@asynccontextmanager
async def transports_in_place_of_endpoints() -> AsyncIterator[tuple[NeuronLink, NeuronLink]]:
    yield NeuronLink(2), NeuronLink(2)


@asynccontextmanager
async def one_endpoint() -> AsyncIterator[Wire]:
    yield NeuronLink(2).wire(0)


async def no_context_manager() -> tuple[Wire, Wire]:
    raise AssertionError("it is not awaited")


@pytest.mark.parametrize(
    ("make_pair", "more", "told"),
    [
        (partial(broken_pair, Honest), {"scale": 5}, "scale: expected a Scale, such as .*, got 5"),
        (partial(broken_pair, Honest), {"scale": 0}, "scale: expected a Scale, such as .*, got 0"),
        (transports_in_place_of_endpoints, {}, "make_pair: expected it to open two wires, as of transport.wire"),
        (one_endpoint, {}, "make_pair: expected it to open two wires"),
        (no_context_manager, {}, "make_pair: expected a function that .* and it returns <coroutine"),
        (NeuronLink(2), {}, "make_pair: expected a function that .*, got "),
    ],
)
def test_a_wrong_call_is_not_blamed_on_the_transport(make_pair: Any, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{told}"):
        trio.run(partial(check_transport, make_pair, **more))


@pytest.mark.parametrize(
    ("check", "step"),
    [("checkpoints", "cancel_shielded_checkpoint"), ("cancelled_at_the_call", "checkpoint_if_cancelled")],
)
def test_a_missing_checkpoint_is_seen(check: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_checkpoint() -> None:
        return

    monkeypatch.setattr(wire, step, no_checkpoint)
    with pytest.raises(ContractViolation, match=f"^{check}: "):
        assert_passes(check, Honest)


def test_every_check_was_seen_to_fail() -> None:
    assert {check for check, _ in BROKEN} | {"checkpoints"} == set(CHECKS)


def test_a_hang_is_told_with_the_promise_and_without_the_traces_of_all_tasks() -> None:
    error = error_of(ContractViolation, assert_passes, "many_tags", FewAtATime)
    promise = "Thousands of tags may be outstanding, and are received in any order."
    again = "run it alone: check_transport(make_pair, only=['many_tags'])"
    assert error.reason == f"still waiting after 30 s (Scale.timeout_s); {again}; the promise: {promise}"
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_only_named_checks_run() -> None:
    make_pair = partial(broken_pair, NamelessRepr)
    clock = MockClock(autojump_threshold=0)
    with pytest.raises(ContractViolation, match=r"^names: the repr of rank 0 is <endpoint>; run it alone: .*'names'"):
        trio.run(partial(check_transport, make_pair, only=["sizes", "names"]), clock=clock)
    with pytest.raises(KeyError, match="no such check"):
        trio.run(partial(check_transport, make_pair, only=["no such check"]))

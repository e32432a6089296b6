"""Messages without a program: how one ends, is given up, and fails, over a wire that does what it is told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import trio

from overlap.runtime.engine.message_run import MessageRun
from transports import Buffer, Call, Delivery, LinkLostError, Starter, TransportError

LOST = LinkLostError("the wire is cut", src=0, dst=1, tag=7)


class Moved(Call):
    """A message under way."""

    def __init__(self, done: Callable[[Call], None]) -> None:
        self.done, self.failure, self.taken_back = done, None, False
        self.failure: TransportError | None

    @property
    def ended(self) -> bool:
        return self.taken_back or self.failure is not None

    @property
    def error(self) -> TransportError | None:
        return self.failure

    @property
    def withdrawn(self) -> bool:
        return self.taken_back

    def withdraw(self) -> None:
        self.taken_back = True
        self.done(self)

    def delivery(self) -> Delivery:
        raise AssertionError("it has a place of its own")


class Wire(Starter):
    """Begins whatever it is asked to; says of it what `at_once` is."""

    def __init__(self, *, takes: bool = False, at_once: TransportError | bool = False) -> None:
        self.takes, self.at_once = takes, at_once
        self.asked: list[tuple[str, int, int, int]] = []
        self.calls: list[Moved] = []
        self.looks = 0

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Callable[[Call], None]
    ) -> Call | None:
        self.asked.append(("send", dst, tag, priority))
        return None if self.takes else self._begun(done)

    def begin_recv(
        self,
        src: int,
        tag: int,
        out: Buffer | None,
        nbytes: int,
        *,
        done: Callable[[Call], None],
        consume: Callable[[int, memoryview], None] | None = None,
    ) -> Call:
        self.asked.append(("recv", src, tag, nbytes))
        return self._begun(done)

    def catch_up(self, peer: int) -> bool:
        self.looks += 1
        return False

    def _begun(self, done: Callable[[Call], None]) -> Call:
        call = Moved(done)
        self.calls.append(call)
        if self.at_once is not False:
            call.failure = None if self.at_once is True else self.at_once
            done(call)
        return call


ARRAY = np.zeros((3, 2), np.float32)


def test_what_leaves_or_comes_at_once_is_over() -> None:
    for wire in (Wire(takes=True), Wire(at_once=True)):
        assert MessageRun(wire, 1, 7, spawn=_never).send(ARRAY, 5, _never)
    assert wire.asked == [("send", 1, 7, 5)]
    assert MessageRun(wire, 1, 7, spawn=_never).receive(ARRAY, _never)
    assert wire.asked[-1] == ("recv", 1, 7, 24)


def test_the_end_of_what_does_not_is_told() -> None:
    wire, told = Wire(), list[object]()
    run = MessageRun(wire, 1, 7, spawn=_never)
    assert not run.receive(ARRAY, told.append)
    run.look()
    assert (wire.looks, told) == (1, [])
    wire.calls[0].done(wire.calls[0])
    run.look()
    assert (wire.looks, told) == (1, [None])


@pytest.mark.parametrize("at_once", [False, True])
def test_an_error_is_told_by_a_task(at_once: bool) -> None:
    """Not by whoever brings it: what follows from it may call the wire."""

    async def main() -> None:
        wire, told = Wire(at_once=LOST if at_once else False), list[object]()
        async with trio.open_nursery() as nursery:
            run = MessageRun(wire, 1, 7, spawn=nursery.start_soon)
            assert not run.send(ARRAY, 0, told.append)
            if not at_once:
                wire.calls[0].failure = LOST
                wire.calls[0].done(wire.calls[0])
            assert told == []
        assert told == [LOST]

    trio.run(main)


def test_who_gives_it_up_withdraws_it_once() -> None:
    async def main() -> None:
        wire, told = Wire(), list[object]()
        async with trio.open_nursery() as nursery:
            run = MessageRun(wire, 1, 7, spawn=nursery.start_soon)
            assert not run.send(ARRAY, 0, told.append)
            run.cancel()
            run.cancel()
            assert not wire.calls[0].taken_back
        assert wire.calls[0].taken_back
        (error,) = told
        assert str(error) == "the message was given up"

    trio.run(main)


def _never(*_: object) -> None:
    raise AssertionError("nobody is to be told")

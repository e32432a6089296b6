"""Adapters between awaiting calls and calls with a callback, over endpoints that do everything in the worst order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from transports import Delivery, Endpoint, Envelope, Request, Starter
from transports.blocking import AnnouncingEndpoint, TaskStarter
from transports.buffers import Buffer


class Gated(Endpoint):
    """An endpoint that notes the tags of its calls in order; each call ends when the test opens the gate of its tag."""

    rank = 0

    def __init__(self) -> None:
        self.called: list[tuple[str, int]] = []
        self.gates = {tag: trio.Event() for tag in range(4)}

    def starter(self, peer: int) -> Starter | None:
        return None

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        await self._pass("send", tag)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        await self._pass("recv", tag)

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        await self._pass("recv", tag)
        return Delivery(memoryview(bytes(nbytes)))

    async def wait_any(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope:
        raise NotImplementedError

    async def _pass(self, kind: str, tag: int) -> None:
        self.called.append((kind, tag))
        await self.gates[tag].wait()


class Backwards:
    """Collects the tasks of a starter and starts them last first."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def spawn(self, run: Callable[..., object], *args: object) -> None:
        self.tasks.append((run, args))

    async def start(self, nursery: trio.Nursery) -> None:
        for run, args in reversed(self.tasks):
            nursery.start_soon(run, *args)  # type: ignore[arg-type]
            await wait_all_tasks_blocked()
        self.tasks.clear()


def begin(starter: TaskStarter, kind: str, tag: int, done: Callable[[Request], None] = lambda _: None) -> Request:
    if kind == "send":
        call = starter.begin_send(1, tag, b"12345678", done=done)
        assert call is not None
        return call
    return starter.begin_recv(1, tag, bytearray(8), 8, done=done)


def test_messages_to_one_peer_are_handed_over_in_the_order_of_the_calls_across_tags() -> None:
    async def main() -> None:
        for kind in ("send", "recv"):
            end, tasks = Gated(), Backwards()
            starter = TaskStarter(end, tasks.spawn)
            for tag in (2, 0, 1):
                begin(starter, kind, tag)
            async with trio.open_nursery() as nursery:
                await tasks.start(nursery)
                assert end.called == [(kind, 2), (kind, 0), (kind, 1)]
                for gate in end.gates.values():
                    gate.set()

    trio.run(main)


def test_a_send_and_a_receive_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        end, tasks = Gated(), Backwards()
        starter = TaskStarter(end, tasks.spawn)
        begin(starter, "send", 0)
        begin(starter, "recv", 1)
        async with trio.open_nursery() as nursery:
            await tasks.start(nursery)
            assert end.called == [("recv", 1), ("send", 0)]
            for gate in end.gates.values():
                gate.set()

    trio.run(main)


def test_an_earlier_call_that_ends_last_leaves_the_order_of_later_ones_alone() -> None:
    async def main() -> None:
        end, tasks, ended = Gated(), Backwards(), list[Request]()
        starter = TaskStarter(end, tasks.spawn)
        async with trio.open_nursery() as nursery:
            first, second = (begin(starter, "send", tag, ended.append) for tag in (0, 1))
            await tasks.start(nursery)
            end.gates[0].set()  # the first call ends, while the second one is the last of its lane
            await wait_all_tasks_blocked()
            assert ended == [first]
            third, fourth = (begin(starter, "send", tag, ended.append) for tag in (2, 3))
            await tasks.start(nursery)
            assert end.called == [("send", tag) for tag in range(4)]
            for tag in (3, 2, 1):
                end.gates[tag].set()
                await wait_all_tasks_blocked()
        assert ended == [first, fourth, third, second]
        assert [call.error for call in ended] == [None] * 4

    trio.run(main)


def test_a_later_call_that_ends_first_lets_the_next_one_begin() -> None:
    async def main() -> None:
        end, tasks, ended = Gated(), Backwards(), list[Request]()
        starter = TaskStarter(end, tasks.spawn)
        async with trio.open_nursery() as nursery:
            first, second = (begin(starter, "send", tag, ended.append) for tag in (0, 1))
            await tasks.start(nursery)
            end.gates[1].set()
            await wait_all_tasks_blocked()
            third = begin(starter, "send", 2, ended.append)
            await tasks.start(nursery)
            assert end.called == [("send", 0), ("send", 1), ("send", 2)]
            for tag in (0, 2):
                end.gates[tag].set()
                await wait_all_tasks_blocked()
        assert ended == [second, first, third]
        assert [call.error for call in ended] == [None] * 3

    trio.run(main)


async def _forgetful(ended: list[Request]) -> None:
    class Forgetful(Gated):
        async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
            return None  # type: ignore[return-value]  # as without `return`

    async with trio.open_nursery() as nursery:
        TaskStarter(Forgetful(), nursery.start_soon).begin_recv(1, 0, None, 8, done=ended.append)


def test_a_receive_that_returns_no_delivery_fails() -> None:
    ended: list[Request] = []
    trio.run(_forgetful, ended)
    assert [str(call.error) for call in ended] == ["recv of Forgetful must return the Delivery, and it returned None"]


class Late(AnnouncingEndpoint):
    """An endpoint whose message arrives in another thread, as the first watcher begins to watch: too late to notify."""

    rank = 0
    message: Envelope | None = None

    def begin_send(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError

    begin_recv = begin_send

    def checked_lanes(self, choices: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        return [(src, 0, tag) for src, tag in choices]

    def announced(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope | None:
        return self.message

    @contextmanager
    def watching(self, sources: Iterable[int], notify: Callable[[], None]) -> Iterator[None]:
        self.message = Envelope(src=1, dst=0, tag=2, nbytes=1)
        yield


def test_a_message_that_arrives_just_before_the_watch_is_found() -> None:
    async def main() -> None:
        with trio.fail_after(10):
            assert await Late().wait_any([(1, 2)]) == Envelope(src=1, dst=0, tag=2, nbytes=1)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

"""A link whose connection breaks while bytes are on their way into the socket."""

from __future__ import annotations

import trio
import trio.testing

from overlap.processes.link import ControlLink
from overlap.processes.messages import Ping


class Stuck(trio.abc.Stream):
    """Takes bytes once it is let, and breaks when it is read."""

    def __init__(self) -> None:
        self.sending, self.go_on = trio.Event(), trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sending.set()
        await self.go_on.wait()

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self.sending.wait()
        raise trio.BrokenResourceError

    async def aclose(self) -> None:
        raise NotImplementedError


def test_a_connection_that_breaks_amid_a_send_has_nothing_left_to_flush() -> None:
    async def main() -> None:
        stream = Stuck()
        link = ControlLink(stream, limit_bytes=1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write)
            link.send(Ping(sent_ns=1))
            await link.read(lambda message: None)
            assert link._unsent_bytes == 0
            stream.go_on.set()
            await trio.testing.wait_all_tasks_blocked()
            assert link._unsent_bytes == 0
            await link.flush()
            nursery.cancel_scope.cancel()

    trio.run(main)

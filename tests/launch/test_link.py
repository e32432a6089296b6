"""A link whose connection breaks while bytes are on their way into the socket."""

from __future__ import annotations

import trio
import trio.testing

from overlap.processes.host import Host
from overlap.processes.identity import RendezvousConfig
from overlap.processes.link import ControlLink
from overlap.processes.members import Action, SendControl
from overlap.processes.wire import BLOB_LIMIT_BYTES, Notice, Ping, encode


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


async def test_a_connection_that_breaks_amid_a_send_has_nothing_left_to_flush() -> None:
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


class Silent(Stuck):
    """Takes no byte and sends none."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep_forever()
        raise AssertionError


async def test_64_mib_may_wait_for_a_member_and_no_byte_more() -> None:
    """A member that is busy for long may have that many messages to read; one that reads nothing is lost."""
    notice = Notice(body=bytes(BLOB_LIMIT_BYTES))
    fit = (64 << 20) // len(encode(notice))
    reasons = list[str]()

    def lose(member: int, reason: str) -> list[Action]:
        reasons.append(reason)
        return []

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        config = RendezvousConfig(job="", member=0, members=2, endpoint=("", 0), secret=b"-", detail="")
        host = Host(listener, config, lambda line: None)
        host.members.end_link = lose  # type: ignore[method-assign]
        nursery.start_soon(host.serve_member, Silent(), "somewhere", 1)
        await trio.testing.wait_all_tasks_blocked()
        host.act([SendControl(1, notice)] * fit)
        await trio.testing.wait_all_tasks_blocked()
        assert reasons == []
        host.act([SendControl(1, notice)])
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    waiting = f"{fit * len(encode(notice))} bytes wait to be sent, the limit is {64 << 20}"
    assert reasons == [f"it does not read what it is sent: {waiting}"]

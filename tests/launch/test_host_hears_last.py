"""News of a loss: process 0, which passes them on, may end at them; so its own program hears of them last."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from overlap.processes.host import Host
from overlap.processes.identity import RendezvousConfig
from overlap.processes.link import ControlLink
from overlap.processes.wire import FrameReader, Join, MemberLost, Message, Ready

LOST = MemberLost(member=2, reason="its connection ended without a goodbye")
READY = Ready(process="")


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "never reads"])
def test_member_0_hears_of_a_loss_when_the_news_has_left_for_the_others(reads: bool) -> None:
    """A member that never reads holds the news up for a second, and no longer."""
    clock = MockClock()

    async def main() -> tuple[list[Message], list[Message], list[Message]]:
        here, there = lockstep_stream_pair()  # what is sent has left when the other side has read it
        link = ControlLink(here, limit_bytes=10_000)
        heard: list[Message] = []
        config = RendezvousConfig(job="", member=0, members=3, endpoint=("", 0), secret=b"-")
        host = Host(None, config, lambda line: None)  # type: ignore[arg-type]  # it accepts nobody
        host.links |= {1: link, 2: ControlLink(here, limit_bytes=10_000)}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write)
            nursery.start_soon(host.deliver, heard.append)
            for member in range(3):
                host.act(host.members.connect(member, ""))
                host.receive(member, Join(detail="", process=""))
            del host.links[2]
            host.act(host.members.end_link(2, LOST.reason))
            await wait_all_tasks_blocked()
            before = list(heard)
            reading = FrameReader()
            read: list[Message] = []
            while reads and LOST not in read:
                read += reading.feed(await there.receive_some(10_000))
            if not reads:
                clock.jump(1)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return before, read, heard

    before, read, heard = trio.run(main, clock=clock)
    assert LOST not in before
    assert heard[-1] == LOST
    assert READY in heard
    assert (LOST in read) == reads

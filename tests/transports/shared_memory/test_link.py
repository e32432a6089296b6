"""Packets leave one after the other, also those that are sent because another one has been."""

import pytest
import trio

from transports import Request

from ..promises import leaves_at_once
from .processes import Host, opened


@pytest.mark.slow
async def test_what_is_sent_as_another_packet_leaves_does_not_take_its_room() -> None:
    host = Host()
    async with opened(host.transports):
        a, b = (transport.wire(rank) for rank, transport in enumerate(host.transports))
        starter, packets, over = a.route(1), 0, trio.Event()

        def fill(_: Request | None) -> None:
            nonlocal packets
            packets += 1
            while leaves_at_once(a, 1, 5, b"much of it"):
                packets += 1

        def fill_again(call: Request) -> None:
            fill(call)
            over.set()

        fill(None)
        starter.begin_send(1, 6, b"queued", done=fill_again)
        await b.recv_into(0, 6, bytearray(6))
        await over.wait()
        for _ in range(packets):
            await b.recv_into(0, 5, bytearray(10))

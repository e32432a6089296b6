"""Cancelled sends and receives of the Mpi transport whose withdrawal crosses an answer: every order by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio
from trio.testing import wait_all_tasks_blocked

from transports import Envelope, Statistics
from transports.mpi.mailroom import Mailroom
from transports.mpi.wire import EAGER_BYTES

from .loop import Fabric

LARGE = EAGER_BYTES + 1


class Table:
    """Two mailrooms whose polls the test itself makes."""

    def __init__(self) -> None:
        fabric = Fabric(2)
        self.a, self.b = (
            Mailroom(member=member, placement=[[0], [1]], wire=fabric.wires[member]) for member in range(2)
        )
        self.ended: list[str] = []

    async def send(self, name: str, scope: trio.CancelScope) -> None:
        with scope:
            sending = self.a.send((0, 1, 7), memoryview(name.encode() * LARGE), 0)
            assert sending is not None
            await sending.wait(partial(self.a.withdraw_send, sending))
        self.ended.append(f"{name} cancelled" if scope.cancelled_caught else f"{name} sent")

    async def receive(self, name: str, scope: trio.CancelScope | None = None) -> None:
        out = bytearray(LARGE)
        with scope or trio.CancelScope() as scope:
            receive = self.b.receive((0, 1, 7), memoryview(out))
            assert receive is not None
            await receive.wait(partial(self.b.withdraw_receive, receive))
        self.ended.append(f"{name} cancelled" if scope.cancelled_caught else f"{name} got {chr(out[0])}")

    async def settle(self) -> None:
        await wait_all_tasks_blocked()
        while self.b.poll() | self.a.poll():
            await wait_all_tasks_blocked()


def run_table(main: Callable[[Table, trio.Nursery], Awaitable[None]]) -> None:
    async def body() -> None:
        table = Table()
        async with trio.open_nursery() as nursery:
            try:
                await main(table, nursery)
            finally:  # what is suspended now can be neither completed nor cancelled
                table.a.lose_all("the test is over")
                table.b.lose_all("the test is over")

    trio.run(body)


def test_a_send_withdrawn_while_the_answer_is_on_its_way_leaves_its_receive_first_in_line() -> None:
    async def main(table: Table, nursery: trio.Nursery) -> None:
        scope = trio.CancelScope()
        nursery.start_soon(table.send, "A", scope)
        for name in ("R", "S"):
            nursery.start_soon(table.receive, name)
            await wait_all_tasks_blocked()
        table.b.poll()  # asks for A
        scope.cancel()
        await table.settle()
        assert table.ended == ["A cancelled"]
        waiting = Envelope(src=0, dst=1, tag=7, nbytes=LARGE)
        assert table.b.statistics().unmatched_receives == (waiting, waiting)
        nursery.start_soon(table.send, "B", trio.CancelScope())
        await table.settle()
        assert sorted(table.ended[1:]) == ["B sent", "R got B"]
        nursery.cancel_scope.cancel()

    run_table(main)


def test_a_send_that_others_follow_is_completed_if_its_receiver_has_asked_for_it() -> None:
    async def main(table: Table, nursery: trio.Nursery) -> None:
        scope = trio.CancelScope()
        nursery.start_soon(table.send, "A", scope)
        await wait_all_tasks_blocked()
        nursery.start_soon(table.send, "B", trio.CancelScope())
        await wait_all_tasks_blocked()
        for name in ("R", "S"):
            nursery.start_soon(table.receive, name)
            await wait_all_tasks_blocked()
        table.b.poll()  # asks for A and B
        scope.cancel()
        await wait_all_tasks_blocked()
        assert table.ended == []
        await table.settle()
        assert sorted(table.ended) == ["A sent", "B sent", "R got A", "S got B"]

    run_table(main)


def test_a_send_that_others_follow_is_withdrawn_if_nobody_has_asked_for_it() -> None:
    async def main(table: Table, nursery: trio.Nursery) -> None:
        scope = trio.CancelScope()
        nursery.start_soon(table.send, "A", scope)
        await wait_all_tasks_blocked()
        nursery.start_soon(table.send, "B", trio.CancelScope())
        await table.settle()
        scope.cancel()
        await table.settle()
        assert table.ended == ["A cancelled"]
        nursery.start_soon(table.receive, "R")
        await table.settle()
        assert sorted(table.ended[1:]) == ["B sent", "R got B"]

    run_table(main)


def test_a_receive_that_is_cancelled_after_it_asked_ends_with_its_message() -> None:
    async def main(table: Table, nursery: trio.Nursery) -> None:
        send, receive = trio.CancelScope(), trio.CancelScope()
        nursery.start_soon(table.send, "A", send)
        nursery.start_soon(table.receive, "R", receive)
        await wait_all_tasks_blocked()
        table.b.poll()
        receive.cancel()
        await wait_all_tasks_blocked()
        assert table.ended == []  # its memory may be written to at any time
        send.cancel()
        await table.settle()
        assert table.ended == ["A cancelled", "R cancelled"]
        assert table.b.statistics() == Statistics()

    run_table(main)

"""The CC-core: runs one rank's program of a collective over an endpoint, beside whatever the rank computes.

A program is a few FIFO queues of steps (sends in one, receives and local steps in another, per channel). Each queue is
a task; a step that must not overtake steps of another queue waits for that queue's counter, as the semaphores between
DMA rings do on the hardware.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import numpy as np
import trio
from trio.lowlevel import ParkingLot

from transports import Endpoint

from ...collectives.program import Kind, Program, Step
from ...collectives.reduce import Array
from ...collectives.schedule import Buffer, Op
from .program_memory import Buffers, Layout
from .workers import INLINE_BYTES, PIECE_BYTES, Workers

#: Steps of a queue of receives that may be under way: all slices of a step, and what becomes of them.
AHEAD = 16
# Shorter messages come unasked.
_ASKED_BYTES = 64 << 10


class Execution:
    """One rank's program under way.

    Args:
        program: The rank's part of a proved schedule.
        buffers: Its memory; nobody else touches it meanwhile.
        endpoint: The rank's end of the transport.
        members: World ranks by group rank.
        tag: First of the transport tags that belong to this operation; channel c uses `tag + c`.
        priority: Of the messages; lower is more urgent.
        workers: Where large reductions run.
        fans_out: Whether several messages are under way at once. Over wires they should be; where sending is handing
            over memory, a task for each would cost more than it gains (1.5 times the time of small ones).
    """

    __slots__ = (
        "_buffers", "_endpoint", "_fans", "_finished", "_left", "_members", "_priority", "_program", "_tag", "_workers",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        buffers: Buffers,
        endpoint: Endpoint,
        *,
        members: Sequence[int],
        tag: int,
        priority: int,
        workers: Workers,
        fans_out: bool,
    ) -> None:
        self._program, self._buffers, self._endpoint = program, buffers, endpoint
        self._fans = fans_out
        self._members, self._tag, self._priority, self._workers = members, tag, priority, workers
        self._finished = [0] * len(program.queues)
        self._left = list(range(len(program.queues)))

    def begin(self) -> bool:
        """Send whatever leaves without waiting; True if that was all there is to do."""
        self._left = [index for index in self._left if not self._advance(index)]
        return not self._left

    async def run(self) -> None:
        """Run all queues to their end; in this very task as long as messages leave without waiting."""
        if self.begin():
            await trio.lowlevel.checkpoint()
        while self._left and (alone := self._alone()) is not None:
            await self._next(alone)
            self.begin()
        if self._left:
            await self._drive_all()

    def _advance(self, index: int) -> bool:
        """Send from one queue what leaves without waiting; True if that was all of it."""
        steps = self._program.queues[index]
        while (at := self._finished[index]) < len(steps):
            step = steps[at]
            if step.kind is not Kind.SEND or self._must_wait(step) or not self._try_send(step):
                return False
            self._finished[index] += 1
        return True

    def _alone(self) -> int | None:
        """Return the one queue that can go on with one step, if all others wait for it."""
        able = [
            index for index in self._left if not self._must_wait(self._program.queues[index][self._finished[index]])
        ]
        return able[0] if len(able) == 1 and not self._fans_out(able[0]) else None

    def _fans_out(self, index: int) -> bool:
        """Whether what is left of a queue are several messages, which need not wait for each other to arrive."""
        steps, at = self._program.queues[index], self._finished[index]
        return self._fans and steps[at].kind is Kind.SEND and len(steps) - at > 1

    def _must_wait(self, step: Step) -> bool:
        return any(self._finished[queue] < count for queue, count in step.waits)

    async def _drive_all(self) -> None:
        progress = ParkingLot()
        async with trio.open_nursery() as nursery:
            first, *others = ((self._driver(index), index) for index in self._left)
            for drive, index in others:
                nursery.start_soon(drive, index, progress)
            drive, index = first
            await drive(index, progress)

    def _driver(self, index: int) -> Callable[[int, ParkingLot], Awaitable[None]]:
        if self._fans_out(index):
            return self._fan_out
        return self._look_ahead if self._looks_ahead(index) else self._drive

    def _looks_ahead(self, index: int) -> bool:
        """Whether what is left of a queue are several long receives: wires idle until the next one is posted."""
        left = self._program.queues[index][self._finished[index] :]
        receives = [step for step in left if step.kind is Kind.RECV]
        return self._fans and len(receives) > 1 and self._views(receives[0])[0].nbytes > _ASKED_BYTES

    async def _drive(self, index: int, progress: ParkingLot) -> None:
        """Run one queue in order, beside the others."""
        steps = self._program.queues[index]
        while self._finished[index] < len(steps):
            while self._must_wait(steps[self._finished[index]]):
                await progress.park()
            await self._next(index)
            progress.unpark_all()

    async def _fan_out(self, index: int, progress: ParkingLot) -> None:
        """Hand over messages as soon as their data is there; those for one peer in order, which is how they match."""
        sent: set[int] = set()
        last: dict[int, trio.Event] = {}
        steps = self._program.queues[index]

        async def send(position: int, before: trio.Event | None, begun: trio.Event) -> None:
            if before is not None:
                await before.wait()
            begun.set()  # who waits for that runs once this task is blocked: when the transport has the message
            await self._send(steps[position])
            sent.add(position)
            while self._finished[index] in sent:
                self._finished[index] += 1
            progress.unpark_all()

        async with trio.open_nursery() as nursery:
            for position in range(self._finished[index], len(steps)):
                while self._must_wait(steps[position]):
                    await progress.park()
                peer, begun = steps[position].peer, trio.Event()
                nursery.start_soon(send, position, last.get(peer), begun)
                last[peer] = begun

    async def _look_ahead(self, index: int, progress: ParkingLot) -> None:
        """Run one queue in order, but post receives while earlier ones are under way, or being reduced."""
        room, steps = trio.Semaphore(AHEAD), self._program.queues[index]
        touched: dict[int, list[Array]] = {}  # by steps that have not finished

        async def run(position: int, begun: trio.Event, turn: trio.Event, finished: trio.Event) -> None:
            begun.set()  # who waits for that runs once this task is blocked: when the transport has the receive
            await self._run(steps[position], turn)
            await turn.wait()
            del touched[position]
            self._finished[index] += 1
            finished.set()
            room.release()
            progress.unpark_all()

        async with trio.open_nursery() as nursery:
            turn = trio.Event()
            turn.set()
            for position in range(self._finished[index], len(steps)):
                await room.acquire()
                step = steps[position]
                while self._must_wait(step) or (self._lands(step) and self._collides(step, touched.values())):
                    await progress.park()
                touched[position] = self._views(step)
                begun, finished = trio.Event(), trio.Event()
                nursery.start_soon(run, position, begun, turn, finished)
                await begun.wait()
                turn = finished

    def _lands(self, step: Step) -> bool:
        """Whether what a receive brings goes straight to its place."""
        assert step.src is not None
        assert step.dst is not None
        arrays = self._buffers.arrays
        same = arrays[step.src.buffer].dtype == arrays[step.dst.buffer].dtype
        return step.kind is Kind.RECV and step.op is Op.MOVE and same

    def _views(self, step: Step) -> list[Array]:
        """Return the memory of this rank that a step reads or writes."""
        theirs = step.src if step.kind is Kind.LOCAL else None
        return [self._buffers.view(extent) for extent in (step.dst, step.base, theirs) if extent is not None]

    def _collides(self, step: Step, touched: Iterable[list[Array]]) -> bool:
        """Whether steps that have not finished touch what a receive is going to read or write."""
        mine = self._views(step)
        return any(np.may_share_memory(one, other) for others in touched for other in others for one in mine)

    async def _next(self, index: int) -> None:
        """Run the next step of a queue."""
        await self._run(self._program.queues[index][self._finished[index]])
        self._finished[index] += 1

    def _try_send(self, step: Step) -> bool:
        assert step.src is not None
        data = self._buffers.view(step.src)
        peer = self._members[step.peer]
        return self._endpoint.try_send(peer, self._tag + step.channel, data, priority=self._priority)

    async def _run(self, step: Step, turn: trio.Event | None = None) -> None:
        """Run a step; one that reduces or copies what it has got waits for its turn with that."""
        if step.kind is Kind.SEND:
            await self._send(step)
        elif step.kind is Kind.RECV:
            await self._receive(step, turn)
        else:
            await _comes(turn)
            await self._local(step)

    async def _send(self, step: Step) -> None:
        assert step.src is not None
        data = self._buffers.view(step.src)
        peer = self._members[step.peer]
        await self._endpoint.send(peer, self._tag + step.channel, data, priority=self._priority)

    async def _receive(self, step: Step, turn: trio.Event | None) -> None:
        assert step.src is not None
        assert step.dst is not None
        peer, tag = self._members[step.peer], self._tag + step.channel
        target = self._buffers.view(step.dst)
        if self._lands(step):
            await self._endpoint.recv_into(peer, tag, target)
            return
        sent = self._buffers.arrays[step.src.buffer].dtype
        delivery = await self._endpoint.recv(peer, tag, target.size * sent.itemsize)
        try:
            await _comes(turn)
            incoming = np.frombuffer(delivery.view, np.uint8).view(sent)
            await self._apply(step, incoming, target)
            del incoming
        finally:
            delivery.release()

    async def _local(self, step: Step) -> None:
        assert step.src is not None
        assert step.dst is not None
        await self._apply(step, self._buffers.view(step.src), self._buffers.view(step.dst))

    async def _apply(self, step: Step, incoming: Array, target: Array) -> None:
        """Move or add `incoming` into `target`, in worker threads if it is large."""
        mine = target if step.base is None else self._buffers.view(step.base)
        pieces = pieces_of(step, self._buffers.layout, self._program.rank, incoming, mine, target)
        if len(pieces) == 1:
            with np.errstate(all="ignore"):  # as in the worker threads
                pieces[0]()
        else:
            await run_in_workers(self._workers, pieces, priority=self._priority)


def pieces_of(
    step: Step, layout: Layout, rank: int, incoming: Array, mine: Array, target: Array
) -> list[Callable[[], None]]:
    """Return what applies a step, see `apply`: one piece of work for this thread, or more for others."""
    weight = 1 if layout.reducer is None else layout.reducer.weight
    if (incoming.nbytes + target.nbytes) * weight <= INLINE_BYTES or _is_there(step, layout, incoming, target):
        return [partial(apply, step, layout, rank, incoming, mine, target)]
    length = max(1, PIECE_BYTES // target.itemsize)
    parts = (slice(start, start + length) for start in range(0, target.size, length))
    return [partial(apply, step, layout, rank, incoming[part], mine[part], target[part]) for part in parts]


def _is_there(step: Step, layout: Layout, incoming: Array, target: Array) -> bool:
    """Whether a move has nothing to do: input and result share memory."""
    divides = layout.reducer is not None and layout.reducer.divides
    if step.op is Op.ADD or divides or incoming.dtype != target.dtype or incoming.size != target.size:
        return False
    return bool(incoming.__array_interface__["data"][0] == target.__array_interface__["data"][0])


def apply(step: Step, layout: Layout, rank: int, incoming: Array, mine: Array, target: Array) -> None:
    """Move or add to `target` what has come, or lies elsewhere; or a part of it.

    Args:
        step: That says so.
        layout: Of the program.
        rank: Group rank of the program.
        incoming: What has come.
        mine: What it is added to: the target itself, or the base of the step.
        target: Where it goes.
    """
    reducer = layout.reducer
    if step.op is Op.ADD:
        assert reducer is not None, "only reductions have ADD rows"
        theirs, own = reducer.widen(incoming), reducer.widen(mine)
        low, high = (theirs, own) if step.peer < rank else (own, theirs)
        reducer.ufunc(low, high, out=target)
    elif reducer is None or step.src.buffer != Buffer.SCRATCH or step.dst.buffer != Buffer.OUT:
        np.copyto(target, incoming, casting="unsafe")
    else:
        reducer.finalise(incoming, target, layout.contributions)


async def _comes(turn: trio.Event | None) -> None:
    if turn is not None:
        await turn.wait()


async def run_in_workers(workers: Workers, work: Sequence[Callable[[], None]], *, priority: int) -> None:
    """Run pieces of work in the pool and wait for all of them, even when cancelled: they touch memory of others.

    Raises:
        BaseException: The first error of a piece.
    """
    ended = trio.Event()
    errors: list[BaseException] = []
    token = trio.lowlevel.current_trio_token()

    def done(error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        token.run_sync_soon(ended.set)

    with trio.CancelScope(shield=True):
        workers.submit(work, done, priority=priority)
        await ended.wait()
    if errors:
        raise errors[0]

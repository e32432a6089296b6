"""Lookout: it asks members what their ranks do, and passes the answers on to watchers, which are no members.

A look costs the job a hundredth of the time to the next one at most, however many watch and however often they ask: the
next question waits until then. What travels is bounded by `_LOOK_BYTES`, whatever the size of the world.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from time import perf_counter_ns, thread_time_ns

import trio

from .coordinator import Coordinator
from .link import ControlLink
from .messages import BLOB_LIMIT_BYTES, Glance, Glimpse, Look, Looked, Message, MessageError, Refused, Seen

WATCHERS_AT_MOST = 8
ANSWER_S = 1.0
"""Members that have not answered by then are silent."""
MOST_SHARE = 0.01
"""Of one thread of each member."""
_LEAST_PAUSE_S = 0.1
_LAST_WORDS_S = 1.0  # time for a last message to leave
_LOOK_BYTES = 8 * 2**20  # bytes of all members together
_LONGEST_NS = 10**9  # that a member is believed to have taken


class Lookout:
    """Answers watchers.

    Args:
        coordinator: Of the members.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._watchers = 0
        self._one_at_a_time = trio.Lock()
        self._next_s = 0.0  # in time, as Trio counts it
        self._turn = 0
        self._asked: set[int] = set()  # members that have not answered yet
        self._told: dict[int, bytes] = {}
        self._took_ns = 0
        self._complete = trio.Event()
        coordinator.on_glimpse = self._take

    def refusal(self) -> str | None:
        """Return why no watcher is let in now, or None."""
        coordinator = self._coordinator
        if not coordinator.complete:
            there = f"{len(coordinator.joined)} of {coordinator.members} processes have joined"
            return f"the world has not come together yet: {there}"
        if self._watchers >= WATCHERS_AT_MOST:
            return f"{self._watchers} watch this world already, which are as many as may"
        return None

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Answer one watcher until it goes, or breaks the protocol."""
        link = ControlLink(stream, limit_bytes=2 * _LOOK_BYTES)
        self._watchers += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.write)
                link.send(Refused(reason=await self._answer(link, nursery)))
                with trio.move_on_after(_LAST_WORDS_S):
                    await link.flush()
                nursery.cancel_scope.cancel()
        finally:
            self._watchers -= 1

    async def _answer(self, link: ControlLink, nursery: trio.Nursery) -> str:
        answering = False

        async def show() -> None:
            nonlocal answering
            await self._show(link)
            answering = False

        def handle(message: Message) -> None:
            nonlocal answering
            if not isinstance(message, Look) or answering:
                raise MessageError(f"a {type(message).__name__}, which is not its turn")
            answering = True
            nursery.start_soon(show)

        return await link.read(handle)

    async def _show(self, link: ControlLink) -> None:
        async with self._one_at_a_time:
            await trio.sleep_until(self._next_s)
            now_ns = perf_counter_ns()
            told = await self._look()
            begun_ns = thread_time_ns()
            self._pass_on(link, told)
            pause_s = max(_LEAST_PAUSE_S, max(self._took_ns, thread_time_ns() - begun_ns) / 1e9 / MOST_SHARE)
            self._next_s = trio.current_time() + pause_s
            if not link.over:
                link.send(Looked(now_ns=now_ns, silent=sorted(self._asked), pause_ms=ceil(1000 * pause_s)))

    async def _look(self) -> Mapping[int, bytes]:
        """Ask all members, and return the answers that came in time."""
        self._turn += 1
        self._told, self._took_ns, self._complete = {}, 0, trio.Event()
        self._asked = set(range(self._coordinator.members)) - self._coordinator.gone
        room_bytes = min(BLOB_LIMIT_BYTES, _LOOK_BYTES // self._coordinator.members)
        self._coordinator.ask_all(Glance(turn=self._turn, room_bytes=room_bytes))
        with trio.move_on_after(ANSWER_S):
            await self._complete.wait()
        return self._told

    def _take(self, member: int, glimpse: Glimpse) -> None:
        if glimpse.turn > self._turn or len(glimpse.blob) > BLOB_LIMIT_BYTES:
            raise MessageError("a Glimpse that nobody asked for, or which is too long")
        if glimpse.turn < self._turn or member not in self._asked:
            return  # an answer that comes too late
        self._asked.discard(member)
        self._told[member] = glimpse.blob
        self._took_ns = max(self._took_ns, min(glimpse.took_ns, _LONGEST_NS))
        if not self._asked:
            self._complete.set()

    def _pass_on(self, link: ControlLink, told: Mapping[int, bytes]) -> None:
        for member, blob in sorted(told.items()):
            link.send(Seen(member=member, blob=blob))

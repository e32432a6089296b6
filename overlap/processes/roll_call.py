"""Roll call: launchers agree which nodes take part in the next attempt of a job, where each machine has one of its own.

The launcher of node 0 listens where its process will, and holds the connection of every other launcher that comes. As
soon as all nodes are there, or enough of them and the last call is over, it tells each its number, how many nodes take
part, and in which attempt. So the job goes on without nodes that are lost; nodes that come back, or replace them, take
part from the next attempt on. A launcher that comes while a world runs is refused by its process 0, and tries again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from transports.failures import TransportError
from transports.handshake import welcome
from transports.identity import Hello

from .dialler import Dialler
from .identity import LAUNCHER, Joiner, JoinError, name_processes
from .messages import FrameReader, Message, MessageError, Present, Refused, encode
from .sockets import format_endpoint, tune

#: Share of the time in which all must have met: after it, the fewest nodes are enough. torchrun's last call: 30 s.
_LAST_CALL = 0.5
#: How long a launcher that has come may wait for the answer when the time is over: two ways, and busy machines.
_SLACK_S = 5.0
_PROGRESS_S = 5.0  # between two lines on who is missing
_BITE_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCall(Joiner):
    """A launcher among those of a job: `member` is its node, and `members` how many nodes there may be."""

    fewest: int  # With how few the job may go on
    ranks_per_node: int  # The same on all
    timeout_s: float  # In which all must have come; half of it if the fewest are enough

    @property
    def greeting(self) -> Hello:
        """The introduction of this launcher to the others."""
        return self.hello(LAUNCHER, f"--nnodes {self.fewest}:{self.members} and {self.ranks_per_node} ranks each")


async def call_roll(
    what: RollCall, attempt: int, listener: trio.SocketListener, report: Callable[[str], None]
) -> Present:
    """As the launcher of node 0, wait for the others, and tell each its number.

    Args:
        what: Of node 0.
        attempt: Which attempt this is.
        listener: Listens at the endpoint; is closed, which leaves other descriptors of its socket as they are.
        report: Takes lines for the user.

    Raises:
        JoinError: Too few came.
    """
    roll, began_s = _Roll(what, report), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, roll.meet, [listener]))
        nursery.start_soon(roll.report_missing)
        with trio.move_on_after(what.timeout_s * _LAST_CALL):
            await roll.count(what.members)
        with trio.move_on_after(what.timeout_s * (1 - _LAST_CALL)):
            await roll.count(what.fewest)
        here, missing = roll.here, roll.missing
        enough = len(here) >= what.fewest
        absent = f"{name_processes(missing, 'node')} did not come within {trio.current_time() - began_s:.0f} s"
        reason = f"{absent}; at least {what.fewest} of {what.members} must be there"

        def answer(node: int) -> Message:
            present = Present(index=here.index(node), nodes=len(here), attempt=attempt)
            return present if enough else Refused(reason=reason)

        await roll.send_answers(answer)
        nursery.cancel_scope.cancel()
    if not enough:
        raise JoinError(reason, missing=missing)
    if missing:
        report(f"goes on with {len(here)} of {what.members} nodes: {absent}")
    return Present(index=0, nodes=len(here), attempt=attempt)


class _Roll:
    """Launchers that have come, and are still connected."""

    def __init__(self, what: RollCall, report: Callable[[str], None]) -> None:
        self._what, self._report = what, report
        self._streams: dict[int, trio.abc.Stream] = {}
        self._changed = trio.Event()

    @property
    def here(self) -> list[int]:
        """Nodes that are there, ascending."""
        return sorted([self._what.member, *self._streams])

    @property
    def missing(self) -> list[int]:
        """Nodes that are not there."""
        return [node for node in range(self._what.members) if node not in self.here]

    async def report_missing(self) -> None:
        """Report the missing nodes every few seconds."""
        while True:
            await trio.sleep(_PROGRESS_S)
            missing = ", ".join(map(str, self.missing))
            self._report(f"{len(self.here)} of {self._what.members} nodes are there; missing {missing}")

    async def count(self, nodes: int) -> None:
        """Wait until `nodes` nodes are there."""
        while len(self.here) < nodes:
            await self._changed.wait()

    async def meet(self, connection: trio.SocketStream) -> None:
        """Serve one connection, and hold it: a launcher that goes again does not count."""
        stream = connection if self._what.tls is None else self._what.tls.wrap(connection, serving=True)
        with suppress(OSError, trio.BrokenResourceError, TransportError):
            async with stream:
                tune(connection)
                hello = await welcome(stream, self._what.secret, self._judge)
                if hello.detail != self._what.greeting.detail:
                    reason = f"expected {self._what.greeting.detail}, this one was started with {hello.detail}"
                    await stream.send_all(encode(Refused(reason=reason)))
                    return
                self._note(hello.member, stream)
                try:
                    await stream.receive_some(1)  # until it goes: it has nothing to say
                finally:
                    self._note(hello.member, None)

    def _judge(self, theirs: Hello) -> Hello | str:
        mine = self._what.greeting
        if theirs.role != mine.role or theirs.job != mine.job:
            return f"the launchers of job '{mine.job}' have not agreed yet who takes part"
        if not 0 < theirs.member < mine.members:
            return f"there is no node {theirs.member} among {mine.members}, or it is not yours"
        if theirs.member in self.here:
            return f"there is a launcher of node {theirs.member} already"
        return mine

    def _note(self, node: int, stream: trio.abc.Stream | None) -> None:
        if stream is None:
            del self._streams[node]
        else:
            self._streams[node] = stream
        self._changed.set()
        self._changed = trio.Event()

    async def send_answers(self, answer: Callable[[int], Message]) -> None:
        """Give each its answer; one that cannot take it has gone, which its process will show."""
        for node, stream in list(self._streams.items()):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(_SLACK_S):
                await stream.send_all(encode(answer(node)))


async def answer_roll_call(what: RollCall, *, pause_s: float) -> Present:
    """As the launcher of another node, wait until node 0 tells whether it takes part.

    Args:
        what: Of this node.
        pause_s: How long node 0 may pause before it calls.

    Raises:
        JoinError: It cannot be reached in time, does not want this node, or too few came.
    """
    within_s, stream, answer = what.timeout_s + pause_s, None, None
    dialler = Dialler(what, what.greeting, "node 0", retried=("left", "silent", "refused"))
    with trio.move_on_after(within_s):
        stream = await dialler.reach()
    if stream is None:
        raise dialler.too_late(within_s)
    async with stream:
        with trio.move_on_after(what.timeout_s + _SLACK_S):
            answer = await _first_message(stream)
    match answer:
        case Refused():
            raise JoinError(answer.reason)
        case Present() if 0 < answer.index < answer.nodes <= what.members and answer.attempt >= 0:
            return answer
    endpoint = format_endpoint(what.endpoint)
    raise JoinError(f"the launcher of node 0 at {endpoint} has gone before it said who takes part", missing=[0])


async def _first_message(stream: trio.abc.Stream) -> Message | None:
    """Return the first message that comes; None if none does, or it is none."""
    reader = FrameReader()
    with suppress(trio.BrokenResourceError, MessageError):
        while data := await stream.receive_some(_BITE_BYTES):
            for message in reader.feed(data):
                return message
    return None

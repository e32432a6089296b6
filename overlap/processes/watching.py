"""Watcher of a world elsewhere: a connection to its process 0, which asks all others.

The screens that show it wait for keys and instants and know no event loop; so the connection has a thread of its own.
"""

from __future__ import annotations

from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

import trio
from trio.lowlevel import TrioToken, current_trio_token

from transports.handshake import HandshakeError
from transports.identity import Hello
from transports.tls import Tls

from ..errors import OverlapError, UsageError
from ..live.snapshot import Memory, ProcessSnapshot, read_snapshot
from ..live.worlds import WorldSnapshot
from ..threads import start_thread
from .identity import WATCHER, name_processes
from .link import ControlLink
from .messages import Look as LookMessage
from .messages import Looked, Message, MessageError, Refused, Seen
from .sockets import Endpoint, NobodyError, format_endpoint, meet

_ANSWER_LIMIT_S = 10.0  # time after the pause that was asked for
_OUTBOX_LIMIT_BYTES = 64 * 1024
_ANSWER_LIMIT_BYTES = 16 * 2**20  # bytes of all members together
_MOST_MEMBERS = 1 << 16


class WorldOverError(OverlapError):
    """The world that was watched is over; `str()` says so."""


class WatchedWorld:
    """A world elsewhere, as a watcher sees it, which is no member. `live.worlds.World` says what it can be asked.

    Args:
        endpoint: Where its process 0 listens.
        secret: Of the job.
        tls: Certificates, if its connections are encrypted.

    Raises:
        UsageError: There is none, or it does not let us look.
    """

    def __init__(self, endpoint: Endpoint, *, secret: bytes, tls: Tls | None) -> None:
        if tls is not None:
            tls.check()
        self._endpoint, self._secret, self._tls = endpoint, secret, tls
        self._where = format_endpoint(endpoint)
        self._opened: SimpleQueue[Exception | None] = SimpleQueue()
        self._over = ""
        self._memory = Memory()
        self._members = 0
        self._start: ProcessSnapshot | None = None
        self._glimpses: dict[int, ProcessSnapshot] = {}
        self._silent: list[int] = []
        self._pause_s = 0.0
        self._link: ControlLink
        self._token: TrioToken
        self._answer: _Answer
        self._thread = Thread(target=trio.run, args=(self._live,), name="overlap watching", daemon=True)
        start_thread(self._thread)
        if (error := self._opened.get()) is not None:
            self._thread.join()
            raise error
        try:
            self.snapshot()
        except BaseException:
            self.close()
            raise

    @property
    def job(self) -> str:
        """Its name."""
        return self._start.job if self._start else ""

    @property
    def script(self) -> str:
        """The program."""
        return self._start.script if self._start else ""

    @property
    def size(self) -> int:
        """Ranks."""
        return self._start.world_size if self._start else 0

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return float(self._start.age_s) if self._start else 0.0

    @property
    def where(self) -> str:
        """Its processes, and those of them that do not answer."""
        hosts = len({each.host for each in self._glimpses.values()})
        silent = f" ({name_processes(self._silent)} did not answer)" if self._silent else ""
        return f"{self._members} processes on {hosts} host{'s' * (hosts != 1)}{silent}"

    @property
    def lives(self) -> bool:
        """Whether it runs, as far as is known here."""
        return not self._over

    @property
    def processes(self) -> dict[int, ProcessSnapshot]:
        """Last answer of each process."""
        return self._glimpses

    def snapshot(self) -> WorldSnapshot:
        """Return its ranks and what they have issued.

        Raises:
            WorldOverError: It is over.
            UsageError: Its process 0 does not answer.
        """
        try:
            answer = trio.from_thread.run(self._ask, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):  # the connection has ended
            raise WorldOverError(self._over) from None
        read = {member: read_snapshot(blob, self._memory) for member, blob in answer.blobs.items()}
        self._glimpses = {member: each for member, each in read.items() if each is not None}
        self._start = next(iter(self._glimpses.values()), self._start)
        self._silent = [member for member in range(self._members) if member not in self._glimpses]
        self._pause_s = answer.pause_s
        if self._start is None:
            raise UsageError(f"the world at {self._where} keeps no flight records, so there is nothing to see")
        processes = [((each.host, member), each.ranks, each.calls) for member, each in self._glimpses.items()]
        return WorldSnapshot(now_ns=answer.now_ns, processes=processes, pause_s=answer.pause_s)

    def close(self) -> None:
        """End the connection."""
        self._over = self._over or "the watcher has gone"
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._link.cut, "")
        self._thread.join()

    # -- in the thread of the connection -----------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            stream = await self._reach()
        except Exception as error:
            self._opened.put(error)
            return
        self._token, self._link = current_trio_token(), ControlLink(stream, limit_bytes=_OUTBOX_LIMIT_BYTES)
        self._answer = _Answer()
        self._opened.put(None)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._link.write)
                reason = await self._link.read(self._receive)
                nursery.cancel_scope.cancel()
        finally:
            await trio.aclose_forcefully(stream)
        why = "its process 0 has hung up" if reason.startswith("its connection") else reason
        self._over = self._over or f"the world at {self._where} is over: {why}"
        self._answer.complete.set()

    async def _reach(self) -> trio.abc.Stream:
        mine = Hello(role=WATCHER, job="", epoch=0, member=0, members=1)
        try:
            stream, host = await meet(self._endpoint, mine, self._secret, tls=self._tls)
        except NobodyError as error:
            raise UsageError(f"no job is to be found at {self._where}: {error}") from None
        except HandshakeError as error:
            raise UsageError(f"{self._where}: {error}") from None
        if host.role != "member" or not 0 < host.members <= _MOST_MEMBERS:
            await trio.aclose_forcefully(stream)
            raise UsageError(f"{self._where}: is no process 0 of a job")
        self._members = host.members
        return stream

    async def _ask(self) -> _Answer:
        answer = self._answer = _Answer()
        self._link.send(LookMessage())
        with trio.move_on_after(self._pause_s + _ANSWER_LIMIT_S):
            await answer.complete.wait()
        if answer.complete.is_set() and self._over:
            raise WorldOverError(self._over)
        if not answer.complete.is_set():
            raise UsageError(f"process 0 at {self._where} has not answered for {_ANSWER_LIMIT_S:g} s, and is connected")
        return answer

    def _receive(self, message: Message) -> None:
        answer = self._answer
        match message:
            case Refused():
                self._link.cut(message.reason)
            case Seen() if not answer.complete.is_set() and 0 <= message.member < self._members:
                answer.take(message)
            case Looked() if not answer.complete.is_set():
                answer.now_ns, answer.pause_s = message.now_ns, max(message.pause_ms, 0) / 1000
                answer.complete.set()
            case _:
                raise MessageError(f"a {type(message).__name__}, which is not its turn")


class _Answer:
    """Parts of the answer to one question."""

    def __init__(self) -> None:
        self.blobs: dict[int, bytes] = {}
        self.now_ns, self.pause_s = 0, 0.0
        self.complete = trio.Event()
        self._room_bytes = _ANSWER_LIMIT_BYTES

    def take(self, seen: Seen) -> None:
        """Take what one process said.

        Raises:
            MessageError: It is more than is believed.
        """
        self._room_bytes -= len(seen.blob)
        if seen.member in self.blobs or self._room_bytes < 0:
            raise MessageError(f"what process {seen.member} said twice, or more than {_ANSWER_LIMIT_BYTES} bytes")
        self.blobs[seen.member] = seen.blob

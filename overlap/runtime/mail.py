"""Mail: messages that the calling threads of a program carry themselves, between processes of one host.

For programs whose event loop runs in a thread of its own, as `overlap.connect` and PyTorch have it. A group has mail if
the process of each of its ranks has a mailbox; all messages of torch's process groups go by it then. A letter that
nobody waits for long costs no event loop; from then on the reports and the flight record have it like any operation.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from time import monotonic, sleep
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import trio

from transports.shared_memory.engine import CORRUPT, DONE, MISMATCH, NO_MEMORY, PENDING

from ..errors import CollectiveMismatchError, DeadlineError, PeerError, PeerFailedError, RankLeftError
from ..flight.recorder import Known
from ..timeline.ranklist import listed
from ..timeline.recording import RawGroup, call_site
from .arguments import check_rank
from .context import RankContext
from .match import Key
from .outstanding import IssuedFuture

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Op, Post

    from .communicators import Communicators

# A letter that is waited for longer is reported, and its wait looks so often whether it can still come.
_SOON_S = 0.05

# Of how many peers and tags the number of messages is remembered; then all begin at 0, for a tag may be used once only.
_TAGS_KEPT = 1 << 16

# States in which a message has ended by itself; others have been given up, and a wait says why.
_ENDED = (DONE, MISMATCH, NO_MEMORY, CORRUPT)


# The dtypes that torch's tensors have, and the bytes of an element; both ends number them alike.
_DTYPES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16, "bfloat16": 2, "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
_NAMES, _SIZES = list(_DTYPES), list(_DTYPES.values())
NUMBERS: dict[str, int] = {name: number for number, name in enumerate(_NAMES)}
"""The number of each dtype, by name."""


class Mail:
    """The messages of one rank on one group.

    Attributes:
        context: Of the rank.
        communicators: Of the world.
        mailbox: Of the process.
        name: Of the group.
        ranks: World ranks of the group, in its order.
        size: How many there are.
        rank: The index of this one.
        label: Name and ranks.
        key: Of the group.
        known: The letters that the flight record has words for.

    Args:
        context: Of the rank.
        communicators: Of the world.
        post: Of the process.
        name: Of the group.
        ranks: World ranks of the group, in its order.
        occurrence: Tells apart groups of the same ranks.
        use: Kept as long as letters of the group may be under way.
    """

    context: RankContext
    communicators: Communicators
    mailbox: Engine
    name: str
    ranks: tuple[int, ...]
    size: int
    rank: int

    def __init__(
        self,
        context: RankContext,
        communicators: Communicators,
        post: Post,
        name: str,
        ranks: tuple[int, ...],
        occurrence: int,
        use: object,
    ) -> None:
        self.context, self.communicators, self.mailbox = context, communicators, post.mailbox
        self._post, self._use = post, use
        self.name, self.ranks, self.size, self.rank = name, ranks, len(ranks), ranks.index(context.rank)
        self.label: tuple[str, tuple[int, ...]] = name, ranks
        self.key: Key = Key(ranks, occurrence, "")
        self.known: Known = Known()
        self._tags = self.key.tag_base()
        self._peers = [post.peers[rank] for rank in ranks]
        self._positions = {peer: position for position, peer in enumerate(self._peers)}
        self._counts: defaultdict[tuple[bool, int | None, int], int] = defaultdict(int)
        self._groups: dict[tuple[bool, int, int], RawGroup] = {}
        self._sites: dict[tuple[CodeType, int], bytes] = {}

    def send(
        self,
        address: int,
        nbytes: int,
        dtype: int,
        keeps: object,
        dst: int,
        tag: int,
        limit_s: float,
        caller: FrameType,
    ) -> Letter:
        """Begin to send to a group rank; a message that the ring has room for is written at once.

        Args:
            address: Of the elements, in order.
            nbytes: Of all of them.
            dtype: Its number.
            keeps: Owns that memory.
            dst: The group rank.
            tag: Of the message.
            limit_s: How long it may take.
            caller: The line of the program.

        Raises:
            UsageError: If there is no such rank.
            PeerFailedError: If the world has ended.
            GroupAbortedError: If the group was aborted.
        """
        self._check("dst", dst)
        place = caller.f_code, caller.f_lasti
        site = self._sites.get(place)
        if site is None:
            site = self._sites[place] = call_site(*place).encode()[-32:]
        letter = Letter(self, nbytes, dtype, False, dst, tag, limit_s, place)
        self._post.limit = max(self._post.limit, (letter.over_s, limit_s, site))
        letter.op = self.mailbox.send(self._peers[dst], self._tags + tag, dtype, site, address, nbytes, keeps)
        return letter

    def receive(
        self,
        address: int,
        nbytes: int,
        dtype: int,
        keeps: object,
        src: int | None,
        tag: int,
        limit_s: float,
        caller: FrameType,
        finish: Callable[[], None] | None = None,
    ) -> Letter:
        """Begin to receive from a group rank, or from any of them.

        Args:
            address: Where the elements go, in order.
            nbytes: Of all of them.
            dtype: Its number.
            keeps: Owns that memory.
            src: The group rank; None for any.
            tag: Of the message.
            limit_s: How long it may take.
            caller: The line of the program.
            finish: Called once it has come, by the first thread that finds out.

        Raises:
            UsageError: If there is no such rank.
            PeerFailedError: If the world has ended.
            GroupAbortedError: If the group was aborted.
        """
        self._check("src", src)
        letter = Letter(self, nbytes, dtype, True, src, tag, limit_s, (caller.f_code, caller.f_lasti), finish)
        peer = -1 if src is None else self._peers[src]
        letter.op = self.mailbox.receive(peer, self._tags + tag, dtype, address, nbytes, keeps)
        return letter

    def trouble(self) -> BaseException | None:
        """Return the error of all letters, if the world has ended or the group was aborted."""
        if self.context.ending.failure is not None or self.context.closed:
            return self.context.ending.peer_failed()
        broken = self.communicators.broken(self.key)
        return broken() if broken is not None else None

    def position(self, op: Op) -> int:
        """Return the group rank whom a message came from."""
        return self._positions[op.source]

    def number(self, receives: bool, peer: int | None, tag: int) -> int:
        """Count a message."""
        if len(self._counts) >= _TAGS_KEPT:
            self._counts.clear()
            self._groups.clear()
        key = receives, peer, tag
        self._counts[key] = count = self._counts[key] + 1
        return count - 1

    def ends(self, receives: bool, peer: int, tag: int) -> RawGroup:
        """Return the sender and the receiver of a message as the timeline has them."""
        key = receives, peer, tag
        found = self._groups.get(key)
        if found is None:
            ends = (peer, self.rank) if receives else (self.rank, peer)
            found = self._groups[key] = self.name, (self.ranks[ends[0]], self.ranks[ends[1]]), tag
        return found

    def _check(self, argument: str, peer: int | None) -> None:
        if peer is not None:
            check_rank(self, argument, peer)
        if (error := self.trouble()) is not None:
            raise error


class Letter:
    """One end of a message that goes by mail.

    Attributes:
        mail: Of its group.
        op: In the mailbox.
        nbytes: Of its elements.
        dtype: Number of their dtype.
        receives: Whether this is the receiver's end.
        peer: The group rank at the other end; None for any.
        source: The group rank whom it came from, for a receive that has ended.
        tag: As given by the caller.
        place: Of the call.
        seq: Its number among those with this peer and tag.
        step: In which it was issued.
        issued_ns: When.
        over_s: When its limit ends, on the monotonic clock.
    """

    __slots__ = (
        "_awaited_ns", "_error", "_finish", "_limit_s", "_lock", "_noted", "dtype", "issued_ns", "mail", "nbytes", "op",
        "over_s", "peer", "place", "receives", "seq", "source", "step", "tag",
    )  # fmt: skip

    mail: Mail
    op: Op
    nbytes: int
    dtype: int
    receives: bool
    peer: int | None
    source: int | None
    tag: int
    place: tuple[CodeType, int]

    def __init__(
        self,
        mail: Mail,
        nbytes: int,
        dtype: int,
        receives: bool,
        peer: int | None,
        tag: int,
        limit_s: float,
        place: tuple[CodeType, int],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.mail, self.nbytes, self.dtype = mail, nbytes, dtype
        self.receives, self.peer, self.tag, self.place = receives, peer, tag, place
        self.source = peer
        self.seq: int = mail.number(receives, peer, tag)
        self.step: int | None = mail.context.step
        self._limit_s = limit_s
        self.over_s: float = monotonic() + limit_s
        self._finish, self._lock, self._noted = finish, threading.Lock(), False
        self._error: BaseException | None = None
        self.issued_ns: int = mail.context.now_ns()
        self._awaited_ns: int | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        if not self._noted:
            state = self.mail.mailbox.wait(self.op, 0.0)
            if state in _ENDED:
                self._note(state)
            else:
                self._give_up(None)
        return self._noted

    def result(self, timeout: float | None = None) -> None:
        """Wait for its end, and raise its error."""
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for its end, and return its error.

        Raises:
            trio.WouldBlock: On the thread of an event loop, if it has not ended.
            TimeoutError: If it has not ended in time.
        """
        if not self._noted:
            if trio.lowlevel.in_trio_run() and not self.done:
                raise trio.WouldBlock(f"{self.label} has not ended; waiting here would stop the event loop")
            if self._awaited_ns is None:
                self._awaited_ns = self.mail.context.now_ns()
            state = self.mail.mailbox.wait(self.op, _SOON_S if timeout is None else min(timeout, _SOON_S))
            if state in _ENDED:
                self._note(state)
            else:
                self._wait_long(timeout)
        return self._error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` with this once it is done: at once, or in a thread that waits for it."""
        if self.done:
            callback(self)
            return

        def wait() -> None:
            self.exception()
            callback(self)

        threading.Thread(target=wait, name="overlap mail", daemon=True).start()

    @property
    def name(self) -> str:
        """Name of the operation."""
        return "recv" if self.receives else "send"

    @property
    def towards(self) -> str:
        """The peer, for people."""
        peer = "any rank" if self.peer is None else f"rank {self.mail.ranks[self.peer]}"
        return f" {'from' if self.receives else 'to'} {peer}{f' with tag {self.tag}' if self.tag else ''}"

    @property
    def label(self) -> str:
        """Its name in messages."""
        number = "" if self.peer is None else f" #{self.seq}"
        return f"{self.name}{number}{self.towards} on group '{self.mail.name}'"

    # -- long waits ------------------------------------------------------------------------------------------------

    def _wait_long(self, timeout: float | None) -> None:
        """Wait on, as an operation that reports know; notice what keeps the message from ever coming."""
        begun_s, mailbox = monotonic(), self.mail.mailbox
        waiting = _Waiting(self)
        waiting.begin()
        try:
            while True:
                self._give_up(waiting.error)
                state = mailbox.wait(self.op, 0.0)
                if state in _ENDED:
                    self._note(state)
                if self._noted:
                    return
                left_s = _SOON_S if timeout is None else min(_SOON_S, begun_s + timeout - _SOON_S - monotonic())
                if left_s <= 0:
                    raise TimeoutError(f"{self.label} has not ended within {timeout:g} s")
                left_s = min(left_s, max(0.0, self.over_s - monotonic()))
                if state == PENDING:
                    mailbox.wait(self.op, left_s)
                else:  # the peer is lost, and the world will say so
                    sleep(left_s)
        finally:
            waiting.end(failed=self._error is not None)

    def _give_up(self, error: BaseException | None) -> None:
        """Note an error if something keeps it from ever ending; its end, if that has come before."""
        error = error or self.mail.trouble() or self._late() or self._left()
        if error is None:
            return
        state = self.mail.mailbox.wait(self.op, 0.0)  # what was written before is found first
        if state not in _ENDED:
            self.mail.mailbox.withdraw(self.op)
        self._note(state, error)

    def _late(self) -> BaseException | None:
        if monotonic() < self.over_s:
            return None
        state = _Waiting(self).describe_state(self.mail.context.now_ns())
        return DeadlineError(self.label, call_site(*self.place), timeout_s=self._limit_s, state=state)

    def _left(self) -> BaseException | None:
        """Return the error if nobody is left who could be the other end; what has been written is found first."""
        mail = self.mail
        left = mail.communicators.left
        peers = [self.peer] if self.peer is not None else [i for i in range(len(mail.ranks)) if i != mail.rank]
        if not all(mail.ranks[peer] in left for peer in peers):
            return None
        mine, site = mail.context.rank, call_site(*self.place)
        if self.peer is None:
            told = f"all other ranks finished their programs while rank {mine} waits in {self.label} ({site})"
            return RankLeftError(told, culprit=mine)
        culprit = mail.ranks[self.peer]
        told = f"rank {culprit} finished its program while rank {mine} needs it in {self.label} ({site})"
        return RankLeftError(told, culprit=culprit)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _note(self, state: int, error: BaseException | None = None) -> None:
        """Note how it has ended, once."""
        with self._lock:
            if self._noted:
                return
            if state == DONE:
                self._error = self._arrived()
            elif state == MISMATCH:
                self._error = self._mismatch()
            elif state == NO_MEMORY:
                self._error = MemoryError(f"{self.label}: there is no memory for a message that came before others")
            elif state == CORRUPT:
                self._error = self._corrupt()
            else:
                self._error = error
            self._noted = True

    def _arrived(self) -> BaseException | None:
        mail, context = self.mail, self.mail.context
        if self.receives:
            self.source = peer = mail.position(self.op)
        else:
            peer = self.peer or 0
        code, instruction = self.place
        match = (
            "send/recv",
            "direct",
            mail.ends(self.receives, peer, self.tag),
            self.seq,
            self.nbytes,
            _NAMES[self.dtype],
        )
        info = (*match, self.issued_ns), self.issued_ns, 0, code, instruction, self._awaited_ns, self.step
        context.record(("comm", "comm", self.name, self.issued_ns, context.now_ns(), info))
        if self._finish is not None:
            try:
                self._finish()
            except Exception as error:
                return error
        return None

    def _corrupt(self) -> PeerError:
        mail = self.mail
        culprit = mail.ranks[mail.position(self.op) if self.receives else self.peer or 0]
        text = (
            f"{self.label} ({call_site(*self.place)}): rank {culprit} wrote counts or heads that cannot be true into "
            f"the memory of its messages; its process is corrupt, or of another version"
        )
        return PeerError(text, culprit=culprit)

    def _mismatch(self) -> CollectiveMismatchError:
        mail, (dtype, nbytes) = self.mail, self.op.call
        sender = mail.ranks[mail.position(self.op)]
        return CollectiveMismatchError(
            group=mail.name,
            seq=self.seq,
            ranks=(sender, mail.context.rank),
            calls=(_said(dtype, nbytes), _said(self.dtype, self.nbytes)),
            call_sites=(self.op.site.decode(errors="replace"), call_site(*self.place)),
        )


def _said(dtype: int, nbytes: int) -> str:
    """Return the call of one end, as those of other operations read."""
    if dtype >= len(_NAMES):
        return f"send/recv({nbytes} bytes of another dtype)"
    return f"send/recv({_NAMES[dtype]} ({nbytes // _SIZES[dtype]},))"


class _Waiting(IssuedFuture[None]):
    """A letter that is waited for long, as reports and the flight record have it."""

    __slots__ = ("_letter", "_record", "error")

    def __init__(self, letter: Letter) -> None:
        super().__init__()
        self.name, self.place, self._letter = letter.name, letter.place, letter
        self.error: BaseException | None = None
        self._record = -1

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self._letter.label

    @property
    def awaits(self) -> Sequence[int]:
        """World ranks that it waits for."""
        mail, peer = self._letter.mail, self._letter.peer
        return [mail.ranks[peer]] if peer is not None else [rank for rank in mail.ranks if rank != mail.context.rank]

    @property
    def since_ns(self) -> int:
        """When it was issued."""
        return self._letter.issued_ns

    def concerns(self, ranks: Container[int]) -> bool:
        """Whether any of some world ranks is the other end, or may be."""
        return any(rank in ranks for rank in self.awaits)

    def abandon(self, error: BaseException) -> None:
        """Fail it because the world has ended."""
        self.error = error
        self._letter.mail.mailbox.withdraw(self._letter.op)

    def flight_fields(self) -> dict[str, str]:
        """Return its words for the flight record."""
        letter, mail = self._letter, self._letter.mail
        return {
            "name": letter.name,
            "what": _said(letter.dtype, letter.nbytes),
            "kind": "send/recv",
            "group": mail.name,
            "towards": letter.towards,
            "members": listed(sorted({mail.context.rank, *self.awaits})),
            "key": f"mail {mail.key.id:x}{letter.towards}",
            "nbytes": str(letter.nbytes),
            "site": self.call_site,
        }

    def begin(self) -> None:
        """Let the event loop know it."""
        try:
            self._letter.mail.context.from_thread(self._begin)
        except PeerFailedError as error:
            self.error = error

    def end(self, *, failed: bool) -> None:
        """Let the event loop forget it."""
        with suppress(PeerFailedError):
            self._letter.mail.context.from_thread(self._end, failed)

    def _begin(self) -> None:
        letter, context = self._letter, self._letter.mail.context
        if context.closed:
            self.error = context.ending.peer_failed()
            return
        context.outstanding.operations[self] = None
        call = self.label, self.place
        self._record = context.flight.issued(self, letter.mail.known, call, letter.seq, letter.issued_ns)

    def _end(self, failed: bool) -> None:
        context = self._letter.mail.context
        if context.outstanding.operations.pop(self, self) is None:
            now_ns = context.now_ns()
            context.flight.ended(self._record, -now_ns if failed else now_ns)
            context.outstanding.note_end(self, None)

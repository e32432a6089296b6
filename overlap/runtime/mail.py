"""Mail: messages that the calling threads of a program carry themselves, between processes of one host.

It is for programs with the event loop in a thread of its own, as with `overlap.connect` and PyTorch. A group has mail
if the process of each of its ranks has a mailbox; all messages of torch's process groups go by it then. A message that
takes long is an operation of the event loop from then on, for reports and the flight record; others cost it nothing.
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
from .interrupts import interruptible
from .match import Key
from .outstanding import IssuedFuture

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Op, Post

    from .communicators import Communicators

# A message that takes longer is reported; its wait checks so often whether it can still come.
_SOON_S = 0.05

# Bound of the peers and tags with a count of messages; then all begin at 0, for a tag may be used once only.
_TAGS_KEPT = 1 << 16

# The dtype is the kind of a message, which both ends state, in the upper bits of its fingerprint.
_KIND_BIT = 40

# States of a message that has ended by itself; others have been given up, with an error.
_ENDED = (DONE, MISMATCH, NO_MEMORY, CORRUPT)


# The dtypes of torch's tensors, and the bytes of an element; both ends number them alike.
_DTYPES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16, "bfloat16": 2, "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
_NAMES, _SIZES = list(_DTYPES), list(_DTYPES.values())
NUMBERS: dict[str, int] = {name: number for number, name in enumerate(_NAMES)}
"""The number of each dtype, by name."""


class Mail:
    """Sends and receives of one rank on one group, through the mailbox of its process.

    Attributes:
        ranks: World ranks of the group, in its order.
        size: Number of ranks.
        label: Name and ranks of the group.
        known: Texts of the requests in the flight record.

    Args:
        post: Mailbox and addresses of the process.
        ranks: World ranks of the group, in its order.
        occurrence: Number among the groups of the same ranks.
        use: Object to keep as long as messages of the group may be under way.
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
    ) -> MailRequest:
        """Begin to send to a group rank; a message with room in the ring is written at once.

        `keeps` owns the memory of `nbytes` bytes at `address`; `caller` is the frame of the program's line.

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
        request = MailRequest(self, nbytes, dtype, False, dst, tag, limit_s, place)
        self._post.limit = max(self._post.limit, (request.over_s, limit_s, site))
        fingerprint = (dtype + 1) << _KIND_BIT
        request.op = self.mailbox.send(self._peers[dst], self._tags + tag, fingerprint, site, address, nbytes, keeps)
        return request

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
    ) -> MailRequest:
        """Begin to receive from a group rank, or from any rank (None); arguments and errors are as for `send`.

        The first thread that notices the arrival calls `finish`.
        """
        self._check("src", src)
        request = MailRequest(self, nbytes, dtype, True, src, tag, limit_s, (caller.f_code, caller.f_lasti), finish)
        peer = -1 if src is None else self._peers[src]
        fingerprint = (dtype + 1) << _KIND_BIT
        request.op = self.mailbox.receive(peer, self._tags + tag, fingerprint, b"", address, nbytes, keeps)
        return request

    def world_error(self) -> BaseException | None:
        """Return the error of all messages, if the world has ended or the group was aborted."""
        if self.context.closed:
            return self.context.ended()
        broken = self.communicators.find_abort(self.key)
        return broken() if broken is not None else None

    def position(self, op: Op) -> int:
        """Return the group rank of the sender of a message."""
        return self._positions[op.source]

    def number(self, receives: bool, peer: int | None, tag: int) -> int:
        """Return the number of a new message among those of its peer and tag."""
        if len(self._counts) >= _TAGS_KEPT:
            self._counts.clear()
            self._groups.clear()
        key = receives, peer, tag
        self._counts[key] = count = self._counts[key] + 1
        return count - 1

    def ends(self, receives: bool, peer: int, tag: int) -> RawGroup:
        """Return the sender and the receiver of a message, for the timeline."""
        key = receives, peer, tag
        group = self._groups.get(key)
        if group is None:
            ends = (peer, self.rank) if receives else (self.rank, peer)
            group = self._groups[key] = self.name, (self.ranks[ends[0]], self.ranks[ends[1]]), tag
        return group

    def _check(self, argument: str, peer: int | None) -> None:
        """Refuse a peer that does not exist, and a call after the end of the world."""
        if peer is not None:
            check_rank(self, argument, peer)
        if (error := self.world_error()) is not None:
            raise error


class MailRequest:
    """The send or the receive of a message by mail.

    Attributes:
        op: Its operation in the mailbox.
        nbytes: Bytes of its elements.
        dtype: Number of their dtype.
        receives: Whether this is a receive.
        peer: Group rank of the other end; None for any.
        source: Group rank of the sender, for a receive that has ended.
        seq: Number among the messages of this peer and tag.
        step: Step of the timeline at its issue.
        issued_ns: Time of its issue.
        over_s: End of its time limit, on the monotonic clock.
    """

    __slots__ = (
        "_awaited_ns",
        "_ended",
        "_error",
        "_finish",
        "_limit_s",
        "_lock",
        "dtype",
        "issued_ns",
        "mail",
        "nbytes",
        "op",
        "over_s",
        "peer",
        "place",
        "receives",
        "seq",
        "source",
        "step",
        "tag",
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
        self._finish, self._lock, self._ended = finish, threading.Lock(), False
        self._error: BaseException | None = None
        self.issued_ns: int = mail.context.now_ns()
        self._awaited_ns: int | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        if not self._ended:
            state = self.mail.mailbox.wait(self.op, 0.0)
            if state in _ENDED:
                self._record_end(state)
            else:
                self._give_up(None)
        return self._ended

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
        if not self._ended:
            if trio.lowlevel.in_trio_run() and not self.done:
                raise trio.WouldBlock(f"{self.label} has not ended; waiting here would stop the event loop")
            if self._awaited_ns is None:
                self._awaited_ns = self.mail.context.now_ns()
            state = self.mail.mailbox.wait(self.op, _SOON_S if timeout is None else min(timeout, _SOON_S))
            if state in _ENDED:
                self._record_end(state)
            else:
                self._wait_long(timeout)
        return self._error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` with this request once it is done: at once, or in a thread that waits for it."""
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
        """The peer, in messages."""
        peer = "any rank" if self.peer is None else f"rank {self.mail.ranks[self.peer]}"
        return f" {'from' if self.receives else 'to'} {peer}{f' with tag {self.tag}' if self.tag else ''}"

    @property
    def label(self) -> str:
        """Its name in messages."""
        number = "" if self.peer is None else f" #{self.seq}"
        return f"{self.name}{number}{self.towards} on group '{self.mail.name}'"

    # -- long waits ------------------------------------------------------------------------------------------------

    def _wait_long(self, timeout: float | None) -> None:
        """Wait on, as an operation of the event loop, until the message arrives or cannot arrive."""
        start_s, mailbox = monotonic(), self.mail.mailbox
        waiting = _LongWait(self)
        waiting.begin()
        try:
            while True:
                self._give_up(waiting.error)
                state = mailbox.wait(self.op, 0.0)
                if state in _ENDED:
                    self._record_end(state)
                if self._ended:
                    return
                remaining_s = _SOON_S if timeout is None else min(_SOON_S, start_s + timeout - _SOON_S - monotonic())
                if remaining_s <= 0:
                    raise TimeoutError(f"{self.label} has not ended within {timeout:g} s")
                remaining_s = min(remaining_s, max(0.0, self.over_s - monotonic()))
                self._wait(state, remaining_s)
        finally:
            waiting.end(failed=self._error is not None)

    @interruptible
    def _wait(self, state: int, seconds: float) -> None:
        """Wait for a message in this state; an interrupt ends the wait."""
        if state == PENDING:
            self.mail.mailbox.wait(self.op, seconds)
        else:  # the peer is lost, and the world will fail
            sleep(seconds)

    def _give_up(self, error: BaseException | None) -> None:
        """End with an error, or with the result if the message has arrived before."""
        error = error or self.mail.world_error() or self._limit_error() or self._left_error()
        if error is None:
            return
        state = self.mail.mailbox.wait(self.op, 0.0)  # a message that was written before counts
        if state not in _ENDED:
            self.mail.mailbox.withdraw(self.op)
        self._record_end(state, error)

    def _limit_error(self) -> BaseException | None:
        """Return the error of a message after its time limit; None before."""
        if monotonic() < self.over_s:
            return None
        state = _LongWait(self).describe_state(self.mail.context.now_ns())
        return DeadlineError(self.label, call_site(*self.place), timeout_s=self._limit_s, state=state)

    def _left_error(self) -> BaseException | None:
        """Return the error if all ranks that could be the other end have finished their programs."""
        mail = self.mail
        left = mail.communicators.left
        peers = [self.peer] if self.peer is not None else [i for i in range(len(mail.ranks)) if i != mail.rank]
        if not all(mail.ranks[peer] in left for peer in peers):
            return None
        rank, site = mail.context.rank, call_site(*self.place)
        if self.peer is None:
            text = f"all other ranks finished their programs while rank {rank} waits in {self.label} ({site})"
            return RankLeftError(text, culprit=rank)
        culprit = mail.ranks[self.peer]
        text = f"rank {culprit} finished its program while rank {rank} needs it in {self.label} ({site})"
        return RankLeftError(text, culprit=culprit)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _record_end(self, state: int, error: BaseException | None = None) -> None:
        """Record the end and its error, once."""
        with self._lock:
            if self._ended:
                return
            if state == DONE or (state == MISMATCH and not self.receives):  # the receiver's error notifies its thread
                self._error = self._finish_message()
            elif state == MISMATCH:
                self._error = self._mismatch_error()
            elif state == NO_MEMORY:
                self._error = MemoryError(
                    f"{self.label}: no memory for a message that came early; receive messages in their order"
                )
            elif state == CORRUPT:
                self._error = self._corruption_error()
            else:
                self._error = error
            self._ended = True

    def _finish_message(self) -> BaseException | None:
        """Record a message that has ended, and copy its data to its place; return an error of the copy."""
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

    def _corruption_error(self) -> PeerError:
        """Return the error of a message with invalid headers."""
        mail = self.mail
        culprit = mail.ranks[mail.position(self.op) if self.receives else self.peer or 0]
        text = (
            f"{self.label} ({call_site(*self.place)}): rank {culprit} wrote invalid headers into the memory of its "
            "messages; its process is corrupt, or has another version of overlap"
        )
        return PeerError(text, culprit=culprit)

    def _mismatch_error(self) -> CollectiveMismatchError:
        """Return the error of a message that differs in dtype or length from its receive."""
        mail, (fingerprint, site, nbytes) = self.mail, self.op.theirs
        sender = mail.ranks[mail.position(self.op)]
        return CollectiveMismatchError(
            group=mail.name,
            seq=self.seq,
            ranks=(sender, mail.context.rank),
            calls=(_call_text((fingerprint >> _KIND_BIT) - 1, nbytes), _call_text(self.dtype, self.nbytes)),
            call_sites=(site.decode(errors="replace"), call_site(*self.place)),
        )


def _call_text(dtype: int, nbytes: int) -> str:
    """Return the call of one end, in the form of other operations."""
    if not 0 <= dtype < len(_NAMES):
        return f"send/recv({nbytes} bytes of another dtype)"
    return f"send/recv({_NAMES[dtype]} ({nbytes // _SIZES[dtype]},))"


class _LongWait(IssuedFuture[None]):
    """A request that takes long, as an operation of the event loop, for reports and the flight record."""

    __slots__ = ("_record", "_request", "error")

    def __init__(self, request: MailRequest) -> None:
        super().__init__()
        self.name, self.place, self._request = request.name, request.place, request
        self.error: BaseException | None = None
        self._record = -1

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self._request.label

    @property
    def awaits(self) -> Sequence[int]:
        """World ranks that it waits for."""
        mail, peer = self._request.mail, self._request.peer
        return [mail.ranks[peer]] if peer is not None else [rank for rank in mail.ranks if rank != mail.context.rank]

    @property
    def since_ns(self) -> int:
        """Time of its issue."""
        return self._request.issued_ns

    def concerns(self, ranks: Container[int]) -> bool:
        """Whether one of the world ranks is, or may be, the other end."""
        return any(rank in ranks for rank in self.awaits)

    def abandon(self, error: BaseException) -> None:
        """Fail it because the world has ended."""
        self.error = error
        self._request.mail.mailbox.withdraw(self._request.op)

    def flight_fields(self) -> dict[str, str]:
        """Return its fields in the flight record."""
        request, mail = self._request, self._request.mail
        return {
            "name": request.name,
            "what": _call_text(request.dtype, request.nbytes),
            "kind": "send/recv",
            "group": mail.name,
            "towards": request.towards,
            "members": listed(sorted({mail.context.rank, *self.awaits})),
            "key": f"mail {mail.key.id:x}{request.towards}",
            "nbytes": str(request.nbytes),
            "site": self.call_site,
        }

    def begin(self) -> None:
        """Add it to the operations of the event loop."""
        try:
            self._request.mail.context.from_thread(self._begin)
        except PeerFailedError as error:
            self.error = error

    def end(self, *, failed: bool) -> None:
        """Remove it from the operations of the event loop."""
        with suppress(PeerFailedError):
            self._request.mail.context.from_thread(self._end, failed)

    def _begin(self) -> None:
        """Count the wait as an unfinished operation of the rank."""
        request, context = self._request, self._request.mail.context
        if context.closed:
            self.error = context.ended()
            return
        context.outstanding.operations[self] = None
        call = self.label, self.place
        self._record = context.flight.issued(self, request.mail.known, call, request.seq, request.issued_ns)

    def _end(self, failed: bool) -> None:
        """End the wait in the records of the rank."""
        context = self._request.mail.context
        if context.outstanding.operations.pop(self, self) is None:
            now_ns = context.now_ns()
            context.flight.ended(self._record, -now_ns if failed else now_ns)
            context.outstanding.note_end(self, None)

"""Errors of `overlap`, in one tree that says which side is at fault.

::

    OverlapError
     +- UsageError               the caller's arguments; raised at the call, names the argument and both values
     +- NonFiniteError           a rank that would have sent a NaN or an infinity, where `run(check="nan")` asks
     +- CollectiveMismatchError  ranks that disagree about one collective; raised on every rank of the group
     +- ReplicaError             ranks whose weights should be equal, and are not
     +- PeerError                another rank is the culprit (`culprit` says which)
     |   +- PeerFailedError      it raised
     |   +- GroupAbortedError    it aborted the group
     |   +- RankLeftError        it finished while others still wait for it
     |   +- PeerLostError        its process is gone or silent
     +- RemoteError              the error of a rank of another process, as text
     +- RankFailedError          raised by `overlap.run`: the first culprit, its error, and its unfinished operations
     +- StallError               it takes too long, or never ends; says which rank waits for which
     +- DeadlineError            an operation that has not ended within its `timeout_s`
     +- FutureCancelledError     an operation that `cancel` has withdrawn; raised where it is awaited
     +- ScheduleError            a schedule that does not compute its collective; it is never run
     +- JoinError, ListenError, MemberLostError, InboxFullError
                                 processes that do not come together, or are lost (`overlap.processes`)

and a warning: TraceWarning, a timeline could not be written; the results stand.

Errors carry data and build their message from it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any, Self

_SHOWN = 80  # characters of a value that a message repeats: a line
_LONGEST_LINE = 2000  # characters of an error's first line that a message repeats: some errors tell whole arrays


class OverlapError(Exception):
    """Base of all errors raised on purpose by this package.

    All of them can be pickled and copied, with their fields, notes and causes. The error of a program that cannot be
    pickled itself becomes a `RemoteError`. Tracebacks stay behind.
    """

    agreed = False  # Whether all ranks of a group raise it: each of them is given it at its await

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: _portable(value) for name, value in self.__dict__.items()}
        return _restored, (type(self), self.args, fields, _portable(self.__cause__), self.__suppress_context__)


def agreed(error: OverlapError) -> OverlapError:
    """Mark an error that all ranks of a group raise, so that none of them ends of it before the others have it."""
    error.agreed = True
    return error


def portable(error: OverlapError) -> OverlapError:
    """Return a copy of an error that any means of pickling can send: also one that looks at its cause by itself."""
    made: OverlapError = _restored(*error.__reduce__()[1])  # type: ignore[misc]
    return made


def _restored(
    kind: type[OverlapError],
    args: tuple[object, ...],
    fields: dict[str, object],
    cause: BaseException | None,
    suppress_context: bool,
) -> OverlapError:
    error: OverlapError = kind.__new__(kind, *args)
    Exception.__init__(error, *args)  # not by its own arguments: the message is complete
    error.__dict__.update(fields)
    error.__cause__, error.__suppress_context__ = cause, suppress_context
    return error


def _portable(value: Any) -> Any:
    """Return a value that can be pickled, in place of an error or of a dict of errors that may not."""
    if isinstance(value, dict):
        return {key: _portable(each) for key, each in value.items()}
    if not isinstance(value, BaseException) or isinstance(value, OverlapError):
        return value
    try:
        pickle.loads(pickle.dumps(value))  # some can be written and not read
    except Exception:
        return RemoteError(type(value).__name__, text_of(value))
    return value


class UsageError(OverlapError):
    """The caller passed something that cannot be meant; nothing has been started."""


class TraceWarning(UserWarning):
    """The timeline of a run could not be written; its results, or its error, are not concerned."""


class CollectiveMismatchError(OverlapError):
    """Two ranks of a group disagree about the same operation.

    Attributes:
        ranks: The two world ranks named in the message.
        calls: The call of each of them, in the same order.
        call_sites: `file:line` of each call, in the same order.
        group: Name of the group.
        seq: Position of the operation on its stream.
    """

    group: str
    seq: int
    ranks: tuple[int, int]
    calls: tuple[str, str]
    call_sites: tuple[str, str]

    def __init__(
        self,
        *,
        group: str,
        seq: int,
        ranks: tuple[int, int],
        calls: tuple[str, str],
        call_sites: tuple[str, str],
    ) -> None:
        self.group, self.seq = group, seq
        self.ranks, self.calls, self.call_sites = ranks, calls, call_sites
        told = [f"rank {r} called {c} at {s}" for r, c, s in zip(ranks, calls, call_sites, strict=True)]
        advice = "every rank of a group must issue the same operations in the same order"
        if all(call.startswith("send/recv(") for call in calls):
            advice = "a message is received with the shape and dtype with which it was sent"
        super().__init__(f"operation #{seq} on group '{group}' differs between ranks: {told[0]}, {told[1]}; {advice}")


class NonFiniteError(OverlapError):
    """A rank was about to send a NaN or an infinity; `run(check="nan")` looks at all that is sent.

    Attributes:
        rank: World rank of the sender, the first to send one.
        operation: The operation, such as "all_reduce #3 on group 'world'".
        seq: Position of the operation on its stream.
        step: The `rank.step` in which it was issued, or None.
        call_site: `file:line` of the call.
        index: Index of the first such element.
        value: That element, as text.
        count: How many such elements there are.
    """

    rank: int
    operation: str
    seq: int
    step: int | None
    call_site: str
    index: tuple[int, ...]
    value: str
    count: int

    def __init__(
        self,
        *,
        rank: int,
        operation: str,
        seq: int,
        step: int | None,
        call_site: str,
        array: str,
        index: tuple[int, ...],
        value: str,
        count: int,
    ) -> None:
        self.rank, self.operation, self.seq, self.step, self.call_site = rank, operation, seq, step, call_site
        self.index, self.value, self.count = index, value, count
        when = "" if step is None else f" in step {step}"
        element = f"element {list(index)} of {array}" if index else f"the value of {array}"
        more = f", the first of {count} that are not finite," if count > 1 else ""
        super().__init__(
            f"rank {rank} was about to send {value} by {operation} at {call_site}{when}: {element}{more} is {value}; "
            "nobody has received it, so what computed it is on this rank"
        )


class ReplicaError(OverlapError):
    """Ranks that should have the same weights have not.

    Attributes:
        ranks: World ranks with other weights than most ranks.
        parameter: The first that differs.
        step: After which it was seen, from 1.
    """

    ranks: tuple[int, ...]
    parameter: str
    step: int

    def __init__(self, *, ranks: Sequence[int], of: int, parameter: str, step: int) -> None:
        self.ranks, self.parameter, self.step = tuple(ranks), parameter, step
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        doubt = "; of two halves, nobody knows which is right" if 2 * len(ranks) >= of else ""
        super().__init__(
            f"after step {step} {who} of {of} {'has' if len(ranks) == 1 else 'have'} other weights than the rest, "
            f"first in {parameter!r}{doubt}: the program wrote to them there, or memory or a processor failed"
        )


class PeerError(OverlapError):
    """An operation ended because of another rank.

    Attributes:
        culprit: World rank of the one at fault.
    """

    def __init__(self, message: str, *, culprit: int) -> None:
        self.culprit = culprit
        super().__init__(message)


class PeerFailedError(PeerError):
    """Another rank raised; `__cause__` is its error when that lives in this process."""

    @classmethod
    def caused_by(cls, cause: BaseException, message: str, *, culprit: int) -> Self:
        """Return an error with the culprit's own error as its `__cause__`."""
        error = cls(message, culprit=culprit)
        error.__cause__ = cause
        return error


class GroupAbortedError(PeerError):
    """A rank has aborted the group of an operation: nothing of that group goes on, on any rank; the world does."""


class RankLeftError(PeerError):
    """A rank finished its program while others still wait for it in an operation.

    Of a receive from any rank, the culprit is the rank that waits: it receives more than all others have sent.
    """


class PeerLostError(PeerError):
    """The process of another rank is gone without a goodbye, or silent for too long."""


class RemoteError(OverlapError):
    """The error of a rank of another process: nothing but text ever crosses from process to process.

    Attributes:
        type_name: Name of the error's class there.
        trace: Its traceback there, as text; may be empty.
        place: Where it was raised, such as " at train.py:41"; may be empty.
    """

    type_name: str
    trace: str
    place: str

    def __init__(self, type_name: str, text: str, *, trace: str = "", place: str = "") -> None:
        self.type_name, self.trace, self.place = type_name, trace, place
        super().__init__(text)


def in_one_line(error: BaseException) -> str:
    r"""Return "Type: text" of an error, whichever process it comes from; of many lines the first that is not empty.

    >>> in_one_line(ValueError("no")), in_one_line(RemoteError("ValueError", "no\n\nbecause\n"))
    ('ValueError: no', 'ValueError: no ...')
    >>> in_one_line(ExceptionGroup("in a nursery", [ValueError("no"), KeyError("x")]))
    'ValueError: no, and 1 more'
    """
    if isinstance(error, BaseExceptionGroup):
        more = len(error.exceptions) - 1
        return in_one_line(error.exceptions[0]) + f", and {more} more" * (more > 0)
    name = type_name(error)
    first, _, rest = text_of(error).strip().partition("\n")
    text = f"{printable(narrowed(first.rstrip(), _LONGEST_LINE))}{' ...' if rest else ''}"
    return f"{name}: {text}" if text else name


def narrowed(line: str, most: int) -> str:
    """Return a line of at most so many characters: of a longer one the beginning and the end, and a note.

    >>> narrowed("abcdefgh", 4)
    'ab ... 4 characters left out ... gh'
    """
    left_out, half = len(line) - most, most // 2
    return f"{line[:half]} ... {left_out} characters left out ... {line[-half:]}" if left_out > 0 else line


def type_name(error: BaseException) -> str:
    """Return the name of an error's class, whichever process it comes from."""
    return error.type_name if isinstance(error, RemoteError) else type(error).__name__


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def text_of(error: BaseException) -> str:
    """Return `str(error)`, also of an error whose own text cannot be had."""
    try:
        return str(error)
    except Exception as failed:
        return f"(its text cannot be had: {type(failed).__name__})"


def printable(line: str) -> str:
    r"""Return a line without what would make a terminal do something else than show it.

    >>> printable("red \x1b[31m\0")
    'red \\x1b[31m\\x00'
    """
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def shown(value: object) -> str:
    """Describe an argument in one line: arrays by type and shape, long values by their beginning.

    >>> shown("median"), shown([0] * 99)
    ("'median'", '[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0...')
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of {getattr(value, 'dtype', 'unknown dtype')} {tuple(shape)}"
    try:
        text = repr(value)
    except Exception:  # of a foreign class; the message about the call matters more
        return f"<{type(value).__name__}>"
    line = printable(" ".join(text.split()) if "\n" in text else text)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


def _ranks(ranks: Sequence[int]) -> str:
    """Name some ranks, ascending, as ranges."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join('-'.join(map(str, run)) for run in runs)}"


class RankFailedError(OverlapError):
    """A rank ended the world; raised by `overlap.run`.

    `__cause__` is the error itself, with its traceback.

    Attributes:
        rank: World rank of the first culprit.
        cause: Its error.
        doing: The operations it had not finished, oldest first, as text.
        others: Errors of further ranks that were not consequences of the first, by rank.
    """

    rank: int
    cause: BaseException
    doing: tuple[str, ...]
    others: dict[int, BaseException]

    def __init__(
        self,
        *,
        rank: int,
        cause: BaseException,
        where: str,
        doing: Sequence[str],
        others: dict[int, BaseException],
        world_size: int,
        finished: int = 0,
    ) -> None:
        self.rank, self.cause, self.doing, self.others = rank, cause, tuple(doing), dict(others)
        busy = f"; unfinished there: {', '.join(self.doing)}" if self.doing else ""
        rest = f"; also failed: {_ranks(sorted(self.others))}" if self.others else ""
        ended = world_size - 1 - len(self.others) - finished
        stopped = f"; the other {ended} ranks were stopped" if ended > 1 else ""
        who = f"rank {rank} failed{where}"
        told = (type_name(cause), type_name(_first(cause)))
        if CollectiveMismatchError.__name__ in told:
            who, busy = "ranks disagree", ""  # the error names both, and where; who has noticed it is not to blame
        elif RankLeftError.__name__ in told and f"rank {rank} finished" in in_one_line(cause):
            who = f"rank {rank} left too early"  # and was nowhere: the place is that of who waits
        super().__init__(f"{who}: {in_one_line(cause)}{busy}{rest}{stopped}")


class StallError(OverlapError):
    """The world made no end of it within `timeout_s`, made no progress for too long, or never will.

    Attributes:
        timeout_s: How long it was given, if that is why it was ended; else None.
        report: One line for each rank: the operation it waits in, its place, and the ranks it waits for.
        sentence: Which rank waits for which, in one sentence; may be empty.
    """

    timeout_s: float | None
    report: tuple[str, ...]
    sentence: str

    def __init__(self, timeout_s: float | None, report: Sequence[str], *, reason: str = "", sentence: str = "") -> None:
        """Make one.

        Args:
            timeout_s: As the attribute.
            report: As the attribute.
            reason: Why it was ended; by default `timeout_s`.
            sentence: As the attribute.
        """
        self.timeout_s, self.report, self.sentence = timeout_s, tuple(report), sentence
        what = reason or f"did not finish within timeout_s={timeout_s:g}"
        super().__init__("\n  ".join([f"the world {what}{': ' if sentence else ''}{sentence}", *self.report]))


class DeadlineError(OverlapError, TimeoutError):
    """An operation has not ended within its `timeout_s`.

    Attributes:
        operation: The operation, such as "all_reduce #3 on group 'world'".
        call_site: `file:line` of the call.
        timeout_s: How long it was given.
    """

    operation: str
    call_site: str
    timeout_s: float

    def __init__(self, operation: str, call_site: str, *, timeout_s: float, state: str = "") -> None:
        self.operation, self.call_site, self.timeout_s = operation, call_site, timeout_s
        so_far = f": it {state}" if state else ""
        super().__init__(f"{operation} ({call_site}) has not ended within timeout_s={timeout_s:g}{so_far}")


class FutureCancelledError(OverlapError, CancelledError):
    """An operation was withdrawn by `Future.cancel`, or used the result of one that was; raised at the await."""


class ScheduleError(OverlapError):
    """A schedule failed its proof.

    Attributes:
        rank: Where it goes wrong, if the damage has a place.
        slot: Slot of the output buffer.
        step: Logical step of the table.
        contributor: The rank whose contribution is missing or counted twice.
    """

    rank: int | None
    slot: int | None
    step: int | None
    contributor: int | None

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        slot: int | None = None,
        step: int | None = None,
        contributor: int | None = None,
    ) -> None:
        self.rank, self.slot, self.step, self.contributor = rank, slot, step, contributor
        super().__init__(message)

"""Errors of `overlap`, in one tree that says which side is at fault.

::

    OverlapError
     +- UsageError               the caller's arguments; raised at the call, names the argument and both values
     +- NonFiniteError           a rank that would have sent a NaN or an infinity, under `run(check="nan")`
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
     +- FutureCancelledError     an operation that `cancel` has ended; raised where it is awaited
     +- ScheduleError            a schedule that does not compute its collective; it is never run
     +- JoinError, ListenError, MemberLostError
                                 processes that do not come together, or are lost (`overlap.processes`)

and a warning: TraceWarning, a timeline could not be written; the results stand.

Errors about one operation carry its facts and build their message from them. `UsageError`, `ScheduleError` and
errors of peers get their text where they are raised. Errors of wires are a tree of their own: `transports.failures`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any, Self

_SHOWN = 80  # characters of a value that a message repeats: a line
_LONGEST_LINE = 2000  # characters of an error's first line that a message repeats: some errors contain whole arrays


class OverlapError(Exception):
    """Base of all errors raised on purpose by this package.

    All of them can be pickled and copied, with their fields, notes and causes. The error of a program that cannot be
    pickled itself becomes a `RemoteError`. Tracebacks stay behind.
    """

    agreed = False  # Whether all ranks of a group raise it: each of them is given it at its await

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: _make_picklable(value) for name, value in self.__dict__.items()}
        return _rebuild, (type(self), self.args, fields, _make_picklable(self.__cause__), self.__suppress_context__)


def mark_agreed(error: OverlapError) -> OverlapError:
    """Mark an error that all ranks of a group raise, so that no rank ends before the others have it; return it."""
    error.agreed = True
    return error


def _rebuild(
    kind: type[OverlapError],
    args: tuple[object, ...],
    fields: dict[str, object],
    cause: BaseException | None,
    suppress_context: bool,
) -> OverlapError:
    """Make an error from its unpickled parts."""
    error: OverlapError = kind.__new__(kind, *args)
    Exception.__init__(error, *args)  # not by its own arguments: the message is complete
    error.__dict__.update(fields)
    error.__cause__, error.__suppress_context__ = cause, suppress_context
    return error


def _make_picklable(value: Any) -> Any:
    """Return a value that can be pickled, in place of an error or of a dict of errors that may not."""
    if isinstance(value, dict):
        return {key: _make_picklable(item) for key, item in value.items()}
    if not isinstance(value, BaseException) or isinstance(value, OverlapError):
        return value
    try:
        pickle.loads(pickle.dumps(value))  # some can be written and not read
    except Exception:
        return RemoteError(type(value).__name__, text_of(value))
    return value


class UsageError(OverlapError):
    """Invalid arguments of the caller; nothing has been started."""


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
        sides = [f"rank {r} called {c} at {s}" for r, c, s in zip(ranks, calls, call_sites, strict=True)]
        advice = "every rank of a group must issue the same operations in the same order"
        if all(call.startswith("send/recv(") for call in calls):
            advice = "a message is received with the shape and dtype with which it was sent"
        super().__init__(f"operation #{seq} on group '{group}' differs between ranks: {sides[0]}, {sides[1]}; {advice}")


class NonFiniteError(OverlapError):
    """A rank was about to send a NaN or an infinity; `run(check="nan")` checks all sent data.

    Args:
        array: Which array it was in, as the message says it.

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
            "no rank has received it: look for its cause in the computes of this rank"
        )


class ReplicaError(OverlapError):
    """Ranks that should have equal weights have different ones.

    Attributes:
        ranks: World ranks with other weights than most ranks.
        parameter: The first that differs.
        step: Number of the step after which it was found, from 1.
    """

    ranks: tuple[int, ...]
    parameter: str
    step: int

    def __init__(self, *, ranks: Sequence[int], of: int, parameter: str, step: int) -> None:
        self.ranks, self.parameter, self.step = tuple(ranks), parameter, step
        odd_ranks = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        caveat = "; with two halves, either may be right" if 2 * len(ranks) >= of else ""
        super().__init__(
            f"after step {step} {odd_ranks} of {of} {'has' if len(ranks) == 1 else 'have'} other weights than the rest"
            f", first in {parameter!r}{caveat}: the program wrote to them there, or memory or a processor failed"
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
    """A rank has aborted the group of an operation: its operations fail on all ranks; the world goes on."""


class RankLeftError(PeerError):
    """A rank finished its program while others still wait for it in an operation.

    Of a receive from any rank, the culprit is the rank that waits: it receives more than all others have sent.
    """


class PeerLostError(PeerError):
    """The process of another rank has ended without leaving the world, or is silent for too long."""


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
    text = f"{printable(shorten_line(first.rstrip(), _LONGEST_LINE))}{' ...' if rest else ''}"
    return f"{name}: {text}" if text else name


def shorten_line(line: str, limit: int) -> str:
    """Return a line; one of more than `limit` characters loses its middle, and has the number of lost characters.

    >>> shorten_line("abcdefgh", 4)
    'ab ... 4 characters left out ... gh'
    """
    left_out, half = len(line) - limit, limit // 2
    return f"{line[:half]} ... {left_out} characters left out ... {line[-half:]}" if left_out > 0 else line


def type_name(error: BaseException) -> str:
    """Return the name of an error's class, whichever process it comes from."""
    return error.type_name if isinstance(error, RemoteError) else type(error).__name__


def first_of_group(error: BaseException) -> BaseException:
    """Return the first error of nested groups, such as both directions of a link that was cut."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a note if the error's own `__str__` raises."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def printable(line: str) -> str:
    r"""Return a line with its control characters escaped, so that a terminal only shows it.

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


def _rank_ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks in words, with ranges for consecutive ones."""
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

    Args:
        where: Where the rank ran, or an empty text.
        world_size: Number of ranks of the world.

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
        other_failures = f"; also failed: {_rank_ranges(sorted(self.others))}" if self.others else ""
        ended = world_size - 1 - len(self.others) - finished
        stopped = f"; the other {ended} ranks were stopped" if ended > 1 else ""
        subject = f"rank {rank} failed{where}"
        kinds = (type_name(cause), type_name(first_of_group(cause)))
        if CollectiveMismatchError.__name__ in kinds:
            subject, busy = "ranks disagree", ""  # the error names both, and where; who has noticed it is not to blame
        elif RankLeftError.__name__ in kinds and f"rank {rank} finished" in in_one_line(cause):
            subject = f"rank {rank} left too early"  # and was nowhere: the place is that of who waits
        super().__init__(f"{subject}: {in_one_line(cause)}{busy}{other_failures}{stopped}")


class StallError(OverlapError):
    """The world has not ended within `timeout_s`, has made no progress for too long, or never will.

    Args:
        reason: Why the world was ended, after the words `the world`; by default `timeout_s`.

    Attributes:
        timeout_s: How long it was given, if that is why it was ended; else None.
        report: One line for each rank: the operation it waits in, its place, and the ranks it waits for.
        sentence: Which rank waits for which, in one sentence; may be empty.
    """

    timeout_s: float | None
    report: tuple[str, ...]
    sentence: str

    def __init__(self, timeout_s: float | None, report: Sequence[str], *, reason: str = "", sentence: str = "") -> None:
        """Make one; `reason` says why the world was ended, by default `timeout_s`."""
        self.timeout_s, self.report, self.sentence = timeout_s, tuple(report), sentence
        end = reason or f"did not finish within timeout_s={timeout_s:g}"
        super().__init__("\n  ".join([f"the world {end}{': ' if sentence else ''}{sentence}", *self.report]))


class DeadlineError(OverlapError, TimeoutError):
    """An operation has not ended within its `timeout_s`.

    Args:
        state: What the operation did when its time was over, or an empty text.

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
    """An operation was cancelled by `Future.cancel`, or used the result of a cancelled one; raised at the await."""


class ScheduleError(OverlapError):
    """A schedule failed its proof.

    Args:
        message: What is wrong.

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

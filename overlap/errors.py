"""Errors of `overlap`, in one tree that says which side is at fault.

::

    OverlapError
     +- UsageError               the caller's arguments; raised at the call, names the argument and both values
     +- NonFiniteError           a rank that would have sent a NaN or an infinity, under `run(check="nan")`
     +- CollectiveMismatchError  ranks that disagree about one collective; raised on every rank of the group
     +- ReplicaError             ranks whose weights should be equal, and are not
     +- PeerError                another rank is the culprit (`culprit` is its number)
     |   +- PeerFailedError      that rank raised an error
     |   +- GroupAbortedError    that rank aborted the group
     |   +- RankLeftError        that rank finished while others still wait for it
     |   +- PeerLostError        the process of that rank is gone or silent
     +- RemoteError              the error of a rank of another process, as text
     +- RankFailedError          raised by `overlap.run`: the first culprit, its error, and its unfinished operations
     +- StallError               the world takes too long, or can never end; says which rank waits for which
     +- DeadlineError            an operation that has not ended within its `timeout_s`
     +- FutureCancelledError     an operation that `cancel` has ended; raised where it is awaited
     +- ScheduleError            a schedule that does not compute its collective; it is never run
     +- JoinError, ListenError, MemberLostError
                                 processes that do not come together, or are lost (`overlap.processes`)

and a warning: TraceWarning, a timeline could not be written; the results are unaffected.

Errors about one operation have its facts as attributes, and build their message from them. The code that raises
`UsageError`, `ScheduleError` or a `PeerError` writes the text. Errors of wires are a tree of their own:
`transports.failures`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any, Self

from .ranklist import named_ranks

_SHOWN = 80  # characters of a value that a message repeats: a line
_LONGEST_LINE = 2000  # characters of an error's first line that a message repeats: some errors contain whole arrays


class OverlapError(Exception):
    """Base of all errors raised on purpose by this package.

    These errors can be pickled and copied, with attributes, notes and causes, but without tracebacks. A cause that
    cannot be pickled becomes a `RemoteError`.
    """

    agreed = False  # Whether all ranks of a group raise this error, each where it awaits the operation

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: _make_picklable(value) for name, value in self.__dict__.items()}
        return _rebuild_error, (
            type(self),
            self.args,
            fields,
            _make_picklable(self.__cause__),
            self.__suppress_context__,
        )


def mark_agreed(error: OverlapError) -> OverlapError:
    """Set `error.agreed`, so that no rank ends before the other ranks of the group have the error; return the error."""
    error.agreed = True
    return error


def _rebuild_error(
    kind: type[OverlapError],
    args: tuple[object, ...],
    fields: dict[str, object],
    cause: BaseException | None,
    suppress_context: bool,
) -> OverlapError:
    """Make an error from the parts that `OverlapError.__reduce__` returns."""
    error: OverlapError = kind.__new__(kind, *args)
    # Not `kind.__init__`, which would build the message from facts: `args` has the finished message.
    Exception.__init__(error, *args)
    error.__dict__.update(fields)
    error.__cause__, error.__suppress_context__ = cause, suppress_context
    return error


def _make_picklable(value: Any) -> Any:
    """Return a value that can be pickled: an error that cannot becomes a `RemoteError`, also inside a dict."""
    if isinstance(value, dict):
        return {key: _make_picklable(item) for key, item in value.items()}
    if not isinstance(value, BaseException) or isinstance(value, OverlapError):
        return value
    try:
        pickle.loads(pickle.dumps(value))  # some errors can be pickled, but not read back
    except Exception:
        return RemoteError(type(value).__name__, error_text(value))
    return value


class UsageError(OverlapError):
    """Invalid arguments of the caller; nothing has been started."""


class TraceWarning(UserWarning):
    """The timeline of a run could not be written. The results or the error of the run are as without a timeline."""


class CollectiveMismatchError(OverlapError):
    """Two ranks of a group disagree about the same operation.

    Attributes:
        ranks: The two world ranks named in the message; reports take the first one as the culprit.
        calls: Text of the call of each of the two ranks.
        call_sites: `file:line` of each of the two calls.
        group: Name of the group.
        seq: Position of the operation on its stream.
    """

    def __init__(
        self,
        *,
        group: str,
        seq: int,
        ranks: tuple[int, int],
        calls: tuple[str, str],
        call_sites: tuple[str, str],
    ) -> None:
        self.group = group
        self.seq = seq
        self.ranks = ranks
        self.calls = calls
        self.call_sites = call_sites
        sides = [f"rank {r} called {c} at {s}" for r, c, s in zip(ranks, calls, call_sites, strict=True)]
        advice = "every rank of a group must issue the same operations in the same order"
        if all(call.startswith("send/recv(") for call in calls):
            advice = "a message is received with the shape and dtype with which it was sent"
        super().__init__(f"operation #{seq} on group '{group}' differs between ranks: {sides[0]}, {sides[1]}; {advice}")


class NonFiniteError(OverlapError):
    """A rank was about to send a NaN or an infinity, or has sent it; `run(check="nan")` checks all sent data before.

    Args:
        array: Name of the array with the element, for the message.
        sent: Whether the element was found in the mean of a gradient, which all ranks have received.

    Attributes:
        rank: World rank of the first sender of a NaN or an infinity.
        operation: The operation, such as "all_reduce #3 on group 'world'".
        seq: Position of the operation on its stream.
        step: The `rank.step` in which the operation was issued; None outside a step.
        call_site: `file:line` of the call.
        index: Index of the first NaN or infinity in the array; () if there is no index.
        value: This element, as text.
        count: Number of such elements in the array.
    """

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
        sent: bool = False,
    ) -> None:
        self.rank = rank
        self.operation = operation
        self.seq = seq
        self.step = step
        self.call_site = call_site
        self.index = index
        self.value = value
        self.count = count
        when = "" if step is None else f" in step {step}"
        element = f"element {list(index)} of {array}" if index else f"the value of {array}"
        more = f", the first of {count} that are not finite," if count > 1 else ""
        act, received = "was about to send", "no rank has received it"
        if sent:
            act, received = "sent", "all ranks have received the mean with it"
        super().__init__(
            f"rank {rank} {act} {value} by {operation} at {call_site}{when}: {element}{more} is {value}; "
            f"{received}: look for its cause in the computes of this rank"
        )


class ReplicaError(OverlapError):
    """Ranks that should have equal weights have different ones.

    Args:
        of: Number of ranks that were compared.

    Attributes:
        ranks: World ranks with other weights than most ranks.
        parameter: Name of the first parameter that differs.
        step: Number of the step after which the weights were compared, from 1.
    """

    def __init__(self, *, ranks: Sequence[int], of: int, parameter: str, step: int) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.parameter = parameter
        self.step = step
        odd_ranks = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        caveat = "; with two halves, either may be right" if 2 * len(ranks) >= of else ""
        super().__init__(
            f"after step {step} {odd_ranks} of {of} {'has' if len(ranks) == 1 else 'have'} other weights than the rest"
            f", first in {parameter!r}{caveat}: the program wrote to them there, or memory or a processor failed"
        )


class PeerError(OverlapError):
    """An operation ended because of another rank.

    Attributes:
        culprit: World rank that caused the error.
    """

    def __init__(self, message: str, *, culprit: int) -> None:
        self.culprit = culprit
        super().__init__(message)

    @classmethod
    def caused_by(cls, cause: BaseException | None, message: str, *, culprit: int) -> Self:
        """Return an error with the culprit's own error, if it has one, as its `__cause__`."""
        error = cls(message, culprit=culprit)
        error.__cause__ = cause
        return error


class PeerFailedError(PeerError):
    """Another rank raised an error. If that rank is in this process, `__cause__` is its error."""


class GroupAbortedError(PeerError):
    """A rank has aborted the group of an operation: its operations fail on all ranks; the world goes on."""


class RankLeftError(PeerError):
    """A rank finished its program while others still wait for it in an operation.

    If the operation is a receive from any rank, the culprit is the rank that waits: no message is left for it.
    """


class PeerLostError(PeerError):
    """The process of another rank has ended without leaving the world, or is silent for too long."""


class RemoteError(OverlapError):
    """The error of a rank of another process, as text: processes never send each other error objects.

    Attributes:
        type_name: Name of the error's class in that process.
        trace: The error's traceback, as text; may be empty.
        place: The line that raised the error, such as " at train.py:41"; may be empty.
    """

    def __init__(self, type_name: str, text: str, *, trace: str = "", place: str = "") -> None:
        self.type_name = type_name
        self.trace = trace
        self.place = place
        super().__init__(text)


def one_line_text(error: BaseException) -> str:
    r"""Return "Type: text" of an error, with the first line of its text that is not empty; " ..." if there are more.

    For a `RemoteError`, "Type" is the class of the original error.

    >>> one_line_text(ValueError("no")), one_line_text(RemoteError("ValueError", "no\n\nbecause\n"))
    ('ValueError: no', 'ValueError: no ...')
    >>> one_line_text(ExceptionGroup("in a nursery", [ValueError("no"), KeyError("x")]))
    'ValueError: no, and 1 more'
    """
    if isinstance(error, BaseExceptionGroup):
        more = len(error.exceptions) - 1
        return one_line_text(error.exceptions[0]) + f", and {more} more" * (more > 0)
    name = type_name(error)
    first, _, rest = error_text(error).strip().partition("\n")
    text = f"{escape_control_characters(shorten_line(first.rstrip(), _LONGEST_LINE))}{' ...' if rest else ''}"
    return f"{name}: {text}" if text else name


def shorten_line(line: str, limit: int) -> str:
    """Return a line of at most `limit` characters as it is; cut a longer line in the middle.

    A cut line has its first and last characters, `limit` in all, and between them the number of characters left out.

    >>> shorten_line("abcdefgh", 4), shorten_line("abcd", 4)
    ('ab ... 4 characters left out ... gh', 'abcd')
    >>> shorten_line("abcdefgh", 3)
    'ab ... 5 characters left out ... h'
    """
    left_out = len(line) - limit
    if left_out <= 0:
        return line
    tail = limit // 2  # if the limit is odd, the beginning has one more character than the end
    return f"{line[: limit - tail]} ... {left_out} characters left out ... {line[len(line) - tail :]}"


def type_name(error: BaseException) -> str:
    """Return the name of an error's class; for a `RemoteError`, of the original error's class."""
    return error.type_name if isinstance(error, RemoteError) else type(error).__name__


def first_error_of_group(error: BaseException) -> BaseException:
    """Return an error itself, or the first error of a group, through nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def error_text(error: BaseException) -> str:
    """Return `str(error)`, or a note if the error's own `__str__` raises."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def escape_control_characters(line: str) -> str:
    r"""Return a line with control characters escaped, so that they have no effect in a terminal.

    >>> escape_control_characters("red \x1b[31m\0")
    'red \\x1b[31m\\x00'
    """
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def argument_text(value: object) -> str:
    """Return a description of an argument in one line: arrays by type and shape, long values by their beginning.

    >>> argument_text("median"), argument_text([0] * 99)
    ("'median'", '[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0...')
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of {getattr(value, 'dtype', 'unknown dtype')} {tuple(shape)}"
    try:
        text = repr(value)
    except Exception:  # the `repr` of a foreign class fails: describe the argument by its type
        return f"<{type(value).__name__}>"
    line = escape_control_characters(" ".join(text.split()) if "\n" in text else text)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


class RankFailedError(OverlapError):
    """A rank failed, and ended the world; raised by `overlap.run`.

    `__cause__` is the error of the rank, with its traceback.

    Args:
        where: Text after "rank 3 failed", such as the process or the line of the rank; "" for nothing.
        world_size: Number of ranks of the world.
        finished: Number of ranks that had finished their program.

    Attributes:
        rank: World rank of the first culprit.
        cause: Error of this rank.
        doing: Operations that this rank had not finished, oldest first, as text.
        others: By world rank: errors of other ranks that were not consequences of the first error.
    """

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
        self.rank = rank
        self.cause = cause
        self.doing: tuple[str, ...] = tuple(doing)
        self.others: dict[int, BaseException] = dict(others)
        busy = f"; unfinished there: {', '.join(self.doing)}" if self.doing else ""
        other_failures = f"; also failed: {named_ranks(sorted(self.others))}" if self.others else ""
        ended = world_size - 1 - len(self.others) - finished
        stopped = f"; the other {ended} ranks were stopped" if ended > 1 else ""
        subject = f"rank {rank} failed{where}"
        kinds = (type_name(cause), type_name(first_error_of_group(cause)))
        if CollectiveMismatchError.__name__ in kinds:
            subject, busy = "ranks disagree", ""  # the error names both ranks; `rank` has only noticed it
        elif RankLeftError.__name__ in kinds and f"rank {rank} finished" in one_line_text(cause):
            subject = f"rank {rank} left too early"  # without `where`, which is the place of the rank that waits
        super().__init__(f"{subject}: {one_line_text(cause)}{busy}{other_failures}{stopped}")


class StallError(OverlapError):
    """The world has not ended within `timeout_s`, has made no progress for too long, or can make none any more.

    Args:
        reason: Reason for the end as text after "the world"; "": `timeout_s` is over.

    Attributes:
        timeout_s: The time limit of the run, in seconds, if it is the reason; else None.
        report: One line for each rank: the operation in which it waits, its place, and the ranks that it waits for.
        sentence: Which rank waits for which, in one sentence; may be empty.
    """

    def __init__(self, timeout_s: float | None, report: Sequence[str], *, reason: str = "", sentence: str = "") -> None:
        self.timeout_s = timeout_s
        self.report: tuple[str, ...] = tuple(report)
        self.sentence = sentence
        end = reason or f"did not finish within timeout_s={timeout_s:g}"
        advice = "" if timeout_s is None else "; raise timeout_s if the program is only slow"
        super().__init__("\n  ".join([f"the world {end}{': ' if sentence else ''}{sentence}{advice}", *self.report]))


class DeadlineError(OverlapError, TimeoutError):
    """An operation has not ended within its `timeout_s`.

    Args:
        state: State of the operation at the timeout, as text after "it"; "": unknown.

    Attributes:
        operation: The operation, such as "all_reduce #3 on group 'world'".
        call_site: `file:line` of the call.
        timeout_s: The time limit of the operation, in seconds.
    """

    def __init__(self, operation: str, call_site: str, *, timeout_s: float, state: str = "") -> None:
        self.operation = operation
        self.call_site = call_site
        self.timeout_s = timeout_s
        so_far = f": it {state}" if state else ""
        super().__init__(f"{operation} ({call_site}) has not ended within timeout_s={timeout_s:g}{so_far}")


class FutureCancelledError(OverlapError, CancelledError):
    """An operation was cancelled by `Future.cancel`, or its input is the result of a cancelled operation.

    It is raised where the operation is awaited.
    """


class ScheduleError(OverlapError):
    """A schedule failed its proof.

    Args:
        message: Text of the error.

    Attributes:
        rank: Rank on which a row or a result is wrong; None if the fault has no single place.
        slot: Slot that is wrong on this rank; None like `rank`.
        step: Step of the table at fault; None if it is unknown.
        contributor: Rank whose contribution is missing, or counted more than once; None if there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        slot: int | None = None,
        step: int | None = None,
        contributor: int | None = None,
    ) -> None:
        self.rank = rank
        self.slot = slot
        self.step = step
        self.contributor = contributor
        super().__init__(message)

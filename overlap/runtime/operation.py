"""A collective as one rank sees it: from the call, through a window and a meeting, to its end.

`CollectiveFuture` is the handle that users await and the state machine that streams and meetings drive::

    issued --(room in the stream's window)--> active --(input is there)--> ready --(meeting)--> done or failed
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from types import CodeType
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import numpy as np
import trio

from ..collectives.call import Call, Pairs, call
from ..collectives.kinds import Collective, Shape
from ..collectives.reduce import OPS, Array, check_dtype
from ..errors import UsageError
from ..timeline.spans import RawMeeting, call_site
from .future import Failure, Future, resolve
from .memory.foreign import as_input, as_output, changes

if TYPE_CHECKING:
    from .communicator import Port
    from .group import Group

T_co = TypeVar("T_co", covariant=True)

__all__ = ["CollectiveFuture", "Like", "receive_like"]

Like: TypeAlias = "tuple[tuple[int, ...], np.dtype[np.generic] | type[np.generic] | str]"


class CollectiveFuture(Future[T_co]):
    """The handle of an issued collective or point-to-point operation.

    `await` it for the result. Until it is done, the input array is read-only and belongs to the operation, and so does
    `out`; the result belongs to the caller.

    Attributes:
        group: The group it was issued on.
        seq: Its position among the group's operations on its stream.
        priority: Lower is more urgent.
        name: As given by the caller, or the operation's name.
    """

    __slots__ = (
        "_asked", "_code", "_input_lent", "_instruction", "active", "algorithm", "call", "changed", "doom", "given",
        "group", "input", "issued_ns", "kind", "lent", "name", "out", "port", "priority", "running", "scope", "seq",
        "source", "started_ns", "target",
    )  # fmt: skip

    def __init__(
        self,
        kind: Collective,
        group: Group,
        port: Port,
        x: object,
        out: Array | None,
        asked: tuple[str | None, int, Pairs] = (None, 0, ()),
    ) -> None:
        # The base class's part is written out: this is on the path of every collective, as is the choice of slots.
        self._done = False
        self._value = self._failure = self._waiters = self._callbacks = self._threads = None
        self.kind, self.group, self.port = kind, group, port
        self.input = x  # what the caller passed: an array, a future of one, or None
        self.out = out  # the array the result is written to
        self.given: object = None  # whose memory that is, if it is no array; this is what the caller will get
        self.changed: Callable[[], bool] | None = None  # whether the input was, if it is something that can tell
        self._asked = asked  # op, root, pairs
        self.call: Call  # what all ranks must agree on; known once the input is there
        self.source: Array | None = None  # the array the operation reads
        self.target: Array | None = None  # a view of `out` that stays writable
        self.lent: tuple[Array, ...] = ()  # what is to be given back
        self._input_lent = False
        self.name: str
        self.seq: int
        self.priority: int
        self._code: CodeType
        self._instruction: int
        self.issued_ns: int
        self.started_ns: int
        self.active = False  # in its stream's window
        self.running = False  # its bytes are moving
        self.scope: trio.CancelScope | None = None  # of the task that runs its program, if it has one
        self.doom: Failure | None = None  # what it ends with once its bytes have stopped
        self.algorithm = "direct"

    @property
    def urgency(self) -> int:
        """How its messages are ordered on a wire: by priority, then by age."""
        return (self.priority << 64) + self.issued_ns

    @property
    def op(self) -> str:
        """Name of the operation, such as "all_reduce"."""
        return str(self.kind.value)

    @property
    def call_site(self) -> str:
        """Where it was issued, as "file:line"."""
        return call_site(*self.place)

    @property
    def place(self) -> tuple[CodeType, int]:
        """Where it was issued: finding the line takes longer."""
        return self._code, self._instruction

    def _label(self) -> str:
        return f"{self.name} #{self.seq}{self.port.towards} on group '{self.group.name}'"

    # -- the caller's arguments --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Check the arguments and find the array to read; fills in `call` and `source`.

        Raises:
            UsageError: For whatever cannot be meant.
        """
        x = self.input
        op, root, pairs = self._asked
        kind = self.kind
        if x is None:
            if kind is Collective.P2P:
                out = cast(Array, self.out)
                self.call = call(kind._value_, None, out.dtype, out.shape, 2)
                return
            if not (kind.traits.rooted or kind is Collective.BARRIER):
                raise UsageError(f"x: {self.op} needs an array, got None")
            self.call = call(kind._value_, None, None, None, self.port.channel.size, root, pairs)
        else:
            if type(x) is not np.ndarray:
                self.changed = changes(x)
                x = as_input(x)
            try:
                self.call = call(kind._value_, op, x.dtype, x.shape, self.port.channel.size, root, pairs)
            except TypeError as error:  # not hashable
                raise UsageError(f"op: {op!r} is unknown; known are {', '.join(OPS)}") from error
            clock = self.group._world.clock
            self.source = x if x.flags.c_contiguous or clock.shapes_only else clock.buffers.copy(x)
        if self.out is not None and not (self.out is x and kind in _ELEMENTWISE):
            self.check_result(self.call)
            if x is not None and np.may_share_memory(self.out, x) and not self._in_place(self.out, x):
                raise UsageError(f"out: overlaps x, which {self.op} still reads; pass x itself or an array of its own")

    def check_result(self, pattern: Call) -> None:
        """Compare `out` with the result that `pattern` makes, if it says what that is.

        Raises:
            UsageError: Naming both.
        """
        out = self.out
        if out is None or pattern.dtype is None:
            return
        if out.shape != pattern.result_shape or out.dtype != pattern.dtype:
            raise UsageError(f"out: expected {pattern.dtype} {pattern.result_shape}, got {out.dtype} {out.shape}")

    def _in_place(self, out: Array, x: Array) -> bool:
        """Whether `x` lies in `out` just where the operation writes only after it has read."""
        traits = self.kind.traits
        if not x.flags.c_contiguous or traits.scatters or self.kind is Collective.PERMUTE:
            return x.nbytes == 0
        offset = x.__array_interface__["data"][0] - out.__array_interface__["data"][0]
        return bool(offset == (self.group.rank * x.nbytes if traits.gathers else 0))

    # -- life --------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """There is room in the window: go on as soon as the input exists."""
        self.active = True
        if isinstance(self.input, Future):
            self.lend()
            self.input._on_done(self._input_settled_soon)
        else:
            self.port.channel.arrive(self)

    def activate_late(self) -> None:
        """Activate an operation that had to wait for room."""
        self.started_ns = self.group._now_ns()
        self.activate()

    def _input_settled_soon(self) -> None:
        self.port.stream.rank._world.soon(self._input_settled)

    def _input_settled(self) -> None:
        if self._done:  # the world failed in the meantime
            return
        self.input, failure = resolve(self.input)
        if failure is None:
            try:
                self.prepare()
            except UsageError as error:
                failure = Failure(error)
        if failure is not None:
            self.port.channel.withdraw(self, failure)
            return
        self.started_ns = self.group._now_ns()
        self.port.channel.arrive(self)

    def lend(self) -> None:
        """Make the arrays of this operation read-only for everybody else until it ends; again once more are known."""
        if self.group._world.clock.shapes_only:  # there is nothing to spoil
            return
        x, out = self.input, self.out
        if out is not None and self.target is None:
            self.target = out.view()
            self._lend(out)
        if x is not out and not self._input_lent and isinstance(x, np.ndarray):
            self._input_lent = True
            self._lend(x)

    def _lend(self, array: Array) -> None:
        if self.group._world.locks.lock(array):
            self.lent = (*self.lent, array)

    def fit(self, pattern: Call) -> None:
        """Make the result's array, unless there is one; `pattern` says dtype and shape."""
        if self.out is None and self._receives() and pattern.dtype is not None:
            self.out = self.group._world.clock.empty(pattern.result_shape, pattern.dtype)
        if self.target is None:
            self.target = self.out
        if self.group._world.clock.shapes_only:
            return
        if self.kind is Collective.PERMUTE and self.port.position not in {dst for _, dst in pattern.pairs}:
            cast(Array, self.target)[...] = 0

    def _receives(self) -> bool:
        """Whether this rank gets a result."""
        kind, position = self.kind, self.port.position
        if kind in (Collective.REDUCE, Collective.GATHER):
            return self.call.root == position
        return kind is not Collective.BARRIER and (kind is not Collective.P2P or position == 1)

    def describe(self, pattern: Call, met_ns: int) -> RawMeeting:
        """Return what the timeline keeps of this operation for all of its ranks."""
        return (
            pattern.kind._value_, self.algorithm, self.group.label, self.seq, pattern.nbytes, pattern.dtype, met_ns
        )  # fmt: skip

    def finish(self, end_ns: int, meeting: RawMeeting) -> None:
        """Record the span, hand over the result and let the stream go on; the loop's thread only."""
        if not self._done:
            stream = self.port.stream
            info = (meeting, self.issued_ns, self.priority, self._code, self._instruction)
            stream.rank.record(("comm", stream.name, self.name, self.started_ns, end_ns, info))
            if self.changed is not None and self.changed():
                message = f"x: was changed while {self._label()} ({self.call_site}) was reading it; await that first"
                self.fail(Failure(UsageError(message)))
                return
            self._value = self.out if self.given is None else self.given
            self.release()  # first: who is told may want the same arrays at once
            self._conclude()

    def fail(self, failure: Failure) -> None:
        """End badly: the error goes to whoever awaits, and fails the rank if nobody does.

        Bytes that are moving are stopped first, or waited for.
        """
        if self._done:
            return
        if self.running:
            self.doom = self.doom or failure
            self._stop()
        else:
            self._failure = failure
            self.release()
            self._conclude()

    def abandon(self, error: BaseException) -> None:
        """Fail it because the world has: tell who awaits before they are cancelled; the arrays come back later."""
        self.port.channel.forget(self.seq)
        if not self._done:
            self._failure = Failure(error, seen=True)
            self._conclude()
        self._stop()
        if not self.running:
            self.release()

    def stopped(self) -> None:
        """Take note that its bytes have stopped moving."""
        self.running, self.scope = False, None
        if self.doom is not None:
            self.fail(self.doom)
        if self._done:
            self.release()

    def _stop(self) -> None:
        if self.scope is not None:
            self.scope.cancel()

    def release(self) -> None:
        """Give the arrays back: nothing moves any more."""
        if self.lent:
            for array in self.lent:
                self.group._world.locks.unlock(array)
            self.lent = ()
        self.input = self.source = self.target = self.out = self.given = self.changed = None

    def _conclude(self) -> None:
        self._done = True
        if self._threads is not None:
            self._wake_threads()
        self.port.stream.finished(self)
        if self._waiters is not None or self._callbacks is not None:
            self._tell()


_ELEMENTWISE = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST)


def receive_like(like: object, empty: Callable[[Shape, np.dtype[np.generic]], Array]) -> object:
    """Return what a receive fills: the one given, or a new array of (shape, dtype)."""
    if isinstance(like, tuple):
        try:
            shape, dtype = like
            like = empty(tuple(map(index, (shape,) if isinstance(shape, int) else shape)), np.dtype(dtype))
        except (TypeError, ValueError) as error:
            raise UsageError(f"like: expected an array or (shape, dtype), got {like!r}: {error}") from error
    check_dtype((like if isinstance(like, np.ndarray) else as_output(like, "like")).dtype, "like")
    return like

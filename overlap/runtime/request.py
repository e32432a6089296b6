"""What a caller has asked of a collective: its arguments, checked, and the memory behind them while it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from ..collectives.call import Call, Pairs, call, uneven_call
from ..collectives.counts import Counts, normal
from ..collectives.kinds import ALL_REDUCE, BARRIER, BROADCAST, P2P, REDUCE, SCATTER, Collective
from ..collectives.reduce import OPS, Array
from ..errors import UsageError, shown
from .arguments import check_overlap, check_result, check_unwritten
from .context import RankContext
from .future import Future
from .memory.foreign import as_input, as_output, changes
from .outstanding import Issued

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

T_co = TypeVar("T_co", covariant=True)

Input: TypeAlias = "ArrayLike | Future[Array] | Future[object] | Mapping[str, object] | Sequence[object]"
Like: TypeAlias = "tuple[tuple[int, ...], np.dtype[np.generic] | type[np.generic] | str]"


class Members(Protocol):
    """The group of an operation, as operations see it."""

    name: str  # For messages
    label: tuple[str, tuple[int, ...]]  # For the timeline
    rank: int  # The index of this rank in it
    size: int  # How many ranks it has


class Request(Issued[T_co]):
    """The arguments of a collective or point-to-point operation; `CollectiveFuture` makes and fills it.

    Attributes:
        kind: Which collective.
        group: The group it was issued on.
        priority: Lower is more urgent.
        name: As given by the caller, or the operation's name.
        call: What all ranks must agree on; known once the input is there.
    """

    __slots__ = (
        "_input_locked", "call", "changed", "context", "counts", "exact", "given", "group", "input", "insisted", "kind",
        "locked", "out", "pairs", "priority", "reduction", "root", "shared", "source", "target",
    )  # fmt: skip

    context: RankContext
    kind: Collective
    group: Members
    call: Call
    reduction: str | None
    root: int
    pairs: Pairs
    exact: bool
    shared: bool
    insisted: str | None  # the algorithm that is asked for
    counts: object  # of rows; once it is issued, as `check_counts` returns them, or None
    input: object  # what the caller passed: an array, a future of one, or None
    out: Array | None  # what the caller will get; once it is issued, the array that the result is written to
    given: object  # whose memory that is, if it is no array; this is what the caller will get
    changed: Callable[[], bool] | None  # whether the input was, if it is something that can tell
    priority: int
    source: Array | None  # the array the operation reads
    target: Array | None  # a view of `out` that stays writable
    locked: tuple[Array, ...]  # what is to be given back
    _input_locked: bool

    @property
    def op(self) -> str:
        """Name of the operation, such as "all_reduce"."""
        return str(self.kind.value)

    def prepare(self) -> None:
        """Check the arguments and find the array to read; fills in `call` and `source`.

        Raises:
            UsageError: For whatever cannot be meant.
        """
        x, kind, out = self.input, self.kind, self.out
        if x is None:
            self._prepare_receiver()
            return
        if type(x) is not np.ndarray:
            self.changed = changes(x)
            x = as_input(x)
        self.call = asked = self._asked(x)
        self.source = x if x.flags.carray else self._readable(x)
        if out is not None and (out is not x or kind not in _ELEMENTWISE):
            if out.shape != asked.result_shape or out.dtype is not asked.dtype or asked.counts:
                check_result(out, asked, self.group.rank)
            check_overlap(asked, self.group.rank, out, x)

    def _asked(self, x: Array) -> Call:
        """Return what is asked for, given an array."""
        kind, shape, size = self.kind, x.shape, self.group.size
        if kind is P2P:
            return call(kind.text, None, x.dtype, shape, 2)
        counts: Counts = ()
        if self.counts is not None:
            shape, counts = normal(kind, shape, cast(Counts, self.counts), size, self.group.rank)
        try:
            return (uneven_call if counts else call)(
                kind.text, self.reduction, x.dtype, shape, size, self.root, self.pairs, counts, self.exact, self.shared,
                self.insisted,
            )  # fmt: skip
        except TypeError as error:  # not hashable
            raise UsageError(f"op: {shown(self.reduction)} is unknown; known are {', '.join(OPS)}") from error

    def _readable(self, x: Array) -> Array:
        """Return what is to be read of an array that is read-only or not contiguous.

        Raises:
            UsageError: If an operation that has not ended still writes it.
        """
        if not x.flags.writeable and x is not self.out:
            check_unwritten(self.context.locks, (x,), "x")
        arrays = self.context.arrays
        return x if x.flags.c_contiguous or arrays.shapes_only else arrays.copy(x)

    def _prepare_receiver(self) -> None:
        kind = self.kind
        if kind is P2P:
            out = cast(Array, self.out)
            self.call = call(kind.text, None, out.dtype, out.shape, 2)
        elif kind.traits.rooted or kind is BARRIER:
            self.call = call(
                kind.text,
                None,
                None,
                None,
                self.group.size,
                self.root,
                self.pairs,
                (),
                self.exact,
                self.shared,
                self.insisted,
            )
        else:
            raise UsageError(f"x: {self.op} needs an array, got None")

    def call_by_out(self) -> Call | None:
        """Return what a rank of a broadcast or a scatter that only receives has called, if `out` is right."""
        out = self.out
        if not isinstance(out, np.ndarray) or out.ndim == 0:
            return None
        shape, size, asked = out.shape, self.group.size, self.call
        shape = (shape[0] * size, *shape[1:]) if self.kind is SCATTER else shape
        return call(
            asked.kind.text, None, out.dtype, shape, size, asked.root, asked.pairs, (), asked.exact, asked.shared,
            asked.algorithm,
        )  # fmt: skip

    def take_output(self) -> None:
        """Find the array that the result is written to.

        Raises:
            UsageError: If there is none in what the caller passed.
        """
        out = self.out
        if isinstance(out, np.ndarray) and self.context.arrays.shapes_only:
            return  # there is nothing to write
        target = as_output(out, "out" if self.kind is not P2P else "like")
        if target is not out:
            self.given, self.out = out, target
            if self.input is out:
                self.input, self.changed = target, changes(out)

    def check_result(self, pattern: Call) -> None:
        """Compare `out` with the result that `pattern` makes, if it says what that is.

        Raises:
            UsageError: Naming both.
        """
        check_result(self.out, pattern, self.group.rank)

    # -- memory --

    def lock(self) -> None:
        """Make the arrays of this operation read-only for everybody else until it ends; again once more are known."""
        context, x, out = self.context, self.input, self.out
        if context.arrays.shapes_only:  # there is nothing to spoil
            return
        arrays: tuple[Array, ...] = ()
        if out is not None and self.target is None:
            self.target, arrays = out.view(), (out,)
        if x is not out and not self._input_locked and isinstance(x, np.ndarray):
            self._input_locked, arrays = True, (x, out) if arrays else (x,)  # type: ignore[assignment]
        if arrays:
            self.locked += context.locks.lock(arrays, out)

    def release(self) -> None:
        """Give the arrays back: nothing moves any more."""
        if self.locked:
            self.context.locks.unlock(self.locked)
            self.locked = ()
        self.input = self.source = self.target = self.out = self.given = self.changed = None


_ELEMENTWISE = (ALL_REDUCE, REDUCE, BROADCAST)

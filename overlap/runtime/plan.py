"""Plans: how one rank carries out its operations with one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transports.failures import REPORT_BUG

from ..collectives.call import Call
from .handover import OperationRun
from .match import Match
from .operation import Operation
from .signature import CallSignature, CodePlace, signature_of

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Run


class CallPlan(ABC):
    """Carries out the operations of one rank that have the same call, the first one and later ones.

    `start` begins an operation and sets its `scope`, which can stop it (`start_moving`); `Communicator.settle` ends it.
    Making a plan is quick and starts nothing: compiling, for instance, waits for the first start. `str(plan)` names it.

    Attributes:
        call: The call that all ranks agree on; it has all its values.
        lasts: Whether the plan also serves later operations with this call, so that it is kept.
        runs_all_ranks: Whether one `start` runs the operations of all ranks, which have arrived in this process.
        signature: Signature of the last operation.
        place: Line of the last operation; None before.
        takes_memory: Whether an operation may have addresses in place of arrays; see `CollectiveFuture.memory`.
        gives_only: Whether the rank reads no input of other ranks. Such a rank meets no call of another one, so that
            its operations are kept in `noted`.
        noted: Operations in which the rank read no input, until the calls of the other ranks are compared.
        submit: Submits an operation to the engine from any thread; None as long as that needs the loop, or without an
            engine.
        tag_base: Transport tag of the operations, without their numbers.
        engine: The engine of `submit`.
        spare: An `OperationRun` that serves the next operation of a thread that waits, again and again; None while it
            is in use.
    """

    lasts: bool = True
    runs_all_ranks = False
    signature: CallSignature
    place: CodePlace | None = None
    takes_memory: bool = False
    gives_only: bool = False
    noted: Sequence[object] = ()
    submit: Callable[..., Run | None] | None = None
    tag_base: int = 0
    engine: Engine
    spare: OperationRun | None = None

    def __init__(self, call: Call) -> None:
        self.call: Call = call

    def signature_at(self, place: CodePlace) -> CallSignature:
        """Return the signature of the plan's call at a line; it is kept, as most operations have the line before."""
        if self.place != place:
            self.signature, self.place = signature_of(self.call, place), place
        return self.signature

    def make_spare_run(self, operation: Operation) -> OperationRun:
        """Return a new value of `spare`, which serves `operation` first. Plans with `submit` override this."""
        raise AssertionError(f"{type(self).__name__} of {operation} does not override make_spare_run: {REPORT_BUG}")

    def record_end(self, operation: Operation) -> None:  # noqa: B027 - a plan may note nothing
        """Update `noted` at the end of an operation; called if `gives_only`, or if any operation is noted."""

    @abstractmethod
    def start(self, match: Match, operation: Operation) -> None:
        """Start an operation of this rank; the plan ends it at once or later.

        Args:
            match: The match of the operation.
            operation: The operation of this rank. With `runs_all_ranks`, that of the last arrival.

        Raises:
            Unfit: The operation of another rank cannot take part.
            Exception: This operation cannot run: no memory, no wire that joins the ranks, no schedule that fits.
        """

    def try_to_finish(self, operation: Operation) -> bool:
        """Carry out an operation at once, without a match, if it need not wait for another rank. Return whether it did.

        After False, `start` must follow: the operation may have begun, and `start` goes on with it.
        """
        return False

    def runs_in_any_thread(self) -> bool:
        """Whether an operation may be started, and may end, in any thread, because that starts and wakes no task."""
        return False

    @abstractmethod
    def __str__(self) -> str:
        """Name the plan in a few words."""

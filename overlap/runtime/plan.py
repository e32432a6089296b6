"""Plans: how one rank carries out its operations with one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..collectives.call import Call
from .handover import OperationRun
from .match import Match
from .operation import Operation
from .signature import CallSignature, CodePlace, signature_of

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Run


class CallPlan(ABC):
    """Carries out one rank's operations with one call; made once, by the first of them. Its text names it.

    An end under way is the operation's `scope` (see `start_moving`); `Communicator.settle` ends it. Making a plan is
    quick and starts nothing: compiling, for instance, waits for the first start.

    Attributes:
        call: The call that all ranks agree on; it has all its values.
        lasts: Whether the plan also serves later operations with this call, so that it is kept.
        together: Whether one start runs the ends of all ranks, which are in this process and have arrived.
        signature: CallSignature of the last operation.
        place: Line of the last operation; None before.
        takes_memory: Whether an operation may have addresses in place of arrays; see `CollectiveFuture.memory`.
        gives_only: Whether the rank reads no input of others, so that its ends are noted.
        noted: Operations in which the rank only gave, until the others' calls are compared.
        submit: Submits an end to the engine, once that needs no event loop; None before, and without an engine.
        tag_base: Tag of its operations, without their numbers.
        engine: Engine of `submit`, which waits for its ends.
        spare: An end for the next operation of a thread that waits; it is used again and again.
    """

    lasts: bool = True
    together = False
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

    def sign(self, place: CodePlace) -> CallSignature:
        """Return the signature of an operation at a line; most are issued at the line of the one before."""
        if self.place != place:
            self.signature, self.place = signature_of(self.call, place), place
        return self.signature

    def make_spare(self, operation: Operation) -> OperationRun:
        """Return an end that serves one operation after the other; `operation` is the first."""
        raise AssertionError("this is a bug in overlap: a plan submits ends that it cannot make")

    def record_end(self, operation: Operation) -> None:  # noqa: B027 - a plan may note nothing
        """Note the end of an operation of a rank that only gives, or that has `noted` such operations."""

    @abstractmethod
    def start(self, match: Match, operation: Operation) -> None:
        """Start the end of a rank; if it runs all ends `together`, the end of the rank that arrived last.

        Raises:
            Unfit: Another end cannot take part.
            Exception: This end cannot run: no memory, no wire that joins the ranks, no schedule that fits.
        """

    def finish_now(self, operation: Operation) -> bool:
        """Finish the end of a rank at once, without a match, if it needs no other rank; False if it must be started."""
        return False

    def takes_threads(self) -> bool:
        """Whether an end starts, and may end, without a task that is started or woken, so that a thread may run it."""
        return False

    @abstractmethod
    def __str__(self) -> str:
        """Name the plan in a few words."""

"""Plans: how one rank carries out its operations with one call."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..collectives.call import Call
from .match import Match
from .operation import Operation
from .signature import CallSignature, CodePlace, signature_of


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
    """

    lasts: bool = True
    together = False
    signature: CallSignature
    place: CodePlace | None = None
    takes_memory: bool = False

    def __init__(self, call: Call) -> None:
        self.call: Call = call

    def sign(self, operation: Operation) -> CallSignature:
        """Return the signature of an operation; most are issued at the line of the one before."""
        if self.place != operation.place:
            self.signature, self.place = signature_of(self.call, operation.place), operation.place
        return self.signature

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

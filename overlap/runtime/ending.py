"""End of a world as a state machine: the phases, the verdict, and the errors that follow from it.

It waits for nothing and reads no clock: `World` makes the transitions, and acts on them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from ..diagnostics import error_place, unwrap_single_error
from ..errors import PeerError, PeerFailedError, RankFailedError, RankLeftError, StallError, one_line_text

_FORKED = (
    "this process is a fork of the one that has this rank, and is no rank itself: use none in it, or let it join a "
    "world of its own by overlap.connect"
)


class WorldPhase(Enum):
    """Phase of a world; the last one is the verdict."""

    RUNS = "runs"
    STOPPED = "stopped"  # for a reason that is no rank's error; programs may clean up
    INTERRUPTED = "interrupted"  # by a Ctrl-C, or by the cancellation of the caller
    FAILED = "failed"  # because of a culprit
    OVER = "over"  # all ranks here have ended by themselves
    FORKED = "forked"  # this process is a fork; the world goes on in its parent


# The phase after each transition, by the phase before; without an entry, the transition does nothing.
_NEXT = {
    "stop": {WorldPhase.RUNS: WorldPhase.STOPPED, WorldPhase.INTERRUPTED: WorldPhase.STOPPED},
    "withdraw_stop": {WorldPhase.STOPPED: WorldPhase.RUNS},
    "interrupt": {WorldPhase.RUNS: WorldPhase.INTERRUPTED, WorldPhase.STOPPED: WorldPhase.STOPPED},
    "fail": dict.fromkeys([WorldPhase.RUNS, WorldPhase.STOPPED, WorldPhase.INTERRUPTED], WorldPhase.FAILED),
    "finish": {WorldPhase.RUNS: WorldPhase.OVER},
    "fork": dict.fromkeys(WorldPhase, WorldPhase.FORKED),
}


class WorldEnding:
    """End of a world: its phase, and the facts of its stop, its interrupt or its failure.

    Attributes:
        phase: The present phase.
        forked: Whether the phase is FORKED; an attribute, because each compute reads it.
        failure: Culprit that ended the world, and its error; in a fork, a rank and why it cannot work; None before.
        raised_after_stop: First error that a program has raised because of a stop; None if none has.
    """

    def __init__(self) -> None:
        self.phase: WorldPhase = WorldPhase.RUNS
        self.forked: bool = False
        self.failure: tuple[int, BaseException] | None = None
        self.raised_after_stop: BaseException | None = None
        self._reason = ""  # of the stop
        self._timeout_s: float | None = None  # the time limit, if it was the reason
        self._interrupted = -1  # rank that a Ctrl-C has ended; -1: none
        self._failed_ns = -1  # instant of the failure
        self._doing: list[str] = []  # unfinished operations of the culprit, as text
        self._others: dict[int, BaseException] = {}  # errors of further ranks that were no consequences, by rank

    # -- transitions -------------------------------------------------------------------------------------------------

    def _make_transition(self, transition: str) -> bool:
        """Go to the next phase. Return False if this phase has none, so that the transition has no effect."""
        after = _NEXT[transition].get(self.phase)
        if after is not None:
            self.phase = after
        return after is not None

    @property
    def can_stop(self) -> bool:
        """Whether `stop` has an effect in this phase."""
        return self.phase in _NEXT["stop"]

    def stop(self, reason: str, timeout_s: float | None = None) -> None:
        """Stop the world for a reason that is no rank's error. A world that ends already is not stopped.

        Args:
            reason: The reason, after the words "the world".
            timeout_s: The time limit in seconds if it is the reason.
        """
        if self._make_transition("stop"):
            self._reason, self._timeout_s = reason, timeout_s

    def withdraw_stop(self) -> None:
        """Take back a stop that has ended no program."""
        self._make_transition("withdraw_stop")

    def interrupt(self, rank: int) -> None:
        """Record that a Ctrl-C or the caller has ended the world. What comes first counts.

        Args:
            rank: Rank whose program the Ctrl-C has ended; -1: it was in none.
        """
        if self._interrupted < 0 and self._make_transition("interrupt"):
            self._interrupted = rank

    def fail(self, culprit: int, cause: BaseException, doing: list[str], now_ns: int) -> bool:
        """Record the first culprit. Return False if the world has one already, or is over.

        Args:
            culprit: Rank that failed.
            cause: Its error.
            doing: Unfinished operations of the rank, as text.
            now_ns: Instant of the failure.
        """
        if not self._make_transition("fail"):
            return False
        self.failure, self._doing, self._failed_ns = (culprit, cause), doing, now_ns
        return True

    def add_failure(self, culprit: int, cause: BaseException, doing: list[str], now_ns: int) -> None:
        """Record a further failure, which the first one has not caused; a further error of the culprit is none.

        Of ranks that fail in one instant, the lowest becomes the first culprit: that happens in virtual time.
        Arguments: see `fail`.
        """
        assert self.phase is WorldPhase.FAILED, "this is a bug in overlap: a further failure without a first one"
        assert self.failure is not None
        if culprit == self.failure[0]:
            return
        if now_ns == self._failed_ns and culprit < self.failure[0]:
            first, self.failure, self._doing = self.failure, (culprit, cause), doing
            culprit, cause = first
        self._others[culprit] = cause

    def finish(self) -> None:
        """Record that all ranks here have ended. A verdict stays."""
        self._make_transition("finish")

    def fork(self, rank: int) -> None:
        """Record that this process is a fork, in which `rank` cannot work; whatever the phase was."""
        self._make_transition("fork")
        self.forked = True
        self.failure = rank, PeerFailedError(_FORKED, culprit=rank)

    # -- errors ------------------------------------------------------------------------------------------------------

    def accepts_as_consequence(self, error: BaseException) -> bool:
        """Whether an error of a rank is a consequence of a stop or of an interrupt, and so no failure.

        The first one that is the program's own is kept: it is the cause of the `StallError`.
        """
        if self.phase not in (WorldPhase.STOPPED, WorldPhase.INTERRUPTED) or not self._follows_stop(error, frozenset()):
            return False
        if self.raised_after_stop is None and not isinstance(unwrap_single_error(error), PeerError):
            self.raised_after_stop = error
        return True

    def _follows_stop(self, error: BaseException | None, visited: Collection[int]) -> bool:
        """Whether an error is that of an operation that the stop has ended, or was raised because of such an error.

        All errors of a group must be; else it has one of a program's own. `visited` has the ids of the errors that have
        led to this one, because a program may raise an error from itself.
        """
        culprits = {self._interrupted, -1 if self.phase is WorldPhase.STOPPED else self._interrupted}
        path = set(visited)
        while error is not None and id(error) not in path:
            path.add(id(error))
            if isinstance(error, BaseExceptionGroup):
                if all(self._follows_stop(member, path) for member in error.exceptions):
                    return True
            # another rank may have ended before it because of the stop
            elif isinstance(error, RankLeftError) or (isinstance(error, PeerFailedError) and error.culprit in culprits):
                return True
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return False

    def peer_error(self) -> PeerFailedError:
        """Return the error of operations that the end of the world cuts short.

        It names the culprit, or the rank that was interrupted. Otherwise it names rank -1: the world has ended without
        a failure, or was stopped.
        """
        if self.failure is None:
            rank = self._interrupted
            text = "the world has ended" if rank < 0 else f"the world has ended: rank {rank} was interrupted"
            return PeerFailedError(text, culprit=rank)
        culprit, cause = self.failure
        if self.forked:
            return PeerFailedError(_FORKED, culprit=culprit)
        return PeerFailedError.caused_by(cause, f"rank {culprit} failed: {one_line_text(cause)}", culprit=culprit)

    def rank_error(self, world_size: int, finished_ranks: Collection[int]) -> RankFailedError:
        """Return the error of a failed world.

        Args:
            world_size: Number of its ranks.
            finished_ranks: World ranks that had finished their programs, as far as that is known here.
        """
        assert self.failure is not None
        culprit, cause = self.failure
        return RankFailedError(
            rank=culprit,
            cause=cause,
            where=error_place(cause),
            doing=self._doing,
            others=self._others,
            world_size=world_size,
            finished=len({*finished_ranks} - {culprit, *self._others}),
        )

    def stall_error(self, report: Sequence[str], sentence: str) -> StallError:
        """Return the error of a stopped world; see `StallError` for the report and the sentence."""
        return StallError(self._timeout_s, report, reason=self._reason, sentence=sentence)

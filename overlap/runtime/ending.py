"""How a world ends: the first culprit, whoever failed besides, and the errors that everybody else gets."""

from __future__ import annotations

from ..diagnostics import where
from ..errors import PeerFailedError, RankFailedError, in_one_line

_FORKED = (
    "this process is a fork of the one that has this rank, and is no rank itself: use none in it, or let it join a "
    "world of its own by overlap.connect"
)


class Ending:
    """The verdict on a world.

    Attributes:
        failure: The rank that ended it and its error; None as long as none has.
        doing: What that rank had not finished, as text.
        others: Errors of further ranks that were no consequences, by rank.
        forked: Whether this process is a fork of the one in which the world goes on.
    """

    def __init__(self) -> None:
        self.failure: tuple[int, BaseException] | None = None
        self.doing: list[str] = []
        self.others: dict[int, BaseException] = {}
        self.forked = False
        self._since_ns = -1

    def begin(self, culprit: int, cause: BaseException, doing: list[str], now_ns: int) -> None:
        """Record the first culprit."""
        self.failure, self.doing, self._since_ns = (culprit, cause), doing, now_ns

    def fork(self, rank: int) -> None:
        """Take note that this process is a fork, in which nothing of the rank works."""
        self.forked = True
        self.begin(rank, PeerFailedError(_FORKED, culprit=rank), [], 0)

    def add(self, culprit: int, cause: BaseException, doing: list[str], now_ns: int | None) -> None:
        """Record what failed after the first culprit and is no consequence.

        Args:
            culprit: World rank.
            cause: Its error.
            doing: What it had not finished.
            now_ns: The instant in virtual time, where of those that fail in one instant the lowest rank is the first.
        """
        assert self.failure is not None
        if now_ns == self._since_ns and culprit < self.failure[0]:
            (culprit, cause), self.failure, self.doing = self.failure, (culprit, cause), doing
        self.others[culprit] = cause

    def peer_failed(self) -> PeerFailedError:
        """Return the error of operations that the end of the world overtakes."""
        if self.failure is None:
            return PeerFailedError("the world has ended", culprit=-1)
        culprit, cause = self.failure
        if self.forked:
            return PeerFailedError(_FORKED, culprit=culprit)
        return PeerFailedError.caused_by(cause, f"rank {culprit} failed: {in_one_line(cause)}", culprit=culprit)

    def rank_failed(self, world_size: int) -> RankFailedError:
        """Return the error of the world."""
        assert self.failure is not None
        culprit, cause = self.failure
        return RankFailedError(
            rank=culprit,
            cause=cause,
            where=where(cause),
            doing=self.doing,
            others=self.others,
            world_size=world_size,
        )

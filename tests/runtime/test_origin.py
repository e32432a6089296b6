"""The culprit of an error is found through ranks that failed because of others."""

import overlap
from overlap.diagnostics import origin


def test_the_cause_of_a_cause_is_found() -> None:
    cause = ValueError("weights")
    first = overlap.PeerFailedError.caused_by(cause, "rank 0 failed", culprit=0)
    second = overlap.PeerFailedError.caused_by(first, "rank 1 failed", culprit=1)
    assert origin(0, second) == (0, cause)
    assert origin(1, first) == (0, cause)


def test_a_rank_of_which_no_more_is_known_is_the_culprit_itself() -> None:
    lost = overlap.PeerLostError("process 2 is lost", culprit=2)
    assert origin(0, lost) == (2, lost)

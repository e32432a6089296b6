"""The end of a world as a state machine: its transitions from each phase, its verdict and its errors."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.errors import PeerError, PeerFailedError, RankLeftError
from overlap.runtime.ending import WorldEnding, WorldPhase

RUNS, STOPPED, INTERRUPTED = WorldPhase.RUNS, WorldPhase.STOPPED, WorldPhase.INTERRUPTED
FAILED, OVER, FORKED = WorldPhase.FAILED, WorldPhase.OVER, WorldPhase.FORKED

TRANSITIONS: dict[str, Callable[[WorldEnding], object]] = {
    "stop": lambda ending: ending.stop("made no progress"),
    "withdraw_stop": WorldEnding.withdraw_stop,
    "interrupt": lambda ending: ending.interrupt(3),
    "fail": lambda ending: ending.fail(1, ValueError("first"), ["all_reduce"], 10),
    "add_failure": lambda ending: ending.add_failure(2, KeyError("second"), [], 10),
    "finish": WorldEnding.finish,
    "fork": lambda ending: ending.fork(0),
}
"""One call of each transition."""

WAYS = {
    RUNS: (), STOPPED: ("stop",), INTERRUPTED: ("interrupt",), FAILED: ("fail",), OVER: ("finish",), FORKED: ("fork",),
}  # fmt: skip
"""Transitions from the start to each phase."""

AFTER = {
    #                RUNS         STOPPED   INTERRUPTED  FAILED  OVER    FORKED
    "stop":          (STOPPED,     STOPPED, STOPPED,     FAILED, OVER,   FORKED),
    "withdraw_stop": (RUNS,        RUNS,    INTERRUPTED, FAILED, OVER,   FORKED),
    "interrupt":     (INTERRUPTED, STOPPED, INTERRUPTED, FAILED, OVER,   FORKED),
    "fail":          (FAILED,      FAILED,  FAILED,      FAILED, OVER,   FORKED),
    "add_failure":   (None,        None,    None,        FAILED, None,   None),
    "finish":        (OVER,        STOPPED, INTERRUPTED, FAILED, OVER,   FORKED),
    "fork":          (FORKED,      FORKED,  FORKED,      FORKED, FORKED, FORKED),
}  # fmt: skip
"""The phase after each transition from each phase; None: the transition is a bug there."""


def ending_in(phase: WorldPhase) -> WorldEnding:
    ending = WorldEnding()
    for transition in WAYS[phase]:
        TRANSITIONS[transition](ending)
    return ending


def raised(error: BaseException, *, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("before", WorldPhase)
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_each_transition_from_each_phase(transition: str, before: WorldPhase) -> None:
    ending, after = ending_in(before), AFTER[transition][list(WorldPhase).index(before)]
    assert ending.phase is before
    assert ending.can_stop == (before in (RUNS, INTERRUPTED))
    facts = repr(ending.failure), str(ending.peer_error())
    if after is None:
        with pytest.raises(AssertionError, match="this is a bug in overlap"):
            TRANSITIONS[transition](ending)
    else:
        TRANSITIONS[transition](ending)
        assert ending.phase is after
    if after in (None, before) and (before, transition) != (STOPPED, "interrupt"):  # the facts stay, too
        assert (repr(ending.failure), str(ending.peer_error())) == facts


@pytest.mark.parametrize(
    ("phase", "culprit", "text"),
    [
        (RUNS, -1, "the world has ended"),
        (STOPPED, -1, "the world has ended"),
        (INTERRUPTED, 3, "the world has ended: rank 3 was interrupted"),
        (FAILED, 1, "rank 1 failed: ValueError: first"),
        (OVER, -1, "the world has ended"),
        (FORKED, 0, "this process is a fork of the one that has this rank"),
    ],
)
def test_the_error_of_operations_that_are_cut_short(phase: WorldPhase, culprit: int, text: str) -> None:
    ending = ending_in(phase)
    error = ending.peer_error()
    assert error.culprit == culprit
    assert str(error).partition(", and is no rank")[0] == text
    assert error.__cause__ is (ending.failure[1] if phase is FAILED and ending.failure else None)
    assert ending.forked == (phase is FORKED)


def test_a_stop_keeps_its_first_reason_and_time_limit() -> None:
    ending = WorldEnding()
    ending.stop("did not finish within timeout_s=2", 2.0)
    ending.stop("made no progress")
    error = ending.stall_error(["rank 0: sleeps"], "rank 0 has not come")
    assert (error.timeout_s, error.report, error.sentence) == (2.0, ("rank 0: sleeps",), "rank 0 has not come")
    assert str(error).startswith("the world did not finish within timeout_s=2: rank 0 has not come")


@pytest.mark.parametrize("stops", [False, True])
def test_the_first_interrupted_rank_is_named(stops: bool) -> None:
    ending = ending_in(INTERRUPTED)
    if stops:
        ending.stop("made no progress")
    ending.interrupt(2)
    assert ending.peer_error().culprit == 3


def test_a_world_that_its_caller_has_cancelled_names_no_rank() -> None:
    ending = WorldEnding()
    ending.interrupt(-1)
    ending.interrupt(3)
    assert ending.phase is INTERRUPTED
    assert ending.peer_error().culprit == -1
    assert ending.accepts_as_consequence(ended())
    assert not ending.accepts_as_consequence(ended(3))


def left(culprit: int = 0) -> BaseException:
    return RankLeftError("rank has left", culprit=culprit)


def ended(culprit: int = -1) -> BaseException:
    return PeerFailedError("the world has ended", culprit=culprit)


def cycle() -> BaseException:
    error = ValueError("own")
    return raised(error, cause=raised(KeyError("own"), cause=error))


CONSEQUENCES = {
    "of an operation": (ended, "stop"),
    "of the interrupted rank": (lambda: ended(3), "interrupt"),
    "of another rank": (lambda: ended(2), ""),
    "of a rank that has left": (left, "stop interrupt"),
    "own": (lambda: ValueError("own"), ""),
    "own, because of it": (lambda: raised(ValueError("own"), cause=ended()), "stop"),
    "own, because of a group": (lambda: raised(ValueError("own"), cause=BaseExceptionGroup("g", [ended()])), "stop"),
    "own, in a cycle": (cycle, ""),
    "several": (lambda: ExceptionGroup("g", [ended(), left()]), "stop"),
    "one error twice": (lambda: BaseExceptionGroup("g", [ended()] * 2), "stop"),
    "several, one of them own": (lambda: BaseExceptionGroup("g", [ended(), ValueError("own")]), ""),
    "a group because of it": (lambda: raised(ExceptionGroup("g", [ValueError("own")]), cause=ended()), "stop"),
}
"""Errors, and the ends of which they are consequences."""


@pytest.mark.parametrize("before", WorldPhase)
@pytest.mark.parametrize("kind", CONSEQUENCES)
def test_consequences_of_a_stop_or_an_interrupt_are_no_failures(kind: str, before: WorldPhase) -> None:
    make, ends = CONSEQUENCES[kind]
    ending, error = ending_in(before), make()
    follows = {STOPPED: "stop", INTERRUPTED: "interrupt"}.get(before, "never") in ends.split()
    assert ending.accepts_as_consequence(error) == follows
    of_peers = isinstance(error, PeerError) or kind in ("several", "one error twice")
    assert ending.raised_after_stop is (error if follows and not of_peers else None)


def test_an_interrupted_world_that_is_stopped_has_consequences_of_both() -> None:
    ending = ending_in(INTERRUPTED)
    ending.stop("made no progress")
    assert ending.accepts_as_consequence(ended(3))
    assert ending.accepts_as_consequence(ended())
    assert not ending.accepts_as_consequence(ended(2))


def test_only_the_first_own_error_after_a_stop_is_kept() -> None:
    ending = ending_in(STOPPED)
    errors = [raised(ValueError(str(number)), cause=ended()) for number in range(2)]
    assert ending.accepts_as_consequence(ended())
    assert all(map(ending.accepts_as_consequence, errors))
    assert ending.raised_after_stop is errors[0]


CALLS = st.lists(
    st.tuples(st.sampled_from([name for name in TRANSITIONS if name != "add_failure"] + ["fail"] * 3),
              st.integers(0, 3), st.integers(0, 2)),
    max_size=12,
)  # fmt: skip


@given(CALLS)
def test_any_order_of_transitions_ends_in_one_verdict(calls: list[tuple[str, int, int]]) -> None:
    """The first culprit stays, but for a lower rank in the same instant; time never goes back."""
    ending, failures, now_ns = WorldEnding(), list[tuple[int, int]](), 0
    for transition, rank, later_ns in calls:
        now_ns += later_ns
        if transition == "fail":
            cause = ValueError(f"{rank} at {now_ns}")
            is_first = ending.fail(rank, cause, [str(rank)], now_ns)
            assert not (is_first and failures)
            if not is_first and ending.phase is FAILED:
                ending.add_failure(rank, cause, [str(rank)], now_ns)
            if ending.phase is FAILED:
                failures.append((rank, now_ns))
        else:
            TRANSITIONS[transition](ending)
    ending.finish()
    assert ending.phase is not RUNS
    if ending.phase is FAILED:
        instant_ns = failures[0][1]
        culprit = min(rank for rank, now_ns in failures if now_ns == instant_ns)
        error = ending.rank_error(4, ())
        assert (error.rank, error.doing) == (culprit, (str(culprit),))
        assert error.others.keys() == {rank for rank, _ in failures} - {culprit}
        assert str(error.cause) == f"{culprit} at {instant_ns}"
    else:
        assert (ending.failure is None) == (ending.phase is not FORKED)
    verdict = ending.phase
    for transition in ("stop", "interrupt", "fail", "finish"):
        if verdict in (FAILED, OVER, FORKED):
            TRANSITIONS[transition](ending)
            assert ending.phase is verdict

"""Published schedules, from GPipe to DualPipe-V, with the idle time of each.

The formulas give the time that a rank is idle in a step, with p ranks and m microbatches. F, I and W are the times of
the forward, the input gradient and the weight gradient of one microbatch at one stage; B is I + W. "By replay" means
that no paper has the formula: it was found by timing schedules with `timing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...errors import UsageError
from .action import Action, ActionKind
from .folded import dualpipe_v, zb_v
from .schedule import PipelineSchedule
from .timing import Durations

# The members of an enum come in the order of their definition.
F, B, I, W = ActionKind  # noqa: E741


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards (arXiv 1811.06965).

    Idle: (p-1)(F+B). Every rank holds the activations of all m microbatches.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    rows = [[Action(r, kind, i) for kind in (F, B) for i in range(microbatches)] for r in range(ranks)]
    return PipelineSchedule("gpipe", rows)


def one_f_one_b(ranks: int, microbatches: int) -> PipelineSchedule:
    """One forward for each later stage, then one forward and one backward in turn (PipeDream-flush, 1F1B).

    Idle: (p-1)(F+B), as GPipe. Rank r holds the activations of min(m, p-r) microbatches.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    rows = [
        [Action(r, kind, i) for kind, i in _alternating_actions(ranks - 1 - r, microbatches, B)] for r in range(ranks)
    ]
    return PipelineSchedule("1f1b", rows)


def zb_h1(ranks: int, microbatches: int) -> PipelineSchedule:
    """1F1B with weight gradients in idle time: on rank r, W of microbatch i runs after I of i + r (arXiv 2401.10241).

    Idle, for m >= p: (p-1)(F+I-W) if W takes no longer than F or I; for any W, by replay, (p-1) max(F+I-W, F, I).
    Every rank holds up to p microbatches, until their W.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    rows = [list(_zero_bubble_row(r, ranks - 1 - r, r, microbatches)) for r in range(ranks)]
    return PipelineSchedule("zb-h1", rows)


def zb_h2(ranks: int, microbatches: int) -> PipelineSchedule:
    """ZB-H1 with twice as many forwards at the start, and twice the lag of W (arXiv 2401.10241).

    Idle, for m >= 2p-1: max(0, (p-1)(F+I-2W)) between the rank's first and last action; by replay,
    (p-1) max(F+I-2W, F, I) over the whole step, from the first start to the last end on any rank. Every rank holds up
    to 2p-1 microbatches.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    rows = [list(_zero_bubble_row(r, 2 * (ranks - 1 - r), 2 * r, microbatches)) for r in range(ranks)]
    return PipelineSchedule("zb-h2", rows)


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """1F1B over v stages on each rank; stage s is on rank s mod p (arXiv 2104.04473).

    A rank runs k microbatches on one of its stages before the next stage has its turn: there are R = max(1, m // p)
    rounds of k = m / R microbatches. Idle, for m >= p: (p-1)(F+B), with the times of one of the smaller stages, so 1/v
    of that of 1F1B. Rank 0 holds up to p*v + p - 1 activations of one stage and microbatch, if k = p.

    Args:
        ranks: Number of ranks, p.
        microbatches: Number of microbatches, m.
        chunks: Number of stages on each rank, v.

    Raises:
        UsageError: The microbatches do not divide into the rounds.
    """
    _check_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise UsageError(
            f"microbatches: {microbatches} do not divide into {rounds} rounds (microbatches // ranks); "
            f"{microbatches - microbatches % rounds} or {microbatches + rounds - microbatches % rounds} do"
        )
    rows = [list(_interleaved_row(r, ranks, microbatches, chunks, microbatches // rounds)) for r in range(ranks)]
    return PipelineSchedule("interleaved-1f1b", rows)


def _alternating_actions(warm_up: int, microbatches: int, backward: ActionKind) -> Iterator[tuple[ActionKind, int]]:
    """Yield `warm_up` forwards, then one forward and one backward (B or I) in turn, then the remaining backwards.

    Each is a pair of kind and microbatch. With fewer microbatches there are fewer forwards at the start.
    """
    ahead = min(microbatches, warm_up)
    yield from ((F, i) for i in range(ahead))
    for i in range(microbatches):
        if i + ahead < microbatches:
            yield F, i + ahead
        yield backward, i


def _zero_bubble_row(rank: int, ahead: int, lag: int, microbatches: int) -> Iterator[Action]:
    """Yield a rank's actions: 1F1B with I in the place of B, and after I of microbatch i the W of microbatch i - `lag`.

    The rank's number is its stage. The alternation of F and I begins after `ahead` forwards.
    """
    for kind, i in _alternating_actions(ahead, microbatches, I):
        yield Action(rank, kind, i)
        if kind is I and i >= lag:
            yield Action(rank, W, i - lag)
    yield from (Action(rank, W, i) for i in range(max(0, microbatches - lag), microbatches))


def _interleaved_row(rank: int, ranks: int, microbatches: int, chunks: int, size: int) -> Iterator[Action]:
    """Yield a rank's actions: 1F1B over its `chunks` stages, in rounds of `size` microbatches.

    `size`, a divisor of `microbatches`, is the number of those that pass one chunk before the next chunk has its turn.
    """
    total = microbatches * chunks
    # Forwards before the alternation: those of all chunks but the last, and two for each rank after this one.
    ahead = min((chunks - 1) * size + 2 * (ranks - 1 - rank), total)

    def nth_action(kind: ActionKind, n: int) -> Action:
        """Return the n-th action of a kind: `size` microbatches on each chunk in turn; B starts with the last chunk."""
        chunk = n // size % chunks
        microbatch = n // (size * chunks) * size + n % size
        return Action(rank + ranks * (chunk if kind is F else chunks - 1 - chunk), kind, microbatch)

    yield from (nth_action(F, n) for n in range(ahead))
    for n in range(total):
        if n + ahead < total:
            yield nth_action(F, n + ahead)
        yield nth_action(B, n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A published schedule for any number of ranks and microbatches."""

    make: Callable[[int, int, int], PipelineSchedule]  # (ranks, microbatches, chunks): the schedule
    # (ranks, microbatches, durations): the idle time of a rank by formula; None if the formula does not hold for these.
    # Formulas neglect the time of messages.
    bubble: Callable[[int, int, Durations], int | None]
    chunks: int | None = 1  # Stages on each rank; None: any number


def _has_equal_durations(t: Durations) -> bool:
    """Whether F, I and W take as long as each other, which some formulas of idle time need."""
    return t.forward == t.input_gradient == t.weight_gradient


def _fill_and_drain_time(p: int, m: int, t: Durations) -> int:
    """Return the idle time while a pipeline of p ranks fills and drains: (p-1)(F+B)."""
    return (p - 1) * (t.of(F) + t.of(B))


FAMILIES = {
    "gpipe": Family(make=lambda p, m, v: gpipe(p, m), bubble=_fill_and_drain_time),
    "1f1b": Family(make=lambda p, m, v: one_f_one_b(p, m), bubble=_fill_and_drain_time),
    "interleaved-1f1b": Family(
        make=interleaved_1f1b, chunks=None, bubble=lambda p, m, t: _fill_and_drain_time(p, m, t) if m >= p else None
    ),
    "zb-h1": Family(
        make=lambda p, m, v: zb_h1(p, m),
        bubble=lambda p, m, t: (p - 1) * max(t.of(F) + t.of(I) - t.of(W), t.of(F), t.of(I)) if m >= p else None,
    ),
    "zb-h2": Family(
        make=lambda p, m, v: zb_h2(p, m),
        bubble=lambda p, m, t: (
            (p - 1) * max(t.of(F) + t.of(I) - 2 * t.of(W), t.of(F), t.of(I)) if m >= 2 * p - 1 else None
        ),
    ),
    "zb-v": Family(
        make=lambda p, m, v: zb_v(p, m),
        chunks=2,
        bubble=lambda p, m, t: (p - 1) * t.of(F) if m >= 2 * p - 1 and _has_equal_durations(t) else None,
    ),
    "dualpipe-v": Family(
        make=lambda p, m, v: dualpipe_v(p, m),
        chunks=2,
        bubble=lambda p, m, t: (p - 1) * t.of(F) if _has_equal_durations(t) else None,
    ),
}
"""All published schedules of this package, by name."""


def make(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> PipelineSchedule:
    """Make a published schedule by its name.

    Args:
        name: A key of `FAMILIES`, in upper or lower case.
        ranks: Number of ranks of the pipeline.
        microbatches: Number of microbatches that each batch is cut into.
        chunks: Stages on each rank. Only "interleaved-1f1b" has a choice; its default is 2.

    Raises:
        UsageError: The name is unknown, or a number is invalid.
    """
    family = FAMILIES.get(name.lower()) if isinstance(name, str) else None
    if family is None:
        raise UsageError(f"name: {name!r} is no schedule; known are {', '.join(FAMILIES)}")
    # None in `family.chunks`: the schedule takes any number.
    if chunks not in (None, family.chunks) and family.chunks is not None:
        stages = "one stage" if family.chunks == 1 else f"{family.chunks} stages"
        raise UsageError(
            f"chunks: {name} has {stages} on each rank, got {chunks}; "
            "leave out chunks, or name interleaved-1f1b, which takes any number"
        )
    _check_counts(ranks=ranks, microbatches=microbatches)
    return family.make(ranks, microbatches, 2 if chunks is None else chunks)


def _check_counts(**counts: int) -> None:
    """Refuse numbers of ranks, microbatches or chunks that are no integers from 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"{name}: expected a whole number from 1, got {count!r}")

"""Published schedules, from GPipe to DualPipe-V, with the idle time of each.

The formulas tell the time that a rank is idle in a step, of p ranks; F, I and W are the times of one microbatch at one
stage, B is I + W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...errors import UsageError
from .action import Action, ActionKind
from .folded import dualpipe_v, zb_v
from .schedule import PipelineSchedule
from .timing import Durations

F, B, I, W = ActionKind  # noqa: E741


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards (arXiv 1811.06965).

    Idle: (p-1)(F+B). Every rank holds all m microbatches.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    rows = [[Action(r, kind, i) for kind in (F, B) for i in range(microbatches)] for r in range(ranks)]
    return PipelineSchedule("gpipe", rows)


def one_f_one_b(ranks: int, microbatches: int) -> PipelineSchedule:
    """As many forwards as later stages need, then one forward, one backward in turn (PipeDream-flush, 1F1B).

    Idle: (p-1)(F+B), as GPipe. Rank r holds min(m, p-r) microbatches.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    rows = [[Action(r, kind, i) for kind, i in _alternate(ranks - 1 - r, microbatches, B)] for r in range(ranks)]
    return PipelineSchedule("1f1b", rows)


def zb_h1(ranks: int, microbatches: int) -> PipelineSchedule:
    """1F1B whose weight gradients fill idle time: W(i) runs r inputs' gradients later (arXiv 2401.10241).

    Idle: (p-1)(F+I-W), for m >= p and a W that takes no longer than F or I; for any, by replay, (p-1) max(F+I-W, F, I).
    Every rank holds up to p microbatches, until their W.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    rows = [list(_zero_bubble_row(r, ranks - 1 - r, r, microbatches)) for r in range(ranks)]
    return PipelineSchedule("zb-h1", rows)


def zb_h2(ranks: int, microbatches: int) -> PipelineSchedule:
    """ZB-H1 with twice as many forwards ahead and twice the lag (arXiv 2401.10241).

    A rank is idle for (p-1)(F+I-2W) between its first action and its last, at least 0, for m >= 2p-1; from the first
    start anywhere to the last end, by replay, (p-1) max(F+I-2W, F, I). Every rank holds up to 2p-1 microbatches.
    """
    _check_counts(ranks=ranks, microbatches=microbatches)
    rows = [list(_zero_bubble_row(r, 2 * (ranks - 1 - r), 2 * r, microbatches)) for r in range(ranks)]
    return PipelineSchedule("zb-h2", rows)


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """1F1B over v stages on each rank; stage s is on rank s mod p (arXiv 2104.04473).

    Microbatches pass a rank's stages in rounds of k, as even as `microbatches` allows: with R = max(1, m // p) rounds,
    k = m / R. Idle: (p-1)(F+B) of a stage, which is 1/v of 1F1B's, for m >= p. Rank 0 holds up to p*v + p - 1
    activations of a stage each, at k = p.

    Raises:
        UsageError: If the microbatches do not divide into the rounds.
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


def _alternate(warm_up: int, microbatches: int, backward: ActionKind) -> Iterator[tuple[ActionKind, int]]:
    """Yield `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    ahead = min(microbatches, warm_up)
    yield from ((F, i) for i in range(ahead))
    for i in range(microbatches):
        if i + ahead < microbatches:
            yield F, i + ahead
        yield backward, i


def _zero_bubble_row(rank: int, ahead: int, lag: int, microbatches: int) -> Iterator[Action]:
    """Yield a rank's actions: 1F1B with I for B, and the W of a microbatch `lag` of them later."""
    for kind, i in _alternate(ahead, microbatches, I):
        yield Action(rank, kind, i)
        if kind is I and i >= lag:
            yield Action(rank, W, i - lag)
    yield from (Action(rank, W, i) for i in range(max(0, microbatches - lag), microbatches))


def _interleaved_row(rank: int, ranks: int, microbatches: int, chunks: int, size: int) -> Iterator[Action]:
    """Yield a rank's actions: 1F1B over its chunks, in rounds of `size` microbatches."""
    total = microbatches * chunks
    ahead = min((chunks - 1) * size + 2 * (ranks - 1 - rank), total)

    def nth(kind: ActionKind, n: int) -> Action:
        """Return the n-th action of a kind: `size` microbatches on each chunk in turn, backward from the last chunk."""
        chunk = n // size % chunks
        microbatch = n // (size * chunks) * size + n % size
        return Action(rank + ranks * (chunk if kind is F else chunks - 1 - chunk), kind, microbatch)

    yield from (nth(F, n) for n in range(ahead))
    for n in range(total):
        if n + ahead < total:
            yield nth(F, n + ahead)
        yield nth(B, n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A published schedule, by its name."""

    make: Callable[[int, int, int], PipelineSchedule]  # From ranks, microbatches and chunks, the schedule
    # From ranks, microbatches and durations, the idle time of a rank by the formula; None where the formula does not
    # hold. Messages are taken to take no time.
    bubble: Callable[[int, int, Durations], int | None]
    chunks: int | None = 1  # Stages on each rank; None: as many as are asked for, from 1


def _equal_durations(t: Durations) -> bool:
    return t.forward == t.input_gradient == t.weight_gradient


def _fill_and_drain(p: int, m: int, t: Durations) -> int:
    """Return the idle time while a pipeline of p ranks fills and drains: (p-1)(F+B)."""
    return (p - 1) * (t.of(F) + t.of(B))


FAMILIES = {
    "gpipe": Family(make=lambda p, m, v: gpipe(p, m), bubble=_fill_and_drain),
    "1f1b": Family(make=lambda p, m, v: one_f_one_b(p, m), bubble=_fill_and_drain),
    "interleaved-1f1b": Family(
        make=interleaved_1f1b, chunks=None, bubble=lambda p, m, t: _fill_and_drain(p, m, t) if m >= p else None
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
        bubble=lambda p, m, t: (p - 1) * t.of(F) if m >= 2 * p - 1 and _equal_durations(t) else None,
    ),
    "dualpipe-v": Family(
        make=lambda p, m, v: dualpipe_v(p, m),
        chunks=2,
        bubble=lambda p, m, t: (p - 1) * t.of(F) if _equal_durations(t) else None,
    ),
}
"""Every published schedule that there is, by name."""


def make(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> PipelineSchedule:
    """Make a published schedule by its name, in any case.

    Args:
        name: One of `FAMILIES`.
        ranks: Ranks of the pipeline.
        microbatches: Into how many each batch is cut.
        chunks: Stages on each rank, for "interleaved-1f1b"; by default 2, or as many as the schedule has.

    Raises:
        UsageError: If the name is unknown, or a number is invalid.
    """
    family = FAMILIES.get(name.lower()) if isinstance(name, str) else None
    if family is None:
        raise UsageError(f"name: {name!r} is no schedule; known are {', '.join(FAMILIES)}")
    if chunks not in (None, family.chunks) and family.chunks is not None:
        stages = "one stage" if family.chunks == 1 else f"{family.chunks} stages"
        raise UsageError(f"chunks: {name} has {stages} on each rank, got {chunks}; interleaved-1f1b has several")
    _check_counts(ranks=ranks, microbatches=microbatches)
    return family.make(ranks, microbatches, 2 if chunks is None else chunks)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"{name}: expected a whole number from 1, got {count!r}")

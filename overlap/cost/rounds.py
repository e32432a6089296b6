"""Rounds of a schedule: the work that each step asks of the machine, without the slots of its table.

A round is what one step, or a run of steps that are alike, moves between whom. Ring schedules have thousands of steps
and a handful of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..collectives.hazards import cell_numbers, unroll
from ..collectives.placement import Floats, Ints
from ..collectives.schedule import Buffer, Op, Schedule

_Amounts: TypeAlias = "NDArray[np.integer] | Floats"

AMOUNTS = ("added", "local_added", "moving", "adding", "local")
"""Amounts of a round that each rank has."""

_Column: TypeAlias = NDArray[Any]

# Blocks of the vector that a collective's bytes are counted on: one for each rank, or one in all.
_PER_RANK = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")

# Collectives whose root receives nothing, so that what it copies stands in nobody's way: in others it stands before
# what a rank receives, in one queue.
_BESIDE = ("broadcast", "scatter")

# Algorithms that are several of their kind, each on a channel of its own, with a part of the data.
_APART = ("double_binary_tree",)

# Algorithms that pass on in each step what came in the one before, and that alone.
_RINGS = ("ring", "multi_ring", "kangaring")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """One step, or several alike in a row. Amounts are in slots."""

    repeat: int  # how many steps
    src: Ints  # (messages,) group rank that sends; all rows of a step between two ranks are one message
    dst: Ints  # (messages,) group rank that receives; ascending
    sent: Floats  # (messages,) (messages,) slots that each message carries
    added: Floats  # (size,) what each rank reduces of what it is sent
    local_added: Floats  # (size,) what each rank reduces before its first message
    moving: Floats  # (size,) reads and writes of each rank's memory for copies
    adding: Floats  # (size,) reads and writes of each rank's memory for reductions
    local: Floats  # (size,) reads and writes of each rank's memory before its first message
    # (size,) reads and writes of each rank's memory that none of its messages waits for, but its end does; none if
    # None.
    beside: Floats | None = None
    count: Floats | None = None  # (messages,) how many messages each row stands for; one if None
    # (messages,) whether a row goes to the same place's like in another node, which does the same; none if None.
    far: NDArray[np.bool_] | None = None
    # (messages,) which of several independent parts of the data it belongs to, which do not wait for each other; all to
    # one if None.
    lane: Ints | None = None
    passed_on: bool = False  # whether each rank reduces what comes and passes it on in the next step, as around a ring

    @property
    def touched(self) -> Floats:
        """(size,) All reads and writes of each rank's memory, once."""
        before = self.moving + self.adding + self.local
        return before if self.beside is None else before + self.beside


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """A schedule as rounds."""

    size: int  # number of ranks
    # that the collective's bytes are spread over: of the whole vector, which is the larger one of a rank's input and
    # output (all of an all-reduce's buffer, an all-gather's output, a reduce-scatter's input).
    slots: int
    rounds: tuple[Round, ...]  # in the order of time

    @property
    def steps(self) -> int:
        """Steps in which anything travels."""
        return sum(each.repeat for each in self.rounds if len(each.src))

    @property
    def sent_share(self) -> float:
        """Bytes that the busiest rank sends, over the bytes of the whole vector."""
        sent = np.zeros(self.size)
        for each in self.rounds:
            sent += each.repeat * _weighed(each.src, each.sent, self.size)
        return float(sent.max(initial=0.0)) / self.slots

    def continued(self) -> Rounds:
        """Return these rounds without local work at first: an earlier phase has put the input in place."""
        none = np.zeros(self.size)
        each = (replace(one, local=none, local_added=none, beside=None) for one in self.rounds)
        return replace(self, rounds=tuple(each))

    def while_copying(self, rank: int) -> Rounds:
        """Return these rounds with `rank` copying the whole vector meanwhile, and no other rank anything of its own."""
        beside = np.zeros(self.size)
        beside[rank] = 2.0 * self.slots
        rest = self.continued()
        return replace(rest, rounds=(replace(rest.rounds[0], beside=beside), *rest.rounds[1:])) if rest.rounds else rest

    def likewise(self, ranks: Sequence[int], like: Sequence[int]) -> Rounds:
        """Return these rounds with some ranks working as much as others do, for messages that are left out."""
        to, of = np.asarray(ranks, np.int64), np.asarray(like, np.int64)
        return replace(self, rounds=tuple(_likewise(each, to, of) for each in self.rounds)) if len(to) else self

    def copied(self, groups: Sequence[Sequence[int]], size: int) -> Rounds:
        """Return the rounds of several groups at once, each of which does these rounds.

        Args:
            groups: The ranks, in a larger group, that play the parts of ranks 0, 1, ...
            size: Ranks of the larger group.
        """
        plays = np.asarray(groups, np.int64)
        each = tuple(_copied(each, plays, size) for each in self.rounds)
        return Rounds(size=size, slots=self.slots, rounds=each)


def _likewise(one: Round, ranks: Ints, like: Ints) -> Round:
    def spread(amount: Floats) -> Floats:
        whole = amount.copy()
        whole[ranks] = amount[like]
        return whole

    return replace(one, **_of_ranks(one, spread))


def _copied(one: Round, plays: Ints, size: int) -> Round:
    src, dst = plays[:, one.src].reshape(-1), plays[:, one.dst].reshape(-1)
    order = np.argsort(dst, kind="stable")

    def spread(amount: Floats) -> Floats:
        whole = np.zeros(size)
        whole[plays] = amount
        return whole

    def tiled(column: _Column | None) -> _Column | None:
        return None if column is None else np.tile(column, len(plays))[order]

    of_messages: dict[str, Any] = {name: tiled(getattr(one, name)) for name in ("sent", "count", "far", "lane")}
    return replace(one, src=src[order], dst=dst[order], **of_messages, **_of_ranks(one, spread))


def _of_ranks(one: Round, how: Callable[[Floats], Floats]) -> dict[str, Any]:
    """Return the amounts of each rank, each of them changed."""
    amounts = {name: how(getattr(one, name)) for name in AMOUNTS}
    return amounts if one.beside is None else {**amounts, "beside": how(one.beside)}


def rounds(schedule: Schedule, moved: Floats | None = None) -> Rounds:
    """Read a schedule as rounds.

    What counts as a touch of memory: a copy reads and writes once; a reduction reads two operands and writes one
    result. Rows of a fan-out share their read, rows of a fan-in share the read and the write of their target. In
    collectives that reduce, local copies cost nothing: an executor takes them together with the reduction. What the
    root of a broadcast or a scatter copies for itself, it copies beside what it sends.

    Args:
        schedule: The table.
        moved: (rows,) How much each row moves, in slots of the average block; what it counts by default.

    Cost: one pass over the table, then work for each different step only.
    """
    amounts: _Amounts = schedule.count if moved is None else moved
    beside = _beside(schedule)
    bounds = np.searchsorted(schedule.step, np.arange(schedule.steps + 1))
    first = np.flatnonzero(~_like_the_one_before(schedule, amounts, beside, bounds))
    repeat = np.diff(np.append(first, schedule.steps))
    per_rank = schedule.size if schedule.collective in _PER_RANK else 1
    each = zip(first.tolist(), repeat.tolist(), strict=True)
    spans = ((slice(bounds[step], bounds[step + 1]), times) for step, times in each)
    return Rounds(
        size=schedule.size,
        slots=schedule.slots_per_block * per_rank,
        rounds=tuple(_round(schedule, amounts, beside[rows], rows, times) for rows, times in spans),
    )


def _like_the_one_before(
    schedule: Schedule, moved: _Amounts, beside: NDArray[np.bool_], bounds: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Return for each step whether it is the same round as the step before."""
    length = np.diff(bounds)
    alike = np.zeros(schedule.steps, np.bool_)
    edges = np.flatnonzero(np.diff(length)) + 1
    grouped = bool((schedule.group >= 0).any())
    columns: list[_Amounts | NDArray[np.bool_]] = [schedule.src, schedule.dst, moved, schedule.op, beside]
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), schedule.steps], strict=True):
        if stop - start < 2:
            continue
        rows, same = slice(bounds[start], bounds[stop]), np.ones(stop - start - 1, np.bool_)
        for column in columns:
            square = column[rows].reshape(stop - start, -1)
            same &= (square[1:] == square[:-1]).all(axis=1)
        if grouped and same.any():
            square = _from_zero(schedule.group[rows].reshape(stop - start, -1))
            same &= (square[1:] == square[:-1]).all(axis=1)
        alike[start + 1 : stop] = same
    return alike


def _from_zero(group: NDArray[np.int32]) -> NDArray[np.int32]:
    """Renumber the groups of each step, (steps, rows), from 0: their numbers differ from step to step."""
    most = np.iinfo(np.int32).max  # also where a step has no rows, as between the slices of a pipeline
    least = np.where(group < 0, most, group).min(axis=1, keepdims=True, initial=most)
    return np.where(group < 0, -1, group - least)


def _round(schedule: Schedule, moved: _Amounts, beside: NDArray[np.bool_], rows: slice, repeat: int) -> Round:
    s, size = schedule, schedule.size
    src, dst, count = s.src[rows].astype(np.int64), s.dst[rows].astype(np.int64), moved[rows].astype(np.float64)
    remote, adds, group = src != dst, s.op[rows] == Op.ADD, s.group[rows]
    moves = remote & ~adds
    far_adds = remote & adds
    near_adds = ~remote & adds
    shared_read = moves & _again(group, s.sslot[rows], moves)
    shared_sum = far_adds & _again(group, s.dslot[rows], far_adds)
    local = 3.0 * _sums(dst, count, near_adds, size)
    if not s.reduces:
        local += 2.0 * _sums(dst, count, ~remote & ~adds & ~beside, size)
    apart = s.algorithm in _APART
    lane = s.channel[rows].astype(np.int64) if apart else np.zeros(len(src), np.int64)
    lanes = s.channels if apart else 1
    key, message = np.unique(((dst * size + src) * lanes + lane)[remote], return_inverse=True)
    ends = key // lanes
    return Round(
        repeat=repeat,
        passed_on=s.algorithm in _RINGS and bool(far_adds.any()),
        src=ends % size,
        dst=ends // size,
        lane=key % lanes if apart else None,
        sent=_weighed(message, count[remote], len(key)),
        added=_sums(dst, count, far_adds, size),
        local_added=_sums(dst, count, near_adds, size),
        moving=_sums(src, count, moves & ~shared_read, size) + _sums(dst, count, moves, size),
        adding=_sums(src, count, far_adds, size) + 2.0 * _sums(dst, count, far_adds & ~shared_sum, size),
        local=local,
        beside=2.0 * _sums(dst, count, beside, size) if beside.any() else None,
    )


def _beside(s: Schedule) -> NDArray[np.bool_]:
    """Return which rows are local copies that no message waits for.

    Messages wait for what they read; what was copied from the input is taken to be there when a later step reads it.
    """
    beside = np.zeros(len(s), np.bool_)
    if s.collective not in _BESIDE:
        return beside
    copies = np.flatnonzero((s.src == s.dst) & (s.op == Op.MOVE))
    sends = np.flatnonzero((s.src != s.dst) & (s.sbuf != Buffer.IN))
    written, copy = unroll(
        cell_numbers(s, s.dst[copies], s.dbuf[copies], s.dslot[copies], shared=False), s.count[copies]
    )
    sent, send = unroll(cell_numbers(s, s.src[sends], s.sbuf[sends], s.sslot[sends], shared=False), s.count[sends])
    then = np.isin(written * s.steps + s.step[copies][copy], sent * s.steps + s.step[sends][send])
    awaited = np.where(s.sbuf[copies][copy] == Buffer.IN, then, np.isin(written, sent))
    beside[copies] = np.bincount(copy, awaited, len(copies)) == 0
    return beside


def _again(group: NDArray[np.int32], slot: NDArray[np.int32], rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows belong to a group that another one before stands for, with the same slot."""
    grouped = np.flatnonzero(rows & (group >= 0))
    again = np.zeros(len(group), np.bool_)
    again[grouped] = True
    key = group[grouped].astype(np.int64) << 32 | slot[grouped]
    again[grouped[np.unique(key, return_index=True)[1]]] = False
    return again


def _sums(rank: Ints, count: Floats, rows: NDArray[np.bool_], size: int) -> Floats:
    return _weighed(rank[rows], count[rows], size)


def _weighed(index: NDArray[np.integer], weight: Floats, size: int) -> Floats:
    # Of nothing, bincount counts in integers, whatever the weights.
    return np.bincount(index, weight, size).astype(np.float64)

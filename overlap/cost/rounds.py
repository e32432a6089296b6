"""Rounds of a schedule: the work of each step for the machine, without the slots of its table.

A round is one step, or a run of equal steps: its messages and work. Ring schedules have thousands of steps
and a handful of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..collectives.hazards import cell_numbers, cells_of
from ..collectives.placement import Floats, Ints
from ..collectives.schedule import Buffer, Op, Schedule

_Amounts: TypeAlias = "NDArray[np.integer] | Floats"

AMOUNTS = ("added", "local_added", "moving", "adding", "local")
"""Amounts of a round for each rank."""

_Column: TypeAlias = NDArray[Any]

# Collectives whose bytes are counted on one block for each rank; for others it is one block in all.
_PER_RANK = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")

# Collectives with a root that receives nothing, so that its copies delay nothing: in others, copies are before
# receives in one queue.
_WITH_UNAWAITED = ("broadcast", "scatter")

# Algorithms made of several equal ones, each on a channel of its own, with a part of the data.
_APART = ("double_binary_tree",)

# Algorithms in which each step passes on exactly the data received in the step before.
_RINGS = ("ring", "multi_ring", "kangaring")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """One step, or several equal ones in a row. Amounts are in slots."""

    repeat: int  # number of steps
    src: Ints  # (messages,) group rank that sends; all rows of a step between two ranks are one message
    dst: Ints  # (messages,) group rank that receives; ascending
    sent: Floats  # (messages,) slots of each message
    added: Floats  # (size,) received slots that each rank reduces
    local_added: Floats  # (size,) slots that each rank reduces before its first message
    moving: Floats  # (size,) reads and writes of each rank's memory for copies
    adding: Floats  # (size,) reads and writes of each rank's memory for reductions
    local: Floats  # (size,) reads and writes of each rank's memory before its first message
    # (size,) reads and writes of each rank's memory that no message waits for: they only delay its end; none if None.
    unawaited: Floats | None = None
    count: Floats | None = None  # (messages,) number of messages in each row; one if None
    # (messages,) whether a row goes to its counterpart in another node, which does the same; none if None.
    far: NDArray[np.bool_] | None = None
    # (messages,) number of its part of the data; parts do not wait for each other; one part if None.
    lane: Ints | None = None
    passed_on: bool = False  # whether each rank reduces its messages and passes the sums on, as in a ring

    @property
    def touched(self) -> Floats:
        """(size,) All reads and writes of each rank's memory, once."""
        before = self.moving + self.adding + self.local
        return before if self.unawaited is None else before + self.unawaited


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """A schedule as rounds."""

    size: int  # number of ranks
    # number of slots of the whole vector, which is the larger one of a rank's input and
    # output (all of an all-reduce's buffer, an all-gather's output, a reduce-scatter's input).
    slots: int
    rounds: tuple[Round, ...]  # in the order of time

    @property
    def steps(self) -> int:
        """Number of steps with messages."""
        return sum(round_.repeat for round_ in self.rounds if len(round_.src))

    @property
    def sent_share(self) -> float:
        """Bytes that the busiest rank sends, over the bytes of the whole vector."""
        sent = np.zeros(self.size)
        for round_ in self.rounds:
            sent += round_.repeat * _weighted_counts(round_.src, round_.sent, self.size)
        return float(sent.max(initial=0.0)) / self.slots

    def without_local_work(self) -> Rounds:
        """Return these rounds without the local work at their start: an earlier phase has put the input in place."""
        none = np.zeros(self.size)
        rounds = (replace(round_, local=none, local_added=none, unawaited=None) for round_ in self.rounds)
        return replace(self, rounds=tuple(rounds))

    def while_copying(self, rank: int) -> Rounds:
        """Return these rounds with `rank` copying the whole vector in parallel, and no local work of other ranks."""
        unawaited = np.zeros(self.size)
        unawaited[rank] = 2.0 * self.slots
        rest = self.without_local_work()
        first = [replace(round_, unawaited=unawaited) for round_ in rest.rounds[:1]]
        return replace(rest, rounds=(*first, *rest.rounds[1:]))

    def copy_amounts(self, ranks: Sequence[int], like: Sequence[int]) -> Rounds:
        """Return these rounds with the work of some ranks replaced by that of others, whose messages stand for theirs.

        Args:
            ranks: Ranks whose amounts are replaced.
            like: For each of them the rank that has its amounts.
        """
        targets, models = np.asarray(ranks, np.int64), np.asarray(like, np.int64)
        if not len(targets):
            return self
        return replace(self, rounds=tuple(_copy_amounts(round_, targets, models) for round_ in self.rounds))

    def copy_to_groups(self, groups: Sequence[Sequence[int]], size: int) -> Rounds:
        """Return the rounds of several groups at once, each of which runs these rounds.

        Args:
            groups: The ranks, in a larger group, that play the parts of ranks 0, 1, ...
            size: Ranks of the larger group.
        """
        plays = np.asarray(groups, np.int64)
        rounds = tuple(_copy_round(round_, plays, size) for round_ in self.rounds)
        return Rounds(size=size, slots=self.slots, rounds=rounds)


def _copy_amounts(round_: Round, ranks: Ints, like: Ints) -> Round:
    """Return the round with amounts of work copied: each of `ranks` gets the amounts of its rank in `like`."""

    def spread(amount: Floats) -> Floats:
        amounts = amount.copy()
        amounts[ranks] = amount[like]
        return amounts

    return replace(round_, **_change_amounts(round_, spread))


def _copy_round(round_: Round, plays: Ints, size: int) -> Round:
    """Return a round that several groups run at once: row g of `plays` has the ranks that play the parts of group g."""
    # Messages of all groups, in the order of their receivers.
    src, dst = plays[:, round_.src].reshape(-1), plays[:, round_.dst].reshape(-1)
    order = np.argsort(dst, kind="stable")

    def spread(amount: Floats) -> Floats:
        amounts = np.zeros(size)
        amounts[plays] = amount
        return amounts

    def repeat_column(column: _Column | None) -> _Column | None:
        return None if column is None else np.tile(column, len(plays))[order]

    of_messages: dict[str, Any] = {
        name: repeat_column(getattr(round_, name)) for name in ("sent", "count", "far", "lane")
    }
    return replace(round_, src=src[order], dst=dst[order], **of_messages, **_change_amounts(round_, spread))


def _change_amounts(round_: Round, change: Callable[[Floats], Floats]) -> dict[str, Any]:
    amounts = {name: change(getattr(round_, name)) for name in AMOUNTS}
    return amounts if round_.unawaited is None else {**amounts, "unawaited": change(round_.unawaited)}


def rounds(schedule: Schedule, moved: Floats | None = None) -> Rounds:
    """Read a schedule as rounds.

    Touches of memory: a copy reads and writes once; a reduction reads two operands and writes one result. Rows of a
    fan-out share their read, rows of a fan-in share the read and the write of their target. In collectives that reduce,
    local copies cost nothing: an executor joins them with the reduction. The root of a broadcast or a scatter makes its
    own copy in parallel with its messages.

    Args:
        schedule: The table.
        moved: (rows,) Length of each row, in slots of the average block; its count by default.

    Cost: one pass over the table, then work for each different step only.
    """
    amounts: _Amounts = schedule.count if moved is None else moved
    unawaited = _unawaited_copies(schedule)
    bounds = np.searchsorted(schedule.step, np.arange(schedule.steps + 1))
    first = np.flatnonzero(~_repeats_previous_step(schedule, amounts, unawaited, bounds))
    repeat = np.diff(np.append(first, schedule.steps))
    per_rank = schedule.size if schedule.collective in _PER_RANK else 1
    runs = zip(first.tolist(), repeat.tolist(), strict=True)
    spans = ((slice(bounds[step], bounds[step + 1]), times) for step, times in runs)
    return Rounds(
        size=schedule.size,
        slots=schedule.slots_per_block * per_rank,
        rounds=tuple(_read_round(schedule, amounts, unawaited[rows], rows, times) for rows, times in spans),
    )


def _repeats_previous_step(
    schedule: Schedule, moved: _Amounts, unawaited: NDArray[np.bool_], bounds: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Return for each step whether it is the same round as the step before."""
    length = np.diff(bounds)
    equal = np.zeros(schedule.steps, np.bool_)
    # Runs of steps of one length are compared as tables: (steps, rows), each row of steps with the one before.
    edges = np.flatnonzero(np.diff(length)) + 1
    grouped = bool((schedule.group >= 0).any())
    columns: list[_Amounts | NDArray[np.bool_]] = [schedule.src, schedule.dst, moved, schedule.op, unawaited]
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), schedule.steps], strict=True):
        if stop - start < 2:
            continue
        rows, is_same = slice(bounds[start], bounds[stop]), np.ones(stop - start - 1, np.bool_)
        for column in columns:
            square = column[rows].reshape(stop - start, -1)
            is_same &= (square[1:] == square[:-1]).all(axis=1)
        if grouped and is_same.any():
            square = _renumber_groups(schedule.group[rows].reshape(stop - start, -1))
            is_same &= (square[1:] == square[:-1]).all(axis=1)
        equal[start + 1 : stop] = is_same
    return equal


def _renumber_groups(group: NDArray[np.int32]) -> NDArray[np.int32]:
    """Renumber the groups of each step, (steps, rows), from 0: their numbers differ from step to step."""
    most = np.iinfo(np.int32).max  # also where a step has no rows, as between the slices of a pipeline
    least = np.where(group < 0, most, group).min(axis=1, keepdims=True, initial=most)
    return np.where(group < 0, -1, group - least)


def _read_round(schedule: Schedule, moved: _Amounts, unawaited: NDArray[np.bool_], rows: slice, repeat: int) -> Round:
    """Return the round of one step: its messages, and the slots of memory that each rank reads and writes.

    Args:
        schedule: The table.
        moved: Length of each row of the table, in slots.
        unawaited: (rows,) Whether each row of the step is a copy that no message waits for.
        rows: Rows of the step in the table.
        repeat: Number of equal steps in a row.
    """
    size, group = schedule.size, schedule.group[rows]
    src, dst = schedule.src[rows].astype(np.int64), schedule.dst[rows].astype(np.int64)
    length = moved[rows].astype(np.float64)

    def slots_by_rank(rank: Ints, chosen: NDArray[np.bool_]) -> Floats:
        """Return (size,) the slots of the chosen rows, by one of their ends."""
        return _weighted_counts(rank[chosen], length[chosen], size)

    # A row is a message or local; it stores its slots at the target, or adds them.
    is_message, is_addition = src != dst, schedule.op[rows] == Op.ADD
    stored, added, local_added = is_message & ~is_addition, is_message & is_addition, ~is_message & is_addition
    # Rows of a fan-out read their slots once; rows of a fan-in read and write their sum once.
    read = stored & ~_repeats_slot(group, schedule.sslot[rows], stored)
    summed = added & ~_repeats_slot(group, schedule.dslot[rows], added)
    local = 3.0 * slots_by_rank(dst, local_added)
    if not schedule.reduces:
        local += 2.0 * slots_by_rank(dst, ~is_message & ~is_addition & ~unawaited)
    # All rows from one rank to another, in one lane, are one message. `ends` numbers the pairs, by receiver first.
    has_lanes = schedule.algorithm in _APART
    lanes = schedule.channels if has_lanes else 1
    lane = schedule.channel[rows].astype(np.int64) if has_lanes else np.zeros(len(src), np.int64)
    key, message = np.unique(((dst * size + src) * lanes + lane)[is_message], return_inverse=True)
    ends = key // lanes
    return Round(
        repeat=repeat,
        passed_on=schedule.algorithm in _RINGS and bool(added.any()),
        src=ends % size,
        dst=ends // size,
        lane=key % lanes if has_lanes else None,
        sent=_weighted_counts(message, length[is_message], len(key)),
        added=slots_by_rank(dst, added),
        local_added=slots_by_rank(dst, local_added),
        moving=slots_by_rank(src, read) + slots_by_rank(dst, stored),
        adding=slots_by_rank(src, added) + 2.0 * slots_by_rank(dst, summed),
        local=local,
        unawaited=2.0 * slots_by_rank(dst, unawaited) if unawaited.any() else None,
    )


def _unawaited_copies(s: Schedule) -> NDArray[np.bool_]:
    """Return whether each row is a local copy that no message waits for.

    Messages wait for the data that they read; a copy of the input is assumed done when a later step reads it.
    """
    unawaited = np.zeros(len(s), np.bool_)
    if s.collective not in _WITH_UNAWAITED:
        return unawaited
    copies = np.flatnonzero((s.src == s.dst) & (s.op == Op.MOVE))
    sends = np.flatnonzero((s.src != s.dst) & (s.sbuf != Buffer.IN))
    written, copy = cells_of(
        cell_numbers(s, s.dst[copies], s.dbuf[copies], s.dslot[copies], shared=False), s.count[copies]
    )
    sent, send = cells_of(cell_numbers(s, s.src[sends], s.sbuf[sends], s.sslot[sends], shared=False), s.count[sends])
    then = np.isin(written * s.steps + s.step[copies][copy], sent * s.steps + s.step[sends][send])
    awaited = np.where(s.sbuf[copies][copy] == Buffer.IN, then, np.isin(written, sent))
    unawaited[copies] = np.bincount(copy, awaited, len(copies)) == 0
    return unawaited


def _repeats_slot(group: NDArray[np.int32], slot: NDArray[np.int32], rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether each row repeats an earlier row of its group with the same slot."""
    grouped = np.flatnonzero(rows & (group >= 0))
    again = np.zeros(len(group), np.bool_)
    again[grouped] = True
    # Group and slot, both of 32 bits, in one number; the first row with each number repeats none.
    key = group[grouped].astype(np.int64) << 32 | slot[grouped]
    again[grouped[np.unique(key, return_index=True)[1]]] = False
    return again


def _weighted_counts(index: NDArray[np.integer], weight: Floats, size: int) -> Floats:
    # Without any index, bincount returns integers whatever the weights.
    return np.bincount(index, weight, size).astype(np.float64)

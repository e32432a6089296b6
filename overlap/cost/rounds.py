"""Rounds of a schedule: messages and work of each step, without the slots of the table.

A round is one step, or a run of equal steps. Ring schedules have thousands of steps and a handful of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..collectives.hazards import cell_numbers, cells_in_ranges
from ..collectives.placement import Floats, Ints
from ..collectives.schedule import Buffer, Op, Schedule

_Amounts: TypeAlias = "NDArray[np.integer] | Floats"

AMOUNTS = ("added", "local_added", "moving", "adding", "local")
"""Names of the fields of `Round` that have an amount of work for each rank."""

_Column: TypeAlias = NDArray[Any]

# Collectives whose whole vector has one block for each rank; that of the others is one block.
_PER_RANK = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")

# Collectives with a root that receives nothing, so that its copies delay no message. In other collectives, copies are
# in the queue of receives, and delay these.
_WITH_UNAWAITED = ("broadcast", "scatter")

# Algorithms whose channels carry parts of the data that do not wait for each other (lanes).
_APART = ("double_binary_tree",)

# Algorithms in which each step passes on exactly the data received in the step before.
_RINGS = ("ring", "multi_ring", "kangaring")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """One step, or several equal steps in a row. Amounts are in slots, for one step."""

    repeat: int  # number of equal steps
    src: Ints  # (messages,) group rank that sends; all rows of a step between two ranks are one message
    dst: Ints  # (messages,) group rank that receives; ascending
    sent: Floats  # (messages,) slots of each message
    added: Floats  # (size,) received slots that each rank reduces
    local_added: Floats  # (size,) slots that each rank reduces before its first message
    moving: Floats  # (size,) reads and writes of each rank's memory for copies
    adding: Floats  # (size,) reads and writes of each rank's memory for reductions
    local: Floats  # (size,) reads and writes of each rank's memory before its first message
    # (size,) reads and writes of each rank's memory that no message waits for: they only delay the rank's end. None: no
    # rank has any.
    unawaited: Floats | None = None
    count: Floats | None = None  # (messages,) number of messages that the row stands for; None: 1
    # (messages,) whether the message goes to the counterpart of `dst` in another unit (see `regular`); None: none does.
    far: NDArray[np.bool_] | None = None
    # (messages,) number of the lane: parts of the data that do not wait for each other; None: all are in one lane.
    lane: Ints | None = None
    passed_on: bool = False  # whether each rank reduces its messages and passes the sums on, as in a ring

    @property
    def memory_accesses(self) -> Floats:
        """(size,) All reads and writes of each rank's memory in one step."""
        before = self.moving + self.adding + self.local
        return before if self.unawaited is None else before + self.unawaited


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """A schedule as rounds."""

    size: int  # number of ranks
    # number of slots of the whole vector: the larger one of a rank's input and output (an all-reduce's buffer, an
    # all-gather's output, a reduce-scatter's input).
    slots: int
    rounds: tuple[Round, ...]  # in the order of time

    @property
    def steps(self) -> int:
        """Number of steps with messages."""
        return sum(round_.repeat for round_ in self.rounds if len(round_.src))

    @property
    def sent_share(self) -> float:
        """Bytes that the busiest rank sends in all rounds, divided by the bytes of the whole vector."""
        sent = np.zeros(self.size)
        for round_ in self.rounds:
            sent += round_.repeat * _sum_weights(round_.src, round_.sent, self.size)
        return float(sent.max(initial=0.0)) / self.slots

    def without_local_work(self) -> Rounds:
        """Return these rounds without local copies and additions: an earlier phase has put the input in place."""
        none = np.zeros(self.size)
        rounds = (replace(round_, local=none, local_added=none, unawaited=None) for round_ in self.rounds)
        return replace(self, rounds=tuple(rounds))

    def with_copy_at(self, rank: int) -> Rounds:
        """Return these rounds without local work, except that `rank` copies the whole vector next to its messages."""
        unawaited = np.zeros(self.size)
        unawaited[rank] = 2.0 * self.slots
        rest = self.without_local_work()
        first = [replace(round_, unawaited=unawaited) for round_ in rest.rounds[:1]]
        return replace(rest, rounds=(*first, *rest.rounds[1:]))

    def with_amounts_like(self, ranks: Sequence[int], like: Sequence[int]) -> Rounds:
        """Return these rounds with the same messages, but with other amounts of work for some ranks.

        Args:
            ranks: Ranks that get other amounts.
            like: For each of `ranks`, the rank whose amounts it gets.
        """
        targets, models = np.asarray(ranks, np.int64), np.asarray(like, np.int64)
        if not len(targets):
            return self
        return replace(self, rounds=tuple(_replace_amounts(round_, targets, models) for round_ in self.rounds))

    def copy_to_groups(self, groups: Sequence[Sequence[int]], size: int) -> Rounds:
        """Return the rounds of a larger group, in which several groups run these rounds at the same time.

        Args:
            groups: For each group, the ranks of the larger group that do the work of ranks 0, 1, ... of these rounds.
            size: Number of ranks of the larger group.
        """
        plays = np.asarray(groups, np.int64)
        rounds = tuple(_copy_round(round_, plays, size) for round_ in self.rounds)
        return Rounds(size=size, slots=self.slots, rounds=rounds)


def _replace_amounts(round_: Round, ranks: Ints, like: Ints) -> Round:
    """Return a round in which rank `ranks[i]` has the amounts of work of rank `like[i]`."""

    def replaced_amounts(amount: Floats) -> Floats:
        """Return (size,) an amount of all ranks, with those of `ranks` replaced."""
        amounts = amount.copy()
        amounts[ranks] = amount[like]
        return amounts

    return replace(round_, **_map_amounts(round_, replaced_amounts))


def _copy_round(round_: Round, plays: Ints, size: int) -> Round:
    """Return the round of a larger group in which several groups run `round_` at the same time.

    `plays` (groups, ranks of a group) has the ranks of the larger group that do the work of each group's ranks.
    """
    # Messages of all groups, in the order of their receivers.
    src, dst = plays[:, round_.src].reshape(-1), plays[:, round_.dst].reshape(-1)
    order = np.argsort(dst, kind="stable")

    def spread(amount: Floats) -> Floats:
        """Return (size,) an amount of all ranks of the larger group; 0 for ranks in no group."""
        amounts = np.zeros(size)
        amounts[plays] = amount
        return amounts

    def repeat_column(column: _Column | None) -> _Column | None:
        """Return a column of `round_` for the messages of all groups, sorted by receiver; None for None."""
        return None if column is None else np.tile(column, len(plays))[order]

    of_messages: dict[str, Any] = {
        name: repeat_column(getattr(round_, name)) for name in ("sent", "count", "far", "lane")
    }
    return replace(round_, src=src[order], dst=dst[order], **of_messages, **_map_amounts(round_, spread))


def _map_amounts(round_: Round, change: Callable[[Floats], Floats]) -> dict[str, Any]:
    """Return the amounts of a round by name, after a function from (size,) to (size,); without `unawaited` if None."""
    amounts = {name: change(getattr(round_, name)) for name in AMOUNTS}
    return amounts if round_.unawaited is None else {**amounts, "unawaited": change(round_.unawaited)}


def read_rounds(schedule: Schedule, moved: Floats | None = None) -> Rounds:
    """Return the rounds of a schedule.

    Accesses of memory count so: a copy reads and writes once; a reduction reads two operands and writes one result.
    Rows of a fan-out share their read; rows of a fan-in share the read and the write of their target. In collectives
    that reduce, local copies cost nothing, as an executor joins them with the reduction. The root of a broadcast or a
    scatter makes its own copy in parallel with its messages.

    Args:
        schedule: The table.
        moved: (rows,) Length of each row, in slots of the average block; None: the row's `count`.

    Cost: one pass over the table, then work for each different step only.
    """
    amounts: _Amounts = schedule.count if moved is None else moved
    unawaited = _find_unawaited_copies(schedule)
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
    """Return (steps,) whether each step has the same rows as the step before, apart from the slots.

    `moved` has the length of each row, `bounds` the first row of each step, then the number of rows.
    """
    length = np.diff(bounds)
    equal = np.zeros(schedule.steps, np.bool_)
    # Consecutive steps with equally many rows are compared as tables (steps, rows): each line with the line before.
    edges = np.flatnonzero(np.diff(length)) + 1
    grouped = bool((schedule.group >= 0).any())
    columns: list[_Amounts | NDArray[np.bool_]] = [schedule.src, schedule.dst, moved, schedule.op, unawaited]
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), schedule.steps], strict=True):
        if stop - start < 2:
            continue
        rows, shape = slice(bounds[start], bounds[stop]), (stop - start, -1)
        tables = [column[rows].reshape(shape) for column in columns]
        if grouped:
            tables.append(_renumber_groups(schedule.group[rows].reshape(shape)))
        equal[start + 1 : stop] = np.all([(table[1:] == table[:-1]).all(axis=1) for table in tables], axis=0)
    return equal


def _renumber_groups(group: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return (steps, rows) numbers of groups that begin with 0 in each step, so that steps can be compared."""
    most = np.iinfo(np.int32).max  # `initial` for steps without rows, such as between the slices of a pipeline
    least = np.where(group < 0, most, group).min(axis=1, keepdims=True, initial=most)
    return np.where(group < 0, -1, group - least)


def _read_round(schedule: Schedule, moved: _Amounts, unawaited: NDArray[np.bool_], rows: slice, repeat: int) -> Round:
    """Return the round of one step, which occurs `repeat` times in a row; `rows` are its rows in the table.

    `moved` has the length of each row of the table, in slots; `unawaited` has the rows of the step only.
    """
    size, group = schedule.size, schedule.group[rows]
    src, dst = schedule.src[rows].astype(np.int64), schedule.dst[rows].astype(np.int64)
    length = moved[rows].astype(np.float64)

    def slots_by_rank(rank: Ints, chosen: NDArray[np.bool_]) -> Floats:
        """Return (size,) the slots that the chosen rows move at each rank; `rank` is `src` or `dst`."""
        return _sum_weights(rank[chosen], length[chosen], size)

    is_message, is_addition = src != dst, schedule.op[rows] == Op.ADD
    stored, added, local_added = is_message & ~is_addition, is_message & is_addition, ~is_message & is_addition
    # Rows that read memory: of a fan-out only the first. Rows that read and write a sum: of a fan-in only the first.
    read = stored & ~_repeats_earlier_slot(group, schedule.sslot[rows], stored)
    summed = added & ~_repeats_earlier_slot(group, schedule.dslot[rows], added)
    local = 3.0 * slots_by_rank(dst, local_added)
    if not schedule.reduces:
        local += 2.0 * slots_by_rank(dst, ~is_message & ~is_addition & ~unawaited)
    # All rows from one rank to another, in one lane, are one message.
    has_lanes = schedule.algorithm in _APART
    lanes = schedule.channels if has_lanes else 1
    lane = schedule.channel[rows].astype(np.int64) if has_lanes else np.zeros(len(src), np.int64)
    # The key (receiver * size + sender) * lanes + lane sorts messages by receiver.
    key, message = np.unique(((dst * size + src) * lanes + lane)[is_message], return_inverse=True)
    ends = key // lanes
    return Round(
        repeat=repeat,
        passed_on=schedule.algorithm in _RINGS and bool(added.any()),
        src=ends % size,
        dst=ends // size,
        lane=key % lanes if has_lanes else None,
        sent=_sum_weights(message, length[is_message], len(key)),
        added=slots_by_rank(dst, added),
        local_added=slots_by_rank(dst, local_added),
        moving=slots_by_rank(src, read) + slots_by_rank(dst, stored),
        adding=slots_by_rank(src, added) + 2.0 * slots_by_rank(dst, summed),
        local=local,
        unawaited=2.0 * slots_by_rank(dst, unawaited) if unawaited.any() else None,
    )


def _find_unawaited_copies(s: Schedule) -> NDArray[np.bool_]:
    """Return (rows,) whether each row is a local copy that no message waits for. Only a root's copies can be such.

    A message waits for a copy if it reads a cell that the copy writes. For a copy of the input only messages of the
    same step count, because later messages find it finished.
    """
    unawaited = np.zeros(len(s), np.bool_)
    if s.collective not in _WITH_UNAWAITED:
        return unawaited
    copies = np.flatnonzero((s.src == s.dst) & (s.op == Op.MOVE))
    sends = np.flatnonzero((s.src != s.dst) & (s.sbuf != Buffer.IN))
    # The cells that copies write and messages read; for each cell, the index of its copy or message.
    written_cell, copy_of_cell = cells_in_ranges(
        cell_numbers(s, s.dst[copies], s.dbuf[copies], s.dslot[copies], shared=False), s.count[copies]
    )
    sent_cell, send_of_cell = cells_in_ranges(
        cell_numbers(s, s.src[sends], s.sbuf[sends], s.sslot[sends], shared=False), s.count[sends]
    )
    # Cell and step as one number, to compare both at once.
    written_at = written_cell * s.steps + s.step[copies][copy_of_cell]
    sent_in_same_step = np.isin(written_at, sent_cell * s.steps + s.step[sends][send_of_cell])
    copies_input = s.sbuf[copies][copy_of_cell] == Buffer.IN
    awaited = np.where(copies_input, sent_in_same_step, np.isin(written_cell, sent_cell))
    unawaited[copies] = np.bincount(copy_of_cell, awaited, len(copies)) == 0
    return unawaited


def _repeats_earlier_slot(
    group: NDArray[np.int32], slot: NDArray[np.int32], rows: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return (rows,) whether an earlier row has the same group and slot; False for rows that are not in `rows`.

    A row with a negative group is in no fan-out or fan-in, and repeats nothing.
    """
    grouped = np.flatnonzero(rows & (group >= 0))
    again = np.zeros(len(group), np.bool_)
    again[grouped] = True
    # Group and slot, both of 32 bits, in one number; the first row with each number repeats none.
    key = group[grouped].astype(np.int64) << 32 | slot[grouped]
    again[grouped[np.unique(key, return_index=True)[1]]] = False
    return again


def _sum_weights(index: NDArray[np.integer], weight: Floats, size: int) -> Floats:
    """Return (size,) for each index from 0 the sum of its weights, as floats."""
    # astype: `bincount` of an empty array returns integers, whatever the weights.
    return np.bincount(index, weight, size).astype(np.float64)

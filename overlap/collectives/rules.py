"""Rules that each row of a table must keep, whatever the other rows are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ScheduleError
from .schedule import COLUMNS, Buffer, Op, Schedule

Flags: TypeAlias = NDArray[np.bool_]

# Rows looked at together in a pass over the whole table: they stay in the second-level cache.
_SCAN_ROWS = 1 << 16

_LOCAL, _REMOTE = True, False
# The vocabulary: for each operation and kind of row, the (source buffer, target buffer) pairs that are allowed.
_REDUCING = {
    (Op.MOVE, _LOCAL): {("IN", "SCRATCH"), ("SCRATCH", "SCRATCH"), ("SCRATCH", "OUT")},
    (Op.MOVE, _REMOTE): {("IN", "SCRATCH"), ("SCRATCH", "SCRATCH"), ("OUT", "OUT")},
    (Op.ADD, _LOCAL): {("IN", "SCRATCH"), ("SCRATCH", "SCRATCH")},
    (Op.ADD, _REMOTE): {("IN", "SCRATCH"), ("SCRATCH", "SCRATCH")},
}
_ANYWHERE = {("IN", "OUT"), ("IN", "SCRATCH"), ("SCRATCH", "SCRATCH"), ("SCRATCH", "OUT"), ("OUT", "OUT")}
_MOVING = {(Op.MOVE, _LOCAL): _ANYWHERE, (Op.MOVE, _REMOTE): _ANYWHERE}


def _legal_combinations(words: Mapping[tuple[Op, bool], set[tuple[str, str]]]) -> Flags:
    """Return whether each combination (op, local, sbuf, dbuf) is in a vocabulary, as a flat table.

    The index of a combination is ((op * 2 + local) * 3 + sbuf) * 3 + dbuf.
    """
    everything = product(Op, (_REMOTE, _LOCAL), Buffer, Buffer)
    return np.array([(s.name, d.name) in words.get((op, local), ()) for op, local, s, d in everything])


_LEGAL = {True: _legal_combinations(_REDUCING), False: _legal_combinations(_MOVING)}


def check_header(schedule: Schedule) -> None:
    """Check the lengths and dtypes of a table's columns, and the ranges of `size`, `slots_per_block` and `root`.

    Raises:
        ScheduleError: A column has a wrong length or dtype, or one of the three fields is out of range.
    """
    for name, dtype in COLUMNS.items():
        column = getattr(schedule, name)
        if column.shape != (len(schedule),) or column.dtype != dtype:
            raise ScheduleError(
                f"column {name}: expected {np.dtype(dtype)} of length {len(schedule)}, "
                f"got {column.dtype} {column.shape}"
            )
    size, root, slots = schedule.size, schedule.root, schedule.slots_per_block
    for field, value, expected, is_valid in (
        ("size", size, "1 rank or more", size >= 1),
        ("slots_per_block", slots, "1 or more", slots >= 1),
        ("root", root, f"a rank from 0 to {size - 1}", 0 <= root < size),
    ):
        if not is_valid:
            raise ScheduleError(
                f"{schedule!r}: {field} is {value}, expected {expected}; correct the generator of the schedule"
            )


def phase_bounds(schedule: Schedule) -> NDArray[np.intp]:
    """Return the first row of each phase, then the number of rows. A step's local and remote rows are two phases.

    Raises:
        ScheduleError: A step is negative, or rows are not sorted by step with the local rows of a step first.
    """
    begins = [np.zeros(1, np.intp)]
    for start in range(0, len(schedule) - 1, _SCAN_ROWS):
        rows = slice(start, start + _SCAN_ROWS + 1)
        step, remote = schedule.step[rows], schedule.src[rows] != schedule.dst[rows]
        # A phase ends where the next row has another step or another kind, local or remote.
        at = np.flatnonzero((step[1:] != step[:-1]) | (remote[1:] != remote[:-1]))
        late = (step[at + 1] < step[at]) | ((step[at + 1] == step[at]) & remote[at])
        if late.any():
            what = "a place in the table that is not in order of steps, or a negative step"
            _raise_if_bad(schedule, start + 1 + int(at[late.argmax()]), late[late], what)
        begins.append(at + start + 1)
    _raise_if_bad(schedule, 0, schedule.step[:1] < 0, "a negative step")
    return np.concatenate([*begins, [len(schedule)]])


def check_rows(schedule: Schedule, start: int, stop: int) -> None:
    """Refuse rows with values out of range, or with a transfer that is not in the vocabulary.

    Args:
        schedule: The table.
        start: First row to check.
        stop: End of the rows to check; greater than `start`.

    Raises:
        ScheduleError: A row breaks a rule; the error names the first such row with rank, slot and step.
    """
    s, rows = schedule, slice(start, stop)
    src, dst, op, sbuf, dbuf = s.src[rows], s.dst[rows], s.op[rows], s.sbuf[rows], s.dbuf[rows]
    if max(int(sbuf.max()), int(dbuf.max())) > 2 or int(op.max()) > 1:
        _raise_if_bad(s, start, (sbuf > 2) | (dbuf > 2) | (op > 1), "an unknown buffer or operation")
    # Seen as unsigned, negative numbers are too large.
    if max(int(src.view(np.uint32).max()), int(dst.view(np.uint32).max())) >= s.size:
        bad = (src.view(np.uint32) >= s.size) | (dst.view(np.uint32) >= s.size)
        _raise_if_bad(s, start, bad, f"ranks outside 0..{s.size - 1}")
    _check_slots(s, start, s.sslot[rows], s.dslot[rows], s.count[rows])
    # Index of each row's combination in `_LEGAL`. Usually all rows have the same: then one look-up suffices.
    word = ((op * np.uint8(2) + (src == dst)) * np.uint8(3) + sbuf) * np.uint8(3) + dbuf
    legal = _LEGAL[s.reduces]
    if not (legal[word[0]] and (word == word[0]).all()):
        _raise_if_bad(s, start, ~legal[word], "a transfer that is not in the vocabulary")
    if int(s.channel[rows].min()) < 0 or int(s.group[rows].min()) < -1:
        _raise_if_bad(s, start, (s.channel[rows] < 0) | (s.group[rows] < -1), "a negative channel or group")
    if s.collective in ("broadcast", "scatter"):
        _raise_if_bad(s, start, (sbuf == Buffer.IN) & (src != s.root), "a source that only the root has")
    if s.collective in ("reduce", "gather"):
        _raise_if_bad(s, start, (dbuf == Buffer.OUT) & (dst != s.root), "a target that only the root has")


def _check_slots(
    schedule: Schedule, start: int, sslot: NDArray[np.int32], dslot: NDArray[np.int32], count: NDArray[np.int32]
) -> None:
    """Refuse rows with slots that do not exist, or with source and target slots that differ modulo `slots_per_block`.

    The columns have the rows from `start` on. Raises `ScheduleError`.
    """
    s, rows = schedule, slice(start, start + len(sslot))
    if min(int(count.min()) - 1, int(sslot.min()), int(dslot.min())) < 0:
        _raise_if_bad(s, start, (count < 1) | (sslot < 0) | (dslot < 0), "slots that do not exist")
    for buffer, last in ((s.sbuf[rows], sslot + count), (s.dbuf[rows], dslot + count)):
        # Compare with the smallest buffer first: only if a row goes beyond that, compare each row with its own buffer.
        if int(last.max()) > min(s.slots):
            _raise_if_bad(s, start, last > np.array(s.slots, np.int32)[buffer], "slots that do not exist")
    shift = sslot - dslot
    if shift.any():
        uneven = shift % np.int32(s.slots_per_block) != 0
        _raise_if_bad(s, start, uneven, "ends of different lengths (their slots differ modulo k)")


def _raise_if_bad(schedule: Schedule, start: int, bad: Flags, problem: str) -> None:
    """Raise a `ScheduleError` for the first bad row, if any; `bad` has the rows from `start` on.

    `problem` is text that follows "row 3 has", such as "a negative step".
    """
    if bad.any():
        row = start + int(bad.argmax())
        rank, slot, step = int(schedule.dst[row]), int(schedule.dslot[row]), int(schedule.step[row])
        raise ScheduleError(
            f"{schedule!r}: row {row} (step {step}, rank {schedule.src[row]} to {rank}, slot {slot}) has {problem}; "
            "correct the generator of the schedule",
            rank=rank,
            slot=slot,
            step=step,
        )

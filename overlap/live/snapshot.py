"""Snapshots of a process's ranks as bytes, for watchers elsewhere: its flight record, cut to what fits.

Instants are microseconds from when it was asked, on the clock of process 0: hosts do not agree on what time it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns, time_ns

import msgpack
import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..flight.reading import CallWords, RankTable, Record
from ..timeline.ranklist import listed, unlisted

_ROW = np.dtype("<i4")
_ROW_BYTES = 6 * _ROW.itemsize
_NEVER = -(2**31)  # for what has not happened, or is too long ago
_MOST = 2**31 - 1
_MOST_BYTES = 2**63 - 1
_HEAD_BYTES, _RANK_BYTES = 600, 48  # of the world and of each rank, beside the rows
_CALL_BYTES = 24  # of a call, beside its words
_WORD_CHARACTERS = 200  # of each that is believed; flight records keep fewer
_MOST_MEMBERS = 1 << 20  # of all groups together: 36 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """The ranks of one process at one moment."""

    job: str  # Name of the job
    script: str  # The program
    host: str  # Where the process runs
    pid: int  # The process
    world_size: int  # Ranks in the world
    processes: int  # Processes of the world
    age_s: int  # For how long the world has run
    ranks: Sequence[RankTable]  # Of the process; instants are nanoseconds on the clock of process 0
    calls: Mapping[int, CallWords]  # Words of calls, by number


class SnapshotWriter:
    """Writes snapshots of this process.

    Args:
        path: Of the flight record of this process.
        offset_ns: Returns what to add to `perf_counter_ns` for that of process 0.
    """

    def __init__(self, path: str | os.PathLike[str], offset_ns: Callable[[], int]) -> None:
        self._record, self._offset_ns = Record(path), offset_ns

    def __call__(self, room_bytes: int) -> bytes:
        """Return a snapshot of so many bytes at most; empty once the record is closed. Any thread."""
        try:
            said = self._said(room_bytes)
        except (ValueError, KeyError, TypeError, OverflowError):  # it was closed meanwhile, or is torn
            return b""
        return said if len(said) <= room_bytes else b""

    def _said(self, room_bytes: int) -> bytes:
        ranks = self._record.ranks()
        now_ns = perf_counter_ns()
        room = room_bytes - _HEAD_BYTES - _RANK_BYTES * len(ranks)
        calls = _Calls(self._record.calls, room // 2)
        rows = [(each, self._rows(each, now_ns, calls)) for each in ranks]
        most = max((room - calls.used_bytes) // _ROW_BYTES // max(len(rows), 1), 0)
        said: bytes = msgpack.packb(
            [
                self._start(),
                now_ns + self._offset_ns(),
                [
                    [
                        each.rank,
                        min(each.last_step, _MOST),
                        each.left,
                        each.cut or len(some) > most,
                        _newest(some, most),
                    ]
                    for each, some in rows
                ],
                calls.said,
            ],
            unicode_errors="backslashreplace",
        )
        return said

    def close(self) -> None:
        """End: later snapshots are empty."""
        self._record.close()

    def _start(self) -> list[object]:
        about = self._record.about
        texts = [text[-_WORD_CHARACTERS // 2 :] for text in (about.job, about.script, about.host)]
        age_s = max(time_ns() - about.started_ns, 0) // 10**9
        return [*texts, about.pid, about.world_size, about.processes, age_s]

    def _rows(self, of: RankTable, now_ns: int, calls: _Calls) -> NDArray[np.int32]:
        """Return operations in order of issue whose calls are in the snapshot."""
        issued, number, call, step, ended, started = of.operations[:, np.argsort(of.operations[0], kind="stable")]
        since_ns = self._record.since_ns + now_ns

        def instants(at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.where(at_ns > 0, np.clip((at_ns - since_ns) // 1000, _NEVER + 1, _MOST), _NEVER)

        rows = np.stack([
            instants(issued), number % (_MOST + 1), call % (_MOST + 1), np.clip(step, -1, _MOST),
            instants(np.abs(ended)), instants(started),
        ])  # fmt: skip
        known = calls.say(np.unique(call).tolist())
        return rows[:, np.isin(call, known)].astype(_ROW).T


def _newest(rows: NDArray[np.int32], most: int) -> bytes:
    return rows[len(rows) - min(most, len(rows)) :].tobytes()


class _Calls:
    """The calls of a snapshot, as far as there is room for their words."""

    def __init__(self, words: Mapping[int, CallWords], room_bytes: int) -> None:
        self._words, self._room_bytes = words, room_bytes
        self.said: list[list[object]] = []
        self.used_bytes = 0
        self._known: set[int] = set()

    def say(self, numbers: Sequence[int]) -> list[int]:
        """Add calls, the newest first, and return the numbers of calls in the snapshot."""
        for number in sorted(set(numbers) - self._known, reverse=True):
            one = self._words.get(number)
            if one is None:
                continue
            texts = [one.name, one.kind, one.key, listed(one.members), one.site]
            size = _CALL_BYTES + sum(len(text.encode()) for text in texts)
            if self.used_bytes + size <= self._room_bytes:
                self.used_bytes += size
                self.said.append([number % (_MOST + 1), *texts, min(one.nbytes, _MOST_BYTES)])
                self._known.add(number)
        return [number for number in numbers if number in self._known]


class Memory:
    """The members of the groups of a watched world: each group once, and no more than fit."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[int, ...]] = {}
        self._room = _MOST_MEMBERS

    def members(self, text: str, world_size: int) -> tuple[int, ...]:
        """Return the members of a group, or () if they are too many."""
        if text not in self._members:
            if len(text) > 2 * _WORD_CHARACTERS or min(world_size, self._room) < 1:
                return ()
            found = self._members[text] = unlisted(text, min(world_size, self._room)) if text else ()
            self._room -= len(found) + 1
        return self._members[text]


def read_snapshot(blob: bytes, memory: Memory) -> ProcessSnapshot | None:
    """Read a snapshot; None if it is empty.

    Args:
        blob: Not trusted.
        memory: The watcher's memory of groups.

    Raises:
        UsageError: It is no snapshot.
    """
    if not blob:
        return None
    try:
        start, now_ns, ranks, calls = msgpack.unpackb(blob)
        job, script, host, pid, size, processes, age_s = start
        return ProcessSnapshot(
            job=_text(job), script=_text(script), host=_text(host), pid=int(pid), world_size=int(size),
            processes=int(processes), age_s=int(age_s),
            ranks=[_rank(int(now_ns), *each) for each in ranks],
            calls=dict(_call(memory, int(size), *each) for each in calls),
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError, AttributeError, msgpack.UnpackException) as error:
        raise UsageError(f"a process says what no process of this version does: {type(error).__name__}") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return "".join(letter if letter.isprintable() else "?" for letter in value[:_WORD_CHARACTERS])


def _rank(now_ns: int, rank: int, step: int, left: bool, cut: bool, rows: bytes) -> RankTable:
    table = np.frombuffer(rows, _ROW).reshape(-1, 6).T.astype(np.int64)
    for at in (0, 4, 5):
        table[at] = np.where(table[at] == _NEVER, 0, table[at] * 1000 + now_ns)
    return RankTable(int(rank), int(step), bool(left), table[:, table[0] > 0], cut=bool(cut))


def _call(
    memory: Memory, size: int, number: int, name: str, kind: str, key: str, members: str, site: str, nbytes: int
) -> tuple[int, CallWords]:
    words = CallWords(
        name=_text(name), kind=_text(kind), key=_text(key), members=memory.members(_text(members), size),
        site=_text(site), nbytes=max(int(nbytes), 0),
    )  # fmt: skip
    return int(number), words

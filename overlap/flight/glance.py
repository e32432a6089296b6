"""What the record of a process that runs says just now, as arrays: a look at it costs the watcher little, and the
process nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..timeline.ranklist import unlisted
from .layout import (
    ENDING_AT,
    RANK,
    RECORDS,
    RECORDS_BYTES,
    START_AT,
    TEXT_LIMIT_BYTES,
    call_of,
    rank_at,
    ranks_of,
    read_text,
    records_at,
)

_NUMBERS = ("unix_ns", "clock_ns", "pid", "process", "processes", "world_size")


@dataclass(frozen=True, slots=True)
class CallWords:
    """What all operations of one call have in common."""

    name: str  # As given by the caller
    kind: str  # "compute", or what else it is
    key: str  # What names the place where they meet, the same on all members
    members: tuple[int, ...]  # World ranks; () if they are not known
    site: str  # Where it was called
    nbytes: int  # Of each; 0 if that is not known


@dataclass(frozen=True, slots=True)
class RankGlance:
    """What is known of one rank; instants are nanoseconds since 1970."""

    rank: int  # World rank
    step: int  # In which it is or was last, or -1
    left: bool  # Whether its program has finished
    # (6, n): issued, number, call, step (-1: none), ended (0: not yet), started (0: not known).
    operations: NDArray[np.int64]
    cut: bool = False  # Whether some that were issued before these are not known any more


class Watched:
    """The record of a process that runs.

    Attributes:
        path: The file.
        start: What is known of the world since its start.
        calls: What is known of calls, by their numbers.
        since_ns: What its instants, nanoseconds since 1970, are ahead of its `perf_counter_ns`.

    Raises:
        UsageError: It cannot be read, or is none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.calls = os.fspath(path), dict[int, CallWords]()
        try:
            with open(path, "rb") as file:
                self._memory = mmap(file.fileno(), 0, access=ACCESS_READ)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        except ValueError:  # nothing is in it
            raise UsageError(f"{path}: is no flight record") from None
        try:
            self._ranks = ranks_of(self._memory)
        except ValueError as error:
            self.close()
            raise UsageError(f"{path}: {error}") from None
        try:
            self.start: Mapping[str, object] = json.loads(self._text(START_AT, TEXT_LIMIT_BYTES))
            numbers = {name: int(str(self.start[name])) for name in _NUMBERS}
            self.since_ns = numbers["unix_ns"] - numbers["clock_ns"]
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise UsageError(f"{path}: is damaged: {type(error).__name__}: {error}") from None

    @property
    def has_ended(self) -> bool:
        """Whether it says how the world ended."""
        return bool(self._text(ENDING_AT, TEXT_LIMIT_BYTES))

    def ranks(self) -> list[RankGlance]:
        """Return what its ranks have issued last, in no order."""
        found = []
        for index in range(self._ranks):
            rank, step, left, _ = RANK.unpack_from(self._memory, rank_at(index))
            begin = records_at(index, self._ranks)
            table = np.frombuffer(self._memory[begin : begin + RECORDS_BYTES], np.int64).reshape(RECORDS, 6).T
            known = self._known(table[:, table[0] > 0])
            step = max(step, int(known[3].max(initial=-1)))
            found.append(RankGlance(rank, step, bool(left), known, cut=len(known[0]) == RECORDS))
        return found

    def _known(self, table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return operations on the clock of all machines, with zeros for what has not happened."""
        issued, number, call, step, ended, started = table
        for each in set(np.unique(call).tolist()) - self.calls.keys():
            self._learn(each)
        ended = np.where(np.abs(ended) > issued, np.abs(ended) + self.since_ns, 0)
        started = np.where(started > issued, started + self.since_ns, 0)
        return np.stack([issued + self.since_ns, number, call, step, ended, started])

    def _learn(self, number: int) -> None:
        try:
            there, text = call_of(self._memory, number)
            if there != number:
                return  # it is being written, or others have taken its place
            told = json.loads(text)
            self.calls[number] = CallWords(
                name=str(told.get("name", "")), kind=str(told.get("kind", "")), key=str(told.get("key", "")),
                members=unlisted(told["members"]) if told.get("members") else (), site=str(told.get("site", "")),
                nbytes=int(told.get("nbytes") or 0),
            )  # fmt: skip
        except (ValueError, AttributeError):  # torn: the next look finds it
            return

    def _text(self, at: int, limit_bytes: int) -> str:
        return read_text(self._memory, at, limit_bytes)

    def close(self) -> None:
        """Give it back."""
        self._memory.close()

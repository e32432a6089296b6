"""Desynchronised ranks in dumps: operations that differ, ranks that are behind, ranks that wait in a circle. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .dumps import Dump, DumpedCall
from .waits import stall_from_waits

Group = tuple[str, tuple[int, ...]]
"""Name and members: groups that were split off have one name on all ranks. Without members where no dump has them."""


@dataclass(frozen=True)
class Mismatch:
    """An operation of a group that some ranks called differently."""

    calls: Mapping[int, DumpedCall]  # By rank
    odd: Sequence[int]  # The minority; all ranks if there is none
    differs: str  # "operations", "sizes" or "dtypes"
    swapped: bool  # Whether both sides call both operations, in different orders


@dataclass(frozen=True)
class Job:
    """The dumps of one run, by rank."""

    dumps: Mapping[int, Dump]

    @cached_property
    def missing(self) -> list[int]:
        """Ranks without a dump: ranks are numbered from 0, and groups list their members."""
        known = {rank for dump in self.dumps.values() for ranks in dump.groups.values() for rank in ranks}
        return sorted((known | set(range(max(self.dumps) + 1))) - set(self.dumps))

    @cached_property
    def calls(self) -> dict[Group, dict[int, dict[int, list[DumpedCall]]]]:
        """Collectives by group, number and rank; several calls of a rank have one number if they were coalesced."""
        table: dict[Group, dict[int, dict[int, list[DumpedCall]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for dump in self.dumps.values():
            for call in dump.calls:
                if call.peer is None and not call.is_message:
                    numbers = table.setdefault(self.group(call), {})
                    numbers.setdefault(call.number, {}).setdefault(call.rank, []).append(call)
        return table

    def group(self, call: DumpedCall) -> Group:
        """Return the group of an operation."""
        key = call.rank, call.group
        if key not in self._groups:
            self._groups[key] = self._find_group(call)
        return self._groups[key]

    @cached_property
    def _groups(self) -> dict[tuple[int, str], Group]:
        return {}

    def _find_group(self, call: DumpedCall) -> Group:
        """Return the name and members of an operation's group; the default group has all ranks if it is not listed."""
        dump = self.dumps[call.rank]
        listed = dump.groups.get(call.group, ())
        if not listed and (call.group == "0" or dump.names.get(call.group) == "default_pg"):
            listed = tuple(sorted({*self.dumps, *self.missing}))
        return call.group, listed

    def name(self, call: DumpedCall) -> str:
        """Return the name of an operation's group for people."""
        description = self.dumps[call.rank].names.get(call.group, "")
        return f"group {description if description not in ('', 'undefined') else call.group!r}"

    def describe(self, call: DumpedCall) -> str:
        """Return an operation with its group and its line of the program, for messages."""
        return f"{call} of {self.name(call)}{call.place}"

    def last(self, rank: int) -> DumpedCall | None:
        """Return the unfinished operation in which a rank waits, else its last one; None if there is none."""
        if rank not in self.dumps:
            return None
        pending = self.pending(rank)
        blocking = next((call for call in pending if self.absent(call)), pending[0] if pending else None)
        return blocking or max(self.dumps[rank].calls, key=lambda call: call.created_ns, default=None)

    def pending(self, rank: int) -> list[DumpedCall]:
        """Return the operations of a rank that have not ended, in order."""
        return self._pending[rank]

    @cached_property
    def _pending(self) -> dict[int, list[DumpedCall]]:
        """Unfinished operations of each rank, in the order of issue."""
        return {
            rank: sorted((call for call in dump.calls if not call.done), key=lambda call: call.created_ns)
            for rank, dump in self.dumps.items()
        }

    def absent(self, call: DumpedCall) -> list[int]:
        """Return the members of an operation's group that have not called it, ascending."""
        if call.is_message:
            return [] if call.peer is None or self._has_counterpart(call) else [call.peer]
        group = self.group(call)
        members = group[1] or {rank for by_rank in self.calls.get(group, {}).values() for rank in by_rank}
        return [rank for rank in sorted(members) if self._newest_number(group, rank) < call.number]

    @cached_property
    def _newest_numbers(self) -> dict[tuple[Group, int], int]:
        """The number of the last collective that a rank has called in a group, by group and rank."""
        newest: dict[tuple[Group, int], int] = {}
        for group, numbers in self.calls.items():
            for number, by_rank in numbers.items():
                for rank in by_rank:
                    newest[group, rank] = max(number, newest.get((group, rank), -1))
        return newest

    def _newest_number(self, group: Group, rank: int) -> int:
        """Return the number of a rank's last collective in a group, -1 if there is none."""
        return self._newest_numbers.get((group, rank), -1)

    def _has_counterpart(self, call: DumpedCall) -> bool:
        """Whether the peer of a message has an unfinished message that matches it."""
        return self.counterpart(call) is not None

    def counterpart(self, call: DumpedCall) -> DumpedCall | None:
        """Return the peer's end of an unfinished message: the k-th send to a rank matches its k-th receive."""
        peer = self.dumps.get(-1 if call.peer is None else call.peer)
        own = [each for each in self.pending(call.rank) if (each.kind, each.peer) == (call.kind, call.peer)]
        kind = "recv" if call.kind == "send" else "send"
        others = self.pending(peer.rank) if peer is not None else []
        there = [each for each in others if (each.kind, each.peer) == (kind, call.rank) and each.group == call.group]
        place = own.index(call)
        return there[place] if place < len(there) else None

    @cached_property
    def awaits(self) -> dict[int, list[int]]:
        """The ranks that each rank waits for, in its first operation which some members have not called."""
        waits: dict[int, list[int]] = {rank: [] for rank in self.missing}
        for rank in self.dumps:
            absences = (self.absent(call) for call in self.pending(rank))
            waits[rank] = next(([other for other in ranks if other != rank] for ranks in absences if ranks), [])
        return waits

    def circle(self) -> list[int]:
        """Return ranks that wait for each other in a circle; [] if there is no circle."""
        stall = stall_from_waits(self.awaits)
        return stall.circle if stall is not None else []

    def mismatches(self) -> list[Mismatch]:
        """Return the first mismatch of each group, unfinished ones first, then the oldest."""
        return sorted([*filter(None, map(self._find_mismatch, self.calls)), *self._message_mismatches()], key=_urgency)

    def _find_mismatch(self, group: Group) -> Mismatch | None:
        """Return the first collective of a group that ranks called differently; None if there is none."""
        for number in sorted(self.calls[group]):
            for calls in _each_position(self.calls[group][number]):
                if (differs := _differing_property(list(calls.values()))) and (
                    mismatch := self._blame_minority(group, calls, differs)
                ):
                    return mismatch
        return None

    def _blame_minority(self, group: Group, calls: Mapping[int, DumpedCall], differs: str) -> Mismatch:
        """Return the mismatch of some calls: the ranks outside the largest set of equal calls are the odd ones."""
        camps: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, call in calls.items():
            camps[_signature(call)].append(rank)
        largest = max(camps.values(), key=len)
        ties = sum(len(camp) == len(largest) for camp in camps.values()) > 1
        odd = sorted(calls if ties else set(calls) - set(largest))
        first, second = (calls[min(camp)] for camp in list(camps.values())[:2])
        swapped = self._calls_later(group, first, second) and self._calls_later(group, second, first)
        return Mismatch(calls, odd, differs, swapped)

    def _calls_later(self, group: Group, call: DumpedCall, other: DumpedCall) -> bool:
        """Whether the rank of `call` later issues an operation like `other`."""
        numbers = self.calls[group]
        later = (each for number in numbers if number > call.number for each in numbers[number].get(call.rank, ()))
        return any(_signature(each) == _signature(other) for each in later)

    def _message_mismatches(self) -> Iterator[Mismatch]:
        """Yield the unfinished messages whose two ends have different sizes or dtypes."""
        for rank in self.dumps:
            for call in self.pending(rank):
                if call.kind == "send" and (other := self.counterpart(call)) is not None:
                    differs = "sizes" if call.counts[0] != other.counts[1] else ""
                    differs = differs or ("dtypes" if call.dtypes[0] != other.dtypes[1] else "")
                    if differs:
                        yield Mismatch({rank: call, other.rank: other}, sorted((rank, other.rank)), differs, False)


def _each_position(by_rank: Mapping[int, list[DumpedCall]]) -> Iterator[dict[int, DumpedCall]]:
    """Yield, for each position in a group of coalesced calls, the calls of all ranks there."""
    for position in range(max(map(len, by_rank.values()))):
        yield {rank: calls[position] for rank, calls in by_rank.items() if position < len(calls)}


def _urgency(mismatch: Mismatch) -> tuple[bool, int]:
    """Return the sort key of a mismatch: unfinished ones first, then the oldest."""
    calls = mismatch.calls.values()
    return all(call.done for call in calls), min(call.created_ns for call in calls)


def _signature(call: DumpedCall) -> tuple[object, ...]:
    """Return the properties of a call that must be equal on all ranks."""
    uneven = call.kind.startswith(("all_to_all", "alltoall")) or "_v" in call.kind
    given = None if uneven or call.kind == "scatter" else call.counts[0]
    made = None if uneven or call.kind == "gather" else call.counts[1]
    types = "" if call.kind in ("scatter", "gather") else call.dtypes[1] or call.dtypes[0]
    return call.kind, given, made, types


def _differing_property(calls: Sequence[DumpedCall]) -> str:
    """Return the property in which calls differ: "operations", "sizes" or "dtypes"; "" if in none."""
    signatures = [_signature(call) for call in calls]
    if len({kind for kind, *_ in signatures}) > 1:
        return "operations"
    if len({(given, made) for _, given, made, _ in signatures}) > 1:
        return "sizes"
    return "dtypes" if len({types for *_, types in signatures}) > 1 else ""

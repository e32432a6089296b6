"""Mapping of the ranks of a cluster, and of their groups and peers, to recorded ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...errors import UsageError
from ...timeline.measure.meetings import PAIRED
from .tape import Tape

WORLD = "world"
_DATA_PARALLEL = re.compile(r"(?:^|[^a-z]|x)(?:dp|ddp|fsdp|hsdp|data|replicas?)(?:$|[^a-z]|x)")
"""Names of data parallel groups; in the name of a group of a mesh, its axes are joined by an x.

Only a guess, for traces without operations that carry buckets: older ones, and those of programs that sum their
gradients themselves.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Mapping of a cluster's ranks to recorded ranks: a grid of outer x grown x inner; the middle axis grows."""

    recorded: int  # Ranks of the trace
    ranks: int  # Number of ranks of the cluster
    degree: int  # Size of the growing axis in the trace
    stride: int  # Between its ranks
    names: frozenset[str]  # Names of the groups that grow; the group of all ranks always does
    # For each rank of the trace that was not recorded, a recorded rank that did alike.
    stand_ins: Mapping[int, int]

    @property
    def grown_size(self) -> int:
        """Size of the growing axis on the cluster."""
        return self.degree * self.ranks // self.recorded

    def recorded_rank(self, rank: int) -> int:
        """Return the recorded rank whose program a rank of the cluster plays."""
        outer, place, inner = self._coordinates(rank, self.grown_size)
        traced = (outer * self.degree + place % self.degree) * self.stride + inner
        return self.stand_ins.get(traced, traced)

    def group(self, rank: int, name: str, members: Sequence[int]) -> tuple[int, ...]:
        """Return the group of a rank of the cluster that corresponds to a group of its recorded rank."""
        members = self._shift_members(rank, members)
        if self.grows(name, members):
            copies = range(-(-self.grown_size // self.degree))
            return tuple(
                sorted(
                    {at for copy in copies for each in members if (at := self._rank_in_copy(each, copy)) is not None}
                )
            )
        ranks = [self._rank_in_copy(each, self._copy_number(rank)) for each in members]
        assert None not in ranks  # `map_growth` has checked that
        return tuple(each for each in ranks if each is not None)

    def peer(self, rank: int, recorded: int) -> int:
        """Return the peer of a rank of the cluster that corresponds to the peer of its recorded rank."""
        peer = self._rank_in_copy(recorded, self._copy_number(rank))
        assert peer is not None
        return peer

    def grows(self, name: str, members: Sequence[int]) -> bool:
        """Return whether a recorded group has more ranks on a larger cluster."""
        return name in self.names or (name == WORLD and len(members) == self.recorded)

    def place(self, recorded: int) -> int:
        """Return the index of a recorded rank on the axis that a larger cluster lengthens, such as data parallelism."""
        return self._coordinates(recorded, self.degree)[1]

    def _copy_number(self, rank: int) -> int:
        """Return the copy of the growing axis in which a rank of the cluster is, from 0."""
        return self._coordinates(rank, self.grown_size)[1] // self.degree

    def _coordinates(self, rank: int, size: int) -> tuple[int, int, int]:
        """Return (outer, place, inner) of a rank in a grid whose middle axis has this size."""
        return rank // (self.stride * size), rank // self.stride % size, rank % self.stride

    def _rank_in_copy(self, recorded: int, copy: int) -> int | None:
        """Return the rank of the cluster for a recorded rank in one copy of the axis; None beyond its end."""
        outer, place, inner = self._coordinates(recorded, self.degree)
        place += copy * self.degree
        return None if place >= self.grown_size else (outer * self.grown_size + place) * self.stride + inner

    def _shift_members(self, rank: int, members: Sequence[int]) -> Sequence[int]:
        """Return the group of a rank that was not recorded, from the group of the rank that stands in for it."""
        outer, place, inner = self._coordinates(rank, self.grown_size)
        absent = (outer * self.degree + place % self.degree) * self.stride + inner
        if absent not in self.stand_ins:
            return members
        step = members[1] - members[0] if len(members) > 1 else 1
        begin = absent - absent // step % len(members) * step
        return tuple(begin + number * step for number in range(len(members)))


def map_growth(tape: Tape, ranks: int, names: Sequence[str] = ()) -> Growth:
    """Return the mapping of the ranks of a cluster to those of a recorded run.

    Groups of data parallel ranks grow or shrink with the cluster; all others keep their sizes. The groups that grow are
    given by name, or are those whose operations carry buckets of gradients. Of a trace that has no buckets they are the
    groups whose name says `dp`, `fsdp` or `data`, or else the group of all ranks.

    Args:
        tape: The recorded run.
        ranks: The number of ranks of the cluster.
        names: Names of the groups that grow.

    Raises:
        UsageError: The groups that grow are not known, or cannot grow to so many ranks.
    """
    groups = _collective_groups(tape)
    stand_ins = _find_stand_ins(tape, groups)
    growing = _choose_growing(tape, ranks, groups, names)
    rows = [members for name, members in groups if name in growing]
    degree, stride = _growth_axis(rows, tape.world_size)
    if ranks * degree % tape.world_size or not ranks:
        unit = tape.world_size // degree
        raise UsageError(f"ranks: expected a multiple of {unit}, which is what is there once, got {ranks}")
    growth = Growth(
        recorded=tape.world_size, ranks=ranks, degree=degree, stride=stride, names=growing, stand_ins=stand_ins
    )
    _check_whole(growth, groups)
    return growth


def _collective_groups(tape: Tape) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, ranks) of all groups that have collectives."""
    collective = (move for moves in tape.moves.values() for move in moves if move.kind == "collective")
    return sorted({(move.info.group, move.info.ranks) for move in collective})


def _choose_growing(
    tape: Tape, ranks: int, groups: Iterable[tuple[str, tuple[int, ...]]], names: Sequence[str]
) -> frozenset[str]:
    """Return the names of the groups that grow: those given, or of buckets, or with data parallel names."""
    sizes: dict[str, set[int]] = {}
    for name, members in groups:
        sizes.setdefault(name, set()).add(len(members))
    if unknown := [name for name in names if name not in sizes]:
        raise UsageError(
            f"--grow: {unknown[0]!r} is no group of the trace; there are {_format_group_sizes(sizes) or 'none'}"
        )
    if not names and (carriers := _bucket_groups(tape)):
        return carriers - {WORLD}
    growing = frozenset(names or (name for name in sizes if _DATA_PARALLEL.search(name.lower())))
    if not growing and ranks != tape.world_size and sizes.keys() - {WORLD} and not _moves_most_bytes(tape):
        raise UsageError(
            f"--grow: name the groups that have more ranks on a larger cluster; there are "
            f"{_format_group_sizes(sizes)}, and the trace is of {tape.world_size} ranks"
        )
    return growing


def _bucket_groups(tape: Tape) -> frozenset[str]:
    """Return the names of groups whose collectives carry gradient buckets, as the trace marks them."""
    moves = (move for moves in tape.moves.values() for move in moves)
    return frozenset(move.info.group for move in moves if move.kind == "collective" and move.span.role == "bucket")


def _format_group_sizes(sizes: Mapping[str, set[int]]) -> str:
    """Return the names of groups with their sizes, for messages."""
    return ", ".join(f"{name!r} (of {'/'.join(map(str, sorted(members)))})" for name, members in sorted(sizes.items()))


def _moves_most_bytes(tape: Tape) -> bool:
    """Return whether groups of all ranks move half of the bytes or more: then all ranks are data parallel."""
    total = of_world = 0
    for moves in tape.moves.values():
        for move in moves:
            if move.kind == "collective":
                total += move.info.nbytes
                of_world += move.info.nbytes if len(move.info.ranks) == tape.world_size else 0
    return 2 * of_world >= total


def _growth_axis(rows: Sequence[tuple[int, ...]], world_size: int) -> tuple[int, int]:
    """Return (degree, stride) of the growing axis: that of the largest groups, or one copy of the whole run."""
    if rows:
        degree = max(map(len, rows))
        largest = [tuple(sorted(row)) for row in rows if len(row) == degree]
        stride = largest[0][1] - largest[0][0] if degree > 1 else 1
        if world_size % (degree * stride) == 0 and all(
            row == tuple(row[0] + place * stride for place in range(degree)) and row[0] // stride % degree == 0
            for row in largest
        ):
            return degree, stride
        return 1, world_size
    return 1, world_size


def _find_stand_ins(tape: Tape, groups: Iterable[tuple[str, tuple[int, ...]]]) -> dict[int, int]:
    """Return a recorded rank for each rank without a trace; refuse if its groups cannot be derived."""
    missing = sorted(set(range(tape.world_size)) - tape.moves.keys())
    if not missing:
        return {}
    reason = f"only {len(tape.moves)} of {tape.world_size} ranks are recorded"
    paired = [span for moves in tape.moves.values() for span in (m.span for m in moves if m.kind != "compute")]
    if any(span.info is not None and span.info.op in PAIRED for span in paired):
        raise UsageError(f"{reason}, and they send messages to each other: give the files of all ranks")
    for name, members in groups:
        steps = {after - before for before, after in pairwise(members)}
        if len(steps) > 1 or min(steps, default=1) < 1:
            raise UsageError(f"{reason}, and nobody knows the groups like {name!r} of the others: give all files")
    recorded = sorted(tape.moves)
    return {rank: max((each for each in recorded if each < rank), default=recorded[0]) for rank in missing}


def _check_whole(growth: Growth, groups: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Check that no group that keeps its size is cut by the end of the growing axis."""
    rest = growth.grown_size % growth.degree
    for name, members in groups if rest else ():
        beyond = [each for each in members if growth.place(each) >= rest]
        if beyond and not growth.grows(name, members) and len(beyond) < len(members):
            raise UsageError(
                f"ranks: groups {name!r} of {len(members)} ranks keep their size; expected a multiple of "
                f"{growth.recorded} ranks, got {growth.ranks}"
            )

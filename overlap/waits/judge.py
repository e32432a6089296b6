"""The verdict on ranks that wait: which rank is the cause, and whether the others can ever go on. Pure.

The first kind that applies is the verdict, by cause and not by time: an error, an ended process, calls that differ,
ranks that wait for each other, a rank that has not come. `wording.sentence` has each kind as text.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from enum import StrEnum
from functools import cached_property
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from .ends import End, EndState, Meeting, RankView, Seen


class Kind(StrEnum):
    """Kind of a verdict; in all but the last four no waiting rank can ever go on."""

    FAILED = "failed"  #: A rank has an error of its own
    DEAD = "dead"  #: A process has ended without a word
    MISMATCH = "mismatch"  #: Ranks have called one operation differently
    SWAPPED = "swapped"  #: Ranks have called two operations of a group in different orders
    SKIPPED = "skipped"  #: A rank has left a call out
    TAGS = "tags"  #: A receive waits, and the message has another tag
    CYCLE = "cycle"  #: Ranks wait for each other
    LEFT = "left"  #: A rank has finished its program without the operation
    UNMATCHED = "unmatched"  #: A rank has finished its program without its end of a message
    LATE = "late"  #: A rank has not come yet
    MISSING = "missing"  #: The rank that others wait for has no record
    WIRE = "wire"  #: All ranks have come, and an operation has not ended
    NOBODY = "nobody"  #: No rank waits for another

    @property
    def is_certain(self) -> bool:
        """Whether no waiting rank can ever go on."""
        return self not in (Kind.LATE, Kind.MISSING, Kind.WIRE, Kind.NOBODY)


class WaitVerdict(Struct, frozen=True, kw_only=True):
    """Why ranks wait."""

    kind: Kind
    culprits: tuple[int, ...] = ()  # World ranks, ascending; of a cycle its members
    waiters: tuple[int, ...] = ()  # Ranks that wait for the culprits in `end`; the other side of a mismatch
    end: End | None = None  # The operation in which they wait
    ends: tuple[End, ...] = ()  # Operations that differ; the skipped one and that called instead; those of a cycle
    others: tuple[End, ...] = ()  # Operations in which ranks outside of a cycle wait
    differs: str = ""  # "operations", "sizes", "dtypes", "roots" or "arguments"
    view: RankView | None = None  # The first culprit
    may_end: bool = False  # Whether ranks of a cycle may go on: a deadline, or another task of theirs
    doubtful: tuple[int, ...] = ()  # Ranks of the verdict with views that contradict each other
    unrecorded: str = ""  # What the sources do not record
    missing: tuple[int, ...] = ()  # Ranks without a record
    earlier: WaitVerdict | None = None  # Calls that differed before, and that have ended

    @property
    def is_certain(self) -> bool:
        """Whether no waiting rank can ever go on."""
        return self.kind.is_certain and not self.may_end and not self.doubtful


def judge(views: Iterable[RankView], size: int) -> WaitVerdict:
    """Return the verdict on a world.

    Args:
        views: Views of ranks; of several views of one rank the newest counts.
        size: Number of ranks; those without a view have no record.

    Cost: one pass over all ends, and one over the members of each operation in which a rank waits.
    """
    world = WaitingWorld(views, size)
    differing = _differences(world)
    current = next((each for each in differing if _concerns_waits(each)), None)
    found = _failure(world) or current or _cycle(world, world.stuck) or _absence(world) or _loose_cycle(world)
    earlier = next((each for each in differing if each is not current), None)
    if found is None:
        found, earlier = earlier or _unexplained(world), None
    unrecorded = next((view.unrecorded for view in world.views.values() if view.unrecorded), "")
    missing = tuple(rank for rank, view in world.views.items() if view.seen is Seen.NO_RECORD)
    doubtful = tuple(rank for rank in found.culprits if rank in world.doubtful)
    return replace(found, doubtful=doubtful, unrecorded=unrecorded, missing=missing, earlier=earlier)


class WaitingWorld:
    """Views by rank, and their ends by where they meet.

    Attributes:
        views: View of each rank; ranks without one have no record.
        doubtful: Ranks with views that contradict each other.
        at: Ends by key, role ("" of collectives, else "send" or "recv"), number and rank.
        calls: Collectives of each rank by key, in the order of issue.
        waits: Operations in which each blocked rank waits: those that it awaits, else its oldest one.
    """

    def __init__(self, views: Iterable[RankView], size: int) -> None:
        self.views: dict[int, RankView] = {}
        self.doubtful: set[int] = set()
        for view in views:
            other = self.views.setdefault(view.rank, view)
            if other is not view:
                self.views[view.rank] = max(other, view, key=_newest_ns)
                self.doubtful.update({view.rank} if other.seen is not view.seen else ())
        ends = [end for view in self.views.values() for end in view.ends]
        named = {id(ranks): ranks for end in ends for ranks in (end.call.members, end.lacks) if ranks}
        for rank in {*range(size), *chain.from_iterable(named.values())}:
            self.views.setdefault(rank, RankView(rank=rank, seen=Seen.NO_RECORD))
        self.views = dict(sorted(self.views.items()))
        self.at: dict[tuple[str, str, int], dict[int, End]] = defaultdict(dict)
        self._newest: dict[tuple[str, int, str], int] = {}
        self._absent: dict[Meeting, tuple[int, ...]] = {}
        self.calls: dict[str, dict[int, list[End]]] = {}
        at, newest = self.at, self._newest
        for view in self.views.values():
            for end in view.ends:
                call, seq, rank = end.call, end.seq, end.rank
                role = call.op if call.is_message else ""
                if call.meets:
                    at[call.key, role, seq][rank] = end
                    if seq > newest.get((call.key, rank, role), -1):
                        newest[call.key, rank, role] = seq
                    if not role:
                        self.calls.setdefault(call.key, {}).setdefault(rank, []).append(end)
        self.waits: dict[int, list[End]] = {
            rank: ends
            for rank, view in self.views.items()
            if view.seen is Seen.WAITS and (ends := self.lacking_ends(view))
        }

    def lacking_ends(self, view: RankView) -> list[End]:
        """Return the operations in which a rank waits for others; [] if it can go on by itself."""
        arrived = [end for end in view.ends if end.is_open and end.has_arrived and end.call.meets]
        awaited = [end for end in arrived if end.awaited]
        if not awaited and any(end.awaited is False for end in arrived):
            awaited = arrived  # the program awaits something that follows from one of them
        lacking = [end for end in awaited or arrived if self.absent(end)]
        if awaited:
            return lacking if len(lacking) == len(awaited) else []
        return lacking[:1]

    def absent(self, end: End) -> tuple[int, ...]:
        """Return the world ranks whose ends of an operation are absent, ascending.

        What its rank knows of them may be old: their own views count.
        """
        call = end.call
        other = {"send": "recv", "recv": "send"}.get(call.op, "")
        if end.lacks is not None:
            return tuple(rank for rank in end.lacks if not self._has_come(rank, other, end))
        if call.any_source:  # it meets no send until it has chosen one
            return tuple(rank for rank in call.members or self.views if rank != end.rank)
        if call.is_message:
            peers = call.members if call.peer is None else (call.peer,)
            return () if any(self._has_come(rank, other, end) for rank in peers) else peers
        if end.meeting not in self._absent:
            members = call.members or self.calls[call.key]
            self._absent[end.meeting] = tuple(rank for rank in members if not self._has_come(rank, "", end))
        absent = self._absent[end.meeting]  # one object for all that wait, which comparisons are quick with
        return tuple(rank for rank in absent if rank != end.rank) if end.rank in absent else absent

    def _has_come(self, rank: int, role: str, end: End) -> bool:
        own = self.at[end.call.key, role, end.seq].get(rank)
        if own is not None:
            return own.has_arrived or not own.is_open
        return self._newest.get((end.call.key, rank, role), -1) > end.seq

    def all_called(self, end: End) -> bool:
        """Whether all known members have called an operation, also those that have not arrived at it."""
        return all(rank in self.at[end.call.key, "", end.seq] for rank in self.absent(end))

    def waiters(self, culprits: Collection[int]) -> tuple[End | None, tuple[int, ...]]:
        """Return the operation in which most other ranks wait for some, and the ranks that wait in it."""
        ends = [
            end
            for rank, waits in self.waits.items()
            for end in waits
            if rank not in culprits and not set(self.absent(end)).isdisjoint(culprits)
        ]
        if not ends:
            return None, ()
        many = Counter(end.meeting for end in ends)
        first = min(ends, key=lambda end: (-many[end.meeting], end.issued_ns, end.call.key, end.seq))
        return first, tuple(dict.fromkeys(end.rank for end in ends if end.meeting == first.meeting))

    @cached_property
    def stuck(self) -> dict[int, list[int]]:
        """Ranks that can never go on, with the absent ranks of their waits that never can.

        A collective waits for all that it lacks, a receive from any source for one of them.
        """
        free = (Seen.GOES_ON, Seen.ELSEWHERE, Seen.NO_RECORD)
        can = {rank for rank, view in self.views.items() if view.seen in free or view.may_end}
        can |= {rank for rank, view in self.views.items() if view.seen is Seen.WAITS and rank not in self.waits}
        lacking = {rank: [(end, self.absent(end)) for end in ends] for rank, ends in self.waits.items()}
        waiters: dict[tuple[int, ...], list[int]] = defaultdict(list)  # the ranks of one group wait for the same ranks
        for rank, waits in lacking.items():
            for _, absent in waits:
                waiters[absent].append(rank)
        users: dict[int, list[list[int]]] = defaultdict(list)  # ranks that wait for a rank
        for absent, ranks in waiters.items():
            for other in absent:
                users[other].append(ranks)
        pending = list(can)
        while pending:
            for rank in chain.from_iterable(users[pending.pop()]):
                if rank not in can and any(
                    (any if end.call.any_source else all)(other in can for other in absent)
                    for end, absent in lacking[rank]
                ):
                    can.add(rank)
                    pending.append(rank)
        never = {absent: [other for other in absent if other not in can] for absent in waiters}
        return {
            rank: never[waits[0][1]] if len(waits) == 1 else [other for _, absent in waits for other in never[absent]]
            for rank, waits in lacking.items()
            if rank not in can
        }

    def moves(self, rank: int) -> bool:
        """Whether a rank has moved since the last look, and runs no function."""
        view = self.views[rank]
        return view.seen is Seen.GOES_ON and view.running is None


def _newest_ns(view: RankView) -> int:
    return max((max(end.issued_ns, end.begun_ns or 0, end.done_ns or 0) for end in view.ends), default=0)


def _failure(world: WaitingWorld) -> WaitVerdict | None:
    """Return the verdict on a rank with an error of its own, or on a process that has ended without a word."""
    for kind, guilty in (
        (Kind.FAILED, [view for view in world.views.values() if view.error]),
        (Kind.DEAD, [view for view in world.views.values() if view.seen is Seen.ENDED]),
    ):
        if guilty:
            votes = Counter(rank for ends in world.waits.values() for end in ends for rank in world.absent(end))
            worst = max(guilty, key=lambda view: (votes[view.rank], -view.rank))
            same = [view.rank for view in guilty if view.process == worst.process != -1 and kind is Kind.DEAD]
            culprits = tuple(same or [worst.rank])
            end, waiters = world.waiters(culprits)
            return WaitVerdict(kind=kind, culprits=culprits, waiters=waiters, end=end, view=worst)
    return None


# -- calls that differ ---------------------------------------------------------------------------------------------


def _differences(world: WaitingWorld) -> list[WaitVerdict]:
    """Return the first difference of each group, those in which ranks wait first, then the oldest."""
    blocked = {end.call.key for ends in world.waits.values() for end in ends}
    found = [
        verdict
        for key, calls in world.calls.items()
        if len(calls) > 1 and (verdict := _first_difference(world, key, calls, by_line=key in blocked)) is not None
    ]
    found += _message_differences(world)
    return sorted(found, key=lambda verdict: min((end.issued_ns for end in verdict.ends), default=0))


def _concerns_waits(difference: WaitVerdict) -> bool:
    """Whether calls that differ stop a rank: those that have ended on both sides may have gone well."""
    return difference.kind is Kind.SKIPPED or any(end.is_open for end in difference.ends)


def _first_difference(
    world: WaitingWorld, key: str, calls: Mapping[int, list[End]], *, by_line: bool
) -> WaitVerdict | None:
    """Return the verdict on the first number of a group that ranks have called differently.

    Args:
        by_line: Whether to find calls left out by their lines, where the calls themselves are alike.
    """
    first = max(ends[0].seq for ends in calls.values())  # records are cut: the first number that all may have
    last = max(ends[-1].seq for ends in calls.values())
    for seq in range(first, last + 1):
        here: Mapping[int, End] = world.at[key, "", seq]
        if len({id(end.call) for end in here.values()}) < 2:
            continue
        here = {rank: end for rank, end in here.items() if end.has_arrived}
        forms = {end.call.op: end.call.form for end in here.values() if end.call.form}  # one without a form fits any
        alike = len({(end.call.op, end.call.form or forms.get(end.call.op)) for end in here.values()}) < 2
        if alike and (not by_line or len({end.call.site for end in here.values()}) < 2):
            continue
        camps: dict[object, list[int]] = defaultdict(list)
        for rank, end in here.items():
            call = end.call
            camps[call.site if alike else (call.op, call.form or forms.get(call.op))].append(rank)
        sides = sorted(camps.values(), key=lambda side: (len(side), min(side)))
        if len(sides) > 1 and (verdict := _difference(world, calls, here, sides, alike=alike)) is not None:
            return verdict
    return None


def _difference(
    world: WaitingWorld, calls: Mapping[int, list[End]], here: Mapping[int, End], sides: list[list[int]], *, alike: bool
) -> WaitVerdict | None:
    """Return the verdict on the sides of one number; None if calls at two lines are one call."""
    odd, usual = sides[0], sides[-1]
    mine, theirs = here[min(odd)], here[min(usual)]
    odd_never = not any(_calls_later(calls[rank], theirs, by_line=alike) for rank in odd)
    usual_never = not any(_calls_later(calls[rank], mine, by_line=alike) for rank in usual)
    if alike and odd_never == usual_never:
        return None
    if usual_never and not odd_never:
        odd, usual, mine, theirs, odd_never, usual_never = usual, odd, theirs, mine, usual_never, odd_never
    if odd_never and not usual_never:
        end, waiters = world.waiters(odd)
        if end is None:
            end, waiters = theirs, tuple(rank for rank in sorted(usual) if here[rank].is_open)
        return WaitVerdict(
            kind=Kind.SKIPPED, culprits=tuple(sorted(odd)), waiters=waiters, end=end, ends=(theirs, mine),
            view=world.views[odd[0]],
        )  # fmt: skip
    kind = Kind.MISMATCH if odd_never else Kind.SWAPPED
    tied = len(sides[0]) == len(sides[-1])
    return WaitVerdict(
        kind=kind, culprits=tuple(sorted([*odd, *usual] if tied else odd)), waiters=tuple(usual), ends=(mine, theirs),
        differs=_differing(mine, theirs), view=world.views[odd[0]],
    )  # fmt: skip


def _calls_later(line: Sequence[End], end: End, *, by_line: bool) -> bool:
    """Whether a rank makes the same call later; `by_line`: at the same line."""
    return any(
        later.seq > end.seq
        and (later.call.op, later.call.form) == (end.call.op, end.call.form)
        and (not by_line or later.call.site == end.call.site)
        for later in line
    )


_PARTS = (
    ("sizes", re.compile(r"[\[(][\d, ]*[\])]")),
    ("roots", re.compile(r"root=\d+")),
    ("dtypes", re.compile(r"^\w+")),
)


def _differing(one: End, other: End) -> str:
    """Return the part in which two calls differ."""
    if one.call.op != other.call.op and not (one.call.is_message and other.call.is_message):
        return "operations"
    forms = one.call.form, other.call.form
    return next((name for name, part in _PARTS if len({tuple(part.findall(form)) for form in forms}) > 1), "arguments")


def _message_differences(world: WaitingWorld) -> Iterator[WaitVerdict]:
    """Yield the verdicts on open messages with ends that differ."""
    for view in world.views.values():
        for send in view.ends:
            if send.call.op == "send" and send.is_open and send.call.peer is not None and send.call.form:
                receive = world.at[send.call.key, "recv", send.seq].get(send.call.peer)
                if receive is not None and receive.is_open and receive.call.form not in ("", send.call.form):
                    yield WaitVerdict(
                        kind=Kind.MISMATCH, culprits=tuple(sorted((send.rank, receive.rank))), waiters=(receive.rank,),
                        ends=(send, receive), differs=_differing(send, receive), view=view,
                    )  # fmt: skip


# -- ranks that can never go on ------------------------------------------------------------------------------------


def _cycle(world: WaitingWorld, waits: Mapping[int, Sequence[int]], *, may_end: bool = False) -> WaitVerdict | None:
    """Return the verdict on ranks that wait for each other.

    Args:
        waits: The ranks that each rank waits for.
    """
    cycle = find_cycle(waits)
    if not cycle:
        return None
    for rank in cycle:
        if not may_end and (other_tag := _other_tag(world, rank)) is not None:
            return other_tag
    ends = tuple(world.lacking_ends(world.views[rank])[0] for rank in cycle)
    outside = tuple(ends[0] for rank, ends in world.waits.items() if rank not in cycle)
    return WaitVerdict(
        kind=Kind.CYCLE, culprits=tuple(cycle), waiters=tuple(end.rank for end in outside), ends=ends, others=outside,
        may_end=may_end,
    )  # fmt: skip


def _loose_cycle(world: WaitingWorld) -> WaitVerdict | None:
    """Return the verdict on ranks that wait for each other, and of which one may go on by itself."""
    waits = {
        rank: [other for end in world.lacking_ends(view) for other in world.absent(end)]
        for rank, view in world.views.items()
    }
    return _cycle(world, {rank: others for rank, others in waits.items() if others}, may_end=True)


def _other_tag(world: WaitingWorld, rank: int) -> WaitVerdict | None:
    """Return the verdict on a receive of a rank that waits while a message with a tag not received is under way."""
    receive = next((end for end in world.waits[rank] if end.call.op == "recv"), None)
    if receive is None or receive.call.name:
        return None
    tags = {end.call.tag for end in world.views[rank].ends if end.call.op == "recv"}
    for sender in world.absent(receive):
        for send in world.views[sender].ends:
            if send.call.op == "send" and send.is_open and send.call.peer == rank and send.call.tag not in tags:
                return WaitVerdict(
                    kind=Kind.TAGS, culprits=tuple(sorted((rank, sender))), end=receive, ends=(receive, send),
                    view=world.views[rank],
                )  # fmt: skip
    return None


def find_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the smallest set of nodes that all lead to each other, and from which no edge leads on, ascending.

    Nodes without edges do not count, nor those that lead to such nodes only; [] if no others are left.
    """
    shared = {id(others): frozenset(edges.keys() & others) for others in edges.values()}  # many have the same edges
    leads = {node: shared[id(others)] for node, others in edges.items()}
    left = set(leads)
    while ended := {node for node in left if left.isdisjoint(leads[node])}:
        left -= ended
    parts = []
    while rest := left:
        while rest:
            start = min(rest)
            part = _reached({start}, leads) & left
            rest = part - _leading_to({start}, part, leads)
        parts.append(sorted(part))
        left = left - _leading_to(part, left, leads)
    return min(parts, default=[], key=lambda part: (len(part), part))


def _reached(some: Set[int], leads: Mapping[int, Collection[int]]) -> set[int]:
    """Return some nodes, and all nodes to which they lead."""
    reached: set[int] = set()
    pending = some
    while pending:
        reached |= pending
        pending = set().union(*{leads[node] for node in pending if node in leads}) - reached
    return reached


def _leading_to(some: Set[int], nodes: Set[int], leads: Mapping[int, Collection[int]]) -> set[int]:
    """Return some nodes, and all nodes of a set that lead to them."""
    found = set(some)
    while more := {node for node in nodes - found if not found.isdisjoint(leads[node])}:
        found |= more
    return found


# -- ranks that have not come --------------------------------------------------------------------------------------


def _absence(world: WaitingWorld) -> WaitVerdict | None:
    """Return the verdict on a rank that others wait for, and which waits for nobody."""
    stuck = world.stuck
    leads = {
        rank: frozenset(stuck[rank] if rank in stuck else chain.from_iterable(map(world.absent, ends)))
        for rank, ends in world.waits.items()
    }
    roots = set().union(*leads.values()) - leads.keys()
    waiting = {root: _leading_to({root}, leads.keys(), leads) & (stuck or leads).keys() for root in roots}
    moving = set().union(*(waiting[root] for root in roots if world.moves(root)))
    votes = {root: count for root in roots if (count := len(waiting[root] - moving))}
    votes = votes or {root: len(waiting[root]) for root in roots if world.moves(root)}
    if not votes:
        return None
    views = world.views

    def weight(rank: int) -> tuple[bool, bool, int, str, int]:
        view = views[rank]
        idle = not any(end.is_open and end.has_arrived and end.call.meets for end in view.ends)
        return view.seen is not Seen.NO_RECORD, idle, votes[rank], view.site, -rank

    first = max(votes, key=weight)
    end, _ = world.waiters([first])
    like_first = (views[first].seen, _doing(views[first]), weight(first)[:2])
    lacking = world.absent(end) if end is not None else ()
    alike = tuple(
        rank
        for rank in sorted({first, *lacking} & set(votes))
        if (views[rank].seen, _doing(views[rank]), weight(rank)[:2]) == like_first
    )
    end, waiters = world.waiters(alike)
    kind = {Seen.LEFT: Kind.LEFT, Seen.NO_RECORD: Kind.MISSING}.get(views[first].seen, Kind.LATE)
    if end is not None and end.call.is_message and kind is not Kind.MISSING:
        tags = next(filter(None, (_other_tag(world, rank) for rank in waiters)), None)
        if tags is not None:
            return tags
        kind = Kind.UNMATCHED if kind is Kind.LEFT else kind
    return WaitVerdict(kind=kind, culprits=alike, waiters=waiters, end=end, view=views[alike[0]])


def _doing(view: RankView) -> tuple[str, str, str]:
    """Return what a rank does as values: the function that it runs, else its line."""
    running = view.running
    return (running.call.op, running.call.name, running.call.site) if running is not None else ("", "", view.site)


def _unexplained(world: WaitingWorld) -> WaitVerdict:
    """Return the verdict on a world in which no rank waits for another."""
    ends = [end for view in world.views.values() for end in view.ends if end.call.meets and end.is_open]
    under_way = [end for end in ends if end.state is not EndState.FAILED and world.all_called(end)]
    if not under_way:
        return WaitVerdict(kind=Kind.NOBODY)
    first = min(under_way, key=lambda end: (end.issued_ns, end.call.key, end.seq))
    return WaitVerdict(kind=Kind.WIRE, end=first)

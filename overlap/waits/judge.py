"""The verdict on ranks that wait: which rank is the cause, and whether the others can ever go on. Pure.

The first kind that applies is the verdict, by cause and not by time: an error, an ended process, calls that differ,
ranks that wait for each other, a rank that has not come. `wording.wait_sentence` has each kind as text.
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

from .ends import CallRecord, End, EndState, Meeting, RankView, Seen


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
    culprits: tuple[int, ...] = ()  # World ranks, ascending; for CYCLE all ranks of the cycle
    waiters: tuple[int, ...] = ()  # Ranks that wait for the culprits in `end`; for MISMATCH, SWAPPED the other side
    end: End | None = None  # The operation in which the waiters wait
    # MISMATCH, SWAPPED: the calls that differ. SKIPPED: the skipped call, and the one made instead. TAGS: the receive
    # and the send. CYCLE: the operation in which each rank of the cycle waits.
    ends: tuple[End, ...] = ()
    others: tuple[End, ...] = ()  # Operations in which ranks outside of a cycle wait
    differs: str = ""  # "operations", "sizes", "dtypes", "roots" or "arguments"
    view: RankView | None = None  # The first culprit
    may_end: bool = False  # Whether ranks of a cycle may go on, by a deadline or another task of their programs
    doubtful: tuple[int, ...] = ()  # Ranks of the verdict with views that contradict each other
    unrecorded: str = ""  # What the sources do not record
    missing: tuple[int, ...] = ()  # Ranks without a record
    earlier: WaitVerdict | None = None  # Another difference between calls, which is not the cause

    @property
    def is_certain(self) -> bool:
        """Whether no waiting rank can ever go on."""
        return self.kind.is_certain and not self.may_end and not self.doubtful


def judge(views: Iterable[RankView], size: int) -> WaitVerdict:
    """Return the verdict on a world.

    Args:
        views: Views of ranks; of several views of one rank the newest counts.
        size: Number of ranks; ranks without a view count as ranks without a record.

    Cost: one pass over all ends (a rank's sides of operations), and one over the members of each operation in which a
    rank waits.
    """
    world = WaitIndex(views, size)
    differing = _judge_mismatched_calls(world)
    # A difference that stops a rank is the cause; any other difference is only mentioned beside the verdict.
    current = next((each for each in differing if _stops_rank(each)), None)
    found = _judge_failure(world) or current or _judge_cycle(world, world.stuck_ranks, may_end=False)
    found = found or _judge_absence(world) or _judge_possible_cycle(world)
    earlier = next((each for each in differing if each is not current), None)
    if found is None:
        found, earlier = earlier or _judge_unexplained(world), None
    unrecorded = next((view.unrecorded for view in world.views.values() if view.unrecorded), "")
    missing = tuple(rank for rank, view in world.views.items() if view.seen is Seen.NO_RECORD)
    doubtful = tuple(rank for rank in found.culprits if rank in world.doubtful)
    return replace(found, doubtful=doubtful, unrecorded=unrecorded, missing=missing, earlier=earlier)


class WaitIndex:
    """Index of what is known of each rank (its view), and of each rank's side of each operation (its end).

    Attributes:
        views: View of each rank, by rank; ranks without one have a view that has no record.
        doubtful: Ranks with views that contradict each other on what the rank does: their `seen` differ.
        ends_at: Ends by rank, for each (key of the group, role, number). The role is "send" or "recv" of messages, and
            "" of collectives. `ends_at["dp", "", 17][3]` is rank 3's end of collective 17 of group "dp".
        calls: Collectives by key and rank, in the order of issue.
        waits: Operations in which each blocked rank waits: those that it awaits; if that is unknown, the oldest one.

    Args:
        views: Views of ranks; of several of one rank the newest counts.
        size: Ranks of the world. Ranks without a view get one that has no record; so do other ranks that ends name as
            members of their group.
    """

    def __init__(self, views: Iterable[RankView], size: int) -> None:
        newest_views, doubtful = _newest_views(views)
        self.doubtful: set[int] = doubtful
        self.views: dict[int, RankView] = _add_unknown_ranks(_rename_equal_groups(newest_views), size)
        # A `defaultdict`: looking for an operation that nobody has called finds no ends.
        self.ends_at: dict[tuple[str, str, int], dict[int, End]] = defaultdict(dict)
        self._newest: dict[tuple[str, int, str], int] = {}  # highest number, by key, rank and role
        self._absent: dict[Meeting, tuple[int, ...]] = {}  # members that have not arrived, by collective
        self.calls: dict[str, dict[int, list[End]]] = {}
        self._index_ends()
        self.waits: dict[int, list[End]] = {
            rank: ends
            for rank, view in self.views.items()
            if view.seen is Seen.WAITS and (ends := self.waiting_ends(view))
        }

    def _index_ends(self) -> None:
        ends_at, newest = self.ends_at, self._newest
        for view in self.views.values():
            for end in view.ends:
                call, seq, rank = end.call, end.seq, end.rank
                role = call.op if call.is_message else ""
                if call.meets:
                    ends_at[call.key, role, seq][rank] = end
                    if seq > newest.get((call.key, rank, role), -1):
                        newest[call.key, rank, role] = seq
                    if not role:
                        self.calls.setdefault(call.key, {}).setdefault(rank, []).append(end)

    def waiting_ends(self, view: RankView) -> list[End]:
        """Return the operations in which a rank waits for others, or [] if it can go on by itself.

        A rank whose tasks await several operations goes on as soon as one of them can end.
        """
        arrived = [end for end in view.ends if end.is_open and end.has_arrived and end.call.meets]
        awaited = [end for end in arrived if end.awaited]
        if not awaited and any(end.awaited is False for end in arrived):
            awaited = arrived  # the program awaits something that follows from one of them
        lacking = [end for end in awaited or arrived if self.absent_ranks(end)]
        if awaited:
            return lacking if len(lacking) == len(awaited) else []
        # It is unknown which operations the program awaits: take the oldest that lacks a rank.
        return lacking[:1]

    def absent_ranks(self, end: End) -> tuple[int, ...]:
        """Return the world ranks that the rank of `end` waits for in its operation.

        The views of those ranks decide who has arrived. `end` itself may be older than they are.

        Returns:
            For a message, the rank at the other end, or () if that has arrived; for a receive from any source, all
            ranks that may send; for a collective, the other members that have not arrived.
        """
        call = end.call
        # A send waits for the receive, and a receive for the send; ends of collectives have the role "".
        other_role = {"send": "recv", "recv": "send"}.get(call.op, "")
        if end.lacks is not None:
            # The source has listed the absent ranks, and some may have arrived since.
            return tuple(rank for rank in end.lacks if not self._has_arrived(rank, other_role, end))
        if call.any_source:
            # It meets no send until it has chosen one. Without known members, any rank of the world may send.
            return tuple(rank for rank in call.members or self.views if rank != end.rank)
        if call.is_message:
            peers = call.members if call.peer is None else (call.peer,)
            return () if any(self._has_arrived(rank, other_role, end) for rank in peers) else peers
        return self._absent_members(end)

    def _absent_members(self, end: End) -> tuple[int, ...]:
        """Return the members of a collective that have not arrived, without the rank of `end`."""
        if end.meeting not in self._absent:
            # Without known members, the ranks with any call under this key count as the members.
            members = end.call.members or self.calls[end.call.key]
            self._absent[end.meeting] = tuple(rank for rank in members if not self._has_arrived(rank, "", end))
        # Ranks that wait for the same ranks get one tuple object: `stuck_ranks` has it as a key for thousands of ranks.
        absent = self._absent[end.meeting]
        return tuple(rank for rank in absent if rank != end.rank) if end.rank in absent else absent

    def _has_arrived(self, rank: int, role: str, end: End) -> bool:
        """Whether `rank` has arrived at the operation of `end`, in a role: "send", "recv", or "" for a collective."""
        other_end = self.ends_at[end.call.key, role, end.seq].get(rank)
        if other_end is not None:
            return other_end.has_arrived
        # Records keep only the last operations: with a higher number, the rank has gone past this one.
        return self._newest.get((end.call.key, rank, role), -1) > end.seq

    def all_members_called(self, end: End) -> bool:
        """Whether all members have called the collective of `end`; a call counts even if it is still queued.

        For a message: whether the other end has arrived.
        """
        absent = self.absent_ranks(end)
        if end.call.is_message:
            return not absent
        return all(rank in self.ends_at[end.call.key, "", end.seq] for rank in absent)

    def find_waiters(self, culprits: Collection[int]) -> tuple[End | None, tuple[int, ...]]:
        """Return the operation in which most other ranks wait for `culprits`, and the ranks that wait in it.

        Returns:
            One end of the operation (of equally many waiting ranks, the operation issued first), and the ranks; None
            and () if no other rank waits for the culprits.
        """
        ends = [
            end
            for rank, waits in self.waits.items()
            for end in waits
            if rank not in culprits and not set(self.absent_ranks(end)).isdisjoint(culprits)
        ]
        if not ends:
            return None, ()
        many = Counter(end.meeting for end in ends)
        first = min(ends, key=lambda end: (-many[end.meeting], end.issued_ns, end.call.key, end.seq))
        return first, tuple(dict.fromkeys(end.rank for end in ends if end.meeting == first.meeting))

    @cached_property
    def stuck_ranks(self) -> dict[int, list[int]]:
        """Ranks that can never go on: each with the list of ranks that it waits for and that never go on either.

        A collective waits for all its absent ranks, a receive from any source for one of them. If ranks 0 and 1 wait
        for each other and rank 2 waits for rank 0, the result is {0: [1], 1: [0], 2: [0]}.
        """
        # First the ranks that can go on by themselves; then, again and again, those whose waits such ranks can end.
        free = (Seen.GOES_ON, Seen.ELSEWHERE, Seen.NO_RECORD)
        can = {rank for rank, view in self.views.items() if view.seen in free or view.may_end}
        can |= {rank for rank, view in self.views.items() if view.seen is Seen.WAITS and rank not in self.waits}
        lacking = {rank: [(end, self.absent_ranks(end)) for end in ends] for rank, ends in self.waits.items()}
        waiters: dict[tuple[int, ...], list[int]] = defaultdict(list)  # the ranks of one group wait for the same ranks
        for rank, waits in lacking.items():
            for _, absent in waits:
                waiters[absent].append(rank)
        users: dict[int, list[list[int]]] = defaultdict(list)  # by rank, lists of ranks that wait for it
        for absent, ranks in waiters.items():
            for other in absent:
                users[other].append(ranks)
        pending = list(can)
        while pending:
            for rank in chain.from_iterable(users[pending.pop()]):
                # A rank goes on if one of its operations can end.
                if rank not in can and any(
                    (any if end.call.any_source else all)(other in can for other in absent)
                    for end, absent in lacking[rank]
                ):
                    can.add(rank)
                    pending.append(rank)
        # One list for each tuple of absent ranks, which thousands of ranks may share.
        never = {absent: [other for other in absent if other not in can] for absent in waiters}
        return {
            rank: never[waits[0][1]] if len(waits) == 1 else [other for _, absent in waits for other in never[absent]]
            for rank, waits in lacking.items()
            if rank not in can
        }

    def is_moving(self, rank: int) -> bool:
        """Whether a rank's program has gone on since the previous look, and runs no function of `compute` now."""
        view = self.views[rank]
        return view.seen is Seen.GOES_ON and view.running_function is None


def _newest_views(views: Iterable[RankView]) -> tuple[dict[int, RankView], set[int]]:
    """Return the newest view of each rank, and the ranks with two views that differ in `seen`."""
    newest: dict[int, RankView] = {}
    doubtful: set[int] = set()
    for view in views:
        other = newest.setdefault(view.rank, view)
        if other is not view:
            newest[view.rank] = max(other, view, key=_last_instant_ns)
            if other.seen is not view.seen:
                doubtful.add(view.rank)
    return newest, doubtful


def _rename_equal_groups(views: dict[int, RankView]) -> dict[int, RankView]:
    """Return views in which groups, or streams, of one name differ by it, if ranks are in collectives of several."""
    opened = {(end.call.group, end.call.variant) for view in views.values() for end in view.ends if end.is_open}
    variants = Counter(group for group, variant in opened if variant)
    if max(variants.values(), default=0) < 2:
        return views

    renamed: dict[int, CallRecord] = {}  # by the id of the call: ends share one object of equal calls, also afterwards

    def rename_group(end: End) -> End:
        call = end.call
        if variants[call.group] < 2 or not call.variant:
            return end
        if id(call) not in renamed:
            renamed[id(call)] = replace(call, group=f"{call.group} ({call.variant})")
        return replace(end, call=renamed[id(call)])

    return {rank: replace(view, ends=tuple(map(rename_group, view.ends))) for rank, view in views.items()}


def _add_unknown_ranks(views: Mapping[int, RankView], size: int) -> dict[int, RankView]:
    """Return all views by rank; ranks below `size`, or named by operations, without one get `Seen.NO_RECORD`."""
    ends = [end for view in views.values() for end in view.ends]
    # Many ends share one tuple of members: each tuple is looked through once.
    named_ranks = {id(ranks): ranks for end in ends for ranks in (end.call.members, end.lacks) if ranks}
    ranks = {*views, *range(size), *chain.from_iterable(named_ranks.values())}
    return {rank: views.get(rank) or RankView(rank=rank, seen=Seen.NO_RECORD) for rank in sorted(ranks)}


def _last_instant_ns(view: RankView) -> int:
    return max((max(end.issued_ns, end.begun_ns or 0, end.done_ns or 0) for end in view.ends), default=0)


def _judge_failure(world: WaitIndex) -> WaitVerdict | None:
    """Return the verdict on a rank with an error of its own, or on a process that has ended without a word.

    An error counts before an ended process. Of several ranks with an error, or with an ended process, the one that most
    operations wait for is taken. None if there is neither.
    """
    for kind, guilty in (
        (Kind.FAILED, [view for view in world.views.values() if view.error]),
        (Kind.DEAD, [view for view in world.views.values() if view.seen is Seen.ENDED]),
    ):
        if guilty:
            votes = Counter(rank for ends in world.waits.values() for end in ends for rank in world.absent_ranks(end))
            worst = max(guilty, key=lambda view: (votes[view.rank], -view.rank))
            # All ranks of an ended process are culprits; -1 is an unknown process, which groups nothing.
            same = [view.rank for view in guilty if view.process == worst.process != -1 and kind is Kind.DEAD]
            culprits = tuple(same or [worst.rank])
            end, waiters = world.find_waiters(culprits)
            return WaitVerdict(kind=kind, culprits=culprits, waiters=waiters, end=end, view=worst)
    return None


# -- calls that differ ---------------------------------------------------------------------------------------------


def _judge_mismatched_calls(world: WaitIndex) -> list[WaitVerdict]:
    """Return, in the order of issue, verdicts on each group's first difference and on open messages that differ."""
    # Keys of groups in which a rank waits. If a rank of these has left a call out, its next call may look the same, and
    # only the line differs.
    blocked = {end.call.key for ends in world.waits.values() for end in ends}
    found = [
        verdict
        for key, calls in world.calls.items()
        if len(calls) > 1 and (verdict := _judge_calls(world, key, calls, by_line=key in blocked)) is not None
    ]
    found += _judge_message_differences(world)
    return sorted(found, key=lambda verdict: min((end.issued_ns for end in verdict.ends), default=0))


def _stops_rank(difference: WaitVerdict) -> bool:
    """Whether calls that differ stop a rank; calls that have ended on all ranks do not."""
    return difference.kind is Kind.SKIPPED or any(end.is_open for end in difference.ends)


def _judge_calls(world: WaitIndex, key: str, calls: Mapping[int, list[End]], *, by_line: bool) -> WaitVerdict | None:
    """Return the verdict on the first number of a group that ranks have called differently, or None.

    With `by_line`, the lines of calls that are alike are compared, too, which shows a call left out. Each rank has one
    or more `calls`, in the order of issue.
    """
    # Records keep only the last operations: begin with the first number that all ranks may have.
    first = max(ends[0].seq for ends in calls.values())
    last = max(ends[-1].seq for ends in calls.values())
    for seq in range(first, last + 1):
        here: Mapping[int, End] = world.ends_at[key, "", seq]
        # Readers make one object of equal calls where they can: then there is nothing to compare.
        if len({id(end.call) for end in here.values()}) < 2:
            continue
        here = {rank: end for rank, end in here.items() if end.has_arrived}
        # An end without a record of its arguments counts as equal: it gets the arguments of another with its operator.
        forms = {end.call.op: end.call.form for end in here.values() if end.call.form}
        alike = len({(end.call.op, end.call.form or forms.get(end.call.op)) for end in here.values()}) < 2
        if alike and (not by_line or len({end.call.site for end in here.values()}) < 2):
            continue
        camps: dict[object, list[int]] = defaultdict(list)
        for rank, end in here.items():
            call = end.call
            camps[call.site if alike else (call.op, call.form or forms.get(call.op))].append(rank)
        # The smallest side first, as it is taken to be wrong; of equal sides, the one with the lowest rank.
        sides = sorted(camps.values(), key=lambda side: (len(side), min(side)))
        if len(sides) > 1 and (verdict := _judge_difference(world, calls, here, sides, alike=alike)) is not None:
            return verdict
    return None


def _judge_difference(
    world: WaitIndex, calls: Mapping[int, list[End]], here: Mapping[int, End], sides: list[list[int]], *, alike: bool
) -> WaitVerdict | None:
    """Return the verdict on ranks whose calls with the same sequence number in a group differ.

    `here` has the ends with that number; `sides` are two or more lists of ranks that called alike, the smallest first.
    With `alike`, only the lines differ. The kind is SKIPPED, SWAPPED or MISMATCH. None if only lines differ and no side
    has left a call out.
    """
    # `odd` is the smallest side, taken to be wrong; `usual` is the largest. `mine` and `theirs` are the calls of each.
    odd, *_, usual = sides
    mine, theirs = here[min(odd)], here[min(usual)]
    # "Never": no rank of the side makes the other side's call later. A side that does has not left that call out:
    # either it has made a call too many before, or the order is another one.
    odd_never = not any(_has_later_call(calls[rank], theirs, by_line=alike) for rank in odd)
    usual_never = not any(_has_later_call(calls[rank], mine, by_line=alike) for rank in usual)
    if alike and odd_never == usual_never:
        return None
    # Only one side leaves a call out: that side is at fault, even if it is the larger one.
    if usual_never and not odd_never:
        odd, usual, mine, theirs, odd_never, usual_never = usual, odd, theirs, mine, usual_never, odd_never
    if odd_never and not usual_never:
        end, waiters = world.find_waiters(odd)
        if end is None:
            end, waiters = theirs, tuple(rank for rank in sorted(usual) if here[rank].is_open)
        return WaitVerdict(
            kind=Kind.SKIPPED, culprits=tuple(sorted(odd)), waiters=waiters, end=end, ends=(theirs, mine),
            view=world.views[odd[0]],
        )  # fmt: skip
    kind = Kind.MISMATCH if odd_never else Kind.SWAPPED
    tied = len(odd) == len(usual)
    return WaitVerdict(
        kind=kind, culprits=tuple(sorted([*odd, *usual] if tied else odd)), waiters=tuple(usual), ends=(mine, theirs),
        differs=_differing_part(mine, theirs), view=world.views[odd[0]],
    )  # fmt: skip


def _has_later_call(line: Sequence[End], end: End, *, by_line: bool) -> bool:
    """Whether `line`, the collectives of a rank, has the call of `end` later again; with `by_line`, at its line."""
    return any(
        later.seq > end.seq
        and (later.call.op, later.call.form) == (end.call.op, end.call.form)
        and (not by_line or later.call.site == end.call.site)
        for later in line
    )


_PARTS = (
    # Patterns for the form of a call, such as "float32 (4,), op='sum', root=0" or, from dumps, "float32 [4] -> [8]".
    ("sizes", re.compile(r"[\[(][\d, ]*[\])]")),
    ("roots", re.compile(r"root=\d+")),
    ("dtypes", re.compile(r"^\w+")),
)


def _differing_part(one: End, other: End) -> str:
    """Return the first that differs of "operations", "sizes", "roots" and "dtypes"; "arguments" for all else."""
    if one.call.op != other.call.op and not (one.call.is_message and other.call.is_message):
        return "operations"
    forms = one.call.form, other.call.form
    return next((name for name, part in _PARTS if len({tuple(part.findall(form)) for form in forms}) > 1), "arguments")


def _judge_message_differences(world: WaitIndex) -> Iterator[WaitVerdict]:
    """Yield a MISMATCH for each unfinished message whose send and receive have different arguments."""
    for view in world.views.values():
        for send in view.ends:
            if send.call.op == "send" and send.is_open and send.call.peer is not None and send.call.form:
                receive = world.ends_at[send.call.key, "recv", send.seq].get(send.call.peer)
                if receive is not None and receive.is_open and receive.call.form not in ("", send.call.form):
                    yield WaitVerdict(
                        kind=Kind.MISMATCH, culprits=tuple(sorted((send.rank, receive.rank))), waiters=(receive.rank,),
                        ends=(send, receive), differs=_differing_part(send, receive), view=view,
                    )  # fmt: skip


# -- ranks that can never go on ------------------------------------------------------------------------------------


def _judge_cycle(world: WaitIndex, waits: Mapping[int, Sequence[int]], *, may_end: bool) -> WaitVerdict | None:
    """Return the verdict CYCLE on ranks that wait for each other, or None if there are no such ranks.

    If one waits for a message that was sent with another tag, the verdict is TAGS. With `may_end`, a rank may go on by
    itself, and tags are not looked at.
    """
    cycle = find_cycle(waits)
    if not cycle:
        return None
    for rank in cycle:
        if not may_end and (other_tag := _judge_other_tag(world, rank)) is not None:
            return other_tag
    ends = tuple(world.waiting_ends(world.views[rank])[0] for rank in cycle)
    outside = tuple(ends[0] for rank, ends in world.waits.items() if rank not in cycle)
    return WaitVerdict(
        kind=Kind.CYCLE, culprits=tuple(cycle), waiters=tuple(end.rank for end in outside), ends=ends, others=outside,
        may_end=may_end,
    )  # fmt: skip


def _judge_possible_cycle(world: WaitIndex) -> WaitVerdict | None:
    """Return the verdict on a cycle of waits that may still break, or None if there is none.

    The waits of all ranks count. Ranks with a deadline or with another task may go on, and ranks whose program still
    runs may only have issued the operation.
    """
    waits = {
        rank: [other for end in world.waiting_ends(view) for other in world.absent_ranks(end)]
        for rank, view in world.views.items()
    }
    return _judge_cycle(world, {rank: others for rank, others in waits.items() if others}, may_end=True)


def _judge_other_tag(world: WaitIndex, rank: int) -> WaitVerdict | None:
    """Return TAGS if a rank waits in a receive while a message to it has a tag that it does not receive, or None."""
    receive = next((end for end in world.waits[rank] if end.call.op == "recv"), None)
    # A message with a name is a part of another call, which chooses the tags.
    if receive is None or receive.call.name:
        return None
    tags = {end.call.tag for end in world.views[rank].ends if end.call.op == "recv"}
    for sender in world.absent_ranks(receive):
        for send in world.views[sender].ends:
            if send.call.op == "send" and send.is_open and send.call.peer == rank and send.call.tag not in tags:
                return WaitVerdict(
                    kind=Kind.TAGS, culprits=tuple(sorted((rank, sender))), end=receive, ends=(receive, send),
                    view=world.views[rank],
                )  # fmt: skip
    return None


def find_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the smallest set of nodes that all lead to each other, and from which no edge leads out, ascending.

    {0: [1], 1: [0], 2: [0], 3: [9]} gives [0, 1]: 2 only leads to the cycle, and 3 leads to a node without edges. The
    result is [] if there is no cycle.

    Args:
        edges: By node, the nodes that it leads to.
    """
    # Many nodes share one list of edges: each list becomes a set once.
    shared = {id(others): frozenset(edges.keys() & others) for others in edges.values()}
    leads = {node: shared[id(others)] for node, others in edges.items()}
    left = set(leads)
    # Remove nodes that lead to none of the nodes left, until each of the rest leads to another.
    while ended := {node for node in left if left.isdisjoint(leads[node])}:
        left -= ended
    # Each round finds one part without a way out (a terminal strongly connected component), and then drops it with all
    # nodes that lead to it.
    parts = []
    while rest := left:
        while rest:
            start = min(rest)
            part = _reachable_nodes({start}, leads) & left
            rest = part - _nodes_leading_to({start}, part, leads)
        parts.append(sorted(part))
        left = left - _nodes_leading_to(part, left, leads)
    return min(parts, default=[], key=lambda part: (len(part), part))


def _reachable_nodes(some: Set[int], leads: Mapping[int, Collection[int]]) -> set[int]:
    """Return the nodes of `some`, and all nodes that they lead to, directly or through others."""
    reached: set[int] = set()
    pending = some
    while pending:
        reached |= pending
        pending = set().union(*{leads[node] for node in pending if node in leads}) - reached
    return reached


def _nodes_leading_to(some: Set[int], nodes: Set[int], leads: Mapping[int, Collection[int]]) -> set[int]:
    """Return the nodes of `some`, and all of `nodes` that lead to them, directly or through others of `nodes`."""
    found = set(some)
    while more := {node for node in nodes - found if not found.isdisjoint(leads[node])}:
        found |= more
    return found


# -- ranks that have not come --------------------------------------------------------------------------------------


def _judge_absence(world: WaitIndex) -> WaitVerdict | None:
    """Return the verdict on a rank that others wait for and that waits for nobody; None if there is no such rank.

    Of several such ranks, ranks with a record come first, then ranks that are in no operation, then the rank that most
    ranks wait for.
    """
    stuck = world.stuck_ranks
    leads = {
        rank: frozenset(stuck[rank] if rank in stuck else chain.from_iterable(map(world.absent_ranks, ends)))
        for rank, ends in world.waits.items()
    }
    # `roots` wait for nobody, and others wait for them: directly, or through ranks between.
    roots = set().union(*leads.values()) - leads.keys()
    waiting = {root: _nodes_leading_to({root}, leads.keys(), leads) & (stuck or leads).keys() for root in roots}
    moving = set().union(*(waiting[root] for root in roots if world.is_moving(root)))
    # Waits for a rank that moves will probably end by themselves. They count only if there are no others.
    votes = {root: count for root in roots if (count := len(waiting[root] - moving))}
    votes = votes or {root: len(waiting[root]) for root in roots if world.is_moving(root)}
    if not votes:
        return None
    views = world.views

    def is_idle(rank: int) -> bool:
        """Whether a rank is in no operation of its own."""
        return not any(end.is_open and end.has_arrived and end.call.meets for end in views[rank].ends)

    def state(rank: int) -> tuple[object, ...]:
        return views[rank].seen, _activity_key(views[rank]), is_idle(rank)

    def weight(rank: int) -> tuple[bool, bool, int, str, int]:
        return views[rank].seen is not Seen.NO_RECORD, is_idle(rank), votes[rank], views[rank].site, -rank

    first = max(votes, key=weight)
    end, _ = world.find_waiters([first])
    # Absent ranks in the same state, at the same line, are culprits together.
    lacking = world.absent_ranks(end) if end is not None else ()
    state_of_first = state(first)
    alike = tuple(rank for rank in sorted({first, *lacking} & set(votes)) if state(rank) == state_of_first)
    end, waiters = world.find_waiters(alike)
    kind = {Seen.LEFT: Kind.LEFT, Seen.NO_RECORD: Kind.MISSING}.get(views[first].seen, Kind.LATE)
    if end is not None and end.call.is_message and kind is not Kind.MISSING:
        tags = next(filter(None, (_judge_other_tag(world, rank) for rank in waiters)), None)
        if tags is not None:
            return tags
        kind = Kind.UNMATCHED if kind is Kind.LEFT else kind
    return WaitVerdict(kind=kind, culprits=alike, waiters=waiters, end=end, view=views[alike[0]])


def _activity_key(view: RankView) -> tuple[str, str, str]:
    """Return (kind, name, line) of the function that a rank runs, or ("", "", line of its program)."""
    running = view.running_function
    return (running.call.op, running.call.name, running.call.site) if running is not None else ("", "", view.site)


def _judge_unexplained(world: WaitIndex) -> WaitVerdict:
    """Return the verdict if no rank waits for another: WIRE if an operation with all members is open, else NOBODY."""
    ends = [end for view in world.views.values() for end in view.ends if end.call.meets and end.is_open]
    under_way = [end for end in ends if end.state is not EndState.FAILED and world.all_members_called(end)]
    if not under_way:
        return WaitVerdict(kind=Kind.NOBODY)
    first = min(under_way, key=lambda end: (end.issued_ns, end.call.key, end.seq))
    return WaitVerdict(kind=Kind.WIRE, end=first)

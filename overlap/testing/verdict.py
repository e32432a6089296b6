"""Verdict on a run: what is wrong with the program, with ranks, operations and lines. Pure: from the record alone.

What a run shows comes in this order: why it could not go on (here), then what it happened to survive (`survived`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..timeline.ranklist import listed
from .record import Issue, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that is wrong."""

    kind: str  # Such as "order inversion"
    text: str  # For people, with ranks, operations and lines
    ranks: tuple[int, ...] = ()  # The ranks at fault first
    lines: tuple[str, ...] = ()  # Of the program, as "file.py:41"; the lines at fault first

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def named(ranks: list[int] | tuple[int, ...] | set[int], *, most: int = 8) -> str:
    """Name some ranks."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    more = f" and {len(found) - most} more" if len(found) > most * 4 else ""
    return f"ranks {listed(found[: most * 4])}{more}"


class Meetings:
    """The operations of a run by where they meet.

    Args:
        record: Record of the run.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.ends: dict[tuple[str, int], dict[object, Issue]] = {}
        self.of_rank: dict[int, list[Issue]] = {rank: [] for rank in range(record.size)}
        self.of_key: dict[str, dict[int, list[Issue]]] = {}
        for issue in record.issues:
            if issue.lost:
                continue
            # the two ends of a message to oneself have one rank
            end = (issue.rank, issue.op) if issue.is_message else issue.rank
            self.ends.setdefault((issue.key, issue.seq), {})[end] = issue
            self.of_rank[issue.rank].append(issue)
            self.of_key.setdefault(issue.key, {}).setdefault(issue.rank, []).append(issue)

    def missing(self, issue: Issue) -> list[int]:
        """Return the ranks that have not come to an operation."""
        ends = self.ends[issue.key, issue.seq]
        if issue.is_message and issue.peer is None:  # any other rank could send it
            others = [rank for rank in range(self.record.size) if rank != issue.rank]
            return sorted(others, key=lambda rank: rank not in self.record.stopped)
        if issue.is_message:
            other = "recv" if issue.op == "send" else "send"
            return [] if any(end.op == other for end in ends.values()) else [_other_end(issue)]
        return [rank for rank in issue.members if rank not in ends]

    def blocked(self, rank: int) -> Issue | None:
        """Return the operation in which a rank waits for others: one that it awaits, else the oldest."""
        if rank in self.record.stopped:
            return None
        unfinished = [each for each in self.of_rank[rank] if each.unfinished and self.missing(each)]
        awaited = [each for each in unfinished if each.awaited]
        return next(iter(awaited or unfinished), None)

    def last(self, rank: int) -> Issue | None:
        """Return the operation that a rank has issued last."""
        return self.of_rank[rank][-1] if self.of_rank[rank] else None


def _other_end(issue: Issue) -> int:
    src, dst = issue.members
    return dst if issue.op == "send" else src


_ONE_END = {"send": ("send without a receive", "received"), "recv": ("receive without a send", "sent")}


# -- why it cannot go on ---------------------------------------------------------------------------------------------


def why_stalled(record: Record) -> Verdict | None:
    """Return why ranks wait for ever: the cycle of their waits, or the rank that does not come."""
    found = Meetings(record)
    blocked = {rank: issue for rank in range(record.size) if (issue := found.blocked(rank)) is not None}
    for start in blocked:
        chain = _chain(start, blocked, found)
        if chain[-1] in chain[:-1]:
            cycle = chain[chain.index(chain[-1]) : -1]
            skipped = _skipped_before(cycle, blocked, found)
            return skipped or _with_other_waits(_cycle(cycle, blocked, found), blocked)
    for start in blocked:
        chain = _chain(start, blocked, found)
        waiting = [rank for rank, issue in blocked.items() if chain[-1] in found.missing(issue)]
        return _absent(chain[-1], waiting, blocked, found)
    return None


def _chain(start: int, blocked: dict[int, Issue], found: Meetings) -> list[int]:
    """Follow waits from a rank to a rank that is not blocked, or to one that is in the chain already."""
    chain = [start]
    while chain[-1] in blocked:
        missing = found.missing(blocked[chain[-1]])
        free = [rank for rank in missing if rank not in blocked]
        following = (free or missing)[0]
        chain.append(following)
        if following in chain[:-1]:
            break
    return chain


def _cycle(cycle: list[int], blocked: dict[int, Issue], found: Meetings) -> Verdict:
    start = cycle.index(min(cycle))
    ranks = cycle[start:] + cycle[:start]
    issues = [blocked[rank] for rank in ranks]
    steps = []
    for position, (rank, issue) in enumerate(zip(ranks, issues, strict=True)):
        following = ranks[(position + 1) % len(ranks)]
        steps.append(f"rank {rank} waits in {issue.told} for rank {following}")
    text = ", and ".join(steps)
    lines = tuple(dict.fromkeys(issue.line for issue in issues))
    messages_only = all(issue.is_message for issue in issues)
    if messages_only and len(issues) == 2 and issues[0].op != issues[1].op and issues[0].tag != issues[1].tag:
        told = f"{text}: the tags are in another order on one of them"
        return Verdict(kind="tags differ", text=told, ranks=tuple(ranks), lines=lines)
    for issue in issues:
        if (verdict := _sent_otherwise(issue, found)) is not None:
            return verdict
    if messages_only:
        words = {issue.op for issue in issues}
        what = {"send": "each sends before it receives", "recv": "each receives before it sends"}.get(
            issues[0].op if len(words) == 1 else "", "sends and receives are in an order that cannot meet"
        )
        return Verdict(kind="circular messages", text=f"{text}; {what}", ranks=tuple(ranks), lines=lines)
    messages = [issue for issue in issues if issue.is_message and issue.peer is not None]
    if len(messages) == 1:  # the other end would come later, if at all
        issue = messages[0]
        kind, act = _ONE_END[issue.op]
        told = f"{text}; rank {_other_end(issue)} has not {act} it: it never does, or does so too late"
        return Verdict(kind=kind, text=told, ranks=tuple(ranks), lines=lines)
    advice = "ranks must issue the operations of all groups that they share in one order"
    return Verdict(kind="order inversion", text=f"{text}; {advice}", ranks=tuple(ranks), lines=lines)


def _with_other_waits(verdict: Verdict, blocked: dict[int, Issue]) -> Verdict:
    """Return the verdict on a cycle, which also names the operations in which ranks outside of it wait."""
    waiting: dict[str, list[Issue]] = {}
    for rank, issue in blocked.items():
        if rank not in verdict.ranks:
            waiting.setdefault(issue.told, []).append(issue)
    if not waiting or verdict.kind not in ("order inversion", "circular messages"):
        return verdict
    issues = [issue for same in waiting.values() for issue in same]
    waits = [
        f"{named([issue.rank for issue in same])} wait{'s' * (len(same) == 1)} in {told}"
        for told, same in waiting.items()
    ]
    return replace(
        verdict,
        text=f"{verdict.text}; outside of this cycle, {', and '.join(waits)}",
        ranks=(*verdict.ranks, *sorted(issue.rank for issue in issues)),
        lines=tuple(dict.fromkeys((*verdict.lines, *(issue.line for issue in issues)))),
    )


def _skipped_before(cycle: list[int], blocked: dict[int, Issue], found: Meetings) -> Verdict | None:
    """Return the collective that a rank of a cycle has skipped before, if its lines show one."""
    for rank in cycle:
        issue = blocked[rank]
        if not issue.is_message:
            for missing in found.missing(issue):
                skip = _skip(issue, missing, found)
                if skip is not None and skip[0] is not issue:
                    return _told_skip(missing, skip, [rank], found)
    return None


def _absent(rank: int, waiting: list[int], blocked: dict[int, Issue], found: Meetings) -> Verdict:
    issue = blocked[waiting[0]]
    if issue.is_message:
        return _lonely(issue, rank, found)
    skip = _skip(issue, rank, found) or (issue, None)
    return _told_skip(rank, skip, waiting, found)


def _skip(issue: Issue, rank: int, found: Meetings) -> tuple[Issue, Issue | None] | None:
    """Return the first operation of a group that a rank has skipped, and the one it has issued instead.

    The lines of the rank that waits and those of the rank that does not come are compared one by one.
    """
    of_group = found.of_key[issue.key]
    full, short = of_group.get(issue.rank, []), of_group.get(rank, [])
    for position, theirs in enumerate(full):
        mine = short[position] if position < len(short) else None
        if mine is None or mine.line == theirs.line:
            if mine is None:
                return theirs, None
            continue
        later = [each.line for each in full[position + 1 :]]
        if mine.line in later:  # what it has issued instead comes later on the other rank: this one is skipped
            return theirs, mine
    return None


def _told_skip(rank: int, skip: tuple[Issue, Issue | None], waiting: list[int], found: Meetings) -> Verdict:
    skipped, instead = skip
    others = [each for each in found.of_key[skipped.key] if each != rank]
    went_on = _went_on(rank, skipped, instead, found)
    text = (
        f"rank {rank} skipped {skipped.op} #{skipped.seq} on group '{skipped.group}', which {named(others)} issued at "
        f"{skipped.line}; rank {rank} {went_on}; {named(waiting)} wait{'s' * (len(waiting) == 1)} for it"
    )
    lines = [skipped.line] + ([instead.line] if instead is not None else [])
    last = found.last(rank)
    if instead is None and last is not None:
        lines.append(last.line)
    return Verdict(kind="skipped collective", text=text, ranks=(rank, *waiting), lines=tuple(dict.fromkeys(lines)))


def _went_on(rank: int, skipped: Issue, instead: Issue | None, found: Meetings) -> str:
    if instead is not None:
        return f"went on to {instead.told} instead"
    last, ended = found.last(rank), found.record.left.get(rank)
    at = found.record.places.get(rank)
    after = f" after {last.told}" if last is not None else " and issued nothing"
    if ended is not None:
        return f"{ended or 'ended its program'}{after}"
    return f"is at {at}{after}" if at else f"did nothing{after}"


def _lonely(issue: Issue, rank: int, found: Meetings) -> Verdict:
    """Return the verdict on a message that has one end."""
    stopped = rank in found.record.stopped
    if issue.peer is None and not stopped:
        if (verdict := _sent_otherwise(issue, found)) is not None:
            return verdict
        text = f"rank {issue.rank} receives from any rank with tag {issue.tag} at {issue.line}, and no rank sends"
        return Verdict(kind="receive without a send", text=text, ranks=(issue.rank,), lines=(issue.line,))
    other = "recv" if issue.op == "send" else "send"
    near = [
        each
        for each in found.of_rank[rank]
        if not stopped
        and each.op == other
        and each.unfinished
        and (each.peer in (issue.rank, None))
        and each.tag != issue.tag
    ]
    act = ("sends to", "receives") if issue.op == "send" else ("receives from", "sends")
    peer, it = ("any rank", f"rank {rank}") if issue.peer is None else (f"rank {rank}", "it")
    text = f"rank {issue.rank} {act[0]} {peer} with tag {issue.tag} at {issue.line}, and {it} never {act[1]}"
    if near:
        text += f": it waits in {near[0].told}, whose tag is {near[0].tag}"
        return Verdict(kind="tags differ", text=text, ranks=(issue.rank, rank), lines=(issue.line, near[0].line))
    last = found.last(rank)
    ended = found.record.left.get(rank)
    after = f" after {last.told}" if last is not None else ""
    text += (
        f": it {ended or 'ended its program'}{after}"
        if ended is not None
        else f": its last operation is {last.told}"
        if last
        else ""
    )
    lines = (issue.line, *([last.line] if last is not None else []))
    ranks = (rank, issue.rank) if stopped else (issue.rank, rank)  # else either may be at fault
    return Verdict(kind=_ONE_END[issue.op][0], text=text, ranks=ranks, lines=lines)


def _sent_otherwise(issue: Issue, found: Meetings) -> Verdict | None:
    """Return the verdict on a receive for which a message is under way with a tag that its rank has not received."""
    if issue.op != "recv":
        return None
    received = {each.tag for each in found.of_rank[issue.rank] if each.op == "recv"}
    senders = range(found.record.size) if issue.peer is None else (issue.peer,)
    for send in (each for rank in senders for each in found.of_rank[rank]):
        if send.op == "send" and send.peer == issue.rank and send.unfinished and send.tag not in received:
            source = "any rank" if issue.peer is None else f"rank {issue.peer}"
            text = (
                f"rank {issue.rank} receives from {source} with tag {issue.tag} at {issue.line}, and "
                f"rank {send.rank} sends to it with tag {send.tag} at {send.line}, which it has not received"
            )
            ranks, lines = (issue.rank, send.rank), tuple(dict.fromkeys((issue.line, send.line)))
            return Verdict(kind="tags differ", text=text, ranks=ranks, lines=lines)
    return None


def why_mismatched(record: Record, group: str, seq: int, ranks: tuple[int, int]) -> Verdict | None:
    """Return which rank issued something else, in a disagreement that two ranks have noticed."""
    for (_, number), ends in Meetings(record).ends.items():
        found = [end for end in ends.values() if end.rank in ranks]
        if number != seq or len({end.rank for end in found}) < 2 or found[0].group != group:
            continue
        if len({_call(end) for end in found}) < 2:
            continue
        return _mismatch(record, list(ends.values()))
    return None


def _call(issue: Issue) -> str:
    return f"{issue.op} {issue.what}"


def _mismatch(record: Record, ends: list[Issue]) -> Verdict:
    by_call: dict[str, list[Issue]] = {}
    for end in ends:
        by_call.setdefault(_call(end), []).append(end)
    sides = sorted(by_call.values(), key=lambda side: (len(side), -side[0].rank))
    odd, usual = sides[0], sides[-1]
    message = odd[0].is_message
    told = f"{named([e.rank for e in odd])} called {odd[0].what or odd[0].op} at {odd[0].line}, " + (
        f"{named([e.rank for e in usual])} called {usual[0].what or usual[0].op} at {usual[0].line}"
    )
    where = f"message #{odd[0].seq}" if message else f"operation #{odd[0].seq} on group '{odd[0].group}'"
    reused = _sends_of_one_tag(record, odd[0]) if message else []
    again = (
        f"; messages sent at {' and '.join(reused)} have the same tag {odd[0].tag}, and are received in the order of "
        "their sending"
    )
    return Verdict(
        kind="tag reused" if reused else "mismatch",
        text=f"{where} differs between ranks: {told}{again if reused else ''}",
        ranks=tuple(e.rank for e in (*odd, *usual)),
        lines=tuple(dict.fromkeys((*reused, odd[0].line, usual[0].line))),
    )


def _sends_of_one_tag(record: Record, issue: Issue) -> list[str]:
    """Return the lines that send messages with the ends and the tag of one, if these are not alike."""
    sends = [each for each in record.issues if each.op == "send" and each.key == issue.key]
    alike = len({each.what for each in sends}) < 2
    return [] if alike else list(dict.fromkeys(each.line for each in sends))

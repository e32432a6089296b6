"""Verdict on a run that stalled, or on ranks that disagreed: ranks, operations and lines at fault. Pure.

It needs the record alone. Faults that a run happened to survive are found by `survived`.
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
    lines: tuple[str, ...] = ()  # Lines of the program, as "file.py:41"; the lines at fault first

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def rank_names(ranks: list[int] | tuple[int, ...] | set[int], *, limit: int = 8) -> str:
    """Return ranks in words, such as "rank 3" or "ranks 0-7"."""
    sorted_ranks = sorted(ranks)
    if len(sorted_ranks) == 1:
        return f"rank {sorted_ranks[0]}"
    more = f" and {len(sorted_ranks) - limit} more" if len(sorted_ranks) > limit * 4 else ""
    return f"ranks {listed(sorted_ranks[: limit * 4])}{more}"


class Meetings:
    """The operations of a run by where they meet."""

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

    def missing_ranks(self, issue: Issue) -> list[int]:
        """Return the ranks that have not arrived at an operation."""
        ends = self.ends[issue.key, issue.seq]
        if issue.is_message and issue.peer is None:  # any other rank could send it
            others = [rank for rank in range(self.record.size) if rank != issue.rank]
            return sorted(others, key=lambda rank: rank not in self.record.stopped)
        if issue.is_message:
            other = "recv" if issue.op == "send" else "send"
            return [] if any(end.op == other for end in ends.values()) else [_other_end(issue)]
        return [rank for rank in issue.members if rank not in ends]

    def blocking_issue(self, rank: int) -> Issue | None:
        """Return the operation in which a rank waits for others: one that it awaits, else the oldest."""
        if rank in self.record.stopped:
            return None
        unfinished = [issue for issue in self.of_rank[rank] if issue.unfinished and self.missing_ranks(issue)]
        awaited = [issue for issue in unfinished if issue.awaited]
        return next(iter(awaited or unfinished), None)

    @property
    def blocked(self) -> dict[int, Issue]:
        """The operation in which each rank waits, of ranks that wait for others."""
        ranks = range(self.record.size)
        return {rank: issue for rank in ranks if (issue := self.blocking_issue(rank)) is not None}

    def last_issue(self, rank: int) -> Issue | None:
        """Return the operation that a rank has issued last."""
        return self.of_rank[rank][-1] if self.of_rank[rank] else None


def _other_end(issue: Issue) -> int:
    """Return the rank at the other end of a message."""
    src, dst = issue.members
    return dst if issue.op == "send" else src


_ONE_END = {"send": ("send without a receive", "received"), "recv": ("receive without a send", "sent")}


# -- why it cannot go on ---------------------------------------------------------------------------------------------


def why_stalled(record: Record) -> Verdict | None:
    """Return why ranks wait for ever: the cycle of their waits, or the rank that does not arrive."""
    meetings = Meetings(record)
    blocked = meetings.blocked
    for start in blocked:
        chain = _wait_chain(start, blocked, meetings)
        if chain[-1] in chain[:-1]:
            cycle = chain[chain.index(chain[-1]) : -1]
            skipped = _skip_in_cycle(cycle, blocked, meetings)
            return skipped or _with_other_waits(_cycle_verdict(cycle, blocked, meetings), blocked)
    for start in blocked:
        chain = _wait_chain(start, blocked, meetings)
        waiting = [rank for rank, issue in blocked.items() if chain[-1] in meetings.missing_ranks(issue)]
        return _absence_verdict(chain[-1], waiting, blocked, meetings)
    return None


def wrong_group(record: Record, later: Record) -> Verdict | None:
    """Return the verdict on ranks that wait for each other because one has passed the wrong group; None if none has.

    Args:
        record: Record of a run that stalled.
        later: Record of the same run with operations of the blocked ranks that end at once: a rank that still never
            issues the operation in which another one waits for it has not merely another order.
    """
    meetings = Meetings(record)
    blocked = meetings.blocked
    issued = {(issue.rank, issue.key, issue.seq, issue.op) for issue in later.issues}
    waiting: dict[tuple[str, int], list[int]] = {}
    for rank, issue in blocked.items():
        waiting.setdefault((issue.key, issue.seq), []).append(rank)
    never = [
        (own, other)
        for other in blocked.values()
        for own in map(blocked.get, meetings.missing_ranks(other))
        if own and later.left.get(own.rank) == "" and (own.rank, other.key, other.seq, other.op) not in issued
    ]
    if not never:
        return None
    own, other = min(never, key=lambda pair: len(waiting[pair[0].key, pair[0].seq]))
    ranks = waiting[other.key, other.seq]
    text = (
        f"rank {own.rank} waits in {own.title}, and never issues {other.title}, in which {rank_names(ranks)} "
        f"wait{'s' * (len(ranks) == 1)} for it: pass the same group on all ranks"
    )
    lines = tuple(dict.fromkeys((own.line, other.line)))
    return Verdict(kind="wrong group", text=text, ranks=(own.rank, *ranks), lines=lines)


def _wait_chain(start: int, blocked: dict[int, Issue], meetings: Meetings) -> list[int]:
    """Follow waits from a rank to one that is not blocked, or that the chain has already."""
    chain = [start]
    while chain[-1] in blocked:
        missing = meetings.missing_ranks(blocked[chain[-1]])
        free = [rank for rank in missing if rank not in blocked]
        following = (free or missing)[0]
        chain.append(following)
        if following in chain[:-1]:
            break
    return chain


def _cycle_verdict(cycle: list[int], blocked: dict[int, Issue], meetings: Meetings) -> Verdict:
    """Return the verdict on ranks that wait for each other: tags, order of messages, or order of groups."""
    start = cycle.index(min(cycle))
    ranks = cycle[start:] + cycle[:start]
    issues = [blocked[rank] for rank in ranks]
    pairs = zip(issues, [*ranks[1:], ranks[0]], strict=True)
    text = ", and ".join(f"rank {issue.rank} waits in {issue.title} for rank {following}" for issue, following in pairs)
    lines = tuple(dict.fromkeys(issue.line for issue in issues))
    messages_only = all(issue.is_message for issue in issues)
    if messages_only and len(issues) == 2 and issues[0].op != issues[1].op and issues[0].tag != issues[1].tag:
        explained = f"{text}: the tags are in another order on one of them"
        return Verdict(kind="tags differ", text=explained, ranks=tuple(ranks), lines=lines)
    for issue in issues:
        if (verdict := _other_tag(issue, meetings)) is not None:
            return verdict
    if messages_only:
        kinds_of_end = {issue.op for issue in issues}
        order = {"send": "each sends before it receives", "recv": "each receives before it sends"}.get(
            issues[0].op if len(kinds_of_end) == 1 else "", "sends and receives are in an order that cannot meet"
        )
        return Verdict(kind="circular messages", text=f"{text}; {order}", ranks=tuple(ranks), lines=lines)
    messages = [issue for issue in issues if issue.is_message and issue.peer is not None]
    if len(messages) == 1:  # the other end would come later, if at all
        issue = messages[0]
        kind, act = _ONE_END[issue.op]
        never = "it never does, or does so too late"
        if issue.name:
            kind, never = "skipped collective", f"it calls no {issue.name}, or only one of them passes split sizes"
        explained = f"{text}; rank {_other_end(issue)} has not {act} it: {never}"
        return Verdict(kind=kind, text=explained, ranks=tuple(ranks), lines=lines)
    advice = "ranks must issue the operations of all groups that they share in one order"
    return Verdict(kind="order inversion", text=f"{text}; {advice}", ranks=tuple(ranks), lines=lines)


def _with_other_waits(verdict: Verdict, blocked: dict[int, Issue]) -> Verdict:
    """Return the verdict on a cycle, which also names the operations in which ranks outside of it wait."""
    waiting: dict[str, list[Issue]] = {}
    for rank, issue in blocked.items():
        if rank not in verdict.ranks:
            waiting.setdefault(issue.title, []).append(issue)
    if not waiting or verdict.kind not in ("order inversion", "circular messages"):
        return verdict
    issues = [issue for same in waiting.values() for issue in same]
    waits = [
        f"{rank_names([issue.rank for issue in same])} wait{'s' * (len(same) == 1)} in {title}"
        for title, same in waiting.items()
    ]
    return replace(
        verdict,
        text=f"{verdict.text}; outside of this cycle, {', and '.join(waits)}",
        ranks=(*verdict.ranks, *sorted(issue.rank for issue in issues)),
        lines=tuple(dict.fromkeys((*verdict.lines, *(issue.line for issue in issues)))),
    )


def _skip_in_cycle(cycle: list[int], blocked: dict[int, Issue], meetings: Meetings) -> Verdict | None:
    """Return the verdict on a collective that a rank of a cycle skipped earlier, if lines show one."""
    for rank in cycle:
        issue = blocked[rank]
        if not issue.is_message:
            for missing in meetings.missing_ranks(issue):
                skip = _first_skip(issue, missing, meetings)
                if skip is not None and skip[0] is not issue:
                    return _skip_verdict(missing, skip, [rank], meetings)
    return None


def _absence_verdict(rank: int, waiting: list[int], blocked: dict[int, Issue], meetings: Meetings) -> Verdict:
    """Return the verdict on a rank for which others wait, and which waits for nobody."""
    issue = blocked[waiting[0]]
    if issue.is_message:
        return _unmatched_message(issue, rank, meetings)
    skip = _first_skip(issue, rank, meetings) or (issue, None)
    return _skip_verdict(rank, skip, waiting, meetings)


def _first_skip(issue: Issue, rank: int, meetings: Meetings) -> tuple[Issue, Issue | None] | None:
    """Return the first operation of a group that a rank has skipped, and the one it has issued instead.

    The lines of the rank that waits and those of the rank that does not come are compared one by one.
    """
    of_group = meetings.of_key[issue.key]
    full, short = of_group.get(issue.rank, []), of_group.get(rank, [])
    for position, skipped in enumerate(full):
        if position >= len(short):
            return skipped, None
        instead = short[position]
        # what it has issued instead comes later on the other rank: this one is skipped
        if instead.line != skipped.line and instead.line in [later.line for later in full[position + 1 :]]:
            return skipped, instead
    return None


def _skip_verdict(rank: int, skip: tuple[Issue, Issue | None], waiting: list[int], meetings: Meetings) -> Verdict:
    """Return the verdict on a skipped collective, its next action and the ranks that wait for it."""
    skipped, instead = skip
    others = [member for member in meetings.of_key[skipped.key] if member != rank]
    went_on = _later_action(rank, skipped, instead, meetings)
    text = (
        f"rank {rank} skipped {skipped.label}, which {rank_names(others)} "
        f"issued at {skipped.line}; rank {rank} {went_on}; {rank_names(waiting)} wait{'s' * (len(waiting) == 1)} for it"
    )
    lines = [skipped.line] + ([instead.line] if instead is not None else [])
    last = meetings.last_issue(rank)
    if instead is None and last is not None:
        lines.append(last.line)
    return Verdict(kind="skipped collective", text=text, ranks=(rank, *waiting), lines=tuple(dict.fromkeys(lines)))


def _later_action(rank: int, skipped: Issue, instead: Issue | None, meetings: Meetings) -> str:
    """Describe the action of a rank after an operation that it skipped."""
    if instead is not None:
        return f"went on to {instead.title} instead"
    last, ended = meetings.last_issue(rank), meetings.record.left.get(rank)
    at = meetings.record.places.get(rank)
    after = f" after {last.title}" if last is not None else " and issued nothing"
    if ended is not None:
        return f"{ended or 'ended its program'}{after}"
    return f"is at {at}{after}" if at else f"did nothing{after}"


def _unmatched_message(issue: Issue, rank: int, meetings: Meetings) -> Verdict:
    """Return the verdict on a message that has one end."""
    stopped = rank in meetings.record.stopped
    if issue.peer is None and not stopped:
        if (verdict := _other_tag(issue, meetings)) is not None:
            return verdict
        text = f"rank {issue.rank} receives from any rank with tag {issue.tag} at {issue.line}, and no rank sends"
        return Verdict(kind="receive without a send", text=text, ranks=(issue.rank,), lines=(issue.line,))
    if issue.name:
        text = f"rank {issue.rank} waits in {issue.title}, and rank {rank} never calls {issue.name}"
        return Verdict(kind="skipped collective", text=text, ranks=(rank, issue.rank), lines=(issue.line,))
    other = "recv" if issue.op == "send" else "send"
    near = [
        end
        for end in meetings.of_rank[rank]
        if not stopped
        and end.op == other
        and end.unfinished
        and (end.peer in (issue.rank, None))
        and end.tag != issue.tag
    ]
    act = ("sends to", "receives") if issue.op == "send" else ("receives from", "sends")
    peer, it = ("any rank", f"rank {rank}") if issue.peer is None else (f"rank {rank}", "it")
    text = f"rank {issue.rank} {act[0]} {peer} with tag {issue.tag} at {issue.line}, and {it} never {act[1]}"
    if near:
        text += f": it waits in {near[0].title}, whose tag is {near[0].tag}"
        return Verdict(kind="tags differ", text=text, ranks=(issue.rank, rank), lines=(issue.line, near[0].line))
    last = meetings.last_issue(rank)
    ended = meetings.record.left.get(rank)
    after = f" after {last.title}" if last is not None else ""
    if ended is not None:
        text += f": it {ended or 'ended its program'}{after}"
    elif last:
        text += f": its last operation is {last.title}"
    lines = (issue.line, *([last.line] if last is not None else []))
    ranks = (rank, issue.rank) if stopped else (issue.rank, rank)  # else either may be at fault
    return Verdict(kind=_ONE_END[issue.op][0], text=text, ranks=ranks, lines=lines)


def _other_tag(issue: Issue, meetings: Meetings) -> Verdict | None:
    """Return the verdict on a receive that waits while a message with a tag not received is under way."""
    if issue.op != "recv" or issue.name:
        return None
    received = {each.tag for each in meetings.of_rank[issue.rank] if each.op == "recv"}
    senders = range(meetings.record.size) if issue.peer is None else (issue.peer,)
    for send in (each for rank in senders for each in meetings.of_rank[rank]):
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
    """Return the verdict on two ranks that disagree about an operation: which rank differs from the others."""
    for (_, number), ends in Meetings(record).ends.items():
        both = [end for end in ends.values() if end.rank in ranks]
        if number != seq or len({end.rank for end in both}) < 2 or both[0].group != group:
            continue
        if len({_call_text(end) for end in both}) < 2:
            continue
        return _mismatch_verdict(record, list(ends.values()))
    return None


def _call_text(issue: Issue) -> str:
    """Return the call of an issue as text, to compare ends."""
    return f"{issue.op} {issue.what}"


def _mismatch_verdict(record: Record, ends: list[Issue]) -> Verdict:
    """Return the verdict on the ends of one operation: the smallest side is at fault."""
    by_call: dict[str, list[Issue]] = {}
    for end in ends:
        by_call.setdefault(_call_text(end), []).append(end)
    sides = sorted(by_call.values(), key=lambda side: (len(side), -side[0].rank))
    odd, usual = sides[0], sides[-1]
    message = odd[0].is_message
    calls = f"{rank_names([e.rank for e in odd])} called {odd[0].what or odd[0].op} at {odd[0].line}, " + (
        f"{rank_names([e.rank for e in usual])} called {usual[0].what or usual[0].op} at {usual[0].line}"
    )
    where = f"message #{odd[0].seq}" if message else f"operation #{odd[0].seq} on group '{odd[0].group}'"
    reused = _sends_of_one_tag(record, odd[0]) if message else []
    again = (
        f"; messages sent at {' and '.join(reused)} have the same tag {odd[0].tag}, and are received in the order of "
        "their sending"
    )
    return Verdict(
        kind="tag reused" if reused else "mismatch",
        text=f"{where} differs between ranks: {calls}{again if reused else ''}",
        ranks=tuple(e.rank for e in (*odd, *usual)),
        lines=tuple(dict.fromkeys((*reused, odd[0].line, usual[0].line))),
    )


def _sends_of_one_tag(record: Record, issue: Issue) -> list[str]:
    """Return the lines that send the messages of a tag, if these are not alike."""
    sends = [send for send in record.issues if send.op == "send" and send.key == issue.key]
    alike = len({send.what for send in sends}) < 2
    return [] if alike else list(dict.fromkeys(send.line for send in sends))

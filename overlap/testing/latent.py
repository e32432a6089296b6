"""Latent faults: they did a run no harm, and hang or go wrong on other machines; found in its record. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, zip_longest

from ..ranklist import named_ranks
from .record import GroupCall, Issue, Record, Verdict, WeightRecord

Meeting = tuple[str, int]


def find_order_cycle(record: Record) -> Verdict | None:
    """Find operations of several groups that ranks have issued in different orders.

    Each rank's order says which operation comes before which. If the orders of all ranks together have a cycle, ranks
    that carried out one operation after the other, as a GPU may, would wait for each other for ever.
    """
    collectives = [issue for issue in record.issues if not issue.call.is_message and len(issue.call.members) > 1]
    last_issue: dict[tuple[int, int], Issue] = {}  # by thread: while one waits, the others of its rank go on
    graph: dict[Meeting, dict[Meeting, tuple[Issue, Issue]]] = {}
    for issue in collectives:
        earlier = last_issue.get((issue.rank, issue.thread))
        if earlier is not None:
            graph.setdefault(issue.end.meeting, {}).setdefault(earlier.end.meeting, (earlier, issue))
        last_issue[issue.rank, issue.thread] = issue
    try:
        TopologicalSorter({node: set(edges) for node, edges in graph.items()}).prepare()
    except CycleError as error:
        return _inversion_verdict(_join_neighbouring_pairs(graph, error.args[1]))
    return None


def _join_neighbouring_pairs(
    graph: dict[Meeting, dict[Meeting, tuple[Issue, Issue]]], cycle: list[Meeting]
) -> list[tuple[Issue, Issue]]:
    """Return the pairs of issues along a cycle, earlier and later one of a rank; pairs of one rank become one."""
    pairs = [graph[later][earlier] for earlier, later in pairwise(cycle) if earlier in graph.get(later, {})]
    joined: list[tuple[Issue, Issue]] = []
    for earlier, later in pairs:
        if joined and joined[-1][1].rank == earlier.rank:
            joined[-1] = joined[-1][0], later
        else:
            joined.append((earlier, later))
    if len(joined) > 1 and joined[-1][1].rank == joined[0][0].rank:
        joined[0] = joined.pop()[0], joined[0][1]
    return joined


def _inversion_verdict(pairs: list[tuple[Issue, Issue]]) -> Verdict:
    """Return the verdict on a cycle of orders, from the lowest rank on."""
    start = min(range(len(pairs)), key=lambda at: pairs[at][0].rank)
    pairs = pairs[start:] + pairs[:start]
    orders = [f"rank {a.rank} issues {a.title} before {b.title}" for a, b in pairs]
    lines = tuple(dict.fromkeys(issue.call.site for pair in pairs for issue in pair))
    return Verdict(
        kind="cycle",
        text=f"{', and '.join(orders)}; this run survived it, but where groups share streams or slots it hangs",
        ranks=tuple(dict.fromkeys(a.rank for a, _ in pairs)),
        lines=lines,
    )


def find_partial_group(record: Record, finished: set[int]) -> Verdict | None:
    """Find a group that only some ranks have made.

    Args:
        finished: Ranks with a program that ended well; the others may make the group later.
    """
    calls_of = _calls_by_rank(record)
    counts = {rank: Counter(call.ranks for call in calls) for rank, calls in calls_of.items()}
    for call in record.group_calls:
        if call.alone:
            continue
        most = max(count[call.ranks] for count in counts.values())
        lacking = [rank for rank in counts if counts[rank][call.ranks] < most]
        sure = [rank for rank in lacking if rank in finished or _is_past(calls_of[rank], call, calls_of[call.rank])]
        if sure:
            makers = [rank for rank in counts if rank not in lacking]
            text = (
                f"the group of {named_ranks(call.ranks)} was made by {named_ranks(makers)} at {call.line}, and never "
                f"by {named_ranks(sure)}: all ranks must call new_group, also those outside of it"
            )
            return Verdict(kind="group of some", text=text, ranks=(*sure, *makers), lines=(call.line,))
    return None


def _is_past(own_calls: list[GroupCall], call: GroupCall, calls: list[GroupCall]) -> bool:
    """Whether a rank has made a group that comes after this call on the other rank."""
    at = calls.index(call) if call in calls else 0
    later = {other.ranks for other in calls[at + 1 :]} - {other.ranks for other in calls[: at + 1]}
    return any(other.ranks in later for other in own_calls)


def find_group_order_difference(record: Record) -> Verdict | None:
    """Find groups that ranks have made in different orders, so that ranks of other groups meet under one number."""
    calls_of = _calls_by_rank(record)
    (first, theirs), *others = calls_of.items()
    for rank, mine in others:
        for a, b in zip(theirs, mine, strict=False):
            if a.ranks != b.ranks and _is_past(mine, a, theirs):
                text = (
                    f"rank {rank} made the group of {named_ranks(b.ranks)} at {b.line} where rank {first} made that of "
                    f"{named_ranks(a.ranks)} at {a.line}: all ranks must call new_group for all groups in one order"
                )
                lines = tuple(dict.fromkeys((b.line, a.line)))
                return Verdict(kind="group order", text=text, ranks=(rank, first), lines=lines)
    return None


def find_group_members_difference(record: Record) -> Verdict | None:
    """Find a call of `new_group` that ranks made with different lists of ranks.

    A list that the other rank has too, in another call, is a matter of order, or of a call that it left out.
    """
    calls_of = _calls_by_rank(record)
    for calls in zip_longest(*calls_of.values()):
        by_ranks: dict[tuple[int, ...], list[GroupCall]] = {}
        for call in filter(None, calls):
            by_ranks.setdefault(call.ranks, []).append(call)
        sides = sorted(by_ranks.values(), key=len)
        if len(sides) < 2 or sides[0][0].line != sides[-1][0].line:
            continue
        odd, usual = sides[0], sides[-1]
        if _calls_for(calls_of[usual[0].rank], odd[0].ranks) or _calls_for(calls_of[odd[0].rank], usual[0].ranks):
            continue
        text = (
            f"{named_ranks([call.rank for call in odd])} called new_group for {named_ranks(odd[0].ranks)} at "
            f"{odd[0].line}, {named_ranks([call.rank for call in usual])} for {named_ranks(usual[0].ranks)} there: "
            "all ranks must pass the same list"
        )
        ranks = tuple(call.rank for call in (*odd, *usual))
        return Verdict(kind="group members", text=text, ranks=ranks, lines=(odd[0].line,))
    return None


def _calls_for(calls: list[GroupCall], ranks: tuple[int, ...]) -> bool:
    return any(call.ranks == ranks for call in calls)


def _calls_by_rank(record: Record) -> dict[int, list[GroupCall]]:
    """Return the calls of `new_group` by rank, without calls that only members of the group make."""
    return {
        rank: [call for call in record.group_calls if call.rank == rank and not call.alone]
        for rank in range(record.size)
    }


def find_reused_tag(record: Record) -> Verdict | None:
    """Find two messages in flight between two ranks that their equal tags do not distinguish.

    Only tags that the program names count, and messages that two of its lines send and two receive: a line that sends
    repeatedly means its order.
    """
    messages = [issue for issue in record.issues if issue.call.is_message and issue.call.tag]
    ends = {(issue.call.key, issue.seq, issue.call.op): issue for issue in messages}
    for (key, seq, op), first in ends.items():
        call = first.call
        second = ends.get((key, seq + 1, "send"))
        received = [ends.get((key, number, "recv")) for number in (seq, seq + 1)]
        if op != "send" or second is None or second.call.site == first.call.site or None in received:
            continue
        places = [receive.call.site for receive in received if receive is not None]
        if places[0] == places[1] or (first.waited_ns is not None and first.waited_ns <= second.issued_ns):
            continue
        text = (
            f"rank {first.rank} sends to rank {call.peer} with tag {call.tag} at {call.site} and at {second.call.site} "
            f"while the first message is under way; rank {call.peer} receives at {places[0]} and then at {places[1]}: "
            "only their order says which is which; give each message a tag of its own"
        )
        lines = tuple(dict.fromkeys((call.site, second.call.site, *places)))
        return Verdict(kind="tag reused", text=text, ranks=call.members, lines=lines)
    return None


def find_buffer_in_flight(record: Record) -> Verdict | None:
    """Find a tensor that the program used while an operation was under way."""
    if not record.touches:
        return None
    touch = record.touches[0]
    issue = touch.issue
    advice = f"{issue.dropped_by} never waits for it" if issue.dropped_by else "wait for it first"
    return Verdict(
        kind="buffer in flight",
        text=(
            f"rank {touch.rank} {'reads' if touch.how == 'read' else 'changes'} a tensor at {touch.line} ({touch.by}) "
            f"while {issue.title} is under way: {advice}"
        ),
        ranks=(touch.rank,),
        lines=(touch.line, issue.call.site),
    )


def find_missing_gradient(record: Record) -> Verdict | None:
    """Find a weight without a gradient in an update, on some ranks only."""
    for step, records in _weights_by_step(record):
        missing = {rank: set(each.without_gradient) for rank, each in records.items()}
        common = set.intersection(*missing.values())
        for rank, names in missing.items():
            for name in sorted(names - common):
                lacking = [other for other in missing if name in missing[other]]
                line = records[rank].line
                text = (
                    f"{named_ranks(lacking)} had no gradient of '{name}' in update {step} ({line}), "
                    f"{named_ranks([other for other in missing if other not in lacking])} had one"
                )
                return Verdict(kind="gradient missing", text=text, ranks=tuple(lacking), lines=(line,))
    return None


def find_weight_difference(record: Record, *, lasting: bool = False) -> Verdict | None:
    """Find the first weight that differs between ranks, and the update after which it does.

    Args:
        lasting: Whether only a difference counts that no later update removes.
    """
    lasting_difference: Verdict | None = None
    have_been_equal = False  # whether the ranks differed before, and then not
    for step, records in _weights_by_step(record):
        differing = _weight_difference(record, step, records, again=have_been_equal)
        if differing is not None and not lasting:
            return differing
        have_been_equal = have_been_equal or (lasting_difference is not None and differing is None)
        lasting_difference = differing and (lasting_difference or differing)
    return lasting_difference


def _weight_difference(record: Record, step: int, records: dict[int, WeightRecord], *, again: bool) -> Verdict | None:
    """Find the first weight that differs between ranks after an update."""
    for name in dict.fromkeys(name for rank in sorted(records) for name in records[rank].digests):
        having = [rank for rank in sorted(records) if name in records[rank].digests or " [part " not in name]
        digests = {rank: records[rank].digests.get(name, "") for rank in having}
        commonest = Counter(digests.values()).most_common(1)[0][0]  # of several the first rank's
        odd_ranks = [rank for rank, digest in digests.items() if digest != commonest]
        if not odd_ranks:
            continue
        odd, usual = odd_ranks[0], next(rank for rank in digests if rank not in odd_ranks)
        line = records[odd].line
        since = f"from update {step} ({line}) on," if again else f"after update {step} ({line}), and not before,"
        when = since if step else "before the first update"
        when += " since the last Join" if records[odd].joins else ""
        text = f"{when} '{name}' differs: {named_ranks(odd_ranks)} ({digests[odd]}) from rank {usual} ({commonest})"
        text += _setting_difference(records, odd_ranks, usual) or _random_difference(record, odd, usual, step)
        return Verdict(kind="weights differ", text=text, ranks=(*odd_ranks, usual), lines=tuple(filter(None, (line,))))
    return None


def _setting_difference(records: dict[int, WeightRecord], odd_ranks: list[int], usual: int) -> str:
    """Return a clause on the first setting in which the optimizers of ranks differ; "" if none."""
    for rank in odd_ranks:
        groups = records[rank].settings
        for number, (own, other) in enumerate(zip(groups, records[usual].settings, strict=False)):
            for name, value in own.items():
                if value != other.get(name, value):
                    where = f"{name} in its group {number}" if len(groups) > 1 else name
                    return f"; the optimizer of rank {rank} has {where} = {value}, that of rank {usual} {other[name]}"
    return ""


def _random_difference(record: Record, odd: int, usual: int, step: int) -> str:
    """Return a clause on the line at which two ranks first have other random numbers; "" if none.

    Ranks whose random numbers differed before the first update have their own by right, as those of their data.
    """
    first = {weights.rank: weights.randomness for weights in reversed(record.weights)}
    if step and first[odd] != first[usual]:
        return ""
    mine, theirs = record.of(odd), record.of(usual)
    for a, b in zip(mine, theirs, strict=False):
        if a.randomness and b.randomness and a.randomness != b.randomness and a.call.site == b.call.site:
            return f"; at {a.title} the random numbers of rank {odd} are no longer those of rank {usual}"
    return ""


def _weights_by_step(record: Record) -> Iterator[tuple[int, dict[int, WeightRecord]]]:
    """Yield each update that several ranks made: its number, and the weights of these ranks."""
    updates: dict[tuple[int, int], dict[int, WeightRecord]] = {}
    for weights in record.weights:
        updates.setdefault((weights.joins, weights.step), {})[weights.rank] = weights
    for joins, step in sorted(updates):
        if len(updates[joins, step]) > 1:
            yield step, updates[joins, step]


def find_leak(record: Record) -> Verdict | None:
    """Find a resource that a rank has left behind."""
    for rank, what, line in record.leaks:
        return Verdict(kind="leak", text=f"rank {rank} {what}", ranks=(rank,), lines=(line,) if line else ())
    return None

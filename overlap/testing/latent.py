"""Latent faults of a program, found in the record of a run: they did no harm in this run, but may on other machines.

Each `find_` function returns the verdict on the first fault of one kind, or None if the record shows none. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, zip_longest
from typing import NamedTuple

from ..ranklist import named_ranks
from .record import GroupCall, Issue, Record, Verdict, WeightRecord

Meeting = tuple[str, int]


class _Order(NamedTuple):
    """Two operations in the order in which a rank issued them."""

    earlier: Issue
    later: Issue


def find_order_cycle(record: Record) -> Verdict | None:
    """Find operations of several groups that ranks have issued in different orders.

    If rank 0 issues A before B, and rank 1 issues B before A, the orders have a cycle. Ranks that carry out one
    operation after the other, as a GPU may, would then wait for each other for ever.
    """
    collectives = [issue for issue in record.issues if not issue.call.is_message and len(issue.call.members) > 1]
    last_issue: dict[tuple[int, int], Issue] = {}  # by (rank, thread), as each thread has an order of its own
    graph: dict[Meeting, dict[Meeting, _Order]] = {}
    for issue in collectives:
        earlier = last_issue.get((issue.rank, issue.thread))
        if earlier is not None:
            graph.setdefault(issue.end.meeting, {}).setdefault(earlier.end.meeting, _Order(earlier, issue))
        last_issue[issue.rank, issue.thread] = issue
    try:
        TopologicalSorter({node: set(edges) for node, edges in graph.items()}).prepare()
    except CycleError as error:
        return _order_cycle_verdict(_orders_along_cycle(graph, error.args[1]))
    return None


def _orders_along_cycle(graph: dict[Meeting, dict[Meeting, _Order]], cycle: list[Meeting]) -> list[_Order]:
    """Return the orders along a cycle of operations; successive ones of one rank become one, from first to last."""
    joined: list[_Order] = []
    for earlier, later in pairwise(cycle):
        if earlier in graph.get(later, {}):
            order = graph[later][earlier]
            if joined and joined[-1].later.rank == order.earlier.rank:
                order = _Order(joined.pop().earlier, order.later)
            joined.append(order)
    if len(joined) > 1 and joined[-1].later.rank == joined[0].earlier.rank:  # the cycle began within this rank
        joined[0] = _Order(joined.pop().earlier, joined[0].later)
    return joined


def _order_cycle_verdict(orders: list[_Order]) -> Verdict:
    """Return the verdict on a cycle of orders; its text begins with the lowest rank."""
    start = min(range(len(orders)), key=lambda at: orders[at].earlier.rank)
    orders = orders[start:] + orders[:start]
    parts = [f"rank {earlier.rank} issues {earlier.title} before {later.title}" for earlier, later in orders]
    text = f"{', and '.join(parts)}; this run survived it, but where groups share streams or slots it hangs"
    ranks = tuple(dict.fromkeys(order.earlier.rank for order in orders))
    lines = tuple(dict.fromkeys(issue.call.site for order in orders for issue in order))
    return Verdict(kind="cycle", text=text, ranks=ranks, lines=lines)


def find_partial_group(record: Record, finished: set[int]) -> Verdict | None:
    """Find a group for which only some ranks have called `new_group`.

    Args:
        record: The record of the run.
        finished: Ranks whose program has ended; others might still call it.
    """
    calls_of = _group_calls_by_rank(record)
    counts = {rank: Counter(call.ranks for call in calls) for rank, calls in calls_of.items()}
    for call in record.group_calls:
        if call.alone:
            continue
        most = max(count[call.ranks] for count in counts.values())
        lacking = [rank for rank in counts if counts[rank][call.ranks] < most]
        sure = [rank for rank in lacking if rank in finished or _has_passed(calls_of[rank], call, calls_of[call.rank])]
        if sure:
            makers = [rank for rank in counts if rank not in lacking]
            text = (
                f"the group of {named_ranks(call.ranks)} was made by {named_ranks(makers)} at {call.line}, and never "
                f"by {named_ranks(sure)}: all ranks must call new_group, also those outside of it"
            )
            return Verdict(kind="group of some", text=text, ranks=(*sure, *makers), lines=(call.line,))
    return None


def _has_passed(own_calls: list[GroupCall], call: GroupCall, calls: list[GroupCall]) -> bool:
    """Whether `own_calls` have a group that `calls` have only after `call`: then their rank never makes `call`."""
    at = calls.index(call) if call in calls else 0
    later = {other.ranks for other in calls[at + 1 :]} - {other.ranks for other in calls[: at + 1]}
    return any(other.ranks in later for other in own_calls)


def find_group_order_difference(record: Record) -> Verdict | None:
    """Find groups that ranks have made in different orders; PyTorch numbers groups, so they would be mixed up."""
    calls_of = _group_calls_by_rank(record)
    # Each rank is compared with the first one.
    (first, theirs), *others = calls_of.items()
    for rank, mine in others:
        for a, b in zip(theirs, mine, strict=False):
            if a.ranks != b.ranks and _has_passed(mine, a, theirs):
                text = (
                    f"rank {rank} made the group of {named_ranks(b.ranks)} at {b.line} where rank {first} made that of "
                    f"{named_ranks(a.ranks)} at {a.line}: all ranks must call new_group for all groups in one order"
                )
                lines = tuple(dict.fromkeys((b.line, a.line)))
                return Verdict(kind="group order", text=text, ranks=(rank, first), lines=lines)
    return None


def find_group_members_difference(record: Record) -> Verdict | None:
    """Find a call of `new_group` in which ranks passed different lists of ranks.

    If a rank passes the list of the other rank in another call, then the order differs, or a call was left out: other
    functions find these faults.
    """
    calls_of = _group_calls_by_rank(record)
    for calls in zip_longest(*calls_of.values()):
        by_ranks: dict[tuple[int, ...], list[GroupCall]] = {}
        for call in filter(None, calls):
            by_ranks.setdefault(call.ranks, []).append(call)
        sides = sorted(by_ranks.values(), key=len)
        odd_call, usual_call = sides[0][0], sides[-1][0]
        if len(sides) < 2 or odd_call.line != usual_call.line:
            continue
        if _has_call_like(odd_call, calls_of[usual_call.rank]) or _has_call_like(usual_call, calls_of[odd_call.rank]):
            continue
        odd_ranks, usual_ranks = ([call.rank for call in side] for side in (sides[0], sides[-1]))
        text = (
            f"{named_ranks(odd_ranks)} called new_group for {named_ranks(odd_call.ranks)} at {odd_call.line}, "
            f"{named_ranks(usual_ranks)} for {named_ranks(usual_call.ranks)} there: all ranks must pass the same list"
        )
        return Verdict(kind="group members", text=text, ranks=(*odd_ranks, *usual_ranks), lines=(odd_call.line,))
    return None


def _has_call_like(call: GroupCall, calls: list[GroupCall]) -> bool:
    """Whether one of `calls` has the same list of ranks as `call`."""
    return any(other.ranks == call.ranks for other in calls)


def _group_calls_by_rank(record: Record) -> dict[int, list[GroupCall]]:
    """Return the calls of `new_group` by rank, without calls that only members of the group need to make."""
    calls: dict[int, list[GroupCall]] = {rank: [] for rank in range(record.size)}
    for call in record.group_calls:
        if not call.alone:
            calls[call.rank].append(call)
    return calls


def find_reused_tag(record: Record) -> Verdict | None:
    """Find two messages with one tag that are in flight between two ranks at once, so that only their order tells them.

    Only tags that the program passes count, and only messages sent at two lines and received at two lines: a line that
    sends repeatedly relies on the order on purpose.
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
    text = (
        f"rank {touch.rank} {'reads' if touch.how == 'read' else 'changes'} a tensor at {touch.line} ({touch.by}) "
        f"while {issue.title} is under way: {advice}"
    )
    return Verdict(kind="buffer in flight", text=text, ranks=(touch.rank,), lines=(touch.line, issue.call.site))


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
        record: The record of the run.
        lasting: Whether only a difference counts that still exists at the end of the run.
    """
    lasting_difference: Verdict | None = None
    have_been_equal = False  # whether ranks have differed and then were equal again
    for step, records in _weights_by_step(record):
        differing = _judge_weights(record, step, records, again=have_been_equal)
        if differing is not None and not lasting:
            return differing
        have_been_equal = have_been_equal or (lasting_difference is not None and differing is None)
        lasting_difference = differing and (lasting_difference or differing)
    return lasting_difference


def _judge_weights(record: Record, step: int, records: dict[int, WeightRecord], *, again: bool) -> Verdict | None:
    """Return the verdict on the first weight that differs between ranks after an update; None if all are equal.

    Step 0 is before the first update. With `again`, ranks differed earlier, and were equal again in between.
    """
    for name in dict.fromkeys(name for rank in sorted(records) for name in records[rank].digests):
        having = [rank for rank in sorted(records) if name in records[rank].digests or " [part " not in name]
        digests = {rank: records[rank].digests.get(name, "") for rank in having}
        [(commonest, _)] = Counter(digests.values()).most_common(1)  # of several, that of the first rank
        odd_ranks = [rank for rank, digest in digests.items() if digest != commonest]
        if not odd_ranks:
            continue
        odd, usual = odd_ranks[0], next(rank for rank in digests if rank not in odd_ranks)
        line = records[odd].line
        since = f"from update {step} ({line}) on," if again else f"after update {step} ({line}), and not before,"
        when = since if step else "before the first update"
        when += " since the last Join" if records[odd].joins else ""
        text = f"{when} '{name}' differs: {named_ranks(odd_ranks)} ({digests[odd]}) from rank {usual} ({commonest})"
        text += _optimizer_setting_clause(records, odd_ranks, usual) or _random_numbers_clause(record, odd, usual, step)
        return Verdict(kind="weights differ", text=text, ranks=(*odd_ranks, usual), lines=tuple(filter(None, (line,))))
    return None


def _optimizer_setting_clause(records: dict[int, WeightRecord], odd_ranks: list[int], usual: int) -> str:
    """Return a clause on the first setting in which optimizers of ranks differ, such as the learning rate, or ""."""
    for rank in odd_ranks:
        groups = records[rank].settings
        for number, (own, other) in enumerate(zip(groups, records[usual].settings, strict=False)):
            for name, value in own.items():
                if value != other.get(name, value):
                    where = f"{name} in its group {number}" if len(groups) > 1 else name
                    return f"; the optimizer of rank {rank} has {where} = {value}, that of rank {usual} {other[name]}"
    return ""


def _random_numbers_clause(record: Record, odd: int, usual: int, step: int) -> str:
    """Return a clause on the line at which the random numbers of two ranks first differ, or "" if they never do.

    Ranks whose random numbers differ before the first update are meant to, as for their data: the result is "".
    """
    first = {weights.rank: weights.randomness for weights in reversed(record.weights)}
    if step and first[odd] != first[usual]:
        return ""
    mine, theirs = record.issues_of(odd), record.issues_of(usual)
    for a, b in zip(mine, theirs, strict=False):
        if a.randomness and b.randomness and a.randomness != b.randomness and a.call.site == b.call.site:
            return f"; at {a.title} the random numbers of rank {odd} are no longer those of rank {usual}"
    return ""


def _weights_by_step(record: Record) -> Iterator[tuple[int, dict[int, WeightRecord]]]:
    """Yield the number of each update that several ranks made, and the records of these ranks."""
    updates: dict[tuple[int, int], dict[int, WeightRecord]] = {}
    for weights in record.weights:
        updates.setdefault((weights.joins, weights.step), {})[weights.rank] = weights
    for joins, step in sorted(updates):
        if len(updates[joins, step]) > 1:
            yield step, updates[joins, step]


def find_leak(record: Record) -> Verdict | None:
    """Find a resource that a rank's program has not closed: an operation, a file or a thread."""
    if not record.leaks:
        return None
    rank, what, line = record.leaks[0]
    return Verdict(kind="leak", text=f"rank {rank} {what}", ranks=(rank,), lines=(line,) if line else ())

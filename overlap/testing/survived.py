"""Faults of a program that a run survived: a static pass over the record finds hangs that other machines would show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, zip_longest

from .record import Issue, Made, Record, Touch, WeightRecord
from .verdict import Verdict, named

Meeting = tuple[str, int]


def inversion(record: Record) -> Verdict | None:
    """Return operations of several groups that ranks have issued in different orders.

    Each rank's order says which operation comes before which. If the orders of all ranks together have a cycle, ranks
    that carried out one operation after the other, as a GPU may, would wait for each other for ever.
    """
    collectives = [each for each in record.issues if not each.is_message and len(each.members) > 1]
    last: dict[tuple[int, int], Issue] = {}  # by thread: while one waits, the others of its rank go on
    before: dict[Meeting, dict[Meeting, tuple[Issue, Issue]]] = {}
    for issue in collectives:
        earlier = last.get((issue.rank, issue.thread))
        if earlier is not None:
            before.setdefault((issue.key, issue.seq), {}).setdefault((earlier.key, earlier.seq), (earlier, issue))
        last[issue.rank, issue.thread] = issue
    try:
        TopologicalSorter({node: set(edges) for node, edges in before.items()}).prepare()
    except CycleError as error:
        return _inversion(_shortest(before, error.args[1]))
    return None


def _shortest(
    before: dict[Meeting, dict[Meeting, tuple[Issue, Issue]]], cycle: list[Meeting]
) -> list[tuple[Issue, Issue]]:
    """Return the pairs of a cycle, earlier and later issue of one rank, joined where one rank goes on."""
    pairs = [before[later][earlier] for earlier, later in pairwise(cycle) if earlier in before.get(later, {})]
    joined: list[tuple[Issue, Issue]] = []
    for earlier, later in pairs:
        if joined and joined[-1][1].rank == earlier.rank:
            joined[-1] = joined[-1][0], later
        else:
            joined.append((earlier, later))
    if len(joined) > 1 and joined[-1][1].rank == joined[0][0].rank:
        joined[0] = joined.pop()[0], joined[0][1]
    return joined


def _inversion(pairs: list[tuple[Issue, Issue]]) -> Verdict:
    start = min(range(len(pairs)), key=lambda at: pairs[at][0].rank)
    pairs = pairs[start:] + pairs[:start]
    told = [f"rank {a.rank} issues {a.told} before {b.told}" for a, b in pairs]
    lines = tuple(dict.fromkeys(issue.line for pair in pairs for issue in pair))
    return Verdict(
        kind="order inversion",
        text=f"{', and '.join(told)}; this run survived it, but where groups share streams or slots it hangs",
        ranks=tuple(dict.fromkeys(a.rank for a, _ in pairs)),
        lines=lines,
    )


def groups(record: Record, finished: set[int]) -> Verdict | None:
    """Return a group that only some ranks have made.

    Args:
        record: Record of the run.
        finished: Ranks with a program that ended well; the others may make the group later.
    """
    of_rank = {
        rank: [made for made in record.made if made.rank == rank and not made.alone] for rank in range(record.size)
    }
    counts = {rank: Counter(made.ranks for made in mades) for rank, mades in of_rank.items()}
    for made in record.made:
        if made.alone:
            continue
        most = max(count[made.ranks] for count in counts.values())
        lacking = [rank for rank in counts if counts[rank][made.ranks] < most]
        sure = [rank for rank in lacking if rank in finished or _went_past(of_rank[rank], made, of_rank[made.rank])]
        if sure:
            makers = [rank for rank in counts if rank not in lacking]
            text = (
                f"the group of {named(made.ranks)} was made by {named(makers)} at {made.line}, and never by "
                f"{named(sure)}: all ranks must call new_group, also those outside of it"
            )
            return Verdict(kind="group of some", text=text, ranks=(*sure, *makers), lines=(made.line,))
    return None


def _went_past(mine: list[Made], made: Made, theirs: list[Made]) -> bool:
    """Whether a rank has made a group that comes later on the other rank."""
    at = theirs.index(made) if made in theirs else 0
    later = {each.ranks for each in theirs[at + 1 :]} - {each.ranks for each in theirs[: at + 1]}
    return any(each.ranks in later for each in mine)


def group_order(record: Record) -> Verdict | None:
    """Return groups that ranks have made in different orders: other ranks meet under the number of each."""
    of_rank = {
        rank: [made for made in record.made if made.rank == rank and not made.alone] for rank in range(record.size)
    }
    (first, theirs), *others = of_rank.items()
    for rank, mine in others:
        for a, b in zip(theirs, mine, strict=False):
            if a.ranks != b.ranks and _went_past(mine, a, theirs):
                text = (
                    f"rank {rank} made the group of {named(b.ranks)} at {b.line} where rank {first} made that of "
                    f"{named(a.ranks)} at {a.line}: all ranks must call new_group for all groups in one order"
                )
                lines = tuple(dict.fromkeys((b.line, a.line)))
                return Verdict(kind="group order", text=text, ranks=(rank, first), lines=lines)
    return None


def group_members(record: Record) -> Verdict | None:
    """Return a call of `new_group` that ranks made with different lists of ranks.

    A list that the other rank has too, in another call, is a matter of order, or of a call that it left out.
    """
    of_rank = {
        rank: [made for made in record.made if made.rank == rank and not made.alone] for rank in range(record.size)
    }
    for calls in zip_longest(*of_rank.values()):
        by_ranks: dict[tuple[int, ...], list[Made]] = {}
        for made in filter(None, calls):
            by_ranks.setdefault(made.ranks, []).append(made)
        sides = sorted(by_ranks.values(), key=len)
        if len(sides) < 2 or sides[0][0].line != sides[-1][0].line:
            continue
        odd, usual = sides[0], sides[-1]
        if _has_made(of_rank[usual[0].rank], odd[0]) or _has_made(of_rank[odd[0].rank], usual[0]):
            continue
        text = (
            f"{named([made.rank for made in odd])} called new_group for {named(odd[0].ranks)} at {odd[0].line}, "
            f"{named([made.rank for made in usual])} for {named(usual[0].ranks)} there: all ranks must "
            "pass the same list"
        )
        ranks = tuple(made.rank for made in (*odd, *usual))
        return Verdict(kind="group members", text=text, ranks=ranks, lines=(odd[0].line,))
    return None


def _has_made(mades: list[Made], group: Made) -> bool:
    return any(made.ranks == group.ranks for made in mades)


def tags(record: Record) -> Verdict | None:
    """Return two messages in flight between two ranks that their equal tags do not distinguish.

    Only tags that the program names count, and messages that two of its lines send and two receive: a line that sends
    repeatedly means its order.
    """
    ends = {(issue.key, issue.seq, issue.op): issue for issue in record.issues if issue.is_message and issue.tag}
    for (key, seq, op), first in ends.items():
        second = ends.get((key, seq + 1, "send"))
        received = [ends.get((key, number, "recv")) for number in (seq, seq + 1)]
        if op != "send" or second is None or second.line == first.line or None in received:
            continue
        places = [each.line for each in received if each is not None]
        if places[0] == places[1] or (first.waited_ns is not None and first.waited_ns <= second.issued_ns):
            continue
        text = (
            f"rank {first.rank} sends to rank {first.peer} with tag {first.tag} at {first.line} and at {second.line} "
            f"while the first message is under way; rank {first.peer} receives at {places[0]} and then at {places[1]}: "
            "only their order says which is which; give each message a tag of its own"
        )
        lines = tuple(dict.fromkeys((first.line, second.line, *places)))
        return Verdict(kind="tag reused", text=text, ranks=first.members, lines=lines)
    return None


def touches(record: Record) -> Verdict | None:
    """Return a tensor that was used while an operation was under way."""
    for touch in record.touches:
        return _touched(touch)
    return None


def _touched(touch: Touch) -> Verdict:
    issue = touch.issue
    advice = f"{issue.dropped_by} never waits for it" if issue.dropped_by else "wait for it first"
    return Verdict(
        kind="buffer in flight",
        text=(
            f"rank {touch.rank} {'reads' if touch.how == 'read' else 'changes'} a tensor at {touch.line} ({touch.by}) "
            f"while {issue.told} is under way: {advice}"
        ),
        ranks=(touch.rank,),
        lines=(touch.line, issue.line),
    )


def gradients(record: Record) -> Verdict | None:
    """Return a weight without a gradient in an update, on some ranks only."""
    for step, of_step in _by_step(record):
        missing = {rank: set(each.without_gradient) for rank, each in of_step.items()}
        common = set.intersection(*missing.values())
        for rank, names in missing.items():
            for name in sorted(names - common):
                lacking = [other for other in missing if name in missing[other]]
                line = of_step[rank].line
                text = (
                    f"{named(lacking)} had no gradient of '{name}' in update {step} ({line}), "
                    f"{named([other for other in missing if other not in lacking])} had one"
                )
                return Verdict(kind="gradient missing", text=text, ranks=tuple(lacking), lines=(line,))
    return None


def weights(record: Record) -> Verdict | None:
    """Return the first weight that differs between ranks, and the update after which it does."""
    for step, of_step in _by_step(record):
        for name in dict.fromkeys(name for rank in sorted(of_step) for name in of_step[rank].digests):
            having = [rank for rank in sorted(of_step) if name in of_step[rank].digests or " [part " not in name]
            found = {rank: of_step[rank].digests.get(name, "") for rank in having}
            counts = Counter(found.values())
            if len(counts) > 1:
                usual = counts.most_common(1)[0][0] if counts.most_common(1)[0][1] > 1 else next(iter(found.values()))
                odd = [rank for rank, digest in found.items() if digest != usual]
                return _differing(record, step, name, odd, found, of_step)
    return None


def _differing(
    record: Record, step: int, name: str, odd: list[int], digests: dict[int, str], of_step: dict[int, WeightRecord]
) -> Verdict:
    usual = next(rank for rank in digests if rank not in odd)
    line = of_step[odd[0]].line
    when = f"after update {step} ({line}), and not before," if step else "before the first update"
    when += " since the last Join" if of_step[odd[0]].joins else ""
    text = f"{when} '{name}' differs: {named(odd)} ({digests[odd[0]]}) from {named([usual])} ({digests[usual]})"
    last = randomness(record, odd[0], usual)
    return Verdict(kind="weights differ", text=text + last, ranks=(*odd, usual), lines=tuple(filter(None, (line,))))


def randomness(record: Record, odd: int, usual: int) -> str:
    """Say where two ranks began to read other random numbers, if they did."""
    mine, theirs = record.of(odd), record.of(usual)
    for a, b in zip(mine, theirs, strict=False):
        if a.randomness and b.randomness and a.randomness != b.randomness and a.line == b.line:
            return f"; at {a.told} the random numbers of rank {odd} are no longer those of rank {usual}"
    return ""


def _by_step(record: Record) -> Iterator[tuple[int, dict[int, WeightRecord]]]:
    """Yield the weights of all ranks, update by update, as long as all ranks have one."""
    of_step: dict[tuple[int, int], dict[int, WeightRecord]] = {}
    for each in record.weights:
        of_step.setdefault((each.joins, each.step), {})[each.rank] = each
    for joins, step in sorted(of_step):
        if len(of_step[joins, step]) > 1:
            yield step, of_step[joins, step]


def leaks(record: Record) -> Verdict | None:
    """Return something that a rank has left behind."""
    for rank, what, line in record.leaks:
        return Verdict(kind="leak", text=f"rank {rank} {what}", ranks=(rank,), lines=(line,) if line else ())
    return None

"""Text about waits: the sentence of a verdict, the names of operations, and the table of ranks. Pure.

This is the only place with English about ranks that wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..ranklist import listed, named_ranks
from ..units import columns
from .ends import End, EndState, RankView, Seen
from .judge import Kind, WaitingWorld, WaitVerdict

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_MOST_SIGNS = 4  # ranks of a process whose last operation is told
_MOST_LISTED = 8  # operations of ranks that wait for each other


def title(end: End) -> str:
    """Return an operation and its line, such as "all_reduce #3 of group 'dp' (train.py:41)"."""
    call = end.call
    line = f" ({call.site})" if call.site else ""
    if not call.meets:
        return f"{call.op} '{call.name}'{line}"
    name = call.name or call.op
    if not call.is_message:
        return f"{name} #{end.seq} of group '{call.group}'{line}"
    peer = "any rank" if call.peer is None else f"rank {call.peer}"
    tag = f" with tag {call.tag}" if call.tag and not call.name else ""
    return f"{name} #{end.seq} {'to' if call.op == 'send' else 'from'} {peer}{tag}{line}"


def sentence(verdict: WaitVerdict) -> str:
    """Return a verdict as one sentence."""
    text = _SENTENCES[verdict.kind](verdict)
    if verdict.kind in _WITH_WAITERS:
        text += "".join(f"; {each}" for each in [_waiting(verdict)] if each)
    if verdict.doubtful:
        text = f"the records of {named_ranks(verdict.doubtful)} contradict each other; by the newest, {text}"
    is_unknown = verdict.doubtful or verdict.kind in (Kind.MISSING, Kind.WIRE, Kind.NOBODY)
    return f"cannot be told: {text}" if is_unknown else text


def _waiting(verdict: WaitVerdict) -> str:
    if verdict.end is None or not verdict.waiters:
        return ""
    verb, them = "wait" + "s" * (len(verdict.waiters) == 1), "it" if len(verdict.culprits) == 1 else "them"
    return f"{named_ranks(verdict.waiters)} {verb} for {them} in {title(verdict.end)}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _failed(verdict: WaitVerdict) -> str:
    assert verdict.view is not None
    return f"rank {verdict.view.rank} failed: {verdict.view.error}"


def _dead(verdict: WaitVerdict) -> str:
    view = verdict.view
    assert view is not None
    process = "its process" if view.process < 0 else f"process {view.process}"
    machine = f" (pid {view.pid} on {view.host})" if view.pid else ""
    rank = "it" if len(verdict.culprits) == 1 else f"rank {view.rank}"
    how = view.how or "has ended without a word"
    return f"{named_ranks(verdict.culprits)}: {process}{machine} {how}; {rank} {_did(view)}"


def _mismatch(verdict: WaitVerdict) -> str:
    one, other = verdict.ends
    odd = [rank for rank in verdict.culprits if rank not in verdict.waiters]
    return (
        f"{named_ranks(odd)} called {_with_form(one)}, where {named_ranks(sorted(verdict.waiters))} called "
        f"{_with_form(other)} ({verdict.differs} differ)"
    )


def _with_form(end: End) -> str:
    return f"{title(end)}{f' with {end.call.form}' if end.call.form else ''}"


def _swapped(verdict: WaitVerdict) -> str:
    one, other = verdict.ends
    odd = [rank for rank in verdict.culprits if rank not in verdict.waiters]
    return (
        f"{named_ranks(odd)} called {title(one)} before {title(other)}, {named_ranks(sorted(verdict.waiters))} in the "
        "other order: call the operations of a group in one order"
    )


def _skipped(verdict: WaitVerdict) -> str:
    skipped, instead = verdict.ends
    return f"{named_ranks(verdict.culprits)} skipped {title(skipped)} and called {title(instead)} instead"


def _tags(verdict: WaitVerdict) -> str:
    receive, send = verdict.ends
    return (
        f"rank {receive.rank} waits in {title(receive)}, and rank {send.rank} has sent {title(send)}, which nobody "
        f"receives: the tags are {receive.call.tag} and {send.call.tag}"
    )


def _cycle(verdict: WaitVerdict) -> str:
    wait = "wait for each other" if len(verdict.culprits) > 1 else "waits for itself"
    never = ", and may yet go on" if verdict.may_end else " and cannot go on"
    outside = _by_operation(verdict.others, "wait in", "waits in")
    rest = f"; outside of it, {outside}" if outside else ""
    inside = _by_operation(verdict.ends, "in", "in")
    return f"{named_ranks(verdict.culprits)} {wait}{never}: {inside}; {_advice(verdict.ends)}{rest}"


def _by_operation(ends: Sequence[End], verb: str, verb_of_one: str) -> str:
    """Return the ranks in each operation as text."""
    ranks: dict[str, list[int]] = {}
    for end in ends:
        ranks.setdefault(title(end), []).append(end.rank)
    parts = [f"{named_ranks(some)} {verb_of_one if len(some) == 1 else verb} {name}" for name, some in ranks.items()]
    more = [f"and {len(parts) - _MOST_LISTED} operations more"] if len(parts) > _MOST_LISTED else []
    return ", ".join([*parts[:_MOST_LISTED], *more])


def _advice(ends: Sequence[End]) -> str:
    """Return what to change so that ranks do not wait in a cycle."""
    parts = next(
        (end.call.name for end in ends if end.call.is_message and end.call.name not in ("", "send", "recv")), ""
    )
    if parts:
        return f"call {parts} on all of these ranks, with the sizes of its parts on all or on none"
    messages = {end.call.op for end in ends if end.call.is_message}
    if not messages:
        return "call the operations of all groups that ranks share in one order"
    if not all(end.call.is_message for end in ends):
        return "a message and an operation of a group wait for each other: call them in one order"
    if messages == {"send"}:
        return "each sends before it receives"
    return "each receives before it sends" if messages == {"recv"} else "their sends and receives cannot meet"


def _left(verdict: WaitVerdict) -> str:
    if verdict.view is not None and verdict.view.how:
        return f"{named_ranks(verdict.culprits)} {verdict.view.how}"
    programs = "its program" if len(verdict.culprits) == 1 else "their programs"
    return f"{named_ranks(verdict.culprits)} {_has(verdict.culprits)} finished {programs}"


def _unmatched(verdict: WaitVerdict) -> str:
    assert verdict.end is not None
    return (
        f"{named_ranks(verdict.culprits)} {_has(verdict.culprits)} finished without the other end of "
        f"{title(verdict.end)}, for which {named_ranks(verdict.waiters)} waits"
    )


def _late(verdict: WaitVerdict) -> str:
    assert verdict.view is not None
    first = "it" if len(verdict.culprits) == 1 else f"rank {verdict.view.rank}"
    state = _does(verdict.view, verdict.end, first)
    if verdict.unrecorded and not verdict.view.site and verdict.view.running is None:
        state += f", or it waits in one of the {verdict.unrecorded}, which are not recorded"
    elif len(verdict.waiters) < len(verdict.culprits) and not verdict.view.site and verdict.view.running is None:
        state += f", or {named_ranks(verdict.waiters)} called one too many"
    return f"{named_ranks(verdict.culprits)} {_has(verdict.culprits)} not come: {state}"


def _does(view: RankView, awaited: End | None, first: str) -> str:
    """Return what a rank that has not come does, as a clause."""
    its = "its" if first == "it" else f"{first}'s"
    running = view.running
    if running is not None:
        return f"{first} {'computes' if running.call.op == 'compute' else 'runs'} {_function(running)}"
    if view.kept_by is not None:
        return f"{first} {_kept(view)}"
    if view.site:
        return f"{its} program is at {view.site}"
    own = [end for end in view.ends if end.is_open and end.call.meets]
    behind = next((end for end in own if awaited is not None and end.meeting == awaited.meeting), None)
    if behind is not None and not behind.has_arrived:
        return f"{its} {title(behind)} {_STATES[behind.state]}"
    if own:
        return f"{first} is in {title(own[0])}, which all of its known members have called"
    if view.ends:
        return f"{its} last call was {title(view.ends[-1])}"
    return f"{first} has called nothing" if view.seen is not Seen.ELSEWHERE else f"{its} program is elsewhere"


_STATES = {EndState.QUEUED: "is queued, and has not started", EndState.BLOCKED: "waits for its input"}


def _did(view: RankView) -> str:
    """Return what a rank did when its process ended, as a clause."""
    running = view.running
    if running is not None:
        return f"{'computed' if running.call.op == 'compute' else 'ran'} {_function(running)}"
    own = [end for end in view.ends if end.is_open]
    if own:
        return f"was in {title(own[0])}"
    if view.site:
        return f"was at {view.site}"
    if view.process < 0 and not view.ends and view.how:
        return "has no record here"
    return f"had last called {title(view.ends[-1])}" if view.ends else "had called nothing"


def last_signs(views: Sequence[RankView], size: int, ranks: Sequence[int]) -> list[str]:
    """Return a line on the last operation of each rank of an ended process, and one on ranks that wait for it."""
    world = WaitingWorld(views, size)
    lines = []
    for view in (world.views[rank] for rank in ranks[:_MOST_SIGNS]):
        step = next((end.step for end in view.ends if end.is_open and end.step is not None), view.step)
        state = "had finished its program" if view.seen is Seen.LEFT else _did(view)
        lines.append(f"rank {view.rank} {state}{'' if step is None else f' in step {step}'}")
    more = [f"and {len(ranks) - _MOST_SIGNS} ranks more"] if len(ranks) > _MOST_SIGNS else []
    end, waiters = world.waiters(ranks)
    waits = [f"{named_ranks(waiters)} wait{'s' * (len(waiters) == 1)} for it in {title(end)}"] if end else []
    return [*lines, *more, *waits]


def _function(end: End) -> str:
    return f"'{end.call.name}'{f' ({end.call.site})' if end.call.site else ''}"


def _missing(verdict: WaitVerdict) -> str:
    return f"{named_ranks(verdict.culprits)} {_has(verdict.culprits)} no record here"


def _wire(verdict: WaitVerdict) -> str:
    """Return the clause on an operation that goes on though no known rank is absent, with all that may hold it up."""
    end = verdict.end
    assert end is not None
    lists_members = bool(end.call.members)
    compares_roots = end.call.op not in _ROOTED or "root" in end.call.form
    suspects = {
        "the network": True,
        "a device": True,
        "roots that differ": not compares_roots,
        "a rank without a record": bool(verdict.missing) or not lists_members,
        f"{verdict.unrecorded}, which are not recorded": bool(verdict.unrecorded),
    }
    *others, last = (suspect for suspect, is_possible in suspects.items() if is_possible)
    known = "all known members have called" if lists_members else "no record lists the members of the group of"
    return f"{known} {title(end)}, and it has not ended: {', '.join(others)} or {last}"


def _nobody(verdict: WaitVerdict) -> str:
    unknown = f"; {verdict.unrecorded} are not recorded" if verdict.unrecorded else ""
    return f"no rank waits for another{' in a recorded operation' if unknown else ''}{unknown}"


_SENTENCES = {
    Kind.FAILED: _failed,
    Kind.DEAD: _dead,
    Kind.MISMATCH: _mismatch,
    Kind.SWAPPED: _swapped,
    Kind.SKIPPED: _skipped,
    Kind.TAGS: _tags,
    Kind.CYCLE: _cycle,
    Kind.LEFT: _left,
    Kind.UNMATCHED: _unmatched,
    Kind.LATE: _late,
    Kind.MISSING: _missing,
    Kind.WIRE: _wire,
    Kind.NOBODY: _nobody,
}
_WITH_WAITERS = (Kind.FAILED, Kind.DEAD, Kind.SKIPPED, Kind.LEFT, Kind.LATE, Kind.MISSING)


# -- the table -----------------------------------------------------------------------------------------------------

HEADS = ("rank", "process", "step", "for", "doing", "waits for")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRow:
    """Row of a table of waiting ranks: the act of one rank, and the ranks for which it waits."""

    view: RankView
    end: End | None  # The operation that it is in, else None
    doing: str
    waits_for: tuple[int, ...] = ()

    def line(self, now_ns: int = 0) -> str:
        """Return the row without its rank, as a line; `now_ns` is the present, in nanoseconds since 1970."""
        since_ns = self.end.begun_ns or self.end.issued_ns if self.end is not None else 0
        waited_s = (now_ns - since_ns) // 10**9 if since_ns else 0
        verb = f"has waited {waited_s} s for" if waited_s > 0 else "waits for"
        waits = f"; {verb} {named_ranks(self.waits_for)}" if self.waits_for else ""
        at = f"; its program is at {self.view.site}" if self.view.site and self.end is not None else ""
        return f"{self.doing}{waits}{at}"

    def cells(self, now_ns: int) -> tuple[str, ...]:
        """Return the cells under `HEADS`; `now_ns` is the instant of the table, in nanoseconds since 1970."""
        view, end = self.view, self.end
        step = view.step if end is None or end.step is None else end.step
        newest = max((last.done_ns or last.issued_ns for last in view.ends), default=0)
        since_ns = newest if end is None else end.begun_ns or end.issued_ns
        process = "" if view.process < 0 else str(view.process)
        lasting = format_duration(now_ns - since_ns) if since_ns and now_ns else "-"
        return (
            str(view.rank), process, "-" if step is None else str(step), lasting, self.doing, listed(self.waits_for)
        )  # fmt: skip


def rows(views: Iterable[RankView], size: int, verdict: WaitVerdict) -> list[WaitRow]:
    """Return a row for each rank, those of the verdict first."""
    world = WaitingWorld(views, size)
    first = set(verdict.culprits)
    return [
        _row(world, view) for view in sorted(world.views.values(), key=lambda view: (view.rank not in first, view.rank))
    ]


def lines(some: Sequence[WaitRow], now_ns: int = 0) -> list[str]:
    """Return rows as lines; ranks with the same line share it."""
    ranks: dict[str, list[int]] = {}
    for row in some:
        ranks.setdefault(row.line(now_ns), []).append(row.view.rank)
    return [f"{named_ranks(shared)}: {line}" for line, shared in ranks.items()]


def report_lines(views: Sequence[RankView], now_ns: int = 0) -> list[str]:
    """Return a line for each error that no task was given, then one for each rank."""
    world, known = WaitingWorld(views, 0), sorted({view.rank for view in views})
    errors = [unawaited_line(view) for view in views if view.error]
    return [*errors, *(f"rank {rank}: {_row(world, world.views[rank]).line(now_ns)}" for rank in known)]


def unawaited_line(view: RankView) -> str:
    """Return the line on an error that no task was given."""
    return f"rank {view.rank} has an error that nobody has awaited: {view.error}"


def table(rows: Sequence[WaitRow], now_ns: int) -> list[str]:
    """Return a line for each row under a line of heads; columns without a value are left out."""
    cells = [row.cells(now_ns) for row in rows]
    used = [at for at in range(len(HEADS)) if at == 0 or any(line[at] not in ("", "-") for line in cells)]
    words = [place for place, at in enumerate(used) if HEADS[at] in ("doing", "waits for")]
    return columns([HEADS[at] for at in used], [[line[at] for at in used] for line in cells], words=words)


def _row(world: WaitingWorld, view: RankView) -> WaitRow:
    blocking, running = next(iter(world.waits.get(view.rank, ())), None), view.running
    if running is not None:
        return WaitRow(view=view, end=running, doing=f"computes {_function(running)}")
    opened = [end for end in view.ends if end.is_open]
    end = blocking or next(iter(opened), None)
    if end is None:
        return WaitRow(view=view, end=None, doing=_idle(view))
    state = f"; {_STATES[end.state]}" if end.state in _STATES else ""
    return WaitRow(
        view=view, end=end, doing=f"{title(end)}{state}", waits_for=world.absent(end) if end.call.meets else ()
    )


def _kept(view: RankView) -> str:
    if view.kept_by == view.rank:
        return f"keeps its event loop busy at {view.site}"
    return f"has an event loop that rank {view.kept_by} keeps busy at {view.site}"


def _idle(view: RankView) -> str:
    if view.kept_by is not None:
        return _kept(view)
    if view.seen in (Seen.LEFT, Seen.NO_RECORD):
        return "has finished" if view.seen is Seen.LEFT else "no record"
    return f"in its program{f', at {view.site}' if view.site else ''}"


def format_duration(duration_ns: int) -> str:
    """Return a duration as text; clocks of machines differ, so it is never negative."""
    seconds = max(duration_ns, 0) / 1e9
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"

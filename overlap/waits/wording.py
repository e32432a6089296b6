"""Text about waits: the sentence of a verdict, the names of operations, and the table of ranks. Pure.

This is the only place with English about ranks that wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..ranklist import format_rank_list, named_ranks
from ..units import format_table
from .ends import End, EndState, RankView, Seen
from .judge import Kind, WaitIndex, WaitVerdict

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_MOST_SIGNS = 4  # ranks of an ended process that get a line on their last operation
_MOST_LISTED = 8  # operations that a sentence lists


def end_title(end: End) -> str:
    """Return the name of an operation with its line, such as "all_reduce #3 of group 'dp' (train.py:41)"."""
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


def wait_sentence(verdict: WaitVerdict) -> str:
    """Return a verdict as one sentence, which begins with "cannot be told:" if the cause is not certain."""
    text = _SENTENCES[verdict.kind](verdict)
    if verdict.kind in _WITH_WAITERS:
        text += _waiting_ranks_clause(verdict)
    if verdict.doubtful:
        text = f"the records of {named_ranks(verdict.doubtful)} contradict each other; by the newest, {text}"
    is_unknown = verdict.doubtful or verdict.kind in (Kind.MISSING, Kind.WIRE, Kind.NOBODY)
    return f"cannot be told: {text}" if is_unknown else text


def _waiting_ranks_clause(verdict: WaitVerdict) -> str:
    """Return "; ranks ... wait for it in ...", or "" if no other rank waits."""
    if verdict.end is None or not verdict.waiters:
        return ""
    verb, them = "wait" + "s" * (len(verdict.waiters) == 1), "it" if len(verdict.culprits) == 1 else "them"
    return f"; {named_ranks(verdict.waiters)} {verb} for {them} in {end_title(verdict.end)}"


def _ranks_have(ranks: Sequence[int]) -> str:
    return f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def _describe_failed(verdict: WaitVerdict) -> str:
    assert verdict.view is not None
    return f"rank {verdict.view.rank} failed: {verdict.view.error}"


def _describe_dead(verdict: WaitVerdict) -> str:
    view = verdict.view
    assert view is not None
    process = "its process" if view.process < 0 else f"process {view.process}"
    machine = f" (pid {view.pid} on {view.host})" if view.pid else ""
    rank = "it" if len(verdict.culprits) == 1 else f"rank {view.rank}"
    how = view.how or "has ended without a word"
    return f"{named_ranks(verdict.culprits)}: {process}{machine} {how}; {rank} {_describe_last_activity(view)}"


def _describe_mismatch(verdict: WaitVerdict) -> str:
    one, other = verdict.ends
    odd = [rank for rank in verdict.culprits if rank not in verdict.waiters]
    return (
        f"{named_ranks(odd)} called {_title_with_form(one)}, where {named_ranks(sorted(verdict.waiters))} called "
        f"{_title_with_form(other)} ({verdict.differs} differ)"
    )


def _title_with_form(end: End) -> str:
    return f"{end_title(end)}{f' with {end.call.form}' if end.call.form else ''}"


def _describe_swapped(verdict: WaitVerdict) -> str:
    one, other = verdict.ends
    odd = [rank for rank in verdict.culprits if rank not in verdict.waiters]
    return (
        f"{named_ranks(odd)} called {end_title(one)} before {end_title(other)}, "
        f"{named_ranks(sorted(verdict.waiters))} in the other order: call the operations of a group in one order"
    )


def _describe_skipped(verdict: WaitVerdict) -> str:
    skipped, instead = verdict.ends
    return f"{named_ranks(verdict.culprits)} skipped {end_title(skipped)} and called {end_title(instead)} instead"


def _describe_tags(verdict: WaitVerdict) -> str:
    receive, send = verdict.ends
    return (
        f"rank {receive.rank} waits in {end_title(receive)}, and rank {send.rank} has sent "
        f"{end_title(send)}, which nobody receives: the tags are {receive.call.tag} and {send.call.tag}"
    )


def _describe_cycle(verdict: WaitVerdict) -> str:
    wait = "wait for each other" if len(verdict.culprits) > 1 else "waits for itself"
    outlook = ", and may yet go on" if verdict.may_end else " and cannot go on"
    outside = _list_by_operation(verdict.others, singular="waits in", plural="wait in")
    rest = f"; outside of it, {outside}" if outside else ""
    inside = _list_by_operation(verdict.ends, singular="in", plural="in")
    return f"{named_ranks(verdict.culprits)} {wait}{outlook}: {inside}; {_cycle_advice(verdict.ends)}{rest}"


def _list_by_operation(ends: Sequence[End], *, singular: str, plural: str) -> str:
    """Return the ranks in each operation with a verb, as "ranks 0-2 wait in all_reduce #3 of group 'dp'"."""
    ranks: dict[str, list[int]] = {}
    for end in ends:
        ranks.setdefault(end_title(end), []).append(end.rank)
    parts = [f"{named_ranks(some)} {singular if len(some) == 1 else plural} {name}" for name, some in ranks.items()]
    more = [f"and {len(parts) - _MOST_LISTED} operations more"] if len(parts) > _MOST_LISTED else []
    return ", ".join([*parts[:_MOST_LISTED], *more])


def _cycle_advice(ends: Sequence[End]) -> str:
    """Return advice for a program whose ranks wait for each other in the operations `ends`."""
    # A message with another name is a part of a call such as an all-to-all of messages.
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


def _describe_left(verdict: WaitVerdict) -> str:
    if verdict.view is not None and verdict.view.how:
        return f"{named_ranks(verdict.culprits)} {verdict.view.how}"
    programs = "its program" if len(verdict.culprits) == 1 else "their programs"
    return f"{_ranks_have(verdict.culprits)} finished {programs}"


def _describe_unmatched(verdict: WaitVerdict) -> str:
    assert verdict.end is not None
    finished = f"{_ranks_have(verdict.culprits)} finished without the other end of {end_title(verdict.end)}"
    return f"{finished}, for which {named_ranks(verdict.waiters)} waits"


def _describe_late(verdict: WaitVerdict) -> str:
    """Return the clause on ranks that have not come, with what the first of them does.

    If its record does not explain the wait, the clause adds another possible reason: messages that are not recorded, or
    that the waiting ranks called one operation too many.
    """
    assert verdict.view is not None
    first = "it" if len(verdict.culprits) == 1 else f"rank {verdict.view.rank}"
    state = _describe_activity(verdict.view, verdict.end, first)
    is_unexplained = not verdict.view.site and verdict.view.running_function is None
    if verdict.unrecorded and is_unexplained:
        state += f", or it waits in one of the {verdict.unrecorded}, which are not recorded"
    elif len(verdict.waiters) < len(verdict.culprits) and is_unexplained:
        state += f", or {named_ranks(verdict.waiters)} called one too many"
    return f"{_ranks_have(verdict.culprits)} not come: {state}"


def _describe_activity(view: RankView, awaited: End | None, first: str) -> str:
    """Return what a rank that has not arrived does, such as "it computes 'loss'"; `first` is the subject."""
    its = "its" if first == "it" else f"{first}'s"
    running = view.running_function
    if running is not None:
        return f"{first} {'computes' if running.call.op == 'compute' else 'runs'} {_function_title(running)}"
    if view.kept_by is not None:
        return f"{first} {_describe_kept_loop(view)}"
    if view.site:
        return f"{its} program is at {view.site}"
    own = [end for end in view.ends if end.is_open and end.call.meets]
    behind = next((end for end in own if awaited is not None and end.meeting == awaited.meeting), None)
    if behind is not None and not behind.has_arrived:
        return f"{its} {end_title(behind)} {_STATES[behind.state]}"
    # This rank waits for nobody: all known members have called the operation that it is in.
    if own:
        return f"{first} is in {end_title(own[0])}, which all of its known members have called"
    if view.ends:
        return f"{its} last call was {end_title(view.ends[-1])}"
    return f"{first} has called nothing" if view.seen is not Seen.ELSEWHERE else f"{its} program is elsewhere"


_STATES = {EndState.QUEUED: "is queued, and has not started", EndState.BLOCKED: "waits for its input"}


def _describe_last_activity(view: RankView) -> str:
    """Return what a rank did when its process ended, as a verb phrase such as "was at train.py:41"."""
    running = view.running_function
    if running is not None:
        return f"{'computed' if running.call.op == 'compute' else 'ran'} {_function_title(running)}"
    own = [end for end in view.ends if end.is_open]
    if own:
        return f"was in {end_title(own[0])}"
    if view.site:
        return f"was at {view.site}"
    if view.process < 0 and not view.ends and view.how:
        return "has no record here"
    return f"had last called {end_title(view.ends[-1])}" if view.ends else "had called nothing"


def last_signs(views: Sequence[RankView], size: int, ranks: Sequence[int]) -> list[str]:
    """Return lines on an ended process: the last operation of each rank, and the ranks that wait for them.

    Args:
        views: Views of the ranks of the world.
        size: Ranks of the world, with a view or not.
        ranks: World ranks of the process; the first `_MOST_SIGNS` of them get a line.
    """
    world = WaitIndex(views, size)
    lines = []
    for view in (world.views[rank] for rank in ranks[:_MOST_SIGNS]):
        step = next((end.step for end in view.ends if end.is_open and end.step is not None), view.step)
        state = "had finished its program" if view.seen is Seen.LEFT else _describe_last_activity(view)
        lines.append(f"rank {view.rank} {state}{'' if step is None else f' in step {step}'}")
    more = [f"and {len(ranks) - _MOST_SIGNS} ranks more"] if len(ranks) > _MOST_SIGNS else []
    end, waiters = world.find_waiters(ranks)
    waits = [f"{named_ranks(waiters)} wait{'s' * (len(waiters) == 1)} for it in {end_title(end)}"] if end else []
    return [*lines, *more, *waits]


def _function_title(end: End) -> str:
    return f"'{end.call.name}'{f' ({end.call.site})' if end.call.site else ''}"


def _describe_missing(verdict: WaitVerdict) -> str:
    return f"{_ranks_have(verdict.culprits)} no record here"


def _describe_wire(verdict: WaitVerdict) -> str:
    """Return the clause on an operation that has not ended though no known rank is absent, with possible causes."""
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
    return f"{known} {end_title(end)}, and it has not ended: {', '.join(others)} or {last}"


def _describe_nobody(verdict: WaitVerdict) -> str:
    unknown = f"; {verdict.unrecorded} are not recorded" if verdict.unrecorded else ""
    return f"no rank waits for another{' in a recorded operation' if unknown else ''}{unknown}"


_SENTENCES = {
    Kind.FAILED: _describe_failed,
    Kind.DEAD: _describe_dead,
    Kind.MISMATCH: _describe_mismatch,
    Kind.SWAPPED: _describe_swapped,
    Kind.SKIPPED: _describe_skipped,
    Kind.TAGS: _describe_tags,
    Kind.CYCLE: _describe_cycle,
    Kind.LEFT: _describe_left,
    Kind.UNMATCHED: _describe_unmatched,
    Kind.LATE: _describe_late,
    Kind.MISSING: _describe_missing,
    Kind.WIRE: _describe_wire,
    Kind.NOBODY: _describe_nobody,
}
_WITH_WAITERS = (Kind.FAILED, Kind.DEAD, Kind.SKIPPED, Kind.LEFT, Kind.LATE, Kind.MISSING)


# -- the table -----------------------------------------------------------------------------------------------------

HEADS = ("rank", "process", "step", "for", "doing", "waits for")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRow:
    """Row of a table of waiting ranks: what one rank does, and the ranks that it waits for."""

    view: RankView
    end: End | None  # The operation that the rank is in, or the function that it runs; None if neither
    doing: str  # Such as "all_reduce #3 of group 'dp' (train.py:41)" or "in its program, at train.py:41"
    waits_for: tuple[int, ...] = ()

    def describe_wait(self, now_ns: int = 0) -> str:
        """Return the row as a line without the rank, such as "all_reduce #3 of group 'dp'; has waited 9 s for rank 2".

        Args:
            now_ns: The present, in nanoseconds since 1970; 0: the line does not say how long the rank has waited.
        """
        since_ns = self.end.begun_ns or self.end.issued_ns if self.end is not None else 0
        waited_s = (now_ns - since_ns) // 10**9 if since_ns else 0
        verb = f"has waited {waited_s} s for" if waited_s > 0 else "waits for"
        waits = f"; {verb} {named_ranks(self.waits_for)}" if self.waits_for else ""
        at = f"; its program is at {self.view.site}" if self.view.site and self.end is not None else ""
        return f"{self.doing}{waits}{at}"

    def column_texts(self, now_ns: int) -> tuple[str, ...]:
        """Return the texts of the columns `HEADS`.

        Args:
            now_ns: The instant of the table, in nanoseconds since 1970; 0: the column "for" has "-".
        """
        view, end = self.view, self.end
        step = view.step if end is None or end.step is None else end.step
        # The duration of a rank in no operation counts from the end of the last one.
        newest = max((last.done_ns or last.issued_ns for last in view.ends), default=0)
        since_ns = newest if end is None else end.begun_ns or end.issued_ns
        process = "" if view.process < 0 else str(view.process)
        lasting = format_duration(now_ns - since_ns) if since_ns and now_ns else "-"
        return (
            str(view.rank), process, "-" if step is None else str(step), lasting, self.doing,
            format_rank_list(self.waits_for),
        )  # fmt: skip


def wait_rows(views: Iterable[RankView], size: int, verdict: WaitVerdict) -> list[WaitRow]:
    """Return a row for each rank, the culprits of the verdict first.

    Args:
        views: Views of ranks; of several views of one rank the newest counts.
        size: Ranks of the world; ranks without a view have the row "no record".
        verdict: The verdict on these views.
    """
    world = WaitIndex(views, size)
    first = set(verdict.culprits)
    return [_make_row(world, view) for view in sorted(world.views.values(), key=lambda view: view.rank not in first)]


def row_lines(some: Sequence[WaitRow], now_ns: int = 0) -> list[str]:
    """Return rows as lines; ranks with equal rows share a line, such as "ranks 0-2: has finished".

    Args:
        some: The rows.
        now_ns: The present, in nanoseconds since 1970; 0: no line says how long a rank has waited.
    """
    ranks: dict[str, list[int]] = {}
    for row in some:
        ranks.setdefault(row.describe_wait(now_ns), []).append(row.view.rank)
    return [f"{named_ranks(shared)}: {line}" for line, shared in ranks.items()]


def report_lines(views: Sequence[RankView], now_ns: int = 0) -> list[str]:
    """Return a line for each error that nobody has awaited, then one for each rank.

    Args:
        views: Views of ranks; only ranks with a view get a line.
        now_ns: The present, in nanoseconds since 1970; 0: no line says how long a rank has waited.
    """
    # With size 0 the index adds no ranks but those that views name.
    world, known = WaitIndex(views, 0), sorted({view.rank for view in views})
    errors = [unawaited_line(view) for view in views if view.error]
    return [*errors, *(f"rank {rank}: {_make_row(world, world.views[rank]).describe_wait(now_ns)}" for rank in known)]


def unawaited_line(view: RankView) -> str:
    """Return a line of text about an error of a rank that was never raised, because nobody awaited it."""
    return f"rank {view.rank} has an error that nobody has awaited: {view.error}"


def wait_table(rows: Sequence[WaitRow], now_ns: int) -> list[str]:
    """Return the lines of the table, the heads first; columns without a value are left out.

    Args:
        rows: The rows.
        now_ns: The instant of the table, in nanoseconds since 1970; 0: without durations.
    """
    cells = [row.column_texts(now_ns) for row in rows]
    used = [at for at in range(len(HEADS)) if at == 0 or any(line[at] not in ("", "-") for line in cells)]
    # `format_table` aligns numbers to the right, and the columns in `words` to the left.
    words = [place for place, at in enumerate(used) if HEADS[at] in ("doing", "waits for")]
    return format_table([HEADS[at] for at in used], [[line[at] for at in used] for line in cells], words=words)


def _make_row(world: WaitIndex, view: RankView) -> WaitRow:
    """Return the row of a rank: on the function that it runs, else its operation, else its program."""
    # The first operation in which the rank waits, and the function that it runs; either may be None.
    blocking, running = next(iter(world.waits.get(view.rank, ())), None), view.running_function
    if running is not None:
        return WaitRow(view=view, end=running, doing=f"computes {_function_title(running)}")
    end = blocking or next((each for each in view.ends if each.is_open), None)
    if end is None:
        return WaitRow(view=view, end=None, doing=_describe_idle(view))
    state = f"; {_STATES[end.state]}" if end.state in _STATES else ""
    absent = world.absent_ranks(end) if end.call.meets else ()  # a function meets no other rank
    return WaitRow(view=view, end=end, doing=f"{end_title(end)}{state}", waits_for=absent)


def _describe_kept_loop(view: RankView) -> str:
    if view.kept_by == view.rank:
        return f"keeps its event loop busy at {view.site}"
    return f"has an event loop that rank {view.kept_by} keeps busy at {view.site}"


def _describe_idle(view: RankView) -> str:
    """Return what a rank in no operation does, as text such as "has finished" or "in its program, at train.py:41"."""
    if view.kept_by is not None:
        return _describe_kept_loop(view)
    if view.seen in (Seen.LEFT, Seen.NO_RECORD):
        return "has finished" if view.seen is Seen.LEFT else "no record"
    return f"in its program{f', at {view.site}' if view.site else ''}"


def format_duration(duration_ns: int) -> str:
    """Return a duration as text, such as "3.5 ms" or "2.0 s"; a negative one (clocks differ) is "0.0 ms"."""
    seconds = max(duration_ns, 0) / 1e9
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"

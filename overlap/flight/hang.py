"""The verdict on a stuck job from the dumps of its ranks and from flight records: a sentence, a page, and data."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..errors import UsageError
from ..timeline.ranklist import listed, named_ranks
from ..timeline.why.children import in_children
from ..units import columns, wrapped
from .autopsy import sentence, table, verdict
from .desync import Job, Mismatch
from .dumps import Dump, DumpedCall, looks_like_dump, read_dump
from .folder import ENDING
from .records import recent_world

SCHEMA_VERSION = 1
PAGE_LINES, _WIDTH = 24, 110
_MOST_FILES = 20_000
_ALL_ROWS, _MOST_ROWS = 1 << 30, 1 << 16  # of the tables of flight records, and of dumps
_MOST_REFUSALS, _MOST_NOTES = 8, 4  # on files that cannot be read
_MOST_SIDES, _MOST_LATE = 4, 2  # ranks with calls in a sentence, and further ranks in notes
MANY_BYTES = 16 << 20
"""Dumps that together have fewer bytes are read faster than processes start."""
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_UNDECIDED = "cannot be told, because "


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A verdict, with the evidence for it."""

    sentence: str
    verdict: str  # differs, circle, behind, missing, unknown, none, ended
    ranks: Sequence[int] = ()  # The ranks that the sentence blames
    missing: Sequence[int] = ()  # Ranks without a dump
    calls: Sequence[DumpedCall] = ()  # The operations of the sentence
    notes: Sequence[str] = ()
    evidence: Sequence[str] = ()  # A table: a line of heads, and a line for each rank
    footer: Sequence[str] = ()
    also: Sequence[Hang] = field(default=())  # Findings in files of another kind

    def page(self, *, full: bool = False) -> list[str]:
        """Return the sentence and the evidence in at most `PAGE_LINES` lines, or all of it."""
        if self.also:
            lines = [line for hang in self.also for line in [*hang.page(full=full)[: PAGE_LINES // 2 - 1], ""]][:-1]
            return lines if full else lines[:PAGE_LINES]
        head = [*wrapped(self.sentence, _WIDTH), *(line for note in self.notes for line in wrapped(note, _WIDTH))]
        if self.verdict == "ended":
            head = list(self.notes)
        head = head if full else head[: PAGE_LINES - 4]
        room = len(self.evidence) if full else PAGE_LINES - len(head) - len(self.footer) - 1
        rest = list(self.evidence[:room])
        if len(self.evidence) > room:
            rest[-1] = f"and {len(self.evidence) - room + 1} ranks more (--all)"
        return [*head, *([""] if rest else []), *rest, *self.footer]

    def as_dict(self) -> dict[str, object]:
        """Return the verdict as data: keys are added in later versions of the schema, never changed."""
        return {
            "schema": "overlap.hang",
            "version": SCHEMA_VERSION,
            "sentence": self.sentence,
            "verdict": self.verdict,
            "ranks": list(self.ranks),
            "missing": list(self.missing),
            "operations": [asdict(call) for call in self.calls],
            "notes": list(self.notes),
            "also": [each.as_dict() for each in self.also],
        }


def is_dump(path: Path) -> bool:
    """Whether a path is a dump or a flight record, or a folder with some."""
    if path.is_dir():
        return next(_find_dumps(path), None) is not None
    return path.suffix == ENDING or looks_like_dump(path)


def _find_dumps(folder: Path) -> Iterator[Path]:
    """Yield the dumps and flight records under a folder, looking at `_MOST_FILES` files at most."""
    for count, path in enumerate(folder.rglob("*")):
        if count >= _MOST_FILES:
            return
        if path.is_file() and (path.suffix == ENDING or looks_like_dump(path)):
            yield path


def judge(paths: Sequence[Path]) -> Hang:
    """Return the verdict on dumps and flight records.

    Args:
        paths: Files, or folders with some; without any, the folder where this machine's flight records lie.

    Raises:
        UsageError: If no file can be read.
    """
    dumps: list[Path] = []
    records: list[str] = []
    for path in paths:
        files = sorted(_find_dumps(path)) if path.is_dir() else [path]
        dumps += [file for file in files if file.suffix != ENDING]
        inside = [file for file in files if file.suffix == ENDING]
        # A folder stays one: its run may remove records meanwhile.
        records += dict.fromkeys(str(file.parent if path.is_dir() else file) for file in inside)
    if paths and not dumps and not records:
        raise UsageError(f"why: neither dumps nor flight records in {', '.join(map(str, paths))}; name their folder")
    verdicts = [_judge_records(records)] if records or not paths else []
    verdicts += [_judge_dumps(dumps)] if dumps else []
    if len(verdicts) == 1:
        return verdicts[0]
    sentence = f"{verdicts[0].sentence}; torch: {verdicts[1].sentence}"
    ranks, missing = ([rank for each in verdicts for rank in getattr(each, name)] for name in ("ranks", "missing"))
    return Hang(sentence=sentence, verdict=verdicts[1].verdict, ranks=ranks, missing=missing, also=verdicts)


def _judge_records(files: Sequence[str]) -> Hang:
    """Return the verdict on flight records: that of the world which began last."""
    world, job, more = recent_world(files)
    lines = verdict(world)
    rows = table(world, most_rows=_ALL_ROWS)
    return Hang(sentence=sentence(world), verdict="ended", notes=[job, *lines], evidence=rows, footer=more)


def _judge_dumps(files: Sequence[Path]) -> Hang:
    """Return the verdict on dumps: that of the newest run, with notes on files that cannot be read."""
    dumps, notes = [], []
    for dump in _read_dumps(files):
        if isinstance(dump, UsageError):
            notes.append(f"not read: {dump}")
        else:
            dumps.append(dump)
    if not dumps:
        raise UsageError("\n".join(notes[:_MOST_REFUSALS]))
    run, further_notes = _newest_run(dumps)
    job = Job(run)
    if len(versions := sorted({dump.version for dump in run.values()})) > 1:
        notes.append(f"the dumps are of different versions of the recorder: {', '.join(versions)}")
    hang = _find_cause(job)
    plural, verb = ("s", "are") if len(job.missing) > 1 else ("", "is")
    suffix = f"; the dump{plural} of {named_ranks(job.missing)} {verb} missing" if job.missing else ""
    sentence = hang.sentence + (suffix if hang.verdict != "missing" else "")
    return Hang(
        sentence=sentence, verdict=hang.verdict, ranks=hang.ranks, missing=job.missing, calls=hang.calls,
        notes=[*hang.notes, *further_notes, *notes[:_MOST_NOTES]], evidence=_rank_table(job, hang.ranks),
    )  # fmt: skip


def _read_dumps(files: Sequence[Path]) -> Iterator[Dump | UsageError]:
    """Yield the dumps in files, or the reasons why they cannot be read; many are read by two processes."""
    if sum(file.stat().st_size for file in files if file.exists()) > MANY_BYTES and sys.executable and len(files) > 1:
        yield from in_children(read_dump, [files[::2], files[1::2]])
        return
    for file in files:
        try:
            yield read_dump(file)
        except UsageError as error:
            yield error


def _newest_run(dumps: Sequence[Dump]) -> tuple[Mapping[int, Dump], list[str]]:
    """Return the dumps of one run: where ranks occur twice, files of one folder and one prefix belong together."""
    best: dict[tuple[str, str, int], Dump] = {}
    for dump in dumps:  # a rank may have written both a pickle, which has stacks, and JSON
        key = (str(dump.path.parent), dump.prefix, dump.rank)
        if key not in best or any(call.line for call in dump.calls):
            best[key] = dump
    if len({rank for *_, rank in best}) == len(best):
        return {dump.rank: dump for dump in sorted(best.values(), key=lambda dump: dump.rank)}, []
    runs: dict[tuple[str, str], dict[int, Dump]] = defaultdict(dict)
    for (folder, prefix, rank), dump in sorted(best.items()):
        runs[folder, prefix][rank] = dump
    newest = max(runs, key=lambda run: max((c.created_ns for d in runs[run].values() for c in d.calls), default=0))
    return runs[newest], [f"of {len(runs)} runs in these files this is the last ({newest[1]})"]


def _find_cause(job: Job) -> Hang:
    """Return the verdict of the first kind that applies: a mismatch, ranks that wait, or none of both."""
    differs = next((_blame_mismatch(job, mismatch) for mismatch in job.mismatches()), None)
    if differs is not None and not differs.notes:
        return differs
    stuck = _blame_waits(job)
    if stuck is None or differs is None:  # a mismatch that has ended may have stopped no rank
        return stuck or differs or _describe_unexplained(job)
    return replace(stuck, notes=[*stuck.notes, f"before it: {differs.sentence}; {differs.notes[0]}"])


def _blame_waits(job: Job) -> Hang | None:
    """Return the verdict on ranks that wait for others; None if no rank does."""
    if circle := job.circle():
        waits = "; ".join(_describe_wait(job, rank) for rank in circle)
        calls = [call for rank in circle if (call := job.last(rank)) is not None]
        return Hang(sentence=f"ranks {listed(circle)} wait for each other: {waits}", verdict="circle",
                    ranks=circle, calls=calls)  # fmt: skip
    awaits = job.awaits
    last = sorted({other for others in awaits.values() for other in others if not awaits.get(other)})
    last = [rank for rank in last if rank in job.missing or not job.pending(rank)] or last
    return _blame_absent(job, [rank for rank in last if rank in job.dumps] or last) if last else None


def _blame_mismatch(job: Job, mismatch: Mismatch) -> Hang:
    """Return the verdict on an operation that ranks have called differently."""
    rest = [rank for rank in mismatch.calls if rank not in mismatch.odd]
    kinds = "in another order" if mismatch.swapped else f"{mismatch.differs} differ"
    if rest:
        first = mismatch.calls[mismatch.odd[0]]
        second = mismatch.calls[rest[0]]
        verb = "differs: it" if len(mismatch.odd) == 1 else "differ: they"
        sentence = (
            f"{named_ranks(mismatch.odd)} {verb} called {first}{first.place}, where {named_ranks(sorted(rest))} "
            f"called {second}{second.place}, in {job.name(first)} ({kinds})"
        )
        calls = [first, second]
    else:
        calls = [mismatch.calls[rank] for rank in mismatch.odd]
        sides = " and ".join(f"rank {call.rank} called {call}{call.place}" for call in calls[:_MOST_SIDES])
        sentence = f"ranks {listed(mismatch.odd)} differ in {job.name(calls[0])}: {sides} ({kinds})"
    ended = ["this operation has ended on all ranks, with an error or with wrong values"]
    return Hang(sentence=sentence, verdict="differs", ranks=mismatch.odd, calls=calls,
                notes=ended if all(call.done for call in mismatch.calls.values()) else [])  # fmt: skip


def _blame_absent(job: Job, culprits: Sequence[int]) -> Hang:
    """Return the verdict on ranks that have not called an operation in which others wait for them."""
    rank = culprits[0]
    waiters = [other for other, others in job.awaits.items() if rank in others]
    blocking = {other: call for other in waiters if (call := job.last(other)) is not None}
    waited = min(blocking.values(), key=lambda call: call.created_ns)
    waiters = [r for r, call in blocking.items() if (call.group, call.number) == (waited.group, waited.number)]
    waiting = f"{named_ranks(sorted(waiters))} wait{'s' * (len(waiters) == 1)} for"
    operation = job.describe(waited)
    if rank not in job.dumps:
        absent = f"{waiting} {'it' if len(culprits) == 1 else 'them'} in {operation}"
        sentence = f"the dump of {named_ranks(culprits)} is missing, and {absent}: {_UNDECIDED}no file says what it did"
        return Hang(sentence=sentence, verdict="missing", ranks=culprits, calls=[waited])
    last = job.last(rank)
    notes = _gloo_notes(job)
    message = " or in a message" if notes else ""
    verb = "is" if len(culprits) == 1 else "are"
    if last is None:
        state = "it has issued nothing"
    elif last.done:
        state = (
            f"its last operation, {last}{last.place}, has ended: it is in its own code{message}, or its program has "
            "ended"
        )
    else:
        state = f"it is still in {job.describe(last)}, which all of its members have called"
    if len(waiters) < len(culprits):
        state += f"; or {named_ranks(sorted(waiters))} called an operation too many"
    elsewhere = [r for r in job.absent(waited) if r in job.dumps and r not in culprits and job.pending(r)]
    for late in elsewhere[:_MOST_LATE]:
        notes = [*notes, f"rank {late} has not called it either: it is in {job.describe(job.pending(late)[0])}"]
    called = f"the other end of {operation}" if waited.is_message else operation
    first = f"rank {rank}: " if len(culprits) > 1 else ""
    sentence = f"{named_ranks(culprits)} {verb} behind: {first}it has not called {called}, where {waiting} it; {state}"
    return Hang(sentence=sentence, verdict="behind", ranks=culprits, calls=[waited, *([last] if last else [])],
                notes=notes)  # fmt: skip


def _describe_unexplained(job: Job) -> Hang:
    """Return the verdict if no rank waits for another: all members have called, or all operations have ended."""
    pending = [call for rank in job.dumps for call in job.pending(rank)]
    if pending:
        first = min(pending, key=lambda call: call.created_ns)
        last = " or a rank whose dump is not here" if job.missing or not job.group(first)[1] else ""
        last = " or roots that differ, which no dump has" if first.kind in _ROOTED else last
        why = f"all known members have called {job.describe(first)}, and it has not ended: the network, a device{last}"
        if not job.group(first)[1]:
            callers = {rank for by_rank in job.calls.get(job.group(first), {}).values() for rank in by_rank}
            rest = sorted({*job.dumps, *job.missing} - callers)
            lack = "no dump lists the members"
            if rest:
                lack = (
                    f"{named_ranks(rest)} {'have' if len(rest) > 1 else 'has'} called nothing in that group: no dump "
                    "lists its members, so one of them may be missing there"
                )
            why = f"rank {first.rank} is in {job.describe(first)}, and {lack}"
        return Hang(sentence=_UNDECIDED + why, verdict="unknown", calls=[first], notes=_gloo_notes(job))
    newest = {(job.group(c), c.rank): c for d in job.dumps.values() for c in d.calls if not c.is_message}
    ends = [(job.absent(call), call) for call in newest.values()]
    late = min((end for end in ends if end[0]), key=lambda end: end[1].created_ns, default=None)
    if late is not None:
        absent, call = late
        gone = [rank for rank in absent if rank not in job.dumps]
        own = job.last(absent[0])
        state = f"; the last of rank {absent[0]} was {own}{own.place}" if own else ""
        verb, whose = ("is", "its") if len(absent) == 1 else ("are", "their")
        sentence = (
            f"{named_ranks(absent)} {verb} behind: {job.describe(call)} has ended on rank {call.rank}, by a time-out "
            f"or alone, without a call of {whose} own{state}"
        )
        return Hang(sentence=sentence, verdict="missing" if gone == absent else "behind", ranks=absent,
                    calls=[call], notes=_gloo_notes(job))  # fmt: skip
    why = "no rank is in a recorded operation: the job is in its own code, or had ended its communication"
    return Hang(sentence=_UNDECIDED + why, verdict="none", notes=_gloo_notes(job))


def _gloo_notes(job: Job) -> list[str]:
    """Return a note on the gaps in dumps of gloo's recorder; none for other dumps."""
    calls = [call for dump in job.dumps.values() for call in dump.calls]
    if any(call.state in ("started", "completed") for call in calls) or not calls:
        return []
    return ["gloo's recorder has neither sends nor receives, nor the members of groups: a rank may wait in these"]


def _describe_wait(job: Job, rank: int) -> str:
    """Return the ranks that a rank waits for, and its operation, for a sentence."""
    call = job.last(rank)
    others = job.awaits[rank]
    return f"rank {rank} for {named_ranks(others)} in {job.describe(call)}" if call else f"rank {rank}"


def _rank_table(job: Job, first: Sequence[int]) -> list[str]:
    """Return the lines of a table with the last operation of each rank, the ranks in `first` first."""
    awaits = job.awaits
    rows = []
    for rank in sorted([*job.dumps, *job.missing], key=lambda rank: (rank not in first, rank)):
        call = job.last(rank)
        if call is None:
            rows.append((str(rank), "no dump" if rank in job.missing else "nothing issued", "", "", ""))
        else:
            state = "ended" if call.done else call.state
            rows.append((str(rank), f"{call} ({job.name(call)})", state, call.line or "-", listed(awaits[rank])))
    return columns(("rank", "operation", "state", "line", "waits for"), rows[:_MOST_ROWS], words=[1, 2, 3, 4])

"""The verdict on a stuck job from the dumps of its ranks and from flight records: a sentence, a page, and data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from ..ranklist import named_ranks
from ..timeline.files.children import read_files
from ..units import wrapped
from ..waits import judge as waits
from ..waits.ends import End
from ..waits.wording import rows, table, title
from ..waits.wording import sentence as sentence_of
from .dumps import Dump, looks_like_dump, rank_views, ranks_without_dump, read_dump
from .ends import judge_records, name_missing_processes
from .folder import ENDING
from .records import recent_world

SCHEMA_VERSION = 2
PAGE_LINES, PAGE_COLUMNS = 24, 110
_MOST_FILES = 20_000
_MOST_REFUSALS, _MOST_NOTES = 8, 4  # on files that cannot be read
MANY_BYTES = 16 << 20
"""Dumps that together have fewer bytes are read faster than processes start."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A verdict, with the evidence for it."""

    sentence: str
    verdict: str  # Kind of the verdict, see `waits.judge`
    ranks: Sequence[int] = ()  # The ranks that the sentence blames
    missing: Sequence[int] = ()  # Ranks without a dump
    ends: Sequence[End] = ()  # The operations of the sentence
    job: str = ""  # Line on the job, of flight records
    notes: Sequence[str] = ()
    evidence: Sequence[str] = ()  # A table: a line of heads, and a line for each rank
    footer: Sequence[str] = ()
    also: Sequence[Hang] = field(default=())  # Findings in files of another kind

    def page(self, *, full: bool = False, width: int = PAGE_COLUMNS) -> list[str]:
        """Return the sentence and the evidence, of which ranks are left out that `PAGE_LINES` lines have no room for.

        Args:
            full: Whether all ranks are shown.
            width: Columns; text is wrapped, and nothing is cut off.
        """
        if self.also:
            return [line for hang in self.also for line in [*hang.page(full=full, width=width), ""]][:-1]
        head = [line for text in (self.job, self.sentence, *self.notes) for line in wrapped(text, width)]
        footer = [line for text in self.footer for line in wrapped(text, width)]
        evidence = [wrapped(line, width, rest="    ") for line in self.evidence]
        room = PAGE_LINES - len(head) - len(footer) - 1
        shown = len(evidence)
        while not full and shown > 2 and sum(map(len, evidence[:shown])) + (shown < len(evidence)) > room:
            shown -= 1
        rest = [line for lines in evidence[:shown] for line in lines]
        rest += [f"and {len(evidence) - shown} ranks more (--all)"] * (shown < len(evidence))
        return [*head, *([""] if rest else []), *rest, *footer]

    def as_dict(self) -> dict[str, object]:
        """Return the verdict as data: keys are added in later versions of the schema, never changed."""
        return {
            "schema": "overlap.hang",
            "version": SCHEMA_VERSION,
            "sentence": self.sentence,
            "verdict": self.verdict,
            "ranks": list(self.ranks),
            "missing": list(self.missing),
            "operations": [
                {"rank": end.rank, "operation": title(end), "line": end.call.site, "state": end.state.value}
                for end in self.ends
            ],
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
    views, verdict, notes = judge_records(world)
    evidence = table(rows(views, world.flights[0].world_size, verdict), world.end_ns)
    return Hang(
        sentence=sentence_of(verdict), verdict=verdict.kind.value, ranks=verdict.culprits, job=job,
        missing=verdict.missing, ends=_ends_of(verdict), notes=notes, evidence=evidence,
        footer=[*name_missing_processes(world), *more],
    )  # fmt: skip


def _ends_of(verdict: waits.WaitVerdict) -> list[End]:
    """Return the operations of a verdict."""
    return [end for end in (*verdict.ends, verdict.end) if end is not None]


def _judge_dumps(files: Sequence[Path]) -> Hang:
    """Return the verdict on dumps: that of the newest run, with notes on files that cannot be read."""
    half = len(files) // 2
    found = read_files(read_dump, [files[:half], files[half:]], small_bytes=MANY_BYTES)
    dumps = [dump for dump in found if isinstance(dump, Dump)]
    notes = [f"not read: {refusal}" for refusal in found if isinstance(refusal, UsageError)]
    if not dumps:
        raise UsageError("\n".join(notes[:_MOST_REFUSALS]))
    run, further_notes = _newest_run(dumps)
    if len(versions := sorted({dump.version for dump in run.values()})) > 1:
        notes.append(f"the dumps are of different versions of the recorder: {', '.join(versions)}")
    missing, views = ranks_without_dump(run), rank_views(run)
    size = len(run) + len(missing)
    verdict = waits.judge(views, size)
    own_notes = [f"before it: {sentence_of(verdict.earlier)}; these calls have ended"] if verdict.earlier else []
    own_notes += [f"no dump of {named_ranks(missing)}"] if missing else []
    now_ns = max((end.issued_ns for view in views for end in view.ends), default=0)
    return Hang(
        sentence=sentence_of(verdict), verdict=verdict.kind.value, ranks=verdict.culprits, missing=missing,
        ends=_ends_of(verdict),
        notes=[*own_notes, *further_notes, *notes[:_MOST_NOTES]], evidence=table(rows(views, size, verdict), now_ns),
    )  # fmt: skip


def _newest_run(dumps: Sequence[Dump]) -> tuple[Mapping[int, Dump], list[str]]:
    """Return the dumps of one run: where ranks occur twice, files of one folder and one prefix belong together."""
    best: dict[tuple[str, str, int], Dump] = {}
    for dump in dumps:  # a rank may have written both a pickle, which has stacks, and JSON
        key = (str(dump.path.parent), dump.prefix, dump.rank)
        if key not in best or any(end.call.site for end in dump.ends):
            best[key] = dump
    if len({rank for *_, rank in best}) == len(best):
        return {dump.rank: dump for dump in sorted(best.values(), key=lambda dump: dump.rank)}, []
    runs: dict[tuple[str, str], dict[int, Dump]] = defaultdict(dict)
    for (folder, prefix, rank), dump in sorted(best.items()):
        runs[folder, prefix][rank] = dump
    newest = max(
        runs, key=lambda run: max((end.issued_ns for dump in runs[run].values() for end in dump.ends), default=0)
    )
    return runs[newest], [f"of {len(runs)} runs in these files this is the last ({newest[1]})"]

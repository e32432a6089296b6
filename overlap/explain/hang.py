"""The verdict on a stuck job from the dumps of its ranks and from flight records: a sentence, and a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import UsageError
from ..flight.dumps import Dump, looks_like_dump, ranks_without_dump, read_dump, views_of_dumps
from ..flight.ends import judge_records, name_missing_processes
from ..flight.folder import ENDING
from ..flight.records import newest_recorded_world
from ..ranklist import named_ranks
from ..timeline.files.children import read_files
from ..units import wrap_text
from ..waits import judge as waits
from ..waits.wording import end_title, wait_rows, wait_sentence, wait_table
from .report import Hang

PAGE_LINES, PAGE_COLUMNS = 24, 110
_MOST_FILES = 20_000
_MOST_REFUSALS, _MOST_NOTES = 8, 4  # on files that cannot be read


def is_or_has_dump(path: Path) -> bool:
    """Whether a path is a dump, a flight record, or a folder with at least one of them."""
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


def judge_stuck_job(paths: Sequence[Path], *, full: bool = False, width: int = PAGE_COLUMNS) -> Hang:
    """Return the verdict on dumps and flight records.

    Args:
        paths: Files, or folders with some; empty: the default folder of flight records.
        full: Whether the page shows all ranks, and not only those that `PAGE_LINES` lines have room for.
        width: Columns of the page; text is wrapped, and nothing is cut off.

    Raises:
        UsageError: No file can be read.
    """
    dumps: list[Path] = []
    records: list[str] = []
    for path in paths:
        files = sorted(_find_dumps(path)) if path.is_dir() else [path]
        dumps += [file for file in files if file.suffix != ENDING]
        inside = [file for file in files if file.suffix == ENDING]
        # Folders are passed on as such, each once, as a run may remove records before they are read.
        records += dict.fromkeys(str(file.parent if path.is_dir() else file) for file in inside)
    if paths and not dumps and not records:
        raise UsageError(f"why: neither dumps nor flight records in {', '.join(map(str, paths))}; name their folder")
    found = [_judge_records(records, full=full, width=width)] if records or not paths else []
    found += [_judge_dumps(dumps, full=full, width=width)] if dumps else []
    if len(found) == 1:
        return found[0]
    # Both kinds of files. The dumps of torch come last, as they have the operations that the program called.
    of_records, of_dumps = found
    return Hang(
        sentence=f"{of_records.sentence}; torch: {of_dumps.sentence}", verdict=of_dumps.verdict, also=found,
        ranks=[*of_records.ranks, *of_dumps.ranks], missing=[*of_records.missing, *of_dumps.missing],
        page=[*of_records.page, "", *of_dumps.page],
    )  # fmt: skip


def _judge_records(files: Sequence[str], *, full: bool, width: int) -> Hang:
    """Return the verdict on the world that began last among flight records, or folders with some.

    No files: the default folder.
    """
    world, job, more = newest_recorded_world(files)
    views, verdict, notes = judge_records(world)
    lines = wait_table(wait_rows(views, world.flights[0].world_size, verdict), world.end_ns)
    footer = [*name_missing_processes(world), *more]
    page = _page_lines([job, wait_sentence(verdict), *notes], lines, footer, full=full, width=width)
    return _make_hang(verdict, verdict.missing, notes, page)


def _judge_dumps(files: Sequence[Path], *, full: bool, width: int) -> Hang:
    """Return the verdict on the newest run among some dumps, with notes on unreadable files.

    Raises `UsageError` with the first reasons if no file can be read.
    """
    found = read_files(read_dump, files)
    dumps = [dump for dump in found if isinstance(dump, Dump)]
    refusals = [f"not read: {refusal}" for refusal in found if isinstance(refusal, UsageError)]
    if not dumps:
        raise UsageError("\n".join(refusals[:_MOST_REFUSALS]))
    run, run_notes = _choose_newest_run(dumps)
    if len(versions := sorted({dump.version for dump in run.values()})) > 1:
        refusals.append(f"the dumps are of different versions of the recorder: {', '.join(versions)}")
    missing, views = ranks_without_dump(run), views_of_dumps(run)
    size = len(run) + len(missing)
    verdict = waits.judge(views, size)
    notes = [f"before it: {wait_sentence(verdict.earlier)}; these calls have ended"] if verdict.earlier else []
    notes += [f"no dump of {named_ranks(missing)}"] if missing else []
    notes += [*run_notes, *refusals[:_MOST_NOTES]]
    now_ns = max((end.issued_ns for view in views for end in view.ends), default=0)
    lines = wait_table(wait_rows(views, size, verdict), now_ns)
    page = _page_lines([wait_sentence(verdict), *notes], lines, [], full=full, width=width)
    return _make_hang(verdict, missing, notes, page)


def _make_hang(verdict: waits.WaitVerdict, missing: Sequence[int], notes: Sequence[str], page: Sequence[str]) -> Hang:
    return Hang(
        sentence=wait_sentence(verdict), verdict=verdict.kind.value, ranks=verdict.culprits, missing=missing,
        notes=notes, page=page, operations=[
            {"rank": end.rank, "operation": end_title(end), "line": end.call.site, "state": end.state.value}
            for end in (*verdict.ends, verdict.end) if end is not None
        ],
    )  # fmt: skip


def _page_lines(
    head: Sequence[str], ranks: Sequence[str], footer: Sequence[str], *, full: bool, width: int
) -> list[str]:  # fmt: skip
    """Return the wrapped lines of a page: paragraphs, the table of ranks, and more paragraphs.

    Unless `full`, lines of the table are left out until `PAGE_LINES` lines remain, but two of them stay.
    """
    above, below = ([line for text in texts for line in wrap_text(text, width)] for texts in (head, footer))
    table_rows = [wrap_text(line, width, rest="    ") for line in ranks]
    room, shown = PAGE_LINES - len(above) - len(below) - 1, len(table_rows)
    while not full and shown > 2 and sum(map(len, table_rows[:shown])) + (shown < len(table_rows)) > room:
        shown -= 1
    middle = [line for lines in table_rows[:shown] for line in lines]
    middle += [f"and {len(table_rows) - shown} ranks more (--all)"] * (shown < len(table_rows))
    return [*above, *([""] if middle else []), *middle, *below]


def _choose_newest_run(dumps: Sequence[Dump]) -> tuple[Mapping[int, Dump], list[str]]:
    """Choose the dumps of one run, by rank, and a list with a note if there are several runs.

    If each rank has one dump, all are of one run. Otherwise files of one folder with one prefix are a run, and the one
    with the newest operation is taken.
    """
    best: dict[tuple[str, str, int], Dump] = {}
    for dump in dumps:
        key = (str(dump.path.parent), dump.prefix, dump.rank)
        # A rank may have written a pickle and JSON: the one with stacks, which give the lines of calls, is better.
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

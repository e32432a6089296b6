"""Explanations of slow and stuck jobs, from timelines, traces, and dumps of flight recorders: `overlap.why`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import UsageError
from ..timeline.files.children import Progress, read_files
from ..timeline.files.merge import merged
from ..timeline.files.packed import is_json_array, is_profile, read_beginning, unpacking
from ..timeline.files.reading import read_trace
from ..timeline.spans import Timeline
from .page import page_columns
from .profiles import explain_profiles
from .rank import RankReport, measure_file
from .recorded import explain_timeline
from .report import SCHEMA, Why, from_json

MAX_REPORT_BYTES = 64 << 20
_RANK = re.compile(r"(?:rank|worker|TP)[-_ ]?(\d+)", re.IGNORECASE)
TRACE_SUFFIXES = (".json", ".json.gz", ".gz", ".pickle", ".pkl")


def why(
    source: str | os.PathLike[str] | Timeline, *more: str | os.PathLike[str], step: int | None = None
) -> Why:  # fmt: skip
    """Explain a slow or stuck job in one sentence, with its causes and advice.

    Args:
        source: A timeline, or a path: of a trace of PyTorch's profiler (compressed or not), of overlap or of another
            tool, of a dump of a flight recorder, of a report that `overlap why --json` printed, or of a folder with
            such files, one for each rank.
        more: More files of the same job.
        step: The step to show, or None for the median one.

    Raises:
        UsageError: A file cannot be read, files are not of one job, or the step is not recorded.
    """
    if not isinstance(source, Timeline):
        return explain_files([source, *more], step=step)
    if more:
        raise UsageError("why: give one timeline, or files; overlap.timeline.merged joins timelines")
    return explain_timeline(source, step=step)


def explain_files(
    paths: Sequence[str | os.PathLike[str]],
    *,
    step: int | None = None,
    progress: Progress | None = None,
    whole: bool = False,
) -> Why:
    """Explain the files of one job, as `why` does.

    Args:
        paths: The files.
        step: The step to show, or None for the median one.
        progress: Reports how far the reading of files is; None: no reports.
        whole: Whether the page on a stuck job lists all ranks, not only those with room.

    Raises:
        UsageError: As for `why`.
    """
    named = [Path(path) for path in paths]
    for path in named:
        # The beginning of a pipe could be read only once, and reading it may block.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"why: {path} is no regular file, and is read more than once: save it, and name that")
    unpacking.nbytes = 0
    from . import hang  # which most programs never need

    if all(map(hang.is_or_has_dump, named)):
        stuck = hang.judge_stuck_job(named, full=whole, width=page_columns(hang.PAGE_COLUMNS))
        return Why(verdict=stuck.sentence, origin="flight recorder", hang=stuck)
    files = [file for path in named for file in _trace_files(path)]
    if len(files) == 1 and (report := _read_saved_report(files[0])) is not None:
        return report
    profiles = [file for file in files if is_profile(read_beginning(file))]
    if not profiles:
        timelines = [read_trace(file) for file in files]
        return explain_timeline(timelines[0] if len(timelines) == 1 else merged(timelines), step=step)
    other_files = [file for file in files if file not in profiles]
    for file in other_files:
        if file in named or b'"traceEvents"' in (begin := read_beginning(file)) or is_json_array(begin):
            raise UsageError(
                f"why: {file} is no trace of PyTorch's profiler, but {profiles[0]} is: name files of one kind"
            )
    found = explain_profiles(_measure_files(profiles, progress), step=step)
    note = f"left out, as they are no traces of PyTorch's profiler: {', '.join(file.name for file in other_files)}"
    return replace(found, notes=(*found.notes, note)) if other_files else found


def _measure_files(profiles: Sequence[Path], progress: Progress | None) -> list[RankReport]:
    """Measure files of PyTorch's profiler. Of several, a file without its rank gets it from its name.

    Raises `UsageError` if one cannot be read.
    """
    reports = list[RankReport]()
    for report in read_files(measure_file, profiles, progress=progress):
        if isinstance(report, UsageError):
            raise report
        reports.append(report)
    return reports if len(reports) == 1 else [_with_rank_of_file_name(report) for report in reports]


def _trace_files(path: Path) -> list[Path]:
    """Return the files of a folder that may be traces, by their suffix, or the file itself.

    Raises `UsageError` if there is none.
    """
    if not path.is_dir():
        if not path.exists():
            raise UsageError(f"why: {path}: no such file or folder; name one that exists")
        return [path]
    inside = sorted(path.iterdir())
    files = [each for each in inside if each.is_file() and each.name.endswith(TRACE_SUFFIXES)]
    folders = [each for each in inside if each.is_dir()]
    if not files and len(folders) == 1:  # an unpacked archive often has one folder in a folder
        return _trace_files(folders[0])
    if not files:
        suffixes = ", ".join(TRACE_SUFFIXES[:3])
        raise UsageError(f"why: no trace and no dump in {path}: expected files that end in {suffixes}")
    return files


def _read_saved_report(path: Path) -> Why | None:
    """Return the report that `overlap why --json` wrote into a file, or None if the file is something else.

    Raises `UsageError` if it cannot be read, or the report is damaged or of a newer version.
    """
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            return None
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"why: {path}: cannot be read: {error.strerror}; name a file that can be read") from error
    return from_json(data) if f'"schema": "{SCHEMA}"'.encode() in data and b'"traceEvents"' not in data else None


def _with_rank_of_file_name(report: RankReport) -> RankReport:
    """Return a report with the rank in the file's name, such as "rank_3.json", unless the file itself names one."""
    found = _RANK.search(Path(report.path).name)
    if report.named_rank is not None or not found:
        return report
    rank = int(found[1])
    pieces = replace(report.pieces, rank=np.full_like(report.pieces.rank, rank))
    header = {**report.header, "distributedInfo": {**report.distributed_info, "rank": rank}}
    return replace(report, header=header, pieces=pieces)

"""Files of a job, and their kinds."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import UsageError
from ..timeline.files.children import Progress, read_files
from ..timeline.files.merge import merged
from ..timeline.files.packed import is_array, is_profile, read_beginning
from ..timeline.files.reading import read_trace
from .profiles import explain_profiles
from .rank import RankReport, measure_file
from .recorded import explain_timeline
from .report import SCHEMA, Why, from_json

MAX_REPORT_BYTES = 64 << 20
_RANK = re.compile(r"(?:rank|worker|TP)[-_ ]?(\d+)", re.IGNORECASE)
TRACE_SUFFIXES = (".json", ".json.gz", ".gz", ".pickle", ".pkl")


def explain_traces(
    paths: Sequence[str | os.PathLike[str]],
    *,
    step: int | None = None,
    ranks: Collection[int] | None = None,
    progress: Progress | None = None,
) -> Why:
    """Return the report on the traces of a job, or a report that was written before.

    Raises:
        UsageError: A file cannot be read, or files are not of one job.
    """
    files = [file for path in paths for file in _trace_files(Path(path))]
    if len(files) == 1 and (report := _read_report(files[0])) is not None:
        return report
    profiles = []
    for file in files:
        profiles += [file] if is_profile(read_beginning(file)) else []
    other_files = [file for file in files if file not in profiles]
    named = [
        file for file in other_files
        if file in map(Path, paths) or b'"traceEvents"' in (begin := read_beginning(file)) or is_array(begin)
    ]  # fmt: skip
    if profiles and not named:
        read = read_files(measure_file, [[file] for file in profiles], small_bytes=SMALL_BYTES, progress=progress)
        if refusal := next((each for each in read if isinstance(each, UsageError)), None):
            raise refusal
        reports = [each for each in read if not isinstance(each, UsageError)]
        reports = reports if len(reports) == 1 else [_with_named_rank(report) for report in reports]
        found = explain_profiles([report for report in reports if ranks is None or report.rank in ranks], step=step)
        note = f"left out, as they are no traces of PyTorch's profiler: {', '.join(file.name for file in other_files)}"
        return replace(found, notes=(*found.notes, note)) if other_files else found
    if profiles:
        raise UsageError(
            f"why: {named[0]} is no trace of PyTorch's profiler, but {profiles[0]} is: name files of one kind"
        )
    timelines = [read_trace(file) for file in files]
    return explain_timeline(timelines[0] if len(timelines) == 1 else merged(timelines), step=step)


SMALL_BYTES = 32 << 20
"""Files that together have fewer bytes are read faster than a process starts."""


def _trace_files(path: Path) -> list[Path]:
    """Return the files of a folder that may be traces, or a file itself.

    Raises:
        UsageError: There is none.
    """
    if not path.is_dir():
        if not path.exists():
            raise UsageError(f"why: {path}: no such file or folder; name one that exists")
        return [path]
    inside = sorted(path.iterdir())
    files = [each for each in inside if each.is_file() and each.name.endswith(TRACE_SUFFIXES)]
    folders = [each for each in inside if each.is_dir()]
    if not files and len(folders) == 1:  # as archives are unpacked
        return _trace_files(folders[0])
    if not files:
        suffixes = ", ".join(TRACE_SUFFIXES[:3])
        raise UsageError(f"why: no trace and no dump in {path}: expected files that end in {suffixes}")
    return files


def _read_report(path: Path) -> Why | None:
    """Return a report that `overlap why --json` has written; None if a file is something else or larger than one."""
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            return None
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"why: {path}: cannot be read: {error.strerror}; name a file that can be read") from error
    return from_json(data) if f'"schema": "{SCHEMA}"'.encode() in data and b'"traceEvents"' not in data else None


def _with_named_rank(report: RankReport) -> RankReport:
    """Return a report with the rank in its file's name; unchanged if the file has a rank or the name has none."""
    found = _RANK.search(Path(report.path).name)
    if report.named_rank is not None or not found:
        return report
    rank = int(found[1])
    pieces = replace(report.pieces, rank=np.full_like(report.pieces.rank, rank))
    header = {**report.header, "distributedInfo": {**report.distributed_info, "rank": rank}}
    return replace(report, header=header, pieces=pieces)

"""Files of a job: their kinds, and the processes that read them, two at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from ...errors import UsageError
from ..files.profile import is_profile
from .judgement import judge
from .rank import RankReport, measure_file
from .report import SCHEMA, Why, from_json

AT_ONCE = 2
"""Processes that read files; each needs some 200 MB for 250 MB of text."""
SMALL_BYTES = 32 << 20
"""Files that together have fewer bytes are read faster than a process starts."""
MOST_REPORT_BYTES = 64 << 20
ENDINGS = (".json", ".json.gz", ".gz", ".pickle", ".pkl", ".et")

Progress = Callable[[int, int], None]
"""Called with how many files are read, and how many there are."""


def why(path: str | os.PathLike[str], *more: str | os.PathLike[str], step: int | None = None) -> Why:
    """Say why a job is slow or stuck, in one sentence, with its causes and what to change.

    Args:
        path: A trace of PyTorch's profiler (packed or not), of ours or of another tool, a dump of a flight recorder,
            a report that `overlap why --json` printed, or a folder with such files, one of each rank.
        more: More files of the same job.
        step: The step to show; None for the median one.

    Raises:
        UsageError: A file cannot be read, or files are not of one job.
    """
    return explain([path, *more], step=step)


def explain(
    paths: Sequence[str | os.PathLike[str]], *, step: int | None = None, progress: Progress | None = None
) -> Why:
    """Judge the files of a job; as `why`, with progress."""
    named = [Path(path) for path in paths]
    if (hang := _hang(named)) is not None:
        return hang
    files = [file for path in named for file in _inside(path)]
    if len(files) == 1 and (report := _report(files[0])) is not None:
        return report
    profiles = [file for file in files if is_profile(file)]
    if profiles and len(profiles) == len(files):
        return judge(_measured(profiles, progress or (lambda done, count: None)), step=step)
    if profiles:
        other = next(file for file in files if file not in profiles)
        raise UsageError(f"why: {other} is no trace of PyTorch's profiler, but {profiles[0]} is: name files of one kind")
    from .recorded import judge_timeline

    return judge_timeline(files, step=step)


def _inside(path: Path) -> list[Path]:
    """Return the files of a folder that may be traces, or a file itself.

    Raises:
        UsageError: There is none.
    """
    if not path.is_dir():
        if not path.exists():
            raise UsageError(f"why: {path}: no such file or folder")
        return [path]
    found = sorted(each for each in path.iterdir() if each.is_file() and each.name.endswith(ENDINGS))
    if not found:
        raise UsageError(f"why: no trace and no dump in {path}: expected files that end in {', '.join(ENDINGS[:3])}")
    return found


def _report(path: Path) -> Why | None:
    """Return a report that was written before; None if a file is something else."""
    try:
        if path.stat().st_size > MOST_REPORT_BYTES:
            return None
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"why: {path}: cannot be read: {error.strerror}") from error
    return from_json(data) if f'"schema": "{SCHEMA}"'.encode() in data and b'"traceEvents"' not in data else None


def _hang(paths: Sequence[Path]) -> Why | None:
    """Return the judgement on dumps of flight recorders, if that is what the paths are."""
    try:
        from ...flight import hang
    except ImportError:
        return None
    if not all(hang.is_dump(path) for path in paths):
        return None
    found = hang.judge(paths)
    return Why(
        verdict=found.sentence, origin="flight recorder", ranks=(), world_size=0, step=None, step_ns=0, steps_ns={},
        causes=(), advice=(), undecided=(), hang={"page": list(found.page()), **found.as_dict()},
    )  # fmt: skip


def _measured(files: Sequence[Path], progress: Progress) -> list[RankReport]:
    """Measure each file, large ones in two processes that are started for it; Ctrl-C ends them."""
    if len(files) == 1 or sum(file.stat().st_size for file in files) < SMALL_BYTES:
        found = []
        for number, file in enumerate(files):
            progress(number, len(files))
            found.append(measure_file(file))
        return found
    pool = ProcessPoolExecutor(min(AT_ONCE, len(files)), mp_context=get_context("spawn"))
    try:
        order: list[Future[RankReport]] = [pool.submit(measure_file, file) for file in files]
        pending = set(order)
        while pending:
            progress(len(files) - len(pending), len(files))
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
        return [future.result() for future in order]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

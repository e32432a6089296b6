"""Explanations of slow and stuck jobs, from timelines, traces, and dumps of flight recorders: `overlap.why`."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from ..errors import UsageError
from ..timeline.files.children import Progress
from ..timeline.files.packed import unpacking
from ..timeline.spans import Timeline
from .folder import explain_traces
from .page import page_columns
from .recorded import explain_timeline
from .report import Why


def why(
    source: str | os.PathLike[str] | Timeline, *more: str | os.PathLike[str], step: int | None = None
) -> Why:  # fmt: skip
    """Explain a slow or stuck job in one sentence, with its causes and advice.

    Args:
        source: A timeline, or a trace of PyTorch's profiler (packed or not), of ours or of another tool, a dump of a
            flight recorder, a report that `overlap why --json` printed, or a folder with such files, one of each rank.
        more: More files of the same job.
        step: The step to show; None for the median one.

    Raises:
        UsageError: A file cannot be read, or files are not of one job; or a timeline has no such step, or no span.
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
    ranks: Collection[int] | None = None,
    progress: Progress | None = None,
    whole: bool = False,
) -> Why:
    """Explain the files of one job, as `why` does.

    Args:
        paths: The files.
        step: The step to show; None for the median one.
        ranks: Ranks to look at; None: all.
        progress: Shows the reading.
        whole: Whether to list all ranks of a stuck job.

    Raises:
        UsageError: As for `why`.
    """
    for path in map(Path, paths):
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe: to look at its beginning may block
            raise UsageError(f"why: {path} is no regular file, and is read more than once: save it, and name that")
    unpacking.nbytes = 0
    from . import hang  # which most programs never need

    named = [Path(path) for path in paths]
    if not all(map(hang.is_dump, named)):
        return explain_traces(paths, step=step, ranks=ranks, progress=progress)
    stuck = hang.judge(named, full=whole, width=page_columns(hang.PAGE_COLUMNS))
    return Why(verdict=stuck.sentence, origin="flight recorder", hang=stuck)

"""The trace of a run of several processes: each process appends to a file of its own; at the end the files are joined.

A trace file has a section for each world that the process has lived in.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from threading import Event, Thread
from time import perf_counter_ns, thread_time

import numpy as np

from ..errors import UsageError
from ..timeline.columnar import SpanColumns
from ..timeline.files import trace
from ..timeline.recording import RawSpan, Recorder, columns_from_raw
from .clock import ClockOffset

EVERY_S = 1.0
MOST_SHARE = 0.01
"""Largest share of a processor for the writing thread: with thousands of spans a second it writes less often."""
_MOST_TIMES = 2  # a file that has more than twice the spans that the recorders still keep is written again


class TraceFile:
    """The trace file of this process. A thread appends new spans to it, because a program may block the event loop.

    If the disk is full, the thread stops writing; `end_section` then tries to write the file again.

    Args:
        path: The file of this process.

    Attributes:
        path: The file, which is overwritten.
        header: Facts of the run; set by `begin_section`.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._base_bytes = 0  # length of the sections of earlier worlds
        self._thread: Thread | None = None

    def begin_section(
        self,
        header: trace.Header,
        recorders: Sequence[Recorder],
        *,
        clock: Callable[[], ClockOffset] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Begin the section of a world.

        Args:
            header: Facts of the run.
            recorders: Recorders of the ranks of this process.
            clock: Returns the offset of the common clock; None: this process has the common clock.
            numbers: For each rank of this world, its number in the first world; None: the same number.
        """
        self._recorders, self._clock = recorders, clock
        self.header: trace.Header = header
        self._numbers = None if numbers is None else np.array(numbers, np.int64)
        self._clocks: list[trace.ClockAt] = []
        self._start_section(self.path)
        self._done = Event()
        self._thread = Thread(target=self._flush_periodically, name="overlap trace", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Append new spans. If the recorders have dropped most spans of the file, write the section again before."""
        if self._written > _MOST_TIMES * sum(len(recorder) for recorder in self._recorders):
            self._rewrite_section()
        self._append_spans(self.path)

    def end_section(self, meta: dict[str, str]) -> None:
        """Write the last spans of a world, and `meta`, facts that are known at its end.

        Raises:
            UsageError: The file cannot be written.
        """
        if self._thread is not None:
            self._done.set()
            self._thread.join()
        try:
            # the file has spans that the recorders have dropped: write only those that they keep
            if self._is_broken or self._written > sum(len(recorder) for recorder in self._recorders):
                self._rewrite_section()
            self._append_spans(self.path)
            dropped = sum(recorder.dropped for recorder in self._recorders)
            end = self._section.encode_note(trace.END, trace.TraceEnd(dropped=dropped, meta=meta))
            _append_bytes(self.path, end + trace.ENDING)
            self._base_bytes = self.path.stat().st_size - len(trace.ENDING)
        except OSError as error:
            raise UsageError(f"trace: cannot write {self.path}: {error.strerror}; name another file") from error

    def _start_section(self, path: Path) -> None:
        """Write the header of a section at the end of a file, and the clock offsets so far."""
        self._section, self._seen = trace.SectionWriter(), dict[int, RawSpan]()
        self._written, self._is_broken = 0, False
        beginning = self._section.encode_note(trace.HEADER, self.header)
        for clock in self._clocks:
            beginning += self._section.encode_note(trace.CLOCK, clock)
        if self._base_bytes:
            os.truncate(path, self._base_bytes)  # removes the ending, which `end_section` writes again
            _append_bytes(path, beginning)
        else:
            # The file begins with the bracket of a list, in place of the comma and line break before an event.
            path.write_bytes(b"[\n" + beginning[2:])

    def _rewrite_section(self) -> None:
        """Write the section again with the spans that the recorders still keep, into a draft that replaces the file."""
        draft = self.path.with_name(self.path.name + ".new")
        with self.path.open("rb") as old, draft.open("wb") as new:
            new.write(old.read(self._base_bytes))
        self._start_section(draft)
        self._append_spans(draft)
        draft.replace(self.path)

    def _append_spans(self, path: Path) -> None:
        """Append the spans since the last call to a file, and the clock offset if it has changed."""
        text = self._record_clock_offset()
        offset_ns = self._clocks[-1].offset_ns if self._clocks else 0
        for recorder in self._recorders:
            if raws := recorder.since(self._seen.get(recorder.rank)):
                columns = columns_from_raw(recorder.rank, raws)
                text += self._section.encode_spans(self._renumber_ranks(columns), offset_ns=offset_ns)
                self._seen[recorder.rank] = raws[-1]
                self._written += len(raws)
        _append_bytes(path, text)

    def _record_clock_offset(self) -> bytes:
        """Return the event with the clock offset, as bytes; b"" unless it has changed by more than its error."""
        if self._clock is None:
            return b""
        now = self._clock()
        if self._clocks and abs(now.offset_ns - self._clocks[-1].offset_ns) <= now.error_ns:
            return b""
        self._clocks.append(trace.ClockAt(at_ns=perf_counter_ns(), offset_ns=now.offset_ns, error_ns=now.error_ns))
        return self._section.encode_note(trace.CLOCK, self._clocks[-1])

    def _renumber_ranks(self, columns: SpanColumns) -> SpanColumns:
        """Return columns in which ranks have the numbers of the first world."""
        numbers = self._numbers
        if numbers is None:
            return columns
        groups = tuple(group._replace(ranks=tuple(numbers[list(group.ranks)].tolist())) for group in columns.groups)
        return replace(columns, rank=numbers[columns.rank], groups=groups)

    def _flush_periodically(self) -> None:
        """Write new spans every `EVERY_S`, or less often if that takes more than `MOST_SHARE` of a processor."""
        pause_s = EVERY_S
        try:
            while not self._done.wait(pause_s):
                start_s = thread_time()
                self.flush()
                pause_s = max(EVERY_S, (thread_time() - start_s) / MOST_SHARE)
        except OSError:
            self._is_broken = True


def _append_bytes(path: Path, data: bytes) -> None:
    """If there are no bytes, the file is not opened."""
    if data:
        with path.open("ab") as file:
            file.write(data)


# -- at the end --------------------------------------------------------------------------------------------------------


def join_files_of_run(own: TraceFile, path: str | PathLike[str], members: int) -> bool:
    """Join the files of all processes of a run, lost ones included, into the trace; False if a file is missing.

    Args:
        own: File of this process.
        path: Path of the trace.
        members: Number of processes at the end of the run, each of which must have a file here.

    Raises:
        UsageError: The trace cannot be written; the files stay.
    """
    parts = _find_part_files(path).get(("", own.header.run), [])
    if len(parts) >= members:
        trace.join_parts(parts, path)
    return len(parts) >= members


def join_leftover_files(path: str | PathLike[str], job: str) -> list[Path]:
    """Join the files that processes of a job have left next to a trace, because one has failed or was killed.

    Of several attempts of the job only the last one is joined.

    Args:
        path: Path of the trace.
        job: Name of the job.

    Returns:
        The paths of the traces that were written: `path`, and numbered ones such as run-2.json for later runs.

    Raises:
        UsageError: A trace cannot be written.
    """
    attempts: dict[str, dict[int, list[Path]]] = {}  # by number of the trace, and by attempt
    for (number, run), parts in _find_part_files(path).items():
        of_job, _, attempt = run.rpartition(".")
        if of_job == job:
            attempts.setdefault(number, {})[int(attempt)] = parts
    written = []
    stem, dot, ending = Path(path).name.partition(".")
    for number, left in sorted(attempts.items()):
        joined, newest = Path(path).with_name(f"{stem}{number}{dot}{ending}"), max(left)
        with suppress(OSError, UsageError):
            if trace.read_header(joined).run == f"{job}.{newest}":
                continue  # the trace was written already, and these files are of processes that were lost before
        trace.join_parts(left[newest], joined)
        written.append(joined)
    return written


def _find_part_files(path: str | PathLike[str]) -> dict[tuple[str, str], list[Path]]:
    """Return the files of processes next to a trace, in order of the processes, by (number of the trace, run).

    The number is "" for `path` itself, and such as "-2" for numbered traces.
    """
    stem, dot, ending = Path(path).name.partition(".")
    name = re.compile(rf"{re.escape(stem)}(-\d+)?-process(\d+){re.escape((dot + ending).removesuffix('.gz'))}")
    folder = part_path(path, 0).parent
    matches = [match for part in folder.glob("*-process*") if (match := name.fullmatch(part.name))]
    found: dict[tuple[str, str], list[Path]] = {}
    for match in sorted(matches, key=lambda match: int(match[2])):
        with suppress(OSError, UsageError):
            run = trace.read_header(folder / match[0]).run
            found.setdefault((match[1] or "", run), []).append(folder / match[0])
    return found


def part_path(path: str | PathLike[str], member: int) -> Path:
    """Return the path for the part of one process: in the folder of the trace, or in the temporary folder.

    >>> str(part_path("run.trace.json.gz", 2)), str(part_path("run.json", 0))
    ('run-process2.trace.json', 'run-process0.json')
    """
    target = Path(path)
    stem, dot, ending = target.name.partition(".")
    is_device = target.exists() and not target.is_file()
    is_writable = target.parent.is_dir() and os.access(target.parent, os.W_OK) and not is_device
    folder = target.parent if is_writable else Path(tempfile.gettempdir())
    # not compressed, because the file grows during the run
    return folder / f"{stem}-process{member}{(dot + ending).removesuffix('.gz')}"

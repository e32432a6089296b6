"""The trace of a run of several processes: each one appends to a file of its own; at the end the files become one."""

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
from ..timeline.files.trace import (
    CLOCK,
    END,
    ENDING,
    HEADER,
    ClockAt,
    Header,
    SectionWriter,
    TraceEnd,
    join_parts,
    read_header,
)
from ..timeline.recording import RawSpan, Recorder, columns_from_raw
from .clock import ClockOffset

EVERY_S = 1.0
MOST_SHARE = 0.01
"""Most processor time of the thread, as a share: thousands of spans a second are written less often."""
_MOST_TIMES = 2  # a file with more than this many times the spans in recorders is started again


class TraceFile:
    """The trace file of this process. A thread appends new spans to it, because a program may block the loop.

    A full disk ends only the file, until the end of the run.

    Attributes:
        path: The file, which is overwritten.
        header: Facts of the run; set by `begin`.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._base_bytes = 0  # sections of earlier worlds
        self._thread: Thread | None = None

    def begin(
        self,
        header: Header,
        recorders: Sequence[Recorder],
        *,
        clock: Callable[[], ClockOffset] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Begin the section of a world.

        Args:
            header: Facts of the run.
            recorders: Recorders of the ranks of this process.
            clock: Returns the offset of the common clock; None: this is the common clock.
            numbers: The number in the first world of each rank of the world; None: the same.
        """
        self._recorders, self._clock = recorders, clock
        self.header: Header = header
        self._numbers = None if numbers is None else np.array(numbers, np.int64)
        self._clocks: list[ClockAt] = []
        self._start_section(self.path)
        self._done = Event()
        self._thread = Thread(target=self._flush_periodically, name="overlap trace", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Write new spans."""
        if self._written > _MOST_TIMES * sum(len(recorder) for recorder in self._recorders):
            self._restart_file()
        self._append_spans(self.path)

    def end_section(self, meta: dict[str, str]) -> None:
        """Write the last spans of a world, and the facts that are known at its end.

        Raises:
            UsageError: The file cannot be written.
        """
        if self._thread is not None:
            self._done.set()
            self._thread.join()
        try:
            if self._is_broken or self._written > sum(len(recorder) for recorder in self._recorders):
                self._restart_file()
            self._append_spans(self.path)
            dropped = sum(recorder.dropped for recorder in self._recorders)
            _append_bytes(self.path, self._section.note(END, TraceEnd(dropped=dropped, meta=meta)) + ENDING)
            self._base_bytes = self.path.stat().st_size - len(ENDING)
        except OSError as error:
            raise UsageError(f"trace: cannot write {self.path}: {error.strerror}; name another file") from error

    def _start_section(self, path: Path) -> None:
        """Write the header of a section at the end of a file, and the offsets of the clock that are known."""
        self._section, self._seen, self._written, self._is_broken = SectionWriter(), dict[int, RawSpan](), 0, False
        beginning = self._section.note(HEADER, self.header)
        for clock in self._clocks:
            beginning += self._section.note(CLOCK, clock)
        if self._base_bytes:
            os.truncate(path, self._base_bytes)  # before the ending
            _append_bytes(path, beginning)
        else:
            path.write_bytes(b"[\n" + beginning[2:])

    def _restart_file(self) -> None:
        """Begin the section again with the spans that the recorders still have, in place of the old file at once."""
        draft = self.path.with_name(self.path.name + ".new")
        with self.path.open("rb") as old, draft.open("wb") as new:
            new.write(old.read(self._base_bytes))
        self._start_section(draft)
        self._append_spans(draft)
        draft.replace(self.path)

    def _append_spans(self, path: Path) -> None:
        """Add the spans since the last call to a file, and the offset of the clock if it has moved."""
        text = self._record_clock()
        offset_ns = self._clocks[-1].offset_ns if self._clocks else 0
        for recorder in self._recorders:
            if raws := recorder.since(self._seen.get(recorder.rank)):
                columns = columns_from_raw(recorder.rank, raws)
                text += self._section.spans(self._with_first_numbers(columns), offset_ns=offset_ns)
                self._seen[recorder.rank] = raws[-1]
                self._written += len(raws)
        _append_bytes(path, text)

    def _record_clock(self) -> bytes:
        """Return the event of the clock's offset, if it has moved by more than its error."""
        if self._clock is None:
            return b""
        now = self._clock()
        if self._clocks and abs(now.offset_ns - self._clocks[-1].offset_ns) <= now.error_ns:
            return b""
        self._clocks.append(ClockAt(at_ns=perf_counter_ns(), offset_ns=now.offset_ns, error_ns=now.error_ns))
        return self._section.note(CLOCK, self._clocks[-1])

    def _with_first_numbers(self, columns: SpanColumns) -> SpanColumns:
        """Return columns with the numbers that ranks had in the first world."""
        numbers = self._numbers
        if numbers is None:
            return columns
        groups = tuple(group._replace(ranks=tuple(numbers[list(group.ranks)].tolist())) for group in columns.groups)
        return replace(columns, rank=numbers[columns.rank], groups=groups)

    def _flush_periodically(self) -> None:
        """Write new spans every `EVERY_S`, or less often where that takes more than `MOST_SHARE` of a processor."""
        pause_s = EVERY_S
        try:
            while not self._done.wait(pause_s):
                start_s = thread_time()
                self.flush()
                pause_s = max(EVERY_S, (thread_time() - start_s) / MOST_SHARE)
        except OSError:
            self._is_broken = True


def _append_bytes(path: Path, data: bytes) -> None:
    if data:
        with path.open("ab") as file:
            file.write(data)


# -- at the end --------------------------------------------------------------------------------------------------------


def join_all(own: TraceFile, path: str | PathLike[str], members: int) -> bool:
    """Join the files of all members of a run, and those of lost processes; return False if a file is missing.

    Args:
        own: File of this process.
        path: The trace.
        members: Number of processes that have ended the run.

    Raises:
        UsageError: The trace cannot be written; the files stay.
    """
    parts = _parts_beside(path).get(("", own.header.run), [])
    if len(parts) >= members:
        join_parts(parts, path)
    return len(parts) >= members


def join_left(path: str | PathLike[str], job: str) -> list[Path]:
    """Join the files next to a trace that the processes of a job have left; return the traces that were written.

    They are left where a process has failed or was killed. Of several attempts the last one counts.

    Raises:
        UsageError: A trace cannot be written.
    """
    attempts: dict[str, dict[int, list[Path]]] = {}  # by number of the trace, and by attempt
    for (number, run), parts in _parts_beside(path).items():
        of_job, _, attempt = run.rpartition(".")
        if of_job == job:
            attempts.setdefault(number, {})[int(attempt)] = parts
    target, written = Path(path), []
    stem, dot, ending = target.name.partition(".")
    for number, left in sorted(attempts.items()):
        trace = target.with_name(f"{stem}{number}{dot}{ending}")
        with suppress(OSError, UsageError):
            if read_header(trace).run == f"{job}.{max(left)}":
                continue  # it is written, and these processes were not part of its end
        join_parts(left[max(left)], trace)
        written.append(trace)
    return written


def _parts_beside(path: str | PathLike[str]) -> dict[tuple[str, str], list[Path]]:
    """Return the files of processes next to a trace, ordered, by the number of the trace and the run.

    The number is such as "-2", and empty for `path` itself.
    """
    stem, dot, ending = Path(path).name.partition(".")
    name = re.compile(rf"{re.escape(stem)}(-\d+)?-process(\d+){re.escape(_plain(dot + ending))}")
    matches = [match for part in part_path(path, 0).parent.glob("*-process*") if (match := name.fullmatch(part.name))]
    found: dict[tuple[str, str], list[Path]] = {}
    for match in sorted(matches, key=lambda match: int(match[2])):
        part = part_path(path, 0).with_name(match[0])
        with suppress(OSError, UsageError):
            found.setdefault((match[1] or "", read_header(part).run), []).append(part)
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
    return folder / f"{stem}-process{member}{_plain(dot + ending)}"


def _plain(ending: str) -> str:
    """Return the ending of a file that is not packed: it grows while the run lives."""
    return ending.removesuffix(".gz")

"""Keeps what a world records in a file while it lives, so that a run which is killed leaves its timeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import thread_time

from ..timeline.files.parts import begin_stream, stream_block
from ..timeline.recording import RawSpan, Recorder, columns_of
from ..timeline.spans import Timeline

EVERY_S = 1.0
MOST_SHARE = 0.01
"""Of a processor: who records thousands of spans a second has them written less often."""
_MOST_TIMES = 2  # a file may have so many times the spans that the recorders keep; then it begins anew with those


class TraceStream:
    """Writes the spans of some recorders into a file, a block of each at a time.

    Args:
        path: The file; what is there is overwritten.
        recorders: Of the ranks of this process.
        empty: Says of the run what a timeline without spans does.
        offset_ns: What the common clock showed when that of this process showed 0.
    """

    def __init__(self, path: Path, recorders: Sequence[Recorder], empty: Timeline, *, offset_ns: int = 0) -> None:
        self._path, self._recorders = path, recorders
        self._beginning = begin_stream(empty, offset_ns=offset_ns)
        self._seen: dict[int, RawSpan | None] = {}
        self._written = 0
        path.write_bytes(self._beginning)

    def flush(self) -> None:
        """Write what is new."""
        if self._written > _MOST_TIMES * sum(len(recorder) for recorder in self._recorders):
            self._begin_anew()
        self._append(self._path)

    def _begin_anew(self) -> None:
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_bytes(self._beginning)
        self._seen, self._written = {}, 0
        self._append(beside)
        beside.replace(self._path)

    def _append(self, path: Path) -> None:
        blocks = []
        for recorder in self._recorders:
            if raws := recorder.since(self._seen.get(recorder.rank)):
                blocks.append(stream_block(columns_of(recorder.rank, raws)))
                self._seen[recorder.rank] = raws[-1]
                self._written += len(raws)
        if blocks:
            with open(path, "ab") as file:
                file.write(b"".join(blocks))

    def remove(self) -> None:
        """Remove the file: the trace is written."""
        for path in (self._path, self._path.with_name(self._path.name + ".new")):
            with suppress(OSError):
                os.unlink(path)


@contextmanager
def streamed(make: Callable[[], TraceStream], *, is_kept: Callable[[], bool]) -> Iterator[None]:
    """Write for the block, from a thread of its own: a program may keep the loop. A full disk ends it, and no run.

    Args:
        make: Begins the file.
        is_kept: Whether, after the block, the trace itself was written.
    """
    try:
        stream = make()
    except OSError:  # of the trace itself it will be told
        yield
        return
    done = Event()
    thread = Thread(target=_flush, args=(stream, done), name="overlap trace", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if is_kept():
            stream.remove()


def _flush(stream: TraceStream, done: Event) -> None:
    pause_s = EVERY_S
    with suppress(OSError):
        while not done.wait(pause_s):
            begun_s = thread_time()
            stream.flush()
            pause_s = max(EVERY_S, (thread_time() - begun_s) / MOST_SHARE)

"""Traces of several processes: one file of all timelines, on the clock of process 0; the file of a killed process."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from threading import Event, Thread
from time import thread_time
from typing import BinaryIO, TypeVar, cast

import trio

from ..errors import OverlapError, UsageError
from ..notice import notify
from ..timeline.files.merge import with_clock_error
from ..timeline.files.parts import Part, begin_stream, pack_part, stream_block
from ..timeline.files.tracefile import write_merged, write_trace
from ..timeline.recording import RawSpan, Recorder, columns_from_raw
from ..timeline.spans import Timeline
from .member import Membership

# How long to wait until all processes have ended their run: one that has failed may leave a rank in a long compute.
# From then on all work on their traces, and there is no limit: the loss of a process is reported.
END_LIMIT_S = 10.0
_REASON_BYTES = 4096  # longest reason why the trace could not be written

T = TypeVar("T")


async def write_together(timeline: Callable[[], Timeline], path: str | PathLike[str], membership: Membership) -> bool:
    """Write the timelines of all processes to `path`, in process 0; if that fails, each process writes its own.

    Processes that write their own print a line on stderr. Threads do all the work, so that the event loop still answers
    the other processes. The caller shields it: no other process can do it.

    Returns:
        Whether this process has written the timelines of all.

    Raises:
        UsageError: On process 0, if it cannot write; each process has written its own timeline then.
    """
    with delaying_sigterm():
        try:
            with trio.fail_after(END_LIMIT_S):
                await membership.barrier("trace")
            failure = await _gather(timeline, path, membership)
        except (OverlapError, trio.TooSlowError):
            failure = "not all processes could give their timelines"
            await _write_own_part(timeline, path, membership, failure)
            return False
        if failure:
            await _write_own_part(timeline, path, membership, failure)
            if membership.member == 0:
                raise UsageError(failure)
    return membership.member == 0


async def _gather(timeline: Callable[[], Timeline], path: str | PathLike[str], membership: Membership) -> str:
    """Gather the parts at process 0, which writes them; return the reason of a failure, the same on all, or ""."""
    part = await _run_in_thread(lambda: packed_part(timeline, membership))
    sizes = [int(size) for size in await membership.exchange("trace size", str(len(part)).encode())]
    if membership.member != 0:
        await membership.gather("trace", part, _refuse_piece)
        reasons = await membership.exchange("trace written", b"")
        return reasons[0].decode(errors="replace")
    try:
        await _gather_and_write(part, sizes, path, membership)
        failure = ""
    except (OSError, UsageError) as error:
        failure = str(error) if isinstance(error, UsageError) else f"trace: cannot gather the parts of {path}: {error}"
    await membership.exchange("trace written", failure.encode(errors="replace")[:_REASON_BYTES])
    return failure


def packed_part(timeline: Callable[[], Timeline], membership: Membership | None) -> bytes:
    """Return the timeline of this process as bytes, on the clock of process 0 if there are several processes."""
    if membership is None:
        return pack_part(timeline())
    clock = membership.clock
    return pack_part(with_clock_error(timeline(), error_ns=clock.error_ns), offset_ns=clock.offset_ns)


async def _gather_and_write(
    own_part: bytes, sizes: list[int], path: str | PathLike[str], membership: Membership
) -> None:
    """Gather the parts in one file as process 0, and write the trace from it; `sizes` are the bytes of each part."""
    starts = [sum(sizes[:member]) for member in range(len(sizes))]
    ends = list(starts)
    with _spool(path) as spool:

        def write(member: int, blob: bytes) -> None:
            """Append a piece to the part of a member in the file."""
            spool.seek(ends[member])
            ends[member] += spool.write(blob)

        async def store_piece(member: int, blob: bytes) -> None:
            await _run_in_thread(lambda: write(member, blob))

        await membership.gather("trace", own_part, store_piece)
        await _run_in_thread(lambda: _write(spool, starts, path))


def _spool(path: str | PathLike[str]) -> BinaryIO:
    """Open a file without a name on the disk of the trace, because the temporary folder may have less space."""
    folder = os.path.dirname(os.path.abspath(path))
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder if os.access(folder, os.W_OK) else None))


def _write(spool: BinaryIO, starts: list[int], path: str | PathLike[str]) -> None:
    write_merged([Part(spool, start=start) for start in starts], path)


async def _refuse_piece(member: int, blob: bytes) -> None:
    raise AssertionError("only process 0 receives parts")


async def _write_own_part(
    timeline: Callable[[], Timeline], path: str | PathLike[str], membership: Membership, why: str
) -> None:
    """Write the part of this process into a file of its own, on the common clock, and print its path."""
    clock = membership.clock
    part = part_path(path, membership.member)

    def write() -> None:
        own = with_clock_error(timeline(), error_ns=clock.error_ns)
        write_trace(own.shifted(clock.offset_ns), part)

    try:
        await _run_in_thread(write)
    except UsageError as error:
        notify(f"no {path}: {why}; nor could this process keep its own: {error}")
    else:
        notify(
            f"no {path}: {why}; that of this process is in {part}: "
            f"`overlap timeline PARTS -o {Path(path).name}` makes one of all"
        )


def part_path(path: str | PathLike[str], member: int) -> Path:
    """Return the path for the part of one process: in the folder of the trace, or in the temporary folder.

    >>> str(part_path("run.trace.json.gz", 2)), str(part_path("run.json", 0))
    ('run-process2.trace.json.gz', 'run-process0.json')
    """
    target = Path(path)
    stem, dot, ending = target.name.partition(".")
    is_device = target.exists() and not target.is_file()
    is_writable = target.parent.is_dir() and os.access(target.parent, os.W_OK) and not is_device
    folder = target.parent if is_writable else Path(tempfile.gettempdir())
    return folder / f"{stem}-process{member}{dot}{ending}"


async def _run_in_thread(work: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(work)


@contextmanager
def delaying_sigterm() -> Iterator[None]:
    """Delay SIGTERM during the block: a launcher ends a failed run by it, and kills only after a grace period."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signals:
            signal.raise_signal(signal.SIGTERM)


EVERY_S = 1.0
MOST_SHARE = 0.01
"""Most processor time of the thread, as a share: thousands of spans a second are written less often."""
_MOST_TIMES = 2  # a file with more than this many times the spans in recorders is started again


class TraceStream:
    """Writes the spans of some recorders into a file, a block of each at a time.

    Args:
        path: The file, which is overwritten.
        recorders: Recorders of the ranks of this process.
        empty: Timeline of the run without spans.
        offset_ns: Time of the common clock at time 0 of this process's.
    """

    def __init__(self, path: Path, recorders: Sequence[Recorder], empty: Timeline, *, offset_ns: int = 0) -> None:
        self._path, self._recorders = path, recorders
        self._beginning = begin_stream(empty, offset_ns=offset_ns)
        self._seen: dict[int, RawSpan | None] = {}
        self._written = 0
        path.write_bytes(self._beginning)

    def flush(self) -> None:
        """Write new spans."""
        if self._written > _MOST_TIMES * sum(len(recorder) for recorder in self._recorders):
            self._restart()
        self._append(self._path)

    def _restart(self) -> None:
        """Begin the file again with the spans that the recorders still have, in place of the old one at once."""
        draft = self._path.with_name(self._path.name + ".new")
        draft.write_bytes(self._beginning)
        self._seen, self._written = {}, 0
        self._append(draft)
        draft.replace(self._path)

    def _append(self, path: Path) -> None:
        """Add the spans since the last call to a file, a block for each recorder."""
        blocks = []
        for recorder in self._recorders:
            if raws := recorder.since(self._seen.get(recorder.rank)):
                blocks.append(stream_block(columns_from_raw(recorder.rank, raws)))
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
def streaming_spans(make: Callable[[], TraceStream], *, is_written: Callable[[], bool]) -> Iterator[None]:
    """Write spans during the block, in a thread, because a program may block the loop. A full disk ends only the file.

    Args:
        make: Creates the file.
        is_written: Whether, after the block, the whole trace was written.
    """
    try:
        stream = make()
    except OSError:  # the writer of the whole trace reports it
        yield
        return
    done = Event()
    thread = Thread(target=_flush_periodically, args=(stream, done), name="overlap trace", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if is_written():
            stream.remove()


def _flush_periodically(stream: TraceStream, done: Event) -> None:
    """Write new spans every `EVERY_S`, more rarely if writing takes more than `MOST_SHARE` of a processor's time."""
    pause_s = EVERY_S
    with suppress(OSError):
        while not done.wait(pause_s):
            start_s = thread_time()
            stream.flush()
            pause_s = max(EVERY_S, (thread_time() - start_s) / MOST_SHARE)

"""Traces of several processes: one file of all timelines, on the clock of process 0; and one that a kill leaves."""

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
from ..timeline.files.merge import on_clock
from ..timeline.files.parts import Part, begin_stream, pack_part, stream_block
from ..timeline.files.tracefile import write_merged, write_trace
from ..timeline.recording import RawSpan, Recorder, columns_of
from ..timeline.spans import Timeline
from .member import Membership

# How long to wait until all processes have come to the end of their run: one that has failed may leave a rank in a long
# compute. From then on all are at work on their traces, and there is no limit: one that is lost is known to be.
COMING_S = 10.0
_TOLD_BYTES = 4096  # longest text of the reason why the trace could not be written

T = TypeVar("T")


async def write_together(timeline: Callable[[], Timeline], path: str | PathLike[str], membership: Membership) -> bool:
    """Let process 0 write everybody's timeline to `path`; those that cannot be brought together write their own.

    These say so on stderr. All the work is done in threads, so that the others hear from this process meanwhile.
    The caller shields it: no other process can do it.

    Returns:
        Whether this process has written that of all.

    Raises:
        UsageError: On process 0, if it cannot be written there; each process has kept its own then.
    """
    with undisturbed():
        try:
            with trio.fail_after(COMING_S):
                await membership.barrier("trace")
            refusal = await _brought_together(timeline, path, membership)
        except (OverlapError, trio.TooSlowError):
            refusal = "not all processes could give their timelines"
            await _keep_own(timeline, path, membership, refusal)
            return False
        if refusal:
            await _keep_own(timeline, path, membership, refusal)
            if membership.member == 0:
                raise UsageError(refusal)
    return membership.member == 0


async def _brought_together(timeline: Callable[[], Timeline], path: str | PathLike[str], membership: Membership) -> str:
    """Gather the parts at process 0, which writes them; return why it could not, the same on all, or nothing."""
    clock = membership.clock
    mine = await _in_thread(lambda: pack_part(on_clock(timeline(), error_ns=clock.error_ns), offset_ns=clock.offset_ns))
    if membership.member != 0:
        await membership.gather("trace", mine, _take_nothing)
        told = await membership.exchange("trace written", b"")
        return told[0].decode(errors="replace")
    try:
        await _gather_and_write(mine, path, membership)
        refusal = ""
    except (OSError, UsageError) as error:
        refusal = str(error) if isinstance(error, UsageError) else f"trace: cannot gather the parts of {path}: {error}"
    await membership.exchange("trace written", refusal.encode(errors="replace")[:_TOLD_BYTES])
    return refusal


async def _gather_and_write(mine: bytes, path: str | PathLike[str], membership: Membership) -> None:
    starts: list[int] = []
    with _spool(path) as spool:

        async def take(member: int, blob: bytes) -> None:
            if member == len(starts):
                starts.append(spool.tell())
            await _in_thread(lambda: spool.write(blob))

        await membership.gather("trace", mine, take)
        await _in_thread(lambda: _write(spool, starts, path))


def _spool(path: str | PathLike[str]) -> BinaryIO:
    """Open a nameless file on the disk that is to take the trace: in the temporary folder there may be less room."""
    folder = os.path.dirname(os.path.abspath(path))
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder if os.access(folder, os.W_OK) else None))


def _write(spool: BinaryIO, starts: list[int], path: str | PathLike[str]) -> None:
    write_merged([Part(spool, start=start) for start in starts], path)


async def _take_nothing(member: int, blob: bytes) -> None:
    raise AssertionError("only process 0 is brought anything")


async def _keep_own(
    timeline: Callable[[], Timeline], path: str | PathLike[str], membership: Membership, why: str
) -> None:
    """Write the part of this process for itself, on the common clock, and say where it is."""
    clock = membership.clock
    part = part_path(path, membership.member)

    def write() -> None:
        own = on_clock(timeline(), error_ns=clock.error_ns)
        write_trace(own.shifted(clock.offset_ns), part)

    try:
        await _in_thread(write)
    except UsageError as error:
        notify(f"no {path}: {why}; nor could this process keep its own: {error}")
    else:
        notify(
            f"no {path}: {why}; that of this process is in {part}: "
            f"`overlap timeline PARTS -o {Path(path).name}` makes one of all"
        )


def part_path(path: str | PathLike[str], member: int) -> Path:
    """Return where a process keeps its part: beside what was to be written, or in the temporary folder.

    >>> str(part_path("run.trace.json.gz", 2)), str(part_path("run.json", 0))
    ('run-process2.trace.json.gz', 'run-process0.json')
    """
    target = Path(path)
    stem, dot, ending = target.name.partition(".")
    is_device = target.exists() and not target.is_file()
    beside = target.parent.is_dir() and os.access(target.parent, os.W_OK) and not is_device
    folder = target.parent if beside else Path(tempfile.gettempdir())
    return folder / f"{stem}-process{member}{dot}{ending}"


async def _in_thread(work: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(work)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put off SIGTERM, by which a launcher ends what is left of a failed run: it gives a grace before it kills."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if asked:
            signal.raise_signal(signal.SIGTERM)


EVERY_S = 1.0
MOST_SHARE = 0.01
"""Of a processor: thousands of spans a second are written less often."""
_MOST_TIMES = 2  # a file with more spans than this times those that recorders keep begins anew


class TraceStream:
    """Writes the spans of some recorders into a file, a block of each at a time.

    Args:
        path: The file; what is there is overwritten.
        recorders: Recorders of the ranks of this process.
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
    except OSError:  # the writer of the whole trace reports it
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

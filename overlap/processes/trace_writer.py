"""The trace of one run: each process appends the spans of its worlds to a file of its own; at the end they are joined.

If the last world of a run ends well, process 0 joins the files after the others have left. Otherwise `overlap run`
joins the files that its processes have left, killed ones included. Under other launchers, and on several hosts, the
files stay.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import trio

from .. import trace_files
from ..config import RunConfig
from ..diagnostics import find_caller
from ..errors import TraceWarning, UsageError
from ..notice import notify
from ..runtime.world import World
from ..timeline.spans import Timeline

if TYPE_CHECKING:
    from types import TracebackType

    from .join import Membership
    from .traces import TraceFile


class TraceWriter:
    """Writer of the trace of one run, for the length of a ``with``.

    A trace that cannot be written hides neither the results nor the error of the run. The failure becomes a note of
    that error, or a `TraceWarning` if the run has no error.

    Attributes:
        member: Number of this process in names of files; None: its index in its world.
        goes_on: Function: does the run continue in another world after this error?
        numbers: For each rank of the present world, its number in the first world; None: the same number.
        world_size: Number of ranks of the first world; None: that of the present one.

    Args:
        run_config: Settings of the run.
        joins: Whether this class joins the files of all processes. False: the caller gets the file of this process by
            `take_file_content`.
    """

    def __init__(self, run_config: RunConfig, *, joins: bool = True) -> None:
        self._run_config, self._joins = run_config, joins
        trace = run_config.trace
        self._path = Path(os.path.abspath(trace)) if trace else Path()  # the program may change its directory
        self._failure: str | None = None
        self.member: int | None = None
        self.goes_on: Callable[[Exception], bool] = lambda error: False
        self.numbers: Sequence[int] | None = None
        self.world_size: int | None = None
        self._file: TraceFile | None = None  # the file of this process, until it is joined

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Report, in process 0, that files were not joined, and report a trace that could not be written."""
        joined_later = os.environ.get("OVERLAP_HOSTS") == "1"  # `overlap run` joins the files of a single host
        if self._file is not None and self._file.header.process == 0 and not joined_later:
            self._report_unjoined_files(self._file, "not all processes ended well")
        if self._failure is not None and error is not None:
            error.add_note(self._failure)
        elif self._failure is not None:
            warnings.warn(TraceWarning(self._failure), stacklevel=find_caller()[1])

    def begin_world(self, world: World, membership: Membership | None, *, run: str) -> None:
        """Begin to write the spans of a world into the file of this process, if a trace is requested.

        Args:
            world: The world.
            membership: This process among those of its world; None: it is alone.
            run: Name of the job and number of the attempt, as "JOB.ATTEMPT".
        """
        if self._run_config.trace is None:
            return
        from ..timeline.files.trace import Header
        from .traces import TraceFile, part_path  # few runs write a trace

        member = membership.member if membership else 0
        if self.member is not None:
            member = self.member
        if self._file is None:
            self._file = TraceFile(part_path(self._path, member))
        header = Header(
            world_size=self.world_size or world.size, clock=world.backend.name, meta=world.run_facts(), run=run,
            process=member,
        )  # fmt: skip
        # the common clock is that of member 0
        clock = None if membership is None else lambda: membership.clock_offset
        with suppress(OSError):  # the end reports it
            self._file.begin_section(header, world.recorders(), clock=clock, numbers=self.numbers)

    async def end_world(self, world: World, failure: Exception | None, *, alone: bool) -> None:
        """Write the last spans of a world; the file of a process that is `alone` becomes the trace of the run.

        If the settings have a watcher, it gets the timeline. An error of writing is kept for the end of the run.

        Args:
            world: The world.
            failure: Error of the world, after which another world may follow; None: it has ended well.
            alone: Whether this process is the only one of the world.
        """
        if self._run_config.watcher is not None:
            self._run_config.watcher(world.timeline())
        if self._file is None:
            return
        with self._store_failure(), trio.CancelScope(shield=True):
            # in a thread: it may take long, and the loop may be the user's
            await trio.to_thread.run_sync(self._file.end_section, world.run_facts())
            if alone and self._joins and (failure is None or not self.goes_on(failure)):
                await self._join_files(1)

    async def join_all_files(self, membership: Membership) -> None:
        """Join the files of all processes, in process 0, after all have ended the last world without an error."""
        if self._file is not None and self._joins:
            with self._store_failure(), trio.CancelScope(shield=True):
                await self._join_files(membership.members if membership.member == 0 else 0)

    async def _join_files(self, members: int) -> None:
        """Join the files, and record the path of the trace; raise `UsageError` if it cannot be written: the files stay.

        May be called once: it gives up `self._file`. With 0 members it does nothing else, as another process joins.
        """
        from .traces import join_files_of_run

        file, self._file = self._file, None
        assert file is not None
        assert self._run_config.trace is not None
        if not members:
            return
        if await trio.to_thread.run_sync(join_files_of_run, file, self._path, members):
            trace_files.record_written(self._run_config.trace)
        else:  # files of some members are missing here
            self._report_unjoined_files(file, "not all processes write to one disk")

    def _report_unjoined_files(self, file: TraceFile, reason: str) -> None:
        """Report why the files of the processes were not joined, and the command that joins them."""
        parts, name = re.sub(r"-process\d+", "-process*", str(file.path)), self._path.name
        notify(f"no {self._path}: {reason}; `overlap timeline {parts} -o {name}` makes one of what each has left")

    def take_file_content(self) -> bytes:
        """Return the content of the file of this process, and remove the file; b"" if there is none."""
        with suppress(OSError):
            if self._file is not None:
                part = self._file.path.read_bytes()
                self._file.path.unlink()
                return part
        return b""

    def write_virtual_world(self, timeline: Callable[[], Timeline]) -> None:
        """Write the spans of a world in virtual time, whose ranks are all here.

        Args:
            timeline: Returns the spans; called only if the settings have a watcher or a trace.
        """
        if self._run_config.watcher is not None:
            self._run_config.watcher(timeline())
        if self._run_config.trace is not None:
            from ..timeline.files.trace import write_trace

            with self._store_failure():
                write_trace(timeline(), self._run_config.trace)
                trace_files.record_written(self._run_config.trace)

    @contextmanager
    def _store_failure(self) -> Iterator[None]:
        """Store an error of the block, instead of raising it, as the reason why there is no trace."""
        try:
            yield
        except Exception as error:  # no error of writing may hide the results or the error of the run
            usual = isinstance(error, UsageError)
            self._failure = str(error) if usual else f"trace: cannot write {self._run_config.trace}: {error!r}"

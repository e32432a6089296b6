"""Member of a job: the actor of one process, which joins the other members, runs its ranks, and reports its end."""

from __future__ import annotations

import asyncio
import os
import traceback
from contextlib import ExitStack, suppress

import trio
from ray import cloudpickle

from ..embedded.rendezvous import RendezvousStore, rendezvous_through_store
from ..errors import (
    OverlapError,
    RankFailedError,
    RemoteError,
    UsageError,
    argument_text,
    error_text,
    one_line_text,
    type_name,
)
from ..processes.connect import make_place_and_setup
from ..processes.real_time import run_ranks
from ..processes.trace_writer import TraceWriter
from ..ranklist import named_ranks
from ..runtime.world import World
from .job import VERSION, JobSpec, MemberEnd, make_job_folder, pickle_value, take_job_files
from .store import store_class

MET = "overlap/met"
"""Key of the store that the first member sets once all members have met."""


class MemberActor(store_class()):  # type: ignore[misc]
    """One process of a job, as an async actor: its event loop serves calls while the ranks run in a thread.

    The actor of the first member is also the store of the job: an actor for the store alone would take a second to
    start.

    Args:
        job: The job.
        index: Number of this member.
    """

    def __init__(self, job: JobSpec, index: int) -> None:
        super().__init__()
        self._job, self._index, self._own_ranks = job, index, job.ranks(index)
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._writer = TraceWriter(job.config, joins=False)

    async def run(self, store: RendezvousStore) -> MemberEnd:
        """Join the other members through a store, run the program on this process's ranks, and return the report."""
        return await asyncio.to_thread(self._run_and_report, store)

    async def stop(self) -> None:
        """End the ranks of this process without an error; for other processes, this process is then lost."""
        with suppress(trio.RunFinishedError):
            if self._token is not None:
                self._token.run_sync_soon(self._scope.cancel)

    def _run_and_report(self, store: RendezvousStore) -> MemberEnd:
        """Run the program, and return the report with its results or its error. Never raises."""
        try:
            return self._make_end_report(results=self._run_program(store))
        except OverlapError as error:
            return self._make_end_report(error=error)
        except BaseException as error:
            return self._make_end_report(
                error=RemoteError(type_name(error), error_text(error), trace=_traceback_text(error))
            )

    def _run_program(self, store: RendezvousStore) -> list[bytes] | None:
        """Load the program, join the other members, run the ranks of this process, and return their pickled results.

        None if `stop` was called.
        """
        job = self._job
        if job.version != VERSION:
            raise UsageError(
                f"process {self._index} has {VERSION}, and the driver has {job.version}: install one version everywhere"
            )
        try:
            main, args = cloudpickle.loads(job.program)
        except Exception as error:
            raise UsageError(
                f"main: the actor of {named_ranks(self._own_ranks)} on node {os.uname().nodename} cannot load it: "
                f"{one_line_text(error)}; the modules that it needs must be importable on every machine"
            ) from error
        folder = make_job_folder(job.token)
        trace = folder / "trace.json" if job.config.trace else None  # spans are written next to it, until the end
        config = job.config.with_changes(flight_dir=str(folder), trace=trace)
        with ExitStack() as meeting:
            label = f"{job.name}-{job.token}.{job.attempt}"  # unique among attempts, and among jobs of the same name
            rendezvous = rendezvous_through_store(
                store, self._index, job.members, secret=None, job=label, nodes=None, host=None
            )
            met = meeting.enter_context(rendezvous) if job.members > 1 else None
            place, setup = make_place_and_setup(
                met, config, source="Ray", ranks_each=job.ranks_each, job=job.name, restart=job.attempt
            )

            def on_start(world: World) -> None:
                meeting.close()  # all have met
                if self._index == 0:
                    store.set(MET, b"")

            async def run_world() -> list[object] | None:
                """Return the results of the ranks here, or None if `_scope` was cancelled."""
                self._token = trio.lowlevel.current_trio_token()
                with self._scope:
                    return await run_ranks(setup, place, main, args, config, self._writer, on_start)
                return None  # reached only if `_scope` was cancelled

            results = trio.run(run_world)
        own = zip(self._own_ranks, results or (), strict=False)
        packed = [
            pickle_value(x, f"rank {rank} returned {argument_text(x)}, which cannot be sent to the driver")
            for rank, x in own
        ]
        return packed or None

    def _make_end_report(self, *, results: list[bytes] | None = None, error: OverlapError | None = None) -> MemberEnd:
        """Return the report of the end of this process, with its part of the timeline and its flight records."""
        if (
            isinstance(error, RankFailedError)
            and error.rank in self._own_ranks
            and not isinstance(error.cause, RemoteError)
        ):
            error.add_note(f"where rank {error.rank} ran:\n{_traceback_text(error.cause)}")
        files = take_job_files(self._job.token, pid=os.getpid())
        return MemberEnd(results=results, error=error, spans=self._writer.take_file_content(), files=files)


def _traceback_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip() if error.__traceback__ else ""

"""Member: one process of a gang, from the store where it meets the others to the report of its end."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import trio

from ..config import RunConfig
from ..embedded.rendezvous import Store, rendezvous_through_store
from ..errors import (
    OverlapError,
    RankFailedError,
    RemoteError,
    UsageError,
    in_one_line,
    picklable_copy,
    shown,
    text_of,
    type_name,
)
from ..kernel_facts import network_namespace, process_identity
from ..processes.connect import JOIN_TIMEOUT_S
from ..processes.identity import WORLDS
from ..processes.life import Keeper, WorldSetup, multi_process_setup, run_ranks, single_process_setup
from ..processes.place import Place
from ..processes.traces import packed_part
from ..runtime.rank import Rank
from ..runtime.world import World
from ..timeline.spans import Timeline
from .gang import GangSpec, MemberEnd, own_version
from .home import TRACE, make_gang_folder, take_records
from .pickling import Pickling
from .progress import latest_step

if TYPE_CHECKING:
    from ..processes.identity import RendezvousConfig
    from ..processes.member import Membership

Main = Callable[..., Awaitable[object]]


class GangMember:
    """One process of a gang. `run` blocks the thread that calls it; `stop` may be called from any other.

    Args:
        member: Index of this process.
        pickling: Reads the program, and packs its results.
    """

    def __init__(self, spec: GangSpec, member: int, pickling: Pickling) -> None:
        self._spec, self._member, self._pickling = spec, member, pickling
        self._lock = threading.Lock()
        self._stopped = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._begun_s = 0.0
        self._keeper: _SpanKeeper | None = None

    @property
    def lives(self) -> bool:
        """Whether the world has started; it may have ended since."""
        return self._begun_s > 0

    def run(self, store: Store, own_arguments: tuple[Sequence[object], ...] = ()) -> MemberEnd:
        """Join the other members, run the program on the ranks of this process, and return its end.

        Args:
            store: Where all members of this attempt meet.
            own_arguments: Arguments of this process before the common ones; each has one value for each of its ranks.
        """
        try:
            results = self._run_program(store, own_arguments)
            return self._make_end(results=self._pickle_results(results) if results is not None else None)
        except OverlapError as error:
            return self._make_end(error=error)
        except BaseException as error:
            return self._make_end(error=RemoteError(type_name(error), text_of(error), trace=_trace(error)))

    def stop(self) -> None:
        """End the ranks of this process without an error; the other processes of the world lose them."""
        with self._lock:
            self._stopped = True
            if self._token is not None:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._scope.cancel)

    # -- its life ----------------------------------------------------------------------------------------------------

    def _run_program(self, store: Store, own_arguments: tuple[Sequence[object], ...]) -> list[object] | None:
        """Load the program, join the other members, and return the results of the ranks here."""
        self._check_version()
        spec = self._spec
        for folder in reversed(spec.import_path):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        main, args = cast("tuple[Main, tuple[object, ...]]", self._load_program())
        if own_arguments:
            main = _with_own_arguments(main, spec.ranks(self._member), own_arguments)
        home = make_gang_folder(spec.token)
        config = spec.config.changed(flight_dir=str(home))
        if config.trace is not None:
            config = config.changed(trace=home / TRACE)  # only for the spans of a process that is killed
        self._keeper = _SpanKeeper(config)
        with ExitStack() as meeting:
            setup, own_place = single_process_setup(config), None
            if spec.members > 1:
                rendezvous = meeting.enter_context(
                    rendezvous_through_store(
                        store, self._member, spec.members, secret=None, job=spec.label, nodes=None, host=None
                    )
                )
                meeting_config, own_place = _place_in_gang(spec, config, self._member, *rendezvous)
                setup = multi_process_setup(own_place, config, meeting=meeting_config)

            def on_start(world: World) -> None:
                meeting.close()  # all are there
                self._begun_s = time.time()

            return trio.run(self._run_world, setup, own_place, main, args, config, on_start)

    async def _run_world(
        self,
        setup: AbstractAsyncContextManager[WorldSetup],
        own_place: Place | None,
        main: Main,
        args: tuple[object, ...],
        config: RunConfig,
        on_start: Callable[[World], None],
    ) -> list[object] | None:
        """Run the world on this thread's event loop, until it ends or `stop` cancels it; None: stopped."""
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
            if self._stopped:
                self._scope.cancel()
        assert self._keeper is not None
        with self._scope:
            return await run_ranks(
                setup, own_place, main, args, config, self._keeper, on_start, has_signal=lambda: self._stopped
            )
        return None

    def _check_version(self) -> None:
        """Refuse to run with another version than the driver's."""
        if own_version() != self._spec.version:
            raise UsageError(
                f"process {self._member} has {own_version()}, and the driver has {self._spec.version}: install one "
                "version everywhere"
            )

    def _load_program(self) -> object:
        """Return the program and its arguments."""
        try:
            return self._pickling.loads(self._spec.program)
        except Exception as error:
            raise UsageError(
                f"main: member {self._member} cannot load it: {in_one_line(error)}; the modules that it needs must be "
                "importable on every machine"
            ) from error

    # -- its end -----------------------------------------------------------------------------------------------------

    def _pickle_results(self, results: Sequence[object]) -> list[bytes]:
        """Return the pickled results of the ranks here."""
        packed = []
        for rank, result in zip(self._spec.ranks(self._member), results, strict=True):
            try:
                packed.append(self._pickling.dumps(result))
            except Exception as error:
                raise UsageError(
                    f"rank {rank} returned {shown(result)}, which cannot be sent to the driver: {in_one_line(error)}; "
                    "return values that can be pickled"
                ) from error
        return packed

    def _make_end(self, *, results: list[bytes] | None = None, error: OverlapError | None = None) -> MemberEnd:
        """Return the end of this process, with its timeline and its flight records."""
        if isinstance(error, RankFailedError) and error.rank in self._spec.ranks(self._member):
            trace = _trace(error.cause)
            if trace and not isinstance(error.cause, RemoteError):
                error.add_note(f"where rank {error.rank} ran:\n{trace}")
        return MemberEnd(
            member=self._member,
            machine=network_namespace(),
            results=results,
            error=None if error is None else picklable_copy(error),
            spans=self._keeper.part if self._keeper else b"",
            files=take_records(self._spec.token, pid=os.getpid()),
            latest=None if error is None else latest_step(self._spec.config.state_dir),
            begun_s=self._begun_s,
        )


class _SpanKeeper(Keeper):
    """Packs the timeline of this process as bytes for the driver, which merges those of all members."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._has_trace = config.trace is not None
        self.part = b""

    async def keep(
        self, timeline: Callable[[], Timeline], membership: Membership | None, failure: Exception | None = None
    ) -> None:
        """Pack the recorded spans, on the clock of process 0."""
        if self._has_trace:
            with trio.CancelScope(shield=True):
                self.part = await trio.to_thread.run_sync(packed_part, timeline, membership)


def _place_in_gang(
    spec: GangSpec, run_config: RunConfig, member: int, config: RendezvousConfig, machines: int
) -> tuple[RendezvousConfig, Place]:
    """Return the settings of a member's rendezvous, and its place among the members."""
    machine = getattr(run_config.cluster, "name", run_config.cluster or "local")
    config = replace(
        config,
        epoch=spec.attempt * WORLDS,
        detail=f"overlap on {spec.engine}, {machine}, {spec.ranks_each} a process, on {machines}",
        process=process_identity(),
        timeout_s=run_config.join_timeout_s or JOIN_TIMEOUT_S,
        ranks_each=spec.ranks_each,
    )
    return config, replace(Place.from_config(config, source=spec.engine, nodes=machines), job=spec.job)


def _with_own_arguments(main: Main, ranks: range, own_arguments: tuple[Sequence[object], ...]) -> Main:
    """Return a program that gets each rank's own arguments before the common ones."""

    def main_of_rank(rank: Rank, *args: object) -> Awaitable[object]:
        return main(rank, *(values[rank.rank - ranks.start] for values in own_arguments), *args)

    return main_of_rank


def _trace(error: BaseException) -> str:
    """Return the traceback of an error as text; "" if it has none."""
    lines = traceback.format_exception(error) if error.__traceback__ is not None else []
    return "".join(lines).rstrip()


__all__ = ["GangMember"]

"""Member: one process of a gang, from the store where it meets the others to the word on how it ended."""

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
from ..embedded.rendezvous import Store, through_store
from ..errors import (
    OverlapError,
    RankFailedError,
    RemoteError,
    UsageError,
    in_one_line,
    portable,
    shown,
    text_of,
    type_name,
)
from ..kernel_facts import network_namespace, process_identity
from ..processes.connect import JOIN_TIMEOUT_S
from ..processes.identity import WORLDS
from ..processes.life import Keeper, WorldSetup, alone, among, live
from ..processes.place import Place
from ..processes.traces import packed_part
from ..runtime.rank import Rank
from ..runtime.world import World
from ..timeline.spans import Timeline
from .gang import GangSpec, MemberEnd, own_version
from .home import TRACE, open_home, take_records
from .pickling import Pickling
from .progress import latest_step

if TYPE_CHECKING:
    from ..processes.identity import RendezvousConfig
    from ..processes.member import Membership

Main = Callable[..., Awaitable[object]]


class GangMember:
    """One process of a gang. `run` blocks the thread that calls it; `stop` may be called from any other.

    Args:
        spec: The gang.
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
        """Whether its world has started; it may have ended since."""
        return self._begun_s > 0

    def run(self, store: Store, own_arguments: tuple[Sequence[object], ...] = ()) -> MemberEnd:
        """Join the other members, run the program on the ranks of this process, and return its end.

        Args:
            store: Where all members of this attempt meet.
            own_arguments: Arguments of this process before the common ones; each has one value for each of its ranks.
        """
        try:
            results = self._lived(store, own_arguments)
            return self._end(results=self._packed(results) if results is not None else None)
        except OverlapError as error:
            return self._end(error=error)
        except BaseException as error:
            return self._end(error=RemoteError(type_name(error), text_of(error), trace=_trace(error)))

    def stop(self) -> None:
        """End its ranks, without an error of theirs; the other processes of the world lose them."""
        with self._lock:
            self._stopped = True
            if self._token is not None:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._scope.cancel)

    # -- its life ----------------------------------------------------------------------------------------------------

    def _lived(self, store: Store, own_arguments: tuple[Sequence[object], ...]) -> list[object] | None:
        self._check_version()
        spec = self._spec
        for folder in reversed(spec.import_path):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        main, args = cast("tuple[Main, tuple[object, ...]]", self._loaded())
        if own_arguments:
            main = _with_own(main, spec.ranks(self._member), own_arguments)
        home = open_home(spec.token)
        config = spec.config.changed(flight_dir=str(home))
        if config.trace is not None:
            config = config.changed(trace=home / TRACE)  # only for the spans of a process that is killed
        self._keeper = _SpanKeeper(config)
        with ExitStack() as meeting:
            around, own_place = alone(config), None
            if spec.members > 1:
                rendezvous = meeting.enter_context(
                    through_store(store, self._member, spec.members, secret=None, job=spec.label, nodes=None, host=None)
                )
                meeting_config, own_place = _meeting(spec, config, self._member, *rendezvous)
                around = among(own_place, config, meeting=meeting_config)

            def on_start(world: World) -> None:
                meeting.close()  # all are there
                self._begun_s = time.time()

            return trio.run(self._live, around, own_place, main, args, config, on_start)

    async def _live(
        self,
        around: AbstractAsyncContextManager[WorldSetup],
        own_place: Place | None,
        main: Main,
        args: tuple[object, ...],
        config: RunConfig,
        on_start: Callable[[World], None],
    ) -> list[object] | None:
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
            if self._stopped:
                self._scope.cancel()
        assert self._keeper is not None
        with self._scope:
            return await live(
                around, own_place, main, args, config, self._keeper, on_start, has_signal=lambda: self._stopped
            )
        return None

    def _check_version(self) -> None:
        if own_version() != self._spec.version:
            raise UsageError(
                f"process {self._member} has {own_version()}, and the driver has {self._spec.version}: install one "
                "version everywhere"
            )

    def _loaded(self) -> object:
        try:
            return self._pickling.loads(self._spec.program)
        except Exception as error:
            raise UsageError(
                f"main: member {self._member} cannot load it: {in_one_line(error)}; the modules that it needs must be "
                "importable on every machine"
            ) from error

    # -- its end -----------------------------------------------------------------------------------------------------

    def _packed(self, results: Sequence[object]) -> list[bytes]:
        packed = []
        for rank, result in zip(self._spec.ranks(self._member), results, strict=True):
            try:
                packed.append(self._pickling.dumps(result))
            except Exception as error:
                raise UsageError(
                    f"rank {rank} returned {shown(result)}, which cannot be sent to the driver: {in_one_line(error)}"
                ) from error
        return packed

    def _end(self, *, results: list[bytes] | None = None, error: OverlapError | None = None) -> MemberEnd:
        if isinstance(error, RankFailedError) and error.rank in self._spec.ranks(self._member):
            trace = _trace(error.cause)
            if trace and not isinstance(error.cause, RemoteError):
                error.add_note(f"where rank {error.rank} ran:\n{trace}")
        return MemberEnd(
            member=self._member,
            machine=network_namespace(),
            results=results,
            error=None if error is None else portable(error),
            spans=self._keeper.part if self._keeper else b"",
            files=take_records(self._spec.token, pid=os.getpid()),
            latest=None if error is None else latest_step(self._spec.config.state_dir),
            begun_s=self._begun_s,
        )


class _SpanKeeper(Keeper):
    """Packs the timeline of this process as bytes for the driver, which merges those of all members."""

    def __init__(self, wanted: RunConfig) -> None:
        super().__init__(wanted)
        self._wants = wanted.trace is not None
        self.part = b""

    async def keep(
        self, timeline: Callable[[], Timeline], membership: Membership | None, failure: Exception | None = None
    ) -> None:
        """Pack the recorded spans, on the clock of process 0."""
        if self._wants:
            with trio.CancelScope(shield=True):
                self.part = await trio.to_thread.run_sync(packed_part, timeline, membership)


def _meeting(
    spec: GangSpec, run_config: RunConfig, member: int, config: RendezvousConfig, machines: int
) -> tuple[RendezvousConfig, Place]:
    """Return how a member meets the others, and its place among them."""
    machine = getattr(run_config.cluster, "name", run_config.cluster or "local")
    config = replace(
        config,
        epoch=spec.attempt * WORLDS,
        detail=f"overlap on {spec.engine}, {machine}, {spec.ranks_each} a process, on {machines}",
        process=process_identity(),
        timeout_s=run_config.join_timeout_s or JOIN_TIMEOUT_S,
        ranks_each=spec.ranks_each,
    )
    return config, replace(Place.of(config, source=spec.engine, nodes=machines), job=spec.job)


def _with_own(main: Main, ranks: range, own_arguments: tuple[Sequence[object], ...]) -> Main:
    """Return a program that gets each rank's own arguments before the common ones."""

    def with_own(rank: Rank, *args: object) -> Awaitable[object]:
        return main(rank, *(each[rank.rank - ranks.start] for each in own_arguments), *args)

    return with_own


def _trace(error: BaseException) -> str:
    told = traceback.format_exception(error) if error.__traceback__ is not None else []
    return "".join(told).rstrip()


__all__ = ["GangMember"]

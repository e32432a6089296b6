"""One world in real time, from what is opened around it to what is kept of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..config import RunConfig
from ..diagnostics import is_interrupt
from ..errors import StallError, in_one_line
from ..flight.folder import FlightFile, attempt, began, open_flight
from ..runtime.blame.stall import STALL_S, StallLimits
from ..runtime.world import World
from ..timeline.recording import KeptSteps
from .keeper import Keeper
from .world_setup import WorldSetup

if TYPE_CHECKING:
    from .connecting import Joined
    from .place import Place

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a world and those who have started it tell each other."""

    begun: Callable[[World], None]  # Is given the world before it lives
    to_end: Callable[[], bool] = lambda: False  # Whether this process was told to end by a signal


async def live(
    opened: AbstractAsyncContextManager[WorldSetup],
    place: Place | None,
    main: Callable[..., Awaitable[T]],
    args: tuple[object, ...],
    wanted: RunConfig,
    keeper: Keeper,
    told: Told,
) -> list[T]:
    """Run `main(rank, *args)` on the ranks of this process, and keep what is left of them.

    Args:
        opened: What the world stands on.
        place: Of this process among several; None if it is alone.
        main: The program of each rank.
        args: Its further arguments.
        wanted: What the world is asked to be.
        keeper: Keeps the timeline.
        told: Whom it tells.
    """
    failure: Exception | None = None
    async with opened as around:
        joined = around.joined
        restart = joined.restart if joined else attempt()
        flight = _flight(wanted, place, around, restart)
        world = World(
            around.size,
            around.cluster,
            around.transport,
            algorithm=wanted.algorithm,
            others=joined.control_plane if joined else None,
            check=wanted.check,
            flight=flight.writer if flight else None,
            restart=restart,
            state_dir=wanted.state_dir,
            steps=KeptSteps.given(wanted.trace_steps),
            limits=StallLimits(tell_s=wanted.stall_s or STALL_S, give_up_s=wanted.give_up_s),
        )
        told.begun(world)
        if joined is not None:
            joined.notices.show = world.show
        results: list[T] = []
        with _shown(flight, joined), _streamed(wanted, world, joined, keeper):
            try:
                results = await world.live(main, args, wanted.timeout_s)
            except Exception as error:  # raised outside, where no nursery of a transport wraps it in a group
                failure = error
            except BaseException as error:
                if is_interrupt(error):
                    _keep(flight, "interrupted", "interrupted")
                elif told.to_end():
                    _keep(flight, "interrupted", "told to end by a signal")
                raise
            finally:
                if failure is not None:
                    _keep(flight, "stalled" if isinstance(failure, StallError) else "failed", in_one_line(failure))
                if flight is not None:
                    flight.close(keep=flight.writer.ended)
                await keeper.keep(world.timeline, joined.membership if joined else None)
        if joined is not None and failure is None:
            await joined.leave()
    if failure is not None:
        raise failure
    return results


@contextmanager
def _shown(flight: FlightFile | None, joined: Joined | None) -> Iterator[None]:
    """Let those look on for the block who watch from elsewhere."""
    if flight is None or joined is None:
        yield
        return
    from ..live.snapshot import SnapshotWriter  # of worlds of several processes

    membership = joined.membership
    glimpses = SnapshotWriter(flight.path, lambda: membership.clock.offset_ns)
    membership.glimpse = glimpses
    try:
        yield
    finally:
        membership.glimpse = lambda room_bytes: b""
        glimpses.close()


def _streamed(wanted: RunConfig, world: World, joined: Joined | None, keeper: Keeper) -> AbstractContextManager[None]:
    """Keep for the block, where a trace is asked for, what a killed run leaves of it."""
    if wanted.trace is None:
        return nullcontext()
    from .shared_trace import part_path  # few keep a trace
    from .trace_stream import TraceStream, streamed

    membership = joined.membership if joined else None
    path = part_path(os.path.abspath(wanted.trace), membership.member if membership else 0)
    path = path.with_name(f"{path.name}.part")
    offset_ns = membership.clock.offset_ns if membership else 0

    def make() -> TraceStream:
        return TraceStream(path, world.recorders(), world.timeline(), offset_ns=offset_ns)

    return streamed(make, is_kept=lambda: not keeper.has_failed)


def _flight(wanted: RunConfig, place: Place | None, around: WorldSetup, restart: int) -> FlightFile | None:
    """Begin the flight record of this process."""
    name, start = began(
        job=place.label if place else None,
        restart=restart,
        process=place.process if place else 0,
        processes=place.processes if place else 1,
        world_size=around.size,
        script=sys.argv[0],
    )
    return open_flight(wanted.flight_dir, name, around.transport.ranks, start)


def _keep(flight: FlightFile | None, how: str, line: str) -> None:
    if flight is not None:
        flight.writer.end(how, rank=None, line=line, here=True)

"""`run` and `run_async`: they start a world, wait for its end, and write its timeline.

Not `run.py`: a module of that name would replace the function `overlap.run` as soon as it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, TypeVarTuple, cast

import trio

from .config import ARGUMENT, RunConfig, resolve_config
from .diagnostics import all_notes, is_interrupt
from .errors import UsageError
from .hints import suggest_arguments
from .processes.real_time import find_cluster, run_ranks, single_process_setup
from .processes.trace_writer import TraceWriter
from .runtime.event_loop import failed_repr_error
from .runtime.rank import Rank
from .runtime.world import World
from .settings import Wires
from .signals import handling_signals, registered_world
from .timeline.recording import KeptSteps
from .uncaught import install_error_hooks

if TYPE_CHECKING:
    import topology

    from .processes.place import ProcessPlace
    from .runtime.epoch import Epoch
    from .simulation.simulated_backend import Virtual

T = TypeVar("T")
Args = TypeVarTuple("Args")

Engine: TypeAlias = Callable[[Callable[..., Awaitable[object]], tuple[object, ...], RunConfig], list[object]]
"""A function (main, arguments of main after the rank, settings) -> results of all ranks, which runs a program."""

_engine: ContextVar[Engine | None] = ContextVar("engine", default=None)

_LAUNCHER_VARIABLES = {"OVERLAP_NODE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}


@suggest_arguments
def run(
    main: Callable[[Rank, *Args], Awaitable[T]],
    *args: *Args,
    ranks: int | None = None,
    cluster: str | topology.Cluster = "local",
    clock: str | Virtual = "real",
    trace: str | PathLike[str] | None = None,
    trace_steps: str | None = None,
    timeout_s: float | None = None,
    transport: Wires | None = None,
    algorithm: str | None = None,
    check: str | None = None,
    survive: bool | None = None,
    state_dir: str | PathLike[str] | None = None,
) -> list[T]:
    """Run `main(rank, *args)` on every rank, and return the results of this process's ranks, in rank order.

    Args:
        main: An async function; its first argument is the rank.
        args: Further arguments, the same objects on every rank of this process.
        ranks: Number of ranks; by default those of the cluster, or 2 on the local machine.
        cluster: A cluster or its name, such as "trn2.48xlarge x4"; "local", this machine, has no rules on groups.
        clock: "real"; "virtual" for simulated time on the modelled cluster, or an `overlap.Virtual` with the
            assumptions of the simulation.
        trace: File to which the timeline is written as Chrome trace events when the run ends, also by an error; None:
            the timeline is not written.
        trace_steps: Steps that the timeline of a long run keeps: "last:100", "every:10", or "last:100,every:10"; None:
            the steps that fit into 20,000 spans a rank.
        timeout_s: Seconds after which the run gives up, with a report of the ranks that wait for each other; None:
            never.
        transport: What carries the bytes. None: `NeuronLink`, which joins the ranks inside this process, and sockets
            between processes. A function gets that default and returns a transport around it, such as
            `lambda wires: Paced(wires, links=...)`.
        algorithm: Algorithm to use wherever it exists, such as "ring"; None: the fastest.
        check: "nan": each sender checks all data before anything is added to it. The first rank with a NaN or an
            infinity fails with a `NonFiniteError`, which names the operation, the step and the line. The check of 64
            MiB of float32 takes 12 ms. None: no check.
        survive: Whether the other processes go on when one is lost, as with `overlap run --survive`: they meet in a
            smaller world, and call `main` again. `overlap run` must have started the processes; on several hosts it
            also needs `--survive --witness DIR`. Ranks of a single process, and of virtual time, are not lost one by
            one: for them this changes nothing.
        state_dir: Folder in which `rank.state` and `Checkpoints` keep the state for a restart; None: nowhere. In
            virtual time nothing is kept.

    Raises:
        UsageError: At once, for invalid arguments.
        RankFailedError: When a rank raises. The error names the first culprit; the `__cause__` is the culprit's error.
        SystemExit: With code 143 when the process was told to end by SIGTERM (129: SIGHUP) and no other handler exists.
            The ranks are cancelled, so that their `finally` runs, and the timeline is written.
        StallError: When `timeout_s` is over, or nothing has moved for too long (see `--stall-warning`,
            `--stall-timeout`); in virtual time also when every rank is blocked and nothing is due.
    """
    install_error_hooks()
    config = _make_config(
        main, args, clock, cluster, ranks=ranks, trace=trace, trace_steps=trace_steps, timeout_s=timeout_s,
        wires=transport, algorithm=algorithm, check=check, survive=survive, state_dir=state_dir,
    )  # fmt: skip
    if (engine := _engine.get()) is not None:
        return cast("list[T]", engine(main, args, config))
    if trio.lowlevel.in_trio_run():
        raise UsageError("run: a Trio program runs already; use `await overlap.run_async(...)` in it")
    try:
        with handling_signals(), TraceWriter(config) as writer:
            if config.virtual is None:
                return trio.run(_run_in_real_time, main, args, config, writer)
            return _run_in_virtual_time(main, args, config, writer)
    except trio.TrioInternalError as internal:
        if (failed := failed_repr_error(internal)) is None:
            raise
        raise failed from failed.cause
    except BaseExceptionGroup as group:
        if not is_interrupt(group):
            raise
        interrupt = KeyboardInterrupt()
        interrupt.__notes__ = all_notes(group)
        raise interrupt from None


@suggest_arguments
async def run_async(
    main: Callable[[Rank, *Args], Awaitable[T]],
    *args: *Args,
    ranks: int | None = None,
    cluster: str | topology.Cluster = "local",
    clock: str | Virtual = "real",
    trace: str | PathLike[str] | None = None,
    trace_steps: str | None = None,
    timeout_s: float | None = None,
    transport: Wires | None = None,
    algorithm: str | None = None,
    check: str | None = None,
    survive: bool | None = None,
    state_dir: str | PathLike[str] | None = None,
) -> list[T]:
    """Run `main` on every rank as `run` does, inside a Trio program. Cancellation ends all ranks and frees everything.

    Arguments, results and errors: see `run`. Settings of a launcher in the environment (see `overlap.config`) win over
    the arguments.

    Raises:
        UsageError: At once, for invalid arguments, outside a Trio program, and for virtual time, which needs Trio to be
            started on a clock of its own.
    """
    install_error_hooks()
    if not trio.lowlevel.in_trio_run():
        raise UsageError("run_async: no Trio program runs here; use overlap.run, or overlap.connect beside asyncio")
    config = _make_config(
        main, args, clock, cluster, ranks=ranks, trace=trace, trace_steps=trace_steps, timeout_s=timeout_s,
        wires=transport, algorithm=algorithm, check=check, survive=survive, state_dir=state_dir,
    )  # fmt: skip
    if config.virtual is not None:
        raise UsageError("clock: a Trio program that runs already has real time; use overlap.run for virtual time")
    with TraceWriter(config) as writer:
        return await _run_in_real_time(main, args, config, writer)


@contextmanager
def running_on(engine: Engine) -> Iterator[None]:
    """Let every `run` in the block call `engine` in place of running ranks in this process."""
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)


def _make_config(
    main: object, args: tuple[object, ...], clock: str | Virtual, cluster: str | topology.Cluster, **settings: Any
) -> RunConfig:
    """Return the checked settings of a run, from the arguments of `run` and the environment.

    The cluster "local" counts as left out, so that the environment can give another one.
    """
    if isinstance(settings["state_dir"], str | PathLike):
        settings["state_dir"] = os.path.abspath(settings["state_dir"])  # the program may change its directory
    arguments = RunConfig.from_values(cluster=None if cluster == "local" else cluster, **settings)
    if clock != "real":
        from .simulation.simulated_backend import parse_clock  # and with it the model of the machines

        arguments = arguments.with_changes(ARGUMENT, virtual=parse_clock(clock))
    return resolve_config(main, args, arguments)


async def _run_in_real_time(
    main: Callable[..., Awaitable[T]], args: tuple[object, ...], config: RunConfig, writer: TraceWriter
) -> list[T]:
    """Run a world in real time until it ends or a signal ends it, and return the results of this process's ranks."""
    with registered_world() as live_world:

        def set_world(world: World) -> None:
            live_world.world = world

        own_place = _find_own_place(config.ranks)
        if own_place is not None and config.survive:
            from .survival.epochs import live_epochs  # not at the top: few runs survive losses

            return await live_epochs(
                own_place, main, args, config, writer, set_world, has_signal=lambda: live_world.scope.cancel_called
            )
        if own_place is None:
            opened = single_process_setup(config)
        else:
            from .processes.connect import join_launched_world

            opened = join_launched_world(own_place, config.with_changes(own_place.source, ranks=own_place.world_size))
        return await run_ranks(
            opened, own_place, main, args, config, writer, set_world, has_signal=lambda: live_world.scope.cancel_called
        )
    raise AssertionError("this is a bug in overlap, please report it: a world that ends early has raised why")


def _run_in_virtual_time(
    main: Callable[..., Awaitable[T]], args: tuple[object, ...], config: RunConfig, writer: TraceWriter
) -> list[T]:
    from .simulation.simulated_backend import SimulatedBackend

    assert config.virtual is not None
    if config.wires is not None:
        raise UsageError("transport: nothing travels in virtual time; give the links' figures in a cluster file")
    if config.check is not None and config.virtual.shapes_only:
        raise UsageError("check: with shapes_only, arrays have no data to check; leave out one of them")
    placed = find_cluster(config.cluster, config.ranks, source=config.source_text("ranks", "cluster"))
    size, steps = config.ranks or placed.world_size, KeptSteps.from_setting(config.trace_steps)

    async def run_epoch(
        clock: SimulatedBackend, size: int, epochs: Sequence[Epoch], described: Mapping[str, str]
    ) -> list[T]:
        """Run the ranks of one epoch in virtual time: one world of a run that goes on in smaller ones after losses.

        A usual run is a single epoch, with no `epochs`. `described` is added to the timeline's metadata.
        """
        world = clock.world(
            size, placed, algorithm=config.algorithm, check=config.check, steps=steps, epochs=epochs,
            state_dir=config.state_dir,
        )  # fmt: skip
        world.described.update(described)
        clock.kernel.on_stall = world.end_deadlocked
        if config.pulse is not None:
            clock.beat(config.pulse)
        try:
            return await world.run_to_end(main, args, config.timeout_s)
        finally:
            writer.write_virtual_world(world.timeline)

    if config.virtual.faults is not None and config.virtual.faults.survive:
        from .survival.virtual import live_virtual_epochs  # not at the top: few runs survive losses

        return live_virtual_epochs(run_epoch, config.virtual, placed, size)
    clock = SimulatedBackend(config.virtual, placed)
    with clock.apply_fault_seed():
        return clock.kernel.run(run_epoch, clock, size, (), {})


def _find_own_place(ranks: int | None) -> ProcessPlace | None:
    """Return the place of this process in a launcher's world, or None without a launcher.

    If nobody has set the number of ranks, `ranks` is None.
    """
    if _LAUNCHER_VARIABLES.isdisjoint(os.environ):
        return None
    from .processes.place import find_place, set_rank_count  # not at the top: loads all that several processes need

    own_place = find_place()
    return None if own_place is None else set_rank_count(own_place, ranks)

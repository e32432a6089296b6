"""Front door on Ray: `run` starts a world on the actors of a gang, and returns its results on the driver."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray import cloudpickle

from ..config import RunConfig
from ..engines.gang import GangOutcome, GangSpec
from ..engines.job import WAIT_S, config_of_arguments, name_error, run_gang
from .actors import make_store
from .gang import RayGang
from .placement import check_resources, check_strategy

if TYPE_CHECKING:
    import topology

T = TypeVar("T")


def run(
    main: Callable[..., Awaitable[T]],
    *args: object,
    ranks: int,
    ranks_per_actor: int = 1,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    max_restarts: int = 0,
    wait_s: float = WAIT_S,
    name: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    cluster: str | topology.Cluster = "local",
    trace: str | PathLike[str] | None = None,
    trace_steps: str | None = None,
    timeout_s: float | None = None,
    transport: str | None = None,
    algorithm: str | None = None,
    check: str | None = None,
    state_dir: str | None = None,
    flight_dir: str | None = None,
) -> list[T]:
    """Run `main(rank, *args)` on ranks in actors of a Ray cluster, and return their results in rank order.

    All actors start, or none. If one fails or is lost, all end, and the first failure is raised here: the rank, its
    operation and its line. With `max_restarts` they start again, on other nodes if theirs are gone, and go on from
    `rank.state` or from checkpoints. A driver that ends, however that happens, takes the actors along.

    Args:
        main: An async function; its first argument is the rank. It is pickled, by value if it is not importable there.
        args: Further arguments, pickled too.
        ranks: How many ranks.
        ranks_per_actor: Ranks of each actor, which is one process; they share its memory.
        resources: Resources of each actor, such as {"CPU": 4, "GPU": 1}; by default one CPU.
        strategy: Strategy of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        max_restarts: How often the world may be started again.
        wait_s: How long to wait for resources. After a second a line on stderr names missing ones.
        name: Name of the job, for `overlap top`; two jobs of one name do not run at once. By default a new one.
        runtime_env: Ray's description of the actors' environment.
        cluster: As for `overlap.run`.
        trace: Where this process writes the timeline of all ranks.
        trace_steps: As for `overlap.run`.
        timeout_s: As for `overlap.run`; of each attempt.
        transport: Name of the transport between processes, as for `overlap run --transport`.
        algorithm: As for `overlap.run`.
        check: As for `overlap.run`.
        state_dir: Folder of the states of `rank.state`, for restarts, that all nodes share.
        flight_dir: Where this process puts the flight records of a run that fails.

    Raises:
        UsageError: For arguments that cannot be meant; for objects that cannot be sent; for nodes with another version
            of this package; if a job of that name runs.
        ResourcesError: If there are not enough resources in time.
        RankFailedError: When a rank raises, or its process is lost; its error is the `__cause__`.
        StallError: As `overlap.run`.
    """
    config = config_of_arguments(
        main, args, ranks=ranks, cluster=cluster, trace=trace, trace_steps=trace_steps, timeout_s=timeout_s,
        transport=transport, algorithm=algorithm, check=check, state_dir=state_dir, flight_dir=flight_dir,
    )  # fmt: skip
    results = run_configured(
        main, args, config, ranks_per_actor=ranks_per_actor, resources=resources, strategy=strategy,
        max_restarts=max_restarts, wait_s=wait_s, name=name, runtime_env=runtime_env,
    )  # fmt: skip
    return cast("list[T]", results)


def run_configured(
    main: Callable[..., Awaitable[object]],
    args: tuple[object, ...],
    config: RunConfig,
    *,
    ranks_per_actor: int = 1,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    max_restarts: int = 0,
    wait_s: float = WAIT_S,
    name: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> list[object]:
    """Run `main` as `run` does, with settings that are checked already."""
    check_strategy(strategy)
    resources_of_actor = check_resources(resources)

    @contextmanager
    def reserve(spec: GangSpec) -> Iterator[Callable[[GangSpec], GangOutcome]]:
        """Connect to Ray, reserve the name of the job for the block, and yield a function that runs an attempt."""
        if not ray.is_initialized():
            ray.init(log_to_driver=True, logging_level="warning")
        with _reserved_name(spec) if name else nullcontext():
            yield RayGang(
                resources=resources_of_actor, strategy=strategy, wait_s=wait_s, runtime_env=runtime_env
            ).run_attempt

    return run_gang(
        main, args, config, reserve,
        engine="Ray", cloudpickle=cloudpickle, ranks_each=ranks_per_actor, argument="ranks_per_actor", name=name,
        wait_s=wait_s, max_restarts=max_restarts,
    )  # fmt: skip


@contextmanager
def _reserved_name(spec: GangSpec) -> Iterator[None]:
    """Reserve the name of a job for the block, by an actor of that name."""
    try:
        holder = make_store(f"job/{spec.job}")
    except ValueError as error:
        raise name_error(spec) from error
    try:
        yield
    finally:
        if ray.is_initialized():
            ray.kill(holder.actor)

"""Job on an engine: its settings, its name and its run, which are the same on all engines."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING

from ..config import RunConfig, resolve_config
from ..errors import UsageError
from ..settings import check_seconds
from .attempts import run_attempts
from .gang import GangOutcome, GangSpec, describe_gang
from .pickling import Pickling

if TYPE_CHECKING:
    import topology

WAIT_S = 300.0
"""For resources: an autoscaler, or a cluster that adapts to its load, brings a machine in that time."""

Gang = AbstractContextManager[Callable[[GangSpec], GangOutcome]]
"""Holds the name of a job on a cluster; its value runs one attempt."""


def config_of_arguments(
    main: Callable[..., Awaitable[object]],
    args: tuple[object, ...],
    *,
    ranks: int,
    cluster: str | topology.Cluster,
    trace: str | PathLike[str] | None,
    trace_steps: str | None,
    timeout_s: float | None,
    transport: str | None,
    algorithm: str | None,
    check: str | None,
    state_dir: str | None,
    flight_dir: str | None,
) -> RunConfig:
    """Return the settings of a run from the arguments of an engine's `run`, with the meanings of `overlap.run`."""
    config = RunConfig.given(
        ranks=ranks, cluster=None if cluster == "local" else cluster, trace=trace, trace_steps=trace_steps,
        timeout_s=timeout_s, transport=transport, algorithm=algorithm, check=check,
        state_dir=_absolute_folder(state_dir), flight_dir=_absolute_folder(flight_dir),
    )  # fmt: skip
    return resolve_config(main, args, config)


def run_gang(
    main: Callable[..., Awaitable[object]],
    args: tuple[object, ...],
    config: RunConfig,
    reserve: Callable[[GangSpec], Gang],
    *,
    engine: str,
    cloudpickle: ModuleType,
    ranks_each: int,
    argument: str,
    name: str | None,
    wait_s: float,
    max_restarts: int,
    import_path: Sequence[str] = (),
) -> list[object]:
    """Run a program on an engine, and return the results of its ranks.

    `reserve` reserves the name of the job, and runs attempts; `argument` is the name of `ranks_each` in the engine's
    `run`; `wait_s` limits the wait for resources; the driver imports from the folders of `import_path` first.
    """
    check_seconds("wait_s", wait_s)
    pickling = Pickling(cloudpickle)
    spec = describe_gang(
        engine, main, args, config,
        ranks_each=ranks_each, argument=argument, name=name, pickling=pickling, import_path=import_path,
    )  # fmt: skip
    with reserve(spec) as once:
        return run_attempts(spec, config, once, max_restarts=max_restarts, loads=pickling.loads)


def name_error(spec: GangSpec) -> UsageError:
    """Return the error of a job with the name of another running job."""
    return UsageError(
        f"name: a job named {spec.job!r} runs on this cluster already; wait for its end, or choose another name"
    )


def _absolute_folder(folder: str | None) -> str | None:
    """Return the absolute path of a folder of this machine; None for none."""
    return None if folder is None else os.path.abspath(folder)

"""`overlap run --engine`: the program runs here, and the ranks of its `overlap.run` on a cluster."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from ..config import RunConfig
from ..errors import UsageError
from ..front import running_on

_LOCAL = ("nnodes", "node_rank", "rdzv_endpoint", "log_dir", "bind")


def on_engine(config: RunConfig) -> AbstractContextManager[None]:
    """Let each `overlap.run` of the program take place on an engine for the block.

    Raises:
        UsageError: If an option is about the processes of this machine, or the engine is not installed.
    """
    for name in _LOCAL:
        if getattr(config, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')}: with --engine, {config.engine} starts the processes; leave it out"
            )

    def run_elsewhere(
        main: Callable[..., Awaitable[object]], args: tuple[object, ...], run_config: RunConfig
    ) -> list[object]:
        """Run `main` on the engine in place of this process; raise `UsageError` if its package is missing."""
        shared = max(1, (run_config.ranks or 1) // config.processes) if config.processes else 1
        ranks_each = config.ranks_per_process or shared
        try:
            return _run_on_engine(str(config.engine), main, args, run_config, ranks_each, config.max_restarts or 0)
        except ImportError as error:
            raise UsageError(f"--engine: {error}") from error

    return running_on(run_elsewhere)


def _run_on_engine(
    engine: str,
    main: Callable[..., Awaitable[object]],
    args: tuple[object, ...],
    run_config: RunConfig,
    ranks_each: int,
    max_restarts: int,
) -> list[object]:
    """Run `main` on the cluster of an engine, with `ranks_each` ranks in a process, and return each rank's result."""
    if engine == "ray":
        from ..ray.door import run_configured as run_on_ray

        return run_on_ray(main, args, run_config, ranks_per_actor=ranks_each, max_restarts=max_restarts)
    from ..dask.door import default_client
    from ..dask.door import run_configured as run_on_dask

    with default_client(os.environ.get("DASK_SCHEDULER_ADDRESS")) as client:
        return run_on_dask(client, main, args, run_config, ranks_per_worker=ranks_each, max_restarts=max_restarts)

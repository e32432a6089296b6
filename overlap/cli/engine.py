"""`overlap run --engine`: the program runs here, and the ranks of its `overlap.run` on a cluster of Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from ..config import RunConfig
from ..errors import UsageError
from ..front import running_on

_LOCAL = ("nnodes", "node_rank", "rdzv_endpoint", "log_dir", "bind")


def running_on_ray(config: RunConfig) -> AbstractContextManager[None]:
    """Return a context in which each `overlap.run` of the program runs its ranks on Ray.

    Raises:
        UsageError: An option is about the processes of this machine.
    """
    for name in _LOCAL:
        if getattr(config, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')}: with --engine, {config.engine} starts the processes; leave it out"
            )

    def run_on_ray(
        main: Callable[..., Awaitable[object]], args: tuple[object, ...], run_config: RunConfig
    ) -> list[object]:
        """Run `main` on Ray in place of this process; raises `UsageError` if the package of Ray is missing."""
        try:
            from ..ray.running import RayRun
        except ImportError as error:
            raise UsageError(f"--engine: {error}") from error
        # --processes divides the ranks among that many processes; without it, each rank has a process of its own
        shared = max(1, (run_config.ranks or 1) // config.processes) if config.processes else 1
        ranks_each = config.ranks_per_process or shared
        return RayRun(ranks_per_actor=ranks_each, max_restarts=config.max_restarts or 0).run(main, args, run_config)

    return running_on(run_on_ray)

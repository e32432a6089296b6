"""Worlds on a Ray cluster: Ray places, restarts and ends the processes, and overlap runs the ranks in them.

    import overlap.ray

    async def main(rank):
        ...

    results = overlap.ray.run(main, ranks=8, ranks_per_actor=4, resources={"CPU": 4})

Ray 2.60 or later: `pip install ".[ray]"`. Tested with 2.60.
"""

# The map of this folder, in the order data flows:
#
#   running    run(): one world on actors, from the driver; each attempt: actors that are watched and ended whole
#   restarts   attempts until one ends well: the first failure, and the files that the driver brings home
#   placement  the placement group, and the wait for its resources
#   member     MemberActor: a process of a job, which meets the others through a store, lives, and reports its end
#   store      RayStore, where the members of a job meet;  store(): where actors of others meet
#   job        JobSpec: a program and its settings, as every actor gets them; its folder on each machine

try:
    import ray as _ray  # noqa: F401
except ImportError as _error:
    from ..version import install_command

    raise ImportError(f"overlap.ray needs Ray 2.60 or later: {install_command('ray')}") from _error

from .placement import ResourcesError
from .running import run
from .store import RayStore, store

__all__ = ["RayStore", "ResourcesError", "run", "store"]

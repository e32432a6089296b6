"""Worlds on a Ray cluster: Ray places, replaces and ends the processes; the ranks in them are ours.

    import overlap.ray

    async def main(rank):
        ...

    results = overlap.ray.run(main, ranks=8, ranks_per_actor=4, resources={"CPU": 4})

Ray 2.60 or later: `pip install ".[ray]"`. Tested with 2.60.
"""

# The map of this folder:
#
#   door       run(): one world on actors, from the driver;  store(): where actors of others meet
#   gang       one attempt: actors in a placement group, watched and ended whole
#   placement  the placement group, and its wait for resources
#   actors     the actors: a member of a gang each, and the store

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    from ..version import install_command

    raise ImportError(f"overlap.ray needs Ray 2.60 or later: {install_command('ray')}") from error

from typing import TYPE_CHECKING

from .actors import RayStore, store

if TYPE_CHECKING:
    from .door import run

__all__ = ["RayStore", "run", "store"]


def __getattr__(name: str) -> object:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .door import run  # not at the top: only drivers need it, and every actor imports this module

    return run


def __dir__() -> list[str]:
    return sorted(__all__)

"""Worlds on a Dask cluster: Dask has the workers and the data; the ranks in them are ours.

    import overlap.dask

    async def main(rank, partitions):
        ...

    results = overlap.dask.run(client, main, ranks=8, data=frame)

Dask 2026.8 or later: `pip install ".[dask]"`. Tested with 2026.8.
"""

# The map of this folder:
#
#   door       run(): one world on workers, from a client
#   gang       one attempt: tasks that are pinned to workers, started all or none, watched and cancelled together
#   tasks      a member of a gang as a task, and other functions for workers
#   variables  the store in which members meet
#   data       partitions of a collection, and the workers that hold them

try:
    import distributed as _distributed  # noqa: F401
except ImportError as error:
    from ..version import install_command

    raise ImportError(f"overlap.dask needs dask.distributed: {install_command('dask')}") from error

import copyreg as _copyreg

from ..errors import OverlapError as _OverlapError
from .door import run


def _use_own_pickling(kind: type[_OverlapError]) -> None:
    """Let the errors of this package be pickled by their own `__reduce__`.

    The import of distributed registers a function that pickles every error with its cause. With that function an error
    could not be pickled if its cause cannot be.
    """
    _copyreg.dispatch_table.pop(kind, None)
    for each in kind.__subclasses__():
        _use_own_pickling(each)


_use_own_pickling(_OverlapError)

__all__ = ["run"]

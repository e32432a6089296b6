"""Asynchronous ranks that hide communication behind compute."""

# The map of the building, in the order data flows:
#
#   entry       run(): the front door;  request: what it is asked, and by whom;  surroundings: what a world stands on
#   world       World: starts the ranks, ends them together, names the culprit
#   rank        Rank: what main() is given
#   group       Group: an ordered set of ranks;  mesh: a grid of them with named axes
#   calls       the collectives as users call them: plain functions that return futures at once
#   operation   CollectiveFuture: one collective on one rank, from the call to its end
#   stream      Stream: FIFO lanes with a window;  compute: the lane of plain functions, in a thread
#   meeting     where the ranks of a group find each other's operations, and disagreement is noticed
#   far         channels whose ranks live in several processes;  neighbours: what those processes tell each other
#   clock       real time; in virtual time modelled, with modelled_compute and modelled_engine, on virtual
#   engine      turns a met operation into moved bytes:
#     direct      the short cut when ranks share memory
#     compiler    chooses an algorithm by cost, proves its table, cuts out each rank's program; keeps it all
#     programs    operations that run as programs, each rank's part in a task of that rank
#     cc_core     a CC-core: runs a rank's program of sends and receives over transport endpoints
#     workers     threads for the large reductions
#   collectives schedules as data, the programs made from them, and the arithmetic; pure
#   timeline    spans, metrics, trace files, drawing
#   cli         the `overlap` command
#   loans       arrays in flight are read-only;  blame: from an error to its culprit
#   settings    what a launcher says;  process: what a world changes in the interpreter and puts back
#   future, errors, units   small things the others stand on

from importlib import import_module
from typing import TYPE_CHECKING

from .collectives.reduce import OPS
from .compute import ComputeFuture
from .entry import run, run_async
from .errors import (
    CollectiveMismatchError,
    OverlapError,
    PeerError,
    PeerFailedError,
    PeerLostError,
    RankFailedError,
    RankLeftError,
    RemoteError,
    ScheduleError,
    StallError,
    UsageError,
)
from .future import Future
from .group import Group
from .mesh import Mesh
from .operation import CollectiveFuture
from .rank import Rank
from .shapes import shape_only
from .stream import Stream

if TYPE_CHECKING:
    from .collectives.cost.startup import Startup
    from .modelled import Virtual
    from .virtual import Conditions, Interference

__all__ = [
    "OPS",
    "CollectiveFuture",
    "CollectiveMismatchError",
    "ComputeFuture",
    "Conditions",
    "Future",
    "Group",
    "Interference",
    "Mesh",
    "OverlapError",
    "PeerError",
    "PeerFailedError",
    "PeerLostError",
    "Rank",
    "RankFailedError",
    "RankLeftError",
    "RemoteError",
    "ScheduleError",
    "StallError",
    "Startup",
    "Stream",
    "UsageError",
    "Virtual",
    "run",
    "run_async",
    "shape_only",
]

_LOADED_WHEN_USED = {
    "Conditions": "virtual",
    "Interference": "virtual",
    "Startup": "collectives.cost.startup",
    "Virtual": "modelled",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)

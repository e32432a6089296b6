"""Asynchronous ranks that hide communication behind compute."""

# The map of the building, in the order data flows:
#
#   front       the front doors: run();  settings: every setting of a run;  config: their values and sources
#   embedded/   the door for programs that own their main thread: connect()
#   runtime/    one process's ranks:
#     world       World: starts the ranks, ends them together, names the culprit
#     ending      the verdict on a world, and its end in forked processes
#     rank        Rank: the argument of main();  group: an ordered set of ranks;  mesh: a grid of them with named axes
#     calls/      collectives and messages as methods, which return futures at once, and the types of these (shapes)
#     objects     collectives of Python objects
#     issue       from a call to an operation under way: checks, numbers, ports;  arguments: its checks of arguments
#     operation   CollectiveFuture, from the call to its end;  future, derived: futures, and futures made of others
#     stream      FIFO lanes with a window;  compute: lanes of plain functions, each in a thread
#     match       the ends of one operation, and disputes between them;  communicator: brings the ends together
#     spanning, spanning_messages    communicators whose ranks live in several processes
#     outstanding the unfinished operations of a rank, their deadlines, failures that nobody has seen
#     checking    the issuer of `run(check="nan")`, which looks at all data that is sent
#     backend     the differences between real and simulated time;  event_loop: its work for other threads
#     engine/     moves the bytes of matched operations (real_engine): by pulls out of memory that ranks share
#                 (in_process, on_host); else as programs over wires (compiler, layout, execution)
#     memory/     new arrays (buffer_pool), arrays in use (buffer_locks), arrays of other libraries (foreign)
#     blame/      which rank waits for which, which keeps the event loop, and when the user hears of it
#   simulation/    the simulated backend: clock, fabric, engine, compute
#   launch/     the launcher: starts processes, shows what they print, ends them together, says who failed
#   processes/  the processes of a world: how they find each other, what they tell each other, how a loss is noticed
#   collectives/  schedules as data, the programs made from them, and the arithmetic; pure;  cost/  what they cost
#   flight/     the last operations of every rank, readable when nobody is left to ask
#   live/       jobs that run now, seen through those files
#   state/      what a rank must find again after a restart
#   timeline/   spans: recorded, as columns; measure/ (figures), files/ (bytes), draw/ (pictures), replay/ (what-ifs)
#   parallel/   training strategies, built on nothing but what is public
#   engines/, ray/, dask/   worlds on clusters of Ray and Dask: what both share, and each of them
#   torch/      the backend of `torch.distributed`, and those strategies for its modules
#   planning/   training steps from a configuration or a recorded run, and machine files; only the command imports it
#   testing/    distributed programs as tests: many ranks in one process, by seeds; `pytest_overlap` is its plugin
#   cli/        the `overlap` command, a file or a folder for each of its words
#   diagnostics   from an error to its culprit;  uncaught: the interpreter's hook, which shows it by launch/report
#   hints         sentences on common mistakes: names that are almost right
#   trace_files paths of the trace files of runs
#   signals       what SIGTERM and SIGUSR1 ask of a process
#   errors, notice, units, version   small things the others stand on
#
# Four routes through it (`a -> b`: a calls b; `a => b`: a message from a reaches b in another process):
#
#   an all_reduce          runtime/calls -> issue -> stream -> communicator -> engine/real_engine -> in_process (one
#                          process); else stream -> spanning -> on_board or on_host (several of one host), or programs
#                          -> execution -> transports/matched -> a link. Its end: operation.finish -> stream, future
#   a reduction operator   one entry of OPS in collectives/reduce: combination, reference, refusals; the benchmark and
#                          the tests (core/test_operators) take every entry from there; listed in docs/loops
#   a lost process         noticed by processes/link (the connection ends), silence (no signs of life) or host ->
#                          coordinator => member -> control_plane (makes PeerLostError) -> runtime/world ->
#                          ending (makes the errors that `await` and `run` raise); a broken wire: the `settle` of
#                          runtime/communicator
#   a choice of algorithm  runtime/engine/real_engine.direct (shared memory needs no schedule), else compiler ->
#                          cost/choice -> select: plan() -> candidates -> flat, composed (prices), and its reason();
#                          the tables themselves: collectives/generators
#
# The words are in docs/glossary.md.

import signal as _signal
import sys as _sys
from importlib import import_module
from typing import TYPE_CHECKING

if (_sys.orig_argv[1:3] == ["-m", __name__] or _sys.argv[0].endswith("/overlap")) and (
    _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
):
    # This is the command: a Ctrl-C ends it here, without the traceback of an import. `cli.main` takes that back.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from .collectives.reduce import OPS
from .errors import (
    CollectiveMismatchError,
    DeadlineError,
    GroupAbortedError,
    NonFiniteError,
    OverlapError,
    PeerError,
    PeerFailedError,
    PeerLostError,
    RankFailedError,
    RankLeftError,
    RemoteError,
    ReplicaError,
    ScheduleError,
    StallError,
    TraceWarning,
    UsageError,
)
from .front import run, run_async
from .runtime.compute import ComputeFuture
from .runtime.future import Future
from .runtime.group import Group
from .runtime.memory.arrays import shape_only
from .runtime.memory.buffer_pool import BufferPoolStatistics
from .runtime.mesh import Mesh
from .runtime.operation import CollectiveFuture
from .runtime.rank import Rank, RankStatistics
from .runtime.stream import Stream

if TYPE_CHECKING:
    __version__: str
    from .cost.parameters import Startup
    from .embedded.connection import Connection
    from .embedded.door import connect
    from .simulation import Conditions, Faults, Interference
    from .simulation.simulated_backend import Virtual

__all__ = [
    "OPS",
    "BufferPoolStatistics",
    "CollectiveFuture",
    "CollectiveMismatchError",
    "ComputeFuture",
    "Conditions",
    "Connection",
    "DeadlineError",
    "Faults",
    "Future",
    "Group",
    "GroupAbortedError",
    "Interference",
    "Mesh",
    "NonFiniteError",
    "OverlapError",
    "PeerError",
    "PeerFailedError",
    "PeerLostError",
    "Rank",
    "RankFailedError",
    "RankLeftError",
    "RankStatistics",
    "RemoteError",
    "ReplicaError",
    "ScheduleError",
    "StallError",
    "Startup",
    "Stream",
    "TraceWarning",
    "UsageError",
    "Virtual",
    "connect",
    "run",
    "run_async",
    "shape_only",
]

_LOADED_WHEN_USED = {
    "Conditions": "simulation",
    "Connection": "embedded.connection",
    "Faults": "simulation",
    "Interference": "simulation",
    "Startup": "cost.parameters",
    "Virtual": "simulation.simulated_backend",
    "connect": "embedded.door",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from .version import version

        return version()
    if name in ("dask", "ray"):  # the doors on engines that are installed as extras
        return import_module(f".{name}", __name__)
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

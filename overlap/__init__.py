"""Asynchronous ranks that hide communication behind compute."""

# docs/architecture.md has the map: a diagram, every package, and routes through the code, as that of an all_reduce.
#
#   front, embedded/         run() and connect();  settings, config: the settings of a run
#   runtime/                 ranks of one process: calls, ports, streams, matching, plans, futures
#   simulation/              the virtual clock;  cost/: predicted times;  collectives/: schedules
#   launch/, processes/      starts processes, and detects their losses;  state/: saved for restarts
#   survival/                worlds that go on after losses: agreement, witness, epochs
#   waits/                   the judge of ranks that wait
#   timeline/, flight/       what runs record, and reports from it;  explain/: judges both
#   parallel/, torch/        training strategies; the backend of torch.distributed;  ray/: on clusters
#   testing/                 tests with many ranks in one process
#   cli/                     the command
#
# How to add an operator, an algorithm, a transport, a machine or a strategy: CONTRIBUTING.md. Words: docs/glossary.md.

import signal as _signal
import sys as _sys
from importlib import import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

from .errors import (
    CollectiveMismatchError,
    DeadlineError,
    FutureCancelledError,
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

_is_command = _sys.orig_argv[1:3] == ["-m", __name__] or _sys.argv[0].endswith("/overlap")
if _is_command and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # Until `cli.main` installs its own handler, Ctrl-C ends the command without a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
_only_reads = (_is_command and _sys.argv[1:2] == ["why"]) or f"{__name__}.timeline.files.children" in _sys.orig_argv

# A command that only reads files leaves these imports out, which would take half of its time.
if TYPE_CHECKING or not _only_reads:
    from .hints import find_shadowed_package as _hidden_package

    if _hidden := _hidden_package():
        raise SystemExit(f"overlap: {_hidden}") if _is_command else ImportError(_hidden)
    from .collectives.reduce import OPS
    from .front import run, run_async
    from .runtime.compute import ComputeFuture
    from .runtime.future import Future
    from .runtime.group import Group, Mesh
    from .runtime.memory.arrays import shape_only
    from .runtime.memory.buffer_pool import BufferPoolStatistics
    from .runtime.operation import CollectiveFuture
    from .runtime.rank import Rank, RankStatistics
    from .runtime.stream import Stream

if TYPE_CHECKING:
    __version__: str
    from .embedded.connecting import connect
    from .embedded.connection import Connection
    from .explain.entry import why
    from .simulation.conditions import Conditions, Interference
    from .simulation.faults import Faults
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
    "FutureCancelledError",
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
    "Stream",
    "TraceWarning",
    "UsageError",
    "Virtual",
    "connect",
    "run",
    "run_async",
    "shape_only",
    "why",
]

_LOADED_WHEN_USED = {
    "BufferPoolStatistics": "runtime.memory.buffer_pool",
    "CollectiveFuture": "runtime.operation",
    "ComputeFuture": "runtime.compute",
    "Conditions": "simulation.conditions",
    "Connection": "embedded.connection",
    "Faults": "simulation.faults",
    "Future": "runtime.future",
    "Group": "runtime.group",
    "Interference": "simulation.conditions",
    "Mesh": "runtime.group",
    "OPS": "collectives.reduce",
    "Rank": "runtime.rank",
    "RankStatistics": "runtime.rank",
    "Stream": "runtime.stream",
    "Virtual": "simulation.simulated_backend",
    "connect": "embedded.connecting",
    "run": "front",
    "run_async": "front",
    "shape_only": "runtime.memory.arrays",
    "why": "explain.entry",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from .version import version

        return version()
    # `ray` needs an extra. A command that only reads files imports subpackages through here.
    if name == "ray" or (_only_reads and _find_spec(f".{name}", __name__)):
        return import_module(f".{name}", __name__)
    if name not in _LOADED_WHEN_USED:
        from .hints import missing_name_error

        raise missing_name_error(name)
    return getattr(import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

"""Asynchronous ranks that hide communication behind compute."""

# The map of the building, in the order data flows. Beside overlap/ stand two packages that know nothing of it:
# transports/ (what carries bytes between ranks) and topology/ (machines, their wires, places of ranks).
#
#   front       the front doors: run()
#   settings    every setting of a run: one field is its option of `overlap run` (added by cli/options), its variable
#               OVERLAP_*, its help and its checks;  config: the values of a run, and their sources
#   embedded/   the door for programs that own their main thread: connect()
#   runtime/    one process's ranks:
#     world       World: starts the ranks, ends them together, names the culprit
#     ending      which error `await` and `run` raise when a world ends; what a forked child may still do
#     rank        Rank: the argument of main();  group: an ordered set of ranks;  mesh: a grid of them with named axes
#     calls/      collectives and messages as methods, which return futures at once, and the types of these (shapes)
#     objects     collectives of Python objects
#     issue       from a call to an operation under way: checks, numbers, ports;  arguments: its checks of arguments
#     trees       trees of arrays, packed;  tree_operation: collectives of these;  forms: trees as text;  received:
#                 receives that take them apart
#     state       the states of whatever can be awaited, and which may follow which;  failure: errors, and their causes
#     settling    how whatever can be awaited ends;  waits: callbacks at the end, and waits for it in other threads
#     future      handles that are awaited;  not_a_value: refusals of futures taken for their values;  derived, checked:
#                 futures made of others;  operation: CollectiveFuture, from the call to its end
#     receive     the receiver's end of a message: withdrawn, given back, taken again
#     stream      FIFO lanes with a window;  compute: lanes of plain functions, each in a thread;  task: async functions
#     own_code    what both have in common: code of the program, and who hears its errors
#     forcing     the end of tasks that ignore their cancellation;  trio_private: every use of Trio's private names
#     match       the operations of all ranks that belong together, and where they disagree
#     communicator  waits until all ranks have issued the same operation (disputes: they have not;  put_back: receives
#                 that leave the queue);  spanning, spanning_messages: likewise for ranks of several processes
#     outstanding the unfinished operations of a rank, their deadlines, failures that nobody has seen
#     mail        messages that the threads of a program carry themselves, between processes of one host: torch's
#     prepared    calls of torch's threads that were made before, issued again in few steps
#     checking    replaces issue under `run(check="nan")`, and refuses NaN before it is sent
#     backend     the differences between real and simulated time;  event_loop: callbacks in turn, fair pauses
#     handover    other threads hand work to the loop, or do it in its place while it sleeps: with its argument
#     executor    Executor: carries out a rank's operations with one call; chosen once
#     engine/     moves the bytes. real_engine chooses executors: ranks read each other's memory (in_process; between
#                 processes of a host host_memory, by compiled code), or each rank runs a program over a transport
#                 (programs: compiler, layout, execution; message: without one)
#     memory/     new arrays (buffer_pool), arrays in use (buffer_locks), arrays of other libraries (foreign)
#     blame/      reports of stalls: stall (when, and the headline), standing (which rank waits for which: sentence and
#                 table), reports (each rank's state), and which rank keeps the event loop
#   simulation/    the simulated backend: kernel (moves the clock), clock, fabric (wires), simulated_engine
#   launch/     the launcher: starts processes, shows what they print, ends them together, says who failed
#   processes/  the processes of a world: how they find each other, what they tell each other, how a loss is noticed
#   collectives/  schedules, the programs made from them, and the arithmetic of reductions; pure
#   cost/       the time of a collective, predicted
#   flight/     the flight record: a file of each process with the last operations of its ranks; reading reads it, and
#               autopsy finds in the files of dead processes which rank and line failed
#   live/       jobs that run now, seen through the same files
#   explanation  why a job is slow or stuck: asks timeline/why and flight/
#   state/      what a rank must find again after a restart
#   timeline/   spans: recorded, as columns; measure/ (times), files/ (bytes), draw/ (pictures), replay/ (what-ifs),
#               why/ (causes of slow steps, from profiles of PyTorch too)
#   parallel/   training strategies, built on nothing but what is public
#   engines/, ray/, dask/   worlds on clusters of Ray and Dask: what both share, and each of them
#   torch/      the backend of `torch.distributed`, and those strategies for its modules
#   planning/   training steps from a configuration or a recorded run, and machine files; only the command imports it
#   testing/    distributed programs as tests: many ranks in one process, by seeds; `pytest_overlap` is its plugin.
#               judging: what is wrong with a run: verdict (it hung), survived (it would hang or differ elsewhere)
#   cli/        the `overlap` command, a file or a folder for each of its words;  options: options made from settings
#   diagnostics   finds in an error the rank and the line at fault;  uncaught: the interpreter's hook for exceptions
#                 that nobody caught, which prints them with launch/report
#   hints         sentences on common mistakes: names that are almost right
#   trace_files paths of the trace files of runs
#   signals       what SIGTERM and SIGUSR1 ask of a process
#   kernel_facts  facts of processes and threads that the kernel reports
#   errors, notice, threads, units, version   small things the others stand on
#
# Eleven routes through it (`a -> b`: a calls b; `a => b`: a tells b, in another process, over the control connection):
#
#   an all_reduce          of one process: calls/reductions -> issue (issue, start, _enqueue) -> communicator (arrive,
#                          once all ranks have come; executor, which engine/real_engine chooses when a call comes first)
#                          -> engine/in_process (InMemory.start, run_here: reduces) -> operation.finish -> future
#                          (__await__). Of several processes: spanning.arrive, and one executor a rank. One host:
#                          host_memory.HostExecutor -> the package transports/: shared_memory/board -> native/
#                          collectives.c, in C. Else programs.ProgramExecutor -> execution -> transports/: matched ->
#                          efa/efa_link -> efa/connection, and back: connection -> reading -> efa_link ->
#                          matching/incoming -> execution -> arithmetic, which reduces; communicator.settle -> finish
#   a wire                 of messages, and of the programs of collectives: processes/connect gives each process its
#                          transports: memory of its own ranks first, then shared memory of a host before sockets
#                          (transports/nearest); transports/router takes the first that reaches the peer
#   a message of torch     torch/transfers -> torch/issuing -> runtime/mail -> the package transports/:
#                          shared_memory/native, which copies it into a ring, and out of it in the thread
#                          that waits. Between hosts, and where that is not compiled: torch/issuing -> runtime/issue
#   eager or offered       over sockets transports/matched (begin_send) asks the link to send at once (send_now), else
#                          it queues the message; matching/outgoing decides by length and credit whether it leaves with
#                          its announcement, is pushed behind it, or is offered. Between processes of a host
#                          shared_memory/messages hands it to native/messages.c, which decides by the room there is.
#                          Ranks of one process (neuronlink) meet
#   a reduction operator   one entry of OPS in collectives/reduce: combination, reference, refusals; its name for type
#                          checkers in runtime/calls/shapes (a test compares them); benchmark and tests
#                          (core/test_operators) take every entry from OPS; listed in docs/loops. If torch has it,
#                          too: torch/issuing and torch/reductions
#   a lost process         is the end of processes/link's reading (silence cuts the link of a silent process) -> host
#                          -> coordinator => member (Membership._receive: what waits for the process fails, and the
#                          event goes into the inbox; of process 0: join -> member) -> control_plane (_lose: makes
#                          PeerLostError) -> runtime/world (its operations fail: outstanding.abandon) ->
#                          runtime/ending: `await` raises PeerFailedError with that as its cause, `run` raises
#                          RankFailedError. If only a wire breaks, spanning.fail_one delays the error for a moment, for
#                          the news of a lost process names the culprit
#   a choice of algorithm  runtime/engine/real_engine asks whether ranks share memory (no schedule is needed), else
#                          compiler -> cost/choice (also an `algorithm=` that is asked for) -> cost/select.plan:
#                          candidates collects the options of flat (one level), composed (several phases), shortcut
#                          and library; each has a price (option, phased); the cheapest, and reason() words why (shown
#                          by cli/plan/collective). In virtual time
#                          simulation/simulated_engine asks cost/choice. The schedules: collectives/generators
#   exposed time           cli/timeline -> timeline/measure/verdict (a sentence) and operations (a table) -> metrics
#                          (coverage: exposed, hidden, idle); reasons -> activity say which rank or operation it
#                          belongs to. Spans come from timeline/recording, as columns (columnar)
#   a bucket's size        parallel/buckets/plan divides gradients into buckets, for data_parallel, sharded and
#                          torch/model; parallel/buckets/queue sends these in one order on all ranks; parallel/tuning
#                          tries sizes for `bucket_bytes="auto"`
#   an error               of the rank's own code: own_code (OwnCode._deliver, _judge) -> outstanding.is_awaited ->
#                          context.end_program, which cancels the program -> world (_run_program)
#   a hang                 runtime/blame/reports (each rank's state) -> stall (is it one?) -> standing (who waits for
#                          whom); processes/control_plane gathers the states of other processes. In a test:
#                          testing/judging -> verdict
#
# How to add an operator, an algorithm, a transport, a machine (topology/data) or a strategy: CONTRIBUTING.md.
#
# The words are in docs/glossary.md.

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
    # This is the command: a Ctrl-C ends it here, without the traceback of an import. `cli.main` takes that back.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
_only_reads = (_is_command and _sys.argv[1:2] == ["why"]) or f"{__name__}.timeline.why.children" in _sys.orig_argv

if TYPE_CHECKING or not _only_reads:  # half of the time of a command that only reads files
    from .collectives.reduce import OPS
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
    from .embedded.connection import Connection
    from .embedded.door import connect
    from .explanation import why
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
    "Conditions": "simulation",
    "Connection": "embedded.connection",
    "Faults": "simulation",
    "Future": "runtime.future",
    "Group": "runtime.group",
    "Interference": "simulation",
    "Mesh": "runtime.mesh",
    "OPS": "collectives.reduce",
    "Rank": "runtime.rank",
    "RankStatistics": "runtime.rank",
    "Stream": "runtime.stream",
    "Virtual": "simulation.simulated_backend",
    "connect": "embedded.door",
    "run": "front",
    "run_async": "front",
    "shape_only": "runtime.memory.arrays",
    "why": "explanation",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from .version import version

        return version()
    if name in ("dask", "ray") or (_only_reads and _find_spec(f".{name}", __name__)):  # extras; `from . import name`
        return import_module(f".{name}", __name__)
    if name not in _LOADED_WHEN_USED:
        from .hints import missing

        raise missing(name)
    return getattr(import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

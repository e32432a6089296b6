"""Guards of the process that ranks share: files, signals, sleeps and forks of a program are emulated or refused."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.cuda.nccl
import torch.distributed.rpc
import torch.multiprocessing

import overlap

from ..errors import OverlapError, UsageError
from . import torch_threads
from .faults import FaultPlan
from .threads import RankThread, UntestableError, assigning_threads_to_ranks

Thread: TypeAlias = "RankThread[Any]"
Original: TypeAlias = "Callable[..., Any]"

# Libraries of communication whose ranks are processes: in a test all ranks are one process. By module, their names.
_FOREIGN = {"mpi4py": "mpi4py", "horovod": "Horovod", "deepspeed": "DeepSpeed", "oneccl_bindings_for_pytorch": "oneCCL"}


class ProgramExit(OverlapError):
    """A rank's program has ended by `sys.exit` with a code other than 0, or by a signal."""


class _CommunicationFinder(MetaPathFinder):
    """Finder of modules that refuses libraries of communication other than PyTorch's."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None, so that other finders look for the module.

        Args:
            name: Name of the module.
            path: Ignored.
            target: Ignored.

        Raises:
            UntestableError: A rank imports another library of communication.
        """
        if name in _FOREIGN and RankThread.current() is not None:
            raise UntestableError(
                f"the program communicates by {_FOREIGN[name]}, whose ranks are processes; test it without "
                "that part, as only torch.distributed can have many ranks in one process"
            )
        return None


class ProcessGuard:
    """Guard of the process of one run: it emulates or refuses calls that would change the process of all ranks.

    Attributes:
        plan: Faults of the run; it is set before the run begins.
        written: By path of a file, a clause on the rank and the line that wrote it last.
    """

    plan: FaultPlan

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self._opened: dict[int, list[tuple[str, weakref.ref[Any]]]] = {}  # files for writing, by rank
        self._handlers: dict[int, Any] = {}  # of SIGTERM, by rank
        self._sleep_counts: Counter[int] = Counter()  # by rank

    @contextmanager
    def guarding_process(self) -> Iterator[None]:
        """Guard the process during a `with` block; only calls in threads of ranks are affected."""
        finder = _CommunicationFinder()
        patches = Patches(RankThread.current)
        patches.replace_function(os, "fork", _make_refusal(_FORKS))
        patches.replace_function(overlap, "run", _make_refusal(_RUNS))
        patches.replace_function(overlap, "run_async", _make_refusal(_RUNS))
        # Files that a rank writes are recorded; a sleep takes virtual time; saves may find a full disk.
        for module in (builtins, io):
            patches.replace_function(module, "open", self._open_and_record)
        patches.replace_function(torch, "save", self._save_unless_full)
        patches.replace_function(signal, "signal", self._set_signal_handler)
        patches.replace_function(torch.multiprocessing, "spawn", _run_spawned_function)
        patches.replace_function(torch.cuda, "is_available", lambda thread, original: False)
        patches.replace_function(torch.cuda.nccl, "version", lambda thread, original: (0, 0, 0))
        patches.replace_function(time, "sleep", self._sleep_in_virtual_time)
        if torch.distributed.rpc.is_available():
            patches.replace_function(torch.distributed.rpc, "init_rpc", _make_refusal(_CALLS_REMOTELY))
        patches.replace_function(ThreadPoolExecutor, "submit", torch_threads.submit_to_rank)
        patches.stack.enter_context(assigning_threads_to_ranks())
        with patches.stack:
            sys.meta_path.insert(0, finder)
            try:
                yield
            finally:
                sys.meta_path.remove(finder)

    def _sleep_in_virtual_time(self, thread: Thread, original: Callable[[float], None], seconds: float) -> None:
        """Let virtual time pass on the calling rank, in place of `time.sleep`.

        If ranks have turns, the first `_SHORT_SLEEPS` sleeps of a rank take no time, as if the other ranks were slow: a
        program must not depend on the length of a sleep.
        """
        # Frame 2 is the code that called `time.sleep`, frame 1 the function of `Patches.replace_function`.
        if sys._getframe(2).f_globals.get("__name__", "").startswith(_WAIT_OUTSIDE):
            original(seconds)
            return
        rank = thread.rank.rank
        self._sleep_counts[rank] += 1
        is_short = self.plan.turns is not None and self._sleep_counts[rank] <= _SHORT_SLEEPS
        thread.sleep(0.0 if is_short else seconds)

    def _open_and_record(
        self, thread: Thread, original: Original, file: Any, mode: str = "r", *args: Any, **keywords: Any
    ) -> Any:
        """Open a file, in place of `open`, and record its writer; raise OSError if a fault has filled the disk."""
        writes = any(letter in mode for letter in "wax+")
        if writes:
            self._record_writer(thread, file)
        stream = original(file, mode, *args, **keywords)
        if writes:
            self._opened.setdefault(thread.rank.rank, []).append((str(file), weakref.ref(stream)))
        return stream

    def _save_unless_full(
        self, thread: Thread, original: Original, value: Any, file: Any, *args: Any, **keywords: Any
    ) -> Any:
        """Save a value, in place of `torch.save`, and record its writer; raise OSError if the disk is full."""
        self._record_writer(thread, file)
        return original(value, file, *args, **keywords)

    def _record_writer(self, thread: Thread, file: Any) -> None:
        """Record who writes a file, for verdicts on earlier readers; raise OSError if a fault has filled the disk."""
        rank = thread.rank.rank
        if rank in self.plan.full:
            reason = f"a fault of this test has filled the disk of rank {rank}: handle it as on a full disk"
            raise OSError(errno.ENOSPC, f"No space left on device ({reason})", str(file))
        if isinstance(file, (str, os.PathLike)):
            late = f"; rank {rank} writes it later, at {thread.line_now()}"
            self.written[os.path.abspath(file)] = f"{late}: wait for that, by a barrier for example"

    def files_left_open(self, rank: int) -> list[str]:
        """Return the names of files that a rank opened for writing and has not closed. Call it after the rank's end."""
        opened = [(name, file()) for name, file in self._opened.pop(rank, [])]
        return [name for name, file in opened if file is not None and not file.closed]

    def _set_signal_handler(self, thread: Thread, original: Original, number: int, handler: Any) -> Any:
        """Set the rank's handler of SIGTERM, and return the former one; for other signals return None."""
        if number != signal.SIGTERM:
            return None
        before = self._handlers.get(thread.rank.rank, signal.SIG_DFL)
        self._handlers[thread.rank.rank] = handler
        return before

    def handle_sigterm(self, rank: int) -> None:
        """Act on SIGTERM in the rank's thread: call the rank's handler.

        Raises:
            ProgramExit: The rank has no handler, which ends its program.
        """
        handler = self._handlers.get(rank, signal.SIG_DFL)
        if callable(handler):
            handler(signal.SIGTERM, sys._getframe())
        elif handler is not signal.SIG_IGN:
            raise ProgramExit(f"rank {rank} was ended by SIGTERM: its program has set no handler by signal.signal")


# Sleeps of a rank that take no time if ranks have turns. Later ones do, so that loops that poll come to an end.
_SHORT_SLEEPS = 8
# Modules that sleep until a process or a lock outside is done, as torch's compiler does while it holds a lock.
_WAIT_OUTSIDE = ("subprocess", "filelock.", "torch._inductor.")


class Patches:
    """Functions and methods that are replaced for threads of ranks, until `stack` is closed.

    Attributes:
        stack: Restores the functions when it is closed.

    Args:
        current: Returns the rank (or its thread) that calls; if it returns None, the original function is called.
    """

    def __init__(self, current: Callable[[], Any]) -> None:
        self.stack: ExitStack = ExitStack()
        self._current = current

    def replace_function(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replace a function.

        Args:
            owner: The module or class that has the function.
            name: Name of the function there.
            replacement: Called with the result of `current`, the original function, and the arguments.
        """
        original = getattr(owner, name)

        def call_replacement(*args: Any, **keywords: Any) -> Any:
            """Call the replacement in the thread of a rank, and the original in others."""
            rank = self._current()
            if rank is None:
                return original(*args, **keywords)
            return replacement(rank, original, *args, **keywords)

        call_replacement.__name__, call_replacement.__doc__ = name, original.__doc__
        self.stack.enter_context(patch.object(owner, name, call_replacement))


def _make_refusal(reason: str) -> Callable[..., None]:
    """Return a replacement that raises UntestableError with "the program " and a reason."""

    def refuse(*args: Any, **keywords: Any) -> None:
        raise UntestableError(f"the program {reason}")

    return refuse


_FORKS = (
    "forks, and a fork of this process would have all ranks; load data in the program's own process (num_workers=0)"
)
_RUNS = (
    "starts ranks of its own by overlap.run; test its async function: `ranks.run(main, ranks=4)` or "
    "@pytest.mark.ranks(4)"
)
_CALLS_REMOTELY = (
    "communicates by torch.distributed.rpc, whose threads and sockets a test has no part in; test what its functions "
    "compute, or send by torch.distributed"
)


def _run_spawned_function(
    thread: Thread, original: Original, fn: Original, args: Sequence[Any] = (), nprocs: int = 1, **options: Any
) -> None:
    """Call `fn` in this rank, in place of `spawn`; raise UsageError if `nprocs` is not the number of ranks."""
    if nprocs != thread.rank.world_size:
        raise UsageError(
            f"ranks: the program spawns {nprocs} processes, and the test has {thread.rank.world_size} ranks; pass "
            f"ranks={nprocs}"
        )
    fn(thread.rank.rank, *args)

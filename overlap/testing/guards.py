"""Guards of the process that ranks share: files, signals, sleeps and forks of a program are answered or refused."""

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
from .threads import RankThread, UntestableError, owned_threads

Thread: TypeAlias = "RankThread[Any]"
Original: TypeAlias = "Callable[..., Any]"

# Communication that we cannot see: its ranks would be those of this one process.
_FOREIGN = {"mpi4py": "mpi4py", "horovod": "Horovod", "deepspeed": "DeepSpeed", "oneccl_bindings_for_pytorch": "oneCCL"}


class ProgramExit(OverlapError):
    """A program has called `sys.exit` with a code that says it has failed, or was ended by a signal."""


class _CommunicationFinder(MetaPathFinder):
    """Finder of modules that refuses libraries of communication but PyTorch's."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Raise for a module that communicates."""
        if name in _FOREIGN and RankThread.current() is not None:
            raise UntestableError(
                f"the program communicates by {_FOREIGN[name]}, whose ranks are processes; in a test only "
                "torch.distributed can have many ranks in one process"
            )
        return None


class ProcessGuard:
    """Guard of the process of one run: it emulates or refuses calls that would change the process of all ranks.

    Attributes:
        plan: Faults of the run; it is set before the run begins.
        written: By the path of a file, a clause on the rank and the line that wrote it last.
    """

    plan: FaultPlan

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self._opened: dict[int, list[tuple[str, weakref.ref[Any]]]] = {}  # files for writing, by rank
        self._handlers: dict[int, Any] = {}  # of SIGTERM, by rank
        self._sleep_counts: Counter[int] = Counter()  # by rank

    @contextmanager
    def active(self) -> Iterator[None]:
        """Guard the process in the threads of ranks for the length of a `with`."""
        finder = _CommunicationFinder()
        patches = Patches(RankThread.current)
        patches.replace(os, "fork", _refuse(_FORKS))
        patches.replace(overlap, "run", _refuse(_RUNS))
        patches.replace(overlap, "run_async", _refuse(_RUNS))
        # Files that a rank writes are recorded; a sleep takes virtual time; saves may find a full disk.
        for module in (builtins, io):
            patches.replace(module, "open", self._open_and_record)
        patches.replace(torch, "save", self._save_unless_full)
        patches.replace(signal, "signal", self._set_handler)
        patches.replace(torch.multiprocessing, "spawn", _spawn_in_place)
        patches.replace(torch.cuda, "is_available", lambda thread, original: False)
        patches.replace(torch.cuda.nccl, "version", lambda thread, original: (0, 0, 0))
        patches.replace(time, "sleep", self._sleep)
        if torch.distributed.rpc.is_available():
            patches.replace(torch.distributed.rpc, "init_rpc", _refuse(_CALLS_REMOTELY))
        patches.replace(ThreadPoolExecutor, "submit", torch_threads.submit)
        patches.stack.enter_context(owned_threads())
        with patches.stack:
            sys.meta_path.insert(0, finder)
            try:
                yield
            finally:
                sys.meta_path.remove(finder)

    def _sleep(self, thread: Thread, original: Callable[[float], None], seconds: float) -> None:
        """Let virtual time pass on the calling rank; where ranks have turns, its first sleeps take none.

        As if all other ranks had been held up for longer: nothing may depend on the length of a sleep.
        """
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
        self._record_writer(thread, file)
        return original(value, file, *args, **keywords)

    def _record_writer(self, thread: Thread, file: Any) -> None:
        """Note which rank writes a file, and where, for a rank that misses it; fail if a fault has filled its disk."""
        rank = thread.rank.rank
        if rank in self.plan.full:
            reason = f"a fault of this test has filled the disk of rank {rank}: handle it as on a full disk"
            raise OSError(errno.ENOSPC, f"No space left on device ({reason})", str(file))
        if isinstance(file, (str, os.PathLike)):
            late = f"; rank {rank} writes it later, at {thread.line_now()}"
            self.written[os.path.abspath(file)] = f"{late}: wait for that, by a barrier for example"

    def files_left_open(self, rank: int) -> list[str]:
        """Return the names of files for writing that a rank, which has ended, has not closed."""
        opened = [(name, file()) for name, file in self._opened.pop(rank, [])]
        return [name for name, file in opened if file is not None and not file.closed]

    def _set_handler(self, thread: Thread, original: Original, number: int, handler: Any) -> Any:
        """Set the rank's handler of SIGTERM, and return the one before; ignore handlers of other signals."""
        if number != signal.SIGTERM:
            return None
        before = self._handlers.get(thread.rank.rank, signal.SIG_DFL)
        self._handlers[thread.rank.rank] = handler
        return before

    def terminate(self, rank: int) -> None:
        """Call the rank's handler of SIGTERM; without one, end its program."""
        handler = self._handlers.get(rank, signal.SIG_DFL)
        if callable(handler):
            handler(signal.SIGTERM, sys._getframe())
        elif handler is not signal.SIG_IGN:
            raise ProgramExit("the rank was ended by SIGTERM, which its program does not handle")


# Sleeps of a rank that take no time where ranks have turns; loops that poll must come to an end.
_SHORT_SLEEPS = 8
# Modules that sleep until a process or a lock outside is done, as torch's compiler does while it holds a lock.
_WAIT_OUTSIDE = ("subprocess", "filelock.", "torch._inductor.")


class Patches:
    """Functions and methods that are replaced in the threads of ranks, until `stack` is closed.

    Args:
        current: Returns the rank of the calling thread; None: the original function is called.
    """

    def __init__(self, current: Callable[[], Any]) -> None:
        self.stack: ExitStack = ExitStack()
        self._current = current

    def replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replace a function; the replacement gets the rank and the original before the arguments."""
        original = getattr(owner, name)

        def call(*args: Any, **keywords: Any) -> Any:
            rank = self._current()
            if rank is None:
                return original(*args, **keywords)
            return replacement(rank, original, *args, **keywords)

        call.__name__, call.__doc__ = name, original.__doc__
        self.stack.enter_context(patch.object(owner, name, call))


def _refuse(reason: str) -> Callable[..., None]:
    """Return a replacement that refuses the call of a program."""

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


def _spawn_in_place(
    thread: Thread, original: Original, fn: Original, args: Sequence[Any] = (), nprocs: int = 1, **options: Any
) -> None:
    """Call the function of `torch.multiprocessing.spawn` as one of its processes, each of which is a rank."""
    if nprocs != thread.rank.world_size:
        raise UsageError(
            f"ranks: the program spawns {nprocs} processes, and the test has {thread.rank.world_size} ranks; pass "
            f"ranks={nprocs}"
        )
    fn(thread.rank.rank, *args)

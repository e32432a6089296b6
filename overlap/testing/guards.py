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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, Protocol, TypeAlias
from unittest.mock import patch

import torch
import torch.cuda.nccl
import torch.distributed.rpc
import torch.multiprocessing

import overlap

from ..errors import UsageError
from . import torch_threads
from .threads import RankThread, UntestableError, owned_threads

Thread: TypeAlias = "RankThread[Any]"
Original: TypeAlias = "Callable[..., Any]"

# Communication that we cannot see: its ranks would be those of this one process.
_FOREIGN = {"mpi4py": "mpi4py", "horovod": "Horovod", "deepspeed": "DeepSpeed", "oneccl_bindings_for_pytorch": "oneCCL"}


class GuardedProgram(Protocol):
    """Program with all ranks in this process, as its guards see it; see `programs`."""

    opened: dict[int, list[tuple[str, weakref.ref[Any]]]]
    written: dict[str, str]

    def sleep(self, thread: RankThread[Any], original: Callable[[float], None], seconds: float) -> None:
        """Let virtual time pass on the calling rank."""

    def set_handler(self, rank: int, handler: Any) -> Any:
        """Set a rank's handler of SIGTERM, and return the one before."""

    def is_full(self, rank: int) -> bool:
        """Whether the disk of a rank is full."""


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


@contextmanager
def guard_process(program: GuardedProgram) -> Iterator[None]:
    """Emulate or refuse calls of a program that would change its process, in the threads of ranks."""
    finder = _CommunicationFinder()
    patches = Patches(RankThread.current)
    patches.replace(os, "fork", _refuse(_FORKS))
    patches.replace(overlap, "run", _refuse(_RUNS))
    patches.replace(overlap, "run_async", _refuse(_RUNS))
    for module in (builtins, io):
        patches.replace(module, "open", partial(_open_and_record, program))
    patches.replace(torch, "save", partial(_save_unless_full, program))
    patches.replace(signal, "signal", partial(_set_signal, program))
    patches.replace(torch.multiprocessing, "spawn", _spawn_in_place)
    patches.replace(torch.cuda, "is_available", lambda thread, original: False)
    patches.replace(torch.cuda.nccl, "version", lambda thread, original: (0, 0, 0))
    patches.replace(time, "sleep", program.sleep)
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


def _open_and_record(
    program: GuardedProgram, thread: Thread, original: Original, file: Any, mode: str = "r", *args: Any, **keywords: Any
) -> Any:
    """Open a file; note it if it is written, for a rank that leaves it open."""
    writes, rank = any(letter in mode for letter in "wax+"), thread.rank.rank
    if writes:
        _record_writer(program, thread, file)
    stream = original(file, mode, *args, **keywords)
    if writes:
        program.opened.setdefault(rank, []).append((str(file), weakref.ref(stream)))
    return stream


def _save_unless_full(
    program: GuardedProgram, thread: Thread, original: Original, value: Any, file: Any, *args: Any, **keywords: Any
) -> Any:
    """Save a value by `torch.save`, unless the disk of the rank is full."""
    _record_writer(program, thread, file)
    return original(value, file, *args, **keywords)


def _record_writer(program: GuardedProgram, thread: Thread, file: Any) -> None:
    """Note which rank writes a file, and where, for a rank that misses it; fail if a fault has filled its disk."""
    if program.is_full(rank := thread.rank.rank):
        reason = f"a fault of this test has filled the disk of rank {rank}: handle it as on a full disk"
        raise OSError(errno.ENOSPC, f"No space left on device ({reason})", str(file))
    if isinstance(file, (str, os.PathLike)):
        late = f"; rank {thread.rank.rank} writes it later, at {thread.line_now()}"
        program.written[os.path.abspath(file)] = f"{late}: wait for that, by a barrier for example"


def _set_signal(program: GuardedProgram, thread: Thread, original: Original, number: int, handler: Any) -> Any:
    """Set the rank's handler of SIGTERM; ignore handlers of other signals."""
    return program.set_handler(thread.rank.rank, handler) if number == signal.SIGTERM else None


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

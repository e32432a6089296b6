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
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.cuda.nccl
import torch.distributed.rpc
import torch.multiprocessing

import overlap

from ..errors import UsageError
from . import torch_saves
from .threads import RankThread, UntestableError, owning_threads

# Communication that we cannot see: its ranks would be those of this one process.
_FOREIGN = {"mpi4py": "mpi4py", "horovod": "Horovod", "deepspeed": "DeepSpeed", "oneccl_bindings_for_pytorch": "oneCCL"}


class GuardedProgram(Protocol):
    """Program with all ranks in this process, as its guards see it; see `programs`."""

    opened: dict[int, list[tuple[str, weakref.ref[Any]]]]

    def sleeping(self, original: Callable[[float], None], seconds: float) -> None:
        """Let virtual time pass on the rank that calls."""

    def handle(self, rank: int, handler: Any) -> Any:
        """Take in a rank's handler of SIGTERM, and return the one before."""

    def is_full(self, rank: int) -> bool:
        """Whether the disk of a rank is full."""


class _Refusing(MetaPathFinder):
    """Refuses communication that is not PyTorch's."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Raise for a module that communicates."""
        if name in _FOREIGN and RankThread.here() is not None:
            raise UntestableError(
                f"the program communicates by {_FOREIGN[name]}, whose ranks are processes; in a test only "
                "torch.distributed can have many ranks in one process"
            )
        return None


@contextmanager
def guarded(program: GuardedProgram) -> Iterator[None]:
    """Emulate or refuse calls of a program that would change its process, in the threads of ranks."""
    finder = _Refusing()
    put = _Patches()
    put(os, "fork", _refuse_fork)
    put(overlap, "run", _refuse_run)
    put(overlap, "run_async", _refuse_run)
    put(builtins, "open", _opening(program))
    put(io, "open", _opening(program))
    put(torch, "save", _saving(program))
    put(signal, "signal", _handling(program))
    put(torch.multiprocessing, "spawn", _spawned)
    put(torch.cuda, "is_available", lambda original: False)
    put(torch.cuda.nccl, "version", lambda original: (0, 0, 0))
    put(time, "sleep", program.sleeping)
    if torch.distributed.rpc.is_available():
        put(torch.distributed.rpc, "init_rpc", _refuse_rpc)
    put(ThreadPoolExecutor, "submit", torch_saves.submitted)
    put.stack.enter_context(owning_threads())
    with put.stack:
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


class _Patches:
    """Functions that are replaced in the threads of ranks."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def __call__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            if RankThread.here() is None:
                return original(*args, **more)
            return replacement(original, *args, **more)

        call.__name__, call.__doc__ = name, original.__doc__
        self.stack.enter_context(patch.object(owner, name, call))


def _refuse_run(original: Callable[..., Any], *args: Any, **more: Any) -> None:
    raise UntestableError(
        "the program starts ranks of its own by overlap.run; test its async function: "
        "`ranks.run(main, ranks=4)` or @pytest.mark.ranks(4)"
    )


def _refuse_fork(original: Callable[..., Any]) -> int:
    raise UntestableError(
        "the program forks, and a fork of this process would have all ranks; load data in the program's own "
        "process (num_workers=0)"
    )


def _refuse_rpc(original: Callable[..., Any], *args: Any, **more: Any) -> None:
    raise UntestableError(
        "the program communicates by torch.distributed.rpc, whose threads and sockets a test has no part in; test what "
        "its functions compute, or send by torch.distributed"
    )


def _opening(program: GuardedProgram) -> Callable[..., Any]:
    def opened(original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        writes, here = any(letter in mode for letter in "wax+"), RankThread.here()
        _check_disk(program, writes, file)
        made = original(file, mode, *args, **more)
        if writes and here is not None:
            program.opened.setdefault(here.rank.rank, []).append((str(file), weakref.ref(made)))
        return made

    return opened


def _saving(program: GuardedProgram) -> Callable[..., Any]:
    def saved(original: Callable[..., Any], value: Any, file: Any, *args: Any, **more: Any) -> Any:
        _check_disk(program, True, file)
        return original(value, file, *args, **more)

    return saved


def _check_disk(program: GuardedProgram, writes: bool, file: Any) -> None:
    here = RankThread.here()
    if writes and here is not None and program.is_full(here.rank.rank):
        raise OSError(errno.ENOSPC, "No space left on device (a fault of this test)", str(file))


def _handling(program: GuardedProgram) -> Callable[..., Any]:
    def handled(original: Callable[..., Any], number: int, handler: Any) -> Any:
        here = RankThread.here()
        assert here is not None
        return program.handle(here.rank.rank, handler) if number == signal.SIGTERM else None

    return handled


def _spawned(
    original: Callable[..., Any], fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, **options: Any
) -> None:
    thread = RankThread.here()
    assert thread is not None
    if nprocs != thread.rank.world_size:
        raise UsageError(
            f"ranks: the program spawns {nprocs} processes, and the test has {thread.rank.world_size} ranks; pass "
            f"ranks={nprocs}"
        )
    fn(thread.rank.rank, *args)  # every rank of the test calls this: each becomes one of the processes

"""The process as each rank's program sees it: environment, arguments, modules, output, random numbers, directory.

One rank runs at a time. Whenever another rank goes on, this state of the process is exchanged. So each program finds
the state that it would have in a process of its own: its `RANK`, its `__main__`, its random numbers.
"""

from __future__ import annotations

import ctypes
import io
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import UsageError
from .folders import VENV_MARK
from .hashing import make_set_type

# Characters of a rank's output that are kept; further ones are only counted.
_KEPT_CHARACTERS = 100_000


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Print a warning, in place of `warnings.showwarning`; if a rank prints it, add it to `Output.warnings`."""
    out, text = file or sys.stderr, warnings.formatwarning(message, category, filename, lineno, line)
    if isinstance(out, Output):
        out.warnings[text] = None
    out.write(text)


class Output(io.TextIOBase):
    """Output of a rank: its first `_KEPT_CHARACTERS` characters are kept.

    Attributes:
        left_out: Number of further characters.
        warnings: The warnings in the output, each once, as keys.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left = _KEPT_CHARACTERS
        self.left_out: int = 0
        self.warnings: dict[str, None] = {}

    def writable(self) -> bool:
        """Return True: the rank can print."""
        return True

    def write(self, text: str) -> int:
        """Keep a text, up to the limit of characters; return its length."""
        room = text[: self._left]
        self._parts.append(room)
        self._left -= len(room)
        self.left_out += len(text) - len(room)
        return len(text)

    def getvalue(self) -> str:
        """Return the kept text; if characters were left out, with a last line "... and N more characters"."""
        more = f"\n... and {self.left_out} more characters\n" if self.left_out else ""
        return "".join(self._parts) + more


_CLONE_FS = 0x200  # flag of Linux's `unshare`: a working directory for the calling thread alone
_THREAD = threading.local()

Exchange = Callable[[], Callable[[], None]]
"""Saves some state of the process, and returns a function that restores it."""


class RankProcess:
    """State of the process as one rank sees it.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        argv: Arguments of the program.
        seed: Seed of the rank's random numbers.
        cwd: Working directory of the rank at first.
        folder: The rank loads modules from this folder for itself, except installed ones; None: all modules are shared.
        more: Further states of the process to exchange.

    Attributes:
        output: Output of the rank, standard error included.
        main: Module `__main__` of the rank.
        set_type: Type of the rank's sets, whose order differs from that of other ranks.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        argv: Sequence[str],
        seed: int,
        cwd: str,
        folder: str | None = None,
        more: Sequence[Exchange] = (),
    ) -> None:
        self.output: Output = Output()
        self.main: ModuleType = ModuleType("__main__")
        self.main.__dict__["__builtins__"] = __builtins__
        self.set_type: type[set[Any]] = make_set_type(seed, rank)
        self._folder, self._exchanges = folder, more
        self._environ = _rank_environment(rank, world_size)
        self._argv = list(argv)
        generator = random.Random(f"{seed}, rank {rank}")
        self._python_random = generator.getstate()
        self._numpy_random = np.random.RandomState(generator.getrandbits(32)).get_state()
        self._own_modules: dict[str, ModuleType] = {"__main__": self.main}
        self._cwd = cwd
        # For each of `more`, the function that restores this rank's state; None: the rank has not run yet.
        self._restoring: list[Callable[[], None]] | None = None
        self._restore_outside: Callable[[], None] | None = None  # undoes `enter_rank`; None outside of the rank

    def enter_rank(self) -> None:
        """Set the process to the state of this rank, until `restore_process`."""
        before, has_own_folder = _Process(), _separate_working_folder()
        hidden = {name: sys.modules.get(name) for name in self._own_modules}
        states = [exchange() for exchange in self._exchanges]
        modules = set(sys.modules)
        os.environ._data = self._environ  # type: ignore[attr-defined]
        sys.argv, sys.stdout, sys.stderr = self._argv, self.output, self.output
        random.setstate(self._python_random)
        np.random.set_state(self._numpy_random)
        sys.modules.update(self._own_modules)
        if before.cwd != self._cwd:
            os.chdir(self._cwd)
        for restore in self._restoring or ():
            restore()

        def restore_outside() -> None:
            """Save the state of this rank, and set the process to its state before `enter_rank`."""
            self._argv, self._cwd = sys.argv, os.getcwd()
            self._python_random, self._numpy_random = random.getstate(), np.random.get_state()
            self._restoring = [exchange() for exchange in self._exchanges]
            self._keep_own_modules(modules)
            for name in self._own_modules:
                module = hidden.get(name)
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module
            for restore in states:
                restore()
            before.restore(folder=not has_own_folder)

        self._restore_outside = restore_outside

    def restore_process(self) -> None:
        """Save the state of this rank, and undo `enter_rank`; do nothing if `enter_rank` was not called."""
        if self._restore_outside is not None:
            restore, self._restore_outside = self._restore_outside, None
            restore()

    def _keep_own_modules(self, loaded_before: set[str]) -> None:
        """Add modules that the rank has loaded from the program's folder, since `enter_rank`, to its own modules."""
        if self._folder is None or len(sys.modules) == len(loaded_before):
            return
        for name in set(sys.modules) - loaded_before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and _is_program_module(os.path.abspath(file), self._folder):
                self._own_modules[name] = sys.modules[name]


def _is_program_module(file: str, folder: str) -> bool:
    """Whether the module in a file is part of the program: below its folder, and not an installed one."""
    if not file.startswith(folder):
        return False
    prefixes = {prefix for prefix in (sys.prefix, sys.base_prefix) if f"{prefix}{os.sep}".startswith(folder)}
    parent = os.path.dirname(file)
    while f"{parent}{os.sep}" != folder and parent not in prefixes and not _has_installed_modules(parent):
        parent = os.path.dirname(parent)
    return f"{parent}{os.sep}" == folder


@cache
def _has_installed_modules(folder: str) -> bool:
    """Whether a folder is a virtual environment, or a folder into which package managers install modules."""
    named = os.path.basename(folder) in ("site-packages", "dist-packages")
    return named or os.path.exists(os.path.join(folder, VENV_MARK))


class _Process:
    """State of the process outside of ranks, which is saved when this object is made; without random numbers."""

    def __init__(self) -> None:
        self.cwd = os.getcwd()
        self._environ = os.environ._data  # type: ignore[attr-defined]
        self._arguments_and_output = sys.argv, sys.stdout, sys.stderr

    def restore(self, *, folder: bool = True) -> None:
        """Restore environment, arguments and output; with `folder`, the working directory, too."""
        os.environ._data = self._environ  # type: ignore[attr-defined]
        sys.argv, sys.stdout, sys.stderr = self._arguments_and_output
        if folder and os.getcwd() != self.cwd:
            os.chdir(self.cwd)


def _separate_working_folder() -> bool:
    """Give this thread, and threads that it starts, a working directory of their own; return whether that was possible.

    Threads that a program starts, such as those that write a checkpoint, run at any time, also while another rank has
    the process.
    """
    if not hasattr(_THREAD, "has_own_folder"):
        unshare = getattr(ctypes.CDLL(None), "unshare", None)
        _THREAD.has_own_folder = unshare is not None and unshare(_CLONE_FS) == 0
    return bool(_THREAD.has_own_folder)


def _rank_environment(rank: int, world_size: int) -> Any:
    """Return the environment that torchrun would give a rank, in the internal form of `os.environ._data`."""
    if not hasattr(os.environ, "_data"):
        raise UsageError(
            "ranks: this version of Python keeps the environment in an unknown way; use CPython 3.11 to 3.14"
        )
    variables: Mapping[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    encode: Callable[[str], Any] = os.environ.encodekey
    return {**os.environ._data, **{encode(name): encode(str(value)) for name, value in variables.items()}}


@contextmanager
def restoring_process() -> Iterator[None]:
    """Restore the process after a `with` block.

    That is: environment, working directory, search path, random numbers, warnings, exception hook, signal handlers.
    """
    import signal

    before, environ, path, hook = _Process(), dict(os.environ), list(sys.path), sys.excepthook
    numbers = random.getstate(), np.random.get_state()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as outside of tests, which may turn warnings into errors
        warnings.showwarning = _show_warning
        try:
            yield
        finally:
            before.restore()
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])
            for name in set(os.environ) - set(environ):
                del os.environ[name]
            os.environ.update(environ)
            sys.path[:], sys.excepthook = path, hook  # torch sets a hook that adds the rank to tracebacks
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)

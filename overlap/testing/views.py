"""The process as each rank's program sees it: environment, arguments, modules, output, random numbers, directory.

One rank runs at a time. What belongs to a process is exchanged whenever another rank goes on, so that a program finds
what it would find in a process of its own: its `RANK`, its `__main__`, the state of its random generators.
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

# Characters of a rank's output that are kept; what comes after them is counted.
_KEPT_CHARACTERS = 100_000


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Show a warning, and note it in the output of a rank."""
    out, text = file or sys.stderr, warnings.formatwarning(message, category, filename, lineno, line)
    if isinstance(out, Output):
        out.warnings[text] = None
    out.write(text)


class Output(io.TextIOBase):
    """First part of a rank's output; `left_out` characters came after it.

    Attributes:
        warnings: The warnings in it, each once.
    """

    left_out: int
    warnings: dict[str, None]

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left, self.left_out = _KEPT_CHARACTERS, 0
        self.warnings = {}

    def writable(self) -> bool:
        """Return True: the rank can print."""
        return True

    def write(self, text: str) -> int:
        """Save a text, up to the limit of characters."""
        room = text[: self._left]
        self._parts.append(room)
        self._left -= len(room)
        self.left_out += len(text) - len(room)
        return len(text)

    def getvalue(self) -> str:
        """Return the saved text."""
        more = f"\n... and {self.left_out} more characters\n" if self.left_out else ""
        return "".join(self._parts) + more


_CLONE_FS = 0x200  # of Linux
_THREAD = threading.local()

Exchange = Callable[[], Callable[[], None]]
"""Returns a function that restores the present value of something."""


class RankProcess:
    """The process of one rank.

    Args:
        seed: Seed of its random numbers.
        cwd: Its working directory at first.
        folder: Modules that are loaded from it are the rank's own, except installed ones; None: all modules are shared.
        more: Further states of the process: each returns a function that restores it as it is now.
        world_size: Number of ranks.
        argv: Arguments of the program.

    Attributes:
        output: What it prints, standard error included.
        main: Its module `__main__`.
        set_type: The type of its sets, whose order differs from those of other ranks.
    """

    output: Output
    main: ModuleType

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
        self.output, self.main = Output(), ModuleType("__main__")
        self.main.__dict__["__builtins__"] = __builtins__
        self.set_type: type[set[Any]] = make_set_type(seed, rank)
        self._folder, self._more = folder, more
        self._environ = _rank_environment(rank, world_size)
        self._argv = list(argv)
        self._python, self._numpy = _random_states(f"{seed}, rank {rank}")
        self._own: dict[str, ModuleType] = {"__main__": self.main}
        self._cwd = cwd
        self._restoring: list[Callable[[], None]] | None = None  # of `more`; None: as the process was at first
        self._outside: Callable[[], None] | None = None

    def enter(self) -> None:
        """Set the process to the state of this rank, and keep the function that undoes it for `leave`."""
        before, has_own_folder = _Process(), _has_own_folder()
        hidden = {name: sys.modules.get(name) for name in self._own}
        states = [exchange() for exchange in self._more]
        modules = set(sys.modules)
        os.environ._data = self._environ  # type: ignore[attr-defined]
        sys.argv, sys.stdout, sys.stderr = self._argv, self.output, self.output
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        sys.modules.update(self._own)
        if before.cwd != self._cwd:
            os.chdir(self._cwd)
        for restore in self._restoring or ():
            restore()

        def leave() -> None:
            """Save the state of this rank, and set the process to its state before `enter`."""
            self._argv, self._cwd = sys.argv, os.getcwd()
            self._python, self._numpy = random.getstate(), np.random.get_state()
            self._restoring = [exchange() for exchange in self._more]
            self._claim_modules(modules)
            for name in self._own:
                module = hidden.get(name)
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module
            for restore in states:
                restore()
            before.restore(folder=not has_own_folder)

        self._outside = leave

    def leave(self) -> None:
        """Save the changes of the rank, and restore the process."""
        if self._outside is not None:
            outside, self._outside = self._outside, None
            outside()

    def _claim_modules(self, loaded_before: set[str]) -> None:
        """Store the modules that the rank has loaded from the program's folder as the rank's own."""
        if self._folder is None or len(sys.modules) == len(loaded_before):
            return
        for name in set(sys.modules) - loaded_before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and _is_own(os.path.abspath(file), self._folder):
                self._own[name] = sys.modules[name]


def _is_own(file: str, folder: str) -> bool:
    """Whether a module is part of the program: below its folder, and not installed there."""
    if not file.startswith(folder):
        return False
    prefixes = {prefix for prefix in (sys.prefix, sys.base_prefix) if f"{prefix}{os.sep}".startswith(folder)}
    parent = os.path.dirname(file)
    while f"{parent}{os.sep}" != folder and parent not in prefixes and not _has_installed_modules(parent):
        parent = os.path.dirname(parent)
    return f"{parent}{os.sep}" == folder


@cache
def _has_installed_modules(folder: str) -> bool:
    """Whether a folder is a virtual environment, or one in which package managers install modules."""
    named = os.path.basename(folder) in ("site-packages", "dist-packages")
    return named or os.path.exists(os.path.join(folder, VENV_MARK))


class _Process:
    """The process outside of all ranks; its random numbers are restored when the run is over."""

    def __init__(self) -> None:
        self.cwd = os.getcwd()
        self._environ = os.environ._data  # type: ignore[attr-defined]
        self._rest = sys.argv, sys.stdout, sys.stderr

    def restore(self, *, folder: bool = True) -> None:
        """Restore environment, arguments and output, and the current folder where threads share it."""
        os.environ._data = self._environ  # type: ignore[attr-defined]
        sys.argv, sys.stdout, sys.stderr = self._rest
        if folder and os.getcwd() != self.cwd:
            os.chdir(self.cwd)


def _has_own_folder() -> bool:
    """Give this thread, and threads that it starts, a current folder of their own; False where none can have one.

    Threads of a program, such as those that write a checkpoint, run when they like: also while other ranks have theirs.
    """
    if not hasattr(_THREAD, "has_own_folder"):
        unshare = getattr(ctypes.CDLL(None), "unshare", None)
        _THREAD.has_own_folder = unshare is not None and unshare(_CLONE_FS) == 0
    return bool(_THREAD.has_own_folder)


def _rank_environment(rank: int, world_size: int) -> Any:
    """Return the environment that torchrun would give a rank, in the form that `os.environ` keeps."""
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


def _random_states(seed: str) -> tuple[Any, Any]:
    generator = random.Random(seed)
    return generator.getstate(), np.random.RandomState(generator.getrandbits(32)).get_state()


@contextmanager
def process_restored() -> Iterator[None]:
    """Leave the process as it was: environment, directory, search path, random numbers, filters of warnings, hooks."""
    import signal

    before, environ, path, hook = _Process(), dict(os.environ), list(sys.path), sys.excepthook
    numbers = random.getstate(), np.random.get_state()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a process of the program's own, whatever the tests make of warnings
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
            sys.path[:], sys.excepthook = path, hook  # torch prefixes tracebacks with the rank
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)

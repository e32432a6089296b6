"""Processes that read the files of a job, two at a time: `python -m overlap.timeline.files.children FUNCTION PIPE PID`.

They run this module, not the caller's script, which may call `overlap.why` without `if __name__ == "__main__"`. Each
process reads many files, one after the other, as its start takes as long as reading 100 MB.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TypeVar, cast

from ...errors import UsageError
from .packed import unpacking

SMALL_BYTES = 16 << 20
"""Files with at most this many bytes together are read in this process: that is quicker than starting others."""
MAX_PROCESSES = 2
"""Processes at a time; each may need more memory than its largest file has text."""
_LOOK_S = 0.2  # time between two looks of a child at its parent
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 28), "MALLOC_TRIM_THRESHOLD_": str(1 << 29)}
"""Settings of malloc: it keeps the memory of each piece of text for the next; freeing it costs a sixth of the time."""

Progress = Callable[[int, int], None]
"""Called with the number of files that are read, and of all files."""


T = TypeVar("T")


def read_files(
    read: Callable[[Path], T], files: Sequence[Path], *, progress: Progress | None = None
) -> list[T | UsageError]:
    """Read each file with a function, in up to `MAX_PROCESSES` processes, which have ended when this returns or raises.

    A single file, and files with at most `SMALL_BYTES` together, are read in this process.

    Args:
        read: A function at the top level of a module, which processes import. It returns an object that can be pickled,
            or raises `UsageError`.
        files: The files.
        progress: Called before each file that is read here, or after each file that another process has read.

    Returns:
        For each file, in the order of `files`, the result of `read` or the `UsageError` that it raised.

    Raises:
        UsageError: A process ended before it had read its file.
    """
    nbytes = sum(file.stat().st_size for file in files if file.exists())
    if len(files) < 2 or nbytes <= SMALL_BYTES or not sys.executable:
        found = []
        for number, file in enumerate(files):
            if progress is not None:
                progress(number, len(files))
            found.append(_read_or_return_error(read, file))
        return found
    children = dict[Connection, subprocess.Popen[bytes]]()  # by the pipe to each
    reading = dict[Connection, int]()  # number of the file that the process at the other end of a pipe reads
    results = dict[int, T | UsageError]()  # by the number of the file

    def receive_result() -> Connection:
        """Wait for the next result, and return the pipe to its process, which is idle then."""
        pipe = cast("Connection", wait(reading)[0])
        number = reading.pop(pipe)
        try:
            results[number], unpacked_bytes = pipe.recv()
        except (OSError, EOFError) as error:
            raise UsageError(
                f"the process that read {files[number]} ended with {children[pipe].wait()}, perhaps for lack of "
                "memory; name fewer files"
            ) from error
        unpacking.count_bytes(unpacked_bytes)
        if progress is not None:
            progress(len(results) - 1, len(files))
        return pipe

    try:
        for number, file in enumerate(files):
            if number < MAX_PROCESSES:
                pipe, child_end = Pipe()
                with child_end:
                    descriptor = child_end.fileno()
                    function, numbers = f"{read.__module__}:{read.__name__}", map(str, (descriptor, os.getpid()))
                    command = [sys.executable, "-m", __name__, function, *numbers]
                    env = os.environ | _ENVIRONMENT
                    children[pipe] = subprocess.Popen(
                        command, pass_fds=[descriptor], env=env, stdout=subprocess.DEVNULL
                    )
            else:
                pipe = receive_result()
            with suppress(OSError):  # the process has ended: `receive_result` reports that
                pipe.send(file)
            reading[pipe] = number
        while reading:
            receive_result()
        return [results[number] for number in range(len(files))]
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def _read_or_return_error(read: Callable[[Path], T], file: Path) -> T | UsageError:
    """Return the result of `read` for a file, or the `UsageError` that it raises."""
    try:
        return read(file)
    except UsageError as refusal:
        return refusal


def _read_files_from_pipe(function: str, pipe_number: str, parent: str) -> None:
    """Read each file whose path arrives in a pipe, and send back (result, unpacked bytes), until the parent ends.

    `function` is "module:name" of the function that reads; the others are a descriptor and a process id.
    """
    # An interrupt ends this process without a traceback; the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_after_parent, args=(int(parent),), daemon=True).start()
    gc.disable()  # data of files has no cycles, and a search for them takes a quarter of the time
    module, _, name = function.partition(":")
    read = getattr(import_module(module), name)
    with Connection(int(pipe_number)) as pipe, suppress(EOFError):
        while True:
            unpacking.nbytes = 0
            result = _read_or_return_error(read, pipe.recv())
            try:
                pipe.send((result, unpacking.nbytes))
            except (BrokenPipeError, ConnectionResetError):  # the parent has ended
                return
            del result  # free its memory before the next file is read


def _end_after_parent(parent: int) -> None:
    """Wait until the process `parent` has ended, then end this process at once. Runs in a thread."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    # Imported by name: classes of `__main__` could not be unpickled by the parent.
    from overlap.timeline.files.children import _read_files_from_pipe as main

    main(*sys.argv[1:])

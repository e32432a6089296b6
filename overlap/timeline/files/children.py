"""Processes that read the files of a job, two at a time: `python -m overlap.timeline.files.children FUNCTION FILE ...`.

They run a module of their own, and not the caller's script, which may call `overlap.why` without a guard.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ...errors import UsageError
from .packed import unpacking

SMALL_BYTES = 16 << 20
"""Files that together have fewer bytes are read faster than processes start."""
MAX_PROCESSES = 2
"""Each needs some 200 MB for 250 MB of text."""
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 28), "MALLOC_TRIM_THRESHOLD_": str(1 << 29)}
"""Pieces of text are of one size: memory that is given back for each costs a sixth of the time."""

Progress = Callable[[int, int], None]
"""Called with how many files are read, and how many there are."""


T = TypeVar("T")


def read_files(
    read: Callable[[Path], T], batches: Sequence[Sequence[Path]], *, progress: Progress | None = None
) -> list[T | UsageError]:
    """Return what a function reads from each file, or its refusal, in the order of the batches.

    Each batch has a process of its own, which ends with this call whatever ends it. One file is read in this process,
    and so are files that together have at most `SMALL_BYTES`.

    Raises:
        UsageError: A process has ended before it had read its files.
    """
    files = [file for batch in batches for file in batch]
    nbytes = sum(file.stat().st_size for file in files if file.exists())
    if len(files) < 2 or nbytes <= SMALL_BYTES or not sys.executable:
        found = []
        for number, file in enumerate(files):
            if progress is not None:
                progress(number, len(files))
            found.append(_read_or_refusal(read, file))
        return found
    children: list[subprocess.Popen[bytes]] = []
    pool = ThreadPoolExecutor(MAX_PROCESSES)
    try:
        function = f"{read.__module__}:{read.__name__}"
        results = [pool.submit(_read_in_child, function, batch, children) for batch in batches]
        for number, _ in enumerate(as_completed(results)):
            if progress is not None:
                progress(number, len(batches))
        return [each for result in results for each in result.result()]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()
        pool.shutdown()


def _read_in_child(function: str, files: Sequence[Path], children: list[subprocess.Popen[bytes]]) -> list[Any]:
    """Run a process that reads files with a function; return its results. The process is added to `children`."""
    command = [sys.executable, "-m", __name__, function, *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | _ENVIRONMENT) as child:
        children.append(child)
        data, _ = child.communicate()
    if child.returncode:
        raise UsageError(
            f"why: the process that read {files[0]} ended with {child.returncode}, perhaps for lack of memory; "
            "name fewer files"
        )
    results: list[Any]
    results, unpacked_bytes = pickle.loads(data)  # of our own child
    unpacking.add(unpacked_bytes)
    return results


def _read_or_refusal(read: Callable[[Path], T], file: Path) -> T | UsageError:
    try:
        return read(file)
    except UsageError as refusal:
        return refusal


def _write_results(function: str, files: Sequence[str]) -> None:
    """Read files with a function, and write the pickled results to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # data of files has no cycles, and a search for them takes a quarter of the time
    module, _, name = function.partition(":")
    results = [_read_or_refusal(getattr(import_module(module), name), Path(file)) for file in files]
    sys.stdout.buffer.write(pickle.dumps((results, unpacking.nbytes)))


if __name__ == "__main__":
    # by the name of the module, so that reports are of classes that the parent has
    from overlap.timeline.files.children import _write_results as main

    main(sys.argv[1], sys.argv[2:])

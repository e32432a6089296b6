"""Folder of a launcher in the memory of the host. If the launcher is killed, the next one removes it.

A launcher has a lock on its folder, which the kernel opens at its end. A process id would not do: a container may share
the memory of the host, and not its processes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Folder of the system whose files are in memory; without it, folders are where temporary files are.
_MEMORY = Path("/dev/shm")


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Make a folder for the length of the block, and remove those of launchers that have ended without doing so."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for folder in memory.glob("witness-*.locked"):
        with suppress(OSError):  # its launcher lives, or it belongs to another user
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
    folder = memory / f"witness-{os.getpid()}-{secrets.token_hex(8)}.locked"
    draft = folder.with_suffix(".draft")  # others would take a folder without a lock for that of a dead launcher
    draft.mkdir(mode=0o700)
    lock = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)

"""Folder of a launcher in the memory of the host. If the launcher is killed, the next one removes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..kernel_facts import ProcessState, process_identity, process_state

#: Folder of the system whose files are in memory. On systems without it, the folder for temporary files is used.
_MEMORY = Path("/dev/shm")
_OWNER = "launcher"  # file with the identity of the launcher, which no process of another kernel or container has


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Make a folder in memory for the length of the block, and remove folders of launchers that were killed."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for folder in memory.glob("witness-*"):
        with suppress(OSError):  # another launcher makes or removes the folder now, or it belongs to another user
            if process_state((folder / _OWNER).read_text()) is ProcessState.GONE:
                shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"witness-{os.getpid()}-", dir=memory))
    try:
        with suppress(OSError):  # the memory is full: the first use of the folder raises the error
            (folder / _OWNER).write_text(process_identity())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

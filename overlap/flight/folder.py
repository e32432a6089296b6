"""Folders and names of flight records: which of them stay, and for how long.

A record is a file from the start of a world: memory that is mapped to it outlives the process, however that ends. When
the world has ended well it is removed; else it stays, until the folder has many newer ones. They lie in
`OVERLAP_FLIGHT_DIR`, where nothing is ever cleared away, or in a folder of the user's own among the temporary files. In
that folder is a link to each record elsewhere as long as its world lives, so that `overlap top` finds all.
"""

from __future__ import annotations

import os
import platform
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from mmap import mmap
from pathlib import Path
from time import time_ns

from ..kernel_facts import exists, start_ticks
from ..notice import notify
from .layout import file_bytes
from .recorder import Writer

ENDING = ".flight"
# In the default folder: 40 MB, where each has two ranks; and how many are left when there are so many.
MOST_FILES, KEPT_FILES = 128, 96

_HOST_CHARACTERS = 100  # of a host's name in a record, at most
_TEXT_CHARACTERS = 200  # of a path in a record, at most: the start of a record has little room

_open: dict[Path, FlightFile] = {}
_unwritable: set[str] = set()  # of which the user has been told


class FlightFile:
    """A flight record while its world lives.

    Args:
        memory: The file, mapped.

    Attributes:
        path: Where it is.
        writer: Writes into it.
    """

    path: Path
    writer: Writer

    def __init__(self, path: Path, memory: mmap, writer: Writer) -> None:
        self.path, self.writer, self._memory = path, writer, memory
        self._link: Path | None = None
        _open[path] = self

    def link(self, folder: Path) -> None:
        """Link the record into another folder while it is open; nothing happens if that fails."""
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_owner(folder)
            _remove_old_records(folder)
            link = folder / self.path.name
            link.symlink_to(self.path.absolute())
            self._link = link

    def close(self, *, keep: bool) -> None:
        """Stop recording, and remove the file unless `keep` is set. Later calls do nothing."""
        if _open.pop(self.path, None) is None:
            return
        self.writer.close()
        self._memory.close()
        for path in [*([self._link] if self._link else []), *([] if keep else [self.path])]:
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):  # there are others in it
                path.parent.rmdir()


def open_records() -> list[Path]:
    """Return the paths of the flight records of worlds that run in this process; `overlap why` reads them."""
    return sorted(_open)


def default_folder() -> Path:
    """Return the folder of flight records when no setting names one."""
    return Path(tempfile.gettempdir(), f"overlap-flight-{os.getuid()}")


def open_flight(
    folder: str | os.PathLike[str] | None, name: str, ranks: Sequence[int], start: Mapping[str, object]
) -> FlightFile | None:
    """Create a flight record; if it cannot be written, print a line for the user, and return None.

    Args:
        folder: Where it lies; None: in the default folder.
        name: Name of the file, without its ending; no other record has it.
        ranks: World ranks of this process.
        start: The start of the record, see `reading.Flight`.
    """
    where = Path(folder) if folder is not None else default_folder()
    try:
        where.mkdir(mode=0o700, parents=folder is not None, exist_ok=True)
        if folder is None:
            _check_owner(where)
            _remove_old_records(where)
        try:
            file = _create(where / f"{name}{ENDING}", ranks, start)
        except FileNotFoundError:  # another run has just ended, and removed the empty folder
            where.mkdir(mode=0o700, exist_ok=True)
            file = _create(where / f"{name}{ENDING}", ranks, start)
    except OSError as error:
        if str(where) not in _unwritable:
            _unwritable.add(str(where))
            notify(f"no flight record: {where}: {error.strerror}; OVERLAP_FLIGHT_DIR names another folder")
        return None
    if folder is not None:
        file.link(default_folder())
    return file


def _create(path: Path, ranks: Sequence[int], start: Mapping[str, object]) -> FlightFile:
    """Create the file of a flight record, with its full size on the disk."""
    size = file_bytes(len(ranks))
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):  # a store into a hole of a file kills the process where the disk is full
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
        memory = mmap(descriptor, size)
    except (OSError, ValueError):
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return FlightFile(path, memory, Writer(memory, ranks, start))


def _check_owner(folder: Path) -> None:
    """Refuse a path that is no folder of this user."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(None, "it is not a folder of this user")


def _remove_old_records(folder: Path) -> None:
    """Remove the oldest records of processes that have ended, if there are many."""
    if len(os.listdir(folder)) < MOST_FILES:
        return
    files = [entry for entry in os.scandir(folder) if entry.name.endswith(ENDING)]
    with suppress(FileNotFoundError):  # another process clears away as well
        ages = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in files)
        for _, path in ages[: max(0, len(files) - KEPT_FILES)]:
            if not _may_live(path):
                os.unlink(path)


def _may_live(path: str) -> bool:
    """Whether the world of a file may still live: in this process, or in the process whose id the name has."""
    pid = path.removesuffix(ENDING).rpartition("-")[2]
    if pid == str(os.getpid()):
        return Path(path) in _open
    return pid.isdecimal() and exists(pid)


_worlds = count()
"""A program may run several worlds, one after the other."""


def restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often this job has been restarted; 0 in the first attempt, or if the launcher does not count."""
    restarts = environ.get("OVERLAP_RESTART") or environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    return int(restarts) if restarts.isdecimal() else 0


def describe_start(
    *, job: str | None, restart: int, process: int, processes: int, world_size: int, script: str
) -> tuple[str, dict[str, object]]:
    """Return the file name and the start of the next flight record of this process.

    Args:
        job: Name of the job; None: this process is a world of its own.
        restart: How often it has been started before.
        process: Index of this process.
        processes: How many there are.
        world_size: Ranks in the world.
        script: The program.
    """
    pid, world = os.getpid(), next(_worlds)
    fields: dict[str, object] = {
        "job": job or f"process-{pid}-{time_ns() // 1_000_000}",
        "attempt": restart,
        "world": world,
        "process": process,
        "processes": processes,
        "world_size": world_size,
        "host": platform.node()[:_HOST_CHARACTERS],
        "pid": pid,
        "born": start_ticks(pid),
        "script": script[-_TEXT_CHARACTERS:],
        "folder": working_folder(),
    }
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in str(fields["job"]))
    return f"{plain}-attempt{restart}-world{world}-process{process}-{pid}", fields


def working_folder() -> str:
    """Return the last `_TEXT_CHARACTERS` of the working directory of this process; "" if it was removed."""
    with suppress(OSError):
        return os.getcwd()[-_TEXT_CHARACTERS:]
    return ""


def runs(host: str, pid: int, since: str) -> bool:
    """Whether the process of a record runs on this machine; False if the system does not show that."""
    return bool(since) and host == platform.node()[:_HOST_CHARACTERS] and start_ticks(pid) == since

"""Folders and names of flight records: which of them stay, and for how long.

Each process of a world writes one record, a mapped file. What was stored stays in the file however the process ends.
When the world has ended well the record is removed; otherwise it stays, until the folder has many newer ones. Records
are in `OVERLAP_FLIGHT_DIR`, where old ones are never removed, or in the default folder, a temporary folder of the user.
The default folder has a link to each record elsewhere while its world runs, so that `overlap top` finds all.
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

from ..kernel_facts import process_exists, start_ticks
from ..notice import notify
from .layout import file_bytes
from .recorder import Writer

ENDING = ".flight"
# Records in the default folder before old ones are removed (40 MB with two ranks each), and records that remain then.
MOST_FILES, KEPT_FILES = 128, 96

_HOST_CHARACTERS = 100  # of a host's name in a record, at most
_TEXT_CHARACTERS = 200  # of a path in a record, at most: the start of a record has little room

_open: dict[Path, FlightFile] = {}
_unwritable: set[str] = set()  # folders whose failure was reported to the user


class FlightFile:
    """A flight record that is being written, while its world runs.

    Attributes:
        path: The file; `open_records` lists it until `close`.
        writer: Writes into the file.

    Args:
        memory: The file, mapped.
    """

    path: Path
    writer: Writer

    def __init__(self, path: Path, memory: mmap, writer: Writer) -> None:
        self.path, self.writer, self._memory = path, writer, memory
        self._link: Path | None = None
        _open[path] = self

    def link_into(self, folder: Path) -> None:
        """Put a link to the record into another folder until `close`; do nothing if the system refuses it.

        Args:
            folder: The other folder, which is created if it is missing. Old records in it are removed.
        """
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
        # The link is removed in any case: links are only for worlds that run.
        for path in [*([self._link] if self._link else []), *([] if keep else [self.path])]:
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):  # the folder has other files
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
        folder: The folder, which is created if it is missing; None: the default folder.
        name: Name of the file, without its suffix; no other record has it.
        ranks: World ranks of this process.
        start: Facts on the job, the world and the process, from `describe_start`.
    """
    where = Path(folder) if folder is not None else default_folder()
    try:
        where.mkdir(mode=0o700, parents=folder is not None, exist_ok=True)
        if folder is None:
            _check_owner(where)
            _remove_old_records(where)
        try:
            file = _create_flight_file(where / f"{name}{ENDING}", ranks, start)
        except FileNotFoundError:  # another run has just ended, and removed the empty folder
            where.mkdir(mode=0o700, exist_ok=True)
            file = _create_flight_file(where / f"{name}{ENDING}", ranks, start)
    except OSError as error:
        if str(where) not in _unwritable:
            _unwritable.add(str(where))
            notify(f"no flight record: {where}: {error.strerror}; OVERLAP_FLIGHT_DIR names another folder")
        return None
    if folder is not None:
        file.link_into(default_folder())
    return file


def _create_flight_file(path: Path, ranks: Sequence[int], start: Mapping[str, object]) -> FlightFile:
    """Create a flight record of full size, and map it; raise OSError if it exists, or cannot be made."""
    size = file_bytes(len(ranks))
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Without space on the disk for every page, a store into the mapped file would kill the process on a full disk.
        if hasattr(os, "posix_fallocate"):
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
    """Raise PermissionError if a path is no folder of this user: files that others put there must not be trusted."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        # The second argument is `strerror`, which stands in the line for the user.
        raise PermissionError(None, "it is not a folder of this user")


def _remove_old_records(folder: Path) -> None:
    """If a folder has `MOST_FILES` files, remove its oldest records, so that `KEPT_FILES` and running ones remain."""
    if len(os.listdir(folder)) < MOST_FILES:
        return
    files = [entry for entry in os.scandir(folder) if entry.name.endswith(ENDING)]
    with suppress(FileNotFoundError):  # another process clears away as well
        ages = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in files)
        for _, path in ages[: max(0, len(files) - KEPT_FILES)]:
            if not _may_world_run(path):
                os.unlink(path)


def _may_world_run(path: str) -> bool:
    """Whether the world of a record may still run: the name ends with the id of the process that writes it."""
    pid = path.removesuffix(ENDING).rpartition("-")[2]
    if pid == str(os.getpid()):
        return Path(path) in _open
    return pid.isdecimal() and process_exists(pid)


_worlds = count()
"""A program may run several worlds, one after the other."""


def restart_count() -> int:
    """Return how often the launcher has restarted this job: 0 in the first attempt, or if it does not count."""
    restarts = os.environ.get("OVERLAP_RESTART") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    return int(restarts) if restarts.isdecimal() else 0


def describe_start(
    *, job: str | None, restart: int, process: int, processes: int, world_size: int, script: str
) -> tuple[str, dict[str, object]]:
    """Return the file name, without its suffix, and the start of this process's next flight record.

    The start has the fields of `reading.Flight` that are known now. Each call counts one more world of this process.

    Args:
        job: Name of the job; None: this process is a world of its own.
        restart: How often the job has been restarted.
        process: Index of this process.
        processes: Number of processes of the world.
        world_size: Ranks in the world.
        script: Path of the program.
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
    """Return the last `_TEXT_CHARACTERS` of the working directory of this process, or "" if it was removed."""
    with suppress(OSError):
        return os.getcwd()[-_TEXT_CHARACTERS:]
    return ""


def is_alive(host: str, pid: int, since: str) -> bool:
    """Whether the process of a record still runs on this machine.

    False for a process of another machine, and if its start is unknown.

    Args:
        host: Name of the process's machine, as in the record.
        pid: Id of the process, which the system may have given to another process since.
        since: Start time of the process, as the system counts, which tells it from a later process with this id;
            "" if unknown.
    """
    return bool(since) and host == platform.node()[:_HOST_CHARACTERS] and start_ticks(pid) == since

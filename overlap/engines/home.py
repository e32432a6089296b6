"""Folder of a gang on a machine, and its files as bytes: the driver takes them home before the folder goes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ..flight.folder import ENDING, MOST_FILES
from ..kernel_facts import exists

TRACE = "trace.json"
"""Name of the trace that processes would write; beside it each streams its spans into a file until it has ended."""
SPANS = ".part"
"""The end of the names of these files."""

# Limit for the files of one machine that go to the driver: flight records have a third of a megabyte for two ranks.
MOST_BYTES = 256 << 20

# Age at which folders of gangs are removed if their driver was killed; flight records last as long.
LONGEST_LEFT_S = 7 * 86400.0


def gang_folder(token: str) -> Path:
    """Return the folder of a gang on this machine."""
    return Path(tempfile.gettempdir(), f"overlap-gang-{os.getuid()}-{token}")


def make_gang_folder(token: str) -> Path:
    """Make the folder of a gang on this machine, for this user alone; remove folders that drivers left for days."""
    folder = gang_folder(token)
    for other in folder.parent.glob(f"{gang_folder('').name}*"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > LONGEST_LEFT_S and not _has_living_process(other):
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _has_living_process(folder: Path) -> bool:
    """Whether a process with a record in a folder still runs; the name of a record ends with its process."""
    pids = [path.stem.rpartition("-")[2] for path in folder.glob(f"*{ENDING}")]
    return any(map(exists, pids))


def take_records(token: str, *, pid: int | None = None) -> dict[str, bytes]:
    """Return the flight records in the folder of a gang by name, and remove them; the folder too once it is empty.

    Args:
        pid: Only records of that process; None: all, and the spans of processes that were killed.
    """
    folder = gang_folder(token)
    patterns = [f"*{ENDING}", f"*{SPANS}"] if pid is None else [f"*-{pid}{ENDING}"]
    files = dict(_take_files([path for pattern in patterns for path in sorted(folder.glob(pattern))[:MOST_FILES]]))
    if pid is None:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # others still have files in it
        folder.rmdir()
    return files


def _take_files(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of files, up to a limit of bytes in all, and remove them."""
    room_bytes = MOST_BYTES
    for path in paths:
        with suppress(OSError):
            data = path.read_bytes()
            path.unlink()
            room_bytes -= len(data)
            if room_bytes < 0:
                return
            yield path.name, data


def write_files(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write files into a folder of this machine; return the written ones."""
    paths = []
    for name, data in files.items():
        path = folder / os.path.basename(name)  # a name from another machine stays in the folder
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # the link of a killed process to its record
            path.write_bytes(data)
            path.chmod(0o600)
            paths.append(path)
    return paths

"""Job on Ray: its description as every actor gets it, the reports of their ends, and its folder on each machine."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ray import cloudpickle

from ..config import RunConfig
from ..errors import OverlapError, UsageError, in_one_line
from ..flight.folder import ENDING, MOST_FILES
from ..kernel_facts import exists
from ..processes.place import LONGEST_JOB
from ..version import version

VERSION = f"overlap {version()} on Python {sys.version_info.major}.{sys.version_info.minor}"
"""Versions that all processes of a job must share."""

# Room in the name of a job for what connections put after it.
LONGEST_NAME = LONGEST_JOB - 37

SPANS = ".json"
"""The end of the names of files with the spans of processes that have not ended well."""

# Age at which folders of jobs are removed if their driver was killed; flight records last as long.
LONGEST_LEFT_S = 7 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A program and its settings, as every actor gets them."""

    name: str  # The name of the job
    members: int  # How many processes
    ranks_each: int  # Ranks of each
    config: RunConfig  # Settings of the run
    program: bytes = field(repr=False)  # The pickled program and its arguments
    attempt: int = 0  # How often the job has been started before
    version: str = VERSION  # Versions on the driver
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # Tells the job's folders from all others

    def ranks(self, member: int) -> range:
        """Return the ranks of a member."""
        return range(member * self.ranks_each, (member + 1) * self.ranks_each)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnd:
    """End of one process of a job, as the process reports it."""

    results: Sequence[bytes] | None = None  # The pickled result of each of its ranks; None: it has failed
    error: OverlapError | None = None  # Its failure; None: it has not failed, or was stopped
    spans: bytes = b""  # Its part of the timeline, if one is kept
    files: Mapping[str, bytes] = field(default_factory=dict)  # Its flight records, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one attempt of a job."""

    ends: Mapping[int, MemberEnd]  # By member, in the order of their reports
    lost: Mapping[int, str]  # Reasons of members without a report, as clauses
    files: Mapping[str, bytes] = field(default_factory=dict)  # Flight records of these, by name


def describe_job(
    main: object, args: tuple[object, ...], config: RunConfig, *, ranks_each: int, name: str | None
) -> JobSpec:
    """Return the description of a job, after a check of the user's arguments; without a name it gets a new one.

    Raises:
        UsageError: If a value is invalid, or the program cannot be sent.
    """
    if not isinstance(ranks_each, int) or isinstance(ranks_each, bool) or ranks_each < 1:
        raise UsageError(f"ranks_per_actor: expected a positive integer, got {ranks_each!r}")
    if (ranks := config.ranks) is None:
        raise UsageError("ranks: expected their number, which Ray cannot know; pass ranks=N")
    if ranks % ranks_each:
        raise UsageError(f"ranks: {ranks} cannot be divided into ranks_per_actor={ranks_each}; choose a multiple")
    if name is not None and (not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME):
        raise UsageError(f"name: expected 1 to {LONGEST_NAME} printable characters, got {name!r}")
    if config.virtual is not None:
        raise UsageError("clock: Ray runs ranks in real time; for virtual time call overlap.run without an engine")
    return JobSpec(
        name=name or f"ray-{secrets.token_hex(4)}",
        members=ranks // ranks_each,
        ranks_each=ranks_each,
        config=config,
        program=_pack_program(main, args),
    )


def _pack_program(main: object, args: tuple[object, ...]) -> bytes:
    """Return the bytes of a program and its arguments; a UsageError names the one that cannot be pickled."""
    with suppress(Exception):
        return pack((main, args), "")
    pack(main, "main: cannot be sent to other processes")
    for index, arg in enumerate(args, 1):
        pack(arg, f"argument {index} of main: cannot be sent to other processes")
    return pack((main, args), "main: cannot be sent to other processes")


def pack(value: object, complaint: str) -> bytes:
    """Return the bytes of a value; raise a UsageError that begins with `complaint` if it cannot be pickled."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise UsageError(f"{complaint}: {in_one_line(error)}; make it a value that can be pickled") from error


# -- its folder on a machine: the driver takes the files home as bytes before the folder goes ------------------------


def job_folder(token: str) -> Path:
    """Return the folder of a job on this machine."""
    return Path(tempfile.gettempdir(), f"overlap-gang-{os.getuid()}-{token}")


def make_job_folder(token: str) -> Path:
    """Make the folder of a job on this machine, for this user alone; remove folders that drivers left for days."""
    folder = job_folder(token)
    for other in folder.parent.glob(f"{job_folder('').name}*"):
        with suppress(OSError):
            pids = [path.stem.rpartition("-")[2] for path in other.glob(f"*{ENDING}")]
            if time.time() - other.stat().st_mtime > LONGEST_LEFT_S and not any(map(exists, pids)):
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def take_files(token: str, *, pid: int | None = None) -> dict[str, bytes]:
    """Return the flight records in the folder of a job by name, and remove them; the folder too once it is empty.

    Args:
        pid: Only records of that process; None: all, and the spans of processes that were killed.
    """
    folder, files = job_folder(token), {}
    for pattern in (f"*{ENDING}", f"*{SPANS}") if pid is None else (f"*-{pid}{ENDING}",):
        for path in sorted(folder.glob(pattern))[:MOST_FILES]:
            with suppress(OSError):
                files[path.name] = path.read_bytes()
                path.unlink()
    if pid is None:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # others still have files in it
        folder.rmdir()
    return files

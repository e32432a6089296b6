"""Jobs on Ray: the description that every actor gets, the reports of actors' ends, and a folder on each host."""

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
from ..errors import OverlapError, UsageError, one_line_text
from ..flight.folder import ENDING, MOST_FILES
from ..kernel_facts import process_exists
from ..processes.place import LONGEST_JOB
from ..version import version

VERSION = f"overlap {version()} on Python {sys.version_info.major}.{sys.version_info.minor}"
"""Versions that all processes of a job must share."""

# Longest name of a job. In connections "-", 16 digits, "." and the attempt follow it, and then further text.
LONGEST_NAME = LONGEST_JOB - 37

SPANS = ".json"
"""Suffix of the names of files with the spans of processes that have not ended well."""

# Age at which folders of jobs are removed if their driver was killed; flight records last as long.
LONGEST_LEFT_S = 7 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A program and its settings, as every actor gets them."""

    name: str  # The name of the job
    members: int  # Number of processes, each in one actor
    ranks_each: int  # Number of ranks in each process
    config: RunConfig  # Settings of the run
    program: bytes = field(repr=False)  # The pickled program and its arguments
    attempt: int = 0  # Number of times that the job has been started before
    version: str = VERSION  # Versions of overlap and Python on the driver, which actors must have, too
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # Random text in the names of the job's folders

    def ranks(self, member: int) -> range:
        """Return the ranks of process number `member`."""
        return range(member * self.ranks_each, (member + 1) * self.ranks_each)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnd:
    """End of one process of a job, as the process reports it."""

    results: Sequence[bytes] | None = None  # Pickled result of each rank of the process; None: it failed or was stopped
    error: OverlapError | None = None  # The error of the process; None: it did not fail, or was stopped
    spans: bytes = b""  # The part of the timeline of this process; empty without a trace
    files: Mapping[str, bytes] = field(default_factory=dict)  # Flight records of the process, by file name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one attempt of a job."""

    ends: Mapping[int, MemberEnd]  # Reports by member, in the order in which they came
    # Members without a report, each with the reason as the end of a sentence ("the process ...").
    lost: Mapping[int, str]
    files: Mapping[str, bytes] = field(default_factory=dict)  # Flight records of lost members, by file name


def make_job_spec(
    main: object, args: tuple[object, ...], config: RunConfig, *, ranks_each: int, name: str | None
) -> JobSpec:
    """Check the arguments of the user, and return the description of the job.

    Args:
        main: The program of each rank.
        args: Further arguments of the program.
        config: Settings of the run.
        ranks_each: Number of ranks in each process.
        name: Name of the job; None: a new name.

    Raises:
        UsageError: A value is invalid, or the program cannot be pickled.
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
        program=_pickle_program(main, args),
    )


def _pickle_program(main: object, args: tuple[object, ...]) -> bytes:
    """Return a program and its arguments, pickled; a `UsageError` names the item that cannot be pickled."""
    with suppress(Exception):
        return pickle_value((main, args), "")
    pickle_value(main, "main: cannot be sent to other processes")
    for index, arg in enumerate(args, 1):
        pickle_value(arg, f"argument {index} of main: cannot be sent to other processes")
    return pickle_value((main, args), "main: cannot be sent to other processes")


def pickle_value(value: object, complaint: str) -> bytes:
    """Return a value, pickled; if that fails, raise a `UsageError` that begins with `complaint`."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise UsageError(
            f"{complaint}: {one_line_text(error)}; leave open files, locks and sockets out of it"
        ) from error


# -- the folder of a job on a host: the driver fetches the files before the folder is removed ------------------------


def job_folder(token: str) -> Path:
    """Return the folder of a job on this machine."""
    return Path(tempfile.gettempdir(), f"overlap-gang-{os.getuid()}-{token}")


def make_job_folder(token: str) -> Path:
    """Make the folder of a job on this machine, for this user alone; remove old folders of jobs whose driver died.

    A folder is old after `LONGEST_LEFT_S`, if no process that has written into it is alive.
    """
    folder = job_folder(token)
    for other in folder.parent.glob(f"{job_folder('').name}*"):
        with suppress(OSError):
            pids = [path.stem.rpartition("-")[2] for path in other.glob(f"*{ENDING}")]
            if time.time() - other.stat().st_mtime > LONGEST_LEFT_S and not any(map(process_exists, pids)):
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def take_job_files(token: str, *, pid: int | None = None) -> dict[str, bytes]:
    """Return files of a job on this machine, by name, and remove them; remove the folder as well if it is empty.

    Args:
        token: Token of the job.
        pid: Return the flight records of this process only. None: of all processes, with the spans of processes that
            were killed.
    """
    folder, files = job_folder(token), {}
    for pattern in (f"*{ENDING}", f"*{SPANS}") if pid is None else (f"*-{pid}{ENDING}",):
        for path in sorted(folder.glob(pattern))[:MOST_FILES]:
            with suppress(OSError):
                files[path.name] = path.read_bytes()
                path.unlink()
    if pid is None:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # other processes still have files in it
        folder.rmdir()
    return files

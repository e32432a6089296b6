"""Witness of a job on one host: a folder with files that decide on one world for each epoch.

::

    FOLDER/attempt-0/alive-2            locked by member 2 as long as it lives; the kernel unlocks it at its end
                     run-0/report-3-2   report of member 2 in epoch 3: its agreed step, and where it would listen
                           epoch-4      the world of epoch 4
                           finished-4   the world of epoch 4 has ended well

A program that calls `overlap.run` several times has several runs.

A file appears whole, by a link that fails if there is one of its name: the first proposal of an epoch is the only one.
Nothing is locked while a decision is made, so a stopped process holds up nobody.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ..errors import UsageError
from .agreement import EpochWorld, accepts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of a member at the end of an epoch."""

    step: int  # Greatest agreed step
    endpoint: tuple[str, int]  # Where the member listens, for the case that it is the first of the next world
    unreached: tuple[int, ...] = ()  # Members that the member could not dial, and that have not answered since


class Witness:
    """The witness as one member uses it.

    Args:
        folder: Folder of the job.
        attempt: How often the job has been started before.
        run: Index of the run of the program.
        member: This member.
        first: The world of epoch 0.
    """

    #: How often a survivor looks for reports and decisions.
    look_s: float = 0.002

    def __init__(self, folder: Path, attempt: int, run: int, member: int, first: EpochWorld) -> None:
        self._members, self._member, self._first = _attempt_folder(folder, attempt), member, first
        self._folder = self._members / f"run-{run}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mark_alive()

    def close(self) -> None:
        """End the use of the witness in this run."""

    def _mark_alive(self) -> None:
        """Lock the file that shows that this process lives; the kernel unlocks it at the end."""
        _create_locked(self._members / f"alive-{self._member}")

    async def access(self, call: Callable[[], T]) -> T:
        """Return the result of a call that reads or writes the folder: here it takes microseconds."""
        with blame_memory(self._members.parent):
            return call()

    @asynccontextmanager
    async def watching(self, members: Iterable[int]) -> AsyncIterator[None]:
        """Watch the ends of members for the length of the block; on one host the kernel shows them at any time."""
        yield

    def has_ended(self, member: int) -> bool:
        """Whether a process has certainly ended; one that is dead may be on a host that is cut off."""
        return self.is_dead(member)

    def unreached(self) -> tuple[int, ...]:
        """Return the members that could not be dialled, and have not answered since: on one host there are none."""
        return ()

    def dials(self) -> bool:
        """Whether it is not known yet which of the watched members can be dialled."""
        return False

    def is_dead(self, member: int) -> bool:
        """Whether the process of a member has ended; False for one that has not come yet."""
        if member == self._member:
            return False
        with suppress(OSError), open(self._members / f"alive-{member}", "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        return False

    def record(self) -> EpochWorld:
        """Return the newest world that is recorded: the first one until a proposal was accepted."""
        return _read_newest_world(self._folder) or self._first

    def report(self, epoch: int, report: Report) -> None:
        """Write the report of this member; only the first one of an epoch counts."""
        self._create(f"report-{epoch}-{self._member}", asdict(report))

    def reports(self, epoch: int, members: Iterable[int]) -> dict[int, Report]:
        """Return the reports of an epoch, by member."""
        read = ((member, self._read_report(f"report-{epoch}-{member}")) for member in members)
        return {member: report for member, report in read if report is not None}

    def propose(self, proposal: EpochWorld) -> bool:
        """Record a proposal if it may follow the record and is the first of its epoch; return whether it was."""
        return accepts(self.record(), proposal) and self._create(f"epoch-{proposal.epoch}", asdict(proposal))

    def finish(self, epoch: int) -> None:
        """Record that the world of an epoch has ended well: all its ranks have finished their programs."""
        self._create(f"finished-{epoch}", {})

    def has_finished(self, epoch: int) -> bool:
        """Whether the world of an epoch has ended well."""
        return (self._folder / f"finished-{epoch}").exists()

    def _create(self, name: str, content: Mapping[str, object]) -> bool:
        """Create a file with its content, unless there is one of that name; return whether this call created it."""
        draft = self._folder / f"draft-{self._member}"
        draft.write_text(json.dumps(content))
        try:
            with suppress(FileExistsError):  # NFS: also if the answer to the call that created it was lost
                os.link(draft, self._folder / name)
            return draft.stat().st_nlink == 2
        finally:
            draft.unlink()

    def _read_report(self, name: str) -> Report | None:
        """Return the report in a file; None if there is no such file."""
        if (content := self._read_json(self._folder / name)) is not None:
            return Report(**content | {name: tuple(content[name]) for name in ("endpoint", "unreached")})
        return None

    def _read_json(self, path: Path) -> dict[str, Any] | None:
        """Return the content of a file; None if there is no such file."""
        with suppress(FileNotFoundError):
            return cast("dict[str, Any]", json.loads(path.read_text()))
        return None


_locked: dict[Path, int] = {}  # descriptors that stay open: closing one would unlock the file


@contextmanager
def blame_memory(folder: Path) -> Iterator[None]:
    """Raise a `UsageError` with advice where the system refuses to write into the folder of this host's witness."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"survive: cannot write the witness {folder}: {error.strerror or error}; make room in {folder.parent}"
        ) from None


def _create_locked(path: Path) -> None:
    """Create a file that is locked until this process ends; later calls do nothing."""
    if path not in _locked:
        draft = path.with_name(f"draft-{path.name}")
        _locked[path] = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.lockf(_locked[path], fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: a fork has no part in it
        draft.rename(path)  # others would take a file without a lock for that of a dead process


def has_survivor(folder: Path, member: int) -> bool:
    """Whether a process takes part in a run that survives: by `--survive`, or because its program asks for it."""
    return any(folder.rglob(f"alive-{member}"))


def newest_world(folder: Path, attempt: int) -> EpochWorld | None:
    """Return the newest world that the witness of a job has decided on; None: it has not decided yet."""
    runs = _attempt_folder(folder, attempt).glob("run-*")
    for run in sorted(runs, key=lambda path: int(path.name.removeprefix("run-")), reverse=True):
        if (world := _read_newest_world(run)) is not None:
            return world
    return None


def _attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"attempt-{attempt}"


def _read_newest_world(folder: Path) -> EpochWorld | None:
    """Return the world of the last epoch in the folder of a run; None: no epoch has followed the first."""
    epochs = [int(path.name.removeprefix("epoch-")) for path in folder.glob("epoch-*")]
    if not epochs:
        return None
    content = json.loads((folder / f"epoch-{max(epochs)}").read_text())
    return EpochWorld(epoch=content["epoch"], step=content["step"], members=tuple(content["members"]))

"""Witness of a job: a folder with files that decide on one world for each epoch.

::

    FOLDER/attempt-0/alive-2            process of member 2, and the address where it listens in its present run
                     run-0/report-3-2   report of member 2 in epoch 3: agreed step, and address for the next world
                           epoch-4      the world of epoch 4
                           finished-4   the world of epoch 4 has ended well

A program that calls `overlap.run` several times has several runs.

A file is created whole, by a link that fails if the name exists: only the first proposal of an epoch is recorded, also
on NFS. There are no locks, so a stopped process delays no other one. The kernel tells which processes of this host have
ended. For a job on several hosts, whose folder the user names:

* Each process has a socket that listens, and never accepts. The kernel of its host refuses or ends connections to it as
  soon as the process has ended, and keeps them while it is stopped. No answer means that the host is lost, or cut off.
* A client may cache a directory for a minute. To create a file in it renews the cache.
* No endless wait: a folder that cannot be reached may block a call for ever. Calls are made in a thread, with a limit
  for each of their operations. A process that does not reach the folder ends, because the others may have gone on
  without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from errno import EDQUOT, ENOSPC
from functools import cache
from pathlib import Path
from typing import TypeVar

import trio

from ..errors import OverlapError, UsageError
from ..kernel_facts import ProcessState, process_identity, process_state
from ..notice import notify
from ..processes.identity import LOST_AFTER_S
from ..processes.shared_folder import WITNESS
from ..processes.sockets import OUTAGE_S, dial, listen
from ..tasks import open_background_nursery
from .agreement import EpochWorld, accepts_proposal

T = TypeVar("T")

#: Pause between two looks into the folder, with several hosts. A look takes a few messages to the server.
_FAR_LOOK_S = 0.02
#: Pause before a failed call of the file system is repeated.
_PAUSE_S = 0.2
#: Limit of a last try after the limit of an access: this process may have been stopped in the meantime.
_LAST_TRY_S = 0.5
#: If writing a file takes longer, the folder is reported as slow. Usually it takes milliseconds.
_SLOW_S = 1.0
#: Most operations of the file system in one access.
_MOST_OPERATIONS = 100
#: Connections to a process that are never accepted: one from each other process.
_BACKLOG = 4096


class WitnessError(OverlapError):
    """The folder of the witness cannot be reached from this host: the others may go on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessReport:
    """Report of a member at the end of an epoch."""

    step: int  # Greatest agreed step
    endpoint: tuple[str, int]  # Where the member listens, for the case that it is the first of the next world
    unreached: tuple[int, ...] = ()  # Members that the member could not dial, and that have not answered since


class Witness:
    """The witness as one member uses it.

    Args:
        folder: Folder of the job, the same on all hosts.
        attempt: Number of times that the job has been started before.
        run: Index of the run of the program.
        member: Number of this process in the first world.
        first: The world of epoch 0.
        address: Address at which other hosts reach this host; None: the job has one host.
        limit_s: With several hosts, seconds for which the folder may be out of reach; None: `LOST_AFTER_S`.

    Attributes:
        look_s: Seconds between two looks for reports and decisions.

    Raises:
        UsageError: The folder of a job on one host cannot be written.
        WitnessError: The folder of a job on several hosts cannot be written.
    """

    look_s: float = 0.002

    def __init__(
        self, folder: Path, attempt: int, run: int, member: int, first: EpochWorld, *, address: str | None = None,
        limit_s: float | None = None,
    ) -> None:  # fmt: skip
        self._members, self._member, self._first = _attempt_folder(folder, attempt), member, first
        self._folder, self._run, self._limit_s = self._members / f"run-{run}", run, limit_s or LOST_AFTER_S
        self._processes: dict[int, str] = {}  # `process_identity` of members
        self._ended: set[int] = set()  # watched members on other hosts that have certainly ended
        self._cut_off: set[int] = set()  # watched members that do not answer: their host or the network failed
        self._unreached: set[int] = set()  # members that did not answer, until they do; also after `watching_members`
        self._dialled: set[int] = set()  # members that are being dialled
        self._is_slow = False
        self._socket = None if address is None else listen((address, 0), backlog=_BACKLOG)
        if self._socket is not None:
            self.look_s = _FAR_LOOK_S
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            endpoint = None if self._socket is None else self._socket.getsockname()[:2]
            draft = self._members / f"draft-{member}"
            draft.write_text(json.dumps({"process": process_identity(), "run": run, "endpoint": endpoint}))
            draft.replace(self._members / f"alive-{member}")
        except OSError as error:
            self.close()
            raise self._folder_error(error) from None

    def close(self) -> None:
        """End the use of the witness in this run: processes on other hosts see that this process has ended the run."""
        if self._socket is not None:
            self._socket.close()

    async def access_folder(self, call: Callable[[], T]) -> T:
        """Return the result of a call that reads or writes the folder. With several hosts, a failed call is repeated.

        Raises:
            UsageError: The folder of one host cannot be written.
            WitnessError: The folder of several hosts could not be reached for `limit_s`.
        """
        if self._socket is None:
            try:
                return call()
            except OSError as error:
                raise self._folder_error(error) from None
        failure = OSError("it does not answer")
        for limit_s in self._limit_s, _LAST_TRY_S:
            begin_s = trio.current_time()
            with trio.move_on_after(limit_s) as scope:
                while True:
                    write_s = trio.current_time()
                    try:
                        await trio.to_thread.run_sync(self._renew_folder_cache, abandon_on_cancel=True)
                        took_s = trio.current_time() - write_s
                        # A slow folder is not lost: each operation of the call may take as long as this one.
                        scope.deadline = begin_s + limit_s + _MOST_OPERATIONS * took_s
                        self._report_slow_folder(took_s)
                        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)
                    except OSError as error:
                        failure = error
                    await trio.sleep(_PAUSE_S)
        raise self._folder_error(failure)

    def _renew_folder_cache(self) -> None:
        """Create a file and remove it: a client of NFS then reads the folder from the server again."""
        draft = self._folder / f"look-{self._member}"
        draft.touch()
        draft.unlink()

    def _report_slow_folder(self, took_s: float) -> None:
        """Report once that the folder is slow."""
        if took_s > _SLOW_S and not self._is_slow:
            self._is_slow = True
            notify(
                f"process {self._member}: the witness in {self._members.parent} is slow, {took_s:.1f} s for a file; "
                "name a faster folder with --witness"
            )

    def _folder_error(self, failure: OSError) -> OverlapError:
        """Return the error for a folder that this process cannot use; with several hosts it is a `WitnessError`."""
        folder, reason = self._members.parent, failure.strerror or str(failure)
        if self._socket is None:
            is_full = failure.errno in (ENOSPC, EDQUOT)
            advice = f"make room in {folder.parent}" if is_full else f"make {folder.parent} writable"
            return UsageError(f"survive: cannot write the witness {folder}: {reason}; {advice}")
        return WitnessError(
            f"process {self._member} cannot reach the witness in {folder}: {reason}; this process ends, because the "
            "others may go on without it: check the mount of that folder here, or name another one with --witness"
        )

    # -- which members live --------------------------------------------------------------------------------------------

    def is_dead(self, member: int) -> bool:
        """Whether the process of a member has ended, or does not answer; False if it has not started yet."""
        return member in self._cut_off or self.has_ended(member)

    def has_ended(self, member: int) -> bool:
        """Whether the process of a member has certainly ended, as the kernel of its host says."""
        if member not in self._processes and self._socket is None:
            self._read_alive_file(member)
        return member in self._ended or process_state(self._processes.get(member, "")) is ProcessState.GONE

    def unreached_members(self) -> tuple[int, ...]:
        """Return the members to which this process could not connect, and that have not answered since.

        It is empty for a job on one host.
        """
        return tuple(sorted(self._unreached))

    def is_awaiting_answers(self) -> bool:
        """Whether a watched member is being dialled: it has not answered yet, and the limit `OUTAGE_S` is not over."""
        return bool(self._dialled)

    @asynccontextmanager
    async def watching_members(self, members: Iterable[int]) -> AsyncIterator[None]:
        """In the block, watch members over their sockets, for `is_dead`. On one host the kernel is asked instead."""
        others = set(members) - {self._member} if self._socket is not None else set()
        self._ended -= others
        self._cut_off -= others
        self._dialled.clear()
        async with open_background_nursery() as nursery:
            for member in others:
                nursery.start_soon(self._watch_member, member)
            yield

    async def _watch_member(self, member: int) -> None:
        """Connect to the socket of a member, and wait for the end of that connection."""
        endpoint = None
        while endpoint is None:
            with suppress(WitnessError):  # the task that waits for a decision raises it
                endpoint = await self.access_folder(lambda: self._read_alive_file(member))
            await trio.sleep(0 if endpoint else self.look_s)
        self._dialled.add(member)
        stream = None
        try:
            with trio.fail_after(OUTAGE_S):
                stream = await dial(endpoint)
            self._dialled.discard(member)
            self._unreached.discard(member)
            async with stream:
                await stream.receive_some(1)
            self._ended.add(member)
        except (OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
            # If the kernel of its host refused or reset the connection, the process has ended. Any other error may be
            # one of the network.
            cause = error if stream is None else error.__cause__
            if isinstance(cause, ConnectionRefusedError if stream is None else ConnectionResetError):
                self._ended.add(member)
            else:
                self._cut_off.add(member)
                self._unreached.add(member)
        finally:
            self._dialled.discard(member)

    def _read_alive_file(self, member: int) -> tuple[str, int] | None:
        """Read a member's identity into `_processes`; return its address in this run, or None.

        There is none before the member has written it, nor in a job on one host, where no member listens.
        """
        with suppress(FileNotFoundError):
            content = json.loads((self._members / f"alive-{member}").read_text())
            self._processes[member] = content["process"]
            return tuple(content["endpoint"]) if content["run"] == self._run and content["endpoint"] else None
        return None

    # -- reports and decisions -----------------------------------------------------------------------------------------

    def read_newest_world(self) -> EpochWorld:
        """Return the newest world that is recorded; the world of epoch 0 if no proposal was recorded."""
        return _read_newest_world(self._folder) or self._first

    def write_report(self, epoch: int, report: WitnessReport) -> None:
        """Write the report of this member; only the first one of an epoch counts."""
        self._create_file(f"report-{epoch}-{self._member}", asdict(report))

    def read_reports(self, epoch: int, members: Iterable[int]) -> dict[int, WitnessReport]:
        """Return the reports of an epoch that `members` have written so far, by member."""
        paths = {member: self._folder / f"report-{epoch}-{member}" for member in members}
        names = {path.name for path in self._folder.glob("report-*")}
        return {member: _read_report(path) for member, path in paths.items() if path.name in names}

    def record_proposal(self, proposal: EpochWorld) -> bool:
        """Record a proposal if it may follow the newest world, and is the first of its epoch; return whether it was."""
        is_next = accepts_proposal(self.read_newest_world(), proposal)
        return is_next and self._create_file(f"epoch-{proposal.epoch}", asdict(proposal))

    def record_finished_epoch(self, epoch: int) -> None:
        """Record that the world of an epoch has ended well: all its ranks have finished their programs."""
        self._create_file(f"finished-{epoch}", {})

    def has_finished(self, epoch: int) -> bool:
        """Whether the world of an epoch has ended well."""
        return (self._folder / f"finished-{epoch}").exists()

    def _create_file(self, name: str, content: Mapping[str, object]) -> bool:
        """Create a file with a content, as JSON; return False, and change nothing, if a file of that name exists."""
        draft = self._folder / f"draft-{self._member}"
        draft.write_text(json.dumps(content))
        try:
            with suppress(FileExistsError):  # NFS: also if the answer to the call that created it was lost
                os.link(draft, self._folder / name)
            return draft.stat().st_nlink == 2  # whether the link exists, whatever the call has returned
        finally:
            draft.unlink()


@cache
def _read_report(path: Path) -> WitnessReport:
    """Return the report in a file; reports never change, so each is read once."""
    content = json.loads(path.read_text())
    return WitnessReport(**content | {name: tuple(content[name]) for name in ("endpoint", "unreached")})


def witness_folder() -> Path:
    """Return the folder of the witness, which the launcher has put into the environment.

    Raises:
        UsageError: The launcher has named no folder.
    """
    if not (folder := os.environ.get(WITNESS)):
        raise UsageError(
            "survive: processes need a witness; start them with `overlap run --survive --processes N`, and on several "
            "hosts with --witness DIR too"
        )
    return Path(folder)


def has_alive_file(folder: Path, member: int) -> bool:
    """Whether a process takes part in a run that goes on after losses: it has then written its file `alive-N`.

    Args:
        folder: Folder of the witness.
        member: Number of the process in the first world.
    """
    return any(folder.glob(f"attempt-*/alive-{member}"))


def newest_decided_world(folder: Path, attempt: int) -> EpochWorld | None:
    """Return the newest world that the witness of a job has recorded, or None if it has recorded none.

    Args:
        folder: Folder of the witness.
        attempt: Number of times that the job has been started before.
    """
    runs = _attempt_folder(folder, attempt).glob("run-*")
    for run in sorted(runs, key=lambda path: int(path.name.removeprefix("run-")), reverse=True):
        if (world := _read_newest_world(run)) is not None:
            return world
    return None


def _attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"attempt-{attempt}"


def _read_newest_world(folder: Path) -> EpochWorld | None:
    """Return the world of the last epoch in the folder of a run, or None if no epoch has followed the first."""
    epochs = [int(path.name.removeprefix("epoch-")) for path in folder.glob("epoch-*")]
    if not epochs:
        return None
    content = json.loads((folder / f"epoch-{max(epochs)}").read_text())
    return EpochWorld(epoch=content["epoch"], step=content["step"], members=tuple(content["members"]))

"""Witness of a job on several hosts: a folder that all of them share, named by the user.

The folder decides as on one host: a link of a name succeeds once, on NFS as well. The rest differs:

* No lock: a file system may grant locks on each host alone, or free them late. Each process has a socket that listens,
  and never accepts; the folder has its address. The kernel of its host refuses or ends connections to it as soon as the
  process has ended, and keeps them while it is stopped. No answer means that the host is lost, or cut off.
* No trust in a directory that was read before: a client may cache it for a minute. A new file in it renews the cache.
* No endless wait: a folder that cannot be reached may block a call for ever. Calls are made in a thread, with a limit.
  A process that does not reach the folder ends, because the others may have gone on without it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import trio

from ..errors import OverlapError, UsageError
from ..processes.shared_folder import HOSTS, WITNESS
from ..processes.silence import LOST_AFTER_S
from ..processes.sockets import OUTAGE_S, dial, listen_at_free_port
from .agreement import EpochWorld
from .witness import Witness, blame_memory

T = TypeVar("T")

#: How often a process looks into the folder. A look takes a few messages to the server.
_LOOK_S = 0.02
#: Pause before a call of the file system is made again that has failed.
_PAUSE_S = 0.2
#: Connections to a process that wait to be accepted: one of each other process.
_BACKLOG = 4096


class WitnessError(OverlapError):
    """The folder of the witness cannot be reached from this host: the others may go on without it."""


class SharedWitness(Witness):
    """The witness as a member on one of several hosts uses it.

    Args:
        folder: Folder of the job, the same on all hosts.
        attempt: How often the job has been started before.
        run: Index of the run of the program.
        member: This member.
        first: The world of epoch 0.
        address: Address of this host that other hosts reach.
        limit_s: A folder that cannot be reached for so long ends this process.
    """

    look_s = _LOOK_S

    def __init__(
        self, folder: Path, attempt: int, run: int, member: int, first: EpochWorld, *, address: str, limit_s: float
    ) -> None:
        self._job_folder, self._limit_s, self._address = folder, limit_s, address
        self._ended: set[int] = set()
        self._cut_off: set[int] = set()
        self._unreached: set[int] = set()  # outlives `watching`, until a member answers
        self._dialled: set[int] = set()  # no answer yet
        try:
            super().__init__(folder, attempt, run, member, first)
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from error

    def close(self) -> None:
        """Close the socket by which other hosts see that this process lives in this run."""
        self._alive_socket.close()

    def _mark_alive(self) -> None:
        """Listen at a free port, and write its endpoint: its connections end with this process."""
        self._alive_socket = listen_at_free_port(self._address, backlog=_BACKLOG)
        self._create(f"alive-{self._member}", {"endpoint": self._alive_socket.getsockname()[:2]})

    def is_dead(self, member: int) -> bool:
        """Whether a process has ended, or its host did not answer, while `watching` was open."""
        return member in self._ended or member in self._cut_off

    def unreached(self) -> tuple[int, ...]:
        """Return the members that could not be dialled, and have not answered since."""
        return tuple(sorted(self._unreached))

    def dials(self) -> bool:
        """Whether a member that is watched has neither answered nor been silent for `OUTAGE_S`."""
        return bool(self._dialled)

    def has_ended(self, member: int) -> bool:
        """Whether a process has certainly ended: the kernel of its host refused or reset a connection."""
        return member in self._ended

    async def access(self, call: Callable[[], T]) -> T:
        """Return the result of a call that reads or writes the folder; a failed call is repeated for `limit_s`.

        Raises:
            WitnessError: The folder could not be reached in time.
        """
        reason = "it does not answer"

        def call_after_write() -> T:
            """Write a file before the call: a client of NFS then reads the folder anew from the server."""
            draft = self._folder / f"look-{self._member}"
            draft.touch()
            draft.unlink()
            return call()

        with trio.move_on_after(self._limit_s):
            while True:
                try:
                    return await trio.to_thread.run_sync(call_after_write, abandon_on_cancel=True)
                except OSError as error:
                    reason = error.strerror or str(error)
                await trio.sleep(_PAUSE_S)
        raise self._unreachable(reason)

    def _unreachable(self, reason: str) -> WitnessError:
        """Return the error for a folder that this host cannot reach."""
        return WitnessError(
            f"process {self._member} cannot reach the witness in {self._job_folder}: {reason}; it ends, because the "
            "others may go on without it"
        )

    @asynccontextmanager
    async def watching(self, members: Iterable[int]) -> AsyncIterator[None]:
        """Watch the ends of members for the length of the block; `is_dead` and `has_ended` return what was seen."""
        others = set(members) - {self._member}
        self._ended -= others
        self._cut_off -= others
        self._dialled.clear()
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            for member in others:
                nursery.start_soon(self._watch_member, member)
            try:
                yield
            except Exception as error:  # raised outside, where the nursery does not wrap it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _watch_member(self, member: int) -> None:
        """Connect to the socket of a member, and wait for the end of that connection."""
        while (endpoint := await self._read_endpoint(member)) is None:  # noqa: ASYNC110  another host writes it
            await trio.sleep(self.look_s)
        self._dialled.add(member)
        try:
            with trio.fail_after(OUTAGE_S):
                stream = await dial(endpoint)
        except ConnectionRefusedError:
            self._ended.add(member)
            return
        except (OSError, trio.TooSlowError):
            self._cut_off.add(member)
            self._unreached.add(member)
            return
        finally:
            self._dialled.discard(member)
        self._unreached.discard(member)
        async with stream:
            try:
                await stream.receive_some(1)
                self._ended.add(member)
            except trio.BrokenResourceError as error:
                if isinstance(error.__cause__, ConnectionResetError):
                    self._ended.add(member)
                else:
                    self._cut_off.add(member)
                    self._unreached.add(member)

    async def _read_endpoint(self, member: int) -> tuple[str, int] | None:
        """Return the endpoint at which a member shows that it lives; None: it has written none yet."""
        with suppress(WitnessError):  # the task that asks it for a decision raises that
            content = await self.access(lambda: self._read_json(self._folder / f"alive-{member}"))
            return None if content is None else tuple(content["endpoint"])
        return None


def open_witness(
    folder: Path, attempt: int, run: int, member: int, first: EpochWorld, *, address: str, limit_s: float | None
) -> Witness:
    """Return the witness of a job on one host or on several; arguments as for `SharedWitness`."""
    if not has_several_hosts():
        with blame_memory(folder):
            return Witness(folder, attempt, run, member, first)
    return SharedWitness(folder, attempt, run, member, first, address=address, limit_s=limit_s or LOST_AFTER_S)


def witness_folder() -> Path:
    """Return the folder of the witness, as the launcher has named it.

    Raises:
        UsageError: It has named none.
    """
    if not (folder := os.environ.get(WITNESS)):
        raise UsageError(
            "survive: processes need a witness; start them with `overlap run --survive --processes N`, and on several "
            "hosts with --witness DIR too"
        )
    return Path(folder)


def has_several_hosts() -> bool:
    """Whether the job of this process was started on several hosts."""
    return int(os.environ.get(HOSTS) or 1) > 1

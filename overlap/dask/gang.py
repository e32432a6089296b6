"""Gang on Dask: one attempt of a world. Its tasks start all or none, are watched, and are cancelled together."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import distributed

from ..embedded.rendezvous import answer_key, ask_key
from ..engines.demand import wait_for_resources
from ..engines.gang import GangOutcome, GangSpec, MemberEnd
from ..engines.home import take_records
from ..engines.verdict import blamed_members
from ..errors import UsageError
from .data import assign_partitions, holders
from .tasks import here_key, import_check, run_member
from .variables import find_value, remove_values

# From the first failure to the moment at which the driver stops waiting for the others.
GRACE_S = 10.0
_LOOK_S = 0.25
_PLACING = "overlap places a gang"
_MISSING_MODULE = re.compile(r"No module named '([^']+)'")


@dataclass(kw_only=True)
class DaskGang:
    """Placement of the tasks of a job, and the run of one attempt."""

    client: distributed.Client  # The cluster
    workers: Sequence[str] | None  # Where they may be; None: anywhere
    wait_s: float  # How long to wait for workers
    partitions: Sequence[distributed.Future] | None  # Data of the program
    lost: set[str] = field(default_factory=set)  # Workers that were lost

    def run_attempt(self, spec: GangSpec) -> GangOutcome:
        """Run one attempt, and return its outcome; no task is left then."""
        deadline_s = time.monotonic() + self.wait_s
        with exclusive_start(self.client, spec, self.wait_s) as placed:
            chosen = self._choose_workers(spec, deadline_s)
            self._check_imports(chosen)
            watch = _TaskWatch(self.client, spec, chosen, self._submit_tasks(spec, chosen))
            try:
                watch.wait_until_all_run(max(0.1, deadline_s - time.monotonic()))
                placed()
                outcome = watch.wait_for_outcome()
            finally:
                watch.end()
        return self._with_files(spec, outcome, chosen)

    # -- placement -----------------------------------------------------------------------------------------------------

    def _choose_workers(self, spec: GangSpec, deadline_s: float) -> list[str]:
        """Wait until there are enough workers, and return one for each member, in the order of machines."""

        def has_enough_workers(seconds: float) -> bool:
            """Wait up to some seconds for enough usable workers; return whether they are there."""
            until_s = time.monotonic() + seconds
            while len(self._usable_workers()) < spec.members:
                if time.monotonic() >= until_s:
                    return False
                time.sleep(min(_LOOK_S, max(0.0, until_s - time.monotonic())))
            return True

        def describe_lack() -> str:
            """Return the number of workers that are missing, for a message."""
            usable = len(self._usable_workers())
            return f"{spec.members - usable} more worker{'s' * (spec.members - usable != 1)}; there are {usable}"

        wait_for_resources(
            f"job {spec.job!r}, {spec.members} workers",
            max(0.0, deadline_s - time.monotonic()),
            has_enough_workers,
            describe_lack,
        )
        usable = self._usable_workers()
        held = [worker for at in self._partition_holders() for worker in at]
        best = sorted(usable, key=lambda worker: (-held.count(worker), usable[worker], worker))[: spec.members]
        return sorted(best, key=lambda worker: (usable[worker], worker))

    def _check_imports(self, chosen: Sequence[str]) -> None:
        """Refuse workers that cannot import this package."""
        answers = self.client.run(import_check(), workers=list(chosen), on_error="return")
        for worker, reason in answers.items():
            if isinstance(reason, str):
                raise UsageError(
                    f"worker {worker} cannot import overlap: {reason}; install it, and what it needs, on every worker"
                )

    def _usable_workers(self) -> dict[str, str]:
        """Return the usable workers and their hosts."""
        hosts = {address: worker["host"] for address, worker in describe_workers(self.client).items()}
        allowed = None if self.workers is None else set(self.workers)
        return {
            address: host
            for address, host in hosts.items()
            if address not in self.lost and (allowed is None or address in allowed)
        }

    def _partition_holders(self) -> list[list[str]]:
        """Return the workers that have each partition; nothing without data."""
        return holders(self.partitions, self.client) if self.partitions is not None else []

    def _submit_tasks(self, spec: GangSpec, chosen: Sequence[str]) -> list[distributed.Future]:
        """Submit the task of each member, pinned to its worker, with its partitions."""
        shares: Sequence[Any] = [None] * spec.members
        if self.partitions is not None:
            numbers = assign_partitions(self._partition_holders(), chosen, spec.ranks_each)
            shares = [[{n: self.partitions[n] for n in of_rank} for of_rank in of_member] for of_member in numbers]
        return [
            self.client.submit(
                run_member, spec, member, shares[member], key=f"overlap-{spec.label}-{member}",
                workers=[worker], allow_other_workers=False, pure=False, retries=0,
            )
            for member, worker in enumerate(chosen)
        ]  # fmt: skip

    # -- files ---------------------------------------------------------------------------------------------------------

    def _with_files(self, spec: GangSpec, outcome: GangOutcome, chosen: Sequence[str]) -> GangOutcome:
        """Return an outcome with flight records of lost members, and note the workers that are lost."""
        if not outcome.lost:
            return outcome
        usable = describe_workers(self.client)
        self.lost.update(chosen[member] for member in outcome.lost if chosen[member] not in usable)
        hosts = {_host_in_address(chosen[member]) for member in outcome.lost}
        near = {worker["host"]: address for address, worker in usable.items() if worker["host"] in hosts}
        files: dict[str, bytes] = {}
        with suppress(Exception):  # whatever it is, the error of the run is what counts
            for records in self.client.run(
                take_records, spec.token, workers=list(near.values()), on_error="ignore"
            ).values():
                files.update(records)
        return replace(outcome, files=files)


class _TaskWatch:
    """Waits until all tasks run, then for their ends; once one has failed, only as long as the others may need."""

    def __init__(
        self, client: distributed.Client, spec: GangSpec, chosen: Sequence[str], tasks: Sequence[distributed.Future]
    ) -> None:
        self._client, self._spec, self._chosen, self._tasks = client, spec, chosen, tasks
        self._pending = dict(enumerate(tasks))
        self._running: set[int] = set()
        self._ends: dict[int, MemberEnd] = {}
        self._lost: dict[int, str] = {}
        self._absent: set[int] = set()

    def wait_until_all_run(self, limit_s: float) -> None:
        """Return when all tasks have begun, or one has ended."""

        def all_run(seconds: float) -> bool:
            """Wait up to some seconds until all tasks have begun, or one has ended; return whether that is so."""
            until_s = time.monotonic() + seconds
            for member in range(self._spec.members):
                while member not in self._running and not self._lost_members() and not self._ended_members():
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return False
                    if find_value(here_key(self._spec, member), self._client, min(_LOOK_S, left_s)) is not None:
                        self._running.add(member)
            return True

        def describe_waits() -> str:
            """Return the workers whose tasks have not begun, for a message."""
            waiting = [self._chosen[member] for member in range(self._spec.members) if member not in self._running]
            return f"{len(waiting)} of them run other tasks: {', '.join(waiting[:4])}{', ...' * (len(waiting) > 4)}"

        wait_for_resources(f"job {self._spec.job!r}, {self._spec.members} workers", limit_s, all_run, describe_waits)

    def wait_for_outcome(self) -> GangOutcome:
        """Wait for the ends of all members; once one has failed, only as long as the others may need."""
        until_s, met = None, True
        while self._pending and (until_s is None or time.monotonic() < until_s):
            with suppress(TimeoutError, distributed.TimeoutError):
                distributed.wait(list(self._pending.values()), timeout=_LOOK_S, return_when="FIRST_COMPLETED")
            for member in self._ended_members():
                self._note_end(member, self._pending.pop(member))
            for member in self._lost_members():
                self._lost[member] = "is gone: its worker has ended"
                del self._pending[member]
            if blamed_members(self._spec, self._ends).issuperset(self._pending):
                break
            if until_s is None and (self._lost or any(end.results is None for end in self._ends.values())):
                met = any(end.begun_s for end in self._ends.values()) or bool(self._lost)
                until_s = time.monotonic() + (GRACE_S if met else 0.0)
        late = f"did not end within {GRACE_S:g} s, and is cancelled" if met else "had met no other, and was ended"
        for member in self._pending:
            self._lost[member] = "is gone" if member in blamed_members(self._spec, self._ends) else late
        return GangOutcome(ends=self._ends, lost=self._lost)

    def end(self) -> None:
        """Cancel unfinished tasks, and remove every trace of the gang from the scheduler."""
        with suppress(Exception):  # the cluster is gone, and all of it with it
            self._client.cancel(list(self._tasks), force=True)
            for task in self._tasks:
                task.release()
            remove_values(self._find_keys_of_lost(), self._client)

    def _find_keys_of_lost(self) -> set[str]:
        """Return the keys of values that lost members may have left in the scheduler."""
        keys: set[str] = set()
        for member in self._lost:
            asking = ask_key(self._spec.label, member)
            keys |= {here_key(self._spec, member), asking}
            if (ask := find_value(asking, self._client, 0.1)) is not None:
                keys.add(answer_key(self._spec.label, member, ask.decode()))
        return keys

    def _ended_members(self) -> list[int]:
        """Return the members with ended tasks."""
        return [member for member, task in self._pending.items() if task.done()]

    def _note_end(self, member: int, task: distributed.Future) -> None:
        """Note the end of a member that its task returned, or the reason of its loss."""
        error = task.exception() if task.status == "error" else None
        if error is not None or task.cancelled():
            self._lost[member] = loss_reason(error)
            return
        self._ends[member] = task.result()

    def _lost_members(self) -> list[int]:
        """Return the members with lost workers: a task that is pinned there waits for ever.

        A worker counts as lost when two polls in a row do not find it.
        """
        present = describe_workers(self._client)
        absent = {member for member in self._pending if self._chosen[member] not in present}
        lost, self._absent = absent & self._absent, absent
        return sorted(lost)


@contextmanager
def exclusive_start(client: distributed.Client, spec: GangSpec, wait_s: float) -> Iterator[Any]:
    """Let no other gang start tasks until the yielded function is called, or the block ends.

    Two gangs that have each started half of their tasks could wait for each other for ever. The lease ends with its
    driver.
    """
    lock = distributed.Semaphore(max_leases=1, name=_PLACING, scheduler_rpc=client.scheduler, loop=client.loop)
    wait_for_resources(
        f"job {spec.job!r}",
        wait_s,
        lambda seconds: bool(lock.acquire(timeout=seconds)),
        lambda: "another gang waits for its workers",
    )
    leases = [lock]

    def release() -> None:
        """Let the next gang start its tasks; later calls do nothing."""
        if leases:
            leases.pop().release()

    try:
        yield release
    finally:
        with suppress(Exception):
            release()


def describe_workers(client: distributed.Client) -> Mapping[str, Mapping[str, Any]]:
    """Return the scheduler's description of each worker, by address."""
    workers: Mapping[str, Mapping[str, Any]] = client.scheduler_info(n_workers=-1)["workers"]
    return workers


def loss_reason(error: BaseException | None) -> str:
    """Return why a task has sent no report, as the end of a sentence."""
    if error is None:
        return "was cancelled"
    if missing := _MISSING_MODULE.search(str(error)):
        return f"has no module {missing[1]!r}, unlike the driver: install it on every worker"
    if isinstance(error, distributed.KilledWorker):
        return "is gone: its worker has ended"
    return f"has ended: {type(error).__name__}: {str(error)[:300]}"


def _host_in_address(address: str) -> str:
    """Return the host in a worker's address, such as "tcp://10.0.0.1:4711"."""
    return address.rpartition("://")[2].rpartition(":")[0]

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
from ..engines.demand import awaited
from ..engines.gang import GangOutcome, GangSpec, MemberEnd
from ..engines.verdict import lost_member
from ..errors import UsageError
from .data import holders, shared_out
from .tasks import here_key, imports_of_ours, left_behind, live
from .variables import known, removed

# From the first failure to the moment at which the driver stops waiting for the others.
GRACE_S = 10.0
_LOOK_S = 0.25
_PLACING = "overlap places a gang"
_MISSING_MODULE = re.compile(r"No module named '([^']+)'")


@dataclass(kw_only=True)
class DaskGang:
    """The way in which the tasks of a job are placed."""

    client: distributed.Client  # The cluster
    workers: Sequence[str] | None  # Where they may be; None: anywhere
    wait_s: float  # How long to wait for workers
    partitions: Sequence[distributed.Future] | None  # Data of the program
    lost: set[str] = field(default_factory=set)  # Workers that were lost

    def once(self, spec: GangSpec) -> GangOutcome:
        """Run one attempt, and return how it has ended; no task of it is left then."""
        deadline_s = time.monotonic() + self.wait_s
        with placing(self.client, spec, self.wait_s) as placed:
            chosen = self._chosen(spec, deadline_s)
            self._check_imports(chosen)
            watch = _TaskWatch(self.client, spec, chosen, self._submitted(spec, chosen))
            try:
                watch.until_all_run(max(0.1, deadline_s - time.monotonic()))
                placed()
                outcome = watch.outcome()
            finally:
                watch.end()
        return self._with_files(spec, outcome, chosen)

    # -- placement -----------------------------------------------------------------------------------------------------

    def _chosen(self, spec: GangSpec, deadline_s: float) -> list[str]:
        """Wait until there are enough workers, and return the workers of the members, in the order of machines."""

        def enough(seconds: float) -> bool:
            until_s = time.monotonic() + seconds
            while len(self._known()) < spec.members:
                if time.monotonic() >= until_s:
                    return False
                time.sleep(min(_LOOK_S, max(0.0, until_s - time.monotonic())))
            return True

        def missing() -> str:
            there = len(self._known())
            return f"{spec.members - there} more worker{'s' * (spec.members - there != 1)}; there are {there}"

        awaited(f"job {spec.job!r}, {spec.members} workers", max(0.0, deadline_s - time.monotonic()), enough, missing)
        there = self._known()
        held = [worker for at in self._held() for worker in at]
        best = sorted(there, key=lambda worker: (-held.count(worker), there[worker], worker))[: spec.members]
        return sorted(best, key=lambda worker: (there[worker], worker))

    def _check_imports(self, chosen: Sequence[str]) -> None:
        told = self.client.run(imports_of_ours(), workers=list(chosen), on_error="return")
        for worker, refused in told.items():
            if isinstance(refused, str):
                raise UsageError(
                    f"worker {worker} cannot import overlap: {refused}; install it, and what it needs, on every worker"
                )

    def _known(self) -> dict[str, str]:
        """Return the usable workers and their hosts."""
        found = {address: told["host"] for address, told in workers_of(self.client).items()}
        wanted = None if self.workers is None else set(self.workers)
        return {
            address: host
            for address, host in found.items()
            if address not in self.lost and (wanted is None or address in wanted)
        }

    def _held(self) -> list[list[str]]:
        return holders(self.partitions, self.client) if self.partitions is not None else []

    def _submitted(self, spec: GangSpec, chosen: Sequence[str]) -> list[distributed.Future]:
        shares: Sequence[Any] = [None] * spec.members
        if self.partitions is not None:
            numbers = shared_out(self._held(), chosen, spec.ranks_each)
            shares = [[{n: self.partitions[n] for n in of_rank} for of_rank in each] for each in numbers]
        return [
            self.client.submit(
                live, spec, member, shares[member], key=f"overlap-{spec.label}-{member}",
                workers=[worker], allow_other_workers=False, pure=False, retries=0,
            )
            for member, worker in enumerate(chosen)
        ]  # fmt: skip

    # -- files ---------------------------------------------------------------------------------------------------------

    def _with_files(self, spec: GangSpec, outcome: GangOutcome, chosen: Sequence[str]) -> GangOutcome:
        """Bring the flight records of members that could not bring theirs, and remember the workers that are gone."""
        if not outcome.lost:
            return outcome
        there = workers_of(self.client)
        self.lost.update(chosen[member] for member in outcome.lost if chosen[member] not in there)
        hosts = {_host(chosen[member]) for member in outcome.lost}
        near = {told["host"]: address for address, told in there.items() if told["host"] in hosts}
        files: dict[str, bytes] = {}
        with suppress(Exception):  # whatever it is, the error of the run is what counts
            for each in self.client.run(
                left_behind, spec.token, workers=list(near.values()), on_error="ignore"
            ).values():
                files.update(each)
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

    def until_all_run(self, limit_s: float) -> None:
        """Return when all tasks have begun, or one has ended."""

        def ready(seconds: float) -> bool:
            until_s = time.monotonic() + seconds
            for member in range(self._spec.members):
                while member not in self._running and not self._gone() and not self._done():
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return False
                    if known(here_key(self._spec, member), self._client, min(_LOOK_S, left_s)) is not None:
                        self._running.add(member)
            return True

        def missing() -> str:
            waiting = [self._chosen[member] for member in range(self._spec.members) if member not in self._running]
            return f"{len(waiting)} of them run other tasks: {', '.join(waiting[:4])}{', ...' * (len(waiting) > 4)}"

        awaited(f"job {self._spec.job!r}, {self._spec.members} workers", limit_s, ready, missing)

    def outcome(self) -> GangOutcome:
        """Return how they have ended."""
        until_s, met = None, True
        while self._pending and (until_s is None or time.monotonic() < until_s):
            with suppress(TimeoutError, distributed.TimeoutError):
                distributed.wait(list(self._pending.values()), timeout=_LOOK_S, return_when="FIRST_COMPLETED")
            for member in self._done():
                self._take(member, self._pending.pop(member))
            for member in self._gone():
                self._lost[member] = "is gone: its worker has ended"
                del self._pending[member]
            if self._blamed().issuperset(self._pending):
                break
            if until_s is None and (self._lost or any(end.results is None for end in self._ends.values())):
                met = any(end.begun_s for end in self._ends.values()) or bool(self._lost)
                until_s = time.monotonic() + (GRACE_S if met else 0.0)
        late = f"did not end within {GRACE_S:g} s, and is cancelled" if met else "had met no other, and was ended"
        for member in self._pending:
            self._lost[member] = "is gone" if member in self._blamed() else late
        return GangOutcome(ends=self._ends, lost=self._lost)

    def end(self) -> None:
        """Cancel unfinished tasks, and remove every trace of the gang from the scheduler."""
        with suppress(Exception):  # the cluster is gone, and all of it with it
            self._client.cancel(list(self._tasks), force=True)
            for task in self._tasks:
                task.release()
            removed(self._keys_of_the_lost(), self._client)

    def _keys_of_the_lost(self) -> set[str]:
        """Return the keys that the store may hold of lost members; the others remove theirs."""
        keys: set[str] = set()
        for member in self._lost:
            asking = ask_key(self._spec.label, member)
            keys |= {here_key(self._spec, member), asking}
            if (ask := known(asking, self._client, 0.1)) is not None:
                keys.add(answer_key(self._spec.label, member, ask.decode()))
        return keys

    def _done(self) -> list[int]:
        return [member for member, task in self._pending.items() if task.done()]

    def _take(self, member: int, task: distributed.Future) -> None:
        error = task.exception() if task.status == "error" else None
        if error is not None or task.cancelled():
            self._lost[member] = why(error)
            return
        self._ends[member] = task.result()

    def _gone(self) -> list[int]:
        """Return the members with lost workers: a task that is pinned there waits for ever.

        A worker counts as lost when two polls in a row do not find it.
        """
        there = workers_of(self._client)
        absent = {member for member in self._pending if self._chosen[member] not in there}
        gone, self._absent = absent & self._absent, absent
        return sorted(gone)

    def _blamed(self) -> set[int]:
        blamed = {lost_member(self._spec, end) for end in self._ends.values()}
        return {member for member in blamed if member is not None and member not in self._ends}


@contextmanager
def placing(client: distributed.Client, spec: GangSpec, wait_s: float) -> Iterator[Any]:
    """Be the only gang that starts tasks, until the yielded function is called, or the block ends.

    Two gangs that have each started half of their tasks could wait for each other for ever. The lease ends with its
    driver.
    """
    lock = distributed.Semaphore(max_leases=1, name=_PLACING, scheduler_rpc=client.scheduler, loop=client.loop)
    awaited(
        f"job {spec.job!r}",
        wait_s,
        lambda seconds: bool(lock.acquire(timeout=seconds)),
        lambda: "another gang waits for its workers",
    )
    held = [lock]

    def release() -> None:
        if held:
            held.pop().release()

    try:
        yield release
    finally:
        with suppress(Exception):
            release()


def workers_of(client: distributed.Client) -> Mapping[str, Mapping[str, Any]]:
    """Return the scheduler's description of each worker, by address."""
    workers: Mapping[str, Mapping[str, Any]] = client.scheduler_info(n_workers=-1)["workers"]
    return workers


def why(error: BaseException | None) -> str:
    """Say why a task has told nothing, as the end of a sentence."""
    if error is None:
        return "was cancelled"
    if missing := _MISSING_MODULE.search(str(error)):
        return f"has no module {missing[1]!r}, unlike the driver: install it on every worker"
    if isinstance(error, distributed.KilledWorker):
        return "is gone: its worker has ended"
    return f"has ended: {type(error).__name__}: {str(error)[:300]}"


def _host(address: str) -> str:
    return address.rpartition("://")[2].rpartition(":")[0]

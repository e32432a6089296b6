"""`overlap.ray.run`: starts a world on actors, which are placed together, watched, and ended together."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..config import RunConfig, resolve_config
from ..errors import UsageError
from ..flight.folder import ENDING
from ..notice import notify
from ..settings import check_seconds
from .job import JobSpec, MemberEnd, Outcome, make_job_spec, take_job_files
from .member import MET, MemberActor
from .placement import (
    actor_nodes_and_options,
    check_placement,
    describe_missing_resources,
    free_resources_by_node,
    lost_nodes,
    wait_for_resources,
)
from .restarts import blamed_members, run_attempts
from .store import CALLS, RayStore, make_store

if TYPE_CHECKING:
    import topology

T = TypeVar("T")

WAIT_S = 300.0
"""Default limit of the wait for resources, in seconds: an autoscaler adds a machine in that time."""

# Seconds from the first failure until actors that have not ended by themselves are killed.
GRACE_S = 10.0
# Limit of calls that an actor answers at once, unless its machine is lost.
_ANSWER_S = 5.0
# Limit of a task that needs a new process; Ray starts it in up to 15 s on a crowded machine.
_LEFT_BEHIND_S = 30.0
_POLL_S = 0.5  # pause between two looks at actors after a failure
_NODE_LOST = "is gone, and its node with it"
_LOSSES = {
    "node has died": _NODE_LOST,
    "node was terminated": _NODE_LOST,
    "actor is temporarily unavailable": "does not answer any more: it is gone, or its node is",
    "running low on memory": "was killed by Ray, because its node ran low on memory",
    "worker process has died": "has died: it was killed, or has crashed",
}
"""Reason of a loss, by words in the text of Ray's errors, which have no types for these cases."""
_MISSING_MODULE = re.compile(r"No module named '([^']+)'")


def run(
    main: Callable[..., Awaitable[T]],
    *args: object,
    ranks: int,
    ranks_per_actor: int = 1,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    max_restarts: int = 0,
    wait_s: float = WAIT_S,
    name: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    cluster: str | topology.Cluster = "local",
    trace: str | os.PathLike[str] | None = None,
    trace_steps: str | None = None,
    timeout_s: float | None = None,
    transport: str | None = None,
    algorithm: str | None = None,
    check: str | None = None,
    state_dir: str | None = None,
    flight_dir: str | None = None,
) -> list[T]:
    """Run `main(rank, *args)` on ranks in actors of a Ray cluster, and return their results in rank order.

    All actors start, or none. If an actor fails or is lost, all actors end, and the first failure is raised here, with
    the rank, its operation and its line. With `max_restarts` the actors start again, on other nodes if theirs are lost,
    and go on from `rank.state` or from checkpoints. The actors end with the driver, however the driver ends.

    Args:
        main: An async function; its first argument is the rank. The function is pickled, by value if the actors cannot
            import it.
        args: Further arguments, pickled too.
        ranks: Number of ranks.
        ranks_per_actor: Ranks of each actor. An actor is one process, so its ranks share memory.
        resources: Resources of each actor, such as {"CPU": 4, "GPU": 1}; None: one CPU.
        strategy: Strategy of the placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        max_restarts: Number of times that the world may be started again.
        wait_s: Seconds to wait for resources. After one second a line on stderr names the missing ones.
        name: Name of the job, for `overlap top`; None: a new name. Two jobs of one name do not run at once.
        runtime_env: Ray's description of the actors' environment; None: that of the driver.
        cluster: As for `overlap.run`.
        trace: File to which this process writes the timeline of all ranks; None: no timeline.
        trace_steps: As for `overlap.run`.
        timeout_s: As for `overlap.run`, for each attempt.
        transport: Name of the transport between processes, as for `overlap run --transport`.
        algorithm: As for `overlap.run`.
        check: As for `overlap.run`.
        state_dir: Folder of the states of `rank.state`, for restarts, that all nodes share.
        flight_dir: Folder into which this process puts the flight records of a run that fails.

    Raises:
        UsageError: If an argument is invalid or cannot be sent, if a node has another version of this package, or if a
            job of that name runs.
        ResourcesError: If there are not enough resources in time.
        RankFailedError: When a rank raises, or its process is lost. The `__cause__` is the error of the rank.
        StallError: As for `overlap.run`.
    """
    config = RunConfig.from_values(
        ranks=ranks, cluster=None if cluster == "local" else cluster, trace=trace, trace_steps=trace_steps,
        timeout_s=timeout_s, transport=transport, algorithm=algorithm, check=check,
        state_dir=None if state_dir is None else os.path.abspath(state_dir),
        flight_dir=None if flight_dir is None else os.path.abspath(flight_dir),
    )  # fmt: skip
    options = RayRun(
        ranks_per_actor=ranks_per_actor, resources={"CPU": 1.0} if resources is None else resources, strategy=strategy,
        max_restarts=max_restarts, wait_s=wait_s, name=name, runtime_env=runtime_env,
    )  # fmt: skip
    return cast("list[T]", options.run(main, args, resolve_config(main, args, config)))


@dataclass(kw_only=True)
class RayRun:
    """One call of `run`: its options, see `run`, and `excluded_nodes`, the ids of nodes that were lost during it."""

    ranks_per_actor: int = 1
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    strategy: str = "PACK"
    max_restarts: int = 0
    wait_s: float = WAIT_S
    name: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    excluded_nodes: set[str] = field(default_factory=set)

    def run(self, main: Callable[..., Awaitable[object]], args: tuple[object, ...], config: RunConfig) -> list[object]:
        """Run `main(rank, *args)`, and return the results in the order of ranks; `config` has been checked."""
        check_placement(self.resources, self.strategy)
        check_seconds("wait_s", self.wait_s)
        job = make_job_spec(main, args, config, ranks_each=self.ranks_per_actor, name=self.name)
        if not ray.is_initialized():
            ray.init(log_to_driver=True, logging_level="warning")
        try:
            # This actor reserves a name that the user has given; other names are new.
            holder = make_store(f"job/{job.name}") if self.name else None
        except ValueError as error:
            raise UsageError(
                f"name: a job named {job.name!r} runs on this cluster already; wait for its end, or choose another name"
            ) from error
        try:
            return run_attempts(job, self.run_attempt, max_restarts=self.max_restarts)
        finally:
            if holder is not None and ray.is_initialized():
                ray.kill(holder.actor)

    def run_attempt(self, job: JobSpec) -> Outcome:
        """Run one attempt, and return the outcome.

        All actors are killed before this returns or raises; it waits up to `_ANSWER_S` until Ray knows that.

        Raises:
            ResourcesError: The cluster has not had the resources within `wait_s`.
        """
        excluded = self.excluded_nodes
        amounts = {name: amount for name, amount in self.resources.items() if amount}
        selectors = [{"ray.io/node-id": f"!in({','.join(excluded)})"}] * job.members if excluded else None
        group = placement_group([amounts] * job.members, strategy=self.strategy, bundle_label_selector=selectors)
        actors: list[Any] = []
        nodes: list[str] = []
        try:
            demand = ", ".join(f"{name}: {amount:g}" for name, amount in amounts.items())
            wait_for_resources(
                f"job {job.name!r}, {job.members} x {{{demand}}}, {self.strategy}",
                self.wait_s,
                lambda seconds: bool(group.wait(seconds)),
                lambda: describe_missing_resources(amounts, job.members, free_resources_by_node(excluded)),
            )
            nodes, options = actor_nodes_and_options(group, amounts)
            actor_class = ray.remote(max_concurrency=CALLS, runtime_env=self.runtime_env)(MemberActor)
            for index, each in enumerate(options):
                actors.append(actor_class.options(**each).remote(job, index))
            outcome = run_all_members(job, actors, nodes)
            lost = [nodes[member] for member in outcome.lost]
            return replace(outcome, files=self._collect_files_of_lost_members(job, lost) if lost else {})
        finally:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            # A call of a killed actor returns when Ray knows that the actor has ended. After an error there may be
            # fewer actors than nodes, hence strict=False.
            ended = [actor.stop.remote() for actor, node in zip(actors, nodes, strict=False) if node not in excluded]
            if ended:
                ray.wait(ended, num_returns=len(ended), timeout=_ANSWER_S)
            with suppress(Exception):  # the cluster is gone, and the group with it
                remove_placement_group(group)

    def _collect_files_of_lost_members(self, job: JobSpec, nodes: Sequence[str]) -> dict[str, bytes]:
        """Return flight records of lost members, by file name; add lost nodes among theirs to `excluded_nodes`."""
        self.excluded_nodes.update(lost_nodes(nodes))
        files = take_job_files(job.token)  # of this machine
        if sum(name.endswith(ENDING) for name in files) >= len(nodes):
            return files
        for node in sorted({*nodes} - self.excluded_nodes):
            notify(f"job {job.name!r}: looking for flight records of lost processes on node {node[:6]}")
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            reader = ray.remote(take_job_files).options(num_cpus=0, scheduling_strategy=on_node, max_retries=0)
            with suppress(ray.exceptions.RayError, TimeoutError):
                files.update(ray.get(reader.remote(job.token), timeout=_LEFT_BEHIND_S))
        return files


def run_all_members(job: JobSpec, actors: Sequence[Any], nodes: Sequence[str]) -> Outcome:
    """Run the program on all members, and wait until all have ended.

    Once a member has failed, it waits for the others up to `GRACE_S`, or less if they have not met: then they do not
    notify each other of failures. It does not wait for members that are known to be lost.

    Args:
        job: The job.
        actors: The actor of each member.
        nodes: The node of each member.

    Returns:
        The reports of members, and the reasons of members without one; without `files`.
    """
    met = actors[0].get.remote(MET)  # done when all members have met
    pending = {actor.run.remote(RayStore(actors[0])): member for member, actor in enumerate(actors)}
    ends: dict[int, MemberEnd] = {}
    lost_members: dict[int, str] = {}
    blamed: set[int] = set()
    on_lost_nodes: set[int] = set()
    until_s, has_met = inf, True
    try:
        while time.monotonic() < until_s and not (blamed | on_lost_nodes).issuperset(pending.values()):
            done, _ = ray.wait(list(pending), num_returns=1, timeout=None if until_s == inf else _POLL_S)
            for answer in done:
                member = pending.pop(answer)
                try:
                    ends[member] = ray.get(answer)
                except ray.exceptions.RayError as error:
                    lost_members[member] = loss_reason(error)
            if lost_members or any(end.results is None for end in ends.values()):
                if until_s == inf:
                    has_met = bool(ray.wait([met], timeout=0)[0])
                    until_s = time.monotonic() + (GRACE_S if has_met else _POLL_S)
                away = lost_nodes({nodes[member] for member in pending.values()})
                on_lost_nodes = {member for member in pending.values() if nodes[member] in away}
                blamed = blamed_members(job, ends)
    except BaseException:  # Ctrl-C
        for actor in actors:
            actor.stop.remote()
        ray.wait(list(pending), num_returns=len(pending), timeout=_ANSWER_S)
        raise
    late = f"did not end within {GRACE_S:g} s, and is killed" if has_met else "had met no other, and was ended"
    for member in pending.values():
        reason = "is gone" if member in blamed else late
        lost_members[member] = _NODE_LOST if member in on_lost_nodes else reason
    return Outcome(ends=ends, lost=lost_members)


def loss_reason(error: Exception) -> str:
    """Return why an actor has sent no report, as the end of a sentence."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    first_lines = " ".join(lines)[:300]  # without the traceback
    if missing := _MISSING_MODULE.search(text):
        return (
            f"has no module {missing[1]!r}: its Python environment differs from the driver's; install it on every "
            f"node, or name it in runtime_env={{'pip': [...]}}"
        )
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return f"has no Python environment: {first_lines}"
    return next((reason for words, reason in _LOSSES.items() if words in text), f"has ended: {first_lines}")

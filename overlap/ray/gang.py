"""Gang on Ray: one attempt of a world. Its actors are placed together, watched, and ended together."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..engines.attempts import summary_line
from ..engines.gang import GangOutcome, GangSpec, MemberEnd
from ..engines.home import take_records
from ..engines.verdict import blamed_members, failure
from ..notice import notify
from .actors import CALLS, MemberActor, RayStore
from .placement import GangPlacement, local_nodes, lost_nodes, reserve_placement

# From the first failure to the hard end of the actors that have not ended by themselves.
GRACE_S = 10.0
# Limit of calls that any actor answers at once, unless its machine is lost.
_ANSWER_S = 5.0
# Limit of a task that needs a new process; Ray starts it in up to 15 s on a crowded machine.
_LEFT_BEHIND_S = 30.0
_POLL_S = 0.5
_MISSING_MODULE = re.compile(r"No module named '([^']+)'")


@dataclass(kw_only=True)
class RayGang:
    """Placement of the actors of a job, and the run of one attempt."""

    resources: Mapping[str, float]  # Resources of each actor
    strategy: str  # Strategy of the placement group
    wait_s: float  # How long to wait for resources
    runtime_env: Mapping[str, Any] | None  # Environment of the actors
    excluded_nodes: set[str] = field(default_factory=set)  # Nodes that were lost

    def run_attempt(self, spec: GangSpec) -> GangOutcome:
        """Run one attempt, and return its outcome; no actor is left then."""
        with reserve_placement(
            f"job {spec.job!r}",
            spec.members,
            self.resources,
            strategy=self.strategy,
            limit_s=self.wait_s,
            without=self.excluded_nodes,
        ) as placement:
            actors = [self._start_actor(spec, member, placement) for member in range(spec.members)]
            try:
                running = [actor.run.remote(RayStore(actors[0])) for actor in actors]
                outcome = _ActorWatch(spec, actors, placement.nodes, running).wait_for_outcome()
                return self._with_files(spec, outcome, actors, placement)
            finally:
                _end_actors(actors, [node in self.excluded_nodes for node in placement.nodes])

    def _start_actor(self, spec: GangSpec, member: int, placement: GangPlacement) -> Any:
        """Start the actor of a member in its bundle."""
        environment = {} if self.runtime_env is None else {"runtime_env": dict(self.runtime_env)}
        options = (
            placement.options(member)
            | {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": CALLS}
            | environment
        )
        return ray.remote(MemberActor).options(**options).remote(spec, member)

    def _with_files(
        self, spec: GangSpec, outcome: GangOutcome, actors: Sequence[Any], placement: GangPlacement
    ) -> GangOutcome:
        """Return an outcome with flight records of lost members, and note the nodes that are lost."""
        if not outcome.lost:
            return outcome
        nodes = {placement.nodes[member] for member in outcome.lost}
        self.excluded_nodes.update(lost := lost_nodes(nodes))
        files = take_records(spec.token)  # of this machine
        for node in sorted(nodes.difference(lost, local_nodes() if files else ())):
            near = [member for member in outcome.ends if placement.nodes[member] == node]
            if near:
                files.update(_wait_for_answer(actors[near[0]].left_behind.remote(), _ANSWER_S) or {})
                continue
            if (error := failure(spec, outcome)) is not None:
                notify(f"{summary_line(error)}; looking for flight records on node {node[:6]}")
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            reader = ray.remote(take_records).options(num_cpus=0, scheduling_strategy=on_node, max_retries=0)
            files.update(_wait_for_answer(reader.remote(spec.token), _LEFT_BEHIND_S) or {})
        return replace(outcome, files=files)


class _ActorWatch:
    """Waits for the ends of all members, and once one has failed only for as long as the others may need."""

    def __init__(self, spec: GangSpec, actors: Sequence[Any], nodes: Sequence[str], running: Sequence[Any]) -> None:
        self._spec, self._actors, self._nodes = spec, actors, nodes
        self._pending = {answer: member for member, answer in enumerate(running)}
        self._ends: dict[int, MemberEnd] = {}
        self._lost: dict[int, str] = {}
        self._on_lost_nodes: set[int] = set()
        self._until_s: float | None = None
        self._has_met = True

    def wait_for_outcome(self) -> GangOutcome:
        """Wait for the ends of all members; once one has failed, only as long as the others may need."""
        try:
            while self._pending and not self._is_over():
                self._poll()
        except BaseException:  # Ctrl-C
            self._stop()
            raise
        late = (
            f"did not end within {GRACE_S:g} s, and is killed" if self._has_met else "had met no other, and was ended"
        )
        for member in self._pending.values():
            reason = "is gone" if member in blamed_members(self._spec, self._ends) else late
            self._lost[member] = "is gone, and its node with it" if member in self._on_lost_nodes else reason
        return GangOutcome(ends=self._ends, lost=self._lost)

    def _poll(self) -> None:
        """Wait for the end of a member, or for a moment once one has failed."""
        done, _ = ray.wait(list(self._pending), num_returns=1, timeout=_POLL_S if self._until_s else None)
        for answer in done:
            member = self._pending.pop(answer)
            try:
                self._ends[member] = ray.get(answer)
            except ray.exceptions.RayError as error:
                self._lost[member] = loss_reason(error)
        if self._until_s is None and self._has_failed():
            self._has_met = self._has_world()
            self._until_s = time.monotonic() + (GRACE_S if self._has_met else _POLL_S)
        if self._until_s is not None:
            lost = lost_nodes({self._nodes[member] for member in self._pending.values()})
            self._on_lost_nodes = {member for member in self._pending.values() if self._nodes[member] in lost}

    def _has_failed(self) -> bool:
        """Whether a member is lost, or has ended without results."""
        return bool(self._lost) or any(end.results is None for end in self._ends.values())

    def _has_world(self) -> bool:
        """Whether the world has started, so that its processes notify each other of failures."""
        if any(end.begun_s for end in self._ends.values()):
            return True
        questions = [self._actors[member].lives.remote() for member in self._pending.values()]
        while questions:
            done, questions = ray.wait(questions, num_returns=1, timeout=_ANSWER_S)
            if not done:
                return False
            if (lives := _wait_for_answer(done[0], _ANSWER_S)) is not None:
                return bool(lives)
        return False

    def _is_over(self) -> bool:
        """Whether to stop waiting: the time after a failure is over, or no missing member will send a report."""
        if self._until_s is None:
            return False
        return time.monotonic() >= self._until_s or self._members_without_report().issuperset(self._pending.values())

    def _members_without_report(self) -> set[int]:
        """Return the members that will send no report: others blame them, or their nodes are lost."""
        return blamed_members(self._spec, self._ends) | self._on_lost_nodes

    def _stop(self) -> None:
        """Stop the ranks, and wait for their ends within the limit of an answer."""
        for actor in self._actors:
            actor.stop.remote()
        ray.wait(list(self._pending), num_returns=len(self._pending), timeout=_ANSWER_S)


def _wait_for_answer(request: Any, limit_s: float) -> Any:
    """Return the answer of an actor or task; None if it gives none in time."""
    try:
        return ray.get(request, timeout=limit_s)
    except (ray.exceptions.RayError, TimeoutError):
        return None


def _end_actors(actors: Sequence[Any], homeless: Sequence[bool]) -> None:
    """End actors at once, and return when Ray knows the end of every actor on a living node."""
    for actor in actors:
        ray.kill(actor, no_restart=True)
    answers = [actor.lives.remote() for actor, is_lost in zip(actors, homeless, strict=True) if not is_lost]
    if answers:
        ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_S)


def loss_reason(error: Exception) -> str:
    """Return why an actor has sent no report, as the end of a sentence."""
    text = str(error)
    if missing := _MISSING_MODULE.search(text):
        return (
            f"has no module {missing[1]!r}: its Python environment differs from the driver's; install it on every "
            f"node, or name it in runtime_env={{'pip': [...]}}"
        )
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return f"has no Python environment: {_first_lines(text)}"
    if "node has died" in text or "node was terminated" in text:
        return "is gone, and its node with it"
    if "actor is temporarily unavailable" in text:
        return "does not answer any more: it is gone, or its node is"
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "running low on memory" in text:
        return "was killed by Ray, because its node ran low on memory"
    if "worker process has died" in text:
        return "has died: it was killed, or has crashed"
    return f"has ended: {_first_lines(text)}"


def _first_lines(text: str) -> str:
    """Return the text of an error of Ray in one line of up to 300 characters, without its traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(lines)[:300]

"""The rules by which surviving processes agree on the next world, and why they are correct. Pure.

An epoch is the time of one world, from its start to its end or the first loss. A member is a process of that world, by
its number in the first world. The witness is a record that accepts one decision for each epoch, such as a file that
only the first of several writers creates. It holds the newest world.

States of a member of epoch e: TRAINS, until it learns of a loss; REPORTS: the witness has its report of epoch e, with
its greatest agreed step; then JOINS the world of epoch e + 1, or is OUT, because that world does not include it. A
survivor proposes the next world once all members that it believes alive have reported. Only the first proposal of an
epoch becomes the record; every other survivor reads the record and follows it.

* No two worlds of one epoch: the witness accepts one proposal of epoch e + 1, and only while it holds epoch e.
* No return to an old epoch: a member that is not in the record is OUT, at whatever time it reads the record, and no
  later world may name it.
* No step lost or doubled: `StepProgress` lets a member apply a step only after all members have prepared it. So agreed
  steps differ by one at most, and each member that lags has prepared the next one. The next world begins after the
  greatest reported step; a report closes the progress of its epoch, so nothing changes behind it.
* No endless wait: a survivor waits only for reports of members that it believes alive. Each of these reports, or counts
  as lost after a limit, which ends the wait as well. A loss after the proposal makes one more epoch; members are
  finite.
* No endless epochs: if a world cannot meet, two of its members cannot connect to each other. They report it, and no
  later world includes both of them until they have answered.

A false suspicion excludes a live member; it never makes two worlds. If two members suspect each other, both propose,
the first proposal becomes the record, and the other member is OUT.
"""

import enum
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from transports.failures import REPORT_BUG

M = TypeVar("M")


class AgreementState(enum.Enum):
    """State of a process as a member of its epoch."""

    TRAINS = enum.auto()  # the world runs
    REPORTS = enum.auto()  # it has reported after a loss, and waits for the next world
    JOINS = enum.auto()  # it is a member of the next world, whose processes join
    OUT = enum.auto()  # the next world does not include it


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochWorld:
    """The world of one epoch."""

    epoch: int  # number of the epoch, from 0
    members: tuple[int, ...]  # numbers of its processes in the first world, in the order of their ranks
    step: int  # last step that all members must have applied before they begin


@dataclass(frozen=True, slots=True)
class Prepared(Generic[M]):
    """A step that a member has prepared, with its mean gradients, one for each part of the weights."""

    step: int
    means: Sequence[M]


class StepProgress(Generic[M]):
    """Steps of one member in one epoch: a step is prepared, then agreed, then applied.

    The mean gradients of a step belong to the epoch in which they were computed: they are dropped at the next step, and
    at the end of the epoch at the latest.

    Args:
        step: Last step before the epoch.

    Attributes:
        agreed: Greatest step that, as this member knows, all members have prepared.
        closed: Whether the member has reported.
    """

    def __init__(self, step: int = 0) -> None:
        self._latest: Prepared[M] = Prepared(step, ())  # the means of that step belonged to an earlier epoch
        self.agreed: int = step
        self.closed: bool = False

    @property
    def prepared(self) -> int:
        """Greatest step that this member has prepared."""
        return self._latest.step

    def prepare(self, step: int, means: Sequence[M] = ()) -> None:
        """Record that this member has prepared a step: it can apply the step without other members.

        Args:
            step: Number of the step: one more than `agreed`, or any number if nothing is agreed.
            means: What the member applies, one item for each part of the weights.

        Raises:
            AssertionError: The step has another number, or this member has reported.
        """
        restored = self.agreed == 0 < step  # nothing has been applied: the first step may follow a checkpoint
        self._assert_open(step == self.agreed + 1 or restored, f"step {step} prepared after {self.agreed}")
        self._latest = Prepared(step, means)

    def agree(self, step: int) -> None:
        """Record that all members have prepared a step, which may be applied from now on.

        Raises:
            AssertionError: This member has not prepared that step, or has reported.
        """
        self._assert_open(step == self.prepared, f"step {step} agreed, prepared is {self.prepared}")
        self.agreed = step

    def report(self) -> int:
        """Return the agreed step, and end the progress of the epoch."""
        self.closed = True
        return self.agreed

    def begin_next_epoch(self, after_step: int) -> tuple["StepProgress[M]", Sequence[M]]:
        """Return the progress of the next epoch, and the means that must be applied before it.

        These are the means that this member has prepared for `after_step`; none if it has prepared a later step, and so
        has applied `after_step`.

        Args:
            after_step: Last step that all members of the next world apply.
        """
        if not self.closed or after_step not in (self.agreed, self.prepared):
            raise AssertionError(
                f"next world begins after step {after_step}, not {self.agreed} or {self.prepared}: {REPORT_BUG}"
            )
        return StepProgress(after_step), self._latest.means if after_step == self.prepared else ()

    def _assert_open(self, valid: bool, reason: str) -> None:
        """Raise an AssertionError if this member has reported, or if `valid` is false; `reason` is for the message."""
        if self.closed or not valid:
            raise AssertionError(f"{'after its report: ' if self.closed else ''}{reason}: {REPORT_BUG}")


def accepts_proposal(record: EpochWorld, proposal: EpochWorld) -> bool:
    """Whether a proposal may follow the newest world: it is of the next epoch, and its members are in that world."""
    before, after = set(record.members), set(proposal.members)
    distinct = 0 < len(after) == len(proposal.members)
    return proposal.epoch == record.epoch + 1 and distinct and after <= before


def member_state(member: int, world: EpochWorld, record: EpochWorld) -> AgreementState:
    """Return the state of a process that has reported, given the newest world that the witness has recorded.

    Args:
        member: The process.
        world: The world in which the process has reported.
        record: The newest world that the witness has recorded.
    """
    if member not in record.members:
        return AgreementState.OUT
    return AgreementState.JOINS if record.epoch > world.epoch else AgreementState.REPORTS


def lost_members(
    world: EpochWorld,
    *,
    dead: Set[int],
    suspects: Set[int],
    reports: Set[int],
    waited_s: float,
    suspect_s: float,
    report_s: float,
) -> set[int]:
    """Return the members that count as lost: those that have ended, or have not reported within their limit.

    Args:
        world: The world that lost a member.
        dead: Members whose processes have ended.
        suspects: Members to which the caller has lost its connection; they may be alive.
        reports: Members that have reported in this epoch.
        waited_s: Seconds since the caller's own report.
        suspect_s: Limit of the wait for a suspect, in seconds.
        report_s: Limit of the wait for any other member, in seconds.
    """
    late = {m for m in world.members if waited_s >= (suspect_s if m in suspects else report_s)}
    return (late - reports) | (set(world.members) & dead)


def cut_off_members(world: EpochWorld, unreached: Mapping[int, Set[int]], *, lost: Set[int]) -> set[int]:
    """Return the members that the next world must leave out so that all others can connect to each other.

    Members are left out one by one: that which lacks most connections; of several such members, the last in the order
    of the world. So, if a world has fallen into two parts, the larger part is left; of equal parts, the part of the
    first member. Processes that see the same reports come to the same result.

    Args:
        world: The world that lost members.
        unreached: By member that has reported, the members to which it could not connect.
        lost: Members that count as lost anyway.
    """
    # For each live member, the members that it cannot reach, or that cannot reach it.
    apart: dict[int, set[int]] = {member: set() for member in reversed(world.members) if member not in lost}
    for member in apart:
        for other in apart.keys() & unreached.get(member, set()):
            apart[member].add(other)
            apart[other].add(member)
    out: set[int] = set()
    # Leave out the worst member, and so its missing connections, until no connection is missing.
    while any(apart.values()):
        # Of several, `max` returns the first in `apart`, which is the last in the world.
        worst = max(apart, key=lambda member: len(apart[member]))
        for other in apart.pop(worst):
            apart[other].discard(worst)
        out.add(worst)
    return out


def is_minority(world: EpochWorld, *, lost: Set[int], ended: Set[int]) -> bool:
    """Whether less than half of a world is left while lost members may be alive, who may be the majority.

    Args:
        world: The world that lost members.
        lost: Members that count as lost.
        ended: Lost members whose processes have certainly ended.
    """
    alive = [member for member in world.members if member not in lost]
    return bool(lost - ended) and 2 * len(alive) < len(world.members)


def propose_world(world: EpochWorld, reports: Mapping[int, int], lost: Set[int]) -> EpochWorld | None:
    """Return the next world to propose: the members that are not lost, after the greatest agreed step of any of them.

    None if no member is left, or one of them has not reported yet.

    Args:
        world: The world that lost a member.
        reports: The agreed step of each member that has reported in this epoch.
        lost: Members that count as lost.
    """
    alive = tuple(member for member in world.members if member not in lost)
    if not alive or any(member not in reports for member in alive):
        return None
    return EpochWorld(epoch=world.epoch + 1, members=alive, step=max(reports[member] for member in alive))

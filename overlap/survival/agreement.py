"""State machine of the agreement on the next world, with the argument for it. Pure.

Witness: a record that takes one decision for each epoch, such as a file that only the first of several writers creates.
It holds the newest world.

States of a member of epoch e: TRAINS, until it learns of a loss; REPORTS: its report of epoch e (its greatest agreed
step) is with the witness; then JOINS the world of epoch e + 1, or is OUT, because that world lacks it. A survivor
proposes the next world once all members that it believes alive have reported. Only the first proposal of an epoch
becomes the record; every other survivor reads the record and follows it.

* No two worlds of one epoch: the witness accepts one proposal of epoch e + 1, and only while it holds epoch e.
* No return to an old epoch: a member that is not in the record is OUT, at whatever time it reads the record, and no
  later world may name it.
* No step lost or doubled: `StepProgress` lets a member apply a step only after all members have prepared it. So agreed
  steps differ by one at most, and each member that lags has prepared the next one. The next world begins after the
  greatest reported step; a report closes the progress of its epoch, so nothing changes behind it.
* No endless wait: a survivor waits only for reports of members that it believes alive. Each of these reports, or counts
  as lost after a limit, which ends the wait as well. A loss after the proposal makes one more epoch; members are
  finite.
* No endless epochs: a world that cannot meet has a pair of members that cannot dial each other. They report it, and no
  later world has both of them, until they have answered.

A false suspicion excludes a member that lives; it never makes two worlds. Two members that suspect each other both
propose, the first proposal is the record, and the other member is OUT.
"""

import enum
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")


class AgreementState(enum.Enum):
    """State of a process as a member of its epoch."""

    TRAINS = enum.auto()
    REPORTS = enum.auto()
    JOINS = enum.auto()
    OUT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochWorld:
    """World of one epoch: members in their order, and the last step that all of them apply before they go on."""

    epoch: int
    members: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Prepared(Generic[M]):
    """A step that a member has prepared, with the means that apply it, one for each part of the weights."""

    step: int
    means: Sequence[M]


class StepProgress(Generic[M]):
    """Steps of one member in one epoch: a step is prepared, then agreed, then applied.

    The means of a step are those of its epoch: they end with the next step, and with the epoch at the latest.

    Attributes:
        agreed: Greatest step that all members have prepared.
        closed: Whether the member has reported.

    Args:
        step: Last step before the epoch.
    """

    def __init__(self, step: int = 0) -> None:
        self._latest: Prepared[M] = Prepared(step, ())  # the means of that step belonged to an earlier epoch
        self.agreed: int = step
        self.closed: bool = False

    @property
    def prepared(self) -> int:
        """Greatest step for which this member has all that it needs."""
        return self._latest.step

    def prepare(self, step: int, means: Sequence[M] = ()) -> None:
        """Note that this member has all that it needs to apply a step: its means."""
        restored = self.agreed == 0 < step  # nothing has been applied: the first step may follow a checkpoint
        self._assert_open(step == self.agreed + 1 or restored, f"step {step} prepared after {self.agreed}")
        self._latest = Prepared(step, means)

    def agree(self, step: int) -> None:
        """Note that all members have prepared a step, which may be applied from now on."""
        self._assert_open(step == self.prepared, f"step {step} agreed, prepared is {self.prepared}")
        self.agreed = step

    def report(self) -> int:
        """Return the agreed step, and end the progress of the epoch."""
        self.closed = True
        return self.agreed

    def following(self, step: int) -> tuple["StepProgress[M]", Sequence[M]]:
        """Return the progress of the next epoch, which begins after a step, and the means of that step here.

        The means are those that this member has prepared in this epoch; none, if the step is an earlier one.
        """
        if not self.closed or step not in (self.agreed, self.prepared):
            raise AssertionError(f"next world begins after step {step}; agreed {self.agreed}, prepared {self.prepared}")
        return StepProgress(step), self._latest.means if step == self.prepared else ()

    def _assert_open(self, valid: bool, reason: str) -> None:
        """Raise an AssertionError after the report of this member, or if a condition does not hold."""
        if self.closed or not valid:
            raise AssertionError(f"after its report: {reason}" if self.closed else reason)


def accepts(record: EpochWorld, proposal: EpochWorld) -> bool:
    """Whether a proposal may follow the record: it is of the next epoch, and its members are in the record."""
    before, after = set(record.members), set(proposal.members)
    distinct = 0 < len(after) == len(proposal.members)
    return proposal.epoch == record.epoch + 1 and distinct and after <= before


def member_state(member: int, world: EpochWorld, record: EpochWorld, *, reported: bool) -> AgreementState:
    """Return the state of a process, given the newest world that the witness has recorded.

    Args:
        member: The process.
        world: The world that it is a member of.
        record: The newest world.
        reported: Whether it has reported in `world`.
    """
    if member not in record.members:
        return AgreementState.OUT
    if record.epoch > world.epoch:
        return AgreementState.JOINS
    return AgreementState.REPORTS if reported else AgreementState.TRAINS


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
    """Return the members that count as lost: their processes have ended, or have not reported for too long.

    Args:
        world: The world that lost a member.
        dead: Members whose processes have ended.
        suspects: Members that the caller has lost, though they may live.
        reports: Members that have reported in this epoch.
        waited_s: Time since the caller's own report.
        suspect_s: Limit of the wait for a suspect.
        report_s: Limit of the wait for any other member.
    """
    late = {m for m in world.members if waited_s >= (suspect_s if m in suspects else report_s)}
    return (late - reports) | (set(world.members) & dead)


def cut_off_members(world: EpochWorld, unreached: Mapping[int, Set[int]], *, lost: Set[int]) -> set[int]:
    """Return the members that the next world leaves out because others could not dial them, until all reach each other.

    All that see the same reports leave out the same members: again and again the one that lacks most connections; of
    several, the last in the order of the world. So of two parts the larger one is left, and of equal parts that of the
    first member.

    Args:
        world: The world that lost members.
        unreached: Members that a member could not dial, by the member that has reported it.
        lost: Members that count as lost anyway.
    """
    apart: dict[int, set[int]] = {member: set() for member in reversed(world.members) if member not in lost}
    for member in apart:
        for other in apart.keys() & unreached.get(member, set()):
            apart[member].add(other)
            apart[other].add(member)
    out: set[int] = set()
    while any(apart.values()):
        worst = max(apart, key=lambda member: len(apart[member]))  # the first of several: the last in the world
        for other in apart.pop(worst):
            apart[other].discard(worst)
        out.add(worst)
    return out


def is_minority(world: EpochWorld, *, lost: Set[int], ended: Set[int]) -> bool:
    """Whether less than half of a world is left, and lost members may live: a larger part may go on without this one.

    Args:
        world: The world that lost members.
        lost: Members that count as lost.
        ended: Those of them whose processes have certainly ended.
    """
    alive = [member for member in world.members if member not in lost]
    return bool(lost - ended) and 2 * len(alive) < len(world.members)


def propose_world(world: EpochWorld, reports: Mapping[int, int], lost: Set[int]) -> EpochWorld | None:
    """Return the next world to propose; None while a member that counts as alive has not reported.

    Args:
        world: The world that lost a member.
        reports: The agreed step of each member that has reported in this epoch.
        lost: Members that count as lost.
    """
    alive = tuple(member for member in world.members if member not in lost)
    if not alive or any(member not in reports for member in alive):
        return None
    return EpochWorld(epoch=world.epoch + 1, members=alive, step=max(reports[member] for member in alive))

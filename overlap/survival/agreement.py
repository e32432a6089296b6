"""State machine of the agreement on the next world, with the argument for it. Pure.

Witness: a record that only an atomic comparison may replace, such as a file under a lock. It holds the newest world.

States of a member of epoch e: TRAINS, until it learns of a loss; REPORTS: its report of epoch e (the last step that it
applied) is with the witness; then JOINS the world of epoch e + 1, or is OUT, because that world lacks it. A survivor
proposes the next world once all members that it believes alive have reported. Only the first proposal of an epoch
replaces the record; every other survivor reads the record and follows it.

* No two worlds of one epoch: the witness accepts one proposal of epoch e + 1, and only while it holds epoch e.
* No return to an old epoch: a member that is not in the record is OUT, at whatever time it reads the record.
* No step lost or doubled: a member applies step s only after all members have prepared it. So the applied steps differ
  by one at most, and each member that lags holds what it needs. The next world begins after the greatest reported step.
* No endless wait: a survivor waits only for reports of members that it believes alive. Each of these reports, or is
  lost, which ends the wait as well. A loss after the proposal makes one more epoch, and members are finite.
"""

import enum
from collections.abc import Mapping, Set
from dataclasses import dataclass


class State(enum.Enum):
    """State of a member in its epoch."""

    TRAINS = enum.auto()
    REPORTS = enum.auto()
    JOINS = enum.auto()
    OUT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """World of one epoch: members in their order, and the last step that all of them apply before they go on."""

    epoch: int
    members: tuple[int, ...]
    step: int


def accepts(record: Membership, proposal: Membership) -> bool:
    """Whether the witness replaces its record: the proposal follows the record, and all its members are in that."""
    return proposal.epoch == record.epoch + 1 and set(proposal.members) <= set(record.members)


def state_of(member: int, world: Membership, record: Membership, *, reported: bool) -> State:
    """State of a member of `world`, given the record of the witness."""
    if member not in record.members:
        return State.OUT
    if record.epoch > world.epoch:
        return State.JOINS
    return State.REPORTS if reported else State.TRAINS


def proposal_of(world: Membership, reports: Mapping[int, int], lost: Set[int]) -> Membership | None:
    """Next world, or None while a member that counts as alive has not reported.

    Args:
        world: The world that lost a member.
        reports: The last applied step of each member that has reported in this epoch.
        lost: Members that count as lost.
    """
    alive = tuple(member for member in world.members if member not in lost)
    if not alive or any(member not in reports for member in alive):
        return None
    return Membership(epoch=world.epoch + 1, members=alive, step=max(reports[member] for member in alive))

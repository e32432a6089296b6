"""Worlds in virtual time that go on after losses: the surviving ranks run the program again, in the next epoch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ..errors import PeerLostError, RankFailedError
from ..runtime.epoch import Epoch
from ..simulation.simulated_backend import SimulatedBackend, Virtual
from .agreement import EpochWorld, propose_world

if TYPE_CHECKING:
    from topology import Cluster

T = TypeVar("T")

Live: TypeAlias = Callable[[SimulatedBackend, int, Sequence[Epoch], Mapping[str, str]], Awaitable[list[T]]]
"""Function that runs one world and returns the results of its ranks.

Its arguments: the backend, the number of ranks, the `Epoch` of each rank, and entries for the timeline.
"""

EPOCH, AFTER, STATE = "epoch", "after step", "state (bytes)"
"""Names of entries of a timeline: number of the epoch, last step before it, and bytes of a rank's state."""


def live_virtual_epochs(live: Live[T], assumptions: Virtual, cluster: Cluster, size: int) -> list[T]:
    """Run a program in virtual time; after losses run it again with the surviving ranks, until an epoch ends well.

    All ranks are in this process, so no rank waits for reports. Models, their reports, the rule that decides on the
    next world, and the order of the calls are the same as with real processes.

    Args:
        live: Runs the ranks of one epoch, and returns their results.
        assumptions: The assumptions of the simulation, with faults.
        cluster: Cluster of the ranks.
        size: Number of ranks in the first world.

    Returns:
        The results of the ranks of the last world, in their order.
    """
    faults = assumptions.faults
    assert faults is not None
    world, start_ns = EpochWorld(epoch=0, members=tuple(range(size)), step=0), 0
    epochs = {member: Epoch(survives=True, members=world.members) for member in world.members}
    while True:
        backend = SimulatedBackend(assumptions, cluster, began_ns=start_ns, epoch=world.epoch, members=world.members)
        members = [epochs[member] for member in world.members]
        nbytes = max(getattr(epoch.survivor, "nbytes", 0) for epoch in members)
        described = {EPOCH: str(world.epoch), AFTER: str(world.step), STATE: str(nbytes)}
        try:
            with backend.apply_fault_seed():
                return backend.kernel.run(live, backend, len(members), members, described)
        except Exception as error:
            cause = error.cause if isinstance(error, RankFailedError) else error
            lost = {cause.culprit} if isinstance(cause, PeerLostError) else set[int]()
            following = _next_world(world, epochs, lost | backend.dead)
            if following is None:
                raise
        # The survivors enter the next world, after the time that recovery takes.
        for member in following.members:
            epochs[member].enter(following.epoch, following.step, following.members)
        world, start_ns = following, backend.now_ns() + round(faults.recovery_s * 1e9)


def _next_world(world: EpochWorld, epochs: Mapping[int, Epoch], ranks: Set[int]) -> EpochWorld | None:
    """Return the world after the loss of some ranks, by numbers in `world`; None if none is lost, or none is left.

    The models of the survivors report their steps; they apply no further step until they enter the next world.
    """
    lost = {world.members[rank] for rank in ranks}
    if not lost:
        return None
    survivors = {member: epochs[member].survivor for member in world.members if member not in lost}
    reports = {member: model.report() if model else world.step for member, model in survivors.items()}
    return propose_world(world, reports, lost)

"""Roll call: launchers agree on the nodes of the next attempt of a job, where each machine has its own launcher.

The launcher of node 0 listens where its process will, as the host of a world does, and the other launchers join. As
soon as all nodes are present, or enough of them after the last call, it sends each the present nodes and the number of
the attempt. So the job goes on without lost nodes; nodes that are back, or that replace them, take part from the next
attempt on. A launcher that dials while a world runs is refused by its process 0, and tries again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from .identity import JoinError, RendezvousConfig, name_processes
from .join import join_here

#: Further time for the answer of node 0 after its own time limit: two ways, and busy machines.
_SLACK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """Part of a node in an attempt."""

    index: int  # Index of the node among those that take part
    nodes: int  # Number of nodes that take part
    attempt: int


async def call_roll(
    config: RendezvousConfig, ranks_per_node: int, report: Callable[[str], None], *, pause_s: float
) -> Participation:
    """Wait for the launchers of other nodes, and return the part of this node in the next attempt.

    Args:
        config: The launcher of this node: `member` is its node, `members` the number of nodes, `fewest` the least
            number, and `epoch` on node 0 the attempt.
        ranks_per_node: Ranks of each node.
        report: Prints lines for the user.
        pause_s: How long node 0 may pause before its roll call.

    Raises:
        JoinError: Node 0 cannot be reached in time or refuses this node, or too few launchers have joined.
    """
    detail = f"--nnodes {config.fewest}:{config.members} and {ranks_per_node} ranks each"
    config = replace(config, fresh=True, detail=detail)
    if config.member:
        config = replace(config, timeout_s=config.timeout_s + pause_s, roll_call_s=config.timeout_s + _SLACK_S)
    start_s = trio.current_time()
    async with join_here(config, report=report) as membership:
        present = membership.present
    if config.member not in present or not set(present) <= set(range(config.members)) or membership.attempt < 0:
        raise JoinError(
            f"node 0 has sent an invalid roll call, of nodes {present} in attempt {membership.attempt}; this is a bug "
            "in overlap, please report it"
        )
    missing = [node for node in range(config.members) if node not in present]
    if missing and not config.member:
        absent = f"{name_processes(missing, 'node')} did not join within {trio.current_time() - start_s:.0f} s"
        report(f"goes on with {len(present)} of {config.members} nodes: {absent}")
    return Participation(index=present.index(config.member), nodes=len(present), attempt=membership.attempt)

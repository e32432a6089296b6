"""What a cluster says of the groups of a world: which it does not allow, and of which it advises against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..diagnostics import calling

if TYPE_CHECKING:
    import topology


class GroupRules:
    """Checks the groups of a world against its cluster, each once.

    Args:
        cluster: Whose rules they are.
    """

    def __init__(self, cluster: topology.Cluster) -> None:
        self._cluster = cluster
        self._legal: set[tuple[int, ...]] = set()
        self._advised: set[str] = set()  # rules of which a warning has been given

    def check(self, ranks: tuple[int, ...]) -> None:
        """Raise `topology.TopologyError` if the cluster does not allow such a group; the first member finds out.

        What is allowed but not advised is a `topology.TopologyWarning`, once for each rule.
        """
        if ranks not in self._legal:
            for finding in self._cluster.check_group(ranks, warn=False):
                if finding.rule.id not in self._advised:
                    self._advised.add(finding.rule.id)
                    finding.warn(stacklevel=calling()[1])
            self._legal.add(ranks)

"""What it costs to start a program that holds collectives at all: its launch, and the barrier of its ranks.

Launch and barrier are paid once for each execution, milliseconds where an operation inside takes microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import log2

from topology import Cluster

_PAIR = 2
_FIRST_BARRIER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Overheads of one execution."""

    launch_s: float = 0.0  # to start a program, with collectives or without
    # for four ranks to meet before a program with collectives. A pair meets for nothing that shows.
    barrier_s: float = 0.0
    doubling_s: float = 0.0  # for each time that the largest group is twice as large
    # for each collective, from a compute engine's write to the CC-core's first step; collectives that follow each other
    # in a benchmark's loop do not pay it.
    trigger_s: float = 0.0

    def before_s(self, largest_group: int) -> float:
        """Return the time from the call to the program's first operation.

        Args:
            largest_group: Ranks of the largest group that a collective of the program runs on; 1 if it has none.
        """
        if largest_group <= _PAIR:
            return self.launch_s
        return self.launch_s + self.barrier_s + self.doubling_s * max(0.0, log2(largest_group / _FIRST_BARRIER))

    def program_s(self, largest_group: int, operations: int, operation_s: float) -> float:
        """Return the time of a program of equal collectives one after the other, and nothing else.

        Args:
            largest_group: Ranks that they run on.
            operations: How many collectives.
            operation_s: What one takes once it is triggered.
        """
        return self.before_s(largest_group if operations else 1) + operations * (self.trigger_s + operation_s)


def startup(cluster: Cluster) -> Startup:
    """Return what starting a program costs on a cluster; nothing where its machine's file says nothing of that."""
    program = cluster.machine.collectives.program
    figures = {each.name: getattr(program, each.name) for each in fields(Startup)}
    return Startup(**{name: figure.value for name, figure in figures.items() if figure})

"""Where the ranks of a world are while they are measured: in this process, or in one process for each node. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_LIMIT_S = 600
"""Absolute, for each row: a rank that waits for ever ends the world, and the bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """How many nodes, all of them processes of this machine, and what joins them."""

    nodes: int = 1  # How many; ranks are spread evenly over them. 1 is this process itself.
    tcp: bool = False  # Whether sockets are TCP although both ends are on one machine, where Unix sockets are faster
    rails: str | None = None  # Connections between two nodes, or the names of interfaces; None: the transport's choice
    peer_direct: bool = True  # Whether sockets read and write the arrays themselves
    checksums: bool | None = None  # Whether what sockets carry is checked on arrival; None: the transport's choice
    transport: str = "auto"  # "auto", "shared_memory", "efa" or "mpi"

    def options(self, ranks: int, *, rows: int = 1, algorithm: str | None = None) -> list[str]:
        """Return what `overlap run` must be told for a world of so many ranks that measures so many rows."""
        options = ["--nnodes", str(self.nodes), "--nproc-per-node", str(ranks // self.nodes)]
        options += ["--timeout", str(rows * _LIMIT_S), "--transport", self.transport]
        options += ["--no-unix" if self.tcp else "--unix", "--peer-direct" if self.peer_direct else "--no-peer-direct"]
        options += [] if self.rails is None else ["--rails", self.rails]
        options += [] if self.checksums is None else ["--checksums" if self.checksums else "--no-checksums"]
        return options if algorithm is None else [*options, "--algorithm", algorithm]

    def describe(self) -> str:
        """Say it in words."""
        if self.nodes == 1:
            return "ranks in one process"
        return f"ranks on {self.nodes} nodes (processes of this machine) joined by {self._wires()}"

    @property
    def shares_memory(self) -> bool:
        """Whether nothing is asked for that only sockets have."""
        plain = not self.tcp and self.rails in (None, "1") and self.peer_direct and self.checksums is None
        return self.transport == "shared_memory" or (self.transport == "auto" and plain)

    def _wires(self) -> str:
        if self.transport == "mpi":
            return "MPI"
        if self.shares_memory:
            return "shared memory"
        wires = "TCP" if self.tcp else "Unix sockets"
        if self.rails is not None:
            wires += f" over {self.rails}" + (" connections" if self.rails.isdecimal() else "")
        if self.checksums is not None:
            wires += f", {'with' if self.checksums else 'without'} checksums of payloads"
        return wires if self.peer_direct else f"{wires}, through a bounce buffer"

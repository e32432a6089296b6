"""What to start: the processes of one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What to start."""

    command: Sequence[str]  # The program and its arguments, the same on each node
    environ: Mapping[str, str]  # Environment of all
    nodes: int  # How many nodes the world has
    here: Sequence[int]  # The nodes to start on this machine
    ranks_per_node: int  # Ranks of each node; 0: there is one node, and its program says it
    endpoint: tuple[str, int]  # Host and port where node 0 listens
    listener: int | None  # Descriptor of the socket that listens there; node 0 inherits it
    job: str  # Name of the job
    secret: bytes  # What proves membership
    prefix: bool  # Whether to put the node before each line
    colour: bool  # Whether to colour that
    log_dir: str | None  # Folder for what the nodes print; None: the terminal
    grace_s: float  # Between being asked to end and being killed
    report: Callable[[str], None]  # Takes lines for the user while the processes run
    attempt: int = 0  # How often they have been started before
    bind: bool = False  # Whether each of several processes keeps to its share of the cores, if this machine lets them

    def log_path(self, node: int) -> str:
        """Return where the output of a node goes; each attempt has a file of its own."""
        again = f".restart-{self.attempt}" if self.attempt else ""
        return f"{self.log_dir}/node-{node}{again}.log"

    def __repr__(self) -> str:
        return f"<LaunchSpec of nodes {list(self.here)} of {self.nodes}, job {self.job!r}>"

"""Machines as data: where ranks sit, which wires join them, which groups are legal.

    topology
    |-- instances   names: cluster("trn2.48xlarge x4"), "local"
    |-- cluster     Cluster: places and bandwidths; asks the three below
    |   |-- routes      the links from one rank to another
    |   |-- groups      rings, grids and hypercubes in a set of ranks
    |   `-- legality    check_group and the nearest legal groups
    |-- wiring      the devices of one node as a graph;  grid: coordinates;  cycles: Hamiltonian cycles
    |-- machine     what a file says, as records;  rules: what it says about groups
    |-- files       TOML to machine (parse, reader: key by key);  data/: the built-in machines
    |-- draw        the machine as text (not imported here: only the command line draws)
    `-- errors      TopologyError, TopologyWarning

Pure: no I/O but reading a machine file, nothing asynchronous, nothing imported from the rest of the project.
"""

from __future__ import annotations

from .cluster import Cluster
from .errors import TopologyError, TopologyWarning, format_ranks, parse_ranks
from .grid import Grid
from .groups import Axis
from .instances import cluster, names
from .machine import Figure, LinkKind, Machine
from .routes import Link, Place, Port
from .rules import Finding, Rule

__all__ = [
    "Axis",
    "Cluster",
    "Figure",
    "Finding",
    "Grid",
    "Link",
    "LinkKind",
    "Machine",
    "Place",
    "Port",
    "Rule",
    "TopologyError",
    "TopologyWarning",
    "cluster",
    "format_ranks",
    "names",
    "parse_ranks",
]

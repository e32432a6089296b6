"""Machines as data: where ranks sit, which wires join them, which groups are legal.

       topology
    |-- cluster     cluster("trn2.48xlarge x4") and Cluster: it answers every question, by the modules below
    |-- routes      the place of each rank, and the links from one rank to another
    |-- groups      rings, grids and hypercubes in a set of ranks;  cycles: Hamiltonian cycles
    |-- rules       check_group and the nearest legal groups
    |-- wiring      the devices of one node as a graph, with coordinates where they form a grid
    |-- machine     the contents of a machine file, as records;  figures: its numbers, and those of collectives
    |-- libraries   the schedules of the library that a machine comes with
    |-- machinefile from TOML to a machine, with what it extends;  tables: from tables to records;  keys: limits and
    |               words of their keys;  data/: the files
    |-- picture     the machine as text (only the command line draws)
    `-- errors      TopologyError, TopologyWarning

Pure: no I/O but reading a machine file, nothing asynchronous, nothing imported from the rest of the project.
"""

from __future__ import annotations

from .cluster import Cluster, cluster, names
from .errors import TopologyError, TopologyWarning, format_ranks, parse_ranks
from .figures import Curve, Figure, WireOverheads
from .groups import Axis
from .libraries import Library
from .machine import Fabric, Level, LinkKind, Machine, Rule
from .routes import Link, Place, WireEnd
from .rules import Finding
from .wiring import Grid

__all__ = [
    "Axis",
    "Cluster",
    "Curve",
    "Fabric",
    "Figure",
    "Finding",
    "Grid",
    "Level",
    "Library",
    "Link",
    "LinkKind",
    "Machine",
    "Place",
    "Rule",
    "TopologyError",
    "TopologyWarning",
    "WireEnd",
    "WireOverheads",
    "cluster",
    "format_ranks",
    "names",
    "parse_ranks",
]

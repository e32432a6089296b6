"""Machines as data: where ranks sit, which wires join them, which groups are legal.

    topology
    |-- instances   names: cluster("trn2.48xlarge x4"), "local"
    |-- cluster     Cluster: all that it can be asked; it hands on to the three below
    |   |-- routes      the links from one rank to another
    |   |-- groups      rings, grids and hypercubes in a set of ranks
    |   `-- legality    check_group and the nearest legal groups
    |-- rankmap     where each rank sits and what its wires carry: what those three and Cluster stand on
    |-- wiring      the devices of one node as a graph;  grid: coordinates;  cycles: Hamiltonian cycles
    |-- machine     what a file says, as records;  grouprules: about groups;  overheads: about collectives
    |-- machinefile TOML to machine;  document, overheadtables: the tables of a file;  keys: what their keys hold;
    |               complaint: what is wrong with one;  data/: files
    |-- picture     the machine as text;  paragraph: lines of a width (only the command line draws)
    `-- errors      TopologyError, TopologyWarning

Pure: no I/O but reading a machine file, nothing asynchronous, nothing imported from the rest of the project.
"""

from __future__ import annotations

from .cluster import Cluster
from .errors import TopologyError, TopologyWarning, format_ranks, parse_ranks
from .grid import Grid
from .grouprules import Finding, Rule
from .groups import Axis
from .instances import cluster, names
from .machine import LinkKind, Machine
from .overheads import Curve, Figure, WireOverheads
from .rankmap import Place
from .routes import Link, Port

__all__ = [
    "Axis",
    "Cluster",
    "Curve",
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
    "WireOverheads",
    "cluster",
    "format_ranks",
    "names",
    "parse_ranks",
]

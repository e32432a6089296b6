"""Chakra execution traces (mlcommons/chakra): one file for each rank, a graph of operations with durations.

`wire` reads protobuf messages, `nodes` makes operations of them (or of the flavour in JSON), and `ordering` gives them
times: those that were recorded, or else the earliest that their dependencies allow, because the converter from PyTorch
writes durations only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..events import Json
from ..spans import Timeline
from .nodes import nodes_of_json, nodes_of_messages
from .ordering import timeline_of

__all__ = ["from_chakra", "from_chakra_json", "is_chakra", "is_chakra_json"]

_NAME = re.compile(r"(?P<prefix>.*?)(?:\.(?P<rank>\d+))?\.(?:et|json)(?:\.gz)?")


def is_chakra(path: Path) -> bool:
    """Whether it is called as its messages are: `name.RANK.et`, compressed or not."""
    return path.name.endswith((".et", ".et.gz"))


def is_chakra_json(document: object) -> bool:
    """Whether it is the flavour in JSON."""
    return isinstance(document, Mapping) and isinstance(document.get("workload_graph"), list)


def from_chakra(path: Path, data: bytes) -> tuple[Timeline, bool]:
    """Read a file's messages; return also whether it was cut off after what is complete.

    Raises:
        UsageError: If it has no durations, or its dependencies go round in a circle.
        ValueError: If it is damaged.
    """
    nodes, cut = nodes_of_messages(data)
    return timeline_of(nodes, *_place(path)), cut


def from_chakra_json(path: Path, document: Mapping[str, Json]) -> Timeline:
    """Read the flavour in JSON; errors are those of `from_chakra`."""
    return timeline_of(nodes_of_json(document), *_place(path))


def _place(path: Path) -> tuple[int, int]:
    """Return rank and size of the world, as the file and those beside it are called."""
    match = _NAME.fullmatch(path.name)
    if match is None or match["rank"] is None:
        return 0, 1
    beside = (_NAME.fullmatch(each.name) for each in path.parent.iterdir())
    ranks = [int(other["rank"]) for other in beside if other and other["rank"] and other["prefix"] == match["prefix"]]
    return int(match["rank"]), max([*ranks, int(match["rank"])]) + 1

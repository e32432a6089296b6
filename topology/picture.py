"""The machine as text: devices in their places with their wires, then what the wires carry."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .cluster import Cluster
from .errors import format_ranks

_TO_ASCII = str.maketrans("┌┐└┘├┤┬┴─│·", "++++++++-|.")
_WIDEST_ROW = 8
_LISTED_DEVICES = 64


def draw(cluster: Cluster, *, ascii: bool = False) -> str:
    """Draw one node of a cluster and list its devices and links.

    Args:
        cluster: what to draw; its other nodes look the same.
        ascii: use only ASCII characters.

    Returns:
        Lines joined by newlines, without colour, none ending in a blank.
    """
    parts = [_title(cluster), picture(cluster), _device_table(cluster), _link_table(cluster), _summary(cluster)]
    lines = "\n\n".join(part for part in parts if part).split("\n")
    text = "\n".join(line.rstrip() for line in lines)
    return text.translate(_TO_ASCII) if ascii else text


def _title(cluster: Cluster) -> str:
    size = f"{cluster.world_size} rank{'s' * (cluster.world_size > 1)}"
    if cluster.nodes > 1:
        size = f"{cluster.nodes} nodes of {cluster.ranks_per_node} ranks, {size} in all; node 0 is shown"
    lnc = f" (LNC={cluster.lnc})" if len(cluster.machine.chip.lnc) > 1 else ""
    return f"{cluster.name}: {cluster.machine.description}\n{size}{lnc}"


def picture(cluster: Cluster) -> str:
    """Draw the devices of a node in their grid; wires that leave the picture come back on its other side.

    Returns:
        "" for shapes that have no rows, such as a long chain or an irregular graph.
    """
    rows = _rows(cluster)
    if not rows or max(map(len, rows)) > _WIDEST_ROW:
        return ""
    cells = {device: _cell(cluster, device) for row in rows for device in row}
    width = max(len(line) for cell in cells.values() for line in cell)
    blocks = [_row_lines(cluster, rows, index, cells, width) for index in range(len(rows))]
    return "\n".join([*(line for block in blocks for line in block), *_remark(cluster)])


def _rows(cluster: Cluster) -> list[list[int]]:
    """Arrange devices in rows; a long ring is folded so that it closes at both ends."""
    grid, devices = cluster.wiring.grid, cluster.devices_per_node
    if grid is None:
        return [list(range(devices))] if devices <= _WIDEST_ROW and (devices == 1 or cluster.wiring.complete) else []
    if len(grid.dims) == 1 and grid.wraps[0] and devices % 2 == 0 and devices > 4:
        return [list(range(devices // 2)), list(range(devices - 1, devices // 2 - 1, -1))]
    if len(grid.dims) > 2:
        return []
    side = grid.dims[-1]
    return [list(range(first, first + side)) for first in range(0, devices, side)]


def _cell(cluster: Cluster, device: int) -> list[str]:
    lines = [f"device {device}", _ranks(cluster, device)]
    if cluster.machine.network is not None:
        lines.append(f"{cluster.machine.network.link} {_nic(cluster, device)}")
    return lines


def _ranks(cluster: Cluster, device: int) -> str:
    first = device * cluster.ranks_per_device
    here = range(first, min(first + cluster.ranks_per_device, cluster.ranks_per_node))
    return f"rank{'s' * (len(here) > 1)} {format_ranks(here)}" if here else "no rank"


def _nic(cluster: Cluster, device: int) -> int:
    return device * min(cluster.nics_per_node, cluster.devices_per_node) // cluster.devices_per_node


def _row_lines(
    cluster: Cluster, rows: list[list[int]], index: int, cells: dict[int, list[str]], width: int
) -> list[str]:
    row = rows[index]
    above = [_joined(cluster, rows, index - 1, index, column) for column in range(len(row))]
    below = [_joined(cluster, rows, index, index + 1, column) for column in range(len(row))]
    sides = [cluster.wiring.grid is not None and cluster.wiring.linked(a, b) for a, b in pairwise(row)]
    closes = len(rows[0]) > 2 and cluster.wiring.grid is not None and cluster.wiring.linked(row[0], row[-1])
    stubs = _edge_line(["│" if up else " " for up in above], width) if index == 0 and any(above) else None
    lines = [stubs] if stubs else []
    lines.append(_boxes([_border("┌", "┴" if up else "─", "┐", width) for up in above]))
    for number in range(max(len(cells[device]) for device in row)):
        texts = [cells[device][number].ljust(width) for device in row]
        lines.append(_wired(texts, sides, closes=closes) if number == 0 else _wired(texts, [False] * len(sides)))
    lines[-1] += _numa(cluster, row)
    lines.append(_boxes([_border("└", "┬" if down else "─", "┘", width) for down in below]))
    if any(below):
        lines.append(_edge_line(["│" if down else " " for down in below], width))
    return lines


def _joined(cluster: Cluster, rows: list[list[int]], upper: int, lower: int, column: int) -> bool:
    """Tell whether a wire runs between two rows; beyond the first and last row it is the one that wraps round."""
    if cluster.wiring.grid is None or len(rows) < 2:
        return False
    wraps = upper < 0 or lower >= len(rows)
    # Two rows are joined by one wire, which the picture shows between them.
    if wraps and len(rows) == 2:
        return False
    return cluster.wiring.linked(rows[upper % len(rows)][column], rows[lower % len(rows)][column])


def _numa(cluster: Cluster, row: Sequence[int]) -> str:
    nodes = sorted({cluster.machine.numa[device] for device in row}) if cluster.machine.numa else []
    return f"   NUMA {','.join(map(str, nodes))}" if nodes else ""


def _border(left: str, middle: str, right: str, width: int) -> str:
    half = (width + 2) // 2
    return left + "─" * half + middle + "─" * (width + 1 - half) + right


def _boxes(boxes: Sequence[str]) -> str:
    return "   " + "   ".join(boxes)


def _edge_line(marks: Sequence[str], width: int) -> str:
    half = (width + 2) // 2 + 1
    return "   " + "   ".join(" " * half + mark + " " * (width + 3 - half) for mark in marks)


def _wired(texts: Sequence[str], sides: Sequence[bool], *, closes: bool = False) -> str:
    line = "───┤" if closes else "   │"
    for text, joined in zip(texts, [*sides, None], strict=True):
        line += f" {text} "
        if joined is not None:
            line += "├───┤" if joined else "│   │"
    return line + ("├───" if closes else "│")


def _remark(cluster: Cluster) -> list[str]:
    kind = cluster.machine.wires.link
    if cluster.wiring.complete and cluster.devices_per_node > 1:
        switched = f"   {kind} from every device to one switch"
        return [switched if cluster.wiring.switched else f"   {kind} from every device to every other"]
    if cluster.servers > 1:
        return [f"   device d also to device d of the servers before and after, in a ring of {cluster.servers}"]
    return []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([lines[0], "─" * len(lines[0].rstrip()), *lines[1:]])


def _device_table(cluster: Cluster) -> str:
    if cluster.devices_per_node > _LISTED_DEVICES:
        return ""
    numa, pcie = cluster.machine.numa, cluster.machine.pcie
    rows = [
        [
            str(device),
            _ranks(cluster, device).removeprefix("ranks ").removeprefix("rank "),
            _neighbours(cluster, device),
            str(_nic(cluster, device)) if cluster.nics_per_node else "none",
            str(numa[device]) if numa else "-",
            str(pcie[device]) if pcie else "-",
        ]
        for device in range(cluster.devices_per_node)
    ]
    return _table(["device", "ranks", "connected to", "nic", "numa", "pcie"], rows)


def _neighbours(cluster: Cluster, device: int) -> str:
    found = cluster.wiring.adjacent(device)
    if len(found) > _WIDEST_ROW and len(found) == cluster.devices_per_node - 1:
        return "all others"
    return ",".join(map(str, found)) or "none"


def _link_table(cluster: Cluster) -> str:
    rows = [
        [
            spec.kind,
            f"{cluster.bandwidth_bytes_per_s(spec.kind) / 1e9:.2f}",
            f"{spec.latency_s.value * 1e6:.1f}",
            f"{spec.bandwidth_bytes_per_s.confidence}/{spec.latency_s.confidence}",
            spec.bandwidth_bytes_per_s.source,
        ]
        for spec in cluster.machine.links
    ]
    return _table(["link", "GB/s one way", "latency us", "confidence", "source of the bandwidth"], rows) if rows else ""


def _summary(cluster: Cluster) -> str:
    facts = [f"bisection {cluster.bisection_bytes_per_s() / 1e9:.1f} GB/s one way"]
    if cluster.nics_per_node:
        facts.append(f"network {cluster.nic_share_bytes_per_s() / 1e9:.2f} GB/s per rank")
    if cluster.cc_cores_per_rank:
        facts.append(f"{cluster.cc_cores_per_rank} CC-cores per rank")
    return " · ".join(facts)

"""The machine as text: a picture of its devices and wires, and tables of devices and links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .cluster import Cluster
from .errors import format_ranks

_TO_ASCII = str.maketrans("┌┐└┘├┤┬┴─│·", "++++++++-|.")
_WIDEST_ROW = 8  # most devices in a row of the picture
_WIDEST_UNWIRED_ROW = 4  # the same, if the devices form no grid
_LISTED_DEVICES = 64  # most devices that the table lists


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """The density of a picture."""

    gap: int  # Columns between two devices, and left of the first
    short: bool  # Whether a device shows only numbers


_STYLES = [_Style(gap=gap, short=short) for short in (False, True) for gap in (3, 2, 1)]  # the first that fits is taken


def draw(cluster: Cluster, *, ascii: bool = False, width: int = 80) -> str:
    """Draw one node of a cluster and list its devices and links.

    Args:
        cluster: the cluster; all its nodes look alike.
        ascii: use only ASCII characters.
        width: columns; a picture that does not fit is left out.

    Returns:
        Lines joined by newlines, without colour, none ending in a blank.
    """
    parts = [
        _title_text(cluster, width),
        picture(cluster, width=width),
        _device_table(cluster),
        _link_table(cluster, width),
        _fabric_text(cluster, width),
        _summary_text(cluster, width),
    ]
    lines = "\n\n".join(part for part in parts if part).split("\n")
    text = "\n".join(line.rstrip() for line in lines)
    return text.translate(_TO_ASCII) if ascii else text


def _title_text(cluster: Cluster, width: int) -> str:
    """Name the cluster and its machine, and count its ranks."""
    size = f"{cluster.world_size} rank{'s' * (cluster.world_size > 1)}"
    if cluster.nodes > 1:
        size = f"{cluster.nodes} nodes of {cluster.ranks_per_node} ranks, {size} in all; node 0 is shown"
    lnc = f" (LNC={cluster.lnc})" if len(cluster.machine.chip.lnc) > 1 else ""
    lines = [*wrap(f"{cluster.name}: {cluster.machine.description}", width), *wrap(f"{size}{lnc}", width)]
    return "\n".join(lines)


def picture(cluster: Cluster, *, width: int = 80) -> str:
    """Draw the devices of a node in their grid; a wire that leaves the picture returns on the other side.

    Args:
        cluster: the cluster; all its nodes look alike.
        width: columns.

    Returns:
        Lines joined by newlines; "" for shapes without rows, such as an irregular graph, or if `width` is too small.
    """
    rows = _arrange_rows(cluster)
    if not rows or max(map(len, rows)) > _WIDEST_ROW:
        return ""
    for style in _STYLES:
        lines = _picture_lines(cluster, rows, style, width)
        if max(map(len, lines)) <= width:
            return "\n".join([*lines, *_undrawn_wire_lines(cluster, width)])
    return ""


def _picture_lines(cluster: Cluster, rows: list[list[int]], style: _Style, columns: int) -> list[str]:
    """Return the rows of devices as boxes joined by wires, with notes at their ends where these fit in `columns`."""
    cells = {device: _box_lines(cluster, device, short=style.short) for row in rows for device in row}
    width = max(len(line) for cell in cells.values() for line in cell)
    lines = [
        line.rstrip()
        for index in range(len(rows))
        for line in _box_row_lines(cluster, rows, index, cells, width, style)
    ]
    notes = [_numa_note(cluster, row) for row in rows]
    # Indices of the last line of text in each row of boxes: the line above the lower edge.
    bottoms = [at - 1 for at, line in enumerate(lines) if "└" in line]
    for at, note in zip(bottoms, notes, strict=True):
        if len(lines[at]) + len(note) <= columns:
            lines[at] += note
    return lines


def _arrange_rows(cluster: Cluster) -> list[list[int]]:
    """Return the devices in rows for the picture; a long ring or chain is folded into two. [] if there are no rows."""
    grid, devices = cluster.wiring.grid, cluster.devices_per_node
    if grid is None:
        if devices > _WIDEST_ROW or (devices > 1 and not cluster.wiring.complete):
            return []
        return [list(range(devices))[at : at + _WIDEST_UNWIRED_ROW] for at in range(0, devices, _WIDEST_UNWIRED_ROW)]
    if len(grid.dims) == 1 and devices % 2 == 0 and devices > 4:
        return [list(range(devices // 2)), list(range(devices - 1, devices // 2 - 1, -1))]
    if len(grid.dims) > 2:
        return []
    side = grid.dims[-1]
    return [list(range(first, first + side)) for first in range(0, devices, side)]


def _box_lines(cluster: Cluster, device: int, *, short: bool) -> list[str]:
    """Return the text in the box of a device: its number, ranks and network adapter; with `short`, abbreviated."""
    lines = [f"dev {device}" if short else f"device {device}", _describe_ranks(cluster, device)]
    if short:
        lines[1] = lines[1].replace("ranks ", "r ").replace("rank ", "r ")
    if cluster.machine.network is not None:
        lines.append(f"{cluster.machine.network.link} {_nic_note(cluster, device)}")
    return lines


def _describe_ranks(cluster: Cluster, device: int) -> str:
    first = device * cluster.ranks_per_device
    ranks = range(first, min(first + cluster.ranks_per_device, cluster.ranks_per_node))
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}" if ranks else "no rank"


def _nic_note(cluster: Cluster, device: int) -> int:
    """Return the number of the adapter, or bundle of adapters, that a device uses."""
    return device * min(cluster.nics_per_node, cluster.devices_per_node) // cluster.devices_per_node


def _box_row_lines(
    cluster: Cluster, rows: list[list[int]], index: int, cells: dict[int, list[str]], width: int, style: _Style
) -> list[str]:
    """Return the lines of one row of boxes, with wires to its neighbours, to the next row, and around.

    `cells` has the lines of text of each device, `width` their characters.
    """
    row, gap = rows[index], style.gap
    above = [_has_wire_between_rows(cluster, rows, index - 1, index, column) for column in range(len(row))]
    below = [_has_wire_between_rows(cluster, rows, index, index + 1, column) for column in range(len(row))]
    sides = [cluster.wiring.grid is not None and cluster.wiring.are_adjacent(a, b) for a, b in pairwise(row)]
    closes = len(rows[0]) > 2 and cluster.wiring.grid is not None and cluster.wiring.are_adjacent(row[0], row[-1])
    stubs = _mark_line(["│" if up else " " for up in above], width, gap) if index == 0 and any(above) else None
    lines = [stubs] if stubs else []
    lines.append(_join_boxes([_border_line("┌", "┴" if up else "─", "┐", width) for up in above], gap))
    for number in range(max(len(cells[device]) for device in row)):
        texts = [cells[device][number].ljust(width) for device in row]
        wired = number == 0
        lines.append(_box_text_line(texts, sides if wired else [False] * len(sides), gap, closes=wired and closes))
    lines.append(_join_boxes([_border_line("└", "┬" if down else "─", "┘", width) for down in below], gap))
    if any(below):
        lines.append(_mark_line(["│" if down else " " for down in below], width, gap))
    return lines


def _has_wire_between_rows(cluster: Cluster, rows: list[list[int]], upper: int, lower: int, column: int) -> bool:
    """Whether a wire runs between two rows; above the first and below the last row, the wire that wraps around.

    `upper` is -1 above the first row; `lower` is `upper` + 1, which is the number of rows below the last.
    """
    if cluster.wiring.grid is None or len(rows) < 2:
        return False
    wraps = upper < 0 or lower >= len(rows)
    # Two rows are joined by one wire, which the picture shows between them.
    if wraps and len(rows) == 2:
        return False
    return cluster.wiring.are_adjacent(rows[upper % len(rows)][column], rows[lower % len(rows)][column])


def _numa_note(cluster: Cluster, row: Sequence[int]) -> str:
    nodes = sorted({cluster.machine.numa[device] for device in row}) if cluster.machine.numa else []
    return f"  NUMA {','.join(map(str, nodes))}" if nodes else ""


def _border_line(left: str, middle: str, right: str, width: int) -> str:
    """Return the upper or lower edge of a box for texts of `width`; `middle` is the sign where a wire may begin."""
    half = (width + 2) // 2
    return left + "─" * half + middle + "─" * (width + 1 - half) + right


def _join_boxes(boxes: Sequence[str], gap: int) -> str:
    """Return a line with the given parts of boxes side by side, with `gap` columns before each."""
    return " " * gap + (" " * gap).join(boxes)


def _mark_line(marks: Sequence[str], width: int, gap: int) -> str:
    """Return a line between rows of boxes, with a mark under the middle of each box."""
    half = (width + 2) // 2 + 1
    return _join_boxes([" " * half + mark + " " * (width + 3 - half) for mark in marks], gap)


def _box_text_line(texts: Sequence[str], sides: Sequence[bool], gap: int, *, closes: bool) -> str:
    """Return one line of a row of boxes, with wires between boxes that are joined.

    `sides` says of each box but the last whether it is joined to the next, `closes` whether the last is to the first.
    """
    wire, blank = "─" * gap, " " * gap
    line = f"{wire}┤" if closes else f"{blank}│"
    for text, joined in zip(texts, [*sides, None], strict=True):
        line += f" {text} "
        if joined is not None:
            line += f"├{wire}┤" if joined else f"│{blank}│"
    return line + (f"├{wire}" if closes else "│")


def _undrawn_wire_lines(cluster: Cluster, width: int) -> list[str]:
    """Return lines on wires that the picture does not draw."""
    kind, remark = cluster.machine.wires.link, ""
    if cluster.wiring.complete and cluster.devices_per_node > 1:
        remark = f"{kind} from every device to {'one switch' if cluster.wiring.switched else 'every other'}"
    elif cluster.servers > 1:
        remark = f"device d also to device d of the servers before and after, in a ring of {cluster.servers}"
    return wrap(remark, width, first="   ", rest="   ") if remark else []


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: heads, a line, and rows; all columns are left-aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([lines[0], "─" * len(lines[0].rstrip()), *lines[1:]])


def _device_table(cluster: Cluster) -> str:
    """Return a table of the devices of a node; "" if they are too many."""
    if cluster.devices_per_node > _LISTED_DEVICES:
        return ""
    numa, pcie = cluster.machine.numa, cluster.machine.pcie
    rows = [
        [
            str(device),
            _describe_ranks(cluster, device).removeprefix("ranks ").removeprefix("rank "),
            _neighbour_text(cluster, device),
            str(_nic_note(cluster, device)) if cluster.nics_per_node else "none",
            str(numa[device]) if numa else "-",
            str(pcie[device]) if pcie else "-",
        ]
        for device in range(cluster.devices_per_node)
    ]
    return _format_table(["device", "ranks", "connected to", "nic", "numa", "pcie"], rows)


def _neighbour_text(cluster: Cluster, device: int) -> str:
    devices = cluster.wiring.adjacent_devices(device)
    if len(devices) > _WIDEST_ROW and len(devices) == cluster.devices_per_node - 1:
        return "all others"
    return ",".join(map(str, devices)) or "none"


def _link_table(cluster: Cluster, width: int) -> str:
    """Return a table of the kinds of links, then the sources of their bandwidths; "" if there are no links."""
    rows = [
        [
            spec.kind,
            f"{cluster.bandwidth_bytes_per_s(spec.kind) / 1e9:.2f}",
            f"{spec.latency_s.value * 1e6:.1f}",
            f"{spec.bandwidth_bytes_per_s.confidence}/{spec.latency_s.confidence}",
        ]
        for spec in cluster.machine.links
    ]
    if not rows:
        return ""
    lines = [_format_table(["link", "GB/s one way", "latency us", "confidence"], rows), "sources of the bandwidths:"]
    for spec in cluster.machine.links:
        lines += wrap(f"{spec.kind}: {spec.bandwidth_bytes_per_s.source}", width, first="  ", rest="    ")
    return "\n".join(lines)


def _fabric_text(cluster: Cluster, width: int) -> str:
    """Return a drawing of the levels of switches between nodes, from the top downwards; "" if they are not known."""
    fabric, network = cluster.machine.fabric, cluster.machine.network
    if fabric is None or network is None:
        return ""
    of_a_node = cluster.nics_per_node * cluster.bandwidth_bytes_per_s(network.link)
    lines = ["fabric between nodes:"]
    for depth, level in enumerate(reversed(fabric.levels)):
        out = level.out_bytes_per_s(of_a_node)
        ratio = level.nodes * of_a_node / out
        rails = f" on {level.rails} rails" if level.rails > 1 else ""
        text = f"{level.name} of {level.nodes} nodes{rails}: {out / 1e9:.0f} GB/s out, {ratio:.1f} : 1"
        first = "  " * depth + ("└─ " if depth else "   ")
        lines += wrap(text, width, first=first, rest=" " * len(first))
    depth = len(fabric.levels)
    node = f"node: {cluster.nics_per_node} x {cluster.bandwidth_bytes_per_s(network.link) / 1e9:.1f} GB/s"
    return "\n".join([*lines, "  " * depth + ("└─ " if depth else "   ") + node])


def _summary_text(cluster: Cluster, width: int) -> str:
    """Return bandwidths and processors of the cluster as text."""
    facts = [f"bisection {cluster.bisection_bytes_per_s() / 1e9:.1f} GB/s one way"]
    if cluster.nics_per_node:
        facts.append(f"network {cluster.nic_share_bytes_per_s() / 1e9:.2f} GB/s per rank")
    if cluster.cc_cores_per_rank:
        facts.append(f"{cluster.cc_cores_per_rank} CC-cores per rank")
    return "\n".join(wrap(" · ".join(facts), width))


def wrap(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Break text into lines at blanks; words that are too long for a line are broken after a slash.

    Args:
        text: Words separated by blanks.
        width: Most columns of a line.
        first: Text before the first line.
        rest: Text before every other line.
    """
    lines = [first]
    begin = len(first)
    for blank, piece in _split_pieces(text, width - max(len(first), len(rest))):
        glue = blank if len(lines[-1]) > begin else ""
        if glue + piece and len(lines[-1]) + len(glue + piece) > width and len(lines[-1]) > begin:
            lines.append(rest)
            begin, glue = len(rest), ""
        lines[-1] += glue + piece
    return lines


def _split_pieces(text: str, room: int) -> Iterator[tuple[str, str]]:
    """Yield unbreakable pieces of text, each after the blank that separates it from the piece before (" " or "")."""
    for word in text.split():
        blank = " "
        for piece in [word] if len(word) <= room else re.findall(r"[^/]*/|[^/]+", word):
            yield blank, piece
            blank = ""

"""`overlap topology [MACHINE]`: its devices and wires, legal groups and rings, and the verdict on one group."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from topology import Cluster, TopologyError, cluster, format_ranks, names
from topology.picture import draw, wrap

from .options import add_options, parse_group, shared_option
from .output import page_width, print_page_or_json

ILLEGAL_EXIT = 2
"""Exit code for an illegal group, whether it is reported as JSON or as an error."""

_LISTED_GROUPS = 4
_LEAST_WIDTH = 60

DESCRIPTION = """\
Draw a machine: its devices and wires, the bandwidth of these, the legal groups of ranks, and the rings of devices.
"""

EPILOG = f"""\
examples:
  overlap topology trn1.32xlarge
  overlap topology "trn2.48xlarge x4" --group 0-7

machines: {", ".join(names())}
"""

OPTIONS = {
    "ranks": shared_option("ranks", "default: all"),
    "group": shared_option("group", "to judge"),
    "json": shared_option("json"),
    "nodes": shared_option("nodes"),
    "lnc": shared_option("lnc"),
    "ascii": shared_option("ascii"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "machine", nargs="?", default="local", metavar="MACHINE", help="name or TOML file; default: local"
    )
    add_options(parser, OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Draw a machine, or judge a group on it, and return the exit code: 2 if the group is illegal.

    Raises:
        TopologyError: If the machine is unknown, numbers do not fit it, or (without `--json`) a group is illegal.
    """
    size = {name: getattr(args, name) for name in ("nodes", "lnc", "ranks")}
    machine = cluster(args.machine, **size)
    if args.group is not None:
        ranks = parse_group(args.group)
        verdict = judge_group(machine, ranks)
        print_page_or_json(args, lambda: verdict, partial(_group_lines, machine, ranks))
        return 0 if verdict["legal"] else ILLEGAL_EXIT
    return print_page_or_json(
        args, partial(json_document, machine), partial(_machine_page, machine, ascii=bool(args.ascii))
    )


def _machine_page(machine: Cluster, *, ascii: bool) -> list[str]:
    # A text file in memory has no encoding, and takes every character.
    blocks = (sys.stdout.encoding or "utf-8").lower().startswith("utf") and os.environ.get("TERM") != "dumb"
    width = max(page_width(), _LEAST_WIDTH)
    drawing = draw(machine, ascii=ascii or not blocks, width=width)
    return [drawing, "", _groups_text(machine, width), "", _rings_text(machine, width)]


def _group_lines(machine: Cluster, ranks: tuple[int, ...]) -> Iterator[str]:
    """Yield that the group is legal on the machine, and warnings; raises `TopologyError` if it is not."""
    findings = machine.judge(ranks)
    if machine.strict and any(finding.severity == "error" for finding in findings):
        machine.check_group(ranks)
    rings = len(machine.rings(ranks))
    size = f"{len(ranks)} rank{'s' * (len(ranks) != 1)}, {rings} disjoint ring{'s' * (rings != 1)}"
    yield f"legal: {format_ranks(ranks)} on {machine.name}: {size}"
    for finding in findings:
        yield f"warning: rule {finding.rule.id}: {finding.rule.text} [{finding.rule.source}]"


def judge_group(machine: Cluster, ranks: tuple[int, ...]) -> dict[str, object]:
    """Return the verdict on a group for JSON."""
    findings = machine.judge(ranks)
    nearest: tuple[tuple[int, ...], ...] = ()
    legal = not machine.strict or all(finding.severity != "error" for finding in findings)
    if not legal:
        try:
            machine.check_group(ranks)
        except TopologyError as error:
            # only the error has them
            nearest = error.nearest
    return {
        "cluster": machine.name,
        "ranks": list(ranks),
        "legal": legal,
        "findings": [
            {"rule": f.rule.id, "severity": f.severity, "text": f.rule.text, "source": f.rule.source} for f in findings
        ],
        "nearest": [list(group) for group in nearest],
    }


def json_document(machine: Cluster) -> dict[str, object]:
    """Return all figures of a cluster for JSON."""
    return {
        "name": machine.machine.name,
        "description": machine.machine.description,
        "nodes": machine.nodes,
        "lnc": machine.lnc,
        "world_size": machine.world_size,
        "ranks_per_node": machine.ranks_per_node,
        "devices": [_json_device(machine, device) for device in range(machine.devices_per_node)],
        "links": [asdict(spec) for spec in machine.machine.links],
        "rules": [asdict(rule) for rule in machine.rules],
        "legal_groups": {
            str(size): [list(group) for group in groups] for size, groups in _legal_groups(machine).items()
        },
        "rings": [list(ring) for ring in machine.rings()],
        "bisection_bytes_per_s": machine.bisection_bytes_per_s(),
        "nic_share_bytes_per_s": machine.nic_share_bytes_per_s(),
        "cc_cores_per_rank": machine.cc_cores_per_rank,
    }


def _json_device(machine: Cluster, device: int) -> dict[str, object]:
    """Return a device of a node for JSON: its ranks, the devices wired to it, its NUMA node and PCIe switch."""
    first, numa, pcie = device * machine.ranks_per_device, machine.machine.numa, machine.machine.pcie
    return {
        "device": device,
        "ranks": list(range(first, min(first + machine.ranks_per_device, machine.ranks_per_node))),
        "connected_to": list(machine.wiring.adjacent_devices(device)),
        "numa": numa[device] if numa else None,
        "pcie": pcie[device] if pcie else None,
    }


def _legal_groups(machine: Cluster) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return the legal groups on one node by size, or none where no rule restricts them."""
    if not machine.restricted:
        return {}
    sizes = range(2, machine.ranks_per_node + 1)
    return {size: groups for size in sizes if (groups := machine.legal_groups(size))}


def _groups_text(machine: Cluster, width: int) -> str:
    """Return the legal groups on a node by size, and the rules that restrict them, as text."""
    if not machine.restricted:
        return "legal groups: any"
    lines = ["legal groups on one node" + ("; across nodes the same on each:" if machine.nodes > 1 else ":")]
    for size, groups in _legal_groups(machine).items():
        more = f" | ... {len(groups)} in all" if len(groups) > _LISTED_GROUPS else ""
        listed = f"{' | '.join(map(format_ranks, groups[:_LISTED_GROUPS]))}{more}"
        lines += wrap(listed, width, first=f"  {size:>3} ranks: ", rest=" " * 13)
    for rule in machine.rules:
        sentence = f"rule {rule.id} ({rule.severity}): {rule.text} [{rule.source}]"
        lines += wrap(sentence, width, first="  ", rest="    ")
    return "\n".join(lines)


def _rings_text(machine: Cluster, width: int) -> str:
    """Return the disjoint rings of devices in a node, and through coupled servers, as text."""
    inside = machine.rings(range(machine.ranks_per_node))
    lines = ["disjoint rings of devices in a node, each usable both ways:" if inside else "no ring of wires in a node"]
    for ring in inside:
        devices = dict.fromkeys(machine.place(rank).device for rank in ring)
        lines += wrap(" ".join(map(str, devices)), width, first="  ", rest="    ")
    if machine.servers > 1:
        coupled = range(machine.servers * machine.ranks_per_node)
        lines.append(f"{len(machine.rings(coupled))} through all {machine.servers} servers")
    return "\n".join(lines)

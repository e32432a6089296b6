"""`overlap topology NAME`: draw a machine, list its legal groups and rings, or judge a group."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict

from topology import Cluster, TopologyError, cluster, format_ranks, names, parse_ranks
from topology.picture import draw, paragraph

SCHEMA_VERSION = 1
"""Version of what `--json` prints; it rises when a field changes its meaning or goes."""

ILLEGAL_EXIT = 2
"""Exit code for an illegal group, the same whether it is told as JSON or as an error."""

_LISTED_GROUPS = 4
_LEAST_WIDTH = 60

_DESCRIPTION = """\
Show a machine: its devices and wires, what they carry, which groups of ranks are legal, and the rings that it holds.

NAME is a built-in machine, with its nodes if there are several ("trn2.48xlarge x4"), or a TOML file.
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, f"built-in machines: {', '.join(names())}"
    parser.add_argument(
        "name", metavar="NAME", help='machine, such as trn1.32xlarge or "trn2.48xlarge x4", or a .toml file'
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    parser.add_argument("--lnc", type=int, metavar="1|2", help="physical cores per logical core")
    parser.add_argument("--ranks", type=int, metavar="N", help="size of the world; default: every core")
    parser.add_argument(
        "--edition", type=int, metavar="YEAR", help="judge by the rules of that year; default: the newest"
    )
    parser.add_argument("--check", metavar="RANKS", help="judge a group such as 0-7 or 0-3,8-11")
    parser.add_argument("--ascii", action="store_true", help="draw with + - | only")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")


def main(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        TopologyError: for an unknown machine, numbers that do not fit it, and (without ``--json``) an illegal group.
    """
    machine = cluster(args.name, nodes=args.nodes, lnc=args.lnc, ranks=args.ranks, edition=args.edition)
    if args.check is not None:
        return _check(machine, parse_ranks(args.check), as_json=args.json)
    if args.json:
        print(json.dumps(describe(machine), indent=2, sort_keys=True))
    else:
        # A file of text in memory knows no encoding, and takes everything.
        blocks = (sys.stdout.encoding or "utf-8").lower().startswith("utf") and os.environ.get("TERM") != "dumb"
        plain = args.ascii or not blocks
        width = max(shutil.get_terminal_size().columns, _LEAST_WIDTH)
        print("\n\n".join([draw(machine, ascii=plain, width=width), _groups(machine, width), _rings(machine, width)]))
    return 0


def _check(machine: Cluster, ranks: tuple[int, ...], *, as_json: bool) -> int:
    if as_json:
        verdict = judgement(machine, ranks)
        print(json.dumps(verdict, indent=2, sort_keys=True))
        return 0 if verdict["legal"] else ILLEGAL_EXIT
    findings = machine.judge(ranks)
    if machine.strict and any(finding.severity == "error" for finding in findings):
        machine.check_group(ranks)
    rings = len(machine.rings(ranks))
    size = f"{len(ranks)} rank{'s' * (len(ranks) != 1)}, {rings} disjoint ring{'s' * (rings != 1)}"
    print(f"legal: {format_ranks(ranks)} on {machine.name}: {size}")
    for finding in findings:
        print(f"warning: rule {finding.rule.id}: {finding.rule.text} [{finding.rule.source}]")
    return 0


def judgement(machine: Cluster, ranks: tuple[int, ...]) -> dict[str, object]:
    """Give the verdict on a group as one JSON object."""
    findings = machine.judge(ranks)
    nearest: tuple[tuple[int, ...], ...] = ()
    legal = not machine.strict or all(finding.severity != "error" for finding in findings)
    if not legal:
        try:
            machine.check_group(ranks)
        except TopologyError as error:
            nearest = error.nearest
    return {
        "schema_version": SCHEMA_VERSION,
        "cluster": machine.name,
        "ranks": list(ranks),
        "legal": legal,
        "findings": [
            {"rule": f.rule.id, "severity": f.severity, "text": f.rule.text, "source": f.rule.source} for f in findings
        ],
        "nearest": [list(group) for group in nearest],
    }


def describe(machine: Cluster) -> dict[str, object]:
    """Give everything that is known of a cluster as one JSON object."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": machine.machine.name,
        "description": machine.machine.description,
        "nodes": machine.nodes,
        "lnc": machine.lnc,
        "world_size": machine.world_size,
        "ranks_per_node": machine.ranks_per_node,
        "devices": [_device(machine, device) for device in range(machine.devices_per_node)],
        "links": [asdict(spec) for spec in machine.machine.links],
        "rules": [asdict(rule) for rule in machine.rules],
        "legal_groups": {str(size): [list(group) for group in groups] for size, groups in _legal(machine).items()},
        "rings": [list(ring) for ring in machine.rings()],
        "bisection_bytes_per_s": machine.bisection_bytes_per_s(),
        "nic_share_bytes_per_s": machine.nic_share_bytes_per_s(),
        "cc_cores_per_rank": machine.cc_cores_per_rank,
    }


def _device(machine: Cluster, device: int) -> dict[str, object]:
    first, numa, pcie = device * machine.ranks_per_device, machine.machine.numa, machine.machine.pcie
    return {
        "device": device,
        "ranks": list(range(first, min(first + machine.ranks_per_device, machine.ranks_per_node))),
        "connected_to": list(machine.wiring.adjacent(device)),
        "numa": numa[device] if numa else None,
        "pcie": pcie[device] if pcie else None,
    }


def _legal(machine: Cluster) -> dict[int, tuple[tuple[int, ...], ...]]:
    """List legal groups on one node by size, empty where no rule restricts them."""
    if not machine.restricted:
        return {}
    sizes = range(2, machine.ranks_per_node + 1)
    return {size: groups for size in sizes if (groups := machine.legal_groups(size))}


def _groups(machine: Cluster, width: int) -> str:
    if not machine.restricted:
        return "legal groups: any"
    lines = ["legal groups on one node" + ("; across nodes the same on each:" if machine.nodes > 1 else ":")]
    for size, groups in _legal(machine).items():
        more = f" | ... {len(groups)} in all" if len(groups) > _LISTED_GROUPS else ""
        listed = f"{' | '.join(map(format_ranks, groups[:_LISTED_GROUPS]))}{more}"
        lines += paragraph(listed, width, first=f"  {size:>3} ranks: ", rest=" " * 13)
    for rule in machine.rules:
        said = f"rule {rule.id} ({rule.severity}): {rule.text} [{rule.source}]"
        lines += paragraph(said, width, first="  ", rest="    ")
    return "\n".join(lines)


def _rings(machine: Cluster, width: int) -> str:
    inside = machine.rings(range(machine.ranks_per_node))
    lines = ["disjoint rings of devices in a node, each usable both ways:" if inside else "no ring of wires in a node"]
    for ring in inside:
        devices = dict.fromkeys(machine.place(rank).device for rank in ring)
        lines += paragraph(" ".join(map(str, devices)), width, first="  ", rest="    ")
    if machine.servers > 1:
        coupled = range(machine.servers * machine.ranks_per_node)
        lines.append(f"{len(machine.rings(coupled))} through all {machine.servers} servers")
    return "\n".join(lines)

"""`overlap calibrate`: from the output of a benchmark to the machine file of a cluster, and how far to trust it."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import topology

from ...cost.fitting import Fit, Fitted, Launches, Sample, crosses, fit, wire_s
from ...errors import UsageError
from ...units import format_bytes, format_ns
from ..output import written
from .here import BETWEEN, calibrate_here
from .logs import Log, Row, read

_DESCRIPTION = """\
Read what a benchmark printed (nccl-tests, nccom-test, hccl_demo, OSU, or `overlap bench --json`), fit the launch of an
operation and the shares of their bandwidth that wires give, and write a machine file that plans and simulations take.

Every third row of a collective is left out: its error says how far to trust predictions. All else is as the machine
that --cluster names says it.

--here measures this computer itself: ranks of one process, and processes joined by sockets, shared memory or MPI.
"""

_EPILOG = """\
examples:
  overlap calibrate all_reduce.log --cluster "p5.48xlarge x2" --name ours -o ours.toml
  overlap calibrate redsct.txt --op reduce_scatter --cluster trn2.48xlarge
  overlap plan all_reduce --bytes 1G --cluster "ours.toml x16"
  overlap calibrate --here -o here.toml
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("logs", nargs="*", metavar="LOG", help="output of a benchmark")
    parser.add_argument("--here", action="store_true", help="measure this computer, for a minute or two, not a log")
    parser.add_argument("--between", choices=BETWEEN, help="what joins processes, with --here; default: shared_memory")
    parser.add_argument("--cluster", metavar="NAME", help='where a log is from, such as "p5.48xlarge x2"')
    parser.add_argument("--op", metavar="NAME", help="the collective, where a log does not say it")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks that took part; default: the log's, or all")
    parser.add_argument("--name", metavar="NAME", help="of the new machine; default: that of the file")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the machine file there; default: print it")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code: 0, or 1 if the file cannot be written.

    Raises:
        UsageError: If a log cannot be read, or does not fit the cluster; naming file, row and what was expected.
        TopologyError: If there is no such machine.
    """
    if args.here:
        return calibrate_here(args)
    if args.between is not None:
        raise UsageError("--between: only with --here")
    if not args.logs or args.cluster is None:
        raise UsageError("calibrate: name a LOG and the --cluster that it is of, or --here for this computer")
    cluster = topology.cluster(args.cluster, strict=False)
    if cluster.machine.devices is None:
        raise UsageError("--cluster: 'local' has no wires to fit; name the machine that the log is of")
    base = args.cluster.split()[0]
    if base not in topology.names():
        raise UsageError(f"--cluster: a machine file extends one of ours, which {base!r} is not")
    if args.ranks is not None and args.ranks < 2:
        raise UsageError(f"--ranks: expected 2 or more, got {args.ranks}")
    told = [read(path, op=args.op, ranks=args.ranks) for path in args.logs]
    samples = [_sample(row, cluster) for log in told for row in log.rows]
    if len(samples) < _LEAST_ROWS:
        raise UsageError(f"{args.logs[0]}: expected {_LEAST_ROWS} rows or more, found {len(samples)}")
    found = fit(cluster, samples)
    source = ", ".join(f"{log.tool} in {Path(path).name}" for log, path in zip(told, args.logs, strict=True))
    name = args.name or (Path(args.output).stem if args.output else f"{base} calibrated")
    text = _toml(cluster.machine, base, name, found, source, args.logs)
    print("\n".join(_page(found, told, cluster)))
    if args.output is None:
        print("\n" + text, end="")
        return 0
    if not written(text, args.output, option="--output"):
        return 1
    print(f"\nmachine in {args.output}; plan with it: overlap plan all_reduce --bytes 1G --cluster {args.output}")
    return 0


_LEAST_ROWS = 4


def _sample(row: Row, cluster: topology.Cluster) -> Sample:
    ranks = row.ranks or cluster.world_size
    if ranks < 2:
        raise UsageError(f"{row.where}: expected a collective of 2 ranks or more, found {ranks}")
    if ranks > cluster.world_size:
        raise UsageError(f"{row.where}: {ranks} ranks do not fit {cluster.name}, which has {cluster.world_size}")
    placed = _placed(row, cluster) or tuple(range(ranks))
    sample = Sample(collective=row.collective, nbytes=row.nbytes, dtype=row.dtype, ranks=placed, time_s=row.time_s)
    if row.time_s < (least_s := _IN_SWITCHES * wire_s(cluster, sample)):
        raise UsageError(
            f"{row.where}: expected {format_ns(least_s * 1e9)} or more, half of what {format_bytes(row.nbytes)} on "
            f"{len(placed)} ranks of {cluster.name} takes at the full rate of its wires, found "
            f"{format_ns(row.time_s * 1e9)}"
        )
    return sample


# Switches that add up halve what each rank sends; nothing else is known to be below what our best algorithm sends.
_IN_SWITCHES = 0.5


def _placed(row: Row, cluster: topology.Cluster) -> tuple[int, ...]:
    """Return the ranks of the places that a log tells."""
    if not row.places:
        return ()
    hosts, devices = (max(column) + 1 for column in zip(*row.places, strict=True))
    if hosts > cluster.nodes or devices > cluster.ranks_per_node:
        raise UsageError(
            f"{row.where}: expected ranks on at most {cluster.nodes} hosts with {cluster.ranks_per_node} devices, as "
            f"{cluster.name} has, found {hosts} with {devices}"
        )
    return tuple(host * cluster.ranks_per_node + device for host, device in row.places)


def _page(found: Fit, told: Sequence[Log], cluster: topology.Cluster) -> list[str]:
    lines = [f"{'collective':<15} {'size':>10} {'measured':>9} {'predicted':>9} {'error':>7}"]
    lines += [_line(row) for row in found.rows]
    lines += [f"dropped: {why}" for log in told for why in log.dropped]
    fitted, left = (found.errors(left_out=out) for out in (False, True))
    shares = ", ".join(f"{share:.0%} of {kind}" for kind, share in found.shares.items())
    return [
        *lines,
        "",
        f"on {cluster.name}: {_launch(found.launches)}, {shares}",
        f"rows fitted: {fitted[0]}, median error {fitted[1]:.1%}, worst {fitted[2]:.1%}",
        f"rows left out: {left[0]}, median error {left[1]:.1%}, worst {left[2]:.1%}"
        + ("" if left[0] else ": nothing says how far to trust this"),
        "Other sizes, ranks and collectives than these are extrapolated.",
        *([_CROSSING] if all(crosses(row.sample, cluster) for row in found.rows) else []),
    ]


_CROSSING = "All rows cross nodes: of groups inside one nothing was measured."


def _launch(launches: Launches) -> str:
    inside_s, between_s = launches.inside_s, launches.between_s
    told = [] if inside_s is None else [format_ns(inside_s * 1e9)]
    if between_s is not None:
        told.append(f"{format_ns(between_s * 1e9)} {'more ' if told else ''}between nodes")
    return f"launch {', '.join(told)}"


def _line(row: Fitted) -> str:
    of = row.sample
    times = f"{format_ns(of.time_s * 1e9):>9} {format_ns(row.predicted_s * 1e9):>9} {row.error:>+7.1%}"
    return f"{of.collective:<15} {format_bytes(of.nbytes):>10} {times}{'  left out' if row.left_out else ''}"


def _toml(machine: topology.Machine, base: str, name: str, found: Fit, source: str, paths: Sequence[str]) -> str:
    count, middle, worst = found.errors(left_out=True)
    hashes = ", ".join(f"{Path(p).name} {hashlib.sha256(Path(p).read_bytes()).hexdigest()[:12]}" for p in paths)
    origin = f'source = {_quoted(f"fitted: {source}")}, confidence = "B"'
    lines = [
        f"# Written by `overlap calibrate` from {_quoted(source)[1:-1]} (SHA-256 {_quoted(hashes)[1:-1]}).",
        f"# {count} rows that were left out: median error {middle:.1%}, worst {worst:.1%}.",
        f'extends = "{base}"',
        f"name = {_quoted(name)}",
    ]
    inside_s, between_s = found.launches.inside_s, found.launches.between_s
    if inside_s is not None:
        lines += ["", "[collectives]", f"launch_s = {{ value = {inside_s:.6g}, {origin} }}"]
    for kind, share in found.shares.items():
        lines += ["", f"[collectives.wires.{kind}]", f"efficiency = {{ value = {share:.4g}, {origin} }}"]
        if machine.network and kind == machine.network.link and between_s is not None:
            lines += [f"launch_s = {{ value = {between_s:.6g}, {origin} }}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Write a text as TOML does, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

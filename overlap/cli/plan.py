"""`overlap plan OP`: what a collective becomes on a machine, and why."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from textwrap import wrap

from topology import Cluster, cluster, format_ranks, parse_ranks

from ..collectives.generators import GENERATORS
from ..cost.parameters import itemsize_of
from ..cost.select import DIRECT, NAMES, Plan, plan
from ..errors import UsageError
from ..units import format_bytes, format_ns, parse_bytes
from .options import index
from .stepgrid import step_grid

SCHEMA_VERSION = 1
"""Version of what `--json` prints; it rises when a field changes its meaning or goes."""

_WIDTH = 80

_DESCRIPTION = """\
Show what a collective becomes on a machine: the algorithm that is predicted to be fastest, every other one with its
time, and why.

Predictions come from the figures of the machine's wires and memories, and a few overheads fitted to published
measurements. Shapes that nobody published measurements of are marked as extrapolated.
"""

_EPILOG = f"""\
examples:
  overlap plan all_reduce --bytes 32MiB --cluster "trn2.48xlarge x4"
  overlap plan all_gather --bytes 256K --cluster trn1.32xlarge --ranks 0-7 --steps

collectives: {", ".join(GENERATORS)}
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("op", metavar="OP", help="collective, such as all_reduce")
    parser.add_argument(
        "--bytes", required=True, metavar="SIZE", help="the larger one of a rank's input and output, such as 32MiB"
    )
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help='machine, such as "trn2.48xlarge x4", or a .toml file'
    )
    parser.add_argument("--ranks", metavar="LIST", help="group, such as 0-7 or 0-3,8-11; default: every rank")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="of the elements; default: float32")
    parser.add_argument("--root", type=int, default=0, metavar="RANK", help="group rank of the root; default: 0")
    parser.add_argument(
        "--peer-direct",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether network adapters read device memory themselves, or host memory is in between (matters on dl1)",
    )
    parser.add_argument(
        "--exact", action="store_true", help="only what reduces every element in the order of ranks: exact=True"
    )
    parser.add_argument("--top", type=index, default=8, metavar="N", help="alternatives to print; default: 8")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--steps", action="store_true", help="also print the table as a grid of ranks by steps")
    shown.add_argument("--json", action="store_true", help="print one JSON object instead")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code 0.

    Raises:
        UsageError: If the collective, the size, the dtype or the root cannot be meant.
        TopologyError: If the machine is unknown, or the group is not legal on it.
    """
    ranks = None if args.ranks is None else parse_ranks(args.ranks)
    if ranks is not None and len(ranks) < 2:
        raise UsageError(f"--ranks: {args.ranks!r} is one rank, which sends nothing; name a group, such as 0-7")
    machine = _machine(args.cluster, ranks)
    nbytes, element_bytes = parse_bytes(args.bytes, argument="--bytes"), itemsize_of(args.dtype)
    if nbytes % element_bytes:
        raise UsageError(f"--bytes: {nbytes} bytes are not whole elements of {args.dtype}, of {element_bytes} bytes")
    chosen = plan(
        args.op,
        nbytes,
        machine,
        ranks,
        dtype=args.dtype,
        root=args.root,
        peer_direct=args.peer_direct,
        exact=args.exact,
    )
    if args.json:
        print(json.dumps(describe(chosen), indent=2, sort_keys=True))
        return 0
    print("\n".join([*_summary(chosen), *_advice(machine, chosen), "", *_others(chosen, args.top)]))
    if args.steps:
        grid = ["no table: nothing is sent"] if chosen.algorithm == DIRECT else step_grid(chosen.schedule())
        print("\n".join(["", *grid]))
    return 0


def _machine(name: str, ranks: tuple[int, ...] | None) -> Cluster:
    """Return the machine, with as many ranks as are asked for where it has any number."""
    machine = cluster(name)
    if machine.machine.devices is None and ranks and max(ranks) >= machine.world_size:
        spread = -(-(max(ranks) + 1) // machine.nodes) * machine.nodes
        return cluster(name, ranks=spread)
    return machine


def describe(chosen: Plan) -> dict[str, object]:
    """Return a plan as the one object that `--json` prints: seconds, bytes, ranks of the world."""
    others = [each for each in chosen.alternatives if each.predicted_s is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "op": chosen.op,
        "bytes": chosen.nbytes,
        "ranks": list(chosen.ranks),
        "cluster": chosen.cluster,
        "dtype": chosen.dtype,
        "algorithm": chosen.algorithm,
        "detail": chosen.detail,
        "slices": chosen.slices,
        "predicted_s": chosen.predicted_s,
        "extrapolated": chosen.extrapolated,
        "breakdown": asdict(chosen.breakdown),
        "steps": chosen.steps,
        "bytes_per_rank": chosen.bytes_per_rank,
        "hops": dict(chosen.hops),
        "busiest_link": asdict(chosen.busiest) if chosen.busiest else None,
        "reason": chosen.reason,
        "alternatives": [
            {"algorithm": each.algorithm, "detail": each.detail, "predicted_s": each.predicted_s} for each in others
        ],
        "not_applicable": [
            {"algorithm": each.algorithm, "why": each.why_not} for each in chosen.alternatives if each.why_not
        ],
    }


def _advice(machine: Cluster, chosen: Plan) -> list[str]:
    return [
        line
        for each in machine.judge(chosen.ranks)
        for line in _field(each.severity, f"rule {each.rule.id}: {each.rule.text}")
    ]


def _summary(chosen: Plan) -> list[str]:
    sliced = f", in {chosen.slices} slices" if chosen.slices > 1 else ""
    spent = [f"{_s(value)} {NAMES[term]}" for term, value in asdict(chosen.breakdown).items() if value > 0]
    hops = ", ".join(f"{count} {kind}" for kind, count in chosen.hops) or "none"
    busiest = chosen.busiest
    return [
        *_wrapped(
            f"{chosen.op} of {format_bytes(chosen.nbytes)} {chosen.dtype} on {len(chosen.ranks)} "
            f"rank{'s' * (len(chosen.ranks) != 1)} ({format_ranks(chosen.ranks)}) of {chosen.cluster}"
        ),
        "",
        f"  {_name(chosen.algorithm, chosen.detail)}{sliced}",
        *_field("predicted", _s(chosen.predicted_s) + (" (extrapolated)" if chosen.extrapolated else "")),
        *_field("why", chosen.reason),
        *_field("time goes to", ", ".join(spent) or "nothing"),
        *_field("steps", str(chosen.steps)),
        *_field("bytes", f"{format_bytes(chosen.bytes_per_rank)} sent by the busiest rank"),
        *_field("hops", f"{hops}, on the longest way of every step"),
        *_field("busiest link", f"{busiest.kind} {busiest.name}, {_s(busiest.busy_s)} of bytes" if busiest else "none"),
    ]


def _field(name: str, text: str) -> list[str]:
    return _wrapped(text, first=f"  {name:<14}", rest=" " * 16)


def _wrapped(text: str, *, first: str = "", rest: str = "  ") -> list[str]:
    return wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _others(chosen: Plan, top: int) -> list[str]:
    priced = [each for each in chosen.alternatives if each.predicted_s is not None]
    lines = ["alternatives:"] if chosen.alternatives else ["no alternatives"]
    for each in priced[:top]:
        assert each.predicted_s is not None
        more = f"+{each.predicted_s / chosen.predicted_s - 1:.0%}" if chosen.predicted_s else ""
        name = _name(each.algorithm, each.detail)
        lines += _wrapped(name, first=f"  {_s(each.predicted_s):>8}  {more:>7}  ", rest=" " * 21)
    if len(priced) > top:
        lines.append(f"  and {len(priced) - top} slower ones (--top {len(priced)})")
    for each in chosen.alternatives:
        if each.why_not:
            lines += _wrapped(f"{each.algorithm} does not apply: {each.why_not}", first="  ", rest="    ")
    return lines


def _name(algorithm: str, detail: str) -> str:
    return f"{algorithm} ({detail})" if detail else algorithm


def _s(duration_s: float) -> str:
    return format_ns(duration_s * 1e9)

"""The same operations through a bounce buffer on the host and with Peer Direct, side by side.

The table is like table 1 of the EFA Peer Direct document ("host copies" and "Peer Direct" on dl1.24xlarge, 32 MB
messages): there the NIC reads the memory of an accelerator, here a socket reads the array itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .cases import Case
from .layout import NodeLayout
from .measuring import Result, measure_cases
from .options import cases
from .sampling import Sampling

__all__ = ["HEADING", "Pair", "line", "measure", "title", "worlds"]

Pair: TypeAlias = "tuple[Result, Result]"
"""Through the host, and with Peer Direct."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
SIZE = "32MB"

_ROW = "{:<16}{:>10}{:>7}{:>14}{:>14}{:>9}"

HEADING = _ROW.format("# MB/s", "size(B)", "ranks", "host copies", "Peer Direct", "ratio")


def worlds(args: argparse.Namespace) -> list[list[Case]]:
    """Return the rows of the operation that the options name, or of the document's three at 32 MB.

    Raises:
        UsageError: If an option cannot be meant.
    """
    names = OPERATIONS if args.operation is None else (args.operation,)
    changed = {"nnodes": args.nnodes or 2}
    if args.operation is None and not (args.minbytes or args.maxbytes):
        changed["minbytes"] = SIZE
    asked = [argparse.Namespace(**vars(args) | changed | {"operation": name}) for name in names]
    return [world for one in asked for world in cases(one)]


def measure(
    world: Sequence[Case], sampling: Sampling, staged: NodeLayout, direct: NodeLayout, *, check: bool
) -> Iterator[Pair]:
    """Measure rows both ways, one right after the other."""
    yield from zip(
        list(measure_cases(world, sampling, staged, check=check)),
        list(measure_cases(world, sampling, direct, check=check)),
        strict=True,
    )


def title(case: Case, sampling: Sampling, layout: NodeLayout) -> str:
    """Say what is measured and how, in lines that begin with #."""
    text = (
        f"{'in place' if case.in_place else 'out of place'}, {layout.describe()}\n{sampling.describe()}\n"
        "MB is 10^6 bytes; bandwidth is that of the network (busbw)"
    )
    return "\n".join(f"# {one}" for one in text.splitlines())


def line(pair: Pair) -> str:
    """Return one line of the table."""
    case = pair[0].case
    host, direct = (one.busbw_bytes_per_s / 1e6 for one in pair)
    ratio = f"{direct / host:.2f}x" if host else "-"
    return _ROW.format(case.operation.name, case.size_bytes, case.ranks, f"{host:,.0f}", f"{direct:,.0f}", ratio)

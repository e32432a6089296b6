"""The same operations on two layouts that differ in one thing, side by side: what that costs, or brings.

With and without Peer Direct, the table is like table 1 of the EFA Peer Direct document ("host copies" and "Peer
Direct" on dl1.24xlarge, 32 MB messages): there the NIC reads the memory of an accelerator, here a socket reads the
array itself.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from overlap.cli.bench.cases import Case, list_cases
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling

from . import report
from .layout import ProcessLayout, layout, measure_cases

Pair: TypeAlias = "tuple[Result, Result]"
"""Without what is compared, and with it."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
SIZE = "32MB"

_ROW = "{:<16}{:>10}{:>7}{:>14}{:>14}{:>9}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two layouts differ in."""

    setting: str  # Its name among the options and the fields of a `ProcessLayout`
    without: str  # What the side without it is called
    name: str  # What the side with it is called

    @property
    def option(self) -> str:
        """The value of `--compare` that asks for it."""
        return self.setting.replace("_", "-")

    @property
    def keys(self) -> tuple[str, str]:
        """What the sides are called in JSON."""
        return self.without.replace(" ", "_"), self.setting

    @property
    def heading(self) -> str:
        """The first line of the table."""
        return _ROW.format("# MB/s", "size(B)", "ranks", self.without, self.name, "ratio")

    def line(self, pair: Pair) -> str:
        """Return one line of the table."""
        case = pair[0].case
        without, with_it = (one.busbw_bytes_per_s / 1e6 for one in pair)
        ratio = f"{with_it / without:.2f}x" if without else "-"
        return _ROW.format(
            case.operation.name, case.size_bytes, case.ranks, f"{without:,.0f}", f"{with_it:,.0f}", ratio
        )


COMPARISONS = (
    Comparison(setting="peer_direct", without="host copies", name="Peer Direct"),
    Comparison(setting="checksums", without="no checksums", name="checksums"),
)


def chosen(args: argparse.Namespace) -> Comparison | None:
    """Return the comparison that `--compare` names, if any."""
    return next((one for one in COMPARISONS if one.option == args.compare), None)


def worlds(args: argparse.Namespace) -> list[list[Case]]:
    """Return the rows of the operation that the options name, or of the document's three at 32 MB.

    Raises:
        UsageError: If an option cannot be meant.
    """
    names = OPERATIONS if args.operation is None else (args.operation,)
    changed = {"processes": args.processes or 2}
    if args.operation is None and not (args.minbytes or args.maxbytes):
        changed["minbytes"] = SIZE
    asked = [argparse.Namespace(**vars(args) | changed | {"operation": name}) for name in names]
    return [world for one in asked for world in list_cases(one)]


def layouts(args: argparse.Namespace, compared: Comparison) -> tuple[ProcessLayout, ProcessLayout]:
    """Return the two layouts, by default of two processes joined by sockets: only sockets have the setting.

    Raises:
        UsageError: If an option cannot be meant.
    """
    changed = {"processes": args.processes or 2, "transport": args.transport or "efa"}
    off, on = (argparse.Namespace(**vars(args) | changed | {compared.setting: side}) for side in (False, True))
    return layout(off), layout(on)


def measure(
    world: Sequence[Case], sampling: Sampling, without: ProcessLayout, with_it: ProcessLayout
) -> Iterator[Pair]:
    """Measure rows both ways, one right after the other."""
    yield from zip(
        list(measure_cases(world, sampling, without)), list(measure_cases(world, sampling, with_it)), strict=True
    )


def title(case: Case, sampling: Sampling, layout: ProcessLayout) -> str:
    """Say what is measured and how, in lines that begin with #."""
    text = f"{report.place_of(case)}, {layout.describe()}"
    return report.title(text, sampling, "MB is 10^6 bytes; bandwidth is that of the network (busbw)")

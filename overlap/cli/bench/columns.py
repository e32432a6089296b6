"""The tables that the bench prints, as exact text."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from ...collectives.kinds import Collective
from .cases import Case
from .layout import NodeLayout
from .measuring import Result
from .sampling import Sampling
from .versus.contenders import ContenderResult

_COLUMNS = (
    ("size", "(B)", 10),
    ("count", "", 10),
    ("ranks", "", 5),
    ("time", "(us)", 8),
    ("p10", "(us)", 8),
    ("p90", "(us)", 8),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("wrong", "", 5),
)
"""Name, unit and characters of each; with a blank before each 79."""

_WIDTH = 80


def remark(text: str) -> str:
    """Return a text as lines that begin with #, and fit."""
    folded = (wrap(line, _WIDTH - 2, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(f"# {line}" for lines in folded for line in lines)


def title(case: Case, sampling: Sampling, layout: NodeLayout) -> str:
    """Say what is measured and how, in lines that begin with #."""
    place = "into memory that ranks share" if case.shared else "in place" if case.in_place else "out of place"
    place += ", inputs where all processes read them" if case.common else ""
    factor = case.operation.kind.traits.busbw_factor
    text = (
        f"{_what(case)}, {place}, {layout.describe()}\n{sampling.describe()}\n"
        f"GB is 10^9 bytes; busbw = algbw * {factor} with n ranks"
    )
    return remark(text)


def _what(case: Case) -> str:
    """Name what all rows have in common."""
    traits = case.operation.kind.traits
    told = [case.operation.name]
    if case.operation.kind is not Collective.BARRIER:
        told[0] += f" of {case.dtype.name}"
    told += [case.op] if traits.reduces else []
    return ", ".join([*told, *([f"root {case.root}"] if traits.rooted else [])])


def header() -> str:
    """Return the lines of column names and units."""
    names, units, _ = zip(*_COLUMNS, strict=True)
    return "\n".join("#" + _aligned(line)[1:].rstrip() for line in (names, units))


def row(measured: Result) -> str:
    """Return one line of the table."""
    case, times = measured.case, measured.times
    return _aligned(
        [
            str(case.size_bytes),
            str(case.count),
            str(case.ranks),
            *(number(value_ns / 1e3) for value_ns in (times.median_ns, times.p10_ns, times.p90_ns)),
            *_bandwidths(measured),
            "N/A" if measured.wrong is None else str(measured.wrong),
        ]
    )


def summary(measured: Sequence[Result]) -> str:
    """Return the last line: whether any result was wrong."""
    if any(one.wrong is None for one in measured):
        return "# results not checked (-c 0)"
    wrong = sum(one.wrong or 0 for one in measured)
    return f"# {wrong} wrong elements: FAILED" if wrong else "# every result checked: none wrong"


def versus(ours: Sequence[Result], others: Sequence[ContenderResult]) -> str:
    """Return the table of ours against libraries that measured the same rows: times, and how many times faster we are.

    That is also how many times our bandwidth is larger.
    """
    names = ["size(B)", "ranks", "overlap(us)"]
    for other in others:
        names += [f"{other.name}(us)", f"{other.name}/overlap"]
    lines = [remark(f"{other.name} is {other.version}: processes, same sizes, same timing") for other in others]
    lines.append("".join(f"{name:>{_width(name)}}" for name in names))
    for index, one in enumerate(ours):
        values = [str(one.case.size_bytes), str(one.case.ranks), number(one.times.median_ns / 1e3)]
        for other in others:
            times = other.times[index]
            values += [number(times.median_ns / 1e3), f"{times.over(one.times):.2f}x"]
        lines.append("".join(f"{value:>{_width(name)}}" for name, value in zip(names, values, strict=True)))
    return "\n".join(lines)


def number(value: float) -> str:
    """Write a figure with two decimals while it is small and none when it is large."""
    return f"{value:.2f}" if value < 99.995 else f"{value:.1f}" if value < 9999.95 else f"{value:.0f}"


def _bandwidths(measured: Result) -> tuple[str, str]:
    if measured.case.operation.kind is Collective.BARRIER:
        return "-", "-"
    return f"{measured.algbw_bytes_per_s / 1e9:.3f}", f"{measured.busbw_bytes_per_s / 1e9:.3f}"


def _aligned(values: Sequence[str]) -> str:
    return "".join(f" {value:>{width}}" for value, (*_, width) in zip(values, _COLUMNS, strict=True))


def _width(name: str) -> int:
    return max(len(name), 5 if name == "ranks" else 8) + 2

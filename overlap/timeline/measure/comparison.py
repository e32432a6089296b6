"""Two runs beside each other: what differs, in figures."""

from __future__ import annotations

from ..draw.axis import figure, figure_unit
from ..draw.columns import columns
from .verdict import Verdict

_ROWS = (
    ("compute", "compute_ns"),
    ("exposed", "exposed_ns"),
    ("  waiting for ranks", "waiting_ns"),
    ("  on the wire", "wire_ns"),
    ("idle", "idle_ns"),
    ("bytes moved for", "transfer_ns"),
)


def comparison_table(one: Verdict, other: Verdict, *, width: int) -> list[str]:
    """Write the step and the means of the ranks of both, and by how much the first differs from the second."""
    unit, unit_ns = figure_unit(max(one.wall_ns, other.wall_ns))
    pairs = [("step", float(one.wall_ns), float(other.wall_ns))]
    pairs += [(text, _mean(one, name), _mean(other, name)) for text, name in _ROWS]
    rows = [
        (
            text,
            figure(first, unit_ns),
            figure(second, unit_ns),
            _signed(first - second, unit_ns),
            _percent(first, second),
        )
        for text, first, second in pairs
    ]
    return columns((f"mean of a rank/{unit}", "this", "against", "difference", ""), rows, width=width, words=[0])


def compared(one: Verdict, other: Verdict) -> str:
    """Say in one sentence how a run compares with another."""
    difference_ns = one.wall_ns - other.wall_ns
    unit, unit_ns = figure_unit(max(one.wall_ns, other.wall_ns))
    if not difference_ns:
        return f"both take {figure(one.wall_ns, unit_ns)} {unit}"
    parts = {
        text.strip(): _mean(one, name) - _mean(other, name) for text, name in _ROWS if text[0] == " " or text in _ALONE
    }
    most = max(parts, key=lambda text: parts[text] if difference_ns > 0 else -parts[text])
    return (
        f"{_signed(difference_ns, unit_ns)} {unit} ({_percent(one.wall_ns, other.wall_ns)}) against "
        f"{figure(other.wall_ns, unit_ns)} {unit}, mostly {most}: {_signed(parts[most], unit_ns)} {unit}"
    )


_ALONE = ("compute", "idle")


def _mean(verdict: Verdict, name: str) -> float:
    return float(getattr(verdict, name)) / max(verdict.ranks, 1)


def _signed(ns: float, unit_ns: int) -> str:
    return f"{'-' if ns < 0 else '+'}{figure(abs(ns), unit_ns)}"


def _percent(first: float, second: float) -> str:
    return f"{100 * (first - second) / second:+.1f}%" if second else "n/a"

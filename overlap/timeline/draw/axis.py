"""Ticks and rulers of time axes."""

from __future__ import annotations

from ...units import axis_unit

_CELLS_PER_TICK = 12


def tick_step_ns(length_ns: int, cells: int) -> int:
    """Return the time between two ticks of an axis: 1, 2 or 5 times a power of ten.

    It is the smallest that takes at least twelve characters: 20 for 100 ns on 72 characters.

    Args:
        length_ns: Length of the axis.
        cells: Width of the axis in characters.
    """
    wanted_ns = -(-length_ns * _CELLS_PER_TICK // cells)
    power = 1
    while power * 10 < wanted_ns:
        power *= 10
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= wanted_ns)


def ruler_line(length_ns: int, cells: int, *, mark: str) -> str:
    """Return the line of ticks under an axis: at each tick the mark and a label, or the mark alone if it does not fit.

    Args:
        length_ns: Length of the axis, above 0.
        cells: Width of the axis in characters.
        mark: Character of a tick.
    """
    name, unit_ns = axis_unit(length_ns)
    line = [" "] * cells
    step_ns = tick_step_ns(length_ns, cells)
    for at_ns in range(0, length_ns, step_ns):
        cell = at_ns * cells // length_ns
        label = f"{mark}{at_ns / unit_ns:g} {name}"
        label = label if cell + len(label) <= cells else mark
        line[cell : cell + len(label)] = label
    return "".join(line).rstrip()

"""Page of a calibration: measured and predicted times of each row, the fitted figures, and the accuracy."""

from __future__ import annotations

from ...cost.fitting import Fitted, FittedRows, Launches, crosses
from ...planning.calibrate import Calibration
from ...units import format_bytes, format_s


def times_of(row: Fitted) -> str:
    """Return the measured and predicted time of a row, its error, and whether it was left out."""
    times = f"{format_s(row.sample.time_s):>9} {format_s(row.predicted_s):>9} {row.error:>+7.1%}"
    return f"{times}{'  left out' if row.left_out else ''}"


def accuracy_lines(found: FittedRows) -> list[str]:
    """Return the errors of fitted rows, and of rows that were left out."""
    fitted, left = (found.errors(left_out=out) for out in (False, True))
    return [
        f"rows fitted: {fitted[0]}, median error {fitted[1]:.1%}, worst {fitted[2]:.1%}",
        f"rows left out: {left[0]}, median error {left[1]:.1%}, worst {left[2]:.1%}"
        + ("" if left[0] else ": nothing says how far to trust this"),
    ]


def page(of: Calibration) -> list[str]:
    """Return the lines of the page."""
    found, cluster = of.fit, of.cluster
    lines = [f"{'collective':<15} {'size':>10} {'measured':>9} {'predicted':>9} {'error':>7}"]
    lines += [_line(row) for row in found.rows]
    lines += [f"dropped: {why}" for log in of.logs for why in log.dropped]
    shares = ", ".join(f"{share:.0%} of {kind}" for kind, share in found.shares.items())
    return [
        *lines,
        "",
        f"on {cluster.name}: {_launch(found.launches)}, {shares}",
        *accuracy_lines(found),
        "Other sizes, ranks and collectives than these are extrapolated.",
        *([_CROSSING] if all(crosses(row.sample, cluster) for row in found.rows) else []),
    ]


_CROSSING = "All rows cross nodes: nothing was measured of groups inside one."


def _launch(launches: Launches) -> str:
    inside_s, between_s = launches.inside_s, launches.between_s
    told = [] if inside_s is None else [format_s(inside_s)]
    if between_s is not None:
        told.append(f"{format_s(between_s)} {'more ' if told else ''}between nodes")
    return f"launch {', '.join(told)}"


def _line(row: Fitted) -> str:
    of = row.sample
    return f"{of.collective:<15} {format_bytes(of.nbytes):>10} {times_of(row)}"

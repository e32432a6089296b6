"""Page of a calibration: measured and predicted times of each row, the fitted figures, and the accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...cost.fitting import FittedRows, Launches, Sample, crosses
from ...planning.calibrate import Calibration
from ...units import columns, format_bytes, format_s
from ..output import write_file

_TEXTS = ("collective", "joined by")


def deliver_machine(text: str, path: str | None, *, collective_bytes: str | None = None) -> int:
    """Print a machine file, or write it to `path`, and return the exit code: 1 if it cannot be written.

    Args:
        text: The file.
        path: Where to write it; None: stdout.
        collective_bytes: Size of the collective of a command that plans with the file; None: there is none.
    """
    if path is None:
        print("\n" + text, end="")
        return 0
    if not write_file(text, path, option="--output"):
        return 1
    if collective_bytes is not None:
        print(f"\nplan with it: overlap plan all_reduce --bytes {collective_bytes} --cluster {path}")
    return 0


def rows_table(heads: Sequence[str], fit: FittedRows, about: Callable[[Sample], Sequence[str]]) -> list[str]:
    """Return the table of all rows: a few cells about each, its times, its error, and whether it was left out."""
    rows = [
        (*about(row.sample), format_s(row.sample.time_s), format_s(row.predicted_s), f"{row.error:+.1%}",
         "left out" if row.left_out else "")
        for row in fit.rows
    ]  # fmt: skip
    return columns(
        (*heads, "measured", "predicted", "error", ""),
        rows,
        words=[*(at for at, head in enumerate(heads) if head in _TEXTS), len(heads) + 3],
    )


def accuracy_lines(fit: FittedRows) -> list[str]:
    """Return the errors of fitted rows, and of rows that were left out."""
    fitted, left = (fit.errors(left_out=out) for out in (False, True))
    return [
        f"rows fitted: {fitted[0]}, median error {fitted[1]:.1%}, worst {fitted[2]:.1%}",
        f"rows left out: {left[0]}, median error {left[1]:.1%}, worst {left[2]:.1%}"
        + ("" if left[0] else ": nothing says how far to trust this"),
    ]


def page(calibration: Calibration) -> list[str]:
    """Return the page of a calibration: its rows, the fitted figures, and their accuracy."""
    fit, cluster = calibration.fit, calibration.cluster
    lines = rows_table(("collective", "size"), fit, lambda sample: (sample.collective, format_bytes(sample.nbytes)))
    lines += [f"dropped: {why}" for log in calibration.logs for why in log.dropped]
    shares = ", ".join(f"{share:.0%} of {kind}" for kind, share in fit.shares.items())
    return [
        *lines,
        "",
        f"on {cluster.name}: {_launch_text(fit.launches)}, {shares}",
        *accuracy_lines(fit),
        "Other sizes, ranks and collectives than these are extrapolated.",
        *([_CROSSING] if all(crosses(row.sample, cluster) for row in fit.rows) else []),
    ]


_CROSSING = "All rows cross nodes: nothing was measured of groups inside one."


def _launch_text(launches: Launches) -> str:
    """Return the time to launch a collective in words: inside a node, and the extra time between nodes, where known."""
    inside_s, between_s = launches.inside_s, launches.between_s
    times = [] if inside_s is None else [format_s(inside_s)]
    if between_s is not None:
        times.append(f"{format_s(between_s)} {'more ' if times else ''}between nodes")
    return f"launch {', '.join(times)}"

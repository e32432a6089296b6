"""One line of the benchmark: a time of ours, or how it compares, and the aim; as text and for JSON. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from overlap.cli.bench.sampling import Sampling, Times
from overlap.units import format_ns


def few(sampling: Sampling) -> int:
    """Return a reduced number of samples, for operations that take a good part of a second."""
    return min(sampling.iters, 5)


def over(times: Times, other: Times) -> float:
    """Return the ratio of one median to another."""
    return times.median_ns / other.median_ns if other.median_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line: a time of ours, or how many times as long something else takes.

    Attributes:
        name: A stable name.
        text: What it is.
        value: Nanoseconds, or the ratio.
        unit: "ns" or "ratio".
        aim: At most that many nanoseconds, or at least that ratio; None if the line is only for reference.
        times: Where it comes from: ours, or the other's.
        wrong: Elements that were not as expected.
    """

    name: str
    text: str
    value: float
    unit: str
    aim: float | None
    times: Times
    wrong: int = 0

    @property
    def met(self) -> bool | None:
        """Whether the aim is reached."""
        if self.aim is None:
            return None
        return self.value >= self.aim if self.unit == "ratio" else self.value <= self.aim


def time_of(name: str, text: str, times: Times, aim_ns: float | None = None, *, wrong: int = 0) -> Figure:
    """Make a line of a time."""
    return Figure(name=name, text=text, value=times.median_ns, unit="ns", aim=aim_ns, times=times, wrong=wrong)


def as_fast_as(name: str, text: str, other: Times, ours: Times, aim: float | None = None, *, wrong: int = 0) -> Figure:
    """Make a line of how many times as long something else takes."""
    return Figure(name=name, text=text, value=over(other, ours), unit="ratio", aim=aim, times=other, wrong=wrong)


def rows(figures: Sequence[Figure]) -> list[dict[str, object]]:
    """Tell the figures for JSON."""
    return [asdict(figure) | {"text": figure.text.strip(), "met": figure.met} for figure in figures]


_WIDTH = 56

HEADING = f"{'# figure':<{_WIDTH}}{'median':>9}  {'p10 - p90':<19}{'aim':<10}".rstrip()


def line(figure: Figure) -> str:
    """Write one line of the table."""
    if figure.unit == "ratio":
        shown, spread = f"{figure.value:.2f}x", ""
        aim = "" if figure.aim is None else f">= {figure.aim:.3g}x"
    else:
        shown = format_ns(figure.value)
        spread = f"{format_ns(figure.times.p10_ns)} - {format_ns(figure.times.p90_ns)}"
        aim = "" if figure.aim is None else f"<= {format_ns(figure.aim)}"
    told = {None: "", True: "met", False: "missed"}[figure.met]
    return f"{figure.text:<{_WIDTH}}{shown:>9}  {spread:<19}{aim:<10} {told}".rstrip()


def verdict(told: Sequence[Figure]) -> str:
    """Write the last line."""
    judged = [figure.met for figure in told if figure.met is not None]
    return f"# {sum(judged)} of {len(judged)} aims met"

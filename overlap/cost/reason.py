"""Why an option wins, in one sentence made from the two breakdowns."""

from __future__ import annotations

from dataclasses import asdict

from ..units import format_ns
from .maxplus import CostBreakdown

NAMES = {
    "waiting_s": "waiting for ranks",
    "launch_s": "launch",
    "start_s": "starting steps",
    "latency_s": "latency",
    "wire_s": "bytes on wires",
    "memory_s": "copies in memory",
    "reduction_s": "reductions",
}
"""What the terms of a breakdown are called."""


def reason(winner: CostBreakdown, second: CostBreakdown, name: str) -> str:
    """Tell what the winner gains over the next best, and what it pays for that.

    Args:
        winner: Where its time goes.
        second: Where that of the next best goes.
        name: Of the next best.
    """
    one, other = asdict(winner), asdict(second)
    gains = {term: other[term] - one[term] for term in one}
    parts = [f"{format_ns(gain * 1e9)} less for {NAMES[term]}" for term, gain in _largest(gains, 1)]
    parts += [f"{format_ns(-loss * 1e9)} more for {NAMES[term]}" for term, loss in _largest(gains, -1)]
    first_s, second_s = sum(one.values()), sum(other.values())
    ratio = second_s / first_s - 1 if first_s else 0.0
    compared = f"{ratio:.0%} faster than {name}" if ratio >= _NOTEWORTHY else f"as fast as {name}"
    if ratio <= -_NOTEWORTHY:  # the largest size of a class decides for all of its sizes
        compared = f"{-ratio:.0%} slower than {name}, but faster for the largest size of the same class"
    return f"{compared}: {', but '.join(parts)}" if parts else compared


_NOTEWORTHY = 0.005


def _largest(gains: dict[str, float], sign: int) -> list[tuple[str, float]]:
    """Return the term with the largest gain, or loss, if there is one worth a word."""
    name = max(gains, key=lambda each: sign * gains[each])
    most = max(abs(gain) for gain in gains.values())
    return [(name, gains[name])] if sign * gains[name] > max(0.05 * most, _LEAST_S) else []


_LEAST_S = 5e-11
"""What clocks with ticks of a picosecond lose by rounding in some steps is no reason."""

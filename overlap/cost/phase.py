"""Phases of an algorithm on a machine, each with its time for any number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from ..collectives.placement import Floats
from .clocks import CostBreakdown, cost
from .placed import Placed

# Sizes with a remembered time in each phase: a plan asks for every number of slices.
_REMEMBERED = 64


class PricedPhase:
    """A phase on a machine. Options that have it in common share its times.

    Args:
        placed: Rounds of all ranks, or a function that makes them; then there is a model.
        share: Share of the vector's bytes that the phase works on.
        model: Rounds that represent all; None if `placed` does.

    Attributes:
        model: rounds that suffice to compute the time: if all nodes do the same, those of one node.
        share: share of the vector's bytes that the phase works on.
    """

    share: float

    def __init__(
        self, placed: Placed | Callable[[], Placed], share: float = 1.0, *, model: Placed | None = None
    ) -> None:
        self._placed, self.share = placed, share
        if model is None:
            assert isinstance(placed, Placed)
            model = placed
        self.model = model
        # Steps overlap if ranks are not in step with each other: shared resources bound the whole nevertheless.
        dma_s_per_byte = model.parameters.dma_s_per_byte * model.rounds.sent_share
        self._least_s_per_byte = max(model.memory_s_per_byte(), dma_s_per_byte)
        self._wire_s_per_byte, self._delay_s = model.busiest_s_per_byte(), model.least_delay_s()
        self._times_s: dict[float, float] = {}
        self._busy: Floats | None = None

    @property
    def busy_s_per_slot(self) -> Floats:
        """Busy time of each reducer, memory and wire, for each byte of a slot."""
        if self._busy is None:
            self._busy = self.model.busy_s_per_slot()
        return self._busy

    @property
    def placed(self) -> Placed:
        """Rounds of all ranks on the machine, placed when they are first asked for."""
        if not isinstance(self._placed, Placed):
            self._placed = self._placed()
        return self._placed

    def total_s(self, nbytes: float) -> float:
        """Return the time for a vector of `nbytes`."""
        if nbytes not in self._times_s:
            if len(self._times_s) >= _REMEMBERED:
                self._times_s.clear()
            least_s = max(self._least_s(nbytes), self._processors_s(nbytes))
            self._times_s[nbytes] = max(cost(self.model, self.share * nbytes).total_s, least_s)
        return self._times_s[nbytes]

    def _least_s(self, nbytes: float) -> float:
        """Return the lower bound of the time: by the launch and the busiest reducer, memory or wire."""
        memory_s = self.model.parameters.launch_s + self._least_s_per_byte * self.share * nbytes
        return max(memory_s, self._least_wire_s(nbytes))

    def _least_wire_s(self, nbytes: float) -> float:
        """Return the time at which the busiest wire has carried all bytes, including the delay of its first message."""
        return self.model.parameters.launch_s + self._delay_s + self._wire_s_per_byte * self.share * nbytes

    def _processors_s(self, nbytes: float) -> float:
        """Return the time at which shared processors have done all work."""
        parameters = self.model.parameters
        busy_s = 0.0 if parameters.cores is None else self.placed.processors_s(self.share * nbytes)
        return parameters.launch_s + busy_s

    def breakdown(self, nbytes: float) -> CostBreakdown:
        """Return the terms of the time; the excess over the clocks is of wires, memory or processors."""
        breakdown = cost(self.model, self.share * nbytes, explain=True).breakdown
        assert breakdown is not None
        total_s = sum(getattr(breakdown, term.name) for term in fields(breakdown))
        wire_s = _excess_s(self._least_wire_s(nbytes), total_s)
        memory_s = _excess_s(self._least_s(nbytes), total_s + wire_s)
        # Excess time of shared processors: their time without bytes counts as starts of messages, the rest as memory.
        rest_s = _excess_s(self._processors_s(nbytes), total_s + wire_s + memory_s)
        start_s = min(rest_s, self._processors_s(0.0) - self.model.parameters.launch_s)
        return replace(
            breakdown,
            wire_s=breakdown.wire_s + wire_s,
            memory_s=breakdown.memory_s + memory_s + rest_s - start_s,
            start_s=breakdown.start_s + start_s,
        )


def _excess_s(bound_s: float, counted_s: float) -> float:
    """Return the part of a bound beyond the counted time; clocks have ticks of a picosecond."""
    return bound_s - counted_s if bound_s - counted_s > _TICK_S else 0.0


_TICK_S = 1e-11

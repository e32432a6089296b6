"""Phases of an algorithm on a machine, each with its time for any number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from ..collectives.placement import Floats
from .clocks import CostBreakdown, cost
from .placed import Placed
from .remembered import LimitedCache

# Sizes whose time is remembered in each phase: a plan asks for one size for each number of slices.
_REMEMBERED = 64


class PricedPhase:
    """A phase on a machine, with its time for any number of bytes. Several options may share one phase.

    Args:
        placed: Rounds of all ranks; or a function that makes them, which needs a `model`.
        share: Share of the vector's bytes that the phase works on.
        model: Rounds of sampled ranks, which represent all ranks; None: `placed` itself.

    Attributes:
        model: Rounds from which the time is computed.
        share: Share of the vector's bytes that the phase works on.
    """

    share: float

    def __init__(
        self, placed: Placed | Callable[[], Placed], share: float = 1.0, *, model: Placed | None = None
    ) -> None:
        self._make_placed, self.share = placed, share
        if model is None:
            assert isinstance(placed, Placed)
            model = placed
        self.model = model
        # Clocks let steps of different ranks overlap. Shared resources set a lower bound for the phase as a whole.
        dma_s_per_byte = model.parameters.dma_s_per_byte * model.rounds.sent_share
        self._least_s_per_byte = max(model.memory_s_per_byte(), dma_s_per_byte)
        self._wire_s_per_byte, self._delay_s = model.busiest_s_per_byte(), model.least_delay_s()
        self._times_s = LimitedCache[float, float](_REMEMBERED)

    @cached_property
    def busy_s_per_slot(self) -> Floats:
        """(resources,) Busy time of each reducer, memory and wire during the phase, for each byte of a slot."""
        return self.model.busy_s_per_slot()

    @cached_property
    def placed(self) -> Placed:
        """Rounds of all ranks on the machine, placed at the first use."""
        return self._make_placed if isinstance(self._make_placed, Placed) else self._make_placed()

    def total_s(self, nbytes: float) -> float:
        """Return the time for a vector of `nbytes`."""
        return self._times_s.find_or_compute(nbytes, lambda: self._compute_total_s(nbytes))

    def _compute_total_s(self, nbytes: float) -> float:
        """Return the time for a vector of `nbytes`: by the clocks, or by the busiest resource if that takes longer."""
        clocks_s = cost(self.model, self.share * nbytes).total_s
        return max(clocks_s, self._lower_bound_s(nbytes), self._processor_bound_s(nbytes))

    def _lower_bound_s(self, nbytes: float) -> float:
        """Return a lower bound of the time: launch, and the busiest memory, message engine (DMA) or wire."""
        memory_s = self.model.parameters.launch_s + self._least_s_per_byte * self.share * nbytes
        return max(memory_s, self._wire_bound_s(nbytes))

    def _wire_bound_s(self, nbytes: float) -> float:
        """Return the time at which the busiest wire has carried all bytes, including the delay of its first message."""
        return self.model.parameters.launch_s + self._delay_s + self._wire_s_per_byte * self.share * nbytes

    def _processor_bound_s(self, nbytes: float) -> float:
        """Return the time at which shared processors have done all work; the launch time if none are shared."""
        parameters = self.model.parameters
        busy_s = 0.0 if parameters.cores is None else self.placed.processor_time_s(self.share * nbytes)
        return parameters.launch_s + busy_s

    def breakdown(self, nbytes: float) -> CostBreakdown:
        """Return the terms of the time for `nbytes`.

        The clocks give the terms. If a resource takes longer than the clocks, the excess is added to `wire_s`, or for
        memory and processors to `memory_s` and `start_s`.
        """
        breakdown = cost(self.model, self.share * nbytes, explain=True).breakdown
        assert breakdown is not None
        total_s = breakdown.total_s
        wire_s = _excess_s(self._wire_bound_s(nbytes), total_s)
        memory_s = _excess_s(self._lower_bound_s(nbytes), total_s + wire_s)
        # Excess time of shared processors: their time without bytes counts as starts of messages, the rest as memory.
        rest_s = _excess_s(self._processor_bound_s(nbytes), total_s + wire_s + memory_s)
        start_s = min(rest_s, self._processor_bound_s(0.0) - self.model.parameters.launch_s)
        return replace(
            breakdown,
            wire_s=breakdown.wire_s + wire_s,
            memory_s=breakdown.memory_s + memory_s + rest_s - start_s,
            start_s=breakdown.start_s + start_s,
        )


def _excess_s(bound_s: float, counted_s: float) -> float:
    """Return by how much a lower bound exceeds a time; differences of rounding to ticks count as 0."""
    return bound_s - counted_s if bound_s - counted_s > _TICK_S else 0.0


_TICK_S = 1e-11

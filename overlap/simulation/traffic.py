"""Driver of the fabric: transfers of an instant start when all tasks are blocked, and end by events of the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .fabric import FabricTransfer, ReachedRanks, SimulatedFabric
from .kernel import EventOrder, Kernel, Timer

OnReached: TypeAlias = Callable[[ReachedRanks], None]


class FabricDriver:
    """Drives a fabric by the events of a kernel.

    Transfers that are begun in one instant start together, whatever the order of the calls.

    Args:
        kernel: Kernel of the virtual time.
        fabric: The transfers in flight.

    Attributes:
        kernel: Kernel of the virtual time.
        fabric: The transfers in flight.
    """

    kernel: Kernel
    fabric: SimulatedFabric

    def __init__(self, kernel: Kernel, fabric: SimulatedFabric) -> None:
        self.kernel, self.fabric = kernel, fabric
        self._new: list[FabricTransfer] = []  # transfers of this instant, not started yet
        self._callbacks: dict[FabricTransfer, OnReached] = {}
        self._update_is_due = False
        self._timer: Timer | None = None  # event of the next instant at which ranks are done
        self._timer_ns: int | None = None  # that instant

    def __repr__(self) -> str:
        return f"<FabricDriver at {self.kernel.now_ns} ns: {len(self._callbacks)} in flight>"

    def begin_transfer(self, transfer: FabricTransfer, on_reached: OnReached) -> None:
        """Start a transfer in this instant, when all tasks are blocked.

        Args:
            transfer: A transfer made by the fabric.
            on_reached: Function that is called whenever some ranks are done with the transfer; it must not block.
                Transfers of one instant are reported in the order of their keys.
        """
        self._new.append(transfer)
        self._callbacks[transfer] = on_reached
        self._update_rates_soon()

    def _update_rates_soon(self) -> None:
        """Start new transfers and compute rates once all tasks of this instant are blocked."""
        if not self._update_is_due:
            self._update_is_due = True
            self.kernel.call_at(self.kernel.now_ns, 0, self._start_transfers, order=EventOrder.RATES)

    def _start_transfers(self) -> None:
        """Start the transfers of this instant, and move the timer to the next instant of the fabric."""
        self._update_is_due = False
        transfers, self._new = self._new, []
        now_ns = self.kernel.now_ns
        self.fabric.start_transfers(now_ns, transfers)
        next_ns = self.fabric.update_rates(now_ns)
        # The timer is already at the right instant.
        if next_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns, self._timer = next_ns, None
        if next_ns is not None:
            self._timer = self.kernel.call_at(next_ns, 0, self._report_reached_ranks, order=EventOrder.TRANSFER)

    def _report_reached_ranks(self) -> None:
        """Advance the fabric to this instant; call the callbacks of transfers with which ranks are done now."""
        self._timer, self._timer_ns = None, None
        for reached in self.fabric.advance_to(self.kernel.now_ns):
            callback = self._callbacks.pop(reached.transfer) if reached.last else self._callbacks[reached.transfer]
            callback(reached)
        self._update_rates_soon()

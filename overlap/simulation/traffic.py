"""Traffic: the fabric on the kernel's time. Transfers begin when an instant has settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .fabric import Fabric, Reached, Transfer
from .kernel import Kernel, Order, Timer

Told: TypeAlias = Callable[[Reached], None]


class Traffic:
    """Keeps a fabric and a kernel in step.

    What begins in one instant begins together, whatever the order of the calls; so does what ends.

    Attributes:
        kernel: The time.
        fabric: What is in flight.
    """

    kernel: Kernel
    fabric: Fabric

    def __init__(self, kernel: Kernel, fabric: Fabric) -> None:
        self.kernel, self.fabric = kernel, fabric
        self._new: list[Transfer] = []
        self._told: dict[Transfer, Told] = {}
        self._settling = False
        self._next: Timer | None = None
        self._next_ns: int | None = None

    def __repr__(self) -> str:
        return f"<Traffic at {self.kernel.now_ns} ns: {len(self._told)} in flight>"

    def begin(self, transfer: Transfer, told: Told) -> None:
        """Let a transfer begin at this instant.

        Args:
            transfer: Made by the fabric.
            told: Called whenever some of its ranks are done, in the order of keys; must not block.
        """
        self._new.append(transfer)
        self._told[transfer] = told
        self._settle_soon()

    def _settle_soon(self) -> None:
        if not self._settling:
            self._settling = True
            self.kernel.at(self.kernel.now_ns, 0, self._settle, order=Order.SETTLE)

    def _settle(self) -> None:
        self._settling = False
        new, self._new = self._new, []
        now_ns = self.kernel.now_ns
        self.fabric.start(now_ns, new)
        next_ns = self.fabric.settle(now_ns)
        if next_ns == self._next_ns:
            return
        if self._next is not None:
            self._next.cancel()
        self._next_ns = next_ns
        self._next = None if next_ns is None else self.kernel.at(next_ns, 0, self._advance, order=Order.TRANSFER)

    def _advance(self) -> None:
        self._next, self._next_ns = None, None
        for reached in self.fabric.advance(self.kernel.now_ns):
            told = self._told.pop(reached.transfer) if reached.last else self._told[reached.transfer]
            told(reached)
        self._settle_soon()

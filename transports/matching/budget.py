"""How much one process has lying at the other unreceived, as the receiver counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from transports.matching.protocol import Limits, MessageKind, ProtocolError


class Budget:
    """What has come unasked, and what of it the sender may be told to use again.

    Args:
        limits: What both sides have agreed on.
        answer: Says something to the other process.
    """

    def __init__(self, limits: Limits, answer: Callable[..., None]) -> None:
        self._answer = answer
        self._budget_bytes, self._overhead_bytes = limits.budget_bytes, limits.overhead_bytes
        self._used_bytes = 0  # as the other side sees it
        self._free_bytes = 0  # of these, what has been received and not been told
        self._tell_bytes = limits.budget_bytes // 4

    def spend(self, nbytes: int) -> None:
        """Count a message that has come.

        Raises:
            ProtocolError: It was too much.
        """
        self._used_bytes += nbytes + self._overhead_bytes
        if self._used_bytes > self._budget_bytes:
            self._refuse()

    def free(self, nbytes: int) -> None:
        """Count one that has been received, and tell the sender now and then."""
        self._free_bytes += nbytes + self._overhead_bytes
        if self._free_bytes >= self._tell_bytes:
            self._tell()

    def pass_on(self, nbytes: int) -> None:
        """Count a message that is received as it comes.

        Raises:
            ProtocolError: It was too much.
        """
        cost_bytes = nbytes + self._overhead_bytes
        self._used_bytes += cost_bytes
        self._free_bytes += cost_bytes
        if self._used_bytes > self._budget_bytes:
            self._refuse()
        if self._free_bytes >= self._tell_bytes:
            self._tell()

    def _refuse(self) -> NoReturn:
        raise ProtocolError(f"more eager data than the agreed {self._budget_bytes} bytes")

    def _tell(self) -> None:
        self._used_bytes -= self._free_bytes
        self._answer(MessageKind.CREDIT, self._free_bytes)
        self._free_bytes = 0

"""Messages over wires: what `send` and `recv` become where memory is not shared.

Each message begins with an envelope of fixed size: a digest of the call, which the receiver compares with its own, and
the call as text, for the error if they differ. A small payload lies in the envelope, a larger one follows. So the tags
on the wire need neither say what travels nor be counted, and nothing has to be remembered of a message that is over.
"""

from __future__ import annotations

import hashlib

import trio

from transports import Endpoint
from transports.base import as_bytes

from ...collectives.call import Call
from ...collectives.reduce import Array
from ...errors import CollectiveMismatchError
from ..operation import Operation

__all__ = ["ENVELOPE_BYTES", "MessageExecution"]

_DIGEST_BYTES = 16
_TEXT_BYTES = 240
_INLINE_BYTES = 256
"""Up to here a payload travels in its envelope: one message less, for bytes that cost next to nothing."""

ENVELOPE_BYTES = _DIGEST_BYTES + _TEXT_BYTES + _INLINE_BYTES


class MessageExecution:
    """One end of one message under way.

    Args:
        operation: The end.
        endpoint: Its rank's end of the transport.
        peer: World rank of the other end.
        tag: Of envelopes; payloads use the next one.
    """

    def __init__(self, operation: Operation, endpoint: Endpoint, *, peer: int, tag: int) -> None:
        self._operation, self._endpoint, self._peer, self._tag = operation, endpoint, peer, tag
        self._sends = operation.port.position == 0
        array = operation.source if self._sends else operation.target
        assert array is not None, "each end of a message has an array"
        self._array: Array = array.reshape(-1)
        self._inline = array.nbytes <= _INLINE_BYTES
        self._announced = False

    def begin(self) -> bool:
        """Send whatever leaves without waiting; True if that was all there is to do."""
        if not self._sends:
            return False
        self._announced = self._endpoint.try_send(self._peer, self._tag, self._envelope(), priority=self._urgency)
        return self._announced and self._inline

    async def run(self) -> None:
        """Do the rest.

        Raises:
            CollectiveMismatchError: If the two ends mean different messages.
        """
        if self._sends:
            await self._send()
        else:
            await self._receive()

    @property
    def _urgency(self) -> int:
        return self._operation.urgency

    def _envelope(self) -> bytes:
        call = self._operation.call
        text = f"{self._operation.call_site}\n{call}".encode(errors="replace")[:_TEXT_BYTES]
        payload = as_bytes(self._array) if self._inline else b""
        return (_digest(call) + text.ljust(_TEXT_BYTES, b"\0") + payload).ljust(ENVELOPE_BYTES, b"\0")

    async def _send(self) -> None:
        if not self._announced:
            await self._endpoint.send(self._peer, self._tag, self._envelope(), priority=self._urgency)
        if not self._inline:
            await self._endpoint.send(self._peer, self._tag + 1, self._array, priority=self._urgency)
        elif self._announced:
            await trio.lowlevel.checkpoint()

    async def _receive(self) -> None:
        with await self._endpoint.recv(self._peer, self._tag, ENVELOPE_BYTES) as delivery:
            envelope = bytes(delivery.view)
        if envelope[:_DIGEST_BYTES] != _digest(self._operation.call):
            raise self._mismatch(envelope[_DIGEST_BYTES : _DIGEST_BYTES + _TEXT_BYTES])
        if self._inline:
            start = _DIGEST_BYTES + _TEXT_BYTES
            as_bytes(self._array, writable=True)[:] = envelope[start : start + self._array.nbytes]
        else:
            await self._endpoint.recv_into(self._peer, self._tag + 1, self._array)

    def _mismatch(self, text: bytes) -> CollectiveMismatchError:
        operation = self._operation
        call_site, _, call = text.rstrip(b"\0").decode(errors="replace").partition("\n")
        return CollectiveMismatchError(
            group=operation.group.name,
            seq=operation.seq,
            ranks=(operation.context.rank, self._peer),
            calls=(str(operation.call), call),
            call_sites=(operation.call_site, call_site),
        )


def _digest(call: Call) -> bytes:
    return hashlib.blake2b(repr(call.key).encode(), digest_size=_DIGEST_BYTES).digest()

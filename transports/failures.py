"""Errors of transports: one tree, with one subclass for each party at fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transports.signature import PlainSignature


#: Advice after the message of an error that no user can have caused.
REPORT_BUG = "this is a bug in overlap, please report it"


class TransportError(Exception):
    """A failure between two ranks; the subclass names the party at fault.

    ::

        TransportError
        |- ArgumentError          the caller: a buffer, rank or tag that no transport can take (also a ValueError)
        |- LengthMismatchError    the program: the two ends of one message disagree on its length
        |- SignatureMismatchError the program: the two ends of one message belong to different calls
        |- LinkLostError          the world: the wire is cut or the peer is gone
        |- HandshakeError         another process: it is no member of this world (`transports.handshake`)
        `- TransportClosedError   the owner: this end has been closed

    Attributes:
        reason: The message of the error, without the ranks and the tag, which `str` puts before it.
        src: Sending rank, if known.
        dst: Receiving rank, if known.
        tag: Tag of the message, if known.
        operation: Name of the operation that the message belongs to, such as a collective; "" if no caller has set it.
    """

    def __init__(self, reason: str, *, src: int | None = None, dst: int | None = None, tag: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.src = src
        self.dst = dst
        self.tag = tag
        self.operation: str = ""

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_error, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        """Return the reason, after the two ranks and the operation or the tag, if they are known."""
        if self.src is None and self.dst is None:
            return self.reason
        tag = "" if self.tag is None else f", tag {self.tag}"
        part = f" of {self.operation}" if self.operation else tag
        return f"message from rank {self.src} to rank {self.dst}{part}: {self.reason}"


def lane_fields(lane: tuple[int, int, int]) -> dict[str, int]:
    """Return a lane, (src, dst, tag), as keyword arguments of a `TransportError`."""
    return dict(zip(("src", "dst", "tag"), lane, strict=True))


def _restore_error(kind: type[TransportError], args: tuple[object, ...], fields: dict[str, object]) -> TransportError:
    """Make an error again from its pickled type, arguments and attributes."""
    # without `__init__`, whose arguments differ between the subclasses
    error: TransportError = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ArgumentError(TransportError, ValueError):
    """A buffer, rank, tag or length that no transport can take. Raised at the call; nothing has been queued."""


class LengthMismatchError(TransportError):
    """The receiver's buffer is not as long as the message. Raised at both ends; the message is dropped.

    A transport may end small sends before their receive has begun; then only the receive raises.

    Args:
        sent_bytes: Length of the sender's buffer.
        expected_bytes: Length that the receiver asked for.
        src: Sender.
        dst: Receiver.
        tag: Tag of the message.

    Attributes:
        sent_bytes: Length of the sender's buffer.
        expected_bytes: Length that the receiver asked for.
    """

    def __init__(self, *, sent_bytes: int, expected_bytes: int, src: int, dst: int, tag: int) -> None:
        reason = f"{sent_bytes} bytes were sent, {expected_bytes} bytes were expected; both ends must name one length"
        super().__init__(reason, src=src, dst=dst, tag=tag)
        self.sent_bytes = sent_bytes
        self.expected_bytes = expected_bytes


class SignatureMismatchError(TransportError):
    """The two ends of a message belong to different calls. Raised at both ends that wait; the message is dropped.

    Args:
        theirs: Signature of the other end.
        src: Sender.
        dst: Receiver.
        tag: Tag of the message.

    Attributes:
        theirs: Signature of the other end.
    """

    def __init__(self, theirs: PlainSignature, *, src: int, dst: int, tag: int) -> None:
        super().__init__("the other end belongs to another call", src=src, dst=dst, tag=tag)
        self.theirs = theirs


class LinkLostError(TransportError):
    """The wire between two ranks is cut, or the peer is gone.

    Attributes:
        evident: Whether this side has seen the fault itself, such as damaged bytes. False: it has only seen the end of
            the connection, perhaps the consequence of a fault elsewhere.
    """

    evident = False


class TransportClosedError(TransportError):
    """This end of the fabric has been closed; raised in pending operations and by later calls."""

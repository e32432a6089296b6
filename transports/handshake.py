"""The first bytes of every connection between processes: both sides prove one secret and introduce themselves.

::

    dialler                                            listener
       | -- magic, version, nonce ---------------------> |
       | <------------------------ magic, version, nonce |
       | -- hello, proof ------------------------------> |   validates the hello, once the proof is right
       | <---- welcome, hello, proof | refusal, its proof |   or: your proof is wrong

A proof is HMAC-SHA-256 under the secret over a label (another one in each direction, and for a refusal), the protocol
version, both nonces and all earlier bytes, so a recorded proof is worth nothing on another connection. Nothing is
unpacked, validated or answered with a reason before it has been proved; at most `HELLO_LIMIT_BYTES` and a few fixed
fields are read before that. The proof identifies the peer. It does not protect the bytes that follow from an attacker
on the path; TLS does (`transports.tls`).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import trio

from transports.delays import limit_own_time
from transports.failures import ArgumentError, TransportError
from transports.identity import Hello

#: Version of all protocols on sockets. Processes of different versions refuse each other.
VERSION = 15
#: Longest hello, and longest reason of a refusal.
HELLO_LIMIT_BYTES = 256

_MAGIC = b"ovlp"
_OPENING = struct.Struct("!4sH32s")  # magic, version, nonce: this much stays the same in every version
_LENGTH = struct.Struct("!H")
_NONCE_BYTES = 32
_PROOF_BYTES = 32

_Count = Annotated[int, msgspec.Meta(ge=0)]
_HELLO = msgspec.msgpack.Decoder(tuple[str, str, _Count, _Count, _Count, str])

_SAME_OVERLAP = "install the same overlap on every node"
_UNPROVED, _WELCOME, _REFUSED = b"U", b"W", b"R"

#: Why a handshake failed. ``left``: the other side hung up half-way; ``silent``: the other side let the deadline pass;
#: ``tls``: TLS failed, as without a certificate that the other side accepts; ``protocol``: the other side does not
#: speak this protocol; ``version``: the two sides speak different versions of it; ``secret``: the secrets differ;
#: ``refused``: the other side knows the secret, and refuses this process; ``crowded``: the listener has closed the
#: connection, because too many others waited.
Why: TypeAlias = Literal["left", "silent", "tls", "protocol", "version", "secret", "refused", "crowded"]


class HandshakeError(TransportError):
    """A handshake between two processes failed; nothing but the connection is lost.

    Args:
        reason: The event, for people.
        why: The kind of failure, for programs.

    Attributes:
        why: The kind of failure, for programs.
    """

    def __init__(self, reason: str, *, why: Why) -> None:
        super().__init__(reason)
        self.why: Why = why


async def greet(stream: trio.abc.Stream, hello: Hello, secret: bytes, *, deadline_s: float = 2.0) -> Hello:
    """Introduce this process on a connection that it has dialled.

    Reads exactly the bytes of the handshake, so that the caller may go on with the raw connection.

    Args:
        stream: The connection. The caller keeps it, and closes it if this raises.
        hello: Introduction of this process.
        secret: Known to both sides.
        deadline_s: Limit of the whole handshake in seconds, in this process's own time (`transports.delays`).

    Returns:
        The hello of the listener, which has proved the secret.

    Raises:
        ArgumentError: At once, if the hello is too long, or the secret empty.
        HandshakeError: The other side hung up, was silent, does not know the secret, or refused this process. In the
            last case the message is the reason that it gave.
    """
    packed = _pack_hello(hello)
    check_secret(secret)
    with limit_own_time(deadline_s):
        return await _exchange_as_dialler(stream, packed, secret)
    # reached only when the limit has cancelled the block
    raise _deadline_error(stream, deadline_s)


async def welcome(
    stream: trio.abc.Stream, secret: bytes, admit: Callable[[Hello], Hello | str], *, deadline_s: float = 2.0
) -> Hello:
    """Shake hands with a process that has dialled this one.

    Reads exactly the bytes of the handshake. The other side gets no answer before it has sent a valid opening, and no
    reason of a refusal before it has proved the secret.

    Args:
        stream: The connection. The caller keeps it, and closes it if this raises.
        secret: Known to both sides.
        admit: Called with the dialler's hello once the dialler has proved the secret. Returns this side's hello, or the
            reason of a refusal as text.
        deadline_s: Limit of the whole handshake in seconds, in this process's own time (`transports.delays`).

    Returns:
        The hello of the dialler, which has proved the secret, and which `admit` has not refused.

    Raises:
        ArgumentError: At once, if the secret is empty; later, if the hello of `admit` is too long.
        HandshakeError: The other side hung up, was silent, does not know the secret, or was refused.
    """
    check_secret(secret)
    with limit_own_time(deadline_s):
        return await _exchange_as_listener(stream, secret, admit)
    # reached only when the limit has cancelled the block
    raise _deadline_error(stream, deadline_s)


async def _exchange_as_dialler(stream: trio.abc.Stream, hello: bytes, key: bytes) -> Hello:
    """Exchange packed hellos; return the listener's hello once it has proved the secret, `key`.

    Raise `HandshakeError`, whose `why` names the case, if the listener hung up, is another program or version, has
    another secret, or refused this side.
    """
    our_nonce = secrets.token_bytes(_NONCE_BYTES)
    await _send_bytes(stream, _OPENING.pack(_MAGIC, VERSION, our_nonce))
    try:
        opening = await receive_exactly(stream, _OPENING.size)
    except HandshakeError as error:
        if error.why != "left":
            raise
        raise HandshakeError(_describe_hang_up(encrypted=isinstance(stream, trio.SSLStream)), why="left") from error
    transcript = [our_nonce, _check_opening(*_OPENING.unpack(opening)), hello]
    await _send_bytes(stream, _pack_frame(hello, _make_proof(key, b"dialler", transcript)))
    status = await receive_exactly(stream, 1)
    if status == _UNPROVED:
        raise _different_secrets_error("the listener does not accept this side's proof")
    label = _answer_label(status, _format_peer(stream))
    answer, proof = await _receive_frame(stream)
    if not hmac.compare_digest(proof, _make_proof(key, label, [*transcript, answer])):
        raise _different_secrets_error("the listener cannot prove that it knows it")
    if status == _REFUSED:
        text = answer.decode(errors="replace")
        raise HandshakeError("".join(letter if letter.isprintable() else "?" for letter in text), why="refused")
    return _unpack_hello(answer)


async def _exchange_as_listener(stream: trio.abc.Stream, key: bytes, admit: Callable[[Hello], Hello | str]) -> Hello:
    """Exchange hellos; return the dialler's hello once it is proved by the secret, `key`, and admitted, see `welcome`.

    Raise `HandshakeError`, whose `why` names the case, if the dialler hung up, is another program or version, has
    another secret, or was refused.
    """
    our_nonce = secrets.token_bytes(_NONCE_BYTES)
    magic, version, their_nonce = _OPENING.unpack(await receive_exactly(stream, _OPENING.size, may_be_foreign=True))
    if magic == _MAGIC:  # also to another version, so that the other side can report both versions
        await _send_bytes(stream, _OPENING.pack(_MAGIC, VERSION, our_nonce))
    transcript = [_check_opening(magic, version, their_nonce), our_nonce]
    packed, proof = await _receive_frame(stream)
    transcript.append(packed)
    if not hmac.compare_digest(proof, _make_proof(key, b"dialler", transcript)):
        await _send_bytes(stream, _UNPROVED)
        raise _different_secrets_error("the dialler cannot prove that it knows it")
    hello = _unpack_hello(packed)
    # the answer of this side, or the reason of its refusal as a text
    response = admit(hello)
    if isinstance(response, str):
        reason = response.encode()[:HELLO_LIMIT_BYTES]
        await _send_bytes(
            stream, _REFUSED + _pack_frame(reason, _make_proof(key, _answer_label(_REFUSED), [*transcript, reason]))
        )
        raise HandshakeError(response, why="refused")
    answer = _pack_hello(response)
    await _send_bytes(
        stream, _WELCOME + _pack_frame(answer, _make_proof(key, _answer_label(_WELCOME), [*transcript, answer]))
    )
    return hello


def _make_proof(key: bytes, label: bytes, transcript: list[bytes]) -> bytes:
    """Return the proof that this side knows the secret: a keyed hash of all bytes of the handshake so far, in order.

    The label distinguishes proofs of the two directions, and of refusals.
    """
    # each part with its length, so that other parts cannot make the same bytes
    parts = [b"overlap", VERSION.to_bytes(2, "big"), label, *transcript]
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def _answer_label(status: bytes, peer: str = "") -> bytes:
    """Return the `_make_proof` label of an answer with this status; raise `HandshakeError` if the status is unknown."""
    if status not in (_WELCOME, _REFUSED):
        reason = f"the listener{peer} is another program: its answer begins with {status!r}"
        raise HandshakeError(f"{reason}; choose another port", why="protocol")
    return b"listener " + status


def _format_peer(stream: trio.abc.Stream) -> str:
    """Return " at HOST:PORT", the other end of a connection; "" if it is unknown."""
    with suppress(AttributeError, OSError, ValueError, TypeError):
        bare = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
        host, port, *_ = bare.socket.getpeername()  # type: ignore[union-attr]  # an `AttributeError` is suppressed
        return f" at {host}:{port}"
    return ""


def _check_opening(magic: bytes, version: int, nonce: bytes) -> bytes:
    """Return the nonce; raise `HandshakeError` if the opening is of another protocol or version."""
    if magic != _MAGIC:
        reason = f"the connection begins with {magic!r}, not with {_MAGIC!r}; the peer is another program"
        raise HandshakeError(f"{reason}; choose another port", why="protocol")
    if version != VERSION:
        reason = f"the other side speaks protocol version {version}, this side version {VERSION}"
        raise HandshakeError(f"{reason}; {_SAME_OVERLAP}", why="version")
    return nonce


def _pack_frame(body: bytes, proof: bytes) -> bytes:
    """Return length, body and proof, which `_receive_frame` reads."""
    return _LENGTH.pack(len(body)) + body + proof


async def _receive_frame(stream: trio.abc.Stream) -> tuple[bytes, bytes]:
    """Return the body and the proof of a frame of `_pack_frame`; raise `HandshakeError` if it is too long."""
    (length_bytes,) = _LENGTH.unpack(await receive_exactly(stream, _LENGTH.size))
    if length_bytes > HELLO_LIMIT_BYTES:
        reason = f"a hello claims {length_bytes} bytes, the limit is {HELLO_LIMIT_BYTES}"
        raise HandshakeError(f"{reason}; {_SAME_OVERLAP}", why="protocol")
    return await receive_exactly(stream, length_bytes), await receive_exactly(stream, _PROOF_BYTES)


async def _send_bytes(stream: trio.abc.Stream, data: bytes) -> None:
    """Raise `HandshakeError` if the connection has ended."""
    try:
        await stream.send_all(data)
    except trio.BrokenResourceError as error:
        raise ended_connection_error(error.__cause__) from error


async def receive_exactly(stream: trio.abc.Stream, nbytes: int, *, may_be_foreign: bool = False) -> bytes:
    """Receive exactly `nbytes`; `HandshakeError` if the connection ends before.

    Args:
        stream: The connection.
        nbytes: Number of bytes.
        may_be_foreign: Whether the peer may be a foreign program; the error of a peer that hangs up then says so.
    """
    received = b""
    while len(received) < nbytes:
        try:
            more = await stream.receive_some(nbytes - len(received))
        except trio.BrokenResourceError as error:
            raise ended_connection_error(error.__cause__, may_be_foreign=may_be_foreign) from error
        if not more:
            raise ended_connection_error(may_be_foreign=may_be_foreign)
        received += more
    return received


def ended_connection_error(cause: BaseException | None = None, *, may_be_foreign: bool = False) -> HandshakeError:
    """Return the error of a connection that ended during the handshake: TLS failed, or the peer hung up.

    Args:
        cause: The error that broke the connection; None: the peer has closed it.
        may_be_foreign: Whether the peer may be a foreign program, because it has sent nothing of this protocol yet.
    """
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
        need = "all processes need certificates of one authority, or none has any"
        return HandshakeError(f"TLS failed ({cause.reason or cause}); {need}", why="tls")
    reason = "the other side hung up during the handshake; see what it has printed"
    return HandshakeError(reason, why="protocol" if may_be_foreign else "left")


def _describe_hang_up(*, encrypted: bool) -> str:
    """Return the text about a listener that hung up without an answer, with the likely reason."""
    if encrypted:
        guess = "it probably does not accept this side's certificate: all processes need certificates of one authority"
        return f"the other side hung up without a word once TLS was set up; {guess}"
    guess = "it has ended, is another program, or wants TLS, which this side does not speak"
    advice = "see whether a process of this job listens there, and whether it was started with TLS"
    return f"the other side hung up without a word; {guess}; {advice}"


def _deadline_error(stream: trio.abc.Stream, deadline_s: float) -> HandshakeError:
    """Return the error of a peer that has let the deadline pass."""
    bare = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    advice = advise_on_silence(getattr(bare, "socket", None))
    reason = f"the other side did not finish the handshake within {deadline_s:g} s"
    return HandshakeError(f"{reason}; {advice}", why="silent")


def advise_on_silence(connection: Any, address: Any = None) -> str:
    """Return the advice for a user whose peer does not answer: look at the process on this host, or at the network.

    Args:
        connection: The socket; None: unknown.
        address: Address of the peer, if the socket is not connected.
    """
    local = connection is not None and is_peer_local(connection, address)
    return "see whether it still starts, or was stopped" if local else "check the network between them"


def is_peer_local(connection: trio.socket.SocketType | socket.socket, address: Any = None) -> bool:
    """Whether the peer of a socket is on this host, so that no network lies between.

    Args:
        connection: A connected socket, or one that could not be connected.
        address: Address of the peer, if the socket is not connected.
    """
    if connection.family == socket.AF_UNIX:
        return True
    # a packet to an address of this host has the same address as its source
    with suppress(OSError), socket.socket(connection.family, socket.SOCK_DGRAM) as probe:  # the peer may have hung up
        probe.connect(address or connection.getpeername())  # a datagram socket sends nothing for that
        return bool(probe.getsockname()[0] == probe.getpeername()[0])
    return False


def _different_secrets_error(how: str) -> HandshakeError:
    """`how` names the failed proof."""
    advice = "start every process of a job with the same OVERLAP_SECRET"
    return HandshakeError(f"the secrets differ: {how}; {advice}", why="secret")


def check_secret(secret: bytes) -> None:
    """Raise `ArgumentError` if the secret is empty."""
    if not secret:
        raise ArgumentError("secret: is empty, so that any process could join; pass the same secret in all processes")


def _pack_hello(hello: Hello) -> bytes:
    """Raise `ArgumentError` if the hello is too long."""
    packed = msgspec.msgpack.encode(astuple(hello))
    if len(packed) > HELLO_LIMIT_BYTES:
        raise ArgumentError(f"a hello of {len(packed)} bytes, the limit is {HELLO_LIMIT_BYTES}; shorten job or detail")
    return packed


def _unpack_hello(packed: bytes) -> Hello:
    """Raise `HandshakeError` unless the hello is six fields of the right types."""
    try:
        role, job, epoch, member, members, detail = _HELLO.decode(packed)
        if member >= members:
            raise ValueError(f"member index {member}, expected 0 to {members - 1}")
    except (msgspec.DecodeError, ValueError) as error:
        raise HandshakeError(f"a hello is wrong: {error}; {_SAME_OVERLAP}", why="protocol") from error
    return Hello(role=role, job=job, epoch=epoch, member=member, members=members, detail=detail)

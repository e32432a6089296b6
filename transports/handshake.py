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

_UNPROVED, _WELCOME, _REFUSED = b"U", b"W", b"R"

#: Why a handshake failed. ``left``: the other side hung up half-way; ``silent``: it let the deadline pass;
#: ``tls``: it has no certificate for us, or no TLS; ``protocol``: it does not speak this protocol; ``version``: another
#: version of it; ``secret``: the secrets differ; ``refused``: it knows the secret and does not want us;
#: ``crowded``: the listener has closed it, as too many other connections waited.
Why: TypeAlias = Literal["left", "silent", "tls", "protocol", "version", "secret", "refused", "crowded"]


class HandshakeError(TransportError):
    """A handshake between two processes failed; nothing but the connection is lost.

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
        deadline_s: For the whole handshake, in this process's own time (`transports.delays`).

    Returns:
        The introduction of the listener, which knows the secret.

    Raises:
        ArgumentError: At once, for a hello too long or an empty secret.
        HandshakeError: The other side does not know the secret, refused (its reason is the message), or is no member.
    """
    packed, key = _pack_hello(hello), _check_secret(secret)
    with limit_own_time(deadline_s):
        return await _introduce(stream, packed, key)
    raise _silent_error(stream, deadline_s)


async def welcome(
    stream: trio.abc.Stream, secret: bytes, admit: Callable[[Hello], Hello | str], *, deadline_s: float = 2.0
) -> Hello:
    """Receive a process that has dialled this one.

    Reads exactly the bytes of the handshake. A stranger gets no answer before a valid opening, and no reason before a
    valid proof.

    Args:
        stream: The connection. The caller keeps it, and closes it if this raises.
        secret: Known to both sides.
        admit: Called once the dialler has proved the secret; returns this side's hello, or a reason to refuse.
        deadline_s: For the whole handshake, in this process's own time (`transports.delays`).

    Returns:
        The introduction of the dialler, which knows the secret and was admitted by `admit`.

    Raises:
        ArgumentError: At once, for an empty secret; later, for a hello of `admit` that is too long.
        HandshakeError: The other side does not know the secret, was refused, or is no member.
    """
    key = _check_secret(secret)
    with limit_own_time(deadline_s):
        return await _receive_dialler(stream, key, admit)
    raise _silent_error(stream, deadline_s)


async def _introduce(stream: trio.abc.Stream, hello: bytes, key: bytes) -> Hello:
    """Exchange hellos as the side that has dialled; return the listener's hello once it has proved the secret."""
    our_nonce = secrets.token_bytes(_NONCE_BYTES)
    await _send(stream, _OPENING.pack(_MAGIC, VERSION, our_nonce))
    try:
        opening = await receive_exactly(stream, _OPENING.size)
    except HandshakeError as error:
        if error.why != "left":
            raise
        raise HandshakeError(_guess_refusal(encrypted=isinstance(stream, trio.SSLStream)), why="left") from error
    transcript = [our_nonce, _check_opening(*_OPENING.unpack(opening)), hello]
    await _send(stream, _pack_frame(hello, _proof(key, b"dialler", transcript)))
    status = await receive_exactly(stream, 1)
    if status == _UNPROVED:
        raise _secrets_error("the listener does not accept this side's proof")
    label = _answer_label(status)
    answer, proof = await _receive_frame(stream)
    if not hmac.compare_digest(proof, _proof(key, label, [*transcript, answer])):
        raise _secrets_error("the listener cannot prove that it knows it")
    if status == _REFUSED:
        text = answer.decode(errors="replace")
        raise HandshakeError("".join(letter if letter.isprintable() else "?" for letter in text), why="refused")
    return _unpack_hello(answer)


async def _receive_dialler(stream: trio.abc.Stream, key: bytes, admit: Callable[[Hello], Hello | str]) -> Hello:
    """Exchange hellos as the side that listens; return the dialler's hello once it is proved and admitted."""
    our_nonce = secrets.token_bytes(_NONCE_BYTES)
    magic, version, their_nonce = _OPENING.unpack(await receive_exactly(stream, _OPENING.size, strange=True))
    if magic == _MAGIC:  # also to another version, which learns this side's version from it
        await _send(stream, _OPENING.pack(_MAGIC, VERSION, our_nonce))
    transcript = [_check_opening(magic, version, their_nonce), our_nonce]
    packed, proof = await _receive_frame(stream)
    transcript.append(packed)
    if not hmac.compare_digest(proof, _proof(key, b"dialler", transcript)):
        await _send(stream, _UNPROVED)
        raise _secrets_error("the dialler cannot prove that it knows it")
    hello = _unpack_hello(packed)
    response = admit(hello)
    if isinstance(response, str):
        reason = response.encode()[:HELLO_LIMIT_BYTES]
        await _send(stream, _REFUSED + _pack_frame(reason, _proof(key, _answer_label(_REFUSED), [*transcript, reason])))
        raise HandshakeError(response, why="refused")
    answer = _pack_hello(response)
    await _send(stream, _WELCOME + _pack_frame(answer, _proof(key, _answer_label(_WELCOME), [*transcript, answer])))
    return hello


def _proof(key: bytes, label: bytes, transcript: list[bytes]) -> bytes:
    """Return the proof of the secret over all bytes so far; lengths go in, so that no two handshakes look alike."""
    parts = [b"overlap", VERSION.to_bytes(2, "big"), label, *transcript]
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def _answer_label(status: bytes) -> bytes:
    """Return the label of the proof of an answer, by its status; `HandshakeError` if the status is unknown."""
    if status not in (_WELCOME, _REFUSED):
        raise HandshakeError(
            f"the answer begins with {status!r}; the listener is another program; choose another port", why="protocol"
        )
    return b"listener " + status


def _check_opening(magic: bytes, version: int, nonce: bytes) -> bytes:
    """Return the nonce of an opening; `HandshakeError` for another protocol or version."""
    if magic != _MAGIC:
        raise HandshakeError(
            f"the connection begins with {magic!r}, not with {_MAGIC!r}; the peer is another program; "
            "choose another port",
            why="protocol",
        )
    if version != VERSION:
        raise HandshakeError(
            f"the other side speaks protocol version {version}, this side version {VERSION}; "
            "install the same overlap on every node",
            why="version",
        )
    return nonce


def _pack_frame(body: bytes, proof: bytes) -> bytes:
    """Return a body with its length before it and its proof after it."""
    return _LENGTH.pack(len(body)) + body + proof


async def _receive_frame(stream: trio.abc.Stream) -> tuple[bytes, bytes]:
    """Receive a body and its proof; `HandshakeError` if the body is too long."""
    (length_bytes,) = _LENGTH.unpack(await receive_exactly(stream, _LENGTH.size))
    if length_bytes > HELLO_LIMIT_BYTES:
        raise HandshakeError(
            f"a hello claims {length_bytes} bytes, the limit is {HELLO_LIMIT_BYTES}; "
            "install the same overlap on every node",
            why="protocol",
        )
    return await receive_exactly(stream, length_bytes), await receive_exactly(stream, _PROOF_BYTES)


async def _send(stream: trio.abc.Stream, data: bytes) -> None:
    try:
        await stream.send_all(data)
    except trio.BrokenResourceError as error:
        raise _broken_error(error) from error


async def receive_exactly(stream: trio.abc.Stream, nbytes: int, *, strange: bool = False) -> bytes:
    """Receive exactly `nbytes`; `strange` makes a peer that hangs up another program, not a member that gave up."""
    received = b""
    while len(received) < nbytes:
        try:
            more = await stream.receive_some(nbytes - len(received))
        except trio.BrokenResourceError as error:
            raise _broken_error(error, strange=strange) from error
        if not more:
            raise _hung_up_error(strange=strange)
        received += more
    return received


def _broken_error(error: trio.BrokenResourceError, *, strange: bool = False) -> HandshakeError:
    """Return the error of a connection that broke: TLS failed, or the peer hung up.

    Args:
        error: The error of the stream.
        strange: The peer has sent nothing that is of this protocol.
    """
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
        need = "all processes need certificates of one authority, or none has any"
        return HandshakeError(f"TLS failed ({cause.reason or cause}); {need}", why="tls")
    return _hung_up_error(strange=strange)


def _hung_up_error(*, strange: bool = False) -> HandshakeError:
    return HandshakeError(
        "the other side hung up during the handshake; see what it has printed", why="protocol" if strange else "left"
    )


def _guess_refusal(*, encrypted: bool) -> str:
    """Return the likely reason why a listener hung up without an answer, as listeners do on strangers."""
    if encrypted:
        return (
            "the other side hung up without a word once TLS was set up; it probably does not accept this side's "
            "certificate: all processes need certificates of one authority"
        )
    return "the other side hung up without a word; it is another program, or wants TLS, which this side does not speak"


def _silent_error(stream: trio.abc.Stream, deadline_s: float) -> HandshakeError:
    """Return the error of a peer that has let the deadline pass."""
    bare = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    advice = advise_on_silence(getattr(bare, "socket", None))
    return HandshakeError(
        f"the other side did not finish the handshake within {deadline_s:g} s; {advice}", why="silent"
    )


def advise_on_silence(connection: Any, address: Any = None) -> str:
    """Return what to check if a peer does not answer; arguments as of `is_local`."""
    local = connection is not None and is_local(connection, address)
    return "see whether it still starts, or was stopped" if local else "check the network between them"


def is_local(connection: trio.socket.SocketType | socket.socket, address: Any = None) -> bool:
    """Whether no network joins a socket to its peer: a packet to the peer would have its address as its source, too.

    Args:
        connection: A connected socket, or one that cannot be connected.
        address: Of the peer, if it is not connected.
    """
    if connection.family == socket.AF_UNIX:
        return True
    with suppress(OSError), socket.socket(connection.family, socket.SOCK_DGRAM) as probe:  # the peer may have hung up
        probe.connect(address or connection.getpeername())  # a datagram socket sends nothing for that
        return bool(probe.getsockname()[0] == probe.getpeername()[0])
    return False


def _secrets_error(how: str) -> HandshakeError:
    return HandshakeError(
        f"the secrets differ: {how}; start every process of a job with the same OVERLAP_SECRET", why="secret"
    )


def _check_secret(secret: bytes) -> bytes:
    if not secret:
        raise ArgumentError("the secret is empty; without one anybody is a member")
    return secret


def _pack_hello(hello: Hello) -> bytes:
    packed = msgspec.msgpack.encode(astuple(hello))
    if len(packed) > HELLO_LIMIT_BYTES:
        raise ArgumentError(f"a hello of {len(packed)} bytes, the limit is {HELLO_LIMIT_BYTES}; shorten job or detail")
    return packed


def _unpack_hello(packed: bytes) -> Hello:
    """Return the hello of proved bytes; `HandshakeError` unless they are six fields of the right types."""
    try:
        role, job, epoch, member, members, detail = _HELLO.decode(packed)
        if member >= members:
            raise ValueError(f"member {member} of {members}")
    except (msgspec.DecodeError, ValueError) as error:
        raise HandshakeError(
            f"a hello is wrong: {error}; install the same overlap on every node", why="protocol"
        ) from error
    return Hello(role=role, job=job, epoch=epoch, member=member, members=members, detail=detail)

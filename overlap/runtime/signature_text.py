"""Texts of signatures, as they travel between processes: msgpack, of bounded length."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from transports.frame import SAME_OVERLAP
from transports.signature import TEXT_BYTES

from ..collectives.call import Call, call, uneven_call
from ..collectives.kinds import Collective
from .forms import dtype_of

_KINDS = tuple(Collective)

# Most bytes of a text before the name of the file, so that the end of that name fits.
_HEAD_BYTES = 64

# Replaces the form of a tree if the call is too long.
_CUT = "..."

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class SignatureText(msgspec.Struct, array_like=True):
    """A signature as it travels."""

    kind: _Number  # Index of the collective
    flat: bool
    what: str  # Beginning of the call as errors show it, if all of it is too long; then no other value counts
    line: _Number
    size: _Number = 0
    root: _Number = 0
    dtype: str | None = None
    shape: tuple[_Number, ...] | None = None
    op: str | None = None
    exact: bool = False
    shared: bool = False
    algorithm: str | None = None
    blocks: tuple[tuple[tuple[_Number, _Number], ...], tuple[_Number, ...]] = ((), ())  # Pairs and counts
    form: str = ""
    file: str = ""  # End of the name of the file


def encode_signature(called: Call | None, what: str, site: str, *, flat: bool) -> bytes:
    """Return a signature as at most `TEXT_BYTES` bytes. Of a long call the beginning stays, of a long path the end.

    Args:
        called: The call; None: only `what` is known.
        what: The call as errors show it.
        site: Line of the call as "file:line".
        flat: Whether the shape is open.
    """
    path, _, line = site.rpartition(":")
    number = int(line) if line.isdecimal() else 0
    # in case the call is too long: 24 bytes are for the other values
    text = SignatureText(0, flat, what.encode()[: _HEAD_BYTES - 24].decode(errors="ignore"), number)
    if called is not None:
        kind, key = _KINDS.index(called.kind), called.key
        text.form = _CUT if key.form else ""
        whole = SignatureText(
            kind, flat, "", number, key.size, key.root, key.dtype, key.shape, key.op, key.exact, key.shared,
            key.algorithm, (key.pairs, key.counts), key.form,
        )  # fmt: skip
        text = whole if len(msgspec.msgpack.encode(whole)) <= _HEAD_BYTES else text
    room = TEXT_BYTES - len(msgspec.msgpack.encode(text)) - 1  # the length of a longer text takes a byte more
    text.file = (path or site).encode()[-room:].decode(errors="ignore")
    return msgspec.msgpack.encode(text)


def decode_signature(text: bytes) -> tuple[Call | None, str, str, bool, bool]:
    """Decode the text of a signature.

    Returns:
        The call, or None if it was too long; the call as errors show it; its line as "file:line", perhaps without the
        beginning of the path; whether its shape is open; whether a tree is sent.

    Raises:
        ValueError: If the text is too long, or has values that no call has.
        msgspec.MsgspecError: If it is no signature.
    """
    if len(text) > TEXT_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and {TEXT_BYTES} are the most; {SAME_OVERLAP}")
    read = msgspec.msgpack.decode(text, type=SignatureText)
    site = f"{read.file}:{read.line}"
    if read.what:
        return None, f"{read.what} ...", site, read.flat, bool(read.form)
    if read.kind >= len(_KINDS):
        raise ValueError(
            f"the call at {site} has collective kind {read.kind}, and this overlap knows 0 to {len(_KINDS) - 1}; "
            f"{SAME_OVERLAP}"
        )
    pairs, counts = read.blocks
    dtype = None if read.dtype is None else dtype_of(read.dtype)
    found = (uneven_call if counts else call)(
        _KINDS[read.kind].text, read.op, dtype, read.shape, read.size, read.root, pairs, counts, read.exact,
        read.shared, read.algorithm, read.form,
    )  # fmt: skip
    return found, str(found), site, read.flat, bool(read.form)

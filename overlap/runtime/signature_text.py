"""Texts of signatures, as they travel between processes: msgpack, of bounded length."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from transports.signature import TEXT_BYTES

from ..collectives.call import Call, call, uneven_call
from ..collectives.kinds import Collective
from .forms import dtype_of

_KINDS = tuple(Collective)

# Most bytes of a text before the name of the file, whose end should be readable.
_HEAD_BYTES = 64

# In place of the form of a tree, where the call is too long.
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


def encode(called: Call | None, what: str, site: str, *, flat: bool) -> bytes:
    """Return a signature as at most `TEXT_BYTES` bytes; of a long call its beginning, of a long path its end."""
    path, _, line = site.rpartition(":")
    number = int(line) if line.isdecimal() else 0
    text = SignatureText(0, flat, what.encode()[: _HEAD_BYTES - 24].decode(errors="ignore"), number)
    if called is not None:
        kind, key = _KINDS.index(called.kind), called.key
        text.form = _CUT if key.form else ""
        whole = SignatureText(
            kind, flat, "", number, key.size, key.root, key.dtype, key.shape, key.op, key.exact, key.shared,
            key.algorithm, (key.pairs, key.counts), key.form,
        )  # fmt: skip
        text = whole if len(msgspec.msgpack.encode(whole)) <= _HEAD_BYTES else text
    room = TEXT_BYTES - len(msgspec.msgpack.encode(text)) - 1
    text.file = (path or site).encode()[-room:].decode(errors="ignore")
    return msgspec.msgpack.encode(text)


def decode(text: bytes) -> tuple[Call | None, str, str, bool, bool]:
    """Return the call of a signature, if all of it is there, what errors show of it, and its line.

    And whether it is flat, and whether it is of a tree.
    """
    if len(text) > TEXT_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and {TEXT_BYTES} are the most")
    read = msgspec.msgpack.decode(text, type=SignatureText)
    site = f"{read.file}:{read.line}"
    if read.what:
        return None, f"{read.what} ...", site, read.flat, bool(read.form)
    if read.kind >= len(_KINDS):
        raise ValueError(f"it has the kind {read.kind}, and only {len(_KINDS)} are known")
    pairs, counts = read.blocks
    dtype = None if read.dtype is None else dtype_of(read.dtype)
    found = (uneven_call if counts else call)(
        _KINDS[read.kind].text, read.op, dtype, read.shape, read.size, read.root, pairs, counts, read.exact,
        read.shared, read.algorithm, read.form,
    )  # fmt: skip
    return found, str(found), site, read.flat, bool(read.form)

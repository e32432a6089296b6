"""A file of a save: safetensors, written whole or not at all, with a digest of all its bytes.

::

    8 bytes    length of the header
    header     {"__metadata__": {"xxh3_128": DIGEST, "overlap": ABOUT}, NAME: {dtype, shape, data_offsets}, ...}
    arrays

The digest is that of the file with zeros in the place of the digest: of what was to be written, not of what was.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash

from ..collectives.reduce import Array
from ..runtime.forms import dtype_of

#: Names in safetensors of the types of numpy and ml_dtypes (safetensors 0.8, src/tensor.rs).
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_NAMES = {code: name for name, code in CODES.items()}
OWN = "own:"
"""Begins the names of arrays that are no pieces of a model: one rank alone has them."""

_NO_DIGEST = "0" * 32
_DIGEST_AT = 8 + len('{"__metadata__": {"xxh3_128": "')
_HEADER_LIMIT_BYTES = 100 << 20  # as the safetensors library has it
_BLOCK_BYTES = 4 << 20

_Count = Annotated[int, msgspec.Meta(ge=0)]


class DamagedError(ValueError):
    """A file with other contents than were written."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Elements `start` to `stop` of a flat tensor of a model: one array of a file."""

    key: str  # Name of the tensor, and of the block of it
    shape: tuple[_Count, ...]  # Shape of the tensor, or block
    start: _Count
    stop: _Count
    cut: tuple[str, int, int, int] | None = None  # Place of the block in the whole tensor: fields of `Cut`


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a file, beside its arrays."""

    step: int
    nonce: int
    rank: int  # Rank that wrote it
    ranks: int  # Number of ranks that made the save
    form: Any = None  # Form of the tree of a state; of the trees of a checkpoint, by the number of their ranks
    pieces: dict[str, Piece] = {}  # Arrays of a model, by their names in the file
    notes: dict[str, Any] = {}  # Other values of a model, by the name of its part
    extra: dict[str, Any] = {}  # The user's values


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


# msgspec learns a type at its first use; two threads that do so at once crash (0.22).
_ABOUT = msgspec.json.Decoder(About).type
_ENTRIES = msgspec.json.Decoder(dict[str, _Entry]).type


def write_file(path: Path, arrays: Mapping[str, Array], about: About) -> None:
    """Write a file: when this returns it is on the disk under its name, and until then there is none of that name.

    Args:
        path: Its folder is made.
        arrays: Arrays of any shape, of the dtypes in `CODES`, by name; unchanged until this returns.
        about: Other contents.

    Raises:
        OSError: If it cannot be written; it names the file, of which nothing is left.
    """
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)  # aligned, as the library has them
    metadata = {"xxh3_128": _NO_DIGEST, "overlap": json.dumps(msgspec.to_builtins(about))}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": CODES[array.dtype.name], "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    chunks: list[Any] = [head, *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for _, array in ordered)]
    digest = xxhash.xxh3_128()
    for chunk in chunks:
        digest.update(chunk)
    head[_DIGEST_AT : _DIGEST_AT + len(_NO_DIGEST)] = digest.hexdigest().encode()
    temporary = path.with_suffix(f".writing-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # the system names none of those that are open
        with suppress(OSError):
            temporary.unlink()
        raise
    for folder in (path.parent, path.parents[1]):  # the names in them
        descriptor = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # some file systems refuse
            os.fsync(descriptor)
        os.close(descriptor)


class SavedFile:
    """A file of a save, by its header, which another rank may have read.

    Attributes:
        path: Where it is.
        header: Its bytes.
        about: Contents besides arrays.

    Args:
        path: Where it is.
        header: Bytes of the header; None: they are read.

    Raises:
        OSError: It cannot be read.
        DamagedError: It is no file of a save.
    """

    def __init__(self, path: Path, header: bytes | None = None) -> None:
        self.path = path
        self.header: bytes = _read_header(path) if header is None else header
        try:
            entries = json.loads(self.header)
            self.about: About = msgspec.convert(json.loads(entries.pop("__metadata__")["overlap"]), _ABOUT)
            self._entries: dict[str, _Entry] = msgspec.convert(entries, _ENTRIES)
            self._check_sizes()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
            raise DamagedError(f"{path} is not what was written: {error!r}") from error

    def _check_sizes(self) -> None:
        """Refuse entries that have not the bytes of their shapes, and pieces that exceed their tensors."""
        for entry in self._entries.values():
            begin, end = entry.data_offsets
            if end - begin != math.prod(entry.shape) * dtype_of(_NAMES[entry.dtype]).itemsize:
                raise DamagedError(f"{begin} to {end} is not the place of {entry.shape} of {entry.dtype}")
        for name, piece in self.about.pieces.items():
            length = math.prod(self._entries[name].shape)
            if piece.stop - piece.start != length or piece.stop > math.prod(piece.shape):
                raise DamagedError(f"{name!r} has {length} elements")

    def check_digest(self) -> None:
        """Compare the bytes with the digest among them.

        Raises:
            OSError: They cannot be read.
            DamagedError: They are not what was written.
        """
        digest = xxhash.xxh3_128()
        with open(self.path, "rb") as file:
            digest.update(file.read(_DIGEST_AT))
            written = file.read(len(_NO_DIGEST))
            digest.update(_NO_DIGEST.encode())
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        if digest.hexdigest().encode() != written:
            raise DamagedError(f"{self.path} is not what was written")

    @property
    def names(self) -> Iterable[str]:
        """Names of the arrays."""
        return self._entries

    def dtype(self, name: str) -> str:
        """Return the name of the dtype of an array."""
        return _NAMES[self._entries[name].dtype]

    def array(self, name: str) -> Array:
        """Return an array in new memory."""
        entry = self._entries[name]
        array = np.empty(entry.shape, dtype_of(_NAMES[entry.dtype]))
        self.read(name, 0, array.reshape(-1))
        return array

    def read(self, name: str, first: int, target: Array) -> None:
        """Read elements of an array into `target`, as many as it has, from element `first` on."""
        entry = self._entries[name]
        begin = 8 + len(self.header) + entry.data_offsets[0] + first * target.itemsize
        data = np.fromfile(self.path, np.uint8, target.nbytes, offset=begin)
        if len(data) < target.nbytes:
            raise DamagedError(f"{self.path} ends too soon")
        target[...] = data.view(target.dtype)


def _read_header(path: Path) -> bytes:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT_BYTES:
            raise DamagedError(f"{path} is not what was written: its header has {length} bytes")
        return file.read(length)

"""A file of a save: safetensors, written whole or not at all, with a digest of all its bytes.

::

    8 bytes    length of the header
    header     {"__metadata__": {"xxh3_128": DIGEST, "overlap": FACTS}, NAME: {dtype, shape, data_offsets}, ...}
    arrays

The digest is computed over the file with 32 zeros in the place of the digest, from the memory that is written.
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
"""Prefix of the names of arrays that are no pieces of a model: the state of a single rank."""

_NO_DIGEST = "0" * 32
_DIGEST_AT = 8 + len('{"__metadata__": {"xxh3_128": "')  # offset of the digest in the file, in bytes
_HEADER_LIMIT_BYTES = 100 << 20  # the limit of the safetensors library
_BLOCK_BYTES = 4 << 20  # bytes read at once
_ADVICE = "restore the file, or delete this save"

_Count = Annotated[int, msgspec.Meta(ge=0)]


class DamagedError(ValueError):
    """The contents of a file are not those that were written."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Content of an array of a file: elements `start` to `stop` (exclusive) of a model's tensor, flat."""

    key: str  # Name of the tensor; of a block with axis, index and number of blocks (`Shard.key`)
    shape: tuple[_Count, ...]  # Shape of the tensor or block
    start: _Count
    stop: _Count
    cut: tuple[str, int, int, int] | None = None  # Of a block, its place in the whole tensor: the fields of `Cut`


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file of a save besides its arrays."""

    step: int  # Step of the save
    nonce: int  # Random number of the attempt that made the save
    rank: int  # Rank that wrote the file
    ranks: int  # Number of ranks that made the save
    # Form of a tree, from `pack_tree`: for a state, that of the rank's tree; for a checkpoint, a dict with the form of
    # each rank's own state, by the rank as text.
    form: Any = None
    pieces: dict[str, Piece] = {}  # What the arrays of a model hold, by their names in the file
    notes: dict[str, Any] = {}  # Further values of a model, by the part of it that a rank has ("": all)
    extra: dict[str, Any] = {}  # Values of the program


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


# msgspec analyses a type at its first use, and crashes if two threads do so at once (0.22): so it is done here.
_FACTS = msgspec.json.Decoder(FileFacts).type
_ENTRIES = msgspec.json.Decoder(dict[str, _Entry]).type


def write_file(path: Path, arrays: Mapping[str, Array], facts: FileFacts) -> None:
    """Write a file whole or not at all. When this returns, it is on the disk; before, there is no file of its name.

    Args:
        path: The file; its folder is made.
        arrays: Arrays of any shape, of the dtypes in `CODES`, by name; they must not change until this returns.
        facts: The other contents.

    Raises:
        OSError: The file cannot be written; the error names it, and nothing of it is left.
    """
    # The widest dtypes first, so that all arrays are aligned, as the safetensors library does.
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    metadata = {"xxh3_128": _NO_DIGEST, "overlap": json.dumps(msgspec.to_builtins(facts))}
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
    head[_DIGEST_AT : _DIGEST_AT + len(_NO_DIGEST)] = digest.hexdigest().encode()  # replaces the zeros
    _write_atomically(path, chunks)


def _write_atomically(path: Path, chunks: Iterable[Any]) -> None:
    """Write chunks of bytes to a temporary file, and rename this to `path` once it is on the disk; see `write_file`."""
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
        error.filename = error.filename or str(path)  # errors of open files have no name
        with suppress(OSError):
            temporary.unlink()
        raise
    for folder in (path.parent, path.parents[1]):  # so that the new names in both folders are on the disk, too
        descriptor = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # some file systems refuse
            os.fsync(descriptor)
        os.close(descriptor)


class SavedFile:
    """A file of a save whose header has been read; arrays are read from the disk on request.

    Args:
        path: The file.
        header: Bytes of the header, which another rank may have read; None: they are read from the file.

    Attributes:
        path: The file.
        header: Bytes of the header.
        facts: Contents of the file besides its arrays.

    Raises:
        OSError: The file cannot be read.
        DamagedError: The header is not that of a file of a save.
    """

    def __init__(self, path: Path, header: bytes | None = None) -> None:
        self.path = path
        self.header: bytes = _read_header(path) if header is None else header
        try:
            entries = json.loads(self.header)
            self.facts: FileFacts = msgspec.convert(json.loads(entries.pop("__metadata__")["overlap"]), _FACTS)
            self._entries: dict[str, _Entry] = msgspec.convert(entries, _ENTRIES)
            self._check_sizes()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
            raise DamagedError(f"{path} is damaged: its header is invalid ({error!r}); {_ADVICE}") from error

    def _check_sizes(self) -> None:
        """Refuse arrays whose bytes do not fit their shapes, and pieces that exceed their tensors."""
        for entry in self._entries.values():
            begin, end = entry.data_offsets
            if end - begin != math.prod(entry.shape) * dtype_of(_NAMES[entry.dtype]).itemsize:
                raise DamagedError(f"{begin} to {end} is not the place of {entry.shape} of {entry.dtype}")
        for name, piece in self.facts.pieces.items():
            length = math.prod(self._entries[name].shape)
            if piece.stop - piece.start != length or piece.stop > math.prod(piece.shape):
                raise DamagedError(
                    f"{name!r} has {length} elements, its piece is {piece.start} to {piece.stop} of {piece.shape}"
                )

    def check_digest(self) -> None:
        """Compute the digest of the file, and compare it with the digest in the header.

        Raises:
            OSError: The file cannot be read.
            DamagedError: The digests differ.
        """
        digest = xxhash.xxh3_128()
        with open(self.path, "rb") as file:
            digest.update(file.read(_DIGEST_AT))
            written = file.read(len(_NO_DIGEST))
            digest.update(_NO_DIGEST.encode())
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        if digest.hexdigest().encode() != written:
            raise DamagedError(f"{self.path} is damaged: its bytes do not match its digest; {_ADVICE}")

    @property
    def names(self) -> Iterable[str]:
        """Names of the arrays."""
        return self._entries

    def dtype_name(self, name: str) -> str:
        """Return the name of the dtype of an array."""
        return _NAMES[self._entries[name].dtype]

    def read_array(self, name: str) -> Array:
        """Return an array in new memory."""
        entry = self._entries[name]
        array = np.empty(entry.shape, dtype_of(_NAMES[entry.dtype]))
        self.read_into(name, 0, array.reshape(-1))
        return array

    def read_into(self, name: str, first: int, target: Array) -> None:
        """Fill `target` with the elements of an array from element `first` on.

        Args:
            name: Name of the array.
            first: Index of the first element in the flat array.
            target: Flat array of the same dtype; its size is the number of elements that are read.

        Raises:
            DamagedError: The file ends too soon.
        """
        entry = self._entries[name]
        begin = 8 + len(self.header) + entry.data_offsets[0] + first * target.itemsize
        data = np.fromfile(self.path, np.uint8, target.nbytes, offset=begin)
        if len(data) < target.nbytes:
            raise DamagedError(f"{self.path} is damaged: it ends within the array {name!r}; {_ADVICE}")
        target[...] = data.view(target.dtype)


def _read_header(path: Path) -> bytes:
    """Return the bytes of the header of a file; fewer, if the file ends in it.

    Raises a `DamagedError` if the length of the header exceeds the limit.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT_BYTES:
            raise DamagedError(
                f"{path} is damaged: its header claims {length} of at most {_HEADER_LIMIT_BYTES} bytes; {_ADVICE}"
            )
        return file.read(length)

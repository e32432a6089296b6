"""The files of checkpoints: safetensors, in a folder for each step that appears under its name when all is in it.

::

    DIR/checkpoint-000000000040/rank-0-of-2.safetensors
                                rank-1-of-2.safetensors        or model.safetensors alone
                                manifest.json

Until then the folder has another name, so a checkpoint is there whole or not at all, whenever the program is killed.
The manifest tells the tensors, which piece of them is in which file, and a checksum (XXH3) of each file and of itself.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec
import numpy as np
import xxhash

from ...errors import UsageError
from .pieces import Cut, Piece, Tensors

if TYPE_CHECKING:
    from ..tree import Array

_FILE = re.compile(r"[\w-]+\.safetensors")
_NAME = re.compile(r"checkpoint-(\d{12,18})")
_MANIFEST = "manifest.json"
_WHOLE = "model.safetensors"
_SEAL = "xxh3_128"
_FORMAT = 3
_HEADER_LIMIT_BYTES = 100 << 20  # as the safetensors library has it

# The names in safetensors of the types of numpy and ml_dtypes (safetensors 0.8, src/tensor.rs).
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
    "U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


class DamagedError(ValueError):
    """A file is not what was written."""


def folder_of(parent: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return parent / f"checkpoint-{step:012}"


def complete_steps(parent: str | os.PathLike[str]) -> list[int]:
    """Return the steps of which there is a complete checkpoint, the newest first."""
    names: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(parent)
    found = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
    return sorted((step for step in found if (folder_of(Path(parent), step) / _MANIFEST).exists()), reverse=True)


# -- writing -------------------------------------------------------------------------------------------------------


def check_types(tensors: Tensors) -> None:
    """Refuse tensors of types that safetensors does not have.

    Raises:
        UsageError: Naming the dtypes.
    """
    unknown = sorted({dtype for dtype, _ in tensors.values()}.difference(_DTYPES.values()))
    if unknown:
        raise UsageError(f"model: safetensors has no type for {', '.join(unknown)}")


def write_part(folder: Path, rank: int, ranks: int, pieces: Sequence[Piece], notes: Mapping[str, object]) -> None:
    """Write a rank's pieces; when this returns, they are on the disk.

    Args:
        folder: Where.
        rank: This one.
        ranks: All of them.
        pieces: This rank's.
        notes: Values for JSON, by the name of the part of a model.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{piece.key}[{piece.start}:{piece.stop}]": piece.data for piece in pieces}
    shapes = {piece.key: [piece.dtype.name, list(piece.shape)] for piece in pieces}
    parts = [[key, piece.key, piece.start, piece.stop] for key, piece in zip(tensors, pieces, strict=True)]
    cuts = {piece.key: list(astuple(piece.cut)) for piece in pieces if piece.cut}
    told = {"tensors": shapes, "pieces": parts, "cuts": cuts, "notes": notes}
    _write(folder / f"rank-{rank}-of-{ranks}.safetensors", tensors, told)


def merge(folder: Path, ranks: int) -> None:
    """Make one file of the files of all ranks, which has each tensor in its shape, under its name."""
    manifest = _manifest(folder, ranks, 0, {})
    reader = Reader(folder, manifest)
    tensors = {name: reader.whole(name) for name in reader.tensors}
    parts = [[name, name, 0, array.size] for name, array in tensors.items()]
    told = {"tensors": dict(reader.tensors), "pieces": parts, "cuts": {}, "notes": manifest["notes"]}
    _write(folder / _WHOLE, tensors, told)
    for name in reader.files:
        (folder / name).unlink()


def commit(written: Path, parent: Path, step: int, ranks: int, extra: Mapping[str, object], *, keep: int) -> None:
    """Let a written folder appear as the checkpoint of its step; remove older checkpoints and unfinished folders.

    Raises:
        UsageError: If the part of a rank is not seen here.
        OSError: If it cannot be written.
    """
    with open(written / _MANIFEST, "w", encoding="utf-8") as file:
        file.write(_sealed(_manifest(written, ranks, step, extra)))
        file.flush()
        os.fsync(file.fileno())
    _sync(written)
    final = folder_of(parent, step)
    if final.exists():  # of an earlier attempt
        os.rename(final, written.with_suffix(".old"))
    os.rename(written, final)
    _sync(parent)
    for old in complete_steps(parent)[keep:]:
        shutil.rmtree(folder_of(parent, old), ignore_errors=True)
    for name in os.listdir(parent):
        if name.startswith(".checkpoint-"):  # which somebody was killed at
            shutil.rmtree(parent / name, ignore_errors=True)


def _checksum(path: Path) -> str:
    """Return the checksum of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write(path: Path, tensors: Mapping[str, Array], told: Mapping[str, object]) -> None:
    from safetensors import SafetensorError, TensorSpec, serialize_file  # needed to save only

    arrays = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
    specs = {
        key: TensorSpec(dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for key, array in arrays.items()
    }
    try:
        serialize_file(specs, path, metadata={"overlap": json.dumps(told)})
    except SafetensorError as error:  # a full disk, among others
        raise OSError(f"{path}: {error}") from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    _sync(path.parent)


def _manifest(folder: Path, ranks: int, step: int, extra: Mapping[str, object]) -> dict[str, Any]:
    names = [_WHOLE] if (folder / _WHOLE).exists() else [f"rank-{rank}-of-{ranks}.safetensors" for rank in range(ranks)]
    files, tensors, notes, cuts = [], {}, {}, {}
    for rank, name in enumerate(names):
        path = folder / name
        if not path.exists():
            raise UsageError(
                f"checkpoint: rank 0 does not see what rank {rank} has written to {folder.parent}; "
                "name a folder that all ranks see"
            )
        told = json.loads(_header(path)[0]["__metadata__"]["overlap"])
        tensors.update(told["tensors"])
        notes.update(told["notes"])
        cuts.update(told["cuts"])
        size = path.stat().st_size
        files.append({"name": name, "bytes": size, "xxh3_128": _checksum(path), "pieces": told["pieces"]})
    told = {"format": _FORMAT, "step": step, "ranks": ranks, "extra": dict(extra)}
    return told | {"tensors": tensors, "cuts": cuts, "files": files, "notes": notes}


def _sealed(told: Mapping[str, Any]) -> str:
    """Return a manifest as text that has its own checksum."""
    text = json.dumps(json.loads(json.dumps(told)))  # as it will be read
    return json.dumps(json.loads(text) | {_SEAL: xxhash.xxh3_128(text.encode()).hexdigest()})


# -- reading -------------------------------------------------------------------------------------------------------


def _unsealed(path: Path) -> dict[str, Any]:
    """Return the contents of a manifest; one without a checksum is of an earlier version, and is trusted."""
    try:
        told: dict[str, Any] = json.loads(path.read_text("utf-8"))
        seal = told.pop(_SEAL, None)
        if seal in (None, xxhash.xxh3_128(json.dumps(told).encode()).hexdigest()):
            return told
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is not what was written") from error
    raise DamagedError(f"{path} is not what was written")


class _File(TypedDict):
    name: str
    bytes: int
    xxh3_128: str
    pieces: list[tuple[str, str, int, int]]  # its name in the file, that of the tensor, and elements from and to


class _Manifest(TypedDict):
    step: int
    ranks: int
    extra: dict[str, Any]
    notes: Annotated[dict[str, Any], msgspec.Meta(min_length=1)]
    tensors: dict[str, tuple[str, list[Annotated[int, msgspec.Meta(ge=0)]]]]
    cuts: dict[str, tuple[str, int, int, int]]
    files: list[_File]


# msgspec learns a type at its first use; two threads that do so at once crash (0.22).
_TYPE = msgspec.json.Decoder(_Manifest).type


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's manifest.

    Raises:
        DamagedError: If that cannot be understood.
    """
    try:
        told = _unsealed(folder / _MANIFEST)
        if told["format"] != _FORMAT:
            raise DamagedError(f"{folder}: its format is {told['format']}, known is {_FORMAT}")
        msgspec.convert(told, _TYPE)
        if any(not _FILE.fullmatch(file["name"]) for file in told["files"]):
            raise DamagedError(f"{folder}: its manifest names files elsewhere")
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise error if isinstance(error, DamagedError) else DamagedError(f"{folder}: {error!r}") from error
    return told


class Reader:
    """A checkpoint's tensors, whatever they were cut into.

    Attributes:
        tensors: Name of dtype, and shape, by name: of whole ones, whether their blocks are apart in the files or not.
        files: Bytes and checksum by name.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._folder = folder
        self._stored: Mapping[str, tuple[str, list[int]]] = manifest["tensors"]
        self._blocks: dict[str, dict[str, Cut]] = {}
        for key, told in manifest["cuts"].items():
            cut = Cut(*told)
            self._blocks.setdefault(cut.name, {})[key] = cut
        self.tensors: dict[str, tuple[str, list[int]]] = {
            name: told for name, told in self._stored.items() if name not in manifest["cuts"]
        }
        for name, blocks in self._blocks.items():
            key, cut = next(iter(blocks.items()))
            self.tensors[name] = (self._stored[key][0], list(cut.whole(self._stored[key][1])))
        self.files: dict[Any, tuple[Any, Any]] = {
            file["name"]: (file["bytes"], file["xxh3_128"]) for file in manifest["files"]
        }
        self._found: dict[str, list[tuple[int, int, str, str]]] = {}
        for file in manifest["files"]:
            for key, tensor, start, stop in file["pieces"]:
                self._found.setdefault(tensor, []).append((start, stop, file["name"], key))
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}

    def check(self, name: str) -> None:
        """Compare a file with its size and checksum in the manifest.

        Raises:
            DamagedError: If it is something else.
        """
        path, (nbytes, written) = self._folder / name, self.files[name]
        if not path.is_file() or path.stat().st_size != nbytes or _checksum(path) != written:
            raise DamagedError(f"{path} is not what was written")
        try:
            header, _ = _header(path)
            for key, found in self._found.items():
                itemsize = _dtype(self._stored[key][0]).itemsize
                for start, stop, file, entry in found:
                    begin, end = header[entry]["data_offsets"] if file == name else (0, (stop - start) * itemsize)
                    if end - begin != (stop - start) * itemsize:
                        raise DamagedError(f"{path}: {entry!r} has another length than its manifest says")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path}: {error}") from error

    def check_pieces(self) -> None:
        """See that the pieces lie within their tensors, and leave out nothing.

        Raises:
            DamagedError: If they do not.
        """
        for name in {*self._stored, *self._found}:
            if name not in self._stored or self._stored[name][0] not in _DTYPES.values():
                raise DamagedError(f"{self._folder}: the type of {name!r} is not known")
            size, at = math.prod(self._stored[name][1]), 0
            for start, stop, _, _ in sorted(self._found.get(name, [])):
                if not 0 <= start <= min(at, stop) or stop > size:
                    raise DamagedError(f"{self._folder}: elements {start} to {stop} of {name!r} cannot be")
                at = max(at, stop)
            if at < size:
                raise DamagedError(f"{self._folder}: {size - at} elements of {name!r} are in no file")

    def fill(self, wanted: Piece) -> None:
        """Read the elements of a piece into its memory; where it was cut otherwise, by way of the whole tensor.

        Raises:
            DamagedError: If some of them are nowhere.
            UsageError: If the tensor does not divide as is wanted.
        """
        if wanted.key in self._stored:
            self._fill(wanted.key, wanted)
        else:
            whole = self.whole(wanted.tensor)
            block = whole if wanted.cut is None else wanted.cut.block(whole)
            wanted.data[...] = block.reshape(-1)[wanted.start : wanted.stop]

    def whole(self, name: str) -> Array:
        """Return a tensor in memory of its own.

        Raises:
            DamagedError: If not all of it is there.
        """
        dtype, shape = self.tensors[name]
        whole = np.empty(shape, _dtype(dtype))
        blocks = self._blocks.get(name)
        if blocks is None:
            self._fill(name, Piece.whole(name, tuple(shape), whole.reshape(-1)))
            return whole
        if {cut.index for cut in blocks.values()} != set(range(next(iter(blocks.values())).of)):
            raise DamagedError(f"{self._folder}: blocks of {name!r} are in no file")
        for key, cut in blocks.items():
            cut.block(whole)[...] = self._block(key)
        return whole

    def _block(self, key: str) -> Array:
        dtype, shape = self._stored[key]
        block = np.empty(shape, _dtype(dtype))
        self._fill(key, Piece.whole(key, tuple(shape), block.reshape(-1)))
        return block

    def _fill(self, key: str, wanted: Piece) -> None:
        """Read a piece of a stored tensor; elements that several ranks have saved are read once."""
        at = wanted.start
        for start, stop, name, entry in sorted(self._found.get(key, [])):
            part = wanted.between(max(at, start), stop)
            if start <= at and part.stop > part.start:
                self._read(name, entry, part.start - start, part.data)
                at = part.stop
        if at < wanted.stop:
            raise DamagedError(f"{self._folder}: {wanted.stop - at} elements of {key!r} are in no file")

    def _read(self, name: str, key: str, first: int, target: Array) -> None:
        header, begin = self._headers.get(name) or self._headers.setdefault(name, _header(self._folder / name))
        entry = header[key]
        dtype = _dtype(_DTYPES[entry["dtype"]])
        with open(self._folder / name, "rb", buffering=0) as file:
            file.seek(begin + entry["data_offsets"][0] + first * dtype.itemsize)
            target[...] = _exactly(file, target.size * dtype.itemsize).view(dtype)


def _exactly(file: Any, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = np.empty(nbytes, np.uint8)
    left = memoryview(data)  # type: ignore[arg-type]
    while left:
        count = file.readinto(left)
        if not count:
            raise DamagedError(f"{file.name} ends too soon")
        left = left[count:]
    return data


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header, and where its data begin: 8 bytes of length, JSON, data."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT_BYTES:
            raise DamagedError(f"{path}: its header is too long")
        found: dict[str, Any] = json.loads(file.read(length))
        return found, 8 + length


def _dtype(name: str) -> np.dtype[np.generic]:
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes  # only its types need it

        found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems refuse
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

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
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import xxhash

from ...errors import UsageError
from .pieces import Tensors

_FILE = re.compile(r"[\w-]+\.safetensors")
_NAME = re.compile(r"checkpoint-(\d{12,18})")
MANIFEST = "manifest.json"
WHOLE = "model.safetensors"
_SEAL = "xxh3_128"
FORMAT = 3
_HEADER_LIMIT_BYTES = 100 << 20  # as the safetensors library has it

# The names in safetensors of the types of numpy and ml_dtypes (safetensors 0.8, src/tensor.rs).
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
    "U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


class DamagedError(ValueError):
    """A file with other contents than were written."""


def step_folder(parent: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return parent / f"checkpoint-{step:012}"


def complete_steps(parent: str | os.PathLike[str]) -> list[int]:
    """Return the steps of which there is a complete checkpoint, the newest first."""
    names: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(parent)
    steps = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
    return sorted((step for step in steps if (step_folder(Path(parent), step) / MANIFEST).exists()), reverse=True)


def check_types(tensors: Tensors) -> None:
    """Refuse tensors of types that safetensors does not have.

    Raises:
        UsageError: Naming the dtypes.
    """
    unknown = sorted({dtype for dtype, _ in tensors.values()}.difference(DTYPES.values()))
    if unknown:
        raise UsageError(f"model: safetensors has no type for {', '.join(unknown)}; convert them first")


def checksum(path: Path) -> str:
    """Return the checksum of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def add_checksum(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as JSON, with a checksum of its other keys under `_SEAL`."""
    text = json.dumps(json.loads(json.dumps(manifest)))  # as it will be read
    return json.dumps(json.loads(text) | {_SEAL: xxhash.xxh3_128(text.encode()).hexdigest()})


def _read_sealed(path: Path) -> dict[str, Any]:
    """Return a manifest without its checksum, which must fit; a manifest of an earlier version has none."""
    try:
        manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
        seal = manifest.pop(_SEAL, None)
        if seal in (None, xxhash.xxh3_128(json.dumps(manifest).encode()).hexdigest()):
            return manifest
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
        manifest = _read_sealed(folder / MANIFEST)
        if manifest["format"] != FORMAT:
            raise DamagedError(f"{folder}: its format is {manifest['format']}, known is {FORMAT}")
        msgspec.convert(manifest, _TYPE)
        if any(not _FILE.fullmatch(file["name"]) for file in manifest["files"]):
            raise DamagedError(f"{folder}: its manifest names files elsewhere")
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise error if isinstance(error, DamagedError) else DamagedError(f"{folder}: {error!r}") from error
    return manifest


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header, and where its data begin: 8 bytes of length, JSON, data."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT_BYTES:
            raise DamagedError(f"{path}: its header is too long")
        header: dict[str, Any] = json.loads(file.read(length))
        return header, 8 + length

"""Writes checkpoints: each rank its part, one file of all of them, and the folder that appears when all is in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError
from ...state.parts import sync_folder
from .files import FORMAT, MANIFEST, WHOLE, add_checksum, checksum, complete_steps, read_header, step_folder
from .pieces import Shard
from .reader import Reader

if TYPE_CHECKING:
    from ..tree import Array


def write_part(folder: Path, rank: int, ranks: int, pieces: Sequence[Shard], notes: Mapping[str, object]) -> None:
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
    header = {"tensors": shapes, "pieces": parts, "cuts": cuts, "notes": notes}
    _write_file(folder / f"rank-{rank}-of-{ranks}.safetensors", tensors, header)


def merge(folder: Path, ranks: int) -> None:
    """Replace the files of all ranks by one file, with each whole tensor under its name."""
    manifest = _make_manifest(folder, ranks, 0, {})
    reader = Reader(folder, manifest)
    tensors = {name: reader.whole(name) for name in reader.tensors}
    parts = [[name, name, 0, array.size] for name, array in tensors.items()]
    header = {"tensors": dict(reader.tensors), "pieces": parts, "cuts": {}, "notes": manifest["notes"]}
    _write_file(folder / WHOLE, tensors, header)
    for name in reader.files:
        (folder / name).unlink()


def commit(written: Path, parent: Path, step: int, ranks: int, extra: Mapping[str, object], *, keep: int) -> None:
    """Rename a written folder to the checkpoint of its step; remove older checkpoints and unfinished folders.

    Raises:
        UsageError: If the part of a rank is not seen here.
        OSError: If it cannot be written.
    """
    with open(written / MANIFEST, "w", encoding="utf-8") as file:
        file.write(add_checksum(_make_manifest(written, ranks, step, extra)))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(written)
    final = step_folder(parent, step)
    if final.exists():  # of an earlier attempt
        os.rename(final, written.with_suffix(".old"))
    os.rename(written, final)
    sync_folder(parent)
    for old in complete_steps(parent)[keep:]:
        shutil.rmtree(step_folder(parent, old), ignore_errors=True)
    for name in os.listdir(parent):
        if name.startswith(".checkpoint-"):  # which somebody was killed at
            shutil.rmtree(parent / name, ignore_errors=True)


def _write_file(path: Path, tensors: Mapping[str, Array], header: Mapping[str, object]) -> None:
    """Write tensors and the header of a checkpoint as a safetensors file, and flush it to the disk."""
    from safetensors import SafetensorError, TensorSpec, serialize_file  # needed to save only

    arrays = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
    specs = {
        key: TensorSpec(dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for key, array in arrays.items()
    }
    try:
        serialize_file(specs, path, metadata={"overlap": json.dumps(header)})
    except SafetensorError as error:  # a full disk, among others
        raise OSError(f"{path}: {error}") from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _make_manifest(folder: Path, ranks: int, step: int, extra: Mapping[str, object]) -> dict[str, Any]:
    """Return the manifest of the files in a folder, from their headers and checksums."""
    names = [WHOLE] if (folder / WHOLE).exists() else [f"rank-{rank}-of-{ranks}.safetensors" for rank in range(ranks)]
    files, tensors, notes, cuts = [], {}, {}, {}
    for rank, name in enumerate(names):
        path = folder / name
        if not path.exists():
            raise UsageError(
                f"checkpoint: rank 0 does not see what rank {rank} has written to {folder.parent}; "
                "name a folder that all ranks see"
            )
        header = json.loads(read_header(path)[0]["__metadata__"]["overlap"])
        tensors.update(header["tensors"])
        notes.update(header["notes"])
        cuts.update(header["cuts"])
        size = path.stat().st_size
        files.append({"name": name, "bytes": size, "xxh3_128": checksum(path), "pieces": header["pieces"]})
    manifest = {"format": FORMAT, "step": step, "ranks": ranks, "extra": dict(extra)}
    return manifest | {"tensors": tensors, "cuts": cuts, "files": files, "notes": notes}

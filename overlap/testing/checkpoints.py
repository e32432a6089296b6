"""Whether a checkpoint of PyTorch can be restored: a file of `torch.save`, or a folder of distributed checkpoints."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader


def find_damage(path: Path) -> str:
    """Return why a checkpoint cannot be restored, as text; "" if its bytes show no damage."""
    if path.is_dir():
        return _folder_damage(path)
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # It has classes of the program, which are not loaded here: check only the bytes.
        return _archive_damage(path)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        return f"{path.name} cannot be read: {str(error).splitlines()[0]}"
    return ""


def _archive_damage(path: Path) -> str:
    """Return the damage of a file of `torch.save` that the checksums of its archive show; "" if none."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        return f"{path.name} cannot be read: {error}"
    return f"{path.name} is damaged in {damaged}" if damaged else ""


def _folder_damage(path: Path) -> str:
    """Return the damage of a distributed checkpoint: its first part that is missing or too short; "" if none."""
    if not (path / ".metadata").exists():
        parts = len(list(path.glob("*.distcp")))
        return f"{path.name} has {parts} files of ranks and no .metadata: it was never finished"
    metadata = FileSystemReader(path).read_metadata()
    for index, part in (metadata.storage_data or {}).items():
        file = path / part.relative_path
        if not file.exists():
            return f"{path.name} lacks {part.relative_path}, which has {index.fqn!r}"
        if file.stat().st_size < part.offset + part.length:
            return f"{path.name}: {part.relative_path} is too short for {index.fqn!r}"
    return ""

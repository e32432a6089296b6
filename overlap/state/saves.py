"""Folders of saves: a folder for each save, in it a file for each rank.

::

    DIR/step-000000000040-5f0c9a1b2c3d4e5f/rank-0-of-2.safetensors
                                           rank-1-of-2.safetensors     or model.safetensors alone
        checkpoint-000000000040-1b2c3d4e5f5f0c9a/...                   checkpoints of models, apart from states

A file appears under its name by a rename, after all its bytes are on the disk. A save is complete when all its files
are there, so there is nothing to mark, and nothing that a kill could leave half done. The hexadecimal number is drawn
anew by each attempt: files that an earlier attempt has left unfinished at the same step never count for a later one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

WHOLE = 0
"""Number of ranks in the names of the files of a save: none, it is one file, of the whole model."""

_FILE = re.compile(r"rank-(\d+)-of-([1-9]\d*)\.safetensors|model\.safetensors")


class SaveKind(NamedTuple):
    """Kind of saves; a folder may have several."""

    prefix: str  # Begins the names of their folders
    title: str  # Name in messages
    resume: str  # Call that goes on from the newest, in messages
    before: str  # Pattern of the names of files that versions before had


STATES = SaveKind("step", "state", "rank.state.latest()", r"part-\d+-of-\d+\.state")
CHECKPOINTS = SaveKind("checkpoint", "checkpoint", "Checkpoints.restore", r"manifest\.json")


class Save(NamedTuple):
    """One save: which step, by which attempt. Later steps are greater."""

    step: int
    nonce: int


Found: TypeAlias = "Mapping[tuple[Save, int], set[int]]"
"""The ranks with files, by the save and the number of ranks in the names of its files."""


def file_names(ranks: int) -> list[str]:
    """Return the names of the files of a complete save."""
    return [f"rank-{rank}-of-{ranks}.safetensors" for rank in range(ranks)] or ["model.safetensors"]


class Saves:
    """The saves of one kind in a folder, as one process sees them.

    Args:
        folder: Made when something is written; None: there are no saves.
        kind: The kind.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, kind: SaveKind) -> None:
        self.folder: Path | None = None if folder is None else Path(folder)
        self.kind: SaveKind = kind
        self._name = re.compile(rf"{kind.prefix}-(\d{{12,18}})(?:-([0-9a-f]{{16}}))?")

    def path(self, save: Save) -> Path:
        """Return the folder of a save."""
        return Path(self.folder or "") / f"{self.kind.prefix}-{save.step:012}-{save.nonce:016x}"

    def find(self) -> dict[tuple[Save, int], set[int]]:
        """Return the files of saves.

        Pipes, sockets, devices, folders and links that lead to no file are passed over: a pipe could not even be opened
        without a writer.
        """
        saves: dict[tuple[Save, int], set[int]] = {}
        for save in self.folders():
            for name in _list_names(self.path(save)):
                match = _FILE.fullmatch(name)
                if match is not None and (self.path(save) / name).is_file():
                    rank, ranks = map(int, match.groups(default=WHOLE))
                    saves.setdefault((save, ranks), set()).add(rank)
        return saves

    def folders(self) -> list[Save]:
        """Return the saves that have a folder here, complete or not."""
        matches = map(self._name.fullmatch, _list_names(self.folder))
        saves = [Save(int(match[1]), int(match[2], 16)) for match in matches if match and match[2]]
        return [save for save in saves if self.path(save).is_dir()]

    def complete(self) -> list[Save]:
        """Return the saves whose files are all here, the newest first."""
        return sorted({save for save, _ in complete(self.find())}, reverse=True)

    def find_older_version(self) -> str:
        """Return the path of a save by an older version of this package, whose files were different; "" if none."""
        folders = [name for name in _list_names(self.folder) if self._name.fullmatch(name)]
        for folder in (Path(self.folder or "") / name for name in sorted(folders, reverse=True)):
            if folder.is_dir() and any(re.fullmatch(self.kind.before, file) for file in _list_names(folder)):
                return str(folder)
        return ""

    def remove(self, unwanted: Callable[[Save], bool]) -> None:
        """Remove saves; several processes may do so, and be killed meanwhile."""
        for save in filter(unwanted, self.folders()):
            shutil.rmtree(self.path(save), ignore_errors=True)


def complete(found: Found) -> list[tuple[Save, int]]:
    """Return the saves of which all files are found, and the number of ranks in their names, the newest first."""
    return sorted((key for key, ranks in found.items() if len(ranks) == len(file_names(key[1]))), reverse=True)


def newest_step(folder: str | None) -> int | None:
    """Return the step of the newest complete state or checkpoint in a folder, as this machine sees it; None: none."""
    return max((save.step for kind in (STATES, CHECKPOINTS) for save in Saves(folder, kind).complete()), default=None)


def _list_names(folder: Path | None) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return [] if folder is None else os.listdir(folder)
    return []

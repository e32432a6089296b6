"""Folders of saves: a folder for each save, in it a file for each rank.

::

    DIR/step-000000000040-5f0c9a1b2c3d4e5f/rank-0-of-2.safetensors
                                           rank-1-of-2.safetensors     or model.safetensors alone
        checkpoint-000000000040-1b2c3d4e5f5f0c9a/...                   checkpoints of models, apart from states

A file gets its name by a rename, after all its bytes are on the disk. A save is complete when all its files exist, so
it needs no mark, and a kill can leave nothing half done. Each attempt draws a new hexadecimal number: so files that an
earlier attempt has left at the same step never count for a later attempt.
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
"""Stands for the number of ranks if a save is one file with the whole model, whose name has no rank."""

_FILE = re.compile(r"rank-(\d+)-of-([1-9]\d*)\.safetensors|model\.safetensors")


class SaveKind(NamedTuple):
    """A kind of saves: states or checkpoints. One folder may have both."""

    prefix: str  # Prefix of the names of the saves' folders
    title: str  # Name of a save, for messages
    resume: str  # Call that restores the newest save, for messages
    before: str  # Regular expression of file names that only earlier versions of this package wrote


STATES = SaveKind("step", "state", "rank.state.latest()", r"part-\d+-of-\d+\.state")
CHECKPOINTS = SaveKind("checkpoint", "checkpoint", "Checkpoints.restore", r"manifest\.json")


class Save(NamedTuple):
    """Identity of a save. Saves compare by their step first."""

    step: int  # Step of the save
    nonce: int  # Random number of the attempt that made it


Found: TypeAlias = "Mapping[tuple[Save, int], set[int]]"
"""For a save, and the number of ranks in its file names (or `WHOLE`): the ranks whose files exist."""


def file_names(ranks: int) -> list[str]:
    """Return the names of all files of a save by `ranks` ranks, in the order of ranks; for `WHOLE` the single name."""
    if ranks == WHOLE:
        return ["model.safetensors"]
    return [f"rank-{rank}-of-{ranks}.safetensors" for rank in range(ranks)]


class Saves:
    """The saves of one kind in a folder, as one process sees them.

    Args:
        folder: The folder; it is made when something is written. None: there are no saves.
        kind: The kind of the saves.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, kind: SaveKind) -> None:
        self.folder: Path | None = None if folder is None else Path(folder)
        self.kind: SaveKind = kind
        self._name = re.compile(rf"{kind.prefix}-(\d{{12,18}})(?:-([0-9a-f]{{16}}))?")

    def folder_of(self, save: Save) -> Path:
        """Return the folder of a save."""
        return Path(self.folder or "") / f"{self.kind.prefix}-{save.step:012}-{save.nonce:016x}"

    def find_files(self) -> dict[tuple[Save, int], set[int]]:
        """Return the files of all saves that this process sees, as `Found` describes.

        Only regular files count: opening a pipe, for example, would block.
        """
        saves: dict[tuple[Save, int], set[int]] = {}
        for save in self.begun_saves():
            for name in _list_names(self.folder_of(save)):
                match = _FILE.fullmatch(name)
                # "model.safetensors" has no numbers: both are `WHOLE` then.
                if match is not None and (self.folder_of(save) / name).is_file():
                    rank, ranks = map(int, match.groups(default=WHOLE))
                    saves.setdefault((save, ranks), set()).add(rank)
        return saves

    def begun_saves(self) -> list[Save]:
        """Return the saves that have a folder here, complete or not."""
        matches = map(self._name.fullmatch, _list_names(self.folder))
        saves = [Save(int(match[1]), int(match[2], 16)) for match in matches if match and match[2]]
        return [save for save in saves if self.folder_of(save).is_dir()]

    def list_complete(self) -> list[Save]:
        """Return the saves of which this process sees all files, the newest first."""
        return sorted({save for save, _ in complete_saves(self.find_files())}, reverse=True)

    def find_older_version(self) -> str:
        """Return the path of the newest save by an earlier version of this package, or "" if there is none."""
        folders = [name for name in _list_names(self.folder) if self._name.fullmatch(name)]
        for folder in (Path(self.folder or "") / name for name in sorted(folders, reverse=True)):
            if folder.is_dir() and any(re.fullmatch(self.kind.before, file) for file in _list_names(folder)):
                return str(folder)
        return ""

    def remove(self, unwanted: Callable[[Save], bool]) -> None:
        """Remove the saves for which `unwanted` is true, complete or not; files that cannot be removed stay.

        Several processes may remove the same saves at once. Files that a killed process leaves are removed by the next
        call.
        """
        for save in filter(unwanted, self.begun_saves()):
            shutil.rmtree(self.folder_of(save), ignore_errors=True)


def complete_saves(found: Found) -> list[tuple[Save, int]]:
    """Return the saves of which all files were found, the newest first, each with its number of ranks (or `WHOLE`)."""
    return sorted((key for key, ranks in found.items() if len(ranks) == len(file_names(key[1]))), reverse=True)


def newest_step(folder: str | None) -> int | None:
    """Return the step of the newest complete state or checkpoint that this host sees in a folder; None if none."""
    return max(
        (save.step for kind in (STATES, CHECKPOINTS) for save in Saves(folder, kind).list_complete()), default=None
    )


def _list_names(folder: Path | None) -> list[str]:
    """Return the names in a folder; none if there is no folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return [] if folder is None else os.listdir(folder)
    return []

"""Files of the state store: a folder for each save, in it a file for each rank, written whole or not at all.

::

    DIR/step-000000000040-5f0c9a1b2c3d4e5f/part-0-of-2.state
                                           part-1-of-2.state

A file appears under its name by a rename, after all its bytes are on the disk. A save is complete when all its files
are there, so there is nothing to mark, and nothing that a kill could leave half done. The hexadecimal number is drawn
anew by each attempt: files that an earlier attempt has left unfinished at the same step never count for a later one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_FOLDER = re.compile(r"step-(\d{12,18})-([0-9a-f]{16})")
_FILE = re.compile(r"part-(\d+)-of-(\d+)\.state")


class Save(NamedTuple):
    """One save: which step, by which attempt. Later steps are greater."""

    step: int
    nonce: int


class Parts:
    """The files of a state store, as one process sees them.

    Args:
        folder: Where they are; made when something is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder: Path = Path(folder)

    def write(self, save: Save, rank: int, ranks: int, chunks: Iterable[bytes]) -> None:
        """Write the part of a rank: when this returns it is on the disk, and until then there is none of that name.

        Raises:
            OSError: If it cannot be written; it names the file, of which nothing is left.
        """
        path = self._part_path(save, rank, ranks)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".writing-{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            error.filename = error.filename or str(path)  # the system names none of those that are open
            temporary.unlink(missing_ok=True)
            raise
        for folder in (path.parent, self.folder):
            sync_folder(folder)

    def read(self, save: Save, rank: int, ranks: int) -> bytearray:
        """Return the bytes of a rank's part of a save."""
        with open(self._part_path(save, rank, ranks), "rb") as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            file.readinto(data)
        return data

    def find_parts(self) -> dict[Save, dict[int, set[int]]]:
        """Return for each save, by the number of ranks that saved it, the ranks whose parts are files here.

        Pipes, sockets, devices, folders and links that lead to no file are passed over: a pipe could not even be opened
        without a writer.
        """
        saves: dict[Save, dict[int, set[int]]] = {}
        for save, folder in self._list_saves():
            for name in _list_names(folder):
                part = _FILE.fullmatch(name)
                if part is not None and os.path.isfile(folder / name):
                    rank, ranks = map(int, part.groups())
                    saves.setdefault(save, {}).setdefault(ranks, set()).add(rank)
        return saves

    def complete_saves(self) -> list[tuple[Save, int]]:
        """Return the saves whose parts are all here, the newest first, and the number of ranks of each."""
        whole = [(save, n) for save, parts in self.find_parts().items() for n, here in parts.items() if len(here) == n]
        return sorted(whole, reverse=True)

    def remove_before(self, newest: Sequence[Save]) -> None:
        """Remove the saves before these, the newest last; several processes may do so, and be killed meanwhile.

        Not the next save of the same attempt, which a rank that is ahead may be writing.
        """
        for save, folder in self._list_saves():
            ahead = save.nonce == newest[-1].nonce and save.step > newest[0].step
            if save not in newest and not ahead:
                shutil.rmtree(folder, ignore_errors=True)

    def _list_saves(self) -> list[tuple[Save, Path]]:
        """Return the saves that have a folder here, with the folder; complete or not."""
        matches = [(name, _FOLDER.fullmatch(name)) for name in _list_names(self.folder)]
        folders = [(Save(int(m[1]), int(m[2], 16)), self.folder / name) for name, m in matches if m is not None]
        return [(save, folder) for save, folder in folders if os.path.isdir(folder)]

    def _part_path(self, save: Save, rank: int, ranks: int) -> Path:
        """Return the path of a rank's part of a save."""
        return self.folder / _folder_name(save) / f"part-{rank}-of-{ranks}.state"


def _folder_name(save: Save) -> str:
    """Return the name of the folder of a save."""
    return f"step-{save.step:012}-{save.nonce:016x}"


def _list_names(folder: Path) -> list[str]:
    """Return the names in a folder; none if there is no folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems refuse
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

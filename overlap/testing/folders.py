"""Working directory of a run: a fresh folder with the contents of the current folder at the start of the run."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp

# Entries of the current folder and the folders below it that a run finds as files and folders of its own. Folders with
# more are links as a whole. To link and copy that many takes 50 ms.
_OWN_ENTRIES = 1000
# Longest file that is copied. A longer one is a link.
_COPIED_BYTES = 1 << 20
# File that Python's `venv` leaves in a virtual environment.
VENV_MARK = "pyvenv.cfg"


class RunFolder:
    """Working directory of one run; it is removed with this object.

    What the program writes to it is gone with the next run, so that no seed finds files of an earlier one. Paths that
    begin with ".." lead where they lead from the current folder.
    """

    path: Path

    def __init__(self) -> None:
        origin = Path.cwd()
        root = Path(mkdtemp(prefix="overlap-test-")).resolve()
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        self.path = root.joinpath(*origin.parts[1:])
        self.path.mkdir(parents=True, exist_ok=True)
        for parent in origin.parents:
            _link_all(parent, root.joinpath(*parent.parts[1:]))
        _fill_folder(origin, self.path)


def _link_all(origin: Path, folder: Path) -> None:
    """Link the entries of a folder that another one lacks."""
    for entry in _sorted_entries(origin):
        link = folder / entry.name
        if not os.path.lexists(link):
            link.symlink_to(entry.path)


def _fill_folder(origin: Path, folder: Path) -> None:
    """Copy short files and folders, the outer folders first, and link the rest."""
    entries_left, folders = _OWN_ENTRIES, [(origin, folder)]
    for source, target in folders:
        entries = _sorted_entries(source)
        if source != origin and (len(entries) > entries_left or any(entry.name == VENV_MARK for entry in entries)):
            target.symlink_to(source)
            continue
        entries_left -= len(entries)
        target.mkdir(exist_ok=True)
        for entry in entries:
            copied = target / entry.name
            if entry.is_symlink() or entry.name.startswith("."):
                copied.symlink_to(entry.path)
            elif entry.is_dir():
                folders.append((Path(entry.path), copied))
            elif entry.is_file() and entry.stat().st_size <= _COPIED_BYTES and os.access(entry.path, os.R_OK):
                shutil.copy2(entry.path, copied)
            else:
                copied.symlink_to(entry.path)


def _sorted_entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as scan:
            return sorted(scan, key=lambda entry: entry.name)
    except OSError:
        return []

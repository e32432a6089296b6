"""Working directory of a run: a fresh folder with the contents of the current folder at the start of the run."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp

# Most entries of the current folder, and of folders below it, that are copied or linked one by one, which takes 50 ms.
# Further folders become one link each.
_OWN_ENTRIES = 1000
# Longest file that is copied. A longer one is a link.
_COPIED_BYTES = 1 << 20
# File that Python's `venv` leaves in a virtual environment.
VENV_MARK = "pyvenv.cfg"


class RunFolder:
    """Working directory of one run: a temporary copy of the current folder, which is removed with this object.

    Short files and folders are copied, the rest are links. So no run finds files that an earlier one has written. Paths
    that begin with ".." lead to the same files as from the current folder.

    Attributes:
        path: The working directory.
    """

    def __init__(self) -> None:
        origin = Path.cwd()
        root = Path(mkdtemp(prefix="overlap-test-")).resolve()
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        # The folder has the same path below `root` as the current folder below "/": so ".." works.
        self.path: Path = root.joinpath(*origin.parts[1:])
        self.path.mkdir(parents=True, exist_ok=True)
        for parent in origin.parents:
            _link_entries(parent, root.joinpath(*parent.parts[1:]))
        _fill_folder(origin, self.path)


def _link_entries(origin: Path, folder: Path) -> None:
    """Put a link to each entry of `origin` into `folder`, unless `folder` has an entry of that name."""
    for entry in _sorted_entries(origin):
        link = folder / entry.name
        if not os.path.lexists(link):
            link.symlink_to(entry.path)


def _fill_folder(origin: Path, folder: Path) -> None:
    """Fill `folder` with the contents of `origin`: copies of short files and of folders, and links to the rest.

    Outer folders come first. When `_OWN_ENTRIES` entries are used up, further folders become links.
    """
    entries_left, folders = _OWN_ENTRIES, [(origin, folder)]
    # The loop appends inner folders to the list that it visits.
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
    """Return the entries of a folder, sorted by name; [] if it cannot be read."""
    try:
        with os.scandir(folder) as scan:
            return sorted(scan, key=lambda entry: entry.name)
    except OSError:
        return []

"""Tensors out of the files of a checkpoint, whole or in pieces, whatever they were cut into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ...errors import UsageError
from ...runtime.forms import dtype_of
from ...state.files import OWN, Piece, SavedFile, write_file
from .pieces import Cut, Shard

if TYPE_CHECKING:
    from ..tree import Array


class Reader:
    """A checkpoint's tensors, whatever they were cut into.

    Attributes:
        tensors: Name of dtype, and shape, by name: of whole ones, whether their blocks are apart in the files or not.

    Raises:
        UsageError: Some elements are in no file.
    """

    def __init__(self, files: Sequence[SavedFile]) -> None:
        self._folder = files[0].path.parent
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._stored: dict[str, tuple[str, tuple[int, ...]]] = {}  # by key: a whole tensor, or a block
        self._pieces: dict[str, list[tuple[int, int, SavedFile, str]]] = {}
        self._blocks: dict[str, dict[str, Cut]] = {}
        for file in files:
            for entry, piece in file.about.pieces.items():
                form = self._stored.setdefault(piece.key, (file.dtype(entry), piece.shape))
                self._pieces.setdefault(piece.key, []).append((piece.start, piece.stop, file, entry))
                if piece.cut is None:
                    self.tensors[piece.key] = form
                else:
                    cut = Cut(*piece.cut)
                    self._blocks.setdefault(cut.name, {})[piece.key] = cut
                    self.tensors[cut.name] = form[0], cut.whole(form[1])
        for key, (_, shape) in self._stored.items():
            self._pieces[key].sort(key=lambda piece: piece[:2])
            at = 0
            for start, stop, _, _ in self._pieces[key]:
                at = max(at, stop) if start <= at else at
            if at < math.prod(shape):
                raise self._missing_elements_error(math.prod(shape) - at, key)

    def _missing_elements_error(self, count: int, name: str) -> UsageError:
        return UsageError(
            f"checkpoint: {count} elements of {name!r} are in no file of {self._folder}: a rank that has them did not "
            "save them, or its file is of another save; copy that file there, or name the folder of another checkpoint"
        )

    def fill(self, piece: Shard) -> None:
        """Read a piece into its memory; if the tensor was saved in other blocks, through the whole tensor.

        Raises:
            UsageError: If some elements are in no file, a file is not on this host, or the tensor does not divide into
                the blocks of the piece.
        """
        if piece.key in self._stored:
            self._fill_stored(piece)
        else:
            whole = self.whole(piece.tensor)
            block = whole if piece.cut is None else piece.cut.block(whole)
            piece.data[...] = block.reshape(-1)[piece.start : piece.stop]

    def whole(self, name: str) -> Array:
        """Return all of a tensor in new memory, from its pieces or blocks.

        Raises:
            UsageError: As for `fill`.
        """
        if name not in self._blocks:
            return self._read_stored(name)
        dtype, shape = self.tensors[name]
        array, left = np.empty(shape, dtype_of(dtype)), set(range(next(iter(self._blocks[name].values())).of))
        for key, cut in self._blocks[name].items():
            cut.block(array)[...] = self._read_stored(key)
            left.discard(cut.index)
        if left:
            raise self._missing_elements_error(len(left) * array.size // cut.of, name)
        return array

    def _read_stored(self, key: str) -> Array:
        """Return a stored tensor or block in new memory."""
        dtype, shape = self._stored[key]
        array = np.empty(shape, dtype_of(dtype))
        self._fill_stored(Shard.whole(key, shape, array.reshape(-1)))
        return array

    def _fill_stored(self, piece: Shard) -> None:
        """Read a piece of a stored tensor; elements that several ranks have saved are read once."""
        offset = piece.start
        for start, stop, file, entry in self._pieces[piece.key]:
            part = piece.between(max(offset, start), stop)
            if part.stop > part.start:
                try:
                    file.read(entry, part.start - start, part.data)
                except FileNotFoundError:
                    raise UsageError(
                        f"checkpoint: {file.path} is on another host; copy it here, or name a folder that all ranks see"
                    ) from None
                offset = part.stop


def merge(files: Sequence[SavedFile], path: Path) -> None:
    """Write one file with each whole tensor of a checkpoint under its name."""
    reader = Reader(files)
    tensors = {name: reader.whole(name) for name in reader.tensors}
    pieces = {name: Piece(name, array.shape, 0, array.size) for name, array in tensors.items()}
    own = {name: file.array(name) for file in files for name in file.names if name.startswith(OWN)}
    notes = {part: note for file in files for part, note in file.about.notes.items()}
    form = {rank: tree for file in files for rank, tree in file.about.form.items()}
    about = msgspec.structs.replace(files[0].about, pieces=pieces, notes=notes, form=form)
    write_file(path, tensors | own, about)

"""Reading tensors from the files of a checkpoint, whole or in pieces, however they were cut when they were saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ...errors import UsageError
from ...runtime.forms import dtype_of
from ...state.files import OWN, Piece, SavedFile, write_file
from .pieces import Cut, Shard

if TYPE_CHECKING:
    from ..tree import Array


class _StoredPiece(NamedTuple):
    """Elements of a tensor or block that one file has."""

    start: int  # flat index of the first element
    stop: int  # flat index after the last one
    file: SavedFile
    entry: str  # name of these elements in the file


class Reader:
    """The tensors of a checkpoint, which may be cut into pieces and blocks in several files.

    Args:
        files: All files of the checkpoint, at least one.

    Attributes:
        tensors: Name of the dtype, and shape, of each whole tensor, by the tensor's name.

    Raises:
        UsageError: Some elements are in no file.
    """

    def __init__(self, files: Sequence[SavedFile]) -> None:
        self._folder = files[0].path.parent
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        # Keys are those of `Shard.key`: of a whole tensor, or of one block of a tensor.
        self._stored: dict[str, tuple[str, tuple[int, ...]]] = {}  # dtype and shape, by key
        self._pieces: dict[str, list[_StoredPiece]] = {}  # pieces in files, by key
        self._blocks: dict[str, dict[str, Cut]] = {}  # for each tensor that was saved in blocks: its blocks, by key
        for file in files:
            for entry, piece in file.facts.pieces.items():
                form = self._stored.setdefault(piece.key, (file.dtype_name(entry), piece.shape))
                self._pieces.setdefault(piece.key, []).append(_StoredPiece(piece.start, piece.stop, file, entry))
                if piece.cut is None:
                    self.tensors[piece.key] = form
                else:
                    cut = Cut(*piece.cut)
                    self._blocks.setdefault(cut.name, {})[piece.key] = cut
                    self.tensors[cut.name] = form[0], cut.whole(form[1])
        for key, (_, shape) in self._stored.items():
            self._pieces[key].sort(key=lambda piece: (piece.start, piece.stop))
            at = 0  # the pieces so far have all elements before this index
            for stored in self._pieces[key]:
                at = max(at, stored.stop) if stored.start <= at else at
            if at < math.prod(shape):
                raise self._missing_elements_error(math.prod(shape) - at, key)

    def _missing_elements_error(self, count: int, name: str) -> UsageError:
        return UsageError(
            f"checkpoint: {count} elements of {name!r} are in no file of {self._folder}: a rank that has them did not "
            "save them, or its file is of another save; copy that file there, or name the folder of another checkpoint"
        )

    def read_piece(self, piece: Shard) -> None:
        """Read a piece into the memory `piece.data`.

        If the tensor was saved in other blocks than the piece is of, the whole tensor is read first.

        Raises:
            UsageError: Some elements are in no file, a file is not on this host, or the tensor does not divide into the
                blocks of the piece.
        """
        # The tensor was saved whole, or in the same blocks as the piece is of.
        if piece.key in self._stored:
            self._read_stored_piece(piece)
        else:
            whole = self.read_whole_tensor(piece.tensor)
            block = whole if piece.cut is None else piece.cut.block(whole)
            piece.data[...] = block.reshape(-1)[piece.start : piece.stop]

    def read_whole_tensor(self, name: str) -> Array:
        """Return a whole tensor in new memory, joined from the pieces or blocks in the files.

        Raises:
            UsageError: As for `read_piece`.
        """
        if name not in self._blocks:
            return self._read_stored_tensor(name)
        dtype, shape = self.tensors[name]
        # `left`: indices of the blocks that have not been read.
        array, left = np.empty(shape, dtype_of(dtype)), set(range(next(iter(self._blocks[name].values())).of))
        for key, cut in self._blocks[name].items():
            cut.block(array)[...] = self._read_stored_tensor(key)
            left.discard(cut.index)
        if left:
            raise self._missing_elements_error(len(left) * array.size // cut.of, name)
        return array

    def _read_stored_tensor(self, key: str) -> Array:
        """Return a tensor or block in new memory, as it was saved under `key`."""
        dtype, shape = self._stored[key]
        array = np.empty(shape, dtype_of(dtype))
        self._read_stored_piece(Shard.of_whole_tensor(key, shape, array.reshape(-1)))
        return array

    def _read_stored_piece(self, piece: Shard) -> None:
        """Read a piece of a tensor that was saved under the piece's key; elements in several files are read once.

        Raises a `UsageError` if a file is not on this host.
        """
        offset = piece.start
        for stored in self._pieces[piece.key]:
            # Pieces in files may overlap: continue where the last one ended.
            part = piece.part_between(max(offset, stored.start), stored.stop)
            if part.stop > part.start:
                try:
                    stored.file.read_into(stored.entry, part.start - stored.start, part.data)
                except FileNotFoundError:
                    raise UsageError(
                        f"checkpoint: {stored.file.path} is on another host; copy it here, or name a folder that all "
                        "ranks see"
                    ) from None
                offset = part.stop


def write_merged_file(files: Sequence[SavedFile], path: Path) -> None:
    """Write one file in which each tensor of a checkpoint is whole, under the tensor's name.

    The file also gets the notes and own states of all ranks, and the other facts of the first file.

    Args:
        files: All files of the checkpoint.
        path: The file to write.

    Raises:
        UsageError: Some elements are in no file, or a file is not on this host.
    """
    reader = Reader(files)
    tensors = {name: reader.read_whole_tensor(name) for name in reader.tensors}
    pieces = {name: Piece(name, array.shape, 0, array.size) for name, array in tensors.items()}
    notes = {part: note for file in files for part, note in file.facts.notes.items()}
    # Own states of ranks: arrays whose names begin with OWN, and for each rank the tree that refers to its arrays.
    state_arrays = {name: file.read_array(name) for file in files for name in file.names if name.startswith(OWN)}
    state_trees = {rank: tree for file in files for rank, tree in file.facts.form.items()}
    facts = msgspec.structs.replace(files[0].facts, pieces=pieces, notes=notes, form=state_trees)
    write_file(path, tensors | state_arrays, facts)

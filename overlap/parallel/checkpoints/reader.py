"""Tensors out of the files of a checkpoint, whole or in pieces, whatever they were cut into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.forms import dtype_of
from .files import DTYPES, DamagedError, checksum, read_header
from .pieces import Cut, Shard

if TYPE_CHECKING:
    from ..tree import Array


class Reader:
    """A checkpoint's tensors, whatever they were cut into.

    Attributes:
        tensors: Name of dtype, and shape, by name: of whole ones, whether their blocks are apart in the files or not.
        files: Bytes and checksum by name.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._folder = folder
        self._stored: Mapping[str, tuple[str, list[int]]] = manifest["tensors"]
        self._blocks: dict[str, dict[str, Cut]] = {}
        for key, numbers in manifest["cuts"].items():
            cut = Cut(*numbers)
            self._blocks.setdefault(cut.name, {})[key] = cut
        self.tensors: dict[str, tuple[str, list[int]]] = {
            name: form for name, form in self._stored.items() if name not in manifest["cuts"]
        }
        for name, blocks in self._blocks.items():
            key, cut = next(iter(blocks.items()))
            self.tensors[name] = (self._stored[key][0], list(cut.whole(self._stored[key][1])))
        self.files: dict[Any, tuple[Any, Any]] = {
            file["name"]: (file["bytes"], file["xxh3_128"]) for file in manifest["files"]
        }
        self._stored_pieces: dict[str, list[tuple[int, int, str, str]]] = {}
        for file in manifest["files"]:
            for key, tensor, start, stop in file["pieces"]:
                self._stored_pieces.setdefault(tensor, []).append((start, stop, file["name"], key))
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}

    def check_file(self, name: str) -> None:
        """Compare a file with its size and checksum in the manifest, and its pieces with their lengths there.

        Raises:
            DamagedError: If one differs, or the header cannot be read.
        """
        path, (nbytes, written) = self._folder / name, self.files[name]
        if not path.is_file() or path.stat().st_size != nbytes or checksum(path) != written:
            raise DamagedError(f"{path} is not what was written")
        try:
            header, _ = read_header(path)
            for key, found in self._stored_pieces.items():
                itemsize = dtype_of(self._stored[key][0]).itemsize
                for start, stop, file, entry in found:
                    begin, end = header[entry]["data_offsets"] if file == name else (0, (stop - start) * itemsize)
                    if end - begin != (stop - start) * itemsize:
                        raise DamagedError(f"{path}: {entry!r} has another length than its manifest says")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path}: {error}") from error

    def check_pieces(self) -> None:
        """Refuse stored pieces that exceed their tensors, or leave out elements.

        Raises:
            DamagedError: If they do not.
        """
        for name in {*self._stored, *self._stored_pieces}:
            if name not in self._stored or self._stored[name][0] not in DTYPES.values():
                raise DamagedError(f"{self._folder}: the type of {name!r} is not known")
            size, at = math.prod(self._stored[name][1]), 0
            for start, stop, _, _ in sorted(self._stored_pieces.get(name, [])):
                if not 0 <= start <= min(at, stop) or stop > size:
                    raise DamagedError(f"{self._folder}: elements {start} to {stop} of {name!r} cannot be")
                at = max(at, stop)
            if at < size:
                raise DamagedError(f"{self._folder}: {size - at} elements of {name!r} are in no file")

    def fill(self, piece: Shard) -> None:
        """Read the elements of a piece into its memory, through the whole tensor if it was saved in other blocks.

        Raises:
            DamagedError: If some elements are missing.
            UsageError: If the tensor does not divide into the blocks of the piece.
        """
        if piece.key in self._stored:
            self._fill_piece(piece.key, piece)
        else:
            whole = self.whole(piece.tensor)
            block = whole if piece.cut is None else piece.cut.block(whole)
            piece.data[...] = block.reshape(-1)[piece.start : piece.stop]

    def whole(self, name: str) -> Array:
        """Return all of a tensor in new memory, from its pieces or blocks.

        Raises:
            DamagedError: If not all of it is there.
        """
        dtype, shape = self.tensors[name]
        whole = np.empty(shape, dtype_of(dtype))
        blocks = self._blocks.get(name)
        if blocks is None:
            self._fill_piece(name, Shard.whole(name, tuple(shape), whole.reshape(-1)))
            return whole
        if {cut.index for cut in blocks.values()} != set(range(next(iter(blocks.values())).of)):
            raise DamagedError(f"{self._folder}: blocks of {name!r} are in no file")
        for key, cut in blocks.items():
            cut.block(whole)[...] = self._read_block(key)
        return whole

    def _read_block(self, key: str) -> Array:
        """Return a stored block of a tensor in new memory."""
        dtype, shape = self._stored[key]
        block = np.empty(shape, dtype_of(dtype))
        self._fill_piece(key, Shard.whole(key, tuple(shape), block.reshape(-1)))
        return block

    def _fill_piece(self, key: str, piece: Shard) -> None:
        """Read a piece of a stored tensor; elements that several ranks have saved are read once."""
        at = piece.start
        for start, stop, name, entry in sorted(self._stored_pieces.get(key, [])):
            part = piece.between(max(at, start), stop)
            if start <= at and part.stop > part.start:
                self._read_elements(name, entry, part.start - start, part.data)
                at = part.stop
        if at < piece.stop:
            raise DamagedError(f"{self._folder}: {piece.stop - at} elements of {key!r} are in no file")

    def _read_elements(self, name: str, key: str, first: int, target: Array) -> None:
        """Read as many elements as `target` has from an entry of a file, from element `first` on."""
        header, begin = self._headers.get(name) or self._headers.setdefault(name, read_header(self._folder / name))
        entry = header[key]
        dtype = dtype_of(DTYPES[entry["dtype"]])
        begin += entry["data_offsets"][0] + first * dtype.itemsize
        data = np.fromfile(self._folder / name, np.uint8, target.nbytes, offset=begin)
        if len(data) < target.nbytes:
            raise DamagedError(f"{self._folder / name} ends too soon")
        target[...] = data.view(dtype)

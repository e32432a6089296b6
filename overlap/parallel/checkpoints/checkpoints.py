"""Checkpoints of models: written during training, visible only once complete, restored on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import trio

from ...errors import UsageError
from ...notice import notify
from ...runtime.group import Group
from ...runtime.memory.arrays import metadata
from ...runtime.rank import Rank
from ...state.files import CODES, OWN, FileFacts, SavedFile
from ...state.saves import CHECKPOINTS, Saves
from ...state.trees import pack_tree, unpack_tree
from ...timeline.recording import format_call_site
from ...timeline.span import RoleName
from ..memory_work import users_site
from ..settings import check_count, check_is_rank, resolve_group
from .names import Naming, describe_difference
from .pieces import Cut, Shard, Tensors
from .reader import Reader, write_merged_file

if TYPE_CHECKING:
    from ..tree import Site

_STREAM = "overlap.checkpoints"

T = TypeVar("T")


class Checkpointed(Protocol):
    """A model that can be saved, such as all strategies of this package."""

    steps: int  # Number of steps that the model has made

    def tensors(self) -> Tensors:
        """Return dtype and shape of every tensor of the whole model, weights and optimizer state, by name."""

    def pieces_to_save(self) -> Sequence[Shard]:
        """Return the pieces that this rank saves. Over all ranks, every element of a tensor is in exactly one piece."""

    def pieces_to_read(self) -> Sequence[Shard]:
        """Return the pieces that this rank needs to continue; their `data` is the model's own memory, to be filled."""

    def notes(self) -> Mapping[str, object]:
        """Return further values, for JSON, that are the same on all ranks of the model."""

    def own_state(self) -> Mapping[str, object]:
        """Return the state that only this rank has, as a tree of the kind that `rank.state` saves."""

    async def wait_updates(self) -> None:
        """Wait until all updates that have been issued are done."""

    def resume(self, steps: int, notes: Mapping[str, object], own: Mapping[str, object] | None) -> str:
        """Adopt a checkpoint; called once the pieces of `pieces_to_read` have the saved values.

        Args:
            steps: Number of steps that the saved model had made.
            notes: The result of `notes` at the time of saving.
            own: The result of `own_state` on this rank at that time; None if other ranks saved the checkpoint. The
                model may keep it.

        Returns:
            A sentence on what differs from the saved model; empty if nothing does.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The checkpoint that a model goes on from."""

    step: int  # Number of steps that the saved model had made
    ranks: int  # Number of ranks that saved it
    exact: bool  # Whether later steps have the same bits as if training had not been interrupted
    why: str = ""  # The reason, if `exact` is False
    extra: Mapping[str, object] = field(default_factory=dict)  # The `extra` values that were passed to `save`


class Checkpoints:
    """The checkpoints of one model, on one rank.

    Every rank makes such an object, with the same arguments, and all calls are collective::

        checkpoints = parallel.Checkpoints(rank, "runs/a")
        await checkpoints.restore(model)
        for step in range(model.steps, 1000):
            ...
            if step % 50 == 49:
                await checkpoints.save(model)
        await checkpoints.finish()

    Under `overlap run --max-restarts`, a world goes on from the last complete checkpoint. The launcher looks for
    checkpoints in the folder of `--state-dir`.

    Args:
        rank: This rank.
        folder: Folder that all ranks see; None: the folder of `--state-dir`.
        group: The ranks that together have the whole model; None: all.
        cuts: For weights of which this rank has a block only: the place of the block in the whole model, by the
            weight's name in `model`. Weights without a cut are whole, under their own names. A checkpoint holds all
            blocks, so ranks that divide the model differently, over more or fewer ranks, can restore it.
            `ColumnLinear.cuts` and `RowLinear.cuts` return the cuts of a layer.
        whole: Whether a checkpoint is one file, `model.safetensors`, in which each weight has its name and shape. All
            weights then pass through the memory of the first rank. Otherwise each rank writes its share as a file.
        keep: Number of complete checkpoints to keep.

    Raises:
        UsageError: If no folder is known, `keep` is no number from 1, or `cuts` has a value that is no `Cut`.
    """

    def __init__(
        self,
        rank: Rank,
        folder: str | os.PathLike[str] | None = None,
        *,
        group: Group | None = None,
        cuts: Mapping[str, Cut] | None = None,
        whole: bool = False,
        keep: int = 2,
    ) -> None:
        check_is_rank(rank)
        check_count("keep", keep)
        if folder is not None and not isinstance(folder, (str, os.PathLike)):
            raise UsageError(f"folder: expected a path, got {folder!r}")
        path = folder if folder is not None else rank.state.folder
        if path is None and rank.state.real:
            raise UsageError("folder: no folder for checkpoints is known; pass one, or give --state-dir DIR")
        self._rank, self._group, self._whole = rank, resolve_group(rank, group), whole
        self._naming = Naming(cuts)
        # Key of this rank's notes: with cuts, ranks have different tensors, and so different notes.
        self._part = "" if cuts is None else f"rank {self._group.rank} {self._naming.digest}"
        self._stream = rank.stream(_STREAM)
        self._store = rank.state.open_store(Saves(path, CHECKPOINTS), self._group, self._stream, keep=keep)

    async def save(self, model: Checkpointed, extra: Mapping[str, object] | None = None) -> None:
        """Save a model as it is after its last step; return once it is copied. A task then writes the copy to disk.

        The call waits for the updates under way, for the copy of this rank's share, and for the previous checkpoint, if
        that is still being written. A rank that cannot write ends the world, and the checkpoint never appears.

        In virtual time nothing is written.

        Args:
            model: The model to be saved.
            extra: Further values for JSON that the program needs to continue, such as its position in the data. Those
                of the first rank are saved.

        Raises:
            UsageError: `model` is no model, or safetensors has no type for one of its dtypes.
        """
        site = users_site()
        _check_is_model(model)
        if unknown := sorted({dtype for dtype, _ in model.tensors().values()} - CODES.keys()):
            raise UsageError(f"model: safetensors has no type for {', '.join(unknown)}; convert them first")
        self._naming.check_cuts(model.tensors())
        await self.finish()
        await model.wait_updates()
        # Pieces of the same name are the same elements: they are saved once.
        pieces = {piece.name: piece for piece in map(self._naming.rename_piece, model.pieces_to_save())}
        own, form = pack_tree(model.own_state(), CODES, f"{OWN}{self._group.rank}:")
        arrays = {name: piece.data for name, piece in pieces.items()} | own
        copies = await self._rank.compute(
            lambda: {name: array.copy() for name, array in arrays.items()},
            name=RoleName("copy for a checkpoint", "library"),
            bytes_moved=2 * sum(array.nbytes for array in arrays.values()),
        )
        write = partial(
            self._store.save, model.steps, copies, name="checkpoint", site=site, saved_at=format_call_site(*site),
            merge=write_merged_file if self._whole else None,
            pieces={name: piece.saved_piece for name, piece in pieces.items()}, form={str(self._group.rank): form},
            notes={self._part: dict(model.notes())}, extra=dict(extra or {}),
        )  # fmt: skip
        self._rank.state.writing[self._group.ranks] = self._rank.spawn(
            write, name=f"checkpoint of step {model.steps}", errors="await", call_site=site
        )

    async def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete on disk.

        Raises:
            OSError: The checkpoint could not be written.
        """
        writing = self._rank.state.writing.pop(self._group.ranks, None)
        if writing is not None:
            await writing

    async def restore(self, model: Checkpointed) -> Restored | None:
        """Let a new model continue from the newest complete checkpoint.

        Any number of ranks may have saved the checkpoint, with any of the strategies for data parallel training. A
        damaged checkpoint is skipped, and the one before it is used. Under `--survive`, a `DataParallel` model that has
        gone on after a lost process is newer than all checkpoints: then the model stays as it is, and the result has no
        `extra`.

        Args:
            model: A model that has made no step, and whose weights have not been used.

        Returns:
            The checkpoint that was restored; None if there is no checkpoint.

        Raises:
            UsageError: On every rank: `model` is no model or has made steps, the checkpoint is of another model, or
                checkpoints exist and none can be read.
        """
        site = users_site()
        _check_is_model(model)
        if model.steps and model.steps == self._rank.epoch.step:  # under --survive, it goes on from memory
            return Restored(step=model.steps, ranks=self._group.size, exact=True)
        if model.steps:
            raise UsageError(f"model: it has made {model.steps} steps; restore one that has made none")
        await self.finish()
        await model.wait_updates()
        newest = await self._store.find_newest(name="restore", site=site)
        if newest is None:
            return None
        save, _, files = newest
        facts, folder, reader = files[0].facts, self._store.saves.folder_of(save), Reader(files)
        await self._check_saved_tensors(folder, reader.tensors, model.tensors(), site)
        notes = {part: note for file in files for part, note in file.facts.notes.items()}
        # 1 if the checkpoint has as many ranks as now, and this rank has the blocks that it saved. The minimum is 1 if
        # that is so on all ranks.
        same_rank = metadata([facts.ranks == self._group.size and self._part in notes], np.int8)
        agreed = await self._group.all_reduce(same_rank, op="min", stream=self._stream, name="restore", call_site=site)
        same = bool(agreed[0])
        own = await trio.to_thread.run_sync(self._read_pieces, reader, model.pieces_to_read(), files if same else [])
        # If no rank saved the blocks of this rank, the notes of any rank serve: they are the same on all.
        part_notes = notes[self._part] if self._part in notes else next(iter(notes.values()))
        difference = model.resume(save.step, part_notes, own)
        return self._report_restored(facts, difference, same=same)

    async def _check_saved_tensors(self, folder: Path, saved_tensors: Tensors, tensors: Tensors, site: Site) -> None:
        """Refuse a checkpoint whose tensors are not those of the model; tensors without elements do not count.

        `tensors` are those of this rank. With cuts this is collective: ranks exchange which tensors they have. Raises a
        `UsageError` that names the first difference.
        """
        self._naming.check_cuts(tensors)
        saved = {name: (dtype, tuple(shape)) for name, (dtype, shape) in saved_tensors.items()}
        expected = {name: form for name, form in self._naming.whole_tensors(tensors).items() if prod(form[1])}
        if self._naming.digest:  # with cuts, other ranks have the other tensors
            parts = await self._group.all_gather_object(expected, stream=self._stream, name="restore", call_site=site)
            for part in parts:
                expected |= {name: (dtype, tuple(shape)) for name, (dtype, shape) in part.items()}
        wrong = describe_difference(saved, expected)
        if wrong:
            raise UsageError(
                f"model: {folder} is of another model: {wrong}; "
                "restore the model that was saved, or name another folder"
            )

    def _read_pieces(self, reader: Reader, pieces: Sequence[Shard], files: Sequence[SavedFile]) -> Any:
        """Read pieces of the checkpoint into the model's memory. Blocks on the disk, so it runs in a thread.

        Returns the `own_state` that this rank has saved in one of `files`; None if there is none.
        """
        for piece in pieces:
            reader.read_piece(self._naming.rename_piece(piece))
        own = str(self._group.rank)
        mine = (file for file in files if own in file.facts.form)
        return next((unpack_tree(file.facts.form[own], file.read_array) for file in mine), None)

    def _report_restored(self, facts: FileFacts, difference: str, *, same: bool) -> Restored:
        """Return the `Restored` of a checkpoint; if later bits will differ, the first rank prints the reasons.

        `difference` is the sentence of `model.resume`. With `same`, as many ranks as now have saved the checkpoint, and
        each has the blocks that it saved.
        """
        ranks, now, reasons = facts.ranks, self._group.size, [difference] if difference else []
        if ranks != now:
            reasons.append(
                f"{ranks} ranks saved it and {now} go on, and gradients that are means of other parts round differently"
            )
        elif not same:
            reasons.append("its ranks had other blocks of the model, and sums of other blocks round differently")
        why = "; ".join(reasons)
        if why and self._group.rank == 0:
            notify(
                f"checkpoint of step {facts.step}: its bits are all here, those of later steps will be others: {why}"
            )
        return Restored(step=facts.step, ranks=ranks, exact=not why, why=why, extra=facts.extra)


def _check_is_model(model: object) -> None:
    """Refuse an object that is no model of `overlap.parallel`."""
    if not hasattr(model, "tensors"):
        raise UsageError(
            f"model: expected one of overlap.parallel, such as DataParallel, got {type(model).__name__}; "
            "arrays of your own are kept by rank.state.save"
        )
